"""Rows per program of the append kernels, and their stride and slot arguments (host side)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import gcd
from types import SimpleNamespace
from typing import Any

import torch

from ...formats import STORED_FORMATS, UE8M0, pair_of
from . import launch
from .kernel_config import KernelConfig

# Elements of a program of 4 warps: the most that leave MIN_PROGRAMS programs, so that few tokens spread over the chip.
# More elements keep more loads in flight per thread, and a chip starts about one program per nanosecond; fewer need
# fewer registers. NVIDIA H200, 2026-11-21, 8 heads (rotated: 32 query heads), D 128, 16384 tokens, of 2048 and of 4096:
#   rows:     fp8 25.4, 25.5 us; per token and head 26.8, 25.8; nvfp4 26.8, 26.9 (2048 tokens: 4.5, 5.4)
#   rotated:  fp8 75.9, 77.6; per token and head 88.2, 82.1; nvfp4 105.0, 91.7; bf16 89.1, 86.3
# and of 1024 to 4096: 512 tokens of fp8 per token and head 2.27, 2.43, 2.83 us; 1024 tokens 3.95, 3.00, 3.25.
SIZES, SMALL = (4096, 2048), 1024
MAX_ELEMENTS = SIZES[0]
MAX_ELEMENTS_OF_FORMAT = {"fp8_e4m3": 2048, "fp8_e5m2": 2048, "nvfp4": 2048}
MAX_ROTATED_ELEMENTS = {"fp8_e4m3": 2048, "fp8_e5m2": 2048}
MIN_PROGRAMS = 1024
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}
_FIRST_DRIVER_WITH_PDL_GRAPHS = 12030  # the first CUDA driver whose graphs keep launches that overlap


def launch_options(f: SimpleNamespace, warps: int = 4) -> dict[str, Any]:
    """Returns Triton's options for a launch of an append kernel."""
    return {**OPTIONS, "num_warps": warps, **({"launch_pdl": True} if uses_pdl(f) else {})}


def uses_pdl(f: SimpleNamespace) -> bool:
    """Returns whether launches overlap the previous kernel (`pdl_early_launch_and_wait`): Hopper and newer.

    NVIDIA H200, 2026-11-21, fp8 per token and head, in a graph: 1 token 1.37 -> 0.86 us, 256 tokens 2.45 -> 1.72.
    """
    if f.arch is None or f.arch < 90:
        return False
    return f.device.type != "cuda" or _cuda_driver_version() >= _FIRST_DRIVER_WITH_PDL_GRAPHS


@cache
def _cuda_driver_version() -> int:
    """Returns the CUDA driver's version, major × 1000 + minor × 10; 0 without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return 0
    return version.value


def launches_dependents_late(fmt: str, elements: int, max_elements: int) -> bool:
    """Returns PDL_LAUNCH_LATE of `token_rows.pdl_early_launch_and_wait` for programs of `elements` elements.

    Compute-heavy programs share an SM badly with those of the next launch. NVIDIA H200, 2026-11-21,
    late against early: 256 tokens of nvfp4 1.78, 2.14 us; 32 tokens per token and head 0.85, 1.03, rotated 1.08, 1.87;
    but 2048 of them 4.47, 4.40 (rotated 11.5, 10.8), and 32 tokens of fp8 0.84, 0.68.
    """
    return fmt == "nvfp4" or (fmt.endswith("per_token_head") and elements <= max_elements)


def num_tensors_accessed_in_pairs_if_4bit(f: SimpleNamespace, stride_unit: int, k_or_v: str) -> int:
    """Returns 1 if rows of "k" or "v" are read as packed pairs of values (packed_quant.py), for 4-bit codes of dense,
    unrotated 16-bit rows; 2 if nvfp4's scales are stored in pairs too; else 0."""
    rows, fmt = getattr(f, k_or_v), pair_of(f)["kv".index(k_or_v)]
    is_rotated = getattr(f, f"{k_or_v}_signs") is not None or getattr(f, f"{k_or_v}_channel_scale") is not None
    if (
        fmt.code not in ("e2m1", "int4")
        or stride_unit % 2
        or is_rotated
        or rows.dtype.itemsize != 2
        or not rows.aligned
    ):
        return 0
    if fmt.code == "int4":
        return 1
    x = getattr(f, f"{k_or_v}_scale_cache")
    return 2 if x.aligned and x.shape[-1] % 2 == 0 and not any(n % 2 for n in x.stride[:-1]) else 1


def max_program_elements(fmt: str, total_elements: int) -> int:
    """Returns the most elements of a program of unrotated rows, for `total_elements` of all rows.

    nvfp4: twice as many if four times MIN_PROGRAMS remain: a thread then has two blocks of a row and computes the
    row's part once for both. NVIDIA H200, 2026-11-21, 16384 tokens: 27.7 -> 24.8 us; 2048 tokens 4.4 -> 4.9.
    """
    if fmt == "nvfp4" and total_elements >= 4 * MIN_PROGRAMS * MAX_ELEMENTS:
        return MAX_ELEMENTS
    return MAX_ELEMENTS_OF_FORMAT.get(fmt, MAX_ELEMENTS)


def padded_columns(dim: int, fmt: str = "") -> int:
    """Returns the columns of a tile for rows of `dim` values, whole scale blocks and bytes of `fmt` included."""
    return max(launch.next_power_of_2(dim), columns_stored_together(fmt) if fmt else 1)


def columns_stored_together(fmt: str) -> int:
    """Returns how many values are stored together: those of a scale block, or of a byte."""
    return STORED_FORMATS[fmt].scale_block or STORED_FORMATS[fmt].values_per_element


