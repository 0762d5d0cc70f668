"""The columns of a row's largest scores on Hopper: the tournament of `triton/parts/index_topk.py`, with histograms.

A program holds its keys in registers, and counts them by their highest 11 bits in shared memory, then, of those in the
bin of the k-th largest, by the next 11, and by the last 10. A bin that may be selected whole ends it early, which is
so for most splits at once. Output positions are counted by ballots: a warp holds neighbouring columns, 32 a step.

Gluon has no atomics in shared memory, and no address of it: both are PTX.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....triton.parts.index_topk import (
    NAN_KEY,
    Kernels,
    Source,
    load_topk_keys_kept_first_nan_last,
    num_candidates_after_rounds,
    num_visible_open_group_is_open_first_column,
)
from ...versions import thread_barrier

_DIGIT_BITS = gl.constexpr(11)
_NUM_BINS = gl.constexpr(1 << 11)
_FIRST_SHIFT = gl.constexpr(21)
_FILL = gl.constexpr(1024)  # entries that are filled together
_UNLIMITED = gl.constexpr(1 << 30)

# 32-bit words of shared memory: bins, then what threads exchange.
_SHARED_PTX = gl.constexpr("{ .shared .align 16 .b32 words[2096]; mov.u32 $0, words; }")
_FOUND_WORD = gl.constexpr(1 << 11)  # of 4: bin, keys above it, keys from it on
_TOTALS_WORD = gl.constexpr((1 << 11) + 8)  # of 32: of warps

_COUNT_PTX = gl.constexpr("{ red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }")
_COUNT_EQUAL_PTX = gl.constexpr(
    "{ .reg .pred p; setp.eq.u32 p, $2, $3; @p red.shared.add.u32 [$1], 1; mov.u32 $0, 0; }"
)
_LOAD_PTX = gl.constexpr("ld.shared.u32 $0, [$1];")
_STORE_PTX = gl.constexpr("{ st.shared.u32 [$1], $2; mov.u32 $0, 0; }")
_STORE_FOUND_PTX = gl.constexpr(
    "{ .reg .pred p; setp.ne.u32 p, $2, 0; @p st.shared.v4.u32 [$1], {$3, $4, $5, 0}; mov.u32 $0, 0; }"
)
# Of 32 keys at or above a threshold: how many are in lower lanes, and in all.
_BALLOT_PTX = gl.constexpr("""{
    .reg .pred p;
    .reg .b32 all, lower;
    setp.ge.u32 p, $2, $3;
    vote.sync.ballot.b32 all, p, 0xFFFFFFFF;
    popc.b32 $1, all;
    mov.u32 lower, %lanemask_lt;
    and.b32 lower, lower, all;
    popc.b32 $0, lower;
}""")
_WARP_SUM_PTX = gl.constexpr("redux.sync.add.s32 $0, $1, 0xFFFFFFFF;")


class Threshold(NamedTuple):
    """Selected are keys above `key`, and the first `max_ties` that equal it."""

    key: gl.tensor
    max_ties: gl.tensor
    num_selected: gl.tensor


@gluon.constexpr_function
def block_layout(BLOCK_COLUMNS, WARPS):
    """Layout of a block of columns [warps, steps, 32]."""
    return gl.BlockedLayout([1, BLOCK_COLUMNS // (32 * WARPS), 1], [1, 1, 32], [WARPS, 1, 1], [2, 1, 0])


@gluon.jit
def column_offsets_by_warp_step_lane(BLOCK_COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """Returns 0 … BLOCK_COLUMNS − 1 in that layout: [warps, steps, 32]."""
    LAYOUT: gl.constexpr = block_layout(BLOCK_COLUMNS, WARPS)
    STEPS: gl.constexpr = BLOCK_COLUMNS // (32 * WARPS)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    step = gl.arange(0, STEPS, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    return warp[:, None, None] * (32 * STEPS) + step[None, :, None] * 32 + lane[None, None, :]


@gluon.jit
def request_of_row(CU_SEQLENS_Q, B, i_row, WARPS: gl.constexpr, cfg: gl.constexpr):
    """Returns the request that holds query row i_row."""
    if cfg.VARLEN_Q:
        ended = -(i_row < gl.load(CU_SEQLENS_Q).to(gl.int64)).to(gl.int32)
        for i in range(0, B, cfg.BLOCK_B):
            o_b = i + gl.arange(0, cfg.BLOCK_B, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
            end = gl.load(CU_SEQLENS_Q + o_b + 1, mask=o_b < B, other=0).to(gl.int64)
            ended += gl.sum(((o_b < B) & (end <= i_row)).to(gl.int32), 0)
        return ended
    else:
        return i_row // cfg.Q_LEN


@gluon.jit
def _load_word(address):
    return gl.inline_asm_elementwise(_LOAD_PTX, "=r,r", [address], gl.int32, False, 1)


@gluon.jit
def _store_word(address, x):
    gl.inline_asm_elementwise(_STORE_PTX, "=r,r,r", [address, x], gl.int32, False, 1)


@gluon.jit
def allocate_smem_and_clear_bins(WARPS: gl.constexpr):
    """Returns the address in shared memory of the bins, which are 0, and of the words behind them."""
    p_smem = gl.inline_asm_elementwise(_SHARED_PTX, "=r,r", [gl.to_tensor(0)], gl.int32, False, 1)
    o_bin = gl.arange(0, _NUM_BINS, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    _store_word(p_smem + 4 * o_bin, gl.zeros_like(o_bin))
    thread_barrier()
    return p_smem


@gluon.jit
def add_first_digits_to_bins(p_smem, keys):
    """Adds to each bin how many keys have that digit in their highest 11 bits."""
    address = p_smem + ((keys >> (_FIRST_SHIFT - 2)) & (4 * (_NUM_BINS - 1))).to(gl.int32, bitcast=True)
    gl.inline_asm_elementwise(_COUNT_PTX, "=r,r", [address], gl.int32, False, 1)


@gluon.jit
def add_digits_behind_prefix_to_bins(p_smem, keys, prefix, prefix_mask, shift):
    """Adds to each bin how many keys that equal `prefix` in the bits `prefix_mask` have that digit in the next bits, of
    the 11 from `shift` on."""
    digit = ((keys & ~prefix_mask) >> shift) & (_NUM_BINS - 1)
    address = p_smem + (digit << 2).to(gl.int32, bitcast=True)
    gl.inline_asm_elementwise(_COUNT_EQUAL_PTX, "=r,r,r,r", [address, keys & prefix_mask, prefix], gl.int32, False, 1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _sum_of_warp(x):
    return gl.inline_asm_elementwise(_WARP_SUM_PTX, "=r,r", [x], gl.int32, False, 1)


@gluon.jit
def _prefix_sum_and_all_sums_of_warps(p_smem, warp_sum, warp, lane, WARPS: gl.constexpr):
    """Exchanges in shared memory a number that all lanes of a warp have, [warps, 32]; returns (its sum over the warps
    before each, the numbers of all warps across lanes)."""
    warp, lane = warp + gl.zeros_like(warp_sum), lane + gl.zeros_like(warp_sum)
    p_sums = p_smem + 4 * _TOTALS_WORD
    _store_word(p_sums + 4 * warp, warp_sum)
    thread_barrier()
    all_sums = gl.where(lane < WARPS, _load_word(p_sums + 4 * lane), 0)
    return _sum_of_warp(gl.where(lane < warp, all_sums, 0)), all_sums


@gluon.jit
def kth_bin_num_above_num_from_and_clear(p_smem, k, num_above_bins, IGNORES_BIN_0: gl.constexpr, WARPS: gl.constexpr):
    """Returns (the bin of the k-th largest key, how many keys are above it, how many in and above it), and clears the
    bins; bin 0 where there are fewer than k. IGNORES_BIN_0: keys in bin 0 are not counted."""
    thread_barrier()
    PER_LANE: gl.constexpr = _NUM_BINS // (32 * WARPS)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, PER_LANE], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    j = gl.arange(0, PER_LANE, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    i_bin = _NUM_BINS - 1 - (((warp[:, None] * 32 + lane[None, :]) * PER_LANE)[:, :, None] + j[None, None, :])
    count = _load_word(p_smem + 4 * i_bin)
    _store_word(p_smem + 4 * i_bin, gl.zeros_like(i_bin))
    if IGNORES_BIN_0:
        count = gl.where(i_bin == 0, 0, count)
    of_lane = gl.sum(count, 2)
    before_warp, _all_sums = _prefix_sum_and_all_sums_of_warps(
        p_smem, _sum_of_warp(of_lane), warp[:, None], lane[None, :], WARPS
    )
    # A scan wants such a layout; the same threads hold the same sums.
    LANES: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    up_to_lane = gl.associative_scan(gl.convert_layout(of_lane, LANES, assert_trivial=True), 1, _add)
    up_to_lane = gl.convert_layout(up_to_lane, of_lane.type.layout, assert_trivial=True)
    before_lane = before_warp + (up_to_lane - of_lane)
    num_from = num_above_bins + before_lane[:, :, None] + gl.associative_scan(count, 2, _add)
    above = num_from - count
    found = (above < k) & ((num_from >= k) | (i_bin == 0))
    gl.inline_asm_elementwise(
        _STORE_FOUND_PTX, "=r,r,r,r,r,r", [p_smem + 4 * _FOUND_WORD, found.to(gl.int32), i_bin, above, num_from],
        gl.int32, False, 1,
    )  # fmt: skip
    thread_barrier()
    p_found = p_smem + 4 * _FOUND_WORD
    return _load_word(p_found).to(gl.uint32, bitcast=True), _load_word(p_found + 4), _load_word(p_found + 8)


@gluon.jit
def _count_equal(keys, key):
    return gl.sum(gl.sum(gl.sum((keys == key).to(gl.int32), 2), 1), 0)


@gluon.jit
def find_topk_threshold_ties_and_count(
    p_smem, source, first_block_keys, k, max_selected, BLOCK_COLUMNS: gl.constexpr, ONE_BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
):  # fmt: skip
    """Returns the `Threshold` of the k largest keys of a source, or of up to `max_selected` where that is known
    earlier."""
    add_first_digits_to_bins(p_smem, first_block_keys)
    if not ONE_BLOCK:
        for begin in range(BLOCK_COLUMNS, source.num, BLOCK_COLUMNS):
            add_first_digits_to_bins(
                p_smem,
                load_topk_keys_kept_first_nan_last(
                    source, begin + column_offsets_by_warp_step_lane(BLOCK_COLUMNS, WARPS)
                ),
            )
    digit, above, num_from = kth_bin_num_above_num_from_and_clear(p_smem, k, 0, True, WARPS)
    threshold, bits_left = digit << _FIRST_SHIFT, gl.to_tensor(21)
    if digit == 0:  # this bin has no numbers: NaN, and keys that are not there
        threshold, bits_left = threshold + NAN_KEY, bits_left * 0
        num_from = above + _count_equal(first_block_keys, NAN_KEY)
        if not ONE_BLOCK:
            for begin in range(BLOCK_COLUMNS, source.num, BLOCK_COLUMNS):
                more_keys = load_topk_keys_kept_first_nan_last(
                    source, begin + column_offsets_by_warp_step_lane(BLOCK_COLUMNS, WARPS)
                )
                num_from += _count_equal(more_keys, NAN_KEY)
    while (bits_left > 0) & (num_from > max_selected):
        prefix_mask = (-(1 << bits_left)).to(gl.uint32)
        bits_left = gl.maximum(bits_left - _DIGIT_BITS, 0)
        add_digits_behind_prefix_to_bins(p_smem, first_block_keys, threshold, prefix_mask, bits_left.to(gl.uint32))
        if not ONE_BLOCK:
            for begin in range(BLOCK_COLUMNS, source.num, BLOCK_COLUMNS):
                more_keys = load_topk_keys_kept_first_nan_last(
                    source, begin + column_offsets_by_warp_step_lane(BLOCK_COLUMNS, WARPS)
                )
                add_digits_behind_prefix_to_bins(p_smem, more_keys, threshold, prefix_mask, bits_left.to(gl.uint32))
        digit, above, num_from = kth_bin_num_above_num_from_and_clear(p_smem, k, above, False, WARPS)
        threshold = threshold | (digit << bits_left.to(gl.uint32))
    max_ties = gl.where(num_from > max_selected, max_selected - above, _UNLIMITED)
    return Threshold(threshold, max_ties, gl.minimum(num_from, max_selected))


@gluon.jit
def rank_in_warp_warp_offset_and_count(p_smem, keys, min_key, BLOCK_COLUMNS: gl.constexpr, WARPS: gl.constexpr):
    """Returns (number of keys >= min_key before each key of a block in its warp, before each warp, in the block)."""
    LAYOUT: gl.constexpr = block_layout(BLOCK_COLUMNS, WARPS)
    in_step, of_step = gl.inline_asm_elementwise(
        _BALLOT_PTX, "=&r,=&r,r,r", [keys, min_key], (gl.int32, gl.int32), True, 1
    )
    in_warp = in_step + (gl.associative_scan(of_step, 1, _add) - of_step)
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(1, LAYOUT)))[:, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, :]
    thread_barrier()  # all threads have read the sums of the last call
    warp_offset, all_sums = _prefix_sum_and_all_sums_of_warps(p_smem, gl.sum(of_step, 1), warp, lane, WARPS)
    return in_warp, warp_offset[:, None, :], gl.max(gl.sum(all_sums, 1), 0)


@gluon.jit
def zero_surplus_ties_and_count_ties_left(
    p_smem, keys, threshold, max_ties, BLOCK_COLUMNS: gl.constexpr, WARPS: gl.constexpr
):
    """Returns (keys, in which those that equal threshold are 0 behind the first max_ties; ties left for later
    blocks)."""
    if max_ties < _UNLIMITED:
        equal = (keys == threshold).to(gl.uint32)
        in_warp, warp_offset, num_equal = rank_in_warp_warp_offset_and_count(
            p_smem, equal, gl.full([], 1, gl.uint32), BLOCK_COLUMNS, WARPS
        )
        keys = gl.where((equal > 0) & (in_warp >= max_ties - warp_offset), 0, keys)
        max_ties = gl.maximum(max_ties - num_equal, 0)
    return keys, max_ties


@gluon.jit
def columns_of_keys(source, i, columns_offset, mask):
    """Returns the columns of the keys at positions i of a source."""
    if source.p_row.dtype.element_ty == gl.int32:
        return gl.load(source.p_row + columns_offset + i, mask=mask, other=0)
    else:
        return i


@gluon.jit
def fill(p, begin, end, value, WARPS: gl.constexpr):
    o = gl.arange(0, _FILL, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    for i in range(begin, end, _FILL):
        gl.store(p + i + o, value, mask=i + o < end)


@gluon.jit(
    do_not_specialize=[
        "B", "first_row", "width", "keep_first", "keep_last", "columns_offset", "num_splits", "stride_st", "stride_sh",
        "candidates_offset",
    ]
)  # fmt: skip
def index_candidates_kernel(
    SOURCE, STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, CANDIDATES, B, first_row, width, k, keep_first,
    keep_last,
    stride_st, stride_sh, columns_offset, first_round_max_per_split, max_per_split, num_splits, candidates_offset,
    HEADS: gl.constexpr, COLUMNS_PER_SPLIT: gl.constexpr, WARPS: gl.constexpr, NUM_PREVIOUS_ROUNDS: gl.constexpr,
    KEYS_PER_COLUMN: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Stores the candidates of one split of one row of one head: `max_per_split` keys, 0 behind the last, and their
    columns."""
    gdc_launch_dependents()
    i_line, i_split = gl.program_id(0) // num_splits, gl.program_id(0) % num_splits
    i_row, line = i_line // HEADS, (i_line % HEADS).to(gl.int64)
    p_smem = allocate_smem_and_clear_bins(WARPS)
    gdc_wait()
    t = first_row + i_row
    i_request = 0 if VISIBLE is not None else request_of_row(CU_SEQLENS_Q, B, t, WARPS, cfg)
    visible, _group, _is_open, start = num_visible_open_group_is_open_first_column(
        STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, B, i_request, t, width, KEYS_PER_COLUMN, cfg
    )
    num = num_candidates_after_rounds(visible, k, first_round_max_per_split, COLUMNS_PER_SPLIT, NUM_PREVIOUS_ROUNDS)
    p_row = SOURCE + i_row.to(gl.int64) * stride_st + line * stride_sh + (start if NUM_PREVIOUS_ROUNDS == 0 else 0)
    source = Source(p_row, num, keep_first, keep_last)
    begin = i_split * COLUMNS_PER_SPLIT
    if begin < source.num:
        i = begin + column_offsets_by_warp_step_lane(COLUMNS_PER_SPLIT, WARPS)
        keys = load_topk_keys_kept_first_nan_last(source, i)
        found = find_topk_threshold_ties_and_count(
            p_smem, source, keys, k, max_per_split, COLUMNS_PER_SPLIT, True, WARPS
        )
        kept_keys, _ties = zero_surplus_ties_and_count_ties_left(
            p_smem, keys, found.key, found.max_ties, COLUMNS_PER_SPLIT, WARPS
        )
        rank, warp_offset, _count = rank_in_warp_warp_offset_and_count(
            p_smem, kept_keys, found.key, COLUMNS_PER_SPLIT, WARPS
        )
        m_selected = kept_keys >= found.key
        column = columns_of_keys(source, i, columns_offset, m_selected)
        p_out = CANDIDATES + (i_line.to(gl.int64) * num_splits + i_split) * max_per_split
        gl.store((p_out + warp_offset) + rank, keys.to(gl.int32, bitcast=True), mask=m_selected)
        gl.store((p_out + candidates_offset + warp_offset) + rank, column, mask=m_selected)
        fill(p_out, found.num_selected, max_per_split, 0, WARPS)


