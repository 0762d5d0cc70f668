"""MLA decode of few query rows, of 8 or 16 bits: the warpgroups that attend a share, and what they write."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..parts.ring import signal
from ..parts.schedule import finish, next_segment, note_pieces, output, pieces_from, row_places
from .eight_bits_tiles import attend_eight_bits, query_as_terms
from .records import State
from .sixteen_bits_tiles import BOX, BOXES, attend_sixteen_bits, query_by_boxes


class Bars(NamedTuple):
    """Of the ring: a tile has come, a place is free."""

    full: gl.shared_memory_descriptor  # a multiple of the places: tiles take them in turn
    free: gl.shared_memory_descriptor


class Hand(NamedTuple):
    """What warpgroups use besides; the last five only two of them that take turns."""

    probs: gl.shared_memory_descriptor  # of a tile
    flags: gl.shared_memory_descriptor  # votes of warps
    notes: gl.shared_memory_descriptor  # references and sums
    places: gl.shared_memory_descriptor  # half of the columns
    q_ready: tuple  # barriers of both: half of the query is there
    noted: tuple  # the notes are
    given: tuple  # the columns are


@gluon.jit
def exchange(state, hand, done, ME: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """(reference, sum) of both warpgroups' tiles, and the accumulators of this one's half of the columns."""
    m, acc, notes, places = state.m, state.acc, hand.notes, hand.places
    MINE: gl.constexpr = c.CHUNKS
    COLUMN: gl.constexpr = m.type.layout
    notes.index(ME).store(m)
    notes.index(2 + ME).store(gl.convert_layout(state.l, COLUMN))
    signal(hand.noted[ME].index(0))
    mbarrier.wait(hand.noted[1 - ME].index(0), done & 1)
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
        signal(hand.given[0].index(0))
    mbarrier.wait(hand.given[1 - ME].index(0), done & 1)
    for i in gl.static_range(MINE):
        out = out + (acc[ME * MINE + i] * factor[None, :] + places.index(i).load(O),)
    if ME == 1:
        for i in gl.static_range(MINE):
            places.index(i).store(acc[i] * factor[None, :])
        signal(hand.given[1].index(0))
    return State(top, l, out)


@gluon.jit
def store_chunks(OUT, acc, factor, tokens, heads, m_row, strides, ME: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """Write acc × factor to `out`: all columns, or the ME-th half."""
    CHUNKS: gl.constexpr = len(acc) // 2
    for i in gl.static_range(CHUNKS):
        o_w = (ME * CHUNKS + i) * c.CHUNK + gl.arange(0, c.CHUNK, gl.SliceLayout(1, O))
        for j in gl.static_range(2):
            p_out = OUT + (tokens * strides.out_t + heads * strides.out_h)[None, :] + (2 * o_w + j)[:, None]
            gl.store(p_out, output(acc[2 * i + j] * factor[None, :], OUT, c), mask=m_row[None, :])


@gluon.jit
def keep_chunks(PART, slot, state, m_row, ME: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """Write a cut segment's state, or its ME-th half, as the merge reads it: part 0's words, then part 1's, m and l."""
    CHUNKS: gl.constexpr = len(state.acc) // 2
    o_r = gl.arange(0, c.ROWS, gl.SliceLayout(0, O))
    p_row = PART + (slot.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
    for i in gl.static_range(CHUNKS):
        o_w = (ME * CHUNKS + i) * c.CHUNK + gl.arange(0, c.CHUNK, gl.SliceLayout(1, O))
        for j in gl.static_range(2):
            gl.store(p_row[None, :] + (j * c.BLOCK_DV + o_w)[:, None], state.acc[2 * i + j], mask=m_row[None, :])
    if ME == 0:
        gl.store(p_row + c.PART_COLUMNS - 2, state.m, mask=m_row)
        gl.store(p_row + c.PART_COLUMNS - 1, state.l, mask=m_row)


@gluon.jit
def store_boxes(OUT, acc, factor, tokens, heads, m_row, strides, O: gl.constexpr, c: gl.constexpr):
    """The same of 16-bit latents, whose columns are not taken apart."""
    for i in gl.static_range(BOXES):
        o_d = i * BOX + gl.arange(0, BOX, gl.SliceLayout(1, O))
        p_out = OUT + (tokens * strides.out_t + heads * strides.out_h)[None, :] + o_d[:, None]
        gl.store(p_out, output(acc[i] * factor[None, :], OUT, c), mask=m_row[None, :])


@gluon.jit
def keep_boxes(PART, slot, state, m_row, O: gl.constexpr, c: gl.constexpr):
    p_row = PART + (slot.to(gl.int64) * c.ROWS + gl.arange(0, c.ROWS, gl.SliceLayout(0, O))) * c.PART_COLUMNS
    for i in gl.static_range(BOXES):
        o_d = i * BOX + gl.arange(0, BOX, gl.SliceLayout(1, O))
        gl.store(p_row[None, :] + o_d[:, None], state.acc[i], mask=m_row[None, :])
    gl.store(p_row + c.PART_COLUMNS - 2, state.m, mask=m_row)
    gl.store(p_row + c.PART_COLUMNS - 1, state.l, mask=m_row)


@gluon.jit
def consume(tensors, q, rings, bars, hand, scales, share, strides, STAGES: gl.constexpr, ME: gl.constexpr,
            TURNS: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """Attend this warpgroup's tiles of the share, for one block of heads, and write its share of the columns."""
    EIGHT: gl.constexpr = rings.latents.dtype.primitive_bitwidth == 8
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    p, x, end, b, base = share.p, share.x, share.end, share.b, share.base
    h = p % c.HEADS
    k, done = 0, 0
    while x < end:
        segment = next_segment(tensors.LENS, tensors.CU, x, end, b, base, c)
        b, base = segment.b, segment.base
        if EIGHT:
            TERMS: gl.constexpr = q.latents.shape[1] // c.ROWS
            scale = scales.score * query_as_terms(tensors, q, segment, h, strides, ME, TURNS, TERMS, ROW, c)
        else:
            query_by_boxes(tensors, q.latents, segment, h, strides, c)
        if TURNS == 2:
            signal(hand.q_ready[ME].index(0))
            mbarrier.wait(hand.q_ready[1 - ME].index(0), done & 1)
        if EIGHT:
            state = attend_eight_bits(q, rings, bars, hand, scale, segment, k, ME, TURNS, TERMS, STAGES, S, c)
        else:
            state = attend_sixteen_bits(q.latents, rings, bars, hand, scales.score, segment, k, STAGES, S, c)
        if TURNS == 2:
            state = exchange(state, hand, done, ME, S, c)
        k += segment.t1 - segment.t0
        done += 1
        tokens, heads, m_row = row_places(segment.i, h, segment.q0, segment.rows, ROW, c)
        state = State(gl.convert_layout(state.m, ROW), gl.convert_layout(state.l, ROW), state.acc)
        if segment.t0 == 0:  # all warpgroups write the same
            pieces = pieces_from(segment, share.per, p // c.HEADS)
            note_pieces(tensors.META, b, segment.i, share.max_segments, p, pieces, c)
        if segment.t1 - segment.t0 == segment.tiles:
            factor, lse = finish(state.m, state.l, scales.value)
            if EIGHT:
                store_chunks(tensors.OUT, state.acc, factor, tokens, heads, m_row, strides, ME, S, c)
            else:
                store_boxes(tensors.OUT, state.acc, factor, tokens, heads, m_row, strides, S, c)
            if c.HAS_LSE and ME == 0:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            slot = 2 * p + (segment.t0 == 0).to(gl.int32)
            if EIGHT:
                keep_chunks(tensors.PART, slot, state, m_row, ME, S, c)
            else:
                keep_boxes(tensors.PART, slot, state, m_row, S, c)
        x += segment.t1 - segment.t0
