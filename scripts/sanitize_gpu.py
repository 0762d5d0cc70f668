"""Random cases on a GPU under NVIDIA's compute-sanitizer, each process with a log; counts what it says by kernel.

    python scripts/sanitize_gpu.py memcheck --cases 200 --seed 1 --json memcheck.json

Memory lies without guard zones and without PyTorch's caching of it, so that what is read beside a tensor is seen too.
The exit code is 1 if a case failed, or the tool reported an error that is not one of Triton's own (`_TRITONS`).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

# racecheck does not know that a barrier orders what warps pass on to those of `warp_specialize`: the state that Triton
# itself keeps in shared memory to start them.
_TRITONS = {"racecheck": re.compile(r"warp_specialize|default_partition_state")}
_ERROR = re.compile(r"^========= (?:Error: |ERROR: )?(Invalid .*|.*[Rr]ace reported .*|.*hazard.*)$")
_AT = re.compile(r"=========\s+at (?:.*\b)?(\w+)\+0x|=========\s+(?:Write|Read) Thread .* at (\w+)\+0x")
_SUMMARY = re.compile(r"========= (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--ops", help="comma-separated; default: all")
    parser.add_argument("--tokens", type=int, default=10**9, help="leave out cases whose requests hold more of them")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return inside(args)
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(sanitizer):
        print("compute-sanitizer: want it on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [
            sanitizer, "--tool", args.tool, "--target-processes", "all", "--log-file", f"{folder}/%p.log",
            sys.executable, __file__, *sys.argv[1:], "--inside", str(found),
        ]  # fmt: skip
        subprocess.run(command, check=False, env={**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"})
        report = {
            "tool": args.tool,
            "most tokens": args.tokens,
            "seed": args.seed,
            **read(Path(folder), args.tool),
            **json.loads(found.read_text()),
        }
    print(json.dumps(report, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    return int(bool(report["errors"] or report["total"].get("failed") or not report["processes"]))


def inside(args: argparse.Namespace) -> int:
    """What runs under the tool."""
    from tersekv.testing import random_cases, verify
    from tersekv.testing.draw import draw
    from tersekv.testing.workers import Workers

    drawn = (draw(args.seed, i, args.ops and args.ops.split(",")) for i in itertools.count())
    chosen = itertools.islice((c for c in drawn if sum(c.lens) <= args.tokens), args.cases)
    run = functools.partial(verify.run, zones=False)
    with Workers(args.workers or random_cases.workers_for("cuda"), "cuda", seconds=600, runner=run) as pool:
        summary = random_cases.summary(list(pool.results(chosen)))
    Path(args.inside).write_text(json.dumps({n: summary[n] for n in ("total", "failures", "unsupported")}))
    return 0


def read(folder: Path, tool: str) -> dict:
    """Of the logs: processes that were watched, errors and the kernels they are in, and how many are Triton's own."""
    logs = [p.read_text(errors="replace") for p in folder.glob("*.log")]
    blocks = [b.strip().splitlines() for log in logs for b in re.split(r"(?m)^=========\s*$", log)]
    errors = [b for b in blocks if any(map(_ERROR.match, b))]
    own = [b for b in errors if tool in _TRITONS and _TRITONS[tool].search("\n".join(b))]
    errors = [b for b in errors if b not in own]
    return {
        "processes": sum("SUMMARY" in log for log in logs),
        "errors": len(errors),
        "of Triton's own": len(own),
        "told": sum(int(m[1]) for log in logs for m in _SUMMARY.finditer(log)),
        "kernels": dict(Counter(map(_kernel, errors))),
        "samples": ["\n".join(b) for b in [*errors[:5], *own[:1]]],
    }


def _kernel(lines: list[str]) -> str:
    at = next((m for line in lines if (m := _AT.search(line))), None)
    return next(filter(None, at.groups())) if at else lines[0][:120]


if __name__ == "__main__":
    sys.exit(main())