@dataclass(frozen=True)
class StoredFormat(KernelConfig):
    """The format facts that append kernels branch on."""

    CODE: str  # KVFormat.code
    SCALE: str  # KVFormat.scale
    WIDEN: bool  # int4: the range of a row is widened to include 0
    SCALE_BLOCK: int = 0  # of scales that are exponents: values of each, how many are stored, columns without one
    SCALES: int = 0
    TAIL: int = 0


def stored_format(fmt: str, widen_int4_range_to_0: bool = True, dim: int = 0) -> StoredFormat:
    """Returns the facts of a format. dim: values of a row, which rows with exponents for scales want."""
    f = STORED_FORMATS[fmt]
    if f.scale != UE8M0:
        return StoredFormat(f.code, f.scale, widen_int4_range_to_0)
    return StoredFormat(f.code, f.scale, widen_int4_range_to_0, f.scale_block or 1, f.scales(dim), f.tail)


def program_elements(total: int, max_elements: int = MAX_ELEMENTS) -> int:
    """Returns the elements of a program, for `total` elements of all rows."""
    return next((n for n in SIZES if n <= max_elements and total >= MIN_PROGRAMS * n), SMALL)


def elements_and_warps_of_rotated_program(total_elements: int, fmt: str) -> tuple[int, int]:
    """Returns (elements, warps) of a program of rotated rows.

    NVIDIA H200, 2026-11-21, 256 tokens, 32 query and 8 K/V heads, programs of 1024 and of 2048 elements: fp8 2.87 and
    (8 warps) 2.33 us, per token and head 2.88, 2.62; 128 tokens 1.93, 2.03 and 1.96, 2.09.
    """
    elements = program_elements(total_elements, MAX_ROTATED_ELEMENTS.get(fmt, MAX_ELEMENTS))
    if elements == SMALL and 2 * total_elements >= MIN_PROGRAMS * SIZES[1]:
        if fmt in MAX_ROTATED_ELEMENTS:
            return SIZES[1], 8
        if fmt.endswith("per_token_head"):
            return SIZES[1], 4
    return elements, 4


def issues_loads_first(total_elements: int) -> bool:
    """Returns ORDER_LOADS of `token_rows.pdl_late_launch_or_order_loads` for rotated rows: not for a few waves.

    NVIDIA H200, 2026-11-21, with and without: fp8 32 tokens 0.96, 1.02 us, 2048 tokens 10.73, 10.64, 16384 tokens 72.0,
    73.8; per token and head 2048 tokens 10.99, 10.82, 16384 tokens 75.7, 77.5.
    """
    return not MIN_PROGRAMS * SIZES[1] <= total_elements < 1 << 25


def max_key_elements(fmt: str, split_halves: bool) -> int:
    """Returns the most elements of a program of rotated keys, which set the registers of the whole launch."""
    return MAX_ELEMENTS if split_halves and fmt.endswith("per_token_head") else 2048


class RowPrograms:
    """Rows [tokens, heads] of one tensor, divided among programs of `rows` rows, a power of two."""

    def __init__(self, num_tokens: int, num_heads: int, num_columns: int, elements_per_program: int) -> None:
        num_rows = num_tokens * num_heads
        self.rows = min(max(elements_per_program // num_columns, 1), launch.next_power_of_2(num_rows))
        self.programs = -(-num_rows // self.rows)


def program_ends(*parts: RowPrograms) -> tuple[int, ...]:
    """Returns the end of each part's program range, for parts in order."""
    return tuple(accumulate(p.programs for p in parts))


def common_stride_unit_of_tensors(*tensors: Any) -> int:
    """Returns the largest power of two, up to 16, that divides every stride of these tensor facts but the last."""
    return gcd(16, *[s for t in tensors if t is not None for s in t.stride[:-1]])


def strides_in_units(t: Any, n: int, unit: int = 1) -> tuple[int, ...]:
    """Returns the first n strides of a tensor fact, without its last, in units; zeros where it has fewer."""
    return (0,) * n if t is None else tuple(s // unit for s in (*t.stride[: len(t.shape) - 1], *(0,) * n)[:n])


def scale_strides(t: Any) -> tuple[int, int, int]:
    """Returns the page, slot and head strides of a cache of stored scales."""
    return (0, 0, 0) if t is None else t.stride[:3]


def channel_scale_strides(f: SimpleNamespace) -> dict[str, int]:
    """Returns the head strides of the channel scales, by kernel name."""
    return {f"stride_{s}_channels": strides_in_units(getattr(f, f"{s}_channel_scale"), 1)[0] for s in "kv"}


def page_request_and_index_count_args(f: SimpleNamespace, num_pages: int) -> dict[str, int]:
    """Returns the numbers of pages, requests and indices against which kernels check slots, by kernel name."""
    requests, indices = (0, 0) if f.kv_indptr is None else (f.kv_indptr.shape[0] - 1, f.kv_indices.shape[0])
    return {"num_pages": num_pages, "num_requests": requests, "num_indices": indices}


def per_head(scale: Any) -> bool:
    """Returns whether a scale tensor has an entry per head."""
    return scale is not None and scale.shape[0] > 1


def num_q_heads_and_nope_columns(f: SimpleNamespace) -> tuple[int, int]:
    """Returns (query heads, unrotated columns of a query row), 0 where there is none."""
    q = f.q_rope or f.q_nope
    return (q.shape[1] if q else 0), (f.q_nope.shape[2] if f.q_nope else 0)


def query_output_cast_kind(f: SimpleNamespace) -> str:
    """Returns the kind of cast of the query output: "e4m3", "e5m2" or "float"."""
    out = f.q_rope_out or f.q_nope_out
    return _OUTPUT_KINDS.get(out.dtype, "float") if out else "float"


_OUTPUT_KINDS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
