"""How the write side cuts rows into programs, and what its kernels are told about strides and places (host side)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import gcd
from types import SimpleNamespace
from typing import Any

import torch

from ...formats import ALL_FORMATS, pair_of
from . import launch
from .record import Record

# Elements of a program of 4 warps: the most that leave MIN_PROGRAMS programs, so that few tokens spread over the chip.
# More of them keep more loads in flight per thread, and a chip starts only about one program a nanosecond; fewer take
# fewer registers. NVIDIA H200, 2026-11-21, 8 heads (rotated: 32 query heads), D 128, 16384 tokens, of 2048 and of 4096:
#   rows:     fp8 25.4, 25.5 us; per token and head 26.8, 25.8; nvfp4 26.8, 26.9 (2048 tokens: 4.5, 5.4)
#   rotated:  fp8 75.9, 77.6; per token and head 88.2, 82.1; nvfp4 105.0, 91.7; bf16 89.1, 86.3
# and of 1024 to 4096: 512 tokens of fp8 per token and head 2.27, 2.43, 2.83 us; 1024 tokens 3.95, 3.00, 3.25.
SIZES, SMALL = (4096, 2048), 1024
MOST = SIZES[0]
MOST_ROWS = {"fp8_e4m3": 2048, "fp8_e5m2": 2048, "nvfp4": 2048}
MOST_ROTATED = {"fp8_e4m3": 2048, "fp8_e5m2": 2048}
MIN_PROGRAMS = 1024
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_OVERLAPPING_GRAPHS = 12030  # the first CUDA driver whose graphs keep launches that overlap


def options(f: SimpleNamespace, warps: int = 4) -> dict[str, Any]:
    """Triton's options of a launch of the write side."""
    return {**OPTIONS, "num_warps": warps, **({"launch_pdl": True} if overlaps(f) else {})}


def overlaps(f: SimpleNamespace) -> bool:
    """The launch may begin before the kernel ahead of it has ended (`rows.take_turn`): Hopper and newer.

    NVIDIA H200, 2026-11-21, fp8 per token and head, in a graph: 1 token 1.37 -> 0.86 us, 256 tokens 2.45 -> 1.72.
    """
    if f.arch is None or f.arch < 90:
        return False
    return f.device.type != "cuda" or _driver_version() >= _OVERLAPPING_GRAPHS


@cache
def _driver_version() -> int:
    """Of CUDA's driver, major × 1000 + minor × 10; 0 where it cannot be asked."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def late(fmt: str, elements: int, most: int) -> bool:
    """LATE of `rows.take_turn`, for programs of so many elements.

    Programs with much to work out share a multiprocessor badly with those of the next launch. NVIDIA H200, 2026-11-21,
    late against early: 256 tokens of nvfp4 1.78, 2.14 us; 32 tokens per token and head 0.85, 1.03, rotated 1.08, 1.87;
    but 2048 of them 4.47, 4.40 (rotated 11.5, 10.8), and 32 tokens of fp8 0.84, 0.68.
    """
    return fmt == "nvfp4" or (fmt.endswith("per_token_head") and elements <= most)


def in_words(f: SimpleNamespace, unit: int, side: str) -> int:
    """Rows of a side, "k" or "v", are read as words of two values (words.py): 4 bits of dense 16-bit rows that are not
    turned. 2: nvfp4's scales go in pairs."""
    rows, fmt = getattr(f, side), pair_of(f)["kv".index(side)]
    turned = getattr(f, f"{side}_signs") is not None or getattr(f, f"{side}_channel_scale") is not None
    if fmt.code not in ("e2m1", "int4") or unit % 2 or turned or rows.dtype.itemsize != 2 or not rows.aligned:
        return 0
    if fmt.code == "int4":
        return 1
    x = getattr(f, f"{side}_scale_cache")
    return 2 if x.aligned and x.shape[-1] % 2 == 0 and not any(n % 2 for n in x.stride[:-1]) else 1


