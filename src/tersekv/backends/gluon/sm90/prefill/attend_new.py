"""The multiplying warpgroup where the new rows' keys and values come with the call: an item has them and the pages.

Tiles of new rows go first, as they are, in their own 16 bits; then the query is made what the pages' keys are
multiplied as, and sums of values go on in units of the pages' values. Both kinds of tile lie in the same rings.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ...versions import reinterpret
from ..parts.ring import give_back, place_of
from ..parts.softmax import packed
from .attend import (
    MIN_SCALE,
    State,
    at_edge,
    empty,
    first_weights,
    head_of,
    key_scales,
    query_of,
    start_scores,
    start_values,
    steps,
    store,
    tile_scales,
    tile_weights,
    values_come,
    view_of,
    with_scales,
)
from .items import Item, read
from .produce import Ring
from .turns import Turns, turned_as_rows, turned_back

LEAST_UNIT = gl.constexpr(1e-30)  # of the pages' values, in which sums are kept


class Both(NamedTuple):
    """Scales of scores (in base 2) of new rows and of pages, and of values and outputs."""

    of_rows: gl.tensor
    of_pages: gl.tensor
    K_T: gl.tensor
    of_values: gl.tensor
    V_T: gl.tensor
    of_output: gl.tensor
    softcap: gl.tensor
    turns: Turns


@gluon.jit
def seen_as(ring, DTYPE: gl.constexpr):
    return Ring(reinterpret(ring.tiles, DTYPE, ring.tiles.shape, ring.tiles.layout), ring.full, ring.free)


@gluon.jit
def scales_of_pages(item, numbers, c: gl.constexpr):
    """(of scores, of values)"""
    h = head_of(item, c)
    k, v = numbers.of_pages, numbers.of_values
    if c.K_T:
        k = k * gl.load(numbers.K_T + h * c.K_T_STRIDE)
    if c.V_T:
        v = v * gl.load(numbers.V_T + h * c.V_T_STRIDE)
    return k, gl.where(gl.abs(v) < LEAST_UNIT, LEAST_UNIT, v)


@gluon.jit
def over_to_pages(state, view, q, scale, scales, unit, numbers, h, queries, keys, values, new_values, turn, code_turn,
                  start, is_last, HALF: gl.constexpr, c: gl.constexpr, n: gl.constexpr):  # fmt: skip
    """`attend.step`, but the tile before is the last of new rows."""
    before, _ = place_of(turn - 1, c.STAGES)
    s = start_scores(q, keys, turn, c)
    acc = start_values(state, new_values, turn - 1, n)
    of_tile = tile_scales(scales, code_turn, c)
    columns = key_scales(scales, turn, c)
    s = with_scales(warpgroup_mma_wait(1, [s]), columns, c)
    give_back(keys.free, turn, c.STAGES)
    mbarrier.arrive(queries.free.index(HALF), count=1, pred=is_last)
    weight, total, m, shrink = tile_weights(s, state.m, view, start, scale, of_tile, numbers.softcap, True, c)
    l = state.l * gl.convert_layout(shrink, gl.SliceLayout(1, state.l.type.layout))[:, None] + total
    words = packed(weight, values.tiles.dtype)
    CLEAN: gl.constexpr = not c.CONVERTED
    values_come(values, turn, view, start, at_edge(view, start, c), CLEAN, c)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(values.free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink / unit, gl.SliceLayout(1, acc.type.layout))[:, None]
    if c.V_TURN.ANY:
        acc = turned_as_rows(acc, numbers.turns, h, c)
    return State(acc, m, l, words)


@gluon.jit
def attend_new(tensors, numbers, strides, queries, facts, keys, values, scales, HALF: gl.constexpr,
               DTYPE: gl.constexpr, NEW_DTYPE: gl.constexpr, c: gl.constexpr, n: gl.constexpr):  # fmt: skip
    """n: as c, of new rows."""
    OUT, LSE, SINKS = tensors
    new_keys, new_values = seen_as(keys, NEW_DTYPE), seen_as(values, NEW_DTYPE)
    new_queries = seen_as(queries, NEW_DTYPE)
    sign = gl.where(numbers.of_rows < 0, -1.0, 1.0)
    done, turn, code_turn = 0, 0, 0  # items begun; tiles begun, of them those of pages
    mbarrier.wait(queries.full.index(HALF), 0)
    item, prefix = read(facts.index(HALF))
    while item.tiles > 0:
        only = prefix.tiles == 0
        q, factor = query_of(new_queries, HALF, sign, numbers.turns, head_of(item, c), DTYPE, n)
        scale = gl.maximum(factor * (numbers.of_rows * sign), MIN_SCALE)
        view = view_of(item, HALF, n)
        start = (item.end - 1) * c.TILE
        s = warpgroup_mma_wait(0, [start_scores(q, new_keys, turn, n)])
        give_back(keys.free, turn, c.STAGES)
        mbarrier.arrive(queries.free.index(HALF), count=1, pred=only & (item.tiles == 1))
        of_tile = tile_scales(scales, code_turn, n)
        state = first_weights(s, empty(c), view, start, scale, of_tile, numbers.softcap, NEW_DTYPE, n)
        values_come(new_values, turn, view, start, at_edge(view, start, n), True, n)
        turn += 1
        state, turn, _codes = steps(state, view, q, scale, scales, numbers.softcap, queries, new_keys, new_values, turn,
                                    turn, item, only, HALF, n)  # fmt: skip
        of_pages, unit = scales_of_pages(item, numbers, c)
        unit = gl.where(only, 1.0, unit)
        if only:
            acc = warpgroup_mma_wait(0, [start_values(state, new_values, turn - 1, n)])
            state = State(acc, state.m, state.l, state.words)
        else:
            # Names of their own: they are of other types than those of new rows.
            pages_scale = of_pages * sign
            pages_sign = gl.where(pages_scale < 0, -1.0, 1.0)
            pages_q, pages_factor = query_of(queries, HALF, pages_sign, numbers.turns, head_of(item, c), NEW_DTYPE, c)
            pages_scale = gl.maximum(pages_factor * (pages_scale * pages_sign), MIN_SCALE)
            part = Item(item.row, item.left, prefix.limit, prefix.keys, prefix.tiles, prefix.end, prefix.low,
                        item.bundle, item.request)  # fmt: skip
            pages_view = view_of(part, HALF, c)
            state = over_to_pages(state, pages_view, pages_q, pages_scale, scales, unit, numbers, head_of(item, c),
                                  queries, keys, values, new_values, turn, code_turn,
                                  (prefix.end - 1) * c.TILE, prefix.tiles == 1, HALF, c, n)  # fmt: skip
            state, turn, code_turn = steps(state, pages_view, pages_q, pages_scale, scales, numbers.softcap, queries,
                                           keys, values, turn + 1, code_turn + 1, part, True, HALF, c)  # fmt: skip
            acc = warpgroup_mma_wait(0, [start_values(state, values, turn - 1, c)])
            if c.V_TURN.ANY:
                acc = turned_back(acc, numbers.turns, head_of(item, c), c)
            state = State(acc, state.m, state.l, state.words)
        give_back(values.free, turn - 1, c.STAGES)
        store(OUT, LSE, SINKS, item, state, unit * numbers.of_output, strides, HALF, c)
        done += 1
        mbarrier.wait(queries.full.index(HALF), done & 1)
        item, prefix = read(facts.index(HALF))
