"""The columns of a row's largest scores, in ascending order: the kernel that two operations share.

A program has a row. Four passes of a radix select find the smallest key that is taken, 8 bits each from the highest on;
then one pass compacts in order: all larger keys, and of the equal ones the first. A row stays in L2 meanwhile. Rows of
at most k columns are only compacted.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ...host import launch
from ...host.bind import KernelLaunch, TensorArg
from .index_scores import positions_of_rows_in_request, request_of_row

_MAX_BLOCK = 8192  # columns that are looked at together
_NAN_KEY = tl.constexpr(1)
_KEPT_KEY = tl.constexpr(0xFFFFFFFF)


@triton.jit
def load_radix_keys(p_scores, column, visible, keep_first, keep_last):
    """Loads scores as uint32 in their order; 0: not to be taken, 1: NaN, the largest: taken before all others."""
    valid = column < visible
    x = tl.load(p_scores + column, mask=valid, other=float("-inf"))
    x = tl.where(x == 0, 0.0, x)
    bits = x.to(tl.uint32, bitcast=True)
    key = tl.where(bits >> 31 != 0, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    key = tl.where(x == x, key, _NAN_KEY)
    kept = (column < keep_first) | (column >= visible - keep_last)
    key = tl.where(kept, _KEPT_KEY, key)
    return tl.where(valid & (x != float("-inf")), key, 0).to(tl.uint32)


@triton.jit
def radix_select_pass(
    p_scores, visible, keep_first, keep_last, prefix, rest, SHIFT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Finds 8 more bits, from bit SHIFT on, of the rest-largest key among those that begin with prefix. Returns the
    longer prefix, and how many keys that begin with it are left to take."""
    counts = tl.zeros([256], tl.int32)
    for begin in range(0, visible, BLOCK):
        key = load_radix_keys(p_scores, begin + tl.arange(0, BLOCK), visible, keep_first, keep_last)
        mine = key > 0
        if SHIFT < 24:
            mine = mine & ((key >> (SHIFT + 8)) == (prefix >> (SHIFT + 8)))
        counts += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=mine)
    # Keys of each bin and all higher ones.
    at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    i_bin = tl.maximum(tl.sum((at_least >= rest).to(tl.int32), 0) - 1, 0)
    above = tl.sum(tl.where(tl.arange(0, 256) > i_bin, counts, 0), 0)
    return prefix | (i_bin.to(tl.uint32) << SHIFT), rest - above


@triton.jit
def find_topk_threshold_and_ties(p_scores, visible, k, keep_first, keep_last, BLOCK: tl.constexpr):
    """Returns (the smallest key of the k largest, how many of the keys equal to it are taken)."""
    prefix, rest = tl.full([], 0, tl.uint32), k
    prefix, rest = radix_select_pass(p_scores, visible, keep_first, keep_last, prefix, rest, 24, BLOCK)
    prefix, rest = radix_select_pass(p_scores, visible, keep_first, keep_last, prefix, rest, 16, BLOCK)
    prefix, rest = radix_select_pass(p_scores, visible, keep_first, keep_last, prefix, rest, 8, BLOCK)
    return radix_select_pass(p_scores, visible, keep_first, keep_last, prefix, rest, 0, BLOCK)


