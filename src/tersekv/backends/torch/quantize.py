"""Codes and scales of every format, exactly: quantizes fp32 rows and dequantizes them.

Every step is one correctly rounded fp32 operation, so that any backend can give the same bytes. Division by a constant
divides by a tensor: by a Python number, PyTorch on CUDA multiplies with a rounded reciprocal instead.

NaN and inf: an amax ignores NaN; a NaN becomes 0x7F in fp8, and the code of 0 in formats without NaN. An inf saturates,
unless it sets its row's own fp32 scale: then that scale is inf, and the row dequantizes to NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tersekv.formats import (
    BLOCK,
    FP8,
    GROUP,
    INT4_MAX,
    MIN_LATENT_GROUP_SCALE,
    MIN_TOKEN_HEAD_SCALE,
    MIN_UE8M0_AMAX,
    NONE,
    TENSOR,
    TOKEN_HEAD,
    UE8M0,
    ZERO_POINT,
    KVFormat,
)

Scale = float | Tensor
# Codes that are written here and read by `codes`: (kind of scale, dtype of stored scales) → codes.
_CODECS = {
    (NONE, None): ("bf16", "fp16"),
    (TENSOR, None): ("e4m3", "e5m2"),
    (TOKEN_HEAD, torch.float32): ("e4m3", "e5m2", "int8", "int4"),
    (BLOCK, torch.float8_e4m3fn): ("e2m1",),
    (GROUP, torch.float32): ("e4m3",),
    (UE8M0, torch.uint8): ("e4m3",),
}
_E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT, _MANTISSA = 0x7F800000, 0x007FFFFF  # of fp32


def why_no_codec(f: KVFormat) -> str | None:
    """Returns why rows of a format cannot be quantized; None: they can."""
    if f.code in _CODECS.get((f.scale, f.scale_dtype), ()):
        return None
    stored = f"{f.scale_dtype} scales" if f.scale_dtype else "no stored scales"
    return f"has no codec for {f.name}: scale={f.scale!r}, codes of {f.code}, {stored}".replace("torch.", "")


def as_quantizer_input(x: Tensor) -> Tensor:
    """Returns rows as `quantize_to_codes_and_scales` expects them: in fp32, but fp8 codes unchanged."""
    return x if x.dtype in FP8 else x.to(torch.float32)


def quantize_to_codes_and_scales(
    x: Tensor,
    f: KVFormat,
    multiplier_if_no_scale_t: float,
    scale_t: Tensor | None,
    scale_t_multiplies: bool,
    widen_int4_range_to_0: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Returns `quantize_rows` with the scale of a call: a multiplying float, or a tensor [1] or [H] that dequantizes
    unless `scale_t_multiplies`. x: [T, H, D], or [T, L] with a tensor [1]; fp8 codes are returned unchanged."""
    if x.dtype in FP8:
        return x, None
    global_scale = None if scale_t is None or scale_t_multiplies else scale_t[:, None]
    multiplier = quantizing_multiplier(multiplier_if_no_scale_t, scale_t, scale_t_multiplies)
    return quantize_rows(x, f, multiplier, global_scale, widen_int4_range_to_0)


