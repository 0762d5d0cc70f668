"""What chips can do, from facts alone, so that plans for chips that are not there can be tested; a compiled kernel and
how it is launched; scratch that is kept between calls. Arguments by name are in `bind`.
"""

from __future__ import annotations

import logging
import threading
import time
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...formats import ALL_FORMATS, BLOCK, GROUP, NONE, TENSOR, TOKEN_HEAD
from .versions import compiler_options, launcher

_log = logging.getLogger("tersekv")
# What kernels branch on: codes and what their scales belong to.
_KNOWN = {
    ("bf16", NONE), ("fp16", NONE), ("e4m3", TENSOR), ("e5m2", TENSOR), ("e4m3", TOKEN_HEAD), ("int8", TOKEN_HEAD),
    ("int4", TOKEN_HEAD), ("e2m1", BLOCK), ("e4m3", GROUP),
}  # fmt: skip


def interpreting() -> bool:
    """Triton runs its kernels in the CPU interpreter (TRITON_INTERPRET=1 before the first import)."""
    return bool(triton.knobs.runtime.interpret)


def why_not(f: SimpleNamespace) -> str | None:
    """What every Triton kernel needs; None: all of it is here."""
    for name in (getattr(f, "format", "bf16"), getattr(f, "v_format", "")):
        fmt = ALL_FORMATS[name or "bf16"]
        if (fmt.code, fmt.scale) not in _KNOWN:
            return f"has no {fmt.name}: codes of {fmt.code}, scale={fmt.scale!r}"
    if f.arch is not None:
        return None if f.arch >= 80 else f"needs sm_80 or newer, got sm_{f.arch}"
    if interpreting() or f.device.type == "cuda":
        return None
    return f"needs a CUDA or HIP device, got {f.device.type}"


def next_power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def e4m3_by_hand(f: SimpleNamespace) -> bool:
    """Triton has no e4m3 type below sm_89, nor on gfx942: there kernels take bytes and convert by bit arithmetic."""
    return (f.arch is None and not interpreting()) or (f.arch is not None and f.arch < 89)


def rounds_to_fp8(f: SimpleNamespace) -> bool:
    """Triton's cast fp32 → fp8 is one instruction that rounds to nearest even and saturates.

    NOTE: on sm_89 Triton 3.6 goes through fp16, rounded toward zero, so the result is not the nearest code.
    """
    return interpreting() or (f.arch is not None and f.arch >= 90)


def has_ptx(f: SimpleNamespace) -> bool:
    """Inline PTX can be used."""
    return f.arch is not None and not interpreting()


def has_tma(f: SimpleNamespace) -> bool:
    """Tensor-descriptor loads are worth using: Hopper and newer; in the interpreter, so that the path is tested."""
    return interpreting() or (f.arch is not None and f.arch >= 90)


def num_sms(f: SimpleNamespace) -> int:
    """Multiprocessors of the call's device; 132 (Hopper's) for a plan without a device."""
    if f.device.type == "cuda" and torch.cuda.is_available():
        return _num_sms(f.device)
    return 8 if interpreting() else 132


@cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory(f: SimpleNamespace) -> int:
    """Bytes of shared memory that one block can have."""
    if f.arch is None:
        return 65536  # AMD's, and the interpreter does not mind
    return shared_memory_of(f.arch)


def shared_memory_of(arch: int) -> int:
    """Bytes of shared memory that one block can have on an NVIDIA chip."""
    return _SHARED_MEMORY.get(arch, 101376)


_SHARED_MEMORY = {80: 166912, 87: 166912, 90: 232448, 100: 232448, 103: 232448, 110: 232448}


def spans_far(*caches: Any) -> bool:
    """Whether a page of some cache [pages, slots, ...] is longer than int32 counts: 2^31 elements or more."""
    spans = (
        (n - 1) * abs(step) for x in caches if x is not None for n, step in zip(x.shape[1:], x.stride[1:], strict=True)
    )
    return sum(spans) >= 2**31


_runtime = triton.knobs.runtime
# Who has hooked into Triton's launches: profilers add to the chains; what is put in the place of a chain lies in the
# knobs' own dictionary, beside what has nothing to do with launches. Every launch asks `entering.calls or
# leaving.calls or (put and replaced())`, which takes it 0.05 µs; as a function it would be 0.1.
entering, leaving = type(_runtime).launch_enter_hook, type(_runtime).launch_exit_hook
put = vars(_runtime)


def replaced() -> bool:
    """Whether something was put in the place of a chain of launch hooks."""
    return "launch_enter_hook" in put or "launch_exit_hook" in put


def blame(fn: Any, e: Exception) -> None:
    """Write the kernel's name on an error of the compiler or the driver: `failures` tells the caller."""
    e.kernel = getattr(fn, "__name__", str(fn))  # type: ignore[attr-defined]


