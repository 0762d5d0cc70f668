"""A byte-level DeepSeek: multi-head latent attention (MLA) whose cache is a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import ByteLM, RMSNorm, SwiGLU, interleaved_table, rms_norm, rotate_interleaved

# attend(layer_idx, q [..., T, H, Dn + Dr], kv_c [..., T, L], k_pe [..., T, Dr]) -> [..., T, H, Dv];
# q's last Dr columns and k_pe arrive unrotated, kv_c un-normed.
LatentAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class DeepseekConfig:
    vocab_size: int = 256
    dim: int = 192
    num_layers: int = 2
    num_heads: int = 4
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    head_dim_v: int = 64
    kv_lora_rank: int = 512
    mlp_dim: int = 384
    rope_theta: float = 10000.0
    max_pos: int = 4096
    train_context: int = 1024
    norm_eps: float = 1e-6

    @property
    def softmax_scale(self) -> float:
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5


def freqs_cis(config: DeepseekConfig, device: torch.device | str = "cpu") -> Tensor:
    """The rotary table [max_pos, Dr] fp32, rows [cos0, sin0, cos1, sin1, ...], for interleaved pairs."""
    return interleaved_table(config.max_pos, config.qk_rope_head_dim, config.rope_theta).to(device)


class DenseLatentAttention:
    """Causal MLA over the tokens of this call alone, positions from 0: nothing is kept between calls."""

    def __init__(self, model: DeepseekLM):
        self.config = model.config
        self.layers = model.layers
        self.table = freqs_cis(model.config, model.embed.weight.device)

    def __call__(self, layer_idx: int, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        """q [..., T, H, Dn + Dr], kv_c [..., T, L], k_pe [..., T, Dr] -> [..., T, H, Dv]; see above."""
        c, layer = self.config, cast(DeepseekLayer, self.layers[layer_idx])
        table = self.table[: q.shape[-3]]
        q_nope, q_pe = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent = rms_norm(kv_c, layer.kv_norm_gamma, c.norm_eps)
        kv = F.linear(latent, layer.kv_b_proj).unflatten(-1, (c.num_heads, -1))
        k_nope, v = kv.split((c.qk_nope_head_dim, c.head_dim_v), dim=-1)
        # The rotary key is one row for all heads.
        k_pe = rotate_interleaved(k_pe.unsqueeze(-2), table).expand(*k_nope.shape[:-1], -1)
        q = torch.cat((q_nope, rotate_interleaved(q_pe, table)), dim=-1)
        k = torch.cat((k_nope, k_pe.to(k_nope.dtype)), dim=-1)
        # Padding v to the width of k lets PyTorch take its fused kernel, which wants equal widths.
        v = F.pad(v, (0, k.shape[-1] - v.shape[-1]))
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=c.softmax_scale)
        return out.transpose(-3, -2)[..., : c.head_dim_v]


class DeepseekLayer(nn.Module):
    """One block. It holds `kv_norm_gamma` [L] and `kv_b_proj` [H * (Dn + Dv), L] (per head [nope | v]), but
    `attend` applies them: norm and up-projection lie on the cache's side."""

    def __init__(self, config: DeepseekConfig):
        super().__init__()
        c = self.config = config
        self.attn_norm = RMSNorm(c.dim, c.norm_eps)
        self.q_proj = nn.Linear(c.dim, c.num_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim), bias=False)
        self.kv_a_proj = nn.Linear(c.dim, c.kv_lora_rank + c.qk_rope_head_dim, bias=False)
        self.kv_norm_gamma = nn.Parameter(torch.ones(c.kv_lora_rank))
        kv_b_rows = c.num_heads * (c.qk_nope_head_dim + c.head_dim_v)
        self.kv_b_proj = nn.Parameter(torch.empty(kv_b_rows, c.kv_lora_rank))
        self.o_proj = nn.Linear(c.num_heads * c.head_dim_v, c.dim, bias=False)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = SwiGLU(c.dim, c.mlp_dim)

    def forward(self, x: Tensor, layer_idx: int, attend: LatentAttend) -> Tensor:
        """x [..., T, dim] -> [..., T, dim]."""
        c = self.config
        h = self.attn_norm(x)
        q = self.q_proj(h).unflatten(-1, (c.num_heads, -1))
        kv_c, k_pe = self.kv_a_proj(h).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        x = x + self.o_proj(attend(layer_idx, q, kv_c, k_pe).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class DeepseekLM(ByteLM):
    def __init__(self, config: DeepseekConfig | None = None):
        super().__init__(config or DeepseekConfig(), DeepseekLayer)

    def dense_attention(self) -> DenseLatentAttention:
        return DenseLatentAttention(self)
