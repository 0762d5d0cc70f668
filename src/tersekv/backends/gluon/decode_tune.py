"""Tile choices of Gluon's decode, from facts. Measured on an H200, 2026-11-21 (docs/measured.md), D 128, 32/8 heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ...formats import BLOCK, kv_format
from ..triton import launch


class Tiles(NamedTuple):
    tile: int  # keys of a turn
    stages: int
    programs_per_sm: int  # of four warps
    max_registers: int | None  # so that programs_per_sm fit; None: the compiler's choice
    min_tiles: int = 1  # least share of a program
    heads: int = 4  # KV heads of a program, at most


def query_rows(f: SimpleNamespace) -> int:
    return f.max_q_len * f.q.shape[1] // max(f.k_cache.shape[2], 1)


def heads_of(f: SimpleNamespace, most: int = 4) -> int:
    """KV heads of a program."""
    return next(n for n in (8, 4, 2, 1) if n <= most and f.k_cache.shape[2] % n == 0)


# 64 × 8K: 249 µs, 64 × 1K: 37.3, 256 × 1K: 138, 256 × 8K: 947, 1 × 8K: 10.3, 1 × 128K: 67.6
_WIDE = Tiles(64, 3, 1, 255)
# 64 × 8K: 251 µs, 64 × 1K: 41.7, 256 × 1K: 143; with pages of 16 248 to 255, where _WIDE takes 260
_NARROW = Tiles(32, 2, 3, 168)
# 64 × 8K: 166 to 174 µs; two programs of three stages 177 to 180, four of half a tile 187 to 190
_FOUR_BITS = Tiles(64, 2, 3, 168)


def tiles(f: SimpleNamespace) -> Tiles:
    fmt = kv_format(f.format)
    t = _FOUR_BITS if fmt.scale == BLOCK else _NARROW if f.k_cache.shape[1] % 64 else _WIDE
    width = max(f.q.shape[2], f.out.shape[2])
    if t.programs_per_sm > 2 and width * (8 if query_rows(f) <= 8 else 16) > 1024:  # twice the accumulators
        t = t._replace(programs_per_sm=2, max_registers=255)
    row = fmt.row_bytes(f.q.shape[2]) + fmt.row_bytes(f.out.shape[2])
    limit = launch.shared_memory(f) // t.programs_per_sm - 2048
    while t.tile > 16 and t.stages * t.tile * row * heads_of(f) > limit:
        t = t._replace(tile=t.tile // 2)
    return t


def merge_tile(pieces: int, rows: int, columns: int) -> tuple[int, int, int]:
    """(rows, pieces, columns) that a program of the merge reads at once: 64 numbers a thread."""
    pieces = min(256, max(4, launch.next_power_of_2(pieces)))
    columns = min(8192 // pieces, launch.next_power_of_2(columns))
    return min(8192 // pieces // columns, launch.next_power_of_2(rows)), pieces, columns


def copy_keys(f: SimpleNamespace, t: Tiles) -> int:
    """Keys of one tensor copy: as many of a tile as lie in one page, whatever its size."""
    keys = t.tile
    while f.k_cache.shape[1] % keys:
        keys //= 2
    fmt = kv_format(f.format)
    return keys if max(fmt.code_bytes(f.q.shape[2]), fmt.code_bytes(f.out.shape[2])) <= 128 else 16
