"""vLLM's functions of an indexer: bytes of its pages by hand, selections by sorting."""

from __future__ import annotations

import math

import pytest
import torch

from tersekv.backends.cpu import library
from tersekv.compat import _indexer
from tersekv.compat.vllm import (
    cp_gather_indexer_k_quant_cache,
    indexer_k_quant_and_cache,
    top_k_per_row_decode,
    top_k_per_row_prefill,
)
from tersekv.dispatch import launch_cache
from tersekv.errors import UnsupportedError

P, S, D = 4, 8, 128


def test_the_bytes_of_a_page():
    torch.manual_seed(0)
    k = torch.randn(9, D).bfloat16() * torch.logspace(-6, 6, 9)[:, None].bfloat16()
    k[3] = 0
    cache = torch.full((P, S * 132 + 12), 9, dtype=torch.uint8)[:, : S * 132].view(P, S, 132)
    slots = torch.tensor([0, 31, 8, 9, -1, 7, 16, P * S])
    indexer_k_quant_and_cache(k, cache, slots, 128, "ue8m0")
    want = torch.full((P, S * 132), 9, dtype=torch.uint8)
    for row, slot in zip(k.float(), slots.tolist(), strict=False):
        if not 0 <= slot < P * S:
            continue
        scale = 2.0 ** math.ceil(math.log2(max(float(row.abs().max()), 1e-4) / 448))
        page, at = divmod(slot, S)
        want[page, at * D : (at + 1) * D] = (row / scale).to(torch.float8_e4m3fn).view(torch.uint8)
        want[page, S * D + 4 * at : S * D + 4 * at + 4] = torch.tensor([scale]).view(torch.uint8)
    assert torch.equal(cache.flatten(1), want)


@pytest.mark.parametrize("as_floats", [False, True])
def test_keys_are_gathered(as_floats):
    torch.manual_seed(0)
    cache = torch.randint(0, 256, (P, S, 132), dtype=torch.uint8)
    table = torch.tensor([[2, 0], [1, 2**30], [3, 2**30]], dtype=torch.int32)
    ends = torch.tensor([0, 11, 11, 15], dtype=torch.int32)  # the second request has no key
    codes = torch.full((17, D), 7, dtype=torch.uint8)
    scales = torch.full((17, 4), 7, dtype=torch.uint8)
    given = (codes.view(torch.float8_e4m3fn), scales.view(torch.float32)) if as_floats else (codes, scales)
    cp_gather_indexer_k_quant_cache(cache, *given, table, ends)
    flat, places = (
        cache.flatten(1),
        [(2, i) for i in range(8)] + [(0, i) for i in range(3)] + [(3, i) for i in range(4)],
    )
    for row, (page, at) in enumerate(places):
        assert torch.equal(codes[row], flat[page, at * D : (at + 1) * D])
        assert torch.equal(scales[row], flat[page, S * D + 4 * at : S * D + 4 * at + 4])
    assert (codes[15:] == 7).all()
    assert (scales[15:] == 7).all()


def largest(row, k):
    order = sorted(range(len(row)), key=lambda j: (-row[j], j))[:k]
    return sorted(order) + [-1] * (k - len(order))


@pytest.mark.parametrize("next_n", [1, 3])
@pytest.mark.parametrize("each", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint32])
def test_selection_of_a_decode(next_n, each, dtype):
    torch.manual_seed(next_n)
    rows, width, k = 4 * next_n, 50, 8
    logits = torch.randn(rows + 2, width).round(decimals=1)
    lens = torch.tensor([50, 3, 20, 9], dtype=torch.int32)
    visible = (lens[:, None] - next_n + 1 + torch.arange(next_n)).flatten()
    if each:
        lens = torch.randint(0, width, (4, next_n), dtype=torch.int32)
        visible = lens.flatten()
    out = torch.full((rows + 2, k + 3), 99, dtype=torch.int32)
    top_k_per_row_decode(logits, next_n, lens.to(dtype), out[:, :k], rows, width, 1, k)
    want = [largest(logits[t, : max(int(n), 0)].tolist(), k) for t, n in enumerate(visible)]
    assert out[:rows, :k].tolist() == want
    assert (out[rows:] == 99).all()
    assert (out[:, k:] == 99).all()


def test_selection_of_a_prefill():
    torch.manual_seed(0)
    starts, ends = torch.tensor([0, 10, 10, 49, 30], dtype=torch.int32), torch.tensor([50, 13, 40, 50, 20])
    logits, out = torch.randn(5, 50), torch.empty(5, 6, dtype=torch.int32)
    for t in range(5):  # what lies outside is not looked at
        logits[t, : starts[t]], logits[t, max(ends[t], 0) :] = torch.inf, torch.nan
    top_k_per_row_prefill(logits, starts, ends.to(torch.int32), out, 5, 50, 1, 6)
    assert out.tolist() == [largest(logits[t, starts[t] : ends[t]].tolist(), 6) for t in range(5)]


@pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")
def test_a_call_like_one_before_it_takes_the_short_way(monkeypatch):
    for known in ("_launches", "_recent"):
        monkeypatch.setattr(launch_cache, known, {})
    logits, lens, out = torch.randn(2, 50), torch.tensor([50, 3], dtype=torch.int32), torch.empty(2, 4).int()
    k, cache, slots = torch.randn(3, D).bfloat16(), torch.zeros(P, S, 132, dtype=torch.uint8), torch.arange(3)

    def both():
        top_k_per_row_decode(logits, 1, lens, out, 2, 50, 1, 4)
        indexer_k_quant_and_cache(k, cache, slots, 128, "ue8m0")
        return out.clone(), cache.clone()

    first, seen = both(), []
    dispatch = _indexer.dispatch_call
    monkeypatch.setattr(_indexer, "dispatch_call", lambda op, *a: (seen.append(op), dispatch(op, *a)))
    out.zero_(), cache.zero_()
    assert all(map(torch.equal, both(), first))
    assert "index_topk" not in seen


CACHE, LENS = torch.zeros(P, S, 132, dtype=torch.uint8), torch.tensor([3, 2])
OUT, SCALES = torch.empty(2, 4, dtype=torch.int32), torch.empty(5, 4, dtype=torch.uint8)
CODES, TABLE, BEGINS = torch.empty(5, D, dtype=torch.uint8), torch.tensor([[1, 2]]), torch.tensor([0, 5])


@pytest.mark.parametrize(("function", "given", "message"), [
    (indexer_k_quant_and_cache, (torch.zeros(2, 64), CACHE, LENS, 128, "ue8m0"), "k: want"),
    (indexer_k_quant_and_cache, (torch.zeros(1, D), CACHE, LENS, 128, "ue8m0"), "k: want at least 2 rows"),
    (indexer_k_quant_and_cache, (torch.zeros(2, D), CACHE, LENS, 64, "ue8m0"), "quant_block_size: want 128, got 64"),
    (indexer_k_quant_and_cache, (torch.zeros(2, D), CACHE.int(), LENS, 128, "ue8m0"), "kv_cache: want [P, S, n]"),
    (cp_gather_indexer_k_quant_cache, (CACHE, SCALES, SCALES, LENS[None], LENS), "dst_k: want 5 rows of 128 bytes"),
    (cp_gather_indexer_k_quant_cache, (CACHE, CODES, SCALES, TABLE.float(), BEGINS), "block_table: want int32 | int64"),
    (cp_gather_indexer_k_quant_cache, (CACHE, CODES, SCALES, TABLE, BEGINS > 0), "cu_seq_lens: want int32 | int64"),
    (cp_gather_indexer_k_quant_cache, (CACHE, CODES, SCALES, TABLE, LENS[:1]), "cu_seq_lens: want [2], one more than"),
    (cp_gather_indexer_k_quant_cache, (CACHE, CODES, SCALES, TABLE - 2, BEGINS), "block_table: want pages in [0, 4)"),
    (cp_gather_indexer_k_quant_cache, (CACHE, CODES, SCALES, TABLE + 3, BEGINS), "block_table: want pages in [0, 4)"),
    (cp_gather_indexer_k_quant_cache, (CACHE.view(P, S // 2, 264), CODES, SCALES, TABLE, BEGINS), "kv_cache: want one"),
    (cp_gather_indexer_k_quant_cache, (CACHE.view(2 * P, 4, 132), CODES, SCALES, TABLE[:, :1], BEGINS),
     "cu_seq_lens: want at most 4 keys a request"),
    (cp_gather_indexer_k_quant_cache, (CACHE, CODES, SCALES, TABLE[:, :0], BEGINS), "cu_seq_lens: want at most 0 keys"),
    (cp_gather_indexer_k_quant_cache, (CACHE, CODES, torch.empty(5, 2)[:, ::2], TABLE, BEGINS), "dst_scale: want"),
    (top_k_per_row_decode, (torch.zeros(2, 9), 3, LENS[0], OUT, 2, 9, 1, 4), "seq_lens: want [B] or [B, next_n]"),
    (top_k_per_row_decode, (torch.zeros(2, 9), 0, LENS, OUT, 2, 9, 1, 4), "next_n: want 1 or more, got 0"),
    (top_k_per_row_decode, (torch.zeros(2, 9), 1, LENS, OUT, 3, 9, 1, 4), "logits: want at least 3 rows"),
    (top_k_per_row_decode, (torch.zeros(2, 9), 1, LENS, OUT, 2, 9, 1, 5), "raw_topk_indices: want [T=2, K=5]"),
    (top_k_per_row_decode, (torch.zeros(2, 9).half(), 1, LENS, OUT, 2, 9, 1, 4), "logits: want [T, W] float32"),
    (top_k_per_row_decode, (torch.zeros(2, 9), 1, LENS.float(), OUT, 2, 9, 1, 4), "seq_lens: want [T=2]"),
    (top_k_per_row_prefill, (torch.zeros(2, 9), LENS.float(), LENS, OUT, 2, 9, 1, 4), "cu_seqlen_ks: want [T=2]"),
    (top_k_per_row_prefill, (torch.zeros(2, 9), LENS, LENS, OUT, 2, 9, 1, 0), "topk_tokens: want 1 or more, got 0"),
])  # fmt: skip
def test_wrong_arguments(function, given, message):
    with pytest.raises((ValueError, TypeError)) as told:
        function(*given)
    assert str(told.value).startswith(message)


def test_scales_that_are_no_powers_of_two_are_refused():
    with pytest.raises(UnsupportedError, match="kv_cache_dtype: want 'ue8m0'"):
        indexer_k_quant_and_cache(torch.zeros(2, D), CACHE, LENS, 128, "fp8")