@triton.jit(do_not_specialize=["B", "first_row", "width", "keep_first", "keep_last"])
def index_topk_kernel(
    SCORES, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, OUT, LENS, B, first_row, width, k, keep_first, keep_last,
    stride_st, stride_sh, stride_ot, stride_oh, stride_lt, stride_lh,
    LINES: tl.constexpr, COLUMNS_OUT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_OUT: tl.constexpr,
    HAS_GROUP: tl.constexpr, KEYS: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Takes columns of one row of one head. VISIBLE: columns that rows see; None: by their positions, KEYS keys a
    column."""
    i_row, line = tl.program_id(0) // LINES, (tl.program_id(0) % LINES).to(tl.int64)
    t = first_row + i_row
    if VISIBLE is not None:
        group = tl.load(VISIBLE + t).to(tl.int64)
        columns = group
        if OPEN_GROUP is not None:
            is_open = tl.load(OPEN_GROUP + t) != 0
    else:
        b = request_of_row(CU_SEQLENS_Q, B, t, cfg)
        position = positions_of_rows_in_request(SEQ_LENS, CU_SEQLENS_Q, B, b, t.to(tl.int64), cfg)
        group = (position + 1) // cfg.RATIO
        columns = (group + KEYS - 1) // KEYS
        is_open = (position + 1) % cfg.RATIO > 0
    visible = tl.maximum(tl.minimum(columns, width), 0).to(tl.int32)
    p_scores = SCORES + i_row.to(tl.int64) * stride_st + line * stride_sh
    p_out = OUT + t.to(tl.int64) * stride_ot + line * stride_oh
    threshold, ties = tl.full([], 1, tl.uint32), visible + 1
    if visible > k:
        threshold, ties = find_topk_threshold_and_ties(p_scores, visible, k, keep_first, keep_last, BLOCK)
        if threshold == 0:  # fewer than k may be taken
            threshold, ties = tl.full([], 1, tl.uint32), visible + 1
    count = 0
    for begin in range(0, visible, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        key = load_radix_keys(p_scores, column, visible, keep_first, keep_last)
        more, equal = key > threshold, key == threshold
        # Both counts in one scan; a block has fewer than 2^16 columns.
        both = tl.cumsum((more.to(tl.int32) << 16) + equal.to(tl.int32), 0)
        num_more, num_equal = both >> 16, both & 0xFFFF
        place = count + num_more + tl.minimum(num_equal, ties) - 1
        tl.store(p_out + place, column, mask=more | (equal & (num_equal <= ties)))
        equal_in_block = tl.sum(equal.to(tl.int32), 0)
        count += tl.sum(more.to(tl.int32), 0) + tl.minimum(equal_in_block, ties)
        ties = tl.maximum(ties - equal_in_block, 0)
    if HAS_GROUP:
        tl.store(p_out + count, group.to(tl.int32), mask=is_open)
        count += tl.where(is_open, 1, 0)
    if LENS is not None:
        tl.store(LENS + t.to(tl.int64) * stride_lt + line * stride_lh, count)
    for begin in range(0, COLUMNS_OUT, BLOCK_OUT):
        o_out = begin + tl.arange(0, BLOCK_OUT)
        tl.store(p_out + o_out, -1, mask=(o_out >= count) & (o_out < COLUMNS_OUT))


def index_topk_launch(
    f: SimpleNamespace, scores: TensorArg, strides: tuple[int, int], rows: range, width: int, arguments: dict[str, Any]
) -> KernelLaunch:
    """Returns the launch that takes columns of some rows.

    scores, strides: where the scores of the first of them are, and strides of rows and heads there
    arguments:       VISIBLE, OPEN_GROUP, HAS_GROUP; SEQ_LENS, CU_SEQLENS_Q, B, KEYS, cfg
    """
    lines = f.out.shape[1] if len(f.out.shape) == 3 else 1
    last = min(f.keep_last, f.k)
    block = min(_MAX_BLOCK, max(launch.next_power_of_2(width), 256))
    head = 1 if lines > 1 or len(f.out.shape) == 3 else 0
    lens = f.out_lens.stride if f.out_lens is not None else (0, 0)
    arguments = arguments | {
        "SCORES": scores, "OUT": TensorArg("out"), "LENS": TensorArg("out_lens"), "first_row": rows.start,
        "width": width, "k": f.k, "keep_first": min(f.keep_first, f.k - last), "keep_last": last,
        "stride_st": strides[0], "stride_sh": strides[1], "stride_ot": f.out.stride[0],
        "stride_oh": f.out.stride[1] if head else 0, "stride_lt": lens[0], "stride_lh": lens[1] if head else 0,
        "LINES": lines, "COLUMNS_OUT": f.out.shape[-1], "BLOCK": block,
        "BLOCK_OUT": min(1024, launch.next_power_of_2(f.out.shape[-1])),
    }  # fmt: skip
    warps = 16 if block == _MAX_BLOCK else 4
    return KernelLaunch(index_topk_kernel, (len(rows) * lines,), arguments, num_warps=warps)
