"""Where the tokens of a case lie: requests, their pages, and every index tensor that an operation may get."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from torch import Tensor

from .cases import Case

_HUGE = {torch.int32: 2**31 - 1, torch.int64: 2**63 - 1, torch.uint32: 2**32 - 1}
FAR = 2**62  # among values: what becomes the largest number of their dtype; negative: the smallest
_SPARE_PAGES = 3
_BEYOND_TABLE = 7  # added to the size of cos_sin_cache: a position outside it

Placement = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class Requests:
    """Requests of a case over pages in random order."""

    def __init__(self, case: Case, random: torch.Generator) -> None:
        self.case, self.random = case, random
        self.q_lens = case.q_lens if case.q_lens is not None else (1,) * len(case.lens)
        self.tokens = sum(self.q_lens)
        self.max_q_len = max(self.q_lens, default=0)
        if case.ragged:
            self.max_q_len = min(self.max_q_len + case.slack, max(self.tokens, self.max_q_len))
        self._mixed = Random(case.id) if case.index == "mixed" else None
        used = [-(-n // case.page) for n in case.lens]
        self.num_pages = sum(used) + _SPARE_PAGES
        order = torch.randperm(self.num_pages, generator=random).tolist()
        self.pages = [[order.pop() for _ in range(n)] for n in used]
        self.max_pos = max(case.lens, default=0) + 2

    def index(self, values: Any, *, signed: bool = False) -> Tensor:
        """An index tensor in the case's dtype, or in one that holds a sign too; FAR becomes the largest number."""
        if self._mixed is None:
            dtype = getattr(torch, self.case.index)
            dtype = torch.int32 if signed and dtype == torch.uint32 else dtype
        else:
            dtype = self._mixed.choice([d for d in _HUGE if not signed or d.is_signed])
        values = torch.as_tensor(values, dtype=torch.int64)
        values = torch.where(values == -FAR, torch.iinfo(dtype).min, values)
        return torch.where(values == FAR, _HUGE[dtype], values).to(dtype)

    def seq_lens(self) -> Tensor:
        return self.index(self.case.lens)

    def cu_seqlens(self) -> Tensor:
        return self.index([sum(self.q_lens[:b]) for b in range(len(self.q_lens) + 1)])

    def page_table(self, *, new: bool = True) -> Tensor:
        """[B, max_pages]; entries past a request's pages are huge, those of new tokens alone too unless `new`. If the
        case is strided, a part of a wider table."""
        width = max((len(p) for p in self.pages), default=0) + 2
        wide = width + 3 * self.case.strided
        lens = [n if new else max(n - q, 0) for n, q in zip(self.case.lens, self.q_lens, strict=True)]
        kept = [p[: -(-n // self.case.page)] for p, n in zip(self.pages, lens, strict=True)]
        rows = [p + [FAR] * (wide - len(p)) for p in kept]
        return self.index(rows).reshape(-1, wide)[:, :width]

    def live(self, *, new: bool = True) -> tuple[Tensor, Tensor]:
        """Pages and slots of every token in the cache, without the new ones unless `new`."""
        where = []
        for b, n in enumerate(self.case.lens):
            stop = n if new else n - self.q_lens[b]
            where += [(self.pages[b][j // self.case.page], j % self.case.page) for j in range(stop)]
        pages, slots = torch.tensor(where, dtype=torch.int64).reshape(-1, 2).T
        return pages, slots

    def new_tokens(self) -> list[tuple[int, int]]:
        """(request, position) of every new token."""
        lens = zip(self.case.lens, self.q_lens, strict=True)
        return [(b, n - q + i) for b, (n, q) in enumerate(lens) for i in range(q)]

    def place(self) -> Placement:
        """slot_mapping, or batch_indices, kv_positions, kv_indptr and kv_indices.

        With `skip`, tokens 1 and 7 are skipped, tokens 3 and 6 point outside the cache.
        """
        size, tokens = self.case.page, self.new_tokens()
        outside = self.num_pages * size + 5
        if self.case.place == "slots":
            slots = [self.pages[b][pos // size] * size + pos % size for b, pos in tokens]
            negative = self.case.index != "uint32"
            skipped = (-1, -FAR) if negative else (outside, FAR)
            for i, wrong in ((1, skipped[0]), (3, outside), (6, FAR), (7, skipped[1])):
                if self.case.skip and i < len(slots):
                    slots[i] = wrong
            return self.index(slots, signed=negative), None, None, None, None
        batch, positions = [b for b, _ in tokens], [pos for _, pos in tokens]
        if self.case.skip:
            for values, i, wrong in ((batch, 1, -1), (positions, 3, outside), (positions, 6, FAR), (batch, 7, -FAR)):
                values[i : i + 1] = [wrong] * len(values[i : i + 1])
        indptr = [sum(len(p) for p in self.pages[:b]) for b in range(len(self.pages) + 1)]
        indices = [page for p in self.pages for page in p] + [FAR] * 2
        where = self.index(batch, signed=True), self.index(positions), self.index(indptr), self.index(indices)
        return None, *where

    def positions(self) -> Tensor:
        """RoPE positions; with `skip`, those of tokens 5 and 8 lie outside the table."""
        positions = [pos for _, pos in self.new_tokens()]
        for i, wrong in ((5, self.max_pos + _BEYOND_TABLE), (8, FAR)):
            if self.case.skip and i < len(positions):
                positions[i] = wrong
        return self.index(positions)

    def _angles(self, rotary: int) -> Tensor:
        steps = 10000.0 ** -(torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
        return torch.arange(self.max_pos, dtype=torch.float64)[:, None] * steps

    def cos_sin(self, rotary: int) -> Tensor:
        a = self._angles(rotary)
        return torch.cat([a.cos(), a.sin()], -1).float()

    def freqs_cis(self, rotary: int, dtype: torch.dtype) -> Tensor | None:
        if not rotary:
            return None
        a = self._angles(rotary)
        return torch.stack([a.cos(), a.sin()], -1).flatten(1).to(dtype)

    def mask(self) -> Tensor:
        """[T, W] uint16 words of random trees; every draft sees itself, and bits past the drafts are set."""
        words = 2 * -(-self.max_q_len // 32)
        bits = torch.rand(self.tokens, words * 16, generator=self.random) < 0.5
        row = 0
        for n in self.q_lens:
            for i in range(n):
                bits[row, i:n] = torch.arange(i, n) == i
                bits[row, n:] = True
                row += 1
        weights = 2 ** torch.arange(16)
        mask = (bits.unflatten(-1, (words, 16)) * weights).sum(-1).to(torch.uint16)
        if not self.case.strided:
            return mask
        wide = torch.full((self.tokens, words + 2), 2**16 - 1, dtype=torch.int32).to(torch.uint16)
        wide[:, :words] = mask
        return wide[:, :words]
