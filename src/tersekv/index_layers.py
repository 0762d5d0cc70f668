"""One layer of an indexer's cache: the keys by which sparse attention chooses what it reads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .attributes import HADAMARD
from .formats import INDEX_BLOCK, held_index, index_format
from .layers import field_values, to_buffers, unpickle


@dataclass(frozen=True, slots=True, eq=False)  # a layer equals itself alone: tensors have no one answer
class PagedIndexLayer:
    """One layer of an index cache.

        >>> pages = torch.zeros(16, 64, 132, dtype=torch.uint8)
        >>> layer = tersekv.PagedIndexLayer.from_buffer(pages)
        >>> layer.k.shape, layer.scale.shape
        (torch.Size([16, 64, 128]), torch.Size([16, 64]))

    k:         [P, S, Di] codes in the format's storage dtype
    scale:     fp32 [P, S], of more than 128 columns [P, S, 2]; dequantises. None: the format has none
    format:    "index_fp8", or without scales "bf16", "fp16", "fp8_e4m3"
    rotation:  None or "hadamard": keys lie rotated in blocks of the largest power of two that divides Di; queries are
               rotated alike, so that scores are the same but for rounding
    """

    k: Tensor
    scale: Tensor | None
    format: str
    rotation: str | None = None

    def __post_init__(self) -> None:
        f = index_format(self.format)
        if self.rotation not in (None, HADAMARD):
            raise ValueError(f"rotation: want None or {HADAMARD!r}, got {self.rotation!r}")
        if (self.scale is None) != (f.scale_dtype is None):
            want = f"None for {self.format}" if f.scale_dtype is None else f"the stored scales of {self.format}"
            raise ValueError(f"scale: want {want}, got {'None' if self.scale is None else 'a tensor'}")

    def __reduce__(self) -> tuple:
        return unpickle, (PagedIndexLayer, *to_buffers([field_values(self)]))

    def __repr__(self) -> str:
        more = "" if self.rotation is None else f", rotation={self.rotation!r}"
        return f"PagedIndexLayer({self.format!r}, k={list(self.k.shape)}, {str(self.k.device)!r}{more})"

    @staticmethod
    def from_buffer(pages: Tensor, format: str = "index_fp8", *, rotation: str | None = None) -> PagedIndexLayer:
        """A layer over an engine's pages of bytes, without copying.

        pages:  [P, S, n] or [P, S, 1, n] uint8, n the bytes of a token. Of index_fp8 n is 132 for 128 columns, but a
                token's bytes are not together: a page is S rows of codes, then S fp32 scales. Pages may lie apart

        Raises ValueError for pages that are no such bytes.
        """
        f, itemsize = index_format(format), index_format(format).storage.itemsize
        if not isinstance(pages, Tensor):
            raise TypeError(f"pages: want Tensor, got {type(pages).__name__}")
        rows = pages[:, :, 0] if pages.dim() == 4 and pages.shape[2] == 1 else pages
        if rows.dim() != 3 or rows.dtype != torch.uint8:
            got = f"{list(pages.shape)} {str(pages.dtype).removeprefix('torch.')}"
            raise ValueError(f"pages: want [P, S, n] or [P, S, 1, n] uint8, got {got}")
        p, s, n = rows.shape
        sizes = {f.row_bytes(d): d for d in range(8, 257, 8)}
        if n not in sizes:
            want = "Di + 4 * ceil(Di / 128)" if f.scale_dtype is not None else f"{itemsize} * Di"
            raise ValueError(f"pages: want {want} bytes a token for {format}, Di a multiple of 8 up to 256, got {n}")
        d = held_index(sizes[n])
        if f.scale_dtype is None:
            return PagedIndexLayer(_viewed(rows, f.storage, (s, d)), None, format, rotation)
        if rows.stride(2) != 1 or (s > 1 and rows.stride(1) != n):
            raise ValueError(f"pages: want the bytes of a page without gaps, got strides {list(rows.stride())}")
        whole = rows.as_strided((p, s * n), (rows.stride(0), 1))
        scales = (s,) if d <= INDEX_BLOCK else (s, f.scales(d))
        k = _viewed(whole[:, : s * d], f.storage, (s, d))
        return PagedIndexLayer(k, _viewed(whole[:, s * d :], f.scale_dtype, scales), format, rotation)

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1]

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]


def _viewed(x: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Bytes [P, ...] as numbers [P, *shape]."""
    try:
        y = x.view(dtype)
    except RuntimeError:  # a view of wider elements wants every page to begin at one
        want = f"pages that begin at multiples of {dtype.itemsize} bytes"
        raise ValueError(f"pages: want {want}, got strides {list(x.stride())} from {x.storage_offset()}") from None
    return y if y.shape[1:] == shape else y.unflatten(1, shape)


# So that torch.load takes it with weights_only, which is its default.
torch.serialization.add_safe_globals([PagedIndexLayer])
