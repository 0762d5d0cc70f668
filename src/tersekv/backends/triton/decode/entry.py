"""Paged decode in Triton: two launches, the split pass and the merge of cut segments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ....formats import BATCH_INVARIANCE, BLOCK, CHANNELS, PAIRS, ROTATION, TOKEN_HEAD, KVFormat, pair_of
from ...host import launch
from ...host.bind import BYTES, WORDS, Bound, Described, Instead, Launches, Template, given, step_of, strides
from ...host.record import Record
from ...host.split_merge import alone, features, launches, merged_pieces, piece_tiles, reads, writes
from ..parts.merge import merge_kernel, merge_pieces_kernel
from ..parts.shares import META_FIELDS
from .kernels import decode_kernel
from .tune import Tiles, tiles, two_terms

TAKES = (PAIRS, ROTATION, CHANNELS, BATCH_INVARIANCE)


@dataclass(frozen=True)
class Codes(Record):
    """What rows are stored as."""

    CODE: str  # KVFormat.code
    PARTS: int  # codes in a 16-bit word
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    BYTES: bool  # e4m3 block scales come as uint8 and are converted by hand
    ASM: bool  # unpack by PTX
    STEP: int  # words: the unit of strides, by `step_of`
    SCALE_STEP: int  # of rows of block scales, in bytes


@dataclass(frozen=True)
class Constants(Record):
    """What the kernels are compiled for. The names are theirs."""

    K: Codes  # keys; those that follow are of values, and PARTS of outputs
    CODE: str
    PARTS: int
    TOKEN_SCALES: bool
    BLOCK_SCALES: bool
    BYTES: bool
    ASM: bool
    STEP: int
    SCALE_STEP: int
    BF16: bool  # multiply in bf16; else fp16
    TWO: bool  # the query is multiplied as the sum of two bf16 tiles
    Q_BYTES: bool  # the query is e4m3 and comes as bytes
    HEADS: int
    GROUP: int
    D: int
    DV: int
    WORDS_K: int  # D / K.PARTS
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
    PART_ROWS: int  # of a state
    PART_COLUMNS: int
    MERGE_PIECES: int
    MERGE_COLUMNS: int
    PIECE: int = 0  # least tiles of a piece, where requests are cut by their own lengths; 0: equal shares
    FAR: bool = False  # a page is longer than int32 counts


class Config(NamedTuple):
    constants: Constants
    launches: Launches | Instead


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
    t = tiles(alone(f), pair_of(f)[0])
    caches = _described(f, t)
    c = constants(f, t, bool(caches))
    options: dict[str, Any] = {"num_warps": t.num_warps, "num_stages": t.stages}
    if launch.has_ptx(f):
        options["maxnreg"] = t.max_registers
    num_programs = max(launch.num_sms(f) * t.programs_per_sm // max(c.HEADS, 1), 1) * c.HEADS
    both = writes(f, c.OUT_KIND != "float") | given(SINKS="sinks", V_T="v_scale_t") | {"v_scale": f.v_scale, "c": c}
    split = both | reads(f) | _strides(f) | turns_of(f) | (caches or given(WORDS, K="k_cache", V="v_cache")) | {
        **given(BYTES if c.Q_BYTES else "", Q="q"),
        **given(BYTES if c.BYTES else "", KS="k_scale_cache", VS="v_scale_cache"),
        **given(K_T="k_scale_t"), **mask_of(f), "k_scale": f.k_scale, "softcap": f.softcap, "slots": 0,
    }  # fmt: skip
    first = Template(decode_kernel, (num_programs,), split, **options)
    if c.PIECE:
        return Config(c, merged_pieces(f, first, merge_pieces_kernel, both, c.PAGE))
    merge_rows = min(t.rows, f.max_q_len * c.GROUP)
    return Config(c, launches(
        f, first,
        # It reads no lengths: numbers of requests would compile it anew.
        Template(merge_kernel, (num_programs, merge_rows), both | {"c": replace(c, BLOCK_B=0)}, num_warps=4),
        num_programs * (2 * c.ROWS * c.PART_COLUMNS + META_FIELDS.value),
    ))  # fmt: skip


def mask_of(f: SimpleNamespace) -> dict[str, Any]:
    """The tree mask as an argument; a prefill that comes here has no such field."""
    return {"MASK": None} if f.mask is None else given(MASK="mask")


def turns_of(f: SimpleNamespace) -> dict[str, Any]:
    """Signs and channel scales as arguments."""
    found = given(K_SIGNS="k_signs", V_SIGNS="v_signs", K_CHANNELS="k_channel_scale", V_CHANNELS="v_channel_scale")
    return found | strides(f.k_channel_scale, skc_="h") | strides(f.v_channel_scale, svc_="h")


def constants(f: SimpleNamespace, t: Tiles, tma: bool) -> Constants:
    return Constants(**format_constants(f), **_geometry(f, t, tma), **_features(f))


def codes_a_word(fmt: KVFormat) -> int:
    """Codes in a 16-bit word."""
    return 2 * fmt.values_per_element // fmt.storage.itemsize


def format_constants(f: SimpleNamespace) -> dict[str, Any]:
    """Of the codes and the query, and how they are unpacked."""
    by_hand, (k, v) = launch.e4m3_by_hand(f), pair_of(f)
    k_codes, v_codes = (
        Codes(
            CODE=fmt.code,
            PARTS=codes_a_word(fmt),
            TOKEN_SCALES=fmt.scale == TOKEN_HEAD,
            BLOCK_SCALES=fmt.scale == BLOCK,
            BYTES=by_hand,
            ASM=launch.has_ptx(f) and not (fmt.code == "e4m3" and by_hand),
            STEP=step_of(x, word_strides(x), 8),
            SCALE_STEP=step_of(s, s.stride[:3], 16) if fmt.scale == BLOCK else 1,
        )
        for fmt, x, s in ((k, f.k_cache, f.k_scale_cache), (v, f.v_cache, f.v_scale_cache))
    )
    return {
        "K": k_codes,
        **v_codes,
        "BF16": k.code == "bf16",
        "TWO": two_terms(f, k),
        "Q_BYTES": by_hand and f.q.dtype == torch.float8_e4m3fn,
        "K_FACTOR": 128.0 if k.scale == BLOCK else 1.0,  # left over by tiles.block_scales
        "V_FACTOR": 128.0 if v.scale == BLOCK else 1.0,
    }


def columns_of(f: SimpleNamespace) -> dict[str, int]:
    """Sizes of rows, in columns and in words."""
    d, dv, (k, v) = f.q.shape[2], f.out.shape[2], map(codes_a_word, pair_of(f))
    return {
        "D": d,
        "DV": dv,
        "WORDS_K": d // k,
        "WORDS_V": dv // v,
        "BLOCK_D": max(16, launch.next_power_of_2(d // k)),
        "BLOCK_DV": max(16, launch.next_power_of_2(dv // v)),
    }


def at_once(requests: int) -> int:
    """Requests that a kernel looks at together. Few sizes, since each is a kernel to compile."""
    return next((n for n in (1, 16, 64, 256, 512) if requests <= n), 1024)


def _geometry(f: SimpleNamespace, t: Tiles, tma: bool) -> dict[str, Any]:
    page, heads, parts, columns = f.k_cache.shape[1], f.k_cache.shape[2], codes_a_word(pair_of(f)[1]), columns_of(f)
    return {
        **columns,
        "HEADS": heads,
        "GROUP": f.q.shape[1] // max(heads, 1),
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
        "BLOCK_B": at_once(f.seq_lens.shape[0]),
        "MIN_TILES": t.min_tiles,
        "PART_ROWS": min(t.rows, f.max_q_len * (f.q.shape[1] // max(heads, 1))) if f.batch_invariant else t.rows,
        "PART_COLUMNS": parts * columns["BLOCK_DV"] + 2,
        "MERGE_PIECES": 16,
        "MERGE_COLUMNS": parts * columns["BLOCK_DV"],
        "PIECE": piece_tiles(f, t.tile),
        "FAR": launch.spans_far(f.k_cache, f.v_cache, f.k_scale_cache, f.v_scale_cache),
    }


def _features(f: SimpleNamespace) -> dict[str, Any]:
    return features(f) | {
        "HAS_MASK": f.mask is not None,
        **option_constants(f),
    }


def option_constants(f: SimpleNamespace) -> dict[str, Any]:
    return {
        "WINDOW": f.window,
        "HAS_SINKS": f.sinks is not None,
        "SOFTCAP": f.softcap > 0,
        "K_T": f.k_scale_t is not None,
        "K_T_STRIDE": per_head(f.k_scale_t),
        "V_T": f.v_scale_t is not None,
        "V_T_STRIDE": per_head(f.v_scale_t),
    }


def _strides(f: SimpleNamespace) -> dict[str, int]:
    """Of what the split pass reads; of caches as `cache_strides`."""
    found = strides(f.q, sq_="th") | cache_strides(f)
    return found | {"sm_t": f.mask.stride[0] if f.mask is not None else 0}


def cache_strides(f: SimpleNamespace) -> dict[str, int]:
    """Of pages, slots and heads: codes in words, all in units of their side's STEP or SCALE_STEP."""
    found: dict[str, int] = {}
    constants = format_constants(f)
    keys = constants["K"]
    for side, x, scales, step, scale_step in (
        ("k", f.k_cache, f.k_scale_cache, keys.STEP, keys.SCALE_STEP),
        ("v", f.v_cache, f.v_scale_cache, constants["STEP"], constants["SCALE_STEP"]),
    ):
        found |= {f"s{side}_{letter}": n // step for letter, n in zip("psh", word_strides(x), strict=True)}
        found |= {name: n // scale_step for name, n in strides(scales, **{f"s{side}s_": "psh"}).items()}
    return found


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)


def _described(f: SimpleNamespace, t: Tiles) -> dict[str, Described]:
    """K and V as descriptors of 16-bit words, where each is a matrix; else none, for pointers."""
    if not t.tma or f.k_cache.shape[1] % t.tile or not launch.has_tma(f):
        return {}
    found = {}
    sides = zip(("K", "V"), ("k_cache", "v_cache"), (f.q, f.out), pair_of(f), strict=True)
    for argument, name, x, fmt in sides:
        parts = codes_a_word(fmt)
        words = x.shape[2] // parts
        box = _box(getattr(f, name), words)
        if box is None:
            return {}
        block = max(16, launch.next_power_of_2(words))
        found[argument] = Described(name, partial(_descriptor, box=box, parts=parts, tile=t.tile, block=block))
    return found


def per_head(t: Any) -> int:
    return 1 if t is not None and t.shape[0] > 1 else 0


def word_strides(x: Any) -> tuple[int, ...]:
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
    s_p, s_s, s_h = word_strides(x)
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
