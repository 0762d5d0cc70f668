"""The torch backend of decode against a dense fp64 attention over tables of codes."""

from __future__ import annotations

import dense_reference as dense
import pytest
import torch
from no_sync import NoHostReads
from paged_case import HUGE, kv_case, nan_like, raw, tree_mask

import tersekv
from tersekv.backends.torch import gather, online_softmax, requests

FORMATS = list(tersekv.KV_FORMATS)
EXACT = 5e-6  # relative norm with fp32 outputs


def run(case, q, **options):
    """(out, lse) of the torch backend; out starts as NaN."""
    dtype = options.pop("out_dtype", torch.float32)
    layer = case.layer
    dv = layer.v.shape[-1] * tersekv.KV_FORMATS[layer.format].values_per_element
    out = nan_like(*q.shape[:2], dv, dtype=dtype)
    lse = nan_like(*q.shape[:2])
    table, lens = options.pop("page_table", case.page_table), options.pop("seq_lens", case.seq_lens)
    got = tersekv.decode(q, layer, table, lens, out=out, lse=lse, return_lse=True, backend="torch", **options)
    assert got[0] is out
    assert got[1] is lse
    return out, lse


def reference(case, q, **options):
    options.setdefault("softmax_scale", q.shape[-1] ** -0.5)
    cu = options.pop("cu_seqlens_q", None)
    options.pop("max_q_len", None)
    k, v = dense.dequantise(case.layer)
    return dense.attention(
        dense.values(q), k, v, *case.lists(), cu_seqlens_q=None if cu is None else cu.tolist(), **options
    )


def check(case, q, tolerance=EXACT, **options):
    out, lse = run(case, q, **options)
    want, want_lse = reference(case, q, **options)
    assert dense.relative(out, want) < tolerance
    empty = want_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert (out[empty] == 0).all()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)
    return out, lse


def queries(rows, heads, d, dtype=torch.float32):
    return torch.randn(rows, heads, d).to(dtype)


