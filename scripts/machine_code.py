"""Whether a change leaves the machine code of kernels as it was.

    python scripts/machine_code.py record before.txt tests/gluon tests/triton     on the old tree
    python scripts/machine_code.py record after.txt tests/gluon tests/triton      on the new one
    python scripts/machine_code.py compare before.txt after.txt

`record` runs pytest and writes a line for each kernel that the tests compile: a digest of its code without names and
line information, and its name. `compare` counts digests: names may differ, code may not.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

_TO = "TERSEKV_MACHINE_CODE"


def pytest_configure(config: Any) -> None:
    """As a plugin of pytest: note what is compiled."""
    import triton

    compile_kernel, path = triton.compile, Path(os.environ[_TO])

    def noting(*args: Any, **kwargs: Any) -> Any:
        found = compile_kernel(*args, **kwargs)
        with path.open("a") as file:
            file.write(f"{digest(found.asm)} {found.metadata.name}\n")
        return found

    triton.compile = noting


def digest(asm: dict) -> str:
    """Of the last text before the binary: what names, comments and lines of source say is left out."""
    text = asm.get("ptx") or asm["amdgcn"]
    text = re.sub(r"//.*|^\s*\.(file|loc|section|ident|amdgpu_metadata).*$|^\s*;.*$", "", text, flags=re.M)
    for i, name in enumerate(dict.fromkeys(re.findall(r"\b(?:func|entry|globl|type)\s+([\w$.]+)", text))):
        text = text.replace(name, f"name{i}")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:24]


def record(path: str, tests: list[str]) -> int:
    Path(path).unlink(missing_ok=True)
    here = str(Path(__file__).parent)
    paths = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    env = os.environ | {_TO: str(Path(path).resolve()), "TRITON_DISABLE_LINE_INFO": "1", "PYTHONPATH": paths}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "machine_code", "-p", "no:cacheprovider", *tests]
    return subprocess.run(command, env=env).returncode


def compare(before: str, after: str) -> int:
    """0: each kernel's code is there in both, as often."""
    (old, names), (new, more) = map(_read, (before, after))
    for what, left in (("only before", old - new), ("only after", new - old)):
        for key, n in sorted(left.items(), key=lambda item: (names | more)[item[0]]):
            print(f"{what}: {(names | more)[key]} ({key}, {n} times)")
    print(f"{sum(old.values())} kernels before, {sum(new.values())} after, {sum((old & new).values())} alike")
    return int(old != new)


def _read(path: str) -> tuple[Counter[str], dict[str, str]]:
    rows = [line.split() for line in Path(path).read_text().splitlines()]
    return Counter(key for key, _ in rows), dict(rows)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", path, *tests] if tests:
            sys.exit(record(path, tests))
        case ["compare", before, after]:
            sys.exit(compare(before, after))
    sys.exit(__doc__)
