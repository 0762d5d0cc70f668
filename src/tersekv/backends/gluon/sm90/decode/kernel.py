"""Split pass of paged decode on Hopper. `arrive_and_combine_in_levels_if_last` combines the splits, or
`combine_kernel` in a second launch.

A CTA has HEADS_PER_CTA × WARPS_PER_HEAD warps for HEADS_PER_CTA KV heads and processes one CTA range of n_blocks
(`parts/tile_scheduler`), each in NUM_MMA_TILES tiles of MMA_KEYS keys. Tensor copies fill a ring of stages
(`producer`), all heads of an n_block at once, stored scales included; a small query is prefetched with the first
n_block of its work tile. In the main loop warps synchronize only before a stage is refilled: the MMAs are mma.sync,
whose operands each warp holds itself (`layouts`). With LARGE_M a CTA has one head, whose rows share the dequantized
tiles (`shared_tiles`).

With KEY_PARTS a CTA has one head, and parts of its keys take the place of heads: MMA tile j of an n_block is 16 keys of
each part, those of part p from key 16 (KEY_PARTS j + p) of the n_block on. Each part has a softmax of its own; they are
combined in shared memory at the end of a work tile (`key_parts`).

With LIST.PER_HEAD page table and lengths are [HEADS, B]: each KV head has a list of a row's pages
(`triton/parts/listed_pages`), and CTA ranges by its own lengths.

Mask: `compute_masked_log2_scores_of_mma_tile`. Free stage: the barrier before `start_kv_block_copies_at_position`.
Rescale: `mainloop_step` or `mainloop_step_lazy_rescale`. Combine: `combine`. With LARGE_M: see `shared_tiles`.

SPLIT_WORKSPACE: two slots per CTA range and head, for the split work tile it begins with (even) and the one it ends
with (odd). SPLIT_METADATA: the number of splits of each work tile and its first CTA range.

NOTE: Triton's cache keys include the source of functions, not of records: clear it after reordering fields.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from ...versions import thread_barrier
from ..parts.combine import num_splits_of_tile, split_metadata_ptr
from ..parts.dequant import (
    INT4_ODD_SCALE,
    convert_8_or_16bit_v_to_16bit_operands,
    convert_k_codes_to_16bit_operands,
    dequant_e2m1_to_4_operands,
    int4_v_minus_zero_points_to_fp16_subnormals,
    int4_zero_points,
    load_device_or_host_scale,
    load_device_or_host_scale_per_head,
    log2_and_reciprocal,
    mma_dtype,
)
from ..parts.epilogue import cast_output_saturating_fp8, compute_acc_scale_and_lse, store_empty_output_of_padding_rows
from ..parts.hadamard import (
    allocate_smem_k_and_v_column_scales,
    load_k_and_v_column_scales,
    store_smem_k_and_v_column_scales,
    unrotate_and_scale_acc,
)
from ..parts.mask import MaskArgs, is_visible, keys_visible_to_any_row, load_first_cut_key, unmasked_n_block_range
from ..parts.online_softmax import (
    LAZY_ROW_MAX_4,
    LAZY_ROW_MAX_4_CONSTRAINTS,
    LAZY_ROW_MAX_8,
    LAZY_ROW_MAX_8_CONSTRAINTS,
    LOG2E,
    RESCALE_16,
    RESCALE_16_CONSTRAINTS,
    RESCALE_32,
    RESCALE_32_CONSTRAINTS,
    RESCALE_64,
    RESCALE_64_CONSTRAINTS,
    SoftmaxState,
    apply_softcap_to_log2_scores,
)
from ..parts.pipeline import allocate_full_barriers, pdl_launch_dependents, pdl_wait
from ..parts.tile_scheduler import (
    advance_to_request_of_block,
    assign_equal_cta_range,
    assign_unsplit_request,
    load_request_lengths_and_block_counts,
    make_work_tile_at_block,
)
from . import key_parts
from . import shared_tiles as large_m
from .combine import TileSplits, arrive_and_combine_in_levels_if_last, load_first_level_counter_for_init_check
from .layouts import (
    dequantized_k_to_mma_operand,
    k_load_layout,
    kv_heads_of_cta,
    load_and_expand_k_block_scales_to_fp16,
    load_and_expand_v_block_scales_to_fp16,
    load_query_fragment,
    load_token_scales,
    mma_layout,
    packed_column_offset_in_padded_tile,
    query_heads_of_rows,
)
from .producer import (
    PageLookup,
    TensorMaps,
    advance_prefetch_position,
    allocate_smem_kv,
    allocate_smem_prefetched_q_ring,
    init_prefetch_position,
    load_query_operands_and_q_scales,
    num_scale_copies,
    prefetch_query_at_tile_begin_and_count,
    smem_codes_of_mma_tile,
    smem_scales_of_mma_tile,
    start_kv_block_copies_at_position,
    wait_kv_block_copies,
    wait_prefetched_query_operands_and_q_scales,
    wait_remaining_cp_async_copies,
)
from .shared_tiles import store_partial_acc_max_and_sum_of_head, store_unsplit_output_and_lse_of_head

# ---- arguments ----


class AttentionTensors(NamedTuple):
    """Tensors that the kernels load and store. SPLIT_METADATA: each work tile's number of splits and first CTA
    range."""

    Q: gl.tensor
    SEQ_LENS: gl.tensor
    CU_SEQLENS_Q: gl.tensor
    MASK: gl.tensor
    SINKS: gl.tensor
    OUT: gl.tensor
    LSE: gl.tensor
    SPLIT_WORKSPACE: gl.tensor
    SPLIT_METADATA: gl.tensor


class CallScales(NamedTuple):
    """Scalars of a call; K_SCALE and V_SCALE are device tensors that may replace k_scale and v_scale."""

    score_scale: gl.tensor  # softmax_scale × log2(e)
    k_scale: gl.tensor
    K_SCALE: gl.tensor
    v_scale: gl.tensor
    V_SCALE: gl.tensor
    out_scale: gl.tensor
    softcap: gl.tensor


class Strides(NamedTuple):
    """Strides of Q, MASK, OUT and LSE."""

    q_t: gl.tensor
    q_h: gl.tensor
    mask_t: gl.tensor
    out_t: gl.tensor
    out_h: gl.tensor
    lse_t: gl.tensor
    lse_h: gl.tensor


# ---- mainloop: QK, scales, softcap and mask ----


@gluon.jit
def first_key_and_ring_index_of_mma_tile(
    stage, n_block, I_MMA_TILE: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Returns (first key, index in the ring of its buffer) of an n_block's MMA tile."""
    TILE_KEYS: gl.constexpr = tile_cfg.MMA_KEYS * tile_cfg.KEY_PARTS
    TILES_PER_BUFFER: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // TILE_KEYS
    return (
        n_block * cfg.BLOCK_N + TILE_KEYS * I_MMA_TILE,
        stage * TILES_PER_BUFFER + I_MMA_TILE % TILES_PER_BUFFER,
    )


