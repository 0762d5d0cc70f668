"""Blocks of rows, as every append writes them: plain rows, rotated keys, and queries; and what their kernels share."""

import triton
import triton.language as tl

from ...host.bind import BYTES, given
from .quant import cast, store, store_halves, write_codes
from .rows import (
    all_asked,
    cache_offsets,
    factors,
    find_angles,
    join_pairs,
    locate,
    offsets,
    own_rows,
    read,
    read_codes,
    read_cos_sin,
    read_place,
    read_position,
    read_rope_nope,
    rotate,
    rotate_rows,
    split_pairs,
    take_turn,
    token_and_head,
    write,
)
from .turn import row as turned
from .words import read_words, store_int4_words, store_words

# Where tokens go, of every append.
PLACES = given(
    BYTES, p_slots="slot_mapping", p_batch="batch_indices", p_positions="kv_positions", p_indptr="kv_indptr",
    p_indices="kv_indices",
)  # fmt: skip
# Of appends to K/V caches: what rows are turned by (`turn.row`).
TURNS = given(
    p_k_signs="k_signs", p_v_signs="v_signs", p_k_channels="k_channel_scale", p_v_channels="v_channel_scale",
)  # fmt: skip
# Queries, of every append that rotates.
QUERIES = given(
    BYTES, p_q_rope="q_rope", p_q_nope="q_nope", p_cos_sin="cos_sin_cache", p_rope_positions="positions",
    p_q_rope_out="q_rope_out", p_q_nope_out="q_nope_out", p_q_scale="q_scale_t",
)  # fmt: skip


