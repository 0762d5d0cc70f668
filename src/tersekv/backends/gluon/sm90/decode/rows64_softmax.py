"""The softmax of decode with many query rows (rows64.py): 64 rows of a warpgroup, a tile of keys at a time.

Numbers of a row are kept once for each lane that shares it, [ROWS, LANES], so that nothing has to cross lanes:
exchanges between lanes would wait for shared memory behind the operands of the products.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.raising import RAISE_PTX, multiply_where_needed
from ..parts.softmax import halves, shares_of_sum, softcapped
from .rows import visible_of_tile
from .rows64_convert import KINDS, SCALE_TURNS

ROWS = gl.constexpr(64)  # of a warpgroup
LANES = gl.constexpr(4)  # that share a row of a product
MULTIPLY_64, CONSTRAINTS_64 = map(gl.constexpr, multiply_where_needed(64 // 2))
MULTIPLY_128, CONSTRAINTS_128 = map(gl.constexpr, multiply_where_needed(128 // 2))


@gluon.constexpr_function
def score_layout(c):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.TILE, 16])


@gluon.jit
def by_lane(x):
    """Rows of a product with those columns apart that other lanes hold: [ROWS, columns / 8, LANES, 2]."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, LANES, 2])


@gluon.constexpr_function
def lanes_of(L):
    """Layout [ROWS, LANES] of a number for each row in each of its lanes; L: of `by_lane`."""
    return gl.SliceLayout(1, gl.SliceLayout(3, L))


@gluon.jit
def spread(x, like):
    """A number for each row [ROWS, LANES], for `by_lane` of that row."""
    return gl.convert_layout(x, lanes_of(like.type.layout), assert_trivial=True)[:, None, :][:, :, :, None]


@gluon.jit
def joined(x, like):
    """What `by_lane` took apart."""
    return gl.convert_layout(gl.reshape(x, like.shape), like.type.layout, assert_trivial=True)


@gluon.jit
def tops(s):
    """Of each row the highest among the scores that one thread holds: [ROWS, LANES], by a tree."""
    a, b = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    x = gl.maximum(a, b)
    for _ in gl.static_range(x.shape[1].bit_length() - 3):
        a, b = halves(x)
        x = gl.maximum(a, b)
    return gl.convert_layout(x, lanes_of(by_lane(s).type.layout), assert_trivial=True)


@gluon.jit
def load_column(columns, turn, i: gl.constexpr, c: gl.constexpr):
    """A kind of a tile's stored scales, for every row."""
    return columns.index(turn % SCALE_TURNS * KINDS + i).load(gl.SliceLayout(0, score_layout(c)))[None, :]


@gluon.jit
def weigh(s, m, scale, softcap, columns, turn, t, whole, seen_by, c: gl.constexpr):
    """(probabilities, their sums by lane, references, factor of what was summed before) after a tile's products.

    References follow the highest score only where powers would pass fp16's range: rarely.
    """
    PLAIN: gl.constexpr = not c.TOKEN_SCALES and not c.SOFTCAP
    if c.TOKEN_SCALES:
        s = s * load_column(columns, turn, 0, c)
    if not PLAIN:
        x = by_lane(s)
        s = joined(x * spread(scale, x), s)
    if c.SOFTCAP:
        s = softcapped(s, softcap)
    if c.TOKEN_SCALES:  # as with few rows: the value's scale joins the exponent
        s = s + load_column(columns, turn, 1, c)
    if not whole:
        s = gl.where(visible_of_tile(t, seen_by, ROWS, score_layout(c), c), s, float("-inf"))
    top = tops(s)
    if PLAIN:
        top = top * scale
    m_new, _ = gl.inline_asm_elementwise(
        RAISE_PTX, "=&f,=&f,=&r,=&r,f,f,f,f", [top, m], [gl.float32, gl.int32], False, 2
    )  # fmt: skip
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    x = by_lane(s)
    if PLAIN:
        x = x * spread(scale, x)
    p = joined(gl.exp2(x - spread(base, x)), s)
    if c.TOKEN_SCALES:
        total = shares_of_sum(p * load_column(columns, turn, 2, c))
    else:
        total = shares_of_sum(p)
    return p, gl.convert_layout(total, m.type.layout, assert_trivial=True), m_new, gl.exp2(m - base)


@gluon.jit
def scaled(acc, factor):
    """The accumulator times a factor of each row, which is mostly 1: then warps go around it."""
    x = by_lane(acc)
    f, x = gl.broadcast(spread(factor, x), x)
    PTX: gl.constexpr = MULTIPLY_64 if acc.shape[1] == 64 else MULTIPLY_128
    CONSTRAINTS: gl.constexpr = CONSTRAINTS_64 if acc.shape[1] == 64 else CONSTRAINTS_128
    PACK: gl.constexpr = acc.shape[1] // 2
    return joined(gl.inline_asm_elementwise(PTX, CONSTRAINTS, [x, f], gl.float32, is_pure=True, pack=PACK), acc)
