"""Combine of decode's splits: rescales and sums all partial results of a work tile, in the split pass or after it.

In the split pass (`arrive_and_combine_in_levels_if_last`) the CTA that stores the last partial result of a work tile
combines. Many splits are combined in two levels: first fan_in neighbours each, then their results. The order is always
the same, whichever CTA combines, so equal calls give equal bits. Counters lie behind the partial results in the
workspace.

After it (`combine_kernel`) a CTA has COMBINE_ROWS rows of a work tile and COMBINE_COLUMNS columns; COMBINE_SPLITS
splits are loaded at once. It is launched before the split pass ends, and waits for it (PDL); the next kernel may be
launched before it ends.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....triton.parts import combine as portable
from ....triton.parts.tile_scheduler import split_metadata_ptr
from ...versions import thread_barrier
from ..parts.combine import accumulate_splits
from ..parts.dequant import load_device_or_host_scale_per_head
from ..parts.epilogue import cast_output_saturating_fp8, compute_acc_scale_and_lse
from .layouts import query_heads_of_rows

# ---- counters of arrived splits: their memory needs no initialization ----
# A counter is 8 bytes: MARK in its upper 48 bits marks the lower 16 as a count. Any other value is left over and counts
# as 0: the CTA that reads it stores MARK and 0 (`load_counter_for_init_check`, `arrive_and_count_earlier_ctas`).
# The last CTA resets the count to 0, so the next launch may use the counter; in between its memory may hold anything.
# Workspace in a CUDA graph thus needs no clearing at replay; leftover bytes look like a count once in 2^48.
#
# All CTAs of a launch must expect the same number of arrivals, so lengths must not change while it runs: a count left
# over would stay, and later combines would start too early.


# MARK begins as an fp32 NaN that arithmetic does not produce.
COUNTER_ZERO = gl.constexpr(0x7FA5C3E1965A << 16)
_READ_COUNTER_PTX = gl.constexpr("ld.relaxed.gpu.global.b64 $0, [$1];")
# One thread of each four warps, the one that counts: replace the observed value, unless it has MARK or has changed.
_INIT_COUNTER_PTX = gl.constexpr(
    """{
    .reg .pred first, other;
    .reg .b64 was, mark;
    .reg .b32 i;
    mov.u32 i, %tid.x;
    and.b32 i, i, 127;
    setp.eq.u32 first, i, 0;
    shr.u64 mark, $2, 16;
    setp.ne.and.u64 other, mark, 0x7FA5C3E1965A, first;
    @other atom.relaxed.gpu.global.cas.b64 was, [$1], $2, 0x7FA5C3E1965A0000;
    mov.u32 $0, 0;
    }"""
)


@gluon.jit
def load_counter_for_init_check(p_counter):
    """Loads the counter; early, so that `arrive_and_count_earlier_ctas` need not wait for it."""
    return gl.inline_asm_elementwise(
        _READ_COUNTER_PTX, "=l,l", [p_counter.to(gl.int64)], dtype=gl.int64, is_pure=False, pack=1
    )


@gluon.jit
def arrive_and_count_earlier_ctas(p_counter, maybe_uninit_value):
    """Publishes the stores of all threads of this CTA; returns how many CTAs arrived before it.

    The last CTA sees the stores of all others. maybe_uninit_value: by `load_counter_for_init_check`, in this launch
    """
    thread_barrier()
    gl.inline_asm_elementwise(
        _INIT_COUNTER_PTX, "=r,l,l", [p_counter.to(gl.int64), maybe_uninit_value], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    return (gl.atomic_add(p_counter, 1, sem="acq_rel", scope="gpu") - COUNTER_ZERO).to(gl.int32)


# ---- fused combine: which splits ----


MAX_FAN_IN = gl.constexpr(16)  # splits that one CTA combines in one level


class TileSplits(NamedTuple):
    """A work tile that is split over several CTA ranges."""

    i_range: gl.tensor  # this one
    tile_first_range: gl.tensor  # range in which the work tile begins
    num_splits: gl.tensor


@gluon.jit
def first_level_fan_in(num_splits):
    """Returns how many neighbours are combined in the first level."""
    fan_in = num_splits
    if num_splits > MAX_FAN_IN:
        fan_in = gl.where(num_splits <= 10 * MAX_FAN_IN, MAX_FAN_IN, 4 * MAX_FAN_IN)
    return fan_in


@gluon.jit
def combine_group_counter_ptr(
    SPLIT_WORKSPACE, level, first_combined_range, tile_first_range, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Returns the pointer to the counter of the splits that level 0 or 1 combines with CTA range
    first_combined_range's."""
    num_ranges, head_group = gl.num_programs(0) // tile_cfg.HEAD_GROUPS, gl.program_id(0) % tile_cfg.HEAD_GROUPS
    COUNTERS = (SPLIT_WORKSPACE + 2 * num_ranges * cfg.HEADS * cfg.BLOCK_M * cfg.PARTIAL_COLUMNS).to(
        gl.pointer_type(gl.int64)
    )
    return (
        COUNTERS
        + (2 * (level * num_ranges + first_combined_range) + gl.where(first_combined_range == tile_first_range, 1, 0))
        * tile_cfg.HEAD_GROUPS
        + head_group
    )


