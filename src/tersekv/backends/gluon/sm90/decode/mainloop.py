"""Main loop step of decode: scores of an n_block, online softmax, PV.

An n_block is processed in NUM_MMA_TILES tiles of MMA_KEYS keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from ..parts.dequant import dequant_e2m1, dequant_int4_v, dequant_k, dequant_v, log2_and_reciprocal, mma_dtype
from ..parts.online_softmax import apply_softcap
from .layouts import (
    k_load_layout,
    k_to_mma_operand,
    load_k_block_scales,
    load_query_operand,
    load_v_block_scales,
    mma_layout,
    transpose_p,
    zero_neighbor_columns,
)
from .mask import is_visible, valid_keys
from .params import SoftmaxState


@gluon.jit
def smem_codes_of_mma_tile(stages, i_tile, NUM_PACKED: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the codes of MMA tile i_tile of the ring: [HEADS_PER_CTA, MMA_KEYS, NUM_PACKED]. A row in shared memory
    may hold several heads (`copy_tiles.merge_adjacent_heads`); a tile may consist of two copies
    (`copy_tiles.make_kv_layout`)."""
    tile = stages.index(i_tile)
    if tile_cfg.COPIES_PER_BUFFER == 2:  # [halves, panels, rows, 8, packed]
        SHAPE: gl.constexpr = [tile.shape[2], tile_cfg.MMA_KEYS, tile.shape[1] * tile.shape[4]]
        tile = tile.permute([2, 0, 3, 1, 4]).reshape(SHAPE)
    TILE_ROWS: gl.constexpr = tile.shape[0]
    if TILE_ROWS < tile_cfg.HEADS_PER_CTA:
        tile = (
            tile.reshape([TILE_ROWS, tile_cfg.MMA_KEYS, tile_cfg.HEADS_PER_CTA // TILE_ROWS, NUM_PACKED])
            .permute([0, 2, 1, 3])
            .reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, NUM_PACKED])
        )
    return tile


@gluon.jit
def smem_scales_of_mma_tile(scale_stages, i_tile, IS_V: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the stored scales of MMA tile i_tile of the ring: [HEADS_PER_CTA, MMA_KEYS], or [HEADS_PER_CTA, MMA_KEYS,
    SCALE_WORDS]. Where the pitch of a copy exceeds its bytes, the ring has a multiple of the tiles."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    tile = scale_stages.index(
        i_tile * (scale_stages.shape[0] // (tile_cfg.STAGES * tile_cfg.KEYS_PER_BUFFER // tile_cfg.MMA_KEYS))
    )
    if not SIDE.SCALE_ROWS_ARE_KEYS:
        if tile_cfg.COPIES_PER_BUFFER == 2 and SIDE.SCALE_KIND == "block":  # [halves, heads, 8, words]
            return tile.permute([1, 0, 2, 3]).reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, SIDE.SCALE_WORDS])
        elif tile_cfg.COPIES_PER_BUFFER == 2:
            return tile.permute([1, 0, 2]).reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS])
        else:
            return tile
    elif SIDE.SCALE_KIND == "block":
        return tile.permute([1, 0, 2])
    else:
        return tile.permute([1, 0])


@gluon.jit
def int4_zero_points(scales):
    """Returns the zero points of int4 rows: the lowest bits of their stored scales."""
    return scales.to(gl.int32, bitcast=True) & 15


