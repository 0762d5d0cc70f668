"""Tile choices of Gluon's decode, from facts. Measured on an H200, 2026-11-21 (notes/decode.md), D 128, 32/8 heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from .....formats import TOKEN_HEAD, kv_format, pair_of
from ....host import launch

FEW_ROWS = 32  # of a KV head, to which `attend` is the faster kernel
FEW_ROWS_OF_4_BITS = 16  # where four_bits does not take 32
SHORT_KEYS, SHORT_KEYS_OF_4_BITS = 384, 1024  # that page tables have room for: up to here requests are short
LITTLE_CUT = 1.5  # pieces of a segment, on average: with no more, few are cut
MANY_KEYS = 2**17  # that page tables have room for: from here on it does
MOST_ROWS_OF_16_BITS = 16  # to which it is faster than Triton's: 32 rows of bf16, 64 × 8K, 522 against 515 µs


class Tiles(NamedTuple):
    tile: int  # keys of a turn
    stages: int
    programs_per_sm: int  # of four warps
    max_registers: int | None  # so that programs_per_sm fit; None: the compiler's choice
    min_tiles: int = 1  # least share of a program
    heads: int = 4  # KV heads of a program, at most
    row_warps: int = 1  # warps of a head
    wide: bool = False  # by shared_tiles
    copier: bool = False  # by four_bits, with a warp that copies for four others
    many: bool = False  # by rows64
    slots: int = 0  # of its fp16 tiles


def query_rows(f: SimpleNamespace) -> int:
    return f.max_q_len * f.q.shape[1] // max(f.k_cache.shape[2], 1)


def few_rows(f: SimpleNamespace) -> int:
    """Query rows of a KV head up to which warps convert the codes for themselves. Pairs have no other kernel.

    int4 goes by what was measured of nvfp4.
    """
    k, v = pair_of(f)
    apart = four_bits(f) and k == v and converts_apart(f) and not _unpacks_once(f)
    return FEW_ROWS_OF_4_BITS if apart else FEW_ROWS


def many_rows(f: SimpleNamespace) -> bool:
    return query_rows(f) > few_rows(f)


def tile_dims(f: SimpleNamespace) -> tuple[int, int]:
    """Columns of a key and of a value in shared memory, powers of two: what rows have not is 0 or a neighbour's."""
    return launch.next_power_of_2(f.q.shape[2]), launch.next_power_of_2(f.out.shape[2])


def padded(f: SimpleNamespace) -> bool:
    """Rows are shorter than in shared memory."""
    return tile_dims(f) != (f.q.shape[2], f.out.shape[2])


def four_bits(f: SimpleNamespace) -> bool:
    """Keys or values are of 4 bits."""
    return any(fmt.values_per_element > 1 for fmt in pair_of(f))


def row_bytes(f: SimpleNamespace) -> int:
    """Of a key and its value in shared memory, stored scales included."""
    (k, v), (d, dv) = pair_of(f), tile_dims(f)
    return k.row_bytes(d) + v.row_bytes(dv)


def turned_bytes(f: SimpleNamespace, heads: int) -> int:
    """Of what columns of a program's heads are multiplied by, where rows lie rotated or scaled."""
    sides = ((f.k_signs, f.k_channel_scale, f.q), (f.v_signs, f.v_channel_scale, f.out))
    return sum(4 * heads * x.shape[2] for *given, x in sides if given != [None, None])


def _unpacks_once(f: SimpleNamespace) -> bool:
    """four_bits takes 32 rows: one warp of four heads' unpacks for all of them.

    64 × 8K: 413 → 352 µs, 16 × 8K: 140 → 110, pages of 16: 597 → 356; but it cuts requests more often, which few keys
    do not make up for: 64 × 1K 68 → 78, 1 × 8K 22.6 → 28.7.
    """
    room = f.page_table.shape[0] * f.page_table.shape[1] * f.k_cache.shape[1]
    return heads_of(f) == 4 and room >= MANY_KEYS


