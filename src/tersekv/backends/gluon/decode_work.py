"""What decode of keys and values does its own way: equal shares, scales by head, sinks. Else see `schedule`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .schedule import LN2, LOG2E, request_tiles


@gluon.jit
def share(LENS, CU, B, i_share, num_shares, c: gl.constexpr):
    """(first tile, end, tiles of a share) of a share, in the flat order of all tiles."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + gl.arange(0, c.BLOCK_B, LAYOUT)
        tiles, segments, _, _, _, _ = request_tiles(LENS, CU, o_b, o_b < B, c)
        total += gl.sum(tiles * segments, 0)
    per = gl.maximum((total + num_shares - 1) // num_shares, c.MIN_TILES)
    start = i_share * per
    return start, gl.minimum(start + per, total), per


@gluon.jit
def per_head(x, T, h, HAS_T: gl.constexpr, STRIDE: gl.constexpr):
    """A scale of KV heads h: the device's tensor where there is one, else the host's float."""
    if HAS_T:
        return gl.load(T + h * STRIDE)
    else:
        return h * 0 + x


@gluon.jit
def finish(m, l, value_factor, SINKS, heads, m_row, c: gl.constexpr):
    """(factor of the accumulator, LSE in natural log) of rows whose running base-2 maximum and sum are m, l."""
    seen = l != 0  # NaN counts as seen
    base = gl.where(seen, m, 0.0)
    total = l
    if c.HAS_SINKS:
        sink = gl.load(SINKS + heads, mask=m_row, other=0.0) * LOG2E
        total += gl.where(seen, gl.exp2(sink - base), 0.0)
    total = gl.where(seen, total, 1.0)
    return gl.where(seen, value_factor / total, 0.0), gl.where(seen, (base + gl.log2(total)) * LN2, float("-inf"))
