"""How decode deals its work: the Triton kernel's scheme. A tile is TILE keys of all heads of a program."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .schedule import LN2, LOG2E, add


@gluon.jit
def first_tile(n, rows, c: gl.constexpr):
    """First tile that some query row's window reaches."""
    if c.WINDOW > 0:
        return gl.maximum(n - rows - c.WINDOW + 1, 0) // c.TILE
    else:
        return n * 0


@gluon.jit
def request_tiles(LENS, CU, b, m_b, c: gl.constexpr):
    """(tiles of a segment, segments, first tile, keys, query rows, first query row) of request(s) b."""
    n = gl.load(LENS + b, mask=m_b, other=0).to(gl.int32)
    if c.RAGGED:
        q0 = gl.load(CU + b, mask=m_b, other=0).to(gl.int32)
        rows = gl.load(CU + b + 1, mask=m_b, other=0).to(gl.int32) - q0
    else:
        q0 = b * c.MAX_Q
        rows = gl.where(m_b, c.MAX_Q, 0)
    first = first_tile(n, rows, c)
    # A request without keys still has outputs to write: one empty tile.
    tiles = gl.maximum((n + c.TILE - 1) // c.TILE - first, 1)
    segments = (rows * c.GROUP + c.ROWS - 1) // c.ROWS
    return tiles, segments, first, n, rows, q0


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
def locate(LENS, CU, B, x, c: gl.constexpr):
    """(request that holds flat tile x, flat index of the request's first tile)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    b, base, before = 0, 0, 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + gl.arange(0, c.BLOCK_B, LAYOUT)
        tiles, segments, _, _, _, _ = request_tiles(LENS, CU, o_b, o_b < B, c)
        ends = before + gl.associative_scan(tiles * segments, 0, add)
        passed = (ends <= x) & (o_b < B)
        b += gl.sum(passed.to(gl.int32), 0)
        base = gl.maximum(base, gl.max(gl.where(passed, ends, 0), 0))
        before += gl.sum(tiles * segments, 0)
    return b, base


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
