"""The cache formats: what a row stores, what its codes mean, how many bytes it takes. The only home of 448, 127 and 16.

`x ≈ code × scale` in every format: scales always dequantise. The exact codes that an append stores are described in
docs/formats.md. Backends branch on `code` and `scale`, and refuse what they do not know.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .scalars import as_int, as_non_negative_int, as_positive_int

# What the scale belongs to.
NONE = "none"  # 16-bit formats
TENSOR = "tensor"  # one per tensor or one per head, given by the caller
TOKEN_HEAD = "token_head"  # one fp32 per (token, head), stored beside the codes; int4's lowest bits are a zero point
BLOCK = "block"  # one e4m3 per block of 16 values, times a per-tensor global scale
GROUP = "group"  # one fp32 per group of 128 latent values, stored in the row
UE8M0 = "ue8m0"  # one power of two per 64 or 32 values, stored as its exponent + 127; 255 is NaN
INDEX = "index"  # one fp32 power of two per 128 columns of an index key, behind all codes of its page


# What K/V caches may have beside (`attributes.py`), as a backend's file lists what it takes (`SUPPORTS`) and as a
# refusal names it.
PAIRS, ROTATION, CHANNELS = "K and V of different formats", "rotated rows", "channel scales"
BATCH_INVARIANCE = "batch invariance"  # what calls ask for, not caches
LISTS, LATENT_SINKS = "lists of keys (indices)", "sinks over latents"  # likewise
LSE_OF_KEYS, MAX_LOGITS = "lse without its sinks", "max_logits"  # likewise
TWO_SETS = "a second set of keys (extra)"


@dataclass(frozen=True, slots=True)
class KVFormat:
    """One cache format. `max_value` is the largest magnitude of a code; saturation happens there."""

    name: str
    code: str  # what a code means: bf16 fp16 e4m3 e5m2 int8 e2m1 int4; kernels and codecs branch on it, not on storage
    storage: torch.dtype  # dtype of the tensor that holds the codes
    max_value: float
    scale: str
    scale_dtype: torch.dtype | None = None  # of the stored scales, if any are stored
    scale_block: int | None = None  # values that share a stored scale; None: the whole row
    values_per_element: int = 1  # values in one element of storage
    rope_storage: torch.dtype | None = None  # rotary part of a latent row, where it differs
    tail: int = 0  # last values of a row that are stored in bf16, without a scale; elements are bytes then
    scale_step: int = 1  # a row's stored scales are so many, or a multiple: zeros fill them up

    def elements(self, dim: int) -> int:
        """Storage elements of a row of `dim` values."""
        return dim // self.values_per_element + self.tail

    def values(self, elements: int) -> int:
        """Values of a row of so many storage elements."""
        return (elements - self.tail) * self.values_per_element

    def scales(self, dim: int) -> int:
        """Stored scales of a row of `dim` values."""
        if self.scale_dtype is None:
            return 0
        if self.scale_block is None:
            return 1
        blocks = -(-(dim - self.tail) // self.scale_block)
        return -(-blocks // self.scale_step) * self.scale_step

    def code_bytes(self, dim: int) -> int:
        return self.elements(dim) * self.storage.itemsize

    def scale_bytes(self, dim: int) -> int:
        return self.scales(dim) * (self.scale_dtype.itemsize if self.scale_dtype else 0)

    def row_bytes(self, dim: int) -> int:
        """Bytes of one row of `dim` values, its stored scales included."""
        return self.code_bytes(dim) + self.scale_bytes(dim)

    def fitting_scale(self, largest: float) -> float:
        """The scale that lets a largest magnitude just fit; 1 for formats without a scale of the tensor."""
        if self.scale == TENSOR:
            return largest / self.max_value or 1.0
        if self.scale == BLOCK:  # the largest block scale and the largest code meet at the largest value
            return largest / (self.max_value * E4M3_MAX) or 1.0
        return 1.0


E4M3_MAX = 448.0
E5M2_MAX = 57344.0
E2M1_MAX = 6.0
INT8_MAX = 127.0
INT4_MAX = 15.0
ZERO_POINT = 15  # the bits of an int4 row's stored scale that hold its zero point: x ≈ (code − zero point) × scale
NVFP4_BLOCK = 16
LATENT_GROUP = 128
INDEX_BLOCK = 128  # columns of an index key that share a scale
PAGE_STEP = 16  # bytes that the distance of pages with scales in their tail is a multiple of
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512  # that decode reads; 576: joined latent rows as keys
MAX_INDEX_DIM = 256  # of an index key
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MIN_TOKEN_HEAD_SCALE = 1e-6  # floor of a per-token-head scale
MIN_LATENT_GROUP_SCALE = 1e-4  # floor of a group scale of fp8_ds_mla before it is rounded up to a power of two
MIN_UE8M0_AMAX = 1e-4  # floor of the amax of 64 or 32 values before their scale is rounded up to a power of two
MIN_INDEX_AMAX = 1e-4  # floor of an index key's amax before its scale is rounded up to a power of two
MAX_LATENT_AMAX = 1200.0  # cap on a group's amax when MLA prefill quantises gathered latents

_BF16_MAX, _FP16_MAX = torch.finfo(torch.bfloat16).max, torch.finfo(torch.float16).max

BF16 = KVFormat("bf16", "bf16", torch.bfloat16, _BF16_MAX, NONE)
FP16 = KVFormat("fp16", "fp16", torch.float16, _FP16_MAX, NONE)
FP8_E4M3 = KVFormat("fp8_e4m3", "e4m3", torch.float8_e4m3fn, E4M3_MAX, TENSOR)
FP8_E5M2 = KVFormat("fp8_e5m2", "e5m2", torch.float8_e5m2, E5M2_MAX, TENSOR)
FP8_PER_TOKEN_HEAD = KVFormat("fp8_per_token_head", "e4m3", torch.float8_e4m3fn, E4M3_MAX, TOKEN_HEAD, torch.float32)
INT8_PER_TOKEN_HEAD = KVFormat("int8_per_token_head", "int8", torch.int8, INT8_MAX, TOKEN_HEAD, torch.float32)
NVFP4 = KVFormat("nvfp4", "e2m1", torch.uint8, E2M1_MAX, BLOCK, torch.float8_e4m3fn, NVFP4_BLOCK, 2)
INT4_PER_TOKEN_HEAD = KVFormat("int4_per_token_head", "int4", torch.uint8, INT4_MAX, TOKEN_HEAD, torch.float32, None, 2)
FP8_DS_MLA = KVFormat(
    "fp8_ds_mla", "e4m3", torch.float8_e4m3fn, E4M3_MAX, GROUP, torch.float32, LATENT_GROUP, 1, torch.bfloat16
)

_RECORD: dict[str, Any] = {
    "rope_storage": torch.bfloat16,
    "scale": UE8M0,
    "scale_dtype": torch.uint8,
    "max_value": E4M3_MAX,
}
FP8_V4 = KVFormat("fp8_v4", "e4m3", torch.uint8, scale_block=64, tail=64, scale_step=8, **_RECORD)
FP8_V41 = KVFormat("fp8_v41", "e4m3", torch.float8_e4m3fn, scale_block=32, **_RECORD)

_KV = (BF16, FP16, FP8_E4M3, FP8_E5M2, FP8_PER_TOKEN_HEAD, INT8_PER_TOKEN_HEAD, NVFP4, INT4_PER_TOKEN_HEAD)
KV_FORMATS = {f.name: f for f in _KV}
LATENT_FORMATS = {f.name: f for f in (BF16, FP16, FP8_E4M3, FP8_E5M2, FP8_DS_MLA)}
ALL_FORMATS = KV_FORMATS | LATENT_FORMATS
LATENT_RECORDS = {f.name: f for f in (FP8_V4, FP8_V41)}  # latent formats of rows without a rotary part
INDEX_FP8 = KVFormat("index_fp8", "e4m3", torch.float8_e4m3fn, E4M3_MAX, INDEX, torch.float32, INDEX_BLOCK)
INDEX_FORMATS = {f.name: f for f in (INDEX_FP8, BF16, FP16, FP8_E4M3)}  # an indexer's fp8_e4m3 has no scale
STORED_FORMATS = ALL_FORMATS | LATENT_RECORDS | INDEX_FORMATS  # of every kind of cache


def kv_format(name: str) -> KVFormat:
    """The K/V format of that name. Raises ValueError that lists the names."""
    return _lookup(name, KV_FORMATS, "K/V caches")


def pair_of(call: Any) -> tuple[KVFormat, KVFormat]:
    """K's and V's format, of a call's record or its facts."""
    k = kv_format(call.format)
    return k, kv_format(call.v_format) if call.v_format else k


