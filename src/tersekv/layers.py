"""One layer of a paged cache: tensors, a format and its scales. Views of existing tensors, and no copies.

Inside tersekv a layer's tensors are always seen as [page, slot, head, ...]; a HND cache is the same thing with
other strides, and scales that live inside the row are strided views of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .attributes import HADAMARD, shared_signs
from .formats import UE8M0, KVFormat, held, kv_format, latent_format, page_tail, rope_dtype
from .scalars import as_int, as_positive_int

Scale = float | Tensor
Formats = str | Sequence[str]  # a name for both, or K's and V's
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


@dataclass(frozen=True, slots=True, eq=False)  # a layer equals itself alone: tensors have no one answer
class PagedKVLayer:
    """One layer of a K/V cache.

        >>> k_cache, v_cache = torch.zeros(2, 16, 16, 8, 128, dtype=torch.float8_e4m3fn)
        >>> tersekv.PagedKVLayer.of((k_cache, v_cache), k_scale=0.02, v_scale=0.01).format
        'fp8_e4m3'

    k, v:                              [P, S, H, D], [P, S, H, Dv] in the format's storage dtype (4 bits: D/2 bytes)
    format:                            a name, or a pair of K's and V's
    k_scale, v_scale:                  dequantising scale: float, or fp32 tensor [1] or [H] (nvfp4: the global scale)
    k_scale_cache, v_scale_cache:      stored scales: per-token-head fp32 [P, S, H]; nvfp4 e4m3 [P, S, H, D/16]
    k_signs, v_signs:                  fp32 ±1 [b], b the largest power of two that divides the head's size: rows lie
                                       rotated; `attributes.signs` draws them
    k_channel_scale, v_channel_scale:  fp32 [H, D], [H, Dv], positive: rows lie divided by it
    """

    k: Tensor
    v: Tensor
    format: str | tuple[str, str]
    k_scale: Scale = 1.0
    v_scale: Scale = 1.0
    k_scale_cache: Tensor | None = None
    v_scale_cache: Tensor | None = None
    k_signs: Tensor | None = None
    v_signs: Tensor | None = None
    k_channel_scale: Tensor | None = None
    v_channel_scale: Tensor | None = None

    def __post_init__(self) -> None:
        k, v = (x if isinstance(x, str) else kv_format(x).name for x in kv_pair("format", self.format))
        object.__setattr__(self, "format", k if k == v else (k, v))

    def __reduce__(self) -> tuple:
        return unpickle, (PagedKVLayer, *to_buffers([field_values(self)]))

    def __repr__(self) -> str:
        more = "" if self.rotation is None else f", rotation={self.rotation!r}"
        scaled = [n for n in ("k_channel_scale", "v_channel_scale") if getattr(self, n) is not None]
        more += "".join(f", {n}={list(getattr(self, n).shape)}" for n in scaled)
        shapes = f"k={list(self.k.shape)}, v={list(self.v.shape)}, {str(self.k.device)!r}"
        return f"PagedKVLayer({self.format!r}, {shapes}{more})"

    @staticmethod
    def of(
        kv: PagedKVLayer | Tensor | Sequence[Tensor],
        *,
        format: Formats | None = None,
        layout: str = "NHD",
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        scale_cache: Tensor | Sequence[Tensor | None] | None = None,
        rotation: str | Sequence[str | None] | None = None,
        k_channel_scale: Tensor | None = None,
        v_channel_scale: Tensor | None = None,
    ) -> PagedKVLayer:
        """A layer over existing tensors, without copying.

        kv:           (k, v), each [P, S, H, D] (HND: [P, H, S, D]); or one 5-D tensor [P, 2, S, H, D]
                      ([P, 1, ...]: K and V are the same tensor)
        format:       None reads it from K's dtype; fp8 and int4 per token and head must be named; (k, v): one each
        scale_cache:  (k, v) stored scales in the same layout without D (nvfp4: [..., D/16]), None where a side has
                      none, or one tensor with the 2 in the same place
        rotation, k_channel_scale, v_channel_scale:  as `PagedKVCache.allocate` takes them, for one layer

        A ready layer is returned as it is. Raises ValueError for an unknown layout, rank or dtype, and for an option
        beside a ready layer.
        """
        if isinstance(kv, PagedKVLayer):
            _refuse_options("cache", format=format, k_scale=k_scale, v_scale=v_scale, scale_cache=scale_cache,
                        layout=None if layout == "NHD" else layout, rotation=rotation,
                        k_channel_scale=k_channel_scale, v_channel_scale=v_channel_scale)  # fmt: skip
            return kv
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: want 'NHD' or 'HND', got {layout!r}")
        k, v = _split_pair("cache", kv, 5)
        if format is None:
            format = _format_of(k.dtype, _KV_OF_DTYPE, "cache")
        formats = [kv_format(name) for name in kv_pair("format", format)]
        ks, vs = _stored_scales(scale_cache, formats)
        if layout == "HND":
            k, v = k.transpose(1, 2), v.transpose(1, 2)
            ks, vs = (None if s is None else s.transpose(1, 2) for s in (ks, vs))
        dims = [x.shape[-1] * f.values_per_element for x, f in zip((k, v), formats, strict=True)]
        more = make_attributes(rotation, dims, k.device, k_channel_scale, v_channel_scale)
        return PagedKVLayer(k, v, (formats[0].name, formats[1].name), k_scale, v_scale, ks, vs, *more)

    @staticmethod
    def from_buffer(
        buffer: Tensor,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        format: Formats,
        layout: str = "NHD",
        k_scale: Scale = 1.0,
        v_scale: Scale = 1.0,
        rotation: str | Sequence[str | None] | None = None,
        k_channel_scale: Tensor | None = None,
        v_channel_scale: Tensor | None = None,
    ) -> PagedKVLayer:
        """A layer over one buffer of bytes whose pages hold their stored scales in their tail, without copying.

        buffer:  [P, n] of one byte each, n at least `kv_page_bytes(...)`: an engine's pages. In each, K's codes
                 [S, H, ...] (HND: [H, S, ...]), V's codes, K's stored scales, V's stored scales, each part from a
                 multiple of its elements' size on; what is left is not touched
        the rest as `PagedKVLayer.of` takes it

        Raises ValueError for an unknown layout, for sizes that the format cannot hold, and for a buffer that is too
        short or whose pages do not begin where its elements may.
        """
        if not isinstance(buffer, Tensor):
            raise TypeError(f"buffer: want Tensor, got {_type_name(buffer)}")
        if layout not in ("NHD", "HND"):
            raise ValueError(f"layout: want 'NHD' or 'HND', got {layout!r}")
        formats = [kv_format(name) for name in kv_pair("format", format)]
        dims = head_dim, head_dim if head_dim_v is None else head_dim_v
        for f, name, d in zip(formats, ("head_dim", "head_dim_v"), dims, strict=True):
            held(f, name, d)
        rows = as_positive_int("page_size", page_size) * as_positive_int("num_kv_heads", num_kv_heads)
        starts, nbytes = page_tail(formats, rows, dims)
        if buffer.dim() != 2 or buffer.element_size() != 1 or buffer.shape[1] < nbytes:
            got = f"{list(buffer.shape)} {str(buffer.dtype).removeprefix('torch.')}"
            raise ValueError(f"buffer: want [P, {nbytes} or more] of one byte each for {format}, got {got}")
        inner = (page_size, num_kv_heads) if layout == "NHD" else (num_kv_heads, page_size)
        sides, pages = list(zip(formats, dims, strict=True)), buffer.view(torch.uint8)
        codes = [
            _page_view(pages, at, f.storage, inner, f.elements(d)) for at, (f, d) in zip(starts[:2], sides, strict=True)
        ]
        scales = [
            None if f.scale_dtype is None else _page_view(pages, at, f.scale_dtype, inner, f.scales(d))
            for at, (f, d) in zip(starts[2:], sides, strict=True)
        ]
        k, v, ks, vs = (x if x is None or layout == "NHD" else x.transpose(1, 2) for x in (*codes, *scales))
        ks, vs = (x if x is None or f.scale_block else x[..., 0] for x, f in zip((ks, vs), formats, strict=True))
        assert k is not None  # codes always exist; only stored scales may not
        assert v is not None
        more = make_attributes(rotation, dims, buffer.device, k_channel_scale, v_channel_scale)
        return PagedKVLayer(k, v, (formats[0].name, formats[1].name), k_scale, v_scale, ks, vs, *more)

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[2]

    @property
    def formats(self) -> tuple[str, str]:
        """K's and V's."""
        return (self.format, self.format) if isinstance(self.format, str) else self.format

    @property
    def rotation(self) -> str | tuple[str | None, str | None] | None:
        """As `PagedKVCache.allocate` takes it."""
        k, v = (None if x is None else HADAMARD for x in (self.k_signs, self.v_signs))
        return k if k == v else (k, v)

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1] * kv_format(self.formats[0]).values_per_element

    @property
    def head_dim_v(self) -> int:
        return self.v.shape[-1] * kv_format(self.formats[1]).values_per_element

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]


@dataclass(frozen=True, slots=True, eq=False)  # a layer equals itself alone: tensors have no one answer
class PagedLatentLayer:
    """One layer of an MLA latent cache.

        >>> rows = torch.zeros(16, 64, 512 + 64, dtype=torch.bfloat16)
        >>> layer = tersekv.PagedLatentLayer.of(rows)
        >>> layer.ckv.shape, layer.kpe.shape
        (torch.Size([16, 64, 512]), torch.Size([16, 64, 64]))

    ckv, kpe:         [P, S, L], [P, S, R]: latent and rotary part; of one buffer, or two tensors; kpe None: R is 0
    kv_scale:         dequantising scale of fp8 (both parts): float or fp32 tensor [1]
    ckv_scale_cache:  fp8_ds_mla: fp32 [P, S, L/128]; fp8_v4: uint8 [P, S, 8], fp8_v41: uint8 [P, S, L/32]: exponents
                      + 127. ckv of fp8_v4 is bytes [P, S, L + 64]: L - 64 codes, then 64 values in bf16
    """

    ckv: Tensor
    kpe: Tensor
    format: str
    kv_scale: Scale = 1.0
    ckv_scale_cache: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kpe is None and isinstance(self.ckv, Tensor):  # the calls say what is wrong with another ckv
            object.__setattr__(self, "kpe", _no_rotary(self.ckv, latent_format(self.format)))

    def __reduce__(self) -> tuple:
        return unpickle, (PagedLatentLayer, *to_buffers([field_values(self)]))

    def __repr__(self) -> str:
        shapes = f"ckv={list(self.ckv.shape)}, kpe={list(self.kpe.shape)}"
        return f"PagedLatentLayer({self.format!r}, {shapes}, {str(self.ckv.device)!r})"

    @staticmethod
    def of(
        rows: PagedLatentLayer | Tensor | Sequence[Tensor],
        *,
        format: str | None = None,
        kv_lora_rank: int = 512,
        kv_scale: Scale = 1.0,
        qk_rope_head_dim: int | None = None,
    ) -> PagedLatentLayer:
        """A layer over existing tensors, without copying.

        rows:              joined rows [P, S, L + R] or [P, S, 1, L + R]; (ckv, kpe or None); or uint8 rows of
                           fp8_ds_mla [P, S, 656], fp8_v41 [P, S, 528], fp8_v4 [P, S, 584] (docs/formats.md)
        qk_rope_head_dim:  0: rows are read and written without a rotary part, which they may have all the same

        A ready layer is returned as it is. Raises ValueError for an unknown rank, dtype or row length, and for an
        option beside a ready layer.
        """
        kv_lora_rank = as_positive_int("kv_lora_rank", kv_lora_rank)
        if isinstance(rows, PagedLatentLayer):
            rank = None if kv_lora_rank in (512, rows.kv_lora_rank) else kv_lora_rank
            rope = None if qk_rope_head_dim in (None, rows.qk_rope_head_dim) else qk_rope_head_dim
            _refuse_options("cache", format=format, kv_scale=kv_scale, kv_lora_rank=rank, qk_rope_head_dim=rope)
            return rows
        if not isinstance(rows, Tensor):
            if not isinstance(rows, (tuple, list)) or len(rows) != 2:
                raise TypeError(f"cache: want Tensor or (ckv, kpe), got {_type_name(rows)}")
            ckv = _drop_head(rows[0], "cache")
            name = format or _format_of(ckv.dtype, _LATENT_OF_DTYPE, "ckv")
            kpe = _no_rotary(ckv, latent_format(name)) if rows[1] is None else _drop_head(rows[1], "cache")
            layer = PagedLatentLayer(ckv, kpe, name, kv_scale)
            return _without_rotary(layer, qk_rope_head_dim)
        rows = _drop_head(rows, "cache")
        format = format or _format_of(rows.dtype, _LATENT_OF_DTYPE, "cache")
        f = latent_format(format)
        if f.scale_dtype is None:
            if rows.shape[-1] < kv_lora_rank:
                raise ValueError(f"cache: want rows of kv_lora_rank={kv_lora_rank} or more, got {list(rows.shape)}")
            layer = PagedLatentLayer(rows[..., :kv_lora_rank], rows[..., kv_lora_rank:], format, kv_scale)
        else:
            views = _page_of_rows_views if f.tail else _latent_row_views
            ckv, scales, kpe = views(rows, f, kv_lora_rank)
            layer = PagedLatentLayer(ckv, kpe, format, kv_scale, scales)
        return _without_rotary(layer, qk_rope_head_dim)

    @property
    def device(self) -> torch.device:
        return self.ckv.device

    @property
    def kv_lora_rank(self) -> int:
        return latent_format(self.format).values(self.ckv.shape[-1])

    @property
    def qk_rope_head_dim(self) -> int:
        return self.kpe.shape[-1]

    @property
    def page_size(self) -> int:
        return self.ckv.shape[1]

    @property
    def num_pages(self) -> int:
        return self.ckv.shape[0]


def kv_pair(name: str, value: Any) -> tuple[Any, Any]:
    """K's and V's of what is given for both, or in a pair."""
    if not isinstance(value, (tuple, list)):
        return value, value
    if len(value) != 2:
        raise ValueError(f"{name}: want one for both, or K's and V's, got {len(value)} entries")
    return value[0], value[1]


def make_attributes(
    rotation: Any, dims: Sequence[int], device: torch.device | None, k_channel_scale: Tensor | None,
    v_channel_scale: Tensor | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Signs of K and V, and their channel scales, as a layer has them."""
    drawn = []
    for kind, d in zip(kv_pair("rotation", rotation), dims, strict=True):
        if kind not in (None, HADAMARD):
            raise ValueError(f"rotation: want None or {HADAMARD!r}, or one each for K and V, got {rotation!r}")
        drawn.append(None if kind is None else shared_signs(d, device))
    return drawn[0], drawn[1], k_channel_scale, v_channel_scale


