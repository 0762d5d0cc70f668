"""Paged MLA decode in Triton: two launches, the split pass and decode's merge of cut segments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from ....formats import BATCH_INVARIANCE, GROUP, LATENT_GROUP, KVFormat, latent_format
from ...host import launch
from ...host.bind import BYTES, WORDS, Bound, Described, Instead, Launches, Template, given, step_of, strides
from ...host.record import Record
from ...host.split_merge import alone, features, launches, merged_pieces, piece_tiles, reads, writes
from ..parts.merge import merge_kernel, merge_pieces_kernel
from ..parts.shares import META_FIELDS
from .kernels import mla_decode_kernel
from .tune import Tiles, tiles

MAX_RANK, MAX_ROPE = 512, 128


@dataclass(frozen=True)
class Constants(Record):
    """What the kernels are compiled for. The names are theirs and, for what they share, those of decode."""

    CODE: str  # KVFormat.code
    PARTS: int  # codes in a 16-bit word of the latent part
    PARTS_R: int  # of the rotary part
    GROUP_SCALES: bool
    ASM: bool  # unpack by PTX
    BF16: bool  # multiply latents in bf16; else fp16
    BF16_R: bool  # rotary parts
    TWO: bool  # an fp16 query meets bf16 latents as the sum of two bf16 tiles
    TWO_R: bool
    Q_SCALED: bool  # a power of two is taken out of each query row, which fp16 would not hold
    Q_BYTES: bool  # the query is e4m3 and comes as bytes
    HEADS: int  # blocks of query heads
    GROUP: int  # query heads of a block
    DV: int
    WORDS_V: int
    WORDS_R: int
    BLOCK_DV: int
    BLOCK_R: int
    CHUNK: int  # words of the latent part that are loaded and multiplied as one tile
    CHUNKS: int
    PAGE: int
    TILE: int
    ONE_PAGE: bool
    TMA: bool
    FETCH: bool  # rows are carried in registers from the step before, where Triton would not pipeline their loads
    C_PITCH: int  # rows of a descriptor per page
    P_PITCH: int
    ROWS: int
    BLOCK_B: int
    MIN_TILES: int
    MAX_Q: int
    RAGGED: bool
    HAS_LSE: bool
    SOFTMAX_T: bool
    V_T: bool
    OUT_T: bool
    OUT_MAX: float
    OUT_KIND: str  # "e4m3" or "e5m2": the output is written as bytes, by bit arithmetic; "float": by the chip's cast
    PART_ROWS: int  # of a state
    PART_COLUMNS: int
    MERGE_COLUMNS: int
    MERGE_PIECES: int = 16
    WINDOW: int = 0
    HAS_SINKS: bool = False
    V_T_STRIDE: int = 0
    V_FACTOR: float = 1.0
    PIECE: int = 0  # least tiles of a piece, where requests are cut by their own lengths; 0: equal shares
    FAR: bool = False  # a page is longer than int32 counts
    C_STEP: int = 1  # words: the unit of the latent rows' strides, by `step_of`
    P_STEP: int = 1  # of the rotary parts'
    WHOLE: bool = False  # of the Gluon kernels: a program has a segment, and nothing is cut


class Box(NamedTuple):
    """A matrix that a descriptor reads, in 16-bit words."""

    rows: int
    pitch: int
    columns: int


class Config(NamedTuple):
    constants: Constants
    boxes: tuple[Box, ...]  # of ckv and kpe; empty: pointers
    launches: Launches | Instead


TAKES = (BATCH_INVARIANCE,)


def why_not(f: SimpleNamespace) -> str | None:
    reason = launch.why_not(f)
    if reason:
        return reason
    rank, rope = f.ckv.shape[2], f.kpe.shape[2]
    if rank % 16 or not 0 < rank <= MAX_RANK:
        return f"wants a latent rank that is a multiple of 16 up to {MAX_RANK}, got {rank}"
    if rope % 8 or not 0 < rope <= MAX_ROPE:
        return f"wants a rotary part that is a multiple of 8 up to {MAX_ROPE}, got {rope}"
    for name in ("ckv", "kpe"):
        x = getattr(f, name)
        if any(n * x.dtype.itemsize % 2 for n in x.stride[:2]):
            return f"wants {name} with strides of whole 16-bit words, got {list(x.stride)}"
        if not x.even:
            return f"wants {name} to begin with a whole 16-bit word, got an odd address"
    if f.q_nope.dtype == torch.float32:
        return "wants a 16-bit or 8-bit q, got float32"
    return None


def configure(f: SimpleNamespace) -> Config:
    fmt = latent_format(f.format)
    t = tiles(alone(f), fmt)
    heads = f.q_nope.shape[1]
    # Blocks of heads read the same rows side by side; where heads do not fill blocks, rows are cut into segments.
    blocks = heads // t.rows if heads and heads % t.rows == 0 else 1
    boxes = _boxes(f, t)
    c = Constants(**_format(f, fmt), **_geometry(f, fmt, t, blocks, bool(boxes)), **_features(f))
    options: dict[str, Any] = {"num_warps": t.num_warps, "num_stages": t.stages}
    if launch.has_ptx(f):
        options["maxnreg"] = t.max_registers
    num_programs = max(launch.num_sms(f) * t.programs_per_sm // blocks, 1) * blocks
    both = writes(f, c.OUT_KIND != "float") | {"c": c}
    split = both | queries(f, BYTES if c.Q_BYTES else "") | reads(f) | _strides(f) | {
        **given(WORDS, CKV="ckv", KPE="kpe"), "BOX_C": None, "BOX_P": None, **_described(boxes, c),
        **given(SCALES="ckv_scale_cache"), "slots": 0,
    }  # fmt: skip
    merge = both | given(V_T="kv_scale_t") | {"SINKS": None, "v_scale": f.kv_scale}
    first = Template(mla_decode_kernel, (num_programs,), split, **options)
    if c.PIECE:
        return Config(c, boxes, merged_pieces(f, first, merge_pieces_kernel, merge, c.PAGE))
    merge_rows = min(t.rows, f.max_q_len * c.GROUP)
    return Config(c, boxes, launches(
        f, first,
        Template(merge_kernel, (num_programs, merge_rows), merge, num_warps=4),
        num_programs * (2 * c.ROWS * c.PART_COLUMNS + META_FIELDS.value),
    ))  # fmt: skip


def queries(f: SimpleNamespace, seen: str = "") -> dict[str, Any]:
    """Arguments of any split pass: queries, and the scale of latents."""
    tensors = given(seen, QN="q_nope", QP="q_pe") | given(KV_T="kv_scale_t")
    return tensors | strides(f.q_nope, sn_="th") | strides(f.q_pe, sr_="th") | {"kv_scale": f.kv_scale}


def _format(f: SimpleNamespace, fmt: KVFormat) -> dict[str, Any]:
    by_hand, q = launch.e4m3_by_hand(f), f.q_nope.dtype
    bf16, bf16_r = (x.dtype == torch.bfloat16 for x in (f.ckv, f.kpe))
    return {
        "CODE": fmt.code,
        "PARTS": 2 // fmt.storage.itemsize,
        "PARTS_R": 2 // f.kpe.dtype.itemsize,
        "GROUP_SCALES": fmt.scale == GROUP,
        "ASM": launch.has_ptx(f) and not (fmt.code == "e4m3" and by_hand),
        "BF16": bf16,
        "BF16_R": bf16_r,
        "TWO": bf16 and q == torch.float16,
        "TWO_R": bf16_r and q == torch.float16,
        "Q_SCALED": not bf16 and q == torch.bfloat16,
        "Q_BYTES": by_hand and q == torch.float8_e4m3fn,
    }


def _geometry(f: SimpleNamespace, fmt: KVFormat, t: Tiles, blocks: int, tma: bool) -> dict[str, Any]:
    rank, page, parts = f.ckv.shape[2], f.ckv.shape[1], 2 // fmt.storage.itemsize
    words, words_r = rank // parts, f.kpe.shape[2] * f.kpe.dtype.itemsize // 2
    block_dv = max(16, launch.next_power_of_2(words))
    chunk = min(LATENT_GROUP // parts if fmt.scale == GROUP else t.chunk, block_dv)
    return {
        "HEADS": blocks,
        "GROUP": f.q_nope.shape[1] // blocks,
        "DV": rank,
        "WORDS_V": words,
        "WORDS_R": words_r,
        "BLOCK_DV": block_dv,
        "BLOCK_R": max(16, launch.next_power_of_2(words_r)),
        "CHUNK": chunk,
        "CHUNKS": -(-words // chunk),
        "PAGE": page,
        "TILE": t.tile,
        "ONE_PAGE": page % t.tile == 0,
        "TMA": tma,
        "FETCH": parts > 1 and not tma,
        "C_PITCH": f.ckv.stride[0] // f.ckv.stride[1] if tma else 0,
        "P_PITCH": f.kpe.stride[0] // f.kpe.stride[1] if tma else 0,
        "ROWS": t.rows,
        "BLOCK_B": min(1024, launch.next_power_of_2(max(f.seq_lens.shape[0], 1))),
        "MIN_TILES": t.min_tiles,
        "PART_ROWS": min(t.rows, f.max_q_len * (f.q_nope.shape[1] // blocks)) if f.batch_invariant else t.rows,
        "PART_COLUMNS": parts * block_dv + 2,
        "MERGE_COLUMNS": parts * block_dv,
        "PIECE": piece_tiles(f, t.tile),
        "FAR": launch.spans_far(f.ckv, f.kpe, f.ckv_scale_cache),
        "C_STEP": step_of(f.ckv, _word_strides(f.ckv), 8),
        "P_STEP": step_of(f.kpe, _word_strides(f.kpe), 8),
    }


def _features(f: SimpleNamespace) -> dict[str, Any]:
    return features(f) | {"V_T": f.kv_scale_t is not None}


def _strides(f: SimpleNamespace) -> dict[str, int]:
    """Of caches, in words and units of C_STEP and P_STEP, and of their stored scales."""
    found = strides(f.ckv_scale_cache, ss_="ps")
    for prefix, x in (("sc_", f.ckv), ("sp_", f.kpe)):
        distances = _word_strides(x)
        step = step_of(x, distances, 8)
        found |= {prefix + letter: n // step for letter, n in zip("ps", distances, strict=True)}
    return found


def run(call: Any, config: Config) -> None:
    config.launches(call)


def bind(config: Config, at: dict[str, int]) -> Bound | None:
    return config.launches.bind(at)


def _described(boxes: tuple[Box, ...], c: Constants) -> dict[str, Described]:
    """Both parts of a cache as descriptors of words; none without boxes."""
    parts = zip(("BOX_C", "BOX_P"), ("ckv", "kpe"), boxes, (c.CHUNK, c.BLOCK_R), strict=False)
    return {
        argument: Described(name, partial(_descriptor, box=box, tile=c.TILE, block=block))
        for argument, name, box, block in parts
    }


def _word_strides(x: Any) -> tuple[int, int]:
    """Strides of page and slot in 16-bit words."""
    return x.stride[0] * x.dtype.itemsize // 2, x.stride[1] * x.dtype.itemsize // 2


def _boxes(f: SimpleNamespace, t: Tiles) -> tuple[Box, ...]:
    """Of ckv and kpe; none where tiles do not lie in one page or a part is no matrix."""
    if not t.tma or f.ckv.shape[1] % t.tile or not launch.has_tma(f):
        return ()
    found = _box(f.ckv), _box(f.kpe)
    return () if found[0] is None or found[1] is None else (found[0], found[1])


def _box(x: Any) -> Box | None:
    """A part of a latent cache as one matrix of slots, in words. A descriptor gives 0 behind its columns."""
    pages, slots, columns = x.shape
    s_p, s_s = _word_strides(x)
    words = columns * x.dtype.itemsize // 2
    if not x.aligned or s_s % 8 or s_s < words or s_p % s_s or pages == 0:
        return None
    rows = (pages - 1) * (s_p // s_s) + slots
    return Box(rows, s_s, words) if rows < 2**31 else None


def _descriptor(x: torch.Tensor, box: Box, tile: int, block: int) -> TensorDescriptor:
    words = x.view(torch.int16) if x.element_size() == 1 else x
    base = words if launch.interpreting() else launch.Address(words)
    return TensorDescriptor(base, [box.rows, box.columns], [box.pitch, 1], [tile, block])
