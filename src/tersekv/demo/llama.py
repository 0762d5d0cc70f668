"""A byte-level Llama: grouped-query attention whose cache is a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .parts import ByteLM, RMSNorm, SwiGLU, half_split_table, rotate_half_split

# attend(layer_idx, q [..., T, Hq, D], k [..., T, H, D], v [..., T, H, D]) -> [..., T, Hq, D];
# q and k arrive unrotated.
LlamaAttend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class LlamaConfig:
    vocab_size: int = 256
    dim: int = 160
    num_layers: int = 4
    num_q_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    mlp_dim: int = 256
    rope_theta: float = 10000.0
    max_pos: int = 4096
    train_context: int = 1024
    norm_eps: float = 1e-6

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5


def cos_sin_cache(config: LlamaConfig, device: torch.device | str = "cpu") -> Tensor:
    """The rotary table [max_pos, D] fp32, rows [cos(D/2) | sin(D/2)], for half-split pairs."""
    return half_split_table(config.max_pos, config.head_dim, config.rope_theta).to(device)


class DenseAttention:
    """Causal attention over the tokens of this call alone, positions from 0; nothing is kept."""

    def __init__(self, config: LlamaConfig, device: torch.device | str = "cpu"):
        self.config = config
        self.table = cos_sin_cache(config, device)

    def __call__(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [..., T, Hq, D], k and v [..., T, H, D], q and k unrotated -> [..., T, Hq, D]."""
        table = self.table[: q.shape[-3]]
        group = self.config.num_q_heads // self.config.num_kv_heads
        q, k = rotate_half_split(q, table), rotate_half_split(k, table)
        k, v = (x.repeat_interleave(group, dim=-2) for x in (k, v))
        q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.config.softmax_scale)
        return out.transpose(-3, -2)


class LlamaLayer(nn.Module):
    def __init__(self, config: LlamaConfig):
        super().__init__()
        c = self.config = config
        self.attn_norm = RMSNorm(c.dim, c.norm_eps)
        self.q_proj = nn.Linear(c.dim, c.num_q_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.num_kv_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_q_heads * c.head_dim, c.dim, bias=False)
        self.mlp_norm = RMSNorm(c.dim, c.norm_eps)
        self.mlp = SwiGLU(c.dim, c.mlp_dim)

    def forward(self, x: Tensor, layer_idx: int, attend: LlamaAttend) -> Tensor:
        """x [..., T, dim] -> [..., T, dim]."""
        h = self.attn_norm(x)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (proj(h).unflatten(-1, (-1, self.config.head_dim)) for proj in projections)
        x = x + self.o_proj(attend(layer_idx, q, k, v).flatten(-2))
        return x + self.mlp(self.mlp_norm(x))


class LlamaLM(ByteLM):
    def __init__(self, config: LlamaConfig | None = None):
        super().__init__(config or LlamaConfig(), LlamaLayer)

    def dense_attention(self) -> DenseAttention:
        return DenseAttention(self.config, self.embed.weight.device)
