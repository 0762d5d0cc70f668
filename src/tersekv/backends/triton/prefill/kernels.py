"""The kernel of paged prefill: a program attends to all keys of one m_block of one request and KV head. The mask and
the rescale are in `mainloop`, Triton pipelines the loads; keys are split, and combined, only with SPLIT_KEYS.

Where a row's bits may depend on its own position alone (SPLIT_KEYS > 0), keys are split at multiples of SPLIT_KEYS, and
the states of splits are combined in their order: by a program that attends to all of them, one after the other, or by
`combine_in_order_kernel`, after programs of one split each (SPLIT_WORKSPACE). Both round the same.

A row is a new token and a query head of the group (`tile_scheduler`). Programs of late m_blocks, which see most keys,
start first. With lists of blocks of keys (LISTED_BLOCK > 0) a program attends to those that its rows list, all or those
that `k2q` leaves.
"""

import triton
import triton.language as tl

from ..parts.combine import cast_output, compute_acc_scale_and_lse, load_device_scale_else_host_scale
from ..parts.dequant import INT4, dequant_tile_power_of_2_factor
from ..parts.hadamard import scale_and_rotate_query, unrotate_and_rescale_output
from ..parts.tile_scheduler import store_empty_output_of_padding_rows
from .k2q import K2Q, combine_k2q_partials
from .listed_blocks import ListedBlocks, listed_mainloop
from .mainloop import (
    KeyRange,
    KVOperand,
    StridedRows,
    column_scales,
    combine_two_splits,
    load_query_rows_as_fp32,
    mainloop,
    to_16bit_query_tiles_and_score_scale,
    transpose_column_order,
)
from .tile_scheduler import find_request_and_m_block_maybe_empty, load_q_begin

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def visible_key_range_with_q_positions(key_begin, key_end, q_position_begin, q_position_end, cfg: tl.constexpr):
    """Returns the KeyRange of keys [key_begin, key_end) visible to rows at [q_position_begin, q_position_end)."""
    begin = key_begin
    if cfg.WINDOW > 0:
        begin = tl.maximum(key_begin, q_position_begin - cfg.WINDOW + 1)
    return KeyRange(begin, tl.maximum(tl.minimum(key_end, q_position_end), begin), q_position_begin, q_position_end)


@triton.jit
def split_index_begin_and_end(key_range, cfg: tl.constexpr):
    """Returns the first split of a range of keys, and one past its last; at least one."""
    begin = key_range.begin // cfg.SPLIT_KEYS
    return begin, tl.maximum(tl.cdiv(key_range.end, cfg.SPLIT_KEYS), begin + 1)


@triton.jit
def clip_key_range_to_split(key_range, i_split, cfg: tl.constexpr):
    """Returns the part of a KeyRange in split i_split; it may be empty."""
    begin = tl.maximum(key_range.begin, i_split * cfg.SPLIT_KEYS)
    end = tl.maximum(tl.minimum(key_range.end, (i_split + 1) * cfg.SPLIT_KEYS), begin)
    return KeyRange(begin, end, key_range.q_position_begin, key_range.q_position_end)


@triton.jit
def partial_row_offsets(i_tile, i_split, num_splits, h, i_row, cfg: tl.constexpr):
    """Returns the offset in SPLIT_WORKSPACE of a row of a partial result: its columns, row_max and row_sum."""
    slot = (tl.cast(i_tile, tl.int64) * num_splits + i_split) * cfg.HEADS + h
    return (slot * cfg.PARTIAL_ROWS + i_row) * (cfg.PACK * cfg.BLOCK_DV + 2)


