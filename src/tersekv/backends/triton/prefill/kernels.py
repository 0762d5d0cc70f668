"""The kernel of paged prefill: a program attends to all keys of one m_block of one request and KV head. The mask and
the rescale are in `mainloop`, Triton pipelines the loads; nothing is split, so there is no combine.

A row is a new token and a query head of the group. m_blocks are numbered over all requests without their lengths on the
host: request b begins at `cu[b] * GROUP // BLOCK_M + b`, which leaves room for every request before it. Programs of
late blocks, which see most keys, start first.
"""

import triton
import triton.language as tl

from ..parts.combine import cast_output, finalize_softmax, load_scale
from ..parts.dequant import INT4, tile_scale
from ..parts.hadamard import scale_and_rotate_query, unrotate_and_rescale_output
from ..parts.tile_scheduler import store_empty_output_of_padding_rows
from .mainloop import (
    KeyRange,
    KVOperand,
    StridedRows,
    column_scales,
    load_query_rows,
    mainloop,
    regroup_columns,
    to_query_tiles,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_q_begin(CU_SEQLENS_Q, i_request, m_request):
    """Loads the first query row of requests where m_request. CU_SEQLENS_Q: [B + 1], or the rows of every request."""
    if CU_SEQLENS_Q.dtype.is_ptr():
        return tl.load(CU_SEQLENS_Q + i_request, mask=m_request, other=0).to(tl.int64)
    else:
        return tl.where(m_request, i_request * CU_SEQLENS_Q, 0).to(tl.int64)


@triton.jit
def find_request_of_m_block(CU_SEQLENS_Q, B, m_block, cfg: tl.constexpr):
    """Returns (request of an m_block, m_block in the request)."""
    i_request, first_block = -1, 0
    for i in range(0, B, cfg.BLOCK_B):
        o_b = i + tl.arange(0, cfg.BLOCK_B)
        first_index = load_q_begin(CU_SEQLENS_Q, o_b, o_b < B) * cfg.GROUP // cfg.BLOCK_M + o_b
        is_before = (first_index <= m_block) & (o_b < B)
        i_request += tl.sum(is_before.to(tl.int32))
        first_block = tl.maximum(first_block, tl.max(tl.where(is_before, first_index, 0)).to(tl.int32))
    return i_request, m_block - first_block


@triton.jit
def visible_key_range(key_begin, key_end, q_position_begin, q_position_end, cfg: tl.constexpr):
    """Returns the KeyRange of keys [key_begin, key_end) visible to rows at [q_position_begin, q_position_end)."""
    begin = key_begin
    if cfg.WINDOW > 0:
        begin = tl.maximum(key_begin, q_position_begin - cfg.WINDOW + 1)
    return KeyRange(begin, tl.maximum(tl.minimum(key_end, q_position_end), begin), q_position_begin, q_position_end)


@triton.jit(do_not_specialize=["PAGE_TABLE", "SEQ_LENS", "CU_SEQLENS_Q", "B", "T"])
def prefill_kernel(
    Q, K_NEW, V_NEW, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, K_SIGNS, V_SIGNS,
    K_CHANNEL_SCALES, V_CHANNEL_SCALES,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, stride_q_t, stride_q_h, stride_k_new_t, stride_k_new_h, stride_v_new_t, stride_v_new_h, stride_k_p,
    stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h,
    stride_k_scales_p, stride_k_scales_s, stride_k_scales_h, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h,
    stride_k_channel_scales_h, stride_v_channel_scales_h, stride_table_b, stride_out_t, stride_out_h, stride_lse_t,
    stride_lse_h,
    cfg: tl.constexpr,
):  # fmt: skip
    """Attends one block of BLOCK_M query rows. See the module's docstring."""
    PACK: tl.constexpr = cfg.PACK
    i_program, num_programs = tl.program_id(0), tl.num_programs(0)
    store_empty_output_of_padding_rows(
        OUT, LSE, load_q_begin(CU_SEQLENS_Q, B, True).to(tl.int32), T, i_program, num_programs, stride_out_t,
        stride_out_h, stride_lse_t, stride_lse_h, cfg,
    )  # fmt: skip
    h = i_program % cfg.HEADS
    i_request, m_block = find_request_of_m_block(CU_SEQLENS_Q, B, (num_programs - 1 - i_program) // cfg.HEADS, cfg)
    q_begin = load_q_begin(CU_SEQLENS_Q, i_request, True)
    num_q_rows = (load_q_begin(CU_SEQLENS_Q, i_request + 1, True) - q_begin).to(tl.int32)
    row_begin = m_block * cfg.BLOCK_M
    if row_begin < num_q_rows * cfg.GROUP:
        num_keys = tl.load(SEQ_LENS + i_request).to(tl.int32)
        first_new_position = num_keys - num_q_rows  # position of the request's first new token
        o_r = row_begin + tl.arange(0, cfg.BLOCK_M)
        o_i = o_r // cfg.GROUP
        tokens, heads = q_begin + o_i, (h * cfg.GROUP + o_r % cfg.GROUP).to(tl.int64)
        m_row = o_r < num_q_rows * cfg.GROUP
        token_begin, token_end = (
            row_begin // cfg.GROUP,
            tl.minimum(tl.cdiv(row_begin + cfg.BLOCK_M, cfg.GROUP), num_q_rows),
        )

        score_scale = load_scale(softmax_scale, SOFTMAX_SCALE, 0, cfg.HAS_SOFTMAX_SCALE) * LOG2E
        value_scale = load_scale(v_scale, V_SCALE, h * cfg.V_SCALE_STRIDE, cfg.HAS_V_SCALE) * cfg.V_RESIDUAL_SCALE
        x = load_query_rows(Q, tokens, heads, m_row, stride_q_t, stride_q_h, cfg)
        q, row_scale = to_query_tiles(
            scale_and_rotate_query((x,), (K_SIGNS, K_CHANNEL_SCALES, stride_k_channel_scales_h), h, 1, cfg.D)[0], cfg
        )
        softmax_state = (
            tl.full([cfg.BLOCK_M], float("-inf"), tl.float32), tl.full([cfg.BLOCK_M], 0.0, tl.float32),
            tl.full([cfg.BLOCK_M, PACK * cfg.BLOCK_DV], 0.0, tl.float32),
        )  # fmt: skip
        keys = KVOperand(
            StridedRows(K, stride_k_p, stride_k_s, stride_k_h),
            StridedRows(K_SCALES, stride_k_scales_p, stride_k_scales_s, stride_k_scales_h),
        )
        values = KVOperand(
            StridedRows(V, stride_v_p, stride_v_s, stride_v_h),
            StridedRows(V_SCALES, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h),
        )
        key_range = visible_key_range(
            0, tl.maximum(first_new_position, 0) if cfg.HAS_NEW_KV else num_keys, first_new_position + token_begin,
            first_new_position + token_end, cfg,
        )  # fmt: skip
        scale = row_scale * (score_scale * load_scale(k_scale, K_SCALE, h * cfg.K_SCALE_STRIDE, cfg.HAS_K_SCALE))
        p_page_ids = PAGE_TABLE + i_request.to(tl.int64) * stride_table_b
        softmax_state = mainloop(
            q, softmax_state, keys, values, p_page_ids, key_range, first_new_position + o_i, h, scale, softcap, False,
            cfg,
        )  # fmt: skip
        row_max, row_sum, acc_o = softmax_state
        acc_o = regroup_columns(acc_o, PACK, cfg.BLOCK_DV)
        if cfg.CODE == INT4:
            acc_o *= column_scales(1.0 / tile_scale(0, cfg), 1.0 / tile_scale(1, cfg), PACK * cfg.BLOCK_DV)
        acc_o = unrotate_and_rescale_output(
            (acc_o,), (V_SIGNS, V_CHANNEL_SCALES, stride_v_channel_scales_h), h, 1, cfg.DV
        )[0]
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
            key_range = visible_key_range(tl.maximum(-first_new_position, 0), num_q_rows, token_begin, token_end, cfg)
            q = (x.to(K_NEW.dtype.element_ty),)  # their 16-bit type holds every query exactly
            scale = tl.full([cfg.BLOCK_M], 1.0, tl.float32) * score_scale
            row_max, row_sum, acc_o = mainloop(
                q, (row_max, row_sum, scaled_acc), keys, values, p_page_ids, key_range, o_i, h, scale, softcap, True,
                cfg,
            )  # fmt: skip
        # Epilogue: unrotated acc_o × acc_scale, and LSE
        value_scale *= load_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE)
        acc_scale, lse = finalize_softmax(row_max, row_sum, value_scale, SINKS, heads, m_row, cfg)
        o_d = tl.arange(0, PACK * cfg.BLOCK_DV)
        p_out = OUT + (tokens * stride_out_t + heads * stride_out_h)[:, None] + o_d[None, :]
        out = cast_output(acc_o * acc_scale[:, None], OUT, cfg)
        tl.store(p_out, out, mask=m_row[:, None] & (o_d < cfg.DV)[None, :])
        if cfg.HAS_LSE:
            tl.store(LSE + tokens * stride_lse_t + heads * stride_lse_h, lse, mask=m_row)
