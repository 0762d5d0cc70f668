"""Ragged causal attention of new tokens to one chunk of up-projected keys and values (MLA prefill, last stage), sm_90.

What it computes, and from what, is told in the Triton file of the same name. Here a persistent block runs three parts:
a producer warp that takes items (request, head, 128 queries) from a counter, longest first, and copies their tiles by
TMA; and two warpgroups of 64 queries each, whose scores of the next tile run while the values of the last are added.

Tiles of keys go from the last to the first, so that the masked ones come first and the long loop needs no mask.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....host.launch import TENSOR, Template
from ...versions import thread_barrier, tma_load
from ..parts.ring import launch_dependents, wait_for_previous
from ..parts.softmax import packed, shares_of_sum, unpacked, weigh
from ..parts.tensor_maps import tensor_map

BLOCK_N, STAGES, REGISTERS = 128, 2, 240
_L2_BYTES = 32 << 20  # keys and values that stay in the L2 cache for a while


class Dims(NamedTuple):
    heads: int
    nope: int
    rope: int
    dim_v: int


LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2))
ROWS = gl.constexpr(64)  # queries of one warpgroup
BLOCK_M = gl.constexpr(128)  # queries of an item
FIELDS = gl.constexpr(8)


@gluon.jit
def field(facts, i: gl.constexpr):
    """One number of an item's facts, which every thread holds whole."""
    o = gl.arange(0, FIELDS, facts.type.layout)
    return gl.sum(gl.where(o == i, facts, 0), 0)


@gluon.jit
def publish(FACTS, a, b, c, d, e, f):
    """Write an item's facts where the consumers read them: first row of q, queries, last key that query 0 sees, keys,
    tiles (0: there are no more items), head."""
    whole: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    o = gl.arange(0, FIELDS, whole)
    x = gl.where(o == 0, a, gl.where(o == 1, b, gl.where(o == 2, c, gl.where(o == 3, d, gl.where(o == 4, e, f)))))
    FACTS.store(x.to(gl.int32))
    thread_barrier()  # the thread that arrives is not the one that has stored


@gluon.jit
def place_of_item(item, blocks, H, group):
    """(request, head, query block): late blocks first, within groups of heads."""
    b = item // (blocks * H)
    rest = item % (blocks * H)
    first_head = rest // (blocks * group) * group
    width = gl.minimum(H - first_head, group)
    rest = rest % (blocks * group)
    return b, first_head + rest % width, blocks - 1 - rest // width


