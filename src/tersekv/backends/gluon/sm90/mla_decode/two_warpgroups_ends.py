"""How a warpgroup of the paired MLA decode reads its half of a query, and writes its half of the output."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...versions import reinterpret
from ..parts.schedule import output, row_places

BOX = gl.constexpr(64)  # columns of a box of the query
AT_ONCE = gl.constexpr(16)  # rows of the output


@gluon.jit
def load_query(QN, QP, q, sign, segment, h, q0, rows, strides, ME: gl.constexpr, c: gl.constexpr):
    """Put half of the query's columns into shared memory, times `sign`; the rotary part is the right warpgroup's."""
    q_c, q_p = q
    sn_t, sn_h, sr_t, sr_h, _, _, _, _ = strides
    half = q_c.index(ME)
    BOXES: gl.constexpr = half.shape[0] // c.ROWS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = row_places(segment, h, q0, rows, gl.SliceLayout(1, L), c)
    o_d = gl.arange(0, BOX, gl.SliceLayout(0, L))
    p_c = (QN + tokens * sn_t + heads * sn_h)[:, None] + (ME * BOXES * BOX + o_d)[None, :]
    pieces = ()  # all loads are under way before the first is used
    for i in gl.static_range(BOXES):
        pieces = pieces + (gl.load(p_c + i * BOX, mask=m_row[:, None], other=0.0),)
    if ME == 1:
        p_p = (QP + tokens * sr_t + heads * sr_h)[:, None] + o_d[None, :]
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
def store_output(acc, state, q_c, OUT, LSE, PART, whole, slot, segment, h, q0, rows, strides, ME: gl.constexpr,
                 c: gl.constexpr):  # fmt: skip
    """Write a segment's columns of this warpgroup, or its state to a scratch slot if there is more of the segment.

    They go through the half of the query that this warpgroup read, so that whole rows are written: 5 µs less.
    """
    m, l, factor, lse = state
    _, _, _, _, so_t, so_h, sl_t, sl_h = strides
    COUNT: gl.constexpr = 2  # pieces, of as many bytes as half of the query
    COLUMNS: gl.constexpr = c.DV // 2 // COUNT
    accs = gl.split(gl.permute(gl.reshape(acc, [c.ROWS, COUNT, COLUMNS]), (0, 2, 1)))
    factor = gl.convert_layout(gl.where(whole, factor, 1.0), gl.SliceLayout(1, accs[0].type.layout))
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    SWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 16, [1, 0])
    stage = reinterpret(q_c.index(ME), gl.float32, [c.ROWS, COLUMNS], SWIZZLED)
    stages = reinterpret(q_c.index(ME), gl.float32, [c.ROWS // AT_ONCE, AT_ONCE, COLUMNS], SWIZZLED)
    live = gl.minimum(rows * c.GROUP - segment * c.ROWS, c.ROWS)
    for i in gl.static_range(COUNT):
        stage.store(accs[i] * factor[:, None])
        o_d = (ME * COUNT + i) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, W))
        for j in range((live + AT_ONCE - 1) // AT_ONCE):
            y = stages.index(j).load(W)
            o_r = j * AT_ONCE + gl.arange(0, AT_ONCE, gl.SliceLayout(1, W))
            mask = (o_r < live)[:, None]
            if whole:
                tokens, heads = place_of(segment * c.ROWS + o_r, h, q0, c)
                p_out = (OUT + tokens * so_t + heads * so_h)[:, None] + o_d[None, :]
                gl.store(p_out, output(y, OUT, c), mask=mask)
            else:
                p_row = PART + (slot.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
                gl.store(p_row[:, None] + o_d[None, :], y, mask=mask)
    if ME == 0:
        ROW: gl.constexpr = m.type.layout
        tokens, heads, m_row = row_places(segment, h, q0, rows, ROW, c)
        if whole:
            if c.HAS_LSE:
                gl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)
        else:
            p_row = PART + (slot.to(gl.int64) * c.ROWS + gl.arange(0, c.ROWS, ROW)) * c.PART_COLUMNS
            gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
            gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)
