"""Drafts: which see which when they are verified, and the steps in which a draft model makes them."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor


def draft_mask(visible: Tensor, seq_lens: Tensor, drafts: int, full: bool) -> Tensor:
    """Returns [B × drafts, W] uint16, W = 2 × ceil(drafts / 32): bit j of row i: draft i sees draft j.

    visible:   bool, request after request [drafts, drafts], and more behind it; full: [drafts, seq_len + drafts], with
               the earlier tokens. Requests behind its end are padding, and see anything
    seq_lens:  [B]  tokens before the drafts
    """
    if full:
        visible = visible[_own_columns(seq_lens, drafts).clamp(max=len(visible) - 1)]
    else:
        visible = visible[: len(seq_lens) * drafts**2]
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


class DraftSteps:
    """The backends of a draft model's steps: all but the last, whose drafts are verified and never read by itself.

    In step i each of a request's branches brings a row, which sees all tokens before the drafts, and those of its own
    branch.
    """

    needs_cpu_seq_lens = False

    def __init__(self, backend: Any, topk: int, steps: int) -> None:
        self.topk, self.steps = topk, steps
        # They differ in their metadata alone, and look at a layer once together.
        self.attn_backends = [copy(backend) for _ in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """No value of a tensor is read on the host."""
        before = self.attn_backends[0].metadata_of(forward_batch)
        table, lens = before.table, before.seq_lens.repeat_interleave(self.topk)
        if self.topk > 1:
            table = branch_table(table, before.seq_lens, self.topk, self.steps)
        for i, backend in enumerate(self.attn_backends, 1):
            backend.forward_metadata = replace(before, seq_lens=lens + i, table=table)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """A graph makes its tables itself."""

    init_forward_metadata_in_graph = init_forward_metadata

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """None: a graph's tables lie in its own memory."""


def branch_table(table: Tensor, seq_lens: Tensor, topk: int, steps: int) -> Tensor:
    """Returns [B × topk, tokens]: a line for each branch.

    table:     [B, tokens]  pages of one token: of the request's own tokens, then of branch after branch, `steps` each
    seq_lens:  [B]  tokens before the drafts
    """
    own = torch.arange(table.shape[1], device=table.device) < seq_lens[:, None]
    return torch.stack([torch.where(own, table, table.roll(-t * steps, 1)) for t in range(topk)], 1).flatten(0, 1)
