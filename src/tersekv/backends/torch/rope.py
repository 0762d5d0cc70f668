"""Rotary embedding in fp32: two products and one sum, each rounded on its own (no fused multiply-add), so that every
backend can give the same bits."""

from __future__ import annotations

import torch
from torch import Tensor


def lookup_cos_sin_and_validity(cos_sin_cache: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns cos and sin [T, R/2] of each position, and which positions [T] lie in the table.

    cos_sin_cache [max_pos, R] fp32 is [cos | sin]; positions [T] int32 | int64 | uint32, clamped to the table.
    """
    position = positions.to(torch.int64)
    size, r = cos_sin_cache.shape
    known = (position >= 0) & (position < size)
    if size == 0:
        cos = sin = cos_sin_cache.new_zeros(position.numel(), r // 2)
        return cos, sin, known
    rows = cos_sin_cache[position.clamp(0, size - 1)]
    return rows[:, : r // 2], rows[:, r // 2 :], known


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Returns x [T, H, R] or [T, R] fp32 rotated by cos, sin [T, R/2]: pairs (i, i + R/2); interleaved (2i, 2i + 1)."""
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
