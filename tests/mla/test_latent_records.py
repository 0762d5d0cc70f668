"""Latent records without a rotary part, fp8_v4 and fp8_v41: their bytes against a second writer, in NumPy, and what is
said of caches and calls that do not fit."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

import tersekv
from tersekv.dispatch import plan
from tersekv.testing import make
from tersekv.testing.cases import Case

FORMATS = ("fp8_v4", "fp8_v41")
# Every e4m3 code that is a number, by its value.
E4M3 = np.array([(2.0 ** (max(c >> 3, 1) - 7)) * ((c & 7) / 8 + (c >> 3 > 0)) for c in range(127)])


def e4m3(x):
    """The code nearest to each number, ties to the even one."""
    size = np.minimum(np.abs(x), 448.0)[..., None]
    off = np.abs(E4M3 - size)
    nearest = off.min(-1, keepdims=True)
    even = np.where(off == nearest, np.where(np.arange(127) % 2 == 0, 2, 1), 0)
    return (even.argmax(-1) | (np.signbit(x) << 7)).astype(np.uint8)


def bf16(x):
    """Bytes of the nearest bf16, ties to even."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8).reshape(*x.shape[:-1], -1)


def written(x, block):
    """Codes of rows, and the byte of each block's scale: 2^ceil(log2(max(amax, 1e-4) / 448))."""
    blocks = x.reshape(len(x), -1, block)
    size = np.maximum(np.abs(blocks).max(-1), np.float32(1e-4)) / np.float32(448)
    exponent = np.array([[next(e for e in range(-149, 129) if 2.0**e >= s) for s in row] for row in size])
    codes = e4m3(blocks.astype(np.float64) / 2.0 ** exponent[..., None])
    return codes.reshape(len(x), -1), (exponent + 127).astype(np.uint8)


def page_of(format, x):
    """The bytes of one page that holds rows x [S, 512]."""
    if format == "fp8_v41":
        codes, scales = written(x, 32)
        return np.concatenate([codes, scales], 1).reshape(-1)
    codes, scales = written(x[:, :448], 64)
    rows = np.concatenate([codes, bf16(x[:, 448:])], 1)
    page = np.concatenate([rows.reshape(-1), np.pad(scales, ((0, 0), (0, 1))).reshape(-1)])
    return np.pad(page, (0, -len(page) % 576))


def rows_of(size):
    x = np.random.default_rng(3).standard_normal((size, 512)).astype(np.float32)
    x *= 10.0 ** np.random.default_rng(4).uniform(-8, 4, (size, 1)).astype(np.float32)
    x[0] = 0
    for i, shift in enumerate((-20, -3, 0, 5), 1):  # just below, at and above a power of two
        edge = np.float32(448 * 2.0**shift)
        x[i] = np.clip(x[i], -1e-9, 1e-9)
        x[i, 5], x[i, 70], x[i, 200] = np.nextafter(edge, np.float32(0)), -edge, np.nextafter(edge, np.float32(np.inf))
    return x