def latent_format(name: str) -> KVFormat:
    """The latent (MLA) format of that name. Raises ValueError that lists the names."""
    return _lookup(name, LATENT_FORMATS | LATENT_RECORDS, "latent caches")


def index_format(name: str) -> KVFormat:
    """The format of that name of an indexer's keys. Raises ValueError that lists the names."""
    return _lookup(name, INDEX_FORMATS, "index caches")


def _lookup(name: str, table: dict[str, KVFormat], what: str) -> KVFormat:
    if not isinstance(name, str) or name not in table:
        raise ValueError(f"format: want one of {', '.join(table)} for {what}, got {name!r}{meant(name, table)}")
    return table[name]


# What a format may be called where it is one of a few bits among others.
_SHORT = {
    "int8": "int8_per_token_head", "int4": "int4_per_token_head", "fp8": "fp8_e4m3", "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2", "fp4": "nvfp4", "mxfp4": "nvfp4",
    "bfloat16": "bf16", "float16": "fp16", "half": "fp16",
}  # fmt: skip


def meant(name: object, known: Iterable[str]) -> str:
    """`; did you mean …?`, for a name that is none of the known ones but near to one; else empty."""
    if not isinstance(name, str):
        return ""
    known, asked = list(known), name.strip().lower().replace("-", "_").removeprefix("torch.")
    near = [x for x in (asked, _SHORT.get(asked)) if x in known] or difflib.get_close_matches(asked, known, 1, 0.7)
    return f"; did you mean {near[0]!r}?" if near else ""


