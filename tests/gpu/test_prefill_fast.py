"""On Hopper: prefill with precision="fast" over int8 keys with a scale each, whose query becomes int8.

Judged by dense attention in fp64 over the stored codes, beside the exact kernel and Triton's.
"""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv.cache import PagedKVCache, PagedKVLayer
from tersekv.testing.bench import data

HEADS, GROUP, PAGE = 2, 4, 64
ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs sm_90")
FORMAT = "int8_per_token_head"
LEAST, MOST = 3e-3, 1e-2  # of outputs, where scores are N(0, 1): in PyTorch with such a query 6.5e-3


class Call:
    """One request: its last `rows` of `tokens` are the query."""

    def __init__(self, dim: int, rows: int = 512, tokens: int = 2000) -> None:
        torch.manual_seed(11)
        self.tokens, self.scale = tokens, dim**-0.5
        pages = -(-tokens // PAGE)
        self.layer: PagedKVLayer = PagedKVCache.allocate(1, pages, PAGE, HEADS, dim, format=FORMAT, device="cuda")[0]
        self.table = torch.randperm(pages, device="cuda").int()[None]
        self.lens = torch.tensor([tokens], dtype=torch.int32, device="cuda")
        self.cu = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
        self.q = torch.randn(rows, HEADS * GROUP, dim, device="cuda").bfloat16()
        token = torch.arange(tokens, device="cuda")
        slots = self.table[0].long()[token // PAGE] * PAGE + token % PAGE
        k, v = (torch.randn(tokens, HEADS, dim, device="cuda").bfloat16() for _ in range(2))
        tersekv.append(k, v, self.layer, slots)

    def run(self, precision: str, backend: str | None = "gluon", **more):
        return tersekv.prefill(self.q, self.layer, self.table, self.lens, self.cu, softmax_scale=self.scale,
                               precision=precision, backend=backend, return_lse=True, **more)  # fmt: skip

    def want(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) in fp64."""
        f, where = tersekv.KV_FORMATS[FORMAT], data.places(self.table[0], self.tokens, PAGE)
        c = self.layer
        k = data.values(c.k, c.k_scale_cache, f, where).double().repeat_interleave(GROUP, 1)
        v = data.values(c.v, c.v_scale_cache, f, where).double().repeat_interleave(GROUP, 1)
        s = torch.einsum("thd,nhd->thn", self.q.double(), k) * self.scale
        rows = len(self.q)
        last = torch.arange(self.tokens - rows, self.tokens, device="cuda")
        s = s.masked_fill((torch.arange(self.tokens, device="cuda") > last[:, None])[:, None], -torch.inf)
        return torch.einsum("thn,nhd->thd", s.softmax(-1), v), s.logsumexp(-1)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_errors_are_those_of_the_querys_codes(dim):
    call = Call(dim)
    want, lse = call.want()
    (out, out_lse), (exact, _), (portable, _) = (
        call.run("fast"), call.run("exact"), call.run("fast", "triton")
    )  # fmt: skip
    error = relative(out, want)
    print(f"\nD {dim}: fast {error:.2e} (lse {float((out_lse - lse).abs().max()):.1e}), "
          f"exact {relative(exact, want):.2e}, triton {relative(portable, want):.2e}")  # fmt: skip
    assert LEAST <= error <= MOST
    assert not torch.equal(out, exact), "the kernel of precision='exact' ran"
    assert relative(exact, want) <= 3e-3
    assert relative(portable, want) <= 3e-3
    assert float((out_lse - lse).abs().max()) <= 2e-2


def test_rows_that_are_zero_tiny_or_huge_are_as_exact():
    call = Call(128)
    call.q[:64] = 0
    call.q[64:128] *= 1e-30
    call.q[128:192] *= 1e-3
    call.q[192:256, :, 0] = 3e4  # beside it, others have few of int8's codes
    out = call.run("fast")[0]
    want = call.want()[0]
    assert relative(out[:192], want[:192]) <= MOST
    assert relative(out[256:], want[256:]) <= MOST
    assert out.isfinite().all()


def test_a_query_row_with_nan_gives_nan_and_no_other():
    call = Call(128)
    want = call.run("fast")[0]
    call.q[100, 3, 17] = torch.nan
    out = call.run("fast")[0]
    assert out[100, 3].isnan().all()
    out[100, 3] = want[100, 3]
    assert torch.equal(out, want)


def test_replays_give_equal_bits():
    call = Call(128, rows=2000)
    want, lse = (x.clone() for x in call.run("fast"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, out_lse = call.run("fast")
    for _ in range(20):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out, want)
        assert torch.equal(out_lse, lse)
