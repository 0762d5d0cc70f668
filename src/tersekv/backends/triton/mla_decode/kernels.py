"""The split pass of MLA decode: a latent row, read once a key block, is key and value of every head. The mask is in
`apply_mask`, the rescale in `softmax_and_pv_step`; Triton pipelines the loads, and `parts/combine` combines splits.

Work is split as in decode (stream-K, `parts/tile_scheduler`). HEADS counts blocks of GROUP query heads, which read the
same rows: programs of one range lie side by side, so that all but one find the key block in L2.

A row's packed codes form CHUNKS tiles of CHUNK 16-bit words, each unpacked into PACK tiles (`parts/dequant`); the
rotary part is one more tile. Queries and accumulators are split the same way: tile i * PACK + j holds the columns PACK
* (i * CHUNK + word) + j. Rows lie on the matrix unit's M side, as keys and, transposed, as values; query rows lie on N.
With group scales a chunk is a scale group. The end of a row of fp8_v4, in bf16, takes the rotary part's place, and is a
value as well.
"""

import triton
import triton.language as tl

from ..parts.combine import LN2, LOG2E, cast_output, compute_acc_scale_and_lse, load_device_scale_else_host_scale
from ..parts.dequant import dequant_16bit_words_to_tiles, e4m3_bytes_to_fp16
from ..parts.key_lists import (
    VISIBLE,
    key_row_offsets,
    keys_in_range_or_visible,
    load_page_ids_or_pages_slots_and_visible,
    page_table_row_ptr_or_key_list,
)
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

MIN_SCALE = tl.constexpr(1e-30)  # of a token's V scale: its reciprocal is finite


# K and V: packed codes, rotary parts and group scales of a key block.


@triton.jit
def load_packed_block(X, page_ids, n_block, num_keys, stride_page, stride_slot, STRIDE_UNIT: tl.constexpr,
                      FIRST_PACKED_COLUMN: tl.constexpr, NUM_PACKED_COLUMNS: tl.constexpr,
                      PACKED_COLUMNS_OF_ROW: tl.constexpr, MASKED: tl.constexpr,
                      cfg: tl.constexpr):  # fmt: skip
    """Loads packed codes [BLOCK_N, NUM_PACKED_COLUMNS] from FIRST_PACKED_COLUMN on, by pointers; 0 outside where
    masked.

    Strides are in STRIDE_UNITs.
    """
    o_w = FIRST_PACKED_COLUMN + tl.arange(0, NUM_PACKED_COLUMNS)
    p_x = X + (key_row_offsets(page_ids, n_block, stride_page, stride_slot, cfg) * STRIDE_UNIT)[:, None] + o_w[None, :]
    if MASKED:
        m_n = keys_in_range_or_visible(page_ids, n_block, num_keys, cfg)
        if FIRST_PACKED_COLUMN + NUM_PACKED_COLUMNS <= PACKED_COLUMNS_OF_ROW:
            return tl.load(p_x, mask=m_n[:, None], other=0)
        else:
            return tl.load(p_x, mask=m_n[:, None] & (o_w < PACKED_COLUMNS_OF_ROW)[None, :], other=0)
    elif FIRST_PACKED_COLUMN + NUM_PACKED_COLUMNS <= PACKED_COLUMNS_OF_ROW:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_w < PACKED_COLUMNS_OF_ROW)[None, :], other=0)


