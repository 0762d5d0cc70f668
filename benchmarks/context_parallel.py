"""Decode over caches dealt across GPUs against one GPU with the whole cache.

    torchrun --standalone --nproc-per-node=4 benchmarks/context_parallel.py [--quick] [--json PATH]

With one process it needs no torchrun. Every case is first compared with a decode over the whole cache, eagerly and in
a CUDA graph whose lengths change between replays; nothing is timed if one is wrong. Times are those of the slowest
rank, in a graph: `step` the whole decode of one layer, `attend` this rank's attention alone, `exchange` the difference,
`one GPU` the whole cache on one GPU. On a CPU, with gloo, the sizes are small and nothing is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

import tersekv
from tersekv.ops.context_parallel import ContextParallel, exchange_cost, shard_seq_lens, shard_slot_mapping

TOLERANCE = 3e-3
EXCHANGES = (("all_to_all", torch.float32), ("all_to_all", torch.float16), ("reduce_scatter", torch.float32))


@dataclass(frozen=True)
class Shape:
    """kv_heads 0: MLA with a latent of 512 + 64. q_heads: of all ranks."""

    name: str
    format: str
    batch: int
    length: int
    q_heads: int
    kv_heads: int
    page_size: int = 64
    drafts: int = 1

    @property
    def head_dim(self) -> int:
        return 128 if self.kv_heads else 576

    @property
    def head_dim_v(self) -> int:
        return 128 if self.kv_heads else 512


SHAPES = (
    Shape("mla 1 x 512K", "fp8_e4m3", 1, 1 << 19, 128, 0),
    Shape("mla 8 x 128K", "fp8_e4m3", 8, 1 << 17, 128, 0),
    Shape("mla 32 x 8K", "fp8_e4m3", 32, 1 << 13, 128, 0),
    Shape("gqa 1 x 512K", "fp8_e4m3", 1, 1 << 19, 32, 4),
    Shape("gqa 8 x 128K", "fp8_e4m3", 8, 1 << 17, 32, 4),
    Shape("gqa 8 x 128K, 4 drafts", "fp8_e4m3", 8, 1 << 17, 32, 4, drafts=4),
)


class Problem:
    """The whole cache on every rank, and the rank's part of it."""

    def __init__(self, shape: Shape, cp: ContextParallel, device: torch.device) -> None:
        self.shape, self.cp, self.device = shape, cp, device
        generator = torch.Generator(device).manual_seed(0)
        size = shape.page_size * cp.world  # tokens of a page over all ranks
        per_request = -(-shape.length // size)
        pages = shape.batch * per_request
        self.table = torch.randperm(pages, device=device, generator=generator).view(shape.batch, -1).to(torch.int32)
        self.seq_lens = torch.full((shape.batch,), shape.length, dtype=torch.int32, device=device)
        self.whole, self.layer = self._cache(pages, size), self._cache(pages, shape.page_size)
        slots = torch.arange(pages * size, device=device)
        local = shard_slot_mapping(slots, cp.rank, cp.world, shape.page_size, shape.page_size)
        source = (local >= 0).nonzero()[:, 0]
        for whole, part in zip(self._codes(self.whole), self._codes(self.layer), strict=True):
            for page in range(pages):  # by page: fp32 numbers of all at once may not fit
                values = torch.randn(whole[page].shape, device=device, generator=generator)
                whole[page].copy_(values.to(whole.dtype))
            rows, mine = (x.flatten(0, 1).view(torch.uint8) for x in (whole, part))
            for piece in source.split(1 << 20):
                mine[local[piece]] = rows[piece]
        rows = shape.batch * shape.drafts
        self.q = torch.randn(rows, shape.q_heads, shape.head_dim, device=device, generator=generator).bfloat16()
        share = shape.q_heads // cp.world
        self.mine = slice(cp.rank * share, (cp.rank + 1) * share)
        self.my_q = self.q[:, self.mine].contiguous()
        self.out = torch.empty(rows, share, shape.head_dim_v, device=device, dtype=torch.bfloat16)
        self.options: dict = {} if shape.kv_heads else {"softmax_scale": 192**-0.5}

    def _cache(self, pages: int, size: int):
        s = self.shape
        if s.kv_heads:
            return tersekv.PagedKVCache.allocate(
                1, pages, size, s.kv_heads, s.head_dim, format=s.format, device=self.device
            )[0]
        return tersekv.PagedLatentCache.allocate(1, pages, size, format=s.format, split=True, device=self.device)[0]

    def _codes(self, layer) -> tuple[Tensor, Tensor]:
        return (layer.k, layer.v) if self.shape.kv_heads else (layer.ckv, layer.kpe)

    def step(self) -> None:
        """This rank's heads, through the group."""
        op = self.cp.decode if self.shape.kv_heads else self.cp.mla_decode
        op(self.my_q, self.layer, self.table, self.seq_lens, out=self.out, **self.options)

    def attend(self) -> None:
        """This rank's attention alone: all heads, its own tokens."""
        op = tersekv.decode if self.shape.kv_heads else tersekv.mla_decode
        lens = shard_seq_lens(self.seq_lens, self.cp.rank, self.cp.world, self.shape.page_size)
        op(self.q, self.layer, self.table, lens, return_lse=True, **self.options)

    def one_gpu(self, out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
        op = tersekv.decode if self.shape.kv_heads else tersekv.mla_decode
        out = op(self.q, self.whole, self.table, self.seq_lens, out_dtype=out_dtype, **self.options)
        assert isinstance(out, Tensor)
        return out

    def error(self) -> float:
        """Relative norm of `out` against one GPU, the largest of all ranks."""
        want = self.one_gpu(torch.float32)[:, self.mine].double()
        error = (self.out.double() - want).norm() / want.norm()
        return largest(float(error.nan_to_num(nan=math.inf)), self.device)


def largest(x: float, device: torch.device) -> float:
    t = torch.tensor([x], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return float(t)


def captured(f: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """f as the replay of a CUDA graph; on a CPU f itself."""
    for _ in range(3):
        f()
    if device.type != "cuda":
        return f
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog thread looks at events meanwhile, which only a thread-local capture allows.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        f()
    return graph.replay


def microseconds(f: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Mean time of a call on the slowest rank, the best of five rounds."""
    if device.type != "cuda":
        return math.nan
    rounds = []
    for _ in range(5):
        largest(0.0, device)  # start together
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(repeats):
            f()
        stop.record()
        torch.cuda.synchronize()
        rounds.append(largest(start.elapsed_time(stop) * 1e3 / repeats, device))
    return min(rounds)


def measure(shape: Shape, how: str, wire: torch.dtype, device: torch.device, repeats: int) -> dict:
    options = {"interleave": shape.page_size, "exchange": how, "wire_dtype": wire}
    cp = ContextParallel(**options)
    rows, share = shape.batch * shape.drafts, shape.q_heads // cp.world
    need = cp.workspace_bytes(rows, share, shape.head_dim, shape.head_dim_v)
    cp = ContextParallel(**options, workspace=torch.empty(need, dtype=torch.uint8, device=device))
    p = Problem(shape, cp, device)
    p.step()
    errors = [p.error()]
    step = captured(p.step, device)
    for length in (shape.length // 3 + shape.drafts, shape.drafts, shape.length):
        p.seq_lens.fill_(length)
        p.out.fill_(math.nan)
        step()
        errors.append(p.error())
    cost = exchange_cost(how, cp.world, rows, shape.q_heads, shape.head_dim, shape.head_dim_v, wire_bytes=wire.itemsize)
    result = {**asdict(shape), "exchange": how, "wire": str(wire).removeprefix("torch."), "world": cp.world}
    result |= {"error": max(errors), "bytes_sent": cost.bytes_sent}
    if max(errors) > TOLERANCE:
        return result
    calls = {"step": step, "attend": captured(p.attend, device), "one_gpu": captured(p.one_gpu, device)}
    return result | {f"{n}_us": microseconds(f, device, repeats) for n, f in calls.items()}


def line(r: dict) -> str:
    head = f"{r['name']:24} {r['exchange']:14} {r['wire']:8} x{r['world']}  error {r['error']:.1e}"
    if "step_us" not in r:
        return f"{head}  WRONG: not timed"
    step, attend, alone = r["step_us"], r["attend_us"], r["one_gpu_us"]
    return (
        f"{head}  step {step:8.1f} us  attend {attend:8.1f}  exchange {step - attend:6.1f}"
        f"  sent {r['bytes_sent'] / 1e6:6.2f} MB  one GPU {alone:8.1f}  ratio {alone / step:5.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=50)
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    first = not dist.is_initialized() or dist.get_rank() == 0
    small = args.quick or device.type == "cpu"
    shapes = [replace(s, length=min(s.length, 700), batch=min(s.batch, 2)) for s in SHAPES] if small else SHAPES
    results = []
    for shape in shapes:
        for how, wire in EXCHANGES:
            results.append(measure(shape, how, wire, device, args.repeats))
            if first:
                print(line(results[-1]), flush=True)
    ratios = [r["one_gpu_us"] / r["step_us"] for r in results if "step_us" in r]
    if first and ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(f"geometric mean of {len(ratios)} ratios to one GPU: {mean:.2f}")
    if first and args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()
    if any("step_us" not in r for r in results):
        raise SystemExit("a case is wrong")


if __name__ == "__main__":
    main()
