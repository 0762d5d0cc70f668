"""An error of the compiler or the driver reaches the caller as one that says which call met it, and what to try."""

from __future__ import annotations

import pickle
import subprocess

import pytest
import torch

import tersekv
from tersekv.dispatch import kernel_errors, launch_cache, plan
from tersekv.testing import verify as judge
from tersekv.testing.cases import cases

BF = torch.bfloat16


class Broken:
    """A backend whose kernel fails."""

    def __init__(self, error: Exception, backend: str) -> None:
        self.error, self.backend = error, backend

    def plan(self, op, call, backend=None, **more):
        return plan.Plan(self.backend, self.run, None, None)

    def run(self, call, config):
        raise self.error


@pytest.fixture
def broken(monkeypatch):
    def with_error(error: Exception, kernel: str | None = "some_kernel", backend: str = "gluon") -> Exception:
        if kernel is not None:
            error.kernel = kernel
        monkeypatch.setattr(plan, "plan", Broken(error, backend).plan)
        return error

    return with_error


def decode() -> torch.Tensor:
    layer = tersekv.PagedKVCache.allocate(1, 4, 16, 2, 64, format="fp8_e4m3", layout="HND")[0]
    q, table = torch.zeros(1, 4, 64, dtype=BF), torch.zeros(1, 4, dtype=torch.int32)
    return tersekv.decode(q, layer, table, torch.ones(1, dtype=torch.int32))


def test_the_message_says_the_call_the_kernel_the_cause_and_what_to_try(broken):
    e = broken(RuntimeError("PassManager::run failed\nmore"))
    with pytest.raises(tersekv.KernelError) as raised:
        decode()
    assert raised.value.__cause__ is e
    head, call, versions, why, advice = str(raised.value).splitlines()
    assert head == "decode on cpu by backend gluon: kernel some_kernel cannot be compiled or launched"
    assert call.startswith("  call: q [1, 4, 64] bfloat16, k_cache [4, 16, 2, 64] float8_e4m3fn strides [2048, 64,")
    assert call.endswith("seq_lens [1] int32, out [1, 4, 64] bfloat16; fp8_e4m3")
    assert f"torch {torch.__version__}" in versions
    assert why == "  why: RuntimeError: PassManager::run failed"
    assert advice == (
        "  try: another release of Triton; or backend='triton' (or TERSEKV_BACKEND=triton); "
        "or backend='torch' (or TERSEKV_BACKEND=torch), the slow reference"
    )


def nested() -> Exception:
    outer = RuntimeError("at 12:4:\n    x = f(y)\n        ^")
    outer.__cause__ = TypeError("Cannot bitcast\n  data")
    return outer


class PTXASError(Exception):
    """As Triton's: the text is in a field."""

    error_message = "Internal Triton PTX codegen error\n`ptxas` stderr:\nptxas fatal   : Unresolved extern\n"


