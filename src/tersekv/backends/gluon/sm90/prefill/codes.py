"""Codes → 16 bits in the order of a row, by 32-bit registers: a register of codes is two or four of numbers.

NOTE: tiles are seen as 32-bit words on both sides. Of 16-bit elements the compiler takes every register apart and puts
it together again, wherever it cannot follow their order: 250 byte permutes a tile, of which a multiprocessor does half
as many a cycle as multiplications (notes/prefill.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.convert import E4M3_K, E5M2_K, INT8_K

# By way of e4m3, whose fields are e2m1's six binades lower; × the block's scale, exact in fp16.
_E2M1 = gl.constexpr(
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
# A nibble in the lowest bits under the exponent of 1024, or four bits higher under that of 64; subtracted is the zero
# point under the same exponents.
_INT4 = gl.constexpr(
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
# A byte of e4m3 as fp16, twice.
_SCALE = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $1, 0, 0x4400;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 $0, low;
    }"""
)


@gluon.constexpr_function
def _words_a_lane(W):
    return max(2, min(4, W // 4))


@gluon.constexpr_function
def words_layout(W):
    """Layout of words of codes [keys, W]: eight lanes have the same columns of as many keys, in different banks."""
    return gl.BlockedLayout([1, _words_a_lane(W)], [8, 4], [4, 1], [0, 1])


@gluon.constexpr_function
def blocks_layout(W):
    """The same of 4-bit codes as [keys, blocks, 2 words]."""
    return gl.BlockedLayout([1, _words_a_lane(W) // 2, 2], [8, 4, 1], [4, 1, 1], [2, 0, 1])


@gluon.jit
def twice(x):
    """The lower 16 bits of a word in both halves."""
    x = x & 0xFFFF
    return x | (x << 16)


@gluon.jit
def row_word(factor, zero_k, zero_v):
    """What a token's value is multiplied by in fp16, and of int4 the zero points of value and key, as one word."""
    return (factor.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF) | (zero_v << 16) | (zero_k << 20)


@gluon.jit
def _times(x, factor):
    factor, x = gl.broadcast(factor, x)
    return gl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [x, factor], gl.int32, True, 1)


# NOTE: types of results are written out below: Triton 3.9 takes no tuple of them by a name.
@gluon.jit
def _of_blocks(words, byte):
    """e2m1 times block scales, × 2^-6."""
    N: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1]
    factor = gl.inline_asm_elementwise(_SCALE, "=r,r", [byte.to(gl.int32)], gl.int32, True, 1)
    factor, _ = gl.broadcast(factor[:, :, None], gl.full([N, W // 2, 2], 0, gl.int32, blocks_layout(W)))
    factor = gl.convert_layout(factor.reshape([N, W]), words_layout(W), assert_trivial=True)
    return gl.inline_asm_elementwise(
        _E2M1, "=&r,=&r,=&r,=&r,r,r", [words, factor], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )


@gluon.jit
def _of_nibbles(words, rows, VALUES: gl.constexpr):
    """int4 without their zero points; values × factors of their rows."""
    zero = twice((rows >> (16 if VALUES else 20)) & 15)
    low, _ = gl.broadcast((zero | 0x64006400)[:, None], words)
    high, _ = gl.broadcast(((zero << 4) | 0x54005400)[:, None], words)
    x = gl.inline_asm_elementwise(
        _INT4, "=&r,=&r,=&r,=&r,r,r,r", [words, low, high], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
    )
    if VALUES:
        factor = twice(rows)[:, None]
        x = (_times(x[0], factor), _times(x[1], factor), _times(x[2], factor), _times(x[3], factor))
    return x


@gluon.jit
def _of_bytes(words, c: gl.constexpr):
    if c.CODE == "e4m3":
        return gl.inline_asm_elementwise(E4M3_K, "=r,=r,r", [words], (gl.int32, gl.int32), True, 1)
    elif c.CODE == "e5m2":
        return gl.inline_asm_elementwise(E5M2_K, "=&r,=&r,r", [words], (gl.int32, gl.int32), True, 1)
    else:
        gl.static_assert(c.CODE == "int8", "a code that nobody here knows")
        return gl.inline_asm_elementwise(INT8_K, "=r,=r,r", [words], (gl.int32, gl.int32), True, 1)


@gluon.jit
def in_16_bits(words, rows, VALUES: gl.constexpr, c: gl.constexpr):
    """Words of codes [keys, W] → pairs of fp16 in the order of a row. rows: `row_word`, or bytes of block scales."""
    N: gl.constexpr = words.shape[0]
    W: gl.constexpr = words.shape[1]
    if c.PARTS == 4:
        if c.BLOCK_SCALES:
            gl.static_assert(c.CODE == "e2m1", "a code that nobody here knows")
            x = _of_blocks(words, rows)
        else:
            gl.static_assert(c.CODE == "int4", "a code that nobody here knows")
            x = _of_nibbles(words, rows, VALUES)
        return gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3])).reshape([N, 4 * W])
    else:
        low, high = _of_bytes(words, c)
        if c.TOKEN_SCALES and VALUES:
            factor = twice(rows)[:, None]
            low, high = _times(low, factor), _times(high, factor)
        return gl.join(low, high).reshape([N, 2 * W])
