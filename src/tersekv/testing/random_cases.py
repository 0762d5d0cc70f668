"""`tersekv verify --random`: cases that nobody listed, judged like the listed ones; a failure is made smaller."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from random import SystemRandom

import torch

from .case_text import text_of
from .draw import draw
from .shrink import shrunk
from .verify import FAILED, UNSUPPORTED, Result, run
from .workers import Runner, Workers

_MOST_SHRUNK = 5  # of a run: a common fault has hundreds of cases


def any_seed() -> int:
    return SystemRandom().randrange(10**6)


def workers_for(device: str) -> int:
    """Processes that keep a device busy: a core each, on which references are worked out; one is left to the pool."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return cores if torch.device(device).type == "cpu" else max(cores - 1, 1)


def results(
    count: int,
    seed: int,
    device: str = "cpu",
    backend: str | None = None,
    *,
    ops: Sequence[str] | None = None,
    formats: Sequence[str] | None = None,
    workers: int | None = None,
    runner: Runner = run,
) -> Iterator[Result]:
    """One for each of `count` cases, in the order in which they end; a failure is that of the smallest case found."""
    failed: list[Result] = []
    try:
        with Workers(min(workers or workers_for(device), count), device, backend, runner=runner) as pool:
            for r in pool.results(draw(seed, i, ops, formats) for i in range(count)):
                if r.status == FAILED:
                    failed.append(r)
                else:
                    yield r
            for _ in range(min(len(failed), _MOST_SHRUNK)):
                smallest = _smallest(pool, failed[0])
                del failed[0]
                yield smallest
    except KeyboardInterrupt:
        yield from failed
        raise
    yield from failed


def _smallest(pool: Workers, failure: Result) -> Result:
    last = failure

    def fails(case) -> bool:
        nonlocal last
        r = pool.one(case)
        alike = r.status == FAILED and _kind(r) == _kind(failure)
        last = r if alike else last
        return alike

    shrunk(failure.case, fails)
    return last


def _kind(failure: Result) -> str:
    """The same fault, or another: by the kind of error, or the name of what is wrong."""
    return failure.message.split(":", 1)[0]


def summary(found: Iterable[Result]) -> dict:
    """Counts by operation, format and backend, what failed, and why cases are unsupported: for a file that is kept."""
    counts: dict[str, Counter[str]] = {}
    worst: dict[str, float] = {}
    failures, reasons = [], Counter[str]()
    for r in found:
        key = f"{r.case.op}/{r.case.format}/{r.backend}"
        counts.setdefault(key, Counter())[r.status] += 1
        worst[key] = max(worst.get(key, 0.0), r.error or 0.0)
        if r.status == FAILED:
            failures.append({"case": text_of(r.case), "message": r.message})
        if r.status == UNSUPPORTED:
            reasons[f"{r.case.op}: {r.message}"] += 1
    total = sum(counts.values(), Counter[str]())
    rows = {key: {**counts[key], "error": worst[key]} for key in sorted(counts)}
    return {"total": dict(total), "cases": rows, "failures": failures, "unsupported": dict(reasons.most_common())}
