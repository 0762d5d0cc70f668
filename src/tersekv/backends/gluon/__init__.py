"""Gluon kernels for Hopper: hand-scheduled versions of operations whose portable kernels are in Triton."""

from __future__ import annotations

from types import SimpleNamespace

from ..host.launch import interpreting
from . import compiles


def why_not(f: SimpleNamespace) -> str | None:
    """Returns why the kernels here cannot run; None: they can."""
    if f.arch != 90:
        return f"needs sm_90, got {'sm_' + str(f.arch) if f.arch else f.device.type}"
    return "has no interpreter" if interpreting() else None


def why_disabled(f: SimpleNamespace) -> str | None:
    """Returns why this operation's kernels are off although they are made for the device; None: they are on."""
    return compiles.why_not(f.op) if why_not(f) is None else None
