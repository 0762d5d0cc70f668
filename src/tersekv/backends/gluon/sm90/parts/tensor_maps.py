"""Tensor maps: memory as Hopper's copy engine sees it. The one home of what it can copy, and where to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ....host.bind import Described
from ....host.launch import Address

PLACE = 128  # bytes: a copy's destination in shared memory begins at a multiple of them
_UNIT = 16  # bytes: what lies in memory begins at a multiple of them
_LEAST_SWIZZLE = 32  # bytes of a row: layouts of shorter ones there are none
_MOST = 256  # elements of a box in one dimension


def place_of(nbytes: int) -> int:
    """Bytes from one copy's place to the next, for copies of so many bytes."""
    return -(-nbytes // PLACE) * PLACE


def unfit(
    shape: Sequence[int], strides: Sequence[int], block: Sequence[int], itemsize: int, swizzle: int, place: int = 0
) -> str | None:
    """Why the engine cannot copy boxes of `block` elements; None: it can. All but `swizzle` and `place` in elements.

    swizzle: bytes of a row in shared memory, to which the compiler cuts longer ones; 0: rows lie as they are
    place:   bytes from one box's place to the next; 0: boxes lie side by side
    """
    nbytes, inner = math.prod(block) * itemsize, block[-1] * itemsize
    place = place or nbytes
    if not 1 <= len(shape) == len(strides) == len(block) <= 5:
        return f"{len(shape)} dimensions"
    if not all(1 <= n < 2**31 for n in shape):  # coordinates are int32
        return f"a shape of {list(shape)}"
    if strides[-1] != 1 or not all(0 < n * itemsize < 2**40 and n * itemsize % _UNIT == 0 for n in strides[:-1]):
        return f"strides of {list(strides)}"
    if swizzle and inner < _LEAST_SWIZZLE:
        return f"rows of {inner} bytes"
    if swizzle and inner > swizzle:
        inner = swizzle if inner % swizzle == 0 else 0
    widest = max(*block[:-1], inner // itemsize) if len(block) > 1 else inner // itemsize
    if inner == 0 or inner % _UNIT or widest > _MOST or any(n & (n - 1) for n in block):
        return f"boxes of {list(block)}"
    if place % PLACE or place < nbytes:
        return f"boxes that lie {place} bytes apart"
    return None


def tensor_map(base: Any, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], layout: Any,
               place: int = 0) -> Any:  # fmt: skip
    """The descriptor of boxes of `block` elements; base: a tensor, or what has an address and a dtype."""
    # Imported when `why_not` has seen the version: other versions of Triton have other names.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    reason = unfit(shape, strides, block, base.dtype.itemsize, layout.swizzle_byte_width, place)
    assert reason is None, reason
    assert base.data_ptr() % _UNIT == 0
    return TensorDescriptor(base, list(shape), list(strides), list(block), layout)


def described(name: str, shape: Sequence[int], strides: Sequence[int], block: Sequence[int], layout: Any) -> Described:
    """That descriptor of the tensor of this name, as an argument of a kernel."""
    return Described(name, partial(_mapped, shape=shape, strides=strides, block=block, layout=layout))


def _mapped(x: Any, **box: Any) -> Any:
    return tensor_map(Address(x), **box)
