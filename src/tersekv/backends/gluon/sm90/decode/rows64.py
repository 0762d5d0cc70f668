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
from ..parts.ring import barriers, give_back, launch_dependents, make_barriers, wait_for_previous, wait_full
from ..parts.schedule import LOG2E, meta_of, pieces_from, request_at, request_tiles, scalar, segment_at, zero_padding
from ..parts.softmax import packed, unpacked
from .fetch import make_rings
from .kernel import meta_at, note_cut
from .query import pointers_of
from .records import Boxes, Hand, Scales, SeenBy, State, Strides, Tables, Tensors
from .rows import column_of, store_rows_of_head, store_state_of_head
from .rows64_convert import KINDS, SCALE_TURNS, convert_share
from .rows64_softmax import LANES, ROWS, by_lane, lanes_of, scaled, score_layout, weigh
from .seen import whole_tiles
from .turns import keep_turns, load_turns, make_turns, turned_back, turned_query
from .work import per_head, share_of

MIN_SCALE = gl.constexpr(1e-30)  # of scores: −inf times it is −inf


@gluon.constexpr_function
def sum_layout(c):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.PARTS * c.WORDS_V, 16])


@gluon.jit
def query_in_registers(tensors, strides, turns, segment, h, r0, sign, c: gl.constexpr, g: gl.constexpr):
    """(query rows from r0 on in fp16 as the left operand, a factor of their scores [ROWS]): see `query.operands_of`."""
    S: gl.constexpr = score_layout(c)
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    o_r = r0 + gl.arange(0, ROWS, gl.SliceLayout(1, A))
    o_d = column_of(gl.arange(0, c.PARTS * c.WORDS_K, gl.SliceLayout(0, A)), c)
    p_row = pointers_of(tensors.Q, strides, segment.q0, h, o_r, c)
    x = gl.load(p_row[:, None] + o_d[None, :], mask=(o_r < segment.rows * c.GROUP)[:, None], other=0.0).to(gl.float32)
    x = turned_query(x, turns, 1, c, g)
    field = gl.maximum((gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF, 1)
    inverse = (gl.maximum(254 - field, 1) << 23).to(gl.float32, bitcast=True) * sign
    factor = gl.convert_layout((field << 23).to(gl.float32, bitcast=True) * c.K_FACTOR, gl.SliceLayout(1, S))
    return (x * inverse[:, None]).to(gl.float16), factor


@gluon.jit
def start_scores(q, hand, turn, c: gl.constexpr, g: gl.constexpr):
    k = hand.tiles.index(wait_full(hand.ready, 2 * turn, g.SLOTS))
    zero = gl.full([ROWS, c.TILE], 0, gl.float32, score_layout(c))
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def start_values(p, acc, hand, turn, c: gl.constexpr, g: gl.constexpr):
    p = gl.convert_layout(p, gl.DotOperandLayout(0, sum_layout(c), 2), assert_trivial=True)
    v = hand.tiles.index(wait_full(hand.ready, 2 * turn + 1, g.SLOTS))
    return warpgroup_mma(p, v, acc, is_async=True)


@gluon.jit
def attend_segment(q, scale, softcap, hand, turn, t0, t1, u0, u1, seen_by, c: gl.constexpr, g: gl.constexpr):
    """Tiles [t0, t1) of a segment. Returns (state, references and sums by lane, turn)."""
    acc = gl.full([ROWS, c.PARTS * c.WORDS_V], 0, gl.float32, sum_layout(c))
    m = gl.full([ROWS, LANES], float("-inf"), gl.float32, scale.type.layout)
    l = gl.full([ROWS, LANES], 0.0, gl.float32, scale.type.layout)
    for t in range(t0, t1):
        s = warpgroup_mma_wait(0, [start_scores(q, hand, turn, c, g)])
        give_back(hand.empty, 2 * turn, g.SLOTS)
        whole = (t >= u0) & (t < u1)
        p, total, m, old = weigh(s, m, scale, softcap, hand.columns, turn, t, whole, seen_by, c)
        l = l * old + total
        acc = start_values(p.to(gl.float16), scaled(acc, old), hand, turn, c, g)
        acc = warpgroup_mma_wait(0, [acc])
        give_back(hand.empty, 2 * turn + 1, g.SLOTS)
        turn += 1
    return State(m, l, acc), turn


@gluon.jit
def attend_ahead(q, scale, softcap, hand, turn, t0, t1, u0, u1, seen_by, c: gl.constexpr, g: gl.constexpr):
    """The same with a tile's scores, and the search for the highest, beside the products of the values before.

    For one program of two warpgroups. 128 rows, 64 × 8K: fp8 592 → 509 µs; 64 rows, where two programs run beside each
    other: even. The powers come behind the wait for the values' products: forced ahead of it, 509 → 584.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, sum_layout(c), 2)
    acc = gl.full([ROWS, c.PARTS * c.WORDS_V], 0, gl.float32, sum_layout(c))
    m = gl.full([ROWS, LANES], float("-inf"), gl.float32, scale.type.layout)
    s = warpgroup_mma_wait(0, [start_scores(q, hand, turn, c, g)])
    give_back(hand.empty, 2 * turn, g.SLOTS)
    whole = (t0 >= u0) & (t0 < u1)
    p, l, m, _ = weigh(s, m, scale, softcap, hand.columns, turn, t0, whole, seen_by, c)
    words = packed(p, gl.float16)
    for t in range(t0 + 1, t1):
        s = start_scores(q, hand, turn + 1, c, g)
        acc = start_values(unpacked(words, gl.float16, A), acc, hand, turn, c, g)
        s = warpgroup_mma_wait(1, [s])
        give_back(hand.empty, 2 * turn + 2, g.SLOTS)
        whole = (t >= u0) & (t < u1)
        p, total, m, old = weigh(s, m, scale, softcap, hand.columns, turn + 1, t, whole, seen_by, c)
        l = l * old + total
        words = packed(p, gl.float16)
        acc = warpgroup_mma_wait(0, [acc])
        give_back(hand.empty, 2 * turn + 1, g.SLOTS)
        acc = scaled(acc, old)
        turn += 1
    acc = warpgroup_mma_wait(0, [start_values(unpacked(words, gl.float16, A), acc, hand, turn, c, g)])
    give_back(hand.empty, 2 * turn + 1, g.SLOTS)
    return State(m, l, acc), turn + 1


@gluon.jit
def attend(tensors, scales, strides, turns, hand, share, which: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Attend 64 query rows over the share's tiles."""
    LENS, CU, h = tensors.LENS, tensors.CU, share.group
    x, end, b, base = share.x, share.end, share.b, share.base
    k_scales = scales.score * per_head(scales.k, scales.K_T, h, c.K_T, c.K_T_STRIDE)
    h_scale = per_head(scales.v, scales.V_T, h, c.V_T, c.V_T_STRIDE) * scales.out
    # The query takes the scale's sign, so that the highest score has the largest product.
    sign = gl.where(k_scales < 0, -1.0, 1.0)
    request = request_tiles(LENS, CU, b, x < end, c)
    turn = 0
    while x < end:
        b, base, request = request_at(LENS, CU, x, b, base, request, c)
        segment = segment_at(x, end, b, base, request)
        r0 = segment.i * c.ROWS + which * ROWS
        q, factor = query_in_registers(tensors, strides, turns, segment, h, r0, sign, c, g)
        scale = factor * (k_scales * sign)
        scale = gl.where(scale < MIN_SCALE, MIN_SCALE, scale)
        LANE: gl.constexpr = lanes_of(by_lane(gl.full([ROWS, c.TILE], 0.0, gl.float32, score_layout(c))).type.layout)
        zero = gl.full([ROWS, LANES], 0.0, gl.float32, LANE)
        scale = gl.convert_layout(scale, gl.SliceLayout(1, LANE))[:, None] + zero
        u0, u1 = whole_tiles(request, c)
        seen_by = SeenBy(segment.keys, segment.rows, r0, segment.q0, tensors.MASK, strides.mask_t)
        attend_tiles: gl.constexpr = attend_ahead if g.RB == 8 else attend_segment
        sums, turn = attend_tiles(
            q, scale, scales.softcap, hand, turn, request.first + segment.t0, request.first + segment.t1, u0, u1,
            seen_by, c, g,
        )  # fmt: skip
        ROW: gl.constexpr = gl.SliceLayout(1, sums.acc.type.layout)
        m, l = gl.convert_layout(gl.max(sums.m, 1), ROW), gl.convert_layout(gl.sum(sums.l, 1), ROW)
        state = State(m, l, sums.acc)
        if g.V.TURN.ANY:
            state = turned_back(state, turns, c, g)
        o_m = gl.arange(0, ROWS, ROW)
        if segment.t0 == 0:  # all warpgroups write the same
            pieces = pieces_from(segment, share.per, share.i)
            note_cut(meta_at(tensors.META, segment, share.group, g), pieces, share.i)
        if segment.t1 - segment.t0 == segment.tiles:
            store_rows_of_head(tensors, strides, state, h_scale, h, segment, r0 + o_m, c)
        else:
            slot = 2 * (share.i * c.HEADS + h) + gl.where(segment.t0 == 0, 1, 0)
            rows_left = segment.rows * c.GROUP - segment.i * c.ROWS
            store_state_of_head(tensors.PART, slot, state, which * ROWS + o_m, rows_left, c)
        x += segment.t1 - segment.t0


@gluon.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_rows64_kernel(
    Q, K, V, KS, VS, TABLE, LENS, CU, MASK, SINKS, OUT, LSE, PART, K_SIGNS, V_SIGNS, K_CHANNELS, V_CHANNELS,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, sq_t, sq_h, st_b, sm_t, so_t, so_h, sl_t, sl_h, c: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for a KV head. See the module's docstring, and `decode_kernel`'s."""
    gl.static_assert((c.CODE == "e2m1") == c.BLOCK_SCALES, "a code that this kernel does not know")
    p = gl.program_id(0)
    i_share, num_shares, h = p // g.GROUPS, gl.num_programs(0) // g.GROUPS, p % g.GROUPS
    META = meta_of(PART, num_shares * c.HEADS, c)
    D: gl.constexpr = c.PARTS * c.WORDS_K
    X16: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.TILE, D], gl.float16)
    rings = make_rings(g)
    tiles16 = gl.allocate_shared_memory(gl.float16, [g.SLOTS, c.TILE, D], X16)
    columns = tiles16
    if c.TOKEN_SCALES:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        columns = gl.allocate_shared_memory(gl.float32, [SCALE_TURNS * KINDS, c.TILE], PLAIN)
    turns = make_turns(tiles16, c, g)
    full = make_barriers(2, g.STAGES)
    ready, empty = barriers(g.SLOTS, 1), barriers(g.SLOTS, g.RB // 4)
    fence_async_shared()
    wait_for_previous()
    if c.RAGGED:
        zero_padding(OUT, LSE, gl.load(CU + B).to(gl.int32), T, p, gl.num_programs(0), so_t, so_h, sl_t, sl_h, c)
    factors = load_turns((K_SIGNS, V_SIGNS), (K_CHANNELS, V_CHANNELS), h, c, g)
    share = share_of(LENS, CU, B, i_share, num_shares, h, c)
    keep_turns(turns, factors)
    tensors = Tensors(Q, LENS, CU, MASK, SINKS, OUT, LSE, PART, META)
    scales = Scales(
        scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E, k_scale, K_T, v_scale, V_T,
        scalar(out_scale, OUT_T, c.OUT_T), softcap,
    )  # fmt: skip
    strides = Strides(sq_t, sq_h, sm_t, so_t, so_h, sl_t, sl_h)
    boxes, tables = Boxes(K, V, KS, VS), Tables(TABLE, LENS, CU, st_b)
    hand = Hand(tiles16, columns, ready, empty)
    thread_barrier()  # what partitions are given may lie where sums were read from
    if g.RB == 4:
        gl.warp_specialize(
            [
                (convert_share, (boxes, tables, rings, full, hand, share, c, g)),
                (attend, (tensors, scales, strides, turns, hand, share, 0, c, g)),
            ],
            [4],
            [176],
        )
    else:
        gl.warp_specialize(
            [
                (convert_share, (boxes, tables, rings, full, hand, share, c, g)),
                (attend, (tensors, scales, strides, turns, hand, share, 0, c, g)),
                (attend, (tensors, scales, strides, turns, hand, share, 1, c, g)),
            ],
            [4, 4],
            [208, 208],
        )
    launch_dependents()
