"""SGLang's pool of latents in tersekv's formats: one row of bytes a token, latent and rotary part in one.

In 16 bits and fp8 rows are SGLang's own; those of `fp8_ds_mla` have their scales within. So whatever moves slots moves
all of a row.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, unwrap_write_loc
from torch import Tensor

from .. import env
from ..formats import LATENT_FORMATS, KVFormat
from ..layers import PagedLatentLayer
from ..ops.mla import mla_append
from .sglang_pool import FORMAT, OF_DTYPE


def latents(dtype: torch.dtype) -> KVFormat:
    """The format of a pool of latents: as the environment says, or as SGLang's dtype."""
    word = env.sglang_format() or OF_DTYPE.get(dtype)
    if word not in LATENT_FORMATS:
        raise ValueError(f"{FORMAT}: want one of {', '.join(LATENT_FORMATS)} for latent attention, got {word!r}")
    return LATENT_FORMATS[word]


def row_bytes(f: KVFormat, kv_lora_rank: int, qk_rope_head_dim: int) -> int:
    """Bytes of a token in one layer."""
    return f.row_bytes(kv_lora_rank) + qk_rope_head_dim * (f.rope_storage or f.storage).itemsize


class TersekvMLAPool(MLATokenToKVPool):
    """kv_buffer: [slots, 1, elements] a layer."""

    dtype: torch.dtype

    def _create_buffers(self) -> None:
        f = self.format = latents(self.dtype)
        self.dtype = torch.uint8 if f.rope_storage is not None else f.storage
        # PyTorch indexes no tensors of 8-bit floats.
        self.store_dtype = torch.uint8 if self.dtype.itemsize == 1 else self.dtype
        self.kv_cache_dim = row_bytes(f, self.kv_lora_rank, self.qk_rope_head_dim) // self.dtype.itemsize
        # Slot 0 and the rest of its page take the rows of padding.
        shape = (self.size + self.page_size, 1, self.kv_cache_dim)
        memory = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), memory:
            self.kv_buffer = [
                torch.zeros(shape, dtype=self.store_dtype, device=self.device) for _ in range(self.layer_num)
            ]
        self._layers = [self._pages(rows) for rows in self.kv_buffer]

    def _pages(self, rows: Tensor) -> PagedLatentLayer:
        pages = rows.view(-1, self.page_size, self.kv_cache_dim).view(self.dtype)
        return PagedLatentLayer.of(
            pages, format=self.format.name, kv_lora_rank=self.kv_lora_rank, qk_rope_head_dim=self.qk_rope_head_dim
        )

    def layer(self, index: int) -> PagedLatentLayer:
        """The pages of the pool's layer `index`. As in SGLang's own pool, fp8 has no scale."""
        return self._layers[index]

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor | None, layer_id_override: int | None = None
    ) -> None:
        """Write rows [T, 1, L + R] into their slots."""
        nope, rope = cache_k.split([self.kv_lora_rank, self.qk_rope_head_dim], -1)
        self.set_mla_kv_buffer(layer, loc_info, nope, rope, layer_id_override)

    def set_mla_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k_nope: Tensor,
        cache_k_rope: Tensor | None,
        layer_id_override: int | None = None,
    ) -> None:
        """Write rows [T, 1, L] and [T, 1, R] into their slots."""
        index = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        slots, latent = unwrap_write_loc(loc_info)[0], cache_k_nope.view(-1, self.kv_lora_rank)
        rotary = None if cache_k_rope is None else cache_k_rope.view(len(latent), self.qk_rope_head_dim)
        mla_append(latent, rotary, self.layer(index), slots)

    def get_mla_kv_buffer(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("get_mla_kv_buffer: tersekv attends to latents in the pool, and gives back no rows")
