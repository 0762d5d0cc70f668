"""Kernels of cells compiled in processes side by side, before any cell is timed: one alone takes up to 20 s, on one
core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..verify import FAILED, PASSED
from ..verify import Result as Outcome
from ..workers import Workers
from . import engine
from .cases import Case


def compile_ahead(cases: Sequence[Case], device: torch.device, backend: str | None, processes: int) -> int:
    """Calls every case once, in as many processes; returns how many calls ended well. Why others did not is told when
    they are timed."""
    pending: list[Any] = list(cases)
    with Workers(min(processes, len(pending)), str(device), backend, runner=_call_once) as pool:
        return sum(outcome.status == PASSED for outcome in pool.results(pending))


def _call_once(case: Any, device: str, backend: str | None) -> Outcome:
    where = torch.device(device)
    try:
        engine.problem_of(case, where, backend).calls[0]()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        engine.release(where)
    except Exception as e:
        return Outcome(case, backend, FAILED, message=engine.first_line(e))
    return Outcome(case, backend, PASSED)
