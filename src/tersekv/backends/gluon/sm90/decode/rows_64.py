"""Decode with many query rows of a KV head: a converter warpgroup dequantizes, consumer warpgroups run the MMAs.

A CTA has one KV head. The converter warpgroup starts the copies of codes, in a ring of STAGES n_blocks, and converts
them to fp16 in a ring of CONVERTED_STAGES, once for all rows. Each consumer warpgroup processes 64 query rows (M) over
all keys (N) with wgmma, and waits only where the converted ring is empty. Item 2 k of that ring is K of the k-th
n_block, item 2 k + 1 its V. Columns in shared memory keep the order of the conversion (`logical_column`).

Mask: `rows_64_softmax.softmax_step`. Free stage: `producer_acquire` in `converter`. Rescale: lazy, `rescale_acc`.
Combine: `combine`, in a second launch.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from ...versions import thread_barrier
from ..parts.online_softmax import pack_p, unpack_p
from ..parts.pipeline import (
    allocate_full_barriers,
    allocate_mbarriers,
    consumer_release,
    consumer_wait,
    pdl_launch_dependents,
    pdl_wait,
)
from ..parts.tile_scheduler import (
    LOG2E,
    advance_to_request,
    count_splits,
    load_request_shape,
    load_scale,
    split_metadata_ptr,
    work_tile_at,
    zero_padding_rows,
)
from .cta_range import assign_equal_cta_range, load_scale_per_head
from .epilogue import logical_column, store_output_of_head, store_partial_of_head
from .kernel import store_split_metadata, work_tile_metadata_ptr
from .mask import unmasked_range
from .params import (
    AttentionTensors,
    CallScales,
    ConvertedStages,
    MaskArgs,
    PageLookup,
    SoftmaxState,
    Strides,
    TensorMaps,
)
from .producer import allocate_kv_stages
from .query import query_row_ptrs
from .rotation import (
    allocate_rotation_smem,
    load_rotation_scales_of_heads,
    rotate_query,
    store_rotation_scales,
    unrotate_acc,
)
from .rows_64_converter import NUM_SCALE_VECTORS, SCALE_STAGES, converter
from .rows_64_softmax import (
    LANES_PER_ROW,
    ROWS_PER_WARPGROUP,
    rescale_acc,
    row_per_lane_layout,
    score_layout,
    softmax_step,
    view_by_lane,
)

MIN_SCALE = gl.constexpr(1e-30)  # of scores; not 0, since −inf × 0 is NaN


@gluon.constexpr_function
def acc_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.PACK * cfg.PACKED_V, 16])


@gluon.jit
def load_query_operand(
    tensors, strides, rotation_smem, work_tile, kv_head, row_begin, sign, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Returns (64 query rows from row_begin on, fp16, as the left operand; a scale of their scores
    [ROWS_PER_WARPGROUP]): see `query.to_query_operands`."""
    S: gl.constexpr = score_layout(cfg)
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    o_r = row_begin + gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, A))
    o_d = logical_column(gl.arange(0, cfg.PACK * cfg.PACKED_K, gl.SliceLayout(0, A)), cfg)
    p_row = query_row_ptrs(tensors.Q, strides, work_tile.q_begin, kv_head, o_r, cfg)
    x = gl.load(p_row[:, None] + o_d[None, :], mask=(o_r < work_tile.num_q_rows * cfg.GROUP)[:, None], other=0.0).to(
        gl.float32
    )
    x = rotate_query(x, rotation_smem, 1, cfg, tile_cfg)
    exponent = gl.maximum((gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF, 1)
    inv_scale = (gl.maximum(254 - exponent, 1) << 23).to(gl.float32, bitcast=True) * sign
    q_scales = gl.convert_layout(
        (exponent << 23).to(gl.float32, bitcast=True) * cfg.K_RESIDUAL_SCALE, gl.SliceLayout(1, S)
    )
    return (x * inv_scale[:, None]).to(gl.float16), q_scales


@gluon.jit
def start_qk(q, converted_stages, iter, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Waits for the converted K of an n_block and starts S = Q K^T."""
    k = converted_stages.kv.index(consumer_wait(converted_stages.full_barriers, 2 * iter, tile_cfg.CONVERTED_STAGES))
    zero = gl.full([ROWS_PER_WARPGROUP, cfg.BLOCK_N], 0, gl.float32, score_layout(cfg))
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def start_pv(p, acc_o, converted_stages, iter, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Waits for the converted V of an n_block and starts acc_o + P V."""
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout(cfg), 2), assert_trivial=True)
    v = converted_stages.kv.index(
        consumer_wait(converted_stages.full_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES)
    )
    return warpgroup_mma(p, v, acc_o, is_async=True)


