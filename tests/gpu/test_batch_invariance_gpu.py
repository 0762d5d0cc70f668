"""batch_invariant on a GPU: a request's bits alone, among others, and where a batch has other bounds."""

from __future__ import annotations

import pytest
import torch

from tersekv import PagedKVCache, PagedLatentCache, decode, mla_decode, prefill
from tersekv.formats import kv_format, latent_format
from tersekv.testing.bench import data
from tersekv.testing.memory import as_bytes

LENS = (20000, 3, 513, 512, 8192, 1, 300, 2048, 70, 100000)
ONE, DRAFTS = (1,) * 10, (1, 2, 8, 1, 5, 1, 33, 4, 1, 1)
PROMPTS = (700, 3, 1, 512, 129, 1, 300, 64, 70, 900)
FORMATS = ("bf16", "fp8_e4m3", "fp8_per_token_head", "int8_per_token_head", "nvfp4", "int4_per_token_head")


def attend(op, layer, q, tables, lens, q_lens, most=None):
    starts = torch.tensor([0, *q_lens], device="cuda").cumsum(0).to(torch.int32)
    options = {"max_q_len": most or max(q_lens), "return_lse": True, "batch_invariant": True}
    if op == "prefill":
        return prefill(q, layer, tables, lens, starts, **options)
    if op == "mla_decode":
        return mla_decode(q, layer, tables, lens, softmax_scale=0.1, cu_seqlens_q=starts, **options)
    return decode(q, layer, tables, lens, cu_seqlens_q=starts, **options)


def check(op, layer, q, page, q_lens):
    lens = torch.tensor(LENS, dtype=torch.int32)
    tables, lens = data.page_tables(-(-lens // page), 1, torch.device("cuda"))[0], lens.cuda()
    whole = attend(op, layer, q, tables, lens, q_lens)
    order = [3, 9, 0, 6, 1, 8, 2, 7, 5, 4]
    starts = [sum(q_lens[:b]) for b in range(len(LENS))]
    rows = [slice(starts[b], starts[b] + n) for b, n in enumerate(q_lens)]
    turned = attend(
        op, layer, torch.cat([q[rows[b]] for b in order]), tables[order].contiguous(), lens[order].contiguous(),
        [q_lens[b] for b in order], most=64 + max(q_lens),
    )  # fmt: skip
    at = 0
    for b in order:
        n, width = q_lens[b], -(-LENS[b] // page)
        alone = attend(op, layer, q[rows[b]].clone(), tables[b : b + 1, :width].clone(), lens[b : b + 1].clone(), [n])
        for got, among, other in zip(alone, whole, turned, strict=True):
            assert not got.isnan().any()
            assert torch.equal(as_bytes(got), as_bytes(among[rows[b]])), f"request {b} alone and among others"
            assert torch.equal(as_bytes(got), as_bytes(other[at : at + n])), f"request {b} in another order"
        at += n


@pytest.mark.parametrize("page", [64, 16])
@pytest.mark.parametrize(("op", "q_lens"), [("decode", ONE), ("decode", DRAFTS), ("prefill", PROMPTS)])
@pytest.mark.parametrize("format", FORMATS)
def test_keys_and_values(format, op, q_lens, page):
    torch.manual_seed(0)
    pages = sum(-(-n // page) for n in LENS)
    layer = PagedKVCache.allocate(1, pages, page, 4, 128, format=format, device="cuda")[0]
    for codes, scales in ((layer.k, layer.k_scale_cache), (layer.v, layer.v_scale_cache)):
        data.fill(codes, scales, kv_format(format))
    check(op, layer, torch.randn(sum(q_lens), 16, 128, device="cuda").bfloat16(), page, q_lens)


@pytest.mark.parametrize("format", FORMATS)
def test_a_long_prefill_repeats_its_bits_beside_other_work(format):
    """Other work changes when a warp runs, not what it computes."""
    layer = PagedKVCache.allocate(1, 1563, 64, 4, 128, format=format, device="cuda")[0]
    for codes, scales in ((layer.k, layer.k_scale_cache), (layer.v, layer.v_scale_cache)):
        data.fill(codes, scales, kv_format(format))
    q = torch.randn(900, 16, 128, device="cuda").bfloat16()
    lens, tables = torch.tensor([100000], device="cuda").int(), torch.randperm(1563, device="cuda").int()[None]
    other, stream = torch.randn(4096, 4096, device="cuda").bfloat16(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(400):
            torch.mm(other, other)
    got = [attend("prefill", layer, q, tables, lens, [900]) for _ in range(12)]
    for out, lse in got[1:]:
        assert torch.equal(as_bytes(out), as_bytes(got[0][0]))
        assert torch.equal(as_bytes(lse), as_bytes(got[0][1]))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("q_lens", [ONE, DRAFTS], ids=["one row", "drafts"])
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_latents(format, q_lens, heads):
    torch.manual_seed(0)
    pages = sum(-(-n // 64) for n in LENS)
    layer = PagedLatentCache.allocate(
        1, pages, 64, format=format, kv_lora_rank=512, qk_rope_head_dim=64, device="cuda"
    )[0]  # fmt: skip
    data.fill(layer.ckv, layer.ckv_scale_cache, latent_format(format))
    layer.kpe.copy_(torch.randn(layer.kpe.shape, device="cuda"))
    check("mla_decode", layer, torch.randn(sum(q_lens), heads, 576, device="cuda").bfloat16(), 64, q_lens)
