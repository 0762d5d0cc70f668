"""Pictures of docs/performance.md, drawn from the kept results; `performance_page.py` writes and checks them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parent))
from svg import Picture

Record = dict
INKS = {
    "bf16": "soft", "fp16": "soft", "fp8_e4m3": "blue-ink", "fp8_per_token_head": "green-ink",
    "int8_per_token_head": "purple-ink", "nvfp4": "orange-ink", "fp8_ds_mla": "red-ink",
}  # fmt: skip
COMPARED = ("decode", "mla_decode", "rope_append", "mla_append")
BOUND = ("decode", "mla_decode", "append")  # by bytes, in most cells


def best_peer(r: Record) -> tuple[str, float] | None:
    """(name, µs) of the fastest peer."""
    timed = [(name, p["us"]) for name, p in r["peers"].items() if p["us"] is not None]
    return min(timed, key=lambda p: p[1], default=None)


def legend(p: Picture, formats: Sequence[str], x: float, y: float) -> None:
    for name in formats:
        p.dot(x, y, INKS.get(name, "ink"))
        p.text(x + 10, y, name, size=12)
        x += 34 + 7.2 * len(name)


def roofline(records: Sequence[Record], chip: str) -> Picture:
    """Time over bytes of every memory-bound attention, with the line of a copy."""
    shown = [r for r in records if r["bound"] == "bytes" and r["op"] in BOUND]
    p = Picture(860, 500, f"{chip}: time over bytes of each call that memory bounds, and the line of a large copy")
    left, right, top, bottom = 64, 836, 84, 446
    copy = max(r["copy_tb_s"] for r in shown) * 1e12
    xs = [r["bytes"] for r in shown]
    ys = [r["us"] for r in shown]
    x0, x1 = math.log10(min(xs)) - 0.2, math.log10(max(xs)) + 0.2
    y0, y1 = math.log10(min(ys)) - 0.15, math.log10(max(ys)) + 0.3

    def at(nbytes: float, us: float) -> tuple[float, float]:
        x = left + (math.log10(nbytes) - x0) / (x1 - x0) * (right - left)
        return x, bottom - (math.log10(us) - y0) / (y1 - y0) * (bottom - top)

    p.text(24, 26, f"{chip}: decode, mla_decode and append, time over bytes of one call", bold=True)
    for e in range(math.ceil(x0), math.floor(x1) + 1):
        p.line([(at(10**e, ys[0])[0], top), (at(10**e, ys[0])[0], bottom)], "grid")
        p.text(at(10**e, ys[0])[0], bottom + 16, _bytes(10**e), size=12, fill="soft", anchor="middle")
    for e in range(math.ceil(y0), math.floor(y1) + 1):
        p.line([(left, at(xs[0], 10**e)[1]), (right, at(xs[0], 10**e)[1])], "grid")
        p.text(left - 8, at(xs[0], 10**e)[1], f"{10**e:g}", size=12, fill="soft", anchor="end")
    p.text(24, top - 14, "µs", size=12, fill="soft")
    p.text((left + right) / 2, bottom + 36, "bytes that the call must move", size=12, fill="soft", anchor="middle")
    start = max(10**x0, copy * 10**y0 / 1e6)
    p.line([at(start, start / copy * 1e6), at(10**x1, 10**x1 / copy * 1e6)], "ink", 1.5)
    x, y = at(start * 3, start * 3 / copy * 1e6)
    p.text(x + 12, y, f"copy, {copy / 1e12:.2f} TB/s", size=12)
    for r in shown:
        best = best_peer(r)
        if best and not r["peers_format"]:
            p.cross(*at(r["bytes"], best[1]))
    for r in shown:
        p.dot(*at(r["bytes"], r["us"]), INKS.get(r["format"], "ink"))
    formats = list(dict.fromkeys(r["format"] for r in shown))
    legend(p, formats, 70, 52)
    p.cross(right - 74, 26)
    p.text(right - 64, 26, "best peer", size=12)
    return p


def ratios(records: Sequence[Record], chip: str) -> Picture:
    """Best peer's time over ours: a dot per case, a row per operation and format."""
    rows: dict[tuple[str, str], list[float]] = {}
    for r in records:
        best = best_peer(r)
        if best and r["op"] in COMPARED:
            name = r["format"] + ", q e4m3" * (r.get("query") == "fp8_e4m3") + "*" * bool(r["peers_format"])
            rows.setdefault((r["op"], name), []).append(best[1] / r["us"])
    p = Picture(860, 112 + 28 * len(rows), f"{chip}: time of the fastest peer over tersekv's, a dot a case")
    left, right, top = 250, 800, 74
    ends = min(min(v) for v in rows.values()), max(max(v) for v in rows.values())
    x0, x1 = math.log2(ends[0]) - 0.15, math.log2(ends[1]) + 0.15

    def at(ratio: float) -> float:
        return left + (math.log2(ratio) - x0) / (x1 - x0) * (right - left)

    p.text(24, 26, f"{chip}: fastest peer / tersekv, a dot a case", bold=True)
    p.text(at(1) - 10, 52, "peer is faster", size=12, fill="soft", anchor="end")
    p.text(at(1) + 10, 52, "tersekv is faster", size=12, fill="soft")
    bottom = top + 28 * len(rows)
    for tick in (0.25, 0.33, 0.5, 0.75, 1, 1.5, 2, 3, 4):
        if x0 <= math.log2(tick) <= x1:
            p.line([(at(tick), top - 8), (at(tick), bottom)], "ink" if tick == 1 else "grid", 1.5 if tick == 1 else 1)
            p.text(at(tick), bottom + 14, f"{tick:g}", size=12, fill="soft", anchor="middle")
    last = ""
    for i, ((op, name), values) in enumerate(rows.items()):
        y = top + 28 * i + 12
        p.text(24, y, op if op != last else "", size=12, mono=True)
        p.text(110, y, name, size=12, mono=True, fill="soft")
        last = op
        for v in values:
            p.dot(at(v), y, INKS.get(name.rstrip("*"), "ink"), 4)
        p.text(846, y, f"{geometric_mean(values):.2f}", size=12, anchor="end")
    p.text(846, 52, "mean", size=12, fill="soft", anchor="end")
    p.text(24, bottom + 14, "* no peer has it: against fp8_e4m3", size=12, fill="soft")
    return p


def _bytes(n: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if n >= size:
            return f"{n / size:g} {unit}"
    return f"{n:g} B"


CHARTS: dict[str, tuple[str, Callable[[Sequence[Record]], bool], Callable[[Sequence[Record], str], Picture]]] = {
    "ratios": ("Fastest peer over tersekv, a dot a case, by operation and format",
               lambda timed: any(best_peer(r) for r in timed if r["op"] in COMPARED), ratios),
    "roofline": ("Time over bytes of each call, and the line of a large copy",
                 lambda timed: any(r["bound"] == "bytes" and r["op"] in BOUND for r in timed), roofline),
}  # fmt: skip


def charts(records: Sequence[Record]) -> dict[str, tuple[str, str, str]]:
    """File name → chip, caption and SVG, for every GPU among the records and every chart that has something to show."""
    drawn = {}
    for chip in dict.fromkeys(r["chip"] for r in records if not r["chip"].startswith("CPU")):
        timed = [r for r in records if r["chip"] == chip and r["us"] is not None and not r["host"]]
        for name, (caption, has, draw) in CHARTS.items():
            if has(timed):
                slug = chip.lower().removeprefix("nvidia ").replace(" ", "_")
                drawn[f"{name}_{slug}.svg"] = chip, caption, draw(timed, chip).svg()
    return drawn
