"""Compile every kernel that calls of every pair of what kernels are specialised on would launch; no GPU is needed.

    python scripts/compile_sweep.py                        all operations, sm_80 and sm_90; kept in benchmarks/results
    python scripts/compile_sweep.py --archs 90 --ops decode --seed 3 --part 0.2 --dry

Rows of a seed are always the same, and Triton keeps what it has compiled: a sweep that was stopped is soon where it
was.
With another Triton in front of PYTHONPATH the counts of that version are kept beside the others.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
OUT = ROOT / "benchmarks" / "results" / "compile_sweep.json"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "triton")]
os.environ.setdefault("TRITON_CACHE_DIR", str(ROOT / "build" / "compile-sweep"))

import triton  # noqa: E402
from sweep import Arch, Outcome, rows_of, sweep  # noqa: E402
from sweep_axes import AXES, all_pairs  # noqa: E402


def counts(outcomes: list[Outcome]) -> dict[str, Any]:
    """Of an operation on one architecture: what was compiled, and what failed, by kernel."""
    compiled, failed = Counter[str](), Counter[str]()
    seen: set[str] = set()
    for one in outcomes:
        for kernel, key, error in one.kernels:
            if key not in seen:
                seen.add(key)
                (failed if error else compiled)[kernel] += 1
    return {"rows": len(outcomes), "compiled": dict(sorted(compiled.items())), "failed": dict(sorted(failed.items()))}


def keep(op: str, arch: str, found: dict[str, Any]) -> None:
    """Beside what was kept of other versions, architectures and operations."""
    kept: dict[str, Any] = json.loads(OUT.read_text()) if OUT.exists() else {}
    kept.setdefault(triton.__version__, {}).setdefault(arch, {})[op] = found
    OUT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")


def swept(op: str, arch: Arch, a: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    rows, refused = rows_of(op, arch, a.seed, a.part)
    outcomes = []
    for one in sweep(((op, row) for row in rows), arch, a.workers):
        outcomes.append(one)
        for kernel, _, error in one.kernels:
            if error:
                print(f"FAILED {arch} {kernel}: {error}\n  {op} {one.row}", flush=True)
    found = counts(outcomes)
    n, bad = sum(found["compiled"].values()), sum(found["failed"].values())
    print(f"Triton {triton.__version__}, {arch}, {op}: {len(rows)} rows, {n} specialisations compiled, {bad} failed, "
          f"{time.monotonic() - start:.0f} s", flush=True)  # fmt: skip
    says = sorted(f"{x} {v!r} with {y} {w!r}" for (x, v), (y, w) in refused)
    return found | {"seed": a.seed, "part": a.part, "pairs": len(all_pairs(AXES[op])), "pairs_refused": says}


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--archs", nargs="+", default=["80", "90"], help="80 89 90 100 120 gfx942")
    p.add_argument("--ops", nargs="+", default=list(AXES), choices=list(AXES))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--part", type=float, default=1.0, help="of the rows, those first that hold most pairs")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    p.add_argument("--dry", action="store_true", help="keep nothing")
    a = p.parse_args()
    bad = 0
    for arch in a.archs:
        for op in a.ops:
            found = swept(op, arch if arch.startswith("gfx") else int(arch), a)
            bad += sum(found["failed"].values())
            if not a.dry:
                keep(op, arch, found)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
