"""The accumulation step of combine kernels: partial results are loaded from the workspace, rescaled and summed."""

import triton
import triton.language as tl


@triton.jit
def accumulate_splits(row_max, row_sum, acc_o, SPLIT_WORKSPACE, partial_slots, o_r, o_d, mask, cfg: tl.constexpr):
    """Returns (row_max, row_sum, acc_o of columns o_d) with the splits in `partial_slots` [rows, splits] added; o_r:
    their rows in a slot."""
    p_partial = SPLIT_WORKSPACE + (partial_slots.to(tl.int64) * cfg.BLOCK_M + o_r[:, None]) * cfg.PARTIAL_COLUMNS
    split_max = tl.load(p_partial + cfg.PARTIAL_COLUMNS - 2, mask=mask, other=float("-inf"))
    split_sum = tl.load(p_partial + cfg.PARTIAL_COLUMNS - 1, mask=mask, other=0.0)
    split_o = tl.load(p_partial[:, :, None] + o_d[None, None, :], mask=mask[:, :, None], other=0.0)
    row_max_new = tl.maximum(row_max, tl.max(split_max, 1))
    safe_max = tl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    split_scales, rescale = tl.exp2(split_max - safe_max[:, None]), tl.exp2(row_max - safe_max)
    acc_o = acc_o * rescale[:, None] + tl.sum(split_o * split_scales[:, :, None], 1)
    return row_max_new, row_sum * rescale + tl.sum(split_sum * split_scales, 1), acc_o
