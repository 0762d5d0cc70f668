"""What MAX's MLA branches do, in tersekv's calls: `mla_prefill` of one chunk, or `mla_decode_branch`."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .. import env
from ..layers import PagedLatentLayer
from ..ops.mla import MLAPrefillPlan, mla_prefill
from ..ops.mla_branch import mla_decode_branch
from ._adapt import number, renamed, tensor, whole
from ._max_cache import PagedKVCacheCollection

_NAMES = {
    "out": "output",
    "ckv": "kv_collection.blocks",
    "kpe": "kv_collection.blocks",
    "latent cache": "kv_collection.blocks",
    "kv_lora_rank": "length of kv_norm_gamma",
    "page_table": "kv_collection.lookup_table",
    "cache_lens": "kv_collection.cache_lengths",
    "max_q_len": "kv_collection.max_seq_length",
    "cu_seqlens_q": "input_row_offsets",
    "softmax_scale": "scale",
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
    if env.checked():
        _has_room(step, length)
    plan = MLAPrefillPlan(rows[None], starts[None], [length], _max_q_len(step))
    kv_c, k_pe = _raw(step, layer)
    call = partial(
        mla_prefill, softmax_scale=number("scale", step.scale), epsilon=number("epsilon", step.epsilon),
        kv_b_proj_scale=weight_scale, kv_c=kv_c, k_pe=k_pe, out=step.output, backend=step.backend,
    )  # fmt: skip
    kv = step.kv_collection
    renamed(
        _NAMES, call, step.q, layer, kv.lookup_table, kv.cache_lengths, step.input_row_offsets, step.freqs_cis,
        step.kv_norm_gamma, weight, plan,
    )  # fmt: skip


def decode(step: Step, w_uk: Tensor, w_uk_scale: Tensor | None, w_uv: Tensor, w_uv_scale: Tensor | None) -> None:
    layer, kv = _layer(step), step.kv_collection
    kv_c, k_pe = _raw(step, layer)
    call = partial(
        mla_decode_branch, softmax_scale=number("scale", step.scale), epsilon=number("epsilon", step.epsilon),
        w_uk_scale=w_uk_scale, w_uv_scale=w_uv_scale, kv_c=kv_c, k_pe=k_pe, cu_seqlens_q=step.input_row_offsets,
        max_q_len=_max_q_len(step), out=step.output, backend=step.backend,
    )  # fmt: skip
    renamed(
        _NAMES, call, step.q, layer, kv.lookup_table, kv.cache_lengths, step.freqs_cis, step.kv_norm_gamma, w_uk, w_uv
    )


def _raw(step: Step, layer: PagedLatentLayer) -> tuple[Tensor | None, Tensor | None]:
    """The new tokens' raw latents, if they are not in the cache."""
    raw, rank = step.kv_input, layer.ckv.shape[-1]
    if raw is None:
        return None, None
    tensor("kv_input", raw, "T, L + R")
    return raw[:, :rank], raw[:, rank:]


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


def _has_room(step: Step, length: int) -> None:
    """Raise unless the buffer holds all tokens of the requests, the new ones included. Synchronises with the device."""
    cached, starts = (x.to(torch.int64) for x in (step.kv_collection.cache_lengths, step.input_row_offsets))
    if len(starts) == len(cached) + 1:  # else the operation says what is wrong
        held = int((cached + starts.diff()).sum())
        if held > length:
            raise ValueError(f"buffer_length: want room for the {held} tokens that the requests hold, got {length}")


def _max_q_len(step: Step) -> int:
    return min(step.kv_collection.max_seq_length, step.q.shape[0])


def check_granularity(m: int, n: int, k: int) -> None:
    for name, want, got in (("m", 1, m), ("n", 128, n), ("k", 128, k)):
        if got != want:
            raise ValueError(f"{name}_scale_granularity: want {want}, got {got!r}")


def check_variant(mask_str: str, score_mod_str: str, target: str | None, q: object) -> None:
    """Raise for type parameters that are not the one variant there is, or not the tensors' device."""
    own = "cpu" if isinstance(q, Tensor) and q.device.type == "cpu" else "gpu"
    for name, want, got in (
        ("mask_str", "causal", mask_str),
        ("score_mod_str", "no_pos", score_mod_str),
        ("target", own, own if target is None else target),
    ):
        if got != want:
            raise ValueError(f"{name}: want {want!r}, got {got!r}")
