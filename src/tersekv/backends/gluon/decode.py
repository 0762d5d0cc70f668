"""Paged decode on Hopper: a split pass, and a second launch if it does not join its cuts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...formats import BLOCK, CHANNELS, PAIRS, ROTATION, pair_of
from ..host import launch
from ..host.bind import Bound, Described, Instead, Launches, Template, given, strides
from ..host.record import Record
from ..host.split_merge import launches, reads, writes
from ..triton.decode import entry as portable
from ..triton.decode import tune as portable_tune
from .sm90.decode.boxes import (
    BOX,
    PAGE_KEYS,
    Box,
    Side,
    boxes_of,
    code_box,
    descriptor,
    joined,
    keys_at_once,
    scale_box,
    side_of,
)
from .sm90.decode.four_bits import decode_four_bits_kernel
from .sm90.decode.kernel import decode_kernel
from .sm90.decode.merge import merge_kernel
from .sm90.decode.rows64 import decode_rows64_kernel
from .sm90.decode.tune import (
    MOST_ROWS_OF_16_BITS,
    Tiles,
    converts_apart,
    copy_keys,
    few_rows,
    heads_of,
    join_tile,
    joins,
    many_rows,
    merge_tile,
    padded,
    queries_ahead,
    query_rows,
    rows_at_once,
    tile_dims,
    tiles,
)
from .sm90.parts.convert import INT4_FACTOR
from .sm90.parts.turn import turn_of


@dataclass(frozen=True)
class Shape(Record):
    """What the split pass is compiled for, beyond the Triton kernels' constants. The names are the kernel's."""

    HB: int  # KV heads of a program
    RB: int  # warps of a head: they share its keys, and its query rows are dealt among them
    WIDE: bool  # many rows: decode_wide or decode_many, one head a program and 64 rows in every four of RB warps
    GROUPS: int  # programs that share a tile's keys
    BOX: int  # keys of one step of the products
    BOXES: int  # of a tile
    COPY: int  # keys of a buffer: of one tensor copy, which is of one page, or of two
    COPIES: int  # buffers of a tile
    HALVES: int  # tensor copies of a buffer: two of 8 keys each, where pages hold no multiple of 16; else one
    STAGES: int
    Q_COLUMNS: int  # of a query's row; D is a power of two
    QUERIES: int  # fetched ahead with their tiles; 0: a segment loads its query when it begins
    SLOTS: int  # of decode_many: fp16 tiles of keys or values
    K: Side
    V: Side
    SEGMENTS: int  # of a request, at most
    LIVE_ROWS: int  # of ROWS
    MERGE_ROWS: int
    MERGE_PIECES: int
    MERGE_COLUMNS: int
    JOIN_ROWS: int  # of a head, where the split pass joins what it cuts; 0: a second launch does
    JOIN_PIECES: int  # at once
    JOIN_COLUMNS: int  # at once


CODES = ("bf16", "fp16", "e4m3", "e5m2", "int8", "e2m1", "int4")
TAKES = (PAIRS, ROTATION, CHANNELS)


class Config(NamedTuple):
    constants: portable.Constants
    shape: Shape
    boxes: dict[str, Box]  # by the argument that is described so
    launches: Launches | Instead  # without a merge where the split pass joins what it cuts


def why_not(f: SimpleNamespace) -> str | None:
    fmt, v_fmt = pair_of(f)
    for x in (fmt, v_fmt):
        if x.code not in CODES:
            return f"has no {x.name}"
    if reason := launch.why_not(f):
        return reason
    if fmt != v_fmt and 2 in (fmt.storage.itemsize, v_fmt.storage.itemsize):
        return f"takes no pairs with 16 bits, got {fmt.name} and {v_fmt.name}"
    if many_rows(f) and fmt != v_fmt:
        return (
            f"wants at most {few_rows(f)} query rows of a KV head with {fmt.name} and {v_fmt.name}, got {query_rows(f)}"
        )
    if many_rows(f) and fmt.code == "int4" and not converts_apart(f):
        return f"wants equal head sizes up to 128 with {query_rows(f)} query rows of a KV head and {fmt.name}"
    if fmt.storage.itemsize == 2 and query_rows(f) > MOST_ROWS_OF_16_BITS:
        return f"wants at most {MOST_ROWS_OF_16_BITS} query rows of a KV head with {f.format}, got {query_rows(f)}"
    if portable_tune.two_terms(f, fmt):  # Triton's multiplies it in two tiles
        if f.q.dtype == torch.float16:
            return "wants a bfloat16 or 8-bit q with bf16, got float16"
        return "wants keys that lie as they are with bf16, got rotated ones or such with channel scales"
    d, dv = f.q.shape[2], f.out.shape[2]
    if any(n % 16 or not 64 <= n <= 256 for n in (d, dv)):
        return f"wants head sizes that are multiples of 16 from 64 to 256, got {d} and {dv}"
    if padded(f) and (many_rows(f) or BLOCK in (fmt.scale, v_fmt.scale)):
        what = f.format if not many_rows(f) else f"{query_rows(f)} query rows of a KV head"
        return f"wants head sizes of 64, 128 or 256 with {what}, got {d} and {dv}"
    if padded(f) and any(x is not None for x in (f.k_signs, f.v_signs, f.k_channel_scale, f.v_channel_scale)):
        return f"wants head sizes of 64, 128 or 256 with rotated rows or channel scales, got {d} and {dv}"
    if f.k_cache.shape[1] % PAGE_KEYS:
        return f"wants pages of a multiple of {PAGE_KEYS}, got {f.k_cache.shape[1]}"
    if f.q.dtype == torch.float32:
        return "wants a 16-bit or 8-bit q, got float32"
    keys = keys_at_once(f.k_cache.shape[1])
    for name in ("k_cache", "v_cache"):
        if code_box(getattr(f, name), heads_of(f), keys) is None:
            apart = "multiples of 16 bytes, or of 8 with heads side by side, an even number of them"
            return f"wants {name} with rows at equal distances that are {apart}"
    for x, side in ((fmt, f.k_scale_cache), (v_fmt, f.v_scale_cache)):
        if side is not None and not many_rows(f) and scale_box(side, heads_of(f), keys, x.scale == BLOCK) is None:
            beside = "wants stored scales with heads or slots side by side, at multiples of 16 bytes"
            return beside if keys == BOX else f"{beside}, and 128 bytes of {keys} keys in pages of no multiple of {BOX}"
    return None


def configure(f: SimpleNamespace) -> Config:
    (fmt, v_fmt), t = pair_of(f), tiles(f)
    base = portable.constants(f, portable_tune.tiles(f, fmt), True)
    heads, hb, requests = f.k_cache.shape[2], heads_of(f, t.heads), f.seq_lens.shape[0]
    codes, scales = boxes_of(f, hb, copy_keys(f, t), t.wide)
    if t.copier:
        codes = [joined(box) for box in codes]
    rows, groups, (d, dv) = rows_at_once(f), heads // hb, tile_dims(f)
    turns = turn_of(f.k_signs, f.k_channel_scale), turn_of(f.v_signs, f.v_channel_scale)
    k, v = (side_of(*x, hb, t.stages) for x in zip((fmt, v_fmt), codes, scales, turns, strict=True))
    shares = max(launch.num_sms(f) * t.programs_per_sm * max(4 // (hb * t.row_warps), 1) // groups, 1)
    live = rows if f.cu_seqlens_q is not None else min(rows, query_rows(f))
    # A bound on ragged rows that changes with the batch must not compile anew every time.
    segments = launch.next_power_of_2(-(-query_rows(f) // rows))
    words_v = dv // v.PARTS
    block_dv = max(16, launch.next_power_of_2(words_v))
    columns = v.PARTS * block_dv
    joining = (0, 0, 0)
    if not t.copier and joins(f, t.tile, shares * groups, shares, hb * live * columns):
        joining = join_tile(live, columns)
    c = replace(
        base, ROWS=rows, TILE=t.tile, MIN_TILES=t.min_tiles, K_PITCH=codes[0].pitch, V_PITCH=codes[1].pitch,
        D=d, PARTS=v.PARTS, WORDS_K=d // k.PARTS, WORDS_V=words_v, BLOCK_DV=block_dv,
        K_FACTOR=_left_over(k.CODE, t.wide), V_FACTOR=_left_over(v.CODE, t.wide),
        PART_COLUMNS=columns + (4 if any(joining) else 2),
    )  # fmt: skip
    merging = merge_tile(shares // max(requests, 1) + 2, hb * live, columns)
    shape = _shape(f, t, k, v, codes[0], hb, (segments, live, *merging, *joining))
    boxes = dict(zip(("K", "V", "KS", "VS"), (*codes, *scales), strict=True))
    grid = (
        requests * segments * groups,
        -(-hb * live // merging[0]) * (columns // merging[2]),
    )
    kernel, options = _kernel(t, hb)
    both = writes(f) | given(SINKS="sinks", V_T="v_scale_t") | {"v_scale": f.v_scale}
    # Each is told of nothing that the other alone reads: numbers of requests would compile it anew.
    unmerged = {"c": c, "g": replace(shape, MERGE_ROWS=0, MERGE_PIECES=0, MERGE_COLUMNS=0)}
    split = Template(kernel, (shares * groups,), both | unmerged | _reads(f, boxes), launch_pdl=True, **options)
    merge, notes = None, 8 * shares * groups  # counters
    if not any(joining):
        rest = given(CU="cu_seqlens_q") | {"num_shares": shares, "c": replace(c, BLOCK_B=0), "g": shape}
        merge, notes = Template(merge_kernel, grid, both | rest, num_warps=4, launch_pdl=True), 2 * grid[0]  # META
    scratch = 2 * shares * heads * rows * c.PART_COLUMNS + notes
    return Config(c, shape, {n: box for n, box in boxes.items() if box is not None}, launches(f, split, merge, scratch))


def _kernel(t: Tiles, hb: int) -> tuple[Any, dict[str, Any]]:
    """The split pass's kernel and how it is compiled."""
    if t.many:
        registers = 65536 // (32 * (4 + t.row_warps) * t.programs_per_sm) // 8 * 8
        return decode_rows64_kernel, {"num_warps": 4, "maxnreg": registers}
    warps = {"num_warps": hb * t.row_warps}
    if t.copier:  # it comes with three idle warps; registers are dealt out by four
        return decode_four_bits_kernel, warps | {"maxnreg": 65536 // (256 * t.programs_per_sm) // 8 * 8}
    return decode_kernel, warps if t.max_registers is None else warps | {"maxnreg": t.max_registers}


def _left_over(code: str, wide: bool) -> float:
    """By `parts/convert`, for the factors of scores and values."""
    if code == "e2m1":
        return 64.0 if wide else 16384.0
    return INT4_FACTOR.value if code == "int4" and not wide else 1.0


def _reads(f: SimpleNamespace, boxes: dict[str, Box | None]) -> dict[str, Any]:
    """Arguments of the split pass: what has a box is described."""
    caches = {"K": "k_cache", "V": "v_cache", "KS": "k_scale_cache", "VS": "v_scale_cache"}
    described = {n: Described(caches[n], partial(descriptor, box=box)) for n, box in boxes.items() if box is not None}
    tensors = given(Q="q", K_T="k_scale_t", **caches) | portable.mask_of(f)
    tensors |= given(K_SIGNS="k_signs", V_SIGNS="v_signs", K_CHANNELS="k_channel_scale", V_CHANNELS="v_channel_scale")
    numbers = {"k_scale": f.k_scale, "softcap": f.softcap, "sm_t": f.mask.stride[0] if f.mask is not None else 0}
    return reads(f) | tensors | described | numbers | strides(f.q, sq_="th")


def _shape(
    f: SimpleNamespace,
    t: Tiles,
    k: Side,
    v: Side,
    codes: Box,
    hb: int,
    merge: tuple[int, ...],
) -> Shape:
    """The record of constants; merge: its last fields."""
    halves = BOX // codes.block[-2]
    copy = codes.boxes * codes.block[-2] * halves
    if t.wide and f.k_scale_cache is not None:
        k, v = (replace(x, SCALE_STRIDES=s.stride[:3]) for x, s in ((k, f.k_scale_cache), (v, f.v_scale_cache)))
    return Shape(
        hb, t.row_warps, t.wide, f.k_cache.shape[2] // hb, BOX, t.tile // BOX, copy, t.tile // copy, halves, t.stages,
        f.q.shape[2],
        queries_ahead(f, t, hb),
        t.slots,
        k, v, *merge,
    )  # fmt: skip


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)
