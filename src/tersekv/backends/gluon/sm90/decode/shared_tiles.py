"""Decode with many query rows of a KV head: codes are converted once for all of them, in shared memory.

A program has one KV head. Rows are on M, 64 a warpgroup, keys on N; both products run as wgmma. What `attend`
and `tiles` are to few rows, this is to many; shares, copies and cut segments are the same. Threads meet twice a
tile: values are converted beside the first product, the next tile's keys beside the second. Columns lie in shared
memory where the conversions leave them (`column_of`).

Heads of at most 128 columns go by `rows64`. It cannot take 256: a thread's 255 registers do not hold the query (64)
beside the accumulator (128) and two tiles of scores (64), and shared memory, 227 KB, does not hold that of 128 rows
(64 KB) beside four fp16 tiles (128 KB) and two stages of codes (64 KB). Here are two tiles, and no scores ahead.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import reinterpret, thread_barrier
from ..parts.convert import SCALE_BYTE, key_parts, log2_and_inverse, scaled_e2m1
from ..parts.softmax import softcapped
from .attend import codes_of
from .fetch import advance, fetch
from .query import pointers_of
from .records import Buffers, State
from .rows import column_of, visible_of_tile
from .seen import live_keys
from .turns import turned_query


@gluon.constexpr_function
def score_layout(c, g):
    return gl.NVMMADistributedLayout([3, 0], [g.RB, 1], [16, c.TILE, 16])


@gluon.constexpr_function
def sum_layout(c, g):
    return gl.NVMMADistributedLayout([3, 0], [g.RB, 1], [16, c.PARTS * c.WORDS_V, 16])


@gluon.constexpr_function
def words_layout(W, c, g):
    """Layout of codes [keys, W]: a lane takes eight of a row, which become 16 bytes, so that no banks conflict."""
    lanes = W * c.PARTS // 8
    return gl.BlockedLayout([1, 8 // c.PARTS], [32 // lanes, lanes], [g.RB, 1], [1, 0])


@gluon.constexpr_function
def halves_layout(W, c, g):
    """The same of 4-bit codes as [keys, blocks, 2 halves, 2 words]."""
    return gl.BlockedLayout([1, 1, 1, 2], [64 // W, W // 4, 2, 1], [g.RB, 1, 1, 1], [3, 2, 1, 0])


@gluon.constexpr_function
def keeps_query(c):
    """Whether the query is held in registers and only passes through the buffer of the keys."""
    return c.ROWS == c.TILE and c.PARTS * c.WORDS_K <= 128


@gluon.constexpr_function
def keys_layout(g):
    return gl.BlockedLayout([1], [32], [g.RB], [0])


@gluon.constexpr_function
def bytes_layout(W, g):
    """Layout of block scales [keys, bytes] as they are loaded: a thread takes those of a key."""
    return gl.BlockedLayout([1, W // 4], [32, 1], [g.RB, 1], [1, 0])


@gluon.jit
def make_buffers(c: gl.constexpr, g: gl.constexpr):
    """(query, keys, values, scales): fp16 operands; stored scales of a tile, as `attend_segment` stores them."""
    D: gl.constexpr = c.PARTS * c.WORDS_K
    DV: gl.constexpr = c.PARTS * c.WORDS_V
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.ROWS, D], gl.float16)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.TILE, D], gl.float16)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.TILE, DV], gl.float16)
    k = gl.allocate_shared_memory(gl.float16, [c.TILE, D], K)
    if keeps_query(c):
        q = k
    else:
        q = gl.allocate_shared_memory(gl.float16, [c.ROWS, D], Q)
    v = gl.allocate_shared_memory(gl.float16, [c.TILE, DV], V)
    scales = ()
    if c.TOKEN_SCALES:
        for _ in gl.static_range(3):
            scales = scales + (gl.allocate_shared_memory(gl.float32, [c.TILE], gl.SwizzledSharedLayout(1, 1, 1, [0])),)
    if c.BLOCK_SCALES:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scales = (
            gl.allocate_shared_memory(gl.uint8, [c.TILE, c.WORDS_K // 4], PLAIN),
            gl.allocate_shared_memory(gl.uint8, [c.TILE, c.WORDS_V // 4], PLAIN),
        )
    return Buffers(q, k, v, scales)


@gluon.jit
def query_to_shared(tensors, strides, turns, segment, h, q_s, c: gl.constexpr, g: gl.constexpr):
    """A segment's query rows into shared memory, in fp16; a factor of their scores [ROWS] (see `query.operands_of`)."""
    D: gl.constexpr = c.PARTS * c.WORDS_K
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [g.RB, 1], [1, 0])
    o_r = segment.i * c.ROWS + gl.arange(0, c.ROWS, gl.SliceLayout(1, L))
    o_d = column_of(gl.arange(0, D, gl.SliceLayout(0, L)), c)
    p_row = pointers_of(tensors.Q, strides, segment.q0, h, o_r, c)
    x = gl.load(p_row[:, None] + o_d[None, :], mask=(o_r < segment.rows * c.GROUP)[:, None], other=0.0).to(gl.float32)
    x = turned_query(x, turns, 1, c, g)
    top = gl.max(gl.abs(x), 1)
    field = gl.maximum((top.to(gl.int32, bitcast=True) >> 23) & 0xFF, 1)
    inverse = (gl.maximum(254 - field, 1) << 23).to(gl.float32, bitcast=True)
    thread_barrier()  # products of the segment before may still read
    q_s.store((x * inverse[:, None]).to(gl.float16))
    factor = (field << 23).to(gl.float32, bitcast=True) * c.K_FACTOR
    return gl.convert_layout(factor, gl.SliceLayout(1, score_layout(c, g)))