@triton.jit
def attend_and_combine_splits_in_order(
    q, k_source, v_source, p_page_ids, key_range, split_begin, split_end, q_position, h, score_scale, softcap, rotation,
    cfg: tl.constexpr,
):  # fmt: skip
    """Returns the softmax state of splits [split_begin, split_end), combined in their order; acc_o unrotated."""
    COLUMNS: tl.constexpr = cfg.PACK * cfg.BLOCK_DV
    row_max, row_sum, acc_o = empty_softmax_state(COLUMNS, cfg)
    for i_split in tl.range(split_begin, split_end, num_stages=1):
        of_split = mainloop(
            q, empty_softmax_state(COLUMNS, cfg), k_source, v_source, p_page_ids,
            clip_key_range_to_split(key_range, i_split, cfg), q_position, h, score_scale, softcap, False, cfg,
        )  # fmt: skip
        of_split = of_split[0], of_split[1], reorder_columns_and_unrotate_acc(of_split[2], rotation, h, cfg)
        row_max, row_sum, acc_o = combine_two_splits((row_max, row_sum, acc_o), of_split)
    return row_max, row_sum, acc_o


@triton.jit
def empty_softmax_state(COLUMNS: tl.constexpr, cfg: tl.constexpr):
    """Returns the state of BLOCK_M rows that have seen no key."""
    return (
        tl.full([cfg.BLOCK_M], float("-inf"), tl.float32), tl.full([cfg.BLOCK_M], 0.0, tl.float32),
        tl.full([cfg.BLOCK_M, COLUMNS], 0.0, tl.float32),
    )  # fmt: skip


@triton.jit
def reorder_columns_and_unrotate_acc(acc_o, rotation, h, cfg: tl.constexpr):
    """Returns acc_o over the pages with its columns in order, and rotation and channel scales of V undone."""
    PACK: tl.constexpr = cfg.PACK
    acc_o = transpose_column_order(acc_o, PACK, cfg.BLOCK_DV)
    if cfg.CODE == INT4:
        acc_o *= column_scales(
            1.0 / dequant_tile_power_of_2_factor(0, cfg),
            1.0 / dequant_tile_power_of_2_factor(1, cfg),
            PACK * cfg.BLOCK_DV,
        )
    return unrotate_and_rescale_output((acc_o,), rotation, h, 1, cfg.DV)[0]


