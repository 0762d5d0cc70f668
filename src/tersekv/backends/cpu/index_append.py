"""index_append, natively: norms, rotates and quantizes an indexer's keys, and stores them in its pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tersekv.formats import INDEX, INDEX_BLOCK, index_format

from . import library, records
from .append import make_append_record
from .library import BoundLaunch, NativeLaunch
from .records import (
    CODES,
    DTYPES,
    NO_NORM,
    NO_TENSOR,
    NO_WEIGHTS,
    NONE,
    CallFacts,
    HeadWeights,
    LayerNorm,
    RowTransform,
    RowWrite,
    Scale,
    StridedTensor,
)

_TENSORS = ("k", "k_cache", "k_scale_cache", "slot_mapping", "norm_weight", "norm_bias", "cos_sin_cache", "positions")


def why_not(f: SimpleNamespace) -> str | None:
    return library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts, norm = CallFacts(f, _TENSORS), NO_NORM
    if f.norm_weight is not None:
        norm = LayerNorm(
            facts.at("norm_weight"), facts.at("norm_bias"), facts.dtype("norm_weight"), facts.dtype("norm_bias"),
            f.epsilon,
        )  # fmt: skip
    row_write = make_index_row_write(
        facts, "k", facts.address_index_and_strides("k_cache"), INDEX_BLOCK,
        facts.address_index_and_strides("k_scale_cache"), norm,
    )  # fmt: skip
    return NativeLaunch("append", make_append_record(facts, f.k, f.k_cache, [row_write]), _TENSORS)


def make_index_row_write(
    facts: CallFacts, tensor_name: str, out: StridedTensor, columns_per_scale: int,
    scale_cache: StridedTensor = NO_TENSOR, norm: LayerNorm = NO_NORM, head_weights: HeadWeights = NO_WEIGHTS,
) -> RowWrite:  # fmt: skip
    """Returns how an indexer's rows are written: keys "k" to its pages, queries "q" to a tensor."""
    f, fmt, rows = facts.f, index_format(facts.f.format), getattr(facts.f, tensor_name)
    d, rotary = rows.shape[-1], 0 if f.cos_sin_cache is None else f.cos_sin_cache.shape[1]
    return RowWrite(
        facts.address_index_and_strides(tensor_name), NO_TENSOR, d, 0, rotary > 0,
        rows.shape[1] if len(rows.shape) == 3 else 1, tensor_name == "k", out, CODES[fmt.code],
        records.INDEX_SCALE if fmt.scale == INDEX else records.NO_SCALE, scale_cache, columns_per_scale, 0, 0,
        Scale(1.0, NONE), RowTransform(NONE, d & -d if f.hadamard else 0, NONE), norm, d - rotary if f.rope_last else 0,
        DTYPES[rows.dtype] if f.round16 else 0, head_weights,
    )  # fmt: skip


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
