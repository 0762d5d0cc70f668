"""Tile scheduler of decode and MLA decode, on the device: the scheme of `triton/parts/tile_scheduler`, in Gluon.

Each (request, m_block of query rows) is a work tile of n_blocks of BLOCK_N keys. All n_blocks are divided into equal,
contiguous CTA ranges. A range splits at most two work tiles; their partial results go to workspace slots: 2p for the
first, if it began in an earlier range, and 2p + 1 for the last, if it continues in a later one (`combine`).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


class RequestShape(NamedTuple):
    """The shape of one request, or of several: then all fields are tensors."""

    num_n_blocks: gl.tensor  # of a work tile
    num_m_blocks: gl.tensor
    first_n_block: gl.tensor  # that some row's window reaches
    num_keys: gl.tensor
    seqlen_q: gl.tensor  # of the query
    q_begin: gl.tensor  # the first of them


class WorkTile(NamedTuple):
    """The part of a work tile in a CTA range: n_blocks [n_block_begin, n_block_end), counted from its first_n_block."""

    i_request: gl.tensor
    n_block_base: gl.tensor  # flat index of the request's first n_block
    m_block: gl.tensor  # in the request
    n_block_begin: gl.tensor
    n_block_end: gl.tensor
    num_keys: gl.tensor
    seqlen_q: gl.tensor  # of the request's query
    q_begin: gl.tensor  # the first of them
    num_n_blocks: gl.tensor  # of the whole work tile


class CtaRange(NamedTuple):
    """Flat n_blocks [block_begin, block_end), for a group of heads."""

    i_range: gl.tensor
    head_group: gl.tensor
    blocks_per_range: gl.tensor  # n_blocks of every range
    block_begin: gl.tensor
    block_end: gl.tensor
    i_request: gl.tensor  # request that holds block_begin
    n_block_base: gl.tensor  # flat index of the request's first n_block


# ---- requests ----


@gluon.jit
def load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, m_request, cfg: gl.constexpr):
    """Loads the RequestShape of request i_request, or of several: no query rows where m_request is false."""
    num_keys = gl.load(SEQ_LENS + i_request, mask=m_request, other=0).to(gl.int32)
    if cfg.VARLEN_Q:
        q_begin = gl.load(CU_SEQLENS_Q + i_request, mask=m_request, other=0).to(gl.int32)
        seqlen_q = gl.load(CU_SEQLENS_Q + i_request + 1, mask=m_request, other=0).to(gl.int32) - q_begin
    else:
        q_begin = i_request * cfg.MAX_SEQLEN_Q
        seqlen_q = gl.where(m_request, cfg.MAX_SEQLEN_Q, 0)
    # The first n_block that some query row's window reaches.
    if cfg.WINDOW > 0:
        first_n_block = gl.maximum(num_keys - seqlen_q - cfg.WINDOW + 1, 0) // cfg.BLOCK_N
    else:
        first_n_block = num_keys * 0
    # A request without keys still has outputs to write: one empty n_block.
    num_n_blocks = gl.maximum((num_keys + cfg.BLOCK_N - 1) // cfg.BLOCK_N - first_n_block, 1)
    num_m_blocks = (seqlen_q * cfg.GROUP + cfg.BLOCK_M - 1) // cfg.BLOCK_M
    return RequestShape(num_n_blocks, num_m_blocks, first_n_block, num_keys, seqlen_q, q_begin)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def sum_and_max(sum_a, max_a, sum_b, max_b):
    return sum_a + sum_b, gl.maximum(max_a, max_b)


@gluon.jit
def find_request_and_base_of_block(SEQ_LENS, CU_SEQLENS_Q, B, block, cfg: gl.constexpr):
    """Returns (request that holds flat n_block `block`, flat index of that request's first n_block)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i_request, n_block_base, blocks_before = 0, 0, 0
    for i in range(0, B, cfg.BLOCK_B):
        o_b = i + gl.arange(0, cfg.BLOCK_B, LAYOUT)
        r = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        ends = blocks_before + gl.associative_scan(r.num_n_blocks * r.num_m_blocks, 0, add)
        passed = (ends <= block) & (o_b < B)
        i_request += gl.sum(passed.to(gl.int32), 0)
        n_block_base = gl.maximum(n_block_base, gl.max(gl.where(passed, ends, 0), 0))
        blocks_before += gl.sum(r.num_n_blocks * r.num_m_blocks, 0)
    return i_request, n_block_base


# ---- CTA ranges of decode ----


@gluon.jit
def equal_cta_range_bounds_and_blocks_per_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, cfg: gl.constexpr):
    """Returns (block_begin, block_end, blocks_per_range) of a CTA range, in flat n_blocks."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total_blocks = 0
    for i in range(0, B, cfg.BLOCK_B):
        o_b = i + gl.arange(0, cfg.BLOCK_B, LAYOUT)
        request_shapes = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        total_blocks += gl.sum(request_shapes.num_n_blocks * request_shapes.num_m_blocks, 0)
    blocks_per_range = gl.maximum((total_blocks + num_ranges - 1) // num_ranges, cfg.MIN_BLOCKS_PER_RANGE)
    block_begin = i_range * blocks_per_range
    return block_begin, gl.minimum(block_begin + blocks_per_range, total_blocks), blocks_per_range


@gluon.jit
def assign_equal_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, head_group, cfg: gl.constexpr):
    """Returns the CtaRange of a group of heads: `equal_cta_range_bounds_and_blocks_per_range`, the request of its first
    n_block; in one pass if BLOCK_B holds all requests."""
    if cfg.BLOCK_B == 1024:  # there may be more requests
        block_begin, block_end, blocks_per_range = equal_cta_range_bounds_and_blocks_per_range(
            SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, cfg
        )
        i_request, n_block_base = find_request_and_base_of_block(SEQ_LENS, CU_SEQLENS_Q, B, block_begin, cfg)
    else:
        o_b = gl.arange(0, cfg.BLOCK_B, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        request_shapes = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        num_blocks = gl.where(o_b < B, request_shapes.num_n_blocks * request_shapes.num_m_blocks, 0)
        ends = gl.associative_scan(num_blocks, 0, add)
        total_blocks = gl.sum(num_blocks, 0)
        blocks_per_range = gl.maximum((total_blocks + num_ranges - 1) // num_ranges, cfg.MIN_BLOCKS_PER_RANGE)
        block_begin = i_range * blocks_per_range
        block_end = gl.minimum(block_begin + blocks_per_range, total_blocks)
        passed = (ends <= block_begin) & (o_b < B)
        i_request, n_block_base = gl.reduce((passed.to(gl.int32), gl.where(passed, ends, 0)), 0, sum_and_max)
    return CtaRange(i_range, head_group, blocks_per_range, block_begin, block_end, i_request, n_block_base)


@gluon.jit
def assign_unsplit_request(SEQ_LENS, CU_SEQLENS_Q, i_request, head_group, cfg: gl.constexpr):
    """Returns the CtaRange that is one request, its n_blocks counted from 0: no other length is needed."""
    request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, True, cfg)
    num_blocks = request.num_n_blocks * request.num_m_blocks
    return CtaRange(
        i_request, head_group, gl.maximum(num_blocks, 1), num_blocks * 0, num_blocks, i_request, num_blocks * 0
    )


@gluon.jit
def rounded_cta_range_bounds_and_blocks_per_range(total_blocks, max_n_blocks, i_range, num_ranges, cfg: gl.constexpr):
    """Returns (block_begin, block_end, blocks_per_range) of a CTA range of `total_blocks` n_blocks."""
    blocks_per_range = gl.maximum((total_blocks + num_ranges - 1) // num_ranges, cfg.MIN_BLOCKS_PER_RANGE)
    rounded = (blocks_per_range + max_n_blocks - 1) // max_n_blocks * max_n_blocks
    if blocks_per_range < max_n_blocks:
        ranges_per_tile = max_n_blocks // blocks_per_range
        rounded = (max_n_blocks + ranges_per_tile - 1) // ranges_per_tile
    blocks_per_range = gl.where(20 * rounded <= 21 * blocks_per_range, rounded, blocks_per_range)
    block_begin = i_range * blocks_per_range
    return block_begin, gl.minimum(block_begin + blocks_per_range, total_blocks), blocks_per_range


@gluon.jit
def assign_rounded_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, head_group, cfg: gl.constexpr):
    """Returns the CtaRange, with ranges up to 5% longer if they then hold whole work tiles or equal parts of one.

    An unsplit work tile needs no combine, and one split once needs one query. With more than 512 requests ranges stay
    equal.
    """
    if cfg.BLOCK_B == 1024:  # there may be more requests
        return assign_equal_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, head_group, cfg)
    else:
        o_b = gl.arange(0, cfg.BLOCK_B, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        request_shapes = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        num_blocks = gl.where(o_b < B, request_shapes.num_n_blocks, 0)
        ends = gl.associative_scan(num_blocks * request_shapes.num_m_blocks, 0, add)
        total_blocks, max_n_blocks = gl.reduce((num_blocks * request_shapes.num_m_blocks, num_blocks), 0, sum_and_max)
        max_n_blocks = gl.maximum(max_n_blocks, 1)
        _, _, rounded = rounded_cta_range_bounds_and_blocks_per_range(
            total_blocks, max_n_blocks, i_range, num_ranges, cfg
        )
        blocks_per_range = gl.maximum((total_blocks + num_ranges - 1) // num_ranges, cfg.MIN_BLOCKS_PER_RANGE)
        blocks_per_range = gl.where(total_blocks % max_n_blocks == 0, rounded, blocks_per_range)
        block_begin = i_range * blocks_per_range
        block_end = gl.minimum(block_begin + blocks_per_range, total_blocks)
        passed = (ends <= gl.minimum(block_begin, block_end - 1)) & (o_b < B)
        i_request, n_block_base = gl.reduce((passed.to(gl.int32), gl.where(passed, ends, 0)), 0, sum_and_max)
        return CtaRange(i_range, head_group, blocks_per_range, block_begin, block_end, i_request, n_block_base)


# ---- CTA ranges of MLA decode ----


@gluon.jit
def unsplit_tile_flat_bounds_and_blocks_per_range(SEQ_LENS, CU_SEQLENS_Q, B, i_work_tile, cfg: gl.constexpr):
    """Returns (block_begin, block_end, blocks_per_range) of work tile i_work_tile as an unsplit CTA range, in flat
    n_blocks. blocks_per_range: such that `combine.num_splits_of_tile` counts one split."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    work_tiles_before, block_begin, num_blocks = 0, 0, 0
    for j in range(0, B, cfg.BLOCK_B):
        o_b = j + gl.arange(0, cfg.BLOCK_B, LAYOUT)
        r = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        ends = work_tiles_before + gl.associative_scan(r.num_m_blocks, 0, add)
        is_here = (ends > i_work_tile) & (ends - r.num_m_blocks <= i_work_tile)
        blocks_inside = gl.where(is_here, (i_work_tile - ends + r.num_m_blocks) * r.num_n_blocks, 0)
        block_begin += gl.sum(gl.where(ends <= i_work_tile, r.num_n_blocks * r.num_m_blocks, blocks_inside), 0)
        num_blocks += gl.sum(gl.where(is_here, r.num_n_blocks, 0), 0)
        work_tiles_before += gl.sum(r.num_m_blocks, 0)
    return block_begin, block_begin + num_blocks, gl.maximum(block_begin + num_blocks, 1)


