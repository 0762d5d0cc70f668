"""What append stores, computed slowly and independently of the library: NumPy, and a search over every code.

Only the law is shared with the library: no function, no table and no tensor operation of it is used here.
"""

from __future__ import annotations

import math

import numpy as np
import torch

F32 = np.float32


def minifloat(exponent_bits: int, mantissa_bits: int, bias: int, largest: float) -> np.ndarray:
    """Value of every non-negative finite code, from the definition of a small float."""
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        e, m = divmod(code, 2**mantissa_bits)
        fraction = m / 2**mantissa_bits
        value = fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias)
        if value > largest:
            break
        values.append(value)
    return np.array(values)


E4M3 = minifloat(4, 3, 7, 448)
E5M2 = minifloat(5, 2, 15, 57344)
E2M1 = minifloat(2, 1, 1, 6)
FP8 = {"fp8_e4m3": E4M3, "fp8_e5m2": E5M2}


def nearest(x: np.ndarray, values: np.ndarray, nan_code: int) -> np.ndarray:
    """The code of the nearest value by trying them all: ties to the even code, saturating, sign in the next bit."""
    a = np.fmin(np.abs(x), F32(values[-1])).astype(np.float64)
    distance = np.abs(a[..., None] - values)
    closest = distance == distance.min(-1, keepdims=True)
    odd = np.arange(len(values)) % 2
    code = np.where(closest, odd, 2).argmin(-1)
    sign_bit = 1 << math.ceil(math.log2(len(values)))
    code = code + sign_bit * np.signbit(x)
    return np.where(np.isnan(x), nan_code, code).astype(np.uint8)


def bf16_bits(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, F32).view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


def cast_bytes(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """fp32 [..., D] → the bytes [..., D * itemsize] of a cast to nearest even, saturating for fp8."""
    with np.errstate(all="ignore"):
        if dtype == torch.bfloat16:
            out = bf16_bits(x)
        elif dtype == torch.float16:
            out = np.where(np.isnan(x), F32(np.nan), x).astype(np.float16)
        elif dtype == torch.float32:
            out = x.astype(F32)
        else:
            out = nearest(x, E4M3 if dtype == torch.float8_e4m3fn else E5M2, 0x7F)
    return np.ascontiguousarray(out).view(np.uint8)


def rows(x: np.ndarray, format: str, multiplier=1.0, global_scale=None) -> tuple[np.ndarray, np.ndarray | None]:
    """fp32 rows [..., D] → (bytes of the codes [..., n], bytes of the scales [..., m] or None)."""
    x = x.astype(F32)
    m = np.asarray(multiplier, F32)
    with np.errstate(all="ignore"):
        if format in ("bf16", "fp16"):
            return cast_bytes(x, torch.bfloat16 if format == "bf16" else torch.float16), None
        if format in FP8:
            return nearest(x * m, FP8[format], 0x7F), None
        if format == "nvfp4":
            return _nvfp4(x, m, F32(1) / m if global_scale is None else np.asarray(global_scale, F32))
        if format == "fp8_ds_mla":
            return _ds_mla(x)
        if format == "int4_per_token_head":
            return _int4(x)
        largest = F32(448 if format == "fp8_per_token_head" else 127)
        scale = np.maximum(amax(x) / largest, F32(1e-6))
        y = x * (F32(1) / scale)[..., None]
        codes = nearest(y, E4M3, 0x7F) if format == "fp8_per_token_head" else half_away(y)
        return codes, np.ascontiguousarray(scale)[..., None].view(np.uint8)


def amax(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x), F32(0), np.abs(x)).max(-1)


def half_away(y: np.ndarray) -> np.ndarray:
    y = np.where(np.isnan(y), F32(0), np.clip(y, F32(-1000), F32(1000))).astype(np.float64)
    return np.clip(np.sign(y) * np.floor(np.abs(y) + 0.5), -128, 127).astype(np.int8).view(np.uint8)


