"""The KernelError of a valid call whose kernel does not compile, load or launch.

Launches store the kernel's name on the exception (`kernel`); without a name the error came from preparing a launch.
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

from ..errors import KernelError, OutOfPagesError, UnsupportedError
from .signature import TENSOR_FIELDS

# PyTorch's own device errors; other errors of the torch backend are clear enough as they are.
_DEVICE_ERRORS = getattr(torch, "AcceleratorError", ())
_NOT_WRAPPED = (torch.OutOfMemoryError, KernelError, OutOfPagesError, UnsupportedError)
# Backends to suggest instead.
_FALLBACK_ADVICE = {"gluon": ("triton", "torch"), "triton": ("torch",)}
_LOST = r"illegal memory access|misaligned address|illegal instruction|device-side assert|launch failure|ECC"
# (pattern of the cause, advice); the first match is used
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


def raise_kernel_error(
    e: Exception, op: str, backend: str, format: str | None, tensors: tuple[Tensor | None, ...]
) -> NoReturn:
    """Raise a KernelError with the call, the cause `e` and advice; or `e` itself, if it is not about kernels.

    tensors: those of the call, in the order of its record
    """
    if isinstance(e, _NOT_WRAPPED) or (backend not in _FALLBACK_ADVICE and not isinstance(e, _DEVICE_ERRORS)):
        raise e
    kernel, why = getattr(e, "kernel", None), _root_cause(e)
    what = f"kernel {kernel} cannot be compiled or launched" if kernel else "its kernels cannot be launched"
    names = TENSOR_FIELDS[op]
    given = {name: x for name, x in zip(names, tensors, strict=True) if x is not None}
    lines = (
        f"{op} on {_describe_chip(next(iter(given.values())).device)} by backend {backend}: {what}",
        f"  call: {', '.join(_describe_tensor(name, x) for name, x in given.items())}{f'; {format}' if format else ''}",
        f"  with: {', '.join(_versions())}",
        f"  why: {why}",
        f"  try: {'; or '.join(_suggestions(why, backend))}",
    )
    raise KernelError("\n".join(lines)) from e


def _root_cause(e: BaseException) -> str:
    """Returns the innermost error in one line: the compiler wraps it once per enclosing function."""
    while isinstance(e.__cause__, Exception):
        e = e.__cause__
    lines = [x.strip() for x in (getattr(e, "error_message", None) or str(e)).splitlines() if x.strip()]
    said = [*lines[:1], *[x for x in lines[1:] if x.startswith("ptxas")][:1]]
    return ": ".join([type(e).__name__, *said])


def _suggestions(why: str, backend: str) -> Iterator[str]:
    yield next(advice for words, advice in _ADVICE if re.search(words, why))
    if not re.search(f"{_LOST}|out of memory", why):
        for name in _FALLBACK_ADVICE.get(backend, ()):
            slow = ", the slow reference" if name == "torch" else ""
            yield f"backend='{name}' (or TERSEKV_BACKEND={name}){slow}"


def _describe_tensor(name: str, x: Tensor) -> str:
    strides = "" if x.is_contiguous() else f" strides {list(x.stride())}"
    return f"{name} {list(x.shape)} {str(x.dtype).removeprefix('torch.')}{strides}"


def _describe_chip(device: torch.device) -> str:
    with suppress(Exception):  # a lost device raises
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
