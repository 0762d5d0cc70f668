"""tersekv.compat.flashinfer: the wrappers for pages that engines plan once a step and run in each layer."""

import math

import pytest
import torch
from compat_reference import BF16, E4M3, FP16, LENS, TABLE, S, attention, close, kv_codes, values

from tersekv import UnsupportedError
from tersekv.compat import flashinfer as fi

INDPTR = [0, 3, 4, 8]
INDICES = [5, 2, 7, 0, 1, 6, 3, 4]
LAST = [1, 1, 2]
ROWS = [4, 1, 14]


def i32(values):
    return torch.tensor(values, dtype=torch.int32)


def pages():
    return i32(INDPTR), i32(INDICES), i32(LAST)


def starts(rows):
    return i32([0, *torch.tensor(rows).cumsum(0).tolist()])


def prefills(stored, q_type=BF16, layout="NHD", rows=ROWS, d=32, **options):
    """(wrapper, as planned; q; cache as its run takes it; fp64 K and V; options of the run)."""
    (k, ksf), (v, vsf) = kv_codes(stored, 2, d), kv_codes(stored, 2, d)
    q = torch.randn(sum(rows), 4, d).to(q_type)
    w = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8), layout)
    w.plan(starts(rows), *pages(), 4, 2, d, S, q_data_type=q_type, kv_data_type=stored, **options)
    given = [x if x is None or layout == "NHD" else x.transpose(1, 2).contiguous() for x in (k, v, ksf, vsf)]
    sf = {} if ksf is None else {"kv_cache_sf": (given[2], given[3])}
    return w, q, (given[0], given[1]), (values(k, ksf), values(v, vsf)), sf


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("stored", [BF16, E4M3, torch.uint8])
def test_causal_rows_over_pages(stored, layout):
    w, q, cache, (k, v), sf = prefills(stored, layout=layout, causal=True, o_data_type=BF16)
    sinks = torch.randn(4)
    out, lse = w.run(q, cache, k_scale=0.8, v_scale=1.5, q_scale=1.2, sinks=sinks, return_lse=True, **sf)
    logits = 0.8 * 1.2 / math.sqrt(32)
    close(out, attention(q, k, v, TABLE, LENS, ROWS, logits=logits, out=1.5, sinks=sinks))
    first = (k[0, 0].repeat_interleave(2, 0) * q[4].double()).sum(-1) * logits  # the one key of request 1
    torch.testing.assert_close(lse[4].double(), torch.logaddexp(first, sinks.double()) / math.log(2), rtol=0, atol=1e-3)


def test_rows_are_not_causal_unless_they_are_said_to_be():
    w, q, cache, (k, v), _ = prefills(FP16, FP16)
    close(w.run(q, cache), attention(q, k, v, TABLE, LENS, ROWS, logits=32**-0.5, sees=lambda b, i, j: True))
    with pytest.raises(UnsupportedError, match="window_left: want -1 with causal=False"):
        w.run(q, cache, window_left=3)


def test_a_window_does_not_count_the_querys_own_key_and_scores_are_capped():
    w, q, cache, (k, v), _ = prefills(BF16, causal=True, window_left=4, sm_scale=0.3)
    out = torch.full((sum(ROWS), 4, 32), float("nan"), dtype=BF16)
    assert w.run(q, cache, out=out) is out
    close(out, attention(q, k, v, TABLE, LENS, ROWS, logits=0.3, window=5))
    w, q, cache, _, _ = prefills(BF16, causal=True, logits_soft_cap=1e-6)
    out = w.run(q, cache)[:4]  # all scores are alike: means of the values that are seen
    assert out.isfinite().all()


def test_an_fp8_query_brings_its_scales_and_the_output_its_type():
    w, q, cache, (k, v), _ = prefills(E4M3, E4M3, causal=True, o_data_type=FP16)
    scales = torch.tensor([1.1]), torch.tensor([0.7]), torch.tensor([2.0])
    out = w.run(q, cache, *scales)
    assert out.dtype == FP16
    close(out, attention(q.float(), k, v, TABLE, LENS, ROWS, logits=1.1 * 0.7 / math.sqrt(32), out=2.0))


