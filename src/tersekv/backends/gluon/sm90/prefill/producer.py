"""The producer warp of prefill: copies queries, K and V of every work tile by TMA, from the last n_block to the first.

Wait for a free stage: `producer_acquire` in `acquire_and_copy_kv_stage` and `wait_for_stage_and_start_new_kv_copies`;
mask, rescale, combine: none here.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import reinterpret, thread_barrier, tma_load
from ..parts.pipeline import producer_acquire
from .tile_scheduler import (
    I_CONVERTER,
    I_SECOND_CONSUMER,
    PAGE_IDS_ROW,
    REQUESTS_PER_STEP,
    CachedKeyRange,
    WorkTile,
    element_as_scalar,
    finish_taking_next_work_tile,
    first_column_of_head,
    init_work_counter_unless_marked,
    kv_head_of,
    load_num_m_blocks,
    make_work_tile_and_cached_range,
    publish_work_tile,
    request_m_block_and_head_tile,
    reset_work_counter_if_last,
    start_taking_next_work_tile,
)

INVALID_PAGE = gl.constexpr(-1)  # out of bounds: TMA writes zeros


class PipelineStages(NamedTuple):
    """A pipeline: tiles in shared memory with full and empty barriers, and the address of those that consumers use
    (`parts/warp_mbarriers`)."""

    tiles: gl.shared_memory_descriptor
    full_barriers: gl.shared_memory_descriptor
    empty_barriers: gl.shared_memory_descriptor
    address: gl.tensor


# ---- pages ----


@gluon.jit
def load_page_ids_by_lane(page_table, n_block, key_begin, key_end, enabled, cfg: gl.constexpr):
    """Loads the page of each of a tile's copies, one per lane. Reads no entry for keys outside [key_begin, key_end).

    NOTE: scalars would go to uniform registers, which makes the compiler wait for the prefetch at once.
    """
    NUM_COPIES: gl.constexpr = cfg.BLOCK_N // cfg.KEYS_PER_COPY
    o_key = n_block * cfg.BLOCK_N + cfg.KEYS_PER_COPY * gl.arange(
        0, NUM_COPIES, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    )
    m_copy = enabled & (o_key < key_end) & (o_key + cfg.KEYS_PER_COPY > key_begin)
    return gl.load(page_table + o_key // cfg.PAGE, mask=m_copy, other=INVALID_PAGE).to(gl.int32)


@gluon.jit
def lanes_to_scalars(page_ids, smem_scratch):
    """Returns the lanes' page ids as a tuple of scalars."""
    NUM_COPIES: gl.constexpr = page_ids.shape[0]
    smem_scratch = smem_scratch.slice(0, NUM_COPIES)
    thread_barrier()
    smem_scratch.store(page_ids)
    thread_barrier()
    page_ids = smem_scratch.load(gl.BlockedLayout([NUM_COPIES], [32], [gl.num_warps()], [0]))
    scalars = ()
    for j in gl.static_range(NUM_COPIES):
        scalars = scalars + (element_as_scalar(page_ids, j),)
    return scalars


# ---- copies ----


@gluon.jit
def head_and_first_packed_column(kv_head, IS_V: gl.constexpr, cfg: gl.constexpr):
    """Returns the coordinates of a KV head in a cache's tensor map: its index, and the column from which to copy."""
    PACKED_HEAD_STRIDE: gl.constexpr = cfg.V.PACKED_HEAD_STRIDE if IS_V else cfg.K.PACKED_HEAD_STRIDE
    PACK: gl.constexpr = cfg.V.PACK if IS_V else cfg.K.PACK
    if PACKED_HEAD_STRIDE > 0:
        return kv_head * 0, kv_head * PACKED_HEAD_STRIDE - first_column_of_head(kv_head, IS_V, cfg) // PACK
    else:
        return kv_head, 0


