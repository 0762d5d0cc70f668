"""Rows of paged tensors, whatever their strides, gathered by token and laid out head by head."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .codes import code_of, to_float

Steps = tuple[int, int, int]


class Places:
    """Where the keys [begin, end) of B requests lie. Pages [B, C], slots [C]."""

    def __init__(self, table: Tensor, page_size: int, begin: int, end: int, seq_lens: Tensor | None) -> None:
        """table: [B, max_pages] int64. With `seq_lens` [B], entries past a request become page 0."""
        token = torch.arange(begin, end, device=table.device)
        column = token // page_size
        self.slots = token - column * page_size
        self.pages = table.index_select(1, column)
        if seq_lens is not None:
            self.pages = torch.where(token < seq_lens[:, None], self.pages, 0)
        self._rows: dict[tuple[Steps, int], Tensor] = {}

    @property
    def shape(self) -> torch.Size:
        """[B, C]"""
        return self.pages.shape

    def rows(self, steps: Steps, heads: int) -> Tensor:
        """Row numbers [B * C * H] of a tensor with these steps."""
        key = steps, heads
        if key not in self._rows:
            row = self.pages * steps[0] + self.slots * steps[1]
            if heads > 1:
                row = row[..., None] + torch.arange(heads, device=row.device) * steps[2]
            self._rows[key] = row.flatten()
        return self._rows[key]


class PagedRows:
    """A paged tensor [P, S, H, W] (or scalars [P, S, H]) seen as rows: page, slot and head have a step each.

    code:  what its elements are; None: numbers of its dtype
    """

    def __init__(self, x: Tensor, code: str | None = None) -> None:
        self.code = code or code_of(x.dtype)
        if x.element_size() == 1:
            x = x.view(torch.uint8)  # some devices index no fp8
        self.heads = x.shape[2]
        unit = math.gcd(*x.stride()[:3]) or 1
        s_page, s_slot, s_head = (stride // unit for stride in x.stride()[:3])
        self.steps: Steps = (s_page, s_slot, s_head)
        rows = 1 + sum((n - 1) * step for n, step in zip(x.shape[:3], self.steps, strict=False)) if x.numel() else 0
        # Rows may overlap where the greatest common stride is shorter than a row; they are only read.
        self.table = x.as_strided((rows, *x.shape[3:]), (unit, *x.stride()[3:]), x.storage_offset())

    def gather(self, places: Places) -> Tensor:
        """[B, H, C, W] (scalars: [B, H, C]) as stored, with other strides: tokens are read one after the other."""
        index = places.rows(self.steps, self.heads)
        out = self.table.index_select(0, index)
        return out.view(*places.shape, self.heads, *self.table.shape[1:]).transpose(1, 2)

    def load(self, places: Places) -> Tensor:
        """Codes [B * H, C, W] (scalars: [B * H, C]) in fp32."""
        return to_float(self.gather(places), self.code).flatten(0, 1)


def load_blocks(codes: PagedRows, scales: PagedRows, places: Places) -> Tensor:
    """Codes times the stored scale of their block, fp32 [B * H, C, D]."""
    x, s = codes.load(places), scales.load(places)
    return (x.unflatten(-1, (s.shape[-1], -1)) * s[..., None]).flatten(-2)
