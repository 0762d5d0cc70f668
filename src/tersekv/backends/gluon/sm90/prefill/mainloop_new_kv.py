"""The consumer warpgroup where K and V of the new tokens are arguments: a work tile has new and cached blocks.

New blocks come first, in their own 16 bits; then the query is converted for cached K, and acc_o continues divided by
the cached V scale. Both kinds of tile use the same stages.

Mask and rescale: `online_softmax.softmax_step`; acc_o rescale: `mainloop.mainloop_step` and, between both kinds,
`mainloop_step_new_to_cached`; full stage: `start_qk`, `wait_v`; epilogue: `mainloop.store_output`; combine: none.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ...versions import reinterpret
from ..parts.online_softmax import pack_p
from ..parts.pipeline import consumer_release, stage_and_phase
from .mainloop import (
    MIN_SCALE,
    SoftmaxState,
    apply_k_scales,
    first_softmax_step,
    has_invalid_keys,
    init_acc_and_max,
    kv_head_of,
    load_k_scales,
    load_tile_v_scale,
    mainloop,
    make_mask_args,
    prepare_query,
    softmax_and_row_sums,
    start_pv,
    start_qk,
    store_output,
    wait_v,
)
from .producer import PipelineStages
from .rotation import RotationTensors, rotate_acc, unrotate_acc
from .tile_scheduler import WorkTile, read_work_tile

MIN_V_SCALE = gl.constexpr(1e-30)  # of cached V: acc_o is divided by it


class NewAndCachedScales(NamedTuple):
    """Score scales (base 2) of new and of cached K, and scales of V and outputs."""

    new_score_scale: gl.tensor
    cached_score_scale: gl.tensor
    K_SCALE: gl.tensor
    v_scale: gl.tensor
    V_SCALE: gl.tensor
    out_scale: gl.tensor
    softcap: gl.tensor
    rotation: RotationTensors


@gluon.jit
def view_stages_as(stages, DTYPE: gl.constexpr):
    """Returns a view of the stages as another 16-bit dtype."""
    return PipelineStages(
        reinterpret(stages.tiles, DTYPE, stages.tiles.shape, stages.tiles.layout),
        stages.full_barriers,
        stages.empty_barriers,
    )


@gluon.jit
def load_cached_scales(work_tile, call_scales, cfg: gl.constexpr):
    """Returns (score scale, V scale) of cached K and V for a work tile's head."""
    kv_head = kv_head_of(work_tile, cfg)
    score_scale, v_scale = call_scales.cached_score_scale, call_scales.v_scale
    if cfg.HAS_K_SCALE:
        score_scale = score_scale * gl.load(call_scales.K_SCALE + kv_head * cfg.K_SCALE_STRIDE)
    if cfg.HAS_V_SCALE:
        v_scale = v_scale * gl.load(call_scales.V_SCALE + kv_head * cfg.V_SCALE_STRIDE)
    return score_scale, gl.where(gl.abs(v_scale) < MIN_V_SCALE, MIN_V_SCALE, v_scale)


@gluon.jit
def mainloop_step_new_to_cached(state, mask_args, q, score_scales, stored_scales, v_unit, call_scales, kv_head,
                                q_stages, k_stages, v_stages, new_v_stages, iter, code_iter, n_start, is_last,
                                I_CONSUMER: gl.constexpr, cfg: gl.constexpr, new_cfg: gl.constexpr):  # fmt: skip
    """Does `mainloop.mainloop_step` for the first cached block; PV is of the last new block."""
    prev_stage, _ = stage_and_phase(iter - 1, cfg.STAGES)
    # QK of this block, PV of the last new block.
    s = start_qk(q, k_stages, iter, cfg)
    acc_o = start_pv(state, new_v_stages, iter - 1, new_cfg)
    tile_scale = load_tile_v_scale(stored_scales, code_iter, cfg)
    k_scales = load_k_scales(stored_scales, iter, cfg)
    s = apply_k_scales(warpgroup_mma_wait(1, [s]), k_scales, cfg)
    consumer_release(k_stages.empty_barriers, iter, cfg.STAGES)
    mbarrier.arrive(q_stages.empty_barriers.index(I_CONSUMER), count=1, pred=is_last)
    # Mask and online softmax.
    p, p_sums, row_max, rescale = softmax_and_row_sums(
        s, state.row_max, mask_args, n_start, score_scales, tile_scale, call_scales.softcap, True, cfg
    )
    row_sum = state.row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, state.row_sum.type.layout))[:, None] + p_sums
    p_packed = pack_p(p, v_stages.tiles.dtype)
    ZERO_INVALID: gl.constexpr = not cfg.CONVERTS_KV
    wait_v(v_stages, iter, mask_args, n_start, has_invalid_keys(mask_args, n_start, cfg), ZERO_INVALID, cfg)
    # Finish PV, release V, rescale acc_o and divide it by the cached V scale.
    acc_o = warpgroup_mma_wait(0, [acc_o])
    mbarrier.arrive(v_stages.empty_barriers.index(prev_stage), count=1)
    acc_o = acc_o * gl.convert_layout(rescale / v_unit, gl.SliceLayout(1, acc_o.type.layout))[:, None]
    if cfg.V_ROTATION.ENABLED:
        acc_o = rotate_acc(acc_o, call_scales.rotation, kv_head, cfg)
    return SoftmaxState(acc_o, row_max, row_sum, p_packed)


