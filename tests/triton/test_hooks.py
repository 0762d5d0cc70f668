"""Hooks of Triton's: those of the compiler get what they can write down, those of launches are called at every one."""

from __future__ import annotations

import importlib
import json
import pkgutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from compile_tools import record, target
from drawn import drawn
from triton.compiler import CompiledKernel, LazyDict
from triton.runtime.jit import JITFunction

from tersekv.backends.host import bind, launch
from tersekv.dispatch import checks, plan
from tersekv.testing.cases import OPS, cases
from tersekv.testing.make import make

# tests/gluon/test_hooks_gluon.py sees it.
OF_HOPPER = {"tersekv.backends.triton.parts.listed_rows.compact_visible_listed_rows_kernel"}
DEVICE, STREAM = 90, 77  # a number that no device has: Triton keeps what it compiled by it


@pytest.fixture
def knobs(monkeypatch):
    """Triton's hooks on a machine that seems to have a Hopper GPU; as they were afterwards."""
    driver = SimpleNamespace(
        get_current_device=lambda: DEVICE,
        get_current_stream=lambda device: STREAM,
        get_current_target=lambda: target(90),
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    with triton.knobs.runtime.scope(), triton.knobs.compilation.scope():
        yield triton.knobs
    assert not (*launch.enter_hooks.calls, *launch.exit_hooks.calls)
    assert not launch.hooks_replaced()


def launches(backend: str, ops: tuple[str, ...] = tuple(OPS)) -> Any:
    """(module, call, configuration) of every case that the backend takes on Hopper."""
    for op in ops:
        for case in drawn(cases((op,)), 3):
            call, module = make(case), plan._module(backend, op)
            if module is None:
                continue
            # Those of batch invariance have kernels of their own, and so have wide rows of scores.
            either = [call, call._replace(batch_invariant=True)] if hasattr(call, "batch_invariant") else [call]
            if hasattr(call, "prefill_invariant") and not any(x is not None for x in (call.mask, call.k, call.indices)):
                pages = -(-4096 // call.k_cache.shape[1])  # more than one split of its keys
                table = torch.zeros(len(call.seq_lens), pages, dtype=torch.int32)
                either.append(call._replace(prefill_invariant=True, page_table=table))
            if op == "index_topk" and call.scores.dim() == 2:
                either.append(call._replace(scores=torch.empty(call.scores.shape[0], 1 << 16)))
            for call in either:
                f = plan.facts(op, call, 90)
                checks.facts(f)
                if plan.why_op_cannot(f, module) is None:
                    yield module, call, module.configure(f)


def assert_hooks_get_json(backend: str, knobs: Any) -> set[str]:
    """Every kernel of every case is shown to a hook before it is compiled, with all constants as JSON; their names."""
    seen: set[str] = set()

    def hook(*, fn, compile, **more):
        data = json.loads(compile["specialization_data"])
        given = {tuple(k): x for k, x in zip(data["constant_keys"], data["constant_vals"], strict=True)}
        for path, value in compile["constants"].items():
            assert json.dumps(given[path]) == json.dumps(value), (fn.name, path)
            assert not isinstance(value, dict) or value.keys() == given[path].keys() == vars(value).keys()
        seen.add(f"{fn.module}.{fn.jit_function.__name__}")
        return True  # it is not to be compiled

    knobs.runtime.jit_cache_hook = hook
    for module, call, config in launches(backend):
        module.run(call, config)
    return seen


def kernels(backend: str) -> set[str]:
    package = importlib.import_module(f"tersekv.backends.{backend}")
    modules = [importlib.import_module(m.name) for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
    found = {f"{x.__module__}.{x.__name__}" for m in modules for x in vars(m).values() if isinstance(x, JITFunction)}
    return {name for name in found if name.endswith("_kernel") and name.startswith(package.__name__)}


def test_a_hook_gets_the_constants_of_every_kernel_as_json(knobs):
    assert assert_hooks_get_json("triton", knobs) >= kernels("triton") - OF_HOPPER


def assert_hooks_see_a_compilation(backend: str, op: str, knobs: Any) -> None:
    events: list[tuple] = []
    knobs.runtime.jit_cache_hook = lambda *, fn, **more: events.append(("before", fn.jit_function.__name__))
    knobs.runtime.jit_post_compile_hook = lambda *, fn, compile, **more: events.append(
        ("after", fn.jit_function.__name__, len(json.loads(compile["specialization_data"])["constant_vals"]) > 0)
    )
    knobs.compilation.listener = lambda *, src, metadata, metadata_group, times, cache_hit: events.append(
        ("listener", src.name, metadata["target"].arch)
    )
    module, call, config = next(launches(backend, (op,)))
    for fn, grid, args, options in record(module.run, call, config):
        events.clear()
        fn.warmup(*args, grid=grid, **options)
        name = fn.__name__
        assert events == [("before", name), ("listener", name, 90), ("after", name, True)]


@pytest.mark.parametrize("op", ["append", "decode", "mla_decode"])
def test_hooks_see_a_compilation(op, knobs):
    assert_hooks_see_a_compilation("triton", op, knobs)


class Launcher:
    """Stands for Triton's launcher of a compiled kernel: calls hooks where it is told to, as the real one does."""

    launch_cooperative_grid = launch_pdl = False
    global_scratch_size = profile_scratch_size = 0

    def __init__(self, events: list) -> None:
        self.events = events

    def __call__(self, x, y, z, stream, function, packed, told, enter, leave, *args):
        for hook, what in ((enter, None), (None, args), (leave, None)):
            if what is not None:
                self.events.append(("launch", (x, y, z), stream, function, packed, what))
            elif hook is not None:
                hook(told)

    def launch(self, x, y, z, stream, function, cooperative, pdl, scratch, profile, packed, *more):
        """In C, of Triton 3.6."""
        assert (cooperative, pdl, scratch, profile) == (False, False, None, None)
        self(x, y, z, stream, function, packed, *more)


class CudaLauncher(Launcher):
    """By its name and Triton's version it is known what to call instead."""


LAUNCHERS = (Launcher, CudaLauncher) if triton.__version__.startswith("3.6.") else (Launcher,)


class Compiled:
    """Stands for a compiled kernel."""

    name, function, packed_metadata, src = "some_kernel", 4711, (4, 1, 0), None
    launch_metadata = CompiledKernel.launch_metadata

    def __init__(self, run: Launcher) -> None:
        self.run = run

    def _init_handles(self) -> None:
        """It is loaded."""


class Jitted:
    """Stands for a kernel that Triton compiles and launches the first time."""

    __name__, arg_names = "some_kernel", ("X", "N")

    def __init__(self, kernel: Compiled) -> None:
        self.kernel = kernel

    def __getitem__(self, grid):
        def first(*args, **options):
            k, runtime = self.kernel, triton.knobs.runtime
            told = k.launch_metadata(grid, STREAM, *args)
            numbers = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in args]
            hooks = runtime.launch_enter_hook, runtime.launch_exit_hook
            k.run(*grid, STREAM, k.function, k.packed_metadata, told, *hooks, *numbers)
            return k

        return first


class Ways:
    """A kernel with one tensor, launched by its template, or bound to addresses."""

    def __init__(self, bound: bool, launcher: type[Launcher]) -> None:
        self.events: list[tuple] = []
        self.x, self.bound = torch.zeros(4), bound
        arguments = bind.tensor_args(X="x") | {"N": 3}
        self.template = bind.KernelLaunch(Jitted(Compiled(launcher(self.events))), (7, 2), arguments)

    def __call__(self) -> list[tuple]:
        """Launch; what happened."""
        self.events.clear()
        ready = bind.bind_to_address_list_if_compiled([self.template] * 2, {"x": 0}) if self.bound else None
        if ready is None:
            self.template(SimpleNamespace(x=self.x))
            self.template.cached_launcher_args_without_addresses(SimpleNamespace(x=self.x))
        else:
            assert ready([self.x.data_ptr()])
        return [*self.events]

    def enter(self, told: Any) -> None:
        self.events.append(("enter", told))

    def leave(self, told: Any) -> None:
        self.events.append(("exit", told))

    def launched(self) -> tuple:
        return "launch", (7, 2, 1), STREAM, 4711, (4, 1, 0), (self.x.data_ptr(), 3)


TOLD = {"name": "some_kernel", "function": 4711, "stream": STREAM}


@pytest.fixture(params=[(b, x) for b in (False, True) for x in LAUNCHERS])
def ways(request, knobs, monkeypatch) -> Ways:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM, raising=False)
    return Ways(*request.param)


def test_launch_hooks_are_called_at_every_launch(ways, knobs):
    runtime = knobs.runtime
    runtime.launch_enter_hook.add(ways.enter)
    runtime.launch_exit_hook.add(ways.leave)
    try:
        for n in range(4):
            events = ways()
            assert len(events) == 3 * (1 + (ways.bound and n > 0))
            for enter, launched, leave in zip(events[::3], events[1::3], events[2::3], strict=True):
                assert launched == ways.launched()
                assert (enter[0], leave[0]) == ("enter", "exit")
                assert enter[1] is leave[1]
                assert isinstance(enter[1], LazyDict)
                assert enter[1].get() == TOLD
    finally:
        runtime.launch_enter_hook.remove(ways.enter)
        runtime.launch_exit_hook.remove(ways.leave)
    assert set(ways()) == {ways.launched()}


def test_hooks_may_come_and_go_between_launches(ways, knobs):
    chain = knobs.runtime.launch_exit_hook
    for _ in range(3):
        assert set(ways()) == {ways.launched()}
    chain.add(ways.leave)
    events = ways()
    chain.remove(ways.leave)
    assert [e[0] for e in events] == ["launch", "exit"] * (len(events) // 2)
    assert set(ways()) == {ways.launched()}


def test_a_function_may_stand_where_the_chain_did(ways, knobs):
    for _ in range(2):
        ways()
    knobs.runtime.launch_enter_hook = ways.enter
    assert [(e[0], e[1].get()) for e in ways() if e[0] == "enter"] == [("enter", TOLD)] * (1 + ways.bound)
    knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook = None, ways.leave
    assert {e for e in ways() if e[0] != "launch"} == {("exit", None)}  # as Triton has it
    del knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    assert set(ways()) == {ways.launched()}


def test_other_hooks_cost_a_launch_nothing(ways, knobs, monkeypatch):
    def tell(*args):
        raise AssertionError("nobody listens to launches")

    monkeypatch.setattr(launch.CompiledKernel, "set_hook_args", tell)
    knobs.runtime.jit_post_compile_hook = print  # lies where a replaced chain would
    for _ in range(3):
        assert set(ways()) == {ways.launched()}
