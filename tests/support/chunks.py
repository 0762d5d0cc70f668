"""A request's rows in one chunk, in several, and one by one: the check of `batch_invariant="prefill"` that tests of all
backends share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from alone import of_request
from paged_case import Case

from tersekv import decode, prefill
from tersekv.testing.memory import as_bytes


def rows_in_chunks(case: Case, b: int, q: torch.Tensor, sizes: Sequence[int], verb: str, **options: Any) -> tuple:
    """(out, lse) of the last rows of request b, computed in chunks of these sizes; q: those rows, in order."""
    one, n = of_request(case, b), int(case.seq_lens[b])
    outs, sums, row = [], [], 0
    for size in sizes:
        lens = torch.full_like(one.seq_lens, n - len(q) + row + size)
        starts = torch.tensor([0, size], dtype=torch.int32, device=q.device)
        rows = q[row : row + size].clone()
        where = (rows, one.layer, one.page_table, lens)
        options |= {"return_lse": True, "batch_invariant": "prefill"}
        if verb == "prefill":
            out, lse = prefill(*where, starts, max_q_len=size, **options)
        else:
            out, lse = decode(*where, cu_seqlens_q=starts, max_q_len=size, **options)
        outs.append(out)
        sums.append(lse)
        row += size
    return torch.cat(outs), torch.cat(sums)


def batch_of(case: Case, q: torch.Tensor, q_lens: Sequence[int], **options: Any) -> tuple:
    """(out, lse) of all requests' last rows through one call of `prefill`."""
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32).to(q.device)
    return prefill(
        q, case.layer, case.page_table, case.seq_lens, starts, max_q_len=max(q_lens), return_lse=True,
        batch_invariant="prefill", **options,
    )  # fmt: skip


def same(a: tuple, b: tuple) -> bool:
    return all(torch.equal(as_bytes(x), as_bytes(y)) for x, y in zip(a, b, strict=True))


def rows_that_differ(
    case: Case, q: torch.Tensor, q_lens: Sequence[int], sizes: Sequence[Sequence[int]], **options: Any
) -> list[tuple]:
    """(request, verb, sizes of the chunks) where bits are others than those of the whole batch in one call.

    sizes: of chunks, for each request whose number of rows is their sum; every request is also taken row by row
    """
    out, lse = batch_of(case, q, q_lens, **options)
    assert not out.float().isnan().any()
    found, row = [], 0
    for b, n in enumerate(q_lens):
        rows = slice(row, row + n)
        row += n
        ways = [("decode", [1] * n), ("prefill", [1] * n), ("prefill", [n])]
        ways += [(verb, s) for s in sizes if sum(s) == n for verb in ("decode", "prefill")]
        for verb, chunks in ways if n else []:
            got = rows_in_chunks(case, b, q[rows], chunks, verb, **options)
            if not same(got, (out[rows], lse[rows])):
                found.append((b, verb, tuple(chunks)))
    return found
