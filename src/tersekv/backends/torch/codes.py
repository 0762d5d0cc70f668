"""Codes → fp32 values, exactly.

What a code is, the format says (`KVFormat.code`); a dtype tells it only where codes are numbers of that dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .quantize import nibbles, unpack_e2m1

_DTYPES = {
    "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2, "int8": torch.int8,
}  # fmt: skip


def may_read(x: Tensor) -> bool:
    """Whether reading a value of x on the host costs nothing."""
    return x.device.type == "cpu"


def code_of(dtype: torch.dtype) -> str:
    """The code of a tensor whose elements are numbers of its dtype."""
    return next(code for code, known in _DTYPES.items() if known == dtype)


def to_float(codes: Tensor, code: str) -> Tensor:
    """Codes [..., W], 8-bit ones seen as uint8 → fp32 [..., W]; 4 bits: [..., 2W], the low nibble first."""
    if code == "e2m1":
        return unpack_e2m1(codes)
    return (nibbles(codes) if code == "int4" else codes.view(_DTYPES[code])).to(torch.float32)
