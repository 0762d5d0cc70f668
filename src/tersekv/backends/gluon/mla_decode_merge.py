"""The merge of the segments that MLA decode's split pass cut: every piece's state, weighed, summed and written.

A program takes ROWS rows of one segment and COLUMNS columns of them; PIECES pieces are read at once. It may be launched
before the split pass has ended, and waits for it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..triton.decode_kernels import finish, meta_of, output, scalar


@triton.jit
def merge_kernel(
    CU, OUT, LSE, PART, kv_scale, KV_T, out_scale, OUT_T, num_programs, max_segments, so_t, so_h, sl_t, sl_h,
    ROWS: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """One segment of a block of heads; its pieces lie in slots 2p + 1, 2(p + HEADS), 2(p + 2 HEADS), …"""
    gdc_launch_dependents()
    gdc_wait()
    i, j = tl.program_id(0), tl.program_id(2)
    h, segment, b = i % c.HEADS, i // c.HEADS % max_segments, i // (c.HEADS * max_segments)
    if c.RAGGED:
        q0 = tl.load(CU + b).to(tl.int32)
        rows = tl.load(CU + b + 1).to(tl.int32) - q0
    else:
        q0, rows = b * c.MAX_Q, c.MAX_Q
    o_r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_r = (o_r < c.ROWS) & (segment * c.ROWS + o_r < rows * c.GROUP)
    # Read whether there is such a segment or not, so that it need not wait for what says so.
    META = meta_of(PART, num_programs, c) + 2 * i
    pieces, p = tl.load(META), tl.load(META + 1)
    if (pieces > 1) & (segment * c.ROWS < rows * c.GROUP):
        o_i, o_d = tl.arange(0, PIECES), j * COLUMNS + tl.arange(0, COLUMNS)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.full([ROWS], 0.0, tl.float32)
        acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        for x in range(0, pieces, PIECES):
            mask = m_r[:, None] & (x + o_i < pieces)[None, :]
            slots = (2 * (p + (x + o_i) * c.HEADS) + tl.where(x + o_i == 0, 1, 0)).to(tl.int64)
            p_part = PART + (slots[None, :] * c.ROWS + o_r[:, None]) * c.PART_COLUMNS
            m_part = tl.load(p_part + c.PART_COLUMNS - 2, mask=mask, other=float("-inf"))
            l_part = tl.load(p_part + c.PART_COLUMNS - 1, mask=mask, other=0.0)
            parts = tl.load(p_part[:, :, None] + o_d[None, None, :], mask=mask[:, :, None], other=0.0)
            m_new = tl.maximum(m, tl.max(m_part, 1))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            weights, old = tl.exp2(m_part - base[:, None]), tl.exp2(m - base)
            acc = acc * old[:, None] + tl.sum(parts * weights[:, :, None], 1)
            l = l * old + tl.sum(l_part * weights, 1)
            m = m_new
        row = segment * c.ROWS + o_r
        heads = (h * c.GROUP + row % c.GROUP).to(tl.int64)
        tokens = (q0 + row // c.GROUP).to(tl.int64)
        value_factor = scalar(kv_scale, KV_T, 0, c.V_T) * scalar(out_scale, OUT_T, 0, c.OUT_T)
        factor, lse = finish(m, l, value_factor, None, heads, m_r, c)
        columns = c.PARTS * (o_d % c.BLOCK_DV) + o_d // c.BLOCK_DV
        p_out = OUT + (tokens * so_t + heads * so_h)[:, None] + columns[None, :]
        tl.store(p_out, output(acc * factor[:, None], OUT, c), mask=m_r[:, None])
        if c.HAS_LSE:
            tl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_r & (j == 0))
