"""Decode with many query rows of a KV head: a converter warpgroup dequantizes, consumer warpgroups run the MMAs.

A CTA has one KV head. The converter warpgroup starts the copies of codes, in a ring of STAGES n_blocks, and converts
them to fp16 in a ring of CONVERTED_STAGES, once for all rows. Each consumer warpgroup processes 64 query rows (M) over
all keys (N) with wgmma, and waits only where the converted ring is empty. Item 2 k of that ring is K of the k-th
n_block, item 2 k + 1 its V. Columns in shared memory keep the order of the conversion
(`head_column_of_converted_column`).

Mask: `lazy_softmax_step_with_p_sums`. Free stage: `producer_acquire` in `producer_and_converter`. Rescale: lazy,
`rescale_acc_unless_all_ones`. Combine: `combine_kernel`, in a second launch.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import reinterpret, thread_barrier
from ..parts.combine import num_splits_of_tile, split_metadata_ptr
from ..parts.dequant import (
    BLOCK_SCALE_PTX,
    biased_exponent_and_inv_scale_of_rows,
    convert_k_codes_to_16bit_operands,
    dequant_e2m1_to_4_operands,
    exponent_to_float,
    head_column_of_converted_column,
    int4_rows_minus_zero_points_to_operands,
    int4_zero_points,
    load_device_or_host_scale,
    load_device_or_host_scale_per_head,
    log2_and_reciprocal,
)
from ..parts.epilogue import store_empty_output_of_padding_rows
from ..parts.hadamard import (
    allocate_smem_k_and_v_column_scales,
    load_k_and_v_column_scales,
    scale_and_rotate_query,
    store_smem_k_and_v_column_scales,
    unrotate_and_scale_acc,
)
from ..parts.mask import MaskArgs, is_visible_in_block, keys_visible_to_any_row_mask, unmasked_n_block_range
from ..parts.online_softmax import (
    LAZY_ROW_MAX_PTX,
    LOG2E,
    SoftmaxState,
    apply_softcap_to_log2_scores,
    pack_p_16bit,
    rescale_unless_all_ones_ptx_and_constraints,
    row_sums_by_lane,
    split_columns,
    unpack_p_16bit,
)
from ..parts.pipeline import (
    allocate_full_barriers,
    allocate_mbarriers,
    consumer_release,
    consumer_wait,
    pdl_launch_dependents,
    pdl_wait,
    producer_acquire,
    stage_and_phase,
    sync_and_arrive,
)
from ..parts.tile_scheduler import (
    advance_to_request_of_block,
    assign_equal_cta_range,
    load_request_lengths_and_block_counts,
    make_work_tile_at_block,
)
from .kernel import AttentionTensors, CallScales, Strides, store_split_metadata, work_tile_metadata_ptr
from .producer import (
    PageLookup,
    TensorMaps,
    advance_prefetch_position,
    allocate_smem_kv,
    init_prefetch_position,
    query_row_ptrs,
    start_kv_block_copies_at_position,
)
from .shared_tiles import store_partial_acc_max_and_sum_of_head, store_unsplit_output_and_lse_of_head

SCALE_STAGES = gl.constexpr(4)  # n_blocks of stored scales in shared memory
# Per n_block: K scales; log2 and reciprocals of V scales; zero points of V and K.
NUM_SCALE_VECTORS = gl.constexpr(4)
ROWS_PER_WARPGROUP = gl.constexpr(64)
LANES_PER_ROW = gl.constexpr(4)  # that share a row of an accumulator
MIN_SCALE = gl.constexpr(1e-30)  # of scores; not 0, since −inf × 0 is NaN


class ConvertedStages(NamedTuple):
    """fp16 stages that the converter warpgroup fills, and their barriers."""

    kv: gl.shared_memory_descriptor  # fp16: K and V alternate
    token_scales: gl.shared_memory_descriptor  # vectors of stored scales of SCALE_STAGES n_blocks
    full_barriers: gl.shared_memory_descriptor  # the item is in its stage
    empty_barriers: gl.shared_memory_descriptor  # the stage may be refilled


# ---- layouts ----


@gluon.constexpr_function
def score_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.BLOCK_N, 16])


@gluon.constexpr_function
def acc_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.PACK * cfg.PACKED_V, 16])


@gluon.constexpr_function
def packed_per_lane(CODE_WORDS_PER_ROW, tile_cfg):
    """Returns the consecutive packed columns of a lane."""
    return max(4, min(8, CODE_WORDS_PER_ROW // (4 if tile_cfg.KEYS_PER_BUFFER >= 32 else 8)))


@gluon.constexpr_function
def packed_codes_layout(CODE_WORDS_PER_ROW, tile_cfg):
    """Returns the layout of codes [keys, CODE_WORDS_PER_ROW]: eight lanes hold the same columns of eight keys, in
    different banks."""
    NUM_WARPS_DOWN = min(4, tile_cfg.KEYS_PER_BUFFER // 8)
    return gl.BlockedLayout(
        [1, packed_per_lane(CODE_WORDS_PER_ROW, tile_cfg)], [8, 4], [NUM_WARPS_DOWN, 4 // NUM_WARPS_DOWN], [0, 1]
    )


@gluon.constexpr_function
def block_scale_broadcast_layout(CODE_WORDS_PER_ROW, tile_cfg):
    """Returns the same layout of 4-bit codes as [keys, blocks, 4 packed]."""
    NUM_WARPS_DOWN = min(4, tile_cfg.KEYS_PER_BUFFER // 8)
    return gl.BlockedLayout(
        [1, packed_per_lane(CODE_WORDS_PER_ROW, tile_cfg) // 4, 4], [8, 4, 1],
        [NUM_WARPS_DOWN, 4 // NUM_WARPS_DOWN, 1], [2, 0, 1],
    )  # fmt: skip


# ---- converter: stored scales ----


@gluon.jit
def load_page_id(page_table, n_block, enabled, cfg: gl.constexpr):
    """Loads the page of an n_block that lies in one page."""
    return gl.load(page_table + n_block * cfg.BLOCK_N // cfg.PAGE, mask=enabled, other=0).to(gl.int64)


@gluon.jit
def load_token_or_block_scales_of_keys(
    SCALES, page_table, page_id_if_one_page, kv_head, first_key, o_n, m_key, IS_V: gl.constexpr, LAYOUT: gl.constexpr,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Loads stored scales of K or V: fp32, or a byte for each block; 1, or 0, for invalid keys."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    if cfg.INT64_OFFSETS:
        first_key, kv_head = first_key.to(gl.int64), kv_head.to(gl.int64)
    if tile_cfg.NUM_BUFFERS == 1:
        p_scale = SCALES + (
            page_id_if_one_page * SIDE.SCALE_STRIDES[0]
            + first_key % cfg.PAGE * SIDE.SCALE_STRIDES[1]
            + kv_head * SIDE.SCALE_STRIDES[2]
        )
        o_scales = o_n * SIDE.SCALE_STRIDES[1]
    else:
        p_scale, first_key = SCALES, first_key + o_n
        page_id = gl.load(page_table + first_key // cfg.PAGE, mask=m_key, other=0).to(gl.int64)
        o_scales = (
            page_id * SIDE.SCALE_STRIDES[0]
            + first_key % cfg.PAGE * SIDE.SCALE_STRIDES[1]
            + kv_head * SIDE.SCALE_STRIDES[2]
        )
    if cfg.BLOCK_SCALES:
        o_i = gl.arange(0, cfg.PACKED_K // 4, gl.SliceLayout(0, LAYOUT))
        p_byte = p_scale.to(gl.pointer_type(gl.uint8), bitcast=True) + o_scales[:, None] + o_i[None, :]
        return gl.load(p_byte, mask=m_key[:, None], other=0)
    else:
        return gl.load(p_scale + o_scales, mask=m_key, other=1.0)


@gluon.jit
def load_k_and_v_token_or_block_scales(
    tensor_maps, page_table, page_id_if_one_page, kv_head, n_block, num_keys, seqlen_q, enabled, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Loads the stored scales of an n_block's K and V to registers: per buffer if they are block scales, else for all
    keys."""
    K_SCALES, V_SCALES = tensor_maps.K_SCALES, tensor_maps.V_SCALES
    if cfg.BLOCK_SCALES:
        L: gl.constexpr = gl.SliceLayout(2, block_scale_broadcast_layout(cfg.PACKED_K, tile_cfg))
        k, v = (), ()
        for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
            first_key, o_n = (
                n_block * cfg.BLOCK_N + j * tile_cfg.KEYS_PER_BUFFER,
                gl.arange(0, tile_cfg.KEYS_PER_BUFFER, gl.SliceLayout(1, L)),
            )
            m_key = enabled & keys_visible_to_any_row_mask(first_key + o_n, num_keys, seqlen_q, cfg)
            k = k + (
                load_token_or_block_scales_of_keys(
                    K_SCALES, page_table, page_id_if_one_page, kv_head, first_key, o_n, m_key, False, L, cfg, tile_cfg
                ),
            )
            v = v + (
                load_token_or_block_scales_of_keys(
                    V_SCALES, page_table, page_id_if_one_page, kv_head, first_key, o_n, m_key, True, L, cfg, tile_cfg
                ),
            )
        return k, v
    elif cfg.TOKEN_SCALES:
        first_key, o_n = n_block * cfg.BLOCK_N, gl.arange(0, cfg.BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))
        m_key = enabled & keys_visible_to_any_row_mask(first_key + o_n, num_keys, seqlen_q, cfg)
        k = load_token_or_block_scales_of_keys(
            K_SCALES, page_table, page_id_if_one_page, kv_head, first_key, o_n, m_key, False, None, cfg, tile_cfg
        )
        return k, load_token_or_block_scales_of_keys(
            V_SCALES, page_table, page_id_if_one_page, kv_head, first_key, o_n, m_key, True, None, cfg, tile_cfg
        )
    else:
        return n_block, n_block


