"""MLA prefill's attention on sm_90 for large calls: three warpgroups of 64 queries share key blocks, in one chunk. The
mask, the rescale and the consumer's waits are in `qk_softmax_pv_step`, the waits for free stages in `producer`; there
is no combine.

Differences from attention.py: three warpgroups read a third less from the L2 cache than two. Each runs QK, softmax and
PV in sequence, while the others keep the matrix unit busy; V is copied in half blocks, which leaves room for three of
them. Of a key block whose second half no row sees only the first is computed.

Under the chip's power limit every instruction costs time. So row_max is computed only in the masked key blocks, which
come first, and then kept: any number near it will do. Where later scores exceed it so far that P or PV overflow fp32,
the kernel sets OVERFLOW_FLAG, and attention.py's kernel, launched behind it, computes everything again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....host.bind import KernelLaunch, TensorArg
from ...versions import thread_barrier, tma_load
from ..parts.online_softmax import (
    pack_p_16bit,
    row_sums_by_lane,
    softmax_to_p_row_max_and_rescale,
    split_columns,
    unpack_p_16bit,
)
from ..parts.pipeline import allocate_mbarrier_groups, pdl_launch_dependents, pdl_wait
from ..parts.tensor_maps import tensor_map_arg
from .attention import (
    OVERFLOWED,
    TAKEN_BY_THREE_WARPGROUPS,
    common_attention_args,
    q_nope_q_pe_kv_and_kpe_tensor_map_args,
)
from .tile_scheduler import (
    LN2,
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

REGISTERS = 160
# Work tiles per SM; with few, two warpgroups balance the work better. With 21 (H200, 4096 tokens, 128
# heads, 2026-11-21) the whole operation took 1265 µs against 1357, with 3 in an earlier form 200 against 196.
_MIN_WORK_TILES_PER_SM = 20

WARPGROUPS = gl.constexpr(3)  # warpgroups
BLOCK_M = gl.constexpr(192)  # queries of a work tile
BLOCK_N = gl.constexpr(128)  # keys of a key block
HALF_BLOCK_N = gl.constexpr(64)
STAGES_K = gl.constexpr(2)
STAGES_V = gl.constexpr(3)  # of half a key block
MAX_ROW_SUM = gl.constexpr(2.0**100)  # of a row's sum of P


class SoftmaxState(NamedTuple):
    """State of a warpgroup's queries: acc_o, row_max (fixed after the masked blocks), and row_sum by lane."""

    acc_o: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor


class ConsumerArgs(NamedTuple):
    """Arguments of consumers."""

    OUT: gl.tensor
    LSE: gl.tensor
    OVERFLOW_FLAG: gl.tensor
    MAY_HAVE_NAN: gl.tensor
    num_rows: gl.tensor
    score_scale: gl.tensor
    strides: Strides
    buffers: SmemBuffers
    mbarriers: Mbarriers


# Producer: work tiles from the counter; copies of Q, K and halves of V, as stages become free.


