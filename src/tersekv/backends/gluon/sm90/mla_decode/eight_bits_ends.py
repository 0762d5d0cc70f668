"""How the two warpgroups of eight_bits.py join their sums, and each writes half of the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..parts.ring import signal
from ..parts.schedule import output


@gluon.jit
def exchange(m, l, acc, notes, places, bars, done, ME: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """(reference, sum) of both warpgroups' tiles, and the accumulators of this one's half of the columns."""
    noted, given = bars
    MINE: gl.constexpr = c.CHUNKS
    COLUMN: gl.constexpr = m.type.layout
    notes.index(ME).store(m)
    notes.index(2 + ME).store(gl.convert_layout(l, COLUMN))
    signal(noted[ME].index(0))
    mbarrier.wait(noted[1 - ME].index(0), done & 1)
    other, other_l = notes.index(1 - ME).load(COLUMN), notes.index(3 - ME).load(COLUMN)
    top = gl.maximum(m, other)
    base = gl.where(top == float("-inf"), 0.0, top)
    factor = gl.exp2(m - base)
    l = notes.index(2 + ME).load(COLUMN) * factor + other_l * gl.exp2(other - base)
    factor = gl.convert_layout(factor, gl.SliceLayout(0, O))
    out = ()
    if ME == 0:  # there is memory for one half: the other warpgroup takes this one, and then gives its own
        for i in gl.static_range(MINE):
            places.index(i).store(acc[MINE + i] * factor[None, :])
        signal(given[0].index(0))
    mbarrier.wait(given[1 - ME].index(0), done & 1)
    for i in gl.static_range(MINE):
        out = out + (acc[ME * MINE + i] * factor[None, :] + places.index(i).load(O),)
    if ME == 1:
        for i in gl.static_range(MINE):
            places.index(i).store(acc[i] * factor[None, :])
        signal(given[1].index(0))
    return top, l, out


@gluon.jit
def store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, ME: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """Write acc × factor to `out`: all columns, or the ME-th half."""
    CHUNKS: gl.constexpr = len(acc) // 2
    for i in gl.static_range(CHUNKS):
        o_w = (ME * CHUNKS + i) * c.CHUNK + gl.arange(0, c.CHUNK, gl.SliceLayout(1, O))
        for j in gl.static_range(2):
            p_out = OUT + (tokens * so_t + heads * so_h)[None, :] + (2 * o_w + j)[:, None]
            gl.store(p_out, output(acc[2 * i + j] * factor[None, :], OUT, c), mask=m_row[None, :])


@gluon.jit
def store_part(PART, slot, m, l, acc, m_row, ME: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """Write a cut segment's state, or its ME-th half, as the merge reads it: part 0's words, then part 1's, m and l."""
    CHUNKS: gl.constexpr = len(acc) // 2
    o_r = gl.arange(0, c.ROWS, gl.SliceLayout(0, O))
    p_row = PART + (slot.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
    for i in gl.static_range(CHUNKS):
        o_w = (ME * CHUNKS + i) * c.CHUNK + gl.arange(0, c.CHUNK, gl.SliceLayout(1, O))
        for j in gl.static_range(2):
            gl.store(p_row[None, :] + (j * c.BLOCK_DV + o_w)[:, None], acc[2 * i + j], mask=m_row[None, :])
    if ME == 0:
        gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
        gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)
