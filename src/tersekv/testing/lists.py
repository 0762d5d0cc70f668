"""Lists of keys of a case (`indices`), and which keys they name.

Row by row they are of another kind: ascending; in any order, with padding between; padded on the left; empty. Positions
up to the request's end stand in them, so that rows of drafts name some that they do not see.
"""

from __future__ import annotations

import zlib
from random import Random

import torch
from torch import Tensor

from .cases import Case
from .requests import FAR, Requests

_KINDS = ("ascending", "mixed", "mixed", "left", "any", "empty")


class Lists:
    """Of a case over its requests. lists: of each row its lists (one, or one a KV head), as entries.

    causal: a row sees positions up to its own; else all
    """

    def __init__(self, case: Case, requests: Requests, heads: int = 1, causal: bool = True) -> None:
        self.case, self.requests, self.heads, self.causal = case, requests, heads, causal
        self._dice = Random(zlib.crc32(case.id.encode()))
        self._tokens = requests.new_tokens()
        if case.lists == "shared" and self._tokens:
            last = max(range(len(self._tokens)), key=lambda t: self._tokens[t][1])
            self.lists = [self._row(last)] * len(self._tokens)
        else:
            self.lists = [self._row(t) for t in range(len(self._tokens))]

    def _row(self, t: int) -> list[list[int]]:
        return [self._list(t) for _ in range(self.heads)]

    def _list(self, t: int) -> list[int]:
        c, dice, (b, position) = self.case, self._dice, self._tokens[t]
        n = c.listed
        kind = dice.choice(_KINDS) if len(self._tokens) > 1 else "mixed"
        length = dice.randint(0, n) if c.list_lens else n
        seen = position + 1 if c.by_slot and self.causal else c.lens[b]
        blocks = range(-(-max(seen, 0) // c.block_size)) if kind != "empty" else range(0)
        most = min(length, len(blocks))
        chosen = dice.sample(blocks, most if kind == "any" else dice.randint(min(1, most), most))
        if c.lists == "again" and chosen:
            chosen = [dice.choice(chosen) for _ in range(length)]
        if c.by_slot:
            chosen = [self.slot(b, x) for x in chosen]
        padding = [-1] * (length - len(chosen))
        if kind == "ascending":
            entries = sorted(chosen) + padding
        elif kind == "left":
            entries = padding + sorted(chosen)
        else:
            entries = chosen + padding
            dice.shuffle(entries)
        return entries + [FAR] * (n - length)

    def slot(self, b: int, position: int) -> int:
        page = self.case.page
        return self.requests.pages[b][position // page] * page + position % page

    def indices(self) -> Tensor:
        """[T, Hx, n]."""
        c, count = self.case, len(self._tokens)
        x = self.requests.index(torch.tensor(self.lists, dtype=torch.int64).reshape(count, self.heads, c.listed))
        if c.lists == "shared" and count:
            return x[:1].expand(count, *x.shape[1:])
        if not c.strided:
            return x
        wide = torch.full((*x.shape[:-1], 2 * c.listed + 3), 7, dtype=torch.int64).to(x.dtype)
        wide[..., 1 : 1 + 2 * c.listed : 2] = x
        return wide[..., 1 : 1 + 2 * c.listed : 2]

    def index_lens(self) -> Tensor | None:
        """[T] for one list a row, or [T, Hx]."""
        if not self.case.list_lens:
            return None
        lens = [[sum(x != FAR for x in entries) for entries in row] for row in self.lists]
        lens_t = self.requests.index(torch.tensor(lens, dtype=torch.int64).reshape(len(lens), self.heads))
        return lens_t[:, 0] if self.heads == 1 else lens_t

    def live(self) -> tuple[Tensor, Tensor]:
        """Pages and slots of every key that some row sees; no other may be read."""
        c, found = self.case, set()
        for (b, position), row in zip(self._tokens, self.lists, strict=True):
            for entries in row:
                for x in entries:
                    if x in (-1, FAR):
                        continue
                    if c.by_slot:
                        found.add((x // c.page, x % c.page))
                        continue
                    last = position if self.causal else c.lens[b] - 1
                    for j in range(x * c.block_size, min((x + 1) * c.block_size, last + 1)):
                        found.add((self.requests.pages[b][j // c.page], j % c.page))
        pages, slots = torch.tensor(sorted(found), dtype=torch.int64).reshape(-1, 2).T
        return pages, slots
