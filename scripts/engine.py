"""Unpacks a wheel of vLLM, SGLang or LMCache, without what is compiled for GPUs, and what it imports beside it.

    python scripts/engine.py vllm FOLDER

Their builds are for CUDA, with several gigabytes of libraries. Of vLLM the Python files are enough, 60 of 810 MB:
the tests bring the few operators that an engine calls on a CPU. It takes the torch that is here. Versions are those of
requirements/.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import lock


def kept(engine: str, file: str) -> bool:
    if engine == "lmcache":  # of what is compiled only the part without CUDA
        return not file.endswith(".so") or "lmcache_native" in file
    return file.endswith((".py", ".json", "METADATA")) if engine == "vllm" else not file.endswith(".so")


def install(engine: str, locked: dict[str, str], folder: Path) -> None:
    """The engine of this version and the packages beside it, in a folder for PYTHONPATH."""
    pip = [sys.executable, "-m", "pip"]
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as downloads:
        wanted = f"{engine}=={locked[engine]}"
        subprocess.run([*pip, "download", "--quiet", "--no-deps", "--dest", downloads, wanted], check=True)
        (wheel,) = Path(downloads).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [name for name in archive.namelist() if kept(engine, name)])
    beside = [f"{name}=={version}" for name, version in locked.items() if name != engine]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-compile", "--target", folder, *beside], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("engine", choices=lock.ENGINES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    install(args.engine, lock.read(lock.FOLDER / f"{args.engine}.txt"), args.folder)


if __name__ == "__main__":
    main()
