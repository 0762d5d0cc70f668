"""Split pass of paged decode on Hopper. `fused_combine` combines the splits, or `combine` in a second launch.

A CTA has HEADS_PER_CTA × WARPS_PER_HEAD warps for HEADS_PER_CTA KV heads and processes one CTA range of n_blocks
(`cta_range`). Tensor copies fill a ring of stages (`parts/pipeline`, `producer`), all heads of an n_block at once,
stored scales included; a small query is prefetched with the first n_block of its work tile (`query`). Warps synchronize
only before a stage is refilled: the MMAs are mma.sync, whose operands each warp holds itself (`mainloop`,
`mainloop_lazy_rescale`, `layouts`). With LARGE_M a CTA has one head, whose rows share the dequantized tiles
(`shared_tiles`).

Mask: `mainloop.compute_scores_of_mma_tile`. Free stage: `sync_before_refill`. Rescale: `mainloop_step` or
`mainloop_step_lazy_rescale`. Combine: `fused_combine` or `combine`. With LARGE_M: see `shared_tiles`.

SPLIT_WORKSPACE: two slots per CTA range and head, for the split work tile it begins with (even) and the one it ends
with (odd). SPLIT_METADATA: the number of splits of each work tile and its first CTA range.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.pipeline import allocate_full_barriers, pdl_launch_dependents, pdl_wait, sync_before_refill, wait_copies
from ..parts.tile_scheduler import (
    LOG2E,
    advance_to_request,
    cast_output,
    count_splits,
    load_request_shape,
    load_scale,
    split_metadata_ptr,
    work_tile_at,
    zero_padding_rows,
)
from . import shared_tiles as large_m
from .cta_range import assign_equal_cta_range, finalize_softmax, load_scale_per_head
from .epilogue import store_output_of_head, store_partial_of_head
from .fused_combine import fused_combine, read_split_counter
from .layouts import column_offset_of_heads, mma_layout
from .mainloop import init_softmax_state, mainloop_step
from .mainloop_lazy_rescale import init_lazy_softmax_state, mainloop_step_lazy_rescale, reduce_softmax_state
from .mask import unmasked_range
from .params import AttentionTensors, CallScales, MaskArgs, PageLookup, SplitWorkTile, Strides, TensorMaps
from .producer import (
    advance_prefetch_position,
    allocate_kv_stages,
    copy_kv_block,
    init_prefetch_position,
    num_scale_copies,
)
from .query import allocate_query_stages, load_prefetched_query, load_query, prefetch_query
from .rotation import allocate_rotation_smem, load_rotation_scales_of_heads, store_rotation_scales, unrotate_acc


@gluon.jit
def kv_heads_of_cta(first_head, LAYOUT: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the KV heads of the CTA: [HEADS_PER_CTA]."""
    return first_head + gl.arange(0, tile_cfg.HEADS_PER_CTA, LAYOUT)


@gluon.jit
def store_partial(
    SPLIT_WORKSPACE, partial_slot, state, first_head, num_rows_left, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Stores the partial results of split work tiles: slot + 2 h, [BLOCK_M, PARTIAL_COLUMNS] fp32, whose last two
    columns are row_max and row_sum."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    HN: gl.constexpr = gl.SliceLayout(1, MMA)
    o_r = gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, HN))
    partial_slots = partial_slot + 2 * gl.arange(0, tile_cfg.HEADS_PER_CTA, gl.SliceLayout(1, HN)).to(gl.int64)
    p_row = SPLIT_WORKSPACE + (partial_slots[:, None] * cfg.BLOCK_M + o_r[None, :]) * cfg.PARTIAL_COLUMNS
    m_row = (o_r < num_rows_left)[None, :] & (partial_slots >= 0)[:, None]
    o_d = output_columns(first_head, cfg, tile_cfg)
    if tile_cfg.V.PADDED_HEADS > 1:
        o_d = o_d & (cfg.BLOCK_DV - 1)  # columns of neighbouring heads go behind the head's own
    for j in gl.static_range(gl.constexpr(cfg.PACK)):
        gl.store(p_row[:, None, :] + j * cfg.BLOCK_DV + o_d, state.acc_o[j], mask=m_row[:, None, :])
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, state.row_max, mask=m_row)
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, state.row_sum, mask=m_row)


