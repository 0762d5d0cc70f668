"""The compiled kernels: loaded once, launched with a record and the addresses of its tensors."""

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
from .records import Append, Attention, IndexScores, IndexTopk, Merge, Report

BoundLaunch = Callable[[list[int]], bool]  # launches for a list of addresses; returns whether it launched
_RECORDS = (Attention, Append, Merge, IndexScores, IndexTopk)
_REPORTING = ("attention", "index_scores")  # functions that judge values of index tensors
_FIRST_OF_LISTS = 8  # faults in lists of keys are from here on (native/api.h)
_FORKNOEXEC = 0x40  # a process flag (linux/sched.h)
_HOW = "python -m tersekv.backends.cpu.build"


class Library:
    """The functions of native/entry.cpp."""

    def __init__(self, path: str) -> None:
        lib = CDLL(path)
        lib.tersekv_sources.restype = lib.tersekv_level.restype = c_char_p
        self.sources = lib.tersekv_sources().decode()
        sizes = (c_int64 * len(_RECORDS))()
        lib.tersekv_sizes(sizes)
        self.is_current = self.sources == build.sources_hash() and list(sizes) == [ctypes.sizeof(r) for r in _RECORDS]
        if not self.is_current:
            return  # built from other sources: it may lack the rest
        for name in ("attention", "append", "merge", "index_scores", "index_topk"):
            f = getattr(lib, f"tersekv_{name}")
            f.argtypes = [c_void_p, c_void_p, c_int64, *([c_void_p] if name in _REPORTING else [])]
            f.restype = c_int64
            setattr(self, name, f)
        lib.tersekv_levels.argtypes = [POINTER(c_char_p)]
        lib.tersekv_use_level.argtypes = [c_char_p]
        lib.tersekv_use_team.argtypes, lib.tersekv_has_team.restype = [c_void_p], c_int64
        self._lib = lib

    def levels(self) -> list[str]:
        """Returns the compiled instruction sets that this machine runs, the best last."""
        names = (c_char_p * 8)()
        return [names[i].decode() for i in range(self._lib.tersekv_levels(names))]  # type: ignore[union-attr]

    def level(self) -> str:
        """Returns the instruction set in use."""
        return self._lib.tersekv_level().decode()

    def use_level(self, name: str) -> None:
        if not self._lib.tersekv_use_level(name.encode()):
            raise ValueError(f"level: want one of {', '.join(self.levels())}, got {name!r}")

    def use_pytorch_threads(self, enable: bool) -> None:
        """Run on the threads of PyTorch's OpenMP, if it has them, or on this library's own; `team` returns which.

        PyTorch's threads spin for a while after each of its calls, unless OMP_WAIT_POLICY=passive, and would take half
        of the cores from other threads. A forked process uses the library's own: its OpenMP waits for threads that the
        fork did not copy.
        """
        self._lib.tersekv_use_team(
            _find_gomp_parallel_address() if enable and not _is_forked_child_without_exec() else None
        )

    @property
    def team(self) -> bool:
        return bool(self._lib.tersekv_has_team())


def _find_gomp_parallel_address() -> int | None:
    """Returns the address of GOMP_parallel in the OpenMP runtime that PyTorch uses; None without one."""
    if "ATen parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    # Global symbols come first, for PyTorch too: LD_PRELOAD may put another runtime before its own. Then those of
    # libtorch_cpu, which is loaded already, and its dependencies.
    for path in (None, *(str(Path(torch.__file__).parent / "lib" / f"libtorch_cpu.{end}") for end in ("so", "dylib"))):
        try:
            return ctypes.cast(CDLL(path).GOMP_parallel, c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


def _is_forked_child_without_exec() -> bool:
    """Returns whether this process is a forked child without an exec since. Linux only; else False."""
    try:
        flags = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[6]
    except OSError:
        return False
    return bool(int(flags) & _FORKNOEXEC)


@cache
def load_compiled_library_or_reason() -> Library | str:
    """Returns the library, set to run on PyTorch's threads; or why it cannot be used and how to build it."""
    if not build.LIBRARY.exists():
        return f"is not compiled; with a C++ compiler: {_HOW}"
    try:
        library = Library(str(build.LIBRARY))
    except (OSError, AttributeError) as e:
        return f"does not load ({e}); compile it here: {_HOW}"
    if not library.is_current:
        return f"was compiled from other sources; compile it anew: {_HOW}"
    library.use_pytorch_threads(True)
    return library


def why_not(f: SimpleNamespace) -> str | None:
    """Returns why no kernel here can run a call; None: one can."""
    if f.arch is not None or f.device.type != "cpu":
        return f"needs a CPU, got {f.device.type if f.arch is None else f'sm_{f.arch}'}"
    return why_no_library()


def why_no_library() -> str | None:
    """Returns why there is no library; None: there is one."""
    library = load_compiled_library_or_reason()
    return library if isinstance(library, str) else None


class NativeLaunch:
    """A record, and the names of the tensors whose addresses it needs."""

    __slots__ = ("_array", "_function", "_judged", "_record", "names")

    def __init__(self, function: str, record: Any, tensor_names: Sequence[str]) -> None:
        library = load_compiled_library_or_reason()
        assert isinstance(library, Library)
        self.names = tuple(tensor_names)
        self._function, self._record = getattr(library, function), record
        self._judged = function in _REPORTING
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
            raise _exception_of_fault(report, self._record)

    def bind(self, address_index: Mapping[str, int]) -> BoundLaunch:
        """Returns a launch for a list of addresses. address_index: index of each tensor in the list."""
        pick = itemgetter(*(address_index.get(n, -1) for n in self.names))

        def append_null_address_and_launch(addresses: list[int]) -> bool:
            addresses.append(0)  # index −1: the null address of absent tensors
            self(pick(addresses))
            return True

        return append_null_address_and_launch


def _exception_of_fault(report: Report, record: Attention | IndexScores) -> Exception:
    """Returns the exception for a bad value, with the message of the `torch` backend."""
    b, (x, y) = report.request, report.values
    with_ends = isinstance(record, IndexScores) and record.ends.tensor >= 0
    messages = {
        1: f"seq_lens: want at most {x} (max_pages * S), got {y} at {b}",
        2: f"cu_seqlens_q: want rows in [0, {record.rows}], got [{x}, {y}) at {b}",
        3: f"max_q_len: want at least {x}, the rows of request {b}, got {y}",
        4: f"page_table: want page ids in [0, {x}), got {y} at request {b}",
        7: f"{'ends' if with_ends else 'seq_lens'}: want at most {x} keys (max_pages * S), got {y} at {b}",
        6: f"seq_lens: want at most {x} before the new tokens (max_pages * S), got {y} at {b}",
    }
    if isinstance(record, Attention) and report.fault >= _FIRST_OF_LISTS:
        return ValueError(_out_of_range_key_list_message(report, record))
    if report.fault not in messages:
        return MemoryError("no memory for the tiles of an attention")
    return ValueError(messages[report.fault])


def _out_of_range_key_list_message(report: Report, record: Attention) -> str:
    of, by_slot = "extra." if report.request else "", record.sets[report.request].page_table.tensor < 0
    (x, y), at = report.values, [i for i in report.at if i >= 0]
    entries = f"slots below {x} (P * S)" if by_slot else f"positions below {x} (max_pages * S)"
    return {
        8: f"{of}indices: want {entries}, got {y} at {at}",
        9: f"indices: want positions below {x} (max_pages * S), got {y} at {at}",
        10: f"{of}page_table: want page ids in [0, {x}) for listed keys, got {y} at {at}",
    }[report.fault]
