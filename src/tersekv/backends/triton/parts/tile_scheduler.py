"""Attention's work, scheduled on the device: a work tile is (request, block of query rows), its work num_n_blocks key
blocks of BLOCK_N keys; all key blocks of all work tiles fall into equal, contiguous ranges. Program p takes range p //
HEADS for KV head (or block of heads) p % HEADS, so that heads that lie side by side in memory are read at the same
time. There is no plan call, and lengths may change between replays of a CUDA graph.

A range covers whole work tiles, whose output is stored at once, and at most two splits: the first, of a work tile that
began earlier (workspace slot 2p), and the last, of one that goes on (slot 2p + 1). The program in which a split work
tile begins also stores it in SPLIT_METADATA, which `combine_by_split_metadata_kernel` reads.

Batch invariance (SPLIT_BLOCKS > 0): a work tile is split by its own length alone. A range takes the splits that begin
in it, and their states go to slots of their own, which `combine_batch_invariant_kernel` finds by the lengths.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

METADATA_FIELDS = tl.constexpr(4)  # num_splits, q_begin, seqlen_q, m_block


class RequestShape(NamedTuple):
    """The shape of a request, from its lengths; or of several, then all fields are tensors."""

    num_n_blocks: Any  # of a work tile
    num_m_blocks: Any
    first_n_block: Any  # first key block in some row's window
    num_keys: Any
    seqlen_q: Any  # tokens of the query
    q_begin: Any  # first of them


@triton.jit
def split_metadata_ptr(SPLIT_WORKSPACE, num_programs, cfg: tl.constexpr):
    """Returns SPLIT_METADATA [programs, METADATA_FIELDS] int32, behind the partial results in the workspace."""
    return (SPLIT_WORKSPACE + 2 * num_programs * cfg.BLOCK_M * cfg.PARTIAL_COLUMNS).to(tl.pointer_type(tl.int32))


MAX_SPLITS = tl.constexpr(128)  # of a work tile


@triton.jit
def blocks_per_split(num_n_blocks, cfg: tl.constexpr):
    """Returns the key blocks of a split, where SPLIT_BLOCKS > 0."""
    return tl.maximum(tl.cdiv(num_n_blocks, MAX_SPLITS), cfg.SPLIT_BLOCKS)


@triton.jit
def blocks_to_next_split(block, num_n_blocks, cfg: tl.constexpr):
    """Returns the key blocks from `block`, counted from the request's first, to the next begin of a split, or 0."""
    n_block, split_blocks = block % num_n_blocks, blocks_per_split(num_n_blocks, cfg)
    return tl.minimum((split_blocks - n_block % split_blocks) % split_blocks, num_n_blocks - n_block)


@triton.jit
def first_work_tile_index(i_request, q_begin, cfg: tl.constexpr):
    """Returns the index of the request's first work tile. Rows of requests follow each other, so there is room for all
    work tiles before it."""
    return q_begin * cfg.GROUP // cfg.BLOCK_M + i_request


@triton.jit
def find_request_and_m_block_of_work_tile(CU_SEQLENS_Q, B, i_work_tile, cfg: tl.constexpr):
    """Returns (request, m_block) of work tile i_work_tile, numbered from `first_work_tile_index`; it may not exist."""
    i_request, first_index_of_request = -1, 0
    for j in range(0, B, cfg.BLOCK_B):
        o_b = j + tl.arange(0, cfg.BLOCK_B)
        q_begin = o_b * cfg.MAX_SEQLEN_Q
        if cfg.VARLEN_Q:
            q_begin = tl.load(CU_SEQLENS_Q + o_b, mask=o_b < B, other=0).to(tl.int32)
        first_index = first_work_tile_index(o_b, q_begin, cfg)
        is_before = (first_index <= i_work_tile) & (o_b < B)
        i_request += tl.sum(is_before.to(tl.int32))
        first_index_of_request = tl.maximum(first_index_of_request, tl.max(tl.where(is_before, first_index, 0)))
    return i_request, i_work_tile - first_index_of_request


