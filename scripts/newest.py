"""The newest torch, Triton, transformers, vLLM, SGLang and LMCache that install, each with tests of what it touches.

    python scripts/newest.py [torch] [triton] [transformers] [vllm] [sglang] [lmcache] [--folder .venv/newest]

Each stands in a folder of its own, all else is as locked. At the end is a line for each, and one for each test that
broke; the exit code is 1 if there is any. PYTEST_ADDOPTS and TERSEKV_SHARE choose fewer tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from xml.etree import ElementTree

import engine
import lock

TESTS = {
    "torch": ("tests", "--ignore=tests/gluon", "--ignore=tests/triton"),
    "triton": ("tests/gluon", "tests/triton"),
    "transformers": ("tests/integrations", "tests/project/test_docs.py"),
    "vllm": ("tests/engines", "tests/integrations/test_vllm_plugin.py"),
    "sglang": ("tests/engines",),
    "lmcache": ("tests/engines",),
}
VERSION = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"


def pip(python: Path | str, *args: object) -> None:
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--upgrade", *map(str, args)], check=True)


def installed(name: str, folder: Path) -> tuple[str, dict[str, str]]:
    """The Python and the environment that see the newest release of this."""
    python, env = sys.executable, {**os.environ}
    shutil.rmtree(folder, ignore_errors=True)
    if name == "torch":
        venv.create(folder, with_pip=True)
        python = str(folder / "bin" / "python")
        pip(python, "torch", "-e", f"{lock.ROOT}[test]")
        return python, env
    if name in lock.ENGINES:
        engine.install(name, lock.engine(name, lock.read(lock.FOLDER / f"{name}.txt"), {}), folder)
    else:
        # transformers with what it asks for, which the locked one may not take; Triton asks for nothing.
        pip(python, "--target", folder, name)
    if name == "sglang":
        env["OMP_NUM_THREADS"] = "1"
    return python, {**env, "PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [env.get("PYTHONPATH")])])}


def watched(command: list[str], env: dict[str, str]) -> tuple[int, str]:
    """pytest's code, and the last error that it printed on the way."""
    last = ""
    with subprocess.Popen(
        command, env=env, cwd=lock.ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as p:
        assert p.stdout is not None
        for line in p.stdout:
            print(line, end="", flush=True)
            last = line[1:].strip() if line.startswith("E  ") else last
    return p.returncode, last


def broken(report: Path, code: int, last: str) -> tuple[int, list[str]]:
    """How many tests ran, and a line for each that broke."""
    ended = f"pytest ended with code {code}: {last}"
    if not report.exists():
        return 0, [ended]
    cases = list(ElementTree.parse(report).iter("testcase"))
    lines = []
    for case in cases:
        for found in (*case.iter("failure"), *case.iter("error")):
            said = (found.get("message") or "").strip().split("\n")[0][:160]
            lines.append(f"{case.get('classname')}::{case.get('name')}: {said}")
    # 5: nothing was chosen, which is no answer.
    return len(cases), lines or ([ended] if code else [])


def tried(name: str, folder: Path) -> tuple[str, list[str]]:
    """What is said of this, and a line for each thing that broke."""
    try:
        python, env = installed(name, folder / name)
    except (subprocess.CalledProcessError, OSError) as e:
        return f"{name}: does not install", [str(e)[-160:]]
    asked = subprocess.run([python, "-c", VERSION, name], env=env, cwd=lock.ROOT, capture_output=True, text=True)
    report = folder / f"{name}.xml"
    report.unlink(missing_ok=True)
    command = [python, "-m", "pytest", "-p", "no:cacheprovider", f"--junitxml={report}", *TESTS[name]]
    ran, lines = broken(report, *watched(command, env))
    return f"{name} {asked.stdout.strip()}: {ran} tests, {len(lines) or 'none'} broke", lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(TESTS)}; default: all")
    parser.add_argument("--folder", type=Path, default=lock.ROOT / ".venv" / "newest", help="where they are installed")
    args = parser.parse_args()
    if unknown := {*args.names} - {*TESTS}:
        parser.error(f"want of {', '.join(TESTS)}, got {', '.join(sorted(unknown))}")
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    results = [tried(name, folder) for name in args.names or TESTS]
    for said, lines in results:
        print(said, *lines, sep="\n  ")
    return int(any(lines for _, lines in results))


if __name__ == "__main__":
    sys.exit(main())
