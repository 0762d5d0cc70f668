"""Rows as tiles (`int4_rows.py`) to nvfp4: a thread holds blocks, whose maximum and bytes need no other one."""

from __future__ import annotations

import triton
import triton.language as tl

from .packed_quant import encode_8_e2m1_codes_ptx
from .quant import (
    E2M1_MAX,
    E4M3_MAX,
    NVFP4_BLOCK,
    divide_rn,
    encode_e2m1,
    reciprocal_rn,
    round_magnitude_to_code_and_value,
    row_abs_max,
)

_ADDENDS = {"a": "0f80000000", "b": "0fBF800000", "c": "0fC0000000"}  # -0, -1, -2
_PARTS = [f"fma.rn.sat.f32 {to}, x, 0f3F000000, {addend};" for to, addend in _ADDENDS.items()]


def _encode_8_floats_as_e2m1_ptx() -> str:
    """Returns PTX: 8 columns of two words and the inverse scale of each → 8 nibbles $0.

    Operands are tiles of 2 elements: columns 4 * i + j first, then inverse scales of element i.
    """
    products = [[f"mul.rn.f32 h{c}, ${1 + 2 * (c % 4) + c // 4}, ${9 + c // 4};"] for c in range(8)]
    return encode_8_e2m1_codes_ptx(products, _PARTS)


def _e4m3_block_to_nvfp4_ptx() -> str:
    """Returns PTX: a block's four words of e4m3, their scale, the quantizing scale and the global scale $3 to $9 → two
    words of codes $0, $1 and the block's scale $2, e4m3, as `quantize_and_store_fp32_tiles_as_nvfp4` computes them."""
    lines = ["{", ".reg .b32 p<8>, m;", ".reg .b16 l, u;", ".reg .f32 amax, scale, inv, zero;", ".reg .pred z;"]
    for i in range(4):
        lines += [
            f"mov.b32 {{l, u}}, ${3 + i};",
            f"cvt.rn.f16x2.e4m3x2 p{2 * i}, l;",
            f"cvt.rn.f16x2.e4m3x2 p{2 * i + 1}, u;",
        ]
    lines.append("max.xorsign.abs.f16x2 m, p0, p1;")  # ignores NaN
    lines += [f"max.xorsign.abs.f16x2 m, m, p{i};" for i in range(2, 8)]
    lines += [
        "mov.f32 zero, 0f00000000;",
        "mov.b32 {l, u}, m;", "max.xorsign.abs.f16 l, l, u;", "cvt.f32.f16 amax, l;", "abs.f32 amax, amax;",
        "abs.f32 scale, $7;", "mul.rn.f32 amax, amax, scale;",
        "setp.gt.f32 z, amax, zero;", "selp.f32 amax, amax, zero, z;",
        "div.rn.f32 amax, amax, 0f40C00000;", "mul.rn.f32 amax, amax, $8;", "abs.f32 amax, amax;",
        "min.f32 amax, amax, 0f43E00000;",
        "cvt.rn.satfinite.e4m3x2.f32 l, zero, amax;", "cvt.u32.u16 $2, l;",
        "cvt.rn.f16x2.e4m3x2 m, l;", "mov.b32 {l, u}, m;", "cvt.f32.f16 scale, l;",
        "mul.rn.f32 inv, scale, $9;", "rcp.rn.f32 inv, inv;",
        "setp.gt.f32 z, scale, zero;", "selp.f32 inv, inv, 0f7FC00000, z;",
    ]  # fmt: skip
    for half in (0, 1):
        products = [
            [
                f"mov.b32 {{low, high}}, p{4 * half + c // 2};",
                f"cvt.f32.f16 x, {('low', 'high')[c % 2]};",
                "mul.rn.f32 x, x, $7;",
                f"mul.rn.f32 h{c}, x, inv;",
            ]
            for c in range(8)
        ]
        lines.append(encode_8_e2m1_codes_ptx(products, _PARTS).replace("$0", f"${half}"))
    return "\n".join([*lines, "}"])


_E4M3_BLOCK_PTX = tl.constexpr(_e4m3_block_to_nvfp4_ptx())
_ENCODE_PTX, _CONSTRAINTS = tl.constexpr(_encode_8_floats_as_e2m1_ptx()), tl.constexpr("=r" + ",f" * 10)


