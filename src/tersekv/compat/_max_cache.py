"""MAX's paged cache object: tensors and bounds, seen layer by layer without copying."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import env
from ..layers import PagedLatentLayer, to_buffers, unpickle
from ._adapt import as_host_int, index_tensor, tensor


class PagedKVCache(NamedTuple):
    """One layer: blocks [P, S, heads, head_size]; the rest as in `PagedKVCacheCollection`.

    >>> k_cache = kv_collection.get_key_cache(0)
    >>> k_cache.blocks.shape, k_cache.cache_length(1)
    (torch.Size([16, 16, 1, 576]), 39)
    """

    blocks: Tensor
    cache_lengths: Tensor
    lookup_table: Tensor
    max_seq_length: int
    max_cache_length: int
    scales: Tensor | None = None

    def __reduce__(self) -> tuple:
        return unpickle, (PagedKVCache, *to_buffers([self]))

    def cache_length(self, request: int) -> int:
        """Tokens that a request held before this step. Reads the tensor on the host."""
        return int(self.cache_lengths[request])

    def latent(self, kv_lora_rank: int) -> PagedLatentLayer:
        """The layer as tersekv sees it. Raises ValueError for more than one head, and for block scales."""
        if self.blocks.shape[2] != 1:
            raise ValueError(f"kv_collection.blocks: want one head for MLA, got {self.blocks.shape[2]}")
        if self.scales is not None:
            raise ValueError("kv_collection.scales: want None for MLA, whose rows have no block scales, got a tensor")
        return PagedLatentLayer.of(self.blocks, kv_lora_rank=kv_lora_rank)


class PagedKVCacheCollection:
    """MAX's paged cache of all layers of a model, in MAX's argument order.

        >>> blocks = torch.zeros(16, 1, 2, 16, 1, 512 + 64, dtype=torch.bfloat16)  # two layers
        >>> kv_collection = PagedKVCacheCollection(blocks, cache_lengths, lookup_table, 1, 59)

        blocks:            [P, 1, layers, S, 1, kv_lora_rank + rope] for MLA ([P, 2, ...]: keys and values)
        cache_lengths:     [B]  tokens cached before this step
        lookup_table:      [B, max_pages]  page ids; entries beyond a request's tokens are never followed
        max_seq_length:    host bound on the new tokens of a request
        max_cache_length:  host bound on cache_lengths
        scales:            [P, 1 or 2, layers, S, heads, blocks of a row] of a quantised cache, or None

    Raises ValueError for other ranks.
    """

    def __init__(
        self,
        blocks: Tensor,
        cache_lengths: Tensor,
        lookup_table: Tensor,
        max_seq_length: int,
        max_cache_length: int,
        scales: Tensor | None = None,
    ) -> None:
        for name, x in (("blocks", blocks), ("scales", scales)):
            if x is not None and (tensor(name, x).dim() != 6 or x.shape[1] not in (1, 2)):
                raise ValueError(f"{name}: want [P, 1 or 2, layers, S, heads, head_size], got {list(x.shape)}")
        self.blocks, self.scales = blocks, scales
        self.cache_lengths = tensor("cache_lengths", cache_lengths)
        self.lookup_table = tensor("lookup_table", lookup_table)
        self.max_seq_length = as_host_int("max_seq_length", max_seq_length)
        self.max_cache_length = as_host_int("max_cache_length", max_cache_length)

    def __reduce__(self) -> tuple:
        bounds = self.max_seq_length, self.max_cache_length
        values = self.blocks, self.cache_lengths, self.lookup_table, *bounds, self.scales
        return unpickle, (PagedKVCacheCollection, *to_buffers([values]))

    def get_key_cache(self, layer_idx: int) -> PagedKVCache:
        """Keys of a layer (MLA: its latent rows), a view."""
        return self._get(0, layer_idx)

    def get_value_cache(self, layer_idx: int) -> PagedKVCache:
        """Values of a layer, a view. Raises ValueError for MLA, which has none."""
        if self.blocks.shape[1] == 1:
            raise ValueError("kv_collection.blocks: want [P, 2, ...] to have values, got an MLA cache [P, 1, ...]")
        return self._get(1, layer_idx)

    def cache_length(self, request: int) -> int:
        """Tokens that a request held before this step. Reads the tensor on the host."""
        return int(self.cache_lengths[request])

    def _get(self, side: int, layer_idx: int) -> PagedKVCache:
        layer, layers = as_host_int("layer_idx", layer_idx), self.blocks.shape[2]
        if not 0 <= layer < layers:
            raise ValueError(f"layer_idx: want a number in [0, {layers}), got {layer}")
        return PagedKVCache(
            self.blocks.select(1, side).select(1, layer),
            self.cache_lengths,
            self.lookup_table,
            self.max_seq_length,
            self.max_cache_length,
            None if self.scales is None else self.scales[:, side, layer],
        )


def plan_into(
    buffer_row_offsets: Tensor, cache_offsets: Tensor, buffer_lengths: Tensor,
    input_row_offsets: Tensor, cache_lengths: Tensor, buffer_size: int,
) -> None:  # fmt: skip
    """Write the rows that each request has in each chunk. Chunk c holds tokens [c, c + 1) * buffer_size of all
    requests laid end to end. Nothing is read on the host, but in checked mode.
    """
    new = index_tensor("input_row_offsets", input_row_offsets, "B + 1").to(torch.int64).diff()
    if len(new) != len(index_tensor("k_cache.cache_lengths", cache_lengths, "B")):
        raise ValueError(f"input_row_offsets: want [B+1={len(cache_lengths) + 1}], got {list(input_row_offsets.shape)}")
    if index_tensor("buffer_lengths", buffer_lengths, "max_chunks").dtype == torch.uint32:
        raise ValueError("buffer_lengths: want int32 or int64, which hold -1, got uint32")
    chunks, columns = buffer_lengths.shape[0], len(new) + 1
    for name, x in (("buffer_row_offsets", buffer_row_offsets), ("cache_offsets", cache_offsets)):
        if tuple(index_tensor(name, x).shape) != (chunks, columns):
            raise ValueError(f"{name}: want [max_chunks={chunks}, B+1={columns}], got {list(x.shape)}")
    lens = cache_lengths.to(torch.int64) + new
    ends = torch.cat([lens.new_zeros(1), lens.cumsum(0)])
    if env.checked() and int(ends[-1]) > chunks * buffer_size:
        need = -(-int(ends[-1]) // buffer_size)
        raise ValueError(f"buffer_lengths: want at least {need} chunks of {buffer_size} tokens, got {chunks}")
    first = torch.arange(chunks, device=ends.device)[:, None] * buffer_size
    buffer_row_offsets.copy_((ends - first).clamp(0, buffer_size))
    cache_offsets[:, :-1].copy_(torch.minimum((first - ends[:-1]).clamp(min=0), lens))
    left = ends[-1] - first[:, 0]
    # MAX marks the chunks after the last one with -1; a last one may be empty.
    buffer_lengths.copy_(torch.where(left < 0, -1, left.clamp(max=buffer_size)))


torch.serialization.add_safe_globals([PagedKVCache, PagedKVCacheCollection])