@gluon.jit
def prefers_whole_tiles_despite_imbalance(total_blocks, max_n_blocks, num_work_tiles, num_ranges, cfg: gl.constexpr):
    """Returns whether each CTA should process one whole work tile, though the longest takes longer than an equal range.

    With unequal lengths nearly every range would be split, and a split costs as much time as many n_blocks. NVIDIA
    H200, 2026-11-21, lengths uniform between 0 and the maximum, 128 heads: 60 requests of up to 256, 512 and 1024
    tokens 49.9, 57.7 and 76.0 → 23.0, 30.3 and 46.3 µs, bf16 37.4, 45.1, 60.5 → 20.0, 26.3, 41.3; 30 of up to 1024 51.2
    → 41.5, bf16 40.4 → 36.5; 20 of up to 600 32.3 → 30.3, bf16 26.2 → 26.9: too few. 16 heads: 250 of up to 512 38.0 →
    27.1, 100 of up to 256 14.2 → 15.6: too few.
    """
    blocks_per_range = (total_blocks + num_ranges - 1) // num_ranges
    LARGE_M: gl.constexpr = cfg.GROUP >= 64
    max_blocks = blocks_per_range + (15 if LARGE_M else 4)
    fills_ctas = (3 if LARGE_M else 2) * num_work_tiles > num_ranges
    return (
        (max_n_blocks * num_work_tiles > total_blocks)
        & (num_work_tiles <= num_ranges)
        & fills_ctas
        & (max_n_blocks <= max_blocks)
    )


