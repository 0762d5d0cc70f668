"""MLA decode over 16-bit latents for up to 32 query rows on sm_90: keys are the M side of WGMMA, query rows the N side.

Tiles of 64 keys arrive by TMA in STAGES stages and are multiplied from there: for QK as they are, for PV transposed. So
few rows are not padded to 64, as they are in two_warpgroups.py.

Mask, lazy rescaling: `small_m_bf16_mainloop.mainloop_bf16`; wait for a free stage: `producer`; combine: `combine.py`.
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
from .small_m_bf16_mainloop import NUM_COLUMN_TILES, TILE_COLUMNS
from .small_m_consumer import ConsumerBuffers, PipelineBarriers, consumer


@gluon.jit
def mla_decode_small_m_bf16_kernel(
    Q_NOPE, Q_PE, CKV_MAP, KPE_MAP, SCALES_MAP, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, OUT, LSE, SPLIT_WORKSPACE,
    softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE,
    B, T, oob_row, scale_rows_per_page, max_m_blocks, stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h,
    stride_table_b, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    STAGES: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Computes one CTA range for one block of heads."""
    gl.static_assert(cfg.CODE == "bf16", "a code that this kernel does not know")
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
    request_shapes = load_all_request_shapes(SEQ_LENS, CU_SEQLENS_Q, B, cfg, True) if fits_all_requests(cfg) else ()
    if cfg.VARLEN_Q:
        padding_begin = gl.load(CU_SEQLENS_Q + B).to(gl.int32)  # arrives with the lengths
    DTYPE: gl.constexpr = CKV_MAP.dtype
    ckv = gl.allocate_shared_memory(DTYPE, [STAGES * NUM_COLUMN_TILES, cfg.BLOCK_N, TILE_COLUMNS], CKV_MAP.layout)
    k_pe = gl.allocate_shared_memory(DTYPE, [STAGES, cfg.BLOCK_N, TILE_COLUMNS], KPE_MAP.layout)
    q = gl.allocate_shared_memory(
        DTYPE,
        [NUM_COLUMN_TILES + 1, cfg.BLOCK_M, TILE_COLUMNS],
        gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_M, TILE_COLUMNS], DTYPE),
    )
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, cfg.BLOCK_M], DTYPE)
    p_smem = gl.allocate_shared_memory(DTYPE, [1, cfg.BLOCK_N, cfg.BLOCK_M], P_LAYOUT)
    vote_flags = gl.allocate_shared_memory(gl.int8, [1, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    mbarriers = PipelineBarriers(allocate_mbarriers(STAGES), allocate_mbarriers(STAGES))
    call_scales = load_call_scales(softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, cfg)
    cta_range = make_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, request_shapes, i_range, num_ranges, max_m_blocks, i_cta, cfg)
    q_smem, kv_stages = QuerySmem(q, q), KVStages(ckv, k_pe, k_pe)
    buffers = ConsumerBuffers(p_smem, vote_flags, vote_flags, vote_flags, (), (), ())
    thread_barrier()  # arguments of the partitions may overwrite memory that reductions read
    # The producer is the default partition: it has four warps anyway.
    gl.warp_specialize(
        [
            (producer, (tensor_maps, page_lookup, mbarriers.full, mbarriers.empty, kv_stages, cta_range, (), STAGES,
                        cfg)),
            (consumer, (tensors, q_smem, kv_stages, mbarriers, buffers, call_scales, cta_range, strides, STAGES, 0, 1,
                        cfg)),
        ],
        [4],
        [232],
    )  # fmt: skip
    if cfg.VARLEN_Q:
        zero_padding_rows(
            OUT, LSE, padding_begin, T, i_cta, num_ctas, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg
        )
