"""Producer of decode: copies of K and V into the stages of the ring, and the query, ahead of use or directly.

The prefetch position runs ahead of the n_blocks in use, across the ends of work tiles and requests, so that copies
never pause there. The query comes with its work tile's first n_block: a load at the start of a work tile would queue
behind all copies in flight, some 3 µs (notes/decode.md).
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import async_load, reinterpret, tma_load
from ..parts.dequant import (
    INT4_ODD_SCALE,
    INT4_RESIDUAL_SCALE,
    biased_exponent_and_inv_scale_of_rows,
    exponent_to_float,
    mma_dtype,
)
from ..parts.hadamard import scale_and_rotate_query
from ..parts.pipeline import wait_copies
from ..parts.tile_scheduler import load_request_lengths_and_block_counts
from .code_chunks import start_code_chunk_copies
from .layouts import (
    kv_heads_of_cta,
    mma_layout,
    packed_column_offset_in_padded_tile,
    query_heads_of_rows,
    query_load_layout,
)
from .scale_words import start_scale_word_copies


class PageLookup(NamedTuple):
    """Tensors that locate keys. stride_table_b: of the page table's rows."""

    PAGE_TABLE: gl.tensor
    SEQ_LENS: gl.tensor
    CU_SEQLENS_Q: gl.tensor
    stride_table_b: gl.tensor


class TensorMaps(NamedTuple):
    """Tensor maps; for stored scales, pointers where they are loaded one by one."""

    K: gl.tensor
    V: gl.tensor
    K_SCALES: gl.tensor
    V_SCALES: gl.tensor


class SmemKV(NamedTuple):
    """Shared memory of codes and stored scales: a buffer for each copy of an n_block, with all its stages."""

    k: tuple
    k_scales: tuple
    v: tuple
    v_scales: tuple


class PrefetchPosition(NamedTuple):
    """Position of the copies, ahead of the n_blocks in use, across the ends of work tiles and requests."""

    block: gl.tensor  # flat index of the n_block
    i_request: gl.tensor
    n_block: gl.tensor  # in its work tile
    m_block: gl.tensor
    num_n_blocks: gl.tensor  # of a work tile
    num_m_blocks: gl.tensor
    first_n_block: gl.tensor  # n_block of the request that a work tile begins with
    num_keys: gl.tensor
    page_ids: tuple  # of the n_block's copies


class QueryOperands(NamedTuple):
    """Of a work tile: PACK right operands of QK, and the sums of its rows, for int4 keys."""

    operands: tuple  # or their copy in shared memory
    row_sums: gl.tensor


# ---- stages ----


@gluon.constexpr_function
def keys_per_map_row(tile_cfg):
    """Returns the keys of a row of the tensor maps, of which a copy has several."""
    return tile_cfg.MMA_KEYS if tile_cfg.KEY_PARTS > 1 else tile_cfg.MMA_KEYS // tile_cfg.COPIES_PER_BUFFER


@gluon.constexpr_function
def num_scale_copies(tile_cfg):
    """Returns how many of K and V have stored scales that are copied."""
    return (tile_cfg.K.SCALE_COPY_BYTES > 0) + (tile_cfg.V.SCALE_COPY_BYTES > 0)


@gluon.constexpr_function
def has_cp_async_copies(tile_cfg):
    """Returns whether any codes or scales are copied by cp.async (`code_chunks`, `scale_words`)."""
    return any(side.SCALE_BLOCKS > 0 or len(side.CODE_STRIDES) > 0 for side in (tile_cfg.K, tile_cfg.V))


