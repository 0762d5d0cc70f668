"""Sinks of +inf and −inf on a GPU: the first take all, output 0 and LSE +inf; the second are as none."""

from __future__ import annotations

import pytest
import torch

import tersekv

INF = float("inf")


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "nvfp4"])
@pytest.mark.parametrize("rows", [1, 20])
@pytest.mark.parametrize("dim", [128, 512])
def test_infinite_sinks(format, rows, dim):
    torch.manual_seed(0)
    layer = tersekv.PagedKVCache.allocate(1, 16, 64, 2, dim, format=format, device="cuda")[0]
    k, v = torch.randn(2, 900, 2, dim, device="cuda")
    tersekv.append(k, v, layer, torch.arange(900, device="cuda"))
    table = torch.arange(15, dtype=torch.int32, device="cuda").expand(2, 15).contiguous()
    lens = torch.tensor([900, 40], dtype=torch.int32, device="cuda")
    q = torch.randn(2 * rows, 16, dim, device="cuda").bfloat16()
    sinks = torch.randn(16, device="cuda")
    sinks[::5], sinks[1::5] = INF, -INF
    out, lse = tersekv.decode(q, layer, table, lens, sinks=sinks, return_lse=True)
    assert (out[:, ::5] == 0).all()
    assert (lse[:, ::5] == INF).all()
    want, want_lse = tersekv.decode(q, layer, table, lens, sinks=sinks, return_lse=True, backend="torch")
    assert float((out - want).norm() / want.norm()) < 3e-3
    finite = want_lse.isfinite()
    torch.testing.assert_close(lse[finite], want_lse[finite], rtol=0, atol=2e-3)
