"""The consumer warpgroup of prefill: 64 query rows of each of its CTA's work tiles.

QK of a block overlaps PV of the block before, across work tiles too. n_blocks run from the last to the first: the
causal mask applies to the first ones, and the long loop needs no mask but a window's, at its end.

Mask and rescale: `online_softmax.softmax_step`; full stage: `start_qk` and `wait_v`; acc_o rescale: end of
`mainloop_step`, which also releases stages; epilogue: `store_output`; combine: none.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import reinterpret, thread_barrier
from ..decode.cta_range import finalize_softmax
from ..parts.online_softmax import lane_row_sums, pack_p, unpack_p
from ..parts.pipeline import consumer_release, stage_and_phase
from ..parts.tile_scheduler import cast_output
from . import mainloop_fp8_p as fp8_p
from .online_softmax import FP8RowMax, softmax_step
from .rotation import RotationTensors, rotate_query, unrotate_acc
from .tile_scheduler import read_work_tile

ROWS_PER_WARPGROUP = gl.constexpr(64)
MIN_SCALE = gl.constexpr(1e-30)  # of scores: −inf × MIN_SCALE is −inf


class SoftmaxState(NamedTuple):
    """Of a work tile's rows: acc_o, running maximum (base 2), sum of P, and P of the last block, packed."""

    acc_o: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    p_packed: gl.tensor


class CallScales(NamedTuple):
    """Scales of scores (base 2) and of values; per-head K_SCALE and V_SCALE are not included."""

    score_scale: gl.tensor
    K_SCALE: gl.tensor
    v_scale: gl.tensor
    V_SCALE: gl.tensor
    softcap: gl.tensor
    rotation: RotationTensors


class MaskArgs(NamedTuple):
    """The keys that a warpgroup's rows see."""

    causal_limit: gl.tensor  # last key that each row sees
    key_begin: gl.tensor  # first key that any row of the work tile sees
    key_end: gl.tensor  # end of the keys that any row sees


@gluon.constexpr_function
def score_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.BLOCK_N, 32 if cfg.FP8_QK else 16])


@gluon.constexpr_function
def acc_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.DV, 16])


