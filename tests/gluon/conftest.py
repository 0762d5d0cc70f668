"""Tests that compile Gluon kernels for a Hopper GPU that is not there. They need Triton, not interpreted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "triton"))  # compile_tools

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import triton

    if triton.knobs.runtime.interpret:
        collect_ignore_glob = ["test_*.py"]
