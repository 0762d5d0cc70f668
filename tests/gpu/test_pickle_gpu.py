"""Caches of a GPU, saved and sent."""

from __future__ import annotations

import io
import pickle

import pytest
import torch

from tersekv import PagedKVCache
from tersekv.testing.memory import as_bytes


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4"])
def test_a_cache_comes_back_to_its_device_or_to_the_one_named(format):
    inline = format in ("int8_per_token_head", "nvfp4")
    cache = PagedKVCache.allocate(2, 3, 16, 2, 64, format=format, scales="inline" if inline else "apart", device="cuda")
    as_bytes(cache[1].k).random_(0, 256)
    file = io.BytesIO()
    torch.save(cache, file)
    for device in ("cuda", "cpu"):
        file.seek(0)
        new = torch.load(file, map_location=device)
        assert new.device.type == device
        assert torch.equal(as_bytes(new[1].k).cpu(), as_bytes(cache[1].k).cpu())
    assert pickle.loads(pickle.dumps(cache)).device == cache.device
