"""Consumer warpgroups of MLA decode for few query rows, over 8-bit or 16-bit latents, and their epilogue.

Mask, lazy rescaling, full and empty stages: `mainloop_fp8`, `mainloop_bf16`; combine: of two warpgroups
`exchange_partial_results`, of splits `combine.py`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..parts.combine import count_splits, store_split_metadata
from ..parts.epilogue import cast_output, finalize_softmax, token_and_head_of_q_rows
from ..parts.pipeline import sync_and_arrive
from ..parts.tile_scheduler import next_work_tile
from .params import SoftmaxState
from .small_m_bf16_mainloop import NUM_COLUMN_TILES, TILE_COLUMNS, load_query_tiles, mainloop_bf16
from .small_m_fp8_mainloop import load_query_as_e4m3_terms, mainloop_fp8


class PipelineBarriers(NamedTuple):
    """Full and empty barriers of the KV pipeline."""

    full: gl.shared_memory_descriptor  # a multiple of STAGES, used in rotation
    empty: gl.shared_memory_descriptor


class ConsumerBuffers(NamedTuple):
    """Other shared memory of the consumers; the last five only with two of them."""

    p_smem: gl.shared_memory_descriptor  # P of a tile
    vote_flags: gl.shared_memory_descriptor  # a vote per warp
    row_stats: gl.shared_memory_descriptor  # row_max and row_sum of both
    acc_exchange: gl.shared_memory_descriptor  # half of acc_o's columns
    q_full: tuple  # full barriers, one per consumer: of its half of the query
    stats_full: tuple  # of its row_stats
    acc_full: tuple  # of its acc_exchange


@gluon.jit
def exchange_partial_results(
    state, buffers, num_work_tiles, I_CONSUMER: gl.constexpr, O: gl.constexpr, cfg: gl.constexpr
):
    """Combines both warpgroups: returns row_max, row_sum, and acc_o of this one's half of the columns."""
    row_max, acc_o, row_stats, acc_exchange = state.row_max, state.acc_o, buffers.row_stats, buffers.acc_exchange
    CHUNKS_PER_CONSUMER: gl.constexpr = cfg.CHUNKS
    COLUMN: gl.constexpr = row_max.type.layout
    row_stats.index(I_CONSUMER).store(row_max)
    row_stats.index(2 + I_CONSUMER).store(gl.convert_layout(state.row_sum, COLUMN))
    sync_and_arrive(buffers.stats_full[I_CONSUMER].index(0))
    mbarrier.wait(buffers.stats_full[1 - I_CONSUMER].index(0), num_work_tiles & 1)
    other_row_max, other_row_sum = (
        row_stats.index(1 - I_CONSUMER).load(COLUMN),
        row_stats.index(3 - I_CONSUMER).load(COLUMN),
    )
    row_max_new = gl.maximum(row_max, other_row_max)
    safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    rescale = gl.exp2(row_max - safe_max)
    row_sum = row_stats.index(2 + I_CONSUMER).load(COLUMN) * rescale + other_row_sum * gl.exp2(other_row_max - safe_max)
    rescale = gl.convert_layout(rescale, gl.SliceLayout(0, O))
    merged_acc = ()
    if I_CONSUMER == 0:  # there is memory for one half: the other warpgroup reads it, then stores its own
        for i in gl.static_range(CHUNKS_PER_CONSUMER):
            acc_exchange.index(i).store(acc_o[CHUNKS_PER_CONSUMER + i] * rescale[None, :])
        sync_and_arrive(buffers.acc_full[0].index(0))
    mbarrier.wait(buffers.acc_full[1 - I_CONSUMER].index(0), num_work_tiles & 1)
    for i in gl.static_range(CHUNKS_PER_CONSUMER):
        merged_acc = merged_acc + (
            acc_o[I_CONSUMER * CHUNKS_PER_CONSUMER + i] * rescale[None, :] + acc_exchange.index(i).load(O),
        )
    if I_CONSUMER == 1:
        for i in gl.static_range(CHUNKS_PER_CONSUMER):
            acc_exchange.index(i).store(acc_o[i] * rescale[None, :])
        sync_and_arrive(buffers.acc_full[1].index(0))
    return SoftmaxState(row_max_new, row_sum, merged_acc)