@gluon.jit
def consumer_new_kv(tensors, call_scales, strides, q_stages, tile_info, k_stages, v_stages, stored_scales,
                    I_CONSUMER: gl.constexpr, DTYPE: gl.constexpr, NEW_DTYPE: gl.constexpr, cfg: gl.constexpr,
                    new_cfg: gl.constexpr):  # fmt: skip
    """Computes 64 rows of every work tile of this CTA. new_cfg: `cfg` for new blocks."""
    OUT, LSE, SINKS = tensors
    new_k_stages, new_v_stages = view_stages_as(k_stages, NEW_DTYPE), view_stages_as(v_stages, NEW_DTYPE)
    new_q_stages = view_stages_as(q_stages, NEW_DTYPE)
    sign = gl.where(call_scales.new_score_scale < 0, -1.0, 1.0)
    num_done, iter, code_iter = 0, 0, 0  # work tiles done; blocks done, of them cached ones
    mbarrier.wait(q_stages.full_barriers.index(I_CONSUMER), 0)
    work_tile, cached_prefix = read_work_tile(tile_info.index(I_CONSUMER))
    while work_tile.num_n_blocks > 0:
        has_no_cached = cached_prefix.num_n_blocks == 0
        # First new block: QK, mask, softmax.
        q, q_scales = prepare_query(
            new_q_stages, I_CONSUMER, sign, call_scales.rotation, kv_head_of(work_tile, cfg), DTYPE, new_cfg
        )
        score_scales = gl.maximum(q_scales * (call_scales.new_score_scale * sign), MIN_SCALE)
        mask_args = make_mask_args(work_tile, I_CONSUMER, new_cfg)
        n_start = (work_tile.n_block_end - 1) * cfg.BLOCK_N
        s = warpgroup_mma_wait(0, [start_qk(q, new_k_stages, iter, new_cfg)])
        consumer_release(k_stages.empty_barriers, iter, cfg.STAGES)
        mbarrier.arrive(
            q_stages.empty_barriers.index(I_CONSUMER), count=1, pred=has_no_cached & (work_tile.num_n_blocks == 1)
        )
        tile_scale = load_tile_v_scale(stored_scales, code_iter, new_cfg)
        state = first_softmax_step(
            s, init_acc_and_max(cfg), mask_args, n_start, score_scales, tile_scale, call_scales.softcap, NEW_DTYPE,
            new_cfg,
        )  # fmt: skip
        wait_v(new_v_stages, iter, mask_args, n_start, has_invalid_keys(mask_args, n_start, new_cfg), True, new_cfg)
        iter += 1
        # Other new blocks.
        state, iter, _code_iter = mainloop(state, mask_args, q, score_scales, stored_scales, call_scales.softcap,
                                           q_stages, new_k_stages, new_v_stages, iter, iter, work_tile, has_no_cached,
                                           I_CONSUMER, new_cfg)  # fmt: skip
        cached_score_scale, v_unit = load_cached_scales(work_tile, call_scales, cfg)
        v_unit = gl.where(has_no_cached, 1.0, v_unit)
        if has_no_cached:
            acc_o = warpgroup_mma_wait(0, [start_pv(state, new_v_stages, iter - 1, new_cfg)])
            state = SoftmaxState(acc_o, state.row_max, state.row_sum, state.p_packed)
        else:
            # Cached blocks. Names of their own: the types differ from those of new blocks.
            cached_scales = cached_score_scale * sign
            cached_sign = gl.where(cached_scales < 0, -1.0, 1.0)
            cached_q, cached_q_scales = prepare_query(
                q_stages, I_CONSUMER, cached_sign, call_scales.rotation, kv_head_of(work_tile, cfg), NEW_DTYPE, cfg
            )
            cached_scales = gl.maximum(cached_q_scales * (cached_scales * cached_sign), MIN_SCALE)
            cached_tile = WorkTile(work_tile.q_row, work_tile.num_tokens_left, cached_prefix.causal_limit,
                                   cached_prefix.key_end, cached_prefix.num_n_blocks, cached_prefix.n_block_end,
                                   cached_prefix.key_begin, work_tile.head_tile, work_tile.i_request)  # fmt: skip
            cached_mask_args = make_mask_args(cached_tile, I_CONSUMER, cfg)
            state = mainloop_step_new_to_cached(state, cached_mask_args, cached_q, cached_scales, stored_scales, v_unit,
                                                call_scales, kv_head_of(work_tile, cfg), q_stages, k_stages, v_stages,
                                                new_v_stages, iter, code_iter,
                                                (cached_prefix.n_block_end - 1) * cfg.BLOCK_N,
                                                cached_prefix.num_n_blocks == 1, I_CONSUMER, cfg, new_cfg)  # fmt: skip
            state, iter, code_iter = mainloop(state, cached_mask_args, cached_q, cached_scales, stored_scales,
                                              call_scales.softcap, q_stages, k_stages, v_stages, iter + 1,
                                              code_iter + 1, cached_tile, True, I_CONSUMER, cfg)  # fmt: skip
            acc_o = warpgroup_mma_wait(0, [start_pv(state, v_stages, iter - 1, cfg)])
            if cfg.V_ROTATION.ENABLED:
                acc_o = unrotate_acc(acc_o, call_scales.rotation, kv_head_of(work_tile, cfg), cfg)
            state = SoftmaxState(acc_o, state.row_max, state.row_sum, state.p_packed)
        # Epilogue.
        consumer_release(v_stages.empty_barriers, iter - 1, cfg.STAGES)
        store_output(OUT, LSE, SINKS, work_tile, state, v_unit * call_scales.out_scale, strides, I_CONSUMER, cfg)
        num_done += 1
        mbarrier.wait(q_stages.full_barriers.index(I_CONSUMER), num_done & 1)
        work_tile, cached_prefix = read_work_tile(tile_info.index(I_CONSUMER))
