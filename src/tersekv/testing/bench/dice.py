"""A seeded source of draws, and the heads of attention that it draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import TypeVar

T = TypeVar("T")
_GROUPS = {4: 4, 8: 3, 1: 1, 2: 1, 5: 1, 6: 1, 7: 1, 16: 1}
_KV_HEADS = {8: 5, 1: 1, 2: 2, 4: 3, 16: 1, 32: 1}
_MOST_HEADS = 128


class Dice(Random):
    def log_uniform(self, low: float, high: float) -> float:
        """Between both, each order of magnitude alike."""
        return math.exp(self.uniform(math.log(low), math.log(high)))

    def pick(self, weights: Mapping[T, int]) -> T:
        return self.choices([*weights], [*weights.values()])[0]

    def heads(self) -> tuple[int, int]:
        """(num_q_heads, num_kv_heads)"""
        kv_heads = self.pick(_KV_HEADS)
        group = self.pick({group: weight for group, weight in _GROUPS.items() if kv_heads * group <= _MOST_HEADS})
        return kv_heads * group, kv_heads