def field_values(layer: Any) -> list:
    return [getattr(layer, f.name) for f in fields(layer)]


def to_buffers(values: Sequence[Sequence]) -> tuple[list[Tensor], list[list]]:
    """The values of some objects as what can be pickled and saved: whole buffers in bytes, each once, and the rest.

    A tensor becomes (buffer, offset, dtype, shape, strides): pickle knows no fp8, and torch.save no views of one buffer
    in several dtypes.
    """
    buffers: dict[int, tuple[int, Tensor]] = {}

    def place(x: object) -> object:
        if not isinstance(x, Tensor):
            return list(x) if isinstance(x, tuple) else x  # a pair of formats: tuples stand for tensors
        memory = x.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(memory)
        i, _ = buffers.setdefault(memory._cdata, (len(buffers), whole))
        return i, x.storage_offset(), str(x.dtype).removeprefix("torch."), tuple(x.shape), x.stride()

    listed = [[place(x) for x in of_one] for of_one in values]
    return [whole for _, whole in buffers.values()], listed


def from_buffers(kind: type, buffers: list[Tensor], listed: list[list]) -> list:
    """The objects whose values `to_buffers` took apart, over the same buffers."""

    def view(x: Any) -> Any:
        if not isinstance(x, tuple):
            return x
        i, offset, dtype, shape, strides = x
        home = torch.empty(0, dtype=getattr(torch, dtype), device=buffers[i].device)
        return home.set_(buffers[i].untyped_storage(), offset, shape, strides)

    return [kind(*map(view, values)) for values in listed]


