"""Prompts of latent attention in vLLM: keys and values are made of latents, and `prefill` attends to them.

New tokens come with latents of their own; those before them are gathered from the pages, in whatever cache dtype, as
keys and values in pages of their own. One causal attention then sees both, so nothing is merged. Where the keys and
values of all heads would take too much memory, some heads are done at a time: heads know nothing of each other.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.mla.prefill import MLAPrefillBackend

from ..layers import PagedKVLayer, PagedLatentLayer
from ..ops.prefill import prefill

PAGE = 64  # tokens of the pages that keys and values are put into
BYTES = 2 << 30  # that these may take at a time


class TersekvMLAPrefill(MLAPrefillBackend):
    """What `--attention-config.mla_prefill_backend CUSTOM` stands for: TERSEKV_MLA then prefills by `prompts`."""

    @staticmethod
    def get_name() -> str:
        return "TERSEKV"

    def run_prefill_new_tokens(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("mla_prefill_backend: CUSTOM is tersekv's, which wants attention_backend TERSEKV_MLA")

    run_prefill_context_chunk = run_prefill_new_tokens


def prompts(
    q: Tensor,
    kv_c: Tensor,
    k_pe: Tensor,
    pages: PagedLatentLayer,
    block_table: Tensor,
    context: list[int],
    seq_lens: Tensor,
    cu_seqlens_q: Tensor,
    weights: tuple[Tensor, Tensor],
    out: Tensor,
    *,
    softmax_scale: float,
    max_q_len: int,
) -> None:
    """Causal attention of new tokens to each other and to those before them, into `out` [T, H, Dv].

    q:         [T, H, Dn + R] bf16 | fp16, rotated
    kv_c:      [T, L] normed latents of the new tokens; k_pe [T, R] their rotary parts
    context:   tokens of each request before these, on the host; seq_lens has them and the new ones
    weights:   [L, H, Dn], [L, H, Dv]: from latents to the heads' keys and values
    """
    w_k, w_v = weights
    old = gathered(pages, block_table, context, q.dtype)
    taken = [-(-n // PAGE) for n in context]
    firsts = torch.tensor(list(accumulate(taken, initial=0))[:-1], dtype=torch.int32, device=q.device)
    table = firsts[:, None] + torch.arange(max(1, *taken), dtype=torch.int32, device=q.device)
    per_head = (q.shape[2] + w_v.shape[2]) * q.element_size() * (len(old[0]) + len(kv_c))
    at_once = max(1, min(q.shape[1], BYTES // max(per_head, 1)))
    for first in range(0, q.shape[1], at_once):
        heads = slice(first, first + at_once)
        paged = [x.unflatten(0, (-1, PAGE)) for x in _of_heads(*old, w_k[:, heads], w_v[:, heads])]
        k, v = _of_heads(kv_c, k_pe, w_k[:, heads], w_v[:, heads])
        prefill(
            q[:, heads], PagedKVLayer.of(paged), table, seq_lens, cu_seqlens_q, k=k, v=v, softmax_scale=softmax_scale,
            max_q_len=max_q_len, out=out[:, heads],
        )  # fmt: skip


def _of_heads(latent: Tensor, rotary: Tensor, w_k: Tensor, w_v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [N, H, Dn + R] and values [N, H, Dv] of latents [N, L]."""
    n, heads, dim = len(latent), w_k.shape[1], w_k.shape[2]
    k = latent.new_empty(n, heads, dim + rotary.shape[-1])
    k[..., :dim] = (latent @ w_k.flatten(1)).view(n, heads, dim)
    k[..., dim:] = rotary[:, None]
    return k, (latent @ w_v.flatten(1)).view(n, heads, -1)


def gathered(
    pages: PagedLatentLayer, block_table: Tensor, context: list[int], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Latents [N, L] and rotary parts [N, R] of tokens before the new ones.

    Each request's begin at a multiple of PAGE; rows between repeat its last. Without any there is one page, unread.
    """
    device = pages.device
    rows = torch.tensor([-(-n // PAGE) * PAGE for n in context], device=device)
    n = sum(-(-n // PAGE) * PAGE for n in context)
    if n == 0:
        ckv, kpe = (torch.zeros(PAGE, x.shape[-1], dtype=dtype, device=device) for x in (pages.ckv, pages.kpe))
        return ckv, kpe
    request = torch.repeat_interleave(torch.arange(len(context), device=device), rows, output_size=n)
    at = torch.arange(n, device=device) - (rows.cumsum(0) - rows)[request]
    at = torch.minimum(at, torch.tensor(context, device=device)[request] - 1)
    page, slot = block_table[request, at // pages.page_size].long(), at % pages.page_size
    latent, rotary = pages.ckv[page, slot], pages.kpe[page, slot]
    if pages.ckv_scale_cache is not None:
        scales = pages.ckv_scale_cache[page, slot]
        latent = (latent.float().unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)
    elif latent.element_size() == 1:
        latent, rotary = latent.float() * pages.kv_scale, rotary.float() * pages.kv_scale
    return latent.to(dtype), rotary.to(dtype)
