"""Reference of `transcode`: head by head, in fp32 with one rounding an operation, codes by search (`codes.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..calls import TranscodeCall
from ..formats import ALL_FORMATS
from . import reference_rotation
from .codes import read_rows, write_rows
from .memory import put, take

Where = tuple[Tensor, Tensor]  # pages and slots


def transcode(call: TranscodeCall) -> None:
    tokens = call.num_tokens if call.num_tokens_t is None else int(call.num_tokens_t)
    at = torch.arange(tokens)
    src, dst = (
        (pages.to(torch.int64)[at // cache.shape[1]], at % cache.shape[1])
        for pages, cache in ((call.src_pages, call.src_k), (call.dst_pages, call.k_cache))
    )
    for side in ("k", "v"):
        for head in range(call.src_k.shape[2]):
            _write_head(call, side, head, src, dst)


def _write_head(call: TranscodeCall, side: str, head: int, src: Where, dst: Where) -> None:
    formats = (call.src_format, call.format) if side == "k" else (call.src_v_format, call.v_format)
    read, written = (ALL_FORMATS[name] for name in formats)
    caches = [getattr(call, name)[:, :, head] for name in (f"src_{side}", f"{side}_cache")]
    stored = [_of_head(getattr(call, f"{prefix}{side}_scale_cache"), head) for prefix in ("src_", "")]
    scales = [_scale(call, f"{prefix}{side}_scale", head) for prefix in ("src_", "")]
    signs = [getattr(call, f"{prefix}{side}_signs") for prefix in ("src_", "")]
    channels = [getattr(call, f"{prefix}{side}_channel_scale") for prefix in ("src_", "")]
    dim = caches[0].shape[-1] * read.values_per_element
    old, new = (torch.ones(dim) if c is None else c[head] for c in channels)
    same = _equal(*signs) and torch.equal(old, new)
    if same and read is written and scales[0] == scales[1]:
        put(caches[1], *dst, take(caches[0], *src))
        if stored[0] is not None and stored[1] is not None:
            put(stored[1], *dst, take(stored[0], *src))
        return
    x = read_rows(caches[0], stored[0], *src, read, scales[0]).float()
    if not same:
        x = reference_rotation.undone(x, signs[0])
        if not torch.equal(old, new):
            x = x * old * (torch.tensor(1.0) / new)
        x = reference_rotation.row(x, signs[1], None)
    inverse = torch.tensor(1.0) / scales[1]
    scale = scales[1] if getattr(call, f"{side}_scale_t") is not None else torch.tensor(1.0) / inverse
    write_rows(caches[1], stored[1], *dst, x, written, scale, inverse)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


def _of_head(x: Tensor | None, head: int) -> Tensor | None:
    return None if x is None else x[:, :, head]


def _scale(call: TranscodeCall, name: str, head: int) -> Tensor:
    """The dequantising scale of a head, fp32."""
    tensor = getattr(call, f"{name}_t")
    if tensor is None:
        return torch.tensor(getattr(call, name), dtype=torch.float32)
    return tensor[head if len(tensor) > 1 else 0]
