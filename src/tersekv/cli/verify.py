"""`tersekv verify`: is what the kernels compute on this machine right?"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from rich import box
from rich.table import Table

from .. import __version__, env
from ..dispatch.plan import BACKENDS
from ..scalars import counted
from ..testing import as_arch, random_cases
from ..testing.case_text import case_of, text_of
from ..testing.cases import OPS, Case, cases, formats_of
from ..testing.compare import EXACT, FAST, REQUANTISED, share_of_bound
from ..testing.verify import FAILED, PASSED, UNSUPPORTED, Result, verify
from ..testing.verify import run as run_case
from ..testing.workers import Workers
from . import report
from .arguments import Interruption, add_device, complain, names, positive, screen, unusable, unwritable
from .tables import Fitted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    formats = tuple(dict.fromkeys(c.format for c in cases()))
    add_device(parser)
    parser.add_argument("--backend", choices=BACKENDS, help="default: the one that a call gets on this device")
    parser.add_argument(
        "--as-arch", metavar="SM", type=int, choices=as_arch.ARCHS,
        help="compile the portable kernels for this older chip and run their PTX on this GPU; of "
        f"{', '.join(map(str, as_arch.ARCHS))}",
    )  # fmt: skip
    parser.add_argument("--ops", type=names(OPS), help=f"comma-separated, of {', '.join(OPS)}")
    parser.add_argument("--formats", type=names(formats), help=f"comma-separated, of {', '.join(formats)}")
    parser.add_argument("--quick", action="store_true", help="one or two cases per operation and format")
    parser.add_argument(
        "--random", metavar="N", type=positive,
        help="N cases drawn from all that is documented, in processes of their own; each that fails is made smaller",
    )  # fmt: skip
    parser.add_argument("--seed", metavar="S", type=int, help="of --random: equal seeds draw equal cases; default: any")
    what = "processes that run cases; default: by the device for --random, else none but this one"
    parser.add_argument("--workers", metavar="W", type=positive, help=what)
    parser.add_argument(
        "--case",
        metavar="LINE",
        type=_case,
        help="one case: what a failure prints, or operation/format/name of a listed one",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write every result to FILE; of --random what failed, and counts"
    )
    report.add_option(parser)


def _case(text: str) -> Case:
    try:
        return case_of(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from None


def run(args: argparse.Namespace) -> int:
    """Print a row per operation and format, then what failed. Returns 1 if anything did, or nothing ran."""
    console = screen()
    obstacle = _contradiction(args) or unusable(args.device, args.backend)
    obstacle = obstacle or unwritable(json=args.json, report=args.report) or report.unfit(args.report)
    if args.as_arch and not obstacle and (why := as_arch.why_not(args.as_arch, args.device)):
        obstacle = f"--as-arch {args.as_arch}: {why}"
    if env.checked():
        obstacle = "TERSEKV_CHECKED: want it unset, since some cases point outside the cache on purpose"
    elif not obstacle and next(cases(args.ops, args.formats, quick=args.quick), None) is None:
        obstacle = "no case fits these options: no operation named has a format named"
    if obstacle:
        return complain(args, obstacle)
    if args.random and args.seed is None:
        args.seed = random_cases.any_seed()
    start, results = time.perf_counter(), []
    with Interruption() as stop, console.status("verifying") as status:
        for r in _results(args):
            results.append(r)
            done = f"{len(results)} of {args.random}, " if args.random else ""
            status.update(f"{done}{r.case.id}: {r.status}")
    seconds = time.perf_counter() - start
    console.print(Fitted(table(results, args.device, args.as_arch), heads=2))
    console.print(FOOTER, markup=False, highlight=False)
    for text in failures(results, args.as_arch):
        console.print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    for text in refusals(results):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    count = {status: sum(r.status == status for r in results) for status in (PASSED, FAILED, UNSUPPORTED)}
    drawn = f" of {counted(args.random, 'random case')}, seed {args.seed}, in {seconds:.0f} s" if args.random else ""
    console.print(", ".join(f"{n} {status}" for status, n in count.items()) + drawn, highlight=False)
    if args.json:
        stored: dict = {"environment": environment(args.device, args.as_arch), "interrupted": stop.came}
        if args.random:
            stored |= {"seed": args.seed, "seconds": round(seconds)} | random_cases.summary(results)
        else:
            stored["results"] = [r.as_dict() for r in results]
        with open(args.json, "w") as f:
            json.dump(stored, f, indent=1)
    report.append(args.report, args, args.device, interrupted=stop.came, **judged(results))
    stop.pass_on()
    return 1 if count[FAILED] or not count[PASSED] else 0


def _contradiction(args: argparse.Namespace) -> str | None:
    """Options that mean nothing beside others, by their names."""
    if args.case is not None:
        beside = [n for n in ("ops", "formats", "quick", "random", "workers") if getattr(args, n)]
        if beside:
            return f"--case: want it without --{beside[0]}, which chooses cases too"
    if args.as_arch and args.backend not in (None, "triton"):
        return f"--as-arch {args.as_arch}: want it with --backend triton or none, got {args.backend}"
    if args.random and args.quick:
        return "--random: want it without --quick, which chooses among listed cases"
    return "--seed: want it beside --random" if args.seed is not None and not args.random else None


def _results(args: argparse.Namespace) -> Iterator[Result]:
    runner: dict[str, Any] = {"runner": partial(as_arch.run_as, arch=args.as_arch)} if args.as_arch else {}
    if args.case is not None:
        yield runner.get("runner", run_case)(args.case, args.device, args.backend)
    elif args.random:
        yield from random_cases.results(
            args.random, args.seed, args.device, args.backend, ops=args.ops, formats=args.formats,
            workers=args.workers, **runner,
        )  # fmt: skip
    elif args.workers:
        with Workers(args.workers, args.device, args.backend, **runner) as pool:
            yield from pool.results(cases(args.ops, args.formats, quick=args.quick))
    elif args.as_arch:
        for case in cases(args.ops, args.formats, quick=args.quick):
            yield runner["runner"](case, args.device, args.backend)
    else:
        yield from verify(args.device, args.backend, ops=args.ops, formats=args.formats, quick=args.quick)


@dataclass
class Row:
    """One operation × format."""

    backends: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    nearest: tuple[float, float] = (0.0, 0.0)  # error and bound of the case that is nearest to its bound


def _format_error(error: float) -> str:
    return f"{error:.1e}".replace("e-0", "e-") if error else "0"


FOOTER = (
    "error, bound: of the case that is nearest to its bound. error: relative norm of the difference from fp64; of an "
    f"append 0, since bytes have to be equal. bound: {_format_error(EXACT)}; with precision='fast' "
    f"{_format_error(FAST)}; where something is quantised on the way {_format_error(REQUANTISED)}; of an 8-bit output "
    "twice that, and its own rounding"
)


def rows_of(results: Iterable[Result]) -> dict[tuple[str, str], Row]:
    """Row by operation and format, in the order in which they are listed."""
    rows: dict[tuple[str, str], Row] = defaultdict(Row)
    for r in results:
        row = rows[r.case.op, r.case.format]
        row.counts[r.status] += 1
        row.nearest = max(row.nearest, (r.error or 0.0, r.bound or 0.0), key=lambda both: share_of_bound(*both))
        if r.backend and r.status != UNSUPPORTED:
            row.backends.add(r.backend)
    order = {(op, fmt): i for i, (op, fmt) in enumerate((op, fmt) for op in OPS for fmt in formats_of(op))}
    return dict(sorted(rows.items(), key=lambda item: order.get(item[0], len(order))))


def judged(results: list[Result]) -> dict:
    """For a report: counts and the case nearest to its bound by operation and format; what failed; why some did not
    run."""
    names = (PASSED, FAILED, UNSUPPORTED)
    rows = [
        {"op": op, "format": fmt, "backends": sorted(row.backends), **{name: row.counts[name] for name in names},
         "error": row.nearest[0], "bound": row.nearest[1]}
        for (op, fmt), row in rows_of(results).items()
    ]  # fmt: skip
    found = random_cases.summary(results)
    return {"results": rows, "failures": found["failures"], "unsupported": found["unsupported"]}


def table(results: Iterable[Result], device: str, arch: int | None = None) -> Table:
    where = device_name(device) + (f", kernels for sm_{arch}" if arch else "")
    t = Table(title=f"tersekv {__version__} on {where}", box=box.SIMPLE_HEAD)
    t.padding, t.pad_edge, t.show_edge = 0, False, False  # fits into 80 columns
    for name in ("operation", "format"):
        t.add_column(name, no_wrap=True)
    t.add_column("backend")
    for name in ("passed", "failed", "unsup-\nported", "error", "bound"):
        t.add_column(name, justify="right", no_wrap=True)
    for (op, fmt), row in rows_of(results).items():
        failed, unsupported = row.counts[FAILED], row.counts[UNSUPPORTED]
        t.add_row(
            op, fmt, ", ".join(sorted(row.backends)) or "-", str(row.counts[PASSED]),
            f"[red]{failed}[/red]" if failed else "0", str(unsupported),
            *(map(_format_error, row.nearest) if row.backends else "--"),
        )  # fmt: skip
    return t


def failures(results: Iterable[Result], arch: int | None = None) -> list[str]:
    """What failed, each with the command that runs it again."""
    again = "tersekv verify " + (f"--as-arch {arch} " if arch else "")
    return [
        f"FAILED {r.case.id} on {r.backend}\n{_indented(r.message)}\n  again: {again}--case '{text_of(r.case)}'"
        for r in results
        if r.status == FAILED
    ]


def refusals(results: Iterable[Result]) -> list[str]:
    """Why cases are unsupported: each reason once, with how many cases it stands for."""
    cases: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for r in results:
        if r.status == UNSUPPORTED:
            cases[r.case.op, r.message].append(r)
    return [
        f"unsupported: {op}, {counted(len(them), 'case')} such as {them[0].case.id}\n{_indented(reason)}"
        for (op, reason), them in cases.items()
    ]


def device_name(device: str) -> str:
    d = torch.device(device)
    return f"{device} ({torch.cuda.get_device_name(d)})" if d.type == "cuda" else device


def environment(device: str, arch: int | None = None) -> dict[str, str | None]:
    """What a stored result was made with; arch: that of --as-arch."""
    return {
        "tersekv": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _triton(),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "device": device_name(device),
        **({"as_arch": f"sm_{arch}"} if arch else {}),
    }


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
