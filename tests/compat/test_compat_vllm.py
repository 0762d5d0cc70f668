"""tersekv.compat.vllm: vLLM's cache writers, byte for byte against loops written from the specification."""

import inspect
from enum import IntEnum

import numpy as np
import pytest
import torch
from compat_reference import BF16, E4M3, E5M2, F32, FP16, cast, poisoned, raw
from torch.fx.experimental.proxy_tensor import make_fx

from tersekv.compat import vllm
from tersekv.compat._vllm_rotation import rotated

REQUIRED = inspect.Parameter.empty
P, S = 5, 4
SLOTS = [17, 3, -1, 0, 19, 8]  # unsorted pages, one padding token
T = len(SLOTS)


SIGNATURES = {
    "triton_reshape_and_cache_flash_per_token_head_quant": [
        *[(n, REQUIRED) for n in ("key", "value", "key_cache", "value_cache", "k_scale_cache", "v_scale_cache")],
        ("slot_mapping", REQUIRED),
        ("kv_quant_mode", None),
    ],
    "reshape_and_cache_flash": [
        *[(n, REQUIRED) for n in ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype")],
        *[(n, REQUIRED) for n in ("k_scale", "v_scale")],
    ],
    "concat_and_cache_mla": [
        (n, REQUIRED) for n in ("kv_c", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "scale")
    ],
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_are_vllms(name):
    parameters = inspect.signature(getattr(vllm, name)).parameters.values()
    assert [(p.name, p.default) for p in parameters] == SIGNATURES[name]


def test_everything_public_is_covered_here():
    indexer = {
        "indexer_k_quant_and_cache",
        "cp_gather_indexer_k_quant_cache",
        "top_k_per_row_decode",
        "top_k_per_row_prefill",
    }
    assert set(vllm.__all__) == set(SIGNATURES) | indexer  # of the latter: test_compat_vllm_indexer.py


def rows(dtype, d=16, h=3, n=T):
    x = torch.randn(n, h, d) * torch.logspace(-3, 3, n)[:, None, None]
    x[1, 0] = 0.0  # a zero row: scale 1e-6, codes 0
    return x.to(dtype)


def slots(values=SLOTS, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype)


def per_token_head(row, stored):
    """(codes, scale) of one row [D] fp32."""
    limit = 127.0 if stored == torch.int8 else 448.0
    scale = torch.maximum(row.abs().max() / torch.tensor(limit), torch.tensor(1e-6))
    y = row * (torch.tensor(1.0) / scale)
    if stored == torch.int8:
        half_away = torch.where(y < 0, -((y.double().abs() + 0.5).floor()), (y.double().abs() + 0.5).floor())
        return half_away.clamp(-128, 127).to(torch.int8), scale
    return cast(y, stored), scale


def expect_per_token_head(x, cache, scales, given_slots=SLOTS):
    codes = raw(cache).clone().view(cache.shape)
    scales = scales.clone()
    for t, slot in enumerate(given_slots):
        for h in range(x.shape[1] if slot >= 0 else 0):
            c, s = per_token_head(x[t, h].float(), cache.dtype)
            codes[slot // S, slot % S, h], scales[slot // S, slot % S, h] = raw(c), s
    return codes, scales


def same(cache, codes, scale_cache, scales):
    assert torch.equal(raw(cache), codes)
    assert torch.equal(raw(scale_cache), raw(scales))


def packed_pages(stored, d, dv, h, hnd):
    """vLLM's page: per head [K codes | K scale | V codes | V scale], as four strided views of one buffer."""
    inner = (h, S) if hnd else (S, h)
    page = torch.full((P, *inner, d + 4 + dv + 4), 0xFF, dtype=torch.uint8)
    page = page.transpose(1, 2) if hnd else page
    cut = [page[..., a:b] for a, b in ((0, d + 4), (d, d + 4), (d + 4, d + 8 + dv), (d + 4 + dv, d + 8 + dv))]
    k, ks, v, vs = cut
    return page, k.view(stored), v.view(stored), ks.view(F32)[..., 0], vs.view(F32)[..., 0]


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(16, 16), (24, 8)])
@pytest.mark.parametrize("stored", [torch.int8, E4M3])
@pytest.mark.parametrize("dtype", [BF16, FP16, F32])
def test_per_token_head_rows_with_inline_scales(dtype, stored, d, dv, hnd):
    key, value = rows(dtype, d), rows(dtype, dv).flip(0)
    page, k, v, ks, vs = packed_pages(stored, d, dv, 3, hnd)
    want_k = expect_per_token_head(key, k[..., :d], ks)
    want_v = expect_per_token_head(value, v[..., :dv], vs)
    assert k.shape[-1] == d + 4  # the rows are longer than the head
    mapping = slots(dtype=torch.int32 if hnd else torch.int64)
    assert vllm.triton_reshape_and_cache_flash_per_token_head_quant(key, value, k, v, ks, vs, mapping) is None
    same(k[..., :d], want_k[0], ks, want_k[1])
    same(v[..., :dv], want_v[0], vs, want_v[1])
    live = {s for s in SLOTS if s >= 0}
    dead = [s for s in range(P * S) if s not in live]
    assert (page[[s // S for s in dead], [s % S for s in dead]] == 0xFF).all()


def test_int8_rounds_half_away_from_zero_and_zero_rows_get_the_floor():
    key = torch.zeros(2, 1, 8)
    key[0, 0] = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997])
    cache, scales = torch.zeros(1, S, 1, 8, dtype=torch.int8), torch.zeros(1, S, 1)
    vllm.triton_reshape_and_cache_flash_per_token_head_quant(
        key, key, cache, cache.clone(), scales, scales.clone(), slots([2, 1])
    )
    assert cache[0, 2, 0].tolist() == [127, 1, 2, 3, -1, -2, -3, 0]
    assert scales[0, :, 0].tolist() == [0.0, torch.tensor(1e-6).item(), 1.0, 0.0]
    assert not cache[0, 1].any()


def test_padded_rows_past_the_slots_are_not_read():
    key, value = rows(BF16, n=T + 3), rows(BF16, n=T + 3)
    key[T:], value[T:] = float("nan"), float("nan")
    _, k, v, ks, vs = packed_pages(E4M3, 16, 16, 3, False)
    want = expect_per_token_head(key, k[..., :16], ks)
    vllm.triton_reshape_and_cache_flash_per_token_head_quant(key, value, k, v, ks, vs, slots())
    same(k[..., :16], want[0], ks, want[1])
    with pytest.raises(ValueError, match=r"^key: want at least 6 rows, one for each entry of slot_mapping"):
        vllm.triton_reshape_and_cache_flash_per_token_head_quant(key[:5], value, k, v, ks, vs, slots())


def test_strided_keys_and_scales_of_their_own():
    fused = rows(BF16, 16, 8)
    key, value = fused[:, ::4], fused[:, 1::4]
    caches = [poisoned(P, S, 2, 16, dtype=torch.int8) for _ in range(2)]
    scales = [poisoned(P, S, 2, 2, dtype=F32)[..., i] for i in range(2)]
    want = [expect_per_token_head(x, c, s) for x, c, s in zip((key, value), caches, scales, strict=True)]
    vllm.triton_reshape_and_cache_flash_per_token_head_quant(key, value, *caches, *scales, slots())
    for c, s, w in zip(caches, scales, want, strict=True):
        same(c, w[0], s, w[1])


class KVQuantMode(IntEnum):
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4


def test_an_eighth_argument_is_accepted_if_it_says_what_the_cache_says():
    key = rows(BF16)
    cache, scales = torch.zeros(P, S, 3, 16, dtype=torch.int8), torch.zeros(P, S, 3)
    call = (key, key, cache, cache.clone(), scales, scales.clone(), slots())
    vllm.triton_reshape_and_cache_flash_per_token_head_quant(*call, KVQuantMode.INT8_PER_TOKEN_HEAD)
    assert cache.any()
    for mode in (2, np.int64(2), "int8_per_token_head"):
        vllm.triton_reshape_and_cache_flash_per_token_head_quant(*call, mode)
    for mode in (KVQuantMode.INT4_PER_TOKEN_HEAD, 4, KVQuantMode.FP8_PER_TOKEN_HEAD, 3, "fp8", True, torch.ones(2)):
        with pytest.raises(ValueError, match=r"^kv_quant_mode: want INT8_PER_TOKEN_HEAD \(2\) beside a int8 cache"):
            vllm.triton_reshape_and_cache_flash_per_token_head_quant(*call, mode)


@pytest.mark.parametrize("stored", [BF16, E5M2, F32])
def test_other_cache_dtypes_raise_an_error_that_lists_the_supported_ones(stored):
    key, cache, scales = rows(BF16), torch.zeros(P, S, 3, 16, dtype=stored), torch.zeros(P, S, 3)
    with pytest.raises(ValueError, match=r"^key_cache: .*int8, float8_e4m3fn, uint8 .*got"):
        vllm.triton_reshape_and_cache_flash_per_token_head_quant(key, key, cache, cache, scales, scales, slots())


def hadamard(d):
    """Sylvester's matrix, entry by entry: −1 to the number of bits that row and column share."""
    return torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(d)] for i in range(d)])


