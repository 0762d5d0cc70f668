"""What an engine is held to: transformers' Llama in fp32, whose cached rows went through the format's codec.

Whoever runs the same model in fp32 stores the same codes, whatever the pages, chunks and batches: distributions then
differ by 1e-7 nats, but where a value lies between two codes. Tokens that tie are no matter: the reference is given the
engine's tokens, and says how likely each was.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import transformers
from dense_reference import rotation
from torch import Tensor
from transformers import AttentionInterface, DynamicCache

from tersekv.attributes import signs
from tersekv.demo import models
from tersekv.demo.parts import rms_norm, rotate_interleaved
from tersekv.formats import BF16, FP8_DS_MLA, KVFormat, kv_format, latent_format
from tersekv.integrations.transformers_layers import CACHE_ARGUMENT
from tersekv.recipe import recipe
from tersekv.testing.codes import column, decode_row, encode_row


class Rows(DynamicCache):
    """A cache of what the formats make of rows. own: the call's own rows are returned as they were given."""

    def __init__(
        self, formats: list[str], scales: list[tuple], shared: dict[int, int], own: bool, channels: list | None = None
    ) -> None:
        super().__init__()
        self.channels = channels or [(None, None)] * len(formats)
        self.formats, self.scales, self.shared, self.own = formats, scales, shared, own

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if layer_idx in self.shared:
            layer = self.layers[self.shared[layer_idx]]
            return layer.keys, layer.values
        made, given = recipe(self.formats[layer_idx]), (key_states, value_states)
        stored = [
            through(x, f, s, made.rotated, c)
            for x, f, s, c in zip(given, made.formats, self.scales[layer_idx], self.channels[layer_idx], strict=True)
        ]
        every = super().update(*stored, layer_idx, *args, **kwargs)
        if not self.own:
            return every
        old = every[0].shape[2] - key_states.shape[2]
        return tuple(torch.cat([a[:, :, :old], x], 2) for a, x in zip(every, given, strict=True))


def through(x: Tensor, format: str, scale: Any, rotated: bool = False, channels: Tensor | None = None) -> Tensor:
    """Rows [B, H, T, D] as a format gives them back. channels: [H, D] that they are divided by first."""
    if channels is not None:
        c = channels[:, None]
        return (through(x / c, format, scale, rotated) * c).to(x.dtype)
    f = kv_format(format)
    if f.scale == "none" and not rotated:
        return x.to(f.storage).to(x.dtype)
    turn = rotation(signs(x.shape[-1])) if rotated else torch.eye(x.shape[-1], dtype=torch.float64)
    b = len(turn)
    s, rows = column(scale), (x.double().unflatten(-1, (-1, b)) @ turn).flatten(-2)
    if f.scale == "none":
        back = rows.float().to(f.storage).double()
    else:
        codes, stored = encode_row(rows.transpose(1, 2).float(), f, s)
        back = decode_row(codes, stored, f, s).transpose(1, 2)
    return (back.unflatten(-1, (-1, b)) @ turn.T).flatten(-2).to(x.dtype)


class Reference:
    """format: of all layers, or one each, as `tersekv.recipe` reads it; windows, sinks: of layers by index;
    scales, channels: (k, v) of each layer; shared: layer → whose cache it reads."""

    def __init__(
        self,
        folder: Path,
        format: str | list[str],
        *,
        windows: dict[int, int] | None = None,
        sinks: dict[int, Tensor] | None = None,
        scales: list[tuple] | None = None,
        shared: dict[int, int] | None = None,
        channels: list[tuple] | None = None,
    ) -> None:
        AttentionInterface.register("plain", self._attend)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="plain"
        )
        n = self.model.config.num_hidden_layers
        self.formats = [format] * n if isinstance(format, str) else format
        self.windows, self.sinks, self.shared = windows or {}, sinks or {}, shared or {}
        self.scales, self.channels = scales or [(1.0, 1.0)] * n, channels

    @torch.no_grad()
    def score(self, prompt: list[int], tokens: list[int], own_rows: int = 0) -> Tensor:
        """Log-probabilities [tokens, vocabulary] fp64 before each token; own_rows: of these first rows, attention sees
        each as it was before the codec."""
        cache = Rows(self.formats, self.scales, self.shared, own_rows > 0, self.channels)
        rows = prompt + tokens[:-1]
        parts = [rows[:own_rows], rows[own_rows:]]
        logits = []
        for part in filter(None, parts):
            logits.append(self.model(torch.tensor([part]), **{CACHE_ARGUMENT: cache}).logits[0])
            cache.own = False
        return torch.cat(logits)[len(prompt) - 1 :].double().log_softmax(-1)

    def _attend(self, module, query, key, value, attention_mask, scaling=None, **kwargs):
        group, layer = query.shape[1] // key.shape[1], module.layer_idx
        k, v = (x.repeat_interleave(group, 1) for x in (key, value))
        t, n = query.shape[2], key.shape[2]
        mine, keys = torch.arange(n - t, n)[:, None], torch.arange(n)
        seen = (keys <= mine) & (keys > mine - self.windows.get(layer, n))
        scores = (query @ k.transpose(2, 3) * scaling).masked_fill(~seen, -math.inf)
        if layer in self.sinks:
            extra = self.sinks[layer].float()[:, None, None].expand(query.shape[0], -1, t, 1)
            scores = torch.cat([scores, extra], -1)
        return (scores.softmax(-1)[..., :n] @ v).transpose(1, 2), None


