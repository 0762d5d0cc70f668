"""`tersekv bench`: how fast is it on this machine, against the memory's limit and against other libraries?"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from typing import TextIO

import torch

from ..dispatch.plan import BACKENDS
from ..formats import STORED_FORMATS
from ..scalars import counted
from ..testing.bench import engine, peers, random_cells
from ..testing.bench.apart import Apart
from ..testing.bench.cases import OPS, PAIRS, Case, Sizes, grid, parsed, sizes, with_cells
from ..testing.bench.cliffs import CLIFF, compared
from ..testing.bench.cliffs import line as cliff_line
from ..testing.bench.compile_ahead import compile_ahead
from ..testing.bench.engine import FAILED, OK, RED, Limits, Result, bench
from ..testing.bench.engine import run as time_one
from ..testing.bench.report import advice, environment, line, notes, record, speed, summary
from ..testing.bench.shapes import PRESETS
from . import report
from .arguments import (
    PICTURES,
    Interruption,
    add_device,
    complain,
    names,
    picture,
    positive,
    unusable,
    unwritable,
    words,
)
from .tables import say

_PRECISIONS = ("exact", "fast")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    formats = (*STORED_FORMATS, *PAIRS)
    add_device(parser)
    parser.add_argument("--ops", type=names(OPS), default=OPS, help=f"comma-separated, of {', '.join(OPS)}")
    parser.add_argument("--formats", type=names(formats), help=f"comma-separated, of {', '.join(formats)}")
    parser.add_argument(
        "--cells", type=words, default=(), metavar="CELLS",
        help="comma-separated: requests x tokens of the decodes such as 1x8192, new tokens of the others such as 2048, "
        "of prefill and the sparse ones also new tokens of all such as 512of8192",
    )  # fmt: skip
    parser.add_argument("--page-size", type=positive, help="default: 64, in some cells 16 too")
    parser.add_argument("--uneven", action="store_true", help="lengths uniform in [1, 2 × tokens] in every cell")
    parser.add_argument(
        "--precision",
        type=names(_PRECISIONS),
        default=("exact",),
        help="exact,fast also times precision='fast'",
    )
    parser.add_argument(
        "--batch-invariant", action="store_true", help="decode and mla_decode also with that option, and what it costs"
    )
    parser.add_argument("--backend", choices=BACKENDS, help="default: the one that a call gets on this device")
    parser.add_argument(
        "--peers", type=names((*peers.LIBRARIES, "none")),
        help=f"comma-separated, of {', '.join(peers.LIBRARIES)}, none; default: those that are installed",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=positive, metavar="N",
        help="call every cell once before any is timed, in N processes that compile its kernels; default: kernels "
        "compile one after the other",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="append every result to FILE, one JSON object a line")
    report.add_option(parser)
    parser.add_argument(
        "--plot", metavar="FILE", type=picture, help=f"draw time over bytes into FILE ({', '.join(PICTURES)})"
    )
    parser.add_argument("--quick", action="store_true", help="few cells")
    parser.add_argument(
        "--preset", type=names(tuple(PRESETS)),
        help=f"comma-separated, of {', '.join(PRESETS)}: decode in other shapes, each against the plain case with as "
        "many bytes. shapes: head sizes, groups, layouts, drafts, windows, lengths; drafts: 2 to 32 rows, chains and "
        "trees; uneven: one long request among short ones, a thousand short ones; sizes: head sizes and pages that few "
        "models have, scales behind rows. Takes --device, --formats, --backend, --json and --report",
    )  # fmt: skip
    parser.add_argument(
        "--random", type=positive, metavar="N",
        help="N decodes that nobody listed, drawn by --seed, each beside the peers of its format, of e4m3 and of bf16; "
        "with --ops prefill N prefills, beside the peers of their format and of bf16. Takes --device, --ops, --peers, "
        "--jobs, --formats, --backend, --json and --report",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, help="of --random; default: 0")


def run(args: argparse.Namespace) -> int:
    """Print a line per case as it goes, then means and losses. Returns 1 if a result was wrong or nothing timed."""
    files = {"json": args.json, "plot": args.plot, "report": args.report}
    obstacle = unusable(args.device, args.backend) or unwritable(**files) or report.unfit(args.report)
    if obstacle:
        return complain(args, obstacle)
    device = torch.device(args.device)
    try:
        cells = with_cells(sizes(device.type, args.quick), args.cells)
    except ValueError as e:
        return complain(args, f"--{e}")
    idle = idle_option(args)
    if idle:
        return complain(args, idle)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    if args.preset:
        return run_shapes(args, device)
    cases = cases_of(args, cells, device)
    if not cases:
        return complain(args, _nothing_fits(args, cells))
    libraries = usable(args.peers or tuple(peers.default(device, cases)), device)
    where = environment(device, libraries)
    limits = Limits.of(device)
    told = ", ".join(f"{name} {where[name]}" for name in ("torch", "triton", "tersekv", "driver") if where[name])
    say(f"{where['chip']}: {told}")
    copy, matmul = speed(limits.copy / 1e6, "B/s"), speed(limits.matmul / 1e6, "FLOP/s")
    say(f"limits: copy {copy}, bf16 product {matmul}")
    results: list[Result] = []
    with Interruption() as stop, ExitStack() as stack:
        out = stack.enter_context(open(args.json, "a")) if args.json else None
        if args.jobs:
            ran = compile_ahead(cases, device, args.backend, args.jobs)
            say(f"called once, to compile: {ran} of {counted(len(cases), 'cell')}")
        for r in results_of(cases, device, libraries, args):
            show(r, limits, {**where, "backend": args.backend, **({"seed": args.seed} if args.random else {})}, out)
            results.append(r)
    for text in (*summary(results, limits), *advice(results, device)):
        say(text)
    if args.random:
        conclude(args, results, where)
    if args.plot:
        draw(results, limits, f"tersekv {where['tersekv']} on {where['chip']}, {where['date']}", args.plot)
    report.append(
        args.report, args, device, interrupted=stop.came, peers=where["versions"], **report.timed(results, limits)
    )
    stop.pass_on()
    bad = any(r.status in (RED, FAILED) for r in results)
    return 1 if bad or not any(r.status == OK for r in results) else 0


def run_shapes(args: argparse.Namespace, device: torch.device) -> int:
    """Print a line per shape, and the worst. Returns 1 if a result was wrong."""
    presets = [PRESETS[name] for name in args.preset]
    cases = [s for of, formats in presets for name in args.formats or formats for s in of(name, device.type)]
    where, limits, ratios, bad = environment(device, ()), Limits.of(device), [], False
    results: list[Result] = []
    say(f"{where['chip']}: torch {where['torch']}, triton {where['triton']}, tersekv {where['tersekv']}")
    with Interruption() as stop, ExitStack() as stack:
        out = stack.enter_context(open(args.json, "a")) if args.json else None
        for r, plain, ratio in compared(cases, lambda case: time_one(case, device, (), args.backend)):
            say(cliff_line(r, plain, ratio))
            results.append(r)
            bad |= r.status in (RED, FAILED) or plain.status in (RED, FAILED)
            if ratio is not None:
                ratios.append(ratio)
            store(
                {**record(r, limits, where), "plain_us": plain.us, "plain_ratio": ratio, "backend": args.backend}, out
            )
    if ratios:
        say(f"worst {min(ratios):.0%} of the plain rate; {sum(x < CLIFF for x in ratios)} under {CLIFF:.0%}")
    for text in advice(results, device):
        say(text)
    report.append(args.report, args, device, interrupted=stop.came, **report.timed(results, limits))
    stop.pass_on()
    return 1 if bad or not any(r.status == OK for r in results) else 0


def idle_option(args: argparse.Namespace) -> str | None:
    """Which option would be ignored, and why; None: none would."""
    if args.preset and args.random:
        return "--preset: want it without --random"
    if args.seed is not None and not args.random:
        return "--seed: want it beside --random"
    if args.preset or args.random:
        given = {
            "--cells": args.cells, "--page-size": args.page_size, "--uneven": args.uneven,
            "--precision": args.precision != ("exact",), "--batch-invariant": args.batch_invariant,
            "--plot": args.plot, "--quick": args.quick,
        }  # fmt: skip
        of_draw = {"--ops": args.ops != OPS, "--peers": args.peers, "--jobs": args.jobs}
        idle = [name for name, set_ in {**(of_draw if args.preset else {}), **given}.items() if set_]
        mode = f"--preset {','.join(args.preset)}" if args.preset else "--random"
        takes = ["--device", *([] if args.preset else [*of_draw]), "--formats", "--backend", "--json"]
        takes_pairs = not args.preset and "prefill" in drawn_ops(args)
        if not idle and not takes_pairs and set(args.formats or ()) & set(PAIRS):
            return f"{mode}: want formats of both, got {', '.join(args.formats)}"
        return f"{mode}: want {', '.join(takes)} and --report beside it, got {', '.join(idle)}" if idle else None
    decodes, both = {"decode", "mla_decode", "mla_decode_branch", "index"}, {"sparse", "block_sparse"}
    having = {"x": decodes | both, "of": {"prefill"} | both, "": {*OPS} - decodes - {"host"}}
    for cell in args.cells:
        if not having[parsed(cell)[0]].intersection(args.ops):
            what = "decodes have requests x tokens, the others new tokens, prefill new tokens of all too; sparse: all"
            return f"--cells {cell}: none of {', '.join(args.ops)} has such cells; {what}"
    return None


def usable(wanted: tuple[str, ...], device: torch.device) -> list[str]:
    """The libraries to compare with; says why one is left out."""
    libraries = []
    for name in wanted:
        missing = peers.LIBRARIES[name].missing() if name != "none" else ""
        if missing is None:
            libraries.append(name)
        elif missing:
            say(f"peer {name} is left out: {missing}")
    return libraries


def cases_of(args: argparse.Namespace, cells: Sizes, device: torch.device) -> list[Case]:
    """What the options ask for."""
    if args.random:
        args.seed = args.seed or 0
        return random_cells.cells(args.seed, args.random, device.type, drawn_ops(args), args.formats)
    return list(
        grid(
            cells, args.ops, args.formats, page=args.page_size, uneven=args.uneven, precisions=args.precision,
            batch_invariant=args.batch_invariant,
        )
    )  # fmt: skip


def drawn_ops(args: argparse.Namespace) -> tuple[str, ...]:
    """Decodes where no operation is named."""
    return random_cells.DECODES if args.ops == OPS else args.ops


def _nothing_fits(args: argparse.Namespace, cells: Sizes) -> str:
    """What to ask for instead, where no case is."""
    of_any = {op: dict.fromkeys(c.format for c in grid(cells, (op,), None)) for op in args.ops}
    has = "; ".join(f"{op}: {', '.join(formats)}" for op, formats in of_any.items() if formats)
    return f"no case fits these options on this device; formats there are ({has})"


def results_of(
    cases: list[Case], device: torch.device, libraries: list[str], args: argparse.Namespace
) -> Iterator[Result]:
    """Run the cases one by one."""
    if not args.random:
        yield from bench(cases, device, libraries, args.backend)
        return
    of_formats = [name for name in libraries if not peers.LIBRARIES[name].any_format]
    # Nobody tried these cells with the peers' kernels: some lose the device.
    with Apart() if device.type == "cuda" else nullcontext(engine) as place:
        yield from random_cells.compared(
            cases,
            lambda case: place.run(case, device, libraries, args.backend),
            lambda case: place.peers_of(case, device, of_formats) if of_formats else (),
        )


def show(r: Result, limits: Limits, where: dict, out: TextIO | None) -> None:
    """Print and store a result at once, so that what is done is kept if the run is cut short."""
    for text in (line(r, limits), *notes(r)):
        say(text)
    store(record(r, limits, where), out)


def conclude(args: argparse.Namespace, results: list[Result], where: dict) -> None:
    """Print mean and worst of a draw, and store them behind its cells."""
    found = random_cells.verdict(results)
    told = "no cell has a peer"
    if found["cells"]:
        told = (
            f"{found['geometric_mean']:.3g}x as fast as the best peer, geometric mean of "
            f"{counted(found['cells'], 'cell')}; "
            f"worst {found['worst']:.3g}x: {found['worst_cell']}; {found['lost']} slower than a peer"
        )
    if rates := found.get("tflop_s"):
        say(f"TFLOP/s of prefill, geometric means: {', '.join(f'{name} {x:.3g}' for name, x in rates.items())}")
    say(f"seed {args.seed}: {told}")
    if args.json:
        with open(args.json, "a") as out:
            store({"random": args.random, "seed": args.seed, **found, **where, "backend": args.backend}, out)


def store(told: dict, out: TextIO | None) -> None:
    if out is not None:
        out.write(json.dumps(told) + "\n")
        out.flush()


def draw(results: list[Result], limits: Limits, title: str, path: str) -> None:
    from ..testing.bench.plot import plot

    try:
        plot(results, limits, title, path)
    except ImportError:
        say("no picture: it needs matplotlib (pip install matplotlib)")
    except ValueError as e:
        say(f"no picture: {e}")