@gluon.jit
def load_first_level_counter_for_init_check(SPLIT_WORKSPACE, splits, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the counter's value for `arrive_and_combine_in_levels_if_last`."""
    fan_in = first_level_fan_in(splits.num_splits)
    return load_counter_for_init_check(
        combine_group_counter_ptr(
            SPLIT_WORKSPACE, 0,
            splits.tile_first_range + (splits.i_range - splits.tile_first_range) // fan_in * fan_in,
            splits.tile_first_range, cfg, tile_cfg,
        )
    )  # fmt: skip


# ---- fused combine: load and sum ----


@gluon.constexpr_function
def fused_combine_acc_layout(cfg, num_warps):
    """Returns the layout of acc_o [rows, columns]: a warp has rows, a thread four adjacent columns."""
    lanes = min(32, cfg.PACK * cfg.BLOCK_DV // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [num_warps, 1], [1, 0])


@gluon.jit
def load_partial_max_sum_and_acc(p_partial_row, o_d, cfg: gl.constexpr):
    """Loads (row_max, row_sum, acc_o) of a split."""
    row_max = gl.load(p_partial_row + cfg.PARTIAL_COLUMNS - 2, cache_modifier=".cg")
    row_sum = gl.load(p_partial_row + cfg.PARTIAL_COLUMNS - 1, cache_modifier=".cg")
    return row_max, row_sum, gl.load(p_partial_row[:, None] + o_d[None, :], cache_modifier=".cg")


@gluon.jit
def load_partials_repeating_the_last(
    p_partial_row, o_d, i_first_partial, num_partials, stride_partial, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Loads (row_max, row_sum, acc_o) of FUSED_COMBINE_SPLITS splits from i_first_partial on."""
    partials = ()
    for n in gl.static_range(gl.constexpr(tile_cfg.FUSED_COMBINE_SPLITS)):
        partials = partials + (
            load_partial_max_sum_and_acc(
                p_partial_row + gl.minimum(i_first_partial + n, num_partials - 1).to(gl.int64) * stride_partial,
                o_d,
                cfg,
            ),
        )
    return partials


@gluon.jit
def load_and_combine_partials(
    SPLIT_WORKSPACE, first_combined_range, tile_first_range, range_step, num_partials, i_column_block, first_head,
    cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns (row_max, row_sum, acc_o of column block i_column_block) of `num_partials` splits: those of CTA ranges
    first_combined_range, first_combined_range + range_step, …"""
    L: gl.constexpr = fused_combine_acc_layout(cfg, gl.num_warps())
    o_row = gl.arange(0, tile_cfg.KV_HEADS_PER_CTA * tile_cfg.FUSED_COMBINE_ROWS, gl.SliceLayout(1, L))
    o_d = i_column_block * tile_cfg.FUSED_COMBINE_COLUMNS + gl.arange(
        0, tile_cfg.FUSED_COMBINE_COLUMNS, gl.SliceLayout(0, L)
    )
    partial_slots = 2 * (first_combined_range * cfg.HEADS + first_head + o_row // tile_cfg.FUSED_COMBINE_ROWS)
    p_row = (
        SPLIT_WORKSPACE
        + (partial_slots.to(gl.int64) * cfg.BLOCK_M + o_row % tile_cfg.FUSED_COMBINE_ROWS) * cfg.PARTIAL_COLUMNS
    )
    stride_partial = range_step.to(gl.int64) * (2 * cfg.HEADS * cfg.BLOCK_M * cfg.PARTIAL_COLUMNS)
    row_max, row_sum, acc_o = load_partial_max_sum_and_acc(
        p_row + gl.where(first_combined_range == tile_first_range, cfg.BLOCK_M * cfg.PARTIAL_COLUMNS, 0), o_d, cfg
    )
    partials = load_partials_repeating_the_last(p_row, o_d, 1, num_partials, stride_partial, cfg, tile_cfg)
    for i in range(1, num_partials, tile_cfg.FUSED_COMBINE_SPLITS):
        next_partials = load_partials_repeating_the_last(
            p_row, o_d, i + tile_cfg.FUSED_COMBINE_SPLITS, num_partials, stride_partial, cfg, tile_cfg
        )
        row_max_new = row_max
        for n in gl.static_range(gl.constexpr(tile_cfg.FUSED_COMBINE_SPLITS)):
            row_max_new = gl.maximum(row_max_new, gl.where(i + n < num_partials, partials[n][0], float("-inf")))
        safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
        rescale = gl.exp2(row_max - safe_max)
        row_sum, acc_o = row_sum * rescale, acc_o * rescale[:, None]
        for n in gl.static_range(gl.constexpr(tile_cfg.FUSED_COMBINE_SPLITS)):
            split_scale = gl.where(i + n < num_partials, gl.exp2(partials[n][0] - safe_max), 0.0)
            row_sum += partials[n][1] * split_scale
            acc_o += partials[n][2] * split_scale[:, None]
        row_max, partials = row_max_new, next_partials
    return row_max, row_sum, acc_o


# ---- fused combine: store ----


@gluon.jit
def store_already_combined_partial_over_first_split(
    SPLIT_WORKSPACE, first_combined_range, tile_first_range, row_max, row_sum, acc_o, i_column_block, first_head,
    num_q_rows_left,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Stores the result of the first level to the slot of its first split."""
    L: gl.constexpr = acc_o.type.layout
    o_row = gl.arange(0, tile_cfg.KV_HEADS_PER_CTA * tile_cfg.FUSED_COMBINE_ROWS, gl.SliceLayout(1, L))
    o_d = i_column_block * tile_cfg.FUSED_COMBINE_COLUMNS + gl.arange(
        0, tile_cfg.FUSED_COMBINE_COLUMNS, gl.SliceLayout(0, L)
    )
    row_in_tile = o_row % tile_cfg.FUSED_COMBINE_ROWS
    partial_slots = 2 * (
        first_combined_range * cfg.HEADS + first_head + o_row // tile_cfg.FUSED_COMBINE_ROWS
    ) + gl.where(first_combined_range == tile_first_range, 1, 0)
    p_partial = SPLIT_WORKSPACE + (partial_slots.to(gl.int64) * cfg.BLOCK_M + row_in_tile) * cfg.PARTIAL_COLUMNS
    thread_barrier()  # all threads have read the slot
    gl.store(p_partial[:, None] + o_d[None, :], acc_o, mask=(row_in_tile < num_q_rows_left)[:, None])
    if i_column_block == cfg.PACK * cfg.BLOCK_DV // tile_cfg.FUSED_COMBINE_COLUMNS - 1:
        gl.store(p_partial + cfg.PARTIAL_COLUMNS - 2, row_max, mask=row_in_tile < num_q_rows_left)
        gl.store(p_partial + cfg.PARTIAL_COLUMNS - 1, row_sum, mask=row_in_tile < num_q_rows_left)


@gluon.jit
def store_combined_output_and_lse(
    tensors, scales, strides, row_max, row_sum, unrotated_acc_o, i_column_block, first_head, q_begin, row_begin,
    num_q_rows_left, cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Stores column block i_column_block of finished rows to `out`, and their LSE."""
    OUT, LSE = tensors.OUT, tensors.LSE
    L: gl.constexpr = unrotated_acc_o.type.layout
    o_row = gl.arange(0, tile_cfg.KV_HEADS_PER_CTA * tile_cfg.FUSED_COMBINE_ROWS, gl.SliceLayout(1, L))
    o_d = i_column_block * tile_cfg.FUSED_COMBINE_COLUMNS + gl.arange(
        0, tile_cfg.FUSED_COMBINE_COLUMNS, gl.SliceLayout(0, L)
    )
    kv_heads, row_in_tile = first_head + o_row // tile_cfg.FUSED_COMBINE_ROWS, o_row % tile_cfg.FUSED_COMBINE_ROWS
    m_row, q_row = row_in_tile < num_q_rows_left, row_begin + row_in_tile
    q_heads = query_heads_of_rows(kv_heads, q_row, cfg, tile_cfg)
    tokens = (q_begin + q_row // cfg.GROUP).to(gl.int64)
    v_scale = load_device_or_host_scale_per_head(
        scales.v_scale, scales.V_SCALE, kv_heads // tile_cfg.HEAD_DIM_PARTS, cfg.HAS_V_SCALE, cfg.V_SCALE_STRIDE
    ) * (scales.out_scale * cfg.V_RESIDUAL_SCALE)
    acc_scale, lse = compute_acc_scale_and_lse(row_max, row_sum, v_scale, tensors.SINKS, q_heads, m_row, cfg)
    packed_column = o_d % cfg.BLOCK_DV
    p_row = OUT + tokens * strides.out_t + q_heads * strides.out_h
    if tile_cfg.HEAD_DIM_PARTS > 1:
        p_row += kv_heads % tile_cfg.HEAD_DIM_PARTS * cfg.DV
    p_out = p_row[:, None] + (cfg.PACK * packed_column + o_d // cfg.BLOCK_DV)[None, :]
    gl.store(
        p_out,
        cast_output_saturating_fp8(unrotated_acc_o * acc_scale[:, None], OUT, cfg),
        mask=m_row[:, None] & (packed_column < cfg.DV // cfg.PACK)[None, :],
    )
    if cfg.HAS_LSE:
        gl.store(LSE + tokens * strides.lse_t + q_heads * strides.lse_h, lse, mask=m_row)


@gluon.jit
def arrive_and_combine_in_levels_if_last(
    tensors, scales, strides, splits, maybe_uninit_counter, first_head, work_tile, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Combines the splits of a work tile, if this CTA's, already in its slot, is the last to arrive.

    maybe_uninit_counter: by `load_first_level_counter_for_init_check`
    """
    SPLIT_WORKSPACE, tile_first_range, num_splits, row_begin = (
        tensors.SPLIT_WORKSPACE, splits.tile_first_range, splits.num_splits, work_tile.m_block * cfg.BLOCK_M,
    )  # fmt: skip
    num_q_rows_left = work_tile.seqlen_q * cfg.GROUP - row_begin
    fan_in = first_level_fan_in(num_splits)
    first_combined_range = tile_first_range + (splits.i_range - tile_first_range) // fan_in * fan_in
    range_step, num_partials = (
        gl.minimum(fan_in, 1),
        gl.minimum(fan_in, tile_first_range + num_splits - first_combined_range),
    )
    p_counter = combine_group_counter_ptr(SPLIT_WORKSPACE, 0, first_combined_range, tile_first_range, cfg, tile_cfg)
    is_last = arrive_and_count_earlier_ctas(p_counter, maybe_uninit_counter) == num_partials - 1
    # One iteration per level.
    while is_last:
        gl.store(p_counter, COUNTER_ZERO)  # all have arrived
        is_complete = range_step * num_partials >= num_splits
        p_counter = combine_group_counter_ptr(SPLIT_WORKSPACE, 1, tile_first_range, tile_first_range, cfg, tile_cfg)
        if not is_complete:
            maybe_uninit_counter = load_counter_for_init_check(p_counter)
        for i_column_block in gl.static_range(gl.constexpr(cfg.PACK * cfg.BLOCK_DV // tile_cfg.FUSED_COMBINE_COLUMNS)):
            row_max, row_sum, acc_o = load_and_combine_partials(
                SPLIT_WORKSPACE, first_combined_range, tile_first_range, range_step, num_partials, i_column_block,
                first_head, cfg,
                tile_cfg,
            )  # fmt: skip
            if is_complete:
                store_combined_output_and_lse(
                    tensors, scales, strides, row_max, row_sum, acc_o, i_column_block, first_head, work_tile.q_begin,
                    row_begin, num_q_rows_left, cfg, tile_cfg,
                )  # fmt: skip
            else:
                store_already_combined_partial_over_first_split(
                    SPLIT_WORKSPACE, first_combined_range, tile_first_range, row_max, row_sum, acc_o, i_column_block,
                    first_head,
                    num_q_rows_left, cfg, tile_cfg,
                )  # fmt: skip
        is_last = not is_complete
        if is_last:
            range_step, first_combined_range = fan_in, tile_first_range
            num_partials = (num_splits + fan_in - 1) // fan_in
            is_last = arrive_and_count_earlier_ctas(p_counter, maybe_uninit_counter) == num_partials - 1


# ---- the second launch ----


@triton.jit
def combine_kernel(
    CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE, v_scale, V_SCALE, out_scale, OUT_SCALE, num_workspace_ranges,
    stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    cfg: tl.constexpr, tile_cfg: tl.constexpr,
):  # fmt: skip
    """Combines COMBINE_ROWS rows and COMBINE_COLUMNS columns of one work tile, if it was split."""
    # Wait for the split pass
    gdc_wait()
    gdc_launch_dependents()
    # Tile scheduler: the work tile, and the CTA ranges that hold its splits
    i_work_tile, i_column_block = tl.program_id(0), tl.program_id(1)
    first_head, m_block, i_request = (
        i_work_tile % tile_cfg.HEAD_GROUPS * tile_cfg.KV_HEADS_PER_CTA,
        i_work_tile // tile_cfg.HEAD_GROUPS % tile_cfg.MAX_M_BLOCKS,
        i_work_tile // (tile_cfg.HEAD_GROUPS * tile_cfg.MAX_M_BLOCKS),
    )
    if cfg.VARLEN_Q:
        q_begin = tl.load(CU_SEQLENS_Q + i_request).to(tl.int32)
        seqlen_q = tl.load(CU_SEQLENS_Q + i_request + 1).to(tl.int32) - q_begin
    else:
        q_begin, seqlen_q = i_request * cfg.MAX_SEQLEN_Q, cfg.MAX_SEQLEN_Q
    num_splits, tile_first_range = 0, 0
    if m_block * cfg.BLOCK_M < seqlen_q * cfg.GROUP:
        SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, num_workspace_ranges * cfg.HEADS, cfg) + 2 * i_work_tile
        num_splits, tile_first_range = tl.load(SPLIT_METADATA), tl.load(SPLIT_METADATA + 1)
    if num_splits > 1:
        CHUNKS: tl.constexpr = cfg.PACK * cfg.BLOCK_DV // tile_cfg.COMBINE_COLUMNS
        o_row = i_column_block // CHUNKS * tile_cfg.COMBINE_ROWS + tl.arange(0, tile_cfg.COMBINE_ROWS)
        kv_heads, row_in_tile = first_head + o_row // tile_cfg.VALID_ROWS, o_row % tile_cfg.VALID_ROWS
        q_row = m_block * cfg.BLOCK_M + row_in_tile
        m_row = (q_row < seqlen_q * cfg.GROUP) & (o_row < tile_cfg.KV_HEADS_PER_CTA * tile_cfg.VALID_ROWS)
        o_split = tl.arange(0, tile_cfg.COMBINE_SPLITS)
        o_d = i_column_block % CHUNKS * tile_cfg.COMBINE_COLUMNS + tl.arange(0, tile_cfg.COMBINE_COLUMNS)
        # Combine: COMBINE_SPLITS splits at a time, rescaled to the common maximum and summed
        row_max = tl.full([tile_cfg.COMBINE_ROWS], float("-inf"), tl.float32)
        row_sum = tl.full([tile_cfg.COMBINE_ROWS], 0.0, tl.float32)
        acc_o = tl.full([tile_cfg.COMBINE_ROWS, tile_cfg.COMBINE_COLUMNS], 0.0, tl.float32)
        for i in range(0, num_splits, tile_cfg.COMBINE_SPLITS):
            mask = m_row[:, None] & (i + o_split < num_splits)[None, :]
            partial_slots = (
                2 * ((tile_first_range + i + o_split)[None, :] * cfg.HEADS + kv_heads[:, None])
                + tl.where(i + o_split == 0, 1, 0)[None, :]
            )
            row_max, row_sum, acc_o = accumulate_splits(
                row_max, row_sum, acc_o, SPLIT_WORKSPACE, partial_slots, row_in_tile, o_d, mask, cfg
            )
        # Epilogue: scales of V and of the output, then the output and LSE
        q_heads = (kv_heads // tile_cfg.HEAD_DIM_PARTS * cfg.GROUP + q_row % cfg.GROUP).to(tl.int64)
        tokens = (q_begin + q_row // cfg.GROUP).to(tl.int64)
        v_scales = v_scale + tl.full([tile_cfg.COMBINE_ROWS], 0.0, tl.float32)
        if cfg.HAS_V_SCALE:
            v_scales = tl.load(
                V_SCALE + kv_heads // tile_cfg.HEAD_DIM_PARTS * cfg.V_SCALE_STRIDE, mask=m_row, other=0.0
            )
        v_out_scale = v_scales * portable.load_device_scale_else_host_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE)
        acc_scale, lse = portable.compute_acc_scale_and_lse(
            row_max, row_sum, v_out_scale * cfg.V_RESIDUAL_SCALE, SINKS, q_heads, m_row, cfg
        )
        packed_column = o_d % cfg.BLOCK_DV
        o_row_out = tokens * stride_out_t + q_heads * stride_out_h
        if tile_cfg.HEAD_DIM_PARTS > 1:
            o_row_out += kv_heads % tile_cfg.HEAD_DIM_PARTS * cfg.DV
        p_out = OUT + o_row_out[:, None] + (cfg.PACK * packed_column + o_d // cfg.BLOCK_DV)[None, :]
        tl.store(
            p_out,
            portable.cast_output(acc_o * acc_scale[:, None], OUT, cfg),
            mask=m_row[:, None] & (packed_column < cfg.DV // cfg.PACK)[None, :],
        )
        if cfg.HAS_LSE:
            tl.store(
                LSE + tokens * stride_lse_t + q_heads * stride_lse_h, lse, mask=m_row & (i_column_block % CHUNKS == 0)
            )
