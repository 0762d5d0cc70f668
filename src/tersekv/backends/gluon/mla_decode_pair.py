"""MLA decode over 16-bit latents for many heads on sm_90: two warpgroups that take turns, 64 query rows each CTA.

Tiles of 64 keys come in pairs. The left warpgroup scores the first tile of a pair and holds columns 0 … 255 of the
output, the right one scores the second and holds the others; while one is busy with its softmax, the other multiplies.
They hand each other the running maximum and their probabilities; the latter lie where the tile's rotary part lay,
which is no longer wanted then. A producer warp copies tiles by TMA, in halves of 256 columns, as each becomes free.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .schedule import (
    LOG2E,
    finish,
    locate,
    meta_of,
    note_pieces,
    output,
    request_tiles,
    row_places,
    scalar,
    share,
    zero_padding,
)

TILE = gl.constexpr(64)
HALF = gl.constexpr(256)  # columns of the output that a warpgroup holds
BOX = gl.constexpr(64)  # columns of a TMA box
SLACK = gl.constexpr(8.0)  # probabilities are at most 2^SLACK before they are normalised
# Barriers, by name: of halves of the two tiles of a pair (0 … 7), and of what the warpgroups hand each other.
FULL = gl.constexpr(0)  # + 2 * slot + half
FREE = gl.constexpr(4)  # + 2 * slot + half
P_LEFT = gl.constexpr(8)
P_RIGHT = gl.constexpr(9)
L_LEFT = gl.constexpr(10)
L_RIGHT = gl.constexpr(11)
QUERY = gl.constexpr(12)
BARRIERS = gl.constexpr(13)


@gluon.jit
def signal(bars, i):
    """Arrive, once all warps of the partition are here."""
    gl.thread_barrier()
    mbarrier.arrive(bars.index(i))


@gluon.jit
def next_segment(LENS, CU, x, end, b, base, c: gl.constexpr):
    """(request, its first flat tile, segment, first and last tile, keys, query rows, first query row, tiles) at x."""
    tiles, segments, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
    while x - base >= tiles * segments:
        base += tiles * segments
        b += 1
        tiles, segments, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
    segment = (x - base) // tiles
    t0 = (x - base) % tiles
    return b, base, segment, t0, gl.minimum(t0 + end - x, tiles), n, rows, q0, tiles


@gluon.jit
def copy_half(BOX_C, ring_c, bars, slot: gl.constexpr, half: gl.constexpr, rows_c, k, EXTRA: gl.constexpr):
    """Wait until a half of a tile is free, and start its copies. EXTRA: bytes that the caller adds."""
    PIECE: gl.constexpr = BOX_C.block_shape[0]
    PIECES: gl.constexpr = TILE // PIECE
    BOXES: gl.constexpr = HALF // BOX
    mbarrier.wait(bars.index(FREE + 2 * slot + half), (k & 1) ^ 1)
    bar = bars.index(FULL + 2 * slot + half)
    mbarrier.expect(bar, 2 * TILE * HALF + EXTRA)
    boxes = ring_c.index(2 * slot + half)._reinterpret(BOX_C.dtype, [BOXES, TILE, BOX], BOX_C.layout)
    for j in gl.static_range(PIECES):
        for i in gl.static_range(BOXES):
            place = boxes.index(i).slice(j * PIECE, PIECE)
            tma.async_copy_global_to_shared(BOX_C, [rows_c[j], half * HALF + i * BOX], bar, place)


@gluon.jit
def copy_rotary(BOX_P, ring_p, bars, slot: gl.constexpr, half: gl.constexpr, rows_p):
    """Copy a tile's rotary part; it counts for the half whose probabilities are read last."""
    PIECE: gl.constexpr = BOX_P.block_shape[0]
    PIECES: gl.constexpr = TILE // PIECE
    for j in gl.static_range(PIECES):
        place = ring_p.index(slot).slice(j * PIECE, PIECE)
        tma.async_copy_global_to_shared(BOX_P, [rows_p[j], 0], bars.index(FULL + 2 * slot + half), place)


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
def produce(BOX_C, BOX_P, TABLE, LENS, CU, rings, bars, x, end, b, base, nowhere, st_b, c: gl.constexpr):
    """Copy every tile of the share [x, end)."""
    ring_c, ring_p = rings
    PIECE: gl.constexpr = BOX_C.block_shape[0]
    PIECES: gl.constexpr = TILE // PIECE
    ROTARY: gl.constexpr = 2 * TILE * c.BLOCK_R
    k0, k1 = 0, 0
    while x < end:
        b, base, _, t0, t1, n, _, _, _ = next_segment(LENS, CU, x, end, b, base, c)
        table = TABLE + b.to(gl.int64) * st_b
        for t in range(t0, t1, 2):
            rows_c, rows_p = rows_of(table, t, n, nowhere, PIECES, PIECE, c)
            more_c, more_p = rows_of(table, t + 1, n, nowhere, PIECES, PIECE, c)
            copy_half(BOX_C, ring_c, bars, 0, 0, rows_c, k0, 0)
            copy_half(BOX_C, ring_c, bars, 0, 1, rows_c, k0, ROTARY)
            copy_rotary(BOX_P, ring_p, bars, 0, 1, rows_p)
            k0 += 1
            if t + 1 < t1:
                copy_half(BOX_C, ring_c, bars, 1, 0, more_c, k1, ROTARY)
                copy_rotary(BOX_P, ring_p, bars, 1, 0, more_p)
                copy_half(BOX_C, ring_c, bars, 1, 1, more_c, k1, 0)
                k1 += 1
        x += t1 - t0


