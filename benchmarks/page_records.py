"""Times pages on their way to the host's memory and back, as records, beside the bare link.

    python benchmarks/page_records.py [--device cuda] [--tokens 32768] [--layers 8] [--formats bf16 …] [--out FILE]

A line per format: tokens that a gigabyte of host memory holds, the rate of `export_pages` and of `import_pages`, each
with its share of what a copy of as many bytes between the device and pinned memory reaches. The fastest of five runs
counts. What came back is compared first. On a CPU both are copies in its memory. --out keeps the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch

import tersekv

KV_HEADS, HEAD_DIM, PAGE, RUNS = 8, 128, 16, 5


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The fastest of the runs, until the device has done."""
    best = float("inf")
    for _ in range(RUNS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def measured(format: str, layers: int, order: list[int], device: torch.device) -> dict[str, float]:
    """The numbers of a format. Raises RuntimeError if what came back differs."""
    a, b = (
        tersekv.PagedKVCache.allocate(
            layers, len(order), PAGE, KV_HEADS, HEAD_DIM, format=format, scales="tail", device=device
        )
        for _ in range(2)
    )
    for layer in a.layers:
        layer.k.view(torch.uint8).random_()
        layer.v.view(torch.uint8).random_()
    record = tersekv.export_pages(a, order)
    tersekv.import_pages(b, order, record)
    for x, y in zip(a.layers, b.layers, strict=True):
        if not torch.equal(x.v.view(torch.uint8), y.v.view(torch.uint8)):
            raise RuntimeError(f"{format}: want the pages that were exported, got others")
    host, there = torch.empty_like(record, pin_memory=device.type == "cuda"), record.to(device, copy=True)
    found = {"bytes": len(record), "tokens_per_gb": 1e9 * len(order) * PAGE / len(record)}
    for name, ours, bare in (
        ("export", lambda: tersekv.export_pages(a, order), lambda: host.copy_(there, non_blocking=True)),
        ("import", lambda: tersekv.import_pages(b, order, record), lambda: there.copy_(record, non_blocking=True)),
    ):
        found[f"{name}_gb_s"], found[f"{name}_link_gb_s"] = (
            len(record) / seconds(call, device) / 1e9 for call in (ours, bare)
        )
    return found


def line(format: str, found: dict[str, float]) -> str:
    words = [f"{format:<20} {found['tokens_per_gb']:>9.0f} tokens/GB"]
    for name in ("export", "import"):
        rate, link = found[f"{name}_gb_s"], found[f"{name}_link_gb_s"]
        words.append(f"{name} {rate:6.2f} GB/s, {rate / link:4.0%} of {link:.2f}")
    return "   ".join(words)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--formats", nargs="+", default=["bf16", "fp8_e4m3", "int4_per_token_head"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device, pages = torch.device(args.device), -(-args.tokens // PAGE)
    order = torch.randperm(pages).tolist()
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    kept: dict = {"device": chip, "torch": torch.__version__, "tokens": pages * PAGE, "layers": args.layers}
    kept["formats"] = {}
    for format in args.formats:
        kept["formats"][format] = found = measured(format, args.layers, order, device)
        print(line(format, found), flush=True)
    if args.out:
        args.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
