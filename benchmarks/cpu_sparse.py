"""Lists of keys and an indexer on a CPU: against a read of as many bytes in order, and against the oracle.

    python benchmarks/cpu_sparse.py [--threads 1,2] [--seconds 1.5] [--json PATH] [--quick]

Without arguments: with 1 thread and with all, in some five minutes. Cells:

    mla     mla_decode of 4 requests, each with a list of 2048 tokens of 32768, a few heads or many
    blocks  decode of one request with a list of 16 blocks of 128 tokens, one list for each of 8 KV heads,
            whose rows lie apart (NHD) or one after another (HND)
    scores  index_scores of 65536 keys; topk: index_topk of their scores
    append  index_append of a chunk's keys, or of one; query: index_query of as many rows, of 64 heads

Every cell is first compared with the oracle (backend="torch"), and nothing is timed if one is wrong. "linear" is the
same attention without lists, over as many keys in pages of their own: the share says what gathering costs. "of read" is
the share of the rate at which as many threads sum up a large tensor. Samples are taken in turns; the shortest is told,
since other programs use the cores. With many heads products bound both, not bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from cpu_decode import apart, machine, seconds

import tersekv

TOLERANCE = 3e-3  # relative norm against the oracle, of bf16 outputs
TOKENS, PAGE, LISTED, REQUESTS, KEYS = 32768, 64, 2048, 4, 65536
LATENTS = (("fp8_ds_mla", 64), ("fp8_v4", 0), ("fp8_v41", 0), ("bf16", 64))
KV = ("fp8_e4m3", "int8_per_token_head", "bf16")


class Cell(NamedTuple):
    name: str
    format: str
    heads: int
    bytes: int
    ours: Callable[..., Tensor]  # takes a backend
    linear: Callable[[], Tensor] | None


def mla(format: str, rope: int, counts: tuple[int, ...]) -> Iterator[Cell]:
    layer = tersekv.PagedLatentCache.allocate(1, TOKENS // PAGE, PAGE, format=format, qk_rope_head_dim=rope)[0]
    for begin in range(0, TOKENS, 4096):
        pe = torch.randn(4096, rope) if rope else None
        tersekv.mla_append(torch.randn(4096, 512), pe, layer, torch.arange(begin, begin + 4096))
    size = tersekv.latent_bytes_per_token(format, qk_rope_head_dim=rope) * LISTED * REQUESTS
    pages = torch.stack([torch.randperm(TOKENS // PAGE) for _ in range(REQUESTS)]).int()
    lists = torch.stack([torch.randperm(TOKENS)[:LISTED].sort().values for _ in range(REQUESTS)]).int()
    lens, listed = (torch.full((REQUESTS,), n, dtype=torch.int32) for n in (TOKENS, LISTED))
    for heads in counts:
        q = torch.randn(REQUESTS, heads, 512 + rope).bfloat16()

        def ours(backend: str | None = None, q: Tensor = q) -> Tensor:
            return tersekv.mla_decode(q, layer, pages, lens, indices=lists, softmax_scale=0.05, backend=backend)

        def linear(q: Tensor = q) -> Tensor:
            return tersekv.mla_decode(q, layer, pages, listed, softmax_scale=0.05)

        yield Cell("mla", format, heads, size, ours, linear)


def blocks(format: str, layout: str) -> Cell:
    layer = tersekv.PagedKVCache.allocate(1, TOKENS // PAGE, PAGE, 8, 128, format=format, layout=layout)[0]
    k, v = (torch.randn(TOKENS, 8, 128) for _ in "kv")
    tersekv.append(k, v, layer, torch.arange(TOKENS))
    q, pages = torch.randn(1, 32, 128).bfloat16(), torch.randperm(TOKENS // PAGE)[None].int()
    lists = torch.stack([torch.randperm(TOKENS // 128)[: LISTED // 128] for _ in range(8)])[None].int()
    lens, listed = (torch.tensor([n], dtype=torch.int32) for n in (TOKENS, LISTED))

    def ours(backend: str | None = None) -> Tensor:
        return tersekv.decode(q, layer, pages, lens, indices=lists, block_size=128, backend=backend)

    size = tersekv.kv_bytes_per_token(format, 8, 128) * LISTED
    return Cell(f"blocks {layout}", format, 32, size, ours, lambda: tersekv.decode(q, layer, pages, listed))


def indexer(counts: tuple[int, ...]) -> Iterator[Cell]:
    layer = tersekv.PagedIndexCache.allocate(num_layers=1, num_pages=KEYS // PAGE, page_size=PAGE)[0]
    tersekv.index_append(torch.randn(KEYS, 128), layer, torch.arange(KEYS))
    pages, lens = torch.randperm(KEYS // PAGE)[None].int(), torch.tensor([KEYS], dtype=torch.int32)
    for heads in counts:
        q, w = tersekv.index_query(torch.randn(1, heads, 128), torch.randn(1, heads), cache=layer)

        def scores(backend: str | None = None, q: Tensor = q, w: Tensor = w) -> Tensor:
            return tersekv.index_scores(q, w, layer, pages, lens, backend=backend)

        yield Cell("scores", "index_fp8", heads, 132 * KEYS, scores, None)
    found = scores()
    for k in (512, 2048):

        def topk(backend: str | None = None, k: int = k) -> Tensor:
            return tersekv.index_topk(found, lens, k, backend=backend)

        yield Cell(f"topk {k}", "fp32", 1, 4 * KEYS, topk, None)


def index_rows(tokens: int, rotation: str | None) -> Iterator[Cell]:
    """Keys with a norm and queries of new tokens, with RoPE. Each backend writes into a layer of its own."""
    heads, norm = 64, (torch.ones(128), torch.zeros(128), 1e-6)
    rope = {"cos_sin_cache": torch.randn(tokens, 64), "positions": torch.arange(tokens)}
    k, q, w = (torch.randn(tokens, *n).bfloat16() for n in ((128,), (heads, 128), (heads,)))
    slots, layers = torch.randperm(tokens), {}
    for backend in (None, "torch"):
        layers[backend] = tersekv.PagedIndexCache.allocate(1, -(-tokens // PAGE), PAGE, rotation=rotation)[0]

    def append(backend: str | None = None) -> Tensor:
        tersekv.index_append(k, layers[backend], slots, norm=norm, backend=backend, **rope)
        return layers[backend].k.view(torch.uint8)

    def query(backend: str | None = None) -> Tensor:
        return tersekv.index_query(q, w, cache=layers[backend], backend=backend, **rope)[0].view(torch.uint8)

    name = f"{tokens} {'rotated' if rotation else ''}"
    yield Cell(f"append {name}", "index_fp8", 1, tokens * (256 + 132), append, None)
    yield Cell(f"query {name}", "index_fp8", heads, tokens * heads * (258 + 132), query, None)


def cells(quick: bool) -> Iterator[Cell]:
    counts = (1, 8) if quick else (1, 8, 16, 64)
    for format, rope in LATENTS[:2] if quick else LATENTS:
        yield from mla(format, rope, counts)
    for layout in ("NHD", "HND"):
        for format in KV[:1] if quick else KV:
            yield blocks(format, layout)
    yield from indexer((1,) if quick else (1, 8, 32, 64))
    for rotation in (None, "hadamard"):
        for tokens in (1, 1024):
            yield from index_rows(tokens, rotation)


def shortest(calls: list[Callable[[], Tensor]], budget: float) -> list[float]:
    """Of each, the seconds of its shortest call: in turns, so often that each has an equal part of the time."""
    rounds, end = 0, time.perf_counter() + budget
    best = [min(seconds(f) for _ in range(3)) for f in calls]
    while time.perf_counter() < end or rounds < 5:
        for i, f in enumerate(calls):
            for _ in range(max(1, min(50, int(max(best) / best[i])))):
                best[i] = min(best[i], seconds(f))
        rounds += 1
    return best


def measure(cell: Cell, budget: float, large: Tensor) -> dict:
    start = time.perf_counter()
    want = cell.ours("torch").double()
    oracle, error = time.perf_counter() - start, apart(cell.ours(), want)
    if not error < TOLERANCE:
        sys.exit(f"not timed, since wrong: {cell.name} {cell.format} {cell.heads}, {error} (want < {TOLERANCE})")
    calls = [cell.ours, *([cell.linear] if cell.linear else []), large.sum]
    taken = shortest(calls, budget)
    ours, rate = taken[0], large.nbytes / taken[-1]
    row = {
        "cell": cell.name, "format": cell.format, "heads": cell.heads, "threads": torch.get_num_threads(),
        "bytes": cell.bytes, "ms_min": 1e3 * ours, "oracle_ms": 1e3 * oracle, "read_gb_s": rate / 1e9,
        "share_of_read_rate": cell.bytes / ours / rate, "error": error,
    }  # fmt: skip
    if cell.linear:
        row |= {"linear_ms_min": 1e3 * taken[1], "share_of_linear": taken[1] / ours}
    return row


def show(row: dict) -> None:
    linear = row.get("linear_ms_min")
    beside = f"{linear:>10.3f}{row['share_of_linear']:>10.2f}" if linear else " " * 20
    print(
        f"{row['cell']:<20}{row['format']:<22}{row['heads']:>5}{row['threads']:>8}{row['ms_min']:>10.3f}{beside}"
        f"{row['bytes'] / row['ms_min'] / 1e6:>8.2f}{row['share_of_read_rate']:>9.2f}{row['oracle_ms']:>11.1f}"
        f"{row['error']:>10.1e}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", help="numbers, comma-separated; default: 1 and all cores")
    parser.add_argument("--seconds", type=float, default=1.5, help="timed seconds of a cell")
    parser.add_argument("--quick", action="store_true", help="few cells")
    parser.add_argument("--json", help="write the rows here")
    args = parser.parse_args()
    about = machine()
    counts = [int(n) for n in args.threads.split(",")] if args.threads else [1, about["cores"]]
    print(about)
    print(
        "cell                format                heads threads   min ms    linear  share of    GB/s  of read"
        " oracle ms   error"
    )
    torch.manual_seed(0)
    large, rows = torch.ones(1 << 23, dtype=torch.int64), []
    for cell in cells(args.quick):
        for threads in dict.fromkeys(counts):
            torch.set_num_threads(threads)
            rows.append(measure(cell, args.seconds, large))
            show(rows[-1])
    if args.json:
        about["load"] = round(os.getloadavg()[0], 1)
        Path(args.json).write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
