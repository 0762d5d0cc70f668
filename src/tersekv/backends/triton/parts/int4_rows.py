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
from .packed_quant import unpack_16bit_pairs_to_fp32
from .quant import int4_scale_zero_point_and_stored_scale, reciprocal_rn, round_and_clamp_to_int4


def _encode_8_int4_codes_ptx_lines(values: list[str], inv_scales: list[str], zero_points: list[str]) -> list[str]:
    """PTX of 8 numbers, the inverse scale and the zero point of each → 8 nibbles $0, in registers x, t and k0 to k7.

    A saturating multiply-add gives (y + 0.5) / 16 in [0, 1], rounded as y + 0.5 is; 2^19, whose last bit is 1 / 16,
    rounds it down to the code, or to 16 where that is 15. NaN saturates to 0.
    """
    lines = []
    for c, (value, inv_scale, zero_point) in enumerate(zip(values, inv_scales, zero_points, strict=True)):
        lines += [
            f"mul.rn.f32 x, {value}, {inv_scale};",
            f"add.rn.f32 x, x, {zero_point};",
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
    return [*lines, "shl.b32 t, k1, 4;", "or.b32 $0, k0, t;"]


def _encode_8_int4_codes_ptx(num_input_tiles: int) -> str:
    """Returns PTX: 8 columns, 1 / scale and zero point of each → 8 nibbles $0.

    Operands are tiles of n = 8 / num_input_tiles elements: columns num_input_tiles * i + j first, then 1 / scale and
    zero points of element i.
    """
    n = 8 // num_input_tiles
    at = [divmod(c, num_input_tiles) for c in range(8)]
    lines = _encode_8_int4_codes_ptx_lines(
        [f"${1 + j * n + i}" for i, j in at], [f"${9 + i}" for i, _ in at], [f"${9 + n + i}" for i, _ in at]
    )
    return "\n".join(["{", ".reg .f32 x;", ".reg .b32 k<8>, t;", *lines, "}"])


def _input_words_to_8_int4_codes_ptx(input_code: str) -> str:
    """Returns PTX: words of 8 codes, then (e4m3:) their scale, 1 / scale of the int4 row and its zero point for each
    word → 8 nibbles $0. Numbers are decoded where they are needed, so that few are held at a time."""
    pack = 4 if input_code == "e4m3" else 2
    n = 8 // pack
    lines = ["{", ".reg .f32 x, y<8>;", ".reg .b32 k<8>, t, p;", ".reg .b16 l, h, u, v;"]
    for i in range(n):
        word, y = f"${1 + i}", [f"y{pack * i + j}" for j in range(pack)]
        if input_code == "e4m3":
            lines.append(f"mov.b32 {{u, v}}, {word};")
            for half, (low, high) in (("u", y[:2]), ("v", y[2:])):
                lines += [f"cvt.rn.f16x2.e4m3x2 p, {half};", "mov.b32 {l, h}, p;"]
                lines += [f"cvt.f32.f16 {low}, l;", f"cvt.f32.f16 {high}, h;"]
            lines += [f"mul.rn.f32 {name}, {name}, ${1 + n + i};" for name in y]
        elif input_code == "fp16":
            lines += [f"mov.b32 {{l, h}}, {word};", f"cvt.f32.f16 {y[0]}, l;", f"cvt.f32.f16 {y[1]}, h;"]
        else:
            lines += [f"shl.b32 t, {word}, 16;", f"mov.b32 {y[0]}, t;"]
            lines += [f"and.b32 t, {word}, 0xFFFF0000;", f"mov.b32 {y[1]}, t;"]
    first = 1 + n * (2 if input_code == "e4m3" else 1)
    of = [c // pack for c in range(8)]
    lines += _encode_8_int4_codes_ptx_lines(
        [f"y{c}" for c in range(8)], [f"${first + i}" for i in of], [f"${first + n + i}" for i in of]
    )
    return "\n".join([*lines, "}"])


def _constraints(pack: int) -> str:
    return "=r" + ",f" * (8 + 2 * 8 // pack)


_E4M3_WORDS_PTX, _BF16_WORDS_PTX, _FP16_WORDS_PTX = (
    tl.constexpr(_input_words_to_8_int4_codes_ptx(code)) for code in ("e4m3", "bf16", "fp16")
)
_ENCODE_2_PTX, _ENCODE_4_PTX = tl.constexpr(_encode_8_int4_codes_ptx(2)), tl.constexpr(_encode_8_int4_codes_ptx(4))
_CONSTRAINTS_2, _CONSTRAINTS_4 = tl.constexpr(_constraints(2)), tl.constexpr(_constraints(4))
_E4M3_PTX = tl.constexpr(
    "{\n.reg .b16 l, h;\nmov.b32 {l, h}, $2;\ncvt.rn.f16x2.e4m3x2 $0, l;\ncvt.rn.f16x2.e4m3x2 $1, h;\n}"
)


# NOTE: numbers leave this as fp32; of pairs of fp16 that it returned, the compiler permutes every two.
_E4M3_TO_FP32_PTX = tl.constexpr(
    """{
    .reg .b16 l, h;
    .reg .b32 p, q;
    mov.b32 {l, h}, $4;
    cvt.rn.f16x2.e4m3x2 p, l;
    cvt.rn.f16x2.e4m3x2 q, h;
    mov.b32 {l, h}, p;
    cvt.f32.f16 $0, l;
    cvt.f32.f16 $1, h;
    mov.b32 {l, h}, q;
    cvt.f32.f16 $2, l;
    cvt.f32.f16 $3, h;
    }"""
)


@triton.jit
def load_source_rows_as_32bit_word_tiles(
    p_src, o_rows, m_row, WORDS_PER_ROW: tl.constexpr, THREADS_PER_ROW: tl.constexpr
):
    """Loads rows of 32-bit words at p_src + o_rows, 0 outside m_row, in tiles [ROWS, 4 * THREADS_PER_ROW] of 16 bytes a
    thread: of a wider tile some releases of Triton give a row to several threads."""
    VECTOR: tl.constexpr = 4 * THREADS_PER_ROW
    p = (p_src + o_rows).to(tl.pointer_type(tl.uint32)) + tl.arange(0, VECTOR)[None, :]
    tiles = ()
    for i in tl.static_range(WORDS_PER_ROW // VECTOR):
        tiles = tiles + (tl.load(p + VECTOR * i, mask=m_row, other=0),)
    return tiles


@triton.jit
def load_source_rows_as_32bit_words(p_src, o_rows, m_row, WORDS_PER_ROW: tl.constexpr, THREADS_PER_ROW: tl.constexpr):
    """Loads rows [ROWS, WORDS_PER_ROW] of 32-bit words at p_src + o_rows, 0 outside m_row; THREADS_PER_ROW to a row."""
    ROWS: tl.constexpr = o_rows.shape[0]
    VECTOR: tl.constexpr = 4 * THREADS_PER_ROW
    LOADS: tl.constexpr = WORDS_PER_ROW // VECTOR
    tiles = load_source_rows_as_32bit_word_tiles(p_src, o_rows, m_row, WORDS_PER_ROW, THREADS_PER_ROW)
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
def decode_32bit_words_of_8_or_16bit_codes(
    words, FORMAT: tl.constexpr, NATIVE_E4M3: tl.constexpr, USE_PTX: tl.constexpr
):
    """Returns the codes of words as fp32 numbers, exactly: PACK tiles."""
    if FORMAT.CODE == BF16 or FORMAT.CODE == FP16:
        return unpack_16bit_pairs_to_fp32(words, FORMAT.CODE == FP16)
    elif FORMAT.CODE == E4M3 and NATIVE_E4M3 and USE_PTX:
        return tl.inline_asm_elementwise(
            _E4M3_TO_FP32_PTX, "=f,=f,=f,=f,r", [words], (tl.float32, tl.float32, tl.float32, tl.float32), True, 1
        )
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
def flip_fp32_signs(fp32_tiles, xor_words):
    """Returns fp32 numbers [ROWS, WORDS] of PACK tiles with the signs that `xor_words_of_signs` holds."""
    PACK: tl.constexpr = len(fp32_tiles)
    out = ()
    for j in tl.static_range(PACK):
        sign = (xor_words << (32 // PACK * (PACK - 1 - j))) & 0x80000000
        out = out + ((fp32_tiles[j].to(tl.uint32, bitcast=True) ^ sign).to(tl.float32, bitcast=True),)
    return out


@triton.jit
def normalized_hadamard_of_row_tiles(tiles):
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
def row_min_and_max_or_nan_of_words(word_tiles, e4m3_scale, FORMAT: tl.constexpr):
    """Returns what `row_min_and_max_or_nan_of_tiles` does, of codes (of e4m3, times e4m3_scale), from pairs of 16 bits:
    half the comparisons. [ROWS] fp32.

    word_tiles:  tiles of words, which together are the rows
    """
    pairs = word_tiles
    if FORMAT.CODE == E4M3:
        pairs = ()
        for i in tl.static_range(len(word_tiles)):
            pairs = pairs + e4m3_words_to_fp16_pairs(word_tiles[i])
    low, high = pairs[0], pairs[0]
    for i in tl.static_range(1, len(pairs)):
        if FORMAT.CODE == BF16:
            low, high = _min_bf16x2(low, pairs[i]), _max_or_nan_bf16x2(high, pairs[i])
        else:
            low, high = _min_fp16x2(low, pairs[i]), _max_or_nan_fp16x2(high, pairs[i])
    if FORMAT.CODE == BF16:
        low, high = tl.reduce(low, 1, _min_bf16x2), tl.reduce(high, 1, _max_or_nan_bf16x2)
    else:
        low, high = tl.reduce(low, 1, _min_fp16x2), tl.reduce(high, 1, _max_or_nan_fp16x2)
    a, b = unpack_16bit_pairs_to_fp32(low, FORMAT.CODE != BF16)
    c, d = unpack_16bit_pairs_to_fp32(high, FORMAT.CODE != BF16)
    row_min, row_max = tl.minimum(a, b), _max_or_nan(c, d)
    if FORMAT.CODE == E4M3:  # rounding keeps the order, and a scale below 0 turns it
        row_min, row_max = row_min_and_max_or_nan_of_tiles(
            (row_min[:, None] * e4m3_scale, row_max[:, None] * e4m3_scale)
        )
    return row_min, row_max


@triton.jit
def row_min_and_max_or_nan_of_tiles(tiles):
    """Returns minimum and maximum of rows, NaN ignored by the one, and not by the other."""
    low, high = tiles[0], tiles[0]
    for j in tl.static_range(1, len(tiles)):
        low, high = tl.minimum(low, tiles[j]), _max_or_nan(high, tiles[j])
    return tl.min(low, 1), tl.reduce(high, 1, _max_or_nan)


@triton.jit
def encode_fp32_tiles_as_int4(tiles, inv_scale, zero_point, USE_PTX: tl.constexpr):
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
            nibbles |= round_and_clamp_to_int4(tl.where(y == y, y, 0.0) + zero_point) << (4 * j)
        return nibbles.to(tl.uint8 if PACK == 2 else tl.uint16)


@triton.jit
def encode_words_as_int4(words, e4m3_scale, inv_scale, zero_point, FORMAT: tl.constexpr):
    """Returns codes of words (of e4m3, times e4m3_scale), a nibble each: uint8 or uint16."""
    if FORMAT.CODE == E4M3:
        return tl.inline_asm_elementwise(
            _E4M3_WORDS_PTX, "=&r,r,r,f,f,f,f,f,f", [words, e4m3_scale, inv_scale, zero_point], tl.uint16, True, 2
        )
    else:
        PTX: tl.constexpr = _FP16_WORDS_PTX if FORMAT.CODE == FP16 else _BF16_WORDS_PTX
        return tl.inline_asm_elementwise(
            PTX, "=&r,r,r,r,r,f,f,f,f,f,f,f,f", [words, inv_scale, zero_point], tl.uint8, True, 4
        )


@triton.jit
def zero_nan_of_words(words, FORMAT: tl.constexpr):
    """Returns words with 0 for NaN."""
    if FORMAT.CODE == E4M3:
        top = ((words & 0x7F7F7F7F) + 0x01010101) & 0x80808080
        return words & ~((top >> 7) * 0xFF)
    else:
        ABOVE_INF: tl.constexpr = 0x03FF03FF if FORMAT.CODE == FP16 else 0x007F007F
        top = ((words & 0x7FFF7FFF) + ABOVE_INF) & 0x80008000
        return words & ~((top >> 15) * 0xFFFF)


@triton.jit
def quantize_and_store_words_as_int4(
    tiles, e4m3_scale, p_codes, p_scales, o_codes, o_scales, m_write, FORMAT: tl.constexpr
):  # fmt: skip
    """Does `quantize_and_store_fp32_tiles_as_int4` on words of bf16 or fp16, or of e4m3 times e4m3_scale, by PTX."""
    row_min, row_max = row_min_and_max_or_nan_of_words(tiles, e4m3_scale, FORMAT)
    if tl.max((row_max != row_max).to(tl.int32), 0) != 0:
        numbers = ()
        for i in tl.static_range(len(tiles)):
            numbers = numbers + (zero_nan_of_words(tiles[i], FORMAT),)
        tiles = numbers
        if FORMAT.CODE == E4M3:
            e4m3_scale = tl.where(e4m3_scale == e4m3_scale, e4m3_scale, 0.0)
        row_min, row_max = row_min_and_max_or_nan_of_words(tiles, e4m3_scale, FORMAT)
    scale, zero_point, stored_scale = _int4_scales(row_min, row_max)
    inv_scale, zero_point = reciprocal_rn(scale)[:, None], zero_point[:, None]
    VECTOR: tl.constexpr = tiles[0].shape[1]
    i_word = tl.arange(0, VECTOR)[None, :]
    for i in tl.static_range(len(tiles)):
        codes = encode_words_as_int4(tiles[i], e4m3_scale, inv_scale, zero_point, FORMAT)
        tl.store((p_codes + o_codes).to(tl.pointer_type(codes.dtype)) + VECTOR * i + i_word, codes, mask=m_write)
    tl.store(p_scales + o_scales, stored_scale[:, None], mask=m_write)


@triton.jit
def _int4_scales(row_min, row_max):
    row_min, row_max = tl.where(row_min < 0, row_min, 0.0), tl.where(row_max > 0, row_max, 0.0)
    return int4_scale_zero_point_and_stored_scale(row_min, row_max)


@triton.jit
def quantize_and_store_fp32_tiles_as_int4(
    fp32_tiles, row_min_and_max_or_nan, p_codes, p_scales, o_codes, o_scales, m_write, USE_PTX: tl.constexpr
):  # fmt: skip
    """Quantizes rows of tiles and stores them, as `quant.quantize_and_store` does.

    row_min_and_max_or_nan:  from `row_min_and_max_or_nan_of_tiles`: NaN ends as a maximum, and is rare
    """
    row_min, row_max = row_min_and_max_or_nan
    if tl.max((row_max != row_max).to(tl.int32), 0) != 0:
        numbers = ()
        for j in tl.static_range(len(fp32_tiles)):
            numbers = numbers + (tl.where(fp32_tiles[j] == fp32_tiles[j], fp32_tiles[j], 0.0),)
        fp32_tiles = numbers
        row_min, row_max = row_min_and_max_or_nan_of_tiles(fp32_tiles)
    scale, zero_point, stored_scale = _int4_scales(row_min, row_max)
    codes = encode_fp32_tiles_as_int4(fp32_tiles, reciprocal_rn(scale)[:, None], zero_point[:, None], USE_PTX)
    i = tl.arange(0, codes.shape[1])[None, :]
    tl.store((p_codes + o_codes).to(tl.pointer_type(codes.dtype)) + i, codes, mask=m_write)
    tl.store(p_scales + o_scales, stored_scale[:, None], mask=m_write)