@gluon.jit
def start_query_copy_to_acquired_stage(Q, q_stages, work_tile, cfg: gl.constexpr):
    """Starts the copies of a work tile's query rows, whose stage is free."""
    PANEL_COLUMNS: gl.constexpr = Q.block_shape[2]
    NUM_PANELS: gl.constexpr = cfg.K_PARTS * q_stages.tiles.shape[2] // PANEL_COLUMNS
    ITEMSIZE: gl.constexpr = Q.dtype.primitive_bitwidth // 8
    full_barrier = q_stages.full_barriers.index(0)
    mbarrier.expect(full_barrier, NUM_PANELS * cfg.TOKENS_PER_TILE * cfg.HEADS_PER_TILE * PANEL_COLUMNS * ITEMSIZE)
    # 8-bit queries fill the first half of the stage: consumers convert them to 16 bits in place.
    smem = reinterpret(
        q_stages.tiles, Q.dtype, [NUM_PANELS * 2 // ITEMSIZE, cfg.TOKENS_PER_TILE, cfg.HEADS_PER_TILE, PANEL_COLUMNS],
        Q.layout,
    )  # fmt: skip
    first_column = first_column_of_head(kv_head_of(work_tile, cfg), False, cfg)
    for panel in gl.static_range(NUM_PANELS):
        tma_load(
            Q, [work_tile.q_row, work_tile.head_tile * cfg.HEADS_PER_TILE, panel * PANEL_COLUMNS - first_column],
            full_barrier, smem.index(panel),
        )  # fmt: skip


@gluon.jit
def acquire_and_copy_kv_block(
    TENSOR_MAP, stages, page_ids, n_block, block_iter, kv_head, IS_V: gl.constexpr, cfg: gl.constexpr
):
    """Copies a K or V tile, into one stage or those of its parts."""
    PARTS: gl.constexpr = cfg.V_PARTS if IS_V else cfg.K_PARTS
    head, first_column = head_and_first_packed_column(kv_head, IS_V, cfg)
    if PARTS == 1:
        acquire_and_copy_kv_stage(TENSOR_MAP, stages, page_ids, n_block, block_iter, first_column, head, cfg)
    else:
        for part in range(PARTS):
            acquire_and_copy_kv_stage(
                TENSOR_MAP, stages, page_ids, n_block, block_iter * PARTS + part, part * stages.tiles.shape[2], head,
                cfg,
            )  # fmt: skip


@gluon.jit
def acquire_and_copy_kv_stage(
    TENSOR_MAP, stages, page_ids, n_block, stage_iter, first_column, kv_head, cfg: gl.constexpr
):
    """Waits for a free stage and starts the copies of a tile or part of one, in panels of 128 bytes a row."""
    STAGES: gl.constexpr = stages.tiles.shape[0]
    KEYS_PER_COPY: gl.constexpr = TENSOR_MAP.block_shape[2]
    PANEL_COLUMNS: gl.constexpr = TENSOR_MAP.block_shape[3]
    NUM_COPIES: gl.constexpr = stages.tiles.shape[1] // KEYS_PER_COPY
    NUM_PANELS: gl.constexpr = stages.tiles.shape[2] // PANEL_COLUMNS
    stage = producer_acquire(stages.empty_barriers, stage_iter, STAGES)
    full_barrier = stages.full_barriers.index(stage)
    mbarrier.expect(full_barrier, NUM_COPIES * NUM_PANELS * KEYS_PER_COPY * PANEL_COLUMNS * 2)
    smem = reinterpret(
        stages.tiles, TENSOR_MAP.dtype, [STAGES * NUM_PANELS * NUM_COPIES, 1, 1, KEYS_PER_COPY, PANEL_COLUMNS],
        TENSOR_MAP.layout,
    )  # fmt: skip
    for panel in gl.static_range(NUM_PANELS):
        for j in gl.static_range(NUM_COPIES):
            page_slot = (n_block * cfg.BLOCK_N + j * KEYS_PER_COPY) % cfg.PAGE
            i_copy = (stage * NUM_PANELS + panel) * NUM_COPIES + j
            tma_load(
                TENSOR_MAP, [page_ids[j], kv_head, page_slot, first_column + panel * PANEL_COLUMNS], full_barrier,
                smem.index(i_copy),
            )  # fmt: skip


@gluon.jit
def acquire_and_copy_new_kv_block(
    TENSOR_MAP, stages, first_new_row, n_block, block_iter, kv_head, IS_V: gl.constexpr, cfg: gl.constexpr
):
    """Copies a tile of new K or V, into one stage or those of its parts, in the columns that cached tiles have."""
    PARTS: gl.constexpr = cfg.V_PARTS if IS_V else cfg.K_PARTS
    first_column = 0 - first_column_of_head(kv_head, IS_V, cfg)
    if PARTS == 1:
        wait_for_stage_and_start_new_kv_copies(
            TENSOR_MAP, stages, first_new_row, n_block, block_iter, first_column, kv_head, cfg
        )
    else:
        for part in range(PARTS):
            wait_for_stage_and_start_new_kv_copies(
                TENSOR_MAP, stages, first_new_row, n_block, block_iter * PARTS + part, part * stages.tiles.shape[2],
                kv_head, cfg,
            )  # fmt: skip


@gluon.jit
def wait_for_stage_and_start_new_kv_copies(
    TENSOR_MAP, stages, first_new_row, n_block, stage_iter, first_column, kv_head, cfg: gl.constexpr
):
    """Waits for a free stage and starts the copies of a tile of new K or V, or part of one."""
    STAGES: gl.constexpr = stages.tiles.shape[0]
    PANEL_COLUMNS: gl.constexpr = TENSOR_MAP.block_shape[2]
    NUM_PANELS: gl.constexpr = stages.tiles.shape[2] // PANEL_COLUMNS
    stage = producer_acquire(stages.empty_barriers, stage_iter, STAGES)
    full_barrier = stages.full_barriers.index(stage)
    mbarrier.expect(full_barrier, NUM_PANELS * cfg.BLOCK_N * PANEL_COLUMNS * 2)
    smem = reinterpret(
        stages.tiles, TENSOR_MAP.dtype, [STAGES * NUM_PANELS, cfg.BLOCK_N, 1, PANEL_COLUMNS], TENSOR_MAP.layout
    )
    for panel in gl.static_range(NUM_PANELS):
        tma_load(
            TENSOR_MAP, [first_new_row + n_block * cfg.BLOCK_N, kv_head, first_column + panel * PANEL_COLUMNS],
            full_barrier, smem.index(stage * NUM_PANELS + panel),
        )  # fmt: skip


# ---- work tiles ----


@gluon.jit
def publish_work_tile_to_converter_if_any(
    work_tile, cached_range, full_barriers, empty_barriers, tile_info, tile_iter, cfg: gl.constexpr
):
    """Publishes a work tile for the converter, if there is one."""
    if cfg.CODE_STAGES > 0:
        mbarrier.wait(empty_barriers.index(I_CONVERTER), (tile_iter & 1) ^ 1)
        publish_work_tile(tile_info.index(I_CONVERTER), work_tile, cached_range)
        mbarrier.arrive(full_barriers.index(I_CONVERTER), count=1)


@gluon.jit
def publish_work_tile_to_consumers(work_tile, cached_range, q_stages, tile_info, tile_iter, cfg: gl.constexpr):
    """Publishes a work tile for the consumers, each once it is done with the last; the first one still waits for what
    completes its barrier, the copies of its queries."""
    mbarrier.wait(q_stages.empty_barriers.index(0), (tile_iter & 1) ^ 1)
    publish_work_tile(tile_info.index(0), work_tile, cached_range)
    if cfg.COLUMN_SPLIT:  # the second consumer reads no query
        mbarrier.wait(q_stages.empty_barriers.index(I_SECOND_CONSUMER), (tile_iter & 1) ^ 1)
        publish_work_tile(tile_info.index(I_SECOND_CONSUMER), work_tile, cached_range)
        mbarrier.arrive(q_stages.full_barriers.index(I_SECOND_CONSUMER), count=1)


@gluon.jit
def publish_work_tile_and_copy_queries(Q, q_stages, tile_info, work_tile, cached_range, tile_iter, cfg: gl.constexpr):
    """Publishes a work tile for the consumers and starts the copies of its queries."""
    publish_work_tile_to_consumers(work_tile, cached_range, q_stages, tile_info, tile_iter, cfg)
    start_query_copy_to_acquired_stage(Q, q_stages, work_tile, cfg)


@gluon.jit
def copy_cached_kv_and_start_taking(
    tensor_maps, WORK_COUNTER, page_table, k_stages, v_stages, n_block_end, num_n_blocks, key_begin, key_end, iter,
    kv_head, publish_and_query_args, cfg: gl.constexpr,
):  # fmt: skip
    """Copies tiles of the paged cache, from the last to the first, and starts taking the next work tile before the last
    copies; returns (next `iter`, what `finish_taking_next_work_tile` wants).

    publish_and_query_args: without new K and V, the queries are copied after the first K tile
    COLUMN_SPLIT: stages hold one tile of V, so K is copied a tile ahead of V
    """
    Q, K, V = tensor_maps
    q_stages, tile_info, work_tile, cached_range, tile_iter = publish_and_query_args
    # Page ids are loaded one tile ahead.
    n_block = n_block_end - 1
    page_ids = load_page_ids_by_lane(page_table, n_block, key_begin, key_end, num_n_blocks > 0, cfg)
    count = iter
    if cfg.HAS_NEW_KV:  # there may be no cached key
        count = start_taking_next_work_tile(WORK_COUNTER, num_n_blocks == 0)
    if cfg.COLUMN_SPLIT:
        prev_page_ids = lanes_to_scalars(page_ids, tile_info.index(PAGE_IDS_ROW))
        for i in range(num_n_blocks + (num_n_blocks > 0).to(gl.int32)):
            block_page_ids = lanes_to_scalars(page_ids, tile_info.index(PAGE_IDS_ROW))
            page_ids = load_page_ids_by_lane(page_table, n_block - 1, key_begin, key_end, i + 1 < num_n_blocks, cfg)
            if i + 1 == num_n_blocks:
                count = start_taking_next_work_tile(WORK_COUNTER, i + 1 == num_n_blocks)
            if i < num_n_blocks:
                acquire_and_copy_kv_block(K, k_stages, block_page_ids, n_block, iter + i, kv_head, False, cfg)
            if not cfg.HAS_NEW_KV:  # noqa: SIM102
                if i == 0:
                    publish_work_tile_and_copy_queries(Q, q_stages, tile_info, work_tile, cached_range, tile_iter, cfg)
            if i > 0:
                acquire_and_copy_kv_block(V, v_stages, prev_page_ids, n_block + 1, iter + i - 1, kv_head, True, cfg)
            prev_page_ids = block_page_ids
            n_block -= 1
        iter += num_n_blocks
    else:
        for i in range(num_n_blocks):
            count = start_taking_next_work_tile(WORK_COUNTER, i + 1 == num_n_blocks)
            block_page_ids = lanes_to_scalars(page_ids, tile_info.index(PAGE_IDS_ROW))
            page_ids = load_page_ids_by_lane(page_table, n_block - 1, key_begin, key_end, i + 1 < num_n_blocks, cfg)
            acquire_and_copy_kv_block(K, k_stages, block_page_ids, n_block, iter, kv_head, False, cfg)
            if not cfg.HAS_NEW_KV:  # noqa: SIM102 - known to the compiler, unlike the other
                if i == 0:
                    publish_work_tile_and_copy_queries(Q, q_stages, tile_info, work_tile, cached_range, tile_iter, cfg)
            acquire_and_copy_kv_block(V, v_stages, block_page_ids, n_block, iter, kv_head, True, cfg)
            iter += 1
            n_block -= 1
    return iter, count


@gluon.jit
def publish_tile_copy_queries_and_new_kv(
    new_maps, new_kv_stages, publish_and_query_args, Q, new_iter, kv_head, cfg: gl.constexpr
):
    """Copies the queries and tiles of new K and V, K a tile ahead of V; returns the next `new_iter`."""
    q_stages, tile_info, work_tile, cached_range, tile_iter = publish_and_query_args
    q_row = work_tile.q_row - work_tile.causal_limit
    # NOTE: queries first: once the second consumer is done with the last work tile, all earlier KV stages are free.
    publish_work_tile_and_copy_queries(Q, q_stages, tile_info, work_tile, cached_range, tile_iter, cfg)
    for i in range(work_tile.num_n_blocks + 1):
        n_block = work_tile.n_block_end - 1 - i
        if i < work_tile.num_n_blocks:
            acquire_and_copy_new_kv_block(
                new_maps[0], new_kv_stages[0], q_row, n_block, new_iter + i, kv_head, False, cfg
            )
        if i > 0:
            acquire_and_copy_new_kv_block(
                new_maps[1], new_kv_stages[1], q_row, n_block + 1, new_iter + i - 1, kv_head, True, cfg
            )
    return new_iter + work_tile.num_n_blocks


# ---- producer warp ----


@gluon.jit
def producer(args, cfg: gl.constexpr):
    """Copies all work tiles of this CTA, then publishes an empty work tile as the end.

    k_stages, v_stages: pipelines of the paged cache; new_kv_stages: of new K and V, the same unless codes are converted
    """
    (tensor_maps, new_maps, WORK_COUNTER, page_table_and_lengths, B, stride_table_b, q_stages, tile_info, k_stages,
     v_stages, new_kv_stages) = args  # fmt: skip
    PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q = page_table_and_lengths
    init_work_counter_unless_marked(WORK_COUNTER)
    next_work_tile = gl.program_id(0)
    first_request = next_work_tile * 0
    work_tiles_before = first_request  # work tiles of the requests before `first_request`
    num_m_blocks = load_num_m_blocks(CU_SEQLENS_Q, B, first_request, cfg)
    num_work_tiles = gl.sum(num_m_blocks, 0) * cfg.HEAD_TILES
    tile_iter = first_request  # work tiles published
    iter = first_request  # tiles copied from the cache
    new_iter = first_request  # tiles of new K and V; of both where they use the same stages
    while first_request < B:
        i_work_tile = next_work_tile - work_tiles_before
        if i_work_tile >= num_work_tiles:
            # It is of a later request: search the next ones.
            work_tiles_before += num_work_tiles
            first_request += REQUESTS_PER_STEP
            num_m_blocks = load_num_m_blocks(CU_SEQLENS_Q, B, first_request, cfg)
            num_work_tiles = gl.sum(num_m_blocks, 0) * cfg.HEAD_TILES
        else:
            # Next work tile; the converter begins at once.
            i_request, m_block, head_tile = request_m_block_and_head_tile(num_m_blocks, i_work_tile, cfg)
            i_request += first_request
            work_tile, cached_range = make_work_tile_and_cached_range(
                i_request, m_block, head_tile, SEQ_LENS, CU_SEQLENS_Q, cfg
            )
            page_table = PAGE_TABLE + i_request.to(gl.int64) * stride_table_b
            kv_head = kv_head_of(work_tile, cfg)
            publish_work_tile_to_converter_if_any(
                work_tile, cached_range, q_stages.full_barriers, q_stages.empty_barriers, tile_info, tile_iter, cfg
            )
            publish_and_query_args = (q_stages, tile_info, work_tile, cached_range, tile_iter)
            if cfg.HAS_NEW_KV:
                # New K and V, then the cached ones.
                if cfg.COLUMN_SPLIT:
                    new_iter = publish_tile_copy_queries_and_new_kv(
                        new_maps, new_kv_stages, publish_and_query_args, tensor_maps[0], new_iter, kv_head, cfg
                    )
                else:
                    for i in range(work_tile.num_n_blocks):
                        n_block, q_row = work_tile.n_block_end - 1 - i, work_tile.q_row - work_tile.causal_limit
                        # NOTE: queries first: once their stage is free, all earlier KV stages are. This warp never
                        # waited for the stages that the converter filled, and a wait sees only one phase back.
                        if i == 0:
                            publish_work_tile_and_copy_queries(
                                tensor_maps[0], q_stages, tile_info, work_tile, cached_range, tile_iter, cfg
                            )
                        acquire_and_copy_new_kv_block(
                            new_maps[0], new_kv_stages[0], q_row, n_block, new_iter, kv_head, False, cfg
                        )
                        acquire_and_copy_new_kv_block(
                            new_maps[1], new_kv_stages[1], q_row, n_block, new_iter, kv_head, True, cfg
                        )
                        new_iter += 1
                if cfg.CODE_STAGES > 0:
                    iter, count = copy_cached_kv_and_start_taking(
                        tensor_maps, WORK_COUNTER, page_table, k_stages, v_stages, cached_range.n_block_end,
                        cached_range.num_n_blocks, cached_range.key_begin, cached_range.key_end, iter, kv_head,
                        publish_and_query_args, cfg,
                    )  # fmt: skip
                    new_iter += cached_range.num_n_blocks
                else:
                    new_iter, count = copy_cached_kv_and_start_taking(
                        tensor_maps, WORK_COUNTER, page_table, k_stages, v_stages, cached_range.n_block_end,
                        cached_range.num_n_blocks, cached_range.key_begin, cached_range.key_end, new_iter, kv_head,
                        publish_and_query_args, cfg,
                    )  # fmt: skip
            else:
                iter, count = copy_cached_kv_and_start_taking(
                    tensor_maps, WORK_COUNTER, page_table, k_stages, v_stages, work_tile.n_block_end,
                    work_tile.num_n_blocks, work_tile.key_begin, work_tile.key_end, iter, kv_head,
                    publish_and_query_args, cfg,
                )  # fmt: skip
            tile_iter += 1
            next_work_tile = finish_taking_next_work_tile(count)
    reset_work_counter_if_last(WORK_COUNTER, next_work_tile, work_tiles_before)
    # Publish the end.
    zero = first_request * 0
    no_tile = WorkTile(zero, zero, zero, zero, zero, zero, zero, zero, zero)
    no_cached_range = CachedKeyRange(zero, zero, zero, zero, zero)
    publish_work_tile_to_consumers(no_tile, no_cached_range, q_stages, tile_info, tile_iter, cfg)
    mbarrier.arrive(q_stages.full_barriers.index(0), count=1)
    publish_work_tile_to_converter_if_any(
        no_tile, no_cached_range, q_stages.full_barriers, q_stages.empty_barriers, tile_info, tile_iter, cfg
    )
