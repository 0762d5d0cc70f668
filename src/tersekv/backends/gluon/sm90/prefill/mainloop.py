"""The consumer of prefill: two warpgroups with 64 query rows each of every work tile of their CTA, in one partition.

They run the same instructions, so that these take half as much of the instruction cache as in two partitions, and are
not in lockstep: `parts/warp_mbarriers`.

QK of a block overlaps PV of the block before, across work tiles too. n_blocks run from the last to the first: the
causal mask applies to the first ones, and the long loop needs no mask but a window's, at its end.

Heads wider than 256 (`cfg.COLUMN_SPLIT`): stages hold parts of tiles and one tile of V, so that V is waited for just
before PV. The other consumer (`columns`) multiplies the other half of V's columns by the P published here.

Mask: `parts/mask.apply_mask`, in `scaled_softmax_to_p_row_max_and_rescale`. Full stage: `wait_k_and_start_qk`
and `wait_v_and_zero_oob_rows`; `mainloop_step` releases stages. Rescale: end of `mainloop_step`, and between both
kinds of blocks `mainloop_step_new_to_cached`. Epilogue: `store_output_and_lse`. Combine: none.
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
from ..parts.epilogue import compute_acc_scale_and_lse
from ..parts.hadamard import RotationTensors
from ..parts.online_softmax import (
    FP8RowMax,
    pack_p_16bit,
    row_sums_by_lane,
    scaled_softmax_to_p_row_max_and_rescale,
    unpack_p_16bit,
)
from ..parts.pipeline import producer_acquire, stage_and_phase, sync_and_arrive
from ..parts.warp_mbarriers import (
    first_empty,
    release_stage,
    warp_arrive,
    warp_scheduler_barrier_arrive,
    warp_scheduler_barrier_init,
    warp_scheduler_barrier_sync,
    warp_wait,
)
from .epilogue import scale_and_rotate_acc_rows_of_new_v, store_output_columns, unrotate_and_scale_acc_rows
from .producer import PipelineStages
from .query import prepare_loaded_query_and_q_scales, score_layout, view_query_parts_as
from .tile_scheduler import (
    NUM_READERS,
    WorkTile,
    first_column_of_head,
    kv_head_of,
    read_work_tile_and_cached_range,
)

MIN_SCALE = gl.constexpr(1e-30)  # of scores: −inf × MIN_SCALE is −inf
MIN_V_SCALE = gl.constexpr(1e-30)  # of cached V: acc_o is divided by it


class SoftmaxState(NamedTuple):
    """Of a work tile's rows: acc_o, running maximum (base 2), sum of P, and P of the last block, packed."""

    acc_o: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    p_packed: gl.tensor


class CallScales(NamedTuple):
    """Scales of scores (base 2) and of values × outputs; K_SCALE and V_SCALE, per head, still multiply them."""

    score_scale: gl.tensor
    K_SCALE: gl.tensor
    v_scale: gl.tensor
    V_SCALE: gl.tensor
    softcap: gl.tensor
    rotation: RotationTensors


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


class MaskArgs(NamedTuple):
    """The keys that the consumer's rows see."""

    causal_limit: gl.tensor  # last key that each row sees
    key_begin: gl.tensor  # first key that any row of the work tile sees
    key_end: gl.tensor  # end of the keys that any row sees


class TileVScale(NamedTuple):
    """The power of two divided out of the V scales of a tile with a scale per token."""

    log2_v_scale: gl.tensor
    inv_v_scale: gl.tensor


class SharedP(NamedTuple):
    """What the first consumer computes for both (COLUMN_SPLIT): of a block P and the rescale of acc_o before its PV, of
    a work tile acc_scale of its rows."""

    tiles: gl.shared_memory_descriptor
    rescales: gl.shared_memory_descriptor
    full_barriers: gl.shared_memory_descriptor
    empty_barriers: gl.shared_memory_descriptor
    acc_scales: gl.shared_memory_descriptor
    acc_full_barrier: gl.shared_memory_descriptor
    acc_empty_barrier: gl.shared_memory_descriptor


@gluon.constexpr_function
def acc_layout(cfg):
    # With a converter warpgroup ptxas allots 128 registers to an instruction: too few for 256 columns at once.
    return gl.NVMMADistributedLayout(
        [3, 0], [cfg.CONSUMER_WARPS, 1], [16, min(cfg.ACC_COLUMNS, 128 if cfg.CONVERTS_KV else 256), 16]
    )


# ---- ping-pong: warpgroups issue the MMAs of a block in turns, so that one's softmax overlaps the other's MMAs ----


@gluon.jit
def ping_pong_sync(cfg: gl.constexpr):
    """Waits for this warpgroup's turn to issue MMAs, if there are turns."""
    if cfg.PING_PONG:
        warp_scheduler_barrier_sync()


@gluon.jit
def ping_pong_arrive(cfg: gl.constexpr):
    """Lets the other warpgroup issue its MMAs."""
    if cfg.PING_PONG:
        warp_scheduler_barrier_arrive()


# ---- QK ----


