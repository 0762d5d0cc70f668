"""Chip capabilities as functions of the facts, so that plans for absent chips can be tested; compiled kernels and
their launch; the workspace cached between calls. `bind` builds the arguments.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...formats import BLOCK, GROUP, INDEX, NONE, STORED_FORMATS, TENSOR, TOKEN_HEAD, UE8M0
from .cache_keys import hash_callees_first_for_stable_cache_key
from .versions import make_launcher_record, options_overriding_triton_defaults

_log = logging.getLogger("tersekv")
absent_num_sms = 132  # of a chip that is planned for and not there: Hopper's
# (code, scale) pairs that the kernels implement.
_KNOWN_FORMATS = {
    ("bf16", NONE), ("fp16", NONE), ("e4m3", TENSOR), ("e5m2", TENSOR), ("e4m3", TOKEN_HEAD), ("int8", TOKEN_HEAD),
    ("int4", TOKEN_HEAD), ("e2m1", BLOCK), ("e4m3", GROUP), ("e4m3", INDEX), ("e4m3", UE8M0),
}  # fmt: skip


def interpreting() -> bool:
    """Returns whether Triton runs kernels in its CPU interpreter (TRITON_INTERPRET=1 before the first import)."""
    return bool(triton.knobs.runtime.interpret)


def why_not_format_or_device(f: SimpleNamespace) -> str | None:
    """Returns why no Triton kernel runs with a call's formats or on its device; None: one does."""
    for name in (getattr(f, "format", "bf16"), getattr(f, "v_format", "")):
        fmt = STORED_FORMATS[name or "bf16"]
        if (fmt.code, fmt.scale) not in _KNOWN_FORMATS:
            return f"has no {fmt.name}: codes of {fmt.code}, scale={fmt.scale!r}"
    if f.arch is not None:
        return None if f.arch >= 80 else f"needs sm_80 or newer, got sm_{f.arch}"
    if interpreting() or f.device.type == "cuda":
        return None
    return f"needs a CUDA or HIP device, got {f.device.type}"


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def emulates_e4m3(f: SimpleNamespace) -> bool:
    """Returns whether kernels convert e4m3 by bit arithmetic: Triton has no e4m3 type below sm_89, nor on gfx942."""
    return (f.arch is None and not interpreting()) or (f.arch is not None and f.arch < 89)


def has_exact_fp8_cast(f: SimpleNamespace) -> bool:
    """Returns whether Triton's cast fp32 → fp8 is one instruction that rounds to nearest even and saturates.

    NOTE: on sm_89 Triton 3.6 goes through fp16, rounded toward zero, so the result is not the nearest code.
    """
    return interpreting() or (f.arch is not None and f.arch >= 90)


def has_ptx(f: SimpleNamespace) -> bool:
    """Returns whether kernels may use inline PTX."""
    return f.arch is not None and not interpreting()


def has_tma(f: SimpleNamespace) -> bool:
    """Returns whether kernels load through tensor descriptors: Hopper and newer, and the interpreter for tests."""
    return interpreting() or (f.arch is not None and f.arch >= 90)


def num_sms(f: SimpleNamespace) -> int:
    """Returns the number of SMs of the call's device; `absent_num_sms` for a plan without a device."""
    if f.device.type == "cuda" and torch.cuda.is_available():
        return _num_sms(f.device)
    return 8 if interpreting() else absent_num_sms


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory_bytes_per_cta(f: SimpleNamespace) -> int:
    """Returns the bytes of shared memory that one CTA can have."""
    if f.arch is None:
        return 65536  # AMD's; the interpreter has no limit
    return shared_memory_of(f.arch)


def shared_memory_of(arch: int) -> int:
    """Returns the bytes of shared memory that one CTA can have on an NVIDIA chip."""
    return _SHARED_MEMORY.get(arch, 101376)


_SHARED_MEMORY = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448, 110: 232448}


def offsets_within_page_exceed_int32(caches: Sequence[Any]) -> bool:
    """Returns whether offsets within a page of some cache [pages, slots, ...] reach 2^31 elements."""
    extents = (
        (n - 1) * abs(step) for x in caches if x is not None for n, step in zip(x.shape[1:], x.stride[1:], strict=True)
    )
    return sum(extents) >= 2**31


_runtime = triton.knobs.runtime
# Hooks on Triton's launches: profilers add to the chains; a replaced chain lies in the knobs' own dictionary, beside
# knobs unrelated to launches. Every launch tests `enter_hooks.calls or exit_hooks.calls or (knob_overrides and
# hooks_replaced())` inline: 0.05 µs; as a function it would take 0.1.
enter_hooks, exit_hooks = type(_runtime).launch_enter_hook, type(_runtime).launch_exit_hook
knob_overrides = vars(_runtime)


def hooks_replaced() -> bool:
    """Returns whether a chain of launch hooks was replaced."""
    return "launch_enter_hook" in knob_overrides or "launch_exit_hook" in knob_overrides


def attach_kernel_name(fn: Any, e: Exception) -> None:
    """Store the kernel's name on an error of the compiler or the driver, for `kernel_errors` to report."""
    e.kernel = getattr(fn, "__name__", str(fn))  # type: ignore[attr-defined]