@gluon.jit
def load_query(QN, QP, q_c, q_p, segment, h, q0, rows, sn_t, sn_h, sr_t, sr_h, c: gl.constexpr):
    """Put the query rows into shared memory."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    BOXES: gl.constexpr = q_c.shape[0]
    tokens, heads, m_row = row_places(segment, h, q0, rows, gl.SliceLayout(1, L), c)
    o_d = gl.arange(0, BOX, gl.SliceLayout(0, L))
    p_c = (QN + tokens * sn_t + heads * sn_h)[:, None] + o_d[None, :]
    p_p = (QP + tokens * sr_t + heads * sr_h)[:, None] + o_d[None, :]
    # All loads are under way before the first is used.
    rotary, pieces = gl.load(p_p, mask=m_row[:, None], other=0.0), ()
    for i in gl.static_range(BOXES):
        pieces = pieces + (gl.load(p_c + i * BOX, mask=m_row[:, None], other=0.0),)
    for i in gl.static_range(BOXES):
        q_c.index(i).store(pieces[i].to(gl.float32).to(q_c.dtype))
    q_p.store(rotary.to(gl.float32).to(q_p.dtype))
    fence_async_shared()


@gluon.jit
def drop_stale(boxes, keys):
    """Rows behind the tile's last key become 0: a probability of 0 does not hide a NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    real = gl.arange(0, TILE, gl.SliceLayout(1, L)) < keys
    for i in range(boxes.shape[0]):  # not unrolled: it is rare, and the loop around it should stay small
        place = boxes.index(i)
        x = place.load(L)
        place.store(gl.where(real[:, None], x, gl.full([TILE, BOX], 0.0, x.dtype, L)))
    fence_async_shared()


@gluon.jit
def half_scores(s, q_c, tile, half: gl.constexpr, bar, k, t, n, FIRST: gl.constexpr):
    """(s +) the products of half the columns of the query and of a tile of keys, when these have come."""
    BOXES: gl.constexpr = HALF // BOX
    mbarrier.wait(bar, k & 1)
    boxes = tile._reinterpret(q_c.dtype, [BOXES, TILE, BOX], q_c.layout)
    if (t + 1) * TILE > n:
        drop_stale(boxes, n - t * TILE)
    for i in gl.static_range(BOXES):
        # NOTE: this is 0. A constant would make the compiler keep, and spill, the descriptors of all steps.
        none = (t + (BOXES * half + i)) >> 30
        x, y = q_c.index(none + (half * BOXES + i)), boxes.index(none + i).permute((1, 0))
        s = warpgroup_mma(x, y, s, use_acc=not FIRST or i > 0, is_async=True)
    return s


