"""Paged caches of all layers of a model: allocation and bytes. One layer is a view of its tensors: layers.py."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from . import saved
from .attributes import HADAMARD, channel_scales, fitting_scale
from .formats import (
    KV_FORMATS,
    TENSOR,
    KVFormat,
    held_rotary,
    kv_bytes_per_token,
    kv_format,
    kv_page_bytes,
    latent_bytes_per_token,
    latent_format,
    latent_page_bytes,
    readable,
)
from .index_layers import PagedIndexLayer
from .layers import (
    Formats,
    PagedKVLayer,
    PagedLatentLayer,
    Scale,
    field_values,
    from_buffers,
    kv_pair,
    make_attributes,
    to_buffers,
)  # fmt: skip
from .recipe import spelt
from .scalars import as_bool, as_int, as_positive_int

_SCALES = ("apart", "inline", "tail")
_Layer = TypeVar("_Layer", PagedKVLayer, PagedLatentLayer, PagedIndexLayer)


class PagedLayers(Generic[_Layer]):
    """Layers of one kind and one geometry: what every kind of cache shares."""

    _kind: type

    def __init__(self, layers: Sequence[_Layer]) -> None:
        if not layers:
            raise ValueError("layers: want at least one, got none")
        for i, layer in enumerate(layers):
            if not isinstance(layer, self._kind):
                raise TypeError(f"layers: want {self._kind.__name__}, got {type(layer).__name__} at {i}")
            if _geometry(layer) != _geometry(layers[0]):
                raise ValueError(f"layers: want layers alike, got {layers[0]!r} and {layer!r} at {i}")
        self.layers: tuple[_Layer, ...] = tuple(layers)

    def __reduce__(self) -> tuple:
        return _restored, (type(self), *to_buffers([field_values(layer) for layer in self.layers]))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} layers, the first {self[0]!r})"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> _Layer:
        try:
            return self.layers[layer]
        except IndexError:
            raise IndexError(f"layer: want 0 to {len(self) - 1}, the cache's layers, got {layer}") from None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def format(self) -> str | tuple[str, str]:
        """That of every layer, a name or K's and V's. Raises ValueError where layers differ: ask cache[i].format."""
        found = {layer.format for layer in self.layers}
        if len(found) > 1:
            raise ValueError(f"format: want layers of one, got {', '.join(map(str, self.layer_formats))}")
        return self.layers[0].format

    @property
    def layer_formats(self) -> tuple[str | tuple[str, str], ...]:
        return tuple(layer.format for layer in self.layers)

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
        """Bytes of all pages of all layers, without what pads pages."""
        return self.bytes_per_token * self.num_pages * self.page_size


class PagedKVCache(PagedLayers[PagedKVLayer]):
    """The K/V cache of all layers of a model. `cache[i]` is layer i, a `PagedKVLayer`.

    >>> cache = tersekv.PagedKVCache.allocate(
    ...     num_layers=2, num_pages=16, page_size=16, num_kv_heads=8, head_dim=128, format="nvfp4"
    ... )
    >>> cache[0].k.shape, cache.bytes_per_token
    (torch.Size([16, 16, 8, 64]), 2304)
    """

    _kind = PagedKVLayer

    def __init__(self, layers: Sequence[PagedKVLayer], head_dim: int, head_dim_v: int) -> None:
        super().__init__(layers)
        own = layers[0].head_dim, layers[0].head_dim_v
        if (head_dim, head_dim_v) != own:
            raise ValueError(f"head_dim, head_dim_v: want those of the layers, {own}, got {(head_dim, head_dim_v)}")
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
        format: Formats | None = None,
        layer_formats: Sequence[Formats] | None = None,
        head_dim_v: int | None = None,
        layout: str = "NHD",
        packed: bool = False,
        scales: str = "apart",
        inline_scales: bool | None = None,
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        rotation: str | Sequence[str | None] | None = None,
        k_channel_scale: Tensor | None = None,
        v_channel_scale: Tensor | None = None,
        device: torch.device | str | None = None,
    ) -> PagedKVCache:
        """Allocate a zeroed cache.

        format:  a name, K's and V's: ("fp8_e4m3", "nvfp4"), or a word of `tersekv eval`, for instance
                 "fp8_e4m3/nvfp4+rotated+ends=bf16"; or instead of it layer_formats, a name or a pair a layer
        layout:  memory order inside a page: "NHD" [slot, head, dim] or "HND" [head, slot, dim]
        packed:  K and V of a layer in one 5-D tensor [P, 2, ...] (needs head_dim_v == head_dim)
        scales:  where stored scales lie, of formats that have them: "apart", in tensors of their own; "inline", behind
                 the codes of each row (nvfp4 then wants head sizes that are multiples of 32 on a GPU, where decode
                 reads rows of whole 16-bit words); "tail", at the end of each page: a layer is one buffer of bytes as
                 `PagedKVLayer.from_buffer` sees it, whether or not there are scales
        inline_scales:  the older name of scales="inline"; it warns, and will go
        rotation:  None or "hadamard", or one each for K and V: rows lie rotated in blocks of the largest power of two
                 that divides their size, which spreads what a few channels hold over a block; appends rotate,
                 attentions rotate queries and outputs back
        k_channel_scale, v_channel_scale:  fp32 [H, D] and [H, Dv], or [layers, H, ...], positive: rows are divided by
                 them when appended, queries and outputs multiplied; `channel_scale` makes them. Their values are
                 looked at, which waits for a GPU that they lie on, but not while a CUDA graph is captured

        Raises ValueError for sizes that the format cannot hold or `decode` cannot read, for scales that the format
        does not have, and for channel scales that are not positive and finite.
        """
        device, num_layers = device_of(device), as_positive_int("num_layers", num_layers)
        word = spelt(
            format, num_layers, "allocate_saved(FILE, ...)", layer_formats=layer_formats, rotation=rotation,
            k_channel_scale=k_channel_scale, v_channel_scale=v_channel_scale, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip
        if word is not None:
            format, layer_formats = None, word.layers(num_layers)
            rotation = HADAMARD if word.rotated else rotation
        formats = _formats_of_layers(num_layers, format, layer_formats)
        num_pages, page_size = as_positive_int("num_pages", num_pages), as_positive_int("page_size", page_size)
        num_kv_heads, head_dim = as_positive_int("num_kv_heads", num_kv_heads), as_int("head_dim", head_dim)
        dims = head_dim, head_dim if head_dim_v is None else as_int("head_dim_v", head_dim_v)
        packed, scales = as_bool("packed", packed), _place_of_scales(scales, inline_scales)
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: want 'NHD' or 'HND', got {layout!r}")
        for both in dict.fromkeys(formats):
            readable(both, dims)
            if packed and dims[1] != head_dim:
                raise ValueError(f"packed: want head_dim_v == head_dim={head_dim}, got {dims[1]}")
            if packed and both[0] != both[1]:
                raise ValueError(f"packed: want K and V of one format, got {both[0].name} and {both[1].name}")
        given = []
        for name, scale, of in (("k_scale", k_scale, 0), ("v_scale", v_scale, 1)):
            for f in dict.fromkeys(both[of] for both in formats):
                scale = fitting_scale(name, scale, f, device, num_kv_heads if f.scale == TENSOR else 1)
            given.append(scale)
        drawn = make_attributes(rotation, dims, device, None, None)[:2]
        channels = [
            channel_scales(name, scale, num_layers, (num_kv_heads, d), device)
            for name, scale, d in zip(("k_channel_scale", "v_channel_scale"), (k_channel_scale, v_channel_scale), dims,
                                      strict=True)
        ]  # fmt: skip
        layers = []
        for i, both in enumerate(formats):
            k, v, ks, vs = _tensors(both, (num_pages, page_size, num_kv_heads), dims, layout, packed, scales, device)
            own = [None if c is None else c[i] for c in channels]
            names = both[0].name, both[1].name
            layers.append(PagedKVLayer(k, v, names, given[0], given[1], ks, vs, *drawn, own[0], own[1]))
        return cls(layers, *dims)

    @classmethod
    def from_tensors(cls, tensors: Sequence, *, scale_caches: Sequence | None = None, **options) -> PagedKVCache:
        """A cache over existing tensors, one entry per layer, without copying; see `PagedKVLayer.of`."""
        count = _count("tensors", tensors)
        if not count:
            raise ValueError("tensors: want at least one layer, got none")
        scales = [None] * count if scale_caches is None else scale_caches
        if _count("scale_caches", scales) != count:
            raise ValueError(f"scale_caches: want {count} layers, got {len(scales)}")
        layers = [PagedKVLayer.of(t, scale_cache=s, **options) for t, s in zip(tensors, scales, strict=True)]
        return cls(layers, layers[0].head_dim, layers[0].head_dim_v)

    def save_attributes(self, path: str | os.PathLike) -> None:
        """What pages of this cache need to be read again, in a safetensors file: of each layer its formats, its scales
        of the tensor, signs and channel scales. Not the pages. OSError: no place to write."""
        saved.write(
            path, self.layers, {name: getattr(self, name) for name in ("num_kv_heads", "head_dim", "head_dim_v")}
        )

    @classmethod
    def allocate_saved(
        cls,
        path: str | os.PathLike,
        num_pages: int,
        page_size: int,
        *,
        layout: str = "NHD",
        packed: bool = False,
        scales: str = "apart",
        device: torch.device | str | None = None,
    ) -> PagedKVCache:
        """Allocate a zeroed cache with the sizes and attributes of one whose `save_attributes` wrote the file.

        layout, packed, scales:  as `allocate` takes them

        Raises ValueError for a file that `save_attributes` did not write, or that was changed since, with the name of
        the file and the entry.
        """
        sizes, formats, attributes = saved.read(path)
        made = cls.allocate(
            len(formats), num_pages, page_size, **sizes, layer_formats=formats, layout=layout, packed=packed,
            scales=scales, device=device,
        )  # fmt: skip
        where, layers = device_of(device) or torch.get_default_device(), []
        for layer, values in zip(made.layers, attributes, strict=True):
            own: dict[str, Any] = {n: x.to(where) if isinstance(x, Tensor) else x for n, x in values.items()}
            layers.append(replace(layer, **own))
        return cls(layers, made.head_dim, made.head_dim_v)

    @property
    def num_kv_heads(self) -> int:
        return self.layers[0].num_kv_heads

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, stored scales included."""
        sizes = self.num_kv_heads, self.head_dim, self.head_dim_v
        return sum(kv_bytes_per_token(format, *sizes) for format in self.layer_formats)


