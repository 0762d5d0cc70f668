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


NOT_TIMED = {  # an indexer's: those of vLLM its package alone has, FlashInfer's choose and transform
    "flashinfer.TopKTieBreak", "flashinfer.top_k", "flashinfer.top_k_page_table_transform",
    "flashinfer.top_k_ragged_transform",
    "vllm.indexer_k_quant_and_cache", "vllm.cp_gather_indexer_k_quant_cache", "vllm.top_k_per_row_decode",
    "vllm.top_k_per_row_prefill",
}  # fmt: skip


def test_every_function_that_others_have_has_a_line():
    public = {f"{name}.{function}" for name, module in HOMES.items() for function in module.__all__}
    assert {case.through.partition(": ")[0] for case in LINES} == compat.FUNCTIONS.keys()
    ways = {tuple(case.through.partition(".")[2].split(": ")) for case in LINES if ": " in case.through}
    assert ways == {(name, way) for name, ways in compat.WAYS.items() for way in ways}
    assert {name for name in compat.FUNCTIONS if not name.startswith("max.")} == public - NOT_TIMED


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


class Recorder:
    """Stands for a function, and for a wrapper with a `run`: what each call was given by name."""

    def __init__(self) -> None:
        self.given: list[dict] = []

    def __call__(self, *args, **options):
        self.given.append(options)
        return self

    def plan(self, *args, **options) -> None:
        """Nothing."""

    def run(self, *args, **options) -> None:
        self.given.append(options)


@pytest.mark.parametrize("case", [c for c in LINES if ": " in c.through], ids=lambda c: f"{c.through}-{c.op}")
def test_a_way_is_how_both_sides_are_called(case):
    problem = engine.problem_of(small(case), CPU, None)
    _, name, function = compat._function(problem.case)
    recorder = Recorder()
    compat._calls(types.SimpleNamespace(**{name: recorder}), name, function, problem)[0]()
    given, way = recorder.given[-1], case.through.partition(": ")[2]
    scales = [x for n, x in given.items() if "scale" in n and isinstance(x, torch.Tensor)]
    if way in ("no out", "no outputs"):
        assert not {"out", "q_rope_out", "q_nope_out"} & given.keys()
    elif way == "empty q_nope_out":
        assert given["q_nope_out"].shape[-1] == 0
    else:
        assert len(scales) == 2
        assert (scales[0] is scales[1]) == (way == "one scale twice")


def test_no_peer_stands_in_for_a_function_of_no_library():
    assert not list(peers.SDPA().peers(engine.problem_of(small(LINES[0]), CPU, None)))
