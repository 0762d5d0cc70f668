"""MLA decode for few query rows on sm_90: keys are the M side of WGMMA, query rows the N side.

Tiles of 64 keys arrive by TMA in STAGES stages.

8-bit latents: QK is 8-bit MMA straight from them: a query of 8 significant bits is exactly the sum of two e4m3 terms,
side by side along N. Each chunk of 128 columns has its own accumulator, added in fp32, since 8-bit MMA keeps about 14
bits. For PV the same codes are read as 16-bit packed pairs, transposed, and become fp16 in registers: two tiles, of the
even and of the odd columns of a chunk. With NUM_CONSUMERS 2, two warpgroups alternate over the n_blocks of a work tile,
each with its own state; at its end they rescale to one row_max and exchange halves of the columns.

16-bit latents, up to 32 query rows: tiles are multiplied from where they lie, for QK as they are, for PV transposed. So
few rows are not padded to 64, as they are in two_warpgroups.py.

Mask and lazy rescaling: `mainloop`; wait for a free stage: `producer.py`; combine: of two warpgroups
`combine_warpgroups_and_keep_half_acc`, of splits `combine.py`.
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

from ...versions import thread_barrier
from ..parts.combine import split_metadata_ptr
from ..parts.epilogue import (
    cast_output_saturating_fp8,
    compute_acc_scale_and_lse,
    store_empty_output_of_padding_rows,
    token_head_and_mask_of_q_rows,
)
from ..parts.pipeline import allocate_mbarriers, pdl_wait, sync_and_arrive
from ..parts.tile_scheduler import find_work_tile_at_block_cut_at_end, load_n_and_m_block_counts
from .gather import CacheRows, copy_arrivals, fence_async_shared_if_gathered
from .params import (
    AttentionTensors,
    PageLookup,
    QuerySmem,
    SmemKV,
    SoftmaxState,
    Strides,
    TensorMaps,
    dequant_packed,
    fits_all_requests,
    load_query_chunk,
    load_score_and_value_scales,
    make_cta_range_of_flat_n_blocks,
    mask_of_output_columns,
    partial_row_ptr,
    rope_columns,
    store_num_splits_and_first_cta,
    store_partial_stats,
    view_8bit_tile_as_pairs,
    zero_oob_rows_in_smem,
)
from .producer import tma_or_listed_rows_producer

WARP_ANY_PTX = gl.constexpr(
    """{
    .reg .pred p;
    setp.gt.f32 p, $1, 0f00000000;
    vote.sync.any.pred p, p, 0xffffffff;
    selp.b32 $0, 1, 0, p;
    }"""
)
# P is at most 2^RESCALE_THRESHOLD before it is normalised, which its dtype holds.
RESCALE_THRESHOLD_FP16, RESCALE_THRESHOLD_BF16 = gl.constexpr(8.0), gl.constexpr(16.0)
MIN_SCALE = gl.constexpr(1e-30)  # of a key's chunks: its reciprocal is finite
TILE_COLUMNS = gl.constexpr(64)  # columns of a copy tile of 16-bit latents


class PipelineBarriers(NamedTuple):
    """Full and empty barriers of the KV pipeline."""

    full: gl.shared_memory_descriptor  # a multiple of STAGES, used in rotation
    empty: gl.shared_memory_descriptor


class ConsumerBuffers(NamedTuple):
    """Other shared memory of the consumers; the last five only with two of them."""

    smem_p: gl.shared_memory_descriptor  # P of a tile
    vote_flags: gl.shared_memory_descriptor  # a vote per warp
    smem_row_max_and_sum: gl.shared_memory_descriptor  # row_max and row_sum of both
    acc_exchange: gl.shared_memory_descriptor  # half of acc_o's columns
    q_full: tuple  # full barriers, one per consumer: of its half of the query
    stats_full: tuple  # of its smem_row_max_and_sum
    acc_full: tuple  # of its acc_exchange


# Query: from global to shared memory.


@gluon.jit
def store_e4m3_and_residual(x, smem_rows, Q_TERMS: gl.constexpr):
    """Stores x as e4m3 in the first rows of `smem_rows`, and the rest, x − e4m3(x), in the rows behind."""
    NUM_ROWS: gl.constexpr = x.shape[0]
    high = x.to(gl.float8e4nv)
    smem_rows.slice(0, NUM_ROWS).store(high)
    if Q_TERMS == 2:
        smem_rows.slice(NUM_ROWS, NUM_ROWS).store((x - high.to(gl.float32)).to(gl.float8e4nv))


@gluon.jit
def store_query_columns_e4m3_and_return_q_scale(
    tensors, q, work_tile, h, strides, I_CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, Q_TERMS: gl.constexpr,
    LAYOUT: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Loads this warpgroup's columns of the query into shared memory; returns q_scale of the scores [BLOCK_M].

    Each row is scaled by a power of two so that its largest element lies in [128, 256): elements down to 2^-10 of that
    are still exact in two e4m3 terms.
    """
    q_pe = q.pe.index(0)
    CHUNKS: gl.constexpr = cfg.CHUNKS
    CHUNKS_PER_CONSUMER: gl.constexpr = CHUNKS // NUM_CONSUMERS
    WIDTH: gl.constexpr = 2 * cfg.CHUNK
    WIDTH_PE: gl.constexpr = q_pe.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = token_head_and_mask_of_q_rows(
        work_tile.m_block, h, work_tile.q_begin, work_tile.seqlen_q, gl.SliceLayout(1, L), cfg
    )
    p_q_nope = tensors.Q_NOPE + tokens * strides.q_nope_t + heads * strides.q_nope_h
    p_q_pe = tensors.Q_PE + tokens * strides.q_pe_t + heads * strides.q_pe_h
    # All loads are in flight before the first is used.
    q_pe_rows, chunks = load_query_chunk(p_q_pe, m_row, 0, WIDTH_PE, rope_columns(cfg), L, HIDE_ZEROS=True), ()
    for i in gl.static_range(CHUNKS):
        chunks = chunks + (load_query_chunk(p_q_nope, m_row, i * WIDTH, WIDTH, cfg.DV, L, HIDE_ZEROS=True),)
    inv_scale = gl.full([cfg.BLOCK_M], 1.0, gl.float32, gl.SliceLayout(1, L))
    q_scale = inv_scale
    if Q_TERMS == 2:
        abs_max = gl.max(gl.abs(q_pe_rows.to(gl.float32)), 1)
        for i in gl.static_range(CHUNKS):
            abs_max = gl.maximum(abs_max, gl.max(gl.abs(chunks[i].to(gl.float32)), 1))
        exponent = gl.maximum((abs_max.to(gl.int32, bitcast=True) >> 23) & 0xFF, 8)
        inv_scale = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
        q_scale = gl.where(exponent == 255, float("nan"), ((exponent - 7) << 23).to(gl.float32, bitcast=True))
    for i in gl.static_range(CHUNKS_PER_CONSUMER):
        scaled = chunks[I_CONSUMER * CHUNKS_PER_CONSUMER + i].to(gl.float32) * inv_scale[:, None]
        store_e4m3_and_residual(scaled, q.latents.index(I_CONSUMER * CHUNKS_PER_CONSUMER + i), Q_TERMS)
    if I_CONSUMER == NUM_CONSUMERS - 1:
        scaled = q_pe_rows.to(gl.float32) * inv_scale[:, None]
        if q_pe.dtype == gl.bfloat16:
            q_pe.store(scaled.to(gl.bfloat16))
        else:
            store_e4m3_and_residual(scaled, q_pe, Q_TERMS)
    fence_async_shared()
    return gl.convert_layout(q_scale, LAYOUT)


