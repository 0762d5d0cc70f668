"""Paged caches: tensors, a format and a geometry. No kernels here, and no copies.

Inside tersekv a layer's tensors are always seen as [page, slot, head, ...]; a HND cache is the same thing with
other strides, and scales that live inside the row are strided views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import index

import torch
from torch import Tensor

from .formats import KVFormat, kv_bytes_per_token, kv_format, latent_bytes_per_token, latent_format, rope_dtype

Scale = float | Tensor
_ONE = 1.0  # the very object is the default of scales: no scale was given
_KV_OF_DTYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.int8: "int8_per_token_head",
    torch.uint8: "nvfp4",
}
_LATENT_OF_DTYPE = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8_e4m3",
    torch.float8_e5m2: "fp8_e5m2",
    torch.uint8: "fp8_ds_mla",
}


@dataclass(frozen=True, slots=True)
class PagedKVLayer:
    """One layer of a K/V cache.

    k, v:                          [P, S, H, D], [P, S, H, Dv] in the format's storage dtype (nvfp4: D/2 bytes)
    k_scale, v_scale:              dequantising scale: float, or fp32 tensor [1] or [H] (nvfp4: the global scale)
    k_scale_cache, v_scale_cache:  stored scales: per-token-head fp32 [P, S, H]; nvfp4 e4m3 [P, S, H, D/16]
    """

    k: Tensor
    v: Tensor
    format: str
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    k_scale_cache: Tensor | None = None
    v_scale_cache: Tensor | None = None

    def __repr__(self) -> str:
        return f"PagedKVLayer({self.format!r}, k={list(self.k.shape)}, v={list(self.v.shape)}, {str(self.k.device)!r})"

    @staticmethod
    def of(
        kv: PagedKVLayer | Tensor | Sequence[Tensor],
        *,
        format: str | None = None,
        layout: str = "NHD",
        k_scale: Scale = _ONE,
        v_scale: Scale = _ONE,
        scale_cache: Tensor | Sequence[Tensor] | None = None,
    ) -> PagedKVLayer:
        """A layer over existing tensors, without copying.

        kv:           (k, v), each [P, S, H, D] (HND: [P, H, S, D]); or one 5-D tensor [P, 2, S, H, D]
                      ([P, 1, ...]: K and V are the same tensor)
        format:       None reads it from the dtype; 8-bit per-token-head fp8 must be named
        scale_cache:  (k, v) stored scales in the same layout without D (nvfp4: [..., D/16]), or one tensor with
                      the 2 in the same place

        A ready layer is returned as it is. Raises ValueError for an unknown layout, rank or dtype, and for an option
        beside a ready layer.
        """
        if isinstance(kv, PagedKVLayer):
            if format or layout != "NHD" or k_scale is not _ONE or v_scale is not _ONE or scale_cache is not None:
                _no_options("kv_cache", format=format, k_scale=k_scale, v_scale=v_scale, scale_cache=scale_cache,
                            layout=None if layout == "NHD" else layout)  # fmt: skip
            return kv
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: want 'NHD' or 'HND', got {layout!r}")
        k, v = _split_pair("kv_cache", kv, 5)
        if format is None:
            format = _format_of(k.dtype, _KV_OF_DTYPE, "kv_cache")
        block_scales = kv_format(format).scale_block is not None
        ks, vs = (
            (None, None) if scale_cache is None else _split_pair("scale_cache", scale_cache, 5 if block_scales else 4)
        )
        if layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            ks, vs = (None if s is None else s.transpose(1, 2) for s in (ks, vs))
        return PagedKVLayer(k, v, format, k_scale, v_scale, ks, vs)

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True, slots=True)
class PagedLatentLayer:
    """One layer of an MLA latent cache.

    ckv, kpe:         [P, S, L], [P, S, R]: latent and rotary part; views of one buffer, or two tensors
    kv_scale:         dequantising scale of fp8 (both parts): float or fp32 tensor [1]
    ckv_scale_cache:  fp8_ds_mla: fp32 [P, S, L/128]
    """

    ckv: Tensor
    kpe: Tensor
    format: str
    kv_scale: Scale = 1.0
    ckv_scale_cache: Tensor | None = None

    def __repr__(self) -> str:
        shapes = f"ckv={list(self.ckv.shape)}, kpe={list(self.kpe.shape)}"
        return f"PagedLatentLayer({self.format!r}, {shapes}, {str(self.ckv.device)!r})"

    @staticmethod
    def of(
        rows: PagedLatentLayer | Tensor | Sequence[Tensor],
        *,
        format: str | None = None,
        kv_lora_rank: int = 512,
        kv_scale: Scale = _ONE,
    ) -> PagedLatentLayer:
        """A layer over existing tensors, without copying.

        rows:  joined rows [P, S, L + R] or [P, S, 1, L + R]; (ckv, kpe); or uint8 rows of fp8_ds_mla [P, S, 656]

        A ready layer is returned as it is. Raises ValueError for an unknown rank, dtype or row length, and for an
        option beside a ready layer.
        """
        if isinstance(rows, PagedLatentLayer):
            if format or kv_lora_rank != 512 or kv_scale is not _ONE:
                _no_options("latent cache", format=format, kv_scale=kv_scale,
                            kv_lora_rank=None if kv_lora_rank == rows.ckv.shape[-1] else kv_lora_rank)  # fmt: skip
            return rows
        if not isinstance(rows, Tensor):
            if not isinstance(rows, (tuple, list)) or len(rows) != 2:
                raise TypeError(f"latent cache: want Tensor or (ckv, kpe), got {_kind(rows)}")
            ckv, kpe = (_drop_head(t, "latent cache") for t in rows)
            return PagedLatentLayer(ckv, kpe, format or _format_of(ckv.dtype, _LATENT_OF_DTYPE, "ckv"), kv_scale)
        rows = _drop_head(rows, "latent cache")
        format = format or _format_of(rows.dtype, _LATENT_OF_DTYPE, "latent cache")
        f = latent_format(format)
        if f.scale_dtype is None:
            if rows.shape[-1] <= _whole("kv_lora_rank", kv_lora_rank):
                raise ValueError(
                    f"latent cache: want rows longer than kv_lora_rank={kv_lora_rank}, got {list(rows.shape)}"
                )
            return PagedLatentLayer(rows[..., :kv_lora_rank], rows[..., kv_lora_rank:], format, kv_scale)
        ckv, scales, kpe = _latent_row_views(rows, f, kv_lora_rank)
        return PagedLatentLayer(ckv, kpe, format, kv_scale, scales)

    @property
    def page_size(self) -> int:
        return self.ckv.shape[1]

    @property
    def num_pages(self) -> int:
        return self.ckv.shape[0]


class PagedKVCache:
    """The K/V cache of all layers of a model. `cache[i]` is layer i, a `PagedKVLayer`."""

    def __init__(self, layers: Sequence[PagedKVLayer], head_dim: int, head_dim_v: int) -> None:
        if not layers:
            raise ValueError("layers: want at least one, got none")
        self.layers = tuple(layers)
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
        inline_scales:  stored scales follow the codes in each row instead of living in tensors of their own

        Raises ValueError for sizes that the format cannot hold.
        """
        f, dv, device = kv_format(format), head_dim if head_dim_v is None else head_dim_v, _device(device)
        _positive(num_layers=num_layers, num_pages=num_pages, page_size=page_size, num_kv_heads=num_kv_heads)
        for name, d in (("head_dim", head_dim), ("head_dim_v", dv)):
            step = f.scale_block or 8
            if _whole(name, d) <= 0 or d % step:
                raise ValueError(f"{name}: want a positive multiple of {step} for {format}, got {d}")
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

    def __repr__(self) -> str:
        return f"PagedKVCache({len(self)} layers, the first {self[0]!r})"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> PagedKVLayer:
        return self.layers[layer]

    @property
    def format(self) -> str:
        return self.layers[0].format

    @property
    def page_size(self) -> int:
        return self.layers[0].page_size

    @property
    def num_pages(self) -> int:
        return self.layers[0].num_pages

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, stored scales included."""
        heads = self.layers[0].k.shape[2]
        return len(self) * kv_bytes_per_token(self.format, heads, self.head_dim, self.head_dim_v)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers."""
        return self.bytes_per_token * self.num_pages * self.page_size


