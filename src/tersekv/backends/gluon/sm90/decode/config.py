"""Chooses the tile configuration of Gluon's decode, from facts.

Measured on an H200, 2026-11-21 (notes/decode.md), D 128, 32/8 heads.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

from .....formats import BLOCK, TOKEN_HEAD, kv_format, pair_of
from ....host import launch
from ....host.key_lists import has_list_per_head
from ..parts.tensor_maps import (
    MMA_KEYS,
    are_scales_copied_by_word,
    kv_copy_spec_or_none,
    kv_map_spec_or_none,
    scale_map_spec_of_a_head_or_none,
)
from .scale_words import scale_shift_and_unaligned, words_per_scale_row

SMALL_M_ROWS = 32  # of a KV head, up to which `kernel` is the faster one
SMALL_M_ROWS_4BIT = 16  # where decode_producer_warp does not take 32, and of 8 bits with many keys
SHORT_CONTEXT, SHORT_CONTEXT_4BIT = 384, 1024  # keys of a page table row, up to which requests are short
FEW_SPLITS = 1.5  # splits of a work tile, on average: with no more, few are split
LARGE_CACHE_KEYS = 2**17  # keys of the page table, from which on 32 rows go to decode_producer_warp or rows_64
KEY_PARTS = 4  # of 16 keys of an MMA tile each
KEY_PARTS_MAX_KEYS = 1024  # of a page table row: longer requests go by heads, one warp each
KEY_PARTS_CTAS_PER_SM = 0.75, 3  # requests × KV heads: fewer are split, more do not run at once
KEY_PARTS_VERY_SHORT_KEYS, KEY_PARTS_VERY_SHORT_CTAS_PER_SM = 256, (0.2, 3.25)
KEY_PARTS_MAX_STAGES = 4
LISTED_MAX_UNSPLIT_KEYS = 4096  # of a list per head: longer ones repay even ranges and a combine
MAX_ROWS_16BIT = 16  # up to which it is faster than Triton's: 32 rows of bf16, 64 × 8K, 522 against 515 µs


class TileConfig(NamedTuple):
    """Tile configuration of the split pass."""

    block_n: int  # keys of an iteration
    num_stages: int
    ctas_per_sm: int  # of four warps
    max_registers: int | None  # so that ctas_per_sm fit; None: the compiler's choice
    min_blocks_per_range: int = 1
    heads_per_cta: int = 4  # KV heads, at most
    warps_per_head: int = 1
    shared_tiles: bool = False  # by shared_tiles or rows_64
    producer_warp: bool = False  # by kernel_producer_warp: one warp copies for four others
    rows_64: bool = False  # by rows_64
    converted_stages: int = 0  # fp16 stages of rows_64
    key_parts: int = 1  # parts of the keys of the CTA's one KV head, each of other warps


MAX_PART_COLUMNS = 256  # an accumulator of more columns does not fit in a warp's registers


def facts_with_head_dim_parts_as_heads(f: SimpleNamespace) -> SimpleNamespace:
    """Returns the facts, and `head_dim_parts`, into which the columns of a wide head are divided, each part of other
    warps. Each counts as a head, in shapes too; token scales, and strides of heads, stay those of heads."""
    parts = 2 if f.q.shape[2] == f.out.shape[2] == 2 * MAX_PART_COLUMNS else 1
    if parts == 1:
        return SimpleNamespace(**vars(f), head_dim_parts=1)

    def divided(x: Any) -> Any:
        *outer, heads, width = x.shape
        return x._replace(shape=(*outer, heads * parts, width // parts))

    def divided_block_scales(x: Any) -> Any:
        s_p, s_s, s_h, *rest = x.stride
        return divided(x)._replace(stride=(s_p, s_s, s_h // parts if s_h == x.shape[3] else s_h, *rest))

    changed = {name: divided(getattr(f, name)) for name in ("q", "out", "k_cache", "v_cache")}
    for name, fmt in zip(("k_scale_cache", "v_scale_cache"), pair_of(f), strict=True):
        if fmt.scale == BLOCK:
            changed[name] = divided_block_scales(getattr(f, name))
    return SimpleNamespace(**vars(f) | changed, head_dim_parts=parts)


def num_query_rows(f: SimpleNamespace) -> int:
    """Returns the most query rows of a KV head in a request: tokens × group."""
    return f.max_q_len * f.q.shape[1] // max(f.k_cache.shape[2], 1)


def max_small_m_rows(f: SimpleNamespace) -> int:
    """Returns the query rows of a KV head up to which each warp dequantizes for itself; pairs and lists have no other
    kernel.

    int4 follows the measurements of nvfp4.
    """
    k, v = pair_of(f)
    if k != v or f.indices is not None or not head_dims_fit_kernel_of_rows_64(f):
        return SMALL_M_ROWS
    if has_4bit_codes(f):
        # By decode_producer_warp: each warp of four heads unpacks once for all 32 rows. 64 × 8K: 413 → 352 µs, 16 × 8K:
        # 140 → 110, pages of 16: 597 → 356; but it splits requests more often, which few keys do not repay: 64 × 1K
        # 68 → 78, 1 × 8K 22.6 → 28.7.
        pays_32_rows_per_warp = choose_heads_per_cta(f) == 4 and _num_cache_keys(f) >= LARGE_CACHE_KEYS
        return SMALL_M_ROWS if pays_32_rows_per_warp else SMALL_M_ROWS_4BIT
    # 24 × 6000, 32 rows, H100, 2026-11-26: fp8 142 → 130 µs, int8 135; without padding, which rows_64 does not read
    is_long = _num_cache_keys(f) >= LARGE_CACHE_KEYS and k.storage.itemsize == 1 and not has_padded_head_dims(f)
    return SMALL_M_ROWS_4BIT if is_long else SMALL_M_ROWS


def is_large_m(f: SimpleNamespace) -> bool:
    """Returns whether rows share the dequantized tiles (shared_tiles, rows_64)."""
    return num_query_rows(f) > max_small_m_rows(f)


def padded_head_dims(f: SimpleNamespace) -> tuple[int, int]:
    """Returns the columns of a K and a V row in shared memory, powers of two; the excess is 0 or a neighbour's."""
    return launch.next_power_of_2(f.q.shape[2]), launch.next_power_of_2(f.out.shape[2])


