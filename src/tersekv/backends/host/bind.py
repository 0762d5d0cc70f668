"""The launches of a plan bound to a list of addresses: what is left to do for a call that is like one before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from .launch import Template, blame, entering, kept_scratch, leaving, put, replaced

Bound = Callable[[list[int]], bool]  # launches for the addresses in a list; whether it did
PART = "part"  # among a launch's tensors: the scratch
_PART = {PART: 0}


class Fields:
    """The tensors of a call that a kernel takes, by name, in order; PART among them is the scratch."""

    __slots__ = ("names",)

    def __init__(self, names: str) -> None:
        self.names = tuple(names.split())

    def __call__(self, call: Any, part: Any = None) -> list[Any]:
        return [part if n == PART else getattr(call, n) for n in self.names]


class Step(NamedTuple):
    """A launch.

    described:   tensors of which it takes descriptors, in the order of their keys
    descriptors: those that are known, by addresses; None: it takes the addresses themselves
    """

    template: Template
    fields: Fields
    described: Sequence[str] = ()
    descriptors: dict[tuple, tuple] | None = None


def bound(
    steps: Sequence[Step], at: Mapping[str, int], scratch: int = 0, places: Mapping[str, int] = _PART
) -> Bound | None:
    """Launches with everything but the addresses filled in. None: they are not compiled yet.

    at:      where the address of a call's tensor stands in the list
    scratch: fp32 numbers
    places:  names of what lies in the scratch, and how many bytes after its start
    """
    at = dict(at) | {name: len(at) + i for i, name in enumerate(places)}
    launches, keys = [], []
    for step in steps:
        start = step.template.bound([at.get(name, -1) for name in step.fields.names])
        if start is None:
            return None
        pick = itemgetter(*(at[name] for name in step.described)) if step.described else None
        if pick is not None:
            keys.append((pick, step.descriptors))
        launches.append((*start, step.template.descriptors_at if step.described else 0))
    index, offsets = steps[0].template.launch.device, tuple(places.values())
    device = torch.device("cuda", index)

    def launch(a: list[int]) -> bool:
        stream = torch._C._cuda_getCurrentRawStream(index)
        if scratch:
            part = kept_scratch(scratch, device, stream)
            begin = part.data_ptr()
            for offset in offsets:
                a.append(begin + offset)
        given = []
        for pick, known in keys:
            found = pick(a) if known is None else known.get(pick(a))
            if found is None:
                return False
            given.append(found)
        i, told = 0, entering.calls or leaving.calls or (put and replaced())
        for one, run, template, live, descriptors_at in launches:
            args = template.copy()
            for place, of in live:
                args[place] = a[of]
            args[3] = stream
            if descriptors_at:
                args[descriptors_at:descriptors_at] = given[i]
                i += 1
            if told:
                one.tell(args)
            try:
                run(*args)
            except Exception as e:
                blame(one.fn, e)
                raise
        return True

    return launch
