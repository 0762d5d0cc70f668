"""Writes what came of peers' own suites (peer_suites.py --json, kept in benchmarks/results/) into docs/migration.md.

python scripts/peer_table.py            check: exit code 1 if the page is out of date
python scripts/peer_table.py --write    bring it up to date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT, table

PAGE = ROOT / "docs" / "migration.md"
HEAD = ("file", "call ours", "run", "passed", "refused by name", "skipped by the peer", "failed")


def records() -> dict[str, dict]:
    """The kept results, by file."""
    return {p.name: json.loads(p.read_text()) for p in sorted((ROOT / "benchmarks/results").glob("peer_suites_*.json"))}


def counts() -> str:
    """Of each kept run: where, the counts of each file, and why what is refused or skipped is."""
    return "\n".join(part for record in records().values() for part in of(record))


def of(record: dict) -> list[str]:
    v = record["versions"]
    versions = ", ".join(f"{name} {v[name]}" for name in ("python", *sorted(set(v) - {"device", "python"})))
    tests = ", ".join(record["options"]["checkouts"].values())
    dense = record["options"]["references"] == "dense"
    compared = (
        "; where a test compares with another kernel of the peer's, plain fp32 arithmetic stands in" if dense else ""
    )
    rows, reasons = [], []
    for path, f in sorted(record["files"].items()):
        refused, skipped = (sum(f[k].values()) for k in ("refused", "skipped"))
        failed = sum(x["count"] for x in f["failed"].values())
        numbers = (f["ours"], f["chosen"] - f["not_run"], f["passed"], refused, skipped, failed)
        rows.append((f"`{Path(path).name}`", *map(str, numbers)))
        for kind in ("refused", "skipped"):
            reasons += [f"- {n} {kind} in `{Path(path).name}`: `{why}`\n" for why, n in sorted(f[kind].items())]
    return [
        f"{v['device']} ({versions}), tests of {tests}{compared}:\n",
        table(HEAD, rows),
        *["".join(reasons)] * bool(reasons),
    ]


def wanted() -> dict[Path, str]:
    return {PAGE: pages.renewed(PAGE.read_text(), {"peer-suites": counts}, ["peer-suites"])}


if __name__ == "__main__":
    sys.exit(pages.main(__doc__ or "", wanted))
