"""batch_invariant on a GPU: a request's bits alone, among others, and where a batch has other bounds."""

from __future__ import annotations

import subprocess
import sys

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


def latents(format, pages):
    layer = PagedLatentCache.allocate(
        1, pages, 64, format=format, kv_lora_rank=512, qk_rope_head_dim=64, device="cuda"
    )[0]  # fmt: skip
    data.fill(layer.ckv, layer.ckv_scale_cache, latent_format(format))
    layer.kpe.copy_(torch.randn(layer.kpe.shape, device="cuda"))
    return layer


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("q_lens", [ONE, DRAFTS], ids=["one row", "drafts"])
@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_latents(format, q_lens, heads):
    torch.manual_seed(0)
    check(
        "mla_decode",
        latents(format, sum(-(-n // 64) for n in LENS)),
        torch.randn(sum(q_lens), heads, 576, device="cuda").bfloat16(),
        64,
        q_lens,
    )


OTHER_PROCESS = """
import torch
x = torch.randn(4096, 4096, device="cuda").bfloat16()
print(flush=True)
while True:
    for _ in range(50):
        torch.mm(x, x)
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def other_processes():
    """Three that keep the GPU busy: it is preempted in the middle of a kernel, every two milliseconds or so."""
    started = []
    try:
        for _ in range(3):
            command = [sys.executable, "-c", OTHER_PROCESS]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for process in started:
            assert process.stdout.readline() == "\n", "another process did not start"
        yield
        assert all(process.poll() is None for process in started), "another process ended"
    finally:
        for process in started:
            process.kill()
            process.wait()


def check_repeats(call, calls):
    got = [call() for _ in range(calls)]
    for out, lse in got[1:]:
        assert torch.equal(as_bytes(out), as_bytes(got[0][0]))
        assert torch.equal(as_bytes(lse), as_bytes(got[0][1]))
    assert not got[0][0].isnan().any()


@pytest.mark.parametrize("format", FORMATS)
def test_a_preempted_prefill_repeats_its_bits(format, other_processes):
    layer = PagedKVCache.allocate(1, 1563, 64, 4, 128, format=format, device="cuda")[0]
    for codes, scales in ((layer.k, layer.k_scale_cache), (layer.v, layer.v_scale_cache)):
        data.fill(codes, scales, kv_format(format))
    q = torch.randn(900, 16, 128, device="cuda").bfloat16()
    lens, tables = torch.tensor([100000], device="cuda").int(), torch.randperm(1563, device="cuda").int()[None]
    check_repeats(lambda: attend("prefill", layer, q, tables, lens, [900]), calls=12)


@pytest.mark.parametrize("format", ["bf16", "fp8_e4m3", "fp8_ds_mla"])
def test_a_preempted_mla_decode_repeats_its_bits(format, other_processes):
    """60 calls: of those over fp8, one in twenty was wrong while an mbarrier shared memory with another buffer."""
    requests, pages = 64, 256
    layer = latents(format, requests * pages)
    tables = torch.randperm(requests * pages, device="cuda").int().view(requests, pages)
    lens = torch.full((requests,), pages * 64, device="cuda").int()
    q = torch.randn(requests, 128, 576, device="cuda").bfloat16()
    check_repeats(lambda: attend("mla_decode", layer, q, tables, lens, [1] * requests), calls=60)
