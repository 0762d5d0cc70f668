"""Times the same cells with several versions of Triton, or of tersekv, in turns, each in processes of its own.

    python benchmarks/tritons.py FOLDER ... [--rounds 3] [--cells "H 128"] [--json FILE]

FOLDER: an unpacked Triton that is put in front of the path (scripts/pack_triton.sh), or the `src` of another commit of
tersekv, which is named by the folder that it lies in; what is installed comes first.
Prints a line per cell: its time with each version and the ratio to the installed one, then geometric means. Every
result is checked before it is timed. The least of all rounds counts; every second round takes the versions the other
way round, since a GPU that is warm from one of them keeps the next below its power limit. Exit code 1: a result was
wrong, or a cell of a later version took more than 3% longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean

K = 1024
SLOWER = 1.03
# Through `tersekv.testing.bench`: eight cells each.
CELLS = {
    "decode": [("decode", f, b, n, 32) for f, b, n in (
        ("fp8_e4m3", 1, 8 * K), ("fp8_e4m3", 64, K), ("fp8_e4m3", 64, 8 * K), ("int8_per_token_head", 64, 8 * K),
        ("fp8_per_token_head", 16, 8 * K), ("nvfp4", 64, 8 * K), ("nvfp4", 256, K), ("bf16", 64, 8 * K),
    )],
    "mla_decode": [("mla_decode", f, b, n, h) for f, b, n, h in (
        ("bf16", 16, 8 * K, 16), ("bf16", 128, 8 * K, 128), ("fp8_e4m3", 1, 8 * K, 16), ("fp8_e4m3", 128, 8 * K, 16),
        ("fp8_e4m3", 16, 8 * K, 128), ("fp8_e4m3", 128, 8 * K, 128), ("fp8_ds_mla", 64, 4 * K, 16),
        ("fp8_ds_mla", 128, 8 * K, 128),
    )],
    "append": [("append", f, 0, n, 8) for f in ("fp8_e4m3", "int8_per_token_head", "nvfp4") for n in (32, 2048)]
    + [("rope_append", "fp8_e4m3", 0, 2048, 32), ("mla_append", "fp8_e4m3", 0, 2048, 128)],
    "mla_prefill": [("mla_prefill", "bf16", 0, n, h) for h in (16, 128) for n in (512, K, 2 * K, 4 * K)],
}  # fmt: skip


def one_version(named: str) -> None:
    """A line of JSON for each cell whose name holds `named`, with the Triton that is found first."""
    import torch

    from tersekv.testing.bench.cases import Case, grid, sizes
    from tersekv.testing.bench.engine import bench
    from tersekv.testing.bench.report import environment

    device = torch.device("cuda", 0)
    where = environment(device, ())
    cases = [Case(op, f, b, n, heads=h) for cells in CELLS.values() for op, f, b, n, h in cells]
    cases += grid(sizes("cuda", False), ("host",))
    for r in bench([case for case in cases if named in case.id], device, [], None):
        told = {"triton": where["triton"], "cell": r.case.id, "status": r.status, "us": r.us, "reason": r.reason}
        print(json.dumps(told), flush=True)


def measured(folder: str | None, args: argparse.Namespace) -> list[dict]:
    path = os.pathsep.join(filter(None, [folder, *sys.path[1:], os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, __file__, "--one", "--cells", args.cells],
        env={**os.environ, "PYTHONPATH": path, "TERSEKV_STRICT": "1"}, capture_output=True, text=True,
        timeout=args.seconds,
    )  # fmt: skip
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"no results with {folder or 'the installed Triton'}")
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if folder and Path(folder, "tersekv").exists():
        found = [{**r, "triton": f"tersekv of {Path(folder).absolute().parent.name}"} for r in found]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=550, help="for one version and round")
    parser.add_argument("--cells", default="", metavar="TEXT", help="those whose name holds it; default: all")
    parser.add_argument("--json")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one_version(args.cells)
        return 0
    best: dict[str, dict[str, float]] = {}  # by cell and version
    bad = []
    folders = (None, *args.folders)
    for i in range(args.rounds):
        for folder in reversed(folders) if i % 2 else folders:
            for r in measured(folder, args):
                if r["us"] is None or r["status"] != "ok":
                    bad.append(f"{r['cell']} with {r['triton']}: {r['status']} {r['reason']}")
                    continue
                cell = best.setdefault(r["cell"], {})
                cell[r["triton"]] = min(r["us"], cell.get(r["triton"], r["us"]))
    versions = list(dict.fromkeys(v for cell in best.values() for v in cell))
    first, *later = versions
    slower = []
    print("| cell | " + " | ".join([f"{first}, µs", *(f"{v}, µs | of {first}" for v in later)]) + " |")
    print("| --- " * (2 + 2 * len(later)) + "|")
    ratios: dict[tuple[str, str], list[float]] = {}
    for name, cell in best.items():
        row = [f"{cell[first]:.2f}" if first in cell else "-"]
        for v in later:
            ratio = cell[v] / cell[first] if first in cell and v in cell else None
            row += [f"{cell[v]:.2f}" if v in cell else "-", f"{ratio:.3f}" if ratio else "-"]
            if ratio:
                kind = "host" if " / host" in name else name.split(" / ")[0]
                ratios.setdefault((v, kind), []).append(ratio)
                slower += [f"{name}: {ratio:.3f} with {v}"] * (ratio > SLOWER)
        print(f"| {name} | " + " | ".join(row) + " |")
    for (v, kind), found in ratios.items():
        print(f"{v}, {kind}: {geometric_mean(found):.3f} of {first} ({len(found)} cells)")
    print(*(f"SLOWER {x}" for x in slower), *(f"BAD {x}" for x in bad), sep="\n")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"best_us": best, "bad": bad}, file, indent=1)
    return 1 if slower or bad else 0


if __name__ == "__main__":
    sys.exit(main())
