"""Weights of a tile of scores whose rows lie on M, for attention of many rows, so that few instructions wait."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .schedule import LOG2E


@gluon.jit
def halves(x):
    """The left and the right half of the columns, which lie in the same threads."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def largest(s):
    """Largest score of each row.

    NOTE: a reduction compares a thread's numbers one after the other, each waiting for the last; a tree does not wait.
    """
    x = s
    for _ in gl.static_range(s.shape[1].bit_length() - 4):
        a, b = halves(x)
        x = gl.maximum(a, b)
    return gl.convert_layout(gl.max(x, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def shares_of_sum(x):
    """Sums of four shares of each row's numbers, one a thread: [rows, 4]."""
    a, b = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    x = a + b
    for _ in gl.static_range(x.shape[1].bit_length() - 3):
        a, b = halves(x)
        x = a + b
    return x


@gluon.jit
def softcapped(s, softcap):
    """softcap × tanh(s / softcap) of scores s; both in units of log2, softcap in those of scores.

    tanh is 1 − 2 / (e^2x + 1), whose digits cancel near 0: below, s is multiplied by tanh(x) / x, a polynomial in the
    square of x × log2(e) (fitted for the least relative error, 3.2e-7).
    """
    t = s * (1.0 / softcap)
    u = t * t
    ratio = (((7.488054e-4 * u - 5.668405e-3) * u + 3.0677834e-2) * u - 1.6014094e-1) * u + 1.0
    far = (softcap * LOG2E) * (1.0 - 2.0 / (gl.exp2(t + t) + 1.0))
    return gl.where(gl.abs(t) < 1.0, s * ratio, far)


@gluon.jit
def weigh(s, m, last, qk_scale, MASKED: gl.constexpr):
    """(weights fp32, m, shrink) of a tile of scores. last: last key of the tile that a row sees."""
    S: gl.constexpr = s.type.layout
    if MASKED:
        o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        s = gl.where(o_n[None, :] <= last[:, None], s, float("-inf"))
    m_new = gl.maximum(m, largest(s) * qk_scale)
    top = m_new
    if MASKED:
        top = gl.where(m_new == float("-inf"), 0.0, m_new)  # a row may have seen nothing yet
    return gl.exp2(s * qk_scale - top[:, None]), m_new, gl.exp2(m - top)


@gluon.jit
def packed(weight, dtype: gl.constexpr):
    """Neighbours in a row, rounded to a 16-bit dtype, as one word: [rows, columns / 2] int32.

    NOTE: 16-bit numbers that a loop carries are taken apart and put together again at every turn.
    """
    CODE: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    a, b = gl.split(gl.reshape(weight, [weight.shape[0], weight.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(CODE, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpacked(words, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    a, b = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    x = gl.reshape(gl.join(a, b), [words.shape[0], 2 * words.shape[1]])
    return gl.convert_layout(x.to(dtype, bitcast=True), LAYOUT)
