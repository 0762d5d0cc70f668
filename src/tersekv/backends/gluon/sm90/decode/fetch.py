"""The copying side of decode: where the next tile lies, and its copies into a stage of the ring.

The cursor runs ahead of the tiles in use, over the ends of segments and requests, so that copies never pause there.
cursor: (flat index of the tile, request, tile in its segment, segment, tiles, segments, first tile, keys, page ids)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import reinterpret, tma_load
from ..parts.schedule import request_tiles


@gluon.jit
def page_ids(TABLE, b, st_b, tile, n, wanted, c: gl.constexpr, g: gl.constexpr):
    """Page of each of the tile's copies; entries past the last key are not read."""
    ids = ()
    for j in gl.static_range(gl.constexpr(g.COPIES)):
        key = tile * c.TILE + j * g.COPY
        p_id = TABLE + b.to(gl.int64) * st_b + key // c.PAGE
        ids = ids + (gl.load(p_id, mask=wanted & (key < n), other=0).to(gl.int32),)
    return ids


@gluon.jit
def cursor_at(TABLE, LENS, CU, st_b, x, end, b, base, c: gl.constexpr, g: gl.constexpr):
    """The cursor at flat tile x of request b, whose first tile is base."""
    tiles, segments, first, n, _, _ = request_tiles(LENS, CU, b, x < end, c)
    segment = (x - base) // tiles
    t = (x - base) % tiles
    ids = page_ids(TABLE, b, st_b, first + t, n, x < end, c, g)
    return x, b, t, segment, tiles, segments, first, n, ids


@gluon.jit
def advance(cursor, TABLE, LENS, CU, st_b, end, c: gl.constexpr, g: gl.constexpr):
    """The cursor a tile further. Its page ids are loaded now and needed a step later."""
    x, b, t, segment, tiles, segments, first, n, ids = cursor
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
                tiles, segments, first, n, _rows, _q0 = request_tiles(LENS, CU, b, True, c)
    ids = page_ids(TABLE, b, st_b, first + t, n, x < end, c, g)
    return x, b, t, segment, tiles, segments, first, n, ids


@gluon.jit
def make_rings(dtype: gl.constexpr, VALUES: gl.constexpr, g: gl.constexpr):
    """(buffers of codes, buffers of stored scales): one for each copy of a turn, with all stages of it."""
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
def fetch(
    cursor,
    turn,
    full,
    K,
    V,
    KS,
    VS,
    kbuf,
    vbuf,
    ksbuf,
    vsbuf,
    h0,
    end,
    c: gl.constexpr,
    g: gl.constexpr,
):
    """Start the copies of the cursor's tile into the stage of this turn."""
    COPIES: gl.constexpr = g.COPIES
    wanted = cursor[0] < end
    tile = cursor[6] + cursor[2]
    stage = turn % g.STAGES
    mbarrier.expect(full[0].index(stage), COPIES * g.K.BYTES, wanted)
    mbarrier.expect(full[1].index(stage), COPIES * g.V.BYTES, wanted)
    if g.SCALES:
        mbarrier.expect(full[2].index(stage), COPIES * g.K.SCALE_BYTES, wanted)
        mbarrier.expect(full[3].index(stage), COPIES * g.V.SCALE_BYTES, wanted)
    for j in gl.static_range(COPIES):
        page = cursor[8][j]
        slot = (tile * c.TILE + j * g.COPY) % c.PAGE
        copy_codes(K, kbuf[j], full[0].index(stage), stage, page, h0, slot, wanted, c.K_PITCH, g)
        copy_codes(V, vbuf[j], full[1].index(stage), stage, page, h0, slot, wanted, c.V_PITCH, g)
        if g.SCALES:
            copy_scales(KS, ksbuf[j], full[2].index(stage), stage, page, h0, slot, wanted, False, g)
            copy_scales(VS, vsbuf[j], full[3].index(stage), stage, page, h0, slot, wanted, True, g)