def _nvfp4(x: np.ndarray, m: np.ndarray, g: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    blocks = x.reshape(*x.shape[:-1], x.shape[-1] // 16, 16)
    scale_codes = nearest(amax(blocks) / F32(6) * m, E4M3, 0x7F)
    scale = E4M3[scale_codes].astype(F32)
    codes = nearest(blocks * (F32(1) / (scale * g))[..., None], E2M1, 0)
    codes[scale == 0] = 0
    codes = codes.reshape(x.shape)
    return codes[..., 0::2] + 16 * codes[..., 1::2], scale_codes


def _int4(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes by trying all sixteen: the last one that u + ½ reaches."""
    known = np.where(np.isnan(x), F32(0), x)
    low, high = np.minimum(known.min(-1), F32(0)), np.maximum(known.max(-1), F32(0))
    scale = np.maximum((high - low) / F32(15), F32(1e-6))

    def reached(u: np.ndarray) -> np.ndarray:
        u = np.where(np.isnan(u), F32(0), u) + F32(0.5)
        return (u[..., None] >= np.arange(1, 16, dtype=F32)).sum(-1)

    zero = reached(-low / scale)
    y = x * (F32(1) / scale)[..., None]
    codes = reached(np.where(np.isnan(y), F32(0), y) + zero[..., None].astype(F32))
    stored = (scale.view(np.uint32) >> 4 << 4) + zero.astype(np.uint32)
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).astype(np.uint8), stored[..., None].view(np.uint8)


def _ds_mla(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // 128, 128)
    least = np.maximum(amax(groups) / F32(448), F32(1e-4))
    powers = np.array([2.0**e for e in range(-20, 128)] + [np.inf])
    scale = powers[(powers < least[..., None]).sum(-1)].astype(F32)
    codes = nearest(groups * (F32(1) / scale)[..., None], E4M3, 0x7F)
    return codes.reshape(x.shape), np.ascontiguousarray(scale).view(np.uint8)


def rotate(x: np.ndarray, cos: np.ndarray, sin: np.ndarray, interleaved: bool) -> np.ndarray:
    """x [..., R] fp32; cos, sin [R/2]: pair by pair, each product and the sum rounded to fp32."""
    r = x.shape[-1]
    out = np.empty_like(x, F32)
    with np.errstate(all="ignore"):
        for i in range(r // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + r // 2)
            out[..., a] = x[..., a] * cos[i] - x[..., b] * sin[i]
            out[..., b] = x[..., b] * cos[i] + x[..., a] * sin[i]
    return out


class Memory:
    """The raw bytes behind some tensors, all poisoned with 0xFF, and what they should become."""

    def __init__(self, *tensors: torch.Tensor | None) -> None:
        self._want: dict[int, np.ndarray] = {}
        self._raw: dict[int, torch.Tensor] = {}
        for t in tensors:
            if t is not None and t.untyped_storage().data_ptr() not in self._raw:
                raw = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())
                raw.fill_(0xFF)
                self._raw[t.untyped_storage().data_ptr()] = raw
                self._want[t.untyped_storage().data_ptr()] = raw.numpy().copy()

    def poke(self, t: torch.Tensor, index: tuple[int, ...], row: np.ndarray) -> None:
        """Expect `row`, bytes, at t[index]."""
        place = t.storage_offset() + sum(i * s for i, s in zip(index, t.stride()[: len(index)], strict=True))
        start = place * t.element_size()
        self._want[t.untyped_storage().data_ptr()][start : start + row.size] = row.reshape(-1)

    def check(self) -> None:
        for key, raw in self._raw.items():
            np.testing.assert_array_equal(raw.numpy(), self._want[key])


def poke_kv(memory: Memory, layer, k: np.ndarray, v: np.ndarray, slots: list[int], **scales: tuple) -> None:
    """Expect fp32 k [T, H, D] and v in the layer's slots, the last of equals; scales: (multiplier, global)."""
    for x, cache, scale_cache, name in (
        (k, layer.k, layer.k_scale_cache, "k_scale"),
        (v, layer.v, layer.v_scale_cache, "v_scale"),
    ):
        codes, stored = rows(x, layer.format, *scales.get(name, ()))
        size = cache.shape[1]
        for t, slot in enumerate(slots):
            if not 0 <= slot < cache.shape[0] * size:
                continue
            for h in range(x.shape[1]):
                memory.poke(cache, (slot // size, slot % size, h), codes[t, h])
                if stored is not None:
                    memory.poke(scale_cache, (slot // size, slot % size, h), stored[t, h])


def spicy(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, nan: bool = True) -> torch.Tensor:
    """Rows of every kind: ordinary, all zero, tiny, huge, on rounding ties, with −0, with ±inf, with NaNs."""
    flat = rng.standard_normal((math.prod(shape[:-1]), shape[-1])).astype(F32)
    for row in flat:
        kind = rng.integers(0, 10 if nan else 9)
        if kind == 0:
            row[:] = 0
        elif kind == 1:
            row *= F32(1e-7)
        elif kind == 2:
            row *= F32(5e4)
        elif kind == 3:  # ties of e2m1, e4m3 and int8 when the largest is a power of two times 6, 448 or 127
            row[:] = rng.integers(-448, 449, row.shape) / F32(4)
            row[0] = rng.choice([6, 12, 112, 127, 448])
        elif kind == 4:
            row[rng.integers(0, row.size)] = -0.0
        elif kind == 8:
            row[rng.integers(0, row.size)] = np.inf * rng.choice([-1, 1])
        elif kind == 9:
            row[rng.integers(0, row.size)] = np.copysign(F32(np.nan), rng.choice([-1, 1]))
    return torch.from_numpy(flat.reshape(shape)).to(dtype)


def fp32(x: torch.Tensor) -> np.ndarray:
    return x.to(torch.float32).numpy()
