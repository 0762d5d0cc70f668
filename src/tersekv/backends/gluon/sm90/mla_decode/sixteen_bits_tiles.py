"""Tiles of 16-bit latents in MLA decode for few query rows (sixteen_bits.py): the query, scores, softmax and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import thread_barrier
from ..parts.schedule import row_places
from .eight_bits_tiles import any_higher, fold, raise_reference
from .records import State

BOX = gl.constexpr(64)  # columns of a TMA box
BOXES = gl.constexpr(8)  # of a tile
SLACK = gl.constexpr(16.0)  # probabilities are at most 2^SLACK before they are normalised


@gluon.jit
def query_by_boxes(tensors, q, segment, h, strides, c: gl.constexpr):
    """Put the query into shared memory, by boxes of columns; the last is the rotary part."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = row_places(segment.i, h, segment.q0, segment.rows, gl.SliceLayout(1, L), c)
    o_d = gl.arange(0, BOX, gl.SliceLayout(0, L))
    p_c = (tensors.QN + tokens * strides.qn_t + heads * strides.qn_h)[:, None] + o_d[None, :]
    p_r = (tensors.QP + tokens * strides.qp_t + heads * strides.qp_h)[:, None] + o_d[None, :]
    pieces = ()  # all loads are under way before the first is used
    for i in gl.static_range(BOXES):
        pieces = pieces + (gl.load(p_c + i * BOX, mask=m_row[:, None], other=0.0),)
    pieces = pieces + (gl.load(p_r, mask=m_row[:, None], other=0.0),)
    for i in gl.static_range(BOXES + 1):
        q.index(i).store(pieces[i].to(gl.float32).to(q.dtype))
    fence_async_shared()


@gluon.jit
def drop_stale(ring_c, slot, keys, c: gl.constexpr):
    """Rows behind the tile's last key become 0: a probability of 0 does not hide a NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    real = gl.arange(0, c.TILE, gl.SliceLayout(1, L)) < keys
    for i in range(BOXES):  # not unrolled: it is rare, and the loop around it should stay small
        place = ring_c.index(slot * BOXES + i)
        x = place.load(L)
        place.store(gl.where(real[:, None], x, gl.full([c.TILE, BOX], 0.0, x.dtype, L)))
    fence_async_shared()
    thread_barrier()  # here, or the compiler puts one behind the branch


@gluon.jit
def scores(q, rings, slot, here, S: gl.constexpr, c: gl.constexpr):
    """Products of a tile's keys and the query rows: fp32 [TILE, ROWS]."""
    ring_c, ring_p = rings.latents, rings.rotary
    SUMS: gl.constexpr = 3 if c.ROWS <= 16 else 2  # so that products wait less for each other
    zero = gl.full([c.TILE, c.ROWS], 0.0, gl.float32, S)
    rotary = q.index(here + BOXES).permute((1, 0))
    sums = (warpgroup_mma(ring_p.index(slot), rotary, zero, use_acc=False, is_async=True),)
    for i in gl.static_range(BOXES):
        keys, q_i = ring_c.index(slot * BOXES + i), q.index(here + i).permute((1, 0))
        if i < SUMS - 1:
            sums = sums + (warpgroup_mma(keys, q_i, zero, use_acc=False, is_async=True),)
        else:
            sums = sums[1:] + (warpgroup_mma(keys, q_i, sums[0], is_async=True),)
    sums = warpgroup_mma_wait(0, sums)
    s = sums[0]
    for i in gl.static_range(SUMS - 1):
        s += sums[i + 1]
    return s


@gluon.jit
def add_values(acc, ring_c, slot, probs):
    """acc + the tile's values, transposed, times the probabilities [TILE, ROWS]."""
    out = ()
    for i in gl.static_range(BOXES):
        out = out + (warpgroup_mma(ring_c.index(slot * BOXES + i).permute((1, 0)), probs, acc[i], is_async=True),)
    return warpgroup_mma_wait(0, out)


@gluon.jit
def attend_sixteen_bits(q, rings, bars, hand, scale, segment, k, STAGES: gl.constexpr, S: gl.constexpr,
                        c: gl.constexpr):  # fmt: skip
    """Attend the tiles of a segment: running maximum [ROWS], sum [ROWS], accumulators.

    As `attend_eight_bits`, but for what a tile's numbers need on their way: there chunks of two columns a word, with
    scales of their own and products in fp16; here boxes of columns, as they are.
    """
    t0, t1, n, rows, r0 = segment.t0, segment.t1, segment.keys, segment.rows, segment.i * c.ROWS
    probs, flags = hand.probs, hand.flags
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    full, free = bars.full, bars.free
    m = gl.full([c.ROWS], float("-inf"), gl.float32, COLUMN)
    l = fold(gl.full([c.TILE, c.ROWS], 0.0, gl.float32, S))  # summed over all keys only at the end
    acc = ()
    for _ in gl.static_range(BOXES):
        acc = acc + (gl.full([BOX, c.ROWS], 0.0, gl.float32, S),)
    o_k = gl.arange(0, c.TILE, gl.SliceLayout(1, S))
    position = n - rows + (r0 + gl.arange(0, c.ROWS, COLUMN)) // c.GROUP
    for t in range(t0, t1):
        turn = k + t - t0
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        if (t + 1) * c.TILE > n:
            drop_stale(rings.latents, slot, n - t * c.TILE, c)
        # NOTE: `here` is 0. A constant would make the compiler keep, and spill, the descriptor of every piece of q.
        here = t >> 30
        s = scores(q, rings, slot, here, S, c) * scale
        if (t + 1) * c.TILE > n - rows + 1:
            o_n = t * c.TILE + o_k
            s = gl.where((o_n < n)[:, None] & (o_n[:, None] <= position[None, :]), s, float("-inf"))
        # The reference of a row's exponents is raised only where powers would pass 2^SLACK: rarely.
        if any_higher(s, m + SLACK, flags, 0):
            m, l, acc = raise_reference(gl.maximum(m, gl.max(s, 0)), m, l, acc, S)
        p = gl.exp2(s - gl.where(m == float("-inf"), 0.0, m)[None, :])
        l += fold(p)
        probs.index(here).store(p.to(probs.dtype))
        fence_async_shared()
        acc = add_values(acc, rings.latents, slot, probs.index(here))
        mbarrier.arrive(free.index(slot))
    return State(m, gl.sum(gl.sum(l, 1), 0), acc)
