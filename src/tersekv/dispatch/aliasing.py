"""Checks that need more than a call's facts: outputs that alias other tensors, or that require gradients.

They run on launch cache misses only, where they take 2 µs; a cached launch counts distinct addresses, and a
call with another number of them is a miss. Outputs that overlap another tensor but begin elsewhere are not found.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..calls import CALLS
from ..shapes import argument_of
from .signature import FIELD_GETTERS, TENSOR_FIELDS

_ROTATED_QUERY = (("q_rope_out", "q_rope"), ("q_nope_out", "q_nope"))
# (output, input) pairs that may share memory, element by element, with equal dtype and strides.
_IN_PLACE: dict[str, tuple[tuple[str, str], ...]] = {
    "rope_append": _ROTATED_QUERY,
    "mla_append": _ROTATED_QUERY,
    "decode": (("out", "q"),),
    "prefill": (("out", "q"),),
    "mla_decode": (("out", "q_nope"),),
    "merge_states": (("out", "outs"),),
}
# New rows may lie in the cache that they are appended to: only the device knows their slots.
_CACHES = ("k_cache", "v_cache", "ckv", "kpe")
_NEW_ROWS = ("k", "v", "k_rope", "k_nope", "kv_c", "k_pe")
_APPENDS = ("append", "rope_append", "mla_append", "index_append")


def check_aliasing(op: str, call: Any) -> None:
    """Raise ValueError for an output that begins where another tensor does, or that requires gradients."""
    tensors = [x for x in FIELD_GETTERS[op][0](call) if x is not None]
    if len({x.data_ptr() for x in tensors}) < len(tensors):
        _raise_if_aliased(op, call)
    if torch.is_grad_enabled():
        for name in ("out", "lse"):
            if getattr(getattr(call, name, None), "requires_grad", False):
                raise ValueError(f"{name}: want a tensor without gradients, or torch.no_grad(), got requires_grad=True")


def _raise_if_aliased(op: str, call: Any) -> None:
    fields = zip(TENSOR_FIELDS[op], FIELD_GETTERS[op][0](call), strict=True)
    tensors = {name: x for name, x in fields if x is not None and x.numel() > 0 and x.data_ptr() != 0}
    if not any(name in tensors for name in (_NEW_ROWS if op in _APPENDS else tensors)):
        return  # without rows nothing is written
    for name in reversed([n for n in CALLS[op][1] if n in tensors]):
        for other, x in tensors.items():
            if other != name and x.data_ptr() == tensors[name].data_ptr() and not _may_alias(op, name, other, tensors):
                what, whose = (argument_of(op, call, n) for n in (name, other))
                raise ValueError(f"{what}: want memory of its own, got a tensor that begins where {whose} does")


def _may_alias(op: str, name: str, other: str, tensors: dict[str, Tensor]) -> bool:
    if (name, other) in _IN_PLACE.get(op, ()):
        a, b = tensors[name], tensors[other]
        steps = zip(a.shape, a.stride(), b.stride()[-a.dim() :], strict=True)
        return a.dtype == b.dtype and all(step_a == step_b for size, step_a, step_b in steps if size > 1)
    return name in _CACHES and other in _NEW_ROWS