def has_padded_head_dims(f: SimpleNamespace) -> bool:
    """Returns whether rows are shorter than in shared memory."""
    return padded_head_dims(f) != (f.q.shape[2], f.out.shape[2])


def has_4bit_codes(f: SimpleNamespace) -> bool:
    """Returns whether keys or values have 4 bits."""
    return any(fmt.values_per_element > 1 for fmt in pair_of(f))


def smem_bytes_per_key(f: SimpleNamespace) -> int:
    """Returns the bytes of a key and its value in shared memory, stored scales included."""
    (k, v), (d, dv) = pair_of(f), padded_head_dims(f)
    return k.row_bytes(d) + v.row_bytes(dv)


def second_scale_plane_bytes_per_key(f: SimpleNamespace, heads_per_cta: int) -> int:
    """Returns what stored scales of a key and its value take beyond their rows (`scale_words`)."""
    nbytes, caches = 0, ((f.k_cache, f.k_scale_cache), (f.v_cache, f.v_scale_cache))
    for fmt, d, (codes, scales) in zip(pair_of(f), padded_head_dims(f), caches, strict=True):
        if are_scales_copied_by_word(fmt, scales):
            spec = kv_copy_spec_or_none(codes, heads_per_cta, MMA_KEYS)
            assert spec is not None
            nbytes += 4 * words_per_scale_row(d, scale_shift_and_unaligned(scales, spec)[1]) - d // 16
    return nbytes


