"""What every test begins with: one thread a process, since the tests run side by side and small tensors gain nothing
from more; and the same random numbers, whatever ran before it."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    torch.manual_seed(0)
