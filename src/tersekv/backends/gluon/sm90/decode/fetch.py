"""The copying side of decode: where the next tile lies, and its copies into a stage of the ring.

The cursor runs ahead of the tiles in use, over the ends of segments and requests, so that copies never pause there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import reinterpret, tma_load
from ..parts.schedule import request_tiles
from .records import Cursor, Rings


@gluon.jit
def page_ids(tables, b, tile, keys, wanted, c: gl.constexpr, g: gl.constexpr):
    """Page of each of the tile's copies; entries past the last key are not read."""
    ids = ()
    for i in gl.static_range(gl.constexpr(g.COPIES * g.HALVES)):
        key = tile * c.TILE + i * (g.COPY // g.HALVES)
        p_id = tables.TABLE + b.to(gl.int64) * tables.stride + key // c.PAGE
        ids = ids + (gl.load(p_id, mask=wanted & (key < keys), other=0).to(gl.int32),)
    return ids


@gluon.jit
def cursor_at(tables, share, c: gl.constexpr, g: gl.constexpr):
    """The cursor at the share's first tile."""
    x, wanted = share.x, share.x < share.end
    r = request_tiles(tables.LENS, tables.CU, share.b, wanted, c)
    segment = (x - share.base) // r.tiles
    t = (x - share.base) % r.tiles
    pages = page_ids(tables, share.b, r.first + t, r.keys, wanted, c, g)
    return Cursor(x, share.b, t, segment, r.tiles, r.segments, r.first, r.keys, pages)


@gluon.jit
def advance(cursor, tables, end, c: gl.constexpr, g: gl.constexpr):
    """The cursor a tile further. Its page ids are loaded now and needed a step later."""
    x, b, t, segment, tiles, segments, first, n, _ = cursor
    x += 1
    t += 1
    if t == tiles:
        t = 0
        segment += 1
        if (segment >= segments) & (x < end):
            segment = 0
            segments = x * 0
            while segments == 0:
                b += 1
                tiles, segments, first, n, _rows, _q0 = request_tiles(tables.LENS, tables.CU, b, True, c)
    pages = page_ids(tables, b, first + t, n, x < end, c, g)
    return Cursor(x, b, t, segment, tiles, segments, first, n, pages)


@gluon.constexpr_function
def scale_sets(g):
    """Kinds of copies that are stored scales."""
    return (g.K.SCALE_BYTES > 0) + (g.V.SCALE_BYTES > 0)


@gluon.jit
def rings_of(VALUES: gl.constexpr, g: gl.constexpr):
    """(buffers of codes, buffers of stored scales) of keys or values."""
    SIDE: gl.constexpr = g.V if VALUES else g.K
    gl.static_assert((SIDE.CODE == "e2m1") == (SIDE.STORED == "block"), "a code that these kernels do not know")
    dtype: gl.constexpr = gl.int32 if SIDE.STORED == "block" else gl.float32
    codes, scales = (), ()
    for _ in gl.static_range(gl.constexpr(g.COPIES)):
        ring = gl.allocate_shared_memory(gl.int16, SIDE.RING, SIDE.LAYOUT)
        codes = codes + (ring,)
        if SIDE.SCALE_BYTES > 0:
            # A tensor copy goes to a multiple of 128 bytes, which a plain layout does not ask for.
            ring = gl.allocate_shared_memory(
                dtype, [g.STAGES * g.HALVES * SIDE.SCALE_PLACE // 128, 1, 32], gl.NVMMASharedLayout(0, 32, 2)
            )
            scales = scales + (reinterpret(ring, dtype, SIDE.SCALE_RING, SIDE.SCALE_LAYOUT),)
        else:
            scales = scales + (ring,)  # never read
    return codes, scales


@gluon.jit
def make_rings(g: gl.constexpr):
    k, k_scales = rings_of(False, g)
    v, v_scales = rings_of(True, g)
    return Rings(k, k_scales, v, v_scales)


@gluon.constexpr_function
def places(g, block, times=1):
    """Shape of a ring of boxes of a tensor map; times: places are larger than boxes by this."""
    return [g.STAGES * g.HALVES, times * block[0], *block[1:]]


@gluon.jit
def copy_codes(X, buffer, bar, place, page, h0, slot, wanted, PITCH: gl.constexpr, g: gl.constexpr):
    """Codes of a buffer's keys, or of half of them, of one page; in shared memory, boxes of 16 keys."""
    SHAPE: gl.constexpr = places(g, X.block_shape)
    KEYS: gl.constexpr = g.BOX // g.HALVES
    into = reinterpret(buffer, buffer.dtype, SHAPE, X.layout).index(place)
    if PITCH == 0:
        at = [page, slot // KEYS, h0 // (g.HB // SHAPE[-3]), 0, 0]  # a row may hold several heads
    elif len(SHAPE) == 6:  # heads in groups (`boxes._windows`)
        at = [(page * PITCH + slot) // KEYS, h0 // SHAPE[-3], 0, 0, 0]
    else:
        at = [(page * PITCH + slot) // KEYS, h0 // (g.HB // SHAPE[-3]), 0, 0]
    tma_load(X, at, bar, into, wanted)


@gluon.jit
def copy_scales(X, buffer, bar, place, page, h0, slot, wanted, VALUES: gl.constexpr, g: gl.constexpr):
    """Their stored scales. 16 of one head are 64 bytes, and leave the other half of their place."""
    SIDE: gl.constexpr = g.V if VALUES else g.K
    FIRST: gl.constexpr = X.block_shape[0]
    SHAPE: gl.constexpr = places(g, X.block_shape, SIDE.SCALE_PLACE // SIDE.SCALE_BYTES)
    KEYS: gl.constexpr = g.BOX // g.HALVES
    into = reinterpret(buffer, buffer.dtype, SHAPE, X.layout).index(place)
    if SIDE.SCALE_PLACE > SIDE.SCALE_BYTES:
        into = into.slice(0, FIRST)
    if SIDE.SCALE_PITCH == 0:
        if SIDE.SCALE_ROWS_ARE_KEYS:
            at = [page, slot // KEYS, 0, h0 * SIDE.SCALE_WORDS]
        else:
            at = [page, slot // KEYS, h0, 0]
    elif SIDE.SCALE_ROWS_ARE_KEYS:
        at = [(page * SIDE.SCALE_PITCH + slot) // KEYS, 0, h0 * SIDE.SCALE_WORDS]
    else:
        at = [slot // KEYS, page * SIDE.SCALE_PITCH + h0, 0]
    tma_load(X, at, bar, into, wanted)


@gluon.jit
def fetch(cursor, turn, full, boxes, rings, h0, end, c: gl.constexpr, g: gl.constexpr):
    """Start the copies of the cursor's tile into the stage of this turn."""
    COPIES: gl.constexpr = g.COPIES * g.HALVES
    wanted = cursor.x < end
    tile = cursor.first + cursor.t
    stage = turn % g.STAGES
    mbarrier.expect(full[0].index(stage), COPIES * g.K.BYTES, wanted)
    mbarrier.expect(full[1].index(stage), COPIES * g.V.BYTES, wanted)
    if g.K.SCALE_BYTES > 0:
        mbarrier.expect(full[2].index(stage), COPIES * g.K.SCALE_BYTES, wanted)
    if g.V.SCALE_BYTES > 0:
        mbarrier.expect(full[len(full) - 1].index(stage), COPIES * g.V.SCALE_BYTES, wanted)
    for i in gl.static_range(COPIES):
        page, place = cursor.pages[i], stage * g.HALVES + i % g.HALVES
        slot = (tile * c.TILE + i * (g.COPY // g.HALVES)) % c.PAGE
        k, k_scales = rings.k[i // g.HALVES], rings.k_scales[i // g.HALVES]
        v, v_scales = rings.v[i // g.HALVES], rings.v_scales[i // g.HALVES]
        copy_codes(boxes.K, k, full[0].index(stage), place, page, h0, slot, wanted, c.K_PITCH, g)
        copy_codes(boxes.V, v, full[1].index(stage), place, page, h0, slot, wanted, c.V_PITCH, g)
        if g.K.SCALE_BYTES > 0:
            copy_scales(boxes.KS, k_scales, full[2].index(stage), place, page, h0, slot, wanted, False, g)
        if g.V.SCALE_BYTES > 0:
            bar = full[len(full) - 1].index(stage)
            copy_scales(boxes.VS, v_scales, bar, place, page, h0, slot, wanted, True, g)
