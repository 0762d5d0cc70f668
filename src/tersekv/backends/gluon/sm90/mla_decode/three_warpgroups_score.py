"""The scoring warpgroup of MLA decode over 8-bit latents (three_warpgroups.py): query, scores and softmax."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import thread_barrier
from ..parts.raising import RAISE_PTX
from ..parts.ring import signal
from ..parts.schedule import finish, next_segment, note_pieces, pieces_from
from .records import through_memory
from .three_warpgroups_query import ROWS, Block, places, score_factors
from .three_warpgroups_scales import SCALES

TILE = gl.constexpr(64)  # keys
LANES = gl.constexpr(4)  # that share a row of scores
PARTS = gl.constexpr(2)  # of a tile's keys: as many become fp16 at once
PART_KEYS = gl.constexpr(TILE.value // PARTS.value)
TURNS = gl.constexpr(2)  # tiles of probabilities in shared memory
BATCHES = gl.constexpr(3)  # of products that run beside the softmax


@gluon.jit
def whole_piece(q_i, k_i, x, TERMS: gl.constexpr):
    """Start the products of a piece of the query's columns, of both terms, and of a tile's."""
    if TERMS == 2:
        x = warpgroup_mma(q_i.slice(ROWS, ROWS), k_i, x, use_acc=False, is_async=True)
        return warpgroup_mma(q_i.slice(0, ROWS), k_i, x, is_async=True)
    else:
        return warpgroup_mma(q_i, k_i, x, use_acc=False, is_async=True)


@gluon.jit
def first_products(rings, q, slot, here, x, batch: gl.constexpr, c: gl.constexpr):
    """Start a batch, of BATCHES, of the products of the query's second terms, and the rotary ones, and a tile's keys.

    The second terms are 2^-4 of the first: all of them fit into one accumulator. The matrix unit takes only some
    products before a warp that starts more has to wait: so they start in batches, with other work between.
    """
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary = rings.latents, rings.rotary
    q_c, q_r = q
    k_r = rotary.index(slot).permute((1, 0))
    if batch == 0:
        x = warpgroup_mma(q_r.index(here).slice(ROWS, ROWS), k_r, x, use_acc=False, is_async=True)
    for i in gl.static_range(CHUNKS):
        if (i + 1) // 2 == batch:
            k_i = codes.index(slot * CHUNKS + i).permute((1, 0))
            x = warpgroup_mma(q_c.index(here + i).slice(ROWS, ROWS), k_i, x, is_async=True)
    if batch == BATCHES - 1:
        x = warpgroup_mma(q_r.index(here).slice(0, ROWS), k_r, x, is_async=True)
    return x


@gluon.jit
def let_go(bar, there_is):
    """Make known the probabilities of the tile before, if there is one.

    Its values should meet the matrix unit beside this tile's softmax, not take turns with its scores.
    """
    thread_barrier()
    mbarrier.arrive(bar, pred=there_is)


@gluon.jit
def scores(rings, q, begun, slot, here, before, TERMS: gl.constexpr, S: gl.constexpr, c: gl.constexpr):
    """Products of the query rows and the tile's keys: fp32 [ROWS, TILE]; of two terms, the first are in `begun`.

    before: of one term, the arguments of `let_go`, once all products have started
    """
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary = rings.latents, rings.rotary
    q_c, q_r = q
    zero = gl.full([ROWS, TILE], 0.0, gl.float32, S)
    q_0, k_0 = q_c.index(here).slice(0, ROWS), codes.index(slot * CHUNKS).permute((1, 0))
    x = warpgroup_mma(q_0, k_0, zero, use_acc=False, is_async=True)
    s = begun
    if TERMS == 1:
        after = warpgroup_mma(q_r.index(here), rotary.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(1, [x])
        x = after
    # One accumulator is in flight while the one before is added.
    for i in gl.static_range(1, CHUNKS):
        k_i = codes.index(slot * CHUNKS + i).permute((1, 0))
        after = warpgroup_mma(q_c.index(here + i).slice(0, ROWS), k_i, zero, use_acc=False, is_async=True)
        if TERMS == 1 and i == CHUNKS - 1:
            let_go(before[0], before[1])
        s += warpgroup_mma_wait(1, [x])
        x = after
    return s + warpgroup_mma_wait(0, [x])


@gluon.jit
def scaled_scores(rings, q, slot, here, columns, bar, phase, before, TERMS: gl.constexpr, S: gl.constexpr,
                  c: gl.constexpr):  # fmt: skip
    """The same where each piece of a key has a scale, and the rotary part is bf16.

    The scales are in `columns` as `spread_scales` leaves them, once the barrier's phase is over.
    """
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary = rings.latents, rings.rotary
    q_c, q_r = q
    ROW: gl.constexpr = gl.SliceLayout(0, S)
    S_R: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    zero = gl.full([ROWS, TILE], 0.0, gl.float32, S)
    none = gl.full([ROWS, TILE], 0.0, gl.float32, S_R)
    r = warpgroup_mma(q_r.index(here), rotary.index(slot).permute((1, 0)), none, use_acc=False, is_async=True)
    x = whole_piece(q_c.index(here), codes.index(slot * CHUNKS).permute((1, 0)), zero, TERMS)
    mbarrier.wait(bar, phase)
    s = gl.convert_layout(warpgroup_mma_wait(TERMS, [r]), S)
    for i in gl.static_range(1, CHUNKS):
        after = whole_piece(q_c.index(here + i), codes.index(slot * CHUNKS + i).permute((1, 0)), zero, TERMS)
        if i == CHUNKS - 1:
            let_go(before[0], before[1])
        s += warpgroup_mma_wait(TERMS, [x]) * columns.index(SCALES * slot + i - 1).load(ROW)[None, :]
        x = after
    return s + warpgroup_mma_wait(0, [x]) * columns.index(SCALES * slot + CHUNKS - 1).load(ROW)[None, :]


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
def score(tensors, q, rings, bars, hand, scales, share, strides, STAGES: gl.constexpr, AHEAD: gl.constexpr,
          TERMS: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """The scoring warpgroup's part of the share.

    Of every tile it hands over probabilities and factors for what the others hold so far; at a segment's end it takes
    one more turn, for the factors of the result.
    """
    p, x, end, b, base = share.p, share.x, share.end, share.b, share.base
    full, free, given, taken = bars.full, bars.free, bars.given, bars.taken
    notes, flags, columns, box = hand.notes, hand.flags, hand.columns, hand.box
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 32])
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    T: gl.constexpr = highest(gl.full([ROWS, TILE], 0.0, gl.float32, S)).type.layout
    h = p % c.HEADS
    k, turn, count = 0, 0, 0
    while x < end:
        segment = next_segment(tensors.LENS, tensors.CU, x, end, b, base, c)
        b, base, t0, t1, n = segment.b, segment.base, segment.t0, segment.t1, segment.keys
        if c.GROUP_SCALES:  # else the compiler sees it by itself
            t0, t1, n = through_memory(box, 0, t0), through_memory(box, 1, t1), through_memory(box, 2, n)
        mbarrier.wait(bars.ready.index(0), count & 1)
        scale = score_factors(hand.factors, scales.score, ROW)
        m = gl.full([ROWS, LANES], float("-inf"), gl.float32, T)
        l = gl.full([ROWS, LANES], 0.0, gl.float32, T)
        zero = gl.full([ROWS, TILE], 0.0, gl.float32, S)
        begun = zero
        if AHEAD:
            mbarrier.wait(full.index(k % STAGES), (k // STAGES) & 1)
            for i in gl.static_range(BATCHES):
                begun = first_products(rings, q, k % STAGES, t0 >> 30, begun, i, c)
            begun = warpgroup_mma_wait(0, [begun])
        for t in range(t0, t1):
            slot = k % STAGES
            if not AHEAD:
                mbarrier.wait(full.index(slot), (k // STAGES) & 1)
            before = (given.index((turn + 1) % TURNS), t > t0)
            # NOTE: t >> 30 is 0. A constant would make the compiler keep, and spill, descriptors of all pieces of q.
            if c.GROUP_SCALES:
                phase = (k // STAGES) & 1
                s = scaled_scores(rings, q, slot, t >> 30, columns, bars.spread.index(slot), phase, before, TERMS, S, c)
                # The key's largest scale joins the exponent: the ratios that meet the codes lie in [−1, 1].
                s = s * scale[:, None] + columns.index(SCALES * slot + 4).load(gl.SliceLayout(0, S))[None, :]
            else:
                s = scores(rings, q, begun, slot, t >> 30, before, TERMS, S, c)
            if not c.GROUP_SCALES:
                signal(free.index(slot))
            if AHEAD:  # what follows runs beside the next tile's first products; after the last, they are of anything
                next_slot = (k + 1) % STAGES
                mbarrier.wait(full.index(next_slot), ((k + 1) // STAGES) & 1, pred=t + 1 < t1)
                begun = first_products(rings, q, next_slot, t >> 30, zero, 0, c)
            s = hide(s, t, n, segment.rows, segment.i * c.ROWS, c)
            top = highest(s)
            if not c.GROUP_SCALES:
                top *= gl.convert_layout(scale, gl.SliceLayout(1, T))[:, None]
            raised, new = gl.inline_asm_elementwise(
                RAISE_PTX, "=&f,=&f,=&r,=&r,f,f,f,f", [top, m], [gl.float32, gl.int32], False, 2
            )
            base_m = gl.where(raised == float("-inf"), 0.0, raised)
            old = gl.where(raised == m, 1.0, gl.exp2(m - base_m))
            m = raised
            if AHEAD:
                begun = first_products(rings, q, next_slot, t >> 30, begun, 1, c)
            w = weigh(s, scale, base_m, c)
            if c.GROUP_SCALES:
                l = l * old + folded(w * columns.index(SCALES * slot + 5).load(gl.SliceLayout(0, S))[None, :])
                signal(free.index(slot))
            else:
                l = l * old + folded(w)
            if AHEAD:
                begun = first_products(rings, q, next_slot, t >> 30, begun, 2, c)
            mbarrier.wait(taken.index(turn % TURNS), ((turn // TURNS) & 1) ^ 1)
            hand_over(w, hand.probs, turn % TURNS)
            notes.index(turn % TURNS).store(old)
            flags.index(turn % TURNS).store(gl.permute(gl.reshape(new.to(gl.int8), [4, 16, LANES]), (1, 2, 0)))
            fence_async_shared()
            if AHEAD:
                signal(given.index(turn % TURNS))
                begun = warpgroup_mma_wait(0, [begun])
            k += 1
            turn += 1
        if not AHEAD:
            signal(given.index((turn + 1) % TURNS))
        m, l = gl.max(m, 1), gl.sum(l, 1)
        factor, lse = finish(m, l, scales.value)
        mbarrier.wait(taken.index(turn % TURNS), ((turn // TURNS) & 1) ^ 1)
        notes.index(turn % TURNS).store(factor[:, None] + gl.full([ROWS, LANES], 0.0, gl.float32, T))
        signal(given.index(turn % TURNS))
        turn += 1
        count += 1
        o_r = gl.arange(0, ROWS, gl.SliceLayout(1, T))
        tokens, heads, m_row = places(o_r, Block(segment.i, h, segment.q0, segment.rows), c)
        if t0 == 0:
            pieces = pieces_from(segment, share.per, p // c.HEADS)
            note_pieces(tensors.META, b, segment.i, share.max_segments, p, pieces, c)
        if t1 - t0 == segment.tiles:
            if c.HAS_LSE:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            part = 2 * p + (t0 == 0).to(gl.int32)
            p_row = tensors.PART + (part.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
            gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
            gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)
        x += t1 - t0
