"""Decode over a K/V cache, over a latent cache, and MLA's branch; judged by dense fp64 attention of a few requests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cache import PagedKVCache, PagedLatentCache
from ...formats import kv_bytes_per_token, kv_format, latent_bytes_per_token, latent_format
from ...ops.decode import decode
from ...ops.mla import mla_decode
from ...ops.mla_branch import mla_decode_branch
from ..compare import REQUANTISED, limit_of
from ..memory import as_bytes
from . import data
from .cases import HEAD_DIM, KV_HEADS, NOPE, RANK, ROPE, Case

PEER_LIMIT = 5e-2  # XQA multiplies 8-bit caches by 8-bit probabilities (3.7e-2): timed all the same


class Paged:
    """What both attentions share: lengths, rotating page tables, the sampled judge."""

    peer_limit = PEER_LIMIT

    def __init__(self, case: Case, device: torch.device, bytes_per_token: int, read: int = 0) -> None:
        """read: bytes that a call reads, where these are not all."""
        self.case = case
        lens = data.lengths(case)
        used = -(-lens // case.page)
        held = int(used.sum()) * case.page * bytes_per_token
        copies = data.rotations(device, read or held, held=held)
        self.host_lens, self.lens = lens, lens.to(device)
        self.tables = data.page_tables(used, copies, device)
        self.num_pages = copies * int(used.sum())
        self.total = int(lens.sum())
        self.nbytes = self.total * bytes_per_token
        self.limit = limit_of("out", case.precision)
        self.calls: list = []
        self.out = torch.empty(0)

    def poison(self) -> None:
        data.poison(self.out)

    def error(self, result: Any) -> float:
        """Relative norm of the worst of a few rows; `result`: the output, if it is not in `out`."""
        out = result.view_as(self.out) if isinstance(result, Tensor) else self.out
        return max(data.relative(out[t], self.expected(t)) for t in self.samples())

    def samples(self) -> set[int]:
        """Rows to judge; of one a request."""
        last = len(self.host_lens) - 1
        return {0, last // 2, last, int(self.host_lens.argmax())}

    def expected(self, b: int) -> Tensor:
        raise NotImplementedError

    def where(self, b: int) -> tuple[Tensor, Tensor]:
        """Pages and slots of request b in the first table."""
        return data.places(self.tables[0, b], int(self.host_lens[b]), self.case.page)


class Decode(Paged):
    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        names = (case.format.split("/") * 2)[:2]
        super().__init__(case, device, kv_bytes_per_token(names, KV_HEADS, HEAD_DIM))
        self.formats, self.scale = [kv_format(name) for name in names], HEAD_DIM**-0.5
        self.layer = layer = PagedKVCache.allocate(
            1, self.num_pages, case.page, KV_HEADS, HEAD_DIM, format=names, scales=case.scales, device=device
        )[0]
        data.fill(layer.k, layer.k_scale_cache, self.formats[0])
        data.fill(layer.v, layer.v_scale_cache, self.formats[1])
        self.q = torch.randn(case.requests, case.heads, HEAD_DIM, device=device).bfloat16()
        self.out = torch.empty_like(self.q)
        self.flops = 4 * self.total * case.heads * HEAD_DIM

        def call(table: Tensor) -> Any:
            return lambda: decode(
                self.q, layer, table, self.lens, out=self.out, precision=case.precision,
                batch_invariant=case.batch_invariant, backend=backend,
            )  # fmt: skip

        self.calls = [call(table) for table in self.tables]

    def kv(self, b: int) -> tuple[Tensor, Tensor]:
        """fp64 keys and values [n, H, D] of request b."""
        where, a, (k, v) = self.where(b), self.layer, self.formats
        return data.values(a.k, a.k_scale_cache, k, where), data.values(a.v, a.v_scale_cache, v, where)

    def expected(self, b: int) -> Tensor:
        return data.attend(self.q[b], *self.kv(b), self.scale)


class MLADecode(Paged):
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
                precision=case.precision, batch_invariant=case.batch_invariant, backend=backend,
            )  # fmt: skip

        self.calls = [call(table) for table in self.tables]

    def expected(self, b: int) -> Tensor:
        where = self.where(b)
        ckv = data.values(self.layer.ckv, self.layer.ckv_scale_cache, self.format, where)
        kpe = data.take(self.layer.kpe, *where).float().double()
        return data.attend(self.q[b], torch.cat([ckv, kpe], -1)[:, None], ckv[:, None], self.scale)


class Branch(Paged):
    """The decode branch of MLA: the last token of each request is new. Weights rotate as the caches do."""

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        super().__init__(case, device, latent_bytes_per_token(case.format, RANK, ROPE))
        b, h, self.format = case.requests, case.heads, latent_format(case.format)
        self.scale, self.limit = (NOPE + ROPE) ** -0.5, REQUANTISED
        self.layer = layer = PagedLatentCache.allocate(
            1, self.num_pages, case.page, format=case.format, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, device=device
        )[0]
        data.fill(layer.ckv, layer.ckv_scale_cache, self.format)
        layer.kpe.copy_(torch.randn(layer.kpe.shape, device=device))

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        self.q, self.kv_c, self.k_pe = normal(b, h, NOPE + ROPE), normal(b, RANK), normal(b, ROPE)
        self.gamma, cached = 1 + normal(RANK) / 10, self.lens - 1
        self.freqs = data.freqs_cis(int(self.host_lens.max()), ROPE, device)
        sizes = (h, RANK, NOPE), (h, NOPE, RANK)
        of_weights = sum(h * n * k for h, n, k in sizes)
        sets = min(len(self.tables), data.rotations(device, of_weights))
        self.weights = [[data.blockwise(*size, device=device) for size in sizes] for _ in range(sets)]
        self.out = torch.empty(b, h, NOPE, dtype=torch.bfloat16, device=device)
        self.nbytes += of_weights + self.q.nbytes + self.out.nbytes
        self.flops = 2 * self.total * h * (2 * RANK + ROPE) + 2 * b * of_weights

        def call(table: Tensor, i: int) -> Any:
            (w_uk, uk_scale), (w_uv, uv_scale) = self.weights[i % sets]
            return lambda: mla_decode_branch(
                self.q, layer, table, cached, self.freqs, self.gamma, w_uk, w_uv, softmax_scale=self.scale,
                w_uk_scale=uk_scale, w_uv_scale=uv_scale, kv_c=self.kv_c, k_pe=self.k_pe, out=self.out, backend=backend,
            )  # fmt: skip

        self.calls = [call(table, i) for i, table in enumerate(self.tables)]

    def poison(self) -> None:
        super().poison()
        for b in range(self.case.requests):
            pages, slots = self.where(b)
            as_bytes(self.layer.ckv)[pages[-1], slots[-1]] = 0xFF

    def expected(self, b: int) -> Tensor:
        where, q, ((w_uk, uk_scale), (w_uv, uv_scale)) = self.where(b), self.q[b].double(), self.weights[0]
        ckv = data.values(self.layer.ckv, self.layer.ckv_scale_cache, self.format, where)
        kpe = data.take(self.layer.kpe, *where).float().double()
        latent = torch.einsum("hk,hnk->hn", data.quantised(q[:, :NOPE]), data.dense(w_uk, uk_scale))
        turned = data.rotated(q[None, :, NOPE:], self.freqs[self.host_lens[b] - 1][None])[0]
        query = torch.cat([latent, turned], -1).bfloat16()
        values = data.attend(query, torch.cat([ckv, kpe], -1)[:, None], ckv[:, None], self.scale).bfloat16()
        return torch.einsum("hk,hnk->hn", data.quantised(values), data.dense(w_uv, uv_scale))
