"""The encoders of quant.py against the oracle's, over whole spaces of values."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tersekv.backends.torch import quantize
from tersekv.backends.triton.parts.quant import (
    encode_e2m1,
    encode_fp8,
    encode_int8_unclamped,
    reciprocal_rn,
    round_and_clamp_to_int4,
)

N = 65536


@triton.jit
def fp8_kernel(p_x, p_y, E5M2: tl.constexpr, NATIVE: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_y + i, encode_fp8(tl.load(p_x + i), E5M2, NATIVE))


@triton.jit
def int8_kernel(p_x, p_y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_y + i, encode_int8_unclamped(tl.load(p_x + i)))


@triton.jit
def e2m1_kernel(p_x, p_y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_y + i, encode_e2m1(tl.load(p_x + i)).to(tl.uint8))


@triton.jit
def int4_kernel(p_x, p_y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_y + i, round_and_clamp_to_int4(tl.load(p_x + i)).to(tl.uint8))


@triton.jit
def reciprocal_kernel(p_x, p_y, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(p_y + i, reciprocal_rn(tl.load(p_x + i)))


def all_bf16() -> Tensor:
    return torch.arange(N, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def random_bits() -> Tensor:
    g = torch.Generator().manual_seed(0)
    return torch.randint(-(2**31), 2**31, (N,), generator=g).to(torch.int32).view(torch.float32)


def around(values: Tensor) -> Tensor:
    """Values, their neighbours in fp32, and all negated; filled up to N with zeros."""
    values = values.float()
    up, down = values.nextafter(torch.tensor(torch.inf)), values.nextafter(torch.tensor(-torch.inf))
    x = torch.cat([values, up, down])
    x = torch.cat([x, -x])
    return torch.cat([x, torch.zeros(N - x.numel())])


def middles(dtype: torch.dtype) -> Tensor:
    """The codes of an fp8 type and the ties between them."""
    codes = torch.arange(128, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()]
    return torch.cat([codes, (codes[1:] + codes[:-1]) / 2, codes[-1:] * 1.0625, codes[-1:] * 2])


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_fp8_codes_round_to_nearest_even_and_saturate(dtype, native):
    for x in (all_bf16(), random_bits(), around(middles(dtype))):
        got = torch.empty(N, dtype=torch.uint8)
        fp8_kernel[(1,)](x, got, dtype == torch.float8_e5m2, native, N)
        assert torch.equal(got, quantize.cast_fp8(x, dtype).view(torch.uint8))


def test_int8_codes_round_halves_away_from_zero():
    steps = torch.arange(0, 255) / 2
    for x in (around(steps), torch.linspace(-127.4, 127.4, N), torch.full((N,), torch.nan)):
        got = torch.empty(N, dtype=torch.int8)
        int8_kernel[(1,)](x, got, N)
        assert torch.equal(got, quantize.round_half_away_to_int8_satfinite(x))


def test_e2m1_codes_round_to_nearest_even_and_saturate():
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    ties = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([7.0, 100.0, torch.inf])])
    for x in (all_bf16(), random_bits(), around(ties)):
        got = torch.empty(N, dtype=torch.uint8)
        e2m1_kernel[(1,)](x, got, N)
        assert torch.equal(got, quantize.encode_e2m1_nearest_even_satfinite(x))


def test_int4_codes_add_a_half_and_cut_off():
    for x in (all_bf16(), random_bits(), around(torch.arange(0, 40) / 2 - 2)):
        got = torch.empty(N, dtype=torch.uint8)
        int4_kernel[(1,)](x, got, N)
        assert torch.equal(got, quantize._round_int4(x).to(torch.uint8))


def test_reciprocals_are_rounded_correctly():
    x = random_bits()
    x = x[x.isfinite() & (x != 0)].repeat(2)[:N].contiguous()
    got = torch.empty(N)
    reciprocal_kernel[(1,)](x, got, N)
    assert torch.equal(got, (1.0 / x.double()).float())
