"""index_select on Hopper: the portable scores, and the selection of Hopper's kernels."""

from __future__ import annotations

from types import SimpleNamespace

from ..host.bind import HostAction, LaunchSequence
from ..triton import index_select as portable
from .sm90.parts.index_topk import hopper_kernels

why_not, run, bind = portable.why_not, portable.run, portable.bind


def configure(f: SimpleNamespace) -> LaunchSequence | HostAction:
    return portable.configure(f, hopper_kernels())
