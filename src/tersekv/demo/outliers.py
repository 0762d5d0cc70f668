"""A model with outlier channels that computes what it computed before: what makes keys hard to keep in few bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from .llama import LlamaLayer, LlamaLM

PAIRS, FACTOR = (10, 20), 20.0


def make_outliers(model: LlamaLM, pairs: tuple[int, ...] = PAIRS, factor: float = FACTOR) -> None:
    """Make some rotary pairs of every head's keys `factor` times larger, in place, and of its queries smaller.

    A score is a sum over channels of query times key, and a rotary pair turns as one: no score changes but by rounding.
    """
    c = model.config
    for layer in cast(Iterable[LlamaLayer], model.layers):
        for projection, heads, by in (
            (layer.k_proj, c.num_kv_heads, factor), (layer.q_proj, c.num_q_heads, 1 / factor)
        ):  # fmt: skip
            rows = projection.weight.view(heads, c.head_dim, -1)
            for pair in pairs:
                rows[:, [pair, pair + c.head_dim // 2]] *= by
