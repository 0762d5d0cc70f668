"""Writes requirements/: one version of everything that an environment has, as pip would choose it today.

    python scripts/lock.py [test] [vllm] [sglang] [lmcache] [--pin transformers==5.24.0] …

What pyproject.toml and the engines ask for is resolved, and nothing is installed. Torch, Triton and the engines stay as
they are locked: `--pin` moves them, or holds anything else. Write with the oldest Python that pyproject.toml admits, so
that every version is there for newer ones; then run what uses it (`make test`, `make engines`).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "requirements"
ENGINES = ("vllm", "sglang", "lmcache")
# torch itself pins the libraries of its CUDA build, and a Triton, which that of requirements/triton.txt replaces.
LEFT_OUT = ("cuda-", "nvidia-", "triton", "tersekv")


def read(path: Path) -> dict[str, str]:
    """Name → version, of a lock file."""
    lines = (line.partition("#")[0].strip() for line in path.read_text().splitlines())
    return dict(line.split("==") for line in lines if line)


def write(path: Path, locked: dict[str, str]) -> None:
    """The locked versions in place of the old ones; the comment above them stays."""
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    path.write_text("\n".join([*head, *(f"{name}=={locked[name]}" for name in sorted(locked))]) + "\n")


def resolve(wanted: Iterable[str], constraints: Iterable[str] = (), *options: str) -> dict[str, dict]:
    """Name → metadata of what pip would install; nothing is installed."""
    with tempfile.TemporaryDirectory() as folder:
        bounds = Path(folder) / "constraints.txt"
        bounds.write_text("\n".join(constraints))
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", *options]
        subprocess.run([*command, "--report", report, "-c", bounds, *wanted], check=True)
        found = [item["metadata"] for item in json.loads(report.read_text())["install"]]
    return {canonicalize_name(m["name"]): m for m in found}


def public(metadata: dict) -> str:
    return Version(metadata["version"]).public


def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def asked() -> list[str]:
    """What the tests' environment is asked for, without the project itself."""
    extras = project()["optional-dependencies"]
    lists = [project()["dependencies"], *(extras[name] for name in ("plot", "transformers", "docs", "test"))]
    return [r for found in lists for r in found if not r.startswith("tersekv")]


def test(pins: dict[str, str]) -> dict[str, str]:
    pins = {"torch": read(FOLDER / "test.txt")["torch"], **pins}
    found = resolve(asked(), [f"{name}=={version}" for name, version in pins.items()])
    return {name: public(m) for name, m in found.items() if not name.startswith(LEFT_OUT)}


def engine(name: str, locked: dict[str, str], pins: dict[str, str]) -> dict[str, str]:
    """The engine, the packages that its lock lists, as the engine's metadata admits them, and what these ask for.

    pins: of the engine too; an engine without one is the newest.
    """
    wanted = f"{name}=={pins[name]}" if name in pins else name
    (metadata,) = resolve([wanted], (), "--no-deps").values()
    listed = {n for n in locked if n != name}
    ranges = [Requirement(r) for r in metadata["requires_dist"]]
    ranges = [r for r in ranges if not r.marker or r.marker.evaluate({"extra": ""})]
    bounds = [f"{r.name}{r.specifier}" for r in ranges if canonicalize_name(r.name) in listed - {*pins}]
    # Whatever torch the engine wants, it gets the one that is here, and so what fits that.
    here = read(FOLDER / "test.txt")
    held = {"torch": here["torch"], **{n: v for n, v in pins.items() if n != name}}
    found = resolve(sorted(listed), [*bounds, *(f"{n}=={v}" for n, v in held.items())])
    kept = [n for n in found if n in listed or (n not in here and not n.startswith(LEFT_OUT))]
    return {name: public(metadata), **{n: public(found[n]) for n in kept}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(['test', *ENGINES])}; default: all")
    parser.add_argument("--pin", action="append", default=[], metavar="NAME==VERSION", help="a version to hold")
    args = parser.parse_args()
    names = args.names or ["test", *ENGINES]
    if unknown := {*names} - {"test", *ENGINES}:
        parser.error(f"want of test, {', '.join(ENGINES)}, got {', '.join(sorted(unknown))}")
    oldest, here = SpecifierSet(project()["requires-python"]), platform.python_version_tuple()[:2]
    if f">={'.'.join(here)}" != str(oldest):
        parser.error(f"want the oldest Python of {oldest}, got {'.'.join(here)}")
    pins = {canonicalize_name(name): version for name, _, version in (p.partition("==") for p in args.pin)}
    for name in names:
        path, locked = FOLDER / f"{name}.txt", read(FOLDER / f"{name}.txt")
        if name == "test":
            new = test({n: v for n, v in pins.items() if n not in ENGINES})
        else:
            mine = {n: v for n, v in pins.items() if n in locked}
            new = engine(name, locked, {name: locked[name], **mine})
        write(path, new)
        for n in sorted({*locked, *new}):
            if locked.get(n) != new.get(n):
                print(f"{path.name}: {n} {locked.get(n, 'new')} -> {new.get(n, 'gone')}")


if __name__ == "__main__":
    main()
