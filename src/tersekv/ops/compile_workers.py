"""Compiles the kernels of calls to come in processes side by side, which need no GPU, into Triton's cache on disk.

Triton compiles in one thread, up to eight seconds a kernel. A planner, a program of its own in which no module of the
caller's runs, gets the calls with meta tensors in place of their own, plans each for the chip, and forks a worker for
each kernel, since importing takes seconds. The first launch in the calling process then finds its kernel on disk.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import env
from ..dispatch import plan
from ..layers import PagedKVLayer, PagedLatentLayer, field_values

_MAX_WORKERS = 16  # a model has few dozen kernels
_ADDRESS_STEP = 1 << 12  # of meta tensors: no two of a call may begin at one address
_PAGED = ("k", "v", "k_scale_cache", "v_scale_cache", "ckv", "kpe", "ckv_scale_cache")
_RESULTS = '{"kernel": ', '{"failed": '  # how a worker's lines begin
_log = logging.getLogger("tersekv")


class Chip(NamedTuple):
    """arch: compute capability times ten."""

    arch: int
    num_sms: int


class Compiled(NamedTuple):
    """What workers did. kernels: names and seconds; failed: why a worker, or a call in one, came to no end."""

    kernels: list[tuple[str, float]]
    failed: list[str]
    seconds: float
    processes: int

    def __str__(self) -> str:
        alone = sum(seconds for _, seconds in self.kernels)
        return (
            f"{len(self.kernels)} kernels compiled in {self.seconds:.1f} s by {self.processes} processes, "
            f"{alone:.1f} s of work"
        )


def chip_of(device: torch.device) -> Chip | None:
    """Returns the chip of a device, None where it is no NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip:
        return None
    p = torch.cuda.get_device_properties(device)
    return Chip(10 * p.major + p.minor, p.multi_processor_count)


def on_meta(x: Any) -> Any:
    """Returns a tensor, or a layer, without memory: equal in dtype, sizes, strides and alignment.

    Of a layer two pages at most: no kernel depends on their number, and engines find it out late.
    """
    if isinstance(x, Tensor):
        return _meta_tensor(x.dtype, tuple(x.shape), x.stride(), x.data_ptr() & 15)
    if isinstance(x, (PagedKVLayer, PagedLatentLayer)):
        values = {n: getattr(x, n) for n in x.__dataclass_fields__}
        few = {n: y[:2] for n, y in values.items() if n in _PAGED and y is not None}
        return replace(x, **{n: on_meta(y) for n, y in {**values, **few}.items()})
    return x


def compile_ahead(
    calls: Sequence[partial],
    chip: Chip,
    *,
    processes: int | None = None,
    cache_dir: Path | None = None,
    say: Callable[[str], None] = _log.info,
) -> Compiled | None:
    """Compile what these calls launch, unless an earlier process has compiled for equal calls.

    calls:      partials of operations over meta tensors (`on_meta`)
    processes:  None: one for each core that this process may use, at most 16
    cache_dir:  Triton's cache; None: that of this process
    say:        gets a line before and after

    Returns None where there was nothing to do. What a worker does not come to is left for the first launch, and logged
    as a warning.
    """
    compile_only: Any = importlib.import_module("tersekv.backends.host.compile_only")
    folder = (compile_only.cache_dir() if cache_dir is None else cache_dir).absolute()
    if compile_only.launch.interpreting():
        return None
    processes = min(processes or _num_cores(), _MAX_WORKERS)
    job = outline((calls, chip))
    triton: Any = importlib.import_module("triton")
    versions = f"{triton.__version__} {torch.__version__} {sys.version} {compile_only.kernel_sources_hash()}"
    made_by = f"{versions} {env.backend()}"  # workers plan as this process does
    done = folder / "tersekv" / f"compiled-{hashlib.sha256(job + made_by.encode()).hexdigest()[:24]}.json"
    with _alone(done):  # the ranks of an engine want the same
        if done.exists():
            return None
        say(f"compiling kernels for sm_{chip.arch} in {processes} processes")
        found = _run_workers(job, processes, folder)
        for reason in found.failed:
            _log.warning("compiling ahead: %s; what is missing is compiled at its first launch", reason)
        say(f"{found}; kept in {folder}")
        if not found.failed:
            _keep(done, found)
    return found


