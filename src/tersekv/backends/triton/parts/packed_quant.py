"""4-bit quantization of 16-bit rows, loaded as 32-bit pairs of values: a thread stores the codes of the pairs that it
loads.

Byte i holds the codes of pair i, so pairs and bytes have one shape, a thread holds whole blocks of nvfp4, and neither a
block's maximum nor a byte needs another thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from .quant import (
    E2M1_MAX,
    E4M3_MAX,
    divide_rn,
    encode_e2m1,
    int4_scale_zero_point_and_stored_scale,
    quantize_int4,
    reciprocal_rn,
    round_magnitude_to_code_and_value,
    row_abs_max,
    row_min_max,
    store_codes,
)

PAIRS_PER_BLOCK = tl.constexpr(8)


def encode_8_e2m1_codes_ptx(
    product_instructions: Sequence[Sequence[str]], saturated_part_instructions: Sequence[str]
) -> str:
    """Returns PTX: eight numbers y → their codes $0, the first in the lowest nibble.

    product_instructions:         of each, those that put y or y / 2 into h0 to h7
    saturated_part_instructions:  those that put sat(|y| / 2), sat(|y| / 2 - 1) and sat(|y| / 2 - 2) into a, b and c,
                                  from the magnitude x of h

    The magnitude's code is the sum of three parts that saturate, each rounded to nearest even by adding it to 2^23: 4 a
    counts halves up to 2, then 2 b ones up to 4, then c twos up to 6. The multipliers do it all, at twice the rate of
    comparisons. NaN saturates to 0, and a product that is NaN has a positive sign.
    """
    lines = ["{", ".reg .f32 x, h<8>, a, b, c, r;", ".reg .b32 k<8>, even, odd, s, t;", ".reg .b16 low, high;"]
    for i, product in enumerate(product_instructions):
        lines += [
            *product,
            f"abs.f32 x, h{i};",
            *saturated_part_instructions,
            "fma.rn.f32 r, a, 0f40800000, 0f4B000000;",
            "fma.rn.f32 r, b, 0f40000000, r;",
            "add.rn.f32 r, r, c;",
            f"mov.b32 k{i}, r;",
        ]
    # 2^23's own bits, shifted with the codes, add up to 0xFB000000.
    lines.append("add.u32 t, k0, 0x05000000;")
    for i in range(1, 8):
        lines += [f"shl.b32 k{i}, k{i}, {4 * i};", f"add.u32 t, t, k{i};"]
    # A byte permute that repeats a byte's top bit gives the signs of even and of odd columns, a byte each.
    for first, name in ((0, "even"), (1, "odd")):
        lines += [
            f"mov.b32 k0, h{first};", f"mov.b32 k1, h{first + 2};", "prmt.b32 s, k0, k1, 0x00FB;",
            f"mov.b32 k0, h{first + 4};", f"mov.b32 k1, h{first + 6};", "prmt.b32 k0, k0, k1, 0x00FB;",
            f"prmt.b32 {name}, s, k0, 0x5410;",
        ]  # fmt: skip
    lines += ["and.b32 even, even, 0x08080808;", "and.b32 odd, odd, 0x80808080;", "or.b32 s, even, odd;"]
    lines += ["or.b32 $0, t, s;", "}"]
    return "\n".join(lines)


def _fp16_or_bf16_pairs_to_e2m1_ptx(fp16: bool) -> str:
    """Returns PTX: four pairs $1 to $4 and half of a block's inverse scale $5 to $8 for each → four bytes $0."""
    products = []
    for i in range(8):
        word, inv_scale = f"${1 + i // 2}", f"${5 + i // 2}"
        if fp16:
            lines = [f"mov.b32 {{low, high}}, {word};", f"cvt.f32.f16 x, {'high' if i % 2 else 'low'};"]
        else:
            lines = [f"and.b32 t, {word}, 0xFFFF0000;" if i % 2 else f"shl.b32 t, {word}, 16;", "mov.b32 x, t;"]
        products.append([*lines, f"mul.rn.f32 h{i}, x, {inv_scale};"])
    parts = "add.rn.sat.f32 a, x, 0f80000000;", "add.rn.sat.f32 b, x, 0fBF800000;", "add.rn.sat.f32 c, x, 0fC0000000;"
    return encode_8_e2m1_codes_ptx(products, parts)


_BF16_TO_E2M1_PTX = tl.constexpr(_fp16_or_bf16_pairs_to_e2m1_ptx(False))
_FP16_TO_E2M1_PTX = tl.constexpr(_fp16_or_bf16_pairs_to_e2m1_ptx(True))


