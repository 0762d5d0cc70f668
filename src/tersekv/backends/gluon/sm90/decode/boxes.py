"""Caches as tensor maps, and how their copies lie in shared memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from .....formats import BLOCK, kv_format
from ....host import launch
from ....host.record import Record
from ..parts.tensor_maps import place_of, tensor_map, unfit


@dataclass(frozen=True)
class Side(Record):
    """Keys or values: how a tensor copy brings them, and how they lie in shared memory."""

    SWIZZLE: int
    RING: tuple[int, ...]  # boxes of a copy in all stages, heads, keys, words
    BYTES: int  # of a copy
    SCALE_RING: tuple[int, ...]  # boxes, heads and keys or the other way, and words if there are several
    SCALE_BYTES: int
    SCALE_PLACE: int  # bytes from one copy to the next
    SCALE_WORDS: int  # 4-byte words of a head's stored scales
    SCALE_PITCH: int  # rows of the scales' matrix per page
    SCALE_STRIDES: tuple[int, ...] = ()  # of pages, slots and heads, where scales are loaded one by one

    @property
    def LAYOUT(self) -> gl.NVMMASharedLayout:
        """Of the 16 keys of one box, in 16-bit words."""
        return gl.NVMMASharedLayout(self.SWIZZLE, 16, len(self.RING) - 1)

    @property
    def SCALE_LAYOUT(self) -> gl.SwizzledSharedLayout:
        return gl.SwizzledSharedLayout(1, 1, 1, list(range(len(self.SCALE_RING) - 1))[::-1])


class Box(NamedTuple):
    """A cache as a tensor map: shape, strides and the box of one copy in elements of `view`; rows per page."""

    shape: list[int]
    strides: list[int]
    block: list[int]
    swizzle: int
    view: torch.dtype
    pitch: int
    rows_are_keys: bool = True

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


def boxes_of(f: SimpleNamespace, hb: int, keys: int, wide: bool) -> tuple[Box, ...]:
    """K, V, and their stored scales if there are any and they are copied; copies of `keys` keys of `hb` heads."""
    boxes = [code_box(x, hb, keys) for x in (f.k_cache, f.v_cache)]
    if f.k_scale_cache is not None and not wide:
        blocks = kv_format(f.format).scale == BLOCK
        boxes += [scale_box(x, hb, keys, blocks) for x in (f.k_scale_cache, f.v_scale_cache)]
    return tuple(b for b in boxes if b is not None)


def joined(box: Box) -> Box:
    """The same copy, with as many heads a row as fill 128 bytes where they lie side by side: fewer rows to ask for."""
    groups, heads, keys, words = box.block
    n = min(heads, 64 // words)
    if n < 2 or box.strides[1] != words:
        return box
    shape, strides = [box.shape[0], box.shape[1] // n, keys, n * words], [box.strides[0], n * words, box.strides[2], 1]
    return box._replace(shape=shape, strides=strides, block=[groups, heads // n, keys, n * words], swizzle=128)


def code_box(x: Any, hb: int, keys: int) -> Box | None:
    """[rows / 16, heads, 16, words] of a cache; None where its rows do not lie at equal distances.

    Words are 16 bits. A copy of many keys lies in shared memory as boxes of 16 keys.
    """
    pages, slots, heads, width = x.shape
    size = x.dtype.itemsize
    s_p, s_s, s_h = x.stride[:3]
    # Heads that share memory would be a tensor map with a stride of 0.
    if not x.aligned or 0 in (s_s, s_h) or s_p % (16 * s_s) or s_s * size % 16 or s_h * size % 16:
        return None
    rows = (pages - 1) * (s_p // s_s) + slots
    if not 16 <= rows < 2**31:
        return None
    words = width * size // 2
    strides = [16 * s_s * size // 2, s_h * size // 2, s_s * size // 2, 1]
    return Box(
        [rows // 16, heads, 16, words],
        strides,
        [keys // 16, hb, 16, words],
        min(words * 2, 128),
        torch.int16,
        s_p // s_s,
    ).legal()


def scale_box(x: Any, hb: int, keys: int, blocks: bool) -> Box | None:
    """Stored scales, 4-byte words: [rows / 16, 16, heads] where heads lie side by side, or [slots / 16, heads, 16]."""
    pages, slots, heads = x.shape[:3]
    words = x.shape[3] // 4 if blocks else 1
    strides = [n * x.dtype.itemsize // 4 for n in x.stride[:3]]
    if not x.aligned or any(n * x.dtype.itemsize % 4 for n in x.stride[:3]):
        return None
    s_p, s_s, s_h = strides
    dtype = torch.int32 if blocks else torch.float32
    if (s_h == words or heads == 1) and s_s % 4 == 0 and s_s and s_p % (16 * s_s) == 0 and hb * words >= 4:
        rows = (pages - 1) * (s_p // s_s) + slots
        if rows >= 2**31:
            return None
        shape = [rows // 16, 16, heads * words]
        return Box(
            shape,
            [16 * s_s, s_s, 1],
            [keys // 16, 16, hb * words],
            0,
            dtype,
            s_p // s_s,
            True,
        ).legal()
    outer = s_p if heads == 1 else s_h
    if s_s == words and outer % 4 == 0 and outer and s_p % outer == 0:
        shape = [slots // 16, (pages - 1) * (s_p // outer) + heads, 16 * words]
        return Box(
            shape,
            [16 * words, outer, 1],
            [keys // 16, hb, 16 * words],
            0,
            dtype,
            s_p // outer,
            False,
        ).legal()
    return None


def side_of(codes: Box, scales: Box | None, hb: int, stages: int) -> Side:
    ring = (stages * codes.block[0], *codes.block[1:])
    if scales is None:
        return Side(codes.swizzle, ring, codes.nbytes(), (), 0, 0, 0, 0)
    words = math.prod(scales.block[1:]) // (16 * hb)
    rows = (16, hb) if scales.rows_are_keys else (hb, 16)
    boxes = ring[0] * scales.place() // scales.nbytes()
    scale_ring = (boxes, *rows, words) if scales.view == torch.int32 else (boxes, *rows)
    return Side(
        codes.swizzle, ring, codes.nbytes(), scale_ring, scales.nbytes(), scales.place(), words, scales.pitch
    )  # fmt: skip


class _Address(launch.Address):
    """A cache seen with another dtype, whatever its strides."""

    __slots__ = ()

    def __init__(self, x: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(x)
        self.dtype = dtype


def descriptor(x: torch.Tensor, box: Box) -> Any:
    return tensor_map(_Address(x, box.view), box.shape, box.strides, box.block, box.layout(), box.place())
