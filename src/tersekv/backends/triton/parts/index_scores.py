"""Scores of an indexer: which keys each row sees, the products, and the launch of the kernel that two operations share.

A program has up to ROWS consecutive rows and a range of columns; a column is BLOCK keys. It goes through its columns
GROUPS at a time: BLOCK_N keys that lie in GROUP slots a column, in SUBS steps where a column has more keys than that.
Rows of several requests in one program are handled request by request.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl

from ....formats import INDEX_BLOCK, index_format
from ...host import launch
from ...host.bind import BYTES, KernelLaunch, TensorArg, tensor_args
from ...host.kernel_config import KernelConfig
from .dequant import e4m3_bytes_to_fp16

MAX_COLUMNS = 128  # of a product: rows × heads
BLOCK_N = 128  # keys of a product


@dataclass(frozen=True)
class ScoreConfig(KernelConfig):
    """Compile-time configuration of the kernel."""

    H: int
    HEADS: int  # heads of a product, a power of two
    HEAD_BLOCKS: int
    ROWS: int  # rows of a program
    D: int
    BLOCK_D: int  # columns of a product
    D_BLOCKS: int
    PAGE: int
    BLOCK: int  # keys of a column of the scores
    GROUP: int  # slots for them
    GROUPS: int
    SUBS: int
    BLOCK_N: int
    STEPS: int  # groups of columns of a program
    DOT: str  # what is multiplied: "e4m3", "bf16", "fp16"
    K_AS_BYTES: bool
    Q_AS_BYTES: bool
    HAS_SCALES: bool
    RELU: bool
    EACH: bool
    RATIO: int
    ONE_PAGE: bool  # a block of keys lies in one page
    VARLEN_Q: bool
    Q_LEN: int
    BLOCK_B: int


@triton.jit
def request_of_row_else_minus_1_or_B(CU_SEQLENS_Q, B, i_row, cfg: tl.constexpr):
    """Returns the request of row i_row, B if it lies behind all, −1 if before."""
    if cfg.VARLEN_Q:
        num_ended = -(i_row < tl.load(CU_SEQLENS_Q).to(tl.int64)).to(tl.int32)
        for i in range(0, B, cfg.BLOCK_B):
            o_b = i + tl.arange(0, cfg.BLOCK_B)
            end = tl.load(CU_SEQLENS_Q + o_b + 1, mask=o_b < B, other=0).to(tl.int64)
            num_ended += tl.sum(((o_b < B) & (end <= i_row)).to(tl.int32))
        return num_ended
    else:
        return i_row // cfg.Q_LEN


@triton.jit
def positions_of_request_rows_else_minus_1(SEQ_LENS, CU_SEQLENS_Q, B, i_request, rows, cfg: tl.constexpr):
    """Returns positions int64 of rows where they are of request i_request, else −1."""
    valid = (i_request >= 0) & (i_request < B)
    seq_len = tl.load(SEQ_LENS + i_request, mask=valid, other=0).to(tl.int64)
    if cfg.VARLEN_Q:
        begin = tl.load(CU_SEQLENS_Q + i_request, mask=valid, other=0).to(tl.int64)
        end = tl.load(CU_SEQLENS_Q + i_request + 1, mask=valid, other=0).to(tl.int64)
    else:
        begin = i_request.to(tl.int64) * cfg.Q_LEN
        end = begin + cfg.Q_LEN
    in_request = valid & (rows >= begin) & (rows < end)
    return tl.where(in_request, tl.maximum(seq_len - (end - rows), -1), -1)


@triton.jit
def load_tile_as_mma_dtype(p, mask, DECODE_E4M3_BYTES: tl.constexpr, cfg: tl.constexpr):
    """Loads a tile as it is multiplied, 0 outside the mask; every code is exact in it."""
    if DECODE_E4M3_BYTES:
        x = e4m3_bytes_to_fp16(tl.load(p, mask=mask, other=0))
    else:
        x = tl.load(p, mask=mask, other=0.0)
    if cfg.DOT == "e4m3":
        return x
    elif cfg.DOT == "fp16":
        return x.to(tl.float16)
    else:
        tl.static_assert(cfg.DOT == "bf16", "a type that is not multiplied")
        return x.to(tl.bfloat16)


@triton.jit
def load_query_block(Q, o_rows, head_block, d_block, m_rows, stride_qh, cfg: tl.constexpr):
    """Loads [ROWS * HEADS, BLOCK_D] of queries; heads and columns past the last are 0. o_rows: offsets [ROWS]."""
    h = head_block * cfg.HEADS + tl.arange(0, cfg.HEADS)
    d = d_block * cfg.BLOCK_D + tl.arange(0, cfg.BLOCK_D)
    mask = m_rows[:, None] & (h < cfg.H)[None, :]
    o = o_rows[:, None] + (h.to(tl.int64) * stride_qh)[None, :]
    o = tl.reshape(o, [cfg.ROWS * cfg.HEADS])
    mask = tl.reshape(mask, [cfg.ROWS * cfg.HEADS])
    p_q = Q + o[:, None] + d[None, :]
    return load_tile_as_mma_dtype(p_q, mask[:, None] & (d < cfg.D)[None, :], cfg.Q_AS_BYTES, cfg)


@triton.jit
def load_query_by_d_blocks(Q, o_rows, head_block, m_rows, stride_qh, cfg: tl.constexpr):
    """Loads a tile for each block of columns."""
    first = load_query_block(Q, o_rows, head_block, 0, m_rows, stride_qh, cfg)
    if cfg.D_BLOCKS == 1:
        return (first,)
    else:
        return (first, load_query_block(Q, o_rows, head_block, 1, m_rows, stride_qh, cfg))


@triton.jit
def load_key_block(K, o_keys, m_keys, d_block, cfg: tl.constexpr):
    """Loads [BLOCK_N, BLOCK_D] of keys; columns past the last are 0."""
    d = d_block * cfg.BLOCK_D + tl.arange(0, cfg.BLOCK_D)
    if cfg.D == cfg.BLOCK_D * cfg.D_BLOCKS:
        mask = m_keys[:, None]
    else:
        mask = m_keys[:, None] & (d < cfg.D)[None, :]
    return load_tile_as_mma_dtype(K + o_keys[:, None] + d[None, :], mask, cfg.K_AS_BYTES, cfg)


@triton.jit
def load_head_weights(WEIGHTS, o_rows, head_block, m_rows, stride_wh, cfg: tl.constexpr):
    """Loads the weights [1, ROWS * HEADS] of heads, 0 past the last."""
    h = head_block * cfg.HEADS + tl.arange(0, cfg.HEADS)
    mask = m_rows[:, None] & (h < cfg.H)[None, :]
    if WEIGHTS is None:
        w = tl.where(mask, 1.0, 0.0)
    else:
        w = tl.load(WEIGHTS + o_rows[:, None] + (h.to(tl.int64) * stride_wh)[None, :], mask=mask, other=0.0)
    return tl.reshape(w, [1, cfg.ROWS * cfg.HEADS])


@triton.jit
def compute_qk_scaled_if_several_d_blocks(K, SCALES, o_keys, o_scales, m_keys, q, cfg: tl.constexpr):
    """Returns q · k [BLOCK_N, ROWS * HEADS] fp32; of several blocks of columns each times its scale."""
    acc = tl.dot(load_key_block(K, o_keys, m_keys, 0, cfg), tl.trans(q[0]))
    if cfg.D_BLOCKS == 1:
        return acc
    else:
        tl.static_assert(cfg.D_BLOCKS == 2, "keys of more columns than an indexer has")
        k = load_key_block(K, o_keys, m_keys, 1, cfg)
        if cfg.HAS_SCALES:
            first = tl.load(SCALES + o_scales, mask=m_keys, other=0.0)
            second = tl.load(SCALES + o_scales + 1, mask=m_keys, other=0.0)
            return acc * first[:, None] + tl.dot(k, tl.trans(q[1])) * second[:, None]
        else:
            return tl.dot(k, tl.trans(q[1]), acc)


@triton.jit
def per_head_relu_qk_times_weight(qk, w, cfg: tl.constexpr):
    """Returns products after ReLU, times the weights of heads."""
    if cfg.RELU:
        qk = tl.where(qk < 0, 0.0, qk)  # a NaN stays
    return qk * w


@triton.jit
def sum_heads(x, cfg: tl.constexpr):
    """[BLOCK_N, ROWS * HEADS] → [BLOCK_N, ROWS]."""
    return tl.sum(tl.reshape(x, [cfg.BLOCK_N, cfg.ROWS, cfg.HEADS]), 2)


@triton.jit
def update_column_max_ignoring_nan(column_max, any_number, any_nan, s, m_visible, cfg: tl.constexpr):
    """Returns the largest number of each column so far [GROUPS, C], and whether it has had a number, and a NaN."""
    C: tl.constexpr = s.shape[1]
    is_number = m_visible & (s == s)
    numbers = tl.reshape(tl.where(is_number, s, float("-inf")), [cfg.GROUPS, cfg.GROUP, C])
    found = tl.reshape(is_number.to(tl.int32), [cfg.GROUPS, cfg.GROUP, C])
    nans = tl.reshape((m_visible & (s != s)).to(tl.int32), [cfg.GROUPS, cfg.GROUP, C])
    return (
        tl.maximum(column_max, tl.max(numbers, 1)),
        tl.maximum(any_number, tl.max(found, 1)),
        tl.maximum(any_nan, tl.max(nans, 1)),
    )


@triton.jit(do_not_specialize=["B", "first_row", "end_row", "width"])
def index_block_max_scores_kernel(
    Q, WEIGHTS, K, SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, STARTS, ENDS, OUT, scale, B, first_row, end_row, width,
    max_keys,
    stride_qt, stride_qh, stride_wt, stride_wh, stride_kp, stride_ks, stride_sp, stride_ss, stride_table, stride_ot,
    stride_oh,
    cfg: tl.constexpr,
):  # fmt: skip
    """Stores the largest score of each column of rows [first_row, end_row), row first_row to the first row of OUT.

    STARTS, ENDS: the keys visible to each row, instead of those up to its position
    """
    # Tile scheduler: rows, the requests that they may belong to, columns
    first = first_row + tl.program_id(1) * cfg.ROWS
    rows = (first + tl.arange(0, cfg.ROWS)).to(tl.int64)
    last = tl.minimum(first + cfg.ROWS, end_row) - 1
    b_first = tl.maximum(request_of_row_else_minus_1_or_B(CU_SEQLENS_Q, B, first, cfg), 0)
    b_last = b_first
    if cfg.ROWS > 1:
        b_last = request_of_row_else_minus_1_or_B(CU_SEQLENS_Q, B, last, cfg)
    column_begin = tl.program_id(0) * (cfg.STEPS * cfg.GROUPS)
    column_end = tl.minimum(column_begin + cfg.STEPS * cfg.GROUPS, width)
    for i in range(b_first, tl.maximum(b_last, b_first) + 1):
        b = tl.cast(i, tl.int32)
        # Keys [first_keys, end_keys) are those that a row sees
        position = positions_of_request_rows_else_minus_1(SEQ_LENS, CU_SEQLENS_Q, B, b, rows, cfg)
        end_keys = tl.minimum((position + 1) // cfg.RATIO, max_keys).to(tl.int32)
        if ENDS is not None:
            end_keys = load_start_or_end_key_of_rows(ENDS, rows, end_row, max_keys)
        first_keys = end_keys * 0
        if STARTS is not None:
            first_keys = load_start_or_end_key_of_rows(STARTS, rows, end_row, max_keys)
        # Rows of no request are written with the first.
        if cfg.VARLEN_Q:
            begin = tl.load(CU_SEQLENS_Q + b, mask=b < B, other=0).to(tl.int64)
            end = tl.load(CU_SEQLENS_Q + b + 1, mask=b < B, other=0).to(tl.int64)
            m_rows = ((rows >= begin) & (rows < end)) | (b >= B) | ((b == b_first) & (rows < begin))
            m_rows = m_rows | ((b == b_last) & (rows >= end))
        else:
            m_rows = rows // cfg.Q_LEN == b
        m_rows = m_rows & (rows < end_row)
        _store_block_max_scores_of_request(
            Q, WEIGHTS, K, SCALES, PAGE_TABLE + tl.minimum(b, B - 1).to(tl.int64) * stride_table, OUT, scale, rows,
            rows - first_row, m_rows, first_keys, end_keys, STARTS is not None, column_begin, column_end, stride_qt,
            stride_qh, stride_wt, stride_wh, stride_kp, stride_ks, stride_sp, stride_ss, stride_ot, stride_oh, cfg,
        )  # fmt: skip


@triton.jit
def load_start_or_end_key_of_rows(STARTS_OR_ENDS, rows, end_row, max_keys):
    """Loads the first keys of rows, or where their keys end, in [0, max_keys]."""
    x = tl.load(STARTS_OR_ENDS + rows, mask=rows < end_row, other=0).to(tl.int64)
    return tl.minimum(tl.maximum(x, 0), max_keys).to(tl.int32)


@triton.jit
def _store_block_max_scores_of_request(
    Q, WEIGHTS, K, SCALES, PAGE_IDS, OUT, scale, rows, out_rows, m_rows, first_keys, end_keys, HAS_STARTS: tl.constexpr,
    column_begin, column_end, stride_qt, stride_qh, stride_wt, stride_wh, stride_kp, stride_ks, stride_sp, stride_ss,
    stride_ot, stride_oh, cfg: tl.constexpr,
):  # fmt: skip
    """Largest scores of the rows m_rows, of one request, of the columns [column_begin, column_end)."""
    C: tl.constexpr = cfg.ROWS * cfg.HEADS if cfg.EACH else cfg.ROWS
    o_q, o_w = rows * stride_qt, rows * stride_wt
    m_visible_rows = m_rows & (end_keys > 0)
    num_visible = tl.max(tl.where(m_rows, end_keys, 0))
    visible_end = tl.minimum(tl.cdiv(num_visible, cfg.BLOCK), column_end)
    visible_begin = column_begin
    if HAS_STARTS:
        skipped = tl.min(tl.where(m_rows, first_keys, 2147483647)) // cfg.BLOCK - column_begin
        skipped = tl.minimum(tl.maximum(skipped, 0), column_end - column_begin)
        visible_begin += skipped // cfg.GROUPS * cfg.GROUPS
    o_n = tl.arange(0, cfg.BLOCK_N)
    for head_block in range(cfg.HEAD_BLOCKS if cfg.EACH else 1):
        if cfg.EACH:
            o_h = head_block * cfg.HEADS + tl.arange(0, cfg.HEADS)
            o_out = tl.reshape((out_rows * stride_ot)[:, None] + (o_h.to(tl.int64) * stride_oh)[None, :], [1, C])
            m_out = tl.reshape(m_rows[:, None] & (o_h < cfg.H)[None, :], [1, C])
            limit = tl.reshape(tl.broadcast_to(end_keys[:, None], [cfg.ROWS, cfg.HEADS]), [1, C])
            lowest = tl.reshape(tl.broadcast_to(first_keys[:, None], [cfg.ROWS, cfg.HEADS]), [1, C])
        else:
            o_out, m_out, limit = (out_rows * stride_ot)[None, :], m_rows[None, :], end_keys[None, :]
            lowest = first_keys[None, :]
        if cfg.EACH or cfg.HEAD_BLOCKS == 1:
            q = load_query_by_d_blocks(Q, o_q, head_block, m_visible_rows, stride_qh, cfg)
            w = load_head_weights(WEIGHTS, o_w, head_block, m_visible_rows, stride_wh, cfg)
        for column in range(visible_begin, visible_end, cfg.GROUPS):
            o_column = column + tl.arange(0, cfg.GROUPS)
            column_max = tl.full([cfg.GROUPS, C], float("-inf"), tl.float32)
            if cfg.GROUP > 1 or cfg.SUBS > 1:
                any_number = tl.full([cfg.GROUPS, C], 0, tl.int32)
                any_nan = tl.full([cfg.GROUPS, C], 0, tl.int32)
            for sub in range(cfg.SUBS):
                # Page lookup
                slot = sub * cfg.GROUP + o_n % cfg.GROUP
                key = (column + o_n // cfg.GROUP) * cfg.BLOCK + slot
                m_keys = (slot < cfg.BLOCK) & (key < num_visible)
                if cfg.ONE_PAGE:
                    page = tl.load(PAGE_IDS + column // cfg.PAGE).to(tl.int64)
                    entry = column % cfg.PAGE + o_n
                else:
                    page = tl.load(PAGE_IDS + key // cfg.PAGE, mask=m_keys, other=0).to(tl.int64)
                    entry = key % cfg.PAGE
                o_keys = page * stride_kp + entry.to(tl.int64) * stride_ks
                o_scales = page * stride_sp + entry.to(tl.int64) * stride_ss
                # QK, ReLU, weights and sum of the heads; the scale of keys with one scale
                if cfg.EACH or cfg.HEAD_BLOCKS == 1:
                    qk = compute_qk_scaled_if_several_d_blocks(K, SCALES, o_keys, o_scales, m_keys, q, cfg)
                    s = per_head_relu_qk_times_weight(qk, w, cfg)
                    if not cfg.EACH:
                        s = sum_heads(s, cfg)
                else:
                    s = tl.full([cfg.BLOCK_N, C], 0.0, tl.float32)
                    for i in range(cfg.HEAD_BLOCKS):
                        q_i = load_query_by_d_blocks(Q, o_q, i, m_visible_rows, stride_qh, cfg)
                        w_i = load_head_weights(WEIGHTS, o_w, i, m_visible_rows, stride_wh, cfg)
                        qk_i = compute_qk_scaled_if_several_d_blocks(K, SCALES, o_keys, o_scales, m_keys, q_i, cfg)
                        s += sum_heads(per_head_relu_qk_times_weight(qk_i, w_i, cfg), cfg)
                if cfg.HAS_SCALES and cfg.D_BLOCKS == 1:
                    s = s * tl.load(SCALES + o_scales, mask=m_keys, other=0.0)[:, None]
                s = s * scale
                # Mask, and the largest score of a column
                m_visible = m_keys[:, None] & (key[:, None] < limit)
                if HAS_STARTS:
                    m_visible = m_visible & (key[:, None] >= lowest)
                if cfg.GROUP > 1 or cfg.SUBS > 1:
                    column_max, any_number, any_nan = update_column_max_ignoring_nan(
                        column_max, any_number, any_nan, s, m_visible, cfg
                    )
                else:
                    column_max = tl.where(m_visible, s, float("-inf"))
            if cfg.GROUP > 1 or cfg.SUBS > 1:
                column_max = tl.where((any_number == 0) & (any_nan > 0), float("nan"), column_max)
            tl.store(OUT + o_out + o_column[:, None], column_max, mask=m_out & (o_column < column_end)[:, None])
        # What no row sees.
        if HAS_STARTS:
            _store_minus_inf_scores(OUT, o_out, m_out, column_begin, visible_begin, cfg)
        done = visible_begin + tl.cdiv(tl.maximum(visible_end - visible_begin, 0), cfg.GROUPS) * cfg.GROUPS
        _store_minus_inf_scores(OUT, o_out, m_out, done, column_end, cfg)


@triton.jit
def _store_minus_inf_scores(OUT, o_out, m_out, column_begin, column_end, cfg: tl.constexpr):
    """Stores −inf to columns [column_begin, column_end). o_out, m_out: offsets and mask of rows [1, C]."""
    for column in range(column_begin, column_end, cfg.GROUPS):
        o_column = column + tl.arange(0, cfg.GROUPS)
        nothing = tl.full([cfg.GROUPS, o_out.shape[1]], float("-inf"), tl.float32)
        tl.store(OUT + o_out + o_column[:, None], nothing, mask=m_out & (o_column < column_end)[:, None])


def why_not_scores(f: SimpleNamespace) -> str | None:
    """Returns why the kernel cannot score a call; None: it can."""
    reason = launch.why_not_format_or_device(f)
    if reason:
        return reason
    if f.page_table.shape[1] * f.k_cache.shape[1] >= 2**31 - BLOCK_N * f.block:
        return "wants fewer than 2^31 keys in the page table"
    return None


def request_search_constants(f: SimpleNamespace) -> dict[str, Any]:
    """Returns what finds the request of a row."""
    return {
        "RATIO": f.ratio, "VARLEN_Q": f.cu_seqlens_q is not None, "Q_LEN": 1 if f.cu_seqlens_q else max(f.max_q_len, 1),
        "BLOCK_B": min(1024, launch.next_power_of_2(max(f.seq_lens.shape[0], 1))),
    }  # fmt: skip


def request_search_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns the arguments by which a row finds its request and position."""
    tensors = tensor_args(SEQ_LENS="seq_lens", CU_SEQLENS_Q="cu_seqlens_q")
    return tensors | {"B": f.seq_lens.shape[0]}


