"""Random lists of the keys that rows read, and how many keys these are."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from .cases import ALIKE, ALIKE_LISTS, NEIGHBOURS, Case


class Lists:
    """Of the last row of each request, or of the new rows of the one.

    indices:  [T, heads, n] int32: tokens or blocks that a row sees, the last of them included, in no order; -1 behind
              them where it sees fewer
    reads:    keys of all lists together
    keys:     distinct keys of a request and head, of all together
    """

    def __init__(self, case: Case, lens: Tensor, heads: int = 1) -> None:
        rows, self.block = 1 if case.requests else case.tokens, case.block
        row = torch.arange(len(lens) * rows, device=lens.device)
        self.request = row // rows
        self.visible_lens = lens.long()[self.request] - rows + 1 + row % rows  # tokens that a row may attend to
        blocks = -(-self.visible_lens // case.block)
        alike = ALIKE if case.lists == ALIKE_LISTS else 0.0
        self.indices = _drawn(blocks, heads, min(-(-case.listed // case.block), int(blocks.max())), alike)
        read = (self.visible_lens[:, None, None] - case.block * self.indices).clamp(0, case.block)
        self.reads = int(read.masked_fill_(self.indices < 0, 0).sum())
        self.keys = self._distinct(lens, heads)

    def _distinct(self, lens: Tensor, heads: int) -> int:
        block = torch.arange(-(-int(lens.max()) // self.block), device=lens.device)
        listed = torch.zeros(len(lens), heads, len(block) + 1, dtype=torch.bool, device=lens.device)
        head = torch.arange(heads, device=lens.device)[:, None]
        listed[self.request[:, None, None], head, self.indices.long()] = True  # padding: the last column
        sizes = (lens[:, None] - self.block * block).clamp(0, self.block)
        return int((listed[..., :-1] * sizes[:, None]).sum())

    def positions(self, t: int, head: int) -> Tensor:
        """Tokens that row t reads for a head."""
        entries = self.indices[t, head].long()
        tokens = entries[entries >= 0, None] * self.block + torch.arange(self.block, device=entries.device)
        return tokens[tokens < self.visible_lens[t]]


def _drawn(num_visible_blocks: Tensor, heads: int, n: int, alike: float) -> Tensor:
    """alike: share of its entries that a row has in common with all its neighbours, on the average of these groups."""
    order, lists = torch.arange(int(num_visible_blocks.max()), device=num_visible_blocks.device), []
    for neighbours in num_visible_blocks.split(NEIGHBOURS):
        last = neighbours[:, None, None] - 1
        score = torch.rand(len(neighbours), heads, len(order), device=num_visible_blocks.device)
        score.masked_fill_(order == last, -2).masked_fill_(order > last, 2)
        if alike:
            common = score[:1].topk(int(alike * n + random.random()), largest=False).indices
            score.scatter_(-1, common.expand(len(neighbours), -1, -1), -1).masked_fill_(order > last, 2)
        least, chosen = score.topk(n, largest=False)
        lists.append(chosen.to(torch.int32).masked_fill_(least > 1, -1))
    return torch.cat(lists)
