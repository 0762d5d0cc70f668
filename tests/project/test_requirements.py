"""What is installed where: locked versions, the ranges that users get, and one oldest Python in every place."""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from script import script

import tersekv
from tersekv.backends.host import versions

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "requirements"
FILES = sorted(FOLDER.glob("*.txt"))
lock = script("scripts/lock.py")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
PYTHON = PROJECT["requires-python"].removeprefix(">=")
ASKED = [
    Requirement(text)
    for texts in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for text in texts
    if not text.startswith("tersekv[")
]
LOCKED = lock.read(FOLDER / "test.txt") | lock.read(FOLDER / "triton.txt")


def asked(name: str) -> list[Requirement]:
    return [r for r in ASKED if canonicalize_name(r.name) == name]


def end(r: Requirement, operator: str) -> str | None:
    """The end of a range that this operator gives."""
    return next((s.version for s in r.specifier if s.operator == operator), None)


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_lock_names_each_package_once_in_one_public_version(path):
    comments = [line for line in path.read_text().splitlines() if line.startswith("#")]
    lines = path.read_text().splitlines()[len(comments) :]
    assert comments, "say what this is for"
    names = [line.partition("==")[0] for line in lines]
    assert names == sorted({canonicalize_name(n) for n in names})
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line), (
            f"want name==version without a local part, got {line}"
        )
        assert str(Version(line.partition("==")[2])) == line.partition("==")[2]


@pytest.mark.parametrize("r", ASKED, ids=str)
def test_a_range_admits_what_the_tests_run_on(r):
    assert r.specifier.contains(LOCKED[canonicalize_name(r.name)]), LOCKED[canonicalize_name(r.name)]


def test_the_second_triton_is_another_one_that_is_admitted():
    second = lock.read(FOLDER / "triton-second.txt")["triton"]
    (r,) = asked("triton")
    assert r.specifier.contains(second)
    assert second != LOCKED["triton"]


def test_the_range_of_tritons_is_that_which_the_tests_hold_on():
    (r,) = asked("triton")
    oldest, newest = versions.OLDEST, versions.NEWEST
    assert end(r, ">=") == f"{oldest[0]}.{oldest[1]}"
    assert end(r, "<") == f"{newest[0]}.{newest[1] + 1}"
    makefile = (ROOT / "Makefile").read_text()
    tried = re.search(r"^TRITONS \?= (.*)$", makefile, re.MULTILINE)[1].split()
    assert all(r.specifier.contains(v) for v in tried)
    ends = [tuple(map(int, v.split(".")[:2])) for v in (tried[0], tried[-1])]
    assert ends == [oldest, newest], "`make versions` runs both ends"


def test_the_range_of_torch_is_that_which_the_tests_hold_on():
    (newest,) = re.findall(r"^NEWEST_TORCH \?= torch==(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    upper = Version(newest)
    assert {end(r, "<") for r in asked("torch")} == {None, f"{upper.major}.{upper.minor + 1}"}


def test_lower_ends_are_what_make_versions_installs():
    for name, version in lock.read(FOLDER / "oldest.txt").items():
        lower = {Version(end(r, ">=")) for r in asked(name)}
        assert lower == {Version(version)}, f"{name}: {version} is tested, {lower} is promised"
    promised = {Requirement(d).name for d in PROJECT["dependencies"]} | {"transformers", "matplotlib"}
    assert promised == {*lock.read(FOLDER / "oldest.txt")}


def commands(*targets: str) -> list[list[str]]:
    """What make would run for these in a fresh clone."""
    # Not what the make that runs these tests was told.
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE") and k not in ("MFLAGS", "TORCH", "SECOND")}
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", *targets], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    return [shlex.split(line) for line in done.stdout.replace("\\\n", " ").splitlines()]


def targets_of_ci() -> list[str]:
    (line,) = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("exec make ")]
    return line.removeprefix("exec make ").split("<")[0].split()


@pytest.mark.parametrize(
    "targets", [["demo"], ["test"], *([name] for name in lock.ENGINES), targets_of_ci()], ids=" ".join
)
def test_nothing_is_installed_but_what_is_locked(targets):
    """So that what passed today is what a fresh clone installs in a year."""
    installs = [c for c in commands(*targets) if c[1:4] == ["-m", "pip", "install"]]
    assert installs
    for command in installs:
        locked = any(a in ("-c", "-r") and b.startswith("requirements/") for a, b in pairwise(command))
        exact = "--no-deps" in command and re.fullmatch(r"[a-z]+==[0-9.]+", command[-1])
        assert locked or exact, " ".join(command)


