"""Whole rows to int4 with few instructions: a thread holds a row, as far as registers reach.

Rows are loaded as 32-bit words of PACK codes and become PACK tiles [ROWS, WORDS] fp32: tile j holds columns PACK * i +
j. A thread that holds a row needs no other one for its range, its rotation and its bytes, and divides once for all of
it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .dequant import BF16, E4M3, E5M2, FP16, INT8, e4m3_bytes_to_fp16
from .hadamard import hadamard_butterflies
from .packed_quant import unpack_pairs
from .quant import encode_int4, int4_scale_and_zero_point, reciprocal_rn


def _encode_int4_ptx(codes_per_word: int) -> str:
    """Returns PTX: 8 columns, 1 / scale and zero point of each → 8 nibbles $0.

    Operands are tiles of n = 8 / codes_per_word elements: columns codes_per_word * i + j first, then 1 / scale and
    zero points of element i.
    A saturating multiply-add gives (y + 0.5) / 16 in [0, 1], rounded as y + 0.5 is; 2^19, whose last bit is 1 / 16,
    rounds it down to the code, or to 16 where that is 15. NaN saturates to 0.
    """
    n = 8 // codes_per_word
    lines = ["{", ".reg .f32 x;", ".reg .b32 k<8>, t;"]
    for c in range(8):
        i, j = divmod(c, codes_per_word)
        lines += [
            f"mul.rn.f32 x, ${1 + j * n + i}, ${1 + 8 + i};",
            f"add.rn.f32 x, x, ${1 + 8 + n + i};",
            "fma.rn.sat.f32 x, x, 0f3D800000, 0f3D000000;",
            "add.rm.f32 x, x, 0f49000000;",
            f"mov.b32 k{c}, x;",
        ]
    for c in (0, 1):  # the low bytes of even and of odd columns; then 16 becomes 15
        lines += [
            f"prmt.b32 k{c}, k{c}, k{c + 2}, 0x0040;",
            f"prmt.b32 k{c + 2}, k{c + 4}, k{c + 6}, 0x0040;",
            f"prmt.b32 k{c}, k{c}, k{c + 2}, 0x5410;",
            f"shr.u32 t, k{c}, 4;",
            "and.b32 t, t, 0x01010101;",
            f"sub.u32 k{c}, k{c}, t;",
        ]
    return "\n".join([*lines, "shl.b32 t, k1, 4;", "or.b32 $0, k0, t;", "}"])


def _constraints(pack: int) -> str:
    return "=r" + ",f" * (8 + 2 * 8 // pack)


_ENCODE_2_PTX, _ENCODE_4_PTX = tl.constexpr(_encode_int4_ptx(2)), tl.constexpr(_encode_int4_ptx(4))
_CONSTRAINTS_2, _CONSTRAINTS_4 = tl.constexpr(_constraints(2)), tl.constexpr(_constraints(4))
_E4M3_PTX = tl.constexpr(
    "{\n.reg .b16 l, h;\nmov.b32 {l, h}, $2;\ncvt.rn.f16x2.e4m3x2 $0, l;\ncvt.rn.f16x2.e4m3x2 $1, h;\n}"
)


@triton.jit
def load_rows_as_32bit_words(p, o_rows, m_row, WORDS_PER_ROW: tl.constexpr, THREADS_PER_ROW: tl.constexpr):
    """Loads rows [ROWS, WORDS_PER_ROW] of 32-bit words at p + o_rows, 0 outside m_row; THREADS_PER_ROW share a row.

    In loads of 16 bytes a thread, each a tile of its own: of a wider tile some releases of Triton give a row to several
    threads.
    """
    ROWS: tl.constexpr = o_rows.shape[0]
    VECTOR: tl.constexpr = 4 * THREADS_PER_ROW
    LOADS: tl.constexpr = WORDS_PER_ROW // VECTOR
    p = (p + o_rows).to(tl.pointer_type(tl.uint32)) + tl.arange(0, VECTOR)[None, :]
    tiles = (tl.load(p, mask=m_row, other=0),)
    for i in tl.static_range(1, LOADS):
        tiles = tiles + (tl.load(p + VECTOR * i, mask=m_row, other=0),)
    for level in tl.static_range(LOADS.bit_length() - 1):
        wider = ()
        for i in tl.static_range(LOADS >> (level + 1)):
            pair = tl.permute(tl.join(tiles[2 * i], tiles[2 * i + 1]), (0, 2, 1))  # type: ignore[misc]
            wider = wider + (tl.reshape(pair, [ROWS, VECTOR << (level + 1)]),)
        tiles = wider
    return tiles[0]


@triton.jit
def e4m3_words_to_fp16_pairs(words):
    """Returns the four codes of words as two pairs of fp16, uint32."""
    return tl.inline_asm_elementwise(_E4M3_PTX, "=r,=r,r", [words], (tl.uint32, tl.uint32), True, 1)


@triton.jit
def decode_32bit_words(words, FORMAT: tl.constexpr, NATIVE_E4M3: tl.constexpr, USE_PTX: tl.constexpr):
    """Returns the codes of words as fp32 numbers, exactly: PACK tiles."""
    if FORMAT.CODE == BF16 or FORMAT.CODE == FP16:
        return unpack_pairs(words, FORMAT.CODE == FP16)
    elif FORMAT.CODE == E4M3 and NATIVE_E4M3 and USE_PTX:
        low, high = e4m3_words_to_fp16_pairs(words)
        return unpack_pairs(low, True) + unpack_pairs(high, True)
    else:
        tiles = ()
        for j in tl.static_range(4):
            codes = (words >> (8 * j)).to(tl.uint8)
            if FORMAT.CODE == E4M3 and NATIVE_E4M3:
                tiles = tiles + (codes.to(tl.float8e4nv, bitcast=True).to(tl.float32),)
            elif FORMAT.CODE == E4M3:
                tiles = tiles + (e4m3_bytes_to_fp16(codes).to(tl.float32),)
            elif FORMAT.CODE == E5M2:
                tiles = tiles + ((codes.to(tl.uint16) << 8).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32),)
            else:
                tl.static_assert(FORMAT.CODE == INT8, "a code that words do not know")
                tiles = tiles + (codes.to(tl.int8, bitcast=True).to(tl.float32),)
        return tiles


@triton.jit
def xor_words_of_signs(p_signs, WORDS_PER_ROW: tl.constexpr, PACK: tl.constexpr):
    """Returns what words [1, WORDS_PER_ROW] of floats are XORed with to be multiplied by signs.

    The top bit of each code: of int8, which has no sign bit, none.
    """
    c = PACK * tl.arange(0, WORDS_PER_ROW)[:, None] + tl.arange(0, PACK)[None, :]
    negative = tl.load(p_signs + c).to(tl.uint32, bitcast=True) >> 31
    BITS: tl.constexpr = 32 // PACK
    return tl.sum(negative << (BITS - 1 + BITS * tl.arange(0, PACK)[None, :]), 1)[None, :]


@triton.jit
def flip_signs(tiles, xor_words):
    """Returns numbers [ROWS, WORDS] of PACK tiles with the signs that `xor_words_of_signs` holds."""
    PACK: tl.constexpr = len(tiles)
    out = ()
    for j in tl.static_range(PACK):
        sign = (xor_words << (32 // PACK * (PACK - 1 - j))) & 0x80000000
        out = out + ((tiles[j].to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True),)
    return out


@triton.jit
def hadamard_of_row_tiles(tiles):
    """Returns rows times the normalised Hadamard matrix, in the order of stages of `hadamard_butterflies`."""
    PACK: tl.constexpr = len(tiles)
    ROWS: tl.constexpr = tiles[0].shape[0]
    WORDS: tl.constexpr = tiles[0].shape[1]
    if PACK == 2:
        tiles = (tiles[0] + tiles[1], tiles[0] - tiles[1])
    else:
        a, b, c, d = tiles[0] + tiles[1], tiles[0] - tiles[1], tiles[2] + tiles[3], tiles[2] - tiles[3]
        tiles = (a + c, b + d, a - c, b - d)
    out = ()
    for j in tl.static_range(PACK):
        out = out + (hadamard_butterflies(tiles[j], ROWS, WORDS) * (WORDS * PACK) ** -0.5,)
    return out


@triton.jit
def _max_or_nan(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _min_bf16x2(a, b):
    return tl.inline_asm_elementwise("min.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def _min_fp16x2(a, b):
    return tl.inline_asm_elementwise("min.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def _max_or_nan_bf16x2(a, b):
    return tl.inline_asm_elementwise("max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def _max_or_nan_fp16x2(a, b):
    return tl.inline_asm_elementwise("max.NaN.f16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, True, 1)


@triton.jit
def row_min_max_of_words(words, FORMAT: tl.constexpr):
    """Returns what `row_min_max_of_tiles` does, of codes, from pairs of 16 bits: half the comparisons. [ROWS] fp32."""
    if FORMAT.CODE == BF16:
        low, high = tl.reduce(words, 1, _min_bf16x2), tl.reduce(words, 1, _max_or_nan_bf16x2)
    elif FORMAT.CODE == FP16:
        low, high = tl.reduce(words, 1, _min_fp16x2), tl.reduce(words, 1, _max_or_nan_fp16x2)
    else:
        tl.static_assert(FORMAT.CODE == E4M3, "a code that has no pairs")
        p, q = e4m3_words_to_fp16_pairs(words)
        low = tl.reduce(_min_fp16x2(p, q), 1, _min_fp16x2)
        high = tl.reduce(_max_or_nan_fp16x2(p, q), 1, _max_or_nan_fp16x2)
    a, b = unpack_pairs(low, FORMAT.CODE != BF16)
    c, d = unpack_pairs(high, FORMAT.CODE != BF16)
    return tl.minimum(a, b), _max_or_nan(c, d)


@triton.jit
def row_min_max_of_tiles(tiles):
    """Returns minimum and maximum of rows, NaN ignored by the one, and not by the other."""
    low, high = tiles[0], tiles[0]
    for j in tl.static_range(1, len(tiles)):
        low, high = tl.minimum(low, tiles[j]), _max_or_nan(high, tiles[j])
    return tl.min(low, 1), tl.reduce(high, 1, _max_or_nan)


@triton.jit
def encode_int4_tiles(tiles, inv_scale, zero_point, USE_PTX: tl.constexpr):
    """Returns codes of tiles without NaN, a nibble each, the first lowest: uint8 or uint16."""
    PACK: tl.constexpr = len(tiles)
    if USE_PTX and PACK == 2:
        return tl.inline_asm_elementwise(
            _ENCODE_2_PTX, _CONSTRAINTS_2, [tiles[0], tiles[1], inv_scale, zero_point], tl.uint8, True, 4
        )
    elif USE_PTX:
        return tl.inline_asm_elementwise(
            _ENCODE_4_PTX, _CONSTRAINTS_4, [tiles[0], tiles[1], tiles[2], tiles[3], inv_scale, zero_point], tl.uint16,
            True, 2,
        )  # fmt: skip
    else:
        nibbles = tl.zeros(tiles[0].shape, tl.int32)
        for j in tl.static_range(PACK):
            y = tiles[j] * inv_scale
            nibbles |= encode_int4(tl.where(y == y, y, 0.0) + zero_point) << (4 * j)
        return nibbles.to(tl.uint8 if PACK == 2 else tl.uint16)


@triton.jit
def quantize_and_store_int4_tiles(
    tiles, row_min_max, p_codes, p_scales, o_codes, o_scales, m_write, USE_PTX: tl.constexpr
):  # fmt: skip
    """Quantizes rows of tiles and stores them, as `quant.quantize_and_store` does.

    row_min_max:  from `row_min_max_of_tiles`: NaN ends as a maximum, and is rare
    """
    row_min, row_max = row_min_max
    if tl.max((row_max != row_max).to(tl.int32), 0) != 0:
        numbers = ()
        for j in tl.static_range(len(tiles)):
            numbers = numbers + (tl.where(tiles[j] == tiles[j], tiles[j], 0.0),)
        tiles = numbers
        row_min, row_max = row_min_max_of_tiles(tiles)
    row_min, row_max = tl.where(row_min < 0, row_min, 0.0), tl.where(row_max > 0, row_max, 0.0)
    scale, zero_point, stored_scale = int4_scale_and_zero_point(row_min, row_max)
    codes = encode_int4_tiles(tiles, reciprocal_rn(scale)[:, None], zero_point[:, None], USE_PTX)
    i = tl.arange(0, codes.shape[1])[None, :]
    tl.store((p_codes + o_codes).to(tl.pointer_type(codes.dtype)) + i, codes, mask=m_write)
    tl.store(p_scales + o_scales, stored_scale[:, None], mask=m_write)
