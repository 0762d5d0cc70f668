"""`tersekv eval --model FOLDER`: a small random model in a folder, with a tokenizer of bytes."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers_models import tiny

import tersekv
from tersekv import KV_FORMATS, LATENT_FORMATS, kv_bytes_per_token, latent_bytes_per_token
from tersekv.cli import main
from tersekv.integrations.transformers_eval import HuggingFaceModel, NotAModelError, PagedModel

TEXT = "A cache keeps keys and values of the past; a format says in how many bits. " * 6


@pytest.fixture(scope="module", params=["llama", "mistral", "deepseek_v3"])
def folder(request, tmp_path_factory):
    return saved(tiny(request.param, vocab_size=257), tmp_path_factory.mktemp(request.param))


def saved(model, path):
    """A folder with a model and a tokenizer that knows the printable characters."""
    model.save_pretrained(path)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(["<pad>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>").save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


def evaluate(folder, *argv):
    stored = folder / "out.json"
    files = ("--json", str(stored))
    code = main.main(
        ("eval", "--model", str(folder), "--text", str(folder / "text.txt"), "--device", "cpu", *files, *argv)
    )
    return code, json.loads(stored.read_text()) if code == 0 else None


def test_every_format_of_the_models_cache_is_measured(folder, capsys):
    code, told = evaluate(folder, "--tokens", "150", "--context", "80", "--plot", str(folder / "p.png"))
    assert code == 0
    out = capsys.readouterr().out
    assert "the first 150 tokens of text.txt" in out
    assert f"{folder.name}, " in out
    assert (folder / "p.png").read_bytes().startswith(b"\x89PNG")
    [model] = told["models"]
    assert (model["unit"], model["context"], model["bytes_scored"]) == ("token", 80, 150)
    assert told["options"]["dtype"] == "float32"
    latent = "deepseek" in folder.name
    found = {f["format"]: f for f in model["formats"]}
    assert set(found) == set(LATENT_FORMATS if latent else KV_FORMATS)
    for name, f in found.items():
        one = latent_bytes_per_token(name, 128, 16) if latent else kv_bytes_per_token(name, 2, 16)
        assert f["bytes_per_token"] == 2 * one
        assert 0 <= f["kl"] < 0.5
        assert 0.5 < f["top1"] <= 1
        assert f["tokens_per_s"] > 0
    assert found["bf16"]["kl"] == 0
    assert found["fp16"]["kl"] < found["fp8_e4m3"]["kl"] < found["fp8_e5m2"]["kl"]


def test_perplexity_is_that_of_the_model_itself(folder):
    code, told = evaluate(folder, "--tokens", "64", "--formats", "fp16")
    assert code == 0
    subject = HuggingFaceModel(str(folder))
    ids = subject.encode(TEXT, 65)[:65][None]
    subject.model.set_attn_implementation("eager")
    loss = torch.nn.functional.cross_entropy(subject.model(ids).logits[0, :-1], ids[0, 1:])
    assert told["models"][0]["formats"][1]["perplexity"] == pytest.approx(math.exp(loss), rel=1e-2)
    assert subject.decode(ids[0]) == TEXT[:65]


def test_calibrated_scales_reach_the_layers(folder):
    subject = HuggingFaceModel(str(folder))
    latent = "deepseek" in folder.name
    scales = [(0.5,), (0.25,)] if latent else [(0.5, 2.0), (0.25, 1.0)]
    paged = subject.runner("fp8_e4m3", 1, 10, 8, scales)
    paged.step({"r": torch.tensor([1, 2, 3])})
    layers = [layer.store.cache[0] for layer in paged._caches["r"].layers]
    assert [((x.kv_scale,) if latent else (x.k_scale, x.v_scale)) for x in layers] == scales
    assert evaluate(folder, "--tokens", "40", "--calibrate", "--formats", "fp8_e4m3")[0] == 0


def test_requests_do_not_disturb_each_other_and_pages_are_used_again(folder):
    subject = HuggingFaceModel(str(folder))
    paged = subject.runner("bf16", 2, 20, 8, None)
    a, b = torch.tensor([1, 2, 3, 4]), torch.tensor([9, 8, 7])
    both = torch.cat((paged.step({"a": a[:2], "b": b}), paged.step({"a": a[2:]})))
    assert both.shape == (7, 257)
    paged.free("a")
    alone = paged.step({"c": b})
    assert torch.allclose(alone, both[2:5], atol=1e-5)
    assert len(paged._spare) == 0
    assert [len(x) for layer in paged.rows() for x in layer] == [7] * 4  # a's last row lies behind c's


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--context", "4096"), "want a context of at most 512 tokens"),
        (("--formats", "int8_per_token_head,fp8_ds_mla", "--tokens", "0"), "want a positive number, got '0'"),
        (("--dtype", "int8"), "invalid choice: 'int8'"),
    ],
)
def test_bad_arguments_exit_with_2_and_say_why(folder, capsys, argv, message):
    try:
        code, _ = evaluate(folder, *argv)
    except SystemExit as stop:  # argparse's own way out
        code = stop.code
    assert code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_bytes_that_are_no_text_are_refused(folder, capsys):
    (folder / "raw").write_bytes(b"ab\xff")
    argv = ("eval", "--model", str(folder), "--text", str(folder / "raw"), "--device", "cpu")
    assert main.main(argv) == 2
    assert "want UTF-8 text for a tokenizer" in capsys.readouterr().err


def test_a_model_with_few_learned_positions_gets_a_prompt_that_fits(tmp_path):
    config = transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=1, n_head=2, vocab_size=257)
    code, told = evaluate(saved(transformers.GPT2LMHeadModel(config), tmp_path), "--tokens", "90", "--formats", "fp16")
    assert code == 0
    [model] = told["models"]
    assert (model["context"], len(model["prompt"])) == (64, 32)


def test_rows_that_no_format_holds_are_refused_before_the_weights_are_loaded(tmp_path, capsys):
    code, _ = evaluate(saved(tiny("llama", vocab_size=257, head_dim=20), tmp_path))
    assert code == 2
    assert "want a head_dim that is a multiple of 8, at most 512, got 20" in capsys.readouterr().err


_SMALL = {"vocab_size": 257, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1}
REFUSED = {
    "falcon": (transformers.FalconConfig(**_SMALL), "FalconForCausalLM of falcon computes attention in its own code"),
    "bloom": (transformers.BloomConfig(**_SMALL), "BloomForCausalLM of bloom computes attention in its own code"),
    "mpt": (transformers.MptConfig(**_SMALL), "MptForCausalLM of mpt computes attention in its own code"),
    "xglm": (transformers.XGLMConfig(**_SMALL), "XGLMForCausalLM of xglm computes attention in its own code"),
    "diffllama": (
        transformers.DiffLlamaConfig(**_SMALL, num_key_value_heads=2, intermediate_size=96),
        "as DiffLlamaAttention of diffllama gave it to its cache",
    ),
    "jetmoe": (
        transformers.JetMoeConfig(**_SMALL, num_key_value_heads=2, kv_channels=16, intermediate_size=96),
        "as JetMoeAttention of jetmoe gave it to its cache",
    ),
    "bert": (transformers.BertConfig(**_SMALL, intermediate_size=96), "BertSelfAttention of bert is not causal"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_run_is_refused_by_name(tmp_path, capsys, name):
    config, message = REFUSED[name]
    saved(tiny("llama", vocab_size=257), tmp_path)  # the tokenizer
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert evaluate(tmp_path, "--tokens", "20")[0] == 2
    [told] = complaints(capsys)
    assert message in told
    assert "one of transformers' own caches" in told or name == "bert"


def complaints(capsys):
    """The lines of stderr that are the command's."""
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("tersekv eval: ")]


