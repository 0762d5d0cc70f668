"""Tests that run Triton kernels on the CPU, in Triton's interpreter, with exact casts.

TRITON_INTERPRET changes what `@triton.jit` returns, so these tests need a process of their own in which it is set
before triton is imported:

    TRITON_INTERPRET=1 python -m pytest tests/interpreter

A plain `pytest` collects nothing here; tests/triton/test_interpreter_suite.py then runs each file of this directory in
such a process, so nothing is left out.
"""

from __future__ import annotations

import importlib.util

import pytest

INTERPRETED = False
if importlib.util.find_spec("triton") is not None:
    import triton

    INTERPRETED = bool(triton.knobs.runtime.interpret)

if INTERPRETED:
    import interpret

    interpret.install()
else:
    collect_ignore_glob = ["test_*.py"]


def pytest_configure(config: pytest.Config) -> None:
    # NumPy warns of what GPUs do without a word: 1 / 0, 0 * inf.
    config.addinivalue_line("filterwarnings", "ignore::RuntimeWarning:triton.runtime.interpreter")


def pytest_report_header() -> str:
    where = "in this process" if INTERPRETED else "in processes of their own, by tests/triton"
    return f"tests/interpreter: {where}"
