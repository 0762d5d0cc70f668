"""Runs the native kernels for CPUs under the address, undefined and thread sanitizers: every case of `tersekv verify`
on every instruction set that runs here, with three threads, and attention over keys that are cut into pieces.

    python scripts/sanitize.py [--only address,undefined | --only thread] [--levels avx2,…]

Exit code 1 if a sanitizer or a case complains. It needs gcc or clang with its sanitizer libraries, on Linux.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

from tersekv.backends.cpu import build

SANITIZERS = {"address,undefined": ("libasan.so", "libubsan.so"), "thread": ("libtsan.so",)}
FLAGS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=undefined")
OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0",  # Python's own
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0",
    "OMP_NUM_THREADS": "1",
}


def child(path: str, levels: list[str]) -> int:
    """In a process that the sanitizer was loaded into before Python."""
    from tersekv.backends.cpu import library
    from tersekv.testing import verify

    build.LIBRARY = Path(path)
    native = library.loaded()
    assert isinstance(native, library.Library), native
    # PyTorch's own threads, which the thread sanitizer cannot follow, are not asked for.
    library.torch = SimpleNamespace(get_num_threads=lambda: 3)
    wrong = total = 0
    for level in levels or native.levels():
        native.use_level(level)
        for result in verify.verify("cpu", "cpu", ops=("append", "rope_append", "mla_append", "decode", "prefill",
                                                       "mla_decode", "merge_states")):  # fmt: skip
            total += 1
            if result.status != verify.PASSED:
                wrong += 1
                print(level, result.case.id, result.status, result.message)
        in_pieces()
    print(f"{total} cases, {wrong} wrong, on {', '.join(levels or native.levels())}")
    return 1 if wrong else 0


def in_pieces() -> None:
    """Threads on pieces of one request, and on tokens of one append."""
    import torch

    import tersekv

    for format in ("bf16", "nvfp4", "int8_per_token_head", "int4_per_token_head"):
        layer = tersekv.PagedKVCache.allocate(1, 128, 64, 8, 128, format=format)[0]
        k = torch.randn(8000, 8, 128)
        tersekv.append(k, k, layer, torch.randint(0, 8192, (8000,)), backend="cpu")
        table, lens = torch.randperm(128)[None].int(), torch.tensor([8000], dtype=torch.int32)
        tersekv.append(k, k, layer, torch.arange(8000), backend="cpu")
        for dtype in (torch.bfloat16, torch.float32):
            q = torch.randn(2, 32, 128).to(dtype)
            out = tersekv.decode(q, layer, table, lens, backend="cpu")
            assert out.isfinite().all(), format


def run(sanitizer: str, levels: list[str]) -> int:
    compiler = next(filter(None, map(shutil.which, build._COMPILERS)))
    found = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
             for name in SANITIZERS[sanitizer]]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "native.so"
        build.build(target, compiler, (f"-fsanitize={sanitizer}", *FLAGS), levels)
        # Where addresses are drawn from more bits than the thread sanitizer knows, it does not start.
        still = [tool, "-R"] if sanitizer == "thread" and (tool := shutil.which("setarch")) else []
        command = [*still, sys.executable, __file__, "--child", str(target), "--levels", ",".join(levels)]
        done = subprocess.run(command, env={**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(found)})
    print(f"{sanitizer}: {'clean' if done.returncode == 0 else f'exit code {done.returncode}'}")
    return done.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--only", choices=SANITIZERS, help="default: all")
    parser.add_argument("--levels", default="", help="instruction sets, comma-separated; default: all that run here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    levels = [name for name in args.levels.split(",") if name]
    if args.child:
        return child(args.child, levels)
    codes = [run(sanitizer, levels) for sanitizer in ([args.only] if args.only else SANITIZERS)]
    return max(map(bool, codes))


if __name__ == "__main__":
    sys.exit(main())
