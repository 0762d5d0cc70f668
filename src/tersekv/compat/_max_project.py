"""The weights of the two projections around MAX's absorbed decode: [T, H, K] × [H, N, K] → [T, H, N]."""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import LATENT_GROUP
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
