"""Prefill over lists of blocks, key blocks in the outer loop: of each block the rows that list it (k2q: from keys to
queries), so that independent lists too load and dequantize a block once for many rows.

What few rows of an m_block list is attended to here; what many list, `listed_blocks.listed_mainloop` attends to. A pair
is a token's entry; its bucket is that of the KV head, request and block:

1. `listed_blocks.count_listed_blocks_kernel`: each pair's bucket, and its rank among those of the bucket;
2. `schedule_k2q_kernel`: buckets become work tiles, of at most so many pairs;
3. `fill_k2q_kernel`: the tokens of each bucket's pairs side by side;
4. `k2q_attention_kernel`: the softmax state of each pair's rows over its block, to the workspace;
5. `combine_k2q_partials`: prefill's kernel adds them to what its rows saw, in the order of their entries.

The order in which atomics number pairs and work tiles moves no bit: a row's state depends on its row and block alone,
with or without a mask (multiply-adds are not fused where these two would round differently).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...host.kernel_config import KernelConfig
from ..parts.combine import load_device_scale_else_host_scale
from ..parts.hadamard import scale_and_rotate_query
from ..parts.page_table import load_block_or_per_key_page_ids
from .mainloop import (
    KVOperand,
    StridedRows,
    combine_two_splits,
    compute_scores,
    dequant_kv_block_except_token_scales,
    load_kv_block,
    load_query_rows,
    load_stored_scales,
    mask_and_exponentiate_scores,
    query_rows_to_fp32,
    to_16bit_query_tiles_and_score_scale,
)
from .tile_scheduler import load_q_begin

LOG2E = tl.constexpr(1.4426950408889634)
# Behind the counts of buckets: work tiles, pairs sorted, work tiles taken.
NUM_WORK_TILES, NUM_SORTED, NEXT_WORK_TILE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
COUNTERS = 4


@dataclass(frozen=True)
class K2QConfig(KernelConfig):
    LENGTH: int  # entries of a list
    GROUP_PAD: int  # rows of a pair, padded
    TOKENS: int  # that an m_block may have rows of, padded
    PARTIALS: int  # of a listed block, each over as many of its keys
    PAIRS: int  # of a work tile
    BLOCK: int  # numbers that a program of the small kernels handles


class K2Q(NamedTuple):
    """What prefill's kernel reads of k2q: pointers to how many pairs a token has, their sorted ids and states."""

    NUM_PAIRS: Any
    SORTED_IDS: Any
    STATES: Any
    ACCS: Any


@triton.jit(do_not_specialize=["num_buckets"])
def schedule_k2q_kernel(K2Q_COUNTS, K2Q_OFFSETS, K2Q_WORK_TILES, num_buckets, cfg: tl.constexpr):
    """Stores where the pairs of each bucket begin, and work tiles.

    K2Q_WORK_TILES [work tiles, 4]: bucket, partial result of its block, sorted id of the first pair, pairs
    """
    o_bucket = tl.program_id(0) * cfg.BLOCK + tl.arange(0, cfg.BLOCK)
    count = tl.load(K2Q_COUNTS + o_bucket, mask=o_bucket < num_buckets, other=0)
    num_tiles = tl.cdiv(count, cfg.PAIRS) * cfg.PARTIALS
    p_counters = K2Q_COUNTS + num_buckets
    begin = tl.atomic_add(p_counters + NUM_SORTED, tl.sum(count, 0), sem="relaxed") + tl.cumsum(count, 0) - count
    tl.store(K2Q_OFFSETS + o_bucket, begin, mask=o_bucket < num_buckets)
    first_tile = tl.atomic_add(p_counters + NUM_WORK_TILES, tl.sum(num_tiles, 0), sem="relaxed")
    p_tiles = K2Q_WORK_TILES + 4 * (first_tile + tl.cumsum(num_tiles, 0) - num_tiles)
    for i in range(0, tl.max(num_tiles, 0)):
        is_tile, first_pair = i < num_tiles, i // cfg.PARTIALS * cfg.PAIRS
        tl.store(p_tiles + 4 * i, o_bucket, mask=is_tile)
        tl.store(p_tiles + 4 * i + 1, i % cfg.PARTIALS + o_bucket * 0, mask=is_tile)
        tl.store(p_tiles + 4 * i + 2, begin + first_pair, mask=is_tile)
        tl.store(p_tiles + 4 * i + 3, tl.minimum(count - first_pair, cfg.PAIRS), mask=is_tile)


