"""Decode and prefill on a CPU against PyTorch's attention over a contiguous bf16 copy of the same keys and values.

    python benchmarks/cpu_decode.py [--threads 1,2,4,8] [--json PATH] [--seconds 2] [--formats bf16,fp8_e4m3]
                                    [--only decode,prefill] [--quick] [--backend torch]

Where other programs use the cores too, set OMP_WAIT_POLICY=passive, or every parallel step waits for them.

Every case is first compared with a dense fp64 attention over dequantised rows, as it is timed and with an fp32 output;
nothing is timed if one is wrong. GB/s are the bytes of codes and scales by the shortest time; "of read" is their share
of the rate at which as many threads sum up a large tensor, measured beside each case. All is repeated for each number
of threads; the last table says how the shortest times scale from the first one on.
The peer of decode is the faster of two ways to call scaled_dot_product_attention: queries grouped as [1, H, G, D], or
enable_gqa; that of prefill the faster of enable_gqa and keys that were repeated before. Each sample of ours is followed
by one of the peer, so that both meet the same disturbances.

A machine without a compiler takes the library of another: copy src/tersekv/backends/cpu/_native.so with the sources
that it was compiled from. As gcc links it, it wants the glibc of where it was compiled, but at most 2.34.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tersekv
from tersekv.backends.cpu import library

TOLERANCE = 1e-5  # relative norm of fp32 outputs against fp64
ROUNDED = 3e-3  # of bf16 outputs, which are timed


@dataclass(frozen=True)
class Shape:
    name: str
    length: int
    q_heads: int
    heads: int
    head_dim: int
    page_size: int

    new: int = 1


SHAPES = (Shape("long", 32768, 32, 8, 128, 64), Shape("small", 1024, 8, 2, 64, 16))
PROMPTS = (
    Shape("prompt", 2048, 32, 8, 128, 64, 2048), Shape("chunk", 8192, 32, 8, 128, 64, 512),
    Shape("small prompt", 1024, 8, 2, 64, 16, 1024),
)  # fmt: skip


class Problem(NamedTuple):
    q: Tensor  # [T, Hq, D] bf16, the last tokens
    layer: tersekv.PagedKVLayer
    page_table: Tensor
    seq_lens: Tensor
    k: Tensor  # [L, H, D] fp32: what the cache holds, in the order of the tokens
    v: Tensor


def make(shape: Shape, format: str) -> Problem:
    """Normally distributed K and V, appended at random pages."""
    torch.manual_seed(0)
    pages = -(-shape.length // shape.page_size)
    layer = tersekv.PagedKVCache.allocate(1, pages, shape.page_size, shape.heads, shape.head_dim, format=format)[0]
    table = torch.randperm(pages)
    token = torch.arange(shape.length)
    slots = table[token // shape.page_size] * shape.page_size + token % shape.page_size
    k, v = (torch.randn(shape.length, shape.heads, shape.head_dim) for _ in "kv")
    tersekv.append(k, v, layer, slots)
    q = torch.randn(shape.new, shape.q_heads, shape.head_dim).bfloat16()
    k, v = (dequantise(layer, side).flatten(0, 1)[slots] for side in "kv")
    return Problem(q, layer, table[None].to(torch.int32), torch.tensor([shape.length], dtype=torch.int32), k, v)


def dequantise(layer: tersekv.PagedKVLayer, side: str) -> Tensor:
    """[P, S, H, D] fp32 by PyTorch's own casts."""
    codes, scales = getattr(layer, side), getattr(layer, f"{side}_scale_cache")
    if layer.format == "nvfp4":
        e2m1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
        e2m1 = torch.cat([e2m1, -e2m1])
        x = e2m1[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()]
        return x * scales.float().repeat_interleave(16, -1)
    if layer.format == "int4_per_token_head":
        x = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float()
        return (x - (scales.contiguous().view(torch.int32) & 15)[..., None]) * scales[..., None]
    return codes.float() if scales is None else codes.float() * scales[..., None]


def attend(p: Problem, out_dtype: torch.dtype | None, backend: str | None) -> Tensor:
    if len(p.q) == 1:
        return tersekv.decode(p.q, p.layer, p.page_table, p.seq_lens, out_dtype=out_dtype, backend=backend)
    starts = torch.tensor([0, len(p.q)], dtype=torch.int32)
    return tersekv.prefill(p.q, p.layer, p.page_table, p.seq_lens, starts, out_dtype=out_dtype, backend=backend)