@gluon.jit
def mainloop(
    q, score_scales, softcap, converted_stages, iter, n_block_begin, n_block_end, unmasked_begin, unmasked_end,
    mask_args, cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes n_blocks [n_block_begin, n_block_end) of a work tile. Returns (SoftmaxState by lane, next iter)."""
    acc_o = gl.full([ROWS_PER_WARPGROUP, cfg.PACK * cfg.PACKED_V], 0, gl.float32, acc_layout(cfg))
    row_max = gl.full([ROWS_PER_WARPGROUP, LANES_PER_ROW], float("-inf"), gl.float32, score_scales.type.layout)
    row_sum = gl.full([ROWS_PER_WARPGROUP, LANES_PER_ROW], 0.0, gl.float32, score_scales.type.layout)
    for n_block in range(n_block_begin, n_block_end):
        # QK.
        s = warpgroup_mma_wait(0, [start_qk(q, converted_stages, iter, cfg, tile_cfg)])
        consumer_release(converted_stages.empty_barriers, 2 * iter, tile_cfg.CONVERTED_STAGES)
        # Mask and online softmax.
        is_unmasked = (n_block >= unmasked_begin) & (n_block < unmasked_end)
        p, p_sums, row_max, rescale = softmax_step(
            s, row_max, score_scales, softcap, converted_stages.token_scales, iter, n_block, is_unmasked, mask_args, cfg
        )
        row_sum = row_sum * rescale + p_sums
        # Rescale and PV.
        acc_o = start_pv(p.to(gl.float16), rescale_acc(acc_o, rescale), converted_stages, iter, cfg, tile_cfg)
        acc_o = warpgroup_mma_wait(0, [acc_o])
        consumer_release(converted_stages.empty_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES)
        iter += 1
    return SoftmaxState(row_max, row_sum, acc_o), iter


@gluon.jit
def mainloop_overlapped(
    q, score_scales, softcap, converted_stages, iter, n_block_begin, n_block_end, unmasked_begin, unmasked_end,
    mask_args, cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """The same, with QK and row_max of an n_block overlapping PV of the one before.

    For one CTA of two consumer warpgroups. 128 rows, 64 × 8K: fp8 592 → 509 µs; 64 rows, where two CTAs share an SM:
    even. The exponentials come behind the wait for PV: forced ahead of it, 509 → 584.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, acc_layout(cfg), 2)
    acc_o = gl.full([ROWS_PER_WARPGROUP, cfg.PACK * cfg.PACKED_V], 0, gl.float32, acc_layout(cfg))
    row_max = gl.full([ROWS_PER_WARPGROUP, LANES_PER_ROW], float("-inf"), gl.float32, score_scales.type.layout)
    s = warpgroup_mma_wait(0, [start_qk(q, converted_stages, iter, cfg, tile_cfg)])
    consumer_release(converted_stages.empty_barriers, 2 * iter, tile_cfg.CONVERTED_STAGES)
    is_unmasked = (n_block_begin >= unmasked_begin) & (n_block_begin < unmasked_end)
    p, row_sum, row_max, _ = softmax_step(
        s, row_max, score_scales, softcap, converted_stages.token_scales, iter, n_block_begin, is_unmasked, mask_args,
        cfg,
    )  # fmt: skip
    p_packed = pack_p(p, gl.float16)
    for n_block in range(n_block_begin + 1, n_block_end):
        # QK of this n_block, PV of the previous one.
        s = start_qk(q, converted_stages, iter + 1, cfg, tile_cfg)
        acc_o = start_pv(unpack_p(p_packed, gl.float16, A), acc_o, converted_stages, iter, cfg, tile_cfg)
        s = warpgroup_mma_wait(1, [s])
        consumer_release(converted_stages.empty_barriers, 2 * iter + 2, tile_cfg.CONVERTED_STAGES)
        # Mask and online softmax.
        is_unmasked = (n_block >= unmasked_begin) & (n_block < unmasked_end)
        p, p_sums, row_max, rescale = softmax_step(
            s, row_max, score_scales, softcap, converted_stages.token_scales, iter + 1, n_block, is_unmasked, mask_args,
            cfg,
        )  # fmt: skip
        row_sum = row_sum * rescale + p_sums
        p_packed = pack_p(p, gl.float16)
        # Wait for PV, then rescale.
        acc_o = warpgroup_mma_wait(0, [acc_o])
        consumer_release(converted_stages.empty_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES)
        acc_o = rescale_acc(acc_o, rescale)
        iter += 1
    acc_o = warpgroup_mma_wait(
        0, [start_pv(unpack_p(p_packed, gl.float16, A), acc_o, converted_stages, iter, cfg, tile_cfg)]
    )
    consumer_release(converted_stages.empty_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES)
    return SoftmaxState(row_max, row_sum, acc_o), iter + 1


