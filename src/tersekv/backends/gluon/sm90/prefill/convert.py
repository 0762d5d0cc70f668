"""The converting warpgroup of prefill: codes become 16-bit tiles once, for all query rows of an item.

Scales of blocks are multiplied into their codes, and zero points are taken off theirs, exact in fp16. A key's own scale
multiplies its scores, in fp32: rounded to fp16 it would shift them, and an LSE of 11 by 0.005. A value's is multiplied
into its row, in fp16, after a power of two was taken out of all of a tile: that one goes to exponents, so no value
leaves fp16's range, whatever its scale.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import reinterpret, thread_barrier
from ..parts.ring import place_of, wait_free, wait_full
from .attend_eight import transpose_tile
from .codes import blocks_layout, in_16_bits, row_word, words_layout
from .items import read

LISTENER = gl.constexpr(2)  # among those who are told of items


class Stored(NamedTuple):
    """Stored scales, and where pages are."""

    KS: gl.tensor
    VS: gl.tensor
    TABLE: gl.tensor
    st_b: gl.tensor
    # Scales of tokens: of a tile's keys [STAGES, TILE] fp32; what its conversion needs of each, `codes.row_word`. Of
    # blocks: the stored bytes [STAGES, TILE, blocks] of both.
    of_keys: gl.shared_memory_descriptor
    of_values: gl.shared_memory_descriptor
    tiles: gl.shared_memory_descriptor  # [2 × STAGES, 2] fp32: `attend.TileScales`


@gluon.jit
def as_words(ring):
    """A ring of 16-bit elements as words of 32 bits."""
    SHAPE: gl.constexpr = [ring.tiles.shape[0], ring.tiles.shape[1], ring.tiles.shape[2] // 2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(ring.tiles.layout.swizzle_byte_width, 32, 2)
    return reinterpret(ring.tiles, gl.int32, SHAPE, LAYOUT)


@gluon.jit
def convert_tile(codes, tiles, factors, turn, code_turn, low, keys, edge, own, VALUES: gl.constexpr, c: gl.constexpr):
    """A tile of codes → 16 bits. Values of keys outside [low, keys) become zeros where the tile is at an edge.

    factors: of the tile's rows, as `codes.in_16_bits` takes them
    own: (where, what) scales of tokens, of keys: they are stored once the keys that were in this place are given back
    """
    WORDS: gl.constexpr = codes.tiles.shape[2] // 2
    L: gl.constexpr = words_layout(WORDS)
    source = as_words(codes).index(wait_full(codes.full, code_turn, c.CODE_STAGES))
    into = as_words(tiles).index(wait_free(tiles.free, turn, c.STAGES))
    if c.TOKEN_SCALES and not VALUES:
        own[0].index(place_of(turn, c.STAGES)[0]).store(own[1])
    # NOTE: a tile at once. Of pieces, the compiler lets all threads meet before each is stored.
    words = source.load(L)
    o_n = gl.arange(0, c.TILE, gl.SliceLayout(1, L))
    # Those of whole numbers that are dead have a scale of 0.
    if VALUES and (c.CODE == "e4m3" or c.CODE == "e5m2"):  # noqa: SIM102 - known to the compiler, unlike the other
        if edge:
            words = gl.where(((o_n >= low) & (o_n < keys))[:, None], words, 0)
    rows = o_n
    if c.BLOCK_SCALES:
        rows = factors.load(gl.SliceLayout(2, blocks_layout(WORDS)))
    elif c.TOKEN_SCALES and (VALUES or c.CODE == "int4"):
        rows = factors.load(gl.SliceLayout(1, L)).to(gl.int32)
    into.store(in_16_bits(words, rows, VALUES, c))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(tiles.full.index(place_of(turn, c.STAGES)[0]))
    mbarrier.arrive(codes.free.index(place_of(code_turn, c.CODE_STAGES)[0]))


@gluon.jit
def keys_of(start, c: gl.constexpr):
    return start + gl.arange(0, c.TILE, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def pages_of(table, start, low, top, c: gl.constexpr):
    """Page of each key of a tile. Of keys outside [low, top) no table entry is read."""
    key = keys_of(start, c)
    return gl.load(table + key // c.PAGE, mask=(key >= low) & (key < top), other=0).to(gl.int64)


@gluon.jit
def load_scales(S, pages, slots, live, h, VALUES: gl.constexpr, c: gl.constexpr):
    """Stored scales of keys or values: fp32, or a byte for each block, in a row of a power of two; of the dead 0."""
    STRIDES: gl.constexpr = c.V_SCALE_STRIDES if VALUES else c.K_SCALE_STRIDES
    at = pages * STRIDES[0] + slots.to(gl.int64) * STRIDES[1] + h.to(gl.int64) * STRIDES[2]
    if c.BLOCK_SCALES:
        BLOCKS: gl.constexpr = (c.HEAD_DV if VALUES else c.HEAD_D) // 16
        WIDE: gl.constexpr = (c.WORDS_V if VALUES else c.WORDS_K) // 4
        L: gl.constexpr = gl.BlockedLayout([1, WIDE], [32, 1], [gl.num_warps(), 1], [1, 0])
        o_i = gl.arange(0, WIDE, gl.SliceLayout(0, L))
        at = gl.convert_layout(at, gl.SliceLayout(1, L), assert_trivial=True)
        live = gl.convert_layout(live, gl.SliceLayout(1, L), assert_trivial=True)
        p_byte = S.to(gl.pointer_type(gl.uint8), bitcast=True) + at[:, None] + o_i[None, :]
        return gl.load(p_byte, mask=live[:, None] & (o_i < BLOCKS)[None, :], other=0)
    else:
        return gl.load(S + at, mask=live, other=0.0)


@gluon.jit
def scales_of_tile(stored, pages, start, low, top, h, c: gl.constexpr):
    """(of keys, of values) of a tile; of others than [low, top) 0."""
    key = keys_of(start, c)
    live, slot = (key >= low) & (key < top), key % c.PAGE
    k = load_scales(stored.KS, pages, slot, live, h, False, c)
    return k, load_scales(stored.VS, pages, slot, live, h, True, c)


@gluon.jit
def power_of(x):
    """Exponent field of the largest of positive numbers."""
    return gl.minimum(gl.maximum(gl.max(x, 0).to(gl.int32, bitcast=True) >> 23, 1), 253)


@gluon.jit
def as_float(field):
    return (field << 23).to(gl.float32, bitcast=True)


@gluon.jit
def put_scales(stored, scales, turn, c: gl.constexpr):
    """Factors of a tile's rows, and what was taken out of them, to where they are read.

    The latter of 2 × STAGES tiles: whoever reads those of the tile that was there has given its keys back, for else
    the one before this would not have been converted.
    """
    k, v = scales
    place, _ = place_of(turn, c.STAGES)
    if c.TOKEN_SCALES:
        of_tile, _ = place_of(turn, 2 * c.STAGES)
        field = power_of(v)
        o = gl.arange(0, 2, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        x = gl.where(o == 0, (field - 127).to(gl.float32), as_float(254 - field))
        stored.tiles.index(of_tile).store(x)
        zero_k, zero_v = 0, 0
        if c.CODE == "int4":
            zero_k, zero_v = k.to(gl.int32, bitcast=True) & 15, v.to(gl.int32, bitcast=True) & 15
        row = row_word(v * as_float(254 - field), zero_k, zero_v)
        stored.of_values.index(place).store(row.to(stored.of_values.dtype))
    else:
        stored.of_keys.index(place).store(k)
        stored.of_values.index(place).store(v)
    thread_barrier()


@gluon.jit
def convert(stored, queries, facts, key_codes, value_codes, keys, values, c: gl.constexpr):
    """Every tile of every item of this program."""
    SCALES: gl.constexpr = c.TOKEN_SCALES or c.BLOCK_SCALES
    done, turn, code_turn = 0, 0, 0
    mbarrier.wait(queries.full.index(LISTENER), 0)
    item, prefix = read(facts.index(LISTENER))
    mbarrier.arrive(queries.free.index(LISTENER), count=1)
    while item.tiles > 0:
        low, top, tiles, end = item.low, item.keys, item.tiles, item.end
        if c.NEW:  # new rows' tiles come as they are, before those of the pages
            turn += item.tiles
            low, top, tiles, end = prefix.low, prefix.keys, prefix.tiles, prefix.end
        start = (end - 1) * c.TILE
        h = item.bundle * c.PACKED // c.GROUP
        if SCALES:
            table = stored.TABLE + item.request.to(gl.int64) * stored.st_b
            pages = pages_of(table, start, low, top, c)
            after = scales_of_tile(stored, pages, start, low, top, h, c)
            pages = pages_of(table, start - c.TILE, low, top, c)
        for i in range(tiles):  # noqa: B007 - an underscore is a barrier already
            edge = (start + c.TILE > top) | (start < low)
            place, _ = place_of(code_turn, c.STAGES)
            if SCALES:
                here = after
                after = scales_of_tile(stored, pages, start - c.TILE, low, top, h, c)
                pages = pages_of(table, start - 2 * c.TILE, low, top, c)
                put_scales(stored, here, code_turn, c)
            of_values = stored.of_values.index(place)
            of_keys, own = of_values, (stored.of_keys, 0)
            if c.TOKEN_SCALES:
                own = (stored.of_keys, here[0])
            elif c.BLOCK_SCALES:
                of_keys = stored.of_keys.index(place)
            if not c.KEYS_8:
                convert_tile(key_codes, keys, of_keys, turn, code_turn, low - start, top - start, edge, own, False, c)
            if c.VALUES_8:
                transpose_tile(value_codes, values, turn, code_turn, low - start, top - start, edge, c)
            else:
                convert_tile(
                    value_codes, values, of_values, turn, code_turn, low - start, top - start, edge, own, True, c
                )
            turn += 1
            code_turn += 1
            start -= c.TILE
        done += 1
        mbarrier.wait(queries.full.index(LISTENER), done & 1)
        item, prefix = read(facts.index(LISTENER))
        mbarrier.arrive(queries.free.index(LISTENER), count=1)
