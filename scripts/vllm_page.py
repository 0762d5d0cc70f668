"""Writes the tables and the picture of docs/serving.md about vLLM on a GPU: what a cache dtype buys, what was right.

    python scripts/vllm_page.py            check: exit code 1 if a table is out of date
    python scripts/vllm_page.py --write    bring them up to date

From the lines that benchmarks/vllm_serving.py kept in benchmarks/results: of Llama-3-8B's sizes on an H200, of other
models' on either.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import pages
from pages import ROOT
from svg import Picture

PAGE, RESULTS = ROOT / "docs" / "serving.md", ROOT / "benchmarks" / "results" / "vllm"
MODELS = {"hybrid": "Qwen3.5-27B, one MoE layer", "sinks": "gpt-oss-20b, 8 experts", "mla": "DeepSeek-V3, no experts"}
PICTURE = ROOT / "docs" / "pictures" / "vllm_h200.svg"
REFERENCES = {("FLASH_ATTN", "auto"), ("FLASH_ATTN_MLA", "auto")}
# What the picture shows, and how its numbers are written.
BARS = {
    "step_ms": ("decode step, ms", "{:.2f}"),
    "cache_tokens": ("tokens that fit", "{:,}"),
    "serve_tokens_s": ("tokens/s, many requests", "{:,.0f}"),
}
ACCEPTED = {"perplexity": "", "windows": "windows and sinks", "ranks": "2 GPUs"}


def kept(chip: str = "h200") -> list[dict[str, Any]]:
    path = RESULTS / f"{chip}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def speed(lines: Iterable[dict[str, Any]]) -> str:
    """A row a backend and dtype; ratios are to FLASH_ATTN's 16 bits in the same run, on the same machine."""
    found = [r for r in lines if r["kind"] == "speed"]
    if not found:
        return "\nNo run is kept yet.\n\n"
    head, rows = rows_of_speed(found)
    shown = f"![A bar a cache dtype: {', '.join(what for what, _ in BARS.values())}](pictures/{PICTURE.name})"
    return f"\n{chips(found)}\n\n{shown}\n\n{pages.table(head, rows)}\n"


def models(lines: Iterable[dict[str, Any]]) -> str:
    """The same of other models' sizes, a row a model, backend and dtype; nothing before a run is kept."""
    found = [r for r in lines if r["kind"] in MODELS]
    if not found:
        return "\n"
    head, rows = rows_of_speed(found)
    rows = [[f"{MODELS[r['kind']]}, {r['gpu'].split()[1]}", *row] for r, row in zip(found, rows, strict=True)]
    return f"\nOther models' sizes, {chips(found)}:\n\n{pages.table(['model, GPU', *head], rows)}\n"


def chips(found: list[dict[str, Any]]) -> str:
    about = {(r["gpu"], r["torch"]) for r in found if "gpu" in r}
    return "; ".join(f"{gpu}, PyTorch {torch}" for gpu, torch in sorted(about))


def rows_of_speed(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The head, and a row of each line."""
    firsts = {(r["kind"], r.get("run")): r for r in found if (r["backend"], r["dtype"]) in REFERENCES}
    rows = []
    for r in found:
        first = firsts.get((r["kind"], r.get("run")), {})
        name = [backend(r), f"`{r['dtype']}`"]
        if "step_ms" not in r:
            rows.append([*name, *["-"] * 5, r["reason"]])
            continue
        rows.append([
            *name, f"{r['prefill_tokens_s']:,.0f}", f"{r['first_token_ms']:.0f}", f"{r['step_ms']:.2f}",
            f"{r['cache_tokens']:,}", f"{r['serve_tokens_s']:,.0f}{ratio(r, first, 'serve_tokens_s')}",
            f"{r['apart_cached']:.3f}" + (f"; {r['reason']}" if "reason" in r else ""),
        ])  # fmt: skip
    head = ["backend", "`--kv-cache-dtype`", "prefill, tokens/s", "first token, ms", "decode step, ms",
            "tokens that fit", "tokens/s, many requests", "log-probabilities apart"]  # fmt: skip
    return head, rows


def drawn(lines: Iterable[dict[str, Any]]) -> str:
    """A bar a backend and dtype, one chart beside the other."""
    found = [r for r in lines if r["kind"] == "speed" and "step_ms" in r]
    top, left, width = 66, 300, 200
    p = Picture(944, top + 28 * len(found) + 12, "What each cache dtype buys in vLLM: a bar a dtype")
    p.text(24, 26, "--kv-cache-dtype", bold=True, mono=True)
    for i, r in enumerate(found):
        y = top + 28 * i
        p.text(24, y, r["dtype"], mono=True, size=13)
        p.text(left - 12, y, backend(r).removeprefix("tersekv").lstrip(", "), size=11, fill="soft", anchor="end")
        for j, (what, (_, form)) in enumerate(BARS.items()):
            x, share = left + (width + 12) * j, r[what] / max(other[what] for other in found)
            p.rect(x, y - 10, share * (width - 70), 20, "blue" if r["backend"] == "tersekv" else "orange")
            p.text(x + share * (width - 70) + 6, y, form.format(r[what]), size=12)
    for j, (head, _) in enumerate(BARS.values()):
        p.text(left + (width + 12) * j, 26, head, size=13, bold=True)
    return p.svg()


def backend(r: dict[str, Any]) -> str:
    """Its name, and in which run it was, if not the first."""
    return ", ".join(filter(None, (r["backend"], r.get("run"))))


def ratio(r: dict[str, Any], first: dict[str, Any], of: str) -> str:
    return f" ({r[of] / first[of]:.2f} ×)" if of in first else ""


def accepted(lines: Iterable[dict[str, Any]]) -> str:
    """A row a model and dtype."""
    rows = []
    for r in lines:
        if r["kind"] not in ACCEPTED:
            continue
        # Of several models, "perplexity, 1 KV head a rank": one row each.
        models = [k.removeprefix("perplexity").removeprefix(", ") for k in r if k.startswith("perplexity")]
        for model in models or [""]:
            more = f", {model}" if model else ""
            what = ", ".join(filter(None, (ACCEPTED[r["kind"]], model))) or "plain"
            numbers = [f"{r[k + more]:{form}}" if k + more in r else "-" for k, form in
                       (("perplexity", ".4f"), ("kl", ".1e"), ("kl_decoded", ".1e"))]  # fmt: skip
            rows.append([what, r["backend"], f"`{r['dtype']}`", *numbers, r.get("reason", "")])
    if not rows:
        return "\nNo run is kept yet.\n\n"
    head = ["model", "backend", "`--kv-cache-dtype`", "perplexity", "KL, nats/byte", "of decoded tokens", ""]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    return f"\n{pages.table(head, rows)}\n"


TABLES = {
    "vllm_speed": lambda: speed(kept()), "vllm_models": lambda: models([*kept(), *kept("h100")]),
    "vllm_accepted": lambda: accepted(kept()),
}  # fmt: skip


def wanted() -> dict[Path, str]:
    picture = {PICTURE: drawn(kept())} if any(r["kind"] == "speed" for r in kept()) else {}
    return {PAGE: pages.renewed(PAGE.read_text(), TABLES, TABLES)} | picture


if __name__ == "__main__":
    sys.exit(pages.main("The tables of docs/serving.md about vLLM on a GPU.", wanted))
