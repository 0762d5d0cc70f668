"""Windows at the ends of 32 and 64 bits: as long as any request, they hide nothing."""

from __future__ import annotations

import pytest
import torch

from tersekv.backends.host import launch
from tersekv.backends.triton import attention
from tersekv.dispatch import plan
from tersekv.testing.cases import Case
from tersekv.testing.make import make
from tersekv.testing.memory import as_bytes, moved

# Beside all that is said of a plain case: more rows than tokens, whose first stand before the first key.
LENS, ROWS = (3, 70, 0), (5, 5, 5)
WINDOWS = [2**30, 2**31 - 2048, 2**31 - 1024, 2**31 - 2, 2**31 - 1, 2**31, 2**32, 2**63 - 2, 2**63 - 1]


def result(op: str, call) -> list[torch.Tensor]:
    f = plan.facts(op, call)
    plan.checks.facts(f)
    attention.run(call, attention.configure(f))
    return [as_bytes(call.out), as_bytes(call.lse)]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_a_window_longer_than_all_hides_nothing(op, window, monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda f: 1)  # so many blocks of rows take prefill's own kernel
    case = Case(op, "fp8_e4m3", "x", lens=LENS, q_lens=ROWS, heads=1, group=2, dim=16, page=16, lse=True)
    call = make(case)
    got, want = moved(call, "cpu"), call._replace(window=0)
    for x, y in zip(result(op, got._replace(window=window)), result(op, want), strict=True):
        assert torch.equal(x, y)
    assert want.lse.isfinite().any()
    assert not want.out.isnan().any()
