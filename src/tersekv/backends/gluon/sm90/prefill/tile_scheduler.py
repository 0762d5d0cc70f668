"""Tile scheduler of prefill: finds a CTA's work tiles from lengths on the device; one kernel for every batch.

A work tile is a block of a request's query rows: TOKENS_PER_TILE tokens, HEADS_PER_TILE heads of each. Work tiles are
ordered by request, in each from the last m_block to the first: long ones come early. A CTA begins with the one of its
own index and takes the next by an atomic addition before it copies the last cached block of the one at hand. Outputs
do not depend on which CTA computes them. Simulated with 132 CTAs, the busiest has 1.02 times the mean load for 8
requests of 1024 tokens and 1.03 for one; in fixed rounds, each shifted by two elevenths of the CTAs, 1.11 and 1.33.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.tile_scheduler import add
from . import config

TILE_INFO_FIELDS = gl.constexpr(16)
I_CONVERTER, I_SECOND_CONSUMER = gl.constexpr(1), gl.constexpr(2)  # readers of work tiles, after the first consumer
NUM_READERS = gl.constexpr(3)
COLUMN_SHIFT = gl.constexpr(config.COLUMN_SHIFT)
PAGE_IDS_ROW = NUM_READERS  # after their work tiles: pages of the tile being copied
REQUESTS_PER_STEP = gl.constexpr(32)  # requests searched at once

# The counter of work tiles taken needs no initialization, as decode's counters of splits (`decode/combine`): 8 bytes,
# whose upper 40 bits mark the lower 24 as a count. Any other value is left over, and counts as 0. The mark, too, begins
# as an fp32 NaN that arithmetic does not produce; it is not that of decode's counters, which may have lain there.
_MARK = 0x7FB6D2F0A7
COUNTER_ZERO = gl.constexpr(_MARK << 24)
_INIT_COUNTER_PTX = gl.constexpr(
    """{
    .reg .pred first, other;
    .reg .b64 value, mark, was;
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 first, lane, 0;
    mov.b64 value, 0;
    @first ld.relaxed.gpu.global.b64 value, [$1];
    shr.u64 mark, value, 24;
    setp.ne.and.u64 other, mark, MARK, first;
    @other atom.relaxed.gpu.global.cas.b64 was, [$1], value, ZERO;
    mov.u32 $0, 0;
    }""".replace("MARK", hex(_MARK)).replace("ZERO", hex(_MARK << 24))
)
# One lane counts, if the condition holds; all get its count. Apart, so that other work lies between.
_COUNT_PTX = gl.constexpr(
    """{
    .reg .pred counts;
    .reg .b32 lane;
    mov.u32 lane, %laneid;
    setp.eq.u32 counts, lane, 0;
    setp.ne.and.b32 counts, $2, 0, counts;
    mov.b32 $0, 0;
    @counts atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
    }"""
)
_COUNT_OF_LANE_0_PTX = gl.constexpr(
    """{
    .reg .b32 count;
    and.b32 count, $1, 0xffffff;
    shfl.sync.idx.b32 $0, count, 0, 31, 0xffffffff;
    }"""
)


class WorkTile(NamedTuple):
    """A work tile, as published to the warpgroups."""

    q_row: gl.tensor  # first token's row of q
    num_tokens_left: gl.tensor  # tokens of the request from q_row on
    causal_limit: gl.tensor  # last key that the first token sees
    key_end: gl.tensor  # end of the keys that any token sees
    num_n_blocks: gl.tensor  # 0: no more work tiles
    n_block_end: gl.tensor  # past the last n_block
    key_begin: gl.tensor  # first key that any token sees
    head_tile: gl.tensor  # tile of query heads
    i_request: gl.tensor


class CachedKeyRange(NamedTuple):
    """The cached keys of a work tile with new K and V; fields as of a WorkTile."""

    causal_limit: gl.tensor
    key_end: gl.tensor
    num_n_blocks: gl.tensor  # may be 0
    n_block_end: gl.tensor
    key_begin: gl.tensor


# ---- which work tiles ----


@gluon.jit
def load_q_begin(CU_SEQLENS_Q_OR_SEQLEN_Q, o_b, m_b):
    """Loads the first query row of requests o_b, 0 outside m_b. Without CU_SEQLENS_Q [B + 1]: rows per request."""
    if CU_SEQLENS_Q_OR_SEQLEN_Q.dtype.is_ptr():
        return gl.load(CU_SEQLENS_Q_OR_SEQLEN_Q + o_b, mask=m_b, other=0).to(gl.int32)
    else:
        return gl.where(m_b, o_b * CU_SEQLENS_Q_OR_SEQLEN_Q, 0).to(gl.int32)


@gluon.jit
def load_num_m_blocks(CU_SEQLENS_Q, B, first_request, cfg: gl.constexpr):
    """Returns num_m_blocks of the requests from `first_request` on: [REQUESTS_PER_STEP]."""
    o_b = first_request + gl.arange(0, REQUESTS_PER_STEP, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    m_b = o_b < B
    seqlen_q = load_q_begin(CU_SEQLENS_Q, o_b + 1, m_b) - load_q_begin(CU_SEQLENS_Q, o_b, m_b)
    return (seqlen_q + cfg.TOKENS_PER_TILE - 1) // cfg.TOKENS_PER_TILE


@gluon.jit
def init_work_counter_unless_marked(WORK_COUNTER):
    """Stores a count of 0 in place of a left-over value. Called by one warp."""
    gl.inline_asm_elementwise(
        _INIT_COUNTER_PTX, "=r,l", [WORK_COUNTER.to(gl.int64)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def start_taking_next_work_tile(WORK_COUNTER, condition):
    """Starts taking a work tile if `condition`; returns what `finish_taking_next_work_tile` wants. Of one warp."""
    return gl.inline_asm_elementwise(
        _COUNT_PTX, "=r,l,r", [WORK_COUNTER.to(gl.int64), condition.to(gl.int32)], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def finish_taking_next_work_tile(count):
    """Returns the index of the work tile taken, which may be past the last."""
    count = gl.inline_asm_elementwise(_COUNT_OF_LANE_0_PTX, "=r,r", [count], gl.int32, is_pure=False, pack=1)
    return count + gl.num_programs(0)


@gluon.jit
def reset_work_counter_if_last(WORK_COUNTER, i_work_tile, num_work_tiles):
    """Resets the counter for the next launch. i_work_tile: this CTA's last index, past the last work tile.

    Every CTA that computed a work tile takes one index too many, so as many are taken as there are work tiles.
    """
    if i_work_tile == num_work_tiles + gl.num_programs(0) - 1:
        gl.store(WORK_COUNTER, COUNTER_ZERO)


@gluon.jit
def request_m_block_and_head_tile(num_m_blocks, i_work_tile, cfg: gl.constexpr):
    """Returns (i_request, m_block, head_tile) of work tile `i_work_tile` of these requests."""
    o_b = gl.arange(0, REQUESTS_PER_STEP, num_m_blocks.type.layout)
    work_tile_ends = gl.associative_scan(num_m_blocks, 0, add) * cfg.HEAD_TILES
    i_request = gl.sum((work_tile_ends <= i_work_tile).to(gl.int32), 0)
    i_work_tile -= gl.max(gl.where(work_tile_ends <= i_work_tile, work_tile_ends, 0), 0)
    num_m_blocks_here = gl.sum(gl.where(o_b == i_request, num_m_blocks, 0), 0)
    return i_request, num_m_blocks_here - 1 - i_work_tile // cfg.HEAD_TILES, i_work_tile % cfg.HEAD_TILES


@gluon.jit
def num_n_blocks_and_n_block_end(key_begin, key_end, cfg: gl.constexpr):
    """Returns (num_n_blocks, n_block_end) of keys [key_begin, key_end); without keys one block, fully masked."""
    n_block_end = gl.maximum((key_end + cfg.BLOCK_N - 1) // cfg.BLOCK_N, 1)
    return n_block_end - gl.minimum(key_begin // cfg.BLOCK_N, n_block_end - 1), n_block_end


@gluon.jit
def make_work_tile_and_cached_range(i_request, m_block, head_tile, SEQ_LENS, CU_SEQLENS_Q, cfg: gl.constexpr):
    """Returns (WorkTile, CachedKeyRange) of a block of tokens and heads."""
    q_begin = load_q_begin(CU_SEQLENS_Q, i_request, True)
    seqlen_q = load_q_begin(CU_SEQLENS_Q, i_request + 1, True) - q_begin
    first_token = m_block * cfg.TOKENS_PER_TILE
    seq_len = gl.load(SEQ_LENS + i_request).to(gl.int32)
    num_tokens_left = seqlen_q - first_token
    position = seq_len - seqlen_q + first_token
    num_cached = gl.maximum(seq_len - seqlen_q, 0)
    key_begin = num_cached * 0
    if cfg.WINDOW > 0:
        key_begin = gl.maximum(position - cfg.WINDOW + 1, 0)
    if cfg.HAS_NEW_KV:
        # The work tile's keys are new rows, counted from the request's first; before token 0 there are none.
        key_end = gl.minimum(seqlen_q, first_token + cfg.TOKENS_PER_TILE)
        first_new = gl.maximum(seqlen_q - seq_len, 0)
        if cfg.WINDOW > 0:
            first_new = gl.maximum(first_new, first_token - cfg.WINDOW + 1)
        num_n_blocks, n_block_end = num_n_blocks_and_n_block_end(first_new, key_end, cfg)
        work_tile = WorkTile(
            q_begin + first_token, num_tokens_left, first_token, key_end, num_n_blocks, n_block_end, first_new,
            head_tile, i_request,
        )  # fmt: skip
        cached_block_end = (num_cached + cfg.BLOCK_N - 1) // cfg.BLOCK_N
        cached_range = CachedKeyRange(
            position, num_cached, gl.maximum(cached_block_end - key_begin // cfg.BLOCK_N, 0), cached_block_end,
            key_begin,
        )  # fmt: skip
    else:
        # Consumers need at least one block: a work tile without keys gets one, fully masked.
        key_end = gl.maximum(gl.minimum(seq_len, position + gl.minimum(cfg.TOKENS_PER_TILE, num_tokens_left)), 0)
        num_n_blocks, n_block_end = num_n_blocks_and_n_block_end(key_begin, key_end, cfg)
        work_tile = WorkTile(
            q_begin + first_token, num_tokens_left, position, key_end, num_n_blocks, n_block_end, key_begin, head_tile,
            i_request,
        )  # fmt: skip
        cached_range = CachedKeyRange(key_begin, key_begin, key_begin * 0, key_begin, key_begin)
    return work_tile, cached_range


@gluon.jit
def kv_head_of(work_tile, cfg: gl.constexpr):
    """Returns the KV head of a work tile."""
    return work_tile.head_tile * cfg.HEADS_PER_TILE // cfg.GROUP


# ---- columns of a head in K and V tiles ----


@gluon.jit
def first_column_of_head(kv_head, IS_V: gl.constexpr, cfg: gl.constexpr):
    """Returns the column of K or V tiles in which the head's row begins: `config._packed_head_stride`."""
    PACKED_HEAD_STRIDE: gl.constexpr = cfg.V.PACKED_HEAD_STRIDE if IS_V else cfg.K.PACKED_HEAD_STRIDE
    if PACKED_HEAD_STRIDE > 0:
        return (kv_head & 1) * COLUMN_SHIFT
    else:
        return 0


