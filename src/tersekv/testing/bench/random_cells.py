"""Decodes and prefills that nobody listed: drawn by a seed, each beside the peers; their mean and the worst."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from statistics import geometric_mean

from ...formats import latent_bytes_per_token
from . import random_prefill
from .cases import DECODE_FORMATS, LATENT_FORMATS, RANK, ROPE, Case
from .dice import Dice
from .engine import Peer, Result
from .shapes import Shape

DECODES = ("decode", "mla_decode")
OPS = (*DECODES, "prefill")
_WEIGHTS = {"decode": 4, "mla_decode": 1, "prefill": 4}
_FORMATS = {
    "decode": dict.fromkeys(DECODE_FORMATS, 1), "mla_decode": dict.fromkeys(LATENT_FORMATS, 1),
    "prefill": random_prefill.FORMATS,
}  # fmt: skip
# Bytes of a decode: most lie where serving does, some below and some above it.
_MIDDLE, _ALL = (50e6, 400e6), (5e6, 1.5e9)
_IN_THE_MIDDLE = 0.8
_OF_A_CPU = 1 / 500  # of these bytes
_LONGEST, _SHORTEST, _MOST_REQUESTS = 1 << 18, 16, 512
_DIMS = {128: 8, 64: 2, 256: 2, 96: 1, 80: 1, 112: 1, 192: 1}
_PAGES = {64: 5, 16: 4, 32: 2, 128: 1, 8: 1}
_MLA_PAGES = {64: 4, 32: 1, 16: 1}
_MLA_HEADS = {128: 2, 16: 2, 64: 2, 32: 1}
_UNEVEN = 0.35


def cells(seed: int, n: int, device: str, ops: Iterable[str], formats: Iterable[str] | None) -> list[Case]:
    """The first n cells of a seed, of the operations and formats named (None: all); none where these have none."""
    asked, wanted = set(ops), None if formats is None else set(formats)
    named = {op: {f: w for f, w in _FORMATS[op].items() if wanted is None or f in wanted} for op in OPS if op in asked}
    named = {op: found for op, found in named.items() if found}
    return [_cell(Dice(f"tersekv bench {seed} {i}"), named, device) for i in range(n)] if named else []


def _cell(dice: Dice, named: dict[str, dict[str, int]], device: str) -> Case:
    op = dice.pick({op: _WEIGHTS[op] for op in named})
    if op == "prefill":
        return random_prefill.cell(dice, named[op], device)
    return _decode(dice, op, dice.choice([*named[op]]), device)


def _decode(dice: Dice, op: str, format: str, device: str) -> Case:
    size = dice.log_uniform(*(_MIDDLE if dice.random() < _IN_THE_MIDDLE else _ALL))
    size *= _OF_A_CPU if device == "cpu" else 1
    requests, uneven = round(dice.log_uniform(1, _MOST_REQUESTS)), dice.random() < _UNEVEN
    if op == "mla_decode":
        query = "fp8_e4m3" if format == "fp8_e4m3" and dice.random() < 0.5 else "bf16"
        each = latent_bytes_per_token(format, RANK, ROPE)
        case: Case = Case(
            op, format, 0, 0, heads=dice.pick(_MLA_HEADS), page=dice.pick(_MLA_PAGES), uneven=uneven, query=query
        )
    else:
        heads, kv_heads = dice.heads()
        case = shape = Shape(
            "shape", format, 0, 0, heads=heads, page=dice.pick(_PAGES), uneven=uneven, name="random",
            kv_heads=kv_heads, head_dim=dice.pick(_DIMS),
        )  # fmt: skip
        each = shape.bytes_per_token
    # Fewer requests where each would have hardly a token, more where one would be longer than is served.
    requests = min(max(requests, math.ceil(size / each / _LONGEST)), max(1, int(size / each / _SHORTEST)))
    return replace(case, requests=requests, tokens=max(1, round(size / each / requests)))


def compared(
    cases: Iterable[Case], run: Callable[[Case], Result], peers_of: Callable[[Case], Iterable[Peer]]
) -> Iterator[Result]:
    """The result of each cell, beside the peers of its own format and, if that is not bf16, those of the same cell over
    bf16: few libraries have more formats. Of a decode, which is bound by bytes, also those over e4m3: some are slower
    over 8 bits than over 16."""
    for case in cases:
        result = run(case)
        formats = ("bf16",) if case.op == "prefill" else ("fp8_e4m3", "bf16")
        has_twins = result.us is not None and case.format != "bf16"
        twins = [replace(case, format=name, query="bf16") for name in formats if has_twins]
        others = [
            replace(p, name=f"{p.name} on {twin.format}") for twin in twins if twin != case for p in peers_of(twin)
        ]
        yield replace(result, peers=(*result.peers, *others))


def verdict(results: Iterable[Result]) -> dict:
    """Geometric mean and worst of the ratios to the best peer, and which cells these were; of prefills the geometric
    mean of TFLOP/s by format and type of the query."""
    results = list(results)
    ratios = [(ratio, r.case.id) for r in results if (ratio := r.ratio) is not None]
    worst, worst_cell = min(ratios, default=(None, None))
    rates: dict[str, list[float]] = defaultdict(list)
    for r in results:
        if r.case.op == "prefill" and r.us:
            name = r.case.format + f", q {r.case.query}" * (r.case.query != "bf16")
            rates[name].append(r.flops / r.us / 1e6)
    return {
        "cells": len(ratios),
        "geometric_mean": geometric_mean(x for x, _ in ratios) if ratios else None,
        "worst": worst,
        "worst_cell": worst_cell,
        "lost": sum(x < 1 for x, _ in ratios),
        **({"tflop_s": {name: geometric_mean(found) for name, found in sorted(rates.items())}} if rates else {}),
    }
