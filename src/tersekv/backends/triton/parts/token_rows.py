"""Rows of the write side: how a token's slot is found, and how a row is loaded and rotated.

A program handles ROWS rows of one tensor; row r is head r % H of token r // H. Where ROWS divides H, a program's rows
belong to one token: its slot, position, cos and sin are loaded once. Past the last row the last one is repeated, so
that loads need no mask, nor stores to a cache, which are equal. Where outputs may overwrite inputs, only the row itself
stores (`unique_rows_mask`): another warp may load the repeated row only afterwards.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .quant import reciprocal_rn


@triton.jit
def pdl_early_launch_and_wait(USE_PDL: tl.constexpr, PDL_LAUNCH_LATE: tl.constexpr = False):
    """With PDL: lets the next kernel's programs start, and waits until the previous kernel is done.

    Nothing may be loaded or stored before this line; arithmetic before it, addresses first, is free.
    PDL_LAUNCH_LATE: the next kernel's programs may start only at `pdl_late_launch_or_order_loads`
    """
    if USE_PDL:
        if not PDL_LAUNCH_LATE:
            gdc_launch_dependents()
        gdc_wait()


@triton.jit
def pdl_late_launch_or_order_loads(USE_PDL: tl.constexpr, PDL_LAUNCH_LATE: tl.constexpr, ORDER_LOADS: tl.constexpr):
    """Goes behind all independent loads, and before the use of their values.

    ORDER_LOADS: loads are issued here, though ptxas would save registers by issuing those of rows only after the
    position has arrived
    """
    if USE_PDL:
        if PDL_LAUNCH_LATE:
            gdc_launch_dependents()
        elif ORDER_LOADS:
            tl.inline_asm_elementwise("bar.warp.sync 0xffffffff; // $0", "=r", [], tl.int32, False, 1)


@triton.jit
def clamped_token_and_head_of_rows(i_block, num_tokens, H: tl.constexpr, ROWS: tl.constexpr):
    """Returns token ([1] where one has all rows, else [ROWS]) and head [ROWS] of each row of a block."""
    first_row = i_block * ROWS
    o_row = tl.arange(0, ROWS)
    if H % ROWS == 0:
        return tl.full([1], first_row // H, tl.int32), first_row % H + o_row
    else:
        i_row = tl.minimum(first_row + o_row, num_tokens * H - 1)
        return i_row // H, i_row % H


@triton.jit
def unique_rows_mask(i_block, num_tokens, H: tl.constexpr, ROWS: tl.constexpr):
    """Returns which rows of a block are not repeats: [ROWS, 1], or [1, 1] where none is."""
    if H % ROWS == 0:
        return tl.full([1, 1], True, tl.int1)
    else:
        return (i_block * ROWS + tl.arange(0, ROWS) < num_tokens * H)[:, None]


@triton.jit
def row_offsets(token, head, strides, STRIDE_UNIT: tl.constexpr):
    """Returns int64 offsets [ROWS, 1] of rows [token, head, :]. Strides count STRIDE_UNIT elements, for alignment."""
    o_rows = token.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]
    return o_rows[:, None] * STRIDE_UNIT


@triton.jit
def cache_row_offsets(page, page_slot, head, strides, STRIDE_UNIT: tl.constexpr):
    """Returns int64 offsets [ROWS, 1] of cache rows [page, slot, head, :]; strides count STRIDE_UNIT elements."""
    o_rows = page * strides[0] + page_slot * strides[1] + head.to(tl.int64) * strides[2]
    return o_rows[:, None] * STRIDE_UNIT


@triton.jit
def load_slot_or_request_and_position(token, slot_args):
    """Loads two int64 that locate tokens: the slot (twice), or the request and the position in it.

    slot_args:  pointers slot_mapping, batch_indices, kv_positions, kv_indptr, kv_indices, the first or the others being
    None; then num_pages, num_requests, num_indices
    """
    if slot_args[0] is not None:
        slot = tl.load(slot_args[0] + token).to(tl.int64)
        return slot, slot
    else:
        return tl.load(slot_args[1] + token).to(tl.int64), tl.load(slot_args[2] + token).to(tl.int64)


@triton.jit
def resolve_page_slot_and_write_mask(token_slot, slot_args, PAGE: tl.constexpr):
    """Returns (page, slot, m_write) of tokens: int64, int64, bool. Outside the cache or the request m_write is False
    and page arbitrary.

    token_slot:  from `load_slot_or_request_and_position`
    """
    p_slot_mapping, _, _, p_kv_indptr, p_kv_indices, num_pages, num_requests, num_indices = slot_args
    if p_slot_mapping is not None:
        slot, _ = token_slot
        m_write = (slot >= 0) & (slot < num_pages.to(tl.int64) * PAGE)
        slot = tl.where(m_write, slot, 0).to(tl.uint64)
        return (slot // PAGE).to(tl.int64), (slot % PAGE).to(tl.int64), m_write
    else:
        i_request, position = token_slot
        m_write = (i_request >= 0) & (i_request < num_requests) & (position >= 0)
        i_request = tl.where(m_write, i_request, 0)
        position = tl.where(m_write, position, 0).to(tl.uint64)
        start = tl.load(p_kv_indptr + i_request, mask=m_write, other=0).to(tl.int64)
        end = tl.load(p_kv_indptr + i_request + 1, mask=m_write, other=0).to(tl.int64)
        i_page = start + (position // PAGE).to(tl.int64)
        m_write = m_write & (i_page >= 0) & (i_page < end) & (i_page < num_indices)
        page = tl.load(p_kv_indices + i_page, mask=m_write, other=-1).to(tl.int64)
        m_write = m_write & (page >= 0) & (page < num_pages)
        # Not masked by `m_write` again: Triton 3.6 cannot compile that for int64 indices.
        return page, (position % PAGE).to(tl.int64), m_write


@triton.jit
def load_quant_multiplier_and_dequant_scale(
    p_scale, multiplier_if_no_ptr, head, SCALE_PER_HEAD: tl.constexpr, LOADED_IS_MULTIPLIER: tl.constexpr
):
    """Returns (multiplier, dequantizing scale) of rows: [ROWS, 1] with a scale for each head, else scalars.

    LOADED_IS_MULTIPLIER: the tensor at p_scale multiplies rows, else it dequantizes them
    """
    if p_scale is None:
        return multiplier_if_no_ptr, reciprocal_rn(multiplier_if_no_ptr)
    else:
        if SCALE_PER_HEAD:
            loaded_scale = tl.load(p_scale + head)[:, None]
        else:
            loaded_scale = tl.load(p_scale)
        if LOADED_IS_MULTIPLIER:
            return loaded_scale, reciprocal_rn(loaded_scale)
        else:
            return reciprocal_rn(loaded_scale), loaded_scale


@triton.jit
def load_rows_as_fp32(p, o_rows, D: tl.constexpr, D_PAD: tl.constexpr):
    """Loads rows [ROWS, D_PAD] as fp32; columns from D on are 0."""
    c = tl.arange(0, D_PAD)[None, :]
    if D == D_PAD:
        return tl.load(p + o_rows + c).to(tl.float32)
    else:
        return tl.load(p + o_rows + c, mask=c < D, other=0.0).to(tl.float32)


@triton.jit
def load_code_rows(p, o_rows, D: tl.constexpr, D_PAD: tl.constexpr):
    """Loads rows [ROWS, D_PAD] of bytes."""
    c = tl.arange(0, D_PAD)[None, :]
    if D == D_PAD:
        return tl.load(p + o_rows + c)
    else:
        return tl.load(p + o_rows + c, mask=c < D, other=0)


@triton.jit
def store_rows(p, x, m_unique, D: tl.constexpr):
    """Stores columns up to D of rows x [ROWS, C], in p's type, at pointers p [ROWS, 1], where m_unique."""
    c = tl.arange(0, x.shape[1])[None, :]
    tl.store(p + c, x, mask=m_unique if x.shape[1] == D else m_unique & (c < D))


