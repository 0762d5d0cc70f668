"""Outputs that lie where inputs do: no element is written twice, since a warp may read it after another has written."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from against_oracle import backends
from triton.runtime import interpreter

from tersekv.calls import MergeCall
from tersekv.dispatch.plan import facts
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.memory import moved

# (tokens, heads): numbers of rows that no block divides.
SIZES = [(1, 3), (5, 3), (7, 5), (3, 1), (33, 6)]


@pytest.fixture
def written(monkeypatch) -> Counter[int]:
    """How often each address is stored to."""
    found: Counter[int] = Counter()
    builder = interpreter.InterpreterBuilder

    def noting(store: Any) -> Any:
        def run(self: Any, ptrs: Any, value: Any, *rest: Any) -> Any:
            mask = rest[0].data if rest and hasattr(rest[0], "data") else True
            found.update(ptrs.data[np.broadcast_to(np.asarray(mask, bool), ptrs.data.shape)].ravel().tolist())
            return store(self, ptrs, value, *rest)

        return run

    for name in ("create_store", "create_masked_store"):
        monkeypatch.setattr(builder, name, noting(getattr(builder, name)))
    return found


def of(x: torch.Tensor, written: Counter[int]) -> set[int]:
    """How often the elements of x were written."""
    at = torch.zeros(x.shape, dtype=torch.int64)
    for dim, step in enumerate(x.stride()):
        at += (torch.arange(x.shape[dim]) * step).view([-1 if i == dim else 1 for i in range(x.dim())])
    return {written[x.data_ptr() + n * x.element_size()] for n in at.flatten().tolist()}


def run(op: str, call: Any) -> Any:
    """The call on Triton; what the oracle made of the same in other memory."""
    triton, torch_ = backends(op)
    other = moved(call, "cpu")
    torch_.run(other, torch_.configure(facts(op, call)))
    triton.run(call, triton.configure(facts(op, call)))
    return other


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("op", ["rope_append", "mla_append"])
@pytest.mark.parametrize(("tokens", "heads"), SIZES)
def test_queries(op, tokens, heads, interleaved, written):
    call = make(
        Case(op, "bf16", "x", lens=(tokens,), heads=1, group=heads, rotary=32, q_nope=32, interleaved=interleaved)
    )
    call = call._replace(q_rope_out=call.q_rope, q_nope_out=call.q_nope)
    want = run(op, call)
    for name in ("q_rope", "q_nope"):
        x = getattr(call, name)
        assert of(x, written) == {1}
        assert torch.equal(x, getattr(want, name))


@pytest.mark.parametrize(("tokens", "heads"), SIZES)
def test_the_first_part_of_a_merge(tokens, heads, written):
    g = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(3, tokens, heads, 24, generator=g), torch.randn(3, tokens, heads, generator=g)
    call = MergeCall(outs, lses, outs[0], None)
    want = run("merge_states", call)
    assert of(outs[0], written) == {1}
    torch.testing.assert_close(outs[0], want.out)
