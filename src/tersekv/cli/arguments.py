"""What several commands share: types of arguments, where results may be written, and the console."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console

from .. import env
from ..dispatch.plan import BACKENDS
from ..formats import meant

PICTURES = (".png", ".svg", ".pdf")


def words(text: str) -> tuple[str, ...]:
    """A comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A comma-separated list of known names."""

    def parse(text: str) -> tuple[str, ...]:
        found = words(text)
        if not found or any(word not in known for word in found):
            near = next((told for word in found if word not in known and (told := meant(word, known))), "")
            raise argparse.ArgumentTypeError(f"want some of {', '.join(known)}, got {text!r}{near}")
        return found

    return parse


def positive(text: str) -> int:
    """A positive number."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"want a positive number, got {text!r}")
    return int(text)


def between(least: int, most: int) -> Callable[[str], int]:
    """A number within both."""

    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"want a number from {least} to {most}, got {text!r}")
        return int(text)

    return parse


def threads(text: str) -> int:
    """A number of CPU threads: far too many end the process."""
    number, most = positive(text), os.cpu_count() or 1
    if number > most:
        raise argparse.ArgumentTypeError(f"want at most {most}, the CPUs of this machine, got {number}")
    return number


def picture(text: str) -> str:
    """The name of a picture."""
    if Path(text).suffix.lower() not in PICTURES:
        raise argparse.ArgumentTypeError(f"want a name ending in {', '.join(PICTURES)}, got {text!r}")
    return text


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")


def unusable(device: str, backend: str | None = None) -> str | None:
    """Why nothing can run on a device, or by the backend of the environment where none is named; None: it can."""
    wanted = env.backend()
    if backend is None and wanted is not None and wanted not in BACKENDS:
        return f"TERSEKV_BACKEND: want one of {', '.join(BACKENDS)}, got {wanted!r}"
    try:
        if torch.device(device).type == "meta":
            return f"--device {device}: want one that holds values, cpu or cuda"
        torch.ones(1, device=device).add(1).item()  # read, too: what a GPU cannot do may come to light then
    except (RuntimeError, AssertionError, NotImplementedError) as e:
        return f"--device {device}: {str(e).splitlines()[0].split('. ')[0]}"  # a list of all its backends may follow
    return None


def unwritable(text: str | None = None, **files: str | None) -> str | None:
    """Why a file cannot be written, by its option; None: all can. Asked before minutes of work are spent.

    text:  the file of --text, which no result may replace
    """
    taken = {} if text is None else {_identity(text): "--text"}
    for option, path in files.items():
        if path is None:
            continue
        if path == "none":
            return f"--{option} none: want the name of a file; without --{option} none is written"
        if path == "-":
            return f"--{option} -: want the name of a file, since standard output gets the tables"
        owner = taken.setdefault(_identity(path), f"--{option}")
        if owner != f"--{option}":
            return f"--{option} {path}: want a file of its own, got that of {owner}"
        why = _closed(os.path.realpath(path))
        if why:
            return f"--{option} {path}: {why}"
    return None


def _identity(path: str) -> object:
    """Equal for two names of one file."""
    try:
        found = os.stat(path)
    except OSError:
        return os.path.realpath(path)
    return found.st_dev, found.st_ino


def _closed(path: str) -> str | None:
    """Why a file cannot be written: tried, since its permissions do not tell what a file system takes."""
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path)):
        return "want a file in a folder that exists"
    new = not os.path.exists(path)
    if not new and not os.path.isfile(path):
        return None  # a pipe: to open it now would end it
    try:
        with open(path, "ab"):
            pass
        if new:
            os.remove(path)
    except OSError as e:
        return f"want a file that can be written, got {e.strerror}"
    return None


class Screen(Console):
    """Of standard output or error. Where a reader has gone, the command ends as `main` ends it."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def screen() -> Console:
    """Of standard output. A pipe or a file has no width, and takes tables as wide as they are."""
    found = Screen()
    return found if found.is_terminal else Screen(width=200)


class Interruption:
    """A block that Ctrl-C ends without a word, so that what there is can be kept. `pass_on` then says so."""

    came = False

    def __enter__(self) -> Interruption:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.came = kind is not None and issubclass(kind, KeyboardInterrupt)
        return self.came

    def pass_on(self) -> None:
        """Raise KeyboardInterrupt if it came."""
        if self.came:
            raise KeyboardInterrupt


def complain(args: argparse.Namespace, why: str, code: int = 2) -> int:
    """Say on stderr why the command stops; returns the exit code."""
    Screen(stderr=True).print(f"tersekv {args.command}: {why}", markup=False, highlight=False, soft_wrap=True)
    return code
