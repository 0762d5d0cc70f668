"""Writes the tables and the picture of docs/transfer.md: transcode's speed, records, and what a colder tier is worth.

    python scripts/tiers_page.py            check: exit code 1 if one is out of date
    python scripts/tiers_page.py --write    bring them up to date

From what `tersekv bench --ops transcode`, benchmarks/page_records.py and benchmarks/tiered_pool.py kept in
benchmarks/results.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT
from svg import Picture

PAGE, RESULTS = ROOT / "docs" / "transfer.md", ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "pictures" / "tiers.svg"
NAMES = {None: "none", "bf16": "16 bits", "fp8_e4m3": "8 bits", "int4 rotated": "4 bits, rotated"}
INKS = {"bf16": "soft", "fp8_e4m3": "blue-ink", "int4 rotated": "orange-ink"}


def kept(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def transcode() -> str:
    lines = [json.loads(line) for line in (RESULTS / "h100_transcode.jsonl").read_text().splitlines()]
    most = max(r["tokens"] for r in lines)
    found = [r for r in lines if r["tokens"] == most]
    rows = [
        [
            f"`{r['source']}`", f"`{r['format']}`" + ", rotated" * r["rotated"], f"{r['us']:.0f}",
            f"{r['share_of_limit']:.2f}",
        ]
        for r in found
    ]  # fmt: skip
    about = (
        f"{found[0]['chip']}, {most} tokens, 8 layers of 8 K/V heads of 128; a copy reaches {found[0]['copy_tb_s']:.2f}"
    )
    return f"\n{about} TB/s:\n\n{pages.table(['from', 'to', 'µs', 'share of a copy'], rows)}\n"


def records() -> str:
    told = kept("h200_page_records.json")
    rows = []
    for name, r in told["formats"].items():
        shares = [f"{r[f'{w}_gb_s']:.1f} ({r[f'{w}_gb_s'] / r[f'{w}_link_gb_s']:.2f})" for w in ("export", "import")]
        rows.append([f"`{name}`", f"{r['tokens_per_gb']:,.0f}", *shares])
    head = ["format", "tokens a GB", "export, GB/s (share of the link)", "import"]
    return f"\n{told['device']}, {told['tokens']} tokens, {told['layers']} layers:\n\n{pages.table(head, rows)}\n"


def tiers() -> str:
    told, times = kept("tiered_pool.json"), kept("h100_tiers.json")
    rows = []
    for name, t in times["tiers"].items():
        cells = [f"{1e3 * t['points'][way]['8192']:.1f}" for way in ("away", "back")]
        rows.append([NAMES[name], f"{t['page_bytes'] / 1024 / 64:.1f}", *cells])
    prefill = next(row[-1] for row in times["prefill"]["points"] if row[0] == 4096 and row[1] == 4096 * 2048)
    moved = pages.table(["tier", "KiB a token", "8192 tokens away, ms", "back, ms"], rows)
    runs = [
        [NAMES[r["tier"]], f"{100 * r['hit_rate']:.0f}%", f"{1e3 * r['ttft_median']:.0f}", f"{1e3 * r['ttft_p99']:.0f}"]
        for r in told["runs"] if r["tier"] is None or r["host_bytes"] == 32e9
    ]  # fmt: skip
    head = ["32 GB of", "found", "first token, ms: median", "99%"]
    text = f"{times['device']}; a prefill of 4096 tokens takes {1e3 * prefill:.0f} ms there:"
    shown = f"![Mean time to the first token over the host's memory, a line a format](pictures/{PICTURE.name})"
    return f"\n{text}\n\n{moved}\n{shown}\n\n{pages.table(head, runs)}\n"


def quality() -> str:
    rows = [
        [r["model"], f"`{r['hot']}`", "-" if r["cold"] is None else f"`{r['cold']}`" + ", rotated" * r["rotated"],
         f"{r['kl']:.1e}"]
        for r in kept("tiered_quality.json") if r["kl"] > 0
    ]  # fmt: skip
    return f"\n{pages.table(['model', 'cache', 'was away in', 'KL, nats a token'], rows)}\n"


def drawn() -> str:
    runs = kept("tiered_pool.json")["runs"]
    none = next(r for r in runs if r["tier"] is None)
    found = [r for r in runs if r["tier"]]
    p = Picture(760, 380, "Mean time to the first token over the host's memory, for tiers of 16, 8 and 4 bits")
    left, right, top, bottom = 70, 730, 70, 320
    x0, x1 = (math.log2(f(r["host_bytes"] for r in found)) for f in (min, max))
    most = 1.1 * max(r["ttft_mean"] for r in runs)

    def at(nbytes: float, seconds: float) -> tuple[float, float]:
        return left + (math.log2(nbytes) - x0) / (x1 - x0) * (right - left), bottom - seconds / most * (bottom - top)

    p.text(24, 26, "mean time to the first token, ms", bold=True)
    step = 10 ** math.floor(math.log10(most)) / (1 if most / 10 ** math.floor(math.log10(most)) > 4 else 4)
    for i in range(int(most / step) + 1):
        p.line([(left, at(2**x0, i * step)[1]), (right, at(2**x0, i * step)[1])], "grid")
        p.text(left - 8, at(2**x0, i * step)[1], f"{1e3 * i * step:g}", size=12, fill="soft", anchor="end")
    for nbytes in dict.fromkeys(r["host_bytes"] for r in found):
        p.text(at(nbytes, 0)[0], bottom + 18, f"{nbytes / 1e9:g} GB", size=12, fill="soft", anchor="middle")
    p.text((left + right) / 2, bottom + 40, "of the host's memory", size=12, fill="soft", anchor="middle")
    p.line([at(2**x0, none["ttft_mean"]), at(2**x1, none["ttft_mean"])], "red-ink", 1.5, "5 4")
    p.text(right, at(2**x1, none["ttft_mean"])[1] - 12, "no tier", size=12, anchor="end")
    x = left
    for tier, ink in INKS.items():
        points = [at(r["host_bytes"], r["ttft_mean"]) for r in found if r["tier"] == tier]
        p.line(points, ink, 1.5)
        for point in points:
            p.dot(*point, ink)
        p.dot(x, 50, ink)
        p.text(x + 10, 50, NAMES[tier], size=12)
        x += 130
    return p.svg()


def wanted() -> dict[Path, str]:
    tables = {"transcode": transcode, "records": records, "tiers": tiers, "quality": quality}
    return {PAGE: pages.renewed(PAGE.read_text(), tables, tables), PICTURE: drawn()}


if __name__ == "__main__":
    sys.exit(pages.main("The tables and the picture of docs/transfer.md.", wanted))
