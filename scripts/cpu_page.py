"""Writes into docs/performance.md what is kept of CPUs in benchmarks/results/: cpu_*.json of benchmarks/cpu_decode.py,
demo_speed_*.json of benchmarks/demo_speed.py, and sanitize_cpu.json of scripts/sanitize.py.

python scripts/cpu_page.py            check: exit code 1 if the page is out of date
python scripts/cpu_page.py --write    bring it up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT, table

PAGE, RESULTS = ROOT / "docs" / "performance.md", ROOT / "benchmarks" / "results"
Row = dict
NONE = "\nNo run is stored yet.\n"


def tables() -> str:
    return "\n" + "\n".join(part for path in sorted(RESULTS.glob("cpu_*.json")) for part in of(path)) + "\n"


def of(path: Path) -> Iterator[str]:
    """Of one run: where, decode with most threads, how it scales, prompts, losses."""
    record = json.loads(path.read_text())
    machine, rows = record["machine"], record["rows"]
    name = f"{machine['cpu']}, " if "cpu" in machine else ""
    amx = {True: ", AMX", False: ", no AMX", None: ""}[machine.get("amx")]
    yield f"`{path.name}`: {name}{machine['cores']} cores, {machine['native']}{amx}, torch {machine['torch']}.\n"
    counts = sorted({r["threads"] for r in rows})
    for title in dict.fromkeys(title_of(r) for r in rows):
        mine = [r for r in rows if title_of(r) == title]
        yield f"{title}, {mine[-1]['threads']} threads, peer {mine[-1]['peer']}:\n"
        yield (prompts if mine[0]["shape"]["new"] > 1 else decodes)([r for r in mine if r["threads"] == counts[-1]])
    if len(counts) > 1:
        yield "Times as fast as with one thread, by the shortest times:\n"
        yield scaling(rows, counts)
    lost = [r for r in rows if r["ratio"] > 1]
    told = "; ".join(f"{r['format']}, {title_of(r)}, {r['threads']} threads: {r['ratio']:.2f}" for r in lost)
    yield f"Slower than the peer, by medians, in {len(lost)} of {len(rows)} cases{': ' * bool(told)}{told}.\n"


def title_of(r: Row) -> str:
    s = r["shape"]
    new = f", {s['new']} of them new" if s["new"] > 1 else ""
    return f"1 × {s['length']} tokens{new}, {s['q_heads']}/{s['heads']} heads, D {s['head_dim']}"


def decodes(rows: list[Row]) -> str:
    head = ["format", "ms, median", "shortest", "GB/s", "of the read rate", "peer, ms", "ratio", "of shortest"]
    llama = any("llama_cpp" in r for r in rows)
    lines = []
    for r in rows:
        second = r.get("llama_cpp")
        ms = f"{second['type']} {second['ms_median']:.3g}" if second else "-"
        lines.append([
            r["format"], f"{r['ms_median']:.3g}", f"{r['ms_min']:.3g}", f"{r['bytes'] / r['ms_min'] / 1e6:.1f}",
            f"{r['share_of_read_rate']:.2f}", f"{r['peer_ms_median']:.3g}", f"{r['ratio']:.2f}",
            f"{r['ratio_of_mins']:.2f}", *[ms] * llama,
        ])  # fmt: skip
    return table([*head, *["llama.cpp, ms"] * llama], lines)


def prompts(rows: list[Row]) -> str:
    head = ("format", "ms, median", "shortest", "GFLOP/s", "peer, ms", "ratio", "of shortest")
    return table(head, ([
        r["format"], f"{r['ms_median']:.3g}", f"{r['ms_min']:.3g}", f"{r['flops'] / r['ms_min'] / 1e6:.0f}",
        f"{r['peer_ms_median']:.3g}", f"{r['ratio']:.2f}", f"{r['ratio_of_mins']:.2f}",
    ] for r in rows))  # fmt: skip


def scaling(rows: list[Row], counts: list[int]) -> str:
    by = {(title_of(r), r["format"], r["threads"]): r for r in rows if r["shape"]["new"] == 1}
    lines = []
    for title in dict.fromkeys(key[0] for key in by):
        formats = list(dict.fromkeys(key[1] for key in by if key[0] == title))
        for name, field in (*((f, "ms_min") for f in formats), ("peer", "peer_ms_min")):
            mine = [by[title, formats[0] if name == "peer" else name, n][field] for n in counts]
            lines.append([title, name, *(f"{mine[0] / ms:.2f}" for ms in mine)])
    return table(["case", "format", *(f"{n}" for n in counts)], lines)


def demo() -> str:
    """Tokens a second of the demo's models, eager and native."""
    parts = []
    for path in sorted(RESULTS.glob("demo_speed_*.json")):
        record = json.loads(path.read_text())
        rows = (
            (r["model"], r["format"], f"{r['tokens_per_s']['eager']:.0f}", f"{r['tokens_per_s']['native']:.0f}",
             f"{r['tokens_per_s']['native'] / r['tokens_per_s']['eager']:.2f}")
            for r in record["rows"]
        )  # fmt: skip
        parts.append(f"\n`{path.name}`: torch {record['environment']['torch']}, {record['options']['threads']} thread, "
                     f"the fastest of {record['rounds']} rounds.\n\n")  # fmt: skip
        parts.append(table(("model", "format", "eager, tokens/s", "native", "times"), rows))
    return ("".join(parts) or NONE) + "\n"


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
    return {PAGE: pages.renewed(PAGE.read_text(), TABLES, TABLES)}


if __name__ == "__main__":
    sys.exit(pages.main(__doc__ or "", wanted))
