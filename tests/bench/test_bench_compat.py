"""`tersekv bench --ops host`: a line for each function of `compat`, judged, beside what it stands in for."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import pytest
import torch

from tersekv.compat import flashinfer as fi
from tersekv.compat import vllm
from tersekv.testing.bench import compat, data, engine, flashinfer, measure, peers, report
from tersekv.testing.bench.cases import GPU, grid

CPU = torch.device("cpu")
LINES = [case for case in grid(GPU, ("host",)) if case.through]
HOMES = {"flashinfer": fi, "vllm": vllm}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1.0})
    monkeypatch.setattr(flashinfer, "_WORKSPACE", 1 << 10)
    monkeypatch.setattr(measure, "host_time", lambda calls, device: measure.Timing(1.0))
    monkeypatch.setattr(engine, "release", lambda device: None)


def small(case):
    return replace(case, tokens=min(case.tokens, 32), page=min(case.page, 32), heads=min(case.heads, 8))


def test_every_function_that_others_have_has_a_line():
    public = {f"{name}.{function}" for name, module in HOMES.items() for function in module.__all__}
    assert {case.through for case in LINES} == compat.FUNCTIONS.keys()
    assert {name for name in compat.FUNCTIONS if not name.startswith("max.")} == public


def theirs(monkeypatch):
    """Our functions where theirs would be."""
    for name, function in compat.FUNCTIONS.items():
        library, _, last = name.partition(".")
        if function.theirs is not None:
            home = sys.modules.get(function.theirs)
            if not isinstance(home, types.SimpleNamespace):
                home = types.SimpleNamespace()
                monkeypatch.setitem(sys.modules, function.theirs, home)
            setattr(home, last, getattr(HOMES[library], last))


@pytest.mark.parametrize("case", LINES, ids=lambda c: f"{c.through}-{c.op}")
def test_a_line_is_judged_and_stands_beside_its_peer(case, monkeypatch):
    theirs(monkeypatch)
    r = engine.run(small(case), CPU, ["flashinfer", "vllm"])
    assert (r.status, r.reason, r.us) == (engine.OK, "", 1.0)
    library = case.through.partition(".")[0]
    assert [(p.name, p.us) for p in r.peers] == ([] if library == "max" else [(library, 1.0)])
    assert case.through in report.line(r, engine.Limits(1e12, 1e12))


@pytest.mark.parametrize("case", LINES, ids=lambda c: f"{c.through}-{c.op}")
def test_a_wrong_result_is_red(case, monkeypatch):
    """A function that does nothing, and returns what it would for other numbers."""
    problem = engine.problem_of(small(case), CPU, None)
    problem.poison()
    result = problem.calls[0]()
    assert problem.error(result) <= problem.limit
    problem.poison()
    if case.op in ("merge_states", "places") or "single" in case.through:  # what returns its results alone
        result = (result[0] + 1, *result[1:]) if isinstance(result, tuple) else result + 1
    else:
        result = None
    assert not problem.error(result) <= problem.limit


def test_no_peer_stands_in_for_a_function_of_no_library():
    assert not list(peers.SDPA().peers(engine.problem_of(small(LINES[0]), CPU, None)))
