"""Paged prefill in Triton."""

from .entry import bind, configure, run, why_not

__all__ = ["bind", "configure", "run", "why_not"]
