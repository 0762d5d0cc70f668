"""append, natively: quantizes rows and stores them. Builds the records of all append operations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tersekv.formats import BLOCK, CHANNELS, GROUP, NONE, PAIRS, ROTATION, TENSOR, TOKEN_HEAD, UE8M0, KVFormat, pair_of

from . import library, records
from .library import BoundLaunch, NativeLaunch
from .records import (
    CODES,
    DTYPES,
    NO_NORM,
    NO_TENSOR,
    NO_TRANSFORM,
    NO_WEIGHTS,
    Append,
    CallFacts,
    RowTransform,
    RowWrite,
    Scale,
    StridedTensor,
)

SUPPORTS = (PAIRS, ROTATION, CHANNELS)
SLOT_FIELDS = ("slot_mapping", "batch_indices", "kv_positions", "kv_indptr", "kv_indices")
_TENSORS = ("k", "v", "k_cache", "v_cache", "k_scale_cache", "v_scale_cache", "k_scale_t", "v_scale_t", *SLOT_FIELDS,
            *records.TRANSFORMS)  # fmt: skip
# Formats that the kernels store; an unknown one they would cast.
_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4",
            "int4_per_token_head")  # fmt: skip
_KINDS = {
    NONE: records.NO_SCALE, TENSOR: records.TENSOR_SCALE, TOKEN_HEAD: records.ROW_SCALE, BLOCK: records.BLOCK_SCALE,
    GROUP: records.GROUP_SCALE, UE8M0: records.UE8M0_SCALE,
}  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    unknown = [x.name for x in pair_of(f) if x.name not in _FORMATS]
    return f"has no {unknown[0]}" if unknown else library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts = CallFacts(f, _TENSORS)
    record = make_append_record(facts, f.k, f.k_cache, [make_kv_row_write(facts, "k"), make_kv_row_write(facts, "v")])
    return NativeLaunch("append", record, _TENSORS)


def make_kv_row_write(
    facts: CallFacts,
    k_or_v: str,
    tensor_name: str | None = None,
    further_columns_tensor_name: str = "",
    apply_rope: bool = False,
) -> RowWrite:
    """Returns how rows are written to the cache of "k" or "v": of the tensors
    `tensor_name` (default: `k_or_v`) and `further_columns_tensor_name`, their columns side by side."""
    fmt, tensor_name = pair_of(facts.f)["kv".index(k_or_v)], tensor_name or k_or_v
    scales = facts.address_index_and_strides(f"{k_or_v}_scale_cache")
    return make_quantized_row_write(
        facts, tensor_name, fmt, facts.address_index_and_strides(f"{k_or_v}_cache"), scales,
        facts.scale(f"{k_or_v}_scale"), further_columns_tensor_name, apply_rope, facts.row_transform(k_or_v),
    )  # fmt: skip


def make_quantized_row_write(
    facts: CallFacts, tensor_name: str, fmt: KVFormat, out_cache: StridedTensor, scale_cache: StridedTensor,
    host_or_tensor_scale: Scale, further_columns_tensor_name: str = "",
    apply_rope: bool = False, row_transform: RowTransform = NO_TRANSFORM,
) -> RowWrite:  # fmt: skip
    """Returns how rows are quantized to a format and written to a cache."""
    f = facts.f
    x, y = getattr(f, tensor_name), getattr(f, further_columns_tensor_name) if further_columns_tensor_name else None
    return RowWrite(
        facts.address_index_and_strides(tensor_name),
        facts.address_index_and_strides(further_columns_tensor_name) if y is not None else NO_TENSOR,
        x.shape[-1], 0 if y is None else y.shape[-1], apply_rope, x.shape[1] if len(x.shape) == 3 else 1, True,
        out_cache, CODES[fmt.code], _KINDS[fmt.scale], scale_cache, fmt.scale_block or 0, fmt.scales(x.shape[-1]),
        fmt.tail, host_or_tensor_scale, row_transform, NO_NORM, 0, 0, NO_WEIGHTS,
    )  # fmt: skip


def make_query_row_writes(facts: CallFacts) -> list[RowWrite]:
    """Returns the row writes of query rows to q_rope_out and q_nope_out; none without a query."""
    row_writes = []
    for name, apply_rope in (("q_rope", True), ("q_nope", False)):
        x = getattr(facts.f, name)
        if x is not None:
            row_writes.append(RowWrite(
                facts.address_index_and_strides(name), NO_TENSOR, x.shape[-1], 0, apply_rope, x.shape[1], False,
                facts.address_index_and_strides(f"{name}_out"), facts.dtype(f"{name}_out"), records.NO_SCALE, NO_TENSOR,
                0, 0, 0, facts.scale("q_scale"), NO_TRANSFORM, NO_NORM, 0, 0, NO_WEIGHTS,
            ))  # fmt: skip
    return row_writes


def make_append_record(facts: CallFacts, rows_fact: Any, cache_fact: Any | None, row_writes: list[RowWrite]) -> Append:
    """Returns the record of an append: its row writes, the slots of tokens, and the rotary table if there is one."""
    f, record = facts.f, Append()
    record.num_row_writes = len(row_writes)
    for i, row_write in enumerate(row_writes):
        record.row_writes[i] = row_write
    record.tokens, record.dtype = rows_fact.shape[0], DTYPES[rows_fact.dtype]
    if cache_fact is not None:
        record.num_pages, record.page_size = cache_fact.shape[:2]
    for field, name in zip(("slots", "batch", "kv_positions", "indptr", "indices"), SLOT_FIELDS, strict=True):
        setattr(record, field, facts.index_tensor(name))
    if getattr(f, "kv_indptr", None) is not None:
        record.num_requests, record.num_indices = f.kv_indptr.shape[0] - 1, f.kv_indices.shape[0]
    record.cos_sin = records.NONE
    if getattr(f, "cos_sin_cache", None) is not None:
        record.cos_sin, record.cos_sin_stride = facts.at("cos_sin_cache"), facts.strides("cos_sin_cache")[0]
        record.max_position, record.rotary = f.cos_sin_cache.shape
        record.positions = facts.index_tensor("positions")
        record.interleaved = f.interleaved
    for option in ("zero_padding", "scales_quantize"):
        setattr(record, option, getattr(f, option, False))
    record.widen = getattr(f, "widen", True)
    return record


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
