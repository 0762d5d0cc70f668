"""Prefill over lists of blocks of keys (`indices` with `block_size`): an m_block attends once to each block that one of
its tokens lists.

`list_blocks_of_m_blocks_kernel` writes the union of the lists of an m_block's tokens, and how many times each token
lists each block; `listed_mainloop` attends to the union, and a row drops the scores of blocks that it does not list.
Rows near each other list mostly the same blocks, so that K and V are loaded, and dequantized, once for all of them.
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
    BLOCK_IDS: int  # numbers of blocks that are looked for at a time
    ENTRIES: int  # of a list that are compared at a time


class ListedBlocks(NamedTuple):
    """What `list_blocks_of_m_blocks_kernel` stores: pointers, and the row length of the first three."""

    BLOCKS: Any
    ENDS: Any
    COUNTS: Any
    NUM: Any
    max_blocks: Any


@triton.jit(do_not_specialize=["SEQ_LENS", "CU_SEQLENS_Q", "B", "num_blocks", "max_listed_blocks"])
def list_blocks_of_m_blocks_kernel(
    INDICES, INDEX_LENS, SEQ_LENS, CU_SEQLENS_Q, LISTED_BLOCKS, LISTED_ENDS, LISTED_COUNTS, NUM_LISTED_BLOCKS, B,
    num_blocks, max_listed_blocks, stride_list_t, stride_list_h, stride_list_n, cfg: tl.constexpr,
):  # fmt: skip
    """Stores the blocks that the tokens of an m_block list for KV head h, ascending.

    LISTED_BLOCKS [m_blocks * HEADS, max_listed_blocks]; LISTED_ENDS: one past the last key that a token sees of each
    LISTED_COUNTS [m_blocks * HEADS, max_listed_blocks, TOKENS]: how many times a token lists a block
    NUM_LISTED_BLOCKS [m_blocks * HEADS, 2]: how many there are; how many come first that all tokens see in full
    num_blocks: that a row of the page table has room for
    """
    # Tile scheduler: the KV head, request and tokens of this program
    h, i_tile = tl.program_id(0) % cfg.HEADS, tl.program_id(0) // cfg.HEADS
    i_request, m_block = find_request_and_m_block_maybe_empty(CU_SEQLENS_Q, B, i_tile, cfg)
    q_begin = load_q_begin(CU_SEQLENS_Q, i_request, True)
    seqlen_q = (load_q_begin(CU_SEQLENS_Q, i_request + 1, True) - q_begin).to(tl.int32)
    row_begin = m_block * cfg.BLOCK_M
    if row_begin < seqlen_q * cfg.GROUP:
        o_i = row_begin // cfg.GROUP + tl.arange(0, cfg.TOKENS)
        m_token = o_i < tl.minimum(tl.cdiv(row_begin + cfg.BLOCK_M, cfg.GROUP), seqlen_q)
        tokens = q_begin + o_i
        first_position = tl.load(SEQ_LENS + i_request).to(tl.int32) - seqlen_q + row_begin // cfg.GROUP
        position = tl.where(m_token, first_position + tl.arange(0, cfg.TOKENS), -1)
        num_entries = tl.full([cfg.TOKENS], cfg.LIST.LENGTH, tl.int64)
        if cfg.LIST.HAS_LENS:
            p_lens = INDEX_LENS + tokens * cfg.LIST.LENS_STRIDE + h * cfg.LIST.LENS_STRIDE_H
            num_entries = tl.minimum(tl.load(p_lens, mask=m_token, other=0).to(tl.int64), num_entries)
        p_entries = INDICES + tokens * stride_list_t + h.to(tl.int64) * stride_list_h
        # Blocks after a token's own position are not visible to it.
        last_block = tl.minimum(tl.where(position >= 0, position // cfg.LIST.BLOCK, -1), num_blocks - 1)
        i_out = tl.program_id(0).to(tl.int64) * max_listed_blocks
        count, num_unmasked = 0, 0
        for begin in range(0, tl.max(last_block, 0) + 1, cfg.BLOCK_IDS):
            ids = begin + tl.arange(0, cfg.BLOCK_IDS)
            # How many times each token lists each of these blocks
            counts = tl.full([cfg.BLOCK_IDS, cfg.TOKENS], 0, tl.int32)
            for first_entry in range(0, cfg.LIST.LENGTH, cfg.ENTRIES):
                o_e = first_entry + tl.arange(0, cfg.ENTRIES)
                m_entry = m_token[:, None] & (o_e[None, :] < num_entries[:, None])
                p_entry = p_entries[:, None] + o_e.to(tl.int64)[None, :] * stride_list_n
                entry = tl.load(p_entry, mask=m_entry, other=0).to(tl.int64)
                is_visible = m_entry & (entry >= 0) & (entry <= last_block[:, None])
                entry = tl.where(is_visible, entry, -1).to(tl.int32)
                counts += tl.sum((entry[None, :, :] == ids[:, None, None]).to(tl.int32), 2)
            # Those that some token lists are stored side by side
            listed = tl.sum(counts, 1) > 0
            o_out = i_out + count + tl.cumsum(listed.to(tl.int32), 0) - 1
            end = tl.max(tl.where(counts > 0, position[None, :] + 1, 0), 1)
            tl.store(LISTED_BLOCKS + o_out, ids, mask=listed)
            tl.store(LISTED_ENDS + o_out, tl.minimum(end, (ids + 1) * cfg.LIST.BLOCK), mask=listed)
            p_counts = LISTED_COUNTS + o_out[:, None] * cfg.TOKENS + tl.arange(0, cfg.TOKENS)[None, :]
            tl.store(p_counts, counts.to(tl.int16), mask=tl.broadcast_to(listed[:, None], counts.shape))
            count += tl.sum(listed.to(tl.int32), 0)
            is_unmasked = listed & ((ids + 1) * cfg.LIST.BLOCK <= first_position + 1)
            num_unmasked += tl.sum(is_unmasked.to(tl.int32), 0)
        tl.store(NUM_LISTED_BLOCKS + tl.program_id(0) * 2, count)
        tl.store(NUM_LISTED_BLOCKS + tl.program_id(0) * 2 + 1, num_unmasked)


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
