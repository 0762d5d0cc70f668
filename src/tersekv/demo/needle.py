"""Needles in a haystack of a model's own keys: does a cache still find the one key that a query means?"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..ops.decode import decode
from ..recipe import Recipe
from .calibrate import Calibration

_HALVINGS = 30
_RIDGE = 1e-2  # on the correlations of channels: what hardly varies tells nothing


class _Hay(NamedTuple):
    """Of one layer: n queries that each mean one of its keys, and what they see."""

    q: Tensor  # [n, H, D], scores as they are
    there: Tensor  # [n, H]: the exact scores can tell the key from all others
    needle: Tensor  # [n, H, Dv] fp64: its value
    others: Tensor  # [n, H, Dv] fp64: the mean of the other values by their weights


class Needles:
    """`places` keys of every K/V head, evenly spaced in a text, each with a query that gives it half of all weight.

    A query points where its needle differs from the other keys, channels counted by how much they vary, and is as long
    as it takes. Keys that others of the same text outshine even so are left out: no cache could find them.
    """

    def __init__(self, calibration: Calibration, places: int, dtype: torch.dtype) -> None:
        self._calibration = calibration
        self._hay = [_hay(k, v, places, dtype) for k, v in calibration.rows]

    @property
    def number(self) -> int:
        return sum(int(h.there.sum()) for h in self._hay)

    def found(self, r: Recipe) -> int:
        """How many keep at least half of their weight in a recipe's cache, as its attention gives it."""
        total = 0
        for i, hay in enumerate(self._hay):
            layer, n = self._calibration.filled(i, r), len(hay.q)
            pages = torch.arange(layer.num_pages, dtype=torch.int32, device=hay.q.device)
            lens = torch.full((n,), len(self._calibration.rows[i][0]), dtype=torch.int32, device=hay.q.device)
            out = cast(Tensor, decode(hay.q, layer, pages.expand(n, -1), lens, softmax_scale=1.0))
            way = hay.needle - hay.others
            weight = ((out.double() - hay.others) * way).sum(-1) / way.square().sum(-1)
            total += int(((weight >= 0.25) & hay.there).sum())
        return total


def _hay(k: Tensor, v: Tensor, places: int, dtype: torch.dtype) -> _Hay:
    k, v = k.double(), v.double()
    at = torch.linspace(0, len(k) - 1, min(places, len(k)), device=k.device).long().unique()
    way = _telling(k, at)
    scores = torch.einsum("nhd,thd->nht", way, k)
    itself = torch.arange(len(k), device=k.device) == at[:, None, None]
    gap = (scores.masked_select(itself.expand_as(scores)).view(len(at), -1, 1) - scores).masked_fill(itself, torch.inf)
    near = gap.amin(-1)
    there = near > 0
    # So long that the others weigh as much as it does: the sum of exp(-length · gap) is 1.
    low, high = torch.zeros_like(near), len(k) / near.clamp(min=1e-9)
    for _ in range(_HALVINGS):
        length = (low + high) / 2
        much = torch.exp(-length[..., None] * gap).sum(-1) > 1
        low, high = torch.where(much, length, low), torch.where(much, high, length)
    q = (way * high[..., None]).to(dtype)
    weight = torch.softmax(torch.einsum("nhd,thd->nht", q.double(), k).masked_fill(itself, -torch.inf), -1)
    others = torch.einsum("nht,thd->nhd", weight, v)
    return _Hay(q, there, v[at], others)


def _telling(k: Tensor, at: Tensor) -> Tensor:
    """[n, H, D]: the directions that tell keys `at` from keys [T, H, D] of such a distribution."""
    apart = k - k.mean(0)
    spread = apart.square().mean(0).sqrt().clamp(min=1e-30)
    x = apart / spread
    alike = torch.einsum("thc,thd->hcd", x, x) / len(k) + _RIDGE * torch.eye(k.shape[-1], device=k.device).double()
    return torch.linalg.solve(alike, x[at].permute(1, 2, 0)).permute(2, 0, 1) / spread
