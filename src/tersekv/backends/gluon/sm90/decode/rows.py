"""What the kernels for many query rows (shared_tiles, rows64) do alike: the columns of codes, and what they store.

Rows lie on M of a product. o_r: its rows, in a layout that the accumulator's, their maxima's and their sums' goes with.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.schedule import output
from .seen import visible
from .work import finish


@gluon.jit
def column_of(place, c: gl.constexpr):
    """Column of the head at a place of a converted row."""
    if c.PARTS == 2:
        return place
    else:
        return place // 8 * 8 + place // 2 % 2 * 4 + place % 2 * 2 + place // 4 % 2


@gluon.jit
def visible_of_tile(t, by, ROWS: gl.constexpr, L: gl.constexpr, c: gl.constexpr):
    """Which of a tile's keys each query row sees: [ROWS, TILE], layout L."""
    o_n = t * c.TILE + gl.arange(0, c.TILE, gl.SliceLayout(0, L))
    o_q = (by.r0 + gl.arange(0, ROWS, gl.SliceLayout(1, L))) // c.GROUP
    return visible(o_n[None, :], o_q[:, None], by, c)


@gluon.jit
def store_state_of_head(PART, slot, state, o_r, rows_left, c: gl.constexpr):
    """Write rows o_r of a cut segment's state, columns as `store_state_of_heads` has them."""
    O: gl.constexpr = state.acc.type.layout
    p_row = PART + (slot.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
    column = column_of(gl.arange(0, c.PARTS * c.WORDS_V, gl.SliceLayout(0, O)), c)
    o_d = column % c.PARTS * c.BLOCK_DV + column // c.PARTS
    m_row = o_r < rows_left
    gl.store(p_row[:, None] + o_d[None, :], state.acc, mask=m_row[:, None])
    gl.store(p_row + c.PART_COLUMNS - 2, state.m, mask=m_row)
    gl.store(p_row + c.PART_COLUMNS - 1, state.l, mask=m_row)


@gluon.jit
def store_rows_of_head(tensors, strides, state, h_scale, h, segment, o_r, c: gl.constexpr):
    """Write finished rows o_r of a request to `out`, and their LSE."""
    OUT, LSE = tensors.OUT, tensors.LSE
    O: gl.constexpr = state.acc.type.layout
    heads = (h * c.GROUP + o_r % c.GROUP).to(gl.int64)
    at = (segment.q0 + o_r // c.GROUP).to(gl.int64)
    m_row = o_r < segment.rows * c.GROUP
    factor, lse = finish(state.m, state.l, h_scale * c.V_FACTOR, tensors.SINKS, heads, m_row, c)
    o_d = column_of(gl.arange(0, c.PARTS * c.WORDS_V, gl.SliceLayout(0, O)), c)
    p_out = (OUT + at * strides.out_t + heads * strides.out_h)[:, None] + o_d[None, :]
    gl.store(p_out, output(state.acc * factor[:, None], OUT, c), mask=m_row[:, None])
    if c.HAS_LSE:
        gl.store(LSE + at * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
