"""Keys in Triton's cache on disk that do not depend on what a process compiled before.

NOTE: Triton hashes, with a function, the global constants of those functions that it calls that were hashed already. So
a kernel had one key in a process that began with it, and another behind a kernel that shares a function with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType, ModuleType
from typing import Any


def hash_callees_first_for_stable_cache_key(fn: Any, hashed_ids: set[int] | None = None) -> None:
    """Hash whatever a kernel calls, then the kernel."""
    hashed_ids = set() if hashed_ids is None else hashed_ids
    if id(fn) in hashed_ids or getattr(fn, "hash", "") is not None:  # interpreted, or hashed
        return
    hashed_ids.add(id(fn))
    for callee in _jit_callees(fn):
        hash_callees_first_for_stable_cache_key(callee, hashed_ids)
    fn.cache_key  # noqa: B018 (a property that computes it)


def _jit_callees(fn: Any) -> Iterator[Any]:
    """Yields the kernel functions that the names in a function's code may mean, in the order of its code."""
    function = fn.fn
    outer, names = inspect.getclosurevars(function).nonlocals, [*_global_and_free_names_in_code(function.__code__)]
    for name in names:
        found = outer.get(name, function.__globals__.get(name))
        if isinstance(found, ModuleType):
            yield from filter(_is_jit, (getattr(found, attribute, None) for attribute in names))
        elif isinstance(found, type):
            yield from filter(_is_jit, vars(found).values())
        elif _is_jit(found):
            yield found


def _global_and_free_names_in_code(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _global_and_free_names_in_code(constant)


def _is_jit(x: Any) -> bool:
    return hasattr(type(x), "cache_key") and hasattr(x, "fn")
