"""`Launch` compiles once and passes the same arguments every time."""

from __future__ import annotations

import torch
import triton

from tersekv.backends.triton.launch import Launch


class Kernel:
    """Stands for a jitted kernel, or for a compiled one: records what it is launched with."""

    def __init__(self, compiled: Kernel | None = None) -> None:
        self.compiled, self.calls = compiled, []

    def __getitem__(self, grid):
        def launch(*args, **kwargs):
            self.calls.append((grid, args, kwargs))
            return self.compiled

        return launch


def test_the_second_call_launches_what_the_first_compiled():
    fast = Kernel()
    slow = Kernel(fast)
    x, codes = torch.zeros(4), torch.zeros(4, dtype=torch.float8_e4m3fn)
    launch = Launch(slow, 7, ((1, 2), 3), ("fp8", True), num_warps=4)
    for _ in range(3):
        launch(x, None, codes)
    assert len(slow.calls) == 1
    assert len(fast.calls) == 2
    grid, args, options = slow.calls[0]
    assert grid == (7, 1, 1)
    assert options == {"num_warps": 4}
    assert args[0] is x
    assert args[1] is None
    assert args[2].dtype == triton.language.uint8
    assert args[2].data_ptr() == codes.data_ptr()
    assert args[3:] == ((1, 2), 3, "fp8", True)
    assert fast.calls[0] == ((7, 1, 1), (x.data_ptr(), None, codes.data_ptr(), *args[3:]), {})


def test_the_interpreter_compiles_nothing_and_runs_every_time():
    slow = Kernel(None)
    launch = Launch(slow, 1, (), ())
    launch(torch.zeros(1))
    launch(torch.zeros(1))
    assert len(slow.calls) == 2
