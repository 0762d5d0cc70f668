"""MLA decode over 16-bit latents for many heads on sm_90: two warpgroups that take turns, 64 query rows each CTA.

Tiles of 64 keys come in pairs. The left warpgroup scores the first tile of a pair and holds columns 0 … 255 of the
output, the right one scores the second and holds the others; while one is busy with its softmax, the other multiplies.
They hand each other the running maximum and their probabilities; the latter lie where the tile's rotary part lay,
which is no longer wanted then. A producer copies tiles by TMA, in groups of 128 columns, as each becomes free.

Loops over groups are not unrolled, and what is rare is branched around by each warp alone: the code of all warps
together should fit the instruction cache, and no vote of a whole warpgroup should delay its probabilities.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...versions import reinterpret, thread_barrier, tma_load
from ..parts.raising import multiply_where_needed
from ..parts.ring import barriers, signal, wait_for_previous
from ..parts.schedule import finish, load_tiles, meta_of, next_segment, note_pieces, pieces_from, zero_padding
from .records import (
    Boxes,
    Query,
    Rings,
    Share,
    State,
    Strides,
    Tables,
    Tensors,
    holds_all,
    scales_of,
    share_of,
    through_memory,
)
from .two_warpgroups_ends import query_half, store_half

TILE = gl.constexpr(64)
GROUPS = gl.constexpr(4)  # of columns of a tile
COLUMNS = gl.constexpr(128)  # of a group
MINE = gl.constexpr(2)  # groups of the output that a warpgroup holds: the left one the first, the right one the last
BOX = gl.constexpr(64)  # columns of a TMA box
SLACK = gl.constexpr(16.0)  # probabilities are at most 2^SLACK before they are normalised


class Bars(NamedTuple):
    full: gl.shared_memory_descriptor  # of each tile's groups, and behind them of the rotary parts
    free: gl.shared_memory_descriptor  # of each tile's groups
    p_left: gl.shared_memory_descriptor  # the left warpgroup's probabilities are there
    p_right: gl.shared_memory_descriptor


class Ends(NamedTuple):
    """Barriers of both warpgroups at a segment's ends."""

    q_ready: tuple  # its half of the query is there
    l_ready: tuple  # its share of the sums is


class Turns(NamedTuple):
    """Tiles that were used so far: first ones of a pair, and second ones."""

    k0: gl.tensor
    k1: gl.tensor


