"""Ragged causal attention of new tokens to one chunk of up-projected keys and values (MLA prefill, last stage), sm_90.

What it computes, and from what, is told in the Triton file of the same name. Here a persistent block runs three parts:
a producer warp that takes items (request, head, 128 queries) from a counter, longest first, and copies their tiles by
TMA; and two warpgroups of 64 queries each, whose scores of the next tile run while the values of the last are added.

Tiles of keys go from the last to the first, so that the masked ones come first and the long loop needs no mask.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....host.bind import Described, Given, Template, given, strides
from ....triton.mla_prefill.attention import lse_of
from ....triton.mla_prefill.gather import of_chunk
from ...versions import thread_barrier, tma_load
from ..parts.ring import barrier_sets, launch_dependents, wait_for_previous
from ..parts.softmax import packed, shares_of_sum, unpacked, weigh
from ..parts.tensor_maps import described
from .items import (
    FIELDS,
    LN2,
    LOG2E,
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

BLOCK_N, STAGES, REGISTERS = 128, 2, 240
OF_THREE, FAILED = 1, 2  # in COUNTER, behind the items that this kernel took
_L2_BYTES = 32 << 20  # keys and values that stay in the L2 cache for a while


class Dims(NamedTuple):
    heads: int
    nope: int
    rope: int
    dim_v: int


BLOCK_M = gl.constexpr(128)  # queries of an item


class State(NamedTuple):
    """Of a warpgroup's queries: values summed so far, maxima, sums, and the last tile's weights, packed."""

    acc: gl.tensor
    m: gl.tensor
    l: gl.tensor
    words: gl.tensor


class Handed(NamedTuple):
    """What consumers are handed."""

    OUT: gl.tensor
    LOW: gl.tensor
    LSE: gl.tensor
    DIRTY: gl.tensor
    rows: gl.tensor
    H: gl.tensor
    qk_scale: gl.tensor
    strides: Strides
    buffers: Buffers
    bars: Bars


@gluon.jit
def produce(maps, items, buffers, bars, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_PREVIOUS: gl.constexpr):
    """Take items and copy their tiles; the last is told by 0 tiles."""
    k_full, k_free, v_full, v_free = bars.k_full, bars.k_free, bars.v_full, bars.v_free
    DN: gl.constexpr = buffers.q.shape[2]
    R: gl.constexpr = buffers.q_pe.shape[2]
    bits: gl.constexpr = buffers.q.dtype.primitive_bitwidth // 8
    item = gl.program_id(0)
    done = 0  # items given to the consumers
    at = 0  # tiles given
    while item < items.items:
        after = item
        b, head, block = place_of_item(item, items.blocks, items.H, items.group)
        r = request_of(items, b)
        q0, queries, keys = r.q0, r.queries, r.keys
        i0 = block * BLOCK_M
        seen = gl.minimum(keys, gl.minimum(i0 + BLOCK_M, queries) + r.ahead)
        wanted = i0 < queries
        if HAS_PREVIOUS:
            wanted = wanted & (seen > 0)
        if wanted:
            # An item without a key gets a tile that is masked whole: consumers know no other items.
            tiles = gl.maximum((seen + BLOCK_N - 1) // BLOCK_N, 1)
            column = head * (2 * DN)
            for i in range(tiles):
                row = r.first_row + (tiles - 1 - i) * BLOCK_N
                stage = at % STAGES
                phase = (at // STAGES) & 1
                if i == tiles - 1:  # no earlier: whoever is done first takes the next item
                    after = gl.atomic_add(items.COUNTER, 1, sem="relaxed") + gl.num_programs(0)
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * (DN + R) * bits)
                tma_load(maps.KEYS, [row, column], k_full.index(stage), buffers.k.index(stage))
                tma_load(maps.KPE, [row, 0], k_full.index(stage), buffers.k_pe.index(stage))
                if i == 0:
                    for half in gl.static_range(2):
                        bar, first = bars.q_full.index(half), q0 + i0 + half * ROWS
                        mbarrier.wait(bars.q_free.index(half), (done & 1) ^ 1)
                        publish(buffers.facts.index(half), q0 + i0, queries - i0, i0 + r.ahead, keys, tiles, head)
                        mbarrier.expect(bar, ROWS * (DN + R) * bits)
                        tma_load(maps.Q, [first, head * items.head_stride], bar, buffers.q.index(half))
                        tma_load(maps.QPE, [first, head * items.head_stride + DN], bar, buffers.q_pe.index(half))
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), BLOCK_N * DN * bits)
                tma_load(maps.VALUES, [row, column + DN], v_full.index(stage), buffers.v.index(stage))
                at += 1
            done += 1
        else:
            after = gl.atomic_add(items.COUNTER, 1, sem="relaxed") + gl.num_programs(0)
        item = after
    for half in gl.static_range(2):
        mbarrier.wait(bars.q_free.index(half), (done & 1) ^ 1)
        publish(buffers.facts.index(half), 0, 0, 0, 0, 0, 0)
        mbarrier.arrive(bars.q_full.index(half), count=1)


@gluon.jit
def step(
    state, at, is_last, last, keys, dirty, buffers, bars, qk_scale, S: gl.constexpr, MASKED: gl.constexpr,
    HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of tile `at`, while the values of the tile before are added; then its weights."""
    acc, m, l, words = state
    q, q_pe = buffers.q.index(HALF), buffers.q_pe.index(HALF)
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    k_s, kpe_s, v_s = buffers.k, buffers.k_pe, buffers.v
    k_full, k_free, v_full, v_free = bars.k_full, bars.k_free, bars.v_full, bars.v_free
    stage, before = at % STAGES, (at - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (at // STAGES) & 1)
    s = scores(q, q_pe, k_s.index(stage), kpe_s.index(stage), S)
    acc = warpgroup_mma(unpacked(words, v_s.dtype, P), v_s.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_free.index(stage), count=1)
    mbarrier.arrive(bars.q_free.index(HALF), count=1, pred=is_last)
    # NOTE: ptxas moves no arithmetic across the branch of a wait. This one, which never waits, keeps the arrival before
    # the exponentials; the one below keeps them before the wait for the product that they are to hide behind.
    mbarrier.wait(v_full.index(before), ((at - 1) // STAGES) & 1)
    weight, m, shrink = weigh(s, m, last, qk_scale, MASKED)
    l = l * gl.convert_layout(shrink, gl.SliceLayout(1, l.type.layout))[:, None] + shares_of_sum(weight)
    words = packed(weight, v_s.dtype)
    mbarrier.wait(v_full.index(stage), (at // STAGES) & 1)
    if MASKED:  # noqa: SIM102 - known to the compiler, unlike the other
        if dirty:
            drop_nan(v_s.index(stage), keys)
    acc = warpgroup_mma_wait(0, [acc])
    mbarrier.arrive(v_free.index(before), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout))[:, None]
    return State(acc, m, l, words)


@gluon.jit
def places(given, facts, HALF: gl.constexpr, S: gl.constexpr, O: gl.constexpr, DV: gl.constexpr):
    """Pointers of an item's out, low and lse; masks of out and lse."""
    strides, row, queries = given.strides, facts.row, facts.rows
    head = facts.head.to(gl.int64)
    o_v = gl.arange(0, DV, gl.SliceLayout(0, O))
    o_mo = gl.arange(0, ROWS, gl.SliceLayout(1, O)) + HALF * ROWS
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, S)) + HALF * ROWS
    t, t_lse = (row + o_mo).to(gl.int64), (row + o_m).to(gl.int64)
    p_out = given.OUT + t[:, None] * strides.out_t + head * strides.out_h + o_v[None, :]
    p_low = given.LOW + (t * given.H + head)[:, None] * DV + o_v[None, :]
    m_out = (o_mo < queries)[:, None] & (o_v >= 0)[None, :]
    p_lse = given.LSE + t_lse * strides.lse_t + head * strides.lse_h
    return p_out, p_low, p_lse, m_out, o_m < queries


@gluon.jit
def finish(
    given, facts, acc, m, l, HALF: gl.constexpr, S: gl.constexpr,
    HAS_PREVIOUS: gl.constexpr, HAS_NEXT: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Write an item's result, merged with what the chunk before left."""
    O: gl.constexpr = acc.type.layout
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    p_out, p_low, p_lse, m_out, m_lse = places(given, facts, HALF, S, O, acc.shape[1])
    if HAS_PREVIOUS:
        # NOTE: an accumulator that begins as something else than 0 makes ptxas wait behind every product.
        before = gl.load(p_lse, mask=m_lse, other=float("-inf")) * LOG2E
        top = gl.maximum(m, before)
        safe = gl.where(top == float("-inf"), 0.0, top)
        new, old = gl.exp2(m - safe), gl.exp2(before - safe)
        l = new * l + old
        m = top
    nothing = l == 0
    l = gl.where(nothing, 1.0, l)
    if HAS_PREVIOUS:
        acc = acc * gl.convert_layout(new / l, gl.SliceLayout(1, O))[:, None]
        x = gl.load(p_out, mask=m_out, other=0.0).to(gl.float32)
        x += gl.load(p_low, mask=m_out, other=0.0).to(gl.float32)
        acc += x * gl.convert_layout(old / l, gl.SliceLayout(1, O))[:, None]
    else:
        acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
    out = acc.to(given.OUT.dtype.element_ty)
    gl.store(p_out, out, mask=m_out)
    if HAS_NEXT:
        gl.store(p_low, (acc - out.to(gl.float32)).to(given.LOW.dtype.element_ty), mask=m_out)
    if HAS_LSE:
        gl.store(p_lse, gl.where(nothing, float("-inf"), (m + gl.log2(l)) * LN2), mask=m_lse)


@gluon.jit
def attend_rows(
    given, HALF: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_PREVIOUS: gl.constexpr,
    HAS_NEXT: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 queries of every item of this block."""
    qk_scale, buffers, bars = given.qk_scale, given.buffers, given.bars
    k_s, kpe_s, v_s = buffers.k, buffers.k_pe, buffers.v
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    DV: gl.constexpr = v_s.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    whole: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    q, q_pe = buffers.q.index(HALF), buffers.q_pe.index(HALF)
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, S)) + HALF * ROWS

    dirty = any_set(given.DIRTY, given.rows)
    at = 0  # tiles begun
    done = 0  # items begun
    mbarrier.wait(q_full.index(HALF), 0)
    loaded = buffers.facts.index(HALF).load(whole)
    thread_barrier()  # one thread will say that they may be written anew
    facts = facts_of(loaded)
    if facts.tiles > 0:
        start = (facts.tiles - 1) * BLOCK_N
        mbarrier.wait(k_full.index(0), 0)
        s = scores(q, q_pe, k_s.index(0), kpe_s.index(0), S)
        mbarrier.wait(v_full.index(0), 0)
        if dirty:
            drop_nan(v_s.index(0), facts.keys - start)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_free.index(0), count=1)
        mbarrier.arrive(q_free.index(HALF), count=1, pred=facts.tiles == 1)
        acc, m = begin(S, O, DV)
        last = gl.minimum(o_m + facts.limit, facts.keys - 1)  # last key that a row sees
        weight, m, _ = weigh(s, m, last - start, qk_scale, True)
        l = shares_of_sum(weight)
        words = packed(weight, v_s.dtype)
        at += 1
        while facts.tiles > 0:
            tiles, keys = facts.tiles, facts.keys
            full = gl.maximum(gl.minimum(keys, facts.limit + HALF * ROWS + 1), 0) // BLOCK_N  # tiles that all rows see
            for t in range(1, tiles - full):
                start -= BLOCK_N
                acc, m, l, words = step(
                    State(acc, m, l, words), at, t == tiles - 1, last - start, keys - start, dirty, buffers, bars,
                    qk_scale, S, True, HALF, STAGES,
                )  # fmt: skip
                at += 1
            for t in range(gl.maximum(tiles - full, 1), tiles):
                acc, m, l, words = step(
                    State(acc, m, l, words), at, t == tiles - 1, last, keys, dirty, buffers, bars,
                    qk_scale, S, False, HALF, STAGES,
                )  # fmt: skip
                at += 1
            # The item's last values are added under the next item's first scores. After the last item, scores of
            # what lies in memory are computed and dropped.
            written = facts
            done += 1
            mbarrier.wait(q_full.index(HALF), done & 1)
            loaded = buffers.facts.index(HALF).load(whole)
            thread_barrier()
            facts = facts_of(loaded)
            more = facts.tiles > 0
            start = (facts.tiles - 1) * BLOCK_N
            last = gl.minimum(o_m + facts.limit, facts.keys - 1)
            stage, before = at % STAGES, (at - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (at // STAGES) & 1, pred=more)
            s = scores(q, q_pe, k_s.index(stage), kpe_s.index(stage), S)
            acc = warpgroup_mma(unpacked(words, v_s.dtype, P), v_s.index(before), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.arrive(q_free.index(HALF), count=1, pred=facts.tiles == 1)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(before), count=1)
            finish(given, written, acc, m, l, HALF, S, HAS_PREVIOUS, HAS_NEXT, HAS_LSE)
            acc, m = begin(S, O, DV)
            weight, m, _ = weigh(s, m, last - start, qk_scale, True)
            l = shares_of_sum(weight)
            words = packed(weight, v_s.dtype)
            mbarrier.wait(v_full.index(stage), (at // STAGES) & 1, pred=more)
            if dirty:
                drop_nan(v_s.index(stage), facts.keys - start)
            at += 1


@gluon.jit(do_not_specialize=["rows", "blocks", "group", "items"])
def attention_kernel(
    Q, QPE, KV, KPE, OUT, LOW, LSE, COUNTER, WANTED, DIRTY, CU, LENS, STARTS_OF, STARTS, rows, blocks, H, group,
    items, head_stride, qk_scale, stride_ot, stride_oh, stride_lt, stride_lh,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_PREVIOUS: gl.constexpr, HAS_NEXT: gl.constexpr,
    HAS_LSE: gl.constexpr, REGS: gl.constexpr, OVERLAPS: gl.constexpr, IF_WANTED: gl.constexpr,
):  # fmt: skip
    """IF_WANTED: there is something to do only if WANTED is not 0."""
    DN: gl.constexpr = KV.block_shape[1]
    R: gl.constexpr = KPE.block_shape[1]
    dtype: gl.constexpr = KV.dtype
    q_s = gl.allocate_shared_memory(dtype, [2, ROWS, DN], Q.layout)
    qpe_s = gl.allocate_shared_memory(dtype, [2, ROWS, R], QPE.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DN], KV.layout)
    kpe_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, R], KPE.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DN], KV.layout)
    facts_s = gl.allocate_shared_memory(gl.int32, [2, FIELDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full, q_free = barrier_sets(2, (1, 1))
    k_full, k_free, v_full, v_free = barrier_sets(STAGES, (1, 2, 1, 2))
    fence_async_shared()
    if OVERLAPS:
        launch_dependents()
        wait_for_previous()
    if IF_WANTED:
        items = gl.where(gl.load(WANTED) != 0, items, 0)
    buffers = Buffers(q_s, qpe_s, k_s, kpe_s, v_s, facts_s)
    bars = Bars(q_full, q_free, k_full, k_free, v_full, v_free)
    strides = Strides(stride_ot, stride_oh, stride_lt, stride_lh)
    handed = Handed(OUT, LOW, LSE, DIRTY, rows, H, qk_scale, strides, buffers, bars)
    maps = Maps(Q, QPE, KV, KV, KPE)
    work = Items(COUNTER, CU, LENS, STARTS_OF, STARTS, rows, blocks, H, group, items, head_stride)
    gl.warp_specialize(
        [
            (attend_rows, (handed, 0, BLOCK_N, STAGES, HAS_PREVIOUS, HAS_NEXT, HAS_LSE)),
            (attend_rows, (handed, 1, BLOCK_N, STAGES, HAS_PREVIOUS, HAS_NEXT, HAS_LSE)),
            (produce, (maps, work, buffers, bars, BLOCK_N, STAGES, HAS_PREVIOUS)),
        ],
        [4, 1], [REGS, 24],
    )  # fmt: skip


def of_keys(f: SimpleNamespace, rows: int, block: int) -> dict[str, Described]:
    """Descriptors of queries and keys, by tiles of `block` keys."""
    heads, nope, rope, dim_v = dims_of(f)
    tokens = f.q.shape[0]
    # Of a single token the stride may be anything, which a tensor map does not take.
    pitch = f.q.stride[0] if tokens > 1 else heads * (nope + rope)
    queries = [tokens, (heads - 1) * f.q.stride[1] + nope + rope], [pitch, 1]
    columns, layout = heads * (nope + dim_v), gl.NVMMASharedLayout.get_default_for([ROWS.value, 64], gl.bfloat16)
    return {
        "Q": described("q", *queries, [ROWS.value, nope], layout),
        "QPE": described("q", *queries, [ROWS.value, rope], layout),
        "KV": described("KV", [rows, columns], [columns, 1], [block, nope], layout),
        "KPE": described("K_PE", [rows, rope], [rope, 1], [block, rope], layout),
    }


def heads_of_group(rows: int, itemsize: int, requests: int, dims: Dims) -> int:
    """Heads whose items come together, so that their keys and values stay in the L2 cache."""
    bytes_of_head = rows * itemsize * (dims.nope + dims.dim_v)
    if bytes_of_head * dims.heads <= _L2_BYTES * requests:
        return dims.heads
    return max(1, min(dims.heads, _L2_BYTES * requests // 2 // bytes_of_head))


def dims_of(f: SimpleNamespace) -> Dims:
    rope = f.kpe.shape[-1]
    return Dims(f.q.shape[1], f.q.shape[2] - rope, rope, f.out.shape[2])


def of_items(f: SimpleNamespace, chunk: int, rows: int, block_m: int, several: bool) -> dict[str, Any]:
    """Arguments of either attention of a chunk of `rows` rows, but for descriptors and what it counts with."""
    dims, requests, blocks = dims_of(f), f.cache_lens.shape[0], -(-f.max_q_len // block_m)
    lse, lse_strides = lse_of(f, several)
    tensors = given(OUT="out", LSE=lse, DIRTY="DIRTY", CU="cu_seqlens_q", LENS="cache_lens")
    found = of_chunk(chunk)
    return tensors | strides(f.out, stride_o="th") | {
        "STARTS_OF": found["ROWS"], "STARTS": found["STARTS"], "rows": rows, "blocks": blocks, "H": dims.heads,
        "group": heads_of_group(rows, f.q.dtype.itemsize, requests, dims), "items": requests * blocks * dims.heads,
        "head_stride": f.q.stride[1], "qk_scale": f.softmax_scale * math.log2(math.e),
        "stride_lt": lse_strides[0], "stride_lh": lse_strides[1], "HAS_LSE": lse != "out",
    }  # fmt: skip


def prepared(
    f: SimpleNamespace, chunk: int, rows: int, has_previous: bool, has_next: bool, sms: int, overlaps: bool,
    if_wanted: bool,
) -> Template:  # fmt: skip
    """The launch for a chunk of `rows` rows.

    LOW:     [T, H, Dv] in q's dtype, dense: what rounding took from out; there if there are several chunks
    COUNTER: int32: items taken by this kernel, by that of three warpgroups, and whether that one failed; 0 at first
    DIRTY:   whether values may be NaN
    if_wanted: there is something to do only where that of three failed
    """
    several = has_previous or has_next
    arguments = of_keys(f, rows, BLOCK_N) | of_items(f, chunk, rows, BLOCK_M.value, several) | {
        **given(LOW="LOW" if several else "out", COUNTER="COUNTER"),
        "WANTED": Given("COUNTER", row=FAILED if if_wanted else 0),  # not looked at but if wanted
        "BLOCK_N": BLOCK_N, "STAGES": STAGES, "HAS_PREVIOUS": has_previous, "HAS_NEXT": has_next, "REGS": REGISTERS,
        "OVERLAPS": overlaps, "IF_WANTED": if_wanted,
    }  # fmt: skip
    grid = (min(arguments["items"], sms),)
    return Template(attention_kernel, grid, arguments, num_warps=4, launch_pdl=overlaps)
