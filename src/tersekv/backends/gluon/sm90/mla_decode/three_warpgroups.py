"""MLA decode over 8-bit latents for many heads on sm_90: one warpgroup for QK and softmax, two for PV.

Tiles of 64 keys arrive by TMA in STAGES stages. The QK warpgroup multiplies 64 query rows (M) by keys (N), 8-bit MMA
straight from the codes, and stores P in shared memory in two stages. The PV warpgroups hold half of the columns each,
transposed: columns are M, query rows N. They read the same codes as 16-bit packed pairs, which become fp16 in
registers. So the softmax of one tile and the dequantization of another overlap MMAs. They also load each work tile's
query, and store its output through the query's memory. The producer prepares group scales.

A query of 8 significant bits is exactly the sum of two e4m3 terms. 8-bit MMA keeps about 14 bits: each chunk of 128
columns has its own accumulator, added in fp32; the second term, which is 2^-4 of the first, needs only one.

Mask: `apply_mask`; lazy row_max: `qk_softmax_warpgroup`; rescale of acc_o: `rescale_acc_if_flagged`; wait for a free KV
stage: `producer.py`, for a free P stage: `qk_softmax_warpgroup`, which also signals P full; combine: `combine.py`.
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
from ..parts.combine import split_metadata_ptr
from ..parts.epilogue import cast_output_saturating_fp8, compute_acc_scale_and_lse, store_empty_output_of_padding_rows
from ..parts.online_softmax import LAZY_ROW_MAX_PTX, split_columns
from ..parts.pipeline import allocate_mbarrier_groups, pdl_wait, sync_and_arrive
from ..parts.tile_scheduler import find_work_tile_at_block_cut_at_end, load_n_and_m_block_counts
from .gather import CacheRows, copy_arrivals, fence_async_shared_if_gathered, wait_full_and_fence_if_gathered
from .params import (
    AttentionTensors,
    PageLookup,
    QuerySmem,
    SmemKV,
    Strides,
    TensorMaps,
    dequant_packed,
    fits_all_requests,
    load_query_chunk,
    load_score_and_value_scales,
    make_cta_range_of_flat_n_blocks,
    make_uniform_through_smem,
    mask_of_output_columns,
    partial_row_ptr,
    rope_columns,
    store_num_splits_and_first_cta,
    store_partial_stats,
    zero_oob_rows_in_smem,
)
from .producer import SCALE_COLUMNS, ScalePrepAndFirstQFull, tma_or_listed_rows_producer

BLOCK_M = gl.constexpr(64)  # query rows
BLOCK_N = gl.constexpr(64)  # keys
LANES_PER_ROW = gl.constexpr(4)  # lanes that hold a row of scores
KEY_HALVES = gl.constexpr(2)  # of a tile's keys: a half is dequantized at once
KEYS_PER_HALF = gl.constexpr(BLOCK_N.value // KEY_HALVES.value)
P_STAGES = gl.constexpr(2)  # tiles of P in shared memory
MMA_BATCHES = gl.constexpr(3)  # batches of MMAs that overlap the softmax
CHUNKS_PER_WARPGROUP = gl.constexpr(2)  # chunks of columns of a PV warpgroup
PACKED_PER_CHUNK = gl.constexpr(64)  # packed columns of a chunk
ROWS_STAGED = gl.constexpr(32)  # output rows in shared memory
ROWS_PER_STORE = gl.constexpr(16)  # of them stored at once
PV_REGISTERS = gl.constexpr(176)  # of a thread of a PV warpgroup
MIN_SCALE = gl.constexpr(1e-30)  # of scores: −inf × MIN_SCALE is −inf
# Two pairs of bf16 → elementwise larger magnitude, as bits.
MAX_ABS_BF16X2_PTX = gl.constexpr(
    """{
    .reg .b32 x, y;
    and.b32 x, $1, 0x7fff7fff;
    and.b32 y, $2, 0x7fff7fff;
    max.u16x2 $0, x, y;
    }"""
)
# Four bf16 times four scales, powers of two → e4m3 codes of the products, and of their remainders: exact in fp16, since
# the products have 8 significant bits.
SPLIT_IN_E4M3_TERMS_PTX = gl.constexpr(
    """{
    .reg .b32 x, y, f<4>, g, h, a, b;
    .reg .b16 p, q;
    mul.rn.bf16x2 x, $2, $4;
    mul.rn.bf16x2 y, $3, $5;
    shl.b32 f0, x, 16;
    and.b32 f1, x, 0xffff0000;
    shl.b32 f2, y, 16;
    and.b32 f3, y, 0xffff0000;
    cvt.rn.f16x2.f32 g, f1, f0;
    cvt.rn.f16x2.f32 h, f3, f2;
    cvt.rn.satfinite.e4m3x2.f16x2 p, g;
    cvt.rn.satfinite.e4m3x2.f16x2 q, h;
    mov.b32 $0, {p, q};
    cvt.rn.f16x2.e4m3x2 a, p;
    cvt.rn.f16x2.e4m3x2 b, q;
    sub.rn.f16x2 g, g, a;
    sub.rn.f16x2 h, h, b;
    cvt.rn.satfinite.e4m3x2.f16x2 p, g;
    cvt.rn.satfinite.e4m3x2.f16x2 q, h;
    mov.b32 $1, {p, q};
    }"""
)
# Two packed pairs in one register and two ratios in another → f16x2 of the low codes, and of the high codes.
SCALED_DEQUANT_PTX = gl.constexpr(
    """{
    .reg .b32 x, a, b;
    .reg .b16 low, high;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    mul.rn.f16x2 $0, a, $3;
    mul.rn.f16x2 $1, b, $3;
    }"""
)


class Mbarriers(NamedTuple):
    full: gl.shared_memory_descriptor  # of the KV pipeline
    empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor  # P and rescale of an iteration
    p_empty: gl.shared_memory_descriptor  # PV is done
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor  # the output, staged in the query's memory, is stored
    first_q_full: gl.shared_memory_descriptor  # of the first query, for the producer
    scales_full: gl.shared_memory_descriptor  # of the KV pipeline: group scales are prepared


class SharedBuffers(NamedTuple):
    """Shared memory by which warpgroups exchange data."""

    smem_p: gl.shared_memory_descriptor
    rescales: gl.shared_memory_descriptor  # of acc_o; at the end of a work tile, its acc_scale
    rescale_flags: gl.shared_memory_descriptor  # whether any rescale is not 1
    q_scales: gl.shared_memory_descriptor  # of the query rows
    score_scales: gl.shared_memory_descriptor  # group scales for QK
    v_scale_ratios: gl.shared_memory_descriptor  # and for PV
    smem_uniform: gl.shared_memory_descriptor  # for `params.make_uniform_through_smem`


class QueryBlock(NamedTuple):
    """A work tile's query rows, of a block of heads."""

    m_block: gl.tensor  # of the request
    h: gl.tensor
    q_begin: gl.tensor  # first query row of the request
    seqlen_q: gl.tensor  # of the request


