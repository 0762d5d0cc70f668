"""Prefill attention on sm_90: a persistent, warp-specialized kernel.

A producer warp copies queries and KV tiles by TMA (`producer`); two consumer warpgroups, one partition, compute 64
query rows each (`mainloop`); over a quantized cache a converter warpgroup dequantizes tiles to 16 bits for both
(`converter`), V only where QK runs in 8 bits. They synchronise by mbarriers, and by turns
(`cfg.PING_PONG`). `tile_scheduler` orders the work tiles.

Heads wider than 256 (`cfg.COLUMN_SPLIT`): both consumers have the same 64 rows and each half of V's columns. The first
computes P and passes it on to the second (`columns`); stages are parts of 128 columns.

Mask: `parts/mask.apply_mask`. Free stage: `producer_acquire` in `producer` and `converter`. Rescale:
`mainloop.mainloop_step`. Combine: none, no work tile is split.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...versions import reinterpret
from ..parts.dequant import load_device_or_host_scale, mma_dtype
from ..parts.hadamard import RotationTensors
from ..parts.online_softmax import LOG2E
from ..parts.pipeline import allocate_mbarriers, pdl_launch_dependents, pdl_wait
from ..parts.warp_mbarriers import allocate_mbarriers_and_address
from .columns import second_column_half_consumer, second_column_half_consumer_new_then_cached
from .converter import StoredScales, converter
from .mainloop import CallScales, NewAndCachedScales, SharedP, consumer, consumer_new_then_cached
from .producer import PipelineStages, producer
from .tile_scheduler import NUM_READERS, PAGE_IDS_ROW, TILE_INFO_FIELDS, load_q_begin

# ---- shared memory ----


@gluon.jit
def allocate_tiles(dtype: gl.constexpr, STAGES: gl.constexpr, NUM_ROWS: gl.constexpr, NUM_COLUMNS: gl.constexpr):
    """Allocates STAGES tiles [NUM_ROWS, NUM_COLUMNS] of 16-bit elements."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(2 * NUM_COLUMNS, 128), 16, 2)
    return gl.allocate_shared_memory(dtype, [STAGES, NUM_ROWS, NUM_COLUMNS], LAYOUT)


@gluon.jit
def allocate_stages_and_mbarriers(dtype: gl.constexpr, STAGES: gl.constexpr, NUM_ROWS: gl.constexpr,
                                  NUM_COLUMNS: gl.constexpr):  # fmt: skip
    """Allocates tiles with their full and empty barriers, which consumers do not use."""
    tiles = allocate_tiles(dtype, STAGES, NUM_ROWS, NUM_COLUMNS)
    return PipelineStages(tiles, allocate_mbarriers(STAGES), allocate_mbarriers(STAGES), 0)


@gluon.jit
def allocate_consumer_stages(
    dtype: gl.constexpr, STAGES: gl.constexpr, NUM_ROWS: gl.constexpr, NUM_COLUMNS: gl.constexpr,
    NUM_BARRIERS: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr,
):  # fmt: skip
    """Allocates tiles with full and empty barriers. READERS: warps that read a stage"""
    tiles = allocate_tiles(dtype, STAGES, NUM_ROWS, NUM_COLUMNS)
    full, empty, address = allocate_mbarriers_and_address(NUM_BARRIERS, WRITERS, READERS)
    return PipelineStages(tiles, full, empty, address)


@gluon.jit
def view_as_codes(stages, DTYPE: gl.constexpr):
    """Returns a view of packed stages as 8-bit codes."""
    NUM_COLUMNS: gl.constexpr = 2 * stages.tiles.shape[2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(NUM_COLUMNS, 128), 8, 2)
    tiles = reinterpret(stages.tiles, DTYPE, [stages.tiles.shape[0], stages.tiles.shape[1], NUM_COLUMNS], LAYOUT)
    return PipelineStages(tiles, stages.full_barriers, stages.empty_barriers, stages.address)


# ---- warp roles: those that this kernel has, with K and V of the new tokens as arguments or without ----


