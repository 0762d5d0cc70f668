"""Read side: from stored codes to values that the matrix units take. The only format branches of the readers.

Codes are read as 16-bit words, two 8-bit or four 4-bit codes a word, because shared memory is transposed in units of
16 bits (values meet the matrix unit transposed). The words of a row fall apart into PARTS tiles: part j holds the
columns PARTS * i + j. Queries and outputs are taken apart the same way, so nothing is ever interleaved again.

Codes become fp16: every code of every 8-bit and 4-bit format is exact in it, and on Hopper fp8 → fp16 is one
conversion a pair where fp8 → bf16 is three. 16-bit formats are multiplied as they are stored.
"""

import triton
import triton.language as tl

# What the kernels' constant CODE says, `KVFormat.code`; compared at compile time only.
BF16, FP16 = tl.constexpr("bf16"), tl.constexpr("fp16")
E4M3, E5M2, INT8 = tl.constexpr("e4m3"), tl.constexpr("e5m2"), tl.constexpr("int8")
E2M1, INT4 = tl.constexpr("e2m1"), tl.constexpr("int4")
INT4_MIDDLE = tl.constexpr(8.0)  # that int4 codes are read from, so that sums of them stay small

# Each takes two words in one register and gives f16x2 registers, one per part.
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
# Sign to bit 15, magnitude to bits 11–9: fp16's own fields, fourteen binades lower.
_E2M1_PTX = tl.constexpr(
    """{
    .reg .b32 s, m;
    shl.b32 s, $4, 12;
    shl.b32 m, $4, 9;
    and.b32 m, m, 0x0E000E00;
    lop3.b32 $0, s, 0x80008000, m, 0xEA;
    shl.b32 s, $4, 8;
    shl.b32 m, $4, 5;
    and.b32 m, m, 0x0E000E00;
    lop3.b32 $1, s, 0x80008000, m, 0xEA;
    shl.b32 s, $4, 4;
    shl.b32 m, $4, 1;
    and.b32 m, m, 0x0E000E00;
    lop3.b32 $2, s, 0x80008000, m, 0xEA;
    shr.b32 m, $4, 3;
    and.b32 m, m, 0x0E000E00;
    lop3.b32 $3, $4, 0x80008000, m, 0xEA;
    }"""
)
# A nibble under the exponent of 1024, in its lowest bits or four higher; one subtraction frees it, or one multiply-add.
_INT4_PTX = tl.constexpr(
    """{
    .reg .b32 x, bias, part, high;
    mov.b32 bias, 0x64086408;
    mov.b32 part, 0x2C002C00;
    mov.b32 high, 0xD480D480;
    lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 $1, $4, 0x00F000F0, 0x64006400, 0xEA;
    shr.b32 x, $4, 8;
    lop3.b32 $2, x, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 $3, x, 0x00F000F0, 0x64006400, 0xEA;
    sub.f16x2 $0, $0, bias;
    fma.rn.f16x2 $1, $1, part, high;
    sub.f16x2 $2, $2, bias;
    fma.rn.f16x2 $3, $3, part, high;
    }"""
)


@triton.jit
def e4m3_bytes_to_fp16(x):
    """e4m3 codes as uint8 → fp16, exact, without an fp8 type: the code's fields are fp16's, eight binades lower."""
    w = x.to(tl.uint16)
    bits = ((w & 0x80) << 8) | ((w & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((w & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def byte_values(byte, c: tl.constexpr):
    """Codes [..] in the low bytes of uint16 → fp16, by portable operations."""
    if c.CODE == E4M3:
        return e4m3_bytes_to_fp16(byte)
    elif c.CODE == E5M2:
        return (byte << 8).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        tl.static_assert(c.CODE == INT8, "a code that byte_values does not know")
        return byte.to(tl.int8).to(tl.float16)


@triton.jit
def nibble_values(nibble, c: tl.constexpr):
    """Codes of 4 bits in uint16 → fp16; e2m1: × 2^-14, int4: − INT4_MIDDLE."""
    if c.CODE == INT4:
        return nibble.to(tl.int16).to(tl.float16) - INT4_MIDDLE
    else:
        tl.static_assert(c.CODE == E2M1, "a code that nibble_values does not know")
        bits = ((nibble & 0x8) << 12) | ((nibble & 0x7) << 9)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def unpack(words, c: tl.constexpr):
    """Words [N, W] → PARTS fp16 tiles of their codes (e2m1: × 2^-14; int4: − INT4_MIDDLE); of 16 bits: the tile."""
    if c.PARTS == 1:
        tl.static_assert(c.CODE == BF16 or c.CODE == FP16, "a code that unpack does not know")
        return (words,)
    elif c.ASM:
        if c.CODE == E4M3:
            return tl.inline_asm_elementwise(E4M3_PTX, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
        elif c.CODE == E5M2:
            return tl.inline_asm_elementwise(E5M2_PTX, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
        elif c.CODE == INT8:
            return tl.inline_asm_elementwise(INT8_PTX, "=r,=r,r", [words], (tl.float16, tl.float16), True, 2)
        elif c.CODE == INT4:
            return tl.inline_asm_elementwise(
                _INT4_PTX, "=&r,=&r,=&r,=&r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
            )
        else:
            tl.static_assert(c.CODE == E2M1, "a code that unpack does not know")
            return tl.inline_asm_elementwise(
                _E2M1_PTX, "=&r,=&r,=&r,=&r,r", [words], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
            )
    else:
        w = words.to(tl.uint16, bitcast=True)
        if c.PARTS == 2:
            return byte_values(w & 0xFF, c), byte_values(w >> 8, c)
        else:
            return (
                nibble_values(w & 15, c),
                nibble_values((w >> 4) & 15, c),
                nibble_values((w >> 8) & 15, c),
                nibble_values(w >> 12, c),
            )


@triton.jit
def block_scales(scales, N: tl.constexpr, BLOCKS: tl.constexpr, WORDS: tl.constexpr, c: tl.constexpr):
    """e4m3 block scales [N, BLOCKS] → fp16 [N, BLOCKS * WORDS] × 2^7. Times unpack's 2^-14 the product is exact in fp16
    (multiples of 2^-17 with six significant bits), and 2^7 is left for the caller's fp32 factor."""
    if c.BYTES:
        s = e4m3_bytes_to_fp16(scales)
    else:
        s = scales.to(tl.float16)
    s = tl.broadcast_to((s * 128.0)[:, :, None], [N, BLOCKS, WORDS])
    return tl.reshape(s, [N, BLOCKS * WORDS])


@triton.jit
def zero_points(scales):
    """Zero points of int4 rows, as `unpack` gives codes: minus INT4_MIDDLE. scales: as they are stored, [N] fp32."""
    return (scales.to(tl.int32, bitcast=True) & 15).to(tl.float32) - INT4_MIDDLE
