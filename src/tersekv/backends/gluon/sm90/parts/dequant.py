"""Dequantization of codes to fp16, by the register: the only format branches of Gluon's decode; and scales.

A register holds two 16-bit packed words of codes. K: adjacent words of one key's row. V: the same word of two keys, as
ldmatrix transposes them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....triton.parts.dequant import E2M1_PTX, E4M3_PTX, E5M2_PTX, INT4_LESS_ZERO_PTX, INT4_PTX, INT8_PTX

# ---- PTX: a register of codes to f16x2 registers ----


# Each converts a register of codes to f16x2 registers. K: one per pair of codes of a lane.
E4M3_K_PTX = gl.constexpr(
    """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
# e5m2 codes are the upper bytes of fp16.
E5M2_K_PTX = gl.constexpr(
    """{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
    }"""
)
# A byte permute puts a code, made unsigned, under the exponent of 1024; one subtraction removes it.
INT8_K_PTX = gl.constexpr(
    """{
    .reg .b32 x, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 x, $2, 0x80808080;
    prmt.b32 $0, x, 0x64646464, 0x4140;
    prmt.b32 $1, x, 0x64646464, 0x4342;
    sub.f16x2 $0, $0, bias;
    sub.f16x2 $1, $1, bias;
    }"""
)
# e2m1 in row order, times the block's scale, by way of e4m3, whose fields are those of e2m1 six binades lower.
_E2M1_ROW_PTX = gl.constexpr(
    """{
    .reg .b32 a, m;
    .reg .b16 low, high;
    shl.b32 a, $4, 4;
    shl.b32 m, $4, 2;
    and.b32 m, m, 0x1C1C1C1C;
    lop3.b32 a, a, 0x80808080, m, 0xEA;
    mov.b32 {low, high}, a;
    cvt.rn.f16x2.e4m3x2 a, low;
    mul.f16x2 $0, a, $5;
    cvt.rn.f16x2.e4m3x2 a, high;
    mul.f16x2 $1, a, $5;
    shr.b32 m, $4, 2;
    and.b32 m, m, 0x1C1C1C1C;
    lop3.b32 a, $4, 0x80808080, m, 0xEA;
    mov.b32 {low, high}, a;
    cvt.rn.f16x2.e4m3x2 a, low;
    mul.f16x2 $2, a, $5;
    cvt.rn.f16x2.e4m3x2 a, high;
    mul.f16x2 $3, a, $5;
    }"""
)
# Less the zero points of their keys, in the order of `_E2M1_ROW_PTX`: a code in the lowest bits under the exponent of
# 1024, or four bits higher under that of 64, minus the zero point under the same exponents.
_INT4_ROW_PTX = gl.constexpr(
    """{
    .reg .b32 a, b, c, d;
    lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 b, $4, 0x00F000F0, 0x54005400, 0xEA;
    shr.u32 d, $4, 8;
    lop3.b32 c, d, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 d, d, 0x00F000F0, 0x54005400, 0xEA;
    sub.f16x2 a, a, $5;
    sub.f16x2 b, b, $6;
    sub.f16x2 c, c, $5;
    sub.f16x2 d, d, $6;
    prmt.b32 $0, a, c, 0x5410;
    prmt.b32 $1, a, c, 0x7632;
    prmt.b32 $2, b, d, 0x5410;
    prmt.b32 $3, b, d, 0x7632;
    }"""
)
INT4_ODD_SCALE = gl.constexpr(16.0)  # odd codes are this times larger than even ones, which are code × 2^-24
INT4_RESIDUAL_SCALE = gl.constexpr(2.0**20)  # left over in MMAs, with even codes times INT4_ODD_SCALE
# Two bytes of e4m3 selected from a word, as fp16; and bytes of two words as two f16x2.
K_BLOCK_SCALES_PTX = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $2, 0, $3;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 x, low;
    mov.b32 {$0, $1}, x;
    }"""
)
# The same, where a row begins between two words: the bytes of two words, of which some are another head's.
K_BLOCK_SCALES_OF_TWO_WORDS_PTX = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $2, $3, $4;
    and.b32 x, x, $5;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 x, low;
    mov.b32 {$0, $1}, x;
    }"""
)
V_BLOCK_SCALES_PTX = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $2, $3, $4;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
# Four bytes selected from two words.
WORD_OF_TWO_PTX = gl.constexpr("prmt.b32 $0, $1, $2, $3;")
# A byte of e4m3 as fp16.
BLOCK_SCALE_PTX = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 high;
    cvt.rn.f16x2.e4m3x2 x, $1;
    mov.b32 {$0, high}, x;
    }"""
)
# Of normal numbers.
_LOG2_PTX = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")
_RECIPROCAL_PTX = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


# ---- codes ----


@gluon.constexpr_function
def mma_dtype(cfg):
    """Returns the dtype of both MMAs' operands."""
    return gl.bfloat16 if cfg.BF16 else gl.float16


