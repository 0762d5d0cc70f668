"""Launches that are bound to a list of addresses get what the long way gives them, for every operation and backend."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from drawn import drawn
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from tersekv.backends.host import bind, launch
from tersekv.backends.triton.mla_decode_branch import entry
from tersekv.dispatch import checks, plan
from tersekv.dispatch.signature import FIELD_GETTERS, TENSOR_FIELDS
from tersekv.testing.cases import OPS, cases
from tersekv.testing.make import make

SCRATCH = 1 << 24  # numbers, more than is kept


@pytest.fixture
def launched(monkeypatch):
    """What kernels are launched with: the launcher's arguments, of the first call too. Nothing is compiled."""
    runs: list[tuple] = []

    def first(self, grid, args):
        name = getattr(self.fn, "__name__", str(self.fn))
        self._compiled, self._fixed = object(), (name, *[None] * 5)
        self._run = lambda *args: runs.append(args)
        described = [x for x in args if isinstance(x, TensorDescriptor | GluonDescriptor)]
        encoded = dict(zip(map(id, described), self.launcher_args_of_tensor_maps(described), strict=True))
        values = [encoded.get(id(x), (x.data_ptr() if hasattr(x, "data_ptr") else x,)) for x in args]
        runs.append((*grid, 77, *self._fixed, *(x for one in values for x in one)))

    monkeypatch.setattr(launch.CompiledKernel, "compile_launch_and_keep_launcher", first)
    monkeypatch.setattr(
        launch.CompiledKernel, "launcher_args_of_tensor_maps", lambda self, d: [(x.base.data_ptr(), "box") for x in d]
    )
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: 77, raising=False)
    part = torch.empty(SCRATCH)
    monkeypatch.setattr(launch, "workspace", lambda n, like: part)
    monkeypatch.setattr(bind, "cached_workspace", lambda n, device, stream: part)
    return runs


def prepared(call, op: str, backend: str):
    """The backend's module for this call on Hopper, with its configuration; or None."""
    f = plan.facts(op, call, 90)
    checks.facts(f)
    module = plan._module(backend, op)
    return (module, module.configure(f)) if plan.why_op_cannot(f, module) is None else None


def assert_bound_as_run(op: str, backend: str, launched: list) -> None:
    seen = 0
    # Which address an empty rotary part has is PyTorch's affair; nothing reads it.
    for case in drawn([c for c in cases((op,)) if "no rotary part" not in c.id], 3):
        call = make(case)
        tensors = {n: x for n, x in zip(TENSOR_FIELDS[op], FIELD_GETTERS[op][0](call), strict=True) if x is not None}
        found = prepared(call, op, backend)
        if found is None:
            continue
        module, config = found
        launched.clear()
        module.run(call, config)  # by Triton, which takes tensors
        wanted = list(launched)
        launched.clear()
        module.run(call, config)
        assert launched == wanted, case.id
        launched.clear()
        ready = module.bind(config, {n: i for i, n in enumerate(tensors)})
        if ready is None:
            assert not wanted, case.id  # there is nothing to launch
            continue
        assert ready([x.data_ptr() for x in tensors.values()]), case.id
        assert launched == wanted, case.id
        seen += 1
    assert seen > 3


@pytest.mark.parametrize("op", OPS)
def test_bound_launches_get_what_the_long_way_gives(op, launched):
    assert_bound_as_run(op, "triton", launched)


def assert_unknown_caches_are_refused(backend: str, launched: list) -> None:
    call = make(next(c for c in cases(("decode",), ("fp8_e4m3",)) if c.page == 64))
    module, config = prepared(call, "decode", backend)
    tensors = [x for x in FIELD_GETTERS["decode"][0](call) if x is not None]
    names = [n for n, x in zip(TENSOR_FIELDS["decode"], FIELD_GETTERS["decode"][0](call), strict=True) if x is not None]
    module.run(call, config)
    ready = module.bind(config, {n: i for i, n in enumerate(names)})
    addresses = [x.data_ptr() for x in tensors]
    launched.clear()
    elsewhere = addresses.copy()
    elsewhere[names.index("k_cache")] += 64
    assert not ready(elsewhere)
    assert not launched
    assert ready(addresses)
    assert launched


def test_caches_that_are_not_described_yet_are_not_launched_for(launched):
    assert_unknown_caches_are_refused("triton", launched)


def test_much_scratch_is_not_kept(launched, monkeypatch):
    op = "mla_decode_branch"
    call = make(next(cases((op,))))
    module, config = prepared(call, op, "triton")
    at = {
        n: i
        for i, (n, x) in enumerate(zip(TENSOR_FIELDS[op], FIELD_GETTERS[op][0](call), strict=True))
        if x is not None
    }
    module.run(call, config)
    assert module.bind(config, at) is not None
    monkeypatch.setattr(entry, "_MAX_CACHED_WORKSPACE", 4 * config.launches.workspace.num_floats - 4)
    module, config = prepared(call, op, "triton")
    fresh = torch.empty(config.launches.workspace.num_floats)
    monkeypatch.setattr(bind, "_allocate", lambda n, device, stream: fresh)
    launched.clear()
    for _ in range(2):
        module.run(call, config)
    assert launched[:4] == launched[4:]
    assert module.bind(config, at) is None


def test_nothing_is_bound_before_it_is_compiled():
    template = bind.KernelLaunch(SimpleNamespace(arg_names=["Q"]), (1,), bind.tensor_args(Q="q"))
    assert bind.LaunchSequence(template).bind({"q": 0}) is None


def test_every_argument_is_given_by_its_name():
    fn = SimpleNamespace(arg_names=["Q", "N"], __name__="some_kernel")
    for arguments in ({"Q": 1}, {"Q": 1, "N": 2, "M": 3}):
        with pytest.raises(TypeError, match=f"some_kernel: .*{sorted(arguments.keys() ^ {'Q', 'N'})[0]}"):
            bind.KernelLaunch(fn, (1,), arguments)
