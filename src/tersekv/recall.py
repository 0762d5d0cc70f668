"""The short way of an eager call that is like one before it: look it up, fill in addresses, launch.

A call is like one before if its options are equal, and its tensors in everything that a plan may depend on. Then every
check has been made, the plan is known, and what is left are the addresses: of the tensors that were given, of outputs
that the call makes, and of parts of these that the operation takes (columns of q, say). Anything else goes the long
way, through records, checks and `plan`, and is remembered if its backend can `bind` launches to addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import env, failures
from .calls import CALLS
from .keys import FIELDS, TENSORS, Seen
from .plan import Plan
from .tracing import tracing

_KEPT = 4  # calls with the same options that are tried one after the other
_MAX_CALLS = 16384  # a layer has its own if its scales are its own; beyond this the memory starts afresh
_NOTHING: Mapping[str, Any] = {}


class Way(NamedTuple):
    """A call as the caller gave it, beside its record.

    options: all that is no tensor, hashable; equal options and like tensors must mean equal calls
    given:   tensors in the order of the record's; None where there is none, or the operation makes it itself
    made:    outputs, whole, given or made by the operation, by the field that begins where they do; those that are
             `given` are left out
    parts:   fields that are parts of others, which begin where a tensor of `given` or `made` does
    """

    options: tuple
    given: tuple[Tensor | None, ...]
    made: Mapping[str, Tensor] = _NOTHING
    parts: Mapping[str, str] = _NOTHING


class _Known:
    """A call that was made, ready to be made again."""

    __slots__ = ("_device_index", "_launch", "_parts", "_samples", "_seen", "_told")

    def __init__(
        self, seen: Seen, samples: list[Tensor], parts: list[tuple[int, int]], launch: Any, plan: Plan,
        op: str, format: str | None,
    ) -> None:  # fmt: skip
        self._seen, self._samples, self._parts = seen, samples, parts
        self._launch, self._device_index = launch, plan.device_index
        self._told = op, plan.backend, format

    def like(self, given: tuple[Tensor | None, ...]) -> bool:
        return self._seen.like(given)

    def __call__(self, given: tuple[Tensor | None, ...]) -> list[Tensor] | None:
        addresses = self._seen.addresses(given)
        if addresses is None:
            return None
        made = []
        for sample in self._samples:
            x = torch.empty_like(sample)
            made.append(x)
            addresses.append(x.data_ptr())
        for i, offset in self._parts:
            addresses.append(addresses[i] + offset)
        try:
            if self._device_index is not None and self._device_index != torch._C._cuda_getDevice():
                with torch.cuda.device(self._device_index):
                    return made if self._launch(addresses) else None
            return made if self._launch(addresses) else None
        except Exception as e:
            failures.tell(e, *self._told, given)


_latest: dict[tuple, list[_Known]] = {}  # by operation and options, the latest first
_all: dict[tuple, _Known] = {}  # by these and the tensors' shapes


def again(op: str, options: tuple, given: tuple[Tensor | None, ...]) -> list[Tensor] | None:
    """Make the call if it is like one before: the outputs that it made, in order of the record. None: it is not."""
    if tracing() or env.checked():  # make_fx traces real tensors, which look like any others
        return None
    key = op, options
    try:
        latest: Sequence[_Known] = _latest.get(key, ())
    except TypeError:  # an option that cannot be a key has the wrong type: the long way says which
        return None
    for known in latest:
        made = known(given)
        if made is not None:
            if known is not latest[0]:
                _put_first(key, known)
            return made
    older = _all.get((key, _shapes(given)))
    made = None if older is None else older(given)
    if made is not None:
        _put_first(key, older)
    return made


def _put_first(key: tuple, known: Any) -> None:
    _latest[key] = [known, *(x for x in _latest.get(key, ()) if x is not known)][:_KEPT]


def _shapes(given: tuple[Tensor | None, ...]) -> tuple:
    return tuple(getattr(x, "shape", None) for x in given)


def _captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def remember(op: str, way: Way, call: tuple, plan: Plan) -> None:
    """Keep a call that went the long way, for those that will be like it."""
    if plan.bind is None:
        return
    present = [x for x in way.given if x is not None]
    if len({*map(id, present)}) < len(present):
        return  # guards know no tensor that is given twice
    key = op, way.options
    place = key, _shapes(way.given)
    if place in _all and _all[place].like(way.given):
        return  # it is kept already: its launch declined just this once
    names, (tensors_of, _) = TENSORS[op], FIELDS[op]
    tensors = {n: x for n, x in zip(names, tensors_of(call), strict=True) if x is not None}
    if _captured(next(iter(tensors.values()))):
        return  # it is called once, and must leave nothing in the graph's memory
    given = {n: x for n, x in zip(names, way.given, strict=True) if x is not None}
    if any(x.requires_grad for n, x in given.items() if n in CALLS[op][1]):
        return  # whether autograd would have to follow it is asked of each call
    made = {n: x for n, x in way.made.items() if n not in given}
    whole = given | made
    # The short way does not know tensors that the operation drops, replaces by a copy, or takes from elsewhere.
    if any(n not in tensors or tensors[n].data_ptr() != x.data_ptr() for n, x in whole.items()):
        return
    parts = {n: of for n, of in way.parts.items() if n in tensors}
    if tensors.keys() - whole.keys() - parts.keys() or not made.keys() <= set(CALLS[op][1]):
        return
    at = {name: i for i, name in enumerate((*whole, *parts))}
    offsets = [(at[of], tensors[n].data_ptr() - whole[of].data_ptr()) for n, of in parts.items()]
    # One element stands for an output, of which `empty_like` makes a dense one.
    samples = [torch.empty(1, dtype=x.dtype, device=x.device).expand(x.shape) for x in made.values()]
    launch = plan.bind(plan.config, at) if all(x.is_contiguous() for x in made.values()) else None
    if launch is None:
        return
    if len(_all) >= _MAX_CALLS:
        _all.clear()
        _latest.clear()
    _all[place] = known = _Known(
        Seen(way.given), samples, offsets, launch, plan, op, getattr(call, "format", None)
    )  # fmt: skip
    _put_first(key, known)