@triton.jit(do_not_specialize=["max_pairs"])
def fill_k2q_kernel(
    K2Q_OFFSETS, K2Q_BUCKETS, K2Q_SORTED_IDS, K2Q_NUM_PAIRS, K2Q_FIRST_TOKENS, K2Q_TOKENS, max_pairs, cfg: tl.constexpr
):
    """Stores the tokens of a bucket's pairs side by side.

    K2Q_SORTED_IDS [m_blocks * HEADS, TOKENS, LENGTH]: each pair's rank becomes its index in K2Q_TOKENS [max_pairs]
    """
    i_pair = tl.program_id(0) * cfg.BLOCK + tl.arange(0, cfg.BLOCK)
    i_token, i_program = i_pair // cfg.LENGTH, i_pair // (cfg.LENGTH * cfg.TOKENS)
    in_range = i_pair < max_pairs
    is_pair = in_range & (i_pair % cfg.LENGTH < tl.load(K2Q_NUM_PAIRS + i_token, mask=in_range, other=0))
    bucket = tl.load(K2Q_BUCKETS + i_pair, mask=is_pair, other=0)
    sorted_id = tl.load(K2Q_OFFSETS + bucket, mask=is_pair, other=0) + tl.load(
        K2Q_SORTED_IDS + i_pair, mask=is_pair, other=0
    )
    token = tl.load(K2Q_FIRST_TOKENS + i_program, mask=is_pair, other=0) + i_token % cfg.TOKENS
    tl.store(K2Q_TOKENS + sorted_id, token, mask=is_pair)
    tl.store(K2Q_SORTED_IDS + i_pair, sorted_id, mask=is_pair)