@triton.jit
def load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, m_request, cfg: tl.constexpr):
    """Loads the RequestShape of request(s) i_request; with lists of keys of row(s), and SEQ_LENS counts entries."""
    if cfg.LIST.LENGTH < 0:
        num_keys = tl.load(SEQ_LENS + i_request, mask=m_request, other=0).to(tl.int32)
    else:
        # NOTE: Triton 3.6 does not compile all loops whose bounds are constants; i_request is never negative.
        num_keys = tl.where(m_request & (i_request >= 0), cfg.LIST.LENGTH * cfg.LIST.BLOCK, i_request * 0)
        if cfg.LIST.HAS_LENS and cfg.LIST.LENS_STRIDE_H == 0:
            num_entries = tl.load(SEQ_LENS + i_request.to(tl.int64) * cfg.LIST.LENS_STRIDE, mask=m_request, other=0)
            num_entries = tl.minimum(tl.maximum(num_entries.to(tl.int64), 0), cfg.LIST.LENGTH)
            num_keys = (num_entries * cfg.LIST.BLOCK).to(tl.int32)
    if cfg.VARLEN_Q:
        q_begin = tl.load(CU_SEQLENS_Q + i_request, mask=m_request, other=0).to(tl.int32)
        seqlen_q = tl.load(CU_SEQLENS_Q + i_request + 1, mask=m_request, other=0).to(tl.int32) - q_begin
    else:
        q_begin = i_request * cfg.MAX_SEQLEN_Q
        seqlen_q = tl.where(m_request, cfg.MAX_SEQLEN_Q, 0)
    first_n_block = num_keys * 0
    if cfg.WINDOW > 0:
        first_n_block = tl.maximum(num_keys - seqlen_q - cfg.WINDOW + 1, 0) // cfg.BLOCK_N
    # A request without keys still has outputs to store: one empty key block.
    num_n_blocks = tl.maximum(tl.cdiv(num_keys, cfg.BLOCK_N) - first_n_block, 1)
    num_m_blocks = tl.cdiv(seqlen_q * cfg.GROUP, cfg.BLOCK_M)
    return RequestShape(num_n_blocks, num_m_blocks, first_n_block, num_keys, seqlen_q, q_begin)


@triton.jit
def find_program_block_range_and_blocks_per_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, cfg: tl.constexpr):
    """Returns (first block, end, blocks_per_range) of range i_range, in the flat order of all key blocks."""
    total_blocks = 0
    for i in range(0, B, cfg.BLOCK_B):
        o_b = i + tl.arange(0, cfg.BLOCK_B)
        shapes = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        total_blocks += tl.sum(shapes.num_n_blocks * shapes.num_m_blocks)
    blocks_per_range = tl.maximum(tl.cdiv(total_blocks, num_ranges), cfg.MIN_BLOCKS_PER_RANGE)
    block_begin = i_range * blocks_per_range
    return block_begin, tl.minimum(block_begin + blocks_per_range, total_blocks), blocks_per_range


@triton.jit
def find_request_and_base_of_block(SEQ_LENS, CU_SEQLENS_Q, B, block, cfg: tl.constexpr):
    """Returns (request that holds flat key block `block`, flat index of the request's first block)."""
    i_request, n_block_base, blocks_before = 0, 0, 0
    for i in range(0, B, cfg.BLOCK_B):
        o_b = i + tl.arange(0, cfg.BLOCK_B)
        shapes = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        block_ends = blocks_before + tl.cumsum(shapes.num_n_blocks * shapes.num_m_blocks, 0)
        is_before = (block_ends <= block) & (o_b < B)
        i_request += tl.sum(is_before.to(tl.int32))
        n_block_base = tl.maximum(n_block_base, tl.max(tl.where(is_before, block_ends, 0)))
        blocks_before += tl.sum(shapes.num_n_blocks * shapes.num_m_blocks)
    return i_request, n_block_base


@triton.jit
def token_and_head_of_q_rows(m_block, h, q_begin, seqlen_q, cfg: tl.constexpr):
    """Returns (tokens, query heads, whether the row exists) of a block of query rows, [BLOCK_M] each."""
    o_r = m_block * cfg.BLOCK_M + tl.arange(0, cfg.BLOCK_M)
    tokens = (q_begin + o_r // cfg.GROUP).to(tl.int64)
    return tokens, (h * cfg.GROUP + o_r % cfg.GROUP).to(tl.int64), o_r < seqlen_q * cfg.GROUP


@triton.jit
def store_empty_output_of_padding_rows(
    OUT, LSE, i_token, T, i_program, num_programs, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    cfg: tl.constexpr,
):  # fmt: skip
    """Stores output 0 and LSE −inf to query rows behind the last request."""
    o_d = tl.arange(0, cfg.PACK * cfg.BLOCK_DV)
    i_token += i_program
    while i_token < T:
        for i in range(cfg.HEADS * cfg.GROUP):
            head = tl.cast(i, tl.int64)
            p_out = OUT + i_token.to(tl.int64) * stride_out_t + head * stride_out_h + o_d
            tl.store(p_out, (o_d * 0).to(tl.float32).to(OUT.dtype.element_ty), mask=o_d < cfg.DV)
            if cfg.HAS_LSE:
                tl.store(LSE + i_token.to(tl.int64) * stride_lse_t + head * stride_lse_h, float("-inf"))
        i_token += num_programs
