"""mla_project: every head's rows through its own matrix, in one launch: rows are quantised where they are multiplied.

A decode step has few rows and many weights, and these no launch of the step writes (`parts/project`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from tersekv.formats import LATENT_GROUP

from ..host import launch
from ..host.bind import BYTES, Bound, Launches, Template, given, strides
from ..host.blocks import overlaps
from .parts.project import project

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