@gluon.jit
def first_consumer(args, Q_DTYPE: gl.constexpr, NEW_DTYPE: gl.constexpr, cfg: gl.constexpr, new_cfg: gl.constexpr):
    """Runs the only consumer, or the first one of COLUMN_SPLIT."""
    if cfg.HAS_NEW_KV:
        consumer_new_then_cached(args, Q_DTYPE, NEW_DTYPE, cfg, new_cfg)
    else:
        consumer(args, Q_DTYPE, cfg)


@gluon.jit
def second_consumer(args, NEW_DTYPE: gl.constexpr, cfg: gl.constexpr, new_cfg: gl.constexpr):
    """Runs the second consumer of COLUMN_SPLIT."""
    if cfg.HAS_NEW_KV:
        second_column_half_consumer_new_then_cached(args, NEW_DTYPE, cfg, new_cfg)
    else:
        second_column_half_consumer(args, cfg)


@gluon.jit
def warp_specialize(
    converter_args, consumer_args, second_consumer_args, producer_args, Q_DTYPE: gl.constexpr, NEW_DTYPE: gl.constexpr,
    cfg: gl.constexpr, new_cfg: gl.constexpr,
):  # fmt: skip
    """Runs the warp roles."""
    FIRST: gl.constexpr = cfg.CONSUMER_REGISTERS
    SECOND: gl.constexpr = cfg.SECOND_CONSUMER_REGISTERS
    if cfg.COLUMN_SPLIT and cfg.CODE_STAGES > 0:
        gl.warp_specialize(
            [
                (converter, (converter_args, cfg)),
                (first_consumer, (consumer_args, Q_DTYPE, NEW_DTYPE, cfg, new_cfg)),
                (second_consumer, (second_consumer_args, NEW_DTYPE, cfg, new_cfg)),
                (producer, (producer_args, cfg)),
            ],
            [4, 4, 1], [FIRST, SECOND, 24],
        )  # fmt: skip
    elif cfg.COLUMN_SPLIT:
        gl.warp_specialize(
            [
                (first_consumer, (consumer_args, Q_DTYPE, NEW_DTYPE, cfg, new_cfg)),
                (second_consumer, (second_consumer_args, NEW_DTYPE, cfg, new_cfg)),
                (producer, (producer_args, cfg)),
            ],
            [4, 1], [SECOND, 24],
        )  # fmt: skip
    elif cfg.CODE_STAGES > 0:
        gl.warp_specialize(
            [
                (converter, (converter_args, cfg)),
                (first_consumer, (consumer_args, Q_DTYPE, NEW_DTYPE, cfg, new_cfg)),
                (producer, (producer_args, cfg)),
            ],
            [8, 1], [FIRST, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (first_consumer, (consumer_args, Q_DTYPE, NEW_DTYPE, cfg, new_cfg)),
                (producer, (producer_args, cfg)),
            ],
            [1], [24],
        )  # fmt: skip


# ---- rows behind the last request ----