class Launch:
    """A kernel of one plan. Equal facts specialise it equally, so Triton's own lookup is needed only once."""

    __slots__ = ("_compiled", "_device", "_fixed", "_launcher", "_run", "_told_at", "fn", "options")

    def __init__(self, fn: Any, **options: Any) -> None:
        self.fn, self.options = fn, compiler_options(fn) | options
        self._compiled: Any = None
        self._launcher: Any = None
        self._run: Any = None
        self._device = 0
        self._fixed: tuple = ()
        self._told_at = 0  # where hooks, and what they are told, go among the launcher's arguments

    @property
    def compiled(self) -> bool:
        return self._compiled is not None

    @property
    def device(self) -> int:
        return self._device

    @property
    def run(self) -> Any:
        """What launches, from the second time on."""
        return self._run

    def head(self, grid: tuple[int, ...]) -> list:
        """What goes before the arguments of the compiled kernel."""
        return [*grid, None, *self._fixed]

    def again(self, args: list) -> None:
        """Launch what is compiled: `head`, then the arguments, with addresses for tensors.

        Triton's launcher asks the driver about every tensor; a number it believes.
        """
        args[3] = torch._C._cuda_getCurrentRawStream(self._device)
        if entering.calls or leaving.calls or (put and replaced()):
            self.tell(args)
        try:
            self._run(*args)
        except Exception as e:
            blame(self.fn, e)
            raise

    def tell(self, args: list) -> None:
        """Have these arguments of the launcher call Triton's hooks, as a launch by Triton does."""
        at = self._told_at
        told = self._compiled.launch_metadata(tuple(args[:3]), args[3])
        args[at : at + 3] = told, _runtime.launch_enter_hook, _runtime.launch_exit_hook

    def first(self, grid: tuple[int, ...], args: tuple) -> None:
        """Compile and launch by Triton; keep what all later launches share."""
        start = time.perf_counter()
        try:
            k = self.fn[grid](*args, **self.options)
        except Exception as e:
            blame(self.fn, e)
            raise
        _log.debug("%s ready after %.3f s", getattr(self.fn, "__name__", self.fn), time.perf_counter() - start)
        if k is None:  # interpreted, or a hook of Triton's would not have it compiled
            return
        self._launcher = launcher(k)
        self._run, self._fixed, self._device = self._launcher.run, self._launcher.fixed, torch.cuda.current_device()
        self._told_at = self._launcher.hooks_at
        self._compiled = k  # last: another thread may ask

    def encoded(self, *descriptors: TensorDescriptor) -> list[tuple]:
        """Descriptors, all that the kernel takes, as its arguments from the second launch on.

        Encoded once instead of at every launch, where Triton's launcher is known.
        """
        if self._launcher.encode is None:
            return [(d,) for d in descriptors]
        try:
            return self._launcher.encode(descriptors, self._compiled.metadata.tensordesc_meta)
        except Exception as e:
            blame(self.fn, e)
            raise


class _Kept(threading.local):
    def __init__(self) -> None:
        self.by_stream: dict[tuple[torch.device, int], tuple[int, Tensor]] = {}


_kept = _Kept()


def scratch(n: int, like: Tensor) -> Tensor:
    """At least n fp32 numbers for kernels that follow each other on the current stream, on the device of `like`."""
    if not like.is_cuda:
        return torch.empty(n, dtype=torch.float32, device=like.device)
    return kept_scratch(n, like.device, torch._C._cuda_getCurrentRawStream(like.get_device()))


def kept_scratch(n: int, device: torch.device, stream: int) -> Tensor:
    """As `scratch`, on a CUDA device and its current stream.

    Kept, since an allocation takes the host 2 µs: by thread and stream, on which calls come one after the other. What
    is captured in a CUDA graph may be replayed beside them, so it gets memory of its own.
    """
    # Nothing is captured on the default stream, and asking takes a quarter of a microsecond.
    if stream != 0 and torch._C._cuda_isCurrentStreamCapturing():
        return torch.empty(n, dtype=torch.float32, device=device)
    key, kept = (device, stream), _kept.by_stream
    found = kept.get(key)
    if found is None or found[0] < n:
        found = kept[key] = n, torch.empty(n, dtype=torch.float32, device=device)
    return found[1]


def forget_scratch(side_streams: bool = False) -> None:
    """Allocate anew when this thread next needs scratch; side_streams: only on others than the default stream."""
    for key in [key for key in _kept.by_stream if key[1] != 0 or not side_streams]:
        del _kept.by_stream[key]


class Address:
    """Where a tensor lies, for a descriptor that is kept: it must not keep a deleted cache's memory alive."""

    __slots__ = ("_address", "dtype")

    def __init__(self, x: Tensor) -> None:
        self._address, self.dtype = x.data_ptr(), x.dtype

    def data_ptr(self) -> int:
        return self._address
