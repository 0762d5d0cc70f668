"""A multiplying warpgroup of prefill: 64 query rows of every item of its program.

Scores of a tile run while the values of the tile before are added, over the ends of items too. Tiles go from the last
key to the first: the causal edge comes first, and the long loop needs no mask but a window's, at its end.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import reinterpret, thread_barrier
from ..decode.work import finish
from ..parts.ring import give_back, place_of
from ..parts.schedule import output
from ..parts.softmax import packed, shares_of_sum, unpacked
from . import attend_eight as eight
from .items import read
from .softmax import Reference, weigh
from .turns import Turns, turned_back, turned_query

ROWS = gl.constexpr(64)
MIN_SCALE = gl.constexpr(1e-30)  # of scores: −inf times it is −inf


class State(NamedTuple):
    """Of an item's rows: sums of values, running maxima (base 2) and sums of weights, and the last tile's weights."""

    acc: gl.tensor
    m: gl.tensor
    l: gl.tensor
    words: gl.tensor


class Numbers(NamedTuple):
    """Scales of scores, in base 2, and of values; those of heads that lie in memory are not in them."""

    of_scores: gl.tensor
    K_T: gl.tensor
    of_values: gl.tensor
    V_T: gl.tensor
    softcap: gl.tensor
    turns: Turns


class View(NamedTuple):
    """What a warpgroup's rows see of an item's keys."""

    last: gl.tensor  # key that each row sees by its place
    low: gl.tensor  # first that any row of the item sees
    keys: gl.tensor  # that any row of the item sees


@gluon.constexpr_function
def score_layout(c):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.TILE, 32 if c.KEYS_8 else 16])


@gluon.constexpr_function
def sum_layout(c):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.DV, 16])


@gluon.jit
def eight_bits(queries, HALF: gl.constexpr, DTYPE: gl.constexpr, c: gl.constexpr):
    """8-bit query rows, where they came: in the first half of the memory that they would take in 16 bits."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(c.D, 128), 8, 2)
    return reinterpret(queries.tiles, DTYPE, [4, ROWS, c.D], LAYOUT).index(2 * HALF)


@gluon.jit
def turn_sign(x, sign, LAYOUT: gl.constexpr):
    """Rows in shared memory times the sign."""
    if sign < 0:
        x.store((x.load(LAYOUT).to(gl.float32) * -1.0).to(x.dtype))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def head_of(item, c: gl.constexpr):
    """KV head of an item."""
    return item.bundle * c.PACKED // c.GROUP


