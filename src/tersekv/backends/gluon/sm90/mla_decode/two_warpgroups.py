"""MLA decode over 16-bit latents for many heads on sm_90: two alternating warpgroups, 64 query rows per CTA.

The left warpgroup computes QK of the even tiles of 64 keys of a work tile, and PV of all tiles for columns 0 … 255; the
right one QK of the odd tiles, and PV for the other columns. The softmax of one overlaps the MMAs of the other. They
exchange row_max and P through shared memory; P overwrites the tile's rotary part, which is no longer needed. A producer
copies tiles by TMA, in groups of 128 columns, as each becomes free.

Loops over groups are not unrolled, and each warp branches around rare work by itself: the code of all warps should fit
the instruction cache, and no vote of a whole warpgroup should delay P.

Mask: `apply_mask`; lazy row_max: `masked_p_and_lazy_row_max`; rescale: `rescale_acc`; wait for a free group:
`acquire_and_copy_kv_tile`; combine: `combine.py`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from ...versions import reinterpret, thread_barrier, tma_load
from ..parts.combine import split_metadata_ptr
from ..parts.epilogue import (
    cast_output_saturating_fp8,
    compute_acc_scale_and_lse,
    store_empty_output_of_padding_rows,
    token_head_and_mask_of_q_rows,
)
from ..parts.online_softmax import rescale_unless_all_ones_ptx_and_constraints
from ..parts.pipeline import allocate_mbarriers, pdl_wait, sync_and_arrive
from ..parts.tile_scheduler import find_work_tile_at_block_cut_at_end, load_n_and_m_block_counts
from .gather import (
    CacheRows,
    copy_arrivals,
    fence_async_shared_if_gathered,
    load_row_indices,
    signal_copies,
    start_copy_of_gathered_rows,
)
from .params import (
    AttentionTensors,
    CtaRange,
    PageLookup,
    QuerySmem,
    SmemKV,
    SoftmaxState,
    Strides,
    TensorMaps,
    fits_all_requests,
    load_query_chunk,
    load_score_and_value_scales,
    make_cta_range_of_flat_n_blocks,
    make_uniform_through_smem,
    mask_of_output_columns,
    padded_rank,
    partial_row_ptr,
    rope_columns,
    store_num_splits_and_first_cta,
    store_partial_stats,
)
from .producer import lookup_ckv_kpe_and_scale_tma_rows

BLOCK_N = gl.constexpr(64)
COLUMN_GROUPS = gl.constexpr(4)  # of a tile, of GROUP_COLUMNS: 128, or 64 up to rank 256
GROUPS_PER_WARPGROUP = gl.constexpr(2)  # groups of acc_o that a warpgroup holds: left the first, right the last
TILE_COLUMNS = gl.constexpr(64)  # columns of a copy tile
ROWS_PER_STORE = gl.constexpr(16)  # output rows stored at once
RESCALE_THRESHOLD = gl.constexpr(16.0)  # P is at most 2^RESCALE_THRESHOLD before it is normalised


class Mbarriers(NamedTuple):
    full: gl.shared_memory_descriptor  # of each tile's groups; behind them, of the rotary parts
    empty: gl.shared_memory_descriptor  # of each tile's groups
    p_even_full: gl.shared_memory_descriptor  # P and row_max of an even tile, from the left warpgroup
    p_odd_full: gl.shared_memory_descriptor


class EpilogueBarriers(NamedTuple):
    """Full barriers of both warpgroups at the start and end of a work tile."""

    q_full: tuple  # of its half of the query
    row_sum_full: tuple  # of its part of row_sum


class TileCounts(NamedTuple):
    """Tiles used so far."""

    num_even_tiles: gl.tensor
    num_odd_tiles: gl.tensor


# Producer: page lookup, waits for free groups, copies.


@gluon.jit
def acquire_and_copy_kv_tile(
    tensor_maps, smem_kv, mbarriers, stage: gl.constexpr, ckv_rows, kpe_rows, iter_of_stage, cfg: gl.constexpr
):
    """Starts the copies of a tile's groups, each once its stage is free; the rotary part comes last."""
    CKV_MAP, KPE_MAP = tensor_maps.latents, tensor_maps.pe
    full, empty = mbarriers.full, mbarriers.empty
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    KEYS_PER_COPY: gl.constexpr = CKV_MAP.block_shape[0]
    NUM_COPIES: gl.constexpr = BLOCK_N // KEYS_PER_COPY
    GROUP_COLUMNS: gl.constexpr = ckv.shape[2]
    TILES_PER_GROUP: gl.constexpr = GROUP_COLUMNS // TILE_COLUMNS
    opaque_zero = iter_of_stage >> 30  # 0, hidden from the compiler, which would unroll
    for j in range(COLUMN_GROUPS + opaque_zero):
        i_group = (j + stage * GROUPS_PER_WARPGROUP) % COLUMN_GROUPS  # in the order in which they become free
        # Wait for a free group.
        mbarrier.wait(empty.index(COLUMN_GROUPS * stage + i_group), (iter_of_stage & 1) ^ 1)
        # Copy it.
        full_barrier = full.index(COLUMN_GROUPS * stage + i_group)
        mbarrier.expect(full_barrier, 2 * BLOCK_N * GROUP_COLUMNS)
        smem_tiles = reinterpret(
            ckv.index(COLUMN_GROUPS * stage + i_group), CKV_MAP.dtype, [TILES_PER_GROUP, BLOCK_N, TILE_COLUMNS],
            CKV_MAP.layout,
        )  # fmt: skip
        for r in gl.static_range(NUM_COPIES):
            for i in gl.static_range(TILES_PER_GROUP):
                smem_tile = smem_tiles.index(i).slice(r * KEYS_PER_COPY, KEYS_PER_COPY)
                tma_load(CKV_MAP, [ckv_rows[r], i_group * GROUP_COLUMNS + i * TILE_COLUMNS], full_barrier, smem_tile)
    # Copy the rotary part.
    full_barrier = full.index(2 * COLUMN_GROUPS + stage)
    mbarrier.expect(full_barrier, 2 * BLOCK_N * cfg.BLOCK_PE)
    for r in gl.static_range(NUM_COPIES):
        smem_tile = k_pe.index(stage).slice(r * KEYS_PER_COPY, KEYS_PER_COPY)
        tma_load(KPE_MAP, [kpe_rows[r], 0], full_barrier, smem_tile)


