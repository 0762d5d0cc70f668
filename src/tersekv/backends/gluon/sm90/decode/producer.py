"""Producer of decode: the position of the next n_block, and its copies into a stage of the ring.

The prefetch position runs ahead of the n_blocks in use, across the ends of work tiles and requests, so that copies
never pause there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import reinterpret, tma_load
from ..parts.tile_scheduler import load_request_shape
from .params import KVStages, PrefetchPosition


@gluon.jit
def load_page_ids(page_lookup, i_request, n_block, num_keys, enabled, cfg: gl.constexpr, tile_cfg: gl.constexpr):
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
    shape = load_request_shape(page_lookup.SEQ_LENS, page_lookup.CU_SEQLENS_Q, cta_range.i_request, enabled, cfg)
    m_block = (block - cta_range.n_block_base) // shape.num_n_blocks
    n_block = (block - cta_range.n_block_base) % shape.num_n_blocks
    page_ids = load_page_ids(
        page_lookup, cta_range.i_request, shape.first_n_block + n_block, shape.num_keys, enabled, cfg, tile_cfg
    )
    return PrefetchPosition(
        block, cta_range.i_request, n_block, m_block, shape.num_n_blocks, shape.num_m_blocks, shape.first_n_block,
        shape.num_keys, page_ids,
    )  # fmt: skip


@gluon.jit
def advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the PrefetchPosition one n_block further. Its page ids are loaded now and used one step later."""
    block, i_request, n_block, m_block, num_n_blocks, num_m_blocks, first_n_block, num_keys, _ = prefetch_pos
    block += 1
    n_block += 1
    if n_block == num_n_blocks:
        n_block = 0
        m_block += 1
        if (m_block >= num_m_blocks) & (block < block_end):
            m_block = 0
            num_m_blocks = block * 0
            while num_m_blocks == 0:
                i_request += 1
                num_n_blocks, num_m_blocks, first_n_block, num_keys, _rows, _q0 = load_request_shape(
                    page_lookup.SEQ_LENS, page_lookup.CU_SEQLENS_Q, i_request, True, cfg
                )
    page_ids = load_page_ids(
        page_lookup, i_request, first_n_block + n_block, num_keys, block < block_end, cfg, tile_cfg
    )
    return PrefetchPosition(
        block, i_request, n_block, m_block, num_n_blocks, num_m_blocks, first_n_block, num_keys, page_ids
    )


@gluon.constexpr_function
def num_scale_copies(tile_cfg):
    """Returns how many of K and V have stored scales that are copied."""
    return (tile_cfg.K.SCALE_COPY_BYTES > 0) + (tile_cfg.V.SCALE_COPY_BYTES > 0)


@gluon.jit
def allocate_side_stages(IS_V: gl.constexpr, tile_cfg: gl.constexpr):
    """Allocates (buffers of codes, buffers of stored scales) of K or V."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    gl.static_assert((SIDE.CODE == "e2m1") == (SIDE.SCALE_KIND == "block"), "a code that these kernels do not know")
    dtype: gl.constexpr = gl.int32 if SIDE.SCALE_KIND == "block" else gl.float32
    codes, scales = (), ()
    for _ in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        stages = gl.allocate_shared_memory(gl.int16, SIDE.SMEM_SHAPE, SIDE.SMEM_LAYOUT)
        codes = codes + (stages,)
        if SIDE.SCALE_COPY_BYTES > 0:
            # A tensor copy needs a destination aligned to 128 bytes, which a plain layout does not guarantee.
            stages = gl.allocate_shared_memory(
                dtype,
                [tile_cfg.STAGES * tile_cfg.COPIES_PER_BUFFER * SIDE.SCALE_SMEM_PITCH // 128, 1, 32],
                gl.NVMMASharedLayout(0, 32, 2),
            )
            scales = scales + (reinterpret(stages, dtype, SIDE.SCALE_SMEM_SHAPE, SIDE.SCALE_SMEM_LAYOUT),)
        else:
            scales = scales + (stages,)  # never read
    return codes, scales


@gluon.jit
def allocate_kv_stages(tile_cfg: gl.constexpr):
    """Allocates the KVStages of codes and stored scales."""
    k, k_scales = allocate_side_stages(False, tile_cfg)
    v, v_scales = allocate_side_stages(True, tile_cfg)
    return KVStages(k, k_scales, v, v_scales)


@gluon.constexpr_function
def smem_copy_shape(tile_cfg, box, padding=1):
    """Returns the shape of a ring of copy tiles of a tensor map; padding: a tile's pitch, in tiles."""
    return [tile_cfg.STAGES * tile_cfg.COPIES_PER_BUFFER, padding * box[0], *box[1:]]