# Query: from global to shared memory, as e4m3 terms.


@gluon.jit
def token_head_and_mask_of_rows(o_r, work_tile, h, cfg: gl.constexpr):
    """Returns (tokens, query heads, whether the row exists) of rows o_r of a work tile, for a block of heads."""
    o_r += work_tile.m_block * cfg.BLOCK_M
    heads = (h * cfg.GROUP + o_r % cfg.GROUP).to(gl.int64)
    return (work_tile.q_begin + o_r // cfg.GROUP).to(gl.int64), heads, o_r < work_tile.seqlen_q * cfg.GROUP


@gluon.jit
def load_query_row_chunks(tensors, q_block, strides, first_row, NUM_ROWS: gl.constexpr, ROPE_COLUMNS: gl.constexpr,
                          cfg: gl.constexpr):  # fmt: skip
    """Loads NUM_ROWS query rows from `first_row` on, as chunks of 128 columns, the rotary part last."""
    CHUNKS: gl.constexpr = cfg.CHUNKS
    WIDTH: gl.constexpr = 2 * cfg.CHUNK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_r = first_row + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, L))
    tokens, heads, m_row = token_head_and_mask_of_rows(o_r, q_block, q_block.h, cfg)
    p_q_nope = tensors.Q_NOPE + tokens * strides.q_nope_t + heads * strides.q_nope_h
    p_q_pe = tensors.Q_PE + tokens * strides.q_pe_t + heads * strides.q_pe_h
    chunks = ()
    for i in gl.static_range(CHUNKS):
        chunks = chunks + (load_query_chunk(p_q_nope, m_row, i * WIDTH, WIDTH, cfg.DV, L, HIDE_ZEROS=True),)
    return chunks + (load_query_chunk(p_q_pe, m_row, 0, ROPE_COLUMNS, rope_columns(cfg), L, HIDE_ZEROS=True),)


@gluon.jit
def elementwise_max_abs_bits(a, b):
    """Returns the larger magnitude of two bf16 tensors, as bits: int16."""
    a, b = a.to(gl.int16, bitcast=True), b.to(gl.int16, bitcast=True)
    return gl.inline_asm_elementwise(MAX_ABS_BF16X2_PTX, "=r,r,r", [a, b], gl.int16, True, 2)


@gluon.jit
def view_smem_rows_in_steps(x, ROWS_PER_STEP: gl.constexpr):
    """Returns a view of query rows in shared memory in steps of STEP rows."""
    NUM_STEPS: gl.constexpr = x.shape[0] * x.shape[1] // ROWS_PER_STEP
    return reinterpret(x, x.dtype, [NUM_STEPS, ROWS_PER_STEP, x.shape[2]], x.layout)


@gluon.jit
def store_e4m3_and_residual_of_step(x, inv_scale, smem_rows, i_step):
    """Stores x × inv_scale in shared memory as e4m3, and its remainder behind all rows."""
    STEP: gl.constexpr = x.shape[0]
    _, inv_scale = gl.broadcast(x, inv_scale[:, None])
    high_term, low_term = gl.inline_asm_elementwise(
        SPLIT_IN_E4M3_TERMS_PTX, "=&r,=r,r,r,r,r", [x, inv_scale], [gl.int8, gl.int8], True, 4
    )
    smem_rows.index(i_step).store(high_term.to(gl.float8e4nv, bitcast=True))
    smem_rows.index(i_step + BLOCK_M // STEP).store(low_term.to(gl.float8e4nv, bitcast=True))


@gluon.jit
def negate_e4m3_if(x, negate):
    """Returns e4m3 codes, negated if `negate`."""
    mask = gl.where(negate, 0x80, 0).to(gl.int8)
    x = x.to(gl.int8, bitcast=True)
    _, mask = gl.broadcast(x, gl.full([1, 1], 0, gl.int8, x.type.layout) | mask)
    x = gl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, mask], gl.int8, True, 4)
    return x.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def store_q_rows_and_scales(chunks, smem_q_nope, smem_q_pe, smem_q_scales, negate, i_step, Q_TERMS: gl.constexpr,
                            cfg: gl.constexpr):  # fmt: skip
    """Stores a step's query rows, negated if `negate`, and their q_scales in shared memory."""
    CHUNKS: gl.constexpr = cfg.CHUNKS
    STEP: gl.constexpr = chunks[0].shape[0]
    STEPS: gl.constexpr = Q_TERMS * BLOCK_M // STEP  # of a chunk
    q_pe_chunk = chunks[CHUNKS]
    ROW: gl.constexpr = gl.SliceLayout(1, q_pe_chunk.type.layout)
    if Q_TERMS == 2:
        # Scales of rows and of their scores, powers of two. Scaled, each row's largest element lies in [128, 256):
        # elements down to 2^-10 of that are exact in two e4m3 terms.
        abs_max = elementwise_max_abs_bits(chunks[0], chunks[1])
        for i in gl.static_range(2, CHUNKS):
            abs_max = elementwise_max_abs_bits(abs_max, chunks[i])
        abs_max = gl.max(abs_max, 1)
        abs_max = gl.maximum(abs_max, gl.max(elementwise_max_abs_bits(q_pe_chunk, q_pe_chunk), 1)).to(gl.int32)
        exponent = gl.maximum(abs_max >> 7, 8)
        inv_scale = ((261 - exponent) << 7 | gl.where(negate, 0x8000, 0)).to(gl.int16).to(gl.bfloat16, bitcast=True)
        q_scale = gl.where(exponent == 255, float("nan"), ((exponent - 7) << 23).to(gl.float32, bitcast=True))
        for i in gl.static_range(CHUNKS):
            store_e4m3_and_residual_of_step(chunks[i], inv_scale, smem_q_nope, STEPS * i + i_step)
        if smem_q_pe.dtype == gl.bfloat16:
            x = q_pe_chunk.to(gl.float32) * inv_scale.to(gl.float32)[:, None]
            smem_q_pe.index(i_step).store(x.to(gl.bfloat16))
        else:
            store_e4m3_and_residual_of_step(q_pe_chunk, inv_scale, smem_q_pe, i_step)
    else:
        q_scale = gl.full([STEP], 1.0, gl.float32, ROW)
        for i in gl.static_range(CHUNKS):
            smem_q_nope.index(STEPS * i + i_step).store(negate_e4m3_if(chunks[i], negate))
        q_pe_chunk = negate_e4m3_if(q_pe_chunk, negate)
        if smem_q_pe.dtype == gl.bfloat16:
            q_pe_chunk = q_pe_chunk.to(gl.bfloat16)
        smem_q_pe.index(i_step).store(q_pe_chunk)
    smem_q_scales.index(i_step).store(q_scale)


