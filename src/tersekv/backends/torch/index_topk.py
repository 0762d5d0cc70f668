"""index_topk: columns of the largest scores, in ascending order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .exact import without_grad_and_autocast


def why_not(f: SimpleNamespace) -> str | None:
    return None


def configure(f: SimpleNamespace) -> None:
    return None


@without_grad_and_autocast
def run(call: Any, config: None) -> None:
    scores, width = call.scores, call.scores.shape[-1]
    visible = call.visible.to(torch.int64).clamp(0, width)
    if call.starts is not None and width:
        starts = call.starts.to(torch.int64).clamp(0, width)
        column = starts[:, None] + torch.arange(width, device=scores.device)  # the rest is not visible
        column = column.clamp(max=width - 1).view(-1, *[1] * (scores.dim() - 2), width)
        scores, visible = scores.gather(-1, column.expand_as(scores)), (visible - starts).clamp(min=0)
    group = call.visible.to(torch.int64)
    m_append = None if call.open_group is None else call.open_group & (group >= 0)  # negative: padding
    store_ascending_topk_columns_and_counts(call, scores, visible, group, m_append, call.out, call.out_lens)


def store_ascending_topk_columns_and_counts(
    call: Any, scores: Tensor, num_visible: Tensor, group_to_append: Tensor, m_append: Tensor | None, out: Tensor,
    out_lens: Tensor | None,
) -> None:  # fmt: skip
    """Store the selected columns of scores [T, (Hi,) W] and how many they are.

    num_visible:  [T] columns that each row sees
    group_to_append, m_append:  [T] the id that is appended behind the columns, and where
    """
    if scores.dim() == 3:
        num_visible, group_to_append = num_visible[:, None], group_to_append[:, None]
        m_append = None if m_append is None else m_append[:, None]
    column = torch.arange(scores.shape[-1], device=scores.device)
    last = min(call.keep_last, call.k)
    first = min(call.keep_first, call.k - last)
    may = (column < num_visible[..., None]) & (scores != -torch.inf)
    kept = may & ((column < first) | (column >= (num_visible - last)[..., None]))
    # Stable sorts: by score, then numbers before NaN, then kept ones before others, then what may be taken at all.
    order = torch.where(scores.isnan(), -torch.inf, scores + 0.0).argsort(dim=-1, descending=True, stable=True)
    for first_of_all in (~scores.isnan(), kept, may):
        again = first_of_all.gather(-1, order).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, again)
    count = may.sum(-1).clamp(max=call.k)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    order = torch.where(rank < count[..., None], order, scores.shape[-1])
    taken = order.sort(-1).values[..., : call.k]
    room = out.shape[-1] - taken.shape[-1]
    taken = torch.nn.functional.pad(taken, (0, room), value=scores.shape[-1])
    place = torch.arange(out.shape[-1], device=scores.device)
    taken = torch.where(place < count[..., None], taken, -1)
    if m_append is not None:
        taken = torch.where((place == count[..., None]) & m_append[..., None], group_to_append[..., None], taken)
        count = count + m_append
    out.copy_(taken)
    if out_lens is not None:
        out_lens.copy_(count)
