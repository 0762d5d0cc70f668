"""Paged caches of all layers of a model: allocation and bytes. One layer is a view of its tensors: layers.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .counts import positive, whole
from .formats import (
    BLOCK,
    MAX_HEAD_DIM,
    MAX_HEAD_DIM_V,
    TENSOR,
    KVFormat,
    kv_bytes_per_token,
    kv_format,
    latent_bytes_per_token,
    latent_format,
)
from .layers import PagedKVLayer, PagedLatentLayer, Scale

_Layer = TypeVar("_Layer", PagedKVLayer, PagedLatentLayer)


class _PagedCache(Generic[_Layer]):
    """Layers of one kind and one geometry: what both kinds of cache share."""

    def __init__(self, layers: Sequence[_Layer]) -> None:
        if not layers:
            raise ValueError("layers: want at least one, got none")
        self.layers: tuple[_Layer, ...] = tuple(layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} layers, the first {self[0]!r})"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> _Layer:
        return self.layers[layer]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def format(self) -> str:
        return self.layers[0].format

    @property
    def device(self) -> torch.device:
        return self.layers[0].device

    @property
    def page_size(self) -> int:
        return self.layers[0].page_size

    @property
    def num_pages(self) -> int:
        return self.layers[0].num_pages

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, stored scales included."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers."""
        return self.bytes_per_token * self.num_pages * self.page_size


