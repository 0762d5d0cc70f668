"""Rows through the matrices of their heads, MLA's up-projection of queries; a few tokens judged in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.mla import mla_project
from ..compare import EXACT
from . import data
from .cases import NOPE, RANK, Case

_MOST_COPIES = 32


class MLAProject:
    """format: of the weights; e4m3 ones come with the scales of their blocks, and rows are quantised."""

    limit = peer_limit = EXACT

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, t, h = case, case.tokens, case.heads
        self.x = torch.randn(t, h, NOPE, device=device).bfloat16()
        self.out = torch.empty(t, h, RANK, dtype=torch.bfloat16, device=device)
        self.flops = 2 * t * h * NOPE * RANK
        weights = h * NOPE * RANK * (1 if case.format == "fp8_e4m3" else 2)
        self.nbytes = self.x.nbytes + self.out.nbytes + weights
        copies = data.rotations(device, self.nbytes, _MOST_COPIES)
        self.weights = [self._weight(h, device) for _ in range(copies)]

        def call(weight: Tensor, scale: Tensor | None) -> Any:
            return lambda: mla_project(self.x, weight, weight_scale=scale, out=self.out, backend=backend)

        self.calls = [call(*weight) for weight in self.weights]

    def _weight(self, heads: int, device: torch.device) -> tuple[Tensor, Tensor | None]:
        if self.case.format == "fp8_e4m3":
            return data.blockwise(heads, RANK, NOPE, device=device)
        return torch.randn(heads, RANK, NOPE, device=device).bfloat16() / NOPE**0.5, None

    def poison(self) -> None:
        data.poison(self.out)

    def error(self, result: Any) -> float:
        """Relative norm of the worst of three tokens."""
        weight, scale = self.weights[0]
        matrix = weight.double() if scale is None else data.dense(weight, scale)
        some = list({0, len(self.x) // 2, len(self.x) - 1})
        rows = self.x[some].double() if scale is None else data.quantised(self.x[some])
        want = torch.einsum("thk,hnk->thn", rows, matrix)
        return max(data.relative(got, row) for got, row in zip(self.out[some], want, strict=True))
