"""Rotated rows and channel scales in decode: queries and weighted values of a program's heads, by `parts/turn`.

What columns are multiplied by is kept in shared memory as the kernel has its columns: [parts, heads, words]. Nothing of
it is compiled for caches that have neither.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.turn import factors_of, sums, sums_of_parts
from .records import State, Turns
from .rows import column_of

PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def make_turns(unused, c: gl.constexpr, g: gl.constexpr):
    """Memory for them; unused: what stands for what is not there."""
    k, v = unused, unused
    if g.K.TURN.ANY:
        k = gl.allocate_shared_memory(gl.float32, [1, g.HB, c.D], PLAIN)
    if g.V.TURN.ANY:
        N: gl.constexpr = 1 if g.WIDE else g.V.PARTS
        v = gl.allocate_shared_memory(gl.float32, [N, g.HB, c.DV // N], PLAIN)
    return Turns(k, v)


@gluon.jit
def _load(given, h0, N: gl.constexpr, D: gl.constexpr, turn: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Factors of a side, for each of N parts [heads, columns of it]; given: signs and channel scales."""
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    h = h0 + gl.arange(0, g.HB, gl.SliceLayout(1, L))[:, None]
    place = gl.arange(0, D // N, gl.SliceLayout(0, L))[None, :]
    out = ()
    for j in gl.static_range(N):
        head, column = gl.broadcast(h, column_of(place, c) if g.WIDE else N * place + j)
        out = out + (factors_of(given[0], given[1], head, column, D, turn),)
    return out


@gluon.jit
def load_turns(signs, channels, h0, c: gl.constexpr, g: gl.constexpr):
    """Factors of keys and of values in registers. They are asked for before anything is copied."""
    K: gl.constexpr = g.K.TURN
    V: gl.constexpr = g.V.TURN
    k, v = (), ()
    if K.ANY:
        k = _load((signs[0], channels[0]), h0, 1, c.D, K, c, g)
    if V.ANY:
        v = _load((signs[1], channels[1]), h0, 1 if g.WIDE else g.V.PARTS, c.DV, V, c, g)
    return k, v


@gluon.jit
def keep_turns(turns, factors):
    """Put them where they are read; threads have to meet before that."""
    k, v = factors
    for j in gl.static_range(len(k)):
        turns.k.index(j).store(k[j])
    for j in gl.static_range(len(v)):
        turns.v.index(j).store(v[j])


@gluon.jit
def turned_query(x, turns, AXIS: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Query rows fp32, [heads, rows, columns] or [rows, columns] of one head, as they meet keys of such a cache."""
    if g.K.TURN.ANY:
        L: gl.constexpr = x.type.layout
        if AXIS == 2:
            x = x * turns.k.index(0).load(gl.SliceLayout(1, L))[:, None, :]
        else:
            x = x * turns.k.index(0).reshape([c.D]).load(gl.SliceLayout(0, L))[None, :]
    if g.K.TURN.ROTATED:
        x = sums(x, AXIS, c.D)
    return x


@gluon.jit
def turned_back(state, turns, c: gl.constexpr, g: gl.constexpr):
    """A state whose sums of values are those of rows as they were appended; of some of the keys, or of all."""
    acc = state.acc
    if g.V.TURN.ANY:
        if g.WIDE:
            if g.V.TURN.ROTATED:
                acc = sums(acc, 1, c.DV)
            factor = turns.v.index(0).reshape([c.DV]).load(gl.SliceLayout(0, acc.type.layout))
            acc = acc * factor[None, :]
        else:
            if g.V.TURN.ROTATED:
                acc = sums_of_parts(acc, g.V.PARTS, 1, c.DV)
            parts = ()
            for j in gl.static_range(gl.constexpr(g.V.PARTS)):
                factor = turns.v.index(j).load(gl.SliceLayout(2, acc[j].type.layout))
                parts = parts + (acc[j] * factor[:, :, None],)
            acc = parts
    return State(state.m, state.l, acc)