@gluon.jit
def cast_query_to_smem_16bit(tensors, smem_q, work_tile, h, strides, cfg: gl.constexpr):
    """Loads the query into shared memory, by tiles of columns; the last is the rotary part."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = token_head_and_mask_of_q_rows(
        work_tile.m_block, h, work_tile.q_begin, work_tile.seqlen_q, gl.SliceLayout(1, L), cfg
    )
    p_q_nope = tensors.Q_NOPE + tokens * strides.q_nope_t + heads * strides.q_nope_h
    p_q_pe = tensors.Q_PE + tokens * strides.q_pe_t + heads * strides.q_pe_h
    CHUNKS: gl.constexpr = cfg.CHUNKS
    column_tiles = ()  # all loads are in flight before the first is used
    for i in gl.static_range(CHUNKS):
        tile = load_query_chunk(p_q_nope, m_row, i * TILE_COLUMNS, TILE_COLUMNS, cfg.DV, L)
        column_tiles = column_tiles + (tile,)
    column_tiles = column_tiles + (load_query_chunk(p_q_pe, m_row, 0, TILE_COLUMNS, rope_columns(cfg), L),)
    for i in gl.static_range(CHUNKS + 1):
        smem_q.index(i).store(column_tiles[i].to(gl.float32).to(smem_q.dtype))
    fence_async_shared()


# V of a tile: codes to fp16.


@gluon.jit
def load_v_even_and_odd_columns_fp16(ckv, stage, i_chunk: gl.constexpr, ACC_LAYOUT: gl.constexpr, cfg: gl.constexpr):
    """Loads a tile's i-th chunk of V, transposed, as two fp16 operands in registers."""
    return dequant_packed(
        view_8bit_tile_as_pairs(ckv.index(stage * cfg.CHUNKS + i_chunk))
        .permute((1, 0))
        .load(gl.DotOperandLayout(0, ACC_LAYOUT, 2))
    )


# QK: scores of a tile.


@gluon.jit
def sum_scores_of_query_terms(s, SCORE_LAYOUT: gl.constexpr, Q_TERMS: gl.constexpr):
    """Returns scores summed over the query's terms: fp32 [BLOCK_N, ROWS]."""
    if Q_TERMS == 2:
        BLOCK_N: gl.constexpr = s.shape[0]
        ROWS: gl.constexpr = s.shape[1] // 2
        high, low = gl.split(gl.permute(gl.reshape(s, [BLOCK_N, 2, ROWS]), (0, 2, 1)))
        s = high + low
    return gl.convert_layout(s, SCORE_LAYOUT)


@gluon.jit
def fp8_mma_scores_and_first_v_or_empty(
    smem_kv, stage, q, opaque_zero, Q_TERMS: gl.constexpr, SCORE_LAYOUT: gl.constexpr, cfg: gl.constexpr
):
    """Returns (QK: fp32 [BLOCK_N, BLOCK_M], the first chunk of V where registers allow, else ())."""
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    q_nope, q_pe = q
    S8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.BLOCK_M * Q_TERMS, 32])
    zero = gl.full([cfg.BLOCK_N, Q_TERMS * cfg.BLOCK_M], 0.0, gl.float32, S8)
    x = warpgroup_mma(k_pe.index(stage), q_pe.index(opaque_zero).permute((1, 0)), zero, use_acc=False, is_async=True)
    first_v = ()
    if cfg.BLOCK_M <= 16:
        partial_scores = (x,)
        for i in gl.static_range(CHUNKS):
            q_i = q_nope.index(opaque_zero + i).permute((1, 0))
            partial_scores = partial_scores + (
                warpgroup_mma(ckv.index(stage * CHUNKS + i), q_i, zero, use_acc=False, is_async=True),
            )
        first_v = load_v_even_and_odd_columns_fp16(ckv, stage, 0, SCORE_LAYOUT, cfg)  # overlaps the MMAs
        partial_scores = warpgroup_mma_wait(0, partial_scores)
        s = partial_scores[0]
        for i in gl.static_range(CHUNKS):
            s += partial_scores[i + 1]
    else:
        s = zero
        for i in gl.static_range(CHUNKS):
            x = warpgroup_mma_wait(0, [x])
            s = x if i == 0 else s + x
            q_i = q_nope.index(opaque_zero + i).permute((1, 0))
            x = warpgroup_mma(ckv.index(stage * CHUNKS + i), q_i, zero, use_acc=False, is_async=True)
        s += warpgroup_mma_wait(0, [x])
    return sum_scores_of_query_terms(s, SCORE_LAYOUT, Q_TERMS), first_v


