"""Hopper's kernels that take the largest scores, as two operations launch them."""

from __future__ import annotations

from typing import Any

from ..triton.parts.index_topk import Kernels

_MAX_SPLIT = 16384
_KEPT_PER_TAKEN = 1
_KEYS_PER_THREAD = 16
# 1024 threads fill an SM.
_OPTIONS: dict[str, Any] = {"launch_pdl": True, "maxnreg": 64}


def index_topk_kernels() -> Kernels:
    from .sm90.parts.index_topk import index_candidates_kernel, index_topk_kernel

    return Kernels(index_candidates_kernel, index_topk_kernel, _num_warps, _MAX_SPLIT, _KEPT_PER_TAKEN, {}, _OPTIONS)


def _num_warps(columns: int) -> int:
    """Returns the warps of a program that holds so many columns."""
    return max(columns // (_KEYS_PER_THREAD * 32), 4)
