"""Gathers rows of paged tensors of any strides by token, into a layout by head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .codes import code_of, to_float


class KeySlots(NamedTuple):
    """Pages and slots of keys of B requests."""

    pages: Tensor  # [B, C]
    slots: Tensor  # [C]


def key_pages_and_slots(page_table: Tensor, page_size: int, begin: int, end: int, seq_lens: Tensor | None) -> KeySlots:
    """Returns pages and slots of the keys [begin, end) of B requests. With `seq_lens` [B], keys past a request's end
    get page 0. page_table: [B, max_pages] int64."""
    token = torch.arange(begin, end, device=page_table.device)
    pages = page_table[:, token // page_size]
    if seq_lens is not None:
        pages = torch.where(token < seq_lens[:, None], pages, 0)
    return KeySlots(pages, token % page_size)


class PagedRows:
    """A paged tensor [P, S, H, W] (or scalars [P, S, H]).

    code:  encoding of its elements; None: numbers of its dtype
    """

    def __init__(self, x: Tensor, code: str | None = None) -> None:
        self.code = code or code_of(x.dtype)
        self._x = x.view(torch.uint8) if x.element_size() == 1 else x  # some devices cannot index fp8

    def load(self, at: KeySlots) -> Tensor:
        """Returns values [B * H, C, W] (scalars: [B * H, C]) in fp32."""
        return to_float(self._x[at.pages, at.slots].transpose(1, 2), self.code).flatten(0, 1)


def dequant_blocks(codes: PagedRows, scales: PagedRows, at: KeySlots) -> Tensor:
    """Returns codes times the stored scales of their blocks, fp32 [B * H, C, D]."""
    x, s = codes.load(at), scales.load(at)
    return (x.unflatten(-1, (s.shape[-1], -1)) * s[..., None]).flatten(-2)
