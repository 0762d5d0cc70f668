"""tersekv.compat.deep_gemm against dense sums in fp64: what each row scores, and where there is nothing."""

from __future__ import annotations

import pytest
import torch

from tersekv.backends.cpu import library
from tersekv.compat import _indexer
from tersekv.compat.deep_gemm import (
    fp8_fp4_mqa_logits,
    fp8_fp4_paged_mqa_logits,
    fp8_mqa_logits,
    fp8_paged_mqa_logits,
    get_paged_mqa_logits_metadata,
)
from tersekv.dispatch import launch_cache
from tersekv.errors import UnsupportedError

E4M3, I32 = torch.float8_e4m3fn, torch.int32


def logits(q, k, scales, weights, starts, ends):
    """q [T, H, D], k [N, D], scales [N], weights [T, H] → [T, N] fp64, −inf outside [start, end)."""
    products = torch.einsum("thd,nd->thn", q.double(), k.double()).relu()
    s = (products * weights.double()[..., None]).sum(1) * scales.double()
    key = torch.arange(len(k))
    return torch.where((key >= starts[:, None]) & (key < ends[:, None]), s, -torch.inf)


def same(got, want):
    there = want > -torch.inf
    off = (got.double() - want)[there]
    return torch.equal(got > -torch.inf, there) and (not there.any() or off.norm() <= 1e-5 * want[there].norm())


def pages(num_pages, page, dim):
    """Pages of the index cache by hand, and their codes and scales; scales are no powers of two."""
    k, scales = torch.randn(num_pages, page, dim).to(E4M3), torch.rand(num_pages, page) + 0.1
    kv = torch.full((num_pages, page * (dim + 4) + 16), 0x7F, dtype=torch.uint8)
    kv[:, : page * dim] = k.view(torch.uint8).flatten(1)
    kv[:, page * dim : page * (dim + 4)] = scales.view(torch.uint8)
    return kv[:, : page * (dim + 4)].view(num_pages, page, 1, dim + 4), k, scales


@pytest.mark.parametrize("keys", [100, 256, 0])  # in pages of one key, of 128, and none
@pytest.mark.parametrize("heads", [1, 8])
def test_ragged(keys, heads):
    torch.manual_seed(keys)
    ends = torch.tensor([0, 7, 99, 100, 60, 1], dtype=I32).clamp(max=keys)
    starts = torch.tensor([0, 0, 3, 50, 90, 0], dtype=I32)
    q, weights = torch.randn(6, heads, 128).to(E4M3), torch.randn(6, heads)
    k, scales = torch.randn(keys, 128).to(E4M3), torch.rand(keys) + 0.1
    want = logits(q, k, scales, weights, starts, ends)
    for clean in (True, False):
        assert same(fp8_mqa_logits(q, (k, scales), weights, starts, ends, clean), want)
    assert same(fp8_fp4_mqa_logits((q, None), [k, scales], weights, starts.long(), ends.long()), want)
    for columns in (1, 100, 130):  # counted from each row's start
        from_start = torch.full((6, columns), -torch.inf, dtype=torch.float64)
        for row, s, e, out in zip(want, starts, ends, from_start, strict=True):
            mine = row[s : max(s, e)][:columns]
            out[: len(mine)] = mine
        assert same(fp8_mqa_logits(q, (k, scales), weights, starts, ends, False, columns), from_start)
        before = starts - 5 * (starts == 0)  # a row's first key is 0 at least
        assert same(fp8_mqa_logits(q, (k, scales), weights, before, ends, False, columns), from_start)
        given = (q, None), (k, scales), weights, starts, ends, False, columns
        got = fp8_fp4_mqa_logits(*given, logits_dtype=torch.bfloat16)
        assert torch.equal(got, fp8_fp4_mqa_logits(*given).bfloat16())


@pytest.mark.parametrize("keys", [100, 256, 0])
@pytest.mark.parametrize("columns", [0, 7])
def test_ragged_without_rows(keys, columns):
    none, kv = torch.zeros(0, dtype=I32), (torch.zeros(keys, 128).to(E4M3), torch.ones(keys))
    got = fp8_mqa_logits(torch.zeros(0, 4, 128).to(E4M3), kv, torch.ones(0, 4), none, none, True, columns)
    assert got.shape == (0, columns or keys)


