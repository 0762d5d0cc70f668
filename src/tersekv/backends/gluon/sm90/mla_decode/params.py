"""What MLA decode's kernels share: parameter structs, prologue, and steps of query load, dequant and epilogue."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....triton.parts.dequant import E4M3_PTX
from ...versions import reinterpret
from ..parts.combine import num_splits_of_tile, store_split_metadata
from ..parts.dequant import load_device_or_host_scale
from ..parts.online_softmax import LOG2E
from ..parts.tile_scheduler import (
    find_request_and_base_of_block,
    flat_block_ends_from_counts,
    request_and_base_of_block_from_ends,
    rounded_or_unsplit_bounds_and_blocks_per_range,
    rounded_or_unsplit_bounds_blocks_per_range_from_counts,
)


class AttentionTensors(NamedTuple):
    """Tensors that consumers read and write. SPLIT_METADATA: see `tile_scheduler.split_metadata_ptr`."""

    Q_NOPE: gl.tensor
    Q_PE: gl.tensor
    SEQ_LENS: gl.tensor
    CU_SEQLENS_Q: gl.tensor
    SINKS: gl.tensor
    OUT: gl.tensor
    LSE: gl.tensor
    SPLIT_WORKSPACE: gl.tensor
    SPLIT_METADATA: gl.tensor


class Strides(NamedTuple):
    q_nope_t: gl.tensor
    q_nope_h: gl.tensor
    q_pe_t: gl.tensor
    q_pe_h: gl.tensor
    out_t: gl.tensor
    out_h: gl.tensor
    lse_t: gl.tensor
    lse_h: gl.tensor


class PageLookup(NamedTuple):
    """Where a request's keys lie in the cache."""

    PAGE_TABLE: gl.tensor
    SEQ_LENS: gl.tensor
    CU_SEQLENS_Q: gl.tensor
    stride: gl.tensor  # of the page table's rows
    oob_row: gl.tensor  # a row past the cache: TMA reads it as 0
    scale_rows_per_page: gl.tensor  # rows of group scales of a page


class TensorMaps(NamedTuple):
    """Tensor maps of latents, rotary part and group scales."""

    latents: gl.tensor
    pe: gl.tensor
    scales: gl.tensor


class SmemKV(NamedTuple):
    """Their stages in shared memory; without group scales, `scales` is any of the others."""

    latents: gl.shared_memory_descriptor
    pe: gl.shared_memory_descriptor
    scales: gl.shared_memory_descriptor


class QuerySmem(NamedTuple):
    """The query in shared memory, by tiles of columns."""

    latents: gl.shared_memory_descriptor
    pe: gl.shared_memory_descriptor


class Scales(NamedTuple):
    score_scale: gl.tensor  # of scores, base 2
    value_scale: gl.tensor  # of the output: V scale × out_scale


class CtaRange(NamedTuple):
    """The n_blocks [block_begin, block_end), of all requests', that a CTA computes for a block of heads."""

    max_m_blocks: gl.tensor  # of a request
    i_cta: gl.tensor
    blocks_per_range: gl.tensor  # of every CTA range
    block_begin: gl.tensor
    block_end: gl.tensor
    i_request: gl.tensor  # the request of block_begin
    n_block_base: gl.tensor  # flat index of that request's first n_block


class SoftmaxState(NamedTuple):
    """Of query rows: row_max (lazily raised), row_sum and acc_o."""

    row_max: gl.tensor
    row_sum: gl.tensor
    acc_o: gl.tensor


# Prologue.


@gluon.jit
def load_score_and_value_scales(
    softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, cfg: gl.constexpr
):
    """Returns the call's Scales."""
    scale_kv = load_device_or_host_scale(kv_scale, KV_SCALE, cfg.HAS_V_SCALE)
    score_scale = load_device_or_host_scale(softmax_scale, SOFTMAX_SCALE, cfg.HAS_SOFTMAX_SCALE) * LOG2E * scale_kv
    return Scales(score_scale, scale_kv * load_device_or_host_scale(out_scale, OUT_SCALE, cfg.HAS_OUT_SCALE))


@gluon.constexpr_function
def fits_all_requests(cfg):
    """Whether BLOCK_B holds all requests: then lengths are loaded early (`load_n_and_m_block_counts`)."""
    return cfg.BLOCK_B < 1024 and not cfg.UNSPLIT


@gluon.jit
def make_cta_range_of_flat_n_blocks(
    SEQ_LENS, CU_SEQLENS_Q, B, block_counts_of_all_requests, i_range, num_ranges, max_m_blocks, i_cta, cfg: gl.constexpr
):
    """Returns this CTA's CtaRange. The counts are `load_n_and_m_block_counts`', if BLOCK_B holds all."""
    if fits_all_requests(cfg):
        flat_block_ends = flat_block_ends_from_counts(block_counts_of_all_requests)
        block_begin, block_end, blocks_per_range = rounded_or_unsplit_bounds_blocks_per_range_from_counts(
            block_counts_of_all_requests, i_range, num_ranges, cfg
        )
        i_request, n_block_base = request_and_base_of_block_from_ends(
            flat_block_ends, block_counts_of_all_requests, gl.minimum(block_begin, block_end - 1)
        )
    else:
        block_begin, block_end, blocks_per_range = rounded_or_unsplit_bounds_and_blocks_per_range(
            SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, cfg
        )
        i_request, n_block_base = find_request_and_base_of_block(
            SEQ_LENS, CU_SEQLENS_Q, B, gl.minimum(block_begin, block_end - 1), cfg
        )
    return CtaRange(max_m_blocks, i_cta, blocks_per_range, block_begin, block_end, i_request, n_block_base)


