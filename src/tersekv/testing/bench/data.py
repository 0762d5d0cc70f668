"""Random caches, page tables in random order, and the fp64 values of stored rows; all on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ...formats import BLOCK, E4M3_MAX, GROUP, LATENT_GROUP, MAX_LATENT_AMAX, TOKEN_HEAD, ZERO_POINT, KVFormat
from ..memory import as_bytes, storage_bytes, take
from .cases import Case

# Bytes to rotate over, so that no cache of the chip holds what is read.
ROTATE = {"cuda": 400e6, "cpu": 64e6}
_CHUNK = 1 << 26  # elements filled at a time
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Problem(Protocol):
    """A case on a device. Each of `calls` does the same work on other memory; the first is the one that is judged."""

    case: Case
    calls: list
    nbytes: int  # read and written by one call, at least
    flops: int
    limit: float  # largest `error` that is right
    peer_limit: float  # the same for other libraries, which may round elsewhere

    def poison(self) -> None:
        """Overwrite what the first call writes."""

    def error(self, result: Any) -> float:
        """How wrong what the first call wrote, or returned, is."""


class Rival(NamedTuple):
    """What another library has for a problem."""

    name: str
    build: Callable[[], list]  # makes the calls to time
    back: Callable[[Any], Any] | None = None  # from what a call returns to what is judged; None: the same
    limit: float | None = None  # largest error that is right; None: the problem's own for peers


def rotations(device: torch.device, nbytes: float, most: int = 128, held: int = 0) -> int:
    """Copies that exceed the chip's caches, where a call reads `nbytes` of each. held: bytes of each; half of a GPU's
    free memory holds all."""
    if held and device.type == "cuda":
        most = min(most, max(1, torch.cuda.mem_get_info(device)[0] // 2 // held))
    return min(most, max(1, math.ceil(ROTATE["cpu" if device.type == "cpu" else "cuda"] / max(nbytes, 1))))


def lengths(case: Case) -> Tensor:
    """[B] tokens of each request, on the CPU; the same in every run."""
    if not case.requests:
        return torch.tensor([case.total or case.tokens], dtype=torch.int32)
    if not case.uneven:
        return torch.full((case.requests,), case.tokens, dtype=torch.int32)
    random = torch.Generator().manual_seed(case.requests)
    return torch.randint(1, 2 * case.tokens + 1, (case.requests,), generator=random, dtype=torch.int32)


def page_tables(used: Tensor, copies: int, device: torch.device) -> Tensor:
    """[copies, B, max_pages] int32: distinct pages in random order; entries past a request's `used` [B] pages are 0."""
    each = int(used.sum())
    order = torch.randperm(copies * each, device=device).to(torch.int32).view(copies, each)
    # Each copy begins on a multiple of 16 bytes, as it would elsewhere: calls of several alignments have several plans.
    width = int(used.max())
    numbers = len(used) * width
    tables = torch.zeros(copies, -(-numbers // 4) * 4, dtype=torch.int32, device=device)
    tables = tables[:, :numbers].unflatten(1, (len(used), width))
    tables[:, (torch.arange(tables.shape[2]) < used[:, None]).to(device)] = order
    return tables


def fill(codes: Tensor, scales: Tensor | None, f: KVFormat) -> None:
    """Random codes, and stored scales that make values of about unit size."""
    for x in _parts(codes):
        if f.values_per_element == 2:
            x.random_(0, 256)
            continue
        noise = torch.randn(x.shape, device=x.device)
        spread = f.max_value / 4 if f.scale in (TOKEN_HEAD, GROUP) else 1.0
        if spread != 1.0:
            noise.mul_(spread).clamp_(-f.max_value, f.max_value)
        x.copy_(noise.round_() if f.code == "int8" else noise)
    if scales is not None:
        size = 4.0 / f.max_value if f.scale != BLOCK else 0.5
        for x in _parts(scales):
            x.copy_((torch.rand(x.shape, device=x.device) + 0.5) * size)
            if f.code == "int4":  # a range about 0: zero points of 7 or 8
                x.view(torch.int32).bitwise_and_(~ZERO_POINT).bitwise_or_(7).add_(torch.rand_like(x) < 0.5)


def _parts(x: Tensor) -> Iterator[Tensor]:
    step = max(1, _CHUNK // max(1, x[:1].numel()))
    for start in range(0, len(x), step):
        yield x[start : start + step]


def places(table: Tensor, n: int, page: int) -> tuple[Tensor, Tensor]:
    """Pages and slots of the first n tokens of a request."""
    token = torch.arange(n, device=table.device)
    return table.long()[token // page], token % page


def values(codes: Tensor, scales: Tensor | None, f: KVFormat, where: tuple[Tensor, Tensor]) -> Tensor:
    """fp64 rows at (pages, slots), stored scales applied."""
    x = take(codes, *where)
    if f.values_per_element == 2:
        of = [*_E2M1, *(-v for v in _E2M1)] if f.code == "e2m1" else range(16)
        table = torch.tensor(of, dtype=torch.float64, device=x.device)
        y = table[torch.stack([x & 15, x >> 4], -1).long()].flatten(-2)
    else:
        y = x.float().double()
    if scales is None:
        return y
    stored = take(scales, *where)
    if f.code == "int4":
        y = y - (stored.contiguous().view(torch.int32) & ZERO_POINT)[..., None]
    s = stored.float().double()
    if f.scale == TOKEN_HEAD:
        return y * s[..., None]
    return y * s.repeat_interleave(f.scale_block or 1, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """fp64 attention of one token: q [Hq, D], k [n, H, D], v [n, H, Dv] → [Hq, Dv]."""
    groups = q.double().unflatten(0, (k.shape[1], -1))
    p = (torch.einsum("hgd,nhd->hgn", groups, k) * scale).softmax(-1)
    return torch.einsum("hgn,nhd->hgd", p, v).flatten(0, 1)


def blockwise(*shape: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """e4m3 weights [..., N, K] and the scales of their blocks of 128 × 128; sums over K have about unit size."""
    *heads, n, k = shape
    weight = (torch.randn(*shape, device=device) * 100).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    scale = torch.rand(*heads, n // LATENT_GROUP, k // LATENT_GROUP, device=device) + 0.5
    return weight, scale / (100 * k**0.5)


def dense(weight: Tensor, scale: Tensor) -> Tensor:
    """The same in fp64."""
    blocks = scale.double().repeat_interleave(LATENT_GROUP, -2).repeat_interleave(LATENT_GROUP, -1)
    return weight.float().double() * blocks


def quantised(latent: Tensor) -> Tensor:
    """What a blockwise product sees of rows [..., K], in fp64."""
    groups = latent.float().unflatten(-1, (-1, LATENT_GROUP))
    # NOTE: by a tensor: on CUDA PyTorch divides by a number through its rounded reciprocal, and ties then flip codes.
    scale = groups.abs().amax(-1, keepdim=True).clamp(max=MAX_LATENT_AMAX) / groups.new_full((), E4M3_MAX)
    scaled = torch.where(scale == 0, 0.0, groups * (1.0 / scale)).clamp(-E4M3_MAX, E4M3_MAX)
    return (scaled.to(torch.float8_e4m3fn).float().double() * scale.double()).flatten(-2)


def freqs_cis(tokens: int, rotary: int, device: torch.device) -> Tensor:
    """[tokens, R] fp32: cos0, sin0, cos1, sin1, …"""
    steps = 10000.0 ** -(torch.arange(0, rotary, 2, device=device) / rotary)
    angle = torch.arange(tokens, device=device)[:, None] * steps
    return torch.stack([angle.cos(), angle.sin()], -1).flatten(1)


def rotated(x: Tensor, freqs: Tensor) -> Tensor:
    """Interleaved pairs of [T, (H,) R] in fp64, by freqs [T, R]."""
    cos, sin = freqs.double().unflatten(-1, (-1, 2)).unbind(-1)
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def relative(got: Tensor, want: Tensor) -> float:
    """‖got − want‖ / ‖want‖; inf where `got` is not finite."""
    error = float((got.double() - want).norm() / want.norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


def differing(got: Tensor, want: Tensor) -> float:
    """Share of elements whose bytes differ."""
    return float((as_bytes(got) != as_bytes(want)).any(-1).double().mean()) if got.numel() else 0.0


def poison(x: Tensor | None) -> None:
    """Overwrite the memory of a tensor, neighbours included, with 0xFF: NaN in every float."""
    if x is not None:
        storage_bytes(x).fill_(0xFF)
