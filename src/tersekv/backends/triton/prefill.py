"""Paged prefill in Triton, by the kernels of decode: for rows that all come from the pages it is the same attention."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from . import decode

run, bind = decode.run, decode.bind


def why_not(f: SimpleNamespace) -> str | None:
    if f.k is not None:
        return "has no kernel for rows that k and v bring"
    return decode.why_not(as_decode(f))


def configure(f: SimpleNamespace) -> Any:
    return decode.configure(as_decode(f))


def as_decode(f: SimpleNamespace) -> SimpleNamespace:
    """The facts as decode's: without a mask its rows are causal."""
    return SimpleNamespace(**vars(f), mask=None)