@gluon.jit
def keys_of_mma_tile(first_key, LAYOUT: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the keys of an MMA tile, in LAYOUT: [KEY_PARTS, MMA_KEYS]."""
    o_n = (first_key + gl.arange(0, tile_cfg.MMA_KEYS, gl.SliceLayout(0, LAYOUT)))[None, :]
    if tile_cfg.KEY_PARTS > 1:
        o_n += tile_cfg.MMA_KEYS * gl.arange(0, tile_cfg.KEY_PARTS, gl.SliceLayout(1, LAYOUT))[:, None]
    return o_n


@gluon.jit
def compute_masked_log2_scores_of_mma_tile(
    smem_k, smem_k_scales, i_tile_in_ring, q, score_scales, softcap, first_key, mask_args, MASKED: gl.constexpr,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns the scores of an MMA tile in units of log2: [HEADS_PER_CTA, MMA_KEYS, BLOCK_M]."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    packed = smem_codes_of_mma_tile(smem_k, i_tile_in_ring, cfg.PACKED_K, tile_cfg).load(
        k_load_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, tile_cfg.MMA_KEYS, cfg.PACKED_K)
    )
    # Dequantize K.
    if tile_cfg.K.SCALE_KIND == "block":
        k = dequant_e2m1_to_4_operands(
            packed,
            load_and_expand_k_block_scales_to_fp16(
                smem_scales_of_mma_tile(smem_k_scales, i_tile_in_ring, False, tile_cfg), cfg, tile_cfg
            ),
            False,
        )
    else:
        K: gl.constexpr = tile_cfg.K
        if K.MAY_HOLD_NEIGHBOR_NAN:
            # Zero the columns of a copied row that are a neighbouring head's: 0 × NaN is NaN.
            LAYOUT: gl.constexpr = packed.type.layout
            o_h = (
                gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
                % K.PADDED_HEADS
            )
            o_k = gl.arange(0, packed.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
            i_shift = o_k // K.HEAD_SHIFT
            own = gl.where((i_shift >= o_h) & (i_shift < o_h + K.ROW_PACKED // K.HEAD_SHIFT), -1, 0).to(gl.int16)
            packed = packed & own
        k = convert_k_codes_to_16bit_operands(packed, K)
    # QK.
    s = gl.full([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.BLOCK_M], 0, gl.float32, MMA)
    for i in gl.static_range(gl.constexpr(tile_cfg.K.PACK)):
        if cfg.BLOCK_M // tile_cfg.WARPS_PER_HEAD > 16:
            s = mma_v2(
                dequantized_k_to_mma_operand(k[i], cfg, tile_cfg), load_query_fragment(q.operands, i, cfg, tile_cfg), s
            )
        else:
            s = mma_v2(dequantized_k_to_mma_operand(k[i], cfg, tile_cfg), q.operands[i], s)
    if tile_cfg.K.SCALE_KIND == "token_head":
        token_scales = load_token_scales(
            smem_scales_of_mma_tile(smem_k_scales, i_tile_in_ring, False, tile_cfg), gl.SliceLayout(2, MMA), tile_cfg
        )
        if tile_cfg.K.CODE == "int4":
            # 2^23 + the zero point, as fp32 bits, minus 2^23.
            zero_points = (int4_zero_points(token_scales) | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0
            s = s - zero_points[:, :, None] * q.row_sums[:, None, :]
        s = s * score_scales[:, None, :] * token_scales[:, :, None]
    else:
        s = s * score_scales[:, None, :]
    # Sum over the column parts of each head, for every part.
    if tile_cfg.HEAD_DIM_PARTS > 1:
        PARTS: gl.constexpr = tile_cfg.HEAD_DIM_PARTS
        x = s.reshape([s.shape[0] // PARTS, PARTS, s.shape[1], s.shape[2]])
        total, _ = gl.broadcast(gl.sum(x, 1)[:, None, :, :], x)
        s = gl.convert_layout(total.reshape(s.shape), s.type.layout, assert_trivial=True)
    if cfg.HAS_SOFTCAP:
        s = apply_softcap_to_log2_scores(s, softcap)
    # Mask.
    if MASKED:
        ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, MMA))
        o_n = keys_of_mma_tile(first_key, gl.SliceLayout(2, MMA), tile_cfg)
        o_q = (mask_args.row_begin + gl.arange(0, cfg.BLOCK_M, ROW)) // cfg.GROUP  # query token of a row
        s = gl.where(is_visible(o_n[:, :, None], o_q[None, None, :], mask_args, cfg), s, float("-inf"))
    return s


@gluon.jit
def v_scaled_scores_max_over_tiles_and_inv_v_scales(
    smem_kv, full_stage, q, score_scales, softcap, n_block, mask_args, MASKED: gl.constexpr, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns (scores of each MMA tile, plus log2 of stored V scales of tokens; their maximum over tiles, element by
    element; reciprocals of each tile's V scales)."""
    TILES_PER_BUFFER: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // (tile_cfg.MMA_KEYS * tile_cfg.KEY_PARTS)
    KEYS: gl.constexpr = gl.SliceLayout(2, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD))
    s, inv_v_scales = (), ()
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_MMA_TILES)):
        first_key, i_tile_in_ring = first_key_and_ring_index_of_mma_tile(full_stage, n_block, j, cfg, tile_cfg)
        smem_k, smem_k_scales = smem_kv.k[j // TILES_PER_BUFFER], smem_kv.k_scales[j // TILES_PER_BUFFER]
        tile_scores = compute_masked_log2_scores_of_mma_tile(
            smem_k, smem_k_scales, i_tile_in_ring, q, score_scales, softcap, first_key, mask_args, MASKED, cfg, tile_cfg
        )
        if tile_cfg.V.SCALE_KIND == "token_head":
            # The V scale is added to the exponent, so that the P multiplied with V codes lies in (0, 1].
            smem_scales = smem_scales_of_mma_tile(
                smem_kv.v_scales[j // TILES_PER_BUFFER], i_tile_in_ring, True, tile_cfg
            )
            v_scales = gl.maximum(load_token_scales(smem_scales, KEYS, tile_cfg), 1e-30)
            if MASKED:
                o_n = keys_of_mma_tile(first_key, KEYS, tile_cfg)
                valid = keys_visible_to_any_row(o_n, mask_args, cfg)
                v_scales = gl.where(valid, v_scales, 1.0)
            log2_v_scales, inv_v_scale = log2_and_reciprocal(v_scales)
            tile_scores = tile_scores + log2_v_scales[:, :, None]
            inv_v_scales = inv_v_scales + (inv_v_scale,)
        s = s + (tile_scores,)
        if j == 0:
            max_over_tiles = tile_scores
        else:
            max_over_tiles = gl.maximum(max_over_tiles, tile_scores)
    return s, max_over_tiles, inv_v_scales


# ---- mainloop: PV ----


_MOVMATRIX_PTX = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@gluon.jit
def accumulate_pv_of_mma_tile(
    acc_o, smem_v, smem_block_scales_or_zero_points, i_tile_in_ring, p, first_key, mask_args, MASKED: gl.constexpr,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns acc_o + V^T P of an MMA tile; p: [HEADS_PER_CTA, MMA_KEYS, BLOCK_M]."""
    A: gl.constexpr = gl.DotOperandLayout(0, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD), 2)
    # P to the right operand: movmatrix transposes 8 × 8 blocks, so that index [key, row] holds the value of [row, key].
    p = p.to(mma_dtype(cfg))
    p = gl.inline_asm_elementwise(_MOVMATRIX_PTX, "=r,r", [p], p.dtype, False, 2)
    p = (
        p.reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS // 8, 8, cfg.BLOCK_M // 8, 8])
        .permute([0, 1, 4, 3, 2])
        .reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.BLOCK_M])
    )
    B: gl.constexpr = gl.DotOperandLayout(1, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD), 2)
    p_operand = gl.convert_layout(p, B, assert_trivial=True)
    # Dequantize V.
    packed = smem_codes_of_mma_tile(smem_v, i_tile_in_ring, cfg.PACKED_V, tile_cfg).permute([0, 2, 1]).load(A)
    if MASKED:  # an invalid slot may hold NaN, and 0 × NaN is NaN
        o_n = keys_of_mma_tile(first_key, gl.SliceLayout(1, A), tile_cfg)
        valid = keys_visible_to_any_row(o_n, mask_args, cfg)[:, None, :]
        packed = gl.where(valid, packed, 0)
    if tile_cfg.V.CODE == "int4":
        token_scales = load_token_scales(
            smem_scales_of_mma_tile(smem_block_scales_or_zero_points, i_tile_in_ring, True, tile_cfg),
            gl.SliceLayout(1, A), tile_cfg,
        )  # fmt: skip
        v = int4_v_minus_zero_points_to_fp16_subnormals(packed, int4_zero_points(token_scales).to(gl.int16)[:, None, :])
    elif tile_cfg.V.SCALE_KIND == "block":
        smem_scales = smem_scales_of_mma_tile(smem_block_scales_or_zero_points, i_tile_in_ring, True, tile_cfg)
        block_scales = load_and_expand_v_block_scales_to_fp16(smem_scales.permute([0, 2, 1]), cfg, tile_cfg)
        if MASKED:
            block_scales = gl.where(valid, block_scales, 0.0)
        v = dequant_e2m1_to_4_operands(packed, block_scales, False)
    else:
        V: gl.constexpr = tile_cfg.V
        v = convert_8_or_16bit_v_to_16bit_operands(packed, V)
    # PV.
    acc_new = ()
    for i in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
        acc_new = acc_new + (mma_v2(v[i], p_operand, acc_o[i]),)
    return acc_new


# ---- mainloop: online softmax, up to 16 query rows ----


@gluon.jit
def mainloop_step(
    state, smem_kv, full_stage, q, score_scales, softcap, n_block, mask_args, MASKED: gl.constexpr, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns the SoftmaxState after one n_block: (row_max, row_sum for each key of a lane, PACK accumulators)."""
    TILES_PER_BUFFER: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // (tile_cfg.MMA_KEYS * tile_cfg.KEY_PARTS)
    # QK and mask.
    s, max_over_tiles, inv_v_scales = v_scaled_scores_max_over_tiles_and_inv_v_scales(
        smem_kv, full_stage, q, score_scales, softcap, n_block, mask_args, MASKED, cfg, tile_cfg
    )
    # Online softmax: new row_max, rescale.
    row_max_new = gl.maximum(state.row_max, gl.max(max_over_tiles, 1))
    safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    rescale = gl.exp2(state.row_max - safe_max)
    row_sum = state.row_sum * rescale[:, None, :]
    acc_o = ()
    for i in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
        acc_o = acc_o + (state.acc_o[i] * rescale[:, None, :],)
    # P and PV, one MMA tile at a time.
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_MMA_TILES)):
        p = gl.exp2(s[j] - safe_max[:, None, :])
        if tile_cfg.V.SCALE_KIND == "token_head":
            row_sum = row_sum + p * inv_v_scales[j][:, :, None]
        else:
            row_sum = row_sum + p
        first_key, i_tile_in_ring = first_key_and_ring_index_of_mma_tile(full_stage, n_block, j, cfg, tile_cfg)
        smem_v, smem_v_scales = smem_kv.v[j // TILES_PER_BUFFER], smem_kv.v_scales[j // TILES_PER_BUFFER]
        acc_o = accumulate_pv_of_mma_tile(
            acc_o, smem_v, smem_v_scales, i_tile_in_ring, p, first_key, mask_args, MASKED, cfg, tile_cfg
        )
    return SoftmaxState(row_max_new, row_sum, acc_o)


# ---- mainloop: online softmax with lazy rescaling, 17 to 32 query rows ----
# A row's row_max is raised only where P would overflow fp16, which is rare; else nothing is rescaled. row_max and
# row_sum are kept for each lane that holds keys of a row, [HEADS_PER_CTA, 8, BLOCK_M]; lanes exchange a maximum only
# where one is raised, so a row's lanes agree on row_max, and keep a row_sum each. For 4-bit
# codes, the costliest to unpack, a warp has all 32 rows (`kernel_producer_warp`): then the accumulator takes half of
# its registers, the query stays in shared memory, and an n_block has 16 keys.


@gluon.jit
def view_by_lane(x):
    """Returns [HEADS_PER_CTA, N, BLOCK_M] as [HEADS_PER_CTA, N / 8, 8, BLOCK_M]: the elements of a row by lane."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8, x.shape[2]])


@gluon.jit
def broadcast_by_lane(x, like):
    """Returns one number per row and lane, broadcast to `view_by_lane` of the row."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None, :, :]


@gluon.jit
def rescale_acc_if_flagged(acc_o, rescale, flag, tile_cfg: gl.constexpr):
    """Returns an accumulator [HEADS_PER_CTA, 16 or 32, BLOCK_M] times each row's rescale; flag: one was raised."""
    x = view_by_lane(acc_o)
    scales, x = gl.broadcast(broadcast_by_lane(rescale, x), x)
    flags, x = gl.broadcast(broadcast_by_lane(flag, x), x)
    NUM_ELEMENTS: gl.constexpr = acc_o.shape[1] * acc_o.shape[2] // (32 * tile_cfg.WARPS_PER_HEAD)
    # Skipped where the first flag of a thread's elements is 0.
    PTX: gl.constexpr = RESCALE_16 if NUM_ELEMENTS == 16 else RESCALE_32 if NUM_ELEMENTS == 32 else RESCALE_64
    CONSTRAINTS: gl.constexpr = (
        RESCALE_16_CONSTRAINTS
        if NUM_ELEMENTS == 16
        else RESCALE_32_CONSTRAINTS
        if NUM_ELEMENTS == 32
        else RESCALE_64_CONSTRAINTS
    )
    x = gl.inline_asm_elementwise(PTX, CONSTRAINTS, [x, scales, flags], gl.float32, is_pure=True, pack=NUM_ELEMENTS)
    return gl.convert_layout(gl.reshape(x, acc_o.shape), acc_o.type.layout, assert_trivial=True)


@gluon.jit
def mainloop_step_lazy_rescale(
    state, smem_kv, full_stage, q, score_scales, softcap, n_block, mask_args, MASKED: gl.constexpr, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns the SoftmaxState after one n_block: (row_max, row_sum, both by lane, PACK accumulators).

    Differs from `mainloop_step` after the scores: that one reduces row_max over lanes in every n_block, this one where
    it is raised.
    """
    TILES_PER_BUFFER: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // (tile_cfg.MMA_KEYS * tile_cfg.KEY_PARTS)
    # QK and mask.
    s, max_over_tiles, inv_v_scales = v_scaled_scores_max_over_tiles_and_inv_v_scales(
        smem_kv, full_stage, q, score_scales, softcap, n_block, mask_args, MASKED, cfg, tile_cfg
    )
    # Online softmax: lazy row_max, rescale where it was raised; flag: any row_max of the warp is new.
    FOUR: gl.constexpr = cfg.BLOCK_M // tile_cfg.WARPS_PER_HEAD // 4 == 4  # rows of a thread, else eight
    row_max, rescale, flag = gl.inline_asm_elementwise(
        LAZY_ROW_MAX_4 if FOUR else LAZY_ROW_MAX_8, LAZY_ROW_MAX_4_CONSTRAINTS if FOUR else LAZY_ROW_MAX_8_CONSTRAINTS,
        [gl.max(view_by_lane(max_over_tiles), 1), state.row_max], (gl.float32, gl.float32, gl.int32), False,
        4 if FOUR else 8,
    )  # fmt: skip
    safe_max, row_sum = gl.where(row_max == float("-inf"), 0.0, row_max), state.row_sum * rescale
    acc_o = ()
    for i in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
        acc_o = acc_o + (rescale_acc_if_flagged(state.acc_o[i], rescale, flag, tile_cfg),)
    # P and PV, one MMA tile at a time.
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_MMA_TILES)):
        x = view_by_lane(s[j])
        x = gl.exp2(x - broadcast_by_lane(safe_max, x))
        p = gl.convert_layout(gl.reshape(x, s[j].shape), s[j].type.layout, assert_trivial=True)
        if tile_cfg.V.SCALE_KIND == "token_head":
            row_sum = row_sum + gl.sum(view_by_lane(p * inv_v_scales[j][:, :, None]), 1)
        else:
            row_sum = row_sum + gl.sum(x, 1)
        first_key, i_tile_in_ring = first_key_and_ring_index_of_mma_tile(full_stage, n_block, j, cfg, tile_cfg)
        smem_v, smem_v_scales = smem_kv.v[j // TILES_PER_BUFFER], smem_kv.v_scales[j // TILES_PER_BUFFER]
        acc_o = accumulate_pv_of_mma_tile(
            acc_o, smem_v, smem_v_scales, i_tile_in_ring, p, first_key, mask_args, MASKED, cfg, tile_cfg
        )
    return SoftmaxState(row_max, row_sum, acc_o)


@gluon.jit
def init_unreduced_softmax_state(cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the SoftmaxState before the first n_block, as this kernel's mainloop step keeps it."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    row_sum = gl.full([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.BLOCK_M], 0, gl.float32, MMA)
    if cfg.BLOCK_M > 16:  # row_max and row_sum by lane
        row_sum = gl.max(view_by_lane(row_sum), 1)
        row_max = row_sum + float("-inf")
    else:  # row_sum for each key of a lane
        row_max = gl.full([tile_cfg.HEADS_PER_CTA, cfg.BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    acc_o = ()
    for _ in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
        acc_o = acc_o + (gl.full([tile_cfg.HEADS_PER_CTA, cfg.PACKED_V, cfg.BLOCK_M], 0, gl.float32, MMA),)
    return SoftmaxState(row_max, row_sum, acc_o)


@gluon.jit
def equalize_int4_acc_scales(state, tile_cfg: gl.constexpr):
    """Returns the SoftmaxState with all columns at one scale: the accumulators of even int4 codes lack
    INT4_ODD_SCALE."""
    acc_o = state.acc_o
    if tile_cfg.V.CODE == "int4":
        acc_o = (acc_o[0] * INT4_ODD_SCALE, acc_o[1], acc_o[2] * INT4_ODD_SCALE, acc_o[3])
    return SoftmaxState(state.row_max, state.row_sum, acc_o)


@gluon.jit
def sum_over_lanes_of_equal_row_max(state, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns a step's SoftmaxState with row_sum summed over lanes, which have equal row_max."""
    if cfg.BLOCK_M > 16:
        L: gl.constexpr = gl.SliceLayout(1, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD))
        row_max, row_sum = (
            gl.convert_layout(gl.max(state.row_max, 1), L),
            gl.convert_layout(gl.sum(state.row_sum, 1), L),
        )
        return SoftmaxState(row_max, row_sum, state.acc_o)
    else:
        return SoftmaxState(state.row_max, gl.sum(state.row_sum, 1), state.acc_o)


# ---- scales ----


@gluon.jit
def scale_heads_of_cta(first_head, tile_cfg: gl.constexpr):
    """Returns the KV heads of the CTA whose scales of K and V are loaded: [HEADS_PER_CTA], or a scalar if there is only
    one."""
    if tile_cfg.LARGE_M or tile_cfg.KEY_PARTS > 1:
        return first_head
    else:
        MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
        heads = kv_heads_of_cta(first_head, gl.SliceLayout(1, gl.SliceLayout(1, MMA)), tile_cfg)
        return heads // tile_cfg.HEAD_DIM_PARTS


@gluon.jit
def scale_rows_of_heads(head_scales, row_scales, tile_cfg: gl.constexpr):
    """Returns row_scales [HEADS_PER_CTA, BLOCK_M] times head_scales, of `scale_heads_of_cta`."""
    if tile_cfg.KEY_PARTS > 1:
        return head_scales * row_scales
    else:
        return head_scales[:, None] * row_scales


# ---- epilogue ----


@gluon.jit
def packed_columns_within_head_of_acc(first_head, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the packed columns of a head, or of its part, that the accumulators hold: [HEADS_PER_CTA or 1, PACKED_V,
    1]."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    PACKED_LAYOUT: gl.constexpr = gl.SliceLayout(2, MMA)
    o_d = gl.arange(0, cfg.PACKED_V, gl.SliceLayout(0, PACKED_LAYOUT))[None, :, None]
    if tile_cfg.V.PADDED_HEADS > 1:
        o_d = (
            o_d
            - packed_column_offset_in_padded_tile(
                kv_heads_of_cta(first_head, gl.SliceLayout(1, gl.SliceLayout(2, MMA)), tile_cfg), True, tile_cfg
            )[:, None, None]
        )
    return o_d


@gluon.jit
def store_unsplit_output_and_lse(
    tensors, strides, state, v_scale_times_out_scale, first_head, work_tile, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Stores rows of unsplit work tiles to `out`, and their LSE."""
    OUT, LSE = tensors.OUT, tensors.LSE
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    HN: gl.constexpr = gl.SliceLayout(1, MMA)
    o_r = work_tile.m_block * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, HN))
    kv_heads = kv_heads_of_cta(first_head, gl.SliceLayout(1, HN), tile_cfg)
    q_heads = query_heads_of_rows(kv_heads[:, None], o_r[None, :], cfg, tile_cfg)
    tokens = (work_tile.q_begin + o_r // cfg.GROUP).to(gl.int64)[None, :]
    m_row = (o_r < work_tile.seqlen_q * cfg.GROUP)[None, :] & (kv_heads >= 0)[:, None]
    v_scale = v_scale_times_out_scale[:, None] * cfg.V_RESIDUAL_SCALE
    acc_scale, lse = compute_acc_scale_and_lse(
        state.row_max, state.row_sum, v_scale, tensors.SINKS, q_heads, m_row, cfg
    )
    o_d = packed_columns_within_head_of_acc(first_head, cfg, tile_cfg)
    p_row = OUT + tokens * strides.out_t + q_heads * strides.out_h
    if tile_cfg.HEAD_DIM_PARTS > 1:
        p_row += (kv_heads % tile_cfg.HEAD_DIM_PARTS * cfg.DV)[:, None]
    p_out = p_row[:, None, :] + cfg.PACK * o_d
    # Mask of existing rows and columns: a row of `out` may be shorter than one in shared memory.
    m_out = m_row[:, None, :]
    if cfg.DV < cfg.PACK * cfg.PACKED_V:
        m_out = m_out & (o_d < cfg.DV // cfg.PACK)
    if tile_cfg.V.PADDED_HEADS > 1:
        m_out = m_out & (o_d >= 0)
    for j in gl.static_range(gl.constexpr(cfg.PACK)):
        gl.store(
            p_out + j,
            cast_output_saturating_fp8(state.acc_o[j] * acc_scale[:, None, :], OUT, cfg),
            mask=m_out,
        )
    if cfg.HAS_LSE:
        gl.store(LSE + tokens * strides.lse_t + q_heads * strides.lse_h, lse, mask=m_row)


@gluon.jit
def store_partial_acc_max_and_sum(
    SPLIT_WORKSPACE, first_partial_slot, state, first_head, num_q_rows_left, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Stores the partial results of split work tiles: slot + 2 h, [BLOCK_M, PARTIAL_COLUMNS] fp32, whose last two
    columns are row_max and row_sum."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    HN: gl.constexpr = gl.SliceLayout(1, MMA)
    o_r = gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, HN))
    partial_slots = first_partial_slot + 2 * gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, HN)).to(gl.int64)
    p_row = SPLIT_WORKSPACE + (partial_slots[:, None] * cfg.BLOCK_M + o_r[None, :]) * cfg.PARTIAL_COLUMNS
    m_row = (o_r < num_q_rows_left)[None, :] & (partial_slots >= 0)[:, None]
    o_d = packed_columns_within_head_of_acc(first_head, cfg, tile_cfg)
    if tile_cfg.V.PADDED_HEADS > 1:
        o_d = o_d & (cfg.BLOCK_DV - 1)  # columns of neighbouring heads go behind the head's own
    for j in gl.static_range(gl.constexpr(cfg.PACK)):
        gl.store(p_row[:, None, :] + j * cfg.BLOCK_DV + o_d, state.acc_o[j], mask=m_row[:, None, :])
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, state.row_max, mask=m_row)
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, state.row_sum, mask=m_row)


@gluon.jit
def work_tile_metadata_ptr(SPLIT_METADATA, work_tile, head_group, tile_cfg: gl.constexpr):
    """Returns the pointer to a work tile's entry in SPLIT_METADATA."""
    return (
        SPLIT_METADATA
        + ((work_tile.i_request * tile_cfg.MAX_M_BLOCKS + work_tile.m_block) * tile_cfg.HEAD_GROUPS + head_group) * 2
    )


@gluon.jit
def store_split_metadata(p_metadata, num_splits, tile_first_range):
    """Stores, for the combine, a work tile's number of splits and the CTA range in which it begins."""
    gl.store(p_metadata, num_splits)
    gl.store(p_metadata + 1, tile_first_range)


# ---- kernel ----


@gluon.jit
def page_table_and_lengths(PAGE_TABLE, SEQ_LENS, first_request, stride_table_b, cfg: gl.constexpr):
    """Returns the page table and the lengths of the CTA's heads. Where each head has a list, they begin with
    first_request."""
    if cfg.LIST.PER_HEAD:
        SEQ_LENS += first_request
        PAGE_TABLE += first_request.to(gl.int64) * stride_table_b
    return PAGE_TABLE, SEQ_LENS


@gluon.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_small_m_or_shared_tiles_kernel(
    Q, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, K_SIGNS,
    V_SIGNS, K_CHANNEL_SCALES, V_CHANNEL_SCALES,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, stride_q_t, stride_q_h, stride_table_b, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes one CTA range for HEADS_PER_CTA heads. See the module's docstring."""
    i_cta = gl.program_id(0)
    i_range, num_ranges = i_cta // tile_cfg.HEAD_GROUPS, gl.num_programs(0) // tile_cfg.HEAD_GROUPS
    first_head = i_cta % tile_cfg.HEAD_GROUPS * tile_cfg.KV_HEADS_PER_CTA
    PAGE_TABLE, SEQ_LENS = page_table_and_lengths(PAGE_TABLE, SEQ_LENS, first_head * B, stride_table_b, cfg)
    tensors = AttentionTensors(
        Q, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE,
        split_metadata_ptr(SPLIT_WORKSPACE, num_ranges * cfg.HEADS, cfg),
    )  # fmt: skip
    strides = Strides(stride_q_t, stride_q_h, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)
    tensor_maps = TensorMaps(K, V, K_SCALES, V_SCALES)
    page_lookup = PageLookup(PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, stride_table_b)
    # Shared memory.
    NUM_BARRIER_GROUPS: gl.constexpr = 2 + num_scale_copies(tile_cfg)
    full_barriers = allocate_full_barriers(NUM_BARRIER_GROUPS, tile_cfg.STAGES)
    smem_kv = allocate_smem_kv(tile_cfg)
    smem_column_scales = allocate_smem_k_and_v_column_scales(smem_kv.k[0], cfg, tile_cfg)
    if tile_cfg.NUM_QUERY_STAGES > 0:
        smem_prefetched_q = allocate_smem_prefetched_q_ring(Q, cfg, tile_cfg)
    if tile_cfg.LARGE_M:
        smem_operands = large_m.allocate_smem_fp16_qkv_and_scales(cfg, tile_cfg)
    # Wait for the previous kernel; then padding, and this CTA's range.
    pdl_wait()
    if tile_cfg.FUSED_COMBINE_ROWS > 0:
        pdl_launch_dependents()
    if cfg.VARLEN_Q:
        store_empty_output_of_padding_rows(
            OUT, LSE, gl.load(CU_SEQLENS_Q + B).to(gl.int32), T, i_cta, gl.num_programs(0), stride_out_t, stride_out_h,
            stride_lse_t, stride_lse_h, cfg, tile_cfg.HEAD_DIM_PARTS,
        )  # fmt: skip
    column_scales = load_k_and_v_column_scales(
        (K_SIGNS, V_SIGNS), (K_CHANNEL_SCALES, V_CHANNEL_SCALES), first_head, cfg, tile_cfg
    )
    if tile_cfg.UNSPLIT:
        cta_range = assign_unsplit_request(SEQ_LENS, CU_SEQLENS_Q, i_range, i_cta % tile_cfg.HEAD_GROUPS, cfg)
    else:
        cta_range = assign_equal_cta_range(
            SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, i_cta % tile_cfg.HEAD_GROUPS, cfg
        )
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    store_smem_k_and_v_column_scales(smem_column_scales, column_scales)
    if tile_cfg.K.ROTATION.ENABLED or tile_cfg.V.ROTATION.ENABLED:
        thread_barrier()
    if block < block_end:
        # Prologue: fill the ring.
        prefetch_pos = init_prefetch_position(page_lookup, cta_range, cfg, tile_cfg)
        num_prefetched_q, num_used_q, iter = 0, 0, 0
        for i_prefetch in gl.static_range(gl.constexpr(tile_cfg.STAGES if tile_cfg.LARGE_M else tile_cfg.STAGES - 1)):
            if tile_cfg.NUM_QUERY_STAGES > 0:
                num_prefetched_q = prefetch_query_at_tile_begin_and_count(
                    tensors, strides, smem_prefetched_q, num_prefetched_q, prefetch_pos, block_end, first_head,
                    i_prefetch == 0, cfg, tile_cfg,
                )  # fmt: skip
            start_kv_block_copies_at_position(
                prefetch_pos, i_prefetch, full_barriers, tensor_maps, smem_kv, first_head, block_end, cfg, tile_cfg
            )
            prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
        # Scales of scores (the softmax scale, times K's of a tensor or head) and of outputs (V's).
        heads = scale_heads_of_cta(first_head, tile_cfg)
        score_scale = load_device_or_host_scale(softmax_scale, SOFTMAX_SCALE, cfg.HAS_SOFTMAX_SCALE) * LOG2E
        scales = CallScales(score_scale, k_scale, K_SCALE, v_scale, V_SCALE,
                            load_device_or_host_scale(out_scale, OUT_SCALE, cfg.HAS_OUT_SCALE), softcap)  # fmt: skip
        head_score_scales = scales.score_scale * load_device_or_host_scale_per_head(
            k_scale, K_SCALE, heads, cfg.HAS_K_SCALE, cfg.K_SCALE_STRIDE
        )
        v_out_scale = (
            load_device_or_host_scale_per_head(v_scale, V_SCALE, heads, cfg.HAS_V_SCALE, cfg.V_SCALE_STRIDE)
            * scales.out_scale
        )
        request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, True, cfg)
        while block < block_end:
            # Next work tile.
            i_request, n_block_base, request = advance_to_request_of_block(
                SEQ_LENS, CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
            )
            work_tile = make_work_tile_at_block(block, block_end, i_request, n_block_base, request)
            row_begin = work_tile.m_block * cfg.BLOCK_M
            first_cut_key = load_first_cut_key(SEQ_LENS, i_request, work_tile.num_keys, cfg)
            mask_args = MaskArgs(
                work_tile.num_keys, work_tile.seqlen_q, row_begin, work_tile.q_begin, MASK, stride_mask_t, first_cut_key
            )
            unmasked_begin, unmasked_end = unmasked_n_block_range(request, first_cut_key, cfg)
            # Splits of this work tile, if this launch combines them.
            if tile_cfg.FUSED_COMBINE_ROWS > 0 and not tile_cfg.UNSPLIT:
                first_range = (n_block_base + work_tile.m_block * work_tile.num_n_blocks) // cta_range.blocks_per_range
                splits = TileSplits(
                    i_range, first_range, num_splits_of_tile(work_tile, cta_range.blocks_per_range, first_range)
                )
                maybe_uninit_counter = load_first_level_counter_for_init_check(SPLIT_WORKSPACE, splits, cfg, tile_cfg)
            # Query, then the main loop.
            if tile_cfg.LARGE_M:
                score_scales = head_score_scales * large_m.store_query_unfenced_and_return_q_scales(
                    tensors, strides, smem_column_scales, work_tile, first_head, smem_operands.q, cfg, tile_cfg
                )
                state, prefetch_pos, iter = large_m.mainloop(
                    score_scales, softcap, prefetch_pos, iter, full_barriers, smem_kv, tensor_maps, page_lookup,
                    smem_operands, i_request, first_head,
                    request.first_n_block + work_tile.n_block_begin, request.first_n_block + work_tile.n_block_end,
                    unmasked_begin, unmasked_end, mask_args, block_end, cfg, tile_cfg,
                )  # fmt: skip
            else:
                if tile_cfg.NUM_QUERY_STAGES > 0:
                    q, q_scales = wait_prefetched_query_operands_and_q_scales(
                        smem_prefetched_q, smem_column_scales, num_used_q, cfg, tile_cfg)  # fmt: skip
                    num_used_q += 1
                else:
                    q, q_scales = load_query_operands_and_q_scales(tensors, strides, smem_column_scales, work_tile,
                                                                   first_head, cfg, tile_cfg)  # fmt: skip
                score_scales = scale_rows_of_heads(head_score_scales, q_scales, tile_cfg)
                step: gl.constexpr = mainloop_step_lazy_rescale if cfg.BLOCK_M > 16 else mainloop_step
                new_state = init_unreduced_softmax_state(cfg, tile_cfg)
                for n_block in range(
                    request.first_n_block + work_tile.n_block_begin, request.first_n_block + work_tile.n_block_end
                ):
                    # Wait for the stage; once all warps have left the previous one, refill it.
                    wait_kv_block_copies(full_barriers, iter, NUM_BARRIER_GROUPS, tile_cfg)
                    thread_barrier()
                    if tile_cfg.NUM_QUERY_STAGES > 0:
                        num_prefetched_q = prefetch_query_at_tile_begin_and_count(
                            tensors, strides, smem_prefetched_q, num_prefetched_q, prefetch_pos, block_end,
                            first_head, False, cfg, tile_cfg,
                        )  # fmt: skip
                    start_kv_block_copies_at_position(
                        prefetch_pos, iter + tile_cfg.STAGES - 1, full_barriers, tensor_maps, smem_kv, first_head,
                        block_end, cfg, tile_cfg,
                    )  # fmt: skip
                    prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
                    # QK, mask, online softmax, PV.
                    if (n_block >= unmasked_begin) & (n_block < unmasked_end):
                        new_state = step(
                            new_state, smem_kv, iter % tile_cfg.STAGES, q, score_scales, softcap, n_block, mask_args,
                            False, cfg, tile_cfg,
                        )  # fmt: skip
                    else:
                        new_state = step(
                            new_state, smem_kv, iter % tile_cfg.STAGES, q, score_scales, softcap, n_block, mask_args,
                            True, cfg, tile_cfg,
                        )  # fmt: skip
                    iter += 1
                state = sum_over_lanes_of_equal_row_max(equalize_int4_acc_scales(new_state, tile_cfg), cfg, tile_cfg)
                if tile_cfg.KEY_PARTS > 1:
                    state = key_parts.combine_key_parts(state, cfg, tile_cfg)
            # Epilogue: output of an unsplit work tile, else a partial result.
            if tile_cfg.V.ROTATION.ENABLED:
                state = unrotate_and_scale_acc(state, smem_column_scales, cfg, tile_cfg)
            is_unsplit = work_tile.n_block_end - work_tile.n_block_begin == work_tile.num_n_blocks
            if (tile_cfg.FUSED_COMBINE_ROWS == 0) & (work_tile.n_block_begin == 0):
                p_metadata = work_tile_metadata_ptr(tensors.SPLIT_METADATA, work_tile, cta_range.head_group, tile_cfg)
                num_splits = num_splits_of_tile(work_tile, cta_range.blocks_per_range, i_range)
                store_split_metadata(p_metadata, num_splits, i_range)
            partial_slot = 2 * (i_range * cfg.HEADS + first_head) + gl.where(work_tile.n_block_begin == 0, 1, 0)
            if tile_cfg.LARGE_M:
                o_r = gl.arange(0, cfg.BLOCK_M, state.row_max.type.layout)
                if is_unsplit:
                    store_unsplit_output_and_lse_of_head(
                        tensors, strides, state, v_out_scale, first_head, work_tile, row_begin + o_r, cfg)  # fmt: skip
                else:
                    store_partial_acc_max_and_sum_of_head(
                        SPLIT_WORKSPACE, partial_slot, state, o_r, work_tile.seqlen_q * cfg.GROUP - row_begin, cfg
                    )
            elif tile_cfg.UNSPLIT or is_unsplit:
                if tile_cfg.KEY_PARTS > 1:
                    key_parts.store_output_and_lse(tensors, strides, state, v_out_scale, first_head, work_tile, cfg)
                else:
                    store_unsplit_output_and_lse(
                        tensors, strides, state, v_out_scale, first_head, work_tile, cfg, tile_cfg)  # fmt: skip
            else:
                KEY_PARTS: gl.constexpr = tile_cfg.KEY_PARTS > 1
                store: gl.constexpr = key_parts.store_partial_result if KEY_PARTS else store_partial_acc_max_and_sum
                store(SPLIT_WORKSPACE, partial_slot, state, first_head, work_tile.seqlen_q * cfg.GROUP - row_begin,
                      cfg, tile_cfg)  # fmt: skip
                if tile_cfg.FUSED_COMBINE_ROWS > 0:
                    arrive_and_combine_in_levels_if_last(tensors, scales, strides, splits, maybe_uninit_counter,
                                                         first_head, work_tile, cfg, tile_cfg)  # fmt: skip
            block += work_tile.n_block_end - work_tile.n_block_begin
        wait_remaining_cp_async_copies(tile_cfg)
    if tile_cfg.FUSED_COMBINE_ROWS == 0:
        pdl_launch_dependents()
