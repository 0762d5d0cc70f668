"""bench --ops sparse: its cells, and that what is not written, or from another list, is not timed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tersekv.compat.flash_mla import flash_mla_with_kvcache
from tersekv.testing.bench import data, engine, flashmla, measure, sparse
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


def test_flashmla_is_found_on_the_path(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    assert "has no _flashmla_C.abi3.so" in flashmla.missing()
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / flashmla.FILE).write_bytes(b"")
    assert flashmla.library() == tmp_path / "vllm" / flashmla.FILE
    assert "cannot be loaded" in flashmla.missing()


def test_flashmla_is_judged_beside_ours(monkeypatch):
    """Its operator, played by our function of its signature; heads are padded, and a plan is handed back and forth."""
    plans = []

    def sparse_decode_fwd(q, kv, indices, lens, sink, plan, splits, *extra_rank_scale_out):
        *extra, rank, scale, out = extra_rank_scale_out
        assert (q.shape[2], kv.shape[2:], extra, out) == (64, (1, 656), [None] * 3, None)
        plans.append(plan)
        out, lse = flash_mla_with_kvcache(q, kv, None, None, rank, None, None, scale, False, True, indices)
        return out, lse, torch.ones(1), torch.ones(1)

    monkeypatch.setattr(flashmla, "missing", lambda: None)
    operators = SimpleNamespace(_flashmla_C=SimpleNamespace(sparse_decode_fwd=sparse_decode_fwd))
    monkeypatch.setattr(flashmla, "torch", SimpleNamespace(**{**vars(torch), "ops": operators}))
    case = replace(SMALL, tokens=100, listed=64)
    (peer,) = engine.run(case, torch.device("cpu"), ["flashmla"]).peers
    assert peer.name == "flashmla"
    assert not peer.reason
    assert peer.us > 0
    assert plans[0] is None
    assert plans[-1] is not None
    for other in (SMALL, replace(case, requests=0, op="sparse_prefill")):  # 9 entries are no list of its
        assert engine.run(other, torch.device("cpu"), ["flashmla"]).peers == ()
