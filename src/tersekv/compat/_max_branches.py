"""What MAX's MLA branches do, in tersekv's calls: `mla_prefill` of one chunk, or `mla_decode_branch`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import env
from ..calls import MLADecodeBranchCall, MLAPrefillCall
from ..dispatch.launch_cache import CallSignature
from ..layers import PagedLatentLayer
from ..ops.attention import max_query_rows
from ..ops.registry import dispatch_call
from ._adapt import as_float, as_host_int, lookup_cached, tensor, with_caller_names
from ._max_cache import PagedKVCache, PagedKVCacheCollection

_NAMES = {
    "out": "output",
    "ckv": "kv_collection.blocks",
    "kpe": "kv_collection.blocks",
    "cache": "kv_collection.blocks",
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


_JOINED = {"kpe": "ckv", "ckv_scale_cache": "ckv", "k_pe": "kv_c"}  # of one tensor each


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
    length = as_host_int("buffer_length", buffer_length)
    if length == 0:
        return
    cache = _cache(step)
    given = step.freqs_cis, step.kv_norm_gamma, weight, weight_scale, rows, starts, step.output, None, None, None, None
    signature, found = _lookup_cached(step, cache, "mla_prefill", (step.input_row_offsets, *given), length)
    if found is not None:
        return
    latent, kv_c, k_pe = _latents(step, cache)
    for name, x in (("buffer_row_offsets", rows), ("cache_offsets", starts)):
        if tensor(name, x).dim() != 1:
            raise ValueError(f"{name}: want [B + 1], one chunk, got {list(x.shape)}")
    nope_rows = step.q.shape[1] * (step.q.shape[2] - latent.kpe.shape[-1])
    if tensor("kv_b_proj", weight).dim() != 2 or len(weight) <= nope_rows:
        raise ValueError(f"kv_b_proj: want more than H * Dn = {nope_rows} rows, got {list(weight.shape)}")
    if env.checked():
        _has_room(step, length)
    call = MLAPrefillCall(
        step.q, kv_c, k_pe, latent.ckv, latent.kpe, latent.ckv_scale_cache, cache.lookup_table, cache.cache_lengths,
        step.input_row_offsets, step.freqs_cis, step.kv_norm_gamma, weight, weight_scale, rows[None], starts[None],
        step.output, None, [length], latent.format, _max_q_len(step), as_float("scale", step.scale),
        as_float("epsilon", step.epsilon), 1.0, None, "exact",
    )  # fmt: skip
    with_caller_names(_NAMES, dispatch_call, "mla_prefill", call, step.backend, signature)


def decode(step: Step, w_uk: Tensor, w_uk_scale: Tensor | None, w_uv: Tensor, w_uv_scale: Tensor | None) -> None:
    cache = _cache(step)
    weights = step.freqs_cis, step.kv_norm_gamma, w_uk, w_uk_scale, w_uv, w_uv_scale
    given = step.input_row_offsets, *weights, step.output, None, None
    signature, found = _lookup_cached(step, cache, "mla_decode_branch", given)
    if found is not None:
        return
    latent, kv_c, k_pe = _latents(step, cache)
    tensor("w_uv", w_uv, "H, Dv, L")
    call = MLADecodeBranchCall(
        step.q, kv_c, k_pe, latent.ckv, latent.kpe, latent.ckv_scale_cache, cache.lookup_table, cache.cache_lengths,
        step.input_row_offsets, *weights, step.output, latent.format, _max_q_len(step), as_float("scale", step.scale),
        None, as_float("epsilon", step.epsilon), 1.0, None,
    )  # fmt: skip
    with_caller_names(_NAMES, dispatch_call, "mla_decode_branch", call, step.backend, signature)


def _lookup_cached(
    step: Step, cache: PagedKVCache, op: str, rest: tuple, length: int = 0
) -> tuple[CallSignature, list[Tensor] | None]:
    """`lookup_cached`: rows of a layer are one tensor, and so are raw ones; rest: the tensors of `op` behind the
    lengths."""
    given = step.q, step.kv_input, None, cache.blocks, None, None, cache.lookup_table, cache.cache_lengths, *rest
    options = ("max", length, cache.max_seq_length, cache.scales is None, step.scale, step.epsilon, step.backend)
    return lookup_cached(_NAMES, op, options, given, _JOINED)


def _cache(step: Step) -> PagedKVCache:
    if not isinstance(step.kv_collection, PagedKVCacheCollection):
        raise TypeError(f"kv_collection: want PagedKVCacheCollection, got {type(step.kv_collection).__name__}")
    return step.kv_collection.get_key_cache(step.layer_idx)


def _latents(step: Step, cache: PagedKVCache) -> tuple[PagedLatentLayer, Tensor | None, Tensor | None]:
    """The layer's rows, and the new tokens' raw latents, if they are not in the cache; shapes that are looked at before
    the operations check them all."""
    for name, x in (("output", step.output), ("q", step.q)):
        if tensor(name, x).dim() != 3:
            raise ValueError(f"{name}: want [T, H, dim], got {list(x.shape)}")
    for name, x, dims in (
        ("kv_norm_gamma", step.kv_norm_gamma, 1), ("input_row_offsets", step.input_row_offsets, 1),
    ):  # fmt: skip
        if tensor(name, x).dim() != dims:
            raise ValueError(f"{name}: want {dims} dimension, got {list(x.shape)}")
    latent: PagedLatentLayer = with_caller_names(_NAMES, cache.latent, step.kv_norm_gamma.shape[0])
    raw, rank = step.kv_input, latent.ckv.shape[-1]
    if raw is None:
        return latent, None, None
    tensor("kv_input", raw, "T, L + R")
    return latent, raw[:, :rank], raw[:, rank:]


def _has_room(step: Step, length: int) -> None:
    """Raise unless the buffer holds all tokens of the requests, the new ones included. Synchronises with the device."""
    cached, starts = (x.to(torch.int64) for x in (step.kv_collection.cache_lengths, step.input_row_offsets))
    if len(starts) == len(cached) + 1:  # else the operation says what is wrong
        held = int((cached + starts.diff()).sum())
        if held > length:
            raise ValueError(f"buffer_length: want room for the {held} tokens that the requests hold, got {length}")


def _max_q_len(step: Step) -> int:
    kv, offsets = step.kv_collection, step.input_row_offsets
    return with_caller_names(_NAMES, max_query_rows, step.q.shape[0], kv.cache_lengths, offsets, kv.max_seq_length)


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
