"""rope_append: rotates queries and keys, quantizes, and stores keys and values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tersekv.formats import CHANNELS, PAIRS, ROTATION

from .append import rotate_quantize_and_scatter_kv, why_no_codec_pair
from .exact import without_grad_and_autocast
from .quantize import cast_rounded, quantizing_multiplier
from .rope import apply_rope, lookup_cos_sin_and_validity
from .slots import mask_of_negative_index_tokens, tokens_pages_and_slots_to_write

SUPPORTS = (PAIRS, ROTATION, CHANNELS)


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec_pair(f)


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    if call.k_rope.shape[0] == 0:
        return
    cos, sin, known = lookup_cos_sin_and_validity(call.cos_sin_cache, call.positions)
    store_roped_scaled_or_zero_queries(call, cos, sin, known)
    num_pages, page_size = call.k_cache.shape[:2]
    slots = tokens_pages_and_slots_to_write(call, num_pages, page_size, known)
    if slots is None:
        return
    k = apply_rope(call.k_rope.to(torch.float32), cos, sin, call.interleaved)
    if call.k_nope is not None:
        k = torch.cat((k, call.k_nope.to(torch.float32)), -1)
    rotate_quantize_and_scatter_kv(call, k, call.v.to(torch.float32), slots)


def store_roped_scaled_or_zero_queries(
    call: Any, cos: Tensor | None, sin: Tensor | None, has_position: Tensor | None
) -> None:
    """Store q_rope_out and q_nope_out of `call`: rotated (the former), scaled, cast.

    Rows are 0 if the token has no position (`has_position` [T]) and, with `zero_padding`, if the token is skipped by a
    negative index. cos, sin [T, R/2] and `has_position` are None without rotation.
    """
    zero = None if has_position is None else ~has_position
    if call.zero_padding:
        zero = mask_of_negative_index_tokens(call) if zero is None else zero | mask_of_negative_index_tokens(call)
    for x, out, rotary in ((call.q_rope, call.q_rope_out, True), (call.q_nope, call.q_nope_out, False)):
        if x is None:
            continue
        y = x.to(torch.float32)
        if rotary:
            assert cos is not None
            assert sin is not None
            y = apply_rope(y, cos, sin, call.interleaved)
        y = y * quantizing_multiplier(call.q_scale, call.q_scale_t, call.scales_quantize)
        if zero is not None:
            y = y.masked_fill(zero[:, None, None], 0.0)
        out.copy_(cast_rounded(y, out.dtype))