def held(f: KVFormat, name: str, dim: int) -> int:
    """dim, which has to be a row's size that the format can hold."""
    step, dim = f.scale_block or f.values_per_element, as_int(name, dim)
    if dim <= f.tail or (dim - f.tail) % step:
        raise ValueError(f"{name}: want a positive multiple of {step} for {f.name}, got {dim}")
    return dim


def readable(both: tuple[KVFormat, KVFormat], dims: tuple[int, int]) -> None:
    """Raise ValueError unless rows of the formats hold heads of these sizes, and decode reads them."""
    most = MAX_HEAD_DIM, MAX_HEAD_DIM_V
    for name, f, d, limit in zip(("head_dim", "head_dim_v"), both, dims, most, strict=True):
        step = f.scale_block or 8
        if not 0 < d <= limit or d % step:
            raise ValueError(f"{name}: want a positive multiple of {step} for {f.name}, at most {limit}, got {d}")


def _sides(format: str | Sequence[str], head_dim: int, head_dim_v: int | None) -> tuple[list[KVFormat], list[int]]:
    """K's and V's format, and head sizes that they can hold."""
    pair = isinstance(format, (tuple, list)) and len(format) == 2
    formats = [kv_format(name) for name in (format if pair else [format] * 2)]  # type: ignore[arg-type]
    dims = head_dim, head_dim if head_dim_v is None else head_dim_v
    return formats, [held(f, n, d) for f, n, d in zip(formats, ("head_dim", "head_dim_v"), dims, strict=True)]


def kv_bytes_per_token(
    format: str | Sequence[str], num_kv_heads: int, head_dim: int, head_dim_v: int | None = None
) -> int:
    """Bytes that one token takes in one layer of a K/V cache, stored scales included. format: a name, or K's and V's.

        >>> tersekv.kv_bytes_per_token("nvfp4", num_kv_heads=8, head_dim=128)
        1152

    Raises ValueError for sizes that the format cannot hold, TypeError for what is no integer.
    """
    row = sum(f.row_bytes(d) for f, d in zip(*_sides(format, head_dim, head_dim_v), strict=True))
    return as_positive_int("num_kv_heads", num_kv_heads) * row


