"""Writes the table of machines in docs/support.md, from the files that `--report` of `tersekv verify` and `bench` made.

    python scripts/reports_table.py            check: exit code 1 if the table is out of date
    python scripts/reports_table.py --write    bring it up to date

A file that somebody sent goes to benchmarks/results/reports as it is.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from tersekv.testing.bench.measure import Timing

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT

PAGE, REPORTS = ROOT / "docs" / "support.md", ROOT / "benchmarks" / "results" / "reports"
HEAD = ("machine", "versions, date", "`tersekv verify`", "`tersekv bench`: share of its own copy rate")
STATUSES = ("passed", "failed", "unsupported")


def reports() -> str:
    """Markdown: a row per machine, and another for each older chip whose kernels it ran."""
    runs: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(REPORTS.glob("*.json")):
        for run in json.loads(path.read_text())["runs"]:
            m, older = run["machine"], run["options"].get("as_arch")
            chip = f"{m['chip']} ({m['arch']})" + (f", kernels for sm_{older}" if older else "")
            runs[chip, versions(m)].append(run)
    rows = [(chip, made_with, judged(found) or "-", timed(found) or "-") for (chip, made_with), found in runs.items()]
    return pages.table(HEAD, rows)


def versions(machine: dict[str, Any]) -> str:
    named = {"tersekv": "tersekv", "commit": "commit", "PyTorch": "torch", "Triton": "triton", "driver": "driver"}
    return ", ".join([*(f"{name} {machine[key]}" for name, key in named.items() if machine[key]), machine["date"]])


def judged(runs: list[dict[str, Any]]) -> str:
    """Counts of listed cases, and of random ones."""
    of_kind: dict[bool, dict[str, int]] = defaultdict(lambda: dict.fromkeys(STATUSES, 0))
    for run in runs:
        for row in run["results"] if run["command"] == "verify" else ():
            for status in STATUSES:
                of_kind["random" in run["options"]][status] += row[status]
    return "; ".join(
        ("random: " if random else "") + ", ".join(f"{n} {status}" for status, n in counts.items())
        for random, counts in sorted(of_kind.items())
    )


def timed(runs: Iterable[dict[str, Any]]) -> str:
    """Geometric means of the steady cases that memory bounds, by operation."""
    benches = [run for run in runs if run["command"] == "bench"]
    shares: dict[str, list[float]] = defaultdict(list)
    for run in benches:
        for r in run["results"]:
            steady = r["us"] and Timing(r["us"], r["spread"], r["waited"]).steady
            if steady and r["bound"] == "bytes" and r["share_of_limit"]:
                shares[r["op"]].append(r["share_of_limit"])
    copied = ", ".join(rates(benches))
    means = ", ".join(f"{op} {geometric_mean(found):.2f} ({len(found)})" for op, found in shares.items())
    return f"{means}, of {copied}" if means else ""


def rates(benches: Iterable[dict[str, Any]]) -> Iterator[str]:
    for run in benches:
        tb_s = run["copy_tb_s"]
        yield f"{tb_s:.2f} TB/s" if tb_s >= 1 else f"{1000 * tb_s:.0f} GB/s"


def wanted() -> dict[Path, str]:
    return {PAGE: pages.renewed(PAGE.read_text(), {"reports": reports}, ["reports"])}


if __name__ == "__main__":
    sys.exit(pages.main((__doc__ or "").splitlines()[0], wanted))
