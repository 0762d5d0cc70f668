"""What an 8-bit index costs: how many of the keys that a 16-bit index would choose it chooses too.

    python benchmarks/index_recall.py [--context 8192 …] [--rows 8] [--out FILE]

Index keys and queries of 128 columns, appended and scored by tersekv's own operations, into pages of `index_fp8` (with
e4m3 queries), plain and rotated, and of `bf16`. Of two sources:

    model   keys of the demo's Llama-style model over its text: a layer's keys of both heads side by side, its eight
            queries each in its head's half, weights of one, after RoPE at their positions; the mean of its layers
    random  normal keys, 64 normal queries and weights: no key stands out, so this is the worst that an index meets

Rows are the last of the context. `top`: of how many keys; `recall`: the share of the 16-bit choice that the 8-bit one
holds; `best`: the same of the better half of it. --out keeps the numbers as JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import tersekv
from tersekv.demo import text
from tersekv.demo.models import load
from tersekv.demo.parts import half_split_table, rotate_half_split

PAGE, TOP, SHARE, DIM = 64, 2048, 0.05, 128
INDICES = {"index_fp8": {"format": "index_fp8"}, "rotated": {"format": "index_fp8", "rotation": "hadamard"}}

Drawn = tuple[Tensor, Tensor, Tensor]  # keys [N, DIM], queries [T, heads, DIM], weights [T, heads]


def of_model(context: int, rows: int) -> Iterator[Drawn]:
    """A layer at a time; none where the text is too short."""
    model = load("llama")
    config, tokens = model.config, text.encode(text.heldout_text())[:context]
    if len(tokens) < context:
        return
    found: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(config.num_layers)]
    dense = model.dense_attention()

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found[layer].append((q.flatten(0, -3), k.flatten(0, -3)))
        return dense(layer, q, k, v)

    for window in tokens.split(config.train_context):
        model(window[None], attend)
    table = half_split_table(context, config.head_dim, config.rope_theta)
    for parts in found:
        q, k = (rotate_half_split(torch.cat(x), table) for x in zip(*parts, strict=True))
        group = config.num_q_heads // config.num_kv_heads
        padded = torch.zeros(rows, config.num_q_heads, config.num_kv_heads, config.head_dim)
        for head in range(config.num_q_heads):
            padded[:, head, head // group] = q[-rows:, head]
        yield k.flatten(1), padded.flatten(2), torch.full((rows, config.num_q_heads), DIM**-0.5)


def at_random(context: int, rows: int) -> Iterator[Drawn]:
    yield torch.randn(context, DIM), torch.randn(rows, 64, DIM), torch.randn(rows, 64)


SOURCES = {"model": of_model, "random": at_random}


def scores(drawn: Drawn, **made: str) -> Tensor:
    """[T, N] of every row over all keys."""
    k, q, w = drawn
    index = tersekv.PagedIndexCache.allocate(1, -(-len(k) // PAGE), PAGE, head_dim=DIM, **made)[0]
    tersekv.index_append(k, index, torch.arange(len(k)))
    q, w = tersekv.index_query(q, w, cache=index)
    # Each row is a request of its own, so that all of them see every key.
    table = torch.arange(index.num_pages, dtype=torch.int32).expand(len(q), -1)
    return tersekv.index_scores(q, w, index, table, torch.full((len(q),), len(k), dtype=torch.int32))


def recall(ours: Tensor, wanted: Tensor, top: int, of: int) -> float:
    """The share of the `of` best that are among our `top`."""
    chosen = torch.zeros_like(ours, dtype=torch.bool).scatter_(1, ours.topk(top).indices, True)
    return chosen.gather(1, wanted.topk(of).indices).double().mean().item()


def measured(source: str, context: int, rows: int) -> Iterator[dict]:
    found: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for drawn in SOURCES[source](context, rows):
        wanted = scores(drawn, format="bf16")[:, :context]
        for name, made in INDICES.items():
            ours = scores(drawn, **made)[:, :context]
            for top in sorted({min(TOP, context), min(TOP, int(SHARE * context))}):
                pair = recall(ours, wanted, top, top), recall(ours, wanted, top, top // 2)
                found.setdefault((name, top), []).append(pair)
    for (name, top), pairs in found.items():
        all_of, best = (sum(x) / len(pairs) for x in zip(*pairs, strict=True))
        yield {"source": source, "context": context, "index": name, "top": top, "recall": all_of, "best": best}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--context", type=int, nargs="+", default=[1024 * n for n in (8, 16, 32, 64, 128)])
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    kept: dict = {"rows": args.rows, "torch": torch.__version__, "tersekv": tersekv.__version__, "cells": []}
    with torch.inference_mode():
        for context in args.context:
            for source in SOURCES:
                for cell in measured(source, context, args.rows):
                    kept["cells"].append(cell)
                    print(json.dumps(cell), flush=True)
    if args.out:
        args.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
