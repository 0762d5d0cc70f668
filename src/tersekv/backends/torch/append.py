"""append: quantizes new rows and stores them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tersekv.formats import CHANNELS, PAIRS, ROTATION, pair_of

from . import rotation
from .exact import without_grad_and_autocast
from .quantize import as_quantizer_input, quantize_to_codes_and_scales, why_no_codec
from .slots import TokensPagesAndSlots, scatter_rows, tokens_pages_and_slots_to_write

SUPPORTS = (PAIRS, ROTATION, CHANNELS)


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec_pair(f)


def why_no_codec_pair(f: SimpleNamespace) -> str | None:
    k, v = (why_no_codec(fmt) for fmt in pair_of(f))
    return k or v


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    if call.k.shape[0] == 0:
        return
    num_pages, page_size = call.k_cache.shape[:2]
    slots = tokens_pages_and_slots_to_write(call, num_pages, page_size)
    if slots is not None:
        rotate_quantize_and_scatter_kv(call, as_quantizer_input(call.k), as_quantizer_input(call.v), slots)


def rotate_quantize_and_scatter_kv(
    call: Any, k: Tensor, v: Tensor, tokens_pages_and_slots: TokensPagesAndSlots
) -> None:
    """Store k [T, H, D] and v [T, H, Dv], both fp32 or codes, in the caches of `call`: codes and scales."""
    if call.k_signs is not None or call.k_channel_scale is not None:
        k = rotation.divide_by_channel_scale_and_rotate(k, call.k_signs, call.k_channel_scale)
    if call.v_signs is not None or call.v_channel_scale is not None:
        v = rotation.divide_by_channel_scale_and_rotate(v, call.v_signs, call.v_channel_scale)
    k_format, v_format = pair_of(call)
    sides = (
        (k, k_format, call.k_cache, call.k_scale_cache, call.k_scale, call.k_scale_t),
        (v, v_format, call.v_cache, call.v_scale_cache, call.v_scale, call.v_scale_t),
    )
    for x, f, cache, scale_cache, scale, scale_t in sides:
        codes, scales = quantize_to_codes_and_scales(
            x, f, scale, scale_t, call.scales_quantize, getattr(call, "widen", True)
        )
        scatter_rows(cache, codes, tokens_pages_and_slots)
        if scales is not None:
            scatter_rows(scale_cache, scales, tokens_pages_and_slots)
