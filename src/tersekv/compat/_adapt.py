"""What the compat modules share: the short way of a call like one before it, errors that name the caller's arguments,
and views instead of copies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import scalars
from ..dispatch.checks import INDEX, dtype_name, joined
from ..dispatch.launch_cache import CallSignature, lookup
from ..scalars import as_float

__all__ = [
    "as_float",
    "as_host_int",
    "dtype_name",
    "first_rows",
    "index_tensor",
    "joined",
    "lookup_cached",
    "number_or_tensor",
    "scalar",
    "tensor",
    "with_caller_names",
]  # fmt: skip
_NOTHING: Mapping[str, str] = {}


def lookup_cached(
    names: Mapping[str, str], op: str, options: tuple, inputs: tuple, views: Mapping[str, str] = _NOTHING
) -> tuple[CallSignature, list[Tensor] | None]:
    """A call as its caller gave it, to remember it by; and what it made, if it was like one before: the short way.

    options:  all that is no tensor, the function's own name first, so that no two functions' calls are alike
    given:    the caller's tensors where the operation's record has a tensor that begins where they do, else None
    parts:    fields of the record that lie within one of these, by the field that it stands for

    Nothing has to be checked before. A call that this says too little of is not remembered (`recall.remember`).
    """
    signature = CallSignature((*options, *map(type, options)), inputs, views=views)  # 1 is no bool
    return signature, with_caller_names(names, lookup, op, signature.options, inputs)


def number_or_tensor(scale: Any) -> tuple[Any, Tensor | None]:
    """(number, tensor) of a scale as it is given; the number is not looked at yet."""
    return (None, scale) if isinstance(scale, Tensor) else (scale, None)


def with_caller_names(names: Mapping[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """function(*args); an error about one of tersekv's arguments names the caller's instead.

    names:  tersekv's name -> the caller's, where they differ
    """
    try:
        return function(*args)
    except (TypeError, ValueError) as e:
        field, colon, rest = str(e).partition(":")
        rest = re.sub(r"\b(as in|where) ([\w.]+(?:\[\d\])?)", lambda m: f"{m[1]} {names.get(m[2], m[2])}", rest)
        message = f"{names.get(field, field)}:{rest}"
        if not colon or message == str(e):
            raise
        raise type(e)(message) from None


def first_rows(name: str, x: Tensor, n: int, beside: str) -> Tensor:
    """The first n rows of a padded tensor."""
    if x.dim() == 0 or x.shape[0] < n:
        raise ValueError(f"{name}: want at least {n} rows, one for each entry of {beside}, got {list(x.shape)}")
    return x if x.shape[0] == n else x[:n]


def tensor(name: str, x: object, shape: str = "") -> Tensor:
    """x, which has to be a tensor (of the rank of `shape`, such as "T, H, D") before its sizes can be looked at."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: want Tensor, got {type(x).__name__}")
    if shape and x.dim() != shape.count(",") + 1:
        raise ValueError(f"{name}: want [{shape}], got {list(x.shape)}")
    return x


def index_tensor(name: str, x: object, shape: str = "") -> Tensor:
    """x, a tensor of integers that can be an index."""
    x = tensor(name, x, shape)
    if x.dtype not in INDEX:
        raise ValueError(f"{name}: want int32, int64 or uint32, got {dtype_name(x.dtype)}")
    return x


def as_host_int(name: str, x: object, least: int | None = None) -> int:
    """x, an integer of at least `least`. A tensor is refused, since reading it could wait for the device."""
    if isinstance(x, Tensor):
        raise TypeError(f"{name}: want int, got Tensor")
    n = scalars.as_int(name, x)
    if least is not None and n < least:
        raise ValueError(f"{name}: want {least} or more, got {n}")
    return n


def scalar(name: str, x: object, device: torch.device) -> float | Tensor:
    """x, a number or an fp32 tensor of one element on the device; the value of a tensor is not looked at."""
    if isinstance(x, Tensor):
        if x.dtype != torch.float32 or x.numel() != 1 or x.dim() > 1 or x.device != device:
            raise ValueError(
                f"{name}: want a number or float32 with 1 element on {device}, "
                f"got {list(x.shape)} {dtype_name(x.dtype)} on {x.device}"
            )
        return x
    return as_float(name, x, "a number or Tensor")
