"""Tile choices of paged decode, from facts. Measured on an H200 on 2026-11-21 (notes/decode.md), D 128, 32/8 heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch

from ....formats import TOKEN_HEAD, KVFormat, pair_of
from ...host import launch


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


# 64 × 8K, fp8: 258 µs; 16 × 64K: 497; 1 × 8K: 12.0 (three programs with one tile a step: 269, 510, 13.6)
_TWO = Tiles(64, 16, 3, 2, 4, None, 2, 1, True)
# 256 × 1K, fp8: 147 µs against 153 with two programs; per-token-head 64 × 8K: 284 against 294
_THREE = Tiles(64, 16, 3, 1, 4, 168, 3, 1, True)
# 64 × 8K, bf16: 492 µs
_HALF = Tiles(64, 16, 3, 1, 4, None, 2, 1, True)

_SHORT = 2048  # tokens that the page table can hold, below which segments are short and their ends cost most


def two_terms(f: SimpleNamespace, fmt: KVFormat) -> bool:
    """Over bf16 keys a query that bf16 would round is multiplied as the sum of two bf16 tiles."""
    turned = f.k_signs is not None or f.k_channel_scale is not None
    return fmt.code == "bf16" and (turned or f.q.dtype == torch.float16)


def tiles(f: SimpleNamespace, fmt: KVFormat) -> Tiles:
    """fmt: of keys; of values too, unless the facts say another."""
    page = f.k_cache.shape[1]
    group = f.q.shape[1] // max(f.k_cache.shape[2], 1)
    rows = max(16, min(64, launch.next_power_of_2(max(f.max_q_len * group, 1))))
    width = max(f.q.shape[2], f.out.shape[2])
    if fmt.storage.itemsize == 2 or fmt != pair_of(f)[1]:
        t = _HALF
    elif fmt.values_per_element > 1:
        # Values of small pages are carried in registers: with sums of zero points beside them, one tile a step fits.
        t = _TWO if fmt.scale != TOKEN_HEAD or page % 64 == 0 else _TWO._replace(unroll=1)
    elif fmt.scale == TOKEN_HEAD:
        t = _THREE if page % 64 == 0 else _TWO
    elif page % 64:
        t = _THREE
    else:
        t = _THREE if f.page_table.shape[1] * page <= _SHORT else _TWO
    t = t._replace(rows=rows)
    if rows > 16 or width > 128:  # more accumulators: leave the registers to the compiler
        t = t._replace(unroll=1, max_registers=None, programs_per_sm=2 if rows * width <= 4096 else 1, stages=3)
    if width > 128:
        t = t._replace(tile=32, stages=2, num_warps=4 if rows <= 16 else 8)
    return _fit(t, f, fmt)


def _fit(t: Tiles, f: SimpleNamespace, fmt: KVFormat) -> Tiles:
    """Fewer stages, then smaller tiles, then fewer query rows, until the buffers fit the shared memory of one block."""
    while not _fits(t, f, fmt, pair_of(f)[1]):
        if t.unroll > 1:
            t = t._replace(unroll=1)
        elif t.stages > 2:
            t = t._replace(stages=t.stages - 1)
        elif t.tile > 16:
            t = t._replace(tile=t.tile // 2)
        elif t.rows > 16:
            t = t._replace(rows=t.rows // 2)
        else:
            return t._replace(stages=1)
    return t


def _fits(t: Tiles, f: SimpleNamespace, fmt: KVFormat, v_fmt: KVFormat) -> bool:
    d, dv = f.q.shape[2], f.out.shape[2]
    ring = t.stages * t.unroll * t.tile * (fmt.code_bytes(d) + v_fmt.code_bytes(dv))
    if ring > launch.shared_memory(f) - 8192:  # probabilities and what the compiler adds
        return False
    # What the compiler was seen to take with many wide rows, for sm_80, 90 and 120: queries (of two terms, if they have
    # them), all stages but one, and a tile that is converted; two where a value has less than a byte.
    d, dv = launch.next_power_of_2(d), launch.next_power_of_2(dv)
    terms = 1 + two_terms(f, fmt)
    queries, stage = t.rows * d * 2 * terms, t.unroll * t.tile * (fmt.code_bytes(d) + v_fmt.code_bytes(dv))
    sizes = (n * 2 * (2 if x.values_per_element > 1 else 1) for n, x in ((d, fmt), (dv, v_fmt)))
    converted = t.unroll * t.tile * max(sizes)
    return queries + (t.stages - 1) * stage + converted + 4096 <= launch.shared_memory(f)
