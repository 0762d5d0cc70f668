"""Ragged causal attention of new tokens to one chunk of up-projected keys and values (MLA prefill, last stage), sm_90.
The mask, the rescale and the consumer's waits are in `qk_softmax_and_prev_pv_step`, the waits for free stages in
`producer`; chunks are combined in `normalize_merge_and_store_output`.

What it computes, and from what: see the Triton file of the same name. A persistent CTA is warp-specialised: a producer
warp takes work tiles (request, head, 128 queries) from a counter, longest first, and copies their key blocks by TMA;
two consumer warpgroups of 64 queries each run QK of the next key block while PV of the last one completes.

Key blocks go from the last to the first, so that the masked ones come first and the long loop needs no mask.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....host.bind import KernelLaunch, TensorArg, TensorMapArg, stride_args, tensor_args
from ....triton.mla_prefill.attention import lse_tensor_name_and_strides
from ....triton.mla_prefill.gather_latents import chunk_offset_args
from ...versions import thread_barrier, tma_load
from ..parts.online_softmax import pack_p_16bit, row_sums_by_lane, softmax_to_p_row_max_and_rescale, unpack_p_16bit
from ..parts.pipeline import allocate_mbarrier_groups, pdl_launch_dependents, pdl_wait
from ..parts.tensor_maps import tensor_map_arg
from .tile_scheduler import (
    LN2,
    LOG2E,
    ROWS_PER_WARPGROUP,
    TILE_INFO_FIELDS,
    Mbarriers,
    SmemBuffers,
    Strides,
    TensorMaps,
    WorkQueue,
    any_nonzero,
    init_acc_and_max,
    load_request_shape,
    publish_work_tile,
    request_head_and_m_block_of_work_tile,
    start_qk,
    unpack_published_work_tile,
    zero_oob_and_nan_in_smem_v_and_fence,
)

BLOCK_N, STAGES, REGISTERS = 128, 2, 240
TAKEN_BY_THREE_WARPGROUPS, OVERFLOWED = 1, 2  # in WORK_COUNTER, after the work tiles that this kernel took
_L2_BYTES = 32 << 20  # keys and values that stay in the L2 cache for a while


class HeadDims(NamedTuple):
    heads: int
    nope: int
    rope: int
    dim_v: int


BLOCK_M = gl.constexpr(128)  # queries of a work tile


class SoftmaxState(NamedTuple):
    """State of a warpgroup's queries: acc_o, row_max, row_sum, and the last key block's P, packed."""

    acc_o: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    p_packed: gl.tensor


class ConsumerArgs(NamedTuple):
    """Arguments of consumers."""

    OUT: gl.tensor
    OUT_RESIDUAL: gl.tensor
    LSE: gl.tensor
    MAY_HAVE_NAN: gl.tensor
    num_rows: gl.tensor
    H: gl.tensor
    score_scale: gl.tensor
    strides: Strides
    buffers: SmemBuffers
    mbarriers: Mbarriers


# Producer: work tiles from the counter; copies of Q, K and V, as stages become free.


@gluon.jit
def producer(
    tensor_maps, work_queue, buffers, mbarriers, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    PUBLISH_ONLY_TILES_WITH_KEYS: gl.constexpr,
):  # fmt: skip
    """Takes work tiles and copies their key blocks; num_n_blocks 0 ends the loop."""
    k_full, k_empty, v_full, v_empty = mbarriers.k_full, mbarriers.k_empty, mbarriers.v_full, mbarriers.v_empty
    DN: gl.constexpr = buffers.q.shape[2]
    R: gl.constexpr = buffers.q_pe.shape[2]
    element_bytes: gl.constexpr = buffers.q.dtype.primitive_bitwidth // 8
    i_work_tile = gl.program_id(0)
    num_done = 0  # work tiles published
    kv_iter = 0  # key blocks copied
    while i_work_tile < work_queue.num_work_tiles:
        # Tile scheduler: the request, head and queries of this work tile
        i_next_work_tile = i_work_tile
        i_request, head, m_block = request_head_and_m_block_of_work_tile(
            i_work_tile, work_queue.num_m_blocks, work_queue.H, work_queue.heads_per_l2_group
        )
        request = load_request_shape(work_queue, i_request)
        q_begin, num_queries, num_keys = request.q_begin, request.num_queries, request.num_keys
        m_start = m_block * BLOCK_M
        visible_keys = gl.minimum(num_keys, gl.minimum(m_start + BLOCK_M, num_queries) + request.causal_offset)
        has_work = m_start < num_queries
        if PUBLISH_ONLY_TILES_WITH_KEYS:
            has_work = has_work & (visible_keys > 0)
        if has_work:
            # A work tile without keys gets one fully masked key block: consumers expect at least one.
            num_n_blocks = gl.maximum((visible_keys + BLOCK_N - 1) // BLOCK_N, 1)
            o_column = head * (2 * DN)
            for i in range(num_n_blocks):
                kv_row = request.chunk_row + (num_n_blocks - 1 - i) * BLOCK_N
                stage = kv_iter % STAGES
                phase = (kv_iter // STAGES) & 1
                if i == num_n_blocks - 1:  # no earlier: the CTA that is done first takes the next work tile
                    i_next_work_tile = gl.atomic_add(work_queue.WORK_COUNTER, 1, sem="relaxed") + gl.num_programs(0)
                # K: wait for a free stage, copy
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * (DN + R) * element_bytes)
                tma_load(tensor_maps.KEYS, [kv_row, o_column], k_full.index(stage), buffers.k.index(stage))
                tma_load(tensor_maps.KPE_MAP, [kv_row, 0], k_full.index(stage), buffers.k_pe.index(stage))
                # Q, with the work tile's info: wait until the last work tile's is read, copy
                if i == 0:
                    for i_consumer in gl.static_range(2):
                        q_full_barrier, q_row = (
                            mbarriers.q_full.index(i_consumer),
                            q_begin + m_start + i_consumer * ROWS_PER_WARPGROUP,
                        )
                        mbarrier.wait(mbarriers.q_empty.index(i_consumer), (num_done & 1) ^ 1)
                        publish_work_tile(
                            buffers.tile_info.index(i_consumer), q_begin + m_start, num_queries - m_start,
                            m_start + request.causal_offset, num_keys, num_n_blocks, head,
                        )  # fmt: skip
                        mbarrier.expect(q_full_barrier, ROWS_PER_WARPGROUP * (DN + R) * element_bytes)
                        tma_load(
                            tensor_maps.Q, [q_row, head * work_queue.head_stride], q_full_barrier,
                            buffers.q.index(i_consumer),
                        )  # fmt: skip
                        tma_load(
                            tensor_maps.Q_PE_MAP, [q_row, head * work_queue.head_stride + DN], q_full_barrier,
                            buffers.q_pe.index(i_consumer),
                        )  # fmt: skip
                # V: wait for a free stage, copy
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), BLOCK_N * DN * element_bytes)
                tma_load(tensor_maps.VALUES, [kv_row, o_column + DN], v_full.index(stage), buffers.v.index(stage))
                kv_iter += 1
            num_done += 1
        else:
            i_next_work_tile = gl.atomic_add(work_queue.WORK_COUNTER, 1, sem="relaxed") + gl.num_programs(0)
        i_work_tile = i_next_work_tile
    # The end, for both consumers
    for i_consumer in gl.static_range(2):
        mbarrier.wait(mbarriers.q_empty.index(i_consumer), (num_done & 1) ^ 1)
        publish_work_tile(buffers.tile_info.index(i_consumer), 0, 0, 0, 0, 0, 0)
        mbarrier.arrive(mbarriers.q_full.index(i_consumer), count=1)


# Main loop: QK, mask, online softmax, PV.


@gluon.jit
def qk_softmax_and_prev_pv_step(
    state, kv_iter, is_last, last_key, num_keys, may_have_nan, buffers, mbarriers, score_scale,
    SCORE_LAYOUT: gl.constexpr,
    MASKED: gl.constexpr,
    I_CONSUMER: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Runs QK of key block `kv_iter` while PV of the block before completes; then its online softmax."""
    acc_o, row_max, row_sum, p_packed = state
    q, q_pe = buffers.q.index(I_CONSUMER), buffers.q_pe.index(I_CONSUMER)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_o.type.layout, k_width=2)
    k_s, kpe_s, v_s = buffers.k, buffers.k_pe, buffers.v
    k_full, k_empty, v_full, v_empty = mbarriers.k_full, mbarriers.k_empty, mbarriers.v_full, mbarriers.v_empty
    stage, prev_stage = kv_iter % STAGES, (kv_iter - 1) % STAGES
    # QK of this key block, PV of the previous one
    mbarrier.wait(k_full.index(stage), (kv_iter // STAGES) & 1)
    s = start_qk(q, q_pe, k_s.index(stage), kpe_s.index(stage), SCORE_LAYOUT)
    acc_o = warpgroup_mma(unpack_p_16bit(p_packed, v_s.dtype, P), v_s.index(prev_stage), acc_o, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(mbarriers.q_empty.index(I_CONSUMER), count=1, pred=is_last)
    # NOTE: ptxas moves no arithmetic across the branch of a wait. This one, which never waits, keeps the arrival before
    # the exponentials; the one below keeps them before the wait for PV, which they overlap.
    mbarrier.wait(v_full.index(prev_stage), ((kv_iter - 1) // STAGES) & 1)
    # Mask and online softmax
    p, row_max, rescale = softmax_to_p_row_max_and_rescale(s, row_max, last_key, score_scale, MASKED)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + row_sums_by_lane(
        p
    )
    p_packed = pack_p_16bit(p, v_s.dtype)
    mbarrier.wait(v_full.index(stage), (kv_iter // STAGES) & 1)
    if MASKED:  # noqa: SIM102 - known to the compiler, unlike the other
        if may_have_nan:
            zero_oob_and_nan_in_smem_v_and_fence(v_s.index(stage), num_keys)
    # Wait for PV, free its stage, rescale
    acc_o = warpgroup_mma_wait(0, [acc_o])
    mbarrier.arrive(v_empty.index(prev_stage), count=1)
    acc_o = acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, acc_o.type.layout))[:, None]
    return SoftmaxState(acc_o, row_max, row_sum, p_packed)


# Epilogue: the output, combined with the previous chunk's.


@gluon.jit
def normalize_merge_and_store_output(
    args, tile_info, acc_o, row_max, row_sum, I_CONSUMER: gl.constexpr, SCORE_LAYOUT: gl.constexpr,
    MERGE_PREVIOUS_CHUNK: gl.constexpr, STORE_RESIDUAL: gl.constexpr, STORE_LSE: gl.constexpr,
):  # fmt: skip
    """Stores a work tile's output, combined with the previous chunk's."""
    O: gl.constexpr = acc_o.type.layout
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), row_max.type.layout)
    # Pointers and masks of out, OUT_RESIDUAL and LSE
    DV: gl.constexpr = acc_o.shape[1]
    strides, q_row, num_queries = args.strides, tile_info.q_row, tile_info.valid_row_bound
    head = tile_info.head.to(gl.int64)
    o_v = gl.arange(0, DV, gl.SliceLayout(0, O))
    o_mo = gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, O)) + I_CONSUMER * ROWS_PER_WARPGROUP
    o_m = gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, SCORE_LAYOUT)) + I_CONSUMER * ROWS_PER_WARPGROUP
    o_token, o_token_lse = (q_row + o_mo).to(gl.int64), (q_row + o_m).to(gl.int64)
    p_out = args.OUT + o_token[:, None] * strides.out_t + head * strides.out_h + o_v[None, :]
    p_residual = args.OUT_RESIDUAL + (o_token * args.H + head)[:, None] * DV + o_v[None, :]
    m_out = (o_mo < num_queries)[:, None] & (o_v >= 0)[None, :]
    p_lse, m_lse = args.LSE + o_token_lse * strides.lse_t + head * strides.lse_h, o_m < num_queries
    # Combine: one row_max and row_sum of this chunk and the previous ones
    if MERGE_PREVIOUS_CHUNK:
        # NOTE: an accumulator that does not start at 0 makes ptxas wait after every MMA.
        prev_lse = gl.load(p_lse, mask=m_lse, other=float("-inf")) * LOG2E
        row_max_new = gl.maximum(row_max, prev_lse)
        safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
        rescale_new, rescale_prev = gl.exp2(row_max - safe_max), gl.exp2(prev_lse - safe_max)
        row_sum = rescale_new * row_sum + rescale_prev
        row_max = row_max_new
    is_empty = row_sum == 0
    row_sum = gl.where(is_empty, 1.0, row_sum)
    if MERGE_PREVIOUS_CHUNK:
        acc_o = acc_o * gl.convert_layout(rescale_new / row_sum, gl.SliceLayout(1, O))[:, None]
        prev_out = gl.load(p_out, mask=m_out, other=0.0).to(gl.float32)
        prev_out += gl.load(p_residual, mask=m_out, other=0.0).to(gl.float32)
        acc_o += prev_out * gl.convert_layout(rescale_prev / row_sum, gl.SliceLayout(1, O))[:, None]
    else:
        acc_o = acc_o * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, O))[:, None]
    # Store the output, its rounding error for the next chunk, and LSE
    out = acc_o.to(args.OUT.dtype.element_ty)
    gl.store(p_out, out, mask=m_out)
    if STORE_RESIDUAL:
        gl.store(p_residual, (acc_o - out.to(gl.float32)).to(args.OUT_RESIDUAL.dtype.element_ty), mask=m_out)
    if STORE_LSE:
        gl.store(p_lse, gl.where(is_empty, float("-inf"), (row_max + gl.log2(row_sum)) * LN2), mask=m_lse)


