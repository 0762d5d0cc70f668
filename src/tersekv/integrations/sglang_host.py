"""The host's side of tersekv's K/V pool, for SGLang's hierarchical cache.

SGLang's own host pools hold keys and values of one dtype and equal bytes, and no scales. This one holds the bytes of a
token in a layer, whatever they mean: codes of K and of V and their scales. A page's bytes of a layer lie together, and
so do all of its layers', so that a page goes out in one copy and comes back in one for each layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.device_pool_info import MHABufferInfo
from sglang.srt.mem_cache.pool_host.base import HostKVCache
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from torch import Tensor


class RowsInfo(MHABufferInfo, frozen=True, kw_only=True):  # type: ignore[call-arg]  # msgspec's
    """What SGLang knows of a pool's buffers, and each layer's rows: tensors [slots, bytes] of it."""

    rows: tuple[tuple[Tensor, ...], ...]

    def validate(self, *, layer_ids: tuple[int, ...] | None = None) -> None:
        """SGLang's own wants one dtype for all."""


def host_pool_class(original: Callable, buffer_info: MHABufferInfo) -> type:
    return TersekvHostPool if isinstance(buffer_info, RowsInfo) else original(buffer_info)


class TersekvHostPool(HostKVCache):
    """kv_buffer: bytes [pages, bytes of a page], layer by layer."""

    def __init__(
        self,
        buffer_info: RowsInfo,
        host_to_device_ratio: float,
        host_size: int,
        page_size: int,
        layout: str,
        pin_memory: bool = True,
        device: str = "cpu",
        allocator_type: str = "default",
        *,
        device_capacity_tokens: int,
        start_layer: int,
        end_layer: int,
        draft_buffer_infos: tuple[MHABufferInfo, ...] = (),
        write_back_staging: Any = None,
        pool_label: str = "kv",
        host_token_capacity: int | None = None,
    ) -> None:
        if draft_buffer_infos:
            raise NotImplementedError("speculative_algorithm: want no drafts' layers beside tersekv's host pool")
        self._rows = buffer_info.rows
        self._widths = [sum(x.shape[1] for x in layer) for layer in self._rows]
        self._device = buffer_info.device
        self.layer_num = self.target_layer_num = len(self._rows)
        super().__init__(
            dtype=torch.uint8, device_capacity_tokens=device_capacity_tokens, size_per_token=self.get_size_per_token(),
            start_layer=start_layer, end_layer=end_layer, host_to_device_ratio=host_to_device_ratio,
            host_size=host_size, page_size=page_size, layout=layout, pin_memory=pin_memory, device=device,
            allocator_type=allocator_type, pool_label=pool_label, host_token_capacity=host_token_capacity,
        )  # fmt: skip

    def get_size_per_token(self) -> int:
        return sum(self._widths)

    def init_kv_buffer(self) -> Tensor:
        return ALLOC_MEMORY_FUNCS[self._device.type](
            (self.page_num, self.page_size * self.size_per_token), dtype=torch.uint8, device=self.device,
            pin_memory=self.pin_memory, allocator=self.allocator,
        )  # fmt: skip

    def backup_from_device_all_layer(
        self, device_pool: Any, host_indices: Tensor, device_indices: Tensor, io_backend: str
    ) -> None:
        """Whole pages go out."""
        pages, slots = self._pages(host_indices, io_backend), device_indices.to(self._device, non_blocking=True)
        every = [torch.cat([x[slots] for x in layer], 1).view(len(pages), -1) for layer in self._rows]
        for page, rows in zip(pages, torch.cat(every, 1), strict=True):
            self.kv_buffer[page].copy_(rows, non_blocking=True)

    def load_to_device_per_layer(
        self,
        device_pool: Any,
        host_indices: Tensor,
        device_indices: Tensor,
        layer_id: int,
        io_backend: str,
        *,
        is_draft: bool = False,
    ) -> None:
        """Whole pages of one layer come back."""
        pages, slots = self._pages(host_indices, io_backend), device_indices.to(self._device, non_blocking=True)
        width, start = self._widths[layer_id], self.page_size * sum(self._widths[:layer_id])
        rows = torch.empty(len(pages), self.page_size * width, dtype=torch.uint8, device=self._device)
        for row, page in zip(rows, pages, strict=True):
            row.copy_(self.kv_buffer[page, start : start + len(row)], non_blocking=True)
        layer = self._rows[layer_id]
        for x, part in zip(layer, rows.view(-1, width).split([x.shape[1] for x in layer], 1), strict=True):
            x[slots] = part

    def _pages(self, host_indices: Tensor, io_backend: str) -> list[int]:
        """SGLang gives the slots of whole pages, in order."""
        if io_backend != "direct":
            raise NotImplementedError(f"hicache_io_backend: want 'direct' for tersekv's host pool, got {io_backend!r}")
        return (host_indices[:: self.page_size] // self.page_size).tolist()

    def get_data_page(self, index: int, flat: bool = True) -> Tensor:
        return self.kv_buffer[index // self.page_size]

    def get_dummy_flat_data_page(self) -> Tensor:
        return torch.zeros(self.kv_buffer.shape[1], dtype=torch.uint8, device=self.device, pin_memory=self.pin_memory)

    def set_from_flat_data_page(self, index: int, data_page: Tensor) -> None:
        self.kv_buffer[index // self.page_size] = data_page
