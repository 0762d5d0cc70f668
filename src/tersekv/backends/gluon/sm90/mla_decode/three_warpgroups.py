"""MLA decode over 8-bit latents for many heads on sm_90: one warpgroup for QK and softmax, two for PV.

Tiles of 64 keys arrive by TMA in STAGES stages. The QK warpgroup multiplies 64 query rows (M) by keys (N), 8-bit MMA
straight from the codes, and stores P in shared memory in two stages. The PV warpgroups hold half of the columns each,
transposed: columns are M, query rows N. They read the same codes as 16-bit packed pairs, which become fp16 in
registers. So the softmax of one tile and the dequantisation of another overlap MMAs. They also load each work tile's
query, and store its output through the query's memory. The producer prepares group scales.

A query of 8 significant bits is exactly the sum of two e4m3 terms. 8-bit MMA keeps about 14 bits: each chunk of 128
columns has its own accumulator, added in fp32; the second term, which is 2^-4 of the first, needs only one.

Mask, lazy row_max: `three_warpgroups_qk`; rescale of acc_o: `three_warpgroups_pv.rescale_acc`; wait for a free
KV stage: `producer`, for a free P stage: `qk_softmax_warpgroup` on `p_empty`; combine: `combine.py`.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.combine import split_metadata_ptr
from ..parts.epilogue import zero_padding_rows
from ..parts.pipeline import allocate_mbarrier_groups, pdl_wait
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
from .producer import ScalePrefetch, producer
from .three_warpgroups_pv import pv_warpgroup
from .three_warpgroups_qk import BLOCK_N, KEY_HALVES, KEYS_PER_HALF, LANES_PER_ROW, P_STAGES, qk_softmax_warpgroup
from .three_warpgroups_query import BLOCK_M
from .three_warpgroups_scales import SCALE_COLUMNS

PV_REGISTERS = gl.constexpr(176)  # of a thread of a PV warpgroup


class Mbarriers(NamedTuple):
    full: gl.shared_memory_descriptor  # of the KV pipeline
    empty: gl.shared_memory_descriptor
    p_full: gl.shared_memory_descriptor  # P and rescale of an iteration
    p_empty: gl.shared_memory_descriptor  # PV is done
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor  # the output, staged in the query's memory, is stored
    first_q_full: gl.shared_memory_descriptor  # of the first query, for the producer
    scales_full: gl.shared_memory_descriptor  # of the KV pipeline: group scales are prepared


class SharedBuffers(NamedTuple):
    """Shared memory by which warpgroups exchange data."""

    p_smem: gl.shared_memory_descriptor
    rescales: gl.shared_memory_descriptor  # of acc_o; at the end of a work tile, its acc_scale
    rescale_flags: gl.shared_memory_descriptor  # whether any rescale is not 1
    q_scales: gl.shared_memory_descriptor  # of the query rows
    score_scales: gl.shared_memory_descriptor  # group scales for QK
    v_scale_ratios: gl.shared_memory_descriptor  # and for PV
    uniform_smem: gl.shared_memory_descriptor  # for `params.make_uniform`


@gluon.jit
def mla_decode_three_warpgroups_kernel(
    Q_NOPE, Q_PE, CKV_MAP, KPE_MAP, SCALES_MAP, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, OUT, LSE, SPLIT_WORKSPACE,
    softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE,
    B, T, oob_row, scale_rows_per_page, max_m_blocks, stride_q_nope_t, stride_q_nope_h, stride_q_pe_t, stride_q_pe_h,
    stride_table_b, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    STAGES: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Computes one CTA range for one block of heads."""
    gl.static_assert(cfg.CODE == "e4m3", "a code that this kernel does not know")
    pdl_wait()
    i_cta = gl.program_id(0)
    num_ctas = gl.num_programs(0)
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
    if cfg.VARLEN_Q:
        padding_begin = gl.load(CU_SEQLENS_Q + B).to(gl.int32)  # arrives with the lengths
    BY_WARP: gl.constexpr = not cfg.GROUP_SCALES  # with group scales, registers are scarce
    request_shapes = load_all_request_shapes(SEQ_LENS, CU_SEQLENS_Q, B, cfg, BY_WARP) if fits_all_requests(cfg) else ()
    E4M3: gl.constexpr = gl.float8e4nv
    WIDTH: gl.constexpr = 2 * cfg.CHUNK
    R: gl.constexpr = KPE_MAP.dtype
    WIDTH_PE: gl.constexpr = KPE_MAP.block_shape[1]
    Q_TERMS: gl.constexpr = 1 if Q_NOPE.dtype.element_ty == E4M3 else 2
    Q_PE_SMEM_ROWS: gl.constexpr = BLOCK_M if cfg.GROUP_SCALES else Q_TERMS * BLOCK_M
    ckv = gl.allocate_shared_memory(E4M3, [STAGES * cfg.CHUNKS, BLOCK_N, WIDTH], CKV_MAP.layout)
    k_pe = gl.allocate_shared_memory(R, [STAGES, BLOCK_N, WIDTH_PE], KPE_MAP.layout)
    scales = k_pe
    if cfg.GROUP_SCALES:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N, cfg.CHUNKS], SCALES_MAP.layout)
    Q_NOPE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_TERMS * BLOCK_M, WIDTH], E4M3)
    Q_PE_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_PE_SMEM_ROWS, WIDTH_PE], R)
    q_nope = gl.allocate_shared_memory(E4M3, [cfg.CHUNKS, Q_TERMS * BLOCK_M, WIDTH], Q_NOPE_LAYOUT)
    q_pe = gl.allocate_shared_memory(R, [1, Q_PE_SMEM_ROWS, WIDTH_PE], Q_PE_LAYOUT)
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, KEYS_PER_HALF], gl.float16)
    p_smem = gl.allocate_shared_memory(gl.float16, [KEY_HALVES * P_STAGES, BLOCK_M, KEYS_PER_HALF], P_LAYOUT)
    FLAT_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rescales = gl.allocate_shared_memory(
        gl.float32, [P_STAGES, BLOCK_M, LANES_PER_ROW], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    rescale_flags = gl.allocate_shared_memory(
        gl.int8, [P_STAGES, 16, LANES_PER_ROW, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    q_scales = gl.allocate_shared_memory(gl.float32, [BLOCK_M], FLAT_LAYOUT)
    uniform_smem = gl.allocate_shared_memory(gl.int32, [3, 1], FLAT_LAYOUT)
    score_scales, v_scale_ratios = rescales, p_smem
    if cfg.GROUP_SCALES:
        score_scales = gl.allocate_shared_memory(gl.float32, [SCALE_COLUMNS * STAGES, BLOCK_N], FLAT_LAYOUT)
        v_scale_ratios = gl.allocate_shared_memory(gl.float16, [STAGES * cfg.CHUNKS, BLOCK_N], FLAT_LAYOUT)
    full, empty, scales_full = allocate_mbarrier_groups(STAGES, (1, 3, 1))
    p_full, p_empty = allocate_mbarrier_groups(P_STAGES, (1, 2))
    q_full, q_empty, first_q_full = allocate_mbarrier_groups(1, (2, 2, 2))
    mbarriers = Mbarriers(full, empty, p_full, p_empty, q_full, q_empty, first_q_full, scales_full)
    call_scales = load_call_scales(softmax_scale, SOFTMAX_SCALE, kv_scale, KV_SCALE, out_scale, OUT_SCALE, cfg)
    cta_range = make_cta_range(
        SEQ_LENS, CU_SEQLENS_Q, B, request_shapes, i_cta // cfg.HEADS, num_ctas // cfg.HEADS, max_m_blocks, i_cta, cfg
    )
    q, kv_stages = QuerySmem(q_nope, q_pe), KVStages(ckv, k_pe, scales)
    buffers = SharedBuffers(p_smem, rescales, rescale_flags, q_scales, score_scales, v_scale_ratios, uniform_smem)
    scale_prefetch = ScalePrefetch(mbarriers.first_q_full, score_scales, v_scale_ratios, mbarriers.scales_full)
    # With an 8-bit rotary part half of QK is of second terms: those MMAs overlap the previous softmax. Without second
    # terms, or with scales, which need registers, PV of the previous tile does.
    PREFETCH_QK: gl.constexpr = Q_TERMS == 2 and not cfg.GROUP_SCALES
    # NOTE: more than the compiler needs makes it wait for each MMA, and so does less.
    QK_REGISTERS: gl.constexpr = 136 if cfg.GROUP_SCALES else 128
    thread_barrier()  # arguments of the partitions may overwrite memory that reductions read
    gl.warp_specialize(
        [
            (producer, (tensor_maps, page_lookup, mbarriers.full, mbarriers.empty, kv_stages, cta_range, scale_prefetch,
                        STAGES, cfg)),
            (qk_softmax_warpgroup, (tensors, q, kv_stages, mbarriers, buffers, call_scales, cta_range, strides, STAGES,
                                    PREFETCH_QK, Q_TERMS, cfg)),
            (pv_warpgroup, (tensors, q, kv_stages, mbarriers, buffers, call_scales.score_scale, cta_range, strides, 0,
                            STAGES, Q_TERMS, cfg)),
            (pv_warpgroup, (tensors, q, kv_stages, mbarriers, buffers, call_scales.score_scale, cta_range, strides, 1,
                            STAGES, Q_TERMS, cfg)),
        ],
        [4, 4, 4],
        [QK_REGISTERS, PV_REGISTERS, PV_REGISTERS],
    )  # fmt: skip
    if cfg.VARLEN_Q:
        zero_padding_rows(
            OUT, LSE, padding_begin, T, i_cta, num_ctas, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg
        )
