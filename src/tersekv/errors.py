"""Errors of tersekv's own. A wrong argument raises ValueError or TypeError; these say more."""

from __future__ import annotations


class UnsupportedError(RuntimeError):
    """The call is valid, but no backend can run it here. The message says why each backend refused.

    >>> tersekv.decode(q, cache[0], page_table, seq_lens, backend="gluon")
    Traceback (most recent call last):
    tersekv.errors.UnsupportedError: decode has no backend for q=[2, 8, 64] fp8_e4m3 on cpu
      gluon: needs sm_90, got cpu
    """


class OutOfPagesError(RuntimeError):
    """A page pool has too few free pages. The pool is as it was before the call.

    >>> tersekv.PagePool(num_pages=4, page_size=16).add("a", num_tokens=100)
    Traceback (most recent call last):
    tersekv.errors.OutOfPagesError: want 7 free pages, got 4 of 4
    """


class KernelError(RuntimeError):
    """A kernel of a valid call could not be compiled, loaded or launched.

        >>> try:
        ...     out = tersekv.decode(q, cache[0], page_table, seq_lens)
        ... except tersekv.KernelError:
        ...     out = tersekv.decode(q, cache[0], page_table, seq_lens, backend="torch")

    The message names the operation, the facts of the call, the kernel, the versions, the first line of the compiler's
    or the driver's error, which is the `__cause__`, and what to try.
    """
