"""Errors of tersekv's own. A wrong argument raises ValueError or TypeError; these say more."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """The call is valid, but no backend can run it here. The message lists every door that was tried."""


class OutOfPagesError(RuntimeError):
    """A page pool has too few free pages. The pool is as it was before the call."""


class KernelError(RuntimeError):
    """A kernel of a valid call could not be compiled, loaded or launched.

    The message names the operation, the facts of the call, the kernel, the versions, the first line of the compiler's
    or the driver's error, which is the `__cause__`, and what to try.
    """
