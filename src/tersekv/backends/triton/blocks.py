"""How the write side cuts rows into programs, and what its kernels are told about strides and places (host side)."""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from types import SimpleNamespace
from typing import Any

import torch

from . import launch

# Elements of one program of 4 warps. Large ones keep 64 bytes of loads in flight per thread, and are few enough for the
# rate at which a chip starts programs (about one a nanosecond); small ones spread few tokens over the chip.
LARGE, SMALL = 4096, 1024
MIN_LARGE_PROGRAMS = 512  # with fewer, programs are small
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}


def columns(dim: int, fmt: str = "") -> int:
    """Columns of a tile that holds rows of `dim` values; the formats with blocks need whole blocks."""
    return max(launch.next_power_of_2(dim), {"nvfp4": 16, "fp8_ds_mla": 128}.get(fmt, 1))


def program_elements(total: int) -> int:
    """Elements of a program, for `total` elements of all rows."""
    return LARGE if total >= MIN_LARGE_PROGRAMS * LARGE else SMALL


class Part:
    """Rows [tokens, heads] of one tensor, cut into programs of `rows` rows, a power of two.

    Rows of one token share its position and place, so a divisor of `heads` is taken if it is not much smaller.
    Rotated keys get half the elements: with pairs, cos and sin they take twice the registers, which all programs of the
    launch would pay for.
    """

    def __init__(self, tokens: int, heads: int, columns: int, elements: int, *, rotated_keys: bool = False) -> None:
        total = tokens * heads
        elements = elements // 2 if rotated_keys else elements
        rows = min(max(elements // columns, 1), launch.next_power_of_2(total))
        common = heads & -heads if heads else 1
        self.rows = common if rows // 2 <= common < rows else rows
        self.programs = -(-total // self.rows)


def ends(*parts: Part) -> tuple[int, ...]:
    """The first program after each part, when they follow one another."""
    return tuple(accumulate(p.programs for p in parts))


def unit(*tensors: Any) -> int:
    """The largest power of two, up to 16, that divides every stride of these tensor facts but the last."""
    return gcd(16, *[s for t in tensors if t is not None for s in t.stride[:-1]])


def strides(t: Any, n: int, unit: int = 1) -> tuple[int, ...]:
    """The first n strides of a tensor fact that is not its last, counted in units; zeros where it has fewer."""
    return (0,) * n if t is None else tuple(s // unit for s in (*t.stride[: len(t.shape) - 1], *(0,) * n)[:n])


def scale_strides(t: Any) -> tuple[int, int, int]:
    """Strides of page, slot and head of a cache of stored scales."""
    return (0, 0, 0) if t is None else t.stride[:3]


def place_sizes(f: SimpleNamespace, num_pages: int) -> tuple[int, int, int]:
    """num_pages, num_requests, num_indices."""
    if f.kv_indptr is None:
        return num_pages, 0, 0
    return num_pages, f.kv_indptr.shape[0] - 1, f.kv_indices.shape[0]


def per_head(scale: Any) -> bool:
    """A scale tensor has an entry for each head."""
    return scale is not None and scale.shape[0] > 1


def query_sizes(f: SimpleNamespace) -> tuple[int, int]:
    """(query heads, size of the part of their rows that is not rotated), 0 where there is none."""
    q = f.q_rope or f.q_nope
    return (q.shape[1] if q else 0), (f.q_nope.shape[2] if f.q_nope else 0)


def query_kind(f: SimpleNamespace) -> str:
    """KIND of `quant.cast` for the query."""
    out = f.q_rope_out or f.q_nope_out
    return _KINDS.get(out.dtype, "float") if out else "float"


_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
