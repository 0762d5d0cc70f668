"""Writes to a K/V cache: `append` and `rope_append`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..calls import AppendCall, RopeAppendCall
from ..dispatch.checks import FLOAT, dtype, tensor
from ..dispatch.launch_cache import CallSignature, lookup
from ..formats import FP8
from ..layers import PagedKVLayer
from .registry import dispatch_call
from .scales import attributes, multiplying_scale

KVLike = PagedKVLayer | Tensor | Sequence[Tensor]


def append(k: Tensor, v: Tensor, cache: KVLike, slot_mapping: Tensor, *, backend: str | None = None) -> None:
    """Quantise new rows and write them into the paged cache, in place.

        >>> tersekv.append(k, v, cache[0], torch.arange(100))

        k, v:          [T, H, D], [T, H, Dv]  bf16 | fp16 | fp32, any strides with a dense last dimension; or the dtype
                       of an `fp8_e4m3` or `fp8_e5m2` cache: codes, copied as they are, no scale applied
        cache:         PagedKVLayer, or bare tensors as `PagedKVLayer.of` reads them
        slot_mapping:  [T]  int32 | int64 | uint32; page * S + offset; negative skips the row; slots beyond the cache
                       are dropped (in checked mode they raise)

    Codes and scales are those of docs/formats.md on every backend, to the bit. Two tokens with the same slot
    leave one of them. Raises ValueError or TypeError for arguments that do not fit together.
    """
    c = cache if isinstance(cache, PagedKVLayer) else PagedKVLayer.of(cache)
    k_scale, k_scale_t = multiplying_scale(c.k_scale, "k_scale")
    v_scale, v_scale_t = multiplying_scale(c.v_scale, "v_scale")
    format, v_format, more = attributes(c)
    inputs = (
        k, v, c.k, c.v, c.k_scale_cache, c.v_scale_cache, slot_mapping, None, None, None, None, k_scale_t, v_scale_t,
        *more,
    )  # fmt: skip
    options = (c.format, k_scale, v_scale, backend)
    if lookup("append", options, inputs) is None:
        call = AppendCall(
            k, v, c.k, c.v, c.k_scale_cache, c.v_scale_cache, slot_mapping, None, None, None, None,
            format, k_scale, k_scale_t, v_scale, v_scale_t, False, v_format, *more,
        )  # fmt: skip
        dispatch_call("append", call, backend, CallSignature(options, inputs))


def rope_append(
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    cache: KVLike,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    *,
    interleaved: bool = False,
    q_out: Tensor | None = None,
    q_dtype: torch.dtype | None = None,
    q_scale: float | Tensor = 1.0,
    backend: str | None = None,
) -> Tensor | None:
    """Rotate q and k, quantise, and write k and v into the paged cache, in one pass. Returns the rotated q.

        >>> q = torch.randn(100, 8, 64)
        >>> q = tersekv.rope_append(q, k, v, cache[0], slot_mapping, cos_sin_cache, positions)
        >>> q.shape
        torch.Size([100, 8, 64])

        q:              [T, Hq, D] or None
        k, v:           [T, H, D], [T, H, Dv]  bf16 | fp16 | fp32
        cache:          PagedKVLayer, or bare tensors as `PagedKVLayer.of` reads them; written in place
        slot_mapping:   [T]  page * S + offset; negative skips the row (its q is still rotated)
        cos_sin_cache:  [max_pos, R] fp32, [cos(R/2) | sin(R/2)]; R <= D rotates the first R dimensions only
        positions:      [T]  rows of cos_sin_cache; out of range: the token is dropped and its q row is 0
                        (in checked mode it raises)
        interleaved:    pairs (2i, 2i + 1) instead of NeoX's (i, i + R/2)
        q_out, q_dtype: where and in what q is returned: bf16, fp16, fp32, e4m3 or e5m2; default: q's own
        q_scale:        dequantising scale of an 8-bit q_out (q ≈ code × q_scale); wider ones are divided by it too

    RoPE and the scale are computed in fp32, with no 16-bit rounding before the cast. Raises ValueError or
    TypeError for arguments that do not fit together.
    """
    c = cache if isinstance(cache, PagedKVLayer) else PagedKVLayer.of(cache)
    k_scale, k_scale_t = multiplying_scale(c.k_scale, "k_scale")
    v_scale, v_scale_t = multiplying_scale(c.v_scale, "v_scale")
    q_mul, q_scale_t = multiplying_scale(q_scale, "q_scale")
    format, v_format, more = attributes(c)
    inputs = (
        q, None, k, None, v, cos_sin_cache, positions, q_out, None, c.k, c.v, c.k_scale_cache, c.v_scale_cache,
        slot_mapping, None, None, None, None, q_scale_t, k_scale_t, v_scale_t, *more,
    )  # fmt: skip
    options = (c.format, interleaved, type(interleaved), q_mul, k_scale, v_scale, q_dtype, backend)  # 1 is no bool
    cached = lookup("rope_append", options, inputs)
    if cached is not None:
        return cached[0] if cached else q_out

    q_out = query_output(q, q_out, q_dtype)
    try:
        r = cos_sin_cache.shape[1]
        whole = k.shape[2] == r and (q is None or q.shape[2] == r) and (q_out is None or q_out.shape[2] == r)
    except (AttributeError, IndexError):
        whole = False  # the checks below raise
    parts: Any = (q, None, k, None, q_out, None) if whole else split_rope_nope(q, k, q_out, cos_sin_cache)
    q_rope, q_nope, k_rope, k_nope, q_rope_out, q_nope_out = parts
    call = RopeAppendCall(
        q_rope, q_nope, k_rope, k_nope, v, cos_sin_cache, positions, q_rope_out, q_nope_out,
        c.k, c.v, c.k_scale_cache, c.v_scale_cache, slot_mapping, None, None, None, None,
        format, interleaved, q_mul, q_scale_t, k_scale, k_scale_t, v_scale, v_scale_t, False, False, v_format, *more,
    )  # fmt: skip
    made_outputs = {} if q_out is None else {"q_rope_out": q_out}
    nope = {"q_nope": "q_rope", "k_nope": "k_rope", "q_nope_out": "q_rope_out"}
    dispatch_call("rope_append", call, backend, CallSignature(options, inputs, made_outputs, nope))
    return q_out


def query_output(
    q: Tensor | None, out: Tensor | None, q_dtype: torch.dtype | None, name: str = "q_out"
) -> Tensor | None:
    """Returns the tensor that receives the query: `out`, or a new one. name: of the argument `out`."""
    if q_dtype is not None:
        own = out.dtype if isinstance(out, Tensor) else None
        dtype("q_dtype", q_dtype, FLOAT + FP8, own, name)
    if not isinstance(q, Tensor) or out is not None:
        return out
    if q_dtype is None and q.is_contiguous():
        return torch.empty_like(q)  # half a microsecond less
    return torch.empty(*q.shape, dtype=q_dtype or q.dtype, device=q.device)


def split_rope_nope(
    q: Tensor | None, k: Tensor, q_out: Tensor | None, cos_sin_cache: Tensor
) -> tuple[Tensor | None, ...]:
    """Returns the first R columns and the rest (None if empty) of q, of k, and of q_out."""
    rows = {"q": q, "k": k, "q_out": q_out}
    for name, x in rows.items():
        if x is not None or name == "k":
            tensor(name, x, "T H D")
    tensor("cos_sin_cache", cos_sin_cache, "max_pos R")
    r, d = cos_sin_cache.shape[1], k.shape[2]
    if r > d:
        raise ValueError(f"cos_sin_cache: want [max_pos, R] with R <= head_dim={d}, got {list(cos_sin_cache.shape)}")
    parts: list[Tensor | None] = []
    for x in rows.values():
        parts += (x, None) if x is None or x.shape[-1] <= r else x.split_with_sizes((r, x.shape[-1] - r), -1)
    return tuple(parts)
