"""The inner step of decode: a tile's scores, the running softmax, its values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from ..parts.convert import key_parts, log2_and_inverse, multiplied, scaled_e2m1, value_parts
from ..parts.schedule import LOG2E
from .tiles import as_operand, kept_part, key_factor, key_words, mma_layout, transposed, value_factor


@gluon.jit
def visible(key, n, rows, r0, q0, MASK, sm_t, c: gl.constexpr, g: gl.constexpr):
    """Which of a box's keys, from `key` on, each query row sees: [BOX, ROWS]."""
    L: gl.constexpr = gl.SliceLayout(0, mma_layout(g.HB, g.RB))
    o_n = key + gl.arange(0, g.BOX, gl.SliceLayout(1, L))
    o_q = (r0 + gl.arange(0, c.ROWS, gl.SliceLayout(0, L))) // c.GROUP  # draft of a row
    prefix = n - rows
    position = prefix + o_q
    seen = (o_n < n)[:, None]
    if c.HAS_MASK:
        draft = o_n - prefix
        p_word = MASK + (q0 + o_q)[None, :].to(gl.int64) * sm_t + (draft >> 4)[:, None]
        asked = (draft >= 0)[:, None] & seen & (o_q < rows)[None, :]
        word = gl.load(p_word, mask=asked, other=0).to(gl.int32)
        bit = (word >> (draft & 15)[:, None]) & 1
        seen = seen & ((draft < 0)[:, None] | (bit == 1))
    else:
        seen = seen & (o_n[:, None] <= position[None, :])
    if c.WINDOW > 0:
        seen = seen & (o_n[:, None] > position[None, :] - c.WINDOW)
    return seen


