"""Codes and scales of every format, as the write side stores them: the only format branches of the appends.

Bytes equal those of the torch oracle: every step is one correctly rounded fp32 operation. Kernels that use this file
are launched with `enable_fp_fusion=False`, since a fused multiply-add rounds once where the oracle rounds twice.
NATIVE: fp32 → fp8 is one exact instruction (`launch.rounds_to_fp8`); elsewhere bit arithmetic gives the same bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tersekv import formats

# What a scale belongs to.
TENSOR, TOKEN_HEAD = tl.constexpr(formats.TENSOR), tl.constexpr(formats.TOKEN_HEAD)
BLOCK, GROUP = tl.constexpr(formats.BLOCK), tl.constexpr(formats.GROUP)
E4M3_MAX = tl.constexpr(formats.E4M3_MAX)
E5M2_MAX = tl.constexpr(formats.E5M2_MAX)
E2M1_MAX = tl.constexpr(formats.E2M1_MAX)
INT8_MAX = tl.constexpr(formats.INT8_MAX)
INT4_MAX = tl.constexpr(formats.INT4_MAX)
ZERO_POINT = tl.constexpr(formats.ZERO_POINT)
NVFP4_BLOCK = tl.constexpr(formats.NVFP4_BLOCK)
LATENT_GROUP = tl.constexpr(formats.LATENT_GROUP)
MIN_TOKEN_HEAD_SCALE = tl.constexpr(formats.MIN_TOKEN_HEAD_SCALE)
MIN_LATENT_GROUP_SCALE = tl.constexpr(formats.MIN_LATENT_GROUP_SCALE)
MAX_AMAX = tl.constexpr(formats.MAX_LATENT_AMAX)  # of a group of latents that are multiplied
MAX_F32 = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def reciprocal(x):
    return tl.div_rn(1.0, x)


@triton.jit
def divide(x, BY: tl.constexpr):
    return tl.div_rn(x, BY)


@triton.jit
def largest(x):
    """Largest magnitude along the last axis, NaN ignored."""
    amax = tl.max(tl.abs(x), len(x.shape) - 1)
    return tl.where(amax > 0, amax, 0.0)  # a row of NaN alone counts as 0


@triton.jit
def round_magnitude(y, MANTISSA: tl.constexpr, LOWEST: tl.constexpr, MAX: tl.constexpr):
    """|y| rounded to a float with MANTISSA bits whose normals begin at 2^LOWEST, ties to even, saturating at MAX.

    Returns (code without sign, uint32; value, fp32). NaN gives anything.
    """
    size = tl.minimum(tl.abs(y), MAX)
    # A size in [p, 2p) has steps of p / 2^MANTISSA. Adding p * 2^(23 - MANTISSA), of which these steps are the last
    # bits, makes the adder round to them; below the normals the steps stay those of 2^LOWEST.
    power = tl.maximum(size, 2.0**LOWEST).to(tl.uint32, bitcast=True) & 0x7F800000
    magic = (power + ((23 - MANTISSA) << 23)).to(tl.float32, bitcast=True)
    total = size + magic
    bits = total.to(tl.uint32, bitcast=True)
    steps = bits & ((4 << MANTISSA) - 1)
    return steps + (bits >> (23 - MANTISSA)) - ((127 + 23 - MANTISSA + LOWEST) << MANTISSA), total - magic


@triton.jit
def encode_fp8(y, E5M2: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 → uint8 codes of e4m3 (or e5m2): to nearest even, saturating; NaN becomes 0x7F."""
    if NATIVE:
        # cvt.rn.satfinite saturates and makes NaN 0x7F by itself.
        if E5M2:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        if E5M2:
            code, _ = round_magnitude(y, 2, -14, E5M2_MAX)
        else:
            code, _ = round_magnitude(y, 3, -6, E4M3_MAX)
        code = code | ((y.to(tl.uint32, bitcast=True) >> 24) & 0x80)
        return tl.where(y != y, 0x7F, code).to(tl.uint8)


@triton.jit
def encode_int8(y):
    """fp32 of magnitude below 127.5 → int8: to nearest, half away from zero."""
    # The largest float below 0.5 carries exact halves up, and nothing else. NaN converts to 0.
    half = ((y.to(tl.uint32, bitcast=True) & 0x80000000) | 0x3EFFFFFF).to(tl.float32, bitcast=True)
    return (y + half).to(tl.int32).to(tl.int8)


@triton.jit
def encode_e2m1(y):
    """fp32 → codes 0 to 15, uint32: to nearest, ties to the even code, saturating; bit 3 the sign; NaN: 0."""
    code, _ = round_magnitude(y, 1, 0, E2M1_MAX)
    code = code | ((y.to(tl.uint32, bitcast=True) >> 28) & 0x8)
    return tl.where(y == y, code, 0)


