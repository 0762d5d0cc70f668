"""Paged prefill, natively: decode's attention, with the 16-bit new rows, if any, as keys outside the pages."""

from __future__ import annotations

from types import SimpleNamespace

from . import decode
from .library import NativeLaunch
from .records import DTYPES, NONE, CallFacts, PagedMatrix, StridedTensor

_TENSORS = (*decode.TENSORS, "k", "v")
SUPPORTS, why_not, run, bind = decode.SUPPORTS, decode.why_not, decode.run, decode.bind


def configure(f: SimpleNamespace) -> NativeLaunch:
    facts = CallFacts(SimpleNamespace(**vars(f), mask=None), _TENSORS)
    record = decode.paged_attention_record(facts)
    if f.k is not None:
        record.new_keys, record.new_values = _rows_as_pages(facts, "k"), _rows_as_pages(facts, "v")
    return NativeLaunch("attention", record, _TENSORS)


def _rows_as_pages(facts: CallFacts, name: str) -> PagedMatrix:
    """Returns rows [T, H, D] as a cache with pages of one token."""
    x, (token, head) = getattr(facts.f, name), facts.strides(name)[:2]
    at = StridedTensor(facts.at(name), (token, 0, head))
    return PagedMatrix(at, DTYPES[x.dtype], x.shape[2], StridedTensor(NONE), 0, 0, StridedTensor(NONE))