@gluon.jit
def head_columns_of_tile(
    NUM_COLUMNS: gl.constexpr, LAYOUT: gl.constexpr, kv_head, IS_V: gl.constexpr, cfg: gl.constexpr
):
    """Returns the head's column in each column of K or V tiles; 0 before its first."""
    PACKED_HEAD_STRIDE: gl.constexpr = cfg.V.PACKED_HEAD_STRIDE if IS_V else cfg.K.PACKED_HEAD_STRIDE
    o_d = gl.arange(0, NUM_COLUMNS, LAYOUT)
    if PACKED_HEAD_STRIDE > 0:
        o_d = gl.maximum(o_d - first_column_of_head(kv_head, IS_V, cfg), 0)
    return o_d


# ---- from the producer to the other warps ----


@gluon.jit
def publish_work_tile(SMEM, work_tile, cached_range):
    """Stores a work tile in shared memory, for one reader."""
    o_field = gl.arange(0, TILE_INFO_FIELDS, gl.BlockedLayout([TILE_INFO_FIELDS], [32], [gl.num_warps()], [0]))
    fields = gl.where(
        o_field == 0,
        work_tile.q_row,
        gl.where(
            o_field == 1, work_tile.num_tokens_left, gl.where(o_field == 2, work_tile.causal_limit, work_tile.key_end)
        ),
    )
    fields = gl.where(
        o_field == 4,
        work_tile.num_n_blocks,
        gl.where(o_field == 5, work_tile.n_block_end, gl.where(o_field == 6, work_tile.key_begin, fields)),
    )
    fields = gl.where(
        o_field == 7,
        work_tile.head_tile,
        gl.where(o_field == 8, work_tile.i_request, gl.where(o_field == 9, cached_range.causal_limit, fields)),
    )
    fields = gl.where(
        o_field == 10,
        cached_range.key_end,
        gl.where(o_field == 11, cached_range.num_n_blocks, gl.where(o_field == 12, cached_range.n_block_end, fields)),
    )
    SMEM.store(gl.where(o_field == 13, cached_range.key_begin, fields))
    thread_barrier()  # the thread that arrives is not the one that stored


