"""Up-projection of latents: [M, L] x [N, L] -> [M, N], 16-bit out, fp32 sums.

With an e4m3 weight both sides are codes with a scale per (row, 128 columns) and per 128 x 128 block. Partial sums of
128 columns are scaled before they are added in fp32: the matrix unit's own accumulator never outlives 128 columns,
since Hopper's keeps about 14 bits for fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tersekv.formats import LATENT_GROUP

from ...host.launch import by_triton
from ..parts.tiles import e4m3_bytes_to_fp16
from .tune import ProductTile

GROUP = tl.constexpr(LATENT_GROUP)


@triton.jit
def load_block(
    SOURCE, row, rows, k, L: tl.constexpr, stride, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, TMA: tl.constexpr
):
    """[BLOCK, BLOCK_K] at (row, k); 0 outside."""
    if TMA:
        return SOURCE.load([row, k])
    else:
        o_r = row + tl.arange(0, BLOCK)
        o_k = k + tl.arange(0, BLOCK_K)
        p = SOURCE + o_r.to(tl.int64)[:, None] * stride + o_k[None, :]
        if L % BLOCK_K == 0:
            return tl.load(p, mask=(o_r < rows)[:, None], other=0.0)
        else:
            return tl.load(p, mask=(o_r < rows)[:, None] & (o_k < L)[None, :], other=0.0)


@triton.jit
def weight_scale(W_SCALE, column, N, k_block, stride_ws, BLOCK_N: tl.constexpr):
    """Scales of BLOCK_N rows of the weight for one block of 128 columns: one number if they lie in one block."""
    if BLOCK_N <= GROUP:
        return tl.load(W_SCALE + column // GROUP * stride_ws + k_block)
    else:
        o_n = column + tl.arange(0, BLOCK_N)
        return tl.load(W_SCALE + o_n // GROUP * stride_ws + k_block, mask=o_n < N, other=0.0)[None, :]


@triton.jit
def latent_scale(A_SCALE, row, rows, k_block, stride_as, BLOCK_M: tl.constexpr):
    """Scales of BLOCK_M latents for one block of 128 columns, [BLOCK_M, 1]."""
    o_m = row + tl.arange(0, BLOCK_M)
    return tl.load(A_SCALE + k_block * stride_as + o_m, mask=o_m < rows, other=0.0)[:, None]


@triton.jit
def store_block(OUT, acc, row, rows, column, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr):
    if TMA:
        OUT.store([row, column], acc.to(OUT.dtype))
    else:
        o_m = row + tl.arange(0, BLOCK_M)
        o_n = column + tl.arange(0, BLOCK_N)
        p = OUT + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p, acc.to(OUT.dtype.element_ty), mask=(o_m < rows)[:, None] & (o_n < N)[None, :])


@triton.jit(do_not_specialize=["rows"])
def product_kernel(
    A, W, A_SCALE, W_SCALE, OUT, rows, N, stride_w, stride_as, stride_ws,
    L: tl.constexpr, SCALED: tl.constexpr, BYTES: tl.constexpr, TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One output tile. Rows vary fastest, so that programs in flight share the weight's rows."""
    blocks_m = tl.cdiv(rows, BLOCK_M)
    row = tl.program_id(0) % blocks_m * BLOCK_M
    column = tl.program_id(0) // blocks_m * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, L, BLOCK_K):
        a = load_block(A, row, rows, k, L, L, BLOCK_M, BLOCK_K, TMA)
        w = load_block(W, column, N, k, L, stride_w, BLOCK_N, BLOCK_K, TMA)
        if SCALED:
            if BYTES:
                part = tl.dot(e4m3_bytes_to_fp16(a), tl.trans(e4m3_bytes_to_fp16(w)))
            else:
                part = tl.dot(a, tl.trans(w))
            scale = latent_scale(A_SCALE, row, rows, k // GROUP, stride_as, BLOCK_M)
            acc += part * (scale * weight_scale(W_SCALE, column, N, k // GROUP, stride_ws, BLOCK_N))
        else:
            acc = tl.dot(a, tl.trans(w), acc)
    store_block(OUT, acc, row, rows, column, N, BLOCK_M, BLOCK_N, TMA)


def up_project(
    latents: Tensor, scales: Tensor | None, weight: Tensor, weight_scale: Tensor | None, out: Tensor, rows: int,
    tile: ProductTile, native_fp8: bool,
) -> None:  # fmt: skip
    """out[:rows] = latents[:rows] @ weight.T

    latents, scales:       [M, L] dense, e4m3 with scales [L/128, M] fp32 dense; or 16-bit and None
    weight, weight_scale:  [N, L] e4m3 with [N/128, L/128] fp32; or latents' dtype and None
    out:                   [M, N] 16-bit, dense
    """
    n, rank = weight.shape
    scaled_codes = scales is not None and weight_scale is not None
    bytes_in = scaled_codes and not native_fp8
    if bytes_in:
        latents, weight = (t.view(torch.uint8) for t in (latents, weight))
    a, w, o = latents, weight, out
    if tile.tma:
        a = TensorDescriptor(latents, [rows, rank], [rank, 1], [tile.block_m, tile.block_k])
        w = TensorDescriptor(weight, [n, rank], [weight.stride(0), 1], [tile.block_n, tile.block_k])
        o = TensorDescriptor(out, [rows, n], [n, 1], [tile.block_m, tile.block_n])
    s, ws = out if scales is None else scales, out if weight_scale is None else weight_scale  # out: never read
    strides = (s.stride(0), ws.stride(0))
    blocks_m, blocks_n = -(-rows // tile.block_m), -(-n // tile.block_n)
    by_triton(
        product_kernel, (blocks_m * blocks_n,),
        a, w, s, ws, o, rows, n, weight.stride(0), *strides, rank, scaled_codes, bytes_in, tile.tma,
        tile.block_m, tile.block_n, tile.block_k, num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
