"""append in Triton, in the interpreter: strange values, and programs of many rows or few, give the oracle's bytes."""

from __future__ import annotations

import pytest
import torch
from against_oracle import assert_bytes_equal

from tersekv.backends.host import row_programs
from tersekv.cache import PagedKVCache
from tersekv.calls import AppendCall
from tersekv.formats import KV_FORMATS

OP = "append"


def call(k: torch.Tensor, fmt: str, place: tuple, pages: int = 6, size: int = 4) -> AppendCall:
    """k is written as v, too."""
    c = PagedKVCache.allocate(1, pages, size, k.shape[1], k.shape[2], format=fmt)[0]
    return AppendCall(
        k, k, c.k, c.v, c.k_scale_cache, c.v_scale_cache, *place, fmt, 1.0, None, 1.0, None, False
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("fmt", KV_FORMATS)
def test_rows_of_strange_values(fmt, dtype):
    k = torch.ones(12, 1, 32)
    k[0] = torch.nan
    k[1] = -torch.inf
    k[2, :, ::3] = torch.nan
    k[3] = -0.0
    k[4] = -1e-12  # every stored scale is at its floor, or 0
    k[5, :, :16] = 1e-12
    k[6] = 1e-42  # subnormal
    k[7] = -3e38
    k[8, :, 7] = torch.inf
    k[9] = torch.arange(32) - 15.5
    k[10] = -torch.arange(32) * 1e-3
    slots = torch.arange(12)
    assert_bytes_equal(OP, call(k.to(dtype), fmt, (slots, None, None, None, None)))


@pytest.mark.parametrize("head_dim", [32, 96, 128, 48, 16])
def test_nvfp4_scales_in_pairs(head_dim, monkeypatch):
    """As programs of many rows write them; scales of an odd number of blocks go one by one."""
    monkeypatch.setattr(row_programs, "MIN_PROGRAMS", 0)
    k = (torch.randn(5, 2, head_dim) * torch.tensor([1e-3, 1, 30, 1e4, 0])[:, None, None]).bfloat16()
    slots = torch.tensor([7, 0, -1, 22, 13])
    assert_bytes_equal(OP, call(k, "nvfp4", (slots, None, None, None, None)))


def test_a_position_past_a_requests_pages_is_dropped():
    k = torch.randn(6, 2, 16)
    batch = torch.tensor([0, 0, 1, 1, 2, -1], dtype=torch.int32)
    positions = torch.tensor([0, 4, 8, 3, 0, 0], dtype=torch.int32)  # the second lies in the pages of the next request
    indptr, indices = torch.tensor([0, 1, 3], dtype=torch.int32), torch.tensor([5, 2, 0, 1, 3], dtype=torch.int32)
    a = call(k, "fp8_e4m3", (None, batch, positions, indptr, indices))
    assert_bytes_equal(OP, a)
    written = a.k_cache.view(torch.uint8).flatten(2).any(-1).nonzero().tolist()
    assert written == [[2, 3], [5, 0]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_slots_outside_the_cache_are_dropped(dtype):
    info = torch.iinfo(dtype)
    slots = torch.tensor([info.min or info.max, 24, info.max, 23, 0, info.max - 1]).to(dtype)
    a = call(torch.randn(6, 2, 16), "fp8_e4m3", (slots, None, None, None, None))
    assert_bytes_equal(OP, a)
    written = a.k_cache.view(torch.uint8).flatten(2).any(-1).nonzero().tolist()
    assert written == [[0, 0], [5, 3]]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_pages_outside_the_cache_are_dropped(dtype):
    """Of 6 pages of 4; one request whose `kv_indices` name others too."""
    info = torch.iinfo(dtype)
    indices = torch.tensor([5, info.max, 6, info.min or info.max - 1, 2]).to(dtype)
    positions = torch.tensor([0, 4, 8, 12, 17, 20]).to(dtype)
    batch, indptr = torch.zeros(6, dtype=torch.int64), torch.tensor([0, 5]).to(dtype)
    a = call(torch.randn(6, 2, 16), "fp8_e4m3", (None, batch, positions, indptr, indices))
    assert_bytes_equal(OP, a)
    written = a.k_cache.view(torch.uint8).flatten(2).any(-1).nonzero().tolist()
    assert written == [[2, 1], [5, 0]]
