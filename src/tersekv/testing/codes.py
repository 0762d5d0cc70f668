"""Reference encoders and decoders of every cache format, by search in the list of representable values.

Plain, slow and independent: nothing here is shared with a backend, and no cast to an 8-bit type is trusted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..formats import (
    E4M3_MAX,
    INT4_MAX,
    INT8_MAX,
    LATENT_GROUP,
    MAX_LATENT_AMAX,
    MIN_LATENT_GROUP_SCALE,
    MIN_TOKEN_HEAD_SCALE,
    MIN_UE8M0_AMAX,
    KVFormat,
)
from .memory import as_bytes, put, take

HALF = (torch.bfloat16, torch.float16, torch.float32)
_FLOAT8 = {torch.float8_e4m3fn: (3, 7, 126), torch.float8_e5m2: (2, 15, 123)}  # mantissa bits, bias, largest code
_E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def encode(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp32 values as `dtype`: nearest, ties to even; 8-bit types saturate and have one NaN, 0x7F."""
    if dtype in HALF:
        return x.to(dtype)
    if dtype not in _FLOAT8:
        raise NotImplementedError(f"tersekv.testing.codes: no reference encoder of {dtype}")
    codes = _nearest(x, _magnitudes(dtype)) | (torch.signbit(x).to(torch.uint8) << 7)
    return torch.where(x.isnan(), 0x7F, codes).to(torch.uint8).view(dtype)


