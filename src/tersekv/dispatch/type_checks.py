"""Checks of the types of a call's fields, by what its record declares."""

from __future__ import annotations

import types as _types
import typing
from typing import Any

import torch
from torch import Tensor

from ..shapes import argument_of_field

# None is allowed only where other arguments give the tokens' slots.
_PLACES = ("slot_mapping", "batch_indices", "kv_positions", "kv_indptr", "kv_indices")


def types(record: type, call: tuple) -> None:
    """Raise TypeError unless every field has the type that the record declares."""
    hints = _hints(record)
    for name, x in zip(record._fields, call, strict=True):  # type: ignore[attr-defined]
        want = (list, tuple) if hints[name] is list else hints[name]
        if want is float and isinstance(x, (int, float)) and not isinstance(x, bool):
            continue
        if not isinstance(x, want):
            names = " or ".join(w.__name__ for w in (want if isinstance(want, tuple) else (want,)))
            names = names.replace(" or NoneType", "" if name in _PLACES else " or None")
            raise TypeError(f"{argument_of_field(record, name)}: want {names}, got {type(x).__name__}")
        if isinstance(x, Tensor) and x.layout != torch.strided:
            raise TypeError(f"{argument_of_field(record, name)}: want a dense Tensor, got one of {x.layout}")


def _hints(record: type) -> dict[str, Any]:
    hints = typing.get_type_hints(record).items()
    return {n: typing.get_args(h) if isinstance(h, _types.UnionType) else typing.get_origin(h) or h for n, h in hints}
