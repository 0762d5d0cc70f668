"""What the compat modules share: calls whose errors name the caller's arguments, and views instead of copies."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import counts
from ..checks import dtype_name, joined
from ..counts import number

__all__ = ["dtype_name", "first_rows", "joined", "number", "renamed", "scalar", "tensor", "whole"]


def renamed(names: Mapping[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """function(*args); an error about one of tersekv's arguments names the caller's instead.

    names:  tersekv's name -> the caller's, where they differ
    """
    try:
        return function(*args)
    except (TypeError, ValueError) as e:
        field, colon, rest = str(e).partition(":")
        rest = re.sub(r"\b(as in|where) ([\w.]+)", lambda m: f"{m[1]} {names.get(m[2], m[2])}", rest)
        told = f"{names.get(field, field)}:{rest}"
        if not colon or told == str(e):
            raise
        raise type(e)(told) from None


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


def whole(name: str, x: object, least: int | None = None) -> int:
    """x, an integer of at least `least`. A tensor is refused, since reading it could wait for the device."""
    if isinstance(x, Tensor):
        raise TypeError(f"{name}: want int, got Tensor")
    number = counts.whole(name, x)
    if least is not None and number < least:
        raise ValueError(f"{name}: want {least} or more, got {number}")
    return number


def scalar(name: str, x: object, device: torch.device) -> float | Tensor:
    """x, a number or an fp32 tensor of one element on the device; the value of a tensor is not looked at."""
    if isinstance(x, Tensor):
        if x.dtype != torch.float32 or x.numel() != 1 or x.dim() > 1 or x.device != device:
            raise ValueError(
                f"{name}: want a number or float32 with 1 element on {device}, "
                f"got {list(x.shape)} {dtype_name(x.dtype)} on {x.device}"
            )
        return x
    return number(name, x, "a number or Tensor")
