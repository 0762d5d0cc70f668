"""mla_prefill on the torch backend against a dense fp64 reference, and the codes of its stages byte by byte."""

import math

import pytest
import torch
from mla_cases import E4M3, Case, encode, quantised, reference, relative

from tersekv import PagedLatentLayer, UnsupportedError, mla_prefill_plan
from tersekv.backends.torch import mla_prefill as oracle
from tersekv.backends.torch.mla_latents import quantize_and_store_latents, quantize_gemm_input_by_128_columns
from tersekv.formats import LATENT_FORMATS


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """Messages are those of the backend; checked mode is asked for where a test is about it."""
    monkeypatch.delenv("TERSEKV_CHECKED", raising=False)


def check(case, buffer=None, **options):
    """Run and compare everything that the operation writes."""
    want, want_lse, q, written = reference(case)
    before = case.raw.clone()
    out, lse = case.run(buffer, **options)
    assert relative(out, want) < 3e-3
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-3, rtol=0)
    torch.testing.assert_close(case.t["q"], q, atol=0, rtol=2**-7)
    mine = case.layer()
    now = torch.ones(before.shape[:2], dtype=torch.bool)
    for (b, p), row in written.items():
        page, slot = int(case.table64[b, p // case.page_size]), p % case.page_size
        now[page, slot] = False
        # rsqrt and 1/sqrt may differ in the last fp32 bit, and with it one value in a few thousand by one code
        different = (case.raw[page, slot] != row).float().mean()
        assert different < 0.02, (b, p, different)
    assert torch.equal(case.raw[now], before[now]), "a slot that belongs to no new token was written"
    return out, lse, mine


FORMATS = tuple(LATENT_FORMATS)
SCALED = ("fp8_e4m3", "fp8_e5m2")


@pytest.mark.parametrize("buffer", [None, 6], ids=["one shot", "chunks"])
@pytest.mark.parametrize("fp8_weights", [True, False], ids=["fp8 weights", "16-bit weights"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_prefill_agrees_with_the_dense_reference(fmt, fp8_weights, buffer):
    check(Case(fmt=fmt, fp8_weights=fp8_weights, kv_scale=0.037 if fmt in SCALED else 1.0), buffer)


@pytest.mark.parametrize("fmt", FORMATS)
def test_prefill_in_fp16(fmt):
    check(Case(fmt=fmt, dtype=torch.float16, gamma_dtype=torch.float16, seed=1), 7)


@pytest.mark.parametrize("buffer", [None, 9])
def test_raw_rows_that_lie_in_the_cache_are_rewritten_in_place(buffer):
    check(Case(raw_in_cache=True, rank=256, seed=2), buffer)


def test_the_append_is_not_idempotent_when_the_raw_rows_lie_in_the_cache():
    case = Case(raw_in_cache=True)
    case.run()
    once = case.raw.clone()
    case.run()
    assert not torch.equal(case.raw, once)


@pytest.mark.parametrize("index", [torch.int32, torch.int64, torch.uint32])
def test_index_tensors_of_every_dtype_give_the_same_bits(index):
    want = Case(seed=3).run(8)
    got = Case(seed=3, index=index).run(8)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_prefill_in_the_shape_of_deepseek_v2_lite():
    sizes = {"heads": 16, "dn": 128, "dv": 128, "rope": 64, "rank": 512, "page_size": 16}
    check(Case(**sizes, requests=((30, 5), (0, 18)), fmt="fp8_ds_mla", seed=4), 24)


def test_prefill_in_the_shape_of_deepseek_v3():
    sizes = {"heads": 128, "dn": 128, "dv": 128, "rope": 64, "rank": 512, "page_size": 64}
    check(Case(**sizes, requests=((2, 2),), seed=5), 3)


def test_value_heads_may_be_wider_than_key_heads_and_blocks_may_cross_heads():
    check(Case(heads=4, dn=32, dv=64, requests=((0, 3), (2, 2)), seed=6))  # 96 rows a head, scale blocks of 128


@pytest.mark.parametrize("freqs_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_rotation_is_computed_in_the_dtype_of_freqs_cis(freqs_dtype):
    case = Case(freqs_dtype=freqs_dtype, seed=7)
    want = reference(case)[2]
    case.run()
    assert torch.equal(case.t["q"], want)


@pytest.mark.parametrize("gamma_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_is_rounded_to_the_dtype_of_gamma(gamma_dtype):
    check(Case(gamma_dtype=gamma_dtype, seed=8))


def test_one_shot_and_chunks_agree_with_every_buffer_size():
    want = Case(seed=9).run()
    for buffer in (1, 2, 5, 12, 13, 22, 100):
        got = Case(seed=9).run(buffer)
        assert relative(got[0], want[0].double()) < 2e-3, buffer
        torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=0)


def test_chunks_may_come_in_any_order(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    case = Case(seed=9)
    plan = mla_prefill_plan(case.lens, [n for _, n in case.requests], 5)
    rows, starts, lengths, most = plan
    backwards = plan._replace(
        buffer_row_offsets=rows.flip(0), cache_offsets=starts.flip(0), buffer_lengths=lengths[::-1], max_q_len=most
    )
    want = Case(seed=9).run()
    got = case.run(plan=backwards)
    assert relative(got[0], want[0].double()) < 2e-3
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=0)


def test_rotary_parts_of_the_cache_are_rounded_to_the_dtype_of_q():
    case = Case(requests=((3, 1), (0, 2)), fmt="fp8_e4m3", kv_scale=0.0371, seed=24)
    case.t["q"][..., : case.dn] = 0
    case.t["q"] *= 64
    want = reference(case)[1]
    torch.testing.assert_close(case.run()[1].double(), want, atol=1e-3, rtol=1e-5)


def test_blocks_of_heads_and_queries_change_no_result(monkeypatch):
    want = Case(heads=4, seed=10).run(8)
    monkeypatch.setattr(oracle, "_BLOCK", 16)
    got = Case(heads=4, seed=10).run(8)
    torch.testing.assert_close(got[0], want[0], atol=0, rtol=2**-7)
    torch.testing.assert_close(got[1], want[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("requests", [((0, 0), (3, 4), (0, 0)), ((5, 0), (0, 2)), ((0, 1),), ((7, 0),)])
@pytest.mark.parametrize("buffer", [None, 2])
def test_requests_without_tokens_are_passed_over(requests, buffer):
    case = Case(requests=requests, extra_rows=1, seed=11)
    if sum(n for _, n in requests):
        check(case, buffer)
    else:
        out, lse = case.run(buffer)
        assert torch.equal(out, torch.zeros_like(out))
        assert torch.equal(lse, torch.full_like(lse, -math.inf))


@pytest.mark.parametrize("extra_rows", [0, 3])
def test_no_request_at_all_gives_zero_and_no_key(extra_rows):
    case = Case(requests=(), extra_rows=extra_rows)
    out, lse = case.run()
    assert out.shape[0] == extra_rows
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))


def test_rows_of_q_that_belong_to_no_request_are_zero_and_not_rotated():
    case = Case(extra_rows=3, seed=12)
    tail = case.t["q"][-3:].clone()
    out, lse, _ = check(case)
    assert torch.equal(out[-3:], torch.zeros_like(out[-3:]))
    assert torch.equal(lse[-3:], torch.full_like(lse[-3:], -math.inf))
    assert torch.equal(case.t["q"][-3:], tail)


def test_a_plan_without_rows_appends_and_returns_zero():
    case = Case(seed=13)
    _, _, q, written = reference(case)
    plan = mla_prefill_plan(case.lens, [n for _, n in case.requests])
    plan = plan._replace(buffer_row_offsets=plan.buffer_row_offsets * 0, buffer_lengths=[0])
    out, lse = case.run(plan=plan)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full_like(lse, -math.inf))
    assert torch.equal(case.t["q"], q)
    for (b, p), row in written.items():
        got = case.raw[case.table64[b, p // case.page_size], p % case.page_size]
        assert (got != row).float().mean() < 0.02


def test_rotated_parts_and_lengths_go_where_they_are_wanted():
    case, same = Case(seed=13), Case(seed=13)
    plan = mla_prefill_plan(case.lens, [n for _, n in case.requests])
    same.run(plan=plan._replace(buffer_row_offsets=plan.buffer_row_offsets * 0, buffer_lengths=[0]))
    q = case.t["q"].clone()
    rotated = torch.full_like(q[..., -case.layer().kpe.shape[-1] :], math.nan)
    lens = torch.full((len(case.lens),), -1, dtype=torch.int32)
    empty = plan._replace(buffer_row_offsets=plan.buffer_row_offsets * 0, buffer_lengths=[0])
    case.run(plan=empty, q_pe_out=rotated, seq_lens_out=lens)
    assert torch.equal(case.t["q"], q)
    assert torch.equal(rotated, same.t["q"][..., -rotated.shape[-1] :])
    assert lens.tolist() == list(case.lens)
    with pytest.raises(ValueError, match="q_pe_out: want None with a plan that holds rows"):
        case.run(plan=plan, q_pe_out=rotated)
    with pytest.raises(ValueError, match=r"seq_lens_out: want memory of its own, got .* where cache_lens does"):
        case.run(plan=empty, seq_lens_out=case.t["cache_lens"])


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("fp8_weights", [True, False])
def test_a_bad_later_token_never_reaches_an_earlier_query(poison, fp8_weights):
    case = Case(requests=((2, 6),), fp8_weights=fp8_weights, seed=14)
    case.t["kv_c"][4] = poison
    out, lse = case.run()
    assert out[:4].isfinite().all()
    assert lse[:4].isfinite().all()
    assert out[4:].isnan().all()
    clean = Case(requests=((2, 6),), fp8_weights=fp8_weights, seed=14).run()
    torch.testing.assert_close(out[:4], clean[0][:4], atol=0, rtol=2**-7)


def test_a_bad_request_does_not_reach_another():
    case = Case(seed=15)
    case.t["kv_c"][:5] = math.nan
    out, _ = case.run()
    assert out[:5].isnan().all()
    assert torch.equal(out[5:], Case(seed=15).run()[0][5:])


def test_strided_arguments_are_honoured():
    want, want_lse = Case(seed=16).run(8)
    case = Case(seed=16)
    for name in ("q", "kv_c", "k_pe", "freqs", "gamma", "w", "w_scale"):
        x = case.t[name]
        wide = torch.full((*x.shape[:-1], x.shape[-1] + 16), 0, dtype=x.dtype)
        wide = wide.view(torch.uint8).fill_(0xFF).view(x.dtype)
        wide[..., : x.shape[-1]] = x
        case.t[name] = wide[..., : x.shape[-1]]
    case.raw = torch.full((*case.raw.shape[:2], case.raw.shape[2] + 32), 0xFF, dtype=torch.uint8)
    case.raw[..., :-32] = Case(seed=16).raw
    rows = case.raw.view(torch.bfloat16)
    layer = PagedLatentLayer(rows[..., : case.rank], rows[..., case.rank : -16], "bf16")
    out, lse = case.run(8, layer=layer)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert (case.raw[..., -32:] == 0xFF).all()


def test_split_latent_and_rotary_caches_give_the_same_bits_as_joined_rows():
    want = Case(fmt="fp8_e4m3", kv_scale=0.05, seed=17)
    expected = want.run()
    case = Case(fmt="fp8_e4m3", kv_scale=0.05, seed=17)
    rows = case.raw.view(torch.float8_e4m3fn)
    ckv, kpe = rows[..., : case.rank].clone(), rows[..., case.rank :].clone()
    got = case.run(layer=PagedLatentLayer.of((ckv, kpe), kv_scale=0.05))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(torch.cat([ckv, kpe], -1).view(torch.uint8), want.raw)


def test_a_scale_on_the_device_gives_the_same_bits_as_a_number():
    want = Case(fmt="fp8_e4m3", kv_scale=0.043, seed=18)
    expected = want.run()
    case = Case(fmt="fp8_e4m3", kv_scale=0.043, seed=18)
    got = case.run(layer=case.layer(torch.tensor([0.043])))
    assert torch.equal(got[0], expected[0])
    assert torch.equal(case.raw, want.raw)


def latents_to_quantise():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(9, 256, generator=g) * 10 ** torch.arange(-5.0, 4.0)[:, None]
    x[3, 128:] = 0
    x[3, 130] = -0.0  # in a group without a scale its code is 0 too
    x[4, :128] = 0
    x[4, 5] = 1e9  # capped: the other 127 values keep a scale of 1200 / 448, this one saturates
    x[5, 7] = -math.inf
    x[6, :128] = E4M3[torch.arange(128).clamp(max=126)].float()
    x[7, 0] = -0.0
    x[8, 128:] = torch.finfo(torch.float32).tiny * torch.arange(128)
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_and_scales_of_gathered_latents_are_exact(dtype):
    x = latents_to_quantise().to(dtype)
    codes, scales = quantize_gemm_input_by_128_columns(x)
    want, want_scales = quantised(x)
    assert torch.equal(codes.view(torch.uint8), want)
    assert torch.equal(scales, want_scales)
    assert scales.dtype == torch.float32


def test_quantised_latents_cover_ties_zero_groups_and_the_cap():
    ties = torch.zeros(1, 128)
    ties[0, :3] = torch.tensor([448.0, 17.0, 19.0])  # scale 1: 17 lies between 16 and 18, 19 between 18 and 20
    codes, scales = quantize_gemm_input_by_128_columns(ties)
    assert scales.item() == 1.0
    assert codes[0, :3].float().tolist() == [448.0, 16.0, 20.0]
    codes, scales = quantize_gemm_input_by_128_columns(torch.tensor([[2400.0] + [0.0] * 127]))
    assert scales.item() == (torch.tensor(1200.0) / torch.tensor(448.0)).item()
    assert codes[0, 0].item() == 448
    codes, scales = quantize_gemm_input_by_128_columns(torch.zeros(2, 128))
    assert not scales.any()
    assert not codes.view(torch.uint8).any()


def test_a_group_so_small_that_its_reciprocal_overflows_stays_finite():
    x = torch.zeros(1, 128)
    x[0, 1] = 1e-39
    codes, scales = quantize_gemm_input_by_128_columns(x)
    assert codes.float().isfinite().all()
    assert codes[0, 0].item() == 0
    assert scales.isfinite().all()


def test_a_nan_is_a_nan_code_and_leaves_the_scale_of_its_group_alone():
    x = torch.ones(1, 256)
    x[0, 3] = math.nan
    codes, scales = quantize_gemm_input_by_128_columns(x)
    assert codes.view(torch.uint8)[0, 3] == 0x7F
    assert codes.float().nan_to_num(nan=448.0).unique().tolist() == [448.0]
    assert scales.tolist() == [[(torch.tensor(1.0) / torch.tensor(448.0)).item()] * 2]
    codes, scales = quantize_gemm_input_by_128_columns(torch.tensor([[math.nan] + [0.0] * 127]))
    assert codes.view(torch.uint8)[0].tolist() == [0x7F] + [0] * 127
    assert scales.item() == 0


def test_group_scales_of_stored_rows_round_up_to_powers_of_two():
    amax = torch.tensor([0.0, 448.0, 448.0001, 447.9, 896.0, 1e-3, 1e6])
    case = Case(requests=((0, 7),), fmt="fp8_ds_mla")
    layer, at = case.layer(), (torch.zeros(7, dtype=torch.int64) + torch.arange(7) // 4, torch.arange(7) % 4)
    latent = torch.zeros(7, 128)
    latent[:, 9] = -amax
    f = LATENT_FORMATS["fp8_ds_mla"]
    quantize_and_store_latents(
        latent, torch.zeros(7, 16), layer.ckv, layer.kpe, layer.ckv_scale_cache, at, f, torch.ones(1)
    )
    assert layer.ckv_scale_cache[at].flatten().tolist() == [2.0**-13, 1.0, 2.0, 1.0, 2.0, 2.0**-13, 4096.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("fmt", FORMATS)
def test_stored_rows_are_exact(fmt, dtype):
    g = torch.Generator().manual_seed(3)
    latent = (torch.randn(6, 256, generator=g) * 10 ** torch.arange(-4.0, 2.0)[:, None]).to(dtype)
    rope = (torch.randn(6, 16, generator=g) * 40).to(dtype)
    latent[2, :128] = 0
    latent[3, 200] = 5e4
    case = Case(requests=((0, 6),), fmt=fmt, rank=256, kv_scale=0.083 if fmt in SCALED else 1.0)
    layer = case.layer()
    at = (torch.tensor([1, 0, 1, 0, 1, 0]), torch.tensor([3, 0, 1, 2, 0, 3]))
    f = LATENT_FORMATS[fmt]
    quantize_and_store_latents(
        latent, rope, layer.ckv, layer.kpe, layer.ckv_scale_cache, at, f, torch.tensor([case.kv_scale])
    )
    want, _, _ = encode(latent, rope, fmt, case.kv_scale)
    assert torch.equal(case.raw[at], want)


def test_casts_round_up_as_often_as_down():
    x = torch.rand(1, 128 * 256, generator=torch.Generator().manual_seed(1)) * 2 - 1
    codes, scales = quantize_gemm_input_by_128_columns(x)
    back = codes.float().unflatten(-1, (-1, 128)) * scales[..., None]
    up = (back.flatten().abs() > x.flatten().abs()).float().mean()
    assert 0.48 < up < 0.52


def test_fast_precision_is_accepted():
    want = Case(seed=19).run()
    assert relative(Case(seed=19).run(precision="fast")[0], want[0].double()) < 3e-2


def test_a_page_outside_the_cache_raises_before_anything_is_written():
    for bad in (-1, 99):
        case = Case(seed=20)
        case.t["page_table"][1, 2] = bad
        q, raw = case.t["q"].clone(), case.raw.clone()
        with pytest.raises(ValueError, match=rf"page_table: want page ids in \[0, 8\), got {bad} at \[1, 2\]"):
            case.run()
        assert torch.equal(case.t["q"], q)
        assert torch.equal(case.raw, raw)


def test_a_table_or_a_rotation_table_that_is_too_short_raises():
    case = Case(seed=21)
    case.t["page_table"] = case.t["page_table"][:, :2]
    with pytest.raises(ValueError, match="page_table: want at least 3 entries a request, got 2"):
        case.run()
    case = Case(seed=21)
    case.t["freqs"] = case.t["freqs"][:6]
    with pytest.raises(ValueError, match="freqs_cis: want at least 12 rows, got 6"):
        case.run()


@pytest.mark.parametrize("starts", [[0, 5, 8, 10], [0, 5, 3, 9], [-1, 5, 8, 9]])
def test_rows_of_q_that_are_not_there_raise(starts):
    case = Case(seed=21)
    case.t["cu"] = torch.tensor(starts)
    with pytest.raises(ValueError, match=r"cu_seqlens_q: want rows in \[0, 9\] that never fall"):
        case.run()


def test_an_8_bit_cache_cannot_hold_raw_rows():
    for fmt in ("fp8_e4m3", "fp8_e5m2", "fp8_ds_mla"):
        with pytest.raises(ValueError, match=f"kv_c: want the raw latents for a {fmt} cache"):
            Case(fmt=fmt).run(kv_c=None, k_pe=None)


def test_arguments_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match="kv_b_proj_scale: want a tensor beside an e4m3 kv_b_proj"):
        Case().run(kv_b_proj_scale=None)
    with pytest.raises(ValueError, match="out: want rows of head_dim_v=16"):
        Case().run(head_dim_v=16)
    with pytest.raises(ValueError, match=r"kv_b_proj: want \[N=160, L=128\]"):
        Case().run(out=torch.zeros(9, 2, 48, dtype=torch.bfloat16))
    case = Case()
    case.t["w"] = case.t["w"][:64]
    with pytest.raises(ValueError, match=r"kv_b_proj: want more than H \* Dn = 64 rows, got 64"):
        case.run(out=None)
    with pytest.raises(ValueError, match="precision: want"):
        Case().run(precision="slow")


def test_the_torch_backend_can_be_asked_for_by_name():
    out, _ = Case(seed=22).run(backend="torch")
    assert torch.equal(out, Case(seed=22).run()[0])
    with pytest.raises(UnsupportedError):
        Case(seed=22).run(backend="triton")


def test_checked_mode_finds_a_plan_that_misses_a_token(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    case = Case(seed=23, index=torch.uint32)
    check(case, 6)
    case = Case(seed=23)
    short = mla_prefill_plan([4, 12, 5], [4, 3, 1])._replace(max_q_len=5)
    with pytest.raises(ValueError, match="plan: want every cached token in exactly one chunk"):
        case.run(plan=short)
    stale = mla_prefill_plan(case.lens, [1] * len(case.lens))
    with pytest.raises(ValueError, match="max_q_len: want at least 5 as in cu_seqlens_q, got 1"):
        case.run(plan=stale)


def test_checked_mode_finds_rows_before_the_first_request(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    case = Case()
    case.t["cu"][0] = 1
    with pytest.raises(ValueError, match=r"^cu_seqlens_q: want a first entry of 0, got 1$"):
        case.run()


def test_checked_mode_finds_a_rotation_table_that_is_too_short(monkeypatch):
    monkeypatch.setenv("TERSEKV_CHECKED", "1")
    case = Case(seed=21)
    case.t["freqs"] = case.t["freqs"][:6]
    with pytest.raises(ValueError, match="freqs_cis: want a row for each of 12 tokens, got 6"):
        case.run()
