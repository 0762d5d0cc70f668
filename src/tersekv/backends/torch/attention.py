"""Paged attention in fp32 over the exact codes, and over the unquantized new rows if the call has them.

See `online_softmax` for the softmax and `codes` for the conversions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tersekv.formats import BATCH_INVARIANCE, BLOCK, CHANNELS, LISTS, PAIRS, ROTATION, KVFormat, pair_of

from . import rotation
from .append import why_no_codec_pair
from .exact import without_grad_and_autocast
from .gather import KeySlots, PagedRows, dequant_blocks
from .key_lists import KeySet, attend_to_lists, listed_keys
from .online_softmax import (
    Results,
    SoftmaxState,
    attend_to_batch_keys,
    call_scale,
    finalize_to_out_and_lse,
    rows_by_kv_head,
)
from .quantize import zero_points
from .requests import Batch, MaskAndSoftcap, request_batches_on_cpu_else_one_batch, why_not_batch_invariant

SUPPORTS = (PAIRS, ROTATION, CHANNELS, BATCH_INVARIANCE, LISTS)


def why_not(f: SimpleNamespace) -> str | None:
    return why_no_codec_pair(f) or why_not_batch_invariant(f)


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    if call.k is None:
        _store_out_and_lse_of_paged_keys(call)
    else:
        _store_out_and_lse_of_paged_and_new_keys(call)


def _store_out_and_lse_of_paged_keys(call: Any) -> None:
    source = KVCachesAndScales(call)
    mask_and_softcap = MaskAndSoftcap(call.window, call.mask, call.softcap)
    t, q_heads, head_dim_v = call.out.shape
    results = Results(t, q_heads, head_dim_v, call.out.device)
    q = rotation.multiply_q_by_k_channel_scale_and_rotate(call)
    k_factor = call_scale(call, "softmax_scale") * broadcast_scale_to_q_heads(call_scale(call, "k_scale"), q_heads)
    if call.indices is not None:
        keys = listed_keys(call, source.num_pages, source.page_size)
        attend_to_lists([KeySet([q * k_factor], source, keys)], call.sinks, call.softcap, results)
    else:
        for batch in request_batches_on_cpu_else_one_batch(call, mask_and_softcap, source.num_pages, source.page_size):
            state = attend_to_batch_keys(
                [rows_by_kv_head(q * k_factor, batch, source.heads)], source, batch, mask_and_softcap
            )
            if state is not None:
                results.copy_rows_from_batch(batch, *finalize_to_out_and_lse(state, call.sinks, source.heads))
    results.out = rotation.unrotate_and_multiply_by_v_channel_scale(call, results.out)
    results.store_outputs_lses_and_max_logits(
        call, broadcast_scale_to_q_heads(call_scale(call, "v_scale"), q_heads) * call_scale(call, "out_scale")
    )


def _store_out_and_lse_of_paged_and_new_keys(call: Any) -> None:
    pages, new = KVCachesAndScales(call), NewRowsAsPages(call)
    mask_and_softcap = MaskAndSoftcap(call.window, None, call.softcap)
    t, q_heads, head_dim_v = call.out.shape
    results = Results(t, q_heads, head_dim_v, call.out.device)
    q_new = call.q.to(torch.float32) * call_scale(call, "softmax_scale")
    q_pages = (
        rotation.multiply_q_by_k_channel_scale_and_rotate(call)
        * call_scale(call, "softmax_scale")
        * broadcast_scale_to_q_heads(call_scale(call, "k_scale"), q_heads)
    )
    v_factor = call_scale(call, "v_scale")
    for batch in request_batches_on_cpu_else_one_batch(
        call, mask_and_softcap, pages.num_pages, pages.page_size, new_rows_not_in_pages=True
    ):
        rows = _without_rows_that_see_no_keys(batch, t)
        state = None
        if pages.num_pages:
            state = attend_to_batch_keys(
                [rows_by_kv_head(q_pages, rows, pages.heads)], pages, _prefix_batch(rows), mask_and_softcap
            )
        if state is not None:
            state = _unrotate_and_scale_prefix_acc(state, call, v_factor, pages.heads)
        state = attend_to_batch_keys(
            [rows_by_kv_head(q_new, rows, pages.heads)], new, _new_keys_batch(rows, t), mask_and_softcap, state
        )
        if state is not None:
            results.copy_rows_from_batch(rows, *finalize_to_out_and_lse(state, call.sinks, pages.heads))
    results.store_outputs_lses_and_max_logits(call, call_scale(call, "out_scale"))


class KVCachesAndScales:
    """A paged K/V cache as a PagedSource; the caller applies the per-tensor scales."""

    def __init__(self, call: Any) -> None:
        self._k_format, self._v_format = pair_of(call)
        self._k, self._v = PagedRows(call.k_cache, self._k_format.code), PagedRows(call.v_cache, self._v_format.code)
        self._ks, self._vs = (None if x is None else PagedRows(x) for x in (call.k_scale_cache, call.v_scale_cache))
        self.num_pages, self.page_size, self.heads = call.k_cache.shape[:3]
        self.widest = max(call.q.shape[2], call.out.shape[2])

    def load_k_parts_and_unapplied_scale_or_none(self, at: KeySlots) -> tuple[list[Tensor], Tensor | None]:
        k, k_scale = self._load_rows_and_unapplied_row_scales(self._k_format, self._k, self._ks, at)
        return [k], k_scale

    def load_v_and_scale(self, at: KeySlots, k_parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self._load_rows_and_unapplied_row_scales(self._v_format, self._v, self._vs, at)

    def _load_rows_and_unapplied_row_scales(
        self, f: KVFormat, codes: PagedRows, scales: PagedRows | None, at: KeySlots
    ) -> tuple[Tensor, Tensor | None]:
        if scales is None:
            return codes.load(at), None
        if f.scale == BLOCK:
            return dequant_blocks(codes, scales, at), None
        x, factor = codes.load(at), scales.load(at)
        return x - zero_points(factor)[..., None] if f.code == "int4" else x, factor


def broadcast_scale_to_q_heads(scale: float | Tensor, q_heads: int) -> float | Tensor:
    """Returns a scale [1] or [H] in a shape that broadcasts against rows [T, Hq, D]."""
    if not isinstance(scale, Tensor) or len(scale) == 1:
        return scale
    return scale.repeat_interleave(q_heads // len(scale))[:, None]


class NewRowsAsPages:
    """New rows [T, H, D] as a PagedSource with pages of one token."""

    page_size = 1

    def __init__(self, call: Any) -> None:
        self._k, self._v = (PagedRows(x.unsqueeze(1)) for x in (call.k, call.v))
        self.num_pages, self.heads = call.k.shape[:2]
        self.widest = max(call.q.shape[2], call.out.shape[2])

    def load_k_parts_and_unapplied_scale_or_none(self, at: KeySlots) -> tuple[list[Tensor], Tensor | None]:
        return [self._k.load(at)], None

    def load_v_and_scale(self, at: KeySlots, k_parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        return self._v.load(at), None


def _without_rows_that_see_no_keys(batch: Batch, discarded_out_row: int) -> Batch:
    """Returns the batch without rows before their request's first token, which see no keys."""
    none = (batch.q_lens - batch.seq_lens).clamp(min=0)
    row = torch.arange(batch.rows.shape[1], device=batch.rows.device) + none[:, None]
    rows = torch.where(row < batch.q_lens[:, None], batch.rows[:, :1] + row, discarded_out_row)
    return batch._replace(rows=rows, q_lens=batch.q_lens - none)


