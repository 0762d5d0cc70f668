"""Attention over paged keys in fp32: online softmax over chunks of keys. Shared by decode and MLA decode.

Rows are B * H groups of M = drafts × query heads of a KV head, so that all of a group read a chunk's keys once.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from tersekv.formats import FP8

from .codes import may_read
from .gather import KeySlots, key_pages_and_slots
from .requests import Batch, MaskAndSoftcap, visible_keys_mask

_ELEMENTS = 1 << 22  # most elements of a chunk's keys in fp32
_MIN_CHUNK = 64


class PagedSource(Protocol):
    """A paged cache."""

    num_pages: int
    page_size: int
    heads: int
    widest: int  # columns of the longest row of keys or values

    def load_k_parts_and_unapplied_scale_or_none(self, at: KeySlots) -> tuple[list[Tensor], Tensor | None]:
        """Returns parts [B * H, C, D_i] of the keys, and a scale per key [B * H, C] for its scores."""

    def load_v_and_scale(self, at: KeySlots, k_parts: list[Tensor]) -> tuple[Tensor, Tensor | None]:
        """Returns values [B * H, C, Dv] and a scale per value [B * H, C]. k_parts: of these keys; MLA's are values."""


class SoftmaxState(NamedTuple):
    """Online softmax state of rows [B * H, M]: row_max and row_sum [..., 1], acc_o [..., Dv]."""

    top: Tensor
    total: Tensor
    acc: Tensor


class Results:
    """Outputs, LSEs and largest scores of all query rows in fp32: 0 and −inf until written. Row T receives padding
    rows."""

    def __init__(self, rows: int, heads: int, head_dim_v: int, device: torch.device) -> None:
        self.out = torch.zeros(rows + 1, heads, head_dim_v, dtype=torch.float32, device=device)
        self.lse = torch.full((rows + 1, heads), -torch.inf, dtype=torch.float32, device=device)
        self.max_logits = self.lse.clone()

    def copy_rows_from_batch(self, batch: Batch, batch_out: Tensor, batch_lse: Tensor) -> None:
        """Copies batch_out [B * H, Q * G, Dv] and batch_lse [B * H, Q * G] into the rows of a batch."""
        b, q = batch.rows.shape
        t = batch.rows.flatten()
        self.out.index_copy_(0, t, _regroup_kv_head_rows_by_token(batch_out, b, q))
        self.lse.index_copy_(0, t, _regroup_kv_head_rows_by_token(batch_lse[..., None], b, q)[..., 0])

    def store_outputs_lses_and_max_logits(self, call: Any, out_multiplier: float | Tensor) -> None:
        """Store outputs × out_multiplier in call.out's dtype (fp8 saturates, NaN stays NaN), LSEs and max_logits."""
        x = self.out[:-1] * out_multiplier
        if call.out.dtype in FP8:
            largest = torch.finfo(call.out.dtype).max
            x = x.clamp_(-largest, largest)
        call.out.copy_(x)
        if call.lse is not None:
            call.lse.copy_(self.lse[:-1])
        if getattr(call, "max_logits", None) is not None:
            call.max_logits.copy_(self.max_logits[:-1])


def call_scale(call: Any, name: str) -> float | Tensor:
    """Returns a scale of a call: its tensor if there is one, else its number."""
    tensor = getattr(call, f"{name}_t")
    return getattr(call, name) if tensor is None else tensor


def rows_by_kv_head(x: Tensor, batch: Batch, heads: int) -> Tensor:
    """Returns rows [T, H * G, D] of a batch as [B * H, Q * G, D]."""
    b, q = batch.rows.shape
    x = x[batch.rows.clamp(max=x.shape[0] - 1)]
    return x.view(b, q, heads, -1, x.shape[-1]).transpose(1, 2).reshape(b * heads, -1, x.shape[-1])