def decode(codes: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Stored codes as fp64."""
    dtype = dtype or codes.dtype
    if dtype in _FLOAT8:
        positive = _magnitudes(dtype)
        table = torch.full((256,), torch.nan, dtype=torch.float64)
        table[: len(positive)], table[128 : 128 + len(positive)] = positive, -positive
        return table[codes.contiguous().view(torch.uint8).int()]
    return codes.to(torch.float64)


def column(scale: Tensor | float) -> Tensor:
    """A scale in fp32, broadcastable to rows [..., H, D] or [..., D]."""
    t = torch.as_tensor(scale, dtype=torch.float32)
    return t[:, None] if t.dim() and len(t) > 1 else t


def encode_row(
    x: Tensor, f: KVFormat, scale: Tensor, inverse: Tensor | None = None, widen: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Codes [..., D] and stored scales (or None) of rows of values; rows of fp8 codes are what is stored.

    scale:    dequantising, a `column`; formats with neither a tensor's nor a global scale ignore it
    inverse:  the multiplier, where it is what the caller gave
    widen:    int4: the range of a row is widened to hold 0
    """
    if x.dtype in _FLOAT8:  # codes already
        return x, None
    x, one = x.float(), torch.tensor(1.0)
    inverse = one / scale if inverse is None else inverse
    if f.scale == "none":
        return encode(x, f.storage), None
    if f.scale == "tensor":
        return encode(x * inverse, f.storage), None
    if f.code == "int4":
        return _encode_int4(x, widen)
    if f.scale == "token_head":
        s = (_amax(x) / f.max_value).clamp(min=MIN_TOKEN_HEAD_SCALE)
        y = x * (one / s)
        return (_int8(y) if f.code == "int8" else encode(y, f.storage)), s[..., 0]
    if f.scale == "block":
        return _encode_nvfp4(x, f, scale, inverse)
    if f.scale == "ue8m0":
        return _encode_record(x, f)
    groups = x.unflatten(-1, (-1, LATENT_GROUP))
    s = torch.maximum(_amax(groups) / f.max_value, torch.tensor(MIN_LATENT_GROUP_SCALE))
    mantissa, exponent = torch.frexp(s)
    power = ((exponent - (mantissa == 0.5).int() + 127) << 23).view(torch.float32)  # 2^ceil(log2(s)), from its bits
    s = torch.where(s.isinf(), s, power)
    return encode(groups * (one / s), f.storage).flatten(-2), s[..., 0]


def write_rows(
    cache: Tensor,
    scale_cache: Tensor | None,
    pages: Tensor,
    slots: Tensor,
    x: Tensor,
    f: KVFormat,
    scale: Tensor,
    inverse: Tensor | None = None,
    widen: bool = True,
) -> None:
    """Encode rows and put them into a cache."""
    codes, stored = encode_row(x, f, scale, inverse, widen)
    put(cache, pages, slots, codes)
    if scale_cache is not None:
        assert stored is not None
        put(scale_cache, pages, slots, stored)


def read_rows(
    cache: Tensor, scale_cache: Tensor | None, pages: Tensor, slots: Tensor, f: KVFormat, scale: Tensor
) -> Tensor:
    """fp64 values of rows of a cache."""
    stored = None if scale_cache is None else take(scale_cache, pages, slots)
    return decode_row(take(cache, pages, slots), stored, f, scale)


def decode_row(codes: Tensor, stored: Tensor | None, f: KVFormat, scale: Tensor) -> Tensor:
    """fp64 values [..., D] of stored rows; `scale` as in `encode_row`."""
    pair = codes.view(torch.uint8).int() if f.values_per_element == 2 else torch.empty(0, dtype=torch.int32)
    both = torch.stack([pair & 15, pair >> 4], -1)
    if f.code == "int4":
        assert stored is not None
        zero = stored.contiguous().view(torch.int32).remainder(16)  # the four lowest bits, of a sign bit too
        return (both.flatten(-2) - zero[..., None]) * stored.double()[..., None]
    if f.scale == "block":
        assert stored is not None
        x = torch.cat([_E2M1, -_E2M1])[both].flatten(-2)
        s = decode(stored, f.scale_dtype).repeat_interleave(f.scale_block or 1, -1)
        return x * s * scale.double()
    if f.scale == "ue8m0":
        assert stored is not None
        return _decode_record(codes, stored, f)
    x = decode(codes, f.storage)
    if f.scale == "tensor":
        return x * scale.double()
    if f.scale == "token_head":
        assert stored is not None
        return x * stored.double()[..., None]
    if f.scale == "group":
        assert stored is not None
        return x * stored.double().repeat_interleave(LATENT_GROUP, -1)
    return x


def quantise_latents(x: Tensor) -> Tensor:
    """What MLA prefill's blockwise product sees of fp32 latents [T, L]: e4m3 codes times their scales, in fp64."""
    groups = x.float().unflatten(-1, (-1, LATENT_GROUP))
    s = _amax(groups).clamp(max=MAX_LATENT_AMAX) / E4M3_MAX
    codes = encode(torch.where(s == 0, 0.0, groups * (1.0 / s)), torch.float8_e4m3fn)
    return (decode(codes) * s.double()).flatten(-2)


def _encode_nvfp4(x: Tensor, f: KVFormat, global_scale: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    assert f.scale_dtype is not None
    blocks, one = x.unflatten(-1, (-1, f.scale_block or 1)), torch.tensor(1.0)
    stored = encode(_amax(blocks)[..., 0] / f.max_value * inverse, f.scale_dtype)
    s = decode(stored).float()
    y = torch.where(s[..., None] == 0, 0.0, blocks * (one / (s * global_scale))[..., None])
    codes = _nearest(y, _E2M1) | (torch.signbit(y).to(torch.uint8) << 3)
    codes = torch.where(y.isnan(), 0, codes).flatten(-2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), stored


def _encode_record(x: Tensor, f: KVFormat) -> tuple[Tensor, Tensor]:
    """Codes, those of a tail as bytes, and exponents + 127; the exponents from logarithms in fp64."""
    body, tail = x[..., : x.shape[-1] - f.tail], x[..., x.shape[-1] - f.tail :]
    groups = body.unflatten(-1, (-1, f.scale_block))
    size = (_amax(groups).clamp(min=MIN_UE8M0_AMAX) / f.max_value)[..., 0]  # rounded once, in fp32
    exponent = torch.frexp(size.double())  # 0.5 <= mantissa < 1
    power = torch.where(exponent.mantissa == 0.5, exponent.exponent - 1, exponent.exponent)
    stored = torch.where(size.isinf(), 255, power + 127).to(torch.uint8)
    s = torch.where(size.isinf(), torch.inf, 2.0 ** power.double()).float()
    codes = encode(groups * (1.0 / s)[..., None], torch.float8_e4m3fn).flatten(-2)
    whole = torch.zeros(*x.shape[:-1], f.scales(x.shape[-1]), dtype=torch.uint8)
    whole[..., : stored.shape[-1]] = stored
    if not f.tail:
        return codes, whole
    return torch.cat([codes.view(torch.uint8), as_bytes(encode(tail, torch.bfloat16)).flatten(-2)], -1), whole


def _decode_record(codes: Tensor, stored: Tensor, f: KVFormat) -> Tensor:
    """fp64 values of what `_encode_record` makes."""
    rows, blocks = codes.contiguous().view(torch.uint8), stored.double()
    end = rows.shape[-1] - 2 * f.tail
    s = torch.where(stored == 255, torch.nan, 2.0 ** (blocks - 127)).repeat_interleave(f.scale_block or 1, -1)
    x = decode(rows[..., :end], torch.float8_e4m3fn) * s[..., :end]
    tail = rows[..., end:].reshape(-1).view(torch.bfloat16).reshape(*x.shape[:-1], f.tail)
    return torch.cat([x, decode(tail)], -1)


def _encode_int4(x: Tensor, widen: bool) -> tuple[Tensor, Tensor]:
    """Every step in fp64, where it is exact or rounds far behind fp32's last bit, then rounded to fp32; codes by search
    among the numbers at which they begin."""
    first = torch.arange(1, int(INT4_MAX) + 1, dtype=torch.float64)

    def code(u: Tensor) -> Tensor:
        return torch.searchsorted(first, (u.nan_to_num(nan=0.0) + 0.5).float().double().contiguous(), right=True)

    wide = x.double()
    order = torch.where(wide.isnan(), torch.inf, wide).sort(-1).values
    count = (~wide.isnan()).sum(-1, keepdim=True)
    low = order[..., 0]
    high = torch.where(count[..., 0] > 0, order.gather(-1, (count - 1).clamp(min=0))[..., 0], -torch.inf)
    if widen:
        low, high = torch.where(low < 0, low, 0.0), torch.where(high > 0, high, 0.0)
    s = ((high - low).float().double() / INT4_MAX).float()
    s = torch.where(s > MIN_TOKEN_HEAD_SCALE, s, MIN_TOKEN_HEAD_SCALE)
    zero = code((-low / s.double()).float().double())
    y = (wide * (1.0 / s.double()).float().double()[..., None]).float().double()
    codes = code((y.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf) + zero[..., None]).float().double())
    bits = s.view(torch.int32)
    stored = (bits - bits.remainder(16) + zero.int()).view(torch.float32)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8), stored