@gluon.jit
def e4m3_scales_or_zero_points_from_smem(
    converted_stages, iter, k_and_v_scales_in_registers, IS_V: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Returns what `convert_block_to_fp16` needs beside codes: block scales as loaded, or zero points, per buffer
    [KEYS_PER_BUFFER]."""
    if cfg.CODE == "int4":
        L: gl.constexpr = gl.SliceLayout(1, packed_codes_layout(cfg.PACKED_K, tile_cfg))
        packed_zeros = converted_stages.token_scales.index(iter % SCALE_STAGES * NUM_SCALE_VECTORS + 3)
        zero_points = ()
        for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
            tile_zeros = (
                packed_zeros.slice(j * tile_cfg.KEYS_PER_BUFFER, tile_cfg.KEYS_PER_BUFFER)
                .load(L)
                .to(gl.int32, bitcast=True)
            )
            zero_points = zero_points + (((tile_zeros >> (4 if IS_V else 0)) & 15).to(gl.int16),)
        return zero_points
    else:
        return k_and_v_scales_in_registers[1 if IS_V else 0]


# ---- converter: dequant ----


@gluon.jit
def wait_and_load_packed_block(smem_codes, full_barriers, iter, enabled, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Waits for an iteration's codes and loads them: per buffer [KEYS_PER_BUFFER, PACKED_K]."""
    stage, phase = stage_and_phase(iter, tile_cfg.STAGES)
    mbarrier.wait(full_barriers.index(stage), phase, pred=enabled)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(tile_cfg.K.SMEM_LAYOUT.swizzle_byte_width, 16, 2)
    packed = ()
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        codes = reinterpret(
            smem_codes[j], gl.int16, [tile_cfg.STAGES, tile_cfg.KEYS_PER_BUFFER, cfg.PACKED_K], LAYOUT
        ).index(stage)
        packed = packed + (codes.load(packed_codes_layout(cfg.PACKED_K, tile_cfg)),)
    return packed


@gluon.jit
def convert_block_to_fp16(packed, e4m3_scales_or_zero_points, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns codes as fp16, times block scales or less zero points, if any: [keys, PACK × PACKED_K] a buffer."""
    CODE_WORDS_PER_ROW: gl.constexpr = cfg.PACKED_K
    out = ()
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        if cfg.PACK == 4:
            if cfg.BLOCK_SCALES:
                # Block scales [KEYS_PER_BUFFER, blocks] e4m3 to fp16, broadcast in the layout of the codes.
                scale_bytes = e4m3_scales_or_zero_points[j].to(gl.int16)
                block_scales = gl.inline_asm_elementwise(BLOCK_SCALE_PTX, "=h,h", [scale_bytes], gl.float16, True, 1)
                block_scales, _ = gl.broadcast(
                    block_scales[:, :, None],
                    gl.full([tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW // 4, 4], 0, gl.float16,
                            block_scale_broadcast_layout(CODE_WORDS_PER_ROW, tile_cfg)),
                )  # fmt: skip
                block_scales = gl.convert_layout(
                    block_scales.reshape([tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW]),
                    packed_codes_layout(CODE_WORDS_PER_ROW, tile_cfg),
                    assert_trivial=True,
                )
                halves = dequant_e2m1_to_4_operands(packed[j], block_scales, True)
            else:
                gl.static_assert(cfg.CODE == "int4", "a code that this kernel does not know")
                halves = int4_rows_minus_zero_points_to_operands(packed[j], e4m3_scales_or_zero_points[j])
            low0, low1, high0, high1 = halves
            x = gl.join(gl.join(low0, high0), gl.join(low1, high1))
            x = x.reshape([tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW // 2, 2, 2, 2]).permute([0, 1, 3, 4, 2])
        else:
            low, high = convert_k_codes_to_16bit_operands(packed[j], cfg)
            x = (
                gl.join(low, high)
                .reshape([tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW // 2, 2, 2])
                .permute([0, 1, 3, 2])
            )
        out = out + (x.reshape([tile_cfg.KEYS_PER_BUFFER, cfg.PACK * CODE_WORDS_PER_ROW]),)
    return out


@gluon.jit
def store_converted_block_to_smem(block, converted_kv, stage, tile_cfg: gl.constexpr):
    """Stores fp16 buffers of an n_block to a stage of the converted ring."""
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        converted_kv.index(stage).slice(j * tile_cfg.KEYS_PER_BUFFER, tile_cfg.KEYS_PER_BUFFER).store(block[j])


@gluon.jit
def arrive_converted_full(converted_stages, converted_iter, tile_cfg: gl.constexpr):
    """Signals that item converted_iter is in its stage."""
    fence_async_shared()
    stage, _ = stage_and_phase(converted_iter, tile_cfg.CONVERTED_STAGES)
    sync_and_arrive(converted_stages.full_barriers.index(stage))


# ---- converter warpgroup ----


@gluon.jit
def producer_and_converter(
    tensor_maps, page_lookup, smem_kv, full_barriers, converted_stages, cta_range, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Copies every n_block of the CTA range and converts it to fp16."""
    SEQ_LENS, CU_SEQLENS_Q, kv_head = page_lookup.SEQ_LENS, page_lookup.CU_SEQLENS_Q, cta_range.head_group
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    num_blocks, iter = block_end - block, 0
    prefetch_pos = init_prefetch_position(page_lookup, cta_range, cfg, tile_cfg)
    # Prologue: fill the ring of codes.
    for i_prefetch in gl.static_range(gl.constexpr(tile_cfg.STAGES)):
        start_kv_block_copies_at_position(
            prefetch_pos, i_prefetch, full_barriers, tensor_maps, smem_kv, kv_head, block_end, cfg, tile_cfg
        )
        prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
    request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, block < block_end, cfg)
    packed = wait_and_load_packed_block(smem_kv.k, full_barriers[0], iter, num_blocks > 0, cfg, tile_cfg)
    while block < block_end:
        # Next work tile.
        i_request, n_block_base, request = advance_to_request_of_block(
            SEQ_LENS, CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
        )
        work_tile = make_work_tile_at_block(block, block_end, i_request, n_block_base, request)
        num_keys, seqlen_q = request.num_keys, request.seqlen_q
        page_table = page_lookup.PAGE_TABLE + i_request.to(gl.int64) * page_lookup.stride_table_b
        n_block_end = request.first_n_block + work_tile.n_block_end
        last_block, n_block_begin = n_block_end - 1, request.first_n_block + work_tile.n_block_begin
        page_id = load_page_id(page_table, n_block_begin, num_keys > 0, cfg)
        next_scales = load_k_and_v_token_or_block_scales(
            tensor_maps, page_table, page_id, kv_head, n_block_begin, num_keys, seqlen_q, True, cfg, tile_cfg
        )
        page_id = load_page_id(page_table, n_block_begin + 1, n_block_begin < last_block, cfg)
        for n_block in range(n_block_begin, n_block_end):
            # Prefetch the next n_block's stored scales.
            scales = next_scales
            next_scales = load_k_and_v_token_or_block_scales(
                tensor_maps, page_table, page_id, kv_head, n_block + 1, num_keys, seqlen_q, n_block < last_block, cfg,
                tile_cfg,
            )  # fmt: skip
            page_id = load_page_id(page_table, n_block + 2, n_block + 1 < last_block, cfg)
            # Convert K into a free stage.
            if cfg.CODE == "int4":  # zero points to shared memory, for the threads that convert these rows
                packed_zeros = (int4_zero_points(scales[1]) << 4) | int4_zero_points(scales[0])
                converted_stages.token_scales.index(iter % SCALE_STAGES * NUM_SCALE_VECTORS + 3).store(
                    packed_zeros.to(gl.float32, bitcast=True)
                )
                thread_barrier()
            k = convert_block_to_fp16(
                packed,
                e4m3_scales_or_zero_points_from_smem(converted_stages, iter, scales, False, cfg, tile_cfg),
                cfg,
                tile_cfg,
            )
            stage = producer_acquire(converted_stages.empty_barriers, 2 * iter, tile_cfg.CONVERTED_STAGES)
            if cfg.TOKEN_SCALES:
                i_vector = iter % SCALE_STAGES * NUM_SCALE_VECTORS
                converted_stages.token_scales.index(i_vector).store(scales[0])
                log2_v_scales, inv_v_scales = log2_and_reciprocal(gl.maximum(scales[1], 1e-30))
                converted_stages.token_scales.index(i_vector + 1).store(log2_v_scales)
                converted_stages.token_scales.index(i_vector + 2).store(inv_v_scales)
            store_converted_block_to_smem(k, converted_stages.kv, stage, tile_cfg)
            packed = wait_and_load_packed_block(smem_kv.v, full_barriers[1], iter, True, cfg, tile_cfg)
            arrive_converted_full(converted_stages, 2 * iter, tile_cfg)
            # Convert V into a free stage.
            if not cfg.BLOCK_SCALES:  # those of invalid keys are 0  # noqa: SIM102 - known to the compiler
                if ((n_block + 1) * cfg.BLOCK_N > num_keys) | (cfg.WINDOW > 0):
                    # Zero V codes of keys that no row sees: P = 0 does not hide NaN.
                    valid_v = ()
                    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
                        o_n = (
                            n_block * cfg.BLOCK_N
                            + j * tile_cfg.KEYS_PER_BUFFER
                            + gl.arange(0, tile_cfg.KEYS_PER_BUFFER, gl.SliceLayout(1, packed[j].type.layout))
                        )
                        valid = keys_visible_to_any_row_mask(o_n, num_keys, seqlen_q, cfg)[:, None]
                        valid_v = valid_v + (gl.where(valid, packed[j], 0),)
                    packed = valid_v
            v = convert_block_to_fp16(
                packed,
                e4m3_scales_or_zero_points_from_smem(converted_stages, iter, scales, True, cfg, tile_cfg),
                cfg,
                tile_cfg,
            )
            store_converted_block_to_smem(
                v, converted_stages.kv,
                producer_acquire(converted_stages.empty_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES), tile_cfg,
            )  # fmt: skip
            packed = wait_and_load_packed_block(
                smem_kv.k, full_barriers[0], iter + 1, iter + 1 < num_blocks, cfg, tile_cfg
            )
            arrive_converted_full(converted_stages, 2 * iter + 1, tile_cfg)
            # Refill the stage of codes.
            start_kv_block_copies_at_position(
                prefetch_pos, iter + tile_cfg.STAGES, full_barriers, tensor_maps, smem_kv, kv_head, block_end, cfg,
                tile_cfg,
            )  # fmt: skip
            prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
            iter += 1
        block += work_tile.n_block_end - work_tile.n_block_begin


# ---- consumer: query, QK and PV ----


@gluon.jit
def load_query_fp16_fragment_and_q_scales(
    tensors, strides, smem_column_scales, work_tile, kv_head, row_begin, q_sign, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns (64 query rows from row_begin on, fp16, as the left operand; a scale of their scores
    [ROWS_PER_WARPGROUP]): see `producer.rotate_to_query_operands_and_q_scales`."""
    S: gl.constexpr = score_layout(cfg)
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    o_r = row_begin + gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, A))
    o_d = head_column_of_converted_column(gl.arange(0, cfg.PACK * cfg.PACKED_K, gl.SliceLayout(0, A)), cfg)
    p_row = query_row_ptrs(tensors.Q, strides, work_tile.q_begin, kv_head, o_r, cfg, tile_cfg)
    x = gl.load(p_row[:, None] + o_d[None, :], mask=(o_r < work_tile.seqlen_q * cfg.GROUP)[:, None], other=0.0).to(
        gl.float32
    )
    x = scale_and_rotate_query(x, smem_column_scales, 1, cfg, tile_cfg)
    exponent, inv_scale = biased_exponent_and_inv_scale_of_rows(gl.max(gl.abs(x), 1))
    inv_scale = inv_scale * q_sign
    q_scales = gl.convert_layout(exponent_to_float(exponent) * cfg.K_RESIDUAL_SCALE, gl.SliceLayout(1, S))
    return (x * inv_scale[:, None]).to(gl.float16), q_scales


@gluon.jit
def wait_k_and_start_qk(q, converted_stages, iter, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Waits for the converted K of an n_block and starts S = Q K^T."""
    k = converted_stages.kv.index(consumer_wait(converted_stages.full_barriers, 2 * iter, tile_cfg.CONVERTED_STAGES))
    zero = gl.full([ROWS_PER_WARPGROUP, cfg.BLOCK_N], 0, gl.float32, score_layout(cfg))
    return warpgroup_mma(q, k.permute([1, 0]), zero, use_acc=False, is_async=True)


@gluon.jit
def wait_v_and_start_pv(p, acc_o, converted_stages, iter, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Waits for the converted V of an n_block and starts acc_o + P V."""
    p = gl.convert_layout(p, gl.DotOperandLayout(0, acc_layout(cfg), 2), assert_trivial=True)
    v = converted_stages.kv.index(
        consumer_wait(converted_stages.full_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES)
    )
    return warpgroup_mma(p, v, acc_o, is_async=True)


# ---- consumer: mask and online softmax ----
# Numbers of a row are kept once per lane that shares it, [ROWS_PER_WARPGROUP, LANES_PER_ROW], so that lanes exchange
# nothing: exchanges would wait for shared memory behind the MMA operands.


@gluon.jit
def view_by_lane(x):
    """Returns rows of an accumulator with the columns split by lane: [rows, columns / 8, LANES_PER_ROW, 2]."""
    return gl.reshape(x, [x.shape[0], x.shape[1] // 8, LANES_PER_ROW, 2])


@gluon.jit
def undo_view_by_lane(x, like):
    """Returns `view_by_lane`'s result in the original shape and layout."""
    return gl.convert_layout(gl.reshape(x, like.shape), like.type.layout, assert_trivial=True)


@gluon.constexpr_function
def row_per_lane_layout(layout):
    """Returns the layout [rows, LANES_PER_ROW] of one number per row and lane; layout: of `view_by_lane`."""
    return gl.SliceLayout(1, gl.SliceLayout(3, layout))


@gluon.jit
def broadcast_by_lane(x, like):
    """Returns one number per row and lane [rows, LANES_PER_ROW], broadcast to `view_by_lane` of the row."""
    return gl.convert_layout(x, row_per_lane_layout(like.type.layout), assert_trivial=True)[:, None, :][:, :, :, None]


@gluon.jit
def load_token_scales(smem_token_scales, iter, I_VECTOR: gl.constexpr, cfg: gl.constexpr):
    """Loads one vector of an n_block's stored scales, broadcast to all rows: [1, BLOCK_N]."""
    return smem_token_scales.index(iter % SCALE_STAGES * NUM_SCALE_VECTORS + I_VECTOR).load(
        gl.SliceLayout(0, score_layout(cfg))
    )[None, :]


@gluon.jit
def lazy_softmax_step_with_p_sums(
    s, row_max, score_scales, softcap, token_scales, iter, n_block, is_unmasked, mask_args, cfg: gl.constexpr
):
    """Returns (p, its sums by lane, row_max, rescale) of an n_block's scores.

    row_max is raised only where P would overflow fp16, which is rare.
    """
    PLAIN: gl.constexpr = not cfg.TOKEN_SCALES and not cfg.HAS_SOFTCAP
    # Scales and softcap.
    if cfg.TOKEN_SCALES:
        s = s * load_token_scales(token_scales, iter, 0, cfg)
    if not PLAIN:
        x = view_by_lane(s)
        s = undo_view_by_lane(x * broadcast_by_lane(score_scales, x), s)
    if cfg.HAS_SOFTCAP:
        s = apply_softcap_to_log2_scores(s, softcap)
    if cfg.TOKEN_SCALES:  # as in `kernel`: the V scale is added to the exponent
        s = s + load_token_scales(token_scales, iter, 1, cfg)
    # Mask.
    if not is_unmasked:
        s = gl.where(
            is_visible_in_block(n_block, mask_args, ROWS_PER_WARPGROUP, score_layout(cfg), cfg), s, float("-inf")
        )
    # The maximum of each row's scores in one thread, by a reduction tree.
    a, b = gl.split(gl.reshape(s, [s.shape[0], s.shape[1] // 2, 2]))
    x = gl.maximum(a, b)
    for _ in gl.static_range(x.shape[1].bit_length() - 3):
        a, b = split_columns(x)
        x = gl.maximum(a, b)
    lane_max = gl.convert_layout(x, row_per_lane_layout(view_by_lane(s).type.layout), assert_trivial=True)
    # Lazy row_max, P and its sums.
    if PLAIN:
        lane_max = lane_max * score_scales
    row_max_new, _ = gl.inline_asm_elementwise(
        LAZY_ROW_MAX_PTX, "=&f,=&f,=&r,=&r,f,f,f,f", [lane_max, row_max], [gl.float32, gl.int32], False, 2
    )  # fmt: skip
    safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    x = view_by_lane(s)
    if PLAIN:
        x = x * broadcast_by_lane(score_scales, x)
    p = undo_view_by_lane(gl.exp2(x - broadcast_by_lane(safe_max, x)), s)
    if cfg.TOKEN_SCALES:
        p_sums = row_sums_by_lane(p * load_token_scales(token_scales, iter, 2, cfg))
    else:
        p_sums = row_sums_by_lane(p)
    return (
        p, gl.convert_layout(p_sums, row_max.type.layout, assert_trivial=True), row_max_new,
        gl.exp2(row_max - safe_max),
    )  # fmt: skip


RESCALE_64_COLUMNS, RESCALE_64_COLUMNS_CONSTRAINTS = map(
    gl.constexpr, rescale_unless_all_ones_ptx_and_constraints(64 // 2)
)
RESCALE_128_COLUMNS, RESCALE_128_COLUMNS_CONSTRAINTS = map(
    gl.constexpr, rescale_unless_all_ones_ptx_and_constraints(128 // 2)
)


@gluon.jit
def rescale_acc_unless_all_ones(acc_o, rescale):
    """Returns the accumulator times each row's rescale; a warp skips it where all are 1, as they mostly are."""
    x = view_by_lane(acc_o)
    scales, x = gl.broadcast(broadcast_by_lane(rescale, x), x)
    PTX: gl.constexpr = RESCALE_64_COLUMNS if acc_o.shape[1] == 64 else RESCALE_128_COLUMNS
    CONSTRAINTS: gl.constexpr = (
        RESCALE_64_COLUMNS_CONSTRAINTS if acc_o.shape[1] == 64 else RESCALE_128_COLUMNS_CONSTRAINTS
    )
    PACK: gl.constexpr = acc_o.shape[1] // 2
    return undo_view_by_lane(
        gl.inline_asm_elementwise(PTX, CONSTRAINTS, [x, scales], gl.float32, is_pure=True, pack=PACK), acc_o
    )


# ---- consumer: mainloop ----


@gluon.jit
def sum_over_lanes_of_equal_row_max(row_max, row_sum, acc_o):
    """Returns the SoftmaxState of rows, from row_max and row_sum by lane."""
    ROW: gl.constexpr = gl.SliceLayout(1, acc_o.type.layout)
    return SoftmaxState(
        gl.convert_layout(gl.max(row_max, 1), ROW), gl.convert_layout(gl.sum(row_sum, 1), ROW), acc_o
    )  # fmt: skip


@gluon.jit
def mainloop(
    q, score_scales, softcap, converted_stages, iter, n_block_begin, n_block_end, unmasked_begin, unmasked_end,
    mask_args, cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes n_blocks [n_block_begin, n_block_end) of a work tile. Returns (SoftmaxState, next iter)."""
    acc_o = gl.full([ROWS_PER_WARPGROUP, cfg.PACK * cfg.PACKED_V], 0, gl.float32, acc_layout(cfg))
    row_max = gl.full([ROWS_PER_WARPGROUP, LANES_PER_ROW], float("-inf"), gl.float32, score_scales.type.layout)
    row_sum = gl.full([ROWS_PER_WARPGROUP, LANES_PER_ROW], 0.0, gl.float32, score_scales.type.layout)
    for n_block in range(n_block_begin, n_block_end):
        # QK.
        s = warpgroup_mma_wait(0, [wait_k_and_start_qk(q, converted_stages, iter, cfg, tile_cfg)])
        consumer_release(converted_stages.empty_barriers, 2 * iter, tile_cfg.CONVERTED_STAGES)
        # Mask and online softmax.
        is_unmasked = (n_block >= unmasked_begin) & (n_block < unmasked_end)
        p, p_sums, row_max, rescale = lazy_softmax_step_with_p_sums(
            s, row_max, score_scales, softcap, converted_stages.token_scales, iter, n_block, is_unmasked, mask_args, cfg
        )
        row_sum = row_sum * rescale + p_sums
        # Rescale and PV.
        acc_o = wait_v_and_start_pv(
            p.to(gl.float16), rescale_acc_unless_all_ones(acc_o, rescale), converted_stages, iter, cfg, tile_cfg
        )
        acc_o = warpgroup_mma_wait(0, [acc_o])
        consumer_release(converted_stages.empty_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES)
        iter += 1
    return sum_over_lanes_of_equal_row_max(row_max, row_sum, acc_o), iter


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
    s = warpgroup_mma_wait(0, [wait_k_and_start_qk(q, converted_stages, iter, cfg, tile_cfg)])
    consumer_release(converted_stages.empty_barriers, 2 * iter, tile_cfg.CONVERTED_STAGES)
    is_unmasked = (n_block_begin >= unmasked_begin) & (n_block_begin < unmasked_end)
    p, row_sum, row_max, _ = lazy_softmax_step_with_p_sums(
        s, row_max, score_scales, softcap, converted_stages.token_scales, iter, n_block_begin, is_unmasked, mask_args,
        cfg,
    )  # fmt: skip
    p_packed = pack_p_16bit(p, gl.float16)
    for n_block in range(n_block_begin + 1, n_block_end):
        # QK of this n_block, PV of the previous one.
        s = wait_k_and_start_qk(q, converted_stages, iter + 1, cfg, tile_cfg)
        acc_o = wait_v_and_start_pv(
            unpack_p_16bit(p_packed, gl.float16, A), acc_o, converted_stages, iter, cfg, tile_cfg
        )
        s = warpgroup_mma_wait(1, [s])
        consumer_release(converted_stages.empty_barriers, 2 * iter + 2, tile_cfg.CONVERTED_STAGES)
        # Mask and online softmax.
        is_unmasked = (n_block >= unmasked_begin) & (n_block < unmasked_end)
        p, p_sums, row_max, rescale = lazy_softmax_step_with_p_sums(
            s, row_max, score_scales, softcap, converted_stages.token_scales, iter + 1, n_block, is_unmasked, mask_args,
            cfg,
        )  # fmt: skip
        row_sum = row_sum * rescale + p_sums
        p_packed = pack_p_16bit(p, gl.float16)
        # Wait for PV, then rescale.
        acc_o = warpgroup_mma_wait(0, [acc_o])
        consumer_release(converted_stages.empty_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES)
        acc_o = rescale_acc_unless_all_ones(acc_o, rescale)
        iter += 1
    acc_o = warpgroup_mma_wait(
        0, [wait_v_and_start_pv(unpack_p_16bit(p_packed, gl.float16, A), acc_o, converted_stages, iter, cfg, tile_cfg)]
    )
    consumer_release(converted_stages.empty_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES)
    return sum_over_lanes_of_equal_row_max(row_max, row_sum, acc_o), iter + 1


# ---- consumer warpgroups ----


@gluon.jit
def consumer(
    tensors, scales, strides, smem_column_scales, converted_stages, cta_range, I_CONSUMER: gl.constexpr,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes 64 query rows over the n_blocks of the CTA range."""
    SEQ_LENS, CU_SEQLENS_Q, kv_head = tensors.SEQ_LENS, tensors.CU_SEQLENS_Q, cta_range.head_group
    block, block_end, i_request, n_block_base = (
        cta_range.block_begin, cta_range.block_end, cta_range.i_request, cta_range.n_block_base,
    )  # fmt: skip
    head_score_scale = scales.score_scale * load_device_or_host_scale_per_head(
        scales.k_scale, scales.K_SCALE, kv_head, cfg.HAS_K_SCALE, cfg.K_SCALE_STRIDE
    )
    v_out_scale = (
        load_device_or_host_scale_per_head(scales.v_scale, scales.V_SCALE, kv_head, cfg.HAS_V_SCALE, cfg.V_SCALE_STRIDE)
        * scales.out_scale
    )
    # Q is multiplied by the scale's sign, so that the highest score is the largest element of the accumulator.
    sign = gl.where(head_score_scale < 0, -1.0, 1.0)
    request = load_request_lengths_and_block_counts(SEQ_LENS, CU_SEQLENS_Q, i_request, block < block_end, cfg)
    iter = 0
    while block < block_end:
        # Next work tile.
        i_request, n_block_base, request = advance_to_request_of_block(
            SEQ_LENS, CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
        )
        work_tile = make_work_tile_at_block(block, block_end, i_request, n_block_base, request)
        row_begin = work_tile.m_block * cfg.BLOCK_M + I_CONSUMER * ROWS_PER_WARPGROUP
        q, q_scales = load_query_fp16_fragment_and_q_scales(
            tensors, strides, smem_column_scales, work_tile, kv_head, row_begin, sign, cfg, tile_cfg
        )
        score_scales = q_scales * (head_score_scale * sign)
        score_scales = gl.where(score_scales < MIN_SCALE, MIN_SCALE, score_scales)
        LANE: gl.constexpr = row_per_lane_layout(
            view_by_lane(gl.full([ROWS_PER_WARPGROUP, cfg.BLOCK_N], 0.0, gl.float32, score_layout(cfg))).type.layout
        )
        zero = gl.full([ROWS_PER_WARPGROUP, LANES_PER_ROW], 0.0, gl.float32, LANE)
        score_scales = gl.convert_layout(score_scales, gl.SliceLayout(1, LANE))[:, None] + zero
        unmasked_begin, unmasked_end = unmasked_n_block_range(request, work_tile.num_keys, cfg)
        mask_args = MaskArgs(
            work_tile.num_keys,
            work_tile.seqlen_q,
            row_begin,
            work_tile.q_begin,
            tensors.MASK,
            strides.mask_t,
            work_tile.num_keys,
        )
        mainloop_fn: gl.constexpr = mainloop_overlapped if tile_cfg.WARPS_PER_HEAD == 8 else mainloop
        state, iter = mainloop_fn(
            q, score_scales, scales.softcap, converted_stages, iter, request.first_n_block + work_tile.n_block_begin,
            request.first_n_block + work_tile.n_block_end, unmasked_begin, unmasked_end,
            mask_args, cfg, tile_cfg,
        )  # fmt: skip
        # Epilogue: output of an unsplit work tile, else a partial result.
        if tile_cfg.V.ROTATION.ENABLED:
            state = unrotate_and_scale_acc(state, smem_column_scales, cfg, tile_cfg)
        o_m = gl.arange(0, ROWS_PER_WARPGROUP, gl.SliceLayout(1, state.acc_o.type.layout))
        if work_tile.n_block_begin == 0:  # all consumer warpgroups store the same
            num_splits = num_splits_of_tile(work_tile, cta_range.blocks_per_range, cta_range.i_range)
            p_metadata = work_tile_metadata_ptr(tensors.SPLIT_METADATA, work_tile, cta_range.head_group, tile_cfg)
            store_split_metadata(p_metadata, num_splits, cta_range.i_range)
        if work_tile.n_block_end - work_tile.n_block_begin == work_tile.num_n_blocks:
            store_unsplit_output_and_lse_of_head(
                tensors, strides, state, v_out_scale, kv_head, work_tile, row_begin + o_m, cfg
            )
        else:
            partial_slot = 2 * (cta_range.i_range * cfg.HEADS + kv_head) + gl.where(work_tile.n_block_begin == 0, 1, 0)
            num_q_rows_left = work_tile.seqlen_q * cfg.GROUP - work_tile.m_block * cfg.BLOCK_M
            store_partial_acc_max_and_sum_of_head(
                tensors.SPLIT_WORKSPACE, partial_slot, state, I_CONSUMER * ROWS_PER_WARPGROUP + o_m, num_q_rows_left,
                cfg,
            )  # fmt: skip
        block += work_tile.n_block_end - work_tile.n_block_begin


# ---- kernel ----


@gluon.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_64_rows_per_warpgroup_kernel(
    Q, K, V, K_SCALES, V_SCALES, PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, K_SIGNS,
    V_SIGNS, K_CHANNEL_SCALES, V_CHANNEL_SCALES,
    softmax_scale, SOFTMAX_SCALE, k_scale, K_SCALE, v_scale, V_SCALE, out_scale, OUT_SCALE, softcap,
    B, T, stride_q_t, stride_q_h, stride_table_b, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes one CTA range for a KV head. See the module's docstring, and `kernel`'s."""
    gl.static_assert((cfg.CODE == "e2m1") == cfg.BLOCK_SCALES, "a code that this kernel does not know")
    i_cta = gl.program_id(0)
    i_range, num_ranges, kv_head = (
        i_cta // tile_cfg.HEAD_GROUPS, gl.num_programs(0) // tile_cfg.HEAD_GROUPS, i_cta % tile_cfg.HEAD_GROUPS,
    )  # fmt: skip
    SPLIT_METADATA = split_metadata_ptr(SPLIT_WORKSPACE, num_ranges * cfg.HEADS, cfg)
    D: gl.constexpr = cfg.PACK * cfg.PACKED_K
    KV_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, D], gl.float16)
    # Shared memory.
    smem_kv = allocate_smem_kv(tile_cfg)
    converted_kv = gl.allocate_shared_memory(gl.float16, [tile_cfg.CONVERTED_STAGES, cfg.BLOCK_N, D], KV_LAYOUT)
    token_scales = converted_kv
    if cfg.TOKEN_SCALES:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        token_scales = gl.allocate_shared_memory(gl.float32, [SCALE_STAGES * NUM_SCALE_VECTORS, cfg.BLOCK_N], PLAIN)
    smem_column_scales = allocate_smem_k_and_v_column_scales(converted_kv, cfg, tile_cfg)
    full_barriers = allocate_full_barriers(2, tile_cfg.STAGES)
    converted_full, converted_empty = (
        allocate_mbarriers(tile_cfg.CONVERTED_STAGES, 1),
        allocate_mbarriers(tile_cfg.CONVERTED_STAGES, tile_cfg.WARPS_PER_HEAD // 4),
    )
    fence_async_shared()
    # Wait for the previous kernel; then padding, and this CTA's range.
    pdl_wait()
    if cfg.VARLEN_Q:
        store_empty_output_of_padding_rows(
            OUT, LSE, gl.load(CU_SEQLENS_Q + B).to(gl.int32), T, i_cta, gl.num_programs(0), stride_out_t, stride_out_h,
            stride_lse_t, stride_lse_h, cfg,
        )  # fmt: skip
    column_scales = load_k_and_v_column_scales(
        (K_SIGNS, V_SIGNS), (K_CHANNEL_SCALES, V_CHANNEL_SCALES), kv_head, cfg, tile_cfg
    )
    cta_range = assign_equal_cta_range(SEQ_LENS, CU_SEQLENS_Q, B, i_range, num_ranges, kv_head, cfg)
    store_smem_k_and_v_column_scales(smem_column_scales, column_scales)
    tensors = AttentionTensors(Q, SEQ_LENS, CU_SEQLENS_Q, MASK, SINKS, OUT, LSE, SPLIT_WORKSPACE, SPLIT_METADATA)
    scales = CallScales(
        load_device_or_host_scale(softmax_scale, SOFTMAX_SCALE, cfg.HAS_SOFTMAX_SCALE) * LOG2E, k_scale, K_SCALE,
        v_scale, V_SCALE, load_device_or_host_scale(out_scale, OUT_SCALE, cfg.HAS_OUT_SCALE), softcap,
    )  # fmt: skip
    strides = Strides(stride_q_t, stride_q_h, stride_mask_t, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h)
    tensor_maps = TensorMaps(K, V, K_SCALES, V_SCALES)
    page_lookup = PageLookup(PAGE_TABLE, SEQ_LENS, CU_SEQLENS_Q, stride_table_b)
    converted_stages = ConvertedStages(converted_kv, token_scales, converted_full, converted_empty)
    # Warp roles: consumers, converter.
    thread_barrier()  # the partitions' arguments may overlap the scratch of the reductions above
    if tile_cfg.WARPS_PER_HEAD == 4:
        gl.warp_specialize(
            [
                (
                    producer_and_converter,
                    (tensor_maps, page_lookup, smem_kv, full_barriers, converted_stages, cta_range, cfg, tile_cfg),
                ),
                (
                    consumer,
                    (tensors, scales, strides, smem_column_scales, converted_stages, cta_range, 0, cfg, tile_cfg),
                ),
            ],
            [4],
            [176],
        )
    else:
        gl.warp_specialize(
            [
                (
                    producer_and_converter,
                    (tensor_maps, page_lookup, smem_kv, full_barriers, converted_stages, cta_range, cfg, tile_cfg),
                ),
                (
                    consumer,
                    (tensors, scales, strides, smem_column_scales, converted_stages, cta_range, 0, cfg, tile_cfg),
                ),
                (
                    consumer,
                    (tensors, scales, strides, smem_column_scales, converted_stages, cta_range, 1, cfg, tile_cfg),
                ),
            ],
            [4, 4],
            [208, 208],
        )
    pdl_launch_dependents()
