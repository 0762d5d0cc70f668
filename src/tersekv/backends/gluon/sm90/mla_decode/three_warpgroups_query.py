"""The query rows of `three_warpgroups` as the matrix unit takes them: as e4m3 terms."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...versions import reinterpret
from .eight_bits_tiles import query_piece

ROWS = gl.constexpr(64)  # of a segment
MIN_SCALE = gl.constexpr(1e-30)  # of scores: −inf times it is −inf
# Two pairs of bf16 → the larger magnitude of each two, as bits.
LARGER_PTX = gl.constexpr(
    """{
    .reg .b32 x, y;
    and.b32 x, $1, 0x7fff7fff;
    and.b32 y, $2, 0x7fff7fff;
    max.u16x2 $0, x, y;
    }"""
)
# Four bf16 and four factors, powers of two → e4m3 codes of the products, and of what those leave of them: all is exact
# in fp16, of which these have 8 significant bits.
TERMS_PTX = gl.constexpr(
    """{
    .reg .b32 x, y, f<4>, g, h, a, b;
    .reg .b16 p, q;
    mul.rn.bf16x2 x, $2, $4;
    mul.rn.bf16x2 y, $3, $5;
    shl.b32 f0, x, 16;
    and.b32 f1, x, 0xffff0000;
    shl.b32 f2, y, 16;
    and.b32 f3, y, 0xffff0000;
    cvt.rn.f16x2.f32 g, f1, f0;
    cvt.rn.f16x2.f32 h, f3, f2;
    cvt.rn.satfinite.e4m3x2.f16x2 p, g;
    cvt.rn.satfinite.e4m3x2.f16x2 q, h;
    mov.b32 $0, {p, q};
    cvt.rn.f16x2.e4m3x2 a, p;
    cvt.rn.f16x2.e4m3x2 b, q;
    sub.rn.f16x2 g, g, a;
    sub.rn.f16x2 h, h, b;
    cvt.rn.satfinite.e4m3x2.f16x2 p, g;
    cvt.rn.satfinite.e4m3x2.f16x2 q, h;
    mov.b32 $1, {p, q};
    }"""
)


class Block(NamedTuple):
    """A segment's query rows, of a block of heads."""

    i: gl.tensor  # the segment's number in its request
    h: gl.tensor
    q0: gl.tensor  # the request's first query row
    rows: gl.tensor  # of the request's query