@gluon.jit
def acquire_and_gather_kv_tile(
    cache_rows, smem_kv, mbarriers, stage: gl.constexpr, rows, iter_of_stage, cfg: gl.constexpr
):
    """As `acquire_and_copy_kv_tile`, by rows of the cache."""
    full, empty = mbarriers.full, mbarriers.empty
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    GROUP_COLUMNS: gl.constexpr = ckv.shape[2]
    TILES_PER_GROUP: gl.constexpr = GROUP_COLUMNS // TILE_COLUMNS
    opaque_zero = iter_of_stage >> 30  # 0, hidden from the compiler, which would unroll
    for j in range(COLUMN_GROUPS + opaque_zero):
        i_group = (j + stage * GROUPS_PER_WARPGROUP) % COLUMN_GROUPS
        # Wait for a free group.
        mbarrier.wait(empty.index(COLUMN_GROUPS * stage + i_group), (iter_of_stage & 1) ^ 1)
        # Copy it.
        smem_tiles = reinterpret(
            ckv.index(COLUMN_GROUPS * stage + i_group), ckv.dtype, [TILES_PER_GROUP, BLOCK_N, TILE_COLUMNS], k_pe.layout
        )
        for i in gl.static_range(TILES_PER_GROUP):
            first_column = i_group * GROUP_COLUMNS + i * TILE_COLUMNS
            start_copy_of_gathered_rows(
                cache_rows.CKV, cache_rows.ckv_row_pitch_16_bytes, rows, first_column, smem_tiles.index(i)
            )
        signal_copies(full.index(COLUMN_GROUPS * stage + i_group))
    # Copy the rotary part.
    start_copy_of_gathered_rows(cache_rows.KPE, cache_rows.kpe_row_pitch_16_bytes, rows, 0, k_pe.index(stage))
    signal_copies(full.index(2 * COLUMN_GROUPS + stage))


@gluon.jit
def tma_or_listed_rows_producer(tensor_maps, cache_rows, page_lookup, smem_kv, mbarriers, cta_range, cfg: gl.constexpr):
    """Copies every tile of the CTA range.

    Unlike the other kernels' producer: tiles come in pairs, and groups of columns as each becomes free, so that one
    warpgroup can multiply while the other still uses the rest.
    """
    KEYS_PER_COPY: gl.constexpr = tensor_maps.latents.block_shape[0]
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    num_even_tiles, num_odd_tiles = 0, 0
    while block < block_end:
        # Next work tile.
        work_tile = find_work_tile_at_block_cut_at_end(
            page_lookup.SEQ_LENS, page_lookup.CU_SEQLENS_Q, block, block_end, i_request, n_block_base, cfg
        )
        i_request, n_block_base, n_block_end, num_keys = (
            work_tile.i_request, work_tile.n_block_base, work_tile.n_block_end, work_tile.num_keys,
        )  # fmt: skip
        p_page_ids = page_lookup.PAGE_TABLE + i_request.to(gl.int64) * page_lookup.stride
        if cfg.GATHER_ROWS:  # loaded an iteration ahead
            next_rows = load_row_indices(p_page_ids, work_tile.n_block_begin, num_keys, TILE_COLUMNS, 16, cfg)
            next_rows_right = load_row_indices(p_page_ids, work_tile.n_block_begin + 1, num_keys, TILE_COLUMNS, 16, cfg)
        for n_block in range(work_tile.n_block_begin, n_block_end, 2):
            # Page lookup of a pair of tiles; copy them, as groups become free.
            if cfg.GATHER_ROWS:
                rows, rows_right = next_rows, next_rows_right
                next_rows = load_row_indices(p_page_ids, n_block + 2, num_keys, TILE_COLUMNS, 16, cfg)
                next_rows_right = load_row_indices(p_page_ids, n_block + 3, num_keys, TILE_COLUMNS, 16, cfg)
                acquire_and_gather_kv_tile(cache_rows, smem_kv, mbarriers, 0, rows, num_even_tiles, cfg)
            else:
                ckv_rows, kpe_rows, _ = lookup_ckv_kpe_and_scale_tma_rows(
                    p_page_ids, n_block, num_keys, page_lookup, KEYS_PER_COPY, cfg
                )
                ckv_rows_right, kpe_rows_right, _ = lookup_ckv_kpe_and_scale_tma_rows(
                    p_page_ids, n_block + 1, num_keys, page_lookup, KEYS_PER_COPY, cfg
                )
                acquire_and_copy_kv_tile(tensor_maps, smem_kv, mbarriers, 0, ckv_rows, kpe_rows, num_even_tiles, cfg)
            num_even_tiles += 1
            if n_block + 1 < n_block_end:
                if cfg.GATHER_ROWS:
                    acquire_and_gather_kv_tile(cache_rows, smem_kv, mbarriers, 1, rows_right, num_odd_tiles, cfg)
                else:
                    acquire_and_copy_kv_tile(
                        tensor_maps, smem_kv, mbarriers, 1, ckv_rows_right, kpe_rows_right, num_odd_tiles, cfg
                    )
                num_odd_tiles += 1
        block += n_block_end - work_tile.n_block_begin


