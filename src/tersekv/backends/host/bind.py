"""The launches of a plan: a kernel's arguments by their names, made with the plan and bound to the addresses of calls.

`run` and `bind` of every GPU backend come through here. The first call launches by Triton, which compiles; every later
one, long way or short, fills addresses into arguments that lie ready.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import gcd, prod
from operator import attrgetter, itemgetter
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .launch import Launch, blame, entering, kept_scratch, leaving, put, replaced

Bound = Callable[[list[int]], bool]  # launches for the addresses in a list; whether it did
PART = "part"  # among a launch's tensors: the scratch
BYTES, WORDS = "bytes", "words"  # what a kernel takes an 8-bit tensor as: bytes, if it holds floats; words of 16 bits
_MAX_DESCRIBED = 1024  # sets of tensors whose descriptors a launch keeps: a model has some hundred layers
_ALIGNED = 256  # bytes: what lies in the scratch begins at a multiple of them
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class Given(NamedTuple):
    """Stands for a tensor that each call brings, or that lies in its scratch.

    name: the field of the call, or the place in the scratch
    seen: BYTES, WORDS, or as it is
    row:  from which row on, of the first dimension
    """

    name: str
    seen: str = ""
    row: int = 0

    def of(self, call: Any) -> Any:
        x = getattr(call, self.name)
        if x is None:
            return None
        x = x[self.row] if self.row else x
        if self.seen == BYTES and x.dtype in _FP8:
            return triton.reinterpret(x, tl.uint8)
        return x.view(torch.int16) if self.seen == WORDS and x.element_size() == 1 else x


class Described(NamedTuple):
    """Stands for a descriptor of such a tensor, made by a function of the tensor."""

    name: str
    make: Callable[[Tensor], Any]

    def of(self, call: Any) -> Any:
        return self.make(getattr(call, self.name))


def given(seen: str = "", /, **names: str) -> dict[str, Given]:
    """Arguments of a kernel, by their names in the kernel, that are tensors of the call."""
    return {argument: Given(name, seen) for argument, name in names.items()}


def strides(x: Any, **names: str) -> dict[str, int]:
    """Strides of a tensor's fact, by their names in the kernel, in order of its dimensions; 0 where there is none.

    The one keyword is what the names begin with, its value the letters in which they end.
    """
    ((prefix, letters),) = names.items()
    steps = (0,) * len(letters) if x is None else x.stride
    return {prefix + letter: step for letter, step in zip(letters, steps, strict=False)}


def step_of(x: Any, distances: tuple[int, ...], most: int) -> int:
    """Elements that all rows at these distances lie at multiples of, at most those of 16 bytes; 1: multiples of 16,
    which Triton sees by itself, or a tensor that begins elsewhere.

    In units of it strides tell the compiler what it would not know of others: it loads pieces, not elements.
    """
    return gcd(most, *distances) if x.aligned and any(n % 16 for n in distances) else 1


class Template:
    """A launch of a kernel for one set of facts.

    arguments: values of all of the kernel's parameters by name, constants included; Given or Described for tensors
    """

    __slots__ = ("_arguments", "described", "grid", "known", "launch", "live")

    def __init__(self, fn: Any, grid: tuple[int, ...], arguments: Mapping[str, Any], **options: Any) -> None:
        if arguments.keys() != set(fn.arg_names):
            odd = sorted(arguments.keys() ^ set(fn.arg_names))
            raise TypeError(f"{fn.__name__}: want every argument by its name, and no other; it is not so of {odd}")
        self.launch, self.grid = Launch(fn, **options), (*grid, 1, 1)[:3]
        self._arguments = tuple(arguments[n] for n in fn.arg_names)
        self.described = tuple(x.name for x in self._arguments if isinstance(x, Described))
        # What a launch starts from: the launcher's arguments with descriptors, by the addresses of what is described.
        self.known: dict[tuple[int, ...], list] = {}
        # Where the address of each tensor goes among them, and what is added to it. None: nothing is compiled yet.
        self.live: list[tuple[int, str, int]] | None = None

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(zip(self.launch.fn.arg_names, self._arguments, strict=True))

    def renamed(self, names: Mapping[str, str | None]) -> Template:
        """A launch of the same kernel that takes tensors of other names; None: there is no such tensor."""

        def other(x: Any) -> Any:
            name = names.get(x.name, x.name) if isinstance(x, (Given, Described)) else ""
            return x._replace(name=name) if name else None if name is None else x

        arguments = {n: other(x) for n, x in self.arguments.items()}
        return Template(self.launch.fn, self.grid, arguments, **self.launch.options)

    def also(self, **arguments: Any) -> Template:
        """The same launch with other values of these arguments."""
        return Template(self.launch.fn, self.grid, self.arguments | arguments, **self.launch.options)

    def names(self) -> set[str]:
        """Of all tensors that a call brings, whether they are there or not."""
        return {x.name for x in self._arguments if isinstance(x, (Given, Described))}

    def __call__(self, call: Any) -> None:
        """Launch with the tensors of a call, and of its scratch, by their names."""
        if not self.launch.compiled:
            values = (x.of(call) if isinstance(x, (Given, Described)) else x for x in self._arguments)
            self.launch.first(self.grid, tuple(values))
            return
        args = self.start(call).copy()
        assert self.live is not None
        for place, name, offset in self.live:
            args[place] = getattr(call, name).data_ptr() + offset
        self.launch.again(args)

    def start(self, call: Any) -> list:
        """What a compiled launch for these tensors starts from. Descriptors are encoded once, and kept."""
        key = tuple(getattr(call, name).data_ptr() for name in self.described)
        found = self.known.get(key)
        if found is None:
            if len(self.known) >= _MAX_DESCRIBED:
                self.known.clear()
            found = self.known[key] = self._started(call)
        return found

    def _started(self, call: Any) -> list:
        described = [x.of(call) for x in self._arguments if isinstance(x, Described)]
        encoded = iter(self.launch.encoded(*described) if described else ())
        args, live = self.launch.head(self.grid), []
        for x in self._arguments:
            if isinstance(x, Described):
                args += next(encoded)
                continue
            tensor = x.of(call) if isinstance(x, Given) else None
            if tensor is not None:
                live.append((len(args), x.name, tensor.data_ptr() - getattr(call, x.name).data_ptr()))
            args.append(None if isinstance(x, Given) else x)
        self.live = live  # equal facts: what is None stays None
        return args


class Place(NamedTuple):
    """A part of the scratch."""

    offset: int  # bytes
    shape: tuple[int, ...]
    dtype: torch.dtype


class Scratch:
    """What launches of a call hand to one another: one allocation, PART, and named places in it.

    numbers:   fp32 numbers at its beginning
    places:    behind them, shapes and dtypes by name; None: there is no such tensor
    most_kept: largest allocation, in bytes, that is kept for the next call; None: any
    """

    def __init__(
        self, numbers: int, places: Mapping[str, tuple[Sequence[int], torch.dtype] | None] | None = None,
        most_kept: int | None = None,
    ) -> None:  # fmt: skip
        end = 4 * numbers
        self.places: dict[str, Place | None] = {}
        for name, wanted in (places or {}).items():
            self.places[name] = None
            if wanted is not None:
                place = Place(-(-end // _ALIGNED) * _ALIGNED, tuple(wanted[0]), wanted[1])
                self.places[name], end = place, place.offset + prod(place.shape) * place.dtype.itemsize
        self.numbers = -(-end // 4)
        self.kept = most_kept is None or end <= most_kept

    def offsets(self) -> dict[str, int]:
        """Where the address of each part lies, in bytes from the beginning."""
        return {PART: 0} | {name: place.offset for name, place in self.places.items() if place is not None}

    def beside(self, call: Any) -> SimpleNamespace:
        """The tensors of a call, and those of a scratch for it."""
        like = next(x for x in call if isinstance(x, Tensor))
        memory = launch.scratch(self.numbers, like) if self.kept else _fresh(self.numbers, like.device, 0)
        return SimpleNamespace(**call._asdict() | {PART: memory} | self.views(memory))

    def views(self, memory: Tensor) -> dict[str, Tensor | None]:
        as_bytes = memory.view(torch.uint8)
        return {
            name: None if p is None
            else as_bytes[p.offset : p.offset + prod(p.shape) * p.dtype.itemsize].view(p.dtype).view(p.shape)
            for name, p in self.places.items()
        }  # fmt: skip


class Launches:
    """The launches of a plan, in order; none: there is nothing to do."""

    def __init__(self, *templates: Template, scratch: Scratch | None = None) -> None:
        self.templates, self.scratch = templates, scratch
        self._again: Bound | None = None
        self._tensors: Any = None

    def __call__(self, call: Any) -> None:
        again = self._again
        if again is None or not again([x.data_ptr() for x in self._tensors(call)]):
            self._long(call)

    def bind(self, at: Mapping[str, int]) -> Bound | None:
        """The launches for lists of addresses. None: there are none, they are not compiled, or scratch is not kept.

        at: where the address of a call's tensor stands in the list
        """
        if not self.templates or (self.scratch is not None and not self.scratch.kept):
            return None
        return bound(self.templates, at, self.scratch)

    def _long(self, call: Any) -> None:
        """Compile what is not compiled, describe what is not described, and launch."""
        everything = call if self.scratch is None else self.scratch.beside(call)
        for template in self.templates:
            template(everything)
        if self._again is None and self.templates and all(t.launch.compiled for t in self.templates):
            for template in self.templates:
                template.start(everything)
            names = sorted({n for t in self.templates for n in t.names() if getattr(call, n, None) is not None})
            self._tensors = attrgetter(*names) if len(names) > 1 else lambda call: [getattr(call, n) for n in names]
            self._again = bound(self.templates, {n: i for i, n in enumerate(names)}, self.scratch)


class Instead:
    """What is done where there is nothing to launch for."""

    templates: tuple[Template, ...] = ()

    def __init__(self, do: Callable[[Any], None]) -> None:
        self._do = do

    def __call__(self, call: Any) -> None:
        self._do(call)

    def bind(self, at: Mapping[str, int]) -> None:
        return None


def bound(templates: Sequence[Template], at: Mapping[str, int], scratch: Scratch | None = None) -> Bound | None:
    """Launches with everything but the addresses filled in. None: they are not compiled yet.

    at: where the address of a call's tensor stands in the list
    """
    if any(t.live is None for t in templates):
        return None
    places = {} if scratch is None else scratch.offsets()
    at = dict(at) | {name: len(at) + i for i, name in enumerate(places)}
    launches, described = [], []
    for t in templates:
        live = [(place, at[name]) for place, name, offset in t.live or () if not offset]
        moved = [(place, at[name], offset) for place, name, offset in t.live or () if offset]
        launches.append((t.launch, t.launch.run, None if t.described else t.known[()], live, moved))
        if t.described:
            described.append((t.known, _picked([at[name] for name in t.described])))
    index, offsets = templates[0].launch.device, tuple(places.values())
    device = torch.device("cuda", index)
    numbers = 0 if scratch is None else scratch.numbers
    take = kept_scratch if scratch is None or scratch.kept else _fresh

    def go(a: list[int]) -> bool:
        stream = torch._C._cuda_getCurrentRawStream(index)
        if numbers:
            part = take(numbers, device, stream)
            begin = part.data_ptr()
            for offset in offsets:
                a.append(begin + offset)
        starts = []
        for known, pick in described:
            found = known.get(pick(a))
            if found is None:
                return False
            starts.append(found)
        i, told = 0, entering.calls or leaving.calls or (put and replaced())
        for one, run, start, live, moved in launches:
            if start is None:
                start, i = starts[i], i + 1
            args = start.copy()
            for place, of in live:
                args[place] = a[of]
            for place, of, offset in moved:
                args[place] = a[of] + offset
            args[3] = stream
            if told:
                one.tell(args)
            try:
                run(*args)
            except Exception as e:
                blame(one.fn, e)
                raise
        return True

    return go


def _picked(places: list[int]) -> Callable[[list[int]], tuple[int, ...]]:
    """The addresses at these places of a list, as a tuple."""
    return itemgetter(*places) if len(places) > 1 else lambda a: (a[places[0]],)


def _fresh(n: int, device: torch.device, stream: int) -> Tensor:
    return torch.empty(n, dtype=torch.float32, device=device)