@gluon.jit
def view_query_as_8bit(q_stages, I_CONSUMER: gl.constexpr, DTYPE: gl.constexpr, cfg: gl.constexpr):
    """Returns a view of 8-bit query rows: they fill the first half of their 16-bit memory."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(cfg.D, 128), 8, 2)
    return reinterpret(q_stages.tiles, DTYPE, [4, ROWS_PER_WARPGROUP, cfg.D], LAYOUT).index(2 * I_CONSUMER)


@gluon.jit
def multiply_by_sign(q_smem, sign, LAYOUT: gl.constexpr):
    """Multiplies rows in shared memory by the sign."""
    if sign < 0:
        q_smem.store((q_smem.load(LAYOUT).to(gl.float32) * -1.0).to(q_smem.dtype))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def kv_head_of(work_tile, cfg: gl.constexpr):
    """Returns the KV head of a work tile."""
    return work_tile.head_tile * cfg.HEADS_PER_TILE // cfg.GROUP


@gluon.jit
def prepare_query(q_stages, I_CONSUMER: gl.constexpr, sign, rotation, kv_head, DTYPE: gl.constexpr, cfg: gl.constexpr):
    """Returns (query rows as an operand in shared memory, 16-bit or in the keys' dtype, q_scales of their scores).

    bf16 rows fit fp16 only after a power of two is divided out of each row; q_scales multiply it back. The query takes
    the score scale's sign, so that the row maximum of the scaled scores is that of the products.
    """
    x16 = q_stages.tiles.index(I_CONSUMER)
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_scales = gl.full([ROWS_PER_WARPGROUP], 1.0, gl.float32, gl.SliceLayout(1, score_layout(cfg)))
    if x16.dtype == DTYPE and not cfg.K_ROTATION.ENABLED:
        multiply_by_sign(x16, sign, LOAD_LAYOUT)
    elif cfg.FP8_QK:
        x16 = view_query_as_8bit(q_stages, I_CONSUMER, DTYPE, cfg)
        multiply_by_sign(x16, sign, LOAD_LAYOUT)
    else:
        x = x16
        if DTYPE.primitive_bitwidth == 8:
            x = view_query_as_8bit(q_stages, I_CONSUMER, DTYPE, cfg)
        else:
            x = reinterpret(q_stages.tiles, DTYPE, q_stages.tiles.shape, q_stages.tiles.layout).index(I_CONSUMER)
        x = x.load(LOAD_LAYOUT).to(gl.float32) * sign
        if cfg.K_ROTATION.ENABLED:
            x = rotate_query(x, rotation, kv_head, cfg)
        if gl.bfloat16 == DTYPE or cfg.K_ROTATION.ENABLED:
            exponent = (gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF
            exponent = gl.maximum(exponent, 1)
            x = x * (gl.maximum(254 - exponent, 1) << 23).to(gl.float32, bitcast=True)[:, None]
            q_scales = gl.convert_layout((exponent << 23).to(gl.float32, bitcast=True), q_scales.type.layout)
        thread_barrier()  # all threads have read the rows that are now overwritten
        x16.store(x.to(x16.dtype))
        fence_async_shared()
        thread_barrier()
    return x16, q_scales


@gluon.jit
def zero_invalid_v(v, key_begin, key_end):
    """Zeros rows of V outside [key_begin, key_end): 0 × NaN is NaN. Both consumers may do so at the same time."""
    CHUNK_ROWS: gl.constexpr = 16
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_n = gl.arange(0, CHUNK_ROWS, gl.SliceLayout(1, LOAD_LAYOUT))
    for i in gl.static_range(v.shape[0] // CHUNK_ROWS):
        x = v.slice(i * CHUNK_ROWS, CHUNK_ROWS).load(LOAD_LAYOUT)
        valid = (o_n >= key_begin - i * CHUNK_ROWS) & (o_n < key_end - i * CHUNK_ROWS)
        v.slice(i * CHUNK_ROWS, CHUNK_ROWS).store(gl.where(valid[:, None], x, 0.0).to(v.dtype))
    fence_async_shared()
    thread_barrier()


class TileVScale(NamedTuple):
    """The power of two divided out of the V scales of a tile with a scale per token."""

    log2_v_scale: gl.tensor
    inv_v_scale: gl.tensor


@gluon.jit
def load_tile_v_scale(stored_scales, iter, cfg: gl.constexpr):
    """Returns the TileVScale of a tile whose K stage is full and not released yet."""
    if cfg.TOKEN_SCALES:
        x = stored_scales.tile_v_scales.index(stage_and_phase(iter, 2 * cfg.STAGES)[0]).load(
            gl.BlockedLayout([2], [32], [4], [0])
        )
        o = gl.arange(0, 2, x.type.layout)
        return TileVScale(gl.sum(gl.where(o == 0, x, 0.0), 0), gl.sum(gl.where(o == 1, x, 0.0), 0))
    else:
        return TileVScale(0.0, 0.0)


@gluon.jit
def load_k_scales(stored_scales, iter, cfg: gl.constexpr):
    """Loads a tile's scales per key, if any: while QK runs, before its wait and before the K stage is released."""
    if cfg.TOKEN_SCALES:
        return stored_scales.k_scales_smem.index(stage_and_phase(iter, cfg.STAGES)[0]).load(
            gl.SliceLayout(0, score_layout(cfg))
        )
    else:
        return iter


@gluon.jit
def apply_k_scales(s, k_scales, cfg: gl.constexpr):
    """Returns scores times the scales of their keys, if any."""
    if cfg.TOKEN_SCALES:
        s = s * k_scales[None, :]
    return s


@gluon.jit
def softmax_and_row_sums(
    s, row_max, mask_args, n_start, score_scales, tile_scale, softcap, MASKED: gl.constexpr, cfg: gl.constexpr
):
    """Returns (P in fp32, row sums per lane, row_max, rescale) of a tile of scores."""
    p, row_max, rescale = softmax_step(
        s, row_max, mask_args.causal_limit - n_start, mask_args.key_begin - n_start, mask_args.key_end - n_start,
        score_scales, tile_scale.log2_v_scale, softcap, MASKED, cfg
    )  # fmt: skip
    p_sums = lane_row_sums(p)
    if cfg.TOKEN_SCALES:
        p_sums = p_sums * tile_scale.inv_v_scale
    return p, p_sums, row_max, rescale


@gluon.jit
def start_qk(q, k_stages, iter, cfg: gl.constexpr, ENABLED=True):
    """Waits for a K tile and starts QK; returns scores [64, BLOCK_N] in flight."""
    stage, phase = stage_and_phase(iter, cfg.STAGES)
    mbarrier.wait(k_stages.full_barriers.index(stage), phase, pred=ENABLED)
    zero = gl.full([ROWS_PER_WARPGROUP, cfg.BLOCK_N], 0, gl.float32, score_layout(cfg))
    return warpgroup_mma(q, k_stages.tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_pv(state, v_stages, iter, cfg: gl.constexpr):
    """Starts acc_o += PV of a tile whose V stage is full; returns acc_o in flight."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc_layout(cfg), 2)
    stage, _ = stage_and_phase(iter, cfg.STAGES)
    return warpgroup_mma(
        unpack_p(state.p_packed, v_stages.tiles.dtype, A), v_stages.tiles.index(stage), state.acc_o, is_async=True
    )


@gluon.jit
def has_invalid_keys(mask_args, n_start, cfg: gl.constexpr):
    """Returns whether a tile has keys outside [key_begin, key_end)."""
    return (n_start + cfg.BLOCK_N > mask_args.key_end) | (n_start < mask_args.key_begin)


@gluon.jit
def wait_v(v_stages, iter, mask_args, n_start, is_edge, ZERO_INVALID: gl.constexpr, cfg: gl.constexpr, ENABLED=True):
    """Waits for a V tile and, where it is at an edge, zeros its invalid rows."""
    stage, phase = stage_and_phase(iter, cfg.STAGES)
    mbarrier.wait(v_stages.full_barriers.index(stage), phase, pred=ENABLED)
    if ZERO_INVALID:  # noqa: SIM102 - known to the compiler, unlike the other
        if is_edge:
            zero_invalid_v(v_stages.tiles.index(stage), mask_args.key_begin - n_start, mask_args.key_end - n_start)


@gluon.jit
def mainloop_step(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages, iter,
                  code_iter, n_start, is_last, I_CONSUMER: gl.constexpr, MASKED: gl.constexpr,
                  cfg: gl.constexpr):  # fmt: skip
    """Computes QK and softmax of the block at key `n_start`, overlapped with PV of the block before."""
    # QK of this block, then PV of the block before.
    prev_stage, _ = stage_and_phase(iter - 1, cfg.STAGES)
    if cfg.FP8_PV:
        s, acc_low, acc_high = start_qk_and_half_pv(state, q, k_stages, v_stages, iter, True, cfg)
    else:
        s = start_qk(q, k_stages, iter, cfg)
        acc_o = start_pv(state, v_stages, iter - 1, cfg)
    tile_scale = load_tile_v_scale(stored_scales, code_iter, cfg)
    k_scales = load_k_scales(stored_scales, iter, cfg)
    s = apply_k_scales(warpgroup_mma_wait(1, [s]), k_scales, cfg)
    # Release K, and Q after the last block.
    consumer_release(k_stages.empty_barriers, iter, cfg.STAGES)
    mbarrier.arrive(q_stages.empty_barriers.index(I_CONSUMER), count=1, pred=is_last)
    # NOTE: ptxas moves no arithmetic across the branch of a wait. This one, which never waits, keeps the arrival before
    # the exponentials; the one below keeps the exponentials before the wait for PV, which they overlap.
    wait_v(v_stages, iter - 1, mask_args, n_start, False, False, cfg)
    # Mask and online softmax.
    p, p_sums, row_max, rescale = softmax_and_row_sums(
        s, state.row_max, mask_args, n_start, score_scales, tile_scale, softcap, MASKED, cfg
    )
    L: gl.constexpr = gl.SliceLayout(1, state.row_sum.type.layout)
    row_sum = state.row_sum * gl.convert_layout(rescale, L)[:, None] + p_sums
    if not cfg.FP8_PV:
        p_packed = pack_p(p, v_stages.tiles.dtype)
    ZERO_INVALID: gl.constexpr = MASKED and (cfg.WINDOW > 0 or cfg.HAS_NEW_KV) and not cfg.CONVERTS_KV
    # Wait for V of this block; finish PV of the block before, release its stage and rescale acc_o.
    wait_v(v_stages, iter, mask_args, n_start, has_invalid_keys(mask_args, n_start, cfg), ZERO_INVALID, cfg)
    if cfg.FP8_PV:
        acc_high = warpgroup_mma_wait(0, [acc_high])
        mbarrier.arrive(v_stages.empty_barriers.index(prev_stage), count=1)
        acc_high = fp8_p.rescale_and_add(state.acc_high, acc_high, state.rescale)
        return fp8_p.FP8SoftmaxState(acc_low, acc_high, rescale, row_max, row_sum, fp8_p.pack_p_e4m3(p))
    else:
        acc_o = warpgroup_mma_wait(0, [acc_o])
        mbarrier.arrive(v_stages.empty_barriers.index(prev_stage), count=1)
        acc_o = acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, acc_o.type.layout))[:, None]
        return SoftmaxState(acc_o, row_max, row_sum, p_packed)


@gluon.jit
def start_qk_and_half_pv(state, q, k_stages, v_stages, iter, has_next, cfg: gl.constexpr):
    """Returns (scores in flight, acc_low after PV, PV of the other half in flight), all by 8-bit MMAs."""
    p_operand = fp8_p.unpack_p_e4m3(state.p_packed, cfg)
    acc_low = fp8_p.start_half_pv(p_operand, v_stages, iter - 1, 0, cfg)
    s = start_qk(q, k_stages, iter, cfg, has_next)
    acc_low = fp8_p.rescale_and_add(state.acc_low, warpgroup_mma_wait(1, [acc_low]), state.rescale)
    return s, acc_low, fp8_p.start_half_pv(p_operand, v_stages, iter - 1, 1, cfg)


@gluon.jit
def store_output(OUT, LSE, SINKS, work_tile, state, v_scale, strides, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):
    """Epilogue: stores this warpgroup's output rows and LSE of a work tile."""
    stride_out_t, stride_out_h, stride_lse_t, stride_lse_h = strides
    ROW: gl.constexpr = gl.SliceLayout(1, state.acc_o.type.layout)
    row_max = gl.convert_layout(state.row_max, ROW)
    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), ROW)
    o_r = I_CONSUMER * ROWS_PER_WARPGROUP + gl.arange(0, ROWS_PER_WARPGROUP, ROW)
    token = o_r // cfg.HEADS_PER_TILE
    m_row = token < work_tile.num_tokens_left
    q_heads = (work_tile.head_tile * cfg.HEADS_PER_TILE + o_r % cfg.HEADS_PER_TILE).to(gl.int64)
    tokens = (work_tile.q_row + token).to(gl.int64)
    acc_scale, lse = finalize_softmax(row_max, row_sum, v_scale, SINKS, q_heads, m_row, cfg)
    o_d = gl.arange(0, cfg.DV, gl.SliceLayout(0, state.acc_o.type.layout))
    valid = m_row[:, None] & (o_d < cfg.HEAD_DIM_V)[None, :]
    p_out = (OUT + tokens * stride_out_t + q_heads * stride_out_h)[:, None] + o_d[None, :]
    gl.store(p_out, cast_output(state.acc_o * acc_scale[:, None], OUT, cfg), mask=valid)
    if cfg.HAS_LSE:
        gl.store(LSE + tokens * stride_lse_t + q_heads * stride_lse_h, lse, mask=m_row)


