"""A kernel of a plan is compiled once, and launched with the same arguments every time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton

from tersekv.backends.triton.launch import Launch, Prepared

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
    prepared = Prepared(jitted, 7, ((1, 2), 3), ("fp8", True), num_warps=4)
    for _ in range(3):
        prepared(x, None, codes)
    ((grid, args, options),) = jitted.launches
    assert grid == (7, 1, 1)
    assert options == {"num_warps": 4}
    assert args[0] is x
    assert args[1] is None
    assert args[2].dtype == triton.language.uint8
    assert args[2].data_ptr() == codes.data_ptr()
    rest = args[3:]
    assert rest == ((1, 2), 3, "fp8", True)
    run = (7, 1, 1, STREAM + 3, "function", "metadata", None, None, None, x.data_ptr(), None, codes.data_ptr(), *rest)
    assert compiled.runs == [run, run]


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
