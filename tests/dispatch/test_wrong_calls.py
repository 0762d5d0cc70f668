"""Calls whose tensors have the right kinds and a wrong meaning: another split, one memory for two, other layers."""

from __future__ import annotations

import re

import pytest
import torch

from tersekv import (
    PagedKVCache,
    PagedKVLayer,
    PagedLatentCache,
    PagedLatentLayer,
    append,
    decode,
    mla_decode,
    rope_append,
)
from tersekv.compat import flashinfer as fi
from tersekv.ops.context_parallel import exchange_cost

BF = torch.bfloat16
torch.manual_seed(0)
K, V = torch.randn(8, 16, 2, 64).to(BF), torch.randn(8, 16, 2, 64).to(BF)
TABLE, LENS = torch.tensor([[0, 1, 2, 3, 4, 5, 6]] * 2), torch.tensor([100, 50])
Q = torch.randn(6, 8, 64).to(BF)  # three drafts each
MASK = torch.randint(0, 65536, (2, 3, 2)).int().to(torch.uint16)
LATENTS = torch.zeros(2, 4, 576).to(BF)
Q4 = torch.randn(4, 8, 64).to(BF)  # two
MASK4 = MASK[:, :2].contiguous()


def xqa(q, b, drafts, **options):
    out = torch.full((b, 1, drafts, 8, 64), torch.nan, dtype=BF)
    fi.xqa(
        q.view(b, 1, drafts, 8, 64), K, V, TABLE, LENS, out, None, None, 2, 16, q_scale=8.0, q_seq_len=drafts, **options
    )  # fmt: skip
    return out.flatten(0, 2)


def xqa_batch(q, mask, drafts):
    return fi.xqa_batch_decode_with_kv_cache(q, (K, V), None, TABLE, LENS, 100, q_len_per_req=drafts, mask=mask)


def test_a_mask_in_three_dimensions_is_split_as_the_rows_are():
    flat = decode(Q, (K, V), TABLE, LENS, mask=MASK.view(6, 2))
    assert torch.equal(decode(Q, (K, V), TABLE, LENS, mask=MASK), flat)
    for shape in ((3, 2, 2), (1, 6, 2), (6, 1, 2)):
        with pytest.raises(ValueError, match=r"^mask: want \[T=6, W\] or \[B=2, drafts=3, W\] uint16, W = "):
            decode(Q, (K, V), TABLE, LENS, mask=MASK.view(shape))


