"""The source distribution and the wheel: what is in them, and that the wheel alone is a working tersekv."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from script import script

import tersekv

ROOT = Path(__file__).parents[2]
SHIPPED = ("src", "tests", "docs", "examples", "requirements", "scripts", "benchmarks", ".ci", "CITATION.cff",
    "Makefile", "MANIFEST.in", "pyproject.toml", "setup.py", "LICENSE", "NOTICE")  # fmt: skip
JUNK = ("__pycache__", "*.egg-info")
LINUX = sys.platform == "linux"
# As a release is built.
COMPILER = {"CXX": str(ROOT / "scripts" / "manylinux_cxx.sh")} if LINUX else {}


def run(*command: object, **options) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """Both distributions, built from a copy of the sources: building writes beside them, and tests run side by side."""
    sources = tmp_path_factory.mktemp("package") / "tersekv"
    sources.mkdir()
    for path in (*[ROOT / name for name in SHIPPED], *ROOT.glob("*.md"), *ROOT.glob("*.yml")):
        if path.is_dir():
            shutil.copytree(path, sources / path.name, ignore=shutil.ignore_patterns(*JUNK))
        else:
            shutil.copy(path, sources)
    for name in ("src/tersekv/__pycache__/junk.cpython-311.pyc", ".dev/notes.txt", "build/lib/old.py", "tests/old.pyc"):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text("must not be shipped")
    # setuptools is here already: nothing is fetched. The wheel is built from the source distribution.
    run(sys.executable, "-m", "build", "--no-isolation", sources, env={**os.environ, **COMPILER})
    return sources / "dist"


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    (found,) = dist.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """bin/ of an environment with this wheel and, borrowed, the packages that it depends on."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", wheel)
    # A path file within a borrowed folder is not followed, so the sources that are being edited stay out of it.
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return home / "bin"


def here(tmp_path: Path) -> dict:
    """A folder and an environment in which only what is installed can be found."""
    return {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"}}


def test_the_descriptions_are_well_formed(dist):
    assert "FAILED" not in run(sys.executable, "-m", "twine", "check", "--strict", *dist.iterdir())


def test_the_wheel_holds_the_package_and_its_data(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src" / "tersekv").rglob("*.py")}
    shipped = {n for n in names if n.endswith(".py")}
    assert shipped == sources
    data = ("py.typed", "demo/weights/llama.safetensors", "demo/weights/deepseek.safetensors", "demo/heldout.txt")
    assert names >= {f"tersekv/{n}" for n in data}
    info = f"tersekv-{tersekv.__version__}.dist-info"
    assert names >= {f"{info}/licenses/LICENSE", f"{info}/licenses/NOTICE", f"{info}/entry_points.txt"}
    assert not [n for n in names if not n.startswith(("tersekv/", info))]


def test_the_source_distribution_holds_the_repository_and_no_caches(dist):
    (archive,) = dist.glob("*.tar.gz")
    top = f"tersekv-{tersekv.__version__}/"
    with tarfile.open(archive) as tar:
        names = {n.removeprefix(top) for n in tar.getnames()}
    wanted = [
        "README.md", "LICENSE", "NOTICE", "CHANGELOG.md", "SECURITY.md", "CITATION.cff", "Makefile", "pyproject.toml",
        ".ci/run", "requirements/test.txt", "scripts/manylinux.h",
        "src/tersekv/demo/weights/llama.safetensors", "scripts/support_table.py", "docs/formats.md",
        *[str(p.relative_to(ROOT)) for d in ("tests", "examples", "docs") for p in (ROOT / d).rglob("*.[pm][yd]")],
    ]  # fmt: skip
    assert not [n for n in wanted if n not in names]
    unwanted = {"__pycache__", ".venv", ".dev", ".hypothesis", ".pytest_cache", ".mypy_cache", "build", "dist"}
    assert not [n for n in names if n.endswith(".pyc") or unwanted & set(Path(n).parts)]


@pytest.mark.skipif(not LINUX, reason="auditwheel reads Linux's libraries")
def test_the_wheel_loads_on_older_systems(wheel, tmp_path):
    """Its library wants nothing newer than glibc 2.28, and no library but glibc's: auditwheel would add those."""
    made = script("scripts/try_wheels.py").repaired(wheel, tmp_path)
    before, after = (zipfile.ZipFile(w) for w in (wheel, made))
    assert {n for n in after.namelist() if not n.endswith("/")} == {*before.namelist()}
    library = "tersekv/backends/cpu/_native.so"
    assert before.read(library) == after.read(library)


def test_the_notice_names_what_is_not_this_projects_own(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith("licenses/NOTICE")]
        notice, names = archive.read(name).decode(), archive.namelist()
        told = archive.read("tersekv/demo/NOTICE.txt").decode()
    assert "Apache License, Version 2.0" in notice
    for path in ("tersekv/demo/heldout.txt", "tersekv/demo/NOTICE.txt"):
        assert path in notice
        assert path in names
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in told
    texts = [n for n in names if n.startswith("tersekv/") and n.endswith(".txt")]
    assert sorted(texts) == ["tersekv/demo/NOTICE.txt", "tersekv/demo/heldout.txt"], "say whose a new text is in NOTICE"


def test_no_file_of_the_source_distribution_is_empty(dist):
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        empty = [m.name for m in tar if m.isfile() and not m.size]
    assert [n for n in empty if Path(n).name not in ("py.typed", "__init__.py", "dependency_links.txt")] == []


def test_the_wheel_runs_by_itself(installed, tmp_path):
    where = run(installed / "python", "-c", "import tersekv; print(tersekv.__file__)", **here(tmp_path)).strip()
    assert Path(where).is_relative_to(installed.parent)
    assert tersekv.__version__ in run(installed / "tersekv", "doctor", **here(tmp_path))


def test_the_wheel_verifies(installed, tmp_path):
    assert " 0 failed" in run(installed / "tersekv", "verify", "--quick", **here(tmp_path))


def test_the_wheel_has_its_demo(installed, tmp_path):
    run(installed / "tersekv", "demo", "--formats", "bf16,int8_per_token_head", "--tokens", 128, "--json", "x.json",
        **here(tmp_path))  # fmt: skip
    assert json.loads((tmp_path / "x.json").read_text())


def test_the_wheel_is_a_plugin_of_vllm(installed, tmp_path):
    code = (
        "from importlib.metadata import entry_points as e; print([p.load() for p in e(group='vllm.general_plugins')])"
    )
    assert "function register" in run(installed / "python", "-c", code, **here(tmp_path))