def rotation_column_scales_smem_bytes(f: SimpleNamespace, heads: int) -> int:
    """Returns the bytes of the column scales of `heads` heads, where rows are rotated or have channel scales."""
    sides = ((f.k_signs, f.k_channel_scale, f.q), (f.v_signs, f.v_channel_scale, f.out))
    return sum(4 * heads * x.shape[2] for *rotation, x in sides if rotation != [None, None])


def _num_cache_keys(f: SimpleNamespace) -> int:
    """Returns the keys that the page table has room for."""
    return f.page_table.shape[0] * f.page_table.shape[1] * f.k_cache.shape[1]


def head_dims_fit_kernel_of_rows_64(f: SimpleNamespace) -> bool:
    """Returns whether two fp16 tiles each of K and V fit; else many rows go to shared_tiles."""
    d, dv = padded_head_dims(f)
    return d == dv <= 128


def choose_block_m(f: SimpleNamespace) -> int:
    """Returns the query rows of a work tile."""
    return min(max(64 if is_large_m(f) else 8, launch.next_power_of_2(num_query_rows(f))), 128)


def choose_heads_per_cta(f: SimpleNamespace, max_heads: int = 4) -> int:
    """Returns the KV heads of a CTA, or twice as many parts of them."""
    if has_list_per_head(f):
        return 1
    return next(n for n in (8, 4, 2, 1) if n <= max_heads * f.head_dim_parts and f.k_cache.shape[2] % n == 0)


# 64 × 8K: 249 µs, 64 × 1K: 37.3, 256 × 1K: 138, 256 × 8K: 947, 1 × 8K: 10.3, 1 × 128K: 67.6
# bf16 in tiles of 32, 64 × 8K: 484 µs (Triton's kernel 492), 64 × 1K: 65.8 (69.5), 1 × 8K: 14.0 (15.7)
_TILES_64_KEYS = TileConfig(64, 3, 1, 255)
# 64 × 8K: 251 µs, 64 × 1K: 41.7, 256 × 1K: 143; with pages of 16 248 to 255, where _TILES_64_KEYS takes 260
_TILES_32_KEYS = TileConfig(32, 2, 3, 168)
# Four heads and a producer warp: 64 × 8K: 156 µs, 64 × 1K: 30.5, 256 × 1K: 86.3, 16 × 8K: 47.8, 1 × 8K: 9.7,
# where three CTAs of two stages take 161, 33.4, 97.5, 53.3 and 11.0; four of half the keys 185, 32.8, 101 and 71.8
_TILES_4BIT = TileConfig(64, 3, 2, 255)
# 32 rows, 64 × 8K: fp8 309 µs, per token and head 360, int8 396
_TILES_32_ROWS = TileConfig(64, 3, 1, 255)
_TILES_32_ROWS_4BIT = TileConfig(16, 6, 2, 255, producer_warp=True)
# 64 rows, 64 × 8K: fp8 346 µs (396 by shared_tiles), per token and head 420 (507), int8 435 (534), nvfp4 436 (502);
# 128 rows: 510 (769), 700, 730, 630
_TILES_ROWS_64 = TileConfig(64, 0, 2, None, heads_per_cta=1, shared_tiles=True, rows_64=True)
_TILES_SHARED = TileConfig(64, 4, 2, 255, heads_per_cta=1, shared_tiles=True)