@gluon.jit
def scale_places(tables, b, t, n, rows, wanted, L: gl.constexpr, c: gl.constexpr):
    """(page, slot, is wanted) of a tile's keys."""
    key = t * c.TILE + gl.arange(0, c.TILE, L)
    m = wanted & live_keys(key, n, rows, c)
    page = gl.load(tables.TABLE + b.to(gl.int64) * tables.stride + key // c.PAGE, mask=m, other=0).to(gl.int64)
    return page, key % c.PAGE, m


@gluon.jit
def scales_of_tile(S, places, h, VALUES: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Stored scales of a tile's keys or values: [TILE] fp32, or [TILE, blocks] bytes."""
    SIDE: gl.constexpr = g.V if VALUES else g.K
    W: gl.constexpr = c.WORDS_V if VALUES else c.WORDS_K
    page, slot, m = places
    if c.FAR:
        slot, h = slot.to(gl.int64), h.to(gl.int64)
    at = page * SIDE.SCALE_STRIDES[0] + slot * SIDE.SCALE_STRIDES[1] + h * SIDE.SCALE_STRIDES[2]
    if c.BLOCK_SCALES:
        o_i = gl.arange(0, W // 4, gl.SliceLayout(0, bytes_layout(W, g)))
        p_byte = S.to(gl.pointer_type(gl.uint8), bitcast=True) + at[:, None] + o_i[None, :]
        return gl.load(p_byte, mask=m[:, None], other=0)
    else:
        return gl.load(S + at, mask=m, other=1.0)


@gluon.jit
def stored_scales(boxes, tables, b, h, t, n, rows, wanted, c: gl.constexpr, g: gl.constexpr):
    """Stored scales of a tile, in registers; they are loaded a tile ahead."""
    if c.BLOCK_SCALES:
        K: gl.constexpr = gl.SliceLayout(1, bytes_layout(c.WORDS_K, g))
        V: gl.constexpr = gl.SliceLayout(1, bytes_layout(c.WORDS_V, g))
        return (
            scales_of_tile(boxes.KS, scale_places(tables, b, t, n, rows, wanted, K, c), h, False, c, g),
            scales_of_tile(boxes.VS, scale_places(tables, b, t, n, rows, wanted, V, c), h, True, c, g),
        )
    elif c.TOKEN_SCALES:
        places = scale_places(tables, b, t, n, rows, wanted, keys_layout(g), c)
        return scales_of_tile(boxes.KS, places, h, False, c, g), scales_of_tile(boxes.VS, places, h, True, c, g)
    else:
        return t, t


@gluon.jit
def convert(ring, scales, into, stage, t, n, rows, MASKED: gl.constexpr, VALUES: gl.constexpr,
            c: gl.constexpr, g: gl.constexpr):  # fmt: skip
    """A stage's codes → fp16 in shared memory [TILE, PARTS × W]; dead keys become zeros if MASKED."""
    W: gl.constexpr = c.WORDS_V if VALUES else c.WORDS_K
    SIDE: gl.constexpr = g.V if VALUES else g.K
    L: gl.constexpr = words_layout(W, c, g)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(SIDE.LAYOUT.swizzle_byte_width, 16, 2)
    for j in gl.static_range(gl.constexpr(g.COPIES)):
        if g.HALVES == 2:
            box = codes_of(ring[j], stage, W, g).reshape([g.COPY, W])
        else:
            box = reinterpret(ring[j], gl.int16, [g.STAGES, g.COPY, W], LAYOUT).index(stage)
        words = box.load(L)
        o_n = t * c.TILE + j * g.COPY + gl.arange(0, g.COPY, gl.SliceLayout(1, L))
        live = live_keys(o_n, n, rows, c)[:, None]
        if MASKED:
            words = gl.where(live, words, 0)
        if c.BLOCK_SCALES:
            factor = block_factor(scales[1 if VALUES else 0].slice(j * g.COPY, g.COPY), W, c, g)
            if MASKED:
                factor = gl.where(live, factor, 0.0)
            low0, low1, high0, high1 = scaled_e2m1(words, factor, True)
            x = gl.join(gl.join(low0, high0), gl.join(low1, high1))
            x = x.reshape([g.COPY, W // 2, 2, 2, 2]).permute([0, 1, 3, 4, 2])
        else:
            low, high = key_parts(words, c)
            x = gl.join(low, high).reshape([g.COPY, W // 2, 2, 2]).permute([0, 1, 3, 2])
        into.slice(j * g.COPY, g.COPY).store(x.reshape([g.COPY, c.PARTS * W]))


@gluon.jit
def block_factor(scales, W: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Block scales in shared memory [COPY, blocks] e4m3 → fp16 [COPY, W], as the codes lie."""
    L4: gl.constexpr = halves_layout(W, c, g)
    byte = scales.load(gl.SliceLayout(2, gl.SliceLayout(3, L4))).to(gl.int16)
    factor = gl.inline_asm_elementwise(SCALE_BYTE, "=h,h", [byte], gl.float16, True, 1)
    factor, _ = gl.broadcast(factor[:, :, None, None], gl.full([g.COPY, W // 4, 2, 2], 0, gl.float16, L4))
    return gl.convert_layout(factor.reshape([g.COPY, W]), words_layout(W, c, g), assert_trivial=True)


@gluon.jit
def softmax_step(s, m, l, scale, softcap, scales, t, by, MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """(maximum, sum, probabilities, factor of what was summed before) after a tile's products of query and keys."""
    S: gl.constexpr = score_layout(c, g)
    s = s * scale[:, None]
    if c.TOKEN_SCALES:
        s = s * scales[0].load(gl.SliceLayout(0, S))[None, :]
    if c.SOFTCAP:
        s = softcapped(s, softcap)
    if c.TOKEN_SCALES:  # as with few rows: the value's scale joins the exponent
        s = s + scales[1].load(gl.SliceLayout(0, S))[None, :]
    if MASKED:
        s = gl.where(visible_of_tile(t, by, c.ROWS, S, c), s, float("-inf"))
    m_new = gl.maximum(m, gl.max(s, 1))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    old = gl.exp2(m - base)
    p = gl.exp2(s - base[:, None])
    if c.TOKEN_SCALES:
        l = l * old + gl.sum(p * scales[2].load(gl.SliceLayout(0, S))[None, :], 1)
    else:
        l = l * old + gl.sum(p, 1)
    return m_new, l, p, old


@gluon.jit
def attend_segment(
    scale, softcap, cursor, turn, full, rings, boxes, tables, buffers, b, h0, t0, t1, u0, u1, by, end,
    c: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """Tiles [t0, t1) of a segment. Returns (state, cursor, turn)."""
    q_s, k_s, v_s, scale_s = buffers
    n, rows = by.keys, by.rows
    S: gl.constexpr = score_layout(c, g)
    O: gl.constexpr = sum_layout(c, g)
    m = gl.full([c.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.full([c.ROWS], 0, gl.float32, gl.SliceLayout(1, S))
    acc = gl.full([c.ROWS, c.PARTS * c.WORDS_V], 0, gl.float32, O)
    scales = stored_scales(boxes, tables, b, h0, t0, n, rows, True, c, g)
    if c.BLOCK_SCALES:
        scale_s[0].store(scales[0])
        thread_barrier()
    if keeps_query(c):
        thread_barrier()
        q = q_s.load(gl.DotOperandLayout(0, S, 2))
        thread_barrier()
    else:
        q = q_s
    mbarrier.wait(full[0].index(turn % g.STAGES), (turn // g.STAGES) & 1)
    convert(rings.k, scale_s, k_s, turn % g.STAGES, t0, n, rows, False, False, c, g)
    for t in range(t0, t1):
        stage = turn % g.STAGES
        if c.TOKEN_SCALES:
            scale_s[0].store(scales[0])
            log, inverse = log2_and_inverse(gl.maximum(scales[1], 1e-30))
            scale_s[1].store(log)
            scale_s[2].store(inverse)
        if c.BLOCK_SCALES:
            scale_s[1].store(scales[1])
        fence_async_shared()
        thread_barrier()  # keys are there, values may be overwritten
        zero = gl.full([c.ROWS, c.TILE], 0, gl.float32, S)
        s = warpgroup_mma(q, k_s.permute([1, 0]), zero, use_acc=False, is_async=True)
        scales = stored_scales(boxes, tables, b, h0, t + 1, n, rows, t + 1 < t1, c, g)
        mbarrier.wait(full[1].index(stage), (turn // g.STAGES) & 1)
        whole = (t >= u0) & (t < u1)
        if whole:
            convert(rings.v, scale_s, v_s, stage, t, n, rows, False, True, c, g)
        else:
            convert(rings.v, scale_s, v_s, stage, t, n, rows, True, True, c, g)
        s = warpgroup_mma_wait(0, [s])
        if whole:
            m, l, p, old = softmax_step(s, m, l, scale, softcap, scale_s, t, by, False, c, g)
        else:
            m, l, p, old = softmax_step(s, m, l, scale, softcap, scale_s, t, by, True, c, g)
        acc = acc * gl.convert_layout(old, gl.SliceLayout(1, O), assert_trivial=True)[:, None]
        right = gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, O, 2), assert_trivial=True)
        if c.BLOCK_SCALES:
            scale_s[0].store(scales[0])
        fence_async_shared()
        thread_barrier()  # values are there, keys may be overwritten, and the stage is free
        acc = warpgroup_mma(right, v_s, acc, is_async=True)
        fetch(cursor, turn + g.STAGES, full, boxes, rings, h0, end, c, g)
        cursor = advance(cursor, tables, end, c, g)
        turn += 1
        if t + 1 < t1:
            mbarrier.wait(full[0].index(turn % g.STAGES), (turn // g.STAGES) & 1)
            convert(rings.k, scale_s, k_s, turn % g.STAGES, t + 1, n, rows, False, False, c, g)
        acc = warpgroup_mma_wait(0, [acc])
    HN: gl.constexpr = gl.SliceLayout(1, O)
    m, l = gl.convert_layout(m, HN, assert_trivial=True), gl.convert_layout(l, HN, assert_trivial=True)
    return State(m, l, acc), cursor, turn
