"""The converter warpgroup of prefill: dequantises tiles to 16 bits once, for both consumers.

Block scales and zero points are applied here, exactly in fp16. A K scale per token multiplies the scores in fp32:
rounded to fp16 it would shift an LSE of 11 by 0.005. A V scale per token multiplies its row in fp16, after the tile's
largest power of two is divided out; that power joins the softmax exponent, so no value leaves fp16's range.

Wait for a free stage: `producer_acquire` in `dequant_tile`; mask: invalid rows of V become 0; rescale, combine: none.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import reinterpret, thread_barrier
from ..parts.pipeline import consumer_wait, producer_acquire, stage_and_phase
from .dequant import dequant_rows, pack_row_scale, packed_blocks_layout, packed_layout
from .mainloop_fp8_p import transpose_v_tile
from .tile_scheduler import read_work_tile

I_CONVERTER = gl.constexpr(2)  # among the readers of work tiles: after the two consumers


class StoredScales(NamedTuple):
    """Stored scales and page table in global memory; a tile's scales in shared memory."""

    K_SCALES: gl.tensor
    V_SCALES: gl.tensor
    PAGE_TABLE: gl.tensor
    stride_table_b: gl.tensor
    # Token scales: of K [STAGES, BLOCK_N] fp32; of V [STAGES, BLOCK_N] as packed by `dequant.pack_row_scale`.
    # Block scales: the stored bytes of both, [STAGES, BLOCK_N, blocks].
    k_scales_smem: gl.shared_memory_descriptor
    v_scales_smem: gl.shared_memory_descriptor
    tile_v_scales: gl.shared_memory_descriptor  # [2 × STAGES, 2] fp32: `mainloop.TileVScale`


