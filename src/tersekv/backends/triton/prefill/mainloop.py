"""The main loop of paged prefill: query rows of one request and KV head against a range of keys, block by block.
`attend_kv_block` holds the mask, the rescale and PV; nothing is split, so there is no combine.

Queries lie on the matrix unit's M side, one row per new token and query head, so that a key block is dequantized once
for all BLOCK_M rows.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..parts.dequant import (
    INT4,
    approx_log2_and_reciprocal,
    dequant_16bit_words_to_tiles,
    dequant_tile_power_of_2_factor,
    e4m3_bytes_to_fp16,
    expand_block_scales_times_power_of_2,
    int4_zero_points,
)
from ..parts.page_table import load_block_or_per_key_page_ids, page_slots
from ..parts.softcap import apply_softcap_to_log2_scores


class StridedRows(NamedTuple):
    """Rows [P, S, H, ...]: pointer and strides; of new rows every token is a slot of one page."""

    ptr: Any
    stride_page: Any
    stride_slot: Any
    stride_head: Any


class KVOperand(NamedTuple):
    """K or V: stored codes and scales."""

    codes: StridedRows
    scales: StridedRows


class KeyRange(NamedTuple):
    """Keys [begin, end) visible to some row of a block of queries, and the positions of its rows."""

    begin: Any
    end: Any
    q_position_begin: Any  # position of the first row's token
    q_position_end: Any  # one past the last row's


@triton.jit
def concatenate_columns(tiles, PACK: tl.constexpr):
    """Returns PACK tiles [ROWS, W] side by side, [ROWS, PACK * W]. Unlike interleaving, it takes no instruction."""
    if PACK == 1:
        return tiles[0]
    else:
        if PACK == 2:
            x = tl.join(tiles[0], tiles[1])
        else:
            x = tl.join(tl.join(tiles[0], tiles[2]), tl.join(tiles[1], tiles[3]))
        ROWS: tl.constexpr = tiles[0].shape[0]
        W: tl.constexpr = tiles[0].shape[1]
        return transpose_column_order(tl.reshape(x, [ROWS, PACK * W]), W, PACK)


@triton.jit
def transpose_column_order(x, NUM_GROUPS: tl.constexpr, GROUP_COLUMNS: tl.constexpr):
    """Moves column GROUP_COLUMNS * i + j to NUM_GROUPS * j + i: with (W, PACK) to the order of `concatenate_columns`,
    with (PACK, W) back."""
    if NUM_GROUPS == 1 or GROUP_COLUMNS == 1:
        return x
    else:
        ROWS: tl.constexpr = x.shape[0]
        return tl.reshape(
            tl.permute(tl.reshape(x, [ROWS, NUM_GROUPS, GROUP_COLUMNS]), (0, 2, 1)), [ROWS, NUM_GROUPS * GROUP_COLUMNS]
        )


@triton.jit
def load_query_rows(Q, tokens, heads, m_row, stride_q_t, stride_q_h, cfg: tl.constexpr):
    """Loads query rows [BLOCK_M, PACK * BLOCK_D] as they are stored."""
    o_d = tl.arange(0, cfg.K.PACK * cfg.BLOCK_D)
    p_q = Q + (tokens * stride_q_t + heads * stride_q_h)[:, None] + o_d[None, :]
    return tl.load(p_q, mask=m_row[:, None] & (o_d < cfg.D)[None, :], other=0.0)


@triton.jit
def query_rows_to_fp32(x, cfg: tl.constexpr):
    if cfg.Q_AS_BYTES:
        x = e4m3_bytes_to_fp16(x)
    return x.to(tl.float32)


@triton.jit
def load_query_rows_as_fp32(Q, tokens, heads, m_row, stride_q_t, stride_q_h, cfg: tl.constexpr):
    return query_rows_to_fp32(load_query_rows(Q, tokens, heads, m_row, stride_q_t, stride_q_h, cfg), cfg)


@triton.jit
def column_scales(even, odd, COLUMNS: tl.constexpr):
    """Returns scales of even and odd columns, [1, COLUMNS]."""
    return tl.where(tl.arange(0, COLUMNS) % 2 == 0, even, odd)[None, :]


@triton.jit
def to_16bit_query_tiles_and_score_scale(rotated_q, cfg: tl.constexpr):
    """Returns query tiles [BLOCK_M, PACK * BLOCK_D] in the compute type of codes, with columns in the order of
    `concatenate_columns`, and the scale of their scores [BLOCK_M].

    fp16 holds a bf16 row only after a power of two is divided out; the score scale multiplies it back. Over bf16 keys,
    with TWO_TERM_Q, a second tile holds the rounding error of the first.
    """
    if cfg.BF16:
        one = tl.full([cfg.BLOCK_M], 1.0, tl.float32)
        high = rotated_q.to(tl.bfloat16)
        if cfg.TWO_TERM_Q:
            return (high, (rotated_q - high.to(tl.float32)).to(tl.bfloat16)), one
        else:
            return (high,), one
    else:
        abs_max = tl.max(tl.abs(rotated_q), 1)
        exponent = tl.maximum((abs_max.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1)  # exponent of the largest magnitude
        inv_scale = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
        rotated_q *= inv_scale[:, None]
        if cfg.K.CODE == INT4:
            rotated_q *= column_scales(
                dequant_tile_power_of_2_factor(1, cfg.K) / dequant_tile_power_of_2_factor(0, cfg.K),
                1.0,
                rotated_q.shape[1],
            )
        row_scale = (exponent << 23).to(tl.float32, bitcast=True) * cfg.K_RESIDUAL_SCALE
        return (transpose_column_order(rotated_q.to(tl.float16), cfg.BLOCK_D, cfg.K.PACK),), row_scale


@triton.jit
def kv_row_offsets_in_elements(
    source: StridedRows, page_ids, n_block, h, IS_NEW_KV: tl.constexpr, STRIDE_UNIT: tl.constexpr, cfg: tl.constexpr
):
    """Returns offsets [BLOCK_N] of head h's rows in key block n_block; strides in pages count STRIDE_UNIT elements."""
    if IS_NEW_KV:
        return (n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)).to(tl.int64) * source.stride_slot + h.to(
            tl.int64
        ) * source.stride_head
    else:
        head = h.to(tl.int64) if cfg.INT64_OFFSETS else h
        return (
            page_ids * source.stride_page + page_slots(n_block, cfg) * source.stride_slot + head * source.stride_head
        ) * STRIDE_UNIT


