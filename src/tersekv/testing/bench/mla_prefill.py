"""The whole MLA prefill of one request with an empty cache and an e4m3 up-projection; a few rows judged in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...cache import PagedLatentCache
from ...formats import latent_format
from ...ops.mla import mla_prefill, mla_prefill_plan
from ..compare import EXACT, STORED
from . import data
from .cases import NOPE, RANK, ROPE, Case

_COPIES = 2
EPSILON = 1e-6


class MLAPrefill:
    limit, peer_limit = EXACT, 3e-2

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, s, h = case, case.tokens, case.heads
        pages = -(-s // case.page)
        self.layer = PagedLatentCache.allocate(
            1, pages * _COPIES, case.page, format=case.format, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, device=device
        )[0]
        self.tables = data.page_tables(torch.tensor([pages]), _COPIES, device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device).bfloat16()

        self.q0 = normal(s, h, NOPE + ROPE)
        self.qs = [self.q0.clone() for _ in range(_COPIES)]  # rotated in place, again and again
        self.kv_c, self.k_pe, self.gamma = normal(s, RANK), normal(s, ROPE), 1 + normal(RANK) / 10
        rows = h * 2 * NOPE
        self.weight, self.weight_scale = data.blockwise(rows, RANK, device=device)
        self.freqs = data.freqs_cis(s, ROPE, device)
        self.out = torch.empty(s, h, NOPE, dtype=torch.bfloat16, device=device)
        self.plan = mla_prefill_plan([s], [s], device=device)
        self.scale = (NOPE + ROPE) ** -0.5
        self.flops = 2 * s * RANK * rows + s * s * h * (NOPE + ROPE + NOPE)
        tensors = (self.q0, self.out, self.kv_c, self.k_pe, self.weight, self.weight_scale)
        self.nbytes = sum(x.nbytes for x in tensors) + s * (RANK + ROPE) * latent_format(case.format).storage.itemsize
        lens = torch.zeros(1, dtype=torch.int32, device=device)
        cu = torch.tensor([0, s], dtype=torch.int32, device=device)

        def call(q: Tensor, table: Tensor) -> Any:
            return lambda: mla_prefill(
                q, self.layer, table, lens, cu, self.freqs, self.gamma, self.weight, self.plan,
                softmax_scale=self.scale, kv_b_proj_scale=self.weight_scale, kv_c=self.kv_c, k_pe=self.k_pe,
                epsilon=EPSILON, out=self.out, backend=backend,
            )  # fmt: skip

        self.calls = [call(q, table) for q, table in zip(self.qs, self.tables, strict=True)]

    def poison(self) -> None:
        for x in (self.out, self.layer.ckv, self.layer.kpe):
            data.poison(x)
        self.qs[0].copy_(self.q0)

    def error(self, result: Any) -> float:
        """Relative norm of some rows of some heads; inf where the stored rows are wrong."""
        s, h = self.case.tokens, self.case.heads
        where = data.places(self.tables[0, 0], s, self.case.page)
        f = latent_format(self.case.format)
        ckv, kpe = data.values(self.layer.ckv, None, f, where), data.values(self.layer.kpe, None, f, where)
        x = self.kv_c.double()
        normed = (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPSILON)).bfloat16() * self.gamma
        turned = data.rotated(self.k_pe.double(), self.freqs)
        wrong = max(data.relative(ckv, normed.double()), data.relative(kpe, turned))
        if not wrong <= (STORED if f.storage == torch.bfloat16 else 10 * STORED):
            return float("inf")
        rows = torch.tensor(sorted({0, s // 3, s // 2, s - 1}), device=x.device)
        q = self.q0[rows].double()
        q = torch.cat([q[..., :NOPE], data.rotated(q[..., NOPE:], self.freqs[rows]).bfloat16().double()], -1)
        latent = data.quantised(ckv)
        return max(self._head_error(head, rows, q[:, head], latent, kpe) for head in {0, h // 2, h - 1})

    def _head_error(self, head: int, rows: Tensor, q: Tensor, latent: Tensor, kpe: Tensor) -> float:
        part = slice(head * 2 * NOPE, (head + 1) * 2 * NOPE)
        scale = self.weight_scale[head * 2 : head * 2 + 2].double()  # one row per 128 outputs: nope, then v
        weight = self.weight[part].float().double() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        kv = (latent @ weight.T).bfloat16().double()
        scores = (q @ torch.cat([kv[:, :NOPE], kpe], -1).T) * self.scale
        later = torch.arange(len(latent), device=q.device) > rows[:, None]
        return data.relative(self.out[rows, head], scores.masked_fill(later, -torch.inf).softmax(-1) @ kv[:, NOPE:])