@gluon.jit
def store_query_half_as_e4m3(tensors, q, q_scales, q_block, query_sign, strides, I_ROW_HALF: gl.constexpr,
                    Q_TERMS: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Loads half of a work tile's query rows into shared memory; MMAs may read them after the next barrier.

    With two terms, not unrolled: fetching code that runs once costs some 45 cycles per 128 bytes.
    """
    q_nope, q_pe = q
    WIDTH_PE: gl.constexpr = q_pe.shape[2]
    STEP: gl.constexpr = 16 if Q_TERMS == 2 else 32  # rows that registers hold twice, or once
    q_scales = reinterpret(q_scales, gl.float32, [BLOCK_M // STEP, STEP], q_scales.layout)
    HALF: gl.constexpr = BLOCK_M // STEP // 2
    q_nope_rows, q_pe_rows = view_smem_rows_in_steps(q_nope, STEP), view_smem_rows_in_steps(q_pe, STEP)
    next_chunks = load_query_row_chunks(tensors, q_block, strides, I_ROW_HALF * HALF * STEP, STEP, WIDTH_PE, cfg)
    if HALF == 1:
        store_q_rows_and_scales(next_chunks, q_nope_rows, q_pe_rows, q_scales, query_sign < 0, I_ROW_HALF, Q_TERMS, cfg)
    else:
        for i_step in range(I_ROW_HALF * HALF, (I_ROW_HALF + 1) * HALF):
            chunks = next_chunks
            next_block = QueryBlock(
                q_block.m_block, q_block.h, q_block.q_begin,
                gl.where(i_step + 1 < (I_ROW_HALF + 1) * HALF, q_block.seqlen_q, 0),
            )  # fmt: skip
            next_chunks = load_query_row_chunks(tensors, next_block, strides, (i_step + 1) * STEP, STEP, WIDTH_PE, cfg)
            store_q_rows_and_scales(chunks, q_nope_rows, q_pe_rows, q_scales, query_sign < 0, i_step, Q_TERMS, cfg)
    fence_async_shared()


@gluon.jit
def load_positive_score_scales(smem_q_scales, score_scale, LAYOUT: gl.constexpr):
    """Returns the positive scale of each row's scores: [BLOCK_M]."""
    row_scale = smem_q_scales.load(LAYOUT) * gl.where(score_scale < 0, -score_scale, score_scale)
    return gl.where(row_scale < MIN_SCALE, MIN_SCALE, row_scale)


# QK: scores of a tile.


@gluon.jit
def start_qk_chunk(q_chunk, k_chunk, zero_acc, Q_TERMS: gl.constexpr):
    """Starts QK of a chunk of columns, for all terms of the query; returns it in flight."""
    if Q_TERMS == 2:
        s = warpgroup_mma(q_chunk.slice(BLOCK_M, BLOCK_M), k_chunk, zero_acc, use_acc=False, is_async=True)
        return warpgroup_mma(q_chunk.slice(0, BLOCK_M), k_chunk, s, is_async=True)
    else:
        return warpgroup_mma(q_chunk, k_chunk, zero_acc, use_acc=False, is_async=True)


@gluon.jit
def start_residual_and_rope_qk(smem_kv, q, stage, opaque_zero, s, i_batch: gl.constexpr, cfg: gl.constexpr):
    """Starts batch i_batch of MMA_BATCHES of QK for the query's second terms and the rotary part.

    The second terms are 2^-4 of the first: one accumulator holds them all. A warp stalls when too many MMAs are in
    flight: they start in batches, with other work between.
    """
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    q_nope, q_pe = q
    k_pe_stage = k_pe.index(stage).permute((1, 0))
    if i_batch == 0:
        s = warpgroup_mma(q_pe.index(opaque_zero).slice(BLOCK_M, BLOCK_M), k_pe_stage, s, use_acc=False, is_async=True)
    for i in gl.static_range(CHUNKS):
        if (i + 1) // 2 == i_batch:
            k_i = ckv.index(stage * CHUNKS + i).permute((1, 0))
            s = warpgroup_mma(q_nope.index(opaque_zero + i).slice(BLOCK_M, BLOCK_M), k_i, s, is_async=True)
    if i_batch == MMA_BATCHES - 1:
        s = warpgroup_mma(q_pe.index(opaque_zero).slice(0, BLOCK_M), k_pe_stage, s, is_async=True)
    return s


@gluon.jit
def arrive_p_full_if(p_full, is_set):
    """Signals P of the tile before, if there is one.

    Its PV should overlap this tile's softmax, not compete with its QK.
    """
    thread_barrier()
    mbarrier.arrive(p_full, pred=is_set)


@gluon.jit
def compute_scores(smem_kv, q, residual_and_rope_s, stage, opaque_zero, arrive_p_full_if_args, Q_TERMS: gl.constexpr,
                   SCORE_LAYOUT: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Returns QK of a tile: fp32 [BLOCK_M, BLOCK_N]. residual_and_rope_s: finished QK of second terms and rotary part

    arrive_p_full_if_args: with one term, arguments of `arrive_p_full_if`, called once all MMAs have started
    """
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    q_nope, q_pe = q
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SCORE_LAYOUT)
    q_0, k_0 = q_nope.index(opaque_zero).slice(0, BLOCK_M), ckv.index(stage * CHUNKS).permute((1, 0))
    x = warpgroup_mma(q_0, k_0, zero, use_acc=False, is_async=True)
    s = residual_and_rope_s
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
            arrive_p_full_if(arrive_p_full_if_args[0], arrive_p_full_if_args[1])
        s += warpgroup_mma_wait(1, [x])
        x = next_x
    return s + warpgroup_mma_wait(0, [x])


@gluon.jit
def wait_group_scales_and_compute_scores(smem_kv, q, stage, opaque_zero, score_scales, scales_full, phase,
                                         arrive_p_full_if_args, Q_TERMS: gl.constexpr, SCORE_LAYOUT: gl.constexpr,
                                         cfg: gl.constexpr):  # fmt: skip
    """Returns QK where each chunk of a key has a scale and the rotary part is bf16: fp32 [BLOCK_M, BLOCK_N].

    `store_group_scales_log2_max_inv_max_and_ratios` stores score_scales and signals scales_full.
    """
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    q_nope, q_pe = q
    ROW: gl.constexpr = gl.SliceLayout(0, SCORE_LAYOUT)
    S_R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, SCORE_LAYOUT)
    zero_pe = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S_R)
    s_pe = warpgroup_mma(
        q_pe.index(opaque_zero), k_pe.index(stage).permute((1, 0)), zero_pe, use_acc=False, is_async=True
    )
    x = start_qk_chunk(q_nope.index(opaque_zero), ckv.index(stage * CHUNKS).permute((1, 0)), zero, Q_TERMS)
    mbarrier.wait(scales_full, phase)
    s = gl.convert_layout(warpgroup_mma_wait(Q_TERMS, [s_pe]), SCORE_LAYOUT)
    for i in gl.static_range(1, CHUNKS):
        next_x = start_qk_chunk(
            q_nope.index(opaque_zero + i), ckv.index(stage * CHUNKS + i).permute((1, 0)), zero, Q_TERMS
        )
        if i == CHUNKS - 1:
            arrive_p_full_if(arrive_p_full_if_args[0], arrive_p_full_if_args[1])
        s += warpgroup_mma_wait(Q_TERMS, [x]) * score_scales.index(SCALE_COLUMNS * stage + i - 1).load(ROW)[None, :]
        x = next_x
    return s + warpgroup_mma_wait(0, [x]) * score_scales.index(SCALE_COLUMNS * stage + CHUNKS - 1).load(ROW)[None, :]


# Mask and online softmax.


@gluon.jit
def apply_mask(s, n_block, num_keys, seqlen_q, row_begin, cfg: gl.constexpr):
    """Returns scores with −inf where a query row does not see a key of n_block."""
    S: gl.constexpr = s.type.layout
    if (n_block + 1) * BLOCK_N > num_keys - seqlen_q + 1:
        o_n = n_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        position = num_keys - seqlen_q + (row_begin + gl.arange(0, BLOCK_M, gl.SliceLayout(1, S))) // cfg.GROUP
        s = gl.where((o_n < num_keys)[None, :] & (o_n[None, :] <= position[:, None]), s, float("-inf"))
    return s


@gluon.jit
def view_by_lane(s):
    """Returns a tile of scores viewed by the lanes that hold its keys: [BLOCK_M, BLOCK_N / 8, LANES_PER_ROW, 2]."""
    return gl.reshape(s, [BLOCK_M, BLOCK_N // 8, LANES_PER_ROW, 2])


@gluon.jit
def row_max_by_lane(s):
    """Returns each row's maximum over the scores that one thread holds: [BLOCK_M, LANES_PER_ROW]."""
    return gl.max(gl.max(view_by_lane(s), 3), 1)


@gluon.jit
def lane_row_sum(p):
    """Returns each row's sum over the P that one thread holds: [BLOCK_M, LANES_PER_ROW]."""
    return gl.sum(gl.sum(view_by_lane(p), 3), 1)


@gluon.jit
def exp2_of_scores_minus_max(s, row_scales, safe_max_by_lane, cfg: gl.constexpr):
    """Returns 2^(s × row_scales − safe_max_by_lane); with group scales, the scores are scaled already."""
    safe_max_by_lane = safe_max_by_lane[:, None, :][:, :, :, None]
    x = view_by_lane(s)
    if not cfg.GROUP_SCALES:
        L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, x.type.layout)))
        x *= gl.convert_layout(row_scales, L)[:, None][:, :, None][:, :, :, None]
    return gl.convert_layout(gl.reshape(gl.exp2(x - safe_max_by_lane), [BLOCK_M, BLOCK_N]), s.type.layout)


