"""Decode and prefill on a CPU against PyTorch's attention over a contiguous bf16 copy of the same keys and values.

    python benchmarks/cpu_decode.py [--threads 1,2,4,8] [--json PATH] [--seconds 0.6] [--formats bf16,fp8_e4m3]
                                    [--only decode,prefill] [--quick] [--backend torch] [--ggml FOLDER]

Without arguments: decode with 1, 2, 4 … threads up to all cores, prefill with all of them, in three to four minutes.
Run it alone. Where other programs use the cores too, set OMP_WAIT_POLICY=passive, or every parallel step waits for
them. Ours and PyTorch's calls are made by the same threads, where PyTorch has OpenMP.

Every case is first compared with a dense fp64 attention over dequantised rows, as it is timed and with an fp32 output;
nothing is timed if one is wrong. GB/s are the bytes of codes and scales by the shortest time; "of read" is their share
of the rate at which as many threads sum up a large tensor, measured beside each case. The last table says how the
shortest times scale from the first number of threads on.
The peer of decode is the faster of two ways to call scaled_dot_product_attention: queries grouped as [1, H, G, D], or
enable_gqa; that of prefill the faster of enable_gqa and keys that were repeated before. Each sample of ours is followed
by one of the peer, so that both meet the same disturbances. Where llama.cpp's library is (`ggml.py`), its attention
over caches in f16, q8_0 and q4_0 is a second peer of the long decode, of the formats with as many bits.

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
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
import ggml

import tersekv
from tersekv.backends.cpu import library

TOLERANCE = 1e-5  # relative norm of fp32 outputs against fp64
ROUNDED = 3e-3  # of bf16 outputs, which are timed
# llama.cpp's caches with as many bits. It rounds queries to 8 bits for quantised keys and sums 16-bit values in fp16.
GGML = {"fp16": "f16", "int8_per_token_head": "q8_0", "int4_per_token_head": "q4_0"}
GGML_TOLERANCE = 3e-2


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


def some_rows(p: Problem) -> Tensor:
    return torch.arange(len(p.q)).flip(0)[:: -(-len(p.q) // 16)]


def dense(q: Tensor, k: Tensor, v: Tensor, rows: Tensor) -> Tensor:
    """Rows of causal attention in fp64."""
    heads, first = k.shape[1], len(k) - len(q)
    want = torch.empty(len(rows), *q.shape[1:], dtype=torch.float64)
    for i, row in enumerate(rows.tolist()):
        n = first + row + 1
        for h, x in enumerate(q[row].double().unflatten(0, (heads, -1))):
            scores = x @ k[:n, h].double().T * x.shape[-1] ** -0.5
            want[i].unflatten(0, (heads, -1))[h] = scores.softmax(-1) @ v[:n, h].double()
    return want


def apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def errors(p: Problem, want: Tensor, backend: str | None) -> tuple[float, float]:
    """Relative norms of the difference from dense fp64, with an fp32 output and with a bf16 one, on some rows."""
    exact, rounded = (apart(attend(p, t, backend)[some_rows(p)], want) for t in (torch.float32, torch.bfloat16))
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


def in_turns(calls: Sequence[Callable[[], Tensor]], budget: float) -> list[list[float]]:
    """Of each, the seconds of its calls."""
    for f in (*calls, *calls):
        f()
    taken: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + budget
    while time.perf_counter() < end or len(taken[0]) < 5:
        for f, times in zip(calls, taken, strict=True):
            times.append(seconds(f))
    return taken


def best_of(candidates: dict[str, Callable[[], Tensor]]) -> str:
    return min(candidates, key=lambda name: min(seconds(candidates[name]) for _ in range(5)))


def flops(shape: Shape) -> float:
    seen = shape.new * (shape.length - shape.new) + shape.new * (shape.new + 1) / 2
    return 4 * shape.q_heads * shape.head_dim * seen


def measure(shape: Shape, formats: Sequence[str], counts: Sequence[int], args: argparse.Namespace) -> list[dict]:
    """A row for each number of threads and format."""
    problems = {format: make(shape, format) for format in formats}
    wanted = {format: dense(p.q, p.k, p.v, some_rows(p)) for format, p in problems.items()}
    rows = []
    for threads in counts:
        torch.set_num_threads(threads)
        judged = {format: errors(p, wanted[format], args.backend) for format, p in problems.items()}
        wrong = {format: e for format, e in judged.items() if not (e[0] < TOLERANCE and e[1] < ROUNDED)}
        if wrong:
            sys.exit(f"not timed, since wrong: {wrong} (want < {TOLERANCE} and {ROUNDED})")
        candidates = peers(problems[formats[0]])
        best = best_of(candidates)
        heading(shape, best)
        for format, p in problems.items():
            row = {"shape": asdict(shape), "format": format, "peer": best, "error": judged[format][1]}
            row |= timed(p, shape, format, candidates[best], args)
            rows.append(row)
            show(row)
        mean = statistics.geometric_mean(r["ratio"] for r in rows[-len(formats) :])
        print(f"geometric mean of the ratios {mean:.2f}")
    return rows


def timed(p: Problem, shape: Shape, format: str, peer: Callable[[], Tensor], args: argparse.Namespace) -> dict:
    threads, second = torch.get_num_threads(), None
    if args.library and shape.name == "long" and format in GGML:
        second = args.library.attention(GGML[format], p.q[0], p.k, p.v, threads)
        error = apart(second.call()[None], dense(p.q, second.k, second.v, torch.tensor([0])))
        if not error < GGML_TOLERANCE:
            sys.exit(f"not timed, since wrong: llama.cpp's {second.type}, {error} (want < {GGML_TOLERANCE})")
    calls = [partial(attend, p, None, args.backend), peer, *([second.call] if second else [])]
    ours, theirs, *third = in_turns(calls, args.seconds)
    reads = read_rate()
    row = {
        "threads": threads, "samples": len(ours), "ms_median": 1e3 * statistics.median(ours), "ms_min": 1e3 * min(ours),
        "peer_ms_median": 1e3 * statistics.median(theirs), "peer_ms_min": 1e3 * min(theirs),
        "bytes": tersekv.kv_bytes_per_token(format, shape.heads, shape.head_dim) * shape.length,
        "flops": flops(shape), "read_gb_s": reads / 1e9,
    }  # fmt: skip
    row["ratio"] = row["ms_median"] / row["peer_ms_median"]
    row["ratio_of_mins"] = row["ms_min"] / row["peer_ms_min"]
    row["share_of_read_rate"] = 1e3 * row["bytes"] / row["ms_min"] / reads
    if second:
        times = third[0]
        row["llama_cpp"] = {"type": second.type, "bytes": second.bytes, "error": error,
                            "ms_median": 1e3 * statistics.median(times), "ms_min": 1e3 * min(times)}  # fmt: skip
    return row


def heading(shape: Shape, peer: str) -> None:
    new = f", {shape.new} of them new" if shape.new > 1 else ""
    print(f"\n{shape.name}: 1 x {shape.length}{new}, {shape.q_heads}/{shape.heads} heads, D {shape.head_dim}, "
          f"pages of {shape.page_size}; peer: {peer}; threads: {torch.get_num_threads()}")  # fmt: skip
    rate = "GFLOP/s" if shape.new > 1 else "GB/s"
    columns = ("ms median", "min", "peer", "min", "ratio", "of mins", rate, "read GB/s", "of read", "error")
    print(f"{'format':<22}" + "".join(f"{name:>10}" for name in columns))


def show(row: dict) -> None:
    numbers = [row[k] for k in ("ms_median", "ms_min", "peer_ms_median", "peer_ms_min", "ratio", "ratio_of_mins")]
    rate = row["flops" if row["shape"]["new"] > 1 else "bytes"] / row["ms_min"] / 1e6
    second = row.get("llama_cpp")
    told = f"  llama.cpp {second['type']} {second['ms_median']:.3f}, min {second['ms_min']:.3f}" if second else ""
    print(
        f"{row['format']:<22}"
        + "".join(f"{x:>10.3f}" for x in numbers)
        + f"{rate:>10.1f}{row['read_gb_s']:>10.1f}{row['share_of_read_rate']:>10.2f}{row['error']:>10.1e}{told}",
        flush=True,
    )


def scaling(rows: list[dict]) -> None:
    """How many times as fast each case is as with the first number of threads, by shortest times."""
    rows = [row for row in rows if row["shape"]["new"] == 1]
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


def doubling(most: int) -> list[int]:
    """1, 2, 4 … and `most`."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def machine() -> dict:
    native, cpu = library.load_compiled_library_or_reason(), Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    told = dict(reversed([[x.strip() for x in line.split(":", 1)] for line in lines if ":" in line]))
    return {
        "torch": torch.__version__, "machine": platform.machine(), "isa": torch.backends.cpu.get_cpu_capability(),
        "native": native if isinstance(native, str) else native.level(), "cores": len(os.sched_getaffinity(0)),
        "cpu": told.get("model name", platform.processor()), "amx": "amx_bf16" in told.get("flags", "").split(),
        "load": round(os.getloadavg()[0], 1),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])  # type: ignore[union-attr]
    parser.add_argument("--threads", help="numbers, comma-separated; default: 1, 2, 4 … and all cores")
    parser.add_argument("--seconds", type=float, default=0.6, help="timed seconds of a case")
    parser.add_argument("--formats", default=",".join(tersekv.KV_FORMATS))
    parser.add_argument("--only", default="decode,prefill")
    parser.add_argument("--quick", action="store_true", help="the small shapes only")
    parser.add_argument("--backend", help="default: the one that a call gets")
    parser.add_argument("--ggml", help="folder of llama.cpp's libraries; default: that of llama-cpp-python")
    parser.add_argument("--json", help="write the rows here, anew after each shape")
    args = parser.parse_args()
    args.library, about = ggml.found(args.ggml), machine()
    counts = [int(n) for n in args.threads.split(",")] if args.threads else doubling(about["cores"])
    print(about, "llama.cpp: " + ("beside" if args.library else "none, see benchmarks/ggml.py"))
    rows: list[dict] = []
    for what, shapes in (("decode", SHAPES), ("prefill", PROMPTS)):
        for shape in shapes if what in args.only.split(",") else ():
            if args.quick and shape.length > 1024:
                continue
            rows += measure(shape, args.formats.split(","), counts if what == "decode" else counts[-1:], args)
            if args.json:
                Path(args.json).write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    scaling(rows)


if __name__ == "__main__":
    main()
