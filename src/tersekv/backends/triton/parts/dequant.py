"""Read side: from stored codes to the values that matrix units multiply. The only format branches of the readers.

Codes are read packed in 16-bit words, two 8-bit or four 4-bit codes each, because shared memory is transposed in units
of 16 bits (V is multiplied transposed). A row unpacks into PACK tiles: tile j holds the columns PACK * i + j. Queries
and outputs are deinterleaved the same way, so nothing is interleaved again.

Codes become fp16: every code of every 8-bit and 4-bit format is exact in it, and on Hopper fp8 → fp16 is one conversion
a pair where fp8 → bf16 is three. 16-bit formats are multiplied as they are stored.
"""

import triton
import triton.language as tl

# Values of `KVFormat.code`, the kernels' constant CODE; compared at compile time only.
BF16, FP16 = tl.constexpr("bf16"), tl.constexpr("fp16")
E4M3, E5M2, INT8 = tl.constexpr("e4m3"), tl.constexpr("e5m2"), tl.constexpr("int8")
E2M1, INT4 = tl.constexpr("e2m1"), tl.constexpr("int4")

# Each converts two 16-bit words in one register to f16x2 registers, one per PACK tile.
E4M3_PTX = tl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
E5M2_PTX = tl.constexpr(
    """{
    .reg .b32 x;
    shl.b32 x, $2, 8;
    and.b32 $0, x, 0xFF00FF00;
    and.b32 $1, $2, 0xFF00FF00;
    }"""
)
# A byte permute puts a code, made unsigned, under the exponent of 1024; one subtraction frees it.
INT8_PTX = tl.constexpr(
    """{
    .reg .b32 x, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 $0, x, 0x64646464, 0x4240;
    prmt.b32 $1, x, 0x64646464, 0x4341;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
    }"""
)
# e4m3 without an instruction for it: the fields are fp16's, eight binades lower. 36000 times NaN's magnitude overflows,
# and no other's, so that the last line makes NaN of it.
_E4M3_FIELDS_PTX = tl.constexpr(
    """{
    .reg .b32 x, m, huge;
    .reg .b32 k256, k36000, zero;
    mov.b32 k256, 0x5C005C00;
    mov.b32 k36000, 0x78657865;
    mov.b32 zero, 0;
    shl.b32 x, $2, 8;
    shl.b32 m, $2, 7;
    and.b32 m, m, 0x3F803F80;
    lop3.b32 x, x, 0x80008000, m, 0xEA;
    mul.f16x2 huge, x, k36000;
    mul.f16x2 x, x, k256;
    fma.rn.f16x2 $0, huge, zero, x;
    shr.u32 m, $2, 1;
    and.b32 m, m, 0x3F803F80;
    lop3.b32 x, $2, 0x80008000, m, 0xEA;
    mul.f16x2 huge, x, k36000;
    mul.f16x2 x, x, k256;
    fma.rn.f16x2 $1, huge, zero, x;
    }"""
)
# A field of four bits, sign s and magnitude e, becomes fp16 by one multiplication: the field at bit 12 puts s at the
# sign, and a copy at bit 9 puts e at exponent and mantissa; the bits between are masked. The multiplicand is s and
# not(e), so that the sum of both carries into the sign for -0 alone, which becomes 0. Then times the block's scale,
# exact in fp16: six significant bits, multiples of 2^-24.
E2M1_PTX = tl.constexpr(
    """{
    .reg .b32 x, y, r;
    lop3.b32 x, $4, 0x0F0F0F0F, 0x07070707, 0x6A;
    lop3.b32 y, $4, 0xF0F0F0F0, 0x70707070, 0x6A;
    mul.lo.u32 r, x, 0x1200;
    lop3.b32 r, r, 0x8E008E00, 0x0E000E00, 0x6A;
    mul.f16x2 $0, r, $5;
    mul.lo.u32 r, y, 0x120;
    lop3.b32 r, r, 0x8E008E00, 0x0E000E00, 0x6A;
    mul.f16x2 $1, r, $5;
    mul.lo.u32 r, x, 0x12;
    lop3.b32 r, r, 0x8E008E00, 0x0E000E00, 0x6A;
    mul.f16x2 $2, r, $5;
    shr.u32 r, y, 3;
    add.u32 r, r, y;
    lop3.b32 r, r, 0x8E008E00, 0x0E000E00, 0x6A;
    mul.f16x2 $3, r, $5;
    }"""
)
# An int4 code in the lowest bits of fp16 is a subnormal number: code × 2^-24; four bits higher × 2^-20. MMAs hold both
# exactly, so masking suffices. Of K; the zero point is subtracted from the score.
INT4_PTX = tl.constexpr(
    """{
    .reg .b32 x;
    and.b32 $0, $4, 0x000F000F;
    and.b32 $1, $4, 0x00F000F0;
    shr.u32 x, $4, 8;
    and.b32 $2, x, 0x000F000F;
    and.b32 $3, x, 0x00F000F0;
    }"""
)
# Of V, less the zero points of the two keys: the low ones as they are, the high ones four bits higher. NOTE: do not
# subtract them from the accumulator instead: the MMA truncates its sums towards zero, and over many keys the error of
# a sum of codes, all positive, would exceed the sum of values.
INT4_LESS_ZERO_PTX = tl.constexpr(
    """{
    .reg .b32 x;
    and.b32 $0, $4, 0x000F000F;
    and.b32 $1, $4, 0x00F000F0;
    shr.u32 x, $4, 8;
    and.b32 $2, x, 0x000F000F;
    and.b32 $3, x, 0x00F000F0;
    sub.f16x2 $0, $0, $5;
    sub.f16x2 $1, $1, $6;
    sub.f16x2 $2, $2, $5;
    sub.f16x2 $3, $3, $6;
    }"""
)
# Four e4m3 codes in a register to f16x2 registers, in order.
_E4M3_ROW_PTX = tl.constexpr(
    """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
# Without an instruction, and without NaN: block scales are numbers.
_E4M3_FIELDS_ROW_PTX = tl.constexpr(
    """{
    .reg .b32 x, m, k256;
    mov.b32 k256, 0x5C005C00;
    prmt.b32 x, $2, 0, 0x1404;
    shr.u32 m, x, 1;
    and.b32 m, m, 0x3F803F80;
    lop3.b32 x, x, 0x80008000, m, 0xEA;
    mul.f16x2 $0, x, k256;
    prmt.b32 x, $2, 0, 0x3424;
    shr.u32 m, x, 1;
    and.b32 m, m, 0x3F803F80;
    lop3.b32 x, x, 0x80008000, m, 0xEA;
    mul.f16x2 $1, x, k256;
    }"""
)
# Of normal numbers.
_LOG2_PTX = tl.constexpr("lg2.approx.ftz.f32 $0, $1;")
_RECIPROCAL_PTX = tl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@triton.jit
def e4m3_bytes_to_fp16(x):
    """Converts e4m3 codes (uint8) to fp16, exactly, without an fp8 type: fields are fp16's, eight binades lower."""
    codes = x.to(tl.uint16)
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def bytes_to_exact_fp16(code_bytes, cfg: tl.constexpr):
    """Converts codes [..] in the low bytes of uint16 to fp16, by portable operations."""
    if cfg.CODE == E4M3:
        return e4m3_bytes_to_fp16(code_bytes)
    elif cfg.CODE == E5M2:
        return (code_bytes << 8).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        tl.static_assert(cfg.CODE == INT8, "a code that is no byte")
        return code_bytes.to(tl.int8).to(tl.float16)


@triton.jit
def e2m1_nibbles_to_fp16_div_16384(nibbles):
    """Converts e2m1 codes in uint16 to fp16, × 2^-14."""
    bits = ((nibbles & 0x8) << 12) | ((nibbles & 0x7) << 9)
    return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def dequant_16bit_words_to_tiles(words, cfg: tl.constexpr, e2m1_scales_or_int4_zero_points=None):
    """Returns PACK fp16 tiles of the codes in words [N, W]; of 16 bits the tile itself.

    e2m1_scales_or_int4_zero_points: block scales of `expand_block_scales_times_power_of_2`, which multiply codes; None,
    or zero points (int16, broadcast against the words), which are subtracted.
    Tiles are values × their `dequant_tile_power_of_2_factor`.
    """
    # NOTE: result types are written out: Triton 3.9 accepts no named tuple of types.
    if cfg.PACK == 1:
        tl.static_assert(cfg.CODE == BF16 or cfg.CODE == FP16, "a code that unpack does not know")
        return (words,)
    elif cfg.USE_PTX:
        if cfg.CODE == E4M3:
            PTX: tl.constexpr = _E4M3_FIELDS_PTX if cfg.E4M3_BY_HAND else E4M3_PTX
            return tl.inline_asm_elementwise(PTX, "=&r,=&r,r", [words], (tl.float16, tl.float16), True, 2)
        elif cfg.CODE == E5M2:
            return tl.inline_asm_elementwise(E5M2_PTX, "=&r,=&r,r", [words], (tl.float16, tl.float16), True, 2)
        elif cfg.CODE == INT8:
            return tl.inline_asm_elementwise(INT8_PTX, "=&r,=&r,r", [words], (tl.float16, tl.float16), True, 2)
        elif cfg.CODE == INT4:
            if e2m1_scales_or_int4_zero_points is None:
                return tl.inline_asm_elementwise(
                    INT4_PTX, "=&r,=&r,=&r,=&r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
                )
            else:
                zero_low, words = tl.broadcast(e2m1_scales_or_int4_zero_points, words)
                zero_high, words = tl.broadcast(e2m1_scales_or_int4_zero_points << 4, words)
                return tl.inline_asm_elementwise(
                    INT4_LESS_ZERO_PTX,
                    "=&r,=&r,=&r,=&r,r,r,r",
                    [words, zero_low, zero_high],
                    (tl.float16, tl.float16, tl.float16, tl.float16),
                    True,
                    2,
                )
        else:
            tl.static_assert(cfg.CODE == E2M1, "a code that unpack does not know")
            return tl.inline_asm_elementwise(
                E2M1_PTX,
                "=&r,=&r,=&r,=&r,r,r",
                [words, e2m1_scales_or_int4_zero_points],
                (tl.float16, tl.float16, tl.float16, tl.float16),
                True,
                2,
            )
    else:
        codes = words.to(tl.uint16, bitcast=True)
        if cfg.PACK == 2:
            return bytes_to_exact_fp16(codes & 0xFF, cfg), bytes_to_exact_fp16(codes >> 8, cfg)
        else:
            out = ()
            for j in tl.static_range(4):
                nibbles = (codes >> (4 * j)) & 15
                if cfg.CODE == E2M1:
                    x = e2m1_nibbles_to_fp16_div_16384(nibbles) * e2m1_scales_or_int4_zero_points
                else:
                    tl.static_assert(cfg.CODE == INT4, "a code that is no nibble")
                    x = nibbles.to(tl.int16).to(tl.float16)
                    if e2m1_scales_or_int4_zero_points is not None:
                        x = x - e2m1_scales_or_int4_zero_points.to(tl.float16)
                out = out + (x,)
            return out


@triton.constexpr_function
def dequant_tile_power_of_2_factor(i_tile, cfg):
    """Returns the power of two that tile i_tile of `dequant_16bit_words_to_tiles` is multiplied by."""
    if cfg.CODE == "e2m1":
        return 2.0**-14 if cfg.USE_PTX else 2.0**-7  # 2^7: `expand_block_scales_times_power_of_2`
    elif cfg.CODE == "int4" and cfg.USE_PTX:
        return 2.0**-20 if i_tile % 2 else 2.0**-24
    else:
        return 1.0


@triton.jit
def expand_block_scales_times_power_of_2(
    e4m3_scales, NUM_ROWS: tl.constexpr, NUM_BLOCKS: tl.constexpr, PACKED_PER_BLOCK: tl.constexpr, cfg: tl.constexpr
):
    """Returns e4m3 block scales [NUM_ROWS, NUM_BLOCKS] by word, fp16 [NUM_ROWS, NUM_BLOCKS * PACKED_PER_BLOCK].

    Without PTX × 2^7, so that fewer products with codes × 2^-14 are subnormal: not every chip's MMA takes such.
    """
    if cfg.USE_PTX:
        # NOTE: said to be impure, so that it stays where each scale is held once: behind the change of layout each is
        # held by many lanes, at odd bytes.
        PTX: tl.constexpr = _E4M3_FIELDS_ROW_PTX if cfg.E4M3_BY_HAND else _E4M3_ROW_PTX
        s = tl.inline_asm_elementwise(PTX, "=&r,=&r,r", [e4m3_scales.to(tl.uint8, bitcast=True)], tl.float16, False, 4)
    elif cfg.E4M3_BY_HAND:
        s = e4m3_bytes_to_fp16(e4m3_scales) * 128.0
    else:
        s = e4m3_scales.to(tl.float16) * 128.0
    s = tl.broadcast_to(s[:, :, None], [NUM_ROWS, NUM_BLOCKS, PACKED_PER_BLOCK])
    return tl.reshape(s, [NUM_ROWS, NUM_BLOCKS * PACKED_PER_BLOCK])


@triton.jit
def int4_zero_points(scales):
    """Returns zero points (int32) of int4 rows: the lowest bits of their stored scales, fp32."""
    return scales.to(tl.int32, bitcast=True) & 15


@triton.jit
def approx_log2_and_reciprocal(x, cfg: tl.constexpr):
    """Returns log2(x) and 1 / x of normal positive numbers, to 2^-22."""
    if cfg.USE_PTX:
        return (
            tl.inline_asm_elementwise(_LOG2_PTX, "=f,f", [x], tl.float32, True, 1),
            tl.inline_asm_elementwise(_RECIPROCAL_PTX, "=f,f", [x], tl.float32, True, 1),
        )
    else:
        return tl.log2(x), 1.0 / x
