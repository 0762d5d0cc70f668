"""MLA prefill in Triton, stage by stage."""

from .entry import configure, run, why_not

__all__ = ["configure", "run", "why_not"]