@gluon.jit
def convert_k_codes_to_16bit_operands(packed, cfg: gl.constexpr):
    """Returns packed K [HEADS_PER_CTA, MMA_KEYS, PACKED_K] (k_load_layout) as PACK operands in fp16; 16-bit caches
    unchanged.

    cfg: any record with CODE. int4: × 2^-24 and, every other one, × 2^-20; zero points are not subtracted.
    """
    if cfg.CODE == "bf16":
        out = (packed.to(gl.bfloat16, bitcast=True),)
    elif cfg.CODE == "fp16":
        out = (packed.to(gl.float16, bitcast=True),)
    elif cfg.CODE == "int4":
        out = gl.inline_asm_elementwise(
            INT4_PTX, "=&r,=&r,=&r,=&r,r", [packed], (gl.float16, gl.float16, gl.float16, gl.float16), True, 2
        )
    elif cfg.CODE == "e4m3":
        out = gl.inline_asm_elementwise(E4M3_K_PTX, "=r,=r,r", [packed], (gl.float16, gl.float16), True, 2)
    elif cfg.CODE == "e5m2":
        out = gl.inline_asm_elementwise(E5M2_K_PTX, "=&r,=&r,r", [packed], (gl.float16, gl.float16), True, 2)
    else:
        gl.static_assert(cfg.CODE == "int8", "a code that this kernel does not know")
        out = gl.inline_asm_elementwise(INT8_K_PTX, "=r,=r,r", [packed], (gl.float16, gl.float16), True, 2)
    return out


@gluon.jit
def convert_8_or_16bit_v_to_16bit_operands(packed, cfg: gl.constexpr):
    """Returns packed V [HEADS_PER_CTA, PACKED_V, MMA_KEYS] in the left operand's layout as PACK operands in fp16;
    16-bit caches unchanged."""
    if cfg.CODE == "bf16":
        out = (packed.to(gl.bfloat16, bitcast=True),)
    elif cfg.CODE == "fp16":
        out = (packed.to(gl.float16, bitcast=True),)
    elif cfg.CODE == "e4m3":
        out = gl.inline_asm_elementwise(E4M3_PTX, "=r,=r,r", [packed], (gl.float16, gl.float16), True, 2)
    elif cfg.CODE == "e5m2":
        out = gl.inline_asm_elementwise(E5M2_PTX, "=&r,=&r,r", [packed], (gl.float16, gl.float16), True, 2)
    else:
        gl.static_assert(cfg.CODE == "int8", "a code that this kernel does not know")
        out = gl.inline_asm_elementwise(INT8_PTX, "=r,=r,r", [packed], (gl.float16, gl.float16), True, 2)
    return out


@gluon.jit
def int4_v_minus_zero_points_to_fp16_subnormals(packed, zero_points):
    """Returns packed int4 V less the zero points (int16) of their keys: four operands, × 2^-24 and, every other one,
    × 2^-20."""
    zero_low, packed = gl.broadcast(zero_points, packed)
    zero_high, packed = gl.broadcast(zero_points << 4, packed)
    return gl.inline_asm_elementwise(
        INT4_LESS_ZERO_PTX, "=&r,=&r,=&r,=&r,r,r,r", [packed, zero_low, zero_high],
        (gl.float16, gl.float16, gl.float16, gl.float16), True, 2,
    )  # fmt: skip


