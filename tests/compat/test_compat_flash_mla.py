"""tersekv.compat.flash_mla against loops over lists of slots, written from FlashMLA's own reference: what its LSE and
its largest logits are, and what stands for an empty row."""

from __future__ import annotations

import pytest
import torch

from tersekv.backends.cpu import library
from tersekv.compat import flash_mla
from tersekv.compat.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from tersekv.dispatch import launch_cache

L, R, P, S = 512, 64, 9, 7
META, _ = get_mla_metadata(torch.zeros(1), 1, 1)


def attend(q, rows, sink, scale):
    """q [D], rows [n, D], sink or None → out [L], lse and largest logit as FlashMLA has them; all fp64."""
    if not len(rows):
        return torch.zeros(L, dtype=torch.float64), torch.inf, -torch.inf
    s = rows @ q * scale
    lse = torch.logsumexp(s, 0)
    share = 1.0 if sink is None else 1 / (1 + torch.exp(sink.double() - lse))
    return torch.softmax(s, 0) @ rows[:, :L] * share, float(lse), float(s.max())


def expected(q, rows, lists, sinks, scale):
    """q [T, H, D], rows [N, D], lists: of each row → out [T, H, L], lse [T, H], largest [T, H]."""
    t, h = q.shape[:2]
    out, lse, top = torch.zeros(t, h, L, dtype=torch.float64), torch.zeros(t, h), torch.zeros(t, h)
    for i in range(t):
        for j in range(h):
            sink = None if sinks is None else sinks[j]
            out[i, j], lse[i, j], top[i, j] = attend(q[i, j].double(), rows[lists[i]], sink, scale)
    return out, lse, top


def records():
    """A cache of 656-byte records with pages that lie apart, scales that are no powers of two, and its fp64 rows."""
    codes = (torch.randn(P, S, L) * 3).to(torch.float8_e4m3fn)
    scales, rope = torch.rand(P, S, 4) + 0.1, torch.randn(P, S, R).bfloat16()
    pages = torch.full((P, S + 1, 656), 0x7F, dtype=torch.uint8)[:, :S]
    pages[..., :L] = codes.view(torch.uint8)
    pages[..., L : L + 16] = scales.view(torch.uint8)
    pages[..., L + 16 :] = rope.view(torch.uint8)
    latents = codes.double() * scales.double().repeat_interleave(128, -1)
    return pages[:, :, None], torch.cat([latents, rope.double()], -1).flatten(0, 1)


