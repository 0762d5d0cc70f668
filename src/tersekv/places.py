"""What a call's facts do not tell: where its outputs begin, and whether autograd would have to follow them.

Looked at on the long way of a call alone, where that costs 2 µs: the short way takes addresses as they come. Outputs
that overlap another tensor further on are not found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .calls import CALLS
from .keys import FIELDS, TENSORS
from .shapes import argument_of

_Q = (("q_rope_out", "q_rope"), ("q_nope_out", "q_nope"))
# What may be written over what was read, element by element: in its dtype and strides.
_IN_PLACE: dict[str, tuple[tuple[str, str], ...]] = {
    "rope_append": _Q,
    "mla_append": _Q,
    "decode": (("out", "q"),),
    "prefill": (("out", "q"),),
    "mla_decode": (("out", "q_nope"),),
    "merge_states": (("out", "outs"),),
}
# Rows may lie in the cache that they are appended to: which slots they go to, only the device knows.
_CACHES = ("k_cache", "v_cache", "ckv", "kpe")
_NEW_ROWS = ("k", "v", "k_rope", "k_nope", "kv_c", "k_pe")
_APPENDS = ("append", "rope_append", "mla_append")


def check(op: str, call: Any) -> None:
    """Raise ValueError for an output that begins where another tensor does, or that autograd would have to follow."""
    given = [x for x in FIELDS[op][0](call) if x is not None]
    if len({x.data_ptr() for x in given}) < len(given):
        _apart(op, call)
    if torch.is_grad_enabled():
        for name in ("out", "lse"):
            if getattr(getattr(call, name, None), "requires_grad", False):
                raise ValueError(f"{name}: want a tensor without gradients, or torch.no_grad(), got requires_grad=True")


def _apart(op: str, call: Any) -> None:
    fields = zip(TENSORS[op], FIELDS[op][0](call), strict=True)
    given = {name: x for name, x in fields if x is not None and x.numel() > 0 and x.data_ptr() != 0}
    if not any(name in given for name in (_NEW_ROWS if op in _APPENDS else given)):
        return  # without rows nothing is written
    for name in reversed([n for n in CALLS[op][1] if n in given]):
        for other, x in given.items():
            if other != name and x.data_ptr() == given[name].data_ptr() and not _may_share(op, name, other, given):
                what, whose = (argument_of(op, call, n) for n in (name, other))
                raise ValueError(f"{what}: want memory of its own, got a tensor that begins where {whose} does")


def _may_share(op: str, name: str, other: str, given: dict[str, Tensor]) -> bool:
    if (name, other) in _IN_PLACE.get(op, ()):
        a, b = given[name], given[other]
        steps = zip(a.shape, a.stride(), b.stride()[-a.dim() :], strict=True)
        return a.dtype == b.dtype and all(mine == its for size, mine, its in steps if size > 1)
    return name in _CACHES and other in _NEW_ROWS