@gluon.jit
def element_as_scalar(x, i: gl.constexpr):
    """Returns element i as a scalar."""
    return gl.sum(gl.where(gl.arange(0, x.shape[0], x.type.layout) == i, x, 0), 0)


@gluon.jit
def read_work_tile_and_cached_range(SMEM, ONE_RELEASES: gl.constexpr):
    """Returns the published (WorkTile, CachedKeyRange), as scalars in every thread. ONE_RELEASES: one thread will
    release it for all, not each warp for itself"""
    tile_info = SMEM.load(gl.BlockedLayout([TILE_INFO_FIELDS], [32], [gl.num_warps()], [0]))
    if ONE_RELEASES:
        thread_barrier()
    work_tile = WorkTile(
        element_as_scalar(tile_info, 0), element_as_scalar(tile_info, 1), element_as_scalar(tile_info, 2),
        element_as_scalar(tile_info, 3), element_as_scalar(tile_info, 4), element_as_scalar(tile_info, 5),
        element_as_scalar(tile_info, 6), element_as_scalar(tile_info, 7), element_as_scalar(tile_info, 8),
    )  # fmt: skip
    return work_tile, CachedKeyRange(
        element_as_scalar(tile_info, 9), element_as_scalar(tile_info, 10), element_as_scalar(tile_info, 11),
        element_as_scalar(tile_info, 12), element_as_scalar(tile_info, 13),
    )  # fmt: skip
