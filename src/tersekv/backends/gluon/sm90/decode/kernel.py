"""The split pass of paged decode on Hopper; `join` merges what it cuts, or `merge` in a second launch.

A program has HB × RB warps and attends HB KV heads, RB warps each, over a share of tiles (`work`). Tiles come
by tensor copies through a ring of stages (`parts/ring`, `fetch`), all heads of a tile at once, stored scales with
them; a query of few rows comes ahead with the first tile of its segment (`query`). Warps meet only where a stage
is given back; products run on mma.sync, whose operands a warp has for itself (`attend`, `attend_rows`,
`tiles`). With many query rows a program has one head, whose rows share what is converted (`shared_tiles`). The
scratch of a share: two slots per head, for the cut segment it begins with (even) and for the one it ends with (odd);
and META: of each segment, how many programs share it and which is the first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.ring import acquire, launch_dependents, make_barriers, release, wait_for_previous
from ..parts.schedule import (
    LOG2E,
    meta_of,
    output,
    pieces_from,
    request_at,
    request_tiles,
    scalar,
    segment_at,
    zero_padding,
)
from . import shared_tiles as wide
from .attend import attend_tile, empty_state
from .attend_rows import attend_rows, empty_rows, ended
from .fetch import advance, cursor_at, fetch, make_rings, scale_sets
from .join import join, look_at
from .query import arrived_query, fetch_query, loaded_query, make_queries
from .records import Boxes, Cut, Scales, SeenBy, Strides, Tables, Tensors
from .rows import store_rows_of_head, store_state_of_head
from .seen import whole_tiles
from .tiles import begin_of, mma_layout
from .turns import keep_turns, load_turns, make_turns, turned_back
from .work import finish, per_head, share_of


@gluon.jit
def heads_of(h0, LAYOUT: gl.constexpr, g: gl.constexpr):
    return h0 + gl.arange(0, g.HB, LAYOUT)


@gluon.jit
def store_state_of_heads(PART, slot, state, h0, rows_left, c: gl.constexpr, g: gl.constexpr):
    """Write cut segments' states: slot + 2 h, [ROWS, PARTS × BLOCK_DV + 2] fp32, the last two columns m and l."""
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    HN: gl.constexpr = gl.SliceLayout(1, MMA)
    o_r = gl.arange(0, c.ROWS, gl.SliceLayout(0, HN))
    slots = slot + 2 * gl.arange(0, g.HB, gl.SliceLayout(1, HN)).to(gl.int64)
    p_row = PART + (slots[:, None] * c.ROWS + o_r[None, :]) * c.PART_COLUMNS
    m_row = (o_r < rows_left)[None, :] & (slots >= 0)[:, None]
    o_d = columns_of_values(h0, c, g)
    if g.V.WINDOWS > 1:
        o_d = o_d & (c.BLOCK_DV - 1)  # what is not the head's own goes behind what is
    for j in gl.static_range(gl.constexpr(c.PARTS)):
        gl.store(p_row[:, None, :] + j * c.BLOCK_DV + o_d, state.acc[j], mask=m_row[:, None, :])
    gl.store(p_row + c.PART_COLUMNS - 2, state.m, mask=m_row)
    gl.store(p_row + c.PART_COLUMNS - 1, state.l, mask=m_row)


@gluon.jit
def columns_of_values(h0, c: gl.constexpr, g: gl.constexpr):
    """Units of `out`'s rows that accumulators hold: [HB or 1, WORDS_V, 1]."""
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    WORDS: gl.constexpr = gl.SliceLayout(2, MMA)
    o_d = gl.arange(0, c.WORDS_V, gl.SliceLayout(0, WORDS))[None, :, None]
    if g.V.WINDOWS > 1:
        o_d = o_d - begin_of(heads_of(h0, gl.SliceLayout(1, gl.SliceLayout(2, MMA)), g), True, g)[:, None, None]
    return o_d


