"""An indexer's scores, top 2048 and both in one, of one new row a request, over index pages; judged in fp64, by a
sort, and by each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...formats import index_bytes_per_token
from ...index_cache import PagedIndexCache
from ...index_layers import PagedIndexLayer
from ...ops.index_select import index_scores, index_select, index_topk
from ..compare import SCORES
from ..memory import take
from . import data
from .cases import INDEX_DIM, TOP, Case

_MOST_COPIES = 32


class _Indexer:
    """Queries of the requests, and pages of their keys."""

    peer_limit = SCORES

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, self.backend, b, n = case, backend, case.requests, case.tokens
        self.lens = data.lengths(case)
        used = (self.lens + case.page - 1) // case.page
        pages = int(used.sum())
        row = index_bytes_per_token(case.format, INDEX_DIM)
        copies = data.rotations(device, pages * case.page * row, _MOST_COPIES)
        layer = PagedIndexCache.allocate(
            1, pages * copies, case.page, head_dim=INDEX_DIM, format=case.format, device=device
        )[0]
        for x in data._parts(layer.k):
            x.copy_((100 * torch.randn(x.shape, device=device)).clamp(-448, 448))
        if layer.scale is not None:
            layer.scale.copy_(2.0 ** torch.randint(-8, -4, layer.scale.shape, device=device))
        self.layer: PagedIndexLayer = layer
        self.tables = data.page_tables(used, copies, device)
        self.q = (100 * torch.randn(b, case.heads, INDEX_DIM, device=device)).clamp(-448, 448).to(layer.k.dtype)
        self.weights = torch.randn(b, case.heads, device=device) / (100 * case.heads)
        self.seq_lens = self.lens.to(device)
        self.tokens = int(self.lens.sum())
        self.flops = 2 * self.tokens * case.heads * INDEX_DIM
        self.read = self.tokens * row + self.q.nbytes + self.weights.nbytes
        self.width = max(n, int(self.lens.max()))

    def wanted(self, b: int) -> Tensor:
        """fp64 scores of a request."""
        n = int(self.lens[b])
        where = data.places(self.tables[0, b], n, self.case.page)
        k = take(self.layer.k, *where).double()
        s = (torch.relu(self.q[b].double() @ k.T) * self.weights[b].double()[:, None]).sum(0)
        return s if self.layer.scale is None else s * take(self.layer.scale, *where).double()


class IndexScores(_Indexer):
    limit = SCORES

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        super().__init__(case, device, backend)
        self.out = torch.empty(case.requests, self.width, device=device)
        self.nbytes = self.read + 4 * self.tokens
        self.calls = [self._call(table) for table in self.tables]

    def _call(self, table: Tensor) -> Any:
        given = self.q, self.weights, self.layer, table, self.seq_lens
        return lambda: index_scores(*given, width=self.width, out=self.out, backend=self.backend)

    def poison(self) -> None:
        data.poison(self.out)

    def error(self, result: Any) -> float:
        """Relative norm of the worst of three requests."""
        some = {0, len(self.lens) // 2, len(self.lens) - 1}
        return max(data.relative(self.out[b, : int(self.lens[b])], self.wanted(b)) for b in some)


class IndexTopk:
    limit = peer_limit = 0.0
    flops = 0

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, shape = case, (case.requests, case.tokens)
        self.nbytes = 4 * case.requests * (case.tokens + TOP)
        copies = data.rotations(device, self.nbytes, _MOST_COPIES)
        self.scores = torch.randn(copies, *shape, device=device)
        self.visible = torch.full((case.requests,), case.tokens, dtype=torch.int32, device=device)
        self.out = torch.empty(case.requests, TOP, dtype=torch.int32, device=device)

        def call(scores: Tensor) -> Any:
            return lambda: index_topk(scores, self.visible, TOP, out=self.out, backend=backend)

        self.calls = [call(scores) for scores in self.scores]

    def poison(self) -> None:
        data.poison(self.out)

    def error(self, result: Any) -> float:
        """Share of entries that differ from a sort's."""
        order = self.scores[0].sort(dim=-1, descending=True, stable=True).indices[:, :TOP].sort(-1).values
        want = torch.full_like(self.out, -1)
        want[:, : order.shape[1]] = order
        return data.differing(self.out, want)


class IndexSelect(_Indexer):
    limit = peer_limit = 0.0

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        super().__init__(case, device, backend)
        self.out = torch.empty(case.requests, TOP, dtype=torch.int32, device=device)
        self.out_lens = torch.empty(case.requests, dtype=torch.int32, device=device)
        self.nbytes = self.read + self.out.nbytes
        self.calls = [self._call(table) for table in self.tables]

    def _call(self, table: Tensor) -> Any:
        given = self.q, self.weights, self.layer, table, self.seq_lens, TOP
        options: dict[str, Any] = {
            "width": self.width,
            "out": self.out,
            "out_lens": self.out_lens,
            "backend": self.backend,
        }
        return lambda: index_select(*given, **options)

    def poison(self) -> None:
        data.poison(self.out)

    def error(self, result: Any) -> float:
        """Share of entries that differ from those of the two operations one after the other."""
        given = self.q, self.weights, self.layer, self.tables[0], self.seq_lens
        scores = index_scores(*given, width=self.width, backend=self.backend)
        return data.differing(self.out, index_topk(scores, self.seq_lens, TOP, backend=self.backend))
