"""index_select, natively: scores of some rows at a time, and what is taken of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from . import library
from .index_scores import index_scores_or_select_launch
from .library import BoundLaunch, NativeLaunch


def why_not(f: SimpleNamespace) -> str | None:
    return library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    return index_scores_or_select_launch(f, f.width, (f.k, f.keep_first, f.keep_last, f.open_group))


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
