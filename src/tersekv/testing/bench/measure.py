"""Clocks, and what the chip itself can do: how fast it copies, and how fast it multiplies.

A GPU is timed inside one CUDA graph of many calls over rotating memory, so that neither the host nor a warm cache
counts; a CPU by the wall.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

Call = Callable[[], object]

REPEATS = 7  # the median of this many counts
MIN_LAUNCHES, MAX_LAUNCHES = 20, 1000
ROUNDS = 3  # at most, of a measurement that is unsteady
MOST_SPREAD, MOST_WAITED = 0.2, 0.1  # beyond these, of two times nothing can be said
_GRAPH_US = 2000.0  # a graph should run as long, so that its own launch does not count
_CPU_SECONDS = 0.3  # aim of one case's measurement on a CPU
_CPU_REPEATS = 3  # at least, where single calls take longer
_HOST_CALLS = 100  # few enough that no launch queue fills
_HOST_WARM_SECONDS = 0.2  # until the processor has its clock: 7 × 100 calls alone take 10 ms


class Timing(NamedTuple):
    """A time, and how far it can be trusted.

    us:      of one call, the median of the runs
    spread:  how far apart the runs are, as a share of `us`; of five and more without the fastest and the slowest
    waited:  share of the time that threads of this process wanted a core and had none; 0 where no system says it. With
             it runs may even agree: all wait for the scheduler's next slice
    """

    us: float
    spread: float = 0.0
    waited: float = 0.0

    @property
    def steady(self) -> bool:
        return self.spread <= MOST_SPREAD and self.waited <= MOST_WAITED

    @staticmethod
    def of(times: Sequence[float], waited: float = 0.0) -> Timing:
        us, ordered = statistics.median(times), sorted(times)
        inner = ordered[1:-1] if len(ordered) >= 5 else ordered
        return Timing(us, (inner[-1] - inner[0]) / us if us else 0.0, waited)


def steadiest(measure: Callable[[], Timing]) -> Timing:
    """A steady measurement, or after so many rounds the steadiest of them."""
    best = measure()
    for _ in range(ROUNDS - 1):
        if best.steady:
            break
        best = min(best, measure(), key=lambda t: (not t.steady, t.spread + t.waited))
    return best


def device_time(calls: Sequence[Call], device: torch.device) -> Timing:
    """Of one call on the device."""
    return _graph_time(calls) if device.type == "cuda" else _wall_time(calls)


def host_time(calls: Sequence[Call], device: torch.device) -> Timing:
    """Time until an eager call returns to the caller, who does not wait for the device."""
    begin = time.perf_counter()
    while time.perf_counter() - begin < _HOST_WARM_SECONDS:
        for call in calls:
            call()
        _synchronize(device)
    times, waits = [], _Waits()
    for _ in range(REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        for i in range(_HOST_CALLS):
            calls[i % len(calls)]()
        times.append((time.perf_counter() - start) / _HOST_CALLS * 1e6)
    _synchronize(device)
    return Timing.of(times, waits.share())


class _Waits:
    """How long the threads of this process waited for a core since this was made, of the time that they wanted one."""

    def __init__(self) -> None:
        self._begin = self._read()

    def share(self) -> float:
        pairs = [(self._begin[task], now) for task, now in self._read().items() if task in self._begin]
        ran, waited = (sum(now[i] - begin[i] for begin, now in pairs) for i in (0, 1))
        return waited / (ran + waited) if waited > 0 else 0.0

    @staticmethod
    def _read() -> dict[str, tuple[int, int]]:
        """Nanoseconds that each thread ran and waited, where the system is Linux and tells."""
        found = {}
        for path in Path("/proc/self/task").glob("*/schedstat"):
            try:
                ran, waited, _ = path.read_text().split()
            except (OSError, ValueError):  # a thread that has ended
                continue
            found[path.parent.name] = int(ran), int(waited)
        return found


def copy_rate(device: torch.device) -> float:
    """Bytes per second, read and written, of a copy that no cache holds; on a busy machine too few."""
    size = int(4e9) if device.type == "cuda" else int(128e6)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    a = torch.ones(size, dtype=torch.uint8, device=device)
    b = torch.empty_like(a)
    return 2 * size / (_repeat_us(lambda: b.copy_(a), device) * 1e-6)


def matmul_rate(device: torch.device) -> float:
    """FLOP per second of a large bf16 product."""
    n = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / (_repeat_us(lambda: torch.mm(a, b, out=out), device) * 1e-6)


def _graph_time(calls: Sequence[Call]) -> Timing:
    for call in calls:  # nothing may be compiled or allocated for good during a capture, whatever the alignment
        call()
    torch.cuda.synchronize()
    launches = _whole_rounds(MIN_LAUNCHES, len(calls))
    us = _captured_time(calls, launches, 1).us
    if us * launches < _GRAPH_US / 2:
        launches = _whole_rounds(min(MAX_LAUNCHES, math.ceil(_GRAPH_US / us)), len(calls))
    return _captured_time(calls, launches, REPEATS)


def _captured_time(calls: Sequence[Call], launches: int, repeats: int) -> Timing:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            calls[i % len(calls)]()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        times.append(_event_us(graph.replay) / launches)
    graph.reset()
    return Timing.of(times)


def _whole_rounds(launches: int, calls: int) -> int:
    """`launches` rounded up, so that every call is made equally often."""
    return math.ceil(launches / calls) * calls


def _event_us(call: Call) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def _wall_time(calls: Sequence[Call]) -> Timing:
    start = time.perf_counter()
    calls[0]()
    once = time.perf_counter() - start
    number = max(1, min(len(calls), int(_CPU_SECONDS / REPEATS / once)))
    times, waits = [], _Waits()
    for repeat in range(REPEATS):
        start = time.perf_counter()
        for i in range(number):
            calls[(repeat * number + i) % len(calls)]()
        times.append((time.perf_counter() - start) / number * 1e6)
        if repeat + 1 >= _CPU_REPEATS and sum(times) * number > _CPU_SECONDS * 1e6:
            break
    return Timing.of(times, waits.share())


def _repeat_us(call: Call, device: torch.device) -> float:
    """Median of single calls."""
    call()
    _synchronize(device)
    if device.type == "cuda":
        return statistics.median(_event_us(call) for _ in range(REPEATS))
    return steadiest(lambda: _wall_time([call])).us


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
