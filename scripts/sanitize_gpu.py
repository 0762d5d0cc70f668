"""Random cases on a GPU under NVIDIA's compute-sanitizer, dealt to processes; counts what it says by kernel.

    python scripts/sanitize_gpu.py memcheck --cases 200 --seed 1 --json memcheck.json
    python scripts/sanitize_gpu.py racecheck --cases 50 --tokens 600 --control

Each process runs under a tool of its own, with a log of its own: one that ends early leaves no summary there, and
counts as a failure. `--control` also runs a kernel that is right, and one that is not (`sanitize_control.py`).
Memory lies without guard zones and without PyTorch's caching of it, so that what is read beside a tensor is seen too.
The exit code is 1 if a case failed, or the tool reported what is an error.
"""

from __future__ import annotations

import argparse
import ast
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
from typing import Any

ROOT = Path(__file__).parent.parent

# What racecheck reports of programs that are right, by where both accesses stand in the source. It does not know that
# warps of `warp_specialize` begin and end by state that Triton itself keeps for them in shared memory; nor that what
# lies in memory before a barrier is told to expect a copy is there when the copy has come (`--control`: "copying").
# And two warpgroups may both put 0 in place of the same values: whoever comes second reads what it would have written.
_STARTS = "warp_specialize"
_ORDERED_BY_COPIES = {"publish_work_tile"}  # functions whose stores that holds for
_WRITE_THE_SAME = {"drop_nan", "drop_dead"}
_ERROR = re.compile(r"^========= (?:Error: |ERROR: )?(Invalid .*|.*[Rr]ace reported .*)$")
_PLACE = re.compile(r" in ([\w.]+\.py):(\d+)")
_AT = re.compile(r"\bat (?:.*\b)?(\w+)\+0x")
_SUMMARY = re.compile(r"========= (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:errors?|hazards?)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=("memcheck", "racecheck", "initcheck", "synccheck"))
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--ops", help="comma-separated; default: all")
    parser.add_argument("--tokens", type=int, default=10**9, help="leave out cases whose requests hold more of them")
    parser.add_argument("--control", action="store_true")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--inside", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return inside(args, int(args.inside[0]), Path(args.inside[1]))
    sanitizer = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not os.path.exists(sanitizer):
        print("compute-sanitizer: want it on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shares = [[__file__, *sys.argv[1:], "--inside", str(i), str(folder / f"{i}.json")] for i in range(args.workers)]
        run(sanitizer, args.tool, shares, folder)
        found = [json.loads(p.read_text()) for i in range(args.workers) if (p := folder / f"{i}.json").exists()]
        report: dict[str, Any] = {"tool": args.tool, "most tokens": args.tokens, "seed": args.seed}
        report |= {"asked for": args.cases, "processes": args.workers, **read(folder, args.tool)}
    report["total"] = dict(sum((Counter(f["total"]) for f in found), Counter[str]()))
    report["failures"] = [x for f in found for x in f["failures"]]
    report["unsupported"] = dict(sum((Counter(f["unsupported"]) for f in found), Counter[str]()))
    for kind in ("right", "copying", "racing") * args.control:
        with tempfile.TemporaryDirectory() as name:
            run(sanitizer, args.tool, [[str(Path(__file__).with_name("sanitize_control.py")), kind]], Path(name))
            report[f"control: {kind}"] = read(Path(name), args.tool)
    print(json.dumps(report, indent=1))
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n")
    whole = report["ended"] == args.workers and sum(report["total"].values()) == args.cases
    return int(bool(report["errors"] or report["failures"] or not whole))


def run(sanitizer: str, tool: str, scripts: list[list[str]], folder: Path) -> None:
    """Each script under a tool of its own, side by side."""
    env = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    running = [
        subprocess.Popen([sanitizer, "--tool", tool, "--log-file", f"{folder}/{i}.log", sys.executable, *x], env=env)
        for i, x in enumerate(scripts)
    ]
    for process in running:
        process.wait()


def inside(args: argparse.Namespace, share: int, found: Path) -> int:
    """What runs under the tool: one of `workers` shares of the cases."""
    import torch

    from tersekv.testing import random_cases, verify
    from tersekv.testing.draw import draw

    torch.set_num_threads(1)
    drawn = (draw(args.seed, i, args.ops and args.ops.split(",")) for i in itertools.count())
    chosen = itertools.islice((c for c in drawn if sum(c.lens) <= args.tokens), args.cases)
    mine = itertools.islice(chosen, share, None, args.workers)
    summary = random_cases.summary([verify.run(case, "cuda", zones=False) for case in mine])
    found.write_text(json.dumps({n: summary[n] for n in ("total", "failures", "unsupported")}))
    return 0


def read(folder: Path, tool: str) -> dict:
    """Of the logs: processes that came to their end, errors by kernel, and what is taken for an error."""
    logs = [p.read_text(errors="replace") for p in folder.glob("*.log")]
    texts = [re.sub(r"(?m)^=+ (COMPUTE-SANITIZER|.*SUMMARY.*)$", "", log) for log in logs]
    blocks = [b.strip().splitlines() for text in texts for b in re.split(r"(?m)^=========\s*$", text)]
    errors = [b for b in blocks if any(map(_ERROR.match, b))]
    kinds = [_kind(b) if tool == "racecheck" else "" for b in errors]
    left = [b for b, kind in zip(errors, kinds, strict=True) if not kind]
    return {
        "ended": sum("SUMMARY" in log for log in logs),
        "errors": len(left),
        "taken for errors": dict(Counter(filter(None, kinds))),
        "told": sum(int(m[1]) for log in logs for m in _SUMMARY.finditer(log)),
        "kernels": dict(Counter(map(_kernel, left))),
        "samples": ["\n".join(b) for b in left[:5]],
    }


def _kind(lines: list[str]) -> str:
    """Why a report is none of an error; empty: it is one."""
    kernel = _kernel(lines)
    places = [_standing(kernel, m[1], int(m[2])) for line in lines for m in _PLACE.finditer(line)]
    if places and all(p == _STARTS for p in places):
        return "warps begin and end"
    if places and _WRITE_THE_SAME.issuperset(places):
        return "both write the same"
    return "a copy's barrier orders them" if _ORDERED_BY_COPIES & set(places) else ""


@functools.cache
def _standing(kernel: str, file: str, line: int) -> str:
    """The function that stands there; `_STARTS`: the kernel's first line, or its starting of warps up to the next line,
    where the compiler puts its end."""
    home = _home(kernel)
    path = next((p for p in (home.with_name(file), *home.parent.parent.glob(f"parts/{file}")) if p.exists()), None)
    inside = [f for f in _functions(path) if f.lineno <= line <= (f.end_lineno or 0)] if path else []
    calls = [n for f in inside if f.name == kernel for n in ast.walk(f) if isinstance(n, ast.Call)]
    starts = [n for n in calls if isinstance(n.func, ast.Attribute) and n.func.attr == _STARTS]
    began = any(n.lineno <= line <= (n.end_lineno or 0) + 1 for n in starts)
    if began or (starts and line == inside[0].lineno):
        return _STARTS
    return inside[-1].name if inside else ""


@functools.cache
def _home(kernel: str) -> Path:
    """The file in which a kernel stands; what it calls stands beside it, or in `parts` one floor up."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "scripts").glob("*.py")]
    return next((p for p in files if kernel in [f.name for f in _functions(p)]), ROOT)


@functools.cache
def _functions(path: Path) -> list[ast.FunctionDef]:
    return [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef)]


def _kernel(lines: list[str]) -> str:
    at = next((m for line in lines if (m := _AT.search(line))), None)
    return at[1] if at else lines[0][:120]


if __name__ == "__main__":
    sys.exit(main())