@gluon.jit
def store_p_key_halves_to_smem(p, smem_p, p_stage):
    """Stores P in shared memory for the PV warpgroups, by halves of its keys."""
    left, right = split_columns(p.to(gl.float16))
    smem_p.index(p_stage * KEY_HALVES).store(left)
    smem_p.index(p_stage * KEY_HALVES + 1).store(right)


# QK warpgroup: QK, mask, online softmax; P and rescale for the PV warpgroups.


@gluon.jit
def qk_softmax_warpgroup(tensors, q, smem_kv, mbarriers, buffers, scales, cta_range, strides, STAGES: gl.constexpr,
                         PREFETCH_SECOND_TERMS_QK: gl.constexpr, Q_TERMS: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Computes QK and softmax of the CTA range.

    For every tile it stores P and rescale for the PV warpgroups; at the end of a work tile, in one more iteration,
    acc_scale.
    """
    i_cta, block, block_end, i_request, n_block_base = (
        cta_range.i_cta, cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    full, empty, p_full, p_empty = mbarriers.full, mbarriers.empty, mbarriers.p_full, mbarriers.p_empty
    rescales, rescale_flags, score_scales, smem_uniform = (
        buffers.rescales, buffers.rescale_flags, buffers.score_scales, buffers.smem_uniform,
    )  # fmt: skip
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    LANE_LAYOUT: gl.constexpr = row_max_by_lane(gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S)).type.layout
    h = i_cta % cfg.HEADS
    kv_iter, p_iter, num_done = 0, 0, 0
    while block < block_end:
        # Next work tile.
        work_tile = find_work_tile_at_block_cut_at_end(
            tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, block, block_end, i_request, n_block_base, cfg
        )
        i_request, n_block_base, num_keys = work_tile.i_request, work_tile.n_block_base, work_tile.num_keys
        n_block_begin, n_block_end = work_tile.n_block_begin, work_tile.n_block_end
        if cfg.GROUP_SCALES:  # else the compiler knows that they are uniform
            n_block_begin = make_uniform_through_smem(smem_uniform, 0, n_block_begin)
            n_block_end = make_uniform_through_smem(smem_uniform, 1, n_block_end)
            num_keys = make_uniform_through_smem(smem_uniform, 2, num_keys)
        # Wait for the query.
        mbarrier.wait(mbarriers.q_full.index(0), num_done & 1)
        row_scales = load_positive_score_scales(buffers.q_scales, scales.score_scale, ROW)
        row_max = gl.full([BLOCK_M, LANES_PER_ROW], float("-inf"), gl.float32, LANE_LAYOUT)
        row_sum = gl.full([BLOCK_M, LANES_PER_ROW], 0.0, gl.float32, LANE_LAYOUT)
        zero = gl.full([BLOCK_M, BLOCK_N], 0.0, gl.float32, S)
        early_s = zero
        # Prologue: QK of second terms for the first tile.
        if PREFETCH_SECOND_TERMS_QK:
            wait_full_and_fence_if_gathered(full.index(kv_iter % STAGES), (kv_iter // STAGES) & 1, cfg)
            for i in gl.static_range(MMA_BATCHES):
                early_s = start_residual_and_rope_qk(smem_kv, q, kv_iter % STAGES, n_block_begin >> 30, early_s, i, cfg)
            early_s = warpgroup_mma_wait(0, [early_s])
        for n_block in range(n_block_begin, n_block_end):
            # Wait for the tile.
            stage = kv_iter % STAGES
            if not PREFETCH_SECOND_TERMS_QK:
                wait_full_and_fence_if_gathered(full.index(stage), (kv_iter // STAGES) & 1, cfg)
            # With two stages the next stage is the previous one, whose arrival was deferred to here.
            p_full_args = (p_full.index((p_iter + 1) % P_STAGES), n_block > n_block_begin)
            # QK.
            # NOTE: n_block >> 30 is 0. A constant would make the compiler keep, and spill, the descriptors of q.
            if cfg.GROUP_SCALES:
                phase = (kv_iter // STAGES) & 1
                s = wait_group_scales_and_compute_scores(
                    smem_kv, q, stage, n_block >> 30, score_scales, mbarriers.scales_full.index(stage), phase,
                    p_full_args, Q_TERMS, S, cfg,
                )  # fmt: skip
                # The key's largest scale joins the exponent: the ratios to it, which multiply V, lie in [−1, 1].
                s = (
                    s * row_scales[:, None]
                    + score_scales.index(SCALE_COLUMNS * stage + 4).load(gl.SliceLayout(0, S))[None, :]
                )
            else:
                s = compute_scores(smem_kv, q, early_s, stage, n_block >> 30, p_full_args, Q_TERMS, S, cfg)
            # Release KV; with group scales, once the softmax has read them.
            if not cfg.GROUP_SCALES:
                sync_and_arrive(empty.index(stage))
            # The softmax overlaps second-term QK of the next tile; after the last tile its result is unused.
            if PREFETCH_SECOND_TERMS_QK:
                next_stage = (kv_iter + 1) % STAGES
                mbarrier.wait(full.index(next_stage), ((kv_iter + 1) // STAGES) & 1, pred=n_block + 1 < n_block_end)
                fence_async_shared_if_gathered(cfg)
                early_s = start_residual_and_rope_qk(smem_kv, q, next_stage, n_block >> 30, zero, 0, cfg)
            # Mask.
            s = apply_mask(s, n_block, num_keys, work_tile.seqlen_q, work_tile.m_block * cfg.BLOCK_M, cfg)
            # Online softmax, with lazy rescaling.
            lane_max = row_max_by_lane(s)
            if not cfg.GROUP_SCALES:
                lane_max *= gl.convert_layout(row_scales, gl.SliceLayout(1, LANE_LAYOUT))[:, None]
            row_max_new, needs_rescale = gl.inline_asm_elementwise(
                LAZY_ROW_MAX_PTX, "=&f,=&f,=&r,=&r,f,f,f,f", [lane_max, row_max], [gl.float32, gl.int32], False, 2
            )
            safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
            rescale = gl.where(row_max_new == row_max, 1.0, gl.exp2(row_max - safe_max))
            row_max = row_max_new
            if PREFETCH_SECOND_TERMS_QK:
                early_s = start_residual_and_rope_qk(smem_kv, q, next_stage, n_block >> 30, early_s, 1, cfg)
            # P and row_sum.
            p = exp2_of_scores_minus_max(s, row_scales, safe_max, cfg)
            if cfg.GROUP_SCALES:
                row_sum = row_sum * rescale + lane_row_sum(
                    p * score_scales.index(SCALE_COLUMNS * stage + 5).load(gl.SliceLayout(0, S))[None, :]
                )
                sync_and_arrive(empty.index(stage))
            else:
                row_sum = row_sum * rescale + lane_row_sum(p)
            if PREFETCH_SECOND_TERMS_QK:
                early_s = start_residual_and_rope_qk(smem_kv, q, next_stage, n_block >> 30, early_s, 2, cfg)
            # Wait for a free P stage; store P and rescale.
            mbarrier.wait(p_empty.index(p_iter % P_STAGES), ((p_iter // P_STAGES) & 1) ^ 1)
            store_p_key_halves_to_smem(p, buffers.smem_p, p_iter % P_STAGES)
            rescales.index(p_iter % P_STAGES).store(rescale)
            rescale_flags.index(p_iter % P_STAGES).store(
                gl.permute(gl.reshape(needs_rescale.to(gl.int8), [4, 16, LANES_PER_ROW]), (1, 2, 0))
            )
            fence_async_shared()
            if PREFETCH_SECOND_TERMS_QK:
                sync_and_arrive(p_full.index(p_iter % P_STAGES))
                early_s = warpgroup_mma_wait(0, [early_s])
            kv_iter += 1
            p_iter += 1
        if not PREFETCH_SECOND_TERMS_QK:
            sync_and_arrive(p_full.index((p_iter + 1) % P_STAGES))
        # Epilogue: acc_scale for the PV warpgroups, then metadata, and LSE or the partial state.
        row_max, row_sum = gl.max(row_max, 1), gl.sum(row_sum, 1)
        o_r = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LANE_LAYOUT))
        tokens, heads, m_row = token_head_and_mask_of_rows(o_r, work_tile, h, cfg)
        acc_scale, lse = compute_acc_scale_and_lse(
            row_max, row_sum, scales.value_scale, tensors.SINKS, heads, m_row, cfg, cfg.LSE_OF_KEYS
        )
        mbarrier.wait(p_empty.index(p_iter % P_STAGES), ((p_iter // P_STAGES) & 1) ^ 1)
        rescales.index(p_iter % P_STAGES).store(
            acc_scale[:, None] + gl.full([BLOCK_M, LANES_PER_ROW], 0.0, gl.float32, LANE_LAYOUT)
        )
        sync_and_arrive(p_full.index(p_iter % P_STAGES))
        p_iter, num_done = p_iter + 1, num_done + 1
        if n_block_begin == 0:
            store_num_splits_and_first_cta(tensors, work_tile, cta_range, cfg)
        if n_block_end - n_block_begin == work_tile.num_n_blocks:
            if cfg.HAS_LSE:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            partial_slot = 2 * i_cta + (n_block_begin == 0).to(gl.int32)
            p_row = partial_row_ptr(tensors.SPLIT_WORKSPACE, partial_slot, o_r, cfg)
            store_partial_stats(p_row, row_max, row_sum, m_row, cfg)
        block += n_block_end - n_block_begin


# Dequant of V.


@gluon.jit
def load_packed_v_chunk_of_key_half(smem_packed_v, chunk, key_half: gl.constexpr, ACC_LAYOUT: gl.constexpr):
    """Loads packed V of a chunk for half the keys, transposed: [PACKED_PER_CHUNK, KEYS_PER_HALF]."""
    half = smem_packed_v.index(chunk).slice(key_half * KEYS_PER_HALF, KEYS_PER_HALF)
    return half.permute((1, 0)).load(gl.DotOperandLayout(0, ACC_LAYOUT, 2))


@gluon.jit
def dequant_v_even_and_odd_columns(packed, v_scale_ratios, key_half: gl.constexpr, cfg: gl.constexpr):
    """Dequantizes packed V to two fp16 tiles. v_scale_ratios: the chunk's scales over each key's largest."""
    if cfg.GROUP_SCALES:
        key_ratios = v_scale_ratios.slice(key_half * KEYS_PER_HALF, KEYS_PER_HALF).load(
            gl.SliceLayout(0, packed.type.layout)
        )
        _, key_ratios = gl.broadcast(packed, key_ratios[None, :])
        return gl.inline_asm_elementwise(
            SCALED_DEQUANT_PTX, "=r,=r,r,r", [packed, key_ratios], [gl.float16, gl.float16], True, 2
        )
    else:
        return dequant_packed(packed)


# Rescale and PV.


@gluon.jit
def rescale_acc_if_flagged(acc_o, smem_rescale, rescale_flag, ACC_LAYOUT: gl.constexpr):
    """Returns acc_o × rescale, skipped unless the flag says that some rescale is not 1: rarely."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    flag_word = reinterpret(rescale_flag, gl.int32, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if gl.max(flag_word.slice(0, 1).load(ONE), 0) != 0:
        L: gl.constexpr = gl.BlockedLayout([1, LANES_PER_ROW], [32, 1], [gl.num_warps(), 1], [1, 0])
        rescale = gl.convert_layout(gl.max(smem_rescale.load(L), 1), gl.SliceLayout(0, ACC_LAYOUT))
        out = ()
        for i in gl.static_range(4):
            out = out + (acc_o[i] * rescale[None, :],)
        acc_o = out
    return acc_o


@gluon.jit
def wait_p_rescale_and_start_pv(acc_o, smem_packed_v, first_chunk, buffers, p_full, p_iter,
                                     ACC_LAYOUT: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Waits for P and returns acc_o + V × P, the last MMAs in flight."""
    smem_p, v_scale_ratios = buffers.smem_p, buffers.v_scale_ratios
    p_stage = p_iter % P_STAGES
    packed = load_packed_v_chunk_of_key_half(smem_packed_v, first_chunk, 0, ACC_LAYOUT)
    if not cfg.GROUP_SCALES:  # ratios are ready only with P
        v = dequant_v_even_and_odd_columns(packed, v_scale_ratios, 0, cfg)
    mbarrier.wait(p_full.index(p_stage), (p_iter // P_STAGES) & 1)
    acc_o = rescale_acc_if_flagged(
        acc_o, buffers.rescales.index(p_stage), buffers.rescale_flags.index(p_stage), ACC_LAYOUT
    )
    if cfg.GROUP_SCALES:
        v = dequant_v_even_and_odd_columns(packed, v_scale_ratios.index(first_chunk), 0, cfg)
    for i in gl.static_range(CHUNKS_PER_WARPGROUP):
        for key_half in gl.static_range(KEY_HALVES):
            if i + key_half > 0:
                packed = load_packed_v_chunk_of_key_half(smem_packed_v, first_chunk + i, key_half, ACC_LAYOUT)
                acc_o = warpgroup_mma_wait(0, acc_o)
                v = dequant_v_even_and_odd_columns(packed, v_scale_ratios.index(first_chunk + i), key_half, cfg)
            p = smem_p.index(KEY_HALVES * p_stage + key_half).permute((1, 0))
            a0 = warpgroup_mma(v[0], p, acc_o[2 * i], is_async=True)
            a1 = warpgroup_mma(v[1], p, acc_o[2 * i + 1], is_async=True)
            if i == 0:
                acc_o = (a0, a1, acc_o[2], acc_o[3])
            else:
                acc_o = (acc_o[0], acc_o[1], a0, a1)
    return acc_o


# Epilogue of acc_o: the output, or a partial state for the combine.


@gluon.jit
def store_row_half_to_smem_with_columns_interleaved(smem, even_columns, odd_columns, row_half: gl.constexpr):
    """Stores half the rows of a chunk, columns interleaved, in shared memory: [ROWS_STAGED, 2 * PACKED_PER_CHUNK]."""
    SPLIT_SHAPE: gl.constexpr = [PACKED_PER_CHUNK, 2, ROWS_STAGED]
    even_columns = gl.split(gl.permute(gl.reshape(even_columns, SPLIT_SHAPE), (0, 2, 1)))[row_half]
    odd_columns = gl.split(gl.permute(gl.reshape(odd_columns, SPLIT_SHAPE), (0, 2, 1)))[row_half]
    x = gl.permute(gl.join(even_columns, odd_columns), (1, 0, 2))
    smem.store(gl.reshape(x, [ROWS_STAGED, 2 * PACKED_PER_CHUNK]))


@gluon.jit
def store_output_or_unnormalized_partial_half(
    tensors, smem_q, acc_o, smem_acc_scale, is_unsplit, partial_slot, q_block, strides, I_CONSUMER: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Stores the output, or a split's partial acc_o, through the query's memory, so that rows are contiguous."""
    OUT, SPLIT_WORKSPACE = tensors.OUT, tensors.SPLIT_WORKSPACE
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    STAGING_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    NUM_STAGING_BUFFERS: gl.constexpr = (
        smem_q.shape[0] * smem_q.shape[1] * smem_q.shape[2] // (4 * ROWS_STAGED * 2 * PACKED_PER_CHUNK)
    )
    STEPS: gl.constexpr = ROWS_STAGED // ROWS_PER_STORE
    staging = reinterpret(
        smem_q, gl.float32, [NUM_STAGING_BUFFERS, ROWS_STAGED, 2 * PACKED_PER_CHUNK], STAGING_LAYOUT
    ).index(I_CONSUMER)
    staging_steps = reinterpret(
        smem_q, gl.float32, [NUM_STAGING_BUFFERS * STEPS, ROWS_PER_STORE, 2 * PACKED_PER_CHUNK], STAGING_LAYOUT
    )
    acc_scales = reinterpret(
        smem_acc_scale, gl.float32, [BLOCK_M // ROWS_PER_STORE, ROWS_PER_STORE, LANES_PER_ROW], smem_acc_scale.layout
    )
    for i in range(4):  # not unrolled: fetching code that runs once is slow
        if i == 0:
            store_row_half_to_smem_with_columns_interleaved(staging, acc_o[0], acc_o[1], 0)
        elif i == 1:
            store_row_half_to_smem_with_columns_interleaved(staging, acc_o[0], acc_o[1], 1)
        elif i == 2:
            store_row_half_to_smem_with_columns_interleaved(staging, acc_o[2], acc_o[3], 0)
        else:
            store_row_half_to_smem_with_columns_interleaved(staging, acc_o[2], acc_o[3], 1)
        for j in range(STEPS):
            x = staging_steps.index(I_CONSUMER * STEPS + j).load(W)
            step = i % 2 * STEPS + j
            o_r = step * ROWS_PER_STORE + gl.arange(0, ROWS_PER_STORE, gl.SliceLayout(1, W))
            o_d = (CHUNKS_PER_WARPGROUP * I_CONSUMER + i // 2) * 2 * PACKED_PER_CHUNK + gl.arange(
                0, 2 * PACKED_PER_CHUNK, gl.SliceLayout(0, W)
            )
            tokens, heads, m_row = token_head_and_mask_of_rows(o_r, q_block, q_block.h, cfg)
            if is_unsplit:
                x *= gl.max(acc_scales.index(step).load(W), 1)[:, None]
                p_out = (OUT + tokens * strides.out_t + heads * strides.out_h)[:, None] + o_d[None, :]
                mask = mask_of_output_columns(m_row[:, None], o_d[None, :], cfg)
                gl.store(p_out, cast_output_saturating_fp8(x, OUT, cfg), mask=mask)
            else:
                p_row = partial_row_ptr(SPLIT_WORKSPACE, partial_slot, o_r, cfg)
                gl.store(p_row[:, None] + o_d[None, :], x, mask=m_row[:, None])


# PV warpgroups: query load, PV and output of half of the columns each.


@gluon.jit
def load_q_and_pv_warpgroup(tensors, q, smem_kv, mbarriers, buffers, score_scale, cta_range, strides,
                            I_CONSUMER: gl.constexpr, STAGES: gl.constexpr, Q_TERMS: gl.constexpr,
                            cfg: gl.constexpr):  # fmt: skip
    """Computes PV of the CTA range for chunks 2 * I_CONSUMER and the next.

    For every work tile it first loads half of the query's rows.
    """
    i_cta, block, block_end, i_request, n_block_base = (
        cta_range.i_cta, cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    p_full, p_empty = mbarriers.p_full, mbarriers.p_empty
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    zero = gl.full([PACKED_PER_CHUNK, BLOCK_M], 0.0, gl.float32, O)
    smem_packed_v = reinterpret(
        smem_kv.latents, gl.int16, [STAGES * cfg.CHUNKS, BLOCK_N, PACKED_PER_CHUNK], gl.NVMMASharedLayout(128, 16)
    )
    kv_iter, num_done = 0, 0
    while block < block_end:
        # Next work tile.
        work_tile = find_work_tile_at_block_cut_at_end(
            tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, block, block_end, i_request, n_block_base, cfg
        )
        i_request, n_block_base, num_keys = work_tile.i_request, work_tile.n_block_base, work_tile.num_keys
        n_block_begin, n_block_end = work_tile.n_block_begin, work_tile.n_block_end
        # Computed here, where registers are free: in the loop they are scarce.
        partial_slot = 2 * i_cta + (n_block_begin == 0).to(gl.int32)
        is_unsplit = n_block_end - n_block_begin == work_tile.num_n_blocks
        block += n_block_end - n_block_begin
        q_block = QueryBlock(work_tile.m_block, i_cta % cfg.HEADS, work_tile.q_begin, work_tile.seqlen_q)
        # Load the query, once both PV warpgroups are done with its memory.
        mbarrier.wait(mbarriers.q_empty.index(0), (num_done & 1) ^ 1)
        store_query_half_as_e4m3(tensors, q, buffers.q_scales, q_block, score_scale, strides, I_CONSUMER, Q_TERMS, cfg)
        sync_and_arrive(mbarriers.q_full.index(0))
        mbarrier.arrive(mbarriers.first_q_full.index(0), pred=num_done == 0)
        acc_o = (zero, zero, zero, zero)
        for n_block in range(n_block_begin, n_block_end):
            # Wait for the tile.
            stage = kv_iter % STAGES
            mbarrier.wait(mbarriers.full.index(stage), (kv_iter // STAGES) & 1)
            first_chunk = stage * cfg.CHUNKS + CHUNKS_PER_WARPGROUP * I_CONSUMER
            if not cfg.GATHER_ROWS and (n_block + 1) * BLOCK_N > num_keys:
                zero_oob_rows_in_smem(smem_packed_v, first_chunk, CHUNKS_PER_WARPGROUP, num_keys - n_block * BLOCK_N)
                fence_async_shared()  # TMA writes there next
            # PV; release KV, then P.
            p_iter = kv_iter + num_done
            acc_o = wait_p_rescale_and_start_pv(acc_o, smem_packed_v, first_chunk, buffers, p_full, p_iter, O, cfg)
            sync_and_arrive(mbarriers.empty.index(stage))
            acc_o = warpgroup_mma_wait(0, acc_o)
            sync_and_arrive(p_empty.index(p_iter % P_STAGES))
            kv_iter += 1
        # Epilogue: wait for acc_scale, store.
        p_iter = kv_iter + num_done
        mbarrier.wait(p_full.index(p_iter % P_STAGES), (p_iter // P_STAGES) & 1)
        smem_rescale = buffers.rescales.index(p_iter % P_STAGES)
        store_output_or_unnormalized_partial_half(
            tensors, q.latents, acc_o, smem_rescale, is_unsplit, partial_slot, q_block, strides, I_CONSUMER, cfg
        )
        sync_and_arrive(p_empty.index(p_iter % P_STAGES))
        mbarrier.arrive(mbarriers.q_empty.index(0))
        num_done += 1


# The kernel.


@gluon.jit
def mla_decode_three_warpgroups_kernel(
    Q_NOPE, Q_PE, CKV_MAP, KPE_MAP, SCALES_MAP, CKV, KPE, SCALES, ckv_row_pitch_16_bytes, kpe_row_pitch_16_bytes,
    scale_row_pitch_16_bytes, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE, softmax_scale,
    SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, B, T, oob_row, scale_rows_per_page, max_m_blocks,
    stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h, stride_table_b, stride_out_t, stride_out_h,
    stride_lse_t, stride_lse_h, STAGES: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Computes one CTA range for one block of heads."""
    gl.static_assert(cfg.CODE == "e4m3", "a code that this kernel does not know")
    # Prologue: arguments; lengths of all requests, early.
    pdl_wait()
    i_cta = gl.program_id(0)
    num_ctas = gl.num_programs(0)
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
    if cfg.VARLEN_Q:
        padding_begin = gl.load(CU_SEQLENS_Q + B).to(gl.int32)  # arrives with the lengths
    IN_EVERY_WARP: gl.constexpr = not cfg.GROUP_SCALES  # with group scales, registers are scarce
    block_counts = (
        load_n_and_m_block_counts(SEQ_LENS, CU_SEQLENS_Q, B, cfg, IN_EVERY_WARP) if fits_all_requests(cfg) else ()
    )
    # Shared memory and barriers.
    E4M3: gl.constexpr = gl.float8e4nv
    WIDTH: gl.constexpr = 2 * cfg.CHUNK
    R: gl.constexpr = KPE_MAP.dtype
    WIDTH_PE: gl.constexpr = KPE_MAP.block_shape[1]
    Q_TERMS: gl.constexpr = 1 if Q_NOPE.dtype.element_ty == E4M3 else 2
    Q_PE_SMEM_ROWS: gl.constexpr = BLOCK_M if cfg.GROUP_SCALES else Q_TERMS * BLOCK_M
    ckv = gl.allocate_shared_memory(E4M3, [STAGES * cfg.CHUNKS, BLOCK_N, WIDTH], CKV_MAP.layout)
    k_pe = gl.allocate_shared_memory(R, [STAGES, BLOCK_N, WIDTH_PE], KPE_MAP.layout)
    scales = k_pe
    if cfg.GROUP_SCALES:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N, cfg.CHUNKS], SCALES_MAP.layout)
    Q_NOPE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_TERMS * BLOCK_M, WIDTH], E4M3)
    Q_PE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_PE_SMEM_ROWS, WIDTH_PE], R)
    q_nope = gl.allocate_shared_memory(E4M3, [cfg.CHUNKS, Q_TERMS * BLOCK_M, WIDTH], Q_NOPE_LAYOUT)
    q_pe = gl.allocate_shared_memory(R, [1, Q_PE_SMEM_ROWS, WIDTH_PE], Q_PE_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, KEYS_PER_HALF], gl.float16)
    smem_p = gl.allocate_shared_memory(gl.float16, [KEY_HALVES * P_STAGES, BLOCK_M, KEYS_PER_HALF], P_LAYOUT)
    FLAT_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rescales = gl.allocate_shared_memory(
        gl.float32, [P_STAGES, BLOCK_M, LANES_PER_ROW], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    rescale_flags = gl.allocate_shared_memory(
        gl.int8, [P_STAGES, 16, LANES_PER_ROW, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    q_scales = gl.allocate_shared_memory(gl.float32, [BLOCK_M], FLAT_LAYOUT)
    smem_uniform = gl.allocate_shared_memory(gl.int32, [3, 1], FLAT_LAYOUT)
    score_scales, v_scale_ratios = rescales, smem_p
    if cfg.GROUP_SCALES:
        score_scales = gl.allocate_shared_memory(gl.float32, [SCALE_COLUMNS * STAGES, BLOCK_N], FLAT_LAYOUT)
        v_scale_ratios = gl.allocate_shared_memory(gl.float16, [STAGES * cfg.CHUNKS, BLOCK_N], FLAT_LAYOUT)
    if cfg.GROUP_SCALES:
        full, empty, scales_full = allocate_mbarrier_groups(STAGES, (copy_arrivals(cfg), 3, 1))
    else:
        full, empty = allocate_mbarrier_groups(STAGES, (copy_arrivals(cfg), 3))
        scales_full = full  # a placeholder
    p_full, p_empty = allocate_mbarrier_groups(P_STAGES, (1, 2))
    q_full, q_empty, first_q_full = allocate_mbarrier_groups(1, (2, 2, 2))
    mbarriers = Mbarriers(full, empty, p_full, p_empty, q_full, q_empty, first_q_full, scales_full)
    # Tile scheduler: this CTA's range.
    call_scales = load_score_and_value_scales(
        softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, cfg
    )
    cta_range = make_cta_range_of_flat_n_blocks(
        SEQ_LENS, CU_SEQLENS_Q, B, block_counts, i_cta // cfg.HEADS, num_ctas // cfg.HEADS, max_m_blocks, i_cta, cfg
    )
    q, smem_kv = QuerySmem(q_nope, q_pe), SmemKV(ckv, k_pe, scales)
    buffers = SharedBuffers(smem_p, rescales, rescale_flags, q_scales, score_scales, v_scale_ratios, smem_uniform)
    scale_prep_and_first_q_full = ScalePrepAndFirstQFull(first_q_full, score_scales, v_scale_ratios, scales_full)
    # With an 8-bit rotary part half of QK is of second terms: those MMAs overlap the previous softmax. Without second
    # terms, or with scales, which need registers, PV of the previous tile does.
    PREFETCH_SECOND_TERMS_QK: gl.constexpr = Q_TERMS == 2 and not cfg.GROUP_SCALES
    # NOTE: more than the compiler needs makes it wait for each MMA, and so does less.
    QK_REGISTERS: gl.constexpr = 136 if cfg.GROUP_SCALES else 128
    thread_barrier()  # arguments of the partitions may overwrite memory that reductions read
    gl.warp_specialize(
        [
            (tma_or_listed_rows_producer, (tensor_maps, cache_rows, page_lookup, full, empty, smem_kv, cta_range,
                                           scale_prep_and_first_q_full, STAGES, cfg)),
            (qk_softmax_warpgroup, (tensors, q, smem_kv, mbarriers, buffers, call_scales, cta_range, strides, STAGES,
                                    PREFETCH_SECOND_TERMS_QK, Q_TERMS, cfg)),
            (load_q_and_pv_warpgroup, (tensors, q, smem_kv, mbarriers, buffers, call_scales.score_scale, cta_range,
                                       strides, 0, STAGES, Q_TERMS, cfg)),
            (load_q_and_pv_warpgroup, (tensors, q, smem_kv, mbarriers, buffers, call_scales.score_scale, cta_range,
                                       strides, 1, STAGES, Q_TERMS, cfg)),
        ],
        [4, 4, 4],
        [QK_REGISTERS, PV_REGISTERS, PV_REGISTERS],
    )  # fmt: skip
    # Query rows of no request.
    if cfg.VARLEN_Q:
        store_empty_output_of_padding_rows(
            OUT, LSE, padding_begin, T, i_cta, num_ctas, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg
        )
