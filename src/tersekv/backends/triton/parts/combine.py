"""The end of attention: softmax states become outputs, and splits (`tile_scheduler`) are combined."""

import triton
import triton.language as tl

from .quant import cast_to_float_dtype_or_fp8_bytes
from .tile_scheduler import (
    METADATA_FIELDS,
    blocks_per_split,
    find_request_and_m_block_of_work_tile,
    load_request_lengths_and_block_counts,
    split_metadata_ptr,
)

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_device_scale_else_host_scale(host_scale, DEVICE_SCALE, offset, HAS_DEVICE_SCALE: tl.constexpr):
    """Returns a scale: loaded from the device tensor if there is one, else the host float."""
    if HAS_DEVICE_SCALE:
        return tl.load(DEVICE_SCALE + offset)
    else:
        return host_scale


@triton.jit
def clamp_keep_nan(value, MAX_VALUE: tl.constexpr):
    """Returns value clamped to the output's largest; NaN stays NaN. MAX_VALUE 0: no clamp."""
    if MAX_VALUE > 0:
        return tl.clamp(value, -MAX_VALUE, MAX_VALUE, propagate_nan=tl.PropagateNan.ALL)
    else:
        return value


@triton.jit
def cast_output(value, OUT, cfg: tl.constexpr):
    """Casts fp32 to OUT's type; fp8 saturates. Where the chip's casts do not round to nearest, OUT is bytes."""
    KIND: tl.constexpr = cfg.OUT_KIND
    return cast_to_float_dtype_or_fp8_bytes(clamp_keep_nan(value, cfg.OUT_MAX), OUT.dtype.element_ty, KIND, False)


@triton.jit
def compute_acc_scale_and_lse(
    row_max, row_sum, v_scale, SINKS, heads, m_row, cfg: tl.constexpr, LSE_OF_KEYS: tl.constexpr = False
):
    """Returns (acc_scale, LSE in natural log) of rows with base-2 row_max and row_sum; LSE_OF_KEYS: without sinks."""
    not_empty = row_sum != 0  # NaN counts as not empty
    safe_max = tl.where(not_empty, row_max, 0.0)
    denominator = row_sum
    lse_max = safe_max
    if cfg.HAS_SINKS:
        sink = tl.load(SINKS + heads, mask=m_row, other=0.0) * LOG2E
        max_with_sink = tl.maximum(safe_max, sink)  # a sink far above every score would overflow against `safe_max`
        rescale = tl.exp2(safe_max - max_with_sink)
        # A sink of +inf takes all; inf − inf would be NaN.
        sink_p = tl.where(sink == max_with_sink, 1.0, tl.exp2(sink - max_with_sink))
        denominator = tl.where(not_empty, row_sum * rescale + sink_p, 0.0)
        v_scale *= rescale
        safe_max = tl.where(not_empty, max_with_sink, 0.0)
    acc_scale = tl.where(not_empty, v_scale / tl.where(not_empty, denominator, 1.0), 0.0)
    if LSE_OF_KEYS:
        denominator = row_sum
    else:
        lse_max = safe_max
    lse = tl.where(not_empty, (lse_max + tl.log2(tl.where(not_empty, denominator, 1.0))) * LN2, float("-inf"))
    return acc_scale, lse


@triton.jit
def combine_by_split_metadata_kernel(
    SINKS, OUT, LSE, MAX_LOGITS, SPLIT_WORKSPACE, v_scale, V_SCALE, out_scale, OUT_SCALE, stride_out_t, stride_out_h,
    stride_lse_t, stride_lse_h, cfg: tl.constexpr
):  # fmt: skip
    """Combines one row of the work tile that begins in program p: slots 2p + 1, 2(p + HEADS), 2(p + 2 HEADS), …"""
    i_program, i_row_in_block = tl.program_id(0), tl.program_id(1)
    SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, tl.num_programs(0), cfg)
    num_splits = tl.load(SPLIT_METADATA + i_program * METADATA_FIELDS)
    q_begin = tl.load(SPLIT_METADATA + i_program * METADATA_FIELDS + 1)
    seqlen_q = tl.load(SPLIT_METADATA + i_program * METADATA_FIELDS + 2)
    if num_splits > 0:
        m_block = tl.load(SPLIT_METADATA + i_program * METADATA_FIELDS + 3)
        h, i_row = i_program % cfg.HEADS, m_block * cfg.BLOCK_M + i_row_in_block
        if i_row < seqlen_q * cfg.GROUP:
            row_max, row_sum, acc_o = combine_row_splits_unnormalized(
                SPLIT_WORKSPACE, 2 * i_program, 2 * cfg.HEADS, 1, num_splits, i_row_in_block, cfg
            )
            store_output_row(
                row_max, row_sum, acc_o, SINKS, OUT, LSE, MAX_LOGITS, v_scale, V_SCALE, out_scale, OUT_SCALE, q_begin,
                h, i_row, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg
            )  # fmt: skip


