"""Which drafts see which: SGLang's masks of bools, as words of bits for `decode`."""

from __future__ import annotations

import torch
from torch import Tensor


def draft_mask(visible: Tensor, seq_lens: Tensor, drafts: int, full: bool) -> Tensor:
    """Returns [B × drafts, W] uint16, W = 2 × ceil(drafts / 32): bit j of row i: draft i sees draft j.

    visible:   bool, request after request [drafts, drafts]; full: [drafts, seq_len + drafts], with the earlier tokens.
               Requests behind its end are padding, and see anything
    seq_lens:  [B]  tokens before the drafts
    """
    if full:
        visible = visible[_own_columns(seq_lens, drafts).clamp(max=len(visible) - 1)]
    return _words(visible.view(-1, drafts))


def _own_columns(seq_lens: Tensor, drafts: int) -> Tensor:
    """Where the last columns of every request [drafts, seq_len + drafts] are: [B, drafts, drafts]."""
    widths = seq_lens.long() + drafts
    starts = drafts * (widths.cumsum(0) - widths)
    each = torch.arange(drafts, device=seq_lens.device)
    return (starts + widths - drafts)[:, None, None] + each[:, None] * widths[:, None, None] + each


def _words(visible: Tensor) -> Tensor:
    bits = torch.nn.functional.pad(visible.int(), (0, -visible.shape[1] % 32)).unflatten(1, (-1, 16))
    words = (bits << torch.arange(16, dtype=torch.int32, device=visible.device)).sum(-1, dtype=torch.int32)
    return words.to(torch.int16).view(torch.uint16)  # few devices convert to uint16; the low bits are the same
