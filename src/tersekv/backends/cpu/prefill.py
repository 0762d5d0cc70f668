"""Paged prefill, natively: decode's attention, for which new rows in 16 bits are keys that lie in no page."""

from __future__ import annotations

from types import SimpleNamespace

from . import decode
from .library import Launch
from .records import DTYPES, NONE, Facts, Matrix, Place

_TENSORS = (*decode.TENSORS, "k", "v")
TAKES, why_not, run, bind = decode.TAKES, decode.why_not, decode.run, decode.bind


def configure(f: SimpleNamespace) -> Launch:
    facts = Facts(SimpleNamespace(**vars(f), mask=None), _TENSORS)
    record = decode.paged(facts)
    if f.k is not None:
        record.new_keys, record.new_values = _rows(facts, "k"), _rows(facts, "v")
    return Launch("attention", record, _TENSORS)


def _rows(facts: Facts, name: str) -> Matrix:
    """Rows [T, H, D] as rows of a cache whose pages hold one token."""
    x, (token, head) = getattr(facts.f, name), facts.strides(name)[:2]
    at = Place(facts.at(name), (token, 0, head))
    return Matrix(at, DTYPES[x.dtype], x.shape[2], Place(NONE), 0, 0, Place(NONE))
