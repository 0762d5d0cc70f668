"""The converting warpgroup of decode with many query rows (rows64.py): copies of codes, and fp16 tiles of them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import reinterpret, thread_barrier
from ..parts.convert import SCALE_BYTE, int4_in_rows, key_parts, log2_and_inverse, scaled_e2m1
from ..parts.ring import place_of, signal, wait_free
from ..parts.schedule import request_at, request_tiles, segment_at
from .attend import zero_bits
from .fetch import advance, cursor_at, fetch
from .seen import live_keys

SCALE_TURNS = gl.constexpr(4)  # tiles of stored scales in shared memory
# Of a tile's stored scales there: of keys; of values logarithms and reciprocals; zero points of values and keys.
KINDS = gl.constexpr(4)


@gluon.constexpr_function
def words_a_lane(W, g):
    return max(4, min(8, W // (4 if g.COPY >= 32 else 8)))


@gluon.constexpr_function
def words_layout(W, g):
    """Layout of codes [keys, W]: eight lanes have the same columns of as many keys, which lie in different banks."""
    down = min(4, g.COPY // 8)
    return gl.BlockedLayout([1, words_a_lane(W, g)], [8, 4], [down, 4 // down], [0, 1])


@gluon.constexpr_function
def blocks_layout(W, g):
    """The same of 4-bit codes as [keys, blocks, 4 words]."""
    down = min(4, g.COPY // 8)
    return gl.BlockedLayout([1, words_a_lane(W, g) // 4, 4], [8, 4, 1], [down, 4 // down, 1], [2, 0, 1])


@gluon.jit
def page_of(table, t, wanted, c: gl.constexpr):
    """Page of a tile that lies in one."""
    return gl.load(table + t * c.TILE // c.PAGE, mask=wanted, other=0).to(gl.int64)


@gluon.jit
def scales_of_copy(S, table, page, h, key, o_n, m, VALUES: gl.constexpr, LAYOUT: gl.constexpr, c: gl.constexpr,
                   g: gl.constexpr):  # fmt: skip
    """Stored scales of keys or values: fp32, or a byte for each block; of dead keys 1, or 0."""
    SIDE: gl.constexpr = g.V if VALUES else g.K
    if c.FAR:
        key, h = key.to(gl.int64), h.to(gl.int64)
    if g.COPIES == 1:
        p_scale = S + (page * SIDE.SCALE_STRIDES[0] + key % c.PAGE * SIDE.SCALE_STRIDES[1] + h * SIDE.SCALE_STRIDES[2])
        at = o_n * SIDE.SCALE_STRIDES[1]
    else:
        p_scale, key = S, key + o_n
        page = gl.load(table + key // c.PAGE, mask=m, other=0).to(gl.int64)
        at = page * SIDE.SCALE_STRIDES[0] + key % c.PAGE * SIDE.SCALE_STRIDES[1] + h * SIDE.SCALE_STRIDES[2]
    if c.BLOCK_SCALES:
        o_i = gl.arange(0, c.WORDS_K // 4, gl.SliceLayout(0, LAYOUT))
        p_byte = p_scale.to(gl.pointer_type(gl.uint8), bitcast=True) + at[:, None] + o_i[None, :]
        return gl.load(p_byte, mask=m[:, None], other=0)
    else:
        return gl.load(p_scale + at, mask=m, other=1.0)


@gluon.jit
def stored_scales(boxes, table, page, h, t, n, rows, wanted, c: gl.constexpr, g: gl.constexpr):
    """Stored scales of a tile in registers, of keys and of values: for each copy if they are bytes, else of all."""
    KS, VS = boxes.KS, boxes.VS
    if c.BLOCK_SCALES:
        L: gl.constexpr = gl.SliceLayout(2, blocks_layout(c.WORDS_K, g))
        k, v = (), ()
        for j in gl.static_range(gl.constexpr(g.COPIES)):
            key, o_n = t * c.TILE + j * g.COPY, gl.arange(0, g.COPY, gl.SliceLayout(1, L))
            m = wanted & live_keys(key + o_n, n, rows, c)
            k = k + (scales_of_copy(KS, table, page, h, key, o_n, m, False, L, c, g),)
            v = v + (scales_of_copy(VS, table, page, h, key, o_n, m, True, L, c, g),)
        return k, v
    elif c.TOKEN_SCALES:
        key, o_n = t * c.TILE, gl.arange(0, c.TILE, gl.BlockedLayout([1], [32], [4], [0]))
        m = wanted & live_keys(key + o_n, n, rows, c)
        k = scales_of_copy(KS, table, page, h, key, o_n, m, False, None, c, g)
        return k, scales_of_copy(VS, table, page, h, key, o_n, m, True, None, c, g)
    else:
        return t, t


@gluon.jit
def block_factor(byte, W: gl.constexpr, g: gl.constexpr):
    """Block scales [COPY, blocks] e4m3 → fp16 [COPY, W], as the codes lie."""
    L3: gl.constexpr = blocks_layout(W, g)
    factor = gl.inline_asm_elementwise(SCALE_BYTE, "=h,h", [byte.to(gl.int16)], gl.float16, True, 1)
    factor, _ = gl.broadcast(factor[:, :, None], gl.full([g.COPY, W // 4, 4], 0, gl.float16, L3))
    return gl.convert_layout(factor.reshape([g.COPY, W]), words_layout(W, g), assert_trivial=True)


@gluon.jit
def load_words(codes, bars, turn, wanted, c: gl.constexpr, g: gl.constexpr):
    """A turn's codes, when they have come: for each copy [COPY, W]."""
    stage, parity = place_of(turn, g.STAGES)
    mbarrier.wait(bars.index(stage), parity, pred=wanted)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(g.K.LAYOUT.swizzle_byte_width, 16, 2)
    out = ()
    for j in gl.static_range(gl.constexpr(g.COPIES)):
        box = reinterpret(codes[j], gl.int16, [g.STAGES, g.COPY, c.WORDS_K], LAYOUT).index(stage)
        out = out + (box.load(words_layout(c.WORDS_K, g)),)
    return out