def _without_tokenizer(folder):
    for path in folder.glob("token*"):
        path.unlink()


def _changed(name, value):
    def change(folder):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))

    return change


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without_tokenizer, r"no tokenizer that can be read: \S.*\."),
        (lambda f: (f / "tokenizer.json").write_text("{nope"), "no tokenizer that can be read: .*column 2"),
        (lambda f: (f / "config.json").write_text("{nope"), "no config of a model that can run: .*valid JSON"),
        (lambda f: (f / "model.safetensors").write_bytes(b"abc"), "no weights that can be read: SafetensorError: .*"),
        (_changed("hidden_size", 128), "no weights that can be read: .*"),
        (_changed("hidden_size", "wide"), "no config of a model that can run: .*hidden_size.*"),
        (_changed("num_attention_heads", 0), "no config of a model that can run: .*"),
        (_changed("model_type", "nosuch"), "no config of a model that can run: .*`nosuch`.*"),
        (_changed("model_type", "t5"), "no config of a model that can run: want a causal language model, got t5"),
        (_changed("vocab_size", 97), r"want a tokenizer of the model's own 97 tokens, got one that writes \d+"),
    ],
)
def test_a_spoilt_folder_ends_in_one_sentence(tmp_path, capsys, spoil, message):
    spoil(saved(tiny("llama", vocab_size=257, head_dim=None), tmp_path))
    assert evaluate(tmp_path)[0] == 2
    [told] = complaints(capsys)
    assert re.match(f"tersekv eval: --model {re.escape(str(tmp_path))}: {message}", told)
    assert not told.endswith(":")


