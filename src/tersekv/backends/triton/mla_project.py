"""mla_project: multiplies every head's rows by its own matrix, in one launch: rows are quantized where they are
multiplied.

A decode step has few rows and many weights, which no launch of the step writes (`parts/project`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from tersekv.formats import LATENT_GROUP

from ..host import launch
from ..host.bind import BYTES, BoundLaunches, KernelLaunch, LaunchSequence, stride_args, tensor_args
from ..host.row_programs import uses_pdl
from .parts.project import project_head

_MAX_PREFETCH_GROUPS = 4  # at most, column groups of weights loaded at once


class ProjectionTile(NamedTuple):
    """A program's tile of a head's output."""

    block_m: int  # tokens
    block_n: int  # columns
    warps: int
    swap_ab: bool  # weights are the MMA's rows: few tokens then need no padding
    prefetch_groups: int  # column groups of weights loaded before the wait


class ProjectionConfig(NamedTuple):
    tile: ProjectionTile
    native_fp8: bool  # the chip multiplies e4m3 (else: bytes, converted to fp16)
    native_casts: bool  # its casts to fp8 give the nearest code (else: bit arithmetic)
    uses_pdl: bool  # the launch may begin before the one before it has ended


def why_not(f: SimpleNamespace) -> str | None:
    return launch.why_not_format_or_device(f)


def configure(f: SimpleNamespace) -> LaunchSequence:
    return (
        LaunchSequence() if 0 in f.out.shape else LaunchSequence(make_projection_launch(f, choose_projection_config(f)))
    )


def choose_projection_config(f: SimpleNamespace) -> ProjectionConfig:
    emulate_e4m3 = launch.emulates_e4m3(f)
    tile = _choose_tile(f.x.shape[0], f.weight.shape[1], f.x.shape[2], f.weight_scale is not None)
    if emulate_e4m3:  # older chips: no PDL, and no registers for prefetched weights
        rows = max(16, min(64, tile.block_m))
        tile = ProjectionTile(rows, 64, 8 if rows > 32 else 4, False, 0)
    return ProjectionConfig(tile, not emulate_e4m3, launch.has_exact_fp8_cast(f), uses_pdl(f))


def _choose_tile(tokens: int, columns: int, rank: int, has_scales: bool) -> ProjectionTile:
    """Returns the tile. NVIDIA H200, 2026-11-21, 128 heads, fp8, in a graph with cold weights, both projections of a
    decode step:

    1 token 6.2 and 10.5 → 3.3 and 3.6 µs, 16 tokens 5.7 and 8.6 → 3.8 and 3.8, 64 tokens 9.7 and 11.4 → 8.2 and 9.0,
    256 tokens 29 and 37 → 22 and 29.
    Few tokens: weights are prefetched into registers. Shared memory would save some, but a program that needs much of
    it starts only when its multiprocessor is empty (behind a combine: 3.7 against 9.4 µs).
    """
    num_groups = min(_MAX_PREFETCH_GROUPS, -(-rank // LATENT_GROUP))
    if tokens > 32:
        return (
            ProjectionTile(64, 128, 8, False, num_groups)
            if has_scales or num_groups == 1
            else ProjectionTile(64, 64, 4, False, 0)
        )
    rows = max(16, launch.next_power_of_2(tokens))
    if rows > 16:
        return ProjectionTile(rows, 128, 8, has_scales, num_groups)
    if not has_scales:
        return ProjectionTile(rows, 64, 4, False, num_groups)
    if num_groups == 1:
        return ProjectionTile(rows, 256 if columns >= 256 else 128, 8, True, num_groups)
    return (
        ProjectionTile(1 if tokens == 1 else 8, 64, 4, True, num_groups)
        if tokens <= 8
        else ProjectionTile(rows, 128, 8, True, num_groups)
    )


@triton.jit(do_not_specialize=["T"])
def project_kernel(
    X, W, W_SCALE, OUT, T, stride_xt, stride_xh, stride_wh, stride_wn, stride_sh, stride_sn, stride_ot, stride_oh,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SWAP_AB: tl.constexpr,
    PREFETCH_GROUPS: tl.constexpr, NATIVE_FP8_MMA: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (h, i, j) computes columns i · BLOCK_N … of head h for rows j · BLOCK_M …."""
    if USE_PDL:
        gdc_launch_dependents()
    h, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N
    x_args, out_args = (X, stride_xt, stride_xh), (OUT, stride_ot, stride_oh)
    w_args = (W, stride_wh, stride_wn, W_SCALE, stride_sh, stride_sn)
    project_head(
        x_args, w_args, out_args, h, column, tl.program_id(2) * BLOCK_M, T, N, K, BLOCK_M, BLOCK_N, SWAP_AB,
        PREFETCH_GROUPS, NATIVE_FP8_MMA,
        NATIVE_FP8_CAST, USE_PDL,
    )  # fmt: skip


def make_projection_launch(f: SimpleNamespace, choice: ProjectionConfig, x_name: str = "x", weight_name: str = "weight",
                           scale_name: str = "weight_scale",
             out_name: str = "out") -> KernelLaunch:  # fmt: skip
    """Returns the launch of f's projection, on tensors of the call by these names."""
    (tokens, heads, rank), columns, t = f.x.shape, f.weight.shape[1], choice.tile
    arguments = tensor_args(BYTES, X=x_name, W=weight_name, W_SCALE=scale_name, OUT=out_name) | {
        "T": tokens, **stride_args(f.x, stride_x="th"), **stride_args(f.weight, stride_w="hn"),
        **stride_args(f.weight_scale, stride_s="hn"), **stride_args(f.out, stride_o="th"), "N": columns, "K": rank,
        **project_head_constexprs(choice),
    }  # fmt: skip
    grid = (heads, -(-columns // t.block_n), -(-tokens // t.block_m))
    options = {"launch_pdl": True} if choice.uses_pdl else {}
    # Fused multiply-adds would change codes that are rounded by bit arithmetic, and those alone.
    enable_fma = choice.native_casts
    return KernelLaunch(project_kernel, grid, arguments, num_warps=t.warps, enable_fp_fusion=enable_fma, **options)


def project_head_constexprs(choice: ProjectionConfig) -> dict[str, Any]:
    """Returns compile-time constants of a kernel that calls `project_head`."""
    t = choice.tile
    return {
        "BLOCK_M": t.block_m, "BLOCK_N": t.block_n, "SWAP_AB": t.swap_ab, "PREFETCH_GROUPS": t.prefetch_groups,
        "NATIVE_FP8_MMA": choice.native_fp8,
        "NATIVE_FP8_CAST": choice.native_casts, "USE_PDL": choice.uses_pdl,
    }  # fmt: skip


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