@gluon.jit(
    do_not_specialize=["B", "first_row", "width", "keep_first", "keep_last", "columns_offset", "stride_st", "stride_sh"]
)
def index_topk_kernel(
    SOURCE, STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, OUT, LENS, B, first_row, width, k, keep_first,
    keep_last,
    stride_st, stride_sh, columns_offset, first_round_max_per_split, stride_ot, stride_oh, stride_lt, stride_lh,
    HEADS: gl.constexpr, COLUMNS_OUT: gl.constexpr, BLOCK_COLUMNS: gl.constexpr, ONE_BLOCK: gl.constexpr,
    WARPS: gl.constexpr, COLUMNS_PER_SPLIT: gl.constexpr, NUM_PREVIOUS_ROUNDS: gl.constexpr, HAS_GROUP: gl.constexpr,
    KEYS_PER_COLUMN: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Stores the columns of the k largest scores of one row of one head, then its open group, and −1 behind them; and
    how many they are."""
    i_row, line = gl.program_id(0) // HEADS, (gl.program_id(0) % HEADS).to(gl.int64)
    t = first_row + i_row
    p_smem = allocate_smem_and_clear_bins(WARPS)
    gdc_wait()
    i_request = 0 if VISIBLE is not None else request_of_row(CU_SEQLENS_Q, B, t, WARPS, cfg)
    visible, group, is_open, start = num_visible_open_group_is_open_first_column(
        STARTS, VISIBLE, OPEN_GROUP, SEQ_LENS, CU_SEQLENS_Q, B, i_request, t, width, KEYS_PER_COLUMN, cfg
    )
    num = num_candidates_after_rounds(visible, k, first_round_max_per_split, COLUMNS_PER_SPLIT, NUM_PREVIOUS_ROUNDS)
    p_row = SOURCE + i_row.to(gl.int64) * stride_st + line * stride_sh + (start if NUM_PREVIOUS_ROUNDS == 0 else 0)
    source = Source(p_row, num, keep_first, keep_last)
    p_out = OUT + t.to(gl.int64) * stride_ot + line * stride_oh
    i = column_offsets_by_warp_step_lane(BLOCK_COLUMNS, WARPS)
    keys = load_topk_keys_kept_first_nan_last(source, i)
    found = find_topk_threshold_ties_and_count(p_smem, source, keys, k, k, BLOCK_COLUMNS, ONE_BLOCK, WARPS)
    keys, ties = zero_surplus_ties_and_count_ties_left(p_smem, keys, found.key, found.max_ties, BLOCK_COLUMNS, WARPS)
    rank, warp_offset, count = rank_in_warp_warp_offset_and_count(p_smem, keys, found.key, BLOCK_COLUMNS, WARPS)
    m_selected = keys >= found.key
    gl.store((p_out + warp_offset) + rank, columns_of_keys(source, i, columns_offset, m_selected), mask=m_selected)
    if not ONE_BLOCK:
        for begin in range(BLOCK_COLUMNS, source.num, BLOCK_COLUMNS):
            i = begin + column_offsets_by_warp_step_lane(BLOCK_COLUMNS, WARPS)
            keys, ties = zero_surplus_ties_and_count_ties_left(
                p_smem, load_topk_keys_kept_first_nan_last(source, i), found.key, ties, BLOCK_COLUMNS, WARPS
            )
            rank, warp_offset, num_selected = rank_in_warp_warp_offset_and_count(
                p_smem, keys, found.key, BLOCK_COLUMNS, WARPS
            )
            m_selected = keys >= found.key
            column = columns_of_keys(source, i, columns_offset, m_selected)
            gl.store((p_out + count + warp_offset) + rank, column, mask=m_selected)
            count += num_selected
    count = found.num_selected
    if HAS_GROUP:
        gl.store(p_out + count, group.to(gl.int32), mask=is_open)
        count += gl.where(is_open, 1, 0)
    if LENS is not None:
        gl.store(LENS + t.to(gl.int64) * stride_lt + line * stride_lh, count)
    fill(p_out, count, COLUMNS_OUT, -1, WARPS)


# The host.

_KEYS_PER_THREAD = 16
_OPTIONS: dict[str, Any] = {"launch_pdl": True, "maxnreg": 64}  # with 1024 threads a program fills an SM


def hopper_kernels() -> Kernels:
    """Returns the kernels here."""
    return Kernels(index_candidates_kernel, index_topk_kernel, _num_warps, constants={}, options=_OPTIONS)


def _num_warps(columns: int) -> int:
    """Returns the warps of a program that holds so many columns."""
    return max(columns // (_KEYS_PER_THREAD * 32), 4)
