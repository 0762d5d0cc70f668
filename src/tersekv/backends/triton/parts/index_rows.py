"""Rows of an indexer, keys or queries: norm, RoPE, rotation, cast. Bytes equal those of the oracle."""

from __future__ import annotations

import triton
import triton.language as tl

from tersekv import formats

from ....formats import INDEX_BLOCK
from .hadamard import blockwise_hadamard_unnormalized
from .quant import E4M3_MAX, divide_rn, encode_fp8, reciprocal_rn, row_abs_max

INDEX = tl.constexpr(formats.INDEX)
MIN_INDEX_AMAX = tl.constexpr(formats.MIN_INDEX_AMAX)
BLOCK = tl.constexpr(INDEX_BLOCK)


@triton.jit
def round_to_row_dtype_if(x, ROW_DTYPE: tl.constexpr, ROUND16: tl.constexpr):
    """Returns fp32 x, rounded to the caller's dtype if ROUND16."""
    if ROUND16:
        return x.to(ROW_DTYPE).to(tl.float32)
    else:
        return x


@triton.jit
def load_normed_columns_or_raw(
    p_rows, columns, mask, mean_and_deviation, norm_args, ROW_DTYPE: tl.constexpr, ROUND16: tl.constexpr
):
    """Loads columns of rows as fp32, normed if there is a norm.

    mean_and_deviation:  [ROWS, 1] fp64 each; None: no norm
    """
    x = tl.load(p_rows + columns, mask=mask, other=0.0)
    if mean_and_deviation is None:
        return x.to(tl.float32)
    else:
        p_weight, p_bias, _ = norm_args
        weight = tl.load(p_weight + columns, mask=mask, other=0.0).to(tl.float64)
        bias = tl.load(p_bias + columns, mask=mask, other=0.0).to(tl.float64)
        mean, deviation = mean_and_deviation
        y = ((x.to(tl.float64) - mean) / deviation * weight + bias).to(tl.float32)
        return round_to_row_dtype_if(y, ROW_DTYPE, ROUND16)


@triton.jit
def load_index_rows(
    p_rows, norm_args, p_cos_sin_row, has_position,
    D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr, ROPE_LAST: tl.constexpr, INTERLEAVED: tl.constexpr,
    HADAMARD: tl.constexpr, ROUND16: tl.constexpr,
):  # fmt: skip
    """Loads rows at pointers p_rows [ROWS, 1]: fp32 [ROWS, D_PAD], normed and rotated; columns from D on are 0.

    norm_args:     (weight or None, bias, epsilon); norms are computed in fp64
    p_cos_sin_row, has_position:  from `token_rows.cos_sin_row_ptr_and_mask`; R 0: no RoPE
    """
    DTYPE: tl.constexpr = p_rows.dtype.element_ty
    c = tl.arange(0, D_PAD)[None, :]
    if norm_args[0] is not None:
        wide = tl.load(p_rows + c, mask=c < D, other=0.0).to(tl.float64)
        mean = (tl.sum(wide, 1) / D)[:, None]
        off = tl.where(c < D, wide - mean, 0.0)
        epsilon = tl.full([1, 1], norm_args[2], tl.float32).to(tl.float64)
        mean_and_deviation = mean, tl.sqrt((tl.sum(off * off, 1) / D)[:, None] + epsilon)
    else:
        mean_and_deviation = None
    x = load_normed_columns_or_raw(p_rows, c, c < D, mean_and_deviation, norm_args, DTYPE, ROUND16)
    if R > 0:
        # The other column of each pair is loaded and normed again: from L1, without an exchange between threads.
        FIRST: tl.constexpr = D - R if ROPE_LAST else 0
        HALF: tl.constexpr = R // 2
        i = c - FIRST
        rotary = (i >= 0) & (i < R)
        if INTERLEAVED:
            partner, angle, is_first = c ^ 1, i // 2, (i & 1) == 0
        else:
            partner, angle, is_first = tl.where(i < HALF, c + HALF, c - HALF), i % HALF, i < HALF
        y = load_normed_columns_or_raw(p_rows, partner, rotary, mean_and_deviation, norm_args, DTYPE, ROUND16)
        valid = has_position & rotary
        cos = tl.load(p_cos_sin_row + angle, mask=valid, other=0.0)
        sin = tl.load(p_cos_sin_row + (angle + HALF), mask=valid, other=0.0)
        x = tl.where(rotary, x * cos + y * tl.where(is_first, -sin, sin), x)
        x = round_to_row_dtype_if(x, DTYPE, ROUND16)
    if HADAMARD:
        SIZE: tl.constexpr = D & -D
        x = round_to_row_dtype_if(blockwise_hadamard_unnormalized(x, SIZE) * SIZE**-0.5, DTYPE, ROUND16)
    return x


@triton.jit
def encode_index_fp8_codes_and_pow2_scales(x, COLUMNS_PER_SCALE: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr):
    """Returns e4m3 bytes of rows x [ROWS, D_PAD] fp32, and scales [ROWS, D_PAD / COLUMNS_PER_SCALE], powers of two."""
    ROWS: tl.constexpr = x.shape[0]
    D_PAD: tl.constexpr = x.shape[1]
    blocks = tl.reshape(x, [ROWS, D_PAD // COLUMNS_PER_SCALE, COLUMNS_PER_SCALE])
    scale = divide_rn(tl.maximum(row_abs_max(blocks), MIN_INDEX_AMAX), E4M3_MAX)
    # The next power of two, from the bits: any mantissa carries into the exponent; inf stays.
    scale = ((scale.to(tl.uint32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    codes = encode_fp8(blocks * reciprocal_rn(scale)[:, :, None], False, NATIVE_FP8_CAST)
    return tl.reshape(codes, [ROWS, D_PAD]), scale


@triton.jit
def cast_index_rows(x, STORED_DTYPE: tl.constexpr, FORMAT: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr):
    """Returns rows x fp32 in a format without scales: bytes of e4m3, or DTYPE."""
    if FORMAT.CODE == "e4m3":
        return encode_fp8(x, False, NATIVE_FP8_CAST)
    else:
        tl.static_assert(FORMAT.CODE == "bf16" or FORMAT.CODE == "fp16", "a code that an indexer does not store")
        return x.to(STORED_DTYPE)
