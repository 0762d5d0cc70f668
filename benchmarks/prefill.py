"""Prefill over a paged K/V cache, beside PyTorch's SDPA and FlashInfer's paged prefill: TFLOP/s of the causal half.

    python benchmarks/prefill.py [--formats bf16 fp8_e4m3] [--cells whole "long prefix"] [--query fp8_e4m3]
        [--page 64] [--new-rows] [--fast] [--backend triton] [--decode] [--peers none] [--small] [--json PATH]

Every case is judged by dense fp64 attention of some rows before it is timed, and nothing is timed that is wrong. Times
are medians of CUDA graphs (`tersekv.testing.bench.measure`); on a CPU, where `--small` cells make sense, by the wall.
Peers run in the same process: SDPA over a contiguous bf16 copy where one request is a whole prompt, FlashInfer's
wrapper over pages, fa2 and fa3, bf16 cells always and fp8 ones where it takes them. `--decode` times `tersekv.decode`
with as many rows too. FLOP: 4 x D x heads of every key that a row sees.
`--json` adds to what the file holds; a case that it has already is replaced. An interrupt keeps what was found.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tersekv
from tersekv.formats import FP8, kv_format
from tersekv.testing.bench import data, engine, measure

Q_HEADS, HEADS, DIM = 32, 8, 128
FORMATS = ("bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")
EXACT, FAST, PEER = 3e-3, 3e-2, 5e-2  # relative norms: ours, ours with precision="fast", and others that are timed
WORKSPACE = 512 << 20


@dataclass(frozen=True)
class Cell:
    """new: new tokens of each request; total: all its tokens."""

    name: str
    new: tuple[int, ...]
    total: tuple[int, ...]
    window: int = 0

    @property
    def flops(self) -> int:
        """Of the causal half, or of what the window leaves of it."""
        seen = 0
        for new, total in zip(self.new, self.total, strict=True):
            for position in range(total - new, total):
                seen += min(position + 1, self.window) if self.window else position + 1
        return 4 * Q_HEADS * DIM * seen


CELLS = (
    Cell("whole", (8192,), (8192,)),
    Cell("four chunks", (2048,) * 4, (8192,) * 4),
    Cell("sixteen chunks", (512,) * 16, (16384,) * 16),
    Cell("long prefix", (512,), (131072,)),
    Cell("short prompts", (1024,) * 16, (1024,) * 16),
    Cell("uneven", (37, 4096, 1, 700, 2048, 5, 1300), (9000, 4096, 3000, 700, 30000, 64, 1300)),
    Cell("window 1024", (8192,), (8192,), 1024),
    Cell("mixed", (2048, *(1,) * 63), (8192, *(4096,) * 63)),
)
SMALL = (Cell("whole", (300,), (300,)), Cell("uneven", (37, 1, 100), (200, 90, 100)), Cell("window", (80,), (300,), 33))


@dataclass(frozen=True)
class Options:
    format: str
    page: int
    query: str
    new_rows: bool
    fast: bool
    backend: str | None


class Problem:
    """A cell on a device: a filled cache, random pages, queries, and what came of them."""

    def __init__(self, cell: Cell, o: Options, device: torch.device) -> None:
        self.cell, self.options, self.device = cell, o, device
        self.format, self.scale = kv_format(o.format), DIM**-0.5
        used = torch.tensor([-(-n // o.page) for n in cell.total])
        self.layer = layer = tersekv.PagedKVCache.allocate(
            1, int(used.sum()), o.page, HEADS, DIM, format=o.format, device=device
        )[0]
        data.fill(layer.k, layer.k_scale_cache, self.format)
        data.fill(layer.v, layer.v_scale_cache, self.format)
        self.table = data.page_tables(used, 1, device)[0]
        self.lens = torch.tensor(cell.total, dtype=torch.int32, device=device)
        starts = [0]
        for n in cell.new:
            starts.append(starts[-1] + n)
        self.starts, self.cu = starts, torch.tensor(starts, dtype=torch.int32, device=device)
        rows = starts[-1]
        self.q = torch.randn(rows, Q_HEADS, DIM, device=device).to(kv_format(o.query).storage)
        self.out = torch.empty(rows, Q_HEADS, DIM, dtype=torch.bfloat16, device=device)
        self.k = self.v = None
        if o.new_rows:
            self.k, self.v = (torch.randn(rows, HEADS, DIM, device=device).bfloat16() for _ in range(2))
        self.limit = FAST if o.fast else EXACT

    def ours(self) -> Callable[[], Any]:
        o = self.options
        return lambda: tersekv.prefill(
            self.q, self.layer, self.table, self.lens, self.cu, k=self.k, v=self.v, max_q_len=max(self.cell.new),
            window=self.cell.window or None, out=self.out, precision="fast" if o.fast else "exact", backend=o.backend,
        )  # fmt: skip

    def decode(self) -> Callable[[], Any]:
        return lambda: tersekv.decode(
            self.q, self.layer, self.table, self.lens, cu_seqlens_q=self.cu, max_q_len=max(self.cell.new),
            window=self.cell.window or None, out=self.out, precision="fast" if self.options.fast else "exact",
            backend=self.options.backend,
        )  # fmt: skip

    def kv(self, b: int) -> tuple[Tensor, Tensor]:
        """fp64 rows [n, H, D] that request b attends to."""
        a, n = self.layer, self.cell.total[b]
        where = data.places(self.table[b], n, self.options.page)
        k, v = (data.values(x, s, self.format, where) for x, s in ((a.k, a.k_scale_cache), (a.v, a.v_scale_cache)))
        if self.k is not None and self.v is not None:
            rows = slice(self.starts[b], self.starts[b + 1])
            k[n - self.cell.new[b] :], v[n - self.cell.new[b] :] = self.k[rows].double(), self.v[rows].double()
        return k, v

    def error(self) -> float:
        """Relative norm of the worst of some rows: the first, the last and some between, of some requests."""
        worst, last = 0.0, len(self.cell.new) - 1
        for b in {0, last // 2, last}:
            k, v = self.kv(b)
            new, first = self.cell.new[b], self.cell.total[b] - self.cell.new[b]
            for i in {0, new // 3, new - 2 if new > 1 else 0, new - 1}:
                stop = first + i + 1
                start = max(stop - self.cell.window, 0) if self.cell.window else 0
                row = self.starts[b] + i
                want = data.attend(self.q[row].float(), k[start:stop], v[start:stop], self.scale)
                worst = max(worst, data.relative(self.out[row], want))
        return worst

    def run(self, call: Callable[[], Any], limit: float) -> dict[str, Any]:
        """Judge a call that writes `out` or returns it, then time it."""
        data.poison(self.out)
        result = call()
        if isinstance(result, Tensor):
            self.out.copy_(result.reshape(self.out.shape))
        error = self.error()
        if not error <= limit:
            return {"error": error, "reason": f"want error <= {limit:g} before anything is timed"}
        us = measure.device_us([call], self.device)
        return {"us": us, "tflops": self.cell.flops / us / 1e6, "error": error}


def sdpa(p: Problem) -> Callable[[], Any] | None:
    """Over contiguous bf16 copies: one request, all of whose rows are new."""
    if len(p.cell.new) != 1 or p.cell.new != p.cell.total or p.cell.window:
        return None
    q = p.q.to(torch.bfloat16).transpose(0, 1)[None].contiguous()
    k, v = (
        x.to(torch.bfloat16).transpose(0, 1).repeat_interleave(Q_HEADS // HEADS, 0)[None].contiguous() for x in p.kv(0)
    )

    def call() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=p.scale)

    def judged() -> Tensor:
        return call().transpose(1, 2)[0]

    judged.timed = call  # type: ignore[attr-defined]
    return judged


def flashinfer(p: Problem, backend: str) -> Callable[[], Any]:
    wrapper = importlib.import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
    w = wrapper(torch.zeros(WORKSPACE, dtype=torch.uint8, device=p.device), "NHD", backend=backend)
    used = torch.tensor([-(-n // p.options.page) for n in p.cell.total])
    indptr = F.pad(used.cumsum(0), (1, 0)).to(torch.int32)
    live = torch.arange(p.table.shape[1]) < used[:, None]
    last = torch.tensor([(n - 1) % p.options.page + 1 for n in p.cell.total], dtype=torch.int32)
    w.plan(
        p.cu, indptr.to(p.device), p.table[live.to(p.device)], last.to(p.device), Q_HEADS, HEADS, DIM, p.options.page,
        causal=True, window_left=p.cell.window - 1 if p.cell.window else -1, sm_scale=p.scale, q_data_type=p.q.dtype,
        kv_data_type=p.layer.k.dtype, o_data_type=torch.bfloat16,
    )  # fmt: skip
    return lambda: w.run(p.q, (p.layer.k, p.layer.v), out=p.out)


def rivals(p: Problem, names: list[str]) -> Iterator[tuple[str, Callable[[], Any]]]:
    if "sdpa" in names and p.options.format == "bf16" and (call := sdpa(p)) is not None:
        yield "sdpa", call
    if "flashinfer" in names and p.options.format in ("bf16", "fp8_e4m3") and p.k is None:
        for backend in ("fa2", "fa3"):
            yield f"flashinfer {backend}", lambda backend=backend: flashinfer(p, backend)  # type: ignore[misc]


def case(cell: Cell, o: Options, device: torch.device, peers: list[str], decode: bool) -> dict[str, Any]:
    """All that is known of a cell in a format. An error is told, and the other cases are to run."""
    record: dict[str, Any] = {"cell": asdict(cell), **asdict(o)}
    try:
        p = Problem(cell, o, device)
        record |= p.run(p.ours(), p.limit)
        if decode and p.k is None:
            record["decode"] = p.run(p.decode(), p.limit)
        record["peers"] = {}
        for name, build in rivals(p, peers):
            try:
                if name == "sdpa":
                    found = p.run(build, PEER)
                    found["us"] = measure.device_us([build.timed], device)  # type: ignore[attr-defined]
                    found["tflops"] = cell.flops / found["us"] / 1e6
                else:
                    found = p.run(build(), PEER)
                record["peers"][name] = found
            except Exception as e:  # of whatever kind: another library's
                record["peers"][name] = {"reason": engine.told(e)}
    except Exception as e:
        record["reason"] = engine.told(e)
    p = None  # type: ignore[assignment]
    engine.release(device)
    return record


def line(r: dict[str, Any]) -> str:
    def told(x: dict[str, Any]) -> str:
        if "us" not in x:
            return f"{x.get('reason', '')} {x.get('error', '')}".strip()
        return f"{x['us']:9.1f} us {x['tflops']:6.1f} TFLOP/s  error {x['error']:.1e}"

    parts = [f"{r['cell']['name']:<15} {r['format']:<19} q {r['query']:<9} {told(r)}"]
    others = {**({"decode": r["decode"]} if "decode" in r else {}), **r.get("peers", {})}
    for name, x in others.items():
        ratio = f"{x['us'] / r['us']:.2f}x " if "us" in x and "us" in r else ""
        parts.append(f"    {ratio}{name}: {told(x)}")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(FORMATS))
    parser.add_argument("--cells", nargs="+", help="names of cells; default: all")
    parser.add_argument("--page", type=int, default=64)
    parser.add_argument("--query", default="bf16", choices=("bf16", "fp16", "fp8_e4m3"))
    parser.add_argument("--new-rows", action="store_true", help="the new tokens' k and v are given in 16 bits")
    parser.add_argument("--fast", action="store_true", help='precision="fast"')
    parser.add_argument("--backend")
    parser.add_argument("--decode", action="store_true", help="time tersekv.decode with as many rows too")
    parser.add_argument("--peers", nargs="+", default=["sdpa", "flashinfer"], choices=("sdpa", "flashinfer", "none"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small cells, for a CPU")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    device = torch.device(args.device)
    peers = [n for n in args.peers if n != "none" and (n == "sdpa" or importlib.util.find_spec(n) is not None)]
    records = []
    try:
        for cell, name in itertools.product(SMALL if args.small else CELLS, args.formats):
            if args.cells and cell.name not in args.cells:
                continue
            if args.query in {f.name for f in tersekv.KV_FORMATS.values() if f.storage in FP8} and name == "bf16":
                continue  # an 8-bit query is for 8-bit keys
            o = Options(name, args.page, args.query, args.new_rows, args.fast, args.backend)
            records.append(case(cell, o, device, peers, args.decode))
            print(line(records[-1]), flush=True)
    finally:
        if args.json:
            keep(Path(args.json), records, device)
    return int(any("us" not in r for r in records))


def keep(path: Path, records: list[dict[str, Any]], device: torch.device) -> None:
    """Add them to the cases of a file, in place of those of the same cell and options."""
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    about = {"device": where, "torch": torch.__version__, "tersekv": tersekv.__version__}
    names = [f.name for f in fields(Options)]
    cases = {(r["cell"]["name"], *(r[n] for n in names)): r for r in [*stored(path), *json.loads(json.dumps(records))]}
    path.write_text(json.dumps({**about, "cases": list(cases.values())}, indent=1) + "\n")


def stored(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["cases"] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())
