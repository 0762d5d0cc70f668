"""rope_append, natively: rotates queries and keys, quantizes, and stores keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from . import append
from .append import make_kv_row_write, make_query_row_writes
from .library import BoundLaunch, NativeLaunch
from .records import TRANSFORMS, CallFacts

SUPPORTS = append.SUPPORTS
_TENSORS = (
    "q_rope", "q_nope", "k_rope", "k_nope", "v", "cos_sin_cache", "positions", "q_rope_out", "q_nope_out",
    "k_cache", "v_cache", "k_scale_cache", "v_scale_cache", "q_scale_t", "k_scale_t", "v_scale_t",
    *append.SLOT_FIELDS, *TRANSFORMS,
)  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    return append.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts = CallFacts(f, _TENSORS)
    row_writes = [
        *make_query_row_writes(facts), make_kv_row_write(facts, "k", "k_rope", "k_nope", apply_rope=True),
        make_kv_row_write(facts, "v"),
    ]  # fmt: skip
    return NativeLaunch("append", append.make_append_record(facts, f.k_rope, f.k_cache, row_writes), _TENSORS)


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
