"""Runs the native kernels for CPUs under the address, undefined and thread sanitizers, with three threads: every case
of `tersekv verify` and keys cut into pieces, on every instruction set that runs here, then the tests in TESTS.

    python scripts/sanitize.py [--only address,undefined | --only thread] [--levels avx2,…] [--json PATH]

Exit code 1 if a sanitizer, a case or a test complains. It needs gcc or clang with its sanitizer libraries, on Linux.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
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


OPS = ("append", "rope_append", "mla_append", "decode", "prefill", "mla_decode", "merge_states")
TESTS = [
    str(Path(__file__).parent.parent / "tests" / name)
    for name in ("cpu/test_cpu.py", "cpu/test_cpu_lists.py", "attention/test_extremes.py")
]
# The first ran above. A forked child leaves the sanitizer's threads behind; what is compiled anew is not for one;
# threads are three, not those that a test asks for and counts; and OpenMP's the thread sanitizer cannot follow.
LEFT_OUT = "not every_instruction_set and not fork and not of_other_sources and not elsewhere and not take_no_time"
LEFT_OUT += " and not team and not pytorchs_threads and not openmp"


def child(path: str, levels: list[str], result: str) -> int:
    """In a process that the sanitizer was loaded into before Python."""
    import pytest
    import torch

    from tersekv.backends.cpu import library
    from tersekv.testing import verify

    build.LIBRARY = Path(path)
    native = library.load_compiled_library_or_reason()
    assert isinstance(native, library.Library), native
    native.use_pytorch_threads(False)  # of OpenMP's threads the thread sanitizer knows nothing
    # PyTorch's own threads, which the thread sanitizer cannot follow, are not asked for.
    library.torch = SimpleNamespace(get_num_threads=lambda: 3)
    torch.set_num_threads = lambda n: None
    cases, wrong = {}, 0
    for level in levels or native.levels():
        native.use_level(level)
        for verdict in verify.verify("cpu", "cpu", ops=OPS):
            cases[level] = cases.get(level, 0) + 1
            if verdict.status != verify.PASSED:
                wrong += 1
                print(level, verdict.case.id, verdict.status, verdict.message)
        in_pieces()
        print(f"{level}: {cases[level]} cases, {wrong} wrong up to here", flush=True)
    native.use_level(native.levels()[-1])
    failed = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-k", LEFT_OUT, *TESTS])
    Path(result).write_text(json.dumps({"cases": cases, "wrong": wrong, "tests": int(failed)}))
    return 1 if wrong or failed else 0


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


def run(sanitizer: str, levels: list[str]) -> dict:
    compiler = next(filter(None, map(shutil.which, build._COMPILERS)))
    found = [subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
             for name in SANITIZERS[sanitizer]]  # fmt: skip
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        target, result = Path(folder) / "native.so", Path(folder) / "result.json"
        build.build_library_and_return_levels(target, compiler, (f"-fsanitize={sanitizer}", *FLAGS), levels)
        # Where addresses are drawn from more bits than the thread sanitizer knows, it does not start.
        still = [tool, "-R"] if sanitizer == "thread" and (tool := shutil.which("setarch")) else []
        command = [*still, sys.executable, __file__, "--child", str(target), "--result", str(result),
                   "--levels", ",".join(levels)]  # fmt: skip
        done = subprocess.run(command, env={**os.environ, **OPTIONS, "LD_PRELOAD": " ".join(found)})
        judged = json.loads(result.read_text()) if result.exists() else {}
    print(f"{sanitizer}: {'clean' if done.returncode == 0 else f'exit code {done.returncode}'}", flush=True)
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True).stdout.splitlines()[0]
    return {
        "sanitizer": sanitizer, "exit_code": done.returncode, **judged, "seconds": round(time.perf_counter() - start),
        "compiler": version, "sources": build.sources_hash(),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--only", choices=SANITIZERS, help="default: all")
    parser.add_argument("--levels", default="", help="instruction sets, comma-separated; default: all that run here")
    parser.add_argument("--json", type=Path, help="write what was found here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    levels = [name for name in args.levels.split(",") if name]
    if args.child:
        return child(args.child, levels, args.result)
    runs = [run(sanitizer, levels) for sanitizer in ([args.only] if args.only else SANITIZERS)]
    if args.json:
        args.json.write_text(json.dumps({"runs": runs}, indent=1) + "\n")
    return max(bool(r["exit_code"]) for r in runs)


if __name__ == "__main__":
    sys.exit(main())
