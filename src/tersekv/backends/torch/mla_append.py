"""mla_append: rotates queries and rotary keys, quantizes latents, and stores latent rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tersekv.formats import FP8, TENSOR, latent_format, rope_dtype

from .exact import without_grad_and_autocast
from .quantize import (
    as_quantizer_input,
    cast_rounded,
    quantize_to_codes_and_scales,
    quantizing_multiplier,
    why_no_codec,
)
from .rope import apply_rope, lookup_cos_sin_and_validity
from .rope_append import store_roped_scaled_or_zero_queries
from .slots import scatter_rows, tokens_pages_and_slots_to_write


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec(latent_format(f.format))


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    if call.kv_c.shape[0] == 0:
        return
    k_pe, cos, sin, known = None if call.k_pe is None else as_quantizer_input(call.k_pe), None, None, None
    if k_pe is not None and call.cos_sin_cache is not None:
        cos, sin, known = lookup_cos_sin_and_validity(call.cos_sin_cache, call.positions)
        k_pe = apply_rope(k_pe, cos, sin, call.interleaved)
    store_roped_scaled_or_zero_queries(call, cos, sin, known)
    num_pages, page_size = call.ckv.shape[:2]
    slots = tokens_pages_and_slots_to_write(call, num_pages, page_size, known)
    if slots is None:
        return
    f = latent_format(call.format)
    codes, scales = quantize_to_codes_and_scales(
        as_quantizer_input(call.kv_c), f, call.kv_scale, call.kv_scale_t, call.scales_quantize
    )
    scatter_rows(call.ckv, codes, slots)
    if scales is not None:
        scatter_rows(call.ckv_scale_cache, scales, slots)
    if k_pe is None:
        return
    # Only a per-tensor scale applies to the rotary part; group scales are the latent's alone.
    if f.scale == TENSOR and k_pe.dtype not in FP8:
        k_pe = k_pe * quantizing_multiplier(call.kv_scale, call.kv_scale_t, call.scales_quantize)
    scatter_rows(call.kpe, k_pe if k_pe.dtype in FP8 else cast_rounded(k_pe, rope_dtype(f)), slots)