def _prefix_batch(batch: Batch) -> Batch:
    """Returns the batch over the keys before the new rows, all of which are visible to every row but for the window."""
    first = batch.seq_lens - batch.q_lens
    return batch._replace(seq_lens=first, q_lens=torch.zeros_like(first))


def _new_keys_batch(batch: Batch, num_tokens: int) -> Batch:
    """Returns the batch with only the new rows as keys: token i of a request lies in page `rows[i]`."""
    table, stop = batch.rows.clamp(max=num_tokens - 1), batch.rows.shape[1]
    return batch._replace(table=table, seq_lens=batch.q_lens, start=0, stop=stop)


def _unrotate_and_scale_prefix_acc(
    softmax_state: SoftmaxState, call: Any, v_scale: float | Tensor, num_kv_heads: int
) -> SoftmaxState:
    """Returns the state with acc in original units: rotation and scales of V undone. v_scale: [1] or [H]."""
    requests = len(softmax_state.acc) // num_kv_heads
    if isinstance(v_scale, Tensor) and len(v_scale) > 1:
        v_scale = v_scale.repeat(requests)[:, None, None]
    scale = call.v_channel_scale
    scale = None if scale is None else scale.repeat(requests, 1)[:, None]
    acc = rotation.unrotate_and_multiply_by_channel_scale(softmax_state.acc * v_scale, call.v_signs, scale)
    return softmax_state._replace(acc=acc)
