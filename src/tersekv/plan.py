"""Facts of a call → (run, config). A pure function of the facts, cached on them.

Facts are shapes, dtypes, strides, alignment, device and options; never tensor values. Nothing above this file knows
a kernel, and nothing below it looks at options. `plan(..., arch=90)` plans for a chip that is not there.
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

from . import attributes, checked, checks, env, failures, places
from .calls import CALLS
from .errors import UnsupportedError
from .keys import FIELDS, Seen, tensor_key

# In the order in which they are tried. On a GPU the oracle is never chosen silently: ask for it by name.
BACKENDS = ("gluon", "triton", "cpu", "torch")
_AUTO = {"cuda": ("gluon", "triton"), "cpu": ("cpu", "torch")}
_OF_MANY_ROWS = ("gluon", "triton")  # with kernels for these of their own
# Query rows of a KV head: those of a request for which decode's kernels read keys once, and those that requests must
# have on the average. With fewer, reading is the bound, and decode's cut a request's keys evenly.
_MOST_ROWS, _ON_AVERAGE = 64, 32
# A window as long is none, whatever the lengths: no request has as many keys. Less the rows of a request, that may all
# stand before its first key, and those that pad a block: in 32 bits every row's position less its window is a number.
_ALL_KEYS = 2**31 - 1024
_MAX_PLANS = 16384  # shapes change with the batch; beyond this the cache starts afresh


class TensorFact(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    aligned: bool  # the first byte lies on a multiple of 16
    device: torch.device
    negated: bool = False  # a view whose memory holds the other sign
    even: bool = True  # the first byte lies on a multiple of 2


class Plan(NamedTuple):
    backend: str
    run: Callable[[Any, Any], None]
    config: Any
    device_index: int | None  # CUDA device to be current during `run`; None: there is no choice
    bind: Callable[[Any, dict[str, int]], Callable[[list[int]], bool] | None] | None = None  # see `recall`


class _Entry(NamedTuple):
    plan: Plan
    seen: Seen


_plans: dict[tuple, _Entry] = {}
_latest: dict[tuple, _Entry] = {}  # by the options alone: the next call mostly differs in nothing but values
_log = logging.getLogger("tersekv")
_told: set[str] = set()  # warnings


def dispatch(op: str, call: tuple, backend: str | None = None) -> Plan:
    """Run `call` on the backend that its facts select. Outputs are written in place. Returns the plan.

    Raises KernelError where a kernel does not compile or launch.
    """
    p = plan(op, call, backend)
    if p.run is not _nothing:
        places.check(op, call)
        if env.checked():
            checked.values(call)
    try:
        if p.device_index is not None and p.device_index != torch.cuda.current_device():
            with torch.cuda.device(p.device_index):
                p.run(call, p.config)
        else:
            p.run(call, p.config)
    except Exception as e:
        failures.tell(e, op, p.backend, getattr(call, "format", None), FIELDS[op][0](call))
    return p


def plan(op: str, call: tuple, backend: str | None = None, *, arch: int | None = None) -> Plan:
    """The plan for `call`. Raises ValueError or TypeError for a bad call, UnsupportedError when no backend fits.

    arch:  compute capability times ten (90 for Hopper) to plan for; None: that of the call's device
    """
    tensors_of, others_of = FIELDS[op]
    try:
        tensors, others = tensors_of(call), others_of(call)
        options = (op, backend, arch, *others, *map(type, others))  # 1.0 and True equal 1, and are checked apart
        found = _latest.get(options)
        if found is not None and found.seen.like(tensors):
            return found.plan
        key = (*options, *map(tensor_key, tensors))
        found = _plans.get(key)
    except (TypeError, AttributeError, RuntimeError):  # what cannot be a key has the wrong type: the check says which
        if not isinstance(backend, (str, type(None))):
            raise TypeError(f"backend: want str or None, got {type(backend).__name__}") from None
        checks.types(CALLS[op][0], call)
        raise
    if found is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
            _latest.clear()
        found = _plans[key] = _Entry(_make(op, call, backend, arch), Seen(tensors))
    _latest[options] = found
    return found.plan


def facts(op: str, call: tuple, arch: int | None = None) -> SimpleNamespace:
    """Every field of the call by name, tensors as TensorFact; plus `op`, `device` and `arch` (None off CUDA).

    A `window` that hides no key is 0.
    """
    fields = CALLS[op][0]._fields  # type: ignore[attr-defined]
    f = SimpleNamespace(**{n: _fact(x) for n, x in zip(fields, call, strict=True)})
    f.op = op
    f.device = next(x.device for x in call if isinstance(x, Tensor))
    f.arch = arch if arch is not None else _arch(f.device)
    if hasattr(f, "window") and f.window > _ALL_KEYS - f.max_q_len:
        f.window = 0
    return f


def why_not(f: SimpleNamespace, backend: str) -> str | None:
    """Why `backend` cannot run a call with these facts; None: it can."""
    f = as_taken(f, backend)
    if not _has(backend, f.op):
        return f"has no {f.op}"
    reason = _of_all(backend, "why_not", f) or broken(f, backend)
    if reason is not None:
        return reason
    module = _module(backend, f.op)
    assert module is not None
    return refusal(f, module)


def as_taken(f: SimpleNamespace, backend: str) -> SimpleNamespace:
    """The facts, as of the operation whose kernels are asked: a decode of many rows is a prefill, if these take it.

    Without a mask both compute the same. A request's bound alone does not say that there are many: it may be all rows.
    Who asks for the same bits beside any requests gets decode's: how many rows there are is those others' doing too.
    """
    if (
        f.op != "decode"
        or f.batch_invariant
        or f.mask is not None
        or backend not in _OF_MANY_ROWS
        or not f.k_cache.shape[2]
    ):
        return f
    group = f.q.shape[1] // f.k_cache.shape[2]
    tokens, requests = f.q.shape[0], f.seq_lens.shape[0]
    if tokens <= requests or tokens * group < _ON_AVERAGE * requests:
        return f
    if f.max_q_len * group <= _MOST_ROWS and refusal(f, _module(backend, f.op)) is None:
        return f
    facts = {n: x for n, x in vars(f).items() if n != "mask"} | {"op": "prefill", "k": None, "v": None}
    many = SimpleNamespace(**facts)
    return many if refusal(many, _module(backend, "prefill")) is None else f


def refusal(f: SimpleNamespace, module: Any) -> str | None:
    """Why an operation's file of a backend cannot run a call: its `why_not`, and before that what the cache has or the
    call asks for and the file does not say it takes, which its kernels would overlook."""
    lacking = [x for x in attributes.wanted(f) if x not in getattr(module, "TAKES", ())]
    if lacking and not isinstance(module, _Absent):
        return f"takes no {lacking[0]} yet"
    return module.why_not(f)


def broken(f: SimpleNamespace, backend: str) -> str | None:
    """Why kernels of `backend` that are made for this device are off; None: they are not, or there are none."""
    return _of_all(backend, "broken", f) if _has(backend, f.op) else None


def doors_of(op: str, kind: str) -> tuple[str, ...]:
    """The backends that a call on a device of this kind tries if it names none, in order: those with a file for it."""
    return tuple(name for name in _AUTO.get(kind, ("torch",)) if _has(name, op))


def forget_scratch(side_streams: bool = False) -> None:
    """Let this thread's next call allocate scratch that GPU backends keep between calls.

    side_streams:  only where it runs on another than the default stream
    """
    kept = sys.modules.get(f"{__package__}.backends.host.launch")  # not loaded: nothing is kept
    if kept is not None:
        kept.forget_scratch(side_streams)


def _make(op: str, call: tuple, backend: str | None, arch: int | None) -> Plan:
    checks.types(CALLS[op][0], call)
    f = facts(op, call, arch)
    checks.facts(f)
    wanted = env.backend() if backend is None else backend
    if wanted is not None and wanted not in BACKENDS:
        name = "TERSEKV_BACKEND" if backend is None else "backend"
        raise ValueError(f"{name}: want one of {', '.join(BACKENDS)}, got {wanted!r}")
    kind = "cuda" if arch is not None else f.device.type
    if kind == "meta":
        return Plan("meta", _nothing, None, None)
    doors = (wanted,) if wanted else doors_of(op, kind)
    reasons: list[str] = []
    for name in doors:
        taken = as_taken(f, name)
        reason = why_not(taken, name)
        if not wanted and (off := broken(taken, name)) is not None:
            _warn(f"{op}: {name} is off, slower kernels run: it {off}")
        if reason is None:
            module = _module(name, taken.op)
            assert module is not None
            index = f.device.index if f.device.type == "cuda" and torch.cuda.device_count() > 1 else None
            if _log.isEnabledFor(logging.DEBUG):
                passed_over = "; ".join(["", *map(str.strip, reasons)])
                _log.debug("%s %s on %s: %s%s", op, _describe(f), _where(f), name, passed_over)
            return Plan(name, module.run, module.configure(taken), index, getattr(module, "bind", None))
        reasons.append(f"  {name}: {reason}")
    if not wanted and kind == "cuda":
        reasons.append("  torch: can be asked for by name (backend='torch'); it is the slow reference")
    raise UnsupportedError("\n".join([f"{op} has no backend for {_describe(f)} on {_where(f)}", *reasons]))


def _warn(text: str) -> None:
    """Once; or raise, if the environment says so."""
    if env.strict():
        raise UnsupportedError(f"{text} (TERSEKV_STRICT is set)")
    if text not in _told:
        _told.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _nothing(call: Any, config: Any) -> None:
    """What there is to run for tensors that have shapes only."""


def _describe(f: SimpleNamespace) -> str:
    names = ("q", "k", "k_rope", "q_nope", "kv_c", "outs")
    parts = [f"{n}={list(getattr(f, n).shape)}" for n in names if getattr(f, n, None) is not None]
    return " ".join([*parts, getattr(f, "format", "")]).strip()


def _where(f: SimpleNamespace) -> str:
    return f"sm_{f.arch}" if f.arch else f.device.type


def _of_all(backend: str, question: str, f: SimpleNamespace) -> str | None:
    """What the backend's package answers for all its operations: one has to answer only for what is its own."""
    answer = getattr(_module(backend), question, None)
    return None if answer is None else answer(f)


@cache
def _has(backend: str, op: str) -> bool:
    room = Path(__file__).parent / "backends" / backend / op
    return room.with_suffix(".py").exists() or (room / "__init__.py").exists()


@cache
def _module(backend: str, op: str | None = None) -> ModuleType | None:
    """The file or folder of an operation; the backend's package without one."""
    name = f"{__package__}.backends.{backend}" + (f".{op}" if op else "")
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


def _fact(x: Any) -> Any:
    if isinstance(x, Tensor):
        at = 0 if isinstance(x, FakeTensor) else x.data_ptr()  # a fake one has no address
        return TensorFact(x.dtype, tuple(x.shape), _stride(x), at & 15 == 0, x.device, x.is_neg(), at & 1 == 0)
    return x


def _stride(x: Tensor) -> tuple[int, ...]:
    """Strides; those that a contiguous tensor usually has, whatever it says of dimensions of one element."""
    if not x.is_contiguous():
        return x.stride()
    strides, step = [], 1
    for n in reversed(x.shape):
        strides.append(step)
        step *= max(n, 1)
    return tuple(reversed(strides))
