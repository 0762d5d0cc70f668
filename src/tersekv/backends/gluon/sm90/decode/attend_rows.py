"""The inner step of decode with 17 to 32 query rows of a KV head, 16 or 32 of them a warp: as `attend`.

A row's reference follows its highest score only where powers would pass fp16's range, which is rare: else nothing is
multiplied again. References and sums are kept once for each lane that holds keys of a row, [HB, 8, ROWS], so that no
lane asks another. Where codes cost most to unpack, those of 4 bits, a warp has all 32 rows (`four_bits`): then the
accumulator takes half of its registers, the query waits in shared memory, and tiles are of 16 keys.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.convert import INT4_ODD
from ..parts.raising import (
    MULTIPLY_16,
    MULTIPLY_32,
    MULTIPLY_64,
    RAISE_4,
    RAISE_4_TIES,
    RAISE_8,
    RAISE_8_TIES,
    TIES_16,
    TIES_32,
    TIES_64,
)
from .attend import add_values_of_box, box_of, scores_of_tile
from .records import State
from .tiles import mma_layout


@gluon.jit
def by_lane(x):
    """[HB, N, ROWS] → [HB, N / 8, 8, ROWS]: the numbers of a row in each of its lanes apart."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, 8, x.shape[2]])


@gluon.jit
def spread(x, like):
    """A number for each row and lane, for `by_lane` of it."""
    return gl.convert_layout(x, gl.SliceLayout(1, like.type.layout), assert_trivial=True)[:, None, :, :]


@gluon.jit
def scaled(acc, factor, flag, g: gl.constexpr):
    """An accumulator [HB, 16 or 32, ROWS] times a factor of each row, where one is not 1."""
    x = by_lane(acc)
    f, x = gl.broadcast(spread(factor, x), x)
    b, x = gl.broadcast(spread(flag, x), x)
    N: gl.constexpr = acc.shape[1] * acc.shape[2] // (32 * g.RB)
    PTX: gl.constexpr = MULTIPLY_16 if N == 16 else MULTIPLY_32 if N == 32 else MULTIPLY_64
    TIES: gl.constexpr = TIES_16 if N == 16 else TIES_32 if N == 32 else TIES_64
    x = gl.inline_asm_elementwise(PTX, TIES, [x, f, b], gl.float32, is_pure=True, pack=N)
    return gl.convert_layout(gl.reshape(x, acc.shape), acc.type.layout, assert_trivial=True)


@gluon.jit
def empty_rows(c: gl.constexpr, g: gl.constexpr):
    zero = gl.max(by_lane(gl.full([g.HB, g.BOX, c.ROWS], 0.0, gl.float32, mma_layout(g.HB, g.RB))), 1)
    acc = ()
    for _ in gl.static_range(gl.constexpr(g.V.PARTS)):
        acc = acc + (gl.full([g.HB, c.WORDS_V, c.ROWS], 0, gl.float32, mma_layout(g.HB, g.RB)),)
    return State(zero + float("-inf"), zero, acc)


@gluon.jit
def attend_rows(state, rings, stage, q, scale, softcap, t, by, MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """As `attend_tile`; state is (references, sums, both by lane, PARTS accumulators).

    Only scores are shared with it: there lanes agree on a maximum in every tile, here none asks another.
    """
    PER_COPY: gl.constexpr = g.COPY // g.BOX
    s, top, inverse = scores_of_tile(rings, stage, q, scale, softcap, t, by, MASKED, c, g)
    FOUR: gl.constexpr = c.ROWS // g.RB == 16
    m, old, flag = gl.inline_asm_elementwise(
        RAISE_4 if FOUR else RAISE_8, RAISE_4_TIES if FOUR else RAISE_8_TIES, [gl.max(by_lane(top), 1), state.m],
        (gl.float32, gl.float32, gl.int32), False, 4 if FOUR else 8,
    )  # fmt: skip
    base, l = gl.where(m == float("-inf"), 0.0, m), state.l * old
    acc = ()
    for i in gl.static_range(gl.constexpr(g.V.PARTS)):
        acc = acc + (scaled(state.acc[i], old, flag, g),)
    for j in gl.static_range(gl.constexpr(g.BOXES)):
        x = by_lane(s[j])
        x = gl.exp2(x - spread(base, x))
        p = gl.convert_layout(gl.reshape(x, s[j].shape), s[j].type.layout, assert_trivial=True)
        if g.V.STORED == "token_head":
            l = l + gl.sum(by_lane(p * inverse[j][:, :, None]), 1)
        else:
            l = l + gl.sum(x, 1)
        key, i_box = box_of(stage, t, j, c, g)
        codes, scales = rings.v[j // PER_COPY], rings.v_scales[j // PER_COPY]
        acc = add_values_of_box(acc, codes, scales, i_box, p, key, by, MASKED, c, g)
    return State(m, l, acc)


@gluon.jit
def ended(state, c: gl.constexpr, g: gl.constexpr):
    """What `attend_tile` or `attend_rows` left, with a row's maximum and its sum, and its columns alike."""
    acc = state.acc
    if g.V.CODE == "int4":
        acc = (acc[0] * INT4_ODD, acc[1], acc[2] * INT4_ODD, acc[3])
    if c.ROWS > 16:
        L: gl.constexpr = gl.SliceLayout(1, mma_layout(g.HB, g.RB))
        m, l = gl.convert_layout(gl.max(state.m, 1), L), gl.convert_layout(gl.sum(state.l, 1), L)
        return State(m, l, acc)
    else:
        return State(state.m, gl.sum(state.l, 1), acc)
