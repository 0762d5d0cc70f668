"""MLA over lists of tokens: decode, and many new rows of one request; some rows judged in fp64 over their lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cache import PagedLatentCache
from ...formats import latent_bytes_per_token, latent_format
from ...ops.mla import mla_decode
from . import data
from .cases import HEAD_DIM, RANK, ROPE, Case
from .decode import Paged
from .lists import Lists

_JUDGED = 16  # rows


class Listed(Paged):
    """Rows that read lists: the last one of each request, or the new ones of one. The lists stay, the caches rotate."""

    def __init__(self, case: Case, device: torch.device, bytes_per_token: int, heads: int = 1) -> None:
        """heads: K/V heads of which each has lists of its own."""
        super().__init__(case, device, bytes_per_token, case.requests * min(case.listed, case.tokens) * bytes_per_token)
        self.lists = lists = Lists(case, self.lens, heads)
        self.nbytes = lists.keys * bytes_per_token // heads + lists.indices.nbytes

    def samples(self) -> set[int]:
        last = len(self.lists.indices) - 1
        return {last * i // (_JUDGED - 1) for i in range(_JUDGED)}

    def slots(self, t: int, head: int) -> tuple[Tensor, Tensor]:
        """Pages and slots that row t reads for a head, in the first table."""
        pages, slots = self.where(int(self.lists.request[t]))
        listed = self.lists.positions(t, head)
        return pages[listed], slots[listed]


class Sparse(Listed):
    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        super().__init__(case, device, latent_bytes_per_token(case.format, RANK, ROPE))
        self.format, self.scale = latent_format(case.format), (HEAD_DIM + ROPE) ** -0.5
        self.layer = layer = PagedLatentCache.allocate(
            1, self.num_pages, case.page, format=case.format, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, device=device
        )[0]
        data.fill(layer.ckv, layer.ckv_scale_cache, self.format)
        layer.kpe.copy_(torch.randn(layer.kpe.shape, device=device))
        self.indices = self.lists.indices[:, 0]
        rows = len(self.indices)
        self.q = torch.randn(rows, case.heads, RANK + ROPE, device=device).bfloat16()
        self.out = torch.empty(rows, case.heads, RANK, dtype=torch.bfloat16, device=device)
        self.nbytes += 0 if case.requests else self.q.nbytes + self.out.nbytes
        self.flops = 2 * self.lists.reads * case.heads * (2 * RANK + ROPE)

        def call(table: Tensor) -> Any:
            return lambda: mla_decode(
                self.q, layer, table, self.lens, indices=self.indices, softmax_scale=self.scale, out=self.out,
                batch_invariant=case.batch_invariant, backend=backend,
            )  # fmt: skip

        self.calls = [call(table) for table in self.tables]

    def expected(self, t: int) -> Tensor:
        where = self.slots(t, 0)
        ckv = data.values(self.layer.ckv, self.layer.ckv_scale_cache, self.format, where)
        kpe = data.take(self.layer.kpe, *where).float().double()
        return data.attend(self.q[t], torch.cat([ckv, kpe], -1)[:, None], ckv[:, None], self.scale)