@gluon.jit
def consumer(
    tensors, scales, strides, rotation_smem, converted_stages, cta_range, I_CONSUMER: gl.constexpr, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes 64 query rows over the n_blocks of the CTA range."""
    SEQ_LENS, CU_SEQLENS_Q, kv_head = tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, cta_range.head_group
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    head_score_scale = scales.score_scale * load_scale_per_head(
        scales.k_scale, scales.K_SCALE, kv_head, cfg.HAS_K_SCALE, cfg.K_SCALE_STRIDE
    )
    v_out_scale = (
        load_scale_per_head(scales.v_scale, scales.V_SCALE, kv_head, cfg.HAS_V_SCALE, cfg.V_SCALE_STRIDE)
        * scales.out_scale
    )
    # Q is multiplied by the scale's sign, so that the highest score is the largest element of the accumulator.
    sign = gl.where(head_score_scale < 0, -1.0, 1.0)
    request = load_request_shape(SEQ_LENS, CU_SEQLENS_Q, i_request, block < block_end, cfg)
    iter = 0
    while block < block_end:
        i_request, n_block_base, request = advance_to_request(
            SEQ_LENS, CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
        )
        work_tile = work_tile_at(block, block_end, i_request, n_block_base, request)
        row_begin = work_tile.m_block * cfg.BLOCK_M + I_CONSUMER * ROWS_PER_WARPGROUP
        q, q_scales = load_query_operand(
            tensors, strides, rotation_smem, work_tile, kv_head, row_begin, sign, cfg, tile_cfg
        )
        score_scales = q_scales * (head_score_scale * sign)
        score_scales = gl.where(score_scales < MIN_SCALE, MIN_SCALE, score_scales)
        LANE: gl.constexpr = row_per_lane_layout(
            view_by_lane(gl.full([ROWS_PER_WARPGROUP, cfg.BLOCK_N], 0.0, gl.float32, score_layout(cfg))).type.layout
        )
        zero = gl.full([ROWS_PER_WARPGROUP, LANES_PER_ROW], 0.0, gl.float32, LANE)
        score_scales = gl.convert_layout(score_scales, gl.SliceLayout(1, LANE))[:, None] + zero
        unmasked_begin, unmasked_end = unmasked_range(request, cfg)
        mask_args = MaskArgs(
            work_tile.num_keys, work_tile.num_q_rows, row_begin, work_tile.q_begin, tensors.MASK, strides.mask_t
        )
        mainloop_fn: gl.constexpr = mainloop_overlapped if tile_cfg.WARPS_PER_HEAD == 8 else mainloop
        lane_state, iter = mainloop_fn(
            q, score_scales, scales.softcap, converted_stages, iter, request.first_n_block + work_tile.n_block_begin,
            request.first_n_block + work_tile.n_block_end, unmasked_begin, unmasked_end,
            mask_args, cfg, tile_cfg,
        )  # fmt: skip
        # Epilogue: output of an unsplit work tile, else a partial result.
        ROW: gl.constexpr = gl.SliceLayout(1, lane_state.acc_o.type.layout)
        row_max, row_sum = (
            gl.convert_layout(gl.max(lane_state.row_max, 1), ROW),
            gl.convert_layout(gl.sum(lane_state.row_sum, 1), ROW),
        )
        state = SoftmaxState(row_max, row_sum, lane_state.acc_o)
        if tile_cfg.V.ROTATION.ENABLED:
            state = unrotate_acc(state, rotation_smem, cfg, tile_cfg)
        o_m = gl.arange(0, ROWS_PER_WARPGROUP, ROW)
        if work_tile.n_block_begin == 0:  # all consumer warpgroups store the same
            num_splits = count_splits(work_tile, cta_range.blocks_per_range, cta_range.i_range)
            store_split_metadata(
                work_tile_metadata_ptr(tensors.SPLIT_METADATA, work_tile, cta_range.head_group, tile_cfg),
                num_splits,
                cta_range.i_range,
            )
        if work_tile.n_block_end - work_tile.n_block_begin == work_tile.num_n_blocks:
            store_output_of_head(tensors, strides, state, v_out_scale, kv_head, work_tile, row_begin + o_m, cfg)
        else:
            partial_slot = 2 * (cta_range.i_range * cfg.HEADS + kv_head) + gl.where(work_tile.n_block_begin == 0, 1, 0)
            num_rows_left = work_tile.num_q_rows * cfg.GROUP - work_tile.m_block * cfg.BLOCK_M
            store_partial_of_head(
                tensors.SPLIT_WORKSPACE, partial_slot, state, I_CONSUMER * ROWS_PER_WARPGROUP + o_m, num_rows_left, cfg
            )
        block += work_tile.n_block_end - work_tile.n_block_begin


@gluon.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_rows_64_kernel(
    Q, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, K_SIGNS,
    V_SIGNS, K_CHANNEL_SCALES, V_CHANNEL_SCALES,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, stride_q_t, stride_q_h, stride_table_b, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes one CTA range for a KV head. See the module's docstring, and `decode_kernel`'s."""
    gl.static_assert((cfg.CODE == "e2m1") == cfg.BLOCK_SCALES, "a code that this kernel does not know")
    i_cta = gl.program_id(0)
    i_range, num_ranges, kv_head = (
        i_cta // tile_cfg.HEAD_GROUPS, gl.num_programs(0) // tile_cfg.HEAD_GROUPS, i_cta % tile_cfg.HEAD_GROUPS,
    )  # fmt: skip
    SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, num_ranges * cfg.HEADS, cfg)
    D: gl.constexpr = cfg.PACK * cfg.PACKED_K
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, D], gl.float16)
    kv_stages = allocate_kv_stages(tile_cfg)
    converted_kv = gl.allocate_shared_memory(gl.float16, [tile_cfg.CONVERTED_STAGES, cfg.BLOCK_N, D], KV_LAYOUT)
    token_scales = converted_kv
    if cfg.TOKEN_SCALES:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        token_scales = gl.allocate_shared_memory(gl.float32, [SCALE_STAGES * NUM_SCALE_VECTORS, cfg.BLOCK_N], PLAIN)
    rotation_smem = allocate_rotation_smem(converted_kv, cfg, tile_cfg)
    full_barriers = allocate_full_barriers(2, tile_cfg.STAGES)
    converted_full, converted_empty = (
        allocate_mbarriers(tile_cfg.CONVERTED_STAGES, 1),
        allocate_mbarriers(tile_cfg.CONVERTED_STAGES, tile_cfg.WARPS_PER_HEAD // 4),
    )
    fence_async_shared()
    pdl_wait()
    if cfg.VARLEN_Q:
        zero_padding_rows(
            OUT, LSE, gl.load(CU_SEQLENS_Q + B).to(gl.int32), T, i_cta, gl.num_programs(0), stride_out_t, stride_out_h,
            stride_lse_t, stride_lse_h, cfg,
        )  # fmt: skip
    rotation_scales = load_rotation_scales_of_heads(
        (K_SIGNS, V_SIGNS), (K_CHANNEL_SCALES, V_CHANNEL_SCALES), kv_head, cfg, tile_cfg
    )
    cta_range = assign_equal_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, kv_head, cfg)
    store_rotation_scales(rotation_smem, rotation_scales)
    tensors = AttentionTensors(Q, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, SPLIT_METADATA)
    scales = CallScales(
        load_scale(softmax_scale, SOFTMAX_SCALE, cfg.HAS_SOFTMAX_SCALE) * LOG2E, k_scale, K_SCALE, v_scale, V_SCALE,
        load_scale(out_scale, OUT_SCALE, cfg.HAS_OUT_SCALE), softcap,
    )  # fmt: skip
    strides = Strides(stride_q_t, stride_q_h, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)
    tensor_maps, page_lookup = (
        TensorMaps(K, V, K_SCALES, V_SCALES),
        PageLookup(PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, stride_table_b),
    )
    converted_stages = ConvertedStages(converted_kv, token_scales, converted_full, converted_empty)
    thread_barrier()  # the partitions' arguments may overlap the scratch of the reductions above
    if tile_cfg.WARPS_PER_HEAD == 4:
        gl.warp_specialize(
            [
                (
                    converter,
                    (tensor_maps, page_lookup, kv_stages, full_barriers, converted_stages, cta_range, cfg, tile_cfg),
                ),
                (consumer, (tensors, scales, strides, rotation_smem, converted_stages, cta_range, 0, cfg, tile_cfg)),
            ],
            [4],
            [176],
        )
    else:
        gl.warp_specialize(
            [
                (
                    converter,
                    (tensor_maps, page_lookup, kv_stages, full_barriers, converted_stages, cta_range, cfg, tile_cfg),
                ),
                (consumer, (tensors, scales, strides, rotation_smem, converted_stages, cta_range, 0, cfg, tile_cfg)),
                (consumer, (tensors, scales, strides, rotation_smem, converted_stages, cta_range, 1, cfg, tile_cfg)),
            ],
            [4, 4],
            [208, 208],
        )
    pdl_launch_dependents()
