"""mla_project: every head's rows through its own matrix, in one launch: rows are quantised where they are multiplied.

A decode step has few rows and many weights, and these no launch of the step writes: a program asks for its weights
before it waits for the launch in front, so that they arrive meanwhile. Partial sums of 128 columns are scaled before
they are added in fp32, as in MLA prefill's blockwise product.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tersekv.formats import LATENT_GROUP

from ..host import launch
from ..host.bind import BYTES, Bound, Launches, Template, given, strides
from ..host.blocks import overlaps
from .mla_prefill.gather import MAX_AMAX, MAX_F32
from .parts.quant import E4M3_MAX, divide, encode_fp8, largest, reciprocal
from .parts.tiles import e4m3_bytes_to_fp16

GROUP = tl.constexpr(LATENT_GROUP)
_AHEAD = 4  # at most, groups of columns whose weights are asked for at once


class Tile(NamedTuple):
    """What a program makes of a head's output."""

    block_m: int  # tokens
    block_n: int  # columns
    warps: int
    turned: bool  # the weights are the rows of the product: few tokens then need no padding
    ahead: int  # groups of columns whose weights are asked for before the wait


class Choice(NamedTuple):
    tile: Tile
    native_fp8: bool  # the chip multiplies e4m3 (else: bytes, converted to fp16)
    native_casts: bool  # its casts to fp8 give the nearest code (else: bit arithmetic)
    overlaps: bool  # the launch may begin before the one ahead of it has ended


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not(f)


def configure(f: SimpleNamespace) -> Launches:
    return Launches() if 0 in f.out.shape else Launches(prepared(f, choose(f)))


def choose(f: SimpleNamespace) -> Choice:
    by_hand = launch.e4m3_by_hand(f)
    tile = _tile(f.x.shape[0], f.weight.shape[1], f.x.shape[2], f.weight_scale is not None)
    if by_hand:  # older chips: no launches that overlap, nor the registers for weights ahead
        rows = max(16, min(64, tile.block_m))
        tile = Tile(rows, 64, 8 if rows > 32 else 4, False, 0)
    return Choice(tile, not by_hand, launch.rounds_to_fp8(f), overlaps(f))


def _tile(tokens: int, columns: int, rank: int, scaled: bool) -> Tile:
    """NVIDIA H200, 2026-11-21, 128 heads, fp8, in a graph with cold weights, the projections of a decode step:

    1 token 6.2 and 10.5 → 3.3 and 3.6 µs, 16 tokens 5.7 and 8.6 → 3.8 and 3.8, 64 tokens 9.7 and 11.4 → 8.2 and 9.0,
    256 tokens 29 and 37 → 22 and 29.
    Few tokens: weights wait in registers. In shared memory they would take fewer of these, but a program that wants
    much of it starts only when no other is left on its multiprocessor (behind a merge: 3.7 against 9.4 µs).
    """
    groups = min(_AHEAD, -(-rank // LATENT_GROUP))
    if tokens > 32:
        return Tile(64, 128, 8, False, groups) if scaled or groups == 1 else Tile(64, 64, 4, False, 0)
    rows = max(16, launch.next_power_of_2(tokens))
    if rows > 16:
        return Tile(rows, 128, 8, scaled, groups)
    if not scaled:
        return Tile(rows, 64, 4, False, groups)
    if groups == 1:
        return Tile(rows, 256 if columns >= 256 else 128, 8, True, groups)
    return Tile(1 if tokens == 1 else 8, 64, 4, True, groups) if tokens <= 8 else Tile(rows, 128, 8, True, groups)


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
        p_scale = W_SCALE + h * stride_sh + o_s * stride_sn
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


@triton.jit(do_not_specialize=["T"])
def project_kernel(
    X, W, W_SCALE, OUT, T, stride_xt, stride_xh, stride_wh, stride_wn, stride_sh, stride_sn, stride_ot, stride_oh,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TURNED: tl.constexpr,
    AHEAD: tl.constexpr, NATIVE: tl.constexpr, NATIVE_CASTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (h, i) makes columns i · BLOCK_N … of head h for BLOCK_M rows; the third coordinate counts those."""
    if OVERLAPS:
        gdc_launch_dependents()
    h, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    x_of, to = (X, stride_xt, stride_xh), (OUT, stride_ot, stride_oh)
    w_of = (W, stride_wh, stride_wn, W_SCALE, stride_sh, stride_sn)
    project(
        x_of, w_of, to, h, column, tl.program_id(2) * BLOCK_M, T, N, K, BLOCK_M, BLOCK_N, TURNED, AHEAD, NATIVE,
        NATIVE_CASTS, OVERLAPS,
    )  # fmt: skip


def prepared(f: SimpleNamespace, choice: Choice, x: str = "x", weight: str = "weight", scale: str = "weight_scale",
             out: str = "out") -> Template:  # fmt: skip
    """The launch. x, weight, scale, out: what a call names the tensors"""
    (tokens, heads, rank), columns, t = f.x.shape, f.weight.shape[1], choice.tile
    arguments = given(BYTES, X=x, W=weight, W_SCALE=scale, OUT=out) | {
        "T": tokens, **strides(f.x, stride_x="th"), **strides(f.weight, stride_w="hn"),
        **strides(f.weight_scale, stride_s="hn"), **strides(f.out, stride_o="th"), "N": columns, "K": rank,
        **constants(choice),
    }  # fmt: skip
    grid = (heads, -(-columns // t.block_n), -(-tokens // t.block_m))
    options = {"launch_pdl": True} if choice.overlaps else {}
    # Fused multiply-adds would change codes that are rounded by bit arithmetic, and those alone.
    fuses = choice.native_casts
    return Template(project_kernel, grid, arguments, num_warps=t.warps, enable_fp_fusion=fuses, **options)


def constants(choice: Choice) -> dict[str, Any]:
    """What a kernel that calls `project` is compiled for."""
    t = choice.tile
    return {
        "BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "TURNED": t.turned, "AHEAD": t.ahead, "NATIVE": choice.native_fp8,
        "NATIVE_CASTS": choice.native_casts, "OVERLAPS": choice.overlaps,
    }  # fmt: skip


def run(call: Any, config: Launches) -> None:
    config(call)


def bind(config: Launches, at: dict[str, int]) -> Bound | None:
    return config.bind(at)
