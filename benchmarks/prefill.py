"""Prefill over a paged K/V cache, beside PyTorch's SDPA and FlashInfer's paged prefill: TFLOP/s of the causal half.

    python benchmarks/prefill.py [--formats bf16 fp8_e4m3] [--cells whole "long prefix"] [--query fp8_e4m3]
        [--page 64] [--new-rows] [--fast] [--backend triton] [--decode] [--peers none] [--small] [--json PATH]

Every case is judged by dense fp64 attention of some rows before it is timed, and nothing is timed that is wrong. Times
are medians of CUDA graphs (`tersekv.testing.bench.measure`); on a CPU, where `--small` cells make sense, by the wall.
Peers run in the same process: SDPA over a contiguous bf16 copy of whole prompts of equal lengths, FlashInfer's wrapper
over pages, fa2 and fa3, bf16 cells always and fp8 ones where it takes them, and where the query has the cache's type
TensorRT-LLM's fmha_v2, which FlashInfer compiles. `tersekv bench --random N --ops prefill` draws other sizes of heads,
pairs of formats and prompts through the same code. `--decode` times `tersekv.decode` with as many rows too. FLOP: 4 x D
x heads of every key that a row sees.
`--json` adds to what the file holds; a case that it has already is replaced. An interrupt keeps what was found.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

import tersekv
from tersekv.formats import FP8
from tersekv.testing.bench import engine, peers
from tersekv.testing.bench.cases import DECODE_FORMATS
from tersekv.testing.bench.data import Rival
from tersekv.testing.bench.prefill import Prefill, PrefillShape, Prompts

DECODE = "decode"

CELLS = (
    Prompts("whole", (8192,), (8192,)),
    Prompts("four chunks", (2048,) * 4, (8192,) * 4),
    Prompts("sixteen chunks", (512,) * 16, (16384,) * 16),
    Prompts("long prefix", (512,), (131072,)),
    Prompts("short prompts", (1024,) * 16, (1024,) * 16),
    Prompts("eight prompts", (1024,) * 8, (1024,) * 8),
    Prompts("one prompt", (1024,), (1024,)),
    Prompts("two prompts", (2048,) * 2, (2048,) * 2),
    Prompts("512 each", (512,) * 16, (512,) * 16),
    Prompts("128 each", (128,) * 64, (128,) * 64),
    Prompts("chat", (37, 900, 1500, 200, 700, 2300, 64, 1100), (37, 900, 1500, 200, 700, 2300, 64, 1100)),
    Prompts("uneven", (37, 4096, 1, 700, 2048, 5, 1300), (9000, 4096, 3000, 700, 30000, 64, 1300)),
    Prompts("window 1024", (8192,), (8192,), 1024),
    Prompts("mixed", (2048, *(1,) * 63), (8192, *(4096,) * 63)),
)
SMALL = (
    Prompts("whole", (300,), (300,)),
    Prompts("uneven", (37, 1, 100), (200, 90, 100)),
    Prompts("window", (80,), (300,), 33),
)


@dataclass(frozen=True)
class Options:
    format: str
    page: int
    query: str
    new_rows: bool
    fast: bool
    backend: str | None


class Decode:
    """`tersekv.decode` of the same rows, as a peer."""

    any_format = False

    def __init__(self, backend: str | None) -> None:
        self.backend = backend

    def missing(self) -> str | None:
        return None

    def peers(self, p: Prefill) -> Iterator[Rival]:
        if p.k is None:
            yield Rival(DECODE, lambda: [self.call(p)], limit=p.limit)

    def call(self, p: Prefill) -> Callable[[], Any]:
        return lambda: tersekv.decode(
            p.q, p.layer, p.tables[0], p.lens, cu_seqlens_q=p.cu, max_q_len=max(p.prompts.new),
            window=p.prompts.window or None, out=p.out, precision=p.case.precision, backend=self.backend,
        )  # fmt: skip


def shape(cell: Prompts, o: Options) -> PrefillShape:
    precision = "fast" if o.fast else "exact"
    return PrefillShape.of(cell, o.format, page=o.page, query=o.query, precision=precision, new_rows=o.new_rows)


def case(cell: Prompts, o: Options, device: torch.device, libraries: list[str]) -> dict[str, Any]:
    """All that is known of a cell in a format. SDPA stands beside the bf16 cache alone: it is the same whatever the
    cache holds."""
    beside = [name for name in libraries if name != "sdpa" or o.format == "bf16"]
    r = engine.run(shape(cell, o), device, beside, o.backend)
    others = {p.name.removesuffix(" on bf16"): told(p, r.flops) for p in r.peers}
    decode = {DECODE: others.pop(DECODE)} if DECODE in others else {}
    return {"cell": asdict(cell), **asdict(o), **told(r, r.flops), **decode, "peers": others}


def told(x: engine.Result | engine.Peer, flops: int) -> dict[str, Any]:
    """Time, rate and error, or why there is none."""
    found: dict[str, Any] = {} if x.us is None else {"us": x.us, "tflops": flops / x.us / 1e6}
    found |= {} if x.error is None else {"error": x.error}
    return found | ({"reason": x.reason} if x.reason else {})


def line(r: dict[str, Any]) -> str:
    def spelt(x: dict[str, Any]) -> str:
        if "us" not in x:
            return f"{x.get('reason', '')} {x.get('error', '')}".strip()
        return f"{x['us']:9.1f} us {x['tflops']:6.1f} TFLOP/s  error {x['error']:.1e}"

    parts = [f"{r['cell']['name']:<15} {r['format']:<19} q {r['query']:<9} {spelt(r)}"]
    others = {**({DECODE: r[DECODE]} if DECODE in r else {}), **r["peers"]}
    for name, x in others.items():
        ratio = f"{x['us'] / r['us']:.2f}x as fast as " if "us" in x and "us" in r else ""
        parts.append(f"    {ratio}{name}: {spelt(x)}")
    return "\n".join(parts)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=list(DECODE_FORMATS))
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
    peers.LIBRARIES[DECODE] = Decode(args.backend)
    libraries = [n for n in args.peers if n != "none" and peers.LIBRARIES[n].missing() is None]
    libraries = [*[DECODE] * args.decode, *libraries]
    records = []
    try:
        for cell, name in itertools.product(SMALL if args.small else CELLS, args.formats):
            if args.cells and cell.name not in args.cells:
                continue
            if args.query in {f.name for f in tersekv.KV_FORMATS.values() if f.storage in FP8} and name == "bf16":
                continue  # an 8-bit query is for 8-bit keys
            o = Options(name, args.page, args.query, args.new_rows, args.fast, args.backend)
            records.append(case(cell, o, device, libraries))
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