@triton.jit(do_not_specialize=["PAGE_TABLE", "SEQ_LENS", "CU_SEQLENS_Q", "B", "num_blocks", "num_buckets", "max_pairs"])
def k2q_attention_kernel(
    Q, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, K_SIGNS, K_CHANNEL_SCALES, softmax_scale,
    SOFTMAX_SCALE, k_scale, K_SCALE, softcap, B, stride_q_t, stride_q_h, stride_k_p, stride_k_s, stride_k_h, stride_v_p,
    stride_v_s, stride_v_h, stride_k_scales_p, stride_k_scales_s, stride_k_scales_h, stride_v_scales_p,
    stride_v_scales_s, stride_v_scales_h, stride_k_channel_scales_h, stride_table_b, K2Q_COUNTS, K2Q_OFFSETS,
    K2Q_WORK_TILES, K2Q_TOKENS, K2Q_STATES, K2Q_ACCS, num_blocks, num_buckets, max_pairs, cfg: tl.constexpr,
    k2q: tl.constexpr,
):  # fmt: skip
    """Attends the rows of a work tile's pairs to BLOCK_N keys of their block; a persistent program takes the next work
    tile from a counter.

    K2Q_STATES [PARTIALS, max_pairs, GROUP_PAD, 2], K2Q_ACCS […, PACK * BLOCK_DV] fp16: what `combine_k2q_partials`
    reads
    """
    K_FORMAT: tl.constexpr = cfg.K
    keys_source = KVOperand(
        StridedRows(K, stride_k_p, stride_k_s, stride_k_h),
        StridedRows(K_SCALES, stride_k_scales_p, stride_k_scales_s, stride_k_scales_h),
    )
    values_source = KVOperand(
        StridedRows(V, stride_v_p, stride_v_s, stride_v_h),
        StridedRows(V_SCALES, stride_v_scales_p, stride_v_scales_s, stride_v_scales_h),
    )
    rotation = (K_SIGNS, K_CHANNEL_SCALES, stride_k_channel_scales_h)
    score_scale = load_device_scale_else_host_scale(softmax_scale, SOFTMAX_SCALE, 0, cfg.HAS_SOFTMAX_SCALE) * LOG2E
    p_counters = K2Q_COUNTS + num_buckets
    num_work_tiles = tl.load(p_counters + NUM_WORK_TILES)
    i_work_tile = tl.atomic_add(p_counters + NEXT_WORK_TILE, 1, sem="relaxed")
    bucket, i_partial, sorted_id, num_pairs = load_work_tile(K2Q_WORK_TILES, i_work_tile, num_work_tiles)
    while i_work_tile < num_work_tiles:
        i_work_tile = tl.atomic_add(p_counters + NEXT_WORK_TILE, 1, sem="relaxed")
        # Tile scheduler: the KV head, request and keys of this work tile
        h, i_request = bucket // num_blocks // B, bucket // num_blocks % B
        n_block = bucket % num_blocks * k2q.PARTIALS + i_partial
        q_begin = load_q_begin(CU_SEQLENS_Q, i_request, True).to(tl.int32)
        q_end = load_q_begin(CU_SEQLENS_Q, i_request + 1, True).to(tl.int32)
        num_keys = tl.load(SEQ_LENS + i_request).to(tl.int32)
        position_of_token_0, p_tokens = num_keys - q_end, K2Q_TOKENS + sorted_id
        # Keys up to the last that a pair sees; if all pairs see all of them, nothing is masked.
        last_key, key_end = (n_block + 1) * cfg.BLOCK_N - 1, num_keys
        is_masked = position_of_token_0 + q_begin < last_key
        if is_masked:
            o_pair = tl.arange(0, k2q.PAIRS)
            tokens = tl.load(p_tokens + o_pair, mask=o_pair < num_pairs, other=-1)
            key_end = tl.minimum(position_of_token_0 + tl.max(tokens, 0) + 1, num_keys)
            first_token = tl.min(tl.where(o_pair < num_pairs, tokens, q_end), 0)
            is_masked = position_of_token_0 + first_token < last_key
        # Keys and values, dequantized once for all pairs
        o_n = n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
        valid = o_n < key_end
        p_page_ids = PAGE_TABLE + i_request.to(tl.int64) * stride_table_b
        page_ids = load_block_or_per_key_page_ids(p_page_ids, n_block, num_keys, cfg)
        keys, k_scales = load_and_dequant_kv_block(
            keys_source, page_ids, n_block, valid, h, cfg.BLOCK_D, cfg.PACKED_K, K_FORMAT, cfg
        )
        values, v_scales = load_and_dequant_kv_block(
            values_source, page_ids, n_block, valid, h, cfg.BLOCK_DV, cfg.PACKED_V, cfg, cfg
        )
        scale = score_scale * load_device_scale_else_host_scale(
            k_scale, K_SCALE, h * cfg.K_SCALE_STRIDE, cfg.HAS_K_SCALE
        )
        p_q = Q + h.to(tl.int64) * cfg.GROUP * stride_q_h
        i_row = (i_partial.to(tl.int64) * max_pairs + sorted_id) * k2q.GROUP_PAD
        p_states, p_accs = K2Q_STATES + 2 * i_row, K2Q_ACCS + i_row * (cfg.PACK * cfg.BLOCK_DV)
        of_pairs = num_pairs
        bucket, i_partial, sorted_id, num_pairs = load_work_tile(K2Q_WORK_TILES, i_work_tile, num_work_tiles)
        if not is_masked:
            attend_pairs(
                p_q, keys, values, k_scales, v_scales, o_n, valid, p_tokens, of_pairs, position_of_token_0, stride_q_t,
                stride_q_h, rotation, h, scale, softcap, p_states, p_accs, False, cfg, k2q,
            )  # fmt: skip
        else:
            attend_pairs(
                p_q, keys, values, k_scales, v_scales, o_n, valid, p_tokens, of_pairs, position_of_token_0, stride_q_t,
                stride_q_h, rotation, h, scale, softcap, p_states, p_accs, True, cfg, k2q,
            )  # fmt: skip


