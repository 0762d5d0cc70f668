"""The copying warp of prefill: queries, keys and values of every item, tile by tile from the last key to the first."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import reinterpret, thread_barrier, tma_load
from ..parts.ring import wait_free
from .items import CHUNK, PAGES, Item, Prefix, blocks_of, field, first_row, item_of_round, place_of, publish

NOWHERE = gl.constexpr(-1)  # a page that is not there: the copy engine writes zeros


class Ring(NamedTuple):
    """Tiles in shared memory, a barrier for each that has come and for each that may be written anew."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor


@gluon.jit
def page_ids(table, tile, low, top, wanted, c: gl.constexpr):
    """Page of each of a tile's copies, one a lane. Of keys outside [low, top) no table entry is read.

    NOTE: of scalars the compiler keeps copies in uniform registers, so that the load ahead is waited for at once.
    """
    COPIES: gl.constexpr = c.TILE // c.COPY
    key = tile * c.TILE + c.COPY * gl.arange(0, COPIES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    seen = wanted & (key < top) & (key + c.COPY > low)
    return gl.load(table + key // c.PAGE, mask=seen, other=NOWHERE).to(gl.int32)


@gluon.jit
def as_scalars(ids, memory):
    """What lanes hold, as many scalars."""
    COPIES: gl.constexpr = ids.shape[0]
    memory = memory.slice(0, COPIES)
    thread_barrier()
    memory.store(ids)
    thread_barrier()
    ids = memory.load(gl.BlockedLayout([COPIES], [32], [gl.num_warps()], [0]))
    out = ()
    for j in gl.static_range(COPIES):
        out = out + (field(ids, j),)
    return out


@gluon.jit
def copy_tile(X, ring, ids, tile, turn, h, STAGES: gl.constexpr, c: gl.constexpr):
    """Start the copies of a tile of keys or values, once its place is free. A row lies in panels of 128 bytes."""
    COPY: gl.constexpr = X.block_shape[2]
    COLUMNS: gl.constexpr = X.block_shape[3]
    COPIES: gl.constexpr = ring.tiles.shape[1] // COPY
    PANELS: gl.constexpr = ring.tiles.shape[2] // COLUMNS
    stage = wait_free(ring.free, turn, STAGES)
    bar = ring.full.index(stage)
    mbarrier.expect(bar, COPIES * PANELS * COPY * COLUMNS * 2)
    places = reinterpret(ring.tiles, X.dtype, [STAGES * PANELS * COPIES, 1, 1, COPY, COLUMNS], X.layout)
    for panel in gl.static_range(PANELS):
        for j in gl.static_range(COPIES):
            slot = (tile * c.TILE + j * COPY) % c.PAGE
            place = (stage * PANELS + panel) * COPIES + j
            tma_load(X, [ids[j], h, slot, panel * COLUMNS], bar, places.index(place))


@gluon.jit
def copy_query(Q, queries, half, item, c: gl.constexpr):
    """Start the copies of 64 query rows, whose place is free."""
    COLUMNS: gl.constexpr = Q.block_shape[2]
    PANELS: gl.constexpr = queries.tiles.shape[2] // COLUMNS
    SIZE: gl.constexpr = Q.dtype.primitive_bitwidth // 8
    TOKENS: gl.constexpr = c.TOKENS // 2
    bar = queries.full.index(half)
    mbarrier.expect(bar, PANELS * TOKENS * c.PACKED * COLUMNS * SIZE)
    # Rows of 8-bit queries take the first half of the memory: they become 16 bits there.
    N: gl.constexpr = 2 * PANELS * 2 // SIZE
    places = reinterpret(queries.tiles, Q.dtype, [N, TOKENS, c.PACKED, COLUMNS], Q.layout)
    for panel in gl.static_range(PANELS):
        place = half * (N // 2) + panel
        tma_load(Q, [item.row + half * TOKENS, item.bundle * c.PACKED, panel * COLUMNS], bar, places.index(place))


@gluon.jit
def copy_rows(X, ring, row, tile, turn, h, STAGES: gl.constexpr, c: gl.constexpr):
    """Start the copies of a tile of new rows, once its place is free."""
    COLUMNS: gl.constexpr = X.block_shape[2]
    PANELS: gl.constexpr = ring.tiles.shape[2] // COLUMNS
    stage = wait_free(ring.free, turn, STAGES)
    bar = ring.full.index(stage)
    mbarrier.expect(bar, PANELS * c.TILE * COLUMNS * 2)
    places = reinterpret(ring.tiles, X.dtype, [STAGES * PANELS, c.TILE, 1, COLUMNS], X.layout)
    for panel in gl.static_range(PANELS):
        tma_load(X, [row + tile * c.TILE, h, panel * COLUMNS], bar, places.index(stage * PANELS + panel))


@gluon.jit
def tell(item, prefix, queries, facts, done, LISTENERS: gl.constexpr):
    """Publish an item for all but the warpgroups that get queries with it."""
    for i in gl.static_range(2, LISTENERS):
        mbarrier.wait(queries.free.index(i), (done & 1) ^ 1)
        publish(facts.index(i), item, prefix)
        mbarrier.arrive(queries.full.index(i), count=1)


@gluon.jit
def give_queries(Q, queries, facts, item, prefix, done, c: gl.constexpr):
    for half in gl.static_range(2):
        mbarrier.wait(queries.free.index(half), (done & 1) ^ 1)
        publish(facts.index(half), item, prefix)
        copy_query(Q, queries, half, item, c)


@gluon.jit
def tiles_of(low, top, c: gl.constexpr):
    """(tiles, the tile behind the last) that hold keys [low, top); none: one tile, which is masked whole."""
    end = gl.maximum((top + c.TILE - 1) // c.TILE, 1)
    return end - gl.minimum(low // c.TILE, end - 1), end


@gluon.jit
def item_at(b, block, bundle, LENS, CU, c: gl.constexpr):
    """(item, prefix)"""
    q0 = first_row(CU, b, True)
    rows = first_row(CU, b + 1, True) - q0
    i0 = block * c.TOKENS
    n = gl.load(LENS + b).to(gl.int32)
    left = rows - i0
    position = n - rows + i0
    before = gl.maximum(n - rows, 0)
    low = before * 0
    if c.WINDOW > 0:
        low = gl.maximum(position - c.WINDOW + 1, 0)
    if c.NEW:
        # Keys of the item are new rows, by their places among these; before the first token there are none.
        top = gl.minimum(rows, i0 + c.TOKENS)
        first = gl.maximum(rows - n, 0)
        if c.WINDOW > 0:
            first = gl.maximum(first, i0 - c.WINDOW + 1)
        tiles, end = tiles_of(first, top, c)
        item = Item(q0 + i0, left, i0, top, tiles, end, first, bundle, b)
        stop = (before + c.TILE - 1) // c.TILE
        prefix = Prefix(position, before, gl.maximum(stop - low // c.TILE, 0), stop, low)
    else:
        # Of warpgroups that know no items without a tile, those without a key get one too.
        top = gl.maximum(gl.minimum(n, position + gl.minimum(c.TOKENS, left)), 0)
        tiles, end = tiles_of(low, top, c)
        item = Item(q0 + i0, left, position, top, tiles, end, low, bundle, b)
        prefix = Prefix(low, low, low * 0, low, low)
    return item, prefix


@gluon.jit
def copy_pages(maps, table, keys, values, end, tiles, low, top, turn, h, first, STAGES: gl.constexpr,
               c: gl.constexpr):  # fmt: skip
    """Copies of tiles of the pages, from the last to the first; the number of the next turn. first: queries, and whose
    they are, which go behind the first tile's keys."""
    Q, K, V = maps
    queries, facts, item, prefix, done = first
    tile = end - 1
    ids = page_ids(table, tile, low, top, tiles > 0, c)
    for i in range(tiles):
        here = as_scalars(ids, facts.index(PAGES))
        ids = page_ids(table, tile - 1, low, top, i + 1 < tiles, c)
        copy_tile(K, keys, here, tile, turn, h, STAGES, c)
        if not c.NEW:  # noqa: SIM102 - known to the compiler, unlike the other
            if i == 0:
                give_queries(Q, queries, facts, item, prefix, done, c)
        copy_tile(V, values, here, tile, turn, h, STAGES, c)
        turn += 1
        tile -= 1
    return turn


@gluon.jit
def produce(maps, new, given, B, st_b, queries, facts, keys, values, rows, LISTENERS: gl.constexpr, c: gl.constexpr):
    """Copies of all items of this program; then an item of no tile.

    keys, values: rings for what pages hold; rows: for new rows, the same or, where codes are converted, others
    """
    TABLE, LENS, CU = given
    STAGES: gl.constexpr = c.CODE_STAGES if c.CODE_STAGES > 0 else c.STAGES
    first = gl.program_id(0) * 0
    base = first  # items before those of the requests that are looked through
    blocks = blocks_of(CU, B, first, c)
    items = gl.sum(blocks, 0) * c.BUNDLES
    done = first  # items given
    turn = first  # tiles given of pages
    turn_of_rows = first  # of new rows; where these go to the same rings, of all
    while first < B:
        x = item_of_round(done) - base
        if x >= items:
            base += items
            first += CHUNK
            blocks = blocks_of(CU, B, first, c)
            items = gl.sum(blocks, 0) * c.BUNDLES
        else:
            b, block, bundle = place_of(blocks, x, c)
            b += first
            item, prefix = item_at(b, block, bundle, LENS, CU, c)
            table = TABLE + b.to(gl.int64) * st_b
            h = bundle * c.PACKED // c.GROUP
            tell(item, prefix, queries, facts, done, LISTENERS)
            told = (queries, facts, item, prefix, done)
            if c.NEW:
                for i in range(item.tiles):
                    tile, row = item.end - 1 - i, item.row - item.limit
                    # NOTE: queries first: once theirs are free, so are all earlier keys. The places of tiles that are
                    # converted this warp has not waited for, and a wait sees no further back than one turn of a place.
                    if i == 0:
                        give_queries(maps[0], queries, facts, item, prefix, done, c)
                    copy_rows(new[0], rows[0], row, tile, turn_of_rows, h, c.STAGES, c)
                    copy_rows(new[1], rows[1], row, tile, turn_of_rows, h, c.STAGES, c)
                    turn_of_rows += 1
                if c.CODE_STAGES > 0:
                    turn = copy_pages(maps, table, keys, values, prefix.end, prefix.tiles, prefix.low, prefix.keys,
                                      turn, h, told, STAGES, c)  # fmt: skip
                    turn_of_rows += prefix.tiles
                else:
                    turn_of_rows = copy_pages(maps, table, keys, values, prefix.end, prefix.tiles, prefix.low,
                                              prefix.keys, turn_of_rows, h, told, STAGES, c)  # fmt: skip
            else:
                turn = copy_pages(maps, table, keys, values, item.end, item.tiles, item.low, item.keys, turn, h, told,
                                  STAGES, c)  # fmt: skip
            done += 1
    zero = first * 0
    none = Item(zero, zero, zero, zero, zero, zero, zero, zero, zero)
    nothing = Prefix(zero, zero, zero, zero, zero)
    for half in gl.static_range(2):
        mbarrier.wait(queries.free.index(half), (done & 1) ^ 1)
        publish(facts.index(half), none, nothing)
        mbarrier.arrive(queries.full.index(half), count=1)
    tell(none, nothing, queries, facts, done, LISTENERS)
