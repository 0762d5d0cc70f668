"""The producer warp of MLA decode: copies the tiles of a share by TMA, as ring places become free."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import tma_load
from ..parts.ring import signal
from ..parts.schedule import request_at, request_tiles, segment_at
from .three_warpgroups_scales import spread_scales


class More(NamedTuple):
    """What the producer does besides: what the first products need comes first, and group scales are spread."""

    started: gl.shared_memory_descriptor  # a barrier whose first phase ends when the first query is there
    columns: gl.shared_memory_descriptor
    ratios: gl.shared_memory_descriptor
    spread: gl.shared_memory_descriptor  # barriers of the ring: columns and ratios are there


@gluon.jit
def box_of(ring, slot, i, STAGES: gl.constexpr):
    """Where a tile's i-th box of columns lies: in a ring of boxes."""
    return ring.index(slot * (ring.shape[0] // STAGES) + i)


@gluon.jit
def produce(boxes, tables, full, free, rings, share, more, STAGES: gl.constexpr, c: gl.constexpr):
    """Copy every tile of the share. A row `nowhere` lies behind the cache and reads as 0. more: nothing, or a More.

    full: barriers that tiles take in turn, one for each place of the ring or more
    """
    MORE: gl.constexpr = len(more) > 0
    BARRIERS: gl.constexpr = full.shape[0]
    BOX_C, BOX_P, BOX_S = boxes
    x, end, b, base, nowhere = share.x, share.end, share.b, share.base, tables.nowhere
    PIECE: gl.constexpr = BOX_C.block_shape[0]
    PIECES: gl.constexpr = c.TILE // PIECE
    WIDTH: gl.constexpr = BOX_C.block_shape[1]
    BOXES: gl.constexpr = c.DV // WIDTH
    ROTARY: gl.constexpr = BOX_P.block_shape[1] * BOX_P.dtype.primitive_bitwidth // 8
    LATENT: gl.constexpr = c.DV * BOX_C.dtype.primitive_bitwidth // 8
    BYTES: gl.constexpr = c.TILE * (LATENT + ROTARY + (4 * c.CHUNKS if c.GROUP_SCALES else 0))
    k = 0
    request = request_tiles(tables.LENS, tables.CU, b, True, c)
    while x < end:
        b, base, request = request_at(tables.LENS, tables.CU, x, b, base, request, c)
        table, n = tables.TABLE + b.to(gl.int64) * tables.stride, request.keys
        segment = segment_at(x, end, b, base, request)
        for t in range(segment.t0, segment.t1):
            slot = k % STAGES
            rows_c, rows_p, rows_s = (), (), ()
            for j in gl.static_range(PIECES):
                o = t * c.TILE + j * PIECE
                page = gl.load(table + o // c.PAGE, mask=o < n, other=-1).to(gl.int32)
                rows_c = rows_c + (gl.where(page < 0, nowhere, page * c.C_PITCH + o % c.PAGE),)
                rows_p = rows_p + (gl.where(page < 0, nowhere, page * c.P_PITCH + o % c.PAGE),)
                rows_s = rows_s + (gl.where(page < 0, nowhere, page * tables.s_pitch + o % c.PAGE),)
            mbarrier.wait(free.index(slot), ((k // STAGES) & 1) ^ 1)
            if MORE:  # noqa: SIM102 - known to the compiler, unlike the other
                if k == 1:
                    mbarrier.wait(more.started.index(0), 0)
            bar = full.index(k % BARRIERS)
            mbarrier.expect(bar, BYTES)
            for j in gl.static_range(PIECES):
                place = rings.rotary.index(slot).slice(j * PIECE, PIECE)
                tma_load(BOX_P, [rows_p[j], 0], bar, place)
                if c.GROUP_SCALES:
                    place = rings.scales.index(slot).slice(j * PIECE, PIECE)
                    tma_load(BOX_S, [rows_s[j], 0], bar, place)
                for i in gl.static_range(BOXES):
                    place = box_of(rings.latents, slot, i, STAGES).slice(j * PIECE, PIECE)
                    tma_load(BOX_C, [rows_c[j], i * WIDTH], bar, place)
            if c.GROUP_SCALES and MORE:
                mbarrier.wait(bar, (k // BARRIERS) & 1)
                spread_scales(rings.scales.index(slot), more.columns, more.ratios, slot, n - t * c.TILE)
                signal(more.spread.index(slot))
            k += 1
        x += segment.t1 - segment.t0
