"""Windows at the ends of 32 and 64 bits, on the host: every backend is told the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tersekv.dispatch import plan
from tersekv.ops import shards
from tersekv.testing import verify
from tersekv.testing.cases import Case
from tersekv.testing.make import make

LONGEST = 2**31 - 1024  # less the rows of a request
FAR = [2**31 - 1024, 2**31 - 1, 2**31, 2**62, 2**63 - 1]
CASE = Case("prefill", "fp16", "x", lens=(3, 40), q_lens=(5, 5), heads=1, group=1, dim=16, page=16, lse=True)


@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("window", FAR)
def test_a_window_that_no_request_fills_is_none(op, window):
    call = make(replace(CASE, op=op))
    assert plan.facts(op, call._replace(window=window)).window == 0
    rows, kept = call.max_q_len, 2**30
    assert plan.facts(op, call._replace(window=kept)).window == kept
    assert plan.facts(op, call._replace(window=LONGEST - rows)).window == LONGEST - rows
    assert plan.facts(op, call._replace(window=LONGEST - rows + 1)).window == 0


@pytest.mark.parametrize("op", ["decode", "prefill"])
@pytest.mark.parametrize("backend", ["torch", "cpu"])
@pytest.mark.parametrize("window", [2**31 - 2, *FAR])
def test_rows_before_the_first_key_see_nothing_and_the_others_all(op, backend, window):
    result = verify.run(replace(CASE, op=op, window=window), "cpu", backend)
    assert result.status in (verify.PASSED, verify.UNSUPPORTED), result.message


@pytest.mark.parametrize("window", [2**31 - 1, 2**63 - 1])  # no multiples of interleave * world
def test_across_ranks_too(window):
    deal = shards.TokenSharding(0, 2, 4)
    table, lens = torch.arange(8, dtype=torch.int32).view(2, 4), torch.tensor([1, 20])
    cu = torch.tensor([0, 5, 10], dtype=torch.int32)
    near, far = (shards.local_rows(deal, 10, table, lens, cu, 5, window=n, page_size=8) for n in (999, window))
    assert torch.equal(near.seq_lens, far.seq_lens)
