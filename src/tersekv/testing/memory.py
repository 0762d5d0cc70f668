"""Poisoned memory, and calls moved between devices with their strides, gaps and shared buffers."""

from __future__ import annotations

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
    buffers: dict[int, Tensor] = {}

    def move(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        key = x.untyped_storage().data_ptr()
        if key not in buffers:
            buffers[key] = storage_bytes(x).to(device, copy=True)
        home = torch.empty(0, dtype=x.dtype, device=device)
        return home.set_(buffers[key].untyped_storage(), x.storage_offset(), x.shape, x.stride())

    return type(call)(*[move(x) for x in call])
