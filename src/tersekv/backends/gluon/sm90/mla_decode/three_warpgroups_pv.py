"""The PV warpgroups of MLA decode over 8-bit latents (three_warpgroups.py): half of the columns each.

They also load the query, half of its rows each, and store the output.

Rescale: `rescale_acc`; wait for KV and P: `pv_warpgroup`, `accumulate_pv`; mask: `three_warpgroups_qk`; combine:
`combine.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import reinterpret
from ..parts.epilogue import cast_output
from ..parts.pipeline import sync_and_arrive
from ..parts.tile_scheduler import next_work_tile
from .small_m_fp8_mainloop import dequant_packed
from .three_warpgroups_qk import BLOCK_N, KEY_HALVES, KEYS_PER_HALF, LANES_PER_ROW, P_STAGES
from .three_warpgroups_query import BLOCK_M, QueryBlock, load_query_half, token_and_head_of_q_rows

CHUNKS_PER_WARPGROUP = gl.constexpr(2)  # chunks of columns of a warpgroup
PACKED_PER_CHUNK = gl.constexpr(64)  # packed columns of a chunk
ROWS_STAGED = gl.constexpr(32)  # output rows in shared memory
ROWS_PER_STORE = gl.constexpr(16)  # of them stored at once
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


@gluon.jit
def zero_invalid_v(packed_v, first_chunk, num_valid):
    """Zeros rows past the tile's last key: 0 × NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    is_valid = gl.arange(0, BLOCK_N, gl.SliceLayout(1, L)) < num_valid
    for i in range(CHUNKS_PER_WARPGROUP):  # not unrolled: rare, and the main loop should stay small
        p_stage = packed_v.index(first_chunk + i)
        x = p_stage.load(L)
        p_stage.store(gl.where(is_valid[:, None], x, 0))
    fence_async_shared()  # TMA writes there next


@gluon.jit
def load_packed_v(packed_v, chunk, key_half: gl.constexpr, O: gl.constexpr):
    """Loads packed V of a chunk for half the keys, transposed: [PACKED_PER_CHUNK, KEYS_PER_HALF]."""
    return (
        packed_v.index(chunk)
        .slice(key_half * KEYS_PER_HALF, KEYS_PER_HALF)
        .permute((1, 0))
        .load(gl.DotOperandLayout(0, O, 2))
    )


@gluon.jit
def dequant_v(packed, v_scale_ratios, key_half: gl.constexpr, cfg: gl.constexpr):
    """Dequantises packed V to two fp16 tiles. v_scale_ratios: the chunk's scales over each key's largest."""
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