@gluon.jit
def keep_zeros(hand, turn, scales, c: gl.constexpr):
    """Zero points of a tile's int4 rows go to where the threads that convert these find them."""
    if c.CODE == "int4":
        word = (zero_bits(scales[1]) << 4) | zero_bits(scales[0])
        hand.columns.index(turn % SCALE_TURNS * KINDS + 3).store(word.to(gl.float32, bitcast=True))
        thread_barrier()


@gluon.jit
def factors_of(hand, turn, scales, VALUES: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """What `converted` needs beside codes: block scales as they were loaded, or zero points, of each copy [COPY]."""
    if c.CODE == "int4":
        L: gl.constexpr = gl.SliceLayout(1, words_layout(c.WORDS_K, g))
        words = hand.columns.index(turn % SCALE_TURNS * KINDS + 3)
        zeros = ()
        for j in gl.static_range(gl.constexpr(g.COPIES)):
            word = words.slice(j * g.COPY, g.COPY).load(L).to(gl.int32, bitcast=True)
            zeros = zeros + (((word >> (4 if VALUES else 0)) & 15).to(gl.int16),)
        return zeros
    else:
        return scales[1 if VALUES else 0]


@gluon.jit
def converted(words, factors, c: gl.constexpr, g: gl.constexpr):
    """Codes → fp16, for each copy [COPY, PARTS × W]."""
    W: gl.constexpr = c.WORDS_K
    out = ()
    for j in gl.static_range(gl.constexpr(g.COPIES)):
        if c.PARTS == 4:
            if c.BLOCK_SCALES:
                parts = scaled_e2m1(words[j], block_factor(factors[j], W, g), True)
            else:
                gl.static_assert(c.CODE == "int4", "a code that nobody here knows")
                parts = int4_in_rows(words[j], factors[j])
            low0, low1, high0, high1 = parts
            x = gl.join(gl.join(low0, high0), gl.join(low1, high1))
            x = x.reshape([g.COPY, W // 2, 2, 2, 2]).permute([0, 1, 3, 4, 2])
        else:
            low, high = key_parts(words[j], c)
            x = gl.join(low, high).reshape([g.COPY, W // 2, 2, 2]).permute([0, 1, 3, 2])
        out = out + (x.reshape([g.COPY, c.PARTS * W]),)
    return out


@gluon.jit
def without_dead(words, t, n, rows, c: gl.constexpr, g: gl.constexpr):
    """Codes of values that no row sees become zeros: a probability of 0 does not hide NaN."""
    out = ()
    for j in gl.static_range(gl.constexpr(g.COPIES)):
        o_n = t * c.TILE + j * g.COPY + gl.arange(0, g.COPY, gl.SliceLayout(1, words[j].type.layout))
        out = out + (gl.where(live_keys(o_n, n, rows, c)[:, None], words[j], 0),)
    return out


@gluon.jit
def publish(hand, i, g: gl.constexpr):
    """Item i lies in its slot."""
    fence_async_shared()
    place, _ = place_of(i, g.SLOTS)
    signal(hand.ready.index(place))


@gluon.jit
def store_item(x, tiles, slot, g: gl.constexpr):
    for j in gl.static_range(gl.constexpr(g.COPIES)):
        tiles.index(slot).slice(j * g.COPY, g.COPY).store(x[j])


@gluon.jit
def convert_share(boxes, tables, rings, full, hand, share, c: gl.constexpr, g: gl.constexpr):
    """Copy every tile of the share, and make it fp16."""
    LENS, CU, h = tables.LENS, tables.CU, share.group
    x, end, b, base = share.x, share.end, share.b, share.base
    turns, turn = end - x, 0
    cursor = cursor_at(tables, share, c, g)
    for ahead in gl.static_range(gl.constexpr(g.STAGES)):
        fetch(cursor, ahead, full, boxes, rings, h, end, c, g)
        cursor = advance(cursor, tables, end, c, g)
    request = request_tiles(LENS, CU, b, x < end, c)
    words = load_words(rings.k, full[0], turn, turns > 0, c, g)
    while x < end:
        b, base, request = request_at(LENS, CU, x, b, base, request, c)
        segment = segment_at(x, end, b, base, request)
        n, rows = request.keys, request.rows
        table = tables.TABLE + b.to(gl.int64) * tables.stride
        t1 = request.first + segment.t1
        last, t0 = t1 - 1, request.first + segment.t0
        page = page_of(table, t0, n > 0, c)
        after = stored_scales(boxes, table, page, h, t0, n, rows, True, c, g)
        page = page_of(table, t0 + 1, t0 < last, c)
        for t in range(t0, t1):
            here = after
            after = stored_scales(boxes, table, page, h, t + 1, n, rows, t < last, c, g)
            page = page_of(table, t + 2, t + 1 < last, c)
            keep_zeros(hand, turn, here, c)
            k = converted(words, factors_of(hand, turn, here, False, c, g), c, g)
            slot = wait_free(hand.empty, 2 * turn, g.SLOTS)
            if c.TOKEN_SCALES:
                column = turn % SCALE_TURNS * KINDS
                hand.columns.index(column).store(here[0])
                log, inverse = log2_and_inverse(gl.maximum(here[1], 1e-30))
                hand.columns.index(column + 1).store(log)
                hand.columns.index(column + 2).store(inverse)
            store_item(k, hand.tiles, slot, g)
            words = load_words(rings.v, full[1], turn, True, c, g)
            publish(hand, 2 * turn, g)
            if not c.BLOCK_SCALES:  # those of dead keys are 0  # noqa: SIM102 - known to the compiler
                if ((t + 1) * c.TILE > n) | (c.WINDOW > 0):
                    words = without_dead(words, t, n, rows, c, g)
            v = converted(words, factors_of(hand, turn, here, True, c, g), c, g)
            store_item(v, hand.tiles, wait_free(hand.empty, 2 * turn + 1, g.SLOTS), g)
            words = load_words(rings.k, full[0], turn + 1, turn + 1 < turns, c, g)
            publish(hand, 2 * turn + 1, g)
            fetch(cursor, turn + g.STAGES, full, boxes, rings, h, end, c, g)
            cursor = advance(cursor, tables, end, c, g)
            turn += 1
        x += segment.t1 - segment.t0
