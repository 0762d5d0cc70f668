"""Decode over a K/V cache, and over a latent cache, judged by dense fp64 attention of a few requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cache import PagedKVCache, PagedLatentCache
from ...formats import kv_bytes_per_token, kv_format, latent_bytes_per_token, latent_format
from ...ops.decode import decode
from ...ops.mla import mla_decode
from ..compare import limit_of
from . import data
from .cases import HEAD_DIM, KV_HEADS, RANK, ROPE, Case

PEER_LIMIT = 5e-2  # XQA multiplies 8-bit caches by 8-bit probabilities (3.7e-2): timed all the same


class _Paged:
    """What both attentions share: lengths, rotating page tables, the sampled judge."""

    peer_limit = PEER_LIMIT

    def __init__(self, case: Case, device: torch.device, bytes_per_token: int) -> None:
        self.case = case
        lens = data.lengths(case)
        used = -(-lens // case.page)
        copies = data.rotations(device, int(used.sum()) * case.page * bytes_per_token)
        self.host_lens, self.lens = lens, lens.to(device)
        self.tables = data.page_tables(used, copies, device)
        self.num_pages = copies * int(used.sum())
        self.total = int(lens.sum())
        self.nbytes = self.total * bytes_per_token
        self.limit = limit_of("out", torch.bfloat16, case.precision)
        self.calls: list = []
        self.out = torch.empty(0)

    def poison(self) -> None:
        data.poison(self.out)

    def error(self, result: Any) -> float:
        """Relative norm of the worst of a few requests; `result`: the output, if it is not in `out`."""
        out = result.view_as(self.out) if isinstance(result, Tensor) else self.out
        last = len(self.host_lens) - 1
        samples = {0, last // 2, last, int(self.host_lens.argmax())}
        return max(data.relative(out[b], self.expected(b)) for b in samples)

    def expected(self, b: int) -> Tensor:
        raise NotImplementedError

    def where(self, b: int) -> tuple[Tensor, Tensor]:
        """Pages and slots of request b in the first table."""
        return data.places(self.tables[0, b], int(self.host_lens[b]), self.case.page)


class Decode(_Paged):
    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        super().__init__(case, device, kv_bytes_per_token(case.format, KV_HEADS, HEAD_DIM))
        self.format, self.scale = kv_format(case.format), HEAD_DIM**-0.5
        self.layer = layer = PagedKVCache.allocate(
            1, self.num_pages, case.page, KV_HEADS, HEAD_DIM, format=case.format, device=device
        )[0]
        data.fill(layer.k, layer.k_scale_cache, self.format)
        data.fill(layer.v, layer.v_scale_cache, self.format)
        self.q = torch.randn(case.requests, case.heads, HEAD_DIM, device=device).bfloat16()
        self.out = torch.empty_like(self.q)
        self.flops = 4 * self.total * case.heads * HEAD_DIM

        def call(table: Tensor) -> Any:
            return lambda: decode(
                self.q, layer, table, self.lens, out=self.out, precision=case.precision, backend=backend
            )

        self.calls = [call(table) for table in self.tables]

    def kv(self, b: int) -> tuple[Tensor, Tensor]:
        """fp64 keys and values [n, H, D] of request b."""
        where, a, f = self.where(b), self.layer, self.format
        return data.values(a.k, a.k_scale_cache, f, where), data.values(a.v, a.v_scale_cache, f, where)

    def expected(self, b: int) -> Tensor:
        return data.attend(self.q[b], *self.kv(b), self.scale)


class MLADecode(_Paged):
    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        super().__init__(case, device, latent_bytes_per_token(case.format, RANK, ROPE))
        self.format, self.scale = latent_format(case.format), (HEAD_DIM + ROPE) ** -0.5
        self.layer = layer = PagedLatentCache.allocate(
            1, self.num_pages, case.page, format=case.format, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, device=device
        )[0]
        data.fill(layer.ckv, layer.ckv_scale_cache, self.format)
        layer.kpe.copy_(torch.randn(layer.kpe.shape, device=device))
        self.q = torch.randn(case.requests, case.heads, RANK + ROPE, device=device).to(kv_format(case.query).storage)
        self.out = torch.empty(case.requests, case.heads, RANK, dtype=torch.bfloat16, device=device)
        self.flops = 2 * self.total * case.heads * (2 * RANK + ROPE)

        def call(table: Tensor) -> Any:
            return lambda: mla_decode(
                self.q, layer, table, self.lens, softmax_scale=self.scale, out=self.out,
                precision=case.precision, backend=backend,
            )  # fmt: skip

        self.calls = [call(table) for table in self.tables]

    def expected(self, b: int) -> Tensor:
        where = self.where(b)
        ckv = data.values(self.layer.ckv, self.layer.ckv_scale_cache, self.format, where)
        kpe = data.take(self.layer.kpe, *where).float().double()
        return data.attend(self.q[b], torch.cat([ckv, kpe], -1)[:, None], ckv[:, None], self.scale)
