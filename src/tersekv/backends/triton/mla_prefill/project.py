"""Up-projection of latents: [M, L] x [N, L] -> [M, N], 16-bit out, fp32 sums.

With an e4m3 weight both sides are codes with a scale per (row, 128 columns) and per 128 x 128 block. Partial sums of
128 columns are scaled before they are added in fp32: the matrix unit's own accumulator never outlives 128 columns,
since Hopper's keeps about 14 bits for fp8.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tersekv.formats import LATENT_GROUP

from ...host.bind import BYTES, Described, Template, given
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
        return tl.load(W_SCALE + (column // GROUP).to(tl.int64) * stride_ws + k_block)
    else:
        o_n = column + tl.arange(0, BLOCK_N)
        p_scale = W_SCALE + (o_n // GROUP).to(tl.int64) * stride_ws + k_block
        return tl.load(p_scale, mask=o_n < N, other=0.0)[None, :]


@triton.jit
def latent_scale(A_SCALE, row, rows, k_block, stride_as, BLOCK_M: tl.constexpr):
    """Scales of BLOCK_M latents for one block of 128 columns, [BLOCK_M, 1]."""
    o_m = row + tl.arange(0, BLOCK_M)
    return tl.load(A_SCALE + tl.cast(k_block, tl.int64) * stride_as + o_m, mask=o_m < rows, other=0.0)[:, None]


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


def prepared(f: SimpleNamespace, rows: int, most: int, tile: ProductTile, native_fp8: bool) -> Template:
    """The launch for a chunk of `rows` rows, in places for `most`: KV = CODES @ kv_b_proj.T

    CODES, SCALES:  [M, L], e4m3 with scales [L/128, M] fp32; or 16-bit and none
    the weight:     [N, L], e4m3 with scales [N/128, L/128] fp32; or latents' dtype and none
    KV:             [M, N] 16-bit
    """
    n, rank = f.kv_b_proj.shape
    scaled, stride_w = f.kv_b_proj_scale is not None, f.kv_b_proj.stride[0]
    by_hand = scaled and not native_fp8
    arguments: dict[str, Any] = given(BYTES if by_hand else "", A="CODES", W="kv_b_proj") | given(OUT="KV")
    if tile.tma:
        of_codes, block_w = partial(_described, by_hand=by_hand), [tile.block_n, tile.block_k]
        arguments = {
            "A": Described(
                "CODES", partial(of_codes, shape=[rows, rank], pitch=rank, block=[tile.block_m, tile.block_k])
            ),
            "W": Described("kv_b_proj", partial(of_codes, shape=[n, rank], pitch=stride_w, block=block_w)),
            "OUT": Described("KV", partial(_described, shape=[rows, n], pitch=n, block=[tile.block_m, tile.block_n])),
        }
    # KV in the place of scales is never read.
    arguments |= given(A_SCALE="SCALES", W_SCALE="kv_b_proj_scale") if scaled else given(A_SCALE="KV", W_SCALE="KV")
    arguments |= {
        "rows": rows, "N": n, "stride_w": stride_w, "stride_as": most if scaled else n,
        "stride_ws": f.kv_b_proj_scale.stride[0] if scaled else n, "L": rank, "SCALED": scaled, "BYTES": by_hand,
        "TMA": tile.tma, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
    }  # fmt: skip
    grid = (-(-rows // tile.block_m) * -(-n // tile.block_n),)
    return Template(product_kernel, grid, arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _described(x: Tensor, shape: list[int], pitch: int, block: list[int], by_hand: bool = False) -> Any:
    return TensorDescriptor(x.view(torch.uint8) if by_hand else x, shape, [pitch, 1], block)
