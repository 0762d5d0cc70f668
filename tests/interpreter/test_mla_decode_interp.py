"""mla_decode in Triton against a dense fp64 reference: in the interpreter, on few programs, with everything that must
not be read poisoned."""

from __future__ import annotations

import math
from dataclasses import replace

import dense_reference as dense
import pytest
import torch
from drawn import half
from paged_case import latent_case, nan_like

import tersekv
from tersekv.backends.host import launch
from tersekv.backends.triton.mla_decode import config as mla_decode_tune
from tersekv.backends.triton.mla_decode import entry as mla_decode
from tersekv.dispatch import plan
from tersekv.formats import LATENT_FORMATS

BF16, FP16 = torch.bfloat16, torch.float16
SMALL = {"kv_lora_rank": 64, "qk_rope_head_dim": 32}
GROUPS = {"kv_lora_rank": 256, "qk_rope_head_dim": 32}  # of fp8_ds_mla
LIMIT = {torch.float8_e4m3fn: 4e-2, torch.float8_e5m2: 8e-2}
SCALE = 0.3


@pytest.fixture(autouse=True)
def few_programs_and_small_tiles(monkeypatch):
    """Three programs, so that shares cut requests and requests end in the middle of a share."""
    monkeypatch.setattr(launch, "num_sms", lambda f: 3)
    choose(monkeypatch, block_n=16, block_m=16, chunk_columns=64, programs_per_sm=1)


def choose(monkeypatch, **changes):
    plan._plans.clear()
    monkeypatch.setattr(
        mla_decode, "choose_tile_config", lambda f, fmt: mla_decode_tune.choose_tile_config(f, fmt)._replace(**changes)
    )


def size(format):
    return GROUPS if format == "fp8_ds_mla" else SMALL


def queries(rows, heads, case, dtype=BF16):
    dim = case.layer.ckv.shape[-1] + case.layer.kpe.shape[-1]
    return torch.randn(rows, heads, dim).to(dtype)


def check(case, q, out_dtype=BF16, cu_seqlens_q=None, softmax_scale=SCALE, out_scale=1.0, **options):
    """Run, compare with fp64, return (out, lse)."""
    rank = case.layer.ckv.shape[-1]
    rows, heads = q[0].shape[:2] if isinstance(q, tuple) else q.shape[:2]
    out, lse = nan_like(rows, heads, rank, dtype=out_dtype), nan_like(rows, heads)
    cu = None if cu_seqlens_q is None else torch.tensor(cu_seqlens_q)
    tersekv.mla_decode(
        q, case.layer, case.page_table, case.seq_lens, softmax_scale=softmax_scale, out_scale=out_scale,
        cu_seqlens_q=cu, out=out, lse=lse, backend="triton", **options,
    )  # fmt: skip
    ckv, kpe = (x[:, :, None] for x in dense.dequantise_latent(case.layer))
    if isinstance(q, tuple):
        q = torch.cat(q, -1) if q[0].element_size() > 1 else torch.cat([x.float() for x in q], -1)
    want, want_lse = dense.attention(
        dense.values(q), torch.cat([ckv, kpe], -1), ckv, *case.lists(), softmax_scale=float(softmax_scale),
        cu_seqlens_q=cu_seqlens_q,
    )  # fmt: skip
    assert dense.values(out).isfinite().all()
    assert dense.relative(dense.values(out), want * float(out_scale)) < LIMIT.get(out_dtype, 3e-3)
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    torch.testing.assert_close(lse.double(), want_lse, rtol=2e-3, atol=2e-3)
    return out, lse


@pytest.mark.parametrize(("format", "page_size"), half(list(LATENT_FORMATS), [1, 3, 16, 64]))
def test_every_format_and_page_size(format, page_size):
    case = latent_case(format, [37, 0, 1, 64], page_size=page_size, **size(format))
    check(case, queries(4, 5, case))


@pytest.mark.parametrize("heads", [1, 16, 20, 64])
def test_any_number_of_heads(heads):
    case = latent_case("fp8_e4m3", [37, 70], page_size=16, **SMALL)
    check(case, queries(2, heads, case))


@pytest.mark.parametrize(
    ("format", "dtype"), half(["bf16", "fp8_e4m3", "fp8_ds_mla"], [FP16, torch.float8_e4m3fn, torch.float8_e5m2])
)
def test_every_query_dtype_split_in_two(format, dtype):
    case = latent_case(format, [37, 70], page_size=16, **size(format))
    q, rank = queries(2, 3, case, dtype), case.layer.ckv.shape[-1]
    check(case, (q[..., :rank], q[..., rank:].clone()))


