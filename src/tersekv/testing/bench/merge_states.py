"""Two partial results of the same rows into one, judged in fp64."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...ops.merge import merge_states
from ..compare import EXACT
from . import data
from .cases import HEAD_DIM, Case

_PARTS, _MOST_COPIES = 2, 32


class MergeStates:
    limit = peer_limit = EXACT
    flops = 0

    def __init__(self, case: Case, device: torch.device, backend: str | None = None) -> None:
        self.case, t, h = case, case.tokens, case.heads
        self.out = torch.empty(t, h, HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.lse = torch.empty(t, h, device=device)
        self.nbytes = (_PARTS + 1) * (self.out.nbytes + self.lse.nbytes)
        self.parts = [
            (torch.randn(_PARTS, t, h, HEAD_DIM, device=device).bfloat16(), torch.randn(_PARTS, t, h, device=device))
            for _ in range(data.rotations(device, self.nbytes, _MOST_COPIES))
        ]

        def call(outs: Tensor, lses: Tensor) -> Any:
            return lambda: merge_states(outs, lses, out=self.out, lse=self.lse, backend=backend)

        self.calls = [call(*part) for part in self.parts]

    def poison(self) -> None:
        for x in (self.out, self.lse):
            data.poison(x)

    def error(self, result: Any) -> float:
        outs, lses = (x.double() for x in self.parts[0])
        want = (outs * lses.softmax(0)[..., None]).sum(0)
        return max(data.relative(self.out, want), data.relative(self.lse, lses.logsumexp(0)))
