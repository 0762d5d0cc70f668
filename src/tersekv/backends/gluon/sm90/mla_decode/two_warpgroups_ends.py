"""How a warpgroup of `two_warpgroups` reads its half of a query, and writes its half of the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...versions import reinterpret
from ..parts.schedule import output, row_places

BOX = gl.constexpr(64)  # columns of a box of the query
AT_ONCE = gl.constexpr(16)  # rows of the output


@gluon.jit
def query_half(tensors, q, sign, segment, h, strides, ME: gl.constexpr, c: gl.constexpr):
    """Put half of the query's columns into shared memory, times `sign`; the rotary part is the right warpgroup's."""
    q_c, q_p = q
    half = q_c.index(ME)
    BOXES: gl.constexpr = half.shape[0] // c.ROWS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = row_places(segment.i, h, segment.q0, segment.rows, gl.SliceLayout(1, L), c)
    o_d = gl.arange(0, BOX, gl.SliceLayout(0, L))
    p_c = (tensors.QN + tokens * strides.qn_t + heads * strides.qn_h)[:, None] + (ME * BOXES * BOX + o_d)[None, :]
    pieces = ()  # all loads are under way before the first is used
    for i in gl.static_range(BOXES):
        pieces = pieces + (gl.load(p_c + i * BOX, mask=m_row[:, None], other=0.0),)
    if ME == 1:
        p_p = (tensors.QP + tokens * strides.qp_t + heads * strides.qp_h)[:, None] + o_d[None, :]
        rotary = gl.load(p_p, mask=m_row[:, None], other=0.0)
        q_p.index(0).store((rotary.to(gl.float32) * sign).to(q_p.dtype))
    for i in gl.static_range(BOXES):
        half.slice(i * c.ROWS, c.ROWS).store((pieces[i].to(gl.float32) * sign).to(q_c.dtype))
    fence_async_shared()


@gluon.jit
def place_of(o_q, h, q0, c: gl.constexpr):
    """(tokens, query heads) of query rows of a block of heads."""
    return (q0 + o_q // c.GROUP).to(gl.int64), (h * c.GROUP + o_q % c.GROUP).to(gl.int64)


@gluon.jit
def store_half(state, factor, lse, q_c, tensors, whole, slot, segment, h, strides, ME: gl.constexpr,
               c: gl.constexpr):  # fmt: skip
    """Write a segment's columns of this warpgroup, or its state to a scratch slot if there is more of the segment.

    They go through the half of the query that this warpgroup read, so that whole rows are written: 5 µs less.
    """
    OUT, PART, q0, rows = tensors.OUT, tensors.PART, segment.q0, segment.rows
    COUNT: gl.constexpr = 2  # pieces, of as many bytes as half of the query
    COLUMNS: gl.constexpr = c.DV // 2 // COUNT
    accs = gl.split(gl.permute(gl.reshape(state.acc, [c.ROWS, COUNT, COLUMNS]), (0, 2, 1)))
    factor = gl.convert_layout(gl.where(whole, factor, 1.0), gl.SliceLayout(1, accs[0].type.layout))
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 16, [1, 0])
    stage = reinterpret(q_c.index(ME), gl.float32, [c.ROWS, COLUMNS], SWIZZLED)
    stages = reinterpret(q_c.index(ME), gl.float32, [c.ROWS // AT_ONCE, AT_ONCE, COLUMNS], SWIZZLED)
    live = gl.minimum(rows * c.GROUP - segment.i * c.ROWS, c.ROWS)
    for i in gl.static_range(COUNT):
        stage.store(accs[i] * factor[:, None])
        o_d = (ME * COUNT + i) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, W))
        for j in range((live + AT_ONCE - 1) // AT_ONCE):
            y = stages.index(j).load(W)
            o_r = j * AT_ONCE + gl.arange(0, AT_ONCE, gl.SliceLayout(1, W))
            mask = (o_r < live)[:, None]
            if whole:
                tokens, heads = place_of(segment.i * c.ROWS + o_r, h, q0, c)
                p_out = (OUT + tokens * strides.out_t + heads * strides.out_h)[:, None] + o_d[None, :]
                gl.store(p_out, output(y, OUT, c), mask=mask)
            else:
                p_row = PART + (slot.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
                gl.store(p_row[:, None] + o_d[None, :], y, mask=mask)
    if ME == 0:
        ROW: gl.constexpr = state.m.type.layout
        tokens, heads, m_row = row_places(segment.i, h, q0, rows, ROW, c)
        if whole:
            if c.HAS_LSE:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            p_row = PART + (slot.to(gl.int64) * c.ROWS + gl.arange(0, c.ROWS, ROW)) * c.PART_COLUMNS
            gl.store(p_row + c.PART_COLUMNS - 2, state.m, mask=m_row)
            gl.store(p_row + c.PART_COLUMNS - 1, state.l, mask=m_row)
