"""The merge of the segments that decode's split pass cut: every piece's state, weighed, summed and written.

A program takes MERGE_ROWS rows of a segment and MERGE_COLUMNS columns of them; MERGE_PIECES pieces are read at once.
It is launched before the split pass has ended, and waits for it; what follows may be launched before it has ended.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....triton.parts.merge import finish, output, scalar
from ....triton.parts.shares import meta_of
from ..parts.pieces import add_pieces


@triton.jit
def merge_kernel(
    CU, SINKS, OUT, LSE, PART, v_scale, V_T, out_scale, OUT_T, num_shares, so_t, so_h, sl_t, sl_h,
    c: tl.constexpr, g: tl.constexpr,
):  # fmt: skip
    gdc_wait()
    gdc_launch_dependents()
    p, j = tl.program_id(0), tl.program_id(1)
    h0, segment, b = (
        p % g.GROUPS * g.HB,
        p // g.GROUPS % g.SEGMENTS,
        p // (g.GROUPS * g.SEGMENTS),
    )
    if c.RAGGED:
        q0 = tl.load(CU + b).to(tl.int32)
        rows = tl.load(CU + b + 1).to(tl.int32) - q0
    else:
        q0, rows = b * c.MAX_Q, c.MAX_Q
    pieces, share = 0, 0
    if segment * c.ROWS < rows * c.GROUP:
        META = meta_of(PART, num_shares * c.HEADS, c) + 2 * p
        pieces, share = tl.load(META), tl.load(META + 1)
    if pieces > 1:
        CHUNKS: tl.constexpr = c.PARTS * c.BLOCK_DV // g.MERGE_COLUMNS
        o_e = j // CHUNKS * g.MERGE_ROWS + tl.arange(0, g.MERGE_ROWS)
        h, r = h0 + o_e // g.LIVE_ROWS, o_e % g.LIVE_ROWS
        row = segment * c.ROWS + r
        m_row = (row < rows * c.GROUP) & (o_e < g.HB * g.LIVE_ROWS)
        o_i = tl.arange(0, g.MERGE_PIECES)
        o_d = j % CHUNKS * g.MERGE_COLUMNS + tl.arange(0, g.MERGE_COLUMNS)
        m = tl.full([g.MERGE_ROWS], float("-inf"), tl.float32)
        l = tl.full([g.MERGE_ROWS], 0.0, tl.float32)
        acc = tl.full([g.MERGE_ROWS, g.MERGE_COLUMNS], 0.0, tl.float32)
        for i in range(0, pieces, g.MERGE_PIECES):
            mask = m_row[:, None] & (i + o_i < pieces)[None, :]
            slots = 2 * ((share + i + o_i)[None, :] * c.HEADS + h[:, None]) + tl.where(i + o_i == 0, 1, 0)[None, :]
            m, l, acc = add_pieces(m, l, acc, PART, slots, r, o_d, mask, c)
        head = (h * c.GROUP + row % c.GROUP).to(tl.int64)
        token = (q0 + row // c.GROUP).to(tl.int64)
        v_scales = v_scale + tl.full([g.MERGE_ROWS], 0.0, tl.float32)
        if c.V_T:
            v_scales = tl.load(V_T + h * c.V_T_STRIDE, mask=m_row, other=0.0)
        h_scale = v_scales * scalar(out_scale, OUT_T, 0, c.OUT_T)
        factor, lse = finish(m, l, h_scale * c.V_FACTOR, SINKS, head, m_row, c)
        word = o_d % c.BLOCK_DV
        p_out = OUT + (token * so_t + head * so_h)[:, None] + (c.PARTS * word + o_d // c.BLOCK_DV)[None, :]
        tl.store(
            p_out,
            output(acc * factor[:, None], OUT, c),
            mask=m_row[:, None] & (word < c.DV // c.PARTS)[None, :],
        )
        if c.HAS_LSE:
            tl.store(LSE + token * sl_t + head * sl_h, lse, mask=m_row & (j % CHUNKS == 0))
