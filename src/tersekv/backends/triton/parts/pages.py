"""Where the keys of a tile lie: in which pages, and in which slots of these."""

import triton
import triton.language as tl


@triton.jit
def page_of(table, t, n, c: tl.constexpr):
    """Page ids of tile t: one, or one per key. Entries past the last key are not read."""
    if c.ONE_PAGE:
        return tl.load(table + t // (c.PAGE // c.TILE), mask=t * c.TILE < n, other=0).to(tl.int64)
    else:
        o_n = t * c.TILE + tl.arange(0, c.TILE)
        return tl.load(table + o_n // c.PAGE, mask=o_n < n, other=0).to(tl.int64)


@triton.jit
def slots_of(t, c: tl.constexpr):
    """Slot in its page of each key of tile t; the same in every tile where pages divide tiles."""
    if c.TILE % c.PAGE == 0:
        slots = tl.arange(0, c.TILE) % c.PAGE
    else:
        slots = (t * c.TILE + tl.arange(0, c.TILE)) % c.PAGE
    return slots.to(tl.int64) if c.FAR else slots
