"""Paged attention on Hopper: `decode`'s kernels or `prefill`'s."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ...formats import BATCH_INVARIANCE, CHANNELS, LISTS, PAIRS, ROTATION
from ..host.bind import BoundLaunches
from ..host.select_kernel import select_attention_module_and_why_not
from . import decode, prefill

SUPPORTS = (PAIRS, ROTATION, CHANNELS, BATCH_INVARIANCE, LISTS)


def why_not(f: SimpleNamespace) -> str | None:
    if f.prefill_invariant:  # one kernel would have to split keys for few rows, and not for many
        return f"takes no {BATCH_INVARIANCE} between prefill and decode"
    if f.indices is not None and f.op != "decode":
        return "takes no lists of keys (indices) in prefill"
    return select_attention_module_and_why_not(f, decode, prefill)[1]


def configure(f: SimpleNamespace) -> decode.Config | prefill.Config:
    return select_attention_module_and_why_not(f, decode, prefill)[0].configure(f)


def run(call: Any, config: decode.Config | prefill.Config) -> None:
    config.launches(call)


def bind(config: decode.Config | prefill.Config, at: dict[str, int]) -> BoundLaunches | None:
    return config.launches.bind(at)