@triton.jit
def load_kv_block(source: StridedRows, page_ids, n_block, valid, h, PACKED_COLUMNS_PAD: tl.constexpr,
                  PACKED_COLUMNS: tl.constexpr, MASKED: tl.constexpr, IS_NEW_KV: tl.constexpr,
                  STRIDE_UNIT: tl.constexpr, cfg: tl.constexpr):  # fmt: skip
    """Loads packed codes [BLOCK_N, PACKED_COLUMNS_PAD] of key block n_block; 0 for invalid keys, which only a MASKED
    block has."""
    o_d = tl.arange(0, PACKED_COLUMNS_PAD)
    p_x = (
        source.ptr
        + kv_row_offsets_in_elements(source, page_ids, n_block, h, IS_NEW_KV, STRIDE_UNIT, cfg)[:, None]
        + o_d[None, :]
    )
    if MASKED:
        return tl.load(p_x, mask=valid[:, None] & (o_d < PACKED_COLUMNS)[None, :], other=0.0)
    elif PACKED_COLUMNS_PAD == PACKED_COLUMNS:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_d < PACKED_COLUMNS)[None, :], other=0.0)


@triton.jit
def load_stored_scales(operand: KVOperand, page_ids, n_block, valid, h, PACKED_COLUMNS_PAD: tl.constexpr,
                       PACKED_COLUMNS: tl.constexpr, MASKED: tl.constexpr, IS_NEW_KV: tl.constexpr,
                       row_format: tl.constexpr, cfg: tl.constexpr):  # fmt: skip
    """Loads stored scales of key block n_block: fp32 [BLOCK_N] per token, e4m3 [BLOCK_N, PACKED_COLUMNS_PAD // 4], or
    none."""
    if IS_NEW_KV:
        return ()
    elif row_format.TOKEN_SCALES:
        p_row = operand.scales.ptr + kv_row_offsets_in_elements(
            operand.scales, page_ids, n_block, h, IS_NEW_KV, row_format.SCALE_STRIDE_UNIT, cfg
        )
        # NOTE: in as many copies as there are threads. Fewer numbers Triton would load in the layout of their use, each
        # by many threads, which takes longer than the products.
        p_copies = tl.broadcast_to(p_row[:, None], [cfg.BLOCK_N, cfg.SCALE_COPIES])
        if MASKED:
            x = tl.load(p_copies, mask=tl.broadcast_to(valid[:, None], [cfg.BLOCK_N, cfg.SCALE_COPIES]), other=1.0)
        else:
            x = tl.load(p_copies)
        return (tl.max(x, 1),)
    elif row_format.BLOCK_SCALES:
        return (
            load_kv_block(
                operand.scales, page_ids, n_block, valid, h, PACKED_COLUMNS_PAD // 4, PACKED_COLUMNS // 4, MASKED,
                IS_NEW_KV, row_format.SCALE_STRIDE_UNIT, cfg,
            ),
        )  # fmt: skip
    else:
        return ()


