"""rope_append: rotate queries and keys, quantise, and write keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tersekv.formats import CHANNELS, PAIRS, ROTATION

from .append import why_no_codecs, write_kv
from .exact import exact
from .place import padding, place
from .quantize import cast, multiplier
from .rope import lookup, rotate

TAKES = (PAIRS, ROTATION, CHANNELS)


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codecs(f)


def configure(f: SimpleNamespace) -> None:
    return None


@exact
def run(call: Any, config: None) -> None:
    if call.k_rope.shape[0] == 0:
        return
    cos, sin, known = lookup(call.cos_sin_cache, call.positions)
    write_queries(call, cos, sin, known)
    num_pages, page_size = call.k_cache.shape[:2]
    places = place(call, num_pages, page_size, known)
    if places is None:
        return
    k = rotate(call.k_rope.to(torch.float32), cos, sin, call.interleaved)
    if call.k_nope is not None:
        k = torch.cat((k, call.k_nope.to(torch.float32)), -1)
    write_kv(call, k, call.v.to(torch.float32), places)


def write_queries(call: Any, cos: Tensor | None, sin: Tensor | None, known: Tensor | None) -> None:
    """q_rope_out and q_nope_out of `call`: rotated (the former), scaled, cast.

    Rows are 0 where the position is not `known` [T] and, with `zero_padding`, where the token is skipped by a
    negative index. cos, sin [T, R/2] and `known` are None where there is nothing to rotate.
    """
    zero = None if known is None else ~known
    if call.zero_padding:
        zero = padding(call) if zero is None else zero | padding(call)
    for x, out, rotary in ((call.q_rope, call.q_rope_out, True), (call.q_nope, call.q_nope_out, False)):
        if x is None:
            continue
        y = x.to(torch.float32)
        if rotary:
            assert cos is not None
            assert sin is not None
            y = rotate(y, cos, sin, call.interleaved)
        y = y * multiplier(call.q_scale, call.q_scale_t, call.scales_quantize)
        if zero is not None:
            y = y.masked_fill(zero[:, None, None], 0.0)
        out.copy_(cast(y, out.dtype))
