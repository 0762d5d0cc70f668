"""transcode and records on the device itself: bytes, graphs, streams."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import tersekv
from tersekv import KV_FORMATS, PagedKVCache, record_file
from tersekv.integrations.lmcache_chunks import ChunkCodec
from tersekv.testing.memory import as_bytes

H, D, LAYERS = 4, 128, 3
SRC, DST = [9, 2, 11, 0, 5, 7], [1, 3]  # pages of 16 and of 64
NAMES = ("k", "v", "k_scale_cache", "v_scale_cache")


def kv(format, pages=12, size=16, device="cuda", **options) -> PagedKVCache:
    return PagedKVCache.allocate(LAYERS, pages, size, H, D, format=format, device=device, **options)


def filled(cache):
    n = cache.num_pages * cache.page_size
    for layer in cache.layers:
        k, v = torch.randn(2, n, H, D, device=cache.device)
        tersekv.append(k, v, layer, torch.arange(n, device=cache.device))
    return cache


def assert_equal(a, b, pages=slice(None), others=slice(None)) -> None:
    for x, y in zip(a.layers, b.layers, strict=True):
        for name in NAMES:
            if getattr(x, name) is not None:
                assert torch.equal(as_bytes(getattr(x, name))[pages].cpu(), as_bytes(getattr(y, name))[others].cpu())


@pytest.mark.parametrize(("src", "dst"), [*product(KV_FORMATS, KV_FORMATS)])
@pytest.mark.parametrize("rotation", [None, "hadamard"])
def test_all_layers_at_once_give_the_oracles_bytes(src, dst, rotation):
    a = filled(kv(src, rotation=rotation))
    b, want = (kv(dst, pages=4, size=64, layout="HND", scales="tail", rotation="hadamard") for _ in range(2))
    tersekv.transcode(a, SRC, b, DST, num_tokens=90)
    tersekv.transcode(a, SRC, want, DST, num_tokens=90, backend="torch")
    assert_equal(b, want)


EIGHT_BITS = ["fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head"]
ANY_BITS = [
    *product(["bf16", "fp16", *EIGHT_BITS], ["int4_per_token_head"], [None, "hadamard"]),
    *product(EIGHT_BITS, ["nvfp4"], [None]),
    *product(["int4_per_token_head"], ["fp8_e4m3", "bf16", "fp16"], [None]),
]


@pytest.mark.parametrize(("src", "dst", "rotation"), ANY_BITS)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_rows_of_any_bits_become_the_oracles(src, dst, rotation, dim):
    """NaN, infinities, ranges that overflow, subnormals: the kernel's codes saturate where the oracle compares."""
    sizes = {"num_layers": 2, "num_kv_heads": H, "head_dim": dim, "device": "cuda"}
    scales = {f"{side}_scale": 0.37 for side in "kv"} if src in ("fp8_e4m3", "fp8_e5m2") else {}
    a = PagedKVCache.allocate(num_pages=64, page_size=16, format=src, **sizes, **scales)
    for layer in a.layers:
        for x in (layer.k, layer.v):
            x.view(torch.uint8).random_()
            x[::2] = x[::2].float().nan_to_num(1, 2, -3).to(x.dtype) if x.dtype.is_floating_point else x[::2]
            x[1::4, :, :, 1:] = 0
        for x in (layer.k_scale_cache, layer.v_scale_cache):
            if x is not None:
                x.uniform_(1e-9, 1e-2)
    b, want = (
        PagedKVCache.allocate(num_pages=16, page_size=64, format=dst, rotation=rotation, **sizes) for _ in range(2)
    )
    pages = [*range(64)], [*range(16)]
    tersekv.transcode(a, pages[0], b, pages[1])
    tersekv.transcode(a, pages[0], want, pages[1], backend="torch")
    assert_equal(b, want)


def test_a_captured_transcode_follows_pages_and_numbers():
    a, b, want = (
        filled(kv("fp8_e4m3")),
        kv("int4_per_token_head", pages=4, size=64),
        kv("int4_per_token_head", pages=4, size=64),
    )
    src_pages, dst_pages = torch.tensor(SRC, device="cuda"), torch.tensor(DST, device="cuda")
    number = torch.tensor([90], device="cuda")
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="before a CUDA graph is captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        tersekv.transcode(a, src_pages, b, dst_pages, num_tokens=number)
    tersekv.transcode(a, src_pages, b, dst_pages, num_tokens=number)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        tersekv.transcode(a, src_pages, b, dst_pages, num_tokens=number)
    for n, pages in ((90, DST), (33, [0, 2]), (0, [0, 1]), (1, [3, 0])):
        number.fill_(n)
        dst_pages.copy_(torch.tensor(pages))
        src_pages.copy_(src_pages.roll(1))
        graph.replay()
        tersekv.transcode(a, src_pages.tolist(), want, pages, num_tokens=n, backend="torch")
    assert_equal(b, want)


def test_no_call_waits_for_the_device():
    a, b = filled(kv("bf16")), kv("nvfp4", pages=4, size=64)
    pages = torch.tensor(SRC, device="cuda"), torch.tensor(DST, device="cuda")
    tersekv.transcode(a, pages[0], b, pages[1], num_tokens=90)
    torch.cuda.set_sync_debug_mode("error")
    try:
        tersekv.transcode(a, pages[0], b, pages[1], num_tokens=91)
        tersekv.transcode(a, pages[0], b, pages[1], num_tokens=91)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("chunk", [1 << 12, 1 << 24])
@pytest.mark.parametrize("format", KV_FORMATS)
def test_records_are_those_of_the_cpu(format, chunk, monkeypatch, tmp_path):
    """Written in the order of the stream: what an append before them left, and what is read after them."""
    monkeypatch.setattr(record_file, "_CHUNK", chunk)
    a, b = filled(kv(format)), kv(format, layout="HND", scales="tail")
    record = tersekv.export_pages(a, SRC, num_tokens=90)
    assert record.is_pinned()
    host = kv(format, device="cpu")
    assert tersekv.import_pages(host, SRC, record) == 90
    assert torch.equal(tersekv.export_pages(host, SRC, num_tokens=90), record)
    tersekv.export_pages(a, SRC, tmp_path / "record", num_tokens=90)
    for given in (record, tmp_path / "record"):
        for layer in b.layers:
            layer.k.view(torch.uint8).zero_()
        assert tersekv.import_pages(b, [0, 1, 2, 3, 4, 11], given) == 90
        assert_equal(a, b, SRC, [0, 1, 2, 3, 4, 11])
    torn = record.clone()
    torn[-1] ^= 1
    with pytest.raises(ValueError, match="want bytes of the checksum"):
        tersekv.import_pages(b, SRC, torn)


@pytest.mark.parametrize("format", KV_FORMATS)
def test_chunks_of_lmcache_are_the_same_bytes_on_both_devices(format):
    chunk = torch.randn(2, LAYERS, 37, H * D).bfloat16()
    found = []
    for device in ("cpu", "cuda"):
        codec, back = ChunkCodec(f"{format}+rotated", D, device), torch.empty_like(chunk)
        data = torch.empty(codec.nbytes(chunk.shape), dtype=torch.uint8)
        codec.encode(chunk, data)
        codec.decode(data, back)
        found.append((data, as_bytes(back)))
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert torch.equal(on_cpu, on_gpu)