@triton.jit
def append_rows(
    block, tokens, p_x, strides, p_codes, strides_codes, p_scales, strides_scales, p_scale, scale, places, angles,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    PER_HEAD: tl.constexpr, QUANTIZES: tl.constexpr, NATIVE: tl.constexpr, UNIT: tl.constexpr, WORDS: tl.constexpr,
    ASM: tl.constexpr, OVERLAPS: tl.constexpr, LATE: tl.constexpr, turn,
):  # fmt: skip
    """Quantise and write one block of rows [tokens, H, D]; with `angles`, tokens that have no position are dropped.

    turn:  as `turn.row` takes it

    Rows of bytes are codes of an fp8 cache, and are copied.
    """
    CODES: tl.constexpr = p_x.dtype.element_ty == tl.uint8
    token, head = token_and_head(block, tokens, H, ROWS)
    at_x = offsets(token, head, strides, UNIT // 2 if WORDS else UNIT)
    take_turn(OVERLAPS, LATE)
    if CODES:
        x = read_codes(p_x, at_x, D, C)
    else:
        x = read_words(p_x, at_x, D, C) if WORDS else read(p_x, at_x, D, C)
    place = read_place(token, places)
    if angles[0] is not None:
        position = read_position(token, angles)
    all_asked(OVERLAPS, LATE, False)
    page, entry, written = locate(place, places, PAGE)
    written = written[:, None]
    if angles[0] is not None:
        _, known = find_angles(position, angles)
        written = written & known
    at = cache_offsets(page, entry, head, strides_codes, UNIT)
    at_scales = cache_offsets(page, entry, head, strides_scales, 1)
    if CODES:
        write_codes(p_codes, at, x, written, D)
        return
    x = turned(x, turn, head, D)
    multiplier, global_scale = factors(p_scale, scale, head, PER_HEAD, QUANTIZES)
    FP16: tl.constexpr = p_x.dtype.element_ty == tl.float16
    if WORDS and FORMAT.CODE == "int4":
        store_int4_words(x, p_codes, p_scales, at, at_scales, written, D, FP16, FORMAT.WIDEN)
    elif WORDS:
        tl.static_assert(FORMAT.CODE == "e2m1", "a code that words are not read for")
        store_words(x, p_codes, p_scales, at, at_scales, written, multiplier, global_scale, D, FP16, ASM, WORDS == 2)
    else:
        store(x, p_codes, p_scales, at, at_scales, written, multiplier, global_scale, D, FORMAT, NATIVE)


@triton.jit
def query_rows(
    block, tokens, p_x, strides, p_out, strides_out, p_scale, scale, places, angles,
    H: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr, KIND: tl.constexpr, ZERO_PADDING: tl.constexpr, QUANTIZES: tl.constexpr,
    NATIVE: tl.constexpr, UNIT: tl.constexpr, OVERLAPS: tl.constexpr, LATE: tl.constexpr, ORDERED: tl.constexpr,
):  # fmt: skip
    """One block of query rows: rotated if ROTARY, scaled, cast, written; 0 where the token has no position, and, with
    ZERO_PADDING, where it is skipped."""
    token, head = token_and_head(block, tokens, H, ROWS)
    p_x += offsets(token, head, strides, UNIT)
    p_out += offsets(token, head, strides_out, UNIT)
    take_turn(OVERLAPS, LATE)
    HALF: tl.constexpr = D // 2
    if not ROTARY:
        x = read(p_x, 0, D, C)
        y = x
    elif INTERLEAVED:
        x, y = split_pairs(read(p_x, 0, D, C))
    else:
        x, y = read(p_x, 0, HALF, C // 2), read(p_x, HALF, HALF, C // 2)
    if angles[0] is not None:
        position = read_position(token, angles)
    if ZERO_PADDING:
        place, _ = read_place(token, places)
    all_asked(OVERLAPS, LATE, ORDERED)
    live = token[:, None] >= 0
    if angles[0] is not None:
        p_angles, live = find_angles(position, angles)
    if ROTARY:
        cos, sin = read_cos_sin(p_angles, live, HALF, C // 2)
        x, y = rotate(x, y, cos, sin)
    if ZERO_PADDING:
        live = live & (place >= 0)[:, None]  # negative: the caller skips the token
    multiplier, _ = factors(p_scale, scale, head, False, QUANTIZES)
    x = cast(tl.where(live, x * multiplier, 0.0), p_out.dtype.element_ty, KIND, NATIVE)
    y = cast(tl.where(live, y * multiplier, 0.0), p_out.dtype.element_ty, KIND, NATIVE)
    own = own_rows(block, tokens, H, ROWS)
    if not ROTARY:
        write(p_out, x, own, D)
    elif INTERLEAVED:
        write(p_out, join_pairs(x, y), own, D)
    else:
        write(p_out, x, own, HALF)
        write(p_out + HALF, y, own, HALF)


@triton.jit
def key_rows(
    block, tokens, p_rope, strides_rope, p_nope, strides_nope, p_codes, strides_codes, p_scales, strides_scales,
    p_scale, scale, places, angles,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORMAT: tl.constexpr, PER_HEAD: tl.constexpr, QUANTIZES: tl.constexpr,
    NATIVE: tl.constexpr, UNIT: tl.constexpr, HALVES: tl.constexpr, OVERLAPS: tl.constexpr, LATE: tl.constexpr,
    ORDERED: tl.constexpr, turn,
):  # fmt: skip
    """One block of key rows [rope | nope]: the first part rotated, all quantised and written; dropped where the token
    has no position.

    turn:  as `turn.row` takes it; rows in HALVES are not turned
    """
    token, head = token_and_head(block, tokens, H, ROWS)
    at_rope, at_nope = offsets(token, head, strides_rope, UNIT), offsets(token, head, strides_nope, UNIT)
    HALF: tl.constexpr = D // 2
    take_turn(OVERLAPS, LATE)
    if HALVES:
        a, b = read(p_rope, at_rope, HALF, C // 2), read(p_rope + HALF, at_rope, HALF, C // 2)
    else:
        x = read_rope_nope(p_rope, at_rope, p_nope, at_nope, R, D, C)
    position, place = read_position(token, angles), read_place(token, places)
    all_asked(OVERLAPS, LATE, ORDERED)
    p_angles, known = find_angles(position, angles)
    if HALVES:
        cos, sin = read_cos_sin(p_angles, known, HALF, C // 2)
        a, b = rotate(a, b, cos, sin)
    else:
        x = rotate_rows(x, p_rope, at_rope, p_angles, known, R, C, INTERLEAVED)
        x = turned(x, turn, head, D)
    page, entry, written = locate(place, places, PAGE)
    multiplier, global_scale = factors(p_scale, scale, head, PER_HEAD, QUANTIZES)
    at = cache_offsets(page, entry, head, strides_codes, UNIT)
    at_scales = cache_offsets(page, entry, head, strides_scales, 1)
    written = written[:, None] & known
    if HALVES:
        store_halves(a, b, p_codes, p_scales, at, at_scales, written, multiplier, global_scale, HALF, FORMAT, NATIVE)
    else:
        store(x, p_codes, p_scales, at, at_scales, written, multiplier, global_scale, D, FORMAT, NATIVE)