def _num_cores() -> int:
    """Returns the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _run_workers(job: bytes, processes: int, folder: Path) -> Compiled:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="tersekv-compile-") as room:
        (Path(room) / "job").write_bytes(job)
        lines = _run_planner(Path(room), processes, folder)
    kernels = [(line["kernel"], line["seconds"]) for line in lines if "kernel" in line]
    failed = dict.fromkeys(line["failed"] for line in lines if "failed" in line)
    return Compiled(kernels, [*failed], time.perf_counter() - start, processes)


def _run_planner(room: Path, processes: int, folder: Path) -> list[dict]:
    """Returns what `work` wrote, a dict for each kernel and each failure."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from tersekv.ops import compile_workers; "
        f"compile_workers.work({str(room)!r}, {processes})"
    )
    try:
        with open(room / "stderr", "w+") as errors:
            done = subprocess.run(
                [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors,
                text=True, env=env.of_worker(TRITON_CACHE_DIR=str(folder)),
            )  # fmt: skip
            errors.seek(0)
            said = errors.read().strip()
    except OSError as e:
        return [{"failed": f"no process could be started: {e}"}]
    # A compiler that gives up prints its program, which may begin with a brace, too.
    lines = [_result(line) for line in done.stdout.splitlines() if line.startswith(_RESULTS)]
    if done.returncode:
        last = said.splitlines()[-1] if said else "nothing was said"
        lines.append({"failed": f"a process ended with exit code {done.returncode}: {last}"})
    return lines


def _result(line: str) -> dict:
    """Returns a worker's line; they share a pipe, where what a compiler prints may break one."""
    try:
        return json.loads(line)
    except ValueError:
        return {"failed": f"a line that is not whole: {line[:200]}"}


def work(room: str, processes: int) -> None:
    """Plans every call; forks a worker for each kernel, which compiles it and writes a line of JSON.

    room:       folder with `job`
    processes:  workers at a time
    """
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # where the caller ignores it, no child could be waited for
    compile_only: Any = importlib.import_module("tersekv.backends.host.compile_only")
    hashing = threading.Thread(target=compile_only.compute_triton_key)  # reads while the first call imports
    hashing.start()
    calls, chip = pickle.loads((Path(room) / "job").read_bytes())
    plan.absent_arch = chip.arch
    build_utils, build_launcher = compile_only.make_builders_of_utils_and_launchers(Path(room))
    workers = _Workers(processes, hashing.join)

    def compiled(fn: Any, kernel: Any) -> None:
        build_launcher(kernel)
        _write({"kernel": fn.__name__, "seconds": workers.seconds()})
        workers.exit_in_worker()

    with torch.no_grad(), compile_only.compiling(chip.arch, compiled, workers.fork_once, chip.num_sms):
        for call in reversed(calls):  # prompts come last, and their kernels take longest
            try:
                call()
            except Exception as e:  # whatever it is, the call itself will raise it
                first, *rest = str(e).splitlines() or ["nothing was said"]
                said = ";".join([first, *(line for line in rest if line.startswith("  why: "))])
                _write({"failed": f"{call.func.__name__}: {type(e).__name__}: {said}"})
                workers.exit_in_worker()
    if workers.fork_once("what kernels share"):
        build_utils()
        workers.exit_in_worker()
    workers.wait(0)


class _Workers:
    """Forks of this process, which has imported and planned for all of them; it compiles nothing itself, so that no
    compiler's state is forked. Where there is no fork, it compiles everything."""

    def __init__(self, most: int, before_forks: Callable[[], None]) -> None:
        """before_forks: ends what other threads do, which a fork would cut off."""
        self._most, self._planner, self._before_forks = most, os.getpid(), before_forks
        self._known: set[str] = set()
        self._running = 0
        self._start = 0.0

    def fork_once(self, key: str) -> bool:
        """Forks a worker for a key that is new. Returns whether to compile here: True in the worker."""
        if key in self._known:
            return False
        self._known.add(key)
        self._before_forks()
        if hasattr(os, "fork"):
            self.wait(self._most - 1)
            if os.fork():
                self._running += 1
                return False
        self._start = time.perf_counter()
        return True

    def wait(self, most: int) -> None:
        """Waits until `most` workers are left."""
        while self._running > most:
            _, status = os.wait()
            self._running -= 1
            if status:
                _write({"failed": f"a process ended with exit code {os.waitstatus_to_exitcode(status)}"})

    def seconds(self) -> float:
        """Returns how long the worker has run."""
        return time.perf_counter() - self._start

    def exit_in_worker(self) -> None:
        if os.getpid() != self._planner:
            os._exit(0)


def _write(line: dict) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class _Pickler(pickle.Pickler):
    """Pickles tensors as what a plan may depend on."""

    num_tensors = 0

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            self.num_tensors += 1
            address = self.num_tensors * _ADDRESS_STEP + (x.data_ptr() & 15)
            return _meta_tensor, (x.dtype, tuple(x.shape), x.stride(), address)
        if isinstance(x, (PagedKVLayer, PagedLatentLayer)):
            return type(x), tuple(field_values(x))
        return NotImplemented


def outline(x: Any) -> bytes:
    """Returns a pickle that is equal for what is planned alike: tensors in it are meta tensors."""
    file = io.BytesIO()
    _Pickler(file).dump(x)
    return file.getvalue()


def _meta_tensor(dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], address: int) -> Tensor:
    offset = address // dtype.itemsize
    end = offset + 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True) if n > 0)
    return torch.empty(end, dtype=dtype, device="meta").as_strided(shape, stride, offset)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits until no other process is within for this path. Where no file can be locked nobody waits."""
    with ExitStack() as held:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl: Any = importlib.import_module("fcntl")
            fcntl.flock(file, fcntl.LOCK_EX)
        except (OSError, ImportError) as e:  # a folder that cannot be written, a file system or platform without locks
            _log.debug("%s is not locked: %s", path, e)
        yield


def _keep(path: Path, found: Compiled) -> None:
    """Note that these calls are done. An unwritable folder is skipped: the next process asks Triton's cache instead."""
    try:
        path.write_text(json.dumps({"kernels": found.kernels, "seconds": found.seconds}))
    except OSError as e:
        _log.debug("%s is not kept: %s", path, e)
