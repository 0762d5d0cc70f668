"""`tersekv doctor`: what is installed, which backends can run here, and why the others cannot."""

from __future__ import annotations

import argparse
import importlib
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata

import torch
from rich import box
from rich.table import Table
from rich.text import Text

from .. import __version__, env
from ..dispatch import plan
from ..testing.cases import OPS, cases
from ..testing.make import make
from .arguments import screen
from .tables import Fitted

_COMPILERS = ("gcc", "clang", "cc")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """There are none."""


def run(args: argparse.Namespace) -> int:
    """Print what there is. Always 0: a machine without a GPU is not ill."""
    console = screen()
    console.print(Fitted(_pairs("versions", versions())))
    console.print(Fitted(_pairs("devices", devices())))
    for device in usable_devices():
        console.print(Fitted(backends(device)))
    console.print(Fitted(_pairs("environment", environment())))
    for hint in (*(text for device in usable_devices() for text in off(device)), *hints()):
        console.print(f"hint: {hint}", markup=False, highlight=False)
    return 0


def versions() -> Iterator[tuple[str, str]]:
    yield "tersekv", __version__
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    yield "torch", torch.__version__
    yield "triton", installed("triton") or "not installed"
    yield "CUDA / HIP of torch", torch.version.cuda or torch.version.hip or "none (CPU build)"
    yield "NVIDIA driver", driver() or "none found"
    yield "C compiler", compiler() or "none found (Triton's launcher needs one)"
    if installed("triton") is not None:
        yield "compiled kernels", compiled_kernels()


def devices() -> Iterator[tuple[str, str]]:
    threads = torch.get_num_threads()
    count = f"{threads} thread{'s' if threads != 1 else ''}"
    native = importlib.import_module("tersekv.backends.cpu.library").load_compiled_library_or_reason()
    kernels = f"native kernels: {'none' if isinstance(native, str) else native.level()}"
    yield "cpu", f"{platform.machine()}, {count}, {torch.backends.cpu.get_cpu_capability()}, {kernels}"
    for i in range(torch.cuda.device_count()):
        p = torch.cuda.get_device_properties(i)
        chip = getattr(p, "gcnArchName", "") if torch.version.hip else f"sm_{p.major}{p.minor}"
        yield f"cuda:{i}", f"{p.name}, {chip}, {p.total_memory / 2**30:.0f} GiB, {p.multi_processor_count} processors"


def usable_devices() -> list[str]:
    return ["cpu", *(["cuda:0"] if torch.cuda.is_available() else [])]


def backends(device: str) -> Table:
    """A row per operation: what each backend says to a plain call in every format."""
    t = _table(f"backends on {device}", "operation", *plan.BACKENDS)
    for op in OPS:
        first = {c.format: make(c, device) for c in reversed(list(cases((op,), quick=True)))}
        cells = []
        for backend in plan.BACKENDS:
            reasons = {name: plan.why_not(plan.facts(op, call), backend) for name, call in first.items()}
            text = support_cell(reasons)
            cells.append(Text(text, style="green" if text == "runs" else ""))
        t.add_row(op, *cells)
    return t


def off(device: str) -> Iterator[str]:
    """Kernels that are made for this device and do not run on it, and the way out."""
    for op in OPS:
        f = plan.facts(op, make(next(cases((op,), quick=True)), device))
        for backend in plan.BACKENDS:
            reason = plan.why_disabled(f, backend)
            if reason is not None:
                yield f"{op}: {backend} {reason}"


def support_cell(reasons: dict[str, str | None]) -> str:
    """One cell, from format → why not: that it runs, or for which formats it does not, and why."""
    refused = {name: reason for name, reason in reasons.items() if reason}
    if not refused:
        return "runs"
    why = next(iter(refused.values()))
    return why if len(refused) == len(reasons) else f"runs, but not {', '.join(refused)}: {why}"


def environment() -> Iterator[tuple[str, str]]:
    for name, value in env.values().items():
        yield name, f"{'unset' if value is None else repr(value)}  ({env.VARIABLES[name]})"


def hints() -> Iterator[str]:
    wanted = env.backend()
    if wanted is not None and wanted not in plan.BACKENDS:
        known = ", ".join(plan.BACKENDS)
        yield f"TERSEKV_BACKEND: want one of {known}, got {wanted!r}; calls that name no backend raise ValueError"
    if installed("triton") is None and platform.system() == "Linux":
        fits = importlib.import_module("tersekv.backends.host.versions").triton_release_of_nearest_torch(
            torch.__version__
        )
        yield f"GPU kernels need Triton; with torch {torch.__version__}: pip install 'triton=={fits}.*'"
    elif torch.cuda.is_available() and compiler() is None:
        yield "Triton compiles a launcher for each kernel: install gcc or clang, or set CC"
    if not torch.cuda.is_available():
        yield "no GPU is seen; everything runs on the CPU"
    native = plan.why_not(plan.facts("merge_states", make(next(cases(("merge_states",))))), "cpu")
    if native is not None:
        yield f"without its native kernels, decode on a CPU takes 3 to 10 times as long: backend cpu {native}"
    yield f"judge the results on this machine: tersekv verify --device {'cuda' if torch.cuda.is_available() else 'cpu'}"


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compiler() -> str | None:
    """The C compiler that Triton would take: $CC, or the first that is found."""
    named = importlib.import_module("triton").knobs.build.cc if installed("triton") else None
    return named or next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def driver() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20)
    except subprocess.TimeoutExpired:
        return "nvidia-smi does not answer"
    return done.stdout.strip() or None if done.returncode == 0 else None


def compiled_kernels() -> str:
    """Where Triton keeps them, and how many there are."""
    folder = importlib.import_module("tersekv.backends.host.compile_only").cache_dir()
    count = sum(1 for _ in folder.glob("*/*.cubin"))
    return f"{folder} (TRITON_CACHE_DIR): {count}"


def _pairs(title: str, pairs: Iterator[tuple[str, str]]) -> Table:
    t = _table(title, "", "")
    t.show_header = False
    for name, value in pairs:
        t.add_row(name, Text(value))
    return t


def _table(title: str, *columns: str) -> Table:
    t = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for i, name in enumerate(columns):
        t.add_column(name, no_wrap=i == 0)
    return t
