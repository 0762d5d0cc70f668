"""Decode's query: the rows of a segment come into shared memory with its first tile's copies, ahead of their use.

A load at the start of a segment would queue behind all copies under way, some 3 µs (notes/decode.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...versions import async_load
from ..parts.convert import INT4_FACTOR, INT4_ODD, multiplied
from .records import Query
from .tiles import begin_of, mma_layout, query_words
from .turns import turned_query


@gluon.constexpr_function
def _copying(g, c, size):
    """Layout of [heads, rows, columns]: a lane copies 16 bytes."""
    lanes = min(32, c.D * size // 16)
    return gl.BlockedLayout([1, 1, 16 // size], [1, 32 // lanes, lanes], [g.HB, g.RB, 1], [2, 1, 0])


@gluon.jit
def make_queries(Q, c: gl.constexpr, g: gl.constexpr):
    """A ring of queries [HB, ROWS, D]: of as many segments as may begin in the tiles that are fetched ahead."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return gl.allocate_shared_memory(Q.dtype.element_ty, [g.QUERIES, g.HB, c.ROWS, c.D], LAYOUT)


@gluon.jit
def pointers_of(Q, strides, q0, h, r, c: gl.constexpr):
    """Of query rows r of a request, all heads of a group counted, of KV heads h."""
    p_token = Q + (q0 + r // c.GROUP).to(gl.int64) * strides.q_t
    return p_token + (h * c.GROUP + r % c.GROUP).to(gl.int64) * strides.q_h


@gluon.jit
def fetch_query(tensors, strides, queries, count, cursor, end, h0, FIRST: gl.constexpr, c: gl.constexpr,
                g: gl.constexpr):  # fmt: skip
    """Start the copy of the cursor's query, if its tile, fetched next, is the first of the share or of a segment.

    The number of queries so far.
    """
    Q, CU = tensors.Q, tensors.CU
    if (cursor.x < end) & (FIRST | (cursor.t == 0)):
        L: gl.constexpr = _copying(g, c, Q.dtype.element_ty.primitive_bitwidth // 8)
        h = h0 + gl.arange(0, g.HB, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
        r = cursor.segment * c.ROWS + gl.arange(0, c.ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
        o_d = gl.arange(0, c.D, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
        if c.RAGGED:
            q0 = gl.load(CU + cursor.b).to(gl.int32)
            rows = gl.load(CU + cursor.b + 1).to(gl.int32) - q0
        else:
            q0, rows = cursor.b * c.MAX_Q, c.MAX_Q
        p_q = pointers_of(Q, strides, q0, h, r, c) + o_d
        live, p_q = gl.broadcast(r < rows * c.GROUP, p_q)
        async_load(queries.index(count % g.QUERIES), p_q, mask=live)
        async_copy.commit_group()
        count += 1
    return count


@gluon.jit
def operands_of(x, turns, c: gl.constexpr, g: gl.constexpr):
    """A query [HB, ROWS, D] (layout query_words) as the right operand, a Query, and a factor of its scores [HB, ROWS].

    fp16 holds what bf16 holds only after a power of two is taken out of each row; the factor puts it back.
    """
    MMA: gl.constexpr = mma_layout(g.HB, g.RB)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    x = turned_query(x.to(gl.float32), turns, 2, c, g)
    field = gl.max(gl.abs(x), 2).to(gl.int32, bitcast=True) >> 23
    field = gl.maximum(field & 0xFF, 1)  # exponent of the largest magnitude
    inverse = (gl.maximum(254 - field, 1) << 23).to(gl.float32, bitcast=True)
    x = (x * inverse[:, :, None]).to(multiplied(c))
    L: gl.constexpr = gl.SliceLayout(1, MMA)
    factor = gl.convert_layout((field << 23).to(gl.float32, bitcast=True) * c.K_FACTOR, L)
    total = factor  # not used
    if g.K.CODE == "int4":  # as the sums of products come
        total = gl.convert_layout(gl.sum(x.to(gl.float32), 2) * (1.0 / INT4_FACTOR), L)
    # [heads, rows, parts of a row, lanes, pairs of units, …] → operand j: the j-th codes. Four codes of a unit lie side
    # by side; of one or two it is the pair's that do.
    PAIRS: gl.constexpr = min(c.WORDS_K, 64) // 8
    SHAPE: gl.constexpr = [g.HB, c.ROWS, c.WORDS_K // (8 * PAIRS), 4, PAIRS]
    if g.K.PARTS == 4:
        x = x.reshape(SHAPE + [2, 4]).permute([0, 2, 4, 3, 5, 1, 6])
        even, odd = x.reshape([g.HB, c.WORDS_K, c.ROWS, 2, 2]).split()
        zeroth, second = even.split()
        first, third = odd.split()
        if g.K.CODE == "int4":
            zeroth, second = (zeroth * INT4_ODD).to(x.dtype), (second * INT4_ODD).to(x.dtype)
        parts = (zeroth, first, second, third)
    else:
        PARTS: gl.constexpr = g.K.PARTS
        x = x.reshape(SHAPE + [PARTS, 2]).permute([0, 2, 4, 3, 6, 1, 5]).reshape([g.HB, c.WORDS_K, c.ROWS, PARTS])
        parts = x.split() if PARTS == 2 else (x.reshape([g.HB, c.WORDS_K, c.ROWS]),)
    out = ()
    for j in gl.static_range(gl.constexpr(g.K.PARTS)):
        out = out + (gl.convert_layout(parts[j], B, assert_trivial=True),)
    return Query(out, total), factor


@gluon.jit
def arrived_query(queries, turns, i, c: gl.constexpr, g: gl.constexpr):
    """The i-th query that was copied."""
    async_copy.wait_group(0)
    x = queries.index(i % g.QUERIES).load(query_words(g.HB, g.RB, c.ROWS, c.WORDS_K, g.K.PARTS))
    return operands_of(x, turns, c, g)


@gluon.jit
def loaded_query(tensors, strides, turns, segment, h0, c: gl.constexpr, g: gl.constexpr):
    """A segment's query that was not copied; a lane loads the stretches that its keys have."""
    L: gl.constexpr = query_words(g.HB, g.RB, c.ROWS, c.WORDS_K, g.K.PARTS)
    h = h0 + gl.arange(0, g.HB, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    r = segment.i * c.ROWS + gl.arange(0, c.ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    o_d = gl.arange(0, c.D, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    if g.K.WINDOWS > 1:
        o_d = o_d - g.K.PARTS * begin_of(h, False, g)
    p_q = pointers_of(tensors.Q, strides, segment.q0, h, r, c) + o_d
    live, p_q = gl.broadcast(r < segment.rows * c.GROUP, p_q)
    if g.Q_COLUMNS < c.D:
        live = live & (o_d < g.Q_COLUMNS)
    if g.K.WINDOWS > 1:
        live = live & (o_d >= 0)
    return operands_of(gl.load(p_q, mask=live, other=0.0), turns, c, g)
