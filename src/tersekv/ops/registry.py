"""Every operation as a registered `torch.library` operator: tersekv::append, tersekv::decode, …

Eager calls go straight to the dispatcher of `plan`; under torch.compile, torch.export, make_fx and FakeTensorMode the
call becomes the registered operator, which does the same. All operators write into arguments and return nothing, so
the fake implementation has nothing to shape: it checks.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable

import torch
from torch import Tensor

from .. import checks
from ..calls import CALLS
from ..plan import dispatch, facts, forget_scratch
from ..recall import Way, remember
from ..tracing import tracing
from .scales import reciprocal

_SCHEMA_NAMES = {Tensor: "Tensor", str: "str", int: "SymInt", float: "float", bool: "bool"}


def schema(op: str) -> str:
    """The operator's schema, from the annotations of its call record."""
    record, written = CALLS[op]
    args = []
    for i, (name, hint) in enumerate(typing.get_type_hints(record).items()):
        optional = isinstance(hint, types.UnionType)
        base = typing.get_args(hint)[0] if optional else hint
        kind = "SymInt[]" if typing.get_origin(base) is list else _SCHEMA_NAMES[base]
        if name in written:
            kind += f"(a{i}!)"
        args.append(f"{kind}{'?' if optional else ''} {name}")
    args.append("str? backend")
    if "scales_quantize" in record._fields:  # type: ignore[attr-defined]
        args.append("bool floats_dequantise=False")
    return f"{op}({', '.join(args)}) -> ()"


def _call_of(op: str, flat: tuple) -> tuple[typing.Any, str | None]:
    """The record and the backend that an operator's arguments are. With `floats_dequantise` its float scales become
    what an append multiplies with: while torch traces they may be symbols, which have no fp32 value yet."""
    record = CALLS[op][0]
    n = len(record._fields)  # type: ignore[attr-defined]
    call, backend, dequantise = record(*flat[:n]), flat[n], flat[n + 1 :] == (True,)
    if dequantise:
        scales = [name for name in ("q_scale", "k_scale", "v_scale", "kv_scale") if hasattr(call, name)]
        call = call._replace(**{name: reciprocal(getattr(call, name), name) for name in scales})  # type: ignore[attr-defined]
    return call, backend


def _implementation(op: str) -> Callable[..., None]:
    def run(*flat: object) -> None:
        dispatch(op, *_call_of(op, flat))
        # torch.compile warms its CUDA graphs up beside the default stream, in memory that they get back.
        forget_scratch(side_streams=True)

    return run


def _fake(op: str) -> Callable[..., None]:
    record, _ = CALLS[op]

    def check(*flat: object) -> None:
        if not any(map(_symbolic, flat)):  # symbols would be bound by comparisons; the run checks such a call
            call, _ = _call_of(op, flat)
            checks.types(record, call)
            checks.facts(facts(op, call, arch=0))  # of no chip: no backend is asked

    return check


def _symbolic(x: object) -> bool:
    """Whether a number, or a size of a tensor, is not known yet."""
    numbers = (*x.shape, *x.stride()) if isinstance(x, Tensor) else x if isinstance(x, (list, tuple)) else (x,)
    return any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in numbers)


_library = torch.library.Library("tersekv", "DEF")
for _op in CALLS:
    _library.define(schema(_op))
    _library.impl(_op, _implementation(_op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tersekv::{_op}", _fake(_op), lib=_library)


def same_place(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two tensors begin with the same element; of tensors that may have no memory this is unknown: False."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or tracing() or a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() == b.data_ptr() != 0


def submit(op: str, call: tuple, backend: str | None, way: Way | None = None) -> None:
    """Run a call: eagerly, or as the registered operator where torch is tracing.

    way: to remember an eager call by, for `recall.again`
    """
    if tracing():
        # An append's scales are as `scales.multiplier` leaves them, but for a call in FlashInfer's terms.
        dequantise = (True,) if getattr(call, "scales_quantize", None) is False else ()
        getattr(torch.ops.tersekv, op)(*call, backend, *dequantise)
        return
    plan = dispatch(op, call, backend)
    if way is not None:
        remember(op, way, call, plan)