@gluon.jit
def load_v_scale(work_tile, call_scales, cfg: gl.constexpr):
    """Returns the scale of a work tile's output: v_scale × out_scale."""
    v_scale = call_scales.v_scale
    if cfg.HAS_V_SCALE:
        v_scale = v_scale * gl.load(call_scales.V_SCALE + kv_head_of(work_tile, cfg) * cfg.V_SCALE_STRIDE)
    return v_scale


@gluon.jit
def init_acc_and_max(cfg: gl.constexpr):
    """Returns (acc_o, row_max) before the first block."""
    row_max = gl.full([ROWS_PER_WARPGROUP], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout(cfg)))
    return gl.full([ROWS_PER_WARPGROUP, cfg.DV], 0.0, gl.float32, acc_layout(cfg)), row_max


@gluon.jit
def make_mask_args(work_tile, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):
    """Returns the MaskArgs of this warpgroup's rows."""
    o_r = I_CONSUMER * ROWS_PER_WARPGROUP + gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, score_layout(cfg)))
    return MaskArgs(work_tile.causal_limit + o_r // cfg.HEADS_PER_TILE, work_tile.key_begin, work_tile.key_end)


@gluon.jit
def unmasked_range(work_tile, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):
    """Returns (first n_block, unmasked_begin, unmasked_end): all rows see every key of blocks in the range.

    The last n_block is never in the range: it is computed first, with a mask.
    """
    first_n_block = work_tile.n_block_end - work_tile.num_n_blocks
    FIRST_TOKEN: gl.constexpr = I_CONSUMER * (ROWS_PER_WARPGROUP // cfg.HEADS_PER_TILE)
    unmasked_end = gl.maximum(gl.minimum(work_tile.key_end, work_tile.causal_limit + FIRST_TOKEN + 1), 0) // cfg.BLOCK_N
    unmasked_end = gl.minimum(gl.maximum(unmasked_end, first_n_block), work_tile.n_block_end - 1)
    unmasked_begin = first_n_block
    if cfg.WINDOW > 0:
        key = gl.maximum(
            work_tile.causal_limit + FIRST_TOKEN + ROWS_PER_WARPGROUP // cfg.HEADS_PER_TILE - cfg.WINDOW, 0
        )
        unmasked_begin = gl.minimum(gl.maximum((key + cfg.BLOCK_N - 1) // cfg.BLOCK_N, first_n_block), unmasked_end)
    if cfg.HAS_NEW_KV:
        unmasked_begin = gl.minimum(
            gl.maximum((work_tile.key_begin + cfg.BLOCK_N - 1) // cfg.BLOCK_N, unmasked_begin), unmasked_end
        )
    return first_n_block, unmasked_begin, unmasked_end


@gluon.jit
def prepare_work_tile(
    work_tile, q_stages, call_scales, I_CONSUMER: gl.constexpr, DTYPE: gl.constexpr, cfg: gl.constexpr
):
    """Returns (query operand, score scales in base 2, MaskArgs) of a work tile whose query is loaded."""
    kv_head = kv_head_of(work_tile, cfg)
    score_scale = call_scales.score_scale
    if cfg.HAS_K_SCALE:
        score_scale = score_scale * gl.load(call_scales.K_SCALE + kv_head * cfg.K_SCALE_STRIDE)
    sign = gl.where(score_scale < 0, -1.0, 1.0)
    q, q_scales = prepare_query(q_stages, I_CONSUMER, sign, call_scales.rotation, kv_head, DTYPE, cfg)
    return q, gl.maximum(q_scales * (score_scale * sign), MIN_SCALE), make_mask_args(work_tile, I_CONSUMER, cfg)


@gluon.jit
def first_softmax_step(
    s, acc_and_max, mask_args, n_start, score_scales, tile_scale, softcap, DTYPE: gl.constexpr, cfg: gl.constexpr
):
    """Returns the softmax state after a work tile's first scores."""
    acc_o, row_max = acc_and_max
    if cfg.FP8_PV:
        row_max = FP8RowMax(row_max, row_max)
    p, p_sums, row_max, rescale = softmax_and_row_sums(
        s, row_max, mask_args, n_start, score_scales, tile_scale, softcap, True, cfg
    )
    if cfg.FP8_PV:
        zeros = fp8_p.init_half_acc(ROWS_PER_WARPGROUP, cfg)
        return fp8_p.FP8SoftmaxState(zeros, zeros, rescale, row_max, p_sums, fp8_p.pack_p_e4m3(p))
    else:
        return SoftmaxState(acc_o, row_max, p_sums, pack_p(p, DTYPE))


@gluon.jit
def mainloop(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages, iter, code_iter,
             work_tile, are_last, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Computes all blocks of a work tile but the first; returns (state, iter, code_iter)."""
    first_n_block, unmasked_begin, unmasked_end = unmasked_range(work_tile, I_CONSUMER, cfg)
    first_key = first_n_block * cfg.BLOCK_N
    n_start = (work_tile.n_block_end - 1) * cfg.BLOCK_N
    # Causal edge: masked.
    for n_block in range(unmasked_end, work_tile.n_block_end - 1):  # noqa: B007 - an underscore is a barrier already
        n_start -= cfg.BLOCK_N
        state = mainloop_step(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages,
                              iter, code_iter, n_start, are_last & (n_start == first_key), I_CONSUMER, True,
                              cfg)  # fmt: skip
        iter += 1
        code_iter += 1
    # Unmasked blocks.
    for n_block in range(unmasked_begin, unmasked_end):  # noqa: B007
        n_start -= cfg.BLOCK_N
        state = mainloop_step(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages,
                              iter, code_iter, n_start, are_last & (n_start == first_key), I_CONSUMER, False,
                              cfg)  # fmt: skip
        iter += 1
        code_iter += 1
    # Start of the window, or keys before the first token: masked.
    if cfg.WINDOW > 0 or cfg.HAS_NEW_KV:
        for n_block in range(first_n_block, unmasked_begin):  # noqa: B007
            n_start -= cfg.BLOCK_N
            state = mainloop_step(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages,
                                  v_stages, iter, code_iter, n_start, are_last & (n_start == first_key), I_CONSUMER,
                                  True, cfg)  # fmt: skip
            iter += 1
            code_iter += 1
    return state, iter, code_iter


@gluon.jit
def consumer(tensors, call_scales, strides, q_stages, tile_info, k_stages, v_stages, stored_scales,
             I_CONSUMER: gl.constexpr, DTYPE: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Computes 64 rows of every work tile of this CTA: first block, main loop, epilogue."""
    OUT, LSE, SINKS = tensors
    softcap = call_scales.softcap
    ZERO_INVALID: gl.constexpr = not cfg.CONVERTS_KV
    V: gl.constexpr = v_stages.tiles.dtype
    num_done, iter = 0, 0  # work tiles done, blocks begun
    mbarrier.wait(q_stages.full_barriers.index(I_CONSUMER), 0)
    work_tile, _prefix = read_work_tile(tile_info.index(I_CONSUMER))
    if work_tile.num_n_blocks > 0:
        q, score_scales, mask_args = prepare_work_tile(work_tile, q_stages, call_scales, I_CONSUMER, DTYPE, cfg)
        n_start = (work_tile.n_block_end - 1) * cfg.BLOCK_N
        # First block of the first work tile: QK, mask and softmax.
        s = start_qk(q, k_stages, iter, cfg)
        k_scales = load_k_scales(stored_scales, iter, cfg)
        s = apply_k_scales(warpgroup_mma_wait(0, [s]), k_scales, cfg)
        tile_scale = load_tile_v_scale(stored_scales, iter, cfg)
        consumer_release(k_stages.empty_barriers, iter, cfg.STAGES)
        mbarrier.arrive(q_stages.empty_barriers.index(I_CONSUMER), count=1, pred=work_tile.num_n_blocks == 1)
        state = first_softmax_step(
            s, init_acc_and_max(cfg), mask_args, n_start, score_scales, tile_scale, softcap, V, cfg
        )
        wait_v(v_stages, iter, mask_args, n_start, has_invalid_keys(mask_args, n_start, cfg), ZERO_INVALID, cfg)
        iter += 1
        while work_tile.num_n_blocks > 0:
            state, iter, _codes = mainloop(state, mask_args, q, score_scales, stored_scales, softcap, q_stages,
                                           k_stages, v_stages, iter, iter, work_tile, True, I_CONSUMER,
                                           cfg)  # fmt: skip
            # The last PV of a work tile overlaps the first QK of the next. After the last work tile, QK runs on
            # whatever the stage holds, and its scores are dropped.
            finished_tile = work_tile
            num_done += 1
            mbarrier.wait(q_stages.full_barriers.index(I_CONSUMER), num_done & 1)
            work_tile, _prefix = read_work_tile(tile_info.index(I_CONSUMER))
            has_next = work_tile.num_n_blocks > 0
            q, score_scales, mask_args = prepare_work_tile(work_tile, q_stages, call_scales, I_CONSUMER, DTYPE, cfg)
            n_start = (work_tile.n_block_end - 1) * cfg.BLOCK_N
            if cfg.FP8_PV:
                s, acc_low, acc_high = start_qk_and_half_pv(state, q, k_stages, v_stages, iter, has_next, cfg)
            else:
                s = start_qk(q, k_stages, iter, cfg, has_next)
                acc_o = start_pv(state, v_stages, iter - 1, cfg)
            tile_scale = load_tile_v_scale(stored_scales, iter, cfg)
            k_scales = load_k_scales(stored_scales, iter, cfg)
            s = apply_k_scales(warpgroup_mma_wait(1, [s]), k_scales, cfg)
            mbarrier.arrive(k_stages.empty_barriers.index(stage_and_phase(iter, cfg.STAGES)[0]), count=1, pred=has_next)
            mbarrier.arrive(q_stages.empty_barriers.index(I_CONSUMER), count=1, pred=work_tile.num_n_blocks == 1)
            # Finish PV, release V.
            if cfg.FP8_PV:
                acc_high = fp8_p.rescale_and_add(state.acc_high, warpgroup_mma_wait(0, [acc_high]), state.rescale)
                acc_o, row_max = fp8_p.concat_halves(acc_low, acc_high, acc_layout(cfg)), state.row_max.row_max
            else:
                acc_o, row_max = warpgroup_mma_wait(0, [acc_o]), state.row_max
            consumer_release(v_stages.empty_barriers, iter - 1, cfg.STAGES)
            # Epilogue of the finished work tile.
            if cfg.V_ROTATION.ENABLED:
                acc_o = unrotate_acc(acc_o, call_scales.rotation, kv_head_of(finished_tile, cfg), cfg)
            v_scale = load_v_scale(finished_tile, call_scales, cfg)
            store_output(
                OUT, LSE, SINKS, finished_tile, SoftmaxState(acc_o, row_max, state.row_sum, state.p_packed), v_scale,
                strides, I_CONSUMER, cfg,
            )  # fmt: skip
            # Mask and softmax of the next work tile's first block.
            state = first_softmax_step(
                s, init_acc_and_max(cfg), mask_args, n_start, score_scales, tile_scale, softcap, V, cfg
            )
            wait_v(
                v_stages, iter, mask_args, n_start, has_next & has_invalid_keys(mask_args, n_start, cfg), ZERO_INVALID,
                cfg, has_next,
            )  # fmt: skip
            iter += 1
