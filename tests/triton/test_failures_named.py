"""Whatever fails in a launch, the error bears the kernel's name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_hooks import Compiled, Jitted, knobs

from tersekv.backends.host import bind, launch
from tersekv.backends.host.versions import Launcher

__all__ = ["knobs"]  # the fixture


@triton.jit
def wrong_kernel(X, N: tl.constexpr):
    tl.static_assert(N == 2, "want two")
    tl.store(X, N)


@pytest.fixture(autouse=True)
def _a_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)


def named(e: Any) -> str:
    return e.value.kernel


def test_a_kernel_that_does_not_compile(knobs):
    template = bind.KernelLaunch(wrong_kernel, (1,), bind.tensor_args(X="x") | {"N": 3})
    for _ in range(2):  # it is tried again
        with pytest.raises(triton.compiler.errors.CompileTimeAssertionFailure, match="want two") as e:
            template(SimpleNamespace(x=torch.zeros(4)))
        assert named(e) == "wrong_kernel"
        assert not template.launch.compiled


class Refusing:
    """A launcher that works once."""

    launch_cooperative_grid = launch_pdl = False

    def __init__(self) -> None:
        self.launched = 0

    def __call__(self, *args: Any) -> None:
        self.launched += 1
        if self.launched > 1:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")


@pytest.mark.parametrize("bound", [False, True])
def test_a_launch_that_the_driver_refuses(bound):
    template = bind.KernelLaunch(Jitted(Compiled(Refusing())), (1,), bind.tensor_args(X="x") | {"N": 3})
    launches, call = bind.LaunchSequence(template), SimpleNamespace(x=torch.zeros(4))
    launches(call)
    ready = launches.bind({"x": 0})
    assert ready is not None
    with pytest.raises(RuntimeError, match="invalid argument") as e:
        ready([call.x.data_ptr()]) if bound else launches(call)
    assert named(e) == "some_kernel"


def test_a_descriptor_that_the_driver_refuses():
    def refuse(*args):
        raise RuntimeError("Triton Error [CUDA]: invalid argument")

    one = launch.CompiledKernel(SimpleNamespace(__name__="some_kernel"))
    one._launcher = Launcher(print, (), 0, refuse)
    one._compiled = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=[{}]))
    with pytest.raises(RuntimeError, match="invalid argument") as e:
        one.launcher_args_of_tensor_maps([SimpleNamespace()])
    assert named(e) == "some_kernel"