@triton.jit
def encode_blocks(x, multiplier, global_scale):
    """nvfp4 of rows x [ROWS, D] fp32: bytes [ROWS, D/2], low nibble first, and e4m3 scales as bytes [ROWS, D/16].

    multiplier, global_scale:  the global scale's reciprocal and itself, scalars
    """
    ROWS: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [ROWS, D // NVFP4_BLOCK, NVFP4_BLOCK])
    scale_code, scale = round_magnitude(divide(largest(blocks), E2M1_MAX) * multiplier, 3, -6, E4M3_MAX)
    # Where the scale rounds to 0, NaN makes all codes 0.
    inverse = tl.where(scale > 0, reciprocal(scale * global_scale), float("nan"))
    codes = encode_e2m1(blocks * inverse[:, :, None])
    low, high = tl.split(tl.reshape(codes, [ROWS, D // 2, 2]))
    return (low | (high << 4)).to(tl.uint8), scale_code.to(tl.uint8)


@triton.jit
def encode_groups(x, NATIVE: tl.constexpr):
    """fp8_ds_mla of latents x [ROWS, L] fp32: e4m3 codes as bytes, and fp32 scales [ROWS, L/128], powers of two."""
    ROWS: tl.constexpr = x.shape[0]
    L: tl.constexpr = x.shape[1]
    groups = tl.reshape(x, [ROWS, L // LATENT_GROUP, LATENT_GROUP])
    scale = tl.maximum(divide(largest(groups), E4M3_MAX), MIN_LATENT_GROUP_SCALE)
    # The next power of two, from the bits: any mantissa carries into the exponent; inf stays.
    scale = ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    codes = encode_fp8(groups * reciprocal(scale)[:, :, None], False, NATIVE)
    return tl.reshape(codes, [ROWS, L]), scale


@triton.jit
def token_head_scale(amax, INT8: tl.constexpr):
    """fp32 scales of rows whose largest magnitudes are amax."""
    # No code saturates: x / scale stays below the largest code, but for one rounding.
    return tl.maximum(divide(amax, INT8_MAX if INT8 else E4M3_MAX), MIN_TOKEN_HEAD_SCALE)


@triton.jit
def encode_scaled(y, INT8: tl.constexpr, NATIVE: tl.constexpr):
    if INT8:
        return encode_int8(y)
    else:
        return encode_fp8(y, False, NATIVE)


@triton.jit
def encode_int4(u):
    """fp32 → codes 0 to 15, int32: one half more, without the fraction; NaN: 0."""
    u = u + 0.5
    return tl.minimum(tl.where(u > 0, u, 0.0), INT4_MAX).to(tl.int32)


@triton.jit
def range_of(x, D: tl.constexpr, WIDEN: tl.constexpr):
    """Least and largest of the first D columns of rows [ROWS, C], NaN ignored; WIDEN: and of 0."""
    if WIDEN:
        return tl.min(tl.where(x < 0, x, 0.0), 1), tl.max(tl.where(x > 0, x, 0.0), 1)
    else:
        known = (x == x) & (tl.arange(0, x.shape[1])[None, :] < D)
        return tl.min(tl.where(known, x, float("inf")), 1), tl.max(tl.where(known, x, float("-inf")), 1)


@triton.jit
def int4_scales(low, high):
    """Scale and zero point, both fp32 [ROWS], of rows with these ranges, and what is stored of them."""
    scale = divide(high - low, INT4_MAX)
    scale = tl.where(scale > MIN_TOKEN_HEAD_SCALE, scale, MIN_TOKEN_HEAD_SCALE)
    zero = encode_int4(tl.div_rn(-low, scale))
    stored = ((scale.to(tl.int32, bitcast=True) & ~ZERO_POINT) | zero).to(tl.float32, bitcast=True)
    return scale, zero.to(tl.float32), stored


@triton.jit
def int4_codes(x, scale, zero):
    """Codes of rows x [ROWS, C] fp32, int32."""
    y = x * reciprocal(scale)[:, None]
    return encode_int4(tl.where(y == y, y, 0.0) + zero[:, None])


@triton.jit
def write_int4(p, at, x, scale, zero, written, D: tl.constexpr):
    """Bytes of two codes each of the first D columns of rows x [ROWS, C] fp32, low nibble first."""
    ROWS: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.reshape(int4_codes(x, scale, zero), [ROWS, C // 2, 2]))
    write_codes(p, at, (low | (high << 4)).to(tl.uint8), written, D // 2)


@triton.jit
def write_codes(p, at, codes, written, D: tl.constexpr):
    """Columns up to D of codes [ROWS, C] at p + at, where written."""
    c = tl.arange(0, codes.shape[1])[None, :]
    tl.store(p + at + c, codes, mask=written if codes.shape[1] == D else written & (c < D))


@triton.jit
def cast(y, element: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """fp32 → element, or for KIND "e4m3" | "e5m2" bytes: to nearest even; 8-bit kinds saturate."""
    if KIND == "float":
        return y.to(element)
    else:
        tl.static_assert(KIND == "e4m3" or KIND == "e5m2", "a kind that cast does not know")
        return encode_fp8(y, KIND == "e5m2", NATIVE)


@triton.jit
def store(
    x, p_codes, p_scales, at, at_scales, written, multiplier, global_scale,
    D: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Quantise rows x [ROWS, C] fp32 and write codes at offsets `at`, stored scales at `at_scales`; all [ROWS, 1].

    FORMAT: what is stored (`blocks.Stored`): CODE, SCALE and WIDEN
    """
    C: tl.constexpr = x.shape[1]
    c = tl.arange(0, C)[None, :]
    mask = written if D == C else written & (c < D)
    if FORMAT.SCALE == BLOCK:
        tl.static_assert(FORMAT.CODE == "e2m1", "a code that has no blocks")
        codes, scales = encode_blocks(x, multiplier, global_scale)
        i = tl.arange(0, C // 2)[None, :]
        tl.store(p_codes + at + i, codes, mask=written & (i < D // 2))
        i = tl.arange(0, C // 16)[None, :]
        tl.store(p_scales + at_scales + i, scales, mask=written & (i < D // 16))
    elif FORMAT.SCALE == GROUP:
        tl.static_assert(FORMAT.CODE == "e4m3", "a code that has no groups")
        codes, scales = encode_groups(x, NATIVE)
        i = tl.arange(0, C // 128)[None, :]
        tl.store(p_codes + at + c, codes, mask=mask)
        tl.store(p_scales + at_scales + i, scales, mask=written & (i < D // 128))
    elif FORMAT.CODE == "int4" and FORMAT.SCALE == TOKEN_HEAD:
        low, high = range_of(x, D, FORMAT.WIDEN)
        scale, zero, stored = int4_scales(low, high)
        write_int4(p_codes, at, x, scale, zero, written, D)
        tl.store(p_scales + at_scales, stored[:, None], mask=written)
    elif FORMAT.SCALE == TOKEN_HEAD:
        tl.static_assert(FORMAT.CODE == "int8" or FORMAT.CODE == "e4m3", "a code that has no scale of a row")
        INT8: tl.constexpr = FORMAT.CODE == "int8"
        scale = token_head_scale(largest(x), INT8)
        write_codes(p_codes, at, encode_scaled(x * reciprocal(scale)[:, None], INT8, NATIVE), written, D)
        tl.store(p_scales + at_scales, scale[:, None], mask=written)
    elif FORMAT.SCALE == TENSOR:
        CODE: tl.constexpr = FORMAT.CODE
        codes = cast(x * multiplier, tl.uint8, CODE, NATIVE)
        tl.store(p_codes + at + c, codes, mask=mask)
    else:
        tl.static_assert(FORMAT.CODE == "bf16" or FORMAT.CODE == "fp16", "a code that store does not know")
        tl.store(p_codes + at + c, x.to(p_codes.dtype.element_ty), mask=mask)


@triton.jit
def store_halves(
    x, y, p_codes, p_scales, at, at_scales, written, multiplier, global_scale,
    HALF: tl.constexpr, FORMAT: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """As `store`, for rows that come as their first and their second HALF columns, [ROWS, C / 2] each."""
    if FORMAT.CODE == "int4" and FORMAT.SCALE == TOKEN_HEAD:
        low, high = range_of(x, HALF, FORMAT.WIDEN)
        low_y, high_y = range_of(y, HALF, FORMAT.WIDEN)
        scale, zero, stored = int4_scales(tl.minimum(low, low_y), tl.maximum(high, high_y))
        write_int4(p_codes, at, x, scale, zero, written, HALF)
        write_int4(p_codes + HALF // 2, at, y, scale, zero, written, HALF)
        tl.store(p_scales + at_scales, stored[:, None], mask=written)
    elif FORMAT.SCALE == TOKEN_HEAD:
        tl.static_assert(FORMAT.CODE == "int8" or FORMAT.CODE == "e4m3", "a code that has no scale of a row")
        INT8: tl.constexpr = FORMAT.CODE == "int8"
        scale = token_head_scale(tl.maximum(largest(x), largest(y)), INT8)
        inverse = reciprocal(scale)[:, None]
        write_codes(p_codes, at, encode_scaled(x * inverse, INT8, NATIVE), written, HALF)
        write_codes(p_codes + HALF, at, encode_scaled(y * inverse, INT8, NATIVE), written, HALF)
        tl.store(p_scales + at_scales, scale[:, None], mask=written)
    elif FORMAT.SCALE == BLOCK:
        store(x, p_codes, p_scales, at, at_scales, written, multiplier, global_scale, HALF, FORMAT, NATIVE)
        store(
            y, p_codes + HALF // 2, p_scales + HALF // 16, at, at_scales, written, multiplier, global_scale, HALF,
            FORMAT, NATIVE,
        )  # fmt: skip
    else:
        store(x, p_codes, p_scales, at, at_scales, written, multiplier, global_scale, HALF, FORMAT, NATIVE)
        store(y, p_codes + HALF, p_scales, at, at_scales, written, multiplier, global_scale, HALF, FORMAT, NATIVE)