@gluon.jit
def acquire_and_copy_v_key_half(tensor_maps, kv_row, first_column, half_iter, buffers, mbarriers):
    """Copies half a key block of V."""
    stage = half_iter % STAGES_V
    mbarrier.wait(mbarriers.v_empty.index(stage), ((half_iter // STAGES_V) & 1) ^ 1)
    mbarrier.expect(mbarriers.v_full.index(stage), HALF_BLOCK_N * buffers.v.shape[2] * 2)
    tma_load(tensor_maps.VALUES, [kv_row, first_column], mbarriers.v_full.index(stage), buffers.v.index(stage))


@gluon.jit
def producer(tensor_maps, work_queue, buffers, mbarriers):
    """Takes work tiles, longest first; copies their key blocks from the last to the first. num_n_blocks −1: the end."""
    k_full, k_empty = mbarriers.k_full, mbarriers.k_empty
    DN: gl.constexpr = buffers.q.shape[2]
    R: gl.constexpr = buffers.q_pe.shape[2]
    i_work_tile = gl.program_id(0)
    num_done = 0  # work tiles published
    kv_iter = 0  # key blocks copied
    while i_work_tile < work_queue.num_work_tiles:
        # Tile scheduler: the request, head and queries of this work tile
        i_request, head, m_block = request_head_and_m_block_of_work_tile(
            i_work_tile, work_queue.num_m_blocks, work_queue.H, work_queue.heads_per_l2_group
        )
        request = load_request_shape(work_queue, i_request)
        q_begin, num_queries, num_keys, chunk_row = (
            request.q_begin, request.num_queries, request.num_keys, request.chunk_row,
        )  # fmt: skip
        # m_blocks are aligned to the last query, so that the partial one has the fewest keys.
        m_start = num_queries - (gl.cdiv(num_queries, BLOCK_M) - m_block) * BLOCK_M
        o_column = head * (2 * DN)
        has_work = m_block * BLOCK_M < num_queries
        if has_work:
            # A work tile without keys gets one fully masked key block: consumers expect at least one.
            num_n_blocks = gl.maximum(
                (gl.minimum(num_keys, m_start + BLOCK_M + request.causal_offset) + BLOCK_N - 1) // BLOCK_N, 1
            )
            kv_row = chunk_row + (num_n_blocks - 1) * BLOCK_N
            for i in range(num_n_blocks):
                stage = kv_iter % STAGES_K
                # K: wait for a free stage, copy
                mbarrier.wait(k_empty.index(stage), ((kv_iter // STAGES_K) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * (DN + R) * 2)
                tma_load(tensor_maps.KEYS, [kv_row, o_column], k_full.index(stage), buffers.k.index(stage))
                tma_load(tensor_maps.KPE_MAP, [kv_row, 0], k_full.index(stage), buffers.k_pe.index(stage))
                # Halves are released in this order: the second of a block after the keys of the next.
                if i > 0:
                    acquire_and_copy_v_key_half(
                        tensor_maps, kv_row + BLOCK_N + HALF_BLOCK_N, o_column + DN, 2 * kv_iter - 1, buffers, mbarriers
                    )
                # Q, with the work tile's info: wait until the last work tile's is read, copy
                else:
                    for i_consumer in gl.static_range(WARPGROUPS):
                        q_full_barrier, q_row = (
                            mbarriers.q_full.index(i_consumer),
                            q_begin + m_start + i_consumer * ROWS_PER_WARPGROUP,
                        )
                        mbarrier.wait(mbarriers.q_empty.index(i_consumer), (num_done & 1) ^ 1)
                        tile_info = buffers.tile_info.index(i_consumer)
                        publish_work_tile(
                            tile_info, q_begin + m_start, gl.maximum(-m_start, 0), m_start + request.causal_offset,
                            num_keys, num_n_blocks, head,
                        )  # fmt: skip
                        mbarrier.expect(q_full_barrier, ROWS_PER_WARPGROUP * (DN + R) * 2)
                        tma_load(
                            tensor_maps.Q, [q_row, head * work_queue.head_stride], q_full_barrier,
                            buffers.q.index(i_consumer),
                        )  # fmt: skip
                        tma_load(
                            tensor_maps.Q_PE_MAP, [q_row, head * work_queue.head_stride + DN], q_full_barrier,
                            buffers.q_pe.index(i_consumer),
                        )  # fmt: skip
                acquire_and_copy_v_key_half(tensor_maps, kv_row, o_column + DN, 2 * kv_iter, buffers, mbarriers)
                kv_iter += 1
                kv_row -= BLOCK_N
            num_done += 1
        # No earlier: the CTA that is done first takes the next work tile.
        i_next_work_tile = gl.atomic_add(work_queue.WORK_COUNTER, 1, sem="relaxed") + gl.num_programs(0)
        if has_work:
            acquire_and_copy_v_key_half(
                tensor_maps, chunk_row + HALF_BLOCK_N, o_column + DN, 2 * kv_iter - 1, buffers, mbarriers
            )
        i_work_tile = i_next_work_tile
    # The end, for all consumers
    for i_consumer in gl.static_range(WARPGROUPS):
        mbarrier.wait(mbarriers.q_empty.index(i_consumer), (num_done & 1) ^ 1)
        publish_work_tile(buffers.tile_info.index(i_consumer), 0, 0, 0, 0, -1, 0)
        mbarrier.arrive(mbarriers.q_full.index(i_consumer), count=1)


# Main loop: QK, mask, online softmax, PV.


@gluon.jit
def qk_softmax_pv_step(
    state, kv_iter, is_last, last_key, num_keys, may_have_nan, buffers, mbarriers, score_scale,
    SCORE_LAYOUT: gl.constexpr,
    MASK_AND_UPDATE_MAX: gl.constexpr,
    I_CONSUMER: gl.constexpr,
):  # fmt: skip
    """Runs QK, softmax and PV of key block `kv_iter`, or of its first half. last_key: last visible key of each row."""
    q, q_pe, k_s, kpe_s, v_s = (
        buffers.q.index(I_CONSUMER), buffers.q_pe.index(I_CONSUMER), buffers.k, buffers.k_pe, buffers.v,
    )  # fmt: skip
    k_full, k_empty, v_full, v_empty = mbarriers.k_full, mbarriers.k_empty, mbarriers.v_full, mbarriers.v_empty
    acc_o, row_max, row_sum = state
    COLUMNS: gl.constexpr = SCORE_LAYOUT.instr_shape[1]
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc_o.type.layout, k_width=2)
    stage = kv_iter % STAGES_K
    # QK
    mbarrier.wait(k_full.index(stage), (kv_iter // STAGES_K) & 1)
    k, k_pe = k_s.index(stage).slice(0, COLUMNS), kpe_s.index(stage).slice(0, COLUMNS)
    s = warpgroup_mma_wait(0, [start_qk(q, q_pe, k, k_pe, SCORE_LAYOUT)])
    mbarrier.arrive(k_empty.index(stage), count=1)
    mbarrier.arrive(mbarriers.q_empty.index(I_CONSUMER), count=1, pred=is_last)
    first_v_stage = 2 * kv_iter % STAGES_V
    # NOTE: ptxas moves no arithmetic across the branch of a wait: this keeps the arrivals before the exponentials.
    mbarrier.wait(v_full.index(first_v_stage), (2 * kv_iter // STAGES_V) & 1)
    # Mask and online softmax; without a mask row_max is kept
    if MASK_AND_UPDATE_MAX:
        M: gl.constexpr = row_max.type.layout
        SCORE_ROWS: gl.constexpr = gl.SliceLayout(1, SCORE_LAYOUT)
        p, row_max, rescale = softmax_to_p_row_max_and_rescale(
            s, gl.convert_layout(row_max, SCORE_ROWS), gl.convert_layout(last_key, SCORE_ROWS), score_scale, True
        )
        row_max, rescale = gl.convert_layout(row_max, M), gl.convert_layout(rescale, M)
        row_sums = gl.convert_layout(row_sums_by_lane(p), row_sum.type.layout)
        row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None] + row_sums
        acc_o = acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, acc_o.type.layout))[:, None]
    else:
        p = gl.exp2(s * score_scale - row_max[:, None])
        row_sum = row_sum + row_sums_by_lane(p)
    p_halves = (pack_p_16bit(p, v_s.dtype),)
    if COLUMNS == BLOCK_N:
        p_halves = split_columns(p_halves[0])
    # PV, in halves
    for i in gl.static_range(2):
        v_iter = 2 * kv_iter + i
        v_half = v_s.index(v_iter % STAGES_V)
        if i > 0:
            mbarrier.wait(v_full.index(v_iter % STAGES_V), (v_iter // STAGES_V) & 1)
        if i * HALF_BLOCK_N < COLUMNS:
            if MASK_AND_UPDATE_MAX:  # noqa: SIM102 - known to the compiler, unlike the other
                if may_have_nan:
                    zero_oob_and_nan_in_smem_v_and_fence(v_half, num_keys - i * HALF_BLOCK_N)
            acc_o = warpgroup_mma(unpack_p_16bit(p_halves[i], v_s.dtype, P), v_half, acc_o, is_async=True)
    # Wait for PV, free its stages
    acc_o = warpgroup_mma_wait(0, [acc_o])
    for i in gl.static_range(2):
        mbarrier.arrive(v_empty.index((2 * kv_iter + i) % STAGES_V), count=1)
    return SoftmaxState(acc_o, row_max, row_sum)


# Epilogue: the output, and whether it overflowed.


@gluon.jit
def store_output_lse_and_flag_overflow(args, tile_info, state, I_CONSUMER: gl.constexpr, STORE_LSE: gl.constexpr):
    """Stores a work tile's output, and sets OVERFLOW_FLAG where it overflowed."""
    OUT, strides, q_row, first_valid_row = args.OUT, args.strides, tile_info.q_row, tile_info.valid_row_bound
    acc_o, row_max, row_sum = state
    O: gl.constexpr = acc_o.type.layout
    M: gl.constexpr = row_max.type.layout
    head = tile_info.head.to(gl.int64)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), M)
    o_v = gl.arange(0, acc_o.shape[1], gl.SliceLayout(0, O))
    o_mo = gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, O)) + I_CONSUMER * ROWS_PER_WARPGROUP
    o_m = gl.arange(0, ROWS_PER_WARPGROUP, M) + I_CONSUMER * ROWS_PER_WARPGROUP
    # NaN of the input counts too: then everything is computed twice.
    overflowed = gl.convert_layout(gl.max((gl.abs(acc_o) < float("inf")).to(gl.int32) ^ 1, 1), M)
    gl.store(
        args.OVERFLOW_FLAG + o_m * 0,
        gl.full([ROWS_PER_WARPGROUP], 1, gl.int32, M),
        mask=((overflowed != 0) | (row_sum > MAX_ROW_SUM)) & (o_m >= first_valid_row),
    )
    # Store the output and LSE
    is_empty = row_sum == 0
    row_sum = gl.where(is_empty, 1.0, row_sum)
    out = acc_o * gl.convert_layout(1.0 / row_sum, gl.SliceLayout(1, O))[:, None]
    p_out = OUT + (q_row + o_mo).to(gl.int64)[:, None] * strides.out_t + head * strides.out_h + o_v[None, :]
    gl.store(p_out, out.to(OUT.dtype.element_ty), mask=(o_mo >= first_valid_row)[:, None] & (o_v >= 0)[None, :])
    if STORE_LSE:
        p_lse = args.LSE + (q_row + o_m).to(gl.int64) * strides.lse_t + head * strides.lse_h
        gl.store(
            p_lse, gl.where(is_empty, float("-inf"), (row_max + gl.log2(row_sum)) * LN2), mask=o_m >= first_valid_row
        )


# Consumer warpgroup: main loop and epilogue of its work tiles.


@gluon.jit
def consumer_of_64_queries(args, I_CONSUMER: gl.constexpr, STORE_LSE: gl.constexpr):
    """Attends, as one warpgroup, 64 queries of every work tile of this CTA."""
    score_scale, buffers, mbarriers = args.score_scale, args.buffers, args.mbarriers
    DV: gl.constexpr = buffers.v.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    S_HALF: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_BLOCK_N, 16]
    )
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    REPLICATED_LAYOUT: gl.constexpr = gl.BlockedLayout([TILE_INFO_FIELDS], [32], [4], [0])
    o_m = gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, S)) + I_CONSUMER * ROWS_PER_WARPGROUP

    may_have_nan = any_nonzero(args.MAY_HAVE_NAN, args.num_rows)
    kv_iter = 0  # key blocks begun
    num_done = 0  # work tiles begun
    num_n_blocks = 0
    while num_n_blocks >= 0:
        mbarrier.wait(mbarriers.q_full.index(I_CONSUMER), num_done & 1)
        info_fields = buffers.tile_info.index(I_CONSUMER).load(REPLICATED_LAYOUT)
        thread_barrier()  # before one thread arrives on q_empty for all
        tile_info = unpack_published_work_tile(info_fields)
        causal_limit, num_keys, num_n_blocks = tile_info.causal_limit, tile_info.num_keys, tile_info.num_n_blocks
        num_done += 1
        if num_n_blocks >= 0:
            visible_keys = gl.minimum(num_keys, causal_limit + (I_CONSUMER + 1) * ROWS_PER_WARPGROUP)  # to these rows
            num_own_blocks = gl.where(
                tile_info.valid_row_bound < (I_CONSUMER + 1) * ROWS_PER_WARPGROUP,
                gl.maximum((visible_keys + BLOCK_N - 1) // BLOCK_N, 0),
                0,
            )
            # Release key blocks that no row here sees, unread.
            for i in range(num_n_blocks - num_own_blocks):  # noqa: B007 - an underscore is a barrier already
                mbarrier.wait(mbarriers.k_full.index(kv_iter % STAGES_K), (kv_iter // STAGES_K) & 1)
                mbarrier.arrive(mbarriers.k_empty.index(kv_iter % STAGES_K), count=1)
                for i_half in gl.static_range(2):
                    v_iter = 2 * kv_iter + i_half
                    mbarrier.wait(mbarriers.v_full.index(v_iter % STAGES_V), (v_iter // STAGES_V) & 1)
                    mbarrier.arrive(mbarriers.v_empty.index(v_iter % STAGES_V), count=1)
                kv_iter += 1
            mbarrier.arrive(mbarriers.q_empty.index(I_CONSUMER), count=1, pred=num_own_blocks == 0)
            acc_o, row_max = init_acc_and_max(S, O, DV)
            row_sum = row_sums_by_lane(gl.full([ROWS_PER_WARPGROUP, BLOCK_N], 0.0, gl.float32, S))
            last_key = gl.minimum(o_m + causal_limit, num_keys - 1)  # last visible key of a row
            # Visible to all rows, less one block: each row has a row_max when it comes to them.
            num_unmasked_blocks = (
                gl.maximum(gl.minimum(num_keys - 1, causal_limit + I_CONSUMER * ROWS_PER_WARPGROUP), 0) // BLOCK_N
            )
            n_start = num_own_blocks * BLOCK_N
            if (num_own_blocks > 0) & (visible_keys + HALF_BLOCK_N <= n_start):
                n_start -= BLOCK_N
                acc_o, row_max, row_sum = qk_softmax_pv_step(
                    SoftmaxState(acc_o, row_max, row_sum), kv_iter, n_start == 0, last_key - n_start,
                    num_keys - n_start, may_have_nan, buffers, mbarriers, score_scale,
                    S_HALF, True, I_CONSUMER,
                )  # fmt: skip
                kv_iter += 1
                num_own_blocks -= 1
            # Masked key blocks
            for i in range(num_unmasked_blocks, num_own_blocks):  # noqa: B007
                n_start -= BLOCK_N
                acc_o, row_max, row_sum = qk_softmax_pv_step(
                    SoftmaxState(acc_o, row_max, row_sum), kv_iter, n_start == 0, last_key - n_start,
                    num_keys - n_start, may_have_nan, buffers, mbarriers, score_scale,
                    S, True, I_CONSUMER,
                )  # fmt: skip
                kv_iter += 1
            # Unmasked key blocks
            for i in range(gl.minimum(num_unmasked_blocks, num_own_blocks)):  # noqa: B007
                n_start -= BLOCK_N
                acc_o, row_max, row_sum = qk_softmax_pv_step(
                    SoftmaxState(acc_o, row_max, row_sum), kv_iter, n_start == 0, last_key, num_keys, may_have_nan,
                    buffers, mbarriers, score_scale, S, False, I_CONSUMER,
                )  # fmt: skip
                kv_iter += 1
            # Epilogue
            store_output_lse_and_flag_overflow(
                args, tile_info, SoftmaxState(acc_o, row_max, row_sum), I_CONSUMER, STORE_LSE
            )


# The kernel.


@gluon.jit(do_not_specialize=["num_rows", "num_m_blocks", "heads_per_l2_group", "num_work_tiles"])
def attention_three_warpgroups_kernel(
    Q, Q_PE_MAP, KEYS, VALUES, KPE_MAP, OUT, LSE, WORK_COUNTER, OVERFLOW_FLAG, MAY_HAVE_NAN, CU_SEQLENS_Q, CACHE_LENS,
    CHUNK_ROW_OFFSETS, CACHE_OFFSETS, num_rows, num_m_blocks, H, heads_per_l2_group,
    num_work_tiles, head_stride, score_scale, stride_ot, stride_oh, stride_lt, stride_lh,
    STORE_LSE: gl.constexpr, REGISTERS_PER_THREAD: gl.constexpr, USE_PDL: gl.constexpr,
):  # fmt: skip
    """Attends to the only chunk, as a persistent warp-specialised kernel."""
    DN: gl.constexpr = KEYS.block_shape[1]
    R: gl.constexpr = KPE_MAP.block_shape[1]
    DV: gl.constexpr = VALUES.block_shape[1]
    dtype: gl.constexpr = KEYS.dtype
    # Shared memory and barriers
    q_s = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS_PER_WARPGROUP, DN], Q.layout)
    qpe_s = gl.allocate_shared_memory(dtype, [WARPGROUPS, ROWS_PER_WARPGROUP, R], Q_PE_MAP.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, DN], KEYS.layout)
    kpe_s = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, R], KPE_MAP.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, HALF_BLOCK_N, DV], VALUES.layout)
    tile_info_s = gl.allocate_shared_memory(
        gl.int32, [WARPGROUPS, TILE_INFO_FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    q_full, q_empty = allocate_mbarrier_groups(WARPGROUPS, (1, 1))
    k_full, k_empty = allocate_mbarrier_groups(STAGES_K, (1, WARPGROUPS))
    v_full, v_empty = allocate_mbarrier_groups(STAGES_V, (1, WARPGROUPS))
    fence_async_shared()
    # Wait for the previous kernel
    if USE_PDL:
        pdl_launch_dependents()
        pdl_wait()
    buffers = SmemBuffers(q_s, qpe_s, k_s, kpe_s, v_s, tile_info_s)
    mbarriers = Mbarriers(q_full, q_empty, k_full, k_empty, v_full, v_empty)
    strides = Strides(stride_ot, stride_oh, stride_lt, stride_lh)
    consumer_args = ConsumerArgs(
        OUT, LSE, OVERFLOW_FLAG, MAY_HAVE_NAN, num_rows, score_scale, strides, buffers, mbarriers
    )
    tensor_maps = TensorMaps(Q, Q_PE_MAP, KEYS, VALUES, KPE_MAP)
    work_queue = WorkQueue(
        WORK_COUNTER, CU_SEQLENS_Q, CACHE_LENS, CHUNK_ROW_OFFSETS, CACHE_OFFSETS, num_rows, num_m_blocks, H,
        heads_per_l2_group, num_work_tiles, head_stride,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consumer_of_64_queries, (consumer_args, 0, STORE_LSE)),
            (consumer_of_64_queries, (consumer_args, 1, STORE_LSE)),
            (consumer_of_64_queries, (consumer_args, 2, STORE_LSE)),
            (producer, (tensor_maps, work_queue, buffers, mbarriers)),
        ],
        [4, 4, 1], [REGISTERS_PER_THREAD, REGISTERS_PER_THREAD, 24],
    )  # fmt: skip