@triton.jit
def load_packed_latent_chunk(
    CKV, CKV_MAP, page_ids, n_block, num_keys, stride_ckv_p, stride_ckv_s, I_CHUNK: tl.constexpr,
    MASK_POINTER_LOADS: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Loads packed codes [BLOCK_N, CHUNK] of chunk I_CHUNK of key block n_block.

    NOTE: tensor descriptors also read rows past the last key, which may hold NaN.
    """
    if cfg.USE_TMA:
        return CKV_MAP.load(
            [
                (page_ids * cfg.CKV_ROWS_PER_PAGE).to(tl.int32) + (n_block % (cfg.PAGE // cfg.BLOCK_N)) * cfg.BLOCK_N,
                I_CHUNK * cfg.CHUNK,
            ]
        )
    else:
        return load_packed_block(
            CKV, page_ids, n_block, num_keys, stride_ckv_p, stride_ckv_s, cfg.CKV_STRIDE_UNIT, I_CHUNK * cfg.CHUNK,
            cfg.CHUNK, cfg.PACKED_V, MASK_POINTER_LOADS, cfg,
        )  # fmt: skip


@triton.jit
def load_packed_k_pe_block(
    KPE, KPE_MAP, page_ids, n_block, num_keys, stride_kpe_p, stride_kpe_s, MASK_POINTER_LOADS: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """Loads rotary parts [BLOCK_N, BLOCK_PE] of key block n_block, with the same NOTE."""
    if cfg.USE_TMA:
        return KPE_MAP.load(
            [(page_ids * cfg.KPE_ROWS_PER_PAGE).to(tl.int32) + (n_block % (cfg.PAGE // cfg.BLOCK_N)) * cfg.BLOCK_N, 0]
        )
    else:
        return load_packed_block(
            KPE, page_ids, n_block, num_keys, stride_kpe_p, stride_kpe_s, cfg.KPE_STRIDE_UNIT, 0, cfg.BLOCK_PE,
            cfg.PACKED_PE, MASK_POINTER_LOADS, cfg,
        )  # fmt: skip


@triton.jit
def load_packed_latents_and_k_pe_by_pointers(
    CKV, KPE, page_ids, n_block, num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, cfg: tl.constexpr
):
    """Loads (CHUNKS packed tiles [BLOCK_N, CHUNK], rotary tile [BLOCK_N, BLOCK_PE]) of n_block, by pointers."""
    CHUNKS: tl.constexpr = cfg.CHUNKS
    packed = ()
    for i in tl.static_range(CHUNKS):
        packed = packed + (
            load_packed_block(
                CKV, page_ids, n_block, num_keys, stride_ckv_p, stride_ckv_s, cfg.CKV_STRIDE_UNIT, i * cfg.CHUNK,
                cfg.CHUNK, cfg.PACKED_V, True, cfg,
            ),
        )  # fmt: skip
    k_pe = ()
    if cfg.PACKED_PE > 0:
        k_pe = load_packed_block(
            KPE, page_ids, n_block, num_keys, stride_kpe_p, stride_kpe_s, cfg.KPE_STRIDE_UNIT, 0, cfg.BLOCK_PE,
            cfg.PACKED_PE, True, cfg,
        )  # fmt: skip
    return packed, k_pe


@triton.jit
def load_group_scale_vectors(SCALES, page_ids, n_block, num_keys, stride_scales_p, stride_scales_s, cfg: tl.constexpr):
    """Loads group scales of n_block: CHUNKS vectors [BLOCK_N], 1 past the last key; empty for other formats."""
    CHUNKS: tl.constexpr = cfg.CHUNKS
    group_scales = ()
    if cfg.GROUP_SCALES:
        m_n = keys_in_range_or_visible(page_ids, n_block, num_keys, cfg)
        p_row = SCALES + key_row_offsets(page_ids, n_block, stride_scales_p, stride_scales_s, cfg)
        for i in tl.static_range(CHUNKS):
            if cfg.EXPONENT_SCALES:
                exponent = tl.load(p_row + i, mask=m_n, other=127).to(tl.int32)
                # 2^-127 is subnormal, and 255 is NaN.
                bits = tl.where(exponent == 0, 1 << 22, tl.where(exponent == 255, 0x7FC00000, exponent << 23))
                group_scales = group_scales + (bits.to(tl.float32, bitcast=True),)
            else:
                group_scales = group_scales + (tl.load(p_row + i, mask=m_n, other=1.0),)
    return group_scales


# Query.


@triton.jit
def load_transposed_query_chunk(p_row, m_row, FIRST_PACKED_COLUMN: tl.constexpr, NUM_PACKED_COLUMNS: tl.constexpr,
                     PACKED_COLUMNS_OF_ROW: tl.constexpr, PACK: tl.constexpr, I_VALUE_IN_PACKED: tl.constexpr,
                     cfg: tl.constexpr):  # fmt: skip
    """Loads columns PACK * (FIRST_PACKED_COLUMN + i) + I_VALUE_IN_PACKED of the query rows, transposed: fp32
    [NUM_PACKED_COLUMNS, BLOCK_M]."""
    o_w = FIRST_PACKED_COLUMN + tl.arange(0, NUM_PACKED_COLUMNS)
    p_q = p_row[None, :] + (PACK * o_w + I_VALUE_IN_PACKED)[:, None]
    x = tl.load(p_q, mask=(o_w < PACKED_COLUMNS_OF_ROW)[:, None] & m_row[None, :], other=0.0)
    if cfg.Q_AS_BYTES:
        x = e4m3_bytes_to_fp16(x)
    return x.to(tl.float32)


@triton.jit
def query_row_abs_max(p_nope, p_pe, m_row, cfg: tl.constexpr):
    """Returns the largest magnitude of each query row: fp32 [BLOCK_M]."""
    CHUNKS: tl.constexpr = cfg.CHUNKS
    PACK: tl.constexpr = cfg.PACK
    PACK_PE: tl.constexpr = cfg.PACK_PE
    abs_max = tl.full([cfg.BLOCK_M], 0.0, tl.float32)
    for i in tl.static_range(CHUNKS):
        for j in tl.static_range(PACK):
            x = load_transposed_query_chunk(p_nope, m_row, i * cfg.CHUNK, cfg.CHUNK, cfg.PACKED_V, PACK, j, cfg)
            abs_max = tl.maximum(abs_max, tl.max(tl.abs(x), 0))
    for j in tl.static_range(PACK_PE if cfg.PACKED_PE > 0 else 0):
        x = load_transposed_query_chunk(p_pe, m_row, 0, cfg.BLOCK_PE, cfg.PACKED_PE, PACK_PE, j, cfg)
        abs_max = tl.maximum(abs_max, tl.max(tl.abs(x), 0))
    return abs_max


@triton.jit
def to_query_operands(x, BF16: tl.constexpr, TWO_TERM_Q: tl.constexpr):
    """Returns x as one 16-bit MMA operand, or as two bf16 tiles whose sum holds all of fp16."""
    if not BF16:
        return (x.to(tl.float16),)
    elif TWO_TERM_Q:
        high = x.to(tl.bfloat16)
        return high, (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        return (x.to(tl.bfloat16),)


@triton.jit
def load_transposed_16bit_q_tiles_and_q_scale(
    Q_NOPE, Q_PE, tokens, heads, row_mask, stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h,
    cfg: tl.constexpr,
):  # fmt: skip
    """Loads (CHUNKS * PACK tiles of q_nope [CHUNK, BLOCK_M], tiles of q_pe, the scale of the scores [BLOCK_M]).

    fp16 holds a bf16 row only after a power of two is divided out; the score scale multiplies it back.
    """
    CHUNKS: tl.constexpr = cfg.CHUNKS
    PACK: tl.constexpr = cfg.PACK
    PACK_PE: tl.constexpr = cfg.PACK_PE
    p_nope = Q_NOPE + tokens * stride_q_nope_t + heads * stride_q_nope_h
    p_pe = p_nope + (cfg.DV - cfg.TAIL)
    if cfg.PACKED_PE > 0 and cfg.TAIL == 0:
        p_pe = Q_PE + tokens * stride_q_pe_t + heads * stride_q_pe_h
    q_scale = tl.full([cfg.BLOCK_M], 1.0, tl.float32)
    inv_q_scale = q_scale
    if cfg.Q_SCALED:
        abs_max = query_row_abs_max(p_nope, p_pe, row_mask, cfg)
        exponent = tl.maximum((abs_max.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1)
        inv_q_scale = (tl.maximum(254 - exponent, 1) << 23).to(tl.float32, bitcast=True)
        q_scale = (exponent << 23).to(tl.float32, bitcast=True)
    nope_tiles, pe_tiles = (), ()
    for i in tl.static_range(CHUNKS):
        for j in tl.static_range(PACK):
            x = (
                load_transposed_query_chunk(p_nope, row_mask, i * cfg.CHUNK, cfg.CHUNK, cfg.PACKED_V, PACK, j, cfg)
                * inv_q_scale[None, :]
            )
            nope_tiles = nope_tiles + to_query_operands(x, cfg.BF16, cfg.TWO_TERM_Q)
    for j in tl.static_range(PACK_PE if cfg.PACKED_PE > 0 else 0):
        x = (
            load_transposed_query_chunk(p_pe, row_mask, 0, cfg.BLOCK_PE, cfg.PACKED_PE, PACK_PE, j, cfg)
            * inv_q_scale[None, :]
        )
        pe_tiles = pe_tiles + to_query_operands(x, cfg.BF16_PE, cfg.TWO_TERM_Q_PE)
    return nope_tiles, pe_tiles, q_scale


# Main loop: QK, mask, online softmax, PV.


@triton.jit
def accumulate_qk_of_key_tile(
    s, packed_k, q_tiles, FIRST_Q_TILE: tl.constexpr, TILES_PER_PACKED_K: tl.constexpr, TWO_TERM_Q: tl.constexpr,
    ACCUMULATE: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Returns (s +) K Q, fp32 [BLOCK_N, BLOCK_M]: a key tile, unpacked into TILES_PER_PACKED_K tiles, times the query
    tiles from FIRST_Q_TILE on (with TWO_TERM_Q two for each)."""
    k = (packed_k,)
    if TILES_PER_PACKED_K > 1:
        k = dequant_16bit_words_to_tiles(packed_k, cfg)
    TERMS: tl.constexpr = 2 if TWO_TERM_Q else 1
    for j in tl.static_range(TILES_PER_PACKED_K * TERMS):
        if ACCUMULATE or j > 0:
            s = tl.dot(k[j // TERMS], q_tiles[FIRST_Q_TILE * TERMS + j], acc=s)
        else:
            s = tl.dot(k[0], q_tiles[FIRST_Q_TILE * TERMS])
    return s


@triton.jit
def unmasked_scores_packed_latents_and_rope_tail(prefetched_ckv, k_pe, group_scales, q_nope, q_pe, score_scale, CKV,
                                                 KPE, CKV_MAP, KPE_MAP, page_ids, n_block, num_keys, stride_ckv_p,
                                                 stride_ckv_s, stride_kpe_p, stride_kpe_s, PREFETCHED: tl.constexpr,
                                                 MASK_POINTER_LOADS: tl.constexpr, cfg: tl.constexpr):  # fmt: skip
    """Returns (unmasked scores of n_block in units of log2 [BLOCK_N, BLOCK_M], its packed codes, its tail or nothing),
    PREFETCHED or loaded here.

    Each chunk is loaded where it is multiplied: that is where its packed codes move to registers.
    """
    CHUNKS: tl.constexpr = cfg.CHUNKS
    # QK of the rotary part, if there is one
    s = tl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, tl.float32)
    bf16_rope_tail = ()
    if cfg.PACKED_PE > 0:
        k_pe_block = k_pe
        if not PREFETCHED:
            k_pe_block = load_packed_k_pe_block(
                KPE, KPE_MAP, page_ids, n_block, num_keys, stride_kpe_p, stride_kpe_s, MASK_POINTER_LOADS, cfg
            )
        s = accumulate_qk_of_key_tile(None, k_pe_block, q_pe, 0, cfg.PACK_PE, cfg.TWO_TERM_Q_PE, False, cfg)
        if cfg.TAIL > 0:
            bf16_rope_tail = k_pe_block
    # QK of the latents
    packed_latents = ()
    for i in tl.static_range(CHUNKS):
        if PREFETCHED:
            packed_chunk = prefetched_ckv[i]
        else:
            packed_chunk = load_packed_latent_chunk(
                CKV, CKV_MAP, page_ids, n_block, num_keys, stride_ckv_p, stride_ckv_s, i, MASK_POINTER_LOADS, cfg
            )
        packed_latents = packed_latents + (packed_chunk,)
        if cfg.GROUP_SCALES:
            s += (
                accumulate_qk_of_key_tile(
                    None, packed_chunk, q_nope, i * cfg.PACK, cfg.PACK, cfg.TWO_TERM_Q, False, cfg
                )
                * group_scales[i][:, None]
            )
        else:
            s = accumulate_qk_of_key_tile(s, packed_chunk, q_nope, i * cfg.PACK, cfg.PACK, cfg.TWO_TERM_Q, True, cfg)
    return s * score_scale[None, :], packed_latents, bf16_rope_tail


@triton.jit
def rescale_and_accumulate_pv(
    acc_o, rescale, packed_latents, bf16_rope_tail, p, group_ratios, rope_tail_ratio, CKV, KPE, page_ids, n_block,
    num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, MASKED: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Returns acc_o * rescale + Vᵀ P, p [BLOCK_N, BLOCK_M]. group_ratios: of each chunk's scale, or empty;
    bf16_rope_tail: the end of rows, if they have one, and rope_tail_ratio its ratio.

    A MASKED block's V is loaded again chunk by chunk, without invalid rows (0 × NaN is NaN): kept since QK, it would
    cost registers in every iteration.
    """
    CHUNKS: tl.constexpr = cfg.CHUNKS
    PACK: tl.constexpr = cfg.PACK
    out = ()
    for i in tl.static_range(CHUNKS):
        packed_chunk = packed_latents[i]
        if MASKED:
            packed_chunk = load_packed_block(
                CKV, page_ids, n_block, num_keys, stride_ckv_p, stride_ckv_s, cfg.CKV_STRIDE_UNIT, i * cfg.CHUNK,
                cfg.CHUNK, cfg.PACKED_V, True, cfg,
            )  # fmt: skip
        v = dequant_16bit_words_to_tiles(tl.trans(packed_chunk), cfg)
        scaled_p = p
        if cfg.GROUP_SCALES:
            scaled_p = p * group_ratios[i][:, None]
        for j in tl.static_range(PACK):
            out = out + (tl.dot(v[j], scaled_p.to(v[j].dtype), acc=acc_o[i * cfg.PACK + j] * rescale[None, :]),)
    if cfg.TAIL > 0:
        v_tail = bf16_rope_tail
        if MASKED:
            v_tail = load_packed_k_pe_block(
                KPE, None, page_ids, n_block, num_keys, stride_kpe_p, stride_kpe_s, True, cfg
            )
        scaled_p = p * rope_tail_ratio[:, None]
        v_tail = tl.trans(v_tail)
        out = out + (tl.dot(v_tail, scaled_p.to(v_tail.dtype), acc=acc_o[CHUNKS * PACK] * rescale[None, :]),)
    return out


@triton.jit
def per_key_max_scale_inverse_and_ratios(group_scales, cfg: tl.constexpr):
    """Returns (each token's largest group scale [BLOCK_N], its reciprocal, the ratios of its group scales to it)."""
    CHUNKS: tl.constexpr = cfg.CHUNKS
    max_scale = tl.full([cfg.BLOCK_N], MIN_SCALE, tl.float32)
    for i in tl.static_range(CHUNKS):
        max_scale = tl.maximum(max_scale, tl.abs(group_scales[i]))
    inv_scale = 1.0 / max_scale
    group_ratios = ()
    for i in tl.static_range(CHUNKS):
        group_ratios = group_ratios + (group_scales[i] * inv_scale,)
    return max_scale, inv_scale, group_ratios


@triton.jit
def apply_mask(s, page_ids_or_pages_slots_and_visible, n_block, num_keys, seqlen_q, row_begin, cfg: tl.constexpr):
    """Returns the scores of n_block with −inf where a query row does not see a key."""
    if cfg.LIST.LENGTH >= 0:
        return tl.where(page_ids_or_pages_slots_and_visible[VISIBLE][:, None], s, float("-inf"))
    else:
        o_n = n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
        q_position = num_keys - seqlen_q + (row_begin + tl.arange(0, cfg.BLOCK_M)) // cfg.GROUP
        return tl.where((o_n < num_keys)[:, None] & (o_n[:, None] <= q_position[None, :]), s, float("-inf"))


@triton.jit
def softmax_and_pv_step(
    s, packed_latents, bf16_rope_tail, group_scales, row_max, row_sum, acc_o, CKV, KPE, page_ids, n_block, num_keys,
    stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, MASKED: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Returns (row_max, row_sum, acc_o) after the scores of one key block: online softmax, rescale, PV."""
    group_ratios, inv_scale = (), row_max  # without group scales unused
    if cfg.GROUP_SCALES:
        # The token's largest scale joins the exponent, so that the P that multiplies codes lies in [0, 1].
        max_scale, inv_scale, group_ratios = per_key_max_scale_inverse_and_ratios(group_scales, cfg)
        s += tl.log2(max_scale)[:, None]
    # Online softmax
    row_max_new = tl.maximum(row_max, tl.max(s, 0))
    safe_max = tl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    rescale = tl.exp2(row_max - safe_max)
    # P, and row_sum rescaled
    p = tl.exp2(s - safe_max[None, :])
    if cfg.GROUP_SCALES:
        row_sum = row_sum * rescale[None, :] + p * inv_scale[:, None]
    else:
        row_sum = row_sum * rescale[None, :] + p
    # acc_o rescaled, and PV
    return (
        row_max_new,
        row_sum,
        rescale_and_accumulate_pv(
            acc_o, rescale, packed_latents, bf16_rope_tail, p, group_ratios, inv_scale, CKV, KPE, page_ids, n_block,
            num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, MASKED, cfg,
        ),
    )  # fmt: skip


@triton.jit
def mainloop(CKV, KPE, CKV_MAP, KPE_MAP, SCALES, key_source, q_nope, q_pe, score_scale, n_block_begin, n_block_end,
             num_keys, seqlen_q, row_begin, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, stride_scales_p,
             stride_scales_s, cfg: tl.constexpr):  # fmt: skip
    """Returns (row_max, row_sum, CHUNKS * PACK tiles acc_o [CHUNK, BLOCK_M]) over [n_block_begin, n_block_end)."""
    NUM_ACC_TILES: tl.constexpr = cfg.CHUNKS * cfg.PACK
    if cfg.TAIL > 0:
        # The end of a row lies behind its codes.
        KPE = KPE.to(tl.pointer_type(tl.bfloat16)) + cfg.PACKED_V
    row_max = tl.full([cfg.BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, tl.float32)  # summed over keys only at the end
    acc_o = ()
    for _ in tl.static_range(NUM_ACC_TILES):
        acc_o = acc_o + (tl.full([cfg.CHUNK, cfg.BLOCK_M], 0.0, tl.float32),)
    if cfg.TAIL > 0:
        acc_o = acc_o + (tl.full([cfg.BLOCK_PE, cfg.BLOCK_M], 0.0, tl.float32),)
    # Key blocks [n_block_begin, unmasked_end) are fully visible to every row; the others need a mask.
    unmasked_end = tl.maximum(
        tl.minimum(n_block_end, tl.maximum(num_keys - seqlen_q + 1, 0) // cfg.BLOCK_N), n_block_begin
    )
    # Listed keys are masked where they are loaded, so that all of their blocks take the pipelined loop.
    if cfg.LIST.LENGTH >= 0:
        unmasked_end = n_block_end
    # Page ids are loaded one iteration ahead, and stored scales in the middle of the iteration before, so that no
    # load waits for its own address. The depth of the pipeline is the launch's num_stages; see `mainloop` of decode.
    page_ids = load_page_ids_or_pages_slots_and_visible(key_source, n_block_begin, num_keys, cfg)
    group_scales = load_group_scale_vectors(
        SCALES, page_ids, n_block_begin, num_keys, stride_scales_p, stride_scales_s, cfg
    )
    prefetched_ckv, k_pe = (), ()
    if cfg.REGISTER_PREFETCH:
        prefetched_ckv, k_pe = load_packed_latents_and_k_pe_by_pointers(
            CKV, KPE, page_ids, n_block_begin, num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, cfg
        )
    # Unmasked key blocks: QK, prefetch, online softmax, PV
    for n_block in tl.range(n_block_begin, unmasked_end):
        next_page_ids = load_page_ids_or_pages_slots_and_visible(key_source, n_block + 1, num_keys, cfg)
        s, packed_latents, bf16_rope_tail = unmasked_scores_packed_latents_and_rope_tail(
            prefetched_ckv, k_pe, group_scales, q_nope, q_pe, score_scale, CKV, KPE, CKV_MAP, KPE_MAP, page_ids,
            n_block, num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, cfg.REGISTER_PREFETCH,
            cfg.LIST.LENGTH >= 0, cfg,
        )  # fmt: skip
        if cfg.LIST.LENGTH >= 0:
            s = apply_mask(s, page_ids, n_block, num_keys, seqlen_q, row_begin, cfg)
        next_group_scales = load_group_scale_vectors(
            SCALES, next_page_ids, n_block + 1, num_keys, stride_scales_p, stride_scales_s, cfg
        )
        if cfg.REGISTER_PREFETCH:
            prefetched_ckv, k_pe = load_packed_latents_and_k_pe_by_pointers(
                CKV, KPE, next_page_ids, n_block + 1, num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s,
                cfg,
            )  # fmt: skip
        row_max, row_sum, acc_o = softmax_and_pv_step(
            s, packed_latents, bf16_rope_tail, group_scales, row_max, row_sum, acc_o, CKV, KPE, page_ids, n_block,
            num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, False, cfg,
        )  # fmt: skip
        page_ids, group_scales = next_page_ids, next_group_scales
    # Masked key blocks, unpipelined: QK, mask, online softmax, PV
    if cfg.LIST.LENGTH < 0:
        for n_block in tl.range(unmasked_end, n_block_end, num_stages=1):
            page_ids_here = load_page_ids_or_pages_slots_and_visible(key_source, n_block, num_keys, cfg)
            group_scales_here = load_group_scale_vectors(
                SCALES, page_ids_here, n_block, num_keys, stride_scales_p, stride_scales_s, cfg
            )
            s, packed_latents, bf16_rope_tail = unmasked_scores_packed_latents_and_rope_tail(
                (), (), group_scales_here, q_nope, q_pe, score_scale, CKV, KPE, CKV_MAP, KPE_MAP, page_ids_here,
                n_block, num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, False, True, cfg,
            )  # fmt: skip
            s = apply_mask(s, page_ids_here, n_block, num_keys, seqlen_q, row_begin, cfg)
            row_max, row_sum, acc_o = softmax_and_pv_step(
                s, packed_latents, bf16_rope_tail, group_scales_here, row_max, row_sum, acc_o, CKV, KPE, page_ids_here,
                n_block, num_keys, stride_ckv_p, stride_ckv_s, stride_kpe_p, stride_kpe_s, True, cfg,
            )  # fmt: skip
    return row_max, tl.sum(row_sum, 0), acc_o


# Epilogue: the output, or a partial state for the combine.


@triton.jit
def store_output(OUT, acc_o, acc_scale, tokens, heads, m_row, stride_out_t, stride_out_h, cfg: tl.constexpr):
    """Stores acc_o × acc_scale to OUT."""
    CHUNKS: tl.constexpr = cfg.CHUNKS
    PACK: tl.constexpr = cfg.PACK
    for i in tl.static_range(CHUNKS):
        o_w = i * cfg.CHUNK + tl.arange(0, cfg.CHUNK)
        mask = (o_w < cfg.PACKED_V)[:, None] & m_row[None, :]
        for j in tl.static_range(PACK):
            p_out = OUT + (tokens * stride_out_t + heads * stride_out_h)[None, :] + (cfg.PACK * o_w + j)[:, None]
            tl.store(p_out, cast_output(acc_o[i * cfg.PACK + j] * acc_scale[None, :], OUT, cfg), mask=mask)
    if cfg.TAIL > 0:
        o_t = tl.arange(0, cfg.BLOCK_PE)
        p_out = OUT + (tokens * stride_out_t + heads * stride_out_h)[None, :] + (cfg.DV - cfg.TAIL + o_t)[:, None]
        mask = (o_t < cfg.TAIL)[:, None] & m_row[None, :]
        tl.store(p_out, cast_output(acc_o[CHUNKS * PACK] * acc_scale[None, :], OUT, cfg), mask=mask)


@triton.jit
def store_partial(SPLIT_WORKSPACE, partial_slot, row_max, row_sum, acc_o, m_row, cfg: tl.constexpr):
    """Stores a split's softmax state in decode's layout: the columns of tile j, j + 1, …, then row_max and row_sum."""
    CHUNKS: tl.constexpr = cfg.CHUNKS
    PACK: tl.constexpr = cfg.PACK
    p_row = (
        SPLIT_WORKSPACE
        + (partial_slot.to(tl.int64) * cfg.PARTIAL_ROWS + tl.arange(0, cfg.BLOCK_M)) * cfg.PARTIAL_COLUMNS
    )
    for i in tl.static_range(CHUNKS):
        o_w = i * cfg.CHUNK + tl.arange(0, cfg.CHUNK)
        mask = (o_w < (cfg.PACKED_V if cfg.TAIL > 0 else cfg.BLOCK_DV))[:, None] & m_row[None, :]
        for j in tl.static_range(PACK):
            tl.store(p_row[None, :] + (j * cfg.BLOCK_DV + o_w)[:, None], acc_o[i * cfg.PACK + j], mask=mask)
    if cfg.TAIL > 0:
        o_t = tl.arange(0, cfg.BLOCK_PE)
        o_c = o_t % PACK * cfg.BLOCK_DV + cfg.PACKED_V + o_t // PACK
        tl.store(p_row[None, :] + o_c[:, None], acc_o[CHUNKS * PACK], mask=(o_t < cfg.TAIL)[:, None] & m_row[None, :])
    tl.store(p_row + cfg.PARTIAL_COLUMNS - 2, row_max, mask=m_row)
    tl.store(p_row + cfg.PARTIAL_COLUMNS - 1, row_sum, mask=m_row)


# The kernel.


@triton.jit
def stream_k_mla_decode_kernel(
    Q_NOPE, Q_PE, CKV, KPE, CKV_MAP, KPE_MAP, SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, INDICES, INDEX_LENS,
    LIST_SEQ_LENS, LIST_CU_SEQLENS_Q, SINKS, OUT, LSE, MAX_LOGITS, SPLIT_WORKSPACE,
    softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE,
    B, T, max_splits, stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h, stride_ckv_p, stride_ckv_s,
    stride_kpe_p, stride_kpe_s, stride_scales_p, stride_scales_s, stride_table_b, stride_out_t, stride_out_h,
    stride_lse_t, stride_lse_h, num_requests, num_slots, stride_list_t, stride_list_h, stride_list_n,
    cfg: tl.constexpr,
):  # fmt: skip
    """Attends to one program's range of key blocks for one block of heads. See the module's docstring."""
    # Query rows of no request; no splits so far
    i_program = tl.program_id(0)
    num_programs = tl.num_programs(0)
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
    h = i_program % cfg.HEADS
    lists = (
        INDICES, INDEX_LENS, LIST_SEQ_LENS, LIST_CU_SEQLENS_Q, num_requests, num_slots, stride_list_t, stride_list_h,
        stride_list_n,
    )  # fmt: skip
    if block < block_end:
        i_request, n_block_base = find_request_and_base_of_block(SEQ_LENS, CU_SEQLENS_Q, B, block, cfg)
        kv_scale_value = load_device_scale_else_host_scale(kv_scale, KV_SCALE, 0, cfg.HAS_V_SCALE)
        score_scale = (
            load_device_scale_else_host_scale(softmax_scale, SOFTMAX_SCALE, 0, cfg.HAS_SOFTMAX_SCALE)
            * LOG2E
            * kv_scale_value
        )
        value_scale = kv_scale_value * load_device_scale_else_host_scale(out_scale, OUT_SCALE, 0, cfg.HAS_OUT_SCALE)
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
            q_nope, q_pe, q_scale = load_transposed_16bit_q_tiles_and_q_scale(
                Q_NOPE, Q_PE, tokens, heads, m_row, stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h, cfg
            )
            # Main loop
            row_max, row_sum, acc_o = mainloop(
                CKV, KPE, CKV_MAP, KPE_MAP, SCALES,
                page_table_row_ptr_or_key_list(PAGE_TABLE, stride_table_b, i_request, h, lists, cfg), q_nope, q_pe,
                score_scale * q_scale,
                n_block_begin, n_block_end, request.num_keys, request.seqlen_q, m_block * cfg.BLOCK_M, stride_ckv_p,
                stride_ckv_s, stride_kpe_p, stride_kpe_s, stride_scales_p, stride_scales_s, cfg,
            )  # fmt: skip
            # Epilogue: a whole work tile goes to OUT, a split to the workspace, for the combine
            if n_block_end - n_block_begin == request.num_n_blocks:
                acc_scale, lse = compute_acc_scale_and_lse(
                    row_max, row_sum, value_scale, SINKS, heads, m_row, cfg, cfg.LSE_OF_KEYS
                )
                store_output(OUT, acc_o, acc_scale, tokens, heads, m_row, stride_out_t, stride_out_h, cfg)
                if cfg.HAS_LSE:
                    tl.store(LSE + tokens * stride_lse_t + heads * stride_lse_h, lse, mask=m_row)
                if MAX_LOGITS is not None:
                    tl.store(MAX_LOGITS + tokens * stride_lse_t + heads * stride_lse_h, row_max * LN2, mask=m_row)
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
