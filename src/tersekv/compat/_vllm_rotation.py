"""The rotation that vLLM's int4 caches hold: rows times diag(signs), then Sylvester's Hadamard matrix, unnormalised.

vLLM's own differs in its last bits from device to device (a bf16 product on a GPU). This one is its CPU's, everywhere:
butterflies in fp32, and one rounding to the rows' dtype.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ..attributes import MAX_BLOCK, signs
from ..tracing import tracing

_cached_signs = cache(signs)


def rotated(name: str, x: Tensor) -> Tensor:
    """Rows [T, H, D] as vLLM's int4 stores them, in their dtype. Raises ValueError unless D is a power of 2 up to
    512."""
    dim = x.shape[-1]
    if dim < 2 or dim & (dim - 1) or dim > MAX_BLOCK:
        want = f"a head_dim that is a power of 2 up to {MAX_BLOCK} for INT4_PER_TOKEN_HEAD"
        raise ValueError(f"{name}: want {want}, got {dim}")
    y, away = x.to(torch.float32) * (signs if tracing() else _cached_signs)(dim, x.device), 1
    while away < dim:
        a, b = y.unflatten(-1, (-1, 2, away)).unbind(-2)
        y = torch.stack((a + b, a - b), -2).flatten(-3)
        away *= 2
    return y.to(x.dtype)