@gluon.jit
def in_rows(m_row, o_d, c: gl.constexpr, g: gl.constexpr):
    """Words of rows that are there: a value's in `out` may be shorter than in shared memory."""
    mask = m_row[:, None, :]
    if c.DV < c.PARTS * c.WORDS_V:
        mask = mask & (o_d < c.DV // c.PARTS)
    if g.V.WINDOWS > 1:
        mask = mask & (o_d >= 0)
    return mask


@gluon.jit
def store_rows_of_heads(tensors, strides, state, h_scale, h0, segment, c: gl.constexpr, g: gl.constexpr):
    """Write finished rows to `out`, and their LSE."""
    OUT, LSE = tensors.OUT, tensors.LSE
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    HN: gl.constexpr = gl.SliceLayout(1, MMA)
    o_r = segment.i * c.ROWS + gl.arange(0, c.ROWS, gl.SliceLayout(0, HN))
    h = heads_of(h0, gl.SliceLayout(1, HN), g)
    heads = (h[:, None] * c.GROUP + (o_r % c.GROUP)[None, :]).to(gl.int64)
    at = (segment.q0 + o_r // c.GROUP).to(gl.int64)[None, :]
    m_row = (o_r < segment.rows * c.GROUP)[None, :] & (h >= 0)[:, None]
    factor, lse = finish(state.m, state.l, h_scale[:, None] * c.V_FACTOR, tensors.SINKS, heads, m_row, c)
    o_d = columns_of_values(h0, c, g)
    p_out = (OUT + at * strides.out_t + heads * strides.out_h)[:, None, :] + c.PARTS * o_d
    for j in gl.static_range(gl.constexpr(c.PARTS)):
        gl.store(
            p_out + j,
            output(state.acc[j] * factor[:, None, :], OUT, c),
            mask=in_rows(m_row, o_d, c, g),
        )
    if c.HAS_LSE:
        gl.store(LSE + at * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)


@gluon.jit
def meta_at(META, segment, group, g: gl.constexpr):
    """Where META tells of a segment."""
    return META + ((segment.b * g.SEGMENTS + segment.i) * g.GROUPS + group) * 2


@gluon.jit
def note_cut(p_meta, pieces, i_share):
    """Tell the merge of a segment that begins in share i_share."""
    gl.store(p_meta, pieces)
    gl.store(p_meta + 1, i_share)


@gluon.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_kernel(
    Q, K, V, KS, VS, TABLE, LENS, CU, MASK, SINKS, OUT, LSE, PART, K_SIGNS, V_SIGNS, K_CHANNELS, V_CHANNELS,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, sq_t, sq_h, st_b, sm_t, so_t, so_h, sl_t, sl_h, c: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for HB heads. See the module's docstring."""
    p = gl.program_id(0)
    i_share, num_shares = p // g.GROUPS, gl.num_programs(0) // g.GROUPS
    h0 = p % g.GROUPS * g.HB
    tensors = Tensors(Q, LENS, CU, MASK, SINKS, OUT, LSE, PART, meta_of(PART, num_shares * c.HEADS, c))
    strides = Strides(sq_t, sq_h, sm_t, so_t, so_h, sl_t, sl_h)
    tables, boxes = Tables(TABLE, LENS, CU, st_b), Boxes(K, V, KS, VS)
    SETS: gl.constexpr = 2 + scale_sets(g)
    full = make_barriers(SETS, g.STAGES)
    rings = make_rings(g)
    turns = make_turns(rings.k[0], c, g)
    if g.QUERIES > 0:
        queries = make_queries(Q, c, g)
    if g.WIDE:
        buffers = wide.make_buffers(c, g)
    wait_for_previous()
    if g.JOIN_ROWS > 0:
        launch_dependents()
    if c.RAGGED:
        zero_padding(
            OUT, LSE, gl.load(CU + B).to(gl.int32), T, p, gl.num_programs(0), so_t, so_h, sl_t, sl_h, c,
        )  # fmt: skip
    factors = load_turns((K_SIGNS, V_SIGNS), (K_CHANNELS, V_CHANNELS), h0, c, g)
    share = share_of(LENS, CU, B, i_share, num_shares, p % g.GROUPS, c)
    x, end, b, base = share.x, share.end, share.b, share.base
    keep_turns(turns, factors)
    if g.K.TURN.ANY or g.V.TURN.ANY:
        thread_barrier()
    if x < end:
        cursor = cursor_at(tables, share, c, g)
        asked, used = 0, 0
        for ahead in gl.static_range(gl.constexpr(g.STAGES if g.WIDE else g.STAGES - 1)):
            if g.QUERIES > 0:
                asked = fetch_query(tensors, strides, queries, asked, cursor, end, h0, ahead == 0, c, g)
            fetch(cursor, ahead, full, boxes, rings, h0, end, c, g)
            cursor = advance(cursor, tables, end, c, g)
        if g.WIDE:
            h = h0
        else:
            h = heads_of(h0, gl.SliceLayout(1, gl.SliceLayout(1, mma_layout(g.HB, g.RB))), g)
        score_scale = scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E
        scales = Scales(
            score_scale, k_scale, K_T, v_scale, V_T, scalar(out_scale, OUT_T, c.OUT_T), softcap
        )  # fmt: skip
        k_scales = scales.score * per_head(k_scale, K_T, h, c.K_T, c.K_T_STRIDE)
        h_scale = per_head(v_scale, V_T, h, c.V_T, c.V_T_STRIDE) * scales.out
        request = request_tiles(LENS, CU, b, True, c)
        turn = 0
        while x < end:
            b, base, request = request_at(LENS, CU, x, b, base, request, c)
            segment = segment_at(x, end, b, base, request)
            r0 = segment.i * c.ROWS
            seen_by = SeenBy(segment.keys, segment.rows, r0, segment.q0, MASK, sm_t)
            u0, u1 = whole_tiles(request, c)
            if g.JOIN_ROWS > 0:
                first_share = (base + segment.i * segment.tiles) // share.per
                cut = Cut(i_share, first_share, pieces_from(segment, share.per, first_share))
                seen = look_at(PART, cut, c, g)
            if g.WIDE:
                scale = k_scales * wide.query_to_shared(tensors, strides, turns, segment, h0, buffers.q, c, g)
                state, cursor, turn = wide.attend_segment(
                    scale, softcap, cursor, turn, full, rings, boxes, tables, buffers, b, h0,
                    request.first + segment.t0, request.first + segment.t1, u0, u1, seen_by, end, c, g,
                )  # fmt: skip
            else:
                if g.QUERIES > 0:
                    q, factor = arrived_query(queries, turns, used, c, g)
                    used += 1
                else:
                    q, factor = loaded_query(tensors, strides, turns, segment, h0, c, g)
                scale = k_scales[:, None] * factor
                attend: gl.constexpr = attend_rows if c.ROWS > 16 else attend_tile
                sums = empty_rows(c, g) if c.ROWS > 16 else empty_state(c, g)
                for t in range(request.first + segment.t0, request.first + segment.t1):
                    acquire(full, turn, SETS, g.STAGES)
                    release()
                    if g.QUERIES > 0:
                        asked = fetch_query(tensors, strides, queries, asked, cursor, end, h0, False, c, g)
                    fetch(cursor, turn + g.STAGES - 1, full, boxes, rings, h0, end, c, g)
                    cursor = advance(cursor, tables, end, c, g)
                    if (t >= u0) & (t < u1):
                        sums = attend(sums, rings, turn % g.STAGES, q, scale, softcap, t, seen_by, False, c, g)
                    else:
                        sums = attend(sums, rings, turn % g.STAGES, q, scale, softcap, t, seen_by, True, c, g)
                    turn += 1
                state = ended(sums, c, g)
            if g.V.TURN.ANY:
                state = turned_back(state, turns, c, g)
            whole = segment.t1 - segment.t0 == segment.tiles
            if (g.JOIN_ROWS == 0) & (segment.t0 == 0):
                p_meta = meta_at(tensors.META, segment, share.group, g)
                note_cut(p_meta, pieces_from(segment, share.per, i_share), i_share)
            slot = 2 * (i_share * c.HEADS + h0) + gl.where(segment.t0 == 0, 1, 0)
            if g.WIDE:
                ROW: gl.constexpr = state.m.type.layout
                if whole:
                    o_r = r0 + gl.arange(0, c.ROWS, ROW)
                    store_rows_of_head(tensors, strides, state, h_scale, h0, segment, o_r, c)
                else:
                    o_r = gl.arange(0, c.ROWS, ROW)
                    store_state_of_head(PART, slot, state, o_r, segment.rows * c.GROUP - r0, c)
            elif whole:
                store_rows_of_heads(tensors, strides, state, h_scale, h0, segment, c, g)
            else:
                store_state_of_heads(PART, slot, state, h0, segment.rows * c.GROUP - r0, c, g)
                if g.JOIN_ROWS > 0:
                    join(tensors, scales, strides, cut, seen, h0, segment, c, g)
            x += segment.t1 - segment.t0
    if g.JOIN_ROWS == 0:
        launch_dependents()
