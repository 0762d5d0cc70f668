"""The merge of cut segments inside decode's split pass: by whoever is the last to deliver a piece.

Many pieces are merged in two steps: FAN neighbours each, then what that gave. Always in the same order, whoever does
it: equal calls give equal bits. Counters lie behind the states in the same scratch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.arrivals import arrive, look, reset
from ..parts.schedule import output
from .work import finish, per_head

FAN = gl.constexpr(16)  # pieces that one program merges in one go


@gluon.constexpr_function
def joining(g, c, warps):
    """Layout of [rows, columns]: a warp has rows, a thread four columns side by side."""
    lanes = min(32, c.PARTS * c.BLOCK_DV // 4)
    return gl.BlockedLayout([1, 4], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def fan_of(pieces):
    """How many neighbours are merged first."""
    fan = pieces
    if pieces > FAN:
        fan = gl.where(pieces <= 10 * FAN, FAN, 4 * FAN)
    return fan


@gluon.jit
def counter_of(PART, step, lead, first, c: gl.constexpr, g: gl.constexpr):
    """The counter of those pieces that are merged with the one of share `lead`, in the first or second step."""
    num_shares, group = gl.num_programs(0) // g.GROUPS, gl.program_id(0) % g.GROUPS
    COUNTERS = (PART + 2 * num_shares * c.HEADS * c.ROWS * c.PART_COLUMNS).to(gl.pointer_type(gl.int64))
    return COUNTERS + (2 * (step * num_shares + lead) + gl.where(lead == first, 1, 0)) * g.GROUPS + group


@gluon.jit
def look_at(PART, cut, c: gl.constexpr, g: gl.constexpr):
    """What the counter holds that `join` will need."""
    fan = fan_of(cut.pieces)
    return look(counter_of(PART, 0, cut.first + (cut.i_share - cut.first) // fan * fan, cut.first, c, g))


@gluon.jit
def load_piece(p_row, o_d, c: gl.constexpr):
    """(maximum, sum, accumulator) of a piece."""
    m = gl.load(p_row + c.PART_COLUMNS - 2, cache_modifier=".cg")
    l = gl.load(p_row + c.PART_COLUMNS - 1, cache_modifier=".cg")
    return m, l, gl.load(p_row[:, None] + o_d[None, :], cache_modifier=".cg")


@gluon.jit
def load_pieces(p_row, o_d, i, count, pitch, c: gl.constexpr, g: gl.constexpr):
    """Pieces i, i + 1, …; behind the last one that one again."""
    out = ()
    for j in gl.static_range(gl.constexpr(g.JOIN_PIECES)):
        out = out + (load_piece(p_row + gl.minimum(i + j, count - 1).to(gl.int64) * pitch, o_d, c),)
    return out


@gluon.jit
def add_pieces(PART, lead, first, step, count, j, h0, c: gl.constexpr, g: gl.constexpr):
    """(maximum, sum, accumulator of the j-th columns) of `count` pieces: those of shares lead, lead + step, …"""
    L: gl.constexpr = joining(g, c, gl.num_warps())
    o_e = gl.arange(0, g.HB * g.JOIN_ROWS, gl.SliceLayout(1, L))
    o_d = j * g.JOIN_COLUMNS + gl.arange(0, g.JOIN_COLUMNS, gl.SliceLayout(0, L))
    slots = 2 * (lead * c.HEADS + h0 + o_e // g.JOIN_ROWS)
    p_row = PART + (slots.to(gl.int64) * c.ROWS + o_e % g.JOIN_ROWS) * c.PART_COLUMNS
    pitch = step.to(gl.int64) * (2 * c.HEADS * c.ROWS * c.PART_COLUMNS)
    m, l, acc = load_piece(p_row + gl.where(lead == first, c.ROWS * c.PART_COLUMNS, 0), o_d, c)
    pieces = load_pieces(p_row, o_d, 1, count, pitch, c, g)
    for i in range(1, count, g.JOIN_PIECES):
        following = load_pieces(p_row, o_d, i + g.JOIN_PIECES, count, pitch, c, g)
        m_new = m
        for n in gl.static_range(gl.constexpr(g.JOIN_PIECES)):
            m_new = gl.maximum(m_new, gl.where(i + n < count, pieces[n][0], float("-inf")))
        base = gl.where(m_new == float("-inf"), 0.0, m_new)
        old = gl.exp2(m - base)
        l, acc = l * old, acc * old[:, None]
        for n in gl.static_range(gl.constexpr(g.JOIN_PIECES)):
            weight = gl.where(i + n < count, gl.exp2(pieces[n][0] - base), 0.0)
            l += pieces[n][1] * weight
            acc += pieces[n][2] * weight[:, None]
        m, pieces = m_new, following
    return m, l, acc


@gluon.jit
def store_joined(PART, lead, first, m, l, acc, j, h0, rows_left, c: gl.constexpr, g: gl.constexpr):
    """What a first step gave goes where its first piece was."""
    L: gl.constexpr = acc.type.layout
    o_e = gl.arange(0, g.HB * g.JOIN_ROWS, gl.SliceLayout(1, L))
    o_d = j * g.JOIN_COLUMNS + gl.arange(0, g.JOIN_COLUMNS, gl.SliceLayout(0, L))
    r = o_e % g.JOIN_ROWS
    slots = 2 * (lead * c.HEADS + h0 + o_e // g.JOIN_ROWS) + gl.where(lead == first, 1, 0)
    p_part = PART + (slots.to(gl.int64) * c.ROWS + r) * c.PART_COLUMNS
    thread_barrier()  # all have read it
    gl.store(p_part[:, None] + o_d[None, :], acc, mask=(r < rows_left)[:, None])
    if j == c.PARTS * c.BLOCK_DV // g.JOIN_COLUMNS - 1:
        gl.store(p_part + c.PART_COLUMNS - 2, m, mask=r < rows_left)
        gl.store(p_part + c.PART_COLUMNS - 1, l, mask=r < rows_left)


@gluon.jit
def write_joined(tensors, scales, strides, m, l, acc, j, h0, q0, r0, rows_left, c: gl.constexpr,
                 g: gl.constexpr):  # fmt: skip
    """The j-th columns of finished rows."""
    OUT, LSE = tensors.OUT, tensors.LSE
    L: gl.constexpr = acc.type.layout
    o_e = gl.arange(0, g.HB * g.JOIN_ROWS, gl.SliceLayout(1, L))
    o_d = j * g.JOIN_COLUMNS + gl.arange(0, g.JOIN_COLUMNS, gl.SliceLayout(0, L))
    h, r = h0 + o_e // g.JOIN_ROWS, o_e % g.JOIN_ROWS
    m_row, row = r < rows_left, r0 + r
    heads = (h * c.GROUP + row % c.GROUP).to(gl.int64)
    at = (q0 + row // c.GROUP).to(gl.int64)
    value_factor = per_head(scales.v, scales.V_T, h, c.V_T, c.V_T_STRIDE) * (scales.out * c.V_FACTOR)
    factor, lse = finish(m, l, value_factor, tensors.SINKS, heads, m_row, c)
    word = o_d % c.BLOCK_DV
    p_row = OUT + at * strides.out_t + heads * strides.out_h
    p_out = p_row[:, None] + (c.PARTS * word + o_d // c.BLOCK_DV)[None, :]
    gl.store(p_out, output(acc * factor[:, None], OUT, c), mask=m_row[:, None] & (word < c.DV // c.PARTS)[None, :])
    if c.HAS_LSE:
        gl.store(LSE + at * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)


@gluon.jit
def join(tensors, scales, strides, cut, seen, h0, segment, c: gl.constexpr, g: gl.constexpr):
    """This program's piece of a segment is in its slot; whoever delivers the last one merges them.

    seen: by `look_at`
    """
    PART, first, pieces, r0 = tensors.PART, cut.first, cut.pieces, segment.i * c.ROWS
    rows_left = segment.rows * c.GROUP - r0
    fan = fan_of(pieces)
    lead = first + (cut.i_share - first) // fan * fan
    step, count = gl.minimum(fan, 1), gl.minimum(fan, first + pieces - lead)
    counter = counter_of(PART, 0, lead, first, c, g)
    last = arrive(counter, seen) == count - 1
    while last:
        reset(counter)
        whole = step * count >= pieces
        counter = counter_of(PART, 1, first, first, c, g)
        if not whole:
            seen = look(counter)
        for j in gl.static_range(gl.constexpr(c.PARTS * c.BLOCK_DV // g.JOIN_COLUMNS)):
            m, l, acc = add_pieces(PART, lead, first, step, count, j, h0, c, g)
            if whole:
                write_joined(tensors, scales, strides, m, l, acc, j, h0, segment.q0, r0, rows_left, c, g)
            else:
                store_joined(PART, lead, first, m, l, acc, j, h0, rows_left, c, g)
        last = not whole
        if last:
            step, lead = fan, first
            count = (pieces + fan - 1) // fan
            last = arrive(counter, seen) == count - 1
