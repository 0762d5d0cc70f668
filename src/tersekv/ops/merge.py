"""Merging of partial attention results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..calls import MergeCall
from ..dispatch.checks import tensor
from ..dispatch.launch_cache import CallSignature, lookup
from .registry import dispatch_call


def merge_states(
    outs: Tensor | Sequence[Tensor],
    lses: Tensor | Sequence[Tensor],
    *,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention results over disjoint sets of keys: lse = logsumexp(lses), out = Σ exp(lse_i − lse) · out_i.

        >>> outs, lses = torch.randn(3, 2, 8, 64), torch.randn(3, 2, 8)  # three parts of two rows
        >>> out, lse = tersekv.merge_states(outs, lses)
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 64]), torch.Size([2, 8]))

        outs:  [n, T, H, D] bf16 | fp16 | fp32, or a list of n tensors [T, H, D]
        lses:  [n, T, H] fp32, natural log, or a list; a part with −inf is ignored, whatever its values
        out:   [T, H, D] to write into, or outs[0] itself; default: a new tensor in outs' dtype
        lse:   [T, H] fp32 likewise, in memory of its own

    Computed in fp32. All parts empty: out 0, lse −inf. Returns (out, lse). Raises ValueError for shapes that differ.
    """
    outs, lses = _stacked("outs", outs, "n T H D"), _stacked("lses", lses, "n T H")
    options, inputs = (backend,), (outs, lses, out, lse)
    cached = lookup("merge_states", options, inputs)
    if cached is not None:
        return cached[0] if out is None else out, cached[-1] if lse is None else lse

    _, t, heads, d = outs.shape
    if out is None:
        out = torch.empty(t, heads, d, dtype=outs.dtype, device=outs.device)
    if lse is None:
        lse = torch.empty(t, heads, dtype=torch.float32, device=outs.device)
    dispatch_call(
        "merge_states", MergeCall(outs, lses, out, lse), backend,
        CallSignature(options, inputs, {"out": out, "lse": lse}),
    )  # fmt: skip
    return out, lse


def _stacked(name: str, parts: Tensor | Sequence[Tensor], pattern: str) -> Tensor:
    """Returns the parts as one tensor with the shape of `pattern`."""
    if isinstance(parts, (tuple, list)):
        if not parts:
            raise ValueError(f"{name}: want at least one part, got none")
        for part in parts:
            tensor(name, part, pattern.removeprefix("n "))
            if (part.shape, part.dtype, part.device) != (parts[0].shape, parts[0].dtype, parts[0].device):
                kinds = [f"{list(p.shape)} {p.dtype} on {p.device}" for p in (parts[0], part)]
                raise ValueError(f"{name}: want parts alike, got {kinds[0]} and {kinds[1]}")
        parts = torch.stack(list(parts))
    tensor(name, parts, pattern)
    assert isinstance(parts, Tensor)
    return parts
