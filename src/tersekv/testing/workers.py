"""Cases run in processes of their own, so that one that crashes or hangs costs itself only."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from .cases import Case
from .verify import FAILED, Result, run

SECONDS = 300.0  # after which a case is taken for hanging: a first compilation takes some tens
_SECONDS_TO_BEGIN = 120.0  # PyTorch is loaded and the device found
_SECONDS_TO_END = 20.0  # a tool that watches memory writes its report then
Runner = Callable[[Case, str, str | None], Result]


class Workers:
    """A pool. Use as a context manager; leaving it ends the processes."""

    def __init__(
        self, count: int, device: str = "cpu", backend: str | None = None, *, seconds: float = SECONDS,
        runner: Runner = run,
    ) -> None:  # fmt: skip
        self.device, self.backend, self.seconds, self.runner = device, backend, seconds, runner
        self._workers = [_Worker(self) for _ in range(count)]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: Any) -> None:
        for w in self._workers:  # those that wait for a case end by themselves
            w.connection.close()
        for w in self._workers:
            w.end(_SECONDS_TO_END if w.case is None else 0)

    def results(self, cases: Iterable[Case]) -> Iterator[Result]:
        """Of every case, in the order in which they end."""
        waiting, busy = iter(cases), 0
        for w in self._workers:
            busy += w.start(next(waiting, None))
        while busy:
            first = min(w.deadline for w in self._workers if w.case)
            ready = wait([w.connection for w in self._workers if w.case], max(first - time.monotonic(), 0))
            for w in self._workers:
                if w.case is None or not (w.connection in ready or w.deadline <= time.monotonic()):
                    continue
                result = w.take(w.connection in ready)
                if result is not None:
                    busy += w.start(next(waiting, None)) - 1
                    yield result

    def one(self, case: Case) -> Result:
        """Of a single case."""
        return next(self.results([case]))


class _Worker:
    """A process, and the case that it is at."""

    def __init__(self, pool: Workers) -> None:
        self.pool = pool
        self.case: Case | None = None
        self.deadline, self.began = 0.0, False
        self._spawn()

    def _spawn(self) -> None:
        spawn = multiprocessing.get_context("spawn")  # a fork would inherit a device that it cannot use
        self.connection, theirs = spawn.Pipe()
        pool = self.pool
        self.process = spawn.Process(target=_serve, args=(theirs, pool.device, pool.backend, pool.runner), daemon=True)
        with _deaf():
            self.process.start()
        self.began = False
        theirs.close()

    def start(self, case: Case | None) -> bool:
        """Begin a case; returns whether there was one."""
        self.case = case
        if case is None:
            return False
        if not self.process.is_alive():
            self._spawn()
        self._set_deadline()
        with contextlib.suppress(OSError):  # it ended just now: `take` says how
            self.connection.send(case)
        return True

    def _set_deadline(self) -> None:
        self.deadline = time.monotonic() + self.pool.seconds + (0 if self.began else _SECONDS_TO_BEGIN)

    def take(self, ready: bool) -> Result | None:
        """The result of the case; None: the process has just begun. One that gave no result, or says that it cannot go
        on, makes room for another."""
        assert self.case is not None
        result, usable = None, False
        if ready:
            with contextlib.suppress(EOFError, OSError):
                message = self.connection.recv()
                if message is None:
                    self.began = True
                    self._set_deadline()
                    return None
                result, usable = message
        if not usable:
            why = f"no result after {self.pool.seconds:g} s" if not ready else None
            code = self.end(0.5)
            result = result or Result(self.case, self.pool.backend, FAILED, message=why or _ended(code))
            self._spawn()
        return result

    def end(self, seconds: float) -> int | None:
        """End the process, which has so long to end by itself; returns how it ended if it did."""
        self.process.join(seconds)
        code = self.process.exitcode
        if code is None:
            self.process.kill()
            self.process.join()
        self.connection.close()
        return code


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """A process that is started within hears no Ctrl-C, while it loads PyTorch neither: whoever started it ends it."""
    resource_tracker.ensure_running()  # the first process would start it, and that unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(code: int | None) -> str:
    if code is None:
        return "the process gave no result"
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
    return f"the process ended {how}"


def _serve(connection: Connection, device: str, backend: str | None, runner: Runner) -> None:
    """Run what is asked for until nobody asks."""
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        connection.send(None)
        while True:
            result = runner(connection.recv(), device, backend)
            usable = _usable(device)
            connection.send((result, usable))
            if not usable:
                connection.close()
                os._exit(0)  # an orderly exit may wait for the device forever


def _usable(device: str) -> bool:
    """Whether more cases can run here: an error of a kernel leaves nothing to go on with."""
    if torch.device(device).type != "cuda":
        return True
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return False
    return True
