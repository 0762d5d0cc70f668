"""What can be said of the plugin without vLLM; the rest is in tests/engines."""

from __future__ import annotations

import sys
from importlib import metadata

import pytest


def test_the_entry_point_is_there_and_needs_vllm_when_it_is_called(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    points = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == "tersekv"]
    assert [p.value for p in points] == ["tersekv.integrations.vllm:register"]
    with pytest.raises(ModuleNotFoundError, match="vllm"):
        points[0].load()()