def device_path(monkeypatch):
    """Take the path of devices whose values the host must not read."""
    for module in (online_softmax, requests):
        monkeypatch.setattr(module, "may_read", lambda x: False)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize(("q_heads", "heads"), [(3, 3), (8, 2), (5, 1)], ids=["mha", "gqa", "mqa"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_matches_dense_fp64(format, q_heads, heads, page_size):
    case = kv_case(format, [37, 0, 1, 64], page_size=page_size, heads=heads)
    check(case, queries(4, q_heads, 32))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("scales", ["apart", "inline", "tail"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_memory_layout_gives_the_same_bits(format, layout, scales, packed):
    options = {"page_size": 5, "heads": 3, "head_dim": 32}
    plain = kv_case(format, [23, 9], **options)
    other = kv_case(format, [23, 9], layout=layout, packed=packed, scales=scales, **options)
    q = queries(2, 6, 32)
    for a, b in zip(run(plain, q), run(other, q), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_every_index_dtype_is_read_as_it_is(dtype):
    case = kv_case("fp8_e4m3", [20, 7, 3], page_size=4)
    q = queries(6, 4, 32)
    cu = torch.tensor([0, 3, 5, 6])
    wanted = run(case, q, cu_seqlens_q=cu)
    got = run(
        case, q, cu_seqlens_q=cu.to(dtype), page_table=case.page_table.to(dtype), seq_lens=case.seq_lens.to(dtype)
    )
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("drafts", [1, 2, 17, 40])
def test_drafts_see_the_prefix_and_each_other_by_mask_or_causally(drafts, masked):
    case = kv_case("fp8_per_token_head", [drafts, drafts + 1, 70], page_size=16)
    mask = tree_mask([drafts] * 3) if masked else None
    check(case, queries(3 * drafts, 4, 32), mask=mask)


def test_a_mask_may_be_given_by_request():
    case = kv_case("fp8_e4m3", [9, 12], page_size=4)
    q, mask = queries(10, 2, 32), tree_mask([5, 5])
    assert torch.equal(run(case, q, mask=mask)[0], run(case, q, mask=mask.view(2, 5, -1))[0])


def test_a_draft_that_its_mask_hides_from_everything_is_empty():
    case = kv_case("fp8_e4m3", [2], page_size=4)
    mask = torch.tensor([[0, 0], [3, 0]], dtype=torch.uint16)
    out, lse = check(case, queries(2, 2, 32), mask=mask)
    assert lse[0].isneginf().all()
    assert (out[0] == 0).all()


@pytest.mark.parametrize("masked", [False, True])
def test_ragged_drafts_and_rows_of_no_request(masked):
    drafts = [3, 0, 1, 35, 2]
    case = kv_case("int8_per_token_head", [20, 5, 0, 60, 2], page_size=8)
    cu = torch.tensor([0, 3, 3, 4, 39, 41])
    q = queries(44, 4, 32)
    mask = torch.cat([tree_mask(drafts), torch.full((3, 4), 0xFFFF, dtype=torch.int32).to(torch.uint16)])
    out, lse = check(case, q, mask=mask if masked else None, cu_seqlens_q=cu, max_q_len=35)
    assert (out[41:] == 0).all()
    assert lse[41:].isneginf().all()


@pytest.mark.parametrize("drafts", [1, 3])
@pytest.mark.parametrize("window", [1, 5, 16, 100])
def test_a_window_counts_the_own_key_and_moves_with_the_draft(window, drafts):
    case = kv_case("fp8_e4m3", [3, 40, 64], page_size=8)
    check(case, queries(3 * drafts, 2, 32), window=window)


def test_pages_before_the_window_are_not_followed():
    case = kv_case("fp8_e4m3", [64], page_size=8)
    q = queries(2, 2, 32)
    wanted = run(case, q, window=9)
    table = case.page_table.clone()
    table[0, :6] = HUGE  # drafts stand at 62 and 63, and the first sees back to 54
    got = run(case, q, window=9, page_table=table)
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
@pytest.mark.parametrize("sink", [None, 0.5, 30.0, -torch.inf])
def test_sinks_and_softcap_with_window_mask_and_drafts(sink, softcap):
    case = kv_case("fp8_per_token_head", [5, 50], page_size=16)
    q = queries(10, 4, 32)
    sinks = None if sink is None else torch.randn(4) * 0.1 + sink
    for mask in (None, tree_mask([5, 5])):
        check(case, q, sinks=sinks, softcap=softcap, window=6, mask=mask)


def test_a_sink_far_above_every_score_takes_all_the_weight():
    case = kv_case("bf16", [30])
    out, lse = run(case, queries(1, 2, 32), sinks=torch.full((2,), 300.0))
    assert (out == 0).all()
    assert (lse == 300).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"cu_seqlens_q": [0, 5, 6], "max_q_len": 5}, r"cu_seqlens_q: want rows in \[0, 4\] that never fall, got"),
        ({"cu_seqlens_q": [0, 3, 2], "max_q_len": 3}, r"cu_seqlens_q: want rows in \[0, 4\] that never fall, got"),
        ({"cu_seqlens_q": [1, 2, 4], "max_q_len": 2}, "cu_seqlens_q: want a first entry of 0, got 1$"),
        ({"cu_seqlens_q": [-1, 2, 4], "max_q_len": 3}, "cu_seqlens_q: want a first entry of 0, got -1$"),
        ({"cu_seqlens_q": [0, 1, 4], "max_q_len": 2}, "max_q_len: want at least 3 as in cu_seqlens_q, got 2"),
        ({"seq_lens": [5, -1]}, "seq_lens: want at least 0, got -1 at 1"),
        ({"seq_lens": [5, 99]}, r"seq_lens: want at most 48 \(max_pages \* S\), got 99 at 1"),
    ],
)  # fmt: skip
def test_checked_mode_refuses_rows_and_lengths_that_do_not_fit(change, words, monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    case = kv_case("bf16", [20, 9])
    change = {name: torch.tensor(x, dtype=torch.int32) if isinstance(x, list) else x for name, x in change.items()}
    with pytest.raises(ValueError, match=words):
        run(case, queries(4, 2, 32), **change)


def test_a_request_without_keys_is_empty_in_spite_of_a_sink():
    case = kv_case("bf16", [0, 3])
    out, lse = run(case, queries(2, 2, 32), sinks=torch.ones(2))
    assert (out[0] == 0).all()
    assert lse[0].isneginf().all()
    assert lse[1].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_query_dtype_is_read_exactly(dtype):
    case = kv_case("fp8_e4m3", [30, 11])
    check(case, queries(2, 4, 32, dtype))


BOUNDS = {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float8_e4m3fn: 4e-2, torch.float8_e5m2: 8e-2}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_every_output_dtype_is_the_fp32_output_rounded(dtype):
    case = kv_case("fp8_e4m3", [30, 11])
    q = queries(2, 4, 32)
    wanted = run(case, q, out_scale=3.0)[0]
    got = run(case, q, out_scale=3.0, out_dtype=dtype)[0]
    assert torch.equal(raw(got), raw(wanted.to(dtype)))
    assert dense.relative(dense.values(got), wanted) < BOUNDS[dtype]


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)], ids=str)
def test_an_8_bit_output_saturates_and_keeps_nan(dtype, largest):
    case = kv_case("bf16", [30, 11])
    case.layer.v[int(case.page_table[1, 0]), 0, 1, 3] = torch.nan
    out = run(case, queries(2, 4, 32), out_scale=1e9, out_dtype=dtype)[0]
    got = dense.values(out)
    assert got.isnan().nonzero().tolist() == [[1, 2, 3], [1, 3, 3]]
    assert (got[~got.isnan()].abs() == largest).all()