@gluon.jit
def load_four_group_scale_vectors(smem_scales, num_valid, VECTOR_LAYOUT: gl.constexpr):
    """Loads the four scales of each key of a tile, [BLOCK_N] each; 1 past the last key."""
    # Each thread holds the scales of its two rows of scores.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    x = smem_scales.load(L)
    is_valid = gl.arange(0, 64, gl.SliceLayout(1, L)) < num_valid
    x = gl.where(is_valid[:, None], x, 1.0)
    even, odd = gl.split(gl.reshape(x, [64, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    return (
        gl.convert_layout(s0, VECTOR_LAYOUT), gl.convert_layout(s1, VECTOR_LAYOUT),
        gl.convert_layout(s2, VECTOR_LAYOUT), gl.convert_layout(s3, VECTOR_LAYOUT),
    )  # fmt: skip


@gluon.jit
def compute_scores_with_group_scales(smem_kv, stage, q, opaque_zero, scales, Q_TERMS: gl.constexpr,
                                     SCORE_LAYOUT: gl.constexpr,
                          cfg: gl.constexpr):  # fmt: skip
    """Returns QK where each chunk of a key has a scale and the rotary part is bf16: fp32 [BLOCK_N, BLOCK_M]."""
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    q_nope, q_pe = q
    S8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.BLOCK_M * Q_TERMS, 32])
    zero = gl.full([cfg.BLOCK_N, Q_TERMS * cfg.BLOCK_M], 0.0, gl.float32, S8)
    s = gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, SCORE_LAYOUT)
    s = warpgroup_mma(k_pe.index(stage), q_pe.index(opaque_zero).permute((1, 0)), s, use_acc=False, is_async=True)
    if cfg.BLOCK_M <= 16:
        partial_scores = (s,)
        for i in gl.static_range(CHUNKS):
            q_i = q_nope.index(opaque_zero + i).permute((1, 0))
            partial_scores = partial_scores + (
                warpgroup_mma(ckv.index(stage * CHUNKS + i), q_i, zero, use_acc=False, is_async=True),
            )
        partial_scores = warpgroup_mma_wait(0, partial_scores)
        s = partial_scores[0]
        for i in gl.static_range(CHUNKS):
            s += sum_scores_of_query_terms(partial_scores[i + 1], SCORE_LAYOUT, Q_TERMS) * scales[i][:, None]
    else:
        s = warpgroup_mma_wait(0, [s])
        for i in gl.static_range(CHUNKS):
            q_i = q_nope.index(opaque_zero + i).permute((1, 0))
            x = warpgroup_mma(ckv.index(stage * CHUNKS + i), q_i, zero, use_acc=False, is_async=True)
            s += sum_scores_of_query_terms(warpgroup_mma_wait(0, [x]), SCORE_LAYOUT, Q_TERMS) * scales[i][:, None]
    return s


@gluon.jit
def compute_scores_bf16(q, smem_kv, stage, opaque_zero, SCORE_LAYOUT: gl.constexpr, cfg: gl.constexpr):
    """Returns QK of a tile: fp32 [BLOCK_N, BLOCK_M]."""
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    CHUNKS: gl.constexpr = cfg.CHUNKS
    NUM_PARTIAL_SCORES: gl.constexpr = 3 if cfg.BLOCK_M <= 16 else 2  # so that MMAs wait less for each other
    zero = gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, SCORE_LAYOUT)
    q_pe = q.index(opaque_zero + CHUNKS).permute((1, 0))
    partial_scores = (warpgroup_mma(k_pe.index(stage), q_pe, zero, use_acc=False, is_async=True),)
    for i in gl.static_range(CHUNKS):
        k, q_i = ckv.index(stage * CHUNKS + i), q.index(opaque_zero + i).permute((1, 0))
        if i < NUM_PARTIAL_SCORES - 1:
            partial_scores = partial_scores + (warpgroup_mma(k, q_i, zero, use_acc=False, is_async=True),)
        else:
            partial_scores = partial_scores[1:] + (warpgroup_mma(k, q_i, partial_scores[0], is_async=True),)
    partial_scores = warpgroup_mma_wait(0, partial_scores)
    s = partial_scores[0]
    for i in gl.static_range(NUM_PARTIAL_SCORES - 1):
        s += partial_scores[i + 1]
    return s


# Online softmax, with lazy rescaling.