@pytest.mark.parametrize("size", [1, 16, 61, 64])
@pytest.mark.parametrize("format", FORMATS)
def test_pages_have_the_bytes_of_the_text(format, size):
    layer = tersekv.PagedLatentCache.allocate(1, 3, size, format=format)[0]
    x = rows_of(size)[:size] if size > 5 else rows_of(6)[5 : 5 + size]
    slots = torch.cat([torch.arange(size, 2 * size), torch.tensor([-1, 3 * size, 2**40])])
    rows = torch.cat([torch.from_numpy(x), torch.ones(3, 512)])
    tersekv.mla_append(rows, None, layer, slots)
    buffer = torch.empty(0, dtype=torch.uint8).set_(layer.ckv.untyped_storage()).view(3, -1)
    assert buffer.shape[1] == {"fp8_v4": -(-584 * size // 576) * 576, "fp8_v41": 528 * size}[format]
    want = page_of(format, x)
    assert (buffer[1].numpy() == want).all()
    assert not buffer[[0, 2]].any()


@pytest.mark.parametrize("format", FORMATS)
def test_any_exponent_is_read_and_255_is_nan(format):
    layer = tersekv.PagedLatentCache.allocate(1, 1, 64, format=format)[0]
    tersekv.mla_append(torch.randn(64, 512), None, layer, torch.arange(64))
    layer.ckv_scale_cache[:3, :, :7] = torch.tensor([0, 1, 60, 127, 130, 131, 132], dtype=torch.uint8)
    layer.ckv_scale_cache[0, 9] = 255
    codes = layer.ckv.view(torch.uint8)[0]
    end = 448 if format == "fp8_v4" else 512
    s = 2.0 ** (layer.ckv_scale_cache[0].double() - 127)
    s = s.repeat_interleave(64 if format == "fp8_v4" else 32, -1)[:, :end]
    x = torch.cat([codes[:, :end].contiguous().view(torch.float8_e4m3fn).double() * s,
                   codes[:, end:].reshape(-1).view(torch.bfloat16).reshape(64, -1).double()], -1)  # fmt: skip
    one = torch.arange(64)[:, None]
    out = tersekv.mla_decode(torch.randn(64, 2, 512), layer, None, None, indices=one, softmax_scale=0.0)
    keep = torch.arange(64) != 9
    torch.testing.assert_close(out[keep][:, 0].double(), x[keep], rtol=1e-6, atol=0)
    assert out[9].isnan().any()
    two = tersekv.mla_decode(
        torch.zeros(1, 2, 512), layer, None, None, indices=torch.tensor([[8, -1]]), softmax_scale=0.0
    )
    assert two.isfinite().all()


def test_engines_pages_are_viewed_as_they_lie():
    """[P, S, 1, 584], whose pages lie 37440 bytes apart and whose tokens' bytes are not together."""
    cache = tersekv.PagedLatentCache.allocate(1, 5, 64, format="fp8_v4")
    tersekv.mla_append(torch.randn(320, 512), None, cache[0], torch.arange(320))
    buffer = torch.empty(0, dtype=torch.uint8).set_(cache[0].ckv.untyped_storage()).view(5, 37440)
    pages = buffer.as_strided((5, 64, 1, 584), (37440, 584, 584, 1))
    layer = tersekv.PagedLatentLayer.of(pages, format="fp8_v4")
    assert torch.equal(layer.ckv, cache[0].ckv)
    assert torch.equal(layer.ckv_scale_cache, cache[0].ckv_scale_cache)
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim, cache.bytes_per_token) == (512, 0, 584)
    assert tersekv.latent_bytes_per_token("fp8_v41") == 528
    restored = tersekv.PagedLatentCache.allocate(1, 5, 64, format="fp8_v4")
    tersekv.import_pages(restored, [3, 1], tersekv.export_pages(cache, [0, 4]))
    assert torch.equal(restored[0].ckv[[3, 1]], cache[0].ckv[[0, 4]])
    assert torch.equal(restored[0].ckv_scale_cache[[3, 1]], cache[0].ckv_scale_cache[[0, 4]])


def cached(format="fp8_v4", **options):
    return tersekv.PagedLatentCache.allocate(1, 2, 64, format=format, **options)[0]


U8 = torch.uint8
WRONG = [
    (lambda: cached(qk_rope_head_dim=64),
     "qk_rope_head_dim: want 0 for fp8_v4, whose rows have no rotary part, got 64"),
    (lambda: cached(kv_lora_rank=500), "kv_lora_rank: want a positive multiple of 64 for fp8_v4, got 500"),
    (lambda: tersekv.PagedLatentLayer.of(torch.zeros(1, 2, 656, dtype=U8), format="fp8_v4"),
     "cache: want uint8 pages [P, S, 584] for fp8_v4, got [1, 2, 656] torch.uint8"),
    (lambda: tersekv.PagedLatentLayer.of(torch.zeros(1, 2, 600, dtype=U8)[..., :584], format="fp8_v4"),
     "cache: want the bytes of a page without gaps, got strides [1200, 600, 1]"),
    (lambda: tersekv.PagedLatentLayer.of(torch.zeros(1, 2, 656, dtype=U8), format="fp8_v41"),
     "cache: want uint8 rows of 528 bytes for fp8_v41, got [1, 2, 656] torch.uint8"),
    (lambda: tersekv.mla_append(torch.zeros(1, 512), torch.zeros(1, 64), cached(), torch.tensor([0])),
     "k_pe: want a rotary size of 0 as in kpe [2, 64, 0], got 64"),
    (lambda: tersekv.mla_append(torch.zeros(1, 576), None, cached(), torch.tensor([0])),
     "kv_c: want a latent rank of 512 as in ckv [2, 64, 576], got 576"),
    (lambda: tersekv.mla_decode(torch.zeros(1, 1, 576), cached(), torch.zeros(1, 1, dtype=torch.int32),
                                torch.tensor([1]), softmax_scale=1.0), "q: want [T, H, 512 + 0], got [1, 1, 576]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else "")
def test_what_does_not_fit_is_said(call, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        call()


@pytest.mark.parametrize("op", ["mla_prefill", "mla_decode_branch"])
def test_projected_calls_refuse_them(op):
    call = make.make(Case(op, "bf16", "x", heads=1, group=4, rope=0, dim_v=128, lens=(37, 5)))
    rows = cached()
    call = call._replace(format="fp8_v4", ckv=rows.ckv, kpe=rows.kpe, ckv_scale_cache=rows.ckv_scale_cache)
    with pytest.raises(ValueError, match="cache: want a format other than fp8_v4"):
        plan.plan(op, call)


@pytest.mark.parametrize("format", FORMATS)
def test_who_runs_them(format):
    call = make.make(Case("mla_decode", format, "x", heads=1, group=64, page=64, rope=0))
    with pytest.raises(tersekv.UnsupportedError, match=f"gluon: has no {format}"):
        plan.plan("mla_decode", call, "gluon", arch=90)
    assert plan.plan("mla_decode", call, arch=90).backend == "triton"
