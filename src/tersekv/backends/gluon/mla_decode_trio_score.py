"""The scoring warpgroup of MLA decode over 8-bit latents (mla_decode_trio.py): query, scores and softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .mla_decode_codes import query_piece
from .pipeline import signal
from .schedule import finish, next_segment, note_pieces

TILE = gl.constexpr(64)  # keys
ROWS = gl.constexpr(64)  # query rows of a segment
LANES = gl.constexpr(4)  # that share a row of scores
PARTS = gl.constexpr(2)  # of a tile's keys: as many become fp16 at once
PART_KEYS = gl.constexpr(TILE.value // PARTS.value)
TURNS = gl.constexpr(2)  # tiles of probabilities in shared memory
SLACK = gl.constexpr(8.0)  # probabilities are at most 2^SLACK before they are normalised, which fp16 holds
MIN_SCALE = gl.constexpr(1e-30)  # of scores, and of a key's pieces: −inf times it is −inf, its reciprocal is finite
# Of two rows: highest scores among the keys that a thread holds, references → references, and whether any of the warp's
# are new. A reference is raised to the row's highest score only where powers would pass 2^SLACK: rarely.
RAISE_PTX = gl.constexpr(
    """{
    .reg .pred p, q;
    .reg .f32 a, b, x, y, z;
    add.f32 a, $6, 0f41000000;
    add.f32 b, $7, 0f41000000;
    setp.gt.f32 p, $4, a;
    setp.gt.or.f32 p, $5, b, p;
    vote.sync.any.pred q, p, 0xffffffff;
    mov.f32 $0, $6;
    mov.f32 $1, $7;
    selp.b32 $2, 1, 0, q;
    mov.b32 $3, $2;
    @!q bra DONE;
    shfl.sync.bfly.b32 x, $4, 1, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 y, $5, 1, 0x1f, 0xffffffff;
    max.f32 x, x, $4;
    max.f32 y, y, $5;
    shfl.sync.bfly.b32 z, x, 2, 0x1f, 0xffffffff;
    max.f32 x, x, z;
    shfl.sync.bfly.b32 z, y, 2, 0x1f, 0xffffffff;
    max.f32 y, y, z;
    setp.gt.f32 p, x, a;
    selp.f32 $0, x, $6, p;
    setp.gt.f32 p, y, b;
    selp.f32 $1, y, $7, p;
    DONE:
    }"""
)


@gluon.jit
def places(o_r, segment, h, q0, rows, c: gl.constexpr):
    """(tokens, query heads, row is real) of rows o_r of a block of query rows."""
    o_r += segment * c.ROWS
    return (q0 + o_r // c.GROUP).to(gl.int64), (h * c.GROUP + o_r % c.GROUP).to(gl.int64), o_r < rows * c.GROUP


@gluon.jit
def load_rows(QN, QP, segment, h, q0, rows, strides, FIRST: gl.constexpr, COUNT: gl.constexpr, WIDTH_R: gl.constexpr,
              c: gl.constexpr):  # fmt: skip
    """Start the loads of query rows FIRST …: their pieces of 128 columns, and last the rotary one."""
    sn_t, sn_h, sr_t, sr_h = strides
    CHUNKS: gl.constexpr = c.CHUNKS
    WIDTH: gl.constexpr = 2 * c.CHUNK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_r = FIRST + gl.arange(0, COUNT, gl.SliceLayout(1, L))
    tokens, heads, m_row = places(o_r, segment, h, q0, rows, c)
    p_c, p_r = QN + tokens * sn_t + heads * sn_h, QP + tokens * sr_t + heads * sr_h
    pieces = ()
    for i in gl.static_range(CHUNKS):
        pieces = pieces + (query_piece(p_c, m_row, i * WIDTH, WIDTH, L),)
    return pieces + (query_piece(p_r, m_row, 0, WIDTH_R, L),)


@gluon.jit
def store_terms(x, place, FIRST: gl.constexpr, TERMS: gl.constexpr):
    """Put x into shared memory as e4m3, and behind all rows what that leaves of it."""
    COUNT: gl.constexpr = x.shape[0]
    high = x.to(gl.float8e4nv)
    place.slice(FIRST, COUNT).store(high)
    if TERMS == 2:
        place.slice(ROWS + FIRST, COUNT).store((x - high.to(gl.float32)).to(gl.float8e4nv))


@gluon.jit
def store_rows(pieces, q, factors, sign, FIRST: gl.constexpr, TERMS: gl.constexpr, c: gl.constexpr):
    """Put query rows FIRST … into shared memory, times sign, and a factor of their scores.

    A power of two is taken out of each row so that its largest element lies in [128, 256): what is 2^-10 of that is
    still exact in two e4m3 terms.
    """
    q_c, q_r = q
    CHUNKS: gl.constexpr = c.CHUNKS
    COUNT: gl.constexpr = pieces[0].shape[0]
    ROW: gl.constexpr = gl.SliceLayout(1, pieces[0].type.layout)
    factor = gl.full([COUNT], 1.0, gl.float32, ROW)
    inverse = factor
    if TERMS == 2:
        top = gl.full([COUNT], 0.0, gl.float32, ROW)
        for i in gl.static_range(CHUNKS + 1):
            top = gl.maximum(top, gl.max(gl.abs(pieces[i].to(gl.float32)), 1))
        field = gl.maximum((top.to(gl.int32, bitcast=True) >> 23) & 0xFF, 8)
        inverse = ((261 - field) << 23).to(gl.float32, bitcast=True)
        factor = gl.where(field == 255, float("nan"), ((field - 7) << 23).to(gl.float32, bitcast=True))
    factors.slice(FIRST, COUNT).store(factor)
    inverse *= sign
    for i in gl.static_range(CHUNKS):
        store_terms(pieces[i].to(gl.float32) * inverse[:, None], q_c.index(i), FIRST, TERMS)
    x = pieces[CHUNKS].to(gl.float32) * inverse[:, None]
    if q_r.dtype == gl.bfloat16:
        q_r.slice(FIRST, COUNT).store(x.to(gl.bfloat16))
    else:
        store_terms(x, q_r, FIRST, TERMS)


@gluon.jit
def load_query(QN, QP, q, factors, segment, h, q0, rows, scale, strides, TERMS: gl.constexpr, LAYOUT: gl.constexpr,
               c: gl.constexpr):  # fmt: skip
    """Put the query rows into shared memory, and return a factor of their scores [ROWS], which is positive."""
    COUNT: gl.constexpr = ROWS if TERMS == 1 else 16  # as many as registers hold twice
    WIDTH_R: gl.constexpr = q[1].shape[1]
    sign = gl.where(scale < 0, -1.0, 1.0)
    after = load_rows(QN, QP, segment, h, q0, rows, strides, 0, COUNT, WIDTH_R, c)
    for i in gl.static_range(ROWS // COUNT):
        pieces = after
        if (i + 1) * COUNT < ROWS:
            after = load_rows(QN, QP, segment, h, q0, rows, strides, (i + 1) * COUNT, COUNT, WIDTH_R, c)
        store_rows(pieces, q, factors, sign, i * COUNT, TERMS, c)
    fence_async_shared()
    gl.thread_barrier()
    factor = factors.load(LAYOUT) * (scale * sign)
    return gl.where(factor < MIN_SCALE, MIN_SCALE, factor)


@gluon.jit
def load_scales(place, columns, ratios, first, keys):
    """Leave a tile's group scales where they are wanted; behind the last key they are 1.

    columns: fp32 [6, TILE], for the scores: the four scales, the base-2 logarithm of the largest, its reciprocal
    ratios:  fp16 [4 * STAGES, TILE], for the values, from `first` on: the four scales as parts of the largest
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    x = place.load(L)
    real = gl.arange(0, TILE, gl.SliceLayout(1, L)) < keys
    x = gl.where(real[:, None], x, 1.0)
    top = gl.maximum(gl.max(gl.abs(x), 1), MIN_SCALE)
    inverse = 1.0 / top
    columns.index(4).store(gl.log2(top))
    columns.index(5).store(inverse)
    even, odd = gl.split(gl.reshape(x, [TILE, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    of_groups = (s0, s1, s2, s3)
    for i in gl.static_range(4):
        column = of_groups[i]
        columns.index(i).store(column)
        ratios.index(first + i).store((column * gl.convert_layout(inverse, column.type.layout)).to(gl.float16))


@gluon.jit
def whole_piece(q_i, k_i, x, TERMS: gl.constexpr):
    """Start the products of a piece of the query's columns, of both terms, and of a tile's."""
    if TERMS == 2:
        x = warpgroup_mma(q_i.slice(ROWS, ROWS), k_i, x, use_acc=False, is_async=True)
        return warpgroup_mma(q_i.slice(0, ROWS), k_i, x, is_async=True)
    else:
        return warpgroup_mma(q_i, k_i, x, use_acc=False, is_async=True)


@gluon.jit
def scores(rings, q, slot, here, TERMS: gl.constexpr, S: gl.constexpr, c: gl.constexpr):
    """Products of the query rows and the tile's keys: fp32 [ROWS, TILE]."""
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary, _ = rings
    q_c, q_r = q
    k_r = rotary.index(slot).permute((1, 0))
    zero = gl.full([ROWS, TILE], 0.0, gl.float32, S)
    if TERMS == 2:
        # The second terms are 2^-4 of the first: all of them fit into the first piece's accumulator.
        x = warpgroup_mma(q_r.index(here).slice(ROWS, ROWS), k_r, zero, use_acc=False, is_async=True)
        for i in gl.static_range(CHUNKS):
            k_i = codes.index(slot * CHUNKS + i).permute((1, 0))
            x = warpgroup_mma(q_c.index(here + i).slice(ROWS, ROWS), k_i, x, is_async=True)
        x = warpgroup_mma(q_r.index(here).slice(0, ROWS), k_r, x, is_async=True)
    else:
        x = warpgroup_mma(q_r.index(here), k_r, zero, use_acc=False, is_async=True)
    s = zero
    # One accumulator is in flight while the one before is added.
    for i in gl.static_range(CHUNKS):
        k_i = codes.index(slot * CHUNKS + i).permute((1, 0))
        after = warpgroup_mma(q_c.index(here + i).slice(0, ROWS), k_i, zero, use_acc=False, is_async=True)
        x = warpgroup_mma_wait(1, [x])
        s = x if i == 0 else s + x
        x = after
    return s + warpgroup_mma_wait(0, [x])


@gluon.jit
def scaled_scores(rings, q, slot, here, columns, TERMS: gl.constexpr, S: gl.constexpr, c: gl.constexpr):
    """The same where each piece of a key has a scale, and the rotary part is bf16."""
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary, _ = rings
    q_c, q_r = q
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    S_R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zero = gl.full([ROWS, TILE], 0.0, gl.float32, S)
    none = gl.full([ROWS, TILE], 0.0, gl.float32, S_R)
    r = warpgroup_mma(q_r.index(here), rotary.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
    x = whole_piece(q_c.index(here), codes.index(slot * CHUNKS).permute((1, 0)), zero, TERMS)
    s = gl.convert_layout(warpgroup_mma_wait(TERMS, [r]), S)
    for i in gl.static_range(1, CHUNKS):
        after = whole_piece(q_c.index(here + i), codes.index(slot * CHUNKS + i).permute((1, 0)), zero, TERMS)
        s += warpgroup_mma_wait(TERMS, [x]) * columns.index(i - 1).load(ROW)[None, :]
        x = after
    return s + warpgroup_mma_wait(0, [x]) * columns.index(CHUNKS - 1).load(ROW)[None, :]


@gluon.jit
def hide(s, t, n, rows, r0, c: gl.constexpr):
    """Scores of tile t with −inf where a query row does not see a key."""
    S: gl.constexpr = s.type.layout
    if (t + 1) * TILE > n - rows + 1:
        o_n = t * TILE + gl.arange(0, TILE, gl.SliceLayout(0, S))
        position = n - rows + (r0 + gl.arange(0, ROWS, gl.SliceLayout(1, S))) // c.GROUP
        s = gl.where((o_n < n)[None, :] & (o_n[None, :] <= position[:, None]), s, float("-inf"))
    return s


@gluon.jit
def by_lane(s):
    """A tile of scores with those keys apart that other lanes hold: [ROWS, TILE / 8, LANES, 2]."""
    return gl.reshape(s, [ROWS, TILE // 8, LANES, 2])


@gluon.jit
def highest(s):
    """Of each row the highest among the scores that one thread holds: [ROWS, LANES]."""
    return gl.max(gl.max(by_lane(s), 3), 1)


@gluon.jit
def folded(w):
    """Sums of those probabilities of each row that one thread holds: [ROWS, LANES]."""
    return gl.sum(gl.sum(by_lane(w), 3), 1)


@gluon.jit
def weigh(s, scale, base, c: gl.constexpr):
    """2^(s * scale − base), where the scores are not yet scaled."""
    base = base[:, None, :][:, :, :, None]
    x = by_lane(s)
    if not c.GROUP_SCALES:
        L: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, x.type.layout)))
        x *= gl.convert_layout(scale, L)[:, None][:, :, None][:, :, :, None]
    return gl.convert_layout(gl.reshape(gl.exp2(x - base), [ROWS, TILE]), s.type.layout)


@gluon.jit
def halves(x):
    """The left and the right half of a tile's columns."""
    N: gl.constexpr = x.shape[1] // 2
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, N]), (0, 2, 1)))


