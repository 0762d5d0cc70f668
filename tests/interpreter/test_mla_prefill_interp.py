"""MLA prefill's Triton kernels in the interpreter: stages against the oracle to the bit, the whole against fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tersekv import mla_prefill_plan
from tersekv.backends.gluon.sm90.mla_prefill import gather_latents
from tersekv.backends.host.bind import Workspace
from tersekv.backends.torch import mla_latents
from tersekv.backends.torch import mla_prefill as oracle
from tersekv.backends.triton.mla_prefill import blockwise_gemm as gemm_blockwise
from tersekv.backends.triton.mla_prefill import entry as mla_prefill
from tersekv.backends.triton.mla_prefill import gather_latents as gathering
from tersekv.backends.triton.mla_prefill import rope_norm_store as preparing
from tersekv.backends.triton.mla_prefill.config import AttentionTile, GemmTile, MLAPrefillConfig
from tersekv.dispatch import plan
from tersekv.formats import LATENT_FORMATS
from tersekv.testing import reference
from tersekv.testing.cases import Case
from tersekv.testing.compare import compare
from tersekv.testing.make import make
from tersekv.testing.memory import as_bytes, moved

FORMATS = tuple(LATENT_FORMATS)
SMALL = Case(
    "mla_prefill", "bf16", "small", lens=(13, 1, 0, 2), q_lens=(6, 1, 0, 1), group=2, page=3, rank=128, rope=16,
    nope=32, dim_v=32,
)  # fmt: skip
# Tiles so small (the interpreter takes any) that whole, masked and cut ones all occur.
TILED = MLAPrefillConfig(AttentionTile(4, 4, 4, 2, False), GemmTile(16, 64, 128, 4, 2, False), False, False)
HALF = replace(TILED, product=GemmTile(16, 64, 32, 4, 2, False))
TMA = MLAPrefillConfig(AttentionTile(8, 4, 4, 2, True), GemmTile(16, 128, 64, 4, 2, True), True, True)
MIXED = replace(TMA, native_casts=False)  # sm_89


def run(call, config):
    mla_prefill.make_append_and_chunk_launches(plan.facts("mla_prefill", call), config)(call)


def prepare(call, native, **options):
    preparing.make_rope_norm_store_launch(plan.facts("mla_prefill", call), native, **options)(call)


def store_roped_queries_and_new_latents(call):
    new_slots = oracle.positions_and_slots_of_new_tokens(call, call.cu_seqlens_q.tolist())
    oracle.store_roped_queries_and_new_latents(call, new_slots)


def scratch(call, rows):
    """Places for a chunk of up to so many rows."""
    found = Workspace(0, gathering.gathered_chunk_workspace(plan.facts("mla_prefill", call), rows))
    return SimpleNamespace(**found.slice_views(torch.empty(found.num_floats)))


def gather(call, chunk, rows, to, native):
    found = gathering.make_gather_launch(plan.facts("mla_prefill", call), chunk, rows, to.CODES.shape[0], native)
    found(SimpleNamespace(**call._asdict(), **vars(to)))


def check(case: Case, config: MLAPrefillConfig) -> float:
    """Run a case and judge everything that it writes. Returns the relative error."""
    want = make(case)
    got = moved(want, "cpu")
    run(got, config)
    report = compare("mla_prefill", got, want, reference.run("mla_prefill", want))
    assert report.message is None
    return report.error


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_in_chunks(name):
    check(replace(SMALL, format=name, chunk=11, scale="float", index="int64"), TILED)


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
def test_chips_with_fp8_and_descriptors(name):
    check(replace(SMALL, format=name, scale="tensor", index="uint32", spread=True, chunk=12), TMA)


@pytest.mark.parametrize("rank", [128, 384])
def test_native_products_of_codes_by_bit_arithmetic(rank):
    check(replace(SMALL, format="fp8_e4m3", rank=rank, lens=(40,), q_lens=(3,)), MIXED)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(HALF, "bfloat16"), (replace(TMA, product=replace(HALF.product, tma=True)), "float16")],
    ids=["pointers bf16", "descriptors fp16"],
)
def test_a_16_bit_weight(config, dtype):
    check(replace(SMALL, weight="", dtype=dtype, format="fp16", chunk=11, strided=config is HALF), config)


def test_sizes_that_fill_no_tile():
    case = replace(SMALL, weight="", rank=72, rope=6, nope=24, dim_v=40, group=3, page=5, chunk=12)
    check(case, HALF)


def test_raw_rows_in_the_cache_are_replaced():
    check(replace(SMALL, raw_in_cache=True, split=True, scale="float"), TILED)


def test_no_lse_is_wanted_of_several_chunks():
    check(replace(SMALL, lse=False, chunk=8), TILED)


def test_many_chunks_round_as_one_chunk_does():
    # Without the residue that is carried on, twelve roundings of the output add up.
    case = replace(SMALL, lens=(24,), q_lens=(2,), group=1, dim_v=96)
    assert check(replace(case, chunk=2), TILED) < 1.2 * check(case, TILED)


@pytest.mark.parametrize("q_lens", [(0, 0), ()])
def test_no_tokens(q_lens):
    check(replace(SMALL, lens=(5, 0)[: len(q_lens)], q_lens=q_lens), TILED)


def test_rows_of_no_request_are_zero_and_not_rotated():
    call = make(SMALL)
    tail = 2
    call.cu_seqlens_q.copy_(torch.tensor([0, 6, 6, 6, 6]))  # the last requests have no new tokens
    call.cache_lens.copy_(torch.tensor([7, 0, 0, 1]))
    before = call.q.clone()
    run(call, TILED)
    assert (call.out[-tail:] == 0).all()
    assert (call.lse[-tail:] == -math.inf).all()
    assert call.out[:-tail].isfinite().all()
    assert torch.equal(as_bytes(call.q[-tail:]), as_bytes(before[-tail:]))
    assert not torch.equal(call.q[:-tail], before[:-tail])


def test_a_chunk_without_rows_appends_and_gives_zero():
    call = make(SMALL)
    want = moved(call, "cpu")
    call = call._replace(buffer_lengths=[0])
    store_roped_queries_and_new_latents(want)
    run(call, TILED)
    assert (call.out == 0).all()
    assert (call.lse == -math.inf).all()
    assert torch.equal(call.q, want.q)


@pytest.mark.parametrize("index", ["int32", "uint32"])
def test_rotated_parts_and_lengths_go_where_they_are_wanted(index):
    call = make(replace(SMALL, index=index))
    want, before = moved(call, "cpu"), call.q.clone()
    lens = torch.full_like(call.cache_lens, 99, dtype=torch.int32)
    call = call._replace(
        buffer_lengths=[0], q_pe_out=torch.full_like(call.q[..., -SMALL.rope :], math.nan), seq_lens_out=lens
    )
    store_roped_queries_and_new_latents(want)
    run(call, TILED)
    assert torch.equal(as_bytes(call.q), as_bytes(before))
    assert torch.equal(call.q_pe_out, want.q[..., -SMALL.rope :])
    assert lens.tolist() == list(SMALL.lens)
    assert (call.out == 0).all()
    run(call._replace(**{n: getattr(call, n)[:0] for n in ("q", "q_pe_out", "kv_c", "k_pe", "out", "lse")}), TILED)
    assert lens.tolist() == call.cache_lens.tolist()  # no tokens


@pytest.mark.parametrize("missing", ["requests", "new tokens"])
def test_tokens_that_nobody_asks_for_have_defined_outputs(missing):
    call = make(SMALL)
    before = call.q.clone()
    call.cu_seqlens_q.zero_()
    if missing == "requests":
        none = {n: getattr(call, n)[:0] for n in ("cache_lens", "page_table")}
        call = call._replace(
            **none, cu_seqlens_q=call.cu_seqlens_q[:1], cache_offsets=call.cache_offsets[:, :0],
            buffer_row_offsets=call.buffer_row_offsets[:, :1],
        )  # fmt: skip
    run(call._replace(max_q_len=0), TILED)
    assert (call.out == 0).all()
    assert (call.lse == -math.inf).all()
    assert torch.equal(as_bytes(call.q), as_bytes(before))


def test_a_nan_reaches_only_those_who_see_it():
    clean, call = make(SMALL), make(SMALL)
    bad = 2  # token of the first request, amid a tile
    call.kv_c[bad] = math.nan
    for c in (clean, call):
        run(c, TILED)
    seen = torch.zeros(len(call.out), dtype=torch.bool)
    seen[bad:6] = True
    assert call.out[seen].isnan().all()
    assert torch.equal(call.out[~seen], clean.out[~seen])
    assert torch.equal(call.lse[~seen], clean.lse[~seen])


@pytest.mark.parametrize(("column", "lost"), [(1, 0), (3, 3)], ids=["cached", "new"])
@pytest.mark.parametrize("bad", [-1, SMALL.page * 100, 2**31 - 1])
def test_a_page_outside_the_cache_is_never_followed(bad, column, lost):
    call = make(SMALL)
    call.page_table[0, column] = bad
    before = as_bytes(call.ckv).clone()
    prepare(call, False)
    changed = (as_bytes(call.ckv) != before).flatten(2).any(-1).sum()
    assert changed == sum(SMALL.q_lens) - lost
    got = scratch(call, call.buffer_lengths[0])
    gather(call, 0, call.buffer_lengths[0], got, False)
    rows = slice(3 * column, 3 * column + 3)
    assert not as_bytes(got.CODES[rows]).any()
    assert not got.SCALES[:, rows].any()


def test_a_position_beyond_the_table_is_dropped():
    call = make(SMALL)
    call = call._replace(page_table=call.page_table[:, :4])  # four pages of three: position 12 has no page
    before = as_bytes(call.ckv).clone()
    prepare(call, False)
    changed = (as_bytes(call.ckv) != before).flatten(2).any(-1).sum()
    assert changed == sum(SMALL.q_lens) - 1


def test_chunks_may_come_in_any_order():
    call = make(replace(SMALL, chunk=10))  # the second chunk holds keys that early queries of its tiles do not see
    want = moved(call, "cpu")
    call = call._replace(
        buffer_row_offsets=call.buffer_row_offsets.flip(0),
        cache_offsets=call.cache_offsets.flip(0),
        buffer_lengths=call.buffer_lengths[::-1],
    )
    run(call, TILED)
    run(want, TILED)
    assert (call.out.float() - want.out.float()).norm() < 4e-3 * want.out.float().norm()
    torch.testing.assert_close(call.lse, want.lse, atol=1e-5, rtol=0)


@pytest.mark.parametrize("freqs", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_append_has_the_bits_of_the_oracle(name, freqs):
    call = make(replace(SMALL, format=name, scale="tensor", spread=True, strided=True))
    call = call._replace(freqs_cis=call.freqs_cis.to(freqs))
    want = moved(call, "cpu")
    store_roped_queries_and_new_latents(want)
    prepare(call, freqs == torch.float32)
    assert torch.equal(call.q, want.q)
    assert torch.equal(as_bytes(call.kpe), as_bytes(want.kpe))
    # The sum of squares is added in another order: the norm, and with it a code, may differ by one step.
    differs = (as_bytes(call.ckv) != as_bytes(want.ckv)).any(-1)
    assert differs.float().mean() < 0.02
    step = as_bytes(call.ckv).flatten(-2).view(torch.uint8 if call.ckv.element_size() == 1 else torch.int16)
    other = as_bytes(want.ckv).flatten(-2).view(step.dtype)
    assert ((step.int() - other.int()).abs() <= 1).all()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"])
def test_a_nan_of_either_sign_is_appended_as_0x7f(name, native):
    call = make(replace(SMALL, format=name, scale="float"))
    minus = torch.tensor([-1], dtype=torch.int16).view(torch.bfloat16)
    call.kv_c[2, 5] = minus  # the norm spreads it over the row
    call.k_pe[3, 4] = minus  # the rotation over a pair
    want = moved(call, "cpu")
    store_roped_queries_and_new_latents(want)
    prepare(call, native)
    nan = as_bytes(want.ckv).view(torch.uint8) == 0x7F
    assert nan.sum() == call.ckv.shape[-1]
    assert (as_bytes(call.ckv).view(torch.uint8)[nan] == 0x7F).all()
    assert torch.equal(as_bytes(call.kpe), as_bytes(want.kpe))
    if name == "fp8_ds_mla":
        assert torch.equal(as_bytes(call.ckv_scale_cache), as_bytes(want.ckv_scale_cache))
    else:
        assert (as_bytes(call.kpe) == 0x7F).sum() == 2


def hard_latents() -> torch.Tensor:
    """[9, 256] bf16: wide range, groups of zeros, a group beyond the cap, tiny ones, ties, −0, NaN, a group of NaN."""
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0)) * 10 ** torch.arange(-5.0, 4.0)[:, None]
    x[3, 128:] = 0
    x[4, 5] = 1e9
    x[5, :128] = torch.arange(128) * 2.0**-9
    x[5, 127] = 448
    x[6, 0], x[6, 1] = -0.0, math.inf
    x[7, 9], x[7, 128:] = math.nan, -math.nan
    x[8, :128] = 1e-39
    return x.to(torch.bfloat16)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_gathered_codes_and_scales_have_the_bits_of_the_oracle(name, native):
    case = replace(SMALL, format=name, lens=(9,), q_lens=(9,), rank=256, scale="float", index="uint32", group=4)
    call = make(case)
    x = hard_latents()
    if name not in ("bf16", "fp16"):
        x[8] = 1.0
    f = LATENT_FORMATS[name]
    table = call.page_table.to(torch.int64)
    at = table[0, torch.arange(9) // 3], torch.arange(9) % 3
    rotary = torch.randn(9, 16)
    scale = torch.tensor([call.kv_scale])
    mla_latents.quantize_and_store_latents(x, rotary, call.ckv, call.kpe, call.ckv_scale_cache, at, f, scale)
    latent, k_pe, _ = oracle.gather_latents(call, 0, 9)
    codes, scales = mla_latents.quantize_gemm_input_by_128_columns(latent)
    got = scratch(call, 11)
    gather(call, 0, 9, got, native)
    assert torch.equal(got.CODES[:9].view(torch.uint8), codes.view(torch.uint8))
    assert torch.equal(as_bytes(got.SCALES.T[:9]), as_bytes(scales))
    assert torch.equal(as_bytes(got.K_PE[:9]), as_bytes(k_pe.to(call.q.dtype)))


def stored_and_gathered(call, chunk, rows, to, first):
    """The launches of the Hopper backend for a chunk. Returns (counter, dirty)."""
    if first:
        prepare(call, True, rope_queries=False)
    counter, dirty = torch.ones(1, dtype=torch.int32), torch.full((rows,), 7, dtype=torch.int8)
    found = gather_latents.make_gather_launch(
        plan.facts("mla_prefill", call), chunk, rows, to.CODES.shape[0], True, first, False
    )
    found(SimpleNamespace(**call._asdict(), **vars(to), WORK_COUNTER=counter, MAY_HAVE_NAN=dirty))
    return counter, dirty


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("change", [{}, {"chunk": 5, "index": "int64"}, {"raw_in_cache": True}], ids=str)
def test_the_latents_of_the_hopper_backend_have_the_bits_of_the_portable_ones(name, change):
    if change.get("raw_in_cache") and name not in ("bf16", "fp16"):
        return  # no 8-bit cache holds raw rows
    case = replace(SMALL, format=name, group=3, **change)
    two, one = make(case), make(case)
    for call in (two, one):
        call.cu_seqlens_q[-1] -= 1  # a row of q that no request has, and a cached token that is not new
    prepare(two, True)
    chunks = [(i, n) for i, n in enumerate(two.buffer_lengths) if n]
    for i, n in chunks:
        a, b = scratch(two, n), scratch(one, n)
        counter, dirty = stored_and_gathered(one, i, n, b, i == chunks[0][0])
        gather(two, i, n, a, True)
        for x, y in zip(vars(a).values(), vars(b).values(), strict=True):
            assert torch.equal(as_bytes(x), as_bytes(y))
        assert counter.tolist() == [0]
        assert torch.equal(
            dirty != 0, oracle.gather_latents(two, i, n)[0].isnan().any(1) | (two.q.dtype == torch.float16)
        )
    for field in ("q", "ckv", "kpe"):
        assert torch.equal(as_bytes(getattr(two, field)), as_bytes(getattr(one, field))), field
    assert (one.out[-1] == 0).all()
    assert (one.lse[-1] == -math.inf).all()
    assert one.out[:-1].isnan().all()  # the others are attention's


@pytest.mark.parametrize("child", [0, 1])
def test_a_request_reads_as_cached_what_another_of_the_same_call_appends(child):
    lens, q_lens = ((7, 6), (1, 6)) if child == 0 else ((6, 7), (6, 1))
    two, one = (make(replace(SMALL, lens=lens, q_lens=q_lens)) for _ in range(2))
    for call in (two, one):
        call.page_table[child, :2] = call.page_table[1 - child, :2]
    prepare(two, True)
    n = two.buffer_lengths[0]
    a, b = scratch(two, n), scratch(one, n)
    gather(two, 0, n, a, True)
    stored_and_gathered(one, 0, n, b, True)
    for x, y in zip(vars(a).values(), vars(b).values(), strict=True):
        assert torch.equal(as_bytes(x), as_bytes(y))


def test_rows_that_no_request_has_are_gathered_as_zero():
    call = make(SMALL)
    store_roped_queries_and_new_latents(call)
    rows = call.buffer_lengths[0] + 2
    got = scratch(call, rows)
    gather(call, 0, rows, got, False)
    assert not as_bytes(got.CODES[-2:]).any()
    assert not got.SCALES[:, -2:].any()
    assert not got.K_PE[-2:].any()


@pytest.mark.parametrize(
    "tile",
    [TILED.product, GemmTile(16, 256, 128, 4, 2, False), GemmTile(16, 128, 32, 4, 2, False), TMA.product],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 37])
def test_the_blockwise_product_adds_scaled_partial_sums_in_fp32(tile, rows):
    n, rank, g = 384, 256, torch.Generator().manual_seed(1)
    codes = [torch.randn(m, rank, generator=g).mul(100).to(torch.float8_e4m3fn) for m in (40, n)]
    a_scale, w_scale = torch.rand(40, 2, generator=g) + 0.5, torch.rand(n // 128, 2, generator=g) + 0.5
    out = torch.full((40, n), math.nan, dtype=torch.bfloat16)
    scales = a_scale.T.contiguous()
    scales[:, rows:] = math.nan
    native = tile.tma
    f = SimpleNamespace(kv_b_proj=plan._fact(codes[1]), kv_b_proj_scale=plan._fact(w_scale))
    call = SimpleNamespace(CODES=codes[0], SCALES=scales, KV=out, kv_b_proj=codes[1], kv_b_proj_scale=w_scale)
    gemm_blockwise.make_kv_up_projection_launch(f, rows, 40, tile, native)(call)
    a, w = (c.float().double() for c in codes)
    a = a * a_scale.double().repeat_interleave(128, 1)
    w = w * w_scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    want = (a @ w.T)[:rows]
    assert out[rows:].isnan().all()
    assert (out[:rows].double() - want).norm() < 2e-3 * want.norm()
    torch.testing.assert_close(out[:rows].float(), want.float().to(torch.bfloat16).float(), atol=0.5, rtol=2**-7)


def test_the_planner_s_chunks_run_through_the_public_door(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    call = make(replace(SMALL, chunk=16))
    assert call.buffer_lengths == mla_prefill_plan(SMALL.lens, SMALL.q_lens, 16).buffer_lengths
    want = moved(call, "cpu")
    plan.dispatch("mla_prefill", call, "triton")
    expected = reference.run("mla_prefill", want)
    assert compare("mla_prefill", call, want, expected).message is None
