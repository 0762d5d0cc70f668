"""Decode over caches dealt across GPUs against one GPU with the whole cache.

    torchrun --standalone --nproc-per-node=4 benchmarks/context_parallel.py [--quick] [--json PATH]

With one process it needs no torchrun. A line a case, and a JSON line as soon as it is measured. Every case is first
compared with a decode over the whole cache, at short lengths and then at its own, in the very CUDA graph that is timed;
what is wrong is not timed. Times are those of the slowest rank:

    one_gpu      the whole cache on one GPU
    step         the decode of one layer through the group; lengths are worked out once for all layers, outside
    attend       this rank's attention alone, without anything that the exchange needs
    wire         the collectives of a step alone, on buffers of the same sizes

`--device cpu` runs the same with gloo at small sizes; its times say nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import tersekv
from tersekv.layers import PagedKVLayer, PagedLatentLayer
from tersekv.ops.context_parallel import ContextParallel, exchange_cost
from tersekv.ops.exchange import Exchange

TOLERANCE = 4e-3
PAGE = 64
BEGIN = time.monotonic()


@dataclass(frozen=True)
class Shape:
    """One layer in fp8_e4m3. kv_heads 0: MLA with a latent of 512 + 64. q_heads: of all ranks."""

    name: str
    batch: int
    length: int
    q_heads: int
    kv_heads: int
    drafts: int = 1

    @property
    def head_dim(self) -> int:
        return 128 if self.kv_heads else 576

    @property
    def head_dim_v(self) -> int:
        return 128 if self.kv_heads else 512


@dataclass(frozen=True)
class Pattern:
    exchange: str
    wire: torch.dtype
    sharded_q: bool = True


SHAPES = (
    Shape("gqa 1 x 1M", 1, 1 << 20, 32, 8),
    Shape("gqa 16 x 128K", 16, 1 << 17, 32, 8),
    Shape("mla 1 x 1M", 1, 1 << 20, 128, 0),
    Shape("mla 16 x 128K", 16, 1 << 17, 128, 0),
)
PATTERNS = (
    Pattern("all_to_all", torch.float16),
    Pattern("all_to_all", torch.float32),
    Pattern("reduce_scatter", torch.float32),
    Pattern("all_to_all", torch.float16, sharded_q=False),
)


def say(*words: object) -> None:
    """From rank 0, with seconds since the start."""
    if os.environ.get("RANK", "0") == "0":
        print(f"[{time.monotonic() - BEGIN:6.1f}]", *words, flush=True)


def watch(seconds: float) -> None:
    """Every so often say where this rank is, on stderr.

    NOTE: faulthandler's timer reads the stack of a running thread without the GIL; on Python 3.12 that killed a rank
    in the middle of a compilation, for which the others then waited in a collective.
    """
    main_thread = threading.main_thread().ident

    def dump() -> None:
        while True:
            time.sleep(seconds)
            stack = traceback.format_stack(sys._current_frames()[main_thread])  # type: ignore[index]
            print(f"[{time.monotonic() - BEGIN:6.1f}] rank {os.environ.get('RANK', '0')} is at\n", *stack[-8:],
                  file=sys.stderr, flush=True)  # fmt: skip

    threading.Thread(target=dump, daemon=True).start()


class Problem:
    """The whole cache on every rank, and the rank's part of it.

    Page p of a pool over all ranks is page p of every rank's cache, and pages p * world … of the whole.
    """

    def __init__(self, shape: Shape, rank: int, world: int, device: torch.device) -> None:
        self.shape, self.rank, self.world = shape, rank, world
        generator = torch.Generator(device).manual_seed(0)
        pages = shape.batch * -(-shape.length // (PAGE * world))
        self.table = torch.randperm(pages, device=device, generator=generator).view(shape.batch, -1).to(torch.int32)
        inside = torch.arange(world, device=device, dtype=torch.int32)
        self.whole_table = (self.table[:, :, None] * world + inside).flatten(1)
        self.seq_lens = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
        rows = [(shape.kv_heads, 128)] * 2 if shape.kv_heads else [(512,), (64,)]
        whole = [codes((pages * world, PAGE, *row), device, generator) for row in rows]
        self.whole = self._layer(whole)
        self.layer = self._layer([x.unflatten(0, (pages, world))[:, rank].contiguous() for x in whole])
        size = (shape.batch * shape.drafts, shape.q_heads, shape.head_dim)
        self.q = torch.randn(size, device=device, generator=generator).bfloat16()
        self.options: dict = {} if shape.kv_heads else {"softmax_scale": 192**-0.5}

    def _layer(self, pair: list[Tensor]) -> PagedKVLayer | PagedLatentLayer:
        return (PagedKVLayer if self.shape.kv_heads else PagedLatentLayer).of(pair, format="fp8_e4m3")

    def decode_whole(self) -> Tensor:
        op = tersekv.decode if self.shape.kv_heads else tersekv.mla_decode
        out = op(self.q, self.whole, self.whole_table, self.seq_lens, **self.options)
        assert isinstance(out, Tensor)
        return out

    def drop_whole(self) -> None:
        del self.whole, self.whole_table


class Rank:
    """One pattern of exchange over a problem: what this rank runs in a step, and parts of it."""

    def __init__(self, p: Problem, pattern: Pattern) -> None:
        self.p, s = p, p.shape
        options = {**asdict(pattern), "interleave": PAGE}
        options["wire_dtype"] = options.pop("wire")
        share, rows = s.q_heads // p.world, s.batch * s.drafts
        self.mine = slice(p.rank * share, (p.rank + 1) * share)
        self.q = p.q[:, self.mine].contiguous() if pattern.sharded_q else p.q
        need = ContextParallel(**options).workspace_bytes(rows, self.q.shape[1], s.head_dim, s.head_dim_v)
        self.workspace = torch.zeros(need, dtype=torch.uint8, device=p.q.device)
        self.cp = ContextParallel(**options, workspace=self.workspace)
        self.out = torch.empty(rows, share, s.head_dim_v, device=p.q.device, dtype=torch.bfloat16)
        self.lens = self.cp.local_seq_lens(p.seq_lens)

    def set_length(self, length: int) -> None:
        """Once a step, for all layers."""
        self.p.seq_lens.fill_(length)
        self.lens.copy_(self.cp.local_seq_lens(self.p.seq_lens))

    def step(self) -> None:
        op = self.cp.decode if self.p.shape.kv_heads else self.cp.mla_decode
        p = self.p
        op(self.q, p.layer, p.table, p.seq_lens, out=self.out, local_seq_lens=self.lens, **p.options)

    def attend(self) -> None:
        op = tersekv.decode if self.p.shape.kv_heads else tersekv.mla_decode
        op(self.p.q, self.p.layer, self.p.table, self.lens, return_lse=True, **self.p.options)

    def wire(self) -> None:
        s, (rows, heads, _) = self.p.shape, self.q.shape
        self.cp.exchange.collectives(rows, heads, s.head_dim, s.head_dim_v, self.q.device)

    def error(self, want: Tensor) -> float:
        """Relative norm of `out` against one GPU, the largest of all ranks."""
        want = want[:, self.mine].double()
        error = (self.out.double() - want).norm() / want.norm()
        return largest(float(error.nan_to_num(nan=math.inf)), want.device)


def codes(shape: tuple[int, ...], device: torch.device, generator: torch.Generator) -> Tensor:
    """Random e4m3 below 2; many pages repeat after a million tokens, so that filling is quick."""
    pages = min(shape[0], 1 << 14)
    block = torch.randint(0, 256, (pages, *shape[1:]), dtype=torch.uint8, device=device, generator=generator) & 0xBF
    whole = torch.empty(shape, dtype=torch.uint8, device=device)
    for first in range(0, shape[0], pages):
        part = whole[first : first + pages]
        part.copy_(block[: len(part)])
    return whole.view(torch.float8_e4m3fn)


def largest(x: float, device: torch.device) -> float:
    """Of all ranks, which it also brings together."""
    t = torch.tensor([x], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return float(t)


def captured(f: Callable[[], object], device: torch.device, eager: bool) -> tuple[Callable[[], object], str]:
    """f as the replay of a CUDA graph, and how it is run: "graph", "eager", or why it could not be captured."""
    for _ in range(3):
        f()
    if device.type != "cuda" or eager:
        return f, "eager"
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # NCCL's watchdog thread looks at events meanwhile, which only a thread-local capture allows.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            f()
    except RuntimeError as e:
        torch.cuda.synchronize()
        return f, f"eager: {str(e).splitlines()[0]}"
    return graph.replay, "graph"


def microseconds(f: Callable[[], object], device: torch.device, seconds: float) -> float:
    """Mean time of a call on the slowest rank, the best of five rounds that take `seconds` together."""
    cuda, rounds, repeats = device.type == "cuda", [], 2
    for i in range(6):  # the first says how many calls make a round
        largest(0.0, device)  # start together
        start = time.perf_counter()
        for _ in range(repeats):
            f()
        if cuda:
            torch.cuda.synchronize()
        rounds.append(largest((time.perf_counter() - start) * 1e6 / repeats, device))
        if i == 0:
            repeats = max(2, min(1000, int(seconds / 5 / (rounds.pop() * 1e-6))))
    return min(rounds)


def measure(shape: Shape, rank: int, world: int, device: torch.device, args: argparse.Namespace) -> list[dict]:
    p = Problem(shape, rank, world, device)
    say(f"{shape.name}: {nbytes(p.whole) / 1e9:.2f} GB, {nbytes(p.layer) / 1e9:.2f} GB a rank")
    lengths = (shape.length // 50 + shape.drafts, shape.drafts, shape.length)
    alone, _ = captured(p.decode_whole, device, args.eager)
    one_gpu = microseconds(alone, device, args.seconds)
    wants = []
    for length in lengths:
        p.seq_lens.fill_(length)
        wants.append(p.decode_whole().clone())
    say(f"{shape.name}: one GPU {one_gpu:.1f} us")
    whole_bytes = nbytes(p.whole)
    p.drop_whole()
    results = []
    for pattern in PATTERNS:
        r = Rank(p, pattern)
        with r.cp.rehearsal():
            r.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        largest(0.0, device)  # every rank has compiled and loaded its kernels before anyone waits for a message
        step, how = captured(r.step, device, args.eager)
        say(f"{shape.name}: {pattern.exchange} {how}")
        errors = []
        for length, want in zip(lengths, wants, strict=True):
            r.set_length(length)
            r.out.fill_(math.nan)
            step()
            errors.append(r.error(want))
        results.append(asdict(shape) | describe(pattern, r) | {"how": how, "errors": errors})
        results[-1] |= {"cache_bytes": nbytes(p.layer), "cache_bytes_one_gpu": whole_bytes, "one_gpu_us": one_gpu}
        if max(errors) <= TOLERANCE:
            for name, f in (("attend", r.attend), ("wire", r.wire)):
                results[-1][f"{name}_us"] = microseconds(captured(f, device, args.eager)[0], device, args.seconds)
            results[-1]["step_us"] = microseconds(step, device, args.seconds)
        say(line(results[-1]))
        if rank == 0 and args.json:
            with args.json.open("a") as f:
                f.write(json.dumps(results[-1]) + "\n")
    return results


def nbytes(layer: PagedKVLayer | PagedLatentLayer) -> int:
    pair = (layer.k, layer.v) if isinstance(layer, PagedKVLayer) else (layer.ckv, layer.kpe)
    return sum(x.nbytes for x in pair)


def describe(pattern: Pattern, r: Rank) -> dict:
    s, wire = r.p.shape, pattern.wire
    cost = exchange_cost(
        pattern.exchange, r.p.world, s.batch * s.drafts, s.q_heads, s.head_dim, s.head_dim_v,
        wire_bytes=wire.itemsize, sharded_q=pattern.sharded_q,
    )  # fmt: skip
    device = torch.cuda.get_device_name() if r.out.is_cuda else "cpu"
    return {
        "exchange": pattern.exchange, "wire": str(wire).removeprefix("torch."), "sharded_q": pattern.sharded_q,
        "world": r.p.world, "bytes_sent": cost.bytes_sent, "collectives": cost.collectives,
        "workspace_bytes": len(r.workspace), "device": device, "torch": torch.__version__,
    }  # fmt: skip


def line(r: dict) -> str:
    q = "sharded" if r["sharded_q"] else "whole"
    head = f"x{r['world']} {r['name']:14} {r['exchange']:14} {r['wire']:8} q {q:8}"
    if "step_us" not in r:
        return f"{head}  WRONG: not timed  errors {r['errors']}"
    step, attend, alone = r["step_us"], r["attend_us"], r["one_gpu_us"]
    return (
        f"{head}  step {step:8.1f} us  attend {attend:8.1f}  exchange {step - attend:6.1f} ({1 - attend / step:5.1%})"
        f"  wire {r['wire_us']:6.1f}  one GPU {alone:8.1f}  ratio {alone / step:5.2f}  error {max(r['errors']):.1e}"
    )


def connect(device: torch.device) -> tuple[int, int]:
    """Rank and number of ranks. Every kind of collective runs once, so that no capture finds one unconnected."""
    if "RANK" not in os.environ:
        return 0, 1
    cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(seconds=60), device_id=device if cuda else None
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    say("process group: ready")
    largest(0.0, device)
    say("all_reduce: ready")
    for exchange in ("all_to_all", "reduce_scatter"):
        Exchange(None, rank, world, exchange, True, torch.float32, None).collectives(1, 2, 16, 16, device)
        largest(0.0, device)
        say(f"collectives of {exchange}: ready")
    return rank, world


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--shapes", default="", help="only those whose name begins so, such as mla")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file to which a line a case is added")
    parser.add_argument("--seconds", type=float, default=0.2, help="for each time that is taken")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds after which no shape is begun")
    parser.add_argument("--dump", type=float, default=60, help="seconds after which a rank says where it is")
    args = parser.parse_args()
    watch(args.dump)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    say(f"torch {torch.__version__} on {device}")
    rank, world = connect(device)
    shapes = [s for s in SHAPES if s.name.startswith(args.shapes)]
    if not shapes:
        parser.error(f"--shapes: want the beginning of one of {[s.name for s in SHAPES]}, got {args.shapes!r}")
    if args.quick or args.device == "cpu":
        shapes = [replace(s, length=min(s.length, 700), batch=min(s.batch, 2)) for s in shapes]
    results, left_out = [], []
    for shape in shapes:
        if largest(time.monotonic() - BEGIN, device) > args.limit:
            left_out.append(shape.name)
        else:
            results += measure(shape, rank, world, device, args)
    ratios = [r["one_gpu_us"] / r["step_us"] for r in results if "step_us" in r]
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        say(f"geometric mean of {len(ratios)} ratios to one GPU: {mean:.2f}; left out for time: {left_out or 'none'}")
    if dist.is_initialized():
        dist.destroy_process_group()
    if len(ratios) < len(results):
        sys.exit("a case is wrong")


if __name__ == "__main__":
    main()