@triton.jit
def load_work_tile(K2Q_WORK_TILES, i_work_tile, num_work_tiles):
    """Returns bucket, partial result, sorted id of the first pair and pairs of a work tile; 0 past the last."""
    p_tile, is_tile = K2Q_WORK_TILES + 4 * i_work_tile, i_work_tile < num_work_tiles
    bucket, i_partial = tl.load(p_tile, mask=is_tile, other=0), tl.load(p_tile + 1, mask=is_tile, other=0)
    return bucket, i_partial, tl.load(p_tile + 2, mask=is_tile, other=0), tl.load(p_tile + 3, mask=is_tile, other=0)


@triton.jit
def attend_pairs(
    p_q, keys, values, k_scales, v_scales, o_n, valid, p_tokens, num_pairs, position_of_token_0, stride_q_t, stride_q_h,
    rotation, h, scale, softcap, p_states, p_accs, MASKED: tl.constexpr, cfg: tl.constexpr, k2q: tl.constexpr,
):  # fmt: skip
    """Stores the states of pairs over a tile of keys, side by side. MASKED: some see only a part of it."""
    PAIRS: tl.constexpr = cfg.BLOCK_M // k2q.GROUP_PAD  # at a time
    o_r = tl.arange(0, cfg.BLOCK_M)
    o_pair, head_in_group = o_r // k2q.GROUP_PAD, o_r % k2q.GROUP_PAD
    is_head = head_in_group < cfg.GROUP
    # Queries are loaded one iteration ahead, and their tokens two, so that no product waits for loads.
    token = tl.load(p_tokens + o_pair, mask=o_pair < num_pairs, other=0)
    next_token = tl.load(p_tokens + PAIRS + o_pair, mask=PAIRS + o_pair < num_pairs, other=0)
    m_row = (o_pair < num_pairs) & is_head
    x = load_query_rows(p_q, token.to(tl.int64), head_in_group.to(tl.int64), m_row, stride_q_t, stride_q_h, cfg)
    for i_pair in tl.range(0, num_pairs, PAIRS, num_stages=1):
        m_row, next_m_row = (i_pair + o_pair < num_pairs) & is_head, (i_pair + PAIRS + o_pair < num_pairs) & is_head
        next_x = load_query_rows(
            p_q, next_token.to(tl.int64), head_in_group.to(tl.int64), next_m_row, stride_q_t, stride_q_h, cfg
        )
        o_after_next = i_pair + 2 * PAIRS + o_pair
        token_after_next = tl.load(p_tokens + o_after_next, mask=o_after_next < num_pairs, other=0)
        q, row_scale = to_16bit_query_tiles_and_score_scale(
            scale_and_rotate_query((query_rows_to_fp32(x, cfg),), rotation, h, 1, cfg.D)[0], cfg
        )
        s = compute_scores(q, keys, row_scale * scale, k_scales, softcap, False, cfg)
        p, row_max, row_sum, _ = mask_and_exponentiate_scores(
            s, tl.full([cfg.BLOCK_M], float("-inf"), tl.float32), tl.full([cfg.BLOCK_M], 0.0, tl.float32), v_scales,
            o_n, valid, position_of_token_0 + token, MASKED, False, cfg,
        )  # fmt: skip
        acc_o = tl.dot(p.to(values.dtype), values)
        i_row = i_pair * k2q.GROUP_PAD + o_r
        store_k2q_partial(p_states, p_accs, i_row, m_row, row_max, row_sum, acc_o)
        x, token, next_token = next_x, next_token, token_after_next