@gluon.jit
def start_scores(q, rings, bars, slot: gl.constexpr, k, t, n, S: gl.constexpr):
    """Start the products of the query and a tile of keys, fp32 [ROWS, TILE]. What is stale is cleaned first."""
    q_c, q_p = q
    ring_c, ring_p = rings
    s = gl.full([q_c.shape[1], TILE], 0.0, gl.float32, S)
    s = half_scores(s, q_c, ring_c.index(2 * slot), 0, bars.index(FULL + 2 * slot), k, t, n, True)
    s = half_scores(s, q_c, ring_c.index(2 * slot + 1), 1, bars.index(FULL + 2 * slot + 1), k, t, n, False)
    none = (t + 2 * BOX) >> 30
    return warpgroup_mma(q_p.index(none), ring_p.index(none + slot).permute((1, 0)), s, is_async=True)


@gluon.jit
def hide(s, t, n, rows, r0, c: gl.constexpr):
    """Scores of tile t with −inf where a query row does not see a key."""
    S: gl.constexpr = s.type.layout
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
def scaled(acc, factor):
    O: gl.constexpr = acc.type.layout
    return acc * gl.convert_layout(factor, gl.SliceLayout(1, O))[:, None]


@gluon.jit
def grows(top, m):
    """Does a row's reference have to be raised, lest its powers pass 2^SLACK? One answer for all rows: rarely."""
    return gl.max((top > m + SLACK).to(gl.int32), 0)


