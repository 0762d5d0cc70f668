"""Reference rotations and channel scales: appends in fp32, index by index; attentions by a dense matrix in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def row(x: Tensor, signs: Tensor | None, channel_scale: Tensor | None) -> Tensor:
    """Rows [T, H, D] as an append quantises them, one rounding an operation."""
    if signs is None and channel_scale is None:
        return x
    x = x.float().clone()
    if channel_scale is not None:
        x = x * (torch.tensor(1.0) / channel_scale)
    if signs is None:
        return x
    return _hadamard(x * _repeated(signs, x), len(signs))


def undone(x: Tensor, signs: Tensor | None) -> Tensor:
    """fp32 stored rows as they were before they were rotated, one rounding an operation."""
    return x if signs is None else _hadamard(x, len(signs)) * _repeated(signs, x)


def _repeated(signs: Tensor, x: Tensor) -> Tensor:
    return signs[torch.arange(x.shape[-1]) % len(signs)]


def _hadamard(x: Tensor, b: int) -> Tensor:
    at = torch.arange(x.shape[-1])
    for step in range(b.bit_length() - 1):
        partner, first = at ^ (1 << step), (at >> step & 1) == 0
        x = torch.where(first, x + x[..., partner], x[..., partner] - x)
    return x * torch.tensor(b, dtype=torch.float64).rsqrt().float()


def back(rows: Tensor, signs: Tensor | None, channel_scale: Tensor | None) -> Tensor:
    """fp64 stored rows [n, H, D] as they were before they were scaled and rotated."""
    if signs is not None:
        rows = rows @ _matrix(signs, rows.shape[-1]).T
    return rows if channel_scale is None else rows * channel_scale.double()


def together(q: Tensor, k: Tensor, signs: Tensor | None, channel_scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """fp64 queries [r, H, G, D] and keys [n, H, D] as they meet where keys lie scaled and rotated."""
    if channel_scale is not None:
        q, k = q * channel_scale.double()[:, None], k / channel_scale.double()
    if signs is not None:
        q, k = (x @ _matrix(signs, x.shape[-1]) for x in (q, k))
    return q, k


def _matrix(signs: Tensor, dim: int) -> Tensor:
    """R [dim, dim] of rows that are multiplied from the left: diag(signs) · H / sqrt(b), block by block."""
    b = len(signs)
    i = torch.arange(b, device=signs.device)
    common = i[:, None] & i
    ones = torch.stack([common >> bit & 1 for bit in range(b.bit_length())]).sum(0)
    sylvester = 1.0 - 2.0 * (ones % 2).double()
    block = signs.double()[:, None] * sylvester / b**0.5
    return torch.block_diag(*[block] * (dim // b))
