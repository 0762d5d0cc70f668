"""What differs between versions of Triton, on the host. Names that kernels use are in `backends/gluon/versions.py`.

Nothing here asks which version it is but `tested`, which says what the tests have been run on. The launcher's order of
arguments is read off Triton's own launcher, so that an order that nobody has seen yet is found too, or declined.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

OLDEST, NEWEST = (3, 6), (3, 9)  # releases that tests/gluon and tests/triton hold on, and those between
RANGE = f"Triton {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
# PyTorch → the Triton that it brings on Linux; README's table says the same.
OF_TORCH = {(2, 10): (3, 6), (2, 11): (3, 6), (2, 12): (3, 7), (2, 13): (3, 7), (2, 14): (3, 8), (2, 15): (3, 9)}
_log = logging.getLogger("tersekv")


def tested(version: str) -> bool:
    """Whether the tests hold on this version. A build between releases counts as none that was tested."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.\d+(?:\.post\d+)?", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def of_torch(version: str) -> str:
    """The release of Triton that a PyTorch was built with, "3.6"; for one that is not known, the nearest that is."""
    found = re.match(r"(\d+)\.(\d+)", version)
    asked = (int(found[1]), int(found[2])) if found else max(OF_TORCH)
    major, minor = OF_TORCH[max((v for v in OF_TORCH if v <= asked), default=min(OF_TORCH))]
    return f"{major}.{minor}"


def compiler_options(fn: Any) -> dict[str, Any]:
    """What every version is asked for, whatever its own default, so that each makes the same of a kernel.

    Triton 3.10 will no longer join a product and a sum by default. From 3.7 on it has ptxas allocate registers at level
    2, below ptxas's own, because of an error of ptxas 13 that it does not describe; 3.9 takes ptxas 13 for sm_90, whose
    level 2 puts up to 500 bytes a thread of kernels into local memory that have none at level 4, as without the option.
    """
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if getattr(fn, "is_gluon", bool)():
        options["ptx_options"] = "--regAllocOptLevel=4"
    return options


class Launcher(NamedTuple):
    """How a compiled kernel is launched: run(*grid, stream, *fixed, *the kernel's arguments).

    hooks_at: where the launch's metadata stand among all these, and behind them the hooks before and after it
    encode:   descriptors and what the kernel's metadata say of them → each as the kernel's arguments;
              None: `run` takes descriptors as they are
    """

    run: Callable[..., Any]
    fixed: tuple
    hooks_at: int
    encode: Callable[[Sequence[Any], Sequence[Any]], list[tuple]] | None


def launcher(compiled: Any) -> Launcher:
    """Triton's function in C without the Python around it; Triton's whole launcher where that is not understood."""
    try:
        found = _in_c(compiled)
    except Exception as e:  # of a launcher that nobody has seen yet
        _log.debug("Triton's launcher is called as it is: %s: %s", type(e).__name__, e)
        found = None
    return found or Launcher(compiled.run, (compiled.function, compiled.packed_metadata, None, None, None), 6, None)


def _in_c(compiled: Any) -> Launcher | None:
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:  # Triton's Python allocates them at each launch
        return None
    launch, wrapped = run.launch, getattr(run.launch, "__closure__", None)
    if wrapped is not None:
        if not launch.__qualname__.startswith("wrap_handle_tensordesc"):
            return None
        names = launch.__code__.co_freevars
        launch = dict(zip(names, (cell.cell_contents for cell in wrapped), strict=True))["launcher"]
    order = _order(run)
    if order is None:
        return None
    before, packed = order
    given = {FUNCTION: compiled.function, METADATA: compiled.packed_metadata, TOLD: None, ENTER: None, LEAVE: None}
    fixed = tuple(given.get(id(x), x) for x in before)
    n = 4 + len(fixed)
    hooks_at = 4 + [id(x) for x in before].index(TOLD)

    def pack(*args: Any) -> None:
        launch(*args[:n], args[n:])

    def encode(descriptors: Sequence[Any], metas: Sequence[Any]) -> list[tuple]:
        return [_encoded(d, [m], n, packed) for d, m in zip(descriptors, metas, strict=True)]

    return Launcher(pack if packed else launch, fixed, hooks_at, encode)


# What stands for the arguments of Triton's launcher while its order is found out.
_MARKS = [object() for _ in range(11)]
FUNCTION, METADATA, TOLD, ENTER, LEAVE = map(id, _MARKS[4:9])


def _order(run: Any) -> tuple[tuple, bool] | None:
    """(what goes between the stream and the kernel's arguments, marks among it; whether those come as one sequence).

    Triton's launcher is called with something that only looks in the place of the function in C. None: it gives that
    something else than grid, stream, what belongs to the kernel, and the kernel's arguments.
    """
    seen: list[tuple] = []
    looking = copy.copy(run)
    looking.launch = lambda *args: seen.append(args)
    looking(*_MARKS)
    if len(seen) != 1 or [*map(id, seen[0][:4])] != [*map(id, _MARKS[:4])]:
        return None
    (got,), last = seen, [*map(id, _MARKS[9:])]
    packed = isinstance(got[-1], (tuple, list)) and [*map(id, got[-1])] == last
    if not packed and [*map(id, got[-2:])] != last:
        return None
    before = got[4:-1] if packed else got[4:-2]
    ids = [*map(id, before)]
    if any(ids.count(id(x)) != 1 for x in _MARKS[4:9]):
        return None
    told = ids.index(TOLD)
    return (before, packed) if ids[told : told + 3] == [TOLD, ENTER, LEAVE] else None


def _encoded(descriptor: Any, meta: list, n: int, packed: bool) -> tuple:
    """The kernel's arguments for a descriptor, as Triton's own wrapper of the function in C makes them."""
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    seen: list[tuple] = []
    wrapped = wrap_handle_tensordesc(lambda *args: seen.append(args), {0: "tensordesc"}, meta)
    nothing = (None,) * n
    wrapped(*nothing, (descriptor,)) if packed else wrapped(*nothing, descriptor)
    return tuple(seen[0][n] if packed else seen[0][n:])
