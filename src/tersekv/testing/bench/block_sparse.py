"""Decode and prefill over lists of blocks of a K/V cache; some rows judged in fp64 over their lists."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cache import PagedKVCache
from ...formats import kv_bytes_per_token, kv_format
from ...ops.decode import decode
from ...ops.prefill import prefill
from . import data
from .cases import HEAD_DIM, KV_HEADS, ONE_LIST, Case
from .sparse import Listed


class BlockSparse(Listed):
    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        lists_a_row = 1 if case.lists == ONE_LIST else KV_HEADS
        super().__init__(case, device, kv_bytes_per_token(case.format, KV_HEADS, HEAD_DIM), lists_a_row)
        self.format, self.scale = kv_format(case.format), HEAD_DIM**-0.5
        self.layer = layer = PagedKVCache.allocate(
            1, self.num_pages, case.page, KV_HEADS, HEAD_DIM, format=case.format, device=device
        )[0]
        data.fill(layer.k, layer.k_scale_cache, self.format)
        data.fill(layer.v, layer.v_scale_cache, self.format)
        rows = len(self.lists.indices)
        self.q = torch.randn(rows, case.heads, HEAD_DIM, device=device).bfloat16()
        self.out = torch.empty_like(self.q)
        self.nbytes += 0 if case.requests else self.q.nbytes + self.out.nbytes
        self.flops = 4 * self.lists.reads * (case.heads // lists_a_row) * HEAD_DIM
        options: dict[str, Any] = {
            "indices": self.lists.indices, "block_size": case.block, "out": self.out, "backend": backend,
        }  # fmt: skip
        starts = torch.tensor([0, rows], dtype=torch.int32, device=device)

        def call(table: Tensor) -> Any:
            if case.requests:
                return lambda: decode(self.q, layer, table, self.lens, **options)
            return lambda: prefill(self.q, layer, table, self.lens, starts, max_q_len=rows, **options)

        self.calls = [call(table) for table in self.tables]

    def expected(self, t: int) -> Tensor:
        heads = self.q[t].unflatten(0, (KV_HEADS, -1))
        return torch.cat([self._of_head(q, t, head) for head, q in enumerate(heads)])

    def _of_head(self, q: Tensor, t: int, head: int) -> Tensor:
        where, a = self.slots(t, min(head, self.lists.indices.shape[1] - 1)), self.layer
        k = data.values(a.k, a.k_scale_cache, self.format, where)[:, head : head + 1]
        v = data.values(a.v, a.v_scale_cache, self.format, where)[:, head : head + 1]
        return data.attend(q, k, v, self.scale)
