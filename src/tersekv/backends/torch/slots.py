"""Slots of tokens in a paged cache, and stores of rows there, without a host synchronisation.

No shape depends on values: a skipped token repeats the store of a written one, the same row to the same slot; if no
token is written, the row in the first slot is stored back unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class TokensPagesAndSlots(NamedTuple):
    token: Tensor  # [T] int64: the token whose row is written
    page: Tensor  # [T] int64
    slot: Tensor  # [T] int64
    any_written: Tensor  # [] bool


def tokens_pages_and_slots_to_write(
    call: Any, num_pages: int, page_size: int, keep: Tensor | None = None
) -> TokensPagesAndSlots | None:
    """Returns the slot of each token of an append call, by slot_mapping or kv_indices; None: the cache has no slots.

    A token is dropped if its index is negative, its slot lies outside the cache or its request, or `keep` [T] bool is
    False. Of several tokens with one slot the last is written.
    """
    if num_pages == 0:
        return None
    slot = flat_slots_possibly_outside_cache(call, num_pages, page_size)
    live = (slot >= 0) & (slot < num_pages * page_size)
    if keep is not None:
        live = live & keep
    live = live & _is_last_occurrence(torch.where(live, slot, -1))
    first = live.to(torch.uint8).argmax()
    token = torch.where(live, torch.arange(live.numel(), device=live.device), first)
    any_written = live.any()
    slot = torch.where(any_written, slot[token], 0)
    return TokensPagesAndSlots(token, slot // page_size, slot % page_size, any_written)


def flat_slots_possibly_outside_cache(call: Any, num_pages: int, page_size: int) -> Tensor:
    """Returns page * S + offset of each token, [T] int64; negative, or past the last slot, for one without a slot."""
    if call.slot_mapping is not None:
        return call.slot_mapping.to(torch.int64)
    b, pos = call.batch_indices.to(torch.int64), call.kv_positions.to(torch.int64)
    # Padding: an unknown request gets no pages, an index beyond kv_indices page −1.
    start = F.pad(call.kv_indptr.to(torch.int64), (0, 2))
    pages = F.pad(call.kv_indices.to(torch.int64), (0, 1), value=-1)
    requests = call.kv_indptr.numel() - 1
    live = (b >= 0) & (pos >= 0)
    b = b.clamp(0, max(requests, 0))
    index = start[b] + pos // page_size
    live &= (start[b] >= 0) & (index >= 0) & (index < start[b + 1])
    page = pages[index.clamp(0, pages.numel() - 1)]
    live &= (page >= 0) & (page < num_pages)  # before the product, which could overflow into the cache
    return torch.where(live, page * page_size + pos % page_size, -1)


def mask_of_negative_index_tokens(call: Any) -> Tensor:
    """Returns which tokens the caller skips with a negative index, [T] bool."""
    index = call.batch_indices if call.slot_mapping is None else call.slot_mapping
    return index.to(torch.int64) < 0


def scatter_rows(cache: Tensor, rows: Tensor, tokens_pages_and_slots: TokensPagesAndSlots) -> None:
    """Store rows [T, ...] in cache [P, S, ...] of any strides."""
    if cache.element_size() == 1:  # some devices cannot index fp8
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    token, page, slot, any_written = tokens_pages_and_slots
    cache[page, slot] = torch.where(any_written, rows[token], cache[page, slot])


def _is_last_occurrence(x: Tensor) -> Tensor:
    """Returns whether no later entry of x has the same value, [T] bool."""
    order = x.argsort(stable=True)
    ordered = x[order]
    last = torch.ones_like(x, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return torch.empty_like(last).scatter_(0, order, last)
