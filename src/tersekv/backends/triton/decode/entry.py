"""Paged decode in Triton: two launches, the split pass and the merge of cut segments."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ....formats import BLOCK, E4M3_MAX, E5M2_MAX, TOKEN_HEAD, KVFormat, kv_format
from ...host import launch
from ...host.bind import Bound, Fields, Step, bound
from ...host.record import Record
from .kernels import META_FIELDS, decode_kernel, merge_kernel
from .tune import Tiles, tiles

_OUT_MAX = {torch.float8_e4m3fn: E4M3_MAX, torch.float8_e5m2: E5M2_MAX}
_OUT_KIND = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
_MAX_DESCRIPTORS = 1024  # caches of a plan whose descriptors are kept: a model has some hundred layers
_CODE = {torch.float8_e4m3fn: "fp8_e4m3", torch.float8_e5m2: "fp8_e5m2", torch.int8: "int8", torch.uint8: "nvfp4"}


_SPLIT = Fields(
    "q k_scale_cache v_scale_cache page_table seq_lens cu_seqlens_q mask sinks out lse part "
    "softmax_scale_t k_scale_t v_scale_t out_scale_t"
)
_MERGE = Fields("sinks out lse part v_scale_t out_scale_t")


@dataclass(frozen=True)
class Constants(Record):
    """What the kernels are compiled for. The names are theirs."""

    CODE: str
    PARTS: int  # codes in a 16-bit word
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    BYTES: bool  # e4m3 block scales come as uint8 and are converted by hand
    ASM: bool  # unpack by PTX
    BF16: bool  # multiply in bf16; else fp16
    TWO: bool  # the query is fp16 and multiplied as the sum of two bf16 tiles
    Q_BYTES: bool  # the query is e4m3 and comes as bytes
    HEADS: int
    GROUP: int
    D: int
    DV: int
    WORDS_K: int  # D / PARTS
    WORDS_V: int
    BLOCK_D: int
    BLOCK_DV: int
    PAGE: int
    TILE: int
    ONE_PAGE: bool
    TMA: bool
    FETCH: bool  # values are carried in registers from the step before, where Triton would not pipeline their loads
    K_PITCH: int
    V_PITCH: int
    K_HEAD_ROWS: int
    V_HEAD_ROWS: int
    UNROLL: int
    ROWS: int
    BLOCK_B: int
    MIN_TILES: int
    MAX_Q: int
    RAGGED: bool
    WINDOW: int
    HAS_MASK: bool
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
    OUT_KIND: str  # "e4m3" or "e5m2": the output is written as bytes, by bit arithmetic; "float": by the chip's cast
    K_FACTOR: float
    V_FACTOR: float
    PART_COLUMNS: int
    MERGE_PIECES: int
    MERGE_COLUMNS: int
    FAR: bool = False  # a page is longer than int32 counts


class Config(NamedTuple):
    constants: Constants
    num_programs: int
    split: launch.Template
    merge: launch.Template
    scratch: int  # fp32 numbers: the cut segments' states, then META
    descriptors: dict[tuple[int, int], tuple]  # the kernel's arguments for K and V, by the caches' addresses
    k_box: tuple[int, int, int] | None  # rows, row pitch and columns of the descriptor's tensor; None: pointers
    v_box: tuple[int, int, int] | None
    empty: bool


def why_not(f: SimpleNamespace) -> str | None:
    reason = launch.why_not(f)
    if reason:
        return reason
    for name in ("k_cache", "v_cache"):
        if any(n * getattr(f, name).dtype.itemsize % 2 for n in getattr(f, name).stride[:3]):
            return f"wants {name} with strides of whole 16-bit words, got {list(getattr(f, name).stride)}"
        if not getattr(f, name).even:
            return f"wants {name} to begin with a whole 16-bit word, got an odd address"
    if f.q.dtype == torch.float32:
        return "wants a 16-bit or 8-bit q, got float32"
    return None


def configure(f: SimpleNamespace) -> Config:
    fmt = kv_format(f.format)
    t = tiles(f, fmt)
    heads, group = f.k_cache.shape[2], f.q.shape[1] // max(f.k_cache.shape[2], 1)
    parts = 2 * fmt.values_per_element // fmt.storage.itemsize
    boxes = (None, None)
    if t.tma and f.k_cache.shape[1] % t.tile == 0 and launch.has_tma(f):
        boxes = (_box(f.k_cache, f.q.shape[2] // parts), _box(f.v_cache, f.out.shape[2] // parts))
    if None in boxes:
        boxes = (None, None)
    constants = Constants(
        **_format(f, fmt, parts), **_geometry(f, t, heads, group, parts, boxes[0] is not None), **_features(f)
    )
    options: dict[str, Any] = {"num_warps": t.num_warps, "num_stages": t.stages}
    if launch.has_ptx(f):
        options["maxnreg"] = t.max_registers
    num_programs = max(launch.num_sms(f) * t.programs_per_sm // max(heads, 1), 1) * heads
    empty = 0 in f.q.shape or f.seq_lens.shape[0] == 0
    merge_rows = min(t.rows, f.max_q_len * group)
    strides, tensor = _strides(f), launch.TENSOR
    split = launch.Template(
        decode_kernel, (num_programs,), (
            *[tensor] * 11, f.softmax_scale, tensor, f.k_scale, tensor, f.v_scale, tensor, f.out_scale, tensor,
            f.softcap, f.seq_lens.shape[0], f.q.shape[0], *strides, constants,
        ), descriptors_at=1, fp8_as_bytes=False, **options,
    )  # fmt: skip
    merge = launch.Template(
        merge_kernel, (num_programs, merge_rows), (
            *[tensor] * 4, None, f.v_scale, tensor, f.out_scale, tensor, *strides[-4:], constants,
        ), fp8_as_bytes=False, num_warps=4,
    )  # fmt: skip
    scratch = num_programs * (2 * constants.ROWS * constants.PART_COLUMNS + META_FIELDS.value)
    return Config(constants, num_programs, split, merge, scratch, {}, *boxes, empty)


def _format(f: SimpleNamespace, fmt: KVFormat, parts: int) -> dict[str, Any]:
    by_hand = launch.e4m3_by_hand(f)
    left_over = 128.0 if fmt.scale == BLOCK else 1.0  # by tiles.block_scales
    return {
        "CODE": _CODE.get(fmt.storage, "half"),
        "PARTS": parts,
        "TOKEN_SCALES": fmt.scale == TOKEN_HEAD,
        "BLOCK_SCALES": fmt.scale == BLOCK,
        "BYTES": by_hand,
        "ASM": launch.has_ptx(f) and not (fmt.storage == torch.float8_e4m3fn and by_hand),
        "BF16": fmt.storage == torch.bfloat16,
        "TWO": fmt.storage == torch.bfloat16 and f.q.dtype == torch.float16,
        "Q_BYTES": by_hand and f.q.dtype == torch.float8_e4m3fn,
        "K_FACTOR": left_over,
        "V_FACTOR": left_over,
    }


def _geometry(f: SimpleNamespace, t: Tiles, heads: int, group: int, parts: int, tma: bool) -> dict[str, Any]:
    d, dv, page = f.q.shape[2], f.out.shape[2], f.k_cache.shape[1]
    block_d, block_dv = (max(16, launch.next_power_of_2(n // parts)) for n in (d, dv))
    return {
        "HEADS": heads,
        "GROUP": group,
        "D": d,
        "DV": dv,
        "WORDS_K": d // parts,
        "WORDS_V": dv // parts,
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "PAGE": page,
        "TILE": t.tile,
        "ONE_PAGE": page % t.tile == 0,
        "TMA": tma,
        "FETCH": parts > 1 and not tma,
        "K_PITCH": _pitch(f.k_cache) if tma else 0,
        "V_PITCH": _pitch(f.v_cache) if tma else 0,
        "K_HEAD_ROWS": _head_rows(f.k_cache) if tma else 0,
        "V_HEAD_ROWS": _head_rows(f.v_cache) if tma else 0,
        "UNROLL": t.unroll,
        "ROWS": t.rows,
        "BLOCK_B": min(1024, launch.next_power_of_2(max(f.seq_lens.shape[0], 1))),
        "MIN_TILES": t.min_tiles,
        "PART_COLUMNS": parts * block_dv + 2,
        "MERGE_PIECES": 16,
        "MERGE_COLUMNS": parts * block_dv,
        "FAR": launch.spans_far(f.k_cache, f.v_cache, f.k_scale_cache, f.v_scale_cache),
    }


def _features(f: SimpleNamespace) -> dict[str, Any]:
    return {
        # Ragged rows are read from cu_seqlens_q; a bound that changes with the batch must not compile anew.
        "MAX_Q": 0 if f.cu_seqlens_q is not None else f.max_q_len,
        "RAGGED": f.cu_seqlens_q is not None,
        "WINDOW": f.window,
        "HAS_MASK": f.mask is not None,
        "HAS_SINKS": f.sinks is not None,
        "HAS_LSE": f.lse is not None,
        "SOFTCAP": f.softcap > 0,
        "SOFTMAX_T": f.softmax_scale_t is not None,
        "K_T": f.k_scale_t is not None,
        "K_T_STRIDE": _per_head(f.k_scale_t),
        "V_T": f.v_scale_t is not None,
        "V_T_STRIDE": _per_head(f.v_scale_t),
        "OUT_T": f.out_scale_t is not None,
        "OUT_MAX": _OUT_MAX.get(f.out.dtype, 0.0),
        "OUT_KIND": "float" if launch.rounds_to_fp8(f) else _OUT_KIND.get(f.out.dtype, "float"),
    }


def _strides(f: SimpleNamespace) -> tuple[int, ...]:
    """In the order of the kernel's arguments; caches in words."""
    ks, vs = ((0, 0, 0) if x is None else x.stride[:3] for x in (f.k_scale_cache, f.v_scale_cache))
    return (
        *f.q.stride[:2], *_word_strides(f.k_cache), *_word_strides(f.v_cache), *ks, *vs, f.page_table.stride[0],
        f.mask.stride[0] if f.mask is not None else 0, *f.out.stride[:2],
        *(f.lse.stride if f.lse is not None else (0, 0)),
    )  # fmt: skip


