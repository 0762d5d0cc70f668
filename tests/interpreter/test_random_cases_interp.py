"""Random cases, those that are small enough, over the Triton backend, interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest

from tersekv.testing import verify
from tersekv.testing.cases import OPS, Case
from tersekv.testing.draw import draw

SEED, EACH = 11, 5


def small(case: Case) -> bool:
    """A program of the interpreter takes some milliseconds, and heads, tokens and columns multiply them."""
    heads = case.heads * case.group
    latent = case.op in ("mla_append", "mla_decode", "mla_prefill", "mla_decode_branch")
    columns = case.rank if latent else case.dim + case.dim_v
    rows = sum(case.q_lens if case.q_lens is not None else (1,) * len(case.lens))
    if case.op == "merge_states":
        rows, heads = case.lens[0], heads * case.parts
    return sum(case.lens) < 120 and rows * heads < 200 and heads < 40 and columns <= 520 and len(case.lens) < 8


def drawn(op: str) -> Iterator[Case]:
    return islice((c for c in (draw(SEED, i, (op,)) for i in count()) if small(c)), EACH)


@pytest.mark.parametrize("case", [c for op in OPS for c in drawn(op)], ids=lambda c: c.id)
def test_case(case):
    result = verify.run(case, "cpu", "triton")
    assert result.status != verify.FAILED, result.message