@triton.jit
def combine_batch_invariant_kernel(
    SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, MAX_LOGITS, SPLIT_WORKSPACE, v_scale, V_SCALE, out_scale, OUT_SCALE, B,
    max_splits, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg: tl.constexpr
):  # fmt: skip
    """Combines one row of a split work tile, numbered by `tile_scheduler.first_work_tile_index`."""
    i_program, i_row_in_block = tl.program_id(0), tl.program_id(1)
    i_work_tile, h = i_program // cfg.HEADS, i_program % cfg.HEADS
    i_request, m_block = find_request_and_m_block_of_work_tile(CU_SEQLENS_Q, B, i_work_tile, cfg)
    request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, True, cfg)
    i_row, split_blocks = m_block * cfg.BLOCK_M + i_row_in_block, blocks_per_split(request.num_n_blocks, cfg)
    if (i_row < request.seqlen_q * cfg.GROUP) & (split_blocks < request.num_n_blocks):
        row_max, row_sum, acc_o = combine_row_splits_unnormalized(
            SPLIT_WORKSPACE, i_work_tile * max_splits * cfg.HEADS + h, cfg.HEADS, 0,
            tl.cdiv(request.num_n_blocks, split_blocks), i_row_in_block, cfg,
        )  # fmt: skip
        store_output_row(
            row_max, row_sum, acc_o, SINKS, OUT, LSE, MAX_LOGITS, v_scale, V_SCALE, out_scale, OUT_SCALE,
            request.q_begin, h, i_row, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg
        )  # fmt: skip


@triton.jit
def combine_row_splits_unnormalized(
    SPLIT_WORKSPACE, slot_base, slot_stride, extra_offset_of_split_0, num_splits, i_row_in_block, cfg: tl.constexpr
):
    """Returns (row_max, row_sum, acc_o) of one row over all splits; the first slot is slot_base +
    extra_offset_of_split_0."""
    o_split, o_d = tl.arange(0, cfg.COMBINE_SPLITS), tl.arange(0, cfg.COMBINE_COLUMNS)
    row_max = tl.full([], float("-inf"), tl.float32)
    row_sum = tl.full([], 0.0, tl.float32)
    acc_o = tl.full([cfg.COMBINE_COLUMNS], 0.0, tl.float32)
    for i_split in range(0, num_splits, cfg.COMBINE_SPLITS):
        m_split = i_split + o_split < num_splits
        split_slots = (
            slot_base + (i_split + o_split) * slot_stride + tl.where(i_split + o_split == 0, extra_offset_of_split_0, 0)
        ).to(tl.int64)
        p_split = SPLIT_WORKSPACE + (split_slots * cfg.PARTIAL_ROWS + i_row_in_block) * cfg.PARTIAL_COLUMNS
        split_max = tl.load(p_split + cfg.PARTIAL_COLUMNS - 2, mask=m_split, other=float("-inf"))
        split_sum = tl.load(p_split + cfg.PARTIAL_COLUMNS - 1, mask=m_split, other=0.0)
        m_load = m_split[:, None]
        split_acc = tl.load(p_split[:, None] + o_d[None, :], mask=m_load, other=0.0)
        # Rescale to the common row_max and sum
        row_max_new = tl.maximum(row_max, tl.max(split_max, 0))
        safe_max = tl.where(row_max_new == float("-inf"), 0.0, row_max_new)
        split_scales = tl.exp2(split_max - safe_max)
        rescale = tl.exp2(row_max - safe_max)
        acc_o = acc_o * rescale + tl.sum(split_acc * split_scales[:, None], 0)
        row_sum = row_sum * rescale + tl.sum(split_sum * split_scales, 0)
        row_max = row_max_new
    return row_max, row_sum, acc_o


@triton.jit
def store_output_row(row_max, row_sum, acc_o, SINKS, OUT, LSE, MAX_LOGITS, v_scale, V_SCALE, out_scale, OUT_SCALE,
                     q_begin, h, i_row, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
                     cfg: tl.constexpr):  # fmt: skip
    """Stores the output of one row of a KV head, its LSE and its largest score."""
    o_d = tl.arange(0, cfg.COMBINE_COLUMNS)
    head = (h * cfg.GROUP + i_row % cfg.GROUP).to(tl.int64)
    token = (q_begin + i_row // cfg.GROUP).to(tl.int64)
    value_scale = load_device_scale_else_host_scale(
        v_scale, V_SCALE, h * cfg.V_SCALE_STRIDE, cfg.HAS_V_SCALE
    ) * load_device_scale_else_host_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE)
    acc_scale, lse = compute_acc_scale_and_lse(
        row_max, row_sum, value_scale * cfg.V_RESIDUAL_SCALE, SINKS, head, True, cfg, cfg.LSE_OF_KEYS
    )
    packed_column = o_d % cfg.BLOCK_DV
    p_out = OUT + token * stride_out_t + head * stride_out_h + cfg.PACK * packed_column + o_d // cfg.BLOCK_DV
    tl.store(p_out, cast_output(acc_o * acc_scale, OUT, cfg), mask=packed_column < cfg.PACKED_V)
    if cfg.HAS_LSE:
        tl.store(LSE + token * stride_lse_t + head * stride_lse_h, lse)
    if MAX_LOGITS is not None:
        tl.store(MAX_LOGITS + token * stride_lse_t + head * stride_lse_h, row_max * LN2)
