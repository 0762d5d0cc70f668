"""merge_states: combines partial attention results, weighted by the exponentials of their LSE."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from .exact import without_grad_and_autocast


def why_not(f: SimpleNamespace) -> str | None:
    return None


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    lses = call.lses
    shape = call.out.shape
    largest = lses.new_full(shape[:2], -torch.inf)
    for lse in lses:
        largest = torch.maximum(largest, lse)
    # If every part is empty, exp(−inf − 0) = 0 instead of exp(−inf + inf) = NaN.
    base = torch.where(largest == -torch.inf, 0.0, largest)
    total = torch.zeros_like(base)
    weighted = base.new_zeros(shape)
    for out, lse in zip(call.outs, lses, strict=True):
        weight = torch.exp(lse - base)
        total += weight
        # A part without visible keys may hold anything, NaN included.
        weighted += torch.where((lse == -torch.inf)[..., None], 0.0, weight[..., None] * out.to(torch.float32))
    # At least one part has weight 1, unless all are empty.
    call.out.copy_(weighted / torch.where(largest == -torch.inf, 1.0, total)[..., None])
    if call.lse is not None:
        call.lse.copy_(base + torch.log(total))