@gluon.jit
def output_columns(first_head, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the packed columns of `out` that the accumulators hold: [HEADS_PER_CTA or 1, PACKED_V, 1]."""
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    PACKED_LAYOUT: gl.constexpr = gl.SliceLayout(2, MMA)
    o_d = gl.arange(0, cfg.PACKED_V, gl.SliceLayout(0, PACKED_LAYOUT))[None, :, None]
    if tile_cfg.V.PADDED_HEADS > 1:
        o_d = (
            o_d
            - column_offset_of_heads(
                kv_heads_of_cta(first_head, gl.SliceLayout(1, gl.SliceLayout(2, MMA)), tile_cfg), True, tile_cfg
            )[:, None, None]
        )
    return o_d


@gluon.jit
def output_mask(m_row, o_d, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the mask of existing rows and columns: a row of `out` may be shorter than one in shared memory."""
    mask = m_row[:, None, :]
    if cfg.DV < cfg.PACK * cfg.PACKED_V:
        mask = mask & (o_d < cfg.DV // cfg.PACK)
    if tile_cfg.V.PADDED_HEADS > 1:
        mask = mask & (o_d >= 0)
    return mask


@gluon.jit
def store_output(
    tensors, strides, state, v_out_scale, first_head, work_tile, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Stores finished rows to `out`, and their LSE."""
    OUT, LSE = tensors.OUT, tensors.LSE
    MMA: gl.constexpr = mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD)
    HN: gl.constexpr = gl.SliceLayout(1, MMA)
    o_r = work_tile.m_block * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(0, HN))
    kv_heads = kv_heads_of_cta(first_head, gl.SliceLayout(1, HN), tile_cfg)
    q_heads = (kv_heads[:, None] * cfg.GROUP + (o_r % cfg.GROUP)[None, :]).to(gl.int64)
    tokens = (work_tile.q_begin + o_r // cfg.GROUP).to(gl.int64)[None, :]
    m_row = (o_r < work_tile.num_q_rows * cfg.GROUP)[None, :] & (kv_heads >= 0)[:, None]
    acc_scale, lse = finalize_softmax(
        state.row_max, state.row_sum, v_out_scale[:, None] * cfg.V_RESIDUAL_SCALE, tensors.SINKS, q_heads, m_row, cfg
    )
    o_d = output_columns(first_head, cfg, tile_cfg)
    p_out = (OUT + tokens * strides.out_t + q_heads * strides.out_h)[:, None, :] + cfg.PACK * o_d
    for j in gl.static_range(gl.constexpr(cfg.PACK)):
        gl.store(
            p_out + j,
            cast_output(state.acc_o[j] * acc_scale[:, None, :], OUT, cfg),
            mask=output_mask(m_row, o_d, cfg, tile_cfg),
        )
    if cfg.HAS_LSE:
        gl.store(LSE + tokens * strides.lse_t + q_heads * strides.lse_h, lse, mask=m_row)


@gluon.jit
def work_tile_metadata_ptr(SPLIT_METADATA, work_tile, head_group, tile_cfg: gl.constexpr):
    """Returns the pointer to a work tile's entry in SPLIT_METADATA."""
    return (
        SPLIT_METADATA
        + ((work_tile.i_request * tile_cfg.MAX_M_BLOCKS + work_tile.m_block) * tile_cfg.HEAD_GROUPS + head_group) * 2
    )


@gluon.jit
def store_split_metadata(p_metadata, num_splits, i_range):
    """Stores, for the combine, the number of splits of a work tile that begins in CTA range i_range."""
    gl.store(p_metadata, num_splits)
    gl.store(p_metadata + 1, i_range)


@gluon.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_kernel(
    Q, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, K_SIGNS,
    V_SIGNS, K_CHANNEL_SCALES, V_CHANNEL_SCALES,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, stride_q_t, stride_q_h, stride_table_b, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes one CTA range for HEADS_PER_CTA heads. See the module's docstring."""
    i_cta = gl.program_id(0)
    i_range, num_ranges = i_cta // tile_cfg.HEAD_GROUPS, gl.num_programs(0) // tile_cfg.HEAD_GROUPS
    first_head = i_cta % tile_cfg.HEAD_GROUPS * tile_cfg.HEADS_PER_CTA
    tensors = AttentionTensors(
        Q, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE,
        split_metadata_ptr(SPLIT_WORKSPACE, num_ranges * cfg.HEADS, cfg),
    )  # fmt: skip
    strides = Strides(stride_q_t, stride_q_h, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)
    page_lookup, tensor_maps = (
        PageLookup(PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, stride_table_b),
        TensorMaps(K, V, K_SCALES, V_SCALES),
    )
    NUM_BARRIER_GROUPS: gl.constexpr = 2 + num_scale_copies(tile_cfg)
    full_barriers = allocate_full_barriers(NUM_BARRIER_GROUPS, tile_cfg.STAGES)
    kv_stages = allocate_kv_stages(tile_cfg)
    rotation_smem = allocate_rotation_smem(kv_stages.k[0], cfg, tile_cfg)
    if tile_cfg.NUM_QUERY_STAGES > 0:
        q_stages = allocate_query_stages(Q, cfg, tile_cfg)
    if tile_cfg.LARGE_M:
        smem_operands = large_m.allocate_smem_operands(cfg, tile_cfg)
    pdl_wait()
    if tile_cfg.FUSED_COMBINE_ROWS > 0:
        pdl_launch_dependents()
    if cfg.VARLEN_Q:
        zero_padding_rows(
            OUT, LSE, gl.load(CU_SEQLENS_Q + B).to(gl.int32), T, i_cta, gl.num_programs(0), stride_out_t, stride_out_h,
            stride_lse_t, stride_lse_h, cfg,
        )  # fmt: skip
    rotation_scales = load_rotation_scales_of_heads(
        (K_SIGNS, V_SIGNS), (K_CHANNEL_SCALES, V_CHANNEL_SCALES), first_head, cfg, tile_cfg
    )
    cta_range = assign_equal_cta_range(
        SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, i_cta % tile_cfg.HEAD_GROUPS, cfg
    )
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    store_rotation_scales(rotation_smem, rotation_scales)
    if tile_cfg.K.ROTATION.ENABLED or tile_cfg.V.ROTATION.ENABLED:
        thread_barrier()
    if block < block_end:
        # Prologue: fill the ring.
        prefetch_pos = init_prefetch_position(page_lookup, cta_range, cfg, tile_cfg)
        num_prefetched_q, num_used_q = 0, 0
        for i_prefetch in gl.static_range(gl.constexpr(tile_cfg.STAGES if tile_cfg.LARGE_M else tile_cfg.STAGES - 1)):
            if tile_cfg.NUM_QUERY_STAGES > 0:
                num_prefetched_q = prefetch_query(
                    tensors, strides, q_stages, num_prefetched_q, prefetch_pos, block_end, first_head, i_prefetch == 0,
                    cfg, tile_cfg,
                )  # fmt: skip
            copy_kv_block(
                prefetch_pos, i_prefetch, full_barriers, tensor_maps, kv_stages, first_head, block_end, cfg, tile_cfg
            )
            prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
        if tile_cfg.LARGE_M:
            heads = first_head
        else:
            heads = kv_heads_of_cta(
                first_head,
                gl.SliceLayout(1, gl.SliceLayout(1, mma_layout(tile_cfg.HEADS_PER_CTA, tile_cfg.WARPS_PER_HEAD))),
                tile_cfg,
            )
        score_scale = load_scale(softmax_scale, SOFTMAX_SCALE, cfg.HAS_SOFTMAX_SCALE) * LOG2E
        scales = CallScales(
            score_scale, k_scale, K_SCALE, v_scale, V_SCALE, load_scale(out_scale, OUT_SCALE, cfg.HAS_OUT_SCALE),
            softcap
        )  # fmt: skip
        head_score_scales = scales.score_scale * load_scale_per_head(
            k_scale, K_SCALE, heads, cfg.HAS_K_SCALE, cfg.K_SCALE_STRIDE
        )
        v_out_scale = (
            load_scale_per_head(v_scale, V_SCALE, heads, cfg.HAS_V_SCALE, cfg.V_SCALE_STRIDE) * scales.out_scale
        )
        request = load_request_shape(SEQ_LENS, CU_SEQLENS_Q, i_request, True, cfg)
        iter = 0
        while block < block_end:
            # Next work tile.
            i_request, n_block_base, request = advance_to_request(
                SEQ_LENS, CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
            )
            work_tile = work_tile_at(block, block_end, i_request, n_block_base, request)
            row_begin = work_tile.m_block * cfg.BLOCK_M
            mask_args = MaskArgs(
                work_tile.num_keys, work_tile.num_q_rows, row_begin, work_tile.q_begin, MASK, stride_mask_t
            )
            unmasked_begin, unmasked_end = unmasked_range(request, cfg)
            if tile_cfg.FUSED_COMBINE_ROWS > 0:
                first_range = (n_block_base + work_tile.m_block * work_tile.num_n_blocks) // cta_range.blocks_per_range
                split_tile = SplitWorkTile(
                    i_range, first_range, count_splits(work_tile, cta_range.blocks_per_range, first_range)
                )
                counter_value = read_split_counter(SPLIT_WORKSPACE, split_tile, cfg, tile_cfg)
            if tile_cfg.LARGE_M:
                score_scales = head_score_scales * large_m.store_query_to_smem(
                    tensors, strides, rotation_smem, work_tile, first_head, smem_operands.q, cfg, tile_cfg
                )
                state, prefetch_pos, iter = large_m.mainloop(
                    score_scales, softcap, prefetch_pos, iter, full_barriers, kv_stages, tensor_maps, page_lookup,
                    smem_operands, i_request, first_head,
                    request.first_n_block + work_tile.n_block_begin, request.first_n_block + work_tile.n_block_end,
                    unmasked_begin, unmasked_end, mask_args, block_end, cfg, tile_cfg,
                )  # fmt: skip
            else:
                if tile_cfg.NUM_QUERY_STAGES > 0:
                    q, q_scales = load_prefetched_query(q_stages, rotation_smem, num_used_q, cfg, tile_cfg)
                    num_used_q += 1
                else:
                    q, q_scales = load_query(tensors, strides, rotation_smem, work_tile, first_head, cfg, tile_cfg)
                score_scales = head_score_scales[:, None] * q_scales
                step: gl.constexpr = mainloop_step_lazy_rescale if cfg.BLOCK_M > 16 else mainloop_step
                lane_state = (
                    init_lazy_softmax_state(cfg, tile_cfg) if cfg.BLOCK_M > 16 else init_softmax_state(cfg, tile_cfg)
                )
                for n_block in range(
                    request.first_n_block + work_tile.n_block_begin, request.first_n_block + work_tile.n_block_end
                ):
                    # Wait for the stage, refill the previous one.
                    wait_copies(full_barriers, iter, NUM_BARRIER_GROUPS, tile_cfg.STAGES)
                    sync_before_refill()
                    if tile_cfg.NUM_QUERY_STAGES > 0:
                        num_prefetched_q = prefetch_query(
                            tensors, strides, q_stages, num_prefetched_q, prefetch_pos, block_end, first_head, False,
                            cfg, tile_cfg,
                        )  # fmt: skip
                    copy_kv_block(
                        prefetch_pos, iter + tile_cfg.STAGES - 1, full_barriers, tensor_maps, kv_stages, first_head,
                        block_end, cfg, tile_cfg,
                    )  # fmt: skip
                    prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
                    # QK, mask, online softmax, PV.
                    if (n_block >= unmasked_begin) & (n_block < unmasked_end):
                        lane_state = step(
                            lane_state, kv_stages, iter % tile_cfg.STAGES, q, score_scales, softcap, n_block, mask_args,
                            False, cfg, tile_cfg,
                        )  # fmt: skip
                    else:
                        lane_state = step(
                            lane_state, kv_stages, iter % tile_cfg.STAGES, q, score_scales, softcap, n_block, mask_args,
                            True, cfg, tile_cfg,
                        )  # fmt: skip
                    iter += 1
                state = reduce_softmax_state(lane_state, cfg, tile_cfg)
            # Epilogue: output of an unsplit work tile, else a partial result.
            if tile_cfg.V.ROTATION.ENABLED:
                state = unrotate_acc(state, rotation_smem, cfg, tile_cfg)
            is_unsplit = work_tile.n_block_end - work_tile.n_block_begin == work_tile.num_n_blocks
            if (tile_cfg.FUSED_COMBINE_ROWS == 0) & (work_tile.n_block_begin == 0):
                p_metadata = work_tile_metadata_ptr(tensors.SPLIT_METADATA, work_tile, cta_range.head_group, tile_cfg)
                store_split_metadata(p_metadata, count_splits(work_tile, cta_range.blocks_per_range, i_range), i_range)
            partial_slot = 2 * (i_range * cfg.HEADS + first_head) + gl.where(work_tile.n_block_begin == 0, 1, 0)
            if tile_cfg.LARGE_M:
                ROW: gl.constexpr = state.row_max.type.layout
                if is_unsplit:
                    o_r = row_begin + gl.arange(0, cfg.BLOCK_M, ROW)
                    store_output_of_head(tensors, strides, state, v_out_scale, first_head, work_tile, o_r, cfg)
                else:
                    o_r = gl.arange(0, cfg.BLOCK_M, ROW)
                    store_partial_of_head(
                        SPLIT_WORKSPACE, partial_slot, state, o_r, work_tile.num_q_rows * cfg.GROUP - row_begin, cfg
                    )
            elif is_unsplit:
                store_output(tensors, strides, state, v_out_scale, first_head, work_tile, cfg, tile_cfg)
            else:
                store_partial(
                    SPLIT_WORKSPACE, partial_slot, state, first_head, work_tile.num_q_rows * cfg.GROUP - row_begin, cfg,
                    tile_cfg,
                )  # fmt: skip
                if tile_cfg.FUSED_COMBINE_ROWS > 0:
                    fused_combine(
                        tensors, scales, strides, split_tile, counter_value, first_head, work_tile, cfg, tile_cfg
                    )
            block += work_tile.n_block_end - work_tile.n_block_begin
    if tile_cfg.FUSED_COMBINE_ROWS == 0:
        pdl_launch_dependents()