@gluon.jit
def live_keys(key, n, rows, LAYOUT: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Which of a box's keys some row may see; slots behind every row's window may have been given away."""
    o_n = key + gl.arange(0, g.BOX, LAYOUT)
    live = o_n < n
    if c.WINDOW > 0:
        live = live & (o_n > n - rows - c.WINDOW)
    return live


@gluon.jit
def codes_of(buffer, i, W: gl.constexpr, g: gl.constexpr):
    """Codes of box i of the ring: [HB, BOX, W]. A row of it may hold several heads (`decode_boxes.joined`)."""
    box = buffer.index(i)
    ROWS: gl.constexpr = box.shape[0]
    if ROWS < g.HB:
        box = box.reshape([ROWS, g.BOX, g.HB // ROWS, W]).permute([0, 2, 1, 3]).reshape([g.HB, g.BOX, W])
    return box


@gluon.jit
def scale_box(buffer, i, c: gl.constexpr, g: gl.constexpr):
    """Stored scales of box i of the ring: [HB, BOX], or [HB, BOX, words]. A ring has as many places as stages have
    boxes, or a multiple where places are larger than boxes."""
    box = buffer.index(i * (buffer.shape[0] // (g.STAGES * g.COPY // g.BOX)))
    if not g.SCALE_ROWS_ARE_KEYS:
        return box
    elif c.BLOCK_SCALES:
        return box.permute([1, 0, 2])
    else:
        return box.permute([1, 0])


@gluon.jit
def scores(kbuf, ksbuf, i_box, q, scale, softcap, key, n, rows, r0, q0, MASK, sm_t,
           MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):  # fmt: skip
    """Scores of a box's keys in units of log2: [HB, BOX, ROWS]."""
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    words = codes_of(kbuf, i_box, c.WORDS_K, g).load(key_words(g.HB, g.RB, g.BOX, c.WORDS_K))
    if c.BLOCK_SCALES:
        k = scaled_e2m1(words, key_factor(scale_box(ksbuf, i_box, c, g), c, g), False)
    else:
        k = key_parts(words, c)
    s = gl.full([g.HB, g.BOX, c.ROWS], 0, gl.float32, MMA)
    for i in gl.static_range(gl.constexpr(c.PARTS)):
        if c.ROWS // g.RB > 16:
            s = mma_v2(as_operand(k[i], c, g), kept_part(q, i, c, g), s)
        else:
            s = mma_v2(as_operand(k[i], c, g), q[i], s)
    s = s * scale[:, None, :]
    if c.TOKEN_SCALES:
        s = s * scale_box(ksbuf, i_box, c, g).load(gl.SliceLayout(2, MMA))[:, :, None]
    if c.SOFTCAP:
        # tanh by exp2: 1 - 2 / (e^2x + 1); s carries log2(e).
        s = (softcap * LOG2E) * (1.0 - 2.0 / (gl.exp2(s * (2.0 / softcap)) + 1.0))
    if MASKED:
        seen = visible(key, n, rows, r0, q0, MASK, sm_t, c, g)[None, :, :]
        s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def add_values(acc, vbuf, vsbuf, i_box, p, key, n, rows, MASKED: gl.constexpr,
               c: gl.constexpr, g: gl.constexpr):  # fmt: skip
    """acc += the values of a box's keys, transposed, times probabilities [HB, BOX, ROWS]."""
    A: gl.constexpr = gl.DotOperandLayout(0, mma_layout(g.HB, g.RB), 2)
    right = transposed(p.to(multiplied(c)), c, g)
    words = codes_of(vbuf, i_box, c.WORDS_V, g).permute([0, 2, 1]).load(A)
    if MASKED:  # a stale slot may hold NaN, and 0 × NaN is NaN
        live = live_keys(key, n, rows, gl.SliceLayout(0, gl.SliceLayout(1, A)), c, g)[None, None, :]
        words = gl.where(live, words, 0)
    if c.BLOCK_SCALES:
        factor = value_factor(scale_box(vsbuf, i_box, c, g).permute([0, 2, 1]), c, g)
        if MASKED:
            factor = gl.where(live, factor, 0.0)
        v = scaled_e2m1(words, factor, False)
    else:
        v = value_parts(words, c)
    out = ()
    for i in gl.static_range(gl.constexpr(c.PARTS)):
        out = out + (mma_v2(v[i], right, acc[i]),)
    return out


@gluon.jit
def value_logs(vsbuf, i_box, key, n, rows, MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Logarithms to base 2 and reciprocals of the scales of a box's values: [HB, BOX]."""
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    vs = gl.maximum(scale_box(vsbuf, i_box, c, g).load(gl.SliceLayout(2, MMA)), 1e-30)
    if MASKED:
        live = live_keys(key, n, rows, gl.SliceLayout(0, gl.SliceLayout(2, MMA)), c, g)[None, :]
        vs = gl.where(live, vs, 1.0)
    return log2_and_inverse(vs)


@gluon.jit
def attend_tile(state, kbuf, vbuf, ksbuf, vsbuf, stage, q, scale, softcap, t, n, rows, r0, q0, MASK, sm_t,
                MASKED: gl.constexpr, c: gl.constexpr, g: gl.constexpr):  # fmt: skip
    """One step of the running softmax: state is (maximum, sum per key of a lane, PARTS accumulators)."""
    PER_COPY: gl.constexpr = g.COPY // g.BOX
    m, l, acc = state
    s, inverse = (), ()
    for j in gl.static_range(gl.constexpr(g.BOXES)):
        key, i_box = t * c.TILE + g.BOX * j, stage * PER_COPY + j % PER_COPY
        x = scores(
            kbuf[j // PER_COPY],
            ksbuf[j // PER_COPY],
            i_box,
            q,
            scale,
            softcap,
            key,
            n,
            rows,
            r0,
            q0,
            MASK,
            sm_t,
            MASKED,
            c,
            g,
        )
        if c.TOKEN_SCALES:
            # The value's scale joins the exponent, so that the probabilities that meet the codes lie in (0, 1].
            log, over = value_logs(vsbuf[j // PER_COPY], i_box, key, n, rows, MASKED, c, g)
            x = x + log[:, :, None]
            inverse = inverse + (over,)
        s = s + (x,)
        if j == 0:
            top = x
        else:
            top = gl.maximum(top, x)
    m_new = gl.maximum(m, gl.max(top, 1))
    base = gl.where(m_new == float("-inf"), 0.0, m_new)
    old = gl.exp2(m - base)
    l = l * old[:, None, :]
    scaled = ()
    for i in gl.static_range(gl.constexpr(c.PARTS)):
        scaled = scaled + (acc[i] * old[:, None, :],)
    for j in gl.static_range(gl.constexpr(g.BOXES)):
        p = gl.exp2(s[j] - base[:, None, :])
        if c.TOKEN_SCALES:
            l = l + p * inverse[j][:, :, None]
        else:
            l = l + p
        key, i_box = t * c.TILE + g.BOX * j, stage * PER_COPY + j % PER_COPY
        scaled = add_values(
            scaled,
            vbuf[j // PER_COPY],
            vsbuf[j // PER_COPY],
            i_box,
            p,
            key,
            n,
            rows,
            MASKED,
            c,
            g,
        )
    return m_new, l, scaled


@gluon.jit
def empty_state(c: gl.constexpr, g: gl.constexpr):
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    m = gl.full([g.HB, c.ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
    l = gl.full([g.HB, g.BOX, c.ROWS], 0, gl.float32, MMA)
    acc = ()
    for _ in gl.static_range(gl.constexpr(c.PARTS)):
        acc = acc + (gl.full([g.HB, c.WORDS_V, c.ROWS], 0, gl.float32, MMA),)
    return m, l, acc