# Query: from global to shared memory.


@gluon.jit
def copy_query_columns_to_smem(
    tensors, q, score_scale_sign, work_tile, h, strides, I_CONSUMER: gl.constexpr, cfg: gl.constexpr
):
    """Loads half of the columns of q, times score_scale_sign, into shared memory; the right half and rope."""
    q_nope, q_pe = q
    q_half = q_nope.index(I_CONSUMER)
    COLUMN_TILES: gl.constexpr = q_half.shape[0] // cfg.BLOCK_M
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = token_head_and_mask_of_q_rows(
        work_tile.m_block, h, work_tile.q_begin, work_tile.seqlen_q, gl.SliceLayout(1, L), cfg
    )
    p_q_nope = tensors.Q_NOPE + tokens * strides.q_nope_t + heads * strides.q_nope_h
    FIRST_COLUMN: gl.constexpr = I_CONSUMER * COLUMN_TILES * TILE_COLUMNS
    column_tiles = ()  # all loads are in flight before the first is used
    for i in gl.static_range(COLUMN_TILES):
        tile = load_query_chunk(p_q_nope, m_row, FIRST_COLUMN + i * TILE_COLUMNS, TILE_COLUMNS, cfg.DV, L)
        column_tiles = column_tiles + (tile,)
    if I_CONSUMER == 1:
        p_q_pe = tensors.Q_PE + tokens * strides.q_pe_t + heads * strides.q_pe_h
        q_pe_tile = load_query_chunk(p_q_pe, m_row, 0, TILE_COLUMNS, rope_columns(cfg), L)
        q_pe.index(0).store((q_pe_tile.to(gl.float32) * score_scale_sign).to(q_pe.dtype))
    for i in gl.static_range(COLUMN_TILES):
        q_half.slice(i * cfg.BLOCK_M, cfg.BLOCK_M).store(
            (column_tiles[i].to(gl.float32) * score_scale_sign).to(q_nope.dtype)
        )
    fence_async_shared()


# QK: scores of a tile.