def run(call: Any, config: Config) -> None:
    if config.empty:
        call.out.zero_()
        if call.lse is not None:
            call.lse.fill_(float("-inf"))
        return
    part = launch.scratch(config.scratch, call.q)
    caches = _caches(call, config)
    call = _as_kernels_take_it(call, config.constants)
    config.split(*_SPLIT(call, part), descriptors=caches)
    config.merge(*_MERGE(call, part))


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    if config.empty:
        return None
    known = None if config.k_box is None or config.v_box is None else config.descriptors
    split = Step(config.split, _SPLIT, ("k_cache", "v_cache"), known)
    return bound([split, Step(config.merge, _MERGE)], at, config.scratch)


def _as_kernels_take_it(call: Any, c: Constants) -> Any:
    """With bytes in place of 8-bit floats, where kernels convert them by themselves."""
    if c.BYTES:
        ks, vs = (launch.as_bytes(x) for x in (call.k_scale_cache, call.v_scale_cache))
        call = call._replace(k_scale_cache=ks, v_scale_cache=vs)
    if c.Q_BYTES:
        call = call._replace(q=call.q.view(torch.uint8))
    return call if c.OUT_KIND == "float" else call._replace(out=call.out.view(torch.uint8))


def _caches(call: Any, config: Config) -> tuple:
    """K and V as the kernel's arguments: 16-bit words, as descriptors where there are boxes."""
    if config.k_box is None or config.v_box is None:
        k, v = call.k_cache, call.v_cache
        if config.split.launch.compiled:
            return k.data_ptr(), v.data_ptr()
        return (k.view(torch.int16), v.view(torch.int16)) if config.constants.PARTS > 1 else (k, v)
    key = (call.k_cache.data_ptr(), call.v_cache.data_ptr())
    found = config.descriptors.get(key)
    if found is None:
        c = config.constants
        k = _descriptor(call.k_cache, config.k_box, c.PARTS, c.TILE, c.BLOCK_D)
        v = _descriptor(call.v_cache, config.v_box, c.PARTS, c.TILE, c.BLOCK_DV)
        if not config.split.launch.compiled:
            return k, v
        if len(config.descriptors) >= _MAX_DESCRIPTORS:
            config.descriptors.clear()
        found = config.descriptors[key] = tuple(x for one in config.split.launch.encoded(k, v) for x in one)
    return found


