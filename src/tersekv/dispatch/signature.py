"""Lookup keys of plans: every option of a call, and the facts of its tensors that a plan may depend on."""

from __future__ import annotations

import typing
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from torch import Tensor

from ..calls import CALLS

try:  # torch.compile's tensor guards, in C++; private to torch, so they may vanish
    from torch._C._dynamo import guards

    _guards: Any = guards.TensorGuards
except (ImportError, AttributeError):
    _guards = None


def tensor_key(x: Tensor | None) -> tuple | None:
    """Returns what a plan may depend on: dtype, shape, strides, address mod 16, device; never values.

    All contiguous tensors of a shape are equal, whatever their strides of dimensions of size 1.
    """
    if x is None:
        return None
    return x.dtype, x.shape, None if x.is_contiguous() else x.stride(), x.data_ptr() & 15, x.device, x.is_neg()


_address = Tensor.data_ptr
_NONE = frozenset((None,))


class TensorSignature:
    """Matches tensors against those of a planned call, in a quarter of the time that `tensor_key` takes."""

    __slots__ = ("absent", "distinct", "firsts", "guard", "offsets", "present", "repeats")

    def __init__(self, tensors: tuple[Tensor | None, ...]) -> None:
        self.repeats = repeats_of(tensors)
        again = {i for i, _ in self.repeats}  # guards take no tensor twice
        places = [i for i, x in enumerate(tensors) if x is not None and i not in again]
        found = [x for i in places if (x := tensors[i]) is not None]
        self.present = fields_getter(places)
        self.absent = fields_getter([i for i, x in enumerate(tensors) if x is None])
        self.offsets = [x.data_ptr() & 15 for x in found]
        starts = [x.data_ptr() for x in found]
        self.firsts = [*map(starts.index, starts)]  # of each, the first that begins at the same address
        # Where each begins at its own address their number says all, and costs less.
        self.distinct = len(starts) if len({*starts}) == len(starts) else None
        self.guard: Callable[..., bool] = _never_matches
        if _guards is not None and found:
            sizes, strides = [list(x.shape) for x in found], [list(x.stride()) for x in found]
            self.guard = _guards(*found, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def matches(self, tensors: tuple[Tensor | None, ...]) -> bool:
        """Returns whether these have the same keys. False may be wrong: guards check more than a key."""
        return self.addresses(tensors) is not None

    def addresses(self, tensors: tuple[Tensor | None, ...]) -> list[int] | None:
        """Returns the addresses of those that are not None, of a tensor that is passed twice once, if they match; else
        None."""
        try:  # not by `==`, which takes 20 µs on a tensor
            if not _NONE.issuperset(self.absent(tensors)):
                return None
        except TypeError:  # an unhashable value is not None
            return None
        for i, of in self.repeats:
            if tensors[i] is not tensors[of]:
                return None
        present: tuple[Any, ...] = self.present(tensors)
        if not self.guard(*present):
            return None
        found = [*map(_address, present)]
        if len({*found}) != self.distinct and [*map(found.index, found)] != self.firsts:
            return None  # others begin at one address: an output may lie where an input does
        return found if [x & 15 for x in found] == self.offsets else None


def _never_matches(*tensors: Tensor) -> bool:
    return False


def repeats_of(tensors: tuple[Tensor | None, ...]) -> tuple[tuple[int, int], ...]:
    """Returns (index, that of the first) of every tensor that is passed again."""
    ids = [id(x) for x in tensors if x is not None]
    if len({*ids}) == len(ids):
        return ()
    first: dict[int, int] = {}
    places = [(i, first.setdefault(id(x), i)) for i, x in enumerate(tensors) if x is not None]
    return tuple((i, of) for i, of in places if i != of)


def fields_getter(indices: list[int]) -> Callable[[tuple], tuple]:
    """Returns a getter of the entries at these indices, as a tuple."""
    # An itemgetter of one index would not return a tuple.
    return itemgetter(*indices) if len(indices) > 1 else lambda call: tuple(call[i] for i in indices)


def _tensor_field_names(record: Any) -> tuple[str, ...]:
    return tuple(n for n, hint in typing.get_type_hints(record).items() if hint in (Tensor, Tensor | None))


def _field_getters(record: Any) -> tuple[Callable, Callable]:
    """Returns getters of the fields that hold tensors, and of the others."""
    hints, tensors = typing.get_type_hints(record), _tensor_field_names(record)
    others = [n for n in record._fields if n not in tensors]
    getters = [fields_getter([record._fields.index(n) for n in names]) for names in (tensors, others)]
    if list not in {typing.get_origin(hint) for hint in hints.values()}:
        return getters[0], getters[1]
    # Lists are not hashable.
    return getters[0], lambda call: tuple(tuple(x) if type(x) is list else x for x in getters[1](call))


TENSOR_FIELDS = {op: _tensor_field_names(record) for op, (record, _) in CALLS.items()}
FIELD_GETTERS = {op: _field_getters(record) for op, (record, _) in CALLS.items()}
