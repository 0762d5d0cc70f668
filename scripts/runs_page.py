"""Writes the tables of docs/performance.md that are not made of `tersekv bench`: prefill, and versions of Triton.

    python scripts/runs_page.py            check: exit code 1 if a table is out of date
    python scripts/runs_page.py --write    bring them up to date

From what benchmarks/prefill.py and benchmarks/tritons.py kept in benchmarks/results.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT

PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
PAGE_SIZE = 64  # of the table; other sizes are a line below it
FAR = 0.05
PREFILL, TRITONS = RESULTS / "h200_prefill.json", RESULTS / "h200_tritons.json"
PREFILL_PAGE_SIZES = RESULTS / "h200_prefill_page_sizes.json"
IN_THE_JSON_ALONE = ("four chunks", "sixteen chunks", "two prompts", "uneven")  # cells close to others


def prefill() -> str:
    """TFLOP/s by cell (rows) and format (columns); what pages of 16 leave of it."""
    kept = json.loads(PREFILL.read_text())
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    about: dict[str, str] = {}
    columns: list[str] = []
    for r in kept["cases"]:
        if r["page"] != PAGE_SIZE or r["cell"]["name"] in IN_THE_JSON_ALONE or "us" not in r:
            continue
        name, head = named(r["cell"]["name"], r), column(r)
        about[name] = described(r["cell"])
        columns += [head] * (head not in columns)
        cells[name][head] = f"{r['tflops']:.0f}"
    columns.sort(key=lambda head: ", " in head)  # what is plain comes first
    rows = [[f"{name}: {about[name]}", *(found.get(head, "-") for head in columns)] for name, found in cells.items()]
    return (
        f"\n{kept['device']}, PyTorch {kept['torch']}; TFLOP/s\n\n"
        + pages.table(["new of all tokens", *columns], rows)
        + "\n"
        + "".join(small_pages(json.loads(PREFILL_PAGE_SIZES.read_text())["cases"]))
        + "\n"
    )


def small_pages(cases: list[dict[str, Any]]) -> Iterator[str]:
    """A line for each other page size: its rates as shares of those with pages of 64."""
    rates = {(r["cell"]["name"], column(r), r["new_rows"], r["page"]): r["tflops"] for r in cases if "us" in r}
    shares: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for (cell, head, new_rows, size), rate in rates.items():
        plain = rates.get((cell, head, new_rows, PAGE_SIZE))
        if size != PAGE_SIZE and plain:
            shares[size].append((rate / plain, head))
    for size, found in shares.items():
        (low, worst), (high, _) = min(found), max(found)
        span = f"{100 * low:.0f} ({worst}) to {100 * high:.0f}% of the rates with pages of {PAGE_SIZE}"
        yield f"Pages of {size}, in an earlier run: {span} ({len(found)} cells).\n"


def column(r: dict[str, Any]) -> str:
    query = "" if r["query"] == "bf16" else "e4m3 query, "
    return f"{'fast, ' if r['fast'] else ''}{query}{r['format']}"


def named(cell: str, r: dict[str, Any]) -> str:
    """A cell's name with what is not plain of its options."""
    return cell + (", k and v given" if r["new_rows"] else "")


def described(cell: dict[str, Any]) -> str:
    new, total = cell["new"], cell["total"]
    if len(set(zip(new, total, strict=True))) == 1:
        return f"{len(new)} × {new[0]} of {total[0]}"
    if len(new) > 8:
        return f"{new[0]} of {total[0]}, and {len(new) - 1} × {new[-1]} of {total[-1]}"
    return f"{len(new)} requests, {min(new)} to {max(new)} of {min(total)} to {max(total)}"


def tritons() -> str:
    """Of each operation the geometric mean of the ratios; µs by version of the cells slower by more than FAR."""
    best = json.loads(TRITONS.read_text())["best_us"]
    first, *later = list(dict.fromkeys(v for cell in best.values() for v in cell))
    ratios: dict[str, list[float]] = defaultdict(list)
    rows = []
    for name, cell in best.items():
        row = [name.replace(" / page 64", ""), f"{cell[first]:.2f}"]
        for v in later:
            ratio = cell[v] / cell[first]
            ratios["host times" if "/ host" in name else name.split(" / ")[0]].append(ratio)
            row += [f"{cell[v]:.2f}", f"{ratio:.3f}"]
        if any(cell[v] / cell[first] - 1 > FAR for v in later):
            rows.append(row)
    means = (
        f"{kind} {geometric_mean(found):.3f} ({len(found)} cell{'s' * (len(found) > 1)})"
        for kind, found in ratios.items()
    )
    heads = [f"{first}, µs", *(x for v in later for x in (f"{v}, µs", f"of {first}"))]
    what = f"Geometric means of {', '.join(later)}'s time over {first}'s: {', '.join(means)}."
    shown = f"{len(rows)} of {len(best)} cells are slower by more than {FAR:.0%}:"
    return f"\n{what} {shown}\n\n" + pages.table(["cell", *heads], rows) + "\n"


TABLES: dict[str, Callable[[], str]] = {"prefill": prefill, "tritons": tritons}


def wanted() -> dict[Path, str]:
    return {PAGE: pages.renewed(PAGE.read_text(), TABLES, TABLES)}


if __name__ == "__main__":
    sys.exit(pages.main("The tables of docs/performance.md about prefill and versions of Triton.", wanted))