# Consumer warpgroup: main loop and epilogue of its work tiles.


@gluon.jit
def consumer(
    args, I_CONSUMER: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MERGE_PREVIOUS_CHUNK: gl.constexpr,
    STORE_RESIDUAL: gl.constexpr, STORE_LSE: gl.constexpr,
):  # fmt: skip
    """Attends, as one warpgroup, 64 queries of every work tile of this CTA."""
    score_scale, buffers, mbarriers = args.score_scale, args.buffers, args.mbarriers
    k_s, kpe_s, v_s = buffers.k, buffers.k_pe, buffers.v
    q_full, q_empty, k_full, k_empty, v_full, v_empty = mbarriers
    DV: gl.constexpr = v_s.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    REPLICATED_LAYOUT: gl.constexpr = gl.BlockedLayout([TILE_INFO_FIELDS], [32], [4], [0])
    q, q_pe = buffers.q.index(I_CONSUMER), buffers.q_pe.index(I_CONSUMER)
    o_m = gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, S)) + I_CONSUMER * ROWS_PER_WARPGROUP

    # Wait for the first work tile
    may_have_nan = any_nonzero(args.MAY_HAVE_NAN, args.num_rows)
    kv_iter = 0  # key blocks begun
    num_done = 0  # work tiles begun
    mbarrier.wait(q_full.index(I_CONSUMER), 0)
    info_fields = buffers.tile_info.index(I_CONSUMER).load(REPLICATED_LAYOUT)
    thread_barrier()  # before one thread arrives on q_empty for all
    tile_info = unpack_published_work_tile(info_fields)
    if tile_info.num_n_blocks > 0:
        # First key block of the first work tile: QK, mask, softmax
        n_start = (tile_info.num_n_blocks - 1) * BLOCK_N
        mbarrier.wait(k_full.index(0), 0)
        s = start_qk(q, q_pe, k_s.index(0), kpe_s.index(0), S)
        mbarrier.wait(v_full.index(0), 0)
        if may_have_nan:
            zero_oob_and_nan_in_smem_v_and_fence(v_s.index(0), tile_info.num_keys - n_start)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_empty.index(0), count=1)
        mbarrier.arrive(q_empty.index(I_CONSUMER), count=1, pred=tile_info.num_n_blocks == 1)
        acc_o, row_max = init_acc_and_max(S, O, DV)
        last_key = gl.minimum(o_m + tile_info.causal_limit, tile_info.num_keys - 1)  # last visible key of a row
        p, row_max, _ = softmax_to_p_row_max_and_rescale(s, row_max, last_key - n_start, score_scale, True)
        row_sum = row_sums_by_lane(p)
        p_packed = pack_p_16bit(p, v_s.dtype)
        kv_iter += 1
        while tile_info.num_n_blocks > 0:
            num_n_blocks, num_keys = tile_info.num_n_blocks, tile_info.num_keys
            num_unmasked_blocks = (
                gl.maximum(gl.minimum(num_keys, tile_info.causal_limit + I_CONSUMER * ROWS_PER_WARPGROUP + 1), 0)
                // BLOCK_N
            )  # visible to all rows
            # Masked key blocks
            for n_block in range(1, num_n_blocks - num_unmasked_blocks):
                n_start -= BLOCK_N
                acc_o, row_max, row_sum, p_packed = qk_softmax_and_prev_pv_step(
                    SoftmaxState(acc_o, row_max, row_sum, p_packed), kv_iter, n_block == num_n_blocks - 1,
                    last_key - n_start, num_keys - n_start, may_have_nan, buffers, mbarriers,
                    score_scale, S, True, I_CONSUMER, STAGES,
                )  # fmt: skip
                kv_iter += 1
            # Unmasked key blocks
            for n_block in range(gl.maximum(num_n_blocks - num_unmasked_blocks, 1), num_n_blocks):
                acc_o, row_max, row_sum, p_packed = qk_softmax_and_prev_pv_step(
                    SoftmaxState(acc_o, row_max, row_sum, p_packed), kv_iter, n_block == num_n_blocks - 1, last_key,
                    num_keys, may_have_nan, buffers, mbarriers,
                    score_scale, S, False, I_CONSUMER, STAGES,
                )  # fmt: skip
                kv_iter += 1
            # The work tile's last PV overlaps the next work tile's first QK. After the last work tile, QK of stale
            # shared memory is computed and discarded.
            finished_tile = tile_info
            num_done += 1
            # Wait for the next work tile
            mbarrier.wait(q_full.index(I_CONSUMER), num_done & 1)
            info_fields = buffers.tile_info.index(I_CONSUMER).load(REPLICATED_LAYOUT)
            thread_barrier()
            tile_info = unpack_published_work_tile(info_fields)
            has_next_tile = tile_info.num_n_blocks > 0
            n_start = (tile_info.num_n_blocks - 1) * BLOCK_N
            last_key = gl.minimum(o_m + tile_info.causal_limit, tile_info.num_keys - 1)
            # QK of the next work tile, PV of this one
            stage, prev_stage = kv_iter % STAGES, (kv_iter - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (kv_iter // STAGES) & 1, pred=has_next_tile)
            s = start_qk(q, q_pe, k_s.index(stage), kpe_s.index(stage), S)
            acc_o = warpgroup_mma(unpack_p_16bit(p_packed, v_s.dtype, P), v_s.index(prev_stage), acc_o, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_empty.index(stage), count=1)
            mbarrier.arrive(q_empty.index(I_CONSUMER), count=1, pred=tile_info.num_n_blocks == 1)
            acc_o = warpgroup_mma_wait(0, [acc_o])
            mbarrier.arrive(v_empty.index(prev_stage), count=1)
            # Epilogue, then the softmax of the next work tile
            normalize_merge_and_store_output(
                args, finished_tile, acc_o, row_max, row_sum, I_CONSUMER, S, MERGE_PREVIOUS_CHUNK, STORE_RESIDUAL,
                STORE_LSE,
            )  # fmt: skip
            acc_o, row_max = init_acc_and_max(S, O, DV)
            p, row_max, _ = softmax_to_p_row_max_and_rescale(s, row_max, last_key - n_start, score_scale, True)
            row_sum = row_sums_by_lane(p)
            p_packed = pack_p_16bit(p, v_s.dtype)
            mbarrier.wait(v_full.index(stage), (kv_iter // STAGES) & 1, pred=has_next_tile)
            if may_have_nan:
                zero_oob_and_nan_in_smem_v_and_fence(v_s.index(stage), tile_info.num_keys - n_start)
            kv_iter += 1


# The kernel.


@gluon.jit(do_not_specialize=["num_rows", "num_m_blocks", "heads_per_l2_group", "num_work_tiles"])
def attention_kernel(
    Q, Q_PE_MAP, KV, KPE_MAP, OUT, OUT_RESIDUAL, LSE, WORK_COUNTER, OVERFLOW_FLAG, MAY_HAVE_NAN, CU_SEQLENS_Q,
    CACHE_LENS, CHUNK_ROW_OFFSETS, CACHE_OFFSETS, num_rows, num_m_blocks, H, heads_per_l2_group,
    num_work_tiles, head_stride, score_scale, stride_ot, stride_oh, stride_lt, stride_lh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MERGE_PREVIOUS_CHUNK: gl.constexpr, STORE_RESIDUAL: gl.constexpr,
    STORE_LSE: gl.constexpr, REGISTERS_PER_THREAD: gl.constexpr, USE_PDL: gl.constexpr,
    ONLY_IF_OVERFLOWED: gl.constexpr,
):  # fmt: skip
    """Attends to one chunk, persistent and warp-specialised. ONLY_IF_OVERFLOWED: only if OVERFLOW_FLAG is not 0."""
    DN: gl.constexpr = KV.block_shape[1]
    R: gl.constexpr = KPE_MAP.block_shape[1]
    dtype: gl.constexpr = KV.dtype
    # Shared memory and barriers
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS_PER_WARPGROUP, DN], Q.layout)
    qpe_s = gl.allocate_shared_memory(dtype, [2, ROWS_PER_WARPGROUP, R], Q_PE_MAP.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DN], KV.layout)
    kpe_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, R], KPE_MAP.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DN], KV.layout)
    tile_info_s = gl.allocate_shared_memory(gl.int32, [2, TILE_INFO_FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_empty = allocate_mbarrier_groups(2, (1, 1))
    k_full, k_empty, v_full, v_empty = allocate_mbarrier_groups(STAGES, (1, 2, 1, 2))
    fence_async_shared()
    # Wait for the previous kernel
    if USE_PDL:
        pdl_launch_dependents()
        pdl_wait()
    if ONLY_IF_OVERFLOWED:
        num_work_tiles = gl.where(gl.load(OVERFLOW_FLAG) != 0, num_work_tiles, 0)
    buffers = SmemBuffers(q_s, qpe_s, k_s, kpe_s, v_s, tile_info_s)
    mbarriers = Mbarriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)
    strides = Strides(stride_ot, stride_oh, stride_lt, stride_lh)
    consumer_args = ConsumerArgs(
        OUT, OUT_RESIDUAL, LSE, MAY_HAVE_NAN, num_rows, H, score_scale, strides, buffers, mbarriers
    )
    tensor_maps = TensorMaps(Q, Q_PE_MAP, KV, KV, KPE_MAP)
    work_queue = WorkQueue(
        WORK_COUNTER, CU_SEQLENS_Q, CACHE_LENS, CHUNK_ROW_OFFSETS, CACHE_OFFSETS, num_rows, num_m_blocks, H,
        heads_per_l2_group, num_work_tiles, head_stride,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consumer, (consumer_args, 0, BLOCK_N, STAGES, MERGE_PREVIOUS_CHUNK, STORE_RESIDUAL, STORE_LSE)),
            (consumer, (consumer_args, 1, BLOCK_N, STAGES, MERGE_PREVIOUS_CHUNK, STORE_RESIDUAL, STORE_LSE)),
            (producer, (tensor_maps, work_queue, buffers, mbarriers, BLOCK_N, STAGES, MERGE_PREVIOUS_CHUNK)),
        ],
        [4, 1], [REGISTERS_PER_THREAD, 24],
    )  # fmt: skip


