"""The columns of a row's largest scores, in ascending order: the kernels that two operations share.

A tournament. Programs each hold a split of a row in registers and keep its k largest, in order, as candidates, or some
more where there is room; these are split in turn until one program holds all of a row's, and selects the row's.
The k-th largest is found bit by bit, by counts; then a scan compacts: all larger keys, and of the equal ones the first.
So every row costs the same, whatever its scores are. Where k is most of a split, one program goes through the row again
for every bit instead.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ...host import launch
from ...host.bind import KernelLaunch, TensorArg
from .index_scores import positions_of_request_rows_else_minus_1, request_of_row_else_minus_1_or_B

# Columns of a program. After 3.6 Triton stores by way of shared memory, 8 bytes a column: 64 KB are on every chip.
_MIN_SPLIT, _MAX_SPLIT = 4096, 16384 if triton.__version__.startswith("3.6.") else 8192
_SPLIT_OF_K = 8  # a split has so many columns for each that it keeps, if it can
_FILL = tl.constexpr(1024)  # entries that are filled together
NAN_KEY = tl.constexpr(1)
_KEPT_KEY = tl.constexpr(0xFFFFFFFF)


class Source(NamedTuple):
    """What a program selects from: scores (fp32), or candidates' keys (int32) with their columns behind them."""

    p_row: Any
    num: Any  # scores that the row sees, or candidates
    keep_first: Any
    keep_last: Any


# A block of columns is a tensor [32, warps, steps]: every warp holds neighbouring columns, 32 a step. So a scan needs
# other warps only for their sums.
# NOTE: stores to scattered places have this layout, its first dimension across lanes. So have loads, whose rows are not
# known to be aligned (strides are not specialised on): vectors would go through shared memory to other lanes.