@gluon.jit
def rounded_or_unsplit_bounds_and_blocks_per_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, cfg: gl.constexpr):
    """Returns (block_begin, block_end, blocks_per_range) of a CTA range, in flat n_blocks.

    With equal lengths, ranges grow by up to 5% to hold whole work tiles or equal parts of one: an unsplit work tile
    needs no combine, and one split once needs one query.
    """
    if cfg.UNSPLIT:
        return unsplit_tile_flat_bounds_and_blocks_per_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, cfg)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total_blocks, max_n_blocks, num_work_tiles = 0, 1, 0
    for i in range(0, B, cfg.BLOCK_B):
        o_b = i + gl.arange(0, cfg.BLOCK_B, LAYOUT)
        r = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        total_blocks += gl.sum(r.num_n_blocks * r.num_m_blocks, 0)
        max_n_blocks = gl.maximum(max_n_blocks, gl.max(r.num_n_blocks, 0))
        num_work_tiles += gl.sum(r.num_m_blocks, 0)
    block_begin, block_end, blocks_per_range = rounded_cta_range_bounds_and_blocks_per_range(
        total_blocks, max_n_blocks, i_range, num_ranges, cfg
    )
    if prefers_whole_tiles_despite_imbalance(total_blocks, max_n_blocks, num_work_tiles, num_ranges, cfg):
        block_begin, block_end, blocks_per_range = unsplit_tile_flat_bounds_and_blocks_per_range(
            SEQ_LENS, CU_SEQLENS_Q, B, i_range, cfg
        )
    return block_begin, block_end, blocks_per_range


