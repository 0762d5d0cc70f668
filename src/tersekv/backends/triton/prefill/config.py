"""Tile choices of paged prefill, from facts. Numbers are TFLOP/s on an H100 on 2026-11-26 (notes/prefill.md): a prompt
of 8192, 32/8 heads of 128 or 24/4 of 256. Where products take registers nothing is measured: what spills little."""

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


# bf16: 440 (128 × 128: 383, 64 × 64: 432)
_TILES_16_BIT = TileConfig(128, 64, 3, 8)
# fp8: 315, nvfp4: 295 (128 × 64: 283, 253; 128 × 32: 222, 190)
_TILES_CODES = TileConfig(128, 128, 2, 8)
# int8, int4: 275 (128 × 128: 254, 266; 128 × 64: 209, 214; 128 × 32: 144, 139)
_TILES_TOKEN_SCALES = TileConfig(64, 128, 2, 4)
# Of new rows too, after codes, and of short prompts, which would waste the most of a larger block's keys. int8: 224,
# nvfp4: 273, fp8: 296, int4: 235, bf16: 432
_TILES_SMALL = TileConfig(64, 64, 3, 4)
_SHORT_PROMPT = 256  # new tokens of a request
# Heads of 256. bf16: 475, fp8: 304, int8: 220 (64 × 32 by 8 warps: 153, 128, 94)
_TILES_WIDE = TileConfig(128, 64, 2, 8)
# Of new rows too, with which ptxas 12.8 loses the place of a product in the larger; alone 419, 275, 203
_TILES_WIDE_NEW_ROWS = TileConfig(128, 32, 3, 8)
# With 8-bit K and 16-bit V, ptxas 12.8 loses a descriptor in that tile too, for some strides of new rows.
_TILES_WIDE_NEW_ROWS_16_BIT_VALUES = TileConfig(64, 32, 3, 4)


def choose_tile_config(f: SimpleNamespace, k: KVFormat, v: KVFormat) -> TileConfig:
    group = f.q.shape[1] // max(f.k_cache.shape[2], 1)
    values, max_head_dim = (launch.next_power_of_2(n) for n in (f.out.shape[2], max(f.q.shape[2], f.out.shape[2])))
    operands_in_smem = f.arch is not None and 90 <= f.arch < 120  # the matrix unit reads shared memory
    t = (
        _smem_operand_tile_config(f, k, v, max_head_dim)
        if operands_in_smem
        else _register_operand_tile_config(max_head_dim, values)
    )
    # ptxas 12.8 never moves the address of values of at most 64 bytes a row to the uniform registers in which offsets
    # are added, so that products read outside shared memory.
    if operands_in_smem and values <= 32:
        t = t._replace(block_n=min(t.block_n, 32))
    # Blocks are not shared between requests: of few rows, a smaller one wastes less.
    needed = max(16, launch.next_power_of_2(f.max_q_len * group))
    if needed < 64:
        t = t._replace(block_n=min(t.block_n, 32 if {TOKEN_HEAD, BLOCK} & {k.scale, v.scale} else 64))
    if needed < t.block_m:
        t = _with_block_m_and_warps(t, needed, max_head_dim, operands_in_smem)
        if max_head_dim > 128 and k.storage.itemsize == 2:
            t = t._replace(block_n=min(t.block_n, 32))  # 64 rows of heads of 256, bf16: 345 (64 keys: 157; fp8: 268)
    while not _fits_shared_memory(t, f, k, v):
        if t.num_stages > 2:
            t = t._replace(num_stages=2)
        elif max_head_dim > 128 and t.block_n > 32:
            t = t._replace(block_n=32)
        elif t.block_m > 64:
            t = _with_block_m_and_warps(t, 64, max_head_dim, operands_in_smem)
        elif t.block_n > 16:
            t = t._replace(block_n=t.block_n // 2)
        elif t.block_m > 16:
            t = t._replace(block_m=t.block_m // 2)
        else:
            return t._replace(num_stages=1)
    return t


def choose_tile_config_of_listed_blocks(f: SimpleNamespace, k: KVFormat, v: KVFormat) -> TileConfig:
    """Of 64 rows: the more tokens share a tile, the fewer of them list each of its blocks. A key block is in one listed
    block."""
    t = choose_tile_config(f, k, v)
    max_head_dim = launch.next_power_of_2(max(f.q.shape[2], f.out.shape[2]))
    if t.block_m > 64:
        operands_in_smem = f.arch is not None and 90 <= f.arch < 120
        t = _with_block_m_and_warps(t, 64, max_head_dim, operands_in_smem)
    return t._replace(block_n=min(t.block_n, f.block_size & -f.block_size))


def _smem_operand_tile_config(f: SimpleNamespace, k: KVFormat, v: KVFormat, max_head_dim: int) -> TileConfig:
    if max_head_dim > 256:
        return TileConfig(32, 16, 2, 8)
    if max_head_dim > 128 and f.k is not None:
        keys_alone_have_codes = k.storage.itemsize < v.storage.itemsize
        return _TILES_WIDE_NEW_ROWS_16_BIT_VALUES if keys_alone_have_codes else _TILES_WIDE_NEW_ROWS
    if max_head_dim > 128:
        return _TILES_WIDE
    if k.storage.itemsize == v.storage.itemsize == 2:
        return _TILES_16_BIT
    if f.k is not None or f.max_q_len < _SHORT_PROMPT:
        return _TILES_SMALL
    return _TILES_TOKEN_SCALES if TOKEN_HEAD in (k.scale, v.scale) else _TILES_CODES


def _register_operand_tile_config(max_head_dim: int, value_dim: int) -> TileConfig:
    """A thread holds queries, keys and the scales of all keys of its block in registers."""
    if max_head_dim > 256:
        return TileConfig(32, 16, 2, 8)
    if max_head_dim > 128:
        return TileConfig(64 if value_dim > 128 else 128, 32, 2, 8)
    return TileConfig(128, 64 if max_head_dim <= 64 else 32, 3, 8)


def _with_block_m_and_warps(t: TileConfig, block_m: int, max_head_dim: int, operands_in_smem: bool) -> TileConfig:
    # A product of 64 rows is of four warps; of heads of 256, four hold the accumulators where one is of 64 rows.
    few_warps = block_m <= 64 and (max_head_dim <= 128 or (max_head_dim <= 256 and block_m == 64 and operands_in_smem))
    return t._replace(block_m=block_m, num_warps=4 if few_warps else 8)


def _fits_shared_memory(tile: TileConfig, f: SimpleNamespace, k: KVFormat, v: KVFormat) -> bool:
    """Whether queries, key blocks in flight and a dequantized tile of K and V fit the shared memory of one program."""
    d, dv = (launch.next_power_of_2(n) for n in (f.q.shape[2], f.out.shape[2]))
    queries = tile.block_m * d * 2 * (1 + needs_two_term_query(f, k))
    ring = tile.num_stages * tile.block_n * (k.code_bytes(d) + v.code_bytes(dv))
    if f.k is not None:
        ring = max(ring, tile.num_stages * tile.block_n * (d + dv) * 2)
    sides = ((n, x) for n, x in ((d, k), (dv, v)) if x.storage.itemsize == 1)
    converted = sum(tile.block_n * n * 2 for n, x in sides)
    return queries + ring + converted + tile.block_m * tile.block_n * 2 + 4096 <= launch.shared_memory_bytes_per_cta(f)