class PagedLatentCache:
    """The MLA latent cache of all layers of a model. `cache[i]` is layer i, a `PagedLatentLayer`."""

    def __init__(self, layers: Sequence[PagedLatentLayer]) -> None:
        if not layers:
            raise ValueError("layers: want at least one, got none")
        self.layers = tuple(layers)

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

        Raises ValueError for sizes that the format cannot hold, and for `split` with fp8_ds_mla.
        """
        f, device = latent_format(format), _device(device)
        _positive(num_layers=num_layers, num_pages=num_pages, page_size=page_size)
        step = f.scale_block or 8
        if _whole("kv_lora_rank", kv_lora_rank) <= 0 or kv_lora_rank % step:
            raise ValueError(f"kv_lora_rank: want a positive multiple of {step} for {format}, got {kv_lora_rank}")
        if _whole("qk_rope_head_dim", qk_rope_head_dim) <= 0 or qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim: want a positive even number, got {qk_rope_head_dim}")
        if split and f.scale_dtype is not None:
            raise ValueError(f"split: {format} keeps latent, scales and rotary part in one row")
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

    def __repr__(self) -> str:
        return f"PagedLatentCache({len(self)} layers, the first {self[0]!r})"

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, layer: int) -> PagedLatentLayer:
        return self.layers[layer]

    @property
    def format(self) -> str:
        return self.layers[0].format

    @property
    def page_size(self) -> int:
        return self.layers[0].page_size

    @property
    def num_pages(self) -> int:
        return self.layers[0].num_pages

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, stored scales included."""
        one = self.layers[0]
        return len(self) * latent_bytes_per_token(one.format, one.ckv.shape[-1], one.kpe.shape[-1])

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers."""
        return self.bytes_per_token * self.num_pages * self.page_size


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


def _latent_row_views(rows: Tensor, f: KVFormat, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latent codes, group scales and rotary part of byte rows [P, S, row_bytes]."""
    assert f.scale_dtype is not None
    codes, row = f.code_bytes(rank), f.row_bytes(rank)
    rope = rope_dtype(f)
    if rows.element_size() != 1 or rows.shape[-1] <= row or (rows.shape[-1] - row) % rope.itemsize:
        raise ValueError(
            f"latent cache: want uint8 rows of {row} bytes and a {rope} rotary part for {f.name}, "
            f"got {list(rows.shape)} {rows.dtype}"
        )
    rows = rows.view(torch.uint8)
    return rows[..., :codes].view(f.storage), rows[..., codes:row].view(f.scale_dtype), rows[..., row:].view(rope)


