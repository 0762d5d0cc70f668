"""The index cache of all layers of a model that own an indexer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cache import PagedLayers, device_of
from .formats import PAGE_STEP, held_index, index_bytes_per_token, index_format
from .index_layers import PagedIndexLayer
from .scalars import as_positive_int


class PagedIndexCache(PagedLayers[PagedIndexLayer]):
    """The index cache of all layers that own an indexer. `cache[i]` is the i-th, a `PagedIndexLayer`.

    >>> cache = tersekv.PagedIndexCache.allocate(num_layers=2, num_pages=16, page_size=64)
    >>> cache[0].k.shape, cache.bytes_per_token
    (torch.Size([16, 64, 128]), 264)
    """

    _kind = PagedIndexLayer

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        *,
        head_dim: int = 128,
        format: str = "index_fp8",
        rotation: str | None = None,
        device: torch.device | str | None = None,
    ) -> PagedIndexCache:
        """Allocate a zeroed cache; pages of index_fp8 as engines have them, their distance a multiple of 16 bytes.

        Raises ValueError for sizes that the format cannot hold.
        """
        f, device, d = index_format(format), device_of(device), held_index(head_dim)
        num_layers, num_pages = as_positive_int("num_layers", num_layers), as_positive_int("num_pages", num_pages)
        size, n = as_positive_int("page_size", page_size), f.row_bytes(d)
        step = -(-size * n // PAGE_STEP) * PAGE_STEP
        layers = []
        for _ in range(num_layers):
            whole = torch.zeros(num_pages, step, dtype=torch.uint8, device=device)
            pages = whole[:, : size * n].unflatten(1, (size, n))
            layers.append(PagedIndexLayer.from_buffer(pages, format, rotation=rotation))
        return cls(layers)

    @classmethod
    def from_tensors(
        cls, tensors: Sequence[Tensor | PagedIndexLayer], format: str = "index_fp8", *, rotation: str | None = None
    ) -> PagedIndexCache:
        """A cache over existing pages, one entry per layer, without copying; see `PagedIndexLayer.from_buffer`."""
        return cls([
            x if isinstance(x, PagedIndexLayer) else PagedIndexLayer.from_buffer(x, format, rotation=rotation)
            for x in tensors
        ])  # fmt: skip

    @property
    def head_dim(self) -> int:
        return self.layers[0].head_dim

    @property
    def bytes_per_token(self) -> int:
        return len(self) * index_bytes_per_token(self.layers[0].format, self.head_dim)


# So that torch.load takes it with weights_only, which is its default.
torch.serialization.add_safe_globals([PagedIndexCache])
