"""On a GPU: what a kernel writes beside a buffer or its scratch is seen, and scratch is poisoned at every call."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tersekv.backends.host import launch
from tersekv.dispatch import plan
from tersekv.testing import canaries
from tersekv.testing import verify as tool
from tersekv.testing.cases import Case
from tersekv.testing.make import make

# Long enough that the work is cut, and parts of it wait in scratch.
CASE = Case("decode", "fp8_e4m3", "cut", lens=(4000, 17), dim=128, heads=2)


@triton.jit
def stray(X, offset):
    tl.store(X + offset, 1.0)


def kept_scratch() -> torch.Tensor:
    """What kernels were given, by whichever way the call went."""
    ((_, scratch),) = launch._workspaces.by_stream.values()
    return scratch


def after(monkeypatch, do) -> None:
    real = plan.dispatch

    def run(op, call, backend=None, arch=None):
        real(op, call, backend)
        do(call)

    monkeypatch.setattr(tool, "dispatch", run)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("what", ["out", "scratch"])
def test_a_store_beside_is_found(what, where, monkeypatch):
    def beside(call):
        x = call.out if what == "out" else kept_scratch()
        stray[(1,)](x, -1 if where == "before" else x.numel())

    after(monkeypatch, beside)
    result = tool.run(CASE, "cuda", "triton")
    assert result.status == tool.FAILED
    assert result.message.startswith(what)
    assert f"bytes {where} it, the nearest" in result.message


def test_kept_scratch_is_poisoned_at_every_call_and_begins_aligned():
    for _ in range(2):
        guarded = canaries.Guarded(make(CASE), "cuda")
        with guarded.scratch():
            part = launch.workspace(1000, guarded.call.q)
            assert part.isnan().all()
            assert part.data_ptr() % canaries.ALIGNED == 0
            part.zero_()
        assert guarded.strays() == []


@pytest.mark.parametrize("backend", ["triton", "gluon"])
def test_the_kernels_themselves_write_nothing_beside(backend):
    result = tool.run(CASE, "cuda", backend)
    assert result.status in (tool.PASSED, tool.UNSUPPORTED), result.message
    assert result.status == tool.PASSED or torch.cuda.get_device_capability() != (9, 0)
