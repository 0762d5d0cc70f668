"""append: quantise new rows and write them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor

from tersekv.formats import kv_format

from .exact import exact
from .place import Places, place, write
from .quantize import encode, values, why_no_codec


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec(kv_format(f.format))


def configure(f: SimpleNamespace) -> None:
    return None


@exact
def run(call: Any, config: None) -> None:
    if call.k.shape[0] == 0:
        return
    num_pages, page_size = call.k_cache.shape[:2]
    places = place(call, num_pages, page_size)
    if places is not None:
        write_kv(call, values(call.k), values(call.v), places)


def write_kv(call: Any, k: Tensor, v: Tensor, places: Places) -> None:
    """Quantise k [T, H, D] and v [T, H, Dv], both fp32 or codes, and write codes and scales to the caches of `call`."""
    f = kv_format(call.format)
    sides = (
        (k, call.k_cache, call.k_scale_cache, call.k_scale, call.k_scale_t),
        (v, call.v_cache, call.v_scale_cache, call.v_scale, call.v_scale_t),
    )
    for x, cache, scale_cache, scale, scale_t in sides:
        codes, scales = encode(x, f, scale, scale_t, call.scales_quantize, getattr(call, "widen", True))
        write(cache, codes, places)
        if scales is not None:
            write(scale_cache, scales, places)
