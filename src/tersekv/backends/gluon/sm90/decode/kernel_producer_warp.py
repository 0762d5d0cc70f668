"""Split pass of paged decode on Hopper for 4-bit keys or values: `kernel` with a fifth warp as the producer.

Unpacking 4 bits keeps the four consumer warps busy. Starting the copies of an n_block costs as much as unpacking 10
keys, and four times that with pages of 16, so a producer warp does it. For the same reason a warp has all of up to 32
query rows of its head, and unpacks once (`mainloop_step_lazy_rescale`).

Mask: `kernel.compute_masked_log2_scores_of_mma_tile`. Free stage: `producer`, on empty_barriers. Rescale:
`mainloop_step` or `mainloop_step_lazy_rescale`, of `kernel`. Combine: `combine`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import thread_barrier
from ..parts.combine import num_splits_of_tile, split_metadata_ptr
from ..parts.dequant import load_device_or_host_scale, load_device_or_host_scale_per_head
from ..parts.epilogue import store_empty_output_of_padding_rows
from ..parts.hadamard import (
    allocate_smem_k_and_v_column_scales,
    load_k_and_v_column_scales,
    store_smem_k_and_v_column_scales,
    unrotate_and_scale_acc,
)
from ..parts.mask import MaskArgs, load_first_cut_key, unmasked_n_block_range
from ..parts.online_softmax import LOG2E
from ..parts.pipeline import allocate_mbarrier_groups, pdl_launch_dependents, pdl_wait
from ..parts.tile_scheduler import (
    advance_to_request_of_block,
    assign_rounded_cta_range,
    assign_unsplit_request,
    load_request_lengths_and_block_counts,
    make_work_tile_at_block,
)
from .code_chunks import start_code_chunk_copies
from .combine import TileSplits, arrive_and_combine_in_levels_if_last, load_first_level_counter_for_init_check
from .kernel import (
    AttentionTensors,
    CallScales,
    Strides,
    equalize_int4_acc_scales,
    init_unreduced_softmax_state,
    mainloop_step,
    mainloop_step_lazy_rescale,
    store_partial_acc_max_and_sum,
    store_split_metadata,
    store_unsplit_output_and_lse,
    sum_over_lanes_of_equal_row_max,
    work_tile_metadata_ptr,
)
from .layouts import kv_heads_of_cta, mma_layout, store_query_fragment
from .producer import (
    PageLookup,
    QueryOperands,
    TensorMaps,
    advance_prefetch_position,
    allocate_smem_kv,
    has_cp_async_copies,
    init_prefetch_position,
    load_query_operands_and_q_scales,
    start_code_tile_copy,
    start_scale_tile_copy,
)
from .scale_words import start_scale_word_copies

# ---- producer warp ----


@gluon.constexpr_function
def producer_registers(tile_cfg):
    """Returns the registers of a producer's thread: without spills, and as many as consumers can spare."""
    if any(side.SCALES_UNALIGNED or side.CODE_STRIDES for side in (tile_cfg.K, tile_cfg.V)):
        return 40
    return 32 if has_cp_async_copies(tile_cfg) else 24


