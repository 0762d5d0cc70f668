"""index_topk on Hopper: the launches of the portable one, of kernels that count in histograms."""

from __future__ import annotations

from types import SimpleNamespace

from ..host.bind import LaunchSequence
from ..triton import index_topk as portable
from .sm90.parts.index_topk import hopper_kernels

why_not, run, bind = portable.why_not, portable.run, portable.bind


def configure(f: SimpleNamespace) -> LaunchSequence:
    return portable.configure(f, hopper_kernels())
