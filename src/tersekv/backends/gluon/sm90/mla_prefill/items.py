"""What both attentions of MLA prefill on Hopper do alike: items (request, head, block of queries) and their tiles.

A producer warp takes items, and tells consumers of each through shared memory. The producers themselves are two: where
two warpgroups share tiles, the copies of keys and values take turns and whole tiles are given; where three do, values
come in halves, each behind the keys of the next tile, and blocks of queries are laid from the last one on.
"""

import math
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ...versions import thread_barrier

LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2))
ROWS = gl.constexpr(64)  # queries of one warpgroup
FIELDS = gl.constexpr(8)


class Maps(NamedTuple):
    """Tensor maps."""

    Q: gl.tensor
    QPE: gl.tensor
    KEYS: gl.tensor
    VALUES: gl.tensor
    KPE: gl.tensor


class Items(NamedTuple):
    """What the producer takes items by."""

    COUNTER: gl.tensor  # of the items that are taken
    CU: gl.tensor
    LENS: gl.tensor
    STARTS_OF: gl.tensor  # rows of the chunk at which requests begin
    STARTS: gl.tensor  # their first keys' positions
    rows: gl.tensor  # of the chunk
    blocks: gl.tensor  # of queries of a request, at most
    H: gl.tensor
    group: gl.tensor  # heads whose items come together
    items: gl.tensor
    head_stride: gl.tensor  # of q


class Buffers(NamedTuple):
    """In shared memory: queries of each warpgroup, rings of keys and values, facts of an item for each warpgroup."""

    q: gl.shared_memory_descriptor
    q_pe: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_pe: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    facts: gl.shared_memory_descriptor


class Bars(NamedTuple):
    q_full: gl.shared_memory_descriptor
    q_free: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_free: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_free: gl.shared_memory_descriptor


class Strides(NamedTuple):
    out_t: gl.tensor
    out_h: gl.tensor
    lse_t: gl.tensor
    lse_h: gl.tensor


class Request(NamedTuple):
    """What an item's request says."""

    q0: gl.tensor  # its first row of q
    queries: gl.tensor
    first_row: gl.tensor  # of the chunk
    keys: gl.tensor  # in the chunk
    ahead: gl.tensor  # position of query 0 less that of the chunk's first key


class Facts(NamedTuple):
    """What consumers are told of an item. tiles: of keys; how its end is told, each kernel's `publish` says."""

    row: gl.tensor  # first row of q
    rows: gl.tensor  # queries that there are, or the block's first one that there is
    limit: gl.tensor  # last key that query 0 sees
    keys: gl.tensor
    tiles: gl.tensor
    head: gl.tensor


@gluon.jit
def field(facts, i: gl.constexpr):
    """One number of an item's facts, which every thread holds whole."""
    o = gl.arange(0, FIELDS, facts.type.layout)
    return gl.sum(gl.where(o == i, facts, 0), 0)


@gluon.jit
def publish(FACTS, a, b, c, d, e, f):
    """Write an item's Facts where the consumers read them, in that order."""
    whole: gl.constexpr = gl.BlockedLayout([FIELDS], [32], [1], [0])
    o = gl.arange(0, FIELDS, whole)
    x = gl.where(o == 0, a, gl.where(o == 1, b, gl.where(o == 2, c, gl.where(o == 3, d, gl.where(o == 4, e, f)))))
    FACTS.store(x.to(gl.int32))
    thread_barrier()  # the thread that arrives is not the one that has stored


@gluon.jit
def facts_of(facts):
    """An item's Facts, as they were published."""
    row, rows, limit = field(facts, 0), field(facts, 1), field(facts, 2)
    return Facts(row, rows, limit, field(facts, 3), field(facts, 4), field(facts, 5))


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
def request_of(items, b):
    """The Request b."""
    q0 = gl.load(items.CU + b).to(gl.int32)
    queries = gl.load(items.CU + b + 1).to(gl.int32) - q0
    first_row = gl.load(items.STARTS_OF + b).to(gl.int32)
    keys = gl.minimum(gl.load(items.STARTS_OF + b + 1).to(gl.int32), items.rows) - first_row
    ahead = (gl.load(items.LENS + b).to(gl.int64) - gl.load(items.STARTS + b).to(gl.int64)).to(gl.int32)
    return Request(q0, queries, first_row, keys, ahead)


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
