"""Rows of paged tensors, whatever their strides, gathered by token and laid out head by head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .codes import code_of, to_float


class Places(NamedTuple):
    """Where keys of requests lie."""

    pages: Tensor  # [B, C]
    slots: Tensor  # [C]


def places(table: Tensor, page_size: int, begin: int, end: int, seq_lens: Tensor | None) -> Places:
    """Of the keys [begin, end) of B requests. table: [B, max_pages] int64. With `seq_lens` [B], entries past a request
    become page 0."""
    token = torch.arange(begin, end, device=table.device)
    pages = table[:, token // page_size]
    if seq_lens is not None:
        pages = torch.where(token < seq_lens[:, None], pages, 0)
    return Places(pages, token % page_size)


class PagedRows:
    """A paged tensor [P, S, H, W] (or scalars [P, S, H]).

    code:  what its elements are; None: numbers of its dtype
    """

    def __init__(self, x: Tensor, code: str | None = None) -> None:
        self.code = code or code_of(x.dtype)
        self._x = x.view(torch.uint8) if x.element_size() == 1 else x  # some devices index no fp8

    def load(self, at: Places) -> Tensor:
        """Codes [B * H, C, W] (scalars: [B * H, C]) in fp32."""
        return to_float(self._x[at.pages, at.slots].transpose(1, 2), self.code).flatten(0, 1)


def load_blocks(codes: PagedRows, scales: PagedRows, at: Places) -> Tensor:
    """Codes times the stored scale of their block, fp32 [B * H, C, D]."""
    x, s = codes.load(at), scales.load(at)
    return (x.unflatten(-1, (s.shape[-1], -1)) * s[..., None]).flatten(-2)