@gluon.jit
def note(notes, flags, i: gl.constexpr, here, grew):
    """Leave the references of a tile to the other warpgroup, and whether they are new."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    notes.index(i).store(here)
    flags.index(i).store(gl.full([1], grew, gl.int32, L))


@gluon.jit
def raised(flags, i: gl.constexpr):
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(flags.index(i).load(L), 0)


@gluon.jit
def attend_left(q, rings, bars, notes, flags, scale, t0, t1, n, rows, r0, k0, k1, S: gl.constexpr, O: gl.constexpr,
                c: gl.constexpr):  # fmt: skip
    """The left warpgroup's part of a segment: (references, its share of the sum, its columns, pairs, seconds)."""
    ring_c, ring_p = rings
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    m = gl.full([c.ROWS], float("-inf"), gl.float32, ROW)
    l = gl.full([c.ROWS], 0.0, gl.float32, ROW)
    acc = gl.full([c.ROWS, HALF], 0.0, gl.float32, O)
    for t in range(t0, t1, 2):
        s = warpgroup_mma_wait(0, [start_scores(q, rings, bars, 0, k0, t, n, S)])
        s = hide(s * scale, t, n, rows, r0, c)
        top = gl.max(s, 1)
        grew = grows(top, m)
        if grew > 0:
            here = gl.maximum(m, top)
            old = power(m, here)
            m, l, acc = here, l * old, scaled(acc, old)
        p = power(s, m[:, None])
        x = p.to(ring_p.dtype)
        note(notes, flags, 0, m, grew)
        ring_p.index(0).store(x)
        fence_async_shared()
        signal(bars, P_LEFT)
        acc = warpgroup_mma(gl.convert_layout(x, A), ring_c.index(0), acc, is_async=True)
        l += gl.sum(p, 1)
        acc = warpgroup_mma_wait(0, [acc])
        signal(bars, FREE + 0)
        k0 += 1
        if t + 1 < t1:
            mbarrier.wait(bars.index(P_RIGHT), k1 & 1)
            if raised(flags, 1) > 0:
                here = notes.index(1).load(ROW)
                new = power(m, here)
                m, l, acc = here, l * new, scaled(acc, new)
            mbarrier.wait(bars.index(FULL + 2), k1 & 1)
            acc = warpgroup_mma(ring_p.index(1), ring_c.index(2), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            signal(bars, FREE + 2)
            k1 += 1
    return m, l, acc, k0, k1


@gluon.jit
def take_first(acc, m, l, rings, bars, notes, flags, k0):
    """Start the first tile's part of the right columns: (accumulator, references, sums)."""
    ring_c, ring_p = rings
    mbarrier.wait(bars.index(P_LEFT), k0 & 1)
    if raised(flags, 0) > 0:
        here = notes.index(0).load(m.type.layout)
        old = power(m, here)
        m, l, acc = here, l * old, scaled(acc, old)
    mbarrier.wait(bars.index(FULL + 1), k0 & 1)
    return warpgroup_mma(ring_p.index(0), ring_c.index(1), acc, is_async=True), m, l


@gluon.jit
def attend_right(q, rings, bars, notes, flags, scale, t0, t1, n, rows, r0, k0, k1, S: gl.constexpr, O: gl.constexpr,
                 c: gl.constexpr):  # fmt: skip
    """The right warpgroup's part of a segment, likewise. The last pair may have no second tile."""
    ring_c, ring_p = rings
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    m = gl.full([c.ROWS], float("-inf"), gl.float32, ROW)
    l = gl.full([c.ROWS], 0.0, gl.float32, ROW)
    acc = gl.full([c.ROWS, HALF], 0.0, gl.float32, O)
    for t in range(t0, t1 - 1, 2):
        s = start_scores(q, rings, bars, 1, k1, t + 1, n, S)
        acc, m, l = take_first(acc, m, l, rings, bars, notes, flags, k0)
        s = hide(warpgroup_mma_wait(1, [s]) * scale, t + 1, n, rows, r0, c)
        top = gl.max(s, 1)
        grew = grows(top, m)
        here = gl.where(grew > 0, gl.maximum(m, top), m)
        p = power(s, here[:, None])
        x = p.to(ring_p.dtype)
        note(notes, flags, 1, here, grew)
        ring_p.index(1).store(x)
        fence_async_shared()
        signal(bars, P_RIGHT)
        acc = warpgroup_mma_wait(0, [acc])
        signal(bars, FREE + 1)
        if grew > 0:
            new = power(m, here)
            m, l, acc = here, l * new, scaled(acc, new)
        l += gl.sum(p, 1)
        acc = warpgroup_mma(gl.convert_layout(x, A), ring_c.index(3), acc, is_async=True)
        acc = warpgroup_mma_wait(0, [acc])
        signal(bars, FREE + 3)
        k0 += 1
        k1 += 1
    if (t1 - t0) % 2 == 1:
        acc, m, l = take_first(acc, m, l, rings, bars, notes, flags, k0)
        acc = warpgroup_mma_wait(0, [acc])
        signal(bars, FREE + 1)
        k0 += 1
    return m, l, acc, k0, k1


@gluon.jit
def consume(tensors, q, rings, bars, notes, flags, score_scale, value_factor, place, strides, LEFT: gl.constexpr,
            c: gl.constexpr):  # fmt: skip
    """Attend the share [x, end) of all tiles, for one block of heads and half of the columns."""
    QN, QP, LENS, CU, OUT, LSE, PART, META = tensors
    max_segments, p, per, x, end, b, base = place
    sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h = strides
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, O)
    h = p % c.HEADS
    k0, k1, done = 0, 0, 0
    o_d = gl.arange(0, HALF, gl.SliceLayout(0, O))
    if not LEFT:
        o_d += HALF
    while x < end:
        b, base, segment, t0, t1, n, rows, q0, tiles = next_segment(LENS, CU, x, end, b, base, c)
        if LEFT:
            load_query(QN, QP, q[0], q[1].index(0), segment, h, q0, rows, sn_t, sn_h, sr_t, sr_h, c)
            signal(bars, QUERY)
            m, l, acc, k0, k1 = attend_left(
                q, rings, bars, notes, flags, score_scale, t0, t1, n, rows, segment * c.ROWS, k0, k1, S, O, c
            )
            notes.index(2).store(l)
            signal(bars, L_LEFT)
            mbarrier.wait(bars.index(L_RIGHT), done & 1)
            l += notes.index(3).load(gl.SliceLayout(1, S))
        else:
            mbarrier.wait(bars.index(QUERY), done & 1)
            m, l, acc, k0, k1 = attend_right(
                q, rings, bars, notes, flags, score_scale, t0, t1, n, rows, segment * c.ROWS, k0, k1, S, O, c
            )
            notes.index(3).store(l)
            signal(bars, L_RIGHT)
            mbarrier.wait(bars.index(L_LEFT), done & 1)
            l += notes.index(2).load(gl.SliceLayout(1, S))
        done += 1
        tokens, heads, m_row = row_places(segment, h, q0, rows, ROW, c)
        m, l = gl.convert_layout(m, ROW), gl.convert_layout(l, ROW)
        if t0 == 0:  # of both warpgroups, which write the same
            pieces = (base + (segment + 1) * tiles - 1) // per - p // c.HEADS + 1
            note_pieces(META, b, segment, max_segments, p, pieces, c)
        if t1 - t0 == tiles:
            factor, lse = finish(m, l, value_factor)
            p_out = (OUT + tokens * so_t + heads * so_h)[:, None] + o_d[None, :]
            gl.store(p_out, output(acc * factor[:, None], OUT, c), mask=m_row[:, None])
            if c.HAS_LSE and LEFT:
                gl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)
        else:
            slot = 2 * p + (t0 == 0).to(gl.int32)
            p_row = PART + (slot.to(gl.int64) * c.ROWS + gl.arange(0, c.ROWS, ROW)) * c.PART_COLUMNS
            gl.store(p_row[:, None] + o_d[None, :], acc, mask=m_row[:, None])
            if LEFT:
                gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
                gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)
        x += t1 - t0