@triton.jit(
    do_not_specialize=[
        "PAGE_TABLE",
        "SEQ_LENS",
        "CU_SEQLENS_Q",
        "B",
        "T",
        "first_tile",
        "max_listed_blocks",
        "max_pairs",
    ]
)
def prefill_kernel(
    Q, K_NEW, V_NEW, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, K_SIGNS, V_SIGNS,
    K_CHANNEL_SCALES, V_CHANNEL_SCALES,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, stride_q_t, stride_q_h, stride_k_new_t, stride_k_new_h, stride_v_new_t, stride_v_new_h, stride_k_p,
    stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h,
    stride_k_scales_p, stride_k_scales_s, stride_k_scales_h, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h,
    stride_k_channel_scales_h, stride_v_channel_scales_h, stride_table_b, stride_out_t, stride_out_h, stride_lse_t,
    stride_lse_h, SPLIT_WORKSPACE, LISTED_BLOCKS, LISTED_ENDS, LISTED_COUNTS, NUM_LISTED_BLOCKS, K2Q_NUM_PAIRS,
    K2Q_SORTED_IDS, K2Q_STATES, K2Q_ACCS, max_pairs, first_tile, max_listed_blocks, cfg: tl.constexpr,
):  # fmt: skip
    """Attends one block of BLOCK_M query rows. See the module's docstring."""
    PACK: tl.constexpr = cfg.PACK
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    store_empty_output_of_padding_rows(
        OUT, LSE, load_q_begin(CU_SEQLENS_Q, B, True).to(tl.int32), T, i_program, num_programs, stride_out_t,
        stride_out_h, stride_lse_t, stride_lse_h, cfg,
    )  # fmt: skip
    # Tile scheduler: the KV head, request and rows of this program
    h = i_program % cfg.HEADS
    i_tile = (num_programs - 1 - i_program) // cfg.HEADS
    i_list = i_tile * cfg.HEADS + h
    if first_tile is not None:
        i_tile += first_tile
    i_request, m_block = find_request_and_m_block_maybe_empty(CU_SEQLENS_Q, B, i_tile, cfg)
    q_begin = load_q_begin(CU_SEQLENS_Q, i_request, True)
    seqlen_q = (load_q_begin(CU_SEQLENS_Q, i_request + 1, True) - q_begin).to(tl.int32)
    row_begin = m_block * cfg.BLOCK_M
    if row_begin < seqlen_q * cfg.GROUP:
        num_keys = tl.load(SEQ_LENS + i_request).to(tl.int32)
        first_new_position = num_keys - seqlen_q  # position of the request's first new token
        o_r = row_begin + tl.arange(0, cfg.BLOCK_M)
        o_i = o_r // cfg.GROUP
        tokens, heads = q_begin + o_i, (h * cfg.GROUP + o_r % cfg.GROUP).to(tl.int64)
        m_row = o_r < seqlen_q * cfg.GROUP
        token_begin, token_end = (
            row_begin // cfg.GROUP,
            tl.minimum(tl.cdiv(row_begin + cfg.BLOCK_M, cfg.GROUP), seqlen_q),
        )
        # Scales of scores and values; the query, rotated like cached keys
        score_scale = load_device_scale_else_host_scale(softmax_scale, SOFTMAX_SCALE, 0, cfg.HAS_SOFTMAX_SCALE) * LOG2E
        value_scale = (
            load_device_scale_else_host_scale(v_scale, V_SCALE, h * cfg.V_SCALE_STRIDE, cfg.HAS_V_SCALE)
            * cfg.V_RESIDUAL_SCALE
        )
        x = load_query_rows_as_fp32(Q, tokens, heads, m_row, stride_q_t, stride_q_h, cfg)
        q, row_scale = to_16bit_query_tiles_and_score_scale(
            scale_and_rotate_query((x,), (K_SIGNS, K_CHANNEL_SCALES, stride_k_channel_scales_h), h, 1, cfg.D)[0], cfg
        )
        # Cached keys: K's scale joins the score scale, V's is left for the epilogue
        keys = KVOperand(
            StridedRows(K, stride_k_p, stride_k_s, stride_k_h),
            StridedRows(K_SCALES, stride_k_scales_p, stride_k_scales_s, stride_k_scales_h),
        )
        values = KVOperand(
            StridedRows(V, stride_v_p, stride_v_s, stride_v_h),
            StridedRows(V_SCALES, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h),
        )
        key_range = visible_key_range_with_q_positions(
            0, tl.maximum(first_new_position, 0) if cfg.HAS_NEW_KV else num_keys, first_new_position + token_begin,
            first_new_position + token_end, cfg,
        )  # fmt: skip
        scale = row_scale * (
            score_scale * load_device_scale_else_host_scale(k_scale, K_SCALE, h * cfg.K_SCALE_STRIDE, cfg.HAS_K_SCALE)
        )
        p_page_ids = PAGE_TABLE + i_request.to(tl.int64) * stride_table_b
        rotation = (V_SIGNS, V_CHANNEL_SCALES, stride_v_channel_scales_h)
        if cfg.SPLIT_KEYS > 0:
            split_begin, split_end = split_index_begin_and_end(key_range, cfg)
            if SPLIT_WORKSPACE is not None:
                i_split = split_begin + tl.program_id(1)
                split_begin, split_end = i_split, tl.minimum(split_end, i_split + 1)
            row_max, row_sum, acc_o = attend_and_combine_splits_in_order(
                q, keys, values, p_page_ids, key_range, split_begin, split_end, first_new_position + o_i, h, scale,
                softcap, rotation, cfg,
            )  # fmt: skip
        else:
            softmax_state = empty_softmax_state(PACK * cfg.BLOCK_DV, cfg)
            if cfg.LISTED_BLOCK > 0:
                listed = ListedBlocks(LISTED_BLOCKS, LISTED_ENDS, LISTED_COUNTS, NUM_LISTED_BLOCKS, max_listed_blocks)
                row_max, row_sum, acc_o = listed_mainloop(
                    q, softmax_state, keys, values, p_page_ids, listed, i_list, o_i - token_begin, key_range,
                    first_new_position + o_i, h, scale, softcap, cfg,
                )  # fmt: skip
                if cfg.K2Q_PARTIALS > 0:
                    row_max, row_sum, acc_o = combine_k2q_partials(
                        (row_max, row_sum, acc_o), K2Q(K2Q_NUM_PAIRS, K2Q_SORTED_IDS, K2Q_STATES, K2Q_ACCS), i_list,
                        o_i - token_begin, o_r % cfg.GROUP, max_pairs, cfg,
                    )  # fmt: skip
            else:
                row_max, row_sum, acc_o = mainloop(
                    q, softmax_state, keys, values, p_page_ids, key_range, first_new_position + o_i, h, scale, softcap,
                    False, cfg,
                )  # fmt: skip
            acc_o = reorder_columns_and_unrotate_acc(acc_o, rotation, h, cfg)
        # New keys, 16-bit and without scales: acc_o takes the scale of cached V first
        if cfg.HAS_NEW_KV:
            scaled_acc = acc_o * value_scale
            value_scale = 1.0
            keys = KVOperand(
                StridedRows(K_NEW + q_begin * stride_k_new_t, 0, stride_k_new_t, stride_k_new_h),
                StridedRows(None, 0, 0, 0),
            )
            values = KVOperand(
                StridedRows(V_NEW + q_begin * stride_v_new_t, 0, stride_v_new_t, stride_v_new_h),
                StridedRows(None, 0, 0, 0),
            )
            key_range = visible_key_range_with_q_positions(
                tl.maximum(-first_new_position, 0), seqlen_q, token_begin, token_end, cfg
            )
            q = (x.to(K_NEW.dtype.element_ty),)  # their 16-bit type holds every query exactly
            scale = tl.full([cfg.BLOCK_M], 1.0, tl.float32) * score_scale
            row_max, row_sum, acc_o = mainloop(
                q, (row_max, row_sum, scaled_acc), keys, values, p_page_ids, key_range, o_i, h, scale, softcap, True,
                cfg,
            )  # fmt: skip
        # Epilogue: unrotated acc_o × acc_scale, and LSE; or a split's state to the workspace, for the combine
        if SPLIT_WORKSPACE is not None:
            if split_begin < split_end:
                o_m, o_d = tl.arange(0, cfg.BLOCK_M), tl.arange(0, PACK * cfg.BLOCK_DV)
                p_row = SPLIT_WORKSPACE + partial_row_offsets(i_tile, tl.program_id(1), tl.num_programs(1), h, o_m, cfg)
                tl.store(p_row[:, None] + o_d[None, :], acc_o, mask=m_row[:, None])
                tl.store(p_row + PACK * cfg.BLOCK_DV, row_max, mask=m_row)
                tl.store(p_row + PACK * cfg.BLOCK_DV + 1, row_sum, mask=m_row)
        else:
            finalize_and_store_output_and_lse(
                (row_max, row_sum, acc_o), value_scale, out_scale, OUT_SCALE, SINKS, OUT, LSE, tokens, heads, m_row,
                stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg,
            )  # fmt: skip


