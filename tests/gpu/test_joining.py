"""Decode of requests that are split: on Hopper, the CTA that stores the last split combines them. And of requests that
are not, though their lengths differ."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv.backends.host import launch

HQ, H, D, S = 32, 8, 128, 64
# (format, requests, longest): few splits, in 8 and in 4 bits; one request a CTA, in 8 and in 4 bits; one head of one
# request, whose keys the warps divide
KINDS = (
    ("fp8_e4m3", 24, 3000), ("nvfp4", 100, 2000), ("fp8_e4m3", 200, 380), ("int4_per_token_head", 130, 300),
    ("int8_per_token_head", 40, 500),
)  # fmt: skip


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: f"{kind[0]}-{kind[1]}x{kind[2]}")
def cache_table_longest(request):
    fmt, requests, longest = request.param
    torch.manual_seed(0)
    pages = -(-longest // S)
    cache = tersekv.PagedKVCache.allocate(1, requests * pages, S, H, D, format=fmt, device="cuda")[0]
    k, v = torch.randn(2, requests * pages * S, H, D, device="cuda", dtype=torch.bfloat16)
    tersekv.append(k, v, cache, torch.arange(requests * pages * S, device="cuda"))
    return cache, torch.randperm(requests * pages, device="cuda").int().view(requests, pages), longest


def some_lengths(requests: int, longest: int) -> torch.Tensor:
    lens = torch.randint(1, longest, (requests,), device="cuda").int()
    lens[0], lens[1] = 0, longest
    return lens


@pytest.fixture
def calls(cache_table_longest):
    """Three calls with queries and lengths of their own, and what they give one after the other."""
    cache, table, longest = cache_table_longest
    inputs = [
        (torch.randn(len(table), HQ, D, device="cuda", dtype=torch.bfloat16), some_lengths(len(table), longest))
        for _ in range(3)
    ]
    steps = [lambda q=q, n=n, **k: tersekv.decode(q, cache, table, n, return_lse=True, **k) for q, n in inputs]
    return steps, [step() for step in steps], [n for _, n in inputs]


def same(got, want) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(got, want, strict=True))


def test_agrees_with_two_launches(calls):
    for step, want in zip(*calls[:2], strict=True):
        torch.testing.assert_close(step(backend="triton"), want, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("filler", [float("nan"), 0.0, -1.0, None], ids=str)
def test_memory_need_not_be_clean(calls, filler):
    steps, want, _ = calls
    for _ in range(20):
        kept = launch.workspace(1, want[0][0])
        if filler is None:
            kept.view(torch.int32).random_()
        else:
            kept.fill_(filler)
        assert same(steps[0](), want[0])


def test_always_the_same_bits(calls):
    steps, want, _ = calls
    assert sum(not same(steps[i % 3](), want[i % 3]) for i in range(300)) == 0


def test_streams_at_once(calls):
    steps, want, _ = calls
    streams, got = [torch.cuda.Stream() for _ in steps], []
    torch.cuda.synchronize()
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                got.append((i, steps[i]()))
    torch.cuda.synchronize()
    assert all(same(x, want[i]) for i, x in got)


def test_graphs_at_once_follow_new_lengths(calls, cache_table_longest):
    steps, _, lengths = calls
    longest = cache_table_longest[2]
    graphs, outs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outs.append([step() for step in steps])
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(10):
        for n in lengths:
            n.copy_(some_lengths(len(n), longest))
        want = [step() for step in steps]
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                graph.replay()
        torch.cuda.synchronize()
        assert all(same(x, w) for out in outs for x, w in zip(out, want, strict=True))
