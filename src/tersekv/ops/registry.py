"""Every operation as a registered `torch.library` operator: tersekv::append, tersekv::decode, …

Eager calls go straight to `plan.dispatch`; under torch.compile, torch.export, make_fx and FakeTensorMode the call
becomes the registered operator, which does the same. Operators write to arguments and return nothing, so the fake
implementation only checks.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable

import torch
from torch import Tensor

from ..calls import CALLS
from ..dispatch import checks, type_checks
from ..dispatch.launch_cache import CallSignature, insert
from ..dispatch.plan import dispatch, facts, release_workspace
from ..tracing import tracing
from .scales import reciprocal

_SCHEMA_NAMES = {Tensor: "Tensor", str: "str", int: "SymInt", float: "float", bool: "bool"}


def schema(op: str) -> str:
    """Returns the operator's schema, from the annotations of its call record."""
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
    """Returns the record and the backend of an operator's arguments. With `floats_dequantise` float scales are inverted
    to multipliers here: while torch traces they may be symbols, which have no fp32 value yet."""
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
        # torch.compile warms up its CUDA graphs on a side stream, in a pool that it frees.
        release_workspace(side_streams=True)

    return run


def _fake(op: str) -> Callable[..., None]:
    record, _ = CALLS[op]

    def check(*flat: object) -> None:
        if not any(map(_is_symbolic, flat)):  # comparisons would specialise symbols; `run` checks such a call
            call, _ = _call_of(op, flat)
            type_checks.types(record, call)
            checks.facts(facts(op, call, arch=0))  # no chip: no backend is selected

    return check


def _is_symbolic(x: object) -> bool:
    """Returns whether a number, or a size of a tensor, is symbolic."""
    numbers = (*x.shape, *x.stride()) if isinstance(x, Tensor) else x if isinstance(x, (list, tuple)) else (x,)
    return any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in numbers)


_library = torch.library.Library("tersekv", "DEF")
for _op in CALLS:
    _library.define(schema(_op))
    _library.impl(_op, _implementation(_op), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tersekv::{_op}", _fake(_op), lib=_library)


def same_address(a: Tensor | None, b: Tensor | None) -> bool:
    """Returns whether two tensors begin at the same address; False for tensors that may have no memory."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or tracing() or a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() == b.data_ptr() != 0


def dispatch_call(op: str, call: tuple, backend: str | None, signature: CallSignature | None = None) -> None:
    """Run a call: eagerly, or as the registered operator where torch is tracing.

    signature: key of an eager call for `launch_cache.insert`; None: not cached
    """
    if tracing():
        # While tracing, `scales.multiplying_scale` leaves an append's scales dequantising; FlashInfer's quantise.
        dequantise = (True,) if getattr(call, "scales_quantize", None) is False else ()
        getattr(torch.ops.tersekv, op)(*call, backend, *dequantise)
        return
    plan = dispatch(op, call, backend)
    if signature is not None:
        insert(op, signature, call, plan)