@gluon.jit
def wait_k_and_start_qk(q, q_stages, k_stages, iter, cfg: gl.constexpr, must_wait=True):
    """Waits for a K tile and starts QK; returns scores [rows, BLOCK_N] in flight. Of parts, all but the last are
    released as soon as they are multiplied."""
    ACC: gl.constexpr = gl.int32 if cfg.QK_8BIT and cfg.K.CODE == "int8" else gl.float32
    zero = gl.full([cfg.CONSUMER_ROWS, cfg.BLOCK_N], 0, ACC, score_layout(cfg))
    if cfg.COLUMN_SPLIT:
        STAGES: gl.constexpr = k_stages.tiles.shape[0]
        q_parts = view_query_parts_as(q_stages, k_stages.tiles.dtype)
        s = zero
        for part in range(cfg.K_PARTS):
            stage, phase = stage_and_phase(iter * cfg.K_PARTS + part, STAGES)
            warp_wait(k_stages.address, stage, phase, must_wait)
            k = k_stages.tiles.index(stage).permute((1, 0))
            s = warpgroup_mma_wait(1, [warpgroup_mma(q_parts.index(part), k, s, is_async=True)])
            prev_stage, _ = stage_and_phase(iter * cfg.K_PARTS + part - 1, STAGES)
            release_stage(k_stages, prev_stage, (part > 0) & must_wait)
        return s
    else:
        stage, phase = stage_and_phase(iter, cfg.STAGES)
        warp_wait(k_stages.address, stage, phase, must_wait)
        return warpgroup_mma(q, k_stages.tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def release_k(k_stages, iter, cfg: gl.constexpr, enabled=True):
    """Releases a K tile after QK, of parts the last one."""
    stage, _ = stage_and_phase(iter * cfg.K_PARTS + (cfg.K_PARTS - 1), k_stages.tiles.shape[0])
    release_stage(k_stages, stage, enabled)


@gluon.jit
def load_k_token_scales_or_placeholder(stored_scales, iter, cfg: gl.constexpr):
    """Loads a tile's scales per key, if any: while QK runs, before its wait and before the K stage is released."""
    if cfg.K.TOKEN_SCALES:
        return stored_scales.k_scales_smem.index(stage_and_phase(iter, cfg.STAGES)[0]).load(
            gl.SliceLayout(0, score_layout(cfg))
        )
    else:
        return iter


@gluon.jit
def apply_k_scales(s, k_scales, cfg: gl.constexpr):
    """Returns scores in fp32, times the scales of their keys, if any."""
    s = s.to(gl.float32)
    if cfg.K.TOKEN_SCALES:
        s = s * k_scales[None, :]
    return s


# ---- mask and online softmax ----


@gluon.jit
def make_mask_args(work_tile, cfg: gl.constexpr):
    """Returns the MaskArgs of the consumer's rows."""
    o_r = gl.arange(0, cfg.CONSUMER_ROWS, gl.SliceLayout(1, score_layout(cfg)))
    return MaskArgs(work_tile.causal_limit + o_r // cfg.HEADS_PER_TILE, work_tile.key_begin, work_tile.key_end)


@gluon.jit
def lowest_n_block_and_unmasked_range(work_tile, cfg: gl.constexpr):
    """Returns (first n_block, unmasked_begin, unmasked_end): all rows see every key of blocks in the range.

    The last n_block is never in the range: it is computed first, with a mask.
    """
    first_n_block = work_tile.n_block_end - work_tile.num_n_blocks
    unmasked_end = gl.maximum(gl.minimum(work_tile.key_end, work_tile.causal_limit + 1), 0) // cfg.BLOCK_N
    unmasked_end = gl.minimum(gl.maximum(unmasked_end, first_n_block), work_tile.n_block_end - 1)
    unmasked_begin = first_n_block
    if cfg.WINDOW > 0:
        key = gl.maximum(work_tile.causal_limit + cfg.TOKENS_PER_TILE - cfg.WINDOW, 0)
        unmasked_begin = gl.minimum(gl.maximum((key + cfg.BLOCK_N - 1) // cfg.BLOCK_N, first_n_block), unmasked_end)
    if cfg.HAS_NEW_KV:
        unmasked_begin = gl.minimum(
            gl.maximum((work_tile.key_begin + cfg.BLOCK_N - 1) // cfg.BLOCK_N, unmasked_begin), unmasked_end
        )
    return first_n_block, unmasked_begin, unmasked_end


@gluon.jit
def has_invalid_keys(mask_args, n_start, cfg: gl.constexpr):
    """Returns whether a tile has keys outside [key_begin, key_end)."""
    return (n_start + cfg.BLOCK_N > mask_args.key_end) | (n_start < mask_args.key_begin)


@gluon.jit
def load_log2_and_inv_tile_v_scale(stored_scales, iter, cfg: gl.constexpr):
    """Returns the TileVScale of a tile whose K stage is full and not released yet."""
    if cfg.V.TOKEN_SCALES:
        x = stored_scales.tile_v_scales.index(stage_and_phase(iter, 2 * cfg.STAGES)[0]).load(
            gl.BlockedLayout([2], [32], [cfg.CONSUMER_WARPS], [0])
        )
        o = gl.arange(0, 2, x.type.layout)
        return TileVScale(gl.sum(gl.where(o == 0, x, 0.0), 0), gl.sum(gl.where(o == 1, x, 0.0), 0))
    else:
        return TileVScale(0.0, 0.0)


@gluon.jit
def softmax_p_lane_sums_max_and_rescale(
    s, row_max, mask_args, n_start, score_scales, tile_v_scale, softcap, MASKED: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Returns (P in fp32, row sums per lane, row_max, rescale) of a tile of scores."""
    p, row_max, rescale = scaled_softmax_to_p_row_max_and_rescale(
        s, row_max, mask_args.causal_limit - n_start, mask_args.key_begin - n_start, mask_args.key_end - n_start,
        score_scales, tile_v_scale.log2_v_scale, softcap, MASKED, cfg
    )  # fmt: skip
    p_sums = row_sums_by_lane(p)
    if cfg.V.TOKEN_SCALES:
        p_sums = p_sums * tile_v_scale.inv_v_scale
    return p, p_sums, row_max, rescale


# ---- PV ----


@gluon.jit
def zero_oob_v_rows_in_smem(smem_v, key_begin, key_end):
    """Zeros rows of V outside [key_begin, key_end): 0 × NaN is NaN."""
    CHUNK_ROWS: gl.constexpr = 16
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [gl.num_warps(), 1], [1, 0])
    o_n = gl.arange(0, CHUNK_ROWS, gl.SliceLayout(1, LOAD_LAYOUT))
    for i in gl.static_range(smem_v.shape[0] // CHUNK_ROWS):
        x = smem_v.slice(i * CHUNK_ROWS, CHUNK_ROWS).load(LOAD_LAYOUT)
        valid = (o_n >= key_begin - i * CHUNK_ROWS) & (o_n < key_end - i * CHUNK_ROWS)
        smem_v.slice(i * CHUNK_ROWS, CHUNK_ROWS).store(gl.where(valid[:, None], x, 0.0).to(smem_v.dtype))
    fence_async_shared()
    thread_barrier()


@gluon.jit
def wait_v_and_zero_oob_rows(
    v_stages, iter, mask_args, n_start, is_edge, ZERO_INVALID: gl.constexpr, cfg: gl.constexpr, must_wait=True
):
    """Waits for a V tile and, where it is at an edge, zeros its invalid rows."""
    stage, phase = stage_and_phase(iter, cfg.STAGES)
    warp_wait(v_stages.address, stage, phase, must_wait)
    if ZERO_INVALID:  # noqa: SIM102 - known to the compiler, unlike the other
        if is_edge:
            zero_oob_v_rows_in_smem(
                v_stages.tiles.index(stage), mask_args.key_begin - n_start, mask_args.key_end - n_start
            )


@gluon.jit
def start_pv(acc_o, p_packed, v_stages, iter, cfg: gl.constexpr):
    """Starts acc_o += PV of a tile whose V stage is full; returns acc_o in flight."""
    A: gl.constexpr = gl.DotOperandLayout(0, acc_layout(cfg), 2)
    stage, _ = stage_and_phase(iter, cfg.STAGES)
    p = unpack_p_16bit(p_packed, v_stages.tiles.dtype, A)
    if cfg.COLUMN_SPLIT:
        v = view_column_half_of_v_tile(v_stages, 0, cfg)
    else:
        v = v_stages.tiles.index(stage)
    return warpgroup_mma(p, v, acc_o, is_async=True)


@gluon.jit
def release_v(v_stages, stage, cfg: gl.constexpr):
    """Releases V of a block after PV."""
    if cfg.COLUMN_SPLIT:
        release_v_columns(v_stages, 0, cfg)
    else:
        release_stage(v_stages, stage)


# ---- PV of half of V's columns (COLUMN_SPLIT): the stages are the parts of one tile ----


@gluon.jit
def view_column_half_of_v_tile(v_parts, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):
    """Returns the columns of V that a consumer multiplies: [BLOCK_N, ACC_COLUMNS]."""
    SHAPE: gl.constexpr = [2, cfg.BLOCK_N, cfg.ACC_COLUMNS]
    return reinterpret(v_parts.tiles, v_parts.tiles.dtype, SHAPE, v_parts.tiles.layout).index(I_CONSUMER)


@gluon.jit
def wait_v_columns_and_zero_oob_rows(v_stages, iter, key_begin, key_end, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):
    """Waits for a consumer's half of a V tile, and zeros rows outside [key_begin, key_end), relative to the tile."""
    PARTS: gl.constexpr = cfg.V_PARTS // 2
    for part in gl.static_range(PARTS):
        warp_wait(v_stages.address, I_CONSUMER * PARTS + part, iter & 1)
    if not cfg.CONVERTS_KV:  # noqa: SIM102 - known to the compiler, unlike the other
        if (key_begin > 0) | (key_end < cfg.BLOCK_N):
            zero_oob_v_rows_in_smem(view_column_half_of_v_tile(v_stages, I_CONSUMER, cfg), key_begin, key_end)


@gluon.jit
def wait_last_block_v_columns_and_zero_oob(v_stages, iter, work_tile, cfg: gl.constexpr):
    """Does `wait_v_columns_and_zero_oob_rows` for the last tile of a work tile, which holds its first keys."""
    n_start = (work_tile.n_block_end - work_tile.num_n_blocks) * cfg.BLOCK_N
    wait_v_columns_and_zero_oob_rows(v_stages, iter, work_tile.key_begin - n_start, work_tile.key_end - n_start, 0, cfg)


@gluon.jit
def release_v_columns(v_stages, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):
    """Releases a consumer's half of V."""
    PARTS: gl.constexpr = cfg.V_PARTS // 2
    for part in gl.static_range(PARTS):
        release_stage(v_stages, I_CONSUMER * PARTS + part)


@gluon.jit
def store_p_and_rescale_for_second_consumer(shared_p, p, rescale, iter, P_DTYPE: gl.constexpr):
    """Stores a block's P and rescale for the other consumer."""
    tiles = reinterpret(shared_p.tiles, P_DTYPE, shared_p.tiles.shape, shared_p.tiles.layout)
    stage = producer_acquire(shared_p.empty_barriers, iter, tiles.shape[0])
    tiles.index(stage).store(p.to(P_DTYPE))
    shared_p.rescales.index(stage).store(rescale)
    fence_async_shared()
    sync_and_arrive(shared_p.full_barriers.index(stage))


# ---- PV in e4m3, which `precision="fast"` permits ----
# 8-bit WGMMA needs both operands K-major. So the converter transposes V: ldmatrix with two columns an element, then one
# byte permute of two keys and the two eight keys later. That permutes the keys of every 16 into the order in which a
# thread holds P: P becomes an operand without leaving its registers.
#
# 8-bit WGMMA accumulates with too few bits: each tile starts from 0 and is added in fp32. PV runs in two halves of V's
# columns, to save registers: the first is added while QK runs, the second is multiplied during the softmax.


class FP8SoftmaxState(NamedTuple):
    """As `SoftmaxState`, with acc_o in halves one block behind: `rescale` is still to be applied to them."""

    acc_left: gl.tensor
    acc_right: gl.tensor
    rescale: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    p_packed: gl.tensor


@gluon.constexpr_function
def half_acc_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [cfg.CONSUMER_WARPS, 1], [16, cfg.DV // 2, 32])


@gluon.jit
def init_half_acc(NUM_ROWS: gl.constexpr, cfg: gl.constexpr):
    """Returns half of acc_o before the first block: zeros [NUM_ROWS, DV / 2]."""
    return gl.full([NUM_ROWS, cfg.DV // 2], 0.0, gl.float32, half_acc_layout(cfg))


@gluon.jit
def split_keys_by_eight(x):
    """Returns (first, second) eight keys of every 16 of [rows, keys]: [rows, keys / 16, 8] each."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 16, 2, 8]), (0, 1, 3, 2)))


# Four P of a thread, two neighbouring keys of a row and the two eight keys later → four e4m3 codes.
_PACK_E4M3_PTX = gl.constexpr(
    """{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
)


@gluon.jit
def pack_p_e4m3(p):
    """Returns P as e4m3, four keys an int32: [rows, keys / 4]."""
    a, b = split_keys_by_eight(p)
    a0, a1 = gl.split(gl.reshape(a, [a.shape[0], a.shape[1], 4, 2]))
    b0, b1 = gl.split(gl.reshape(b, [b.shape[0], b.shape[1], 4, 2]))
    p_packed = gl.inline_asm_elementwise(_PACK_E4M3_PTX, "=r,f,f,f,f", [a0, a1, b0, b1], gl.int32, True, 1)
    return gl.reshape(p_packed, [p.shape[0], p.shape[1] // 4])


@gluon.jit
def start_half_pv_from_zero(p_operand, v_stages, iter, I_COLUMN_HALF: gl.constexpr, cfg: gl.constexpr):
    """Starts PV of a tile for half of V's columns; returns it in flight."""
    stage, _ = stage_and_phase(iter, cfg.STAGES)
    HALF_COLUMNS: gl.constexpr = cfg.DV // 2
    zero = gl.full([p_operand.shape[0], HALF_COLUMNS], 0.0, gl.float32, half_acc_layout(cfg))
    v = v_stages.tiles.index(stage).slice(I_COLUMN_HALF * HALF_COLUMNS, HALF_COLUMNS).permute((1, 0))
    return warpgroup_mma(p_operand, v, zero, use_acc=False, is_async=True)


@gluon.jit
def rescale_and_add(acc_o, product, rescale):
    """Returns acc_o × rescale + product."""
    return acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, acc_o.type.layout))[:, None] + product


@gluon.jit
def concat_halves(acc_left, acc_right, LAYOUT: gl.constexpr):
    """Returns both halves side by side, in LAYOUT."""
    x = gl.permute(gl.join(acc_left, acc_right), (0, 2, 1))
    return gl.convert_layout(gl.reshape(x, [acc_left.shape[0], 2 * acc_left.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.jit
def start_qk_add_left_pv_start_right_pv(state, q, q_stages, k_stages, v_stages, iter, has_next, cfg: gl.constexpr):
    """Returns (scores in flight, acc_left after PV, PV of the other half in flight), all by 8-bit MMAs."""
    # P to an MMA operand [rows, keys].
    # NOTE: pack the next P only after no MMA reads this one: ptxas gives both the same registers, and would serialize
    # the MMAs.
    p = state.p_packed
    low_bytes = gl.join(p.to(gl.int8), (p >> 8).to(gl.int8))
    high_bytes = gl.join((p >> 16).to(gl.int8), (p >> 24).to(gl.int8))
    codes = gl.permute(gl.join(low_bytes, high_bytes), (0, 1, 3, 2))
    codes = gl.reshape(codes, [p.shape[0], 4 * p.shape[1]]).to(gl.float8e4nv, bitcast=True)
    p_operand = gl.convert_layout(codes, gl.DotOperandLayout(0, half_acc_layout(cfg), 4), assert_trivial=True)
    # PV of the left half while QK runs, then of the right half.
    acc_left = start_half_pv_from_zero(p_operand, v_stages, iter - 1, 0, cfg)
    s = wait_k_and_start_qk(q, q_stages, k_stages, iter, cfg, has_next)
    acc_left = rescale_and_add(state.acc_left, warpgroup_mma_wait(1, [acc_left]), state.rescale)
    return s, acc_left, start_half_pv_from_zero(p_operand, v_stages, iter - 1, 1, cfg)


# ---- mainloop ----


@gluon.jit
def init_acc(cfg: gl.constexpr):
    """Returns acc_o before the first block."""
    return gl.full([cfg.CONSUMER_ROWS, cfg.ACC_COLUMNS], 0.0, gl.float32, acc_layout(cfg))


@gluon.jit
def init_acc_and_max(cfg: gl.constexpr):
    """Returns (acc_o, row_max) before the first block."""
    row_max = gl.full([cfg.CONSUMER_ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout(cfg)))
    return init_acc(cfg), row_max


@gluon.jit
def softmax_state_after_first_block(
    s, acc_and_max, mask_args, n_start, score_scales, tile_v_scale, softcap, shared_p, iter, P_DTYPE: gl.constexpr,
    cfg: gl.constexpr, store_shared_p=True,
):  # fmt: skip
    """Returns the softmax state after a work tile's first scores."""
    acc_o, row_max = acc_and_max
    if cfg.FP8_PV:
        row_max = FP8RowMax(row_max, row_max)
    p, p_sums, row_max, rescale = softmax_p_lane_sums_max_and_rescale(
        s, row_max, mask_args, n_start, score_scales, tile_v_scale, softcap, True, cfg
    )
    if cfg.COLUMN_SPLIT:  # noqa: SIM102 - known to the compiler, unlike the other
        if store_shared_p:
            store_p_and_rescale_for_second_consumer(shared_p, p, rescale, iter, P_DTYPE)
    if cfg.FP8_PV:
        zeros = init_half_acc(cfg.CONSUMER_ROWS, cfg)
        return FP8SoftmaxState(zeros, zeros, rescale, row_max, p_sums, pack_p_e4m3(p))
    else:
        return SoftmaxState(acc_o, row_max, p_sums, pack_p_16bit(p, P_DTYPE))


@gluon.jit
def mainloop_step(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages, shared_p,
                  iter, code_iter, n_start, is_last, MASKED: gl.constexpr,
                  cfg: gl.constexpr):  # fmt: skip
    """Computes QK and softmax of the block at key `n_start`, overlapped with PV of the block before."""
    # QK of this block, then PV of the block before.
    prev_stage, _ = stage_and_phase(iter - 1, cfg.STAGES)
    ping_pong_sync(cfg)
    if cfg.FP8_PV:
        s, acc_left, acc_right = start_qk_add_left_pv_start_right_pv(
            state, q, q_stages, k_stages, v_stages, iter, True, cfg
        )
    else:
        s = wait_k_and_start_qk(q, q_stages, k_stages, iter, cfg)
        if cfg.COLUMN_SPLIT:
            prev_start = n_start + cfg.BLOCK_N
            wait_v_columns_and_zero_oob_rows(
                v_stages, iter - 1, mask_args.key_begin - prev_start, mask_args.key_end - prev_start, 0, cfg
            )
        acc_o = start_pv(state.acc_o, state.p_packed, v_stages, iter - 1, cfg)
    ping_pong_arrive(cfg)
    tile_v_scale = load_log2_and_inv_tile_v_scale(stored_scales, code_iter, cfg)
    k_scales = load_k_token_scales_or_placeholder(stored_scales, iter, cfg)
    s = apply_k_scales(warpgroup_mma_wait(1, [s]), k_scales, cfg)
    # Release K, and Q after the last block.
    release_k(k_stages, iter, cfg)
    warp_arrive(q_stages.address, first_empty(NUM_READERS), is_last)
    # NOTE: ptxas moves no arithmetic across the branch of a wait. This one, which never waits, keeps the arrival before
    # the exponentials; the one below keeps the exponentials before the wait for PV, which they overlap.
    if (cfg.K.TOKEN_SCALES or cfg.V.TOKEN_SCALES) and not cfg.COLUMN_SPLIT:
        warp_wait(v_stages.address, prev_stage, stage_and_phase(iter - 1, cfg.STAGES)[1])
    # Mask and online softmax.
    p, p_sums, row_max, rescale = softmax_p_lane_sums_max_and_rescale(
        s, state.row_max, mask_args, n_start, score_scales, tile_v_scale, softcap, MASKED, cfg
    )
    L: gl.constexpr = gl.SliceLayout(1, state.row_sum.type.layout)
    row_sum = state.row_sum * gl.convert_layout(rescale, L)[:, None] + p_sums
    if not cfg.FP8_PV:
        p_packed = pack_p_16bit(p, v_stages.tiles.dtype)
    ZERO_INVALID: gl.constexpr = MASKED and (cfg.WINDOW > 0 or cfg.HAS_NEW_KV) and not cfg.CONVERTS_KV
    # Wait for V of this block; finish PV of the block before, release its stage and rescale acc_o.
    if cfg.COLUMN_SPLIT:
        store_p_and_rescale_for_second_consumer(shared_p, p, rescale, iter, v_stages.tiles.dtype)
    else:
        wait_v_and_zero_oob_rows(
            v_stages, iter, mask_args, n_start, has_invalid_keys(mask_args, n_start, cfg), ZERO_INVALID, cfg
        )
    if cfg.FP8_PV:
        acc_right = warpgroup_mma_wait(0, [acc_right])
        release_stage(v_stages, prev_stage)
        acc_right = rescale_and_add(state.acc_right, acc_right, state.rescale)
        return FP8SoftmaxState(acc_left, acc_right, rescale, row_max, row_sum, pack_p_e4m3(p))
    else:
        acc_o = warpgroup_mma_wait(0, [acc_o])
        release_v(v_stages, prev_stage, cfg)
        acc_o = acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, acc_o.type.layout))[:, None]
        return SoftmaxState(acc_o, row_max, row_sum, p_packed)


@gluon.jit
def mainloop_except_first_qk_and_last_pv(
    state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages, shared_p, iter, code_iter,
    work_tile, release_q, cfg: gl.constexpr):  # fmt: skip
    """Computes all blocks of a work tile but the first, up to the last PV; returns (state, iter, code_iter)."""
    first_n_block, unmasked_begin, unmasked_end = lowest_n_block_and_unmasked_range(work_tile, cfg)
    first_key = first_n_block * cfg.BLOCK_N
    n_start = (work_tile.n_block_end - 1) * cfg.BLOCK_N
    # Causal edge: masked.
    for n_block in range(unmasked_end, work_tile.n_block_end - 1):  # noqa: B007 - an underscore is a barrier already
        n_start -= cfg.BLOCK_N
        state = mainloop_step(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages,
                              shared_p, iter, code_iter, n_start, release_q & (n_start == first_key), True,
                              cfg)  # fmt: skip
        iter += 1
        code_iter += 1
    # Unmasked blocks.
    for n_block in range(unmasked_begin, unmasked_end):  # noqa: B007
        n_start -= cfg.BLOCK_N
        state = mainloop_step(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages,
                              shared_p, iter, code_iter, n_start, release_q & (n_start == first_key), False,
                              cfg)  # fmt: skip
        iter += 1
        code_iter += 1
    # Start of the window, or keys before the first token: masked.
    if cfg.WINDOW > 0 or cfg.HAS_NEW_KV:
        for n_block in range(first_n_block, unmasked_begin):  # noqa: B007
            n_start -= cfg.BLOCK_N
            state = mainloop_step(state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages,
                                  v_stages, shared_p, iter, code_iter, n_start, release_q & (n_start == first_key),
                                  True, cfg)  # fmt: skip
            iter += 1
            code_iter += 1
    return state, iter, code_iter


# ---- epilogue ----


@gluon.jit
def tokens_heads_and_mask_of_output_rows(work_tile, ROW_LAYOUT: gl.constexpr, cfg: gl.constexpr):
    """Returns (tokens, query heads, row exists) of a work tile's rows."""
    o_r = gl.arange(0, cfg.CONSUMER_ROWS, ROW_LAYOUT)
    token = o_r // cfg.HEADS_PER_TILE
    m_row = token < work_tile.num_tokens_left
    q_heads = (work_tile.head_tile * cfg.HEADS_PER_TILE + o_r % cfg.HEADS_PER_TILE).to(gl.int64)
    return (work_tile.q_row + token).to(gl.int64), q_heads, m_row


@gluon.jit
def store_output_and_lse(OUT, LSE, SINKS, work_tile, state, v_scale, strides, shared_p, num_done,
                         cfg: gl.constexpr):  # fmt: skip
    """Epilogue: stores output rows and LSE of a work tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, state.acc_o.type.layout)
    row_max = gl.convert_layout(state.row_max, ROW)
    row_sum = gl.convert_layout(gl.sum(state.row_sum, 1), ROW)
    tokens, q_heads, m_row = tokens_heads_and_mask_of_output_rows(work_tile, ROW, cfg)
    acc_scale, lse = compute_acc_scale_and_lse(row_max, row_sum, v_scale, SINKS, q_heads, m_row, cfg)
    if cfg.COLUMN_SPLIT:
        # acc_scale for the other consumer.
        mbarrier.wait(shared_p.acc_empty_barrier.index(0), (num_done & 1) ^ 1)
        shared_p.acc_scales.store(acc_scale)
        sync_and_arrive(shared_p.acc_full_barrier.index(0))
    first_column = 0 - first_column_of_head(kv_head_of(work_tile, cfg), True, cfg)
    store_output_columns(OUT, state.acc_o, acc_scale, (tokens, q_heads, m_row), strides, first_column, cfg)
    if cfg.HAS_LSE:
        gl.store(LSE + tokens * strides[2] + q_heads * strides[3], lse, mask=m_row)


# ---- consumer ----


@gluon.jit
def prepare_loaded_query_scales_and_mask_args(
    work_tile, q_stages, call_scales, LOADED_Q_DTYPE: gl.constexpr, cfg: gl.constexpr
):
    """Returns (query operand, score scales in base 2, MaskArgs) of a work tile whose query is loaded."""
    kv_head = kv_head_of(work_tile, cfg)
    score_scale = call_scales.score_scale
    if cfg.HAS_K_SCALE:
        score_scale = score_scale * gl.load(call_scales.K_SCALE + kv_head * cfg.K_SCALE_STRIDE)
    sign = gl.where(score_scale < 0, -1.0, 1.0)
    q, q_scales = prepare_loaded_query_and_q_scales(q_stages, sign, call_scales.rotation, kv_head, LOADED_Q_DTYPE, cfg)
    score_scales = q_scales * (score_scale * sign)
    score_scales = gl.where(score_scales < MIN_SCALE, MIN_SCALE, score_scales)  # NaN stays
    return q, score_scales, make_mask_args(work_tile, cfg)


@gluon.jit
def consumer(args, Q_DTYPE: gl.constexpr, cfg: gl.constexpr):
    """Computes every work tile of this CTA: first block, main loop, epilogue."""
    (out_lse_and_sinks, call_scales, strides, q_stages, tile_info, k_stages, v_stages, stored_scales,
     shared_p) = args  # fmt: skip
    OUT, LSE, SINKS = out_lse_and_sinks
    softcap = call_scales.softcap
    ZERO_INVALID: gl.constexpr = not cfg.CONVERTS_KV
    V: gl.constexpr = v_stages.tiles.dtype
    num_done, iter = 0, 0  # work tiles done, blocks begun
    if cfg.PING_PONG:
        warp_scheduler_barrier_init()
    warp_wait(q_stages.address, 0, 0)
    work_tile, _cached_range = read_work_tile_and_cached_range(tile_info.index(0), False)
    if work_tile.num_n_blocks > 0:
        q, score_scales, mask_args = prepare_loaded_query_scales_and_mask_args(
            work_tile, q_stages, call_scales, Q_DTYPE, cfg
        )
        n_start = (work_tile.n_block_end - 1) * cfg.BLOCK_N
        # First block of the first work tile: QK, mask and softmax.
        ping_pong_sync(cfg)
        s = wait_k_and_start_qk(q, q_stages, k_stages, iter, cfg)
        ping_pong_arrive(cfg)
        k_scales = load_k_token_scales_or_placeholder(stored_scales, iter, cfg)
        s = apply_k_scales(warpgroup_mma_wait(0, [s]), k_scales, cfg)
        tile_v_scale = load_log2_and_inv_tile_v_scale(stored_scales, iter, cfg)
        release_k(k_stages, iter, cfg)
        warp_arrive(q_stages.address, first_empty(NUM_READERS), work_tile.num_n_blocks == 1)
        state = softmax_state_after_first_block(
            s, init_acc_and_max(cfg), mask_args, n_start, score_scales, tile_v_scale, softcap, shared_p, iter, V, cfg,
        )  # fmt: skip
        if not cfg.COLUMN_SPLIT:
            wait_v_and_zero_oob_rows(
                v_stages, iter, mask_args, n_start, has_invalid_keys(mask_args, n_start, cfg), ZERO_INVALID, cfg
            )
        iter += 1
        while work_tile.num_n_blocks > 0:
            state, iter, _codes = mainloop_except_first_qk_and_last_pv(
                state, mask_args, q, score_scales, stored_scales, softcap, q_stages, k_stages, v_stages, shared_p, iter,
                iter, work_tile, True, cfg)  # fmt: skip
            # The last PV of a work tile overlaps the wait for the next query, and its epilogue the next QK. After the
            # last work tile, QK runs on whatever the stage holds, and its scores are dropped.
            if cfg.EARLY_PV:
                acc_o = start_pv(state.acc_o, state.p_packed, v_stages, iter - 1, cfg)
            finished_tile = work_tile
            num_done += 1
            warp_wait(q_stages.address, 0, num_done & 1)
            work_tile, _cached_range = read_work_tile_and_cached_range(tile_info.index(0), False)
            has_next = work_tile.num_n_blocks > 0
            q, score_scales, mask_args = prepare_loaded_query_scales_and_mask_args(
                work_tile, q_stages, call_scales, Q_DTYPE, cfg
            )
            n_start = (work_tile.n_block_end - 1) * cfg.BLOCK_N
            ping_pong_sync(cfg)
            if cfg.FP8_PV:
                s, acc_left, acc_right = start_qk_add_left_pv_start_right_pv(
                    state, q, q_stages, k_stages, v_stages, iter, has_next, cfg
                )
            else:
                if cfg.COLUMN_SPLIT:
                    wait_last_block_v_columns_and_zero_oob(v_stages, iter - 1, finished_tile, cfg)
                if not cfg.EARLY_PV:
                    acc_o = start_pv(state.acc_o, state.p_packed, v_stages, iter - 1, cfg)
                s = wait_k_and_start_qk(q, q_stages, k_stages, iter, cfg, has_next)
            ping_pong_arrive(cfg)
            # Finish PV, release V.
            if cfg.FP8_PV:
                s = warpgroup_mma_wait(1, [s])
                acc_right = rescale_and_add(state.acc_right, warpgroup_mma_wait(0, [acc_right]), state.rescale)
                acc_o, row_max = concat_halves(acc_left, acc_right, acc_layout(cfg)), state.row_max.row_max
            else:
                acc_o, row_max = warpgroup_mma_wait(1, [acc_o]), state.row_max
            release_v(v_stages, stage_and_phase(iter - 1, cfg.STAGES)[0], cfg)
            # Epilogue of the finished work tile.
            if cfg.V_ROTATION.ENABLED:
                acc_o = unrotate_and_scale_acc_rows(acc_o, call_scales.rotation, kv_head_of(finished_tile, cfg), cfg)
            v_scale = call_scales.v_scale  # × out_scale
            if cfg.HAS_V_SCALE:
                v_scale = v_scale * gl.load(call_scales.V_SCALE + kv_head_of(finished_tile, cfg) * cfg.V_SCALE_STRIDE)
            store_output_and_lse(
                OUT, LSE, SINKS, finished_tile, SoftmaxState(acc_o, row_max, state.row_sum, state.p_packed), v_scale,
                strides, shared_p, num_done - 1, cfg,
            )  # fmt: skip
            # Finish QK, release K; mask and softmax of the next work tile's first block.
            if not cfg.FP8_PV:
                s = warpgroup_mma_wait(0, [s])
            tile_v_scale = load_log2_and_inv_tile_v_scale(stored_scales, iter, cfg)
            s = apply_k_scales(s, load_k_token_scales_or_placeholder(stored_scales, iter, cfg), cfg)
            release_k(k_stages, iter, cfg, has_next)
            warp_arrive(q_stages.address, first_empty(NUM_READERS), work_tile.num_n_blocks == 1)
            state = softmax_state_after_first_block(
                s, init_acc_and_max(cfg), mask_args, n_start, score_scales, tile_v_scale, softcap, shared_p, iter, V,
                cfg, has_next,
            )  # fmt: skip
            if not cfg.COLUMN_SPLIT:
                is_edge = has_next & has_invalid_keys(mask_args, n_start, cfg)
                wait_v_and_zero_oob_rows(v_stages, iter, mask_args, n_start, is_edge, ZERO_INVALID, cfg, has_next)
            iter += 1


# ---- consumer where K and V of the new tokens are arguments: a work tile has new and cached blocks ----
# New blocks come first, in their own 16 bits; then the query is converted for cached K, and acc_o continues divided by
# the cached V scale. Both kinds of tile use the same stages.


@gluon.jit
def view_stages_as(stages, DTYPE: gl.constexpr):
    """Returns a view of the stages as another 16-bit dtype."""
    return PipelineStages(
        reinterpret(stages.tiles, DTYPE, stages.tiles.shape, stages.tiles.layout),
        stages.full_barriers,
        stages.empty_barriers,
        stages.address,
    )


@gluon.jit
def mainloop_step_new_to_cached(state, mask_args, q, score_scales, stored_scales, cached_v_scale, call_scales, kv_head,
                                q_stages, k_stages, v_stages, new_v_stages, shared_p, new_tile, iter, code_iter,
                                n_start, is_last, cfg: gl.constexpr,
                                new_cfg: gl.constexpr):  # fmt: skip
    """Does `mainloop_step` for the first cached block; PV is of the last new block."""
    prev_stage, _ = stage_and_phase(iter - 1, cfg.STAGES)
    # QK of this block, PV of the last new block.
    s = wait_k_and_start_qk(q, q_stages, k_stages, iter, cfg)
    if cfg.COLUMN_SPLIT:
        wait_last_block_v_columns_and_zero_oob(new_v_stages, iter - 1, new_tile, new_cfg)
    acc_o = start_pv(state.acc_o, state.p_packed, new_v_stages, iter - 1, new_cfg)
    tile_v_scale = load_log2_and_inv_tile_v_scale(stored_scales, code_iter, cfg)
    k_scales = load_k_token_scales_or_placeholder(stored_scales, iter, cfg)
    s = apply_k_scales(warpgroup_mma_wait(1, [s]), k_scales, cfg)
    release_k(k_stages, iter, cfg)
    warp_arrive(q_stages.address, first_empty(NUM_READERS), is_last)
    # Mask and online softmax.
    p, p_sums, row_max, rescale = softmax_p_lane_sums_max_and_rescale(
        s, state.row_max, mask_args, n_start, score_scales, tile_v_scale, call_scales.softcap, True, cfg
    )
    row_sum = state.row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, state.row_sum.type.layout))[:, None] + p_sums
    p_packed = pack_p_16bit(p, v_stages.tiles.dtype)
    ZERO_INVALID: gl.constexpr = not cfg.CONVERTS_KV
    if cfg.COLUMN_SPLIT:
        store_p_and_rescale_for_second_consumer(shared_p, p, rescale / cached_v_scale, iter, v_stages.tiles.dtype)
    else:
        wait_v_and_zero_oob_rows(
            v_stages, iter, mask_args, n_start, has_invalid_keys(mask_args, n_start, cfg), ZERO_INVALID, cfg
        )
    # Finish PV, release V, rescale acc_o and divide it by the cached V scale.
    acc_o = warpgroup_mma_wait(0, [acc_o])
    release_v(v_stages, prev_stage, cfg)
    acc_o = acc_o * gl.convert_layout(rescale / cached_v_scale, gl.SliceLayout(1, acc_o.type.layout))[:, None]
    if cfg.V_ROTATION.ENABLED:
        acc_o = scale_and_rotate_acc_rows_of_new_v(acc_o, call_scales.rotation, kv_head, cfg)
    return SoftmaxState(acc_o, row_max, row_sum, p_packed)


@gluon.jit
def consumer_new_then_cached(
    args, Q_DTYPE: gl.constexpr, NEW_DTYPE: gl.constexpr, cfg: gl.constexpr, new_cfg: gl.constexpr
):
    """Computes every work tile of this CTA. new_cfg: `cfg` for new blocks."""
    (out_lse_and_sinks, call_scales, strides, q_stages, tile_info, k_stages, v_stages, stored_scales,
     shared_p) = args  # fmt: skip
    OUT, LSE, SINKS = out_lse_and_sinks
    new_k_stages, new_v_stages = view_stages_as(k_stages, NEW_DTYPE), view_stages_as(v_stages, NEW_DTYPE)
    new_q_stages = view_stages_as(q_stages, NEW_DTYPE)
    sign = gl.where(call_scales.new_score_scale < 0, -1.0, 1.0)
    num_done, iter, code_iter = 0, 0, 0  # work tiles done; blocks done, of them cached ones
    warp_wait(q_stages.address, 0, 0)
    work_tile, cached_range = read_work_tile_and_cached_range(tile_info.index(0), False)
    while work_tile.num_n_blocks > 0:
        has_no_cached = cached_range.num_n_blocks == 0
        # First new block: QK, mask, softmax.
        q, q_scales = prepare_loaded_query_and_q_scales(
            new_q_stages, sign, call_scales.rotation, kv_head_of(work_tile, cfg), Q_DTYPE, new_cfg
        )
        score_scales = gl.maximum(q_scales * (call_scales.new_score_scale * sign), MIN_SCALE)
        mask_args = make_mask_args(work_tile, new_cfg)
        n_start = (work_tile.n_block_end - 1) * cfg.BLOCK_N
        s = warpgroup_mma_wait(0, [wait_k_and_start_qk(q, q_stages, new_k_stages, iter, new_cfg)])
        release_k(k_stages, iter, cfg)
        warp_arrive(q_stages.address, first_empty(NUM_READERS), has_no_cached & (work_tile.num_n_blocks == 1))
        tile_v_scale = load_log2_and_inv_tile_v_scale(stored_scales, code_iter, new_cfg)
        state = softmax_state_after_first_block(
            s, init_acc_and_max(cfg), mask_args, n_start, score_scales, tile_v_scale, call_scales.softcap, shared_p,
            iter, NEW_DTYPE, new_cfg,
        )  # fmt: skip
        if not cfg.COLUMN_SPLIT:
            wait_v_and_zero_oob_rows(
                new_v_stages, iter, mask_args, n_start, has_invalid_keys(mask_args, n_start, new_cfg), True, new_cfg
            )
        iter += 1
        # Other new blocks.
        state, iter, _code_iter = mainloop_except_first_qk_and_last_pv(
            state, mask_args, q, score_scales, stored_scales, call_scales.softcap, q_stages, new_k_stages, new_v_stages,
            shared_p, iter, iter, work_tile, has_no_cached, new_cfg)  # fmt: skip
        # Scales of cached K and V.
        kv_head = kv_head_of(work_tile, cfg)
        cached_score_scale, v_unit = call_scales.cached_score_scale, call_scales.v_scale
        if cfg.HAS_K_SCALE:
            cached_score_scale = cached_score_scale * gl.load(call_scales.K_SCALE + kv_head * cfg.K_SCALE_STRIDE)
        if cfg.HAS_V_SCALE:
            v_unit = v_unit * gl.load(call_scales.V_SCALE + kv_head * cfg.V_SCALE_STRIDE)
        v_unit = gl.where(gl.abs(v_unit) < MIN_V_SCALE, MIN_V_SCALE, v_unit)
        v_unit = gl.where(has_no_cached, 1.0, v_unit)
        if has_no_cached:
            if cfg.COLUMN_SPLIT:
                wait_last_block_v_columns_and_zero_oob(new_v_stages, iter - 1, work_tile, new_cfg)
            acc_o = warpgroup_mma_wait(0, [start_pv(state.acc_o, state.p_packed, new_v_stages, iter - 1, new_cfg)])
            state = SoftmaxState(acc_o, state.row_max, state.row_sum, state.p_packed)
        else:
            # Cached blocks. Names of their own: the types differ from those of new blocks.
            cached_scales = cached_score_scale * sign
            cached_sign = gl.where(cached_scales < 0, -1.0, 1.0)
            cached_q, cached_q_scales = prepare_loaded_query_and_q_scales(
                q_stages, cached_sign, call_scales.rotation, kv_head_of(work_tile, cfg), NEW_DTYPE, cfg
            )
            cached_scales = gl.maximum(cached_q_scales * (cached_scales * cached_sign), MIN_SCALE)
            cached_tile = WorkTile(work_tile.q_row, work_tile.num_tokens_left, cached_range.causal_limit,
                                   cached_range.key_end, cached_range.num_n_blocks, cached_range.n_block_end,
                                   cached_range.key_begin, work_tile.head_tile, work_tile.i_request)  # fmt: skip
            cached_mask_args = make_mask_args(cached_tile, cfg)
            state = mainloop_step_new_to_cached(state, cached_mask_args, cached_q, cached_scales, stored_scales, v_unit,
                                                call_scales, kv_head_of(work_tile, cfg), q_stages, k_stages, v_stages,
                                                new_v_stages, shared_p, work_tile, iter, code_iter,
                                                (cached_range.n_block_end - 1) * cfg.BLOCK_N,
                                                cached_range.num_n_blocks == 1, cfg, new_cfg)  # fmt: skip
            state, iter, code_iter = mainloop_except_first_qk_and_last_pv(
                state, cached_mask_args, cached_q, cached_scales, stored_scales, call_scales.softcap, q_stages,
                k_stages, v_stages, shared_p, iter + 1, code_iter + 1, cached_tile, True, cfg)  # fmt: skip
            if cfg.COLUMN_SPLIT:
                wait_last_block_v_columns_and_zero_oob(v_stages, iter - 1, cached_tile, cfg)
            acc_o = warpgroup_mma_wait(0, [start_pv(state.acc_o, state.p_packed, v_stages, iter - 1, cfg)])
            if cfg.V_ROTATION.ENABLED:
                acc_o = unrotate_and_scale_acc_rows(acc_o, call_scales.rotation, kv_head_of(work_tile, cfg), cfg)
            state = SoftmaxState(acc_o, state.row_max, state.row_sum, state.p_packed)
        # Epilogue.
        release_v(v_stages, stage_and_phase(iter - 1, cfg.STAGES)[0], cfg)
        store_output_and_lse(OUT, LSE, SINKS, work_tile, state, v_unit * call_scales.out_scale, strides, shared_p,
                             num_done, cfg)  # fmt: skip
        num_done += 1
        warp_wait(q_stages.address, 0, num_done & 1)
        work_tile, cached_range = read_work_tile_and_cached_range(tile_info.index(0), False)
