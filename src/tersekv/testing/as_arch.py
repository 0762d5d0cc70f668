"""Portable kernels compiled for an older NVIDIA chip, run by a newer one: `tersekv verify --as-arch 80`.

PTX is forward-compatible. Plans are those of the older chip, Triton compiles for it, and ptxas assembles that PTX for
the chip that is present. So the older chip's code paths and PTX are executed; its own machine code (SASS) is not, and
times say nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from .cases import Case
from .verify import Result, run

# Triton gives PTX from sm_90 on the suffix "a", and such PTX is of that chip alone.
ARCHS = (80, 86, 87, 89)


def why_not(arch: int, device: torch.device | str) -> str | None:
    """Why this device cannot run PTX of sm_<arch>; None: it can."""
    where = torch.device(device)
    if where.type != "cuda" or torch.version.hip:
        return f"want an NVIDIA GPU of sm_{arch} or newer, got {where.type if where.type != 'cuda' else 'an AMD GPU'}"
    major, minor = torch.cuda.get_device_capability(where)
    return None if 10 * major + minor >= arch else f"want a GPU of sm_{arch} or newer, got sm_{major}{minor}"


def run_as(case: Case, device: str, backend: str | None, *, arch: int) -> Result:
    """`verify.run` of a case with kernels for sm_<arch>. From here on this process compiles no others."""
    _translate_for_good(arch)
    return run(case, device, backend, arch=arch)


@cache
def _translate_for_good(arch: int) -> Any:
    entered = translated(arch)
    entered.__enter__()
    return entered  # kept: to drop it would end it


@contextmanager
def translated(arch: int) -> Iterator[None]:
    """Within, Triton compiles kernels for sm_<arch>; their PTX is assembled for the active chip and launched on it.

    Plans have to be of the same chip (`dispatch(..., arch=arch)`).
    """
    compiler = importlib.import_module("triton.backends.compiler")
    device = importlib.import_module("triton.runtime.driver").driver.active
    kernels = importlib.import_module("triton.runtime.jit").JITFunction
    target, present, compile_and_run = compiler.GPUTarget("cuda", arch, 32), device.get_current_target, kernels.run
    chip, touched = present(), set()
    assembled: dict[int, Any] = {}  # by id; keeps what it is the id of

    def run_translated(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        if self not in touched:  # it may have been compiled for the chip that is present
            self.device_caches.clear()
            touched.add(self)
        compiled = compile_and_run(self, *args, grid=grid, warmup=True, **options)
        if compiled is not None and id(compiled) not in assembled:
            assembled[id(compiled)] = compiled
            compiled.kernel = assemble(compiled, chip)
        return compile_and_run(self, *args, grid=grid, warmup=warmup, **options)

    device.get_current_target, kernels.run = lambda: target, run_translated
    try:
        yield
    finally:
        device.get_current_target, kernels.run = present, compile_and_run
        for fn in touched:
            fn.device_caches.clear()


def assemble(compiled: Any, chip: Any) -> bytes:
    """Machine code for `chip`, a Triton target, from the PTX of a kernel that Triton compiled for an older one."""
    make_backend = importlib.import_module("triton.compiler.compiler").make_backend
    limit = importlib.import_module("tersekv.backends.host.launch").shared_memory_of(compiled.metadata.target.arch)
    if compiled.metadata.shared > limit:
        resources = importlib.import_module("triton.runtime.errors").OutOfResources
        raise resources(compiled.metadata.shared, limit, "shared memory")
    return make_backend(chip).make_cubin(compiled.asm["ptx"], {}, compiled.metadata, chip.arch)
