"""Caches as tensor maps, and how their copies lie in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from .....formats import BLOCK, TOKEN_HEAD, KVFormat, pair_of
from ....host import launch
from ....host.record import Record
from ..parts.tensor_maps import place_of, tensor_map, unfit
from ..parts.turn import Turn

BOX = 16  # keys of one step of the products
PAGE_KEYS = BOX // 2  # what a page's keys are a multiple of: a copy brings a box or half of one


@dataclass(frozen=True)
class Side(Record):
    """Keys or values: how a tensor copy brings them, and how they lie in shared memory."""

    CODE: str  # KVFormat.code
    PARTS: int  # codes in a 16-bit word
    STORED: str  # KVFormat.scale of scales that are stored; "": there are none
    SWIZZLE: int
    RING: tuple[int, ...]  # boxes of a buffer in all stages, heads, keys, words; of two copies a box: see `side_of`
    BYTES: int  # of a copy
    TURN: Turn
    WINDOWS: int = 1  # heads whose rows are copied by windows (`_windows`)
    STEP: int = 0  # units by which a head's row begins later in its window than that of the head before
    ROW: int = 0  # units of a row
    SCALE_RING: tuple[int, ...] = ()  # boxes, heads and keys or the other way, and words if there are several
    SCALE_BYTES: int = 0  # of a copy; 0: none are copied
    SCALE_PLACE: int = 0  # bytes from one copy to the next
    SCALE_WORDS: int = 0  # 4-byte words of a head's stored scales
    SCALE_PITCH: int = 0  # rows of the scales' matrix per page
    SCALE_ROWS_ARE_KEYS: bool = True
    SCALE_STRIDES: tuple[int, ...] = ()  # of pages, slots and heads, where scales are loaded one by one

    @property
    def LAYOUT(self) -> gl.NVMMASharedLayout:
        """Of the 16 keys of one box, in 16-bit words."""
        return gl.NVMMASharedLayout(self.SWIZZLE, 16, len(self.RING) - 1)

    @property
    def FOREIGN_NAN(self) -> bool:
        """A copied row may hold a neighbour's NaN."""
        return self.WINDOWS > 1 and self.CODE in ("e4m3", "e5m2")

    @property
    def SCALE_LAYOUT(self) -> gl.SwizzledSharedLayout:
        return gl.SwizzledSharedLayout(1, 1, 1, list(range(len(self.SCALE_RING) - 1))[::-1])


