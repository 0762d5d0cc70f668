"""Tests that compile Triton kernels for GPUs that are not there, and the ones that interpret them on the CPU.

They need Triton (there is none for macOS and Windows). They cannot run in a process with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import triton

    if triton.knobs.runtime.interpret:
        collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def compiled(request, monkeypatch):
    """Calls are planned for a chip and not run: what their kernels would be compiled for."""
    from compile_tools import record, target
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from tersekv.dispatch.plan import plan

    found: set[tuple[str, str, str]] = set()

    def note(op, call, backend, way=None):
        p = plan(op, call, backend, arch=request.param)
        for fn, _, args, kwargs in record(p.run, call, p.config):
            bind = create_function_from_signature(fn.signature, fn.params, make_backend(target(request.param)))
            _, specialization, options = bind(*args, **kwargs)
            found.add((fn.__name__, str(specialization), str(options)))

    for name in ("append", "attention", "mla"):
        monkeypatch.setattr(importlib.import_module(f"tersekv.ops.{name}"), "dispatch_call", note)
    return found
