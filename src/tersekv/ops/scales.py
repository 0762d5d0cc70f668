"""Scales as callers pass them: a Python float, or a 1-element (or per-head) fp32 tensor on the device."""

from __future__ import annotations

from torch import Tensor

from ..layers import PagedKVLayer
from ..scalars import as_float, round_to_fp32
from ..tracing import tracing

ATTRIBUTE_FIELDS = ("k_signs", "v_signs", "k_channel_scale", "v_channel_scale")
Turn = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def float_and_tensor(scale: float | Tensor, name: str = "scale") -> tuple[float, Tensor | None]:
    """Returns (float, tensor) of a scale for a call record; a tensor overrides the float."""
    if type(scale) is float:
        return scale, None
    if isinstance(scale, Tensor):
        return 1.0, scale.reshape(1) if scale.dim() == 0 else scale
    return as_float(name, scale, "a number or a Tensor"), None


def attributes(layer: PagedKVLayer) -> tuple[str, str, Turn]:
    """Returns format and v_format of a call record ("" if equal), and the attribute tensors that follow them."""
    k, v = (layer.format, "") if isinstance(layer.format, str) else layer.format
    return k, v, (layer.k_signs, layer.v_signs, layer.k_channel_scale, layer.v_channel_scale)  # as ATTRIBUTE_FIELDS


def multiplying_scale(scale: float | Tensor, name: str = "scale") -> tuple[float, Tensor | None]:
    """Returns `float_and_tensor` with the float inverted to the fp32 multiplier of an append. While torch traces the
    float stays, and the operator inverts it (`registry`): it may be a symbol, which has no fp32 value yet."""
    if type(scale) is float and scale == 1.0:
        return 1.0, None
    value, tensor = float_and_tensor(scale, name)
    if tensor is not None:
        return 1.0, tensor
    return (value if tracing() else reciprocal(value, name)), None


def reciprocal(value: float, name: str) -> float:
    """Returns the fp32 reciprocal of a scale. Raises ValueError unless fp32 holds both, positive."""
    if not value > 0:
        raise ValueError(f"{name}: want a positive number, got {value}")
    stored = round_to_fp32(value)
    inverse = round_to_fp32(1.0 / stored) if stored else 0.0
    if not 0.0 < inverse < float("inf"):
        raise ValueError(f"{name}: want a positive number that fp32 holds, and its reciprocal too, got {value}")
    return inverse