@gluon.jit
def copy_kv_tile(
    TENSOR_MAP, stages, full_barrier, i_copy, page_id, first_head, page_slot, enabled, ROWS_PER_PAGE: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Copies the codes of a buffer's keys, or of half of them, from one page; tiles of 16 keys in shared memory."""
    SMEM_SHAPE: gl.constexpr = smem_copy_shape(tile_cfg, TENSOR_MAP.block_shape)
    KEYS_PER_COPY: gl.constexpr = tile_cfg.MMA_KEYS // tile_cfg.COPIES_PER_BUFFER
    smem = reinterpret(stages, stages.dtype, SMEM_SHAPE, TENSOR_MAP.layout).index(i_copy)
    if ROWS_PER_PAGE == 0:
        coords = [
            page_id,
            page_slot // KEYS_PER_COPY,
            first_head // (tile_cfg.HEADS_PER_CTA // SMEM_SHAPE[-3]),
            0,
            0,
        ]  # a row may hold several heads (`merge_adjacent_heads`)
    elif len(SMEM_SHAPE) == 6:  # heads in groups (`copy_tiles._padded_head_tiles`)
        coords = [(page_id * ROWS_PER_PAGE + page_slot) // KEYS_PER_COPY, first_head // SMEM_SHAPE[-3], 0, 0, 0]
    else:
        coords = [
            (page_id * ROWS_PER_PAGE + page_slot) // KEYS_PER_COPY,
            first_head // (tile_cfg.HEADS_PER_CTA // SMEM_SHAPE[-3]), 0, 0,
        ]  # fmt: skip
    tma_load(TENSOR_MAP, coords, full_barrier, smem, enabled)


@gluon.jit
def copy_scale_tile(
    TENSOR_MAP, stages, full_barrier, i_copy, page_id, first_head, page_slot, enabled, IS_V: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Copies their stored scales. 16 scales of one head are 64 bytes and fill half of their 128-byte pitch."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    NUM_TILES: gl.constexpr = TENSOR_MAP.block_shape[0]
    SMEM_SHAPE: gl.constexpr = smem_copy_shape(
        tile_cfg, TENSOR_MAP.block_shape, SIDE.SCALE_SMEM_PITCH // SIDE.SCALE_COPY_BYTES
    )
    KEYS_PER_COPY: gl.constexpr = tile_cfg.MMA_KEYS // tile_cfg.COPIES_PER_BUFFER
    smem = reinterpret(stages, stages.dtype, SMEM_SHAPE, TENSOR_MAP.layout).index(i_copy)
    if SIDE.SCALE_SMEM_PITCH > SIDE.SCALE_COPY_BYTES:
        smem = smem.slice(0, NUM_TILES)
    if SIDE.SCALE_ROWS_PER_PAGE == 0:
        if SIDE.SCALE_ROWS_ARE_KEYS:
            coords = [page_id, page_slot // KEYS_PER_COPY, 0, first_head * SIDE.SCALE_WORDS]
        else:
            coords = [page_id, page_slot // KEYS_PER_COPY, first_head, 0]
    elif SIDE.SCALE_ROWS_ARE_KEYS:
        coords = [(page_id * SIDE.SCALE_ROWS_PER_PAGE + page_slot) // KEYS_PER_COPY, 0, first_head * SIDE.SCALE_WORDS]
    else:
        coords = [page_slot // KEYS_PER_COPY, page_id * SIDE.SCALE_ROWS_PER_PAGE + first_head, 0]
    tma_load(TENSOR_MAP, coords, full_barrier, smem, enabled)


@gluon.jit
def copy_kv_block(
    prefetch_pos, iter, full_barriers, tensor_maps, kv_stages, first_head, block_end, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Starts the copies of the n_block at prefetch_pos into the stage of this iteration."""
    NUM_COPIES: gl.constexpr = tile_cfg.NUM_BUFFERS * tile_cfg.COPIES_PER_BUFFER
    enabled = prefetch_pos.block < block_end
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
        page_id, i_copy = prefetch_pos.page_ids[i], stage * tile_cfg.COPIES_PER_BUFFER + i % tile_cfg.COPIES_PER_BUFFER
        page_slot = (n_block * cfg.BLOCK_N + i * (tile_cfg.KEYS_PER_BUFFER // tile_cfg.COPIES_PER_BUFFER)) % cfg.PAGE
        k, k_scales = kv_stages.k[i // tile_cfg.COPIES_PER_BUFFER], kv_stages.k_scales[i // tile_cfg.COPIES_PER_BUFFER]
        v, v_scales = kv_stages.v[i // tile_cfg.COPIES_PER_BUFFER], kv_stages.v_scales[i // tile_cfg.COPIES_PER_BUFFER]
        copy_kv_tile(
            tensor_maps.K, k, full_barriers[0].index(stage), i_copy, page_id, first_head, page_slot, enabled,
            cfg.K_ROWS_PER_PAGE, tile_cfg,
        )  # fmt: skip
        copy_kv_tile(
            tensor_maps.V, v, full_barriers[1].index(stage), i_copy, page_id, first_head, page_slot, enabled,
            cfg.V_ROWS_PER_PAGE, tile_cfg,
        )  # fmt: skip
        if tile_cfg.K.SCALE_COPY_BYTES > 0:
            copy_scale_tile(
                tensor_maps.K_SCALES, k_scales, full_barriers[2].index(stage), i_copy, page_id, first_head, page_slot,
                enabled, False, tile_cfg,
            )  # fmt: skip
        if tile_cfg.V.SCALE_COPY_BYTES > 0:
            full_barrier = full_barriers[len(full_barriers) - 1].index(stage)
            copy_scale_tile(
                tensor_maps.V_SCALES, v_scales, full_barrier, i_copy, page_id, first_head, page_slot, enabled, True,
                tile_cfg,
            )  # fmt: skip
