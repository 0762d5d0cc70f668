"""vLLM's pages of latents: its own bytes in every cache dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..layers import PagedLatentLayer

FORMATS = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_ds_mla": "fp8_ds_mla"}
# "auto" is the model's dtype.
_AUTO = {torch.bfloat16: "bf16", torch.float16: "fp16"}
_STORAGE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8_e4m3": torch.float8_e4m3fn, "fp8_ds_mla": torch.uint8}


def latents_of(
    kv_cache: Tensor, kv_cache_dtype: str, kv_lora_rank: int, k_scale: Tensor, qk_rope_head_dim: int | None = None
) -> PagedLatentLayer:
    """vLLM's pages [blocks, tokens, row] of one latent layer as a PagedLatentLayer, without copying.

    k_scale:          vLLM's dequantising fp32 scale of one element, of the latent and of its rotary part; seen and not
                      copied
    qk_rope_head_dim: the model's; 0: a rotary part that rows of fp8_ds_mla have all the same is not looked at

    Raises ValueError for pages of another dtype, and for another scale.
    """
    name = _AUTO.get(kv_cache.dtype) if kv_cache_dtype == "auto" else FORMATS.get(kv_cache_dtype)
    if name is None:
        raise ValueError(f"kv_cache: want pages of bfloat16 or float16 for {kv_cache_dtype!r}, got {kv_cache.dtype}")
    sizes: dict[str, Any] = {"kv_lora_rank": kv_lora_rank, "qk_rope_head_dim": qk_rope_head_dim}
    if name != "fp8_e4m3":
        return PagedLatentLayer.of(kv_cache.view(_STORAGE[name]), format=name, **sizes)
    if k_scale.dtype != torch.float32 or k_scale.numel() != 1:
        raise ValueError(f"layer._k_scale: want float32 with 1 element, got {list(k_scale.shape)} {k_scale.dtype}")
    rows, scale = kv_cache.view(_STORAGE[name]), k_scale.detach().view(-1)
    return PagedLatentLayer.of(rows, format=name, kv_scale=scale, **sizes)
