"""Compiles `native/` into one shared library beside this file: the installation does, and so does

    python -m tersekv.backends.cpu.build [--compiler c++]

Every instruction set that the compiler knows is compiled from the same source; which one runs is chosen when the
library is loaded. This file stands alone, so that the installation can use it before tersekv can be imported.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = HERE / "native"
LIBRARY = HERE / "_native.so"

_COMPILERS = ("c++", "g++", "clang++")
# No step of an append may be fused or reordered: its codes are compared byte for byte. Attention asks for fused
# multiply-adds by name.
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
# Names of the levels, as entry.cpp knows them; `plain` is what every machine of its kind has (SSE2, NEON).
_LEVELS: dict[str, tuple[str, ...]] = {"plain": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    _LEVELS |= {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": (*_AVX512, "-mavx512vbmi", "-mavx512bf16")}


def digest() -> str:
    """Of the sources: a library that was built from others is not used."""
    names = sorted(SOURCES.glob("*.[ch]*"))
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in names)).hexdigest()[:16]


def build(
    target: Path = LIBRARY, compiler: str | None = None, flags: Sequence[str] = (), levels: Sequence[str] = ()
) -> list[str]:
    """Compile and link `target`; returns the levels in it. Raises RuntimeError with the compiler's words.

    A level whose instructions the compiler does not know is left out; `levels` asks for some alone, beside `plain`.
    """
    found = compiler or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise RuntimeError(f"no C++ compiler was found, of {', '.join(_COMPILERS)}")
    wanted = {name: known for name, known in _LEVELS.items() if name == "plain" or not levels or name in levels}
    with tempfile.TemporaryDirectory() as folder:
        objects = {name: str(Path(folder) / f"{name}.o") for name in wanted}

        def compiled(name: str) -> str:
            """The compiler's complaint, if it has one."""
            command = [*_FLAGS, *flags, *wanted[name], f"-DLEVEL={name}", str(SOURCES / "kernels.cpp")]
            return _run([found, "-c", *command, "-o", objects[name]])

        with ThreadPoolExecutor() as pool:
            complaints = dict(zip(wanted, pool.map(compiled, wanted), strict=True))
        if complaints["plain"]:
            raise RuntimeError(complaints["plain"])
        made = [name for name, complaint in complaints.items() if not complaint]
        known = [f"-DHAS_{name.upper()}" for name in made]
        told = [f'-DTERSEKV_SOURCES="{digest()}"', *known]
        others = [str(SOURCES / name) for name in ("entry.cpp", "pool.cpp")]
        # Written beside its place and moved there whole: another process may have the old one loaded.
        part = target.with_name(f"{target.name}.{os.getpid()}")
        parts = [*others, *(objects[name] for name in made)]
        complaint = _run([found, "-shared", *_FLAGS, *flags, *told, *parts, "-lm", "-o", str(part)])
        if complaint:
            raise RuntimeError(complaint)
        os.replace(part, target)
    return made


def _run(command: list[str]) -> str:
    """What a command complains about; nothing if it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        return f"{command[0]}: {e}"
    return "" if done.returncode == 0 else done.stderr.strip() or f"{command[0]} failed"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the native kernels for CPUs.")
    parser.add_argument("--compiler", help=f"default: the first of {', '.join(_COMPILERS)} that is found")
    args = parser.parse_args()
    try:
        made = build(compiler=args.compiler)
    except RuntimeError as e:
        sys.stderr.write(f"{e}\n")
        return 1
    sys.stdout.write(f"{LIBRARY.name}: {', '.join(made)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
