"""Functions of FlashMLA, DeepGEMM and vLLM: replays of a CUDA graph after every input changed, and repeated calls, give
what plain arithmetic gives."""

from __future__ import annotations

import pytest
import torch

import tersekv
from tersekv.compat import deep_gemm, flash_mla, vllm

E4M3, I32 = torch.float8_e4m3fn, torch.int32


def replayed(step, inputs, others):
    """step(), captured, replayed over other values in the same memory; and twice at once, the short way too."""
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for x, other in zip(inputs, others, strict=True):
        x.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    captured = [x.clone() for x in captured]
    for again in (step(), step()):
        for x, y in zip(captured, again, strict=True):
            assert torch.equal(x, y)
    return captured


def lists(rows, n, most):
    x = torch.rand(rows, most + 40, device="cuda").argsort(-1)[:, :n].to(I32)
    return torch.where(x < most, x, -1)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("drafts", [1, 2])
def test_flash_mla_with_kvcache(drafts, sinks):
    torch.manual_seed(0)
    b, heads, pages, page = 5, 64, 40, 16
    layer = tersekv.PagedLatentCache.allocate(1, pages, page, format="fp8_ds_mla", device="cuda")[0]
    every = torch.arange(pages * page, device="cuda")
    tersekv.mla_append(*(torch.randn(len(every), n, device="cuda") for n in (512, 64)), layer, every)
    records = layer.ckv.view(E4M3).as_strided((pages, page, 1, 656), (*layer.ckv.stride()[:2], 656, 1))
    q = torch.randn(b, drafts, heads, 576, device="cuda").bfloat16()
    sink = torch.randn(heads, device="cuda") if sinks else None
    indices = lists(b * drafts, 100, pages * page).view(b, drafts, 100)
    lens = torch.tensor([100, 0, 3, 64, 100], dtype=I32, device="cuda")

    def step():
        return flash_mla.flash_mla_with_kvcache(
            q, records, None, None, 512, None, None, 0.05, False, True, indices, sink, topk_length=lens
        )

    out, lse = replayed(step, (q, indices, lens), (torch.randn_like(q), indices.flip(0), lens.flip(0)))
    want, want_lse = tersekv.mla_decode(
        q.flatten(0, 1), layer, None, None, softmax_scale=0.05, indices=indices.flatten(0, 1),
        index_lens=lens.repeat_interleave(drafts), return_lse=True, backend="torch",
    )  # fmt: skip
    want_lse = want_lse.view(b, drafts, heads).transpose(1, 2)
    share = 1.0 if sink is None else torch.sigmoid(want_lse - sink[:, None]).transpose(1, 2)[..., None]
    want = want.view(b, drafts, heads, 512).float() * share
    assert (out.float() - want).norm() < 4e-3 * want.norm()
    empty = want_lse == -torch.inf
    assert torch.equal(lse == torch.inf, empty)
    assert (lse - want_lse)[~empty].abs().max() < 2e-3


def test_flash_mla_sparse_fwd():
    torch.manual_seed(0)
    q, kv = torch.randn(70, 16, 576, device="cuda").bfloat16(), torch.randn(500, 1, 576, device="cuda").bfloat16()
    indices = torch.where(lists(70, 300, 500) < 0, 500, lists(70, 300, 500))[:, None].contiguous()
    step = lambda: flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.05)  # noqa: E731
    out, top, lse = replayed(step, (q, indices), (torch.randn_like(q), indices.flip(0)))
    for t in (0, 33, 69):
        rows = kv[indices[t, 0][(indices[t, 0] >= 0) & (indices[t, 0] < 500)].long(), 0].double()
        s = q[t].double() @ rows.T * 0.05
        want = s.softmax(-1) @ rows[:, :512]
        assert (out[t].double() - want).norm() < 4e-3 * want.norm()
        assert (top[t] - s.amax(-1)).abs().max() < 2e-3
        assert (lse[t] - s.logsumexp(-1)).abs().max() < 2e-3


@pytest.mark.parametrize("keys", [300, 512])
def test_logits_and_selections_of_a_prompt(keys):
    torch.manual_seed(0)
    q, weights = torch.randn(90, 64, 128, device="cuda").to(E4M3), torch.randn(90, 64, device="cuda")
    kv = torch.randn(keys, 128, device="cuda").to(E4M3), torch.rand(keys, device="cuda") + 0.1
    starts = torch.arange(90, dtype=I32, device="cuda") // 30 * 70
    ends = starts + 40 + torch.arange(90, dtype=I32, device="cuda") % 30

    def step():
        logits = deep_gemm.fp8_mqa_logits(q, kv, weights, starts, ends)
        topk = torch.empty(90, 16, dtype=I32, device="cuda")
        vllm.top_k_per_row_prefill(logits, starts, ends, topk, 90, keys, 1, 16)
        return logits, topk

    logits, topk = replayed(step, (starts, ends, weights), (starts.flip(0), ends.flip(0), weights.flip(0)))
    products = torch.einsum("thd,nd->thn", q.float(), kv[0].float()).relu()
    want = (products * weights[..., None]).sum(1) * kv[1]
    column = torch.arange(keys, device="cuda")
    seen = (column >= starts[:, None]) & (column < ends[:, None])
    assert torch.equal(logits > -torch.inf, seen)
    assert (logits - want)[seen].norm() < 1e-3 * want[seen].norm()
    best = logits.topk(16).indices.sort().values - starts[:, None]
    assert torch.equal(topk.long(), best)


@pytest.mark.parametrize("next_n", [1, 2])
def test_logits_over_pages(next_n):
    torch.manual_seed(0)
    b, pages = 4, 32
    cache = torch.zeros(pages, 64, 132, dtype=torch.uint8, device="cuda")
    slots = torch.arange(pages * 64, device="cuda")
    vllm.indexer_k_quant_and_cache(torch.randn(len(slots), 128, device="cuda").bfloat16(), cache, slots, 128, "ue8m0")
    table = torch.randperm(pages, device="cuda").view(b, 8).to(I32)
    q = torch.randn(b, next_n, 64, 128, device="cuda").to(E4M3)
    weights = torch.randn(b * next_n, 64, device="cuda")
    lens = torch.tensor([500, 1, 64, 130], dtype=I32, device="cuda")[:, None].expand(b, next_n).contiguous()

    def step():
        return [deep_gemm.fp8_paged_mqa_logits(q, cache[:, :, None], weights, lens, table, None, 512)]

    (logits,) = replayed(step, (lens, table), (lens.flip(0), table.flip(0)))
    codes, scales = torch.empty(int(lens[:, 0].sum()), 128, dtype=E4M3, device="cuda"), None
    scales = torch.empty(len(codes), 1, device="cuda")
    cu = torch.nn.functional.pad(lens[:, 0].cumsum(0), (1, 0)).to(I32)
    vllm.cp_gather_indexer_k_quant_cache(cache, codes, scales, table, cu)
    rows = torch.arange(b * next_n, device="cuda") // next_n
    ragged = deep_gemm.fp8_mqa_logits(
        q.flatten(0, 1), (codes, scales[:, 0]), weights, cu[rows].contiguous(), cu[rows + 1].contiguous()
    )
    for t, i in enumerate(rows.tolist()):
        n, begin = int(lens[i, 0]), int(cu[i])
        assert torch.allclose(logits[t, :n], ragged[t, begin : begin + n], rtol=1e-5, atol=1e-4)
        assert (logits[t, n:] == -torch.inf).all()
