"""Rows of a paged latent cache: their page and slot, RMSNorm, store and load; quantization of latents for a blockwise
fp8 product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tersekv.formats import E4M3_MAX, LATENT_GROUP, MAX_LATENT_AMAX, TENSOR, KVFormat, rope_dtype

from .quantize import cast_fp8, cast_rounded, dequantize, quantize_rows, reciprocal, row_abs_max

_F32_MAX = torch.finfo(torch.float32).max
At = tuple[Tensor, Tensor]  # page and slot of each token


def checked_page_and_slot(page_table: Tensor, request: Tensor, position: Tensor, cache: Tensor) -> At:
    """Returns page and slot of tokens. Raises ValueError for a token outside the table or the cache [P, S, ...]."""
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
    """Returns RMSNorm of x, computed in fp32 and rounded to gamma's dtype before gamma is applied."""
    x = x.to(torch.float32)
    # sqrt and reciprocal are correctly rounded everywhere; rsqrt is not.
    return (x * reciprocal((x.square().mean(-1, keepdim=True) + epsilon).sqrt())).to(gamma.dtype) * gamma


def quantize_and_store_latents(
    latent: Tensor, rotary: Tensor, ckv: Tensor, kpe: Tensor, scales: Tensor | None, at: At, f: KVFormat, scale: Tensor
) -> None:
    """Store rows [n, L] and [n, R] in the cache's format; a per-tensor dequantizing scale [1] applies to both."""
    latent, rotary = latent.to(torch.float32), rotary.to(torch.float32)
    multiplier = reciprocal(scale)
    codes, stored = quantize_rows(latent, f, multiplier)
    _bytes(ckv)[at] = _bytes(codes)
    if scales is not None and stored is not None:
        scales[at] = stored
    rotary = cast_rounded(rotary * multiplier if f.scale == TENSOR else rotary, rope_dtype(f))
    _bytes(kpe)[at] = _bytes(rotary)


def load_and_dequantize_latents(
    ckv: Tensor, kpe: Tensor, scales: Tensor | None, at: At, f: KVFormat, scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns dequantized rows [n, L] and [n, R] in fp32."""
    stored = None if scales is None else scales[at]
    codes, rotary = (_bytes(x)[at].view(x.dtype) for x in (ckv, kpe))
    rotary = rotary.to(torch.float32)
    return dequantize(codes, stored, f, scale), rotary * scale if f.scale == TENSOR else rotary


def quantize_gemm_input_by_128_columns(latent: Tensor) -> tuple[Tensor, Tensor]:
    """Returns e4m3 codes [..., L] and scales [..., L/128] of rows: scale = min(amax, 1200) / 448 of 128 columns,
    code = e4m3(x · (1 / scale)), saturating; 0 where the scale is 0. A NaN becomes 0x7F and leaves the scale alone.
    """
    groups = latent.to(torch.float32).unflatten(-1, (-1, LATENT_GROUP))
    # NOTE: by a Python number, PyTorch on a GPU multiplies with a rounded reciprocal instead of dividing.
    scale = row_abs_max(groups).clamp(max=MAX_LATENT_AMAX) / groups.new_full((), E4M3_MAX)
    # NOTE: below 2^-128 the reciprocal is infinite, and a zero beside such a value would become NaN.
    scaled = groups * reciprocal(scale).clamp(max=_F32_MAX)[..., None]
    scaled = torch.where((scale == 0)[..., None] & ~groups.isnan(), 0.0, scaled)
    return cast_fp8(scaled, torch.float8_e4m3fn).flatten(-2), scale


def _bytes(x: Tensor) -> Tensor:
    """Returns fp8 viewed as bytes, since some devices cannot index fp8."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
