"""Pages of one cache into pages of another, all layers. Some tokens are judged, byte by byte, by the oracle."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cache import PagedKVCache
from ...formats import kv_bytes_per_token, kv_format
from ...ops.transcode import transcode
from ..memory import take
from . import data
from .cases import HEAD_DIM, KV_HEADS, Case

LAYERS = 8
SRC_PAGE = 16  # the case's own size is that of the pages that are written
_JUDGED = 64  # tokens
_MOST_COPIES = 8


class Transcode:
    """`nbytes` are those of the rows on both sides, so that the share of the limit is that of the copy rate."""

    limit = peer_limit = 0.0  # codes and scales are equal to the byte
    flops = 0

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, self.device = case, device
        formats = case.source, case.format
        row = sum(kv_bytes_per_token(name, KV_HEADS, HEAD_DIM) for name in formats)
        self.nbytes = LAYERS * case.tokens * row
        copies = data.rotations(device, self.nbytes, _MOST_COPIES)
        self.lists = [
            data.page_tables(torch.tensor([-(-case.tokens // size)]), copies, device)[:, 0]
            for size in (SRC_PAGE, case.page)
        ]
        self.src = self._allocate(case.source, SRC_PAGE, self.lists[0].numel())
        self.dst = self._allocate(case.format, case.page, self.lists[1].numel(), case.rotated)
        f = kv_format(case.source)
        for layer in self.src.layers:
            data.fill(layer.k, layer.k_scale_cache, f)
            data.fill(layer.v, layer.v_scale_cache, f)

        def call(src_pages: Tensor, dst_pages: Tensor) -> Any:
            return lambda: transcode(self.src, src_pages, self.dst, dst_pages, num_tokens=case.tokens, backend=backend)

        self.calls = [call(*pages) for pages in zip(*self.lists, strict=True)]

    def _allocate(self, format: str, page: int, pages: int, rotated: bool = False) -> PagedKVCache:
        return PagedKVCache.allocate(
            LAYERS, pages, page, KV_HEADS, HEAD_DIM, format=format, rotation="hadamard" if rotated else None,
            device=self.device,
        )  # fmt: skip

    def poison(self) -> None:
        for layer in self.dst.layers:
            for x in _tensors(layer):
                data.poison(x)

    def error(self, result: Any) -> float:
        """Share of elements that differ from the oracle's, in the worst tensor of any layer, over some tokens."""
        n = min(self.case.tokens, _JUDGED)
        want = self._allocate(self.case.format, n, 1, self.case.rotated)
        only = torch.zeros(1, dtype=torch.int32, device=self.device)
        transcode(self.src, self.lists[0][0], want, only, num_tokens=n, backend="torch")
        where, rows = data.places(self.lists[1][0], n, self.case.page), data.places(only, n, n)
        pairs = [
            (take(x, *where), take(y, *rows))
            for got, expected in zip(self.dst.layers, want.layers, strict=True)
            for x, y in zip(_tensors(got), _tensors(expected), strict=True)
        ]
        return max(data.differing(got, expected) for got, expected in pairs)


def _tensors(layer: Any) -> list[Tensor]:
    return [x for x in (layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache) if x is not None]
