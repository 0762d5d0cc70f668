"""Prefill over lists of blocks of keys (`indices` with `block_size`): an m_block attends once to each block that its
tokens list.

`list_blocks_of_m_blocks_kernel` writes the union of the lists of an m_block's tokens, `count_listed_blocks_kernel`
how many times each token lists each block; `listed_mainloop` attends to the union, and a row drops the scores of blocks
that it does not list. Rows near each other list mostly the same blocks, so that K and V are loaded, and dequantized,
once for all of them. Blocks that few of them list are left to `k2q`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from ...host.kernel_config import KernelConfig
from ...host.key_lists import KeyListConfig
from ..parts.page_table import load_block_or_per_key_page_ids
from .mainloop import KeyRange, KVOperand, attend_kv_block
from .tile_scheduler import find_request_and_m_block_maybe_empty, load_q_begin


@dataclass(frozen=True)
class ListedBlocksConfig(KernelConfig):
    LIST: KeyListConfig
    HEADS: int
    GROUP: int
    BLOCK_M: int
    BLOCK_B: int
    TOKENS: int  # that an m_block may have rows of, padded
    BINS: int  # blocks that are counted at a time
    BLOCK_IDS: int  # listed blocks that are looked for at a time
    ENTRIES: int  # of a list that are compared at a time
    MIN_ENTRIES: int  # of an m_block's lists that name a block for the m_block to attend to it


class ListedBlocks(NamedTuple):
    """What the kernels before prefill's store: pointers, and the row length of the first three."""

    BLOCKS: Any
    ENDS: Any
    COUNTS: Any
    NUM: Any
    max_blocks: Any


class MBlockLists(NamedTuple):
    """The lists of an m_block's tokens for a KV head."""

    i_request: Any
    m_token: Any  # [TOKENS]
    first_position: Any  # of the first token
    num_entries: Any  # [TOKENS]
    last_block: Any  # [TOKENS], that a token sees; -1: none
    p_entries: Any  # [TOKENS]
    stride_entry: Any
    first_token: Any