class PagedLatentCache(PagedLayers[PagedLatentLayer]):
    """The MLA latent cache of all layers of a model. `cache[i]` is layer i, a `PagedLatentLayer`.

    >>> cache = tersekv.PagedLatentCache.allocate(num_layers=2, num_pages=16, page_size=64, format="fp8_ds_mla")
    >>> cache.num_layers, cache.bytes_per_token
    (2, 1312)
    """

    _kind = PagedLatentLayer

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_pages: int,
        page_size: int,
        *,
        format: str,
        kv_lora_rank: int = 512,
        qk_rope_head_dim: int | None = None,
        split: bool = False,
        kv_scale: Scale = 1.0,
        rotation: None = None,
        device: torch.device | str | None = None,
    ) -> PagedLatentCache:
        """Allocate a zeroed cache. `split` puts latent and rotary parts in tensors of their own.

        qk_rope_head_dim:  None: 64, or 0 for `fp8_v4` and `fp8_v41`, whose rows have no rotary part; 0: none

        Raises ValueError for sizes that the format cannot hold, for a scale that it does not have, for `split` with
        fp8_ds_mla, and for a rotation, which only K/V caches have.
        """
        if rotation is not None:
            raise ValueError(f"rotation: want None for a latent cache, got {rotation!r}")
        f, device = latent_format(format), device_of(device)
        num_layers, num_pages = as_positive_int("num_layers", num_layers), as_positive_int("num_pages", num_pages)
        page_size, kv_lora_rank = as_positive_int("page_size", page_size), as_int("kv_lora_rank", kv_lora_rank)
        step = f.scale_block or 8
        if kv_lora_rank <= f.tail or kv_lora_rank % step:
            raise ValueError(f"kv_lora_rank: want a positive multiple of {step} for {format}, got {kv_lora_rank}")
        qk_rope_head_dim = held_rotary(f, qk_rope_head_dim)
        if qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: want an even number, or 0 for none, got {qk_rope_head_dim}")
        if as_bool("split", split) and f.scale_dtype is not None:
            raise ValueError(f"split: want False for {format}, which keeps a token's parts in one row, got True")
        kv_scale = fitting_scale("kv_scale", kv_scale, f, device)
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
            elif f.tail:
                step = latent_page_bytes(format, page_size, kv_lora_rank)
                pages = torch.zeros(num_pages, step, dtype=torch.uint8, device=device)
                rows = pages[:, : page_size * nbytes].unflatten(1, (page_size, nbytes))
            layers.append(PagedLatentLayer.of(rows, format=format, kv_lora_rank=kv_lora_rank, kv_scale=kv_scale))
        return cls(layers)

    @classmethod
    def from_tensors(cls, tensors: Sequence, **options) -> PagedLatentCache:
        """A cache over existing tensors, one entry per layer, without copying; see `PagedLatentLayer.of`."""
        if not _count("tensors", tensors):
            raise ValueError("tensors: want at least one layer, got none")
        return cls([PagedLatentLayer.of(t, **options) for t in tensors])

    @property
    def kv_lora_rank(self) -> int:
        return self.layers[0].kv_lora_rank

    @property
    def qk_rope_head_dim(self) -> int:
        return self.layers[0].qk_rope_head_dim

    @property
    def bytes_per_token(self) -> int:
        return len(self) * latent_bytes_per_token(self.layers[0].format, self.kv_lora_rank, self.qk_rope_head_dim)


