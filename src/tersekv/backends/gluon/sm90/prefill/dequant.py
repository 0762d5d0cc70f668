"""Dequantises packed codes to 16 bits in row order: one 32-bit register of codes becomes two or four of fp16 pairs.

NOTE: tiles are int32 on both sides. With 16-bit elements the compiler unpacks and repacks registers where it cannot
follow their order: 250 byte permutes a tile, at half the rate of multiplications (notes/prefill.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.dequant import E4M3_K_PTX, E5M2_K_PTX, INT8_K_PTX

# Through e4m3, in which e2m1's fields read 2^-6 as large; times the block scale, exact in fp16.
_E2M1_PTX = gl.constexpr(
    """{
    .reg .b32 even, odd, m;
    .reg .b16 low, high;
    shl.b32 even, $4, 4;
    shl.b32 m, $4, 2;
    and.b32 m, m, 0x1C1C1C1C;
    lop3.b32 even, even, 0x80808080, m, 0xEA;
    shr.b32 m, $4, 2;
    and.b32 m, m, 0x1C1C1C1C;
    lop3.b32 odd, $4, 0x80808080, m, 0xEA;
    prmt.b32 m, even, odd, 0x5140;
    prmt.b32 odd, even, odd, 0x7362;
    mov.b32 {low, high}, m;
    cvt.rn.f16x2.e4m3x2 m, low;
    mul.f16x2 $0, m, $5;
    cvt.rn.f16x2.e4m3x2 m, high;
    mul.f16x2 $1, m, $5;
    mov.b32 {low, high}, odd;
    cvt.rn.f16x2.e4m3x2 m, low;
    mul.f16x2 $2, m, $5;
    cvt.rn.f16x2.e4m3x2 m, high;
    mul.f16x2 $3, m, $5;
    }"""
)
# A nibble in the lowest mantissa bits under the exponent of 1024, or four bits higher under that of 64, minus the zero
# point under the same exponent.
_INT4_PTX = gl.constexpr(
    """{
    .reg .b32 a, b, x;
    lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 b, $4, 0x00F000F0, 0x54005400, 0xEA;
    shr.u32 x, $4, 8;
    sub.f16x2 a, a, $5;
    sub.f16x2 b, b, $6;
    prmt.b32 $0, a, b, 0x5410;
    prmt.b32 $2, a, b, 0x7632;
    lop3.b32 a, x, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 b, x, 0x00F000F0, 0x54005400, 0xEA;
    sub.f16x2 a, a, $5;
    sub.f16x2 b, b, $6;
    prmt.b32 $1, a, b, 0x5410;
    prmt.b32 $3, a, b, 0x7632;
    }"""
)
# An e4m3 byte as fp16 in both halves.
_BLOCK_SCALE_PTX = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $1, 0, 0x4400;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 $0, low;
    }"""
)