@triton.jit
def finalize_and_store_output_and_lse(softmax_state, value_scale, out_scale, OUT_SCALE, SINKS, OUT, LSE, tokens,
                                      heads, m_row, stride_out_t,
               stride_out_h, stride_lse_t, stride_lse_h, cfg: tl.constexpr):  # fmt: skip
    """Stores the output of query rows, unrotated acc_o × acc_scale, and their LSE."""
    PACK: tl.constexpr = cfg.PACK
    row_max, row_sum, acc_o = softmax_state
    value_scale *= load_device_scale_else_host_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE)
    acc_scale, lse = compute_acc_scale_and_lse(row_max, row_sum, value_scale, SINKS, heads, m_row, cfg)
    o_d = tl.arange(0, PACK * cfg.BLOCK_DV)
    p_out = OUT + (tokens * stride_out_t + heads * stride_out_h)[:, None] + o_d[None, :]
    out = cast_output(acc_o * acc_scale[:, None], OUT, cfg)
    tl.store(p_out, out, mask=m_row[:, None] & (o_d < cfg.DV)[None, :])
    if cfg.HAS_LSE:
        tl.store(LSE + tokens * stride_lse_t + heads * stride_lse_h, lse, mask=m_row)


SPLITS_IN_FLIGHT = tl.constexpr(8)  # loaded at once by the combine


