"""Tile choices of Gluon's decode, from facts. Measured on an H200, 2026-11-21 (docs/measured.md), D 128, 32/8 heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ...formats import BLOCK, kv_format
from ..triton import launch

FEW_ROWS = 32  # of a KV head, to which decode_attend is the faster kernel


class Tiles(NamedTuple):
    tile: int  # keys of a turn
    stages: int
    programs_per_sm: int  # of four warps
    max_registers: int | None  # so that programs_per_sm fit; None: the compiler's choice
    min_tiles: int = 1  # least share of a program
    heads: int = 4  # KV heads of a program, at most
    row_warps: int = 1  # warps of a head
    wide: bool = False  # by decode_wide


def query_rows(f: SimpleNamespace) -> int:
    return f.max_q_len * f.q.shape[1] // max(f.k_cache.shape[2], 1)


def many_rows(f: SimpleNamespace) -> bool:
    """Too many query rows for warps that convert the codes for themselves."""
    return query_rows(f) > FEW_ROWS


def rows_at_once(f: SimpleNamespace) -> int:
    """Query rows of a segment."""
    return min(max(64 if many_rows(f) else 8, launch.next_power_of_2(query_rows(f))), 128)


def heads_of(f: SimpleNamespace, most: int = 4) -> int:
    """KV heads of a program."""
    return next(n for n in (8, 4, 2, 1) if n <= most and f.k_cache.shape[2] % n == 0)


# 64 × 8K: 249 µs, 64 × 1K: 37.3, 256 × 1K: 138, 256 × 8K: 947, 1 × 8K: 10.3, 1 × 128K: 67.6
_WIDE = Tiles(64, 3, 1, 255)
# 64 × 8K: 251 µs, 64 × 1K: 41.7, 256 × 1K: 143; with pages of 16 248 to 255, where _WIDE takes 260
_NARROW = Tiles(32, 2, 3, 168)
# 64 × 8K: 168 µs with a copying warp where it was 178 without; two programs of three stages 173, four of half a tile
# (without) 187 to 190; one program of three teams of warps 288: its code is three times as long
_FOUR_BITS = Tiles(64, 2, 3, 168)
# 32 rows, 64 × 8K: fp8 321 µs, per token and head 366, int8 411, nvfp4 462
_MANY_ROWS = Tiles(64, 3, 1, 255)
# 64 rows, 64 × 8K: fp8 396 µs (two programs 407), per token and head 507, int8 534, nvfp4 507; 128 rows 819 to 903
_WIDE_ROWS = Tiles(64, 4, 2, 255, heads=1, wide=True)


def tiles(f: SimpleNamespace) -> Tiles:
    fmt = kv_format(f.format)
    t = _FOUR_BITS if fmt.scale == BLOCK else _NARROW if f.k_cache.shape[1] % 64 else _WIDE
    width, rows = max(f.q.shape[2], f.out.shape[2]), rows_at_once(f)
    if many_rows(f):
        return _wide(f, rows)
    if rows > 16:
        t = _MANY_ROWS._replace(row_warps=rows // 16, heads=max(1, 128 // rows))
    elif t.programs_per_sm > 2 and width * rows > 1024:  # twice the accumulators
        t = t._replace(programs_per_sm=2, max_registers=255)
    row = fmt.row_bytes(f.q.shape[2]) + fmt.row_bytes(f.out.shape[2])
    limit = launch.shared_memory(f) // t.programs_per_sm - 2048
    while t.tile > 16 and t.stages * t.tile * row * heads_of(f) > limit:
        t = t._replace(tile=t.tile // 2)
    return t


def _wide(f: SimpleNamespace, rows: int) -> Tiles:
    """Tiles of decode_wide: as many stages as fit beside the query and a tile's fp16 keys and values."""
    fmt, d, dv = kv_format(f.format), f.q.shape[2], f.out.shape[2]
    t = _WIDE_ROWS._replace(row_warps=rows // 16, programs_per_sm=128 // rows)
    if max(d, dv) > 128:
        t = t._replace(tile=32)
    elif rows == 64 and d == dv == 128 and f.k_scale_cache is None:
        t = t._replace(programs_per_sm=3, max_registers=168)
    query = 0 if rows == t.tile and d <= 128 else rows  # else it is held in registers
    fixed = 2 * (query * d + t.tile * (d + dv)) + 4096
    stage = t.tile * (fmt.code_bytes(d) + fmt.code_bytes(dv))
    return t._replace(stages=max(2, min(6, (launch.shared_memory(f) // t.programs_per_sm - fixed) // stage)))


def merge_tile(pieces: int, rows: int, columns: int) -> tuple[int, int, int]:
    """(rows, pieces, columns) that a program of the merge reads at once: 64 numbers a thread."""
    pieces = min(256, max(4, launch.next_power_of_2(pieces)))
    columns = min(8192 // pieces, launch.next_power_of_2(columns))
    return min(8192 // pieces // columns, launch.next_power_of_2(rows)), pieces, columns


def joins(f: SimpleNamespace, programs: int, shares: int, numbers: int) -> bool:
    """Whether the last program to deliver a piece of a segment merges it, instead of a second launch.

    numbers: of a piece's state

    A launch less costs the host 4 µs less; 64 × 1K 36.1 → 35.4 µs, 64 × 8K 246 → 244. Where pieces are many one program
    alone merges longer than a second launch takes, 2 µs (8 × 8K 38.3 → 40.0, 16 unequal requests 65.7 → 67.7); and
    programs that share a multiprocessor hold each other up (nvfp4 64 × 1K 35.9 → 38.3, pages of 16 42.2 → 44.1).
    """
    rows = 1 if f.cu_seqlens_q is not None else -(-query_rows(f) // rows_at_once(f))
    pieces = shares / max(f.seq_lens.shape[0] * rows, 1)  # of a segment, where all are alike
    small = rows_at_once(f) <= 16 and numbers <= 4096 and pieces * numbers <= 8192
    return small and pieces <= 3 and programs <= launch.num_sms(f)


def join_tile(rows: int, columns: int) -> tuple[int, int, int]:
    """(rows of a head, pieces, columns) that a joining program takes at once, in 16 to 64 numbers a thread."""
    rows = launch.next_power_of_2(rows)
    columns = min(columns, max(16, 1024 // rows))
    return rows, max(1, 1024 // (rows * columns)), columns


def copy_keys(f: SimpleNamespace, t: Tiles) -> int:
    """Keys of one tensor copy: as many of a tile as lie in one page, whatever its size."""
    keys = t.tile
    while f.k_cache.shape[1] % keys:
        keys //= 2
    fmt = kv_format(f.format)
    return keys if max(fmt.code_bytes(f.q.shape[2]), fmt.code_bytes(f.out.shape[2])) <= 128 else 16