def test_the_default_output_dtype_is_that_of_the_query():
    case = kv_case("fp8_e4m3", [5])
    for dtype, wanted in ((torch.float16, torch.float16), (torch.float8_e4m3fn, torch.bfloat16)):
        q = queries(1, 2, 32, dtype)
        assert tersekv.decode(q, case.layer, case.page_table, case.seq_lens).dtype == wanted


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2", "nvfp4"])
def test_scales_given_as_tensors_and_as_floats_are_the_same(format):
    case = kv_case(format, [30, 11])
    q = queries(2, 4, 32)
    floats = run(case.with_layer(k_scale=0.75, v_scale=1.5), q, softmax_scale=0.25, out_scale=0.5)
    one = [torch.tensor([x]) for x in (0.75, 1.5, 0.25, 0.5)]
    tensors = run(case.with_layer(k_scale=one[0], v_scale=one[1]), q, softmax_scale=one[2], out_scale=one[3])
    for a, b in zip(floats, tensors, strict=True):
        assert torch.equal(a, b)
    check(case.with_layer(k_scale=0.75, v_scale=1.5), q, softmax_scale=0.25)


def test_a_scale_for_each_head():
    case = kv_case("fp8_e4m3", [30, 11], heads=3)
    check(
        case.with_layer(k_scale=torch.tensor([0.5, 1.0, 2.0]), v_scale=torch.tensor([3.0, 0.1, 1.0])), queries(2, 6, 32)
    )


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("d", "dv"), [(64, 32), (32, 128), (576, 512)])
def test_keys_and_values_may_differ_in_size(format, d, dv):
    case = kv_case(format, [19, 5], page_size=4, heads=1, head_dim=d, head_dim_v=dv)
    check(case, queries(2, 2, d))


def test_strided_queries_outputs_and_lse():
    case = kv_case("fp8_e4m3", [30, 11])
    q = torch.randn(2, 4, 64)
    out, lse = nan_like(4, 2, 64), nan_like(4, 2)
    tersekv.decode(
        q[..., ::1][..., 16:48], case.layer, case.page_table, case.seq_lens,
        out=out.transpose(0, 1)[..., 8:40], lse=lse.T, backend="torch",
    )  # fmt: skip
    want, want_lse = run(case, q[..., 16:48].contiguous())
    assert torch.equal(out.transpose(0, 1)[..., 8:40], want)
    assert torch.equal(lse.T, want_lse)
    assert out[..., :8].isnan().all()
    assert out[..., 40:].isnan().all()


def test_k_and_v_may_be_one_tensor():
    case = kv_case("fp8_e4m3", [30, 11])
    check(case.with_layer(v=case.layer.k), queries(2, 4, 32))


def test_no_requests_and_no_rows():
    case = kv_case("fp8_e4m3", [])
    out, lse = run(case, queries(0, 4, 32))
    assert out.shape == (0, 4, 32)
    assert lse.shape == (0, 4)
    out, lse = run(case, queries(3, 4, 32), cu_seqlens_q=torch.zeros(1, dtype=torch.int32))
    assert (out == 0).all()
    assert lse.isneginf().all()
    case = kv_case("fp8_e4m3", [4, 9])
    assert run(case, queries(0, 4, 32), cu_seqlens_q=torch.zeros(3, dtype=torch.int32))[0].shape == (0, 4, 32)