@triton.jit
def dequant_kv_block_except_token_scales(
    packed, scales, PACKED_COLUMNS_PAD: tl.constexpr, IS_NEW_KV: tl.constexpr, row_format: tl.constexpr
):
    """Returns a tile [BLOCK_N, PACK * PACKED_COLUMNS_PAD] for the matrix unit, dequantized from packed codes [BLOCK_N,
    PACKED_COLUMNS_PAD]: the tiles of `dequant_16bit_words_to_tiles`, side by side."""
    if IS_NEW_KV:
        return packed
    else:
        operand = None
        if row_format.BLOCK_SCALES:
            operand = expand_block_scales_times_power_of_2(
                scales[0], packed.shape[0], PACKED_COLUMNS_PAD // 4, 4, row_format
            )
        elif row_format.CODE == INT4:
            operand = int4_zero_points(scales[0]).to(tl.int16)[:, None]
        return concatenate_columns(dequant_16bit_words_to_tiles(packed, row_format, operand), row_format.PACK)


@triton.jit
def compute_scores(q, keys, score_scale, k_scales, softcap, IS_NEW_KV: tl.constexpr, cfg: tl.constexpr):
    """Returns scores [BLOCK_M, BLOCK_N] in units of log2."""
    K_FORMAT: tl.constexpr = cfg.K
    s = tl.dot(q[0], tl.trans(keys))
    if cfg.TWO_TERM_Q and not IS_NEW_KV:
        s = tl.dot(q[1], tl.trans(keys), acc=s)
    s *= score_scale[:, None]
    if K_FORMAT.TOKEN_SCALES and not IS_NEW_KV:
        s *= k_scales[0][None, :]
    if cfg.HAS_SOFTCAP:
        s = apply_softcap_to_log2_scores(s, softcap)
    return s