class OutOfResources(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "why", "advice"),
    [
        (nested(), "TypeError: Cannot bitcast", "another release of Triton; or backend="),
        (PTXASError(), "PTXASError: Internal Triton PTX codegen error: ptxas fatal   : Unresolved extern", "another"),
        (OutOfResources("out of resource: shared memory"), "OutOfResources: out of resource: shared mem", "another"),
        (RuntimeError("Failed to find C compiler. Please"), "RuntimeError: Failed to find C", "install a C compiler"),
        (subprocess.CalledProcessError(1, ["/usr/bin/gcc", "main.c"]), "CalledProcessError: Comm", "install a C comp"),
        (AssertionError("libcuda.so cannot found!"), "AssertionError: libcuda.so", "name the folder of the driver's"),
        (PermissionError(13, "denied", "/x/.triton"), "PermissionError: [Errno 13]", "name a folder that can be"),
        (RuntimeError("Triton Error [CUDA]: out of memory"), "RuntimeError: Triton", "free memory of the device"),
        (RuntimeError("Triton Error [CUDA]: misaligned address"), "RuntimeError: Triton", "a new process, with CUDA"),
        (RuntimeError("Triton Error [CUDA]: invalid argument"), "RuntimeError: Triton", "another release"),
        (AssertionError(), "AssertionError", "another release of Triton"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_what_to_try_follows_the_cause(error, why, advice, broken):
    broken(error, backend="triton")
    with pytest.raises(tersekv.KernelError) as raised:
        decode()
    *_, said, tried = str(raised.value).splitlines()
    assert said.startswith(f"  why: {why}")
    assert tried.startswith(f"  try: {advice}")
    # No other backend helps a device that is lost or full.
    assert ("backend='torch'" in tried) == ("misaligned" not in said and "out of memory" not in said)
    assert "backend='triton'" not in tried


def test_what_fails_before_a_kernel_is_named(broken):
    broken(AssertionError("strides must be 16-byte aligned"), kernel=None)
    with pytest.raises(tersekv.KernelError, match="backend gluon: its kernels cannot be launched\n"):
        decode()


@pytest.mark.parametrize(
    ("error", "backend"),
    [(torch.OutOfMemoryError("full"), "gluon"), (RuntimeError("of PyTorch"), "torch"), (KeyboardInterrupt(), "gluon")],
    ids=["memory", "the oracle", "Ctrl-C"],
)
def test_what_is_not_of_kernels_passes(error, backend, broken):
    broken(error, backend=backend)
    with pytest.raises(type(error)) as raised:
        decode()
    assert raised.value is error


def test_it_can_be_sent_to_another_process(broken):
    broken(RuntimeError("no"))
    with pytest.raises(tersekv.KernelError) as raised:
        decode()
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (type(copy), str(copy)) == (tersekv.KernelError, str(raised.value))


def test_under_torch_compile(broken):
    compiled = torch.compile(decode, backend="eager", fullgraph=True)
    broken(RuntimeError("no"))
    with pytest.raises(tersekv.KernelError, match=r"^decode on cpu by backend gluon: kernel some_kernel"):
        compiled()


def test_in_warm_up(broken):
    cache = tersekv.PagedKVCache.allocate(1, 4, 16, 2, 64, format="nvfp4")
    broken(RuntimeError("no"))
    with pytest.raises(tersekv.KernelError, match=r"(?s)^append on cpu .* slot_mapping .*; nvfp4\n.*why: Runtime"):
        tersekv.warm_up(cache, 4)


def test_verify_shows_it_as_a_failure(broken, monkeypatch):
    broken(RuntimeError("no"))
    monkeypatch.setattr(judge, "plan", plan.plan)
    result = judge.run(next(cases(("decode",))))
    assert result.status == judge.FAILED
    assert result.message.startswith("KernelError: decode on cpu by backend gluon: kernel some_kernel cannot")


def test_a_call_like_one_before_says_as_much(monkeypatch):
    """Its launches have nothing but addresses."""
    willing = [True]

    def launch(addresses):
        if not willing[0]:
            e = RuntimeError("Triton Error [CUDA]: invalid argument")
            e.kernel = "some_kernel"
            raise e
        return True

    for home in (plan, launch_cache):
        monkeypatch.setattr(home, "_recent", {})
    monkeypatch.setattr(plan, "_plans", {})
    monkeypatch.setattr(launch_cache, "_launches", {})
    monkeypatch.setattr(plan._module("torch", "merge_states"), "bind", lambda config, at: launch, raising=False)
    monkeypatch.setitem(kernel_errors._FALLBACK_ADVICE, "torch", ())
    outs, lses = torch.zeros(2, 3, 4, 64, dtype=BF), torch.zeros(2, 3, 4)
    for _ in range(2):
        tersekv.merge_states(outs, lses, backend="torch")
    willing[0] = False
    with pytest.raises(tersekv.KernelError) as raised:
        tersekv.merge_states(outs, lses, backend="torch")
    head, call, _, why, _ = str(raised.value).splitlines()
    assert head == "merge_states on cpu by backend torch: kernel some_kernel cannot be compiled or launched"
    assert call == "  call: outs [2, 3, 4, 64] bfloat16, lses [2, 3, 4] float32"
    assert why == "  why: RuntimeError: Triton Error [CUDA]: invalid argument"
