"""Decode on a CPU against PyTorch's attention over a contiguous bf16 copy of the same keys and values.

    python benchmarks/cpu_decode.py [--threads N] [--json PATH] [--seconds 2] [--quick] [--backend torch]

Where other programs use the cores too, set OMP_WAIT_POLICY=passive, or every parallel step waits for them.

Every case is first compared with a dense fp64 attention over dequantised rows, as it is timed and with an fp32 output;
nothing is timed if one is wrong. GB/s are the bytes of codes and scales by the shortest time; "of read" is their share
of the rate at which as many threads sum up a large tensor. The long shape is then repeated with fewer threads.
The peer is the faster of two ways to call scaled_dot_product_attention: queries grouped as [1, H, G, D], or
enable_gqa. Each sample of ours is followed by one of the peer, so that both meet the same disturbances.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tersekv

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


SHAPES = (Shape("long", 32768, 32, 8, 128, 64), Shape("small", 1024, 8, 2, 64, 16))


class Problem(NamedTuple):
    q: Tensor  # [1, Hq, D] bf16
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
    q = torch.randn(1, shape.q_heads, shape.head_dim).bfloat16()
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
        x = torch.stack([codes & 15, codes >> 4], -1).flatten(-2)
        return (x - (scales.view(torch.int32) & 15)[..., None]) * scales[..., None]
    return codes.float() if scales is None else codes.float() * scales[..., None]


def errors(p: Problem, backend: str | None) -> tuple[float, float]:
    """Relative norms of decode's difference from dense fp64, with an fp32 output and with a bf16 one."""
    heads = p.k.shape[1]
    want = []
    for h, q in enumerate(p.q[0].double().unflatten(0, (heads, -1))):
        scores = q @ p.k[:, h].double().T * q.shape[-1] ** -0.5
        want.append(scores.softmax(-1) @ p.v[:, h].double())
    dense = torch.cat(want)
    outs = (
        tersekv.decode(p.q, p.layer, p.page_table, p.seq_lens, out_dtype=dtype, backend=backend)[0].double()
        for dtype in (torch.float32, torch.bfloat16)
    )
    exact, rounded = (float((got - dense).norm() / dense.norm()) for got in outs)
    return exact, rounded


def read_rate() -> float:
    """Bytes a second that all threads read, from memory that no cache holds."""
    x = torch.ones(1 << 25, dtype=torch.int64)
    return x.nbytes / min(seconds(x.sum) for _ in range(15))


def peers(p: Problem) -> dict[str, Callable[[], Tensor]]:
    """scaled_dot_product_attention over a contiguous [1, H, L, D] bf16 copy."""
    k, v = (x.transpose(0, 1).bfloat16().contiguous()[None] for x in (p.k, p.v))
    grouped = p.q.view(1, k.shape[1], -1, k.shape[3])
    each = p.q.transpose(0, 1)[None].contiguous()
    return {
        "SDPA grouped": lambda: F.scaled_dot_product_attention(grouped, k, v),
        "SDPA enable_gqa": lambda: F.scaled_dot_product_attention(each, k, v, enable_gqa=True),
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


def report(shape: Shape, budget: float, backend: str | None) -> list[dict]:
    problems = {format: make(shape, format) for format in tersekv.KV_FORMATS}
    judged = {format: errors(p, backend) for format, p in problems.items()}
    wrong = {format: e for format, e in judged.items() if not (e[0] < TOLERANCE and e[1] < ROUNDED)}
    if wrong:
        sys.exit(f"not timed, since wrong: {wrong} (want < {TOLERANCE} and {ROUNDED})")
    reads = read_rate()

    candidates = peers(problems["bf16"])
    best = min(candidates, key=lambda name: min(seconds(candidates[name]) for _ in range(7)))
    peer = candidates[best]
    print(f"\n{shape.name}: 1 x {shape.length}, {shape.q_heads}/{shape.heads} heads, D {shape.head_dim}, "
          f"pages of {shape.page_size}; peer: {best}\nthreads: {torch.get_num_threads()}, which read "
          f"{reads / 1e9:.1f} GB/s")  # fmt: skip
    columns = ("ms median", "min", "peer", "min", "ratio", "of mins", "GB/s", "of read", "error")
    print(f"{'format':<22}" + "".join(f"{name:>10}" for name in columns))
    rows = []
    for format, p in problems.items():
        step = partial(tersekv.decode, p.q, p.layer, p.page_table, p.seq_lens, backend=backend)
        ours, theirs = time_pair(step, peer, budget)
        row = {
            "shape": asdict(shape), "format": format, "peer": best, "error": judged[format][1],
            "threads": torch.get_num_threads(), "samples": len(ours),
            "ms_median": 1e3 * statistics.median(ours), "ms_min": 1e3 * min(ours),
            "peer_ms_median": 1e3 * statistics.median(theirs), "peer_ms_min": 1e3 * min(theirs),
            "bytes": tersekv.kv_bytes_per_token(format, shape.heads, shape.head_dim) * shape.length,
        }  # fmt: skip
        row["ratio"] = row["ms_median"] / row["peer_ms_median"]
        row["ratio_of_mins"] = row["ms_min"] / row["peer_ms_min"]
        row["share_of_read_rate"] = 1e3 * row["bytes"] / row["ms_min"] / reads
        rows.append(row)
        numbers = [row[k] for k in ("ms_median", "ms_min", "peer_ms_median", "peer_ms_min", "ratio", "ratio_of_mins")]
        rate = row["bytes"] / row["ms_min"] / 1e6
        print(
            f"{format:<22}"
            + "".join(f"{x:>10.3f}" for x in numbers)
            + f"{rate:>10.1f}{row['share_of_read_rate']:>10.2f}{row['error']:>10.1e}"
        )
    print(f"geometric mean of the ratios {statistics.geometric_mean(row['ratio'] for row in rows):.2f}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=2.0, help="timed seconds of a case")
    parser.add_argument("--quick", action="store_true", help="the small shape only")
    parser.add_argument("--backend", help="default: the one that a call gets")
    parser.add_argument("--json", help="write the rows here")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    machine = {
        "torch": torch.__version__, "machine": platform.machine(), "threads": args.threads,
        "isa": torch.backends.cpu.get_cpu_capability(),
    }  # fmt: skip
    print(machine)
    rows = [row for shape in SHAPES[1 if args.quick else 0 :] for row in report(shape, args.seconds, args.backend)]
    for threads in range(1, args.threads if not args.quick else 1):
        torch.set_num_threads(threads)
        rows += report(SHAPES[0], args.seconds, args.backend)
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"machine": machine, "rows": rows}, f, indent=1)


if __name__ == "__main__":
    main()