@pytest.mark.parametrize(("shape", "dtype"), [([3], "int32"), ([6, 2], "int16"), ([3, 2, 2], "uint16"), ([], "bool")])
def test_a_wrong_mask_is_told_what_is_documented_and_what_came(shape, dtype):
    want = "mask: want [T=6, W] or [B=2, drafts=3, W] uint16, W = 2 × ceil(drafts / 32)"
    with pytest.raises(ValueError, match=f"^{re.escape(f'{want}, got {shape} {dtype}')}$"):
        decode(Q, (K, V), TABLE, LENS, mask=torch.zeros(shape, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("call", [lambda m: xqa_batch(Q4, m, 2), lambda m: xqa(Q4, 2, 2, mask=m)])
def test_flashinfers_masks_are_split_as_the_rows_are(call):
    assert torch.equal(call(MASK4), call(MASK4.view(4, 2)))
    with pytest.raises(ValueError, match=r"^mask: want \[T=4, W\] or \[B=2, drafts=2, W\] uint16, .*, got \[1, 4, 2\]"):
        call(MASK4.view(1, 4, 2))


def test_flashinfers_sinks_have_a_row_for_each_kv_head():
    sinks = torch.randn(8)
    got = xqa(Q4, 2, 2, mask=MASK4, sinks=sinks.view(2, 4))
    assert torch.equal(got, xqa(Q4, 2, 2, mask=MASK4, sinks=sinks))
    for shape in ((4, 2), (8, 1), (1, 8)):
        with pytest.raises(ValueError, match=r"^sinks: want \[H, Hq / H\] = \[2, 4\], got "):
            xqa(Q4, 2, 2, mask=MASK4, sinks=sinks.view(shape))


@pytest.mark.parametrize("strides", [(64, 64, 1), (32, 128, 1), (512, 32, 1), (0, 64, 1), (192, 64, 1)], ids=str)
def test_an_output_whose_elements_overlap_is_refused(strides):
    out = torch.empty(4000, dtype=BF).as_strided((2, 8, 64), strides)
    with pytest.raises(ValueError, match=r"^out: want memory for each element, got strides"):
        decode(Q[:2], (K, V), TABLE, LENS, out=out)


@pytest.mark.parametrize("strides", [(512, 64, 1), (64, 128, 1), (70, 140, 1), (2000, 65, 1)], ids=str)
def test_an_output_in_any_order_and_with_gaps_is_written(strides):
    out = torch.empty(4000, dtype=BF).as_strided((2, 8, 64), strides)
    assert torch.equal(decode(Q[:2], (K, V), TABLE, LENS, out=out), decode(Q[:2], (K, V), TABLE, LENS))


def test_an_lse_in_the_memory_of_the_output_is_refused():
    out = torch.empty(6, 8, 64)
    with pytest.raises(ValueError, match=r"^lse: want memory of its own, got a tensor that begins where out does$"):
        decode(Q, (K, V), TABLE, LENS, out=out, lse=out.flatten()[:48].view(6, 8))
    both = torch.empty(6, 8, 65)  # rows that hold their own LSE
    got = decode(Q, (K, V), TABLE, LENS, out=both[..., :64], lse=both[..., 64], return_lse=True)
    for a, b in zip(got, decode(Q, (K, V), TABLE, LENS, out_dtype=torch.float32, return_lse=True), strict=True):
        assert torch.equal(a, b)


def test_k_and_v_in_one_tensor_are_read_and_not_appended_to():
    joined = K.clone()[:, None]
    assert decode(Q, joined, TABLE, LENS).isfinite().all()
    new, slots = torch.randn(3, 2, 64), torch.arange(3)
    with pytest.raises(ValueError, match=r"^v_cache: want memory of its own, got a tensor that begins where k_cache"):
        append(new, new, joined, slots)
    with pytest.raises(ValueError, match=r"^v_cache: want memory of its own"):
        rope_append(None, new, new, joined, slots, torch.ones(9, 64), slots)
    assert torch.equal(joined[:, 0], K)
    append(new[:0], new[:0], joined, slots[:0])


def test_a_cache_without_pages_has_no_page_to_read():
    empty, rows = K[:0], torch.zeros(0, 16, 576).to(BF)
    table, q = torch.zeros(1, 2, dtype=torch.int64), torch.randn(1, 8, 576).to(BF)
    for lens, fits in ((torch.tensor([0]), True), (torch.tensor([1]), False)):
        for call in (
            lambda n: decode(Q[:1], (empty, empty), table, n),
            lambda n: mla_decode(q, rows, table, n, softmax_scale=1.0),
        ):
            if fits:
                assert not call(lens).any()
            else:
                with pytest.raises(ValueError, match=r"^page_table: want page ids in \[0, 0\), got 0 at request 0"):
                    call(lens)


OTHER = [
    (lambda: PagedKVCache.from_tensors([(K, V), (K[:4], V[:4])]), ValueError, "layers: want layers alike"),
    (lambda: PagedKVCache.from_tensors([(K, V), (K, V[..., :32])]), ValueError, "layers: want layers alike"),
    (lambda: PagedLatentCache.from_tensors([LATENTS, LATENTS[:1]]), ValueError, "layers: want layers alike"),
    (lambda: PagedKVCache([1, 2], 64, 64), TypeError, "layers: want PagedKVLayer, got int at 0"),
    (lambda: PagedKVCache([PagedKVLayer.of((K, V))], 32, 64), ValueError, "head_dim, head_dim_v: want those of"),
    (lambda: PagedLatentLayer.of(LATENTS, kv_lora_rank=-64), ValueError, "kv_lora_rank: want"),
    (lambda: PagedLatentLayer.of(LATENTS, kv_lora_rank=0), ValueError, "kv_lora_rank: want a pos"),
    (lambda: exchange_cost("foo", 2, 1, 8, 64, 64), ValueError, "exchange: want 'all_to_all' or"),
    (lambda: exchange_cost("all_to_all", 0, 1, 8, 64, 64), ValueError, "world: want a positive number, got 0"),
    (lambda: exchange_cost("all_to_all", 2, -1, 8, 64, 64), ValueError, "rows: want 0 or more, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), OTHER, ids=[m for _, _, m in OTHER])
def test_what_cannot_be_meant_is_named(call, error, message):
    with pytest.raises(error) as e:
        call()
    assert str(e.value).startswith(message)


def test_layers_alike_are_a_cache():
    cache = PagedKVCache.from_tensors([(K, V), torch.zeros(8, 2, 16, 2, 64).to(BF)])
    assert cache.nbytes == 2 * (K.nbytes + V.nbytes)
