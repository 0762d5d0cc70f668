"""SGLang's K/V pool in tersekv's formats: codes by token, and stored scales by token beside them.

Every buffer begins with a token's slot, as SGLang's own do, so that whatever moves slots moves all of a row.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, unwrap_write_loc
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from .. import env
from ..attributes import HADAMARD
from ..formats import BLOCK, KV_FORMATS, TENSOR, KVFormat, held, kv_format
from ..layers import PagedKVLayer, attributes_of
from ..ops.append import append

_OF_DTYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
}


class Kind(NamedTuple):
    """K's and V's format, and whether their rows lie rotated."""

    k: KVFormat
    v: KVFormat
    rotated: bool

    def row_bytes(self, head_dim: int, head_dim_v: int) -> int:
        return self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim_v)


def kind_of(dtype: torch.dtype) -> Kind:
    """What a pool holds: as the environment says, or a pool of SGLang's dtype.

    A format's name, K's and V's with a slash between, and `+rotated` behind either.
    """
    word = env.sglang_format() or _OF_DTYPE.get(dtype)
    names, plus, rotated = (word or "").partition("+")
    both = names.split("/")
    if word is None or len(both) > 2 or not {*both} <= {*KV_FORMATS} or (plus and rotated != "rotated"):
        want = f"one of {', '.join(KV_FORMATS)}, two of them as K/V, or one of these +rotated"
        raise ValueError(f"TERSEKV_SGLANG_FORMAT: want {want}, got {word!r} for a pool of {dtype}")
    k, v = kv_format(both[0]), kv_format(both[-1])
    if k.storage.itemsize != v.storage.itemsize:
        raise ValueError(f"TERSEKV_SGLANG_FORMAT: want K and V in elements of the same size, got {word!r}")
    return Kind(k, v, bool(plus))


def bytes_of_heads(kvc: Any) -> tuple[int, int]:
    """Bytes of a token in a layer that sees everything, and in one with a window, on this rank."""
    kind, model, parallel = kind_of(kvc.kv_cache_dtype), kvc.model_config, get_parallel()
    heads = model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
    full = heads * kind.row_bytes(model.head_dim, model.v_head_dim)
    if not model.is_hybrid_swa:
        return full, full
    heads = model.get_swa_num_kv_heads(parallel.attn_tp_size)
    return full, heads * kind.row_bytes(model.swa_head_dim, model.swa_v_head_dim)


class TersekvPool(MHATokenToKVPool):
    """k_buffer, v_buffer: [slots, H, elements] a layer; k_scale_buffer, v_scale_buffer: [slots, H, bytes] where K or V
    stores scales, else None."""

    dtype: torch.dtype

    def _create_buffers(self) -> None:
        if self.post_capture_active:
            raise NotImplementedError(
                "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING: want 0, tersekv's pool is allocated at once"
            )
        if self.is_quantized_kv_cache or self.kv_cache_layout != "nhd":
            got = f"{type(self.quant_method).__name__} in layout {self.kv_cache_layout!r}"
            raise NotImplementedError(f"kv_cache_dtype: want a plain pool in layout 'nhd' for tersekv's, got {got}")
        self.kind = kind_of(self.dtype)
        k, v, _ = self.kind
        held(k, "head_dim", self.head_dim)
        held(v, "v_head_dim", self.v_head_dim)
        # Not bfloat16 unless the rows are: on CUDA, models then write rows of 16 bits into the buffers themselves.
        self.dtype = k.storage
        # PyTorch indexes no tensors of 8-bit floats.
        self.store_dtype = torch.uint8 if k.storage.itemsize == 1 else k.storage
        self.native_k_scale_buffer = self.native_v_scale_buffer = self.dq_k_buffer = self.dq_v_buffer = None
        memory = torch.cuda.use_mem_pool(self.custom_mem_pool) if self.enable_custom_mem_pool else nullcontext()
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE), memory:
            self.k_buffer = self._rows(k.elements(self.head_dim), self.store_dtype)
            self.v_buffer = self._rows(v.elements(self.v_head_dim), self.store_dtype)
            self.k_scale_buffer = self.v_scale_buffer = None
            if k.scale_dtype is not None or v.scale_dtype is not None:
                self.k_scale_buffer = self._rows(k.scale_bytes(self.head_dim), torch.uint8)
                self.v_scale_buffer = self._rows(v.scale_bytes(self.v_head_dim), torch.uint8)
        signs = (
            attributes_of(
                HADAMARD if self.kind.rotated else None,
                (self.head_dim, self.v_head_dim),
                self.k_buffer[0].device,
                None,
                None,
            )
            if self.layer_num
            else (None,) * 4
        )
        self._signs = signs[:2]
        self._layers: dict[int, tuple[Any, Any, PagedKVLayer]] = {}
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def _rows(self, elements: int, dtype: torch.dtype) -> list[Tensor]:
        # Slot 0 and the rest of its page take the rows of padding.
        shape = (self.size + self.page_size, self.head_num, elements)
        return [torch.zeros(shape, dtype=dtype, device=self.device) for _ in range(self.layer_num)]

    def layer(self, index: int, k_scale: Any = None, v_scale: Any = None) -> PagedKVLayer:
        """The pages of the pool's layer `index`. k_scale, v_scale: SGLang's of the layer, one number or none."""
        known = self._layers.get(index)
        if known is None or known[0] is not k_scale or known[1] is not v_scale:
            known = self._layers[index] = k_scale, v_scale, self._pages(index, k_scale, v_scale)
        return known[2]

    def _pages(self, index: int, k_scale: Any, v_scale: Any) -> PagedKVLayer:
        def pages(x: Tensor, dtype: torch.dtype) -> Tensor:
            return x.view(-1, self.page_size, *x.shape[1:]).view(dtype)

        def stored(buffers: list[Tensor] | None, f: KVFormat) -> Tensor | None:
            if buffers is None or f.scale_dtype is None:
                return None
            scales = pages(buffers[index], f.scale_dtype)
            return scales if f.scale_block else scales[..., 0]

        k, v, _ = self.kind
        return PagedKVLayer(
            pages(self.k_buffer[index], k.storage), pages(self.v_buffer[index], v.storage), (k.name, v.name),
            _one("k_scale", k_scale, k), _one("v_scale", v_scale, v),
            stored(self.k_scale_buffer, k), stored(self.v_scale_buffer, v), *self._signs,
        )  # fmt: skip

    def set_kv_buffer(
        self,
        layer: Any,
        loc_info: Any,
        cache_k: Tensor,
        cache_v: Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        layer_id_override: int | None = None,
        dcp_kv_mask: Tensor | None = None,
    ) -> None:
        """Write rows [T, H, D] into their slots."""
        if dcp_kv_mask is not None:
            raise NotImplementedError("dcp_kv_mask: want None, tersekv's pool is of one rank")
        index = (layer.layer_id if layer_id_override is None else layer_id_override) - self.start_layer
        k, v = cache_k.view(-1, self.head_num, self.head_dim), cache_v.view(-1, self.head_num, self.v_head_dim)
        append(k, v, self.layer(index, k_scale, v_scale), unwrap_write_loc(loc_info)[0])

    def set_kv_buffer_prefix_valid(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("set_kv_buffer_prefix_valid: tersekv's pool serves no speculative decoding")


def _one(name: str, scale: Any, f: KVFormat) -> float | Tensor:
    """A scale of the tensor as SGLang has it; a tensor is seen and not copied: what is loaded into it later counts."""
    if scale is None or f.scale not in (TENSOR, BLOCK):
        return 1.0
    if not isinstance(scale, Tensor):
        return float(scale)
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(f"{name}: want one float32 for {f.name}, got {list(scale.shape)} {scale.dtype}")
    return scale.detach().view(1)
