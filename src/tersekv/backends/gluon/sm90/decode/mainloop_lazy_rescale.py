"""Main loop step of decode for 17 to 32 query rows of a KV head, 16 or 32 rows a warp: `mainloop` with lazy rescaling.

A row's row_max is raised only where P would overflow fp16, which is rare; else nothing is rescaled. row_max and row_sum
are kept for each lane that holds keys of a row, [HEADS_PER_CTA, 8, BLOCK_M], so lanes exchange nothing. For 4-bit
codes, the costliest to unpack, a warp has all 32 rows (`kernel_producer_warp`): then the accumulator takes half of its
registers, the query stays in shared memory, and an n_block has 16 keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.dequant import INT4_ODD_SCALE
from ..parts.lazy_rescaling import (
    LAZY_ROW_MAX_4,
    LAZY_ROW_MAX_4_CONSTRAINTS,
    LAZY_ROW_MAX_8,
    LAZY_ROW_MAX_8_CONSTRAINTS,
    RESCALE_16,
    RESCALE_16_CONSTRAINTS,
    RESCALE_32,
    RESCALE_32_CONSTRAINTS,
    RESCALE_64,
    RESCALE_64_CONSTRAINTS,
)
from .layouts import mma_layout
from .mainloop import accumulate_pv_of_mma_tile, compute_scores, key_and_buffer_of_mma_tile
from .params import SoftmaxState


@gluon.jit
def view_by_lane(x):
    """Returns [HEADS_PER_CTA, N, BLOCK_M] as [HEADS_PER_CTA, N / 8, 8, BLOCK_M]: the elements of a row by lane."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8, x.shape[2]])


@gluon.jit
def broadcast_by_lane(x, like):
    """Returns one number per row and lane, broadcast to `view_by_lane` of the row."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None, :, :]


@gluon.jit
def rescale_acc(acc_o, rescale, flag, tile_cfg: gl.constexpr):
    """Returns an accumulator [HEADS_PER_CTA, 16 or 32, BLOCK_M] times each row's rescale, skipped where all are 1."""
    x = view_by_lane(acc_o)
    scales, x = gl.broadcast(broadcast_by_lane(rescale, x), x)
    flags, x = gl.broadcast(broadcast_by_lane(flag, x), x)
    NUM_ELEMENTS: gl.constexpr = acc_o.shape[1] * acc_o.shape[2] // (32 * tile_cfg.WARPS_PER_HEAD)
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
def init_lazy_softmax_state(cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the SoftmaxState before the first n_block, by lane."""
    zeros = gl.max(
        view_by_lane(
            gl.full(
                [tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, cfg.BLOCK_M], 0.0, gl.float32,
                mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD),
            )
        ),
        1,
    )  # fmt: skip
    acc_o = ()
    for _ in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
        acc_o = acc_o + (
            gl.full(
                [tile_cfg.HEADS_PER_CTA, cfg.PACKED_V, cfg.BLOCK_M], 0, gl.float32,
                mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD),
            ),
        )  # fmt: skip
    return SoftmaxState(zeros + float("-inf"), zeros, acc_o)


@gluon.jit
def mainloop_step_lazy_rescale(
    state, kv_stages, stage, q, score_scales, softcap, n_block, mask_args, MASKED: gl.constexpr, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns the SoftmaxState after one n_block: (row_max, row_sum, both by lane, PACK accumulators).

    Differs from `mainloop_step` after the scores: there all lanes agree on row_max in every n_block, here none waits.
    """
    TILES_PER_BUFFER: gl.constexpr = tile_cfg.KEYS_PER_BUFFER // tile_cfg.MMA_KEYS
    # QK and mask.
    s, lane_max, inv_v_scales = compute_scores(
        kv_stages, stage, q, score_scales, softcap, n_block, mask_args, MASKED, cfg, tile_cfg
    )
    # Online softmax: lazy row_max, rescale where it was raised.
    FOUR_ROWS_PER_THREAD: gl.constexpr = cfg.BLOCK_M // tile_cfg.WARPS_PER_HEAD == 16
    row_max, rescale, flag = gl.inline_asm_elementwise(
        LAZY_ROW_MAX_4 if FOUR_ROWS_PER_THREAD else LAZY_ROW_MAX_8,
        LAZY_ROW_MAX_4_CONSTRAINTS if FOUR_ROWS_PER_THREAD else LAZY_ROW_MAX_8_CONSTRAINTS,
        [gl.max(view_by_lane(lane_max), 1), state.row_max],
        (gl.float32, gl.float32, gl.int32), False, 4 if FOUR_ROWS_PER_THREAD else 8,
    )  # fmt: skip
    safe_max, row_sum = gl.where(row_max == float("-inf"), 0.0, row_max), state.row_sum * rescale
    acc_o = ()
    for i in gl.static_range(gl.constexpr(tile_cfg.V.PACK)):
        acc_o = acc_o + (rescale_acc(state.acc_o[i], rescale, flag, tile_cfg),)
    # P and PV, one MMA tile at a time.
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_MMA_TILES)):
        x = view_by_lane(s[j])
        x = gl.exp2(x - broadcast_by_lane(safe_max, x))
        p = gl.convert_layout(gl.reshape(x, s[j].shape), s[j].type.layout, assert_trivial=True)
        if tile_cfg.V.SCALE_KIND == "token_head":
            row_sum = row_sum + gl.sum(view_by_lane(p * inv_v_scales[j][:, :, None]), 1)
        else:
            row_sum = row_sum + gl.sum(x, 1)
        first_key, i_tile = key_and_buffer_of_mma_tile(stage, n_block, j, cfg, tile_cfg)
        v_stages, v_scale_stages = kv_stages.v[j // TILES_PER_BUFFER], kv_stages.v_scales[j // TILES_PER_BUFFER]
        acc_o = accumulate_pv_of_mma_tile(
            acc_o, v_stages, v_scale_stages, i_tile, p, first_key, mask_args, MASKED, cfg, tile_cfg
        )
    return SoftmaxState(row_max, row_sum, acc_o)


@gluon.jit
def reduce_softmax_state(state, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns a step's SoftmaxState with row_max and row_sum reduced over lanes, and all columns at one scale."""
    acc_o = state.acc_o
    if tile_cfg.V.CODE == "int4":
        acc_o = (acc_o[0] * INT4_ODD_SCALE, acc_o[1], acc_o[2] * INT4_ODD_SCALE, acc_o[3])
    if cfg.BLOCK_M > 16:
        L: gl.constexpr = gl.SliceLayout(1, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD))
        row_max, row_sum = (
            gl.convert_layout(gl.max(state.row_max, 1), L),
            gl.convert_layout(gl.sum(state.row_sum, 1), L),
        )
        return SoftmaxState(row_max, row_sum, acc_o)
    else:
        return SoftmaxState(state.row_max, gl.sum(state.row_sum, 1), acc_o)
