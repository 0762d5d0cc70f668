"""mla_append: rotate queries and rotary keys, quantise latents, and write latent rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tersekv.formats import FP8, TENSOR, latent_format, rope_dtype

from .exact import exact
from .place import place, write
from .quantize import cast, encode, multiplier, values, why_no_codec
from .rope import lookup, rotate
from .rope_append import write_queries


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec(latent_format(f.format))


def configure(f: SimpleNamespace) -> None:
    return None


@exact
def run(call: Any, config: None) -> None:
    if call.kv_c.shape[0] == 0:
        return
    k_pe, cos, sin, known = values(call.k_pe), None, None, None
    if call.cos_sin_cache is not None:
        cos, sin, known = lookup(call.cos_sin_cache, call.positions)
        k_pe = rotate(k_pe, cos, sin, call.interleaved)
    write_queries(call, cos, sin, known)
    num_pages, page_size = call.ckv.shape[:2]
    places = place(call, num_pages, page_size, known)
    if places is None:
        return
    f = latent_format(call.format)
    codes, scales = encode(values(call.kv_c), f, call.kv_scale, call.kv_scale_t, call.scales_quantize)
    write(call.ckv, codes, places)
    if scales is not None:
        write(call.ckv_scale_cache, scales, places)
    # Only a scale of the tensor covers the rotary part; group scales are the latent's alone.
    if f.scale == TENSOR and k_pe.dtype not in FP8:
        k_pe = k_pe * multiplier(call.kv_scale, call.kv_scale_t, call.scales_quantize)
    write(call.kpe, k_pe if k_pe.dtype in FP8 else cast(k_pe, rope_dtype(f)), places)
