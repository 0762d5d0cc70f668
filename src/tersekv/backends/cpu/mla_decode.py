"""Absorbed MLA decode, natively: a key is a latent row beside a rotary one, a value the latent row again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tersekv.formats import (
    BATCH_INVARIANCE,
    LATENT_SINKS,
    LISTS,
    LSE_OF_KEYS,
    MAX_LOGITS,
    TENSOR,
    TWO_SETS,
    KVFormat,
    latent_format,
    rope_dtype,
)

from . import library
from .attention import add_key_set, make_attention_record_without_key_sets
from .library import BoundLaunch, NativeLaunch
from .records import (
    CODES,
    DTYPES,
    E8M0,
    NONE,
    Attention,
    CallFacts,
    PagedMatrix,
    Scale,
    paged_matrix,
)

_OF_A_SET = ("ckv", "kpe", "ckv_scale_cache", "page_table", "indices", "index_lens", "kv_scale_t")
_TENSORS = (
    "q_nope", "q_pe", "seq_lens", "cu_seqlens_q", "out", "lse", "softmax_scale_t", "out_scale_t", "sinks", "max_logits",
    *_OF_A_SET, *(f"extra_{name}" for name in _OF_A_SET),
)  # fmt: skip
# Formats that the kernels read; the codes of another they would misread.
_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla", "fp8_v4", "fp8_v41")
SUPPORTS = (BATCH_INVARIANCE, LISTS, LATENT_SINKS, TWO_SETS, LSE_OF_KEYS, MAX_LOGITS)
_STEP = 8  # columns that kernels load together


def why_not(f: SimpleNamespace) -> str | None:
    unknown = [x for x in (f.format, f.extra_format or f.format) if x not in _FORMATS]
    if unknown:
        return f"has no {unknown[0]}"
    rank, rotary = f.out.shape[-1], f.kpe.shape[-1]
    if rank % _STEP or rotary % _STEP or not rank:
        return f"wants a latent rank and a rotary size in steps of {_STEP}, got {rank} and {rotary}"
    return library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts = CallFacts(f, _TENSORS)
    record = make_attention_record_without_key_sets(facts, num_kv_heads=1, group=f.q_nope.shape[1])
    record.query_dtype = facts.dtype("q_nope")
    record.sinks, record.lse_of_keys = facts.at("sinks"), f.lse_of_keys
    record.max_logits = facts.address_index_and_strides("max_logits")
    _add_latent_key_set(record, facts, f.format, "")
    if f.extra_indices is not None:
        _add_latent_key_set(record, facts, f.extra_format, "extra_")
    return NativeLaunch("attention", record, _TENSORS)


def _add_latent_key_set(record: Attention, facts: CallFacts, format: str, tensor_prefix: str) -> None:
    f, fmt = facts.f, latent_format(format)
    latent = _latent_matrix_and_bf16_tail_if_any(facts, fmt, tensor_prefix)
    keys = list(latent)
    if f.kpe.shape[-1]:
        rotary, dtype = facts.address_index_and_strides(f"{tensor_prefix}kpe", has_heads=False), DTYPES[rope_dtype(fmt)]
        keys.append(paged_matrix(rotary, dtype, f.kpe.shape[-1], facts.address_index_and_strides("q_pe")))
    # Only a per-tensor scale applies to the rotary part.
    scale = facts.scale(f"{tensor_prefix}kv_scale") if fmt.scale == TENSOR else Scale(1.0, NONE, 0)
    add_key_set(record, facts, keys, latent, getattr(f, f"{tensor_prefix}ckv").shape[:2], scale, scale, tensor_prefix)


def _latent_matrix_and_bf16_tail_if_any(facts: CallFacts, fmt: KVFormat, tensor_prefix: str) -> list[PagedMatrix]:
    """Returns the codes of a latent cache; and its last columns, if they are bf16 in the same rows."""
    codes = facts.address_index_and_strides(f"{tensor_prefix}ckv", has_heads=False)
    q = facts.address_index_and_strides("q_nope")
    columns = facts.f.out.shape[-1] - fmt.tail
    latent = paged_matrix(codes, CODES[fmt.code], columns, q)
    if fmt.scale_dtype is not None:
        latent.scales = facts.address_index_and_strides(f"{tensor_prefix}ckv_scale_cache", has_heads=False)
        latent.width = fmt.scale_block
        latent.scale_dtype = E8M0 if fmt.scale_dtype == torch.uint8 else DTYPES[fmt.scale_dtype]
    if not fmt.tail:
        return [latent]
    tail = paged_matrix(codes, DTYPES[torch.bfloat16], fmt.tail, q)
    tail.first_byte, tail.query_column = columns, columns
    return [latent, tail]


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
