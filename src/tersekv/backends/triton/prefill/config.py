"""Tile choices of paged prefill, from facts. Not measured yet: chosen by what fits and compiles without spills."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ....formats import BLOCK, TOKEN_HEAD, KVFormat
from ...host import launch
from ..parts.kv_cache_args import needs_two_term_query


class TileConfig(NamedTuple):
    block_m: int  # query rows of a work tile
    block_n: int  # keys of a key block
    num_stages: int
    num_warps: int


def choose_tile_config(f: SimpleNamespace, k: KVFormat, v: KVFormat) -> TileConfig:
    group = f.q.shape[1] // max(f.k_cache.shape[2], 1)
    values, width = (launch.next_power_of_2(n) for n in (f.out.shape[2], max(f.q.shape[2], f.out.shape[2])))
    t = (
        TileConfig(128, 64, 3, 8)
        if width <= 128
        else TileConfig(64, 32, 2, 8)
        if width <= 256
        else TileConfig(32, 16, 2, 8)
    )
    if width == 256 and values <= 128:
        t = t._replace(block_m=128)
    # Registers: a thread holds the scales of all keys of its block, and where the matrix unit reads no shared memory
    # queries and keys too.
    operands = f.arch is None or f.arch < 90 or f.arch >= 120
    kinds = k.scale, v.scale
    if width > 64 and (operands or TOKEN_HEAD in kinds or (BLOCK in kinds and f.k is not None)):
        t = t._replace(block_n=min(t.block_n, 32))
    # Blocks of 64 keys, values of at most 64 bytes a row, new rows after pages: ptxas 12.8 never moves V's address to
    # the uniform registers in which offsets are added, so that products read outside shared memory.
    if not operands and v.code_bytes(values) <= 64:
        t = t._replace(block_n=min(t.block_n, 32))
    # Blocks are not shared between requests: of few rows, a smaller one wastes less.
    needed = max(16, launch.next_power_of_2(f.max_q_len * group))
    if needed < t.block_m:
        t = t._replace(block_m=needed, num_warps=4 if needed <= 64 and width <= 128 else 8)
    while not _fits_shared_memory(t, f, k, v):
        if t.num_stages > 2:
            t = t._replace(num_stages=2)
        elif t.block_m > 64:
            t = t._replace(block_m=64, num_warps=4 if width <= 128 else 8)
        elif t.block_n > 16:
            t = t._replace(block_n=t.block_n // 2)
        elif t.block_m > 16:
            t = t._replace(block_m=t.block_m // 2)
        else:
            return t._replace(num_stages=1)
    return t


def _fits_shared_memory(t: TileConfig, f: SimpleNamespace, k: KVFormat, v: KVFormat) -> bool:
    """Whether queries, key blocks in flight and a dequantized tile of K and V fit the shared memory of one program."""
    d, dv = (launch.next_power_of_2(n) for n in (f.q.shape[2], f.out.shape[2]))
    queries = t.block_m * d * 2 * (1 + needs_two_term_query(f, k))
    ring = t.num_stages * t.block_n * (k.code_bytes(d) + v.code_bytes(dv))
    if f.k is not None:
        ring = max(ring, t.num_stages * t.block_n * (d + dv) * 2)
    sides = ((n, x) for n, x in ((d, k), (dv, v)) if x.storage.itemsize == 1)
    converted = sum(t.block_n * n * 2 * (2 if x.scale == BLOCK else 1) for n, x in sides)
    return queries + ring + converted + t.block_m * t.block_n * 2 + 4096 <= launch.shared_memory(f)
