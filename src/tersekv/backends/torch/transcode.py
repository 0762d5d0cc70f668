"""transcode: tokens of one cache's pages into pages of another, through fp32; equal rows as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tersekv.formats import ALL_FORMATS, CHANNELS, PAIRS, ROTATION

from . import rotation
from .exact import without_grad_and_autocast
from .quantize import dequantize, quantize_rows, reciprocal, why_no_codec
from .slots import TokensPagesAndSlots, scatter_rows, tokens_pages_and_slots_to_write

SUPPORTS = (PAIRS, ROTATION, CHANNELS)
_CHUNK = 4096  # tokens that lie in fp32 at a time


def why_not(f: SimpleNamespace) -> str | None:
    if f.layers is not None:
        return "takes one layer at a time"
    names = f.src_format, f.src_v_format, f.format, f.v_format
    return next(filter(None, (why_no_codec(ALL_FORMATS[name]) for name in names)), None)


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    if not call.src_k.shape[0] or not call.k_cache.shape[0]:
        return
    for first in range(0, call.num_tokens, _CHUNK):
        token = torch.arange(first, min(first + _CHUNK, call.num_tokens), device=call.src_k.device)
        page, entry, live = _source_pages_slots_and_validity(call, token)
        slots = _target_tokens_pages_and_slots(call, token, live)
        for side in ("k", "v"):
            _transcode_k_or_v(call, side, page, entry, slots)


def _source_pages_slots_and_validity(call: Any, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns page and slot of each token, and whether there is one; where there is none page 0."""
    num_pages, size = call.src_k.shape[:2]
    page = call.src_pages.to(torch.int64)[token // size]
    live = (page >= 0) & (page < num_pages)
    if call.num_tokens_t is not None:
        live = live & (token < call.num_tokens_t.to(torch.int64))
    return torch.where(live, page, 0), token % size, live


def _target_tokens_pages_and_slots(call: Any, token: Tensor, has_source: Tensor) -> TokensPagesAndSlots:
    num_pages, size = call.k_cache.shape[:2]
    page = call.dst_pages.to(torch.int64)[token // size]
    live = has_source & (page >= 0) & (page < num_pages)
    slot = torch.where(live, page, 0) * size + token % size
    slots = tokens_pages_and_slots_to_write(SimpleNamespace(slot_mapping=torch.where(live, slot, -1)), num_pages, size)
    assert slots is not None  # the cache has pages
    return slots


def _transcode_k_or_v(
    call: Any, side: str, src_page: Tensor, src_slot: Tensor, dst_tokens_pages_and_slots: TokensPagesAndSlots
) -> None:
    """Store K or V of the tokens."""
    src, dst = (ALL_FORMATS[name] for name in _formats(call, side))
    cache, scale_cache = getattr(call, f"{side}_cache"), getattr(call, f"{side}_scale_cache")
    codes = _load_rows(getattr(call, f"src_{side}"), src_page, src_slot)
    stored = getattr(call, f"src_{side}_scale_cache")
    stored = None if stored is None else _load_rows(stored, src_page, src_slot)
    old, new = (_scale_as_fp32_tensor(call, f"{prefix}{side}_scale", codes.device) for prefix in ("src_", ""))
    attributes = [
        (getattr(call, f"{prefix}{side}_signs"), getattr(call, f"{prefix}{side}_channel_scale"))
        for prefix in ("src_", "")
    ]
    x, same = rotation.convert_rotation_and_scales_and_find_unchanged_heads(
        dequantize(codes, stored, src, old[:, None]), *attributes
    )
    # As an append does it, whose number is the multiplier: nvfp4's scale is the reciprocal of that.
    global_scale = None if getattr(call, f"{side}_scale_t") is None else new[:, None]
    new_codes, new_stored = quantize_rows(x, dst, reciprocal(new)[:, None], global_scale)
    if src is dst:
        same = same & (old == new)
        new_codes = _keep_equal_rows(same, codes, new_codes)
        if stored is not None and new_stored is not None:
            new_stored = _keep_equal_rows(same, stored, new_stored)
    scatter_rows(cache, new_codes, dst_tokens_pages_and_slots)
    if new_stored is not None:
        scatter_rows(scale_cache, new_stored, dst_tokens_pages_and_slots)


def _formats(call: Any, side: str) -> tuple[str, str]:
    return (call.src_format, call.format) if side == "k" else (call.src_v_format, call.v_format)


def _load_rows(x: Tensor, page: Tensor, entry: Tensor) -> Tensor:
    """Returns rows x[page, entry]; some devices cannot index fp8."""
    return (x.view(torch.uint8) if x.element_size() == 1 else x)[page, entry].view(x.dtype)


def _scale_as_fp32_tensor(call: Any, scale_name: str, device: torch.device) -> Tensor:
    """Returns the dequantising scale, fp32 [1] or [H]."""
    value, tensor = getattr(call, scale_name), getattr(call, f"{scale_name}_t")
    return torch.full((1,), value, dtype=torch.float32, device=device) if tensor is None else tensor


def _keep_equal_rows(unchanged: Tensor, src_rows: Tensor, converted_rows: Tensor) -> Tensor:
    """Returns rows [T, H, ...] of heads that are the same on both sides as they were, others as they became."""
    unchanged = unchanged.view(-1, *[1] * (src_rows.dim() - 2))
    if src_rows.element_size() > 1:
        return torch.where(unchanged, src_rows, converted_rows)
    return torch.where(unchanged, src_rows.view(torch.uint8), converted_rows.view(torch.uint8)).view(src_rows.dtype)
