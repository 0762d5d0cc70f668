"""SGLang's real engine, and its pools, with recipes and files of attributes: formats and attributes by layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from checkpoints import llama, text
from reference import Reference, hold
from saved_files import DIM, KV_HEADS, LAYERS, write
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang_cpu import engine, generate

from tersekv.integrations import sglang_pool
from tersekv.integrations.sglang_pool import TersekvPool, bytes_of_heads
from tersekv.saved import read

PROMPTS = [text(2300 * i + 80, n) for i, n in enumerate((5, 47, 48, 150))]
INT = "int8_per_token_head/int4_per_token_head"
SIZES = {"head_num": KV_HEADS, "head_dim": DIM}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def parallel(monkeypatch):
    """Of one process, and changed by a test."""
    one = SimpleNamespace(attn_tp_size=1, attn_tp_rank=0, attn_dcp_size=1, pp_size=1)
    monkeypatch.setattr(sglang_pool, "get_parallel", lambda: one)
    return one


@pytest.mark.parametrize("formats", [[INT] * 4, ["bf16", "fp8_e4m3/nvfp4", INT, "int8_per_token_head"]])
def test_layers_have_the_files_formats_and_attributes(formats, model, tmp_path):
    kept = tmp_path / "kept.safetensors"
    told = write(kept, formats)
    with engine(model, str(kept), chunked_prefill_size=64) as made:
        results, _ = generate(made, PROMPTS, 12)
    scored, plain = Reference(model, **told), Reference(model, formats)
    hold(results, [scored.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)])
    with pytest.raises(AssertionError, match=r"KL|behind"):
        hold(results, [plain.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)])


def test_a_recipe_with_other_ends(model):
    word, ends = "int4_per_token_head/nvfp4+rotated", "int8_per_token_head+rotated"
    with engine(model, f"{word}+ends=int8_per_token_head", chunked_prefill_size=64) as made:
        results, _ = generate(made, PROMPTS, 12)
    reference = Reference(model, [ends, word, word, ends])
    hold(results, [reference.score(p, r[0]) for p, r in zip(PROMPTS, results, strict=True)])


@pytest.mark.parametrize(("ranks", "rank", "heads"), [(2, 1, [1]), (4, 1, [0]), (4, 2, [1])])
def test_a_rank_has_the_attributes_of_its_heads(ranks, rank, heads, tmp_path, parallel, monkeypatch):
    kept = tmp_path / "kept.safetensors"
    write(kept, ["fp8_e4m3", INT, INT, "bf16"])
    monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", str(kept))
    parallel.attn_tp_size, parallel.attn_tp_rank = ranks, rank
    pool = TersekvPool(
        size=32, page_size=16, dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, head_num=1, head_dim=DIM,
        layer_num=2, start_layer=0, end_layer=1,
    )  # fmt: skip
    for i, want in enumerate(read(kept).attributes[:2]):
        layer = pool.layer(i, 0.5, 0.5)
        assert torch.equal(layer.k_channel_scale, want["k_channel_scale"][heads])
        assert torch.equal(layer.v_signs, want["v_signs"])
    assert torch.equal(pool.layer(0).k_scale, read(kept).attributes[0]["k_scale"][heads])


def test_layers_of_two_pools_have_their_own_attributes(tmp_path, parallel, monkeypatch):
    def two() -> SWAKVPool:
        return SWAKVPool(
            32, 32, 16, torch.bfloat16, swa_attention_layer_ids=[0, 2], full_attention_layer_ids=[1, 3], device="cpu",
            token_to_kv_pool_class=TersekvPool, **SIZES,
        )  # fmt: skip

    kept = tmp_path / "kept.safetensors"
    write(kept, [INT] * LAYERS)
    monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", str(kept))
    pools = two()
    for layer_id, (index, windowed) in pools.layers_mapping.items():
        layer = (pools.swa_kv_pool if windowed else pools.full_kv_pool).layer(index)
        assert torch.equal(layer.k_channel_scale, read(kept).attributes[layer_id]["k_channel_scale"])
    monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", "nvfp4+ends=bf16")
    with pytest.raises(
        NotImplementedError, match=r"two pools, got 'nvfp4\+ends=bf16'; with --disable-hybrid-swa-memory"
    ):
        two().swa_kv_pool.layer(1)


def told_of(layers: int, **more) -> SimpleNamespace:
    """What SGLang knows when it sizes its pools."""
    model = SimpleNamespace(
        get_num_kv_heads=lambda tp, dcp=1: KV_HEADS // tp, head_dim=DIM, v_head_dim=DIM, is_hybrid_swa=False,
        num_hidden_layers=layers,
    )  # fmt: skip
    info = SimpleNamespace(start_layer=0, end_layer=layers)
    return SimpleNamespace(kv_cache_dtype=torch.bfloat16, model_config=model, layer_info=info, **more)


def test_sglang_is_told_what_a_token_takes_in_layers_that_differ(parallel, monkeypatch):
    monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", "nvfp4+ends=bf16")
    bf16, nvfp4 = 2 * 2 * DIM, DIM + DIM // 8
    assert bytes_of_heads(told_of(8), 8)[0] == KV_HEADS * (2 * bf16 + 6 * nvfp4)
    with pytest.raises(NotImplementedError, match="want the same formats in all layers of two pools"):
        bytes_of_heads(told_of(8), 1)
    with pytest.raises(NotImplementedError, match=r"all layers of a hybrid, got 'nvfp4\+ends=bf16'$"):
        bytes_of_heads(told_of(8, mambaish_config=object()), 2)


def test_what_is_refused(tmp_path, parallel, monkeypatch):
    def given(word: object, layers: int = LAYERS) -> None:
        monkeypatch.setenv("TERSEKV_SGLANG_FORMAT", str(word))
        bytes_of_heads(told_of(layers), layers)

    for word in ("int8_per_token_head+channels", "fp8_e4m3+fitted"):
        with pytest.raises(ValueError, match=r"want a file that `tersekv eval --save FILE` wrote, .* got '.*\+"):
            given(word)
    with pytest.raises(ValueError, match=r"_FORMAT: want a recipe \(.*\) or a file that .*, got '.*none.safetensors'"):
        given(tmp_path / "none.safetensors")
    kept = tmp_path / "kept.safetensors"
    write(kept, [INT] * LAYERS)
    with pytest.raises(ValueError, match=r"want attributes of 3 layers, got 4 in '.*kept.safetensors'"):
        given(kept, 3)
    with pytest.raises(
        ValueError, match=r"want attributes of 4 KV heads a rank with head sizes 64, 64, got 2 with 64, 64"
    ):
        TersekvPool(
            size=32, page_size=16, dtype=torch.bfloat16, device="cpu", enable_memory_saver=False, head_num=4,
            head_dim=DIM, layer_num=LAYERS,
        )  # fmt: skip
    parallel.pp_size = 2
    with pytest.raises(ValueError, match=r"want no \+ends for parts of a model's layers, got 'nvfp4\+ends=bf16'"):
        given("nvfp4+ends=bf16")