@triton.jit
def encode_fp32_tiles_as_e2m1(fp32_tiles, inv_scale, USE_PTX: tl.constexpr):
    """Returns codes of 4 tiles [ROWS, WORDS] times inv_scale, a nibble each, the first lowest: uint16."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            _ENCODE_PTX,
            _CONSTRAINTS,
            [fp32_tiles[0], fp32_tiles[1], fp32_tiles[2], fp32_tiles[3], inv_scale],
            tl.uint16,
            True,
            2,
        )
    else:
        nibbles = tl.zeros(fp32_tiles[0].shape, tl.uint32)
        for j in tl.static_range(4):
            nibbles |= encode_e2m1(fp32_tiles[j] * inv_scale) << (4 * j)
        return nibbles.to(tl.uint16)


@triton.jit
def quantize_and_store_fp32_tiles_as_nvfp4(
    fp32_tiles, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, USE_PTX: tl.constexpr
):  # fmt: skip
    """Quantizes rows of tiles and stores them, as `quant.quantize_and_store` does."""
    ROWS: tl.constexpr = fp32_tiles[0].shape[0]
    WORDS: tl.constexpr = fp32_tiles[0].shape[1]
    PER_BLOCK: tl.constexpr = NVFP4_BLOCK // len(fp32_tiles)
    magnitude = tl.abs(fp32_tiles[0])
    for j in tl.static_range(1, len(fp32_tiles)):
        magnitude = tl.maximum(magnitude, tl.abs(fp32_tiles[j]))  # ignores NaN
    amax = row_abs_max(tl.reshape(magnitude, [ROWS, WORDS // PER_BLOCK, PER_BLOCK]))
    scale_code, scale = round_magnitude_to_code_and_value(divide_rn(amax, E2M1_MAX) * quant_scale, 3, -6, E4M3_MAX)
    # Where the scale rounds to 0, NaN makes all codes 0.
    inv_scale = tl.where(scale > 0, reciprocal_rn(scale * global_scale), float("nan"))
    inv_scale = tl.broadcast_to(inv_scale[:, :, None], [ROWS, WORDS // PER_BLOCK, PER_BLOCK])
    codes = encode_fp32_tiles_as_e2m1(fp32_tiles, tl.reshape(inv_scale, [ROWS, WORDS]), USE_PTX)
    i = tl.arange(0, WORDS)[None, :]
    tl.store((p_codes + o_codes).to(tl.pointer_type(codes.dtype)) + i, codes, mask=m_write)
    i = tl.arange(0, WORDS // PER_BLOCK)[None, :]
    tl.store(p_scales + o_scales + i, scale_code.to(tl.uint8), mask=m_write)


@triton.jit
def quantize_and_store_e4m3_words_as_nvfp4(
    tiles, scale, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale
):  # fmt: skip
    """Does `quantize_and_store_fp32_tiles_as_nvfp4` on tiles of e4m3 words [ROWS, W] times scale, a block at a time, by
    PTX.

    Each tile is stored as the threads have it: what they would store together crosses shared memory first.
    """
    ROWS: tl.constexpr = tiles[0].shape[0]
    BLOCKS: tl.constexpr = tiles[0].shape[1] // 4
    p = (p_codes + o_codes).to(tl.pointer_type(tl.uint32)) + tl.arange(0, 2 * BLOCKS)[None, :]
    p_scales = p_scales + o_scales + tl.arange(0, BLOCKS)[None, :]
    for i in tl.static_range(len(tiles)):
        even, odd = tl.split(tl.reshape(tiles[i], [ROWS, BLOCKS, 2, 2]))
        w0, w2 = tl.split(even)
        w1, w3 = tl.split(odd)
        low, high, scales = tl.inline_asm_elementwise(
            _E4M3_BLOCK_PTX, "=&r,=&r,=&r,r,r,r,r,f,f,f", [w0, w1, w2, w3, scale, quant_scale, global_scale],
            (tl.uint32, tl.uint32, tl.uint32), True, 1,
        )  # fmt: skip
        tl.store(p + 2 * BLOCKS * i, tl.reshape(tl.join(low, high), [ROWS, 2 * BLOCKS]), mask=m_write)
        tl.store(p_scales + BLOCKS * i, scales.to(tl.uint8), mask=m_write)
