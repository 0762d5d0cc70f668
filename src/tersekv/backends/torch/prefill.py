"""Prefill in fp32: decode's attention to the pages, and to the new rows as they are where those are given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import decode, rotation
from .attention import Results, State, attend, by_head, finish, scale_of
from .decode import KVSource, per_head
from .exact import exact
from .gather import PagedRows, Places
from .requests import Batch, Rules, batches

TAKES, why_not, configure = decode.TAKES, decode.why_not, decode.configure


@exact
def run(call: Any, config: None) -> None:
    if call.k is None:
        decode.run(call, None)
        return
    pages, new = KVSource(call), NewRows(call)
    rules = Rules(call.window, None, call.softcap)
    t, q_heads, head_dim_v = call.out.shape
    results = Results(t, q_heads, head_dim_v, call.out.device)
    q_new = call.q.to(torch.float32) * scale_of(call, "softmax_scale")
    q_pages = rotation.query(call) * scale_of(call, "softmax_scale") * per_head(scale_of(call, "k_scale"), q_heads)
    v_factor = scale_of(call, "v_scale")
    for batch in batches(call, rules, pages.num_pages, pages.page_size, new_rows=True):
        rows = _seeing(batch, t)
        state = None
        if pages.num_pages:
            state = attend([by_head(q_pages, rows, pages.heads)], pages, _before(rows), rules)
        if state is not None:
            state = _as_new_rows(state, call, v_factor, pages.heads)
        state = attend([by_head(q_new, rows, pages.heads)], new, _among(rows, t), rules, state)
        if state is not None:
            results.put(rows, *finish(state, call.sinks, pages.heads))
    results.write(call, scale_of(call, "out_scale"))


class NewRows:
    """Rows [T, H, D] as a cache with pages of one token."""

    page_size = 1

    def __init__(self, call: Any) -> None:
        self._k, self._v = (PagedRows(x.unsqueeze(1)) for x in (call.k, call.v))
        self.num_pages, self.heads = call.k.shape[:2]
        self.widest = max(call.q.shape[2], call.out.shape[2])

    def keys(self, at: Places) -> tuple[list[Tensor], Tensor | None]:
        return [self._k.load(at)], None

    def values(self, at: Places) -> tuple[Tensor, Tensor | None]:
        return self._v.load(at), None


def _seeing(batch: Batch, t: int) -> Batch:
    """Without the rows of each request that come before its first token: they see nothing."""
    none = (batch.q_lens - batch.seq_lens).clamp(min=0)
    row = torch.arange(batch.rows.shape[1], device=batch.rows.device) + none[:, None]
    rows = torch.where(row < batch.q_lens[:, None], batch.rows[:, :1] + row, t)
    return batch._replace(rows=rows, q_lens=batch.q_lens - none)


def _before(batch: Batch) -> Batch:
    """The keys before the new rows; those are no drafts then, and see what they see by their place after all keys."""
    first = batch.seq_lens - batch.q_lens
    return batch._replace(seq_lens=first, q_lens=torch.zeros_like(first))


def _among(batch: Batch, t: int) -> Batch:
    """The new rows as the keys of requests that have no others: token i of one lies in page `rows[i]`."""
    table, stop = batch.rows.clamp(max=t - 1), batch.rows.shape[1]
    return batch._replace(table=table, seq_lens=batch.q_lens, start=0, stop=stop)


def _as_new_rows(state: State, call: Any, factor: float | Tensor, heads: int) -> State:
    """Sums of cached values as those of the rows that were cached. factor: [1], or [H] of each head."""
    requests = len(state.acc) // heads
    if isinstance(factor, Tensor) and len(factor) > 1:
        factor = factor.repeat(requests)[:, None, None]
    scale = call.v_channel_scale
    scale = None if scale is None else scale.repeat(requests, 1)[:, None]
    return state._replace(acc=rotation.back(state.acc * factor, call.v_signs, scale))
