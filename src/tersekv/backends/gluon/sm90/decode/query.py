"""Loads decode's query: with its work tile's first n_block, into shared memory, ahead of use, or directly.

A load at the start of a work tile would queue behind all copies in flight, some 3 µs (notes/decode.md).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...versions import async_load
from ..parts.dequant import INT4_ODD_SCALE, INT4_RESIDUAL_SCALE, mma_dtype
from .layouts import column_offset_of_heads, mma_layout, query_load_layout
from .params import QueryOperands
from .rotation import rotate_query


@gluon.constexpr_function
def _copy_layout(tile_cfg, cfg, itemsize):
    """Returns the layout of [heads, rows, columns]: a lane copies 16 bytes."""
    lanes = min(32, cfg.D * itemsize // 16)
    return gl.BlockedLayout(
        [1, 1, 16 // itemsize], [1, 32 // lanes, lanes], [tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, 1], [2, 1, 0]
    )


@gluon.jit
def allocate_query_stages(Q, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Allocates a ring of queries [HEADS_PER_CTA, BLOCK_M, D]: of as many work tiles as may begin in the prefetched
    n_blocks."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    return gl.allocate_shared_memory(
        Q.dtype.element_ty, [tile_cfg.NUM_QUERY_STAGES, tile_cfg.HEADS_PER_CTA, cfg.BLOCK_M, cfg.D], LAYOUT
    )


@gluon.jit
def query_row_ptrs(Q, strides, q_begin, kv_heads, o_r, cfg: gl.constexpr):
    """Returns pointers to query rows o_r of a request, all heads of a group counted, of KV heads kv_heads."""
    p_token = Q + (q_begin + o_r // cfg.GROUP).to(gl.int64) * strides.q_t
    return p_token + (kv_heads * cfg.GROUP + o_r % cfg.GROUP).to(gl.int64) * strides.q_h


@gluon.jit
def prefetch_query(tensors, strides, q_stages, num_prefetched_q, prefetch_pos, block_end, first_head,
                   IS_FIRST: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr):  # fmt: skip
    """Starts the copy of the query at prefetch_pos, if its n_block is the first of the CTA range or of a work tile.

    Returns the number of queries prefetched so far.
    """
    Q, CU_SEQLENS_Q = tensors.Q, tensors.CU_SEQLENS_Q
    if (prefetch_pos.block < block_end) & (IS_FIRST | (prefetch_pos.n_block == 0)):
        L: gl.constexpr = _copy_layout(tile_cfg, cfg, Q.dtype.element_ty.primitive_bitwidth // 8)
        h = first_head + gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
        o_r = (
            prefetch_pos.m_block * cfg.BLOCK_M
            + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
        )
        o_d = gl.arange(0, cfg.D, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
        if cfg.VARLEN_Q:
            q_begin = gl.load(CU_SEQLENS_Q + prefetch_pos.i_request).to(gl.int32)
            num_q_rows = gl.load(CU_SEQLENS_Q + prefetch_pos.i_request + 1).to(gl.int32) - q_begin
        else:
            q_begin, num_q_rows = prefetch_pos.i_request * cfg.MAX_SEQLEN_Q, cfg.MAX_SEQLEN_Q
        p_q = query_row_ptrs(Q, strides, q_begin, h, o_r, cfg) + o_d
        valid, p_q = gl.broadcast(o_r < num_q_rows * cfg.GROUP, p_q)
        async_load(q_stages.index(num_prefetched_q % tile_cfg.NUM_QUERY_STAGES), p_q, mask=valid)
        async_copy.commit_group()
        num_prefetched_q += 1
    return num_prefetched_q


@gluon.jit
def to_query_operands(x, rotation_smem, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns a query [HEADS_PER_CTA, BLOCK_M, D] (query_load_layout) as QueryOperands, and a scale of its scores
    [HEADS_PER_CTA, BLOCK_M].

    bf16 rows fit in fp16 only after a power of two is taken out of each; the scale restores it.
    """
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    x = rotate_query(x.to(gl.float32), rotation_smem, 2, cfg, tile_cfg)
    exponent = gl.max(gl.abs(x), 2).to(gl.int32, bitcast=True) >> 23
    exponent = gl.maximum(exponent & 0xFF, 1)  # of the largest magnitude
    inv_scale = (gl.maximum(254 - exponent, 1) << 23).to(gl.float32, bitcast=True)
    x = (x * inv_scale[:, :, None]).to(mma_dtype(cfg))
    L: gl.constexpr = gl.SliceLayout(1, MMA)
    q_scales = gl.convert_layout((exponent << 23).to(gl.float32, bitcast=True) * cfg.K_RESIDUAL_SCALE, L)
    row_sums = q_scales  # not used
    if tile_cfg.K.CODE == "int4":  # at the scale of the QK accumulator
        row_sums = gl.convert_layout(gl.sum(x.to(gl.float32), 2) * (1.0 / INT4_RESIDUAL_SCALE), L)
    # [heads, rows, panels of a row, lanes, pairs of packed words, …] → operand j: the j-th codes. Four codes of a word
    # are adjacent; of one or two codes, those of the pair are.
    PAIRS: gl.constexpr = min(cfg.PACKED_K, 64) // 8
    SHAPE: gl.constexpr = [tile_cfg.HEADS_PER_CTA, cfg.BLOCK_M, cfg.PACKED_K // (8 * PAIRS), 4, PAIRS]
    if tile_cfg.K.PACK == 4:
        x = x.reshape(SHAPE + [2, 4]).permute([0, 2, 4, 3, 5, 1, 6])
        even_codes, odd_codes = x.reshape([tile_cfg.HEADS_PER_CTA, cfg.PACKED_K, cfg.BLOCK_M, 2, 2]).split()
        zeroth, second = even_codes.split()
        first, third = odd_codes.split()
        if tile_cfg.K.CODE == "int4":
            zeroth, second = (zeroth * INT4_ODD_SCALE).to(x.dtype), (second * INT4_ODD_SCALE).to(x.dtype)
        tiles = (zeroth, first, second, third)
    else:
        PACK: gl.constexpr = tile_cfg.K.PACK
        x = (
            x.reshape(SHAPE + [PACK, 2])
            .permute([0, 2, 4, 3, 6, 1, 5])
            .reshape([tile_cfg.HEADS_PER_CTA, cfg.PACKED_K, cfg.BLOCK_M, PACK])
        )
        tiles = x.split() if PACK == 2 else (x.reshape([tile_cfg.HEADS_PER_CTA, cfg.PACKED_K, cfg.BLOCK_M]),)
    operands = ()
    for j in gl.static_range(gl.constexpr(tile_cfg.K.PACK)):
        operands = operands + (gl.convert_layout(tiles[j], B, assert_trivial=True),)
    return QueryOperands(operands, row_sums), q_scales


@gluon.jit
def load_prefetched_query(q_stages, rotation_smem, i, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Loads the i-th prefetched query from shared memory; returns as `to_query_operands`."""
    async_copy.wait_group(0)
    x = q_stages.index(i % tile_cfg.NUM_QUERY_STAGES).load(
        query_load_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, cfg.BLOCK_M, cfg.PACKED_K, tile_cfg.K.PACK)
    )
    return to_query_operands(x, rotation_smem, cfg, tile_cfg)


@gluon.jit
def load_query(tensors, strides, rotation_smem, work_tile, first_head, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Loads a work tile's query that was not prefetched; a lane loads the same columns as of its keys."""
    L: gl.constexpr = query_load_layout(
        tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, cfg.BLOCK_M, cfg.PACKED_K, tile_cfg.K.PACK
    )
    h = first_head + gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
    o_r = (
        work_tile.m_block * cfg.BLOCK_M
        + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    )
    o_d = gl.arange(0, cfg.D, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    if tile_cfg.K.PADDED_HEADS > 1:
        o_d = o_d - tile_cfg.K.PACK * column_offset_of_heads(h, False, tile_cfg)
    p_q = query_row_ptrs(tensors.Q, strides, work_tile.q_begin, h, o_r, cfg) + o_d
    valid, p_q = gl.broadcast(o_r < work_tile.num_q_rows * cfg.GROUP, p_q)
    if tile_cfg.Q_HEAD_DIM < cfg.D:
        valid = valid & (o_d < tile_cfg.Q_HEAD_DIM)
    if tile_cfg.K.PADDED_HEADS > 1:
        valid = valid & (o_d >= 0)
    return to_query_operands(gl.load(p_q, mask=valid, other=0.0), rotation_smem, cfg, tile_cfg)
