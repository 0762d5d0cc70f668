"""The requests of a call, and which keys their query rows see.

On a CPU the requests are taken one by one, with their lengths read on the host, so that only keys that somebody sees
are loaded. On other devices all go at once, nothing is read on the host, and what a request does not have is masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .codes import may_read


class Batch(NamedTuple):
    """Requests that are attended together."""

    table: Tensor  # [B, max_pages] int64
    seq_lens: Tensor  # [B] int64
    q_lens: Tensor  # [B] int64
    rows: Tensor  # [B, Q] int64: query row of each draft; T where a request has fewer
    start: int  # keys [start, stop) are looked at
    stop: int


class Rules(NamedTuple):
    """Who sees what, and how scores bend."""

    window: int = 0
    mask: Tensor | None = None  # [T, W]
    softcap: float = 0.0


def why_together(f: Any) -> str | None:
    """Why requests of a call cannot stay apart, as batch invariance wants it; None: they can, or need not."""
    if not f.batch_invariant or f.device.type == "cpu":
        return None
    return f"takes the requests of a call together on {f.device.type}, which is no batch invariance"


def batches(call: Any, rules: Rules, num_pages: int, page_size: int, *, new_rows: bool = False) -> Iterator[Batch]:
    """The requests of a call, one by one on a CPU (those with nothing to do left out), together elsewhere.

    new_rows:  the last tokens are not looked for in pages, since the call brings them
    """
    t, count = call.out.shape[0], call.seq_lens.shape[0]
    if t == 0 or count == 0 or call.max_q_len == 0:
        return
    if not may_read(call.seq_lens):
        if num_pages or new_rows:
            yield _together(call, page_size)
        return
    q_len = call.max_q_len
    starts = [q_len * b for b in range(count + 1)] if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    for b, n in enumerate(call.seq_lens.tolist()):
        if n > 0 and starts[b + 1] > starts[b]:
            batch = _one(call, b, n, starts[b], starts[b + 1], rules, page_size, new_rows)
            _check_pages(batch.table[:, batch.start // page_size :], b, num_pages)
            yield batch


def _one(call: Any, b: int, n: int, t0: int, t1: int, rules: Rules, page_size: int, new_rows: bool) -> Batch:
    """Request b with n keys and query rows [t0, t1)."""
    stop = max(n - (t1 - t0), 0) if new_rows else n
    used, room = -(-stop // page_size), call.page_table.shape[1]
    if used > room:
        what = "before the new tokens (max_pages * S)" if new_rows else "(max_pages * S)"
        raise ValueError(f"seq_lens: want at most {room * page_size} {what}, got {stop} at {b}")
    if not 0 <= t0 < t1 <= call.out.shape[0]:
        raise ValueError(f"cu_seqlens_q: want rows in [0, {call.out.shape[0]}], got [{t0}, {t1}) at {b}")
    if t1 - t0 > call.max_q_len:
        raise ValueError(f"max_q_len: want at least {t1 - t0}, the rows of request {b}, got {call.max_q_len}")
    first = n - (t1 - t0)  # position of the first draft
    start = max(0, first - rules.window + 1) if rules.window else 0
    table = call.page_table[b : b + 1, :used].to(torch.int64)
    lengths = torch.tensor([n, t1 - t0], device=table.device)
    rows = torch.arange(t0, t1, device=table.device)[None]
    return Batch(table, lengths[:1], lengths[1:], rows, start, stop)


def _check_pages(ids: Tensor, b: int, num_pages: int) -> None:
    bad = (ids < 0) | (ids >= num_pages)
    if bad.any():
        raise ValueError(f"page_table: want page ids in [0, {num_pages}), got {int(ids[bad][0])} at request {b}")


def _together(call: Any, page_size: int) -> Batch:
    t, count = call.out.shape[0], call.seq_lens.shape[0]
    device = call.out.device
    seq_lens = call.seq_lens.to(torch.int64)
    if call.cu_seqlens_q is None:
        rows = torch.arange(t, device=device).view(count, -1)
        q_lens = torch.full_like(seq_lens, rows.shape[1])
    else:
        starts = call.cu_seqlens_q.to(torch.int64)
        q_lens = starts.diff()
        draft = torch.arange(call.max_q_len, device=device)
        rows = starts[:-1, None] + draft
        rows = torch.where((draft < q_lens[:, None]) & (rows >= 0) & (rows < t), rows, t)
    table = call.page_table.to(torch.int64)
    return Batch(table, seq_lens, q_lens, rows, 0, table.shape[1] * page_size)


def visible(batch: Batch, begin: int, end: int, rules: Rules) -> Tensor:
    """Which keys of [begin, end) each draft sees: bool [B, Q, C]."""
    b, q = batch.rows.shape
    key = torch.arange(begin, end, device=batch.rows.device)
    draft = torch.arange(q, device=batch.rows.device)[:, None]
    n = batch.seq_lens[:, None, None]
    first = n - batch.q_lens[:, None, None]
    if rules.mask is None:
        seen = key <= first + draft
    else:
        mask = rules.mask.to(torch.int32)[batch.rows.clamp(max=rules.mask.shape[0] - 1)]
        j = key - first
        word = mask.gather(2, (j >> 4).clamp(0, mask.shape[2] - 1).expand(b, q, -1))
        seen = (j < 0) | ((word >> (j & 15)) & 1).to(torch.bool)
    if rules.window:
        seen = seen & (first + draft - key < rules.window)  # a window may be any number: nothing is added to it
    return seen & (key < n)
