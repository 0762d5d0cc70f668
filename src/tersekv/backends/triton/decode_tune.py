"""Tile choices of paged decode, from facts. Each number names its measurement (docs/measured.md)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ...formats import KVFormat
from . import launch


class Tiles(NamedTuple):
    tile: int  # keys of a tile
    rows: int  # query rows of a segment
    stages: int
    unroll: int  # tiles of one softmax step
    num_warps: int
    max_registers: int | None  # so that programs_per_sm fit; None: the compiler's choice
    programs_per_sm: int
    min_tiles: int  # least share of a program, so that merging stays cheap
    tma: bool


def tiles(f: SimpleNamespace, fmt: KVFormat) -> Tiles:
    group = f.q.shape[1] // max(f.k_cache.shape[2], 1)
    rows = max(16, min(64, launch.next_power_of_2(max(f.max_q_len * group, 1))))
    width = max(f.q.shape[2], f.out.shape[2])
    page = f.k_cache.shape[1]
    tile = 64 if width <= 128 else 32
    if page % tile == 0 or page < tile:
        pass
    elif page >= 16 and launch.next_power_of_2(page) == page:
        tile = min(tile, page)
    return Tiles(tile, rows, 4, 1, 4, 168 if width <= 128 else None, 3 if width <= 128 else 2, 1, True)
