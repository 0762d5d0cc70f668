"""`tersekv bench --ops index`: what is timed is judged first."""

from __future__ import annotations

import pytest
import torch

from tersekv.testing.bench import data, engine, index, measure
from tersekv.testing.bench.cases import CPU_QUICK, GPU, Case, grid, with_cells
from tersekv.testing.bench.engine import OK, RED

SMALL = {
    "index_scores": Case("index_scores", "index_fp8", 2, 40, heads=4, page=16, uneven=True),
    "index_topk": Case("index_topk", "fp32", 2, 3000, heads=1),
    "index_select": Case("index_select", "index_fp8", 2, 2100, heads=4, page=16),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e5})
    monkeypatch.setattr(measure, "_CPU_SECONDS", 0.01)


def test_the_grid_holds_the_cells_that_others_publish():
    every = {c.id for c in grid(GPU, ("index",))}
    for b in (1, 8, 32, 64):
        for n in (4096, 16384, 65536):
            assert f"index_scores / index_fp8 / {b} x {n} / H 64 / page 64" in every
            assert f"index_topk / fp32 / {b} x {n} / H 1 / page 64" in every
    assert {c.cell for c in grid(with_cells(CPU_QUICK, ["3x70"]), ("index",))} == {"3 x 70"}


@pytest.mark.parametrize("op", SMALL)
def test_a_right_result_is_timed_and_one_that_is_not_written_is_red(op, monkeypatch):
    right = engine.run(SMALL[op], torch.device("cpu"))
    assert (right.status, right.reason) == (OK, "")
    assert right.us is not None
    monkeypatch.setattr(index, op, lambda *a, **k: None)
    wrong = engine.run(SMALL[op], torch.device("cpu"))
    assert (wrong.status, wrong.us) == (RED, None)
