"""Which keys query rows see."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def visible(o_n, o_q, by, c: gl.constexpr):
    """Which of the keys o_n the drafts o_q see; one of the two is a row, the other a column."""
    prefix = by.keys - by.rows
    position = prefix + o_q
    seen = o_n < by.keys
    if c.HAS_MASK:
        draft = o_n - prefix
        p_word = by.MASK + (by.q0 + o_q).to(gl.int64) * by.mask_t + (draft >> 4)
        asked = (draft >= 0) & seen & (o_q < by.rows)
        word = gl.load(p_word, mask=asked, other=0).to(gl.int32)
        bit = (word >> (draft & 15)) & 1
        seen = seen & ((draft < 0) | (bit == 1))
    else:
        seen = seen & (o_n <= position)
    if c.WINDOW > 0:
        seen = seen & (o_n > position - c.WINDOW)
    return seen


@gluon.jit
def live_keys(o_n, keys, rows, c: gl.constexpr):
    """Which keys some row may see; slots behind every row's window may have been given away, with their pages."""
    live = o_n < keys
    if c.WINDOW > 0:
        live = live & (o_n > keys - rows - c.WINDOW)
    return live


@gluon.jit
def whole_tiles(request, c: gl.constexpr):
    """Tiles [u0, u1) that every row sees whole."""
    u0 = request.first
    if c.WINDOW > 0:
        u0 = (gl.maximum(request.keys - c.WINDOW, 0) + c.TILE - 1) // c.TILE
    whole = request.keys - request.rows if c.HAS_MASK else request.keys - request.rows + 1
    return u0, gl.maximum(whole, 0) // c.TILE
