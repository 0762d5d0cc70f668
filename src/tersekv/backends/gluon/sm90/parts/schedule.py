"""How decode and MLA decode deal their work on the device: the scheme of `triton/parts/shares`, in Gluon.

Every (request, block of query rows) is a segment of tiles of TILE keys, and all tiles are dealt in equal, contiguous
shares. Of the segments that a share cuts, at most two, the states go to scratch slots: 2p that of the first, if it
began earlier, and 2p + 1 that of the last, if it goes on.
"""

import math
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2))


class Request(NamedTuple):
    """What its lengths say of a request; or of several, then all are tensors."""

    tiles: gl.tensor  # of a segment
    segments: gl.tensor
    first: gl.tensor  # tile that some row's window reaches
    keys: gl.tensor
    rows: gl.tensor  # of the query
    q0: gl.tensor  # the first of them


class Segment(NamedTuple):
    """What a share has of a segment: tiles [t0, t1), counted from its first."""

    b: gl.tensor  # its request
    base: gl.tensor  # flat index of the request's first tile
    i: gl.tensor  # its number in the request
    t0: gl.tensor
    t1: gl.tensor
    keys: gl.tensor
    rows: gl.tensor  # of the request's query
    q0: gl.tensor  # the first of them
    tiles: gl.tensor  # of the whole segment


@gluon.jit
def meta_of(PART, num_programs, c: gl.constexpr):
    """META [B, segments, HEADS, 2] int32, behind the states of cut segments in the same scratch.

    Of each segment: its pieces (1 or less: it is not cut), and the program in which it begins, which writes this.
    """
    return (PART + 2 * num_programs * c.ROWS * c.PART_COLUMNS).to(gl.pointer_type(gl.int32))


@gluon.jit
def first_tile(n, rows, c: gl.constexpr):
    """First tile that some query row's window reaches."""
    if c.WINDOW > 0:
        return gl.maximum(n - rows - c.WINDOW + 1, 0) // c.TILE
    else:
        return n * 0


@gluon.jit
def request_tiles(LENS, CU, b, m_b, c: gl.constexpr):
    """The Request, or Requests, b."""
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
    return Request(tiles, segments, first, n, rows, q0)


