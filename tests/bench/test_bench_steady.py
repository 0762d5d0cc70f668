"""Times that runs agree on: what is repeated, what is called unsteady, and threads that waited for a core."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tersekv.testing.bench import measure


def test_a_measurement_is_repeated_until_it_is_steady():
    rounds = [measure.Timing(9.0, 0.5), measure.Timing(8.0, 0.1, 0.4), measure.Timing(7.0, 0.1)]
    left = iter(rounds)
    assert measure.steadiest(lambda: next(left)) == rounds[2]
    left = iter([rounds[0], rounds[1], measure.Timing(6.0, 0.3), rounds[2]])
    assert measure.steadiest(lambda: next(left)).us == 6.0  # none was steady: the steadiest of three
    left = iter([rounds[2], rounds[0]])
    assert measure.steadiest(lambda: next(left)).us == 7.0
    assert next(left) == rounds[0], "one round was enough"


def test_spread_is_that_of_the_runs_without_the_outermost():
    assert measure.Timing.of([10.0, 11.0, 10.0, 99.0, 1.0]) == (10.0, pytest.approx(0.1), 0.0)
    assert measure.Timing.of([10.0, 15.0, 10.0]).spread == pytest.approx(0.5)
    assert not measure.Timing.of([10.0, 15.0, 10.0]).steady
    assert measure.Timing.of([10.0] * 7, waited=0.05).steady
    assert not measure.Timing.of([10.0] * 7, waited=0.15).steady


def test_threads_that_wait_for_a_core_are_seen():
    """Equal runs tell nothing where each waits for the scheduler's next slice."""
    if not Path("/proc/self/schedstat").exists():
        assert measure._Waits().share() == 0.0, "Linux alone tells"
        return
    core = {min(os.sched_getaffinity(0))}
    spin = f"import os\nos.sched_setaffinity(0, {core})\nwhile True: pass"
    others = [subprocess.Popen([sys.executable, "-c", spin]) for _ in range(2)]
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, core)
        time.sleep(0.5)
        waits, end = measure._Waits(), time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass
        assert waits.share() > measure.MOST_WAITED
    finally:
        os.sched_setaffinity(0, before)
        for p in others:
            p.kill()
            p.wait()
