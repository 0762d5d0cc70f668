"""Paged MLA decode on Hopper: which kernel, how many programs and segments; the merge only where segments are cut."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from ...formats import latent_format
from ..host import launch
from ..host.bind import Bound, Described, Instead, Launches, Template, given
from ..host.split_merge import launches, reads, writes
from ..triton.mla_decode import entry as portable
from ..triton.mla_decode.tune import Tiles
from .sm90.mla_decode.merge import merge_kernel
from .sm90.parts.tensor_maps import tensor_map

TILE = 64  # keys
CHUNK = 64  # 16-bit words of a latent row that are loaded as one box, of 128 bytes
RANK, ROPE = 512, 64
WHOLE_TILES = 4  # of a segment that is not cut
_FEW = 32  # query rows of a segment of 16-bit latents, up to which they are not padded to 64
PAGES = (16, 32)  # and multiples of TILE
_CODES = ("bf16", "e4m3")  # what was run on a GPU
_QUERIES = (torch.bfloat16, torch.float8_e4m3fn)


class Choice(NamedTuple):
    rows: int  # query rows of a segment
    stages: int  # tiles in shared memory
    programs_per_sm: int = 1
    turns: int = 1  # warpgroups that take turns on the tiles of 8-bit latents
    min_tiles: int = 1  # least share of a program
    trio: bool = False  # a warpgroup that scores, two that add values
    heads: int = 0  # of a block, where it has fewer than `rows`


class Config(NamedTuple):
    constants: portable.Constants
    programs: int  # of the split pass
    segments: int  # of a request, for one block of heads
    cut: portable.Constants  # as the merge reads what was cut
    boxes: tuple[portable.Box, ...]  # of ckv, kpe and stored scales
    launches: Launches | Instead  # without a merge where nothing is cut


def why_not(f: SimpleNamespace) -> str | None:
    if latent_format(f.format).code not in _CODES or launch.why_not(f):
        return f"has no {f.format}"
    if (f.ckv.shape[2], f.kpe.shape[2]) != (RANK, ROPE):
        return f"wants latents of {RANK} + {ROPE}, got {f.ckv.shape[2]} + {f.kpe.shape[2]}"
    page, q = f.ckv.shape[1], f.q_nope.dtype
    if page % TILE and page not in PAGES:
        return f"wants pages of {', '.join(map(str, PAGES))} or a multiple of {TILE}, got {page}"
    if q not in _QUERIES:
        return f"wants a bfloat16 or float8_e4m3fn q, got {str(q).removeprefix('torch.')}"
    caches = [x for x in (f.ckv, f.kpe, f.ckv_scale_cache) if x is not None]
    # `_boxes` counts in 16-bit words, and would round.
    if any(n * x.dtype.itemsize % 16 for x in caches for n in x.stride[:2]) or None in _boxes(f):
        return "wants a cache whose rows lie at equal distances, multiples of 16 bytes"
    return None


def choose(f: SimpleNamespace) -> Choice:
    """What the choices follow, on an H200, 2026-11-21, 128 × 8K (notes/mla.md has more).

    fp8_e4m3, 32 heads: two programs of 32 rows 188 µs, with an e4m3 query 165; one whose two warpgroups take turns 182
    and 161, but 60 requests of up to 1024 43 for 34; a trio of warpgroups of 64 rows, half of them dead, 254 and 197.
    Few tiles of 32 heads are not bound by arithmetic, and go in two blocks of 16 rows: 1 × 8K 15.7 → 12.0 µs, 4 × 4K
    19.6 → 13.5, 16 × 8K 42.5 → 38.9, but 64 × 4K 63.8 → 67.1; fp8_ds_mla 18.8 → 14.1, 21.4 → 16.4, 50.2 → 47.8.

    bf16, up to 32 query rows: a kernel that does not pad them to 64. 16 heads, 1 × 8K 12.6 → 10.8 µs, 16 × 8K 47.8 →
    45.2, 64 × 4K 81.9 → 79.8, 60 requests of up to 1024 31.0 → 24.7; 128 × 8K 285.6 → 282.3; 32 heads, 16 × 8K 51.7 →
    49.0, 64 × 4K and 128 × 8K even.
    """
    heads, grouped = f.q_nope.shape[1], f.ckv_scale_cache is not None
    rows = f.max_q_len * heads
    if f.ckv.dtype.itemsize == 2:
        n = few_blocks(f)
        rows //= n
        return Choice(rows=16 if rows <= 16 else 32 if rows <= _FEW else 64, stages=2, heads=heads // n if n > 1 else 0)
    if 16 < rows <= 32 and heads % 2 == 0 and most_tiles(f) <= 16 * launch.num_sms(f):
        return Choice(rows=16, stages=2, programs_per_sm=2, heads=heads // 2)
    if rows <= 16 or (rows <= 32 and not grouped):
        return Choice(rows=16 if rows <= 16 else 32, stages=2, programs_per_sm=2)
    if rows <= 32:
        return Choice(rows=32, stages=3, turns=2)
    # As many tiles as fit: the query takes 36 KB, or 72 as two terms.
    stages = 4 if f.q_nope.dtype == torch.float8_e4m3fn and not grouped else 3
    return Choice(rows=64, stages=stages, trio=True, heads=32 if few_tiles(f) else 0)


def configure(f: SimpleNamespace, chosen: Choice | None = None) -> Config:
    k, half = chosen or choose(f), f.ckv.dtype.itemsize == 2
    heads, requests = f.q_nope.shape[1], f.seq_lens.shape[0]
    blocks = heads // k.heads if k.heads else blocks_of_heads(f, k.rows, launch.num_sms(f) * k.programs_per_sm)
    boxes = tuple(box for box in _boxes(f) if box is not None)
    fmt, t = latent_format(f.format), Tiles(TILE, k.rows, CHUNK, k.stages, 4, None, 1, k.min_tiles, True)
    parts = portable._format(f, fmt) | portable._geometry(f, fmt, t, blocks, True) | portable._features(f)
    # Rows of partial results start on sectors of 32 bytes: 5 µs less at 1 × 8K, 128 heads.
    parts["PART_COLUMNS"] = RANK + 8
    parts["BLOCK_B"] = max(parts["BLOCK_B"], 128)  # one kernel for all small batches
    segments = -(-f.max_q_len * parts["GROUP"] // k.rows)
    segments_in_all = max(requests, 1) * segments * blocks
    programs = max(launch.num_sms(f) * k.programs_per_sm // blocks, 1) * blocks
    whole = whole_segments(f, segments_in_all, programs)
    if whole:
        programs = segments_in_all
    c = portable.Constants(**parts, WHOLE=whole)
    # A producer warp comes with three idle ones; registers are dealt out by warpgroups.
    warpgroups = 4 if k.trio else 3 if (half and k.rows > _FEW) or k.turns == 2 else 2
    # Of two warpgroups the one of products takes 232 (`sixteen_bits`): 168 each leave 104 to the one that copies.
    registers = min(65536 // (128 * warpgroups * k.programs_per_sm), 168) // 8 * 8
    cut = replace(c, PARTS=1, BLOCK_DV=RANK) if k.trio else c  # a trio's columns are in order
    kernel, arguments = _kernel(half, k), portable.queries(f) | reads(f) | writes(f) | _caches(f, c, boxes)
    arguments |= {"max_segments": segments, "STAGES": k.stages, "c": c}
    if "TURNS" in kernel.arg_names:  # one kernel's warpgroups take turns
        arguments["TURNS"] = k.turns
    split = Template(kernel, (programs,), arguments, num_warps=4, maxnreg=registers, launch_pdl=True)
    merge = None if whole else _merge(f, k, cut, segments, segments_in_all, programs)
    # The cut segments' states, then META.
    scratch = 2 * programs * c.ROWS * c.PART_COLUMNS + 2 * requests * segments * blocks
    return Config(c, programs, segments, cut, boxes, launches(f, split, merge, scratch))


def _caches(f: SimpleNamespace, c: portable.Constants, boxes: tuple[portable.Box, ...]) -> dict[str, Any]:
    """Arguments of the split pass: what there is of ckv, kpe and stored scales, described."""
    names = zip(("BOX_C", "BOX_P", "BOX_S"), ("ckv", "kpe", "ckv_scale_cache"), boxes, strict=False)
    found: dict[str, Any] = {
        argument: Described(name, partial(_descriptor, box=box, rows=min(c.PAGE, TILE)))
        for argument, name, box in names
    }
    nowhere = max((box.rows for box in boxes), default=0)
    return {"BOX_S": None} | found | {"nowhere": nowhere, "s_pitch": _pitch(f.ckv_scale_cache)}


def _merge(
    f: SimpleNamespace, k: Choice, cut: portable.Constants, segments: int, segments_in_all: int, programs: int
) -> Template:
    live = min(k.rows, f.max_q_len * cut.GROUP)
    rows, pieces, columns, warps = _merge_tile(live, segments_in_all, programs)
    arguments = writes(f) | given(CU="cu_seqlens_q", KV_T="kv_scale_t") | {
        "kv_scale": f.kv_scale, "num_programs": programs, "max_segments": segments,
        "ROWS": rows, "PIECES": pieces, "COLUMNS": columns, "c": cut,
    }  # fmt: skip
    grid = (segments_in_all, -(-live // rows), RANK // columns)
    return Template(merge_kernel, grid, arguments, num_warps=warps, launch_pdl=True)


def blocks_of_heads(f: SimpleNamespace, rows: int, programs: int) -> int:
    """Into how many blocks heads go: programs take fewest blocks of `rows` query rows, and share most of the tiles.

    Blocks lie side by side, and read a tile from the L2 cache. What one has more than `rows` is another segment, which
    reads the cache again. On an H200, 2026-11-21, bf16, 128 × 8K: 96 heads in one block (64 + 32 rows) 579 µs, in two
    of 48 455; 32 heads of 4 query tokens, one block (64 + 64 rows) 581, two 461. Ragged rows count as one token each.
    """
    heads, tokens = f.q_nope.shape[1], 1 if f.cu_seqlens_q is not None else f.max_q_len

    def cost(n: int) -> tuple[float, int]:
        return n * -(-tokens * (heads // n) // rows) / (programs // n * n), -n

    return min((n for n in range(1, min(heads, programs) + 1) if heads % n == 0), key=cost, default=1)


def most_tiles(f: SimpleNamespace) -> int:
    """Of one block of query rows of all requests, as the page table bounds them."""
    return f.seq_lens.shape[0] * -(-f.page_table.shape[1] * f.ckv.shape[1] // TILE)


def is_whole(f: SimpleNamespace) -> bool:
    """Whether page tables are so short that no segment of a request is cut."""
    return f.page_table.shape[1] * f.ckv.shape[1] <= WHOLE_TILES * TILE


def few_blocks(f: SimpleNamespace) -> int:
    """Into how many blocks heads of 16-bit latents go where tiles are few; 1 where they are not.

    More programs read a tile, but each request is cut into fewer pieces, whose states are what few tiles wait for. The
    page table bounds the tiles. On an H200, 2026-11-21: 32 heads, 1 × 8K 14.3 → 11.6 µs, 8 × 4K 21.2 → 19.8, 12 × 4K
    30.9 → 29.7, but 16 × 4K 30.6 → 31.5; 48 heads, 1 × 8K 16.6 → 13.7, 8 × 4K 26.4 → 24.0; 64 heads, 2 × 4K 18.2 →
    14.0, 8 × 4K 28.6 → 25.0, but 16 × 8K 57.9 → 60.2; 96 heads, 1 × 8K 18.2 → 14.9, but 8 × 4K 30.3 → 33.2; 128 heads,
    1 × 8K 19.6 → 15.9, 2 × 8K 23.4 → 22.3, but 1 × 32K 31.1 → 33.2.
    """
    heads, sms = f.q_nope.shape[1], launch.num_sms(f)
    rows, work = f.max_q_len * heads, most_tiles(f) * heads
    if rows <= _FEW:
        return 2 if rows > 16 and heads % 2 == 0 and work <= 192 * sms else 1
    if f.max_q_len != 1 or is_whole(f) or work > 256 * sms:
        return 1
    return next((n for n in (2, 3, 4) if heads % n == 0 and heads // n <= _FEW), 1)


def few_tiles(f: SimpleNamespace) -> bool:
    """Whether 64 or 128 heads of 8-bit latents go in blocks of 32, though tiles of 64 rows are then half empty.

    As `few_blocks`. On an H200, 2026-11-21: fp8_e4m3 with an e4m3 query: 128 heads, 1 × 4K 20.0 → 17.1 µs, 1 × 8K 19.7
    → 18.2, but 2 × 8K 24.5 → 26.2; 64 heads, 1 × 8K 18.2 → 16.2. With a bf16 query: 1 × 4K 20.8 → 18.5, 1 × 8K 21.9 →
    21.4; fp8_ds_mla 1 × 4K 21.5 → 19.6, 1 × 8K even.
    """
    heads, sms = f.q_nope.shape[1], launch.num_sms(f)
    if is_whole(f) or heads not in (64, 128) or f.max_q_len != 1:
        return False
    tiles = most_tiles(f)
    return tiles < 2 * sms and tiles * heads < 192 * sms


def whole_segments(f: SimpleNamespace, segments: int, programs: int) -> bool:
    """Whether each program takes a segment whole: the page table has no room for more than a few tiles.

    One launch instead of two, −4 µs on the host. On an H200, 4 × 256: fp8_e4m3 with 128 heads 22.1 → 17.8 µs, with 16
    heads 8.8 → 10.7; bf16 18.3 → 15.1 and 11.3 → 13.6; 4 × 128, fp8_e4m3, 16 heads 8.4 → 7.8; 60 requests of up to 256,
    128 heads 50.2 → 20.2. With 8 tiles: 22.6 → 24.9 and 9.1 → 16.6.
    """
    return f.page_table.shape[1] * f.ckv.shape[1] <= WHOLE_TILES * TILE and segments <= programs


def _merge_tile(rows: int, segments: int, programs: int) -> tuple[int, int, int, int]:
    """(rows, pieces that are read at once, columns, warps) of a program of the merge.

    Many rows wait once for several of them. Few rows are cut into many pieces: small programs read many at once, but
    where there is about one round of pieces, fewer programs are ready sooner (bf16, 16 heads, 64 × 4K: 91 → 84 µs).
    Programs of one warp: fp8_e4m3, 16 heads, 16 × 8K 32.6 → 31.0 µs, 8 × 8K 21.0 → 20.2, 4 × 8K 15.9 → 15.0.
    """
    if segments * rows > 1024:
        return 4, 2, RANK, 4
    pieces = programs // max(segments, 1)  # of a segment, if lengths are equal
    if pieces <= 4 or (pieces <= 12 and segments * rows > 512):
        return 1, 8, RANK, 4
    if pieces <= 16:
        return 1, 8 if pieces <= 8 else 16, 128, 1
    return (1, 32, 64, 1) if pieces < 96 else (1, 128, 32, 4)


def _kernel(half: bool, k: Choice) -> Any:
    # Imported when first needed: there are many.
    from .sm90.mla_decode.eight_bits import mla_decode_codes_kernel
    from .sm90.mla_decode.sixteen_bits import mla_decode_sixteen_bits_kernel
    from .sm90.mla_decode.two_warpgroups import mla_decode_two_warpgroups_kernel

    if k.trio:
        from .sm90.mla_decode.three_warpgroups import mla_decode_three_warpgroups_kernel

        return mla_decode_three_warpgroups_kernel
    if half:
        return mla_decode_sixteen_bits_kernel if k.rows <= _FEW else mla_decode_two_warpgroups_kernel
    return mla_decode_codes_kernel


def _boxes(f: SimpleNamespace) -> list[portable.Box | None]:
    """Of ckv, kpe and, where there is one, the scale cache."""
    return [portable._box(x) for x in (f.ckv, f.kpe, f.ckv_scale_cache) if x is not None]


def _pitch(x: Any) -> int:
    """Rows of a cache's matrix from one page to the next."""
    return 0 if x is None else x.stride[0] // x.stride[1]


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)


def _descriptor(x: torch.Tensor, box: portable.Box, rows: int) -> Any:
    """Boxes of `rows` slots by 128 bytes, or by the whole row where it is shorter."""
    from triton.experimental.gluon import language as gl

    size = x.element_size()
    columns = min(CHUNK, box.columns) * 2 // size
    kinds = {torch.float8_e4m3fn: gl.float8e4nv, torch.float16: gl.float16, torch.float32: gl.float32}
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], kinds.get(x.dtype, gl.bfloat16))
    shape, strides = [box.rows, box.columns * 2 // size], [box.pitch * 2 // size, 1]
    return tensor_map(launch.Address(x), shape, strides, [rows, columns], layout)
