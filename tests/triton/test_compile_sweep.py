"""Specialisations that nobody listed compile: a part of the sweep, and what the whole one kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import sweep
from sweep_axes import AXES, all_pairs, call_of, covering, pairs_of

from tersekv.dispatch.plan import plan
from tersekv.errors import UnsupportedError

KEPT = Path(__file__).parents[2] / "benchmarks" / "results" / "compile_sweep.json"


def failures(todo, arch) -> list:
    return [(one.op, one.row, error) for one in sweep.sweep(todo, arch) for _, _, error in one.kernels if error]


@pytest.mark.parametrize(("arch", "n"), [pytest.param(80, 1, marks=pytest.mark.long), (90, 1)])
def test_rows_that_hold_many_pairs_compile(arch, n):
    todo = [(op, row) for op in AXES for row in sweep.first_rows(op, arch, seed=0, n=n)]
    assert [op for op, _ in todo] == [op for op in AXES for _ in range(n)], "an operation without a row"
    assert failures(todo, arch) == []


@pytest.mark.parametrize("arch", [89, 120, "gfx942"])
def test_rows_compile_for_other_chips(arch):
    assert failures([("append", row) for row in sweep.first_rows("append", arch, seed=1, n=1)], arch) == []


def test_rows_hold_every_pair():
    axes = {"a": (1, 2, 3), "b": ("x", "y"), "c": (False, True), "d": (0, 1, 2, 3)}
    refused: set[tuple] = set()
    rows = list(covering(axes, lambda row: (row["a"], row["d"]) != (3, 2) and row["b"] == "x", 0, refused))
    held = set().union(*map(pairs_of, rows))
    assert held | refused == all_pairs(axes)
    assert not held & refused
    assert (("a", 3), ("d", 2)) in refused
    assert len([p for p in refused if ("b", "y") not in p]) == 1
    assert len(rows) < 18, "far fewer than the 24 that are taken"


def test_index_dtypes_are_mixed_and_tensors_moved_off_their_alignment():
    row = {"place": "pages", "i_batch_indices": "int64", "i_kv_indptr": "uint32", "i_kv_indices": "int64"}
    call = call_of("append", {**row, "i_kv_positions": "int32", "shift": "caches", "dim": 64})
    names = ("batch_indices", "kv_positions", "kv_indptr", "kv_indices")
    assert [str(getattr(call, n).dtype)[6:] for n in names] == ["int64", "int32", "uint32", "int64"]
    assert [x.data_ptr() % 16 != 0 for x in (call.k_cache, call.v_cache, call.k)] == [True, True, False]


def test_a_compiler_that_dies_costs_one_row(monkeypatch):
    todo = [("merge_states", {"lse": True}), ("merge_states", {"lse": False})]
    monkeypatch.setattr(sweep, "_work", dies_or_reports)
    first, second = sweep.sweep(todo, 90)
    assert (first.op, first.row, first.kernels[0][2]) == (*todo[0], "the compiler's process ended: 7")
    assert (second.op, second.row, second.kernels) == (*todo[1], [("kernel", "key", "")])


def dies_or_reports(pipe, arch):
    while (item := pipe.recv()) is not None:
        if item[1]["lse"]:
            raise SystemExit(7)
        pipe.send([("kernel", "key", "")])


def test_the_whole_sweep_found_nothing():
    """As kept of each version of Triton: pairs are held or refused, and every kernel was compiled."""
    kept = json.loads(KEPT.read_text())
    assert {v.rsplit(".", 1)[0] for v in kept} >= {"3.6"}
    for version, archs in kept.items():
        for arch, ops in archs.items():
            for op, found in ops.items():
                assert found["failed"] == {}, (version, arch, op)
                assert found["pairs"] == len(all_pairs(AXES[op])), f"{op} has other axes since: make sweep"
                assert sum(found["compiled"].values()) > 0


@pytest.mark.parametrize(("op", "fmt", "name"), [("decode", "fp8_e4m3", "v_cache"), ("mla_decode", "fp8_e4m3", "ckv")])
def test_a_cache_at_an_odd_address_is_refused_by_name(op, fmt, name):
    """Codes are read two at a time."""
    options = {"format": fmt, "split": True, "rank": 512} if op == "mla_decode" else {"format": fmt}
    with pytest.raises(UnsupportedError, match=r"triton: wants \w+ to begin with a whole 16-bit word, got an odd"):
        plan(op, call_of(op, {**options, "shift": "caches"}), arch=90)
    call = call_of(op, options)
    cache = getattr(call, name)
    odd = cache.new_empty(cache.numel() + 2)[1:-1].view(cache.shape)
    with pytest.raises(UnsupportedError, match=rf"triton: wants {name} to begin with a whole 16-bit word"):
        plan(op, call._replace(**{name: odd}), arch=90)
    even = cache.new_empty(cache.numel() + 2)[2:].view(cache.shape)
    assert plan(op, call._replace(**{name: even}), arch=90).backend == "triton"