@pytest.mark.parametrize("format", ["fp8_e4m3", "int8_per_token_head", "nvfp4"])
def test_many_chunks_give_what_one_gives(format, monkeypatch):
    case = kv_case(format, [300, 65, 64], page_size=3)
    q = queries(6, 4, 32)
    monkeypatch.setattr(online_softmax, "_ELEMENTS", 1)
    check(case, q, window=250, softcap=3.0, mask=tree_mask([2, 2, 2]), sinks=torch.randn(4))
    check(case, q)


def test_what_is_unpacked_at_once_does_not_grow_with_the_context(monkeypatch):
    monkeypatch.setattr(online_softmax, "_ELEMENTS", 1 << 12)
    taken = []
    to_float = gather.to_float

    def counted(codes, code):
        taken.append(codes.numel())
        return to_float(codes, code)

    monkeypatch.setattr(gather, "to_float", counted)
    run(kv_case("fp8_e4m3", [2000]), queries(1, 4, 32))
    assert len(taken) > 60
    assert max(taken) <= 1 << 12


def test_a_stored_nan_that_is_seen_reaches_the_output_and_one_that_is_not_does_not():
    case = kv_case("fp8_e4m3", [12], page_size=4)
    page, slot = int(case.page_table[0, 2]), 2  # the second of three drafts, key 10
    case.layer.v.view(torch.uint8)[page, slot, 0, 7] = 0x7F
    q = queries(3, 4, 32)
    out = run(case, q)[0]
    assert out.isnan().nonzero().tolist() == [[r, h, 7] for r in (1, 2) for h in (0, 1)]
    case.layer.k.view(torch.uint8)[page, slot, 1, 7] = 0xFF
    out, lse = run(case, q)
    assert lse.isnan().nonzero().tolist() == [[r, h] for r in (1, 2) for h in (2, 3)]
    assert not out[0].isnan().any()


@pytest.mark.parametrize("format", FORMATS)
def test_the_path_without_host_reads_gives_the_same(format, monkeypatch):
    case = kv_case(format, [37, 0, 1, 64, 12], page_size=3)
    cu = torch.tensor([0, 3, 4, 5, 5, 14])
    q, mask = queries(16, 4, 32), tree_mask([16])
    options = {"cu_seqlens_q": cu, "max_q_len": 9, "window": 30, "sinks": torch.randn(4)}
    wanted = [run(case, q, mask=m, **options) for m in (None, mask)]
    device_path(monkeypatch)
    monkeypatch.setattr(online_softmax, "_ELEMENTS", 1)  # chunks of the smallest size
    with NoHostReads():
        got = [run(case, q, mask=m, **options) for m in (None, mask)]
    for w, g in zip(wanted, got, strict=True):
        assert dense.relative(g[0], w[0]) < EXACT
        torch.testing.assert_close(g[1], w[1], rtol=1e-5, atol=1e-5)


def test_the_path_without_host_reads_handles_plain_drafts_and_nothing(monkeypatch):
    device_path(monkeypatch)
    check(kv_case("fp8_per_token_head", [10, 0, 33]), queries(6, 4, 32))
    check(kv_case("fp8_e4m3", [4, 9]), queries(2, 2, 32), cu_seqlens_q=torch.tensor([0, 0, 0]), max_q_len=1)


def test_lengths_page_ids_and_rows_that_do_not_fit_raise():
    case = kv_case("fp8_e4m3", [30, 11])
    q = queries(2, 4, 32)
    with pytest.raises(ValueError, match=r"seq_lens: want at most 48 .*got 49 at 0"):
        run(case, q, seq_lens=torch.tensor([49, 1]))
    with pytest.raises(ValueError, match=rf"page_table: want page ids in \[0, 5\), got {HUGE}"):
        run(case, q, seq_lens=torch.tensor([33, 1]))
    with pytest.raises(ValueError, match="cu_seqlens_q: want rows in"):
        run(case, q, cu_seqlens_q=torch.tensor([0, 1, 3]), max_q_len=2)
    with pytest.raises(ValueError, match="max_q_len: want at least 2"):
        run(case, q, cu_seqlens_q=torch.tensor([0, 2, 2]), max_q_len=1)


def test_a_query_that_requires_grad_is_fine():
    case = kv_case("fp8_e4m3", [30])
    assert not run(case, queries(1, 4, 32).requires_grad_())[0].requires_grad
