"""The inner step of decode: a tile's scores, the running softmax, its values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from ..parts.convert import centred_int4, key_parts, log2_and_inverse, multiplied, scaled_e2m1, value_parts
from ..parts.softmax import softcapped
from .records import State
from .seen import live_keys, visible
from .tiles import as_operand, kept_part, key_factor, key_words, mma_layout, own_words, transposed, value_factor


@gluon.jit
def codes_of(buffer, i, W: gl.constexpr, g: gl.constexpr):
    """Codes of box i of the ring: [HB, BOX, W]. A row of it may hold several heads (`boxes.joined`); two copies may
    have brought it (`boxes.side_of`)."""
    box = buffer.index(i)
    if g.HALVES == 2:  # [halves, panels, rows, 8, words]
        SHAPE: gl.constexpr = [box.shape[2], g.BOX, box.shape[1] * box.shape[4]]
        box = box.permute([2, 0, 3, 1, 4]).reshape(SHAPE)
    ROWS: gl.constexpr = box.shape[0]
    if ROWS < g.HB:
        box = box.reshape([ROWS, g.BOX, g.HB // ROWS, W]).permute([0, 2, 1, 3]).reshape([g.HB, g.BOX, W])
    return box


@gluon.jit
def scale_box(buffer, i, VALUES: gl.constexpr, g: gl.constexpr):
    """Stored scales of box i of the ring: [HB, BOX], or [HB, BOX, words]. A ring has as many places as stages have
    boxes, or a multiple where places are larger than boxes."""
    SIDE: gl.constexpr = g.V if VALUES else g.K
    box = buffer.index(i * (buffer.shape[0] // (g.STAGES * g.COPY // g.BOX)))
    if not SIDE.SCALE_ROWS_ARE_KEYS:
        if g.HALVES == 2 and SIDE.STORED == "block":  # [halves, heads, 8, words]
            return box.permute([1, 0, 2, 3]).reshape([g.HB, g.BOX, SIDE.SCALE_WORDS])
        elif g.HALVES == 2:
            return box.permute([1, 0, 2]).reshape([g.HB, g.BOX])
        else:
            return box
    elif SIDE.STORED == "block":
        return box.permute([1, 0, 2])
    else:
        return box.permute([1, 0])


@gluon.jit
def zero_bits(scales):
    """Zero points of int4 rows, the lowest bits of their stored scales."""
    return scales.to(gl.int32, bitcast=True) & 15


@gluon.jit
def scores_of_box(codes, scales, i_box, q, scale, softcap, key, by, MASKED: gl.constexpr, c: gl.constexpr,
                  g: gl.constexpr):  # fmt: skip
    """Scores of a box's keys in units of log2: [HB, BOX, ROWS]."""
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    words = codes_of(codes, i_box, c.WORDS_K, g).load(key_words(g.HB, g.RB, g.BOX, c.WORDS_K))
    if g.K.STORED == "block":
        k = scaled_e2m1(words, key_factor(scale_box(scales, i_box, False, g), c, g), False)
    else:
        K: gl.constexpr = g.K
        if K.FOREIGN_NAN:
            words = own_words(words, g)
        k = key_parts(words, K)
    s = gl.full([g.HB, g.BOX, c.ROWS], 0, gl.float32, MMA)
    for i in gl.static_range(gl.constexpr(g.K.PARTS)):
        if c.ROWS // g.RB > 16:
            s = mma_v2(as_operand(k[i], c, g), kept_part(q.parts, i, c, g), s)
        else:
            s = mma_v2(as_operand(k[i], c, g), q.parts[i], s)
    if g.K.STORED == "token_head":
        row = scale_box(scales, i_box, False, g).load(gl.SliceLayout(2, MMA))
        if g.K.CODE == "int4":
            # As a number by way of 2^23 + the zero point.
            zero = (zero_bits(row) | 0x4B000000).to(gl.float32, bitcast=True) - 8388608.0
            s = s - zero[:, :, None] * q.total[:, None, :]
        s = s * scale[:, None, :] * row[:, :, None]
    else:
        s = s * scale[:, None, :]
    if c.SOFTCAP:
        s = softcapped(s, softcap)
    if MASKED:
        L: gl.constexpr = gl.SliceLayout(0, MMA)
        o_n = key + gl.arange(0, g.BOX, gl.SliceLayout(1, L))
        o_q = (by.r0 + gl.arange(0, c.ROWS, gl.SliceLayout(0, L))) // c.GROUP  # draft of a row
        s = gl.where(visible(o_n[:, None], o_q[None, :], by, c)[None, :, :], s, float("-inf"))
    return s


