"""Bytes of LMCache's chunks: those of append in every format, and back what dequantising gives, in 16 bits."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv import KV_FORMATS, PagedKVCache
from tersekv.integrations.lmcache_chunks import HEADER, ChunkCodec
from tersekv.testing.memory import as_bytes

LAYERS, TOKENS, HEADS, D = 2, 19, 3, 64
PAIRS = [
    ("fp8_per_token_head", "int4_per_token_head"), ("int8_per_token_head", "nvfp4"), ("fp8_e4m3", "int4_per_token_head")
]  # fmt: skip
FORMATS = [*((f, f) for f in KV_FORMATS), *PAIRS]


def chunk_of(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    torch.manual_seed(1)
    x = torch.randn(2, LAYERS, TOKENS, HEADS, D) * 10 ** torch.empty(2, LAYERS, TOKENS, HEADS, 1).uniform_(-2, 1)
    x[0, 0, 3, 1] = 0
    return x.to(dtype).flatten(-2)


def encoded(codec: ChunkCodec, chunk: torch.Tensor) -> torch.Tensor:
    data = torch.full((codec.nbytes(chunk.shape) + 5,), 0xA5, dtype=torch.uint8)
    assert codec.encode(chunk, data) == len(data) - 5
    assert (data[-5:] == 0xA5).all()
    return data[:-5]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("k", "v"), FORMATS)
def test_bytes_are_those_of_append_and_come_back_dequantised(k, v, rotated):
    codec = ChunkCodec(f"{k}/{v}" + "+rotated" * rotated, D)
    chunk = chunk_of()
    data = encoded(codec, chunk)
    options = {"rotation": "hadamard" if rotated else None}
    own = PagedKVCache.allocate(LAYERS, 1, TOKENS, HEADS, D, format=(k, v), scales="tail", **options)
    wide = PagedKVCache.allocate(LAYERS, 1, TOKENS, HEADS, D, format="bf16")
    for layer, x, y in zip(own.layers, chunk[0], chunk[1], strict=True):
        tersekv.append(x.view(TOKENS, HEADS, D), y.view(TOKENS, HEADS, D), layer, torch.arange(TOKENS))
    tersekv.transcode(own, [0], wide, [0])
    pages, start = data[HEADER:].clone().view(LAYERS, -1), 0
    for name in ("k", "v", "k_scale_cache", "v_scale_cache"):  # in the order of a page's tail
        parts = [getattr(layer, name) for layer in own.layers]
        if parts[0] is None:
            continue
        want = torch.stack([as_bytes(x).flatten() for x in parts])
        start += -start % parts[0].itemsize
        assert torch.equal(pages[:, start : start + want.shape[1]], want), name
        start += want.shape[1]
    assert not pages[:, start:].any()
    back = torch.full_like(chunk, float("nan"))
    codec.decode(data, back)
    want = torch.stack([torch.stack([getattr(layer, side)[0].flatten(1) for layer in wide.layers]) for side in "kv"])
    assert torch.equal(as_bytes(back), as_bytes(want))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_come_back_bit_by_bit_and_from_any_byte_on(dtype):
    codec = ChunkCodec("bf16" if dtype == torch.bfloat16 else "fp16", D)
    chunk = chunk_of(dtype)
    odd = torch.empty(codec.nbytes(chunk.shape) + 1, dtype=torch.uint8)[1:]
    codec.encode(chunk, odd)
    back = torch.empty_like(chunk)
    codec.decode(odd, back)
    assert torch.equal(back, chunk)


@pytest.mark.parametrize(
    ("format", "head_dim", "sizes"),
    [("nvfp4", D, (2, 2, 19, 192)), ("fp8_e4m3", D * 3, (2, 2, 19, 192)), ("fp8_e4m3", D, (2, 2, 18, 192))],
)
def test_bytes_of_anything_else_are_refused_and_nothing_is_written(format, head_dim, sizes):
    data = encoded(ChunkCodec("fp8_e4m3", D), chunk_of())
    chunk = torch.zeros(sizes, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"data: want .* bytes of 'tersekv .*, got .* of 'tersekv chunk 1: fp8"):
        ChunkCodec(format, head_dim).decode(data, chunk)
    assert not chunk.any()


def test_bytes_that_are_cut_off_are_refused():
    codec, chunk = ChunkCodec("fp8_e4m3", D), chunk_of()
    data = encoded(codec, chunk)
    for cut in (data[:-1], data[:100], data[:0]):
        with pytest.raises(ValueError, match=f"data: want {len(data)} bytes of .* got {len(cut)} of"):
            codec.decode(cut, chunk)


def test_wrong_arguments_are_named():
    codec, chunk = ChunkCodec("fp8_e4m3", D), chunk_of()
    data = torch.empty(codec.nbytes(chunk.shape), dtype=torch.uint8)
    for format in ("nvfp5", "nvfp4+fitted", "nvfp4+channels", "nvfp4+ends=bf16"):
        with pytest.raises(ValueError, match="format: want"):
            ChunkCodec(format, D)
    with pytest.raises(TypeError, match="format: want str, got NoneType"):
        ChunkCodec(None, D)
    with pytest.raises(ValueError, match="head_dim: want"):
        ChunkCodec("nvfp4", 40)
    with pytest.raises(ValueError, match=r"out: want .* bytes or more"):
        codec.encode(chunk, data[1:])
    for wrong in (chunk[:1], chunk[0], chunk[..., :-1]):
        with pytest.raises(ValueError, match=r"chunk: want \[2, layers, tokens, heads · 64\]"):
            codec.encode(wrong, data)
    with pytest.raises(ValueError, match=r"chunk: want .*float16, got torch\.float32"):
        codec.encode(chunk.float(), data)