@gluon.jit
def compute_scores_of_mma_tile(k_stages, k_scale_stages, i_tile, q, score_scales, softcap, first_key, mask_args,
                               MASKED: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr):  # fmt: skip
    """Returns the scores of an MMA tile in units of log2: [HEADS_PER_CTA, MMA_KEYS, BLOCK_M]."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    packed = smem_codes_of_mma_tile(k_stages, i_tile, cfg.PACKED_K, tile_cfg).load(
        k_load_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, tile_cfg.MMA_KEYS, cfg.PACKED_K)
    )
    # Dequantize K.
    if tile_cfg.K.SCALE_KIND == "block":
        k = dequant_e2m1(
            packed,
            load_k_block_scales(smem_scales_of_mma_tile(k_scale_stages, i_tile, False, tile_cfg), cfg, tile_cfg),
            False,
        )
    else:
        K: gl.constexpr = tile_cfg.K
        if K.MAY_HOLD_NEIGHBOR_NAN:
            packed = zero_neighbor_columns(packed, tile_cfg)
        k = dequant_k(packed, K)
    # QK.
    s = gl.full([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.BLOCK_M], 0, gl.float32, MMA)
    for i in gl.static_range(gl.constexpr(tile_cfg.K.PACK)):
        if cfg.BLOCK_M // tile_cfg.WARPS_PER_HEAD > 16:
            s = mma_v2(k_to_mma_operand(k[i], cfg, tile_cfg), load_query_operand(q.operands, i, cfg, tile_cfg), s)
        else:
            s = mma_v2(k_to_mma_operand(k[i], cfg, tile_cfg), q.operands[i], s)
    if tile_cfg.K.SCALE_KIND == "token_head":
        token_scales = smem_scales_of_mma_tile(k_scale_stages, i_tile, False, tile_cfg).load(gl.SliceLayout(2, MMA))
        if tile_cfg.K.CODE == "int4":
            # 2^23 + the zero point, as fp32 bits, minus 2^23.
            zero_points = (int4_zero_points(token_scales) | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0
            s = s - zero_points[:, :, None] * q.row_sums[:, None, :]
        s = s * score_scales[:, None, :] * token_scales[:, :, None]
    else:
        s = s * score_scales[:, None, :]
    if cfg.HAS_SOFTCAP:
        s = apply_softcap(s, softcap)
    # Mask.
    if MASKED:
        L: gl.constexpr = gl.SliceLayout(0, MMA)
        o_n = first_key + gl.arange(0, tile_cfg.MMA_KEYS, gl.SliceLayout(1, L))
        o_q = (
            mask_args.row_begin + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, L))
        ) // cfg.GROUP  # query token of a row
        s = gl.where(is_visible(o_n[:, None], o_q[None, :], mask_args, cfg)[None, :, :], s, float("-inf"))
    return s


@gluon.jit
def accumulate_pv_of_mma_tile(acc_o, v_stages, v_scale_stages, i_tile, p, first_key, mask_args, MASKED: gl.constexpr,
                              cfg: gl.constexpr, tile_cfg: gl.constexpr):  # fmt: skip
    """Returns acc_o + V^T P of an MMA tile; p: [HEADS_PER_CTA, MMA_KEYS, BLOCK_M]."""
    A: gl.constexpr = gl.DotOperandLayout(0, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD), 2)
    p_operand = transpose_p(p.to(mma_dtype(cfg)), cfg, tile_cfg)
    packed = smem_codes_of_mma_tile(v_stages, i_tile, cfg.PACKED_V, tile_cfg).permute([0, 2, 1]).load(A)
    if MASKED:  # an invalid slot may hold NaN, and 0 × NaN is NaN
        o_n = first_key + gl.arange(0, tile_cfg.MMA_KEYS, gl.SliceLayout(0, gl.SliceLayout(1, A)))
        valid = valid_keys(o_n, mask_args.num_keys, mask_args.num_q_rows, cfg)[None, None, :]
        packed = gl.where(valid, packed, 0)
    if tile_cfg.V.CODE == "int4":
        token_scales = smem_scales_of_mma_tile(v_scale_stages, i_tile, True, tile_cfg).load(gl.SliceLayout(1, A))
        v = dequant_int4_v(packed, int4_zero_points(token_scales).to(gl.int16)[:, None, :])
    elif tile_cfg.V.SCALE_KIND == "block":
        block_scales = load_v_block_scales(
            smem_scales_of_mma_tile(v_scale_stages, i_tile, True, tile_cfg).permute([0, 2, 1]), cfg, tile_cfg
        )
        if MASKED:
            block_scales = gl.where(valid, block_scales, 0.0)
        v = dequant_e2m1(packed, block_scales, False)
    else:
        V: gl.constexpr = tile_cfg.V
        v = dequant_v(packed, V)
    acc_new = ()
    for i in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
        acc_new = acc_new + (mma_v2(v[i], p_operand, acc_o[i]),)
    return acc_new


@gluon.jit
def load_log2_v_scales(
    v_scale_stages, i_tile, first_key, mask_args, MASKED: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Returns log2 and reciprocals of the V scales of an MMA tile: [HEADS_PER_CTA, MMA_KEYS]."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    v_scales = gl.maximum(
        smem_scales_of_mma_tile(v_scale_stages, i_tile, True, tile_cfg).load(gl.SliceLayout(2, MMA)), 1e-30
    )
    if MASKED:
        o_n = first_key + gl.arange(0, tile_cfg.MMA_KEYS, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        v_scales = gl.where(valid_keys(o_n, mask_args.num_keys, mask_args.num_q_rows, cfg)[None, :], v_scales, 1.0)
    return log2_and_reciprocal(v_scales)


@gluon.jit
def key_and_buffer_of_mma_tile(stage, n_block, j: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns (first key, index in the ring of its buffer) of the j-th MMA tile of an n_block."""
    TILES_PER_BUFFER: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // tile_cfg.MMA_KEYS
    return n_block * cfg.BLOCK_N + tile_cfg.MMA_KEYS * j, stage * TILES_PER_BUFFER + j % TILES_PER_BUFFER


