"""Pages of a Hugging Face cache in the host's memory: a device holds those of the layer that runs and of the next one.

The pages of a layer come in the cache's format, one layer ahead, on a stream of their own; those that a forward wrote
go back there. Streams wait for each other by events, the host only where memory is allocated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..pages import PageCopy
from ..record_file import page_tensors
from .transformers_requests import Run, pages_of, runs
from .transformers_store import Store

if TYPE_CHECKING:
    from .transformers_cache_layers import TersekvLayer

_ALIGNED = 256  # bytes that each tensor of a buffer begins at a multiple of


def _pinned(x: Tensor, device: torch.device) -> Tensor:
    """On the host, where copies from and to a GPU do not wait for each other."""
    return x.pin_memory() if device.type == "cuda" and not x.is_pinned() else x


class OffloadedStore(Store):
    """The rows of one layer on the host.

    small:  a store of one page on the device, whose sizes and attributes this one has
    pages:  of the host
    """

    def __init__(self, small: Store, num_pages: int, layer: TersekvLayer, pipe: Pipe) -> None:
        self._small, self._layer, self._pipe = small, layer, pipe
        self._pending: list[PageCopy] = []  # to be done when the pages are on the device
        self._places: dict[int, int] = {}  # address of a tensor's memory → which of the buffers it is
        self._sizes: list[int] = []  # bytes of a page in each buffer
        for x in self._tensors():
            memory = x.untyped_storage()
            if memory.data_ptr() not in self._places:
                self._places[memory.data_ptr()] = len(self._sizes)
                self._sizes.append(memory.nbytes())
        self._allocate(num_pages)
        pipe.stores.append(self)

    @property
    def _device(self) -> torch.device:
        return self._small.cache.device

    def _tensors(self) -> list[Tensor]:
        return [x for cache in self._small.caches for _, x in page_tensors(cache[0])]

    def _allocate(self, num_pages: int) -> None:
        with torch.inference_mode(False):
            host = [torch.zeros(num_pages, n, dtype=torch.uint8, device="cpu") for n in self._sizes]
            self._host = [_pinned(x, self._device) for x in host]
        self._views: dict[int, Store] = {}  # by the address of the buffer
        self.caches = self._over(self._host).caches

    def _over(self, buffers: Sequence[Tensor]) -> Store:
        """The store of the pages [P, bytes of a page] in these buffers."""
        made = copy.copy(self._small)
        made.caches = []
        for cache in self._small.caches:
            seen = {name: self._seen(x, buffers) for name, x in page_tensors(cache[0])}
            made.caches.append(type(cache).from_tensors([replace(cache[0], **seen)]))
        return made

    def _seen(self, x: Tensor, buffers: Sequence[Tensor]) -> Tensor:
        pages = buffers[self._places[x.untyped_storage().data_ptr()]]
        flat = pages.view(-1).view(x.dtype)
        strides = pages.shape[1] // x.itemsize, *x.stride()[1:]
        return flat.as_strided((len(pages), *x.shape[1:]), strides, flat.storage_offset() + x.storage_offset())

    @property
    def nbytes(self) -> int:
        """Bytes of a buffer on the device that holds all pages."""
        return sum(len(x) * n + -(len(x) * n) % _ALIGNED for x, n in zip(self._host, self._sizes, strict=True))

    def within(self, buffer: Tensor) -> list[Tensor]:
        """The buffer [bytes] as pages."""
        parts, begin = [], 0
        for x in self._host:
            parts.append(buffer[begin : begin + x.numel()].view(x.shape))
            begin += x.numel() + -x.numel() % _ALIGNED
        return parts

    def held_pages(self) -> list[Run]:
        """Pages that this layer's requests have."""
        return self._layer.held_pages()

    def load(self, buffer: Tensor, pages: list[Run]) -> None:
        """Bring pages; before anything is written, pages of zeros."""
        if self._layer.columns:
            return self._copy(self._host, self.within(buffer), pages)
        for x in self.within(buffer):
            for begin, end in pages:
                x[begin:end].zero_()

    def save(self, buffer: Tensor, pages: list[Run]) -> None:
        """Take pages back."""
        self._copy(self.within(buffer), self._host, pages)

    def _copy(self, src: Sequence[Tensor], dst: Sequence[Tensor], pages: list[Run]) -> None:
        for a, b in zip(src, dst, strict=True):
            for begin, end in pages:
                b[begin:end].copy_(a[begin:end], non_blocking=True)

    def open(self, copies: Sequence[PageCopy] = ()) -> Store:
        buffer = self._pipe.open(self)
        if buffer.data_ptr() not in self._views:
            self._views[buffer.data_ptr()] = self._over(self.within(buffer))
        here = self._views[buffer.data_ptr()]
        if self._pending:  # their sources may be nobody's by now
            self.load(buffer, runs({c.src for c in self._pending} - pages_of(self.held_pages())))
        here.copy([*self._pending, *copies])
        self._opened = {c.dst for c in (*self._pending, *copies)}
        return here

    def close(self, pages: Iterable[int] = ()) -> None:
        self._pipe.close(self, runs(self._opened.union(pages)))
        self._pending = []

    def copy(self, copies: Sequence[PageCopy]) -> None:
        self._pending += copies

    def forget(self) -> None:
        self._pending = []
        self._pipe.forget()

    def take_back(self) -> None:
        self._pipe.forget()

    def settle(self) -> None:
        """Wait until the host has all that was written, page copies included."""
        if self._pending:
            self.open()
            self.close()
        self._pipe.wait()

    def grow(self, num_pages: int) -> None:
        self._pipe.wait()
        self._pipe.forget()
        old = self._host
        self._allocate(num_pages)
        for new, x in zip(self._host, old, strict=True):
            new[: len(x)] = x

    def with_pages(self, num_pages: int) -> Store:
        return self._small.with_pages(num_pages)

    def fill(self, store: Store) -> None:
        """Take all rows of a store on the device."""
        for new, old in zip(self.caches, store.caches, strict=True):
            for (_, x), (_, y) in zip(page_tensors(new[0]), page_tensors(old[0]), strict=True):
                x.copy_(y)

    def rows(self) -> tuple[Tensor, ...]:
        return self._on_host().rows()

    def largest(self) -> tuple[float, ...]:
        return self._on_host().largest()

    def channel_scales(self) -> tuple[Tensor, ...]:
        return self._on_host().channel_scales()

    def _on_host(self) -> Store:
        self.settle()
        return self._over(self._host)

    def __getstate__(self) -> dict[str, Any]:
        self.settle()
        # By order: addresses and views of a copy are others.
        places = [self._places[x.untyped_storage().data_ptr()] for x in self._tensors()]
        return {**{k: v for k, v in vars(self).items() if k != "caches"}, "_places": places, "_views": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._places = {
            x.untyped_storage().data_ptr(): i for x, i in zip(self._tensors(), state["_places"], strict=True)
        }
        self._host = [_pinned(x, self._device) for x in self._host]
        self.caches = self._over(self._host).caches


class Pipe:
    """Two buffers on one device for all of its layers, and the stream that fills and empties them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.stores: list[OffloadedStore] = []  # in the order in which they run
        self._reset()

    def _reset(self) -> None:
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._buffers: list[Tensor] = []
        self._done: list[Any] = [None, None]  # of each buffer: after its last copy
        self._last = 1  # the buffer of the layer that ran last
        self.forget()

    def open(self, store: OffloadedStore) -> Tensor:
        """The buffer with a layer's pages. Those of the next layer are on their way into the other one."""
        self._fit()
        self._load(store)
        self._last = self._holders.index(store)
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done[self._last])
        self._load(self.stores[(self.stores.index(store) + 1) % len(self.stores)])
        return self._buffers[self._last]

    def close(self, store: OffloadedStore, pages: list[Run]) -> None:
        """Take back the pages that the layer opened last has written."""
        at = self._last
        if self._stream is None:
            return store.save(self._buffers[at], pages)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            store.save(self._buffers[at], pages)
            self._done[at] = self._stream.record_event()

    def forget(self) -> None:
        """What is on the device is no longer what the host has."""
        if self._stream is not None:  # what a failed forward began may still write
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._holders: list[OffloadedStore | None] = [None, None]
        self._brought: list[list[Run]] = [[], []]

    def wait(self) -> None:
        """Until the host has all that was taken back."""
        if self._stream is not None:
            self._stream.synchronize()

    def _load(self, store: OffloadedStore) -> None:
        """All pages of a layer, or those that came to it since: into its buffer, or into that of the layer before the
        last one, whose pages are taken back first, being first in line."""
        pages = store.held_pages()
        if store in self._holders:
            at = self._holders.index(store)
            if pages is self._brought[at]:
                return
            new = runs(pages_of(pages) - pages_of(self._brought[at]))
        else:
            at, new = 1 - self._last, pages
        held, self._holders[at], self._brought[at] = self._holders[at], store, pages
        if held is store and not new:
            return
        if self._stream is None:
            return store.load(self._buffers[at], new)
        with torch.cuda.stream(self._stream):
            store.load(self._buffers[at], new)
            self._done[at] = self._stream.record_event()

    def _fit(self) -> None:
        """Buffers that hold the largest layer."""
        most = max(store.nbytes for store in self.stores)
        if self._buffers and len(self._buffers[0]) >= most:
            return
        with torch.inference_mode(False):
            self._buffers = [torch.empty(most, dtype=torch.uint8, device=self._device) for _ in range(2)]
        self.forget()
        if self._stream is not None:
            # What had this memory before may still run, and it may not go to others before the copies are done.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            for x in self._buffers:
                x.record_stream(self._stream)

    def __getstate__(self) -> dict[str, Any]:
        return {"_device": self._device, "stores": self.stores}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()