class PagedKVCache(_PagedCache[PagedKVLayer]):
    """The K/V cache of all layers of a model. `cache[i]` is layer i, a `PagedKVLayer`."""

    def __init__(self, layers: Sequence[PagedKVLayer], head_dim: int, head_dim_v: int) -> None:
        super().__init__(layers)
        self.head_dim, self.head_dim_v = head_dim, head_dim_v

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        format: str,
        head_dim_v: int | None = None,
        layout: str = "NHD",
        packed: bool = False,
        inline_scales: bool = False,
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        device: torch.device | str | None = None,
    ) -> PagedKVCache:
        """Allocate a zeroed cache.

        layout:         memory order inside a page: "NHD" [slot, head, dim] or "HND" [head, slot, dim]
        packed:         K and V of a layer in one 5-D tensor [P, 2, ...] (needs head_dim_v == head_dim)
        inline_scales:  stored scales, of formats that have them, follow the codes in each row instead of living in
                        tensors of their own; nvfp4 then wants head sizes that are multiples of 32 on a GPU, where
                        decode reads rows of whole 16-bit words

        Raises ValueError for sizes that the format cannot hold or `decode` cannot read, and for scales that the format
        does not have.
        """
        f, dv, device = kv_format(format), head_dim if head_dim_v is None else head_dim_v, device_of(device)
        _positive(num_layers=num_layers, num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads)
        for name, d, most in (("head_dim", head_dim, MAX_HEAD_DIM), ("head_dim_v", dv, MAX_HEAD_DIM_V)):
            step = f.scale_block or 8
            if not 0 < whole(name, d) <= most or d % step:
                raise ValueError(f"{name}: want a positive multiple of {step} for {format}, at most {most}, got {d}")
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            _scale_fits(name, scale, f)
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: want 'NHD' or 'HND', got {layout!r}")
        if packed and dv != head_dim:
            raise ValueError(f"packed: want head_dim_v == head_dim={head_dim}, got {dv}")

        inner = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
        layers = []
        for _ in range(num_layers):
            pair = []
            both = _rows(f, (num_pages, 2, *inner), head_dim, inline_scales, device) if packed else None
            for i, d in enumerate((head_dim, dv)):
                parts = (
                    [None if p is None else p[:, i] for p in both]
                    if both
                    else _rows(f, (num_pages, *inner), d, inline_scales, device)
                )
                pair.append([p if p is None or layout == "NHD" else p.transpose(1, 2) for p in parts])
            (k, ks), (v, vs) = pair
            assert k is not None  # codes always exist; only stored scales may not
            assert v is not None
            layers.append(PagedKVLayer(k, v, format, k_scale, v_scale, ks, vs))
        return cls(layers, head_dim, dv)

    @classmethod
    def from_tensors(cls, tensors: Sequence, *, scale_caches: Sequence | None = None, **options) -> PagedKVCache:
        """A cache over existing tensors, one entry per layer, without copying; see `PagedKVLayer.of`."""
        scales = [None] * len(tensors) if scale_caches is None else scale_caches
        if len(scales) != len(tensors):
            raise ValueError(f"scale_caches: want {len(tensors)} layers, got {len(scales)}")
        layers = [PagedKVLayer.of(t, scale_cache=s, **options) for t, s in zip(tensors, scales, strict=True)]
        if not layers:
            raise ValueError("tensors: want at least one layer, got none")
        per = kv_format(layers[0].format).values_per_element
        return cls(layers, layers[0].k.shape[-1] * per, layers[0].v.shape[-1] * per)

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].num_kv_heads

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, stored scales included."""
        return len(self) * kv_bytes_per_token(self.format, self.num_kv_heads, self.head_dim, self.head_dim_v)


class PagedLatentCache(_PagedCache[PagedLatentLayer]):
    """The MLA latent cache of all layers of a model. `cache[i]` is layer i, a `PagedLatentLayer`."""

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        *,
        format: str,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int = 64,
        split: bool = False,
        kv_scale: Scale = 1.0,
        device: torch.device | str | None = None,
    ) -> PagedLatentCache:
        """Allocate a zeroed cache. `split` puts latent and rotary parts in tensors of their own.

        Raises ValueError for sizes that the format cannot hold, for a scale that it does not have, and for `split` with
        fp8_ds_mla.
        """
        f, device = latent_format(format), device_of(device)
        _positive(num_layers=num_layers, num_pages=num_pages, page_size=page_size)
        step = f.scale_block or 8
        if whole("kv_lora_rank", kv_lora_rank) <= 0 or kv_lora_rank % step:
            raise ValueError(f"kv_lora_rank: want a positive multiple of {step} for {format}, got {kv_lora_rank}")
        if whole("qk_rope_head_dim", qk_rope_head_dim) <= 0 or qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: want a positive even number, got {qk_rope_head_dim}")
        if split and f.scale_dtype is not None:
            raise ValueError(f"split: want False for {format}, which keeps a token's parts in one row, got True")
        _scale_fits("kv_scale", kv_scale, f)
        layers = []
        for _ in range(num_layers):
            if split:
                ckv = torch.zeros(num_pages, page_size, kv_lora_rank, dtype=f.storage, device=device)
                kpe = torch.zeros(num_pages, page_size, qk_rope_head_dim, dtype=f.storage, device=device)
                layers.append(PagedLatentLayer(ckv, kpe, format, kv_scale))
                continue
            nbytes = latent_bytes_per_token(format, kv_lora_rank, qk_rope_head_dim)
            rows = torch.zeros(num_pages, page_size, nbytes, dtype=torch.uint8, device=device)
            if f.scale_dtype is None:
                rows = rows.view(f.storage)
            layers.append(PagedLatentLayer.of(rows, format=format, kv_lora_rank=kv_lora_rank, kv_scale=kv_scale))
        return cls(layers)

    @classmethod
    def from_tensors(cls, tensors: Sequence, **options) -> PagedLatentCache:
        """A cache over existing tensors, one entry per layer, without copying; see `PagedLatentLayer.of`."""
        return cls([PagedLatentLayer.of(t, **options) for t in tensors])

    @property
    def kv_lora_rank(self) -> int:
        return self.layers[0].kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:
        return self.layers[0].qk_rope_head_dim

    @property
    def bytes_per_token(self) -> int:
        return len(self) * latent_bytes_per_token(self.format, self.kv_lora_rank, self.qk_rope_head_dim)


def _rows(f: KVFormat, outer: tuple, dim: int, inline: bool, device) -> list[Tensor | None]:
    """[codes, stored scales or None], both zeroed, over one buffer (inline) or two."""
    if f.scale_dtype is None:
        return [torch.zeros(*outer, f.elements(dim), dtype=f.storage, device=device), None]
    if inline:
        raw = torch.zeros(*outer, f.row_bytes(dim), dtype=torch.uint8, device=device)
        codes = raw[..., : f.code_bytes(dim)].view(f.storage)
        scales = raw[..., f.code_bytes(dim) :].view(f.scale_dtype)
    else:
        codes = torch.zeros(*outer, f.elements(dim), dtype=f.storage, device=device)
        scales = torch.zeros(*outer, f.scales(dim), dtype=f.scale_dtype, device=device)
    return [codes, scales[..., 0] if f.scale_block is None else scales]


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        positive(name, value)


def _scale_fits(name: str, scale: Scale, f: KVFormat) -> None:
    """Raise unless the format has such a scale; what a tensor holds, and its shape, are for the calls."""
    if not isinstance(scale, (int, float, Tensor)):
        raise TypeError(f"{name}: want a number or a Tensor, got {type(scale).__name__}")
    number = None if isinstance(scale, Tensor) else scale
    given = "a tensor" if number is None else f"{number:.6g}"
    if f.scale not in (TENSOR, BLOCK) and number != 1:
        raise ValueError(f"{name}: want 1.0 for {f.name}, which has no scale of the tensor, got {given}")
    if number is not None and not 0 < number < float("inf"):
        raise ValueError(f"{name}: want a positive, finite number, got {given}")


def device_of(device: torch.device | str | int | None) -> torch.device | None:
    """A device as torch knows it; None stays None."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: want a device of torch such as 'cuda', 'cuda:1' or 'cpu', got {device!r}") from None
