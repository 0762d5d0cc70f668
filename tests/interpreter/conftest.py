"""Tests that run Triton kernels on the CPU, in Triton's interpreter, with exact casts.

TRITON_INTERPRET changes what `@triton.jit` returns, so these tests need a process of their own in which it is set
before triton is imported:

    TRITON_INTERPRET=1 python -m pytest tests/interpreter

A plain `pytest` collects nothing here; tests/triton/test_interpreter_suite.py then runs each file of this directory in
such a process, so nothing is left out.
"""

from __future__ import annotations

import triton

INTERPRETED = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    from tersekv.testing import interpret

    interpret.install()
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    return "tests/interpreter: " + (
        "in this process" if INTERPRETED else "run by tests/triton/test_interpreter_suite.py"
    )
