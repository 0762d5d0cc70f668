"""The producer warp of MLA decode: copies the tiles of a share by TMA, as ring places become free."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import tma_load
from ..parts.ring import signal
from ..parts.schedule import request_tiles
from .three_warpgroups_scales import spread_scales


@gluon.jit
def box_of(ring, slot, i, STAGES: gl.constexpr):
    """Where a tile's i-th box of columns lies: in a ring of boxes."""
    return ring.index(slot * (ring.shape[0] // STAGES) + i)


@gluon.jit
def produce(boxes, TABLE, LENS, CU, bars, rings, work, more, STAGES: gl.constexpr, c: gl.constexpr):
    """Copy every tile of the share [x, end). A row `nowhere` lies behind the cache and reads as 0.

    more: nothing, or (a barrier whose first phase ends when the first query is there, columns, ratios, the ring's
          barriers of these): what the first products need comes first, and group scales are spread
    """
    full, free = bars
    MORE: gl.constexpr = len(more) == 4
    ring_c, ring_p, ring_s = rings
    BOX_C, BOX_P, BOX_S = boxes
    x, end, b, base, nowhere, s_pitch, st_b = work
    PIECE: gl.constexpr = BOX_C.block_shape[0]
    PIECES: gl.constexpr = c.TILE // PIECE
    WIDTH: gl.constexpr = BOX_C.block_shape[1]
    BOXES: gl.constexpr = c.DV // WIDTH
    ROTARY: gl.constexpr = BOX_P.block_shape[1] * BOX_P.dtype.primitive_bitwidth // 8
    LATENT: gl.constexpr = c.DV * BOX_C.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = c.TILE * (LATENT + ROTARY + (4 * c.CHUNKS if c.GROUP_SCALES else 0))
    k = 0
    tiles, segments, _, n, _, _ = request_tiles(LENS, CU, b, True, c)
    while x < end:
        while x - base >= tiles * segments:
            base += tiles * segments
            b += 1
            tiles, segments, _, n, _, _ = request_tiles(LENS, CU, b, True, c)
        table = TABLE + b.to(gl.int64) * st_b
        t0 = (x - base) % tiles
        t1 = gl.minimum(t0 + end - x, tiles)
        for t in range(t0, t1):
            slot = k % STAGES
            rows_c, rows_p, rows_s = (), (), ()
            for j in gl.static_range(PIECES):
                o = t * c.TILE + j * PIECE
                page = gl.load(table + o // c.PAGE, mask=o < n, other=-1).to(gl.int32)
                rows_c = rows_c + (gl.where(page < 0, nowhere, page * c.C_PITCH + o % c.PAGE),)
                rows_p = rows_p + (gl.where(page < 0, nowhere, page * c.P_PITCH + o % c.PAGE),)
                rows_s = rows_s + (gl.where(page < 0, nowhere, page * s_pitch + o % c.PAGE),)
            mbarrier.wait(free.index(slot), ((k // STAGES) & 1) ^ 1)
            if MORE:  # noqa: SIM102 - known to the compiler, unlike the other
                if k == 1:
                    mbarrier.wait(more[0], 0)
            bar = full.index(slot)
            mbarrier.expect(bar, BYTES)
            for j in gl.static_range(PIECES):
                place = ring_p.index(slot).slice(j * PIECE, PIECE)
                tma_load(BOX_P, [rows_p[j], 0], bar, place)
                if c.GROUP_SCALES:
                    place = ring_s.index(slot).slice(j * PIECE, PIECE)
                    tma_load(BOX_S, [rows_s[j], 0], bar, place)
                for i in gl.static_range(BOXES):
                    place = box_of(ring_c, slot, i, STAGES).slice(j * PIECE, PIECE)
                    tma_load(BOX_C, [rows_c[j], i * WIDTH], bar, place)
            if c.GROUP_SCALES and MORE:
                mbarrier.wait(bar, (k // STAGES) & 1)
                spread_scales(ring_s.index(slot), more[1], more[2], slot, n - t * c.TILE)
                signal(more[3].index(slot))
            k += 1
        x += t1 - t0
