"""Poisoned memory, and calls moved between devices with their strides, gaps and shared buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POISON = 0xFF  # as any float type: NaN; as an index: far outside


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """A tensor whose every byte is 0xFF."""
    t = torch.empty(shape, dtype=dtype)
    storage_bytes(t).fill_(POISON)
    return t


def storage_bytes(t: Tensor) -> Tensor:
    """All bytes of the memory that `t` is a view of, gaps and neighbours included, as one uint8 tensor."""
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def as_bytes(t: Tensor) -> Tensor:
    """The bytes of a tensor of any strides: [..., itemsize] uint8, writable."""
    return t[..., None].view(torch.uint8)


def take(t: Tensor, pages: Tensor, slots: Tensor) -> Tensor:
    """Rows t[pages, slots], for dtypes that cannot be indexed too."""
    return as_bytes(t)[pages, slots].view(t.dtype)[..., 0]


def put(t: Tensor, pages: Tensor, slots: Tensor, rows: Tensor) -> None:
    """t[pages, slots] = rows, for dtypes that cannot be indexed too."""
    as_bytes(t)[pages, slots] = as_bytes(rows)


def moved(call: Any, device: torch.device | str) -> Any:
    """A copy of a call record on `device`: the same strides, alignment and sharing of buffers."""
    return rehoused(call, lambda memory: (memory.to(device, copy=True), 0))


def rehoused(call: Any, house: Callable[[Tensor], tuple[Tensor, int]]) -> Any:
    """A call record over other buffers: the same strides and sharing.

    house:  bytes of a buffer → (bytes of another storage, where in them the buffer begins)
    """
    buffers: dict[int, tuple[Tensor, int]] = {}

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        key = x.untyped_storage().data_ptr()
        if key not in buffers:
            buffers[key] = house(storage_bytes(x))
        whole, start = buffers[key]
        return view_of(whole, start, x)

    return type(call)(*[move(x) for x in call])


def view_of(whole: Tensor, start: int, like: Tensor) -> Tensor:
    """What `like` is of its storage, of the bytes of `whole` from `start` on."""
    place = start // like.itemsize + like.storage_offset()
    home = torch.empty(0, dtype=like.dtype, device=whole.device)
    return home.set_(whole.untyped_storage(), place, like.shape, like.stride())
