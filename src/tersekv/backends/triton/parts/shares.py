"""Attention's work, flattened on the device: every (request, block of query rows) is a segment of tiles of TILE keys,
and all tiles are dealt in equal, contiguous shares. Program p takes share p // HEADS for KV head (or block of heads)
p % HEADS, so that heads that lie side by side in memory are read at the same time. No plan call, and lengths may change
between replays of a CUDA graph.

A share covers whole segments, written to `out` at once, and at most two cut ones: the first, if it began earlier
(scratch slot 2p), and the last, if it goes on (slot 2p + 1). The program in which a cut segment begins also notes it in
META, from which `merge_kernel` works.

Batch invariance (PIECE > 0): a segment falls into pieces by its own length alone, each attended as if it stood alone. A
share takes the pieces that begin in it, and their states go to slots of their own, in which `merge_pieces_kernel` finds
them by the lengths, without META.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

META_FIELDS = tl.constexpr(4)  # pieces, first query row of the request, rows of the request, segment in the request


class Request(NamedTuple):
    """What its lengths say of a request; or of several, then all are tensors."""

    tiles: Any  # of a segment
    segments: Any
    first: Any  # tile that some row's window reaches
    keys: Any
    rows: Any  # of the query
    q0: Any  # the first of them


@triton.jit
def meta_of(PART, num_programs, c: tl.constexpr):
    """META [programs, META_FIELDS] int32, behind the states of cut segments in the same scratch."""
    return (PART + 2 * num_programs * c.ROWS * c.PART_COLUMNS).to(tl.pointer_type(tl.int32))


MOST_PIECES = tl.constexpr(128)  # of a segment


@triton.jit
def piece_tiles(tiles, c: tl.constexpr):
    """Tiles of a piece of a segment, where PIECE > 0."""
    return tl.maximum(tl.cdiv(tiles, MOST_PIECES), c.PIECE)


@triton.jit
def to_next_piece(x, tiles, c: tl.constexpr):
    """How many tiles behind x, counted from the request's first, the next piece begins; 0: there."""
    t, piece = x % tiles, piece_tiles(tiles, c)
    return tl.minimum((piece - t % piece) % piece, tiles - t)


@triton.jit
def first_segment(b, q0, c: tl.constexpr):
    """Where the segments of request b begin among those that B requests of T query rows have at most. Rows of requests
    lie one after the other, so that there is room for all that are before it."""
    return q0 * c.GROUP // c.ROWS + b


@triton.jit
def segment_of(CU, B, i, c: tl.constexpr):
    """(request, segment) of which `first_segment` and its followers make number i; there may be no such segment."""
    b, start = -1, 0
    for j in range(0, B, c.BLOCK_B):
        o_b = j + tl.arange(0, c.BLOCK_B)
        q0 = o_b * c.MAX_Q
        if c.RAGGED:
            q0 = tl.load(CU + o_b, mask=o_b < B, other=0).to(tl.int32)
        begins = first_segment(o_b, q0, c)
        passed = (begins <= i) & (o_b < B)
        b += tl.sum(passed.to(tl.int32))
        start = tl.maximum(start, tl.max(tl.where(passed, begins, 0)))
    return b, i - start


@triton.jit
def request_tiles(LENS, CU, b, m_b, c: tl.constexpr):
    """The Request, or Requests, b."""
    n = tl.load(LENS + b, mask=m_b, other=0).to(tl.int32)
    if c.RAGGED:
        q0 = tl.load(CU + b, mask=m_b, other=0).to(tl.int32)
        rows = tl.load(CU + b + 1, mask=m_b, other=0).to(tl.int32) - q0
    else:
        q0 = b * c.MAX_Q
        rows = tl.where(m_b, c.MAX_Q, 0)
    first = n * 0
    if c.WINDOW > 0:
        first = tl.maximum(n - rows - c.WINDOW + 1, 0) // c.TILE
    # A request without keys still has outputs to write: one empty tile.
    tiles = tl.maximum(tl.cdiv(n, c.TILE) - first, 1)
    segments = tl.cdiv(rows * c.GROUP, c.ROWS)
    return Request(tiles, segments, first, n, rows, q0)


@triton.jit
def share(LENS, CU, B, i_share, num_shares, c: tl.constexpr):
    """(first tile, end, tiles of a share) of a share, in the flat order of all tiles."""
    total = 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + tl.arange(0, c.BLOCK_B)
        r = request_tiles(LENS, CU, o_b, o_b < B, c)
        total += tl.sum(r.tiles * r.segments)
    per = tl.maximum(tl.cdiv(total, num_shares), c.MIN_TILES)
    start = i_share * per
    return start, tl.minimum(start + per, total), per


@triton.jit
def locate(LENS, CU, B, x, c: tl.constexpr):
    """(request that holds flat tile x, flat index of the request's first tile)."""
    b, base, before = 0, 0, 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + tl.arange(0, c.BLOCK_B)
        r = request_tiles(LENS, CU, o_b, o_b < B, c)
        ends = before + tl.cumsum(r.tiles * r.segments, 0)
        passed = (ends <= x) & (o_b < B)
        b += tl.sum(passed.to(tl.int32))
        base = tl.maximum(base, tl.max(tl.where(passed, ends, 0)))
        before += tl.sum(r.tiles * r.segments)
    return b, base


@triton.jit
def row_places(segment, h, q0, rows, c: tl.constexpr):
    """(tokens [ROWS], query heads [ROWS], row is real [ROWS]) of a block of query rows."""
    o_r = segment * c.ROWS + tl.arange(0, c.ROWS)
    tokens = (q0 + o_r // c.GROUP).to(tl.int64)
    return tokens, (h * c.GROUP + o_r % c.GROUP).to(tl.int64), o_r < rows * c.GROUP


@triton.jit
def zero_padding(OUT, LSE, t, T, p, num_programs, so_t, so_h, sl_t, sl_h, c: tl.constexpr):
    """Query rows behind the last request: output 0, LSE −inf."""
    o_d = tl.arange(0, c.PARTS * c.BLOCK_DV)
    t += p
    while t < T:
        for i in range(c.HEADS * c.GROUP):
            head = tl.cast(i, tl.int64)
            p_out = OUT + t.to(tl.int64) * so_t + head * so_h + o_d
            tl.store(p_out, (o_d * 0).to(tl.float32).to(OUT.dtype.element_ty), mask=o_d < c.DV)
            if c.HAS_LSE:
                tl.store(LSE + t.to(tl.int64) * sl_t + head * sl_h, float("-inf"))
        t += num_programs
