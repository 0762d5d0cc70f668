"""Ctrl-C: every command ends with one line and exit code 130, keeps what it has, and leaves no process behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tersekv.cli import bench, demo, main, verify
from tersekv.demo import measure as measuring

# What runs for longer than the test waits.
COMMANDS = {
    "demo": ("--device", "cpu", "--tokens", "30000"),
    "eval": ("--device", "cpu", "--tokens", "30000", "--text", str(Path(measuring.__file__).parent / "heldout.txt")),
    "bench": ("--device", "cpu"),
    "verify": ("--device", "cpu"),
    "doctor": (),
}


def start(*argv: str, folder: Path, **options) -> subprocess.Popen:
    """A command in a process group of its own, in which an endless nvidia-smi is installed."""
    tool = folder / "nvidia-smi"
    tool.write_text("#!/bin/sh\ntouch asked\nexec sleep 600\n")
    tool.chmod(0o755)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        [sys.executable, "-m", "tersekv", *argv], cwd=folder, env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        # What a shell runs in the background is deaf to Ctrl-C, and so is what it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler), **options,
    )  # fmt: skip


def told(process: subprocess.Popen, command: str) -> None:
    """After SIGINT: the code, the line, and that nothing is left of the group."""
    try:
        out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == main.INTERRUPTED, out + err
    assert err.splitlines() == [f"tersekv {command}: interrupted"]
    assert "Traceback" not in out
    # What multiprocessing keeps beside a command ends when it sees that the command has.
    wait(lambda: not left(process.pid), seconds=10)


def left(group: int) -> list[str]:
    """The processes of a group that run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        state, _, of = rest.split()[:3]
        if int(of) == group and state != "Z":  # a zombie is a number, kept for who asks how it ended
            found.append(name)
    return found


def wait(seen, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < end
        time.sleep(0.02)


def maps(process: subprocess.Popen) -> str:
    return Path(f"/proc/{process.pid}/maps").read_text()


def test_every_command_is_interrupted_here():
    assert COMMANDS.keys() | {"warm-up"} == main.COMMANDS.keys()  # which waits for processes that compile


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_a_command_is_loading(command, tmp_path):
    process = start(command, *COMMANDS[command], folder=tmp_path)
    wait(lambda: "libtorch_cpu" in maps(process))
    process.send_signal(signal.SIGINT)
    told(process, command)


@pytest.mark.parametrize("command", COMMANDS)
def test_ctrl_c_while_a_command_is_running(command, tmp_path):
    process = start(command, *COMMANDS[command], folder=tmp_path)
    wait(lambda: "libtorch_cpu" in maps(process))
    if command == "doctor":
        wait((tmp_path / "asked").exists)
    else:
        time.sleep(6)
    process.send_signal(signal.SIGINT)
    told(process, command)


def test_ctrl_c_while_processes_that_run_cases_are_loading(tmp_path):
    process = start("verify", "--device", "cpu", "--random", "100", "--workers", "2", folder=tmp_path)
    wait(lambda: len(left(process.pid)) == 4)  # it, what multiprocessing keeps beside it, and two
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    told(process, "verify")


def test_ctrl_c_while_a_text_is_typed(tmp_path):
    process = start("eval", "--device", "cpu", "--text", "-", folder=tmp_path, stdin=subprocess.PIPE)
    wait(lambda: "libtorch_cpu" in maps(process))
    time.sleep(3)
    process.send_signal(signal.SIGINT)
    told(process, "eval")


def cut(monkeypatch, module, name: str, after: int) -> None:
    """Ctrl-C after so many results of a generator."""
    real = getattr(module, name)

    def some(*args, **options):
        for i, r in enumerate(real(*args, **options)):
            if i == after:
                raise KeyboardInterrupt
            yield r

    monkeypatch.setattr(module, name, some)


def test_verify_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    cut(monkeypatch, verify, "verify", 3)
    path = tmp_path / "r.json"
    assert main.main(("verify", "--device", "cpu", "--ops", "append", "--quick", "--json", str(path))) == 130
    out, err = capsys.readouterr()
    assert "3 passed, 0 failed, 0 unsupported" in out
    assert err == "tersekv verify: interrupted\n"
    stored = json.loads(path.read_text())
    assert (len(stored["results"]), stored["interrupted"]) == (3, True)


def test_bench_keeps_what_it_has(tmp_path, monkeypatch, capsys):
    cut(monkeypatch, bench, "bench", 1)
    path = tmp_path / "r.jsonl"
    argv = ("--ops", "append", "--formats", "fp8_e4m3,nvfp4", "--cells", "1,2", "--peers", "none", "--json", str(path))
    assert main.main(("bench", "--device", "cpu", *argv)) == 130
    out, err = capsys.readouterr()
    assert "1 timed, " in out
    assert err == "tersekv bench: interrupted\n"
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize("whole", [0, 2, 8])
def test_demo_keeps_the_formats_that_it_has(whole, tmp_path, monkeypatch, capsys):
    real, runs = measuring.run_format, []

    def run(*args):
        if len(runs) == whole:
            raise KeyboardInterrupt
        runs.append(args)
        return real(*args)

    monkeypatch.setattr(measuring, "run_format", run)
    path = tmp_path / "r.json"
    argv = ("--device", "cpu", "--tokens", "64", "--json", str(path), "--plot", str(tmp_path / "r.png"))
    assert main.main(("demo", *argv)) == 130
    assert capsys.readouterr().err == "tersekv demo: interrupted\n"
    assert path.exists() == (tmp_path / "r.png").exists() == (whole > 0)
    if whole:
        stored = json.loads(path.read_text())
        assert stored["interrupted"]
        assert sum(len(m["formats"]) for m in stored["models"]) == whole


def test_a_block_that_ends_by_itself_is_not_interrupted():
    with demo.Interruption() as stop:
        pass
    stop.pass_on()
    with pytest.raises(ZeroDivisionError), demo.Interruption():
        raise ZeroDivisionError


def test_a_reader_that_has_seen_enough_ends_a_command_quietly(tmp_path):
    process = start("bench", "--device", "cpu", "--quick", "--ops", "append", "--cells", "64", folder=tmp_path)
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) == 141
