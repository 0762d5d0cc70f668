"""merge_states, natively."""

from __future__ import annotations

from ctypes import c_int64
from types import SimpleNamespace
from typing import Any

from . import library
from .library import BoundLaunch, NativeLaunch
from .records import CallFacts, Merge

_TENSORS = ("outs", "lses", "out", "lse")


def why_not(f: SimpleNamespace) -> str | None:
    return library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts, (parts, rows, heads, columns) = CallFacts(f, _TENSORS), f.outs.shape
    outs, lses = ((c_int64 * 3)(*facts.strides(name)[:3]) for name in ("outs", "lses"))
    record = Merge(
        parts, rows, heads, columns, facts.dtype("outs"), facts.dtype("out"), facts.at("outs"), outs,
        facts.at("lses"), lses, facts.address_index_and_strides("out"), facts.address_index_and_strides("lse"),
    )  # fmt: skip
    return NativeLaunch("merge", record, _TENSORS)


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