@gluon.jit
def hand_over(p, probs, turn):
    """Write a tile of probabilities where those who add values read it, by halves of its keys."""
    left, right = halves(p.to(gl.float16))
    probs.index(turn * PARTS).store(left)
    probs.index(turn * PARTS + 1).store(right)


@gluon.jit
def score(tensors, q, rings, bars, hand, scale_in, value_factor, place, strides, STAGES: gl.constexpr,
          TERMS: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """The scoring warpgroup's part of the share [x, end).

    Of every tile it hands over probabilities and factors for what the others hold so far; at a segment's end it takes
    one more turn, for the factors of the result.
    """
    QN, QP, LENS, CU, _, LSE, PART, META = tensors
    max_segments, p, per, x, end, b, base = place
    sn_t, sn_h, sr_t, sr_h, _, _, sl_t, sl_h = strides
    full, free, given, taken = bars
    probs, notes, flags, factors, columns, ratios = hand
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    T: gl.constexpr = highest(gl.full([ROWS, TILE], 0.0, gl.float32, S)).type.layout
    h = p % c.HEADS
    k, turn = 0, 0
    while x < end:
        b, base, segment, t0, t1, n, rows, q0, tiles = next_segment(LENS, CU, x, end, b, base, c)
        scale = load_query(
            QN, QP, (q[0], q[1].index(0)), factors, segment, h, q0, rows, scale_in, (sn_t, sn_h, sr_t, sr_h), TERMS,
            ROW, c,
        )  # fmt: skip
        m = gl.full([ROWS, LANES], float("-inf"), gl.float32, T)
        l = gl.full([ROWS, LANES], 0.0, gl.float32, T)
        for t in range(t0, t1):
            slot = k % STAGES
            mbarrier.wait(full.index(slot), (k // STAGES) & 1)
            # NOTE: t >> 30 is 0. A constant would make the compiler keep, and spill, descriptors of all pieces of q.
            if c.GROUP_SCALES:
                load_scales(rings[2].index(slot), columns, ratios, slot * c.CHUNKS, n - t * TILE)
                s = scaled_scores(rings, q, slot, t >> 30, columns, TERMS, S, c)
                # The key's largest scale joins the exponent: the ratios that meet the codes lie in [−1, 1].
                s = s * scale[:, None] + columns.index(4).load(gl.SliceLayout(0, S))[None, :]
            else:
                s = scores(rings, q, slot, t >> 30, TERMS, S, c)
            signal(free.index(slot))
            s = hide(s, t, n, rows, segment * c.ROWS, c)
            top = highest(s)
            if not c.GROUP_SCALES:
                top *= gl.convert_layout(scale, gl.SliceLayout(1, T))[:, None]
            raised, new = gl.inline_asm_elementwise(
                RAISE_PTX, "=&f,=&f,=&r,=&r,f,f,f,f", [top, m], [gl.float32, gl.int32], False, 2
            )
            base_m = gl.where(raised == float("-inf"), 0.0, raised)
            old = gl.where(raised == m, 1.0, gl.exp2(m - base_m))
            m = raised
            w = weigh(s, scale, base_m, c)
            if c.GROUP_SCALES:
                l = l * old + folded(w * columns.index(5).load(gl.SliceLayout(0, S))[None, :])
            else:
                l = l * old + folded(w)
            mbarrier.wait(taken.index(turn % TURNS), ((turn // TURNS) & 1) ^ 1)
            hand_over(w, probs, turn % TURNS)
            notes.index(turn % TURNS).store(old)
            flags.index(turn % TURNS).store(gl.permute(gl.reshape(new.to(gl.int8), [4, 16, LANES]), (1, 2, 0)))
            fence_async_shared()
            signal(given.index(turn % TURNS))
            k += 1
            turn += 1
        m, l = gl.max(m, 1), gl.sum(l, 1)
        factor, lse = finish(m, l, value_factor)
        mbarrier.wait(taken.index(turn % TURNS), ((turn // TURNS) & 1) ^ 1)
        notes.index(turn % TURNS).store(factor[:, None] + gl.full([ROWS, LANES], 0.0, gl.float32, T))
        signal(given.index(turn % TURNS))
        turn += 1
        o_r = gl.arange(0, ROWS, gl.SliceLayout(1, T))
        tokens, heads, m_row = places(o_r, segment, h, q0, rows, c)
        if t0 == 0:
            pieces = (base + (segment + 1) * tiles - 1) // per - p // c.HEADS + 1
            note_pieces(META, b, segment, max_segments, p, pieces, c)
        if t1 - t0 == tiles:
            if c.HAS_LSE:
                gl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)
        else:
            part = 2 * p + (t0 == 0).to(gl.int32)
            p_row = PART + (part.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
            gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
            gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)
        x += t1 - t0
