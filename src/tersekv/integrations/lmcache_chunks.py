"""Chunks of LMCache, K and V of some tokens in all layers, as bytes in tersekv's formats and back. Without LMCache.

Behind a header, which says in text what the bytes are, follow the layers, each a page of `PagedKVLayer.from_buffer`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..attributes import HADAMARD
from ..cache import PagedKVCache
from ..formats import held, kv_format, kv_page_bytes
from ..layers import PagedKVLayer
from ..ops.transcode import transcode
from ..recipe import Recipe, recipe
from ..scalars import as_positive_int

HEADER = 256  # bytes
_FORMATS = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class ChunkCodec:
    """K and V in 16 bits, [2, layers, tokens, heads · head_dim], as bytes and back, equal on every device.

    >>> codec = ChunkCodec("fp8_per_token_head/int4_per_token_head", head_dim=64)
    >>> chunk = torch.randn(2, 3, 16, 128, dtype=torch.bfloat16)
    >>> data = torch.empty(codec.nbytes(chunk.shape), dtype=torch.uint8)
    >>> codec.encode(chunk, data)
    20224
    >>> codec.decode(data, chunk)

    format:    a cache's format, or K's and V's; behind it `+rotated` or nothing
    head_dim:  of K and V, which a chunk does not say
    device:    where codes are made and read; None: where the chunk lies

    Raises ValueError for a format or a size that a cache does not take, TypeError for what is no word or number.
    """

    def __init__(self, format: str, head_dim: int, device: torch.device | str | None = None) -> None:
        if not isinstance(format, str):
            raise TypeError(f"format: want str, got {type(format).__name__}")
        try:
            found = recipe(format)
        except ValueError as e:
            raise ValueError(f"format: {e}") from None
        if found != Recipe(found.formats, found.rotated):
            raise ValueError(f"format: want formats, and +rotated or nothing behind them, got {format!r}")
        self.format, self.head_dim = format, as_positive_int("head_dim", head_dim)
        for name in found.formats:
            held(kv_format(name), "head_dim", self.head_dim)
        self._formats, self._rotation = found.formats, HADAMARD if found.rotated else None
        self._device = None if device is None else torch.device(device)

    def nbytes(self, shape: Sequence[int]) -> int:
        """Bytes of a chunk [2, layers, tokens, heads · head_dim]."""
        layers, tokens, heads = self._sizes(shape)
        return HEADER + layers * kv_page_bytes(self._formats, tokens, heads, self.head_dim)

    def encode(self, chunk: Tensor, out: Tensor) -> int:
        """Write a chunk's bytes to the first of `out`, uint8. Returns their number."""
        nbytes, device = self.nbytes(chunk.shape), self._device or chunk.device
        if len(out) < nbytes:
            raise ValueError(f"out: want {nbytes} bytes or more for {list(chunk.shape)}, got {len(out)}")
        coded = torch.zeros(nbytes - HEADER, dtype=torch.uint8, device=device)
        transcode(self._chunk(chunk.to(device)), [0], self._coded(coded, chunk.shape), [0])
        out[:HEADER] = torch.frombuffer(bytearray(self._header(chunk.shape)), dtype=torch.uint8)
        out[HEADER:nbytes].copy_(coded)
        return nbytes

    def decode(self, data: Tensor, chunk: Tensor) -> None:
        """Write what was encoded into `chunk`, in its dtype. Raises ValueError for bytes of anything else."""
        nbytes, device, want = self.nbytes(chunk.shape), self._device or chunk.device, self._header(chunk.shape)
        got = data[:HEADER].cpu().numpy().tobytes()
        if got != want or len(data) < nbytes:
            words = [text.rstrip(b" \0").decode("ascii", "replace") for text in (want, got)]
            raise ValueError(f"data: want {nbytes} bytes of {words[0]!r}, got {len(data)} of {words[1]!r}")
        coded = data[HEADER:nbytes].to(device, copy=True)  # from a multiple of any element's size on
        there = chunk if chunk.device == device else torch.empty_like(chunk, device=device)
        transcode(self._coded(coded, chunk.shape), [0], self._chunk(there), [0])
        if there is not chunk:
            chunk.copy_(there)

    def _sizes(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Layers, tokens, heads."""
        if len(shape) != 4 or shape[0] != 2 or shape[3] % self.head_dim or not all(shape):
            want = f"[2, layers, tokens, heads · {self.head_dim}], K and V"
            raise ValueError(f"chunk: want {want}, got {list(shape)}")
        return shape[1], shape[2], shape[3] // self.head_dim

    def _header(self, shape: Sequence[int]) -> bytes:
        layers, tokens, heads = self._sizes(shape)
        text = f"tersekv chunk 1: {self.format}, {layers} layers, {tokens} tokens, {heads} heads of {self.head_dim}"
        return text.encode().ljust(HEADER)

    def _chunk(self, chunk: Tensor) -> PagedKVCache:
        """A chunk as a cache of one page, without copying."""
        if chunk.dtype not in _FORMATS:
            raise ValueError(f"chunk: want {', '.join(map(str, _FORMATS))}, got {chunk.dtype}")
        rows = chunk.unflatten(-1, (-1, self.head_dim)).unsqueeze(2)
        layers = [PagedKVLayer(k, v, _FORMATS[chunk.dtype]) for k, v in zip(rows[0], rows[1], strict=True)]
        return PagedKVCache(layers, self.head_dim, self.head_dim)

    def _coded(self, coded: Tensor, shape: Sequence[int]) -> PagedKVCache:
        """The bytes behind a header as a cache of one page, without copying."""
        layers, tokens, heads = self._sizes(shape)
        found = [
            PagedKVLayer.from_buffer(
                page[None], tokens, heads, self.head_dim, format=self._formats, rotation=self._rotation
            )
            for page in coded.view(layers, -1)
        ]
        return PagedKVCache(found, self.head_dim, self.head_dim)
