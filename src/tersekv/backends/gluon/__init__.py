"""Gluon kernels for Hopper: hand-scheduled forms of operations whose portable kernels are in Triton."""

from __future__ import annotations

from types import SimpleNamespace

from ..host.launch import interpreting
from . import compiles


def why_not(f: SimpleNamespace) -> str | None:
    """What every kernel here needs; None: all of it is here."""
    if f.arch != 90:
        return f"needs sm_90, got {'sm_' + str(f.arch) if f.arch else f.device.type}"
    return "has no interpreter" if interpreting() else None


def broken(f: SimpleNamespace) -> str | None:
    """Why this operation's kernels are off though they are made for the device; None: they are not."""
    return compiles.why_not(f.op) if why_not(f) is None else None
