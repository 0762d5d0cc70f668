"""Guard zones around all memory of a call, its scratch included: what is written beside a buffer is seen.

Scratch starts as NaN at every call, so that what is read of it before it is written shows in the results.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..dispatch import plan
from .memory import POISON, rehoused, storage_bytes, view_of

ZONE = 1 << 16  # bytes on either side: more than a row of any cache, or a tile of any kernel
ALIGNED = 512  # where PyTorch's allocations on a GPU begin, at least
_EMPTY = {
    torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty, torch.Tensor.new_empty_strided
}  # fmt: skip
_FILLED = {torch.zeros, torch.zeros_like, torch.Tensor.new_zeros, torch.full, torch.full_like, torch.Tensor.new_full}


class Buffer:
    """Poisoned bytes between two zones that nothing may write. name: what lies there."""

    def __init__(self, nbytes: int, device: torch.device | str, name: str = "") -> None:
        self.whole = torch.full((nbytes + 2 * ZONE + ALIGNED,), POISON, dtype=torch.uint8, device=device)
        self.start = ZONE + -self.whole.data_ptr() % ALIGNED
        self.stop, self.name = self.start + nbytes, name

    @property
    def inside(self) -> Tensor:
        return self.whole[self.start : self.stop]

    @property
    def zones(self) -> tuple[Tensor, Tensor]:
        return self.whole[: self.start], self.whole[self.stop :]

    def report(self) -> str:
        """What was written beside, in words."""
        before, after = (zone != POISON for zone in self.zones)
        told = []
        for where, wrong, steps in (("before", before.flip(0), "back"), ("after", after, "on")):
            if wrong.any():
                first = int(wrong.nonzero()[0]) + (where == "before")
                told.append(f"{int(wrong.sum())} bytes {where} it, the nearest {first} {steps}")
        return f"{self.name}: want no byte written beside its memory, got {' and '.join(told)}"


class Guarded:
    """A call record on a device, its buffers among guard zones. Everything in it begins as aligned as on a GPU."""

    def __init__(self, given: Any, device: torch.device | str) -> None:
        self._given, self._device = given, device
        self._buffers: dict[int, Buffer] = {}
        self._scratch: list[Buffer] = []
        self.call: Any = rehoused(given, self._house)

    def _house(self, memory: Tensor) -> tuple[Tensor, int]:
        if not len(memory):  # has no address, and keeps none
            return memory.to(self._device, copy=True), 0
        fields = zip(self._given._fields, self._given, strict=True)
        here = [n for n, x in fields if isinstance(x, Tensor) and _address(x) == memory.data_ptr()]
        buffer = self._buffers[memory.data_ptr()] = Buffer(len(memory), self._device, ", ".join(here))
        buffer.inside.copy_(memory)
        return buffer.whole, buffer.start

    @contextmanager
    def scratch(self) -> Iterator[None]:
        """Memory that is made meanwhile lies among guard zones too, and is poisoned."""
        plan.release_workspace()
        try:
            with _Guarding(self._scratch):
                yield
        finally:
            plan.release_workspace()

    def strays(self) -> list[str]:
        """What was written beside a buffer, a line for each."""
        buffers = [*self._buffers.values(), *self._scratch]
        # One answer for all: each is waited for.
        wrong = [(zone != POISON).any() for b in buffers for zone in b.zones]
        flags = torch.stack(wrong).tolist() if wrong else []
        return [
            b.report() for b, pair in zip(buffers, zip(flags[::2], flags[1::2], strict=True), strict=True) if any(pair)
        ]

    def back(self) -> Any:
        """The record on the CPU, without the zones: the same strides and sharing as the given one."""

        def house(memory: Tensor) -> tuple[Tensor, int]:
            found = self._buffers.get(memory.data_ptr())
            return (memory.clone() if found is None else found.inside.to("cpu", copy=True)), 0

        return rehoused(self._given, house)


class _Guarding(TorchFunctionMode):
    """Puts what is allocated on this thread into buffers of a list."""

    def __init__(self, buffers: list[Buffer]) -> None:
        super().__init__()
        self._buffers = buffers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func not in _EMPTY and func not in _FILLED:
            return made
        nbytes = made.untyped_storage().nbytes()
        if not nbytes or made.device.type == "meta":
            return made
        code = sys._getframe(1).f_code
        name = f"scratch of {nbytes} bytes ({Path(code.co_filename).stem}.{code.co_name})"
        buffer = Buffer(nbytes, made.device, name)
        self._buffers.append(buffer)
        if func in _FILLED:
            buffer.inside.copy_(storage_bytes(made))
        return view_of(buffer.whole, buffer.start, made)


def _address(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