def _regroup_kv_head_rows_by_token(x: Tensor, num_requests: int, seqlen_q: int) -> Tensor:
    """Returns [B * H, Q * G, D] as [B * Q, H * G, D]."""
    d = x.shape[-1]
    x = x.view(num_requests, -1, seqlen_q, x.shape[1] // seqlen_q, d)
    return x.transpose(1, 2).reshape(num_requests * seqlen_q, -1, d)


def attend_to_batch_keys(
    q_scaled: list[Tensor],
    source: PagedSource,
    batch: Batch,
    mask_and_softcap: MaskAndSoftcap,
    softmax_state: SoftmaxState | None = None,
) -> SoftmaxState | None:
    """Returns the softmax state after the batch's keys; None: there are no keys at all.

    q_scaled:      parts [B * H, M, D_i]; scores are the sum of their products with the source's key parts
    softmax_state:  of keys that the rows attended to before
    """
    groups, m, _ = q_scaled[0].shape
    chunk = max(_MIN_CHUNK, _ELEMENTS // (groups * max(source.widest, m)))
    for begin in range(batch.start, batch.stop, chunk):
        end = min(begin + chunk, batch.stop)
        at = key_pages_and_slots(
            batch.table, source.page_size, begin, end, None if may_read(q_scaled[0]) else batch.seq_lens
        )
        softmax_state = _online_softmax_step(
            q_scaled,
            source,
            at,
            visible_keys_mask(batch, begin, end, mask_and_softcap),
            mask_and_softcap.softcap,
            softmax_state,
        )
    return softmax_state


def _online_softmax_step(
    q_scaled: list[Tensor],
    source: PagedSource,
    at: KeySlots,
    visible: Tensor,
    softcap: float,
    softmax_state: SoftmaxState | None,
) -> SoftmaxState:
    # QK
    keys, factor = source.load_k_parts_and_unapplied_scale_or_none(at)
    s = torch.bmm(q_scaled[0], keys[0].transpose(1, 2))
    for q_part, k_part in zip(q_scaled[1:], keys[1:], strict=True):
        s.baddbmm_(q_part, k_part.transpose(1, 2))
    if factor is not None:
        s.mul_(factor[:, None])
    if softcap:
        s.div_(softcap).tanh_().mul_(softcap)
    _mask_scores_in_place(s, visible, source.heads, -torch.inf)

    # Online softmax
    top = s.amax(-1, keepdim=True)
    if softmax_state is not None:
        top = torch.maximum(softmax_state.top, top)
    base = top.masked_fill(top == -torch.inf, 0.0)  # all masked: exp(−inf − 0) is 0, exp(−inf + inf) is NaN
    p = s.sub_(base).exp_()
    total = p.sum(-1, keepdim=True)
    # PV
    values, factor = source.load_v_and_scale(at, keys)
    if factor is not None:
        p.mul_(factor[:, None])
        _mask_scores_in_place(p, visible, source.heads, 0.0)  # the scale of a masked value may be NaN
    acc = _multiply_pv_without_masked_values(p, values, visible, source.heads)
    if softmax_state is None:
        return SoftmaxState(top, total, acc)
    # Rescale of the older state
    old = (softmax_state.top - base).exp_()
    return SoftmaxState(top, total.addcmul_(softmax_state.total, old), acc.addcmul_(softmax_state.acc, old))


def _mask_scores_in_place(x: Tensor, visible: Tensor, num_kv_heads: int, fill_value: float) -> None:
    """Fill entries of x [B * H, Q * G, C] where `visible` [B, Q, C] is False."""
    b, q, c = visible.shape
    x.view(b, num_kv_heads, q, -1, c).masked_fill_(~visible[:, None, :, None], fill_value)


def _multiply_pv_without_masked_values(p: Tensor, values: Tensor, visible: Tensor, num_kv_heads: int) -> Tensor:
    """Returns p [B * H, Q * G, C] × values [B * H, C, Dv]; masked values count as 0, even if NaN."""
    if may_read(values) and values.sum().isfinite():
        return torch.bmm(p, values)
    b, drafts, c = visible.shape
    p, values = p.view(b, num_kv_heads, drafts, -1, c), values.view(b, num_kv_heads, c, -1)
    rows = [p[:, :, i] @ values.masked_fill(~visible[:, None, i, :, None], 0.0) for i in range(drafts)]
    return torch.stack(rows, 2).flatten(0, 1).flatten(1, 2)


def finalize_to_out_and_lse(
    softmax_state: SoftmaxState, sinks: Tensor | None, num_kv_heads: int, lse_of_keys: bool = False
) -> tuple[Tensor, Tensor]:
    """Returns the output [B * H, M, Dv] and LSE [B * H, M]. A sink [H * G] is one more score, with a zero value;
    `lse_of_keys` leaves it out of the LSE."""
    top, total, acc = softmax_state
    has_keys = total != 0  # a NaN row_sum counts as visible keys
    lse_state = top, total
    if sinks is not None:
        groups, m, _ = top.shape
        sink = sinks.view(1, num_kv_heads, 1, -1).expand(
            groups // num_kv_heads, num_kv_heads, m // (len(sinks) // num_kv_heads), -1
        )
        sink = sink.reshape(groups, m, 1)
        base = top.masked_fill(~has_keys, 0.0)
        top = torch.maximum(base, sink)
        old = (base - top).exp()
        own = torch.where(sink == top, 1.0, (sink - top).exp())  # +inf takes all, and −inf + inf is NaN
        total, acc = total * old + own, acc * old
    if not lse_of_keys:
        lse_state = top, total
    out = torch.where(has_keys, acc / total, 0.0)
    return out, torch.where(has_keys, lse_state[0] + lse_state[1].log(), -torch.inf)[..., 0]