def converts_apart(f: SimpleNamespace) -> bool:
    """rows64 takes these heads, in which two fp16 tiles of each kind fit; else shared_tiles does."""
    d, dv = tile_dims(f)
    return d == dv <= 128


def rows_at_once(f: SimpleNamespace) -> int:
    """Query rows of a segment."""
    return min(max(64 if many_rows(f) else 8, launch.next_power_of_2(query_rows(f))), 128)


def heads_of(f: SimpleNamespace, most: int = 4) -> int:
    """KV heads of a program."""
    return next(n for n in (8, 4, 2, 1) if n <= most and f.k_cache.shape[2] % n == 0)


# 64 × 8K: 249 µs, 64 × 1K: 37.3, 256 × 1K: 138, 256 × 8K: 947, 1 × 8K: 10.3, 1 × 128K: 67.6
# bf16 in tiles of 32, 64 × 8K: 484 µs (Triton's kernel 492), 64 × 1K: 65.8 (69.5), 1 × 8K: 14.0 (15.7)
_WIDE = Tiles(64, 3, 1, 255)
# 64 × 8K: 251 µs, 64 × 1K: 41.7, 256 × 1K: 143; with pages of 16 248 to 255, where _WIDE takes 260
_NARROW = Tiles(32, 2, 3, 168)
# Four heads with a fifth warp that copies: 64 × 8K: 156 µs, 64 × 1K: 30.5, 256 × 1K: 86.3, 16 × 8K: 47.8, 1 × 8K: 9.7,
# where three programs of two stages take 161, 33.4, 97.5, 53.3 and 11.0; four of half a tile 185, 32.8, 101 and 71.8
_FOUR_BITS = Tiles(64, 3, 2, 255)
# 32 rows, 64 × 8K: fp8 309 µs, per token and head 360, int8 396
_MANY_ROWS = Tiles(64, 3, 1, 255)
_MANY_ROWS_OF_4_BITS = Tiles(16, 6, 2, 255, copier=True)
# 64 rows, 64 × 8K: fp8 346 µs (396 by shared_tiles), per token and head 420 (507), int8 435 (534), nvfp4 436 (502);
# 128 rows: 510 (769), 700, 730, 630
_MANY = Tiles(64, 0, 2, None, heads=1, wide=True, many=True)
_WIDE_ROWS = Tiles(64, 4, 2, 255, heads=1, wide=True)


