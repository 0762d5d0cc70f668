"""Facts of a call → (run, config). A pure function of the facts, cached on them.

Facts are shapes, dtypes, strides, alignment, device and options; never tensor values. Nothing above this file knows
a kernel, and nothing below it reads options. `plan(..., arch=90)` plans for an absent chip.
"""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses import FakeTensor

from .. import attributes, env
from ..calls import CALLS
from ..errors import UnsupportedError
from . import aliasing, checks, index_checks, kernel_errors, type_checks, value_checks
from .signature import FIELD_GETTERS, TensorSignature, tensor_key

# In the order of trial. On a GPU the oracle is never chosen silently, only by name.
BACKENDS = ("gluon", "triton", "cpu", "torch")
_AUTO = {"cuda": ("gluon", "triton"), "cpu": ("cpu", "torch")}
# Operations that a backend's module of another name runs: it selects a kernel for both.
_MODULE_OF = {"decode": "attention", "prefill": "attention"}
# A window this long masks nothing: no request has as many keys. Less than 2^31 by a request's rows, which may all stand
# before its first key, and by a block's padding rows: position − window must fit in 32 bits.
_ALL_KEYS = 2**31 - 1024
_MAX_PLANS = 16384  # shapes change with the batch; beyond this the cache is cleared


class TensorFact(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    aligned: bool  # the first byte lies on a multiple of 16
    device: torch.device
    negated: bool = False  # a view with the negative bit (x.resolve_neg())
    even: bool = True  # the first byte lies on a multiple of 2


class Plan(NamedTuple):
    backend: str
    run: Callable[[Any, Any], None]
    config: Any
    device_index: int | None  # CUDA device to make current during `run`; None: only one device
    bind: Callable[[Any, dict[str, int]], Callable[[list[int]], bool] | None] | None = None  # see `launch_cache`


class _Entry(NamedTuple):
    plan: Plan
    signature: TensorSignature


_plans: dict[tuple, _Entry] = {}
_recent: dict[tuple, _Entry] = {}  # by the options alone: the next call mostly differs in values only
absent_arch: int | None = None  # what calls on meta tensors are planned for; None: they do nothing
_log = logging.getLogger("tersekv")
_PACKAGE = (__package__ or "").rpartition(".")[0]
_warned: set[str] = set()  # warnings issued
checks.CHECKS.update(index_checks.CHECKS)


def dispatch(op: str, call: tuple, backend: str | None = None, *, arch: int | None = None) -> Plan:
    """Run `call` on the backend that its facts select, outputs in place. Returns the plan. arch: as in `plan`.

    Raises KernelError if a kernel does not compile or launch.
    """
    p = plan(op, call, backend, arch=arch)
    if p.run is not _no_op:
        aliasing.check_aliasing(op, call)
        check = value_checks.check_values if env.checked() else value_checks.check_host_values
        check(call)
    try:
        if p.device_index is not None and p.device_index != torch.cuda.current_device():
            with torch.cuda.device(p.device_index):
                p.run(call, p.config)
        else:
            p.run(call, p.config)
    except Exception as e:
        kernel_errors.raise_kernel_error(e, op, p.backend, getattr(call, "format", None), FIELD_GETTERS[op][0](call))
    return p


def plan(op: str, call: tuple, backend: str | None = None, *, arch: int | None = None) -> Plan:
    """Returns the plan for `call`. Raises ValueError or TypeError for a bad call, UnsupportedError if no backend fits.

    arch:  compute capability times ten (90 for Hopper) to plan for; None: that of the call's device
    """
    tensors_of, others_of = FIELD_GETTERS[op]
    try:
        tensors, others = tensors_of(call), others_of(call)
        options = (op, backend, arch, *others, *map(type, others))  # 1.0 and True equal 1, but are checked differently
        found = _recent.get(options)
        if found is not None and found.signature.matches(tensors):
            return found.plan
        key = (*options, *map(tensor_key, tensors))
        found = _plans.get(key)
    except (TypeError, AttributeError, RuntimeError):  # an unhashable field has the wrong type: the check names it
        if not isinstance(backend, (str, type(None))):
            raise TypeError(f"backend: want str or None, got {type(backend).__name__}") from None
        type_checks.types(CALLS[op][0], call)
        raise
    if found is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
            _recent.clear()
        found = _plans[key] = _Entry(_make_plan(op, call, backend, arch), TensorSignature(tensors))
    _recent[options] = found
    return found.plan


def facts(op: str, call: tuple, arch: int | None = None) -> SimpleNamespace:
    """Returns every field of the call by name, tensors as TensorFact; plus `op`, `device` and `arch` (None off CUDA).

    A `window` that masks no key becomes 0.
    """
    fields = CALLS[op][0]._fields  # type: ignore[attr-defined]
    f = SimpleNamespace(**{n: _fact(x) for n, x in zip(fields, call, strict=True)})
    f.op = op
    f.device = next(x.device for x in call if isinstance(x, Tensor))
    f.arch = arch if arch is not None else absent_arch if f.device.type == "meta" else _arch(f.device)
    if hasattr(f, "window") and f.window > _ALL_KEYS - f.max_q_len:
        f.window = 0
    return f


def why_not(f: SimpleNamespace, backend: str) -> str | None:
    """Returns why `backend` cannot run a call with these facts; None: it can."""
    if not _has_op(backend, f.op):
        return f"has no {f.op}"
    reason = _ask_package(backend, "why_not", f) or why_disabled(f, backend)
    if reason is not None:
        return reason
    module = _module(backend, f.op)
    assert module is not None
    return why_op_cannot(f, module)


def why_op_cannot(f: SimpleNamespace, module: Any) -> str | None:
    """Returns why an operation's module cannot run a call: a feature of cache or call that is missing in its SUPPORTS,
    which its kernels would ignore; else its `why_not`."""
    lacking = [x for x in attributes.required_features(f) if x not in getattr(module, "SUPPORTS", ())]
    if lacking and not isinstance(module, _MissingPackage):
        return f"takes no {lacking[0]} yet"
    return module.why_not(f)


def why_disabled(f: SimpleNamespace, backend: str) -> str | None:
    """Returns why kernels of `backend` for this device are disabled; None: they are not, or it has none."""
    return _ask_package(backend, "why_disabled", f) if _has_op(backend, f.op) else None


def candidate_backends(op: str, kind: str) -> tuple[str, ...]:
    """Returns the backends tried, in order, for a call that names none: those that have the operation."""
    return tuple(name for name in _AUTO.get(kind, ("torch",)) if _has_op(name, op))


def release_workspace(side_streams: bool = False) -> None:
    """Drop the workspaces that GPU backends cache for this thread.

    side_streams:  only those of other streams than the default
    """
    loaded_launch = sys.modules.get(f"{_PACKAGE}.backends.host.launch")  # not loaded: nothing is cached
    if loaded_launch is not None:
        loaded_launch.release_workspace(side_streams)


def _make_plan(op: str, call: tuple, backend: str | None, arch: int | None) -> Plan:
    type_checks.types(CALLS[op][0], call)
    f = facts(op, call, arch)
    checks.facts(f)
    wanted = env.backend() if backend is None else backend
    if wanted is not None and wanted not in BACKENDS:
        name = "TERSEKV_BACKEND" if backend is None else "backend"
        raise ValueError(f"{name}: want one of {', '.join(BACKENDS)}, got {wanted!r}")
    kind = "cuda" if f.arch is not None else f.device.type
    if kind == "meta":
        return Plan("meta", _no_op, None, None)
    candidates = (wanted,) if wanted else candidate_backends(op, kind)
    reasons: list[str] = []
    for name in candidates:
        reason = why_not(f, name)
        if not wanted and (disabled := why_disabled(f, name)) is not None:
            _warn_once(f"{op}: {name} is off, slower kernels run: it {disabled}")
        if reason is None:
            module = _module(name, f.op)
            assert module is not None
            index = f.device.index if f.device.type == "cuda" and torch.cuda.device_count() > 1 else None
            if _log.isEnabledFor(logging.DEBUG):
                passed_over = "; ".join(["", *map(str.strip, reasons)])
                _log.debug("%s %s on %s: %s%s", op, _describe(f), _where(f), name, passed_over)
            return Plan(name, module.run, module.configure(f), index, getattr(module, "bind", None))
        reasons.append(f"  {name}: {reason}")
    if not wanted and kind == "cuda":
        reasons.append("  torch: can be asked for by name (backend='torch'); it is the slow reference")
    raise UnsupportedError("\n".join([f"{op} has no backend for {_describe(f)} on {_where(f)}", *reasons]))


def _warn_once(text: str) -> None:
    """Warn once per text; or raise, with TERSEKV_STRICT."""
    if env.strict():
        raise UnsupportedError(f"{text} (TERSEKV_STRICT is set)")
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _no_op(call: Any, config: Any) -> None:
    """`run` of calls on meta tensors: nothing."""


def _describe(f: SimpleNamespace) -> str:
    names = ("q", "k", "k_rope", "q_nope", "kv_c", "outs", "scores")
    parts = [f"{n}={list(getattr(f, n).shape)}" for n in names if hasattr(getattr(f, n, None), "shape")]
    return " ".join([*parts, getattr(f, "format", "")]).strip()


def _where(f: SimpleNamespace) -> str:
    return f"sm_{f.arch}" if f.arch else f.device.type


def _ask_package(backend: str, question: str, f: SimpleNamespace) -> str | None:
    """Returns the answer of the backend's package, which holds for all its operations; None without such a function."""
    answer = getattr(_module(backend), question, None)
    return None if answer is None else answer(f)


@cache
def _has_op(backend: str, op: str) -> bool:
    room = Path(__file__).parent.parent / "backends" / backend / _MODULE_OF.get(op, op)
    return room.with_suffix(".py").exists() or (room / "__init__.py").exists()


@cache
def _module(backend: str, op: str | None = None) -> ModuleType | None:
    """Returns the module of an operation, or the backend's package; None if it does not exist."""
    name = f"{_PACKAGE}.backends.{backend}" + (f".{_MODULE_OF.get(op, op)}" if op else "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        missing = e.name or ""
        if name == missing or name.startswith(missing + "."):
            return None
        if missing == "triton" or missing.startswith("triton."):
            return _MissingPackage(f"needs {missing}, which is not installed")  # type: ignore[return-value]
        raise


class _MissingPackage:
    """Placeholder for a backend whose dependency is not installed."""

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


def _fact(x: Any) -> Any:
    if isinstance(x, Tensor):
        at = 0 if isinstance(x, FakeTensor) else x.data_ptr()  # a fake tensor has no address
        return TensorFact(x.dtype, tuple(x.shape), _stride(x), at & 15 == 0, x.device, x.is_neg(), at & 1 == 0)
    return x


def _stride(x: Tensor) -> tuple[int, ...]:
    """Returns the strides; of a contiguous tensor the canonical ones, whatever its strides of dimensions of size 1."""
    if not x.is_contiguous():
        return x.stride()
    strides, step = [], 1
    for n in reversed(x.shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