@gluon.jit
def producer(
    tensor_maps, page_lookup, smem_kv, full_barriers, empty_barriers, first_head, cta_range, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Copies every n_block of the CTA range as stages become free."""
    NUM_COPIES: gl.constexpr = tile_cfg.NUM_BUFFERS * tile_cfg.COPIES_PER_BUFFER
    BLOCK_BYTES: gl.constexpr = (
        tile_cfg.K.COPY_BYTES + tile_cfg.K.SCALE_COPY_BYTES + tile_cfg.V.COPY_BYTES + tile_cfg.V.SCALE_COPY_BYTES
    )
    prefetch_pos = init_prefetch_position(page_lookup, cta_range, cfg, tile_cfg)
    for iter in range(0, cta_range.block_end - cta_range.block_begin):
        stage, n_block = iter % tile_cfg.STAGES, prefetch_pos.first_n_block + prefetch_pos.n_block
        # Wait for a free stage, then start its copies.
        mbarrier.wait(empty_barriers.index(stage), ((iter // tile_cfg.STAGES) & 1) ^ 1)
        full_barrier = full_barriers.index(stage)
        mbarrier.expect(full_barrier, NUM_COPIES * BLOCK_BYTES)
        for i in gl.static_range(NUM_COPIES):
            page_id, i_copy_in_ring = (
                prefetch_pos.page_ids[i],
                stage * tile_cfg.COPIES_PER_BUFFER + i % tile_cfg.COPIES_PER_BUFFER,
            )
            page_slot = (
                n_block * cfg.BLOCK_N + i * (tile_cfg.KEYS_PER_BUFFER // tile_cfg.COPIES_PER_BUFFER)
            ) % cfg.PAGE
            if tile_cfg.K.COPY_BYTES > 0:
                start_code_tile_copy(
                    tensor_maps.K, smem_kv.k[i // tile_cfg.COPIES_PER_BUFFER], full_barrier, i_copy_in_ring, page_id,
                    first_head, page_slot, True, cfg.K_ROWS_PER_PAGE, tile_cfg,
                )  # fmt: skip
            else:
                start_code_chunk_copies(
                    tensor_maps.K, smem_kv.k[i], stage, page_id, first_head, page_slot, True, False, 1, tile_cfg
                )
            if tile_cfg.K.SCALE_COPY_BYTES > 0:
                start_scale_tile_copy(
                    tensor_maps.K_SCALES, smem_kv.k_scales[i // tile_cfg.COPIES_PER_BUFFER], full_barrier,
                    i_copy_in_ring, page_id, first_head, page_slot, True, False, tile_cfg,
                )  # fmt: skip
            if tile_cfg.V.COPY_BYTES > 0:
                start_code_tile_copy(
                    tensor_maps.V, smem_kv.v[i // tile_cfg.COPIES_PER_BUFFER], full_barrier, i_copy_in_ring, page_id,
                    first_head, page_slot, True, cfg.V_ROWS_PER_PAGE, tile_cfg,
                )  # fmt: skip
            else:
                start_code_chunk_copies(
                    tensor_maps.V, smem_kv.v[i], stage, page_id, first_head, page_slot, True, True, 1, tile_cfg
                )
            if tile_cfg.V.SCALE_COPY_BYTES > 0:
                start_scale_tile_copy(
                    tensor_maps.V_SCALES, smem_kv.v_scales[i // tile_cfg.COPIES_PER_BUFFER], full_barrier,
                    i_copy_in_ring, page_id, first_head, page_slot, True, True, tile_cfg,
                )  # fmt: skip
            if tile_cfg.K.SCALE_BLOCKS > 0:
                start_scale_word_copies(
                    tensor_maps.K_SCALES, smem_kv.k_scales[i], stage, page_id, first_head, page_slot, True, False, 1,
                    tile_cfg,
                )  # fmt: skip
            if tile_cfg.V.SCALE_BLOCKS > 0:
                start_scale_word_copies(
                    tensor_maps.V_SCALES, smem_kv.v_scales[i], stage, page_id, first_head, page_slot, True, True, 1,
                    tile_cfg,
                )  # fmt: skip
        if has_cp_async_copies(tile_cfg):
            async_copy.mbarrier_arrive(full_barrier, increment_count=False)
        prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, cta_range.block_end, cfg, tile_cfg)


# ---- consumer warps ----


@gluon.jit
def consumer(
    tensors, scales, strides, smem_kv, smem_column_scales, smem_q, full_barriers, empty_barriers, cta_range,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes the n_blocks of the CTA range for HEADS_PER_CTA heads."""
    SEQ_LENS, CU_SEQLENS_Q, MASK = tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, tensors.MASK
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    first_head = cta_range.head_group * tile_cfg.HEADS_PER_CTA
    heads = kv_heads_of_cta(
        first_head,
        gl.SliceLayout(1, gl.SliceLayout(1, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD))),
        tile_cfg,
    )
    heads = heads // tile_cfg.HEAD_DIM_PARTS
    head_score_scales = scales.score_scale * load_device_or_host_scale_per_head(
        scales.k_scale, scales.K_SCALE, heads, cfg.HAS_K_SCALE, cfg.K_SCALE_STRIDE
    )
    v_out_scale = (
        load_device_or_host_scale_per_head(scales.v_scale, scales.V_SCALE, heads, cfg.HAS_V_SCALE, cfg.V_SCALE_STRIDE)
        * scales.out_scale
    )
    request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, block < block_end, cfg)
    iter = 0
    while block < block_end:
        # Next work tile.
        i_request, n_block_base, request = advance_to_request_of_block(
            SEQ_LENS, CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
        )
        work_tile = make_work_tile_at_block(block, block_end, i_request, n_block_base, request)
        row_begin = work_tile.m_block * cfg.BLOCK_M
        # Splits of this work tile, if this launch combines them.
        if tile_cfg.FUSED_COMBINE_ROWS > 0 and not tile_cfg.UNSPLIT:
            first_range = (n_block_base + work_tile.m_block * work_tile.num_n_blocks) // cta_range.blocks_per_range
            split_tile = TileSplits(
                cta_range.i_range, first_range, num_splits_of_tile(work_tile, cta_range.blocks_per_range, first_range)
            )
            maybe_uninit_counter = load_first_level_counter_for_init_check(
                tensors.SPLIT_WORKSPACE, split_tile, cfg, tile_cfg
            )
        # Query: 32 rows stay in shared memory.
        q, q_scales = load_query_operands_and_q_scales(
            tensors, strides, smem_column_scales, work_tile, first_head, cfg, tile_cfg
        )
        if cfg.BLOCK_M > 16:
            thread_barrier()
            for i in gl.static_range(gl.constexpr(tile_cfg.K.PACK)):
                store_query_fragment(smem_q, i, q.operands[i], cfg, tile_cfg)
            thread_barrier()
            q = QueryOperands(smem_q, q.row_sums)
        score_scales = head_score_scales[:, None] * q_scales
        first_cut_key = load_first_cut_key(SEQ_LENS, i_request, work_tile.num_keys, cfg)
        mask_args = MaskArgs(
            work_tile.num_keys, work_tile.seqlen_q, row_begin, work_tile.q_begin, MASK, strides.mask_t, first_cut_key
        )
        unmasked_begin, unmasked_end = unmasked_n_block_range(request, first_cut_key, cfg)
        step: gl.constexpr = mainloop_step_lazy_rescale if cfg.BLOCK_M > 16 else mainloop_step
        state = init_unreduced_softmax_state(cfg, tile_cfg)
        for n_block in range(
            request.first_n_block + work_tile.n_block_begin, request.first_n_block + work_tile.n_block_end
        ):
            # Wait for the stage; QK, mask, online softmax, PV; release the stage.
            stage = iter % tile_cfg.STAGES
            mbarrier.wait(full_barriers.index(stage), (iter // tile_cfg.STAGES) & 1)
            if (n_block >= unmasked_begin) & (n_block < unmasked_end):
                state = step(
                    state, smem_kv, stage, q, score_scales, scales.softcap, n_block, mask_args, False, cfg, tile_cfg
                )
            else:
                state = step(
                    state, smem_kv, stage, q, score_scales, scales.softcap, n_block, mask_args, True, cfg, tile_cfg
                )
            thread_barrier()
            mbarrier.arrive(empty_barriers.index(stage))
            iter += 1
        # Epilogue: output of an unsplit work tile, else a partial result.
        state = sum_over_lanes_of_equal_row_max(equalize_int4_acc_scales(state, tile_cfg), cfg, tile_cfg)
        if tile_cfg.V.ROTATION.ENABLED:
            state = unrotate_and_scale_acc(state, smem_column_scales, cfg, tile_cfg)
        if (tile_cfg.FUSED_COMBINE_ROWS == 0) & (work_tile.n_block_begin == 0):
            num_splits = num_splits_of_tile(work_tile, cta_range.blocks_per_range, cta_range.i_range)
            p_metadata = work_tile_metadata_ptr(tensors.SPLIT_METADATA, work_tile, cta_range.head_group, tile_cfg)
            store_split_metadata(p_metadata, num_splits, cta_range.i_range)
        if tile_cfg.UNSPLIT or work_tile.n_block_end - work_tile.n_block_begin == work_tile.num_n_blocks:
            store_unsplit_output_and_lse(tensors, strides, state, v_out_scale, first_head, work_tile, cfg, tile_cfg)
        else:
            partial_slot = 2 * (cta_range.i_range * cfg.HEADS + first_head) + gl.where(
                work_tile.n_block_begin == 0, 1, 0
            )
            store_partial_acc_max_and_sum(
                tensors.SPLIT_WORKSPACE, partial_slot, state, first_head, work_tile.seqlen_q * cfg.GROUP - row_begin,
                cfg, tile_cfg,
            )  # fmt: skip
            if tile_cfg.FUSED_COMBINE_ROWS > 0:
                arrive_and_combine_in_levels_if_last(
                    tensors, scales, strides, split_tile, maybe_uninit_counter, first_head, work_tile, cfg,
                    tile_cfg,
                )  # fmt: skip
        block += work_tile.n_block_end - work_tile.n_block_begin


# ---- kernel ----


@gluon.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_producer_warp_kernel(
    Q, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, K_SIGNS,
    V_SIGNS, K_CHANNEL_SCALES, V_CHANNEL_SCALES,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, stride_q_t, stride_q_h, stride_table_b, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes one CTA range for HEADS_PER_CTA heads. See the module's docstring, and `kernel`'s."""
    i_cta = gl.program_id(0)
    i_range, num_ranges = i_cta // tile_cfg.HEAD_GROUPS, gl.num_programs(0) // tile_cfg.HEAD_GROUPS
    head_group = i_cta % tile_cfg.HEAD_GROUPS
    SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, num_ranges * cfg.HEADS, cfg)
    # Shared memory.
    smem_kv = allocate_smem_kv(tile_cfg)
    smem_column_scales = allocate_smem_k_and_v_column_scales(smem_kv.k[0], cfg, tile_cfg)
    if cfg.BLOCK_M > 16:  # for the PACK query operands: the elements of a lane are contiguous
        SHAPE: gl.constexpr = [tile_cfg.K.PACK, tile_cfg.HEADS_PER_CTA * 32, cfg.PACKED_K * cfg.BLOCK_M // 32]
        smem_q = gl.allocate_shared_memory(gl.float16, SHAPE, gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))
    else:
        smem_q = smem_kv.k[0]
    # Where cp.async copies, each lane of the producer arrives once its copies have.
    FULL_COUNT: gl.constexpr = 33 if has_cp_async_copies(tile_cfg) else 1
    full_barriers, empty_barriers = allocate_mbarrier_groups(tile_cfg.STAGES, (FULL_COUNT, 1))
    fence_async_shared()
    # Wait for the previous kernel; then padding, and this CTA's range.
    pdl_wait()
    if tile_cfg.FUSED_COMBINE_ROWS > 0:
        pdl_launch_dependents()
    if cfg.VARLEN_Q:
        store_empty_output_of_padding_rows(
            OUT, LSE, gl.load(CU_SEQLENS_Q + B).to(gl.int32), T, i_cta, gl.num_programs(0), stride_out_t, stride_out_h,
            stride_lse_t, stride_lse_h, cfg, tile_cfg.HEAD_DIM_PARTS,
        )  # fmt: skip
    column_scales = load_k_and_v_column_scales(
        (K_SIGNS, V_SIGNS), (K_CHANNEL_SCALES, V_CHANNEL_SCALES), head_group * tile_cfg.HEADS_PER_CTA, cfg, tile_cfg
    )
    if tile_cfg.UNSPLIT:
        cta_range = assign_unsplit_request(SEQ_LENS, CU_SEQLENS_Q, i_range, head_group, cfg)
    else:
        cta_range = assign_rounded_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, head_group, cfg)
    store_smem_k_and_v_column_scales(smem_column_scales, column_scales)
    tensors = AttentionTensors(Q, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, SPLIT_METADATA)
    scales = CallScales(
        load_device_or_host_scale(softmax_scale, SOFTMAX_SCALE, cfg.HAS_SOFTMAX_SCALE) * LOG2E, k_scale, K_SCALE,
        v_scale, V_SCALE, load_device_or_host_scale(out_scale, OUT_SCALE, cfg.HAS_OUT_SCALE), softcap,
    )  # fmt: skip
    strides = Strides(stride_q_t, stride_q_h, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)
    tensor_maps = TensorMaps(K, V, K_SCALES, V_SCALES)
    page_lookup = PageLookup(PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, stride_table_b)
    # Warp roles: consumers, producer.
    thread_barrier()  # the partitions' arguments may overlap the scratch of the reductions above
    gl.warp_specialize(
        [
            (
                consumer,
                (
                    tensors, scales, strides, smem_kv, smem_column_scales, smem_q, full_barriers, empty_barriers,
                    cta_range, cfg, tile_cfg,
                ),
            ),
            (
                producer,
                (
                    tensor_maps, page_lookup, smem_kv, full_barriers, empty_barriers,
                    head_group * tile_cfg.HEADS_PER_CTA, cta_range, cfg, tile_cfg,
                ),
            ),
        ],
        [1],
        [producer_registers(tile_cfg)],
    )  # fmt: skip
    if tile_cfg.FUSED_COMBINE_ROWS == 0:
        pdl_launch_dependents()
