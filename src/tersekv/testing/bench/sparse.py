"""MLA decode over lists of tokens: few of many cached rows; a few requests judged in fp64 over their lists."""

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


class Sparse(Paged):
    """One query token of each request, over `listed` positions in random order; the lists rotate as the caches do."""

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        row, b = latent_bytes_per_token(case.format, RANK, ROPE), case.requests
        listed = min(case.listed, case.tokens)
        super().__init__(case, device, row, read=b * listed * row)
        self.format, self.scale = latent_format(case.format), (HEAD_DIM + ROPE) ** -0.5
        self.layer = layer = PagedLatentCache.allocate(
            1, self.num_pages, case.page, format=case.format, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, device=device
        )[0]
        data.fill(layer.ckv, layer.ckv_scale_cache, self.format)
        layer.kpe.copy_(torch.randn(layer.kpe.shape, device=device))
        self.q = torch.randn(b, case.heads, RANK + ROPE, device=device).bfloat16()
        self.out = torch.empty(b, case.heads, RANK, dtype=torch.bfloat16, device=device)
        self.lists = torch.rand(b, case.tokens, device=device).argsort(-1)[:, :listed].to(torch.int32)
        self.nbytes = b * listed * (row + self.lists.itemsize)
        self.flops = 2 * b * listed * case.heads * (2 * RANK + ROPE)

        def call(table: Tensor) -> Any:
            return lambda: mla_decode(
                self.q, layer, table, self.lens, indices=self.lists, softmax_scale=self.scale, out=self.out,
                batch_invariant=case.batch_invariant, backend=backend,
            )  # fmt: skip

        self.calls = [call(table) for table in self.tables]

    def expected(self, b: int) -> Tensor:
        pages, slots = self.where(b)
        listed = self.lists[b].long()
        where = pages[listed], slots[listed]
        ckv = data.values(self.layer.ckv, self.layer.ckv_scale_cache, self.format, where)
        kpe = data.take(self.layer.kpe, *where).float().double()
        return data.attend(self.q[b], torch.cat([ckv, kpe], -1)[:, None], ckv[:, None], self.scale)
