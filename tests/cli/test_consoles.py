"""Consoles that know few letters, and readers that have seen enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tersekv.cli import demo, main

# Every command in one process: importing torch takes longer than they do.
ALL = """
import sys
from tersekv.cli.main import COMMANDS, main
device, quick = ("--device", "cpu"), ("--tokens", "16", "--formats", "fp8_e4m3,nvfp4")
argv = {
    "demo": (*device, *quick, "--json", "demo.json"),
    "eval": (*device, *quick, "--text", sys.argv[1], "--json", "eval.json"),
    "bench": (*device, "--quick", "--ops", "append", "--cells", "64", "--json", "bench.json"),
    "verify": (*device, "--ops", "merge_states", "--quick", "--json", "verify.json"),
    "doctor": (),
}
codes = {name: main([name, *argv[name]]) for name in argv}
codes["wrong"] = main(["eval", *device, "--text", sys.argv[1] + "x"])
assert codes == dict.fromkeys(COMMANDS.keys() - {"warm-up"}, 0) | {"wrong": 2}, codes
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_every_command_ends_well_on_a_console_that_knows_few_letters(encoding, tmp_path):
    text = tmp_path / "Größe “→”.txt"
    text.write_text("“Größe”: a → b ↵ 漢字\n" * 20, "utf-8")
    surroundings = os.environ | {"PYTHONIOENCODING": encoding, "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-X", "utf8=0", "-c", ALL, os.fsencode(text)], cwd=tmp_path, env=surroundings,
        capture_output=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(encoding)
    assert "after " in done.stdout.decode(encoding).lower()
    kept = {p.name for p in tmp_path.glob("*.json")}
    assert kept == {"demo.json", "eval.json", "bench.json", "verify.json"}
    json.loads((tmp_path / "eval.json").read_text())


def test_what_was_measured_outlives_a_console_that_fails(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("the terminal has gone")

    (tmp_path / "t").write_text("for key in d")
    monkeypatch.setattr(demo._Run, "print", fail)
    files = {name: str(tmp_path / name) for name in ("x.json", "x.png", "x.safetensors")}
    argv = ("--json", files["x.json"], "--plot", files["x.png"], "--save", files["x.safetensors"])
    with pytest.raises(OSError, match="the terminal has gone"):
        main.main(("eval", "--device", "cpu", "--text", str(tmp_path / "t"), "--model", "llama", *argv,
                   "--formats", "nvfp4"))  # fmt: skip
    assert len(json.loads((tmp_path / "x.json").read_text())["models"][0]["formats"]) == 2
    assert {p.name for p in tmp_path.iterdir()} == {"t", *files}


@pytest.mark.parametrize("argv", [("doctor",), ("eval", "--text", "t", "--formats", "bf16")], ids=" ".join)
def test_a_reader_that_has_seen_enough_ends_it_quietly(argv, tmp_path):
    (tmp_path / "t").write_text("for key in d")
    mine, its = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "tersekv", *argv], cwd=tmp_path, stdout=its, stderr=subprocess.PIPE, text=True
    )
    os.close(its), os.close(mine)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (141, ""), "as of a program that SIGPIPE ended"