# Its launch.


def is_faster_than_two_warpgroups(f: SimpleNamespace, num_sms: int) -> bool:
    """Whether three warpgroups are faster than two. Assumes one chunk, in bf16: a large P overflows fp16."""
    max_q_len, work_tiles_per_m_block = f.max_q_len, f.cache_lens.shape[0] * f.q.shape[1]
    num_m_blocks = -(-max_q_len // BLOCK_M.value)
    return num_m_blocks * work_tiles_per_m_block >= _MIN_WORK_TILES_PER_SM * num_sms and num_m_blocks < -(
        -max_q_len // (2 * ROWS_PER_WARPGROUP.value)
    )


def make_three_consumers_attention_launch(
    f: SimpleNamespace, i_chunk: int, num_rows: int, num_sms: int, use_pdl: bool
) -> KernelLaunch:
    """Returns the launch for the only chunk, of `num_rows` rows (WORK_COUNTER: `attention.make_attention_launch`)."""
    tensor_maps = q_nope_q_pe_kv_and_kpe_tensor_map_args(f, num_rows, BLOCK_N.value)
    dim_v, columns = f.out.shape[2], f.kv_b_proj.shape[0]
    layout = gl.NVMMASharedLayout.get_default_for([ROWS_PER_WARPGROUP.value, 64], gl.bfloat16)
    arguments = common_attention_args(f, i_chunk, num_rows, BLOCK_M.value, False) | {
        "Q": tensor_maps["Q"], "Q_PE_MAP": tensor_maps["Q_PE_MAP"], "KEYS": tensor_maps["KV"],
        "KPE_MAP": tensor_maps["KPE_MAP"],
        "VALUES": tensor_map_arg("KV", [num_rows, columns], [columns, 1], [HALF_BLOCK_N.value, dim_v], layout),
        "WORK_COUNTER": TensorArg("WORK_COUNTER", row=TAKEN_BY_THREE_WARPGROUPS),
        "OVERFLOW_FLAG": TensorArg("WORK_COUNTER", row=OVERFLOWED), "REGISTERS_PER_THREAD": REGISTERS,
        "USE_PDL": use_pdl,
    }  # fmt: skip
    grid = (min(arguments["num_work_tiles"], num_sms),)
    return KernelLaunch(attention_three_warpgroups_kernel, grid, arguments, num_warps=4, launch_pdl=use_pdl)
