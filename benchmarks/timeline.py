"""When each CTA of decode's kernels on Hopper starts, waits, copies, multiplies and ends: by the GPU's own clock.

    python benchmarks/timeline.py [--cells 0,3] [--json FILE] [--picture FILE]

The kernels are as they are: only in the processes that this starts, functions that they call are replaced by ones that
also store %globaltimer, before or after. Each cell is checked, then replayed in a CUDA graph of calls over rotating
memory, and the stamps of a replay's last call are read; times count from the moment at which the first CTA has waited
for the kernel before. Beside it the time of a call without stamps.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import importlib.util
import inspect
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from svg import Picture

REPLAYS = 20
FP8, PAIR, INT4 = "fp8_e4m3", "fp8_e4m3/int4_per_token_head", "int4_per_token_head"
# (format, requests, tokens, query heads over 8 KV heads, page, uneven: lengths uniform in [1, 2 × tokens])
CELLS = (
    (PAIR, 19, 485, 64, 64, False),
    (INT4, 40, 150, 32, 64, True),
    (FP8, 243, 218, 64, 16, True),
    (FP8, 26, 1267, 32, 64, False),
    (PAIR, 170, 75, 32, 64, True),
    ("fp8_per_token_head", 52, 387, 32, 64, False),
    ("nvfp4", 129, 74, 32, 64, True),
    ("int8_per_token_head", 115, 808, 32, 64, True),
)
# A CTA's stamps, 8 bytes each: those of FIRST keep the least time, others the largest; the last one is its SM.
EVENTS = (
    "launch", "waited", "scheduled", "first copy", "first bytes", "first product", "last product", "stored",
    "combine begun", "combine ended", "sm",
)  # fmt: skip
FIRST = {"waited", "scheduled", "first copy", "first bytes", "first product", "combine begun"}
MAX_CTAS, CTA_BYTES = 1 << 16, 128
# Function → (stamp before, stamp after, value of which the latter waits), by module and language of the kernels.
SPLIT_PASS = {
    "split_metadata_ptr": ("launch", "", ""),
    "pdl_wait": ("", "waited", ""),
    "mainloop_step": ("first bytes", "first product", "result.row_sum"),
    "mainloop_step_lazy_rescale": ("first bytes", "first product", "result.row_sum"),
    "sum_over_lanes_of_equal_row_max": ("", "last product", "result.row_sum"),
    "store_unsplit_output_and_lse": ("", "stored", ""),
    "store_partial_acc_max_and_sum": ("", "stored", ""),
    "arrive_and_combine_in_levels_if_last": ("", "combine ended", ""),
}
SCHEDULED, COPIED = ("", "scheduled", ""), ("", "first copy", "")
THREADS = {"launch": 1024, "first copy": 32}  # whose first one stamps; else of each four warps
PROBES = (
    (
        "kernel", "gluon",
        {**SPLIT_PASS, "assign_equal_cta_range": SCHEDULED, "start_kv_block_copies_at_position": COPIED},
    ),
    (
        "kernel_producer_warp", "gluon",
        {**SPLIT_PASS, "assign_rounded_cta_range": SCHEDULED, "start_code_tile_copy": COPIED},
    ),
    ("combine", "gluon", {"load_and_combine_partials": ("combine begun", "", "")}),
    (
        "combine", "triton",
        {"gdc_wait": ("launch", "waited", ""), "accumulate_splits": ("first bytes", "last product", "result[1]")},
    ),
)  # fmt: skip


# ---- stamps in kernels ----


def stamp_ptx(event: str, buffer: int, value: str = "") -> str:
    """Stores the time of an event of this CTA."""
    i = EVENTS.index(event)
    lines = [
        ".reg .pred p;", ".reg .b32 t, x, y, n;", ".reg .b64 a, g;", "mov.u32 t, %tid.x;",
        f"and.b32 t, t, {THREADS.get(event, 128) - 1};", "setp.eq.u32 p, t, 0;", "mov.u32 x, %ctaid.x;",
        "mov.u32 y, %ctaid.y;", "mov.u32 n, %nctaid.x;", "mad.lo.u32 x, y, n, x;",
        f"mad.wide.u32 a, x, {CTA_BYTES}, {buffer};",
    ]  # fmt: skip
    if event == "launch":
        for j, name in enumerate(EVENTS[1:-1], 1):
            lines.append(f"@p st.global.b64 [a + {8 * j}], {-1 if name in FIRST else 0};")
        lines += ["mov.u32 t, %smid;", "cvt.u64.u32 g, t;", f"@p st.global.b64 [a + {8 * len(EVENTS) - 8}], g;"]
    lines.append("mov.u64 g, %globaltimer;")
    do = "st.global.b64" if event == "launch" else "red.global.min.u64" if event in FIRST else "red.global.max.u64"
    return " ".join(["{", *lines, f"@p {do} [a + {8 * i}], g;", f"mov.b32 $0, {'$1' if value else '0'};", "}"])


def probes_source(language: str, probes: dict, originals: dict, buffer: int) -> str:
    """A module of functions that stamp, and call the original."""
    gl = "gl" if language == "gluon" else "tl"
    lines = [
        "import triton", "import triton.language as tl", "from triton.experimental import gluon",
        "from triton.experimental.gluon import language as gl",
    ]  # fmt: skip

    def stamp(event: str, value: str) -> str:
        ptx, kinds, values = stamp_ptx(event, buffer, value), "=r,f" if value else "=r", f"[{value}]"
        return f"    {gl}.inline_asm_elementwise({ptx!r}, {kinds!r}, {values}, {gl}.int32, False, 1)"

    for name, (before, after, value) in probes.items():
        signature = inspect.signature(getattr(originals[name], "fn", originals[name]))
        params = [p for p in signature.parameters.values() if p.name != "_semantic"]
        typed = [f"{p.name}: {gl}.constexpr" if "constexpr" in str(p.annotation) else p.name for p in params]
        lines += [f"\n\n@{'gluon' if language == 'gluon' else 'triton'}.jit", f"def {name}({', '.join(typed)}):"]
        lines += [stamp(before, "")] if before else []
        lines.append(f"    result = original_{name}({', '.join(p.name for p in params)})")
        lines += [stamp(after, value)] if after else []
        lines.append("    return result")
    return "\n".join(lines) + "\n"


def insert_probes(folder: Path, buffers: dict[str, int]) -> None:
    """Replaces the functions in the modules of decode's kernels, before anything is compiled."""
    for i, (module, language, probes) in enumerate(PROBES):
        target: Any = importlib.import_module(f"tersekv.backends.gluon.sm90.decode.{module}")
        originals = {name: getattr(target, name) for name in probes}
        buffer = buffers["combine" if language == "triton" else "split pass"]
        path = folder / f"probes_{i}.py"
        path.write_text(probes_source(language, probes, originals, buffer))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        for name, fn in originals.items():
            setattr(made, f"original_{name}", fn)
            setattr(target, name, getattr(made, name))


