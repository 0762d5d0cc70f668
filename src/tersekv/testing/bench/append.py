"""The appends: new rows into random pages. A few tokens are judged, byte by byte, by the oracle."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...cache import PagedKVCache, PagedLatentCache
from ...formats import kv_bytes_per_token, latent_bytes_per_token
from ...layers import PagedKVLayer, PagedLatentLayer
from ...ops.append import append, rope_append
from ...ops.mla import mla_append
from ..memory import take
from . import data
from .cases import HEAD_DIM, KV_HEADS, RANK, ROPE, Case

Q_DTYPE = torch.float8_e4m3fn  # in which the queries are returned
_JUDGED = 64  # tokens from the front, and from the back
_MOST_COPIES = 32


class Append:
    """append, rope_append and mla_append. `inputs` and `outs` of each copy: tensors of T rows."""

    limit = 0.0  # codes and scales are equal to the byte
    peer_limit = 0.02  # a peer's rotation may be fused, and a code differ by one
    flops = 0

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, self.device = case, device
        t, self.latent = case.tokens, case.op == "mla_append"
        shapes = self._shapes()
        written = self._row_bytes() * t + sum(t * math.prod(s) for n, s in shapes.items() if n.startswith("q"))
        self.nbytes = 2 * t * sum(math.prod(s) for s in shapes.values()) + written
        copies = data.rotations(device, self.nbytes, _MOST_COPIES)
        self.pages = -(-t // case.page)
        room = data.rotations(device, self.pages * case.page * self._row_bytes(), 1 << 16)
        num_pages = max(copies, room) * self.pages
        self.layer = self.allocate(num_pages)
        order = torch.randperm(num_pages, device=device)[: copies * self.pages]
        self.tables = order.to(torch.int32).view(copies, self.pages)
        self.slots = [self._slots(table) for table in self.tables]
        self.inputs = [{n: torch.randn(t, *s, device=device).bfloat16() for n, s in shapes.items()} for _ in self.slots]
        self.outs = [
            {n: torch.empty(t, *s, dtype=Q_DTYPE, device=device) for n, s in shapes.items() if n.startswith("q")}
            for _ in self.slots
        ]
        self.positions = torch.arange(t, dtype=torch.int32, device=device)
        self.cos_sin = _cos_sin(max(t, 4096), ROPE if self.latent else HEAD_DIM, device)
        self.calls = [
            self._call(self.layer, slots, x, out, self.positions, backend)
            for slots, x, out in zip(self.slots, self.inputs, self.outs, strict=True)
        ]

    def allocate(self, num_pages: int) -> PagedKVLayer | PagedLatentLayer:
        case = self.case
        if self.latent:
            return PagedLatentCache.allocate(
                1, num_pages, case.page, format=case.format, kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
                device=self.device,
            )[0]  # fmt: skip
        return PagedKVCache.allocate(
            1, num_pages, case.page, KV_HEADS, HEAD_DIM, format=case.format,
            rotation="hadamard" if case.rotated else None, device=self.device,
        )[0]  # fmt: skip

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Rows of the inputs, by name; those of a query start with q."""
        heads = self.case.heads
        if self.latent:
            return {"q_pe": (heads, ROPE), "q_nope": (heads, RANK), "kv_c": (RANK,), "k_pe": (ROPE,)}
        kv: dict[str, tuple[int, ...]] = {"k": (KV_HEADS, HEAD_DIM), "v": (KV_HEADS, HEAD_DIM)}
        return kv if self.case.op == "append" else {"q": (heads, HEAD_DIM), **kv}

    def _row_bytes(self) -> int:
        if self.latent:
            return latent_bytes_per_token(self.case.format, RANK, ROPE)
        return kv_bytes_per_token(self.case.format, KV_HEADS, HEAD_DIM)

    def _slots(self, table: Tensor) -> Tensor:
        token = torch.arange(self.case.tokens, device=self.device)
        return (table.long()[token // self.case.page] * self.case.page + token % self.case.page).to(torch.int32)

    def _call(self, layer: Any, slots: Tensor, x: dict, out: dict, positions: Tensor, backend: str | None) -> Any:
        if self.case.op == "append":
            return lambda: append(x["k"], x["v"], layer, slots, backend=backend)
        if self.case.op == "rope_append":
            return lambda: rope_append(
                x["q"], x["k"], x["v"], layer, slots, self.cos_sin, positions, q_out=out["q"], backend=backend
            )
        return lambda: mla_append(
            x["kv_c"], x["k_pe"], layer, slots, cos_sin_cache=self.cos_sin, positions=positions,
            q_nope=x["q_nope"], q_pe=x["q_pe"], q_nope_out=out["q_nope"], q_pe_out=out["q_pe"], backend=backend,
        )  # fmt: skip

    def poison(self) -> None:
        for x in (*self._stored(self.layer), *self.outs[0].values()):
            data.poison(x)

    def error(self, result: Any) -> float:
        """Share of elements that differ from the oracle's, in the worst tensor, over some of the tokens."""
        t, page = self.case.tokens, self.case.page
        some = torch.tensor(sorted({*range(min(t, _JUDGED)), *range(max(0, t - _JUDGED), t)}), device=self.device)
        x = {n: v[some] for n, v in self.inputs[0].items()}
        outs = {n: torch.empty_like(x[n], dtype=Q_DTYPE) for n in self.outs[0]}
        layer = self.allocate(-(-len(some) // page))
        slots = torch.arange(len(some), dtype=torch.int32, device=self.device)
        self._call(layer, slots, x, outs, self.positions[some], "torch")()
        there = self.slots[0][some].long()
        worst = [
            data.differing(
                take(got, there // page, there % page), take(want, slots.long() // page, slots.long() % page)
            )
            for got, want in zip(self._stored(self.layer), self._stored(layer), strict=True)
        ]
        rows = some, torch.zeros_like(some)
        worst += [data.differing(take(got[:, None], *rows), outs[n]) for n, got in self.outs[0].items()]
        return max(worst)

    @staticmethod
    def _stored(layer: Any) -> list[Tensor]:
        names = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache")
        return [x for x in (getattr(layer, n, None) for n in names) if x is not None]


def _cos_sin(rows: int, rotary: int, device: torch.device) -> Tensor:
    steps = 10000.0 ** -(torch.arange(0, rotary, 2, dtype=torch.float64, device=device) / rotary)
    angle = torch.arange(rows, dtype=torch.float64, device=device)[:, None] * steps
    return torch.cat([angle.cos(), angle.sin()], -1).float()
