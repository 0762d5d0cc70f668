"""Tile choices of MLA decode, from facts. Nothing is timed at run time.

What the choices follow, as compiled for sm_90: tiles of 32 keys leave room for 64 query rows × 512 columns of fp32
accumulators (128 registers a thread of 8 warps) without spills, where tiles of 64 keys spill; and two programs of 4
warps fit a multiprocessor where few query rows leave decode bound by bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ....formats import KVFormat
from ...host import launch


class Tiles(NamedTuple):
    tile: int  # keys of a tile
    rows: int  # query rows of a segment
    chunk: int  # words of the latent part that are loaded and multiplied as one tile (fp8_ds_mla: a scale group)
    stages: int
    num_warps: int
    max_registers: int | None  # None: the compiler's choice
    programs_per_sm: int
    min_tiles: int  # least share of a program, so that merging stays cheap
    tma: bool


def tiles(f: SimpleNamespace, fmt: KVFormat) -> Tiles:
    codes = fmt.storage.itemsize == 1
    # Less shared memory (99 KB on sm_86, 89 and 120), and no wgmma, whose accumulators cost least.
    small = f.arch is None or f.arch < 90 or f.arch >= 120
    rows = max(16, min(32 if small else 64, launch.next_power_of_2(max(f.max_q_len * f.q_nope.shape[1], 1))))
    page = f.ckv.shape[1]
    tile = 32 if codes or not small else 16
    if 16 <= page < tile and launch.next_power_of_2(page) == page and launch.has_tma(f):
        tile = page
    stages = (4 if codes and not small else 3) if f.arch is not None else 1
    few = rows == 16
    return Tiles(tile, rows, 64 if codes else 128, stages, 4 if few else 8, None, 2 if few else 1, 1, True)


def candidates(f: SimpleNamespace, fmt: KVFormat) -> list[Tiles]:
    """What is worth timing on a chip, the choice first."""
    first = tiles(f, fmt)
    others: list[dict] = [{"stages": first.stages + n} for n in (-1, 1)]
    if fmt.storage.itemsize == 1:
        others += [{"chunk": 128}]
        if first.rows == 16:
            others += [
                {"tile": 64, "num_warps": 8, "programs_per_sm": 1},
                {"num_warps": 8, "programs_per_sm": 1, "stages": 6},
                {"programs_per_sm": 1, "stages": 6},
            ]
    else:
        others += [{"chunk": 256}, {"chunk": 64}]
    if first.rows > 16:
        others += [{"rows": 32, "num_warps": 8}, {"rows": 16, "num_warps": 4, "programs_per_sm": 2}]
    return [first, *(first._replace(**change) for change in others)]