@gluon.jit
def store_output_chunks(
    OUT, acc_o, acc_scale, tokens, heads, m_row, strides, I_CONSUMER: gl.constexpr, O: gl.constexpr, cfg: gl.constexpr
):
    """Stores acc_o × acc_scale to OUT: all columns, or the I_CONSUMER-th half."""
    CHUNKS: gl.constexpr = len(acc_o) // 2
    for i in gl.static_range(CHUNKS):
        o_packed = (I_CONSUMER * CHUNKS + i) * cfg.CHUNK + gl.arange(0, cfg.CHUNK, gl.SliceLayout(1, O))
        for j in gl.static_range(2):
            p_out = OUT + (tokens * strides.out_t + heads * strides.out_h)[None, :] + (2 * o_packed + j)[:, None]
            gl.store(p_out, cast_output(acc_o[2 * i + j] * acc_scale[None, :], OUT, cfg), mask=m_row[None, :])


@gluon.jit
def store_partial_chunks(
    SPLIT_WORKSPACE, partial_slot, state, m_row, I_CONSUMER: gl.constexpr, O: gl.constexpr, cfg: gl.constexpr
):
    """Stores a split's state, or its I_CONSUMER-th half, as the combine reads it: even columns, odd columns, row_max,
    row_sum."""
    CHUNKS: gl.constexpr = len(state.acc_o) // 2
    o_r = gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, O))
    p_row = SPLIT_WORKSPACE + (partial_slot.to(gl.int64) * cfg.BLOCK_M + o_r) * cfg.PARTIAL_COLUMNS
    for i in gl.static_range(CHUNKS):
        o_packed = (I_CONSUMER * CHUNKS + i) * cfg.CHUNK + gl.arange(0, cfg.CHUNK, gl.SliceLayout(1, O))
        for j in gl.static_range(2):
            gl.store(
                p_row[None, :] + (j * cfg.BLOCK_DV + o_packed)[:, None], state.acc_o[2 * i + j], mask=m_row[None, :]
            )
    if I_CONSUMER == 0:
        gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, state.row_max, mask=m_row)
        gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, state.row_sum, mask=m_row)


@gluon.jit
def store_output_tiles(OUT, acc_o, acc_scale, tokens, heads, m_row, strides, O: gl.constexpr, cfg: gl.constexpr):
    """Stores acc_o × acc_scale to OUT, for 16-bit latents, whose columns are in order."""
    for i in gl.static_range(NUM_COLUMN_TILES):
        o_d = i * TILE_COLUMNS + gl.arange(0, TILE_COLUMNS, gl.SliceLayout(1, O))
        p_out = OUT + (tokens * strides.out_t + heads * strides.out_h)[None, :] + o_d[:, None]
        gl.store(p_out, cast_output(acc_o[i] * acc_scale[None, :], OUT, cfg), mask=m_row[None, :])


@gluon.jit
def store_partial_tiles(SPLIT_WORKSPACE, partial_slot, state, m_row, O: gl.constexpr, cfg: gl.constexpr):
    """Stores a split's state for the combine, for 16-bit latents: columns, row_max, row_sum."""
    p_row = (
        SPLIT_WORKSPACE
        + (partial_slot.to(gl.int64) * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, O)))
        * cfg.PARTIAL_COLUMNS
    )
    for i in gl.static_range(NUM_COLUMN_TILES):
        o_d = i * TILE_COLUMNS + gl.arange(0, TILE_COLUMNS, gl.SliceLayout(1, O))
        gl.store(p_row[None, :] + o_d[:, None], state.acc_o[i], mask=m_row[None, :])
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, state.row_max, mask=m_row)
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, state.row_sum, mask=m_row)


