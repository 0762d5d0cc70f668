"""Every code of every kind becomes exactly its value, also through the matrix products that read them."""

from __future__ import annotations

import pytest
import torch
from dense_reference import E2M1, TABLES, values

import tersekv
from tersekv.backends.torch import codes as C

ALL = torch.arange(256, dtype=torch.int64).to(torch.uint8)
CODES = {f.code: f.storage for f in tersekv.KV_FORMATS.values() if f.storage.itemsize == 1}


def convert(bytes_, code):
    return C.to_float(bytes_, code).double()


def expected(bytes_, code):
    return values(bytes_.view(CODES[code]), code)


def test_every_code_of_8_bits_or_fewer_is_tried():
    assert set(CODES) == {"e4m3", "e5m2", "int8", "e2m1", "int4"}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("flush", [False, True])
def test_every_code_is_exact_with_and_without_flushing_subnormals(code, flush):
    torch.set_flush_denormal(flush)
    try:
        got = convert(ALL[:, None].expand(256, 5), code)
    finally:
        torch.set_flush_denormal(False)
    want = expected(ALL[:, None].expand(256, 5).contiguous(), code)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(0), want.nan_to_num(0))
    assert torch.equal(got.signbit()[~want.isnan()], want.signbit()[~want.isnan()])  # −0 stays −0


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("shape", [(1,), (3, 7), (2, 33, 8), (0, 8)])
def test_any_shape_and_stride_converts(code, shape):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    wanted = expected(x, code)
    torch.testing.assert_close(convert(x, code), wanted, rtol=0, atol=0, equal_nan=True)
    if len(shape) > 2:
        turned = x.transpose(0, 1)
        torch.testing.assert_close(convert(turned, code), wanted.transpose(0, 1), rtol=0, atol=0, equal_nan=True)


def test_the_low_nibble_of_a_byte_comes_first():
    byte = torch.tensor([0x7A], dtype=torch.uint8)
    assert convert(byte, "e2m1").tolist() == [float(E2M1[0xA]), float(E2M1[0x7])]
    assert convert(byte, "int4").tolist() == [10.0, 7.0]


FORMATS = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "int8_per_token_head": torch.int8}


@pytest.mark.parametrize("format", FORMATS)
def test_every_value_code_leaves_decode_exactly(format):
    """One token a request: its probability is 1, so the output is the value itself."""
    storage = FORMATS[format]
    cache = tersekv.PagedKVCache.allocate(1, 256, 1, 1, 8, format=format)[0]
    cache.v.view(torch.uint8).copy_(ALL.view(256, 1, 1, 1).expand(256, 1, 1, 8))
    if cache.v_scale_cache is not None:
        cache.k_scale_cache.fill_(1.0)
        cache.v_scale_cache.fill_(1.0)
    table = torch.arange(256, dtype=torch.int32)[:, None]
    out = tersekv.decode(torch.ones(256, 1, 8), cache, table, torch.ones(256, dtype=torch.int32), backend="torch")
    want = values(ALL.view(storage))[:, None].expand(256, 8)
    torch.testing.assert_close(out[:, 0].double(), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp8_e5m2"])
def test_every_key_code_reaches_its_score_exactly(format):
    """One token a request, and a query that picks one column: the LSE is the score."""
    table_values = TABLES[FORMATS[format]]
    cache = tersekv.PagedKVCache.allocate(1, 256, 1, 1, 8, format=format)[0]
    cache.k.view(torch.uint8)[:, 0, 0, 5] = ALL
    q = torch.zeros(256, 1, 8)
    q[:, 0, 5] = 1.0
    table = torch.arange(256, dtype=torch.int32)[:, None]
    _, lse = tersekv.decode(
        q, cache, table, torch.ones(256, dtype=torch.int32), softmax_scale=1.0, return_lse=True, backend="torch"
    )
    finite = table_values.isfinite()
    assert torch.equal(lse[finite, 0].double(), table_values[finite])
    assert lse[table_values.isnan(), 0].isnan().all()
