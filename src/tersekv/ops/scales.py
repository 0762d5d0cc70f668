"""Scales as callers give them: a Python float, or a 1-element (or per-head) fp32 tensor on the device."""

from __future__ import annotations

from torch import Tensor

from ..counts import number, single
from ..layers import PagedKVLayer
from ..tracing import tracing

TURNS = ("k_signs", "v_signs", "k_channel_scale", "v_channel_scale")
Turn = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def split(scale: float | Tensor, name: str = "scale") -> tuple[float, Tensor | None]:
    """(float, tensor) of a scale for a call record; the tensor wins where there is one."""
    if type(scale) is float:
        return scale, None
    if isinstance(scale, Tensor):
        return 1.0, scale.reshape(1) if scale.dim() == 0 else scale
    return number(name, scale, "a number or a Tensor"), None


def attributes(layer: PagedKVLayer) -> tuple[str, str, Turn]:
    """format and v_format of a call's record ("" where V's is K's), and the tensors that come after them."""
    k, v = (layer.format, "") if isinstance(layer.format, str) else layer.format
    return k, v, (layer.k_signs, layer.v_signs, layer.k_channel_scale, layer.v_channel_scale)  # as TURNS names them


def multiplier(scale: float | Tensor, name: str = "scale") -> tuple[float, Tensor | None]:
    """As `split`, with a float turned into its fp32 reciprocal: what an append multiplies with. Where torch is tracing
    the float stays, and the operator turns it (`registry`): it may be a symbol, which has no fp32 value yet."""
    if type(scale) is float and scale == 1.0:
        return 1.0, None
    value, tensor = split(scale, name)
    if tensor is not None:
        return 1.0, tensor
    return (value if tracing() else reciprocal(value, name)), None


def reciprocal(value: float, name: str) -> float:
    """The fp32 reciprocal of a scale. Raises ValueError unless fp32 holds both, positive."""
    if not value > 0:
        raise ValueError(f"{name}: want a positive number, got {value}")
    stored = single(value)
    inverse = single(1.0 / stored) if stored else 0.0
    if not 0.0 < inverse < float("inf"):
        raise ValueError(f"{name}: want a positive number that fp32 holds, and its reciprocal too, got {value}")
    return inverse
