"""CUDA graphs, torch.compile and hardware casts, on the device itself."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv import KV_FORMATS, PagedKVCache, PagedLatentCache

B, HQ, H, D, S, PAGES = 4, 8, 2, 128, 64, 40


def step_tensors(fmt: str):
    torch.manual_seed(0)
    cache = PagedKVCache.allocate(1, PAGES, S, H, D, format=fmt, device="cuda")[0]
    table = torch.randperm(PAGES, device="cuda").int().view(B, -1)
    q = torch.randn(B, HQ, D, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, B, H, D, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([1, 64, 130, 639], device="cuda", dtype=torch.int32)
    rows = torch.arange(B, device="cuda")
    history_k, history_v = torch.randn(2, PAGES * S, H, D, device="cuda", dtype=torch.bfloat16)
    tersekv.append(history_k, history_v, cache, torch.arange(PAGES * S, device="cuda"))

    def step():
        slots = table[rows, (lens - 1) // S].long() * S + (lens - 1) % S
        tersekv.append(k, v, cache, slots)
        return tersekv.decode(q, cache, table, lens, return_lse=True)

    return step, (q, k, v, lens)


@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_a_captured_step_follows_new_lengths(fmt):
    step, (q, k, v, lens) = step_tensors(fmt)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = step()
    for n in ([1, 64, 130, 639], [640, 1, 2, 65], [0, 0, 63, 640]):
        lens.copy_(torch.tensor(n))
        q.normal_()
        k.normal_()
        v.normal_()
        graph.replay()
        got = out.clone(), lse.clone()
        want = step()
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        empty = lens == 0
        assert (got[0][empty] == 0).all()
        assert got[1][empty].isneginf().all()


@pytest.mark.parametrize("fmt", ["fp8_e4m3", "nvfp4"])
def test_a_compiled_step_is_one_graph(fmt):
    step, _ = step_tensors(fmt)
    want = step()
    got = torch.compile(step, fullgraph=True)()
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_mla_in_a_graph():
    torch.manual_seed(0)
    cache = PagedLatentCache.allocate(1, PAGES, S, format="fp8_e4m3", device="cuda")[0]
    table = torch.randperm(PAGES, device="cuda").int().view(B, -1)
    rows = torch.randn(PAGES * S, 576, device="cuda", dtype=torch.bfloat16)
    tersekv.mla_append(rows[:, :512], rows[:, 512:], cache, torch.arange(PAGES * S, device="cuda"))
    q = torch.randn(B, 16, 576, device="cuda", dtype=torch.bfloat16)
    lens = torch.tensor([1, 64, 130, 639], device="cuda", dtype=torch.int32)

    def step():
        return tersekv.mla_decode(q, cache, table, lens, softmax_scale=0.07)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    lens.copy_(torch.tensor([640, 0, 65, 2]))
    graph.replay()
    got = out.clone()
    torch.testing.assert_close(got, step(), rtol=0, atol=0)
    assert (got[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", ["fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "nvfp4", "fp8_per_token_head"])
def test_every_16_bit_value_gets_the_oracle_s_code(fmt, dtype):
    """All 65536 bit patterns, NaN and infinities among them, cast by the hardware: neighbours in a row, then not."""
    bits = torch.arange(65536, dtype=torch.int32)
    x = torch.cat([bits, bits[torch.randperm(65536)]]).to(torch.int16).view(dtype).view(1024, 1, 128)
    codes = []
    for device, backend in (("cuda", "triton"), ("cpu", "torch")):
        cache = PagedKVCache.allocate(1, 16, 64, 1, 128, format=fmt, device=device)[0]
        tersekv.append(x.to(device), x.to(device), cache, torch.arange(1024, device=device), backend=backend)
        parts = [cache.k] if cache.k_scale_cache is None else [cache.k, cache.k_scale_cache]
        codes.append([p.cpu().contiguous().view(torch.uint8) for p in parts])
    for got, want in zip(*codes, strict=True):
        assert torch.equal(got, want)


def test_a_call_on_another_stream_and_no_host_sync():
    step, _ = step_tensors("fp8_e4m3")
    want = step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            got = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    torch.testing.assert_close(got, want, rtol=0, atol=0)
