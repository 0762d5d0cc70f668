"""Builds a wheel for this platform and a pure one, installs each into an empty environment, and tries what it computes.

    python scripts/try_wheels.py [--out dist]

PyTorch and the other dependencies are borrowed from the Python that runs this.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRY = """
import tersekv
from tersekv import plan
from tersekv.backends.cpu import library
from tersekv.testing import verify
from tersekv.testing.cases import cases
native = library.loaded()
results = list(verify.verify("cpu", quick=True))
wrong = [r for r in results if r.status != verify.PASSED]
assert not wrong, wrong
chosen = {r.backend for r in results if r.case.op == "decode"}
level = native if isinstance(native, str) else native.level()
print(f"{tersekv.__file__}: {len(results)} cases passed, decode by {', '.join(chosen)} ({level})")
assert chosen == {WANT}, chosen
"""


def run(*command: object, **options) -> None:
    subprocess.run([str(c) for c in command], check=True, **options)


def tried(wheel: Path, backend: str) -> None:
    """Raise unless the wheel alone passes the quick cases, decode with this backend."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=False)
        python = Path(folder) / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
        asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        site = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
        # A path file within a borrowed folder is not followed, so the sources that are being edited stay out of it.
        (Path(site) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
        run(python, "-c", TRY.replace("WANT", repr(backend)), cwd=folder, env={**os.environ, "PYTHONPATH": ""})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the wheels go")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for pure, backend in (("", "cpu"), ("1", "torch")):
        with tempfile.TemporaryDirectory() as folder:
            # From a copy: building leaves files beside the sources.
            sources = Path(folder) / "tersekv"
            ignored = shutil.ignore_patterns(".*", "build", "dist", "__pycache__", "*.so", "*.egg-info")
            shutil.copytree(ROOT, sources, ignore=ignored)
            built = Path(folder) / "out"
            env = {**os.environ, "TERSEKV_PURE": pure}
            run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", built, sources, env=env,
                stdout=subprocess.DEVNULL)  # fmt: skip
            (wheel,) = built.glob("*.whl")
            assert wheel.name.endswith("-py3-none-any.whl") == bool(pure), wheel.name
            tried(wheel, backend)
            print(shutil.copy(wheel, out))


if __name__ == "__main__":
    main()
