"""Online softmax of a tile of scores with rows on M, for many query rows, arranged so that few instructions wait."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .tile_scheduler import LOG2E


@gluon.jit
def split_columns(x):
    """Returns the left and the right half of the columns, which are in the same threads."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), (0, 2, 1)))


@gluon.jit
def rowwise_max(s):
    """Returns the maximum of each row.

    NOTE: gl.max compares a thread's numbers one after the other, each waiting for the last; a reduction tree does not.
    """
    x = s
    for _ in gl.static_range(s.shape[1].bit_length() - 4):
        a, b = split_columns(x)
        x = gl.maximum(a, b)
    return gl.convert_layout(gl.max(x, 1), gl.SliceLayout(1, s.type.layout))


@gluon.jit
def lane_row_sums(x):
    """Returns four partial sums of each row, one per thread: [rows, 4]."""
    a, b = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    x = a + b
    for _ in gl.static_range(x.shape[1].bit_length() - 3):
        a, b = split_columns(x)
        x = a + b
    return x


@gluon.jit
def apply_softcap(s, softcap):
    """Returns softcap × tanh(s / softcap) of scores s; s in units of log2, softcap in those of scores.

    tanh is 1 − 2 / (e^2x + 1), which cancels near 0: there, s is multiplied by tanh(x) / x, a polynomial in the square
    of x × log2(e) (fitted for the least relative error, 3.2e-7).
    """
    t = s * (1.0 / softcap)
    u = t * t
    ratio = (((7.488054e-4 * u - 5.668405e-3) * u + 3.0677834e-2) * u - 1.6014094e-1) * u + 1.0
    far = (softcap * LOG2E) * (1.0 - 2.0 / (gl.exp2(t + t) + 1.0))
    return gl.where(gl.abs(t) < 1.0, s * ratio, far)


@gluon.jit
def softmax_step(s, row_max, last_key, score_scale, MASKED: gl.constexpr):
    """Returns (p fp32, row_max, rescale) of a tile of scores. last_key: last key of the tile that a row sees."""
    S: gl.constexpr = s.type.layout
    if MASKED:
        o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, S))
        s = gl.where(o_n[None, :] <= last_key[:, None], s, float("-inf"))
    row_max_new = gl.maximum(row_max, rowwise_max(s) * score_scale)
    safe_max = row_max_new
    if MASKED:
        safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)  # all keys of a row may be masked so far
    return gl.exp2(s * score_scale - safe_max[:, None]), row_max_new, gl.exp2(row_max - safe_max)


@gluon.jit
def pack_p(p, dtype: gl.constexpr):
    """Returns adjacent numbers of a row, rounded to a 16-bit dtype, packed in pairs: [rows, columns / 2] int32.

    NOTE: 16-bit numbers that a loop carries are unpacked and packed again in every iteration.
    """
    PTX: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;" if dtype == gl.bfloat16 else "cvt.rn.f16x2.f32 $0, $2, $1;"
    a, b = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    return gl.inline_asm_elementwise(PTX, "=r,r,r", [a, b], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def unpack_p(p_packed, dtype: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the numbers packed by `pack_p`, in LAYOUT."""
    a, b = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [p_packed], dtype=(gl.int16, gl.int16), is_pure=True, pack=1
    )
    x = gl.reshape(gl.join(a, b), [p_packed.shape[0], 2 * p_packed.shape[1]])
    return gl.convert_layout(x.to(dtype, bitcast=True), LAYOUT)
