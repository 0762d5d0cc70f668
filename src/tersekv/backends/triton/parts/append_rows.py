"""Blocks of rows as every append stores them: plain rows, rotated keys, and queries; and arguments of the kernels."""

import triton
import triton.language as tl

from ...host.bind import BYTES, tensor_args
from .hadamard import divide_by_channel_scales_and_rotate
from .packed_quant import load_packed_pairs, quantize_and_store_int4_pairs, quantize_and_store_nvfp4_pairs
from .quant import cast_to_float_dtype_or_fp8_bytes, quantize_and_store, quantize_and_store_halves, store_codes
from .token_rows import (
    apply_rope,
    apply_rope_to_rows,
    cache_row_offsets,
    clamped_token_and_head_of_rows,
    cos_sin_row_ptr_and_mask,
    deinterleave_pairs,
    interleave_pairs,
    load_code_rows,
    load_cos_sin_or_zeros,
    load_quant_multiplier_and_dequant_scale,
    load_rope_nope_rows_as_fp32,
    load_rope_positions,
    load_rows_as_fp32,
    load_slot_or_request_and_position,
    pdl_early_launch_and_wait,
    pdl_late_launch_or_order_loads,
    resolve_page_slot_and_write_mask,
    row_offsets,
    store_rows,
    unique_rows_mask,
)

# The slots of tokens, of every append.
TOKEN_SLOT_ARGS = tensor_args(
    BYTES, p_slot_mapping="slot_mapping", p_batch_indices="batch_indices", p_kv_positions="kv_positions",
    p_kv_indptr="kv_indptr",
    p_kv_indices="kv_indices",
)  # fmt: skip
# Of appends to K/V caches: signs and channel scales (`hadamard.divide_by_channel_scales_and_rotate`).
ROTATION_ARGS = tensor_args(
    p_k_signs="k_signs", p_v_signs="v_signs", p_k_channels="k_channel_scale", p_v_channels="v_channel_scale",
)  # fmt: skip
# Queries, of every append that rotates.
QUERY_ARGS = tensor_args(
    BYTES, p_q_rope="q_rope", p_q_nope="q_nope", p_cos_sin="cos_sin_cache", p_rope_positions="positions",
    p_q_rope_out="q_rope_out", p_q_nope_out="q_nope_out", p_q_scale="q_scale_t",
)  # fmt: skip