@gluon.jit
def cut(total, longest, i_share, num_shares, c: gl.constexpr):
    """(first tile, end, tiles of a share) of a share of `total` tiles."""
    per = gl.maximum((total + num_shares - 1) // num_shares, c.MIN_TILES)
    whole = (per + longest - 1) // longest * longest
    if per < longest:
        parts = longest // per
        whole = (longest + parts - 1) // parts
    per = gl.where(20 * whole <= 21 * per, whole, per)
    start = i_share * per
    return start, gl.minimum(start + per, total), per


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def whole_segment(LENS, CU, B, i, c: gl.constexpr):
    """(first tile, end, tiles of a share) of segment i as a share that is not cut, in the flat order of all tiles."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    before, start, tiles_of_it = 0, 0, 0
    for j in range(0, B, c.BLOCK_B):
        o_b = j + gl.arange(0, c.BLOCK_B, LAYOUT)
        r = request_tiles(LENS, CU, o_b, o_b < B, c)
        ends = before + gl.associative_scan(r.segments, 0, add)
        here = (ends > i) & (ends - r.segments <= i)
        inside = gl.where(here, (i - ends + r.segments) * r.tiles, 0)
        start += gl.sum(gl.where(ends <= i, r.tiles * r.segments, inside), 0)
        tiles_of_it += gl.sum(gl.where(here, r.tiles, 0), 0)
        before += gl.sum(r.segments, 0)
    return start, start + tiles_of_it, gl.maximum(start + tiles_of_it, 1)


@gluon.jit
def better_whole(total, longest, count, num_shares, c: gl.constexpr):
    """Whether a program should take a whole segment, though the longest one then takes longer than a share would.

    Where lengths differ, nearly every share would be cut, and cuts cost as much time as many tiles. NVIDIA H200,
    2026-11-21, lengths even between 0 and the most, 128 heads: 60 requests of up to 256, 512 and 1024 tokens 49.9, 57.7
    and 76.0 → 23.0, 30.3 and 46.3 µs, bf16 37.4, 45.1, 60.5 → 20.0, 26.3, 41.3; 30 of up to 1024 51.2 → 41.5, bf16
    40.4 → 36.5; 20 of up to 600 32.3 → 30.3, bf16 26.2 → 26.9: too few. 16 heads: 250 of up to 512 38.0 → 27.1, 100 of
    up to 256 14.2 → 15.6: too few.
    """
    per = (total + num_shares - 1) // num_shares
    MANY: gl.constexpr = c.GROUP >= 64
    most = per + (15 if MANY else 4)
    enough = (3 if MANY else 2) * count > num_shares
    return (longest * count > total) & (count <= num_shares) & enough & (longest <= most)


@gluon.jit
def share(LENS, CU, B, i_share, num_shares, c: gl.constexpr):
    """(first tile, end, tiles of a share) of a share, in the flat order of all tiles.

    Shares grow by up to 5% where they then hold whole segments, or equal parts of one, if lengths are equal: what is
    not cut needs no merge, and what is cut once needs one query.
    """
    if c.WHOLE:
        return whole_segment(LENS, CU, B, i_share, c)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total, longest, count = 0, 1, 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + gl.arange(0, c.BLOCK_B, LAYOUT)
        r = request_tiles(LENS, CU, o_b, o_b < B, c)
        total += gl.sum(r.tiles * r.segments, 0)
        longest = gl.maximum(longest, gl.max(r.tiles, 0))
        count += gl.sum(r.segments, 0)
    start, end, per = cut(total, longest, i_share, num_shares, c)
    if better_whole(total, longest, count, num_shares, c):
        start, end, per = whole_segment(LENS, CU, B, i_share, c)
    return start, end, per


@gluon.jit
def locate(LENS, CU, B, x, c: gl.constexpr):
    """(request that holds flat tile x, flat index of the request's first tile)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    b, base, before = 0, 0, 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + gl.arange(0, c.BLOCK_B, LAYOUT)
        r = request_tiles(LENS, CU, o_b, o_b < B, c)
        ends = before + gl.associative_scan(r.tiles * r.segments, 0, add)
        passed = (ends <= x) & (o_b < B)
        b += gl.sum(passed.to(gl.int32), 0)
        base = gl.maximum(base, gl.max(gl.where(passed, ends, 0), 0))
        before += gl.sum(r.tiles * r.segments, 0)
    return b, base


@gluon.jit
def sum_and_max(a, b, c, d):
    return a + c, gl.maximum(b, d)


@gluon.jit
def load_tiles(LENS, CU, B, c: gl.constexpr, BY_WARP: gl.constexpr = False):
    """What `deal` needs of all requests: their loads are under way, other things can be done before.

    BY_WARP: each warp holds all of them, so that sums need no barriers, but more registers
    """
    EACH: gl.constexpr = c.BLOCK_B // 32 if BY_WARP else 1
    o_b = gl.arange(0, c.BLOCK_B, gl.BlockedLayout([EACH], [32], [gl.num_warps()], [0]))
    r = request_tiles(LENS, CU, o_b, o_b < B, c)
    return gl.where(o_b < B, r.tiles, 0), r.segments


@gluon.jit
def deal(loaded, i_share, num_shares, c: gl.constexpr):
    """`share` and `locate` of its first tile in one, for as many requests as BLOCK_B."""
    tiles, segments = loaded
    ends = gl.associative_scan(tiles * segments, 0, add)
    total, longest = gl.reduce((tiles * segments, tiles), 0, sum_and_max)
    start, end, per = cut(total, gl.maximum(longest, 1), i_share, num_shares, c)
    if better_whole(total, longest, gl.sum(segments, 0), num_shares, c):
        starts = gl.associative_scan(segments, 0, add) - segments
        here = (starts <= i_share) & (i_share < starts + segments)
        inside = gl.where(here, (i_share - starts) * tiles, 0)
        start = gl.sum(gl.where(starts + segments <= i_share, tiles * segments, inside), 0)
        end = start + gl.sum(gl.where(here, tiles, 0), 0)
        per = gl.maximum(end, 1)
    passed = (ends <= gl.minimum(start, end - 1)) & (tiles > 0)
    b, base = gl.reduce((passed.to(gl.int32), gl.where(passed, ends, 0)), 0, sum_and_max)
    return start, end, per, b, base


@gluon.jit
def note_pieces(META, b, segment, max_segments, p, pieces, c: gl.constexpr):
    """Tell the merge of a segment that begins in program p."""
    p_meta = META + 2 * ((b * max_segments + segment) * c.HEADS + p % c.HEADS)
    gl.store(p_meta, pieces)
    gl.store(p_meta + 1, p)


@gluon.jit
def scalar(x, T, HAS_T: gl.constexpr):
    """A scale: the device's tensor where there is one, else the host's float."""
    if HAS_T:
        return gl.load(T)
    else:
        return x


@gluon.jit
def output(x, OUT, c: gl.constexpr):
    """fp32 → what OUT points to; fp8 saturates, NaN stays NaN."""
    if c.OUT_MAX > 0:
        x = gl.where(x != x, x, gl.minimum(gl.maximum(x, -c.OUT_MAX), c.OUT_MAX))
    return x.to(OUT.dtype.element_ty)


@gluon.jit
def finish(m, l, value_factor):
    """(factor of the accumulator, LSE in natural log) of rows whose running base-2 maximum and sum are m, l."""
    seen = l != 0  # NaN counts as seen
    total = gl.where(seen, l, 1.0)
    factor = gl.where(seen, value_factor / total, 0.0)
    lse = gl.where(seen, (gl.where(seen, m, 0.0) + gl.log2(total)) * LN2, float("-inf"))
    return factor, lse


@gluon.jit
def row_places(segment, h, q0, rows, LAYOUT: gl.constexpr, c: gl.constexpr):
    """(tokens [ROWS], query heads [ROWS], row is real [ROWS]) of a block of query rows."""
    o_r = segment * c.ROWS + gl.arange(0, c.ROWS, LAYOUT)
    tokens = (q0 + o_r // c.GROUP).to(gl.int64)
    return tokens, (h * c.GROUP + o_r % c.GROUP).to(gl.int64), o_r < rows * c.GROUP


@gluon.jit
def zero_padding(OUT, LSE, t, T, p, num_programs, so_t, so_h, sl_t, sl_h, c: gl.constexpr):
    """Query rows behind the last request: output 0, LSE −inf."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_d = gl.arange(0, c.PARTS * c.BLOCK_DV, LAYOUT)
    t += p
    while t < T:
        for head in range(c.HEADS * c.GROUP):
            p_out = OUT + t.to(gl.int64) * so_t + head.to(gl.int64) * so_h + o_d
            gl.store(p_out, (o_d * 0).to(gl.float32).to(OUT.dtype.element_ty), mask=o_d < c.DV)
            if c.HAS_LSE:
                gl.store(LSE + t.to(gl.int64) * sl_t + head.to(gl.int64) * sl_h, float("-inf"))
        t += num_programs


@gluon.jit
def request_at(LENS, CU, x, b, base, request, c: gl.constexpr):
    """(request that holds flat tile x, flat index of its first tile, what is said of it), from request b on."""
    while x - base >= request.tiles * request.segments:
        base += request.tiles * request.segments
        b += 1
        request = request_tiles(LENS, CU, b, True, c)
    return b, base, request


@gluon.jit
def segment_at(x, end, b, base, request):
    """The Segment at flat tile x of request b, as far as a share goes that ends at `end`."""
    i = (x - base) // request.tiles
    t0 = (x - base) % request.tiles
    t1 = gl.minimum(t0 + end - x, request.tiles)
    return Segment(b, base, i, t0, t1, request.keys, request.rows, request.q0, request.tiles)


@gluon.jit
def next_segment(LENS, CU, x, end, b, base, c: gl.constexpr):
    """The Segment at flat tile x, which request b or one behind it holds."""
    b, base, request = request_at(LENS, CU, x, b, base, request_tiles(LENS, CU, b, True, c), c)
    return segment_at(x, end, b, base, request)


@gluon.jit
def pieces_from(segment, per, i_share):
    """Pieces of a segment that begins in share i_share; shares have `per` tiles."""
    return (segment.base + (segment.i + 1) * segment.tiles - 1) // per - i_share + 1