class Box(NamedTuple):
    """A cache as a tensor map: shape, strides and the box of one copy in elements of `view`; rows per page, or 0 where
    pages are a dimension of their own; windows: of a group of heads (`_windows`)."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    swizzle: int
    view: torch.dtype
    pitch: int
    rows_are_keys: bool = True
    windows: int = 1

    @property
    def boxes(self) -> int:
        """That one copy of codes brings, of 16 keys, or of 8."""
        return self.block[1 if self.pitch == 0 else 0]

    def layout(self) -> gl.NVMMASharedLayout:
        return gl.NVMMASharedLayout(self.swizzle, 8 * self.view.itemsize, len(self.block))

    def nbytes(self) -> int:
        """Of one copy."""
        return math.prod(self.block) * self.view.itemsize

    def place(self) -> int:
        """Bytes from one copy's place in its ring to the next's."""
        return place_of(self.nbytes())

    def legal(self) -> Box | None:
        """Itself, if copies of it are possible."""
        reason = unfit(self.shape, self.strides, self.block, self.view.itemsize, self.swizzle, self.place())
        return self if reason is None else None


def boxes_of(f: SimpleNamespace, hb: int, keys: int, wide: bool) -> tuple[list[Box], list[Box | None]]:
    """Of K and V codes, and stored scales where there are any that are copied; `keys` keys of `hb` heads a copy."""
    codes = [code_box(x, hb, keys) for x in (f.k_cache, f.v_cache)]
    scales = [
        None if x is None or wide else scale_box(x, hb, keys, fmt.scale == BLOCK)
        for x, fmt in zip((f.k_scale_cache, f.v_scale_cache), pair_of(f), strict=True)
    ]
    return [box for box in codes if box is not None], scales


def joined(box: Box) -> Box:
    """The same copy, with as many heads a row as fill 128 bytes where they lie side by side: fewer rows to ask for."""
    *outer, heads, keys, words = box.block
    n = min(heads, 64 // words)
    if n < 2 or box.strides[-3] != words:
        return box
    shape, strides = [*box.shape[:-3], box.shape[-3] // n, keys, n * words], [*box.strides]
    strides[-3] = n * words
    return box._replace(shape=shape, strides=strides, block=[*outer, heads // n, keys, n * words], swizzle=128)


def code_box(x: Any, hb: int, keys: int) -> Box | None:
    """[rows / 16, heads, 16, words] of a cache; [pages, slots / 16, heads, 16, words] where rows do not lie at equal
    distances through all pages, as with scales in their tails. None: copies cannot reach them. 8 for 16 in copies of 8.

    Words are 16 bits. A copy of many keys lies in shared memory as boxes of 16 keys, whose rows are a power of two: the
    engine fills what a shorter row has not with zeros, or brings of its neighbours (`_windows`).
    """
    pages, slots, heads, width = x.shape
    size = x.dtype.itemsize
    s_p, s_s, s_h = x.stride[:3]
    # Heads that share memory would be a tensor map with a stride of 0.
    if not x.aligned or 0 in (s_s, s_h) or any(n * size % 16 for n in (s_p, s_s)):
        return None
    words, n = width * size // 2, min(keys, BOX)
    wide, token = launch.next_power_of_2(words), s_s * size // 2
    pitch, swizzle = s_p // s_s, min(wide * 2, 128)
    rows = (pages - 1) * pitch + slots
    # Pages that share memory have no pitch: a distance of 0 is refused below.
    flat = s_p > 0 and s_p % (n * s_s) == 0 and n <= rows < 2**31
    windows, shift = _windows(2 * words, hb) if s_h == width else (1, 0)
    if flat and windows > 1:
        longest = words + (windows - 1) * shift  # of a group's last row, from its window's begin on
        shape, block = [rows // n, heads // windows, windows, n, longest], [keys // n, hb // windows, windows, n, wide]
        strides = [n * token, windows * words, words - shift, token, 1]
        return Box(shape, strides, block, swizzle, torch.int16, pitch, windows=windows).legal()
    if s_h * size % 16:
        return None
    inner, block = [n * token, s_h * size // 2, token, 1], [keys // n, hb, n, wide]
    if flat:
        return Box([rows // n, heads, n, words], inner, block, swizzle, torch.int16, pitch).legal()
    shape, strides = [pages, slots // n, heads, n, words], [s_p * size // 2, *inner]
    return Box(shape, strides, [1, *block], swizzle, torch.int16, 0).legal()


def _windows(row: int, heads: int) -> tuple[int, int]:
    """(heads of a group, words by which each one's row begins later in its window), or (1, 0), for rows of so many
    bytes, heads side by side.

    Rows that begin at odd multiples of 16 bytes cost the engine up to four requests to the L2 each, and those at odd
    multiples of 8 it cannot copy. So each head of a group is copied from a multiple of 32, or of 16, before its row on:
    a row as long as shared memory has it, of which the ends are the neighbours'. `query` and `kernel` know where in it
    the head's own columns are.
    """
    shift = 16 if row % 32 == 16 else 8 if row % 16 == 8 else 0  # bytes
    most = (launch.next_power_of_2(row) - row) // shift + 1 if shift else 1
    windows = next(n for n in (8, 4, 2, 1) if n <= min(heads, most))
    return (windows, shift // 2) if windows > 1 else (1, 0)


def scale_box(x: Any, hb: int, keys: int, blocks: bool) -> Box | None:
    """A map of stored scales; None: copies cannot reach them, or copies of 8 keys would not lie side by side."""
    box = _scale_box(x, hb, keys, blocks)
    return None if box is None or (keys < BOX and box.place() > box.nbytes()) else box


def _scale_box(x: Any, hb: int, keys: int, blocks: bool) -> Box | None:
    """Stored scales, 4-byte words: [rows / 16, 16, heads] where heads lie side by side, or [slots / 16, heads, 16].

    Where pages do not lie as such a matrix wants, [pages, slots / 16, …] of the same. 8 for 16 in copies of 8.
    """
    (pages, slots, heads), n = x.shape[:3], min(keys, BOX)
    words = x.shape[3] // 4 if blocks else 1
    if not x.aligned or any(s * x.dtype.itemsize % 4 for s in x.stride[:3]):
        return None
    s_p, s_s, s_h = (s * x.dtype.itemsize // 4 for s in x.stride[:3])
    dtype = torch.int32 if blocks else torch.float32
    beside = s_h == words or heads == 1
    if beside and s_s % 4 == 0 and s_s and hb * words >= 4:
        block, strides, pitch = [keys // n, n, hb * words], [n * s_s, s_s, 1], s_p // s_s
        rows = (pages - 1) * pitch + slots
        if s_p % (n * s_s) == 0 and rows < 2**31:
            return Box([rows // n, n, heads * words], strides, block, 0, dtype, pitch).legal()
        shape = [pages, slots // n, n, heads * words]
        return Box(shape, [s_p, *strides], [1, *block], 0, dtype, 0).legal()
    if s_s == words:
        outer = s_p if heads == 1 else s_h
        block, strides = [keys // n, hb, n * words], [n * words, outer, 1]
        rows = (pages - 1) * (s_p // max(outer, 1)) + heads
        if outer and s_p % outer == 0 and rows < 2**31:
            shape = [slots // n, rows, n * words]
            return Box(shape, strides, block, 0, dtype, s_p // outer, False).legal()
        shape = [pages, slots // n, heads, n * words]
        return Box(shape, [s_p, *strides], [1, *block], 0, dtype, 0, False).legal()
    if beside and s_s == heads * words and hb == heads:  # too few for rows of 16 bytes: one row of 16 keys
        run = n * s_s
        shape = [pages, slots // n, 1, run]
        return Box(shape, [s_p, run, run, 1], [1, keys // n, 1, run], 0, dtype, 0).legal()
    return None


def keys_at_once(page: int) -> int:
    """Keys of the smallest copy: a box's, or half of them where pages hold no whole number of boxes."""
    return BOX if page % BOX == 0 else BOX // 2


def side_of(fmt: KVFormat, codes: Box, scales: Box | None, turn: Turn, hb: int, stages: int) -> Side:
    """Where copies bring 8 keys, two lie one behind the other in a box. Its codes are [halves, panels of a row, heads,
    8, words], and its stored scales, if rows are heads, [halves, heads, 8, …]."""
    parts = 2 * fmt.values_per_element // fmt.storage.itemsize
    boxes, (keys, words) = codes.boxes, codes.block[-2:]
    rows = math.prod(codes.block) // (boxes * keys * words)
    ring: tuple[int, ...] = (stages * boxes, rows, keys, words)
    if keys < BOX:
        panel = min(words, codes.swizzle // 2)
        ring = (stages, BOX // keys, words // panel, rows, keys, panel)
    stored = fmt.scale if fmt.scale in (TOKEN_HEAD, BLOCK) else ""
    side = Side(fmt.code, parts, stored, codes.swizzle, ring, codes.nbytes(), turn)
    if codes.windows > 1:
        row = codes.strides[1] // codes.windows
        side = replace(side, WINDOWS=codes.windows, STEP=row - codes.strides[2], ROW=row)
    if scales is None:
        return side
    words = math.prod(scales.block[-2:]) // (keys * hb)
    box = (BOX, hb) if scales.rows_are_keys else (hb, BOX) if keys == BOX else (BOX // keys, hb, keys)
    shape = (ring[0] * scales.place() // scales.nbytes(), *box)
    return replace(
        side,
        SCALE_RING=(*shape, words) if scales.view == torch.int32 else shape,
        SCALE_BYTES=scales.nbytes(),
        SCALE_PLACE=scales.place(),
        SCALE_WORDS=words,
        SCALE_PITCH=scales.pitch,
        SCALE_ROWS_ARE_KEYS=scales.rows_are_keys,
    )


class _Address(launch.Address):
    """A cache seen with another dtype, whatever its strides."""

    __slots__ = ()

    def __init__(self, x: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(x)
        self.dtype = dtype


def descriptor(x: torch.Tensor, box: Box) -> Any:
    return tensor_map(_Address(x, box.view), box.shape, box.strides, box.block, box.layout(), box.place())
