"""batch_invariant="prefill", interpreted: a token's bits through chunks of prefill and steps of decode."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from alone import attend, problem
from chunks import rows_that_differ, same

from tersekv.backends.host import launch
from tersekv.backends.triton.prefill import entry
from tersekv.dispatch import plan

LENS, ROWS = (200, 3, 65), (9, 3, 2)
CHUNKS = ((4, 5), (2, 1))


@pytest.fixture(autouse=True)
def _short_splits(monkeypatch):
    monkeypatch.setattr(entry, "_SPLIT_KEYS", 64)


@pytest.fixture(autouse=True)
def _products_alike_in_every_row(monkeypatch):
    """BLAS, by which the interpreter multiplies, rounds a row by its place in a tile on some CPUs; not in fp64."""
    matmul = np.matmul
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: matmul(a, b, dtype=np.float64).astype(dtype))


@pytest.fixture(params=[1, 1000], ids=["a program a row", "a program a split"])
def _programs(request, monkeypatch):
    on_a_chip_of(request.param, monkeypatch)


def on_a_chip_of(multiprocessors, monkeypatch):
    """Few multiprocessors, whose programs attend to all splits, or many; with no plan made for another chip."""
    monkeypatch.setattr(launch, "num_sms", lambda f: multiprocessors)
    for name in ("_plans", "_recent"):
        monkeypatch.setattr(plan, name, {})


@pytest.mark.usefixtures("_programs")
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "int4_per_token_head"])
def test_a_token_has_the_same_bits(format):
    case, q = problem("prefill", format, LENS, ROWS)
    assert rows_that_differ(case, q, ROWS, CHUNKS, backend="triton") == []
    want, lse = attend("prefill", case, q, ROWS, backend="torch")
    got, sums = attend("prefill", case, q, ROWS, backend="triton", batch_invariant="prefill")
    assert (got.float() - want.float()).norm() <= 5e-3 * want.float().norm()
    assert torch.allclose(sums, lse, atol=1e-3)


@pytest.mark.usefixtures("_programs")
def test_windows_and_sinks():
    case, q = problem("prefill", "fp8_e4m3", LENS, ROWS)
    options = {"window": 90, "sinks": torch.randn(q.shape[1]), "backend": "triton"}
    assert rows_that_differ(case, q, ROWS, CHUNKS, **options) == []


def test_one_program_or_many_round_the_same(monkeypatch):
    case, q = problem("prefill", "nvfp4", LENS, ROWS)
    found, launches = [], []
    configure = entry._fixed_split_launches
    monkeypatch.setattr(entry, "_fixed_split_launches", lambda *a: launches.append(configure(*a)) or launches[-1])
    for multiprocessors in (1, 1000):
        on_a_chip_of(multiprocessors, monkeypatch)
        found.append(attend("prefill", case, q, ROWS, backend="triton", batch_invariant="prefill"))
    assert [len(x.kernel_launches) for x in launches] == [1, 2]
    assert same(*found)


def test_blocks_keep_their_order_where_a_window_masks_other_ones(monkeypatch):
    monkeypatch.setattr(entry, "_SPLIT_KEYS", 1024)
    case, q = problem("prefill", "fp8_e4m3", (400,), (9,))
    assert rows_that_differ(case, q, (9,), ((4, 5),), backend="triton", window=205) == []
