"""The command line: the dispatcher, verify and doctor."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tersekv import __version__, env
from tersekv.backends.host import versions
from tersekv.cli import arguments, doctor, main, warm_up
from tersekv.cli import verify as command
from tersekv.dispatch import plan
from tersekv.ops.compile_workers import Compiled
from tersekv.testing import verify as tool
from tersekv.testing.cases import Case

SUPPORT = Path(__file__).parents[2] / "docs" / "support.md"


def run(*argv: str) -> int:
    return main.main(argv)


def test_help_names_every_command_and_imports_none():
    code = (
        "import sys\nfrom tersekv.cli import main\n"
        "try:\n    main.main(['--help'])\nfinally:\n"
        "    print('LOADED', [m for m in sys.modules if m in ('torch', 'rich') or m.startswith('tersekv.cli.v')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "LOADED []" in done.stdout
    assert all(name in done.stdout for name in ("demo", "eval", "bench", "verify", "doctor"))


def test_the_package_runs_as_a_module():
    done = subprocess.run([sys.executable, "-m", "tersekv", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, f"tersekv {__version__}"), done.stderr


@pytest.mark.parametrize(("value", "on"), [
    (None, False), ("", False), ("0", False), ("false", False), ("False", False), ("OFF", False), ("no", False),
    ("1", True), ("true", True), ("on", True),
])  # fmt: skip
def test_what_turns_checked_mode_on(value, on, monkeypatch):
    monkeypatch.delenv("TERSEKV_CHECKED", raising=False)
    if value is not None:
        monkeypatch.setenv("TERSEKV_CHECKED", value)
    assert env.checked() is on


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--version")
    assert stop.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize("argv", [(), ("nothing",), ("verify", "--ops", "nothing"), ("verify", "--backend", "x")])
def test_a_wrong_command_line_exits_with_2(argv, capsys):
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 2
    assert "usage: tersekv" in capsys.readouterr().err


def test_verify_prints_a_row_per_operation_and_format_and_writes_json(tmp_path, capsys):
    path = tmp_path / "results.json"
    argv = ("--backend", "torch", "--ops", "append,decode", "--formats", "bf16,nvfp4", "--quick", "--json", str(path))
    assert run("verify", "--device", "cpu", *argv) == 0
    out = capsys.readouterr().out
    rows = [line.split()[:3] for line in out.splitlines() if line.strip().startswith(("append", "decode"))]
    assert rows == [[op, name, "torch"] for op in ("append", "decode") for name in ("bf16", "nvfp4")]
    assert "8 passed, 0 failed, 0 unsupported" in out
    stored = json.loads(path.read_text())
    assert stored["environment"]["tersekv"] == __version__
    assert {r["status"] for r in stored["results"]} == {"passed"}
    assert stored["results"][0]["case"].startswith("append/bf16/")


@pytest.mark.parametrize(("argv", "why"), [
    (("--ops", "decode", "--formats", "fp8_ds_mla"), "no case fits these options"),
    (("--json", "missing/r.json"), "--json missing/r.json: want a file in a folder that exists"),
    (("--json", "-"), "--json -: want the name of a file"),
    (("--device", "meta"), "--device meta: "),
])  # fmt: skip
def test_verify_says_at_once_what_cannot_work(argv, why, capsys):
    assert run("verify", "--device", "cpu", *argv) == 2
    assert f"tersekv verify: {why}" in capsys.readouterr().err


def test_a_file_counts_as_writable_when_it_can_be_written_and_is_left_as_it_was(tmp_path):
    for taken in ("/sys/x.json", str(tmp_path / "no" / "x"), str(tmp_path), "", str(tmp_path / ("x" * 300))):
        assert "--json" in (arguments.unwritable(json=taken) or ""), taken
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("kept")
    assert arguments.unwritable(json=str(old), plot=str(new)) is None
    assert (old.read_text(), new.exists()) == ("kept", False)
    os.mkfifo(pipe := tmp_path / "pipe")
    assert arguments.unwritable(json=str(pipe)) is None


def test_two_names_of_one_file_are_no_two_files(tmp_path):
    text = tmp_path / "text"
    text.write_text("mine")
    (tmp_path / "link").symlink_to(text)
    os.link(text, tmp_path / "twin")
    for name in ("text", "link", "twin", "./text"):
        told = arguments.unwritable(str(text), json=os.path.join(tmp_path, name))
        assert told is not None
        assert told.endswith("want a file of its own, got that of --text")
    new = str(tmp_path / "new")
    assert arguments.unwritable(json=new, plot=new) == f"--plot {new}: want a file of its own, got that of --json"
    assert arguments.unwritable(str(text), json=new, plot=None) is None


@pytest.mark.parametrize("command", ["verify", "bench", "demo"])
def test_a_backend_of_the_environment_that_is_none_is_told_once(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERSEKV_BACKEND", "foo")
    assert run(command, "--device", "cpu") == 2
    told = f"tersekv {command}: TERSEKV_BACKEND: want one of {', '.join(plan.BACKENDS)}, got 'foo'"
    assert capsys.readouterr().err.splitlines() == [told]


def test_a_backend_named_by_an_option_goes_before_the_environments(monkeypatch):
    monkeypatch.setenv("TERSEKV_BACKEND", "foo")
    assert run("verify", "--device", "cpu", "--backend", "torch", "--ops", "merge_states", "--quick") == 0


def test_verify_cuts_nothing_in_a_pipe(capsys):
    assert run("verify", "--device", "cpu", "--ops", "merge_states", "--quick") == 0
    out = capsys.readouterr().out
    assert "…" not in out
    assert "merge_states" in out


def fake(monkeypatch, *results):
    monkeypatch.setattr(command, "verify", lambda *a, **k: iter(results))


def test_verify_exits_with_1_on_red_and_says_what_failed(monkeypatch, capsys):
    case = Case("decode", "bf16", "plain")
    fake(
        monkeypatch,
        tool.Result(case, "torch", tool.PASSED, 1e-3),
        tool.Result(case, "torch", tool.FAILED, 1.0, "out: want 1"),
    )
    assert run("verify", "--device", "cpu") == 1
    out = capsys.readouterr().out
    assert "FAILED decode/bf16/plain on torch\n  out: want 1" in out
    assert "1 passed, 1 failed, 0 unsupported" in out


def test_unsupported_is_counted_apart_with_its_reason(monkeypatch, capsys):
    case = Case("decode", "bf16", "plain")
    refusal = tool.Result(case, None, tool.UNSUPPORTED, None, "triton: needs a GPU")
    fake(monkeypatch, tool.Result(case, "torch", tool.PASSED, 1e-3), refusal, refusal)
    assert run("verify", "--device", "cpu") == 0
    out = capsys.readouterr().out
    assert "1 passed, 0 failed, 2 unsupported" in out
    assert "unsupported: decode, 2 cases such as decode/bf16/plain\n  triton: needs a GPU" in out


def test_verify_where_nothing_ran_is_no_success(monkeypatch):
    fake(monkeypatch, tool.Result(Case("decode", "bf16", "plain"), None, tool.UNSUPPORTED, None, "no"))
    assert run("verify", "--device", "cpu") == 1


def test_verify_on_a_device_that_is_not_there_says_so(capsys):
    assert run("verify", "--device", "cuda:99") == 2
    assert "--device cuda:99:" in capsys.readouterr().err


def test_verify_in_checked_mode_says_why_not(monkeypatch, capsys):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    assert run("verify", "--device", "cpu") == 2
    assert "TERSEKV_CHECKED: want it unset" in capsys.readouterr().err


def test_doctor_tells_versions_backends_and_variables(capsys, monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    assert run("doctor") == 0
    out = capsys.readouterr().out
    for word in ("torch", "triton", "C compiler", "backends on cpu", "mla_prefill", "runs", "hint:", *env.VARIABLES):
        assert word in out
    assert re.search(r"TERSEKV_CHECKED +'1'", out)


@pytest.mark.parametrize(("threads", "told"), [(1, " 1 thread, "), (2, " 2 threads, ")])
def test_doctor_counts_threads(threads, told, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert told in dict(doctor.devices())["cpu"]


@pytest.mark.parametrize(("torch_version", "triton"), [
    ("2.10.0+cu128", "3.6"), ("2.11.0", "3.6"), ("2.12.1+cpu", "3.7"), ("2.14.0", "3.8"), ("2.15.0", "3.9"),
    ("2.9.1", "3.6"), ("2.99.0a0+git123", "3.9"), ("unknown", "3.9"),
])  # fmt: skip
def test_doctor_names_the_triton_that_fits(torch_version, triton, monkeypatch):
    monkeypatch.setattr(doctor, "installed", lambda package: None)
    monkeypatch.setattr(doctor.torch, "__version__", torch_version)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    [hint] = [text for text in doctor.hints() if "Triton" in text]
    assert hint == f"GPU kernels need Triton; with torch {torch_version}: pip install 'triton=={triton}.*'"


def test_the_docs_say_the_same_of_triton_and_torch():
    rows = re.findall(r"^\| (3\.[\d., ]*) \| (2\.[^|]*) \|", SUPPORT.read_text(), re.M)
    told = {}
    for tritons, torches in rows:
        minors = [int(x) for x in re.findall(r"2\.(\d+)", torches)]
        every = range(minors[0], minors[-1] + 1) if " to " in torches else minors
        told |= {(2, minor): tritons.strip().split(", ") for minor in every}
    assert told.keys() == versions.OF_TORCH.keys()
    assert all(versions.triton_release_of_nearest_torch(f"{a}.{b}.0") in tritons for (a, b), tritons in told.items())


def test_doctor_warns_of_a_backend_that_is_not(capsys, monkeypatch):
    monkeypatch.setenv("TERSEKV_BACKEND", "foo")
    assert run("doctor") == 0
    known = ", ".join(plan.BACKENDS)
    assert f"hint: TERSEKV_BACKEND: want one of {known}, got 'foo'" in " ".join(capsys.readouterr().out.split())


def test_doctor_tells_for_which_formats_a_backend_refuses():
    assert doctor.support_cell({"bf16": None, "nvfp4": None}) == "runs"
    assert doctor.support_cell({"bf16": "needs sm_90", "nvfp4": "needs sm_90"}) == "needs sm_90"
    assert doctor.support_cell({"bf16": None, "nvfp4": "no D [16]"}) == "runs, but not nvfp4: no D [16]"


@pytest.mark.parametrize("line", ["", "  "])
def test_an_empty_case_is_named(line, capsys):
    with pytest.raises(SystemExit, match="2"):
        run("verify", "--case", line)
    assert "argument --case: want operation/format/name" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("[1]", "want the config.json of a language model, got list in JSON"),
        ('{"text_config": 3}', "want the config.json of a language model, got int in JSON"),
        ("{}", "want the config.json of a language model, which has 'num_attention_heads'"),
        ("{", "Expecting property name"),
        ('{"num_attention_heads": null}', "want the config.json of a language model, which has 'num_attention_heads'"),
        ('{"num_attention_heads": "8"}', "want at least 1 for num_attention_heads, got '8'"),
        ('{"num_attention_heads": 8, "head_dim": 0}', "want at least 1 for head_dim, got 0"),
        (
            '{"num_attention_heads": 8, "head_dim": 64, "max_position_embeddings": 64, "sliding_window": 8, '
            '"layer_types": ["chunked_attention"]}',
            "want full_attention or sliding_attention in layer_types, got ['chunked_attention']",
        ),
    ],
)
def test_a_warm_up_of_no_model_says_so(text, wrong, tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text(text)
    assert run("warm-up", "--model", str(config), "--out", str(tmp_path / "out")) == 2
    assert f"--model {config}: {wrong}" in capsys.readouterr().err


def test_a_warm_up_without_a_folder_says_so(tmp_path, capsys):
    config = tmp_path / "config.json"
    config.write_text("{}")
    assert run("warm-up", "--model", str(config), "--out", str(config)) == 2
    assert f"--out {config}: " in capsys.readouterr().err


WARMED = {"num_attention_heads": 12, "num_key_value_heads": 6, "hidden_size": 768, "max_position_embeddings": 64}


def warmed(tmp_path, *more):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(WARMED))
    return run("warm-up", "--model", str(config), "--out", str(tmp_path / "out"), *more)


@pytest.mark.parametrize(
    ("option", "wrong", "wanted"),
    [
        ("--arch", "50", "80 to 999"),
        ("--drafts", "-3", "0 to 1024"),
        ("--num-sms", "0", "1 to 1024"),
        ("--block-size", "1.5", "1 to 65536"),
        ("--max-num-seqs", "1000000000000", "1 to 65536"),
        ("--max-num-batched-tokens", "-1", "1 to 1048576"),
        ("--tensor-parallel-size", "x", "1 to 1024"),
        ("--max-model-len", "2147483648", "1 to 2147483647"),
    ],
)
def test_a_warm_up_refuses_numbers_that_nothing_has(option, wrong, wanted, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        warmed(tmp_path, f"{option}={wrong}")
    said = " ".join(capsys.readouterr().err.split())
    assert f"argument {option}: want a number from {wanted}, got '{wrong}'" in said


def test_a_warm_up_refuses_heads_that_ranks_cannot_share(tmp_path, capsys):
    assert warmed(tmp_path, "--tensor-parallel-size", "4") == 2
    wanted = "want num_key_value_heads and --tensor-parallel-size, one divisible by the other, got 6 and 4"
    assert wanted in capsys.readouterr().err


def test_a_warm_up_says_what_was_not_compiled_and_why(tmp_path, capsys, monkeypatch):
    found = [Compiled([], ["decode: OSError: no ptxas"], 0.1, 1)]
    monkeypatch.setattr(warm_up, "compile_ahead", lambda *_, **__: found[0])
    assert warmed(tmp_path) == 1
    assert "tersekv warm-up: decode: OSError: no ptxas" in capsys.readouterr().err
    found[0] = Compiled([("kernel", 0.1)], [], 0.1, 1)
    assert warmed(tmp_path) == 0
    assert not capsys.readouterr().err