@triton.jit
def load_packed_pairs(p, o_rows_in_pairs, D: tl.constexpr, D_PAD: tl.constexpr):
    """Loads rows [ROWS, D_PAD / 2] of pairs; 0 from column D on."""
    i = tl.arange(0, D_PAD // 2)[None, :]
    p = p.to(tl.pointer_type(tl.uint32))
    if D == D_PAD:
        return tl.load(p + o_rows_in_pairs + i)
    else:
        return tl.load(p + o_rows_in_pairs + i, mask=i < D // 2, other=0)


@triton.jit
def unpack_16bit_pairs_to_fp32(pairs, FP16: tl.constexpr):
    """Returns the two values of each pair, fp32: even columns, odd columns."""
    if FP16:
        even = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        return even, (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        return (pairs << 16).to(tl.float32, bitcast=True), (pairs & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _max_bf16x2(a, b):
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def _max_fp16x2(a, b):
    return tl.inline_asm_elementwise("max.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def fp32_abs_max_per_nvfp4_block(pairs, FP16: tl.constexpr, USE_PTX: tl.constexpr):
    """Returns the largest magnitude of each block, NaN ignored: pairs [ROWS, W] → fp32 [ROWS, W / 8]."""
    magnitudes = tl.reshape(pairs & 0x7FFF7FFF, [pairs.shape[0], pairs.shape[1] // PAIRS_PER_BLOCK, PAIRS_PER_BLOCK])
    if USE_PTX:
        even, odd = unpack_16bit_pairs_to_fp32(tl.reduce(magnitudes, 2, _max_fp16x2 if FP16 else _max_bf16x2), FP16)
        amax = tl.maximum(even, odd)
        return tl.where(amax > 0, amax, 0.0)
    else:
        even, odd = unpack_16bit_pairs_to_fp32(magnitudes, FP16)
        return row_abs_max(tl.maximum(even, odd))


@triton.jit
def encode_nvfp4_codes_and_scales_of_pairs(pairs, quant_scale, global_scale, FP16: tl.constexpr, USE_PTX: tl.constexpr):
    """Returns nvfp4 of pairs [ROWS, NUM_PAIRS]: bytes of that shape, e4m3 scales [ROWS, NUM_PAIRS / 8] as uint32."""
    ROWS: tl.constexpr = pairs.shape[0]
    NUM_PAIRS: tl.constexpr = pairs.shape[1]
    amax = fp32_abs_max_per_nvfp4_block(pairs, FP16, USE_PTX)
    scale_code, scale = round_magnitude_to_code_and_value(divide_rn(amax, E2M1_MAX) * quant_scale, 3, -6, E4M3_MAX)
    inv_scale = tl.where(scale > 0, reciprocal_rn(scale * global_scale), float("nan"))
    inv_scale = tl.broadcast_to(inv_scale[:, :, None], [ROWS, NUM_PAIRS // PAIRS_PER_BLOCK, PAIRS_PER_BLOCK])
    inv_scale = tl.reshape(inv_scale, [ROWS, NUM_PAIRS])
    if USE_PTX:
        # Halving is exact, except for global scales above 2^116, which no cache of finite values has.
        inv_scale *= 0.5
        PTX: tl.constexpr = _FP16_TO_E2M1_PTX if FP16 else _BF16_TO_E2M1_PTX
        codes = tl.inline_asm_elementwise(PTX, "=&r,r,r,r,r,f,f,f,f", [pairs, inv_scale], tl.uint8, True, 4)
    else:
        even, odd = unpack_16bit_pairs_to_fp32(pairs, FP16)
        codes = (encode_e2m1(even * inv_scale) | (encode_e2m1(odd * inv_scale) << 4)).to(tl.uint8)
    return codes, scale_code & 0xFF


@triton.jit
def quantize_and_store_nvfp4_pairs(
    pairs, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale,
    D: tl.constexpr, FP16: tl.constexpr, USE_PTX: tl.constexpr, STORE_SCALE_PAIRS: tl.constexpr,
):  # fmt: skip
    """Quantizes pairs [ROWS, NUM_PAIRS] and stores them, as `quant.quantize_and_store` does with rows.

    STORE_SCALE_PAIRS: scales can be stored two at a time, as a thread holds them
    """
    codes, scales = encode_nvfp4_codes_and_scales_of_pairs(pairs, quant_scale, global_scale, FP16, USE_PTX)
    NUM_PAIRS: tl.constexpr = pairs.shape[1]
    i = tl.arange(0, NUM_PAIRS)[None, :]
    tl.store(p_codes + o_codes + i, codes, mask=m_write if D == 2 * NUM_PAIRS else m_write & (i < D // 2))
    if STORE_SCALE_PAIRS:
        ROWS: tl.constexpr = pairs.shape[0]
        even_scales, odd_scales = tl.split(tl.reshape(scales, [ROWS, NUM_PAIRS // (2 * PAIRS_PER_BLOCK), 2]))
        # NOTE: as a sum of 16-bit numbers ptxas miscompiles it.
        scale_pairs = (even_scales | (odd_scales << 8)).to(tl.uint16)
        i = tl.arange(0, NUM_PAIRS // (2 * PAIRS_PER_BLOCK))[None, :]
        p = (p_scales + o_scales).to(tl.pointer_type(tl.uint16))
        tl.store(p + i, scale_pairs, mask=m_write if D == 2 * NUM_PAIRS else m_write & (i < D // 32))
    else:
        i = tl.arange(0, NUM_PAIRS // PAIRS_PER_BLOCK)[None, :]
        tl.store(
            p_scales + o_scales + i,
            scales.to(tl.uint8),
            mask=m_write if D == 2 * NUM_PAIRS else m_write & (i < D // 16),
        )


@triton.jit
def quantize_and_store_int4_pairs(
    pairs, p_codes, p_scales, o_codes, o_scales, m_write, D: tl.constexpr, FP16: tl.constexpr, WIDEN_TO_0: tl.constexpr
):  # fmt: skip
    """Quantizes pairs [ROWS, C / 2] to int4 and stores them, as `quant.quantize_and_store` does with rows."""
    even, odd = unpack_16bit_pairs_to_fp32(pairs, FP16)
    even_min, even_max = row_min_max(even, D // 2, WIDEN_TO_0)
    odd_min, odd_max = row_min_max(odd, D // 2, WIDEN_TO_0)
    scale, zero_point, stored_scale = int4_scale_zero_point_and_stored_scale(
        tl.minimum(even_min, odd_min), tl.maximum(even_max, odd_max)
    )
    codes = quantize_int4(even, scale, zero_point) | (quantize_int4(odd, scale, zero_point) << 4)
    store_codes(p_codes, o_codes, codes.to(tl.uint8), m_write, D // 2)
    tl.store(p_scales + o_scales, stored_scale[:, None], mask=m_write)
