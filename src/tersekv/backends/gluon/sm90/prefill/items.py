"""Which items a program of prefill does, found from the lengths on the device: no host, one kernel for every batch.

An item is a block of a request's query rows: TOKENS tokens, PACKED heads of each. Items lie in a row: request by
request, in each from the last block to the first, so that long ones come early. Programs take them in rounds, every
other round from the other end: where lengths fall evenly, all have alike much to do.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.schedule import add

FIELDS = gl.constexpr(16)
PAGES = gl.constexpr(3)  # behind the facts for three listeners: pages of the tile that is copied
CHUNK = gl.constexpr(32)  # requests that are looked through at once


class Item(NamedTuple):
    """What the warpgroups are told of an item."""

    row: gl.tensor  # first token's row of q
    left: gl.tensor  # tokens of the request from there on
    limit: gl.tensor  # last key that the first token sees
    keys: gl.tensor  # that any token sees
    tiles: gl.tensor  # 0: there are no more items
    end: gl.tensor  # the tile behind the last
    low: gl.tensor  # first key that any token sees
    bundle: gl.tensor  # of query heads
    request: gl.tensor


class Prefix(NamedTuple):
    """What an item's tokens see of the pages, where their own keys come with the call: as of an item."""

    limit: gl.tensor
    keys: gl.tensor
    tiles: gl.tensor  # there may be none
    end: gl.tensor
    low: gl.tensor


@gluon.jit
def first_row(CU, b, live):
    """First query row of requests b, of those that are live. CU: [B + 1], or how many rows every request has."""
    if CU.dtype.is_ptr():
        return gl.load(CU + b, mask=live, other=0).to(gl.int32)
    else:
        return gl.where(live, b * CU, 0).to(gl.int32)


@gluon.jit
def blocks_of(CU, B, first, c: gl.constexpr):
    """Blocks of tokens of the requests from `first` on: [CHUNK]."""
    o_b = first + gl.arange(0, CHUNK, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    m_b = o_b < B
    rows = first_row(CU, o_b + 1, m_b) - first_row(CU, o_b, m_b)
    return (rows + c.TOKENS - 1) // c.TOKENS


@gluon.jit
def place_of(blocks, x, c: gl.constexpr):
    """(request, block, bundle) of item x of the requests with these blocks."""
    o_b = gl.arange(0, CHUNK, blocks.type.layout)
    ends = gl.associative_scan(blocks, 0, add) * c.BUNDLES
    b = gl.sum((ends <= x).to(gl.int32), 0)
    x -= gl.max(gl.where(ends <= x, ends, 0), 0)
    mine = gl.sum(gl.where(o_b == b, blocks, 0), 0)
    return b, mine - 1 - x // c.BUNDLES, x % c.BUNDLES


@gluon.jit
def item_of_round(i):
    """The item that this program does in round i, among all."""
    p, programs = gl.program_id(0), gl.num_programs(0)
    return i * programs + gl.where(i % 2 == 0, p, programs - 1 - p)


@gluon.jit
def publish(FACTS, item, prefix):
    """Write an item where a warpgroup reads it."""
    o = gl.arange(0, FIELDS, gl.BlockedLayout([FIELDS], [32], [gl.num_warps()], [0]))
    x = gl.where(o == 0, item.row, gl.where(o == 1, item.left, gl.where(o == 2, item.limit, item.keys)))
    x = gl.where(o == 4, item.tiles, gl.where(o == 5, item.end, gl.where(o == 6, item.low, x)))
    x = gl.where(o == 7, item.bundle, gl.where(o == 8, item.request, gl.where(o == 9, prefix.limit, x)))
    x = gl.where(o == 10, prefix.keys, gl.where(o == 11, prefix.tiles, gl.where(o == 12, prefix.end, x)))
    FACTS.store(gl.where(o == 13, prefix.low, x))
    thread_barrier()  # the thread that arrives is not the one that has stored


@gluon.jit
def field(facts, i: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, facts.shape[0], facts.type.layout) == i, facts, 0), 0)


@gluon.jit
def read(FACTS):
    """(item, prefix) that were published; every thread holds them whole."""
    facts = FACTS.load(gl.BlockedLayout([FIELDS], [32], [gl.num_warps()], [0]))
    thread_barrier()  # one thread will say that they may be written anew
    item = Item(
        field(facts, 0), field(facts, 1), field(facts, 2), field(facts, 3), field(facts, 4), field(facts, 5),
        field(facts, 6), field(facts, 7), field(facts, 8),
    )  # fmt: skip
    return item, Prefix(field(facts, 9), field(facts, 10), field(facts, 11), field(facts, 12), field(facts, 13))
