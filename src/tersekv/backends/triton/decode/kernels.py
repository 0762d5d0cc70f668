"""The stream-K kernel of paged decode: each program takes an equal range of all key blocks (`parts/tile_scheduler`).
The mask and the rescale are in `mainloop`, Triton pipelines the loads, and `parts/combine` combines splits.

Keys lie on the matrix unit's M side and query rows on N, so few query heads waste little of it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from ..parts.combine import LOG2E, cast_output, compute_acc_scale_and_lse, load_device_scale_else_host_scale
from ..parts.key_lists import page_table_row_ptr_or_key_list
from ..parts.listed_pages import load_first_cut_key
from ..parts.tile_scheduler import (
    METADATA_FIELDS,
    blocks_per_split,
    blocks_to_next_split,
    find_program_block_range_and_blocks_per_range,
    find_request_and_base_of_block,
    first_work_tile_index,
    load_request_lengths_and_block_counts,
    split_metadata_ptr,
    store_empty_output_of_padding_rows,
    token_and_head_of_q_rows,
)  # fmt: skip
from .mainloop import (
    MaskArgs,
    load_transposed_16bit_q_tiles_and_q_scale,
    mainloop_row_max_row_sum_acc_o,
    unrotate_acc,
)


@triton.jit
def store_output(OUT, acc_o, acc_scale, tokens, heads, m_row, stride_out_t, stride_out_h, cfg: tl.constexpr):
    """Stores acc_o × acc_scale to OUT; acc_o: PACK tiles [BLOCK_DV, BLOCK_M]."""
    PACK: tl.constexpr = cfg.PACK
    o_d = tl.arange(0, cfg.BLOCK_DV)
    mask = (o_d < cfg.PACKED_V)[:, None] & m_row[None, :]
    for j in tl.static_range(PACK):
        p_out = OUT + (tokens * stride_out_t + heads * stride_out_h)[None, :] + (cfg.PACK * o_d + j)[:, None]
        tl.store(p_out, cast_output(acc_o[j] * acc_scale[None, :], OUT, cfg), mask=mask)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def stream_k_decode_kernel(
    Q, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, INDICES, INDEX_LENS, LIST_SEQ_LENS,
    LIST_CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, K_SIGNS,
    V_SIGNS, K_CHANNEL_SCALES, V_CHANNEL_SCALES,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, max_splits, stride_q_t, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h,
    stride_k_scales_p, stride_k_scales_s, stride_k_scales_h, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h,
    stride_k_channel_scales_h, stride_v_channel_scales_h, stride_table_b, stride_mask_t, stride_out_t, stride_out_h,
    stride_lse_t, stride_lse_h, num_requests, num_slots, stride_list_t, stride_list_h, stride_list_n,
    cfg: tl.constexpr,
):  # fmt: skip
    """Attends to one program's range of key blocks. See the module's docstring."""
    i_program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    h = i_program % cfg.HEADS
    if cfg.USE_PDL:
        gdc_wait()
    if cfg.LIST.PER_HEAD:
        SEQ_LENS += h * B
        PAGE_TABLE += (h * B).to(tl.int64) * stride_table_b
    # Query rows of no request; no splits so far
    SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, num_programs, cfg)
    if cfg.SPLIT_BLOCKS == 0:
        tl.store(SPLIT_METADATA + i_program * METADATA_FIELDS, 0)
    if cfg.VARLEN_Q:
        store_empty_output_of_padding_rows(
            OUT, LSE, tl.load(CU_SEQLENS_Q + B).to(tl.int32), T, i_program, num_programs, stride_out_t, stride_out_h,
            stride_lse_t, stride_lse_h, cfg,
        )  # fmt: skip
    # Tile scheduler: range of key blocks of this program
    block, block_end, blocks_per_range = find_program_block_range_and_blocks_per_range(
        SEQ_LENS, CU_SEQLENS_Q, B, i_program // cfg.HEADS, num_programs // cfg.HEADS, cfg
    )
    lists = (
        INDICES, INDEX_LENS, LIST_SEQ_LENS, LIST_CU_SEQLENS_Q, num_requests, num_slots, stride_list_t, stride_list_h,
        stride_list_n,
    )  # fmt: skip
    if block < block_end:
        i_request, n_block_base = find_request_and_base_of_block(SEQ_LENS, CU_SEQLENS_Q, B, block, cfg)
        score_scale = load_device_scale_else_host_scale(softmax_scale, SOFTMAX_SCALE, 0, cfg.HAS_SOFTMAX_SCALE) * LOG2E
        request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, True, cfg)
        if cfg.SPLIT_BLOCKS > 0:
            block += blocks_to_next_split(block - n_block_base, request.num_n_blocks, cfg)
        while block < block_end:
            # Next work tile
            while block - n_block_base >= request.num_n_blocks * request.num_m_blocks:
                n_block_base += request.num_n_blocks * request.num_m_blocks
                i_request += 1
                request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, True, cfg)
            m_block = (block - n_block_base) // request.num_n_blocks
            n_block_begin = (block - n_block_base) % request.num_n_blocks
            n_block_end = tl.minimum(
                n_block_begin
                + (block_end - block if cfg.SPLIT_BLOCKS == 0 else blocks_per_split(request.num_n_blocks, cfg)),
                request.num_n_blocks,
            )
            # Load Q
            tokens, heads, m_row = token_and_head_of_q_rows(m_block, h, request.q_begin, request.seqlen_q, cfg)
            scale = score_scale * load_device_scale_else_host_scale(
                k_scale, K_SCALE, h * cfg.K_SCALE_STRIDE, cfg.HAS_K_SCALE
            )
            q, q_scale = load_transposed_16bit_q_tiles_and_q_scale(
                Q, tokens, heads, m_row, stride_q_t, stride_q_h, (K_SIGNS, K_CHANNEL_SCALES, stride_k_channel_scales_h),
                h, cfg,
            )  # fmt: skip
            # Main loop
            mask_args = MaskArgs(
                request.num_keys, request.seqlen_q, m_block * cfg.BLOCK_M, request.q_begin,
                load_first_cut_key(SEQ_LENS, i_request, request.num_keys, cfg), MASK, stride_mask_t,
            )  # fmt: skip
            row_max, row_sum, acc_o = mainloop_row_max_row_sum_acc_o(
                K, V, K_SCALES, V_SCALES,
                page_table_row_ptr_or_key_list(PAGE_TABLE, stride_table_b, i_request, h, lists, cfg),
                q, scale * q_scale, softcap,
                request.first_n_block + n_block_begin, request.first_n_block + n_block_end, mask_args, h,
                stride_k_p, stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_k_scales_p,
                stride_k_scales_s, stride_k_scales_h, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h, cfg,
            )  # fmt: skip
            # Unrotate
            acc_o = unrotate_acc(acc_o, (V_SIGNS, V_CHANNEL_SCALES, stride_v_channel_scales_h), h, cfg)
            # Epilogue: a whole work tile goes to OUT, a split to the workspace, for the combine
            if n_block_end - n_block_begin == request.num_n_blocks:
                value_scale = load_device_scale_else_host_scale(
                    v_scale, V_SCALE, h * cfg.V_SCALE_STRIDE, cfg.HAS_V_SCALE
                ) * load_device_scale_else_host_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE)
                acc_scale, lse = compute_acc_scale_and_lse(
                    row_max, row_sum, value_scale * cfg.V_RESIDUAL_SCALE, SINKS, heads, m_row, cfg
                )
                store_output(OUT, acc_o, acc_scale, tokens, heads, m_row, stride_out_t, stride_out_h, cfg)
                if cfg.HAS_LSE:
                    tl.store(LSE + tokens * stride_lse_t + heads * stride_lse_h, lse, mask=m_row)
            else:
                partial_slot = 2 * i_program
                if cfg.SPLIT_BLOCKS > 0:
                    partial_slot = (
                        first_work_tile_index(i_request, request.q_begin, cfg) + m_block
                    ) * max_splits + n_block_begin // blocks_per_split(request.num_n_blocks, cfg)
                    partial_slot = partial_slot * cfg.HEADS + h
                elif n_block_begin == 0:
                    partial_slot += 1
                    num_splits = (
                        (n_block_base + (m_block + 1) * request.num_n_blocks - 1) // blocks_per_range
                        - i_program // cfg.HEADS
                        + 1
                    )
                    tl.store(SPLIT_METADATA + i_program * METADATA_FIELDS, num_splits)
                    tl.store(SPLIT_METADATA + i_program * METADATA_FIELDS + 1, request.q_begin)
                    tl.store(SPLIT_METADATA + i_program * METADATA_FIELDS + 2, request.seqlen_q)
                    tl.store(SPLIT_METADATA + i_program * METADATA_FIELDS + 3, m_block)
                store_partial(SPLIT_WORKSPACE, partial_slot, row_max, row_sum, acc_o, m_row, cfg)
            block += n_block_end - n_block_begin


@triton.jit
def store_partial(SPLIT_WORKSPACE, partial_slot, row_max, row_sum, acc_o, m_row, cfg: tl.constexpr):
    """Stores a split's softmax state: [BLOCK_M, PACK × BLOCK_DV + 2] fp32, the last two columns row_max and row_sum."""
    PACK: tl.constexpr = cfg.PACK
    o_r = tl.arange(0, cfg.BLOCK_M)
    o_d = tl.arange(0, cfg.BLOCK_DV)
    p_row = SPLIT_WORKSPACE + (partial_slot.to(tl.int64) * cfg.PARTIAL_ROWS + o_r) * cfg.PARTIAL_COLUMNS
    for j in tl.static_range(PACK):
        tl.store(p_row[None, :] + j * cfg.BLOCK_DV + o_d[:, None], acc_o[j], mask=m_row[None, :])
    tl.store(p_row + cfg.PARTIAL_COLUMNS - 2, row_max, mask=m_row)
    tl.store(p_row + cfg.PARTIAL_COLUMNS - 1, row_sum, mask=m_row)
