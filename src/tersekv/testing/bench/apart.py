"""Cells in another process: a peer that ends it, or that loses the device, costs its own cell and no other."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Any, Self, TypeVar

import torch

from . import engine
from .cases import Case
from .engine import FAILED, Peer, Result, first_line

T = TypeVar("T")


class Apart:
    """`engine.run` and `engine.peers_of` there; after a call that leaves the process unusable there is a new one."""

    def __init__(self) -> None:
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def run(
        self, case: Case, device: torch.device, libraries: Sequence[str] = (), backend: str | None = None
    ) -> Result:
        """Without its peers, and with what happened, if they are what breaks."""
        try:
            return self.call(engine.run, case, device, libraries, backend)
        except Exception as e:
            if not libraries:
                return Result(case, FAILED, reason=first_line(e))
            return replace(self.run(case, device, (), backend), peers=(_lost(e),))

    def peers_of(self, case: Case, device: torch.device, libraries: Sequence[str]) -> tuple[Peer, ...]:
        try:
            return self.call(engine.peers_of, case, device, libraries)
        except Exception as e:
            return (_lost(e),)

    def call(self, fn: Callable[..., T], case: Case, device: torch.device, *args: Any) -> T:
        if self._pool is None:  # a fork would inherit a device that it cannot use
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
        try:
            return self._pool.submit(_call, fn, case, device, *args).result()
        except Exception:
            for process in list((self._pool._processes or {}).values()):
                process.kill()  # an orderly exit may wait for the device forever
            self.__exit__()
            raise


def _lost(e: Exception) -> Peer:
    return Peer("peers", reason=first_line(e))


def _call(fn: Callable[..., T], case: Case, device: torch.device, *args: Any) -> T:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    found = fn(case, device, *args)
    if cuda:
        torch.cuda.synchronize(device)  # raises what a kernel did
    return found
