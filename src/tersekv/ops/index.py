"""What an indexer stores and asks with: `index_append` and `index_query`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..calls import IndexAppendCall, IndexQueryCall
from ..dispatch.checks import tensor
from ..dispatch.launch_cache import CallSignature, lookup
from ..formats import index_format
from ..index_layers import PagedIndexLayer
from ..scalars import as_bool, as_float
from .registry import dispatch_call

Norm = tuple[Tensor, Tensor, float]


def index_append(
    k: Tensor,
    cache: PagedIndexLayer,
    slot_mapping: Tensor,
    *,
    norm: Norm | None = None,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    rope: str = "first",
    round16: bool = False,
    backend: str | None = None,
) -> None:
    """Norm, rotate and quantise an indexer's new keys and write them into its paged cache, in place.

        >>> tersekv.index_append(index_k, index_cache[0], torch.arange(100))

        k:              [T, Di]  bf16 | fp16 | fp32
        cache:          PagedIndexLayer; its rotation is applied last
        slot_mapping:   [T]  page * S + offset; negative skips the row; beyond the cache: dropped
        norm:           (weight [Di], bias [Di], eps) of a LayerNorm, applied first; None: k is normed already
        cos_sin_cache:  [max_pos, R] fp32, [cos(R/2) | sin(R/2)]; None: no RoPE
        positions:      [T]  rows of cos_sin_cache; a token without one is dropped
        interleaved:    pairs (2i, 2i + 1), GLM-5's and V4's; False: (i, i + R/2), V3.2's
        rope:           which R of the Di columns are rotary: "first" or "last" (HY V4, V4)
        round16:        round to k's dtype after norm, RoPE and rotation each, as engines do that compute in 16 bits

    index_fp8 stores e4m3 codes and one fp32 scale a row, 2^ceil(log2(max(amax, 1e-4) / 448)), of more than 128 columns
    one for each 128. The law is DeepSeek-V3.2-Exp's. Raises ValueError or TypeError for arguments that do not fit.
    """
    c = _layer(cache)
    weight, bias, epsilon = _norm(norm)
    last = _is_last(rope)
    interleaved, round16 = as_bool("interleaved", interleaved), as_bool("round16", round16)
    inputs = (k, c.k, c.scale, slot_mapping, weight, bias, cos_sin_cache, positions)
    options = (c.format, epsilon, interleaved, last, c.rotation is not None, round16, backend)
    if lookup("index_append", options, inputs) is not None:
        return
    call = IndexAppendCall(*inputs, *options[:-1])
    dispatch_call("index_append", call, backend, CallSignature(options, inputs))


def index_query(
    q: Tensor,
    weights: Tensor | None = None,
    *,
    cache: PagedIndexLayer,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    interleaved: bool = False,
    rope: str = "first",
    round16: bool = False,
    weight_scale: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate and quantise an indexer's queries as its keys are, and fold their scales into the heads' weights.

        >>> index_q, head_weights = torch.randn(2, 64, 128), torch.randn(2, 64)
        >>> q8, w = tersekv.index_query(index_q, head_weights, cache=index_cache[0])
        >>> q8.shape, q8.dtype, w.shape
        (torch.Size([2, 64, 128]), torch.float8_e4m3fn, torch.Size([2, 64]))

        q:             [T, Hi, Di]  bf16 | fp16 | fp32
        weights:       [T, Hi]  bf16 | fp16 | fp32; None: ones
        cache:         PagedIndexLayer: its format and rotation
        cos_sin_cache, positions, interleaved, rope, round16:  as in `index_append`; a token without a position gets 0
        weight_scale:  multiplies the weights; None: (Hi * Di)^-0.5, the models'

    Returns (q, weights): q in the dtype of the cache's codes, weights [T, Hi] fp32, with index_fp8 times q's scale, one
    a head; other formats have none. Raises ValueError or TypeError for arguments that do not fit.
    """
    c = _layer(cache)
    last = _is_last(rope)
    interleaved, round16 = as_bool("interleaved", interleaved), as_bool("round16", round16)
    scale = None if weight_scale is None else as_float("weight_scale", weight_scale, "a number or None")
    inputs = (q, weights, cos_sin_cache, positions, None, None)
    options = (c.format, c.k.shape[-1], interleaved, last, c.rotation is not None, round16, scale, backend)
    cached = lookup("index_query", options, inputs)
    if cached is not None:
        return cached[0], cached[1]
    tensor("q", q, "T Hi Di")
    if q.shape[2] != c.k.shape[-1]:
        raise ValueError(f"q: want [T, Hi, Di={c.k.shape[-1]} as in cache], got {list(q.shape)}")
    if scale is None:
        scale = (q.shape[1] * q.shape[2]) ** -0.5 if q.shape[1] * q.shape[2] else 1.0
    q_out = torch.empty(q.shape, dtype=index_format(c.format).storage, device=q.device)
    weights_out = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    call = IndexQueryCall(
        q, weights, cos_sin_cache, positions, q_out, weights_out, c.format, interleaved, last, c.rotation is not None,
        round16, scale,
    )  # fmt: skip
    made = {"q_out": q_out, "weights_out": weights_out}
    dispatch_call("index_query", call, backend, CallSignature(options, inputs, made))
    return q_out, weights_out


def _layer(cache: Any) -> PagedIndexLayer:
    if not isinstance(cache, PagedIndexLayer):
        every = isinstance(getattr(cache, "layers", None), tuple)
        more = ", the cache of all layers (take one: cache[i])" if every else ""
        raise TypeError(f"cache: want PagedIndexLayer, got {type(cache).__name__}{more}")
    return cache


def _norm(norm: Any) -> tuple[Tensor | None, Tensor | None, float]:
    if norm is None:
        return None, None, 0.0
    if not isinstance(norm, Sequence) or len(norm) != 3:
        raise TypeError(f"norm: want (weight, bias, eps) or None, got {type(norm).__name__}")
    return norm[0], norm[1], as_float("norm[2]", norm[2])


def _is_last(rope: Any) -> bool:
    if rope not in ("first", "last"):
        raise ValueError(f"rope: want 'first' or 'last', got {rope!r}")
    return rope == "last"
