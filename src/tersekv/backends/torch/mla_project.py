"""mla_project: multiplies each head's rows by its own matrix. With an e4m3 weight, rows are quantized like latents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tersekv.formats import LATENT_GROUP

from .exact import without_grad_and_autocast
from .mla_latents import quantize_gemm_input_by_128_columns


def why_not(f: SimpleNamespace) -> str | None:
    return None


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    if not call.out.numel():
        return
    x, weight, scale = call.x.transpose(0, 1), call.weight, call.weight_scale
    if scale is None:
        out = torch.bmm(x, weight.transpose(1, 2))
    else:
        out = _quantize_rows_and_matmul_blockwise(x, weight, scale)
    call.out.copy_(out.transpose(0, 1))


def _quantize_rows_and_matmul_blockwise(x: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """Returns x [H, T, K] × weight [H, N, K] → [H, T, N] fp32, summed over blocks of 128 columns in order."""
    codes, scale = quantize_gemm_input_by_128_columns(x)
    out = x.new_zeros((*x.shape[:2], weight.shape[1]), dtype=torch.float32)
    per_row = weight_scale.repeat_interleave(LATENT_GROUP, 1)
    for group in range(scale.shape[-1]):
        columns = slice(group * LATENT_GROUP, (group + 1) * LATENT_GROUP)
        a, w = codes[..., columns].to(torch.float32), weight[..., columns].to(torch.float32)
        out += torch.bmm(a, w.transpose(1, 2)) * (scale[..., group, None] * per_row[:, None, :, group])
    return out
