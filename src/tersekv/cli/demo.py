"""`tersekv demo`: two small models run on every cache format; what does each cost, and what does it keep?"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from .. import __version__
from ..demo import text
from ..demo.attend import RUNNERS
from ..demo.calibrate import Calibration
from ..demo.measure import ModelResult, Settings, formats_of, measure
from ..demo.report import as_json, frontier_table, plot, refusals, samples, smallest_within, table
from ..demo.search import REFERENCE, searched
from ..demo.subject import BuiltIn, Subject
from ..errors import UnsupportedError
from ..formats import ALL_FORMATS
from ..recipe import recipe
from .arguments import (
    PICTURES,
    Interruption,
    add_device,
    complain,
    names,
    picture,
    positive,
    screen,
    threads,
    unusable,
    unwritable,
)
from .chosen import as_measured, chosen, lines, unsaveable
from .tables import Fitted
from .verify import device_name, environment

_FORMATS = tuple(ALL_FORMATS)
NEEDLES = 16  # keys of each head that a search looks for
_LEAST = 9  # tokens, of which a quarter are two


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common(parser)


def run(args: argparse.Namespace) -> int:
    """Measure both models on the shipped held-out text. Returns 2 for arguments that cannot work."""
    obstacle = blocked(args)
    if obstacle:
        return complain(args, obstacle)
    subjects = [BuiltIn(name, args.device) for name in RUNNERS]
    return show(args, subjects, text.encode(text.heldout_text()), "held-out Python documentation")


def add_common(parser: argparse.ArgumentParser) -> None:
    """The arguments that `demo` and `eval` share."""
    add_device(parser)
    parser.add_argument(
        "--formats", type=_recipes,
        help=f"comma-separated, of {', '.join(_FORMATS)}; default: all; bf16 is always measured, as the reference; of "
        "K/V caches also K/V, as in int8_per_token_head/int4_per_token_head, and behind it +rotated, +channels (scales "
        "of channels) and +ends=FORMAT (of the first and the last layer); behind any that takes a scale +fitted; what "
        "has to be calibrated is on a part of the text that is not scored",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=positive, default=4096, help="bytes (of other models: tokens) to score; default: %(default)s"
    )
    parser.add_argument(
        "--calibrate", action="store_true",
        help="+fitted for every format: scales of fp8_e4m3, fp8_e5m2 and nvfp4 from the largest values of a part of "
        "the text that is not scored; default: 1.0",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=threads, default=1,
        help="CPU threads; default: 1, since threads that wait for each other make small models slow on a busy machine",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write the results to FILE")
    parser.add_argument("--plot", metavar="FILE", type=picture, help=f"draw them into FILE ({', '.join(PICTURES)})")


def _recipes(text: str) -> tuple[str, ...]:
    """Caches by name, each what `recipe` reads."""
    known = names(_FORMATS)
    found: list[str] = []
    for word in text.split(","):
        if not {"/", "+"} & set(word):
            found += known(word)
            continue
        try:
            recipe(word.strip())
        except ValueError as e:
            raise argparse.ArgumentTypeError(str(e)) from None
        found.append(word.strip())
    return tuple(dict.fromkeys(found))


def blocked(args: argparse.Namespace, text: str | None = None) -> str | None:
    """Why these options cannot work, whatever the model; None: they can. text: the file of --text."""
    files = {name: getattr(args, name, None) for name in ("json", "plot", "save")}
    return unusable(args.device) or unwritable(text, **files)


def show(
    args: argparse.Namespace, subjects: Sequence[Subject], tokens: Tensor, source: str, settings: Settings | None = None
) -> int:
    """Measure the models on the first tokens of a text; write the files that were asked for, and print."""
    obstacle = _obstacle(args, subjects, tokens) or unsaveable(args, subjects)
    if obstacle:
        return complain(args, obstacle)
    idle = [s for s in subjects if not formats_of(s, args.formats)]
    subjects = [s for s in subjects if s not in idle]
    search, save = getattr(args, "search", False), getattr(args, "save", None)
    wanted = _searched(subjects, args.formats) if search else args.formats
    settings = replace(settings or Settings(), calibrate=args.calibrate, needles=NEEDLES if search else 0)
    console, start = screen(), time.perf_counter()
    apart = args.calibrate or search or save or any(recipe(f).calibrated for f in wanted or ())
    used, other = _parts(tokens, args.tokens, max(s.context for s in subjects) * settings.batch if apart else 0)
    if apart and len(other) < 2:
        least = f"at least {_LEAST} {subjects[0].unit}s, a part of them to calibrate on"
        return complain(args, f"text: want {least}, got {len(tokens)}")
    what = f"{len(used) - 1} {subjects[0].unit}s of {source}"
    what = f"the first {what}" if len(used) < len(tokens) else what
    told = f"; calibrated on {len(other)} others" if apart else ""
    console.print(f"tersekv {__version__} on {device_name(args.device)}: {what}{told}", highlight=False)
    for left_out in _left_out(args.formats, subjects, idle):
        console.print(left_out, highlight=False)
    run = _Run(args, subjects, settings)
    try:
        with Interruption() as stop, _with_threads(args.threads):
            run.measure((used.to(args.device), other.to(args.device)), wanted, console)
    except UnsupportedError as e:
        return complain(args, str(e))
    results = [r for r in run.begun if r.formats]
    if not results:
        stop.pass_on()
    seconds = time.perf_counter() - start
    options = {
        "tokens": len(used) - 1,
        "calibrate": args.calibrate,
        "calibrated_on": len(other),
        "page_size": settings.page_size,
        "threads": args.threads,
        "dtype": str(subjects[0].dtype).split(".")[-1],
    }
    stored = {
        "command": args.command, "text": source, "options": options, "environment": environment(args.device),
        "seconds": round(seconds, 2), "interrupted": stop.came, "models": as_json(results),
    }  # fmt: skip
    # Before anything is printed: what was measured outlives a console that fails.
    written = run.write(results, stored, f"{what}, on {device_name(args.device)}", stop.came)
    run.print(results, console)
    files = f"; wrote {', '.join(written)}" if written else ""
    console.print(f"{seconds:.0f} s{files}", highlight=False, soft_wrap=True)
    stop.pass_on()
    return 1 if save is not None and save not in written else 0


@contextmanager
def _with_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Run:
    """What a command measures, and what it makes of it."""

    def __init__(self, args: argparse.Namespace, subjects: Sequence[Subject], settings: Settings) -> None:
        self._args, self._settings = args, settings
        self._subjects = {s.name: s for s in subjects}
        self._calibrations: dict[str, Calibration] = {}
        self._notes: list[str] = []  # why a file is missing
        self._saved = False
        self.begun: list[ModelResult] = []

    def measure(self, parts: tuple[Tensor, Tensor], formats: Sequence[str] | None, console: Console) -> None:
        """parts: tokens to score, and those to calibrate on"""
        (tokens, other), settings, subjects = parts, self._settings, self._subjects.values()
        runs = sum(len(formats_of(s, formats)) for s in subjects)
        room = (BarColumn(), MofNCompleteColumn()) if console.width >= 100 else ()
        columns = (TextColumn("{task.description}"), *room, TextColumn("{task.percentage:.0f}%"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            work = runs * (len(tokens) - 1 + settings.generate) + len(subjects) * len(other)
            task = progress.add_task("loading", total=work)

            def tick(label: str, work: float) -> None:
                progress.update(task, description=label, advance=work)

            for s in subjects:
                known = Calibration(s, other, settings.batch, settings.chunk, tick) if len(other) else None
                if known is not None:
                    self._calibrations[s.name] = known
                measure(s, tokens, settings, formats, tick, self.begun, known)
            if getattr(self._args, "save", None) is not None:
                self._save(self.begun[0])

    def _save(self, result: ModelResult) -> None:
        args, word = self._args, chosen(self._args, result)
        if word is None:
            self._notes.append(f"{args.save} is not written: no cache is as near as --within wants it")
            return
        try:
            self._calibrations[result.model].attributes(as_measured(args, word)).save_attributes(args.save)
        except (ValueError, OSError) as e:
            self._notes.append(f"{args.save} is not written: {e}")
            return
        self._saved = True

    def write(self, results: list[ModelResult], stored: dict[str, Any], title: str, interrupted: bool) -> list[str]:
        """Write the files that were asked for; returns their names."""
        args, written = self._args, []
        if self._saved:
            written.append(args.save)
            stored["saved"] = {"file": args.save, "cache": chosen(args, results[0])}
        elif interrupted and getattr(args, "save", None) is not None:
            self._notes.append(f"{args.save} is not written: not all caches were measured")
        if args.json is not None:
            Path(args.json).write_text(json.dumps(stored, indent=1) + "\n")
            written.append(args.json)
        if args.plot is not None:
            try:
                plot(results, title, args.plot)
                written.append(args.plot)
            except ImportError:
                self._notes.append("no picture: it needs matplotlib (pip install matplotlib)")
        return written

    def print(self, results: list[ModelResult], console: Console) -> None:
        """Tables, then the caches to choose and how to make them; of a search, what they write only if it is asked."""
        args = self._args
        search, within = getattr(args, "search", False), getattr(args, "within", None)
        for result in results:
            console.print()
            console.print(Fitted(table(result)))
            for refusal in refusals(result):
                console.print(refusal)
            console.print()
            if search or within is not None:
                console.print(Fitted(frontier_table(result)))
                console.print("" if within is None else smallest_within(result, within))
            word = chosen(args, result)
            if word is not None and args.command == "eval":
                known = self._calibrations.get(result.model)
                for line in lines(args, self._subjects[result.model], word, known, self._saved):
                    console.print(f"    {line}", markup=False, highlight=False, soft_wrap=True)
            elif search:
                console.print("any of these by its name: format=NAME; --within KL names one", highlight=False)
        if not search or args.samples:
            for result in results:
                console.print()
                console.print(samples(result), highlight=False)
        console.print()
        for note in self._notes:
            console.print(note, markup=False, highlight=False, soft_wrap=True)


def _parts(tokens: Tensor, most: int, apart: int) -> tuple[Tensor, Tensor]:
    """What is scored of a text, up to `most` tokens behind its first one; and behind that up to `apart` others, for
    which a short text gives a quarter."""
    given = len(tokens) - 1
    used = tokens[: min(most, given - given // 4 if apart else given) + 1]  # the first one is only read
    return used, tokens[len(used) :][:apart]


def _left_out(formats: Sequence[str] | None, subjects: Sequence[Subject], idle: Sequence[Subject]) -> Iterator[str]:
    """What is not measured of the formats that were named, and of the models."""
    for s in idle:
        yield f"{s.name} is left out: its cache has none of {', '.join(formats or ())}"
    for name in formats or ():
        if not any(formats_of(s, [name]) for s in subjects):
            yield f"{name} is left out: no model's cache has it"


def _searched(subjects: Sequence[Subject], formats: Sequence[str] | None) -> list[str]:
    """What a search tries, of the formats that were named alone."""
    each = [[f for f in s.formats if formats is None or f in (*formats, REFERENCE)] for s in subjects]
    return list(dict.fromkeys([*(f for own in each for f in searched(own)), *(formats or ())]))


def _obstacle(args: argparse.Namespace, subjects: Sequence[Subject], tokens: Tensor) -> str | None:
    """Why these models cannot be measured on this text; None: they can."""
    if len(tokens) < 2:
        return f"text: want at least 2 {subjects[0].unit}s, got {len(tokens)}"
    if not any(formats_of(s, args.formats) for s in subjects):
        has = "; ".join(f"{s.name}: {', '.join(s.formats)}" for s in subjects)
        return f"--formats {','.join(args.formats)}: want a format of a model that runs ({has})"
    return None
