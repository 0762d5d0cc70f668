"""index_scores: what an indexer makes of the cached keys that each row sees."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tersekv.formats import INDEX_BLOCK

from .codes import may_read
from .exact import without_grad_and_autocast


class Rows(NamedTuple):
    """Rows of one request."""

    request: Tensor  # [1] int64
    rows: slice
    visible: Tensor  # [n] int64: keys that each row sees


def why_not(f: SimpleNamespace) -> str | None:
    return None


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    for group in iterate_rows_by_request_on_cpu_else_singly(call):
        call.out[group.rows] = compute_max_scores_of_key_blocks(call, group, call.out.shape[-1])


def request_and_position_of_rows(call: Any) -> tuple[Tensor, Tensor]:
    """Returns request [T] and position [T] of each row, int64; position −1 of a row without one."""
    t, b = call.q.shape[0], call.seq_lens.shape[0]
    row = torch.arange(t, device=call.q.device)
    seq_lens = call.seq_lens.to(torch.int64)
    if b == 0:
        return torch.zeros_like(row), torch.full_like(row, -1)
    if call.cu_seqlens_q is None:
        starts = torch.arange(b + 1, device=row.device) * call.max_q_len
    else:
        starts = call.cu_seqlens_q.to(torch.int64)
    request = torch.searchsorted(starts[1:].contiguous(), row, right=True)
    owned = (request < b) & (row >= starts[0])
    request = request.clamp(max=b - 1)
    position = seq_lens[request] - (starts[request + 1] - row)
    return request, torch.where(owned, position.clamp(min=-1), -1)


def iterate_rows_by_request_on_cpu_else_singly(call: Any) -> Iterator[Rows]:
    """Yields all rows: on a CPU request by request, checked; elsewhere one by one, so that the host reads no value."""
    request, position = request_and_position_of_rows(call)
    visible = (position + 1) // call.ratio
    ends = getattr(call, "ends", None)
    if ends is not None:
        visible = ends.to(torch.int64).clamp(min=0)
    if not may_read(call.seq_lens):
        for t in range(len(request)):
            yield Rows(request[t : t + 1], slice(t, t + 1), visible[t : t + 1])
        return
    _check_lengths_rows_and_pages(call)
    start, ids = 0, request.tolist()
    for t in range(1, len(ids) + 1):
        if t == len(ids) or ids[t] != ids[start]:
            yield Rows(request[start : start + 1], slice(start, t), visible[start:t])
            start = t


def _check_lengths_rows_and_pages(call: Any) -> None:
    """Raise ValueError for lengths, rows or pages outside table, q or cache."""
    rows, (pages, size), room = call.q.shape[0], call.k_cache.shape[:2], call.page_table.shape[1]
    n = call.max_q_len
    starts = [n * b for b in range(len(call.seq_lens) + 1)] if call.cu_seqlens_q is None else call.cu_seqlens_q.tolist()
    ends = getattr(call, "ends", None)
    for b, tokens in enumerate(call.seq_lens.tolist()):
        keys = tokens // call.ratio if ends is None else int(ends[starts[b] : starts[b + 1]].to(torch.int64).amax())
        if keys <= 0 or starts[b + 1] <= starts[b]:
            continue
        if keys > room * size:
            name = "seq_lens" if ends is None else "ends"
            raise ValueError(f"{name}: want at most {room * size} keys (max_pages * S), got {keys} at {b}")
        if not 0 <= starts[b] < starts[b + 1] <= rows:
            raise ValueError(f"cu_seqlens_q: want rows in [0, {rows}], got [{starts[b]}, {starts[b + 1]}) at {b}")
        if starts[b + 1] - starts[b] > n:
            raise ValueError(f"max_q_len: want at least {starts[b + 1] - starts[b]}, the rows of request {b}, got {n}")
        ids = call.page_table[b, : -(-keys // size)].to(torch.int64)
        bad = (ids < 0) | (ids >= pages)
        if bad.any():
            raise ValueError(f"page_table: want page ids in [0, {pages}), got {int(ids[bad][0])} at request {b}")


def compute_max_scores_of_key_blocks(call: Any, request_rows: Rows, num_key_blocks: int) -> Tensor:
    """Returns the largest score of each block of keys for these rows, fp32 [n, W]; each head's [n, Hi, W]."""
    num_pages, size = call.k_cache.shape[:2]
    q = call.q[request_rows.rows].float()
    room = min(num_key_blocks * call.block, call.page_table.shape[1] * size) if num_pages else 0
    visible = request_rows.visible.clamp(max=room)
    if may_read(visible):  # no key is read that no row sees
        room = int(visible.amax())
    shape = (*q.shape[:2], num_key_blocks) if call.each else (q.shape[0], num_key_blocks)
    if room == 0:
        return q.new_full(shape, -torch.inf)
    key = torch.arange(room, device=q.device)
    table = call.page_table[request_rows.request, : -(-room // size)].to(torch.int64)[0]
    page = table[key // size].clamp(0, num_pages - 1)
    s = _qk_unscaled_if_one_scale_per_key(call, q, page, key % size)  # [n, Hi, keys]
    if call.relu:
        s = torch.relu(s)
    if call.weights is not None:
        s = s * call.weights[request_rows.rows][..., None]
    s = s if call.each else s.sum(1)
    if call.k_scale_cache is not None and call.k_scale_cache.dim() == 2:
        s = s * call.k_scale_cache[page, key % size]
    s = s * s.new_full((), call.scale)
    seen = key < visible[:, None]
    if getattr(call, "starts", None) is not None:
        seen = seen & (key >= call.starts[request_rows.rows].to(torch.int64)[:, None])
    return _max_of_key_blocks_ignoring_nan(s, seen[:, None] if call.each else seen, call.block, num_key_blocks)


def _qk_unscaled_if_one_scale_per_key(call: Any, q: Tensor, page: Tensor, slot: Tensor) -> Tensor:
    """Returns q · k [n, Hi, keys], times the scales of k if it has one for each block of columns."""
    codes = call.k_cache.view(torch.uint8) if call.k_cache.element_size() == 1 else call.k_cache
    k = codes[page, slot].view(call.k_cache.dtype).float()
    if call.k_scale_cache is None or call.k_scale_cache.dim() == 2:
        return q @ k.T
    scales = call.k_scale_cache[page, slot]
    blocks = zip(q.split(INDEX_BLOCK, -1), k.split(INDEX_BLOCK, -1), scales.unbind(-1), strict=True)
    return sum(((a @ b.T) * scale for a, b, scale in blocks), q.new_zeros(()))


def _max_of_key_blocks_ignoring_nan(scores: Tensor, visible: Tensor, block_size: int, num_blocks: int) -> Tensor:
    """Returns columns [..., W] of scores [..., keys]: the largest of each block of visible keys, numbers before NaN."""
    more = -scores.shape[-1] % block_size
    scores = torch.nn.functional.pad(scores, (0, more)).unflatten(-1, (-1, block_size))
    visible = torch.nn.functional.pad(visible, (0, more)).unflatten(-1, (-1, block_size)).expand_as(scores)
    number = visible & ~scores.isnan()
    best = torch.where(number, scores, -torch.inf).amax(-1)
    best = torch.where(visible.any(-1) & ~number.any(-1), torch.nan, best)[..., :num_blocks]
    return torch.nn.functional.pad(best, (0, num_blocks - best.shape[-1]), value=-torch.inf)
