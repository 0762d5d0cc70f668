"""Where kernels are launched they are only compiled, for a chip that need not be there.

What is compiled lies in Triton's cache on disk, under the key of the chip's own launch: that finds it there.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton

from . import launch


@contextmanager
def compiling(
    arch: int,
    on_compiled: Callable[[Any, Any], None],
    should_compile: Callable[[str], bool] | None = None,
    num_sms: int = launch.absent_num_sms,
) -> Iterator[None]:
    """Within, no kernel is launched, and each is compiled for sm_<arch>.

    on_compiled:     called with (kernel, what Triton made of it) after each
    should_compile:  whether to compile a kernel, by a key that is equal in all processes; None: all of them
    num_sms:         of the chip, where plans are made on tensors of no GPU
    """
    compiler = importlib.import_module("triton.backends.compiler")
    driver = importlib.import_module("triton.runtime.driver").driver
    kernels = importlib.import_module("triton.runtime.jit").JITFunction
    target, device = compiler.GPUTarget("cuda", arch, 32), -arch
    previous_driver, run, sms = driver._active, kernels.run, launch.absent_num_sms

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        if should_compile is None or should_compile(_specialization_hash(self, device, args, options)):
            on_compiled(self, run(self, *args, grid=grid, warmup=True, **options))

    # It answers for the chip, under a number that no device has.
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: device, get_current_stream=lambda _: 0
        )
    )
    kernels.run, launch.absent_num_sms = compile_only, num_sms
    try:
        yield
    finally:
        driver._active, kernels.run, launch.absent_num_sms = previous_driver, run, sms


def make_builders_of_utils_and_launchers(
    folder_for_libcuda_stub: Path,
) -> tuple[Callable[[], None], Callable[[Any], None]]:
    """Returns two functions: one compiles the C code that all kernels share, one the C function which launches a
    kernel.

    They are linked with CUDA's driver: where there is none, with an empty library in `folder_for_libcuda_stub`. Python
    cannot load them then; they lie in the cache for a machine that can.
    """
    nvidia = importlib.import_module("triton.backends.nvidia.driver")
    try:
        nvidia.libcuda_dirs()
    except (AssertionError, OSError, subprocess.SubprocessError):
        stub = folder_for_libcuda_stub / "libcuda.so.1"
        subprocess.run(
            [_c_compiler_path_or_raise(), "-shared", "-x", "c", os.devnull, "-o", stub], check=True, capture_output=True
        )
        triton.knobs.nvidia.libcuda_path = str(folder_for_libcuda_stub)

    def build(make: Callable[..., Any], *args: Any) -> None:
        with suppress(ImportError):  # compiled, kept, and not loaded
            make(*args)

    def build_launcher(kernel: Any) -> None:
        if hasattr(nvidia, "make_launcher"):  # newer Tritons: one launcher, among what all kernels share
            build(nvidia.CudaLauncher, kernel.src, kernel.metadata)

    return partial(build, nvidia.CudaUtils), build_launcher


def compute_triton_key() -> None:
    """Hashes Triton's own files, a part of every kernel's key: processes forked after it need not."""
    key = getattr(importlib.import_module("triton.runtime.cache"), "triton_key", None)  # elsewhere in older releases
    if key is not None:
        key()


def _c_compiler_path_or_raise() -> str:
    found = triton.knobs.build.cc or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        raise OSError("want a C compiler: install gcc or clang, or set CC")
    return found


def cache_dir() -> Path:
    """Returns the folder of Triton's cache on disk."""
    return Path(triton.knobs.cache.dir)


@cache
def kernel_sources_hash() -> str:
    """Returns a hash of the kernels' sources and of what plans them."""
    found = hashlib.sha256()
    backends = Path(__file__).parent.parent
    for folder in ("gluon", "host", "triton"):
        for path in sorted((backends / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _specialization_hash(fn: Any, device: int, args: tuple, options: dict[str, Any]) -> str:
    """Returns what Triton compiles a kernel anew for, as a hash."""
    bind = fn.device_caches[device][-1]
    _, specialization, bound_options = bind(*args, **options)
    return hashlib.sha256(f"{fn.__module__}.{fn.__name__} {specialization} {bound_options}".encode()).hexdigest()
