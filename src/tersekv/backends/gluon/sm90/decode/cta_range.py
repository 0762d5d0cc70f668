"""CTA ranges of decode: equal ranges, scales per head, sinks. The rest is in `parts/tile_scheduler`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.tile_scheduler import (
    LN2,
    LOG2E,
    add,
    find_request_of_block,
    load_request_shape,
    round_cta_range,
    sum_and_max,
)
from .params import CtaRange


@gluon.jit
def equal_cta_block_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, cfg: gl.constexpr):
    """Returns (block_begin, block_end, blocks_per_range) of a CTA range, in flat n_blocks."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    total_blocks = 0
    for i in range(0, B, cfg.BLOCK_B):
        o_b = i + gl.arange(0, cfg.BLOCK_B, LAYOUT)
        request_shapes = load_request_shape(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        total_blocks += gl.sum(request_shapes.num_n_blocks * request_shapes.num_m_blocks, 0)
    blocks_per_range = gl.maximum((total_blocks + num_ranges - 1) // num_ranges, cfg.MIN_BLOCKS_PER_RANGE)
    block_begin = i_range * blocks_per_range
    return block_begin, gl.minimum(block_begin + blocks_per_range, total_blocks), blocks_per_range


@gluon.jit
def assign_equal_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, head_group, cfg: gl.constexpr):
    """Returns the CtaRange of a group of heads: `equal_cta_block_range` and the request of its first n_block, in one
    pass if BLOCK_B holds all requests."""
    if cfg.BLOCK_B == 1024:  # there may be more requests
        block_begin, block_end, blocks_per_range = equal_cta_block_range(
            SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, cfg
        )
        i_request, n_block_base = find_request_of_block(SEQ_LENS, CU_SEQLENS_Q, B, block_begin, cfg)
    else:
        o_b = gl.arange(0, cfg.BLOCK_B, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        request_shapes = load_request_shape(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
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
def assign_rounded_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, head_group, cfg: gl.constexpr):
    """Returns the same, with ranges up to 5% longer if they then hold whole work tiles or equal parts of one.

    An unsplit work tile needs no combine, and one split once needs one query. With more than 512 requests ranges stay
    equal.
    """
    if cfg.BLOCK_B == 1024:  # there may be more requests
        return assign_equal_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, head_group, cfg)
    else:
        o_b = gl.arange(0, cfg.BLOCK_B, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        request_shapes = load_request_shape(SEQ_LENS, CU_SEQLENS_Q, o_b, o_b < B, cfg)
        num_blocks = gl.where(o_b < B, request_shapes.num_n_blocks, 0)
        ends = gl.associative_scan(num_blocks * request_shapes.num_m_blocks, 0, add)
        total_blocks, max_n_blocks = gl.reduce((num_blocks * request_shapes.num_m_blocks, num_blocks), 0, sum_and_max)
        max_n_blocks = gl.maximum(max_n_blocks, 1)
        _, _, rounded = round_cta_range(total_blocks, max_n_blocks, i_range, num_ranges, cfg)
        blocks_per_range = gl.maximum((total_blocks + num_ranges - 1) // num_ranges, cfg.MIN_BLOCKS_PER_RANGE)
        blocks_per_range = gl.where(total_blocks % max_n_blocks == 0, rounded, blocks_per_range)
        block_begin = i_range * blocks_per_range
        block_end = gl.minimum(block_begin + blocks_per_range, total_blocks)
        passed = (ends <= gl.minimum(block_begin, block_end - 1)) & (o_b < B)
        i_request, n_block_base = gl.reduce((passed.to(gl.int32), gl.where(passed, ends, 0)), 0, sum_and_max)
        return CtaRange(i_range, head_group, blocks_per_range, block_begin, block_end, i_request, n_block_base)


@gluon.jit
def load_scale_per_head(host_scale, DEVICE_SCALE, heads, HAS_DEVICE_SCALE: gl.constexpr, STRIDE: gl.constexpr):
    """Loads a scale of each KV head: from the device tensor if there is one, else the host's float."""
    if HAS_DEVICE_SCALE:
        return gl.load(DEVICE_SCALE + heads * STRIDE)
    else:
        return heads * 0 + host_scale


@gluon.jit
def finalize_softmax(row_max, row_sum, v_scale, SINKS, heads, m_row, cfg: gl.constexpr):
    """Returns (acc_scale, LSE in natural log) of rows with a base-2 row_max and row_sum."""
    not_empty = row_sum != 0  # true for NaN
    safe_max = gl.where(not_empty, row_max, 0.0)
    denominator = row_sum
    if cfg.HAS_SINKS:
        sink = gl.load(SINKS + heads, mask=m_row, other=0.0) * LOG2E
        max_with_sink = gl.maximum(safe_max, sink)  # a sink far above every score would overflow against `safe_max`
        rescale = gl.exp2(safe_max - max_with_sink)
        denominator = row_sum * rescale + gl.exp2(sink - max_with_sink)
        v_scale *= rescale
        safe_max = max_with_sink
    denominator = gl.where(not_empty, denominator, 1.0)
    return gl.where(not_empty, v_scale / denominator, 0.0), gl.where(
        not_empty, (safe_max + gl.log2(denominator)) * LN2, float("-inf")
    )