@gluon.jit
def compute_scores(
    kv_stages, stage, q, score_scales, softcap, n_block, mask_args, MASKED: gl.constexpr, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns (scores of each MMA tile, their maximum by lane and row, reciprocals of each tile's V scales)."""
    TILES_PER_BUFFER: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // tile_cfg.MMA_KEYS
    s, inv_v_scales = (), ()
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_MMA_TILES)):
        first_key, i_tile = key_and_buffer_of_mma_tile(stage, n_block, j, cfg, tile_cfg)
        k_stages, k_scale_stages = kv_stages.k[j // TILES_PER_BUFFER], kv_stages.k_scales[j // TILES_PER_BUFFER]
        tile_scores = compute_scores_of_mma_tile(
            k_stages, k_scale_stages, i_tile, q, score_scales, softcap, first_key, mask_args, MASKED, cfg, tile_cfg
        )
        if tile_cfg.V.SCALE_KIND == "token_head":
            # The V scale is added to the exponent, so that the P multiplied with V codes lies in (0, 1].
            log2_v_scales, inv_v_scale = load_log2_v_scales(
                kv_stages.v_scales[j // TILES_PER_BUFFER], i_tile, first_key, mask_args, MASKED, cfg, tile_cfg
            )
            tile_scores = tile_scores + log2_v_scales[:, :, None]
            inv_v_scales = inv_v_scales + (inv_v_scale,)
        s = s + (tile_scores,)
        if j == 0:
            lane_max = tile_scores
        else:
            lane_max = gl.maximum(lane_max, tile_scores)
    return s, lane_max, inv_v_scales


@gluon.jit
def mainloop_step(
    state, kv_stages, stage, q, score_scales, softcap, n_block, mask_args, MASKED: gl.constexpr, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns the SoftmaxState after one n_block: (row_max, row_sum for each key of a lane, PACK accumulators)."""
    TILES_PER_BUFFER: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // tile_cfg.MMA_KEYS
    # QK and mask.
    s, lane_max, inv_v_scales = compute_scores(
        kv_stages, stage, q, score_scales, softcap, n_block, mask_args, MASKED, cfg, tile_cfg
    )
    # Online softmax: new row_max, rescale.
    row_max_new = gl.maximum(state.row_max, gl.max(lane_max, 1))
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
        first_key, i_tile = key_and_buffer_of_mma_tile(stage, n_block, j, cfg, tile_cfg)
        v_stages, v_scale_stages = kv_stages.v[j // TILES_PER_BUFFER], kv_stages.v_scales[j // TILES_PER_BUFFER]
        acc_o = accumulate_pv_of_mma_tile(
            acc_o, v_stages, v_scale_stages, i_tile, p, first_key, mask_args, MASKED, cfg, tile_cfg
        )
    return SoftmaxState(row_max_new, row_sum, acc_o)


@gluon.jit
def init_softmax_state(cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the SoftmaxState before the first n_block."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    row_max = gl.full([tile_cfg.HEADS_PER_CTA, cfg.BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    row_sum = gl.full([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.BLOCK_M], 0, gl.float32, MMA)
    acc_o = ()
    for _ in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
        acc_o = acc_o + (gl.full([tile_cfg.HEADS_PER_CTA, cfg.PACKED_V, cfg.BLOCK_M], 0, gl.float32, MMA),)
    return SoftmaxState(row_max, row_sum, acc_o)
