"""What merges of cut segments do alike: pieces' states in scratch are read, weighed by their maxima and summed."""

import triton
import triton.language as tl


@triton.jit
def add_pieces(m, l, acc, PART, slots, o_r, o_d, mask, c: tl.constexpr):
    """(maximum, sum, columns o_d) of rows, with those of pieces in `slots` [rows, pieces] joined; o_r: rows there."""
    p_part = PART + (slots.to(tl.int64) * c.ROWS + o_r[:, None]) * c.PART_COLUMNS
    m_part = tl.load(p_part + c.PART_COLUMNS - 2, mask=mask, other=float("-inf"))
    l_part = tl.load(p_part + c.PART_COLUMNS - 1, mask=mask, other=0.0)
    parts = tl.load(p_part[:, :, None] + o_d[None, None, :], mask=mask[:, :, None], other=0.0)
    m_new = tl.maximum(m, tl.max(m_part, 1))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights, old = tl.exp2(m_part - base[:, None]), tl.exp2(m - base)
    acc = acc * old[:, None] + tl.sum(parts * weights[:, :, None], 1)
    return m_new, l * old + tl.sum(l_part * weights, 1), acc