@gluon.jit
def add_values_of_box(acc, codes, scales, i_box, p, key, by, MASKED: gl.constexpr, c: gl.constexpr,
                      g: gl.constexpr):  # fmt: skip
    """acc += the values of a box's keys, transposed, times probabilities [HB, BOX, ROWS]."""
    A: gl.constexpr = gl.DotOperandLayout(0, mma_layout(g.HB, g.RB), 2)
    right = transposed(p.to(multiplied(c)), c, g)
    words = codes_of(codes, i_box, c.WORDS_V, g).permute([0, 2, 1]).load(A)
    if MASKED:  # a stale slot may hold NaN, and 0 × NaN is NaN
        o_n = key + gl.arange(0, g.BOX, gl.SliceLayout(0, gl.SliceLayout(1, A)))
        live = live_keys(o_n, by.keys, by.rows, c)[None, None, :]
        words = gl.where(live, words, 0)
    if g.V.CODE == "int4":
        row = scale_box(scales, i_box, True, g).load(gl.SliceLayout(1, A))
        v = centred_int4(words, zero_bits(row).to(gl.int16)[:, None, :])
    elif g.V.STORED == "block":
        factor = value_factor(scale_box(scales, i_box, True, g).permute([0, 2, 1]), c, g)
        if MASKED:
            factor = gl.where(live, factor, 0.0)
        v = scaled_e2m1(words, factor, False)
    else:
        V: gl.constexpr = g.V
        v = value_parts(words, V)
    out = ()
    for i in gl.static_range(gl.constexpr(g.V.PARTS)):
        out = out + (mma_v2(v[i], right, acc[i]),)
    return out


@gluon.jit
def value_logs(scales, i_box, key, by, MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Logarithms to base 2 and reciprocals of the scales of a box's values: [HB, BOX]."""
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    vs = gl.maximum(scale_box(scales, i_box, True, g).load(gl.SliceLayout(2, MMA)), 1e-30)
    if MASKED:
        o_n = key + gl.arange(0, g.BOX, gl.SliceLayout(0, gl.SliceLayout(2, MMA)))
        vs = gl.where(live_keys(o_n, by.keys, by.rows, c)[None, :], vs, 1.0)
    return log2_and_inverse(vs)


@gluon.jit
def box_of(stage, t, j: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """(its first key, where it lies in the ring of its copy) of a tile's j-th box."""
    PER_COPY: gl.constexpr = g.COPY // g.BOX
    return t * c.TILE + g.BOX * j, stage * PER_COPY + j % PER_COPY


@gluon.jit
def scores_of_tile(rings, stage, q, scale, softcap, t, by, MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """(scores of each box, highest of them all by key and row, reciprocals of each box's value scales)."""
    PER_COPY: gl.constexpr = g.COPY // g.BOX
    s, inverse = (), ()
    for j in gl.static_range(gl.constexpr(g.BOXES)):
        key, i_box = box_of(stage, t, j, c, g)
        codes, scales = rings.k[j // PER_COPY], rings.k_scales[j // PER_COPY]
        x = scores_of_box(codes, scales, i_box, q, scale, softcap, key, by, MASKED, c, g)
        if g.V.STORED == "token_head":
            # The value's scale joins the exponent, so that the probabilities that meet the codes lie in (0, 1].
            log, over = value_logs(rings.v_scales[j // PER_COPY], i_box, key, by, MASKED, c, g)
            x = x + log[:, :, None]
            inverse = inverse + (over,)
        s = s + (x,)
        if j == 0:
            top = x
        else:
            top = gl.maximum(top, x)
    return s, top, inverse


@gluon.jit
def attend_tile(state, rings, stage, q, scale, softcap, t, by, MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """One step of the running softmax: state is (maximum, sum per key of a lane, PARTS accumulators)."""
    PER_COPY: gl.constexpr = g.COPY // g.BOX
    s, top, inverse = scores_of_tile(rings, stage, q, scale, softcap, t, by, MASKED, c, g)
    m_new = gl.maximum(state.m, gl.max(top, 1))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    old = gl.exp2(state.m - base)
    l = state.l * old[:, None, :]
    acc = ()
    for i in gl.static_range(gl.constexpr(g.V.PARTS)):
        acc = acc + (state.acc[i] * old[:, None, :],)
    for j in gl.static_range(gl.constexpr(g.BOXES)):
        p = gl.exp2(s[j] - base[:, None, :])
        if g.V.STORED == "token_head":
            l = l + p * inverse[j][:, :, None]
        else:
            l = l + p
        key, i_box = box_of(stage, t, j, c, g)
        codes, scales = rings.v[j // PER_COPY], rings.v_scales[j // PER_COPY]
        acc = add_values_of_box(acc, codes, scales, i_box, p, key, by, MASKED, c, g)
    return State(m_new, l, acc)


@gluon.jit
def empty_state(c: gl.constexpr, g: gl.constexpr):
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    m = gl.full([g.HB, c.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    l = gl.full([g.HB, g.BOX, c.ROWS], 0, gl.float32, MMA)
    acc = ()
    for _ in gl.static_range(gl.constexpr(g.V.PARTS)):
        acc = acc + (gl.full([g.HB, c.WORDS_V, c.ROWS], 0, gl.float32, MMA),)
    return State(m, l, acc)
