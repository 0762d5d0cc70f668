"""`decode` over lists of blocks in a CUDA graph, of any backend."""

from __future__ import annotations

import torch
from torch import Tensor

import tersekv
from tersekv import PagedKVLayer
from tersekv.testing.compare import relative

GPU = {"device": "cuda"}
PAGE = 64


def layer_and_call(
    fmt: str, requests: int, pages: int, each_head: bool, block: int
) -> tuple[PagedKVLayer, Tensor, Tensor, Tensor, Tensor]:
    """A layer, queries, page table and lengths of requests of up to `pages` pages, and lists of all their blocks."""
    layer = tersekv.PagedKVCache.allocate(1, pages * requests, PAGE, 8, 128, format=fmt, **GPU)[0]
    n = PAGE * pages * requests
    tersekv.append(torch.randn(n, 8, 128, **GPU), torch.randn(n, 8, 128, **GPU), layer, torch.arange(n, **GPU))
    q, table = torch.randn(requests, 32, 128, **GPU).bfloat16(), torch.randperm(pages * requests, **GPU).int()
    lens = torch.randint(0, PAGE * pages + 1, (requests,), **GPU).int()
    lens[0] = PAGE * pages
    blocks = torch.rand(requests, 8 if each_head else 1, PAGE * pages // block, **GPU).argsort(-1).int()
    return layer, q, table.view(requests, pages), lens, blocks


def judge_replays(fmt: str, requests: int, each_head: bool, backend: str, pages: int, block: int) -> None:
    """Each tensor that the graph reads is changed in its turn: a replay then gives PyTorch's result, and bit for bit
    that of another call."""
    torch.manual_seed(0)
    layer, q, table, lens, indices = layer_and_call(fmt, requests, pages, each_head, block)
    used = torch.full((requests,), indices.shape[-1], **GPU).int()

    def lists() -> Tensor:
        x = torch.rand(indices.shape, **GPU).argsort(-1).int()
        return torch.where(torch.rand(x.shape, **GPU) < 0.2, -1, x)

    def step(backend: str) -> Tensor:
        options = {"indices": indices, "index_lens": used, "block_size": block, "backend": backend}
        return tersekv.decode(q, layer, table, lens, **options)

    step(backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(backend)
    changes = [
        (used, lambda: used), (indices, lists), (indices, lambda: indices * 0), (used, lambda: used // 3),
        (lens, lambda: lens.flip(0).contiguous()), (table, lambda: table.flip(0).contiguous()),
    ]  # fmt: skip
    for tensor, other in changes:
        tensor.copy_(other())
        out.fill_(torch.nan)
        graph.replay()
        assert relative(out.double(), step("torch").double()) < 3e-3
        assert torch.equal(step(backend), out), "the short way, and the same bits"
