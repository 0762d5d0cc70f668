"""bench --ops sparse: its cells, and that what is not written, or from another list, is not timed."""

from __future__ import annotations

import pytest
import torch

from tersekv.testing.bench import data, engine, measure, sparse
from tersekv.testing.bench.cases import GPU, Case, grid
from tersekv.testing.bench.engine import OK, RED

SMALL = Case("sparse", "fp8_ds_mla", 2, 40, heads=4, page=16, listed=9)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e5})
    monkeypatch.setattr(measure, "_CPU_SECONDS", 0.01)


def test_the_grid_holds_every_batch_and_head_count():
    every = {c.id for c in grid(GPU, ("sparse",))}
    for heads in (16, 64, 128):
        for b in (1, 8, 32, 128):
            assert f"sparse / fp8_ds_mla / {b} x 8192 / H {heads} / page 64 / 2048 listed" in every


def test_it_is_timed():
    r = engine.run(SMALL, torch.device("cpu"))
    assert r.status == OK, r.reason
    assert r.nbytes == 2 * 9 * (656 + 4)


@pytest.mark.parametrize("wrong", ["nothing", "another list"])
def test_a_wrong_result_is_red(wrong, monkeypatch):
    real = sparse.mla_decode

    def other(*args, indices, **options):
        return None if wrong == "nothing" else real(*args, indices=indices // 2, **options)

    monkeypatch.setattr(sparse, "mla_decode", other)
    assert engine.run(SMALL, torch.device("cpu")).status == RED
