"""Codes → fp32 values, exactly, in a few passes over memory.

PyTorch's own cast from fp8 reads 0.3 G codes a second on a CPU core. Here the bits of a code become the bits of an
fp16 number, whose subnormals hold those of every smaller format, and fp16 → fp32 is one CPU instruction: 5 G codes a
second, and the same arithmetic on any device. What comes out is code / unit(code), a power of two away from the
code, which the caller folds into a scale that it multiplies with anyway.

What a code is, the format says (`KVFormat.code`); a dtype tells it only where codes are numbers of that dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_OF_DTYPE = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2", torch.int8: "int8",
}  # fmt: skip
_UNITS = {"e4m3": 2.0**8, "e2m1": 2.0**14}  # exponent bias 15 of fp16 against 7, and against 1
_E4M3_NAN_BITS = 480 * 2.0**-8  # what 0x7F and 0xFF would be, were they numbers
# Bits of a byte with two e2m1 codes, low nibble first, in the places they have in two fp16 numbers.
_TWO_CODES = (1 << 21) | (1 << 9)
_MAGNITUDES, _SIGNS = 0x0E000E00, 0x10001000


def may_read(x: Tensor) -> bool:
    """Whether reading a value of x on the host costs nothing."""
    return x.device.type == "cpu"


class Scratch:
    """Buffers that are reused from chunk to chunk, by name."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """An uninitialised tensor; taking the same name again gives the same memory."""
        n = math.prod(shape)
        flat = self._flat.get((name, dtype))
        if flat is None or flat.numel() < n:
            flat = self._flat[name, dtype] = torch.empty(n, dtype=dtype, device=self.device)
        return flat[:n].view(shape)


def code_of(dtype: torch.dtype) -> str:
    """The code of a tensor whose elements are numbers of its dtype."""
    return _OF_DTYPE[dtype]


def unit(code: str) -> float:
    """What `to_float` must be multiplied with to be the codes' values."""
    return _UNITS.get(code, 1.0)


def to_float(codes: Tensor, code: str, scratch: Scratch, name: str = "values") -> Tensor:
    """Codes [..., W], 8-bit ones seen as uint8 → code / unit(code), fp32 [..., W] (4 bits: [..., 2W]) in `scratch`."""
    packed = code in ("e2m1", "int4")
    out = scratch.take(name, (*codes.shape[:-1], codes.shape[-1] * (2 if packed else 1)))
    if code == "e2m1":
        return out.copy_(_e2m1_bits(codes, scratch).view(torch.float16))
    if code == "int4":
        return out.copy_(_nibbles(codes, scratch))
    if code == "e4m3":
        # The sign lands on bits 15 and 14, the code on 13 to 7.
        out.copy_(_widened(codes, 1 << 7, scratch).bitwise_and_(~0x4000).view(torch.float16))
        return _restore_nan(out, codes)
    if code == "e5m2":
        return out.copy_(_widened(codes, 1 << 8, scratch).view(torch.float16))
    return out.copy_(codes.view(torch.int8) if code == "int8" else codes)


def _widened(codes: Tensor, factor: int, scratch: Scratch) -> Tensor:
    """Bytes, sign extended to 16 bits, times a factor. A product is faster than a shift on a CPU."""
    return scratch.take("bits", codes.shape, torch.int16).copy_(codes.view(torch.int8)).mul_(factor)


def _restore_nan(values: Tensor, codes: Tensor) -> Tensor:
    """NaN where e4m3 has one. On a CPU the largest byte tells whether there is any, at a tenth of a pass."""
    if codes.numel() == 0:
        return values
    if may_read(codes) and int(codes.view(torch.int8).max()) < 0x7F and int(codes.max()) < 0xFF:
        return values
    return values.masked_fill_(values.abs() == _E4M3_NAN_BITS, math.nan)


def _e2m1_bits(codes: Tensor, scratch: Scratch) -> Tensor:
    """Bytes [..., W] → int32 [..., W], each the bits of two fp16 numbers, low nibble first in memory."""
    bits = scratch.take("bits", codes.shape, torch.int32).copy_(codes).mul_(_TWO_CODES)
    signs = torch.bitwise_and(bits, _SIGNS, out=scratch.take("signs", codes.shape, torch.int32)).mul_(8)
    return bits.bitwise_and_(_MAGNITUDES).bitwise_or_(signs)


def _nibbles(codes: Tensor, scratch: Scratch) -> Tensor:
    """Bytes [..., W] → uint8 [..., 2W], the low nibble first."""
    out = scratch.take("nibbles", (*codes.shape, 2), torch.uint8)
    torch.bitwise_and(codes, 15, out=out[..., 0])
    torch.bitwise_right_shift(codes, 4, out=out[..., 1])
    return out.flatten(-2)