def records_of_584():
    """A cache of V4's records, in pages whose bytes end with a gap, and its fp64 rows: the last 64 columns in bf16."""
    codes, tail = (torch.randn(P, S, 448) * 3).to(torch.float8_e4m3fn), torch.randn(P, S, 64).bfloat16()
    exponents = torch.randint(120, 130, (P, S, 7), dtype=torch.uint8)
    step = -(-S * 584 // 576) * 576
    pages = torch.full((P, step), 0xFF, dtype=torch.uint8)
    rows, scales = pages[:, : S * 576].view(P, S, 576), pages[:, S * 576 : S * 584].view(P, S, 8)
    rows[..., :448], rows[..., 448:], scales[..., :7] = codes.view(torch.uint8), tail.view(torch.uint8), exponents
    latents = codes.double() * (2.0 ** (exponents.double() - 127)).repeat_interleave(64, -1)
    return pages[:, : S * 584].view(P, S, 1, 584), torch.cat([latents, tail.double()], -1).flatten(0, 1)


def near(got, want):
    return (got.double() - want).norm() <= 4e-3 * want.norm()


def same_lse(got, want):
    return torch.equal(got.isinf(), want.isinf()) and torch.allclose(got, want, atol=2e-3)


def lists_of(indices, lens, most):
    """The valid entries of each row of indices [T, n]."""
    return [[x for x in row[:n] if 0 <= x < most] for row, n in zip(indices.tolist(), lens, strict=True)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("drafts", [1, 3])
def test_lists_over_records(dtype, sinks, drafts):
    torch.manual_seed(drafts)
    b, heads, n = 3, 5, 12
    cache, rows = records()
    q = torch.randn(b, drafts, heads, L + R).bfloat16()
    indices = torch.stack([torch.randperm(P * S)[:n] for _ in range(b * drafts)]).to(torch.int32)
    indices[0] = -1  # a row without keys
    indices[1, ::3] = -1
    sink = torch.tensor([0.5, -torch.inf, torch.inf, 30.0, -30.0]) if sinks else None
    lens = torch.tensor([12, 5, 0], dtype=torch.int32)
    out, lse = flash_mla_with_kvcache(
        q, cache.view(dtype), None, None, L, META, None, None, False, True, indices.view(b, drafts, n), sink,
        topk_length=lens,
    )  # fmt: skip
    lists = lists_of(indices, lens.repeat_interleave(drafts).tolist(), P * S)
    want, want_lse, _ = expected(q.flatten(0, 1), rows, lists, sink, (L + R) ** -0.5)
    assert out.shape == (b, drafts, heads, L)
    assert out.dtype == torch.bfloat16
    assert near(out.flatten(0, 1), want)
    assert lse.shape == (b, heads, drafts)
    assert same_lse(lse.transpose(1, 2).flatten(0, 1), want_lse)
    assert (out[0, 0] == 0).all()
    assert (lse[0, :, 0] == torch.inf).all()


@pytest.mark.parametrize("drafts", [1, 2])
@pytest.mark.parametrize("how", ["records", "records and lengths", "records of 584", "half", "no rotary part"])
def test_a_second_cache(how, drafts):
    torch.manual_seed(drafts)
    b, heads, fp8 = 3, 4, how.startswith("records")
    width = L if how in ("no rotary part", "records of 584") else L + R
    (cache, rows), (extra, more) = [records_of_584() if how == "records of 584" else records() for _ in range(2)]
    if not fp8:
        cache, extra = torch.randn(P, S, 1, width).bfloat16(), torch.randn(5, 4, 1, width).bfloat16()
        rows, more = cache.double().flatten(0, 2), extra.double().flatten(0, 2)
    q, sink = torch.randn(b, drafts, heads, width).bfloat16(), torch.tensor([0.5, -torch.inf, 20.0, -1.0])
    indices, others = (
        torch.stack([torch.randperm(len(x))[:n] for _ in range(b * drafts)]).to(torch.int32)
        for x, n in ((rows, 9), (more, 6))
    )
    indices[-1], others[0], others[-1] = -1, -1, -1
    lens, extra_lens = [torch.tensor(x, dtype=torch.int32) for x in ([9, 0, 3], [0, 6, 2])]
    used = [9, 0, 3], [0, 6, 2]
    if how != "records and lengths":
        lens = extra_lens = None
        used = [9] * b, [6] * b
    out, lse = flash_mla_with_kvcache(
        q, cache, None, None, L, META, None, 0.07, False, fp8, indices.view(b, drafts, 9), sink, extra,
        others.view(b, drafts, 6), lens, extra_lens,
    )  # fmt: skip
    first, second = (
        lists_of(x, [n for n in ns for _ in range(drafts)], len(r))
        for x, ns, r in ((indices, used[0], rows), (others, used[1], more))
    )
    lists = [x + [len(rows) + i for i in y] for x, y in zip(first, second, strict=True)]
    want, want_lse, _ = expected(q.flatten(0, 1), torch.cat([rows, more]), lists, sink, 0.07)
    assert near(out.flatten(0, 1), want)
    assert same_lse(lse.transpose(1, 2).flatten(0, 1), want_lse)
    assert (lse[-1, :, -1] == torch.inf).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
def test_dense(causal, fp8):
    torch.manual_seed(0)
    b, drafts, heads, scale = 3, 2, 3, 0.05
    cache, rows = records()
    if not fp8:
        cache = torch.randn(P, S, 1, L + R).bfloat16()
        rows = cache.double().flatten(0, 2)
    table = torch.randperm(P).view(3, 3).to(torch.int32)
    lens = torch.tensor([17, 0, 1], dtype=torch.int32)
    q = torch.randn(b, drafts, heads, L + R).bfloat16()
    place = torch.empty(b, drafts, heads, L, dtype=torch.bfloat16)
    given = {"softmax_scale": scale, "causal": causal, "is_fp8_kvcache": fp8}
    out, lse = flash_mla_with_kvcache(q, cache, table, lens, L, META, **given, out=place)
    assert out is place
    lists = []
    for i in range(b):
        slots = [int(table[i, j // S]) * S + j % S for j in range(int(lens[i]))]
        lists += [slots[: max(len(slots) - drafts + t + 1, 0)] if causal else slots for t in range(drafts)]
    want, want_lse, _ = expected(q.flatten(0, 1), rows, lists, None, scale)
    assert near(out.flatten(0, 1), want)
    assert same_lse(lse.transpose(1, 2).flatten(0, 1), want_lse)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("how", ["plain", "strided", "lens and out", "no rotary part"])
def test_sparse_prefill(sinks, how):
    torch.manual_seed(0)
    t, heads, n, n_kv, width = 6, 4, 20, 30, L if how == "no rotary part" else L + R
    wide = 128 if how == "strided" else 0
    q = torch.randn(t, heads + 1, width + wide).bfloat16()[:, :heads, :width]
    kv = torch.randn(n_kv, 2, width + wide).bfloat16()[:, :1, :width]
    indices = torch.stack([torch.randperm(n_kv + 9)[:n] for _ in range(t)]).to(torch.int32)
    indices[indices >= n_kv + 5] = 2**31 - 1
    indices[1, :5], indices[2] = -123456, n_kv
    sink = torch.tensor([0.5, -torch.inf, torch.inf, 2.0]) if sinks else None
    lens = torch.tensor([20, 3, 20, 0, 1, 20], dtype=torch.int32) if how == "lens and out" else None
    place = torch.empty(t, heads, L, dtype=torch.bfloat16) if how == "lens and out" else None
    before = indices.clone()
    out, top, lse = flash_mla_sparse_fwd(q, kv, indices[:, None], 0.1, L, sink, lens, place)
    assert torch.equal(indices, before)
    assert place is None or out is place
    lists = lists_of(indices, [n] * t if lens is None else lens.tolist(), n_kv)
    want, want_lse, want_top = expected(q, kv[:, 0].double(), lists, sink, 0.1)
    assert near(out, want)
    assert same_lse(lse, want_lse)
    assert same_lse(top, want_top)
    assert (out[2] == 0).all()
    assert (lse[2] == torch.inf).all()
    assert (top[2] == -torch.inf).all()
    unsigned = indices.long().to(torch.uint32)[:, None]
    again = flash_mla_sparse_fwd(q, kv, unsigned, 0.1, L, sink, lens)
    assert all(map(torch.equal, again, (out, top, lse)))


def test_queries_of_requests_that_lie_apart():
    cache, _ = records()
    base = torch.randn(3, 4, 5, L + R).bfloat16()
    indices = torch.randint(P * S, (3, 4, 6), dtype=torch.int32)
    parts = base[:2, :3, :4], indices[:2, :3, :5]
    assert not parts[0].is_contiguous()
    got, want = (
        flash_mla_with_kvcache(q, cache, None, None, L, is_fp8_kvcache=True, indices=x)
        for q, x in (parts, [y.contiguous() for y in parts])
    )
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.skipif(library.why_no_library() is not None, reason="no native library here")
def test_a_call_like_one_before_it_takes_the_short_way(monkeypatch):
    for known in ("_launches", "_recent"):
        monkeypatch.setattr(launch_cache, known, {})
    cache = torch.randn(P, S, 1, L + R).bfloat16()
    table, lens = torch.arange(P, dtype=torch.int32).view(3, 3), torch.tensor([17, 0, 1], dtype=torch.int32)
    q = [torch.randn(3, 2, 3, L + R).bfloat16() for _ in range(2)]
    first = [flash_mla_with_kvcache(x, cache, table, lens, L, causal=True) for x in q]

    def refuse(*_):
        raise AssertionError("the long way")

    monkeypatch.setattr(flash_mla, "dispatch_call", refuse)
    for x, want in zip(q, first, strict=True):
        got = flash_mla_with_kvcache(x, cache, table, lens, L, causal=True)
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])
        assert (got[1][1] == torch.inf).all()
    with pytest.raises(AssertionError, match="the long way"):
        flash_mla_with_kvcache(q[0], cache, table, lens, L, causal=False)


RECORDS = torch.zeros(P, S, 1, 656, dtype=torch.uint8)
HALF = torch.zeros(P, S, 1, L + R, dtype=torch.bfloat16)
SLOTS = torch.zeros(2, 1, 4, dtype=torch.int32)
TABLE = {"block_table": torch.zeros(2, 3, dtype=torch.int32), "cache_seqlens": torch.ones(2, dtype=torch.int32)}


@pytest.mark.parametrize(("wrong", "message"), [
    ({"q": torch.zeros(2, 5, L + R)}, "q: want [B, Q, H, L + R], got [2, 5, 576]"),
    ({"causal": True}, "causal: want False with indices, whose rows see all that they list, got True"),
    ({"k_cache": HALF}, "k_cache: want records of 656 or 584 bytes with is_fp8_kvcache, got [9, 7, 1, 576] bfloat16"),
    ({"k_cache": HALF[..., :500], "is_fp8_kvcache": False}, "k_cache: want rows of 576 as in q, got [9, 7, 1, 500]"),
    ({"k_cache": torch.zeros(P, S, 2, 656, dtype=torch.uint8)}, "k_cache: want [P, S, dim] or [P, S, 1, dim], got"),
    ({"head_dim_v": 256}, "head_dim_v: want 512, and 576 columns of q, over records of 656 bytes, got 256, 576"),
    ({"indices": SLOTS[:1]}, "indices: want [B=2, Q=1, n], got [1, 1, 4]"),
    ({"indices": SLOTS.transpose(0, 1)}, "indices: want [B=2, Q=1, n], got [1, 2, 4]"),
    ({"indices": SLOTS.float()}, "indices: want [T=2, n] int32 | int64 | uint32, got [2, 4] float32"),
    ({"topk_length": torch.ones(3, dtype=torch.int32)}, "topk_length: want [T=2] int32 | int64 | uint32, got [3]"),
    ({"q": torch.zeros(2, 3, 5, L + R), "topk_length": torch.ones(6).int()}, "topk_length: want [B=2], got [6]"),
    ({"attn_sink": torch.ones(4)}, "attn_sink: want [H=5] float32, got [4] float32"),
    ({"out": torch.zeros(2, 1, 5, 500).bfloat16()}, "out: want contiguous [2, 1, 5, 512], got [2, 1, 5, 500]"),
    ({"softmax_scale": torch.ones(1)}, "softmax_scale: want"),
    ({"indices": None, **TABLE, "attn_sink": torch.ones(5)}, "attn_sink: want None without indices, got a tensor"),
    ({"indices": None, "block_table": None}, "block_table: want"),
])  # fmt: skip
def test_wrong_arguments(wrong, message):
    given = {"q": torch.zeros(2, 1, 5, L + R).bfloat16(), "k_cache": RECORDS, "block_table": None} | {
        "cache_seqlens": None, "head_dim_v": L, "indices": SLOTS, "is_fp8_kvcache": True, **wrong
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as told:
        flash_mla_with_kvcache(**given)
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"kv": torch.zeros(9, 2, L + R).bfloat16()}, "kv: want one head, got [9, 2, 576]"),
    ({"indices": SLOTS.expand(2, 2, 4)}, "indices: want one head, got [2, 2, 4]"),
    ({"kv": torch.zeros(9, 1, L).bfloat16()}, "kv: want rows of 576 as in q, got [9, 1, 512] bfloat16"),
    ({"kv": torch.zeros(9, 1, L + R)}, "kv: want bfloat16 or float16"),
    ({"sm_scale": None}, "sm_scale: want"),
    ({"topk_length": torch.ones(3, dtype=torch.int32)}, "topk_length: want [T=2]"),
])  # fmt: skip
def test_wrong_arguments_of_a_prefill(wrong, message):
    given = {"q": torch.zeros(2, 5, L + R).bfloat16(), "kv": torch.zeros(9, 1, L + R).bfloat16()}
    with pytest.raises((ValueError, TypeError)) as told:
        flash_mla_sparse_fwd(**{**given, "indices": SLOTS, "sm_scale": 0.1, **wrong})
    assert str(told.value).startswith(message)


