"""What decode of keys and values does its own way: equal shares, scales by head, sinks. Else see `parts/schedule`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.schedule import LN2, LOG2E, add, cut, locate, request_tiles, sum_and_max
from .records import Share


@gluon.jit
def bounds(LENS, CU, B, i_share, num_shares, c: gl.constexpr):
    """(first tile, end, tiles of a share) of a share, in the flat order of all tiles."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total = 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + gl.arange(0, c.BLOCK_B, LAYOUT)
        r = request_tiles(LENS, CU, o_b, o_b < B, c)
        total += gl.sum(r.tiles * r.segments, 0)
    per = gl.maximum((total + num_shares - 1) // num_shares, c.MIN_TILES)
    start = i_share * per
    return start, gl.minimum(start + per, total), per


@gluon.jit
def share_of(LENS, CU, B, i_share, num_shares, group, c: gl.constexpr):
    """The Share of a group of heads: `bounds`, then the request that holds its first tile; in one if it can."""
    if c.BLOCK_B == 1024:  # perhaps more requests
        start, end, per = bounds(LENS, CU, B, i_share, num_shares, c)
        b, base = locate(LENS, CU, B, start, c)
    else:
        o_b = gl.arange(0, c.BLOCK_B, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        r = request_tiles(LENS, CU, o_b, o_b < B, c)
        tiles = gl.where(o_b < B, r.tiles * r.segments, 0)
        ends = gl.associative_scan(tiles, 0, add)
        total = gl.sum(tiles, 0)
        per = gl.maximum((total + num_shares - 1) // num_shares, c.MIN_TILES)
        start = i_share * per
        end = gl.minimum(start + per, total)
        passed = (ends <= start) & (o_b < B)
        b, base = gl.reduce((passed.to(gl.int32), gl.where(passed, ends, 0)), 0, sum_and_max)
    return Share(i_share, group, per, start, end, b, base)


@gluon.jit
def even_share_of(LENS, CU, B, i_share, num_shares, group, c: gl.constexpr):
    """As `share_of`, but shares grow by up to 5% to hold whole segments or like parts, if these come out even.

    What is not cut needs no merge, and what is cut once needs one query. With more than 512 requests shares never grow.
    """
    if c.BLOCK_B == 1024:  # perhaps more requests
        return share_of(LENS, CU, B, i_share, num_shares, group, c)
    else:
        o_b = gl.arange(0, c.BLOCK_B, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        r = request_tiles(LENS, CU, o_b, o_b < B, c)
        tiles = gl.where(o_b < B, r.tiles, 0)
        ends = gl.associative_scan(tiles * r.segments, 0, add)
        total, longest = gl.reduce((tiles * r.segments, tiles), 0, sum_and_max)
        longest = gl.maximum(longest, 1)
        _, _, even = cut(total, longest, i_share, num_shares, c)
        per = gl.maximum((total + num_shares - 1) // num_shares, c.MIN_TILES)
        per = gl.where(total % longest == 0, even, per)
        start = i_share * per
        end = gl.minimum(start + per, total)
        passed = (ends <= gl.minimum(start, end - 1)) & (o_b < B)
        b, base = gl.reduce((passed.to(gl.int32), gl.where(passed, ends, 0)), 0, sum_and_max)
        return Share(i_share, group, per, start, end, b, base)


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
        top = gl.maximum(base, sink)  # a sink far above every score would overflow against `base`
        old = gl.exp2(base - top)
        total = l * old + gl.exp2(sink - top)
        value_factor *= old
        base = top
    total = gl.where(seen, total, 1.0)
    return gl.where(seen, value_factor / total, 0.0), gl.where(seen, (base + gl.log2(total)) * LN2, float("-inf"))
