"""Decode with many query rows of a KV head: conversions and products are left to warpgroups of their own.

A program has one KV head. A warpgroup starts the copies of codes, in a ring of STAGES tiles, and makes them fp16 in a
ring of SLOTS, once for all rows. Every other one attends 64 query rows (M) over all keys (N) with wgmma, and waits for
a conversion only where the ring has run dry. Item 2 k of that ring is the k-th tile's keys, item 2 k + 1 its values.
Columns lie in shared memory where the conversions leave them (`column_of`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...versions import thread_barrier
from ..parts.ring import launch_dependents, make_barriers, wait_for_previous
from ..parts.schedule import LOG2E, meta_of, request_tiles, scalar, zero_padding
from ..parts.softmax import packed, unpacked
from .fetch import make_rings
from .rows import column_of, store_rows, store_state
from .rows64_convert import KINDS, SCALE_TURNS, convert_share
from .rows64_ring import barriers, give_back, wait_full
from .rows64_softmax import LANES, ROWS, by_lane, lanes_of, scaled, score_layout, weigh
from .work import per_head, share_and_place

MIN_SCALE = gl.constexpr(1e-30)  # of scores: −inf times it is −inf


@gluon.constexpr_function
def sum_layout(c):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.PARTS * c.WORDS_V, 16])


@gluon.jit
def load_query(Q, tokens, h, r0, m_row, sq_t, sq_h, sign, c: gl.constexpr):
    """(query rows in fp16 as the left operand, a factor of their scores [ROWS]): see decode_query.operands_of."""
    S: gl.constexpr = score_layout(c)
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    o_r = r0 + gl.arange(0, ROWS, gl.SliceLayout(1, A))
    o_d = column_of(gl.arange(0, c.PARTS * c.WORDS_K, gl.SliceLayout(0, A)), c)
    p_row = Q + (tokens + o_r // c.GROUP).to(gl.int64) * sq_t + (h * c.GROUP + o_r % c.GROUP).to(gl.int64) * sq_h
    x = gl.load(p_row[:, None] + o_d[None, :], mask=(o_r < m_row)[:, None], other=0.0).to(gl.float32)
    field = gl.maximum((gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF, 1)
    inverse = (gl.maximum(254 - field, 1) << 23).to(gl.float32, bitcast=True) * sign
    factor = gl.convert_layout((field << 23).to(gl.float32, bitcast=True) * c.K_FACTOR, gl.SliceLayout(1, S))
    return (x * inverse[:, None]).to(gl.float16), factor


@gluon.jit
def start_scores(q, tiles16, ready, turn, c: gl.constexpr, g: gl.constexpr):
    k = tiles16.index(wait_full(ready, 2 * turn, g.SLOTS))
    zero = gl.full([ROWS, c.TILE], 0, gl.float32, score_layout(c))
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def start_values(p, acc, tiles16, ready, turn, c: gl.constexpr, g: gl.constexpr):
    p = gl.convert_layout(p, gl.DotOperandLayout(0, sum_layout(c), 2), assert_trivial=True)
    v = tiles16.index(wait_full(ready, 2 * turn + 1, g.SLOTS))
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def attend_segment(q, scale, softcap, rings, bars, turn, t0, t1, u0, u1, seen_by, c: gl.constexpr, g: gl.constexpr):
    """Tiles [t0, t1) of a segment. Returns (references, sums, both by lane, accumulator, turn)."""
    tiles16, columns = rings
    ready, empty = bars
    acc = gl.full([ROWS, c.PARTS * c.WORDS_V], 0, gl.float32, sum_layout(c))
    m = gl.full([ROWS, LANES], float("-inf"), gl.float32, scale.type.layout)
    l = gl.full([ROWS, LANES], 0.0, gl.float32, scale.type.layout)
    for t in range(t0, t1):
        s = warpgroup_mma_wait(0, [start_scores(q, tiles16, ready, turn, c, g)])
        give_back(empty, 2 * turn, g.SLOTS)
        whole = (t >= u0) & (t < u1)
        p, total, m, old = weigh(s, m, scale, softcap, columns, turn, t, whole, seen_by, c)
        l = l * old + total
        acc = start_values(p.to(gl.float16), scaled(acc, old), tiles16, ready, turn, c, g)
        acc = warpgroup_mma_wait(0, [acc])
        give_back(empty, 2 * turn + 1, g.SLOTS)
        turn += 1
    return m, l, acc, turn


@gluon.jit
def attend_ahead(q, scale, softcap, rings, bars, turn, t0, t1, u0, u1, seen_by, c: gl.constexpr, g: gl.constexpr):
    """The same with a tile's scores, and the search for the highest, beside the products of the values before.

    For one program of two warpgroups. 128 rows, 64 × 8K: fp8 592 → 509 µs; 64 rows, where two programs run beside each
    other: even. The powers come behind the wait for the values' products: forced ahead of it, 509 → 584.
    """
    tiles16, columns = rings
    ready, empty = bars
    A: gl.constexpr = gl.DotOperandLayout(0, sum_layout(c), 2)
    acc = gl.full([ROWS, c.PARTS * c.WORDS_V], 0, gl.float32, sum_layout(c))
    m = gl.full([ROWS, LANES], float("-inf"), gl.float32, scale.type.layout)
    s = warpgroup_mma_wait(0, [start_scores(q, tiles16, ready, turn, c, g)])
    give_back(empty, 2 * turn, g.SLOTS)
    whole = (t0 >= u0) & (t0 < u1)
    p, l, m, _ = weigh(s, m, scale, softcap, columns, turn, t0, whole, seen_by, c)
    words = packed(p, gl.float16)
    for t in range(t0 + 1, t1):
        s = start_scores(q, tiles16, ready, turn + 1, c, g)
        acc = start_values(unpacked(words, gl.float16, A), acc, tiles16, ready, turn, c, g)
        s = warpgroup_mma_wait(1, [s])
        give_back(empty, 2 * turn + 2, g.SLOTS)
        whole = (t >= u0) & (t < u1)
        p, total, m, old = weigh(s, m, scale, softcap, columns, turn + 1, t, whole, seen_by, c)
        l = l * old + total
        words = packed(p, gl.float16)
        acc = warpgroup_mma_wait(0, [acc])
        give_back(empty, 2 * turn + 1, g.SLOTS)
        acc = scaled(acc, old)
        turn += 1
    acc = warpgroup_mma_wait(0, [start_values(unpacked(words, gl.float16, A), acc, tiles16, ready, turn, c, g)])
    give_back(empty, 2 * turn + 1, g.SLOTS)
    return m, l, acc, turn + 1


@gluon.jit
def attend(tensors, numbers, strides, rings, bars, team, place, which: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Attend 64 query rows over the share [x, end)."""
    Q, LENS, CU, MASK, SINKS, OUT, LSE, PART, META = tensors
    score_scale, k_scale, K_T, v_scale, V_T, out_scale, softcap = numbers
    sq_t, sq_h, sm_t, so_t, so_h, sl_t, sl_h = strides
    of_rows = (so_t, so_h, sl_t, sl_h)
    i_share, h, per = team
    x, end, b, base = place
    k_scales = score_scale * per_head(k_scale, K_T, h, c.K_T, c.K_T_STRIDE)
    h_scale = per_head(v_scale, V_T, h, c.V_T, c.V_T_STRIDE) * out_scale
    # The query takes the scale's sign, so that the highest score has the largest product.
    sign = gl.where(k_scales < 0, -1.0, 1.0)
    tiles, segments, first, n, rows, q0 = request_tiles(LENS, CU, b, x < end, c)
    turn = 0
    while x < end:
        while x - base >= tiles * segments:
            base += tiles * segments
            b += 1
            tiles, segments, first, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
        segment = (x - base) // tiles
        t0 = (x - base) % tiles
        t1 = gl.minimum(t0 + end - x, tiles)
        r0 = segment * c.ROWS + which * ROWS
        q, factor = load_query(Q, q0, h, r0, rows * c.GROUP, sq_t, sq_h, sign, c)
        scale = factor * (k_scales * sign)
        scale = gl.where(scale < MIN_SCALE, MIN_SCALE, scale)
        LANE: gl.constexpr = lanes_of(by_lane(gl.full([ROWS, c.TILE], 0.0, gl.float32, score_layout(c))).type.layout)
        zero = gl.full([ROWS, LANES], 0.0, gl.float32, LANE)
        scale = gl.convert_layout(scale, gl.SliceLayout(1, LANE))[:, None] + zero
        u0 = first
        if c.WINDOW > 0:
            u0 = (gl.maximum(n - c.WINDOW, 0) + c.TILE - 1) // c.TILE
        u1 = gl.maximum(n - rows if c.HAS_MASK else n - rows + 1, 0) // c.TILE
        seen_by = (n, rows, r0, q0, MASK, sm_t)
        attend_tiles: gl.constexpr = attend_ahead if g.RB == 8 else attend_segment
        m, l, acc, turn = attend_tiles(
            q, scale, softcap, rings, bars, turn, first + t0, first + t1, u0, u1, seen_by, c, g
        )
        ROW: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        m, l = gl.convert_layout(gl.max(m, 1), ROW), gl.convert_layout(gl.sum(l, 1), ROW)
        o_m = gl.arange(0, ROWS, ROW)
        if t0 == 0:  # all warpgroups write the same
            pieces = (base + (segment + 1) * tiles - 1) // per - i_share + 1
            p_meta = META + ((b * g.SEGMENTS + segment) * g.GROUPS + h) * 2
            gl.store(p_meta, pieces)
            gl.store(p_meta + 1, i_share)
        if t1 - t0 == tiles:
            store_rows(OUT, LSE, SINKS, m, l, acc, h_scale, h, q0, r0 + o_m, rows * c.GROUP, of_rows, c)
        else:
            slot = 2 * (i_share * c.HEADS + h) + gl.where(t0 == 0, 1, 0)
            store_state(PART, slot, m, l, acc, which * ROWS + o_m, rows * c.GROUP - segment * c.ROWS, c)
        x += t1 - t0