def _restored(kind: type, buffers: list[Tensor], listed: list[list]) -> PagedLayers:
    """A cache, unpickled."""
    return kind.from_tensors(from_buffers(kind._kind, buffers, listed))  # type: ignore[attr-defined]


torch.serialization.add_safe_globals([_restored, PagedKVCache, PagedLatentCache])


def _tensors(
    both: tuple[KVFormat, KVFormat], sizes: tuple[int, int, int], dims: tuple[int, int], layout: str, packed: bool,
    scales: str, device: torch.device | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Zeroed codes of K and V, and their stored scales, as a layer sees them. sizes: pages, slots, heads."""
    pages, size, heads = sizes
    if scales == "tail":
        names = both[0].name, both[1].name
        buffer = torch.zeros(pages, kv_page_bytes(names, size, heads, *dims), dtype=torch.uint8, device=device)
        seen = PagedKVLayer.from_buffer(buffer, size, heads, *dims, format=names, layout=layout)
        return seen.k, seen.v, seen.k_scale_cache, seen.v_scale_cache
    inner = (size, heads) if layout == "NHD" else (heads, size)
    if packed:
        whole = _rows(both[0], (pages, 2, *inner), dims[0], scales == "inline", device)
        sides = [[None if x is None else x[:, i] for x in whole] for i in range(2)]
    else:
        sides = [_rows(f, (pages, *inner), d, scales == "inline", device) for f, d in zip(both, dims, strict=True)]
    if layout == "HND":
        sides = [[None if x is None else x.transpose(1, 2) for x in side] for side in sides]
    (k, ks), (v, vs) = sides
    assert k is not None  # codes always exist; only stored scales may not
    assert v is not None
    return k, v, ks, vs


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


def _formats_of_layers(
    count: int, format: Formats | None, layer_formats: Sequence[Formats] | None
) -> list[tuple[KVFormat, KVFormat]]:
    """K's and V's format of each layer."""
    if (format is None) == (layer_formats is None):
        got = "neither" if format is None else "both"
        known = f"; formats are {', '.join(KV_FORMATS)}" if format is None else ""
        raise ValueError(f"format: want it, or layer_formats with an entry for each layer, got {got}{known}")
    if layer_formats is None:
        entries, name = [format] * count, "format"
    else:
        entries, name = [*layer_formats], "layer_formats"
        if isinstance(layer_formats, str) or len(entries) != count:
            raise ValueError(f"layer_formats: want {count} entries, one a layer, got {layer_formats!r}")
    pairs = [kv_pair(name, entry) for entry in entries]
    return [(kv_format(k), kv_format(v)) for k, v in pairs]


def _place_of_scales(scales: str, inline_scales: bool | None) -> str:
    """`scales`, or what its older name asks for."""
    if scales not in _SCALES:
        raise ValueError(f"scales: want {', '.join(map(repr, _SCALES[:-1]))} or {_SCALES[-1]!r}, got {scales!r}")
    if inline_scales is None:
        return scales
    inline = as_bool("inline_scales", inline_scales)
    if scales != "apart":
        raise ValueError(f"inline_scales: want it without scales={scales!r}, whose older name it is, got {inline}")
    warnings.warn("inline_scales is scales='inline' now, and will go", DeprecationWarning, stacklevel=3)
    return "inline" if inline else "apart"


def _count(name: str, entries: Sequence) -> int:
    try:
        return len(entries)
    except TypeError:  # a tensor without dimensions has a __len__ too
        kind = type(entries).__name__
        raise TypeError(f"{name}: want a sequence with an entry for each layer, got {kind}") from None


def _geometry(layer: PagedKVLayer | PagedLatentLayer | PagedIndexLayer) -> tuple:
    if isinstance(layer, PagedIndexLayer):
        return layer.format, layer.rotation, layer.k.shape
    if isinstance(layer, PagedKVLayer):  # of any formats
        return layer.num_pages, layer.page_size, layer.num_kv_heads, layer.head_dim, layer.head_dim_v
    return layer.format, layer.ckv.shape, layer.kpe.shape


def device_of(device: torch.device | str | int | None) -> torch.device | None:
    """A device as torch knows it; None stays None."""
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: want a device of torch such as 'cuda', 'cuda:1' or 'cpu', got {device!r}") from None
