"""Hadamard rotation and channel scales of a K/V cache, applied to appended rows, queries and outputs.

Every step on a row is one fp32 operation, in the order defined in calls.py, so that all backends give the same codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .quantize import reciprocal

Attributes = tuple[Tensor | None, Tensor | None]


def divide_by_channel_scale_and_rotate(x: Tensor, signs: Tensor | None, channel_scale: Tensor | None) -> Tensor:
    """Returns rows [T, H, D] fp32, divided by channel scales and rotated for quantization."""
    if channel_scale is not None:
        x = x * reciprocal(channel_scale)
    return x if signs is None else _signed_normalized_hadamard(x, signs, len(signs))


def multiply_q_by_k_channel_scale_and_rotate(call: Any) -> Tensor:
    """Returns q of a call in fp32, scaled and rotated to match the stored keys."""
    q = call.q.to(torch.float32)
    if call.k_channel_scale is not None:
        q = q * _of_query_heads(call.k_channel_scale, q)
    return q if call.k_signs is None else _signed_normalized_hadamard(q, call.k_signs, len(call.k_signs))


def unrotate_and_multiply_by_v_channel_scale(call: Any, out: Tensor) -> Tensor:
    """Returns outputs [T, Hq, Dv] fp32, unrotated and multiplied by the channel scales of V."""
    scale = call.v_channel_scale
    scale = None if scale is None else _of_query_heads(scale, out)
    return unrotate_and_multiply_by_channel_scale(out, call.v_signs, scale)


def unrotate_and_multiply_by_channel_scale(x: Tensor, signs: Tensor | None, channel_scale: Tensor | None) -> Tensor:
    """Returns outputs [..., Dv], unrotated and multiplied by channel scales that broadcast against them."""
    if signs is not None:
        b = len(signs)
        # The transpose of a row's rotation: Hadamard first, then the signs.
        x = (_signed_normalized_hadamard(x, None, b).unflatten(-1, (-1, b)) * signs).flatten(-2)
    return x if channel_scale is None else x * channel_scale


def convert_rotation_and_scales_and_find_unchanged_heads(
    x: Tensor, src: Attributes, dst: Attributes
) -> tuple[Tensor, Tensor]:
    """Returns stored rows [T, H, D] fp32 with the attributes of another cache, and which heads [H] had the same.

    src, dst:  (signs, channel scale), either may be None
    """
    (signs, channels), (new_signs, new_channels) = src, dst
    heads, dim = x.shape[1:]
    if not any(isinstance(a, Tensor) for a in (*src, *dst)):
        return x, x.new_ones(heads, dtype=torch.bool)
    old, new = (x.new_ones(heads, dim) if c is None else c for c in (channels, new_channels))
    same_channels = (old == new).all(-1)
    same = same_channels
    if signs is not None and new_signs is not None:
        same = same & (signs == new_signs).all()
    elif signs is not new_signs:
        same = torch.zeros_like(same)
    y = unrotate_and_multiply_by_channel_scale(x, signs, None)
    y = torch.where(same_channels[:, None], y, y * old * reciprocal(new))
    return torch.where(same[:, None], x, divide_by_channel_scale_and_rotate(y, new_signs, None)), same


def hadamard(x: Tensor) -> Tensor:
    """Returns rows [..., D] times Sylvester's Hadamard matrix / sqrt(b), in blocks of the largest power of two that
    divides D."""
    return _signed_normalized_hadamard(x, None, x.shape[-1] & -x.shape[-1])


def _signed_normalized_hadamard(x: Tensor, signs: Tensor | None, block_size: int) -> Tensor:
    """Returns x [..., D] times signs and Sylvester's Hadamard matrix / sqrt(b), in blocks of block_size columns."""
    y = x.unflatten(-1, (-1, block_size))
    if signs is not None:
        y = y * signs
    h = 1
    while h < block_size:
        pairs = y.unflatten(-1, (-1, 2, h))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        h *= 2
    return (y * block_size**-0.5).flatten(-2)


def _of_query_heads(channel_scale: Tensor, x: Tensor) -> Tensor:
    """Returns channel scales [H, D] repeated for query heads [..., H * G, D]."""
    return channel_scale.repeat_interleave(x.shape[-2] // channel_scale.shape[0], 0)
