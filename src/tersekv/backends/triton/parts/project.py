"""Projection of each head's rows by its own matrix: rows are quantized where they are multiplied.

A program starts loading its weights before it waits for the previous kernel. Partial sums of 128 columns are scaled
before they are added in fp32, as in MLA prefill's blockwise GEMM.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tersekv.formats import LATENT_GROUP

from .dequant import e4m3_bytes_to_fp16
from .quant import E4M3_MAX, FP32_MAX, MAX_LATENT_AMAX, divide_rn, encode_fp8, reciprocal_rn, row_abs_max

GROUP = tl.constexpr(LATENT_GROUP)


@triton.jit
def load_128_columns(p, mask, first_column, TOTAL_COLUMNS: tl.constexpr):
    """Loads columns first_column … first_column + 127 of rows; 0 from column TOTAL_COLUMNS on."""
    if TOTAL_COLUMNS // GROUP * GROUP == TOTAL_COLUMNS:
        return tl.load(p + first_column, mask=mask, other=0)
    else:
        return tl.load(
            p + first_column, mask=mask & (tl.arange(0, GROUP) + first_column < TOTAL_COLUMNS)[None, :], other=0
        )


@triton.jit
def load_weight_scale(p, o_n, N: tl.constexpr):
    """Loads one scale, or those of weight rows o_n; 0 from row N on."""
    if p.shape == ():
        return tl.load(p)
    else:
        return tl.load(p, mask=o_n < N, other=0.0)


@triton.jit
def quantize_rows_e4m3_codes_and_scales(x, NATIVE_FP8_CAST: tl.constexpr):
    """Returns (e4m3 codes, scales) of rows of 128 columns, as the oracle's `quantize_gemm_input_by_128_columns`
    except signs of zeros."""
    if x.dtype == tl.bfloat16:
        # By bits: a conversion would handle NaN, which takes four times as long.
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.float32)
    scale = divide_rn(tl.minimum(row_abs_max(x), MAX_LATENT_AMAX), E4M3_MAX)
    inv_scale = tl.where(scale == 0, 0.0, tl.minimum(reciprocal_rn(scale), FP32_MAX))
    return encode_fp8(x * inv_scale[:, None], False, NATIVE_FP8_CAST), scale


@triton.jit
def multiply_group(x, w, SWAP_AB: tl.constexpr):
    """Returns x wᵀ, or w xᵀ with SWAP_AB."""
    return tl.dot(w, tl.trans(x)) if SWAP_AB else tl.dot(x, tl.trans(w))


@triton.jit
def accumulate_scaled_group(acc, codes, scale, w, w_scale, SWAP_AB: tl.constexpr, NATIVE_FP8_MMA: tl.constexpr):
    """Returns acc plus the product of 128 columns of e4m3 tokens and weights, times their scales."""
    if NATIVE_FP8_MMA:
        product = multiply_group(codes.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True), SWAP_AB)
    else:
        product = multiply_group(e4m3_bytes_to_fp16(codes), e4m3_bytes_to_fp16(w), SWAP_AB)
    if w_scale.shape == ():
        product_scale = scale * w_scale
        return acc + product * (product_scale[None, :] if SWAP_AB else product_scale[:, None])
    else:
        return acc + product * (scale[None, :] * w_scale[:, None] if SWAP_AB else scale[:, None] * w_scale[None, :])


@triton.jit
def accumulate_group(
    acc, x, w, w_scale, QUANTIZE_X: tl.constexpr, SWAP_AB: tl.constexpr, NATIVE_FP8_MMA: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr
):  # fmt: skip
    """Returns acc plus the product of 128 columns of tokens and weights."""
    if not QUANTIZE_X:
        return tl.dot(w, tl.trans(x), acc) if SWAP_AB else tl.dot(x, tl.trans(w), acc)
    else:
        codes, scale = quantize_rows_e4m3_codes_and_scales(x, NATIVE_FP8_CAST)
        return accumulate_scaled_group(acc, codes, scale, w, w_scale, SWAP_AB, NATIVE_FP8_MMA)


@triton.jit
def weight_and_scale_ptrs_prefetched_weights_and_scales(
    w_args, h, first_weight_row, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, PREFETCH_GROUPS: tl.constexpr
):
    """Returns (pointers to a block of head h's weights and scales), and PREFETCH_GROUPS column groups of
    both, being loaded.

    w_args: (W, strides of heads and rows, W_SCALE or None, strides of heads and rows)
    """
    W, stride_wh, stride_wn, W_SCALE, stride_sh, stride_sn = w_args
    o_n = first_weight_row + tl.arange(0, BLOCK_N)
    p_w = W + h * stride_wh + o_n.to(tl.int64)[:, None] * stride_wn + tl.arange(0, GROUP)[None, :]
    p_scale = W  # not read
    if W_SCALE is not None:
        # One scale for all weight rows, or one for each.
        o_s = first_weight_row // GROUP if BLOCK_N <= GROUP else o_n // GROUP
        p_scale = W_SCALE + h * stride_sh + o_s.to(tl.int64) * stride_sn
    weights, scales = (), ()
    for g in tl.static_range(PREFETCH_GROUPS):
        weights = weights + (load_128_columns(p_w, (o_n < N)[:, None], g * GROUP, K),)
        scales = scales + (load_weight_scale(p_scale + g, o_n, N) if W_SCALE is not None else 1.0,)
    return (p_w, p_scale), weights, scales


@triton.jit
def accumulate_prefetched_groups(x_groups, weights, scales, QUANTIZE_X: tl.constexpr, SWAP_AB: tl.constexpr,
                                 NATIVE_FP8_MMA: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr):  # fmt: skip
    """Returns the product of the weights of `weight_and_scale_ptrs_prefetched_weights_and_scales` and as many column
    groups of rows."""
    BLOCK_M: tl.constexpr = x_groups[0].shape[0]
    BLOCK_N: tl.constexpr = weights[0].shape[0]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], tl.float32)
    for g in tl.static_range(len(x_groups)):
        acc = accumulate_group(
            acc, x_groups[g], weights[g], scales[g], QUANTIZE_X, SWAP_AB, NATIVE_FP8_MMA, NATIVE_FP8_CAST
        )
    return acc


@triton.jit
def store_projection(
    acc, out_args, h, first_column, o_m, T, N: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr
):
    """Stores acc to columns from `first_column` on of head h. out_args: (OUT, strides of rows and heads)"""
    OUT, stride_ot, stride_oh = out_args
    o_n = first_column + tl.arange(0, BLOCK_N)
    y = acc.to(OUT.dtype.element_ty)
    if SWAP_AB:
        y = tl.trans(y)
    p_out = OUT + h * stride_oh + o_m.to(tl.int64)[:, None] * stride_ot + o_n[None, :]
    tl.store(p_out, y, mask=(o_m < T)[:, None] & (o_n < N)[None, :])


@triton.jit
def project_head(
    x_args, w_args, out_args, h, first_column, first_row, T, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SWAP_AB: tl.constexpr, PREFETCH_GROUPS: tl.constexpr, NATIVE_FP8_MMA: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
    USE_PDL: tl.constexpr,
):  # fmt: skip
    """Computes columns from `first_column` on of head h, for BLOCK_M rows from `first_row` on. x_args, out_args:
    (tensor, strides of rows and heads)

    PREFETCH_GROUPS: column groups of weights loaded before the wait; the previous kernel must not write W
    """
    X, stride_xt, stride_xh = x_args
    o_m = first_row + tl.arange(0, BLOCK_M)
    o_n, m_m = first_column + tl.arange(0, BLOCK_N), (o_m < T)[:, None]
    p_x = X + h * stride_xh + o_m.to(tl.int64)[:, None] * stride_xt + tl.arange(0, GROUP)[None, :]
    QUANTIZE_X: tl.constexpr = w_args[3] is not None
    weight_ptrs, weights, scales = weight_and_scale_ptrs_prefetched_weights_and_scales(
        w_args, h, first_column, N, K, BLOCK_N, PREFETCH_GROUPS
    )
    p_w, p_scale = weight_ptrs
    if USE_PDL:
        gdc_wait()
    if PREFETCH_GROUPS > 0:
        x_groups = ()
        for g in tl.static_range(PREFETCH_GROUPS):
            x_groups = x_groups + (load_128_columns(p_x, m_m, g * GROUP, K),)
        acc = accumulate_prefetched_groups(
            x_groups, weights, scales, QUANTIZE_X, SWAP_AB, NATIVE_FP8_MMA, NATIVE_FP8_CAST
        )
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(PREFETCH_GROUPS * GROUP, K, GROUP):
        scale = load_weight_scale(p_scale + k // GROUP, o_n, N) if QUANTIZE_X else 1.0
        x, w = load_128_columns(p_x, m_m, k, K), load_128_columns(p_w, (o_n < N)[:, None], k, K)
        acc = accumulate_group(acc, x, w, scale, QUANTIZE_X, SWAP_AB, NATIVE_FP8_MMA, NATIVE_FP8_CAST)
    store_projection(acc, out_args, h, first_column, o_m, T, N, BLOCK_N, SWAP_AB)