@triton.jit
def load_and_dequant_kv_block(operand: KVOperand, page_ids, n_block, valid, h, PACKED_COLUMNS_PAD: tl.constexpr,
                              PACKED_COLUMNS: tl.constexpr, row_format: tl.constexpr, cfg: tl.constexpr):  # fmt: skip
    """Returns a tile [BLOCK_N, PACK * PACKED_COLUMNS_PAD] of K or V for the matrix unit, and its stored scales."""
    scales = load_stored_scales(
        operand, page_ids, n_block, valid, h, PACKED_COLUMNS_PAD, PACKED_COLUMNS, True, False, row_format, cfg
    )
    packed = load_kv_block(
        operand.codes, page_ids, n_block, valid, h, PACKED_COLUMNS_PAD, PACKED_COLUMNS, True, False,
        row_format.STRIDE_UNIT, cfg,
    )  # fmt: skip
    return dequant_kv_block_except_token_scales(packed, scales, PACKED_COLUMNS_PAD, False, row_format), scales


@triton.jit
def store_k2q_partial(STATES, ACCS, i_row, m_row, row_max, row_sum, acc_o):
    """Stores the softmax states of rows i_row of a work tile where m_row; acc_o in fp16, scaled so that its largest
    magnitude is 2^15: columns below 2^-39 of it become 0.

    A state (row_max, row_sum, acc_o) is the same as (row_max + log2 a, row_sum / a, acc_o / a).
    """
    COLUMNS: tl.constexpr = acc_o.shape[1]
    largest = tl.max(tl.abs(acc_o), 1)
    # Of zeros, whose row_sum may be large (V's scales of 0 count as 1e-30), and beside an inf, nothing is scaled.
    a = tl.where((largest > 0) & (largest < float("inf")), tl.clamp(largest * 2.0**-15, 1e-20, 8e37), 1.0)
    p_state = STATES + 2 * i_row[:, None] + tl.arange(0, 2)[None, :]
    state = tl.join(row_max + tl.log2(a), row_sum / a)
    tl.store(p_state, state, mask=tl.broadcast_to(m_row[:, None], state.shape))
    p_acc = ACCS + (i_row * COLUMNS)[:, None] + tl.arange(0, COLUMNS)[None, :]
    tl.store(p_acc, (acc_o * (1.0 / a)[:, None]).to(tl.float16), mask=m_row[:, None])


@triton.jit
def combine_k2q_partials(
    softmax_state, k2q_partials: K2Q, i_list, token_in_m_block, head_in_group, max_pairs, cfg: tl.constexpr
):
    """Returns softmax_state with the partial results of an m_block's rows, in the order of their entries."""
    COLUMNS: tl.constexpr = cfg.PACK * cfg.BLOCK_DV
    o_token = i_list.to(tl.int64) * cfg.LISTED_TOKENS + token_in_m_block
    p_sorted_ids, o_d = k2q_partials.SORTED_IDS + o_token * cfg.K2Q_LENGTH, tl.arange(0, COLUMNS)
    num_partials = tl.load(k2q_partials.NUM_PAIRS + o_token) * cfg.K2Q_PARTIALS
    next_sorted_id = tl.load(p_sorted_ids, mask=num_partials > 0, other=0)
    for i in tl.range(0, tl.max(num_partials, 0), num_stages=3):
        sorted_id, has_partial = next_sorted_id.to(tl.int64), i < num_partials
        next_sorted_id = tl.load(p_sorted_ids + (i + 1) // cfg.K2Q_PARTIALS, mask=i + 1 < num_partials, other=0)
        i_row = (i % cfg.K2Q_PARTIALS * max_pairs + sorted_id) * cfg.K2Q_GROUP_PAD + head_in_group
        partial_max = tl.load(k2q_partials.STATES + 2 * i_row, mask=has_partial, other=float("-inf"))
        partial_sum = tl.load(k2q_partials.STATES + 2 * i_row + 1, mask=has_partial, other=0.0)
        p_acc = k2q_partials.ACCS + i_row[:, None] * COLUMNS + o_d[None, :]
        acc = tl.load(p_acc, mask=has_partial[:, None], other=0.0).to(tl.float32)
        softmax_state = combine_two_splits(softmax_state, (partial_max, partial_sum, acc))
    return softmax_state