def unpickle(kind: type, buffers: list[Tensor], listed: list[list]) -> Any:
    """One object, unpickled."""
    (found,) = from_buffers(kind, buffers, listed)
    return found


# So that torch.load takes them with weights_only, which is its default.
torch.serialization.add_safe_globals([unpickle, PagedKVLayer, PagedLatentLayer])


def _no_rotary(ckv: Tensor, f: KVFormat) -> Tensor:
    """The rotary part [P, S, 0] of rows without one."""
    return ckv.new_empty((*ckv.shape[:2], 0), dtype=rope_dtype(f))


def _without_rotary(layer: PagedLatentLayer, rope: int | None) -> PagedLatentLayer:
    """The layer; with `rope` 0 without its rotary part."""
    if rope is None or as_int("qk_rope_head_dim", rope) == layer.kpe.shape[-1]:
        return layer
    if rope != 0:
        raise ValueError(f"qk_rope_head_dim: want 0 or {layer.kpe.shape[-1]} as in cache, got {rope}")
    return replace(layer, kpe=_no_rotary(layer.ckv, latent_format(layer.format)))


def _latent_row_views(rows: Tensor, f: KVFormat, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Latent codes, group scales and rotary part of byte rows [P, S, row_bytes]."""
    assert f.scale_dtype is not None
    codes, row = f.code_bytes(rank), f.row_bytes(rank)
    rope = rope_dtype(f)
    if f.scale == UE8M0 and rows.shape[-1] != row:
        raise ValueError(f"cache: want uint8 rows of {row} bytes for {f.name}, got {list(rows.shape)} {rows.dtype}")
    if rows.dtype != torch.uint8 or rows.shape[-1] < row or (rows.shape[-1] - row) % rope.itemsize:
        raise ValueError(
            f"cache: want uint8 rows of {row} bytes and a {rope} rotary part for {f.name}, "
            f"got {list(rows.shape)} {rows.dtype}"
        )
    try:
        return rows[..., :codes].view(f.storage), rows[..., codes:row].view(f.scale_dtype), rows[..., row:].view(rope)
    except RuntimeError:  # a view of wider elements wants every row to begin at one
        want = f"dense rows that begin at multiples of {f.scale_dtype.itemsize} bytes for {f.name}"
        got = f"strides {list(rows.stride())} from byte {rows.storage_offset()}"
        raise ValueError(f"cache: want {want}, got {got}") from None


def _page_of_rows_views(pages: Tensor, f: KVFormat, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows, scales and no rotary part of byte pages [P, S, row_bytes] that hold all rows before all scales."""
    (p, s, n), row = pages.shape, f.row_bytes(rank)
    if pages.dtype != torch.uint8 or n != row:
        raise ValueError(f"cache: want uint8 pages [P, S, {row}] for {f.name}, got {list(pages.shape)} {pages.dtype}")
    if pages.stride(2) != 1 or (s > 1 and pages.stride(1) != n):
        raise ValueError(f"cache: want the bytes of a page without gaps, got strides {list(pages.stride())}")
    whole, codes = pages.as_strided((p, s * n), (pages.stride(0), 1)), s * f.code_bytes(rank)
    ckv = whole[:, :codes].unflatten(1, (s, -1))
    return ckv, whole[:, codes:].unflatten(1, (s, -1)), _no_rotary(ckv, f)


def _page_view(pages: Tensor, start: int, dtype: torch.dtype, inner: tuple[int, int], width: int) -> Tensor:
    """Elements [P, *inner, width] of byte pages [P, n], from byte `start` of each on."""
    rows = inner[0] * inner[1]
    try:
        part = pages[:, start : start + rows * width * dtype.itemsize].view(dtype)
    except RuntimeError:  # a view of wider elements wants every page to begin at one
        want = f"dense pages that begin at multiples of {dtype.itemsize} bytes"
        got = f"strides {list(pages.stride())} from byte {pages.storage_offset()}"
        raise ValueError(f"buffer: want {want}, got {got}") from None
    return part.unflatten(1, (*inner, width))


def _split_pair(name: str, pair, rank: int) -> tuple[Tensor, Tensor]:
    if isinstance(pair, Tensor):
        if pair.dim() != rank or pair.shape[1] not in (1, 2):
            raise ValueError(f"{name}: want (k, v) or one {rank}-D tensor [P, 2, ...], got {list(pair.shape)}")
        return pair[:, 0], pair[:, -1]
    if not isinstance(pair, (tuple, list)):
        raise TypeError(f"{name}: want (k, v) or one {rank}-D tensor, got {_type_name(pair)}")
    if len(pair) != 2:
        raise ValueError(f"{name}: want (k, v), got {len(pair)} entries")
    for t in pair:
        if not isinstance(t, Tensor):
            raise TypeError(f"{name}: want (k, v), each a Tensor, got {type(t).__name__}")
        if t.dim() != rank - 1:
            raise ValueError(f"{name}: want (k, v), each {rank - 1}-D, got {list(t.shape)}")
    return pair[0], pair[1]


def _stored_scales(given: Any, formats: Sequence[KVFormat]) -> tuple[Tensor | None, Tensor | None]:
    """Stored scales of K and V: given as one tensor, or one each."""
    if given is None:
        return None, None
    ranks = [5 if f.scale_block else 4 for f in formats]
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        return _split_pair("scale_cache", given, ranks[0])
    k, v = (
        None if x is None and f.scale_dtype is None else _split_pair("scale_cache", (x, x), rank)[0]
        for x, f, rank in zip(given, formats, ranks, strict=True)
    )
    return k, v


def _refuse_options(name: str, **options: object) -> None:
    """Raise if an option (not None, and no scale of 1) comes with a layer that is ready: it would be ignored."""
    given = [n for n, x in options.items() if x is not None and not (isinstance(x, Real) and x == 1)]
    if given:
        raise ValueError(f"{name}: want tensors beside {', '.join(given)}, got a layer, which has its own")


def _type_name(x: object) -> str:
    """The type of what is no cache of a layer."""
    every = isinstance(getattr(x, "layers", None), tuple)
    return type(x).__name__ + (", the cache of all layers (take one: cache[i])" if every else "")


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
