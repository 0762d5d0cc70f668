"""MLA decode over 16-bit latents for up to 32 query rows on sm_90: keys are the matrix unit's M side, query rows its N.

A tile of 64 keys arrives by TMA, in a ring of STAGES tiles, and is multiplied straight from there: by keys for the
scores, and transposed, by columns, for the values. So few rows are not padded to 64, as in two_warpgroups.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import thread_barrier
from ..parts.ring import barriers, wait_for_previous
from ..parts.schedule import (
    LOG2E,
    deal,
    finish,
    load_tiles,
    locate,
    meta_of,
    next_segment,
    note_pieces,
    output,
    row_places,
    scalar,
    share,
    zero_padding,
)
from .eight_bits import any_higher, fold, raise_reference
from .produce import produce

BOX = gl.constexpr(64)  # columns of a TMA box
BOXES = gl.constexpr(8)  # of a tile
SLACK = gl.constexpr(16.0)  # probabilities are at most 2^SLACK before they are normalised


@gluon.jit
def load_query(QN, QP, q, segment, h, q0, rows, strides, c: gl.constexpr):
    """Put the query into shared memory, by boxes of columns; the last is the rotary part."""
    sn_t, sn_h, sr_t, sr_h, _, _, _, _ = strides
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = row_places(segment, h, q0, rows, gl.SliceLayout(1, L), c)
    o_d = gl.arange(0, BOX, gl.SliceLayout(0, L))
    p_c = (QN + tokens * sn_t + heads * sn_h)[:, None] + o_d[None, :]
    p_r = (QP + tokens * sr_t + heads * sr_h)[:, None] + o_d[None, :]
    pieces = ()  # all loads are under way before the first is used
    for i in gl.static_range(BOXES):
        pieces = pieces + (gl.load(p_c + i * BOX, mask=m_row[:, None], other=0.0),)
    pieces = pieces + (gl.load(p_r, mask=m_row[:, None], other=0.0),)
    for i in gl.static_range(BOXES + 1):
        q.index(i).store(pieces[i].to(gl.float32).to(q.dtype))
    fence_async_shared()


@gluon.jit
def drop_stale(ring_c, slot, keys, c: gl.constexpr):
    """Rows behind the tile's last key become 0: a probability of 0 does not hide a NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    real = gl.arange(0, c.TILE, gl.SliceLayout(1, L)) < keys
    for i in range(BOXES):  # not unrolled: it is rare, and the loop around it should stay small
        place = ring_c.index(slot * BOXES + i)
        x = place.load(L)
        place.store(gl.where(real[:, None], x, gl.full([c.TILE, BOX], 0.0, x.dtype, L)))
    fence_async_shared()
    thread_barrier()  # here, or the compiler puts one behind the branch


@gluon.jit
def scores(q, rings, slot, here, S: gl.constexpr, c: gl.constexpr):
    """Products of a tile's keys and the query rows: fp32 [TILE, ROWS]."""
    ring_c, ring_p = rings
    SUMS: gl.constexpr = 3 if c.ROWS <= 16 else 2  # so that products wait less for each other
    zero = gl.full([c.TILE, c.ROWS], 0.0, gl.float32, S)
    rotary = q.index(here + BOXES).permute((1, 0))
    sums = (warpgroup_mma(ring_p.index(slot), rotary, zero, use_acc=False, is_async=True),)
    for i in gl.static_range(BOXES):
        keys, q_i = ring_c.index(slot * BOXES + i), q.index(here + i).permute((1, 0))
        if i < SUMS - 1:
            sums = sums + (warpgroup_mma(keys, q_i, zero, use_acc=False, is_async=True),)
        else:
            sums = sums[1:] + (warpgroup_mma(keys, q_i, sums[0], is_async=True),)
    sums = warpgroup_mma_wait(0, sums)
    s = sums[0]
    for i in gl.static_range(SUMS - 1):
        s += sums[i + 1]
    return s


