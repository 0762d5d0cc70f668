"""Compiles `native/` into one shared library beside this file, at installation or by

    python -m tersekv.backends.cpu.build [--compiler c++]

The same source is compiled for every instruction set that the compiler knows; loading the library selects one. This
file imports nothing of tersekv, so that the installation can use it.
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
# No step of an append may be fused or reordered: its codes are compared byte for byte. Attention calls fused
# multiply-adds explicitly.
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-pthread",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
# Levels by their names in entry.cpp; `plain` is the baseline of the architecture (SSE2, NEON).
_LEVELS: dict[str, tuple[str, ...]] = {"plain": ()}
if platform.machine().lower() in ("x86_64", "amd64"):
    _LEVELS |= {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": (*_AVX512, "-mavx512vbmi", "-mavx512bf16")}


def sources_hash() -> str:
    """Returns the hash of the sources; a library built from other sources is not used."""
    names = sorted(SOURCES.glob("*.[ch]*"))
    return hashlib.sha256(b"".join(p.name.encode() + p.read_bytes() for p in names)).hexdigest()[:16]


def build_library_and_return_levels(
    target: Path = LIBRARY,
    compiler: str | None = None,
    extra_flags: Sequence[str] = (),
    only_levels: Sequence[str] = (),
) -> list[str]:
    """Compile and link `target`. Returns the levels in it. Raises RuntimeError with the compiler's message.

    A level that the compiler does not support is left out; `only_levels` restricts the levels, `plain` always included.
    """
    found = compiler or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if found is None:
        raise RuntimeError(f"no C++ compiler was found, of {', '.join(_COMPILERS)}")
    levels = [level for level in _LEVELS if level == "plain" or not only_levels or level in only_levels]
    with tempfile.TemporaryDirectory() as folder:
        objects = {level: str(Path(folder) / f"{level}.o") for level in levels}

        def compile_level_and_return_error(level: str) -> str | None:
            command = [*_FLAGS, *extra_flags, *_LEVELS[level], f"-DLEVEL={level}", str(SOURCES / "kernels.cpp")]
            return _run_and_return_error([found, "-c", *command, "-o", objects[level]])

        with ThreadPoolExecutor() as pool:
            errors = dict(zip(levels, pool.map(compile_level_and_return_error, levels), strict=True))
        if errors["plain"]:
            raise RuntimeError(errors["plain"])
        built = [level for level, error in errors.items() if not error]
        defines = [f'-DTERSEKV_SOURCES="{sources_hash()}"', *(f"-DHAS_{level.upper()}" for level in built)]
        others = [str(SOURCES / name) for name in ("entry.cpp", "thread_pool.cpp")]
        # Linked under another name and renamed atomically: another process may have the old library loaded.
        part = target.with_name(f"{target.name}.{os.getpid()}")
        parts = [*others, *(objects[level] for level in built)]
        error = _run_and_return_error(
            [found, "-shared", *_FLAGS, *extra_flags, *defines, *parts, "-lm", "-o", str(part)]
        )
        if error:
            raise RuntimeError(error)
        os.replace(part, target)
    return built


def _run_and_return_error(command: list[str]) -> str | None:
    """Returns a command's error; None if it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as e:
        return f"{command[0]}: {e}"
    return None if done.returncode == 0 else done.stderr.strip() or f"{command[0]} failed"


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the native kernels for CPUs.")
    parser.add_argument("--compiler", help=f"default: the first of {', '.join(_COMPILERS)} that is found")
    args = parser.parse_args()
    try:
        built = build_library_and_return_levels(compiler=args.compiler)
    except RuntimeError as e:
        sys.stderr.write(f"{e}\n")
        return 1
    sys.stdout.write(f"{LIBRARY.name}: {', '.join(built)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