def _per_head(t: Any) -> int:
    return 1 if t is not None and t.shape[0] > 1 else 0


def _word_strides(x: Any) -> tuple[int, ...]:
    """Strides of page, slot and head in 16-bit words."""
    return tuple(n * x.dtype.itemsize // 2 for n in x.stride[:3])


def _pitch(x: Any) -> int:
    """Rows of a descriptor per page."""
    return x.stride[0] // x.stride[1]


def _head_rows(x: Any) -> int:
    """Rows of a descriptor per head (HND), or 0 where heads lie along the columns (NHD)."""
    return x.stride[2] // x.stride[1] if x.stride[2] >= x.stride[1] else 0


def _box(x: Any, words: int) -> tuple[int, int, int] | None:
    """A cache as one matrix of slots, in words: (rows, row pitch, columns); None where its strides do not make one.

    NHD puts heads along the columns, HND along the rows; K and V in one tensor only widen the pages.
    """
    pages, slots, heads, _ = x.shape
    s_p, s_s, s_h = _word_strides(x)
    if not x.aligned or words < 16 or words != launch.next_power_of_2(words) or s_s % 8 or s_s == 0 or s_p % s_s:
        return None
    if s_h >= s_s:  # HND
        if s_h % s_s:
            return None
        width, last = words, (heads - 1) * (s_h // s_s) + slots
    else:
        if (heads > 1 and s_h < words) or s_h % 8:
            return None
        width, last = (heads - 1) * s_h + words, slots
    rows = (pages - 1) * (s_p // s_s) + last
    return (rows, s_s, width) if width <= s_s and rows < 2**31 else None


def _descriptor(x: torch.Tensor, box: tuple[int, int, int], parts: int, tile: int, block: int) -> TensorDescriptor:
    rows, pitch, columns = box
    words = x.view(torch.int16) if parts > 1 else x
    base = words if launch.interpreting() else launch.Address(words)
    return TensorDescriptor(base, [rows, columns], [pitch, 1], [tile, block])
