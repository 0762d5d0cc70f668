"""Writes tables and pictures of docs/sparse.md: what an 8-bit index misses, and what a token costs by context.

    python scripts/sparse_page.py            check: exit code 1 if one is out of date
    python scripts/sparse_page.py --write    bring them up to date

From what benchmarks/index_recall.py kept in benchmarks/results, and from the formats' bytes; beside these stand times,
as soon as benchmarks/results has sparse/context.jsonl:

    tersekv bench --ops mla_decode,index,sparse --formats bf16,fp8_ds_mla,index_fp8 \\
        --json benchmarks/results/sparse/context.jsonl \\
        --cells 1x8192,1x16384,1x32768,1x65536,1x131072,1x262144,1x524288,1x1048576
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT
from svg import Picture

from tersekv import index_bytes_per_token
from tersekv.formats import latent_bytes_per_token
from tersekv.testing.bench.cases import INDEX_DIM, RANK, ROPE, TOP

PAGE, RESULTS, PICTURES = ROOT / "docs" / "sparse.md", ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
RECALL, TIMES, HEADS = "index_recall_cpu.json", "sparse/context.jsonl", 128
CONTEXTS = [1024 << n for n in range(3, 11)]
SHOWN = (8192, 131072, 1 << 20)  # in the table
# What a token reads: latents of all or of the chosen keys, index keys of all.
COSTS = {
    "dense, 16 bits": ("bf16", None), "dense, 8 bits": ("fp8_ds_mla", None),
    "sparse, 16 bits": ("bf16", "bf16"), "sparse, 8 bits": ("fp8_ds_mla", "index_fp8"),
}  # fmt: skip
INKS = dict(zip(COSTS, ("soft", "purple-ink", "orange-ink", "blue-ink"), strict=True))

Times = Mapping[tuple[str, str, int], float]  # (operation, format, context) → µs


def short(n: int) -> str:
    return f"{n >> 20}M" if n >> 20 else f"{n >> 10}K"


def cells() -> list[dict[str, Any]]:
    return [c for c in json.loads((RESULTS / RECALL).read_text())["cells"] if c["index"] == "index_fp8"]


def recall() -> str:
    found = {(c["context"], c["source"]): f"{c['recall']:.3f}" for c in cells() if c["top"] == TOP}
    contexts, sources = (list(dict.fromkeys(key)) for key in zip(*found, strict=True))
    rows = [[short(n), *(found.get((n, source), "-") for source in sources)] for n in contexts]
    return f"\n{pages.table(['context', *sources], rows)}\n![Recall over the context](pictures/index_recall.svg)\n\n"


def nbytes(name: str, context: int) -> int:
    """Bytes that a token reads in a layer."""
    latent, index = COSTS[name]
    row = latent_bytes_per_token(latent, RANK, ROPE)
    if index is None:
        return context * row
    return context * index_bytes_per_token(index, INDEX_DIM) + min(TOP, context) * row


def times() -> Times:
    """None before the run."""
    path = RESULTS / TIMES
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {
        (r["op"], r["format"], r["tokens"]): r["us"]
        for r in records
        if r["status"] == "ok" and r["heads"] == (HEADS if r["op"] != "index_select" else r["heads"])
    }


def micros(name: str, context: int, kept: Times) -> float | None:
    """The kernels' time for a token in a layer; None: not measured."""
    latent, index = COSTS[name]
    parts = [("mla_decode", latent)] if index is None else [("index_select", index), ("sparse", latent)]
    found = [kept.get((*part, context)) for part in parts]
    return None if None in found else sum(found)  # type: ignore[arg-type]


def cost(kept: Times | None = None) -> str:
    kept, rows = times() if kept is None else kept, []
    for context in SHOWN:
        row = [short(context)]
        for name in COSTS:
            us = micros(name, context, kept)
            row.append(f"{nbytes(name, context) / 1e6:.1f}" + (f" ({us:.0f} µs)" if us is not None else ""))
        rows.append(row)
    return f"\n{pages.table(['context', *COSTS], rows)}\n![Bytes over the context](pictures/token_cost.svg)\n\n"


def chart(
    title: str, axis: str, lines: Mapping[str, tuple[str, str, Sequence[tuple[int, float]]]],
    ticks: Sequence[tuple[float, str]], scale: Callable[[float], float],
) -> Picture:  # fmt: skip
    """Lines over the context. lines: name → (ink, dash, points); scale: of the upright axis, linear in height."""
    p = Picture(760, 360, title)
    left, right, top, bottom = 70, 730, 80, 310
    contexts = sorted({n for *_, points in lines.values() for n, _ in points})
    x0, x1 = math.log2(contexts[0]), math.log2(contexts[-1])
    y0, y1 = scale(ticks[0][0]), scale(ticks[-1][0])

    def at(n: int, y: float) -> tuple[float, float]:
        return left + (math.log2(n) - x0) / (x1 - x0) * (right - left), bottom - (scale(y) - y0) / (y1 - y0) * (
            bottom - top
        )

    p.text(24, 26, axis, bold=True)
    for y, words in ticks:
        p.line([at(contexts[0], y), at(contexts[-1], y)], "grid")
        p.text(left - 8, at(contexts[0], y)[1], words, size=12, fill="soft", anchor="end")
    for n in contexts:
        p.text(at(n, ticks[0][0])[0], bottom + 18, short(n), size=12, fill="soft", anchor="middle")
    p.text((left + right) / 2, bottom + 38, "tokens of context", size=12, fill="soft", anchor="middle")
    x: float = left
    for name, (ink, dash, points) in lines.items():
        p.line([at(*point) for point in points], ink, 1.5, dash)
        for point in points:
            p.dot(*at(*point), ink)
        p.dot(x, 52, ink)
        p.text(x + 10, 52, name, size=12)
        x += 165
    return p


def recall_chart() -> Picture:
    lines = {}
    for source, ink in (("model", "blue-ink"), ("random", "orange-ink")):
        for whole, dash in ((True, ""), (False, "5 4")):
            points = [
                (c["context"], c["recall"]) for c in cells() if c["source"] == source and (c["top"] == TOP) == whole
            ]
            lines[f"{source}, {f'top {TOP}' if whole else 'top 5%'}"] = ink, dash, points
    least = math.floor(50 * min(c["recall"] for c in cells())) / 50
    ticks = [(least + i * (1 - least) / 4, f"{least + i * (1 - least) / 4:.3f}") for i in range(5)]
    title = "Share of a 16-bit index's choice that an index of e4m3 codes makes too, over the context"
    return chart(title, "keys of the 16-bit choice that index_fp8 finds", lines, ticks, lambda y: y)


def cost_chart() -> Picture:
    lines = {
        name: (INKS[name], "5 4" if "16" in name else "", [(n, nbytes(name, n) / 1e6) for n in CONTEXTS])
        for name in COSTS
    }
    ticks = [(10.0**i, f"{10**i}") for i in range(5)]
    return chart(
        "Bytes that a token reads in a layer over the context", "MB a token and layer", lines, ticks, math.log10
    )


def pictures() -> dict[Path, Picture]:
    return {PICTURES / "index_recall.svg": recall_chart(), PICTURES / "token_cost.svg": cost_chart()}


def wanted() -> dict[Path, str]:
    tables = {"recall": recall, "cost": cost}
    drawn = {path: picture.svg() for path, picture in pictures().items()}
    return {PAGE: pages.renewed(PAGE.read_text(), tables, tables), **drawn}


if __name__ == "__main__":
    sys.exit(pages.main("The tables and pictures of docs/sparse.md.", wanted))
