"""Writes what is kept of CPUs in benchmarks/results/: cpu_*.json of benchmarks/cpu_decode.py into docs/performance.md,
demo_speed_*.json of benchmarks/demo_speed.py and sanitize_cpu.json of scripts/sanitize.py into the README there.

python scripts/cpu_page.py            check: exit code 1 if the page is out of date
python scripts/cpu_page.py --write    bring it up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT, table

RESULTS = ROOT / "benchmarks" / "results"
PAGES = {ROOT / "docs" / "performance.md": ("cpu",), RESULTS / "README.md": ("demo-speed", "sanitized")}
Row = dict
NONE = "\nNo run is stored yet.\n"


def tables() -> str:
    return "\n" + "\n".join(part for path in sorted(RESULTS.glob("cpu_*.json")) for part in of(path)) + "\n"


def of(path: Path) -> Iterator[str]:
    """Of one run: where, times with most threads beside the peers, how decode scales, losses."""
    record = json.loads(path.read_text())
    machine, rows = record["machine"], record["rows"]
    name = f"{machine['cpu']}, " if "cpu" in machine else ""
    amx = {True: ", AMX", False: ", no AMX", None: ""}[machine.get("amx")]
    counts = sorted({r["threads"] for r in rows})
    yield (
        f"`{path.name}`: {name}{machine['cores']} cores, {machine['native']}{amx}, torch {machine['torch']}, "
        f"{counts[-1]} threads. Median ms; in brackets the share of the peer's.\n"
    )
    yield times([r for r in rows if r["threads"] == counts[-1]])
    if len(counts) > 1:
        yield scaling(rows, counts)
    lost = [r for r in rows if r["ratio"] > 1]
    which = "; ".join(f"{r['format']}, {title_of(r)}, {r['threads']} threads: {r['ratio']:.2f}" for r in lost)
    yield f"Slower than the peer, by medians, in {len(lost)} of {len(rows)} cases{': ' * bool(which)}{which}.\n"


def title_of(r: Row) -> str:
    s = r["shape"]
    new = f", {s['new']} new" if s["new"] > 1 else ""
    return f"1 × {s['length']}{new}, {s['q_heads']}/{s['heads']} heads, D {s['head_dim']}"


def times(rows: list[Row]) -> str:
    """Formats × cases, then the peers."""
    titles = list(dict.fromkeys(map(title_of, rows)))
    formats = list(dict.fromkeys(r["format"] for r in rows))
    cells = {(title_of(r), r["format"]): r for r in rows}

    def line(name: str, cell: Callable[[Row], str]) -> list[str]:
        return [name, *(cell(cells[t, name]) if (t, name) in cells else "-" for t in titles)]

    lines = [line(f, lambda r: f"{r['ms_median']:.3g} ({r['ratio']:.2f})") for f in formats]
    lines.append(["peer", *(beside([r for r in rows if title_of(r) == t]) for t in titles)])
    if any("llama_cpp" in r for r in rows):
        lines.append(["llama.cpp", *(llama([r for r in rows if title_of(r) == t]) for t in titles)])
    return table(["format", *titles], lines)


def beside(rows: list[Row]) -> str:
    """The peer's times, in turns with each format's."""
    ms = [r["peer_ms_median"] for r in rows]
    least, most = f"{min(ms):.3g}", f"{max(ms):.3g}"
    return f"{rows[0]['peer']} {least}{f' to {most}' * (least != most)}"


def llama(rows: list[Row]) -> str:
    found = (r["llama_cpp"] for r in rows if "llama_cpp" in r)
    return ", ".join(f"{x['type']} {x['ms_median']:.3g}" for x in found) or "-"


def scaling(rows: list[Row], counts: list[int]) -> str:
    """How many times as fast decode is with most threads as with one, by the shortest times."""
    by = {(title_of(r), r["format"], r["threads"]): r for r in rows if r["shape"]["new"] == 1}
    said = []
    for title in dict.fromkeys(key[0] for key in by):
        formats = list(dict.fromkeys(key[1] for key in by if key[0] == title))

        def gain(name: str, field: str, title: str = title) -> float:
            one, most = (by[title, name, n][field] for n in (counts[0], counts[-1]))
            return one / most

        own = sorted(gain(f, "ms_min") for f in formats)
        least, most = f"{own[0]:.2f}", f"{own[-1]:.2f}"
        peer = gain(formats[0], "peer_ms_min")
        said.append(f"{title}: {least}{f' to {most}' * (least != most)} (peer {peer:.2f})")
    return f"Times as fast with {counts[-1]} threads as with {counts[0]}: {'; '.join(said)}.\n"


def demo() -> str:
    """Tokens a second of the demo's models, eager and native: the least and the most over the formats."""
    parts = []
    for path in sorted(RESULTS.glob("demo_speed_*.json")):
        record = json.loads(path.read_text())
        rates: dict[str, list[dict[str, float]]] = {}
        for r in record["rows"]:
            rates.setdefault(r["model"], []).append(r["tokens_per_s"])
        said = (
            f"{model}: eager {_span([r['eager'] for r in own], '.0f')} tokens/s, native "
            f"{_span([r['native'] for r in own], '.0f')}, {_span([r['native'] / r['eager'] for r in own], '.2f')} times"
            for model, own in rates.items()
        )
        parts.append(f"\n`{path.name}`: torch {record['environment']['torch']}, {record['options']['threads']} thread, "
                     f"the fastest of {record['rounds']} rounds.\n\n")  # fmt: skip
        parts.append(f"Over the formats, {'; '.join(said)} as fast.\n")
    return ("".join(parts) or NONE) + "\n"


def _span(found: list[float], form: str) -> str:
    return f"{min(found):{form}} to {max(found):{form}}"


def sanitized() -> str:
    """What each sanitizer said of the native kernels."""
    path, rows = RESULTS / "sanitize_cpu.json", []
    if not path.exists():
        return f"{NONE}\n"
    for r in json.loads(path.read_text())["runs"]:
        # Of a run that a sanitizer ended, only its exit code is known.
        cases = ", ".join(f"{level} {n}" for level, n in r.get("cases", {}).items()) or "-"
        tests = {None: "-", 0: "passed"}.get(r.get("tests"), "failed")
        said = "nothing" if r["exit_code"] == 0 else f"exit code {r['exit_code']}"
        rows.append((r["sanitizer"].replace(",", ", "), cases, str(r.get("wrong", "-")), tests, said))
    return "\n" + table(("sanitizer", "cases", "wrong", "tests/cpu/test_cpu.py", "reported"), rows) + "\n"


TABLES = {"cpu": tables, "demo-speed": demo, "sanitized": sanitized}


def wanted() -> dict[Path, str]:
    return {page: pages.renewed(page.read_text(), TABLES, names) for page, names in PAGES.items()}


if __name__ == "__main__":
    sys.exit(pages.main(__doc__ or "", wanted))
