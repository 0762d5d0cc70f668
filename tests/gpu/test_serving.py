"""The example engine under a captured CUDA graph: a batch makes what each request makes alone."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "examples" / "continuous_batching.py"


@pytest.mark.parametrize(
    "format", ["bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head"]
)
def test_continuous_batching(format, monkeypatch):
    spec = importlib.util.spec_from_file_location("continuous_batching", PATH)
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, example)  # dataclasses look their module up
    spec.loader.exec_module(example)
    (result,) = example.main(["--device", "cuda", "--format", format])
    assert result["pages_left"] == 0
    assert result["difference_to_alone"] < 5e-2