def hold(results: list[tuple[list[int], Tensor]], wanted: list[Tensor], most: float = 1e-3, mean: float = 1e-4) -> None:
    """Every token is as likely as the best to the reference, and every distribution is the reference's."""
    apart = []
    for (tokens, got), want in zip(results, wanted, strict=True):
        apart.append((want.exp() * (want - got)).sum(-1))
        behind = want.max(-1).values - want[range(len(tokens)), tokens]
        assert behind.max() < 3 * most**0.5, f"a token {behind.max():.3f} nats behind the best"
    every = torch.cat(apart)
    assert every.max() < most, f"KL {every.max():.2e} at one token"
    assert every.mean() < mean, f"KL {every.mean():.2e} on average"


@torch.no_grad()
def score_latents(
    prompt: list[int], tokens: list[int], format: str, scale: float = 1.0, *, rotated: bool = True
) -> Tensor:
    """Log-probabilities [tokens, vocabulary] fp64 of the byte-level DeepSeek in fp32, its cached rows as a latent
    format gives them back. rotated: False: without the columns that are rotated, with a softmax scale of the others.
    """
    model = models.load("deepseek")
    c, f, attend = model.config, latent_format(format), model.dense_attention()
    table = attend.table[: len(prompt) + len(tokens) - 1]

    def cached(layer_idx: int, q: Tensor, kv_c: Tensor, k_pe: Tensor) -> Tensor:
        layer = model.layers[layer_idx]
        latent = rms_norm(kv_c, layer.kv_norm_gamma, c.norm_eps)
        k_pe = rotate_interleaved(k_pe.unsqueeze(-2), table).squeeze(-2)
        rotary = (BF16, 1.0) if f is FP8_DS_MLA else (f, scale)
        latent, k_pe = (given_back(x, *how) for x, how in ((latent, (f, scale)), (k_pe, rotary)))
        k_nope, v = (
            torch.nn.functional.linear(latent, layer.kv_b_proj)
            .unflatten(-1, (c.num_heads, -1))
            .split((c.qk_nope_head_dim, c.head_dim_v), -1)
        )
        q_nope, q_pe = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), -1)
        q_pe = rotate_interleaved(q_pe, table)
        scores = torch.einsum("qhd,khd->hqk", q_nope, k_nope)
        if rotated:
            scores = scores + torch.einsum("qhd,kd->hqk", q_pe, k_pe)
        seen = torch.ones(scores.shape[1:]).tril().bool()
        softmax_scale = c.softmax_scale if rotated else c.qk_nope_head_dim**-0.5
        return torch.einsum("hqk,khd->qhd", (scores * softmax_scale).masked_fill(~seen, -math.inf).softmax(-1), v)

    logits = model(torch.tensor(prompt + tokens[:-1]), cached)
    return logits[len(prompt) - 1 :].double().log_softmax(-1)


def given_back(x: Tensor, f: KVFormat, scale: float) -> Tensor:
    codes, stored = encode_row(x, f, column(scale))
    return decode_row(codes, stored, f, column(scale)).to(x.dtype)
