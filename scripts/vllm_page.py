"""Writes the tables of docs/serving.md about vLLM on a GPU: what each cache dtype buys, and what was found right.

    python scripts/vllm_page.py            check: exit code 1 if a table is out of date
    python scripts/vllm_page.py --write    bring them up to date

From the lines that benchmarks/vllm_serving.py kept in benchmarks/results.
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

PAGE, RESULTS = ROOT / "docs" / "serving.md", ROOT / "benchmarks" / "results" / "h200_vllm.jsonl"
REFERENCE = ("FLASH_ATTN", "auto")
ACCEPTED = {"perplexity": "", "windows": "windows and sinks", "ranks": "2 GPUs"}


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def speed(lines: Iterable[dict[str, Any]]) -> str:
    """A row a backend and dtype; ratios are to FLASH_ATTN's 16 bits."""
    found = [r for r in lines if r["kind"] == "speed"]
    if not found:
        return "\nNo run is kept yet.\n\n"
    first = next((r for r in found if (r["backend"], r["dtype"]) == REFERENCE), {})
    rows = []
    for r in found:
        name = [r["backend"], f"`{r['dtype']}`"]
        if "step_ms" not in r:
            rows.append([*name, *["-"] * 5, r["reason"]])
            continue
        rows.append([
            *name, f"{r['prefill_tokens_s']:,.0f}", f"{r['first_token_ms']:.0f}", f"{r['step_ms']:.2f}",
            f"{r['cache_tokens']:,}", f"{r['serve_tokens_s']:,.0f}{ratio(r, first, 'serve_tokens_s')}",
            f"{r['apart_cached']:.3f}" + (f"; {r['reason']}" if "reason" in r else ""),
        ])  # fmt: skip
    about = {(r["gpu"], r["torch"]) for r in found if "gpu" in r}
    where = "; ".join(f"{gpu}, PyTorch {torch}" for gpu, torch in sorted(about))
    head = ["backend", "`--kv-cache-dtype`", "prefill, tokens/s", "first token, ms", "decode step, ms",
            "tokens that fit", "tokens/s, many requests", "log-probabilities apart"]  # fmt: skip
    return f"\n{where}\n\n{pages.table(head, rows)}\n"


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
    return f"\n{pages.table(head, rows)}\n"


TABLES = {"vllm_speed": lambda: speed(kept()), "vllm_accepted": lambda: accepted(kept())}


def wanted() -> dict[Path, str]:
    return {PAGE: pages.renewed(PAGE.read_text(), TABLES, TABLES)}


if __name__ == "__main__":
    sys.exit(pages.main("The tables of docs/serving.md about vLLM on a GPU.", wanted))
