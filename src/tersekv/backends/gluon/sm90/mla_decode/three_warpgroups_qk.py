"""The QK warpgroup of MLA decode over 8-bit latents (three_warpgroups.py): QK and online softmax.

Mask: `apply_mask`; lazy row_max and rescale: `qk_softmax_warpgroup`, which also waits for a free P stage;
combine: `combine.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import thread_barrier
from ..parts.combine import count_splits, store_split_metadata
from ..parts.epilogue import finalize_softmax
from ..parts.online_softmax import LAZY_ROW_MAX_PTX
from ..parts.pipeline import sync_and_arrive
from ..parts.tile_scheduler import next_work_tile
from .params import make_uniform
from .three_warpgroups_query import BLOCK_M, QueryBlock, load_score_scales, token_and_head_of_q_rows
from .three_warpgroups_scales import SCALE_COLUMNS

BLOCK_N = gl.constexpr(64)  # keys
LANES_PER_ROW = gl.constexpr(4)  # lanes that hold a row of scores
KEY_HALVES = gl.constexpr(2)  # of a tile's keys: a half is dequantised at once
KEYS_PER_HALF = gl.constexpr(BLOCK_N.value // KEY_HALVES.value)
P_STAGES = gl.constexpr(2)  # tiles of P in shared memory
MMA_BATCHES = gl.constexpr(3)  # batches of MMAs that overlap the softmax


@gluon.jit
def start_qk_chunk(q_i, k_i, x, Q_TERMS: gl.constexpr):
    """Starts QK of a chunk of columns, for all terms of the query; returns it in flight."""
    if Q_TERMS == 2:
        x = warpgroup_mma(q_i.slice(BLOCK_M, BLOCK_M), k_i, x, use_acc=False, is_async=True)
        return warpgroup_mma(q_i.slice(0, BLOCK_M), k_i, x, is_async=True)
    else:
        return warpgroup_mma(q_i, k_i, x, use_acc=False, is_async=True)


@gluon.jit
def start_low_term_qk_batch(kv_stages, q, stage, opaque_zero, x, i_batch: gl.constexpr, cfg: gl.constexpr):
    """Starts batch i_batch of MMA_BATCHES of QK for the query's second terms and the rotary part.

    The second terms are 2^-4 of the first: one accumulator holds them all. A warp stalls when too many MMAs are in
    flight: they start in batches, with other work between.
    """
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = kv_stages.latents, kv_stages.pe
    q_nope, q_pe = q
    k_pe_stage = k_pe.index(stage).permute((1, 0))
    if i_batch == 0:
        x = warpgroup_mma(q_pe.index(opaque_zero).slice(BLOCK_M, BLOCK_M), k_pe_stage, x, use_acc=False, is_async=True)
    for i in gl.static_range(CHUNKS):
        if (i + 1) // 2 == i_batch:
            k_i = ckv.index(stage * CHUNKS + i).permute((1, 0))
            x = warpgroup_mma(q_nope.index(opaque_zero + i).slice(BLOCK_M, BLOCK_M), k_i, x, is_async=True)
    if i_batch == MMA_BATCHES - 1:
        x = warpgroup_mma(q_pe.index(opaque_zero).slice(0, BLOCK_M), k_pe_stage, x, is_async=True)
    return x


@gluon.jit
def arrive_p_full_if(p_full, is_set):
    """Signals P of the tile before, if there is one.

    Its PV should overlap this tile's softmax, not compete with its QK.
    """
    thread_barrier()
    mbarrier.arrive(p_full, pred=is_set)


@gluon.jit
def compute_scores(
    kv_stages, q, low_term_acc, stage, opaque_zero, p_full_args, Q_TERMS: gl.constexpr, S: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Returns QK of a tile: fp32 [BLOCK_M, BLOCK_N]; with two terms, `low_term_acc` holds the second
    and the rotary part.

    p_full_args: with one term, arguments of `arrive_p_full_if`, called once all MMAs have started
    """
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = kv_stages.latents, kv_stages.pe
    q_nope, q_pe = q
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S)
    q_0, k_0 = q_nope.index(opaque_zero).slice(0, BLOCK_M), ckv.index(stage * CHUNKS).permute((1, 0))
    x = warpgroup_mma(q_0, k_0, zero, use_acc=False, is_async=True)
    s = low_term_acc
    if Q_TERMS == 1:
        next_x = warpgroup_mma(
            q_pe.index(opaque_zero), k_pe.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(1, [x])
        x = next_x
    # One accumulator is in flight while the previous one is added.
    for i in gl.static_range(1, CHUNKS):
        k_i = ckv.index(stage * CHUNKS + i).permute((1, 0))
        next_x = warpgroup_mma(q_nope.index(opaque_zero + i).slice(0, BLOCK_M), k_i, zero, use_acc=False, is_async=True)
        if Q_TERMS == 1 and i == CHUNKS - 1:
            arrive_p_full_if(p_full_args[0], p_full_args[1])
        s += warpgroup_mma_wait(1, [x])
        x = next_x
    return s + warpgroup_mma_wait(0, [x])


@gluon.jit
def compute_scaled_scores(kv_stages, q, stage, opaque_zero, score_scales, scales_full, phase, p_full_args,
                          Q_TERMS: gl.constexpr, S: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Returns QK where each chunk of a key has a scale and the rotary part is bf16: fp32 [BLOCK_M, BLOCK_N].

    `prepare_group_scales` stores score_scales and signals scales_full.
    """
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = kv_stages.latents, kv_stages.pe
    q_nope, q_pe = q
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    S_R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S)
    zero_pe = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S_R)
    s_pe = warpgroup_mma(
        q_pe.index(opaque_zero), k_pe.index(stage).permute((1, 0)), zero_pe, use_acc=False, is_async=True
    )
    x = start_qk_chunk(q_nope.index(opaque_zero), ckv.index(stage * CHUNKS).permute((1, 0)), zero, Q_TERMS)
    mbarrier.wait(scales_full, phase)
    s = gl.convert_layout(warpgroup_mma_wait(Q_TERMS, [s_pe]), S)
    for i in gl.static_range(1, CHUNKS):
        next_x = start_qk_chunk(
            q_nope.index(opaque_zero + i), ckv.index(stage * CHUNKS + i).permute((1, 0)), zero, Q_TERMS
        )
        if i == CHUNKS - 1:
            arrive_p_full_if(p_full_args[0], p_full_args[1])
        s += warpgroup_mma_wait(Q_TERMS, [x]) * score_scales.index(SCALE_COLUMNS * stage + i - 1).load(ROW)[None, :]
        x = next_x
    return s + warpgroup_mma_wait(0, [x]) * score_scales.index(SCALE_COLUMNS * stage + CHUNKS - 1).load(ROW)[None, :]


@gluon.jit
def apply_mask(s, n_block, num_keys, num_q_rows, row_begin, cfg: gl.constexpr):
    """Returns scores with −inf where a query row does not see a key of n_block."""
    S: gl.constexpr = s.type.layout
    if (n_block + 1) * BLOCK_N > num_keys - num_q_rows + 1:
        o_n = n_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        position = num_keys - num_q_rows + (row_begin + gl.arange(0, BLOCK_M, gl.SliceLayout(1, S))) // cfg.GROUP
        s = gl.where((o_n < num_keys)[None, :] & (o_n[None, :] <= position[:, None]), s, float("-inf"))
    return s


@gluon.jit
def view_by_lane(s):
    """Returns a tile of scores viewed by the lanes that hold its keys: [BLOCK_M, BLOCK_N / 8, LANES_PER_ROW, 2]."""
    return gl.reshape(s, [BLOCK_M, BLOCK_N // 8, LANES_PER_ROW, 2])


@gluon.jit
def lane_row_max(s):
    """Returns each row's maximum over the scores that one thread holds: [BLOCK_M, LANES_PER_ROW]."""
    return gl.max(gl.max(view_by_lane(s), 3), 1)


@gluon.jit
def lane_row_sum(p):
    """Returns each row's sum over the P that one thread holds: [BLOCK_M, LANES_PER_ROW]."""
    return gl.sum(gl.sum(view_by_lane(p), 3), 1)


@gluon.jit
def exp2_of_scores(s, row_scales, safe_max, cfg: gl.constexpr):
    """Returns 2^(s × row_scales − safe_max); with group scales, the scores are scaled already."""
    safe_max = safe_max[:, None, :][:, :, :, None]
    x = view_by_lane(s)
    if not cfg.GROUP_SCALES:
        L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, x.type.layout)))
        x *= gl.convert_layout(row_scales, L)[:, None][:, :, None][:, :, :, None]
    return gl.convert_layout(gl.reshape(gl.exp2(x - safe_max), [BLOCK_M, BLOCK_N]), s.type.layout)


