"""MLA decode over 8-bit latents for few query rows on sm_90: keys are the M side of WGMMA, query rows the N side.

Tiles of 64 keys arrive by TMA in STAGES stages. QK is 8-bit MMA straight from them: a query of 8 significant bits is
exactly the sum of two e4m3 terms, side by side along N. Each chunk of 128 columns has its own accumulator, added in
fp32, since 8-bit MMA keeps about 14 bits. For PV the same codes are read as 16-bit packed pairs, transposed, and become
fp16 in registers: two tiles, of the even and of the odd columns of a chunk.

With NUM_CONSUMERS 2, two warpgroups alternate over the n_blocks of a work tile, each with its own state; at its end
they rescale to one row_max and exchange halves of the columns.

Mask, lazy rescaling: `small_m_fp8_mainloop.mainloop_fp8`; wait for a free stage: `producer`; combine: `combine.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.combine import split_metadata_ptr
from ..parts.epilogue import zero_padding_rows
from ..parts.pipeline import allocate_mbarriers, pdl_wait
from ..parts.tile_scheduler import load_all_request_shapes
from .params import (
    AttentionTensors,
    KVStages,
    PageLookup,
    QuerySmem,
    Strides,
    TensorMaps,
    fits_all_requests,
    load_call_scales,
    make_cta_range,
)
from .producer import producer
from .small_m_consumer import ConsumerBuffers, PipelineBarriers, consumer


@gluon.jit
def mla_decode_small_m_fp8_kernel(
    Q_NOPE, Q_PE, CKV_MAP, KPE_MAP, SCALES_MAP, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, OUT, LSE, SPLIT_WORKSPACE,
    softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE,
    B, T, oob_row, scale_rows_per_page, max_m_blocks, stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h,
    stride_table_b, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    STAGES: gl.constexpr, NUM_CONSUMERS: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Computes one CTA range for one block of heads."""
    gl.static_assert(cfg.CODE == "e4m3", "a code that this kernel does not know")
    pdl_wait()
    i_cta = gl.program_id(0)
    num_ctas = gl.num_programs(0)
    i_range, num_ranges = i_cta // cfg.HEADS, num_ctas // cfg.HEADS
    tensors = AttentionTensors(
        Q_NOPE, Q_PE, SEQ_LENS, CU_SEQLENS_Q, OUT, LSE, SPLIT_WORKSPACE,
        split_metadata_ptr(SPLIT_WORKSPACE, num_ctas, cfg),
    )  # fmt: skip
    strides = Strides(
        stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h, stride_out_t, stride_out_h, stride_lse_t,
        stride_lse_h,
    )  # fmt: skip
    tensor_maps, page_lookup = (
        TensorMaps(CKV_MAP, KPE_MAP, SCALES_MAP),
        PageLookup(PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, stride_table_b, oob_row, scale_rows_per_page),
    )
    request_shapes = load_all_request_shapes(SEQ_LENS, CU_SEQLENS_Q, B, cfg) if fits_all_requests(cfg) else ()
    if cfg.VARLEN_Q:
        padding_begin = gl.load(CU_SEQLENS_Q + B).to(gl.int32)  # arrives with the lengths
    E4M3: gl.constexpr = gl.float8e4nv
    WIDTH: gl.constexpr = 2 * cfg.CHUNK
    R: gl.constexpr = KPE_MAP.dtype
    WIDTH_PE: gl.constexpr = KPE_MAP.block_shape[1]
    Q_SMEM_ROWS: gl.constexpr = cfg.BLOCK_M if Q_NOPE.dtype.element_ty == gl.float8e4nv else 2 * cfg.BLOCK_M
    Q_PE_SMEM_ROWS: gl.constexpr = cfg.BLOCK_M if cfg.GROUP_SCALES else Q_SMEM_ROWS
    NUM_P_TILES: gl.constexpr = cfg.CHUNKS if cfg.GROUP_SCALES else 1
    ckv = gl.allocate_shared_memory(E4M3, [STAGES * cfg.CHUNKS, cfg.BLOCK_N, WIDTH], CKV_MAP.layout)
    k_pe = gl.allocate_shared_memory(R, [STAGES, cfg.BLOCK_N, WIDTH_PE], KPE_MAP.layout)
    scales = k_pe
    if cfg.GROUP_SCALES:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, cfg.BLOCK_N, cfg.CHUNKS], SCALES_MAP.layout)
    Q_NOPE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_SMEM_ROWS, WIDTH], E4M3)
    Q_PE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_PE_SMEM_ROWS, WIDTH_PE], R)
    q_nope = gl.allocate_shared_memory(E4M3, [cfg.CHUNKS, Q_SMEM_ROWS, WIDTH], Q_NOPE_LAYOUT)
    q_pe = gl.allocate_shared_memory(R, [1, Q_PE_SMEM_ROWS, WIDTH_PE], Q_PE_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, cfg.BLOCK_M], gl.float16)
    p_smem = gl.allocate_shared_memory(gl.float16, [NUM_CONSUMERS * NUM_P_TILES, cfg.BLOCK_N, cfg.BLOCK_M], P_LAYOUT)
    FLAT_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    vote_flags = gl.allocate_shared_memory(gl.int8, [NUM_CONSUMERS, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    EXCHANGE_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 4, [1, 0])
    row_stats, acc_exchange, q_full, stats_full, acc_full = vote_flags, vote_flags, vote_flags, vote_flags, vote_flags
    if NUM_CONSUMERS == 2:
        # Only where they are used: the compiler would reuse the memory of unused ones, with a barrier in it.
        q_full, stats_full, acc_full = (
            (allocate_mbarriers(1), allocate_mbarriers(1)),
            (allocate_mbarriers(1), allocate_mbarriers(1)),
            (allocate_mbarriers(1), allocate_mbarriers(1)),
        )
        row_stats = gl.allocate_shared_memory(gl.float32, [4, cfg.BLOCK_M], FLAT_LAYOUT)
        acc_exchange = gl.allocate_shared_memory(gl.float32, [cfg.CHUNKS, cfg.CHUNK, cfg.BLOCK_M], EXCHANGE_LAYOUT)
    # NOTE: of two alternating warpgroups each waits for every other tile, and a wait sees only one phase back. With one
    # barrier for each of three stages the previous phase would be the other warpgroup's tile, possibly still in flight
    # when a later tile is full. With twice as many, a barrier belongs to one warpgroup for a whole work tile, at whose
    # end both synchronise.
    mbarriers = PipelineBarriers(allocate_mbarriers(NUM_CONSUMERS * STAGES), allocate_mbarriers(STAGES))
    call_scales = load_call_scales(softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, cfg)
    cta_range = make_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, request_shapes, i_range, num_ranges, max_m_blocks, i_cta, cfg)
    q, kv_stages = QuerySmem(q_nope, q_pe), KVStages(ckv, k_pe, scales)
    buffers = ConsumerBuffers(p_smem, vote_flags, row_stats, acc_exchange, q_full, stats_full, acc_full)
    thread_barrier()  # arguments of the partitions may overwrite memory that reductions read
    # The producer is the default partition: it has four warps anyway.
    if NUM_CONSUMERS == 2:
        gl.warp_specialize(
            [
                (producer, (tensor_maps, page_lookup, mbarriers.full, mbarriers.empty, kv_stages, cta_range, (), STAGES,
                            cfg)),
                (consumer, (tensors, q, kv_stages, mbarriers, buffers, call_scales, cta_range, strides, STAGES, 0,
                            NUM_CONSUMERS, cfg)),
                (consumer, (tensors, q, kv_stages, mbarriers, buffers, call_scales, cta_range, strides, STAGES, 1,
                            NUM_CONSUMERS, cfg)),
            ],
            [4, 4],
            [240, 240],
        )  # fmt: skip
    else:
        CONSUMER_REGISTERS: gl.constexpr = 216 if cfg.GROUP_SCALES else 232  # more would spill the addresses of scales
        gl.warp_specialize(
            [
                (producer, (tensor_maps, page_lookup, mbarriers.full, mbarriers.empty, kv_stages, cta_range, (), STAGES,
                            cfg)),
                (consumer, (tensors, q, kv_stages, mbarriers, buffers, call_scales, cta_range, strides, STAGES, 0,
                            NUM_CONSUMERS, cfg)),
            ],
            [4],
            [CONSUMER_REGISTERS],
        )  # fmt: skip
    if cfg.VARLEN_Q:
        zero_padding_rows(
            OUT, LSE, padding_begin, T, i_cta, num_ctas, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg
        )