@gluon.jit
def int4_rows_minus_zero_points_to_operands(packed, zero_points):
    """Returns packed int4 rows [keys, CODE_WORDS_PER_ROW] less the zero points (int16) of their keys: four operands,
    in the order of `dequant_e2m1_to_4_operands` with IN_ROW_ORDER_DIV_64."""
    zero_low, packed = gl.broadcast((zero_points | 0x6400)[:, None], packed)
    zero_high, packed = gl.broadcast(((zero_points << 4) | 0x5400)[:, None], packed)
    return gl.inline_asm_elementwise(
        _INT4_ROW_PTX,
        "=&r,=&r,=&r,=&r,r,r,r",
        [packed, zero_low, zero_high],
        (gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def dequant_e2m1_to_4_operands(packed, block_scales, IN_ROW_ORDER_DIV_64: gl.constexpr):
    """Returns e2m1 codes, four in a packed word, times their block scales (fp16): four operands.

    IN_ROW_ORDER_DIV_64: × 2^-6; a lane's two words are adjacent in a row, and so are the operands' pairs: codes
    0 and 2, 4 and 6, 1 and 3, 5 and 7 of the two. Else × 2^-14, and operand i is code i of each word.
    """
    PTX: gl.constexpr = _E2M1_ROW_PTX if IN_ROW_ORDER_DIV_64 else E2M1_PTX
    return gl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,=&r,=&r,r,r",
        [packed, block_scales],
        (gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def head_column_of_converted_column(converted_column, cfg: gl.constexpr):
    """Returns the column of the head at a position of a row in shared memory, in the order of the conversion."""
    if cfg.PACK == 2:
        return converted_column
    else:
        return (
            converted_column // 8 * 8
            + converted_column // 2 % 2 * 4
            + converted_column % 2 * 2
            + converted_column // 4 % 2
        )


# ---- scales ----


@gluon.jit
def int4_zero_points(scales):
    """Returns the zero points of int4 rows: the lowest bits of their stored scales."""
    return scales.to(gl.int32, bitcast=True) & 15


@gluon.jit
def log2_and_reciprocal(x):
    """Returns log2(x) and 1 / x of normal positive numbers, to 2^-22."""
    log = gl.inline_asm_elementwise(_LOG2_PTX, "=f,f", [x], gl.float32, True, 1)
    return log, gl.inline_asm_elementwise(_RECIPROCAL_PTX, "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def biased_exponent_and_inv_scale_of_rows(abs_max):
    """Returns (fp32 exponent fields of the rows' largest magnitudes, powers of two to multiply the rows by): bf16 rows
    so scaled fit in fp16."""
    exponent = gl.maximum((abs_max.to(gl.int32, bitcast=True) >> 23) & 0xFF, 1)
    return exponent, (gl.maximum(254 - exponent, 1) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def exponent_to_float(exponent):
    """Returns the power of two with this exponent field."""
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def load_device_or_host_scale(host_scale, DEVICE_SCALE, HAS_DEVICE_SCALE: gl.constexpr):
    """Returns a scale: from the device tensor if there is one, else the host's float."""
    if HAS_DEVICE_SCALE:
        return gl.load(DEVICE_SCALE)
    else:
        return host_scale


@gluon.jit
def load_device_or_host_scale_per_head(
    host_scale, DEVICE_SCALE, kv_heads, HAS_DEVICE_SCALE: gl.constexpr, STRIDE: gl.constexpr
):
    """Loads a scale of each KV head: from the device tensor if there is one, else the host's float."""
    if HAS_DEVICE_SCALE:
        return gl.load(DEVICE_SCALE + kv_heads * STRIDE)
    else:
        return kv_heads * 0 + host_scale
