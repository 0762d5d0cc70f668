"""A failing case made smaller while it fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from .case_text import text_of
from .cases import Case

_KEPT = ("op", "format", "name", "quick", "lens", "q_lens", "ragged", "place", "heads", "group")  # see below


def shrunk(case: Case, fails: Callable[[Case], bool], tries: int = 80) -> Case:
    """A smaller case that fails too, as far as so many tries lead: one change at a time, the largest first."""
    seen = {text_of(case)}
    while True:
        for candidate in _smaller(case):
            text = text_of(candidate)
            if text in seen:
                continue
            seen.add(text)
            if len(seen) > tries:
                return case
            if fails(candidate):
                case = candidate
                break
        else:
            return case


def _smaller(case: Case) -> Iterator[Case]:
    """Cases that differ in one way: fewer requests, shorter ones, then each field as it is by default."""
    lens, q_lens = case.lens, case.q_lens
    for keep in (slice(0, len(lens) // 2), slice(len(lens) // 2, None), slice(0, -1), slice(1, None)):
        if len(lens) > 1:
            yield replace(case, lens=lens[keep], q_lens=None if q_lens is None else q_lens[keep])
    if q_lens is not None and max(q_lens, default=0) > 1:
        rows = [max(max(q_lens) // 2, 1), 1]
        yield from (replace(case, q_lens=tuple(min(n, most) for n in q_lens)) for most in rows)
    for part in (2, 1.2):
        shorter = tuple(max(int(n / part), q) for n, q in zip(lens, q_lens or (0,) * len(lens), strict=True))
        if shorter != lens:
            yield replace(case, lens=shorter)
    for f in fields(Case):
        default: Any = f.default
        if f.name not in _KEPT and getattr(case, f.name) != default:
            yield replace(case, **{f.name: default})
    if case.heads > 1:
        yield replace(case, heads=1)
    if case.group > 1:
        yield replace(case, group=1)
