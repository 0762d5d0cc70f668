"""What lies where in vLLM's pages: the one place that decides it, for a page's bytes and for a layer's views of them.

A format without stored scales: per head and token K's row, then V's, in any strides. With them, per head: K's codes,
V's codes, K's scales, V's scales, so that rows lie at multiples of 16 bytes, fast kernels take them, and a head's bytes
are in one piece. A connector may take single tokens (`vllm_connectors.py`): for it each row has its scales behind its
codes. Both ways are the same bytes a page. Block scales are linear, and `int4_per_token_head` is not rotated as vLLM's
is: no other backend reads these pages.

NVIDIA H100, 2026-11-26, 64 × 8192 keys of 32/8 heads of 128, int8 in pages of 16: decode 417 us, with the scales of all
heads in one tail 424, behind each row 823; prefill of 4096 rows 1216, 1295, 4722.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attributes import HADAMARD
from ..formats import BLOCK, TENSOR, KVFormat, kv_format, page_tail
from ..layers import PagedKVLayer, make_attributes


class Kind(NamedTuple):
    """K's and V's format, and whether their rows lie rotated."""

    k: KVFormat
    v: KVFormat
    rotated: bool = False

    @property
    def stored(self) -> bool:
        """Whether a page holds scales."""
        return self.k.scale_dtype is not None or self.v.scale_dtype is not None

    @property
    def dtype(self) -> torch.dtype:
        """What the pages are seen as: bytes where they hold scales, else the codes' own dtype."""
        return torch.uint8 if self.stored else self.k.storage

    def row_bytes(self, head_size: int, head_size_v: int) -> int:
        return self.k.row_bytes(head_size) + self.v.row_bytes(head_size_v)


def kind_of(k: str, v: str, rotated: bool = False) -> Kind:
    return Kind(kv_format(k), kv_format(v), rotated)