@gluon.jit
def consumer(tensors, q, kv_stages, mbarriers, buffers, scales, cta_range, strides, STAGES: gl.constexpr,
             I_CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Computes this warpgroup's n_blocks of the CTA range for one block of heads, and stores its columns."""
    IS_FP8: gl.constexpr = kv_stages.latents.dtype.primitive_bitwidth == 8
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.BLOCK_M, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    i_cta, block, block_end, i_request, n_block_base = (
        cta_range.i_cta, cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    h = i_cta % cfg.HEADS
    kv_iter, num_work_tiles = 0, 0
    while block < block_end:
        work_tile = next_work_tile(
            tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, block, block_end, i_request, n_block_base, cfg
        )
        i_request, n_block_base = work_tile.i_request, work_tile.n_block_base
        # Load the query.
        if IS_FP8:
            Q_TERMS: gl.constexpr = q.latents.shape[1] // cfg.BLOCK_M
            score_scale = scales.score_scale * load_query_as_e4m3_terms(
                tensors, q, work_tile, h, strides, I_CONSUMER, NUM_CONSUMERS, Q_TERMS, ROW, cfg
            )
        else:
            load_query_tiles(tensors, q.latents, work_tile, h, strides, cfg)
        if NUM_CONSUMERS == 2:
            sync_and_arrive(buffers.q_full[I_CONSUMER].index(0))
            mbarrier.wait(buffers.q_full[1 - I_CONSUMER].index(0), num_work_tiles & 1)
        # Main loop; then combine two consumers.
        if IS_FP8:
            state = mainloop_fp8(
                q, kv_stages, mbarriers, buffers, score_scale, work_tile, kv_iter, I_CONSUMER, NUM_CONSUMERS, Q_TERMS,
                STAGES, S, cfg,
            )  # fmt: skip
        else:
            state = mainloop_bf16(
                q.latents, kv_stages, mbarriers, buffers, scales.score_scale, work_tile, kv_iter, STAGES, S, cfg
            )
        if NUM_CONSUMERS == 2:
            state = exchange_partial_results(state, buffers, num_work_tiles, I_CONSUMER, S, cfg)
        # Epilogue: metadata, then the output or a partial state.
        kv_iter += work_tile.n_block_end - work_tile.n_block_begin
        num_work_tiles += 1
        tokens, heads, m_row = token_and_head_of_q_rows(
            work_tile.m_block, h, work_tile.q_begin, work_tile.num_q_rows, ROW, cfg
        )
        state = SoftmaxState(gl.convert_layout(state.row_max, ROW), gl.convert_layout(state.row_sum, ROW), state.acc_o)
        if work_tile.n_block_begin == 0:  # all warpgroups store the same
            num_splits = count_splits(work_tile, cta_range.blocks_per_range, i_cta // cfg.HEADS)
            store_split_metadata(
                tensors.SPLIT_METADATA, i_request, work_tile.m_block, cta_range.max_m_blocks, i_cta, num_splits, cfg
            )
        if work_tile.n_block_end - work_tile.n_block_begin == work_tile.num_n_blocks:
            acc_scale, lse = finalize_softmax(state.row_max, state.row_sum, scales.value_scale)
            if IS_FP8:
                store_output_chunks(
                    tensors.OUT, state.acc_o, acc_scale, tokens, heads, m_row, strides, I_CONSUMER, S, cfg
                )
            else:
                store_output_tiles(tensors.OUT, state.acc_o, acc_scale, tokens, heads, m_row, strides, S, cfg)
            if cfg.HAS_LSE and I_CONSUMER == 0:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            partial_slot = 2 * i_cta + (work_tile.n_block_begin == 0).to(gl.int32)
            if IS_FP8:
                store_partial_chunks(tensors.SPLIT_WORKSPACE, partial_slot, state, m_row, I_CONSUMER, S, cfg)
            else:
                store_partial_tiles(tensors.SPLIT_WORKSPACE, partial_slot, state, m_row, S, cfg)
        block += work_tile.n_block_end - work_tile.n_block_begin
