"""Hopper's kernels that take the largest scores, as two operations launch them."""

from __future__ import annotations

from ..triton.parts.index_topk import Kernels

_KEPT_PER_TAKEN = 1


def index_topk_kernels() -> Kernels:
    from .sm90.parts.index_topk import index_candidates_kernel, index_topk_kernel

    return Kernels(index_candidates_kernel, index_topk_kernel, _num_warps, _KEPT_PER_TAKEN, {}, {"launch_pdl": True})


def _num_warps(columns: int) -> int:
    """Returns the warps of a program that holds so many columns, 16 a thread."""
    return max(columns // (16 * 32), 4)