@triton.jit
def quantize_or_copy_rows_to_cache(
    i_block, num_tokens, p_x, strides, p_codes, strides_codes, p_scales, strides_scales, p_scale, scale, slot_args,
    position_check_args,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr, FORMAT: tl.constexpr,
    SCALE_PER_HEAD: tl.constexpr, SCALE_T_MULTIPLIES: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, PACKED_READ_MODE: tl.constexpr,
    USE_PTX: tl.constexpr, USE_PDL: tl.constexpr, PDL_LAUNCH_LATE: tl.constexpr, rotation,
):  # fmt: skip
    """Quantizes and stores one block of rows [tokens, H, D].

    position_check_args:  rope_args, by which tokens without a position are skipped; or of None
    rotation:             as `hadamard.divide_by_channel_scales_and_rotate` takes it

    uint8 rows are codes of an fp8 cache, and are copied.
    """
    CODES: tl.constexpr = p_x.dtype.element_ty == tl.uint8
    token, head = clamped_token_and_head_of_rows(i_block, num_tokens, H, ROWS)
    o_x = row_offsets(token, head, strides, STRIDE_UNIT // 2 if PACKED_READ_MODE else STRIDE_UNIT)
    # Wait for the previous kernel; loads of rows and of their slots
    pdl_early_launch_and_wait(USE_PDL, PDL_LAUNCH_LATE)
    if CODES:
        x = load_code_rows(p_x, o_x, D, D_PAD)
    else:
        x = load_packed_pairs(p_x, o_x, D, D_PAD) if PACKED_READ_MODE else load_rows_as_fp32(p_x, o_x, D, D_PAD)
    token_slot = load_slot_or_request_and_position(token, slot_args)
    if position_check_args[0] is not None:
        position = load_rope_positions(position_check_args[1], token)
    pdl_late_launch_or_order_loads(USE_PDL, PDL_LAUNCH_LATE, False)
    # Where each row goes; m_write: whether it is stored
    page, page_slot, m_write = resolve_page_slot_and_write_mask(token_slot, slot_args, PAGE)
    m_write = m_write[:, None]
    if position_check_args[0] is not None:
        _, has_position = cos_sin_row_ptr_and_mask(position, position_check_args)
        m_write = m_write & has_position
    o_codes = cache_row_offsets(page, page_slot, head, strides_codes, STRIDE_UNIT)
    o_scales = cache_row_offsets(page, page_slot, head, strides_scales, 1)
    if CODES:
        store_codes(p_codes, o_codes, x, m_write, D)
        return
    # Rotation and channel scales; then the scale of the tensor or head, codes and their stored scales
    x = divide_by_channel_scales_and_rotate(x, rotation, head, D)
    quant_scale, global_scale = load_quant_multiplier_and_dequant_scale(
        p_scale, scale, head, SCALE_PER_HEAD, SCALE_T_MULTIPLIES
    )
    FP16: tl.constexpr = p_x.dtype.element_ty == tl.float16
    if PACKED_READ_MODE and FORMAT.CODE == "int4":
        quantize_and_store_int4_pairs(x, p_codes, p_scales, o_codes, o_scales, m_write, D, FP16, FORMAT.WIDEN)
    elif PACKED_READ_MODE:
        tl.static_assert(FORMAT.CODE == "e2m1", "a code that words are not read for")
        quantize_and_store_nvfp4_pairs(
            x, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, D, FP16, USE_PTX,
            PACKED_READ_MODE == 2,
        )  # fmt: skip
    else:
        quantize_and_store(
            x, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, D, FORMAT, NATIVE_FP8_CAST
        )


@triton.jit
def rope_and_cast_queries(
    i_block, num_tokens, p_x, strides, p_out, strides_out, p_scale, scale, slot_args, rope_args,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, APPLY_ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, QUERY_KIND: tl.constexpr, ZERO_PADDING: tl.constexpr, SCALE_T_MULTIPLIES: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr, STRIDE_UNIT: tl.constexpr, USE_PDL: tl.constexpr, PDL_LAUNCH_LATE: tl.constexpr,
    ORDER_LOADS: tl.constexpr,
):  # fmt: skip
    """Rotates (if APPLY_ROPE), scales, casts and stores one block of query rows; 0 where the token has no position or,
    with ZERO_PADDING, no slot."""
    token, head = clamped_token_and_head_of_rows(i_block, num_tokens, H, ROWS)
    p_x += row_offsets(token, head, strides, STRIDE_UNIT)
    p_out += row_offsets(token, head, strides_out, STRIDE_UNIT)
    pdl_early_launch_and_wait(USE_PDL, PDL_LAUNCH_LATE)
    HALF: tl.constexpr = D // 2
    if not APPLY_ROPE:
        x = load_rows_as_fp32(p_x, 0, D, D_PAD)
        y = x
    elif INTERLEAVED:
        x, y = deinterleave_pairs(load_rows_as_fp32(p_x, 0, D, D_PAD))
    else:
        x, y = load_rows_as_fp32(p_x, 0, HALF, D_PAD // 2), load_rows_as_fp32(p_x, HALF, HALF, D_PAD // 2)
    if rope_args[0] is not None:
        position = load_rope_positions(rope_args[1], token)
    if ZERO_PADDING:
        token_slot, _ = load_slot_or_request_and_position(token, slot_args)
    pdl_late_launch_or_order_loads(USE_PDL, PDL_LAUNCH_LATE, ORDER_LOADS)
    valid = token[:, None] >= 0
    if rope_args[0] is not None:
        p_cos_sin_row, valid = cos_sin_row_ptr_and_mask(position, rope_args)
    if APPLY_ROPE:
        cos, sin = load_cos_sin_or_zeros(p_cos_sin_row, valid, HALF, D_PAD // 2)
        x, y = apply_rope(x, y, cos, sin)
    if ZERO_PADDING:
        valid = valid & (token_slot >= 0)[:, None]  # negative: the caller skips the token
    quant_scale, _ = load_quant_multiplier_and_dequant_scale(p_scale, scale, head, False, SCALE_T_MULTIPLIES)
    x = cast_to_float_dtype_or_fp8_bytes(
        tl.where(valid, x * quant_scale, 0.0), p_out.dtype.element_ty, QUERY_KIND, NATIVE_FP8_CAST
    )
    y = cast_to_float_dtype_or_fp8_bytes(
        tl.where(valid, y * quant_scale, 0.0), p_out.dtype.element_ty, QUERY_KIND, NATIVE_FP8_CAST
    )
    m_unique = unique_rows_mask(i_block, num_tokens, H, ROWS)
    if not APPLY_ROPE:
        store_rows(p_out, x, m_unique, D)
    elif INTERLEAVED:
        store_rows(p_out, interleave_pairs(x, y), m_unique, D)
    else:
        store_rows(p_out, x, m_unique, HALF)
        store_rows(p_out + HALF, y, m_unique, HALF)


@triton.jit
def rope_quantize_and_append_keys(
    i_block, num_tokens, p_rope, strides_rope, p_nope, strides_nope, p_codes, strides_codes, p_scales, strides_scales,
    p_scale, scale, slot_args, rope_args,
    H: tl.constexpr, R: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr, FORMAT: tl.constexpr, SCALE_PER_HEAD: tl.constexpr, SCALE_T_MULTIPLIES: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr, STRIDE_UNIT: tl.constexpr, SPLIT_HALVES: tl.constexpr, USE_PDL: tl.constexpr,
    PDL_LAUNCH_LATE: tl.constexpr,
    ORDER_LOADS: tl.constexpr, rotation,
):  # fmt: skip
    """Rotates the first part of one block of key rows [rope | nope], quantizes and stores them; skips tokens without a
    position.

    rotation:  as `hadamard.divide_by_channel_scales_and_rotate` takes it; not applied to SPLIT_HALVES
    """
    token, head = clamped_token_and_head_of_rows(i_block, num_tokens, H, ROWS)
    o_rope, o_nope = (
        row_offsets(token, head, strides_rope, STRIDE_UNIT),
        row_offsets(token, head, strides_nope, STRIDE_UNIT),
    )
    HALF: tl.constexpr = D // 2
    pdl_early_launch_and_wait(USE_PDL, PDL_LAUNCH_LATE)
    if SPLIT_HALVES:
        a, b = (
            load_rows_as_fp32(p_rope, o_rope, HALF, D_PAD // 2),
            load_rows_as_fp32(p_rope + HALF, o_rope, HALF, D_PAD // 2),
        )
    else:
        x = load_rope_nope_rows_as_fp32(p_rope, o_rope, p_nope, o_nope, R, D, D_PAD)
    position, token_slot = load_rope_positions(rope_args[1], token), load_slot_or_request_and_position(token, slot_args)
    pdl_late_launch_or_order_loads(USE_PDL, PDL_LAUNCH_LATE, ORDER_LOADS)
    p_cos_sin_row, has_position = cos_sin_row_ptr_and_mask(position, rope_args)
    if SPLIT_HALVES:
        cos, sin = load_cos_sin_or_zeros(p_cos_sin_row, has_position, HALF, D_PAD // 2)
        a, b = apply_rope(a, b, cos, sin)
    else:
        x = apply_rope_to_rows(x, p_rope, o_rope, p_cos_sin_row, has_position, R, D_PAD, INTERLEAVED)
        x = divide_by_channel_scales_and_rotate(x, rotation, head, D)
    page, page_slot, m_write = resolve_page_slot_and_write_mask(token_slot, slot_args, PAGE)
    quant_scale, global_scale = load_quant_multiplier_and_dequant_scale(
        p_scale, scale, head, SCALE_PER_HEAD, SCALE_T_MULTIPLIES
    )
    o_codes = cache_row_offsets(page, page_slot, head, strides_codes, STRIDE_UNIT)
    o_scales = cache_row_offsets(page, page_slot, head, strides_scales, 1)
    m_write = m_write[:, None] & has_position
    if SPLIT_HALVES:
        quantize_and_store_halves(
            a, b, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, HALF, FORMAT,
            NATIVE_FP8_CAST,
        )  # fmt: skip
    else:
        quantize_and_store(
            x, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, D, FORMAT, NATIVE_FP8_CAST
        )
