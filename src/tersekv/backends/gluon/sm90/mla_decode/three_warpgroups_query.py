"""Loads the query of `three_warpgroups` into shared memory as e4m3 terms."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...versions import reinterpret
from .small_m_fp8_mainloop import load_query_chunk

BLOCK_M = gl.constexpr(64)
MIN_SCALE = gl.constexpr(1e-30)  # of scores: −inf × MIN_SCALE is −inf
# Two pairs of bf16 → elementwise larger magnitude, as bits.
MAX_ABS_BF16X2_PTX = gl.constexpr(
    """{
    .reg .b32 x, y;
    and.b32 x, $1, 0x7fff7fff;
    and.b32 y, $2, 0x7fff7fff;
    max.u16x2 $0, x, y;
    }"""
)
# Four bf16 times four scales, powers of two → e4m3 codes of the products, and of their remainders: exact in fp16, since
# the products have 8 significant bits.
SPLIT_IN_E4M3_TERMS_PTX = gl.constexpr(
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


class QueryBlock(NamedTuple):
    """A work tile's query rows, of a block of heads."""

    m_block: gl.tensor  # of the request
    h: gl.tensor
    q_begin: gl.tensor  # first query row of the request
    num_q_rows: gl.tensor  # of the request


@gluon.jit
def token_and_head_of_q_rows(o_r, q_block, cfg: gl.constexpr):
    """Returns (tokens, query heads, whether the row exists) of rows o_r of a QueryBlock."""
    o_r += q_block.m_block * cfg.BLOCK_M
    heads = (q_block.h * cfg.GROUP + o_r % cfg.GROUP).to(gl.int64)
    return (q_block.q_begin + o_r // cfg.GROUP).to(gl.int64), heads, o_r < q_block.num_q_rows * cfg.GROUP


@gluon.jit
def load_query_rows(
    tensors, q_block, strides, first_row, STEP: gl.constexpr, WIDTH_PE: gl.constexpr, cfg: gl.constexpr
):
    """Loads STEP query rows from `first_row` on, as chunks of 128 columns, the rotary part last."""
    CHUNKS: gl.constexpr = cfg.CHUNKS
    WIDTH: gl.constexpr = 2 * cfg.CHUNK
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    o_r = first_row + gl.arange(0, STEP, gl.SliceLayout(1, L))
    tokens, heads, m_row = token_and_head_of_q_rows(o_r, q_block, cfg)
    p_q_nope = tensors.Q_NOPE + tokens * strides.q_nope_t + heads * strides.q_nope_h
    p_q_pe = tensors.Q_PE + tokens * strides.q_pe_t + heads * strides.q_pe_h
    chunks = ()
    for i in gl.static_range(CHUNKS):
        chunks = chunks + (load_query_chunk(p_q_nope, m_row, i * WIDTH, WIDTH, L),)
    return chunks + (load_query_chunk(p_q_pe, m_row, 0, WIDTH_PE, L),)


@gluon.jit
def max_abs_bits(a, b):
    """Returns the larger magnitude of two bf16 tensors, as bits: int16."""
    a, b = a.to(gl.int16, bitcast=True), b.to(gl.int16, bitcast=True)
    return gl.inline_asm_elementwise(MAX_ABS_BF16X2_PTX, "=r,r,r", [a, b], gl.int16, True, 2)


@gluon.jit
def normalize_query_rows(chunks, flip_sign, CHUNKS: gl.constexpr):
    """Returns (inv_scale of rows, as bf16; q_scale of their scores), powers of two.

    Scaled, each row's largest element lies in [128, 256): elements down to 2^-10 of that are exact in two e4m3 terms.
    """
    q_pe_chunk = chunks[CHUNKS]
    abs_max = max_abs_bits(chunks[0], chunks[1])
    for i in gl.static_range(2, CHUNKS):
        abs_max = max_abs_bits(abs_max, chunks[i])
    abs_max = gl.maximum(gl.max(abs_max, 1), gl.max(max_abs_bits(q_pe_chunk, q_pe_chunk), 1)).to(gl.int32)
    exponent = gl.maximum(abs_max >> 7, 8)
    inv_scale = ((261 - exponent) << 7 | gl.where(flip_sign, 0x8000, 0)).to(gl.int16).to(gl.bfloat16, bitcast=True)
    return inv_scale, gl.where(exponent == 255, float("nan"), ((exponent - 7) << 23).to(gl.float32, bitcast=True))


@gluon.jit
def view_by_row_steps(x, STEP: gl.constexpr):
    """Returns a view of query rows in shared memory in steps of STEP rows."""
    NUM_STEPS: gl.constexpr = x.shape[0] * x.shape[1] // STEP
    return reinterpret(x, x.dtype, [NUM_STEPS, STEP, x.shape[2]], x.layout)


@gluon.jit
def store_two_terms(x, inv_scale, smem_rows, i_step):
    """Stores x × inv_scale in shared memory as e4m3, and its remainder behind all rows."""
    STEP: gl.constexpr = x.shape[0]
    _, inv_scale = gl.broadcast(x, inv_scale[:, None])
    high_term, low_term = gl.inline_asm_elementwise(
        SPLIT_IN_E4M3_TERMS_PTX, "=&r,=r,r,r,r,r", [x, inv_scale], [gl.int8, gl.int8], True, 4
    )
    smem_rows.index(i_step).store(high_term.to(gl.float8e4nv, bitcast=True))
    smem_rows.index(i_step + BLOCK_M // STEP).store(low_term.to(gl.float8e4nv, bitcast=True))


@gluon.jit
def flip_signs(x, flip_sign):
    """Returns e4m3 codes, negated if `flip_sign`."""
    mask = gl.where(flip_sign, 0x80, 0).to(gl.int8)
    x = x.to(gl.int8, bitcast=True)
    _, mask = gl.broadcast(x, gl.full([1, 1], 0, gl.int8, x.type.layout) | mask)
    x = gl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r", [x, mask], gl.int8, True, 4)
    return x.to(gl.float8e4nv, bitcast=True)


@gluon.jit
def store_query_rows(chunks, q_nope, q_pe, q_scales, flip_sign, i_step, Q_TERMS: gl.constexpr, cfg: gl.constexpr):
    """Stores a step's query rows, negated if `flip_sign`, and their q_scales in shared memory."""
    CHUNKS: gl.constexpr = cfg.CHUNKS
    STEP: gl.constexpr = chunks[0].shape[0]
    STEPS: gl.constexpr = Q_TERMS * BLOCK_M // STEP  # of a chunk
    q_pe_chunk = chunks[CHUNKS]
    ROW: gl.constexpr = gl.SliceLayout(1, q_pe_chunk.type.layout)
    if Q_TERMS == 2:
        inv_scale, q_scale = normalize_query_rows(chunks, flip_sign, CHUNKS)
        for i in gl.static_range(CHUNKS):
            store_two_terms(chunks[i], inv_scale, q_nope, STEPS * i + i_step)
        if q_pe.dtype == gl.bfloat16:
            x = q_pe_chunk.to(gl.float32) * inv_scale.to(gl.float32)[:, None]
            q_pe.index(i_step).store(x.to(gl.bfloat16))
        else:
            store_two_terms(q_pe_chunk, inv_scale, q_pe, i_step)
    else:
        q_scale = gl.full([STEP], 1.0, gl.float32, ROW)
        for i in gl.static_range(CHUNKS):
            q_nope.index(STEPS * i + i_step).store(flip_signs(chunks[i], flip_sign))
        q_pe_chunk = flip_signs(q_pe_chunk, flip_sign)
        if q_pe.dtype == gl.bfloat16:
            q_pe_chunk = q_pe_chunk.to(gl.bfloat16)
        q_pe.index(i_step).store(q_pe_chunk)
    q_scales.index(i_step).store(q_scale)


@gluon.jit
def load_query_half(tensors, q, q_scales, q_block, score_scale, strides, I_CONSUMER: gl.constexpr,
                    Q_TERMS: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Loads half of a work tile's query rows into shared memory; MMAs may read them after the next barrier.

    With two terms, not unrolled: fetching code that runs once costs some 45 cycles per 128 bytes.
    """
    q_nope, q_pe = q
    WIDTH_PE: gl.constexpr = q_pe.shape[2]
    STEP: gl.constexpr = 16 if Q_TERMS == 2 else 32  # rows that registers hold twice, or once
    q_scales = reinterpret(q_scales, gl.float32, [BLOCK_M // STEP, STEP], q_scales.layout)
    HALF: gl.constexpr = BLOCK_M // STEP // 2
    q_nope_rows, q_pe_rows = view_by_row_steps(q_nope, STEP), view_by_row_steps(q_pe, STEP)
    next_chunks = load_query_rows(tensors, q_block, strides, I_CONSUMER * HALF * STEP, STEP, WIDTH_PE, cfg)
    if HALF == 1:
        store_query_rows(next_chunks, q_nope_rows, q_pe_rows, q_scales, score_scale < 0, I_CONSUMER, Q_TERMS, cfg)
    else:
        for i_step in range(I_CONSUMER * HALF, (I_CONSUMER + 1) * HALF):
            chunks = next_chunks
            next_block = QueryBlock(
                q_block.m_block, q_block.h, q_block.q_begin,
                gl.where(i_step + 1 < (I_CONSUMER + 1) * HALF, q_block.num_q_rows, 0),
            )  # fmt: skip
            next_chunks = load_query_rows(tensors, next_block, strides, (i_step + 1) * STEP, STEP, WIDTH_PE, cfg)
            store_query_rows(chunks, q_nope_rows, q_pe_rows, q_scales, score_scale < 0, i_step, Q_TERMS, cfg)
    fence_async_shared()


@gluon.jit
def load_score_scales(q_scales, score_scale, LAYOUT: gl.constexpr):
    """Returns the positive scale of each row's scores: [BLOCK_M]."""
    row_scale = q_scales.load(LAYOUT) * gl.where(score_scale < 0, -score_scale, score_scale)
    return gl.where(row_scale < MIN_SCALE, MIN_SCALE, row_scale)
