"""Fewer cases where a test takes long: pairs of what they are made of, not products. The rest is marked `long`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import pytest

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


def long_but_for(quick: Iterable[Case], found: Iterable[Case]) -> list[Any]:
    """Parameters: all cases of `found`, marked long unless they are `quick` too."""
    ids = {c.id for c in quick}
    return [pytest.param(c, id=c.id, marks=() if c.id in ids else pytest.mark.long) for c in found]


def half(*axes: Sequence[Any]) -> list[Any]:
    """Parameters: the product of `axes`, of which every second is long. Every value stays, and every pair of three."""
    return [
        pytest.param(*(x for _, x in one), marks=pytest.mark.long if sum(i for i, _ in one) % 2 else ())
        for one in product(*(list(enumerate(axis)) for axis in axes))
    ]
