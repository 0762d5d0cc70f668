"""Numbers as callers give them: Python's or NumPy's, checked by name."""

from __future__ import annotations

import struct
from numbers import Real
from operator import index

_MOST = 2**63 - 1


def as_int(name: str, value: object) -> int:
    """value as Python's own int: another kind, such as a tensor, could change behind its holder's back.

    Raises TypeError for what is no integer, a truth value included, and ValueError for one that 64 bits do not hold.
    """
    if type(value) is not int:
        try:
            if isinstance(value, bool):
                raise TypeError
            value = int(index(value))  # type: ignore[arg-type]
        except TypeError:
            raise TypeError(f"{name}: want int, got {type(value).__name__} {value!r}") from None
    if not -_MOST - 1 <= value <= _MOST:
        raise ValueError(f"{name}: want an int that 64 bits hold, got {value}")
    return value


def as_bool(name: str, value: object) -> bool:
    """value, which has to be True or False. Raises TypeError for what is only as good as one."""
    if type(value).__name__ not in ("bool", "bool_"):  # NumPy's truth values by name: it need not be installed
        raise TypeError(f"{name}: want bool, got {type(value).__name__}")
    return bool(value)


def as_positive_int(name: str, value: object) -> int:
    """As `as_int`; raises ValueError below 1."""
    number = as_int(name, value)
    if number <= 0:
        raise ValueError(f"{name}: want a positive number, got {number}")
    return number


def as_non_negative_int(name: str, value: object) -> int:
    """As `as_int`; raises ValueError below 0."""
    number = as_int(name, value)
    if number < 0:
        raise ValueError(f"{name}: want 0 or more, got {number}")
    return number


def as_float(name: str, value: object, want: str = "a number") -> float:
    """value as Python's own float.

    Raises TypeError for what is no real number, a truth value and a tensor included, and ValueError for an integer that
    no float holds.
    """
    if type(value) is float:
        return value
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name}: want {want}, got {type(value).__name__}")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name}: want {want} that fp32 holds, got {value}") from None


def round_to_fp32(value: float) -> float:
    """value as fp32 holds it: infinite beyond its largest number, 0 below its smallest."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return float("inf") if value > 0 else -float("inf")


def counted(n: int, noun: str) -> str:
    """How many of them, in words: "1 case", "2 cases"."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
