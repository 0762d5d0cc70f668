"""The torch backend of mla_decode against a dense fp64 attention over tables of codes."""

from __future__ import annotations

import dense_reference as dense
import pytest
import torch
from no_sync import NoHostReads
from paged_case import latent_case, nan_like, raw

import tersekv
from tersekv.backends.torch import online_softmax, requests

FORMATS = list(tersekv.LATENT_FORMATS)
EXACT = 5e-6
SCALE = 192**-0.5


def run(case, q, **options):
    """(out, lse) of the torch backend; both start as NaN."""
    rows, heads = q[0].shape[:2] if isinstance(q, tuple) else q.shape[:2]
    out = nan_like(rows, heads, case.layer.ckv.shape[-1], dtype=options.pop("out_dtype", torch.float32))
    lse = nan_like(rows, heads)
    options.setdefault("softmax_scale", SCALE)
    table, lens = options.pop("page_table", case.page_table), options.pop("seq_lens", case.seq_lens)
    tersekv.mla_decode(q, case.layer, table, lens, out=out, lse=lse, backend="torch", **options)
    return out, lse


def check(case, q, cu_seqlens_q=None, **options):
    out, lse = run(case, q, cu_seqlens_q=cu_seqlens_q, **options)
    ckv, kpe = (x[:, :, None] for x in dense.dequantise_latent(case.layer))
    want, want_lse = dense.attention(
        dense.values(q), torch.cat([ckv, kpe], -1), ckv, *case.lists(),
        softmax_scale=options.get("softmax_scale", SCALE),
        cu_seqlens_q=None if cu_seqlens_q is None else cu_seqlens_q.tolist(),
    )  # fmt: skip
    assert dense.relative(out, want) < EXACT
    empty = want_lse.isneginf()
    assert torch.equal(lse.isneginf(), empty)
    assert (out[empty] == 0).all()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def queries(rows, heads, dim=576, dtype=torch.float32):
    return torch.randn(rows, heads, dim).to(dtype)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("heads", [1, 5, 16])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_matches_dense_fp64(format, heads, page_size):
    check(latent_case(format, [37, 0, 1, 64], page_size=page_size), queries(4, heads))


@pytest.mark.parametrize("format", [f for f in FORMATS if f != "fp8_ds_mla"])
def test_split_and_joined_caches_and_queries_give_the_same_bits(format):
    joined, split = (latent_case(format, [30, 9], page_size=3, split=s) for s in (False, True))
    q = queries(2, 4)
    wanted = run(joined, q)
    for case in (joined, split):
        for got in (run(case, q), run(case, (q[..., :512], q[..., 512:]))):
            for a, b in zip(wanted, got, strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("format", FORMATS)
def test_other_ranks(format):
    case = latent_case(format, [30, 9], kv_lora_rank=256, qk_rope_head_dim=32)
    check(case, queries(2, 3, 288))


@pytest.mark.parametrize("drafts", [1, 2, 7])
def test_several_rows_are_causal(drafts):
    check(latent_case("fp8_ds_mla", [drafts, 40]), queries(2 * drafts, 4))


def test_ragged_rows_and_rows_of_no_request():
    case = latent_case("fp8_e4m3", [9, 4, 0, 33])
    check(case, queries(10, 4), cu_seqlens_q=torch.tensor([0, 2, 2, 3, 8]), max_q_len=5)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32], ids=str)
def test_every_index_dtype_is_read_as_it_is(dtype):
    case = latent_case("fp8_e4m3", [20, 7], page_size=4)
    q = queries(2, 4)
    got = run(case, q, page_table=case.page_table.to(dtype), seq_lens=case.seq_lens.to(dtype))
    assert torch.equal(got[0], run(case, q)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_query_and_output_dtype(dtype):
    case = latent_case("fp8_e4m3", [20, 7])
    q = queries(2, 4, dtype=dtype)
    check(case, q)
    wanted = run(case, q)[0]
    assert torch.equal(raw(run(case, q, out_dtype=dtype)[0]), raw(wanted.to(dtype)))


def test_an_8_bit_output_saturates():
    case = latent_case("fp8_e4m3", [20])
    out = run(case, queries(1, 2), out_scale=1e9, out_dtype=torch.float8_e4m3fn)[0]
    assert (dense.values(out).abs() == 448).all()


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_scales_given_as_tensors_and_as_floats_are_the_same(format):
    case = latent_case(format, [20, 7])
    q = queries(2, 4)
    floats = run(case.with_layer(kv_scale=0.75), q, softmax_scale=0.05, out_scale=2.0)
    tensors = run(
        case.with_layer(kv_scale=torch.tensor([0.75])), q,
        softmax_scale=torch.tensor([0.05]), out_scale=torch.tensor([2.0]),
    )  # fmt: skip
    for a, b in zip(floats, tensors, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    check(case.with_layer(kv_scale=0.75), q, softmax_scale=0.05)


def test_no_requests_and_no_rows():
    case = latent_case("bf16", [])
    assert run(case, queries(0, 4))[0].shape == (0, 4, 512)
    out, lse = run(case, queries(2, 4), cu_seqlens_q=torch.zeros(1, dtype=torch.int32))
    assert (out == 0).all()
    assert lse.isneginf().all()


@pytest.mark.parametrize("format", FORMATS)
def test_many_chunks_and_the_path_without_host_reads_give_the_same(format, monkeypatch):
    case = latent_case(format, [200, 0, 65, 3], page_size=3)
    q, cu = queries(6, 3), torch.tensor([0, 2, 2, 4, 5])
    monkeypatch.setattr(online_softmax, "_ELEMENTS", 1)
    check(case, q, cu_seqlens_q=cu, max_q_len=3)
    wanted = run(case, q, cu_seqlens_q=cu, max_q_len=3)
    for module in (online_softmax, requests):
        monkeypatch.setattr(module, "may_read", lambda x: False)
    with NoHostReads():
        got = run(case, q, cu_seqlens_q=cu, max_q_len=3)
    assert dense.relative(got[0], wanted[0]) < EXACT
    torch.testing.assert_close(got[1], wanted[1], rtol=1e-5, atol=1e-5)


def test_a_length_beyond_the_table_raises():
    case = latent_case("bf16", [20])
    with pytest.raises(ValueError, match="seq_lens: want at most 48"):
        run(case, queries(1, 4), seq_lens=torch.tensor([49]))
