"""Writes results and pictures of docs/performance.md from what `tersekv bench --json` stored in benchmarks/results/.

    python scripts/performance_page.py            check: exit code 1 if the page or a picture is out of date
    python scripts/performance_page.py --write    bring page and pictures up to date

Every line of every file counts; of two lines about the same case on the same chip the later date, then the later
file name, then the later line wins.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean

sys.path.insert(0, str(Path(__file__).parent))
import pages
from charts import Record, best_peer, charts
from pages import ROOT

PICTURES = ROOT / "docs" / "pictures"
PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
KEY = ("chip", "op", "format", "requests", "tokens", "heads", "page", "uneven", "host", "precision", "query", "through",
       "total", "rotated")  # fmt: skip
OPS = ("decode", "prefill", "mla_decode", "mla_decode_branch", "append", "rope_append", "mla_append", "mla_prefill",
       "mla_project", "merge_states")  # fmt: skip
TITLES = {
    "decode": "Paged decode: 32 query heads, 8 K/V heads, D 128",
    "prefill": "Prefill of one request: 32 query heads, 8 K/V heads, D 128",
    "mla_decode": "MLA decode: latent 512 + 64",
    "mla_decode_branch": "MLA decode branch, from raw latents to values, e4m3 projections",
    "append": "append: 8 heads, D 128",
    "rope_append": "rope_append: 32 query and 8 K/V heads, D 128, full rotary, e4m3 query",
    "mla_append": "mla_append with its query (512 + 64 a head, e4m3)",
    "mla_prefill": "MLA prefill, the whole operation, e4m3 up-projection",
    "mla_project": "mla_project: from 128 to 512 columns a head, by the format of the weights",
    "merge_states": "merge_states: two parts, 32 heads, D 128",
}
EVEN = 0.995  # a ratio to a peer from here on reads 1.00, and is no loss


def load(folder: Path) -> list[Record]:
    """The records that count, in the order in which they were stored."""
    stored = []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        stored += [(json.loads(text), path.name, i) for i, text in enumerate(lines) if text.strip()]
    latest = {}
    for r, *_ in sorted(stored, key=lambda s: (s[0]["date"], *s[1:])):
        if not r.get("batch_invariant"):  # what that costs is told by the benchmark, beside the same cases without it
            latest[tuple(r.get(k) or None for k in KEY)] = r  # what older lines lack is off
    return list(latest.values())


def results(records: Sequence[Record]) -> str:
    """Markdown: a section per chip, GPUs first."""
    if not records:
        return "\nNo results are stored yet.\n\n"
    chips: dict[str, list[Record]] = defaultdict(list)
    for r in records:
        chips[r["chip"]].append(r)
    order = sorted(
        (name for name, own in chips.items() if any(map(is_shown, own))), key=lambda n: (n.startswith("CPU"), n)
    )
    return "\n" + "\n".join("\n".join(section(name, chips[name])) for name in order) + "\n"


def is_shown(r: Record) -> bool:
    return r["us"] is not None and (r["host"] or r["op"] in OPS)


def section(chip: str, records: list[Record]) -> Iterator[str]:
    timed = [r for r in records if r["us"] is not None]
    yield f"## {chip}\n"
    yield from versions(timed or records)
    yield ""
    for name, (_, caption, _) in charts(records).items():
        yield f"![{caption}](pictures/{name})\n"
    for op in OPS:
        mine = [r for r in timed if r["op"] == op and not r["host"]]
        if mine:
            yield f"### {TITLES[op]}\n"
            yield from (rows if op in ("mla_project", "merge_states") else grid)(mine)
            yield ""
    host = [r for r in timed if r["host"]]
    if host:
        yield "### Host time of an eager call\n"
        yield from rows(host)
        yield ""
    yield from means(timed)
    yield from losses(timed)
    yield from missing(records)


def versions(records: Iterable[Record]) -> Iterator[str]:
    """What the numbers were measured with: one line per environment."""
    seen: dict[str, int] = defaultdict(int)
    for r in records:
        names = ("tersekv", "torch", "triton", "driver", "commit")
        parts = [r["date"], *(f"{n} {r[n]}" for n in names if r.get(n))]
        parts += [f"{n} {v}" for n, v in r.get("versions", {}).items()]
        parts += [f"{r['threads']} threads"] * bool(r.get("threads"))
        seen[", ".join(parts)] += 1
    for text, n in seen.items():
        yield f"- {text}: {n} cases"
    best = max(records, key=lambda r: r["copy_tb_s"])
    copy, matmul = amount(best["copy_tb_s"], "B/s"), amount(best["matmul_tflop_s"], "FLOP/s")
    yield f"- limits: copy {copy}, bf16 product {matmul}"


def grid(records: list[Record]) -> Iterator[str]:
    """Cells × formats and types of the query, with the fastest peer of the 16-bit and of the e4m3 cache."""
    formats = list(dict.fromkeys(r["format"] + query(r) for r in records))
    cells: dict[str, dict[str, Record]] = defaultdict(dict)
    for r in records:
        cells[cell(r).replace(query(r), "")][r["format"] + query(r)] = r
    rivals = [f for f in ("bf16", "fp8_e4m3") if any(f in own and best_peer(own[f]) for own in cells.values())]
    head = ["µs", *formats, *(f"best peer, {f}" for f in rivals)]
    lines = []
    for name, own in cells.items():
        peers = [peer(best_peer(own[f])) if f in own else "-" for f in rivals]
        lines.append([name, *(us(own[f]["us"]) if f in own else "-" for f in formats), *peers])
    yield from table(head, lines)


def rows(records: list[Record]) -> Iterator[str]:
    """A row per case."""
    host = all(r["host"] for r in records)
    head = ["case", "µs", *([] if host else ["rate", "of the limit"]), "best peer", "peer / tersekv"]
    lines = []
    for r in records:
        best = best_peer(r)
        name = r.get("through") or f"{r['op']}, {r['format']}"
        name = name if host else f"{r['format']}, {cell(r)}"
        rate = [] if host else [speed(r), f"{r['share_of_limit']:.0%}"]
        own = f" ({r['peers_format']})" if r.get("peers_format") else ""
        lines.append([name, us(r["us"]), *rate, peer(best) + own, f"{best[1] / r['us']:.2f}" if best else "-"])
    yield from table(head, lines)


def means(timed: list[Record]) -> Iterator[str]:
    """Geometric means by operation, format and type of the query, where a peer was timed."""
    half = {place(r): best[1] for r in timed if r["format"] == "bf16" and (best := best_peer(r))}
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in timed:
        if not r["host"]:  # each a line above
            groups[r["op"], r["format"] + query(r)].append(r)
    lines = []
    for (op, name), group in groups.items():
        shares = [r["share_of_limit"] for r in group if r["share_of_limit"]]
        ratios = [best[1] / r["us"] for r in group if (best := best_peer(r))]
        of = {r["peers_format"] for r in group if r.get("peers_format")}
        to_half = [half[place(r)] / r["us"] for r in group if r["format"] != "bf16" and place(r) in half]
        if not ratios and not to_half:
            continue
        lines.append([
            op, name, str(len(group)), f"{geometric_mean(shares):.0%}" if shares else "-",
            f"{geometric_mean(ratios):.2f} ({len(ratios)}{', on ' + ', '.join(of) if of else ''})" if ratios else "-",
            f"{geometric_mean(to_half):.2f} ({min(to_half):.2f})" if to_half else "-",
        ])  # fmt: skip
    if lines:
        yield "### Geometric means\n"
        yield "Above 1, tersekv is faster. Last column: against the best peer over a bf16 cache, in the same cells.\n"
        head = ["operation", "format", "cases", "of the limit", "best peer / tersekv (cases)"]
        yield from table([*head, "best bf16 peer / tersekv (worst cell)"], lines)
        yield ""


def drawn(folder: Path) -> str:
    """Markdown: what `tersekv bench --random` found: the draws, and those of their cells that lose."""
    stored = [json.loads(text) for path in sorted(folder.glob("*_random_cells.json")) for text in path.open()]
    draws, cells = [r for r in stored if "random" in r], [r for r in stored if "random" not in r]
    if not draws:
        return "\nNo draw is stored yet.\n\n"
    head = ["draw", "cells with a peer", "geometric mean", "worst", "slower than a peer"]
    lines = [
        [f"{r['chip']}, {'prefill, ' * ('tflop_s' in r)}seed {r['seed']}, {r['date']}", str(r["cells"])]
        + [f"{r['geometric_mean']:.2f}", f"{r['worst']:.2f}", str(r["lost"])]
        for r in draws
    ]
    return "\n".join(["", *table(head, lines), "", *_drawn_cells(cells), "", ""])


def _drawn_cells(cells: list[Record]) -> Iterator[str]:
    """Each cell that loses, the worst first."""
    beside = [(best[1] / r["us"], best, r) for r in cells if r["us"] is not None and (best := best_peer(r))]
    beside.sort(key=lambda x: x[0])
    lost = [x for x in beside if x[0] < EVEN]
    yield "Each cell that loses; the JSON has all:\n"
    yield from table(
        ["cell", "µs", "best peer", "peer / tersekv"],
        ([f"{r['format']}, {drawn_cell(r)}", us(r["us"]), peer(best), f"{ratio:.2f}"] for ratio, best, r in lost),
    )


def drawn_cell(r: Record) -> str:
    if r["op"].startswith("mla"):
        return f"MLA, {cell(r)}"
    name = f"{cell(r)}, {r['heads']}/{r['kv_heads']} heads, D {r['head_dim']}"
    if r["op"] != "prefill":
        return name
    window = r["prompts"]["window"]
    return f"prefill, {name}" + (f", window {window}" if window else "")


def place(r: Record) -> tuple:
    """What a record shares with those of other formats."""
    names = ("op", "requests", "tokens", "heads", "page", "uneven", "host", "precision", "total")
    return tuple(r.get(k) or None for k in names)


def query(r: Record) -> str:
    return ", q e4m3" * (r.get("query") == "fp8_e4m3")  # the oldest records do not say


def losses(timed: list[Record]) -> Iterator[str]:
    """Each case slower than its best peer."""
    rivals = [(r, best, r.get("peers_format")) for r in timed if (best := best_peer(r))]
    lost = [x for x in rivals if is_lost(x)]
    yield "### Slower than a peer\n"
    if not rivals:
        yield "No peer was timed.\n"
    elif not lost:
        yield f"None of this chip's {len(rivals)} cases with a peer, over the same format or, without one, e4m3."
        yield f"A ratio from {EVEN} on counts as even.\n"
    else:
        yield f"A ratio from {EVEN} on counts as even, and is not listed.\n"
    yield from told(lost)


def is_lost(x: tuple[Record, tuple[str, float], str | None]) -> bool:
    return x[1][1] / x[0]["us"] < EVEN


def told(lost: list[tuple[Record, tuple[str, float], str | None]]) -> Iterator[str]:
    """A line each, the worst first."""
    for r, best, of in sorted(lost, key=lambda x: x[1][1] / x[0]["us"]):
        yield (
            f"- {r['op']}, {r['format']}, {cell(r)}{', host time' * r['host']}: {us(r['us'])} µs, "
            f"{best[0]}{f' on {of}' if of else ''} {us(best[1])} µs ({best[1] / r['us']:.2f})"
        )
    if lost:
        yield ""


def missing(records: list[Record]) -> Iterator[str]:
    """Cases without a time, each reason once."""
    reasons: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for r in records:
        if r["us"] is None:
            reasons[r["status"], r["reason"]].append(r)
    if reasons:
        yield "### Not timed\n"
    for (status, reason), them in reasons.items():
        first = them[0]
        name = f"{first['op']}, {first['format']}, {cell(first)}"
        yield f"- {status}, {len(them)} case{'s' * (len(them) > 1)} such as {name}: {reason.replace('|', '/')}"
    if reasons:
        yield ""


def cell(r: Record) -> str:
    name = (
        f"{r['requests']} × {short(r['tokens'])}" if r["requests"] else f"{r['tokens']} token{'s' * (r['tokens'] != 1)}"
    )
    if r.get("total"):
        name = f"{r['requests']} × " * bool(r["requests"]) + f"{r['tokens']} of {short(r['total'])} tokens"
    parts = [name, *([f"H {r['heads']}"] if r["op"].startswith("mla") else [])]
    parts += [f"pages of {r['page']}"] * (r["page"] != 64) + ["uneven"] * r["uneven"]
    return ", ".join(parts) + query(r) + ", fast" * (r["precision"] == "fast") + ", rotated" * bool(r.get("rotated"))


def short(n: int) -> str:
    return f"{n // 1024}K" if n % 1024 == 0 else str(n)


def speed(r: Record) -> str:
    return amount(r["tb_s"], "B/s") if r["bound"] == "bytes" else amount(r["tflop_s"], "FLOP/s")


def amount(tera: float, unit: str) -> str:
    return f"{tera:.3g} T{unit}" if tera >= 0.1 else f"{tera * 1e3:.3g} G{unit}"


def us(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def peer(best: tuple[str, float] | None) -> str:
    return f"{us(best[1])} {best[0].removeprefix('flashinfer ')}" if best else "-"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> Iterator[str]:
    for line in (head, ["---", *["---:"] * (len(head) - 1)], *lines):
        yield f"| {' | '.join(line)} |"


def renewed(text: str, folder: Path = RESULTS) -> str:
    """The page with its results written anew."""
    regions = {"drawn": lambda: drawn(folder), "results": lambda: results(load(folder))}
    return pages.renewed(text, regions, regions)


def pictures(folder: Path = RESULTS) -> dict[Path, str]:
    """Path → SVG of the page's pictures."""
    return {PICTURES / name: svg for name, (_, _, svg) in charts(load(folder)).items()}


def wanted() -> dict[Path, str]:
    return {PAGE: renewed(PAGE.read_text()), **pictures()}


if __name__ == "__main__":
    sys.exit(pages.main("The results of docs/performance.md.", wanted))
