"""What the two kernels for many query rows (decode_wide, decode_many) do alike: masks, and what they store.

Rows lie on M of a product. o_r: its rows, in a layout that the accumulator's, their maxima's and their sums' goes with.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.schedule import output
from .work import finish


@gluon.jit
def column_of(place, c: gl.constexpr):
    """Column of the head at a place of a converted row."""
    if c.PARTS == 2:
        return place
    else:
        return place // 8 * 8 + place // 2 % 2 * 4 + place % 2 * 2 + place // 4 % 2


@gluon.jit
def visible(key, n, rows, r0, q0, MASK, sm_t, L: gl.constexpr, ROWS: gl.constexpr, c: gl.constexpr):
    """Which of a tile's keys each query row sees: [ROWS, TILE], layout L."""
    o_n = key + gl.arange(0, c.TILE, gl.SliceLayout(0, L))
    o_q = (r0 + gl.arange(0, ROWS, gl.SliceLayout(1, L))) // c.GROUP
    prefix = n - rows
    position = prefix + o_q
    seen = (o_n < n)[None, :]
    if c.HAS_MASK:
        draft = o_n - prefix
        p_word = MASK + (q0 + o_q)[:, None].to(gl.int64) * sm_t + (draft >> 4)[None, :]
        asked = (draft >= 0)[None, :] & seen & (o_q < rows)[:, None]
        word = gl.load(p_word, mask=asked, other=0).to(gl.int32)
        bit = (word >> (draft & 15)[None, :]) & 1
        seen = seen & ((draft < 0)[None, :] | (bit == 1))
    else:
        seen = seen & (o_n[None, :] <= position[:, None])
    if c.WINDOW > 0:
        seen = seen & (o_n[None, :] > position[:, None] - c.WINDOW)
    return seen


@gluon.jit
def store_state(PART, slot, m, l, acc, o_r, rows_left, c: gl.constexpr):
    """Write rows o_r of a cut segment's state, columns as decode_kernels.store_state has them."""
    O: gl.constexpr = acc.type.layout
    p_row = PART + (slot.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
    column = column_of(gl.arange(0, c.PARTS * c.WORDS_V, gl.SliceLayout(0, O)), c)
    o_d = column % c.PARTS * c.BLOCK_DV + column // c.PARTS
    m_row = o_r < rows_left
    gl.store(p_row[:, None] + o_d[None, :], acc, mask=m_row[:, None])
    gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
    gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)


@gluon.jit
def store_rows(OUT, LSE, SINKS, m, l, acc, h_scale, h, tokens, o_r, rows_left, strides, c: gl.constexpr):
    """Write finished rows o_r of a request to `out`, and their LSE."""
    so_t, so_h, sl_t, sl_h = strides
    O: gl.constexpr = acc.type.layout
    heads = (h * c.GROUP + o_r % c.GROUP).to(gl.int64)
    at = (tokens + o_r // c.GROUP).to(gl.int64)
    m_row = o_r < rows_left
    factor, lse = finish(m, l, h_scale * c.V_FACTOR, SINKS, heads, m_row, c)
    o_d = column_of(gl.arange(0, c.PARTS * c.WORDS_V, gl.SliceLayout(0, O)), c)
    p_out = (OUT + at * so_t + heads * so_h)[:, None] + o_d[None, :]
    gl.store(p_out, output(acc * factor[:, None], OUT, c), mask=m_row[:, None])
    if c.HAS_LSE:
        gl.store(LSE + at * sl_t + heads * sl_h, lse, mask=m_row)
