"""MLA prefill's attention on sm_90 where there is much of it: three warpgroups of 64 queries share tiles, in one chunk.

As in attention.py, but: three warpgroups read a third less from the L2 cache than two. Each does scores,
weights and values in turn, while the others keep the matrix unit busy; values come in halves of a tile, which leaves
room for three of them. Of a tile whose second half no row sees only the first is computed.

Under the chip's power limit every instruction costs time. So a row's maximum is found in the tiles that need a mask,
which come first, and kept: any number not far from it will do. Where later scores are so far above it that weights or
what they are multiplied to leave fp32, the launch says so in AGAIN, and the kernel of the other file, launched behind
it, does everything again.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....host.bind import Given, Template
from ...versions import thread_barrier, tma_load
from ..parts.ring import barrier_sets, launch_dependents, wait_for_previous
from ..parts.softmax import halves, packed, shares_of_sum, unpacked, weigh
from ..parts.tensor_maps import described
from .attention import FAILED, OF_THREE, of_items, of_keys
from .items import (
    FIELDS,
    LN2,
    ROWS,
    Bars,
    Buffers,
    Items,
    Maps,
    Strides,
    any_set,
    begin,
    drop_nan,
    facts_of,
    place_of_item,
    publish,
    request_of,
    scores,
)

REGISTERS = 160
# For each multiprocessor; with few items, two warpgroups share the work more evenly. With 21 (H200, 4096 tokens, 128
# heads, 2026-11-21) the whole operation took 1265 µs against 1357, with 3 in an earlier form 200 against 196.
_ITEMS = 20

PARTS = gl.constexpr(3)  # warpgroups
BLOCK_M = gl.constexpr(192)  # queries of an item
BLOCK_N = gl.constexpr(128)  # keys of a tile
HALF_N = gl.constexpr(64)
STAGES_K = gl.constexpr(2)
STAGES_V = gl.constexpr(3)  # of half a tile
HUGE = gl.constexpr(2.0**100)  # of the sum of a row's weights


class State(NamedTuple):
    """Of a warpgroup's queries: values summed so far, references, and shares of the sums."""

    acc: gl.tensor
    m: gl.tensor
    l: gl.tensor


class Handed(NamedTuple):
    """What consumers are handed."""

    OUT: gl.tensor
    LSE: gl.tensor
    AGAIN: gl.tensor
    DIRTY: gl.tensor
    rows: gl.tensor
    qk_scale: gl.tensor
    strides: Strides
    buffers: Buffers
    bars: Bars