@triton.jit(do_not_specialize=["SEQ_LENS", "CU_SEQLENS_Q", "B", "num_splits"])
def combine_in_order_kernel(
    SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE, v_scale, V_SCALE, out_scale, OUT_SCALE, B, num_splits,
    stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg: tl.constexpr,
):  # fmt: skip
    """Combines the splits of one query row, as `attend_and_combine_splits_in_order` does. num_splits: of the
    workspace."""
    # Tile scheduler: the row, and the splits that the programs of its m_block made
    COLUMNS: tl.constexpr = cfg.PACK * cfg.BLOCK_DV
    i_tile, h = tl.program_id(0) // cfg.HEADS, tl.program_id(0) % cfg.HEADS
    i_request, m_block = find_request_and_m_block_maybe_empty(CU_SEQLENS_Q, B, i_tile, cfg)
    q_begin = load_q_begin(CU_SEQLENS_Q, i_request, True)
    seqlen_q = (load_q_begin(CU_SEQLENS_Q, i_request + 1, True) - q_begin).to(tl.int32)
    i_row_in_block = tl.program_id(1) + tl.arange(0, 1)
    o_r = m_block * cfg.BLOCK_M + i_row_in_block
    m_row = o_r < seqlen_q * cfg.GROUP
    if m_block * cfg.BLOCK_M + tl.program_id(1) < seqlen_q * cfg.GROUP:
        num_keys = tl.load(SEQ_LENS + i_request).to(tl.int32)
        token_begin = m_block * cfg.BLOCK_M // cfg.GROUP
        token_end = tl.minimum(tl.cdiv((m_block + 1) * cfg.BLOCK_M, cfg.GROUP), seqlen_q)
        first_new_position = num_keys - seqlen_q
        key_range = visible_key_range_with_q_positions(
            0, num_keys, first_new_position + token_begin, first_new_position + token_end, cfg
        )
        split_begin, split_end = split_index_begin_and_end(key_range, cfg)
        # Combine: SPLITS_IN_FLIGHT loaded at once, rescaled and summed one after the other
        o_d = tl.arange(0, COLUMNS)
        row_max, row_sum = tl.full([1], float("-inf"), tl.float32), tl.full([1], 0.0, tl.float32)
        acc_o = tl.full([1, COLUMNS], 0.0, tl.float32)
        for i in tl.range(0, split_end - split_begin, SPLITS_IN_FLIGHT):
            states = ()
            for j in tl.static_range(SPLITS_IN_FLIGHT):
                m_split = (i + j + tl.arange(0, 1)) < split_end - split_begin
                p_row = SPLIT_WORKSPACE + partial_row_offsets(i_tile, i + j, num_splits, h, i_row_in_block, cfg)
                states = states + ((
                    tl.load(p_row + COLUMNS, mask=m_split, other=float("-inf")),
                    tl.load(p_row + COLUMNS + 1, mask=m_split, other=0.0),
                    tl.load(p_row[:, None] + o_d[None, :], mask=m_split[:, None], other=0.0),
                ),)  # fmt: skip
            for j in tl.static_range(SPLITS_IN_FLIGHT):
                row_max, row_sum, acc_o = combine_two_splits((row_max, row_sum, acc_o), states[j])
        # Epilogue
        value_scale = (
            load_device_scale_else_host_scale(v_scale, V_SCALE, h * cfg.V_SCALE_STRIDE, cfg.HAS_V_SCALE)
            * cfg.V_RESIDUAL_SCALE
        )
        tokens, heads = q_begin + o_r // cfg.GROUP, (h * cfg.GROUP + o_r % cfg.GROUP).to(tl.int64)
        finalize_and_store_output_and_lse(
            (row_max, row_sum, acc_o), value_scale, out_scale, OUT_SCALE, SINKS, OUT, LSE, tokens, heads, m_row,
            stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg,
        )  # fmt: skip
