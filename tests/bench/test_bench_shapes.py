"""tersekv bench --preset shapes: every shape is judged, and set beside the plain case with as many bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tersekv.cli import main
from tersekv.testing.bench import cliffs, engine, measure, shapes
from tersekv.testing.bench.engine import OK, RED, Result

CPU = torch.device("cpu")


def tiny(shape: shapes.Shape) -> shapes.Shape:
    return replace(shape, requests=2, tokens=40, page=16, window=min(shape.window, 11))


@pytest.fixture
def _no_clock(monkeypatch):
    monkeypatch.setattr(measure, "device_time", lambda calls, device: measure.Timing(10.0))
    monkeypatch.setattr(shapes.data, "ROTATE", {"cpu": 1, "cuda": 1})


@pytest.mark.usefixtures("_no_clock")
@pytest.mark.parametrize("shape", list(shapes.shapes("fp8_e4m3", "cpu")), ids=lambda s: s.name)
def test_a_right_shape_is_timed(shape):
    result = engine.run(tiny(shape), CPU)
    assert (result.status, result.us) == (OK, 10.0), result.reason


SMALLER = [
    s for name, (of, formats) in shapes.PRESETS.items() if name != "shapes" for f in formats[1:2] for s in of(f, "cuda")
]


@pytest.mark.usefixtures("_no_clock")
@pytest.mark.parametrize("shape", SMALLER, ids=lambda s: f"{s.name}-{s.cell}")
def test_a_shape_of_another_preset_is_right(shape):
    small = replace(shape, requests=3, tokens=40, longest=min(shape.longest, 99))
    result = engine.run(small, CPU)
    assert (result.status, result.us) == (OK, 10.0), result.reason
    assert result.nbytes == small.all_keys * small.bytes_per_token


@pytest.mark.usefixtures("_no_clock")
@pytest.mark.parametrize("wrong", [{"window": 0}, {"sinks": False}, {"tree": False}], ids=str)
def test_a_shape_whose_option_is_ignored_is_red(wrong):
    shape = shapes.Shape("shape", "bf16", 2, 40, page=16, window=9, sinks=True, drafts=8, tree=True)
    problem = shapes.ShapeDecode(shape, CPU)
    result = problem.calls[0]()
    assert problem.error(result) <= problem.limit
    problem.case = replace(shape, **wrong)
    if "sinks" in wrong:
        problem.sinks = None
    assert problem.error(result) > problem.limit


def test_the_plain_case_has_as_many_bytes():
    every = [(of, device) for of, _ in shapes.PRESETS.values() for device in ("cpu", "cuda")]
    for shape in (s for of, device in every for s in of("fp8_per_token_head", device)):
        plain = shape.plain
        assert plain.all_keys * plain.bytes_per_token == pytest.approx(shape.all_keys * shape.bytes_per_token, rel=0.02)
        assert plain == plain.plain
    assert shapes.Shape("shape", "bf16", 5, 10, longest=100).all_keys == 140


def test_gpu_shapes_are_those_of_the_goals():
    found = {s.name: (s.requests, s.tokens) for s in shapes.shapes("bf16", "cuda")}
    assert found["1 x 1048576"] == (1, 1 << 20)
    assert found["1024 x 512"] == (1024, 512)
    assert {"D 64", "D 256", "group 1", "group 5", "group 8", "group 16", "HND", "8 drafts, tree"} <= set(found)


def test_a_cliff_is_told():
    cases = [s for s in shapes.shapes("bf16", "cpu") if s.name in ("HND", "sinks")]
    times = {"plain": 10.0, "HND": 11.0, "sinks": 20.0}

    def run(case):
        return Result(case, OK, us=times[case.name], error=0.0, nbytes=1000)

    lines = [cliffs.line(*x) for x in cliffs.compared(cases, run)]
    assert "91% of plain 4 x 512 (10.00)" in lines[0]
    assert "UNDER" not in lines[0]
    assert lines[1].endswith("50% of plain 4 x 512 (10.00)  UNDER 60%")
    assert "RED: why" in cliffs.line(Result(cases[0], RED, reason="why"), Result(cases[0].plain, OK, us=1.0), None)


@pytest.mark.usefixtures("_no_clock")
def test_the_command_prints_a_line_per_shape_and_the_worst(monkeypatch, capsys, tmp_path):
    few = [tiny(s) for s in list(shapes.shapes("bf16", "cpu"))[:2]]
    monkeypatch.setitem(shapes.PRESETS, "shapes", (lambda name, device: few, ("bf16",)))
    monkeypatch.setattr(measure, "copy_rate", lambda device: 1e9)
    monkeypatch.setattr(measure, "matmul_rate", lambda device: 1e12)
    path = tmp_path / "shapes.jsonl"
    assert main.main(["bench", "--device", "cpu", "--preset", "shapes", "--json", str(path)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in out[1:3]] == ["D 64", "D 256"]
    assert out[-1].startswith("worst ")
    assert len(path.read_text().splitlines()) == 2
