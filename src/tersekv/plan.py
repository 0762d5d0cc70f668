"""Facts of a call → (run, config). A pure function of the facts, cached on them.

Facts are shapes, dtypes, strides, alignment, device and options; never tensor values. Nothing above this file knows
a kernel, and nothing below it looks at options. `plan(..., arch=90)` plans for a chip that is not there.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import checks, env
from .calls import CALLS
from .errors import UnsupportedError

# In the order in which they are tried. On a GPU the oracle is never chosen silently: ask for it by name.
BACKENDS = ("triton", "torch")
_AUTO = {"cuda": ("triton",)}
_MAX_PLANS = 16384  # shapes change with the batch; beyond this the cache starts afresh


class TensorFact(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    aligned: bool  # the first byte lies on a multiple of 16
    device: torch.device


class Plan(NamedTuple):
    backend: str
    run: Callable[[Any, Any], None]
    config: Any
    device_index: int | None  # CUDA device to be current during `run`


_plans: dict[tuple, Plan] = {}


def dispatch(op: str, call: tuple, backend: str | None = None) -> None:
    """Run `call` on the backend that its facts select. Outputs are written in place."""
    p = plan(op, call, backend)
    if env.checked():
        checks.values(op, call)
    if p.device_index is not None and p.device_index != torch.cuda.current_device():
        with torch.cuda.device(p.device_index):
            p.run(call, p.config)
    else:
        p.run(call, p.config)


def plan(op: str, call: tuple, backend: str | None = None, *, arch: int | None = None) -> Plan:
    """The plan for `call`. Raises ValueError or TypeError for a bad call, UnsupportedError when no backend fits.

    arch:  compute capability times ten (90 for Hopper) to plan for; None: that of the call's device
    """
    key = (op, backend, arch, *[_key(x) for x in call])
    try:
        found = _plans.get(key)
    except TypeError:  # an argument that cannot be a key has the wrong type, and the check says which
        checks.types(CALLS[op][0], call)
        raise
    if found is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        found = _plans[key] = _make(op, call, backend, arch)
    return found


def facts(op: str, call: tuple, arch: int | None = None) -> SimpleNamespace:
    """Every field of the call by name, tensors as TensorFact; plus `op`, `device` and `arch` (None off CUDA)."""
    fields = CALLS[op][0]._fields  # type: ignore[attr-defined]
    f = SimpleNamespace(**{n: _fact(x) for n, x in zip(fields, call, strict=True)})
    f.op = op
    f.device = next(x.device for x in call if isinstance(x, Tensor))
    f.arch = arch if arch is not None else _arch(f.device)
    return f


def why_not(f: SimpleNamespace, backend: str) -> str | None:
    """Why `backend` cannot run a call with these facts; None: it can."""
    module = _module(backend, f.op)
    return f"has no {f.op}" if module is None else module.why_not(f)


def _make(op: str, call: tuple, backend: str | None, arch: int | None) -> Plan:
    checks.types(CALLS[op][0], call)
    f = facts(op, call, arch)
    checks.facts(f)
    wanted = backend or env.backend()
    if wanted is not None and wanted not in BACKENDS:
        raise ValueError(f"backend: want one of {', '.join(BACKENDS)}, got {wanted!r}")
    kind = "cuda" if arch is not None else f.device.type
    doors = (wanted,) if wanted else _AUTO.get(kind, ("torch",))
    reasons = []
    for name in doors:
        reason = why_not(f, name)
        if reason is None:
            module = _module(name, op)
            assert module is not None
            index = f.device.index if f.device.type == "cuda" else None
            return Plan(name, module.run, module.configure(f), index)
        reasons.append(f"  {name}: {reason}")
    where = f"sm_{f.arch}" if f.arch else f.device.type
    if not wanted and kind == "cuda":
        reasons.append("  torch: can be asked for by name (backend='torch'); it is the slow reference")
    raise UnsupportedError("\n".join([f"{op} has no backend for {_describe(f)} on {where}", *reasons]))


def _describe(f: SimpleNamespace) -> str:
    heads = {"q": "q", "k": "k", "q_nope": "q_nope", "kv_c": "kv_c", "outs": "outs"}
    parts = [f"{n}={list(getattr(f, n).shape)}" for n in heads if getattr(f, n, None) is not None]
    return " ".join([*parts, getattr(f, "format", "")]).strip()


@cache
def _module(backend: str, op: str) -> ModuleType | None:
    name = f"{__package__}.backends.{backend}.{op}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        missing = e.name or ""
        if name == missing or name.startswith(missing + "."):
            return None
        if missing == "triton" or missing.startswith("triton."):
            return _Absent(f"needs {missing}, which is not installed")  # type: ignore[return-value]
        raise


class _Absent:
    """Stands for a backend whose package is missing."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def why_not(self, f: SimpleNamespace) -> str:
        return self._reason


@cache
def _arch(device: torch.device) -> int | None:
    if device.type != "cuda" or torch.version.hip:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return major * 10 + minor


def _key(x: Any) -> Any:
    if isinstance(x, Tensor):
        device = x.get_device() if x.is_cuda else x.device  # the number is cheaper, but only CUDA's tells devices apart
        return x.dtype, x.shape, x.stride(), x.data_ptr() & 15, device
    return tuple(x) if type(x) is list else x


def _fact(x: Any) -> Any:
    if isinstance(x, Tensor):
        return TensorFact(x.dtype, tuple(x.shape), x.stride(), x.data_ptr() & 15 == 0, x.device)
    return x
