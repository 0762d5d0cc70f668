"""warm_up makes every plan that the first requests need, and touches no row of the cache."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

import tersekv
from tersekv.dispatch import launch_cache, plan

KV, LATENT = ("bf16", "int8_per_token_head", "nvfp4"), ("fp8_e4m3", "fp8_ds_mla")


@pytest.fixture(autouse=True)
def _no_plans(monkeypatch):
    for home, memory in ((plan, "_plans"), (plan, "_recent"), (launch_cache, "_recent"), (launch_cache, "_launches")):
        monkeypatch.setattr(home, memory, {})


def kv_cache(format: str, **more) -> tersekv.PagedKVCache:
    cache = tersekv.PagedKVCache.allocate(2, 4, 16, 2, 32, format=format, **more)
    for layer in cache.layers:
        for t in (layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache):
            if t is not None:
                t.view(torch.uint8).fill_(0xFF)  # NaN, or whatever the format makes of it
    return cache


def table() -> torch.Tensor:
    return torch.rand(64, 32)


@pytest.mark.parametrize("format", KV)
def test_no_row_is_written(format):
    cache = kv_cache(format)
    tersekv.warm_up(cache, 4, batch_sizes=(1, 3), drafts=(1, 2), ragged_tokens=(5,), cos_sin_cache=table())
    for layer in cache.layers:
        for t in (layer.k, layer.v, layer.k_scale_cache, layer.v_scale_cache):
            assert t is None or bool((t.view(torch.uint8) == 0xFF).all())


def a_step(cache: tersekv.PagedKVCache, rope: torch.Tensor, counts: list[int], **options) -> None:
    """What a model does: positions, slots, tables and lengths by PagePool."""
    pool, names, t = tersekv.PagePool(cache.num_pages, cache.page_size), [*range(len(counts))], sum(counts)
    for name, n in zip(names, counts, strict=True):
        pool.add(name, n)
    q, k, v = (torch.randn(t, h, 32, dtype=torch.bfloat16) for h in (4, 2, 2))
    for layer in cache.layers:
        slots, positions = pool.slot_mapping(names, counts), pool.positions(names, counts)
        q = tersekv.rope_append(q, k, v, layer, slots, rope, positions)
        where = pool.page_table(names, max_pages=cache.num_pages), pool.seq_lens(names)
        tersekv.decode(q, layer, *where, **options)
        if "cu_seqlens_q" in options:
            tersekv.prefill(q, layer, *where, **options)


@pytest.mark.parametrize("format", KV)
def test_the_first_step_finds_every_plan(format):
    cache, rope = kv_cache(format), table()
    tersekv.warm_up(
        cache, 4, batch_sizes=(2,), drafts=(1, 3), ragged_tokens=(7,), cos_sin_cache=rope, window=8, softcap=30.0
    )
    known = len(plan._plans)
    assert known
    options = {"window": 8, "softcap": 30.0}
    a_step(cache, rope, [1, 1], **options)
    a_step(cache, rope, [3, 3], **options)
    ends = torch.tensor([0, 2, 7], dtype=torch.int32)
    a_step(cache, rope, [2, 5], cu_seqlens_q=ends, max_q_len=7, **options)
    assert len(plan._plans) == known


def test_another_step_is_another_plan():
    cache, rope = kv_cache("bf16"), table()
    tersekv.warm_up(cache, 4, batch_sizes=(2,), cos_sin_cache=rope)
    known = len(plan._plans)
    a_step(cache, rope, [1, 1, 1])
    assert len(plan._plans) > known


@pytest.mark.parametrize("format", LATENT)
def test_latent_caches(format):
    cache = tersekv.PagedLatentCache.allocate(2, 4, 16, format=format)
    cache[0].ckv.view(torch.uint8).fill_(0xFF)
    taken = tersekv.warm_up(cache, 4, batch_sizes=(2,), cos_sin_cache=torch.rand(64, 64), softmax_scale=0.1)
    assert list(taken) == ["mla_append, 2 requests, 2 rows", "mla_decode, 2 requests, 2 rows"]
    assert bool((cache[0].ckv.view(torch.uint8) == 0xFF).all())
    known = len(plan._plans)
    kv_c, k_pe = torch.randn(2, 512, dtype=torch.bfloat16), torch.randn(2, 64, dtype=torch.bfloat16)
    slots = torch.tensor([0, 1])
    positions, q_pe = torch.zeros(2, dtype=torch.int64), torch.randn(2, 4, 64, dtype=torch.bfloat16)
    tersekv.mla_append(kv_c, k_pe, cache[1], slots, cos_sin_cache=torch.rand(64, 64), positions=positions, q_pe=q_pe)
    assert len(plan._plans) == known


def test_seconds_are_told_by_operation_and_step():
    taken = tersekv.warm_up(kv_cache("bf16"), 4, batch_sizes=(1, 2), ragged_tokens=(6,))
    steps = ("1 requests, 1 rows", "2 requests, 2 rows", "1 requests, 6 rows, ragged", "2 requests, 6 rows, ragged")
    ops = [("append", "decode", *["prefill"] * ("ragged" in step)) for step in steps]
    assert list(taken) == [f"{op}, {step}" for step, each in zip(steps, ops, strict=True) for op in each]
    assert all(seconds >= 0 for seconds in taken.values())


def test_sizes_may_come_from_a_generator_and_count_as_pythons_do():
    listed = tersekv.warm_up(kv_cache("bf16"), 4, batch_sizes=(1, 2), drafts=(1, 3), ragged_tokens=(6,))
    sizes = {"batch_sizes": (n for n in np.array([1, 2])), "drafts": iter((1, 3)), "ragged_tokens": (n for n in (6,))}
    assert list(tersekv.warm_up(kv_cache("bf16"), 4, **sizes)) == list(listed)


def test_a_backend_that_cannot_run_says_so():
    with pytest.raises(tersekv.UnsupportedError, match="triton: needs a CUDA or HIP device"):
        tersekv.warm_up(kv_cache("bf16"), 4, backend="triton")


@pytest.mark.parametrize(("change", "error", "message"), [
    ({"cache": kv_cache("bf16")[0]}, TypeError, "cache: want PagedKVCache or PagedLatentCache, got PagedKVLayer"),
    ({"batch_sizes": 4}, TypeError, "batch_sizes: want a sequence of int, got 4"),
    ({"drafts": ("2",)}, TypeError, "drafts: want int, got str '2'"),
    ({"batch_sizes": (-1,)}, ValueError, "batch_sizes: want a positive number, got -1"),
    ({"ragged_tokens": (0,)}, ValueError, "ragged_tokens: want a positive number, got 0"),
    ({"max_pages": 0}, ValueError, "max_pages: want a positive number, got 0"),
    ({"max_pages": -1}, ValueError, "max_pages: want a positive number, got -1"),
    ({"processes": 0}, ValueError, "processes: want a positive number, got 0"),
    ({"processes": "all"}, TypeError, "processes: want int, got str 'all'"),
    ({"num_q_heads": 3.5}, TypeError, "num_q_heads: want int, got float 3.5"),
    ({"dtype": "bf16"}, TypeError, "dtype: want a torch.dtype, got 'bf16'"),
    ({"cache": tersekv.PagedLatentCache.allocate(1, 1, 16, format="bf16")}, ValueError,
     "softmax_scale: want a number or a Tensor for a latent cache, got None"),
])  # fmt: skip
def test_a_wrong_argument_is_named(change, error, message):
    with pytest.raises(error) as caught:
        tersekv.warm_up(**({"cache": kv_cache("bf16"), "num_q_heads": 4} | change))
    assert str(caught.value) == message


def test_the_log_tells_which_backend_was_chosen(caplog, monkeypatch):
    monkeypatch.setenv("TERSEKV_BACKEND", chosen := "torch")
    with caplog.at_level(logging.DEBUG, logger="tersekv"):
        tersekv.warm_up(kv_cache("nvfp4"), 4)
    lines = [r.getMessage() for r in caplog.records]
    assert f"decode q=[1, 4, 32] nvfp4 on cpu: {chosen}" in lines
    assert any(line.startswith("warm_up: decode, 1 requests, 1 rows: ") for line in lines)


def test_the_library_is_silent_by_itself():
    handlers = logging.getLogger("tersekv").handlers
    assert any(isinstance(h, logging.NullHandler) for h in handlers)
