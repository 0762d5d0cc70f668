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


@dataclass(frozen=True, slots=True)
class PrefillShape(Case):
    """A prefill of `prompts`. `requests`, `tokens`, `total` and `uneven` describe these: how many, the means of their
    new and of all their tokens (0: all are new), whether they differ."""

    prompts: Prompts = Prompts("", (), ())
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    layout: str = "NHD"
    new_rows: bool = False  # the new tokens' own k and v come in 16 bits

    @classmethod
    def of(cls, prompts: Prompts, format: str, **options: Any) -> PrefillShape:
        new, total, b = prompts.new, prompts.total, len(prompts.new)
        return cls(
            "prefill", format, b, round(sum(new) / b), total=round(sum(total) / b) * (new != total),
            uneven=len({*zip(new, total, strict=True)}) > 1, prompts=prompts, **options,
        )  # fmt: skip

    @property
    def sizes(self) -> tuple[str, ...]:
        words = [f"H {self.heads}/{self.kv_heads}", f"D {self.head_dim}", f"page {self.page}"]
        words += [self.layout] * (self.layout != "NHD") + ["k and v given"] * self.new_rows
        return (*words, *[f"window {self.prompts.window}"] * bool(self.prompts.window))

    @property
    def bytes_per_token(self) -> int:
        return kv_bytes_per_token(pair(self.format), self.kv_heads, self.head_dim)

    @property
    def flops(self) -> int:
        return 4 * self.prompts.pairs * self.heads * self.head_dim


def pair(format: str) -> list[str]:
    """K's and V's format of a case's."""
    return (format.split("/") * 2)[:2]


def shape_of(case: Case) -> PrefillShape:
    """A case of the grid is one request, in the grid's sizes."""
    if isinstance(case, PrefillShape):
        return case
    prompts = Prompts(case.cell, (case.tokens,), (case.total or case.tokens,))
    return PrefillShape.of(
        prompts, case.format, heads=case.heads, page=case.page, query=case.query, precision=case.precision
    )


class Prefill:
    peer_limit = PEER_LIMIT

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, c = case, shape_of(case)
        self.shape, self.formats, self.scale = c, [kv_format(name) for name in pair(c.format)], c.head_dim**-0.5
        p = self.prompts = c.prompts
        self.host_lens = torch.tensor(p.total, dtype=torch.int32)
        used, rows = -(-self.host_lens // c.page), sum(p.new)
        copies = data.rotations(device, int(used.sum()) * c.page * c.bytes_per_token)
        self.tables = data.page_tables(used, copies, device)
        self.layer = layer = PagedKVCache.allocate(
            1, copies * int(used.sum()), c.page, c.kv_heads, c.head_dim, format=pair(c.format), layout=c.layout,
            device=device,
        )[0]  # fmt: skip
        data.fill(layer.k, layer.k_scale_cache, self.formats[0])
        data.fill(layer.v, layer.v_scale_cache, self.formats[1])
        self.lens = self.host_lens.to(device)
        self.starts = torch.nn.functional.pad(torch.tensor(p.new).cumsum(0), (1, 0)).tolist()
        self.cu = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self.q = torch.randn(rows, c.heads, c.head_dim, device=device).to(kv_format(c.query).storage)
        self.out = torch.empty(self.q.shape, dtype=torch.bfloat16, device=device)
        self.k = self.v = None
        if c.new_rows:
            self.k, self.v = (torch.randn(rows, c.kv_heads, c.head_dim, device=device).bfloat16() for _ in range(2))
        self.nbytes, self.flops = p.keys * c.bytes_per_token + self.q.nbytes + self.out.nbytes, c.flops
        self.limit = limit_of("out", c.precision)

        def call(table: Tensor) -> Any:
            return lambda: prefill(
                self.q, layer, table, self.lens, self.cu, k=self.k, v=self.v, max_q_len=max(p.new),
                window=p.window or None, out=self.out, precision=c.precision, backend=backend,
            )  # fmt: skip

        self.calls = [call(table) for table in self.tables]

    def poison(self) -> None:
        data.poison(self.out)

    def kv(self, b: int) -> tuple[Tensor, Tensor]:
        """fp64 rows [n, H, D] that request b attends to."""
        a, n, (of_k, of_v) = self.layer, self.prompts.total[b], self.formats
        where = data.places(self.tables[0, b], n, self.case.page)
        k, v = data.values(a.k, a.k_scale_cache, of_k, where), data.values(a.v, a.v_scale_cache, of_v, where)
        if self.k is not None and self.v is not None:
            rows = slice(self.starts[b], self.starts[b + 1])
            k[n - self.prompts.new[b] :], v[n - self.prompts.new[b] :] = self.k[rows].double(), self.v[rows].double()
        return k, v

    def error(self, result: Any) -> float:
        """Relative norm of the worst of some rows: the first, the last and some between, of the first, the longest,
        the last and a middle request; `result`: the output, if it is not in `out`."""
        out = result.view_as(self.out) if isinstance(result, Tensor) else self.out
        p, worst, last = self.prompts, 0.0, len(self.prompts.new) - 1
        for b in {0, last // 2, last, int(self.host_lens.argmax())}:
            k, v = self.kv(b)
            new, before = p.new[b], p.total[b] - p.new[b]
            for i in {0, new // 3, max(new - 2, 0), new - 1}:
                stop = before + i + 1
                start = max(stop - p.window, 0) if p.window else 0
                row = self.starts[b] + i
                want = data.attend(self.q[row].float(), k[start:stop], v[start:stop], self.scale)
                worst = max(worst, data.relative(out[row], want))
        return worst
