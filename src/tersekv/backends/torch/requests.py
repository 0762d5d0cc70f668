"""The requests of a call, and the mask of their query rows.

On a CPU requests are processed one by one, with their lengths read on the host, so that only visible keys are loaded.
On other devices all requests form one batch, nothing is read on the host, and keys past a request's end are masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .codes import may_read


class Batch(NamedTuple):
    """Requests that are processed together."""

    table: Tensor  # [B, max_pages] int64
    seq_lens: Tensor  # [B] int64
    q_lens: Tensor  # [B] int64
    rows: Tensor  # [B, Q] int64: query row of each draft; T for padding
    start: int  # keys [start, stop) are loaded
    stop: int


class MaskAndSoftcap(NamedTuple):
    """Window, draft mask and softcap."""

    window: int = 0
    mask: Tensor | None = None  # [T, W]
    softcap: float = 0.0


def why_not_batch_invariant(f: Any) -> str | None:
    """Returns why a batch invariant call cannot run here; None: it can, or the call need not be."""
    if not f.batch_invariant or f.device.type == "cpu":
        return None
    return f"takes the requests of a call together on {f.device.type}, which is no batch invariance"


def request_batches_on_cpu_else_one_batch(
    call: Any, mask_and_softcap: MaskAndSoftcap, num_pages: int, page_size: int, *, new_rows_not_in_pages: bool = False
) -> Iterator[Batch]:
    """Yields the requests of a call, one by one on a CPU (empty ones left out), in one batch elsewhere.

    new_rows_not_in_pages:  the last tokens are not read from pages, since the call has their rows
    """
    t, count = call.out.shape[0], call.seq_lens.shape[0]
    if t == 0 or count == 0 or call.max_q_len == 0:
        return
    if not may_read(call.seq_lens):
        if num_pages or new_rows_not_in_pages:
            yield _all_requests_batch_without_host_reads(call, page_size)
        return
    q_len, one_by_one = call.max_q_len, getattr(call, "prefill_invariant", False)
    starts = [q_len * b for b in range(count + 1)] if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    for b, n in enumerate(call.seq_lens.tolist()):
        if n > 0 and starts[b + 1] > starts[b]:
            batch = _single_request_batch_from_host_lengths(
                call, b, n, starts[b], starts[b + 1], mask_and_softcap, page_size, new_rows_not_in_pages
            )
            _check_page_ids(batch.table[:, batch.start // page_size :], b, num_pages)
            yield from _single_row_batches(batch, mask_and_softcap, page_size) if one_by_one else (batch,)


def _single_request_batch_from_host_lengths(
    call: Any,
    b: int,
    num_keys: int,
    q_begin: int,
    q_end: int,
    mask_and_softcap: MaskAndSoftcap,
    page_size: int,
    new_rows_not_in_pages: bool,
) -> Batch:
    """Returns the batch of request b alone, with query rows [q_begin, q_end). Raises ValueError for bad indices."""
    stop = max(num_keys - (q_end - q_begin), 0) if new_rows_not_in_pages else num_keys
    used, room = -(-stop // page_size), call.page_table.shape[1]
    if used > room:
        what = "before the new tokens (max_pages * S)" if new_rows_not_in_pages else "(max_pages * S)"
        raise ValueError(f"seq_lens: want at most {room * page_size} {what}, got {stop} at {b}")
    if not 0 <= q_begin < q_end <= call.out.shape[0]:
        raise ValueError(f"cu_seqlens_q: want rows in [0, {call.out.shape[0]}], got [{q_begin}, {q_end}) at {b}")
    if q_end - q_begin > call.max_q_len:
        raise ValueError(f"max_q_len: want at least {q_end - q_begin}, the rows of request {b}, got {call.max_q_len}")
    first = num_keys - (q_end - q_begin)  # position of the first draft
    start = max(0, first - mask_and_softcap.window + 1) if mask_and_softcap.window else 0
    table = call.page_table[b : b + 1, :used].to(torch.int64)
    lengths = torch.tensor([num_keys, q_end - q_begin], device=table.device)
    rows = torch.arange(q_begin, q_end, device=table.device)[None]
    return Batch(table, lengths[:1], lengths[1:], rows, start, stop)


def _single_row_batches(batch: Batch, mask_and_softcap: MaskAndSoftcap, page_size: int) -> Iterator[Batch]:
    """Yields each row of a request's batch as the last one of a request: how products round depends on their sizes."""
    first = int(batch.seq_lens) - batch.rows.shape[1]
    for i in range(max(0, -first), batch.rows.shape[1]):
        n = first + i + 1
        start = max(0, n - mask_and_softcap.window) if mask_and_softcap.window else 0
        lengths = torch.tensor([n, 1], device=batch.rows.device)
        yield Batch(batch.table[:, : -(-n // page_size)], lengths[:1], lengths[1:], batch.rows[:, i : i + 1], start, n)


def _check_page_ids(ids: Tensor, b: int, num_pages: int) -> None:
    bad = (ids < 0) | (ids >= num_pages)
    if bad.any():
        raise ValueError(f"page_table: want page ids in [0, {num_pages}), got {int(ids[bad][0])} at request {b}")


def _all_requests_batch_without_host_reads(call: Any, page_size: int) -> Batch:
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


def visible_keys_mask(batch: Batch, begin: int, end: int, mask_and_softcap: MaskAndSoftcap) -> Tensor:
    """Returns which keys of [begin, end) are visible to each draft: bool [B, Q, C]."""
    b, q = batch.rows.shape
    key = torch.arange(begin, end, device=batch.rows.device)
    draft = torch.arange(q, device=batch.rows.device)[:, None]
    n = batch.seq_lens[:, None, None]
    first = n - batch.q_lens[:, None, None]
    if mask_and_softcap.mask is None:
        visible = key <= first + draft
    else:
        mask = mask_and_softcap.mask.to(torch.int32)[batch.rows.clamp(max=mask_and_softcap.mask.shape[0] - 1)]
        j = key - first
        word = mask.gather(2, (j >> 4).clamp(0, mask.shape[2] - 1).expand(b, q, -1))
        visible = (j < 0) | ((word >> (j & 15)) & 1).to(torch.bool)
    if mask_and_softcap.window:
        visible = visible & (
            first + draft - key < mask_and_softcap.window
        )  # no sum with the window: it may be any number
    return visible & (key < n)