@gluon.jit
def allocate_smem_codes_and_scales(IS_V: gl.constexpr, tile_cfg: gl.constexpr):
    """Allocates (buffers of codes, buffers of stored scales) of K or V."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    gl.static_assert((SIDE.CODE == "e2m1") == (SIDE.SCALE_KIND == "block"), "a code that these kernels do not know")
    dtype: gl.constexpr = gl.int32 if SIDE.SCALE_KIND == "block" else gl.float32
    codes, scales = (), ()
    for _ in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        smem = gl.allocate_shared_memory(gl.int16, SIDE.SMEM_SHAPE, SIDE.SMEM_LAYOUT)
        codes = codes + (smem,)
        if SIDE.SCALE_COPY_BYTES > 0:
            # A tensor copy needs a destination aligned to 128 bytes, which a plain layout does not guarantee.
            smem = gl.allocate_shared_memory(
                dtype,
                [tile_cfg.STAGES * tile_cfg.COPIES_PER_BUFFER * SIDE.SCALE_SMEM_PITCH // 128, 1, 32],
                gl.NVMMASharedLayout(0, 32, 2),
            )
            scales = scales + (reinterpret(smem, dtype, SIDE.SCALE_SMEM_SHAPE, SIDE.SCALE_SMEM_LAYOUT),)
        elif SIDE.SCALE_BLOCKS > 0:
            scales = scales + (gl.allocate_shared_memory(dtype, SIDE.SCALE_SMEM_SHAPE, SIDE.SCALE_SMEM_LAYOUT),)
        else:
            scales = scales + (smem,)  # never read
    return codes, scales


@gluon.jit
def allocate_smem_kv(tile_cfg: gl.constexpr):
    """Allocates the SmemKV of codes and stored scales."""
    k, k_scales = allocate_smem_codes_and_scales(False, tile_cfg)
    v, v_scales = allocate_smem_codes_and_scales(True, tile_cfg)
    return SmemKV(k, k_scales, v, v_scales)


@gluon.jit
def smem_codes_of_mma_tile(smem_codes, i_tile_in_ring, CODE_WORDS_PER_ROW: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the codes of an MMA tile, counted through all stages: [HEADS_PER_CTA, MMA_KEYS, CODE_WORDS_PER_ROW].
    A row in shared memory may hold several heads (`tensor_maps.pack_heads_into_swizzle_128b_rows`); a tile may consist
    of several copies (`tensor_maps.make_kv_layout`)."""
    tile = smem_codes.index(i_tile_in_ring)
    if tile_cfg.KEY_PARTS > 1:
        if len(tile.shape) == 5:  # [copies, panels, parts of a copy, 16, packed]
            tile = tile.permute([0, 2, 3, 1, 4]).reshape(
                [tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, CODE_WORDS_PER_ROW]
            )
    elif tile_cfg.COPIES_PER_BUFFER == 2:  # [halves, panels, rows, 8, packed]
        SHAPE: gl.constexpr = [tile.shape[2], tile_cfg.MMA_KEYS, tile.shape[1] * tile.shape[4]]
        tile = tile.permute([2, 0, 3, 1, 4]).reshape(SHAPE)
    TILE_ROWS: gl.constexpr = tile.shape[0]
    if TILE_ROWS < tile_cfg.HEADS_PER_CTA:
        tile = (
            tile.reshape([TILE_ROWS, tile_cfg.MMA_KEYS, tile_cfg.HEADS_PER_CTA // TILE_ROWS, CODE_WORDS_PER_ROW])
            .permute([0, 2, 1, 3])
            .reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, CODE_WORDS_PER_ROW])
        )
    return tile