def choose_tile_config(f: SimpleNamespace, block_m: int) -> TileConfig:
    """Returns the tile configuration of the split pass, for work tiles of block_m query rows."""
    fmt = kv_format(f.format)
    tile_config = (
        _TILES_32_KEYS if f.k_cache.shape[1] % 64 or _has_many_short_requests(f, SHORT_CONTEXT) else _TILES_64_KEYS
    )
    if has_4bit_codes(f):
        tile_config = _TILES_4BIT._replace(
            producer_warp=choose_heads_per_cta(f) == 4,
            block_n=32 if _has_many_short_requests(f, SHORT_CONTEXT_4BIT) else 64,
        )
    if has_list_per_head(f) or (can_have_key_parts(f, block_m) and uses_key_parts(f)):
        return key_parts_config_with_max_stages(f, block_m)
    max_dim = max(padded_head_dims(f))
    if (fmt.storage.itemsize == 2 and max_dim > 64) or (has_padded_head_dims(f) and max_dim > 128):
        tile_config = tile_config._replace(block_n=32)
    if is_large_m(f):
        return (
            _rows_64_config_with_max_stages(f, block_m)
            if head_dims_fit_kernel_of_rows_64(f)
            else _shared_tiles_config_with_max_stages(f, block_m)
        )
    if block_m > 16 and tile_config.producer_warp and head_dims_fit_kernel_of_rows_64(f):
        tile_config = _TILES_32_ROWS_4BIT
    elif block_m > 16:
        heads = max(1, 128 // block_m // f.head_dim_parts)
        tile_config = _TILES_32_ROWS._replace(warps_per_head=block_m // 16, heads_per_cta=heads)
    elif tile_config.ctas_per_sm > 2 and max_dim * block_m > 1024:  # twice the accumulators
        tile_config = tile_config._replace(ctas_per_sm=2, max_registers=255)
    if block_m == 16 and max_dim > 128:
        max_heads = (2 if fmt.storage.itemsize == 2 else 4) // f.head_dim_parts
        has_four_heads = min(choose_heads_per_cta(f), max_heads) == 4
        tile_config = _with_two_warps_per_head_no_producer(tile_config, max_heads, has_four_heads)
    if f.head_dim_parts > 1:
        tile_config = _with_head_dim_parts_tuning(f, tile_config)
    heads = choose_heads_per_cta(f, tile_config.heads_per_cta)
    bytes_per_key = (smem_bytes_per_key(f) + second_scale_plane_bytes_per_key(f, heads)) * heads
    limit, max_block_n = (
        launch.shared_memory_bytes_per_cta(f) // tile_config.ctas_per_sm
        - 2048
        - rotation_column_scales_smem_bytes(f, heads),
        tile_config.block_n,
    )
    while tile_config.block_n > 16 and tile_config.num_stages * tile_config.block_n * bytes_per_key > limit:
        tile_config = tile_config._replace(block_n=tile_config.block_n // 2)
    if tile_config.producer_warp and (
        tile_config.block_n < max_block_n or has_padded_head_dims(f)
    ):  # more stages of fewer keys, to keep the memory busy
        tile_config = tile_config._replace(
            num_stages=max(tile_config.num_stages, min(4, limit // (tile_config.block_n * bytes_per_key)))
        )
    return tile_config


def _has_many_short_requests(f: SimpleNamespace, max_keys: int) -> bool:
    """Returns whether requests are short, and so many that some CTAs process whole ones. Then a small BLOCK_N wastes
    less at the ends of requests, and three CTAs of an SM wait less than one.

    1000 × 100: uneven fp8 85.7 → 74.3 µs, int8 98.6 → 82.3 (89.8 without fused combine), nvfp4 75.8 → 72.1; 1000 × 300:
    int8 202 → 178, nvfp4 156 → 125. Longer ones gain nothing: 300 × 500 fp8 85.2 → 87.8.
    """
    heads = choose_heads_per_cta(f)
    num_ctas = launch.num_sms(f) * _TILES_32_KEYS.ctas_per_sm * max(4 // heads, 1)
    has_few_requests = f.seq_lens.shape[0] * FEW_SPLITS < num_ctas // (f.k_cache.shape[2] // heads)
    return not has_few_requests and f.page_table.shape[1] * f.k_cache.shape[1] <= max_keys


def _with_two_warps_per_head_no_producer(
    tile_config: TileConfig, max_heads_per_cta: int, one_cta_per_sm: bool
) -> TileConfig:
    """Returns the configuration with a head's query rows divided between two warps: accumulators of 16 rows of more
    than 128 columns do not fit in one warp's registers.

    D 256, 16 heads over one, 4 × 254383: nvfp4 258 → 177 µs, int4 208 → 131; 4 × 200000, fp8_per_token_head: 280 → 125.
    Over eight, 64 × 2048: nvfp4 214 → 171, int4 157 → 125, fp8 189 → 170; 64 × 1024, bf16: 166 → 155.
    """
    tile_config = tile_config._replace(warps_per_head=2, heads_per_cta=max_heads_per_cta, producer_warp=False)
    return tile_config._replace(ctas_per_sm=1, max_registers=255) if one_cta_per_sm else tile_config


def uses_key_parts(f: SimpleNamespace) -> bool:
    """Returns whether the warps of a CTA divide the keys of one head: requests are short, and fill the GPU about once.

    H200, 2026-11-28, µs, by heads → here: fp8 19 × 485, 64/8 heads: 13.2 → 8.9; 42 × 923, pages of 32: 33.8 → 25.1;
    4 × 256, 32/8 heads: 6.7 → 4.6; int8 32 × 200: 12.4 → 9.6; int4 96 of up to 284, 28/4 heads: 12.7 → 10.2. More CTAs
    than run at once: fp8 64 × 500: 20.4 → 23.7. Small pages are many copies: int8 16 × 1000, pages of 16: 16.1 → 21.9.
    """
    ctas_per_sm = f.seq_lens.shape[0] * f.k_cache.shape[2] / launch.num_sms(f)
    page, max_keys = f.k_cache.shape[1], f.page_table.shape[1] * f.k_cache.shape[1]
    has_stored_scales = f.k_scale_cache is not None or f.v_scale_cache is not None
    if page % 64 and (has_stored_scales or (page % 32 and f.k_cache.dtype.itemsize == 1)):
        return False
    is_very_short = max_keys <= KEY_PARTS_VERY_SHORT_KEYS
    fewest, most = KEY_PARTS_VERY_SHORT_CTAS_PER_SM if is_very_short else KEY_PARTS_CTAS_PER_SM
    if key_parts_config_with_max_stages(f, choose_block_m(f)).ctas_per_sm < 2:  # not measured
        return False
    return max_keys <= KEY_PARTS_MAX_KEYS and fewest <= ctas_per_sm <= most


def can_have_key_parts(f: SimpleNamespace, block_m: int) -> bool:
    """Returns whether the warps of a CTA can divide the keys of one head: up to 16 query rows, heads of 64, 128 or 256
    columns, rows as they are, pages of a multiple of 16, and stored scales that can be copied for one head."""
    if block_m > 16 or is_large_m(f) or has_padded_head_dims(f) or f.head_dim_parts > 1:
        return False
    if any(x is not None for x in (f.k_signs, f.v_signs, f.k_channel_scale, f.v_channel_scale)):
        return False
    keys = num_keys_per_copy(f, TileConfig(KEY_PARTS * MMA_KEYS, 0, 0, None, key_parts=KEY_PARTS))
    sides = zip((f.k_cache, f.v_cache), (f.k_scale_cache, f.v_scale_cache), pair_of(f), strict=True)
    if keys % MMA_KEYS or key_parts_config_with_max_stages(f, block_m).num_stages < 2:
        return False
    return all(
        kv_map_spec_or_none(codes, 1, keys) is not None
        and (scales is None or scale_map_spec_of_a_head_or_none(scales, keys, fmt.scale == BLOCK) is not None)
        for codes, scales, fmt in sides
    )


def key_parts_config_with_max_stages(f: SimpleNamespace, block_m: int) -> TileConfig:
    """Returns the configuration of key parts: of three CTAs an SM, or of as many as have enough stages.

    Registers and shared memory of D 128, 8 rows: fp8 143, 60 KB; int8 158, 66; int4 150, 50; nvfp4 157, 50; bf16
    166, 82, of two CTAs.
    """
    (k, v), (d, dv), block_n = pair_of(f), padded_head_dims(f), KEY_PARTS * MMA_KEYS
    warps_per_head = 2 if block_m == 16 and max(d, dv) > 128 else 1
    # One accumulator of all parts, of as many as values have codes in 16 bits, is exchanged at a time.
    exchanged_bytes = 4 * KEY_PARTS * block_m * dv * v.storage.itemsize // (2 * v.values_per_element)
    scale_bytes = sum(16 for x in (k, v) if x.scale in (BLOCK, TOKEN_HEAD))  # of a key: see `tensor_maps`
    stage_bytes = block_n * (k.code_bytes(d) + v.code_bytes(dv) + scale_bytes) + block_m * d * f.q.dtype.itemsize
    # Three CTAs leave 168 registers. What spills then: large accumulators; four copies of everything, and splits.
    has_large_acc = max(d, dv) * block_m > 1024
    has_many_copies = has_list_per_head(f) and f.k_cache.shape[1] % 32 != 0 and scale_bytes > 0
    for ctas_per_sm, min_stages in ((2, 2), (1, 2)) if has_large_acc or has_many_copies else ((3, 3), (2, 2), (1, 2)):
        smem_bytes = launch.shared_memory_bytes_per_cta(f) // ctas_per_sm - 2048 - exchanged_bytes
        num_stages = min(KEY_PARTS_MAX_STAGES, smem_bytes // stage_bytes)
        max_registers = min(255, 65536 // (32 * KEY_PARTS * warps_per_head * ctas_per_sm) // 8 * 8)
        if num_stages >= min_stages and (warps_per_head == 1 or max_registers == 255):
            break
    return TileConfig(
        block_n, num_stages, ctas_per_sm, max_registers, heads_per_cta=1, warps_per_head=warps_per_head,
        key_parts=KEY_PARTS,
    )  # fmt: skip


def _with_head_dim_parts_tuning(f: SimpleNamespace, tile_config: TileConfig) -> TileConfig:
    """Returns the configuration for heads in column parts: two heads per CTA, or four where token scales of two are no
    multiple of 16 bytes.

    D 512, 16/4 heads, 64 × 4096, H100, 2026-11-26, µs: fp8 377 with two heads, 386 with four (Triton's kernel 521);
    nvfp4 231 with two CTAs of two heads and two stages, 240 with three, 265 with one CTA of four heads (757); int4 216
    with two stages, 224 with three (515)
    """
    heads, has_4bit = 4 if TOKEN_HEAD in (x.scale for x in pair_of(f)) else 2, has_4bit_codes(f)
    return tile_config._replace(
        num_stages=2 if has_4bit else tile_config.num_stages, heads_per_cta=min(tile_config.heads_per_cta, heads),
        ctas_per_sm=2 if has_4bit and heads == 2 else 1, max_registers=255, producer_warp=False,
    )  # fmt: skip


def _shared_tiles_config_with_max_stages(f: SimpleNamespace, block_m: int) -> TileConfig:
    """Returns the configuration of shared_tiles: as many stages as fit beside Q and the fp16 tiles of K and V."""
    fmt, d, dv = kv_format(f.format), f.q.shape[2], f.out.shape[2]
    tile_config = _TILES_SHARED._replace(warps_per_head=block_m // 16, ctas_per_sm=128 // block_m)
    if max(d, dv) > 128:
        tile_config = tile_config._replace(block_n=32)
    query_rows = 0 if block_m == tile_config.block_n and d <= 128 else block_m  # 0: Q is held in registers
    fixed_bytes = 2 * (query_rows * d + tile_config.block_n * (d + dv)) + 4096 + rotation_column_scales_smem_bytes(f, 1)
    stage_bytes = tile_config.block_n * (fmt.code_bytes(d) + fmt.code_bytes(dv))
    return tile_config._replace(
        num_stages=max(
            2, min(6, (launch.shared_memory_bytes_per_cta(f) // tile_config.ctas_per_sm - fixed_bytes) // stage_bytes)
        )
    )


def _rows_64_config_with_max_stages(f: SimpleNamespace, block_m: int) -> TileConfig:
    """Returns the configuration of rows_64: as many stages as fit beside the fp16 tiles."""
    fmt, d = kv_format(f.format), f.q.shape[2]
    ctas_per_sm = 128 // block_m
    # 1 KB of a CTA is the driver's; mbarriers, and stored scales of four n_blocks.
    smem_bytes = (
        (launch.shared_memory_bytes_per_cta(f) + 1024) // ctas_per_sm - 1536 - (4096 if fmt.scale == TOKEN_HEAD else 0)
    )
    smem_bytes -= rotation_column_scales_smem_bytes(f, 1)
    stage_bytes, converted_stage_bytes = 2 * 64 * fmt.code_bytes(d), 2 * 64 * d
    converted_stages = 4 if smem_bytes - 4 * converted_stage_bytes >= 3 * stage_bytes else 3
    return _TILES_ROWS_64._replace(
        num_stages=min(6, (smem_bytes - converted_stages * converted_stage_bytes) // stage_bytes),
        ctas_per_sm=ctas_per_sm, warps_per_head=block_m // 16, converted_stages=converted_stages,
    )  # fmt: skip


def num_prefetched_query_stages(f: SimpleNamespace, tile_config: TileConfig, heads_per_cta: int) -> int:
    """Returns the stages of prefetched queries of a CTA; 0 where prefetch is impossible, or does not pay.

    16 × 8K, unequal: fp8 49.8 → 48.2 µs, per token and head 53.1 → 51.1, bf16 88.2 → 87.2; 64 × 8K, unequal: 221 → 219.
    With 16 rows it costs: bf16 502 → 506 (64 × 8K). Rows shorter than in shared memory are loaded with a mask, which
    spilled registers here.
    """
    block_m, d = choose_block_m(f), padded_head_dims(f)[0]
    is_aligned = f.q.aligned and all(n % 16 == 0 for n in f.q.stride[:2])  # copies of 16 bytes
    if tile_config.key_parts > 1:
        return tile_config.num_stages - 1 if is_aligned else 0
    if tile_config.shared_tiles or block_m > 8 or has_4bit_codes(f) or has_padded_head_dims(f) or not is_aligned:
        return 0
    smem_bytes = (
        tile_config.num_stages * tile_config.block_n * heads_per_cta * smem_bytes_per_key(f)
        + (tile_config.num_stages - 1) * heads_per_cta * block_m * d * f.q.dtype.itemsize
    )
    smem_bytes += rotation_column_scales_smem_bytes(f, heads_per_cta)
    return (
        tile_config.num_stages - 1
        if smem_bytes <= launch.shared_memory_bytes_per_cta(f) // tile_config.ctas_per_sm - 1024
        else 0
    )


def choose_combine_rows_splits_columns(num_splits: int, num_rows: int, columns: int) -> tuple[int, int, int]:
    """Returns (rows, splits, columns) that a CTA of the combine loads at once: 64 numbers a thread.

    At least 16 splits, since lengths may differ: 16 unequal requests of 8K 51.8 → 50.7 µs, equal ones 68.4 → 68.1.
    """
    num_splits = min(256, max(16, launch.next_power_of_2(num_splits)))
    columns = min(8192 // num_splits, launch.next_power_of_2(columns))
    return min(8192 // num_splits // columns, launch.next_power_of_2(num_rows)), num_splits, columns


def uses_fused_combine(
    f: SimpleNamespace, block_n: int, num_ctas: int, num_ranges: int, floats_per_partial: int
) -> bool:
    """Returns whether the last CTA to store a split of a work tile combines them, instead of a second launch.

    floats_per_partial: numbers of a partial result

    One launch less saves the host 4 µs; 64 × 1K 36.1 → 35.4 µs, 64 × 8K 246 → 244. With many splits a single CTA
    combines longer than a second launch takes, 2 µs (8 × 8K 38.3 → 40.0, 16 unequal requests 65.7 → 67.7); and CTAs
    that share an SM delay each other (nvfp4 64 × 1K 35.9 → 38.3, pages of 16 42.2 → 44.1), unless few work tiles are
    split (int8, pages of 16: 256 × 300 56.7 → 52.5, 400 × 150 50.1 → 46.4, 136 × 424 43.4 → 41.7). Splits are bounded
    by the page table's keys: 4 × 256 6.7 → 6.7 µs, 4 × 512 6.8 → 7.8.
    """
    num_m_blocks = 1 if f.cu_seqlens_q is not None else -(-num_query_rows(f) // choose_block_m(f))
    max_blocks = -(-f.page_table.shape[1] * f.k_cache.shape[1] // block_n)
    splits_per_work_tile = min(
        num_ranges / max(f.seq_lens.shape[0] * num_m_blocks, 1), max_blocks
    )  # for equal work tiles
    is_small = (
        choose_block_m(f) <= 16 and floats_per_partial <= 4096 and splits_per_work_tile * floats_per_partial <= 8192
    )
    has_one_cta_per_sm = num_ctas <= launch.num_sms(f)
    return is_small and (
        splits_per_work_tile <= FEW_SPLITS or (has_one_cta_per_sm and (splits_per_work_tile <= 3 or max_blocks <= 4))
    )


def assigns_one_request_per_cta(
    f: SimpleNamespace, tile_config: TileConfig, num_ctas: int, num_head_groups: int
) -> bool:
    """Returns whether each CTA has one request: then no length but its own is read, and nothing is combined.

    num_ctas: those that run at once

    H100, 2026-11-27, 32/8 heads, uneven: fp8 with int4 in V, 170 of up to 150 tokens: 22.4 → 14.4 µs; nvfp4, 129 of up
    to 148: 19.0 → 13.9.
    """
    max_keys = f.page_table.shape[1] * f.k_cache.shape[1]
    if has_list_per_head(f):
        fewest = KEY_PARTS_VERY_SHORT_CTAS_PER_SM if max_keys <= KEY_PARTS_VERY_SHORT_KEYS else KEY_PARTS_CTAS_PER_SM
        fills_gpu_once = fewest[0] * launch.num_sms(f) <= f.seq_lens.shape[0] * num_head_groups <= num_ctas
        return fills_gpu_once and max_keys <= LISTED_MAX_UNSPLIT_KEYS
    if tile_config.key_parts > 1:
        return True
    fills_ctas = 0.9 * num_ctas <= f.seq_lens.shape[0] * num_head_groups <= 1.5 * num_ctas
    is_short = max_keys <= SHORT_CONTEXT
    return fills_ctas and is_short and not tile_config.shared_tiles


def choose_fused_combine_rows_splits_columns(num_rows: int, columns: int) -> tuple[int, int, int]:
    """Returns (rows of a head, splits, columns) that a CTA combines at once, in 16 to 64 numbers a thread."""
    num_rows = launch.next_power_of_2(num_rows)
    columns = min(columns, max(16, 1024 // num_rows))
    return num_rows, max(1, 1024 // (num_rows * columns)), columns


def num_keys_per_copy(f: SimpleNamespace, tile_config: TileConfig) -> int:
    """Returns the keys of one tensor copy: as many of an n_block as any page holds together; at least 8."""
    keys = tile_config.block_n
    while f.k_cache.shape[1] % keys:
        keys //= 2
    (k, v), (d, dv) = pair_of(f), padded_head_dims(f)
    is_narrow = max(k.code_bytes(d), v.code_bytes(dv)) <= 128
    return keys if is_narrow else min(keys, MMA_KEYS * tile_config.key_parts)
