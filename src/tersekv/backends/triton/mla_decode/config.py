"""Tile choices of MLA decode, from facts. Nothing is timed at run time.

As compiled for sm_90: blocks of 32 keys leave room for 64 query rows × 512 columns of fp32 accumulators (128 registers
a thread of 8 warps) without spills, where blocks of 64 keys spill; and two programs of 4 warps fit a multiprocessor
where few query rows leave decode bound by bytes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ....formats import KVFormat
from ...host import launch


class TileConfig(NamedTuple):
    block_n: int  # keys of a key block
    block_m: int  # query rows of a work tile
    chunk_columns: int  # 16-bit words of the latent part in one tile (fp8_ds_mla: a scale group)
    num_stages: int
    num_warps: int
    max_registers: int | None  # None: the compiler's choice
    programs_per_sm: int
    min_blocks: int  # of a program's range, so that the combine stays cheap
    use_tma: bool


def choose_tile_config(f: SimpleNamespace, fmt: KVFormat) -> TileConfig:
    codes = fmt.storage.itemsize == 1
    # Less shared memory (99 KB on sm_86, 89 and 120), and no wgmma, whose accumulators cost least.
    small = f.arch is None or f.arch < 90 or f.arch >= 120
    block_m = max(16, min(32 if small else 64, launch.next_power_of_2(max(f.max_q_len * f.q_nope.shape[1], 1))))
    page = f.ckv.shape[1]
    block_n = 32 if codes or not small else 16
    if 16 <= page < block_n and launch.next_power_of_2(page) == page and launch.has_tma(f):
        block_n = page
    num_stages = (4 if codes and not small else 3) if f.arch is not None else 1
    few = block_m == 16
    return TileConfig(
        block_n, block_m, 64 if codes else 128, num_stages, 4 if few else 8, None, 2 if few else 1, 1, True
    )


def benchmark_tile_configs_chosen_first(f: SimpleNamespace, fmt: KVFormat) -> list[TileConfig]:
    """Returns what is worth timing on a chip, the choice first."""
    first = choose_tile_config(f, fmt)
    others: list[dict] = [{"num_stages": first.num_stages + n} for n in (-1, 1)]
    if fmt.storage.itemsize == 1:
        others += [{"chunk_columns": 128}]
        if first.block_m == 16:
            others += [
                {"block_n": 64, "num_warps": 8, "programs_per_sm": 1},
                {"num_warps": 8, "programs_per_sm": 1, "num_stages": 6},
                {"programs_per_sm": 1, "num_stages": 6},
            ]
    else:
        others += [{"chunk_columns": 256}, {"chunk_columns": 64}]
    if first.block_m > 16:
        others += [{"block_m": 32, "num_warps": 8}, {"block_m": 16, "num_warps": 4, "programs_per_sm": 2}]
    return [first, *(first._replace(**change) for change in others)]
