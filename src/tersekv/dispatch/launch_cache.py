"""Cache of eager launches: look a repeated call up, fill in addresses, launch.

A call hits if its options are equal to an earlier call's, and its tensors agree in everything that a plan may depend
on. Its checks and plan are then known; only addresses are new: those of inputs, of outputs that the call allocates, and
of views of these (columns of q, say). A miss goes through records, checks and `plan`, and is inserted if its backend
can `bind` launches to addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import env
from ..calls import CALLS
from ..tracing import tracing
from . import kernel_errors
from .plan import Plan
from .signature import FIELD_GETTERS, TENSOR_FIELDS, TensorSignature, repeats_of

_MAX_TRIED = 4  # entries with equal options that are tried in order
_MAX_CALLS = 16384  # a layer with its own scales has its own entry; beyond this the cache is cleared
_NO_TENSORS: Mapping[str, Any] = {}


class CallSignature(NamedTuple):
    """A call as the caller passed it, before it becomes a record.

    options: everything that is no tensor, hashable; equal options and matching tensors must mean equal calls
    inputs:  tensors in the order of the record's; None where absent, or allocated by the operation
    outputs: undivided outputs, by the record's field that begins at the same address; those among `inputs` are ignored
    views:   field → the field of `inputs` or `outputs` of which it is a view
    """

    options: tuple
    inputs: tuple[Tensor | None, ...]
    outputs: Mapping[str, Tensor] = _NO_TENSORS
    views: Mapping[str, str] = _NO_TENSORS


class _CachedLaunch:
    """A launch of an earlier call, bound to everything but addresses."""

    __slots__ = ("_context", "_device_index", "_launch", "_output_templates", "_signature", "_views")

    def __init__(
        self, tensor_signature: TensorSignature, output_templates: list[Tensor], views: list[tuple[int, int]],
        launch: Any, plan: Plan,
        op: str, format: str | None,
    ) -> None:  # fmt: skip
        self._signature, self._output_templates, self._views = tensor_signature, output_templates, views
        self._launch, self._device_index = launch, plan.device_index
        self._context = op, plan.backend, format

    def matches(self, inputs: tuple[Tensor | None, ...]) -> bool:
        return self._signature.matches(inputs)

    def __call__(self, inputs: tuple[Tensor | None, ...]) -> list[Tensor] | None:
        addresses = self._signature.addresses(inputs)
        if addresses is None:
            return None
        outputs = []
        for template in self._output_templates:
            x = torch.empty_like(template)
            outputs.append(x)
            addresses.append(x.data_ptr())
        for i, offset in self._views:
            addresses.append(addresses[i] + offset)
        try:
            if self._device_index is not None and self._device_index != torch._C._cuda_getDevice():
                with torch.cuda.device(self._device_index):
                    return outputs if self._launch(addresses) else None
            return outputs if self._launch(addresses) else None
        except Exception as e:
            kernel_errors.raise_kernel_error(e, *self._context, inputs)


_recent: dict[tuple, list[_CachedLaunch]] = {}  # by operation and options, latest first
_launches: dict[tuple, _CachedLaunch] = {}  # by (operation, options), repeated tensors, and shapes


def lookup(op: str, options: tuple, inputs: tuple[Tensor | None, ...]) -> list[Tensor] | None:
    """Launch the call if it is cached. Returns the outputs it allocated, in the order of the record; None: a miss."""
    if tracing() or env.checked():  # make_fx traces real tensors, which look like any others
        return None
    key = op, options
    try:
        recent: Sequence[_CachedLaunch] = _recent.get(key, ())
    except TypeError:  # an unhashable option has the wrong type: the checks name it
        return None
    for cached in recent:
        outputs = cached(inputs)
        if outputs is not None:
            if cached is not recent[0]:
                _move_to_front(key, cached)
            return outputs
    stored = _launches.get(_full_key(key, inputs))
    outputs = None if stored is None else stored(inputs)
    if outputs is not None:
        _move_to_front(key, stored)
    return outputs


def _move_to_front(key: tuple, cached: Any) -> None:
    _recent[key] = [cached, *(x for x in _recent.get(key, ()) if x is not cached)][:_MAX_TRIED]


def _full_key(key: tuple, inputs: tuple[Tensor | None, ...]) -> tuple:
    return key, repeats_of(inputs), *(getattr(x, "shape", None) for x in inputs)


def _is_captured(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def insert(op: str, signature: CallSignature, call: tuple, plan: Plan) -> None:
    """Cache a call that missed, for later calls that match it."""
    if plan.bind is None:
        return
    key = op, signature.options
    full_key = _full_key(key, signature.inputs)
    if full_key in _launches and _launches[full_key].matches(signature.inputs):
        return  # cached already: its launch declined this one call
    names, (tensors_of, _) = TENSOR_FIELDS[op], FIELD_GETTERS[op]
    tensors = {n: x for n, x in zip(names, tensors_of(call), strict=True) if x is not None}
    if _is_captured(next(iter(tensors.values()))):
        return  # called once, and must keep no memory of the graph's pool
    inputs = {n: x for n, x in zip(names, signature.inputs, strict=True) if x is not None}
    if any(x.requires_grad for n, x in inputs.items() if n in CALLS[op][1]):
        return  # each call must check whether autograd would track it
    outputs = {n: x for n, x in signature.outputs.items() if n not in inputs}
    # A cached launch cannot reproduce tensors that the operation drops, copies, or takes from elsewhere.
    if any(n not in tensors or tensors[n].data_ptr() != x.data_ptr() for n, x in (inputs | outputs).items()):
        return
    first = {names[i]: names[of] for i, of in repeats_of(signature.inputs)}
    bases = {n: x for n, x in (inputs | outputs).items() if n not in first}
    views = first | {n: first.get(of, of) for n, of in signature.views.items() if n in tensors}
    if tensors.keys() - bases.keys() - views.keys() or not outputs.keys() <= set(CALLS[op][1]):
        return
    positions = {name: i for i, name in enumerate((*bases, *views))}
    offsets = [(positions[of], tensors[n].data_ptr() - bases[of].data_ptr()) for n, of in views.items()]
    # A one-element template per output: `empty_like` of it is dense.
    output_templates = [torch.empty(1, dtype=x.dtype, device=x.device).expand(x.shape) for x in outputs.values()]
    launch = plan.bind(plan.config, positions) if all(x.is_contiguous() for x in outputs.values()) else None
    if launch is None:
        return
    if len(_launches) >= _MAX_CALLS:
        _launches.clear()
        _recent.clear()
    _launches[full_key] = cached = _CachedLaunch(
        TensorSignature(signature.inputs), output_templates, offsets, launch, plan, op, getattr(call, "format", None)
    )  # fmt: skip
    _move_to_front(key, cached)
