"""Kernels compiled for an older chip and assembled for a newer one; without a GPU they are made, and not run."""

from __future__ import annotations

import re
import subprocess
import tempfile
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from tersekv.backends.host import launch
from tersekv.cli import main
from tersekv.cli import verify as command
from tersekv.dispatch import plan
from tersekv.testing import as_arch
from tersekv.testing import verify as tool
from tersekv.testing.cases import Case, cases
from tersekv.testing.make import make

HOPPER = GPUTarget("cuda", 90, 32)
ONE_OF_EACH = {
    c.op: c for c in reversed(list(cases(formats=("bf16", "fp8_e4m3"), quick=True))) if plan._has_op("triton", c.op)
}


@contextmanager
def a_hopper():
    """A driver that answers for sm_90 without a device. Yields what was compiled; launches do nothing."""
    kernels: list = []
    driver = SimpleNamespace(
        get_current_target=lambda: HOPPER, get_current_device=lambda: -1, get_current_stream=lambda device: 0
    )
    was, run = triton.runtime.driver._active, JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        if warmup:
            kernels.append(run(self, *args, grid=grid, warmup=True, **options))
            return kernels[-1]
        kernels[-1].launched = self.device_caches[-1][0]
        return None

    triton.runtime.driver.set_active(driver)
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        triton.runtime.driver._active, JITFunction.run = was, run


def chip_of(cubin: bytes) -> str:
    """The chip whose machine code it is."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        path = triton.knobs.nvidia.cuobjdump.path
        told = subprocess.run([path, "-elf", file.name], check=True, capture_output=True, text=True).stdout
    return re.search(r"\bsm=(\w+)", told)[1]


def compiled(case: Case, arch: int) -> list:
    """The kernels of a case, as `dispatch(..., arch=arch)` would launch them on a Hopper GPU."""
    call = make(case)
    with a_hopper() as kernels, as_arch.translated(arch):
        p = plan.plan(case.op, call, "triton", arch=arch)
        p.run(call, p.config)
    assert kernels
    return kernels


@pytest.mark.parametrize("arch", [80, 89])
@pytest.mark.parametrize("op", ONE_OF_EACH)
def test_ptx_is_of_the_older_chip_and_its_code_of_the_newer(op, arch):
    for kernel in compiled(ONE_OF_EACH[op], arch):
        assert re.search(rf"^\.target sm_{arch}$", kernel.asm["ptx"], re.MULTILINE)
        assert (chip_of(kernel.kernel), chip_of(kernel.asm["cubin"])) == ("90a", str(arch))
        assert kernel in kernel.launched.values(), "what was assembled is what a launch finds"


@pytest.mark.parametrize(("arch", "by_instruction"), [(80, False), (89, True)])
def test_fp8_is_converted_as_the_older_chip_does(arch, by_instruction):
    (kernel, *_) = compiled(next(cases(("decode",), ("fp8_e4m3",))), arch)
    assert ("e4m3x2" in kernel.asm["ptx"]) == by_instruction
    assert "cp.async.bulk.tensor" not in kernel.asm["ptx"]


def test_a_kernel_that_the_older_chip_has_no_shared_memory_for_is_an_error(monkeypatch):
    monkeypatch.setattr(launch, "shared_memory_of", lambda arch: 0)
    with pytest.raises(OutOfResources):
        compiled(ONE_OF_EACH["decode"], 80)


def test_kernels_are_compiled_for_the_chip_itself_before_and_after():
    kernel = triton.jit(_nothing)
    with a_hopper() as kernels:
        kernel.run(0, grid=(1,), warmup=True)
        with as_arch.translated(80):
            kernel.run(0, grid=(1,), warmup=True)
        kernel.run(0, grid=(1,), warmup=True)
    targets = [k.metadata.target.arch for k in kernels]
    assert (targets[0], targets[-1]) == (90, 90)
    assert set(targets[1:-1]) == {80}


def _nothing(n):
    pass


def test_a_case_is_planned_for_the_chip_that_it_is_run_as(monkeypatch):
    asked = []
    real = plan.plan
    monkeypatch.setattr(tool, "plan", lambda *a, arch: asked.append(arch) or real(*a))
    monkeypatch.setattr(tool, "dispatch", lambda *a, arch: asked.append(arch) or plan.dispatch(*a))
    tool.run(ONE_OF_EACH["append"], "cpu", "torch", arch=80)
    assert asked == [80, 80]
    for op, case in ONE_OF_EACH.items():
        assert plan.plan(op, make(case), arch=80).backend == "triton", "also where none is named"


@pytest.mark.parametrize(
    ("capability", "why"),
    [((9, 0), None), ((8, 0), "want a GPU of sm_89 or newer, got sm_80"), ((8, 9), None)],
)
def test_an_older_chip_than_that_is_refused(monkeypatch, capability, why):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert as_arch.why_not(89, "cuda") == why


def test_the_command_says_what_it_wants(capsys):
    told = "tersekv verify: --as-arch 80: want an NVIDIA GPU of sm_80 or newer, got cpu\n"
    assert main.main(("verify", "--device", "cpu", "--as-arch", "80")) == 2
    assert capsys.readouterr().err == told
    told = "tersekv verify: --as-arch 80: want it with --backend triton or none, got gluon\n"
    assert main.main(("verify", "--device", "cpu", "--as-arch", "80", "--backend", "gluon")) == 2
    assert capsys.readouterr().err == told


def test_a_report_and_what_failed_name_the_chip():
    failed = tool.Result(ONE_OF_EACH["append"], "triton", tool.FAILED, message="wrong")
    assert "again: tersekv verify --as-arch 80 --case '" in command.failures([failed], 80)[0]
    assert command.table([failed], "cpu", 80).title.endswith("on cpu, kernels for sm_80")
    assert command.environment("cpu", 80)["as_arch"] == "sm_80"
    assert "as_arch" not in command.environment("cpu")
