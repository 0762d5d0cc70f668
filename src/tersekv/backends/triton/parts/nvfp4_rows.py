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


def _encode_ptx() -> str:
    """Returns PTX: 8 columns of two words and the inverse scale of each → 8 nibbles $0.

    Operands are tiles of 2 elements: columns 4 * i + j first, then inverse scales of element i.
    """
    products = [[f"mul.rn.f32 h{c}, ${1 + 2 * (c % 4) + c // 4}, ${9 + c // 4};"] for c in range(8)]
    addends = {"a": "0f80000000", "b": "0fBF800000", "c": "0fC0000000"}  # -0, -1, -2
    return encode_8_e2m1_codes_ptx(
        products, [f"fma.rn.sat.f32 {to}, x, 0f3F000000, {addend};" for to, addend in addends.items()]
    )


_ENCODE_PTX, _CONSTRAINTS = tl.constexpr(_encode_ptx()), tl.constexpr("=r" + ",f" * 10)


@triton.jit
def encode_e2m1_tiles(tiles, inv_scale, USE_PTX: tl.constexpr):
    """Returns codes of 4 tiles [ROWS, WORDS] times inv_scale, a nibble each, the first lowest: uint16."""
    if USE_PTX:
        return tl.inline_asm_elementwise(
            _ENCODE_PTX, _CONSTRAINTS, [tiles[0], tiles[1], tiles[2], tiles[3], inv_scale], tl.uint16, True, 2
        )
    else:
        nibbles = tl.zeros(tiles[0].shape, tl.uint32)
        for j in tl.static_range(4):
            nibbles |= encode_e2m1(tiles[j] * inv_scale) << (4 * j)
        return nibbles.to(tl.uint16)


@triton.jit
def quantize_and_store_nvfp4_tiles(
    tiles, p_codes, p_scales, o_codes, o_scales, m_write, quant_scale, global_scale, USE_PTX: tl.constexpr
):  # fmt: skip
    """Quantizes rows of tiles and stores them, as `quant.quantize_and_store` does."""
    ROWS: tl.constexpr = tiles[0].shape[0]
    WORDS: tl.constexpr = tiles[0].shape[1]
    PER_BLOCK: tl.constexpr = NVFP4_BLOCK // len(tiles)
    magnitude = tl.abs(tiles[0])
    for j in tl.static_range(1, len(tiles)):
        magnitude = tl.maximum(magnitude, tl.abs(tiles[j]))  # ignores NaN
    amax = row_abs_max(tl.reshape(magnitude, [ROWS, WORDS // PER_BLOCK, PER_BLOCK]))
    scale_code, scale = round_magnitude_to_code_and_value(divide_rn(amax, E2M1_MAX) * quant_scale, 3, -6, E4M3_MAX)
    # Where the scale rounds to 0, NaN makes all codes 0.
    inv_scale = tl.where(scale > 0, reciprocal_rn(scale * global_scale), float("nan"))
    inv_scale = tl.broadcast_to(inv_scale[:, :, None], [ROWS, WORDS // PER_BLOCK, PER_BLOCK])
    codes = encode_e2m1_tiles(tiles, tl.reshape(inv_scale, [ROWS, WORDS]), USE_PTX)
    i = tl.arange(0, WORDS)[None, :]
    tl.store((p_codes + o_codes).to(tl.pointer_type(codes.dtype)) + i, codes, mask=m_write)
    i = tl.arange(0, WORDS // PER_BLOCK)[None, :]
    tl.store(p_scales + o_scales + i, scale_code.to(tl.uint8), mask=m_write)