@gluon.jit
def smem_scales_of_mma_tile(smem_scales, i_tile_in_ring, IS_V: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the stored scales of an MMA tile, counted through all stages: [HEADS_PER_CTA, MMA_KEYS], or
    [HEADS_PER_CTA, MMA_KEYS, SCALE_WORDS]. Where the pitch of a copy exceeds its bytes, the ring has a multiple of the
    tiles."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    TILES: gl.constexpr = tile_cfg.STAGES * tile_cfg.KEYS_PER_BUFFER // (tile_cfg.MMA_KEYS * tile_cfg.KEY_PARTS)
    tile = smem_scales.index(i_tile_in_ring * (smem_scales.shape[0] // TILES))
    if tile_cfg.KEY_PARTS > 1:  # [parts, 16 keys or twice as many, words of this head and of others beside it]
        return tile.slice(0, tile_cfg.MMA_KEYS, 1)
    elif not SIDE.SCALE_ROWS_ARE_KEYS:
        if tile_cfg.COPIES_PER_BUFFER == 2 and SIDE.SCALE_KIND == "block":  # [halves, heads, 8, words]
            return tile.permute([1, 0, 2, 3]).reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS, SIDE.SCALE_WORDS])
        elif tile_cfg.COPIES_PER_BUFFER == 2:
            return tile.permute([1, 0, 2]).reshape([tile_cfg.HEADS_PER_CTA, tile_cfg.MMA_KEYS])
        else:
            return tile
    elif SIDE.SCALE_KIND == "block":
        return tile.permute([1, 0, 2])
    else:
        return tile.permute([1, 0])


# ---- position ----


@gluon.jit
def load_page_ids_of_copies(
    page_lookup, i_request, n_block, num_keys, enabled, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Loads the page of each copy of the n_block; page table entries past the last key are not read."""
    page_ids = ()
    for i in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS * tile_cfg.COPIES_PER_BUFFER)):
        first_key = n_block * cfg.BLOCK_N + i * (tile_cfg.KEYS_PER_BUFFER // tile_cfg.COPIES_PER_BUFFER)
        p_page_id = page_lookup.PAGE_TABLE + i_request.to(gl.int64) * page_lookup.stride_table_b + first_key // cfg.PAGE
        page_ids = page_ids + (gl.load(p_page_id, mask=enabled & (first_key < num_keys), other=0).to(gl.int32),)
    return page_ids


@gluon.jit
def init_prefetch_position(page_lookup, cta_range, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the PrefetchPosition at the first n_block of the CTA range."""
    block, enabled = cta_range.block_begin, cta_range.block_begin < cta_range.block_end
    shape = load_request_lengths_and_block_counts(
        page_lookup.SEQ_LENS, page_lookup.CU_SEQLENS_Q, cta_range.i_request, enabled, cfg
    )
    m_block = (block - cta_range.n_block_base) // shape.num_n_blocks
    n_block = (block - cta_range.n_block_base) % shape.num_n_blocks
    page_ids = load_page_ids_of_copies(
        page_lookup, cta_range.i_request, shape.first_n_block + n_block, shape.num_keys, enabled, cfg, tile_cfg
    )
    return PrefetchPosition(
        block, cta_range.i_request, n_block, m_block, shape.num_n_blocks, shape.num_m_blocks, shape.first_n_block,
        shape.num_keys, page_ids,
    )  # fmt: skip


@gluon.jit
def advance_prefetch_position(prefetch_pos, page_lookup, range_block_end, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the PrefetchPosition one n_block further. Its page ids are loaded now and used one step later."""
    block, i_request, n_block, m_block, num_n_blocks, num_m_blocks, first_n_block, num_keys, _ = prefetch_pos
    block += 1
    n_block += 1
    if n_block == num_n_blocks:
        n_block = 0
        m_block += 1
        if (m_block >= num_m_blocks) & (block < range_block_end):
            m_block = 0
            num_m_blocks = block * 0
            while num_m_blocks == 0:
                i_request += 1
                num_n_blocks, num_m_blocks, first_n_block, num_keys, _rows, _q0 = load_request_lengths_and_block_counts(
                    page_lookup.SEQ_LENS, page_lookup.CU_SEQLENS_Q, i_request, True, cfg
                )
    page_ids = load_page_ids_of_copies(
        page_lookup, i_request, first_n_block + n_block, num_keys, block < range_block_end, cfg, tile_cfg
    )
    return PrefetchPosition(
        block, i_request, n_block, m_block, num_n_blocks, num_m_blocks, first_n_block, num_keys, page_ids
    )


# ---- copies of K and V ----


@gluon.constexpr_function
def smem_copy_shape(tile_cfg, box, padding=1):
    """Returns the shape of a ring of copy tiles of a tensor map; padding: a tile's pitch, in tiles."""
    return [tile_cfg.STAGES * tile_cfg.COPIES_PER_BUFFER, padding * box[0], *box[1:]]


@gluon.jit
def start_code_tile_copy(
    TENSOR_MAP, smem_codes, full_barrier, i_copy_in_ring, page_id, first_head, page_slot, enabled,
    ROWS_PER_PAGE: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Copies the codes of a buffer's keys, or of a part of them, from one page; tiles of 16 keys in shared memory."""
    SMEM_SHAPE: gl.constexpr = smem_copy_shape(tile_cfg, TENSOR_MAP.block_shape)
    KEYS_PER_ROW: gl.constexpr = keys_per_map_row(tile_cfg)
    HEADS_PER_ROW: gl.constexpr = tile_cfg.KV_HEADS_PER_CTA // SMEM_SHAPE[-3]
    smem = reinterpret(smem_codes, smem_codes.dtype, SMEM_SHAPE, TENSOR_MAP.layout).index(i_copy_in_ring)
    if ROWS_PER_PAGE == 0:
        coords = [
            page_id,
            page_slot // KEYS_PER_ROW,
            first_head // HEADS_PER_ROW,
            0,
            0,
        ]  # a row may hold several heads (`pack_heads_into_swizzle_128b_rows`)
    elif len(SMEM_SHAPE) == 6:  # heads in groups (`tensor_maps._padded_heads_and_word_shift_per_head`)
        coords = [(page_id * ROWS_PER_PAGE + page_slot) // KEYS_PER_ROW, first_head // SMEM_SHAPE[-3], 0, 0, 0]
    else:
        coords = [(page_id * ROWS_PER_PAGE + page_slot) // KEYS_PER_ROW, first_head // HEADS_PER_ROW, 0, 0]
    tma_load(TENSOR_MAP, coords, full_barrier, smem, enabled)


@gluon.jit
def start_scale_tile_copy(
    TENSOR_MAP, smem_scales, full_barrier, i_copy_in_ring, page_id, first_head, page_slot, enabled, IS_V: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Copies their stored scales. 16 scales of one head are 64 bytes and fill half of their 128-byte pitch.

    With KEY_PARTS a copy may have other heads' scales beside the own (`layouts.load_scales_of_own_head`): coordinates
    that are no multiple of 16 bytes are illegal.
    """
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    NUM_TILES: gl.constexpr = TENSOR_MAP.block_shape[0]
    SMEM_SHAPE: gl.constexpr = smem_copy_shape(
        tile_cfg, TENSOR_MAP.block_shape, SIDE.SCALE_SMEM_PITCH // SIDE.SCALE_COPY_BYTES
    )
    KEYS_PER_ROW: gl.constexpr = keys_per_map_row(tile_cfg)
    if SIDE.SCALE_KIND == "token_head":
        first_head = first_head // tile_cfg.HEAD_DIM_PARTS
    first_word = first_head * SIDE.SCALE_WORDS
    if tile_cfg.KEY_PARTS > 1:
        COLUMNS: gl.constexpr = SIDE.SCALE_SMEM_SHAPE[3]
        first_word = first_word // COLUMNS * COLUMNS
    smem = reinterpret(smem_scales, smem_scales.dtype, SMEM_SHAPE, TENSOR_MAP.layout).index(i_copy_in_ring)
    if SIDE.SCALE_SMEM_PITCH > SIDE.SCALE_COPY_BYTES:
        smem = smem.slice(0, NUM_TILES)
    if SIDE.SCALE_ROWS_PER_PAGE == 0:
        if SIDE.SCALE_ROWS_ARE_KEYS:
            coords = [page_id, page_slot // KEYS_PER_ROW, 0, first_word]
        else:
            coords = [page_id, page_slot // KEYS_PER_ROW, first_head, 0]
    elif SIDE.SCALE_ROWS_ARE_KEYS:
        coords = [(page_id * SIDE.SCALE_ROWS_PER_PAGE + page_slot) // KEYS_PER_ROW, 0, first_word]
    else:
        coords = [page_slot // KEYS_PER_ROW, page_id * SIDE.SCALE_ROWS_PER_PAGE + first_head, 0]
    tma_load(TENSOR_MAP, coords, full_barrier, smem, enabled)


@gluon.jit
def start_kv_block_copies_at_position(
    prefetch_pos, iter, full_barriers, tensor_maps, smem_kv, first_head, range_block_end, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the n_block at prefetch_pos into the stage of this iteration; those by cp.async as a group,
    of which there is one for every iteration."""
    NUM_COPIES: gl.constexpr = tile_cfg.NUM_BUFFERS * tile_cfg.COPIES_PER_BUFFER
    NUM_WARPS: gl.constexpr = tile_cfg.HEADS_PER_CTA * tile_cfg.WARPS_PER_HEAD
    enabled = prefetch_pos.block < range_block_end
    n_block = prefetch_pos.first_n_block + prefetch_pos.n_block
    stage = iter % tile_cfg.STAGES
    mbarrier.expect(full_barriers[0].index(stage), NUM_COPIES * tile_cfg.K.COPY_BYTES, enabled)
    mbarrier.expect(full_barriers[1].index(stage), NUM_COPIES * tile_cfg.V.COPY_BYTES, enabled)
    if tile_cfg.K.SCALE_COPY_BYTES > 0:
        mbarrier.expect(full_barriers[2].index(stage), NUM_COPIES * tile_cfg.K.SCALE_COPY_BYTES, enabled)
    if tile_cfg.V.SCALE_COPY_BYTES > 0:
        mbarrier.expect(
            full_barriers[len(full_barriers) - 1].index(stage), NUM_COPIES * tile_cfg.V.SCALE_COPY_BYTES, enabled
        )
    for i in gl.static_range(NUM_COPIES):
        page_id, i_copy_in_ring = (
            prefetch_pos.page_ids[i],
            stage * tile_cfg.COPIES_PER_BUFFER + i % tile_cfg.COPIES_PER_BUFFER,
        )
        page_slot = (n_block * cfg.BLOCK_N + i * (tile_cfg.KEYS_PER_BUFFER // tile_cfg.COPIES_PER_BUFFER)) % cfg.PAGE
        k, k_scales = smem_kv.k[i // tile_cfg.COPIES_PER_BUFFER], smem_kv.k_scales[i // tile_cfg.COPIES_PER_BUFFER]
        v, v_scales = smem_kv.v[i // tile_cfg.COPIES_PER_BUFFER], smem_kv.v_scales[i // tile_cfg.COPIES_PER_BUFFER]
        if tile_cfg.K.COPY_BYTES > 0:
            start_code_tile_copy(
                tensor_maps.K, k, full_barriers[0].index(stage), i_copy_in_ring, page_id, first_head, page_slot,
                enabled, cfg.K_ROWS_PER_PAGE, tile_cfg,
            )  # fmt: skip
        else:
            start_code_chunk_copies(
                tensor_maps.K, k, stage, page_id, first_head, page_slot, enabled, False, NUM_WARPS, tile_cfg
            )
        if tile_cfg.V.COPY_BYTES > 0:
            start_code_tile_copy(
                tensor_maps.V, v, full_barriers[1].index(stage), i_copy_in_ring, page_id, first_head, page_slot,
                enabled, cfg.V_ROWS_PER_PAGE, tile_cfg,
            )  # fmt: skip
        else:
            start_code_chunk_copies(
                tensor_maps.V, v, stage, page_id, first_head, page_slot, enabled, True, NUM_WARPS, tile_cfg
            )
        if tile_cfg.K.SCALE_COPY_BYTES > 0:
            start_scale_tile_copy(
                tensor_maps.K_SCALES, k_scales, full_barriers[2].index(stage), i_copy_in_ring, page_id, first_head,
                page_slot, enabled, False, tile_cfg,
            )  # fmt: skip
        if tile_cfg.K.SCALE_BLOCKS > 0:
            start_scale_word_copies(
                tensor_maps.K_SCALES, k_scales, stage, page_id, first_head, page_slot, enabled, False, NUM_WARPS,
                tile_cfg,
            )  # fmt: skip
        if tile_cfg.V.SCALE_BLOCKS > 0:
            start_scale_word_copies(
                tensor_maps.V_SCALES, v_scales, stage, page_id, first_head, page_slot, enabled, True, NUM_WARPS,
                tile_cfg,
            )  # fmt: skip
        if tile_cfg.V.SCALE_COPY_BYTES > 0:
            full_barrier = full_barriers[len(full_barriers) - 1].index(stage)
            start_scale_tile_copy(
                tensor_maps.V_SCALES, v_scales, full_barrier, i_copy_in_ring, page_id, first_head, page_slot, enabled,
                True, tile_cfg,
            )  # fmt: skip
    if has_cp_async_copies(tile_cfg):
        async_copy.commit_group()


@gluon.jit
def wait_kv_block_copies(full_barriers, iter, NUM_BARRIER_GROUPS: gl.constexpr, tile_cfg: gl.constexpr):
    """Waits until the copies of this iteration's n_block are in shared memory: tensor copies, and this thread's by
    cp.async. A barrier of all threads follows."""
    wait_copies(full_barriers, iter, NUM_BARRIER_GROUPS, tile_cfg.STAGES)
    if has_cp_async_copies(tile_cfg):
        gl.static_assert(tile_cfg.NUM_QUERY_STAGES == 0, "prefetched queries commit groups of their own")
        async_copy.wait_group(tile_cfg.STAGES - 2)


@gluon.jit
def wait_remaining_cp_async_copies(tile_cfg: gl.constexpr):
    """Waits for the copies behind the last n_block, which are disabled and store zeros."""
    if has_cp_async_copies(tile_cfg):
        async_copy.wait_group(0)


# ---- query ----


@gluon.constexpr_function
def _query_cp_async_layout(tile_cfg, cfg, itemsize):
    """Returns the layout of [heads, rows, columns]: a lane copies 16 bytes. Key parts have one copy of a head's."""
    lanes = min(32, cfg.D * itemsize // 16)
    heads = tile_cfg.KV_HEADS_PER_CTA
    return gl.BlockedLayout(
        [1, 1, 16 // itemsize], [1, 32 // lanes, lanes], [heads, tile_cfg.KEY_PARTS * tile_cfg.WARPS_PER_HEAD, 1],
        [2, 1, 0],
    )  # fmt: skip


@gluon.jit
def allocate_smem_prefetched_q_ring(Q, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Allocates a ring of queries [KV_HEADS_PER_CTA, BLOCK_M, D]: of as many work tiles as may begin in the
    prefetched n_blocks."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    HEADS: gl.constexpr = tile_cfg.KV_HEADS_PER_CTA
    return gl.allocate_shared_memory(Q.dtype.element_ty, [tile_cfg.NUM_QUERY_STAGES, HEADS, cfg.BLOCK_M, cfg.D], LAYOUT)


@gluon.jit
def query_row_ptrs(Q, strides, q_begin, kv_heads, o_r, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns pointers to query rows o_r of a request, all heads of a group counted, of KV heads, or of their column
    parts."""
    p_token = Q + (q_begin + o_r // cfg.GROUP).to(gl.int64) * strides.q_t
    p_row = p_token + query_heads_of_rows(kv_heads, o_r, cfg, tile_cfg) * strides.q_h
    if tile_cfg.HEAD_DIM_PARTS > 1:
        p_row += kv_heads % tile_cfg.HEAD_DIM_PARTS * cfg.D
    return p_row


@gluon.jit
def prefetch_query_at_tile_begin_and_count(
    tensors, strides, smem_prefetched_q, num_prefetched_q, prefetch_pos, range_block_end, first_head,
    IS_FIRST_OF_RANGE: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Starts the copy of the query at prefetch_pos, if its n_block is the first of the CTA range or of a work tile.

    Returns the number of queries prefetched so far.
    """
    Q, CU_SEQLENS_Q = tensors.Q, tensors.CU_SEQLENS_Q
    if (prefetch_pos.block < range_block_end) & (IS_FIRST_OF_RANGE | (prefetch_pos.n_block == 0)):
        L: gl.constexpr = _query_cp_async_layout(tile_cfg, cfg, Q.dtype.element_ty.primitive_bitwidth // 8)
        HEADS: gl.constexpr = tile_cfg.KV_HEADS_PER_CTA
        h = first_head + gl.arange(0, HEADS, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None]
        o_r = (
            prefetch_pos.m_block * cfg.BLOCK_M
            + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
        )
        o_d = gl.arange(0, cfg.D, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
        if cfg.VARLEN_Q:
            q_begin = gl.load(CU_SEQLENS_Q + prefetch_pos.i_request).to(gl.int32)
            seqlen_q = gl.load(CU_SEQLENS_Q + prefetch_pos.i_request + 1).to(gl.int32) - q_begin
        else:
            q_begin, seqlen_q = prefetch_pos.i_request * cfg.MAX_SEQLEN_Q, cfg.MAX_SEQLEN_Q
        p_q = query_row_ptrs(Q, strides, q_begin, h, o_r, cfg, tile_cfg) + o_d
        valid, p_q = gl.broadcast(o_r < seqlen_q * cfg.GROUP, p_q)
        async_load(smem_prefetched_q.index(num_prefetched_q % tile_cfg.NUM_QUERY_STAGES), p_q, mask=valid)
        async_copy.commit_group()
        num_prefetched_q += 1
    return num_prefetched_q


@gluon.jit
def rotate_to_query_operands_and_q_scales(q, smem_column_scales, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns a query [HEADS_PER_CTA, BLOCK_M, D] (query_load_layout) as QueryOperands, and a scale of its scores
    [HEADS_PER_CTA, BLOCK_M].

    bf16 rows fit in fp16 only after a power of two is taken out of each; the scale restores it.
    """
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    B: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    q = scale_and_rotate_query(q.to(gl.float32), smem_column_scales, 2, cfg, tile_cfg)
    exponent, inv_scale = biased_exponent_and_inv_scale_of_rows(gl.max(gl.abs(q), 2))
    q = (q * inv_scale[:, :, None]).to(mma_dtype(cfg))
    L: gl.constexpr = gl.SliceLayout(1, MMA)
    q_scales = gl.convert_layout(exponent_to_float(exponent) * cfg.K_RESIDUAL_SCALE, L)
    row_sums = q_scales  # not used
    if tile_cfg.K.CODE == "int4":  # at the scale of the QK accumulator
        row_sums = gl.convert_layout(gl.sum(q.to(gl.float32), 2) * (1.0 / INT4_RESIDUAL_SCALE), L)
    # [heads, rows, panels of a row, lanes, pairs of packed words, …] → operand j: the j-th codes. Four codes of a word
    # are adjacent; of one or two codes, those of the pair are.
    PAIRS: gl.constexpr = min(cfg.PACKED_K, 64) // 8
    SHAPE: gl.constexpr = [tile_cfg.HEADS_PER_CTA, cfg.BLOCK_M, cfg.PACKED_K // (8 * PAIRS), 4, PAIRS]
    if tile_cfg.K.PACK == 4:
        q = q.reshape(SHAPE + [2, 4]).permute([0, 2, 4, 3, 5, 1, 6])
        even_codes, odd_codes = q.reshape([tile_cfg.HEADS_PER_CTA, cfg.PACKED_K, cfg.BLOCK_M, 2, 2]).split()
        zeroth, second = even_codes.split()
        first, third = odd_codes.split()
        if tile_cfg.K.CODE == "int4":
            zeroth, second = (zeroth * INT4_ODD_SCALE).to(q.dtype), (second * INT4_ODD_SCALE).to(q.dtype)
        tiles = (zeroth, first, second, third)
    else:
        PACK: gl.constexpr = tile_cfg.K.PACK
        q = (
            q.reshape(SHAPE + [PACK, 2])
            .permute([0, 2, 4, 3, 6, 1, 5])
            .reshape([tile_cfg.HEADS_PER_CTA, cfg.PACKED_K, cfg.BLOCK_M, PACK])
        )
        tiles = q.split() if PACK == 2 else (q.reshape([tile_cfg.HEADS_PER_CTA, cfg.PACKED_K, cfg.BLOCK_M]),)
    operands = ()
    for j in gl.static_range(gl.constexpr(tile_cfg.K.PACK)):
        operands = operands + (gl.convert_layout(tiles[j], B, assert_trivial=True),)
    return QueryOperands(operands, row_sums), q_scales


@gluon.jit
def wait_prefetched_query_operands_and_q_scales(
    smem_prefetched_q, smem_column_scales, i_query, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Loads prefetched query i_query from shared memory; returns as `rotate_to_query_operands_and_q_scales`."""
    async_copy.wait_group(0)
    L: gl.constexpr = query_load_layout(
        tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, cfg.BLOCK_M, cfg.PACKED_K, tile_cfg.K.PACK
    )
    smem_q = smem_prefetched_q.index(i_query % tile_cfg.NUM_QUERY_STAGES)
    if tile_cfg.KEY_PARTS > 1:  # all parts load the same rows
        x = smem_q.reshape([cfg.BLOCK_M, cfg.D]).load(gl.SliceLayout(0, L))[None, :, :]
        x, _ = gl.broadcast(x, gl.full([tile_cfg.HEADS_PER_CTA, cfg.BLOCK_M, cfg.D], 0, gl.int32, L))
    else:
        x = smem_q.load(L)
    return rotate_to_query_operands_and_q_scales(x, smem_column_scales, cfg, tile_cfg)


@gluon.jit
def load_query_operands_and_q_scales(
    tensors, strides, smem_column_scales, work_tile, first_head, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Loads a work tile's query that was not prefetched; a lane loads the same columns as of its keys."""
    L: gl.constexpr = query_load_layout(
        tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD, cfg.BLOCK_M, cfg.PACKED_K, tile_cfg.K.PACK
    )
    h = kv_heads_of_cta(first_head, gl.SliceLayout(1, gl.SliceLayout(2, L)), tile_cfg)[:, None, None]
    o_r = (
        work_tile.m_block * cfg.BLOCK_M
        + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :, None]
    )
    o_d = gl.arange(0, cfg.D, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :]
    if tile_cfg.K.PADDED_HEADS > 1:
        o_d = o_d - tile_cfg.K.PACK * packed_column_offset_in_padded_tile(h, False, tile_cfg)
    p_q = query_row_ptrs(tensors.Q, strides, work_tile.q_begin, h, o_r, cfg, tile_cfg) + o_d
    valid, p_q = gl.broadcast(o_r < work_tile.seqlen_q * cfg.GROUP, p_q)
    if tile_cfg.Q_HEAD_DIM < cfg.D:
        valid = valid & (o_d < tile_cfg.Q_HEAD_DIM)
    if tile_cfg.K.PADDED_HEADS > 1:
        valid = valid & (o_d >= 0)
    return rotate_to_query_operands_and_q_scales(gl.load(p_q, mask=valid, other=0.0), smem_column_scales, cfg, tile_cfg)