def test_a_device_without_room_for_the_model_is_told(folder, capsys, monkeypatch):
    def full(self, *args):
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(PagedModel, "step", full)
    assert evaluate(folder, "--tokens", "20")[0] == 2
    assert complaints(capsys)[0].endswith("want a model that fits into the device's memory; tried to allocate 2 GiB")


def test_a_folder_that_is_not_there_is_no_name_on_the_hub(tmp_path, capsys):
    missing, text = tmp_path / "nothere", tmp_path / "text"
    text.write_text("a text")
    assert main.main(("eval", "--model", str(missing), "--text", str(text))) == 2
    [told] = complaints(capsys)
    assert told.endswith(f"--model {missing}: want a folder, or a model's name on the hub; there is no such folder")


def test_a_folder_without_weights_is_refused(tmp_path, capsys):
    (saved(tiny("llama", vocab_size=257), tmp_path) / "model.safetensors").unlink()
    code, _ = evaluate(tmp_path)
    assert code == 2
    assert f"tersekv eval: --model {tmp_path}: " in capsys.readouterr().err


def test_a_folder_without_a_model_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NotAModelError):
        HuggingFaceModel(str(tmp_path))


def test_the_lines_that_eval_prints_make_the_cache_that_it_saved(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    latent, kept = "deepseek" in folder.name, folder / "kept.safetensors"
    word = "fp8_e4m3+fitted" if latent else "int8_per_token_head/nvfp4+channels+fitted"
    argv = ("--tokens", "60", "--context", "40", "--formats", word)
    assert evaluate(folder, *argv, *(() if latent else ("--save", "kept.safetensors")))[0] == 0
    subject = HuggingFaceModel(str(folder))
    names: dict = {"model": subject.model, "tersekv": tersekv}
    exec("\n".join(x.strip() for x in capsys.readouterr().out.splitlines()
                   if x.startswith(("    from ", "    cache = TersekvCache"))), names)  # fmt: skip
    cache = names["cache"]
    subject.model(subject.encode(TEXT, 30)[None], past_key_values=cache)
    layer = cache.paged[1].store.cache[0]
    assert (layer.kv_scale if latent else layer.v_scale) != 1.0
    if not latent:
        assert layer.format == ("int8_per_token_head", "nvfp4")
        assert layer.k_channel_scale.equal(tersekv.PagedKVCache.allocate_saved(kept, 1, 1)[1].k_channel_scale)