@pytest.mark.parametrize(("wrong", "message"), [
    ({"extra_k_cache": RECORDS}, "extra_indices_in_kvcache: want the lists of extra_k_cache, got None"),
    ({"extra_indices_in_kvcache": SLOTS}, "extra_indices_in_kvcache: want None without extra_k_cache, got a tensor"),
    ({"extra_topk_length": SLOTS}, "extra_topk_length: want None without extra_k_cache, got a tensor"),
    ({"extra_k_cache": HALF, "extra_indices_in_kvcache": SLOTS}, "extra_k_cache: want records of 656 or 584 bytes"),
    ({"extra_k_cache": RECORDS, "extra_indices_in_kvcache": SLOTS[0]}, "extra_indices_in_kvcache: want [B, Q, n], got"),
    ({"extra_k_cache": RECORDS, "extra_indices_in_kvcache": SLOTS.transpose(0, 1)},
     "extra_indices_in_kvcache: want [B=2, Q=1, n], got [1, 2, 4]"),
    ({"extra_k_cache": RECORDS, "extra_indices_in_kvcache": SLOTS, "extra_topk_length": torch.ones(3).int()},
     "extra_topk_length: want [T=2]"),
    ({"extra_k_cache": RECORDS, "indices": None, **TABLE}, "extra_k_cache: want None without indices, got a tensor"),
])  # fmt: skip
def test_wrong_arguments_of_a_second_cache(wrong, message):
    given = {"q": torch.zeros(2, 1, 5, L + R).bfloat16(), "k_cache": RECORDS, "block_table": None} | {
        "cache_seqlens": None, "head_dim_v": L, "indices": SLOTS, "is_fp8_kvcache": True, **wrong
    }  # fmt: skip
    with pytest.raises((ValueError, TypeError)) as told:
        flash_mla_with_kvcache(**given)
    assert str(told.value).startswith(message)
