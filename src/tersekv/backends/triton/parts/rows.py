"""Rows of the write side: where a token goes, how a row is read and rotated.

A program handles ROWS rows of one tensor; row r is head r % H of token r // H. Where ROWS divides H, a program's rows
belong to one token: its place, position, cos and sin are read once. Past the last row the last one is repeated, so that
reads need no mask, nor writes to a cache, which are equal. What may be written over what was read is written by the row
itself alone (`own_rows`): another warp may read it for the repeated row only afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .quant import reciprocal


@triton.jit
def take_turn(OVERLAPS: tl.constexpr, LATE: tl.constexpr = False):
    """Where launches overlap: lets the next kernel's programs start, and waits until the kernel before is done.

    Nothing may be read or written above this line; what can be worked out above, addresses first, takes no time.
    LATE: the next kernel's programs may start behind `all_asked` only
    """
    if OVERLAPS:
        if not LATE:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def all_asked(OVERLAPS: tl.constexpr, LATE: tl.constexpr, ORDERED: tl.constexpr):
    """Behind all reads that wait for no other, and before their values are used.

    ORDERED: they are asked for here, though the assembler would save registers by asking for rows only when the
             position has come
    """
    if OVERLAPS:
        if LATE:
            gdc_launch_dependents()
        elif ORDERED:
            tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], tl.int32, False, 1)


@triton.jit
def token_and_head(block, tokens, H: tl.constexpr, ROWS: tl.constexpr):
    """Token ([1] where one has all rows, else [ROWS]) and head [ROWS] of each row of a block."""
    first = block * ROWS
    i = tl.arange(0, ROWS)
    if H % ROWS == 0:
        return tl.full([1], first // H, tl.int32), first % H + i
    else:
        row = tl.minimum(first + i, tokens * H - 1)
        return row // H, row % H


@triton.jit
def own_rows(block, tokens, H: tl.constexpr, ROWS: tl.constexpr):
    """Which rows of a block are not repeated: [ROWS, 1], or [1, 1] where none is."""
    if H % ROWS == 0:
        return tl.full([1, 1], True, tl.int1)
    else:
        return (block * ROWS + tl.arange(0, ROWS) < tokens * H)[:, None]


@triton.jit
def offsets(token, head, strides, UNIT: tl.constexpr):
    """int64 offsets [ROWS, 1] of rows [token, head, :]. Strides count UNIT elements: so vectors are known aligned."""
    at = token.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return at[:, None] * UNIT


@triton.jit
def cache_offsets(page, entry, head, strides, UNIT: tl.constexpr):
    """int64 offsets [ROWS, 1] of cache rows [page, entry, head, :]; strides count UNIT elements."""
    at = page * strides[0] + entry * strides[1] + head.to(tl.int64) * strides[2]
    return at[:, None] * UNIT


@triton.jit
def read_place(token, places):
    """What says where tokens go, two int64: the slot (twice), or the request and the position in it.

    places:  pointers slot_mapping, batch_indices, kv_positions, kv_indptr, kv_indices, the first or the others being
             None; then num_pages, num_requests, num_indices
    """
    if places[0] is not None:
        slot = tl.load(places[0] + token).to(tl.int64)
        return slot, slot
    else:
        return tl.load(places[1] + token).to(tl.int64), tl.load(places[2] + token).to(tl.int64)


@triton.jit
def locate(place, places, PAGE: tl.constexpr):
    """(page, entry, written) of tokens: int64, int64, bool. Places outside the cache or the request are not written,
    and their page is any number.

    place:  what `read_place` read
    """
    p_slots, _, _, p_indptr, p_indices, num_pages, num_requests, num_indices = places
    if p_slots is not None:
        slot, _ = place
        written = (slot >= 0) & (slot < num_pages.to(tl.int64) * PAGE)
        slot = tl.where(written, slot, 0).to(tl.uint64)
        return (slot // PAGE).to(tl.int64), (slot % PAGE).to(tl.int64), written
    else:
        b, position = place
        written = (b >= 0) & (b < num_requests) & (position >= 0)
        b = tl.where(written, b, 0)
        position = tl.where(written, position, 0).to(tl.uint64)
        start = tl.load(p_indptr + b, mask=written, other=0).to(tl.int64)
        stop = tl.load(p_indptr + b + 1, mask=written, other=0).to(tl.int64)
        index = start + (position // PAGE).to(tl.int64)
        written = written & (index >= 0) & (index < stop) & (index < num_indices)
        page = tl.load(p_indices + index, mask=written, other=-1).to(tl.int64)
        written = written & (page >= 0) & (page < num_pages)
        # Not selected by `written` once more: Triton 3.6 cannot compile that for int64 indices.
        return page, (position % PAGE).to(tl.int64), written


@triton.jit
def factors(p_scale, scale, head, PER_HEAD: tl.constexpr, QUANTIZES: tl.constexpr):
    """(multiplier, dequantising scale) of rows: [ROWS, 1] with a scale for each head, else scalars.

    scale:  the multiplier, unless the tensor p_scale is given, which multiplies if QUANTIZES, else dequantises
    """
    if p_scale is None:
        return scale, reciprocal(scale)
    else:
        if PER_HEAD:
            given = tl.load(p_scale + head)[:, None]
        else:
            given = tl.load(p_scale)
        if QUANTIZES:
            return given, reciprocal(given)
        else:
            return reciprocal(given), given


@triton.jit
def read(p, at, D: tl.constexpr, C: tl.constexpr):
    """Rows [ROWS, C] as fp32; columns from D on are 0."""
    c = tl.arange(0, C)[None, :]
    if D == C:
        return tl.load(p + at + c).to(tl.float32)
    else:
        return tl.load(p + at + c, mask=c < D, other=0.0).to(tl.float32)


@triton.jit
def read_codes(p, at, D: tl.constexpr, C: tl.constexpr):
    """Rows [ROWS, C] of bytes."""
    c = tl.arange(0, C)[None, :]
    if D == C:
        return tl.load(p + at + c)
    else:
        return tl.load(p + at + c, mask=c < D, other=0)


@triton.jit
def write(p, x, own, D: tl.constexpr):
    """Columns up to D of rows x [ROWS, C], in p's type, at pointers p [ROWS, 1]; own: of `own_rows`."""
    c = tl.arange(0, x.shape[1])[None, :]
    tl.store(p + c, x, mask=own if x.shape[1] == D else own & (c < D))


