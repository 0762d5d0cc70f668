"""Formats: their sizes, and the exact codes and scales of the oracle, over whole code spaces where they are small."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import slow_reference as slow
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tersekv
from tersekv import KV_FORMATS, LATENT_FORMATS, formats, kv_bytes_per_token, latent_bytes_per_token
from tersekv.backends.torch import quantize
from tersekv.formats import FP8_DS_MLA, INT8_PER_TOKEN_HEAD, NVFP4
from tersekv.testing.codes import encode_row

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ALL = {**KV_FORMATS, **LATENT_FORMATS}
HALF_STEP = {
    "bf16": (2**-8, 0, 0),
    "fp16": (2**-11, 0, 2**-25),
    "fp8_e4m3": (2**-4, 0, 2**-10),
    "fp8_e5m2": (2**-3, 0, 2**-17),
    "fp8_per_token_head": (2**-4, 2**-18, 0),
    "int8_per_token_head": (0, 1 / 254, 0),
    "nvfp4": (2**-2, 1.0625 / 24, 0),  # the block scale is rounded too, up by one part in 16 at most
    "int4_per_token_head": (2**-19, 1 / 15, 0),
    "fp8_ds_mla": (2**-4, 2**-17, 0),
}


LATENT_BYTES = {"bf16": 1152, "fp16": 1152, "fp8_e4m3": 576, "fp8_e5m2": 576, "fp8_ds_mla": 656}


def all_bf16() -> torch.Tensor:
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(torch.float32)


def around(points: np.ndarray) -> torch.Tensor:
    """Each point as fp32 with its two fp32 neighbours, of both signs."""
    p = points.astype(np.float32)
    near = np.concatenate([np.nextafter(p, np.float32(-np.inf)), p, np.nextafter(p, np.float32(np.inf))])
    return torch.from_numpy(np.concatenate([near, -near]))


def middles(values: np.ndarray) -> np.ndarray:
    return (values[1:] + values[:-1]) / 2


def signed(values: np.ndarray, codes: torch.Tensor, sign_bit: int) -> torch.Tensor:
    magnitude = torch.from_numpy(values)[codes.to(torch.int64) & (sign_bit - 1)]
    return torch.where(codes.to(torch.int64) & sign_bit > 0, -magnitude, magnitude)


@pytest.mark.parametrize(("name", "bytes_per_row"), [
    ("bf16", 256), ("fp16", 256), ("fp8_e4m3", 128), ("fp8_e5m2", 128),
    ("fp8_per_token_head", 132), ("int8_per_token_head", 132), ("nvfp4", 72), ("int4_per_token_head", 68),
])  # fmt: skip
def test_bytes_of_a_row_of_128(name, bytes_per_row):
    assert KV_FORMATS[name].row_bytes(128) == bytes_per_row
    assert kv_bytes_per_token(name, 8, 128) == 16 * bytes_per_row
    assert kv_bytes_per_token(name, 8, 128, 64) < 16 * bytes_per_row


@pytest.mark.parametrize(("name", "nbytes"), LATENT_BYTES.items())
def test_bytes_of_a_latent_row(name, nbytes):
    assert LATENT_BYTES.keys() == LATENT_FORMATS.keys()
    assert latent_bytes_per_token(name) == nbytes


def test_an_unknown_format_is_refused_with_the_list():
    with pytest.raises(
        ValueError,
        match=r"^format: want one of bf16, .*, nvfp4, .* for K/V caches, got 'fp4'; did you mean 'nvfp4'\?$",
    ):
        kv_bytes_per_token("fp4", 1, 16)
    with pytest.raises(ValueError, match=r"^format: want one of .*fp8_v41 for latent caches, got 'nvfp4'$"):
        latent_bytes_per_token("nvfp4")


@pytest.mark.parametrize("name", FP8)
def test_fp8_of_every_bf16_value_and_around_every_tie(name):
    x = torch.cat([all_bf16(), around(middles(slow.FP8[name])), around(slow.FP8[name][-1:] * [1, 1.01, 1.0625, 2])])
    got = quantize.cast_fp8(x, FP8[name]).view(torch.uint8).numpy()
    np.testing.assert_array_equal(got, slow.nearest(x.numpy(), slow.FP8[name], 0x7F))


def test_e2m1_of_every_bf16_value_and_around_every_tie():
    x = torch.cat([all_bf16(), around(middles(slow.E2M1))])
    np.testing.assert_array_equal(
        quantize.encode_e2m1_nearest_even_satfinite(x).numpy(), slow.nearest(x.numpy(), slow.E2M1, 0)
    )


def test_int8_rounds_half_away_from_zero_and_never_below_a_half():
    x = torch.cat(
        [all_bf16(), around(np.arange(-129, 130) + 0.5), around(np.array([0.49999997, 1.5, 126.5, 127.49999]))]
    )
    np.testing.assert_array_equal(
        quantize.round_half_away_to_int8_satfinite(x).view(torch.uint8).numpy(), slow.half_away(x.numpy())
    )
    codes = quantize.round_half_away_to_int8_satfinite(torch.tensor([0.49999997, 0.5, -2.5, torch.nan]))
    assert codes.tolist() == [0, 1, -3, 0]


@pytest.mark.parametrize(("values", "sign_bit", "cast"), [
    (slow.E4M3, 128, lambda x: quantize.cast_fp8(x, torch.float8_e4m3fn).view(torch.uint8)),
    (slow.E5M2, 128, lambda x: quantize.cast_fp8(x, torch.float8_e5m2).view(torch.uint8)),
    (slow.E2M1, 8, quantize.encode_e2m1_nearest_even_satfinite),
], ids=["e4m3", "e5m2", "e2m1"])  # fmt: skip
def test_casts_round_up_as_often_as_down(values, sign_bit, cast):
    ties = torch.from_numpy(middles(values).astype(np.float32))
    back = signed(values, cast(ties), sign_bit)
    # Codes alternate between odd and even, so the ties alternate between down and up.
    assert (back > ties).tolist() == [i % 2 == 1 for i in range(len(ties))]
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * values[-1] / 6
    error = signed(values, cast(x), sign_bit) - x.clamp(-values[-1], values[-1])
    up, down = int((error > 0).sum()), int((error < 0).sum())
    assert abs(up - down) < 4 * math.sqrt(up + down)
    assert abs(error.mean()) < 4 * error.std() / math.sqrt(len(x))


def test_int8_rounds_up_as_often_as_down():
    x = torch.cat(
        [torch.arange(-120, 121) + 0.5, torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 20]
    )
    error = quantize.round_half_away_to_int8_satfinite(x).double() - x
    up, down = int((error > 0).sum()), int((error < 0).sum())
    assert abs(up - down) < 4 * math.sqrt(up + down)


@pytest.mark.parametrize("name", KV_FORMATS)
def test_every_code_reads_back_as_its_value(name):
    f = KV_FORMATS[name]
    if f.storage.itemsize == 2:
        codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(f.storage)[None]
        assert torch.equal(quantize.dequantize(codes, None, f).nan_to_num(), codes.float().nan_to_num())
        return
    raw = torch.arange(256, dtype=torch.uint8)
    if name == "nvfp4":
        want = signed(slow.E2M1, torch.stack([raw & 15, raw >> 4], -1).flatten(), 8)
    elif name == "int8_per_token_head":
        want = raw.view(torch.int8).double()
    elif name == "int4_per_token_head":  # a scale of 0.5, whose lowest bits are 0
        want = torch.stack([raw & 15, raw >> 4], -1).flatten().double()
    else:
        values = slow.E5M2 if name == "fp8_e5m2" else slow.E4M3
        raw = raw[(raw & 127) < len(values)]
        want = signed(values, raw, 128)
    n = want.numel() // (f.scale_block or want.numel())
    scales = None if f.scale_dtype is None else torch.full((1, n) if f.scale_block else (1,), 0.5).to(f.scale_dtype)
    got = quantize.dequantize(raw.view(f.storage)[None], scales, f, 3.0)[0]
    assert torch.equal(got.double(), want * (1.5 if scales is not None else 3.0))


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(list(ALL)),
    blocks=st.integers(1, 2),
    multiplier=st.sampled_from([1.0, 0.25, 0.037, 300.0]),
    seed=st.integers(0, 2**32),
)
def test_rows_are_encoded_as_in_the_slow_reference(name, blocks, multiplier, seed):
    f = ALL[name]
    multiplier = float(np.float32(multiplier))
    x = slow.spicy(np.random.default_rng(seed), (6, 2, blocks * 128), torch.float32, f.storage.itemsize == 1)
    codes, scales = quantize.quantize_rows(x, f, multiplier)
    want_codes, want_scales = slow.rows(x.numpy(), name, multiplier)
    assert codes.dtype == f.storage
    np.testing.assert_array_equal(codes.contiguous().view(torch.uint8).numpy(), want_codes)
    assert (scales is None) == (want_scales is None)
    if scales is not None:
        assert scales.dtype == f.scale_dtype
        np.testing.assert_array_equal(scales.contiguous().view(torch.uint8).numpy().ravel(), want_scales.ravel())


@settings(deadline=None, max_examples=60)
@given(name=st.sampled_from(list(ALL)), multiplier=st.sampled_from([1.0, 0.25, 1.7]), seed=st.integers(0, 2**32))
def test_what_is_read_back_is_within_half_a_step_of_what_was_written(name, multiplier, seed):
    f = ALL[name]
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((4, 256)).astype(np.float32))
    codes, scales = quantize.quantize_rows(x, f, multiplier)
    scale = 1.0 if f.scale in ("none", "group", "token_head") else 1 / multiplier
    back = quantize.dequantize(codes, scales, f, scale)
    # (relative, of the row's largest, absolute): half a step of normal codes, of the scale's smallest code, and near 0.
    relative, of_largest, absolute = HALF_STEP[name]
    bound = relative * x.abs() + of_largest * x.abs().amax(-1, keepdim=True) + absolute * scale
    assert ((back - x).abs() <= 1.0001 * bound).all()


def test_a_zero_row_has_the_smallest_scale_and_zero_codes():
    zero = torch.zeros(1, 128)
    for name in ("fp8_per_token_head", "int8_per_token_head"):
        codes, scales = quantize.quantize_rows(zero, KV_FORMATS[name])
        assert scales.tolist() == [float(np.float32(1e-6))]
        assert not codes.view(torch.uint8).any()
    codes, scales = quantize.quantize_rows(zero, KV_FORMATS["int4_per_token_head"])
    assert not codes.any()
    assert scales.view(torch.int32).tolist() == [int(np.float32(1e-6).view(np.int32)) & ~15]
    codes, scales = quantize.quantize_rows(zero, NVFP4)
    assert not codes.any()
    assert not scales.view(torch.uint8).any()
    codes, scales = quantize.quantize_rows(zero, FP8_DS_MLA)
    assert scales.tolist() == [[2.0**-13]]
    assert not codes.view(torch.uint8).any()


def fp32(x: Fraction) -> Fraction:
    """The nearest number that fp32 holds, ties to an even last bit."""
    if not x:
        return x
    exponent = max(math.frexp(float(abs(x)))[1] - 24, -149)
    return Fraction(round(x / Fraction(2) ** exponent)) * Fraction(2) ** exponent  # round() takes ties to even


def int4_of(row: list[float], widen: bool) -> tuple[list[int], int]:
    """Codes and bits of the stored scale of a row, in rational numbers, each step rounded to fp32 as the law says."""
    x = [Fraction(v) for v in row]
    low, high = (min(*x, *[0] * widen), max(*x, *[0] * widen))
    s = max(fp32(fp32(high - low) / 15), Fraction(float(np.float32(1e-6))))

    def whole(u: Fraction) -> int:
        return min(max(math.trunc(fp32(u + Fraction(1, 2) if u >= 0 else u - Fraction(1, 2))), 0), 15)

    zero, inverse = whole(fp32(-low / s)), fp32(1 / s)
    bits = int(np.float32(float(s)).view(np.uint32))
    return [whole(fp32(fp32(v * inverse) + zero)) for v in x], bits & ~15 | zero


@settings(deadline=None, max_examples=100)
@given(seed=st.integers(0, 2**32), size=st.floats(-9, 9), shift=st.floats(-4, 4), widen=st.booleans())
def test_int4_is_what_rational_numbers_give(seed, size, shift, widen):
    x = np.random.default_rng(seed).standard_normal(16) + shift
    x = (x * 10.0**size).astype(np.float32)
    if seed % 3 == 0:  # halfway between codes, and one step to either side
        step = np.float32(2.0 ** (seed % 20 - 10))
        x = step * (np.arange(16) + np.array([0, *([0.5] * 14), 0])).astype(np.float32)[::-1] - step * (seed % 7)
        x = np.nextafter(x.astype(np.float32), np.float32(np.inf) * (seed % 2 or -1)) if seed % 5 else x
    x = x.astype(np.float32)
    codes, bits = int4_of(x.tolist(), widen)
    rows = torch.from_numpy(x)[None]
    f = KV_FORMATS["int4_per_token_head"]
    for got, stored in (
        quantize.quantize_rows(rows, f, widen_int4_range_to_0=widen), encode_row(rows, f, torch.tensor(1.0),
        widen=widen)
    ):  # fmt: skip
        assert quantize.unpack_nibbles(got)[0].tolist() == codes
        assert int(stored.view(torch.int32)) == bits


def test_a_row_of_one_sign_is_kept_by_a_range_that_holds_0():
    f = KV_FORMATS["int4_per_token_head"]
    x = torch.linspace(10, 11, 16)[None]
    for rows in (x, -x):
        assert (quantize.dequantize(*quantize.quantize_rows(rows, f), f) - rows).abs().max() < 0.4
    back = quantize.dequantize(*quantize.quantize_rows(x, f, widen_int4_range_to_0=False), f)
    assert (back < 1.1).all(), "as others write it: a zero point below 0 is cut off, and the row with it"


def test_int4_adds_a_half_and_cuts_off_so_that_just_below_a_half_becomes_one():
    x = torch.tensor([0.0, 0.49999997, 1.4999999, 15.0]).repeat(2)[None]
    codes, stored = quantize.quantize_rows(x, KV_FORMATS["int4_per_token_head"])
    assert quantize.unpack_nibbles(codes)[0, :4].tolist() == [0, 1, 1, 15]
    assert stored.tolist() == [1.0]


def test_a_block_whose_scale_rounds_to_zero_is_all_zero_even_where_negative():
    x = torch.full((1, 16), -6 * 2.0**-10)
    codes, scales = quantize.quantize_rows(x, NVFP4)
    assert scales.view(torch.uint8).tolist() == [[0]]
    assert codes.tolist() == [[0] * 8]
    codes, scales = quantize.quantize_rows(1.01 * x, NVFP4)
    assert scales.view(torch.uint8).tolist() == [[1]]


def test_the_sign_of_zero_is_kept_and_the_even_element_is_the_low_nibble():
    x = torch.zeros(1, 16)
    x[0, :4] = torch.tensor([6.0, -6.0, -0.0, 0.5])
    codes, _ = quantize.quantize_rows(x, NVFP4)
    assert codes[0, :2].tolist() == [0xF7, 0x18]


def test_a_latent_group_scale_is_the_next_power_of_two_and_powers_stay():
    exponents = torch.arange(-13, 100)
    exact = 2.0**exponents
    assert torch.equal(quantize.ceil_power_of_two(exact), exact)
    assert torch.equal(quantize.ceil_power_of_two(torch.nextafter(exact, torch.tensor(torch.inf))), exact * 2)
    assert torch.equal(quantize.ceil_power_of_two(torch.nextafter(exact, torch.zeros(()))), exact)
    x = torch.zeros(2, 128)
    x[:, 5] = torch.tensor([448.0 * 4, 449.0 * 4])
    codes, scales = quantize.quantize_rows(x, FP8_DS_MLA)
    assert scales[:, 0].tolist() == [4.0, 8.0]
    assert codes[:, 5].float().tolist() == [448.0, 224.0]


def test_nan_and_inf_spoil_no_more_than_they_must():
    x = torch.tensor([[1.0, torch.nan, -torch.nan, 2.0] * 4, [1.0, torch.inf, -torch.inf, 0.0] * 4])
    codes, scales = quantize.quantize_rows(x, INT8_PER_TOKEN_HEAD)
    assert codes[0, :4].tolist() == [64, 0, 0, 127]
    assert codes[1].tolist() == [0] * 16
    assert scales[1].isinf()
    codes, scales = quantize.quantize_rows(x, KV_FORMATS["fp8_per_token_head"])
    assert codes.view(torch.uint8)[:, 1:3].tolist() == [[0x7F, 0x7F]] * 2
    assert codes[0, 3].float() == 448
    codes, scales = quantize.quantize_rows(x, KV_FORMATS["int4_per_token_head"])
    back = quantize.dequantize(codes, scales, KV_FORMATS["int4_per_token_head"])
    torch.testing.assert_close(back[0, :4], torch.tensor([1.0, 0.0, 0.0, 2.0]), rtol=0, atol=0.07)
    assert scales[1].isinf()
    assert back[1].isnan().all()
    codes, scales = quantize.quantize_rows(x, NVFP4)
    assert codes[0, :2].tolist() == [0x05, 0x70]
    assert codes[1, :2].tolist() == [0x70, 0x0F]
    assert scales.float()[1].tolist() == [448.0]


@pytest.mark.parametrize(("name", "near"), [
    ("int8", "int8_per_token_head"), ("int4", "int4_per_token_head"), ("fp8", "fp8_e4m3"), ("fp4", "nvfp4"),
    ("bfloat16", "bf16"), ("float16", "fp16"), ("FP8_E4M3", "fp8_e4m3"), ("fp8-e5m2", "fp8_e5m2"),
    ("int8_per_head_token", "int8_per_token_head"), ("nvfp", "nvfp4"),
])  # fmt: skip
def test_a_name_that_is_near_to_a_formats_is_told(name, near):
    with pytest.raises(ValueError, match=f"got {name!r}; did you mean {near!r}\\?$"):
        tersekv.PagedKVCache.allocate(1, 4, 16, 2, 32, format=name)
    assert formats.meant(name, formats.ALL_FORMATS) == f"; did you mean {near!r}?"


@pytest.mark.parametrize("name", ["gguf", "", 8, None, ("bf16",)])
def test_of_a_name_that_is_near_to_none_nothing_is_guessed(name):
    assert formats.meant(name, formats.ALL_FORMATS) == ""


def test_what_a_cache_cannot_have_is_not_suggested():
    with pytest.raises(ValueError, match=r"for latent caches, got 'int8'$"):
        tersekv.PagedLatentCache.allocate(1, 4, 16, format="int8")
