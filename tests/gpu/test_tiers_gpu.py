"""TieredPool on the device: rows are right while copies run beside kernels, and no call waits."""

from __future__ import annotations

import pytest
import tier_traffic
import torch

import tersekv
from tersekv import PagedKVCache, PagedLatentCache, TieredPool


def kv(pages=9, format="fp8_e4m3", **options) -> PagedKVCache:
    return PagedKVCache.allocate(num_pages=pages, format=format, device="cuda", **{**tier_traffic.SIZES, **options})


@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 20])
@pytest.mark.parametrize("busy", [False, True])
def test_rows_are_right_in_any_traffic(chunk_bytes, busy):
    """busy: the caller's stream is behind, so that whoever does not wait for it is seen."""
    cache = kv()
    pool = TieredPool(cache, cold_pages=40, chunk_bytes=chunk_bytes)
    tier_traffic.run(cache, pool, 3, seed=1)  # what is compiled once
    pool = TieredPool(cache, cold_pages=40, chunk_bytes=chunk_bytes)
    got = tier_traffic.run(cache, pool, 150, seed=9, before=lambda: torch.cuda._sleep(200_000) if busy else None)
    assert got["right"].all()
    assert got["cold"] > 0


def test_wrong_rows_would_be_seen(monkeypatch):
    cache = kv()
    pool = TieredPool(cache, cold_pages=40)
    monkeypatch.setattr(pool._mover, "back", lambda moves: None)
    assert not tier_traffic.run(cache, pool, 150, seed=9)["right"].all()


@pytest.mark.parametrize("format", [None, "int4_per_token_head"])
def test_no_call_waits_for_the_device(format):
    cache = kv(3)
    pool = TieredPool(cache, cold_pages=8, cold_format=format, chunk_bytes=1)
    slow = torch.zeros((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for request, tokens in enumerate(([*range(10)], [*range(20, 30)], [*range(10)])):
            torch.cuda._sleep(500_000_000)
            slow += 1
            done = torch.cuda.Event()
            done.record()
            got = pool.acquire(request, tokens)
            assert not done.query()  # all of it lies ahead still
            got.wait()
            pool.release(request, tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert got.num_cold_tokens == 8
    assert got.ready is not None


@pytest.mark.parametrize("format", ["int4_per_token_head", "nvfp4", "fp8_per_token_head"])
def test_what_comes_back_was_transcoded_there_and_back(format):
    cache, tokens = kv(4, "bf16"), [*range(13)]
    pool = TieredPool(cache, cold_pages=8, cold_format=format, rotation="hadamard", chunk_bytes=1)
    got = pool.acquire(0, tokens)
    x = torch.randn(2, 13, 2, 32, device="cuda")
    for layer in cache.layers:
        tersekv.append(*x, layer, pool.slot_mapping([0], [13], device="cuda"))
    want, cold = kv(3, "bf16"), kv(3, format, rotation="hadamard")
    tersekv.transcode(cache, list(got.pages[:3]), cold, [0, 1, 2])
    tersekv.transcode(cold, [0, 1, 2], want, [0, 1, 2])
    pool.release(0, tokens)
    pool.make_room(4)
    for layer in cache.layers:
        layer.k.zero_()
        layer.v.zero_()
    got = pool.acquire(1, tokens)
    got.wait()
    for layer, expected in zip(cache.layers, want.layers, strict=True):
        assert torch.equal(layer.k[list(got.pages[:3])], expected.k)
        assert torch.equal(layer.v[list(got.pages[:3])], expected.v)


def test_latents_come_back():
    cache = PagedLatentCache.allocate(2, 3, 64, format="fp8_ds_mla", device="cuda")
    pool = TieredPool(cache, cold_pages=3)
    for layer in cache.layers:
        for x in (layer.ckv, layer.kpe, layer.ckv_scale_cache):
            x.view(torch.uint8).random_()
    pages = pool.acquire(0, [*range(130)]).pages[:2]
    before = [x[list(pages)].clone() for layer in cache.layers for x in (layer.ckv.view(torch.uint8), layer.kpe)]
    pool.release(0, [*range(130)])
    pool.make_room(3)
    got = pool.acquire(1, [*range(130)])
    got.wait()
    after = [x[list(got.pages[:2])] for layer in cache.layers for x in (layer.ckv.view(torch.uint8), layer.kpe)]
    for x, y in zip(before, after, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_a_captured_decode_reads_pages_that_came_back():
    cache, tokens = kv(6, "bf16", page_size=16, head_dim=64), [*range(40)]
    pool = TieredPool(cache, cold_pages=6)
    pool.acquire(0, tokens)
    x = torch.randn(2, 40, 2, 64, device="cuda", dtype=torch.bfloat16)
    for layer in cache.layers:
        tersekv.append(*x, layer, pool.slot_mapping([0], [40], device="cuda"))
    q, lens = torch.randn(1, 4, 64, device="cuda", dtype=torch.bfloat16), torch.tensor([32], device="cuda").int()
    table = pool.page_table([0], device="cuda")
    want = tersekv.decode(q, cache[1], table, lens)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tersekv.decode(q, cache[1], table, lens)
    pool.release(0, tokens)
    pool.make_room(6)
    for layer in cache.layers:
        layer.k.zero_()
        layer.v.zero_()
    pool.add("other", 16)  # so that pages have other numbers
    got = pool.acquire(1, tokens)
    table.copy_(pool.page_table([1], device="cuda"))
    got.wait()
    graph.replay()
    assert torch.equal(out, want)