@pytest.mark.parametrize("n", [1, 3])
def test_decodes(n):
    lens, rows = [9, 3, 14], [n] * 3
    (k, _), (v, _) = kv_codes(E4M3, 2, 32, lens), kv_codes(E4M3, 2, 32, lens)
    q = torch.randn(3 * n, 4, 32).to(BF16)
    w = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8), use_tensor_cores=True)
    options = {"q_data_type": BF16, "kv_data_type": "float8_e4m3fn", "window_left": 5, "q_len_per_req": n}
    w.plan(i32(INDPTR), i32(INDICES), i32([1, 3, 2]), 4, 2, 32, S, **options)
    out, lse = w.run_return_lse(q, (k, v), k_scale=0.5)
    close(out, attention(q, k.double(), v.double(), TABLE, lens, rows, logits=0.5 / math.sqrt(32), window=6))
    assert lse.shape == (3 * n, 4)


def test_the_older_forward_replaces_the_plans_options():
    w, q, cache, (k, v), _ = prefills(FP16, FP16, causal=False, window_left=2, sm_scale=9.0)
    out, lse = w.forward_return_lse(q, cache, True, k_scale=0.5, v_scale=2.0, window_left=4, sm_scale=0.3)
    close(out, attention(q, k, v, TABLE, LENS, ROWS, logits=0.15, out=2.0, window=5))
    again = w.run(q, cache, k_scale=0.5, v_scale=2.0)  # what it was told stays, as in FlashInfer
    assert torch.equal(out, again)
    assert lse.shape == (sum(ROWS), 4)
    close(w.forward(q, cache), attention(q, k, v, TABLE, LENS, ROWS, logits=32**-0.5, sees=lambda b, i, j: True))
    capped = w.forward(q, cache, causal=True, logits_soft_cap=1e-6)[:4]
    assert not torch.equal(capped, w.forward(q, cache, causal=True)[:4])
    with pytest.raises(UnsupportedError, match="pos_encoding_mode: want 'NONE'"):
        w.forward(q, cache, pos_encoding_mode="ALIBI")

    lens, rows = [9, 1, 14], [1] * 3
    d = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8))
    with pytest.raises(RuntimeError, match="plan: want a call of plan"):
        d.forward(q[:3], cache)
    d.begin_forward(*pages(), 4, 2, 32, S, q_data_type=FP16, window_left=1, logits_soft_cap=1.0)
    out, lse = d.forward_return_lse(q[:3], cache, q_scale=0.5, k_scale=0.5, v_scale=2.0, window_left=4, sm_scale=2.0)
    assert lse.shape == (3, 4)
    close(out, attention(q[:3], k, v, TABLE, lens, rows, logits=0.5, out=2.0, window=5))
    close(d.forward(q[:3], cache), attention(q[:3], k, v, TABLE, lens, rows, logits=32**-0.5))


def test_a_graphs_plan_is_overwritten_in_place():
    w = fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8), use_cuda_graph=True)
    assert w.is_cuda_graph_enabled
    w.plan(starts(ROWS), *pages(), 4, 2, 32, S, causal=True)
    kept = w._plan
    w.plan(starts([1, 1, 2]), i32([0, 1, 2, 4]), i32([3, 2, 1, 0]), i32([2, 2, 2]), 4, 2, 32, S, causal=True)
    assert w._plan.page_table is kept.page_table
    assert w._plan.seq_lens.tolist() == kept.seq_lens.tolist() == [2, 2, 6]
    assert w._plan.page_table[2, :2].tolist() == [1, 0]
    with pytest.raises(ValueError, match="indices: want what fits the first plan"):
        w.plan(starts([1, 1]), i32([0, 1, 2]), i32([3, 2]), i32([2, 2]), 4, 2, 32, S, causal=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_one_request_whose_keys_lie_in_no_cache(layout):
    q, k, v = torch.randn(5, 4, 32).to(BF16), torch.randn(11, 2, 32).to(BF16), torch.randn(11, 2, 16).to(BF16)
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1).contiguous(), v.transpose(0, 1).contiguous())
    out, lse = fi.single_prefill_with_kv_cache(q, *given, causal=True, kv_layout=layout, window_left=6, return_lse=True)
    want = attention(
        q, k[:, None].double(), v[:, None].double(), [list(range(11))], [11], [5], logits=32**-0.5, window=7
    )
    close(out, want)
    assert lse.shape == (5, 4)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "keys"), [(3, 0), (0, 5), (5, 3)])
