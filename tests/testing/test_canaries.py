"""Nothing is written beside: guard zones around all memory of a call and its scratch, and inputs left as they were."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace

import pytest
import torch

from tersekv.calls import CALLS
from tersekv.dispatch import plan
from tersekv.testing import canaries, memory
from tersekv.testing import verify as tool
from tersekv.testing.cases import OPS, Case, cases
from tersekv.testing.make import make

CASES = {op: next(cases((op,), quick=True)) for op in OPS}
OTHERS = ("decode/fp8_e4m3", "append/nvfp4", "rope_append/int8_per_token_head", "mla_append/fp8_ds_mla")
CASES |= {name: next(cases((name.split("/")[0],), (name.split("/")[1],), quick=True)) for name in OTHERS}


@pytest.fixture
def guarded(monkeypatch):
    """The guarded call of the latest `tool.run`."""
    seen = []

    class Seen(canaries.Guarded):
        def __init__(self, *args):
            super().__init__(*args)
            seen.append(self)

    monkeypatch.setattr(tool, "Guarded", Seen)
    return seen


def after(monkeypatch, do) -> None:
    """The oracle, and then a fault."""
    real = plan.dispatch

    def run(op, call, backend=None, arch=None):
        real(op, call, backend)
        do(call)

    monkeypatch.setattr(tool, "dispatch", run)


def poke(address: int) -> None:
    """Change one byte of the process's memory, as a kernel would."""
    byte = ctypes.c_uint8.from_address(address)
    byte.value ^= 1


def tensors(case: Case) -> list[str]:
    call = make(case)
    return [n for n, x in zip(call._fields, call, strict=True) if isinstance(x, torch.Tensor) and x.numel()]


@pytest.mark.parametrize("name", CASES)
def test_a_byte_beside_any_tensor_is_found_and_the_tensor_named(name, guarded, monkeypatch):
    case = CASES[name]
    for field in tensors(case):
        for where in ("before", "after"):

            def stray(call, field=field, where=where):
                (buffer,) = [b for b in guarded[-1]._buffers.values() if field in b.name.split(", ")]
                base = buffer.whole.data_ptr()
                poke(base + (buffer.start - 1 if where == "before" else buffer.stop))

            after(monkeypatch, stray)
            result = tool.run(case, "cpu", "torch")
            assert result.status == tool.FAILED, (field, where)
            (line,) = result.message.splitlines()
            assert field in line.partition(":")[0].split(", ")
            assert f"want no byte written beside its memory, got 1 bytes {where} it, the nearest" in line


@pytest.mark.parametrize("name", CASES)
def test_an_input_that_is_changed_is_found_and_named(name, monkeypatch):
    case = CASES[name]
    inputs = [n for n in tensors(case) if n not in CALLS[case.op][1]]
    assert inputs
    for field in inputs:
        after(monkeypatch, lambda call, field=field: poke(getattr(call, field).data_ptr()))
        result = tool.run(case, "cpu", "torch")
        assert result.status == tool.FAILED, field
        assert f"{field}: want it unchanged, got 1 bytes of its memory overwritten" in result.message.splitlines()


def fake(monkeypatch, run) -> None:
    """A backend by the name of the oracle."""
    module = SimpleNamespace(why_not=lambda f: None, configure=lambda f: None, run=run)
    monkeypatch.setattr(plan, "_module", lambda backend, op="": module)
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(plan, "_recent", {})


KEPT = "tersekv.backends.host.launch"
MADE = {
    "empty": lambda out: torch.empty(out.shape, device=out.device),
    "new_empty": lambda out: out.new_empty(out.shape, dtype=torch.float32),
    "empty_like": lambda out: torch.empty_like(out, dtype=torch.float32),
    "kept": lambda out: (
        pytest.importorskip(KEPT).cached_workspace(out.numel(), out.device, 0)[: out.numel()].view(out.shape)
    ),
}


@pytest.mark.parametrize("how", MADE)
def test_scratch_that_is_read_before_it_is_written_shows_in_the_result(how, monkeypatch):
    MADE[how](make(CASES["decode"]).out).zero_()  # an earlier call left its scratch behind

    def lazy(call, config):
        call.out.copy_(MADE[how](call.out))
        if call.lse is not None:
            call.lse.zero_()

    fake(monkeypatch, lazy)
    result = tool.run(CASES["decode"], "cpu", "torch")
    assert result.status == tool.FAILED
    assert "out: want finite values, got nan" in result.message


@pytest.mark.parametrize("how", MADE)
@pytest.mark.parametrize("where", ["before", "after"])
def test_a_byte_beside_scratch_is_found_and_the_scratch_named(how, where, monkeypatch):
    real = plan._module("torch", "decode")

    def run(call, config):
        part = MADE[how](call.out)
        poke(part.data_ptr() - 1 if where == "before" else part.data_ptr() + part.numel() * part.itemsize)
        real.run(call, real.configure(plan.facts("decode", call)))

    fake(monkeypatch, run)
    result = tool.run(CASES["decode"], "cpu", "torch")
    assert result.status == tool.FAILED
    assert result.message.startswith("scratch of ")
    assert f"got 1 bytes {where} it, the nearest" in result.message


def test_kept_scratch_is_given_back_after_a_case():
    launch = pytest.importorskip(KEPT)
    before = launch.cached_workspace(8, torch.device("cpu"), 0)
    guarded = canaries.Guarded(make(CASES["append"]), "cpu")
    with guarded.scratch():
        inside = launch.cached_workspace(8, torch.device("cpu"), 0)
        assert inside.data_ptr() != before.data_ptr()
        assert inside.isnan().all()
    assert launch.cached_workspace(8, torch.device("cpu"), 0).data_ptr() != inside.data_ptr()
    assert guarded.strays() == []


@pytest.mark.parametrize("name", CASES)
def test_a_guarded_call_is_the_call(name):
    """Strides, sharing and bytes; it begins where a GPU's allocation could, and what has no address has none."""
    given = make(CASES[name])
    guarded = canaries.Guarded(given, "cpu")
    for copy in (guarded.call, guarded.back()):
        homes: dict[int, int] = {}
        for x, y in zip(given, copy, strict=True):
            if not isinstance(x, torch.Tensor):
                assert x == y
                continue
            assert (x.stride(), x.shape, x.dtype) == (y.stride(), y.shape, y.dtype)
            assert torch.equal(memory.as_bytes(x), memory.as_bytes(y))
            mine, its = x.untyped_storage().data_ptr(), y.untyped_storage().data_ptr()
            assert homes.setdefault(mine, its) == its
            assert (mine == 0) == (its == 0)
    for x, y in zip(given, guarded.call, strict=True):
        if isinstance(x, torch.Tensor) and x.numel():
            assert (y.data_ptr() - x.storage_offset() * x.itemsize) % canaries.ALIGNED == 0
