"""What every test begins with: one thread a process, since the tests run side by side and small tensors gain nothing
from more; and the same random numbers, whatever ran before it.

TERSEKV_SHARE=1/4: of tests with parameters that compile or interpret kernels, the first of four parts, by name.
`make test` gives the first Triton one part, `make second` the second another; `make versions` gives every Triton all.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
KERNELS = {Path(__file__).parent / name for name in ("gluon", "triton", "interpreter")}


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(config, items) -> None:
    part, parts = map(int, os.environ.get("TERSEKV_SHARE", "1/1").split("/"))
    if not 1 <= part <= parts:
        raise pytest.UsageError(f"TERSEKV_SHARE: want a part such as 2/4, got {part}/{parts}")

    def is_of(item) -> bool:
        # What a file of the interpreter's holds is shared in the process that it runs in; the sweep is a part already.
        shared = hasattr(item, "callspec") and item.path.stem not in ("test_interpreter_suite", "test_compile_sweep")
        return not (shared and item.path.parent in KERNELS) or zlib.crc32(item.nodeid.encode()) % parts == part - 1

    config.hook.pytest_deselected(items=[i for i in items if not is_of(i)])
    items[:] = [i for i in items if is_of(i)]
