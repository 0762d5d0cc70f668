"""A cache goes to a file and comes back, in another process, too; what is not such a file is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers_models import FAMILIES, HYBRIDS, SPARSE, over, tiny

from tersekv import KV_FORMATS, OutOfPagesError, PagedKVCache, UnsupportedError, export_pages
from tersekv.integrations.transformers import TersekvCache, TersekvStaticCache

IDS = torch.arange(4, 84).reshape(2, 40)
MASK = torch.ones_like(IDS)
MASK[1, :7] = 0


def prompted(model, columns=30, **options):
    cache = TersekvCache(model.config, **{"page_size": 4, "chunk": 16, **options})
    with torch.inference_mode():
        model(IDS[:, :columns], attention_mask=MASK[:, :columns], **over(cache))
    return cache


def stepped(model, cache, begin=30, end=40):
    with torch.inference_mode():
        return torch.cat([
            model(IDS[:, i : i + 1], attention_mask=MASK[:, : i + 1], **over(cache)).logits for i in range(begin, end)
        ])  # fmt: skip


@pytest.mark.parametrize("family", [*FAMILIES, *HYBRIDS, *SPARSE, "minimax"])
def test_every_family_goes_on(family, tmp_path):
    model = tiny(family)
    cache = prompted(model, format="fp8_e4m3")
    cache.save(tmp_path / "prompt")
    other = TersekvCache.load(tmp_path / "prompt", model.config)
    assert type(other) is type(cache)
    assert torch.equal(stepped(model, other), stepped(model, cache))


@pytest.mark.parametrize(
    "options",
    [
        *({"format": name} for name in KV_FORMATS),
        {"format": "int4_per_token_head/nvfp4+rotated"},
        {"layer_formats": ["bf16", ("fp8_e4m3", "int8_per_token_head")], "k_scale": [1.0, 0.5], "v_scale": 1.0},
        {"format": "fp8_e4m3", "k_scale": 0.25, "v_scale": [2.0, 1.0]},
        {"format": "int4_per_token_head", "k_channel_scale": torch.rand(2, 2, 16) + 0.5},
    ],
    ids=str,
)  # fmt: skip
def test_formats_scales_and_attributes_go_with_it(options, tmp_path):
    model = tiny("llama")
    cache = prompted(model, **options)
    cache.save(tmp_path / "prompt")
    other = TersekvCache.load(tmp_path / "prompt", model.config)
    assert other.formats == cache.formats
    assert torch.equal(stepped(model, other), stepped(model, cache))


def test_latents_in_their_formats(tmp_path):
    model = tiny("deepseek_v32")
    options = {"layer_formats": ["fp8_ds_mla", "fp8_e4m3"], "kv_scale": [1.0, 0.5], "index_format": "index_fp8"}
    cache = prompted(model, **options)
    cache.save(tmp_path / "prompt")
    other = TersekvCache.load(tmp_path / "prompt", model.config)
    assert torch.equal(stepped(model, other), stepped(model, cache))


def test_another_process_writes_the_same_tokens(tmp_path):
    model = tiny("qwen3_5")
    cache = prompted(model)
    cache.save(tmp_path / "prompt")
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torch
from test_transformers_saved import TersekvCache, stepped, tiny
model = tiny("qwen3_5")
torch.save(stepped(model, TersekvCache.load({str(tmp_path / "prompt")!r}, model.config)), {str(tmp_path / "logits")!r})
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert torch.equal(torch.load(tmp_path / "logits"), stepped(model, cache))


@pytest.mark.parametrize("family", ["mistral", "lfm2", "glm_moe_dsa"])
def test_after_beams_crops_and_turns_and_on_the_host(family, tmp_path):
    model = tiny(family)
    cache = prompted(model).offload()
    if family != "lfm2":  # whose convolutions cannot go back
        stepped(model, cache, 30, 36)
        cache.crop(-5)
        assert cache.get_seq_length() == 31
    cache.batch_select_indices(torch.tensor([1, 1, 0]))
    cache.save(tmp_path / "prompt")
    others = [TersekvCache.load(tmp_path / "prompt", model.config, offload=x, max_tokens=64) for x in (False, True)]
    assert [c.offloaded for c in others] == [False, True]
    rows, start = torch.tensor([1, 1, 0]), cache.get_seq_length()

    def logits(c, columns=4, begin=start):
        mask = torch.cat((MASK[rows][:, :begin], torch.ones(3, columns, dtype=torch.int64)), 1)
        with torch.inference_mode():
            return model(IDS[rows][:, 2 : 2 + columns], attention_mask=mask, **over(c)).logits

    want = logits(cache)
    assert all(torch.equal(logits(c), want) for c in others)
    if family == "lfm2":
        return
    for c in (cache, *others):
        c.crop(-6)
    want = logits(cache, 3, start - 2)
    assert all(torch.equal(logits(c, 3, start - 2), want) for c in others)


def test_a_crop_that_the_saved_cache_refuses_the_loaded_one_refuses(tmp_path):
    model = tiny("mistral")
    cache = prompted(model, 40, chunk=4)
    cache.save(tmp_path / "prompt")
    for c in (cache, TersekvCache.load(tmp_path / "prompt", model.config)):
        with pytest.raises(ValueError, match="crop: want at least"):
            c.crop(-12)


def test_a_changed_byte_anywhere_is_refused_and_nothing_comes(tmp_path):
    model = tiny("llama", num_hidden_layers=1)
    prompted(model, 9, format="fp8_e4m3").save(tmp_path / "prompt")
    whole = (tmp_path / "prompt").read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    marks = [*range(0, header, 61), header, (header + len(whole)) // 2, len(whole) - 1]
    for at in marks:
        torn = bytearray(whole)
        torn[at] ^= 4
        (tmp_path / "torn").write_bytes(torn)
        if whole[at : at + 1] == b" ":  # what pads the header says nothing
            continue
        with pytest.raises(ValueError, match=r"torn: .*want"):
            TersekvCache.load(tmp_path / "torn", model.config)
    for size in (0, 7, header - 1, header, len(whole) - 1):
        (tmp_path / "torn").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"torn: .*want"):
            TersekvCache.load(tmp_path / "torn", model.config)


@pytest.mark.parametrize(
    "found",
    [
        3, "F32", [], {"dtype": "F32"}, {"dtype": "F31", "shape": [16], "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 64]}, {"dtype": "F32", "shape": [16], "data_offsets": [0]},
        {"dtype": "F32", "shape": 16, "data_offsets": [0, 64]},
        {"dtype": "F32", "shape": "a", "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2**50], "data_offsets": [0, 2**52]},
        {"dtype": "F32", "shape": [16], "data_offsets": [-64, 0]},
    ],
    ids=str,
)  # fmt: skip
def test_what_describes_no_tensor_is_refused_by_its_name(found, tmp_path):
    model, path = tiny("llama"), tmp_path / "prompt"
    prompted(model, format="int4_per_token_head/nvfp4+rotated").save(path)
    whole = path.read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    assert header["0.k_signs"] == {"dtype": "F32", "shape": [16], "data_offsets": header["0.k_signs"]["data_offsets"]}
    text = json.dumps({**header, "0.k_signs": found}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + size :])
    with pytest.raises(ValueError, match=r"prompt: 0\.k_signs: want dtype, shape and data_offsets of a tensor in"):
        TersekvCache.load(path, model.config)


def test_foreign_files_other_models_and_formats_are_refused_by_name(tmp_path):
    model = tiny("llama")
    cache = prompted(model, format="fp8_e4m3")
    cache.save(tmp_path / "prompt")
    with safe_open(tmp_path / "prompt", framework="pt") as file:
        assert json.loads(file.metadata()["batch"])["counts"] == [30, 23]
        assert "0.k" in file.keys()  # noqa: SIM118 (not a dict)

    def refused(message, path="prompt", config=model.config, kind=ValueError, **options):
        with pytest.raises(kind, match=message):
            TersekvCache.load(tmp_path / path, config, **options)

    refused(
        "prompt: model.rope_parameters.rope_theta: want 5.0",
        config=tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 5.0}).config,
    )
    refused("prompt: model.*: want .* as the model has", config=tiny("qwen3").config)
    refused("prompt: layers.0.format: want 'nvfp4', as format says, got 'fp8_e4m3'", format="nvfp4")
    refused("prompt: layers.0.k_signs: want rotated rows, as .*, got others", format="fp8_e4m3+rotated")
    refused("device: want one, or one for each of 2 layers, got 3", device=["cpu"] * 3)
    refused("config: want a transformers config", config=None, kind=TypeError)
    refused("num_pages", num_pages=1, kind=OutOfPagesError)
    (tmp_path / "foreign").write_bytes(b"\0" * 100)
    refused("foreign: .*want", "foreign")
    export_pages(PagedKVCache.allocate(1, 2, 4, 2, 16, format="bf16"), [0], tmp_path / "record")
    refused("record: tersekv: want 'a TersekvCache, 1', got 'pages of a PagedKVCache, 2'", "record")
    with pytest.raises(FileNotFoundError):
        TersekvCache.load(tmp_path / "none", model.config)
    assert torch.equal(
        stepped(model, TersekvCache.load(tmp_path / "prompt", model.config, format="fp8_e4m3")), stepped(model, cache)
    )


def test_what_cannot_be_saved_says_so(tmp_path):
    model = tiny("llama")
    with pytest.raises(ValueError, match="save: want a cache that holds tokens"):
        TersekvCache(model.config).save(tmp_path / "x")
    static = TersekvStaticCache(model.config, max_tokens=8)
    with pytest.raises(UnsupportedError, match="save: want a TersekvCache"):
        static.save(tmp_path / "x")
    with pytest.raises(UnsupportedError, match="load: want a TersekvCache"):
        TersekvStaticCache.load(tmp_path / "x", model.config)
    recurrent = tiny("recurrent_gemma", block_types=["recurrent", "attention"])
    with pytest.raises(UnsupportedError, match="save: want a model that leaves its state to its cache"):
        prompted(recurrent).save(tmp_path / "x")
    cache = prompted(model)
    cache.paged[1].columns = 3
    with pytest.raises(RuntimeError, match="save: want a last forward that reached all layers, got none in layer 1"):
        cache.save(tmp_path / "x")
    cache.book.lost = True
    with pytest.raises(RuntimeError, match="call reset"):
        cache.save(tmp_path / "x")
    assert not list(tmp_path.iterdir())
