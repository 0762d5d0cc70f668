"""Types of arguments that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def names(known: tuple[str, ...]) -> Callable[[str], tuple[str, ...]]:
    """A comma-separated list of known names."""

    def parse(text: str) -> tuple[str, ...]:
        words = tuple(word.strip() for word in text.split(",") if word.strip())
        if not words or any(word not in known for word in words):
            raise argparse.ArgumentTypeError(f"want some of {', '.join(known)}, got {text!r}")
        return words

    return parse