def quantize_rows(
    x: Tensor,
    f: KVFormat,
    multiplier: Scale = 1.0,
    global_scale: Scale | None = None,
    widen_int4_range_to_0: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Returns (codes, scales) of rows; scales is None if the format stores none.

        x:             [..., D] fp32
        multiplier:    multiplies x in formats with a per-tensor scale: float, or fp32 that broadcasts against x; for
                       nvfp4 the reciprocal of the global scale
        global_scale:  nvfp4: the global scale itself; None: the correctly rounded 1 / multiplier
        widen_int4_range_to_0:  the range of a row is widened to include 0

    codes [..., D] in f.storage (of 4 bits [..., D/2] uint8); scales fp32 [...] per token and head, e4m3 [..., D/16] for
    nvfp4, fp32 [..., D/128] for fp8_ds_mla.
    """
    if f.scale == NONE:
        return x.to(f.storage), None
    if f.scale == TENSOR:
        return cast_fp8(x * multiplier, f.storage), None
    if f.scale == BLOCK:
        if global_scale is None:
            global_scale = reciprocal(multiplier if isinstance(multiplier, Tensor) else x.new_full((), multiplier))
        return _quantize_nvfp4(x, f, multiplier, global_scale)
    if f.scale == GROUP:
        return _quantize_latent_groups(x, f)
    if f.scale == UE8M0:
        return _quantize_ue8m0_with_bf16_tail(x, f)
    if f.code == "int4":
        return _quantize_int4(x, widen_int4_range_to_0)
    scales = _divide_rounded(row_abs_max(x), f.max_value).clamp(min=MIN_TOKEN_HEAD_SCALE)
    y = x * reciprocal(scales)[..., None]
    return (round_half_away_to_int8_satfinite(y) if f.code == "int8" else cast_fp8(y, f.storage)), scales


def dequantize(codes: Tensor, scales: Tensor | None, f: KVFormat, scale: Scale = 1.0) -> Tensor:
    """Returns fp32 [..., D] of stored rows: code × stored scale × `scale`, left to right.

    codes, scales:  as `quantize_rows` returns them
    scale:          the caller's dequantizing scale: float, or fp32 that broadcasts against the rows ([H, 1])
    """
    if f.scale == UE8M0:
        assert scales is not None
        return _dequantize_ue8m0_with_bf16_tail(codes, scales, f)
    x = unpack_e2m1_to_fp32(codes) if f.code == "e2m1" else codes.to(torch.float32)
    if f.code == "int4":
        assert scales is not None
        x = (unpack_nibbles(codes) - zero_points(scales)[..., None]).to(torch.float32)
    if scales is not None:
        s = scales.to(torch.float32)
        x = x * (s[..., None] if f.scale_block is None else s.repeat_interleave(f.scale_block, -1))
    return x * scale


def quantizing_multiplier(multiplier_if_no_scale_t: float, scale_t: Tensor | None, scale_t_multiplies: bool) -> Scale:
    """Returns the multiplier of rows: the float, or the tensor ([n] → [n, 1]), inverted unless `scale_t_multiplies`."""
    if scale_t is None:
        return multiplier_if_no_scale_t
    return (scale_t if scale_t_multiplies else reciprocal(scale_t))[:, None]


def row_abs_max(x: Tensor) -> Tensor:
    """Returns the largest magnitude of each row, NaN ignored: [..., D] → [...]."""
    return torch.where(x.isnan(), 0.0, x.abs()).amax(-1)


def reciprocal(x: Tensor) -> Tensor:
    """Returns the correctly rounded 1 / x."""
    return x.new_ones(()) / x


def cast_rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 → the dtype of a query or an output, to nearest even; saturating for fp8."""
    return cast_fp8(x, dtype) if dtype in FP8 else x.to(dtype)


def cast_fp8(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 → e4m3 or e5m2: to nearest even, saturating; NaN becomes 0x7F whatever its sign, as on GPUs."""
    limit = torch.finfo(dtype).max
    return torch.where(x.isnan(), math.nan, x.clamp(-limit, limit)).to(dtype)


def round_half_away_to_int8_satfinite(x: Tensor) -> Tensor:
    """fp32 → int8: to nearest, half away from zero, saturating; NaN becomes 0."""
    # x − trunc(x) is exact; adding 0.5 to 0.49999997 would carry it up to 1.
    whole = x.nan_to_num(nan=0.0).trunc()
    away = torch.where((x - whole).abs() >= 0.5, x.sign(), 0.0)
    return (whole + away).clamp(-128, 127).to(torch.int8)


def encode_e2m1_nearest_even_satfinite(x: Tensor) -> Tensor:
    """fp32 → codes 0 to 15 as uint8: to nearest, ties to the even code, saturating; bit 3 the sign; NaN: 0."""
    a = x.abs()
    code = x.signbit().to(torch.uint8) << 3
    for i in range(1, len(_E2M1_VALUES)):
        middle = (_E2M1_VALUES[i - 1] + _E2M1_VALUES[i]) / 2
        code += (a >= middle) if i % 2 == 0 else (a > middle)
    return code.masked_fill(x.isnan(), 0)


def unpack_e2m1_to_fp32(packed: Tensor) -> Tensor:
    """[..., D/2] bytes of e2m1 codes → [..., D] fp32."""
    code = unpack_nibbles(packed)
    m = (code & 7).to(torch.float32)
    value = torch.where(m < 4, m * 0.5, torch.where(m < 6, m - 2, m * 2 - 8))
    return torch.where(code > 7, -value, value)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """[..., D/2] bytes → codes [..., D]; the low nibble is the even element."""
    return torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def zero_points(scales: Tensor) -> Tensor:
    """Returns the int32 zero points of int4 rows, from their stored fp32 scales."""
    return scales.view(torch.int32) & ZERO_POINT


def ceil_power_of_two(x: Tensor) -> Tensor:
    """Returns the smallest power of two not below x, from the bits of x (fp32, positive and normal, or inf)."""
    return ((x.view(torch.int32) + _MANTISSA) & _EXPONENT).view(torch.float32)


def _quantize_nvfp4(x: Tensor, f: KVFormat, multiplier: Scale, global_scale: Scale) -> tuple[Tensor, Tensor]:
    blocks = x.unflatten(-1, (-1, f.scale_block))
    scales = cast_fp8(_divide_rounded(row_abs_max(blocks), f.max_value) * multiplier, torch.float8_e4m3fn)
    s = scales.to(torch.float32)
    codes = encode_e2m1_nearest_even_satfinite(blocks * reciprocal(s * global_scale)[..., None])
    codes = codes.masked_fill((s == 0)[..., None], 0).flatten(-2)
    return _pack_nibbles(codes), scales


def _quantize_int4(x: Tensor, widen_to_0: bool) -> tuple[Tensor, Tensor]:
    """Returns packed codes and stored scales of rows: 15 steps from least to largest value, and the zero point."""
    unknown = x.isnan()
    least = x.masked_fill(unknown, 0.0 if widen_to_0 else math.inf).amin(-1)
    most = x.masked_fill(unknown, 0.0 if widen_to_0 else -math.inf).amax(-1)
    if widen_to_0:
        least, most = least.clamp(max=0.0), most.clamp(min=0.0)
    scales = torch.fmax(_divide_rounded(most - least, INT4_MAX), x.new_full((), MIN_TOKEN_HEAD_SCALE))
    zero = _round_int4(-least / scales)
    y = (x * reciprocal(scales)[..., None]).nan_to_num(nan=0.0, posinf=math.inf, neginf=-math.inf)
    codes = _round_int4(y + zero[..., None]).to(torch.uint8)
    stored = (scales.view(torch.int32) & ~ZERO_POINT) | zero.to(torch.int32)
    return _pack_nibbles(codes), stored.view(torch.float32)


def _round_int4(x: Tensor) -> Tensor:
    """Returns trunc(x + 0.5) in fp32, clamped to 0 … 15; 0.49999997 becomes 1."""
    return (x.nan_to_num(nan=0.0) + 0.5).trunc().clamp(0, INT4_MAX)


def _pack_nibbles(codes: Tensor) -> Tensor:
    """Codes [..., D] of 4 bits → [..., D/2] bytes."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _quantize_latent_groups(x: Tensor, f: KVFormat) -> tuple[Tensor, Tensor]:
    groups = x.unflatten(-1, (-1, f.scale_block))
    scales = ceil_power_of_two(_divide_rounded(row_abs_max(groups), f.max_value).clamp(min=MIN_LATENT_GROUP_SCALE))
    return cast_fp8(groups * reciprocal(scales)[..., None], f.storage).flatten(-2), scales


def _quantize_ue8m0_with_bf16_tail(x: Tensor, f: KVFormat) -> tuple[Tensor, Tensor]:
    """Returns codes and the bytes of their scales; with a tail the bytes of codes and of the tail."""
    dim = x.shape[-1]
    groups = x[..., : dim - f.tail].unflatten(-1, (-1, f.scale_block))
    scales = ceil_power_of_two(_divide_rounded(row_abs_max(groups).clamp(min=MIN_UE8M0_AMAX), f.max_value))
    codes = cast_fp8(groups * reciprocal(scales)[..., None], torch.float8_e4m3fn).flatten(-2)
    stored = (scales.view(torch.int32) >> 23).to(torch.uint8)  # powers of two, and inf: 255, NaN
    stored = torch.nn.functional.pad(stored, (0, f.scales(dim) - stored.shape[-1]))
    if not f.tail:
        return codes, stored
    tail = x[..., dim - f.tail :].to(torch.bfloat16).contiguous().view(torch.uint8)
    return torch.cat([codes.view(torch.uint8), tail], -1), stored


def _dequantize_ue8m0_with_bf16_tail(codes: Tensor, scales: Tensor, f: KVFormat) -> Tensor:
    """Returns fp32 [..., D] of rows of bytes and the bytes of their scales."""
    rows, exponent = codes.contiguous().view(torch.uint8), scales.to(torch.int32)
    end = rows.shape[-1] - 2 * f.tail
    # 2^-127 is subnormal, and 255 is NaN.
    bits = torch.where(exponent == 0, 1 << 22, torch.where(exponent == 255, 0x7FC00000, exponent << 23))
    s = bits.view(torch.float32)[..., : end // (f.scale_block or 1)].repeat_interleave(f.scale_block or 1, -1)
    x = rows[..., :end].contiguous().view(torch.float8_e4m3fn).to(torch.float32) * s
    tail = rows[..., end:].reshape(-1).view(torch.bfloat16).reshape(*x.shape[:-1], f.tail)
    return torch.cat([x, tail.to(torch.float32)], -1)


def _divide_rounded(x: Tensor, by: float) -> Tensor:
    return x / x.new_full((), by)
