"""What the kernel of prefill is compiled for, and its tensor maps: from facts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from .....formats import BLOCK, E4M3_MAX, E5M2_MAX, TENSOR, TOKEN_HEAD, kv_format
from ....host import launch
from ....host.record import Record
from ..parts.tensor_maps import tensor_map, unfit
from ..parts.turn import Turn, turn_of

ROWS = 64  # query rows of a warpgroup
BLOCK_ROWS = 2 * ROWS  # of an item
_OUT_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_SWIZZLE = 128  # bytes: the widest panel of a row in shared memory


@dataclass(frozen=True)
class Shape(Record):
    """The names are the kernel's."""

    CODE: str  # KVFormat.code
    CONVERTED: bool  # codes are; else keys and values are multiplied as they are stored
    KEYS_8: bool  # an e4m3 query meets codes of keys as they are: only those of values are converted
    VALUES_8: bool  # and weights in 8 bits meet codes of values: these are transposed
    PARTS: int  # codes in a 16-bit word
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    BF16: bool  # multiply in bf16; else fp16
    D: int  # columns of a key in shared memory, the head's rounded up
    DV: int  # of a value
    HEAD_D: int
    HEAD_DV: int
    WORDS_K: int  # of a row of codes in shared memory
    WORDS_V: int
    TILE: int  # keys
    COPY: int  # of one tensor copy: of one page
    PAGE: int
    STAGES: int  # of the rings of 16-bit tiles
    CODE_STAGES: int  # of the rings of codes; 0: there are none
    HEADS: int
    GROUP: int
    PACKED: int  # query heads of an item, side by side in its rows: a token's
    TOKENS: int  # of an item
    BUNDLES: int  # items of a block of tokens
    NEW: bool  # keys and values of the new rows come with the call
    WINDOW: int
    HAS_SINKS: bool
    HAS_LSE: bool
    SOFTCAP: bool
    SOFTMAX_T: bool
    K_T: bool
    K_T_STRIDE: int
    V_T: bool
    V_T_STRIDE: int
    OUT_T: bool
    OUT_MAX: float
    K_FACTOR: float
    V_FACTOR: float
    REGISTERS: int  # of a thread that attends
    K_SCALE_STRIDES: tuple[int, ...]  # of pages, slots and heads
    V_SCALE_STRIDES: tuple[int, ...]
    K_TURN: Turn
    V_TURN: Turn


def shape_of(f: SimpleNamespace) -> Shape:
    fmt = kv_format(f.format)
    heads, group = f.k_cache.shape[2], f.q.shape[1] // f.k_cache.shape[2]
    packed = min(group & -group, ROWS)
    parts = 2 * fmt.values_per_element // fmt.storage.itemsize
    d, dv = (max(32, launch.next_power_of_2(n)) for n in (f.q.shape[2], f.out.shape[2]))
    # What converting nvfp4 leaves over: see `parts/convert.scaled_e2m1`.
    left_over = 64.0 if fmt.scale == BLOCK else 1.0
    tile = 128 if max(d, dv) <= 128 else 64
    codes = fmt.storage.itemsize == 1
    return Shape(
        CODE=fmt.code,
        CONVERTED=codes,
        KEYS_8=_keys_8(f),
        VALUES_8=_keys_8(f) and f.precision == "fast",
        PARTS=parts,
        TOKEN_SCALES=fmt.scale == TOKEN_HEAD,
        BLOCK_SCALES=fmt.scale == BLOCK,
        BF16=fmt.storage == torch.bfloat16,
        D=d,
        DV=dv,
        HEAD_D=f.q.shape[2],
        HEAD_DV=f.out.shape[2],
        WORDS_K=d // parts,
        WORDS_V=dv // parts,
        TILE=tile,
        COPY=min(tile, f.k_cache.shape[1] & -f.k_cache.shape[1]),
        PAGE=f.k_cache.shape[1],
        STAGES=2,
        CODE_STAGES=2 if codes else 0,
        HEADS=heads,
        GROUP=group,
        PACKED=packed,
        TOKENS=BLOCK_ROWS // packed,
        BUNDLES=f.q.shape[1] // packed,
        NEW=f.k is not None,
        WINDOW=f.window,
        HAS_SINKS=f.sinks is not None,
        HAS_LSE=f.lse is not None,
        SOFTCAP=f.softcap > 0,
        SOFTMAX_T=f.softmax_scale_t is not None,
        K_T=f.k_scale_t is not None,
        K_T_STRIDE=_by_head(f.k_scale_t),
        V_T=f.v_scale_t is not None,
        V_T_STRIDE=_by_head(f.v_scale_t),
        OUT_T=f.out_scale_t is not None,
        OUT_MAX=_OUT_MAX.get(f.out.dtype, 0.0),
        K_FACTOR=left_over,
        V_FACTOR=left_over,
        REGISTERS=240 if not codes else 216 if f.precision == "fast" and _keys_8(f) else 208,
        K_SCALE_STRIDES=_of_scales(f.k_scale_cache),
        V_SCALE_STRIDES=_of_scales(f.v_scale_cache),
        K_TURN=turn_of(f.k_signs, f.k_channel_scale),
        V_TURN=turn_of(f.v_signs, f.v_channel_scale),
    )