def errors(p: Problem, backend: str | None) -> tuple[float, float]:
    """Relative norms of the difference from dense fp64, with an fp32 output and with a bf16 one, on some rows."""
    heads, first = p.k.shape[1], len(p.k) - len(p.q)
    rows = torch.arange(len(p.q)).flip(0)[:: -(-len(p.q) // 16)]
    want = torch.empty(len(rows), *p.q.shape[1:], dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        n = first + row + 1
        for h, q in enumerate(p.q[row].double().unflatten(0, (heads, -1))):
            scores = q @ p.k[:n, h].double().T * q.shape[-1] ** -0.5
            want[i].unflatten(0, (heads, -1))[h] = scores.softmax(-1) @ p.v[:n, h].double()
    outs = (attend(p, dtype, backend)[rows].double() for dtype in (torch.float32, torch.bfloat16))
    exact, rounded = (float((got - want).norm() / want.norm()) for got in outs)
    return exact, rounded


def read_rate() -> float:
    """Bytes a second that all threads read, from memory that no cache holds."""
    x = torch.ones(1 << 25, dtype=torch.int64)
    return x.nbytes / min(seconds(x.sum) for _ in range(15))


def peers(p: Problem) -> dict[str, Callable[[], Tensor]]:
    """scaled_dot_product_attention over a contiguous [1, H, L, D] bf16 copy."""
    k, v = (x.transpose(0, 1).bfloat16().contiguous()[None] for x in (p.k, p.v))
    each = p.q.transpose(0, 1)[None].contiguous()
    if len(p.q) == 1:
        grouped = p.q.view(1, k.shape[1], -1, k.shape[3])
        return {
            "SDPA grouped": lambda: F.scaled_dot_product_attention(grouped, k, v),
            "SDPA enable_gqa": lambda: F.scaled_dot_product_attention(each, k, v, enable_gqa=True),
        }
    group, new = each.shape[1] // k.shape[1], len(p.q)
    seen: dict = {"is_causal": True}
    if new < len(p.k):
        seen = {"attn_mask": torch.ones(new, len(p.k), dtype=torch.bool).tril(len(p.k) - new)}
    many_k, many_v = (x.repeat_interleave(group, 1) for x in (k, v))
    return {
        "SDPA enable_gqa": lambda: F.scaled_dot_product_attention(each, k, v, **seen, enable_gqa=True),
        "SDPA repeated": lambda: F.scaled_dot_product_attention(each, many_k, many_v, **seen),
    }


def seconds(f: Callable[[], Tensor]) -> float:
    start = time.perf_counter()
    f()
    return time.perf_counter() - start


def time_pair(ours: Callable[[], Tensor], peer: Callable[[], Tensor], budget: float) -> tuple[list[float], list[float]]:
    for f in (ours, peer, ours, peer):
        f()
    a: list[float] = []
    b: list[float] = []
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(a) < 5:
        a.append(seconds(ours))
        b.append(seconds(peer))
    return a, b


def flops(shape: Shape) -> float:
    seen = shape.new * (shape.length - shape.new) + shape.new * (shape.new + 1) / 2
    return 4 * shape.q_heads * shape.head_dim * seen


def report(shape: Shape, formats: Sequence[str], budget: float, backend: str | None) -> list[dict]:
    problems = {format: make(shape, format) for format in formats}
    judged = {format: errors(p, backend) for format, p in problems.items()}
    wrong = {format: e for format, e in judged.items() if not (e[0] < TOLERANCE and e[1] < ROUNDED)}
    if wrong:
        sys.exit(f"not timed, since wrong: {wrong} (want < {TOLERANCE} and {ROUNDED})")

    candidates = peers(problems[formats[0]])
    best = min(candidates, key=lambda name: min(seconds(candidates[name]) for _ in range(5)))
    peer = candidates[best]
    new = f", {shape.new} of them new" if shape.new > 1 else ""
    print(f"\n{shape.name}: 1 x {shape.length}{new}, {shape.q_heads}/{shape.heads} heads, D {shape.head_dim}, "
          f"pages of {shape.page_size}; peer: {best}; threads: {torch.get_num_threads()}")  # fmt: skip
    rate = "GFLOP/s" if shape.new > 1 else "GB/s"
    columns = ("ms median", "min", "peer", "min", "ratio", "of mins", rate, "read GB/s", "of read", "error")
    print(f"{'format':<22}" + "".join(f"{name:>10}" for name in columns))
    rows = []
    for format, p in problems.items():
        ours, theirs = time_pair(partial(attend, p, None, backend), peer, budget)
        reads = read_rate()
        row = {
            "shape": asdict(shape), "format": format, "peer": best, "error": judged[format][1],
            "threads": torch.get_num_threads(), "samples": len(ours),
            "ms_median": 1e3 * statistics.median(ours), "ms_min": 1e3 * min(ours),
            "peer_ms_median": 1e3 * statistics.median(theirs), "peer_ms_min": 1e3 * min(theirs),
            "bytes": tersekv.kv_bytes_per_token(format, shape.heads, shape.head_dim) * shape.length,
            "flops": flops(shape), "read_gb_s": reads / 1e9,
        }  # fmt: skip
        row["ratio"] = row["ms_median"] / row["peer_ms_median"]
        row["ratio_of_mins"] = row["ms_min"] / row["peer_ms_min"]
        row["share_of_read_rate"] = 1e3 * row["bytes"] / row["ms_min"] / reads
        rows.append(row)
        numbers = [row[k] for k in ("ms_median", "ms_min", "peer_ms_median", "peer_ms_min", "ratio", "ratio_of_mins")]
        rate = row["flops" if shape.new > 1 else "bytes"] / row["ms_min"] / 1e6
        print(
            f"{format:<22}"
            + "".join(f"{x:>10.3f}" for x in numbers)
            + f"{rate:>10.1f}{row['read_gb_s']:>10.1f}{row['share_of_read_rate']:>10.2f}{row['error']:>10.1e}",
            flush=True,
        )
    print(f"geometric mean of the ratios {statistics.geometric_mean(row['ratio'] for row in rows):.2f}")
    return rows


def scaling(rows: list[dict]) -> None:
    """How many times as fast each case is as with the first number of threads, by shortest times."""
    counts = list(dict.fromkeys(row["threads"] for row in rows))
    if len(counts) < 2:
        return
    print(f"\n{'scaling':<36}" + "".join(f"{n:>8}" for n in counts))
    cases: dict[tuple[str, str], dict[int, dict]] = {}
    for row in rows:
        cases.setdefault((row["shape"]["name"], row["format"]), {})[row["threads"]] = row
    for (shape, format), by in cases.items():
        for name, field in (("", "ms_min"), (" peer", "peer_ms_min")):
            if not name or format == next(f for s, f in cases if s == shape):
                print(
                    f"{f'{shape}, {format}{name}':<36}"
                    + "".join(f"{by[counts[0]][field] / by[n][field]:>8.2f}" for n in counts)
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", default=str(torch.get_num_threads()), help="numbers, comma-separated")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed seconds of a case")
    parser.add_argument("--formats", default=",".join(tersekv.KV_FORMATS))
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--quick", action="store_true", help="the small shapes only")
    parser.add_argument("--backend", help="default: the one that a call gets")
    parser.add_argument("--json", help="write the rows here, anew after each number of threads")
    args = parser.parse_args()
    shapes = [s for what, some in (("decode", SHAPES), ("prefill", PROMPTS)) if what in args.only.split(",")
              for s in some if not args.quick or s.length <= 1024]  # fmt: skip
    native = library.loaded()
    machine = {
        "torch": torch.__version__, "machine": platform.machine(), "isa": torch.backends.cpu.get_cpu_capability(),
        "native": native if isinstance(native, str) else native.level(), "cores": os.cpu_count(),
    }  # fmt: skip
    print(machine)
    rows: list[dict] = []
    for threads in map(int, args.threads.split(",")):
        torch.set_num_threads(threads)
        for shape in shapes:
            rows += report(shape, args.formats.split(","), args.seconds, args.backend)
        if args.json:
            with open(args.json, "w") as f:
                json.dump({"machine": machine, "rows": rows}, f, indent=1)
    scaling(rows)


if __name__ == "__main__":
    main()
