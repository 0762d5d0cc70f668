"""What both demo models share: norm, feed-forward, rotary tables and rotations, all but attention, initialisation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis: statistics in fp32, rounded to gamma's dtype before the product.

    The order of the roundings is the one a latent cache applies, so a dense run and a cached run can agree.
    """
    x = x.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)).to(gamma.dtype) * gamma


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(dim, hidden, bias=False)
        self.up_proj = nn.Linear(dim, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def _angles(max_pos: int, rotary_dim: int, theta: float) -> Tensor:
    """Angle of every (position, pair), [max_pos, rotary_dim/2] fp64: at large positions fp32 loses digits."""
    inverse = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    return torch.outer(torch.arange(max_pos, dtype=torch.float64), inverse)


def half_split_table(max_pos: int, rotary_dim: int, theta: float) -> Tensor:
    """[max_pos, rotary_dim] fp32, each row [cos(rotary_dim/2) | sin(rotary_dim/2)]."""
    angles = _angles(max_pos, rotary_dim, theta)
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def interleaved_table(max_pos: int, rotary_dim: int, theta: float) -> Tensor:
    """[max_pos, rotary_dim] fp32, each row [cos0, sin0, cos1, sin1, ...]."""
    angles = _angles(max_pos, rotary_dim, theta)
    return torch.stack((angles.cos(), angles.sin()), dim=-1).flatten(-2).float()


def rotate_half_split(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]); x [..., T, H, D], table [T, D] rows of `half_split_table`."""
    cos, sin = table.unsqueeze(-2).chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def rotate_interleaved(x: Tensor, table: Tensor) -> Tensor:
    """Rotate the pairs (x[2i], x[2i + 1]); x [..., T, H, Dr], table [T, Dr] rows of `interleaved_table`."""
    cos, sin = table[:, None, 0::2], table[:, None, 1::2]
    a, b = x.float()[..., 0::2], x.float()[..., 1::2]
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


class ByteLM(nn.Module):
    """Bytes in, next-byte logits out. Everything that remembers earlier tokens is in `attend`."""

    def __init__(self, config: Any, layer: Callable[[Any], nn.Module]):
        super().__init__()
        c = self.config = config
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(layer(c) for _ in range(c.num_layers))
        self.norm = RMSNorm(c.dim, c.norm_eps)
        self.lm_head = nn.Linear(c.dim, c.vocab_size, bias=False)
        init_weights(self)

    def dense_attention(self) -> Callable[..., Tensor]:
        """An `attend` that keeps earlier tokens as they are."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, attend: Callable[..., Tensor] | None = None) -> Tensor:
        """tokens [T] or [B, T] integer -> logits [..., T, vocab]; `attend`: dense unless given."""
        attend = attend or self.dense_attention()
        x = self.embed(tokens)
        for layer_idx, layer in enumerate(self.layers):
            x = layer(x, layer_idx, attend)
        return self.lm_head(self.norm(x))


def init_weights(model: nn.Module) -> None:
    """Normal with variance 1/fan_in; the projections that write the residual stream start at zero.

    Every block is then the identity at the first step, which lets a small model take a large learning rate.
    """
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            continue
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            nn.init.zeros_(weight)
        elif name.endswith("embed.weight"):
            nn.init.normal_(weight, std=1.0)
        else:
            nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
