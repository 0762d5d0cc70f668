"""The producer warp of MLA decode: copies the KV tiles of a CTA range by TMA, as stages become free.

`two_warpgroups.py` has a producer of its own, which shares the page lookup. For `three_warpgroups.py` this one also
prepares group scales.

Wait for a free stage: in `tma_producer_with_scale_prep`, on `empty`; mask, rescale, combine: none here.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import tma_load
from ..parts.pipeline import sync_and_arrive
from ..parts.tile_scheduler import (
    advance_to_request_of_block,
    load_request_lengths_and_block_counts,
    make_work_tile_at_block,
)
from .gather import load_row_indices, signal_copies, start_copy_of_gathered_rows

SCALE_COLUMNS = gl.constexpr(6)  # rows of score_scales of a stage
MIN_SCALE = gl.constexpr(1e-30)  # of a key's chunks: its reciprocal is finite


class ScalePrepAndFirstQFull(NamedTuple):
    """Extra work of the producer: let the first query load before the second tile; prepare group scales."""

    first_q_full: gl.shared_memory_descriptor  # full barrier of the first query
    score_scales: gl.shared_memory_descriptor
    v_scale_ratios: gl.shared_memory_descriptor
    scales_full: gl.shared_memory_descriptor  # full barriers of score_scales and v_scale_ratios, by stage


@gluon.jit
def lookup_ckv_kpe_and_scale_tma_rows(
    p_page_ids, n_block, num_keys, page_lookup, KEYS_PER_COPY: gl.constexpr, cfg: gl.constexpr
):
    """Returns (ckv, kpe, scale) rows of n_block's copies in their matrices; `oob_row` lies past each and reads as 0."""
    oob_row = page_lookup.oob_row
    ckv_rows, kpe_rows, scale_rows = (), (), ()
    for j in gl.static_range(cfg.BLOCK_N // KEYS_PER_COPY):
        key = n_block * cfg.BLOCK_N + j * KEYS_PER_COPY
        page = gl.load(p_page_ids + key // cfg.PAGE, mask=key < num_keys, other=-1).to(gl.int32)
        ckv_rows = ckv_rows + (gl.where(page < 0, oob_row, page * cfg.CKV_ROWS_PER_PAGE + key % cfg.PAGE),)
        kpe_rows = kpe_rows + (gl.where(page < 0, oob_row, page * cfg.KPE_ROWS_PER_PAGE + key % cfg.PAGE),)
        scale_rows = scale_rows + (
            gl.where(page < 0, oob_row, page * page_lookup.scale_rows_per_page + key % cfg.PAGE),
        )
    return ckv_rows, kpe_rows, scale_rows


@gluon.jit
def smem_tile_of_columns(smem_ring, stage, i_column_tile, STAGES: gl.constexpr):
    """Returns the shared memory of a stage's i-th column tile."""
    return smem_ring.index(stage * (smem_ring.shape[0] // STAGES) + i_column_tile)


@gluon.constexpr_function
def scale_layout(num_warps):
    return gl.BlockedLayout([1, 4], [32, 1], [num_warps, 1], [1, 0])


@gluon.jit
def store_group_scales_log2_max_inv_max_and_ratios(
    group_scales, smem_scales_log2_max_and_inv_max, smem_ratios_to_max, stage, num_valid
):
    """Stores a tile's group scales in shared memory; past the last key they are 1.

    group_scales: fp32 [BLOCK_N, 4] in `scale_layout`
    smem_scales_log2_max_and_inv_max: fp32 [SCALE_COLUMNS * STAGES, BLOCK_N], for QK: the four scales, log2 of the
        largest, 1 / largest
    smem_ratios_to_max: fp16 [4 * STAGES, BLOCK_N], for PV: the four scales over the largest
    """
    L: gl.constexpr = scale_layout(gl.num_warps())
    BLOCK_N: gl.constexpr = group_scales.shape[0]
    is_valid = gl.arange(0, BLOCK_N, gl.SliceLayout(1, L)) < num_valid
    group_scales = gl.where(is_valid[:, None], group_scales, 1.0)
    max_scale = gl.maximum(gl.max(gl.abs(group_scales), 1), MIN_SCALE)
    inv_scale = 1.0 / max_scale
    smem_scales_log2_max_and_inv_max.index(SCALE_COLUMNS * stage + 4).store(gl.log2(max_scale))
    smem_scales_log2_max_and_inv_max.index(SCALE_COLUMNS * stage + 5).store(inv_scale)
    even, odd = gl.split(gl.reshape(group_scales, [BLOCK_N, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    scales = (s0, s1, s2, s3)
    for i in gl.static_range(4):
        group_scale = scales[i]
        smem_scales_log2_max_and_inv_max.index(SCALE_COLUMNS * stage + i).store(group_scale)
        ratio = group_scale * gl.convert_layout(inv_scale, group_scale.type.layout)
        smem_ratios_to_max.index(4 * stage + i).store(ratio.to(gl.float16))


@gluon.jit
def tma_producer_with_scale_prep(
    tensor_maps, page_lookup, full, empty, smem_kv, cta_range, scale_prep_and_first_q_full, STAGES: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Copies every tile of the CTA range.

    full: one barrier per stage or more, used in rotation
    scale_prep_and_first_q_full: empty, or a ScalePrepAndFirstQFull
    """
    PREPARES_SCALES: gl.constexpr = len(scale_prep_and_first_q_full) > 0
    NUM_FULL_BARRIERS: gl.constexpr = full.shape[0]
    CKV_MAP, KPE_MAP, SCALES_MAP = tensor_maps
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    KEYS_PER_COPY: gl.constexpr = CKV_MAP.block_shape[0]
    NUM_COPIES: gl.constexpr = cfg.BLOCK_N // KEYS_PER_COPY
    WIDTH: gl.constexpr = CKV_MAP.block_shape[1]
    COLUMN_TILES: gl.constexpr = cfg.CHUNKS
    PE_BYTES: gl.constexpr = KPE_MAP.block_shape[1] * KPE_MAP.dtype.primitive_bitwidth // 8
    LATENT_BYTES: gl.constexpr = 2 * cfg.BLOCK_DV
    STAGE_BYTES: gl.constexpr = cfg.BLOCK_N * (LATENT_BYTES + PE_BYTES + (4 * cfg.CHUNKS if cfg.GROUP_SCALES else 0))
    kv_iter = 0
    request = load_request_lengths_and_block_counts(
        page_lookup.SEQ_LENS, page_lookup.CU_SEQLENS_Q, i_request, True, cfg
    )
    while block < block_end:
        # Next work tile.
        i_request, n_block_base, request = advance_to_request_of_block(
            page_lookup.SEQ_LENS, page_lookup.CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
        )
        p_page_ids, num_keys = page_lookup.PAGE_TABLE + i_request.to(gl.int64) * page_lookup.stride, request.num_keys
        work_tile = make_work_tile_at_block(block, block_end, i_request, n_block_base, request)
        for n_block in range(work_tile.n_block_begin, work_tile.n_block_end):
            # Page lookup.
            stage = kv_iter % STAGES
            ckv_rows, kpe_rows, scale_rows = lookup_ckv_kpe_and_scale_tma_rows(
                p_page_ids, n_block, num_keys, page_lookup, KEYS_PER_COPY, cfg
            )
            # Wait for a free stage.
            mbarrier.wait(empty.index(stage), ((kv_iter // STAGES) & 1) ^ 1)
            if PREPARES_SCALES:  # noqa: SIM102 - known to the compiler, unlike the other
                if kv_iter == 1:
                    mbarrier.wait(scale_prep_and_first_q_full.first_q_full.index(0), 0)
            # Copy the tile.
            full_barrier = full.index(kv_iter % NUM_FULL_BARRIERS)
            mbarrier.expect(full_barrier, STAGE_BYTES)
            for j in gl.static_range(NUM_COPIES):
                smem_tile = smem_kv.pe.index(stage).slice(j * KEYS_PER_COPY, KEYS_PER_COPY)
                tma_load(KPE_MAP, [kpe_rows[j], 0], full_barrier, smem_tile)
                if cfg.GROUP_SCALES:
                    smem_tile = smem_kv.scales.index(stage).slice(j * KEYS_PER_COPY, KEYS_PER_COPY)
                    tma_load(SCALES_MAP, [scale_rows[j], 0], full_barrier, smem_tile)
                for i in gl.static_range(COLUMN_TILES):
                    smem_tile = smem_tile_of_columns(smem_kv.latents, stage, i, STAGES).slice(
                        j * KEYS_PER_COPY, KEYS_PER_COPY
                    )
                    tma_load(CKV_MAP, [ckv_rows[j], i * WIDTH], full_barrier, smem_tile)
            # Wait for the tile and prepare its group scales.
            if cfg.GROUP_SCALES and PREPARES_SCALES:
                mbarrier.wait(full_barrier, (kv_iter // NUM_FULL_BARRIERS) & 1)
                store_group_scales_log2_max_inv_max_and_ratios(
                    smem_kv.scales.index(stage).load(scale_layout(gl.num_warps())),
                    scale_prep_and_first_q_full.score_scales, scale_prep_and_first_q_full.v_scale_ratios, stage,
                    num_keys - n_block * cfg.BLOCK_N,
                )  # fmt: skip
                sync_and_arrive(scale_prep_and_first_q_full.scales_full.index(stage))
            kv_iter += 1
        block += work_tile.n_block_end - work_tile.n_block_begin


@gluon.jit
def listed_rows_producer_with_scale_prep(
    cache_rows, listed_rows_lookup, full, empty, smem_kv, cta_range, scale_prep_and_first_q_full,
    STAGES: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Copies every tile of the CTA range by rows (`gather`). listed_rows_lookup: its table has a cache row per key."""
    PREPARES_SCALES: gl.constexpr = len(scale_prep_and_first_q_full) > 0 and cfg.GROUP_SCALES
    NUM_FULL_BARRIERS: gl.constexpr = full.shape[0]
    CKV_COLUMNS: gl.constexpr = smem_kv.latents.shape[2]
    CKV_BITS: gl.constexpr = smem_kv.latents.dtype.primitive_bitwidth
    COLUMN_TILES: gl.constexpr = cfg.CHUNKS
    PE_COLUMNS: gl.constexpr = smem_kv.pe.shape[2]
    PE_BITS: gl.constexpr = smem_kv.pe.dtype.primitive_bitwidth
    ROWS_ALIKE: gl.constexpr = CKV_COLUMNS * CKV_BITS == PE_COLUMNS * PE_BITS
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    kv_iter = 0
    request = load_request_lengths_and_block_counts(
        listed_rows_lookup.SEQ_LENS, listed_rows_lookup.CU_SEQLENS_Q, i_request, True, cfg
    )
    while block < block_end:
        # Next work tile.
        i_request, n_block_base, request = advance_to_request_of_block(
            listed_rows_lookup.SEQ_LENS, listed_rows_lookup.CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
        )
        p_row_indices, num_keys = (
            listed_rows_lookup.PAGE_TABLE + i_request.to(gl.int64) * listed_rows_lookup.stride,
            request.num_keys,
        )
        work_tile = make_work_tile_at_block(block, block_end, i_request, n_block_base, request)
        next_rows = load_row_indices(p_row_indices, work_tile.n_block_begin, num_keys, CKV_COLUMNS, CKV_BITS, cfg)
        next_scale_rows = load_row_indices(p_row_indices, work_tile.n_block_begin, num_keys, 4, 32, cfg)
        for n_block in range(work_tile.n_block_begin, work_tile.n_block_end):
            # Rows, loaded an iteration ahead.
            rows = next_rows
            next_rows = load_row_indices(p_row_indices, n_block + 1, num_keys, CKV_COLUMNS, CKV_BITS, cfg)
            pe_rows = rows
            if not ROWS_ALIKE:
                pe_rows = load_row_indices(p_row_indices, n_block, num_keys, PE_COLUMNS, PE_BITS, cfg)
            if cfg.GROUP_SCALES:
                scale_rows = next_scale_rows
                next_scale_rows = load_row_indices(p_row_indices, n_block + 1, num_keys, 4, 32, cfg)
                if PREPARES_SCALES:
                    LAYOUT: gl.constexpr = scale_layout(gl.num_warps())
                    p_scales = (
                        cache_rows.SCALES
                        + gl.convert_layout(scale_rows, gl.SliceLayout(1, LAYOUT), assert_trivial=True).to(gl.int64)
                        * cache_rows.scale_row_pitch_16_bytes
                        * 4
                    )
                    p_scales = p_scales[:, None] + gl.arange(0, 4, gl.SliceLayout(0, LAYOUT))[None, :]
                    group_scales = gl.load(
                        p_scales, mask=gl.convert_layout(scale_rows, gl.SliceLayout(1, LAYOUT))[:, None] >= 0, other=1.0
                    )
            # Wait for a free stage.
            stage = kv_iter % STAGES
            mbarrier.wait(empty.index(stage), ((kv_iter // STAGES) & 1) ^ 1)
            # Copy the tile.
            start_copy_of_gathered_rows(
                cache_rows.KPE, cache_rows.kpe_row_pitch_16_bytes, pe_rows, 0, smem_kv.pe.index(stage)
            )
            if cfg.GROUP_SCALES and not PREPARES_SCALES:
                start_copy_of_gathered_rows(
                    cache_rows.SCALES, cache_rows.scale_row_pitch_16_bytes, scale_rows, 0, smem_kv.scales.index(stage)
                )
            for i in gl.static_range(COLUMN_TILES):
                smem_tile = smem_tile_of_columns(smem_kv.latents, stage, i, STAGES)
                start_copy_of_gathered_rows(
                    cache_rows.CKV, cache_rows.ckv_row_pitch_16_bytes, rows, i * CKV_COLUMNS, smem_tile
                )
            signal_copies(full.index(kv_iter % NUM_FULL_BARRIERS))
            if PREPARES_SCALES:
                store_group_scales_log2_max_inv_max_and_ratios(
                    group_scales, scale_prep_and_first_q_full.score_scales,
                    scale_prep_and_first_q_full.v_scale_ratios, stage, num_keys - n_block * cfg.BLOCK_N,
                )  # fmt: skip
                sync_and_arrive(scale_prep_and_first_q_full.scales_full.index(stage))
            kv_iter += 1
        block += work_tile.n_block_end - work_tile.n_block_begin


@gluon.jit
def tma_or_listed_rows_producer(
    tensor_maps, cache_rows, page_lookup, full, empty, smem_kv, cta_range, scale_prep_and_first_q_full,
    STAGES: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Copies every tile of the CTA range: by tensor maps, or listed keys by their rows."""
    if cfg.GATHER_ROWS:
        listed_rows_producer_with_scale_prep(
            cache_rows, page_lookup, full, empty, smem_kv, cta_range, scale_prep_and_first_q_full, STAGES, cfg
        )
    else:
        tma_producer_with_scale_prep(
            tensor_maps, page_lookup, full, empty, smem_kv, cta_range, scale_prep_and_first_q_full, STAGES, cfg
        )