@gluon.jit
def view_as_int32(stages):
    """Returns a view of 16-bit stages as int32."""
    SHAPE: gl.constexpr = [stages.tiles.shape[0], stages.tiles.shape[1], stages.tiles.shape[2] // 2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(stages.tiles.layout.swizzle_byte_width, 32, 2)
    return reinterpret(stages.tiles, gl.int32, SHAPE, LAYOUT)


@gluon.jit
def dequant_tile(
    code_stages, stages, dequant_scales, iter, code_iter, key_begin, key_end, is_edge, k_scales_to_store,
    IS_V: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Dequantises a tile to 16 bits. At an edge, rows of V outside [key_begin, key_end) become 0.

    dequant_scales: of the tile's rows, as `dequant.dequant_rows` takes them
    k_scales_to_store: (stages, token scales of K), stored once the K stage is free
    """
    NUM_PACKED: gl.constexpr = code_stages.tiles.shape[2] // 2
    L: gl.constexpr = packed_layout(NUM_PACKED)
    # Wait for the codes and for a free 16-bit stage.
    code_tile = view_as_int32(code_stages).index(consumer_wait(code_stages.full_barriers, code_iter, cfg.CODE_STAGES))
    tile = view_as_int32(stages).index(producer_acquire(stages.empty_barriers, iter, cfg.STAGES))
    if cfg.TOKEN_SCALES and not IS_V:
        k_scales_to_store[0].index(stage_and_phase(iter, cfg.STAGES)[0]).store(k_scales_to_store[1])
    # NOTE: the whole tile at once: in parts, the compiler puts a barrier before each store.
    packed = code_tile.load(L)
    o_n = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, L))
    # Invalid rows of other codes have a scale of 0, and those codes hold no NaN.
    if IS_V and (cfg.CODE == "e4m3" or cfg.CODE == "e5m2"):  # noqa: SIM102 - known to the compiler, unlike the other
        if is_edge:
            packed = gl.where(((o_n >= key_begin) & (o_n < key_end))[:, None], packed, 0)
    row_scales = o_n
    if cfg.BLOCK_SCALES:
        row_scales = dequant_scales.load(gl.SliceLayout(2, packed_blocks_layout(NUM_PACKED)))
    elif cfg.TOKEN_SCALES and (IS_V or cfg.CODE == "int4"):
        row_scales = dequant_scales.load(gl.SliceLayout(1, L)).to(gl.int32)
    # Dequantise, signal full, release the codes.
    tile.store(dequant_rows(packed, row_scales, IS_V, cfg))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(stages.full_barriers.index(stage_and_phase(iter, cfg.STAGES)[0]))
    mbarrier.arrive(code_stages.empty_barriers.index(stage_and_phase(code_iter, cfg.CODE_STAGES)[0]))


@gluon.jit
def key_offsets(n_start, cfg: gl.constexpr):
    """Returns the keys of a tile: [BLOCK_N]."""
    return n_start + gl.arange(0, cfg.BLOCK_N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def load_page_of_keys(page_table, n_start, key_begin, key_end, cfg: gl.constexpr):
    """Loads the page of each key of a tile: [BLOCK_N]. Reads no entry for keys outside [key_begin, key_end)."""
    o_key = key_offsets(n_start, cfg)
    return gl.load(page_table + o_key // cfg.PAGE, mask=(o_key >= key_begin) & (o_key < key_end), other=0).to(gl.int64)


@gluon.jit
def load_scales_of_side(SCALES, page_ids, page_slots, valid, kv_head, IS_V: gl.constexpr, cfg: gl.constexpr):
    """Loads stored scales of K or V, fp32 or a byte per block, blocks padded to a power of two; 0 where invalid."""
    STRIDES: gl.constexpr = cfg.STORED_V_SCALE_STRIDES if IS_V else cfg.STORED_K_SCALE_STRIDES
    o_scales = page_ids * STRIDES[0] + page_slots.to(gl.int64) * STRIDES[1] + kv_head.to(gl.int64) * STRIDES[2]
    if cfg.BLOCK_SCALES:
        NUM_BLOCKS: gl.constexpr = (cfg.HEAD_DIM_V if IS_V else cfg.HEAD_DIM) // 16
        BLOCKS_PADDED: gl.constexpr = (cfg.PACKED_V if IS_V else cfg.PACKED_K) // 4
        L: gl.constexpr = gl.BlockedLayout([1, BLOCKS_PADDED], [32, 1], [gl.num_warps(), 1], [1, 0])
        o_i = gl.arange(0, BLOCKS_PADDED, gl.SliceLayout(0, L))
        o_scales = gl.convert_layout(o_scales, gl.SliceLayout(1, L), assert_trivial=True)
        valid = gl.convert_layout(valid, gl.SliceLayout(1, L), assert_trivial=True)
        p_byte = SCALES.to(gl.pointer_type(gl.uint8), bitcast=True) + o_scales[:, None] + o_i[None, :]
        return gl.load(p_byte, mask=valid[:, None] & (o_i < NUM_BLOCKS)[None, :], other=0)
    else:
        return gl.load(SCALES + o_scales, mask=valid, other=0.0)


@gluon.jit
def load_stored_scales(stored_scales, page_ids, n_start, key_begin, key_end, kv_head, cfg: gl.constexpr):
    """Loads a tile's (K scales, V scales); 0 outside [key_begin, key_end)."""
    o_key = key_offsets(n_start, cfg)
    valid, page_slots = (o_key >= key_begin) & (o_key < key_end), o_key % cfg.PAGE
    k = load_scales_of_side(stored_scales.K_SCALES, page_ids, page_slots, valid, kv_head, False, cfg)
    return k, load_scales_of_side(stored_scales.V_SCALES, page_ids, page_slots, valid, kv_head, True, cfg)


@gluon.jit
def max_exponent(x):
    """Returns the exponent field of the largest of positive numbers."""
    return gl.minimum(gl.maximum(gl.max(x, 0).to(gl.int32, bitcast=True) >> 23, 1), 253)


@gluon.jit
def exponent_to_float(exponent):
    """Returns the power of two with this exponent field."""
    return (exponent << 23).to(gl.float32, bitcast=True)


@gluon.jit
def store_scales_to_smem(stored_scales, scales, iter, cfg: gl.constexpr):
    """Stores a tile's row scales and its TileVScale in shared memory.

    TileVScale has 2 × STAGES stages: consumers that read the one overwritten here have released its K, or the previous
    tile could not have been dequantised.
    """
    k, v = scales
    stage, _ = stage_and_phase(iter, cfg.STAGES)
    if cfg.TOKEN_SCALES:
        tile_stage, _ = stage_and_phase(iter, 2 * cfg.STAGES)
        exponent = max_exponent(v)
        o = gl.arange(0, 2, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        x = gl.where(o == 0, (exponent - 127).to(gl.float32), exponent_to_float(254 - exponent))
        stored_scales.tile_v_scales.index(tile_stage).store(x)
        k_zero_points, v_zero_points = 0, 0
        if cfg.CODE == "int4":
            k_zero_points, v_zero_points = k.to(gl.int32, bitcast=True) & 15, v.to(gl.int32, bitcast=True) & 15
        row_scales = pack_row_scale(v * exponent_to_float(254 - exponent), k_zero_points, v_zero_points)
        stored_scales.v_scales_smem.index(stage).store(row_scales.to(stored_scales.v_scales_smem.dtype))
    else:
        stored_scales.k_scales_smem.index(stage).store(k)
        stored_scales.v_scales_smem.index(stage).store(v)
    thread_barrier()


@gluon.jit
def converter(stored_scales, q_stages, tile_info, k_code_stages, v_code_stages, k_stages, v_stages, cfg: gl.constexpr):
    """Dequantises every tile of every work tile of this CTA."""
    HAS_STORED_SCALES: gl.constexpr = cfg.TOKEN_SCALES or cfg.BLOCK_SCALES
    num_done, iter, code_iter = 0, 0, 0
    mbarrier.wait(q_stages.full_barriers.index(I_CONVERTER), 0)
    work_tile, cached_prefix = read_work_tile(tile_info.index(I_CONVERTER))
    mbarrier.arrive(q_stages.empty_barriers.index(I_CONVERTER), count=1)
    while work_tile.num_n_blocks > 0:
        key_begin, key_end, num_n_blocks, n_block_end = (
            work_tile.key_begin, work_tile.key_end, work_tile.num_n_blocks, work_tile.n_block_end,
        )  # fmt: skip
        if cfg.HAS_NEW_KV:  # tiles of new K and V come first, and are not dequantised
            iter += work_tile.num_n_blocks
            key_begin, key_end, num_n_blocks, n_block_end = (
                cached_prefix.key_begin, cached_prefix.key_end, cached_prefix.num_n_blocks, cached_prefix.n_block_end,
            )  # fmt: skip
        n_start = (n_block_end - 1) * cfg.BLOCK_N
        kv_head = work_tile.head_tile * cfg.HEADS_PER_TILE // cfg.GROUP
        # Prefetch scales one tile ahead, pages two.
        if HAS_STORED_SCALES:
            page_table = stored_scales.PAGE_TABLE + work_tile.i_request.to(gl.int64) * stored_scales.stride_table_b
            page_ids = load_page_of_keys(page_table, n_start, key_begin, key_end, cfg)
            next_scales = load_stored_scales(stored_scales, page_ids, n_start, key_begin, key_end, kv_head, cfg)
            page_ids = load_page_of_keys(page_table, n_start - cfg.BLOCK_N, key_begin, key_end, cfg)
        for i in range(num_n_blocks):  # noqa: B007 - an underscore is a barrier already
            is_edge = (n_start + cfg.BLOCK_N > key_end) | (n_start < key_begin)
            stage, _ = stage_and_phase(code_iter, cfg.STAGES)
            if HAS_STORED_SCALES:
                scales = next_scales
                next_scales = load_stored_scales(
                    stored_scales, page_ids, n_start - cfg.BLOCK_N, key_begin, key_end, kv_head, cfg
                )
                page_ids = load_page_of_keys(page_table, n_start - 2 * cfg.BLOCK_N, key_begin, key_end, cfg)
                store_scales_to_smem(stored_scales, scales, code_iter, cfg)
            # Dequantise K, then V.
            v_dequant_scales = stored_scales.v_scales_smem.index(stage)
            k_dequant_scales, k_scales_to_store = v_dequant_scales, (stored_scales.k_scales_smem, 0)
            if cfg.TOKEN_SCALES:
                k_scales_to_store = (stored_scales.k_scales_smem, scales[0])
            elif cfg.BLOCK_SCALES:
                k_dequant_scales = stored_scales.k_scales_smem.index(stage)
            if not cfg.FP8_QK:
                dequant_tile(
                    k_code_stages, k_stages, k_dequant_scales, iter, code_iter, key_begin - n_start, key_end - n_start,
                    is_edge, k_scales_to_store, False, cfg,
                )  # fmt: skip
            if cfg.FP8_PV:
                transpose_v_tile(
                    v_code_stages, v_stages, iter, code_iter, key_begin - n_start, key_end - n_start, is_edge, cfg
                )
            else:
                dequant_tile(
                    v_code_stages, v_stages, v_dequant_scales, iter, code_iter, key_begin - n_start, key_end - n_start,
                    is_edge, k_scales_to_store, True, cfg,
                )  # fmt: skip
            iter += 1
            code_iter += 1
            n_start -= cfg.BLOCK_N
        num_done += 1
        mbarrier.wait(q_stages.full_barriers.index(I_CONVERTER), num_done & 1)
        work_tile, cached_prefix = read_work_tile(tile_info.index(I_CONVERTER))
        mbarrier.arrive(q_stages.empty_barriers.index(I_CONVERTER), count=1)
