"""Errors of tersekv's own. A wrong argument raises ValueError or TypeError; these two say more."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """The call is valid, but no backend can run it here. The message lists every door that was tried."""


class OutOfPagesError(RuntimeError):
    """A page pool has too few free pages. The pool is as it was before the call."""