def _split_pair(name: str, pair, rank: int) -> tuple[Tensor, Tensor]:
    if isinstance(pair, Tensor):
        if pair.dim() != rank or pair.shape[1] not in (1, 2):
            raise ValueError(f"{name}: want (k, v) or one {rank}-D tensor [P, 2, ...], got {list(pair.shape)}")
        return pair[:, 0], pair[:, -1]
    if not isinstance(pair, (tuple, list)):
        raise TypeError(f"{name}: want (k, v) or one {rank}-D tensor, got {_kind(pair)}")
    if len(pair) != 2:
        raise ValueError(f"{name}: want (k, v), got {len(pair)} entries")
    for t in pair:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: want (k, v), each a Tensor, got {type(t).__name__}")
        if t.dim() != rank - 1:
            raise ValueError(f"{name}: want (k, v), each {rank - 1}-D, got {list(t.shape)}")
    return pair[0], pair[1]


def _no_options(name: str, **options: object) -> None:
    """Raise if an option says something beside a layer that is ready: it would be ignored."""
    given = [n for n, x in options.items() if x is not None and not (isinstance(x, (int, float)) and x == _ONE)]
    if given:
        raise ValueError(f"{name}: want tensors beside {', '.join(given)}, got a layer, which has its own")


def _kind(x: object) -> str:
    """The type of what is no cache of a layer."""
    whole = isinstance(x, (PagedKVCache, PagedLatentCache))
    return type(x).__name__ + (", the cache of all layers (take one: cache[i])" if whole else "")


def _format_of(dtype: torch.dtype, table: dict, name: str) -> str:
    if dtype not in table:
        raise ValueError(f"{name}: want one of {', '.join(str(d) for d in table)}, got {dtype}")
    return table[dtype]


def _drop_head(t: Tensor, name: str) -> Tensor:
    if not isinstance(t, Tensor):
        raise TypeError(f"{name}: want Tensor, got {type(t).__name__}")
    if t.dim() == 4 and t.shape[2] == 1:
        return t[:, :, 0]
    if t.dim() != 3:
        raise ValueError(f"{name}: want [P, S, dim] or [P, S, 1, dim], got {list(t.shape)}")
    return t


def _positive(**sizes: int) -> None:
    for name, value in sizes.items():
        if _whole(name, value) <= 0:
            raise ValueError(f"{name}: want a positive number, got {value}")


def _whole(name: str, value: int) -> int:
    """value, which has to be an integer of Python's or NumPy's."""
    try:
        return index(value)
    except TypeError:
        raise TypeError(f"{name}: want int, got {type(value).__name__} {value!r}") from None


def _device(device: torch.device | str | int | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device: want a device of torch such as 'cuda', 'cuda:1' or 'cpu', got {device!r}") from None