@gluon.jit
def rows_of(table, t, n, nowhere, PIECES: gl.constexpr, PIECE: gl.constexpr, c: gl.constexpr):
    """Rows of the pieces of tile t in both matrices; `nowhere` lies behind the cache and reads as 0."""
    rows_c, rows_p = (), ()
    for j in gl.static_range(PIECES):
        o = t * TILE + j * PIECE
        page = gl.load(table + o // c.PAGE, mask=o < n, other=-1).to(gl.int32)
        rows_c = rows_c + (gl.where(page < 0, nowhere, page * c.C_PITCH + o % c.PAGE),)
        rows_p = rows_p + (gl.where(page < 0, nowhere, page * c.P_PITCH + o % c.PAGE),)
    return rows_c, rows_p


@gluon.jit
def copy_tile(boxes, rings, bars, slot: gl.constexpr, rows_c, rows_p, k, c: gl.constexpr):
    """Start the copies of a tile's groups, each when it is free; the rotary part comes last."""
    BOX_C, BOX_P = boxes.latents, boxes.rotary
    full, free = bars.full, bars.free
    ring_c, ring_p = rings.latents, rings.rotary
    PIECE: gl.constexpr = BOX_C.block_shape[0]
    PIECES: gl.constexpr = TILE // PIECE
    BOXES: gl.constexpr = COLUMNS // BOX
    none = k >> 30  # 0, which the compiler does not know: it would unroll
    for j in range(GROUPS + none):
        g = (j + slot * MINE) % GROUPS  # in the order in which they become free
        mbarrier.wait(free.index(GROUPS * slot + g), (k & 1) ^ 1)
        bar = full.index(GROUPS * slot + g)
        mbarrier.expect(bar, 2 * TILE * COLUMNS)
        places = reinterpret(ring_c.index(GROUPS * slot + g), BOX_C.dtype, [BOXES, TILE, BOX], BOX_C.layout)
        for r in gl.static_range(PIECES):
            for i in gl.static_range(BOXES):
                place = places.index(i).slice(r * PIECE, PIECE)
                tma_load(BOX_C, [rows_c[r], g * COLUMNS + i * BOX], bar, place)
    bar = full.index(2 * GROUPS + slot)
    mbarrier.expect(bar, 2 * TILE * c.BLOCK_R)
    for r in gl.static_range(PIECES):
        place = ring_p.index(slot).slice(r * PIECE, PIECE)
        tma_load(BOX_P, [rows_p[r], 0], bar, place)


@gluon.jit
def produce(boxes, tables, rings, bars, share, c: gl.constexpr):
    """Copy every tile of the share.

    Not the producer of the other kernels: tiles come in pairs, and groups of their columns when each is free, which is
    what lets one warpgroup multiply while the other still holds the rest.
    """
    PIECE: gl.constexpr = boxes.latents.block_shape[0]
    PIECES: gl.constexpr = TILE // PIECE
    x, end, b, base, nowhere = share.x, share.end, share.b, share.base, tables.nowhere
    k0, k1 = 0, 0
    while x < end:
        segment = next_segment(tables.LENS, tables.CU, x, end, b, base, c)
        b, base, t1, n = segment.b, segment.base, segment.t1, segment.keys
        table = tables.TABLE + b.to(gl.int64) * tables.stride
        for t in range(segment.t0, t1, 2):
            rows_c, rows_p = rows_of(table, t, n, nowhere, PIECES, PIECE, c)
            more_c, more_p = rows_of(table, t + 1, n, nowhere, PIECES, PIECE, c)
            copy_tile(boxes, rings, bars, 0, rows_c, rows_p, k0, c)
            k0 += 1
            if t + 1 < t1:
                copy_tile(boxes, rings, bars, 1, more_c, more_p, k1, c)
                k1 += 1
        x += t1 - segment.t0


@gluon.jit
def drop_stale(ring_c, full, slot: gl.constexpr, k, keys):
    """Rows behind the tile's last key become 0: a probability of 0 does not hide a NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    real = gl.arange(0, TILE, gl.SliceLayout(1, L)) < keys
    for g in gl.static_range(GROUPS):
        mbarrier.wait(full.index(GROUPS * slot + g), k & 1)
    for i in range(GROUPS + (keys >> 30)):
        place = ring_c.index(slot * GROUPS + i)
        x = place.load(L)
        place.store(gl.where(real[:, None], x, gl.full([TILE, COLUMNS], 0.0, x.dtype, L)))
    fence_async_shared()


@gluon.jit
def start_scores(q, rings, full, slot: gl.constexpr, k, t, n, S: gl.constexpr):
    """Start the products of the query and a tile of keys, fp32 [ROWS, TILE]. What is stale is cleaned first."""
    q_c, q_p = q
    ring_c, ring_p = rings.latents, rings.rotary
    ROWS: gl.constexpr = q_p.shape[1]
    BOXES: gl.constexpr = COLUMNS // BOX
    if (t + 1) * TILE > n:
        drop_stale(ring_c, full, slot, k, n - t * TILE)
    s = warpgroup_mma_init(gl.full([ROWS, TILE], 0.0, gl.float32, S))
    q_boxes = reinterpret(q_c, q_c.dtype, [GROUPS * BOXES, ROWS, BOX], q_p.layout)
    none = t >> 30
    for j in range(GROUPS + none):
        g = (j + slot * MINE) % GROUPS
        mbarrier.wait(full.index(GROUPS * slot + g), k & 1)
        keys = reinterpret(ring_c.index(GROUPS * slot + g), q_c.dtype, [BOXES, TILE, BOX], q_c.layout)
        for i in gl.static_range(BOXES):
            s = warpgroup_mma(q_boxes.index(g * BOXES + i), keys.index(none + i).permute((1, 0)), s, is_async=True)
    mbarrier.wait(full.index(2 * GROUPS + slot), k & 1)
    return warpgroup_mma(q_p.index(none), ring_p.index(none + slot).permute((1, 0)), s, is_async=True)


@gluon.jit
def hide(s, t, segment, c: gl.constexpr):
    """Scores of tile t with −inf where a query row does not see a key."""
    S: gl.constexpr = s.type.layout
    n, rows, r0 = segment.keys, segment.rows, segment.i * c.ROWS
    if (t + 1) * TILE > n - rows + 1:
        o_n = t * TILE + gl.arange(0, TILE, gl.SliceLayout(0, S))
        position = n - rows + (r0 + gl.arange(0, c.ROWS, gl.SliceLayout(1, S))) // c.GROUP
        s = gl.where((o_n < n)[None, :] & (o_n[None, :] <= position[:, None]), s, float("-inf"))
    return s


@gluon.jit
def power(x, top):
    """2^(x − top); 0 where nothing was seen yet."""
    return gl.exp2(x - gl.where(top == float("-inf"), 0.0, top))


@gluon.jit
def probabilities(s, m, scale, t, segment, c: gl.constexpr):
    """(powers of two of the scaled scores less a reference, references), which follow m when powers pass 2^SLACK."""
    s = hide(s, t, segment, c)
    top = gl.max(s, 1) * scale
    here = gl.where(top > m + SLACK, top, m)
    return power(s * scale, here[:, None]), here


MULTIPLY, CONSTRAINTS = map(gl.constexpr, multiply_where_needed(MINE.value * COLUMNS.value // 2))


@gluon.jit
def scaled(acc, factor):
    """An accumulator times a factor of each row, which is mostly 1."""
    O: gl.constexpr = acc.type.layout
    f, acc = gl.broadcast(gl.convert_layout(factor, gl.SliceLayout(1, O))[:, None], acc)
    return gl.inline_asm_elementwise(
        MULTIPLY, CONSTRAINTS, [acc, f], gl.float32, is_pure=True, pack=MINE * COLUMNS // 2
    )


@gluon.jit
def start_values(p, ring_c, slot: gl.constexpr, FIRST: gl.constexpr, acc):
    """Start to add the products of a tile's probabilities and MINE groups of its columns: each weight is read once."""
    halves = reinterpret(ring_c, ring_c.dtype, [2 * GROUPS // MINE, TILE, MINE * COLUMNS], ring_c.layout)
    return warpgroup_mma(p, halves.index((GROUPS * slot + FIRST) // MINE), acc, is_async=True)


@gluon.jit
def end_values(acc, free, slot: gl.constexpr, FIRST: gl.constexpr):
    """Wait for them, and free each group."""
    acc = warpgroup_mma_wait(0, [acc])
    thread_barrier()
    for i in gl.static_range(MINE):
        mbarrier.arrive(free.index(GROUPS * slot + FIRST + i))
    return acc


@gluon.jit
def nothing(S: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """(references, sums, accumulator) before the first tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    acc = gl.full([c.ROWS, MINE * COLUMNS], 0.0, gl.float32, O)
    return gl.full([c.ROWS], float("-inf"), gl.float32, ROW), gl.full([c.ROWS], 0.0, gl.float32, ROW), acc


@gluon.jit
def attend_left(q, rings, bars, notes, scale, segment, turns, S: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """(references, the left warpgroup's share of the sum, its columns; turns) of a segment."""
    ring_c, ring_p = rings.latents, rings.rotary
    full, free, p_left, p_right = bars
    t0, t1, k0, k1 = segment.t0, segment.t1, turns.k0, turns.k1
    m, l, acc = nothing(S, O, c)
    for t in range(t0, t1, 2):
        s = warpgroup_mma_wait(0, [start_scores(q, rings, full, 0, k0, t, segment.keys, S)])
        p, here = probabilities(s, m, scale, t, segment, c)
        x = p.to(ring_p.dtype)
        notes.index(0).store(here)
        ring_p.index(0).store(x)
        fence_async_shared()
        signal(p_left.index(0))
        old = power(m, here)
        m, acc = here, scaled(acc, old)
        acc = start_values(gl.convert_layout(x, gl.DotOperandLayout(0, O, 2)), ring_c, 0, 0, acc)
        l = l * old + gl.sum(p, 1)
        acc = end_values(acc, free, 0, 0)
        k0 += 1
        if t + 1 < t1:
            mbarrier.wait(p_right.index(0), k1 & 1)
            here = notes.index(1).load(m.type.layout)
            old = power(m, here)
            m, l, acc = here, l * old, scaled(acc, old)
            acc = start_values(ring_p.index(1), ring_c, 1, 0, acc)
            acc = end_values(acc, free, 1, 0)
            k1 += 1
    return State(m, l, acc), Turns(k0, k1)


@gluon.jit
def take_first(m, l, acc, rings, p_left, notes, k0):
    """Start the first tile's part of the right columns: (references, sums, accumulator)."""
    ring_c, ring_p = rings.latents, rings.rotary
    mbarrier.wait(p_left.index(0), k0 & 1)
    here = notes.index(0).load(m.type.layout)
    old = power(m, here)
    return here, l * old, start_values(ring_p.index(0), ring_c, 0, MINE, scaled(acc, old))


@gluon.jit
def attend_right(q, rings, bars, notes, scale, segment, turns, S: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """The right warpgroup's part of a segment, likewise. The last pair may have no second tile."""
    ring_c, ring_p = rings.latents, rings.rotary
    full, free, p_left, p_right = bars
    t0, t1, k0, k1 = segment.t0, segment.t1, turns.k0, turns.k1
    m, l, acc = nothing(S, O, c)
    for t in range(t0, t1 - 1, 2):
        s = start_scores(q, rings, full, 1, k1, t + 1, segment.keys, S)
        m, l, acc = take_first(m, l, acc, rings, p_left, notes, k0)
        s = warpgroup_mma_wait(1, [s])
        p, here = probabilities(s, m, scale, t + 1, segment, c)
        x = p.to(ring_p.dtype)
        notes.index(1).store(here)
        ring_p.index(1).store(x)
        fence_async_shared()
        signal(p_right.index(0))
        acc = end_values(acc, free, 0, MINE)
        old = power(m, here)
        m, acc = here, scaled(acc, old)
        acc = start_values(gl.convert_layout(x, gl.DotOperandLayout(0, O, 2)), ring_c, 1, MINE, acc)
        l = l * old + gl.sum(p, 1)
        acc = end_values(acc, free, 1, MINE)
        k0 += 1
        k1 += 1
    if (t1 - t0) % 2 == 1:
        m, l, acc = take_first(m, l, acc, rings, p_left, notes, k0)
        acc = end_values(acc, free, 0, MINE)
        k0 += 1
    return State(m, l, acc), Turns(k0, k1)


@gluon.jit
def consume(tensors, q, rings, bars, ends, notes, scales, share, strides, LEFT: gl.constexpr, c: gl.constexpr):
    """Attend the share's tiles, for one block of heads and half of the columns."""
    p, x, end, b, base = share.p, share.x, share.end, share.b, share.base
    ME: gl.constexpr = 0 if LEFT else 1
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MINE * COLUMNS, 16])
    h = p % c.HEADS
    turns, done = Turns(0, 0), 0
    # The query takes the scale's sign, so that the largest score has the largest product.
    sign = gl.where(scales.score < 0, -1.0, 1.0)
    scale = gl.maximum(gl.abs(scales.score), 1e-30)
    while x < end:
        segment = next_segment(tensors.LENS, tensors.CU, x, end, b, base, c)
        b, base = segment.b, segment.base
        query_half(tensors, q, sign, segment, h, strides, ME, c)
        signal(ends.q_ready[ME].index(0))
        mbarrier.wait(ends.q_ready[1 - ME].index(0), done & 1)
        attend: gl.constexpr = attend_left if LEFT else attend_right
        sums, turns = attend(q, rings, bars, notes, scale, segment, turns, S, O, c)
        l = sums.l
        notes.index(2 + ME).store(l)
        signal(ends.l_ready[ME].index(0))
        mbarrier.wait(ends.l_ready[1 - ME].index(0), done & 1)
        l += notes.index(3 - ME).load(gl.SliceLayout(1, S))
        done += 1
        if segment.t0 == 0:  # of both warpgroups, which write the same
            pieces = pieces_from(segment, share.per, p // c.HEADS)
            note_pieces(tensors.META, b, segment.i, share.max_segments, p, pieces, c)
        m, l = gl.convert_layout(sums.m, gl.SliceLayout(1, O)), gl.convert_layout(l, gl.SliceLayout(1, O))
        factor, lse = finish(m, l, scales.value)
        slot = 2 * p + (segment.t0 == 0).to(gl.int32)
        whole = segment.t1 - segment.t0 == segment.tiles
        state = State(m, l, sums.acc)
        store_half(state, factor, lse, q.latents, tensors, whole, slot, segment, h, strides, ME, c)
        x += segment.t1 - segment.t0


@gluon.jit
def mla_decode_two_warpgroups_kernel(
    QN, QP, BOX_C, BOX_P, BOX_S, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, nowhere, s_pitch, max_segments, sn_t, sn_h, sr_t, sr_h, st_b, so_t, so_h, sl_t, sl_h,
    STAGES: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for one block of heads."""
    gl.static_assert(c.CODE == "bf16", "a code that this kernel does not know")
    wait_for_previous()
    p = gl.program_id(0)
    num_programs = gl.num_programs(0)
    tensors = Tensors(QN, QP, LENS, CU, OUT, LSE, PART, meta_of(PART, num_programs, c))
    strides = Strides(sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h)
    boxes, tables = Boxes(BOX_C, BOX_P, BOX_S), Tables(TABLE, LENS, CU, st_b, nowhere, s_pitch)
    if c.RAGGED:
        padding = gl.load(CU + B).to(gl.int32)  # arrives with the lengths
    loaded = load_tiles(LENS, CU, B, c, True) if holds_all(c) else ()
    X: gl.constexpr = BOX_C.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring_c = gl.allocate_shared_memory(X, [2 * GROUPS, TILE, COLUMNS], WIDE)
    ring_p = gl.allocate_shared_memory(X, [2, TILE, c.BLOCK_R], WIDE)
    q_c = gl.allocate_shared_memory(X, [2, c.DV // BOX // 2 * c.ROWS, BOX], WIDE)
    q_p = gl.allocate_shared_memory(X, [1, c.ROWS, c.BLOCK_R], WIDE)
    notes = gl.allocate_shared_memory(gl.float32, [4, c.ROWS], FLAT)
    bars = Bars(barriers(2 * GROUPS + 2), barriers(2 * GROUPS), barriers(1), barriers(1))
    ends = Ends((barriers(1), barriers(1)), (barriers(1), barriers(1)))
    scales = scales_of(softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T, c)
    share = share_of(LENS, CU, B, loaded, p // c.HEADS, num_programs // c.HEADS, max_segments, p, c)
    box = gl.allocate_shared_memory(gl.int32, [5, 1], FLAT)
    share = Share(
        max_segments, p, x=through_memory(box, 0, share.x), end=through_memory(box, 1, share.end),
        per=through_memory(box, 2, share.per), b=through_memory(box, 3, share.b),
        base=through_memory(box, 4, share.base),
    )  # fmt: skip
    q, rings = Query(q_c, q_p), Rings(ring_c, ring_p, ring_p)
    thread_barrier()  # what partitions are given may lie where sums were read from
    # The producer is the default partition: it has four warps anyway.
    gl.warp_specialize(
        [
            (produce, (boxes, tables, rings, bars, share, c)),
            (consume, (tensors, q, rings, bars, ends, notes, scales, share, strides, True, c)),
            (consume, (tensors, q, rings, bars, ends, notes, scales, share, strides, False, c)),
        ],
        [4, 4],
        [240, 240],
    )
    if c.RAGGED:
        zero_padding(OUT, LSE, padding, T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
