"""What both attention kernels of MLA prefill on Hopper share: work tiles (request, head, m_block) and their metadata.

A producer warp takes work tiles, and publishes each to the consumers in shared memory. The producers differ: with two
warpgroups, copies of K and V alternate in whole key blocks; with three, V is copied in halves, each after the K of the
next block, and m_blocks are aligned to the last query.
"""

import math
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from ...versions import thread_barrier

LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2))
ROWS_PER_WARPGROUP = gl.constexpr(64)  # queries of one warpgroup
TILE_INFO_FIELDS = gl.constexpr(8)


class TensorMaps(NamedTuple):
    """Tensor maps of all inputs."""

    Q: gl.tensor
    Q_PE_MAP: gl.tensor
    KEYS: gl.tensor
    VALUES: gl.tensor
    KPE_MAP: gl.tensor


class WorkQueue(NamedTuple):
    """Arguments of the producer: the queue of work tiles."""

    WORK_COUNTER: gl.tensor  # of work tiles taken
    CU_SEQLENS_Q: gl.tensor
    CACHE_LENS: gl.tensor
    CHUNK_ROW_OFFSETS: gl.tensor  # first row in the chunk of each request
    CACHE_OFFSETS: gl.tensor  # position of its first key
    num_rows: gl.tensor  # of the chunk
    num_m_blocks: gl.tensor  # per request, at most
    H: gl.tensor
    heads_per_l2_group: gl.tensor  # heads whose work tiles are scheduled together
    num_work_tiles: gl.tensor
    head_stride: gl.tensor  # of q


class SmemBuffers(NamedTuple):
    """Shared memory: each warpgroup's queries, stages of K and V, each warpgroup's work tile info."""

    q: gl.shared_memory_descriptor
    q_pe: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    k_pe: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    tile_info: gl.shared_memory_descriptor


class Mbarriers(NamedTuple):
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    v_empty: gl.shared_memory_descriptor


class Strides(NamedTuple):
    out_t: gl.tensor
    out_h: gl.tensor
    lse_t: gl.tensor
    lse_h: gl.tensor


class RequestShape(NamedTuple):
    """The shape of a work tile's request."""

    q_begin: gl.tensor  # its first row of q
    num_queries: gl.tensor
    chunk_row: gl.tensor  # its first row of the chunk
    num_keys: gl.tensor  # in the chunk
    causal_offset: gl.tensor  # position of query 0 less that of the chunk's first key


class WorkTileInfo(NamedTuple):
    """A work tile as published to the consumers. Which num_n_blocks ends the loop, each kernel's `producer` says."""

    q_row: gl.tensor  # first row of q
    valid_row_bound: gl.tensor  # end of the valid queries; with three warpgroups the first valid one
    causal_limit: gl.tensor  # last visible key of query 0
    num_keys: gl.tensor
    num_n_blocks: gl.tensor
    head: gl.tensor


# Work tiles: their info in shared memory, their order, their request.


@gluon.jit
def element_as_scalar(x, i: gl.constexpr):
    """Returns one field of a work tile's info, which every thread holds in full."""
    o = gl.arange(0, TILE_INFO_FIELDS, x.type.layout)
    return gl.sum(gl.where(o == i, x, 0), 0)


@gluon.jit
def publish_work_tile(SMEM, q_row, valid_row_bound, causal_limit, num_keys, num_n_blocks, head):
    """Stores a work tile's info in shared memory, in the order of WorkTileInfo."""
    REPLICATED_LAYOUT: gl.constexpr = gl.BlockedLayout([TILE_INFO_FIELDS], [32], [1], [0])
    o = gl.arange(0, TILE_INFO_FIELDS, REPLICATED_LAYOUT)
    x = gl.where(
        o == 0,
        q_row,
        gl.where(
            o == 1,
            valid_row_bound,
            gl.where(o == 2, causal_limit, gl.where(o == 3, num_keys, gl.where(o == 4, num_n_blocks, head))),
        ),
    )
    SMEM.store(x.to(gl.int32))
    thread_barrier()  # the thread that arrives is not the one that stored


@gluon.jit
def unpack_published_work_tile(info_fields):
    """Returns a work tile's WorkTileInfo, as it was published."""
    q_row, valid_row_bound, causal_limit = (
        element_as_scalar(info_fields, 0), element_as_scalar(info_fields, 1), element_as_scalar(info_fields, 2),
    )  # fmt: skip
    return WorkTileInfo(
        q_row, valid_row_bound, causal_limit, element_as_scalar(info_fields, 3), element_as_scalar(info_fields, 4),
        element_as_scalar(info_fields, 5),
    )  # fmt: skip