@gluon.jit
def load_n_and_m_block_counts(SEQ_LENS, CU_SEQLENS_Q, B, cfg: gl.constexpr, IN_EVERY_WARP: gl.constexpr = False):
    """Loads (num_n_blocks, num_m_blocks) of all requests, early, so that other work can overlap it: for
    `rounded_or_unsplit_bounds_blocks_per_range_from_counts`.

    IN_EVERY_WARP: each warp holds all requests, so that sums need no barriers, but more registers
    """
    REQUESTS_PER_THREAD: gl.constexpr = cfg.BLOCK_B // 32 if IN_EVERY_WARP else 1
    o_b = gl.arange(0, cfg.BLOCK_B, gl.BlockedLayout([REQUESTS_PER_THREAD], [32], [gl.num_warps()], [0]))
    r = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
    return gl.where(o_b < B, r.num_n_blocks, 0), r.num_m_blocks


@gluon.jit
def rounded_or_unsplit_bounds_blocks_per_range_from_counts(
    n_and_m_block_counts, i_range, num_ranges, cfg: gl.constexpr
):
    """Returns `rounded_or_unsplit_bounds_and_blocks_per_range`, for up to BLOCK_B requests."""
    num_n_blocks, num_m_blocks = n_and_m_block_counts
    total_blocks, max_n_blocks = gl.reduce((num_n_blocks * num_m_blocks, num_n_blocks), 0, sum_and_max)
    block_begin, block_end, blocks_per_range = rounded_cta_range_bounds_and_blocks_per_range(
        total_blocks, gl.maximum(max_n_blocks, 1), i_range, num_ranges, cfg
    )
    if prefers_whole_tiles_despite_imbalance(total_blocks, max_n_blocks, gl.sum(num_m_blocks, 0), num_ranges, cfg):
        starts = gl.associative_scan(num_m_blocks, 0, add) - num_m_blocks
        is_here = (starts <= i_range) & (i_range < starts + num_m_blocks)
        blocks_inside = gl.where(is_here, (i_range - starts) * num_n_blocks, 0)
        block_begin = gl.sum(gl.where(starts + num_m_blocks <= i_range, num_n_blocks * num_m_blocks, blocks_inside), 0)
        block_end = block_begin + gl.sum(gl.where(is_here, num_n_blocks, 0), 0)
        blocks_per_range = gl.maximum(block_end, 1)
    return block_begin, block_end, blocks_per_range


