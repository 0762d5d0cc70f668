"""Tests that need a CUDA device. Without one nothing here is collected, and the header says so."""

from __future__ import annotations

import torch

HAS_GPU = torch.cuda.is_available()

if not HAS_GPU:
    collect_ignore_glob = ["test_*.py"]


def pytest_report_header() -> str:
    return "tests/gpu: " + (torch.cuda.get_device_name() if HAS_GPU else "not run, no CUDA device here")
