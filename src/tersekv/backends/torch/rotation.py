"""Hadamard rotation and channel scales of a K/V cache, applied to appended rows, queries and outputs.

Every step on a row is one fp32 operation, in the order defined in calls.py, so that all backends give the same codes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .quantize import reciprocal


def row(x: Tensor, signs: Tensor | None, channel_scale: Tensor | None) -> Tensor:
    """Returns rows [T, H, D] fp32, scaled and rotated for quantization."""
    if channel_scale is not None:
        x = x * reciprocal(channel_scale)
    return x if signs is None else _butterflies(x, signs, len(signs))


def query(call: Any) -> Tensor:
    """Returns q of a call in fp32, scaled and rotated to match the stored keys."""
    q = call.q.to(torch.float32)
    if call.k_channel_scale is not None:
        q = q * _of_query_heads(call.k_channel_scale, q)
    return q if call.k_signs is None else _butterflies(q, call.k_signs, len(call.k_signs))


def output(call: Any, out: Tensor) -> Tensor:
    """Returns outputs [T, Hq, Dv] fp32, unrotated and multiplied by the channel scales of V."""
    scale = call.v_channel_scale
    return back(out, call.v_signs, None if scale is None else _of_query_heads(scale, out))


def back(x: Tensor, signs: Tensor | None, channel_scale: Tensor | None) -> Tensor:
    """Returns outputs [..., Dv], unrotated and multiplied by channel scales that broadcast against them."""
    if signs is not None:
        b = len(signs)
        # The transpose of a row's rotation: Hadamard first, then the signs.
        x = (_butterflies(x, None, b).unflatten(-1, (-1, b)) * signs).flatten(-2)
    return x if channel_scale is None else x * channel_scale


def hadamard(x: Tensor) -> Tensor:
    """Returns rows [..., D] times Sylvester's Hadamard matrix / sqrt(b), in blocks of the largest power of two that
    divides D."""
    return _butterflies(x, None, x.shape[-1] & -x.shape[-1])


def _butterflies(x: Tensor, signs: Tensor | None, b: int) -> Tensor:
    """Returns x [..., D] times signs and Sylvester's Hadamard matrix / sqrt(b), in blocks of b columns."""
    y = x.unflatten(-1, (-1, b))
    if signs is not None:
        y = y * signs
    h = 1
    while h < b:
        pairs = y.unflatten(-1, (-1, 2, h))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        h *= 2
    return (y * b**-0.5).flatten(-2)


def _of_query_heads(channel_scale: Tensor, x: Tensor) -> Tensor:
    """Returns channel scales [H, D] repeated for query heads [..., H * G, D]."""
    return channel_scale.repeat_interleave(x.shape[-2] // channel_scale.shape[0], 0)