@gluon.constexpr_function
def _packed_per_lane(NUM_PACKED):
    return max(2, min(4, NUM_PACKED // 4))


@gluon.constexpr_function
def packed_layout(NUM_PACKED):
    """Returns the layout of packed codes [BLOCK_N, W]: lanes read eight keys in different banks."""
    return gl.BlockedLayout([1, _packed_per_lane(NUM_PACKED)], [8, 4], [4, 1], [0, 1])


@gluon.constexpr_function
def packed_blocks_layout(NUM_PACKED):
    """Returns `packed_layout` of 4-bit codes viewed as [BLOCK_N, blocks, 2]."""
    return gl.BlockedLayout([1, _packed_per_lane(NUM_PACKED) // 2, 2], [8, 4, 1], [4, 1, 1], [2, 0, 1])


@gluon.jit
def duplicate_low_half(x):
    """Returns the lower 16 bits in both halves of a register."""
    x = x & 0xFFFF
    return x | (x << 16)


@gluon.jit
def pack_row_scale(row_scale, k_zero_point, v_zero_point):
    """Packs a token's V scale (fp16) and int4 zero points of V and K into one int32."""
    return (
        (row_scale.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF)
        | (v_zero_point << 16)
        | (k_zero_point << 20)
    )


@gluon.jit
def _mul_f16x2(x, scales):
    scales, x = gl.broadcast(scales, x)
    return gl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [x, scales], gl.int32, True, 1)


# NOTE: result types are written out below: Triton 3.9 accepts no named tuple of types.
@gluon.jit
def _dequant_e2m1(packed, scale_bytes):
    """Returns e2m1 codes × block scales × 2^-6, as four registers."""
    NUM_KEYS: gl.constexpr = packed.shape[0]
    NUM_PACKED: gl.constexpr = packed.shape[1]
    scales = gl.inline_asm_elementwise(_BLOCK_SCALE_PTX, "=r,r", [scale_bytes.to(gl.int32)], gl.int32, True, 1)
    scales, _ = gl.broadcast(
        scales[:, :, None], gl.full([NUM_KEYS, NUM_PACKED // 2, 2], 0, gl.int32, packed_blocks_layout(NUM_PACKED))
    )
    scales = gl.convert_layout(scales.reshape([NUM_KEYS, NUM_PACKED]), packed_layout(NUM_PACKED), assert_trivial=True)
    return gl.inline_asm_elementwise(
        _E2M1_PTX, "=&r,=&r,=&r,=&r,r,r", [packed, scales], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )


@gluon.jit
def _dequant_int4(packed, row_scales, IS_V: gl.constexpr):
    """Returns int4 codes minus zero points, V times its row scales, as four registers."""
    zero_points = duplicate_low_half((row_scales >> (16 if IS_V else 20)) & 15)
    low, _ = gl.broadcast((zero_points | 0x64006400)[:, None], packed)
    high, _ = gl.broadcast(((zero_points << 4) | 0x54005400)[:, None], packed)
    x = gl.inline_asm_elementwise(
        _INT4_PTX, "=&r,=&r,=&r,=&r,r,r,r", [packed, low, high], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )
    if IS_V:
        scales = duplicate_low_half(row_scales)[:, None]
        x = (_mul_f16x2(x[0], scales), _mul_f16x2(x[1], scales), _mul_f16x2(x[2], scales), _mul_f16x2(x[3], scales))
    return x


@gluon.jit
def _dequant_8bit(packed, cfg: gl.constexpr):
    """Returns 8-bit codes as two registers of fp16 pairs."""
    if cfg.CODE == "e4m3":
        return gl.inline_asm_elementwise(E4M3_K_PTX, "=r,=r,r", [packed], (gl.int32, gl.int32), True, 1)
    elif cfg.CODE == "e5m2":
        return gl.inline_asm_elementwise(E5M2_K_PTX, "=&r,=&r,r", [packed], (gl.int32, gl.int32), True, 1)
    else:
        gl.static_assert(cfg.CODE == "int8", "a code that nobody here knows")
        return gl.inline_asm_elementwise(INT8_K_PTX, "=r,=r,r", [packed], (gl.int32, gl.int32), True, 1)


@gluon.jit
def dequant_rows(packed, row_scales, IS_V: gl.constexpr, cfg: gl.constexpr):
    """Returns packed codes [BLOCK_N, W] as fp16 pairs in row order.

    row_scales: from `pack_row_scale`, or bytes of block scales
    """
    NUM_KEYS: gl.constexpr = packed.shape[0]
    NUM_PACKED: gl.constexpr = packed.shape[1]
    if cfg.PACK == 4:
        if cfg.BLOCK_SCALES:
            gl.static_assert(cfg.CODE == "e2m1", "a code that nobody here knows")
            x = _dequant_e2m1(packed, row_scales)
        else:
            gl.static_assert(cfg.CODE == "int4", "a code that nobody here knows")
            x = _dequant_int4(packed, row_scales, IS_V)
        return gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3])).reshape([NUM_KEYS, 4 * NUM_PACKED])
    else:
        low, high = _dequant_8bit(packed, cfg)
        if cfg.TOKEN_SCALES and IS_V:
            scales = duplicate_low_half(row_scales)[:, None]
            low, high = _mul_f16x2(low, scales), _mul_f16x2(high, scales)
        return gl.join(low, high).reshape([NUM_KEYS, 2 * NUM_PACKED])
