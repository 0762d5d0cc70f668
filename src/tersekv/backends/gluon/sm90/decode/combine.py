"""Combine of the splits of decode's split pass: rescales and sums all partial results of a work tile.

A CTA has COMBINE_ROWS rows of a work tile and COMBINE_COLUMNS columns; COMBINE_SPLITS splits are loaded at once. It is
launched before the split pass ends, and waits for it (PDL); the next kernel may be launched before it ends.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....triton.parts.combine import cast_output, finalize_softmax, load_scale
from ....triton.parts.tile_scheduler import split_metadata_ptr
from ..parts.combine_splits import accumulate_splits


@triton.jit
def combine_kernel(
    CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE, v_scale, V_SCALE, out_scale, OUT_SCALE, num_ranges, stride_out_t,
    stride_out_h, stride_lse_t, stride_lse_h,
    cfg: tl.constexpr, tile_cfg: tl.constexpr,
):  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    i_work_tile, i_column_block = tl.program_id(0), tl.program_id(1)
    first_head, m_block, i_request = (
        i_work_tile % tile_cfg.HEAD_GROUPS * tile_cfg.HEADS_PER_CTA,
        i_work_tile // tile_cfg.HEAD_GROUPS % tile_cfg.MAX_M_BLOCKS,
        i_work_tile // (tile_cfg.HEAD_GROUPS * tile_cfg.MAX_M_BLOCKS),
    )
    if cfg.VARLEN_Q:
        q_begin = tl.load(CU_SEQLENS_Q + i_request).to(tl.int32)
        num_q_rows = tl.load(CU_SEQLENS_Q + i_request + 1).to(tl.int32) - q_begin
    else:
        q_begin, num_q_rows = i_request * cfg.MAX_SEQLEN_Q, cfg.MAX_SEQLEN_Q
    num_splits, first_range = 0, 0
    if m_block * cfg.BLOCK_M < num_q_rows * cfg.GROUP:
        SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, num_ranges * cfg.HEADS, cfg) + 2 * i_work_tile
        num_splits, first_range = tl.load(SPLIT_METADATA), tl.load(SPLIT_METADATA + 1)
    if num_splits > 1:
        CHUNKS: tl.constexpr = cfg.PACK * cfg.BLOCK_DV // tile_cfg.COMBINE_COLUMNS
        o_row = i_column_block // CHUNKS * tile_cfg.COMBINE_ROWS + tl.arange(0, tile_cfg.COMBINE_ROWS)
        kv_heads, row_in_tile = first_head + o_row // tile_cfg.VALID_ROWS, o_row % tile_cfg.VALID_ROWS
        q_row = m_block * cfg.BLOCK_M + row_in_tile
        m_row = (q_row < num_q_rows * cfg.GROUP) & (o_row < tile_cfg.HEADS_PER_CTA * tile_cfg.VALID_ROWS)
        o_split = tl.arange(0, tile_cfg.COMBINE_SPLITS)
        o_d = i_column_block % CHUNKS * tile_cfg.COMBINE_COLUMNS + tl.arange(0, tile_cfg.COMBINE_COLUMNS)
        row_max = tl.full([tile_cfg.COMBINE_ROWS], float("-inf"), tl.float32)
        row_sum = tl.full([tile_cfg.COMBINE_ROWS], 0.0, tl.float32)
        acc_o = tl.full([tile_cfg.COMBINE_ROWS, tile_cfg.COMBINE_COLUMNS], 0.0, tl.float32)
        for i in range(0, num_splits, tile_cfg.COMBINE_SPLITS):
            mask = m_row[:, None] & (i + o_split < num_splits)[None, :]
            partial_slots = (
                2 * ((first_range + i + o_split)[None, :] * cfg.HEADS + kv_heads[:, None])
                + tl.where(i + o_split == 0, 1, 0)[None, :]
            )
            row_max, row_sum, acc_o = accumulate_splits(
                row_max, row_sum, acc_o, SPLIT_WORKSPACE, partial_slots, row_in_tile, o_d, mask, cfg
            )
        q_heads = (kv_heads * cfg.GROUP + q_row % cfg.GROUP).to(tl.int64)
        tokens = (q_begin + q_row // cfg.GROUP).to(tl.int64)
        v_scales = v_scale + tl.full([tile_cfg.COMBINE_ROWS], 0.0, tl.float32)
        if cfg.HAS_V_SCALE:
            v_scales = tl.load(V_SCALE + kv_heads * cfg.V_SCALE_STRIDE, mask=m_row, other=0.0)
        v_out_scale = v_scales * load_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE)
        acc_scale, lse = finalize_softmax(
            row_max, row_sum, v_out_scale * cfg.V_RESIDUAL_SCALE, SINKS, q_heads, m_row, cfg
        )
        packed_column = o_d % cfg.BLOCK_DV
        p_out = (
            OUT
            + (tokens * stride_out_t + q_heads * stride_out_h)[:, None]
            + (cfg.PACK * packed_column + o_d // cfg.BLOCK_DV)[None, :]
        )
        tl.store(
            p_out,
            cast_output(acc_o * acc_scale[:, None], OUT, cfg),
            mask=m_row[:, None] & (packed_column < cfg.DV // cfg.PACK)[None, :],
        )
        if cfg.HAS_LSE:
            tl.store(
                LSE + tokens * stride_lse_t + q_heads * stride_lse_h, lse, mask=m_row & (i_column_block % CHUNKS == 0)
            )