@gluon.jit
def decode_many_kernel(
    Q, K, V, KS, VS, TABLE, LENS, CU, MASK, SINKS, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, sq_t, sq_h, st_b, sm_t, so_t, so_h, sl_t, sl_h, c: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for a KV head. See the module's docstring, and decode_kernels'."""
    p = gl.program_id(0)
    i_share, num_shares, h = p // g.GROUPS, gl.num_programs(0) // g.GROUPS, p % g.GROUPS
    META = meta_of(PART, num_shares * c.HEADS, c)
    D: gl.constexpr = c.PARTS * c.WORDS_K
    X16: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.TILE, D], gl.float16)
    kbuf, _ = make_rings(gl.float32, False, g)
    vbuf, _ = make_rings(gl.float32, True, g)
    tiles16 = gl.allocate_shared_memory(gl.float16, [g.SLOTS, c.TILE, D], X16)
    columns = tiles16
    if c.TOKEN_SCALES:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        columns = gl.allocate_shared_memory(gl.float32, [SCALE_TURNS * KINDS, c.TILE], PLAIN)
    full = make_barriers(2, g.STAGES)
    ready, empty = barriers(g.SLOTS, 1), barriers(g.SLOTS, g.RB // 4)
    fence_async_shared()
    wait_for_previous()
    if c.RAGGED:
        zero_padding(OUT, LSE, gl.load(CU + B).to(gl.int32), T, p, gl.num_programs(0), so_t, so_h, sl_t, sl_h, c)
    x, end, per, b, base = share_and_place(LENS, CU, B, i_share, num_shares, c)
    tensors = (Q, LENS, CU, MASK, SINKS, OUT, LSE, PART, META)
    numbers = (
        scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E, k_scale, K_T, v_scale, V_T,
        scalar(out_scale, OUT_T, c.OUT_T), softcap,
    )  # fmt: skip
    strides = (sq_t, sq_h, sm_t, so_t, so_h, sl_t, sl_h)
    tables, team, place = (TABLE, LENS, CU), (i_share, h, per), (x, end, b, base)
    boxes, scales, rings = (K, V), (KS, VS), (kbuf, vbuf, tiles16, columns)
    bars, read = (ready, empty), (tiles16, columns)
    thread_barrier()  # what partitions are given may lie where sums were read from
    if g.RB == 4:
        gl.warp_specialize(
            [
                (convert_share, (boxes, scales, tables, st_b, rings, (full, ready, empty), h, place, c, g)),
                (attend, (tensors, numbers, strides, read, bars, team, place, 0, c, g)),
            ],
            [4],
            [176],
        )
    else:
        gl.warp_specialize(
            [
                (convert_share, (boxes, scales, tables, st_b, rings, (full, ready, empty), h, place, c, g)),
                (attend, (tensors, numbers, strides, read, bars, team, place, 0, c, g)),
                (attend, (tensors, numbers, strides, read, bars, team, place, 1, c, g)),
            ],
            [4, 4],
            [208, 208],
        )
    launch_dependents()