@triton.jit
def load_cos_sin_or_zeros(p_cos_sin_row, has_position, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Loads cos and sin [1 or ROWS, HALF_PAD]; 0 from column HALF on, and where the token has no position.

    They stay in L2, past which q, k and v stream: all heads, and all layers, load them again.
    """
    i = tl.arange(0, HALF_PAD)[None, :]
    valid = has_position & (i < HALF)
    cos = tl.load(p_cos_sin_row + i, mask=valid, other=0.0, eviction_policy="evict_last")
    return cos, tl.load(p_cos_sin_row + (HALF + i), mask=valid, other=0.0, eviction_policy="evict_last")


@triton.jit
def apply_rope(a, b, cos, sin):
    """Returns pairs rotated by their angles; each product and sum rounded on its own."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def deinterleave_pairs(x):
    """Splits [ROWS, C] into two [ROWS, C/2]: even and odd columns."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def interleave_pairs(a, b):
    """Joins two [ROWS, C/2], even and odd columns, to [ROWS, C]."""
    return tl.reshape(tl.join(a, b), [a.shape[0], a.shape[1] * 2])


@triton.jit
def load_rope_nope_rows_as_fp32(p_rope, o_rope, p_nope, o_nope, R: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr):
    """Loads rows [rope (R) | nope (D - R)] of two tensors: [ROWS, D_PAD] fp32; columns from D on are 0."""
    if R == D:
        return load_rows_as_fp32(p_rope, o_rope, D, D_PAD)
    else:
        c = tl.arange(0, D_PAD)[None, :]
        rope = tl.load(p_rope + o_rope + c, mask=c < R, other=0.0)
        nope = tl.load(p_nope + o_nope + (c - R), mask=(c >= R) & (c < D), other=0.0)
        return tl.where(c < R, rope, nope).to(tl.float32)


@triton.jit
def apply_rope_to_rows(
    x, p_rope, o_rope, p_cos_sin_row, has_position,
    R: tl.constexpr, D_PAD: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Returns rows x [ROWS, D_PAD] of `load_rope_nope_rows_as_fp32`, the first part rotated.

    p_cos_sin_row, has_position:  from `cos_sin_row_ptr_and_mask`
    """
    HALF: tl.constexpr = R // 2
    if INTERLEAVED:
        cos, sin = load_cos_sin_or_zeros(p_cos_sin_row, has_position, HALF, D_PAD // 2)
        even, odd = deinterleave_pairs(x)
        a, b = apply_rope(even, odd, cos, sin)
        if R < D_PAD:
            i = tl.arange(0, D_PAD // 2)[None, :]
            a, b = tl.where(i < HALF, a, even), tl.where(i < HALF, b, odd)
        return interleave_pairs(a, b)
    else:
        # The other half of each pair is loaded again, from L1: exchanging registers between threads would take longer.
        c = tl.arange(0, D_PAD)[None, :]
        other = tl.where(c < HALF, c + HALF, c - HALF)
        partner = tl.load(p_rope + o_rope + other, mask=c < R, other=0.0).to(tl.float32)
        # cos and sin for each row, though equal for a token's rows: so they have x's layout.
        i = tl.zeros_like(o_rope) + tl.where(c < HALF, c, c - HALF)
        valid = has_position & (c < R)
        cos = tl.load(p_cos_sin_row + i, mask=valid, other=0.0, eviction_policy="evict_last")
        sin = tl.load(p_cos_sin_row + (HALF + i), mask=valid, other=0.0, eviction_policy="evict_last")
        rotated = x * cos + partner * tl.where(c < HALF, -sin, sin)
        return rotated if R == D_PAD else tl.where(c < R, rotated, x)


@triton.jit
def load_rope_positions(p_positions, token):
    """Loads the tokens' positions, int64 [1, 1] or [ROWS, 1]."""
    return tl.load(p_positions + token).to(tl.int64)[:, None]


@triton.jit
def cos_sin_row_ptr_and_mask(position, rope_args):
    """Returns (pointer to the position's row [cos(R/2) | sin(R/2)], whether it exists), of the position's shape.

    rope_args:  pointers cos_sin_cache and positions; then max_pos and the stride of a row
    """
    p_cos_sin, _, max_pos, stride_row = rope_args
    has_position = (position >= 0) & (position < max_pos)
    return p_cos_sin + tl.where(has_position, position, 0) * stride_row, has_position
