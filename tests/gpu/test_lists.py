"""Lists of keys on a GPU: replays of a CUDA graph after lists, tables and lengths changed; the short way of a call."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv.testing.compare import relative

GPU = {"device": "cuda"}


def lists(rows: int, n: int, below: int, *more: int) -> torch.Tensor:
    x = torch.rand(rows, *more, max(n, below), **GPU).argsort(-1)[..., :n].int()
    return torch.where(x < below, x, -1)


@pytest.mark.parametrize("by_slot", [False, True])
@pytest.mark.parametrize(("format", "heads"), [("fp8_ds_mla", 128), ("bf16", 16), ("fp8_e4m3", 64)])
def test_replays_see_new_lists_of_latents(format, heads, by_slot):
    torch.manual_seed(0)
    layer = tersekv.PagedLatentCache.allocate(1, 64, 64, format=format, **GPU)[0]
    tersekv.mla_append(torch.randn(4096, 512, **GPU), torch.randn(4096, 64, **GPU), layer, torch.arange(4096, **GPU))
    q = torch.randn(4, heads, 576, **GPU).bfloat16()
    table = torch.randperm(64, **GPU).view(4, 16).int()
    lens, used = (
        torch.tensor([1000, 1, 0, 700], dtype=torch.int32, **GPU),
        torch.full((4,), 300, dtype=torch.int32, **GPU),
    )
    indices, where = lists(4, 300, 1000), (None, None) if by_slot else (table, lens)

    def step(backend: str | None = None) -> torch.Tensor:
        options = {"indices": indices, "index_lens": used, "softmax_scale": 0.05, "backend": backend}
        return tersekv.mla_decode(q, layer, *where, **options)

    changes = [
        (indices, lambda: lists(4, 300, 900)), (used, lambda: used // 3), (lens, lambda: lens.flip(0).contiguous()),
        (table, lambda: table.flip(0).contiguous()),
    ]  # fmt: skip
    check_replays(step, changes)


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "int8_per_token_head", "nvfp4"])
def test_replays_see_new_lists_of_blocks(format):
    torch.manual_seed(0)
    layer = tersekv.PagedKVCache.allocate(1, 64, 64, 2, 128, format=format, **GPU)[0]
    k, v = torch.randn(2, 4096, 2, 128, **GPU)
    tersekv.append(k, v, layer, torch.arange(4096, **GPU))
    q = torch.randn(4, 16, 128, **GPU).bfloat16()
    table, lens = torch.randperm(64, **GPU).view(4, 16).int(), torch.tensor([1000, 1, 0, 700], dtype=torch.int32, **GPU)
    indices = lists(4, 7, 8, 2)

    def step(backend: str | None = None) -> torch.Tensor:
        return tersekv.decode(q, layer, table, lens, indices=indices, block_size=128, backend=backend)

    check_replays(step, [(indices, lambda: lists(4, 7, 6, 2)), (lens, lambda: lens.flip(0).contiguous())])


@pytest.mark.parametrize("format", ["bf16", "int8_per_token_head"])
def test_replays_see_new_lists_of_neighbouring_rows(format):
    """512 rows: a tile attends to the union of its lists, which another launch finds."""
    torch.manual_seed(0)
    layer = tersekv.PagedKVCache.allocate(1, 64, 64, 2, 128, format=format, **GPU)[0]
    k, v = torch.randn(2, 4096, 2, 128, **GPU)
    tersekv.append(k, v, layer, torch.arange(4096, **GPU))
    q, starts = torch.randn(512, 16, 128, **GPU).bfloat16(), torch.tensor([0, 128, 256, 384, 512], **GPU).int()
    table = torch.randperm(64, **GPU).view(4, 16).int()
    lens, indices = torch.tensor([1000, 130, 400, 700], **GPU).int(), lists(512, 7, 16, 2)

    def step(backend: str | None = None) -> torch.Tensor:
        options = {"indices": indices, "block_size": 64, "max_q_len": 128, "backend": backend}
        return tersekv.prefill(q, layer, table, lens, starts, **options)

    check_replays(step, [(indices, lambda: lists(512, 7, 9, 2)), (lens, lambda: lens.flip(0).contiguous())])


def check_replays(step, changes) -> None:
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for tensor, other in [(None, None), *changes]:
        if tensor is not None:
            tensor.copy_(other())
        out.fill_(torch.nan)
        graph.replay()
        want = step("torch")
        assert relative(out.double(), want.double()) < 3e-3
        assert torch.equal(step(), out), "the short way, and the same bits"