@triton.jit
def mask_and_exponentiate_scores(s, row_max, row_sum, v_scales, o_n, valid, q_position, MASKED: tl.constexpr,
                                 IS_NEW_KV: tl.constexpr, cfg: tl.constexpr, row_counts=None):  # fmt: skip
    """Returns (P, row_max, row_sum, rescale) after scores [BLOCK_M, BLOCK_N] in units of log2 of keys o_n.

    rescale: that of what was summed before; row_counts: how many times the keys count in each row; None: once
    """
    if cfg.TOKEN_SCALES and not IS_NEW_KV:
        # V's scale joins the exponent, so that the P that multiplies codes lies in (0, 1].
        safe_v_scales = tl.maximum(v_scales[0], 1e-30)
        log2_v_scales, inv_v_scales = approx_log2_and_reciprocal(safe_v_scales, cfg)
        s += log2_v_scales[None, :]
    # Mask
    if MASKED:
        visible = valid[None, :] & (o_n[None, :] <= q_position[:, None])
        if cfg.WINDOW > 0:
            visible = visible & (o_n[None, :] > q_position[:, None] - cfg.WINDOW)
        s = tl.where(visible, s, float("-inf"))
    if row_counts is not None:
        s = tl.where(row_counts[:, None] > 0, s + tl.log2(tl.maximum(row_counts, 1.0))[:, None], float("-inf"))
    # Online softmax
    row_max_new = tl.maximum(row_max, tl.max(s, 1))
    safe_max = row_max_new
    if MASKED or row_counts is not None:
        safe_max = tl.where(row_max_new == float("-inf"), 0.0, row_max_new)  # a row may have no visible key yet
    p = tl.exp2(s - safe_max[:, None])
    rescale = tl.exp2(row_max - safe_max)
    if cfg.TOKEN_SCALES and not IS_NEW_KV:
        row_sum = row_sum * rescale + tl.sum(p * inv_v_scales[None, :], 1)
    else:
        row_sum = row_sum * rescale + tl.sum(p, 1)
    return p, row_max_new, row_sum, rescale


@triton.jit
def combine_two_splits(state_a, state_b):
    """Returns the state (row_max, row_sum, acc_o) over the keys of both, in this order. Exact where one saw none."""
    row_max = tl.maximum(state_a[0], state_b[0])
    safe_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    scale_a, scale_b = tl.exp2(state_a[0] - safe_max), tl.exp2(state_b[0] - safe_max)
    return (
        row_max,
        state_a[1] * scale_a + state_b[1] * scale_b,
        state_a[2] * scale_a[:, None] + state_b[2] * scale_b[:, None],
    )


@triton.jit
def attend_kv_block(q, softmax_state, K: KVOperand, V: KVOperand, page_ids, n_block, key_range: KeyRange, q_position, h,
                    score_scale, softcap, MASKED: tl.constexpr, IS_NEW_KV: tl.constexpr, cfg: tl.constexpr,
                    row_counts=None):  # fmt: skip
    """Attends to one key block. softmax_state: row_max (base 2), row_sum, acc_o [BLOCK_M, PACK * BLOCK_DV].
    row_counts: how many times the keys count in each row, [BLOCK_M] fp32; None: once."""
    K_FORMAT: tl.constexpr = cfg.K
    K_TILES_PER_ROW: tl.constexpr = K_FORMAT.PACK if IS_NEW_KV else 1  # new rows are not packed
    V_TILES_PER_ROW: tl.constexpr = cfg.PACK if IS_NEW_KV else 1
    row_max, row_sum, acc_o = softmax_state
    o_n = n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
    valid = (o_n >= key_range.begin) & (o_n < key_range.end)
    k_scales = load_stored_scales(
        K, page_ids, n_block, valid, h, cfg.BLOCK_D, cfg.PACKED_K, MASKED, IS_NEW_KV, K_FORMAT, cfg
    )
    v_scales = load_stored_scales(
        V, page_ids, n_block, valid, h, cfg.BLOCK_DV, cfg.PACKED_V, MASKED, IS_NEW_KV, cfg, cfg
    )
    # QK
    packed = load_kv_block(
        K.codes, page_ids, n_block, valid, h, K_TILES_PER_ROW * cfg.BLOCK_D, K_TILES_PER_ROW * cfg.PACKED_K, MASKED,
        IS_NEW_KV, K_FORMAT.STRIDE_UNIT, cfg,
    )  # fmt: skip
    s = compute_scores(
        q, dequant_kv_block_except_token_scales(packed, k_scales, cfg.BLOCK_D, IS_NEW_KV, K_FORMAT), score_scale,
        k_scales, softcap, IS_NEW_KV, cfg,
    )  # fmt: skip
    p, row_max, row_sum, rescale = mask_and_exponentiate_scores(
        s, row_max, row_sum, v_scales, o_n, valid, q_position, MASKED, IS_NEW_KV, cfg, row_counts
    )
    # PV
    packed = load_kv_block(
        V.codes, page_ids, n_block, valid, h, V_TILES_PER_ROW * cfg.BLOCK_DV, V_TILES_PER_ROW * cfg.PACKED_V, MASKED,
        IS_NEW_KV, cfg.STRIDE_UNIT, cfg,
    )  # fmt: skip
    values = dequant_kv_block_except_token_scales(packed, v_scales, cfg.BLOCK_DV, IS_NEW_KV, cfg)
    return row_max, row_sum, tl.dot(p.to(values.dtype), values, acc=acc_o * rescale[:, None])


