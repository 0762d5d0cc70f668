"""merge_states in Triton gives the oracle's results, in the interpreter."""

from __future__ import annotations

import pytest
import torch
from against_oracle import assert_close, backends, write_cases

from tersekv.calls import MergeCall
from tersekv.dispatch.plan import facts
from tersekv.testing.make import make
from tersekv.testing.memory import moved

OP = "merge_states"
EPSILON = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def check(call: MergeCall) -> None:
    triton, torch_ = backends(OP)
    other = moved(call, "cpu")
    f = facts(OP, call)
    torch_.run(other, torch_.configure(f))
    triton.run(call, triton.configure(f))
    assert_close(call.out, other.out, EPSILON[call.out.dtype])
    if call.lse is not None:
        assert_close(call.lse, other.lse, 1e-6)


@pytest.mark.parametrize("case", write_cases(OP), ids=lambda c: c.id)
def test_results_are_the_oracles(case):
    check(make(case))


def test_empty_parts_weigh_nothing_whatever_they_hold():
    g = torch.Generator().manual_seed(1)
    outs, lses = torch.randn(3, 5, 2, 24, generator=g), torch.randn(3, 5, 2, generator=g)
    lses[1] = -torch.inf
    outs[1] = torch.nan
    lses[:, 2, 1] = -torch.inf
    call = MergeCall(outs, lses, torch.full((5, 2, 24), torch.nan), torch.full((5, 2), torch.nan))
    check(call)
    assert call.out[2, 1].eq(0).all()
    assert call.lse is not None
    assert call.lse[2, 1] == -torch.inf
    assert call.out.isfinite().all()


def test_strides_are_honoured_and_lse_is_optional():
    g = torch.Generator().manual_seed(2)
    outs = torch.randn(4, 2, 9, 40, generator=g).transpose(1, 2).transpose(0, 1)[:, ::2]  # [9, 2, ...]
    lses = torch.randn(2, 2, 9, generator=g).permute(2, 1, 0)
    out = torch.full((2, 2, 60), torch.nan)[..., 8:48]
    check(MergeCall(outs, lses, out, None))
