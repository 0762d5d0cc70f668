"""What lies where in vLLM's pages: the one place that decides it, for a page's bytes and for a layer's views of them.

A page holds, per head and token, K's row and then V's, each with its stored scales after its codes: the bytes that
vLLM's own Triton backend keeps for the per-token-head formats. For nvfp4 the block scales are linear, and int4 is not
rotated as vLLM's is, so these pages are read by no other backend. Any strides will do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..formats import BLOCK, TENSOR, KVFormat, kv_format
from ..layers import PagedKVLayer

FORMATS = {  # vLLM's kv_cache_dtype → ours; "auto" follows the pages' dtype
    "bfloat16": "bf16",
    "float16": "fp16",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp8_per_token_head": "fp8_per_token_head",
    "int8_per_token_head": "int8_per_token_head",
    "nvfp4": "nvfp4",
    "int4_per_token_head": "int4_per_token_head",
}
_AUTO = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# vLLM's quantisation modes with stored scales.
_PACKED = {"FP8_PER_TOKEN_HEAD", "INT8_PER_TOKEN_HEAD", "INT4_PER_TOKEN_HEAD", "NVFP4"}


def known(kv_cache_dtype: str) -> str:
    """The name itself, if pages of that kind can be kept."""
    if kv_cache_dtype != "auto" and kv_cache_dtype not in FORMATS:
        raise ValueError(f"kv_cache_dtype: want auto, {', '.join(FORMATS)}, got {kv_cache_dtype!r}")
    return kv_cache_dtype


def with_scales(spec: Any) -> Any:
    """A layer's AttentionSpec, with room for the scales that are stored in the rows."""
    mode = spec.kv_quant_mode.name
    if spec.state_content_bytes is not None or mode not in _PACKED:
        return spec
    f = kv_format(mode.lower())
    return replace(spec, state_content_bytes=f.row_bytes(spec.head_size) + f.row_bytes(spec.head_size_v))


def pages_shape(blocks: int, tokens: int, heads: int, head_size: int, kv_cache_dtype: str) -> tuple[int, ...]:
    """[blocks, heads, tokens, content], for the releases that ask for a shape; later ones take `with_scales`."""
    f = kv_format("bf16" if kv_cache_dtype == "auto" else FORMATS[known(kv_cache_dtype)])
    return blocks, heads, tokens, 2 * f.row_bytes(head_size) // _stored(f).itemsize


def pages_of(
    kv_cache: Tensor,
    kv_cache_dtype: str,
    head_size: int,
    k_scale: Tensor,
    v_scale: Tensor,
    head_size_v: int | None = None,
) -> PagedKVLayer:
    """vLLM's pages [blocks, H, tokens, content] of one layer as a PagedKVLayer, without copying.

    k_scale, v_scale: vLLM's dequantising fp32 scales, seen and not copied: one element, or one a head (nvfp4: one, the
                      global scale)
    head_size_v:      of V, where it is not K's

    Raises ValueError for a content that is not K's row and V's row of the format, and for scales of another dtype.
    """
    name = _AUTO.get(kv_cache.dtype) if kv_cache_dtype == "auto" else FORMATS.get(kv_cache_dtype)
    if name is None:
        wanted = ", ".join(map(str, _AUTO))
        raise ValueError(f"kv_cache: want pages of {wanted} for {kv_cache_dtype!r}, got {kv_cache.dtype}")
    f = kv_format(name)
    sizes = (head_size, head_size if head_size_v is None else head_size_v)
    rows = [f.row_bytes(d) for d in sizes]
    if kv_cache.dim() != 4 or kv_cache.shape[3] * kv_cache.element_size() != sum(rows):
        raise ValueError(
            f"kv_cache: want [blocks, heads, tokens, {sum(rows)} bytes] for {name} and head_size="
            f"{sizes[0] if sizes[0] == sizes[1] else sizes}, got {list(kv_cache.shape)} {kv_cache.dtype}"
        )
    content = kv_cache.transpose(1, 2).view(_stored(f))
    sides = content.split([row // content.element_size() for row in rows], -1)
    (k, ks), (v, vs) = (_codes_and_scales(side, f, d) for side, d in zip(sides, sizes, strict=True))
    both = [("layer._k_scale", k_scale), ("layer._v_scale", v_scale)]
    one = [_scale(side, s, f, k.shape[2]) if f.scale in (TENSOR, BLOCK) else 1.0 for side, s in both]
    return PagedKVLayer(k, v, name, one[0], one[1], ks, vs)


def _codes_and_scales(side: Tensor, f: KVFormat, head_size: int) -> tuple[Tensor, Tensor | None]:
    """Rows of K or of V: codes, and the scales behind them."""
    if f.scale_dtype is None:
        return side, None
    n = f.code_bytes(head_size)
    scales = side[..., n:].view(f.scale_dtype)
    return side[..., :n].view(f.storage), scales if f.scale_block else scales[..., 0]


def _scale(name: str, scale: Tensor, f: KVFormat, heads: int) -> Tensor:
    """A view of a layer's scale: what vLLM writes into it later counts."""
    sizes = (1, heads) if f.scale == TENSOR else (1,)
    if scale.dtype != torch.float32 or scale.numel() not in sizes or not scale.is_contiguous():
        want = " or ".join(map(str, dict.fromkeys(sizes)))
        raise ValueError(
            f"{name}: want contiguous float32 with {want} elements for {f.name}, got {list(scale.shape)} {scale.dtype}"
        )
    return scale.detach().view(-1)


def _stored(f: KVFormat) -> torch.dtype:
    """What the pages are seen as: bytes where rows hold codes and scales, else the codes' own dtype."""
    return f.storage if f.scale_dtype is None else torch.uint8