@triton.jit
def load_page_ids_if_paged(p_page_ids, n_block, num_keys, IS_NEW_KV: tl.constexpr, cfg: tl.constexpr):
    """Loads page ids of key block n_block; new rows have none."""
    if IS_NEW_KV:
        return n_block
    else:
        return load_block_or_per_key_page_ids(p_page_ids, n_block, num_keys, cfg)


@triton.jit
def mainloop(q, softmax_state, K: KVOperand, V: KVOperand, p_page_ids, key_range: KeyRange, q_position, h, score_scale,
             softcap, IS_NEW_KV: tl.constexpr, cfg: tl.constexpr):  # fmt: skip
    """Returns softmax_state after the keys of key_range. IS_NEW_KV: the keys are the new 16-bit rows themselves."""
    n_block_begin = key_range.begin // cfg.BLOCK_N
    n_block_end = tl.maximum(tl.cdiv(key_range.end, cfg.BLOCK_N), n_block_begin)
    # Key blocks [unmasked_begin, unmasked_end) are fully visible to every row; the others need a mask.
    unmasked_begin = tl.cdiv(key_range.begin, cfg.BLOCK_N)
    if cfg.WINDOW > 0:
        unmasked_begin = tl.maximum(
            unmasked_begin, tl.cdiv(tl.maximum(key_range.q_position_end - cfg.WINDOW, 0), cfg.BLOCK_N)
        )
    unmasked_begin = tl.minimum(unmasked_begin, n_block_end)
    unmasked_end = tl.maximum(
        tl.minimum(key_range.end, tl.maximum(key_range.q_position_begin + 1, 0)) // cfg.BLOCK_N, unmasked_begin
    )
    if cfg.SPLIT_KEYS > 0 and cfg.WINDOW > 0:  # which blocks are masked depends on the rows; their order must not
        for n_block in tl.range(n_block_begin, unmasked_begin, num_stages=1):
            page_ids = load_page_ids_if_paged(p_page_ids, n_block, key_range.end, IS_NEW_KV, cfg)
            softmax_state = attend_kv_block(
                q, softmax_state, K, V, page_ids, n_block, key_range, q_position, h, score_scale, softcap, True,
                IS_NEW_KV, cfg,
            )  # fmt: skip
        n_block_begin = unmasked_begin
    # Page ids are loaded one iteration ahead, so that no load waits for its own address.
    page_ids = load_page_ids_if_paged(p_page_ids, unmasked_begin, key_range.end, IS_NEW_KV, cfg)
    # Unmasked key blocks
    for n_block in tl.range(unmasked_begin, unmasked_end):
        next_page_ids = load_page_ids_if_paged(p_page_ids, n_block + 1, key_range.end, IS_NEW_KV, cfg)
        softmax_state = attend_kv_block(
            q, softmax_state, K, V, page_ids, n_block, key_range, q_position, h, score_scale, softcap, False,
            IS_NEW_KV, cfg,
        )  # fmt: skip
        page_ids = next_page_ids
    # Masked key blocks, unpipelined
    for i in tl.range(0, unmasked_begin - n_block_begin + n_block_end - unmasked_end, num_stages=1):
        n_block = tl.where(
            i < unmasked_begin - n_block_begin, n_block_begin + i, unmasked_end + i - (unmasked_begin - n_block_begin)
        )
        page_ids = load_page_ids_if_paged(p_page_ids, n_block, key_range.end, IS_NEW_KV, cfg)
        softmax_state = attend_kv_block(
            q, softmax_state, K, V, page_ids, n_block, key_range, q_position, h, score_scale, softcap, True,
            IS_NEW_KV, cfg,
        )  # fmt: skip
    return softmax_state
