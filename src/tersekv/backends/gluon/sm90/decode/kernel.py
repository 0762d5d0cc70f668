"""The split pass of paged decode on Hopper; `join` merges what it cuts, or `merge` in a second launch.

A program has HB × RB warps and attends HB KV heads, RB warps each, over a share of tiles (`work`). Tiles come
by tensor copies through a ring of stages (`parts/ring`, `fetch`), all heads of a tile at once, stored scales with
them; a query of few rows comes ahead with the first tile of its segment (`decode_query`). Warps meet only where a stage
is given back; products run on mma.sync, whose operands a warp has for itself (`attend`, `attend_rows`,
`tiles`). With many query rows a program has one head, whose rows share what is converted (`shared_tiles`). The
scratch of a share: two slots per head, for the cut segment it begins with (even) and for the one it ends with (odd);
and META: of each segment, how many programs share it and which is the first.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.ring import acquire, launch_dependents, make_barriers, release, wait_for_previous
from ..parts.schedule import LOG2E, meta_of, output, request_tiles, scalar, zero_padding
from . import shared_tiles as wide
from .attend import attend_tile, empty_state
from .attend_rows import attend_rows, empty_rows, ended
from .fetch import advance, cursor_at, fetch, make_rings
from .join import join, look_at
from .query import arrived_query, fetch_query, load_query, make_queries
from .tiles import mma_layout
from .work import finish, per_head, share_and_place


@gluon.jit
def heads_of(h0, LAYOUT: gl.constexpr, g: gl.constexpr):
    return h0 + gl.arange(0, g.HB, LAYOUT)


@gluon.jit
def whole_tiles(n, rows, first, c: gl.constexpr):
    """Tiles [u0, u1) that every row sees whole."""
    u0 = first
    if c.WINDOW > 0:
        u0 = (gl.maximum(n - c.WINDOW, 0) + c.TILE - 1) // c.TILE
    whole = n - rows if c.HAS_MASK else n - rows + 1
    return u0, gl.maximum(whole, 0) // c.TILE


@gluon.jit
def store_state(PART, slot, m, l, acc, h0, rows_left, c: gl.constexpr, g: gl.constexpr):
    """Write cut segments' states: slot + 2 h, [ROWS, PARTS × BLOCK_DV + 2] fp32, the last two columns m and l."""
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    HN: gl.constexpr = gl.SliceLayout(1, MMA)
    o_r = gl.arange(0, c.ROWS, gl.SliceLayout(0, HN))
    slots = slot + 2 * gl.arange(0, g.HB, gl.SliceLayout(1, HN)).to(gl.int64)
    p_row = PART + (slots[:, None] * c.ROWS + o_r[None, :]) * c.PART_COLUMNS
    m_row = (o_r < rows_left)[None, :] & (slots >= 0)[:, None]
    o_d = gl.arange(0, c.WORDS_V, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    for j in gl.static_range(gl.constexpr(c.PARTS)):
        gl.store(p_row[:, None, :] + j * c.BLOCK_DV + o_d, acc[j], mask=m_row[:, None, :])
    gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
    gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)


@gluon.jit
def store_rows(OUT, LSE, SINKS, m, l, acc, h_scale, h0, tokens, r0, rows_left, so_t, so_h, sl_t, sl_h,
               c: gl.constexpr, g: gl.constexpr):  # fmt: skip
    """Write finished rows to `out`, and their LSE."""
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    HN: gl.constexpr = gl.SliceLayout(1, MMA)
    o_r = r0 + gl.arange(0, c.ROWS, gl.SliceLayout(0, HN))
    h = heads_of(h0, gl.SliceLayout(1, HN), g)
    heads = (h[:, None] * c.GROUP + (o_r % c.GROUP)[None, :]).to(gl.int64)
    at = (tokens + o_r // c.GROUP).to(gl.int64)[None, :]
    m_row = (o_r < rows_left)[None, :] & (h >= 0)[:, None]
    factor, lse = finish(m, l, h_scale[:, None] * c.V_FACTOR, SINKS, heads, m_row, c)
    o_d = gl.arange(0, c.WORDS_V, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))[None, :, None]
    p_out = (OUT + at * so_t + heads * so_h)[:, None, :] + c.PARTS * o_d
    for j in gl.static_range(gl.constexpr(c.PARTS)):
        gl.store(
            p_out + j,
            output(acc[j] * factor[:, None, :], OUT, c),
            mask=m_row[:, None, :],
        )
    if c.HAS_LSE:
        gl.store(LSE + at * sl_t + heads * sl_h, lse, mask=m_row)