def test_one_request_of_few_or_no_keys(rows, keys, causal, layout):
    q, k, v = torch.randn(rows, 4, 32).to(BF16), torch.randn(keys, 2, 32).to(BF16), torch.randn(keys, 2, 16).to(BF16)
    given = (k, v) if layout == "NHD" else (k.transpose(0, 1), v.transpose(0, 1))
    out, lse = fi.single_prefill_with_kv_cache(q, *given, causal=causal, kv_layout=layout, return_lse=True)
    assert (out.shape, lse.shape) == ((rows, 4, 16), (rows, 4))
    blind = rows if keys == 0 else max(rows - keys, 0) * causal
    assert not out[:blind].any()
    assert lse.isneginf().all(1).sum() == blind


def test_what_is_wrong_with_keys_of_no_cache_is_told_by_their_names():
    q, k = torch.randn(5, 4, 32).to(BF16), torch.randn(11, 2, 32).to(BF16)
    for given, message in (
        ((q, k, k[1:]), r"^v: want \[P=1, S=11.* \(S as in k\)$"),
        ((q, k, k.half()), "^v: want .* bfloat16, got .* float16"),
        ((q, k, k, torch.ones(4)), r"^scale_q: want a number or float32 with 1 element, got \[4\] float32"),
    ):
        with pytest.raises(ValueError, match=message):
            fi.single_prefill_with_kv_cache(*given)


@pytest.mark.parametrize("causal", [False, True])
def test_a_given_lse_is_base_2_with_and_without_return_lse(causal):
    w, q, cache, _, _ = prefills(BF16, causal=causal)
    d = decodes(q_data_type=BF16)
    for wrapper, rows in ((w, q), (d, q[:1])):
        want = wrapper.run(rows, cache, return_lse=True)[1]
        for return_lse in (False, True, False):
            lse = torch.full_like(want, float("nan"))
            wrapper.run(rows, cache, lse=lse, return_lse=return_lse)
            assert torch.equal(lse, want)


def test_one_data_type_stands_for_those_that_are_left_out():
    for options, want in (
        ({"data_type": BF16, "q_data_type": None}, (BF16, BF16, BF16)),
        ({"data_type": BF16}, (FP16, BF16, FP16)),
        ({"data_type": FP16, "q_data_type": BF16}, (BF16, FP16, BF16)),
        ({"data_type": BF16, "kv_data_type": E4M3}, (FP16, E4M3, FP16)),
    ):
        assert decodes(**options)._plan.dtypes == want


def test_page_ids_beyond_32_bits_are_no_other_pages():
    w = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8))
    w.plan(i32([0, 1]), torch.tensor([2**32 + 5]), i32([1]), 4, 2, 32, S, q_data_type=BF16)
    k = torch.zeros(8, S, 2, 32, dtype=BF16)
    with pytest.raises(ValueError, match=r"^indices: want page ids in \[0, 8\)"):
        w.run(torch.zeros(1, 4, 32, dtype=BF16), (k, k))


def decodes(indptr=(0, 3), last=(1,), **options):
    w = fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8))
    w.plan(i32(indptr), i32([5, 2, 7]), i32(last), 4, 2, 32, S, **options)
    return w