@gluon.jit
def make_uniform_through_smem(smem_scratch, i: gl.constexpr, x):
    """Returns x read back from shared memory: so the compiler knows that x, and loops over it, are uniform."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    smem_scratch.index(i).store(gl.full([1], x, gl.int32, L))
    return gl.max(smem_scratch.index(i).load(L), 0)


# Query, dequant and V.


@gluon.constexpr_function
def padded_rank(cfg):
    """Columns of a latent row in shared memory: past the rank TMA reads zeros."""
    return cfg.PACK * cfg.BLOCK_DV


@gluon.constexpr_function
def rope_columns(cfg):
    """Columns of a key's rotary part."""
    return cfg.PACK_PE * cfg.PACKED_PE


@gluon.jit
def mask_of_output_columns(m_row, o_d, cfg: gl.constexpr):
    """Returns m_row, of rows or a tile of them, without columns o_d past the rank."""
    return m_row & (o_d < cfg.DV) if padded_rank(cfg) > cfg.DV else m_row


@gluon.jit
def load_query_chunk(
    p_row, m_row, FIRST_COLUMN: gl.constexpr, COLUMNS: gl.constexpr, ROW_COLUMNS: gl.constexpr, LAYOUT: gl.constexpr,
    HIDE_ZEROS: gl.constexpr = False,
):  # fmt: skip
    """Loads columns FIRST_COLUMN … of the query rows: [rows, COLUMNS]; 0 past a row's ROW_COLUMNS.

    HIDE_ZEROS: from the compiler, where the columns become e4m3. Of four values that it knows to be equal ptxas 12.8
    converts two, and takes for the others whatever a register held.
    """
    o_d = FIRST_COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    mask = m_row[:, None]
    if FIRST_COLUMN + COLUMNS > ROW_COLUMNS:
        is_column = (o_d < ROW_COLUMNS)[None, :]
        if HIDE_ZEROS:
            is_column = is_column | (p_row.to(gl.int64) < 0)[:, None]  # no address is
        mask = mask & is_column
    return gl.load(p_row[:, None] + o_d[None, :], mask=mask, other=0.0)


@gluon.jit
def view_8bit_tile_as_pairs(tile):
    """Returns a view of a tile of 8-bit codes in shared memory as 16-bit packed pairs."""
    PACKED_LAYOUT: gl.constexpr = gl.NVMMASharedLayout(tile.layout.swizzle_byte_width, 16)
    return reinterpret(tile, gl.int16, [tile.shape[0], tile.shape[1] // 2], PACKED_LAYOUT)


@gluon.jit
def dequant_packed(packed):
    """Dequantizes 16-bit packed pairs to two fp16 tiles."""
    return gl.inline_asm_elementwise(E4M3_PTX, "=r,=r,r", [packed], [gl.float16, gl.float16], True, 2)


@gluon.jit
def zero_oob_rows_in_smem(smem_tiles, first_tile, NUM_TILES: gl.constexpr, num_valid):
    """Zeros rows past a key block's last key in NUM_TILES tiles from first_tile on: 0 × NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    is_valid = gl.arange(0, smem_tiles.shape[1], gl.SliceLayout(1, L)) < num_valid
    for i in range(NUM_TILES):  # not unrolled: rare, and the main loop should stay small
        tile = smem_tiles.index(first_tile + i)
        if tile.dtype.primitive_bitwidth == 8:
            tile = view_8bit_tile_as_pairs(tile)
        x = tile.load(L)
        tile.store(gl.where(is_valid[:, None], x, gl.full(x.shape, 0, x.dtype, L)))


# Epilogue: what the combine reads.


@gluon.jit
def store_num_splits_and_first_cta(tensors, work_tile, cta_range, cfg: gl.constexpr):
    """Stores the number of splits of a work tile that begins in this CTA."""
    i_cta = cta_range.i_cta
    num_splits = num_splits_of_tile(work_tile, cta_range.blocks_per_range, i_cta // cfg.HEADS)
    store_split_metadata(
        tensors.SPLIT_METADATA, work_tile.i_request, work_tile.m_block, cta_range.max_m_blocks, i_cta, num_splits, cfg
    )


@gluon.jit
def partial_row_ptr(SPLIT_WORKSPACE, partial_slot, o_r, cfg: gl.constexpr):
    """Returns pointers to rows o_r of a partial state: columns of acc_o, row_max, row_sum."""
    return SPLIT_WORKSPACE + (partial_slot.to(gl.int64) * cfg.BLOCK_M + o_r) * cfg.PARTIAL_COLUMNS


@gluon.jit
def store_partial_stats(p_row, row_max, row_sum, m_row, cfg: gl.constexpr):
    """Stores row_max and row_sum of rows of a partial state."""
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, row_max, mask=m_row)
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, row_sum, mask=m_row)
