"""Epilogue of the kernels for many query rows (shared_tiles, rows_64): column order, masks, and stores.

Rows are on M of the MMAs. o_r: rows, in the layout of row_max and row_sum, a slice of the accumulator's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.tile_scheduler import cast_output
from .cta_range import finalize_softmax
from .mask import is_visible


@gluon.jit
def logical_column(converted_column, cfg: gl.constexpr):
    """Returns the column of the head at a position of a converted row."""
    if cfg.PACK == 2:
        return converted_column
    else:
        return (
            converted_column // 8 * 8
            + converted_column // 2 % 2 * 4
            + converted_column % 2 * 2
            + converted_column // 4 % 2
        )


@gluon.jit
def is_visible_in_block(n_block, mask_args, NUM_ROWS: gl.constexpr, LAYOUT: gl.constexpr, cfg: gl.constexpr):
    """Returns which of an n_block's keys each query row sees: [NUM_ROWS, BLOCK_N], in LAYOUT."""
    o_n = n_block * cfg.BLOCK_N + gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    o_q = (mask_args.row_begin + gl.arange(0, NUM_ROWS, gl.SliceLayout(1, LAYOUT))) // cfg.GROUP
    return is_visible(o_n[None, :], o_q[:, None], mask_args, cfg)


@gluon.jit
def store_partial_of_head(SPLIT_WORKSPACE, partial_slot, state, o_r, num_rows_left, cfg: gl.constexpr):
    """Stores the partial result of rows o_r of a split work tile, columns in the order of `store_partial`."""
    O: gl.constexpr = state.acc_o.type.layout
    p_row = SPLIT_WORKSPACE + (partial_slot.to(gl.int64) * cfg.BLOCK_M + o_r) * cfg.PARTIAL_COLUMNS
    column = logical_column(gl.arange(0, cfg.PACK * cfg.PACKED_V, gl.SliceLayout(0, O)), cfg)
    o_d = column % cfg.PACK * cfg.BLOCK_DV + column // cfg.PACK
    m_row = o_r < num_rows_left
    gl.store(p_row[:, None] + o_d[None, :], state.acc_o, mask=m_row[:, None])
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, state.row_max, mask=m_row)
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, state.row_sum, mask=m_row)


@gluon.jit
def store_output_of_head(tensors, strides, state, v_out_scale, kv_head, work_tile, o_r, cfg: gl.constexpr):
    """Stores finished rows o_r of a request to `out`, and their LSE."""
    OUT, LSE = tensors.OUT, tensors.LSE
    O: gl.constexpr = state.acc_o.type.layout
    q_heads = (kv_head * cfg.GROUP + o_r % cfg.GROUP).to(gl.int64)
    tokens = (work_tile.q_begin + o_r // cfg.GROUP).to(gl.int64)
    m_row = o_r < work_tile.num_q_rows * cfg.GROUP
    acc_scale, lse = finalize_softmax(
        state.row_max, state.row_sum, v_out_scale * cfg.V_RESIDUAL_SCALE, tensors.SINKS, q_heads, m_row, cfg
    )
    o_d = logical_column(gl.arange(0, cfg.PACK * cfg.PACKED_V, gl.SliceLayout(0, O)), cfg)
    p_out = (OUT + tokens * strides.out_t + q_heads * strides.out_h)[:, None] + o_d[None, :]
    gl.store(p_out, cast_output(state.acc_o * acc_scale[:, None], OUT, cfg), mask=m_row[:, None])
    if cfg.HAS_LSE:
        gl.store(LSE + tokens * strides.lse_t + q_heads * strides.lse_h, lse, mask=m_row)