@triton.jit
def load_lists_of_m_block(
    INDICES, INDEX_LENS, SEQ_LENS, CU_SEQLENS_Q, B, i_tile, h, num_blocks, stride_list_t, stride_list_h, stride_list_n,
    cfg: tl.constexpr,
):  # fmt: skip
    """Returns the MBlockLists of m_block i_tile."""
    i_request, m_block = find_request_and_m_block_maybe_empty(CU_SEQLENS_Q, B, i_tile, cfg)
    q_begin = load_q_begin(CU_SEQLENS_Q, i_request, True)
    seqlen_q = (load_q_begin(CU_SEQLENS_Q, i_request + 1, True) - q_begin).to(tl.int32)
    row_begin = m_block * cfg.BLOCK_M
    token_begin = row_begin // cfg.GROUP
    token_end = tl.minimum(tl.cdiv(row_begin + cfg.BLOCK_M, cfg.GROUP), seqlen_q)
    o_t = tl.arange(0, cfg.TOKENS)
    tokens, m_token = q_begin + token_begin + o_t, token_begin + o_t < token_end
    first_position = tl.load(SEQ_LENS + i_request).to(tl.int32) - seqlen_q + token_begin
    position = tl.where(m_token, first_position + o_t, -1)
    num_entries = tl.full([cfg.TOKENS], cfg.LIST.LENGTH, tl.int64)
    if cfg.LIST.HAS_LENS:
        p_lens = INDEX_LENS + tokens * cfg.LIST.LENS_STRIDE + h * cfg.LIST.LENS_STRIDE_H
        num_entries = tl.minimum(tl.load(p_lens, mask=m_token, other=0).to(tl.int64), num_entries)
    # Blocks after a token's own position are not visible to it.
    last_block = tl.minimum(tl.where(position >= 0, position // cfg.LIST.BLOCK, -1), num_blocks - 1)
    p_entries = INDICES + tokens * stride_list_t + h.to(tl.int64) * stride_list_h
    return MBlockLists(
        i_request,
        m_token,
        first_position,
        num_entries,
        last_block,
        p_entries,
        stride_list_n,
        q_begin + token_begin,
    )


@triton.jit
def load_visible_entries(lists: MBlockLists, first_entry, cfg: tl.constexpr):
    """Loads the blocks [TOKENS, ENTRIES] of entries from first_entry on; -1 for those that a token does not see."""
    o_e = first_entry + tl.arange(0, cfg.ENTRIES)
    m_entry = lists.m_token[:, None] & (o_e[None, :] < lists.num_entries[:, None])
    p_entry = lists.p_entries[:, None] + o_e.to(tl.int64)[None, :] * lists.stride_entry
    entry = tl.load(p_entry, mask=m_entry, other=0).to(tl.int64)
    is_visible = m_entry & (entry >= 0) & (entry <= lists.last_block[:, None])
    return tl.where(is_visible, entry, -1).to(tl.int32)


@triton.jit(do_not_specialize=[
    "SEQ_LENS", "CU_SEQLENS_Q", "B", "first_tile", "num_blocks", "max_listed_blocks", "num_counts",
])  # fmt: skip
def list_blocks_of_m_blocks_kernel(
    INDICES, INDEX_LENS, SEQ_LENS, CU_SEQLENS_Q, LISTED_BLOCKS, NUM_LISTED_BLOCKS, SHARED_BLOCKS, K2Q_COUNTS, B,
    first_tile, num_blocks, max_listed_blocks, num_counts, stride_list_t, stride_list_h, stride_list_n,
    cfg: tl.constexpr,
):  # fmt: skip
    """Stores the blocks that stand at least MIN_ENTRIES times in the lists of an m_block's tokens for KV head h,
    ascending.

    LISTED_BLOCKS [m_blocks * HEADS, max_listed_blocks]
    NUM_LISTED_BLOCKS [m_blocks * HEADS, 2]: how many there are; how many come first that all tokens see in full
    SHARED_BLOCKS [m_blocks * HEADS, num_blocks]: whether a block is among them; None: not asked for
    K2Q_COUNTS [num_counts]: set to 0
    num_blocks: that a row of the page table has room for
    """
    i_program = tl.program_id(0)
    if SHARED_BLOCKS is not None:
        for i in range(0, tl.cdiv(num_counts, tl.num_programs(0) * cfg.BINS)):
            o_count = (i * tl.num_programs(0) + i_program) * cfg.BINS + tl.arange(0, cfg.BINS)
            tl.store(K2Q_COUNTS + o_count, o_count * 0, mask=o_count < num_counts)
    # Tile scheduler: the KV head, request and tokens of this program
    h, i_tile = i_program % cfg.HEADS, i_program // cfg.HEADS
    if first_tile is not None:
        i_tile += first_tile
    lists = load_lists_of_m_block(
        INDICES, INDEX_LENS, SEQ_LENS, CU_SEQLENS_Q, B, i_tile, h, num_blocks, stride_list_t, stride_list_h,
        stride_list_n, cfg,
    )  # fmt: skip
    count, num_unmasked = 0, 0
    p_out = LISTED_BLOCKS + i_program.to(tl.int64) * max_listed_blocks
    for begin in range(0, tl.max(lists.last_block, 0) + 1, cfg.BINS):
        # How often each of these blocks is listed
        counts = tl.full([cfg.BINS], 0, tl.int32)
        for first_entry in range(0, cfg.LIST.LENGTH, cfg.ENTRIES):
            entry = tl.reshape(load_visible_entries(lists, first_entry, cfg), [cfg.TOKENS * cfg.ENTRIES])
            counts += tl.histogram(entry - begin, cfg.BINS, mask=(entry >= begin) & (entry < begin + cfg.BINS))
        # Those that are often enough are stored side by side
        ids = begin + tl.arange(0, cfg.BINS)
        listed = counts >= cfg.MIN_ENTRIES
        if SHARED_BLOCKS is not None:
            p_shared = SHARED_BLOCKS + i_program.to(tl.int64) * num_blocks + ids
            tl.store(p_shared, listed.to(tl.int8), mask=ids < num_blocks)
        tl.store(p_out + count + tl.cumsum(listed.to(tl.int32), 0) - 1, ids, mask=listed)
        count += tl.sum(listed.to(tl.int32), 0)
        is_unmasked = listed & ((ids + 1) * cfg.LIST.BLOCK <= lists.first_position + 1)
        num_unmasked += tl.sum(is_unmasked.to(tl.int32), 0)
    tl.store(NUM_LISTED_BLOCKS + i_program * 2, count)
    tl.store(NUM_LISTED_BLOCKS + i_program * 2 + 1, num_unmasked)


@triton.jit(do_not_specialize=["SEQ_LENS", "CU_SEQLENS_Q", "B", "first_tile", "num_blocks", "max_listed_blocks"])
def count_listed_blocks_kernel(
    INDICES, INDEX_LENS, SEQ_LENS, CU_SEQLENS_Q, LISTED_BLOCKS, LISTED_ENDS, LISTED_COUNTS, NUM_LISTED_BLOCKS,
    SHARED_BLOCKS, K2Q_COUNTS, K2Q_BUCKETS, K2Q_SORTED_IDS, K2Q_NUM_PAIRS, K2Q_FIRST_TOKENS, B, first_tile, num_blocks,
    max_listed_blocks, stride_list_t, stride_list_h, stride_list_n, cfg: tl.constexpr,
):  # fmt: skip
    """Stores what m_blocks need to know of their listed blocks, and numbers the pairs of `k2q`: the other entries.

    LISTED_ENDS [m_blocks * HEADS, max_listed_blocks]: one past the last key of a block that a token sees
    LISTED_COUNTS [m_blocks * HEADS, max_listed_blocks, TOKENS]: how many times a token lists a block
    K2Q_COUNTS [buckets]: pairs of a bucket
    K2Q_NUM_PAIRS [m_blocks * HEADS, TOKENS]: pairs of a token, in the order of its entries
    K2Q_BUCKETS, K2Q_SORTED_IDS [m_blocks * HEADS, TOKENS, LENGTH]: a pair's bucket, and its index in the bucket
    K2Q_FIRST_TOKENS [m_blocks * HEADS]: the first token of an m_block
    """
    i_program = tl.program_id(0)
    h, i_tile = i_program % cfg.HEADS, i_program // cfg.HEADS
    if first_tile is not None:
        i_tile += first_tile
    lists = load_lists_of_m_block(
        INDICES, INDEX_LENS, SEQ_LENS, CU_SEQLENS_Q, B, i_tile, h, num_blocks, stride_list_t, stride_list_h,
        stride_list_n, cfg,
    )  # fmt: skip
    o_t = tl.arange(0, cfg.TOKENS)
    position = tl.where(lists.m_token, lists.first_position + o_t, -1)
    o_list = i_program.to(tl.int64) * max_listed_blocks
    num_listed = tl.load(NUM_LISTED_BLOCKS + i_program * 2)
    for begin in range(0, num_listed, cfg.BLOCK_IDS):
        i_block = begin + tl.arange(0, cfg.BLOCK_IDS)
        m_block_id = i_block < num_listed
        ids = tl.load(LISTED_BLOCKS + o_list + i_block, mask=m_block_id, other=-2)
        counts = tl.full([cfg.BLOCK_IDS, cfg.TOKENS], 0, tl.int32)
        for first_entry in range(0, cfg.LIST.LENGTH, cfg.ENTRIES):
            entry = load_visible_entries(lists, first_entry, cfg)
            counts += tl.sum((entry[None, :, :] == ids[:, None, None]).to(tl.int32), 2)
        end = tl.max(tl.where(counts > 0, position[None, :] + 1, 0), 1)
        tl.store(LISTED_ENDS + o_list + i_block, tl.minimum(end, (ids + 1) * cfg.LIST.BLOCK), mask=m_block_id)
        p_counts = LISTED_COUNTS + (o_list + i_block)[:, None] * cfg.TOKENS + o_t[None, :]
        tl.store(p_counts, counts.to(tl.int16), mask=tl.broadcast_to(m_block_id[:, None], counts.shape))
    if SHARED_BLOCKS is not None:
        p_shared = SHARED_BLOCKS + i_program.to(tl.int64) * num_blocks
        num_pairs = tl.full([cfg.TOKENS], 0, tl.int32)
        o_pairs = (i_program.to(tl.int64) * cfg.TOKENS + o_t) * cfg.LIST.LENGTH
        for first_entry in range(0, cfg.LIST.LENGTH, cfg.ENTRIES):
            block = load_visible_entries(lists, first_entry, cfg)
            is_pair = (block >= 0) & (tl.load(p_shared + block, mask=block >= 0, other=1) == 0)
            bucket = (h * B + lists.i_request) * num_blocks + block
            rank = tl.atomic_add(K2Q_COUNTS + bucket, 1, mask=is_pair, sem="relaxed")
            o_pair = (o_pairs + num_pairs)[:, None] + tl.cumsum(is_pair.to(tl.int32), 1) - 1
            tl.store(K2Q_BUCKETS + o_pair, bucket, mask=is_pair)
            tl.store(K2Q_SORTED_IDS + o_pair, rank, mask=is_pair)
            num_pairs += tl.sum(is_pair.to(tl.int32), 1)
        tl.store(K2Q_NUM_PAIRS + i_program * cfg.TOKENS + o_t, num_pairs)
        tl.store(K2Q_FIRST_TOKENS + i_program, lists.first_token.to(tl.int32))


@triton.jit
def listed_mainloop(q, softmax_state, K: KVOperand, V: KVOperand, p_page_ids, listed: ListedBlocks, i_list,
                    token_in_m_block, key_range: KeyRange, q_position, h, score_scale, softcap,
                    cfg: tl.constexpr):  # fmt: skip
    """Returns softmax_state after the blocks that the m_block's tokens list. token_in_m_block [BLOCK_M]: each row's
    token."""
    N_BLOCKS: tl.constexpr = cfg.LISTED_BLOCK // cfg.BLOCK_N  # key blocks of a listed block
    o_list = i_list.to(tl.int64) * listed.max_blocks
    p_blocks, p_ends = listed.BLOCKS + o_list, listed.ENDS + o_list
    p_counts = listed.COUNTS + o_list * cfg.LISTED_TOKENS + token_in_m_block
    end = tl.load(listed.NUM + i_list * 2) * N_BLOCKS
    unmasked_end = tl.load(listed.NUM + i_list * 2 + 1) * N_BLOCKS
    # Unmasked key blocks. Their numbers are loaded two iterations ahead and page ids one, so that no load waits for its
    # own address.
    n_block = load_listed_n_block(p_blocks, 0, unmasked_end, cfg)
    next_n_block = load_listed_n_block(p_blocks, 1, unmasked_end, cfg)
    page_ids = load_block_or_per_key_page_ids(p_page_ids, n_block, key_range.end, cfg)
    row_counts = load_row_counts(p_counts, 0, unmasked_end, cfg)
    for i in tl.range(0, unmasked_end):
        n_block_after_next = load_listed_n_block(p_blocks, i + 2, unmasked_end, cfg)
        next_page_ids = load_block_or_per_key_page_ids(p_page_ids, next_n_block, key_range.end, cfg)
        next_row_counts = load_row_counts(p_counts, i + 1, unmasked_end, cfg)
        softmax_state = attend_kv_block(
            q, softmax_state, K, V, page_ids, n_block, key_range, q_position, h, score_scale, softcap, False, False,
            cfg, row_counts,
        )  # fmt: skip
        n_block, next_n_block = next_n_block, n_block_after_next
        page_ids, row_counts = next_page_ids, next_row_counts
    # Masked key blocks, unpipelined: those of the tokens' own positions
    for i in tl.range(unmasked_end, end, num_stages=1):
        n_block = load_listed_n_block(p_blocks, i, end, cfg)
        block_end = tl.load(p_ends + i // N_BLOCKS)
        masked_range = KeyRange(0, block_end, key_range.q_position_begin, key_range.q_position_end)
        page_ids = load_block_or_per_key_page_ids(p_page_ids, n_block, block_end, cfg)
        softmax_state = attend_kv_block(
            q, softmax_state, K, V, page_ids, n_block, masked_range, q_position, h, score_scale, softcap, True, False,
            cfg, load_row_counts(p_counts, i, end, cfg),
        )  # fmt: skip
    return softmax_state


@triton.jit
def load_listed_n_block(p_blocks, i, end, cfg: tl.constexpr):
    """Loads the number of the i-th key block of the listed ones; 0 from `end` on."""
    N_BLOCKS: tl.constexpr = cfg.LISTED_BLOCK // cfg.BLOCK_N
    return tl.load(p_blocks + i // N_BLOCKS, mask=i < end, other=0) * N_BLOCKS + i % N_BLOCKS


@triton.jit
def load_row_counts(p_counts, i, end, cfg: tl.constexpr):
    """Loads how many times each row lists the i-th key block, [BLOCK_M] fp32."""
    N_BLOCKS: tl.constexpr = cfg.LISTED_BLOCK // cfg.BLOCK_N
    # A row of padding has the number of a token behind the last.
    return tl.load(p_counts + (i // N_BLOCKS) * cfg.LISTED_TOKENS, mask=i < end, other=0).to(tl.float32)