@triton.jit
def block_columns(BLOCK_COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Returns 0 … BLOCK_COLUMNS − 1 as such a tensor."""
    STEPS: tl.constexpr = BLOCK_COLUMNS // (32 * WARPS)
    i = tl.arange(0, WARPS)[:, None] * (32 * STEPS) + tl.arange(0, STEPS)[None, :] * 32
    return tl.arange(0, 32)[:, None, None] + i[None, :, :]


@triton.jit
def load_topk_keys_kept_first_nan_last(source, columns):
    """Loads keys of columns as uint32 in the order of scores; 0: not to be selected, 1: NaN, the largest: selected
    before all others."""
    valid = columns < source.num
    if source.p_row.dtype.element_ty == tl.int32:
        return tl.load(source.p_row + columns, mask=valid, other=0).to(tl.uint32, bitcast=True)
    else:
        x = tl.load(source.p_row + columns, mask=valid, other=float("-inf")) + 0.0  # −0 becomes 0
        bits = x.to(tl.int32, bitcast=True)
        key = (bits ^ ((bits >> 31) | -0x80000000)).to(tl.uint32, bitcast=True)
        key = tl.where(x == x, key, NAN_KEY)
        if source.keep_first + source.keep_last > 0:
            kept = (columns < source.keep_first) | (columns >= source.num - source.keep_last)
            key = tl.where(kept, _KEPT_KEY, key)
        return tl.where(x != float("-inf"), key, 0).to(tl.uint32)


@triton.jit
def load_sortable_score_keys(source, begin, BLOCK_COLUMNS: tl.constexpr, WARPS: tl.constexpr):
    """Loads the keys of a block."""
    return load_topk_keys_kept_first_nan_last(source, begin + block_columns(BLOCK_COLUMNS, WARPS))


@triton.jit
def load_or_compute_column_indices(
    source, begin, columns_offset, m_selected, BLOCK_COLUMNS: tl.constexpr, WARPS: tl.constexpr
):
    """Returns the columns of a block: those stored with candidates, or their places in the row."""
    i = begin + block_columns(BLOCK_COLUMNS, WARPS)
    if source.p_row.dtype.element_ty == tl.int32:
        return tl.load(source.p_row + columns_offset + i, mask=m_selected, other=0)
    else:
        return i


@triton.constexpr_function
def negative_count_below_threshold_ptx(num_keys):
    """PTX that counts those of n = num_keys keys, from $n on, that are below a threshold: as a negative number in $0; 0
    in others.

    LLVM makes bit counts of sums of comparisons, with twice the instructions.
    """
    n = num_keys
    counted = "".join(f"sub.cc.u32 x, ${n + i}, ${2 * n + i}; subc.u32 c, c, 0; " for i in range(n))
    zeros = "".join(f"mov.u32 ${i}, 0; " for i in range(1, n))
    return "{ .reg .b32 x, c; mov.u32 c, 0; " + counted + "mov.u32 $0, c; " + zeros + "}"


@triton.constexpr_function
def count_constraints(n):
    return ",".join(["=&r"] * n + ["r"] * (2 * n))


@triton.jit
def negative_partial_counts_below(keys, threshold, WARPS: tl.constexpr, USE_PTX: tl.constexpr):
    """Returns a tensor whose sum is minus the number of keys below the threshold."""
    if USE_PTX:
        N: tl.constexpr = min(keys.numel // (32 * WARPS), 8)
        PTX: tl.constexpr = negative_count_below_threshold_ptx(N)
        CONSTRAINTS: tl.constexpr = count_constraints(N)
        return tl.inline_asm_elementwise(PTX, CONSTRAINTS, [keys, threshold], tl.int32, True, N)
    else:
        return -(keys < threshold).to(tl.int32)


@triton.jit
def count_keys_at_or_above(source, first_block_keys, threshold, BLOCK_COLUMNS: tl.constexpr, ONE_BLOCK: tl.constexpr,
                           WARPS: tl.constexpr,
               USE_PTX: tl.constexpr):  # fmt: skip
    """Counts keys of the source >= threshold, which is not 0."""
    counts, total = negative_partial_counts_below(first_block_keys, threshold, WARPS, USE_PTX), BLOCK_COLUMNS
    if not ONE_BLOCK:
        for begin in range(BLOCK_COLUMNS, source.num, BLOCK_COLUMNS):
            counts += negative_partial_counts_below(
                load_sortable_score_keys(source, begin, BLOCK_COLUMNS, WARPS), threshold, WARPS, USE_PTX
            )
            total += BLOCK_COLUMNS
    return total + tl.sum(counts)


@triton.jit
def find_topk_threshold_and_num_ties(
    source, first_block_keys, min_k, max_k, BLOCK_COLUMNS: tl.constexpr, ONE_BLOCK: tl.constexpr, WARPS: tl.constexpr,
    USE_PTX: tl.constexpr,
):  # fmt: skip
    """Returns (the smallest key of the min_k largest, or of up to `max_k`; how many equal keys are selected)."""
    threshold, bit = tl.full([], 0, tl.uint32), tl.full([], 0x80000000, tl.uint32)
    num_from = count_keys_at_or_above(source, first_block_keys, threshold + 1, BLOCK_COLUMNS, ONE_BLOCK, WARPS, USE_PTX)
    while (bit > 0) & (num_from > max_k):
        count = count_keys_at_or_above(
            source, first_block_keys, threshold | bit, BLOCK_COLUMNS, ONE_BLOCK, WARPS, USE_PTX
        )
        threshold = tl.where(count >= min_k, threshold | bit, threshold)
        num_from = tl.where(count >= min_k, count, num_from)
        bit = bit >> 1
    threshold = tl.maximum(threshold, 1)
    more = tl.full([], 0, tl.int32)
    if threshold < 0xFFFFFFFF:
        more = count_keys_at_or_above(source, first_block_keys, threshold + 1, BLOCK_COLUMNS, ONE_BLOCK, WARPS, USE_PTX)
    return threshold, tl.minimum(num_from, max_k) - more


@triton.jit
def output_positions_m_selected_count_and_ties_left(keys, threshold, max_ties):
    """Returns (output positions of a block's keys, which are selected, how many are, how many ties are left)."""
    more, equal = keys > threshold, keys == threshold
    # Both counts in one scan; a block has fewer than 2^15 columns.
    both = (more.to(tl.int32) << 16) + equal.to(tl.int32)
    of_step = tl.sum(both, 0)
    of_warp = tl.sum(of_step, 1)
    before = tl.cumsum(of_step, 1) - of_step + (tl.cumsum(of_warp, 0) - of_warp)[:, None]
    both = tl.cumsum(both, 0) + before[None, :, :]
    num_more, num_equal = both >> 16, both & 0xFFFF
    position = num_more + tl.minimum(num_equal, max_ties) - 1
    total = tl.sum(of_warp, 0)
    count = (total >> 16) + tl.minimum(total & 0xFFFF, max_ties)
    return position, more | (equal & (num_equal <= max_ties)), count, tl.maximum(max_ties - (total & 0xFFFF), 0)


@triton.jit
def num_visible_open_group_is_open_first_column(
    STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, B, i_request, i_row, width, KEYS_PER_COLUMN: tl.constexpr,
    cfg: tl.constexpr,
):  # fmt: skip
    """Returns (number of columns visible to row i_row, of request i_request, its open group, whether it has one, its
    first column). VISIBLE: columns, or where they end behind STARTS; None: by its position, KEYS_PER_COLUMN keys a
    column."""
    if VISIBLE is not None:
        group = tl.load(VISIBLE + i_row).to(tl.int64)
        columns, is_open = group, group < 0
        if OPEN_GROUP is not None:
            is_open = (tl.load(OPEN_GROUP + i_row) != 0) & (group >= 0)  # negative: padding
    else:
        position = positions_of_request_rows_else_minus_1(SEQ_LENS, CU_SEQLENS_Q, B, i_request, i_row.to(tl.int64), cfg)
        group = (position + 1) // cfg.RATIO
        columns = (group + KEYS_PER_COLUMN - 1) // KEYS_PER_COLUMN
        is_open = (position + 1) % cfg.RATIO > 0
    visible, start = tl.maximum(tl.minimum(columns, width), 0).to(tl.int32), i_row.to(tl.int64) * 0
    if STARTS is not None:
        start = tl.minimum(tl.maximum(tl.load(STARTS + i_row).to(tl.int64), 0), width)
        visible = tl.maximum(visible - start.to(tl.int32), 0)
    return visible, group, is_open, start


@triton.jit
def num_candidates_after_rounds(
    num_visible, k, first_round_max_per_split, COLUMNS_PER_SPLIT: tl.constexpr, NUM_ROUNDS: tl.constexpr
):
    """Returns the candidates of a row that sees so many columns, after NUM_ROUNDS rounds; NUM_ROUNDS 0: its columns."""
    n = num_visible
    for i in tl.static_range(NUM_ROUNDS):
        n = tl.cdiv(n, COLUMNS_PER_SPLIT) * (first_round_max_per_split if i == 0 else k)
    return n


@triton.jit(
    do_not_specialize=[
        "B",
        "first_row",
        "width",
        "keep_first",
        "keep_last",
        "columns_offset",
        "num_splits",
        "stride_st",
        "stride_sh",
        "candidates_offset",
    ]
)
def index_candidates_kernel(
    SOURCE, STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, CANDIDATES, B, first_row, width, k, keep_first,
    keep_last,
    stride_st, stride_sh, columns_offset, first_round_max_per_split, max_per_split, num_splits, candidates_offset,
    HEADS: tl.constexpr, COLUMNS_PER_SPLIT: tl.constexpr, WARPS: tl.constexpr, NUM_PREVIOUS_ROUNDS: tl.constexpr,
    KEYS_PER_COLUMN: tl.constexpr, USE_PTX: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Stores the candidates of one split of one row of one head: `max_per_split` keys, 0 behind the last, and their
    columns."""
    i_line, i_split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    i_row, line = i_line // HEADS, (i_line % HEADS).to(tl.int64)
    t = first_row + i_row
    i_request = 0 if VISIBLE is not None else request_of_row_else_minus_1_or_B(CU_SEQLENS_Q, B, t, cfg)
    visible, _group, _is_open, start = num_visible_open_group_is_open_first_column(
        STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, B, i_request, t, width, KEYS_PER_COLUMN, cfg
    )
    num = num_candidates_after_rounds(visible, k, first_round_max_per_split, COLUMNS_PER_SPLIT, NUM_PREVIOUS_ROUNDS)
    p_row = SOURCE + i_row.to(tl.int64) * stride_st + line * stride_sh + (start if NUM_PREVIOUS_ROUNDS == 0 else 0)
    source = Source(p_row, num, keep_first, keep_last)
    begin = i_split * COLUMNS_PER_SPLIT
    if begin < source.num:
        key = load_sortable_score_keys(source, begin, COLUMNS_PER_SPLIT, WARPS)
        threshold, num_ties = find_topk_threshold_and_num_ties(
            source, key, k, max_per_split, COLUMNS_PER_SPLIT, True, WARPS, USE_PTX
        )
        position, m_selected, count, num_ties = output_positions_m_selected_count_and_ties_left(
            key, threshold, num_ties
        )
        column = load_or_compute_column_indices(source, begin, columns_offset, m_selected, COLUMNS_PER_SPLIT, WARPS)
        p_out = CANDIDATES + (i_line.to(tl.int64) * num_splits + i_split) * max_per_split
        tl.store(p_out + position, key.to(tl.int32, bitcast=True), mask=m_selected)
        tl.store(p_out + candidates_offset + position, column, mask=m_selected)
        for i in range(count, max_per_split, _FILL):
            o_rest = i + tl.arange(0, _FILL)
            tl.store(p_out + o_rest, 0, mask=o_rest < max_per_split)


@triton.jit(
    do_not_specialize=["B", "first_row", "width", "keep_first", "keep_last", "columns_offset", "stride_st", "stride_sh"]
)
def index_topk_kernel(
    SOURCE, STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, OUT, LENS, B, first_row, width, k, keep_first,
    keep_last,
    stride_st, stride_sh, columns_offset, first_round_max_per_split, stride_ot, stride_oh, stride_lt, stride_lh,
    HEADS: tl.constexpr, COLUMNS_OUT: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, ONE_BLOCK: tl.constexpr,
    WARPS: tl.constexpr, COLUMNS_PER_SPLIT: tl.constexpr, NUM_PREVIOUS_ROUNDS: tl.constexpr, HAS_GROUP: tl.constexpr,
    KEYS_PER_COLUMN: tl.constexpr, USE_PTX: tl.constexpr, cfg: tl.constexpr,
):  # fmt: skip
    """Stores the selected columns of one row of one head."""
    i_row, line = tl.program_id(0) // HEADS, (tl.program_id(0) % HEADS).to(tl.int64)
    t = first_row + i_row
    i_request = 0 if VISIBLE is not None else request_of_row_else_minus_1_or_B(CU_SEQLENS_Q, B, t, cfg)
    visible, group, is_open, start = num_visible_open_group_is_open_first_column(
        STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, B, i_request, t, width, KEYS_PER_COLUMN, cfg
    )
    num = num_candidates_after_rounds(visible, k, first_round_max_per_split, COLUMNS_PER_SPLIT, NUM_PREVIOUS_ROUNDS)
    p_row = SOURCE + i_row.to(tl.int64) * stride_st + line * stride_sh + (start if NUM_PREVIOUS_ROUNDS == 0 else 0)
    source = Source(p_row, num, keep_first, keep_last)
    p_out = OUT + t.to(tl.int64) * stride_ot + line * stride_oh
    key = load_sortable_score_keys(source, 0, BLOCK_COLUMNS, WARPS)
    threshold, num_ties = find_topk_threshold_and_num_ties(source, key, k, k, BLOCK_COLUMNS, ONE_BLOCK, WARPS, USE_PTX)
    position, m_selected, count, num_ties = output_positions_m_selected_count_and_ties_left(key, threshold, num_ties)
    tl.store(
        p_out + position,
        load_or_compute_column_indices(source, 0, columns_offset, m_selected, BLOCK_COLUMNS, WARPS),
        mask=m_selected,
    )
    if not ONE_BLOCK:
        for i in range(BLOCK_COLUMNS, source.num, BLOCK_COLUMNS):
            position, m_selected, num_selected, num_ties = output_positions_m_selected_count_and_ties_left(
                load_sortable_score_keys(source, i, BLOCK_COLUMNS, WARPS), threshold, num_ties
            )
            column = load_or_compute_column_indices(source, i, columns_offset, m_selected, BLOCK_COLUMNS, WARPS)
            tl.store(p_out + count + position, column, mask=m_selected)
            count += num_selected
    if HAS_GROUP:
        tl.store(p_out + count, group.to(tl.int32), mask=is_open)
        count += tl.where(is_open, 1, 0)
    if LENS is not None:
        tl.store(LENS + t.to(tl.int64) * stride_lt + line * stride_lh, count)
    for i in range(count, COLUMNS_OUT, _FILL):
        o_out = i + tl.arange(0, _FILL)
        tl.store(p_out + o_out, -1, mask=o_out < COLUMNS_OUT)


# The host.


class Kernels(NamedTuple):
    """Kernels of one arithmetic: of a round, and of the end."""

    candidates: Any
    topk: Any
    num_warps: Callable[[int], int]  # of a program that holds so many columns
    constants: dict[str, Any]  # that only they have
    options: dict[str, Any]  # of their launches


def split_columns(k: int) -> int:
    return min(max(launch.next_power_of_2(_SPLIT_OF_K * k), _MIN_SPLIT), _MAX_SPLIT)


def num_candidates_and_max_per_split_by_round(width: int, k: int) -> list[tuple[int, int]]:
    """Returns for each round of a row of `width` columns how many candidates it leaves, and of a split at
    max_per_split."""
    n, split = width, split_columns(k)
    found: list[tuple[int, int]] = []
    while n > (_MAX_SPLIT if found else split) and 2 * k <= split:
        num_splits = -(-n // split)
        max_per_split = k if found else min(max(_MAX_SPLIT // num_splits, k), 2 * k)
        n = num_splits * max_per_split
        found.append((n, max_per_split))
    return found


def words_of_candidates(width: int, k: int) -> int:
    """Returns the words of the workspace that a row of a head takes."""
    return 2 * sum(n for n, _ in num_candidates_and_max_per_split_by_round(width, k))


def candidate_workspace_slices(
    num_row_heads: int, width: int, k: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Returns slices of the workspace for candidates of so many rows of heads, by their names in the launches."""
    rounds = num_candidates_and_max_per_split_by_round(width, k)
    return {f"candidates_{i}": ((2, num_row_heads, n), torch.int32) for i, (n, _) in enumerate(rounds)}


def index_topk_launches(
    f: SimpleNamespace, scores: TensorArg, strides: tuple[int, int], rows: range, width: int, row_args: dict[str, Any],
    kernels: Kernels,
) -> list[KernelLaunch]:  # fmt: skip
    """Returns the launches that select columns of some rows.

    scores, strides: where the scores of the first of them are, and strides of rows and heads there
    row_args:        STARTS, VISIBLE, OPEN_GROUP, HAS_GROUP; SEQ_LENS, CU_SEQLENS_Q, B, KEYS_PER_COLUMN, cfg
    """
    lines = f.out.shape[1] if len(f.out.shape) == 3 else 1
    last, split, num_row_heads = min(f.keep_last, f.k), split_columns(f.k), len(rows) * lines
    row_args = dict(row_args)
    has_group = row_args.pop("HAS_GROUP")
    row_args |= {
        "first_row": rows.start, "width": width, "k": f.k, "keep_first": min(f.keep_first, f.k - last),
        "keep_last": last, "HEADS": lines, "COLUMNS_PER_SPLIT": split,
    } | kernels.constants  # fmt: skip
    source = {"SOURCE": scores, "stride_st": strides[0], "stride_sh": strides[1], "columns_offset": 0}
    source["NUM_PREVIOUS_ROUNDS"] = 0
    launches, num_entries = [], width
    rounds = num_candidates_and_max_per_split_by_round(width, f.k)
    row_args["first_round_max_per_split"] = rounds[0][1] if rounds else 0
    for i, (entries, max_per_split) in enumerate(rounds):
        num_splits, offset = entries // max_per_split, num_row_heads * entries
        candidates = TensorArg(f"candidates_{i}")
        sizes = {
            "max_per_split": max_per_split,
            "num_splits": num_splits,
            "candidates_offset": offset,
            "WARPS": kernels.num_warps(split),
        }
        launches.append(KernelLaunch(
            kernels.candidates, (num_row_heads * num_splits,), row_args | source | sizes | {"CANDIDATES": candidates},
            num_warps=kernels.num_warps(split), **kernels.options,
        ))  # fmt: skip
        source = {
            "SOURCE": candidates, "stride_st": lines * entries, "stride_sh": entries, "columns_offset": offset,
            "NUM_PREVIOUS_ROUNDS": i + 1,
        }  # fmt: skip
        num_entries = entries
    block = min(max(launch.next_power_of_2(num_entries), 256), _MAX_SPLIT if rounds else split)
    has_heads = len(f.out.shape) == 3
    lens = f.out_lens.stride if f.out_lens is not None else (0, 0)
    row_args |= source | {
        "OUT": TensorArg("out"), "LENS": TensorArg("out_lens"), "stride_ot": f.out.stride[0],
        "stride_oh": f.out.stride[1] if has_heads else 0, "stride_lt": lens[0],
        "stride_lh": lens[1] if has_heads else 0, "COLUMNS_OUT": f.out.shape[-1], "BLOCK_COLUMNS": block,
        "ONE_BLOCK": num_entries <= block, "WARPS": kernels.num_warps(block), "HAS_GROUP": has_group,
    }  # fmt: skip
    last_launch = KernelLaunch(
        kernels.topk, (num_row_heads,), row_args, num_warps=kernels.num_warps(block), **kernels.options
    )
    return [*launches, last_launch]


def triton_index_topk_kernels(f: SimpleNamespace) -> Kernels:
    """Returns the kernels here."""
    lanes = 64 if f.arch is None else 32

    def num_warps(columns: int) -> int:
        """Returns the warps of a program that holds so many columns, 16 a thread, of at most 1024 threads."""
        return min(max(columns // (16 * lanes), 4), 1024 // lanes)

    return Kernels(index_candidates_kernel, index_topk_kernel, num_warps, {"USE_PTX": launch.has_ptx(f)}, {})
