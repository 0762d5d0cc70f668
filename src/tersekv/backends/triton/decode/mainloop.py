"""The main loop of paged decode: one work tile's key blocks, any format, any page size. The mask is in
`visible_mask_n_by_m`; online softmax, rescale and PV are in `softmax_and_pv_step`."""

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
from ..parts.hadamard import scale_and_rotate_query, unrotate_and_rescale_output
from ..parts.key_lists import key_row_offsets, keys_in_range_or_visible, load_page_ids_or_pages_slots_and_visible
from ..parts.listed_pages import is_before_cut
from ..parts.page_table import pages_and_first_slots
from ..parts.softcap import apply_softcap_to_log2_scores


class MaskArgs(NamedTuple):
    """Which keys are visible to a work tile's query rows."""

    num_keys: Any
    seqlen_q: Any  # of the request's query
    row_begin: Any  # the work tile's first row, all heads of a group counted
    q_begin: Any  # the request's first query row
    first_cut_key: Any  # by `listed_pages.load_first_cut_key`
    MASK: Any
    stride_mask_t: Any


# Rotation and query.


@triton.jit
def transpose_tiles(tiles, PACK: tl.constexpr):
    """Returns PACK tiles, each transposed."""
    out = ()
    for j in tl.static_range(PACK):
        out = out + (tl.trans(tiles[j]),)
    return out


@triton.jit
def unrotate_acc(acc_o, rotation, h, cfg: tl.constexpr):
    """Returns PACK accumulators [BLOCK_DV, BLOCK_M], unrotated (`hadamard.unrotate_and_rescale_output`)."""
    if rotation[0] is not None or rotation[1] is not None:
        acc_o = transpose_tiles(
            unrotate_and_rescale_output(transpose_tiles(acc_o, cfg.PACK), rotation, h, cfg.PACK, cfg.DV), cfg.PACK
        )
    return acc_o


