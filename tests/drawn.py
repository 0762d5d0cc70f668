"""Fewer cases where a test takes long: pairs of what they are made of, not products."""

from __future__ import annotations

from collections.abc import Iterable

from tersekv.testing.cases import Case


def drawn(found: Iterable[Case], of: int) -> list[Case]:
    """About one in `of`: every variant in some format, every format in some variants, another for each next variant."""
    found = list(found)
    formats = list(dict.fromkeys(c.format for c in found))
    kept: list[Case] = []
    for i, name in enumerate(dict.fromkeys(c.name for c in found)):
        same = [c for c in found if c.name == name]
        kept += [c for c in same if (formats.index(c.format) + i) % of == 0] or same[:1]
    return kept