@gluon.jit
def add_values(acc, ring_c, slot, probs):
    """acc + the tile's values, transposed, times the probabilities [TILE, ROWS]."""
    out = ()
    for i in gl.static_range(BOXES):
        out = out + (warpgroup_mma(ring_c.index(slot * BOXES + i).permute((1, 0)), probs, acc[i], is_async=True),)
    return warpgroup_mma_wait(0, out)


@gluon.jit
def attend(q, rings, bars, probs, flags, scale, t0, t1, n, rows, r0, k, STAGES: gl.constexpr, S: gl.constexpr,
           c: gl.constexpr):  # fmt: skip
    """Attend the tiles [t0, t1) of a segment: (running maximum [ROWS], sum [ROWS], accumulators)."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    full, free = bars
    m = gl.full([c.ROWS], float("-inf"), gl.float32, COLUMN)
    l = fold(gl.full([c.TILE, c.ROWS], 0.0, gl.float32, S))  # summed over all keys only at the end
    acc = ()
    for _ in gl.static_range(BOXES):
        acc = acc + (gl.full([BOX, c.ROWS], 0.0, gl.float32, S),)
    o_k = gl.arange(0, c.TILE, gl.SliceLayout(1, S))
    position = n - rows + (r0 + gl.arange(0, c.ROWS, COLUMN)) // c.GROUP
    for t in range(t0, t1):
        turn = k + t - t0
        slot = turn % STAGES
        mbarrier.wait(full.index(slot), (turn // STAGES) & 1)
        if (t + 1) * c.TILE > n:
            drop_stale(rings[0], slot, n - t * c.TILE, c)
        # NOTE: `here` is 0. A constant would make the compiler keep, and spill, the descriptor of every piece of q.
        here = t >> 30
        s = scores(q, rings, slot, here, S, c) * scale
        if (t + 1) * c.TILE > n - rows + 1:
            o_n = t * c.TILE + o_k
            s = gl.where((o_n < n)[:, None] & (o_n[:, None] <= position[None, :]), s, float("-inf"))
        # The reference of a row's exponents is raised only where powers would pass 2^SLACK: rarely.
        if any_higher(s, m + SLACK, flags, 0):
            m, l, acc = raise_reference(gl.maximum(m, gl.max(s, 0)), m, l, acc, S)
        p = gl.exp2(s - gl.where(m == float("-inf"), 0.0, m)[None, :])
        l += fold(p)
        probs.index(here).store(p.to(probs.dtype))
        fence_async_shared()
        acc = add_values(acc, rings[0], slot, probs.index(here))
        mbarrier.arrive(free.index(slot))
    return m, gl.sum(gl.sum(l, 1), 0), acc


@gluon.jit
def store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, S: gl.constexpr, c: gl.constexpr):
    """Write acc × factor to `out`."""
    for i in gl.static_range(BOXES):
        o_d = i * BOX + gl.arange(0, BOX, gl.SliceLayout(1, S))
        p_out = OUT + (tokens * so_t + heads * so_h)[None, :] + o_d[:, None]
        gl.store(p_out, output(acc[i] * factor[None, :], OUT, c), mask=m_row[None, :])


@gluon.jit
def store_part(PART, slot, m, l, acc, m_row, S: gl.constexpr, c: gl.constexpr):
    """Write a cut segment's state: columns, m and l."""
    p_row = PART + (slot.to(gl.int64) * c.ROWS + gl.arange(0, c.ROWS, gl.SliceLayout(0, S))) * c.PART_COLUMNS
    for i in gl.static_range(BOXES):
        o_d = i * BOX + gl.arange(0, BOX, gl.SliceLayout(1, S))
        gl.store(p_row[None, :] + o_d[:, None], acc[i], mask=m_row[None, :])
    gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
    gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)


