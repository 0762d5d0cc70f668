"""Up-projection of latents: [M, L] x [N, L] -> [M, N], 16-bit out, fp32 sums.

With an e4m3 weight both operands are codes with a scale per (row, 128 columns) and per 128 x 128 block. Partial sums of
128 columns are scaled before they are added in fp32: the matrix unit's own accumulator covers 128 columns only, since
Hopper's keeps about 14 bits for fp8.
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

from ...host.bind import BYTES, KernelLaunch, TensorMapArg, tensor_args
from ..parts.dequant import e4m3_bytes_to_fp16
from .config import GemmTile

GROUP = tl.constexpr(LATENT_GROUP)


@triton.jit
def load_operand_tile(
    SRC, first_row, num_rows, first_column, COLUMNS: tl.constexpr, stride, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Loads [BLOCK_ROWS, BLOCK_COLUMNS] at (first_row, first_column); 0 outside."""
    if USE_TMA:
        return SRC.load([first_row, first_column])
    else:
        o_r = first_row + tl.arange(0, BLOCK_ROWS)
        o_k = first_column + tl.arange(0, BLOCK_COLUMNS)
        p = SRC + o_r.to(tl.int64)[:, None] * stride + o_k[None, :]
        if COLUMNS % BLOCK_COLUMNS == 0:
            return tl.load(p, mask=(o_r < num_rows)[:, None], other=0.0)
        else:
            return tl.load(p, mask=(o_r < num_rows)[:, None] & (o_k < COLUMNS)[None, :], other=0.0)