# Its launch, and arguments that both attention kernels take.


def q_nope_q_pe_kv_and_kpe_tensor_map_args(f: SimpleNamespace, num_rows: int, block_n: int) -> dict[str, TensorMapArg]:
    """Returns tensor maps of queries and keys, by key blocks of `block_n`."""
    heads, nope, rope, dim_v = head_dims(f)
    tokens = f.q.shape[0]
    # A single token's stride may be anything; a tensor map requires a valid one.
    pitch = f.q.stride[0] if tokens > 1 else heads * (nope + rope)
    query_matrix = [tokens, (heads - 1) * f.q.stride[1] + nope + rope], [pitch, 1]
    columns, layout = (
        heads * (nope + dim_v),
        gl.NVMMASharedLayout.get_default_for([ROWS_PER_WARPGROUP.value, 64], gl.bfloat16),
    )
    return {
        "Q": tensor_map_arg("q", *query_matrix, [ROWS_PER_WARPGROUP.value, nope], layout),
        "Q_PE_MAP": tensor_map_arg("q", *query_matrix, [ROWS_PER_WARPGROUP.value, rope], layout),
        "KV": tensor_map_arg("KV", [num_rows, columns], [columns, 1], [block_n, nope], layout),
        "KPE_MAP": tensor_map_arg("K_PE", [num_rows, rope], [rope, 1], [block_n, rope], layout),
    }


