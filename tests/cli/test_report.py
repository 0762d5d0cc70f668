"""`--report FILE`: both commands in one file, and the table that is made of such files."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import pytest
import torch
from script import script

from tersekv.cli import main, report
from tersekv.testing.bench import data, measure
from tersekv.testing.bench import report as bench_report
from tersekv.testing.bench.engine import Limits

VERIFY = ("verify", "--device", "cpu", "--ops", "merge_states", "--quick")
BENCH = ("bench", "--device", "cpu", "--ops", "append", "--formats", "fp8_e4m3,nvfp4", "--cells", "64", "--quick")


@pytest.fixture
def both(tmp_path, monkeypatch):
    """A report of both commands, and a random run."""
    monkeypatch.setattr(data, "ROTATE", {"cpu": 1e5})
    monkeypatch.setattr(measure, "_CPU_SECONDS", 0.01)
    monkeypatch.setattr(Limits, "of", lambda device: Limits(copy=4e12, matmul=600e12))
    path = tmp_path / "report.json"
    for argv in (VERIFY, BENCH, ("verify", "--device", "cpu", "--random", "2", "--seed", "1", "--workers", "1")):
        assert main.main((*argv, "--report", str(path))) == 0
    return path


def test_both_commands_append_to_one_file(both, tmp_path):
    found = json.loads(both.read_text())
    assert found["kind"] == "tersekv report"
    verify, bench, random = found["runs"]
    assert verify["command"] == "verify"
    assert verify["options"] == {"device": "cpu", "ops": ["merge_states"], "quick": True}
    assert not verify["interrupted"]
    rows = {r["format"]: r for r in verify["results"]}
    assert rows["bf16"]["passed"] > 0
    assert rows["bf16"]["failed"] == 0
    assert 0 < rows["bf16"]["error"] < rows["bf16"]["bound"]
    assert (verify["failures"], verify["unsupported"]) == ([], {})
    assert (bench["copy_tb_s"], bench["matmul_tflop_s"]) == (4, 600)
    assert {r["format"] for r in bench["results"]} == {"fp8_e4m3", "nvfp4"}
    assert all(0 < r["share_of_limit"] < 1 for r in bench["results"])
    assert (random["options"]["random"], random["options"]["seed"]) == (2, 1)
    for run in found["runs"]:
        assert run["machine"]["torch"] == torch.__version__
        assert run["machine"]["chip"].startswith("CPU")
    assert str(tmp_path) not in both.read_text(), "nothing of the machine's files"


def test_the_table_has_a_row_per_machine_and_older_chip(both, tmp_path, monkeypatch):
    tables = script("scripts/reports_table.py")
    monkeypatch.setattr(tables, "REPORTS", tmp_path)
    found = json.loads(both.read_text())
    verify, bench, random = found["runs"]
    row = {"op": "append", "format": "bf16", "backends": ["triton"], "passed": 7, "failed": 1, "unsupported": 2}
    gpu = verify["machine"] | {"chip": "Some GPU", "arch": "sm_90", "driver": "1.2"}
    as_80 = verify | {"options": {"as_arch": 80}, "machine": gpu, "results": [row, row]}
    (tmp_path / "other.json").write_text(json.dumps({"kind": report.KIND, "runs": [as_80]}))
    for r in bench["results"]:
        r |= {"spread": 0.0, "waited": 0.0, "bound": "bytes", "share_of_limit": 0.5}
    bench["results"][0]["spread"] = 9.0
    both.write_text(json.dumps(found))
    *_, other, mine = tables.reports().splitlines()
    assert other.startswith("| Some GPU (sm_90), kernels for sm_80 | tersekv ")
    assert ", driver 1.2, " in other
    assert other.endswith(" | 14 passed, 2 failed, 4 unsupported | - |")
    listed, drawn = (sum(r["passed"] for r in run["results"]) for run in (verify, random))
    assert f"| {listed} passed, 0 failed, 0 unsupported; random: {drawn} passed, 0 failed, " in mine
    assert mine.endswith(f" | append 0.50 ({len(bench['results']) - 1}), of 4.00 TB/s |"), "unsteady times do not count"


@pytest.mark.parametrize("text", ["no json", "[]", '{"runs": []}'])
@pytest.mark.parametrize("argv", [VERIFY, BENCH])
def test_a_file_that_is_no_report_is_refused_at_once_and_kept(argv, text, tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main.main((*argv, "--report", str(path))) == 2
    assert "--report" in (told := capsys.readouterr().err)
    assert "want a new file or a report" in told
    assert path.read_text() == text


@pytest.mark.parametrize("argv", [VERIFY, BENCH])
def test_a_pipe_is_refused_at_once(argv, tmp_path, capsys):
    os.mkfifo(path := tmp_path / "pipe")
    assert main.main((*argv, "--report", str(path))) == 2
    assert f"--report {path}: want a file" in capsys.readouterr().err


def test_a_gpus_clocks_are_asked_for_by_its_identity(monkeypatch):
    asked = []
    told = SimpleNamespace(major=8, minor=9, multi_processor_count=128, total_memory=24 * 2**30, uuid="abc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(
        bench_report, "command_output", lambda *argv: asked.append(argv) or "1980, 2520, 10501, 10501, 450.00"
    )
    found = report.machine(torch.device("cuda", 1))
    assert [argv[-1] for argv in asked if "clocks" in argv[1]] == ["--id=GPU-abc"]
    assert (found["chip"], found["arch"], found["processors"], found["memory_gib"]) == ("Some GPU", "sm_89", 128, 24.0)
    assert found["clocks"]["clocks.max.sm"] == "2520"
    assert found["clocks"]["power.limit"] == "450.00"