@gluon.jit
def wait_zero_oob_rows_and_start_qk(
    q, smem_kv, full, stage: gl.constexpr, iter_of_stage, n_block, zero_keys_from, SCORE_LAYOUT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Waits for a tile, zeros its invalid rows and starts QK; returns scores fp32 [BLOCK_M, BLOCK_N] in flight."""
    q_nope, q_pe = q
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    ROWS: gl.constexpr = q_pe.shape[1]
    GROUP_COLUMNS: gl.constexpr = ckv.shape[2]
    TILES_PER_GROUP: gl.constexpr = GROUP_COLUMNS // TILE_COLUMNS
    if not cfg.GATHER_ROWS and (n_block + 1) * BLOCK_N > zero_keys_from:
        # Zero rows past the tile's last key: 0 × NaN is NaN.
        L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
        num_valid = zero_keys_from - n_block * BLOCK_N
        is_valid = gl.arange(0, BLOCK_N, gl.SliceLayout(1, L)) < num_valid
        for i in gl.static_range(COLUMN_GROUPS):
            mbarrier.wait(full.index(COLUMN_GROUPS * stage + i), iter_of_stage & 1)
        for i in range(COLUMN_GROUPS + (num_valid >> 30)):
            smem_tile = ckv.index(stage * COLUMN_GROUPS + i)
            x = smem_tile.load(L)
            smem_tile.store(gl.where(is_valid[:, None], x, gl.full(x.shape, 0.0, x.dtype, L)))
        fence_async_shared()
    # Latents, group by group.
    s = warpgroup_mma_init(gl.full([ROWS, BLOCK_N], 0.0, gl.float32, SCORE_LAYOUT))
    q_tiles = reinterpret(q_nope, q_nope.dtype, [COLUMN_GROUPS * TILES_PER_GROUP, ROWS, TILE_COLUMNS], q_pe.layout)
    opaque_zero = n_block >> 30
    for j in range(COLUMN_GROUPS + opaque_zero):
        i_group = (j + stage * GROUPS_PER_WARPGROUP) % COLUMN_GROUPS
        mbarrier.wait(full.index(COLUMN_GROUPS * stage + i_group), iter_of_stage & 1)
        fence_async_shared_if_gathered(cfg)
        k_tiles = reinterpret(
            ckv.index(COLUMN_GROUPS * stage + i_group), q_nope.dtype, [TILES_PER_GROUP, BLOCK_N, TILE_COLUMNS],
            q_nope.layout,
        )  # fmt: skip
        for i in gl.static_range(TILES_PER_GROUP):
            s = warpgroup_mma(
                q_tiles.index(i_group * TILES_PER_GROUP + i), k_tiles.index(opaque_zero + i).permute((1, 0)), s,
                is_async=True,
            )  # fmt: skip
    # Rotary part.
    mbarrier.wait(full.index(2 * COLUMN_GROUPS + stage), iter_of_stage & 1)
    fence_async_shared_if_gathered(cfg)
    return warpgroup_mma(q_pe.index(opaque_zero), k_pe.index(opaque_zero + stage).permute((1, 0)), s, is_async=True)


# Mask and online softmax, with lazy row_max.


@gluon.jit
def apply_mask(s, n_block, work_tile, cfg: gl.constexpr):
    """Returns scores with −inf where a query row does not see a key of n_block."""
    S: gl.constexpr = s.type.layout
    num_keys, seqlen_q, row_begin = work_tile.num_keys, work_tile.seqlen_q, work_tile.m_block * cfg.BLOCK_M
    if (n_block + 1) * BLOCK_N > num_keys - seqlen_q + 1:
        o_n = n_block * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
        position = num_keys - seqlen_q + (row_begin + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(1, S))) // cfg.GROUP
        s = gl.where((o_n < num_keys)[None, :] & (o_n[None, :] <= position[:, None]), s, float("-inf"))
    return s


@gluon.jit
def exp2_minus_max(x, row_max):
    """Returns 2^(x − row_max); 0 where no key was visible yet."""
    return gl.exp2(x - gl.where(row_max == float("-inf"), 0.0, row_max))


@gluon.jit
def masked_p_and_lazy_row_max(s, row_max, score_scale, n_block, work_tile, cfg: gl.constexpr):
    """Returns (P, row_max_new) of masked scores; row_max is raised only where P would pass 2^RESCALE_THRESHOLD."""
    s = apply_mask(s, n_block, work_tile, cfg)
    block_max = gl.max(s, 1) * score_scale
    row_max_new = gl.where(block_max > row_max + RESCALE_THRESHOLD, block_max, row_max)
    return exp2_minus_max(s * score_scale, row_max_new[:, None]), row_max_new


# Rescale and PV.

RESCALE_64_PTX, RESCALE_64_CONSTRAINTS = map(gl.constexpr, rescale_unless_all_ones_ptx_and_constraints(64))
RESCALE_128_PTX, RESCALE_128_CONSTRAINTS = map(gl.constexpr, rescale_unless_all_ones_ptx_and_constraints(128))


@gluon.jit
def rescale_acc(acc_o, rescale):
    """Returns acc_o × rescale of each row, which is mostly 1."""
    O: gl.constexpr = acc_o.type.layout
    f, acc_o = gl.broadcast(gl.convert_layout(rescale, gl.SliceLayout(1, O))[:, None], acc_o)
    ELEMENTS: gl.constexpr = acc_o.shape[1] // 2  # of a thread: 64 rows, 128 threads
    PTX: gl.constexpr = RESCALE_128_PTX if ELEMENTS == 128 else RESCALE_64_PTX
    CONSTRAINTS: gl.constexpr = RESCALE_128_CONSTRAINTS if ELEMENTS == 128 else RESCALE_64_CONSTRAINTS
    return gl.inline_asm_elementwise(PTX, CONSTRAINTS, [acc_o, f], gl.float32, is_pure=True, pack=ELEMENTS)


@gluon.jit
def start_pv(p, ckv, stage: gl.constexpr, FIRST_COLUMN_GROUP: gl.constexpr, acc_o):
    """Starts acc_o += PV of a tile for GROUPS_PER_WARPGROUP groups of columns, in one MMA: P is read once."""
    v_halves = reinterpret(
        ckv, ckv.dtype, [2 * COLUMN_GROUPS // GROUPS_PER_WARPGROUP, BLOCK_N, GROUPS_PER_WARPGROUP * ckv.shape[2]],
        ckv.layout,
    )  # fmt: skip
    return warpgroup_mma(
        p, v_halves.index((COLUMN_GROUPS * stage + FIRST_COLUMN_GROUP) // GROUPS_PER_WARPGROUP), acc_o, is_async=True
    )


@gluon.jit
def wait_pv_and_release_column_groups(acc_o, empty, stage: gl.constexpr, FIRST_COLUMN_GROUP: gl.constexpr):
    """Waits for PV and releases each group."""
    acc_o = warpgroup_mma_wait(0, [acc_o])
    thread_barrier()
    for i in gl.static_range(GROUPS_PER_WARPGROUP):
        mbarrier.arrive(empty.index(COLUMN_GROUPS * stage + FIRST_COLUMN_GROUP + i))
    return acc_o


@gluon.jit
def wait_p_rescale_and_start_pv_of_even_tile(
    row_max, row_sum, acc_o, smem_kv, p_even_full, smem_row_max_and_sum, num_even_tiles, cfg: gl.constexpr
):
    """Waits for P of an even tile and starts its PV for the right columns; returns (row_max, row_sum, acc_o in flight),
    rescaled."""
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    mbarrier.wait(p_even_full.index(0), num_even_tiles & 1)
    fence_async_shared_if_gathered(cfg)
    row_max_new = smem_row_max_and_sum.index(0).load(row_max.type.layout)
    rescale = exp2_minus_max(row_max, row_max_new)
    return (
        row_max_new,
        row_sum * rescale,
        start_pv(k_pe.index(0), ckv, 0, GROUPS_PER_WARPGROUP, rescale_acc(acc_o, rescale)),
    )


# Main loops.


@gluon.jit
def init_row_max_row_sum_and_acc(SCORE_LAYOUT: gl.constexpr, ACC_LAYOUT: gl.constexpr, cfg: gl.constexpr):
    """Returns (row_max, row_sum, acc_o) before the first tile."""
    ROW: gl.constexpr = gl.SliceLayout(1, SCORE_LAYOUT)
    acc_o = gl.full([cfg.BLOCK_M, padded_rank(cfg) // 2], 0.0, gl.float32, ACC_LAYOUT)
    return gl.full([cfg.BLOCK_M], float("-inf"), gl.float32, ROW), gl.full([cfg.BLOCK_M], 0.0, gl.float32, ROW), acc_o


@gluon.jit
def mainloop_qk_even_tiles_pv_left_columns(
    q, smem_kv, mbarriers, smem_row_max_and_sum, score_scale, work_tile, tile_counts, SCORE_LAYOUT: gl.constexpr,
    ACC_LAYOUT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Computes the left warpgroup's main loop of a work tile; returns (SoftmaxState, TileCounts).

    row_sum is of even tiles only, acc_o of columns 0 … 255. smem_row_max_and_sum: row_max of even and of odd tiles,
    then row_sum of both, which only `consumer` uses
    """
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    full, empty, p_even_full, p_odd_full = mbarriers
    n_block_begin, n_block_end, num_even_tiles, num_odd_tiles = (
        work_tile.n_block_begin, work_tile.n_block_end, tile_counts.num_even_tiles, tile_counts.num_odd_tiles,
    )  # fmt: skip
    row_max, row_sum, acc_o = init_row_max_row_sum_and_acc(SCORE_LAYOUT, ACC_LAYOUT, cfg)
    for n_block in range(n_block_begin, n_block_end, 2):
        # QK, mask and softmax of the even tile.
        s = warpgroup_mma_wait(
            0,
            [
                wait_zero_oob_rows_and_start_qk(
                    q, smem_kv, full, 0, num_even_tiles, n_block, work_tile.num_keys, SCORE_LAYOUT, cfg
                )
            ],
        )
        p, row_max_new = masked_p_and_lazy_row_max(s, row_max, score_scale, n_block, work_tile, cfg)
        p_16bit = p.to(k_pe.dtype)
        # Publish row_max and P.
        smem_row_max_and_sum.index(0).store(row_max_new)
        k_pe.index(0).store(p_16bit)
        fence_async_shared()
        sync_and_arrive(p_even_full.index(0))
        # Rescale and PV of the even tile.
        rescale = exp2_minus_max(row_max, row_max_new)
        row_max, acc_o = row_max_new, rescale_acc(acc_o, rescale)
        acc_o = start_pv(gl.convert_layout(p_16bit, gl.DotOperandLayout(0, ACC_LAYOUT, 2)), ckv, 0, 0, acc_o)
        row_sum = row_sum * rescale + gl.sum(p, 1)
        acc_o = wait_pv_and_release_column_groups(acc_o, empty, 0, 0)
        num_even_tiles += 1
        # Rescale and PV of the odd tile, with the other warpgroup's P.
        if n_block + 1 < n_block_end:
            mbarrier.wait(p_odd_full.index(0), num_odd_tiles & 1)
            fence_async_shared_if_gathered(cfg)
            row_max_new = smem_row_max_and_sum.index(1).load(row_max.type.layout)
            rescale = exp2_minus_max(row_max, row_max_new)
            row_max, row_sum, acc_o = row_max_new, row_sum * rescale, rescale_acc(acc_o, rescale)
            acc_o = start_pv(k_pe.index(1), ckv, 1, 0, acc_o)
            acc_o = wait_pv_and_release_column_groups(acc_o, empty, 1, 0)
            num_odd_tiles += 1
    return SoftmaxState(row_max, row_sum, acc_o), TileCounts(num_even_tiles, num_odd_tiles)


@gluon.jit
def mainloop_qk_odd_tiles_pv_right_columns(
    q, smem_kv, mbarriers, smem_row_max_and_sum, score_scale, work_tile, tile_counts, SCORE_LAYOUT: gl.constexpr,
    ACC_LAYOUT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Computes the right warpgroup's main loop, as `mainloop_qk_even_tiles_pv_left_columns`. The last even tile may
    have no odd one."""
    ckv, k_pe = smem_kv.latents, smem_kv.pe
    full, empty, p_even_full, p_odd_full = mbarriers
    n_block_begin, n_block_end, num_even_tiles, num_odd_tiles = (
        work_tile.n_block_begin, work_tile.n_block_end, tile_counts.num_even_tiles, tile_counts.num_odd_tiles,
    )  # fmt: skip
    row_max, row_sum, acc_o = init_row_max_row_sum_and_acc(SCORE_LAYOUT, ACC_LAYOUT, cfg)
    for n_block in range(n_block_begin, n_block_end - 1, 2):
        # QK of the odd tile, PV of the even one.
        s = wait_zero_oob_rows_and_start_qk(
            q, smem_kv, full, 1, num_odd_tiles, n_block + 1, work_tile.num_keys, SCORE_LAYOUT, cfg
        )
        row_max, row_sum, acc_o = wait_p_rescale_and_start_pv_of_even_tile(
            row_max, row_sum, acc_o, smem_kv, p_even_full, smem_row_max_and_sum, num_even_tiles, cfg
        )
        # Mask and softmax; publish row_max and P.
        s = warpgroup_mma_wait(1, [s])
        p, row_max_new = masked_p_and_lazy_row_max(s, row_max, score_scale, n_block + 1, work_tile, cfg)
        p_16bit = p.to(k_pe.dtype)
        smem_row_max_and_sum.index(1).store(row_max_new)
        k_pe.index(1).store(p_16bit)
        fence_async_shared()
        sync_and_arrive(p_odd_full.index(0))
        # Rescale and PV of the odd tile.
        acc_o = wait_pv_and_release_column_groups(acc_o, empty, 0, GROUPS_PER_WARPGROUP)
        rescale = exp2_minus_max(row_max, row_max_new)
        row_max, acc_o = row_max_new, rescale_acc(acc_o, rescale)
        acc_o = start_pv(
            gl.convert_layout(p_16bit, gl.DotOperandLayout(0, ACC_LAYOUT, 2)), ckv, 1, GROUPS_PER_WARPGROUP, acc_o
        )
        row_sum = row_sum * rescale + gl.sum(p, 1)
        acc_o = wait_pv_and_release_column_groups(acc_o, empty, 1, GROUPS_PER_WARPGROUP)
        num_even_tiles += 1
        num_odd_tiles += 1
    # PV of an even tile without an odd one.
    if (n_block_end - n_block_begin) % 2 == 1:
        row_max, row_sum, acc_o = wait_p_rescale_and_start_pv_of_even_tile(
            row_max, row_sum, acc_o, smem_kv, p_even_full, smem_row_max_and_sum, num_even_tiles, cfg
        )
        acc_o = wait_pv_and_release_column_groups(acc_o, empty, 0, GROUPS_PER_WARPGROUP)
        num_even_tiles += 1
    return SoftmaxState(row_max, row_sum, acc_o), TileCounts(num_even_tiles, num_odd_tiles)


# Epilogue: the output, or a partial state for the combine.


@gluon.jit
def store_output_lse_or_unnormalized_state(
    state, acc_scale, lse, smem_q, tensors, is_unsplit, partial_slot, work_tile, h, strides, I_CONSUMER: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Stores this warpgroup's columns of the output, or of a split's partial state.

    They go through the memory of this warpgroup's half of the query, so that rows are contiguous: 5 µs less.
    """
    OUT, SPLIT_WORKSPACE, q_begin, seqlen_q = (
        tensors.OUT, tensors.SPLIT_WORKSPACE, work_tile.q_begin, work_tile.seqlen_q,
    )  # fmt: skip
    NUM_PARTS: gl.constexpr = 2  # each of as many bytes as half of the query
    COLUMNS: gl.constexpr = padded_rank(cfg) // 2 // NUM_PARTS
    acc_parts = gl.split(gl.permute(gl.reshape(state.acc_o, [cfg.BLOCK_M, NUM_PARTS, COLUMNS]), (0, 2, 1)))
    acc_scale = gl.convert_layout(gl.where(is_unsplit, acc_scale, 1.0), gl.SliceLayout(1, acc_parts[0].type.layout))
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    STAGING_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 16, [1, 0])
    staging = reinterpret(smem_q.index(I_CONSUMER), gl.float32, [cfg.BLOCK_M, COLUMNS], STAGING_LAYOUT)
    staging_steps = reinterpret(
        smem_q.index(I_CONSUMER), gl.float32, [cfg.BLOCK_M // ROWS_PER_STORE, ROWS_PER_STORE, COLUMNS], STAGING_LAYOUT
    )
    num_rows = gl.minimum(seqlen_q * cfg.GROUP - work_tile.m_block * cfg.BLOCK_M, cfg.BLOCK_M)
    for i in gl.static_range(NUM_PARTS):
        staging.store(acc_parts[i] * acc_scale[:, None])
        o_d = (I_CONSUMER * NUM_PARTS + i) * COLUMNS + gl.arange(0, COLUMNS, gl.SliceLayout(0, W))
        for j in range((num_rows + ROWS_PER_STORE - 1) // ROWS_PER_STORE):
            out = staging_steps.index(j).load(W)
            o_r = j * ROWS_PER_STORE + gl.arange(0, ROWS_PER_STORE, gl.SliceLayout(1, W))
            mask = (o_r < num_rows)[:, None]
            if is_unsplit:
                o_q = work_tile.m_block * cfg.BLOCK_M + o_r
                tokens = (q_begin + o_q // cfg.GROUP).to(gl.int64)
                heads = (h * cfg.GROUP + o_q % cfg.GROUP).to(gl.int64)
                p_out = (OUT + tokens * strides.out_t + heads * strides.out_h)[:, None] + o_d[None, :]
                mask_out = mask_of_output_columns(mask, o_d[None, :], cfg)
                gl.store(p_out, cast_output_saturating_fp8(out, OUT, cfg), mask=mask_out)
            else:
                p_row = partial_row_ptr(SPLIT_WORKSPACE, partial_slot, o_r, cfg)
                gl.store(p_row[:, None] + o_d[None, :], out, mask=mask)
    if I_CONSUMER == 0:
        ROW: gl.constexpr = state.row_max.type.layout
        tokens, heads, m_row = token_head_and_mask_of_q_rows(work_tile.m_block, h, q_begin, seqlen_q, ROW, cfg)
        if is_unsplit:
            if cfg.HAS_LSE:
                gl.store(tensors.LSE + tokens * strides.lse_t + heads * strides.lse_h, lse, mask=m_row)
        else:
            p_row = partial_row_ptr(SPLIT_WORKSPACE, partial_slot, gl.arange(0, cfg.BLOCK_M, ROW), cfg)
            store_partial_stats(p_row, state.row_max, state.row_sum, m_row, cfg)


# Consumer warpgroup: query, main loop and epilogue of its work tiles.


@gluon.jit
def consumer(
    tensors, q, smem_kv, mbarriers, epilogue_barriers, smem_row_max_and_sum, scales, cta_range, strides,
    LEFT: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Computes the CTA range for one block of heads and half of the columns."""
    i_cta, block, block_end, i_request, n_block_base = (
        cta_range.i_cta, cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    I_CONSUMER: gl.constexpr = 0 if LEFT else 1
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, padded_rank(cfg) // 2, 16])
    h = i_cta % cfg.HEADS
    tile_counts, num_done = TileCounts(0, 0), 0
    # The query takes the score scale's sign: the maximum of the scaled scores is that of the products.
    sign = gl.where(scales.score_scale < 0, -1.0, 1.0)
    score_scale = gl.maximum(gl.abs(scales.score_scale), 1e-30)
    while block < block_end:
        # Next work tile.
        work_tile = find_work_tile_at_block_cut_at_end(
            tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, block, block_end, i_request, n_block_base, cfg
        )
        i_request, n_block_base = work_tile.i_request, work_tile.n_block_base
        # Load the query.
        copy_query_columns_to_smem(tensors, q, sign, work_tile, h, strides, I_CONSUMER, cfg)
        sync_and_arrive(epilogue_barriers.q_full[I_CONSUMER].index(0))
        mbarrier.wait(epilogue_barriers.q_full[1 - I_CONSUMER].index(0), num_done & 1)
        # Main loop; then sum row_sum of both warpgroups.
        mainloop: gl.constexpr = (
            mainloop_qk_even_tiles_pv_left_columns if LEFT else mainloop_qk_odd_tiles_pv_right_columns
        )
        mainloop_state, tile_counts = mainloop(
            q, smem_kv, mbarriers, smem_row_max_and_sum, score_scale, work_tile, tile_counts, S, O, cfg
        )
        row_sum = mainloop_state.row_sum
        smem_row_max_and_sum.index(2 + I_CONSUMER).store(row_sum)
        sync_and_arrive(epilogue_barriers.row_sum_full[I_CONSUMER].index(0))
        mbarrier.wait(epilogue_barriers.row_sum_full[1 - I_CONSUMER].index(0), num_done & 1)
        row_sum += smem_row_max_and_sum.index(3 - I_CONSUMER).load(gl.SliceLayout(1, S))
        num_done += 1
        # Epilogue: metadata, then the output or a partial state.
        if work_tile.n_block_begin == 0:  # both warpgroups store the same
            store_num_splits_and_first_cta(tensors, work_tile, cta_range, cfg)
        row_max, row_sum = (
            gl.convert_layout(mainloop_state.row_max, gl.SliceLayout(1, O)),
            gl.convert_layout(row_sum, gl.SliceLayout(1, O)),
        )
        _, heads, m_row = token_head_and_mask_of_q_rows(
            work_tile.m_block, h, work_tile.q_begin, work_tile.seqlen_q, gl.SliceLayout(1, O), cfg
        )
        acc_scale, lse = compute_acc_scale_and_lse(
            row_max, row_sum, scales.value_scale, tensors.SINKS, heads, m_row, cfg, cfg.LSE_OF_KEYS
        )
        partial_slot = 2 * i_cta + (work_tile.n_block_begin == 0).to(gl.int32)
        is_unsplit = work_tile.n_block_end - work_tile.n_block_begin == work_tile.num_n_blocks
        state = SoftmaxState(row_max, row_sum, mainloop_state.acc_o)
        store_output_lse_or_unnormalized_state(
            state, acc_scale, lse, q.latents, tensors, is_unsplit, partial_slot, work_tile, h, strides, I_CONSUMER, cfg
        )
        block += work_tile.n_block_end - work_tile.n_block_begin


# The kernel.


@gluon.jit
def mla_decode_two_warpgroups_kernel(
    Q_NOPE, Q_PE, CKV_MAP, KPE_MAP, SCALES_MAP, CKV, KPE, SCALES, ckv_row_pitch_16_bytes, kpe_row_pitch_16_bytes,
    scale_row_pitch_16_bytes,
    PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE,
    softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE,
    B, T, oob_row, scale_rows_per_page, max_m_blocks, stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h,
    stride_table_b, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    STAGES: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Computes one CTA range for one block of heads."""
    gl.static_assert(cfg.CODE == "bf16", "a code that this kernel does not know")
    # Prologue: arguments; lengths of all requests, early.
    pdl_wait()
    i_cta = gl.program_id(0)
    num_ctas = gl.num_programs(0)
    tensors = AttentionTensors(
        Q_NOPE, Q_PE, SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, SPLIT_WORKSPACE,
        split_metadata_ptr(SPLIT_WORKSPACE, num_ctas, cfg),
    )  # fmt: skip
    strides = Strides(
        stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h, stride_out_t, stride_out_h, stride_lse_t,
        stride_lse_h,
    )  # fmt: skip
    tensor_maps = TensorMaps(CKV_MAP, KPE_MAP, SCALES_MAP)
    cache_rows = CacheRows(CKV, KPE, SCALES, ckv_row_pitch_16_bytes, kpe_row_pitch_16_bytes, scale_row_pitch_16_bytes)
    page_lookup = PageLookup(PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, stride_table_b, oob_row, scale_rows_per_page)
    if cfg.VARLEN_Q:
        padding_begin = gl.load(CU_SEQLENS_Q + B).to(gl.int32)  # arrives with the lengths
    block_counts = load_n_and_m_block_counts(SEQ_LENS, CU_SEQLENS_Q, B, cfg, True) if fits_all_requests(cfg) else ()
    # Shared memory and barriers.
    DTYPE: gl.constexpr = CKV_MAP.dtype
    SWIZZLE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    FLAT_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    GROUP_COLUMNS: gl.constexpr = padded_rank(cfg) // COLUMN_GROUPS
    ckv = gl.allocate_shared_memory(DTYPE, [2 * COLUMN_GROUPS, BLOCK_N, GROUP_COLUMNS], SWIZZLE_LAYOUT)
    k_pe = gl.allocate_shared_memory(DTYPE, [2, BLOCK_N, cfg.BLOCK_PE], SWIZZLE_LAYOUT)
    q_nope = gl.allocate_shared_memory(DTYPE, [2, cfg.CHUNKS // 2 * cfg.BLOCK_M, TILE_COLUMNS], SWIZZLE_LAYOUT)
    q_pe = gl.allocate_shared_memory(DTYPE, [1, cfg.BLOCK_M, cfg.BLOCK_PE], SWIZZLE_LAYOUT)
    smem_row_max_and_sum = gl.allocate_shared_memory(gl.float32, [4, cfg.BLOCK_M], FLAT_LAYOUT)
    mbarriers = Mbarriers(
        allocate_mbarriers(2 * COLUMN_GROUPS + 2, copy_arrivals(cfg)),
        allocate_mbarriers(2 * COLUMN_GROUPS), allocate_mbarriers(1), allocate_mbarriers(1),
    )  # fmt: skip
    epilogue_barriers = EpilogueBarriers(
        (allocate_mbarriers(1), allocate_mbarriers(1)), (allocate_mbarriers(1), allocate_mbarriers(1))
    )
    # Tile scheduler: this CTA's range, uniform in each warp.
    scales = load_score_and_value_scales(softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, cfg)
    cta_range = make_cta_range_of_flat_n_blocks(
        SEQ_LENS, CU_SEQLENS_Q, B, block_counts, i_cta // cfg.HEADS, num_ctas // cfg.HEADS, max_m_blocks, i_cta, cfg
    )
    smem_uniform = gl.allocate_shared_memory(gl.int32, [5, 1], FLAT_LAYOUT)
    cta_range = CtaRange(
        max_m_blocks, i_cta, block_begin=make_uniform_through_smem(smem_uniform, 0, cta_range.block_begin),
        block_end=make_uniform_through_smem(smem_uniform, 1, cta_range.block_end),
        blocks_per_range=make_uniform_through_smem(smem_uniform, 2, cta_range.blocks_per_range),
        i_request=make_uniform_through_smem(smem_uniform, 3, cta_range.i_request),
        n_block_base=make_uniform_through_smem(smem_uniform, 4, cta_range.n_block_base),
    )  # fmt: skip
    q, smem_kv = QuerySmem(q_nope, q_pe), SmemKV(ckv, k_pe, k_pe)
    thread_barrier()  # arguments of the partitions may overwrite memory that reductions read
    # The producer is the default partition: it has four warps anyway. Addresses of rows take it more registers.
    CONSUMER_REGISTERS: gl.constexpr = 216 if cfg.GATHER_ROWS else 240
    gl.warp_specialize(
        [
            (tma_or_listed_rows_producer, (tensor_maps, cache_rows, page_lookup, smem_kv, mbarriers, cta_range, cfg)),
            (
                consumer,
                (tensors, q, smem_kv, mbarriers, epilogue_barriers, smem_row_max_and_sum, scales, cta_range, strides,
                True, cfg),
            ),
            (
                consumer,
                (
                    tensors, q, smem_kv, mbarriers, epilogue_barriers, smem_row_max_and_sum, scales, cta_range,
                    strides, False,
                    cfg,
                ),
            ),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, CONSUMER_REGISTERS],
    )  # fmt: skip
    # Query rows of no request.
    if cfg.VARLEN_Q:
        store_empty_output_of_padding_rows(
            OUT, LSE, padding_begin, T, i_cta, num_ctas, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg
        )
