"""Tile choices of paged decode, from facts. Measured with D 128, 32/8 heads (notes/decode.md), where no chip is named
on an H200 on 2026-11-21."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from ....formats import BLOCK, TOKEN_HEAD, KVFormat, pair_of
from ...host import launch
from ..parts.kv_cache_args import needs_two_term_query


class TileConfig(NamedTuple):
    block_n: int  # keys of a key block
    block_m: int  # query rows of a work tile
    num_stages: int
    blocks_per_step: int  # key blocks of one softmax step
    num_warps: int
    max_registers: int | None  # so that programs_per_sm fit; None: the compiler's choice
    programs_per_sm: int
    min_blocks: int  # of a program's range, so that the combine stays cheap
    use_tma: bool


# 64 × 8K, fp8: 258 µs; 16 × 64K: 497; 1 × 8K: 12.0 (three programs with one block a step: 269, 510, 13.6)
_TWO_PROGRAMS_PER_SM = TileConfig(64, 16, 3, 2, 4, None, 2, 1, True)
# 256 × 1K, fp8: 147 µs against 153 with two programs; per-token-head 64 × 8K: 284 against 294
_THREE_PROGRAMS_PER_SM = TileConfig(64, 16, 3, 1, 4, 168, 3, 1, True)
# 64 × 8K, bf16: 492 µs
_TILES_16_BIT = TileConfig(64, 16, 3, 1, 4, None, 2, 1, True)

# 4-bit codes cost instructions, not bytes. With one warp a program no warp converts what another converts too: V's
# words are M of its product, and four warps share the 32 rows that heads of 128 have. 64 × 8K on an H100 (2026-11-26):
# int4 211 µs (3 stages: 222; blocks of 64 keys: 215), nvfp4 257.
_ONE_WARP = TileConfig(32, 8, 4, 1, 1, 168, 12, 1, True)
# nvfp4 228 µs (blocks of 64 keys: 230; 16 programs, which spill: 504)
_ONE_WARP_BLOCK_SCALES = _ONE_WARP._replace(num_stages=3)

_SHORT_CONTEXT = 2048  # tokens of the page table; below, ranges are short and their epilogues cost most


def choose_tile_config(f: SimpleNamespace, fmt: KVFormat) -> TileConfig:
    """Returns the tile configuration. fmt: of keys; of values too, unless the facts name another."""
    listed = f.indices is not None
    page = 1 if listed else f.k_cache.shape[1]  # listed keys lie anywhere, as those of small pages do
    group = f.q.shape[1] // max(f.k_cache.shape[2], 1)
    block_m = max(16, min(64, launch.next_power_of_2(max(f.max_q_len * group, 1))))
    width = max(f.q.shape[2], f.out.shape[2])
    four_bits = max(x.values_per_element for x in pair_of(f)) > 1
    # NOTE: Triton 3.6 does not compile one warp with lists of keys and block scales.
    fits_one_warp = width <= 256 and not (listed and BLOCK in (x.scale for x in pair_of(f)))
    if four_bits and block_m == 16 and fits_one_warp and (launch.has_ptx(f) or launch.interpreting()):
        return _one_warp_4bit_tile_config(f, group)
    if fmt.storage.itemsize == 2 or fmt != pair_of(f)[1]:
        t = _TILES_16_BIT
    elif fmt.values_per_element > 1:
        # V of small pages is prefetched into registers: beside the zero-point sums, one key block a step fits.
        t = (
            _TWO_PROGRAMS_PER_SM
            if fmt.scale != TOKEN_HEAD or page % 64 == 0
            else _TWO_PROGRAMS_PER_SM._replace(blocks_per_step=1)
        )
    elif fmt.scale == TOKEN_HEAD:
        t = _THREE_PROGRAMS_PER_SM if page % 64 == 0 else _TWO_PROGRAMS_PER_SM
    elif page % 64:
        t = _THREE_PROGRAMS_PER_SM
    else:
        t = _THREE_PROGRAMS_PER_SM if f.page_table.shape[1] * page <= _SHORT_CONTEXT else _TWO_PROGRAMS_PER_SM
    t = t._replace(block_m=block_m)
    if listed:  # as compiled for sm_90: with three programs the places of keys spill
        t = t._replace(blocks_per_step=1, max_registers=None, programs_per_sm=2)
    if block_m > 16 or width > 128:  # more accumulators: leave the registers to the compiler
        t = t._replace(
            blocks_per_step=1, max_registers=None, programs_per_sm=2 if block_m * width <= 4096 else 1, num_stages=3
        )
    if width > 128:
        t = t._replace(block_n=32, num_stages=2, num_warps=4 if block_m <= 16 else 8)
    return _shrink_to_fit_shared_memory(t, f, fmt)


def _one_warp_4bit_tile_config(f: SimpleNamespace, group: int) -> TileConfig:
    """Returns the tiles of a program of one warp: as many programs per SM as its shared memory holds."""
    k, v = pair_of(f)
    t = _ONE_WARP_BLOCK_SCALES if BLOCK in (k.scale, v.scale) else _ONE_WARP
    t = t._replace(block_m=8 if f.max_q_len * group <= 8 else 16)
    width = max(f.q.shape[2], f.out.shape[2])
    if t.block_m * width > 1024:
        t = t._replace(max_registers=None, programs_per_sm=8)
    stage = t.block_n * sum(
        x.code_bytes(launch.next_power_of_2(n)) for x, n in ((k, f.q.shape[2]), (v, f.out.shape[2]))
    )
    scratch = 4096 + t.block_n * launch.next_power_of_2(width) * 2
    programs = launch.shared_memory_bytes_per_cta(f) // (t.num_stages * stage + scratch)
    t = t._replace(programs_per_sm=max(1, min(t.programs_per_sm, programs)))
    if t.max_registers and any(
        x is not None for x in (f.k_signs, f.v_signs, f.k_channel_scale, f.v_channel_scale)
    ):  # as many as these programs leave, as compiled for sm_90: 168 spill 64 to 160 bytes
        t = t._replace(max_registers=min(224, 65536 // (32 * t.programs_per_sm) // 8 * 8))
    return t


def _shrink_to_fit_shared_memory(tile: TileConfig, f: SimpleNamespace, fmt: KVFormat) -> TileConfig:
    """Reduces stages, then BLOCK_N, then BLOCK_M, until the buffers fit the shared memory of one program."""
    while not _fits_shared_memory(tile, f, fmt, pair_of(f)[1]):
        if tile.blocks_per_step > 1:
            tile = tile._replace(blocks_per_step=1)
        elif tile.num_stages > 2:
            tile = tile._replace(num_stages=tile.num_stages - 1)
        elif tile.block_n > 16:
            tile = tile._replace(block_n=tile.block_n // 2)
        elif tile.block_m > 16:
            tile = tile._replace(block_m=tile.block_m // 2)
        else:
            return tile._replace(num_stages=1)
    return tile


def _fits_shared_memory(tile: TileConfig, f: SimpleNamespace, fmt: KVFormat, v_fmt: KVFormat) -> bool:
    d, dv = f.q.shape[2], f.out.shape[2]
    ring = tile.num_stages * tile.blocks_per_step * tile.block_n * (fmt.code_bytes(d) + v_fmt.code_bytes(dv))
    if ring > launch.shared_memory_bytes_per_cta(f) - 8192:  # P and what the compiler adds
        return False
    # Measured of the compiler with many wide rows, for sm_80, 90 and 120: queries (two terms, where used), all stages
    # but one, and one dequantized tile; two where a value has less than a byte.
    d, dv = launch.next_power_of_2(d), launch.next_power_of_2(dv)
    terms = 1 + needs_two_term_query(f, fmt)
    queries, stage = (
        tile.block_m * d * 2 * terms,
        tile.blocks_per_step * tile.block_n * (fmt.code_bytes(d) + v_fmt.code_bytes(dv)),
    )
    sizes = (n * 2 * (2 if x.values_per_element > 1 else 1) for n, x in ((d, fmt), (dv, v_fmt)))
    converted = tile.blocks_per_step * tile.block_n * max(sizes)
    return queries + (tile.num_stages - 1) * stage + converted + 4096 <= launch.shared_memory_bytes_per_cta(f)
