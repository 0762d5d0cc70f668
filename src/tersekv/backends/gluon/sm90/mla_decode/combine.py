"""The combine kernels of MLA decode: rescale and sum the splits of each work tile, and store them or, in the decode
branch, project them.

A CTA takes COMBINE_ROWS rows and COMBINE_COLUMNS columns of one work tile, SPLITS_PER_STEP splits at a time. It may be
launched before the split pass has ended, and waits for it (PDL).

Combine and its rescale: `accumulate_splits`; mask: rows and splits that do not exist are not loaded; no pipeline.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....triton.parts.combine import cast_output, compute_acc_scale_and_lse, load_device_scale_else_host_scale
from ....triton.parts.project import (
    GROUP,
    accumulate_scaled_group,
    quantize_rows_e4m3_codes_and_scales,
    store_projection,
    weight_and_scale_ptrs_prefetched_weights_and_scales,
)
from ....triton.parts.tile_scheduler import split_metadata_ptr
from ..parts.combine import accumulate_splits

PROJECTED_COLUMNS = tl.constexpr(128)  # columns of a head's output, in the decode branch


@triton.jit
def combine_kernel(
    CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, num_ctas, max_m_blocks,
    stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    COMBINE_ROWS: tl.constexpr, SPLITS_PER_STEP: tl.constexpr, COMBINE_COLUMNS: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Combines one work tile of a block of heads; its splits from CTA p on lie in slots 2p + 1, 2(p + HEADS), …"""
    gdc_launch_dependents()
    gdc_wait()
    i_work_tile, i_column_block = tl.program_id(0), tl.program_id(2)
    h, m_block, i_request = (
        i_work_tile % cfg.HEADS, i_work_tile // cfg.HEADS % max_m_blocks, i_work_tile // (cfg.HEADS * max_m_blocks),
    )  # fmt: skip
    if cfg.VARLEN_Q:
        q_begin = tl.load(CU_SEQLENS_Q + i_request).to(tl.int32)
        seqlen_q = tl.load(CU_SEQLENS_Q + i_request + 1).to(tl.int32) - q_begin
    else:
        q_begin, seqlen_q = i_request * cfg.MAX_SEQLEN_Q, cfg.MAX_SEQLEN_Q
    o_r = tl.program_id(1) * COMBINE_ROWS + tl.arange(0, COMBINE_ROWS)
    m_row = (o_r < cfg.BLOCK_M) & (m_block * cfg.BLOCK_M + o_r < seqlen_q * cfg.GROUP)
    # Loaded whether the work tile exists or not: no need to wait for CU_SEQLENS_Q.
    SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, num_ctas, cfg) + 2 * i_work_tile
    num_splits, first_cta = tl.load(SPLIT_METADATA), tl.load(SPLIT_METADATA + 1)
    if (num_splits > 1) & (m_block * cfg.BLOCK_M < seqlen_q * cfg.GROUP):
        o_split, o_d = tl.arange(0, SPLITS_PER_STEP), i_column_block * COMBINE_COLUMNS + tl.arange(0, COMBINE_COLUMNS)
        row_max = tl.full([COMBINE_ROWS], float("-inf"), tl.float32)
        row_sum = tl.full([COMBINE_ROWS], 0.0, tl.float32)
        acc_o = tl.full([COMBINE_ROWS, COMBINE_COLUMNS], 0.0, tl.float32)
        for i_split in range(0, num_splits, SPLITS_PER_STEP):
            mask = m_row[:, None] & (i_split + o_split < num_splits)[None, :]
            partial_slots = 2 * (first_cta + (i_split + o_split) * cfg.HEADS) + tl.where(i_split + o_split == 0, 1, 0)
            row_max, row_sum, acc_o = accumulate_splits(
                row_max, row_sum, acc_o, SPLIT_WORKSPACE, partial_slots[None, :], o_r, o_d, mask, cfg
            )
        # Epilogue.
        row = m_block * cfg.BLOCK_M + o_r
        heads = (h * cfg.GROUP + row % cfg.GROUP).to(tl.int64)
        tokens = (q_begin + row // cfg.GROUP).to(tl.int64)
        value_scale = load_device_scale_else_host_scale(
            kv_scale, KV_SCALE, 0, cfg.HAS_V_SCALE
        ) * load_device_scale_else_host_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE)
        acc_scale, lse = compute_acc_scale_and_lse(
            row_max, row_sum, value_scale, SINKS, heads, m_row, cfg, cfg.LSE_OF_KEYS
        )
        columns = cfg.PACK * (o_d % cfg.BLOCK_DV) + o_d // cfg.BLOCK_DV
        p_out = OUT + (tokens * stride_out_t + heads * stride_out_h)[:, None] + columns[None, :]
        m_out = m_row[:, None]
        if cfg.DV < cfg.PACK * cfg.BLOCK_DV:
            m_out = m_out & (columns < cfg.DV)[None, :]
        tl.store(p_out, cast_output(acc_o * acc_scale[:, None], OUT, cfg), mask=m_out)
        if cfg.HAS_LSE:
            tl.store(LSE + tokens * stride_lse_t + heads * stride_lse_h, lse, mask=m_row & (i_column_block == 0))


