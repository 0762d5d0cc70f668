"""Files of attributes, as far as no engine is needed: heads of a rank, and what vLLM's layers ask for.

The rest is in tests/engines.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import tersekv
from tersekv.integrations.saved_layers import saved_layers
from tersekv.integrations.vllm_saved import cache_dtype_of, index_of, layers_of

H, D, DV = 4, 32, 16
INT, TNI = "int8_per_token_head/int4_per_token_head", "int4_per_token_head/int8_per_token_head"


def write(path, formats: list[str], rotation: str | None = "hadamard") -> tersekv.PagedKVCache:
    pairs = [(f.split("/")[0], f.split("/")[-1]) for f in formats]
    count = len(formats)
    cache = tersekv.PagedKVCache.allocate(
        count, 1, 8, H, D, head_dim_v=DV, layer_formats=pairs, rotation=rotation, device="cpu",
        k_channel_scale=torch.rand(count, H, D) + 0.5, v_channel_scale=torch.rand(count, H, DV) + 0.5,
    )  # fmt: skip
    scale = {"k_scale": torch.rand(H) + 0.5, "v_scale": torch.rand(1) + 0.5}
    layers = [replace(x, **scale) if x.formats == ("fp8_e4m3", "fp8_e5m2") else x for x in cache.layers]
    made = tersekv.PagedKVCache(layers, D, DV)
    made.save_attributes(path)
    return made


@pytest.mark.parametrize(("ranks", "rank", "heads"), [
    (1, 0, [0, 1, 2, 3]), (2, 1, [2, 3]), (4, 2, [2]), (8, 3, [1]), (8, 7, [3]),
])  # fmt: skip
def test_a_rank_has_the_attributes_of_its_heads(tmp_path, ranks, rank, heads):
    path = str(tmp_path / "kept")
    made = write(path, ["fp8_e4m3/fp8_e5m2", INT])
    found = saved_layers("saved", path, len(heads), (D, DV), rank, ranks)
    for i, layer in enumerate(made.layers):
        got = found.attributes(i, torch.device("cpu"))
        for name in ("k_channel_scale", "v_channel_scale"):
            assert torch.equal(got[name], getattr(layer, name)[heads])
        for name in ("k_signs", "v_signs"):
            assert torch.equal(got[name], getattr(layer, name)), "of columns, whichever heads"
    got = found.attributes(0, torch.device("cpu"))
    assert torch.equal(got["k_scale"], made[0].k_scale[heads])
    assert torch.equal(got["v_scale"], made[0].v_scale)
    assert found.attributes(1, torch.device("cpu"))["k_scale"] == 1.0


@pytest.mark.parametrize(("heads", "dims", "ranks", "got"), [
    (2, (D, DV), 1, "want attributes of 2 KV heads a rank with head sizes 32, 16, got 4 with 32, 16 in"),
    (4, (D, DV), 2, "want attributes of 4 KV heads a rank with head sizes 32, 16, got 2 of 4 with 32, 16 in"),
    (4, (64,), 1, "want attributes of 4 KV heads a rank with head sizes 64, got 4 with 32 in"),
    (4, (D, D), 1, "head sizes 32, 32, got 4 with 32, 16 in"),
])  # fmt: skip
def test_a_file_of_other_heads_is_refused(tmp_path, heads, dims, ranks, got):
    path = str(tmp_path / "kept")
    write(path, [INT])
    with pytest.raises(ValueError, match=f"^saved: .*{got}"):
        saved_layers("saved", path, heads, dims, 0, ranks)


def test_a_file_that_is_written_anew_is_read_anew(tmp_path):
    path = str(tmp_path / "kept")
    for formats in ([INT], [TNI, TNI]):
        write(path, formats)
        assert len(saved_layers("saved", path, H, (D, DV), 0, 1).formats) == len(formats)
    with pytest.raises(ValueError, match=r"saved: want a file that `tersekv eval --save FILE` wrote, got .*none"):
        saved_layers("saved", str(tmp_path / "none"), H, (D, DV), 0, 1)


def config_of(saved: object, dtype: str = "auto", skipped: tuple = (), layers: int = 4, ranks: int = 1):
    """vLLM's configuration, as far as it is looked at."""
    return SimpleNamespace(
        additional_config={"tersekv": saved}, parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
        model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: layers),
        cache_config=SimpleNamespace(cache_dtype=dtype, kv_cache_dtype_skip_layers=list(skipped)),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["auto", INT, "float16", "fp8"])
def test_each_layer_asks_for_pages_of_its_formats(tmp_path, dtype):
    path, formats = str(tmp_path / "kept"), ["fp16", INT, "fp8_e4m3", "nvfp4"]
    write(path, formats)
    found = layers_of(config_of({"saved": path}, dtype), H, D)
    names = [cache_dtype_of(found, f"model.layers.{i}.self_attn.attn") for i in range(4)]
    assert names == ["float16", INT, "fp8", "nvfp4"]
    for name in ("model.layers.4.attn", "model.attn", "model.layers.1.experts.2.attn"):
        with pytest.raises(ValueError, match=f"want layers named by a number below 4, .* got '{name}'"):
            index_of(found, name)


@pytest.mark.parametrize(("formats", "dtype", "skipped", "want"), [
    ([INT] * 4, TNI, (), f"kv_cache_dtype: want auto or {INT} without .* got {TNI} with none"),
    ([INT] * 4, INT, ("0",), f"want auto or {INT} without kv_cache_dtype_skip_layers, as .*got {INT} with 0"),
    (["bf16"] * 4, "fp8", (), "want auto or bfloat16 without .* got fp8"),
    ([INT, *["bf16/nvfp4"] * 3], "auto", (), "want formats that vLLM has a cache dtype for, got bf16/nvfp4 in"),
    ([INT] * 3, INT, (), "saved: want attributes of 4 layers, got 3 in"),
])  # fmt: skip
def test_a_file_that_does_not_fit_is_refused(tmp_path, formats, dtype, skipped, want):
    path = str(tmp_path / "kept")
    write(path, formats)
    with pytest.raises(ValueError, match=want):
        layers_of(config_of({"saved": path}, dtype, skipped), H, D)


@pytest.mark.parametrize("given", ["kept", {"file": "kept"}, {"saved": 3}, {"saved": "a", "more": "b"}, {}])
def test_what_is_no_name_of_a_file_is_refused(given):
    with pytest.raises(ValueError, match=r'additional_config: want {"tersekv": {"saved": FILE}}, got'):
        layers_of(config_of(given), H, D)


def test_without_a_file_nothing_is_looked_at():
    assert layers_of(None, H, D) is None
    assert layers_of(SimpleNamespace(additional_config={"other": 1}), H, D) is None


def test_vllms_rank_says_which_heads(tmp_path, monkeypatch):
    path = str(tmp_path / "kept")
    made = write(path, [INT] * 4)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm.distributed", SimpleNamespace(get_tensor_model_parallel_rank=lambda: 1))
    found = layers_of(config_of({"saved": path}, INT, ranks=2), 2, D)
    got = found.attributes(2, torch.device("cpu"))["v_channel_scale"]
    assert torch.equal(got, made[2].v_channel_scale[2:])
