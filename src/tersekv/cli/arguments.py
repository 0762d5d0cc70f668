"""What several commands share: types of arguments, where results may be written, and the console."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from rich.console import Console


def words(text: str) -> tuple[str, ...]:
    """A comma-separated list."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A comma-separated list of known names."""

    def parse(text: str) -> tuple[str, ...]:
        found = words(text)
        if not found or any(word not in known for word in found):
            raise argparse.ArgumentTypeError(f"want some of {', '.join(known)}, got {text!r}")
        return found

    return parse


def positive(text: str) -> int:
    """A positive number."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"want a positive number, got {text!r}")
    return int(text)


def unwritable(**files: str | None) -> str | None:
    """Why a file cannot be written, by its option; None: all can. Asked before minutes of work are spent."""
    for option, path in files.items():
        if path is not None and (not Path(path).resolve().parent.is_dir() or Path(path).is_dir()):
            return f"--{option} {path}: want a file in a folder that exists"
    return None


def screen() -> Console:
    """Of standard output. A pipe or a file has no width, and takes tables as wide as they are."""
    found = Console()
    return found if found.is_terminal else Console(width=200)


def complain(args: argparse.Namespace, why: str, code: int = 2) -> int:
    """Say on stderr why the command does not go on; returns the exit code."""
    Console(stderr=True).print(f"tersekv {args.command}: {why}", markup=False, highlight=False, soft_wrap=True)
    return code