@triton.jit
def read_cos_sin(p_angles, known, HALF: tl.constexpr, C: tl.constexpr):
    """cos and sin [1 or ROWS, C]; 0 from column HALF on, and where the token has no position.

    They stay in L2, which rows of q, k and v pass through: all heads, and all layers, read them again.
    """
    i = tl.arange(0, C)[None, :]
    live = known & (i < HALF)
    cos = tl.load(p_angles + i, mask=live, other=0.0, eviction_policy="evict_last")
    return cos, tl.load(p_angles + (HALF + i), mask=live, other=0.0, eviction_policy="evict_last")


@triton.jit
def rotate(a, b, cos, sin):
    """Pairs turned by their angles; each product and sum rounded on its own."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def split_pairs(x):
    """[ROWS, C] → two [ROWS, C/2]: even and odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def join_pairs(a, b):
    """Two [ROWS, C/2], even and odd columns → [ROWS, C]."""
    return tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1] * 2])


@triton.jit
def read_rope_nope(p_rope, at_rope, p_nope, at_nope, R: tl.constexpr, D: tl.constexpr, C: tl.constexpr):
    """Rows [rope (R) | nope (D - R)] of two tensors: [ROWS, C] fp32; columns from D on are 0."""
    if R == D:
        return read(p_rope, at_rope, D, C)
    else:
        c = tl.arange(0, C)[None, :]
        rope = tl.load(p_rope + at_rope + c, mask=c < R, other=0.0)
        nope = tl.load(p_nope + at_nope + (c - R), mask=(c >= R) & (c < D), other=0.0)
        return tl.where(c < R, rope, nope).to(tl.float32)


@triton.jit
def rotate_rows(
    x, p_rope, at_rope, p_angles, known,
    R: tl.constexpr, C: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Rows x [ROWS, C] that `read_rope_nope` read, the first part rotated.

    p_angles, known:  as `find_angles` returns them
    """
    HALF: tl.constexpr = R // 2
    if INTERLEAVED:
        cos, sin = read_cos_sin(p_angles, known, HALF, C // 2)
        even, odd = split_pairs(x)
        a, b = rotate(even, odd, cos, sin)
        if R < C:
            i = tl.arange(0, C // 2)[None, :]
            a, b = tl.where(i < HALF, a, even), tl.where(i < HALF, b, odd)
        return join_pairs(a, b)
    else:
        # The other half of each pair is read again, from L1: exchanging registers between threads would take longer.
        c = tl.arange(0, C)[None, :]
        other = tl.where(c < HALF, c + HALF, c - HALF)
        partner = tl.load(p_rope + at_rope + other, mask=c < R, other=0.0).to(tl.float32)
        # cos and sin for each row, though a token's rows share them: then they lie in registers as x does.
        i = tl.zeros_like(at_rope) + tl.where(c < HALF, c, c - HALF)
        live = known & (c < R)
        cos = tl.load(p_angles + i, mask=live, other=0.0, eviction_policy="evict_last")
        sin = tl.load(p_angles + (HALF + i), mask=live, other=0.0, eviction_policy="evict_last")
        rotated = x * cos + partner * tl.where(c < HALF, -sin, sin)
        return rotated if R == C else tl.where(c < R, rotated, x)


@triton.jit
def read_position(token, angles):
    """The tokens' positions, int64 [1, 1] or [ROWS, 1].

    angles:  pointers cos_sin_cache and positions; then max_pos and the stride of a row
    """
    return tl.load(angles[1] + token).to(tl.int64)[:, None]


@triton.jit
def find_angles(position, angles):
    """(pointer to the position's row [cos(R/2) | sin(R/2)], is there one), of the position's shape."""
    p_cos_sin, _, max_pos, stride = angles
    known = (position >= 0) & (position < max_pos)
    return p_cos_sin + tl.where(known, position, 0) * stride, known