def tiles(f: SimpleNamespace) -> Tiles:
    fmt = kv_format(f.format)
    t = _NARROW if f.k_cache.shape[1] % 64 or _many_short(f, SHORT_KEYS) else _WIDE
    if four_bits(f):
        t = _FOUR_BITS._replace(copier=heads_of(f) == 4, tile=32 if _many_short(f, SHORT_KEYS_OF_4_BITS) else 64)
    width, rows = max(tile_dims(f)), rows_at_once(f)
    if (fmt.storage.itemsize == 2 and width > 64) or (padded(f) and width > 128):
        t = t._replace(tile=32)
    if many_rows(f):
        return _many(f, rows) if converts_apart(f) else _wide(f, rows)
    if rows > 16 and t.copier and converts_apart(f):
        t = _MANY_ROWS_OF_4_BITS
    elif rows > 16:
        t = _MANY_ROWS._replace(row_warps=rows // 16, heads=max(1, 128 // rows))
    elif t.programs_per_sm > 2 and width * rows > 1024:  # twice the accumulators
        t = t._replace(programs_per_sm=2, max_registers=255)
    if rows == 16 and width > 128:
        t = _dealt_to_two_warps(t, 2 if fmt.storage.itemsize == 2 else 4, heads_of(f))
    heads = heads_of(f, t.heads)
    key = row_bytes(f) * heads
    limit, most = launch.shared_memory(f) // t.programs_per_sm - 2048 - turned_bytes(f, heads), t.tile
    while t.tile > 16 and t.stages * t.tile * key > limit:
        t = t._replace(tile=t.tile // 2)
    if t.copier and t.tile < most:  # smaller tiles, as many of them as keep the memory busy
        t = t._replace(stages=max(t.stages, min(4, limit // (t.tile * key))))
    return t


def _many_short(f: SimpleNamespace, keys: int) -> bool:
    """There are so many requests that programs have some to themselves, and page tables have room for no more keys.
    Then small tiles waste less of requests' ends, and three programs of a multiprocessor wait less than one.

    1000 × 100: uneven fp8 85.7 → 74.3 µs, int8 98.6 → 82.3 (89.8 without joining), nvfp4 75.8 → 72.1; 1000 × 300:
    int8 202 → 178, nvfp4 156 → 125. Longer ones gain nothing: 300 × 500 fp8 85.2 → 87.8.
    """
    heads = heads_of(f)
    programs = launch.num_sms(f) * _NARROW.programs_per_sm * (4 // heads)
    few = f.seq_lens.shape[0] * LITTLE_CUT < programs // (f.k_cache.shape[2] // heads)
    return not few and f.page_table.shape[1] * f.k_cache.shape[1] <= keys


def _dealt_to_two_warps(t: Tiles, most: int, heads: int) -> Tiles:
    """Query rows of a head dealt to two warps: accumulators of 16 rows of more than 128 columns do not fit in one's
    registers.

    D 256, 16 heads over one, 4 × 254383: nvfp4 258 → 177 µs, int4 208 → 131; 4 × 200000, fp8_per_token_head: 280 →
    125. Over eight, 64 × 2048: nvfp4 214 → 171, int4 157 → 125, fp8 189 → 170; 64 × 1024, bf16: 166 → 155.
    """
    t = t._replace(row_warps=2, heads=most, copier=False)
    return t._replace(programs_per_sm=1, max_registers=255) if min(heads, most) == 4 else t


def _wide(f: SimpleNamespace, rows: int) -> Tiles:
    """Tiles of shared_tiles: as many stages as fit beside the query and a tile's fp16 keys and values."""
    fmt, d, dv = kv_format(f.format), f.q.shape[2], f.out.shape[2]
    t = _WIDE_ROWS._replace(row_warps=rows // 16, programs_per_sm=128 // rows)
    if max(d, dv) > 128:
        t = t._replace(tile=32)
    query = 0 if rows == t.tile and d <= 128 else rows  # else it is held in registers
    fixed = 2 * (query * d + t.tile * (d + dv)) + 4096 + turned_bytes(f, 1)
    stage = t.tile * (fmt.code_bytes(d) + fmt.code_bytes(dv))
    return t._replace(stages=max(2, min(6, (launch.shared_memory(f) // t.programs_per_sm - fixed) // stage)))


def _many(f: SimpleNamespace, rows: int) -> Tiles:
    """Tiles of rows64: as many stages as fit beside the fp16 tiles."""
    fmt, d = kv_format(f.format), f.q.shape[2]
    programs = 128 // rows
    # 1 KB of a program is the driver's; barriers, and stored scales of four tiles.
    room = (launch.shared_memory(f) + 1024) // programs - 1536 - (4096 if fmt.scale == TOKEN_HEAD else 0)
    room -= turned_bytes(f, 1)
    stage, slot = 2 * 64 * fmt.code_bytes(d), 2 * 64 * d
    slots = 4 if room - 4 * slot >= 3 * stage else 3
    return _MANY._replace(
        stages=min(6, (room - slots * slot) // stage), programs_per_sm=programs, row_warps=rows // 16, slots=slots
    )


def queries_ahead(f: SimpleNamespace, t: Tiles, hb: int) -> int:
    """Queries of a program that are fetched ahead with their tiles; 0 where that cannot be, or does not pay.

    16 × 8K, unequal: fp8 49.8 → 48.2 µs, per token and head 53.1 → 51.1, bf16 88.2 → 87.2; 64 × 8K, unequal: 221 → 219.
    With 16 rows it costs: bf16 502 → 506 (64 × 8K). Rows shorter than in shared memory are loaded with a mask, which
    spilled registers here.
    """
    rows, d = rows_at_once(f), tile_dims(f)[0]
    whole = f.q.aligned and all(n % 16 == 0 for n in f.q.stride[:2])  # copies of 16 bytes
    if t.wide or rows > 8 or four_bits(f) or padded(f) or not whole:
        return 0
    needed = t.stages * t.tile * hb * row_bytes(f) + (t.stages - 1) * hb * rows * d * f.q.dtype.itemsize
    needed += turned_bytes(f, hb)
    return t.stages - 1 if needed <= launch.shared_memory(f) // t.programs_per_sm - 1024 else 0


def merge_tile(pieces: int, rows: int, columns: int) -> tuple[int, int, int]:
    """(rows, pieces, columns) that a program of the merge reads at once: 64 numbers a thread.

    At least 16 pieces, since lengths may differ: 16 unequal requests of 8K 51.8 → 50.7 µs, equal ones 68.4 → 68.1.
    """
    pieces = min(256, max(16, launch.next_power_of_2(pieces)))
    columns = min(8192 // pieces, launch.next_power_of_2(columns))
    return min(8192 // pieces // columns, launch.next_power_of_2(rows)), pieces, columns


def joins(f: SimpleNamespace, tile: int, programs: int, shares: int, numbers: int) -> bool:
    """Whether the last program to deliver a piece of a segment merges it, instead of a second launch.

    numbers: of a piece's state

    A launch less costs the host 4 µs less; 64 × 1K 36.1 → 35.4 µs, 64 × 8K 246 → 244. Where pieces are many one program
    alone merges longer than a second launch takes, 2 µs (8 × 8K 38.3 → 40.0, 16 unequal requests 65.7 → 67.7); and
    programs that share a multiprocessor hold each other up (nvfp4 64 × 1K 35.9 → 38.3, pages of 16 42.2 → 44.1), unless
    little is cut (int8, pages of 16: 256 × 300 56.7 → 52.5, 400 × 150 50.1 → 46.4, 136 × 424 43.4 → 41.7).
    Pieces are no more than the page table has room for: 4 × 256 6.7 → 6.7 µs, 4 × 512 6.8 → 7.8.
    """
    rows = 1 if f.cu_seqlens_q is not None else -(-query_rows(f) // rows_at_once(f))
    most = -(-f.page_table.shape[1] * f.k_cache.shape[1] // tile)
    pieces = min(shares / max(f.seq_lens.shape[0] * rows, 1), most)  # of a segment, where all are alike
    small = rows_at_once(f) <= 16 and numbers <= 4096 and pieces * numbers <= 8192
    one_each = programs <= launch.num_sms(f)
    return small and (pieces <= LITTLE_CUT or (one_each and (pieces <= 3 or most <= 4)))


def join_tile(rows: int, columns: int) -> tuple[int, int, int]:
    """(rows of a head, pieces, columns) that a joining program takes at once, in 16 to 64 numbers a thread."""
    rows = launch.next_power_of_2(rows)
    columns = min(columns, max(16, 1024 // rows))
    return rows, max(1, 1024 // (rows * columns)), columns


def copy_keys(f: SimpleNamespace, t: Tiles) -> int:
    """Keys of one tensor copy: as many of a tile as lie in one page, whatever its size; at least 8."""
    keys = t.tile
    while f.k_cache.shape[1] % keys:
        keys //= 2
    (k, v), (d, dv) = pair_of(f), tile_dims(f)
    return keys if max(k.code_bytes(d), v.code_bytes(dv)) <= 128 else min(keys, 16)
