"""transcode: tokens of one cache's pages into pages of another, all layers that are alike in one launch.

A program handles some rows (token, head) of K or V of a layer: page lookup → codes, stored scales → dequant in fp32 →
attributes → quantize and store. Rows that are the same on both sides are copied. The number of tokens may lie on the
device: programs beyond it store nothing.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from ...formats import ALL_FORMATS, CHANNELS, PAIRS, ROTATION
from ..host import launch, row_programs
from ..host.bind import BYTES, BoundLaunches, KernelLaunch, LaunchSequence, tensor_args
from .parts.dequant import BF16, E2M1, E4M3, E5M2, FP16, INT4, INT8, e4m3_bytes_to_fp16
from .parts.hadamard import blockwise_hadamard_unnormalized
from .parts.int4_rows import (
    decode_32bit_words_of_8_or_16bit_codes,
    flip_fp32_signs,
    load_source_rows_as_32bit_word_tiles,
    load_source_rows_as_32bit_words,
    normalized_hadamard_of_row_tiles,
    quantize_and_store_fp32_tiles_as_int4,
    quantize_and_store_words_as_int4,
    row_min_and_max_or_nan_of_tiles,
    xor_words_of_signs,
)
from .parts.int4_words import transcode_int4_rows
from .parts.nvfp4_rows import quantize_and_store_e4m3_words_as_nvfp4, quantize_and_store_fp32_tiles_as_nvfp4
from .parts.quant import BLOCK, GROUP, TENSOR, TOKEN_HEAD, ZERO_POINT, quantize_and_store, reciprocal_rn, store_codes
from .parts.token_rows import cache_row_offsets, clamped_token_and_head_of_rows, interleave_pairs

SUPPORTS = (PAIRS, ROTATION, CHANNELS)
_K_AND_V = ("k", "v")
_TENSOR_ARGS = tensor_args(
    BYTES, p_src_page_table="src_pages", p_dst_page_table="dst_pages", p_num_tokens="num_tokens_t",
    p_layer_table="layers", **{
        f"p_{of}_{k_or_v}_{what}": field.format(k_or_v)
        for k_or_v in _K_AND_V
        for of, fields in (
            ("src", ("src_{}", "src_{}_scale_cache", "src_{}_scale_t", "src_{}_signs", "src_{}_channel_scale")),
            ("dst", ("{}_cache", "{}_scale_cache", "{}_scale_t", "{}_signs", "{}_channel_scale")),
        )
        for what, field in zip(("codes", "stored", "scale", "signs", "channels"), fields, strict=True)
    },
)  # fmt: skip
_FIRST_BLACKWELL = 100  # whose compiler pairs fp32 registers: 128 of them spill
_TILE_CODES = {  # and from what
    "int4": ("bf16", "fp16", "e4m3", "e5m2", "int8"),
    "e2m1": ("e4m3", "e5m2", "int8"),
    **dict.fromkeys(("e4m3", "bf16", "fp16"), ("int4",)),
}
_WARPS = 1  # of programs of such rows
_MAX_ROWS = 1 << 31  # of K or of V, that 32 bits count


@triton.jit
def load_layer_offset_in_elements(p_layer_table, OFFSET_COLUMN_IN_16_BYTES: tl.constexpr, ELEMENT_BYTES: tl.constexpr):
    """Returns how many elements of ELEMENT_BYTES bytes a layer's tensor lies behind that of the first layer."""
    if p_layer_table is None:
        return tl.full([], 0, tl.int64)
    else:
        # a product, which says how it is aligned
        return tl.load(p_layer_table + OFFSET_COLUMN_IN_16_BYTES) * (16 // ELEMENT_BYTES)


@triton.jit
def load_dequantizing_scale(
    p_scale,
    scale,
    p_layer_table,
    OFFSET_COLUMN_IN_16_BYTES: tl.constexpr,
    FP32_BITS_COLUMN: tl.constexpr,
    head,
    PER_HEAD: tl.constexpr,
):
    """Returns the dequantizing scale of rows: [ROWS, 1] with one for each head, else [1, 1]."""
    one = tl.zeros([1, 1], tl.int32)
    if p_scale is not None:
        p_scale += load_layer_offset_in_elements(p_layer_table, OFFSET_COLUMN_IN_16_BYTES, 4)
        return tl.load(p_scale + (head[:, None] if PER_HEAD else one))
    elif p_layer_table is not None:
        return tl.load(p_layer_table + FP32_BITS_COLUMN + one).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        return one.to(tl.float32) + scale


@triton.jit
def load_page_slot_and_validity(token, p_pages, num_pages, live, PAGE: tl.constexpr):
    """Returns (page, slot, whether the page exists) of tokens: int64, int64, bool. Without one the page is arbitrary:
    Triton 3.6 cannot compile a select of int64 pages."""
    page = tl.load(p_pages + token // PAGE, mask=live, other=-1).to(tl.int64)
    return page, (token % PAGE).to(tl.int64), live & (page >= 0) & (page < num_pages)


@triton.jit
def load_live_rows(p, o_rows, m_live, D: tl.constexpr, D_PAD: tl.constexpr):
    """Loads elements of rows [ROWS, D_PAD]; 0 of rows that are not live, and from column D on."""
    c = tl.arange(0, D_PAD)[None, :]
    return tl.load(p + o_rows + c, mask=m_live if D == D_PAD else m_live & (c < D), other=0)


@triton.jit
def codes_to_fp32(codes, FORMAT: tl.constexpr, NATIVE_E4M3: tl.constexpr):
    """Returns stored elements as fp32 numbers, exactly: [ROWS, D_PAD]; int4 with its zero point."""
    if FORMAT.CODE == BF16 or FORMAT.CODE == FP16:
        return codes.to(tl.float32)
    elif FORMAT.CODE == E4M3:
        if NATIVE_E4M3:
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return e4m3_bytes_to_fp16(codes).to(tl.float32)
    elif FORMAT.CODE == E5M2:
        return (codes.to(tl.uint16) << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif FORMAT.CODE == INT8:
        return codes.to(tl.float32)
    else:
        nibbles = interleave_pairs(codes & 15, codes >> 4).to(tl.uint16)
        if FORMAT.CODE == INT4:
            return nibbles.to(tl.float32)
        else:
            tl.static_assert(FORMAT.CODE == E2M1, "a code that decode does not know")
            bits = ((nibbles & 0x8) << 12) | ((nibbles & 0x7) << 9)  # fp16, fourteen binades lower
            return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def dequantize_rows(
    codes, p_stored_scales, o_stored_scales, m_live, scale, D: tl.constexpr, D_PAD: tl.constexpr, FORMAT: tl.constexpr,
    NATIVE_E4M3: tl.constexpr,
):  # fmt: skip
    """Returns rows [ROWS, D_PAD] fp32: code × stored scale × scale; columns from D on are 0."""
    ROWS: tl.constexpr = codes.shape[0]
    x = codes_to_fp32(codes, FORMAT, NATIVE_E4M3)
    if FORMAT.SCALE == TOKEN_HEAD:
        stored = tl.load(p_stored_scales + o_stored_scales, mask=m_live, other=0.0)
        if FORMAT.CODE == INT4:
            x -= (stored.to(tl.int32, bitcast=True) & ZERO_POINT).to(tl.float32)
        x *= stored
    elif FORMAT.SCALE == BLOCK or FORMAT.SCALE == GROUP:
        SIZE: tl.constexpr = 16 if FORMAT.SCALE == BLOCK else 128
        stored = load_live_rows(p_stored_scales, o_stored_scales, m_live, D // SIZE, D_PAD // SIZE)
        if FORMAT.SCALE == BLOCK:
            stored = e4m3_bytes_to_fp16(stored).to(tl.float32)
        x = tl.reshape(tl.reshape(x, [ROWS, D_PAD // SIZE, SIZE]) * stored[:, :, None], [ROWS, D_PAD])
        if FORMAT.SCALE == BLOCK:
            x *= scale
    elif FORMAT.SCALE == TENSOR:
        x *= scale
    if D == D_PAD:
        return x
    else:
        return tl.where(tl.arange(0, D_PAD)[None, :] < D, x, 0.0)


@triton.jit
def count_unequal_hadamard_signs(src_attributes, dst_attributes, NUM_SIGNS: tl.constexpr):
    """Returns how many signs differ, all if only one side is rotated: int32 [1, 1]."""
    p_src_signs, src_distance, _, _, _ = src_attributes
    p_dst_signs, dst_distance, _, _, _ = dst_attributes
    if p_src_signs is None and p_dst_signs is None:
        return tl.zeros([1, 1], tl.int32)
    elif p_src_signs is None or p_dst_signs is None:
        return tl.full([1, 1], NUM_SIGNS, tl.int32)
    else:
        i = tl.arange(0, NUM_SIGNS)[None, :]
        differ = tl.load(p_src_signs + src_distance + i) != tl.load(p_dst_signs + dst_distance + i)
        return tl.sum(differ.to(tl.int32), 1)[:, None]


@triton.jit
def load_channel_scales_of_rows_or_ones(attributes, head_of_row, D: tl.constexpr, D_PAD: tl.constexpr):
    """Returns channel scales of heads, [ROWS, D_PAD]; 1 where there are none."""
    _, _, p_channels, distance, stride = attributes
    c = tl.arange(0, D_PAD)[None, :]
    if p_channels is None:
        return tl.full([head_of_row.shape[0], D_PAD], 1.0, tl.float32)
    else:
        return tl.load(p_channels + (distance + head_of_row.to(tl.int64) * stride)[:, None] + c, mask=c < D, other=1.0)


@triton.jit
def count_unequal_channel_scales_per_row(src_attributes, dst_attributes, head, D: tl.constexpr, D_PAD: tl.constexpr):
    """Returns how many channel scales of heads differ, int32 [ROWS, 1]."""
    if src_attributes[2] is None and dst_attributes[2] is None:
        return tl.zeros([head.shape[0], 1], tl.int32)
    else:
        old = load_channel_scales_of_rows_or_ones(src_attributes, head, D, D_PAD)
        new = load_channel_scales_of_rows_or_ones(dst_attributes, head, D, D_PAD)
        return tl.sum((old != new).to(tl.int32), 1)[:, None]


@triton.jit
def unrotate_rescale_channels_and_rotate(x, src_attributes, dst_attributes, unequal_channels, head, D: tl.constexpr):
    """Returns rows x [ROWS, D_PAD] fp32, rotated back, with other channel scales, and rotated anew.

    src_attributes, dst_attributes:  pointers to signs and to channel scales, either may be None, each with the layer's
                                     distance; the stride of a head
    """
    p_src_signs, src_distance, p_src_channels, _, _ = src_attributes
    p_dst_signs, dst_distance, p_dst_channels, _, _ = dst_attributes
    D_PAD: tl.constexpr = x.shape[1]
    SIZE: tl.constexpr = D & -D
    c = tl.arange(0, D_PAD)[None, :]
    if p_src_signs is not None:
        x = blockwise_hadamard_unnormalized(x, SIZE) * SIZE**-0.5 * tl.load(p_src_signs + src_distance + c % SIZE)
    if p_src_channels is not None or p_dst_channels is not None:
        old = load_channel_scales_of_rows_or_ones(src_attributes, head, D, D_PAD)
        new = load_channel_scales_of_rows_or_ones(dst_attributes, head, D, D_PAD)
        x = tl.where(unequal_channels == 0, x, x * old * reciprocal_rn(new))
    if p_dst_signs is not None:
        x = blockwise_hadamard_unnormalized(x * tl.load(p_dst_signs + dst_distance + c % SIZE), SIZE) * SIZE**-0.5
    return x


@triton.jit
def load_src_row_scales(
    p_stored_scales, o_stored_scales, m_live, p_scale, scale, p_layer_table, head, IS_V: tl.constexpr,
    FORMAT: tl.constexpr, PER_HEAD: tl.constexpr,
):  # fmt: skip
    """Returns the one scale of each row, stored with it or of the tensor: [ROWS, 1] or [1, 1]."""
    if FORMAT.SCALE == TENSOR:
        return load_dequantizing_scale(p_scale, scale, p_layer_table, 8 + IS_V, 20 + IS_V, head, PER_HEAD)
    else:
        return tl.load(p_stored_scales + o_stored_scales, mask=m_live, other=0.0)


@triton.jit
def load_nvfp4_quant_and_global_scales(
    p_dst_scale, dst_scale, p_layer_table, head, IS_V: tl.constexpr, PER_HEAD: tl.constexpr
):
    """Returns (quantizing scale, global scale)."""
    scale = load_dequantizing_scale(p_dst_scale, dst_scale, p_layer_table, 10 + IS_V, 22 + IS_V, head, PER_HEAD)
    quant_scale = reciprocal_rn(scale)
    return quant_scale, reciprocal_rn(quant_scale) if p_dst_scale is None else scale


@triton.jit
def load_dequantized_tiles_and_row_min_max(
    p_src, o_src, p_stored_scales, o_stored_scales, m_live, p_scale, scale, p_layer_table, head, IS_V: tl.constexpr,
    D: tl.constexpr,
    THREADS_PER_ROW: tl.constexpr, FORMAT: tl.constexpr, PER_HEAD: tl.constexpr, p_dst_signs, NATIVE_E4M3: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """Loads rows as tiles (`parts/int4_rows.py`): code × scale, rotated if there are signs. Returns their range too."""
    PACK: tl.constexpr = 32 // p_src.dtype.element_ty.primitive_bitwidth
    words = load_source_rows_as_32bit_words(p_src, o_src, m_live, D // PACK, THREADS_PER_ROW)
    if p_dst_signs is not None:
        signs = xor_words_of_signs(p_dst_signs, D // PACK, PACK)
        if FORMAT.CODE != INT8:
            words ^= signs
    tiles = decode_32bit_words_of_8_or_16bit_codes(words, FORMAT, NATIVE_E4M3, USE_PTX)
    if p_dst_signs is not None and FORMAT.CODE == INT8:
        tiles = flip_fp32_signs(tiles, signs)
    if FORMAT.SCALE == TOKEN_HEAD or FORMAT.SCALE == TENSOR:
        factor = load_src_row_scales(
            p_stored_scales, o_stored_scales, m_live, p_scale, scale, p_layer_table, head, IS_V, FORMAT, PER_HEAD
        )
        scaled = ()
        for j in tl.static_range(PACK):
            scaled = scaled + (tiles[j] * factor,)
        tiles = scaled
    if p_dst_signs is not None:
        tiles = normalized_hadamard_of_row_tiles(tiles)
    return tiles, row_min_and_max_or_nan_of_tiles(tiles)


@triton.jit
def transcode_rows(
    i_block, token_count_args, page_args, src, dst, head_strides, p_layer_table, IS_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, SRC_PAGE: tl.constexpr,
    DST_PAGE: tl.constexpr, SRC_FORMAT: tl.constexpr, DST_FORMAT: tl.constexpr, SRC_PER_HEAD: tl.constexpr,
    DST_PER_HEAD: tl.constexpr, COPY_ALL_ROWS: tl.constexpr, STRIDE_UNIT: tl.constexpr, NATIVE_E4M3: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr, THREADS_PER_ROW: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Transcodes one block of rows of K (IS_V 0) or V (1).

    token_count_args:  (most tokens, pointer to their number or None)
    page_args:     pointers src_pages and dst_pages, pages of either cache
    src, dst:      pointers codes, stored scales, scale, signs, channel scales; the scale; strides of codes, of scales
    head_strides:  of channel scales of src and dst
    """
    max_tokens, p_num_tokens = token_count_args
    p_src_page_table, p_dst_page_table, num_src_pages, num_dst_pages = page_args
    token, head = clamped_token_and_head_of_rows(i_block, max_tokens, H, ROWS)
    live = token < (max_tokens if p_num_tokens is None else tl.load(p_num_tokens).to(tl.int64))
    src_page, src_slot, live = load_page_slot_and_validity(token, p_src_page_table, num_src_pages, live, SRC_PAGE)
    dst_page, dst_slot, live = load_page_slot_and_validity(token, p_dst_page_table, num_dst_pages, live, DST_PAGE)
    m_live = live[:, None]
    p_src = src[0] + load_layer_offset_in_elements(p_layer_table, IS_V, src[0].dtype.element_ty.primitive_bitwidth // 8)
    p_dst = dst[0] + load_layer_offset_in_elements(
        p_layer_table, 4 + IS_V, dst[0].dtype.element_ty.primitive_bitwidth // 8
    )
    o_src = cache_row_offsets(src_page, src_slot, head, src[6], STRIDE_UNIT)
    o_dst = cache_row_offsets(dst_page, dst_slot, head, dst[6], STRIDE_UNIT)
    # Stored scales, fp32 or bytes, if there are any.
    p_src_stored, p_dst_stored = src[1], dst[1]
    o_src_stored = cache_row_offsets(src_page, src_slot, head, src[7], 1)
    o_dst_stored = cache_row_offsets(dst_page, dst_slot, head, dst[7], 1)
    o_src_stored += load_layer_offset_in_elements(p_layer_table, 2 + IS_V, 1 if SRC_FORMAT.SCALE == BLOCK else 4)
    o_dst_stored += load_layer_offset_in_elements(p_layer_table, 6 + IS_V, 1 if DST_FORMAT.SCALE == BLOCK else 4)

    if THREADS_PER_ROW > 0 and SRC_FORMAT.CODE == INT4:
        dst_scale = load_dequantizing_scale(dst[2], dst[5], p_layer_table, 10 + IS_V, 22 + IS_V, head, DST_PER_HEAD)
        transcode_int4_rows(
            p_src, o_src, p_src_stored, o_src_stored, p_dst, o_dst, m_live, reciprocal_rn(dst_scale), D,
            THREADS_PER_ROW, DST_FORMAT, NATIVE_FP8_CAST, USE_PTX,
        )  # fmt: skip
    elif THREADS_PER_ROW > 0 and DST_FORMAT.CODE == E2M1 and SRC_FORMAT.CODE == E4M3 and USE_PTX and NATIVE_E4M3:
        words = load_source_rows_as_32bit_word_tiles(p_src, o_src, m_live, D // 4, THREADS_PER_ROW)
        src_scale = load_src_row_scales(
            p_src_stored, o_src_stored, m_live, src[2], src[5], p_layer_table, head, IS_V, SRC_FORMAT, SRC_PER_HEAD
        )
        quant_scale, global_scale = load_nvfp4_quant_and_global_scales(
            dst[2], dst[5], p_layer_table, head, IS_V, DST_PER_HEAD
        )
        quantize_and_store_e4m3_words_as_nvfp4(
            words, src_scale, p_dst, p_dst_stored, o_dst, o_dst_stored, m_live, quant_scale, global_scale
        )
    elif (
        THREADS_PER_ROW > 0 and DST_FORMAT.CODE == INT4 and USE_PTX and dst[3] is None
        and (SRC_FORMAT.CODE == BF16 or SRC_FORMAT.CODE == FP16 or (SRC_FORMAT.CODE == E4M3 and NATIVE_E4M3))
    ):  # fmt: skip
        PACK: tl.constexpr = 32 // p_src.dtype.element_ty.primitive_bitwidth
        words = load_source_rows_as_32bit_word_tiles(p_src, o_src, m_live, D // PACK, THREADS_PER_ROW)
        src_scale = 1.0
        if SRC_FORMAT.CODE == E4M3:
            src_scale = load_src_row_scales(
                p_src_stored, o_src_stored, m_live, src[2], src[5], p_layer_table, head, IS_V, SRC_FORMAT, SRC_PER_HEAD
            )
        quantize_and_store_words_as_int4(words, src_scale, p_dst, p_dst_stored, o_dst, o_dst_stored, m_live, SRC_FORMAT)
    elif THREADS_PER_ROW > 0:
        # The range, which nvfp4 has no use for, the compiler drops.
        tiles, row_range = load_dequantized_tiles_and_row_min_max(
            p_src, o_src, p_src_stored, o_src_stored, m_live, src[2], src[5], p_layer_table, head, IS_V, D,
            THREADS_PER_ROW,
            SRC_FORMAT, SRC_PER_HEAD, None if dst[3] is None else dst[3] + load_layer_offset_in_elements(p_layer_table,
            14 + IS_V, 4),
            NATIVE_E4M3, USE_PTX,
        )  # fmt: skip
        if DST_FORMAT.CODE == INT4:
            quantize_and_store_fp32_tiles_as_int4(
                tiles, row_range, p_dst, p_dst_stored, o_dst, o_dst_stored, m_live, USE_PTX
            )  # fmt: skip
        else:
            tl.static_assert(DST_FORMAT.CODE == E2M1, "a code that tiles do not become")
            quant_scale, global_scale = load_nvfp4_quant_and_global_scales(
                dst[2], dst[5], p_layer_table, head, IS_V, DST_PER_HEAD
            )
            quantize_and_store_fp32_tiles_as_nvfp4(
                tiles, p_dst, p_dst_stored, o_dst, o_dst_stored, m_live, quant_scale, global_scale, USE_PTX
            )
    if THREADS_PER_ROW > 0:
        return

    # Codes, and their scales of the tensor.
    PER_ELEMENT: tl.constexpr = 2 if SRC_FORMAT.CODE == INT4 or SRC_FORMAT.CODE == E2M1 else 1
    codes = load_live_rows(p_src, o_src, m_live, D // PER_ELEMENT, D_PAD // PER_ELEMENT)
    SAME_FORMAT: tl.constexpr = SRC_FORMAT.CODE == DST_FORMAT.CODE and SRC_FORMAT.SCALE == DST_FORMAT.SCALE
    if not COPY_ALL_ROWS:
        src_scale = load_dequantizing_scale(src[2], src[5], p_layer_table, 8 + IS_V, 20 + IS_V, head, SRC_PER_HEAD)
        dst_scale = load_dequantizing_scale(dst[2], dst[5], p_layer_table, 10 + IS_V, 22 + IS_V, head, DST_PER_HEAD)
        src_attributes = (
            src[3], load_layer_offset_in_elements(p_layer_table, 12 + IS_V, 4), src[4],
            load_layer_offset_in_elements(p_layer_table, 16 + IS_V, 4),
            head_strides[0],
        )  # fmt: skip
        dst_attributes = (
            dst[3], load_layer_offset_in_elements(p_layer_table, 14 + IS_V, 4), dst[4],
            load_layer_offset_in_elements(p_layer_table, 18 + IS_V, 4),
            head_strides[1],
        )  # fmt: skip
        unequal_channels = count_unequal_channel_scales_per_row(src_attributes, dst_attributes, head, D, D_PAD)
        unequal = unequal_channels + count_unequal_hadamard_signs(src_attributes, dst_attributes, D & -D)

    # Rows that are the same on both sides.
    m_copy = m_live
    if SAME_FORMAT:
        if not COPY_ALL_ROWS:
            m_copy = m_live & (unequal == 0) & (src_scale == dst_scale)
        store_codes(p_dst, o_dst, codes, m_copy, D // PER_ELEMENT)
        if SRC_FORMAT.SCALE == TOKEN_HEAD:
            stored = tl.load(p_src_stored + o_src_stored, mask=m_live, other=0.0)
            tl.store(p_dst_stored + o_dst_stored, stored, mask=m_copy)
        elif SRC_FORMAT.SCALE == BLOCK or SRC_FORMAT.SCALE == GROUP:
            SIZE: tl.constexpr = 16 if SRC_FORMAT.SCALE == BLOCK else 128
            stored = load_live_rows(p_src_stored, o_src_stored, m_live, D // SIZE, D_PAD // SIZE)
            store_codes(p_dst_stored, o_dst_stored, stored, m_copy, D // SIZE)

    # All others.
    if not COPY_ALL_ROWS:
        m_change = m_live & (m_copy == 0) if SAME_FORMAT else m_live
        if tl.max(tl.max(m_change.to(tl.int32), 1), 0) != 0:
            x = dequantize_rows(codes, p_src_stored, o_src_stored, m_live, src_scale, D, D_PAD, SRC_FORMAT, NATIVE_E4M3)
            HAS_ATTRIBUTES: tl.constexpr = not (src[3] is None and src[4] is None and dst[3] is None and dst[4] is None)
            if HAS_ATTRIBUTES:  # noqa: SIM102 (a constant, and a value of the device)
                if tl.max(tl.max(unequal, 1), 0) != 0:
                    changed = unrotate_rescale_channels_and_rotate(
                        x, src_attributes, dst_attributes, unequal_channels, head, D
                    )
                    x = tl.where(unequal == 0, x, changed)
            quant_scale = reciprocal_rn(dst_scale)
            # As an append does it, whose number is the multiplier.
            global_scale = reciprocal_rn(quant_scale) if dst[2] is None else dst_scale
            quantize_and_store(
                x, p_dst, p_dst_stored, o_dst, o_dst_stored, m_change, quant_scale, global_scale, D, DST_FORMAT,
                NATIVE_FP8_CAST,
            )  # fmt: skip


@triton.jit(do_not_specialize=["num_tokens", "num_src_pages", "num_dst_pages", "k_end"])
def transcode_kernel(
    p_src_page_table, p_dst_page_table, p_num_tokens, p_layer_table,
    p_src_k_codes, p_src_k_stored, p_src_k_scale, p_src_k_signs, p_src_k_channels,
    p_dst_k_codes, p_dst_k_stored, p_dst_k_scale, p_dst_k_signs, p_dst_k_channels,
    p_src_v_codes, p_src_v_stored, p_src_v_scale, p_src_v_signs, p_src_v_channels,
    p_dst_v_codes, p_dst_v_stored, p_dst_v_scale, p_dst_v_signs, p_dst_v_channels,
    src_k_scale, dst_k_scale, src_v_scale, dst_v_scale, strides_src_k, strides_dst_k, strides_src_v, strides_dst_v,
    strides_src_k_stored, strides_dst_k_stored, strides_src_v_stored, strides_dst_v_stored, head_strides_k,
    head_strides_v, num_tokens, num_src_pages, num_dst_pages, k_end,
    H: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DK_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROWS_K: tl.constexpr, ROWS_V: tl.constexpr, SRC_PAGE: tl.constexpr, DST_PAGE: tl.constexpr,
    SRC_K_FORMAT: tl.constexpr, SRC_V_FORMAT: tl.constexpr, DST_K_FORMAT: tl.constexpr, DST_V_FORMAT: tl.constexpr,
    SRC_K_PER_HEAD: tl.constexpr, SRC_V_PER_HEAD: tl.constexpr, DST_K_PER_HEAD: tl.constexpr,
    DST_V_PER_HEAD: tl.constexpr, COPY_K: tl.constexpr, COPY_V: tl.constexpr, LAYER_TABLE_COLUMNS: tl.constexpr,
    STRIDE_UNIT: tl.constexpr, NATIVE_E4M3: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
    THREADS_K: tl.constexpr, THREADS_V: tl.constexpr, USE_PTX: tl.constexpr,
):  # fmt: skip
    """Transcodes K in programs up to k_end, then V; axis 1 of the grid are layers."""
    i_block = tl.program_id(0)
    p_layer = None if p_layer_table is None else p_layer_table + tl.program_id(1) * LAYER_TABLE_COLUMNS
    tokens = (num_tokens, p_num_tokens)
    page_args = (p_src_page_table, p_dst_page_table, num_src_pages, num_dst_pages)
    if i_block < k_end:
        transcode_rows(
            i_block, tokens, page_args,
            (p_src_k_codes, p_src_k_stored, p_src_k_scale, p_src_k_signs, p_src_k_channels, src_k_scale,
             strides_src_k, strides_src_k_stored),
            (p_dst_k_codes, p_dst_k_stored, p_dst_k_scale, p_dst_k_signs, p_dst_k_channels, dst_k_scale,
             strides_dst_k, strides_dst_k_stored),
            head_strides_k, p_layer, 0, H, DK, DK_PAD, ROWS_K, SRC_PAGE, DST_PAGE, SRC_K_FORMAT, DST_K_FORMAT,
            SRC_K_PER_HEAD, DST_K_PER_HEAD, COPY_K, STRIDE_UNIT, NATIVE_E4M3, NATIVE_FP8_CAST, THREADS_K, USE_PTX,
        )  # fmt: skip
    else:
        transcode_rows(
            i_block - k_end, tokens, page_args,
            (p_src_v_codes, p_src_v_stored, p_src_v_scale, p_src_v_signs, p_src_v_channels, src_v_scale,
             strides_src_v, strides_src_v_stored),
            (p_dst_v_codes, p_dst_v_stored, p_dst_v_scale, p_dst_v_signs, p_dst_v_channels, dst_v_scale,
             strides_dst_v, strides_dst_v_stored),
            head_strides_v, p_layer, 1, H, DV, DV_PAD, ROWS_V, SRC_PAGE, DST_PAGE, SRC_V_FORMAT, DST_V_FORMAT,
            SRC_V_PER_HEAD, DST_V_PER_HEAD, COPY_V, STRIDE_UNIT, NATIVE_E4M3, NATIVE_FP8_CAST, THREADS_V, USE_PTX,
        )  # fmt: skip


def why_not(f: SimpleNamespace) -> str | None:
    rows = f.num_tokens * f.src_k.shape[2]
    if rows >= _MAX_ROWS:
        return f"counts rows in 32 bits, got {rows} of K"
    names = f.src_format, f.src_v_format, f.format, f.v_format
    reasons = (
        launch.why_not_format_or_device(SimpleNamespace(format=name, arch=f.arch, device=f.device)) for name in names
    )
    return next(filter(None, reasons), None)


def configure(f: SimpleNamespace) -> LaunchSequence:
    heads, tokens, num_layers = f.src_k.shape[2], f.num_tokens, 1 if f.layers is None else f.layers.shape[0]
    formats = {"k": (f.src_format, f.format), "v": (f.src_v_format, f.v_format)}
    dims = {s: getattr(f, f"src_{s}").shape[3] * ALL_FORMATS[formats[s][0]].values_per_element for s in _K_AND_V}
    pads = {s: max(row_programs.padded_columns(dims[s], name) for name in formats[s]) for s in _K_AND_V}
    elements = row_programs.program_elements(tokens * heads * sum(pads.values()) * num_layers)
    unit = row_programs.common_stride_unit_of_tensors(f.src_k, f.src_v, f.k_cache, f.v_cache)
    threads = {s: _choose_threads_per_4bit_row_or_0(f, s, formats[s], dims[s], unit) for s in _K_AND_V}
    warps = 4
    if any(threads.values()):
        warps = _WARPS if elements == row_programs.MAX_ELEMENTS else 1
        elements = min(elements, warps * 1024)
    programs = {
        s: row_programs.RowPrograms(tokens, heads, 1, 32 * warps // threads[s])
        if threads[s]
        else row_programs.RowPrograms(tokens, heads, pads[s], elements)
        for s in _K_AND_V
    }
    k_end, num_programs = row_programs.program_ends(programs["k"], programs["v"])
    if num_programs == 0 or not f.src_k.shape[0] or not f.k_cache.shape[0]:
        return LaunchSequence()
    arguments: dict[str, Any] = _TENSOR_ARGS | {
        "num_tokens": tokens, "num_src_pages": f.src_k.shape[0], "num_dst_pages": f.k_cache.shape[0], "k_end": k_end,
        "H": heads, "SRC_PAGE": f.src_k.shape[1], "DST_PAGE": f.k_cache.shape[1], "STRIDE_UNIT": unit,
        "LAYER_TABLE_COLUMNS": 0 if f.layers is None else f.layers.shape[1], "NATIVE_E4M3": not launch.emulates_e4m3(f),
        "NATIVE_FP8_CAST": launch.has_exact_fp8_cast(f), "USE_PTX": launch.has_ptx(f),
    }  # fmt: skip
    for s in _K_AND_V:
        arguments |= _k_or_v_args_without_tensors(f, s, formats[s], unit)
        arguments[f"THREADS_{s.upper()}"] = threads[s]
        arguments |= {f"D{s.upper()}": dims[s], f"D{s.upper()}_PAD": pads[s], f"ROWS_{s.upper()}": programs[s].rows}
    options = row_programs.OPTIONS | {"num_warps": warps}
    return LaunchSequence(KernelLaunch(transcode_kernel, (num_programs, num_layers), arguments, **options))


def _choose_threads_per_4bit_row_or_0(
    f: SimpleNamespace, k_or_v: str, formats: tuple[str, str], dim: int, stride_unit: int
) -> int:
    """Returns how many threads share a row that has or gets 4 bits (`int4_rows`, `int4_words`, `nvfp4_rows`); 0: rows
    go by elements.

    A thread holds 64 numbers of a row, or 32 where they become 16 bits; of rotated rows all, since threads would
    exchange every number, up to 128, or 64 where more spill. NVIDIA H100, 2026-11-27, 16384 tokens, 8 layers of 8 heads
    of 128, us with 32, 64 and 128 numbers: bf16 to int4 233, 242, 500; fp8 to int4 165, 144, 248; int4 to fp8 162, 143,
    340; int4 to bf16 247, 252, 1067; fp8 to nvfp4 185, 175, 324. On 2026-11-26, with 64 and 128: rotated bf16 574, 300;
    rotated fp8 501, 260; element by element 528, 482.
    """
    src, dst = (ALL_FORMATS[name] for name in formats)
    codes, cache = getattr(f, f"src_{k_or_v}"), getattr(f, f"{k_or_v}_cache")
    names = [f"{k_or_v}_channel_scale", f"src_{k_or_v}_channel_scale", f"src_{k_or_v}_signs"]
    rotated = getattr(f, f"{k_or_v}_signs") is not None
    if (
        src.code not in _TILE_CODES.get(dst.code, ()) or src.scale in (BLOCK, GROUP)
        or dim & (dim - 1) or dim < 16 or not codes.aligned or not cache.aligned
        or stride_unit * codes.dtype.itemsize % 16
        or any(getattr(f, name) is not None for name in names)
    ):  # fmt: skip
        return 0
    if src.code == "int4" and (rotated or dim < 32 or dst.scale == TOKEN_HEAD):
        return 0
    if not rotated:
        return max(1, dim // (32 if dst.code in ("bf16", "fp16") else 64))
    if dst.code == "e2m1":
        return 0
    return int(dim <= (128 if (f.arch or 0) < _FIRST_BLACKWELL else 64))


def _k_or_v_args_without_tensors(
    f: SimpleNamespace, k_or_v: str, formats: tuple[str, str], stride_unit: int
) -> dict[str, Any]:
    """The arguments of K or V that are no tensors, by name."""
    found: dict[str, Any] = {}
    fields = (("src", "src_", f"src_{k_or_v}", formats[0]), ("dst", "", f"{k_or_v}_cache", formats[1]))
    for of, prefix, codes, name in fields:
        stored, scale = getattr(f, f"{prefix}{k_or_v}_scale_cache"), f"{prefix}{k_or_v}_scale"
        found |= {
            f"{of}_{k_or_v}_scale": getattr(f, scale),
            f"strides_{of}_{k_or_v}": row_programs.strides_in_units(getattr(f, codes), 3, stride_unit),
            f"strides_{of}_{k_or_v}_stored": row_programs.scale_strides(stored),
            f"{of.upper()}_{k_or_v.upper()}_FORMAT": row_programs.stored_format(name),
            f"{of.upper()}_{k_or_v.upper()}_PER_HEAD": row_programs.per_head(getattr(f, f"{scale}_t")),
        }
    channels = [getattr(f, f"{prefix}{k_or_v}_channel_scale") for prefix in ("src_", "")]
    found[f"head_strides_{k_or_v}"] = tuple(row_programs.strides_in_units(x, 1)[0] for x in channels)
    return found | {f"COPY_{k_or_v.upper()}": _all_rows_equal_by_facts(f, k_or_v, formats)}


def _all_rows_equal_by_facts(f: SimpleNamespace, k_or_v: str, formats: tuple[str, str]) -> bool:
    """Returns whether the facts alone say that all rows are the same on both sides."""
    names = [f"{prefix}{k_or_v}_{what}" for prefix in ("src_", "") for what in ("scale_t", "signs", "channel_scale")]
    equal = torch.tensor(
        [getattr(f, f"{prefix}{k_or_v}_scale") for prefix in ("src_", "")], dtype=torch.float32
    ).unique()
    return formats[0] == formats[1] and len(equal) == 1 and all(getattr(f, name) is None for name in names)


def run(call: Any, config: LaunchSequence) -> None:
    config(call)


def bind(config: LaunchSequence, at: dict[str, int]) -> BoundLaunches | None:
    return config.bind(at)