@gluon.jit
def flat_block_ends_from_counts(n_and_m_block_counts):
    """Returns the flat n_block index at which each request ends."""
    num_n_blocks, num_m_blocks = n_and_m_block_counts
    return gl.associative_scan(num_n_blocks * num_m_blocks, 0, add)


@gluon.jit
def request_and_base_of_block_from_ends(flat_block_ends, n_and_m_block_counts, block):
    """Returns `find_request_and_base_of_block`, for up to BLOCK_B requests."""
    passed = (flat_block_ends <= block) & (n_and_m_block_counts[0] > 0)
    return gl.reduce((passed.to(gl.int32), gl.where(passed, flat_block_ends, 0)), 0, sum_and_max)


# ---- work tiles of a CTA range ----


@gluon.jit
def advance_to_request_of_block(SEQ_LENS, CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg: gl.constexpr):
    """Returns (request that holds flat n_block `block`, flat index of its first n_block, its shape)."""
    while block - n_block_base >= request.num_n_blocks * request.num_m_blocks:
        n_block_base += request.num_n_blocks * request.num_m_blocks
        i_request += 1
        request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, True, cfg)
    return i_request, n_block_base, request


@gluon.jit
def make_work_tile_at_block(block, block_end, i_request, n_block_base, request):
    """Returns the WorkTile at flat n_block `block` of request i_request, as far as the CTA range that ends at
    `block_end`."""
    m_block = (block - n_block_base) // request.num_n_blocks
    n_block_begin = (block - n_block_base) % request.num_n_blocks
    n_block_end = gl.minimum(n_block_begin + block_end - block, request.num_n_blocks)
    return WorkTile(
        i_request, n_block_base, m_block, n_block_begin, n_block_end, request.num_keys, request.seqlen_q,
        request.q_begin, request.num_n_blocks,
    )  # fmt: skip


@gluon.jit
def find_work_tile_at_block_cut_at_end(
    SEQ_LENS, CU_SEQLENS_Q, block, block_end, search_from_request, n_block_base, cfg: gl.constexpr
):
    """Returns the WorkTile at flat n_block `block`, in request search_from_request or a later one, cut at block_end."""
    i_request, n_block_base, request = advance_to_request_of_block(
        SEQ_LENS, CU_SEQLENS_Q, block, search_from_request, n_block_base,
        load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, search_from_request, True, cfg), cfg,
    )  # fmt: skip
    return make_work_tile_at_block(block, block_end, i_request, n_block_base, request)
