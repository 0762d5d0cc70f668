"""Counts as callers give them: integers of Python's or NumPy's, checked by name."""

from __future__ import annotations

from operator import index


def whole(name: str, value: object) -> int:
    """value as Python's own int: another kind, such as a tensor, could change behind its holder's back.

    Raises TypeError for what is no integer.
    """
    if type(value) is int:
        return value
    try:
        return int(index(value))  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{name}: want int, got {type(value).__name__} {value!r}") from None


def positive(name: str, value: object) -> int:
    """As `whole`; raises ValueError below 1."""
    number = whole(name, value)
    if number <= 0:
        raise ValueError(f"{name}: want a positive number, got {number}")
    return number


def not_negative(name: str, value: object) -> int:
    """As `whole`; raises ValueError below 0."""
    number = whole(name, value)
    if number < 0:
        raise ValueError(f"{name}: want 0 or more, got {number}")
    return number
