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
    for j in gl.static_range(gl.constexpr(g.COPIES)):
        key = tile * c.TILE + j * g.COPY
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


@gluon.jit
def rings_of(dtype: gl.constexpr, VALUES: gl.constexpr, g: gl.constexpr):
    """(buffers of codes, buffers of stored scales) of keys or values."""
    SIDE: gl.constexpr = g.V if VALUES else g.K
    codes, scales = (), ()
    for _ in gl.static_range(gl.constexpr(g.COPIES)):
        ring = gl.allocate_shared_memory(gl.int16, SIDE.RING, SIDE.LAYOUT)
        codes = codes + (ring,)
        if g.SCALES:
            # A tensor copy goes to a multiple of 128 bytes, which a plain layout does not ask for.
            ring = gl.allocate_shared_memory(
                dtype, [g.STAGES * SIDE.SCALE_PLACE // 128, 1, 32], gl.NVMMASharedLayout(0, 32, 2)
            )
            scales = scales + (reinterpret(ring, dtype, SIDE.SCALE_RING, SIDE.SCALE_LAYOUT),)
        else:
            scales = scales + (ring,)  # never read
    return codes, scales


@gluon.jit
def make_rings(dtype: gl.constexpr, g: gl.constexpr):
    k, k_scales = rings_of(dtype, False, g)
    v, v_scales = rings_of(dtype, True, g)
    return Rings(k, k_scales, v, v_scales)


@gluon.jit
def copy_codes(X, buffer, bar, stage, page, h0, slot, wanted, PITCH: gl.constexpr, g: gl.constexpr):
    """Codes of COPY keys of one page; in shared memory, boxes of 16 keys."""
    SHAPE: gl.constexpr = [
        g.STAGES,
        X.block_shape[0],
        X.block_shape[1],
        X.block_shape[2],
        X.block_shape[3],
    ]
    into = reinterpret(buffer, buffer.dtype, SHAPE, X.layout).index(stage)
    row = h0 // (g.HB // X.block_shape[1])  # of as many heads as a row holds
    tma_load(X, [(page * PITCH + slot) // 16, row, 0, 0], bar, into, wanted)


@gluon.jit
def copy_scales(X, buffer, bar, stage, page, h0, slot, wanted, VALUES: gl.constexpr, g: gl.constexpr):
    """Their stored scales. 16 of one head are 64 bytes, and leave the other half of their place."""
    SIDE: gl.constexpr = g.V if VALUES else g.K
    BOXES: gl.constexpr = X.block_shape[0]
    SHAPE: gl.constexpr = [
        g.STAGES,
        BOXES * SIDE.SCALE_PLACE // SIDE.SCALE_BYTES,
        X.block_shape[1],
        X.block_shape[2],
    ]
    into = reinterpret(buffer, buffer.dtype, SHAPE, X.layout).index(stage)
    if SIDE.SCALE_PLACE > SIDE.SCALE_BYTES:
        into = into.slice(0, BOXES)
    if g.SCALE_ROWS_ARE_KEYS:
        at = [(page * SIDE.SCALE_PITCH + slot) // 16, 0, h0 * SIDE.SCALE_WORDS]
    else:
        at = [slot // 16, page * SIDE.SCALE_PITCH + h0, 0]
    tma_load(X, at, bar, into, wanted)


@gluon.jit
def fetch(cursor, turn, full, boxes, rings, h0, end, c: gl.constexpr, g: gl.constexpr):
    """Start the copies of the cursor's tile into the stage of this turn."""
    COPIES: gl.constexpr = g.COPIES
    wanted = cursor.x < end
    tile = cursor.first + cursor.t
    stage = turn % g.STAGES
    mbarrier.expect(full[0].index(stage), COPIES * g.K.BYTES, wanted)
    mbarrier.expect(full[1].index(stage), COPIES * g.V.BYTES, wanted)
    if g.SCALES:
        mbarrier.expect(full[2].index(stage), COPIES * g.K.SCALE_BYTES, wanted)
        mbarrier.expect(full[3].index(stage), COPIES * g.V.SCALE_BYTES, wanted)
    for j in gl.static_range(COPIES):
        page = cursor.pages[j]
        slot = (tile * c.TILE + j * g.COPY) % c.PAGE
        copy_codes(boxes.K, rings.k[j], full[0].index(stage), stage, page, h0, slot, wanted, c.K_PITCH, g)
        copy_codes(boxes.V, rings.v[j], full[1].index(stage), stage, page, h0, slot, wanted, c.V_PITCH, g)
        if g.SCALES:
            copy_scales(boxes.KS, rings.k_scales[j], full[2].index(stage), stage, page, h0, slot, wanted, False, g)
            copy_scales(boxes.VS, rings.v_scales[j], full[3].index(stage), stage, page, h0, slot, wanted, True, g)
