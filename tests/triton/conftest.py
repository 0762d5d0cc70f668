"""Tests that compile Triton kernels for GPUs that are not there, and the ones that interpret them on the CPU.

They need Triton (there is none for macOS and Windows). They cannot run in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import triton

    if triton.knobs.runtime.interpret:
        collect_ignore_glob = ["test_*.py"]
