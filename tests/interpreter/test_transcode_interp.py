"""transcode in Triton writes the oracle's bytes, and no others, for every case: in the interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from against_oracle import assert_bytes_equal, check, one_program_a_tensor, write_cases

import tersekv
from tersekv.backends.host import bind, launch
from tersekv.cache import PagedKVCache, PagedLatentCache
from tersekv.formats import KV_FORMATS
from tersekv.testing.make import make

OP = "transcode"


@pytest.mark.parametrize("case", write_cases(OP), ids=lambda c: c.id)
def test_bytes_are_the_oracles(case, monkeypatch):
    one_program_a_tensor(monkeypatch)
    check(case)


@pytest.mark.parametrize("case", write_cases(OP, quick=True), ids=lambda c: c.id)
def test_many_programs_write_what_one_writes(case):
    check(case)


@pytest.mark.parametrize("case", write_cases(OP, quick=True), ids=lambda c: c.id)
def test_bit_arithmetic_gives_the_bytes_of_the_instruction(case, monkeypatch):
    one_program_a_tensor(monkeypatch)
    monkeypatch.setattr(launch, "has_exact_fp8_cast", lambda f: False)
    monkeypatch.setattr(launch, "emulates_e4m3", lambda f: True)
    check(case)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
@pytest.mark.parametrize("name", ["src_pages", "dst_pages"])
def test_tokens_of_pages_outside_are_skipped(name, dtype):
    call = make(next(c for c in write_cases(OP) if c.id == "transcode/nvfp4/next format"))
    info, pages = torch.iinfo(dtype), getattr(call, name)
    wrong = [info.max, info.min or info.max - 1, call.k_cache.shape[0] + call.src_k.shape[0]]
    assert_bytes_equal(
        OP, call._replace(**{name: torch.tensor([*pages[:1].tolist(), *wrong]).to(dtype), "num_tokens": 60})
    )


def mixed(formats: list, page: int, **options) -> PagedKVCache:
    """Layers of several formats, scales and attributes, in pages of one size."""
    cache = PagedKVCache.allocate(len(formats), 6, page, 2, 16, layer_formats=formats, **options)
    scales = [
        {} if f[0] != "fp8_e4m3" else {"k_scale": torch.full((1,), 0.5 + i)} for i, f in enumerate(cache.layer_formats)
    ]
    scales[-1] |= {"v_scale": 0.75}
    layers = [replace(layer, **more) for layer, more in zip(cache.layers, scales, strict=True)]
    return PagedKVCache(layers, 16, 16)


def launched(monkeypatch) -> list[tuple[int, ...]]:
    """The grids of what is launched."""
    grids, run = [], bind.KernelLaunch.__call__
    monkeypatch.setattr(bind.KernelLaunch, "__call__", lambda self, call: (grids.append(self.grid), run(self, call))[1])
    return grids


def test_layers_that_are_alike_are_one_launch(monkeypatch):
    """And each gets the bytes that it would get alone: of its own scales, signs and channel scales."""
    torch.manual_seed(0)
    pair = ("fp8_e4m3", "int4_per_token_head")
    channels = torch.rand(4, 2, 16) + 0.5
    a = mixed([pair, "bf16", pair, "nvfp4"], 4, rotation=("hadamard", None), v_channel_scale=channels)
    b = mixed(["nvfp4", pair, "nvfp4", "nvfp4"], 8, layout="HND", rotation="hadamard", k_channel_scale=channels)
    b[2].k_signs[::3] *= -1  # of all layers: they share them
    k, v = torch.randn(2, 24, 2, 16)
    for layer in a.layers:
        tersekv.append(k, v, layer, torch.arange(24), backend="torch")
    want = PagedKVCache([replace(layer, **copies(layer)) for layer in b.layers], 16, 16)
    grids = launched(monkeypatch)
    tersekv.transcode(a, [3, 1, 5], b, [2, 0], num_tokens=11, backend="triton")
    assert sorted(grid[1] for grid in grids) == [1, 1, 2], "layers 0 and 2 are one launch"
    tersekv.transcode(a, [3, 1, 5], want, [2, 0], num_tokens=11, backend="torch")
    assert_equal(b, want)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("dst", ["int4_per_token_head", "nvfp4"])
@pytest.mark.parametrize("src", [name for name in KV_FORMATS if name not in ("int4_per_token_head", "nvfp4")])
def test_whole_rows_of_every_format_become_4_bits(src, dst, rotated):
    """A thread's row: with signs of columns, which a format without a sign bit takes another way."""
    a = PagedKVCache.allocate(1, 6, 4, 2, 64, format=src)
    b, want = (PagedKVCache.allocate(1, 2, 16, 2, 64, format=dst, rotation="hadamard" if rotated else None)
               for _ in range(2))  # fmt: skip
    for layer in (b[0], want[0]) if rotated else ():
        layer.k_signs[::3] = -1
    tersekv.append(*torch.randn(2, 24, 2, 64), a[0], torch.arange(24), backend="torch")
    for cache, backend in ((b, "triton"), (want, "torch")):
        tersekv.transcode(a, [3, 1, 5, 0, 4, 2], cache, [1, 0], num_tokens=22, backend=backend)
    assert_equal(b, want)


def test_latents_of_all_layers_are_one_launch(monkeypatch):
    a, b, want = (PagedLatentCache.allocate(3, 6, 4, format=f, kv_lora_rank=128) for f in ("bf16", *["fp8_ds_mla"] * 2))
    for layer in a.layers:
        tersekv.mla_append(torch.randn(24, 128), torch.randn(24, 64), layer, torch.arange(24), backend="torch")
    grids = launched(monkeypatch)
    tersekv.transcode(a, [3, 1, 5], b, [2, 0, 4], num_tokens=torch.tensor([10]), backend="triton")
    assert [grid[1] for grid in grids] == [3]
    tersekv.transcode(a, [3, 1, 5], want, [2, 0, 4], num_tokens=10, backend="torch")
    assert_equal(b, want)


def test_numbers_that_are_equal_in_fp32_are_no_launch_of_their_own(monkeypatch):
    """A layer that is copied shares none with one that is not."""
    a = PagedKVCache.allocate(3, 4, 4, 2, 16, format="fp8_e4m3", k_scale=0.1)
    for layer in a.layers:
        tersekv.append(*torch.randn(2, 16, 2, 16), layer, torch.arange(16), backend="torch")
    pairs = []
    for backend in ("triton", "torch"):
        grids = launched(monkeypatch)
        b = PagedKVCache.allocate(3, 4, 4, 2, 16, format="fp8_e4m3")
        scales = (0.1 + 1e-12, 0.2, 0.1)
        b = PagedKVCache([replace(layer, k_scale=scale) for layer, scale in zip(b, scales, strict=True)], 16, 16)
        tersekv.transcode(a, [3, 1], b, [2, 0], backend=backend)
        pairs.append((b, grids))
    assert_equal(*(b for b, _ in pairs))
    assert sorted(grid[1] for grid in pairs[0][1]) == [1, 2]


def copies(layer) -> dict:
    names = ("k", "v", "k_scale_cache", "v_scale_cache")
    return {n: None if getattr(layer, n) is None else torch.zeros_like(getattr(layer, n)) for n in names}


def assert_equal(a, b) -> None:
    for x, y in zip(a.layers, b.layers, strict=True):
        for name in ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache"):
            if getattr(x, name, None) is not None:
                got, expected = (getattr(layer, name)[..., None].view(torch.uint8) for layer in (x, y))
                assert got.any()
                assert torch.equal(got, expected), name