class CompiledKernel:
    """A kernel of one plan. Equal facts give equal specialisations, so Triton's own lookup runs only once."""

    __slots__ = ("_compiled", "_device", "_fixed", "_hooks_index", "_launcher", "_run", "fn", "options")

    def __init__(self, fn: Any, **options: Any) -> None:
        self.fn, self.options = fn, options_overriding_triton_defaults(fn) | options
        self._compiled: Any = None
        self._launcher: Any = None
        self._run: Any = None
        self._device = 0
        self._fixed: tuple = ()
        self._hooks_index = 0  # index of the hooks and their metadata in the launcher's arguments

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    @property
    def device(self) -> int:
        return self._device

    @property
    def run(self) -> Any:
        """The launcher, from the second launch on."""
        return self._run

    def leading_args(self, grid: tuple[int, ...]) -> list:
        """Returns the launcher's arguments before the kernel's own."""
        return [*grid, None, *self._fixed]

    def relaunch(self, args: list) -> None:
        """Launch the compiled kernel: `leading_args`, then its arguments, with addresses for tensors.

        Triton's launcher queries the driver for every tensor, but takes a number as it is.
        """
        args[3] = torch._C._cuda_getCurrentRawStream(self._device)
        if enter_hooks.calls or exit_hooks.calls or (knob_overrides and hooks_replaced()):
            self.set_hook_args(args)
        try:
            self._run(*args)
        except Exception as e:
            attach_kernel_name(self.fn, e)
            raise

    def set_hook_args(self, args: list) -> None:
        """Set Triton's launch hooks and their metadata among the arguments, in place, as Triton's own launch does."""
        i_hooks = self._hooks_index
        metadata = self._compiled.launch_metadata(tuple(args[:3]), args[3])
        args[i_hooks : i_hooks + 3] = metadata, _runtime.launch_enter_hook, _runtime.launch_exit_hook

    def compile_launch_and_keep_launcher(self, grid: tuple[int, ...], args: tuple) -> None:
        """Compile and launch through Triton; keep the launcher for later launches."""
        start = time.perf_counter()
        hash_callees_first_for_stable_cache_key(self.fn)
        try:
            k = self.fn[grid](*args, **self.options)
        except Exception as e:
            attach_kernel_name(self.fn, e)
            raise
        _log.debug("%s ready after %.3f s", getattr(self.fn, "__name__", self.fn), time.perf_counter() - start)
        if k is None:  # interpreted, or a hook of Triton's prevented the compilation
            return
        self._launcher = make_launcher_record(k)
        self._run, self._fixed = self._launcher.run, self._launcher.fixed_args
        self._device = torch.cuda.current_device()
        self._hooks_index = self._launcher.hooks_index
        self._compiled = k  # last: another thread may read it

    def launcher_args_of_tensor_maps(self, descriptors: Sequence[TensorDescriptor]) -> list[tuple]:
        """Returns all tensor descriptors of the kernel as launcher arguments, for the second launch on.

        Encoded once instead of at every launch, if Triton's launcher is known.
        """
        if self._launcher.encode is None:
            return [(d,) for d in descriptors]
        try:
            return self._launcher.encode(descriptors, self._compiled.metadata.tensordesc_meta)
        except Exception as e:
            attach_kernel_name(self.fn, e)
            raise


class _WorkspaceCache(threading.local):
    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], tuple[int, Tensor]] = {}


_workspaces = _WorkspaceCache()


def workspace(num_floats: int, like: Tensor) -> Tensor:
    """Returns at least num_floats fp32 numbers on the device of `like`, for kernels that run in order on its current
    stream."""
    if not like.is_cuda:
        return torch.empty(num_floats, dtype=torch.float32, device=like.device)
    return cached_workspace(num_floats, like.device, torch._C._cuda_getCurrentRawStream(like.get_device()))


def cached_workspace(num_floats: int, device: torch.device, stream: int) -> Tensor:
    """Returns `workspace` for a CUDA device and its current stream.

    Cached by thread and stream, where calls run in order: an allocation takes the host 2 µs. A captured CUDA graph may
    be replayed beside other calls, so a capture gets memory of its own.
    """
    # The default stream is never captured, and the query takes 0.25 µs.
    if stream != 0 and torch._C._cuda_isCurrentStreamCapturing():
        return torch.empty(num_floats, dtype=torch.float32, device=device)
    key, cache = (device, stream), _workspaces.by_stream
    found = cache.get(key)
    if found is None or found[0] < num_floats:
        found = cache[key] = num_floats, torch.empty(num_floats, dtype=torch.float32, device=device)
    return found[1]


def release_workspace(only_side_streams: bool = False) -> None:
    """Drop this thread's cached workspaces; only_side_streams: only those of other streams than the default."""
    for key in [key for key in _workspaces.by_stream if key[1] != 0 or not only_side_streams]:
        del _workspaces.by_stream[key]


class RawAddress:
    """Address and dtype of a tensor, for a cached tensor map that must not keep a deleted cache's memory alive."""

    __slots__ = ("_address", "dtype")

    def __init__(self, x: Tensor) -> None:
        self._address, self.dtype = x.data_ptr(), x.dtype

    def data_ptr(self) -> int:
        return self._address
