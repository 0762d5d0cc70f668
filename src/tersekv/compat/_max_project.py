"""The two projections around MAX's absorbed decode: [T, H, K] × [H, N, K] → [T, H, N], in plain PyTorch.

They exist for MAX's decode branches only; a model of one's own folds w_uk and w_uv into its projections and calls
`tersekv.mla_decode`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..formats import E4M3_MAX, LATENT_GROUP, MAX_LATENT_AMAX
from ._adapt import tensor


def check_weight(
    name: str, shape: tuple[int, int, int], weight: Tensor, scale: Tensor | None, dtype: torch.dtype
) -> None:
    """Raise ValueError unless weight is [H, N, K]: e4m3 beside scale [H, N/128, K/128] fp32, or `dtype` without one."""
    want = dtype if scale is None else torch.float8_e4m3fn
    if tuple(tensor(name, weight).shape) != shape or weight.dtype != want:
        raise ValueError(f"{name}: want [H, N, K] = {list(shape)} {want}, got {list(weight.shape)} {weight.dtype}")
    if scale is None:
        return
    if shape[1] % LATENT_GROUP or shape[2] % LATENT_GROUP:
        raise ValueError(f"{name}: want N and K multiples of {LATENT_GROUP}, got {list(shape)}")
    blocks = [shape[0], shape[1] // LATENT_GROUP, shape[2] // LATENT_GROUP]
    if list(scale.shape) != blocks or scale.dtype != torch.float32:
        raise ValueError(f"{name}_scale: want {blocks} {torch.float32}, got {list(scale.shape)} {scale.dtype}")


def project(x: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """x [T, H, K] · weight [H, N, K]ᵀ of each head -> [T, H, N] in x's dtype.

    With an e4m3 weight, x is quantised per token, head and 128 columns, as mla_prefill quantises latents, and the
    partial sums of 128 columns are scaled and added in fp32.
    """
    x = x.transpose(0, 1)
    out = torch.bmm(x, weight.transpose(1, 2)) if scale is None else _blockwise(x, weight, scale)
    return out.to(x.dtype).transpose(0, 1)


def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes of x [..., K] and their scales [..., K/128]: min(amax, 1200) / 448, code e4m3(x · (1 / scale))."""
    groups = x.to(torch.float32).unflatten(-1, (-1, LATENT_GROUP))
    bad = groups.isnan()  # code 0x7F, left out of the scale
    amax = groups.abs().masked_fill(bad, 0.0).amax(-1)
    # NOTE: by a Python number, PyTorch on a GPU multiplies with a rounded reciprocal instead of dividing.
    scale = amax.clamp(max=MAX_LATENT_AMAX) / amax.new_full((), E4M3_MAX)
    inverse = (amax.new_ones(()) / scale).clamp(max=torch.finfo(torch.float32).max)
    scaled = (groups * inverse[..., None]).masked_fill((scale == 0)[..., None], 0.0).clamp(-E4M3_MAX, E4M3_MAX)
    return scaled.masked_fill(bad, math.nan).to(torch.float8_e4m3fn).flatten(-2), scale


def _blockwise(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """[H, T, K] x [H, N, K] -> [H, T, N] fp32, one block of 128 columns after the other."""
    codes, scale = quantise(x)
    out = x.new_zeros((*x.shape[:2], weight.shape[1]), dtype=torch.float32)
    per_row = weight_scale.repeat_interleave(LATENT_GROUP, 1)
    for group in range(scale.shape[-1]):
        columns = slice(group * LATENT_GROUP, (group + 1) * LATENT_GROUP)
        a, w = codes[..., columns].to(torch.float32), weight[..., columns].to(torch.float32)
        out += torch.bmm(a, w.transpose(1, 2)) * (scale[..., group, None] * per_row[:, None, :, group])
    return out
