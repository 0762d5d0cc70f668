"""What plans are looked up by: every option of a call, and of every tensor the facts that a plan may depend on."""

from __future__ import annotations

import typing
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from .calls import CALLS

try:  # what torch.compile recognises tensors by, in C++; it may go with a new torch
    from torch._C._dynamo import guards

    _guards: Any = guards.TensorGuards
except (ImportError, AttributeError):
    _guards = None


def tensor_key(x: Tensor | None) -> tuple | None:
    """What a plan may depend on: dtype, shape, strides, place in 16 bytes, device; never values.

    All contiguous tensors of a shape are alike, whatever they say of the strides of dimensions of one element.
    """
    if x is None:
        return None
    return x.dtype, x.shape, None if x.is_contiguous() else x.stride(), x.data_ptr() & 15, x.device, x.is_neg()


_address = Tensor.data_ptr
_NONE = frozenset((None,))


class Seen:
    """The tensors of a planned call, to recognise others that are alike in a quarter of the time that a key takes."""

    __slots__ = ("absent", "offsets", "present", "same")

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        found = [x for x in tensors if x is not None]
        self.present = getter([i for i, x in enumerate(tensors) if x is not None])
        self.absent = getter([i for i, x in enumerate(tensors) if x is None])
        self.offsets = [x.data_ptr() & 15 for x in found]
        self.same: Callable[..., bool] = _never
        if _guards is not None and found:
            sizes, strides = [list(x.shape) for x in found], [list(x.stride()) for x in found]
            self.same = _guards(*found, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def like(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Whether these have the same keys. False says nothing: guards also look at what a key does not, and refuse
        a tensor that is given twice."""
        return self.addresses(tensors) is not None

    def addresses(self, tensors: tuple[Tensor | None, ...]) -> list[int] | None:
        """Where these lie, those that are not None, if they are `like`."""
        try:  # not by `==`, which a tensor takes 20 µs to refuse
            if not _NONE.issuperset(self.absent(tensors)):
                return None
        except TypeError:  # what has no hash is no None
            return None
        present: tuple[Any, ...] = self.present(tensors)
        if not self.same(*present):
            return None
        found = [*map(_address, present)]
        return found if [x & 15 for x in found] == self.offsets else None


def _never(*tensors: Tensor) -> bool:
    return False


def getter(places: list[int]) -> Callable[[tuple], tuple]:
    """The entries at these places, as a tuple."""
    # Of one place alone an itemgetter would not give a tuple.
    return itemgetter(*places) if len(places) > 1 else lambda call: tuple(call[i] for i in places)


def _tensor_fields(record: Any) -> tuple[str, ...]:
    return tuple(n for n, hint in typing.get_type_hints(record).items() if hint in (Tensor, Tensor | None))


def _split_fields(record: Any) -> tuple[Callable, Callable]:
    """Getters of the fields that hold tensors, and of the others."""
    hints, tensors = typing.get_type_hints(record), _tensor_fields(record)
    others = [n for n in record._fields if n not in tensors]
    getters = [getter([record._fields.index(n) for n in names]) for names in (tensors, others)]
    if list not in {typing.get_origin(hint) for hint in hints.values()}:
        return getters[0], getters[1]
    # A list is no key.
    return getters[0], lambda call: tuple(tuple(x) if type(x) is list else x for x in getters[1](call))


TENSORS = {op: _tensor_fields(record) for op, (record, _) in CALLS.items()}
FIELDS = {op: _split_fields(record) for op, (record, _) in CALLS.items()}