BAD = {
    "layout": (
        lambda: fi.BatchPrefillWithPagedKVCacheWrapper(torch.empty(1), "SHD"), ValueError, "kv_layout: want 'NHD'",
    ),
    "no plan": (
        lambda: fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1)).run(torch.empty(1, 4, 32), torch.empty(1)),
        RuntimeError, "plan: want a call of plan",
    ),
    "mask": (lambda: prefills(BF16, custom_mask=torch.ones(3)), UnsupportedError, "custom_mask: want None"),
    "rope": (lambda: prefills(BF16, pos_encoding_mode="ALIBI"), UnsupportedError, "pos_encoding_mode: want 'NONE'"),
    "requests": (lambda: prefills(BF16, rows=[1, 2]), ValueError, "qo_indptr: want B \\+ 1 = 4 entries, got 3"),
    "first": (lambda: decodes(indptr=[1, 2]), ValueError, "^indptr: want numbers that begin with 0 and never fall"),
    "falling": (lambda: decodes(indptr=[0, 2, 1], last=[1, 1]), ValueError, "^indptr: want numbers that begin with 0"),
    "beyond": (lambda: decodes(indptr=[0, 9]), ValueError, "^indptr: want at most 3, the indices, got 9"),
    "none": (lambda: decodes(last=[0]), ValueError, f"^last_page_len: want 1 to page_size {S}, got 0"),
    "over": (lambda: decodes(last=[S + 1]), ValueError, f"^last_page_len: want 1 to page_size {S}, got {S + 1}"),
    "lengths": (lambda: decodes(seq_lens=i32([100])), ValueError, f"^seq_lens: want 0 to {3 * S}, the room"),
    "list": (lambda: decodes(seq_lens=[3]), TypeError, "^seq_lens: want Tensor"),
    "dtype": (lambda: decodes(q_data_type="fp16"), TypeError, "^q_data_type: want a torch.dtype or its name"),
    "rows": (lambda: prefills(BF16, rows=[-1, 2, 3]), ValueError, "^qo_indptr: want numbers that begin with 0"),
    "window": (lambda: prefills(BF16, window_left=-2), ValueError, "window_left: want -1 or more, got -2"),
    "right": (lambda: decodes(window_right=1), UnsupportedError, "^window_right: want 0"),
    "cap": (lambda: decodes(logits_soft_cap="1"), TypeError, "^logits_soft_cap: want a number or None, got str"),
    "no starts": (lambda: decodes(indptr=[], last=[]), ValueError, "^indptr: want numbers that begin with 0"),
    "half lengths": (
        lambda: decodes(seq_lens=torch.tensor([3.5])), ValueError, "^seq_lens: want int32, int64 or uint32",
    ),
    "half pages": (
        lambda: fi.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1)).plan(
            i32([0, 1]), torch.tensor([0.7]), i32([1]), 4, 2, 32, S,
        ), ValueError, "^indices: want int32, int64 or uint32, got float32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_planned_is_told(name):
    call, error, message = BAD[name]
    with pytest.raises(error, match=message):
        call()


def test_a_run_is_what_was_planned():
    w, q, cache, _, _ = prefills(BF16, causal=True)
    for given, message in (
        ((q.half(), cache), "q: want bfloat16 as planned, got float16"),
        ((q[1:], cache), "q: want 19 rows as planned, got 18"),
        ((q[:, :2], cache), "q, paged_kv_cache: want \\(4, 2\\) heads as planned, got \\(2, 2\\)"),
        ((q[..., :16], cache), "q, paged_kv_cache: want head_dim_qk and head_dim_vo \\(32, 32\\) as planned"),
        ((q, cache[0]), "^paged_kv_cache: want "),
        ((q, (cache[0][:, :2], cache[1][:, :2])), "paged_kv_cache: want page_size 4 as planned, got 2"),
        ((q, (cache[0].half(), cache[1].half())), "paged_kv_cache: want bfloat16 as planned, got float16"),
    ):
        with pytest.raises(ValueError, match=message):
            w.run(*given)
    for option, error, message in (
        ({"q_scale": "2"}, TypeError, "^q_scale: want a number or a Tensor, got str"),
        (
            {"k_scale": torch.ones(2)},
            ValueError,
            r"^k_scale: want a number or float32 with 1 element, got \[2\] float32",
        ),
        ({"window_left": -2}, ValueError, "^window_left: want -1 or more, got -2"),
    ):
        with pytest.raises(error, match=message):
            w.run(q, cache, **option)
    with pytest.raises(UnsupportedError, match="skip_softmax_threshold_scale_factor: want None"):
        decodes(q_data_type=BF16).run(q[:1], cache, skip_softmax_threshold_scale_factor=1.0)
