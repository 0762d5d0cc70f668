"""A kernel of a plan is compiled once, and launched with the same arguments every time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton

from tersekv.backends.host import bind, launch
from tersekv.backends.host.bind import KernelLaunch, LaunchSequence
from tersekv.backends.host.launch import CompiledKernel, workspace
from tersekv.calls import AppendCall
from tersekv.ops import registry

STREAM = 77


class Compiled:
    """Stands for a compiled kernel: records how it is run."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple] = []

    def run(self, *args: Any) -> None:
        self.runs.append(args)


class Call(NamedTuple):
    x: torch.Tensor


class Jitted:
    """Stands for a kernel that Triton compiles, or interprets if there is nothing compiled."""

    __name__ = "some_kernel"

    def __init__(self, compiled: Compiled | None, *arg_names: str) -> None:
        self.compiled, self.arg_names, self.launches = compiled, arg_names, []

    def __getitem__(self, grid):
        def launch(*args, **options):
            self.launches.append((grid, args, options))
            return self.compiled

        return launch


@pytest.fixture(autouse=True)
def _a_stream(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)


def test_the_second_call_runs_what_the_first_compiled():
    """With arguments in the kernel's order, whatever the order in which they were given."""
    compiled = Compiled()
    jitted = Jitted(compiled, "X", "NOTHING", "strides", "CODES", "N", "FORMAT", "FLAG")
    call = SimpleNamespace(x=torch.zeros(4), none=None, codes=torch.zeros(4, dtype=torch.float8_e4m3fn))
    numbers = {"FLAG": True, "FORMAT": "fp8", "N": 3, "strides": (1, 2)}
    tensors = bind.tensor_args(CODES="codes") | bind.tensor_args(bind.BYTES, X="x", NOTHING="none")
    template = KernelLaunch(jitted, (7,), numbers | tensors | bind.tensor_args(bind.BYTES, CODES="codes"), num_warps=4)
    for _ in range(3):
        template(call)
    ((grid, args, options),) = jitted.launches
    assert grid == (7, 1, 1)
    assert options.items() >= {"num_warps": 4}.items()
    assert args[0] is call.x
    assert args[1] is None
    assert args[2] == (1, 2)
    assert args[3].dtype == triton.language.uint8
    assert args[3].data_ptr() == call.codes.data_ptr()
    assert args[4:] == (3, "fp8", True)
    numbers = (call.x.data_ptr(), None, (1, 2), call.codes.data_ptr(), 3, "fp8", True)
    run = (7, 1, 1, STREAM + 3, "function", "metadata", None, None, None, *numbers)
    assert compiled.runs == [run, run]


@pytest.mark.parametrize("kind", [KernelLaunch, LaunchSequence])
def test_later_calls_launch_with_their_own_tensors(kind):
    compiled = Compiled()
    template = KernelLaunch(
        Jitted(compiled, "NOTHING", "N", "X"), (7,), {"N": 3, **bind.tensor_args(NOTHING="none", X="x")}
    )
    launches = template if kind is KernelLaunch else LaunchSequence(template)
    for x in (torch.zeros(4), torch.ones(4), torch.ones(4)):
        launches(SimpleNamespace(none=None, x=x))
        assert not compiled.runs or compiled.runs[-1][-3:] == (None, 3, x.data_ptr())
    assert len(compiled.runs) == 2


def test_a_row_of_a_tensor_is_bound_by_what_lies_before_it():
    compiled, x = Compiled(), torch.arange(6, dtype=torch.int32).view(3, 2)
    jitted = Jitted(compiled, "ROW", "ALL")
    launches = LaunchSequence(
        KernelLaunch(jitted, (7,), bind.tensor_args(ALL="x") | {"ROW": bind.TensorArg("x", row=2)})
    )
    for _ in range(2):
        launches(SimpleNamespace(x=x))
    assert jitted.launches[0][1][0].tolist() == [4, 5]
    assert compiled.runs[0][-2:] == (x[2].data_ptr(), x.data_ptr())