def _int8(y: Tensor) -> Tensor:
    """Nearest, halves away from zero; NaN: 0."""
    y = y.double().nan_to_num(nan=0.0)
    return (torch.sign(y) * torch.floor(y.abs() + 0.5)).clamp(-INT8_MAX - 1, INT8_MAX).to(torch.int8)


def _amax(x: Tensor) -> Tensor:
    """Largest magnitude of each row, NaN ignored: [..., n] → [..., 1]."""
    return torch.where(x.isnan(), 0.0, x.abs()).amax(-1, keepdim=True)


def _magnitudes(dtype: torch.dtype) -> Tensor:
    """The non-negative finite values, in the order of their codes, fp64."""
    bits, bias, largest = _FLOAT8[dtype]
    code = torch.arange(largest + 1)
    exponent, fraction = code >> bits, (code & ((1 << bits) - 1)).double() / (1 << bits)
    normal = (1 + fraction) * 2.0 ** (exponent - bias)
    return torch.where(exponent == 0, fraction * 2.0 ** (1 - bias), normal)


def _nearest(x: Tensor, magnitudes: Tensor) -> Tensor:
    """Code of the magnitude nearest to |x|, ties to the even code, saturating."""
    size = x.double().abs().contiguous()
    middles = (magnitudes[1:] + magnitudes[:-1]) / 2
    below = torch.searchsorted(middles, size)  # middles smaller than |x|
    tie = middles[below.clamp(max=len(middles) - 1)] == size
    return (below + (tie & (below % 2 == 1)).long()).to(torch.uint8)
