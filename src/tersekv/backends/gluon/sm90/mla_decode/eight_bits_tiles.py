"""Tiles of 8-bit latents in MLA decode for few query rows (eight_bits.py): the query, scores, softmax and values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....triton.parts.tiles import E4M3_PTX
from ...versions import reinterpret, thread_barrier
from ..parts.schedule import row_places
from .records import State

VOTE_PTX = gl.constexpr(
    """{
    .reg .pred p;
    setp.gt.f32 p, $1, 0f00000000;
    vote.sync.any.pred p, p, 0xffffffff;
    selp.b32 $0, 1, 0, p;
    }"""
)
SLACK = gl.constexpr(8.0)  # probabilities are at most 2^SLACK before they are normalised, which fp16 holds
MIN_SCALE = gl.constexpr(1e-30)  # of a key's chunks: its reciprocal is finite


@gluon.jit
def unpack(words):
    """16-bit words → two fp16 tiles of their codes."""
    return gl.inline_asm_elementwise(E4M3_PTX, "=r,=r,r", [words], [gl.float16, gl.float16], True, 2)


@gluon.jit
def query_piece(p_row, m_row, FIRST: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns FIRST … of the query rows: [rows, COLUMNS]."""
    o_d = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return gl.load(p_row[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0)


@gluon.jit
def store_terms(x, place, TERMS: gl.constexpr):
    """Put x into the first rows of `place` as e4m3, and what that leaves of it into the rows behind."""
    ROWS: gl.constexpr = x.shape[0]
    high = x.to(gl.float8e4nv)
    place.slice(0, ROWS).store(high)
    if TERMS == 2:
        place.slice(ROWS, ROWS).store((x - high.to(gl.float32)).to(gl.float8e4nv))


@gluon.jit
def query_as_terms(tensors, q, segment, h, strides, ME: gl.constexpr, TURNS: gl.constexpr, TERMS: gl.constexpr,
                   LAYOUT: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """Put this warpgroup's share of the query's columns into shared memory; return a factor of the scores [ROWS].

    A power of two is taken out of each row so that its largest element lies in [128, 256): what is 2^-10 of that is
    still exact in two e4m3 terms.
    """
    q_r = q.rotary.index(0)
    CHUNKS: gl.constexpr = c.CHUNKS
    MINE: gl.constexpr = CHUNKS // TURNS
    WIDTH: gl.constexpr = 2 * c.CHUNK
    WIDTH_R: gl.constexpr = q_r.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = row_places(segment.i, h, segment.q0, segment.rows, gl.SliceLayout(1, L), c)
    p_c = tensors.QN + tokens * strides.qn_t + heads * strides.qn_h
    p_r = tensors.QP + tokens * strides.qp_t + heads * strides.qp_h
    # All loads are under way before the first is used.
    rotary, pieces = query_piece(p_r, m_row, 0, WIDTH_R, L), ()
    for i in gl.static_range(CHUNKS):
        pieces = pieces + (query_piece(p_c, m_row, i * WIDTH, WIDTH, L),)
    inverse = gl.full([c.ROWS], 1.0, gl.float32, gl.SliceLayout(1, L))
    factor = inverse
    if TERMS == 2:
        top = gl.max(gl.abs(rotary.to(gl.float32)), 1)
        for i in gl.static_range(CHUNKS):
            top = gl.maximum(top, gl.max(gl.abs(pieces[i].to(gl.float32)), 1))
        field = gl.maximum((top.to(gl.int32, bitcast=True) >> 23) & 0xFF, 8)
        inverse = ((261 - field) << 23).to(gl.float32, bitcast=True)
        factor = gl.where(field == 255, float("nan"), ((field - 7) << 23).to(gl.float32, bitcast=True))
    for i in gl.static_range(MINE):
        x = pieces[ME * MINE + i].to(gl.float32) * inverse[:, None]
        store_terms(x, q.latents.index(ME * MINE + i), TERMS)
    if ME == TURNS - 1:
        x = rotary.to(gl.float32) * inverse[:, None]
        if q_r.dtype == gl.bfloat16:
            q_r.store(x.to(gl.bfloat16))
        else:
            store_terms(x, q_r, TERMS)
    fence_async_shared()
    return gl.convert_layout(factor, LAYOUT)


@gluon.jit
def as_words(codes):
    """A tile of codes in shared memory, as 16-bit words."""
    return reinterpret(
        codes,
        gl.int16,
        [codes.shape[0], codes.shape[1] // 2],
        gl.NVMMASharedLayout(codes.layout.swizzle_byte_width, 16),
    )


@gluon.jit
def drop_stale(codes, slot, keys, c: gl.constexpr):
    """Rows behind the tile's last key become 0: a probability of 0 does not hide a NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    real = gl.arange(0, c.TILE, gl.SliceLayout(1, L)) < keys
    for i in range(c.CHUNKS):  # not unrolled: it is rare, and the loop around it should stay small
        place = as_words(codes.index(slot * c.CHUNKS + i))
        x = place.load(L)
        place.store(gl.where(real[:, None], x, 0))
    thread_barrier()  # here, or the compiler puts one behind the branch


@gluon.jit
def add_terms(s, S: gl.constexpr, TERMS: gl.constexpr):
    """Sums of the query's terms: fp32 [TILE, ROWS]."""
    if TERMS == 2:
        TILE: gl.constexpr = s.shape[0]
        ROWS: gl.constexpr = s.shape[1] // 2
        high, low = gl.split(gl.permute(gl.reshape(s, [TILE, 2, ROWS]), (0, 2, 1)))
        s = high + low
    return gl.convert_layout(s, S)


@gluon.jit
def values(codes, slot, i: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """A tile's i-th chunk of values, transposed, as two fp16 operands in registers."""
    return unpack(as_words(codes.index(slot * c.CHUNKS + i)).permute((1, 0)).load(gl.DotOperandLayout(0, O, 2)))


@gluon.jit
def scores(rings, slot, q, here, TERMS: gl.constexpr, S: gl.constexpr, S8: gl.constexpr, O: gl.constexpr,
           c: gl.constexpr):  # fmt: skip
    """(products of the tile's keys and the query rows: fp32 [TILE, ROWS], the first values where registers allow)."""
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary = rings.latents, rings.rotary
    q_c, q_r = q
    zero = gl.full([c.TILE, TERMS * c.ROWS], 0.0, gl.float32, S8)
    x = warpgroup_mma(rotary.index(slot), q_r.index(here).permute((1, 0)), zero, use_acc=False, is_async=True)
    first = ()
    if c.ROWS <= 16:
        xs = (x,)
        for i in gl.static_range(CHUNKS):
            q_i = q_c.index(here + i).permute((1, 0))
            xs = xs + (warpgroup_mma(codes.index(slot * CHUNKS + i), q_i, zero, use_acc=False, is_async=True),)
        first = values(codes, slot, 0, O, c)  # beside the products
        xs = warpgroup_mma_wait(0, xs)
        s = xs[0]
        for i in gl.static_range(CHUNKS):
            s += xs[i + 1]
    else:
        s = zero
        for i in gl.static_range(CHUNKS):
            x = warpgroup_mma_wait(0, [x])
            s = x if i == 0 else s + x
            q_i = q_c.index(here + i).permute((1, 0))
            x = warpgroup_mma(codes.index(slot * CHUNKS + i), q_i, zero, use_acc=False, is_async=True)
        s += warpgroup_mma_wait(0, [x])
    return add_terms(s, S, TERMS), first


@gluon.jit
def scaled_scores(rings, slot, q, here, scales, TERMS: gl.constexpr, S: gl.constexpr, S8: gl.constexpr,
                  c: gl.constexpr):  # fmt: skip
    """The products where each chunk of a key has a scale, and the rotary part is bf16."""
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary = rings.latents, rings.rotary
    q_c, q_r = q
    zero = gl.full([c.TILE, TERMS * c.ROWS], 0.0, gl.float32, S8)
    s = gl.full([c.TILE, c.ROWS], 0.0, gl.float32, S)
    s = warpgroup_mma(rotary.index(slot), q_r.index(here).permute((1, 0)), s, use_acc=False, is_async=True)
    if c.ROWS <= 16:
        xs = (s,)
        for i in gl.static_range(CHUNKS):
            q_i = q_c.index(here + i).permute((1, 0))
            xs = xs + (warpgroup_mma(codes.index(slot * CHUNKS + i), q_i, zero, use_acc=False, is_async=True),)
        xs = warpgroup_mma_wait(0, xs)
        s = xs[0]
        for i in gl.static_range(CHUNKS):
            s += add_terms(xs[i + 1], S, TERMS) * scales[i][:, None]
    else:
        s = warpgroup_mma_wait(0, [s])
        for i in gl.static_range(CHUNKS):
            q_i = q_c.index(here + i).permute((1, 0))
            x = warpgroup_mma(codes.index(slot * CHUNKS + i), q_i, zero, use_acc=False, is_async=True)
            s += add_terms(warpgroup_mma_wait(0, [x]), S, TERMS) * scales[i][:, None]
    return s


@gluon.jit
def scales_of_keys(place, keys, COLUMN: gl.constexpr):
    """The four scales of each key of a tile, [TILE] each; 1 behind the last key."""
    # Each thread holds those of its two rows of scores.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    x = place.load(L)
    real = gl.arange(0, 64, gl.SliceLayout(1, L)) < keys
    x = gl.where(real[:, None], x, 1.0)
    even, odd = gl.split(gl.reshape(x, [64, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    return (
        gl.convert_layout(s0, COLUMN), gl.convert_layout(s1, COLUMN), gl.convert_layout(s2, COLUMN),
        gl.convert_layout(s3, COLUMN),
    )  # fmt: skip


@gluon.jit
def add_values(acc, codes, slot, first, probs, ME: gl.constexpr, LEAN: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """acc + the tile's values, transposed, times the probabilities in shared memory [TILE, ROWS].

    With group scales there is a tile of probabilities for each chunk.

    LEAN: a chunk becomes fp16 only when the one before is multiplied, which needs fewer registers.
    """
    CHUNKS: gl.constexpr = c.CHUNKS
    out, done = (), ()
    for i in gl.static_range(CHUNKS):
        if LEAN and i > 0:
            done = done + warpgroup_mma_wait(0, [out[2 * i - 2], out[2 * i - 1]])
        v = first if i == 0 and len(first) == 2 else values(codes, slot, i, O, c)
        p = probs.index(ME * CHUNKS + i if c.GROUP_SCALES else ME)
        for j in gl.static_range(2):
            out = out + (warpgroup_mma(v[j], p, acc[2 * i + j], is_async=True),)
        if not LEAN and i > 0:
            done = done + warpgroup_mma_wait(2, [out[2 * i - 2], out[2 * i - 1]])
    return done + warpgroup_mma_wait(0, [out[2 * CHUNKS - 2], out[2 * CHUNKS - 1]])


@gluon.jit
def fold(p):
    """Sums over those keys of a tile of probabilities that one thread holds: [TILE / 16, 8, ROWS]."""
    return gl.sum(gl.reshape(p, [p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def any_higher(s, limit, flags, ME: gl.constexpr):
    """Whether any score lies above its row's limit: a vote in each warp, and a word of each in shared memory."""
    ROWS: gl.constexpr = s.shape[1]
    x = gl.reshape(s - limit[None, :], [4, 2, 8, ROWS // 8, 4, 2])
    x = gl.max(gl.max(gl.max(x, 5), 3), 1)  # of what one thread holds
    x = gl.inline_asm_elementwise(VOTE_PTX, "=r,f", [x], gl.int32, is_pure=False, pack=1)
    place = flags.index(ME)
    place.store(gl.reshape(gl.permute(x.to(gl.int8), (1, 2, 0)), [32, 4]))
    ALL: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 0]] * 5, [[0, 0]] * 2, [], [1, 4])
    return gl.max(gl.max(place.slice(0, 1).load(ALL).to(gl.int32), 1), 0) > 0


@gluon.jit
def raise_reference(m_new, m, l, acc, O: gl.constexpr):
    """(m_new, sums, accumulators), the latter two scaled from reference m to m_new."""
    L_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
    old = gl.exp2(m - gl.where(m_new == float("-inf"), 0.0, m_new))
    l = l * gl.convert_layout(old, L_COLUMN)[None, :][:, None, :]
    old = gl.convert_layout(old, gl.SliceLayout(0, O))
    out = ()
    for i in gl.static_range(len(acc)):
        out = out + (acc[i] * old[None, :],)
    return m_new, l, out


@gluon.jit
def attend_eight_bits(q, rings, bars, hand, scale, segment, k, ME: gl.constexpr, TURNS: gl.constexpr,
                      TERMS: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """Attend this warpgroup's tiles of a segment: running maximum [ROWS], sum [ROWS], accumulators."""
    S8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS * TERMS, 32])
    O: gl.constexpr = S
    t0, t1, n, rows, r0 = segment.t0, segment.t1, segment.keys, segment.rows, segment.i * c.ROWS
    probs, flags = hand.probs, hand.flags
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    CHUNKS: gl.constexpr = c.CHUNKS
    full, free = bars.full, bars.free
    BARRIERS: gl.constexpr = full.shape[0]
    m = gl.full([c.ROWS], float("-inf"), gl.float32, COLUMN)
    l = fold(gl.full([c.TILE, c.ROWS], 0.0, gl.float32, S))  # summed over all keys only at the end
    acc = ()
    for _ in gl.static_range(2 * CHUNKS):
        acc = acc + (gl.full([c.CHUNK, c.ROWS], 0.0, gl.float32, O),)
    o_k = gl.arange(0, c.TILE, gl.SliceLayout(1, S))
    position = n - rows + (r0 + gl.arange(0, c.ROWS, COLUMN)) // c.GROUP
    for t in range(t0 + ME, t1, TURNS):
        turn = k + t - t0
        slot = turn % STAGES
        mbarrier.wait(full.index(turn % BARRIERS), (turn // BARRIERS) & 1)
        if (t + 1) * c.TILE > n:
            drop_stale(rings.latents, slot, n - t * c.TILE, c)
        # NOTE: `here` is 0. A constant would make the compiler keep, and spill, the descriptor of every piece of q.
        here = t >> 30
        if c.GROUP_SCALES:
            scales = scales_of_keys(rings.scales.index(slot), n - t * c.TILE, gl.SliceLayout(1, S))
            s, first = scaled_scores(rings, slot, q, here, scales, TERMS, S, S8, c) * scale[None, :], ()
            # The key's largest scale joins the exponent, so that the probabilities that meet the codes lie in [0, 1].
            top = gl.full([c.TILE], MIN_SCALE, gl.float32, gl.SliceLayout(1, S))
            for i in gl.static_range(CHUNKS):
                top = gl.maximum(top, gl.abs(scales[i]))
            s += gl.log2(top)[:, None]
        else:
            s, first = scores(rings, slot, q, here, TERMS, S, S8, O, c)
            s *= scale[None, :]
        if (t + 1) * c.TILE > n - rows + 1:
            o_n = t * c.TILE + o_k
            s = gl.where((o_n < n)[:, None] & (o_n[:, None] <= position[None, :]), s, float("-inf"))
        # The reference of a row's exponents is raised only where powers would pass 2^SLACK: rarely.
        if any_higher(s, m + SLACK, flags, ME):
            m, l, acc = raise_reference(gl.maximum(m, gl.max(s, 0)), m, l, acc, O)
        base = gl.where(m == float("-inf"), 0.0, m)
        p = gl.exp2(s - base[None, :])
        if c.GROUP_SCALES:
            inverse = 1.0 / top
            l += fold(p * inverse[:, None])
            for i in gl.static_range(CHUNKS):
                probs.index(ME * CHUNKS + i).store((p * (scales[i] * inverse)[:, None]).to(gl.float16))
        else:
            l += fold(p)
            probs.index(ME).store(p.to(gl.float16))
        fence_async_shared()
        acc = add_values(acc, rings.latents, slot, first, probs, ME, c.ROWS >= 32, O, c)
        mbarrier.arrive(free.index(slot))
    return State(m, gl.sum(gl.sum(l, 1), 0), acc)