_VLLM = {  # vLLM's kv_cache_dtype → ours; "auto" follows the pages' dtype
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
_QUANTISED = ("fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")
_PAIRS = {f"{k}/{v}": (k, v) for k, v in permutations(_QUANTISED, 2)}
_ALIKE = {name: (name, name) for name in _QUANTISED}
# Names that vLLM has not: `tersekv.recipe` reads them too.
OWN = {name: kind_of(*both) for name, both in _PAIRS.items()} | {
    f"{name}+rotated": kind_of(*both, True) for name, both in (_ALIKE | _PAIRS).items()
}
FORMATS = {name: kind_of(ours, ours) for name, ours in _VLLM.items()} | OWN
_AUTO = {torch.bfloat16: kind_of("bf16", "bf16"), torch.float16: kind_of("fp16", "fp16")}
# A block of so many tokens takes a multiple of 16 bytes in every format and head size.
BLOCK_STEP = 8


def known(kv_cache_dtype: str) -> str:
    """The name itself, if pages of that kind can be kept."""
    if kv_cache_dtype != "auto" and kv_cache_dtype not in FORMATS:
        own = f"a pair of {', '.join(_QUANTISED)} as K/V, or one of these or a pair +rotated"
        raise ValueError(f"kv_cache_dtype: want auto, {', '.join(_VLLM)}, {own}, got {kv_cache_dtype!r}")
    return kv_cache_dtype


def _kind_of_spec(spec: Any) -> Kind | None:
    mode = spec.kv_quant_mode.name  # vLLM's name in capitals, or one of OWN
    return OWN.get(mode) or FORMATS.get(mode.lower())


def holds_scales(spec: Any) -> bool:
    """Whether the pages of a layer's spec hold scales; True where a release does not tell."""
    kind = _kind_of_spec(spec) if hasattr(spec, "kv_quant_mode") else None
    return not hasattr(spec, "kv_quant_mode") or (kind is not None and kind.stored)


def with_scales(spec: Any) -> Any:
    """A layer's AttentionSpec, with room for the scales that its pages hold."""
    kind = _kind_of_spec(spec)
    if spec.state_content_bytes is not None or kind is None or not kind.stored:
        return spec
    return replace(spec, state_content_bytes=kind.row_bytes(spec.head_size, spec.head_size_v))


def pages_shape(blocks: int, tokens: int, heads: int, head_size: int, kv_cache_dtype: str) -> tuple[int, ...]:
    """[blocks, heads, tokens, content], for the releases that ask for a shape; later ones take `with_scales`."""
    kind = _AUTO[torch.bfloat16] if kv_cache_dtype == "auto" else FORMATS[known(kv_cache_dtype)]
    return blocks, heads, tokens, kind.row_bytes(head_size, head_size) // kind.dtype.itemsize


def pages_of(
    kv_cache: Tensor,
    kv_cache_dtype: str | Kind,
    head_size: int,
    k_scale: Tensor,
    v_scale: Tensor,
    head_size_v: int | None = None,
    *,
    inline: bool = False,
) -> PagedKVLayer:
    """vLLM's pages [blocks, H, tokens, content] of one layer as a PagedKVLayer, without copying.

    kv_cache_dtype:   vLLM's name, or what the pages hold where a file says it
    k_scale, v_scale: vLLM's dequantising fp32 scales, seen and not copied: one element, or one a head (nvfp4: one, the
                      global scale)
    head_size_v:      of V, where it is not K's
    inline:           stored scales lie behind each row, not in the tail of each head's part of a page

    Raises ValueError for a content that is not K's row and V's row of the format, for a page in pieces smaller than a
    head, and for scales of another dtype.
    """
    if isinstance(kv_cache_dtype, Kind):
        kind: Kind | None = kv_cache_dtype
    else:
        kind = _AUTO.get(kv_cache.dtype) if kv_cache_dtype == "auto" else FORMATS.get(kv_cache_dtype)
    if kind is None:
        wanted = ", ".join(map(str, _AUTO))
        raise ValueError(f"kv_cache: want pages of {wanted} for {kv_cache_dtype!r}, got {kv_cache.dtype}")
    dims = head_size, head_size if head_size_v is None else head_size_v
    nbytes = kind.row_bytes(*dims)
    if kv_cache.dim() != 4 or kv_cache.shape[3] * kv_cache.element_size() != nbytes:
        raise ValueError(
            f"kv_cache: want [blocks, heads, tokens, {nbytes} bytes] for {_word(kind)} and head_size="
            f"{dims[0] if dims[0] == dims[1] else dims}, got {list(kv_cache.shape)} {kv_cache.dtype}"
        )
    heads = kv_cache.shape[1]
    one = [
        _scale(f"layer.{name}", s, f, heads) if f.scale in (TENSOR, BLOCK) else 1.0
        for name, s, f in (("_k_scale", k_scale, kind.k), ("_v_scale", v_scale, kind.v))
    ]
    formats, rotation = (kind.k.name, kind.v.name), HADAMARD if kind.rotated else None
    signs = make_attributes(rotation, dims, kv_cache.device, None, None)
    if kind.stored and not inline:
        heads_bytes = _heads_of_pages(kv_cache.view(torch.uint8))
        k, v, ks, vs = _with_tails(heads_bytes, kv_cache.shape[2], kind, dims)
        assert k is not None  # codes always exist; only stored scales may not
        assert v is not None
        return PagedKVLayer(k, v, formats, one[0], one[1], ks, vs, *signs)
    content = kv_cache.transpose(1, 2).view(kind.dtype)
    k_row = kind.k.row_bytes(dims[0]) // kind.dtype.itemsize
    k, ks = _codes_and_scales(content[..., :k_row], kind.k, dims[0], kind)
    v, vs = _codes_and_scales(content[..., k_row:], kind.v, dims[1], kind)
    return PagedKVLayer(k, v, formats, one[0], one[1], ks, vs, *signs)


def _heads_of_pages(pages: Tensor) -> Tensor:
    """[blocks, heads, bytes] of [blocks, heads, tokens, content]: where a head's tokens lie one behind the other, its
    own bytes, else as many of the block's."""
    blocks, heads, tokens, content = pages.shape
    nbytes = tokens * content
    if pages.stride()[2:] == (content, 1):
        return pages.flatten(2)
    if pages.stride()[1:] != (content, heads * content, 1):
        raise ValueError(
            f"kv_cache: want a head's or a block's bytes in one piece for scales in its tail, got {list(pages.shape)} "
            f"with strides {list(pages.stride())}"
        )
    return pages.as_strided((blocks, heads, nbytes), (pages.stride(0), nbytes, 1))


def _with_tails(heads: Tensor, tokens: int, kind: Kind, dims: tuple[int, int]) -> list[Tensor | None]:
    """K's codes, V's codes, their scales [blocks, tokens, heads, ...] of bytes [blocks, heads, n]."""
    sides = list(zip((kind.k, kind.v), dims, strict=True))
    views: list[Tensor | None] = []
    starts, _ = page_tail((kind.k, kind.v), tokens, dims)
    parts = [(f.storage, f.elements(d)) for f, d in sides] + [(f.scale_dtype, f.scales(d)) for f, d in sides]
    for start, (dtype, width) in zip(starts, parts, strict=True):
        if dtype is None:
            views.append(None)
            continue
        part = heads[..., start : start + tokens * width * dtype.itemsize].view(dtype)
        views.append(part.unflatten(-1, (tokens, width)).transpose(1, 2))
    scales = [x if x is None or f.scale_block else x[..., 0] for x, (f, _) in zip(views[2:], sides, strict=True)]
    return [*views[:2], *scales]


def _codes_and_scales(side: Tensor, f: KVFormat, head_size: int, kind: Kind) -> tuple[Tensor, Tensor | None]:
    """Rows of K or of V: codes, and the scales behind them."""
    n = f.code_bytes(head_size) // side.element_size()
    codes = side[..., :n].view(f.storage)
    if f.scale_dtype is None:
        return codes, None
    try:
        scales = side[..., n:].view(f.scale_dtype)
    except RuntimeError:  # a view of wider elements wants every row to begin at one
        raise ValueError(
            f"kv_cache: want stored scales at multiples of {f.scale_dtype.itemsize} bytes, got {_word(kind)} with "
            f"head_size={head_size} behind each row"
        ) from None
    return codes, scales if f.scale_block else scales[..., 0]


def _word(kind: Kind) -> str:
    return kind.k.name if kind.k is kind.v else f"{kind.k.name}/{kind.v.name}"


def _scale(name: str, scale: Tensor, f: KVFormat, heads: int) -> Tensor:
    """A view of a layer's scale: what vLLM writes into it later counts."""
    sizes = (1, heads) if f.scale == TENSOR else (1,)
    if scale.dtype != torch.float32 or scale.numel() not in sizes or not scale.is_contiguous():
        want = " or ".join(map(str, dict.fromkeys(sizes)))
        raise ValueError(
            f"{name}: want contiguous float32 with {want} elements for {f.name}, got {list(scale.shape)} {scale.dtype}"
        )
    return scale.detach().view(-1)
