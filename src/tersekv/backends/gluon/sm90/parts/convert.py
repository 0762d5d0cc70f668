"""Codes → fp16, by the register: the only format branches of Gluon's decode.

A lane holds 16-bit units of codes, two in a register. Keys: units of one key, side by side in its row. Values: the same
unit of two keys, as ldmatrix transposes them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....triton.parts.tiles import (  # of values: a pair is one column of the two keys in a register
    E4M3_PTX,
    E5M2_PTX,
    INT8_PTX,
)

# Each takes a register of codes and gives f16x2 registers. Of keys: one per pair of codes of a lane.
E4M3_K = gl.constexpr(
    """{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
# fp16's upper bytes.
E5M2_K = gl.constexpr(
    """{
    prmt.b32 $0, $2, 0, 0x1404;
    prmt.b32 $1, $2, 0, 0x3424;
    }"""
)
# A byte permute puts a code, made unsigned, under the exponent of 1024; one subtraction frees it.
INT8_K = gl.constexpr(
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
# e2m1's are multiplied by the block's scale, exact in fp16: six significant bits, multiples of 2^-24.
# In the order of a row, by way of e4m3, whose fields are e2m1's six binades lower.
_E2M1_ROW = gl.constexpr(
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
# A field of four bits, sign s and magnitude e, becomes fp16's by one multiplication: the field itself at bit 12 puts s
# where the sign goes, and a copy at bit 9 puts e where exponent and mantissa go; the bits between are masked. What is
# multiplied is s and not(e), so that the sum of both carries into the sign for -0 alone, which becomes 0. So fewer
# instructions than by way of e4m3, and half of them not on the pipe of logical operations (notes/decode.md).
_E2M1 = gl.constexpr(
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
# An int4 code in the lowest bits of a half is fp16's, below its smallest normal number: code × 2^-24, four bits higher
# × 2^-20. Products hold both exactly, so nothing is done but to mask. Of keys; a zero point meets the score.
_INT4_K = gl.constexpr(
    """{
    .reg .b32 x;
    and.b32 $0, $4, 0x000F000F;
    and.b32 $1, $4, 0x00F000F0;
    shr.u32 x, $4, 8;
    and.b32 $2, x, 0x000F000F;
    and.b32 $3, x, 0x00F000F0;
    }"""
)
# Of values, less the zero points of the two keys: low as they are, high four bits higher. NOTE: not taken from the sums
# afterwards: the matrix unit cuts what it adds, always towards zero, and over many keys the sum of codes that all are
# positive would lose more than the sum of values has.
_INT4_V = gl.constexpr(
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
# Less the zero points of their keys, in the order of `_E2M1_ROW`: a code in the lowest bits under the exponent of 1024,
# or four bits higher under that of 64; subtracted is the zero point under the same exponents.
_INT4_ROW = gl.constexpr(
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
INT4_ODD = gl.constexpr(16.0)  # odd codes are larger by this than even ones, which are the code × 2^-24
INT4_FACTOR = gl.constexpr(2.0**20)  # left over of products, where even codes have been multiplied by INT4_ODD
# A byte of e4m3 chosen by a selector out of a word, as fp16 twice; and the same byte of two words.
SCALE_K = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $2, 0, $3;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 x, low;
    mov.b32 {$0, $1}, x;
    }"""
)
SCALE_V = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $2, $3, $4;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
    }"""
)
# A byte of e4m3 as fp16.
SCALE_BYTE = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 high;
    cvt.rn.f16x2.e4m3x2 x, $1;
    mov.b32 {$0, high}, x;
    }"""
)
# Of normal numbers.
_LOG2 = gl.constexpr("lg2.approx.ftz.f32 $0, $1;")
_INVERSE = gl.constexpr("rcp.approx.ftz.f32 $0, $1;")


@gluon.jit
def log2_and_inverse(x):
    """log2(x) and 1 / x of normal positive numbers, to 2^-22; without the care that the rest would need."""
    log = gl.inline_asm_elementwise(_LOG2, "=f,f", [x], gl.float32, True, 1)
    return log, gl.inline_asm_elementwise(_INVERSE, "=f,f", [x], gl.float32, True, 1)


@gluon.constexpr_function
def multiplied(c):
    """The dtype of both products' operands."""
    return gl.bfloat16 if c.BF16 else gl.float16


@gluon.jit
def key_parts(words, c: gl.constexpr):
    """Key units [HB, BOX, W] (layout key_words) → PARTS operands [HB, BOX, W] fp16; 16-bit caches: as they are.

    c: what has their CODE. int4: × 2^-24 and, every other one, × 2^-20; zero points are left in.
    """
    if c.CODE == "bf16":
        out = (words.to(gl.bfloat16, bitcast=True),)
    elif c.CODE == "fp16":
        out = (words.to(gl.float16, bitcast=True),)
    elif c.CODE == "int4":
        out = gl.inline_asm_elementwise(
            _INT4_K, "=&r,=&r,=&r,=&r,r", [words], (gl.float16, gl.float16, gl.float16, gl.float16), True, 2
        )
    elif c.CODE == "e4m3":
        out = gl.inline_asm_elementwise(E4M3_K, "=r,=r,r", [words], (gl.float16, gl.float16), True, 2)
    elif c.CODE == "e5m2":
        out = gl.inline_asm_elementwise(E5M2_K, "=&r,=&r,r", [words], (gl.float16, gl.float16), True, 2)
    else:
        gl.static_assert(c.CODE == "int8", "a code that nobody here knows")
        out = gl.inline_asm_elementwise(INT8_K, "=r,=r,r", [words], (gl.float16, gl.float16), True, 2)
    return out


@gluon.jit
def value_parts(words, c: gl.constexpr):
    """Value units [HB, W, BOX] in the left operand's layout → PARTS operands, as of keys."""
    if c.CODE == "bf16":
        out = (words.to(gl.bfloat16, bitcast=True),)
    elif c.CODE == "fp16":
        out = (words.to(gl.float16, bitcast=True),)
    elif c.CODE == "e4m3":
        out = gl.inline_asm_elementwise(E4M3_PTX, "=r,=r,r", [words], (gl.float16, gl.float16), True, 2)
    elif c.CODE == "e5m2":
        out = gl.inline_asm_elementwise(E5M2_PTX, "=&r,=&r,r", [words], (gl.float16, gl.float16), True, 2)
    else:
        gl.static_assert(c.CODE == "int8", "a code that nobody here knows")
        out = gl.inline_asm_elementwise(INT8_PTX, "=r,=r,r", [words], (gl.float16, gl.float16), True, 2)
    return out


@gluon.jit
def centred_int4(words, zero):
    """int4 value units less the zero points (int16) of their keys: four operands, scaled as `key_parts` does."""
    low, words = gl.broadcast(zero, words)
    high, words = gl.broadcast(zero << 4, words)
    return gl.inline_asm_elementwise(
        _INT4_V, "=&r,=&r,=&r,=&r,r,r,r", [words, low, high], (gl.float16, gl.float16, gl.float16, gl.float16), True, 2
    )


@gluon.jit
def int4_in_rows(words, zero):
    """int4 units of rows [keys, W] less the zero points (int16) of their keys [keys]: four operands, in the order that
    `scaled_e2m1` has IN_ROWS."""
    low, words = gl.broadcast((zero | 0x6400)[:, None], words)
    high, words = gl.broadcast(((zero << 4) | 0x5400)[:, None], words)
    return gl.inline_asm_elementwise(
        _INT4_ROW,
        "=&r,=&r,=&r,=&r,r,r,r",
        [words, low, high],
        (gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        2,
    )


@gluon.jit
def scaled_e2m1(words, factor, IN_ROWS: gl.constexpr):
    """e2m1 codes, four a unit, times their block scales (fp16): four operands.

    IN_ROWS: × 2^-6; a lane's two units are neighbours in a row, and so are the operands' pairs: codes 0 and 2, 4 and 6,
    1 and 3, 5 and 7 of the two. Else × 2^-14, and operand i is code i of each unit.
    """
    PTX: gl.constexpr = _E2M1_ROW if IN_ROWS else _E2M1
    return gl.inline_asm_elementwise(
        PTX,
        "=&r,=&r,=&r,=&r,r,r",
        [words, factor],
        (gl.float16, gl.float16, gl.float16, gl.float16),
        True,
        2,
    )
