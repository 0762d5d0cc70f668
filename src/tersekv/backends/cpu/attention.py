"""Paged attention, natively; new rows of a prefill, if any, are keys outside the pages."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tersekv.formats import BATCH_INVARIANCE, BLOCK, CHANNELS, LISTS, PAIRS, ROTATION, TOKEN_HEAD, KVFormat, pair_of

from . import library
from .library import BoundLaunch, NativeLaunch
from .records import (
    CODES,
    DTYPES,
    NO_MATRIX,
    NO_TRANSFORM,
    NONE,
    TRANSFORMS,
    Attention,
    CallFacts,
    IndexTensor,
    KeySet,
    PagedMatrix,
    Scale,
    StridedTensor,
    paged_matrix,
)

SUPPORTS = (PAIRS, ROTATION, CHANNELS, BATCH_INVARIANCE, LISTS)
TENSORS = (
    "q", "k_cache", "v_cache", "k_scale_cache", "v_scale_cache", "page_table", "seq_lens", "cu_seqlens_q", "mask",
    "sinks", "out", "lse", "softmax_scale_t", "k_scale_t", "v_scale_t", "out_scale_t", *TRANSFORMS, "k", "v", "indices",
    "index_lens",
)  # fmt: skip
# Formats that the kernels read; the codes of another they would misread.
_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head", "nvfp4",
            "int4_per_token_head")  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    unknown = [x.name for x in pair_of(f) if x.name not in _FORMATS]
    return f"has no {unknown[0]}" if unknown else library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts, (k_format, v_format) = CallFacts(f, TENSORS), pair_of(f)
    record = make_attention_record_without_key_sets(
        facts, num_kv_heads=f.k_cache.shape[2], group=f.q.shape[1] // f.k_cache.shape[2]
    )
    keys = _paged_matrix_record(facts, "k", k_format, f.q.shape[2])
    keys.query = facts.address_index_and_strides("q")
    values = _paged_matrix_record(facts, "v", v_format, f.out.shape[2])
    add_key_set(record, facts, [keys], [values], f.k_cache.shape[:2], facts.scale("k_scale"), facts.scale("v_scale"))
    record.query_dtype = facts.dtype("q")
    record.mask, record.window, record.sinks = facts.index_tensor("mask"), f.window, facts.at("sinks")
    record.softcap = f.softcap
    record.key_transform, record.value_transform = facts.row_transform("k"), facts.row_transform("v")
    if f.k is not None:
        record.new_keys, record.new_values = (
            _new_rows_as_single_token_pages(facts, "k"),
            _new_rows_as_single_token_pages(facts, "v"),
        )
    return NativeLaunch("attention", record, TENSORS)


def make_attention_record_without_key_sets(facts: CallFacts, num_kv_heads: int, group: int) -> Attention:
    """Returns a record of requests, outputs and scales, without keys, sinks, mask or transforms; see `add_key_set`."""
    f, record = facts.f, Attention()
    record.heads, record.group = num_kv_heads, group
    record.rows, record.max_q_len = f.out.shape[0], f.max_q_len
    record.batch_invariant, record.prefill_invariant = f.batch_invariant, getattr(f, "prefill_invariant", False)
    record.seq_lens, record.cu_seqlens_q = facts.index_tensor("seq_lens"), facts.index_tensor("cu_seqlens_q")
    record.mask, record.sinks = IndexTensor(NONE), NONE
    record.key_transform = record.value_transform = NO_TRANSFORM
    record.new_keys = record.new_values = NO_MATRIX
    record.out, record.lse = facts.address_index_and_strides("out"), facts.address_index_and_strides("lse")
    record.max_logits, record.out_dtype = StridedTensor(NONE), facts.dtype("out")
    record.softmax_scale, record.out_scale = facts.scale("softmax_scale"), facts.scale("out_scale")
    return record


def add_key_set(
    record: Attention, facts: CallFacts, key_matrices: Sequence[PagedMatrix], value_matrices: Sequence[PagedMatrix],
    num_pages_and_page_size: Sequence[int], k_scale: Scale, v_scale: Scale, tensor_prefix: str = "",
) -> None:  # fmt: skip
    """Add a set of keys to a record. tensor_prefix: of the names of its tensors."""
    table = getattr(facts.f, f"{tensor_prefix}page_table")
    added: KeySet = record.sets[record.num_sets]
    record.num_sets += 1
    added.num_keys, added.num_values = len(key_matrices), len(value_matrices)
    for to, found in ((added.keys, key_matrices), (added.values, value_matrices)):
        for i in range(2):
            to[i] = found[i] if i < len(found) else NO_MATRIX
    added.page_table = facts.index_tensor(f"{tensor_prefix}page_table")
    added.num_pages, added.page_size = num_pages_and_page_size
    if table is not None:
        record.requests, added.max_pages = table.shape
    added.k_scale, added.v_scale = k_scale, v_scale
    added.lists = facts.key_lists(tensor_prefix, causal=table is not None and not tensor_prefix)


def _paged_matrix_record(facts: CallFacts, k_or_v: str, fmt: KVFormat, columns: int) -> PagedMatrix:
    m = paged_matrix(facts.address_index_and_strides(f"{k_or_v}_cache"), CODES[fmt.code], columns)
    if fmt.scale in (BLOCK, TOKEN_HEAD):
        m.scales = facts.address_index_and_strides(f"{k_or_v}_scale_cache")
        m.width, m.scale_dtype = fmt.scale_block or columns, DTYPES[fmt.scale_dtype or torch.float32]
    return m


def _new_rows_as_single_token_pages(facts: CallFacts, name: str) -> PagedMatrix:
    """Returns rows [T, H, D] as a cache with pages of one token."""
    x, (token, head) = getattr(facts.f, name), facts.strides(name)[:2]
    at = StridedTensor(facts.at(name), (token, 0, head))
    return paged_matrix(at, DTYPES[x.dtype], x.shape[2])


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