@gluon.jit
def query_of(queries, HALF: gl.constexpr, sign, turns, h, DTYPE: gl.constexpr, c: gl.constexpr):
    """(query rows as an operand in shared memory, in 16 bits or as keys are, a factor of their scores).

    fp16 holds what bf16 holds only after a power of two is taken out of each row; the factor puts it back. The query
    takes the scale's sign, so that the highest score has the largest product.
    """
    x16 = queries.tiles.index(HALF)
    read_as: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    factor = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, score_layout(c)))
    if x16.dtype == DTYPE and not c.K_TURN.ANY:
        turn_sign(x16, sign, read_as)
    elif c.KEYS_8:
        x16 = eight_bits(queries, HALF, DTYPE, c)
        turn_sign(x16, sign, read_as)
    else:
        x = x16
        if DTYPE.primitive_bitwidth == 8:
            x = eight_bits(queries, HALF, DTYPE, c)
        else:
            x = reinterpret(queries.tiles, DTYPE, queries.tiles.shape, queries.tiles.layout).index(HALF)
        x = x.load(read_as).to(gl.float32) * sign
        if c.K_TURN.ANY:
            x = turned_query(x, turns, h, c)
        if gl.bfloat16 == DTYPE or c.K_TURN.ANY:
            bits = (gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF
            bits = gl.maximum(bits, 1)
            x = x * (gl.maximum(254 - bits, 1) << 23).to(gl.float32, bitcast=True)[:, None]
            factor = gl.convert_layout((bits << 23).to(gl.float32, bitcast=True), factor.type.layout)
        thread_barrier()  # all have read what is now written over
        x16.store(x.to(x16.dtype))
        fence_async_shared()
        thread_barrier()
    return x16, factor


@gluon.jit
def drop_dead(v, low, keys):
    """Values outside [low, keys) become 0: a weight of 0 does not hide NaN. All who multiply may do so at once."""
    PART: gl.constexpr = 16
    read_as: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_n = gl.arange(0, PART, gl.SliceLayout(1, read_as))
    for i in gl.static_range(v.shape[0] // PART):
        x = v.slice(i * PART, PART).load(read_as)
        live = (o_n >= low - i * PART) & (o_n < keys - i * PART)
        v.slice(i * PART, PART).store(gl.where(live[:, None], x, 0.0).to(v.dtype))
    fence_async_shared()
    thread_barrier()


class TileScales(NamedTuple):
    """Of a tile whose tokens have scales of their own: the power of two that was taken out of the values'."""

    values_log: gl.tensor  # to base two
    values_inverse: gl.tensor


@gluon.jit
def tile_scales(scales, turn, c: gl.constexpr):
    """Of a tile whose keys have come, and are not given back yet."""
    if c.TOKEN_SCALES:
        x = scales.tiles.index(place_of(turn, 2 * c.STAGES)[0]).load(gl.BlockedLayout([2], [32], [4], [0]))
        o = gl.arange(0, 2, x.type.layout)
        return TileScales(gl.sum(gl.where(o == 0, x, 0.0), 0), gl.sum(gl.where(o == 1, x, 0.0), 0))
    else:
        return TileScales(0.0, 0.0)


@gluon.jit
def key_scales(scales, turn, c: gl.constexpr):
    """Scales of a tile's keys, where tokens have them: loaded while their scores are computed, before any is waited for
    and before the keys are given back."""
    if c.TOKEN_SCALES:
        return scales.of_keys.index(place_of(turn, c.STAGES)[0]).load(gl.SliceLayout(0, score_layout(c)))
    else:
        return turn


@gluon.jit
def with_scales(s, columns, c: gl.constexpr):
    if c.TOKEN_SCALES:
        s = s * columns[None, :]
    return s


@gluon.jit
def tile_weights(s, m, view, start, scale, of_tile, softcap, MASKED: gl.constexpr, c: gl.constexpr):
    """(weights fp32, their sums in shares, m, shrink) of a tile of scores."""
    weight, m, shrink = weigh(
        s, m, view.last - start, view.low - start, view.keys - start, scale, of_tile.values_log, softcap, MASKED, c
    )  # fmt: skip
    total = shares_of_sum(weight)
    if c.TOKEN_SCALES:
        total = total * of_tile.values_inverse
    return weight, total, m, shrink


@gluon.jit
def start_scores(q, keys, turn, c: gl.constexpr, WANTED=True):
    stage, parity = place_of(turn, c.STAGES)
    mbarrier.wait(keys.full.index(stage), parity, pred=WANTED)
    zero = gl.full([ROWS, c.TILE], 0, gl.float32, score_layout(c))
    return warpgroup_mma(q, keys.tiles.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def start_values(state, values, turn, c: gl.constexpr):
    A: gl.constexpr = gl.DotOperandLayout(0, sum_layout(c), 2)
    stage, _ = place_of(turn, c.STAGES)
    return warpgroup_mma(
        unpacked(state.words, values.tiles.dtype, A), values.tiles.index(stage), state.acc, is_async=True
    )


@gluon.jit
def at_edge(view, start, c: gl.constexpr):
    """Whether a tile has keys that no row of the item sees for where they are."""
    return (start + c.TILE > view.keys) | (start < view.low)


@gluon.jit
def values_come(values, turn, view, start, edge, CLEAN: gl.constexpr, c: gl.constexpr, WANTED=True):
    """Wait for a tile's values, and free them of what no row sees."""
    stage, parity = place_of(turn, c.STAGES)
    mbarrier.wait(values.full.index(stage), parity, pred=WANTED)
    if CLEAN:  # noqa: SIM102 - known to the compiler, unlike the other
        if edge:
            drop_dead(values.tiles.index(stage), view.low - start, view.keys - start)


@gluon.jit
def step(state, view, q, scale, scales, softcap, queries, keys, values, turn, code_turn, start, is_last,
         HALF: gl.constexpr, MASKED: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """Scores of the tile that begins with key `start`, while the values of the tile before are added; its weights."""
    before, _ = place_of(turn - 1, c.STAGES)
    if c.VALUES_8:
        s, low, high = scores_and_half(state, q, keys, values, turn, True, c)
    else:
        s = start_scores(q, keys, turn, c)
        acc = start_values(state, values, turn - 1, c)
    of_tile = tile_scales(scales, code_turn, c)
    columns = key_scales(scales, turn, c)
    s = with_scales(warpgroup_mma_wait(1, [s]), columns, c)
    give_back(keys.free, turn, c.STAGES)
    mbarrier.arrive(queries.free.index(HALF), count=1, pred=is_last)
    # NOTE: ptxas moves no arithmetic across the branch of a wait. This one, which never waits, keeps the arrival before
    # the exponentials; the one below keeps them before the wait for the product that they are to hide behind.
    values_come(values, turn - 1, view, start, False, False, c)
    weight, total, m, shrink = tile_weights(s, state.m, view, start, scale, of_tile, softcap, MASKED, c)
    L: gl.constexpr = gl.SliceLayout(1, state.l.type.layout)
    l = state.l * gl.convert_layout(shrink, L)[:, None] + total
    if not c.VALUES_8:
        words = packed(weight, values.tiles.dtype)
    CLEAN: gl.constexpr = MASKED and (c.WINDOW > 0 or c.NEW) and not c.CONVERTED
    values_come(values, turn, view, start, at_edge(view, start, c), CLEAN, c)
    if c.VALUES_8:
        high = warpgroup_mma_wait(0, [high])
        mbarrier.arrive(values.free.index(before), count=1)
        high = eight.added(state.high, high, state.shrink)
        return eight.State(low, high, shrink, m, l, eight.packed(weight))
    else:
        acc = warpgroup_mma_wait(0, [acc])
        mbarrier.arrive(values.free.index(before), count=1)
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
        return State(acc, m, l, words)


@gluon.jit
def scores_and_half(state, q, keys, values, turn, more, c: gl.constexpr):
    """(scores, sums of half the values' columns, product of the others) of 8 bits: the first and the last under way."""
    weights = eight.unpacked(state.words, c)
    low = eight.start_half(weights, values, turn - 1, 0, c)
    s = start_scores(q, keys, turn, c, more)
    low = eight.added(state.low, warpgroup_mma_wait(1, [low]), state.shrink)
    return s, low, eight.start_half(weights, values, turn - 1, 1, c)


@gluon.jit
def store(OUT, LSE, SINKS, item, state, value_scale, strides, HALF: gl.constexpr, c: gl.constexpr):
    """Write an item's rows of this warpgroup."""
    so_t, so_h, sl_t, sl_h = strides
    ROW: gl.constexpr = gl.SliceLayout(1, state.acc.type.layout)
    m = gl.convert_layout(state.m, ROW)
    l = gl.convert_layout(gl.sum(state.l, 1), ROW)
    o_r = HALF * ROWS + gl.arange(0, ROWS, ROW)
    token = o_r // c.PACKED
    m_row = token < item.left
    heads = (item.bundle * c.PACKED + o_r % c.PACKED).to(gl.int64)
    at = (item.row + token).to(gl.int64)
    factor, lse = finish(m, l, value_scale, SINKS, heads, m_row, c)
    o_d = gl.arange(0, c.DV, gl.SliceLayout(0, state.acc.type.layout))
    live = m_row[:, None] & (o_d < c.HEAD_DV)[None, :]
    p_out = (OUT + at * so_t + heads * so_h)[:, None] + o_d[None, :]
    gl.store(p_out, output(state.acc * factor[:, None], OUT, c), mask=live)
    if c.HAS_LSE:
        gl.store(LSE + at * sl_t + heads * sl_h, lse, mask=m_row)


@gluon.jit
def scale_of_values(item, numbers, c: gl.constexpr):
    x = numbers.of_values
    if c.V_T:
        x = x * gl.load(numbers.V_T + head_of(item, c) * c.V_T_STRIDE)
    return x


@gluon.jit
def empty(c: gl.constexpr):
    """(acc, m) of rows that have seen nothing."""
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout(c)))
    return gl.full([ROWS, c.DV], 0.0, gl.float32, sum_layout(c)), m


@gluon.jit
def view_of(item, HALF: gl.constexpr, c: gl.constexpr):
    o_r = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, score_layout(c)))
    return View(item.limit + o_r // c.PACKED, item.low, item.keys)


@gluon.jit
def borders(item, HALF: gl.constexpr, c: gl.constexpr):
    """Tiles at which an item's run of those that all rows see whole begins and ends, behind its first tile.

    (first tile, begin, end); the item's last tile is not among them: it comes first, with a mask.
    """
    first = item.end - item.tiles
    token: gl.constexpr = HALF * (ROWS // c.PACKED)
    upper = gl.maximum(gl.minimum(item.keys, item.limit + token + 1), 0) // c.TILE
    upper = gl.minimum(gl.maximum(upper, first), item.end - 1)
    lower = first
    if c.WINDOW > 0:
        key = gl.maximum(item.limit + token + ROWS // c.PACKED - c.WINDOW, 0)
        lower = gl.minimum(gl.maximum((key + c.TILE - 1) // c.TILE, first), upper)
    if c.NEW:
        lower = gl.minimum(gl.maximum((item.low + c.TILE - 1) // c.TILE, lower), upper)
    return first, lower, upper


@gluon.jit
def begin_item(item, queries, numbers, HALF: gl.constexpr, DTYPE: gl.constexpr, c: gl.constexpr):
    """(query, factor of its scores in base 2, what its rows see) of an item whose query has come."""
    h = head_of(item, c)
    k = numbers.of_scores
    if c.K_T:
        k = k * gl.load(numbers.K_T + h * c.K_T_STRIDE)
    sign = gl.where(k < 0, -1.0, 1.0)
    q, factor = query_of(queries, HALF, sign, numbers.turns, h, DTYPE, c)
    return q, gl.maximum(factor * (k * sign), MIN_SCALE), view_of(item, HALF, c)


@gluon.jit
def first_weights(s, acc_m, view, start, scale, of_tile, softcap, DTYPE: gl.constexpr, c: gl.constexpr):
    """The state after an item's first scores."""
    acc, m = acc_m
    if c.VALUES_8:
        m = Reference(m, m)
    weight, total, m, shrink = tile_weights(s, m, view, start, scale, of_tile, softcap, True, c)
    if c.VALUES_8:
        none = eight.nothing(ROWS, c)
        return eight.State(none, none, shrink, m, total, eight.packed(weight))
    else:
        return State(acc, m, total, packed(weight, DTYPE))


@gluon.jit
def steps(state, view, q, scale, scales, softcap, queries, keys, values, turn, code_turn, item, are_last,
          HALF: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """All tiles of an item but the first. (state, turns) behind them."""
    first, lower, upper = borders(item, HALF, c)
    bottom = first * c.TILE
    start = (item.end - 1) * c.TILE
    for t in range(upper, item.end - 1):  # noqa: B007 - an underscore is a barrier already
        start -= c.TILE
        state = step(state, view, q, scale, scales, softcap, queries, keys, values, turn, code_turn, start,
                     are_last & (start == bottom), HALF, True, c)  # fmt: skip
        turn += 1
        code_turn += 1
    for t in range(lower, upper):  # noqa: B007
        start -= c.TILE
        state = step(state, view, q, scale, scales, softcap, queries, keys, values, turn, code_turn, start,
                     are_last & (start == bottom), HALF, False, c)  # fmt: skip
        turn += 1
        code_turn += 1
    if c.WINDOW > 0 or c.NEW:
        for t in range(first, lower):  # noqa: B007
            start -= c.TILE
            state = step(state, view, q, scale, scales, softcap, queries, keys, values, turn, code_turn, start,
                         are_last & (start == bottom), HALF, True, c)  # fmt: skip
            turn += 1
            code_turn += 1
    return state, turn, code_turn


@gluon.jit
def attend(tensors, numbers, strides, queries, facts, keys, values, scales, HALF: gl.constexpr, DTYPE: gl.constexpr,
           c: gl.constexpr):  # fmt: skip
    OUT, LSE, SINKS = tensors
    softcap = numbers.softcap
    CLEAN: gl.constexpr = not c.CONVERTED
    V: gl.constexpr = values.tiles.dtype
    done, turn = 0, 0  # items and tiles begun
    mbarrier.wait(queries.full.index(HALF), 0)
    item, _prefix = read(facts.index(HALF))
    if item.tiles > 0:
        q, scale, view = begin_item(item, queries, numbers, HALF, DTYPE, c)
        start = (item.end - 1) * c.TILE
        s = start_scores(q, keys, turn, c)
        columns = key_scales(scales, turn, c)
        s = with_scales(warpgroup_mma_wait(0, [s]), columns, c)
        of_tile = tile_scales(scales, turn, c)
        give_back(keys.free, turn, c.STAGES)
        mbarrier.arrive(queries.free.index(HALF), count=1, pred=item.tiles == 1)
        state = first_weights(s, empty(c), view, start, scale, of_tile, softcap, V, c)
        values_come(values, turn, view, start, at_edge(view, start, c), CLEAN, c)
        turn += 1
        while item.tiles > 0:
            state, turn, _codes = steps(state, view, q, scale, scales, softcap, queries, keys, values, turn, turn, item,
                                        True, HALF, c)  # fmt: skip
            # The item's last values are added under the next item's first scores. After the last item, scores of what
            # lies in memory are computed and dropped.
            ended = item
            done += 1
            mbarrier.wait(queries.full.index(HALF), done & 1)
            item, _prefix = read(facts.index(HALF))
            more = item.tiles > 0
            q, scale, view = begin_item(item, queries, numbers, HALF, DTYPE, c)
            start = (item.end - 1) * c.TILE
            if c.VALUES_8:
                s, low, high = scores_and_half(state, q, keys, values, turn, more, c)
            else:
                s = start_scores(q, keys, turn, c, more)
                acc = start_values(state, values, turn - 1, c)
            of_tile = tile_scales(scales, turn, c)
            columns = key_scales(scales, turn, c)
            s = with_scales(warpgroup_mma_wait(1, [s]), columns, c)
            mbarrier.arrive(keys.free.index(place_of(turn, c.STAGES)[0]), count=1, pred=more)
            mbarrier.arrive(queries.free.index(HALF), count=1, pred=item.tiles == 1)
            if c.VALUES_8:
                high = eight.added(state.high, warpgroup_mma_wait(0, [high]), state.shrink)
                acc, m = eight.whole(low, high, sum_layout(c)), state.m.m
            else:
                acc, m = warpgroup_mma_wait(0, [acc]), state.m
            give_back(values.free, turn - 1, c.STAGES)
            if c.V_TURN.ANY:
                acc = turned_back(acc, numbers.turns, head_of(ended, c), c)
            value_scale = scale_of_values(ended, numbers, c)
            store(OUT, LSE, SINKS, ended, State(acc, m, state.l, state.words), value_scale, strides, HALF, c)
            state = first_weights(s, empty(c), view, start, scale, of_tile, softcap, V, c)
            values_come(values, turn, view, start, more & at_edge(view, start, c), CLEAN, c, more)
            turn += 1
