"""Prefill over a K/V cache: the last rows of requests, ragged and causal; a few judged by dense fp64 attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...cache import PagedKVCache
from ...formats import kv_bytes_per_token, kv_format
from ...ops.prefill import prefill
from ..compare import limit_of
from . import data
from .cases import HEAD_DIM, KV_HEADS, Case
from .decode import PEER_LIMIT


@dataclass(frozen=True, slots=True)
class Prompts:
    """Requests whose last `new` of `total` tokens are new. window: keys that a row sees, its own included; 0: all."""

    name: str
    new: tuple[int, ...]
    total: tuple[int, ...]
    window: int = 0

    @property
    def pairs(self) -> int:
        """Keys that rows see, of all rows together: the causal half, or what the window leaves of it."""
        return sum(self._to(total) - self._to(total - new) for new, total in zip(self.new, self.total, strict=True))

    @property
    def keys(self) -> int:
        """Keys that some row of a request sees, of all requests."""
        if not self.window:
            return sum(self.total)
        return sum(min(total, self.window + new - 1) for new, total in zip(self.new, self.total, strict=True))

    def _to(self, n: int) -> int:
        """Keys that the first n rows of a request see together."""
        w = min(self.window, n) or n
        return w * (w + 1) // 2 + (n - w) * w


class Prefill:
    """prompts: None: the one request of the case. new_rows: the new tokens' own rows come in 16 bits."""

    peer_limit = PEER_LIMIT

    def __init__(
        self, case: Case, device: torch.device, backend: str | None = None, *,
        prompts: Prompts | None = None, new_rows: bool = False,
    ) -> None:  # fmt: skip
        self.case, self.format, self.scale = case, kv_format(case.format), HEAD_DIM**-0.5
        p = self.prompts = prompts or Prompts(case.cell, (case.tokens,), (case.total or case.tokens,))
        self.host_lens = torch.tensor(p.total, dtype=torch.int32)
        used, rows = -(-self.host_lens // case.page), sum(p.new)
        each = kv_bytes_per_token(case.format, KV_HEADS, HEAD_DIM)
        self.tables = data.page_tables(used, data.rotations(device, int(used.sum()) * case.page * each), device)
        self.layer = layer = PagedKVCache.allocate(
            1, len(self.tables) * int(used.sum()), case.page, KV_HEADS, HEAD_DIM, format=case.format, device=device
        )[0]
        data.fill(layer.k, layer.k_scale_cache, self.format)
        data.fill(layer.v, layer.v_scale_cache, self.format)
        self.lens = self.host_lens.to(device)
        self.starts = torch.nn.functional.pad(torch.tensor(p.new).cumsum(0), (1, 0)).tolist()
        self.cu = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self.q = torch.randn(rows, case.heads, HEAD_DIM, device=device).to(kv_format(case.query).storage)
        self.out = torch.empty(self.q.shape, dtype=torch.bfloat16, device=device)
        self.k = self.v = None
        if new_rows:
            self.k, self.v = (torch.randn(rows, KV_HEADS, HEAD_DIM, device=device).bfloat16() for _ in range(2))
        self.nbytes = p.keys * each + self.q.nbytes + self.out.nbytes
        self.flops = 4 * p.pairs * case.heads * HEAD_DIM
        self.limit = limit_of("out", case.precision)

        def call(table: Tensor) -> Any:
            return lambda: prefill(
                self.q, layer, table, self.lens, self.cu, k=self.k, v=self.v, max_q_len=max(p.new),
                window=p.window or None, out=self.out, precision=case.precision, backend=backend,
            )  # fmt: skip

        self.calls = [call(table) for table in self.tables]

    def poison(self) -> None:
        data.poison(self.out)

    def kv(self, b: int) -> tuple[Tensor, Tensor]:
        """fp64 rows [n, H, D] that request b attends to."""
        a, n = self.layer, self.prompts.total[b]
        where = data.places(self.tables[0, b], n, self.case.page)
        k, v = (data.values(x, s, self.format, where) for x, s in ((a.k, a.k_scale_cache), (a.v, a.v_scale_cache)))
        if self.k is not None and self.v is not None:
            rows = slice(self.starts[b], self.starts[b + 1])
            k[n - self.prompts.new[b] :], v[n - self.prompts.new[b] :] = self.k[rows].double(), self.v[rows].double()
        return k, v

    def error(self, result: Any) -> float:
        """Relative norm of the worst of some rows: the first, the last and some between, of some requests; `result`:
        the output, if it is not in `out`."""
        out = result.view_as(self.out) if isinstance(result, Tensor) else self.out
        p, worst, last = self.prompts, 0.0, len(self.prompts.new) - 1
        for b in {0, last // 2, last}:
            k, v = self.kv(b)
            new, before = p.new[b], p.total[b] - p.new[b]
            for i in {0, new // 3, max(new - 2, 0), new - 1}:
                stop = before + i + 1
                start = max(stop - p.window, 0) if p.window else 0
                row = self.starts[b] + i
                want = data.attend(self.q[row].float(), k[start:stop], v[start:stop], self.scale)
                worst = max(worst, data.relative(out[row], want))
        return worst