def _keys_8(f: SimpleNamespace) -> bool:
    """New rows come in 16 bits, and their query is made 16 bits: then it stays so. A turned one is no code any more."""
    fmt, as_is = kv_format(f.format), f.k is None and not turn_of(f.k_signs, f.k_channel_scale).ANY
    return as_is and (fmt.code, fmt.scale, f.q.dtype) == ("e4m3", TENSOR, torch.float8_e4m3fn)


def of_new_rows(c: Shape) -> Shape:
    """As c, of tiles that are multiplied as they come with the call."""
    plain = turn_of(None, None)
    return replace(c, CONVERTED=False, TOKEN_SCALES=False, BLOCK_SCALES=False, K_TURN=plain, V_TURN=plain)


def items_of(f: SimpleNamespace, c: Shape) -> int:
    """The most items that there can be."""
    return (-(-f.q.shape[0] // c.TOKENS) + f.seq_lens.shape[0]) * c.BUNDLES


def why_not_copied(f: SimpleNamespace) -> str | None:
    """Why the copy engine does not take these tensors; None: it does."""
    c = shape_of(f)
    for name, x in ((name, getattr(f, name)) for name in described(f)):
        if not x.aligned:
            return f"wants {name} on a multiple of 16 bytes"
        dtype, shape, strides, block = _box(x, name, c)
        reason = unfit(shape, strides, block, dtype.itemsize, _SWIZZLE)
        if reason is not None:
            return f"wants {name} as the copy engine takes it, got {reason}"
    return None


def described(f: Any) -> tuple[str, ...]:
    """The tensors that the copy engine reads."""
    return ("q", "k_cache", "v_cache") + (() if f.k is None else ("k", "v"))


def descriptor(x: torch.Tensor, name: str, c: Shape) -> Any:
    dtype, shape, strides, block = _box(x, name, c)
    width = min(block[-1] * dtype.itemsize, _SWIZZLE)
    layout = gl.NVMMASharedLayout(width, 8 * dtype.itemsize, len(block))
    return tensor_map(_Address(x, dtype), shape, strides, block, layout)


class _Address(launch.Address):
    """A tensor seen with another dtype, whatever its strides."""

    __slots__ = ()

    def __init__(self, x: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(x)
        self.dtype = dtype


def _box(x: Any, name: str, c: Shape) -> tuple[torch.dtype, list[int], list[int], list[int]]:
    """(dtype, shape, strides, box) of the map: rows [tokens, heads, columns], a cache [pages, heads, slots, words].

    Pages are a dimension of their own, so they may lie at any distance of a multiple of 16 bytes.
    """
    strides = x.stride() if callable(x.stride) else x.stride
    size = x.dtype.itemsize
    if name in ("q", "k", "v"):
        t, heads, d = x.shape
        # Of a single token or head the stride may be anything, which a tensor map does not take.
        s_t, s_h = strides[0] if t > 1 else heads * d, strides[1] if heads > 1 else d
        box = [ROWS // c.PACKED, c.PACKED] if name == "q" else [c.TILE, 1]
        return x.dtype, [t, heads, d], [s_t, s_h, 1], [*box, min(c.DV if name == "v" else c.D, _SWIZZLE // size)]
    pages, slots, heads, width = x.shape
    wide, words = (c.D, c.WORDS_K) if name == "k_cache" else (c.DV, c.WORDS_V)
    dtype, per = (torch.int16, 2 // size) if c.CODE_STAGES else (x.dtype, 1)
    s_p, s_s, s_h = (0 if n % per else n // per for n in strides[:3])  # 0: no copy takes it
    columns = min(words if c.CODE_STAGES else wide, _SWIZZLE // 2)
    s_p, s_h = s_p if pages > 1 else slots * heads * width // per, s_h if heads > 1 else width // per
    return dtype, [pages, heads, slots, width // per], [s_p, s_h, s_s, 1], [1, 1, c.COPY, columns]


def _of_scales(x: Any) -> tuple[int, ...]:
    return (0, 0, 0) if x is None else tuple(x.stride[:3])


def _by_head(t: Any) -> int:
    return 1 if t is not None and t.shape[0] > 1 else 0