@gluon.jit
def store_empty_output_of_padding_rows(OUT, LSE, padding_begin, T, strides, cfg: gl.constexpr):
    """Stores output 0 and LSE −inf for query rows behind the last request."""
    stride_out_t, stride_out_h, stride_lse_t, stride_lse_h = strides
    o_d = gl.arange(0, cfg.DV, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    i_token = padding_begin + gl.program_id(0)
    while i_token < T:
        for head in range(cfg.HEADS * cfg.GROUP):
            p_out = OUT + i_token.to(gl.int64) * stride_out_t + head.to(gl.int64) * stride_out_h + o_d
            gl.store(p_out, (o_d * 0).to(gl.float32).to(OUT.dtype.element_ty), mask=o_d < cfg.HEAD_DIM_V)
            if cfg.HAS_LSE:
                gl.store(LSE + i_token.to(gl.int64) * stride_lse_t + head.to(gl.int64) * stride_lse_h, float("-inf"))
        i_token += gl.num_programs(0)


# ---- kernel ----


@gluon.jit(do_not_specialize=["SEQ_LENS", "CU_SEQLENS_Q", "B", "T"])
def prefill_kernel(
    Q, K, V, K_NEW, V_NEW, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, SINKS, OUT, LSE, K_SIGNS, V_SIGNS,
    K_CHANNEL_SCALES, V_CHANNEL_SCALES, WORK_COUNTER,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, stride_table_b, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg: gl.constexpr,
    new_cfg: gl.constexpr,
):  # fmt: skip
    """Computes this CTA's work tiles."""
    # Shared memory: one pipeline for each of Q, K, V, scales and packed codes.
    MMA_DTYPE: gl.constexpr = mma_dtype(cfg)
    Q_DTYPE: gl.constexpr = Q.dtype
    STAGES: gl.constexpr = cfg.STAGES
    READERS: gl.constexpr = cfg.CONSUMER_WARPS
    UNSWIZZLED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    UNSWIZZLED_2D: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    q_stages = allocate_consumer_stages(
        MMA_DTYPE, cfg.K_PARTS, cfg.CONSUMER_ROWS, cfg.K_COLUMNS, NUM_READERS, 1, READERS
    )
    if cfg.QK_8BIT:
        WRITERS: gl.constexpr = 2 if cfg.SCALES_FILL_K else 1  # the copy, and the converter
        k_stages = allocate_consumer_stages(
            gl.int16, cfg.CODE_STAGES, cfg.BLOCK_N, cfg.PACKED_K, cfg.CODE_STAGES, WRITERS, READERS
        )
    else:
        k_stages = allocate_consumer_stages(
            MMA_DTYPE, cfg.K_STAGES, cfg.BLOCK_N, cfg.K_COLUMNS, cfg.K_STAGES, 1, READERS
        )
    if cfg.FP8_PV:
        v_stages = allocate_consumer_stages(gl.int16, cfg.STAGES, cfg.DV, cfg.BLOCK_N // 2, cfg.STAGES, 1, READERS)
    else:
        v_stages = allocate_consumer_stages(
            MMA_DTYPE, cfg.V_STAGES, cfg.BLOCK_N, cfg.V_COLUMNS, cfg.V_STAGES, 1, READERS
        )
    if cfg.COLUMN_SPLIT:
        p_tiles = gl.allocate_shared_memory(
            MMA_DTYPE, [STAGES, cfg.CONSUMER_ROWS, cfg.BLOCK_N], gl.NVMMASharedLayout(128, 16, 2)
        )
        rescales = gl.allocate_shared_memory(gl.float32, [STAGES, cfg.CONSUMER_ROWS], UNSWIZZLED)
        acc_scales = gl.allocate_shared_memory(gl.float32, [cfg.CONSUMER_ROWS], UNSWIZZLED)
        p_full, p_empty = allocate_mbarriers(STAGES, 1), allocate_mbarriers(STAGES, 1)
        shared_p = SharedP(
            p_tiles, rescales, p_full, p_empty, acc_scales, allocate_mbarriers(1, 1), allocate_mbarriers(1, 1)
        )
    else:
        shared_p = SharedP(None, None, None, None, None, None, None)
    tile_info = gl.allocate_shared_memory(gl.int32, [PAGE_IDS_ROW + 1, TILE_INFO_FIELDS], UNSWIZZLED)
    # Placeholders: without stored scales none is read.
    k_scales_smem, row_scales_smem, tile_v_scales = tile_info, tile_info, tile_info
    k_block_scales_smem, v_block_scales_smem = tile_info, tile_info
    if cfg.K.TOKEN_SCALES:
        k_scales_smem = gl.allocate_shared_memory(gl.float32, [STAGES, cfg.BLOCK_N], UNSWIZZLED)
    if cfg.V.TOKEN_SCALES or cfg.K.CODE == "int4":
        ROW: gl.constexpr = gl.int32 if cfg.K.CODE == "int4" or cfg.V.CODE == "int4" else gl.int16
        row_scales_smem = gl.allocate_shared_memory(
            ROW, [STAGES, cfg.BLOCK_N], UNSWIZZLED
        )  # `pack_scale_and_zero_points_to_int32`
    if cfg.V.TOKEN_SCALES:
        tile_v_scales = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 2], UNSWIZZLED)
    if cfg.K.BLOCK_SCALES:
        k_block_scales_smem = gl.allocate_shared_memory(
            gl.uint8, [STAGES * cfg.K_PARTS, cfg.BLOCK_N, cfg.PACKED_K // 4], UNSWIZZLED_2D
        )
    if cfg.V.BLOCK_SCALES:
        v_block_scales_smem = gl.allocate_shared_memory(
            gl.uint8, [STAGES * cfg.V_PARTS, cfg.BLOCK_N, cfg.PACKED_V // 4], UNSWIZZLED_2D
        )
    stored_scales = StoredScales(
        K_SCALES, V_SCALES, PAGE_TABLE, stride_table_b, k_scales_smem, row_scales_smem, k_block_scales_smem,
        v_block_scales_smem, tile_v_scales
    )  # fmt: skip
    k_code_stages, v_code_stages = k_stages, v_stages
    if cfg.CODE_STAGES > 0:
        if cfg.QK_8BIT:
            K_DTYPE: gl.constexpr = gl.int8 if cfg.K.CODE == "int8" else gl.float8e4nv
            k_stages = view_as_codes(k_code_stages, K_DTYPE)
        else:
            k_code_stages = allocate_stages_and_mbarriers(gl.int16, cfg.CODE_STAGES, cfg.BLOCK_N, cfg.PACKED_K)
        v_code_stages = allocate_stages_and_mbarriers(gl.int16, cfg.CODE_STAGES, cfg.BLOCK_N, cfg.PACKED_V)
    fence_async_shared()
    # Wait for the previous kernel; then scales and padding.
    pdl_wait()
    strides = (stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)
    store_empty_output_of_padding_rows(OUT, LSE, load_q_begin(CU_SEQLENS_Q, B, True), T, strides, cfg)
    score_scale = load_device_or_host_scale(softmax_scale, SOFTMAX_SCALE, cfg.HAS_SOFTMAX_SCALE) * LOG2E
    output_scale = load_device_or_host_scale(out_scale, OUT_SCALE, cfg.HAS_OUT_SCALE)
    cached_score_scale, cached_v_scale = (
        score_scale * cfg.K_RESIDUAL_SCALE,
        softcap * 0.0 + cfg.V_RESIDUAL_SCALE,
    )  # a tensor even without a scale
    if not cfg.HAS_K_SCALE:
        cached_score_scale = cached_score_scale * k_scale
    if not cfg.HAS_V_SCALE:
        cached_v_scale = cached_v_scale * v_scale
    out_lse_and_sinks = (OUT, LSE, SINKS)
    rotation = RotationTensors(K_SIGNS, V_SIGNS, K_CHANNEL_SCALES, V_CHANNEL_SCALES)
    tensor_maps, page_table_and_lengths = (Q, K, V), (PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q)
    # Warp roles.
    v_read_stages = v_stages
    if cfg.FP8_PV:
        v_read_stages = view_as_codes(v_stages, gl.float8e4nv)
    converter_args = (stored_scales, q_stages, tile_info, k_code_stages, v_code_stages, k_stages, v_stages)
    second_consumer_args = (OUT, strides, q_stages, tile_info, v_stages, shared_p)
    if cfg.HAS_NEW_KV:
        call_scales = NewAndCachedScales(
            score_scale, cached_score_scale, K_SCALE, cached_v_scale, V_SCALE, output_scale, softcap, rotation
        )
        new_maps, new_kv_stages = (K_NEW, V_NEW), (k_stages, v_stages)
    else:
        call_scales = CallScales(cached_score_scale, K_SCALE, cached_v_scale * output_scale, V_SCALE, softcap, rotation)
        new_maps, new_kv_stages = tensor_maps, tensor_maps  # placeholders
    NEW_DTYPE: gl.constexpr = K_NEW.dtype if cfg.HAS_NEW_KV else Q_DTYPE
    consumer_args = (out_lse_and_sinks, call_scales, strides, q_stages, tile_info, k_stages, v_read_stages,
                     stored_scales, shared_p)  # fmt: skip
    producer_args = (tensor_maps, new_maps, WORK_COUNTER, page_table_and_lengths, B, stride_table_b, q_stages,
                     tile_info, k_code_stages, v_code_stages, new_kv_stages)  # fmt: skip
    warp_specialize(
        converter_args, consumer_args, second_consumer_args, producer_args, Q_DTYPE, NEW_DTYPE, cfg, new_cfg
    )
    # NOTE: the compiler sees no use by address, and would reuse their memory (`pipeline.allocate_mbarrier_groups`).
    k_stages.full_barriers._keep_alive()
    v_stages.full_barriers._keep_alive()
    pdl_launch_dependents()