@pytest.mark.parametrize("dtype", [FP16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_output_dtype(dtype):
    case = latent_case("fp8_e4m3", [37, 70], page_size=16, **SMALL)
    check(case, queries(2, 3, case), dtype)


def test_an_8_bit_output_saturates_where_a_program_and_where_the_merge_writes_it():
    case = latent_case("fp8_e4m3", [5, 90], page_size=16, **SMALL)
    out = nan_like(2, 2, 64, dtype=torch.float8_e4m3fn)
    tersekv.mla_decode(
        queries(2, 2, case), case.layer, case.page_table, case.seq_lens, softmax_scale=SCALE, out_scale=1e9, out=out,
        backend="triton",
    )  # fmt: skip
    assert (dense.values(out).abs() == 448).all()


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_ds_mla"])
@pytest.mark.parametrize("page_size", [3, 16])
def test_drafts_are_causal(format, page_size):
    case = latent_case(format, [3, 40, 65], page_size=page_size, **size(format))
    check(case, queries(9, 6, case))


@pytest.mark.parametrize("heads", [6, 32])
def test_ragged_drafts_and_rows_of_no_request(heads):
    case = latent_case("fp8_e4m3", [9, 4, 0, 33], page_size=16, **SMALL)
    check(case, queries(10, heads, case), cu_seqlens_q=[0, 2, 2, 3, 8], max_q_len=5)


@pytest.mark.parametrize("format", ["bf16", "fp8_e5m2"])
def test_split_caches(format):
    case = latent_case(format, [37, 70], page_size=16, split=True, **SMALL)
    check(case, queries(2, 4, case))


@pytest.mark.parametrize(("rank", "rope"), [(16, 8), (48, 24), (80, 72), (512, 64)])
@pytest.mark.parametrize("format", ["fp16", "fp8_e4m3"])
def test_ranks_that_fill_no_tile(format, rank, rope):
    case = latent_case(format, [37], page_size=16, kv_lora_rank=rank, qk_rope_head_dim=rope)
    check(case, queries(1, 2, case))


def test_three_scale_groups():
    case = latent_case("fp8_ds_mla", [37], page_size=16, kv_lora_rank=384, qk_rope_head_dim=64)
    check(case, queries(1, 2, case))


@pytest.mark.parametrize("spread", [1e-6, 1e6])
def test_group_scales_of_any_size(spread):
    """Also where a token's groups differ by much, and where whole tokens do."""
    case = latent_case("fp8_ds_mla", [37, 70], page_size=16, **GROUPS)
    scales = case.layer.ckv_scale_cache
    scales[..., 1:] *= 1e-4
    scales[:, ::2] *= 1e-3
    scales *= spread
    check(case, queries(2, 3, case), torch.float32, softmax_scale=SCALE / spread, out_scale=1 / spread)


@pytest.mark.parametrize("size_of_q", [1e-12, 1e6, 1e20])
def test_queries_beyond_the_range_of_fp16(size_of_q):
    case = latent_case("fp8_e4m3", [37], page_size=16, **SMALL)
    q = (queries(1, 3, case, torch.float32) * size_of_q).to(BF16)
    check(case, q, softmax_scale=SCALE / size_of_q)


@pytest.mark.parametrize("tensors", [False, True])
def test_scales_as_floats_and_as_tensors(tensors):
    def scale(x):
        return torch.tensor([x]) if tensors else x

    case = latent_case("fp8_e4m3", [5, 90], page_size=16, **SMALL).with_layer(kv_scale=scale(0.75))
    check(case, queries(2, 3, case), softmax_scale=scale(0.2), out_scale=scale(2.0))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32], ids=str)
def test_every_index_dtype(dtype):
    case = latent_case("fp8_e4m3", [37, 5], page_size=16, **SMALL)
    case = replace(case, page_table=case.page_table.to(dtype), seq_lens=case.seq_lens.to(dtype))
    check(case, queries(2, 3, case))


@pytest.mark.parametrize("format", list(LATENT_FORMATS))
def test_portable_bit_arithmetic_gives_the_same(format, monkeypatch):
    case = latent_case(format, [37, 5], page_size=16, **size(format))
    q = queries(2, 3, case, torch.float8_e4m3fn)
    wanted = check(case, q)
    monkeypatch.setattr(launch, "emulates_e4m3", lambda f: True)
    plan._plans.clear()
    for a, b in zip(check(case, q), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_ds_mla"])
def test_pointers_and_descriptors_give_the_same_bits(format, monkeypatch):
    case = latent_case(format, [37, 70], page_size=16, **size(format))
    q = queries(4, 6, case)
    wanted = check(case, q)
    choose(monkeypatch, block_n=16, block_m=16, chunk_columns=64, programs_per_sm=1, use_tma=False)
    for a, b in zip(check(case, q), wanted, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("programs", [1, 7])
def test_however_work_is_cut(programs, monkeypatch):
    monkeypatch.setattr(launch, "num_sms", lambda f: programs)
    choose(monkeypatch, block_n=16, block_m=16, chunk_columns=32, programs_per_sm=1)
    case = latent_case("fp8_e4m3", [150, 0, 33, 1], page_size=16, **SMALL)
    check(case, queries(8, 32, case))


def test_no_requests_and_no_rows():
    case = latent_case("fp8_e4m3", [], **SMALL)
    out, lse = nan_like(2, 4, 64), nan_like(2, 4)
    tersekv.mla_decode(
        torch.randn(2, 4, 96).bfloat16(), case.layer, case.page_table, case.seq_lens, softmax_scale=1.0, out=out,
        lse=lse, cu_seqlens_q=torch.zeros(1, dtype=torch.int32), max_q_len=1, backend="triton",
    )  # fmt: skip
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_what_it_does_not_take_is_said():
    case = latent_case("bf16", [4], kv_lora_rank=24, qk_rope_head_dim=32)
    with pytest.raises(tersekv.UnsupportedError, match="latent rank that is a multiple of 16 up to 512, got 24"):
        check(case, queries(1, 2, case))
    case = latent_case("bf16", [4], **SMALL)
    with pytest.raises(tersekv.UnsupportedError, match="16-bit or 8-bit q"):
        check(case, queries(1, 2, case, torch.float32))