def index_score_config(f: SimpleNamespace, num_rows: int, width: int) -> ScoreConfig:
    heads, d = f.q.shape[1], f.q.shape[2]
    h_pad = min(max(launch.next_power_of_2(heads), 16), MAX_COLUMNS if f.each or heads > 64 else 64)
    t, b = f.q.shape[0], max(f.seq_lens.shape[0], 1)
    block_d = min(max(launch.next_power_of_2(d), 32), INDEX_BLOCK)
    # Rows of one request share their keys; of short ones, few rows.
    rows = max(1, min(MAX_COLUMNS // h_pad, launch.next_power_of_2(max(t // b, 1))))
    if h_pad < heads:
        rows = 1
    group = min(launch.next_power_of_2(f.block), BLOCK_N)
    groups = BLOCK_N // group
    row_tiles, steps = -(-num_rows // rows), -(-width // groups)
    per = _choose_steps_per_program(steps, row_tiles, 4 * launch.num_sms(f))
    by_hand, fp8 = launch.emulates_e4m3(f), torch.float8_e4m3fn
    k_fp8, q_fp8 = (x.dtype == fp8 for x in (f.k_cache, f.q))
    both = k_fp8 and q_fp8
    halves = {x.dtype for x in (f.k_cache, f.q)} - {fp8}
    dot = ("fp16" if by_hand else "e4m3") if both else "bf16" if torch.bfloat16 in halves else "fp16"
    return ScoreConfig(
        H=heads, HEADS=h_pad, HEAD_BLOCKS=-(-heads // h_pad), ROWS=rows, D=d, BLOCK_D=block_d,
        D_BLOCKS=-(-d // block_d), PAGE=f.k_cache.shape[1], BLOCK=f.block, GROUP=group, GROUPS=groups,
        SUBS=-(-f.block // group), BLOCK_N=BLOCK_N, STEPS=per, DOT=dot, K_AS_BYTES=k_fp8 and by_hand,
        Q_AS_BYTES=q_fp8 and by_hand, HAS_SCALES=index_format(f.format).scale_dtype is not None, RELU=f.relu,
        EACH=f.each, ONE_PAGE=f.block == 1 and f.k_cache.shape[1] % BLOCK_N == 0, **request_search_constants(f),
    )  # fmt: skip


def _choose_steps_per_program(steps: int, row_tiles: int, resident: int) -> int:
    """Returns how many steps of a row's keys a program takes, so that rounds of the `resident` programs are full: a
    program that starts costs about two steps."""
    return min(range(1, 17), key=lambda n: -(-(-(-steps // n) * row_tiles) // resident) * (n + 2))


def _key_bounds_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns the arguments by which rows see other keys than those up to their position; a selection has none."""
    return tensor_args(STARTS="starts", ENDS="ends") if hasattr(f, "starts") else {"STARTS": None, "ENDS": None}


def index_score_launch(
    f: SimpleNamespace, out: TensorArg, strides: tuple[int, int], rows: range, width: int
) -> KernelLaunch:
    """Returns the launch that scores some rows.

    out, strides: where the first of them goes, and strides of rows and heads there
    """
    cfg = index_score_config(f, len(rows), width)
    scales = (0, 0) if f.k_scale_cache is None else f.k_scale_cache.stride[:2]
    weights = (0, 0) if f.weights is None else f.weights.stride
    arguments = tensor_args(
        BYTES if cfg.Q_AS_BYTES else "", Q="q"
    ) | tensor_args(BYTES if cfg.K_AS_BYTES else "", K="k_cache") | tensor_args(
        WEIGHTS="weights", SCALES="k_scale_cache", PAGE_TABLE="page_table",
    ) | request_search_args(f) | _key_bounds_args(f) | {
        "OUT": out, "scale": f.scale, "first_row": rows.start, "end_row": rows.stop,
        "width": width, "max_keys": f.page_table.shape[1] * f.k_cache.shape[1],
        "stride_qt": f.q.stride[0], "stride_qh": f.q.stride[1], "stride_wt": weights[0], "stride_wh": weights[1],
        "stride_kp": f.k_cache.stride[0], "stride_ks": f.k_cache.stride[1], "stride_sp": scales[0],
        "stride_ss": scales[1], "stride_table": f.page_table.stride[0], "stride_ot": strides[0],
        "stride_oh": strides[1], "cfg": cfg,
    }  # fmt: skip
    grid = (-(-width // (cfg.GROUPS * cfg.STEPS)), -(-len(rows) // cfg.ROWS))
    return KernelLaunch(index_block_max_scores_kernel, grid, arguments, num_warps=4, num_stages=3)
