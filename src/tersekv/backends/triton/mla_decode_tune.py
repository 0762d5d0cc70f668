"""Tile choices of MLA decode, from facts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ...formats import KVFormat
from . import launch


class Tiles(NamedTuple):
    tile: int  # keys of a tile
    rows: int  # query rows of a segment
    chunk: int  # words of the latent part that are multiplied as one tile (fp8_ds_mla: a scale group)
    stages: int
    num_warps: int
    max_registers: int | None  # None: the compiler's choice
    programs_per_sm: int
    min_tiles: int  # least share of a program, so that merging stays cheap
    tma: bool


def tiles(f: SimpleNamespace, fmt: KVFormat) -> Tiles:
    rows = max(16, min(64, launch.next_power_of_2(max(f.max_q_len * f.q_nope.shape[1], 1))))
    return Tiles(64, rows, 256, 3, 8 if rows == 64 else 4, None, 1, 1, True)
