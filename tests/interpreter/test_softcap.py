"""Capped scores, over ten decades of caps: a cap far above the scores leaves them as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from tersekv.backends.triton.parts.softcap import apply_softcap_to_log2_scores
from tersekv.testing import verify
from tersekv.testing.cases import cases

CAPS = [10.0**n for n in range(-2, 9)]


@triton.jit
def kernel(X, Y, softcap, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(Y + at, apply_softcap_to_log2_scores(tl.load(X + at), softcap))


@pytest.mark.parametrize("cap", CAPS)
def test_every_score_has_its_digits(cap):
    x = torch.logspace(-9, 2, 2048, dtype=torch.float64)
    scores = (torch.cat((x, -x)) * cap / torch.log(torch.tensor(2.0))).float()
    got = torch.empty_like(scores)
    kernel[(1,)](scores, got, cap, len(scores))
    cap = torch.tensor(cap).double()  # as fp32 holds it
    want = cap * torch.tanh(scores.double() * torch.log(torch.tensor(2.0).double()) / cap)
    want /= torch.log(torch.tensor(2.0).double())
    assert ((got - want) / want).abs().max() < 6e-7


def test_scores_beyond_all_bounds():
    scores = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
    got = torch.empty_like(scores)
    kernel[(1,)](scores, got, 2.0, 4)
    want = 2 / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(got, torch.tensor([0.0, want, -want, float("nan")]), equal_nan=True)


@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("cap", [1e-2, 1e5, 1e8])
def test_attention(op, cap):
    plain = next(c for c in cases((op,), ("fp16",)) if c.name == "plain")
    result = verify.run(replace(plain, softcap=cap, out_dtype="float32"), "cpu", "triton")
    assert result.status == verify.PASSED, result.message
    assert result.error < 1e-3, result
