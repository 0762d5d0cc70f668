"""Decodes that nobody listed: shapes and lengths by a seed, each beside the peers; their mean and the worst."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from random import Random
from statistics import geometric_mean
from typing import TypeVar

from ...formats import latent_bytes_per_token
from .cases import DECODE_FORMATS, LATENT_FORMATS, RANK, ROPE, Case
from .engine import Peer, Result
from .shapes import Shape

T = TypeVar("T")
OPS = ("decode", "mla_decode")
_WEIGHTS = {"decode": 4, "mla_decode": 1}
# Bytes of a call: most lie where serving does, some below and some above it.
_MIDDLE, _ALL = (50e6, 400e6), (5e6, 1.5e9)
_IN_THE_MIDDLE = 0.8
_OF_A_CPU = 1 / 500  # of these bytes
_LONGEST, _SHORTEST, _MOST_REQUESTS = 1 << 18, 16, 512
_DIMS = {128: 8, 64: 2, 256: 2, 96: 1, 80: 1, 112: 1, 192: 1}
_PAGES = {64: 5, 16: 4, 32: 2, 128: 1, 8: 1}
_MLA_PAGES = {64: 4, 32: 1, 16: 1}
_GROUPS = {4: 4, 8: 3, 1: 1, 2: 1, 5: 1, 6: 1, 7: 1, 16: 1}
_MOST_HEADS = 128
_KV_HEADS = {8: 5, 1: 1, 2: 2, 4: 3, 16: 1, 32: 1}
_MLA_HEADS = {128: 2, 16: 2, 64: 2, 32: 1}
_UNEVEN = 0.35


def cells(seed: int, n: int, device: str, ops: Iterable[str], formats: Iterable[str] | None) -> list[Case]:
    """The first n cells of a seed, of the operations and formats named (None: all); none where these have no decode."""
    asked, wanted = [op for op in OPS if op in set(ops)], None if formats is None else set(formats)
    known = {"decode": DECODE_FORMATS, "mla_decode": LATENT_FORMATS}
    named = {op: [f for f in known[op] if wanted is None or f in wanted] for op in asked}
    return [_cell(Random(f"tersekv bench {seed} {i}"), named, device) for i in range(n)] if any(named.values()) else []


def _cell(dice: Random, named: dict[str, list[str]], device: str) -> Case:
    op = _some(dice, {op: _WEIGHTS[op] for op, formats in named.items() if formats})
    format = dice.choice(named[op])
    size = _log(dice, *(_MIDDLE if dice.random() < _IN_THE_MIDDLE else _ALL)) * (_OF_A_CPU if device == "cpu" else 1)
    requests, uneven = round(_log(dice, 1, _MOST_REQUESTS)), dice.random() < _UNEVEN
    if op == "mla_decode":
        query = "fp8_e4m3" if format == "fp8_e4m3" and dice.random() < 0.5 else "bf16"
        each = latent_bytes_per_token(format, RANK, ROPE)
        case: Case = Case(
            op, format, 0, 0, heads=_some(dice, _MLA_HEADS), page=_some(dice, _MLA_PAGES), uneven=uneven, query=query
        )
    else:
        kv_heads = _some(dice, _KV_HEADS)
        groups = {group: weight for group, weight in _GROUPS.items() if kv_heads * group <= _MOST_HEADS}
        case = shape = Shape(
            "shape", format, 0, 0, heads=kv_heads * _some(dice, groups), page=_some(dice, _PAGES), uneven=uneven,
            name="random", kv_heads=kv_heads, head_dim=_some(dice, _DIMS),
        )  # fmt: skip
        each = shape.bytes_per_token
    # Fewer requests where each would have hardly a token, more where one would be longer than is served.
    requests = min(max(requests, math.ceil(size / each / _LONGEST)), max(1, int(size / each / _SHORTEST)))
    return replace(case, requests=requests, tokens=max(1, round(size / each / requests)))


def _log(dice: Random, low: float, high: float) -> float:
    """Between both, each order of magnitude alike."""
    return math.exp(dice.uniform(math.log(low), math.log(high)))


def _some(dice: Random, weights: dict[T, int]) -> T:
    return dice.choices([*weights], [*weights.values()])[0]


def compared(
    cases: Iterable[Case], run: Callable[[Case], Result], peers_of: Callable[[Case], Iterable[Peer]]
) -> Iterator[Result]:
    """The result of each cell, beside the peers of its own format and, if that is not bf16, those of the same cell over
    e4m3 and over bf16: few libraries have more formats, and some are slower over 8 bits than over 16."""
    for case in cases:
        result = run(case)
        formats = ("fp8_e4m3", "bf16") if result.us is not None and case.format != "bf16" else ()
        twins = [replace(case, format=name, query="bf16") for name in formats]
        others = [
            replace(p, name=f"{p.name} on {twin.format}") for twin in twins if twin != case for p in peers_of(twin)
        ]
        yield replace(result, peers=(*result.peers, *others))


def verdict(results: Iterable[Result]) -> dict:
    """Geometric mean and worst of the ratios to the best peer, and which cells these were."""
    ratios = {r.case.id: ratio for r in results if (ratio := r.ratio) is not None}
    if not ratios:
        return {"cells": 0, "geometric_mean": None, "worst": None, "worst_cell": None, "lost": 0}
    worst = min(ratios, key=ratios.__getitem__)
    return {
        "cells": len(ratios),
        "geometric_mean": geometric_mean(ratios.values()),
        "worst": ratios[worst],
        "worst_cell": worst,
        "lost": sum(x < 1 for x in ratios.values()),
    }
