"""Tests that compile Triton kernels for GPUs that are not there. They cannot run under TRITON_INTERPRET=1."""

from __future__ import annotations

import triton

if triton.knobs.runtime.interpret:
    collect_ignore_glob = ["test_*.py"]
