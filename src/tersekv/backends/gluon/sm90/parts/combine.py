"""Combine of splits, as decode and MLA decode share it: the workspace of partial results, and their sum.

A partial result has two slots per CTA range, [BLOCK_M, PARTIAL_COLUMNS] fp32: acc_o, and row_max and row_sum in the
last columns.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def split_metadata_ptr(SPLIT_WORKSPACE, num_ctas, cfg: gl.constexpr):
    """Returns the pointer to SPLIT_METADATA [B, max_m_blocks, HEADS, 2] int32, behind the partial results in the
    workspace.

    Per work tile: its number of splits (1 or less: unsplit) and the CTA in which it begins, which writes both.
    """
    return (SPLIT_WORKSPACE + 2 * num_ctas * cfg.BLOCK_M * cfg.PARTIAL_COLUMNS).to(gl.pointer_type(gl.int32))


@gluon.jit
def num_splits_of_tile(work_tile, blocks_per_range, tile_first_range):
    """Returns the number of splits of a work tile that begins in CTA range tile_first_range."""
    return (
        (work_tile.n_block_base + (work_tile.m_block + 1) * work_tile.num_n_blocks - 1) // blocks_per_range
        - tile_first_range
        + 1
    )


@gluon.jit
def store_split_metadata(SPLIT_METADATA, i_request, m_block, max_m_blocks, i_cta, num_splits, cfg: gl.constexpr):
    """Stores, for the combine, the number of splits of a work tile that begins in CTA i_cta."""
    p_metadata = SPLIT_METADATA + 2 * ((i_request * max_m_blocks + m_block) * cfg.HEADS + i_cta % cfg.HEADS)
    gl.store(p_metadata, num_splits)
    gl.store(p_metadata + 1, i_cta)


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
