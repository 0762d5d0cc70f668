"""The interpreter's float conversions, exhaustively: every bf16 value to fp8, every fp8 code back."""

from __future__ import annotations

import interpret
import numpy as np
import pytest
import torch
import triton
import triton.language as tl

TL = {
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def cast(x, y, TO: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(y + i, tl.load(x + i).to(TO))


def run(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    y = torch.empty(x.shape, dtype=to)
    cast[(1,)](x, y, TL[to], x.numel())
    return y


def nearest_even(x: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """The fp8 code nearest to each value, ties to the even code, found by search in the table of all codes."""
    table = torch.arange(256, dtype=torch.uint8).view(to).double()
    codes = torch.arange(256)[table.isfinite() & ~((table == 0) & table.signbit())]
    values, order = table[codes].sort()
    codes = codes[order]
    high = torch.searchsorted(values, x).clamp(1, len(values) - 1)
    low = high - 1
    up, down = values[high] - x, x - values[low]
    pick_high = (up < down) | ((up == down) & (codes[high] % 2 == 0))
    code = torch.where(pick_high, codes[high], codes[low])
    code = torch.where((code == 0) & x.signbit(), 0x80, code)
    return code.to(torch.uint8)


def all_bf16() -> torch.Tensor:
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("to", FP8)
def test_every_bf16_value_rounds_to_the_nearest_even_code_and_saturates(source, to):
    x = all_bf16()
    got = run(x.to(source), to)
    real = ~x.isnan()
    limit = torch.finfo(to).max
    want = nearest_even(x[real].double().clamp(-limit, limit), to)
    assert torch.equal(got.view(torch.uint8)[real], want)
    assert got.float()[~real].isnan().all()


@pytest.mark.parametrize("to", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("source", FP8)
def test_every_code_comes_back(source, to):
    codes = torch.arange(256, dtype=torch.uint8).view(source)
    got, want = run(codes, to), codes.to(to)
    assert torch.equal(got.isnan(), want.isnan())
    live = ~want.isnan()
    assert torch.equal(got[live], want[live])


def test_bf16_rounds_to_nearest_even():
    bits = np.random.default_rng(0).integers(0, 2**32, 65536, dtype=np.uint32).view(np.int32)
    ties = (np.arange(65536, dtype=np.uint32) << 16 | 0x8000).view(np.int32)
    x = torch.from_numpy(np.concatenate([bits, ties])).view(torch.float32)
    got, want = run(x, torch.bfloat16), x.to(torch.bfloat16)
    live = ~x.isnan()
    assert torch.equal(got.view(torch.int16)[live], want.view(torch.int16)[live])
    assert got[~live].isnan().all()


def test_an_unknown_interpreter_is_refused(monkeypatch):
    monkeypatch.setattr(interpret.interpreter, "_convert_float", lambda x: x)
    with pytest.raises(RuntimeError, match="unknown way"):
        interpret.install()