@gluon.jit
def split_columns(x):
    """Splits a tile into the left and the right half of its columns."""
    N: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, N]), (0, 2, 1)))


@gluon.jit
def store_p_halves(p, p_smem, p_stage):
    """Stores P in shared memory for the PV warpgroups, by halves of its keys."""
    left, right = split_columns(p.to(gl.float16))
    p_smem.index(p_stage * KEY_HALVES).store(left)
    p_smem.index(p_stage * KEY_HALVES + 1).store(right)


@gluon.jit
def qk_softmax_warpgroup(tensors, q, kv_stages, mbarriers, buffers, scales, cta_range, strides, STAGES: gl.constexpr,
                         PREFETCH_QK: gl.constexpr, Q_TERMS: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Computes QK and softmax of the CTA range.

    For every tile it stores P and rescale for the PV warpgroups; at the end of a work tile, in one more iteration,
    acc_scale.
    """
    i_cta, block, block_end, i_request, n_block_base = (
        cta_range.i_cta, cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    full, empty, p_full, p_empty = mbarriers.full, mbarriers.empty, mbarriers.p_full, mbarriers.p_empty
    rescales, rescale_flags, score_scales, uniform_smem = (
        buffers.rescales, buffers.rescale_flags, buffers.score_scales, buffers.uniform_smem,
    )  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    LANE_LAYOUT: gl.constexpr = lane_row_max(gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S)).type.layout
    h = i_cta % cfg.HEADS
    kv_iter, p_iter, num_work_tiles = 0, 0, 0
    while block < block_end:
        work_tile = next_work_tile(
            tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, block, block_end, i_request, n_block_base, cfg
        )
        i_request, n_block_base, n_block_begin, n_block_end, num_keys = (
            work_tile.i_request, work_tile.n_block_base, work_tile.n_block_begin, work_tile.n_block_end,
            work_tile.num_keys,
        )  # fmt: skip
        if cfg.GROUP_SCALES:  # else the compiler knows that they are uniform
            n_block_begin, n_block_end, num_keys = (
                make_uniform(uniform_smem, 0, n_block_begin),
                make_uniform(uniform_smem, 1, n_block_end),
                make_uniform(uniform_smem, 2, num_keys),
            )
        mbarrier.wait(mbarriers.q_full.index(0), num_work_tiles & 1)
        row_scales = load_score_scales(buffers.q_scales, scales.score_scale, ROW)
        row_max = gl.full([BLOCK_M, LANES_PER_ROW], float("-inf"), gl.float32, LANE_LAYOUT)
        row_sum = gl.full([BLOCK_M, LANES_PER_ROW], 0.0, gl.float32, LANE_LAYOUT)
        zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S)
        low_term_acc = zero
        # Prologue: QK of second terms for the first tile.
        if PREFETCH_QK:
            mbarrier.wait(full.index(kv_iter % STAGES), (kv_iter // STAGES) & 1)
            for i in gl.static_range(MMA_BATCHES):
                low_term_acc = start_low_term_qk_batch(
                    kv_stages, q, kv_iter % STAGES, n_block_begin >> 30, low_term_acc, i, cfg
                )
            low_term_acc = warpgroup_mma_wait(0, [low_term_acc])
        for n_block in range(n_block_begin, n_block_end):
            stage = kv_iter % STAGES
            if not PREFETCH_QK:
                mbarrier.wait(full.index(stage), (kv_iter // STAGES) & 1)
            p_full_args = (p_full.index((p_iter + 1) % P_STAGES), n_block > n_block_begin)
            # QK.
            # NOTE: n_block >> 30 is 0. A constant would make the compiler keep, and spill, the descriptors of q.
            if cfg.GROUP_SCALES:
                phase = (kv_iter // STAGES) & 1
                s = compute_scaled_scores(
                    kv_stages, q, stage, n_block >> 30, score_scales, mbarriers.scales_full.index(stage), phase,
                    p_full_args, Q_TERMS, S, cfg,
                )  # fmt: skip
                # The key's largest scale joins the exponent: the ratios to it, which multiply V, lie in [−1, 1].
                s = (
                    s * row_scales[:, None]
                    + score_scales.index(SCALE_COLUMNS * stage + 4).load(gl.SliceLayout(0, S))[None, :]
                )
            else:
                s = compute_scores(kv_stages, q, low_term_acc, stage, n_block >> 30, p_full_args, Q_TERMS, S, cfg)
            if not cfg.GROUP_SCALES:
                sync_and_arrive(empty.index(stage))
            # The softmax overlaps second-term QK of the next tile; after the last tile its result is unused.
            if PREFETCH_QK:
                next_slot = (kv_iter + 1) % STAGES
                mbarrier.wait(full.index(next_slot), ((kv_iter + 1) // STAGES) & 1, pred=n_block + 1 < n_block_end)
                low_term_acc = start_low_term_qk_batch(kv_stages, q, next_slot, n_block >> 30, zero, 0, cfg)
            # Mask.
            s = apply_mask(s, n_block, num_keys, work_tile.num_q_rows, work_tile.m_block * cfg.BLOCK_M, cfg)
            # Online softmax, with lazy rescaling.
            lane_max = lane_row_max(s)
            if not cfg.GROUP_SCALES:
                lane_max *= gl.convert_layout(row_scales, gl.SliceLayout(1, LANE_LAYOUT))[:, None]
            row_max_new, needs_rescale = gl.inline_asm_elementwise(
                LAZY_ROW_MAX_PTX, "=&f,=&f,=&r,=&r,f,f,f,f", [lane_max, row_max], [gl.float32, gl.int32], False, 2
            )
            safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
            rescale = gl.where(row_max_new == row_max, 1.0, gl.exp2(row_max - safe_max))
            row_max = row_max_new
            if PREFETCH_QK:
                low_term_acc = start_low_term_qk_batch(kv_stages, q, next_slot, n_block >> 30, low_term_acc, 1, cfg)
            p = exp2_of_scores(s, row_scales, safe_max, cfg)
            if cfg.GROUP_SCALES:
                row_sum = row_sum * rescale + lane_row_sum(
                    p * score_scales.index(SCALE_COLUMNS * stage + 5).load(gl.SliceLayout(0, S))[None, :]
                )
                sync_and_arrive(empty.index(stage))
            else:
                row_sum = row_sum * rescale + lane_row_sum(p)
            if PREFETCH_QK:
                low_term_acc = start_low_term_qk_batch(kv_stages, q, next_slot, n_block >> 30, low_term_acc, 2, cfg)
            # Wait for a free P stage; store P and rescale.
            mbarrier.wait(p_empty.index(p_iter % P_STAGES), ((p_iter // P_STAGES) & 1) ^ 1)
            store_p_halves(p, buffers.p_smem, p_iter % P_STAGES)
            rescales.index(p_iter % P_STAGES).store(rescale)
            rescale_flags.index(p_iter % P_STAGES).store(
                gl.permute(gl.reshape(needs_rescale.to(gl.int8), [4, 16, LANES_PER_ROW]), (1, 2, 0))
            )
            fence_async_shared()
            if PREFETCH_QK:
                sync_and_arrive(p_full.index(p_iter % P_STAGES))
                low_term_acc = warpgroup_mma_wait(0, [low_term_acc])
            kv_iter += 1
            p_iter += 1
        if not PREFETCH_QK:
            sync_and_arrive(p_full.index((p_iter + 1) % P_STAGES))
        # Epilogue: acc_scale for the PV warpgroups, then metadata, and LSE or the partial state.
        row_max, row_sum = gl.max(row_max, 1), gl.sum(row_sum, 1)
        acc_scale, lse = finalize_softmax(row_max, row_sum, scales.value_scale)
        mbarrier.wait(p_empty.index(p_iter % P_STAGES), ((p_iter // P_STAGES) & 1) ^ 1)
        rescales.index(p_iter % P_STAGES).store(
            acc_scale[:, None] + gl.full([BLOCK_M, LANES_PER_ROW], 0.0, gl.float32, LANE_LAYOUT)
        )
        sync_and_arrive(p_full.index(p_iter % P_STAGES))
        p_iter += 1
        num_work_tiles += 1
        o_r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LANE_LAYOUT))
        tokens, heads, m_row = token_and_head_of_q_rows(
            o_r, QueryBlock(work_tile.m_block, h, work_tile.q_begin, work_tile.num_q_rows), cfg
        )
        if n_block_begin == 0:
            num_splits = count_splits(work_tile, cta_range.blocks_per_range, i_cta // cfg.HEADS)
            store_split_metadata(
                tensors.SPLIT_METADATA, i_request, work_tile.m_block, cta_range.max_m_blocks, i_cta, num_splits, cfg
            )
        if n_block_end - n_block_begin == work_tile.num_n_blocks:
            if cfg.HAS_LSE:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            partial_slot = 2 * i_cta + (n_block_begin == 0).to(gl.int32)
            p_row = tensors.SPLIT_WORKSPACE + (partial_slot.to(gl.int64) * cfg.BLOCK_M + o_r) * cfg.PARTIAL_COLUMNS
            gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, row_max, mask=m_row)
            gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, row_sum, mask=m_row)
        block += n_block_end - n_block_begin
