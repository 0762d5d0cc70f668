"""Tensor maps: which tiles Hopper's copy engine (TMA) can copy, and where to; those of K/V caches and scales."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from .....formats import BLOCK, TOKEN_HEAD, KVFormat, pair_of
from ....host import launch
from ....host.bind import TensorMapArg
from ....host.kernel_config import KernelConfig
from ....host.launch import RawAddress
from .hadamard import Rotation

SMEM_ALIGNMENT = 128  # bytes, of a copy's destination
_GLOBAL_ALIGNMENT = 16  # bytes, of the base, strides and rows
_MIN_SWIZZLE = 32  # bytes of a row: no swizzled layout has shorter ones
_MAX_BOX_DIM = 256  # elements of a box in one dimension
MMA_KEYS = 16  # keys of one MMA tile
MIN_KEYS_PER_COPY = MMA_KEYS // 2  # divides the page size: a copy brings at least half an MMA tile


# ---- what the engine can copy ----


def align_smem_bytes(copy_bytes: int) -> int:
    """Returns the pitch in bytes of copies of copy_bytes."""
    return -(-copy_bytes // SMEM_ALIGNMENT) * SMEM_ALIGNMENT


def why_no_tensor_map(
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    itemsize: int,
    swizzle: int,
    smem_copy_pitch_bytes: int = 0,
) -> str | None:
    """Returns why the engine cannot copy tiles of `box` elements; None: it can. All but `swizzle` and
    `smem_copy_pitch_bytes` in elements.

    swizzle: bytes of a row in shared memory, to which the compiler splits longer ones; 0: rows are not swizzled.

    smem_copy_pitch_bytes: from one copy to the next; 0: copies are adjacent.
    """
    nbytes, row_bytes = math.prod(box) * itemsize, box[-1] * itemsize
    smem_copy_pitch_bytes = smem_copy_pitch_bytes or nbytes
    if not 1 <= len(shape) == len(strides) == len(box) <= 5:
        return f"{len(shape)} dimensions"
    if not all(1 <= n < 2**31 for n in shape):  # coordinates are int32
        return f"a shape of {list(shape)}"
    if strides[-1] != 1 or not all(
        0 < n * itemsize < 2**40 and n * itemsize % _GLOBAL_ALIGNMENT == 0 for n in strides[:-1]
    ):
        return f"strides of {list(strides)}"
    if swizzle and row_bytes < _MIN_SWIZZLE:
        return f"rows of {row_bytes} bytes"
    if swizzle and row_bytes > swizzle:
        row_bytes = swizzle if row_bytes % swizzle == 0 else 0
    largest_dim = max(*box[:-1], row_bytes // itemsize) if len(box) > 1 else row_bytes // itemsize
    if row_bytes == 0 or row_bytes % _GLOBAL_ALIGNMENT or largest_dim > _MAX_BOX_DIM or any(n & (n - 1) for n in box):
        return f"boxes of {list(box)}"
    if smem_copy_pitch_bytes % SMEM_ALIGNMENT or smem_copy_pitch_bytes < nbytes:
        return f"boxes that lie {smem_copy_pitch_bytes} bytes apart"
    return None


def make_tensor_map(base: Any, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], layout: Any) -> Any:
    """Returns the tensor map of tiles of `box` elements; base: a tensor, or an object with an address and a dtype."""
    reason = why_no_tensor_map(shape, strides, box, base.dtype.itemsize, layout.swizzle_byte_width)
    assert reason is None, reason
    return _make_tensor_map_without_shape_check(base, shape, strides, box, layout)


def _make_tensor_map_without_shape_check(
    base: Any, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], layout: Any
) -> Any:
    # Imported after `why_not` has checked the version: other versions of Triton have other names.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    assert base.data_ptr() % _GLOBAL_ALIGNMENT == 0
    return TensorDescriptor(base, list(shape), list(strides), list(box), layout)


def tensor_map_arg(
    name: str, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], layout: Any
) -> TensorMapArg:
    """Returns that tensor map of the tensor of this name, as an argument of a kernel."""
    return TensorMapArg(name, partial(_make_address_map, shape=shape, strides=strides, box=box, layout=layout))


def _make_address_map(x: Any, **spec: Any) -> Any:
    return make_tensor_map(RawAddress(x), **spec)


# ---- copy tiles of caches, and their layout in shared memory ----


@dataclass(frozen=True)
class KVLayout(KernelConfig):
    """Layout of K or V: of their tensor copies, and in shared memory."""

    CODE: str  # KVFormat.code
    PACK: int  # codes in a packed 16-bit word
    SCALE_KIND: str  # KVFormat.scale of stored scales; "": there are none
    SWIZZLE: int
    SMEM_SHAPE: tuple[int, ...]  # MMA tiles of a buffer in all stages, heads, keys, packed; else see `make_kv_layout`
    COPY_BYTES: int
    ROTATION: Rotation
    PADDED_HEADS: int = 1  # heads of a group that is copied as padded tiles (`_padded_heads_and_word_shift_per_head`)
    HEAD_SHIFT: int = 0  # packed words by which a head's row begins later in its padded row than the previous head's
    ROW_PACKED: int = 0  # packed words of a row
    CODE_STRIDES: tuple[int, ...] = ()  # of pages, slots and heads in packed words, where codes are copied in chunks
    SCALE_SMEM_SHAPE: tuple[int, ...] = ()  # tiles, heads and keys in either order, and words if there are several
    SCALE_COPY_BYTES: int = 0  # 0: no scales are copied
    SCALE_SMEM_PITCH: int = 0  # bytes from one copy to the next
    SCALE_WORDS: int = 0  # 4-byte words of a head's stored scales
    SCALE_ROWS_PER_PAGE: int = 0  # rows of the scales' tensor map per page
    SCALE_ROWS_ARE_KEYS: bool = True
    SCALE_STRIDES: tuple[int, ...] = ()  # of pages, slots and heads, where scales are loaded one by one, or by word
    SCALE_BLOCKS: int = 0  # block scales of a head, where they are copied by word (`decode/scale_words`)
    SCALE_SHIFT: int = 0  # bytes by which a head's row of them begins later than the previous head's
    SCALES_UNALIGNED: bool = False  # rows of them begin between two words

    @property
    def SMEM_LAYOUT(self) -> gl.NVMMASharedLayout:
        """Layout of one MMA tile, in 16-bit words."""
        return gl.NVMMASharedLayout(self.SWIZZLE, 16, len(self.SMEM_SHAPE) - 1)

    @property
    def MAY_HOLD_NEIGHBOR_NAN(self) -> bool:
        """Whether a copied row may hold a NaN of a neighbouring head."""
        return self.PADDED_HEADS > 1 and self.CODE in ("e4m3", "e5m2")

    @property
    def SCALE_SMEM_LAYOUT(self) -> gl.SwizzledSharedLayout:
        return gl.SwizzledSharedLayout(1, 1, 1, list(range(len(self.SCALE_SMEM_SHAPE) - 1))[::-1])


class TensorMapSpec(NamedTuple):
    """Tensor map of a cache: shape, strides and box of one copy in elements of `view`; rows per page, or 0 where pages
    are a dimension of their own; padded_heads: heads of a group (`_padded_heads_and_word_shift_per_head`); chunks: the
    engine cannot copy it, and cp.async does (`decode/code_chunks`): strides are those of pages, slots and heads."""

    shape: list[int]
    strides: list[int]
    box: list[int]
    swizzle: int
    view: torch.dtype
    rows_per_page: int
    rows_are_keys: bool = True
    padded_heads: int = 1
    chunks: bool = False

    @property
    def tiles_per_copy(self) -> int:
        """Tiles of 16 keys, or of 8, in one copy of codes."""
        return self.box[1 if self.rows_per_page == 0 else 0]

    def layout(self) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout(self.swizzle, 8 * self.view.itemsize, len(self.box))

    def nbytes(self) -> int:
        """Returns the bytes of one copy."""
        return math.prod(self.box) * self.view.itemsize

    def smem_copy_pitch_bytes(self) -> int:
        """Returns the bytes from one copy to the next in the ring."""
        return align_smem_bytes(self.nbytes())

    def why_tma_cannot_copy(self) -> str | None:
        """Returns why the engine cannot copy its tiles; None: it can."""
        return why_no_tensor_map(
            self.shape, self.strides, self.box, self.view.itemsize, self.swizzle, self.smem_copy_pitch_bytes()
        )

    def self_or_none_if_tma_cannot_copy(self) -> TensorMapSpec | None:
        """Returns itself, or None if the engine cannot copy its tiles."""
        return self if self.why_tma_cannot_copy() is None else None


def make_kv_and_scale_map_specs(
    f: SimpleNamespace, heads_per_cta: int, keys_per_copy: int, shared_tiles: bool, head_dim_parts: int,
    key_parts: int = 1,
) -> tuple[list[TensorMapSpec], list[TensorMapSpec | None]]:  # fmt: skip
    """Returns the specs of K and V codes, and of stored scales that are copied, else None; a copy is `keys_per_copy`
    keys of `heads_per_cta` heads, or parts of heads: see `decode/config.facts_with_head_dim_parts_as_heads`."""
    codes = [kv_copy_spec_or_none(x, heads_per_cta, keys_per_copy, head_dim_parts) for x in (f.k_cache, f.v_cache)]
    scales = [
        None
        if x is None or shared_tiles or are_scales_copied_by_word(fmt, x)
        else scale_map_spec_of_a_head_or_none(x, keys_per_copy, fmt.scale == BLOCK)
        if key_parts > 1
        else scale_map_spec_or_none(
            x, num_scale_heads_of_head_parts(fmt, heads_per_cta, head_dim_parts), keys_per_copy, fmt.scale == BLOCK
        )
        for x, fmt in zip((f.k_scale_cache, f.v_scale_cache), pair_of(f), strict=True)
    ]
    return [spec for spec in codes if spec is not None], scales


# ---- codes ----


def kv_map_spec_or_none(
    cache: Any, heads_per_cta: int, keys_per_copy: int, head_dim_parts: int = 1
) -> TensorMapSpec | None:
    """Returns the spec of a cache: [rows / 16, heads, 16, packed]; [pages, slots / 16, heads, 16, packed] where the row
    pitch is not constant across pages, as with scales in their tails. None: it cannot be copied. 8 for 16 in copies
    of 8.

    A packed word is 16 bits. In shared memory a copy of many keys is tiles of 16 keys, whose rows are a power of two:
    the engine pads a shorter row with zeros, or with its neighbours (`_padded_heads_and_word_shift_per_head`).

    head_dim_parts: of a head; each counts as one in the cache's shape, but not in its strides
    """
    pages, slots, heads, width = cache.shape
    size = cache.dtype.itemsize
    s_p, s_s, s_h = cache.stride[:3]
    parts_are_heads = s_h == head_dim_parts * width
    if parts_are_heads:
        s_h = width
    # A tensor map of heads that share memory would have a stride of 0.
    if not cache.aligned or 0 in (s_s, s_h) or any(n * size % 16 for n in (s_p, s_s)):
        return None
    packed, n = width * size // 2, min(keys_per_copy, MMA_KEYS)
    padded_packed, token_stride = launch.next_power_of_2(packed), s_s * size // 2
    rows_per_page, swizzle = s_p // s_s, min(padded_packed * 2, 128)
    rows = (pages - 1) * rows_per_page + slots
    # Pages that share memory have no pitch: a stride of 0 is refused below.
    flat = s_p > 0 and s_p % (n * s_s) == 0 and n <= rows < 2**31
    padded_heads, shift = _padded_heads_and_word_shift_per_head(2 * packed, heads_per_cta) if s_h == width else (1, 0)
    if flat and padded_heads > 1:
        group_row = packed + (padded_heads - 1) * shift  # of a group's last row, from the begin of its padded row
        shape, box = (
            [rows // n, heads // padded_heads, padded_heads, n, group_row],
            [keys_per_copy // n, heads_per_cta // padded_heads, padded_heads, n, padded_packed],
        )
        strides = [n * token_stride, padded_heads * packed, packed - shift, token_stride, 1]
        return TensorMapSpec(
            shape, strides, box, swizzle, torch.int16, rows_per_page, padded_heads=padded_heads
        ).self_or_none_if_tma_cannot_copy()
    if s_h * size % 16:
        return None
    inner_strides, box = (
        [n * token_stride, s_h * size // 2, token_stride, 1],
        [keys_per_copy // n, heads_per_cta, n, padded_packed],
    )
    if not parts_are_heads and head_dim_parts > 1:
        if not flat:
            return None
        shape, strides = [rows // n, heads // head_dim_parts, head_dim_parts, n, packed], [*inner_strides]
        strides.insert(2, packed)
        box[1:2] = heads_per_cta // head_dim_parts, head_dim_parts
        return TensorMapSpec(shape, strides, box, swizzle, torch.int16, rows_per_page).self_or_none_if_tma_cannot_copy()
    if flat:
        return TensorMapSpec(
            [rows // n, heads, n, packed], inner_strides, box, swizzle, torch.int16, rows_per_page
        ).self_or_none_if_tma_cannot_copy()
    shape, strides = [pages, slots // n, heads, n, packed], [s_p * size // 2, *inner_strides]
    return TensorMapSpec(shape, strides, [1, *box], swizzle, torch.int16, 0).self_or_none_if_tma_cannot_copy()


def kv_copy_spec_or_none(
    cache: Any, heads_per_cta: int, keys_per_copy: int, head_dim_parts: int = 1
) -> TensorMapSpec | None:
    """Returns `kv_map_spec_or_none`, or else the spec of copies in chunks of 8 bytes: of rows at odd multiples of them,
    as rows of 4 bits of padded heads are."""
    spec = kv_map_spec_or_none(cache, heads_per_cta, keys_per_copy, head_dim_parts)
    row_bytes, itemsize = cache.shape[3] * cache.dtype.itemsize, cache.dtype.itemsize
    strides = [n * itemsize for n in cache.stride[:3]]
    if spec is not None or not cache.aligned or row_bytes % 16 != 8 or any(n % 8 for n in strides):
        return spec
    if keys_per_copy % MMA_KEYS or head_dim_parts > 1:
        return None
    padded_packed = launch.next_power_of_2(row_bytes // 2)
    box = [keys_per_copy // MMA_KEYS, heads_per_cta, MMA_KEYS, padded_packed]
    shape, swizzle = [*cache.shape[:3], row_bytes // 2], min(padded_packed * 2, 128)
    return TensorMapSpec(shape, [n // 2 for n in strides], box, swizzle, torch.int16, 1, chunks=True)


def _padded_heads_and_word_shift_per_head(row_bytes: int, heads_per_cta: int) -> tuple[int, int]:
    """Returns (heads of a group, packed words by which each head's row begins later in its padded row than the previous
    head's), or (1, 0); for adjacent heads of row_bytes.

    Rows that begin at odd multiples of 16 bytes cost the engine up to four L2 requests each; those at odd multiples of
    8 it cannot copy. So each head of a group is copied from a multiple of 32, or of 16, before its row: a row of the
    length in shared memory, whose ends belong to the neighbours. `decode/producer` and `decode/kernel` compute
    the offset of the head's own columns in it.
    """
    shift = 16 if row_bytes % 32 == 16 else 8 if row_bytes % 16 == 8 else 0  # bytes
    max_heads = (launch.next_power_of_2(row_bytes) - row_bytes) // shift + 1 if shift else 1
    padded_heads = next(n for n in (8, 4, 2, 1) if n <= min(heads_per_cta, max_heads))
    return (padded_heads, shift // 2) if padded_heads > 1 else (1, 0)


def pack_heads_into_swizzle_128b_rows(spec: TensorMapSpec) -> TensorMapSpec:
    """Returns the same copy with as many adjacent heads per row as fill 128 bytes: fewer rows to request."""
    *outer, heads, keys, words = spec.box
    n = min(heads, 64 // words)
    if n < 2 or spec.chunks or spec.strides[-3] != words:
        return spec
    shape, strides = [*spec.shape[:-3], spec.shape[-3] // n, keys, n * words], [*spec.strides]
    strides[-3] = n * words
    return spec._replace(shape=shape, strides=strides, box=[*outer, heads // n, keys, n * words], swizzle=128)


# ---- stored scales ----


def are_scales_copied_by_word(fmt: KVFormat, scale_cache: Any) -> bool:
    """Returns whether stored scales are block scales of a padded head, whose rows no tensor copy can bring
    (`decode/scale_words`)."""
    return fmt.scale == BLOCK and launch.next_power_of_2(scale_cache.shape[3]) != scale_cache.shape[3]


def num_scale_heads_of_head_parts(fmt: KVFormat, num_head_parts: int, head_dim_parts: int) -> int:
    """Returns how many heads of stored scales num_head_parts column parts of heads have; head_dim_parts parts of one
    head share token scales."""
    return num_head_parts // head_dim_parts if fmt.scale == TOKEN_HEAD else num_head_parts


def scale_map_spec_or_none(
    scale_cache: Any, heads_per_cta: int, keys_per_copy: int, has_block_scales: bool
) -> TensorMapSpec | None:
    """Returns the spec of stored scales; None: they cannot be copied, or copies of 8 keys would not be adjacent."""
    spec = _scale_map_spec_without_smem_pitch_check(scale_cache, heads_per_cta, keys_per_copy, has_block_scales)
    return None if spec is None or (keys_per_copy < MMA_KEYS and spec.smem_copy_pitch_bytes() > spec.nbytes()) else spec


def scale_map_spec_of_a_head_or_none(
    scale_cache: Any, keys_per_copy: int, has_block_scales: bool
) -> TensorMapSpec | None:
    """Returns the spec of one head's stored scales, with those of as few heads beside it as make 16 bytes; or None."""
    specs = (scale_map_spec_or_none(scale_cache, heads, keys_per_copy, has_block_scales) for heads in (1, 2, 4))
    return next((spec for spec in specs if spec is not None), None)


def _scale_map_spec_without_smem_pitch_check(
    scale_cache: Any, heads_per_cta: int, keys_per_copy: int, has_block_scales: bool
) -> TensorMapSpec | None:
    """Returns the spec of stored scales, 4-byte words: [rows / 16, 16, heads] with adjacent heads, or [slots / 16,
    heads, 16].

    [pages, slots / 16, …] of the same where pages do not fit such a matrix. 8 for 16 in copies of 8.
    """
    (pages, slots, heads), n = scale_cache.shape[:3], min(keys_per_copy, MMA_KEYS)
    words = scale_cache.shape[3] // 4 if has_block_scales else 1
    if not scale_cache.aligned or any(s * scale_cache.dtype.itemsize % 4 for s in scale_cache.stride[:3]):
        return None
    s_p, s_s, s_h = (s * scale_cache.dtype.itemsize // 4 for s in scale_cache.stride[:3])
    dtype = torch.int32 if has_block_scales else torch.float32
    heads_are_adjacent = s_h == words or heads == 1
    if heads_are_adjacent and s_s % 4 == 0 and s_s and heads_per_cta * words >= 4:
        box, strides, rows_per_page = [keys_per_copy // n, n, heads_per_cta * words], [n * s_s, s_s, 1], s_p // s_s
        rows = (pages - 1) * rows_per_page + slots
        if s_p % (n * s_s) == 0 and rows < 2**31:
            return TensorMapSpec(
                [rows // n, n, heads * words], strides, box, 0, dtype, rows_per_page
            ).self_or_none_if_tma_cannot_copy()
        shape = [pages, slots // n, n, heads * words]
        return TensorMapSpec(shape, [s_p, *strides], [1, *box], 0, dtype, 0).self_or_none_if_tma_cannot_copy()
    if s_s == words:
        outer = s_p if heads == 1 else s_h
        box, strides = [keys_per_copy // n, heads_per_cta, n * words], [n * words, outer, 1]
        rows = (pages - 1) * (s_p // max(outer, 1)) + heads
        if outer and s_p % outer == 0 and rows < 2**31:
            shape = [slots // n, rows, n * words]
            return TensorMapSpec(shape, strides, box, 0, dtype, s_p // outer, False).self_or_none_if_tma_cannot_copy()
        shape = [pages, slots // n, heads, n * words]
        return TensorMapSpec(shape, [s_p, *strides], [1, *box], 0, dtype, 0, False).self_or_none_if_tma_cannot_copy()
    if (
        heads_are_adjacent and s_s == heads * words and heads_per_cta == heads
    ):  # too few heads for rows of 16 bytes: one row of 16 keys
        keys_row = n * s_s
        shape = [pages, slots // n, 1, keys_row]
        return TensorMapSpec(
            shape, [s_p, keys_row, keys_row, 1], [1, keys_per_copy // n, 1, keys_row], 0, dtype, 0
        ).self_or_none_if_tma_cannot_copy()
    return None


# ---- shared memory ----


def min_keys_per_copy(page_size: int) -> int:
    """Returns the keys of the smallest copy: an MMA tile, or half of one where pages are no multiple of it."""
    return MMA_KEYS if page_size % MMA_KEYS == 0 else MMA_KEYS // 2


def make_kv_layout(
    fmt: KVFormat, codes: TensorMapSpec, scales: TensorMapSpec | None, rotation: Rotation, heads_per_cta: int,
    num_stages: int, head_dim_parts: int, key_parts: int = 1,
) -> KVLayout:  # fmt: skip
    """Returns the KVLayout. Where copies have 8 keys, two copies form an MMA tile: codes are [halves, panels of a row,
    heads, 8, packed], and stored scales, if rows are heads, [halves, heads, 8, …]; with key parts see
    `_with_key_parts`."""
    pack = 2 * fmt.values_per_element // fmt.storage.itemsize
    tiles_per_copy, (keys, words) = codes.tiles_per_copy, codes.box[-2:]
    rows = math.prod(codes.box) // (tiles_per_copy * keys * words)
    smem_shape: tuple[int, ...] = (num_stages * tiles_per_copy, rows, keys, words)
    if keys < MMA_KEYS:
        panel = min(words, codes.swizzle // 2)
        smem_shape = (num_stages, MMA_KEYS // keys, words // panel, rows, keys, panel)
    scale_kind = fmt.scale if fmt.scale in (TOKEN_HEAD, BLOCK) else ""
    layout = KVLayout(fmt.code, pack, scale_kind, codes.swizzle, smem_shape, codes.nbytes(), rotation)
    if codes.chunks:
        layout = replace(layout, COPY_BYTES=0, ROW_PACKED=codes.shape[3], CODE_STRIDES=tuple(codes.strides))
    if codes.padded_heads > 1:
        row_size = codes.strides[1] // codes.padded_heads
        layout = replace(
            layout, PADDED_HEADS=codes.padded_heads, HEAD_SHIFT=row_size - codes.strides[2], ROW_PACKED=row_size
        )
    if key_parts > 1:
        return _with_key_parts(layout, fmt, codes, scales, num_stages, key_parts)
    if scales is None:
        return layout
    heads_per_cta = num_scale_heads_of_head_parts(fmt, heads_per_cta, head_dim_parts)
    words = math.prod(scales.box[-2:]) // (keys * heads_per_cta)
    scale_box = (
        (MMA_KEYS, heads_per_cta)
        if scales.rows_are_keys
        else (heads_per_cta, MMA_KEYS)
        if keys == MMA_KEYS
        else (MMA_KEYS // keys, heads_per_cta, keys)
    )
    shape = (smem_shape[0] * scales.smem_copy_pitch_bytes() // scales.nbytes(), *scale_box)
    return replace(
        layout,
        SCALE_SMEM_SHAPE=(*shape, words) if scales.view == torch.int32 else shape,
        SCALE_COPY_BYTES=scales.nbytes(),
        SCALE_SMEM_PITCH=scales.smem_copy_pitch_bytes(),
        SCALE_WORDS=words,
        SCALE_ROWS_PER_PAGE=scales.rows_per_page,
        SCALE_ROWS_ARE_KEYS=scales.rows_are_keys,
    )


def _with_key_parts(
    layout: KVLayout, fmt: KVFormat, codes: TensorMapSpec, scales: TensorMapSpec | None, num_stages: int,
    key_parts: int,
) -> KVLayout:  # fmt: skip
    """Returns the KVLayout of MMA tiles whose "heads" are parts of one head's keys, 16 each, in order of the keys.

    A copy of all parts, or of several tiles of them, is in shared memory what it would be of key_parts heads. Several
    copies that form a tile lie behind each other; if rows exceed 128 bytes, each has its panels: [copies, panels, parts
    of a copy, 16, packed]. Stored scales: [parts, keys, words], of which the first 16 keys, where copies have a larger
    pitch, count; words are those of as many heads as one copy has.
    """
    tiles_per_copy, (keys, words) = codes.tiles_per_copy, codes.box[-2:]
    copies = max(key_parts // tiles_per_copy, 1)
    num_tiles, panel = num_stages * max(tiles_per_copy // key_parts, 1), codes.swizzle // 2
    shape: tuple[int, ...] = (num_tiles, key_parts, keys, words)
    if copies > 1 and words > panel:
        shape = (num_stages, copies, words // panel, tiles_per_copy, keys, panel)
    layout = replace(layout, SMEM_SHAPE=shape)
    if scales is None:
        return layout
    pitch, nbytes = scales.smem_copy_pitch_bytes(), scales.nbytes()
    columns = nbytes // (4 * tiles_per_copy * keys)
    return replace(
        layout,
        SCALE_SMEM_SHAPE=(num_tiles, key_parts, keys * pitch // nbytes, columns),
        SCALE_COPY_BYTES=nbytes,
        SCALE_SMEM_PITCH=pitch,
        SCALE_WORDS=words * layout.PACK // 64 if fmt.scale == BLOCK else 1,
        SCALE_ROWS_PER_PAGE=scales.rows_per_page,
        SCALE_ROWS_ARE_KEYS=scales.rows_are_keys,
    )


class TypedAddress(launch.RawAddress):
    """The address of a tensor viewed as another dtype, with any strides."""

    __slots__ = ()

    def __init__(self, x: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(x)
        self.dtype = dtype


def tensor_map_from_spec(x: torch.Tensor, spec: TensorMapSpec) -> Any:
    """Returns the tensor map of a cache."""
    reason = spec.why_tma_cannot_copy()
    assert reason is None, reason
    return _make_tensor_map_without_shape_check(
        TypedAddress(x, spec.view), spec.shape, spec.strides, spec.box, spec.layout()
    )
