"""Rows of a head through its own matrix: rows are quantised where they are multiplied.

A program asks for its weights before it waits for the launch in front, so that they arrive meanwhile. Partial sums of
128 columns are scaled before they are added in fp32, as in MLA prefill's blockwise product.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from tersekv.formats import LATENT_GROUP

from .quant import E4M3_MAX, MAX_AMAX, MAX_F32, divide, encode_fp8, largest, reciprocal
from .tiles import e4m3_bytes_to_fp16

GROUP = tl.constexpr(LATENT_GROUP)


@triton.jit
def load(p, mask, k, K: tl.constexpr):
    """Columns k … k + 127 of rows; 0 from column K on."""
    if K // GROUP * GROUP == K:
        return tl.load(p + k, mask=mask, other=0)
    else:
        return tl.load(p + k, mask=mask & (tl.arange(0, GROUP) + k < K)[None, :], other=0)


@triton.jit
def load_scale(p, o_n, N: tl.constexpr):
    if p.shape == ():
        return tl.load(p)
    else:
        return tl.load(p, mask=o_n < N, other=0.0)


@triton.jit
def quantise(x, NATIVE: tl.constexpr):
    """(e4m3 codes, scales) of rows of 128 columns: as `quantise_groups` has them, but for the sign of some zeros."""
    if x.dtype == tl.bfloat16:
        # By the bits: a conversion would see to NaN, which takes four times as long.
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        x = x.to(tl.float32)
    scale = divide(tl.minimum(largest(x), MAX_AMAX), E4M3_MAX)
    inverse = tl.where(scale == 0, 0.0, tl.minimum(reciprocal(scale), MAX_F32))
    return encode_fp8(x * inverse[:, None], False, NATIVE), scale


@triton.jit
def product(x, w, TURNED: tl.constexpr):
    return tl.dot(w, tl.trans(x)) if TURNED else tl.dot(x, tl.trans(w))


@triton.jit
def add_scaled(acc, codes, scale, w, w_scale, TURNED: tl.constexpr, NATIVE: tl.constexpr):
    """acc plus the product of 128 columns of e4m3 tokens and weights, times their scales."""
    if NATIVE:
        part = product(codes.to(tl.float8e4nv, bitcast=True), w.to(tl.float8e4nv, bitcast=True), TURNED)
    else:
        part = product(e4m3_bytes_to_fp16(codes), e4m3_bytes_to_fp16(w), TURNED)
    if w_scale.shape == ():
        factor = scale * w_scale
        return acc + part * (factor[None, :] if TURNED else factor[:, None])
    else:
        return acc + part * (scale[None, :] * w_scale[:, None] if TURNED else scale[:, None] * w_scale[None, :])


@triton.jit
def add_group(
    acc, x, w, w_scale, SCALED: tl.constexpr, TURNED: tl.constexpr, NATIVE: tl.constexpr, NATIVE_CASTS: tl.constexpr
):  # fmt: skip
    """acc plus the product of 128 columns of tokens and weights."""
    if not SCALED:
        return tl.dot(w, tl.trans(x), acc) if TURNED else tl.dot(x, tl.trans(w), acc)
    else:
        codes, scale = quantise(x, NATIVE_CASTS)
        return add_scaled(acc, codes, scale, w, w_scale, TURNED, NATIVE)


@triton.jit
def ask(w_of, h, column, N: tl.constexpr, K: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr):
    """A block of head h's weights: (where they and their scales lie), and AHEAD groups of columns of both, under way.

    w_of: (W, strides of heads and rows, W_SCALE or None, strides of heads and rows)
    """
    W, stride_wh, stride_wn, W_SCALE, stride_sh, stride_sn = w_of
    o_n = column + tl.arange(0, BLOCK_N)
    p_w = W + h * stride_wh + o_n.to(tl.int64)[:, None] * stride_wn + tl.arange(0, GROUP)[None, :]
    p_scale = W  # not read
    if W_SCALE is not None:
        # One for all rows of weights, or one for each.
        o_s = column // GROUP if BLOCK_N <= GROUP else o_n // GROUP
        p_scale = W_SCALE + h * stride_sh + o_s.to(tl.int64) * stride_sn
    weights, scales = (), ()
    for g in tl.static_range(AHEAD):
        weights = weights + (load(p_w, (o_n < N)[:, None], g * GROUP, K),)
        scales = scales + (load_scale(p_scale + g, o_n, N) if W_SCALE is not None else 1.0,)
    return (p_w, p_scale), weights, scales


@triton.jit
def add_groups(xs, weights, scales, SCALED: tl.constexpr, TURNED: tl.constexpr, NATIVE: tl.constexpr,
               NATIVE_CASTS: tl.constexpr):  # fmt: skip
    """The product of what `ask` asked for and as many groups of columns of rows."""
    BLOCK_M: tl.constexpr = xs[0].shape[0]
    BLOCK_N: tl.constexpr = weights[0].shape[0]
    acc = tl.zeros([BLOCK_N, BLOCK_M] if TURNED else [BLOCK_M, BLOCK_N], tl.float32)
    for g in tl.static_range(len(xs)):
        acc = add_group(acc, xs[g], weights[g], scales[g], SCALED, TURNED, NATIVE, NATIVE_CASTS)
    return acc


@triton.jit
def store_product(acc, to, h, column, o_m, T, N: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr):
    """to: (OUT, strides of rows and heads)"""
    OUT, stride_ot, stride_oh = to
    o_n = column + tl.arange(0, BLOCK_N)
    y = acc.to(OUT.dtype.element_ty)
    if TURNED:
        y = tl.trans(y)
    p_out = OUT + h * stride_oh + o_m.to(tl.int64)[:, None] * stride_ot + o_n[None, :]
    tl.store(p_out, y, mask=(o_m < T)[:, None] & (o_n < N)[None, :])


@triton.jit
def project(
    x_of, w_of, to, h, column, row, T, N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TURNED: tl.constexpr, AHEAD: tl.constexpr, NATIVE: tl.constexpr, NATIVE_CASTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Columns from `column` on of head h, for BLOCK_M rows from `row` on. x_of, to: (rows, strides of rows and heads)

    AHEAD: groups of columns whose weights are under way before the wait; W's may not be written by the launch in front
    """
    X, stride_xt, stride_xh = x_of
    o_m = row + tl.arange(0, BLOCK_M)
    o_n, m_m = column + tl.arange(0, BLOCK_N), (o_m < T)[:, None]
    p_x = X + h * stride_xh + o_m.to(tl.int64)[:, None] * stride_xt + tl.arange(0, GROUP)[None, :]
    SCALED: tl.constexpr = w_of[3] is not None
    where, weights, scales = ask(w_of, h, column, N, K, BLOCK_N, AHEAD)
    p_w, p_scale = where
    if OVERLAPS:
        gdc_wait()
    if AHEAD > 0:
        xs = ()
        for g in tl.static_range(AHEAD):
            xs = xs + (load(p_x, m_m, g * GROUP, K),)
        acc = add_groups(xs, weights, scales, SCALED, TURNED, NATIVE, NATIVE_CASTS)
    else:
        acc = tl.zeros([BLOCK_N, BLOCK_M] if TURNED else [BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(AHEAD * GROUP, K, GROUP):
        scale = load_scale(p_scale + k // GROUP, o_n, N) if SCALED else 1.0
        x, w = load(p_x, m_m, k, K), load(p_w, (o_n < N)[:, None], k, K)
        acc = add_group(acc, x, w, scale, SCALED, TURNED, NATIVE, NATIVE_CASTS)
    store_product(acc, to, h, column, o_m, T, N, BLOCK_N, TURNED)