def test_continuous_integration_runs_no_canary():
    assert "newest" not in targets_of_ci()
    assert "second" in targets_of_ci()
    assert not [c for c in commands(*targets_of_ci()) if any("newest" in word for word in c[:2])]


def test_every_lock_is_used():
    """By the Makefile, or by the script that it hands an engine's name."""
    text = (ROOT / "Makefile").read_text()
    assert {p.stem for p in FILES if f"requirements/{p.name}" not in text} == {*lock.ENGINES}
    for engine in lock.ENGINES:
        assert engine in lock.read(FOLDER / f"{engine}.txt")
        assert any(word.endswith("scripts/engine.py") for c in commands(engine) for word in c)


def test_writing_a_lock_sorts_it_and_keeps_the_comment(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("# What it is for.\nold==1\n")
    lock.write(path, {"b": "2.0", "a": "1.0.post1"})
    assert path.read_text() == "# What it is for.\na==1.0.post1\nb==2.0\n"
    assert lock.read(path) == {"a": "1.0.post1", "b": "2.0"}
    assert lock.public({"version": "2.13.0+cpu"}) == "2.13.0"


def test_an_engine_s_lock_follows_what_the_engine_asks_for(monkeypatch):
    """For the packages that are listed and what they drag along, beside what is here and without CUDA's libraries."""
    bounds = []

    def resolve(wanted, constraints=(), *options):
        if "--no-deps" in options:
            ranges = ["torch==2.11.0", "openai<3,>=2", "numba==0.1", "gpu-only==1; extra == 'gpu'"]
            return {"vllm": {"version": "0.40.0", "requires_dist": ranges}}
        bounds.extend(constraints)
        return {
            name: {"version": "9"} for name in (*wanted, "opentelemetry-api", "torch", "nvidia-nccl-cu13", "triton")
        }

    monkeypatch.setattr(lock, "resolve", resolve)
    got = lock.engine("vllm", {"vllm": "0.33.0", "openai": "2.8", "gpu-only": "0"}, {"gpu-only": "7"})
    assert got == {"vllm": "0.40.0", "openai": "9", "gpu-only": "9", "opentelemetry-api": "9"}
    assert bounds == ["openai<3,>=2", f"torch=={LOCKED['torch']}", "gpu-only==7"]


def test_the_canary_says_what_broke_in_a_line_each(tmp_path):
    script("scripts/engine.py")  # which it imports
    newest = script("scripts/newest.py")
    report = tmp_path / "report.xml"
    assert newest.broken(report, 4, "No module named x") == (0, ["pytest ended with code 4: No module named x"])
    report.write_text(
        "<testsuites><testsuite><testcase classname='tests.a' name='fine'/><testcase classname='tests.a' name='late'>"
        "<failure message='TypeError: no kwargs&#10;in a line'/></testcase><testcase classname='' name='tests.b'>"
        "<error message='collection failure'/></testcase></testsuite></testsuites>"
    )
    ran, lines = newest.broken(report, 1, "")
    assert ran == 3
    assert lines == ["tests.a::late: TypeError: no kwargs", "::tests.b: collection failure"]
    report.write_text("<testsuites><testsuite/></testsuites>")
    assert newest.broken(report, 5, "")[1], "no test is no answer"
    missing = [p for paths in newest.TESTS.values() for p in paths if not (ROOT / p.split("=")[-1]).exists()]
    assert not missing


def test_one_oldest_python_everywhere():
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{PYTHON.replace('.', '')}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == PYTHON
    named = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert named[0] == PYTHON
    for name in ("README.md", "CONTRIBUTING.md", "Makefile"):
        found = re.findall(r"Python (?:>= )?(3\.\d+)", (ROOT / name).read_text())
        assert {*found} == {PYTHON}, f"{name}: {found}"


@pytest.mark.parametrize("folder", ["src", "tests", "scripts", "benchmarks", "examples"])
def test_sources_parse_on_the_oldest_python(folder):
    minor = int(PYTHON.partition(".")[2])
    for path in sorted((ROOT / folder).rglob("*.py")):
        ast.parse(path.read_text(), str(path), feature_version=(3, minor))


def test_the_citation_is_of_this_version():
    text = (ROOT / "CITATION.cff").read_text()
    assert f"version: {tersekv.__version__}\n" in text
    assert f"license: {PROJECT['license']}\n" in text