@gluon.jit
def decode_kernel(
    Q, K, V, KS, VS, TABLE, LENS, CU, MASK, SINKS, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, sq_t, sq_h, st_b, sm_t, so_t, so_h, sl_t, sl_h, c: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for HB heads. See the module's docstring."""
    p = gl.program_id(0)
    i_share, num_shares = p // g.GROUPS, gl.num_programs(0) // g.GROUPS
    h0 = p % g.GROUPS * g.HB
    META = meta_of(PART, num_shares * c.HEADS, c)
    SETS: gl.constexpr = 4 if g.SCALES else 2
    full = make_barriers(SETS, g.STAGES)
    kbuf, ksbuf = make_rings(gl.int32 if c.BLOCK_SCALES else gl.float32, False, g)
    vbuf, vsbuf = make_rings(gl.int32 if c.BLOCK_SCALES else gl.float32, True, g)
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
    x, end, per, b, base = share_and_place(LENS, CU, B, i_share, num_shares, c)
    if x < end:
        cursor = cursor_at(TABLE, LENS, CU, st_b, x, end, b, base, c, g)
        asked, used = 0, 0
        for ahead in gl.static_range(gl.constexpr(g.STAGES if g.WIDE else g.STAGES - 1)):
            if g.QUERIES > 0:
                asked = fetch_query(Q, CU, queries, asked, cursor, end, h0, sq_t, sq_h, ahead == 0, c, g)
            fetch(
                cursor, ahead, full, K, V, KS, VS, kbuf, vbuf, ksbuf, vsbuf, h0, end, c, g,
            )  # fmt: skip
            cursor = advance(cursor, TABLE, LENS, CU, st_b, end, c, g)
        if g.WIDE:
            h = h0
        else:
            h = heads_of(h0, gl.SliceLayout(1, gl.SliceLayout(1, mma_layout(g.HB, g.RB))), g)
        k_scales = (
            scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E * per_head(k_scale, K_T, h, c.K_T, c.K_T_STRIDE)
        )
        h_scale = per_head(v_scale, V_T, h, c.V_T, c.V_T_STRIDE) * scalar(out_scale, OUT_T, c.OUT_T)
        tiles, segments, first, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
        turn = 0
        while x < end:
            while x - base >= tiles * segments:
                base += tiles * segments
                b += 1
                tiles, segments, first, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
            segment = (x - base) // tiles
            t0 = (x - base) % tiles
            t1 = gl.minimum(t0 + end - x, tiles)
            r0 = segment * c.ROWS
            u0, u1 = whole_tiles(n, rows, first, c)
            if g.JOIN_ROWS > 0:
                first_share = (base + segment * tiles) // per
                pieces = (base + (segment + 1) * tiles - 1) // per - first_share + 1
                seen = look_at(PART, i_share, first_share, pieces, c, g)
            if g.WIDE:
                scale = k_scales * wide.load_query(Q, q0, h0, r0, rows * c.GROUP, sq_t, sq_h, buffers[0], c, g)
                m, l, acc, cursor, turn = wide.attend_segment(
                    scale, softcap, cursor, turn, full, (kbuf, vbuf), (K, V, KS, VS, TABLE, LENS, CU, MASK), buffers,
                    b, h0, first + t0, first + t1, u0, u1, n, rows, r0, q0, end, st_b, sm_t, c, g,
                )  # fmt: skip
            else:
                if g.QUERIES > 0:
                    q, factor = arrived_query(queries, used, c, g)
                    used += 1
                else:
                    q, factor = load_query(Q, q0, h0, r0, rows * c.GROUP, sq_t, sq_h, c, g)
                scale = k_scales[:, None] * factor
                attend: gl.constexpr = attend_rows if c.ROWS > 16 else attend_tile
                state = empty_rows(c, g) if c.ROWS > 16 else empty_state(c, g)
                for t in range(first + t0, first + t1):
                    acquire(full, turn, SETS, g.STAGES)
                    release()
                    if g.QUERIES > 0:
                        asked = fetch_query(Q, CU, queries, asked, cursor, end, h0, sq_t, sq_h, False, c, g)
                    fetch(
                        cursor, turn + g.STAGES - 1, full, K, V, KS, VS, kbuf, vbuf, ksbuf, vsbuf, h0, end, c, g,
                    )  # fmt: skip
                    cursor = advance(cursor, TABLE, LENS, CU, st_b, end, c, g)
                    if (t >= u0) & (t < u1):
                        state = attend(state, kbuf, vbuf, ksbuf, vsbuf, turn % g.STAGES, q, scale, softcap, t, n,
                                            rows, r0, q0, MASK, sm_t, False, c, g)  # fmt: skip
                    else:
                        state = attend(state, kbuf, vbuf, ksbuf, vsbuf, turn % g.STAGES, q, scale, softcap, t, n,
                                            rows, r0, q0, MASK, sm_t, True, c, g)  # fmt: skip
                    turn += 1
                m, l, acc = ended(state, c, g)
            if (g.JOIN_ROWS == 0) & (t0 == 0):
                p_meta = META + ((b * g.SEGMENTS + segment) * g.GROUPS + p % g.GROUPS) * 2
                gl.store(p_meta, (base + (segment + 1) * tiles - 1) // per - i_share + 1)
                gl.store(p_meta + 1, i_share)
            slot = 2 * (i_share * c.HEADS + h0) + gl.where(t0 == 0, 1, 0)
            if g.WIDE:
                if t1 - t0 == tiles:
                    wide.store_rows(OUT, LSE, SINKS, m, l, acc, h_scale, h0, q0, r0, rows * c.GROUP, so_t, so_h, sl_t,
                                    sl_h, c, g)  # fmt: skip
                else:
                    wide.store_state(PART, slot, m, l, acc, rows * c.GROUP - r0, c, g)
            elif t1 - t0 == tiles:
                store_rows(OUT, LSE, SINKS, m, l, acc, h_scale, h0, q0, r0, rows * c.GROUP, so_t, so_h, sl_t, sl_h,
                           c, g)  # fmt: skip
            else:
                store_state(PART, slot, m, l, acc, h0, rows * c.GROUP - r0, c, g)
                if g.JOIN_ROWS > 0:
                    join(
                        OUT, LSE, SINKS, PART, v_scale, V_T, scalar(out_scale, OUT_T, c.OUT_T), i_share, first_share,
                        pieces, seen, h0, q0, r0, rows * c.GROUP - r0, so_t, so_h, sl_t, sl_h, c, g,
                    )  # fmt: skip
            x += t1 - t0
    if g.JOIN_ROWS == 0:
        launch_dependents()
