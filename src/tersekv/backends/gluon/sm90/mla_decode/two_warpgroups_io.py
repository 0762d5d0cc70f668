"""Query load and epilogue of a warpgroup of `two_warpgroups`: half of the columns each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...versions import reinterpret
from ..parts.epilogue import cast_output, token_and_head_of_q_rows

TILE_COLUMNS = gl.constexpr(64)  # columns of a tile of the query
ROWS_PER_STORE = gl.constexpr(16)  # output rows stored at once


@gluon.jit
def load_query_half(tensors, q, sign, work_tile, h, strides, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):
    """Loads half of the query's columns, times `sign`, into shared memory; the right one also loads the rotary part."""
    q_nope, q_pe = q
    q_half = q_nope.index(I_CONSUMER)
    COLUMN_TILES: gl.constexpr = q_half.shape[0] // cfg.BLOCK_M
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = token_and_head_of_q_rows(
        work_tile.m_block, h, work_tile.q_begin, work_tile.num_q_rows, gl.SliceLayout(1, L), cfg
    )
    o_d = gl.arange(0, TILE_COLUMNS, gl.SliceLayout(0, L))
    p_q_nope = (tensors.Q_NOPE + tokens * strides.q_nope_t + heads * strides.q_nope_h)[:, None] + (
        I_CONSUMER * COLUMN_TILES * TILE_COLUMNS + o_d
    )[None, :]
    column_tiles = ()  # all loads are in flight before the first is used
    for i in gl.static_range(COLUMN_TILES):
        column_tiles = column_tiles + (gl.load(p_q_nope + i * TILE_COLUMNS, mask=m_row[:, None], other=0.0),)
    if I_CONSUMER == 1:
        p_q_pe = (tensors.Q_PE + tokens * strides.q_pe_t + heads * strides.q_pe_h)[:, None] + o_d[None, :]
        q_pe_tile = gl.load(p_q_pe, mask=m_row[:, None], other=0.0)
        q_pe.index(0).store((q_pe_tile.to(gl.float32) * sign).to(q_pe.dtype))
    for i in gl.static_range(COLUMN_TILES):
        q_half.slice(i * cfg.BLOCK_M, cfg.BLOCK_M).store((column_tiles[i].to(gl.float32) * sign).to(q_nope.dtype))
    fence_async_shared()


@gluon.jit
def token_and_head_of_row(o_r, h, q_begin, cfg: gl.constexpr):
    """Returns (tokens, query heads) of query rows o_r of a block of heads."""
    return (q_begin + o_r // cfg.GROUP).to(gl.int64), (h * cfg.GROUP + o_r % cfg.GROUP).to(gl.int64)


@gluon.jit
def store_output_or_partial_half(state, acc_scale, lse, q_nope, tensors, is_unsplit, partial_slot, work_tile, h,
                                 strides, I_CONSUMER: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Stores this warpgroup's columns of the output, or of a split's partial state.

    They go through the memory of this warpgroup's half of the query, so that rows are contiguous: 5 µs less.
    """
    OUT, SPLIT_WORKSPACE, q_begin, num_q_rows = (
        tensors.OUT, tensors.SPLIT_WORKSPACE, work_tile.q_begin, work_tile.num_q_rows,
    )  # fmt: skip
    NUM_PARTS: gl.constexpr = 2  # each of as many bytes as half of the query
    COLUMNS: gl.constexpr = cfg.DV // 2 // NUM_PARTS
    acc_parts = gl.split(gl.permute(gl.reshape(state.acc_o, [cfg.BLOCK_M, NUM_PARTS, COLUMNS]), (0, 2, 1)))
    acc_scale = gl.convert_layout(gl.where(is_unsplit, acc_scale, 1.0), gl.SliceLayout(1, acc_parts[0].type.layout))
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    STAGING_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 16, [1, 0])
    staging = reinterpret(q_nope.index(I_CONSUMER), gl.float32, [cfg.BLOCK_M, COLUMNS], STAGING_LAYOUT)
    staging_steps = reinterpret(
        q_nope.index(I_CONSUMER), gl.float32, [cfg.BLOCK_M // ROWS_PER_STORE, ROWS_PER_STORE, COLUMNS], STAGING_LAYOUT
    )
    num_rows = gl.minimum(num_q_rows * cfg.GROUP - work_tile.m_block * cfg.BLOCK_M, cfg.BLOCK_M)
    for i in gl.static_range(NUM_PARTS):
        staging.store(acc_parts[i] * acc_scale[:, None])
        o_d = (I_CONSUMER * NUM_PARTS + i) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, W))
        for j in range((num_rows + ROWS_PER_STORE - 1) // ROWS_PER_STORE):
            out = staging_steps.index(j).load(W)
            o_r = j * ROWS_PER_STORE + gl.arange(0, ROWS_PER_STORE, gl.SliceLayout(1, W))
            mask = (o_r < num_rows)[:, None]
            if is_unsplit:
                tokens, heads = token_and_head_of_row(work_tile.m_block * cfg.BLOCK_M + o_r, h, q_begin, cfg)
                p_out = (OUT + tokens * strides.out_t + heads * strides.out_h)[:, None] + o_d[None, :]
                gl.store(p_out, cast_output(out, OUT, cfg), mask=mask)
            else:
                p_row = SPLIT_WORKSPACE + (partial_slot.to(gl.int64) * cfg.BLOCK_M + o_r) * cfg.PARTIAL_COLUMNS
                gl.store(p_row[:, None] + o_d[None, :], out, mask=mask)
    if I_CONSUMER == 0:
        ROW: gl.constexpr = state.row_max.type.layout
        tokens, heads, m_row = token_and_head_of_q_rows(work_tile.m_block, h, q_begin, num_q_rows, ROW, cfg)
        if is_unsplit:
            if cfg.HAS_LSE:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            p_row = (
                SPLIT_WORKSPACE
                + (partial_slot.to(gl.int64) * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, ROW)) * cfg.PARTIAL_COLUMNS
            )
            gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, state.row_max, mask=m_row)
            gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, state.row_sum, mask=m_row)
