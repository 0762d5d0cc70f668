"""The decode branch of MLA, step by step: append, project the queries, attend, project the attended latents."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from tersekv.formats import latent_format

from . import mla_decode, mla_project
from .exact import without_grad_and_autocast
from .mla_latents import checked_page_and_slot
from .mla_prefill import (
    positions_and_slots_of_new_tokens,
    request_and_index_of_rows,
    store_roped_queries_and_new_latents,
)
from .quantize import why_no_codec


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec(latent_format(f.format))


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    q, device = call.q, call.q.device
    tokens, heads, dq = q.shape
    rank, rope = call.ckv.shape[-1], call.kpe.shape[-1]
    if tokens == 0:
        return
    each = range(0, tokens + 1, max(call.max_q_len, 1))
    starts = list(each) if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    lens = torch.empty(len(call.cache_lens), dtype=torch.int64, device=device)
    q_pe = q.new_zeros(tokens, heads, rope)
    q_nope, latents = q.new_empty(tokens, heads, rank), q.new_empty(tokens, heads, rank)
    given = call._asdict() | {"cu_seqlens_q": torch.tensor(starts, device=device)}
    given = SimpleNamespace(**given, q_pe_out=q_pe, seq_lens_out=lens)
    new = positions_and_slots_of_new_tokens(given, starts)
    check_max_q_len_and_pages_of_tokens(given)
    store_roped_queries_and_new_latents(given, new)
    x = q[..., : dq - rope]
    mla_project.run(SimpleNamespace(x=x, weight=call.w_uk, weight_scale=call.w_uk_scale, out=q_nope), None)
    given = call._asdict() | {"out": latents, "lse": None, "out_scale": 1.0, "out_scale_t": None}
    given |= {"indices": None, "extra_indices": None, "sinks": None, "lse_of_keys": False}
    mla_decode.run(SimpleNamespace(**given, q_nope=q_nope, q_pe=q_pe, seq_lens=lens), None)
    mla_project.run(SimpleNamespace(x=latents, weight=call.w_uv, weight_scale=call.w_uv_scale, out=call.out), None)


def check_max_q_len_and_pages_of_tokens(call: Any) -> None:
    """Raise ValueError for a request with more than max_q_len new tokens, or with new tokens and a token outside the
    page table or the cache: before anything is written."""
    new = call.cu_seqlens_q.diff().to(torch.int64)
    longest = int(new.max()) if len(new) else 0
    if longest > call.max_q_len:
        raise ValueError(f"max_q_len: want at least {longest} as in cu_seqlens_q, got {call.max_q_len}")
    held = torch.where(new > 0, call.cache_lens.to(torch.int64) + new, 0)
    request, index = request_and_index_of_rows([0, *held.cumsum(0).tolist()], held.device)
    checked_page_and_slot(call.page_table, request, index, call.ckv)
