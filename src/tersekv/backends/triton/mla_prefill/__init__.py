"""MLA prefill in Triton, in stages."""

from .entry import bind, configure, run, why_not

__all__ = ["bind", "configure", "run", "why_not"]
