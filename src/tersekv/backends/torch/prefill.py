"""Prefill in fp32: decode's attention over the pages, and over the unquantised new rows if the call has them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import decode, rotation
from .attention import Results, State, attend, call_scale, finalize_softmax, rows_by_kv_head
from .decode import KVSource, per_head
from .exact import without_autocast
from .gather import KeySlots, PagedRows
from .requests import Batch, Rules, request_batches

SUPPORTS, why_not, configure = decode.SUPPORTS, decode.why_not, decode.configure


@without_autocast
def run(call: Any, config: None) -> None:
    if call.k is None:
        decode.run(call, None)
        return
    pages, new = KVSource(call), NewRows(call)
    rules = Rules(call.window, None, call.softcap)
    t, q_heads, head_dim_v = call.out.shape
    results = Results(t, q_heads, head_dim_v, call.out.device)
    q_new = call.q.to(torch.float32) * call_scale(call, "softmax_scale")
    q_pages = rotation.query(call) * call_scale(call, "softmax_scale") * per_head(call_scale(call, "k_scale"), q_heads)
    v_factor = call_scale(call, "v_scale")
    for batch in request_batches(call, rules, pages.num_pages, pages.page_size, new_rows=True):
        rows = _drop_unseeing_rows(batch, t)
        state = None
        if pages.num_pages:
            state = attend([rows_by_kv_head(q_pages, rows, pages.heads)], pages, _prefix_batch(rows), rules)
        if state is not None:
            state = _rescale_prefix_state(state, call, v_factor, pages.heads)
        state = attend([rows_by_kv_head(q_new, rows, pages.heads)], new, _new_rows_as_keys(rows, t), rules, state)
        if state is not None:
            results.put(rows, *finalize_softmax(state, call.sinks, pages.heads))
    results.write(call, call_scale(call, "out_scale"))


class NewRows:
    """New rows [T, H, D] as a PagedSource with pages of one token."""

    page_size = 1

    def __init__(self, call: Any) -> None:
        self._k, self._v = (PagedRows(x.unsqueeze(1)) for x in (call.k, call.v))
        self.num_pages, self.heads = call.k.shape[:2]
        self.widest = max(call.q.shape[2], call.out.shape[2])

    def keys(self, at: KeySlots) -> tuple[list[Tensor], Tensor | None]:
        return [self._k.load(at)], None

    def values(self, at: KeySlots) -> tuple[Tensor, Tensor | None]:
        return self._v.load(at), None


def _drop_unseeing_rows(batch: Batch, t: int) -> Batch:
    """Returns the batch without rows before their request's first token, which see no keys."""
    none = (batch.q_lens - batch.seq_lens).clamp(min=0)
    row = torch.arange(batch.rows.shape[1], device=batch.rows.device) + none[:, None]
    rows = torch.where(row < batch.q_lens[:, None], batch.rows[:, :1] + row, t)
    return batch._replace(rows=rows, q_lens=batch.q_lens - none)


def _prefix_batch(batch: Batch) -> Batch:
    """Returns the batch over the keys before the new rows, all of which are visible to every row but for the window."""
    first = batch.seq_lens - batch.q_lens
    return batch._replace(seq_lens=first, q_lens=torch.zeros_like(first))


def _new_rows_as_keys(batch: Batch, t: int) -> Batch:
    """Returns the batch with only the new rows as keys: token i of a request lies in page `rows[i]`."""
    table, stop = batch.rows.clamp(max=t - 1), batch.rows.shape[1]
    return batch._replace(table=table, seq_lens=batch.q_lens, start=0, stop=stop)


def _rescale_prefix_state(state: State, call: Any, factor: float | Tensor, heads: int) -> State:
    """Returns the state with acc in original units: rotation and scales of V undone. factor: [1] or [H]."""
    requests = len(state.acc) // heads
    if isinstance(factor, Tensor) and len(factor) > 1:
        factor = factor.repeat(requests)[:, None, None]
    scale = call.v_channel_scale
    scale = None if scale is None else scale.repeat(requests, 1)[:, None]
    return state._replace(acc=rotation.back(state.acc * factor, call.v_signs, scale))
