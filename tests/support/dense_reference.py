"""Attention over a paged cache, computed slowly and independently of the library: everything is dequantised through
tables made from the definition of each format, then a plain softmax in fp64, row by row.
"""

from __future__ import annotations

import math

import torch

F64 = torch.float64


def small_float(exponent_bits: int, mantissa_bits: int, bias: int, ieee: bool) -> torch.Tensor:
    """Value of each code in fp64. With `ieee` the largest exponent means inf and NaN."""
    values = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        e, m = divmod(code, 2**mantissa_bits)
        fraction = m / 2**mantissa_bits
        value = fraction * 2.0 ** (1 - bias) if e == 0 else (1 + fraction) * 2.0 ** (e - bias)
        if ieee and e == 2**exponent_bits - 1:
            value = math.nan if m else math.inf
        values.append(value)
    return torch.tensor(values, dtype=F64)


def with_sign(magnitudes: torch.Tensor) -> torch.Tensor:
    return torch.cat([magnitudes, -magnitudes])


E4M3 = small_float(4, 3, 7, ieee=False)
E4M3[-1] = math.nan
E4M3 = with_sign(E4M3)
E5M2 = with_sign(small_float(5, 2, 15, ieee=True))
E2M1 = with_sign(small_float(2, 1, 1, ieee=False))
TABLES = {torch.float8_e4m3fn: E4M3, torch.float8_e5m2: E5M2}


FOUR_BITS = {"e2m1": E2M1, "int4": torch.arange(16, dtype=F64)}


def values(codes: torch.Tensor, code: str = "") -> torch.Tensor:
    """Codes → fp64. Two of 4 bits lie in a byte, low nibble first; others are numbers of their dtype."""
    if code in FOUR_BITS:
        return FOUR_BITS[code][torch.stack([codes & 15, codes >> 4], -1).long()].flatten(-2)
    if codes.dtype in TABLES:
        return TABLES[codes.dtype][codes.view(torch.uint8).long()]
    return codes.to(F64)


def per_head(scale) -> torch.Tensor:
    """A scale as it multiplies [P, S, H, D]."""
    return torch.as_tensor(scale, dtype=F64).reshape(-1, 1)


def dequantise(layer) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a PagedKVLayer in fp64: [P, S, H, D], [P, S, H, Dv]; rotated rows are turned back."""
    sides = []
    for format, codes, stored, scale, signs in (
        (layer.formats[0], layer.k, layer.k_scale_cache, layer.k_scale, layer.k_signs),
        (layer.formats[1], layer.v, layer.v_scale_cache, layer.v_scale, layer.v_signs),
    ):
        x = values(codes, {"nvfp4": "e2m1", "int4_per_token_head": "int4"}.get(format, "")) * per_head(scale)
        if stored is not None:
            s = values(stored)
            if format == "int4_per_token_head":
                x = x - (stored.contiguous().view(torch.int32) & 15)[..., None]
            x = x * (s.repeat_interleave(16, -1) if format == "nvfp4" else s[..., None])
        sides.append(x if signs is None else (x.unflatten(-1, (-1, len(signs))) @ rotation(signs).T).flatten(-2))
    return sides[0], sides[1]


def rotation(signs: torch.Tensor) -> torch.Tensor:
    """diag(signs) · H / sqrt(b) in fp64, H Sylvester's matrix: −1 to the number of bits that row and column share."""
    b = len(signs)
    h = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(b)] for i in range(b)], dtype=F64)
    return signs.to(F64)[:, None] * h / math.sqrt(b)


def dequantise_latent(layer) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents [P, S, L] and rotary parts [P, S, R] of a PagedLatentLayer in fp64."""
    ckv, kpe = values(layer.ckv), values(layer.kpe)
    if layer.ckv_scale_cache is not None:
        return ckv * layer.ckv_scale_cache.to(F64).repeat_interleave(128, -1), kpe
    scale = torch.as_tensor(layer.kv_scale, dtype=F64)
    return ckv * scale, kpe * scale


def sees(row: int, drafts: int, key: int, length: int, window: int | None, mask_row) -> bool:
    """Whether draft `row` of `drafts` sees a key of a request of `length` tokens."""
    first = length - drafts
    position = first + row
    if window is not None and key <= position - window:
        return False
    if mask_row is None:
        return key <= position
    if key < first:
        return True
    word, bit = divmod(key - first, 16)
    return bool(int(mask_row[word]) >> bit & 1)


def attention(
    q, k, v, page_table, seq_lens, *,
    softmax_scale, window=None, softcap=0.0, sinks=None, mask=None, cu_seqlens_q=None,
):  # fmt: skip
    """out [T, Hq, Dv] and lse [T, Hq] in fp64.

    q: [T, Hq, D] fp64; k, v: [P, S, H, D], [P, S, H, Dv] fp64; tables and lengths: nested lists of numbers
    """
    t, hq, _ = q.shape
    size, h = k.shape[1:3]
    out = torch.zeros(t, hq, v.shape[-1], dtype=F64)
    lse = torch.full((t, hq), -math.inf, dtype=F64)
    b = len(seq_lens)
    cu = cu_seqlens_q or [i * (t // b) for i in range(b + 1)] if b else [0]
    for i, n in enumerate(seq_lens):
        for row in range(cu[i + 1] - cu[i]):
            r = cu[i] + row
            mask_row = None if mask is None else mask[r].tolist()
            keys = [j for j in range(n) if sees(row, cu[i + 1] - cu[i], j, n, window, mask_row)]
            if not keys:
                continue
            pages = torch.tensor([page_table[i][j // size] for j in keys])
            slots = torch.tensor([j % size for j in keys])
            for head in range(hq):
                at = pages, slots, head // (hq // h)
                s = k[at] @ q[r, head] * softmax_scale
                if softcap:
                    s = softcap * torch.tanh(s / softcap)
                extra = s.new_empty(0) if sinks is None else sinks[head].to(F64)[None]
                lse[r, head] = torch.logsumexp(torch.cat([s, extra]), 0)
                out[r, head] = (s - lse[r, head]).exp() @ v[at]
    return out, lse


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative norm of the difference, in fp64."""
    got, want = got.to(F64), want.to(F64)
    norm = want.norm()
    return float((got - want).norm() / norm) if norm else float((got - want).norm())
