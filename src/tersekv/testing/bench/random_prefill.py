"""Prefills that nobody listed: prompts and chunks of them, equal and ragged, within bounds of memory and of work."""

from __future__ import annotations

from dataclasses import dataclass

from ...formats import kv_bytes_per_token
from .cases import DECODE_FORMATS, PAIRS
from .dice import Dice
from .prefill import PrefillShape, Prompts

FORMATS = {**dict.fromkeys(DECODE_FORMATS, 2), "fp8_e4m3": 4, "fp16": 1, "fp8_e5m2": 1, **dict.fromkeys(PAIRS, 1)}
_DIMS = {128: 6, 256: 4, 64: 2, 80: 1, 96: 1, 112: 1, 192: 1}
_PAGES = {64: 5, 16: 4, 32: 2, 128: 1}
_LAYOUTS = {"NHD": 5, "HND": 1}
_CHUNKS, _RAGGED, _WINDOWS, _E4M3_QUERIES = 1 / 3, 0.4, 0.15, 0.5  # fractions of the cells that may have them
_SPREAD = 8.0  # ragged lengths lie between one and this many times the shortest


@dataclass(frozen=True, slots=True)
class Bounds:
    """Lengths and windows in tokens; nbytes: of a bf16 cache with the drawn tokens; flops: of a call."""

    new: tuple[int, int]
    past: tuple[int, int]
    window: tuple[int, int]
    requests: int
    nbytes: float
    flops: float

    def hold(self, c: PrefillShape) -> bool:
        cached = sum(c.prompts.total) * kv_bytes_per_token("bf16", c.kv_heads, c.head_dim)
        return cached <= self.nbytes and c.flops <= self.flops


GPU = Bounds((128, 16384), (128, 65536), (128, 8192), requests=32, nbytes=2e9, flops=20e12)
CPU = Bounds((16, 256), (16, 512), (8, 128), requests=4, nbytes=4e6, flops=5e8)


def cell(dice: Dice, formats: dict[str, int], device: str) -> PrefillShape:
    bounds = CPU if device == "cpu" else GPU
    format, (heads, kv_heads), dim = dice.pick(formats), dice.heads(), dice.pick(_DIMS)
    query = "fp8_e4m3" if format == "fp8_e4m3" and dice.random() < _E4M3_QUERIES else "bf16"
    page, layout = dice.pick(_PAGES), dice.pick(_LAYOUTS)
    requests = round(dice.log_uniform(1, bounds.requests))
    ragged, chunks = dice.random() < _RAGGED, dice.random() < _CHUNKS
    window = round(dice.log_uniform(*bounds.window)) if dice.random() < _WINDOWS else 0
    new = _lengths(dice, requests, bounds.new, ragged)
    past = _lengths(dice, requests, bounds.past, ragged) if chunks else [0] * requests
    while True:
        total = tuple(n + before for n, before in zip(new, past, strict=True))
        shape = PrefillShape.of(
            Prompts("random", tuple(new), total, window), format, heads=heads, page=page, query=query,
            kv_heads=kv_heads, head_dim=dim, layout=layout,
        )  # fmt: skip
        if bounds.hold(shape):
            return shape
        new, past = _smaller(new, past, bounds)


def _lengths(dice: Dice, requests: int, bounds: tuple[int, int], ragged: bool) -> list[int]:
    low, high = bounds
    if not ragged:
        return [round(dice.log_uniform(low, high))] * requests
    shortest = dice.log_uniform(low, max(low, high / _SPREAD))
    return [round(dice.log_uniform(shortest, min(high, shortest * _SPREAD))) for _ in range(requests)]


def _smaller(new: list[int], past: list[int], bounds: Bounds) -> tuple[list[int], list[int]]:
    """Fewer requests; of one request a shorter past, then fewer new tokens."""
    if len(new) > 1:
        return new[: len(new) // 2], past[: len(new) // 2]
    if past[0] > bounds.past[0]:
        return new, [max(past[0] // 2, bounds.past[0])]
    return [max(new[0] // 2, bounds.new[0])], past