@gluon.jit
def consume(tensors, q, rings, bars, probs, flags, score_scale, value_factor, place, strides, STAGES: gl.constexpr,
            c: gl.constexpr):  # fmt: skip
    """Attend the share [x, end) of all tiles, for one block of heads."""
    QN, QP, LENS, CU, OUT, LSE, PART, META = tensors
    max_segments, p, per, x, end, b, base = place
    _, _, _, _, so_t, so_h, sl_t, sl_h = strides
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    h = p % c.HEADS
    k = 0
    while x < end:
        b, base, segment, t0, t1, n, rows, q0, tiles = next_segment(LENS, CU, x, end, b, base, c)
        load_query(QN, QP, q, segment, h, q0, rows, strides, c)
        r0 = segment * c.ROWS
        m, l, acc = attend(q, rings, bars, probs, flags, score_scale, t0, t1, n, rows, r0, k, STAGES, S, c)
        k += t1 - t0
        tokens, heads, m_row = row_places(segment, h, q0, rows, ROW, c)
        l = gl.convert_layout(l, ROW)
        if t0 == 0:
            pieces = (base + (segment + 1) * tiles - 1) // per - p // c.HEADS + 1
            note_pieces(META, b, segment, max_segments, p, pieces, c)
        if t1 - t0 == tiles:
            factor, lse = finish(m, l, value_factor)
            store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, S, c)
            if c.HAS_LSE:
                gl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)
        else:
            slot = 2 * p + (t0 == 0).to(gl.int32)
            store_part(PART, slot, m, l, acc, m_row, S, c)
        x += t1 - t0


@gluon.jit
def mla_decode_few_kernel(
    QN, QP, BOX_C, BOX_P, BOX_S, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, nowhere, s_pitch, max_segments, sn_t, sn_h, sr_t, sr_h, st_b, so_t, so_h, sl_t, sl_h,
    STAGES: gl.constexpr, TURNS: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for one block of heads. TURNS is 1; kernels of other Choices take other numbers."""
    wait_for_previous()
    p = gl.program_id(0)
    num_programs = gl.num_programs(0)
    i_share, num_shares = p // c.HEADS, num_programs // c.HEADS
    META = meta_of(PART, num_programs, c)
    SMALL: gl.constexpr = c.BLOCK_B < 1024 and not c.WHOLE  # then BLOCK_B holds all requests
    if SMALL:
        loaded = load_tiles(LENS, CU, B, c, True)
    if c.RAGGED:
        padding = gl.load(CU + B).to(gl.int32)  # arrives with the lengths
    X: gl.constexpr = BOX_C.dtype
    ring_c = gl.allocate_shared_memory(X, [STAGES * BOXES, c.TILE, BOX], BOX_C.layout)
    ring_p = gl.allocate_shared_memory(X, [STAGES, c.TILE, BOX], BOX_P.layout)
    q = gl.allocate_shared_memory(X, [BOXES + 1, c.ROWS, BOX], gl.NVMMASharedLayout.get_default_for([c.ROWS, BOX], X))
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.TILE, c.ROWS], X)
    probs = gl.allocate_shared_memory(X, [1, c.TILE, c.ROWS], P)
    flags = gl.allocate_shared_memory(gl.int8, [1, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    full, free = barriers(STAGES), barriers(STAGES)
    scale_kv = scalar(kv_scale, KV_T, c.V_T)
    score_scale = scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E * scale_kv
    value_factor = scale_kv * scalar(out_scale, OUT_T, c.OUT_T)
    if SMALL:
        x, end, per, b, base = deal(loaded, i_share, num_shares, c)
    else:
        x, end, per = share(LENS, CU, B, i_share, num_shares, c)
        b, base = locate(LENS, CU, B, gl.minimum(x, end - 1), c)
    rings, bars = (ring_c, ring_p), (full, free)
    tensors = (QN, QP, LENS, CU, OUT, LSE, PART, META)
    strides = (sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h)
    place = (max_segments, p, per, x, end, b, base)
    work = (x, end, b, base, nowhere, s_pitch, st_b)
    thread_barrier()  # what partitions are given may lie where sums were read from
    # The producer is the default partition: it has four warps anyway.
    gl.warp_specialize(
        [
            (produce, ((BOX_C, BOX_P, BOX_S), TABLE, LENS, CU, bars, (ring_c, ring_p, ring_p), work, (), STAGES, c)),
            (consume, (tensors, q, rings, bars, probs, flags, score_scale, value_factor, place, strides, STAGES, c)),
        ],
        [4],
        [232],
    )  # fmt: skip
    if c.RAGGED:
        zero_padding(OUT, LSE, padding, T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
