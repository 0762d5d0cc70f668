"""Paged prefill in Triton."""

from .entry import SUPPORTS, bind, configure, run, why_not

__all__ = ["SUPPORTS", "bind", "configure", "run", "why_not"]
