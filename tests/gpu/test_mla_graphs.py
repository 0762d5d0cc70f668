"""MLA prefill and MAX's decode branch under CUDA graphs, and the Hopper kernels against the portable ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tersekv.backends.gluon import mla_prefill as hopper
from tersekv.backends.triton.mla_prefill import entry as portable
from tersekv.compat.max import PagedKVCacheCollection, mla_decode_branch_fp8
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.compare import relative
from tersekv.testing.make import make
from tersekv.testing.memory import moved

BASE = Case(
    "mla_prefill", "bf16", "hopper", lens=(137, 1, 0, 700), q_lens=(60, 1, 0, 430), heads=1, group=16, dim_v=128,
)  # fmt: skip
ON_HOPPER = torch.cuda.get_device_capability() == (9, 0)


@pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")
@pytest.mark.parametrize(("heads", "chunk"), [(128, 0), (16, 300), (5, 0)])
def test_hopper_stores_what_the_portable_kernels_store(heads, chunk):
    """Rotated queries and cache rows to the bit; outputs nearly."""
    case = replace(BASE, group=heads, chunk=chunk)
    a, b = (moved(make(case), "cuda") for _ in range(2))
    f = plan.facts("mla_prefill", a)
    assert hopper.why_not(f) is None
    hopper.run(a, hopper.configure(f))
    portable.run(b, portable.configure(f))
    assert torch.equal(a.q, b.q)
    assert torch.equal(a.ckv.view(torch.uint8), b.ckv.view(torch.uint8))
    assert relative(a.out.double(), b.out.double()) < 3e-3
    torch.testing.assert_close(a.lse, b.lse, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("heads", "b"), [(16, 4), (128, 4), (128, 1), (128, 12)])
def test_the_decode_branch_is_captured_as_one_graph(heads, b):
    torch.manual_seed(0)
    pages, page = 5, 64
    options = {"device": "cuda", "dtype": torch.bfloat16}
    blocks = torch.randn(b * pages, 1, 1, page, 1, 576, **options)
    table = torch.randperm(b * pages, device="cuda").view(b, pages).int()
    lengths = [0, 63, 64, 250] * b
    lens = torch.tensor(lengths[:b], device="cuda", dtype=torch.int32)
    kv = PagedKVCacheCollection(blocks, lens, table, 1, pages * page)
    q, out = torch.randn(b, heads, 192, **options), torch.empty(b, heads, 128, **options)
    rows, new = torch.arange(b + 1, device="cuda", dtype=torch.int32), torch.randn(b, 576, **options)
    freqs, gamma = torch.randn(pages * page, 64, device="cuda"), torch.ones(512, **options)
    sizes = (512, 128), (128, 512)
    w_uk, w_uv = (torch.randn(heads, *n, device="cuda").mul(50).clamp(-448, 448).to(torch.float8_e4m3fn) for n in sizes)
    s_uk, s_uv = (torch.rand(heads, *n, device="cuda") / 1000 for n in ((4, 1), (1, 4)))

    def step() -> torch.Tensor:
        mla_decode_branch_fp8(out, q, rows, freqs, gamma, kv, 0, 192**-0.5, 1e-6, w_uk, s_uk, w_uv, s_uv, kv_input=new)
        return out.clone()

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for n in (lengths, [300, 1, 2, 65] * b):
        lens.copy_(torch.tensor(n[:b]))
        q.normal_()
        graph.replay()
        assert got.isfinite().all()
        torch.testing.assert_close(got, step(), rtol=0, atol=0)
