"""What a caller is told where a kernel of a valid call does not compile, load or launch.

Triton's launches write the kernel's name on the error (`kernel`); where none is written, the host prepared a launch.
"""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NoReturn

import torch
from torch import Tensor

from .errors import KernelError, OutOfPagesError, UnsupportedError
from .keys import TENSORS

# What PyTorch itself reports of a device; the oracle's other errors are PyTorch's and say enough.
_OF_DEVICE = getattr(torch, "AcceleratorError", ())
_PASSED_ON = (torch.OutOfMemoryError, KernelError, OutOfPagesError, UnsupportedError)
# Backends to ask for instead.
_INSTEAD = {"gluon": ("triton", "torch"), "triton": ("torch",)}
_LOST = r"illegal memory access|misaligned address|illegal instruction|device-side assert|launch failure|ECC"
# (what the cause says, what to try); the first that is found
_ADVICE = (
    (_LOST, "a new process, with CUDA_LAUNCH_BLOCKING=1: this kernel failed, or one before it, of tersekv or not"),
    ("out of memory", "free memory of the device"),
    (
        r"C compiler|\b(gcc|clang|cc)\b|Python\.h",
        "install a C compiler and Python's headers, or name the compiler in CC: Triton builds its launcher with it",
    ),
    (r"libcuda", "name the folder of the driver's libcuda.so.1 in TRITON_LIBCUDA_PATH"),
    (
        r"^(OSError|PermissionError|FileNotFoundError|NotADirectoryError|BlockingIOError)",
        "name a folder that can be written, and has room, in TRITON_CACHE_DIR, and a C compiler that is there in CC",
    ),
    ("", "another release of Triton"),
)


def tell(e: Exception, op: str, backend: str, format: str | None, tensors: tuple[Tensor | None, ...]) -> NoReturn:
    """Raise a KernelError that says which call met `e`, and what to try; or `e`, if it is not about kernels.

    tensors: of the call, in the order of its record
    """
    if isinstance(e, _PASSED_ON) or (backend not in _INSTEAD and not isinstance(e, _OF_DEVICE)):
        raise e
    kernel, why = getattr(e, "kernel", None), _why(e)
    what = f"kernel {kernel} cannot be compiled or launched" if kernel else "its kernels cannot be launched"
    names = TENSORS[op]
    given = {name: x for name, x in zip(names, tensors, strict=True) if x is not None}
    lines = (
        f"{op} on {_chip(next(iter(given.values())).device)} by backend {backend}: {what}",
        f"  call: {', '.join(_fact(name, x) for name, x in given.items())}{f'; {format}' if format else ''}",
        f"  with: {', '.join(_versions())}",
        f"  why: {why}",
        f"  try: {'; or '.join(_tries(why, backend))}",
    )
    raise KernelError("\n".join(lines)) from e


def _why(e: BaseException) -> str:
    """The error at the bottom, in a line: the compiler wraps one around it for every function that it is in."""
    while isinstance(e.__cause__, Exception):
        e = e.__cause__
    lines = [x.strip() for x in (getattr(e, "error_message", None) or str(e)).splitlines() if x.strip()]
    said = [*lines[:1], *[x for x in lines[1:] if x.startswith("ptxas")][:1]]
    return ": ".join([type(e).__name__, *said])


def _tries(why: str, backend: str) -> Iterator[str]:
    yield next(advice for words, advice in _ADVICE if re.search(words, why))
    if not re.search(f"{_LOST}|out of memory", why):
        for name in _INSTEAD.get(backend, ()):
            slow = ", the slow reference" if name == "torch" else ""
            yield f"backend='{name}' (or TERSEKV_BACKEND={name}){slow}"


def _fact(name: str, x: Tensor) -> str:
    strides = "" if x.is_contiguous() else f" strides {list(x.stride())}"
    return f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}{strides}"


def _chip(device: torch.device) -> str:
    with suppress(Exception):  # of a device that is lost
        if device.type == "cuda":
            found: Any = torch.cuda.get_device_properties(device)
            return found.gcnArchName if torch.version.hip else f"sm_{found.major}{found.minor}"
    return str(device)


def _versions() -> Iterator[str]:
    triton = sys.modules.get("triton")
    if triton is not None:
        yield f"Triton {triton.__version__}"
    yield f"torch {torch.__version__}"
    yield f"Python {platform.python_version()}"
