"""Pages found by the tokens that they hold: one key a full page, of its tokens and of all before them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from torch import Tensor

from .scalars import as_int

Tokens = Tensor | Sequence[int]
_KEY_BYTES = 16


def token_ids(tokens: Tokens) -> array:
    """Token ids as 64-bit integers. TypeError: no 1-D list of integers."""
    if isinstance(tokens, Tensor):
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex():
            got = f"{list(tokens.shape)} {tokens.dtype}"
            raise TypeError(f"tokens: want a list of ints or an integer Tensor [n], got {got}")
        tokens = tokens.tolist()
    if not isinstance(tokens, Sequence) or isinstance(tokens, (str, bytes, bytearray)):
        raise TypeError(f"tokens: want a list of ints or an integer Tensor [n], got {type(tokens).__name__}")
    try:
        if {*map(type, tokens)} <= {int}:
            return array("q", tokens)
    except OverflowError:
        pass  # `as_int` says which
    return array("q", [as_int("tokens", token) for token in tokens])


def page_keys(ids: array, page_size: int) -> list[bytes]:
    """A key for each full page of these tokens. Pages with equal keys hold equal tokens behind equal tokens, but for a
    collision of BLAKE2b in 128 bits."""
    keys, key = [], b""
    for first in range(0, len(ids) - page_size + 1, page_size):
        key = blake2b(key + ids[first : first + page_size].tobytes(), digest_size=_KEY_BYTES).digest()
        keys.append(key)
    return keys
