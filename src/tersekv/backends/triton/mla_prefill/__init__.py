"""MLA prefill in Triton, stage by stage."""

from .entry import bind, configure, run, why_not

__all__ = ["bind", "configure", "run", "why_not"]