def most_rows(fmt: str, total: int) -> int:
    """Most elements of a program of rows that are not rotated, for `total` elements of all rows.

    Of nvfp4 twice as many where they leave four times the programs: a thread then has two blocks of a row, and what it
    works out for the row serves both. NVIDIA H200, 2026-11-21, 16384 tokens: 27.7 -> 24.8 us; 2048 tokens 4.4 -> 4.9.
    """
    if fmt == "nvfp4" and total >= 4 * MIN_PROGRAMS * MOST:
        return MOST
    return MOST_ROWS.get(fmt, MOST)


def columns(dim: int, fmt: str = "") -> int:
    """Columns of a tile that holds rows of `dim` values; of some formats whole blocks or bytes."""
    return max(launch.next_power_of_2(dim), step(fmt) if fmt else 1)


def step(fmt: str) -> int:
    """Values of a row that are stored together: a block's, or a byte's."""
    return ALL_FORMATS[fmt].scale_block or ALL_FORMATS[fmt].values_per_element


@dataclass(frozen=True)
class Stored(Record):
    """What the write side branches on."""

    CODE: str  # KVFormat.code
    SCALE: str  # what a scale belongs to
    WIDEN: bool  # the ranges of int4 rows are widened to hold 0


def stored(fmt: str, widen: bool = True) -> Stored:
    return Stored(ALL_FORMATS[fmt].code, ALL_FORMATS[fmt].scale, widen)


def program_elements(total: int, most: int = MOST) -> int:
    """Elements of a program, for `total` elements of all rows."""
    return next((n for n in SIZES if n <= most and total >= MIN_PROGRAMS * n), SMALL)


def rotated(total: int, fmt: str) -> tuple[int, int]:
    """(elements, warps) of a program of rotated rows.

    NVIDIA H200, 2026-11-21, 256 tokens, 32 query and 8 K/V heads, programs of 1024 and of 2048 elements: fp8 2.87 and
    (8 warps) 2.33 us, per token and head 2.88, 2.62; 128 tokens 1.93, 2.03 and 1.96, 2.09.
    """
    elements = program_elements(total, MOST_ROTATED.get(fmt, MOST))
    if elements == SMALL and 2 * total >= MIN_PROGRAMS * SIZES[1]:
        if fmt in MOST_ROTATED:
            return SIZES[1], 8
        if fmt.endswith("per_token_head"):
            return SIZES[1], 4
    return elements, 4


def ordered(total: int) -> bool:
    """ORDERED of `rows.all_asked` for rotated rows: unless the launch fills the chip a few times.

    NVIDIA H200, 2026-11-21, with and without: fp8 32 tokens 0.96, 1.02 us, 2048 tokens 10.73, 10.64, 16384 tokens 72.0,
    73.8; per token and head 2048 tokens 10.99, 10.82, 16384 tokens 75.7, 77.5.
    """
    return not MIN_PROGRAMS * SIZES[1] <= total < 1 << 25


def most_keys(fmt: str, halves: bool) -> int:
    """Most elements of a program of rotated keys, whose registers all programs of the launch pay for."""
    return MOST if halves and fmt.endswith("per_token_head") else 2048


class Part:
    """Rows [tokens, heads] of one tensor, cut into programs of `rows` rows, a power of two."""

    def __init__(self, tokens: int, heads: int, columns: int, elements: int) -> None:
        total = tokens * heads
        self.rows = min(max(elements // columns, 1), launch.next_power_of_2(total))
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


def turn_strides(f: SimpleNamespace) -> dict[str, int]:
    """Strides of a head of channel scales, by the names of the kernels."""
    return {f"stride_{s}_channels": strides(getattr(f, f"{s}_channel_scale"), 1)[0] for s in "kv"}


def place_sizes(f: SimpleNamespace, num_pages: int) -> dict[str, int]:
    """Of the places that tokens go to, by the names of the kernels."""
    requests, indices = (0, 0) if f.kv_indptr is None else (f.kv_indptr.shape[0] - 1, f.kv_indices.shape[0])
    return {"num_pages": num_pages, "num_requests": requests, "num_indices": indices}


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
