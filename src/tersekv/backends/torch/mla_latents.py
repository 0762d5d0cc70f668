"""Rows of a paged latent cache: where they lie, how they are normed, written and read back, and the codes of the
latents that feed a blockwise fp8 product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.formats import E4M3_MAX, LATENT_GROUP, MAX_LATENT_AMAX, TENSOR, KVFormat, rope_dtype

from .quantize import amax, cast, cast_fp8, dequantize, encode_rows, reciprocal

_F32_MAX = torch.finfo(torch.float32).max
At = tuple[Tensor, Tensor]  # page and slot of each token


def place(page_table: Tensor, request: Tensor, position: Tensor, cache: Tensor) -> At:
    """Page and slot of tokens. Raises ValueError for a token outside the table or the cache [P, S, ...]."""
    pages, size = cache.shape[:2]
    column = position // size
    if ((column < 0) | (column >= page_table.shape[1])).any():
        worst = int(column.max())
        raise ValueError(f"page_table: want at least {worst + 1} entries a request, got {page_table.shape[1]}")
    page = page_table.to(torch.int64)[request, column]
    bad = (page < 0) | (page >= pages)
    if bad.any():
        i = int(bad.nonzero()[0, 0])
        raise ValueError(
            f"page_table: want page ids in [0, {pages}), got {int(page[i])} at [{int(request[i])}, {int(column[i])}]"
        )
    return page, position % size


def rms_norm(x: Tensor, gamma: Tensor, epsilon: float) -> Tensor:
    """Norm in fp32, rounded to gamma's dtype before gamma is applied."""
    x = x.to(torch.float32)
    # Root and reciprocal are correctly rounded everywhere; rsqrt is not.
    return (x * reciprocal((x.square().mean(-1, keepdim=True) + epsilon).sqrt())).to(gamma.dtype) * gamma


def store(
    latent: Tensor, rotary: Tensor, ckv: Tensor, kpe: Tensor, scales: Tensor | None, at: At, f: KVFormat, scale: Tensor
) -> None:
    """Write rows [n, L] and [n, R] in the cache's format, whose dequantising scale [1] covers both parts, if any."""
    latent, rotary = latent.to(torch.float32), rotary.to(torch.float32)
    multiplier = reciprocal(scale)
    codes, stored = encode_rows(latent, f, multiplier)
    _bytes(ckv)[at] = _bytes(codes)
    if scales is not None and stored is not None:
        scales[at] = stored
    rotary = cast(rotary * multiplier if f.scale == TENSOR else rotary, rope_dtype(f))
    _bytes(kpe)[at] = _bytes(rotary)


def load(ckv: Tensor, kpe: Tensor, scales: Tensor | None, at: At, f: KVFormat, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Dequantised rows [n, L] and [n, R], in fp32."""
    stored = None if scales is None else scales[at]
    codes, rotary = (_bytes(x)[at].view(x.dtype) for x in (ckv, kpe))
    rotary = rotary.to(torch.float32)
    return dequantize(codes, stored, f, scale), rotary * scale if f.scale == TENSOR else rotary


def quantise_latents(latent: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes [..., L] and scales [..., L/128] of rows [..., L]: scale = min(amax, 1200) / 448 of 128 columns,
    code = e4m3(x · (1 / scale)), saturating; 0 where the scale is 0. A NaN becomes 0x7F and leaves the scale alone.
    """
    groups = latent.to(torch.float32).unflatten(-1, (-1, LATENT_GROUP))
    # NOTE: by a Python number, PyTorch on a GPU multiplies with a rounded reciprocal instead of dividing.
    scale = amax(groups).clamp(max=MAX_LATENT_AMAX) / groups.new_full((), E4M3_MAX)
    # NOTE: below 2^-128 the reciprocal is infinite, and a zero beside such a value would become NaN.
    scaled = groups * reciprocal(scale).clamp(max=_F32_MAX)[..., None]
    scaled = torch.where((scale == 0)[..., None] & ~groups.isnan(), 0.0, scaled)
    return cast_fp8(scaled, torch.float8_e4m3fn).flatten(-2), scale


def _bytes(x: Tensor) -> Tensor:
    """fp8 seen as bytes, since some devices index no fp8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
