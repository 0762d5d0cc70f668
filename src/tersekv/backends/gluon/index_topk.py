"""index_topk on Hopper: the launches of the portable one, of kernels that count in histograms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from ..host.bind import LaunchSequence
from ..triton import index_topk as portable
from ..triton.parts.index_topk import Kernels

_MAX_SPLIT = 16384
_KEPT_PER_TAKEN = 1
_KEYS_PER_THREAD = 16
_OPTIONS: dict[str, Any] = {"launch_pdl": True, "maxnreg": 64}  # with 1024 threads a program fills an SM

why_not, run, bind = portable.why_not, portable.run, portable.bind


def configure(f: SimpleNamespace) -> LaunchSequence:
    return portable.configure(f, hopper_kernels())


def hopper_kernels() -> Kernels:
    from .sm90.parts.index_topk import index_candidates_kernel, index_topk_kernel

    kernels = index_candidates_kernel, index_topk_kernel
    return Kernels(*kernels, _num_warps, _MAX_SPLIT, _KEPT_PER_TAKEN, constants={}, options=_OPTIONS)


def _num_warps(columns: int) -> int:
    """Returns the warps of a program that holds so many columns."""
    return max(columns // (_KEYS_PER_THREAD * 32), 4)