@gluon.jit
def rescale_acc(acc_o, rescale_smem, rescale_flag, O: gl.constexpr):
    """Returns acc_o × rescale, skipped unless the flag says that some rescale is not 1: rarely."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    flag_word = reinterpret(rescale_flag, gl.int32, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if gl.max(flag_word.slice(0, 1).load(ONE), 0) != 0:
        L: gl.constexpr = gl.BlockedLayout([1, LANES_PER_ROW], [32, 1], [gl.num_warps(), 1], [1, 0])
        rescale = gl.convert_layout(gl.max(rescale_smem.load(L), 1), gl.SliceLayout(0, O))
        out = ()
        for i in gl.static_range(4):
            out = out + (acc_o[i] * rescale[None, :],)
        acc_o = out
    return acc_o


@gluon.jit
def accumulate_pv(acc_o, packed_v, first_chunk, buffers, p_full, p_iter, O: gl.constexpr, cfg: gl.constexpr):
    """Waits for P and returns acc_o + V × P, the last MMAs in flight."""
    p_smem, v_scale_ratios = buffers.p_smem, buffers.v_scale_ratios
    p_stage = p_iter % P_STAGES
    packed = load_packed_v(packed_v, first_chunk, 0, O)
    if not cfg.GROUP_SCALES:  # ratios are ready only with P
        v = dequant_v(packed, v_scale_ratios, 0, cfg)
    mbarrier.wait(p_full.index(p_stage), (p_iter // P_STAGES) & 1)
    acc_o = rescale_acc(acc_o, buffers.rescales.index(p_stage), buffers.rescale_flags.index(p_stage), O)
    if cfg.GROUP_SCALES:
        v = dequant_v(packed, v_scale_ratios.index(first_chunk), 0, cfg)
    for i in gl.static_range(CHUNKS_PER_WARPGROUP):
        for key_half in gl.static_range(KEY_HALVES):
            if i + key_half > 0:
                packed = load_packed_v(packed_v, first_chunk + i, key_half, O)
                acc_o = warpgroup_mma_wait(0, acc_o)
                v = dequant_v(packed, v_scale_ratios.index(first_chunk + i), key_half, cfg)
            p = p_smem.index(KEY_HALVES * p_stage + key_half).permute((1, 0))
            a0 = warpgroup_mma(v[0], p, acc_o[2 * i], is_async=True)
            a1 = warpgroup_mma(v[1], p, acc_o[2 * i + 1], is_async=True)
            if i == 0:
                acc_o = (a0, a1, acc_o[2], acc_o[3])
            else:
                acc_o = (acc_o[0], acc_o[1], a0, a1)
    return acc_o


@gluon.jit
def stage_output_rows(smem, even_columns, odd_columns, row_half: gl.constexpr):
    """Stores half the rows of a chunk, columns interleaved, in shared memory: [ROWS_STAGED, 2 * PACKED_PER_CHUNK]."""
    SPLIT_SHAPE: gl.constexpr = [PACKED_PER_CHUNK, 2, ROWS_STAGED]
    even_columns = gl.split(gl.permute(gl.reshape(even_columns, SPLIT_SHAPE), (0, 2, 1)))[row_half]
    odd_columns = gl.split(gl.permute(gl.reshape(odd_columns, SPLIT_SHAPE), (0, 2, 1)))[row_half]
    x = gl.permute(gl.join(even_columns, odd_columns), (1, 0, 2))
    smem.store(gl.reshape(x, [ROWS_STAGED, 2 * PACKED_PER_CHUNK]))


@gluon.jit
def store_output_or_partial(
    tensors, q_nope, acc_o, rescale_smem, is_unsplit, partial_slot, q_block, strides, I_CONSUMER: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Stores the output, or a split's partial acc_o, through the query's memory, so that rows are contiguous."""
    OUT, SPLIT_WORKSPACE = tensors.OUT, tensors.SPLIT_WORKSPACE
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    STAGING_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    NUM_STAGING_BUFFERS: gl.constexpr = (
        q_nope.shape[0] * q_nope.shape[1] * q_nope.shape[2] // (4 * ROWS_STAGED * 2 * PACKED_PER_CHUNK)
    )
    STEPS: gl.constexpr = ROWS_STAGED // ROWS_PER_STORE
    staging = reinterpret(
        q_nope, gl.float32, [NUM_STAGING_BUFFERS, ROWS_STAGED, 2 * PACKED_PER_CHUNK], STAGING_LAYOUT
    ).index(I_CONSUMER)
    staging_steps = reinterpret(
        q_nope, gl.float32, [NUM_STAGING_BUFFERS * STEPS, ROWS_PER_STORE, 2 * PACKED_PER_CHUNK], STAGING_LAYOUT
    )
    acc_scales = reinterpret(
        rescale_smem, gl.float32, [BLOCK_M // ROWS_PER_STORE, ROWS_PER_STORE, LANES_PER_ROW], rescale_smem.layout
    )
    for i in range(4):  # not unrolled: fetching code that runs once is slow
        if i == 0:
            stage_output_rows(staging, acc_o[0], acc_o[1], 0)
        elif i == 1:
            stage_output_rows(staging, acc_o[0], acc_o[1], 1)
        elif i == 2:
            stage_output_rows(staging, acc_o[2], acc_o[3], 0)
        else:
            stage_output_rows(staging, acc_o[2], acc_o[3], 1)
        for j in range(STEPS):
            x = staging_steps.index(I_CONSUMER * STEPS + j).load(W)
            step = i % 2 * STEPS + j
            o_r = step * ROWS_PER_STORE + gl.arange(0, ROWS_PER_STORE, gl.SliceLayout(1, W))
            o_d = (CHUNKS_PER_WARPGROUP * I_CONSUMER + i // 2) * 2 * PACKED_PER_CHUNK + gl.arange(
                0, 2 * PACKED_PER_CHUNK, gl.SliceLayout(0, W)
            )
            tokens, heads, m_row = token_and_head_of_q_rows(o_r, q_block, cfg)
            if is_unsplit:
                x *= gl.max(acc_scales.index(step).load(W), 1)[:, None]
                p_out = (OUT + tokens * strides.out_t + heads * strides.out_h)[:, None] + o_d[None, :]
                gl.store(p_out, cast_output(x, OUT, cfg), mask=m_row[:, None])
            else:
                p_row = SPLIT_WORKSPACE + (partial_slot.to(gl.int64) * cfg.BLOCK_M + o_r) * cfg.PARTIAL_COLUMNS
                gl.store(p_row[:, None] + o_d[None, :], x, mask=m_row[:, None])


@gluon.jit
def pv_warpgroup(tensors, q, kv_stages, mbarriers, buffers, score_scale, cta_range, strides, I_CONSUMER: gl.constexpr,
                 STAGES: gl.constexpr, Q_TERMS: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Computes PV of the CTA range for chunks 2 * I_CONSUMER and the next.

    For every work tile it first loads half of the query's rows.
    """
    i_cta, block, block_end, i_request, n_block_base = (
        cta_range.i_cta, cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    p_full, p_empty = mbarriers.p_full, mbarriers.p_empty
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    zero = gl.full([PACKED_PER_CHUNK, BLOCK_M], 0.0, gl.float32, O)
    packed_v = reinterpret(
        kv_stages.latents, gl.int16, [STAGES * cfg.CHUNKS, BLOCK_N, PACKED_PER_CHUNK], gl.NVMMASharedLayout(128, 16)
    )
    kv_iter, num_work_tiles = 0, 0
    while block < block_end:
        work_tile = next_work_tile(
            tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, block, block_end, i_request, n_block_base, cfg
        )
        i_request, n_block_base, num_keys, n_block_begin, n_block_end = (
            work_tile.i_request, work_tile.n_block_base, work_tile.num_keys, work_tile.n_block_begin,
            work_tile.n_block_end,
        )  # fmt: skip
        # Computed here, where registers are free: in the loop they are scarce.
        partial_slot, is_unsplit = (
            2 * i_cta + (n_block_begin == 0).to(gl.int32),
            n_block_end - n_block_begin == work_tile.num_n_blocks,
        )
        block += n_block_end - n_block_begin
        q_block = QueryBlock(work_tile.m_block, i_cta % cfg.HEADS, work_tile.q_begin, work_tile.num_q_rows)
        mbarrier.wait(
            mbarriers.q_empty.index(0), (num_work_tiles & 1) ^ 1
        )  # both PV warpgroups are done with the query's memory
        load_query_half(tensors, q, buffers.q_scales, q_block, score_scale, strides, I_CONSUMER, Q_TERMS, cfg)
        sync_and_arrive(mbarriers.q_full.index(0))
        mbarrier.arrive(mbarriers.first_q_full.index(0), pred=num_work_tiles == 0)
        acc_o = (zero, zero, zero, zero)
        for n_block in range(n_block_begin, n_block_end):
            # Wait for the tile.
            stage = kv_iter % STAGES
            mbarrier.wait(mbarriers.full.index(stage), (kv_iter // STAGES) & 1)
            first_chunk = stage * cfg.CHUNKS + CHUNKS_PER_WARPGROUP * I_CONSUMER
            if (n_block + 1) * BLOCK_N > num_keys:
                zero_invalid_v(packed_v, first_chunk, num_keys - n_block * BLOCK_N)
            # PV; release KV, then P.
            p_iter = kv_iter + num_work_tiles
            acc_o = accumulate_pv(acc_o, packed_v, first_chunk, buffers, p_full, p_iter, O, cfg)
            sync_and_arrive(mbarriers.empty.index(stage))
            acc_o = warpgroup_mma_wait(0, acc_o)
            sync_and_arrive(p_empty.index(p_iter % P_STAGES))
            kv_iter += 1
        # Epilogue: wait for acc_scale, store.
        p_iter = kv_iter + num_work_tiles
        mbarrier.wait(p_full.index(p_iter % P_STAGES), (p_iter // P_STAGES) & 1)
        rescale_smem = buffers.rescales.index(p_iter % P_STAGES)
        store_output_or_partial(
            tensors, q.latents, acc_o, rescale_smem, is_unsplit, partial_slot, q_block, strides, I_CONSUMER, cfg
        )
        sync_and_arrive(p_empty.index(p_iter % P_STAGES))
        mbarrier.arrive(mbarriers.q_empty.index(0))
        num_work_tiles += 1
