"""rope_append, natively: rotate queries and keys, quantise, and write keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from . import append
from .append import kv_stream, query_streams
from .library import Bound, Launch
from .records import TURNS, Facts

TAKES = append.TAKES
_TENSORS = (
    "q_rope", "q_nope", "k_rope", "k_nope", "v", "cos_sin_cache", "positions", "q_rope_out", "q_nope_out",
    "k_cache", "v_cache", "k_scale_cache", "v_scale_cache", "q_scale_t", "k_scale_t", "v_scale_t",
    *append.PLACES, *TURNS,
)  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    return append.why_not(f)


def configure(f: SimpleNamespace) -> Launch:
    facts = Facts(f, _TENSORS)
    streams = [*query_streams(facts), kv_stream(facts, "k", "k_rope", "k_nope", rotated=True), kv_stream(facts, "v")]
    return Launch("append", append.append(facts, f.k_rope, f.k_cache, streams), _TENSORS)


def run(call: Any, config: Launch) -> None:
    config.run(call)


def bind(config: Launch, at: dict[str, int]) -> Bound:
    return config.bind(at)
