"""Weights of a tile of scores: masks, soft caps, and the running maximum of each row."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.softmax import largest, softcapped

# Weights in e4m3, which holds 2^-9 to 448, are at most two to the first. They are judged by their own tile's highest
# score, or many small ones would be lost beside a large one; but sums must not leave fp32.
RAISED, FAR = gl.constexpr(8.0), gl.constexpr(40.0)


class Reference(NamedTuple):
    """Of weights in 8 bits: what is taken from their scores, and the highest score of a row."""

    m: gl.tensor
    highest: gl.tensor


@gluon.jit
def masked(s, last, low, keys, c: gl.constexpr):
    """Scores of keys that a row does not see become −inf."""
    o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    seen = o_n[None, :] <= gl.minimum(last, keys - 1)[:, None]
    if c.WINDOW > 0:
        seen = seen & (o_n[None, :] > last[:, None] - c.WINDOW)
    if c.NEW:  # rows before the first token have no key
        seen = seen & (o_n >= low)[None, :]
    return gl.where(seen, s, float("-inf"))


@gluon.jit
def weigh(s, m, last, low, keys, scale, values_log, softcap, MASKED: gl.constexpr, c: gl.constexpr):
    """(weights fp32, m, shrink) of a tile of scores; scale > 0: of each row. m: of weights in 8 bits a Reference.

    last, low, keys: of the tile, the last key that each row sees by its place, the first that there is, and their end
    values_log: with scales of tokens, the tile's values are to be multiplied by two to this: that joins the exponent
    """
    if c.SOFTCAP:
        s = softcapped(s * scale[:, None], softcap)
    if MASKED:
        s = masked(s, last, low, keys, c)
    top = largest(s)
    if not c.SOFTCAP:
        top = top * scale
    if c.TOKEN_SCALES:
        top = top + values_log
    if c.VALUES_8:
        before = m.m
        highest = gl.maximum(m.highest, top)
        base = gl.maximum(top, highest - FAR) - RAISED
        m_new = Reference(base, highest)
    else:
        before = m
        base = gl.maximum(m, top)
        m_new = base
    if MASKED:
        base = gl.where(base == float("-inf"), 0.0, base)  # a row may have seen nothing yet
    shrink = gl.exp2(before - base)
    if c.TOKEN_SCALES:
        base = base - values_log
    if not c.SOFTCAP:
        s = s * scale[:, None]
    return gl.exp2(s - base[:, None]), m_new, shrink
