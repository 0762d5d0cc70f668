"""Host-side differences between versions of Triton. `backends/gluon/versions.py` has those of kernels.

Only `is_tested` looks at the version number. The order of the launcher's arguments is probed from Triton's own
launcher, so an unknown order is found too, or declined.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

OLDEST, NEWEST = (3, 6), (3, 9)  # releases on which tests/gluon and tests/triton pass, and those between
RANGE = f"Triton {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
# PyTorch → the Triton release it ships on Linux; docs/support.md has the same table.
OF_TORCH = {(2, 10): (3, 6), (2, 11): (3, 6), (2, 12): (3, 7), (2, 13): (3, 7), (2, 14): (3, 8), (2, 15): (3, 9)}
_log = logging.getLogger("tersekv")


def is_tested(version: str) -> bool:
    """Returns whether the tests pass on this version. A build between releases counts as untested."""
    found = re.fullmatch(r"(\d+)\.(\d+)\.\d+(?:\.post\d+)?", version)
    return found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST


def triton_release_of_nearest_torch(torch_version: str) -> str:
    """Returns the Triton release, like "3.6", of a PyTorch version; for an unknown one that of the nearest known."""
    found = re.match(r"(\d+)\.(\d+)", torch_version)
    asked = (int(found[1]), int(found[2])) if found else max(OF_TORCH)
    major, minor = OF_TORCH[max((v for v in OF_TORCH if v <= asked), default=min(OF_TORCH))]
    return f"{major}.{minor}"


def options_overriding_triton_defaults(fn: Any) -> dict[str, Any]:
    """Returns the compiler options set on every version, whatever its defaults, so that all compile kernels alike.

    Triton 3.10 will no longer fuse multiply-adds by default. From 3.7 on it sets ptxas's register allocation to level
    2, below ptxas's default, because of an unspecified error of ptxas 13; 3.9 uses ptxas 13 for sm_90, whose level 2
    spills up to 500 bytes a thread in kernels that do not spill at level 4, nor without the option.
    """
    options: dict[str, Any] = {"enable_fp_fusion": True}
    if getattr(fn, "is_gluon", bool)():
        options["ptx_options"] = "--regAllocOptLevel=4"
    return options


class Launcher(NamedTuple):
    """How a compiled kernel is launched: run(*grid, stream, *fixed, *the kernel's arguments).

    hooks_index: index of the launch metadata among all these; the enter and exit hooks follow it
    encode:      tensor descriptors and their kernel metadata → each as kernel arguments;
                 None: `run` takes descriptors as they are
    """

    run: Callable[..., Any]
    fixed_args: tuple
    hooks_index: int
    encode: Callable[[Sequence[Any], Sequence[Any]], list[tuple]] | None


def make_launcher_record(compiled: Any) -> Launcher:
    """Returns Triton's C launcher without its Python wrapper; the whole launcher where the wrapper is unknown."""
    try:
        found = _c_launcher_record_or_none(compiled)
    except Exception as e:  # an unknown launcher
        _log.debug("Triton's launcher is called as it is: %s: %s", type(e).__name__, e)
        found = None
    return found or Launcher(compiled.run, (compiled.function, compiled.packed_metadata, None, None, None), 6, None)


def _c_launcher_record_or_none(compiled: Any) -> Launcher | None:
    run = compiled.run
    if run.global_scratch_size or run.profile_scratch_size:  # Triton's Python allocates them at each launch
        return None
    launch, wrapped = run.launch, getattr(run.launch, "__closure__", None)
    if wrapped is not None:
        if not launch.__qualname__.startswith("wrap_handle_tensordesc"):
            return None
        names = launch.__code__.co_freevars
        launch = dict(zip(names, (cell.cell_contents for cell in wrapped), strict=True))["launcher"]
    recorded = _record_leading_args_and_is_packed_or_none(run)
    if recorded is None:
        return None
    before, packed = recorded
    value_by_marker = {
        FUNCTION: compiled.function,
        METADATA: compiled.packed_metadata,
        HOOK_METADATA: None,
        ENTER: None,
        EXIT: None,
    }
    fixed_args = tuple(value_by_marker.get(id(x), x) for x in before)
    n = 4 + len(fixed_args)
    hooks_index = 4 + [id(x) for x in before].index(HOOK_METADATA)

    def pack(*args: Any) -> None:
        launch(*args[:n], args[n:])

    def encode(descriptors: Sequence[Any], metas: Sequence[Any]) -> list[tuple]:
        return [_tensor_map_kernel_args(d, [m], n, packed) for d, m in zip(descriptors, metas, strict=True)]

    return Launcher(pack if packed else launch, fixed_args, hooks_index, encode)


# Markers for the arguments of Triton's launcher while its order is probed.
_LAUNCHER_FIELDS = [object() for _ in range(11)]
FUNCTION, METADATA, HOOK_METADATA, ENTER, EXIT = map(id, _LAUNCHER_FIELDS[4:9])


def _record_leading_args_and_is_packed_or_none(triton_launcher: Any) -> tuple[tuple, bool] | None:
    """Returns (arguments between the stream and the kernel's own, with markers; whether the kernel's own come packed).

    Calls Triton's launcher with a recorder in place of the C function. None: the recorder got something other than
    grid, stream, the fixed arguments and the kernel's arguments.
    """
    calls: list[tuple] = []
    recorder = copy.copy(triton_launcher)
    recorder.launch = lambda *args: calls.append(args)
    recorder(*_LAUNCHER_FIELDS)
    if len(calls) != 1 or [*map(id, calls[0][:4])] != [*map(id, _LAUNCHER_FIELDS[:4])]:
        return None
    (got,), last = calls, [*map(id, _LAUNCHER_FIELDS[9:])]
    packed = isinstance(got[-1], (tuple, list)) and [*map(id, got[-1])] == last
    if not packed and [*map(id, got[-2:])] != last:
        return None
    before = got[4:-1] if packed else got[4:-2]
    ids = [*map(id, before)]
    if any(ids.count(id(x)) != 1 for x in _LAUNCHER_FIELDS[4:9]):
        return None
    i_hooks = ids.index(HOOK_METADATA)
    return (before, packed) if ids[i_hooks : i_hooks + 3] == [HOOK_METADATA, ENTER, EXIT] else None


def _tensor_map_kernel_args(
    descriptor: Any, tensordesc_meta: list, num_leading_args: int, args_are_packed: bool
) -> tuple:
    """Returns the kernel arguments of a tensor descriptor, as Triton's own wrapper of the C function makes them."""
    from triton.backends.nvidia.driver import wrap_handle_tensordesc

    seen: list[tuple] = []
    wrapped = wrap_handle_tensordesc(lambda *args: seen.append(args), {0: "tensordesc"}, tensordesc_meta)
    nothing = (None,) * num_leading_args
    wrapped(*nothing, (descriptor,)) if args_are_packed else wrapped(*nothing, descriptor)
    return tuple(seen[0][num_leading_args] if args_are_packed else seen[0][num_leading_args:])