@gluon.jit
def places(o_r, of, c: gl.constexpr):
    """(tokens, query heads, row is real) of rows o_r of a Block."""
    o_r += of.i * c.ROWS
    heads = (of.h * c.GROUP + o_r % c.GROUP).to(gl.int64)
    return (of.q0 + o_r // c.GROUP).to(gl.int64), heads, o_r < of.rows * c.GROUP


@gluon.jit
def load_rows(tensors, of, strides, first, STEP: gl.constexpr, WIDTH_R: gl.constexpr, c: gl.constexpr):
    """Start the loads of STEP query rows from `first` on: their pieces of 128 columns, and last the rotary one."""
    CHUNKS: gl.constexpr = c.CHUNKS
    WIDTH: gl.constexpr = 2 * c.CHUNK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_r = first + gl.arange(0, STEP, gl.SliceLayout(1, L))
    tokens, heads, m_row = places(o_r, of, c)
    p_c = tensors.QN + tokens * strides.qn_t + heads * strides.qn_h
    p_r = tensors.QP + tokens * strides.qp_t + heads * strides.qp_h
    pieces = ()
    for i in gl.static_range(CHUNKS):
        pieces = pieces + (query_piece(p_c, m_row, i * WIDTH, WIDTH, L),)
    return pieces + (query_piece(p_r, m_row, 0, WIDTH_R, L),)


@gluon.jit
def larger(a, b):
    """The larger magnitude of two tensors of bf16, as bits: int16."""
    a, b = a.to(gl.int16, bitcast=True), b.to(gl.int16, bitcast=True)
    return gl.inline_asm_elementwise(LARGER_PTX, "=r,r,r", [a, b], gl.int16, True, 2)


@gluon.jit
def normalise(pieces, negative, CHUNKS: gl.constexpr):
    """(factors of rows of bf16, as bf16; factors of their scores), powers of two.

    Each row's largest element comes to lie in [128, 256): what is 2^-10 of that is still exact in two e4m3 terms.
    """
    rotary = pieces[CHUNKS]
    top = larger(pieces[0], pieces[1])
    for i in gl.static_range(2, CHUNKS):
        top = larger(top, pieces[i])
    top = gl.maximum(gl.max(top, 1), gl.max(larger(rotary, rotary), 1)).to(gl.int32)
    field = gl.maximum(top >> 7, 8)
    inverse = ((261 - field) << 7 | gl.where(negative, 0x8000, 0)).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return inverse, gl.where(field == 255, float("nan"), ((field - 7) << 23).to(gl.float32, bitcast=True))


@gluon.jit
def by_steps(x, STEP: gl.constexpr):
    """Query rows in shared memory, STEP of them at a time."""
    COUNT: gl.constexpr = x.shape[0] * x.shape[1] // STEP
    return reinterpret(x, x.dtype, [COUNT, STEP, x.shape[2]], x.layout)


@gluon.jit
def store_terms(x, inverse, places, first):
    """Put x × inverse into shared memory as e4m3, and behind all rows what that leaves of it."""
    STEP: gl.constexpr = x.shape[0]
    _, inverse = gl.broadcast(x, inverse[:, None])
    high, low = gl.inline_asm_elementwise(TERMS_PTX, "=&r,=r,r,r,r,r", [x, inverse], [gl.int8, gl.int8], True, 4)
    places.index(first).store(high.to(gl.float8e4nv, bitcast=True))
    places.index(first + ROWS // STEP).store(low.to(gl.float8e4nv, bitcast=True))


@gluon.jit
def flipped(x, negative):
    """e4m3 codes, with their signs changed if `negative`."""
    mask = gl.where(negative, 0x80, 0).to(gl.int8)
    x = x.to(gl.int8, bitcast=True)
    _, mask = gl.broadcast(x, gl.full([1, 1], 0, gl.int8, x.type.layout) | mask)
    x = gl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, mask], gl.int8, True, 4)
    return x.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def put_rows(pieces, q_c, q_r, factors, negative, step, TERMS: gl.constexpr, c: gl.constexpr):
    """Put a step's query rows into shared memory, their signs changed if `negative`, and their factors."""
    CHUNKS: gl.constexpr = c.CHUNKS
    STEP: gl.constexpr = pieces[0].shape[0]
    STEPS: gl.constexpr = TERMS * ROWS // STEP  # of a piece
    rotary = pieces[CHUNKS]
    ROW: gl.constexpr = gl.SliceLayout(1, rotary.type.layout)
    if TERMS == 2:
        inverse, factor = normalise(pieces, negative, CHUNKS)
        for i in gl.static_range(CHUNKS):
            store_terms(pieces[i], inverse, q_c, STEPS * i + step)
        if q_r.dtype == gl.bfloat16:
            x = rotary.to(gl.float32) * inverse.to(gl.float32)[:, None]
            q_r.index(step).store(x.to(gl.bfloat16))
        else:
            store_terms(rotary, inverse, q_r, step)
    else:
        factor = gl.full([STEP], 1.0, gl.float32, ROW)
        for i in gl.static_range(CHUNKS):
            q_c.index(STEPS * i + step).store(flipped(pieces[i], negative))
        rotary = flipped(rotary, negative)
        if q_r.dtype == gl.bfloat16:
            rotary = rotary.to(gl.bfloat16)
        q_r.index(step).store(rotary)
    factors.index(step).store(factor)


@gluon.jit
def bring_query(tensors, q, factors, of, scale, strides, which: gl.constexpr, TERMS: gl.constexpr,
                c: gl.constexpr):  # fmt: skip
    """Put half of a segment's query rows into shared memory, where products may read them behind the next barrier.

    Of two terms, not unrolled: code that runs once costs its way to the multiprocessor, some 45 cycles per 128 bytes.
    """
    q_c, q_r = q
    WIDTH_R: gl.constexpr = q_r.shape[2]
    STEP: gl.constexpr = 16 if TERMS == 2 else 32  # as many rows at a time as registers hold twice, or once
    factors = reinterpret(factors, gl.float32, [ROWS // STEP, STEP], factors.layout)
    HALF: gl.constexpr = ROWS // STEP // 2
    places_c, places_r = by_steps(q_c, STEP), by_steps(q_r, STEP)
    after = load_rows(tensors, of, strides, which * HALF * STEP, STEP, WIDTH_R, c)
    if HALF == 1:
        put_rows(after, places_c, places_r, factors, scale < 0, which, TERMS, c)
    else:
        for step in range(which * HALF, (which + 1) * HALF):
            pieces = after
            more = Block(of.i, of.h, of.q0, gl.where(step + 1 < (which + 1) * HALF, of.rows, 0))
            after = load_rows(tensors, more, strides, (step + 1) * STEP, STEP, WIDTH_R, c)
            put_rows(pieces, places_c, places_r, factors, scale < 0, step, TERMS, c)
    fence_async_shared()


@gluon.jit
def score_factors(factors, scale, LAYOUT: gl.constexpr):
    """What the scores of the rows in shared memory are multiplied with, which is positive: [ROWS]."""
    factor = factors.load(LAYOUT) * gl.where(scale < 0, -scale, scale)
    return gl.where(factor < MIN_SCALE, MIN_SCALE, factor)
