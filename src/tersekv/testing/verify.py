"""Runs every case on a device and judges what comes out against the references of this package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch

from ..dispatch.plan import dispatch, plan
from ..errors import UnsupportedError
from . import reference
from .canaries import Guarded
from .cases import Case, cases
from .compare import compare
from .make import make
from .memory import moved

PASSED, FAILED, UNSUPPORTED = "passed", "failed", "unsupported"


@dataclass(frozen=True, slots=True)
class Result:
    """One case. error: relative norm of an attention, share of elements that differ of an append. bound: the largest
    error that is accepted of this case."""

    case: Case
    backend: str | None
    status: str
    error: float | None = None
    message: str = ""
    bound: float | None = None

    def as_dict(self) -> dict:
        return {**asdict(self), "case": self.case.id}


def verify(
    device: torch.device | str = "cpu",
    backend: str | None = None,
    *,
    ops: tuple[str, ...] | None = None,
    formats: tuple[str, ...] | None = None,
    quick: bool = False,
) -> Iterator[Result]:
    """Run the cases one by one. `backend` None: the one that a call without a name gets on this device."""
    for case in cases(ops, formats, quick=quick):
        yield run(case, device, backend)


def run(
    case: Case, device: torch.device | str = "cpu", backend: str | None = None, *, zones: bool = True,
    arch: int | None = None,
) -> Result:  # fmt: skip
    """Run one case. An error that is no UnsupportedError is a failure, with the error as its message.

    zones:  lay guard zones around all memory; without them, a tool that watches memory sees what is read beside it
    arch:   the chip that is planned for, as in `plan`; None: the device's own
    """
    chosen = backend
    try:
        want = make(case)
        if zones:
            guarded = Guarded(want, device)
            chosen = plan(case.op, guarded.call, backend, arch=arch).backend
            with guarded.scratch():
                dispatch(case.op, guarded.call, backend, arch=arch)
            strays, got = guarded.strays(), guarded.back()
        else:
            call, strays = moved(want, device), []
            chosen = dispatch(case.op, call, backend, arch=arch).backend
            got = moved(call, "cpu")
        report = compare(case.op, got, want, reference.run(case.op, want, got))
    except UnsupportedError as e:
        return Result(case, chosen, UNSUPPORTED, message=_reason(e, backend))
    except Exception as e:  # the other cases are to run
        return Result(case, chosen, FAILED, message=f"{type(e).__name__}: {e}")
    message = "\n".join([*strays, *([report.message] if report.message else [])])
    return Result(case, chosen, FAILED if message else PASSED, report.error, message, report.bound)


def _reason(e: UnsupportedError, backend: str | None) -> str:
    """The reasons without the headline, which names every shape."""
    return "; ".join(line.strip() for line in str(e).splitlines()[1:])
