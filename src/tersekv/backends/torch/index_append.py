"""index_append: norms, rotates and quantizes an indexer's keys, and stores them in its pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tersekv.formats import INDEX_BLOCK, index_format

from .exact import without_grad_and_autocast
from .index_rows import (
    layer_norm_in_fp64_to_fp32,
    quantize_index_rows_to_codes_and_scales_if_any,
    rope_hadamard_and_validity_of_tokens,
    round_if_round16,
)
from .slots import scatter_rows, tokens_pages_and_slots_to_write


def why_not(f: SimpleNamespace) -> str | None:
    return None


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    if call.k.shape[0] == 0:
        return
    x = call.k.float()
    if call.norm_weight is not None:
        x = round_if_round16(
            call, layer_norm_in_fp64_to_fp32(x, call.norm_weight, call.norm_bias, call.epsilon), call.k.dtype
        )
    x, known = rope_hadamard_and_validity_of_tokens(call, x, call.k.dtype)
    num_pages, page_size = call.k_cache.shape[:2]
    slots = tokens_pages_and_slots_to_write(call, num_pages, page_size, known)
    if slots is None:
        return
    codes, scales = quantize_index_rows_to_codes_and_scales_if_any(x, index_format(call.format), INDEX_BLOCK)
    scatter_rows(call.k_cache, codes, slots)
    if scales is not None:
        scatter_rows(call.k_scale_cache, scales[..., 0] if call.k_scale_cache.dim() == 2 else scales, slots)
