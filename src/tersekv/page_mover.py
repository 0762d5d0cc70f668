"""Pages between a cache and colder ones in the host's memory: what `TieredPool` moves, and when.

On a GPU a page of all layers is one run of bytes on its way: `transcode` writes it into a staging cache laid out like
that, and a copy takes it to pinned memory, chunk by chunk. The next chunk is transcoded while the last is copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from .cache import PagedKVCache, PagedLatentCache
from .ops.transcode import transcode

Cache = PagedKVCache | PagedLatentCache
Moves = Sequence[tuple[int, int]]  # (page of the cache, page in the host's memory)
_PAGES = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache")
_LISTS = 512
_ALIGNED = 16  # bytes that each layer's part of a page begins at a multiple of


def cold_template(cache: Cache, format: Any, **options: Any) -> Cache:
    """A cache of one page for the same model, in another format; None: in all like `cache`."""
    if isinstance(cache, PagedLatentCache) and not cache.qk_rope_head_dim:
        raise ValueError("cache: want latent rows with a rotary part, got qk_rope_head_dim 0")
    for i, layer in enumerate(cache.layers if isinstance(cache, PagedKVCache) else ()):
        if layer.k.data_ptr() == layer.v.data_ptr() != 0:
            raise ValueError(f"cache: want K and V in memory of their own, got one tensor for both in layer {i}")
    if format is None:
        if options:
            raise ValueError(f"{next(iter(options))}: want it beside a cold_format, got none")
        return cache
    if isinstance(cache, PagedKVCache):
        return PagedKVCache.allocate(
            cache.num_layers, 1, cache.page_size, cache.num_kv_heads, cache.head_dim, head_dim_v=cache.head_dim_v,
            format=format, device=cache.device, **options,
        )  # fmt: skip
    return PagedLatentCache.allocate(
        cache.num_layers, 1, cache.page_size, format=format, kv_lora_rank=cache.kv_lora_rank,
        qk_rope_head_dim=cache.qk_rope_head_dim, device=cache.device, **options,
    )  # fmt: skip


def page_views(template: Cache, pages: Tensor | None = None) -> tuple[int, list[Any]]:
    """(bytes of a page of all layers, layers like the template's over `pages` [P, bytes] uint8)."""
    begin, layers = 0, []
    layer: Any
    for layer in template.layers:
        found = {}
        for name in (f.name for f in fields(layer) if f.name in _PAGES):
            x = getattr(layer, name)
            if x is not None:
                end = begin + prod(x.shape[1:]) * x.itemsize
                if pages is not None:
                    found[name] = pages[:, begin:end].view(x.dtype).view(-1, *x.shape[1:])
                begin = end + -end % _ALIGNED
        layers.append(replace(layer, **found))
    return begin, layers


class PageMover:
    """Moves pages of `cache` away to `num_pages` colder ones in the host's memory, and back."""

    def __init__(self, cache: Cache, template: Cache, num_pages: int, chunk_bytes: int) -> None:
        self._cache, self._device = cache, cache.device
        nbytes, _ = page_views(template)
        on_gpu = self._device.type == "cuda"
        self._host = torch.zeros(num_pages, nbytes, dtype=torch.uint8, device="cpu", pin_memory=on_gpu)
        self.nbytes = self._host.numel()
        if not on_gpu:
            self._cold = _cache_of(template, self._host)
            return
        self._chunk = max(1, min(chunk_bytes // nbytes, num_pages))
        self._stage = torch.zeros(2 * self._chunk, nbytes, dtype=torch.uint8, device=self._device)
        self._staged = _cache_of(template, self._stage)
        # Lists of pages begin at multiples of 16 bytes, so that one kernel takes them all.
        width = -(-self._chunk // 4) * 4
        halves = torch.arange(2 * width, dtype=torch.int32, device=self._device).view(2, width)
        halves[1] += self._chunk - width
        self._halves = [half[: self._chunk] for half in halves]
        self._compute, self._copy = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)
        self._drained: list[Any] = [None, None]  # events: a half of the staging cache may be written
        self._turn = 0
        # Pages of the cache, then how many tokens they hold. Memory for a list in its turn might wait for the device.
        self._lists = torch.zeros(_LISTS, width + 4, dtype=torch.int32, pin_memory=True, device="cpu")
        self._lists_there = torch.zeros_like(self._lists, device=self._device)
        self._used: list[Any] = [None] * _LISTS  # events
        self._next = 0
        self._transcode(self._cache, self._list([]), self._staged, (self._halves[0], None))  # so that no later call
        self._transcode(self._staged, (self._halves[0], None), self._cache, self._list([]))  # prepares anything
        self._copy.wait_stream(torch.cuda.current_stream(self._device))  # which fills the staging cache with zeros

    def away(self, moves: Moves) -> None:
        """Copy pages to the host's memory. The caller's stream may overwrite them from here on."""
        if not moves:
            return
        if self._device.type != "cuda":
            transcode(self._cache, [hot for hot, _ in moves], self._cold, [cold for _, cold in moves])
            return
        current = torch.cuda.current_stream(self._device)
        self._compute.wait_stream(current)
        for half, batch in self._batches(moves):
            with torch.cuda.stream(self._compute):
                self._wait_until_drained(self._compute, half)
                self._transcode(self._cache, self._list(batch), self._staged, (self._halves[half], None))
            self._copy.wait_stream(self._compute)
            with torch.cuda.stream(self._copy):
                for stage, host in self._runs(half, batch):
                    host.copy_(stage, non_blocking=True)
                self._drained[half] = self._copy.record_event()
        current.wait_stream(self._compute)

    def back(self, moves: Moves) -> Any:
        """Copy pages from the host's memory. Returns the event after which they may be read; None: they may now."""
        if not moves:
            return None
        if self._device.type != "cuda":
            transcode(self._cold, [cold for _, cold in moves], self._cache, [hot for hot, _ in moves])
            return None
        self._compute.wait_stream(torch.cuda.current_stream(self._device))  # which may still read what these pages held
        for half, batch in self._batches(moves):
            with torch.cuda.stream(self._copy):
                self._wait_until_drained(self._copy, half)
                for stage, host in self._runs(half, batch):
                    stage.copy_(host, non_blocking=True)
            self._compute.wait_stream(self._copy)
            with torch.cuda.stream(self._compute):
                self._transcode(self._staged, (self._halves[half], None), self._cache, self._list(batch))
                self._drained[half] = self._compute.record_event()
        return self._drained[half]

    def wait(self, event: Any) -> None:
        """Let the caller's stream wait for what `back` returned, so that it may overwrite those pages."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)

    def _batches(self, moves: Moves) -> Iterator[tuple[int, Moves]]:
        """Pages that are on their way together, those that lie side by side on the host too, and where they stage."""
        ordered = sorted(moves, key=lambda move: move[1])
        for first in range(0, len(ordered), self._chunk):
            self._turn ^= 1
            yield self._turn, ordered[first : first + self._chunk]

    def _wait_until_drained(self, stream: Any, half: int) -> None:
        if self._drained[half] is not None:
            stream.wait_event(self._drained[half])

    def _runs(self, half: int, batch: Moves) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes in the staging cache and on the host of pages that are side by side there."""
        first = 0
        for i in range(1, len(batch) + 1):
            if i == len(batch) or batch[i][1] != batch[i - 1][1] + 1:
                at, host = half * self._chunk + first, batch[first][1]
                yield self._stage[at : at + i - first], self._host[host : host + i - first]
                first = i

    def _list(self, batch: Moves) -> tuple[Tensor, Tensor]:
        """Pages of the cache, and how many tokens they hold, on the device: of one shape for every batch."""
        padding = [0] * (self._lists.shape[1] - 4 - len(batch))
        values = [*(hot for hot, _ in batch), *padding, len(batch) * self._cache.page_size, 0, 0, 0]
        i, self._next = self._next, (self._next + 1) % _LISTS
        if self._used[i] is not None:
            self._used[i].synchronize()  # some hundred chunks ago
        self._lists[i] = torch.tensor(values, dtype=torch.int32)
        there = self._lists_there[i]
        there.copy_(self._lists[i], non_blocking=True)
        return there[: self._chunk], there[-4:-3]

    def _transcode(self, src: Cache, src_pages: Any, dst: Cache, dst_pages: Any) -> None:
        (a, n), (b, m) = src_pages, dst_pages
        transcode(src, a, dst, b, num_tokens=m if n is None else n)
        self._used[self._next - 1] = torch.cuda.current_stream(self._device).record_event()


def _cache_of(template: Cache, pages: Tensor) -> Cache:
    _, layers = page_views(template, pages)
    if isinstance(template, PagedKVCache):
        return PagedKVCache(layers, template.head_dim, template.head_dim_v)
    return PagedLatentCache(layers)
