"""Absorbed MLA decode, natively: a key is a latent row beside a rotary one, a value the latent row again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tersekv.formats import BATCH_INVARIANCE, TENSOR, latent_format, rope_dtype

from . import library
from .attention import attention_record_without_kv
from .library import BoundLaunch, NativeLaunch
from .records import CODES, DTYPES, NONE, CallFacts, PagedMatrix, Scale, StridedTensor

_TENSORS = (
    "q_nope", "q_pe", "ckv", "kpe", "ckv_scale_cache", "page_table", "seq_lens", "cu_seqlens_q", "out", "lse",
    "softmax_scale_t", "kv_scale_t", "out_scale_t",
)  # fmt: skip
# Formats that the kernels read; the codes of another they would misread.
_FORMATS = ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "fp8_ds_mla")
SUPPORTS = (BATCH_INVARIANCE,)
_STEP = 8  # columns that kernels load together


def why_not(f: SimpleNamespace) -> str | None:
    if f.format not in _FORMATS:
        return f"has no {f.format}"
    rank, rotary = f.ckv.shape[-1], f.kpe.shape[-1]
    if rank % _STEP or rotary % _STEP or not rank:
        return f"wants a latent rank and a rotary size in steps of {_STEP}, got {rank} and {rotary}"
    return library.why_not(f)


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts, fmt = CallFacts(f, _TENSORS), latent_format(f.format)
    record = attention_record_without_kv(facts, heads=1, group=f.q_nope.shape[1])
    scales = (
        StridedTensor(NONE) if f.ckv_scale_cache is None else facts.strided_tensor("ckv_scale_cache", has_heads=False)
    )
    width = fmt.scale_block or 0
    latent = PagedMatrix(
        facts.strided_tensor("ckv", has_heads=False), CODES[fmt.code], f.ckv.shape[-1], scales, width,
        DTYPES[torch.float32], facts.strided_tensor("q_nope"),
    )  # fmt: skip
    record.num_keys, record.keys[0], record.values = 1, latent, latent
    if f.kpe.shape[-1]:
        record.num_keys = 2
        record.keys[1] = PagedMatrix(
            facts.strided_tensor("kpe", has_heads=False), DTYPES[rope_dtype(fmt)], f.kpe.shape[-1], StridedTensor(NONE),
            0, 0, facts.strided_tensor("q_pe"),
        )  # fmt: skip
    record.num_pages, record.page_size = f.ckv.shape[:2]
    record.query_dtype = facts.dtype("q_nope")
    # Only a per-tensor scale applies to the rotary part.
    one = Scale(1.0, NONE, 0)
    record.k_scale = record.v_scale = facts.scale("kv_scale") if fmt.scale == TENSOR else one
    return NativeLaunch("attention", record, _TENSORS)


def run(call: Any, config: NativeLaunch) -> None:
    config.run(call)


def bind(config: NativeLaunch, at: dict[str, int]) -> BoundLaunch:
    return config.bind(at)
