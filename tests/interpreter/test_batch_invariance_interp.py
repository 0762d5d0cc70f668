"""batch_invariant, interpreted: a request's bits alone and among others, and that they are right."""

from __future__ import annotations

import pytest
import torch
from alone import attend, changed, problem

from tersekv.backends.host import attention_launches, launch
from tersekv.backends.triton.parts import tile_scheduler

LENS, ROWS = (200, 3, 65, 0), (1, 2, 7, 1)  # one, two, and more pieces; more rows than a block of 16
CASES = [("decode", "fp8_e4m3"), ("mla_decode", "fp8_ds_mla"), ("prefill", "fp8_e4m3")]
ON = {"backend": "triton", "batch_invariant": True}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Short pieces, and few programs: their number is what the interpreter's time goes into."""
    monkeypatch.setattr(attention_launches, "SPLIT_KEYS", 64)
    monkeypatch.setattr(launch, "num_sms", lambda f: 5)


@pytest.mark.parametrize(("op", "format"), CASES)
def test_kernels_keep_the_bits_of_a_request(op, format):
    case, q = problem(op, format, LENS, ROWS)
    assert changed(op, case, q, ROWS, **ON) == []
    want, lse = attend(op, case, q, ROWS, backend="torch")
    got, sums = attend(op, case, q, ROWS, **ON)
    assert (got.float() - want.float()).norm() <= 5e-3 * want.float().norm()
    assert torch.allclose(sums, lse, atol=1e-3)


def test_without_the_option_they_do_not():
    case, q = problem("decode", "fp8_e4m3", LENS, (1,) * 4)
    assert changed("decode", case, q, (1,) * 4, backend="triton")


def test_equal_rows_windows_and_sinks():
    case, q = problem("decode", "fp8_e4m3", LENS, (2,) * 4)
    assert changed("decode", case, q, (2,) * 4, window=90, sinks=torch.randn(q.shape[1]), **ON) == []


def test_long_requests_have_longer_pieces_and_not_more(monkeypatch):
    """Pieces beyond the most are longer; of a table with more room they lie further apart, and are the same."""
    monkeypatch.setattr(attention_launches, "MAX_SPLITS", 4)
    monkeypatch.setattr(tile_scheduler, "MAX_SPLITS", type(tile_scheduler.MAX_SPLITS)(4))
    case, q = problem("decode", "fp8_e4m3", (400, 70), (1, 1))
    assert changed("decode", case, q, (1, 1), **ON) == []


def test_the_host_and_the_kernels_have_the_same_most():
    assert tile_scheduler.MAX_SPLITS.value == attention_launches.MAX_SPLITS
