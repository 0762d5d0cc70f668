"""Codes → fp32 values, exactly.

`KVFormat.code` names the encoding; a tensor's dtype does so only if its elements are numbers of that dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantize import unpack_e2m1_to_fp32, unpack_nibbles

_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip


def may_read(x: Tensor) -> bool:
    """Returns whether the host can read values of x without a synchronisation."""
    return x.device.type == "cpu"


def code_of(dtype: torch.dtype) -> str:
    """Returns the code of a tensor whose elements are numbers of its dtype."""
    return next(code for code, known in _DTYPES.items() if known == dtype)


def to_float(codes: Tensor, code: str) -> Tensor:
    """Codes [..., W], 8-bit ones viewed as uint8 → fp32 [..., W]; of 4 bits [..., 2W], the low nibble first."""
    if code == "e2m1":
        return unpack_e2m1_to_fp32(codes)
    return (unpack_nibbles(codes) if code == "int4" else codes.view(_DTYPES[code])).to(torch.float32)
