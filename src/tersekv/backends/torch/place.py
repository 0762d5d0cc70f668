"""Where tokens go in a paged cache, and writing rows there, without a host synchronisation.

Nothing has a shape that depends on values: a token that is not written repeats the write of one that is, the same rows
to the same place; where no token is written, the row at the first place is written back as it is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Places(NamedTuple):
    token: Tensor  # [T] int64: the token whose row is written
    page: Tensor  # [T] int64
    entry: Tensor  # [T] int64
    some: Tensor  # [] bool: any token is written


def place(call: Any, num_pages: int, page_size: int, keep: Tensor | None = None) -> Places | None:
    """The place of every token of an append call, by its slot_mapping or its kv_indices; None: there is no slot at all.

    A token is dropped where its index is negative, its place lies outside the cache or its request, or `keep` [T] bool
    is False. Of several tokens with one place the last is written.
    """
    if num_pages == 0:
        return None
    slot = slots(call, num_pages, page_size)
    live = (slot >= 0) & (slot < num_pages * page_size)
    if keep is not None:
        live = live & keep
    live = live & _last_of_equals(torch.where(live, slot, -1))
    first = live.to(torch.uint8).argmax()
    token = torch.where(live, torch.arange(live.numel(), device=live.device), first)
    some = live.any()
    slot = torch.where(some, slot[token], 0)
    return Places(token, slot // page_size, slot % page_size, some)


def slots(call: Any, num_pages: int, page_size: int) -> Tensor:
    """[T] int64: page * S + offset of each token, negative (or past the last slot) for one that has no place."""
    if call.slot_mapping is not None:
        return call.slot_mapping.to(torch.int64)
    b, pos = call.batch_indices.to(torch.int64), call.kv_positions.to(torch.int64)
    # Padding: an unknown request has no pages, an index beyond kv_indices page −1.
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


def padding(call: Any) -> Tensor:
    """[T] bool: tokens that the caller skips with a negative index."""
    index = call.batch_indices if call.slot_mapping is None else call.slot_mapping
    return index.to(torch.int64) < 0


def write(cache: Tensor, rows: Tensor, places: Places) -> None:
    """cache [P, S, ...] of any strides ← rows [T, ...], in place."""
    if cache.element_size() == 1:  # some devices index no fp8
        cache, rows = cache.view(torch.uint8), rows.view(torch.uint8)
    old = cache[places.page, places.entry]
    cache[places.page, places.entry] = torch.where(places.some, rows[places.token], old)


def _last_of_equals(x: Tensor) -> Tensor:
    """[T] bool: no later entry of x has the same value."""
    order = x.argsort(stable=True)
    ordered = x[order]
    last = torch.ones_like(x, dtype=torch.bool)
    last[:-1] = ordered[1:] != ordered[:-1]
    return torch.empty_like(last).scatter_(0, order, last)