@triton.jit
def combine_splits_to_normalized_rows(
    SPLIT_WORKSPACE, first_cta_of_row, num_splits_of_row, o_r, o_d, value_scale, SPLITS_PER_STEP: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """Returns columns o_d, in partial order, of rows o_r, each combined from its own splits from its first CTA on:
    fp32, 0 without splits.

    NOTE: tiles must be so wide that warps lie side by side. Sums over splits across warps go through shared memory, by
    one bank: with tiles of 128 columns and 8 warps, 19 µs instead of 9.
    """
    o_split = tl.arange(0, SPLITS_PER_STEP)
    # The first split lies in its CTA's other slot, and starts the state: of 33 splits 32 are left.
    p_first = SPLIT_WORKSPACE + ((2 * first_cta_of_row + 1).to(tl.int64) * cfg.BLOCK_M + o_r) * cfg.PARTIAL_COLUMNS
    row_max = tl.load(p_first + cfg.PARTIAL_COLUMNS - 2, mask=num_splits_of_row > 0, other=float("-inf"))
    row_sum = tl.load(p_first + cfg.PARTIAL_COLUMNS - 1, mask=num_splits_of_row > 0, other=0.0)
    acc_o = tl.load(p_first[:, None] + o_d[None, :], mask=(num_splits_of_row > 0)[:, None], other=0.0)
    for i_split in range(1, tl.max(num_splits_of_row), SPLITS_PER_STEP):
        mask = i_split + o_split[None, :] < num_splits_of_row[:, None]
        partial_slots = 2 * (first_cta_of_row[:, None] + (i_split + o_split) * cfg.HEADS)
        row_max, row_sum, acc_o = accumulate_splits(
            row_max, row_sum, acc_o, SPLIT_WORKSPACE, partial_slots, o_r, o_d, mask, cfg
        )
    acc_scale, _ = compute_acc_scale_and_lse(row_max, row_sum, value_scale, None, o_r, num_splits_of_row > 0, cfg)
    return acc_o * acc_scale[:, None]


@triton.jit
def work_tile_row_and_validity_of_tokens(CU_SEQLENS_Q, tokens, h, T, B, max_m_blocks, cfg: tl.constexpr):
    """Returns (work tile, row in it, whether it exists) of these tokens of head h, numbered as in SPLIT_METADATA.
    Tokens before the first request have none."""
    if cfg.VARLEN_Q:
        i_request = tokens * 0
        for j in range(0, B, cfg.BLOCK_B):
            o_b = j + tl.arange(0, cfg.BLOCK_B)
            q_ends = tl.load(CU_SEQLENS_Q + 1 + o_b, mask=o_b < B, other=2**31 - 1).to(tl.int32)
            i_request += tl.sum((q_ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
        q_begin = tl.load(CU_SEQLENS_Q + i_request).to(tl.int32)
    else:
        i_request = tokens // cfg.MAX_SEQLEN_Q
        q_begin = i_request * cfg.MAX_SEQLEN_Q
    row = (tokens - q_begin) * cfg.GROUP + h % cfg.GROUP
    is_row = (tokens >= q_begin) & (tokens < T) & (i_request < B)
    return (i_request * max_m_blocks + row // cfg.BLOCK_M) * cfg.HEADS + h // cfg.GROUP, row % cfg.BLOCK_M, is_row


@triton.jit
def split_into_four_column_blocks(x):
    """Splits [M, 4 N] into four tiles [M, N]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1] // 4
    low, high = tl.split(tl.permute(tl.reshape(x, [M, 2, 2 * N]), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(low, [M, 2, N]), (0, 2, 1)))
    c, d = tl.split(tl.permute(tl.reshape(high, [M, 2, N]), (0, 2, 1)))
    return a, b, c, d


@triton.jit(do_not_specialize=["T", "B"])
def combine_quantize_project_kernel(
    CU_SEQLENS_Q, LATENTS, SPLIT_WORKSPACE, W, W_SCALE, OUT, kv_scale, KV_SCALE, T, B, num_ctas, max_m_blocks,
    stride_lt, stride_lh,
    stride_wh, stride_wn, stride_sh, stride_sn, stride_ot, stride_oh,
    BLOCK_M: tl.constexpr, SPLITS_PER_STEP: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Combines head h of BLOCK_M tokens, rounds as `combine_kernel` does, quantizes, and projects to PROJECTED_COLUMNS
    columns by e4m3 weights. Unsplit rows are read from LATENTS. Weights are prefetched before the PDL wait."""
    gdc_launch_dependents()
    h = tl.program_id(0)
    _, weights, scales = weight_and_scale_ptrs_prefetched_weights_and_scales(
        (W, stride_wh, stride_wn, W_SCALE, stride_sh, stride_sn), h.to(tl.int64), 0, PROJECTED_COLUMNS, cfg.DV,
        PROJECTED_COLUMNS, 4,
    )  # fmt: skip
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    gdc_wait()
    i_work_tile, o_r, is_row = work_tile_row_and_validity_of_tokens(CU_SEQLENS_Q, o_m, h, T, B, max_m_blocks, cfg)
    SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, num_ctas, cfg) + 2 * i_work_tile
    num_splits, first_cta = (
        tl.load(SPLIT_METADATA, mask=is_row, other=1),
        tl.load(SPLIT_METADATA + 1, mask=is_row, other=0),
    )
    is_split = num_splits > 1
    p_unsplit = (
        LATENTS + h.to(tl.int64) * stride_lh + o_m.to(tl.int64)[:, None] * stride_lt + tl.arange(0, cfg.DV)[None, :]
    )
    # Not only 1: where CTAs take whole work tiles, `num_splits` is 1 minus the index of the CTA range.
    unsplit_latents = tl.load(p_unsplit, mask=(is_row & (num_splits <= 1))[:, None], other=0.0)
    value_scale = load_device_scale_else_host_scale(kv_scale, KV_SCALE, 0, cfg.HAS_V_SCALE)
    o_d = tl.arange(0, cfg.DV) % cfg.PACK * cfg.BLOCK_DV + tl.arange(0, cfg.DV) // cfg.PACK
    latents = combine_splits_to_normalized_rows(
        SPLIT_WORKSPACE, first_cta, tl.where(is_split, num_splits, 0), o_r, o_d, value_scale, SPLITS_PER_STEP, cfg
    )
    latents = tl.where(is_split[:, None], cast_output(latents, LATENTS, cfg), unsplit_latents)
    # Quantize and project.
    codes, x_scales = quantize_rows_e4m3_codes_and_scales(tl.reshape(latents, [4 * BLOCK_M, GROUP]), True)
    codes, x_scales = (
        split_into_four_column_blocks(tl.reshape(codes, [BLOCK_M, 4 * GROUP])),
        split_into_four_column_blocks(tl.reshape(x_scales, [BLOCK_M, 4])),
    )
    acc_o = tl.zeros([PROJECTED_COLUMNS, BLOCK_M], tl.float32)  # transposed: weights are the M side
    for i_group in tl.static_range(4):
        scale = tl.reshape(x_scales[i_group], [BLOCK_M])
        acc_o = accumulate_scaled_group(acc_o, codes[i_group], scale, weights[i_group], scales[i_group], True, True)
    store_projection(
        acc_o, (OUT, stride_ot, stride_oh), h.to(tl.int64), 0, o_m, T, PROJECTED_COLUMNS, PROJECTED_COLUMNS, True
    )
