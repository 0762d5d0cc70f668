"""A kernel of a plan is compiled once, and launched with the same arguments every time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import triton

from tersekv.backends.host.launch import TENSOR, Launch, Prepared, Template, scratch

STREAM = 77


class Compiled:
    """Stands for a compiled kernel: records how it is run."""

    function, packed_metadata = "function", "metadata"

    def __init__(self) -> None:
        self.runs: list[tuple] = []

    def run(self, *args: Any) -> None:
        self.runs.append(args)


class Jitted:
    """Stands for a kernel that Triton compiles, or interprets if there is nothing compiled."""

    def __init__(self, compiled: Compiled | None) -> None:
        self.compiled, self.launches = compiled, []

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
    compiled = Compiled()
    jitted = Jitted(compiled)
    x, codes = torch.zeros(4), torch.zeros(4, dtype=torch.float8_e4m3fn)
    template = Template(jitted, (7,), (TENSOR, TENSOR, (1, 2), TENSOR, 3, "fp8", True), num_warps=4)
    for _ in range(3):
        template(x, None, codes)
    ((grid, args, options),) = jitted.launches
    assert grid == (7, 1, 1)
    assert options.items() >= {"num_warps": 4}.items()
    assert args[0] is x
    assert args[1] is None
    assert args[2] == (1, 2)
    assert args[3].dtype == triton.language.uint8
    assert args[3].data_ptr() == codes.data_ptr()
    assert args[4:] == (3, "fp8", True)
    numbers = (x.data_ptr(), None, (1, 2), codes.data_ptr(), 3, "fp8", True)
    run = (7, 1, 1, STREAM + 3, "function", "metadata", None, None, None, *numbers)
    assert compiled.runs == [run, run]


def test_later_calls_launch_with_their_own_tensors():
    compiled = Compiled()
    template = Template(Jitted(compiled), (7,), (TENSOR, 3, TENSOR))
    for x in (torch.zeros(4), torch.ones(4), torch.ones(4)):
        template(None, x)
        assert not compiled.runs or compiled.runs[-1][-3:] == (None, 3, x.data_ptr())
    assert len(compiled.runs) == 2


def test_prepared_tensors_come_first():
    compiled, x = Compiled(), torch.zeros(4)
    prepared = Prepared(Jitted(compiled), (7, 2), (1, 2), ("constant",))
    for _ in range(2):
        prepared(None, x)
    numbers = (None, x.data_ptr(), 1, 2, "constant")
    assert compiled.runs == [(7, 2, 1, STREAM + 3, "function", "metadata", None, None, None, *numbers)]


def test_descriptors_go_where_the_kernel_wants_them():
    compiled = Compiled()
    jitted = Jitted(compiled)
    template = Template(jitted, (7,), (TENSOR, 3, TENSOR), descriptors_at=1, fp8_as_bytes=False)
    x, y = torch.zeros(4), torch.zeros(4, dtype=torch.float8_e4m3fn)
    template(x, y, descriptors=("k", "v"))
    assert jitted.launches[0][1] == (x, "k", "v", 3, y)
    for _ in range(2):
        template(x, y, descriptors=("box", "rows", "columns"))
        assert compiled.runs[-1][-6:] == (x.data_ptr(), "box", "rows", "columns", 3, y.data_ptr())


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
    take = partial(scratch, like=OnCuda())
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


def test_a_launch_takes_tensors_by_their_addresses():
    compiled, x = Compiled(), torch.zeros(4)
    launch = Launch(Jitted(compiled))
    for _ in range(3):
        launch((2,), 1, x, None)
    assert [r[-3:] for r in compiled.runs] == [(1, x.data_ptr(), None)] * 2


def test_a_grid_of_each_call():
    compiled = Compiled()
    launch = Launch(Jitted(compiled), num_warps=2)
    for n in (5, 6):
        launch((n, 2), "arg")
    assert compiled.runs == [(6, 2, 1, STREAM + 3, "function", "metadata", None, None, None, "arg")]


def test_the_interpreter_compiles_nothing_and_runs_every_time():
    jitted = Jitted(None)
    prepared = Prepared(jitted, 1, (), ())
    prepared(torch.zeros(1))
    prepared(torch.zeros(1))
    assert len(jitted.launches) == 2