@pytest.mark.parametrize(("page", "dim", "next_n"), [(64, 128, 1), (16, 64, 2), (3, 128, 3)])
@pytest.mark.parametrize("each", [False, True])
def test_paged(page, dim, next_n, each):
    torch.manual_seed(page)
    b, heads, width = 3, 4, 200
    kv, k, scales = pages(190 // page * 3 + 3, page, dim)
    table = torch.randperm(len(k))[: len(k) // 3 * 3].view(3, -1).to(I32)
    q, weights = torch.randn(b, next_n, heads, dim).to(E4M3), torch.randn(b * next_n, heads)
    lens = torch.tensor([5, 189, 128], dtype=I32)
    ends = lens[:, None] - next_n + 1 + torch.arange(next_n)
    if each:
        lens = ends = torch.randint(0, 189, (b, next_n), dtype=I32)
    dead = torch.arange(table.shape[1]) >= (-(-ends.amax(1) // page))[:, None]
    meta = get_paged_mqa_logits_metadata(ends, page, 132)
    want = torch.full((b * next_n, width), -torch.inf, dtype=torch.float64)
    for i in range(b):
        mine = table[i].long()
        s = logits(q[i], k[mine].flatten(0, 1), scales[mine].flatten(), weights[i * next_n : (i + 1) * next_n],
                   torch.zeros(next_n), ends[i])  # fmt: skip
        want[i * next_n : (i + 1) * next_n, : s.shape[1]] = s[:, :width]
    table = table.masked_fill(dead, 2**30)
    got = fp8_paged_mqa_logits(q, kv, weights, lens, table, meta, width)
    assert got.shape == (b * next_n, width)
    assert same(got, want)
    again = fp8_fp4_paged_mqa_logits((q, None), kv[:, :, 0], weights, lens, table, meta, width, True)
    assert torch.equal(again, got)


@pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")
def test_a_call_like_one_before_it_takes_the_short_way(monkeypatch):
    for known in ("_launches", "_recent"):
        monkeypatch.setattr(launch_cache, known, {})
    kv, _, _ = pages(4, 16, 128)
    q, weights, lens = torch.randn(2, 2, 4, 128).to(E4M3), torch.randn(4, 4), torch.tensor([20, 32], dtype=I32)
    given = (q, kv, weights, lens, torch.tensor([[0, 1], [2, 3]], dtype=I32), None, 40)
    first = fp8_paged_mqa_logits(*given)

    def refuse(*_):
        raise AssertionError("the long way")

    monkeypatch.setattr(_indexer, "dispatch_call", refuse)
    assert torch.equal(fp8_paged_mqa_logits(*given), first)
    with pytest.raises(AssertionError, match="the long way"):
        fp8_paged_mqa_logits(*given[:-1], 41)


Q, KV = torch.zeros(2, 1, 4, 128).to(E4M3), torch.zeros(4, 16, 1, 132, dtype=torch.uint8)
PAGED = {"q": Q, "kv_cache": KV, "weights": torch.ones(2, 4), "context_lens": torch.ones(2, 1, dtype=I32)} | {
    "block_table": torch.zeros(2, 2, dtype=I32), "max_context_len": 32,
}  # fmt: skip
RAGGED = {"q": Q[:, 0], "kv": (torch.zeros(9, 128).to(E4M3), torch.ones(9)), "weights": torch.ones(2, 4)} | {
    "cu_seq_len_k_start": torch.zeros(2, dtype=I32), "cu_seq_len_k_end": torch.ones(2, dtype=I32),
}  # fmt: skip


@pytest.mark.parametrize(("given", "wrong", "message"), [
    (PAGED, {"q": Q[:, 0]}, "q: want [B, next_n, Hi, Di], got [2, 4, 128]"),
    (PAGED, {"q": Q.float()}, "q: want [T, Hi, D=128] float8_e4m3fn"),
    (PAGED, {"kv_cache": KV.float()}, "kv_cache: want [P, S, n] or [P, S, 1, n] uint8, got [4, 16, 1, 132] float32"),
    (PAGED, {"context_lens": torch.ones(2, 2, dtype=I32)}, "context_lens: want [B, next_n] = [2, 1], got [2, 2]"),
    (PAGED, {"context_lens": torch.ones(2, 1)}, "context_lens: want"),
    (PAGED, {"context_lens": torch.full((2, 1), 33)}, "context_lens: want at most 32 keys (max_pages * S), got 33"),
    (PAGED, {"weights": torch.ones(3, 4)}, "weights: want [T=2, Hi=4] float32, got [3, 4] float32"),
    (PAGED, {"block_table": torch.zeros(3, 2, dtype=I32)}, "block_table: want [B=2"),
    (PAGED, {"max_context_len": 1.5}, "max_context_len: want"),
    (RAGGED, {"max_seqlen_k": -1}, "max_seqlen_k: want 0 or more, got -1"),
    (RAGGED, {"kv": KV}, "kv: want (codes, scales), got Tensor"),
    (RAGGED, {"kv": (RAGGED["kv"][0], torch.ones(8))}, "kv[1]: want a scale for each of the 9 rows of kv[0], got [8]"),
    (RAGGED, {"kv": (torch.zeros(9, 128), torch.ones(9))}, "kv[0]: want"),
    (RAGGED, {"cu_seq_len_k_end": torch.full((2,), 10, dtype=I32)}, "cu_seq_len_k_end: want at most 9 keys"),
    (RAGGED, {"cu_seq_len_k_start": torch.zeros(3, dtype=I32)}, "cu_seq_len_k_start: want [T=2]"),
    (RAGGED, {"cu_seq_len_k_start": None}, "cu_seq_len_k_start: want Tensor, got NoneType"),
    (RAGGED, {"cu_seq_len_k_start": None, "max_seqlen_k": 7}, "cu_seq_len_k_start: want Tensor, got NoneType"),
    (RAGGED, {"cu_seq_len_k_end": None}, "cu_seq_len_k_end: want Tensor, got NoneType"),
    (RAGGED, {"cu_seq_len_k_end": 1}, "cu_seq_len_k_end: want Tensor, got int"),
    (RAGGED, {"cu_seq_len_k_end": torch.tensor(1)}, "cu_seq_len_k_end: want [T], got []"),
    (RAGGED, {"cu_seq_len_k_end": torch.ones(0, dtype=I32)}, "cu_seq_len_k_end: want [T=2]"),
])  # fmt: skip
def test_wrong_arguments(given, wrong, message):
    with pytest.raises((ValueError, TypeError)) as told:
        (fp8_paged_mqa_logits if given is PAGED else fp8_mqa_logits)(**{**given, **wrong})
    assert str(told.value).startswith(message)


def test_what_has_no_kernel_is_refused_by_name():
    with pytest.raises(UnsupportedError, match="indices: want None"):
        fp8_paged_mqa_logits(**PAGED, indices=torch.zeros(2))
    for q, more, message in (
        ((Q[:, 0], torch.ones(2, 4)), {}, r"q\[1\]: want None"),
        ((Q[:, 0], None), {"logits_dtype": torch.float16}, "logits_dtype: want float32 or bfloat16, got float16"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            fp8_fp4_mqa_logits(**{**RAGGED, "q": q, **more})