@gluon.jit
def request_head_and_m_block_of_work_tile(i_work_tile, num_m_blocks, H, heads_per_l2_group):
    """Returns (request, head, m_block): late blocks first, within groups of heads."""
    i_request = i_work_tile // (num_m_blocks * H)
    i_in_request = i_work_tile % (num_m_blocks * H)
    first_head = i_in_request // (num_m_blocks * heads_per_l2_group) * heads_per_l2_group
    group_size = gl.minimum(H - first_head, heads_per_l2_group)
    i_in_request = i_in_request % (num_m_blocks * heads_per_l2_group)
    return i_request, first_head + i_in_request % group_size, num_m_blocks - 1 - i_in_request // group_size


@gluon.jit
def load_request_shape(work_queue, i_request):
    """Loads the RequestShape of a request."""
    q_begin = gl.load(work_queue.CU_SEQLENS_Q + i_request).to(gl.int32)
    num_queries = gl.load(work_queue.CU_SEQLENS_Q + i_request + 1).to(gl.int32) - q_begin
    chunk_row = gl.load(work_queue.CHUNK_ROW_OFFSETS + i_request).to(gl.int32)
    num_keys = (
        gl.minimum(gl.load(work_queue.CHUNK_ROW_OFFSETS + i_request + 1).to(gl.int32), work_queue.num_rows) - chunk_row
    )
    causal_offset = (
        gl.load(work_queue.CACHE_LENS + i_request).to(gl.int64)
        - gl.load(work_queue.CACHE_OFFSETS + i_request).to(gl.int64)
    ).to(gl.int32)
    return RequestShape(q_begin, num_queries, chunk_row, num_keys, causal_offset)


# Steps of the main loop that both kernels share.


@gluon.jit
def start_qk(q, q_pe, k, k_pe, SCORE_LAYOUT: gl.constexpr):
    """Starts q · [k | k_pe]ᵀ; returns the scores in flight."""
    zero = gl.full([q.shape[0], k.shape[0]], 0.0, gl.float32, SCORE_LAYOUT)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_pe, k_pe.permute((1, 0)), s, is_async=True)


@gluon.jit
def zero_oob_and_nan_in_smem_v_and_fence(smem_v, num_valid):
    """Zeroes invalid rows and NaN in a tile of V: P = 0 does not hide NaN.

    A NaN of the request's own later tokens is zeroed too; queries that see such a token still get NaN from its key.
    Both warpgroups may do so at once: they write the same.
    """
    CHUNK_ROWS: gl.constexpr = 16
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    o_n = gl.arange(0, CHUNK_ROWS, gl.SliceLayout(1, LOAD_LAYOUT))
    for i in gl.static_range(smem_v.shape[0] // CHUNK_ROWS):
        x = smem_v.slice(i * CHUNK_ROWS, CHUNK_ROWS).load(LOAD_LAYOUT)
        is_valid = (x == x) & (o_n < num_valid - i * CHUNK_ROWS)[:, None]
        smem_v.slice(i * CHUNK_ROWS, CHUNK_ROWS).store(gl.where(is_valid, x, 0.0).to(smem_v.dtype))
    fence_async_shared()


@gluon.jit
def any_nonzero(FLAGS, num_flags):
    """Whether one of num_flags bytes is not 0."""
    CHUNK: gl.constexpr = 2048
    L: gl.constexpr = gl.BlockedLayout([16], [32], [4], [0])
    o = gl.arange(0, CHUNK, L)
    any_flag = gl.full([CHUNK], 0, gl.int8, L)
    for i in range(0, num_flags, CHUNK):
        any_flag = any_flag | gl.load(FLAGS + i + o, mask=i + o < num_flags, other=0)
    return gl.max(any_flag.to(gl.int32), 0) != 0


@gluon.jit
def init_acc_and_max(SCORE_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, DV: gl.constexpr):
    """Returns (acc_o, row_max) before a work tile's first key block."""
    row_max = gl.full([ROWS_PER_WARPGROUP], float("-inf"), gl.float32, gl.SliceLayout(1, SCORE_LAYOUT))
    return gl.full([ROWS_PER_WARPGROUP, DV], 0.0, gl.float32, ACC_LAYOUT), row_max
