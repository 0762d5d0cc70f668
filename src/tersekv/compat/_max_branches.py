"""What MAX's MLA branches do, in tersekv's calls: one prefill; or project, append, decode, project."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..layers import PagedLatentLayer
from ..ops.mla import MLAPrefillPlan, mla_decode, mla_prefill, mla_project
from ._adapt import renamed, tensor, whole
from ._max_cache import PagedKVCacheCollection
from ._max_project import check_weight

_NAMES = {
    "out": "output",
    "ckv": "kv_collection.blocks",
    "kpe": "kv_collection.blocks",
    "latent cache": "kv_collection.blocks",
    "page_table": "kv_collection.lookup_table",
    "cache_lens": "kv_collection.cache_lengths",
    "seq_lens": "kv_collection.cache_lengths",
    "cu_seqlens_q": "input_row_offsets",
    "plan.buffer_row_offsets": "buffer_row_offsets",
    "plan.cache_offsets": "cache_offsets",
    "plan.buffer_lengths": "buffer_length",
    "kv_c": "kv_input",
    "k_pe": "kv_input",
}


class Step(NamedTuple):
    """What every branch is given."""

    output: Tensor
    q: Tensor
    input_row_offsets: Tensor
    freqs_cis: Tensor
    kv_norm_gamma: Tensor
    kv_collection: PagedKVCacheCollection
    layer_idx: int
    scale: float
    epsilon: float
    kv_input: Tensor | None
    backend: str | None


def prefill(
    step: Step, rows: Tensor, starts: Tensor, buffer_length: int, weight: Tensor, weight_scale: Tensor | None
) -> None:
    length = whole("buffer_length", buffer_length)
    if length == 0:
        return
    layer = _layer(step)
    for name, x in (("buffer_row_offsets", rows), ("cache_offsets", starts)):
        if tensor(name, x).dim() != 1:
            raise ValueError(f"{name}: want [B + 1], one chunk, got {list(x.shape)}")
    lengths, offsets = step.kv_collection.cache_lengths, step.input_row_offsets
    if lengths.device.type == offsets.device.type == "cpu" and len(offsets) == len(lengths) + 1:
        held = int(_lens(step).sum())
        if held > length:
            raise ValueError(f"buffer_length: want room for the {held} tokens that the requests hold, got {length}")
    plan = MLAPrefillPlan(rows[None], starts[None], [length], _max_q_len(step))
    _fused(step, step.q, layer, plan, weight, weight_scale)


def decode(step: Step, w_uk: Tensor, w_uk_scale: Tensor | None, w_uv: Tensor, w_uv_scale: Tensor | None) -> None:
    q, output, kv = step.q, step.output, step.kv_collection
    layer = _layer(step)
    rank, rope = layer.ckv.shape[-1], layer.kpe.shape[-1]
    heads, nope, dim_v = q.shape[1], q.shape[2] - rope, output.shape[-1]
    # Before anything is written: a call that fails half way could not be repeated.
    check_weight("w_uk", (heads, rank, nope), w_uk, w_uk_scale, q.dtype)
    check_weight("w_uv", (heads, dim_v, rank), w_uv, w_uv_scale, q.dtype)
    if q.shape[0] == 0:
        return
    # A plan without rows makes mla_prefill rotate and append only; it looks at no value of its offsets and the weight.
    nothing = step.input_row_offsets[None]
    weight = q.new_empty(1, rank).expand(heads * (nope + dim_v), rank)
    q_pe = q.new_empty(q.shape[0], heads, rope)
    lens = q.new_empty(len(kv.cache_lengths), dtype=torch.int32)
    plan = MLAPrefillPlan(nothing, nothing, [0], _max_q_len(step))
    _fused(step, q, layer, plan, weight, None, q_pe, lens)
    attend = partial(
        mla_decode, softmax_scale=float(step.scale), cu_seqlens_q=step.input_row_offsets, max_q_len=_max_q_len(step),
        backend=step.backend,
    )  # fmt: skip
    backend = step.backend
    queries = mla_project(q[..., :nope], w_uk, weight_scale=w_uk_scale, backend=backend), q_pe
    latents = renamed(_NAMES, attend, queries, layer, kv.lookup_table, lens)
    mla_project(latents, w_uv, weight_scale=w_uv_scale, out=output, backend=backend)


def _fused(
    step: Step, q: Tensor, layer: PagedLatentLayer, plan: MLAPrefillPlan, weight: Tensor, weight_scale: Tensor | None,
    q_pe_out: Tensor | None = None, seq_lens_out: Tensor | None = None,
) -> None:  # fmt: skip
    kv, rank, raw = step.kv_collection, layer.ckv.shape[-1], step.kv_input
    kv_c, k_pe = (None, None) if raw is None else (raw[..., :rank], raw[..., rank:])
    call = partial(
        mla_prefill, softmax_scale=float(step.scale), epsilon=float(step.epsilon), kv_b_proj_scale=weight_scale,
        kv_c=kv_c, k_pe=k_pe, out=step.output, q_pe_out=q_pe_out, seq_lens_out=seq_lens_out, backend=step.backend,
    )  # fmt: skip
    renamed(
        _NAMES, call, q, layer, kv.lookup_table, kv.cache_lengths, step.input_row_offsets, step.freqs_cis,
        step.kv_norm_gamma, weight, plan,
    )  # fmt: skip


def _layer(step: Step) -> PagedLatentLayer:
    """The layer's rows; the shapes that are looked at before the operations check them all."""
    if not isinstance(step.kv_collection, PagedKVCacheCollection):
        raise TypeError(f"kv_collection: want PagedKVCacheCollection, got {type(step.kv_collection).__name__}")
    for name, x in (("output", step.output), ("q", step.q)):
        if tensor(name, x).dim() != 3:
            raise ValueError(f"{name}: want [T, H, dim], got {list(x.shape)}")
    for name, x, dims in (
        ("kv_norm_gamma", step.kv_norm_gamma, 1), ("input_row_offsets", step.input_row_offsets, 1),
    ):  # fmt: skip
        if tensor(name, x).dim() != dims:
            raise ValueError(f"{name}: want {dims} dimension, got {list(x.shape)}")
    cache = step.kv_collection.get_key_cache(step.layer_idx)
    return renamed(_NAMES, cache.latent, step.kv_norm_gamma.shape[0])


def _lens(step: Step) -> Tensor:
    """Tokens of each request in the cache, the new ones included: [B] int32."""
    return step.kv_collection.cache_lengths.to(torch.int32) + step.input_row_offsets.to(torch.int32).diff()


def _max_q_len(step: Step) -> int:
    return min(step.kv_collection.max_seq_length, step.q.shape[0])


def check_granularity(m: int, n: int, k: int) -> None:
    if (m, n, k) != (1, 128, 128):
        raise ValueError(f"m, n, k_scale_granularity: want 1, 128, 128, got {m}, {n}, {k}")


def check_variant(mask_str: str, score_mod_str: str) -> None:
    for name, want, got in (("mask_str", "causal", mask_str), ("score_mod_str", "no_pos", score_mod_str)):
        if got != want:
            raise ValueError(f"{name}: want {want!r}, got {got!r}")
