"""Rows of an indexer, as it stores keys and asks with queries: norm, RoPE, rotation, cast."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tersekv.formats import FP8, INDEX, MIN_INDEX_AMAX, KVFormat

from .quantize import cast_fp8, ceil_power_of_two, reciprocal, row_abs_max
from .rope import apply_rope, lookup_cos_sin_and_validity
from .rotation import hadamard


def layer_norm_in_fp64_to_fp32(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Returns fp32 rows [..., D], normed: in fp64, rounded once."""
    y = x.double()
    y = y - y.mean(-1, keepdim=True)
    y = y / (y.square().mean(-1, keepdim=True) + weight.new_full((), epsilon, dtype=torch.float32).double()).sqrt()
    return (y * weight.double() + bias.double()).float()


def rope_hadamard_and_validity_of_tokens(
    call: Any, x: Tensor, dtype_if_round16: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Returns fp32 rows [T, D] or [T, Hi, D] with RoPE and rotation, and which tokens have a position (None: all).

    dtype_if_round16:  of the caller's rows, to which `round16` rounds
    """
    known = None
    if call.cos_sin_cache is not None:
        cos, sin, known = lookup_cos_sin_and_validity(call.cos_sin_cache, call.positions)
        r, d = call.cos_sin_cache.shape[1], x.shape[-1]
        parts = list(x.split((d - r, r) if call.rope_last else (r, d - r), -1))
        parts[call.rope_last] = apply_rope(parts[call.rope_last], cos, sin, call.interleaved)
        x = round_if_round16(call, torch.cat(parts, -1), dtype_if_round16)
    if call.hadamard:
        x = round_if_round16(call, hadamard(x), dtype_if_round16)
    return x, known


def round_if_round16(call: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).float() if call.round16 else x


def quantize_index_rows_to_codes_and_scales_if_any(
    x: Tensor, f: KVFormat, columns_per_scale: int
) -> tuple[Tensor, Tensor | None]:
    """Returns codes [..., D] of fp32 rows, and fp32 scales [..., ceil(D / columns_per_scale)] or None."""
    if f.scale != INDEX:
        return cast_fp8(x, f.storage) if f.storage in FP8 else x.to(f.storage), None
    parts, scales = [], []
    for block in x.split(columns_per_scale, -1):
        amax = row_abs_max(block).clamp(min=MIN_INDEX_AMAX)
        scale = ceil_power_of_two(amax / amax.new_full((), f.max_value))
        parts.append(cast_fp8(block * reciprocal(scale)[..., None], f.storage))
        scales.append(scale)
    # Some devices cannot join fp8.
    codes = torch.cat([part.view(torch.uint8) for part in parts], -1).view(f.storage)
    return codes, torch.stack(scales, -1)
