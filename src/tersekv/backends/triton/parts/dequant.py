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
INT4_BIAS = tl.constexpr(8.0)  # subtracted from int4 codes, so that sums of them stay small

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
    """Converts e4m3 codes (uint8) to fp16, exactly, without an fp8 type: fields are fp16's, eight binades lower."""
    codes = x.to(tl.uint16)
    bits = ((codes & 0x80) << 8) | ((codes & 0x7F) << 7)
    value = bits.to(tl.float16, bitcast=True) * 256.0
    return tl.where((codes & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def bytes_to_fp16(byte, cfg: tl.constexpr):
    """Converts codes [..] in the low bytes of uint16 to fp16, by portable operations."""
    if cfg.CODE == E4M3:
        return e4m3_bytes_to_fp16(byte)
    elif cfg.CODE == E5M2:
        return (byte << 8).to(tl.uint16).to(tl.float16, bitcast=True)
    else:
        tl.static_assert(cfg.CODE == INT8, "a code that byte_values does not know")
        return byte.to(tl.int8).to(tl.float16)


@triton.jit
def nibbles_to_fp16(nibble, cfg: tl.constexpr):
    """Converts 4-bit codes in uint16 to fp16; e2m1: × 2^-14, int4: − INT4_BIAS."""
    if cfg.CODE == INT4:
        return nibble.to(tl.int16).to(tl.float16) - INT4_BIAS
    else:
        tl.static_assert(cfg.CODE == E2M1, "a code that nibble_values does not know")
        bits = ((nibble & 0x8) << 12) | ((nibble & 0x7) << 9)
        return bits.to(tl.uint16).to(tl.float16, bitcast=True)


@triton.jit
def dequant_packed(packed, cfg: tl.constexpr):
    """Returns PACK fp16 tiles of packed codes [N, W] (e2m1: × 2^-14; int4: − INT4_BIAS); 16-bit: the tile itself."""
    if cfg.PACK == 1:
        tl.static_assert(cfg.CODE == BF16 or cfg.CODE == FP16, "a code that unpack does not know")
        return (packed,)
    elif cfg.USE_PTX:
        if cfg.CODE == E4M3:
            return tl.inline_asm_elementwise(E4M3_PTX, "=r,=r,r", [packed], (tl.float16, tl.float16), True, 2)
        elif cfg.CODE == E5M2:
            return tl.inline_asm_elementwise(E5M2_PTX, "=r,=r,r", [packed], (tl.float16, tl.float16), True, 2)
        elif cfg.CODE == INT8:
            return tl.inline_asm_elementwise(INT8_PTX, "=r,=r,r", [packed], (tl.float16, tl.float16), True, 2)
        elif cfg.CODE == INT4:
            return tl.inline_asm_elementwise(
                _INT4_PTX, "=&r,=&r,=&r,=&r,r", [packed], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
            )
        else:
            tl.static_assert(cfg.CODE == E2M1, "a code that unpack does not know")
            return tl.inline_asm_elementwise(
                _E2M1_PTX, "=&r,=&r,=&r,=&r,r", [packed], (tl.float16, tl.float16, tl.float16, tl.float16), True, 2
            )
    else:
        codes = packed.to(tl.uint16, bitcast=True)
        if cfg.PACK == 2:
            return bytes_to_fp16(codes & 0xFF, cfg), bytes_to_fp16(codes >> 8, cfg)
        else:
            return (
                nibbles_to_fp16(codes & 15, cfg),
                nibbles_to_fp16((codes >> 4) & 15, cfg),
                nibbles_to_fp16((codes >> 8) & 15, cfg),
                nibbles_to_fp16(codes >> 12, cfg),
            )


@triton.jit
def expand_block_scales(
    scales, NUM_ROWS: tl.constexpr, NUM_BLOCKS: tl.constexpr, PACKED_PER_BLOCK: tl.constexpr, cfg: tl.constexpr
):
    """Returns e4m3 block scales [NUM_ROWS, NUM_BLOCKS] as fp16 [NUM_ROWS, NUM_BLOCKS * PACKED_PER_BLOCK] × 2^7. Times
    dequant's 2^-14 the product is exact in fp16 (multiples of 2^-17 with six significant bits); the caller's fp32 scale
    applies the remaining 2^7."""
    if cfg.SCALES_AS_BYTES:
        s = e4m3_bytes_to_fp16(scales)
    else:
        s = scales.to(tl.float16)
    s = tl.broadcast_to((s * 128.0)[:, :, None], [NUM_ROWS, NUM_BLOCKS, PACKED_PER_BLOCK])
    return tl.reshape(s, [NUM_ROWS, NUM_BLOCKS * PACKED_PER_BLOCK])


@triton.jit
def int4_zero_points(scales):
    """Returns zero points of int4 rows − INT4_BIAS, matching `dequant_packed`. scales: as stored, [N] fp32."""
    return (scales.to(tl.int32, bitcast=True) & 15).to(tl.float32) - INT4_BIAS
