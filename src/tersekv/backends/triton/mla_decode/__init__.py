"""Paged MLA decode in Triton."""

from .entry import TAKES, bind, configure, run, why_not

__all__ = ["TAKES", "bind", "configure", "run", "why_not"]
