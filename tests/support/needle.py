"""Needle in a haystack: one key of very many matches the query, and its value alone differs.

The needle gets about half of the probability, all the other tokens share the rest in equal, tiny parts: sums that are
kept in too few bits lose one or the other. Judged by plain attention in fp64 on the stored codes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import tersekv
from tersekv import PagedKVCache, PagedLatentCache
from tersekv.formats import kv_format, latent_format
from tersekv.recipe import recipe
from tersekv.testing.bench import data
from tersekv.testing.reference_rotation import back

PAGE, HEADS, GROUP, D = 64, 2, 4, 128  # K/V heads, query heads of each
LATENT_HEADS, RANK, ROPE = 16, 512, 64
LIMIT = 3e-3  # relative norm, of a 16-bit output
FAST = 3e-2  # with precision="fast"
MIXED = (
    "int8_per_token_head/int4_per_token_head", "fp8_e4m3/int4_per_token_head", "int4_per_token_head+rotated",
    "nvfp4+rotated", "int4_per_token_head+channels", "int8_per_token_head/int4_per_token_head+rotated+channels",
)  # fmt: skip


def errors(word: str, tokens: int, device: str) -> list[float]:
    """Relative error of `decode` over a recipe's cache, with the needle in the first, a middle and the last token."""
    r = recipe(word)
    scales = [(torch.rand(HEADS, D, device=device) + 0.5, torch.rand(HEADS, D, device=device) + 0.5)]
    options = r.options(1, scales if r.channels else None)
    cache = PagedKVCache.allocate(1, -(-tokens // PAGE), PAGE, HEADS, D, device=device, **options)[0]
    table, slots = pages(tokens, device)
    q = torch.randn(1, HEADS, 1, D, device=device).expand(1, HEADS, GROUP, D).flatten(1, 2).bfloat16()
    v = torch.linspace(0.5, 1.5, D, device=device).expand(tokens, HEADS, D).bfloat16().contiguous()
    scale = math.log(tokens) / float(q.double().square().sum(-1).mean())  # the needle is worth all the others
    found = []
    for place in (0, tokens // 2 + 3, tokens - 1):
        k = 0.1 * torch.randn(tokens, HEADS, D, device=device).bfloat16()
        k[place] = q[0, ::GROUP]
        values = v.clone()
        values[place] = -v[place].flip(-1)
        tersekv.append(k, values, cache, slots)
        got = tersekv.decode(q, cache, table, lengths(tokens, device), softmax_scale=scale)
        where = data.places(table[0], tokens, PAGE)
        k_rows = data.values(cache.k, cache.k_scale_cache, kv_format(cache.formats[0]), where)
        v_rows = data.values(cache.v, cache.v_scale_cache, kv_format(cache.formats[1]), where)
        stored = back(k_rows, cache.k_signs, cache.k_channel_scale), back(v_rows, cache.v_signs, cache.v_channel_scale)
        found.append(judged(got[0], data.attend(q[0], *stored, scale), v[0, 0]))
    return found


def errors_of_many_rows(
    format: str, tokens: int, device: str, dtype: torch.dtype = torch.bfloat16, rows: int = 2048, **options
) -> list[float]:
    """The same of the last row of `prefill`, whose queries are of this dtype."""
    cache = PagedKVCache.allocate(1, -(-tokens // PAGE), PAGE, HEADS, D, format=format, device=device)[0]
    table, slots = pages(tokens, device)
    q = torch.randn(1, HEADS, 1, D, device=device).to(dtype).expand(rows, HEADS, GROUP, D).flatten(1, 2).contiguous()
    v = torch.linspace(0.5, 1.5, D, device=device).expand(tokens, HEADS, D).bfloat16().contiguous()
    scale = math.log(tokens) / float(q[0].double().square().sum(-1).mean())
    cu = torch.tensor([0, rows], dtype=torch.int32, device=device)
    found = []
    for place in (0, tokens // 2 + 3, tokens - 1):
        k = 0.1 * torch.randn(tokens, HEADS, D, device=device).bfloat16()
        k[place] = q[0, ::GROUP].to(k.dtype)
        values = v.clone()
        values[place] = -v[place].flip(-1)
        tersekv.append(k, values, cache, slots)
        got = tersekv.prefill(q, cache, table, lengths(tokens, device), cu, softmax_scale=scale, **options)
        f, where = kv_format(format), data.places(table[0], tokens, PAGE)
        stored = (
            data.values(c, s, f, where) for c, s in ((cache.k, cache.k_scale_cache), (cache.v, cache.v_scale_cache))
        )
        found.append(judged(got[-1], data.attend(q[-1].float(), *stored, scale), v[0, 0]))
    return found


def latent_errors(format: str, tokens: int, device: str) -> list[float]:
    """The same of `mla_decode`: the rotary part finds the needle, the latents are the values."""
    cache = PagedLatentCache.allocate(1, -(-tokens // PAGE), PAGE, format=format, device=device)[0]
    table, slots = pages(tokens, device)
    q_pe = torch.randn(1, 1, ROPE, device=device).expand(1, LATENT_HEADS, ROPE)
    q = torch.cat([0.02 * torch.randn(1, LATENT_HEADS, RANK, device=device), q_pe], -1).bfloat16()
    latents = torch.linspace(0.5, 1.5, RANK, device=device).expand(tokens, RANK).bfloat16().contiguous()
    scale = math.log(tokens) / float(q[..., RANK:].double().square().sum(-1).mean())
    found = []
    for place in (0, tokens // 2 + 3, tokens - 1):
        k_pe = 0.1 * torch.randn(tokens, ROPE, device=device).bfloat16()
        k_pe[place] = q[0, 0, RANK:]
        rows = latents.clone()
        rows[place] = latents[place].flip(-1)
        tersekv.mla_append(rows, k_pe, cache, slots)
        got = tersekv.mla_decode(q, cache, table, lengths(tokens, device), softmax_scale=scale)
        where = data.places(table[0], tokens, PAGE)
        ckv = data.values(cache.ckv, cache.ckv_scale_cache, latent_format(format), where)
        keys = torch.cat([ckv, data.take(cache.kpe, *where).float().double()], -1)
        found.append(judged(got[0], data.attend(q[0], keys[:, None], ckv[:, None], scale), latents[0]))
    return found


def pages(tokens: int, device: str) -> tuple[Tensor, Tensor]:
    """A page table [1, pages] in random order, and the slot of each token."""
    table = torch.randperm(-(-tokens // PAGE), device=device).int()[None]
    token = torch.arange(tokens, device=device)
    return table, table[0].long()[token // PAGE] * PAGE + token % PAGE


def lengths(tokens: int, device: str) -> Tensor:
    return torch.tensor([tokens], dtype=torch.int32, device=device)


def judged(got: Tensor, want: Tensor, others: Tensor) -> float:
    """The relative error, once it is sure that needle and hay both weigh in the answer."""
    without = data.relative(others.double().expand_as(want), want)
    assert without > 0.1, "the needle has no weight"
    assert float(want.abs().max()) > 0.05
    return data.relative(got, want)
