"""What the functions of indexers share, whoever signed them: scores, selections and pages in one launch each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import env
from ..calls import IndexTopkCall
from ..ops.registry import dispatch_call
from ..tracing import tracing
from ._adapt import lookup_cached, with_caller_names

_NOTHING: Mapping[str, str] = {}


def launched(
    names: Mapping[str, str],
    op: str,
    options: tuple,
    inputs: tuple,
    make: Callable[[], tuple[Any, dict[str, Tensor]]],
    views: Mapping[str, str] = _NOTHING,
) -> list[Tensor]:
    """What a call made: by the launch cache, or of the record that `make` returns with its new outputs by name."""
    signature, found = lookup_cached(names, op, options, inputs, views)
    if found is not None:
        return found
    call, outputs = make()
    with_caller_names(names, dispatch_call, op, call, None, signature._replace(outputs=outputs))
    return list(outputs.values())


def take_largest(
    names: Mapping[str, str],
    options: tuple,
    scores: Tensor,
    visible: Tensor,
    starts: Tensor | None,
    out: Tensor,
    k: int,
) -> None:
    """`index_topk` into out [T, k]."""
    launched(
        names, "index_topk", (*options, k), (scores, visible, None, out, None, starts),
        lambda: (IndexTopkCall(scores, visible, None, out, None, k, 0, 0, starts), {}),
    )  # fmt: skip


def where_inside(known: Tensor, x: Tensor, end: int, want: str, rows_of: str) -> Tensor:
    """Where x is known and in [0, end). On a CPU and in checked mode all that is known has to be, unless torch traces.

    rows_of: the argument whose rows these are
    """
    inside = known & (x >= 0) & (x < end)
    if not tracing() and (x.device.type == "cpu" or env.checked()) and not torch.equal(inside, known):
        at = tuple((known & ~inside).nonzero()[0].tolist())
        raise ValueError(f"{want}, got {int(x[at])} for row {at[0]} of {rows_of}")
    return inside