def kv_page_bytes(
    format: str | Sequence[str], page_size: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None
) -> int:
    """Bytes of a page with its stored scales in its tail, in one layer: what `PagedKVLayer.from_buffer` wants of each.

        >>> tersekv.kv_page_bytes("int8_per_token_head", page_size=16, num_kv_heads=8, head_dim=128)
        33792

    Raises ValueError for sizes that the format cannot hold, TypeError for what is no integer.
    """
    formats, dims = _sides(format, head_dim, head_dim_v)
    return page_tail(
        formats, as_positive_int("page_size", page_size) * as_positive_int("num_kv_heads", num_kv_heads), dims
    )[1]


def page_tail(formats: Sequence[KVFormat], rows: int, dims: Sequence[int]) -> tuple[list[int], int]:
    """Where in a page K's codes, V's codes, K's scales and V's scales begin, and the bytes of the page.

    rows:  of one side in a page, of all heads

    Each part begins at a multiple of its elements' size, the next page at one of 16 bytes.
    """
    sides = list(zip(formats, dims, strict=True))
    sizes = [(rows * f.code_bytes(d), f.storage.itemsize) for f, d in sides]
    sizes += [(rows * f.scale_bytes(d), f.scale_dtype.itemsize if f.scale_dtype else 1) for f, d in sides]
    starts, end = [], 0
    for nbytes, step in sizes:
        starts.append(-(-end // step) * step)
        end = starts[-1] + nbytes
    return starts, -(-end // PAGE_STEP) * PAGE_STEP


def latent_bytes_per_token(format: str, kv_lora_rank: int = 512, qk_rope_head_dim: int | None = None) -> int:
    """Bytes that one token takes in one layer of a latent cache, stored scales included.

        >>> tersekv.latent_bytes_per_token("fp8_ds_mla"), tersekv.latent_bytes_per_token("fp8_v4")
        (656, 584)

        qk_rope_head_dim:  None: 64, or 0 for a format of rows without a rotary part

    Raises ValueError for sizes that the format cannot hold, TypeError for what is no integer.
    """
    f = latent_format(format)
    rotary = held_rotary(f, qk_rope_head_dim)
    return f.row_bytes(held(f, "kv_lora_rank", kv_lora_rank)) + rotary * rope_dtype(f).itemsize


def held_rotary(f: KVFormat, dim: int | None) -> int:
    """dim, which has to be the size of a rotary part that rows of the format can have; None: what they have."""
    if dim is None:
        return 0 if f.scale == UE8M0 else 64
    dim = as_non_negative_int("qk_rope_head_dim", dim)
    if f.scale == UE8M0 and dim:
        raise ValueError(f"qk_rope_head_dim: want 0 for {f.name}, whose rows have no rotary part, got {dim}")
    return dim


def latent_page_bytes(format: str, page_size: int, kv_lora_rank: int = 512) -> int:
    """Bytes from page to page of a latent cache whose scales lie behind the rows of a page (`fp8_v4`)."""
    f = latent_format(format)
    step, used = f.code_bytes(kv_lora_rank), page_size * f.row_bytes(kv_lora_rank)
    return -(-used // step) * step


def index_bytes_per_token(format: str, head_dim: int = 128) -> int:
    """Bytes that one token takes in one layer of an index cache, its scales included.

        >>> tersekv.index_bytes_per_token("index_fp8"), tersekv.index_bytes_per_token("bf16")
        (132, 256)

    Raises ValueError for sizes that the format cannot hold, TypeError for what is no integer.
    """
    return index_format(format).row_bytes(held_index(head_dim))


def held_index(dim: int) -> int:
    """dim, which has to be the size of an index key."""
    dim = as_int("head_dim", dim)
    if not 0 < dim <= MAX_INDEX_DIM or dim % 8:
        raise ValueError(f"head_dim: want a positive multiple of 8 for index keys, at most {MAX_INDEX_DIM}, got {dim}")
    return dim


def rope_dtype(f: KVFormat) -> torch.dtype:
    """Storage dtype of the rotary part of a latent row."""
    return f.rope_storage or f.storage