def test_descriptors_go_where_the_kernel_wants_them(monkeypatch):
    """As many arguments as each is encoded to, and encoded once for tensors at the same places."""
    compiled, made = Compiled(), []
    monkeypatch.setattr(
        CompiledKernel,
        "launcher_args_of_tensor_maps",
        lambda self, d: made.append(d) or [(x, "box", "rows") for x in d],
    )
    jitted = Jitted(compiled, "X", "K", "N", "V", "Y")
    arguments = {
        "N": 3,
        "K": bind.TensorMapArg("k", lambda x: ("of", x)),
        "V": bind.TensorMapArg("v", lambda x: ("of", x)),
    }
    launches = LaunchSequence(KernelLaunch(jitted, (7,), arguments | bind.tensor_args(X="x", Y="y")))
    x, y, k, v, other = (torch.zeros(4) for _ in range(5))
    for second in (v, v, other, v):
        launches(SimpleNamespace(x=x, y=y, k=k, v=second))
        if len(jitted.launches) == 1 and not compiled.runs:
            assert jitted.launches[0][1] == (x, ("of", k), 3, ("of", v), y)
            continue
        numbers = (x.data_ptr(), ("of", k), "box", "rows", 3, ("of", second), "box", "rows", y.data_ptr())
        assert compiled.runs[-1][-9:] == numbers
    assert made == [(("of", k), ("of", v)), (("of", k), ("of", other))]


def test_so_many_descriptors_are_kept_and_no_more(monkeypatch):
    monkeypatch.setattr(CompiledKernel, "launcher_args_of_tensor_maps", lambda self, d: [(x,) for x in d])
    monkeypatch.setattr(bind, "_MAX_TENSOR_MAPS", 2)
    template = KernelLaunch(Jitted(Compiled(), "X"), (7,), {"X": bind.TensorMapArg("x", id)})
    launches, tensors = LaunchSequence(template), [torch.zeros(4) for _ in range(4)]
    for x in (*tensors, *tensors):
        launches(SimpleNamespace(x=x))
        assert len(template.prepared) <= 2


def test_places_of_a_scratch_lie_apart_and_are_bound_from_its_beginning(monkeypatch):
    scratch_of = bind.Workspace(3, {"A": ((2, 2), torch.bfloat16), "B": None, "C": ((5,), torch.int8)})
    memory = torch.zeros(scratch_of.num_floats)
    monkeypatch.setattr(launch, "workspace", lambda n, like: memory)
    monkeypatch.setattr(bind, "cached_workspace", lambda n, device, stream: memory)
    jitted, compiled = Jitted(None, "PART", "A", "B", "C"), Compiled()
    jitted.compiled = compiled
    launches = LaunchSequence(
        KernelLaunch(jitted, (7,), bind.tensor_args(PART=bind.WORKSPACE, A="A", B="B", C="C")), workspace=scratch_of
    )
    call = Call(torch.zeros(1))
    for _ in range(2):
        launches(call)
    ((_, (part, a, b, c), _),) = jitted.launches
    assert part is memory
    assert (a.shape, a.dtype, b, c.shape, c.dtype) == ((2, 2), torch.bfloat16, None, (5,), torch.int8)
    assert compiled.runs[0][-4:] == (memory.data_ptr(), memory.data_ptr() + 256, None, memory.data_ptr() + 512)


class OnCuda:
    """Stands for a tensor on a CUDA device."""

    is_cuda, device = True, torch.device("cpu")

    @staticmethod
    def get_device() -> int:
        return 0


def test_scratch_is_kept_by_stream_and_thread_and_a_capture_gets_its_own(monkeypatch):
    state = {"stream": 5, "capturing": False}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: state["stream"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state["capturing"], raising=False)
    take = partial(workspace, like=OnCuda())
    first = take(100)
    assert take(60) is first
    assert first.numel() >= 100
    assert take(200).numel() >= 200
    first = take(100)
    state["stream"] = 6
    assert take(100) is not first
    state["stream"] = 5
    assert take(100) is first
    with ThreadPoolExecutor(1) as other:
        assert other.submit(take, 100).result() is not first
    state["capturing"] = True
    assert take(100) is not first


def test_a_registered_operator_keeps_no_scratch_of_a_side_stream(monkeypatch):
    state = {"stream": 0}
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda i: state["stream"], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    taken = []
    monkeypatch.setattr(registry, "dispatch", lambda *call: taken.append(workspace(100, OnCuda())))
    operator = registry._implementation("append")
    for state["stream"] in (0, 7, 0, 7):
        operator(*AppendCall._fields, None)
    assert taken[2] is taken[0]
    assert taken[3] is not taken[1]


def test_the_interpreter_compiles_nothing_and_runs_every_time():
    jitted = Jitted(None, "X")
    launches = LaunchSequence(KernelLaunch(jitted, (1,), bind.tensor_args(X="x")))
    for _ in range(2):
        launches(SimpleNamespace(x=torch.zeros(1)))
    assert len(jitted.launches) == 2
    assert launches.bind({"x": 0}) is None
