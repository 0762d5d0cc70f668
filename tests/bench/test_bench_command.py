"""`tersekv bench`, the command: what it prints and stores, what it refuses, how it exits."""

from __future__ import annotations

import json

import pytest
import torch

from tersekv.cli import main
from tersekv.testing.bench import cases, data, decode, measure
from tersekv.testing.bench.compile_ahead import compile_ahead
from tersekv.testing.bench.engine import Limits

LIMITS = Limits(copy=4e12, matmul=600e12)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Little memory to rotate over, and short counts."""
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e5})
    monkeypatch.setattr(measure, "_CPU_SECONDS", 0.01)


def test_the_command_prints_stores_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Limits, "of", lambda device: LIMITS)
    stored, picture = tmp_path / "r.jsonl", tmp_path / "r.png"
    argv = ["bench", "--device", "cpu", "--quick", "--ops", "append,decode", "--formats", "fp8_e4m3,nvfp4"]
    argv += ["--cells", "1x32,4", "--json", str(stored), "--plot", str(picture)]
    assert main.main(argv) == 0
    out = capsys.readouterr().out
    assert "limits: copy 4 TB/s" in out
    assert "6 timed, 0 not run, 0 red, 0 failed" in out
    assert "sdpa on bf16" in out
    lines = [json.loads(text) for text in stored.read_text().splitlines()]
    assert [(r["op"], r["format"], r["rotated"]) for r in lines] == [
        (op, f, rotated)
        for op, ways in (("append", (False, True)), ("decode", (False,)))
        for f in ("fp8_e4m3", "nvfp4")
        for rotated in ways
    ]
    assert picture.stat().st_size > 10_000


def test_the_command_exits_with_1_on_red(monkeypatch, capsys):
    monkeypatch.setattr(Limits, "of", lambda device: LIMITS)
    monkeypatch.setattr(decode, "decode", lambda *a, **k: None)
    assert main.main(["bench", "--device", "cpu", "--ops", "decode", "--formats", "bf16", "--cells", "1x32"]) == 1
    assert "RED: want error" in capsys.readouterr().out


def test_cells_are_called_by_other_processes_before_they_are_timed(monkeypatch, capsys):
    monkeypatch.setattr(Limits, "of", lambda device: LIMITS)
    cell = ["--ops", "decode", "--formats", "bf16,fp8_e4m3", "--cells", "1x32", "--peers", "none"]
    assert main.main(["bench", "--device", "cpu", "--jobs", "2", *cell]) == 0
    _, _, told, *timed = capsys.readouterr().out.splitlines()
    assert told == "called once, to compile: 2 of 2 cells"
    assert sum(text.startswith("decode ") for text in timed) == 2
    decodes = list(cases.grid(cases.sizes("cpu", True), ("decode",), ("bf16",)))
    assert compile_ahead(decodes[:1], torch.device("cpu"), "gluon", 2) == 0, "none, where no backend takes it"


@pytest.mark.parametrize(("argv", "why"), [
    (["--ops", "append", "--cells", "1x64"], "--cells 1x64: none of append has such cells"),
    (["--ops", "decode,mla_decode", "--cells", "64"], "--cells 64: none of decode, mla_decode has such cells"),
    (["--ops", "decode,append", "--cells", "4of64"], "--cells 4of64: none of decode, append has such cells"),
    (["--preset", "shapes", "--ops", "append", "--cells", "4"],
     "--preset shapes: want --device, --formats, --backend, --json and --report beside it, got --ops, --cells"),
    (["--random", "3", "--page-size", "16", "--cells", "4x4"],
     "--random: want --device, --ops, --peers, --jobs, --formats, --backend, --json and --report beside it, "
     "got --cells, --page-size"),
    (["--random", "3", "--preset", "shapes"], "--preset: want it without --random"),
    (["--seed", "3"], "--seed: want it beside --random"),
    (["--random", "3", "--formats", cases.PAIRS[0]], "--random: want formats of both, got fp8_e4m3/int4"),
    (["--random", "3", "--ops", "append"], "no case fits these options on this device"),
    (["--ops", "mla_decode", "--formats", "nvfp4"],
     "no case fits these options on this device; formats there are (mla_decode: bf16, fp8_e4m3, fp8_ds_mla)"),
    (["--preset", "shapes", "--formats", cases.PAIRS[0]], "--preset shapes: want formats of both, got fp8_e4m3/int4"),
    (["--cells", "0x5"], "--cells: want requests x tokens such as 64x8192, new tokens such as 2048, or new"),
    (["--json", "missing/r.jsonl"], "--json missing/r.jsonl: want a file in a folder that exists"),
    (["--plot", "missing/r.png"], "--plot missing/r.png: want a file in a folder that exists"),
    (["--json", "/sys/r.jsonl"], "--json /sys/r.jsonl: want a file that can be written, got "),
    (["--json", "r.png", "--plot", "r.png"], "--plot r.png: want a file of its own, got that of --json"),
])  # fmt: skip
def test_an_option_that_would_be_ignored_or_fail_in_the_end_is_refused_at_once(argv, why, capsys):
    assert main.main(["bench", "--device", "cpu", *argv]) == 2
    assert f"tersekv bench: {why}" in capsys.readouterr().err


def test_a_picture_of_no_known_kind_is_refused_at_once(capsys):
    with pytest.raises(SystemExit) as stop:
        main.main(["bench", "--device", "cpu", "--plot", "p.txt"])
    assert stop.value.code == 2
    assert "want a name ending in .png, .svg, .pdf, got 'p.txt'" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["--device", "cuda:99"], ["--cells", "z"], ["--ops", "host"]])
def test_the_command_exits_with_2_where_there_is_nothing_to_do(argv, capsys):
    assert main.main(["bench", "--device", "cpu", *argv]) == 2
    assert "tersekv bench:" in capsys.readouterr().err
