"""The compiled kernels: loaded once, called with a record and the addresses of its tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL, POINTER, byref, c_char_p, c_int64, c_void_p
from functools import cache
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from . import build
from .records import Append, Attention, Merge, Report

Bound = Callable[[list[int]], bool]  # launches for the addresses in a list; whether it did
_RECORDS = (Attention, Append, Merge)
_FORKNOEXEC = 0x40  # of a process's flags (linux/sched.h)
_HOW = "python -m tersekv.backends.cpu.build"


class Library:
    """The functions of native/entry.cpp."""

    def __init__(self, path: str) -> None:
        lib = CDLL(path)
        lib.tersekv_sources.restype = lib.tersekv_level.restype = c_char_p
        self.sources = lib.tersekv_sources().decode()
        sizes = (c_int64 * len(_RECORDS))()
        lib.tersekv_sizes(sizes)
        self.is_current = self.sources == build.digest() and list(sizes) == [ctypes.sizeof(r) for r in _RECORDS]
        if not self.is_current:
            return  # of other sources: it may lack the rest
        for name in ("attention", "append", "merge"):
            f = getattr(lib, f"tersekv_{name}")
            f.argtypes = [c_void_p, c_void_p, c_int64, *([c_void_p] if name == "attention" else [])]
            f.restype = c_int64
        self.attention, self.append, self.merge = lib.tersekv_attention, lib.tersekv_append, lib.tersekv_merge
        lib.tersekv_levels.argtypes = [POINTER(c_char_p)]
        lib.tersekv_use_level.argtypes = [c_char_p]
        lib.tersekv_use_team.argtypes, lib.tersekv_has_team.restype = [c_void_p], c_int64
        self._lib = lib
        self.use_team(True)

    def levels(self) -> list[str]:
        """The instruction sets that are compiled and run here, the best last."""
        names = (c_char_p * 8)()
        return [names[i].decode() for i in range(self._lib.tersekv_levels(names))]  # type: ignore[union-attr]

    def level(self) -> str:
        """The instruction set that is used."""
        return self._lib.tersekv_level().decode()

    def use_level(self, name: str) -> None:
        if not self._lib.tersekv_use_level(name.encode()):
            raise ValueError(f"level: want one of {', '.join(self.levels())}, got {name!r}")

    def use_team(self, wanted: bool) -> None:
        """Work on the threads of PyTorch's OpenMP, if it has them, or on threads of this library; `team` tells.

        PyTorch's spin for a while after each of its calls, unless OMP_WAIT_POLICY=passive; beside others on the same
        cores they would take half of these. A forked process has the library's own: there OpenMP waits for threads
        that stayed behind.
        """
        self._lib.tersekv_use_team(_openmp() if wanted and not _forked() else None)

    @property
    def team(self) -> bool:
        return bool(self._lib.tersekv_has_team())


def _openmp() -> int | None:
    """The address of GOMP_parallel in the runtime that PyTorch computes with; None: there is none."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    # What is loaded for all comes first, also for PyTorch: another runtime may stand before its own, by LD_PRELOAD.
    # Then libtorch_cpu, which is loaded already, is asked for what it depends on.
    for path in (None, *(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{end}") for end in ("so", "dylib"))):
        try:
            return ctypes.cast(CDLL(path).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _forked() -> bool:
    """Whether this process is a fork's child that has executed no program since. Only Linux tells."""
    try:
        flags = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[6]
    except OSError:
        return False
    return bool(int(flags) & _FORKNOEXEC)


@cache
def loaded() -> Library | str:
    """The library, or why there is none and how to get it."""
    if not build.LIBRARY.exists():
        return f"is not compiled; with a C++ compiler: {_HOW}"
    try:
        library = Library(str(build.LIBRARY))
    except (OSError, AttributeError) as e:
        return f"does not load ({e}); compile it here: {_HOW}"
    if not library.is_current:
        return f"was compiled from other sources; compile it anew: {_HOW}"
    return library


def why_not(f: SimpleNamespace) -> str | None:
    """What every kernel here needs; None: all of it is here."""
    if f.arch is not None or f.device.type != "cpu":
        return f"needs a CPU, got {f.device.type if f.arch is None else f'sm_{f.arch}'}"
    return missing()


def missing() -> str | None:
    """Why there is no library; None: there is one."""
    library = loaded()
    return library if isinstance(library, str) else None


class Launch:
    """A record, and the names of the tensors whose addresses it wants."""

    __slots__ = ("_array", "_function", "_judged", "_record", "names")

    def __init__(self, function: str, record: Any, names: Sequence[str]) -> None:
        library = loaded()
        assert isinstance(library, Library)
        self.names = tuple(names)
        self._function, self._record = getattr(library, function), record
        self._judged = function == "attention"
        self._array = c_void_p * len(self.names)

    def run(self, call: Any) -> None:
        tensors = (getattr(call, n) for n in self.names)
        self([0 if x is None else x.data_ptr() for x in tensors])

    def __call__(self, addresses: Sequence[int]) -> None:
        given, threads = self._array(*addresses), torch.get_num_threads()
        if not self._judged:
            self._function(byref(self._record), given, threads)
            return
        report = Report()
        if self._function(byref(self._record), given, threads, byref(report)):
            _tell(report, self._record)

    def bind(self, at: Mapping[str, int]) -> Bound:
        """For a list of addresses, in which the tensors stand where `at` says."""
        pick = itemgetter(*(at.get(n, -1) for n in self.names))

        def launch(addresses: list[int]) -> bool:
            addresses.append(0)  # found at −1, for tensors that are not there
            self(pick(addresses))
            return True

        return launch


def _tell(report: Report, call: Attention) -> None:
    """Raise for a value that does not fit; the words are those of the `torch` backend."""
    b, (x, y) = report.request, report.values
    messages = {
        1: f"seq_lens: want at most {x} (max_pages * S), got {y} at {b}",
        2: f"cu_seqlens_q: want rows in [0, {call.rows}], got [{x}, {y}) at {b}",
        3: f"max_q_len: want at least {x}, the rows of request {b}, got {y}",
        4: f"page_table: want page ids in [0, {x}), got {y} at request {b}",
        6: f"seq_lens: want at most {x} before the new tokens (max_pages * S), got {y} at {b}",
    }
    if report.fault not in messages:
        raise MemoryError("no memory for the tiles of an attention")
    raise ValueError(messages[report.fault])