@gluon.jit
def give_values(maps, row, column, turn, buffers, bars):
    """Copy half a tile of values."""
    stage = turn % STAGES_V
    mbarrier.wait(bars.v_free.index(stage), ((turn // STAGES_V) & 1) ^ 1)
    mbarrier.expect(bars.v_full.index(stage), HALF_N * buffers.v.shape[2] * 2)
    tma_load(maps.VALUES, [row, column], bars.v_full.index(stage), buffers.v.index(stage))


@gluon.jit
def produce(maps, items, buffers, bars):
    """Take items from a counter, longest first, and copy their tiles from the last to the first; −1 tiles: the end."""
    k_full, k_free = bars.k_full, bars.k_free
    DN: gl.constexpr = buffers.q.shape[2]
    R: gl.constexpr = buffers.q_pe.shape[2]
    item = gl.program_id(0)
    done = 0  # items given to the consumers
    at = 0  # tiles given
    while item < items.items:
        b, head, block = place_of_item(item, items.blocks, items.H, items.group)
        r = request_of(items, b)
        q0, queries, keys, first_row = r.q0, r.queries, r.keys, r.first_row
        # Blocks are laid from the last query on, so that the one that is not full has the fewest keys.
        i0 = queries - (gl.cdiv(queries, BLOCK_M) - block) * BLOCK_M
        column = head * (2 * DN)
        wanted = block * BLOCK_M < queries
        if wanted:
            # An item without a key gets a tile that no row sees: consumers know no other items.
            tiles = gl.maximum((gl.minimum(keys, i0 + BLOCK_M + r.ahead) + BLOCK_N - 1) // BLOCK_N, 1)
            row = first_row + (tiles - 1) * BLOCK_N
            for i in range(tiles):
                stage = at % STAGES_K
                mbarrier.wait(k_free.index(stage), ((at // STAGES_K) & 1) ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * (DN + R) * 2)
                tma_load(maps.KEYS, [row, column], k_full.index(stage), buffers.k.index(stage))
                tma_load(maps.KPE, [row, 0], k_full.index(stage), buffers.k_pe.index(stage))
                # Halves come free in this order: the second of a tile behind the keys of the next.
                if i > 0:
                    give_values(maps, row + BLOCK_N + HALF_N, column + DN, 2 * at - 1, buffers, bars)
                else:
                    for part in gl.static_range(PARTS):
                        bar, first = bars.q_full.index(part), q0 + i0 + part * ROWS
                        mbarrier.wait(bars.q_free.index(part), (done & 1) ^ 1)
                        facts = buffers.facts.index(part)
                        publish(facts, q0 + i0, gl.maximum(-i0, 0), i0 + r.ahead, keys, tiles, head)
                        mbarrier.expect(bar, ROWS * (DN + R) * 2)
                        tma_load(maps.Q, [first, head * items.head_stride], bar, buffers.q.index(part))
                        tma_load(maps.QPE, [first, head * items.head_stride + DN], bar, buffers.q_pe.index(part))
                give_values(maps, row, column + DN, 2 * at, buffers, bars)
                at += 1
                row -= BLOCK_N
            done += 1
        # No earlier: whoever is done first takes the next item.
        after = gl.atomic_add(items.COUNTER, 1, sem="relaxed") + gl.num_programs(0)
        if wanted:
            give_values(maps, first_row + HALF_N, column + DN, 2 * at - 1, buffers, bars)
        item = after
    for part in gl.static_range(PARTS):
        mbarrier.wait(bars.q_free.index(part), (done & 1) ^ 1)
        publish(buffers.facts.index(part), 0, 0, 0, 0, -1, 0)
        mbarrier.arrive(bars.q_full.index(part), count=1)


@gluon.jit
def step(
    state, at, is_last, last, keys, dirty, buffers, bars, qk_scale, S: gl.constexpr, MASKED: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Scores, weights and values of tile `at`, or of its first half. last: last key of the tile that a row sees."""
    q, q_pe, k_s, kpe_s, v_s = buffers.q.index(PART), buffers.q_pe.index(PART), buffers.k, buffers.k_pe, buffers.v
    k_full, k_free, v_full, v_free = bars.k_full, bars.k_free, bars.v_full, bars.v_free
    acc, m, l = state
    COLUMNS: gl.constexpr = S.instr_shape[1]
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    stage = at % STAGES_K
    mbarrier.wait(k_full.index(stage), (at // STAGES_K) & 1)
    k, k_pe = k_s.index(stage).slice(0, COLUMNS), kpe_s.index(stage).slice(0, COLUMNS)
    s = warpgroup_mma_wait(0, [scores(q, q_pe, k, k_pe, S)])
    mbarrier.arrive(k_free.index(stage), count=1)
    mbarrier.arrive(bars.q_free.index(PART), count=1, pred=is_last)
    v0 = 2 * at % STAGES_V
    # NOTE: ptxas moves no arithmetic across the branch of a wait: this keeps the arrivals before the exponentials.
    mbarrier.wait(v_full.index(v0), (2 * at // STAGES_V) & 1)
    if MASKED:
        M: gl.constexpr = m.type.layout
        rows: gl.constexpr = gl.SliceLayout(1, S)
        weight, m, shrink = weigh(s, gl.convert_layout(m, rows), gl.convert_layout(last, rows), qk_scale, True)
        m, shrink = gl.convert_layout(m, M), gl.convert_layout(shrink, M)
        sums = gl.convert_layout(shares_of_sum(weight), l.type.layout)
        l = l * gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))[:, None] + sums
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    else:
        weight = gl.exp2(s * qk_scale - m[:, None])
        l = l + shares_of_sum(weight)
    parts = (packed(weight, v_s.dtype),)
    if COLUMNS == BLOCK_N:
        parts = halves(parts[0])
    for i in gl.static_range(2):
        turn = 2 * at + i
        half = v_s.index(turn % STAGES_V)
        if i > 0:
            mbarrier.wait(v_full.index(turn % STAGES_V), (turn // STAGES_V) & 1)
        if i * HALF_N < COLUMNS:
            if MASKED:  # noqa: SIM102 - known to the compiler, unlike the other
                if dirty:
                    drop_nan(half, keys - i * HALF_N)
            acc = warpgroup_mma(unpacked(parts[i], v_s.dtype, P), half, acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])
    for i in gl.static_range(2):
        mbarrier.arrive(v_free.index((2 * at + i) % STAGES_V), count=1)
    return State(acc, m, l)


@gluon.jit
def pass_over(at, tiles, bars):
    """Give back so many tiles unread."""
    k_full, k_free, v_full, v_free = bars.k_full, bars.k_free, bars.v_full, bars.v_free
    for i in range(tiles):  # noqa: B007 - an underscore is a barrier already
        mbarrier.wait(k_full.index(at % STAGES_K), (at // STAGES_K) & 1)
        mbarrier.arrive(k_free.index(at % STAGES_K), count=1)
        for half in gl.static_range(2):
            turn = 2 * at + half
            mbarrier.wait(v_full.index(turn % STAGES_V), (turn // STAGES_V) & 1)
            mbarrier.arrive(v_free.index(turn % STAGES_V), count=1)
        at += 1
    return at


@gluon.jit
def finish(given, facts, state, PART: gl.constexpr, HAS_LSE: gl.constexpr):
    """Write an item's result, and whether it is wrong."""
    OUT, strides, row, first = given.OUT, given.strides, facts.row, facts.rows
    acc, m, l = state
    O: gl.constexpr = acc.type.layout
    M: gl.constexpr = m.type.layout
    head = facts.head.to(gl.int64)
    l = gl.convert_layout(gl.sum(l, 1), M)
    o_v = gl.arange(0, acc.shape[1], gl.SliceLayout(0, O))
    o_mo = gl.arange(0, ROWS, gl.SliceLayout(1, O)) + PART * ROWS
    o_m = gl.arange(0, ROWS, M) + PART * ROWS
    # NaN that was there before counts too: then all is done twice.
    lost = gl.convert_layout(gl.max((gl.abs(acc) < float("inf")).to(gl.int32) ^ 1, 1), M)
    gl.store(given.AGAIN + o_m * 0, gl.full([ROWS], 1, gl.int32, M), mask=((lost != 0) | (l > HUGE)) & (o_m >= first))
    nothing = l == 0
    l = gl.where(nothing, 1.0, l)
    out = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
    p_out = OUT + (row + o_mo).to(gl.int64)[:, None] * strides.out_t + head * strides.out_h + o_v[None, :]
    gl.store(p_out, out.to(OUT.dtype.element_ty), mask=(o_mo >= first)[:, None] & (o_v >= 0)[None, :])
    if HAS_LSE:
        p_lse = given.LSE + (row + o_m).to(gl.int64) * strides.lse_t + head * strides.lse_h
        gl.store(p_lse, gl.where(nothing, float("-inf"), (m + gl.log2(l)) * LN2), mask=o_m >= first)


@gluon.jit
def attend_rows(given, PART: gl.constexpr, HAS_LSE: gl.constexpr):
    """A warpgroup: 64 queries of every item of this block."""
    qk_scale, buffers, bars = given.qk_scale, given.buffers, given.bars
    DV: gl.constexpr = buffers.v.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    S_HALF: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, HALF_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    whole: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, S)) + PART * ROWS

    dirty = any_set(given.DIRTY, given.rows)
    at = 0  # tiles begun
    done = 0  # items begun
    tiles = 0
    while tiles >= 0:
        mbarrier.wait(bars.q_full.index(PART), done & 1)
        loaded = buffers.facts.index(PART).load(whole)
        thread_barrier()  # one thread will say that they may be written anew
        facts = facts_of(loaded)
        limit, keys, tiles = facts.limit, facts.keys, facts.tiles
        done += 1
        if tiles >= 0:
            seen = gl.minimum(keys, limit + (PART + 1) * ROWS)  # keys of these rows
            own = gl.where(facts.rows < (PART + 1) * ROWS, gl.maximum((seen + BLOCK_N - 1) // BLOCK_N, 0), 0)
            at = pass_over(at, tiles - own, bars)
            mbarrier.arrive(bars.q_free.index(PART), count=1, pred=own == 0)
            acc, m = begin(S, O, DV)
            l = shares_of_sum(gl.full([ROWS, BLOCK_N], 0.0, gl.float32, S))
            last = gl.minimum(o_m + limit, keys - 1)  # last key that a row sees
            # Tiles that all rows see, but for one: each row has a maximum when it comes to them.
            full = gl.maximum(gl.minimum(keys - 1, limit + PART * ROWS), 0) // BLOCK_N
            start = own * BLOCK_N
            if (own > 0) & (seen + HALF_N <= start):
                start -= BLOCK_N
                acc, m, l = step(
                    State(acc, m, l), at, start == 0, last - start, keys - start, dirty, buffers, bars, qk_scale,
                    S_HALF, True, PART,
                )  # fmt: skip
                at += 1
                own -= 1
            for i in range(full, own):  # noqa: B007
                start -= BLOCK_N
                acc, m, l = step(
                    State(acc, m, l), at, start == 0, last - start, keys - start, dirty, buffers, bars, qk_scale,
                    S, True, PART,
                )  # fmt: skip
                at += 1
            for i in range(gl.minimum(full, own)):  # noqa: B007
                start -= BLOCK_N
                acc, m, l = step(
                    State(acc, m, l), at, start == 0, last, keys, dirty, buffers, bars, qk_scale, S, False, PART
                )
                at += 1
            finish(given, facts, State(acc, m, l), PART, HAS_LSE)


@gluon.jit(do_not_specialize=["rows", "blocks", "group", "items"])
def attention_of_three_kernel(
    Q, QPE, KEYS, VALUES, KPE, OUT, LSE, COUNTER, AGAIN, DIRTY, CU, LENS, STARTS_OF, STARTS, rows, blocks, H, group,
    items, head_stride, qk_scale, stride_ot, stride_oh, stride_lt, stride_lh,
    HAS_LSE: gl.constexpr, REGS: gl.constexpr, OVERLAPS: gl.constexpr,
):  # fmt: skip
    DN: gl.constexpr = KEYS.block_shape[1]
    R: gl.constexpr = KPE.block_shape[1]
    DV: gl.constexpr = VALUES.block_shape[1]
    dtype: gl.constexpr = KEYS.dtype
    q_s = gl.allocate_shared_memory(dtype, [PARTS, ROWS, DN], Q.layout)
    qpe_s = gl.allocate_shared_memory(dtype, [PARTS, ROWS, R], QPE.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, DN], KEYS.layout)
    kpe_s = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_N, R], KPE.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES_V, HALF_N, DV], VALUES.layout)
    facts_s = gl.allocate_shared_memory(gl.int32, [PARTS, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_free = barrier_sets(PARTS, (1, 1))
    k_full, k_free = barrier_sets(STAGES_K, (1, PARTS))
    v_full, v_free = barrier_sets(STAGES_V, (1, PARTS))
    fence_async_shared()
    if OVERLAPS:
        launch_dependents()
        wait_for_previous()
    buffers = Buffers(q_s, qpe_s, k_s, kpe_s, v_s, facts_s)
    bars = Bars(q_full, q_free, k_full, k_free, v_full, v_free)
    strides = Strides(stride_ot, stride_oh, stride_lt, stride_lh)
    handed = Handed(OUT, LSE, AGAIN, DIRTY, rows, qk_scale, strides, buffers, bars)
    maps = Maps(Q, QPE, KEYS, VALUES, KPE)
    work = Items(COUNTER, CU, LENS, STARTS_OF, STARTS, rows, blocks, H, group, items, head_stride)
    gl.warp_specialize(
        [
            (attend_rows, (handed, 0, HAS_LSE)),
            (attend_rows, (handed, 1, HAS_LSE)),
            (attend_rows, (handed, 2, HAS_LSE)),
            (produce, (maps, work, buffers, bars)),
        ],
        [4, 4, 1], [REGS, REGS, 24],
    )  # fmt: skip


def fits(f: SimpleNamespace, sms: int) -> bool:
    """Whether three warpgroups are faster than two. A call with one chunk is assumed, in bf16: fp16 has no room for
    large weights."""
    longest, per_block = f.max_q_len, f.cache_lens.shape[0] * f.q.shape[1]
    blocks = -(-longest // BLOCK_M.value)
    return blocks * per_block >= _ITEMS * sms and blocks < -(-longest // (2 * ROWS.value))


def prepared(f: SimpleNamespace, chunk: int, rows: int, sms: int, overlaps: bool) -> Template:
    """The launch for a chunk of `rows` rows, the only one. What it counts with: see `attention.prepared`."""
    maps, dim_v, columns = of_keys(f, rows, BLOCK_N.value), f.out.shape[2], f.kv_b_proj.shape[0]
    layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, 64], gl.bfloat16)
    arguments = of_items(f, chunk, rows, BLOCK_M.value, False) | {
        "Q": maps["Q"], "QPE": maps["QPE"], "KEYS": maps["KV"], "KPE": maps["KPE"],
        "VALUES": described("KV", [rows, columns], [columns, 1], [HALF_N.value, dim_v], layout),
        "COUNTER": Given("COUNTER", row=OF_THREE), "AGAIN": Given("COUNTER", row=FAILED), "REGS": REGISTERS,
        "OVERLAPS": overlaps,
    }  # fmt: skip
    grid = (min(arguments["items"], sms),)
    return Template(attention_of_three_kernel, grid, arguments, num_warps=4, launch_pdl=overlaps)