def int4_row(row, d):
    """(bytes [D/2], bits of the scale) of one row [D], NumPy's fp32, each step rounded: rotated, rounded, quantised."""
    drawn = torch.bernoulli(torch.full((d,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9))
    x = (row.float() * (2 * drawn - 1)).numpy()
    away = 1
    while away < d:
        y = x.copy()
        for i in range(d):
            y[i] = x[i ^ away] - x[i] if i & away else x[i] + x[i ^ away]
        x, away = y, 2 * away
    x = torch.from_numpy(x).to(row.dtype).float().numpy()
    low, high, one = x.min(), x.max(), np.float32(1)
    s = max((high - low) / np.float32(15), np.float32(1e-6))

    def code(u):
        return int(min(max(np.trunc(u + np.float32(0.5) if u >= 0 else u - np.float32(0.5)), 0), 15))

    zero = code(-low / s)
    codes = [code(v * (one / s) + np.float32(zero)) for v in x]
    return [codes[i] + 16 * codes[i + 1] for i in range(0, d, 2)], int(s.view(np.int32)) & ~15 | zero


@pytest.mark.parametrize("hnd", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(16, 16), (32, 8)])
@pytest.mark.parametrize("dtype", [BF16, FP16, F32])
def test_int4_rows_are_vllms_bytes(dtype, d, dv, hnd):
    key, value = rows(dtype, d), rows(dtype, dv).flip(0)
    drawn = torch.bernoulli(torch.full((d,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9))
    key[0, 0] = (hadamard(d)[0] * (2 * drawn - 1)).to(dtype)  # rotated: all of it in one value
    key[0, 1] = ((10 + torch.arange(d) / d) @ hadamard(d) / d * (2 * drawn - 1)).to(dtype)  # rotated: of one sign
    _, k, v, ks, vs = packed_pages(torch.uint8, d // 2, dv // 2, 3, hnd)
    mode = KVQuantMode.INT4_PER_TOKEN_HEAD
    vllm.triton_reshape_and_cache_flash_per_token_head_quant(key, value, k, v, ks, vs, slots(), mode)
    for x, cache, scales, width in ((key, k, ks, d), (value, v, vs, dv)):
        for t, slot in enumerate(SLOTS):
            for h in range(3 if slot >= 0 else 0):
                codes, bits = int4_row(x[t, h], width)
                assert cache[slot // S, slot % S, h, : width // 2].tolist() == codes
                assert int(scales[slot // S, slot % S, h].view(torch.int32)) == bits
    live = {s for s in SLOTS if s >= 0}
    dead = [s for s in range(P * S) if s not in live]
    assert (raw(k[[s // S for s in dead], [s % S for s in dead]]) == 0xFF).all()


def test_rows_rotated_in_a_traced_program_are_those_of_every_other_run():
    x = torch.randn(1, 1, 64, dtype=F32)
    traced = make_fx(lambda x: rotated("key", x), tracing_mode="fake")(x)
    want = rotated("key", x)
    assert [traced(x).equal(want) for _ in range(3)] == [True] * 3


def test_a_rotated_int4_row_of_one_sign_is_cut_off_as_in_vllm():
    x = torch.linspace(10, 11, 16)
    drawn = torch.bernoulli(torch.full((16,), 0.5), generator=torch.Generator().manual_seed(0x9E3779B9))
    key = (x @ hadamard(16) / 16 * (2 * drawn - 1)).view(1, 1, 16)
    cache, scales = torch.zeros(1, S, 1, 8, dtype=torch.uint8), torch.zeros(1, S, 1)
    vllm.triton_reshape_and_cache_flash_per_token_head_quant(
        key, key, cache, cache.clone(), scales, scales.clone(), slots([2]), 4
    )
    assert cache[0, 2, 0].tolist() == [0xFF] * 8
    assert int(scales[0, 2, 0].view(torch.int32)) & 15 == 0


def test_int4_wants_its_mode_said_and_heads_of_a_power_of_2():
    key, scales = rows(BF16), torch.zeros(P, S, 3)
    cache = torch.zeros(P, S, 3, 8, dtype=torch.uint8)
    call = (key, key, cache, cache.clone(), scales, scales.clone(), slots())
    for mode in (None, 2, KVQuantMode.FP8_PER_TOKEN_HEAD):
        with pytest.raises(
            ValueError, match=r"^kv_quant_mode: want INT4_PER_TOKEN_HEAD \(4\) beside a uint8 cache, got"
        ):
            vllm.triton_reshape_and_cache_flash_per_token_head_quant(*call, mode)
    for mode in (4, KVQuantMode.INT4_PER_TOKEN_HEAD, "int4_per_token_head"):
        vllm.triton_reshape_and_cache_flash_per_token_head_quant(*call, mode)
    assert cache.any()
    for dim in (24, 1024):
        odd = rows(BF16, dim)
        for name, pair in (("key", (odd, key)), ("value", (key, odd))):
            with pytest.raises(
                ValueError, match=rf"^{name}: want a head_dim that is a power of 2 up to 512 .*got {dim}$"
            ):
                vllm.triton_reshape_and_cache_flash_per_token_head_quant(*pair, *call[2:], 4)
    with pytest.raises(ValueError, match=r"^value_cache: want .*8 or more"):
        vllm.triton_reshape_and_cache_flash_per_token_head_quant(*call[:3], cache[..., :4], *call[4:], 4)


def test_no_tokens_is_no_work():
    key = rows(BF16)[:0]
    cache, scales = poisoned(P, S, 3, 16, dtype=E4M3), poisoned(P, S, 3, dtype=F32)
    vllm.triton_reshape_and_cache_flash_per_token_head_quant(key, key, cache, cache, scales, scales, slots([]))
    assert (raw(cache) == 0xFF).all()
    assert (raw(scales) == 0xFF).all()


BAD = {
    "value heads": ({"value": torch.zeros(T, 2, 16)}, ValueError, "value: "),
    "value dtype": ({"value": torch.zeros(T, 3, 16, dtype=FP16)}, ValueError, "value: "),
    "key rank": ({"key": torch.zeros(T, 48)}, ValueError, "key: "),
    "key dtype": ({"key": torch.zeros(T, 3, 16, dtype=torch.int32)}, ValueError, "key: "),
    "short cache rows": ({"key_cache": torch.zeros(P, S, 3, 8, dtype=E4M3)}, ValueError, "key_cache: "),
    "value cache dtype": ({"value_cache": torch.zeros(P, S, 3, 16, dtype=torch.int8)}, ValueError, "value_cache: "),
    "value pages": ({"value_cache": torch.zeros(P + 1, S, 3, 16, dtype=E4M3)}, ValueError, "value_cache: "),
    "scale shape": ({"k_scale_cache": torch.zeros(P, S, 2)}, ValueError, "k_scale_cache: "),
    "scale dtype": ({"v_scale_cache": torch.zeros(P, S, 3, dtype=BF16)}, ValueError, "v_scale_cache: "),
    "slot dtype": ({"slot_mapping": torch.zeros(T)}, ValueError, "slot_mapping: "),
    "slot rank": ({"slot_mapping": torch.zeros(T, 1, dtype=torch.int64)}, ValueError, "slot_mapping: "),
    "no tensor": ({"key": None}, TypeError, "key: "),
    "no scales": ({"k_scale_cache": None}, ValueError, "k_scale_cache: "),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_calls_name_the_callers_argument(case):
    change, error, start = BAD[case]
    call = {
        "key": torch.zeros(T, 3, 16),
        "value": torch.zeros(T, 3, 16),
        "key_cache": torch.zeros(P, S, 3, 16, dtype=E4M3),
        "value_cache": torch.zeros(P, S, 3, 16, dtype=E4M3),
        "k_scale_cache": torch.zeros(P, S, 3),
        "v_scale_cache": torch.zeros(P, S, 3),
        "slot_mapping": slots(),
    }
    with pytest.raises(error) as caught:
        vllm.triton_reshape_and_cache_flash_per_token_head_quant(**(call | change))
    assert str(caught.value).startswith(start)


# ---- reshape_and_cache_flash ----------------------------------------------------------------------------------------


def expect_rows(x, cache, multiplier=None):
    codes = raw(cache).clone().view(*cache.shape[:-1], -1)
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            row = x[t].float() if multiplier is None else x[t].float() * multiplier
            codes[slot // S, slot % S] = raw(cast(row, cache.dtype))
    return codes


@pytest.mark.parametrize("name", ["auto", "bfloat16", "float16", "half"])
def test_16_bit_caches_ignore_the_scales(name):
    dtype = FP16 if name in ("float16", "half") else BF16
    key, value = rows(dtype, 16).clamp(-6e4, 6e4), rows(dtype, 8).clamp(-6e4, 6e4)
    k, v = poisoned(P, S, 3, 16, dtype=dtype), poisoned(P, 3, S, 8, dtype=dtype).transpose(1, 2)
    want_k, want_v = expect_rows(key, k), expect_rows(value, v)
    scale = torch.tensor(3.0)
    assert vllm.reshape_and_cache_flash(key, value, k, v, slots(), name, scale, scale) is None
    assert torch.equal(raw(k).view(want_k.shape), want_k)
    assert torch.equal(raw(v).view(want_v.shape), want_v)


@pytest.mark.parametrize("as_uint8", [True, False])
@pytest.mark.parametrize(("name", "stored"), [("fp8", E4M3), ("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)])
@pytest.mark.parametrize("scales", ["floats", "0-d tensors", "1 element", "per head"])
def test_fp8_caches_as_vllm_hands_them_out(name, stored, as_uint8, scales):
    key, value = rows(BF16, n=T + 2), rows(BF16, n=T + 2).flip(0)  # padded
    both = poisoned(P, 2, S, 3, 20, dtype=stored)  # rows longer than the head
    k, v = both[:, 0], both[:, 1]
    ks, vs = torch.tensor([0.3, 0.7, 1.9]), torch.tensor([2.1, 0.01, 0.5])
    if scales != "per head":
        ks, vs = ks[:1], vs[:1]
    given = {"floats": (ks[0].item(), vs[0].item()), "0-d tensors": (ks[0], vs[0])}.get(scales, (ks, vs))
    one = torch.tensor(1.0)
    want_k = expect_rows(key, k[..., :16], (one / ks)[:, None])
    want_v = expect_rows(value, v[..., :16], (one / vs)[:, None])
    caches = (k.view(torch.uint8), v.view(torch.uint8)) if as_uint8 else (k, v)
    vllm.reshape_and_cache_flash(key, value, *caches, slots(), name, *given)
    assert torch.equal(raw(k[..., :16]), want_k)
    assert torch.equal(raw(v[..., :16]), want_v)
    assert (raw(both[..., 16:]) == 0xFF).all()


@pytest.mark.parametrize(
    ("name", "stored", "start"),
    [
        ("int8", torch.int8, "kv_cache_dtype: want one of auto, bfloat16, float16, half, fp8, fp8_e4m3, fp8_e5m2, got"),
        ("fp8_per_token_head", E4M3, "kv_cache_dtype: "),
        ("fp8", E5M2, "key_cache: want float8_e4m3fn or uint8"),
        ("fp8", BF16, "key_cache: "),
        ("auto", torch.uint8, "key_cache: want bfloat16 or float16"),
        ("float16", BF16, "key_cache: want float16"),
    ],
)
def test_cache_dtypes_that_do_not_fit_are_refused(name, stored, start):
    cache = torch.zeros(P, S, 3, 16, dtype=stored)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        vllm.reshape_and_cache_flash(rows(BF16), rows(BF16), cache, cache, slots(), name, 1.0, 1.0)
    assert str(caught.value).startswith(start)


def test_bad_flash_calls_name_the_callers_argument():
    key, cache = rows(BF16), torch.zeros(P, S, 3, 16, dtype=E4M3)
    with pytest.raises(ValueError, match=r"^value_cache: want float8_e4m3fn"):
        vllm.reshape_and_cache_flash(key, key, cache, cache.to(BF16), slots(), "fp8", 1.0, 1.0)
    with pytest.raises(ValueError, match=r"^v_scale: "):
        vllm.reshape_and_cache_flash(key, key, cache, cache.clone(), slots(), "fp8", 1.0, torch.ones(2))
    with pytest.raises(ValueError, match=r"^value: want at least 6 rows"):
        vllm.reshape_and_cache_flash(key, key[:4], cache, cache, slots(), "fp8", 1.0, 1.0)


# ---- concat_and_cache_mla -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "stored"), [("auto", BF16), ("auto", FP16), ("fp8", E4M3), ("fp8_e4m3", E4M3), ("fp8_e5m2", E5M2)]
)
def test_latent_rows_are_joined(name, stored):
    fp8 = stored.itemsize == 1
    kv_c, k_pe = (torch.randn(T + 2, d).to(BF16 if fp8 else stored) for d in (32, 8))
    cache = poisoned(P, S, 40, dtype=stored)
    scale = torch.tensor(0.3)
    multiplier = torch.tensor(1.0) / scale if fp8 else None
    want = expect_rows(torch.cat((kv_c, k_pe), -1), cache, multiplier)
    given = cache.view(torch.uint8) if fp8 else cache
    assert vllm.concat_and_cache_mla(kv_c, k_pe[:, None], given, slots(), name, scale) is None
    assert torch.equal(raw(cache).view(want.shape), want)


def test_656_byte_rows_have_power_of_two_group_scales_and_16_bit_rope():
    kv_c, k_pe = torch.randn(T, 512) * torch.logspace(-6, 3, T)[:, None], torch.randn(T, 64)
    kv_c[3, 128:256] = 0.0
    kv_c, k_pe = kv_c.to(BF16), k_pe.to(BF16)
    cache = torch.full((P, S, 656), 0xFF, dtype=torch.uint8)
    want = cache.clone()
    for t, slot in enumerate(SLOTS):
        if slot < 0:
            continue
        codes, scales = [], []
        for group in kv_c[t].float().split(128):
            floor = torch.maximum(group.abs().max() / torch.tensor(448.0), torch.tensor(1e-4)).item()
            scale = 2.0**-60
            while scale < floor:
                scale *= 2
            scales.append(scale)
            codes.append(cast(group * torch.tensor(1 / scale), E4M3))
        row = (raw(torch.cat([raw(c) for c in codes])), raw(torch.tensor(scales)), raw(k_pe[t]))
        want[slot // S, slot % S] = torch.cat(row)
    vllm.concat_and_cache_mla(kv_c, k_pe, cache, slots(), "fp8_ds_mla", torch.tensor(7.0))
    assert torch.equal(cache, want)


def test_bad_latent_calls_name_the_callers_argument():
    kv_c, k_pe, cache = torch.zeros(T, 32), torch.zeros(T, 8), torch.zeros(P, S, 40, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^kv_cache_dtype: want one of .*fp8_ds_mla, got 'nvfp4'"):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache, slots(), "nvfp4", 1.0)
    with pytest.raises(
        ValueError, match=r"^kv_cache: want rows of 40 bytes for 32 \(kv_c\) and 8 \(k_pe\) in fp8_e4m3"
    ):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache[..., :36], slots(), "fp8", 1.0)
    with pytest.raises(ValueError, match=r"^kv_cache: "):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache, slots(), "auto", 1.0)
    latents, rope, packed = torch.zeros(T, 512), torch.zeros(T, 64), torch.zeros(P, S, 656, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"^kv_cache: want rows of 392 bytes for 256 \(kv_c\) and 64 \(k_pe\)"):
        vllm.concat_and_cache_mla(latents[:, :256], rope, packed, slots(), "fp8_ds_mla", 1.0)
    with pytest.raises(ValueError, match=r"^kv_cache: want rows of 656 bytes for 512 .* got \[\d, \d, 576\] uint8$"):
        vllm.concat_and_cache_mla(latents, rope, packed[..., :576], slots(), "fp8_ds_mla", 1.0)
    with pytest.raises(ValueError, match=r"^kv_c: want a positive multiple of 128 for fp8_ds_mla, got 100$"):
        vllm.concat_and_cache_mla(latents[:, :100], rope, packed, slots(), "fp8_ds_mla", 1.0)
    with pytest.raises(ValueError, match=r"^k_pe: want at least 6 rows"):
        vllm.concat_and_cache_mla(kv_c, k_pe[:2], cache, slots(), "fp8", 1.0)
    with pytest.raises(ValueError, match=r"^scale: "):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache, slots(), "fp8", torch.ones(3))
    with pytest.raises(ValueError, match=r"^slot_mapping: "):
        vllm.concat_and_cache_mla(kv_c, k_pe, cache, torch.zeros(T), "fp8", 1.0)
    with pytest.raises(TypeError, match=r"^kv_c: want Tensor"):
        vllm.concat_and_cache_mla(None, k_pe, cache, slots(), "fp8", 1.0)


def test_sizes_of_0_are_named_as_vllm_names_them():
    half, none = torch.zeros(P, S, 3, 16, dtype=BF16), torch.zeros(2, 3, 0, dtype=BF16)
    with pytest.raises(ValueError, match=r"^head_dim of key: want a positive multiple of 1 for bf16, got 0$"):
        vllm.reshape_and_cache_flash(none, none, half, half.clone(), torch.arange(2), "auto", 1.0, 1.0)
    rows, empty = (torch.zeros(2, 512), torch.zeros(2, 64)), torch.zeros(P, 0, 576, dtype=BF16)
    with pytest.raises(ValueError, match=r"^kv_cache: want at least one slot a page, got 0$"):
        vllm.concat_and_cache_mla(*rows, empty, torch.arange(2), "auto", 1.0)
    flags = torch.zeros(P, S, 656, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"^kv_cache: want uint8 rows of 528 bytes .* got .* torch.bool$"):
        vllm.concat_and_cache_mla(*rows, flags, torch.arange(2), "fp8_ds_mla", 1.0)


@pytest.mark.parametrize("stored", [E4M3, E5M2])
def test_codes_of_an_fp8_cache_are_copied_whatever_the_scale(stored):
    """192 of the 256 codes, NaNs among them."""
    name = "fp8_e4m3" if stored == E4M3 else "fp8_e5m2"
    slots = torch.tensor(SLOTS)
    codes = torch.arange(80, 80 + T * 32).to(torch.uint8).view(T, 2, 16)
    caches = [torch.zeros(P, S, 2, 16, dtype=torch.uint8) for _ in range(2)]
    rows = [codes.view(stored), codes.flip(0).view(stored)]
    vllm.reshape_and_cache_flash(*rows, *caches, slots, name, 0.5, torch.tensor([0.25]))
    latents = torch.zeros(P, S, 32, dtype=torch.uint8)
    whole = codes.view(stored).view(T, 32)
    vllm.concat_and_cache_mla(whole[:, :24], whole[:, 24:], latents, slots, name, 0.5)
    for t, slot in enumerate(SLOTS):
        if slot >= 0:
            for cache, row in zip((*caches, latents), (codes[t], codes.flip(0)[t], codes[t].flatten()), strict=True):
                assert torch.equal(cache[slot // S, slot % S], row)