# ---- one cell, in a process of its own ----


def one_cell(i: int, with_stamps: bool, lock: str) -> dict:
    import torch

    from tersekv.testing.bench import measure
    from tersekv.testing.bench.cases import Case
    from tersekv.testing.bench.decode import Decode

    device = torch.device("cuda", 0)
    buffers = {name: torch.zeros(MAX_CTAS * CTA_BYTES // 8, dtype=torch.int64, device=device) for name in KERNELS}
    fmt, requests, tokens, heads, page, uneven = CELLS[i]
    case = Case("decode", fmt, requests, tokens, heads=heads, page=page, uneven=uneven)
    with tempfile.TemporaryDirectory() as folder:
        if with_stamps:
            insert_probes(Path(folder), {name: x.data_ptr() for name, x in buffers.items()})
        problem = Decode(case, device)
        problem.poison()
        problem.calls[0]()
        error = problem.error(problem.out)
    assert error <= problem.limit, f"cell {i}: error {error}, want at most {problem.limit}"
    peer = None if with_stamps else xqa(Decode(replace(case, format=FP8), device))
    with open(lock, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # one process at a time on the GPU
        found: dict = {"us": measure.device_time(problem.calls, device).us}
        if with_stamps:
            found["replays"] = stamps(problem.calls, buffers)
        if peer is not None:
            found["xqa_us"], found["xqa_kernels"] = measure.device_time(peer, device).us, kernels(peer[0])
    chip = torch.cuda.get_device_name(device)
    return {"chip": chip, "cell": i, "case": case.id, "bytes": problem.nbytes, **found}


def xqa(problem: Any) -> list | None:
    """FlashInfer's calls for an fp8 problem, once checked; None: it is not installed."""
    from tersekv.testing.bench import flashinfer, peers

    if peers.not_importable("flashinfer") is not None:
        return None
    calls = next(rival for rival in flashinfer.peers(problem) if rival.name == "flashinfer xqa").build()
    problem.poison()
    error = problem.error(calls[0]())
    assert error <= problem.peer_limit, f"XQA: error {error}"
    return calls


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS."""

    _fields_ = (
        ("func", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("smem", ctypes.c_uint),
        ("params", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p),
        ("context", ctypes.c_void_p),
    )  # fmt: skip


def kernels(call: Any) -> list[dict]:
    """Grid, threads and shared bytes of every kernel that a call launches."""
    import torch

    graph, cuda, count, found = (
        torch.cuda.CUDAGraph(keep_graph=True),
        ctypes.CDLL("libcuda.so.1"),
        ctypes.c_size_t(),
        [],
    )
    with torch.cuda.graph(graph):
        call()
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    assert cuda.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert cuda.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    for node in nodes:
        params = KernelNode()
        if cuda.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(params)) == 0:
            threads = params.block[0] * params.block[1] * params.block[2]
            found.append({"grid": list(params.grid), "threads": threads, "smem": params.smem})
    return found


KERNELS = ("split pass", "combine")


def stamps(calls: list, buffers: dict) -> list[dict]:
    """The stamps of some replays' last calls: kernel → a row per CTA, in order of EVENTS."""
    import torch

    graph, replays = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for call in calls * max(1, 20 // len(calls)):
            call()
    for _ in range(REPLAYS):
        graph.replay()
        torch.cuda.synchronize()
        tables = {name: x.view(-1, CTA_BYTES // 8)[:, : len(EVENTS)].cpu() for name, x in buffers.items()}
        replays.append({name: x[x[:, 0] != 0].tolist() for name, x in tables.items()})
    return replays


# ---- report ----


def is_own(row: list[int], j: int) -> bool:
    """Whether there is such a stamp, and it is not of the call before: that one's CTA may still run on another SM when
    this one starts, but not when it has waited."""
    waited = row[EVENTS.index("waited")]
    return 0 < row[j] < 1 << 62 and (EVENTS[j] not in FIRST or row[j] >= waited)


def since_wait(replays: list[dict]) -> dict[str, dict[str, list[float]]]:
    """Kernel → event → µs of the 5th, 50th and 95th of a hundred CTAs and of the last; medians of the replays."""
    found: dict[str, dict[str, list[float]]] = {}
    for kernel in KERNELS:
        for j, event in enumerate(EVENTS[:-1]):
            each = []
            for replay in replays:
                begin = min(row[EVENTS.index("waited")] for row in replay["split pass"])
                us = sorted((row[j] - begin) / 1e3 for row in replay[kernel] if is_own(row, j))
                if us:
                    each.append([us[int(q * (len(us) - 1))] for q in (0.05, 0.5, 0.95, 1.0)])
            if each:
                found.setdefault(kernel, {})[event] = [statistics.median(x) for x in zip(*each, strict=True)]
    return found


PHASES = (
    ("waited", "scheduled", "orange"), ("scheduled", "first bytes", "blank"), ("first bytes", "last product", "green"),
    ("last product", "stored", "blue"), ("stored", "combine ended", "purple"),
)  # fmt: skip


def picture(records: list[dict]) -> Picture:
    """Two bars a cell: the median CTA's events, and each event's last CTA; the second launch behind them."""
    left, row, top = 250, 46, 78
    p = Picture(
        980, top + row * len(records) + 44, "When the CTAs of decode's kernels wait, copy, multiply and combine"
    )
    scale = (950 - left) / max(r["us"] for r in records)
    names = ("lengths, CTA range", "page table, first tile", "products", "store", "combine")
    p.text(
        24,
        24,
        f"{records[0]['chip']}: µs since the previous kernel's end; above the median CTA, below the last one",
        bold=True,
    )
    for i, (name, (_, _, fill)) in enumerate(zip(names, PHASES, strict=True)):
        p.rect(24 + 175 * i, 44, 14, 14, fill)
        p.text(44 + 175 * i, 51, name, size=12)
    bottom = top + row * len(records)
    for us in range(0, int(950 / scale), 10):
        x = left + us * scale
        p.line([(x, top - 6), (x, bottom)], "grid")
        p.text(x, bottom + 12, str(us), size=11, fill="soft", anchor="middle")
    for i, r in enumerate(records):
        y, (fmt, requests, tokens, heads, _, uneven) = top + row * i, CELLS[r["cell"]]
        what = fmt.replace("_per_token_head", " p.t.h.").replace("fp8_e4m3", "fp8")
        p.text(24, y + 10, what, size=12)
        p.text(
            24,
            y + 26,
            f"{requests} × {'1…' if uneven else ''}{2 * tokens if uneven else tokens}, {heads}/8",
            size=12,
            fill="soft",
        )
        split, second = r["us_since_wait"]["split pass"], r["us_since_wait"].get("combine")
        for quantile, at, height in ((1, y, 16), (3, y + 19, 10)):
            for begin, end, fill in PHASES:
                if begin in split and end in split:
                    x0, x1 = (left + max(0.0, split[e][quantile]) * scale for e in (begin, end))
                    p.rect(x0, at, max(0.0, x1 - x0), height, fill)
        if second:
            x0, x1 = left + second["waited"][0] * scale, left + second["last product"][3] * scale
            p.rect(x0, y + 19, x1 - x0, 10, "purple")
        p.line([(left + r["us"] * scale, y - 4), (left + r["us"] * scale, y + 32)], "ink", 2)
        if "xqa_us" in r:
            p.line([(left + r["xqa_us"] * scale, y - 4), (left + r["xqa_us"] * scale, y + 32)], "red-ink", 2)
    p.text(24, bottom + 30, "black: time of a call in graphs; red: XQA's, over fp8", size=12, fill="soft")
    return p


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=",".join(map(str, range(len(CELLS)))), help="of CELLS, by their number")
    parser.add_argument("--json", metavar="FILE", help="append a line per cell")
    parser.add_argument("--picture", metavar="FILE", help="draw the cells of --json FILE, and time nothing")
    parser.add_argument("--lock", metavar="FILE", help="locked while the GPU is timed; default: a file of this run")
    parser.add_argument("--one", nargs=3, metavar=("CELL", "STAMPS", "LOCK"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one_cell(int(args.one[0]), args.one[1] == "1", args.one[2])))
        return 0
    if args.picture:
        records = [json.loads(line) for line in Path(args.json).read_text().splitlines()]
        Path(args.picture).write_text(picture(records).svg())
        return 0
    cells = [int(x) for x in args.cells.split(",")]
    with tempfile.NamedTemporaryFile() as own_lock:
        lock = args.lock or own_lock.name
        started = {
            (i, stamped): subprocess.Popen(
                [sys.executable, __file__, "--one", str(i), stamped, lock], stdout=subprocess.PIPE, text=True
            )
            for i in cells
            for stamped in "01"
        }
        outputs = {key: process.communicate()[0] for key, process in started.items()}
    bad = 0
    for i in cells:
        if any(started[i, s].returncode for s in "01"):
            print(f"cell {i}: failed")
            bad = 1
            continue
        plain, stamped = (json.loads(outputs[i, s].splitlines()[-1]) for s in "01")
        replays = stamped.pop("replays")
        ctas = {kernel: len(replays[0][kernel]) for kernel in KERNELS}
        record = {**plain, "us_stamped": stamped["us"], "ctas": ctas, "us_since_wait": since_wait(replays)}
        print(f"{i} {plain['case']}: {plain['us']:.1f} µs ({stamped['us']:.1f} with stamps), {record['ctas']}")
        for kernel, events in record["us_since_wait"].items():
            for event, us in events.items():
                print(f"    {kernel:10} {event:14}" + "".join(f"{x:8.2f}" for x in us))
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(record) + "\n")
    return bad


if __name__ == "__main__":
    sys.exit(main())
