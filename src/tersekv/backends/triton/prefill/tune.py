"""Tile choices of paged prefill, from facts. Not measured yet: by what fits, and by what compiles without spills."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ....formats import BLOCK, TOKEN_HEAD, KVFormat
from ...host import launch
from ..decode.tune import two_terms


class Tiles(NamedTuple):
    rows: int  # query rows of a block
    tile: int  # keys of a tile
    stages: int
    num_warps: int


def tiles(f: SimpleNamespace, k: KVFormat, v: KVFormat) -> Tiles:
    group = f.q.shape[1] // max(f.k_cache.shape[2], 1)
    values, width = (launch.next_power_of_2(n) for n in (f.out.shape[2], max(f.q.shape[2], f.out.shape[2])))
    t = Tiles(128, 64, 3, 8) if width <= 128 else Tiles(64, 32, 2, 8) if width <= 256 else Tiles(32, 16, 2, 8)
    if width == 256 and values <= 128:
        t = t._replace(rows=128)
    # Registers: a thread holds the scales of all keys of its tile, and where the matrix unit reads no shared memory
    # queries and keys too.
    operands = f.arch is None or f.arch < 90 or f.arch >= 120
    kinds = k.scale, v.scale
    if width > 64 and (operands or TOKEN_HEAD in kinds or (BLOCK in kinds and f.k is not None)):
        t = t._replace(tile=min(t.tile, 32))
    # In tiles of 64 keys over values of at most 64 bytes a row, where new rows follow pages, ptxas 12.8 never moves the
    # values' place to the uniform registers that offsets are added in: products read beside shared memory.
    if not operands and v.code_bytes(values) <= 64:
        t = t._replace(tile=min(t.tile, 32))
    # Blocks are not shared between requests: of few rows, a smaller one wastes less.
    needed = max(16, launch.next_power_of_2(f.max_q_len * group))
    if needed < t.rows:
        t = t._replace(rows=needed, num_warps=4 if needed <= 64 and width <= 128 else 8)
    while not _fits(t, f, k, v):
        if t.stages > 2:
            t = t._replace(stages=2)
        elif t.rows > 64:
            t = t._replace(rows=64, num_warps=4 if width <= 128 else 8)
        elif t.tile > 16:
            t = t._replace(tile=t.tile // 2)
        elif t.rows > 16:
            t = t._replace(rows=t.rows // 2)
        else:
            return t._replace(stages=1)
    return t


def _fits(t: Tiles, f: SimpleNamespace, k: KVFormat, v: KVFormat) -> bool:
    """Queries, tiles in flight and a converted tile of each side in the shared memory of one block."""
    d, dv = (launch.next_power_of_2(n) for n in (f.q.shape[2], f.out.shape[2]))
    queries = t.rows * d * 2 * (1 + two_terms(f, k))
    ring = t.stages * t.tile * (k.code_bytes(d) + v.code_bytes(dv))
    if f.k is not None:
        ring = max(ring, t.stages * t.tile * (d + dv) * 2)
    sides = ((n, x) for n, x in ((d, k), (dv, v)) if x.storage.itemsize == 1)
    converted = sum(t.tile * n * 2 * (2 if x.scale == BLOCK else 1) for n, x in sides)
    return queries + ring + converted + t.rows * t.tile * 2 + 4096 <= launch.shared_memory(f)
