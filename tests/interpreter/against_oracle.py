"""Runs a case on the Triton backend, in the interpreter, and on the torch oracle, and compares all memory."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tersekv.backends.host import row_programs
from tersekv.dispatch import checks
from tersekv.dispatch.plan import facts
from tersekv.testing.cases import Case, cases
from tersekv.testing.make import make
from tersekv.testing.memory import moved, storage_bytes

WHOLE = 1 << 17  # elements of a program that holds all rows of a small case: the interpreter's cost is the programs'


def write_cases(op: str, *, quick: bool = False) -> list[Case]:
    return list(cases((op,), quick=quick))


def backends(op: str) -> tuple[ModuleType, ModuleType]:
    module = "attention" if op in ("decode", "prefill") else op
    return tuple(importlib.import_module(f"tersekv.backends.{name}.{module}") for name in ("triton", "torch"))


def assert_bytes_equal(op: str, call: Any) -> None:
    """Every byte of every tensor of `call`, written or not, is the same after the two backends have run."""
    triton, torch_ = backends(op)
    other = moved(call, "cpu")
    f = facts(op, call)
    checks.facts(f)
    torch_.run(other, torch_.configure(f))
    triton.run(call, triton.configure(f))
    for name, got, want in zip(call._fields, call, other, strict=True):
        if isinstance(got, Tensor):
            differ = (storage_bytes(got) != storage_bytes(want)).sum().item()
            assert differ == 0, f"{name}: {differ} bytes differ of {storage_bytes(got).numel()}"


def one_program_a_tensor(monkeypatch) -> None:
    monkeypatch.setattr(row_programs, "SMALL", WHOLE)


def check(case: Case) -> None:
    assert_bytes_equal(case.op, make(case))


def assert_close(got: Tensor, want: Tensor, relative: float) -> None:
    """The same infinities and no NaN; the rest within a relative norm."""
    assert not got.isnan().any()
    assert torch.equal(got.isinf(), want.isinf())
    live = want.isfinite()
    got, want = got[live].double(), want[live].double()
    assert (got - want).norm() <= relative * want.norm()
