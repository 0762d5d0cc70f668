"""Compile what the calls of a sweep's rows launch, in worker processes: a compiler that dies costs one row.

NOTE: a process compiles for one architecture. Triton keeps for good how the first one converts fp8.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import traceback
from collections.abc import Iterable, Iterator
from itertools import islice
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from compile_tools import compile_launch, record
from sweep_axes import AXES, Row, call_of, covering
from triton.compiler.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from tersekv.backends.host.launch import shared_memory_of
from tersekv.dispatch import plan
from tersekv.errors import UnsupportedError

Arch = int | str


class Outcome(NamedTuple):
    op: str
    row: Row
    kernels: list[tuple[str, str, str]]  # name, what it is specialised on, what went wrong or ""


def planned(op: str, row: Row, arch: Arch) -> tuple[Any, Any, Any]:
    """(run, call, config) as a call on a chip of this kind would get them; raises where it is refused."""
    call, op = call_of(op, row), op.split()[0]
    if isinstance(arch, int):
        p = plan.plan(op, call, arch=arch)
        return p.run, call, p.config
    f = plan.facts(op, call)  # AMD has no number, and the portable kernels only
    plan.checks.facts(f)
    f.device = type("Device", (), {"type": "cuda"})()
    module = importlib.import_module(f"tersekv.backends.triton.{plan._MODULE_OF.get(op, op)}")
    reason = module.why_not(f)
    if reason is not None:
        raise UnsupportedError(reason)
    return module.run, call, module.configure(f)


def possible(op: str, row: Row, arch: Arch) -> bool:
    try:
        planned(op, row, arch)
    except (ValueError, TypeError, UnsupportedError):  # what a caller is told; anything else is a fault
        return False
    return True


def rows_of(op: str, arch: Arch, seed: int, part: float = 1.0) -> tuple[list[Row], set[tuple]]:
    """Rows that hold every pair that is taken on this chip, or a part of them; and the pairs that are refused."""
    refused: set[tuple] = set()
    rows = list(covering(AXES[op], lambda row: possible(op, row, arch), seed, refused))
    return rows[: max(1, round(part * len(rows)))], refused


def first_rows(op: str, arch: Arch, seed: int, n: int) -> list[Row]:
    """The first of them, which hold most pairs."""
    return list(islice(covering(AXES[op], lambda row: possible(op, row, arch), seed, set()), n))


def compile_row(op: str, row: Row, arch: Arch) -> list[tuple[str, str, str]]:
    out = []
    run, call, config = planned(op, row, arch)
    for fn, _, args, kwargs in record(run, call, config):
        key = specialised_on(fn, args, kwargs, arch)
        try:
            with quiet():
                shared = compile_launch(fn, args, kwargs, arch)["shared"]
            fits = isinstance(arch, str) or shared <= shared_memory_of(arch)
            error = "" if fits else f"takes {shared} bytes of shared memory, the chip has {shared_memory_of(arch)}"
        except Exception as e:  # whatever the compiler raises is what is looked for
            error = f"{type(e).__name__}: {str(e).strip().splitlines()[-1:]}"
        out.append((fn.__name__, key, error))
    return out


def specialised_on(fn: Any, args: tuple, kwargs: dict[str, Any], arch: Arch) -> str:
    from compile_tools import target

    backend = make_backend(target(arch))
    _, specialization, options = create_function_from_signature(fn.signature, fn.params, backend)(*args, **kwargs)
    return hashlib.sha256(repr((fn.__name__, specialization, options)).encode()).hexdigest()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The compiler writes whole programs to the process's stderr when it fails."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def sweep(todo: Iterable[tuple[str, Row]], arch: Arch, workers: int = 1) -> Iterator[Outcome]:
    """The kernels of each operation's row, as they come; a worker that dies is replaced, and its row says so."""
    context, left = get_context("spawn"), iter(todo)
    busy: dict[Any, tuple[Any, tuple[str, Row]]] = {}

    def give(pipe: Any, process: Any) -> None:
        item = next(left, None)
        pipe.send(item)
        if item is not None:
            busy[pipe] = process, item

    def start() -> None:
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, arch), daemon=True)
        process.start()
        theirs.close()
        give(mine, process)

    for _ in range(workers):
        start()
    while busy:
        for pipe in wait(list(busy)):
            process, (op, row) = busy.pop(pipe)
            try:
                found = pipe.recv()
            except EOFError:
                process.join()
                found = [(op, repr(row), f"the compiler's process ended: {process.exitcode}")]
                start()
            else:
                give(pipe, process)
            yield Outcome(op, row, found)


def _work(pipe: Connection, arch: Arch) -> None:
    while (item := pipe.recv()) is not None:
        try:
            found = compile_row(*item, arch)
        except Exception:  # a plan that was made once must be made again, and its launches be recorded
            found = [(item[0], repr(item[1]), traceback.format_exc(limit=-2))]
        pipe.send(found)