@gluon.jit
def produce(
    Q, QPE, KV, KPE, COUNTER, CU, LENS, STARTS_OF, STARTS, rows, blocks, H, group, items, head_stride, buffers, bars,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_PREVIOUS: gl.constexpr,
):  # fmt: skip
    q_s, qpe_s, k_s, kpe_s, v_s, facts_s = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    DN: gl.constexpr = q_s.shape[2]
    R: gl.constexpr = qpe_s.shape[2]
    bits: gl.constexpr = q_s.dtype.primitive_bitwidth // 8
    item = gl.program_id(0)
    done = 0  # items given to the consumers
    at = 0  # tiles given
    while item < items:
        after = item
        b, head, block = place_of_item(item, blocks, H, group)
        q0 = gl.load(CU + b).to(gl.int32)
        queries = gl.load(CU + b + 1).to(gl.int32) - q0
        i0 = block * BLOCK_M
        first_row = gl.load(STARTS_OF + b).to(gl.int32)
        keys = gl.minimum(gl.load(STARTS_OF + b + 1).to(gl.int32), rows) - first_row
        ahead = (gl.load(LENS + b).to(gl.int64) - gl.load(STARTS + b).to(gl.int64)).to(gl.int32)
        seen = gl.minimum(keys, gl.minimum(i0 + BLOCK_M, queries) + ahead)
        wanted = i0 < queries
        if HAS_PREVIOUS:
            wanted = wanted & (seen > 0)
        if wanted:
            # An item without a key gets a tile that is masked whole: consumers know no other items.
            tiles = gl.maximum((seen + BLOCK_N - 1) // BLOCK_N, 1)
            column = head * (2 * DN)
            for i in range(tiles):
                row = first_row + (tiles - 1 - i) * BLOCK_N
                stage = at % STAGES
                phase = (at // STAGES) & 1
                if i == tiles - 1:  # no earlier: whoever is done first takes the next item
                    after = gl.atomic_add(COUNTER, 1, sem="relaxed") + gl.num_programs(0)
                mbarrier.wait(k_free.index(stage), phase ^ 1)
                mbarrier.expect(k_full.index(stage), BLOCK_N * (DN + R) * bits)
                tma_load(KV, [row, column], k_full.index(stage), k_s.index(stage))
                tma_load(KPE, [row, 0], k_full.index(stage), kpe_s.index(stage))
                if i == 0:
                    for half in gl.static_range(2):
                        bar, first = q_full.index(half), q0 + i0 + half * ROWS
                        mbarrier.wait(q_free.index(half), (done & 1) ^ 1)
                        publish(facts_s.index(half), q0 + i0, queries - i0, i0 + ahead, keys, tiles, head)
                        mbarrier.expect(bar, ROWS * (DN + R) * bits)
                        tma_load(Q, [first, head * head_stride], bar, q_s.index(half))
                        tma_load(QPE, [first, head * head_stride + DN], bar, qpe_s.index(half))
                mbarrier.wait(v_free.index(stage), phase ^ 1)
                mbarrier.expect(v_full.index(stage), BLOCK_N * DN * bits)
                tma_load(KV, [row, column + DN], v_full.index(stage), v_s.index(stage))
                at += 1
            done += 1
        else:
            after = gl.atomic_add(COUNTER, 1, sem="relaxed") + gl.num_programs(0)
        item = after
    for half in gl.static_range(2):
        mbarrier.wait(q_free.index(half), (done & 1) ^ 1)
        publish(facts_s.index(half), 0, 0, 0, 0, 0, 0)
        mbarrier.arrive(q_full.index(half), count=1)


@gluon.jit
def scores(q, q_pe, k, k_pe, S: gl.constexpr):
    """Start q · [k | k_pe]ᵀ."""
    zero = gl.full([q.shape[0], k.shape[0]], 0.0, gl.float32, S)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_pe, k_pe.permute((1, 0)), s, is_async=True)


@gluon.jit
def drop_nan(v, keys):
    """Rows of no key and NaN become 0 in a tile of values: a weight of 0 does not hide NaN.

    A NaN of the request's own later tokens goes too; whoever sees such a token still gets NaN from its key. Both
    warpgroups may do so at once: they write the same.
    """
    PART: gl.constexpr = 16
    read: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_n = gl.arange(0, PART, gl.SliceLayout(1, read))
    for i in gl.static_range(v.shape[0] // PART):
        x = v.slice(i * PART, PART).load(read)
        real = (x == x) & (o_n < keys - i * PART)[:, None]
        v.slice(i * PART, PART).store(gl.where(real, x, 0.0).to(v.dtype))
    fence_async_shared()


@gluon.jit
def step(
    state, at, is_last, last, keys, dirty, buffers, bars, q, q_pe, qk_scale, S: gl.constexpr, MASKED: gl.constexpr,
    HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Scores of tile `at`, while the values of the tile before are added; then its weights."""
    acc, m, l, words = state
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=acc.type.layout, k_width=2)
    _, _, k_s, kpe_s, v_s, _ = buffers
    _, q_free, k_full, k_free, v_full, v_free = bars
    stage, before = at % STAGES, (at - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (at // STAGES) & 1)
    s = scores(q, q_pe, k_s.index(stage), kpe_s.index(stage), S)
    acc = warpgroup_mma(unpacked(words, v_s.dtype, P), v_s.index(before), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    mbarrier.arrive(k_free.index(stage), count=1)
    mbarrier.arrive(q_free.index(HALF), count=1, pred=is_last)
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
    return acc, m, l, words


@gluon.jit
def any_set(FLAGS, n):
    """Whether one of n bytes is not 0."""
    PART: gl.constexpr = 2048
    L: gl.constexpr = gl.BlockedLayout([16], [32], [4], [0])
    o = gl.arange(0, PART, L)
    found = gl.full([PART], 0, gl.int8, L)
    for i in range(0, n, PART):
        found = found | gl.load(FLAGS + i + o, mask=i + o < n, other=0)
    return gl.max(found.to(gl.int32), 0) != 0


@gluon.jit
def begin(S: gl.constexpr, O: gl.constexpr, DV: gl.constexpr):
    """(acc, m) before an item's first tile."""
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    return gl.full([ROWS, DV], 0.0, gl.float32, O), m


@gluon.jit
def places(OUT, LOW, LSE, H, facts, strides, HALF: gl.constexpr, S: gl.constexpr, O: gl.constexpr, DV: gl.constexpr):
    """Pointers of an item's out, low and lse; masks of out and lse."""
    stride_ot, stride_oh, stride_lt, stride_lh = strides
    row, queries, head = facts
    head = head.to(gl.int64)
    o_v = gl.arange(0, DV, gl.SliceLayout(0, O))
    o_mo = gl.arange(0, ROWS, gl.SliceLayout(1, O)) + HALF * ROWS
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, S)) + HALF * ROWS
    t, t_lse = (row + o_mo).to(gl.int64), (row + o_m).to(gl.int64)
    p_out = OUT + t[:, None] * stride_ot + head * stride_oh + o_v[None, :]
    p_low = LOW + (t * H + head)[:, None] * DV + o_v[None, :]
    m_out = (o_mo < queries)[:, None] & (o_v >= 0)[None, :]
    return p_out, p_low, LSE + t_lse * stride_lt + head * stride_lh, m_out, o_m < queries


@gluon.jit
def finish(
    OUT, LOW, LSE, H, facts, strides, acc, m, l, HALF: gl.constexpr, S: gl.constexpr,
    HAS_PREVIOUS: gl.constexpr, HAS_NEXT: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Write an item's result, merged with what the chunk before left."""
    O: gl.constexpr = acc.type.layout
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    p_out, p_low, p_lse, m_out, m_lse = places(OUT, LOW, LSE, H, facts, strides, HALF, S, O, acc.shape[1])
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
    out = acc.to(OUT.dtype.element_ty)
    gl.store(p_out, out, mask=m_out)
    if HAS_NEXT:
        gl.store(p_low, (acc - out.to(gl.float32)).to(LOW.dtype.element_ty), mask=m_out)
    if HAS_LSE:
        gl.store(p_lse, gl.where(nothing, float("-inf"), (m + gl.log2(l)) * LN2), mask=m_lse)


@gluon.jit
def attend_rows(
    OUT, LOW, LSE, DIRTY, rows, H, qk_scale, strides, buffers, bars,
    HALF: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, HAS_PREVIOUS: gl.constexpr,
    HAS_NEXT: gl.constexpr, HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A warpgroup: 64 queries of every item of this block."""
    q_s, qpe_s, k_s, kpe_s, v_s, facts_s = buffers
    q_full, q_free, k_full, k_free, v_full, v_free = bars
    DV: gl.constexpr = v_s.shape[2]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DV, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    whole: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [4], [0])
    q, q_pe = q_s.index(HALF), qpe_s.index(HALF)
    o_m = gl.arange(0, ROWS, gl.SliceLayout(1, S)) + HALF * ROWS

    dirty = any_set(DIRTY, rows)
    at = 0  # tiles begun
    done = 0  # items begun
    mbarrier.wait(q_full.index(HALF), 0)
    facts = facts_s.index(HALF).load(whole)
    thread_barrier()  # one thread will say that they may be written anew
    row, queries, limit = field(facts, 0), field(facts, 1), field(facts, 2)
    keys, tiles, head = field(facts, 3), field(facts, 4), field(facts, 5)
    if tiles > 0:
        start = (tiles - 1) * BLOCK_N
        mbarrier.wait(k_full.index(0), 0)
        s = scores(q, q_pe, k_s.index(0), kpe_s.index(0), S)
        mbarrier.wait(v_full.index(0), 0)
        if dirty:
            drop_nan(v_s.index(0), keys - start)
        s = warpgroup_mma_wait(0, [s])
        mbarrier.arrive(k_free.index(0), count=1)
        mbarrier.arrive(q_free.index(HALF), count=1, pred=tiles == 1)
        acc, m = begin(S, O, DV)
        last = gl.minimum(o_m + limit, keys - 1)  # last key that a row sees
        weight, m, _ = weigh(s, m, last - start, qk_scale, True)
        l = shares_of_sum(weight)
        words = packed(weight, v_s.dtype)
        at += 1
        while tiles > 0:
            full = gl.maximum(gl.minimum(keys, limit + HALF * ROWS + 1), 0) // BLOCK_N  # tiles that all rows see
            for t in range(1, tiles - full):
                start -= BLOCK_N
                acc, m, l, words = step(
                    (acc, m, l, words), at, t == tiles - 1, last - start, keys - start, dirty, buffers, bars, q, q_pe,
                    qk_scale, S, True, HALF, STAGES,
                )  # fmt: skip
                at += 1
            for t in range(gl.maximum(tiles - full, 1), tiles):
                acc, m, l, words = step(
                    (acc, m, l, words), at, t == tiles - 1, last, keys, dirty, buffers, bars, q, q_pe,
                    qk_scale, S, False, HALF, STAGES,
                )  # fmt: skip
                at += 1
            # The item's last values are added under the next item's first scores. After the last item, scores of
            # what lies in memory are computed and dropped.
            written = (row, queries, head)
            done += 1
            mbarrier.wait(q_full.index(HALF), done & 1)
            facts = facts_s.index(HALF).load(whole)
            thread_barrier()
            row, queries, limit = field(facts, 0), field(facts, 1), field(facts, 2)
            keys, tiles, head = field(facts, 3), field(facts, 4), field(facts, 5)
            more = tiles > 0
            start = (tiles - 1) * BLOCK_N
            last = gl.minimum(o_m + limit, keys - 1)
            stage, before = at % STAGES, (at - 1) % STAGES
            mbarrier.wait(k_full.index(stage), (at // STAGES) & 1, pred=more)
            s = scores(q, q_pe, k_s.index(stage), kpe_s.index(stage), S)
            acc = warpgroup_mma(unpacked(words, v_s.dtype, P), v_s.index(before), acc, is_async=True)
            s = warpgroup_mma_wait(1, [s])
            mbarrier.arrive(k_free.index(stage), count=1)
            mbarrier.arrive(q_free.index(HALF), count=1, pred=tiles == 1)
            acc = warpgroup_mma_wait(0, [acc])
            mbarrier.arrive(v_free.index(before), count=1)
            finish(OUT, LOW, LSE, H, written, strides, acc, m, l, HALF, S, HAS_PREVIOUS, HAS_NEXT, HAS_LSE)
            acc, m = begin(S, O, DV)
            weight, m, _ = weigh(s, m, last - start, qk_scale, True)
            l = shares_of_sum(weight)
            words = packed(weight, v_s.dtype)
            mbarrier.wait(v_full.index(stage), (at // STAGES) & 1, pred=more)
            if dirty:
                drop_nan(v_s.index(stage), keys - start)
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
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_free.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_free.index(i), count=2)
    fence_async_shared()
    if OVERLAPS:
        launch_dependents()
        wait_for_previous()
    if IF_WANTED:
        items = gl.where(gl.load(WANTED) != 0, items, 0)
    buffers = (q_s, qpe_s, k_s, kpe_s, v_s, facts_s)
    bars = (q_full, q_free, k_full, k_free, v_full, v_free)
    strides = (stride_ot, stride_oh, stride_lt, stride_lh)
    gl.warp_specialize(
        [
            (attend_rows, (
                OUT, LOW, LSE, DIRTY, rows, H, qk_scale, strides, buffers, bars,
                0, BLOCK_N, STAGES, HAS_PREVIOUS, HAS_NEXT, HAS_LSE,
            )),
            (attend_rows, (
                OUT, LOW, LSE, DIRTY, rows, H, qk_scale, strides, buffers, bars,
                1, BLOCK_N, STAGES, HAS_PREVIOUS, HAS_NEXT, HAS_LSE,
            )),
            (produce, (
                Q, QPE, KV, KPE, COUNTER, CU, LENS, STARTS_OF, STARTS, rows, blocks, H, group, items, head_stride,
                buffers, bars, BLOCK_N, STAGES, HAS_PREVIOUS,
            )),
        ],
        [4, 1], [REGS, 24],
    )  # fmt: skip


def descriptors(q: Any, kv: Any, k_pe: Any, rows: int, tokens: int, q_strides: tuple[int, int], dims: Dims) -> tuple:
    """Of the kernel: of q's and of the keys' parts."""
    stride_t, stride_h = q_strides
    heads, nope, rope, dim_v = dims
    layout = gl.NVMMASharedLayout.get_default_for([ROWS.value, 64], gl.bfloat16)
    columns, kv_columns = (heads - 1) * stride_h + nope + rope, heads * (nope + dim_v)
    return (
        tensor_map(q, [tokens, columns], [stride_t, 1], [ROWS.value, nope], layout),
        tensor_map(q, [tokens, columns], [stride_t, 1], [ROWS.value, rope], layout),
        tensor_map(kv, [rows, kv_columns], [kv_columns, 1], [BLOCK_N, nope], layout),
        tensor_map(k_pe, [rows, rope], [rope, 1], [BLOCK_N, rope], layout),
    )


def heads_of_group(rows: int, itemsize: int, requests: int, dims: Dims) -> int:
    """Heads whose items come together, so that their keys and values stay in the L2 cache."""
    bytes_of_head = rows * itemsize * (dims.nope + dims.dim_v)
    if bytes_of_head * dims.heads <= _L2_BYTES * requests:
        return dims.heads
    return max(1, min(dims.heads, _L2_BYTES * requests // 2 // bytes_of_head))


def prepared(
    call: Any, rows: int, dims: Dims, lse_strides: tuple[int, int] | None, has_previous: bool, has_next: bool, sms: int,
    overlaps: bool, if_wanted: bool,
) -> Template:  # fmt: skip
    """The launch for a chunk of `rows` rows and calls with the facts of this one.

    Its tensors: out, low, lse, counter, wanted, dirty, cu_seqlens_q, cache_lens, row and cache offsets of the chunk,
    low:    [T, H, Dv] in q's dtype, dense: what rounding took from out; any tensor where there is one chunk only
    lse:    [T, H] fp32 if lse_strides are given, else any tensor
    counter, wanted, dirty:  [1] int32: 0; with if_wanted: 0 if all is done already; whether values may be NaN
    """
    requests, blocks = call.cache_lens.shape[0], -(-call.max_q_len // BLOCK_M.value)
    items = requests * blocks * dims.heads
    group = heads_of_group(rows, call.q.element_size(), requests, dims)
    arguments = (
        *[TENSOR] * 10, rows, blocks, dims.heads, group, items, call.q.stride(1),
        call.softmax_scale * math.log2(math.e), *call.out.stride()[:2], *(lse_strides or (0, 0)),
        BLOCK_N, STAGES, has_previous, has_next, lse_strides is not None, REGISTERS, overlaps,
        if_wanted,
    )  # fmt: skip
    return Template(attention_kernel, (min(items, sms),), arguments, num_warps=4, launch_pdl=overlaps)
