"""mla_project: every head's rows through its own matrix. With an e4m3 weight, rows are quantised as latents are."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tersekv.formats import E4M3_MAX, LATENT_GROUP, MAX_LATENT_AMAX


def why_not(f: SimpleNamespace) -> str | None:
    return None


def configure(f: SimpleNamespace) -> None:
    return None


@torch.no_grad()
def run(call: Any, config: None) -> None:
    if not call.out.numel():
        return
    x, weight, scale = call.x.transpose(0, 1), call.weight, call.weight_scale
    out = torch.bmm(x, weight.transpose(1, 2)) if scale is None else _blockwise(x, weight, scale)
    call.out.copy_(out.transpose(0, 1))


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