@gluon.jit
def mla_decode_pair_kernel(
    QN, QP, BOX_C, BOX_P, BOX_S, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, nowhere, s_pitch, max_segments, sn_t, sn_h, sr_t, sr_h, st_b, so_t, so_h, sl_t, sl_h,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for one block of heads."""
    p = gl.program_id(0)
    num_programs = gl.num_programs(0)
    META = meta_of(PART, num_programs, c)
    if c.RAGGED:
        zero_padding(OUT, LSE, gl.load(CU + B).to(gl.int32), T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
    x, end, per = share(LENS, CU, B, p // c.HEADS, num_programs // c.HEADS, c)
    X: gl.constexpr = BOX_C.dtype
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    ring_c = gl.allocate_shared_memory(X, [4, TILE, HALF], WIDE)
    ring_p = gl.allocate_shared_memory(X, [2, TILE, c.BLOCK_R], WIDE)
    q_c = gl.allocate_shared_memory(X, [c.DV // BOX, c.ROWS, BOX], WIDE)
    q_p = gl.allocate_shared_memory(X, [1, c.ROWS, c.BLOCK_R], WIDE)
    notes = gl.allocate_shared_memory(gl.float32, [4, c.ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    flags = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bars = gl.allocate_shared_memory(gl.int64, [BARRIERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BARRIERS):
        mbarrier.init(bars.index(i), count=1)
    scale_kv = scalar(kv_scale, KV_T, c.V_T)
    score_scale = scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E * scale_kv
    value_factor = scale_kv * scalar(out_scale, OUT_T, c.OUT_T)
    b, base = locate(LENS, CU, B, gl.minimum(x, end - 1), c)
    q, rings = (q_c, q_p), (ring_c, ring_p)
    tensors = (QN, QP, LENS, CU, OUT, LSE, PART, META)
    strides = (sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h)
    place = (max_segments, p, per, x, end, b, base)
    gl.warp_specialize(
        [
            (consume, (tensors, q, rings, bars, notes, flags, score_scale, value_factor, place, strides, True, c)),
            (consume, (tensors, q, rings, bars, notes, flags, score_scale, value_factor, place, strides, False, c)),
            (produce, (BOX_C, BOX_P, TABLE, LENS, CU, rings, bars, x, end, b, base, nowhere, st_b, c)),
        ],
        [4, 1],
        [240, 24],
    )
