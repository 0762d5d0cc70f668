"""Kernel of paged decode: a split-KV pass over equal shares of all tiles (`parts/shares`); `parts/merge` joins cuts.

Keys lie on the matrix unit's M side and query rows on N, so few query heads waste little of it.
"""

import triton
import triton.language as tl

from ..parts.merge import LOG2E, finish, output, scalar
from ..parts.shares import (
    META_FIELDS,
    first_segment,
    locate,
    meta_of,
    piece_tiles,
    request_tiles,
    row_places,
    share,
    to_next_piece,
    zero_padding,
)  # fmt: skip
from .tiles import attend, load_query, turned_back


@triton.jit
def store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, c: tl.constexpr):
    """Write acc × factor to `out`; acc: PARTS tiles [words, ROWS]."""
    PARTS: tl.constexpr = c.PARTS
    o_d = tl.arange(0, c.BLOCK_DV)
    mask = (o_d < c.WORDS_V)[:, None] & m_row[None, :]
    for j in tl.static_range(PARTS):
        p_out = OUT + (tokens * so_t + heads * so_h)[None, :] + (c.PARTS * o_d + j)[:, None]
        tl.store(p_out, output(acc[j] * factor[None, :], OUT, c), mask=mask)


@triton.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_kernel(
    Q, K, V, KS, VS, TABLE, LENS, CU, MASK, SINKS, OUT, LSE, PART, K_SIGNS, V_SIGNS, K_CHANNELS, V_CHANNELS,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, slots, sq_t, sq_h, sk_p, sk_s, sk_h, sv_p, sv_s, sv_h,
    sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, skc_h, svc_h, st_b, sm_t, so_t, so_h, sl_t, sl_h,
    c: tl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles. See the module's docstring."""
    p = tl.program_id(0)
    num_programs = tl.num_programs(0)
    META = meta_of(PART, num_programs, c)
    if c.PIECE == 0:
        tl.store(META + p * META_FIELDS, 0)
    if c.RAGGED:
        zero_padding(OUT, LSE, tl.load(CU + B).to(tl.int32), T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
    x, end, per = share(LENS, CU, B, p // c.HEADS, num_programs // c.HEADS, c)
    h = p % c.HEADS
    if x < end:
        b, base = locate(LENS, CU, B, x, c)
        score_scale = scalar(softmax_scale, SOFTMAX_T, 0, c.SOFTMAX_T) * LOG2E
        request = request_tiles(LENS, CU, b, True, c)
        if c.PIECE > 0:
            x += to_next_piece(x - base, request.tiles, c)
        while x < end:
            while x - base >= request.tiles * request.segments:
                base += request.tiles * request.segments
                b += 1
                request = request_tiles(LENS, CU, b, True, c)
            segment = (x - base) // request.tiles
            t0 = (x - base) % request.tiles
            t1 = tl.minimum(t0 + (end - x if c.PIECE == 0 else piece_tiles(request.tiles, c)), request.tiles)
            tokens, heads, m_row = row_places(segment, h, request.q0, request.rows, c)
            scale = score_scale * scalar(k_scale, K_T, h * c.K_T_STRIDE, c.K_T)
            q, row_scale = load_query(Q, tokens, heads, m_row, sq_t, sq_h, (K_SIGNS, K_CHANNELS, skc_h), h, c)
            m, l, acc = attend(
                K, V, KS, VS, TABLE + b.to(tl.int64) * st_b, MASK, q, scale * row_scale, softcap,
                request.first + t0, request.first + t1, request.keys, request.rows, segment * c.ROWS, request.q0, h,
                sk_p, sk_s, sk_h, sv_p, sv_s, sv_h, sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, sm_t, c,
            )  # fmt: skip
            acc = turned_back(acc, (V_SIGNS, V_CHANNELS, svc_h), h, c)
            if t1 - t0 == request.tiles:
                h_scale = scalar(v_scale, V_T, h * c.V_T_STRIDE, c.V_T) * scalar(out_scale, OUT_T, 0, c.OUT_T)
                factor, lse = finish(m, l, h_scale * c.V_FACTOR, SINKS, heads, m_row, c)
                store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, c)
                if c.HAS_LSE:
                    tl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)
            else:
                slot = 2 * p
                if c.PIECE > 0:
                    slot = (first_segment(b, request.q0, c) + segment) * slots + t0 // piece_tiles(request.tiles, c)
                    slot = slot * c.HEADS + h
                elif t0 == 0:
                    slot += 1
                    pieces = (base + (segment + 1) * request.tiles - 1) // per - p // c.HEADS + 1
                    tl.store(META + p * META_FIELDS, pieces)
                    tl.store(META + p * META_FIELDS + 1, request.q0)
                    tl.store(META + p * META_FIELDS + 2, request.rows)
                    tl.store(META + p * META_FIELDS + 3, segment)
                store_part(PART, slot, m, l, acc, m_row, c)
            x += t1 - t0


@triton.jit
def store_part(PART, slot, m, l, acc, m_row, c: tl.constexpr):
    """Write a cut segment's state: [ROWS, PARTS × BLOCK_DV + 2] fp32, the last two columns m and l."""
    PARTS: tl.constexpr = c.PARTS
    o_r = tl.arange(0, c.ROWS)
    o_d = tl.arange(0, c.BLOCK_DV)
    p_row = PART + (slot.to(tl.int64) * c.PART_ROWS + o_r) * c.PART_COLUMNS
    for j in tl.static_range(PARTS):
        tl.store(p_row[None, :] + j * c.BLOCK_DV + o_d[:, None], acc[j], mask=m_row[None, :])
    tl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
    tl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)