def head_dims(f: SimpleNamespace) -> HeadDims:
    rope = f.kpe.shape[-1]
    return HeadDims(f.q.shape[1], f.q.shape[2] - rope, rope, f.out.shape[2])


def common_attention_args(
    f: SimpleNamespace, i_chunk: int, num_rows: int, block_m: int, needs_lse_for_merge: bool
) -> dict[str, Any]:
    """Returns arguments of either attention kernel for a chunk of `num_rows` rows, without tensor maps and counters."""
    dims, requests, num_m_blocks = head_dims(f), f.cache_lens.shape[0], -(-f.max_q_len // block_m)
    lse, lse_strides = lse_tensor_name_and_strides(f, needs_lse_for_merge)
    tensors = tensor_args(
        OUT="out", LSE=lse or "out", MAY_HAVE_NAN="MAY_HAVE_NAN", CU_SEQLENS_Q="cu_seqlens_q", CACHE_LENS="cache_lens"
    )
    chunk_offsets = chunk_offset_args(i_chunk)
    # Heads whose work tiles are scheduled together: their keys and values stay in the L2 cache.
    heads_per_l2_group, kv_bytes_per_head = dims.heads, num_rows * f.q.dtype.itemsize * (dims.nope + dims.dim_v)
    if kv_bytes_per_head * dims.heads > _L2_BYTES * requests:
        heads_per_l2_group = max(1, min(dims.heads, _L2_BYTES * requests // 2 // kv_bytes_per_head))
    return tensors | stride_args(f.out, stride_o="th") | {
        "CHUNK_ROW_OFFSETS": chunk_offsets["CHUNK_ROW_OFFSETS"], "CACHE_OFFSETS": chunk_offsets["CACHE_OFFSETS"],
        "num_rows": num_rows, "num_m_blocks": num_m_blocks, "H": dims.heads,
        "heads_per_l2_group": heads_per_l2_group,
        "num_work_tiles": requests * num_m_blocks * dims.heads,
        "head_stride": f.q.stride[1], "score_scale": f.softmax_scale * math.log2(math.e),
        "stride_lt": lse_strides[0], "stride_lh": lse_strides[1], "STORE_LSE": lse is not None,
    }  # fmt: skip


def make_attention_launch(
    f: SimpleNamespace, i_chunk: int, num_rows: int, has_previous_chunk: bool, has_next_chunk: bool, num_sms: int,
    use_pdl: bool,
    only_if_overflowed: bool,
) -> KernelLaunch:  # fmt: skip
    """Returns the launch for a chunk of `num_rows` rows.

    OUT_RESIDUAL:     [T, H, Dv] in q's dtype, dense: the rounding error of out, if there are several chunks
    WORK_COUNTER: int32: work tiles taken by this kernel, by that of three warpgroups, and whether that one overflowed;
    initially 0
    MAY_HAVE_NAN:   whether values may be NaN
    only_if_overflowed: the kernel does something only where that of three warpgroups overflowed
    """
    several_chunks = has_previous_chunk or has_next_chunk
    arguments: dict[str, Any] = q_nope_q_pe_kv_and_kpe_tensor_map_args(f, num_rows, BLOCK_N)
    arguments |= common_attention_args(f, i_chunk, num_rows, BLOCK_M.value, several_chunks) | {
        **tensor_args(OUT_RESIDUAL="OUT_RESIDUAL" if several_chunks else "out", WORK_COUNTER="WORK_COUNTER"),
        # read only if needed
        "OVERFLOW_FLAG": TensorArg("WORK_COUNTER", row=OVERFLOWED if only_if_overflowed else 0),
        "BLOCK_N": BLOCK_N, "STAGES": STAGES, "MERGE_PREVIOUS_CHUNK": has_previous_chunk,
        "STORE_RESIDUAL": has_next_chunk, "REGISTERS_PER_THREAD": REGISTERS,
        "USE_PDL": use_pdl, "ONLY_IF_OVERFLOWED": only_if_overflowed,
    }  # fmt: skip
    grid = (min(arguments["num_work_tiles"], num_sms),)
    return KernelLaunch(attention_kernel, grid, arguments, num_warps=4, launch_pdl=use_pdl)
