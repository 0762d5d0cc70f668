"""mla_project: every head's rows through its own matrix, in one launch: rows are quantised where they are multiplied.

A decode step has few rows, so a program takes up to 64 of them and 64 rows of one head's matrix. Partial sums of 128
columns are scaled before they are added in fp32, as in MLA prefill's blockwise product.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
import triton.language as tl

from tersekv.formats import LATENT_GROUP

from . import launch
from .blocks import overlaps
from .mla_prefill_gather import quantise_groups
from .rows import take_turn
from .tiles import e4m3_bytes_to_fp16

GROUP = tl.constexpr(LATENT_GROUP)
_BLOCK_N = 64


class Config(NamedTuple):
    block_m: int
    native_fp8: bool  # the chip multiplies e4m3 (else: bytes, converted to fp16)
    native_casts: bool  # its casts to fp8 give the nearest code (else: bit arithmetic)
    overlaps: bool  # the launch may begin before the one ahead of it has ended
    launches: list[launch.Template]  # one, from the first call on


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not(f)


def configure(f: SimpleNamespace) -> Config:
    rows = max(16, min(64, launch.next_power_of_2(f.x.shape[0])))
    return Config(rows, not launch.e4m3_by_hand(f), launch.rounds_to_fp8(f), overlaps(f), [])


@triton.jit(do_not_specialize=["T"])
def project_kernel(
    X, W, W_SCALE, OUT, T, stride_xt, stride_xh, stride_wh, stride_wn, stride_sh, stride_sn, stride_ot, stride_oh,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NATIVE: tl.constexpr,
    NATIVE_CASTS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (h, i) makes columns i · BLOCK_N … of head h for BLOCK_M rows; the third coordinate counts those."""
    take_turn(OVERLAPS)
    h, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    o_m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n, o_k = column + tl.arange(0, BLOCK_N), tl.arange(0, GROUP)
    p_x = X + h * stride_xh + o_m.to(tl.int64)[:, None] * stride_xt + o_k[None, :]
    p_w = W + h * stride_wh + o_n.to(tl.int64)[:, None] * stride_wn + o_k[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, GROUP):
        m_k = k + o_k < K
        x = tl.load(p_x + k, mask=(o_m < T)[:, None] & m_k[None, :], other=0.0)
        w = tl.load(p_w + k, mask=(o_n < N)[:, None] & m_k[None, :], other=0)
        if W_SCALE is not None:
            codes, scale = quantise_groups(
                tl.reshape(x.to(tl.float32), [BLOCK_M * GROUP]), BLOCK_M * GROUP, NATIVE_CASTS
            )
            codes = tl.reshape(codes, [BLOCK_M, GROUP])
            if NATIVE:
                part = tl.dot(codes.to(tl.float8e4nv, bitcast=True), tl.trans(w.to(tl.float8e4nv, bitcast=True)))
            else:
                part = tl.dot(e4m3_bytes_to_fp16(codes), tl.trans(e4m3_bytes_to_fp16(w)))
            w_scale = tl.load(W_SCALE + h * stride_sh + column // GROUP * stride_sn + k // GROUP)
            acc += part * (scale * w_scale)[:, None]
        else:
            acc = tl.dot(x, tl.trans(w), acc)
    p_out = OUT + h * stride_oh + o_m.to(tl.int64)[:, None] * stride_ot + o_n[None, :]
    tl.store(p_out, acc.to(OUT.dtype.element_ty), mask=(o_m < T)[:, None] & (o_n < N)[None, :])


def run(call: Any, config: Config) -> None:
    if 0 in call.out.shape:
        return
    if not config.launches:
        config.launches.append(_prepared(call, config))
    config.launches[0](call.x, call.weight, call.weight_scale, call.out)


def _prepared(call: Any, config: Config) -> launch.Template:
    tokens, heads, rank = call.x.shape
    columns, scale = call.weight.shape[1], call.weight_scale
    arguments = (
        *[launch.TENSOR] * 4, tokens, *call.x.stride()[:2], *call.weight.stride()[:2],
        *(scale.stride()[:2] if scale is not None else (0, 0)), *call.out.stride()[:2], columns, rank,
        config.block_m, _BLOCK_N, config.native_fp8, config.native_casts, config.overlaps,
    )  # fmt: skip
    grid = (heads, -(-columns // _BLOCK_N), -(-tokens // config.block_m))
    options = {"launch_pdl": True} if config.overlaps else {}
    return launch.Template(project_kernel, grid, arguments, num_warps=4, enable_fp_fusion=False, **options)
