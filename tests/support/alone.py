"""A request's bits alone and among others: the check of `batch_invariant` that tests of all backends share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from paged_case import Case, kv_case, latent_case

from tersekv import decode, mla_decode, prefill
from tersekv.testing.memory import as_bytes

HEADS, GROUP, DIM, RANK, ROPE = 2, 3, 32, 64, 16


def attend(op: str, case: Case, q: torch.Tensor, q_lens: Sequence[int], **options: Any) -> tuple:
    """(out, lse) of a call; rows ragged where requests differ in them, or for prefill."""
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32).to(q.device)
    where = (q, case.layer, case.page_table, case.seq_lens)
    options = {"return_lse": True, **options}
    if op == "prefill":
        return prefill(*where, starts, max_q_len=max(q_lens), **options)
    if len({*q_lens}) > 1:
        options |= {"cu_seqlens_q": starts, "max_q_len": max(q_lens)}
    return mla_decode(*where, softmax_scale=0.1, **options) if op == "mla_decode" else decode(*where, **options)


def problem(op: str, format: str, lens: Sequence[int], q_lens: Sequence[int], dtype=torch.bfloat16, **sizes: Any):
    """A cache of requests of these lengths, and rows of q for each."""
    if op == "mla_decode":
        rank = 128 if format == "fp8_ds_mla" else RANK
        case = latent_case(format, [*lens], kv_lora_rank=rank, qk_rope_head_dim=ROPE, **sizes)
        return case, torch.randn(sum(q_lens), 6, rank + ROPE).to(dtype)
    case = kv_case(format, [*lens], heads=HEADS, head_dim=DIM, **sizes)
    return case, torch.randn(sum(q_lens), HEADS * GROUP, DIM).to(dtype)


def of_request(case: Case, b: int) -> Case:
    """Request b alone, with a page table as wide as it needs."""
    pages = max(-(-int(case.seq_lens[b]) // case.layer.page_size), 1)
    return Case(case.layer, case.page_table[b : b + 1, :pages].contiguous(), case.seq_lens[b : b + 1].clone())


def changed(
    op: str, case: Case, q: torch.Tensor, q_lens: Sequence[int], each: Callable[[int], dict] = lambda b: {}, **options
) -> list[int]:
    """The requests of which some bit is another one alone. each: options of request b alone that are not the call's"""
    out, lse = attend(op, case, q, q_lens, **options)
    found, row = [], 0
    for b, n in enumerate(q_lens):
        rows = slice(row, row + n)
        row += n
        if n == 0:
            continue
        got, sums = attend(op, of_request(case, b), q[rows].clone(), [n], **{**options, **each(b)})
        assert not got.float().isnan().any()
        if not (torch.equal(as_bytes(got), as_bytes(out[rows])) and torch.equal(as_bytes(sums), as_bytes(lse[rows]))):
            found.append(b)
    return found