@triton.jit
def load_weight_scale(W_SCALE, first_weight_row, N, k_block, stride_ws, BLOCK_N: tl.constexpr):
    """Loads scales of BLOCK_N weight rows for one block of 128 columns: a scalar if they lie in one block."""
    if BLOCK_N <= GROUP:
        return tl.load(W_SCALE + (first_weight_row // GROUP).to(tl.int64) * stride_ws + k_block)
    else:
        o_n = first_weight_row + tl.arange(0, BLOCK_N)
        p_scale = W_SCALE + (o_n // GROUP).to(tl.int64) * stride_ws + k_block
        return tl.load(p_scale, mask=o_n < N, other=0.0)[None, :]


@triton.jit
def load_latent_scales(A_SCALE, first_row, num_rows, k_block, stride_as, BLOCK_M: tl.constexpr):
    """Loads scales of BLOCK_M latents for one block of 128 columns, [BLOCK_M, 1]."""
    o_m = first_row + tl.arange(0, BLOCK_M)
    return tl.load(A_SCALE + tl.cast(k_block, tl.int64) * stride_as + o_m, mask=o_m < num_rows, other=0.0)[:, None]


@triton.jit
def store_output_tile(
    OUT, acc, first_row, num_rows, first_column, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr
):
    """Stores an output tile [BLOCK_M, BLOCK_N] in the type of KV."""
    if USE_TMA:
        OUT.store([first_row, first_column], acc.to(OUT.dtype))
    else:
        o_m = first_row + tl.arange(0, BLOCK_M)
        o_n = first_column + tl.arange(0, BLOCK_N)
        p = OUT + o_m.to(tl.int64)[:, None] * N + o_n[None, :]
        tl.store(p, acc.to(OUT.dtype.element_ty), mask=(o_m < num_rows)[:, None] & (o_n < N)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def blockwise_gemm_kernel(
    A, W, A_SCALE, W_SCALE, OUT, num_rows, N, stride_w, stride_as, stride_ws,
    L: tl.constexpr, HAS_SCALES: tl.constexpr, FP8_AS_BYTES: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes one output tile. Rows vary fastest, so that concurrent programs read the same weight rows."""
    blocks_m = tl.cdiv(num_rows, BLOCK_M)
    row = tl.program_id(0) % blocks_m * BLOCK_M
    column = tl.program_id(0) // blocks_m * BLOCK_N
    # Main loop: latents times weight rows
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, L, BLOCK_K):
        a = load_operand_tile(A, row, num_rows, k, L, L, BLOCK_M, BLOCK_K, USE_TMA)
        w = load_operand_tile(W, column, N, k, L, stride_w, BLOCK_N, BLOCK_K, USE_TMA)
        if HAS_SCALES:
            if FP8_AS_BYTES:
                product = tl.dot(e4m3_bytes_to_fp16(a), tl.trans(e4m3_bytes_to_fp16(w)))
            else:
                product = tl.dot(a, tl.trans(w))
            # Both scales of these 128 columns
            scale = load_latent_scales(A_SCALE, row, num_rows, k // GROUP, stride_as, BLOCK_M)
            acc += product * (scale * load_weight_scale(W_SCALE, column, N, k // GROUP, stride_ws, BLOCK_N))
        else:
            acc = tl.dot(a, tl.trans(w), acc)
    # Epilogue
    store_output_tile(OUT, acc, row, num_rows, column, N, BLOCK_M, BLOCK_N, USE_TMA)


def make_kv_up_projection_launch(
    f: SimpleNamespace, num_rows: int, scales_stride: int, tile: GemmTile, native_fp8: bool
) -> KernelLaunch:
    """Returns the launch for a chunk of `num_rows` rows: KV = CODES @ kv_b_proj.T

    CODES, SCALES:  [M, L], e4m3 with scales [L/128, scales_stride] fp32; or 16-bit and none
    the weight:     [N, L], e4m3 with scales [N/128, L/128] fp32; or latents' dtype and none
    KV:             [M, N] 16-bit
    """
    n, rank = f.kv_b_proj.shape
    has_scales, stride_w = f.kv_b_proj_scale is not None, f.kv_b_proj.stride[0]
    emulate_e4m3 = has_scales and not native_fp8
    arguments: dict[str, Any] = tensor_args(BYTES if emulate_e4m3 else "", A="CODES", W="kv_b_proj") | tensor_args(
        OUT="KV"
    )
    if tile.tma:
        make_codes_descriptor, w_tile = (
            partial(_host_descriptor_of_matrix, emulate_e4m3=emulate_e4m3),
            [tile.block_n, tile.block_k],
        )
        arguments = {
            "A": TensorMapArg(
                "CODES",
                partial(make_codes_descriptor, shape=[num_rows, rank], pitch=rank, block=[tile.block_m, tile.block_k]),
            ),
            "W": TensorMapArg(
                "kv_b_proj", partial(make_codes_descriptor, shape=[n, rank], pitch=stride_w, block=w_tile)
            ),
            "OUT": TensorMapArg(
                "KV",
                partial(_host_descriptor_of_matrix, shape=[num_rows, n], pitch=n, block=[tile.block_m, tile.block_n]),
            ),
        }
    # KV passed as scales is never read.
    arguments |= (
        tensor_args(A_SCALE="SCALES", W_SCALE="kv_b_proj_scale")
        if has_scales
        else tensor_args(A_SCALE="KV", W_SCALE="KV")
    )
    arguments |= {
        "num_rows": num_rows, "N": n, "stride_w": stride_w, "stride_as": scales_stride if has_scales else n,
        "stride_ws": f.kv_b_proj_scale.stride[0] if has_scales else n, "L": rank, "HAS_SCALES": has_scales,
        "FP8_AS_BYTES": emulate_e4m3,
        "USE_TMA": tile.tma, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
    }  # fmt: skip
    grid = (-(-num_rows // tile.block_m) * -(-n // tile.block_n),)
    return KernelLaunch(blockwise_gemm_kernel, grid, arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _host_descriptor_of_matrix(
    x: Tensor, shape: list[int], pitch: int, block: list[int], emulate_e4m3: bool = False
) -> Any:
    return TensorDescriptor(x.view(torch.uint8) if emulate_e4m3 else x, shape, [pitch, 1], block)
