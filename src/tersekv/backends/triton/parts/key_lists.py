"""The keys of a key block: a request's in order, or those of a query row's list (`indices`).

With lists every row is a request (`tile_scheduler`), whose keys are its list's entries, BLOCK positions each, and
(pages, slots, visible) stand where page ids of a key block stand without lists.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .latent_rows import find_request_of_row_else_B
from .page_table import load_block_or_per_key_page_ids, page_slots, pages_and_first_slots


class KeyList(NamedTuple):
    """The list of a row."""

    p_entries: Any
    stride: Any
    num_entries: Any
    p_page_ids: Any  # of the row's request
    last: Any  # the row's own position, behind which nothing is seen; −1: it sees nothing
    num_slots: Any


# The keys of a key block, [BLOCK_N] each: (pages, slots, visible); page and slot are 0 where a key is not visible. A
# bare tuple: in a tuple of several key blocks Triton forgets the names of fields.
PAGES, SLOTS, VISIBLE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def page_table_row_ptr_or_key_list(PAGE_TABLE, stride_table_b, i_request, h, lists, cfg: tl.constexpr):
    """Returns where the keys of a request are found: its row of the page table; or the KeyList of row i_request.

    lists: (INDICES, INDEX_LENS, SEQ_LENS, CU_SEQLENS_Q, number of requests, of slots, strides of row, head and entry)
    """
    if cfg.LIST.LENGTH < 0:
        return PAGE_TABLE + i_request.to(tl.int64) * stride_table_b
    else:
        INDICES, INDEX_LENS, SEQ_LENS, CU_SEQLENS_Q, num_requests, num_slots, stride_t, stride_h, stride_n = lists
        row = i_request.to(tl.int64)
        p_entries = INDICES + row * stride_t + h.to(tl.int64) * stride_h
        num_entries = tl.full([], cfg.LIST.LENGTH, tl.int64)
        if cfg.LIST.HAS_LENS:
            num_entries = tl.minimum(
                tl.load(INDEX_LENS + row * cfg.LIST.LENS_STRIDE + h * cfg.LIST.LENS_STRIDE_H).to(tl.int64), num_entries
            )
        if cfg.LIST.BY_SLOT:
            return KeyList(p_entries, stride_n, num_entries, INDICES, row, num_slots)
        else:
            if cfg.LIST.VARLEN_Q:
                b = find_request_of_row_else_B(CU_SEQLENS_Q, row, num_requests)
                known = b < num_requests
                q_begin = tl.load(CU_SEQLENS_Q + b, mask=known, other=0).to(tl.int64)
                q_end = tl.load(CU_SEQLENS_Q + b + 1, mask=known, other=0).to(tl.int64)
                known = known & (row >= q_begin)
            else:
                b = (row // cfg.LIST.MAX_SEQLEN_Q).to(tl.int32)
                known = b < num_requests
                q_begin = b.to(tl.int64) * cfg.LIST.MAX_SEQLEN_Q
                q_end = q_begin + cfg.LIST.MAX_SEQLEN_Q
            b = tl.where(known, b, 0)
            if cfg.LIST.CAUSAL:
                last = tl.load(SEQ_LENS + b, mask=known, other=0).to(tl.int64) - q_end + row
            else:
                last = num_slots + row * 0 - 1
            p_page_ids = PAGE_TABLE + b.to(tl.int64) * stride_table_b
            return KeyList(p_entries, stride_n, num_entries, p_page_ids, tl.where(known, last, -1), num_slots)


@triton.jit
def load_page_ids_or_pages_slots_and_visible(key_source, n_block, num_keys_if_unlisted, cfg: tl.constexpr):
    """Loads page ids of key block n_block, or its listed keys. key_source: from `page_table_row_ptr_or_key_list`."""
    if cfg.LIST.LENGTH < 0:
        return load_block_or_per_key_page_ids(key_source, n_block, num_keys_if_unlisted, cfg)
    else:
        o_n = n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
        i_entry = o_n // cfg.LIST.BLOCK
        visible = i_entry < key_source.num_entries
        entry = tl.load(key_source.p_entries + i_entry.to(tl.int64) * key_source.stride, mask=visible, other=0).to(
            tl.int64
        )
        visible = visible & (entry >= 0)
        if cfg.LIST.BY_SLOT:
            visible = visible & (entry < key_source.num_slots)  # 0xFFFFFFFF, the padding of uint32, is none either
            slot = tl.where(visible, entry, 0)
            pages, slots = slot // cfg.PAGE, slot % cfg.PAGE
        else:
            # An entry past the row's own position may be any number: no product before it is dropped.
            visible = visible & (entry <= key_source.last // cfg.LIST.BLOCK)
            position = tl.where(visible, entry, 0) * cfg.LIST.BLOCK + o_n % cfg.LIST.BLOCK
            visible = visible & (position <= key_source.last)
            position = tl.where(visible, position, 0).to(tl.uint32)
            pages = tl.load(key_source.p_page_ids + position // cfg.PAGE, mask=visible, other=0).to(tl.int64)
            slots = position % cfg.PAGE
        return pages, slots.to(tl.int64) if cfg.INT64_OFFSETS else slots.to(tl.int32), visible


@triton.jit
def keys_in_range_or_visible(page_ids_or_listed_keys, n_block, num_keys, cfg: tl.constexpr):
    """Returns which keys of n_block there are, [BLOCK_N]; of listed ones, which are visible."""
    if cfg.LIST.LENGTH < 0:
        return n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N) < num_keys
    else:
        return page_ids_or_listed_keys[VISIBLE]


@triton.jit
def key_row_offsets(page_ids_or_listed_keys, n_block, stride_page, stride_slot, cfg: tl.constexpr):
    """Returns the offsets of the rows of n_block, [BLOCK_N]."""
    if cfg.LIST.LENGTH < 0:
        pages, first_slots = pages_and_first_slots(page_ids_or_listed_keys, cfg)
        return pages * stride_page + (first_slots + page_slots(n_block, cfg)) * stride_slot
    else:
        pages, slots = page_ids_or_listed_keys[PAGES], page_ids_or_listed_keys[SLOTS]
        return pages * stride_page + slots * stride_slot
