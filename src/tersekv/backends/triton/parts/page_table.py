"""The pages and slots of the keys of a key block."""

import triton
import triton.language as tl


@triton.jit
def load_block_or_per_key_page_ids(p_page_ids, n_block, num_keys, cfg: tl.constexpr):
    """Loads the page ids of key block n_block: one, or one per key. Entries past the last key are not read."""
    if cfg.ONE_PAGE_PER_BLOCK:
        return tl.load(
            p_page_ids + n_block // (cfg.PAGE // cfg.BLOCK_N), mask=n_block * cfg.BLOCK_N < num_keys, other=0
        ).to(tl.int64)
    else:
        o_n = n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)
        return tl.load(p_page_ids + o_n // cfg.PAGE, mask=o_n < num_keys, other=0).to(tl.int64)


@triton.jit
def pages_and_first_slots(page_ids, cfg: tl.constexpr):
    """Returns the pages of the cache, and the slots in them with which pages of the table begin: 0, unless these are
    parts of pages (`listed_pages`)."""
    if cfg.LIST.PARTS > 1:
        return page_ids // cfg.LIST.PARTS, page_ids % cfg.LIST.PARTS * cfg.PAGE
    else:
        return page_ids, 0


@triton.jit
def page_slots(n_block, cfg: tl.constexpr):
    """Returns the slot in its page of each key of n_block; the same in every block if PAGE divides BLOCK_N."""
    if cfg.BLOCK_N % cfg.PAGE == 0:
        slots = tl.arange(0, cfg.BLOCK_N) % cfg.PAGE
    else:
        slots = (n_block * cfg.BLOCK_N + tl.arange(0, cfg.BLOCK_N)) % cfg.PAGE
    return slots.to(tl.int64) if cfg.INT64_OFFSETS else slots