@gluon.jit
def fold_row_sums(p):
    """Returns sums of P over the keys that one thread holds: [BLOCK_N / 16, 8, BLOCK_M]."""
    return gl.sum(gl.reshape(p, [p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def any_score_above_in_warpgroup(s, threshold, vote_flags, I_CONSUMER: gl.constexpr):
    """Returns whether any score exceeds its row's threshold, by a vote in each warp and its flag in shared memory."""
    ROWS: gl.constexpr = s.shape[1]
    x = gl.reshape(s - threshold[None, :], [4, 2, 8, ROWS // 8, 4, 2])
    x = gl.max(gl.max(gl.max(x, 5), 3), 1)  # of what one thread holds
    x = gl.inline_asm_elementwise(WARP_ANY_PTX, "=r,f", [x], gl.int32, is_pure=False, pack=1)
    votes = vote_flags.index(I_CONSUMER)
    votes.store(gl.reshape(gl.permute(x.to(gl.int8), (1, 2, 0)), [32, 4]))
    ALL: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 0]] * 5, [[0, 0]] * 2, [], [1, 4])
    return gl.max(gl.max(votes.slice(0, 1).load(ALL).to(gl.int32), 1), 0) > 0


# PV.


@gluon.jit
def dequant_v_accumulate_transposed_pv_and_wait(
    acc_o, ckv, stage, preloaded_v_chunk_0_or_empty, p_buffers, I_P_BUFFER: gl.constexpr, SAVE_REGISTERS: gl.constexpr,
    ACC_LAYOUT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Returns acc_o + V, transposed, times P in shared memory [BLOCK_N, BLOCK_M]; with group scales, one P per chunk.

    SAVE_REGISTERS: dequantize a chunk only after the MMA of the one before.
    """
    CHUNKS: gl.constexpr = cfg.CHUNKS
    out, finished = (), ()
    for i in gl.static_range(CHUNKS):
        if SAVE_REGISTERS and i > 0:
            finished = finished + warpgroup_mma_wait(0, [out[2 * i - 2], out[2 * i - 1]])
        v = (
            preloaded_v_chunk_0_or_empty
            if i == 0 and len(preloaded_v_chunk_0_or_empty) == 2
            else load_v_even_and_odd_columns_fp16(ckv, stage, i, ACC_LAYOUT, cfg)
        )
        p = p_buffers.index(I_P_BUFFER * CHUNKS + i if cfg.GROUP_SCALES else I_P_BUFFER)
        for j in gl.static_range(2):
            out = out + (warpgroup_mma(v[j], p, acc_o[2 * i + j], is_async=True),)
        if not SAVE_REGISTERS and i > 0:
            finished = finished + warpgroup_mma_wait(2, [out[2 * i - 2], out[2 * i - 1]])
    return finished + warpgroup_mma_wait(0, [out[2 * CHUNKS - 2], out[2 * CHUNKS - 1]])


# Main loop.


@gluon.jit
def mainloop(q, smem_kv, mbarriers, buffers, score_scale, work_tile, first_kv_iter, I_CONSUMER: gl.constexpr,
             NUM_CONSUMERS: gl.constexpr, STAGES: gl.constexpr, SCORE_LAYOUT: gl.constexpr,
             cfg: gl.constexpr):  # fmt: skip
    """Computes this warpgroup's n_blocks of a work tile; returns its SoftmaxState.

    acc_o: of 8-bit latents the even and the odd columns of each chunk, of 16-bit latents column tiles.
    score_scale: of each query row [BLOCK_M], or with 16-bit latents of all
    """
    IS_FP8: gl.constexpr = cfg.CODE == "e4m3"
    RESCALE_THRESHOLD: gl.constexpr = RESCALE_THRESHOLD_FP16 if IS_FP8 else RESCALE_THRESHOLD_BF16
    Q_TERMS: gl.constexpr = q.latents.shape[1] // cfg.BLOCK_M
    CHUNKS: gl.constexpr = cfg.CHUNKS
    COLUMN: gl.constexpr = gl.SliceLayout(0, SCORE_LAYOUT)
    n_block_begin, n_block_end, num_keys, seqlen_q, row_begin = (
        work_tile.n_block_begin, work_tile.n_block_end, work_tile.num_keys, work_tile.seqlen_q,
        work_tile.m_block * cfg.BLOCK_M,
    )  # fmt: skip
    smem_p, vote_flags = buffers.smem_p, buffers.vote_flags
    full, empty = mbarriers.full, mbarriers.empty
    NUM_FULL_BARRIERS: gl.constexpr = full.shape[0]
    row_max = gl.full([cfg.BLOCK_M], float("-inf"), gl.float32, COLUMN)
    # Summed over all keys only at the end.
    row_sum = fold_row_sums(gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, SCORE_LAYOUT))
    LANE_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, row_sum.type.layout))
    acc_o = ()
    for _ in gl.static_range(2 * CHUNKS if IS_FP8 else CHUNKS):
        acc_o = acc_o + (gl.full([cfg.CHUNK if IS_FP8 else TILE_COLUMNS, cfg.BLOCK_M], 0.0, gl.float32, SCORE_LAYOUT),)
    o_key = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, SCORE_LAYOUT))
    q_position = num_keys - seqlen_q + (row_begin + gl.arange(0, cfg.BLOCK_M, COLUMN)) // cfg.GROUP
    for n_block in range(n_block_begin + I_CONSUMER, n_block_end, NUM_CONSUMERS):
        iter = first_kv_iter + n_block - n_block_begin
        stage = iter % STAGES
        # Wait for the tile.
        mbarrier.wait(full.index(iter % NUM_FULL_BARRIERS), (iter // NUM_FULL_BARRIERS) & 1)
        fence_async_shared_if_gathered(cfg)
        if not cfg.GATHER_ROWS and (n_block + 1) * cfg.BLOCK_N > num_keys:
            # Zero rows past the tile's last key: 0 × NaN is NaN.
            num_valid = num_keys - n_block * cfg.BLOCK_N
            zero_oob_rows_in_smem(smem_kv.latents, stage * CHUNKS, CHUNKS, num_valid)
            if not IS_FP8:
                fence_async_shared()
            thread_barrier()  # else the compiler puts one after the branch
        # NOTE: `opaque_zero` is 0. A constant would make the compiler keep, and spill, descriptors of all tiles of q.
        opaque_zero = n_block >> 30
        # QK.
        first_v = ()
        if cfg.GROUP_SCALES:
            scales = load_four_group_scale_vectors(
                smem_kv.scales.index(stage), num_keys - n_block * cfg.BLOCK_N, gl.SliceLayout(1, SCORE_LAYOUT)
            )
            s = (
                compute_scores_with_group_scales(smem_kv, stage, q, opaque_zero, scales, Q_TERMS, SCORE_LAYOUT, cfg)
                * score_scale[None, :]
            )
            # The key's largest scale joins the exponent: the ratios to it, which multiply P, lie in [−1, 1].
            max_group_scale = gl.full([cfg.BLOCK_N], MIN_SCALE, gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
            for i in gl.static_range(CHUNKS):
                max_group_scale = gl.maximum(max_group_scale, gl.abs(scales[i]))
            s += gl.log2(max_group_scale)[:, None]
        elif IS_FP8:
            s, first_v = fp8_mma_scores_and_first_v_or_empty(smem_kv, stage, q, opaque_zero, Q_TERMS, SCORE_LAYOUT, cfg)
            s *= score_scale[None, :]
        else:
            s = compute_scores_bf16(q.latents, smem_kv, stage, opaque_zero, SCORE_LAYOUT, cfg) * score_scale
        # Mask.
        if (n_block + 1) * cfg.BLOCK_N > num_keys - seqlen_q + 1:
            o_n = n_block * cfg.BLOCK_N + o_key
            s = gl.where((o_n < num_keys)[:, None] & (o_n[:, None] <= q_position[None, :]), s, float("-inf"))
        # Lazy rescaling: row_max is raised only where P would pass 2^RESCALE_THRESHOLD: rarely.
        if any_score_above_in_warpgroup(s, row_max + RESCALE_THRESHOLD, vote_flags, I_CONSUMER):
            row_max_new = gl.maximum(row_max, gl.max(s, 0))
            # Rescale row_sum and acc_o.
            rescale = gl.exp2(row_max - gl.where(row_max_new == float("-inf"), 0.0, row_max_new))
            row_sum = row_sum * gl.convert_layout(rescale, LANE_COLUMN)[None, :][:, None, :]
            rescale = gl.convert_layout(rescale, COLUMN)
            rescaled_acc = ()
            for i in gl.static_range(len(acc_o)):
                rescaled_acc = rescaled_acc + (acc_o[i] * rescale[None, :],)
            acc_o, row_max = rescaled_acc, row_max_new
        # Softmax: P to shared memory.
        p = gl.exp2(s - gl.where(row_max == float("-inf"), 0.0, row_max)[None, :])
        if cfg.GROUP_SCALES:
            inv_group_scale = 1.0 / max_group_scale
            row_sum += fold_row_sums(p * inv_group_scale[:, None])
            for i in gl.static_range(CHUNKS):
                smem_p.index(I_CONSUMER * CHUNKS + i).store((p * (scales[i] * inv_group_scale)[:, None]).to(gl.float16))
        else:
            row_sum += fold_row_sums(p)
            smem_p.index(I_CONSUMER if IS_FP8 else opaque_zero).store(p.to(smem_p.dtype))
        fence_async_shared()
        # PV; release the stage.
        if IS_FP8:
            acc_o = dequant_v_accumulate_transposed_pv_and_wait(
                acc_o, smem_kv.latents, stage, first_v, smem_p, I_CONSUMER, cfg.BLOCK_M >= 32, SCORE_LAYOUT, cfg
            )
        else:
            p_tile, acc_new = smem_p.index(opaque_zero), ()
            for i in gl.static_range(CHUNKS):
                v_i = smem_kv.latents.index(stage * CHUNKS + i).permute((1, 0))
                acc_new = acc_new + (warpgroup_mma(v_i, p_tile, acc_o[i], is_async=True),)
            acc_o = warpgroup_mma_wait(0, acc_new)
        mbarrier.arrive(empty.index(stage))
    return SoftmaxState(row_max, gl.sum(gl.sum(row_sum, 1), 0), acc_o)


# Combine of two warpgroups.


@gluon.jit
def combine_warpgroups_and_keep_half_acc(
    state, buffers, num_done, I_CONSUMER: gl.constexpr, ACC_LAYOUT: gl.constexpr, cfg: gl.constexpr
):
    """Combines both warpgroups: returns row_max, row_sum, and acc_o of this one's half of the columns."""
    row_max, acc_o, smem_row_max_and_sum, acc_exchange = (
        state.row_max,
        state.acc_o,
        buffers.smem_row_max_and_sum,
        buffers.acc_exchange,
    )
    ACC_TILES_PER_CONSUMER: gl.constexpr = cfg.CHUNKS
    COLUMN: gl.constexpr = row_max.type.layout
    smem_row_max_and_sum.index(I_CONSUMER).store(row_max)
    smem_row_max_and_sum.index(2 + I_CONSUMER).store(gl.convert_layout(state.row_sum, COLUMN))
    sync_and_arrive(buffers.stats_full[I_CONSUMER].index(0))
    mbarrier.wait(buffers.stats_full[1 - I_CONSUMER].index(0), num_done & 1)
    other_row_max, other_row_sum = (
        smem_row_max_and_sum.index(1 - I_CONSUMER).load(COLUMN),
        smem_row_max_and_sum.index(3 - I_CONSUMER).load(COLUMN),
    )
    row_max_new = gl.maximum(row_max, other_row_max)
    safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    rescale = gl.exp2(row_max - safe_max)
    row_sum = smem_row_max_and_sum.index(2 + I_CONSUMER).load(COLUMN) * rescale + other_row_sum * gl.exp2(
        other_row_max - safe_max
    )
    rescale = gl.convert_layout(rescale, gl.SliceLayout(0, ACC_LAYOUT))
    merged_acc = ()
    if I_CONSUMER == 0:  # there is memory for one half: the other warpgroup reads it, then stores its own
        for i in gl.static_range(ACC_TILES_PER_CONSUMER):
            acc_exchange.index(i).store(acc_o[ACC_TILES_PER_CONSUMER + i] * rescale[None, :])
        sync_and_arrive(buffers.acc_full[0].index(0))
    mbarrier.wait(buffers.acc_full[1 - I_CONSUMER].index(0), num_done & 1)
    for i in gl.static_range(ACC_TILES_PER_CONSUMER):
        merged_acc = merged_acc + (
            acc_o[I_CONSUMER * ACC_TILES_PER_CONSUMER + i] * rescale[None, :] + acc_exchange.index(i).load(ACC_LAYOUT),
        )
    if I_CONSUMER == 1:
        for i in gl.static_range(ACC_TILES_PER_CONSUMER):
            acc_exchange.index(i).store(acc_o[i] * rescale[None, :])
        sync_and_arrive(buffers.acc_full[1].index(0))
    return SoftmaxState(row_max_new, row_sum, merged_acc)


# Epilogue: the output, or a partial state for the combine.


@gluon.jit
def output_and_partial_columns_of_acc(
    i_tile: gl.constexpr, NUM_TILES: gl.constexpr, I_CONSUMER: gl.constexpr, ACC_LAYOUT: gl.constexpr, cfg: gl.constexpr
):
    """Returns the columns of tile i_tile of acc_o: in the output, and in a partial state, even ones first."""
    if cfg.CODE == "e4m3":
        o_packed = (I_CONSUMER * (NUM_TILES // 2) + i_tile // 2) * cfg.CHUNK + gl.arange(
            0, cfg.CHUNK, gl.SliceLayout(1, ACC_LAYOUT)
        )
        return 2 * o_packed + i_tile % 2, i_tile % 2 * cfg.BLOCK_DV + o_packed
    else:
        o_d = i_tile * TILE_COLUMNS + gl.arange(0, TILE_COLUMNS, gl.SliceLayout(1, ACC_LAYOUT))
        return o_d, o_d


# Consumer warpgroup: query, main loop and epilogue of its work tiles.


@gluon.jit
def consumer(tensors, q, smem_kv, mbarriers, buffers, scales, cta_range, strides, STAGES: gl.constexpr,
             I_CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Computes this warpgroup's n_blocks of the CTA range for one block of heads, and stores its columns."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.BLOCK_M, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    i_cta, block, block_end, i_request, n_block_base = (
        cta_range.i_cta, cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    h = i_cta % cfg.HEADS
    kv_iter, num_done = 0, 0
    while block < block_end:
        # Next work tile.
        work_tile = find_work_tile_at_block_cut_at_end(
            tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, block, block_end, i_request, n_block_base, cfg
        )
        i_request, n_block_base = work_tile.i_request, work_tile.n_block_base
        # Load the query.
        score_scale = scales.score_scale
        if cfg.CODE == "e4m3":
            Q_TERMS: gl.constexpr = q.latents.shape[1] // cfg.BLOCK_M
            score_scale = scales.score_scale * store_query_columns_e4m3_and_return_q_scale(
                tensors, q, work_tile, h, strides, I_CONSUMER, NUM_CONSUMERS, Q_TERMS, ROW, cfg
            )
        else:
            cast_query_to_smem_16bit(tensors, q.latents, work_tile, h, strides, cfg)
        if NUM_CONSUMERS == 2:
            sync_and_arrive(buffers.q_full[I_CONSUMER].index(0))
            mbarrier.wait(buffers.q_full[1 - I_CONSUMER].index(0), num_done & 1)
        # Main loop; then combine two consumers.
        state = mainloop(
            q, smem_kv, mbarriers, buffers, score_scale, work_tile, kv_iter, I_CONSUMER, NUM_CONSUMERS, STAGES, S, cfg
        )
        if NUM_CONSUMERS == 2:
            state = combine_warpgroups_and_keep_half_acc(state, buffers, num_done, I_CONSUMER, S, cfg)
        # Epilogue: metadata, then the output or a partial state.
        kv_iter += work_tile.n_block_end - work_tile.n_block_begin
        num_done += 1
        tokens, heads, m_row = token_head_and_mask_of_q_rows(
            work_tile.m_block, h, work_tile.q_begin, work_tile.seqlen_q, ROW, cfg
        )
        state = SoftmaxState(gl.convert_layout(state.row_max, ROW), gl.convert_layout(state.row_sum, ROW), state.acc_o)
        if work_tile.n_block_begin == 0:  # all warpgroups store the same
            store_num_splits_and_first_cta(tensors, work_tile, cta_range, cfg)
        if work_tile.n_block_end - work_tile.n_block_begin == work_tile.num_n_blocks:
            acc_scale, lse = compute_acc_scale_and_lse(
                state.row_max, state.row_sum, scales.value_scale, tensors.SINKS, heads, m_row, cfg, cfg.LSE_OF_KEYS
            )
            for i in gl.static_range(len(state.acc_o)):
                p_out = tensors.OUT + (tokens * strides.out_t + heads * strides.out_h)[None, :]
                o_out, _ = output_and_partial_columns_of_acc(i, len(state.acc_o), I_CONSUMER, S, cfg)
                gl.store(
                    p_out + o_out[:, None],
                    cast_output_saturating_fp8(state.acc_o[i] * acc_scale[None, :], tensors.OUT, cfg),
                    mask=mask_of_output_columns(m_row[None, :], o_out[:, None], cfg),
                )
            if cfg.HAS_LSE and I_CONSUMER == 0:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            partial_slot = 2 * i_cta + (work_tile.n_block_begin == 0).to(gl.int32)
            # As the combine reads it: columns, row_max, row_sum.
            o_r = gl.arange(0, cfg.BLOCK_M, ROW)
            p_row = partial_row_ptr(tensors.SPLIT_WORKSPACE, partial_slot, o_r, cfg)
            for i in gl.static_range(len(state.acc_o)):
                _, o_partial = output_and_partial_columns_of_acc(i, len(state.acc_o), I_CONSUMER, S, cfg)
                gl.store(p_row[None, :] + o_partial[:, None], state.acc_o[i], mask=m_row[None, :])
            if I_CONSUMER == 0:
                store_partial_stats(p_row, state.row_max, state.row_sum, m_row, cfg)
        block += work_tile.n_block_end - work_tile.n_block_begin


# The kernel.


@gluon.jit
def allocate_q_kv_and_consumer_buffers_fp8(
    CKV_MAP, KPE_MAP, SCALES_MAP, Q_TERMS: gl.constexpr, STAGES: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Returns (QuerySmem, SmemKV, ConsumerBuffers) for 8-bit latents."""
    E4M3: gl.constexpr = gl.float8e4nv
    WIDTH: gl.constexpr = 2 * cfg.CHUNK
    R: gl.constexpr = KPE_MAP.dtype
    WIDTH_PE: gl.constexpr = KPE_MAP.block_shape[1]
    Q_SMEM_ROWS: gl.constexpr = Q_TERMS * cfg.BLOCK_M
    Q_PE_SMEM_ROWS: gl.constexpr = cfg.BLOCK_M if cfg.GROUP_SCALES else Q_SMEM_ROWS
    NUM_P_TILES: gl.constexpr = cfg.CHUNKS if cfg.GROUP_SCALES else 1
    ckv = gl.allocate_shared_memory(E4M3, [STAGES * cfg.CHUNKS, cfg.BLOCK_N, WIDTH], CKV_MAP.layout)
    k_pe = gl.allocate_shared_memory(R, [STAGES, cfg.BLOCK_N, WIDTH_PE], KPE_MAP.layout)
    scales = k_pe
    if cfg.GROUP_SCALES:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, cfg.BLOCK_N, cfg.CHUNKS], SCALES_MAP.layout)
    Q_NOPE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_SMEM_ROWS, WIDTH], E4M3)
    Q_PE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_PE_SMEM_ROWS, WIDTH_PE], R)
    q_nope = gl.allocate_shared_memory(E4M3, [cfg.CHUNKS, Q_SMEM_ROWS, WIDTH], Q_NOPE_LAYOUT)
    q_pe = gl.allocate_shared_memory(R, [1, Q_PE_SMEM_ROWS, WIDTH_PE], Q_PE_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, cfg.BLOCK_M], gl.float16)
    smem_p = gl.allocate_shared_memory(gl.float16, [NUM_CONSUMERS * NUM_P_TILES, cfg.BLOCK_N, cfg.BLOCK_M], P_LAYOUT)
    FLAT_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vote_flags = gl.allocate_shared_memory(gl.int8, [NUM_CONSUMERS, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    EXCHANGE_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 4, [1, 0])
    smem_row_max_and_sum, acc_exchange, q_full, stats_full, acc_full = vote_flags, vote_flags, (), (), ()
    if NUM_CONSUMERS == 2:
        # Only where they are used: see `allocate_mbarrier_groups`.
        q_full, stats_full, acc_full = (
            (allocate_mbarriers(1), allocate_mbarriers(1)),
            (allocate_mbarriers(1), allocate_mbarriers(1)),
            (allocate_mbarriers(1), allocate_mbarriers(1)),
        )
        smem_row_max_and_sum = gl.allocate_shared_memory(gl.float32, [4, cfg.BLOCK_M], FLAT_LAYOUT)
        acc_exchange = gl.allocate_shared_memory(gl.float32, [cfg.CHUNKS, cfg.CHUNK, cfg.BLOCK_M], EXCHANGE_LAYOUT)
    buffers = ConsumerBuffers(smem_p, vote_flags, smem_row_max_and_sum, acc_exchange, q_full, stats_full, acc_full)
    return QuerySmem(q_nope, q_pe), SmemKV(ckv, k_pe, scales), buffers


@gluon.jit
def allocate_q_kv_and_consumer_buffers_bf16(CKV_MAP, KPE_MAP, STAGES: gl.constexpr, cfg: gl.constexpr):
    """Returns (QuerySmem, SmemKV, ConsumerBuffers) for 16-bit latents; the query's last tile is its rotary part."""
    DTYPE: gl.constexpr = CKV_MAP.dtype
    ckv = gl.allocate_shared_memory(DTYPE, [STAGES * cfg.CHUNKS, cfg.BLOCK_N, TILE_COLUMNS], CKV_MAP.layout)
    k_pe = gl.allocate_shared_memory(DTYPE, [STAGES, cfg.BLOCK_N, TILE_COLUMNS], KPE_MAP.layout)
    Q_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_M, TILE_COLUMNS], DTYPE)
    q = gl.allocate_shared_memory(DTYPE, [cfg.CHUNKS + 1, cfg.BLOCK_M, TILE_COLUMNS], Q_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, cfg.BLOCK_M], DTYPE)
    smem_p = gl.allocate_shared_memory(DTYPE, [1, cfg.BLOCK_N, cfg.BLOCK_M], P_LAYOUT)
    vote_flags = gl.allocate_shared_memory(gl.int8, [1, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    buffers = ConsumerBuffers(smem_p, vote_flags, vote_flags, vote_flags, (), (), ())
    return QuerySmem(q, q), SmemKV(ckv, k_pe, k_pe), buffers


@gluon.jit
def mla_decode_small_m_kernel(
    Q_NOPE, Q_PE, CKV_MAP, KPE_MAP, SCALES_MAP, CKV, KPE, SCALES, ckv_row_pitch_16_bytes, kpe_row_pitch_16_bytes,
    scale_row_pitch_16_bytes,
    PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE,
    softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE,
    B, T, oob_row, scale_rows_per_page, max_m_blocks, stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h,
    stride_table_b, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    STAGES: gl.constexpr, NUM_CONSUMERS: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Computes one CTA range for one block of heads."""
    IS_FP8: gl.constexpr = cfg.CODE == "e4m3"
    gl.static_assert(IS_FP8 or cfg.CODE == "bf16", "a code that this kernel does not know")
    # Prologue: arguments; lengths of all requests, early.
    pdl_wait()
    i_cta = gl.program_id(0)
    num_ctas = gl.num_programs(0)
    i_range, num_ranges = i_cta // cfg.HEADS, num_ctas // cfg.HEADS
    tensors = AttentionTensors(
        Q_NOPE, Q_PE, SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE,
        split_metadata_ptr(SPLIT_WORKSPACE, num_ctas, cfg),
    )  # fmt: skip
    strides = Strides(
        stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h, stride_out_t, stride_out_h, stride_lse_t,
        stride_lse_h,
    )  # fmt: skip
    tensor_maps = TensorMaps(CKV_MAP, KPE_MAP, SCALES_MAP)
    cache_rows = CacheRows(CKV, KPE, SCALES, ckv_row_pitch_16_bytes, kpe_row_pitch_16_bytes, scale_row_pitch_16_bytes)
    page_lookup = PageLookup(PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, stride_table_b, oob_row, scale_rows_per_page)
    block_counts = ()
    if fits_all_requests(cfg):
        block_counts = load_n_and_m_block_counts(SEQ_LENS, CU_SEQLENS_Q, B, cfg, not IS_FP8)
    if cfg.VARLEN_Q:
        padding_begin = gl.load(CU_SEQLENS_Q + B).to(gl.int32)  # arrives with the lengths
    # Shared memory and barriers.
    if IS_FP8:
        Q_TERMS: gl.constexpr = 1 if Q_NOPE.dtype.element_ty == gl.float8e4nv else 2
        q, smem_kv, buffers = allocate_q_kv_and_consumer_buffers_fp8(
            CKV_MAP, KPE_MAP, SCALES_MAP, Q_TERMS, STAGES, NUM_CONSUMERS, cfg
        )
    else:
        q, smem_kv, buffers = allocate_q_kv_and_consumer_buffers_bf16(CKV_MAP, KPE_MAP, STAGES, cfg)
    # NOTE: of two alternating warpgroups each waits for every other tile, and a wait sees only one phase back. With one
    # barrier for each of three stages the previous phase would be the other warpgroup's tile, possibly still in flight
    # when a later tile is full. With twice as many, a barrier belongs to one warpgroup for a whole work tile, at whose
    # end both synchronise.
    mbarriers = PipelineBarriers(
        allocate_mbarriers(NUM_CONSUMERS * STAGES, copy_arrivals(cfg)), allocate_mbarriers(STAGES)
    )
    # Tile scheduler: this CTA's range.
    call_scales = load_score_and_value_scales(
        softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, cfg
    )
    cta_range = make_cta_range_of_flat_n_blocks(
        SEQ_LENS, CU_SEQLENS_Q, B, block_counts, i_range, num_ranges, max_m_blocks, i_cta, cfg
    )
    thread_barrier()  # arguments of the partitions may overwrite memory that reductions read
    # The producer is the default partition: it has four warps anyway.
    if NUM_CONSUMERS == 2:
        CONSUMER_REGISTERS_OF_TWO: gl.constexpr = (
            216 if cfg.GATHER_ROWS and cfg.BLOCK_M <= 16 else 240  # the producer computes addresses of rows
        )
        gl.warp_specialize(
            [
                (tma_or_listed_rows_producer, (tensor_maps, cache_rows, page_lookup, mbarriers.full, mbarriers.empty,
                                               smem_kv, cta_range, (), STAGES, cfg)),
                (consumer, (tensors, q, smem_kv, mbarriers, buffers, call_scales, cta_range, strides, STAGES, 0,
                            NUM_CONSUMERS, cfg)),
                (consumer, (tensors, q, smem_kv, mbarriers, buffers, call_scales, cta_range, strides, STAGES, 1,
                            NUM_CONSUMERS, cfg)),
            ],
            [4, 4],
            [CONSUMER_REGISTERS_OF_TWO, CONSUMER_REGISTERS_OF_TWO],
        )  # fmt: skip
    else:
        CONSUMER_REGISTERS: gl.constexpr = 216 if cfg.GROUP_SCALES else 232  # more would spill the addresses of scales
        gl.warp_specialize(
            [
                (tma_or_listed_rows_producer, (tensor_maps, cache_rows, page_lookup, mbarriers.full, mbarriers.empty,
                                               smem_kv, cta_range, (), STAGES, cfg)),
                (consumer, (tensors, q, smem_kv, mbarriers, buffers, call_scales, cta_range, strides, STAGES, 0,
                            NUM_CONSUMERS, cfg)),
            ],
            [4],
            [CONSUMER_REGISTERS],
        )  # fmt: skip
    # Query rows of no request.
    if cfg.VARLEN_Q:
        store_empty_output_of_padding_rows(
            OUT, LSE, padding_begin, T, i_cta, num_ctas, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg
        )
