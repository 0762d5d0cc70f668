"""Codes and scales of every format, as the write side stores them: the only format branches of the appends.

Bytes equal those of the torch oracle: every step is one correctly rounded fp32 operation. Kernels that use this file
are launched with `enable_fp_fusion=False`, since a fused multiply-add rounds once where the oracle rounds twice.
NATIVE_FP8_CAST: fp32 → fp8 is one exact instruction (`launch.has_exact_fp8_cast`); elsewhere bit arithmetic gives
the same bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tersekv import formats

# Scopes of a scale.
TENSOR, TOKEN_HEAD = tl.constexpr(formats.TENSOR), tl.constexpr(formats.TOKEN_HEAD)
BLOCK, GROUP, UE8M0 = tl.constexpr(formats.BLOCK), tl.constexpr(formats.GROUP), tl.constexpr(formats.UE8M0)
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
MIN_UE8M0_AMAX = tl.constexpr(formats.MIN_UE8M0_AMAX)
MAX_LATENT_AMAX = tl.constexpr(formats.MAX_LATENT_AMAX)  # of a latent group in the GEMM
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def reciprocal_rn(x):
    """Returns 1 / x, rounded to nearest."""
    return tl.div_rn(1.0, x)


@triton.jit
def divide_rn(x, DIVISOR: tl.constexpr):
    """Returns x / DIVISOR, rounded to nearest."""
    return tl.div_rn(x, DIVISOR)


@triton.jit
def row_abs_max(x):
    """Returns the largest magnitude along the last axis, NaN ignored."""
    amax = tl.max(tl.abs(x), len(x.shape) - 1)
    return tl.where(amax > 0, amax, 0.0)  # a row of NaN alone counts as 0


@triton.jit
def round_magnitude_to_code_and_value(
    y, MANTISSA_BITS: tl.constexpr, MIN_EXPONENT: tl.constexpr, MAX_VALUE: tl.constexpr
):
    """Rounds |y| to a float with MANTISSA_BITS bits whose normals begin at 2^MIN_EXPONENT: ties to even, saturating at
    MAX_VALUE.

    Returns (code without sign, uint32; value, fp32). NaN gives anything.
    """
    magnitude = tl.minimum(tl.abs(y), MAX_VALUE)
    # A size in [p, 2p) has steps of p / 2^MANTISSA_BITS. Adding p * 2^(23 - MANTISSA_BITS), of which these steps are
    # the last bits, makes the adder round to them; below the normals the steps stay those of 2^MIN_EXPONENT.
    power = tl.maximum(magnitude, 2.0**MIN_EXPONENT).to(tl.uint32, bitcast=True) & 0x7F800000
    magic = (power + ((23 - MANTISSA_BITS) << 23)).to(tl.float32, bitcast=True)
    total = magnitude + magic
    bits = total.to(tl.uint32, bitcast=True)
    mantissa_steps = bits & ((4 << MANTISSA_BITS) - 1)
    return mantissa_steps + (bits >> (23 - MANTISSA_BITS)) - (
        (127 + 23 - MANTISSA_BITS + MIN_EXPONENT) << MANTISSA_BITS
    ), total - magic


@triton.jit
def encode_fp8(y, E5M2: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr):
    """Returns uint8 codes of e4m3 (or e5m2) of fp32: to nearest even, saturating; NaN becomes 0x7F."""
    if NATIVE_FP8_CAST:
        # cvt.rn.satfinite saturates and makes NaN 0x7F by itself.
        if E5M2:
            return y.to(tl.float8e5).to(tl.uint8, bitcast=True)
        else:
            return y.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        if E5M2:
            code, _ = round_magnitude_to_code_and_value(y, 2, -14, E5M2_MAX)
        else:
            code, _ = round_magnitude_to_code_and_value(y, 3, -6, E4M3_MAX)
        code = code | ((y.to(tl.uint32, bitcast=True) >> 24) & 0x80)
        return tl.where(y != y, 0x7F, code).to(tl.uint8)


@triton.jit
def encode_int8_unclamped(y_within_127):
    """Converts fp32 of magnitude below 127.5 to int8: to nearest, half away from zero."""
    # The largest float below 0.5 carries exact halves up, and nothing else. NaN converts to 0.
    half = ((y_within_127.to(tl.uint32, bitcast=True) & 0x80000000) | 0x3EFFFFFF).to(tl.float32, bitcast=True)
    return (y_within_127 + half).to(tl.int32).to(tl.int8)


@triton.jit
def encode_e2m1(y):
    """Returns codes 0 to 15, uint32, of fp32: to nearest, ties to the even code, saturating; bit 3 the sign; NaN: 0."""
    code, _ = round_magnitude_to_code_and_value(y, 1, 0, E2M1_MAX)
    code = code | ((y.to(tl.uint32, bitcast=True) >> 28) & 0x8)
    return tl.where(y == y, code, 0)


@triton.jit
def encode_nvfp4_codes_and_scales(x, inv_global_scale, global_scale):
    """Returns nvfp4 of rows x [ROWS, D] fp32: bytes [ROWS, D/2], low nibble first, and e4m3 scales as bytes [ROWS,
    D/16].

    inv_global_scale, global_scale:  the global scale's reciprocal and itself, scalars
    """
    ROWS: tl.constexpr = x.shape[0]
    D: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [ROWS, D // NVFP4_BLOCK, NVFP4_BLOCK])
    scale_code, scale = round_magnitude_to_code_and_value(
        divide_rn(row_abs_max(blocks), E2M1_MAX) * inv_global_scale, 3, -6, E4M3_MAX
    )
    # Where the scale rounds to 0, NaN makes all codes 0.
    inv_scale = tl.where(scale > 0, reciprocal_rn(scale * global_scale), float("nan"))
    codes = encode_e2m1(blocks * inv_scale[:, :, None])
    even_codes, odd_codes = tl.split(tl.reshape(codes, [ROWS, D // 2, 2]))
    return (even_codes | (odd_codes << 4)).to(tl.uint8), scale_code.to(tl.uint8)


@triton.jit
def encode_fp8_ds_mla_codes_and_pow2_scales(x, NATIVE_FP8_CAST: tl.constexpr):
    """Returns fp8_ds_mla of latents x [ROWS, L] fp32: e4m3 bytes, and fp32 scales [ROWS, L/128], powers of two."""
    ROWS: tl.constexpr = x.shape[0]
    L: tl.constexpr = x.shape[1]
    groups = tl.reshape(x, [ROWS, L // LATENT_GROUP, LATENT_GROUP])
    scale = tl.maximum(divide_rn(row_abs_max(groups), E4M3_MAX), MIN_LATENT_GROUP_SCALE)
    # The next power of two, from the bits: any mantissa carries into the exponent; inf stays.
    scale = ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    codes = encode_fp8(groups * reciprocal_rn(scale)[:, :, None], False, NATIVE_FP8_CAST)
    return tl.reshape(codes, [ROWS, L]), scale


@triton.jit
def quantize_and_store_ue8m0_with_bf16_tail(
    x, p_codes, p_scales, o_codes, o_scales, m_write, D: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr,
):  # fmt: skip
    """Does `quantize_and_store` for scales that are exponents: codes of the columns up to FORMAT.TAIL, which are bf16
    behind them. Stored scales past the last block are 0."""
    ROWS: tl.constexpr = x.shape[0]
    D_PAD: tl.constexpr = x.shape[1]
    BLOCKS: tl.constexpr = D_PAD // FORMAT.SCALE_BLOCK
    CODES: tl.constexpr = D - FORMAT.TAIL
    groups = tl.reshape(x, [ROWS, BLOCKS, FORMAT.SCALE_BLOCK])
    scale = divide_rn(tl.maximum(row_abs_max(groups), MIN_UE8M0_AMAX), E4M3_MAX)
    # The next power of two, from the bits, as in `encode_fp8_ds_mla_codes_and_pow2_scales`.
    bits = (scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    codes = encode_fp8(groups * reciprocal_rn(bits.to(tl.float32, bitcast=True))[:, :, None], False, NATIVE_FP8_CAST)
    c = tl.arange(0, D_PAD)[None, :]
    code_bytes = tl.reshape(codes, [ROWS, D_PAD]).to(p_codes.dtype.element_ty, bitcast=True)
    tl.store(p_codes + o_codes + c, code_bytes, mask=m_write & (c < CODES))
    i = tl.arange(0, BLOCKS)[None, :]
    exponent = tl.where(i < CODES // FORMAT.SCALE_BLOCK, bits >> 23, 0).to(tl.uint8)
    tl.store(p_scales + o_scales + i, exponent, mask=m_write & (i < FORMAT.SCALES))
    if FORMAT.TAIL > 0:
        p_tail = (p_codes + (o_codes + CODES)).to(tl.pointer_type(tl.bfloat16))
        tl.store(p_tail + (c - CODES), x.to(tl.bfloat16), mask=m_write & (c >= CODES) & (c < D))


@triton.jit
def token_head_scale_of_amax(amax, INT8: tl.constexpr):
    """Returns fp32 scales of rows whose largest magnitudes are amax."""
    # No code saturates: x / scale stays below the largest code, but for one rounding.
    return tl.maximum(divide_rn(amax, INT8_MAX if INT8 else E4M3_MAX), MIN_TOKEN_HEAD_SCALE)


@triton.jit
def encode_int8_or_fp8(y_within_range, INT8: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr):
    """Returns int8 codes, or e4m3 codes as uint8."""
    if INT8:
        return encode_int8_unclamped(y_within_range)
    else:
        return encode_fp8(y_within_range, False, NATIVE_FP8_CAST)


@triton.jit
def round_and_clamp_to_int4(y):
    """Returns codes 0 to 15, int32, of fp32: floor(y + 0.5), clamped; NaN: 0."""
    y = y + 0.5
    return tl.minimum(tl.where(y > 0, y, 0.0), INT4_MAX).to(tl.int32)


@triton.jit
def row_min_max(x, D: tl.constexpr, INCLUDE_ZERO: tl.constexpr):
    """Returns minimum and maximum of the first D columns of rows [ROWS, C], NaN ignored; INCLUDE_ZERO: include 0."""
    if INCLUDE_ZERO:
        return tl.min(tl.where(x < 0, x, 0.0), 1), tl.max(tl.where(x > 0, x, 0.0), 1)
    else:
        valid = (x == x) & (tl.arange(0, x.shape[1])[None, :] < D)
        return tl.min(tl.where(valid, x, float("inf")), 1), tl.max(tl.where(valid, x, float("-inf")), 1)


@triton.jit
def int4_scale_zero_point_and_stored_scale(row_min, row_max):
    """Returns scale and zero point, both fp32 [ROWS], of rows with these ranges, and their stored form."""
    scale = divide_rn(row_max - row_min, INT4_MAX)
    scale = tl.where(scale > MIN_TOKEN_HEAD_SCALE, scale, MIN_TOKEN_HEAD_SCALE)
    zero_point = round_and_clamp_to_int4(tl.div_rn(-row_min, scale))
    stored_scale = ((scale.to(tl.int32, bitcast=True) & ~ZERO_POINT) | zero_point).to(tl.float32, bitcast=True)
    return scale, zero_point.to(tl.float32), stored_scale


@triton.jit
def quantize_int4(x, scale, zero_point):
    """Returns int32 codes of rows x [ROWS, C] fp32."""
    y = x * reciprocal_rn(scale)[:, None]
    return round_and_clamp_to_int4(tl.where(y == y, y, 0.0) + zero_point[:, None])


@triton.jit
def quantize_pack_and_store_int4(p, o_codes, x, scale, zero_point, m_write, D: tl.constexpr):
    """Stores the first D columns of rows x [ROWS, D_PAD] fp32 as bytes of two codes, low nibble first."""
    ROWS: tl.constexpr = x.shape[0]
    D_PAD: tl.constexpr = x.shape[1]
    even_codes, odd_codes = tl.split(tl.reshape(quantize_int4(x, scale, zero_point), [ROWS, D_PAD // 2, 2]))
    store_codes(p, o_codes, (even_codes | (odd_codes << 4)).to(tl.uint8), m_write, D // 2)


@triton.jit
def store_codes(p, o_codes, codes, m_write, NUM_COLUMNS: tl.constexpr):
    """Stores columns up to NUM_COLUMNS of codes [ROWS, C] at p + o_codes where m_write."""
    c = tl.arange(0, codes.shape[1])[None, :]
    tl.store(p + o_codes + c, codes, mask=m_write if codes.shape[1] == NUM_COLUMNS else m_write & (c < NUM_COLUMNS))


@triton.jit
def cast_to_float_dtype_or_fp8_bytes(
    y, FLOAT_DTYPE: tl.constexpr, FLOAT_OR_FP8_KIND: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr
):
    """Casts fp32 to FLOAT_DTYPE, or for "e4m3" | "e5m2" to bytes: to nearest even; 8-bit kinds saturate."""
    if FLOAT_OR_FP8_KIND == "float":
        return y.to(FLOAT_DTYPE)
    else:
        tl.static_assert(FLOAT_OR_FP8_KIND == "e4m3" or FLOAT_OR_FP8_KIND == "e5m2", "a kind that cast does not know")
        return encode_fp8(y, FLOAT_OR_FP8_KIND == "e5m2", NATIVE_FP8_CAST)


@triton.jit
def quantize_and_store(
    x, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale,
    D: tl.constexpr, FORMAT: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
):  # fmt: skip
    """Quantizes rows x [ROWS, D_PAD] fp32; stores codes at offsets `o_codes`, scales at `o_scales`, both [ROWS, 1].

    FORMAT: the stored format (`row_programs.StoredFormat`): CODE, SCALE and WIDEN
    """
    D_PAD: tl.constexpr = x.shape[1]
    c = tl.arange(0, D_PAD)[None, :]
    mask = m_write if D == D_PAD else m_write & (c < D)
    if FORMAT.SCALE == BLOCK:
        tl.static_assert(FORMAT.CODE == "e2m1", "a code that has no blocks")
        codes, scales = encode_nvfp4_codes_and_scales(x, quant_scale, global_scale)
        i = tl.arange(0, D_PAD // 2)[None, :]
        tl.store(p_codes + o_codes + i, codes, mask=m_write & (i < D // 2))
        i = tl.arange(0, D_PAD // 16)[None, :]
        tl.store(p_scales + o_scales + i, scales, mask=m_write & (i < D // 16))
    elif FORMAT.SCALE == GROUP:
        tl.static_assert(FORMAT.CODE == "e4m3", "a code that has no groups")
        codes, scales = encode_fp8_ds_mla_codes_and_pow2_scales(x, NATIVE_FP8_CAST)
        i = tl.arange(0, D_PAD // 128)[None, :]
        tl.store(p_codes + o_codes + c, codes, mask=mask)
        tl.store(p_scales + o_scales + i, scales, mask=m_write & (i < D // 128))
    elif FORMAT.SCALE == UE8M0:
        tl.static_assert(FORMAT.CODE == "e4m3", "a code that has no exponents for scales")
        quantize_and_store_ue8m0_with_bf16_tail(
            x, p_codes, p_scales, o_codes, o_scales, m_write, D, FORMAT, NATIVE_FP8_CAST
        )
    elif FORMAT.CODE == "int4" and FORMAT.SCALE == TOKEN_HEAD:
        row_min, row_max = row_min_max(x, D, FORMAT.WIDEN)
        scale, zero_point, stored_scale = int4_scale_zero_point_and_stored_scale(row_min, row_max)
        quantize_pack_and_store_int4(p_codes, o_codes, x, scale, zero_point, m_write, D)
        tl.store(p_scales + o_scales, stored_scale[:, None], mask=m_write)
    elif FORMAT.SCALE == TOKEN_HEAD:
        tl.static_assert(FORMAT.CODE == "int8" or FORMAT.CODE == "e4m3", "a code that has no scale of a row")
        INT8: tl.constexpr = FORMAT.CODE == "int8"
        scale = token_head_scale_of_amax(row_abs_max(x), INT8)
        store_codes(
            p_codes, o_codes, encode_int8_or_fp8(x * reciprocal_rn(scale)[:, None], INT8, NATIVE_FP8_CAST), m_write, D
        )
        tl.store(p_scales + o_scales, scale[:, None], mask=m_write)
    elif FORMAT.SCALE == TENSOR:
        CODE: tl.constexpr = FORMAT.CODE
        codes = cast_to_float_dtype_or_fp8_bytes(x * quant_scale, tl.uint8, CODE, NATIVE_FP8_CAST)
        tl.store(p_codes + o_codes + c, codes, mask=mask)
    else:
        tl.static_assert(FORMAT.CODE == "bf16" or FORMAT.CODE == "fp16", "a code that store does not know")
        tl.store(p_codes + o_codes + c, x.to(p_codes.dtype.element_ty), mask=mask)


@triton.jit
def quantize_and_store_halves(
    first_half, second_half, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale,
    HALF: tl.constexpr, FORMAT: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
):  # fmt: skip
    """Does `quantize_and_store` on rows passed as their first and their second HALF columns, [ROWS, C / 2] each."""
    if FORMAT.CODE == "int4" and FORMAT.SCALE == TOKEN_HEAD:
        row_min, row_max = row_min_max(first_half, HALF, FORMAT.WIDEN)
        row_min_y, row_max_y = row_min_max(second_half, HALF, FORMAT.WIDEN)
        scale, zero_point, stored_scale = int4_scale_zero_point_and_stored_scale(
            tl.minimum(row_min, row_min_y), tl.maximum(row_max, row_max_y)
        )
        quantize_pack_and_store_int4(p_codes, o_codes, first_half, scale, zero_point, m_write, HALF)
        quantize_pack_and_store_int4(p_codes + HALF // 2, o_codes, second_half, scale, zero_point, m_write, HALF)
        tl.store(p_scales + o_scales, stored_scale[:, None], mask=m_write)
    elif FORMAT.SCALE == TOKEN_HEAD:
        tl.static_assert(FORMAT.CODE == "int8" or FORMAT.CODE == "e4m3", "a code that has no scale of a row")
        INT8: tl.constexpr = FORMAT.CODE == "int8"
        scale = token_head_scale_of_amax(tl.maximum(row_abs_max(first_half), row_abs_max(second_half)), INT8)
        inv_scale = reciprocal_rn(scale)[:, None]
        store_codes(p_codes, o_codes, encode_int8_or_fp8(first_half * inv_scale, INT8, NATIVE_FP8_CAST), m_write, HALF)
        store_codes(
            p_codes + HALF, o_codes, encode_int8_or_fp8(second_half * inv_scale, INT8, NATIVE_FP8_CAST), m_write, HALF
        )
        tl.store(p_scales + o_scales, scale[:, None], mask=m_write)
    elif FORMAT.SCALE == BLOCK:
        quantize_and_store(
            first_half, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, HALF, FORMAT,
            NATIVE_FP8_CAST,
        )  # fmt: skip
        quantize_and_store(
            second_half, p_codes + HALF // 2, p_scales + HALF // 16, o_codes, o_scales, m_write, quant_scale,
            global_scale, HALF,
            FORMAT, NATIVE_FP8_CAST,
        )  # fmt: skip
    else:
        quantize_and_store(
            first_half, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, HALF, FORMAT,
            NATIVE_FP8_CAST,
        )  # fmt: skip
        quantize_and_store(
            second_half, p_codes + HALF, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, HALF, FORMAT,
            NATIVE_FP8_CAST,
        )  # fmt: skip
