"""index_query, natively: rotates and quantizes an indexer's queries, and scales its heads' weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from . import library
from .append import make_append_record
from .index_append import make_index_row_write
from .index_scores import address_index_and_first_strides
from .library import BoundLaunch, NativeLaunch
from .records import CallFacts, HeadWeights

_TENSORS = ("q", "weights", "cos_sin_cache", "positions", "q_out", "weights_out")


def why_not(f: SimpleNamespace) -> str | None:
    return library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts = CallFacts(f, _TENSORS)
    weights = HeadWeights(
        address_index_and_first_strides(facts, "weights"), address_index_and_first_strides(facts, "weights_out"),
        0 if f.weights is None else facts.dtype("weights"), f.weight_scale,
    )  # fmt: skip
    # A query has one scale, however many columns.
    row_write = make_index_row_write(
        facts, "q", facts.address_index_and_strides("q_out"), f.q.shape[-1], head_weights=weights
    )
    return NativeLaunch("append", make_append_record(facts, f.q, None, [row_write]), _TENSORS)


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
