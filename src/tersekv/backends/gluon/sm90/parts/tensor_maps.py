"""Tensor maps: which tiles Hopper's copy engine (TMA) can copy, and where to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from ....host.bind import TensorMapArg
from ....host.launch import RawAddress

SMEM_ALIGNMENT = 128  # bytes, of a copy's destination
_GLOBAL_ALIGNMENT = 16  # bytes, of the base, strides and rows
_MIN_SWIZZLE = 32  # bytes of a row: no swizzled layout has shorter ones
_MAX_BOX_DIM = 256  # elements of a box in one dimension


def align_smem_bytes(copy_bytes: int) -> int:
    """Returns the pitch in bytes of copies of copy_bytes."""
    return -(-copy_bytes // SMEM_ALIGNMENT) * SMEM_ALIGNMENT


def why_no_tensor_map(
    shape: Sequence[int], strides: Sequence[int], box: Sequence[int], itemsize: int, swizzle: int, smem_pitch: int = 0
) -> str | None:
    """Returns why the engine cannot copy tiles of `box` elements; None: it can. All but `swizzle` and `smem_pitch` in
    elements.

    swizzle: bytes of a row in shared memory, to which the compiler splits longer ones; 0: rows are not swizzled.

    smem_pitch: bytes from one tile to the next; 0: tiles are adjacent.
    """
    nbytes, row_bytes = math.prod(box) * itemsize, box[-1] * itemsize
    smem_pitch = smem_pitch or nbytes
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
    if smem_pitch % SMEM_ALIGNMENT or smem_pitch < nbytes:
        return f"boxes that lie {smem_pitch} bytes apart"
    return None


def make_tensor_map(base: Any, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], layout: Any,
                    smem_pitch: int = 0) -> Any:  # fmt: skip
    """Returns the tensor map of tiles of `box` elements; base: a tensor, or an object with an address and a dtype."""
    # Imported after `why_not` has checked the version: other versions of Triton have other names.
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    reason = why_no_tensor_map(shape, strides, box, base.dtype.itemsize, layout.swizzle_byte_width, smem_pitch)
    assert reason is None, reason
    assert base.data_ptr() % _GLOBAL_ALIGNMENT == 0
    return TensorDescriptor(base, list(shape), list(strides), list(box), layout)


def tensor_map_arg(
    name: str, shape: Sequence[int], strides: Sequence[int], box: Sequence[int], layout: Any
) -> TensorMapArg:
    """Returns that tensor map of the tensor of this name, as an argument of a kernel."""
    return TensorMapArg(name, partial(_make_address_map, shape=shape, strides=strides, box=box, layout=layout))


def _make_address_map(x: Any, **spec: Any) -> Any:
    return make_tensor_map(RawAddress(x), **spec)