@triton.jit
def load_transposed_16bit_q_tiles_and_q_scale(
    Q, tokens, heads, m_row, stride_q_t, stride_q_h, rotation, h, cfg: tl.constexpr
):
    """Loads query rows, transposed to PACK tiles [BLOCK_D, BLOCK_M] in the compute type, and the scale of their scores
    [BLOCK_M].

    rotation: as `hadamard.scale_and_rotate_query` takes it

    fp16 holds a bf16 row only after a power of two is divided out; the score scale multiplies it back. Over bf16 keys,
    with TWO_TERM_Q, a second tile holds the rounding error of the first; over int4 keys, the row sums [BLOCK_M] follow.
    """
    PACK: tl.constexpr = cfg.K.PACK
    o_d = tl.arange(0, cfg.BLOCK_D)
    p_row = Q + tokens * stride_q_t + heads * stride_q_h
    mask = (o_d < cfg.PACKED_K)[:, None] & m_row[None, :]
    tiles = ()
    abs_max = tl.full([cfg.BLOCK_M], 0.0, tl.float32)
    for j in tl.static_range(PACK):
        x = tl.load(p_row[None, :] + (PACK * o_d + j)[:, None], mask=mask, other=0.0)
        if cfg.Q_AS_BYTES:
            x = e4m3_bytes_to_fp16(x)
        tiles = tiles + (x.to(tl.float32),)
    if rotation[0] is not None or rotation[1] is not None:
        tiles = transpose_tiles(scale_and_rotate_query(transpose_tiles(tiles, PACK), rotation, h, PACK, cfg.D), PACK)
    for j in tl.static_range(PACK):
        abs_max = tl.maximum(abs_max, tl.max(tl.abs(tiles[j]), 0))
    q_tiles = ()
    if cfg.BF16:
        for j in tl.static_range(PACK):
            q_tiles = q_tiles + (tiles[j].to(tl.bfloat16),)
            if cfg.TWO_TERM_Q:
                q_tiles = q_tiles + ((tiles[j] - q_tiles[j].to(tl.float32)).to(tl.bfloat16),)
        return q_tiles, tl.full([cfg.BLOCK_M], 1.0, tl.float32)
    else:
        exponent = tl.maximum((abs_max.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1)  # exponent of the largest magnitude
        inv_q_scale = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
        row_total = tl.full([cfg.BLOCK_M], 0.0, tl.float32)
        for j in tl.static_range(PACK):
            q_tile = (tiles[j] * inv_q_scale[None, :]).to(tl.float16)
            if cfg.K.CODE == INT4:
                row_total += tl.sum(q_tile.to(tl.float32), 0)
                q_tile *= dequant_tile_power_of_2_factor(1, cfg.K) / dequant_tile_power_of_2_factor(j, cfg.K)
            q_tiles = q_tiles + (q_tile,)
        if cfg.K.CODE == INT4:
            q_tiles = q_tiles + (row_total * dequant_tile_power_of_2_factor(1, cfg.K),)
        return q_tiles, (exponent << 23).to(tl.float32, bitcast=True) * cfg.K_RESIDUAL_SCALE


# K and V: page ids, packed codes and stored scales of key blocks.


@triton.jit
def load_page_ids_or_listed_keys_unrolled(key_source, n_block, num_keys, UNROLL: tl.constexpr, cfg: tl.constexpr):
    """Loads the page ids (or listed keys) of key blocks n_block … n_block + UNROLL − 1."""
    page_ids = ()
    for j in tl.static_range(UNROLL):
        page_ids = page_ids + (load_page_ids_or_pages_slots_and_visible(key_source, n_block + j, num_keys, cfg),)
    return page_ids


@triton.jit
def kv_row_offsets_in_elements(
    page_ids, n_block, h, stride_page, stride_slot, stride_head, STRIDE_UNIT: tl.constexpr, cfg: tl.constexpr
):
    """Returns offsets [BLOCK_N] of head h's rows in key block n_block; strides count STRIDE_UNIT elements.

    page_ids: int64; the rest is int32 unless a page is longer than that
    """
    head = h.to(tl.int64) if cfg.INT64_OFFSETS else h
    return (key_row_offsets(page_ids, n_block, stride_page, stride_slot, cfg) + head * stride_head) * STRIDE_UNIT


@triton.jit
def load_kv_block(X, page_ids, n_block, m_n, stride_page, stride_slot, stride_head, h, PACKED_COLUMNS_PAD: tl.constexpr,
                  PACKED_COLUMNS: tl.constexpr, ROWS_PER_PAGE: tl.constexpr, ROWS_PER_HEAD: tl.constexpr,
                  STRIDE_UNIT: tl.constexpr, MASKED: tl.constexpr, cfg: tl.constexpr):  # fmt: skip
    """Loads packed codes [BLOCK_N, PACKED_COLUMNS_PAD] of key block n_block: by tensor descriptor within one page, or
    by pointers.

    ROWS_PER_PAGE: rows of the descriptor per page. ROWS_PER_HEAD: rows per head (HND), or 0 where heads lie along the
    columns.
    """
    if cfg.USE_TMA:
        pages, first_slot = pages_and_first_slots(page_ids, cfg)
        row = (pages * ROWS_PER_PAGE + first_slot).to(tl.int32) + (n_block % (cfg.PAGE // cfg.BLOCK_N)) * cfg.BLOCK_N
        if ROWS_PER_HEAD > 0:
            return X.load([row + h * ROWS_PER_HEAD, 0])
        else:
            return X.load([row, (h * stride_head * STRIDE_UNIT).to(tl.int32)])
    else:
        o_d = tl.arange(0, PACKED_COLUMNS_PAD)
        o_n = kv_row_offsets_in_elements(page_ids, n_block, h, stride_page, stride_slot, stride_head, STRIDE_UNIT, cfg)
        p_x = X + o_n[:, None] + o_d[None, :]
        if MASKED:
            return tl.load(p_x, mask=m_n[:, None] & (o_d < PACKED_COLUMNS)[None, :], other=0.0)
        elif PACKED_COLUMNS_PAD == PACKED_COLUMNS:
            return tl.load(p_x)
        else:
            return tl.load(p_x, mask=(o_d < PACKED_COLUMNS)[None, :], other=0.0)


@triton.jit
def load_stored_scales(XS, page_ids, n_block, m_n, stride_page, stride_slot, stride_head, h,
                       PACKED_COLUMNS_PAD: tl.constexpr, PACKED_COLUMNS: tl.constexpr, row_format: tl.constexpr,
                       cfg: tl.constexpr):  # fmt: skip
    """Loads stored scales of key block n_block: fp32 [BLOCK_N] per token, or e4m3 [BLOCK_N, PACKED_COLUMNS_PAD //
    4]."""
    p_row = XS + kv_row_offsets_in_elements(
        page_ids, n_block, h, stride_page, stride_slot, stride_head, row_format.SCALE_STRIDE_UNIT, cfg
    )
    if row_format.TOKEN_SCALES:
        return tl.load(p_row, mask=m_n, other=0.0)
    else:
        o_b = tl.arange(0, PACKED_COLUMNS_PAD // 4)
        return tl.load(
            p_row[:, None] + o_b[None, :], mask=m_n[:, None] & (o_b < PACKED_COLUMNS // 4)[None, :], other=0.0
        )


@triton.jit
def load_stored_kv_scales_unrolled(
    K_SCALES, V_SCALES, page_ids, n_block, num_keys, h, stride_k_scales_p, stride_k_scales_s, stride_k_scales_h,
    stride_v_scales_p, stride_v_scales_s, stride_v_scales_h, UNROLL: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Loads stored scales of K and V of UNROLL key blocks from n_block on: two tuples, empty for other formats."""
    K_FORMAT: tl.constexpr = cfg.K
    k_scales, v_scales = (), ()
    for j in tl.static_range(UNROLL):
        m_n = keys_in_range_or_visible(page_ids[j], n_block + j, num_keys, cfg)
        if K_FORMAT.TOKEN_SCALES or K_FORMAT.BLOCK_SCALES:
            k_scales = k_scales + (
                load_stored_scales(
                    K_SCALES, page_ids[j], n_block + j, m_n, stride_k_scales_p, stride_k_scales_s, stride_k_scales_h, h,
                    cfg.BLOCK_D, cfg.PACKED_K, K_FORMAT, cfg,
                ),
            )  # fmt: skip
        if cfg.TOKEN_SCALES or cfg.BLOCK_SCALES:
            v_scales = v_scales + (
                load_stored_scales(
                    V_SCALES, page_ids[j], n_block + j, m_n, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h, h,
                    cfg.BLOCK_DV, cfg.PACKED_V, cfg, cfg,
                ),
            )  # fmt: skip
    return k_scales, v_scales


# QK and mask.


@triton.jit
def visible_mask_n_by_m(n_block, m_n, mask_args, cfg: tl.constexpr):
    """Returns which keys of n_block each query row sees: [BLOCK_N, BLOCK_M]."""
    o_n = n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
    o_q = (mask_args.row_begin + tl.arange(0, cfg.BLOCK_M)) // cfg.GROUP  # draft token of a row
    num_cached_keys = mask_args.num_keys - mask_args.seqlen_q
    q_position = num_cached_keys + o_q
    visible = m_n[:, None]
    if cfg.HAS_MASK:
        o_draft = o_n - num_cached_keys
        o_row = (mask_args.q_begin + o_q)[None, :].to(tl.int64) * mask_args.stride_mask_t
        p_mask_word = mask_args.MASK + o_row + (o_draft >> 4)[:, None]
        m_mask_word = (o_draft >= 0)[:, None] & visible & (o_q < mask_args.seqlen_q)[None, :]
        mask_word = tl.load(p_mask_word, mask=m_mask_word, other=0).to(tl.int32)
        mask_bit = (mask_word >> (o_draft & 15)[:, None]) & 1
        visible = visible & ((o_draft < 0)[:, None] | (mask_bit == 1))
    else:
        visible = visible & (o_n[:, None] <= q_position[None, :])
    if cfg.WINDOW > 0:
        visible = visible & (o_n[:, None] > q_position[None, :] - cfg.WINDOW)
    if cfg.LIST.AS_PAGES:
        visible = visible & is_before_cut(o_n, mask_args.num_keys, mask_args.first_cut_key, cfg)[:, None]
    return visible


@triton.jit
def compute_scores(K, k_scales, q, score_scale, softcap, page_id, n_block, mask_args, h, stride_k_p, stride_k_s,
                   stride_k_h, I_UNROLL: tl.constexpr, MASKED: tl.constexpr, cfg: tl.constexpr):  # fmt: skip
    """Returns scores [BLOCK_N, BLOCK_M] of n_block in units of log2. k_scales: stored, one entry per unrolled block."""
    K_FORMAT: tl.constexpr = cfg.K
    PACK: tl.constexpr = K_FORMAT.PACK
    m_n = keys_in_range_or_visible(page_id, n_block, mask_args.num_keys, cfg)
    # QK
    k = load_kv_block(K, page_id, n_block, m_n, stride_k_p, stride_k_s, stride_k_h, h, cfg.BLOCK_D, cfg.PACKED_K,
                      cfg.K_ROWS_PER_PAGE, cfg.K_ROWS_PER_HEAD, K_FORMAT.STRIDE_UNIT, MASKED, cfg)  # fmt: skip
    if K_FORMAT.BLOCK_SCALES:
        block_scales = expand_block_scales_times_power_of_2(
            k_scales[I_UNROLL], cfg.BLOCK_N, cfg.BLOCK_D // 4, 4, K_FORMAT
        )
        k = dequant_16bit_words_to_tiles(k, K_FORMAT, block_scales)
    else:
        k = dequant_16bit_words_to_tiles(k, K_FORMAT)
    s = tl.dot(k[0], q[0])
    for j in tl.static_range(1, PACK):
        s = tl.dot(k[j], q[j], acc=s)
    if cfg.TWO_TERM_Q:
        s = tl.dot(k[0], q[1], acc=s)
    if K_FORMAT.CODE == INT4:
        s -= int4_zero_points(k_scales[I_UNROLL]).to(tl.float32)[:, None] * q[PACK][None, :]
    s *= score_scale[None, :]
    if K_FORMAT.TOKEN_SCALES:
        s *= k_scales[I_UNROLL][:, None]
    if cfg.HAS_SOFTCAP:
        s = apply_softcap_to_log2_scores(s, softcap)
    # Mask
    if cfg.LIST.LENGTH >= 0:
        s = tl.where(m_n[:, None], s, float("-inf"))
    elif MASKED:
        s = tl.where(visible_mask_n_by_m(n_block, m_n, mask_args, cfg), s, float("-inf"))
    return s


# PV.


@triton.jit
def load_v_blocks(
    V, page_ids, n_block, num_keys, h, stride_v_p, stride_v_s, stride_v_h, UNROLL: tl.constexpr, MASKED: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """Loads packed V of key blocks n_block … n_block + UNROLL − 1."""
    v = ()
    for j in tl.static_range(UNROLL):
        m_n = keys_in_range_or_visible(page_ids[j], n_block + j, num_keys, cfg)
        v = v + (load_kv_block(V, page_ids[j], n_block + j, m_n, stride_v_p, stride_v_s, stride_v_h, h, cfg.BLOCK_DV,
                               cfg.PACKED_V, cfg.V_ROWS_PER_PAGE, cfg.V_ROWS_PER_HEAD, cfg.STRIDE_UNIT, MASKED, cfg),
                 )  # fmt: skip
    return v


@triton.jit
def accumulate_pv(
    acc_o, v, v_scales, p, n_block, mask_args, I_UNROLL: tl.constexpr, MASKED: tl.constexpr, cfg: tl.constexpr
):
    """Returns acc_o + Vᵀ P for key block n_block, p [BLOCK_N, BLOCK_M]. acc_o: PACK tiles [BLOCK_DV, BLOCK_M]."""
    PACK: tl.constexpr = cfg.PACK
    v = tl.trans(v)
    if cfg.BLOCK_SCALES:
        block_scales = expand_block_scales_times_power_of_2(v_scales[I_UNROLL], cfg.BLOCK_N, cfg.BLOCK_DV // 4, 4, cfg)
        v = dequant_16bit_words_to_tiles(v, cfg, tl.trans(block_scales))
    elif cfg.CODE == INT4:
        v = dequant_16bit_words_to_tiles(v, cfg, int4_zero_points(v_scales[I_UNROLL]).to(tl.int16)[None, :])
    else:
        v = dequant_16bit_words_to_tiles(v, cfg)
    out = ()
    for j in tl.static_range(PACK):
        x = v[j]
        if MASKED and cfg.LIST.LENGTH < 0:  # rows of listed keys are loaded as 0 where they are not visible
            x = tl.where(
                keys_visible_to_any_row(n_block, mask_args, cfg)[None, :], x, 0.0
            )  # an invalid slot may hold NaN, and 0 × NaN is NaN
        out = out + (tl.dot(x, p.to(x.dtype), acc=acc_o[j]),)
    return out


@triton.jit
def keys_visible_to_any_row(n_block, mask_args, cfg: tl.constexpr):
    """Returns which keys of n_block [BLOCK_N] some row may see; pages before every row's window may have been freed."""
    o_n = n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
    valid = o_n < mask_args.num_keys
    if cfg.WINDOW > 0:
        valid = valid & (o_n > mask_args.num_keys - mask_args.seqlen_q - cfg.WINDOW)
    if cfg.LIST.AS_PAGES:
        valid = valid & is_before_cut(o_n, mask_args.num_keys, mask_args.first_cut_key, cfg)
    return valid


# Steps of several key blocks, and the main loop.


@triton.jit
def v_scaled_scores_and_inv_v_scales_unrolled(
    K, k_scales, v_scales, q, score_scale, softcap, page_ids, n_block, mask_args, h, stride_k_p, stride_k_s, stride_k_h,
    UNROLL: tl.constexpr, MASKED: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Returns scores of UNROLL key blocks, and reciprocals of the V scales (per-token formats; else empty)."""
    s, inv_v_scales = (), ()
    for j in tl.static_range(UNROLL):
        x = compute_scores(K, k_scales, q, score_scale, softcap, page_ids[j], n_block + j, mask_args, h, stride_k_p,
                           stride_k_s, stride_k_h, j, MASKED, cfg)  # fmt: skip
        if cfg.TOKEN_SCALES:
            # V's scale joins the exponent, so that the P that multiplies codes lies in (0, 1].
            safe_v_scales = tl.maximum(v_scales[j], 1e-30)
            if MASKED and cfg.LIST.LENGTH < 0:
                safe_v_scales = tl.where(keys_visible_to_any_row(n_block + j, mask_args, cfg), safe_v_scales, 1.0)
            log2_v_scales, reciprocals = approx_log2_and_reciprocal(safe_v_scales, cfg)
            x += log2_v_scales[:, None]
            inv_v_scales = inv_v_scales + (reciprocals,)
        s = s + (x,)
    return s, inv_v_scales


@triton.jit
def softmax_and_pv_step(V, prefetched_v, v_scales, s, inv_v_scales, row_max, row_sum, acc_o, page_ids, n_block,
                        mask_args, h, stride_v_p, stride_v_s, stride_v_h, UNROLL: tl.constexpr,
                        V_MASKED: tl.constexpr, V_PREFETCHED: tl.constexpr, cfg: tl.constexpr):  # fmt: skip
    """Runs online softmax over the scores of UNROLL key blocks, then PV. V_PREFETCHED: V is in registers already."""
    PACK: tl.constexpr = cfg.PACK
    # Online softmax: row_max, and the rescale of row_sum and acc_o
    tile_max = s[0]
    for j in tl.static_range(1, UNROLL):
        tile_max = tl.maximum(tile_max, s[j])
    row_max_new = tl.maximum(row_max, tl.max(tile_max, 0))
    safe_max = tl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    rescale = tl.exp2(row_max - safe_max)
    row_sum *= rescale[None, :]
    rescaled_acc = ()
    for j in tl.static_range(PACK):
        rescaled_acc = rescaled_acc + (acc_o[j] * rescale[None, :],)
    # P and PV
    for j in tl.static_range(UNROLL):
        p = tl.exp2(s[j] - safe_max[None, :])
        if cfg.TOKEN_SCALES:
            row_sum += p * inv_v_scales[j][:, None]
        else:
            row_sum += p
        if V_PREFETCHED:
            v = prefetched_v[j]
        else:
            # Read from shared memory only now: earlier, packed V would hold registers through the softmax.
            v = load_v_blocks(
                V, (page_ids[j],), n_block + j, mask_args.num_keys, h, stride_v_p, stride_v_s, stride_v_h, 1, V_MASKED,
                cfg,
            )[0]  # fmt: skip
        rescaled_acc = accumulate_pv(rescaled_acc, v, v_scales, p, n_block + j, mask_args, j, V_MASKED, cfg)
    return row_max_new, row_sum, rescaled_acc


@triton.jit
def mainloop_row_max_row_sum_acc_o(
    K, V, K_SCALES, V_SCALES, key_source, q, score_scale, softcap, n_block_begin, n_block_end, mask_args, h, stride_k_p,
    stride_k_s, stride_k_h, stride_v_p, stride_v_s, stride_v_h, stride_k_scales_p, stride_k_scales_s,
    stride_k_scales_h, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h, cfg: tl.constexpr,
):  # fmt: skip
    """Returns (row_max, row_sum, PACK tiles acc_o [BLOCK_DV, BLOCK_M]) over key blocks [n_block_begin, n_block_end)."""
    PACK: tl.constexpr = cfg.PACK
    num_keys, seqlen_q = mask_args.num_keys, mask_args.seqlen_q
    row_max = tl.full([cfg.BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, tl.float32)  # summed over keys only at the end
    acc_o = ()
    for _ in tl.static_range(PACK):
        acc_o = acc_o + (tl.full([cfg.BLOCK_DV, cfg.BLOCK_M], 0.0, tl.float32),)
    # Key blocks [unmasked_begin, unmasked_end) are fully visible to every row; the others need a mask.
    unmasked_begin = n_block_begin
    if cfg.WINDOW > 0:
        unmasked_begin = tl.minimum(
            tl.maximum(n_block_begin, tl.cdiv(tl.maximum(num_keys - cfg.WINDOW, 0), cfg.BLOCK_N)), n_block_end
        )
    num_unmasked_keys = num_keys - seqlen_q if cfg.HAS_MASK else num_keys - seqlen_q + 1
    if cfg.LIST.AS_PAGES:
        num_unmasked_keys = tl.minimum(num_unmasked_keys, mask_args.first_cut_key)
    unmasked_end = tl.maximum(tl.minimum(n_block_end, tl.maximum(num_unmasked_keys, 0) // cfg.BLOCK_N), unmasked_begin)
    unmasked_end = unmasked_begin + (unmasked_end - unmasked_begin) // cfg.UNROLL * cfg.UNROLL
    # Listed keys are masked where they are loaded: all of their blocks, one a step, take the pipelined loop.
    LISTED: tl.constexpr = cfg.LIST.LENGTH >= 0
    if LISTED:
        unmasked_end = n_block_end
    # Page ids are loaded one iteration ahead of their key blocks, and stored scales in the middle of the iteration
    # before, so that no load waits for its own address. NOTE: the pipeline's depth is the launch's num_stages. Passed
    # to this range it would cover these loads too; since the next iteration needs them, Triton would then pipeline
    # nothing, as it does where a value is carried over two iterations.
    page_ids = load_page_ids_or_listed_keys_unrolled(key_source, unmasked_begin, num_keys, cfg.UNROLL, cfg)
    k_scales, v_scales = load_stored_kv_scales_unrolled(
        K_SCALES, V_SCALES, page_ids, unmasked_begin, num_keys, h, stride_k_scales_p, stride_k_scales_s,
        stride_k_scales_h, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h, cfg.UNROLL, cfg,
    )  # fmt: skip
    v = ()
    if cfg.REGISTER_PREFETCH:
        v = load_v_blocks(
            V, page_ids, unmasked_begin, num_keys, h, stride_v_p, stride_v_s, stride_v_h, cfg.UNROLL, True, cfg
        )
    # Unmasked key blocks: QK, prefetch of the next scales (and V), online softmax, PV
    for n_block in tl.range(unmasked_begin, unmasked_end, cfg.UNROLL):
        next_page_ids = load_page_ids_or_listed_keys_unrolled(
            key_source, n_block + cfg.UNROLL, num_keys, cfg.UNROLL, cfg
        )
        s, inv_v_scales = v_scaled_scores_and_inv_v_scales_unrolled(
            K, k_scales, v_scales, q, score_scale, softcap, page_ids, n_block, mask_args, h, stride_k_p, stride_k_s,
            stride_k_h, cfg.UNROLL, LISTED, cfg,
        )  # fmt: skip
        next_k_scales, next_v_scales = load_stored_kv_scales_unrolled(
            K_SCALES, V_SCALES, next_page_ids, n_block + cfg.UNROLL, num_keys, h, stride_k_scales_p, stride_k_scales_s,
            stride_k_scales_h, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h, cfg.UNROLL, cfg,
        )  # fmt: skip
        next_v = ()
        if cfg.REGISTER_PREFETCH:
            next_v = load_v_blocks(
                V, next_page_ids, n_block + cfg.UNROLL, num_keys, h, stride_v_p, stride_v_s, stride_v_h, cfg.UNROLL,
                True, cfg,
            )  # fmt: skip
        row_max, row_sum, acc_o = softmax_and_pv_step(V, v, v_scales, s, inv_v_scales, row_max, row_sum, acc_o,
                                                      page_ids, n_block, mask_args, h, stride_v_p, stride_v_s,
                                                      stride_v_h, cfg.UNROLL, LISTED, cfg.REGISTER_PREFETCH,
                                                      cfg)  # fmt: skip
        page_ids, k_scales, v_scales, v = next_page_ids, next_k_scales, next_v_scales, next_v
    # Masked key blocks, one at a time, unpipelined: QK, mask, online softmax, PV
    if not LISTED:
        for i in tl.range(0, unmasked_begin - n_block_begin + n_block_end - unmasked_end, num_stages=1):
            n_block = tl.where(
                i < unmasked_begin - n_block_begin,
                n_block_begin + i,
                unmasked_end + i - (unmasked_begin - n_block_begin),
            )
            page_ids_here = load_page_ids_or_listed_keys_unrolled(key_source, n_block, num_keys, 1, cfg)
            k_scales_here, v_scales_here = load_stored_kv_scales_unrolled(
                K_SCALES, V_SCALES, page_ids_here, n_block, num_keys, h, stride_k_scales_p, stride_k_scales_s,
                stride_k_scales_h, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h, 1, cfg,
            )  # fmt: skip
            s, inv_v_scales = v_scaled_scores_and_inv_v_scales_unrolled(
                K, k_scales_here, v_scales_here, q, score_scale, softcap, page_ids_here, n_block, mask_args, h,
                stride_k_p, stride_k_s, stride_k_h, 1, True, cfg,
            )  # fmt: skip
            row_max, row_sum, acc_o = softmax_and_pv_step(
                V, (), v_scales_here, s, inv_v_scales, row_max, row_sum, acc_o, page_ids_here, n_block, mask_args, h,
                stride_v_p, stride_v_s, stride_v_h, 1, True, False, cfg,
            )  # fmt: skip
    # Undo the scales of int4's tiles, which differ
    if cfg.CODE == INT4:
        unscaled = ()
        for j in tl.static_range(PACK):
            unscaled = unscaled + (acc_o[j] * (1.0 / dequant_tile_power_of_2_factor(j, cfg)),)
        acc_o = unscaled
    return row_max, tl.sum(row_sum, 0), acc_o
