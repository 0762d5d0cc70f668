"""Decode with many query rows of a KV head: codes are dequantized once for all rows, in shared memory.

A CTA has one KV head. Rows are on M, 64 a warpgroup, keys on N; both MMAs run as wgmma. This replaces the main loop of
`kernel` and `layouts` of small M; CTA ranges, copies and splits are the same. Threads synchronize twice per n_block: V
is dequantized while QK runs, the next K while PV runs. Columns in shared memory keep the order of the conversion
(`head_column_of_converted_column`).

Heads of at most 128 columns go by `rows_64`. It cannot take 256: a thread's 255 registers do not hold the query (64)
beside the accumulator (128) and two tiles of scores (64), and shared memory, 227 KB, does not hold that of 128 rows (64
KB) beside four fp16 tiles (128 KB) and two stages of codes (64 KB). Here are two tiles, and no overlapped QK.

Mask: `softmax_to_row_max_row_sum_p_and_rescale`. Free stage: the second barrier in `mainloop`. Rescale
and PV: `mainloop`; P stays in registers, only K and V are in shared memory. Combine: `combine_kernel`.
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
from ..parts.dequant import (
    BLOCK_SCALE_PTX,
    biased_exponent_and_inv_scale_of_rows,
    convert_k_codes_to_16bit_operands,
    dequant_e2m1_to_4_operands,
    exponent_to_float,
    head_column_of_converted_column,
    log2_and_reciprocal,
)
from ..parts.epilogue import cast_output_saturating_fp8, compute_acc_scale_and_lse
from ..parts.hadamard import scale_and_rotate_query
from ..parts.mask import is_visible_in_block, keys_visible_to_any_row_mask
from ..parts.online_softmax import SoftmaxState, apply_softcap_to_log2_scores
from .producer import (
    advance_prefetch_position,
    query_row_ptrs,
    smem_codes_of_mma_tile,
    start_kv_block_copies_at_position,
)


class SmemOperands(NamedTuple):
    """fp16 operands in shared memory, and the stored scales of an n_block."""

    q: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    scales: tuple


# ---- layouts ----


@gluon.constexpr_function
def score_layout(cfg, tile_cfg):
    return gl.NVMMADistributedLayout([3, 0], [tile_cfg.WARPS_PER_HEAD, 1], [16, cfg.BLOCK_N, 16])


@gluon.constexpr_function
def acc_layout(cfg, tile_cfg):
    return gl.NVMMADistributedLayout([3, 0], [tile_cfg.WARPS_PER_HEAD, 1], [16, cfg.PACK * cfg.PACKED_V, 16])


@gluon.constexpr_function
def packed_codes_layout(CODE_WORDS_PER_ROW, cfg, tile_cfg):
    """Returns the layout of codes [keys, CODE_WORDS_PER_ROW]: a lane has eight of a row, 16 bytes of fp16, without
    bank conflicts."""
    lanes = CODE_WORDS_PER_ROW * cfg.PACK // 8
    return gl.BlockedLayout([1, 8 // cfg.PACK], [32 // lanes, lanes], [tile_cfg.WARPS_PER_HEAD, 1], [1, 0])


@gluon.constexpr_function
def block_scale_broadcast_layout(CODE_WORDS_PER_ROW, cfg, tile_cfg):
    """Returns the same layout of 4-bit codes as [keys, blocks, 2 halves, 2 packed]."""
    return gl.BlockedLayout(
        [1, 1, 1, 2],
        [64 // CODE_WORDS_PER_ROW, CODE_WORDS_PER_ROW // 4, 2, 1],
        [tile_cfg.WARPS_PER_HEAD, 1, 1, 1],
        [3, 2, 1, 0],
    )


@gluon.constexpr_function
def keeps_query_in_registers(cfg):
    """Returns whether Q is held in registers and only passes through the K buffer."""
    return cfg.BLOCK_M == cfg.BLOCK_N and cfg.PACK * cfg.PACKED_K <= 128


@gluon.constexpr_function
def token_scale_layout(tile_cfg):
    return gl.BlockedLayout([1], [32], [tile_cfg.WARPS_PER_HEAD], [0])


@gluon.constexpr_function
def block_scale_layout(CODE_WORDS_PER_ROW, tile_cfg):
    """Returns the layout of block scales [keys, bytes] as loaded: a thread has those of a key."""
    return gl.BlockedLayout([1, CODE_WORDS_PER_ROW // 4], [32, 1], [tile_cfg.WARPS_PER_HEAD, 1], [1, 0])


@gluon.jit
def allocate_smem_fp16_qkv_and_scales(cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Allocates (q, k, v, scales): fp16 operands, and the stored scales of an n_block as `mainloop` stores them."""
    D: gl.constexpr = cfg.PACK * cfg.PACKED_K
    DV: gl.constexpr = cfg.PACK * cfg.PACKED_V
    Q: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_M, D], gl.float16)
    K: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, D], gl.float16)
    V: gl.constexpr = gl.NVMMASharedLayout.get_default_for([cfg.BLOCK_N, DV], gl.float16)
    k = gl.allocate_shared_memory(gl.float16, [cfg.BLOCK_N, D], K)
    if keeps_query_in_registers(cfg):
        q = k
    else:
        q = gl.allocate_shared_memory(gl.float16, [cfg.BLOCK_M, D], Q)
    v = gl.allocate_shared_memory(gl.float16, [cfg.BLOCK_N, DV], V)
    scales = ()
    if cfg.TOKEN_SCALES:
        for _ in gl.static_range(3):
            scales = scales + (
                gl.allocate_shared_memory(gl.float32, [cfg.BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0])),
            )
    if cfg.BLOCK_SCALES:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        scales = (
            gl.allocate_shared_memory(gl.uint8, [cfg.BLOCK_N, cfg.PACKED_K // 4], PLAIN),
            gl.allocate_shared_memory(gl.uint8, [cfg.BLOCK_N, cfg.PACKED_V // 4], PLAIN),
        )
    return SmemOperands(q, k, v, scales)


# ---- query ----


@gluon.jit
def store_query_unfenced_and_return_q_scales(
    tensors, strides, smem_column_scales, work_tile, kv_head, smem_q, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Stores a work tile's query rows to shared memory in fp16; returns a scale of their scores [BLOCK_M] (see
    `producer.rotate_to_query_operands_and_q_scales`)."""
    D: gl.constexpr = cfg.PACK * cfg.PACKED_K
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [tile_cfg.WARPS_PER_HEAD, 1], [1, 0])
    o_r = work_tile.m_block * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(1, L))
    o_d = head_column_of_converted_column(gl.arange(0, D, gl.SliceLayout(0, L)), cfg)
    p_row = query_row_ptrs(tensors.Q, strides, work_tile.q_begin, kv_head, o_r, cfg, tile_cfg)
    x = gl.load(p_row[:, None] + o_d[None, :], mask=(o_r < work_tile.seqlen_q * cfg.GROUP)[:, None], other=0.0).to(
        gl.float32
    )
    x = scale_and_rotate_query(x, smem_column_scales, 1, cfg, tile_cfg)
    exponent, inv_scale = biased_exponent_and_inv_scale_of_rows(gl.max(gl.abs(x), 1))
    thread_barrier()  # MMAs of the previous work tile may still read
    smem_q.store((x * inv_scale[:, None]).to(gl.float16))
    q_scales = exponent_to_float(exponent) * cfg.K_RESIDUAL_SCALE
    return gl.convert_layout(q_scales, gl.SliceLayout(1, score_layout(cfg, tile_cfg)))


# ---- stored scales ----


@gluon.jit
def page_id_slot_in_page_and_mask_of_keys(
    page_lookup, i_request, n_block, num_keys, seqlen_q, enabled, LAYOUT: gl.constexpr, cfg: gl.constexpr
):
    """Returns (page, slot, is valid) of an n_block's keys."""
    o_key = n_block * cfg.BLOCK_N + gl.arange(0, cfg.BLOCK_N, LAYOUT)
    m_key = enabled & keys_visible_to_any_row_mask(o_key, num_keys, seqlen_q, cfg)
    page_id = gl.load(
        page_lookup.PAGE_TABLE + i_request.to(gl.int64) * page_lookup.stride_table_b + o_key // cfg.PAGE,
        mask=m_key,
        other=0,
    ).to(gl.int64)
    return page_id, o_key % cfg.PAGE, m_key


@gluon.jit
def load_token_or_block_scales_of_keys(
    SCALES, page_id_slot_and_mask, kv_head, IS_V: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Loads the stored scales of an n_block's K or V: [BLOCK_N] fp32, or [BLOCK_N, blocks] bytes."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    CODE_WORDS_PER_ROW: gl.constexpr = cfg.PACKED_V if IS_V else cfg.PACKED_K
    page_id, page_slot, m_key = page_id_slot_and_mask
    if cfg.INT64_OFFSETS:
        page_slot, kv_head = page_slot.to(gl.int64), kv_head.to(gl.int64)
    o_scales = page_id * SIDE.SCALE_STRIDES[0] + page_slot * SIDE.SCALE_STRIDES[1] + kv_head * SIDE.SCALE_STRIDES[2]
    if cfg.BLOCK_SCALES:
        o_i = gl.arange(0, CODE_WORDS_PER_ROW // 4, gl.SliceLayout(0, block_scale_layout(CODE_WORDS_PER_ROW, tile_cfg)))
        p_byte = SCALES.to(gl.pointer_type(gl.uint8), bitcast=True) + o_scales[:, None] + o_i[None, :]
        return gl.load(p_byte, mask=m_key[:, None], other=0)
    else:
        return gl.load(SCALES + o_scales, mask=m_key, other=1.0)


@gluon.jit
def load_k_and_v_token_or_block_scales(
    tensor_maps, page_lookup, i_request, kv_head, n_block, num_keys, seqlen_q, enabled, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Loads the stored scales of an n_block to registers, one n_block ahead."""
    if cfg.BLOCK_SCALES:
        K: gl.constexpr = gl.SliceLayout(1, block_scale_layout(cfg.PACKED_K, tile_cfg))
        V: gl.constexpr = gl.SliceLayout(1, block_scale_layout(cfg.PACKED_V, tile_cfg))
        return (
            load_token_or_block_scales_of_keys(
                tensor_maps.K_SCALES,
                page_id_slot_in_page_and_mask_of_keys(page_lookup, i_request, n_block, num_keys, seqlen_q, enabled, K,
                cfg), kv_head, False, cfg, tile_cfg,
            ),
            load_token_or_block_scales_of_keys(
                tensor_maps.V_SCALES,
                page_id_slot_in_page_and_mask_of_keys(page_lookup, i_request, n_block, num_keys, seqlen_q, enabled, V,
                cfg), kv_head, True, cfg, tile_cfg,
            ),
        )  # fmt: skip
    elif cfg.TOKEN_SCALES:
        page_id_slot_and_mask = page_id_slot_in_page_and_mask_of_keys(
            page_lookup, i_request, n_block, num_keys, seqlen_q, enabled, token_scale_layout(tile_cfg), cfg
        )
        return load_token_or_block_scales_of_keys(
            tensor_maps.K_SCALES, page_id_slot_and_mask, kv_head, False, cfg, tile_cfg
        ), load_token_or_block_scales_of_keys(tensor_maps.V_SCALES, page_id_slot_and_mask, kv_head, True, cfg, tile_cfg)
    else:
        return n_block, n_block


# ---- dequant ----


@gluon.jit
def load_and_expand_block_scales_to_fp16(
    smem_scales, CODE_WORDS_PER_ROW: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Loads block scales [KEYS_PER_BUFFER, blocks] e4m3 as fp16 [KEYS_PER_BUFFER, CODE_WORDS_PER_ROW], in the layout
    of the codes."""
    L4: gl.constexpr = block_scale_broadcast_layout(CODE_WORDS_PER_ROW, cfg, tile_cfg)
    scale_bytes = smem_scales.load(gl.SliceLayout(2, gl.SliceLayout(3, L4))).to(gl.int16)
    block_scales = gl.inline_asm_elementwise(BLOCK_SCALE_PTX, "=h,h", [scale_bytes], gl.float16, True, 1)
    block_scales, _ = gl.broadcast(
        block_scales[:, :, None, None],
        gl.full([tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW // 4, 2, 2], 0, gl.float16, L4),
    )
    return gl.convert_layout(
        block_scales.reshape([tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW]),
        packed_codes_layout(CODE_WORDS_PER_ROW, cfg, tile_cfg),
        assert_trivial=True,
    )


@gluon.jit
def convert_stage_to_fp16_in_smem(
    smem_codes, smem_block_scales, smem_fp16, stage, n_block, num_keys, seqlen_q, ZERO_INVALID_KEYS: gl.constexpr,
    IS_V: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Stores a stage's codes as fp16 to shared memory [BLOCK_N, PACK × CODE_WORDS_PER_ROW]; invalid keys become zeros
    if ZERO_INVALID_KEYS."""
    CODE_WORDS_PER_ROW: gl.constexpr = cfg.PACKED_V if IS_V else cfg.PACKED_K
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    L: gl.constexpr = packed_codes_layout(CODE_WORDS_PER_ROW, cfg, tile_cfg)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(SIDE.SMEM_LAYOUT.swizzle_byte_width, 16, 2)
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        if tile_cfg.COPIES_PER_BUFFER == 2:
            codes = smem_codes_of_mma_tile(smem_codes[j], stage, CODE_WORDS_PER_ROW, tile_cfg).reshape(
                [tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW]
            )
        else:
            codes = reinterpret(
                smem_codes[j], gl.int16, [tile_cfg.STAGES, tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW], LAYOUT
            ).index(stage)
        packed = codes.load(L)
        o_n = (
            n_block * cfg.BLOCK_N
            + j * tile_cfg.KEYS_PER_BUFFER
            + gl.arange(0, tile_cfg.KEYS_PER_BUFFER, gl.SliceLayout(1, L))
        )
        valid = keys_visible_to_any_row_mask(o_n, num_keys, seqlen_q, cfg)[:, None]
        if ZERO_INVALID_KEYS:
            packed = gl.where(valid, packed, 0)
        if cfg.BLOCK_SCALES:
            block_scales = load_and_expand_block_scales_to_fp16(
                smem_block_scales[1 if IS_V else 0].slice(j * tile_cfg.KEYS_PER_BUFFER, tile_cfg.KEYS_PER_BUFFER),
                CODE_WORDS_PER_ROW,
                cfg, tile_cfg,
            )  # fmt: skip
            if ZERO_INVALID_KEYS:
                block_scales = gl.where(valid, block_scales, 0.0)
            low0, low1, high0, high1 = dequant_e2m1_to_4_operands(packed, block_scales, True)
            x = gl.join(gl.join(low0, high0), gl.join(low1, high1))
            x = x.reshape([tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW // 2, 2, 2, 2]).permute([0, 1, 3, 4, 2])
        else:
            low, high = convert_k_codes_to_16bit_operands(packed, cfg)
            x = (
                gl.join(low, high)
                .reshape([tile_cfg.KEYS_PER_BUFFER, CODE_WORDS_PER_ROW // 2, 2, 2])
                .permute([0, 1, 3, 2])
            )
        smem_fp16.slice(j * tile_cfg.KEYS_PER_BUFFER, tile_cfg.KEYS_PER_BUFFER).store(
            x.reshape([tile_cfg.KEYS_PER_BUFFER, cfg.PACK * CODE_WORDS_PER_ROW])
        )


# ---- mask and online softmax ----


@gluon.jit
def softmax_to_row_max_row_sum_p_and_rescale(
    s, row_max, row_sum, score_scales, softcap, smem_scales, n_block, mask_args, MASKED: gl.constexpr,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Returns (row_max, row_sum, p, rescale) of an n_block's scores."""
    ACC_S: gl.constexpr = score_layout(cfg, tile_cfg)
    s = s * score_scales[:, None]
    if cfg.TOKEN_SCALES:
        s = s * smem_scales[0].load(gl.SliceLayout(0, ACC_S))[None, :]
    if cfg.HAS_SOFTCAP:
        s = apply_softcap_to_log2_scores(s, softcap)
    if cfg.TOKEN_SCALES:  # as in small M: the V scale is added to the exponent
        s = s + smem_scales[1].load(gl.SliceLayout(0, ACC_S))[None, :]
    if MASKED:
        s = gl.where(is_visible_in_block(n_block, mask_args, cfg.BLOCK_M, ACC_S, cfg), s, float("-inf"))
    row_max_new = gl.maximum(row_max, gl.max(s, 1))
    safe_max = gl.where(row_max_new == float("-inf"), 0.0, row_max_new)
    rescale = gl.exp2(row_max - safe_max)
    p = gl.exp2(s - safe_max[:, None])
    if cfg.TOKEN_SCALES:
        row_sum = row_sum * rescale + gl.sum(p * smem_scales[2].load(gl.SliceLayout(0, ACC_S))[None, :], 1)
    else:
        row_sum = row_sum * rescale + gl.sum(p, 1)
    return row_max_new, row_sum, p, rescale


# ---- mainloop ----


@gluon.jit
def mainloop(
    score_scales, softcap, prefetch_pos, iter, full_barriers, smem_kv, tensor_maps, page_lookup, smem_operands,
    i_request, kv_head, n_block_begin, n_block_end, unmasked_begin, unmasked_end, mask_args, block_end,
    cfg: gl.constexpr, tile_cfg: gl.constexpr,
):  # fmt: skip
    """Processes n_blocks [n_block_begin, n_block_end) of a work tile. Returns (SoftmaxState, prefetch position, next
    iter)."""
    smem_q, smem_k, smem_v, smem_scales = smem_operands
    num_keys, seqlen_q = mask_args.num_keys, mask_args.seqlen_q
    ACC_S: gl.constexpr = score_layout(cfg, tile_cfg)
    O: gl.constexpr = acc_layout(cfg, tile_cfg)
    row_max = gl.full([cfg.BLOCK_M], float("-inf"), gl.float32, gl.SliceLayout(1, ACC_S))
    row_sum = gl.full([cfg.BLOCK_M], 0, gl.float32, gl.SliceLayout(1, ACC_S))
    acc_o = gl.full([cfg.BLOCK_M, cfg.PACK * cfg.PACKED_V], 0, gl.float32, O)
    scales = load_k_and_v_token_or_block_scales(
        tensor_maps, page_lookup, i_request, kv_head, n_block_begin, num_keys, seqlen_q, True, cfg, tile_cfg
    )
    if cfg.BLOCK_SCALES:
        smem_scales[0].store(scales[0])
        thread_barrier()
    if keeps_query_in_registers(cfg):
        thread_barrier()
        q = smem_q.load(gl.DotOperandLayout(0, ACC_S, 2))
        thread_barrier()
    else:
        q = smem_q
    mbarrier.wait(full_barriers[0].index(iter % tile_cfg.STAGES), (iter // tile_cfg.STAGES) & 1)
    convert_stage_to_fp16_in_smem(
        smem_kv.k, smem_scales, smem_k, iter % tile_cfg.STAGES, n_block_begin, num_keys, seqlen_q, False, False, cfg,
        tile_cfg,
    )  # fmt: skip
    for n_block in range(n_block_begin, n_block_end):
        stage = iter % tile_cfg.STAGES
        if cfg.TOKEN_SCALES:
            smem_scales[0].store(scales[0])
            log2_v_scales, inv_v_scales = log2_and_reciprocal(gl.maximum(scales[1], 1e-30))
            smem_scales[1].store(log2_v_scales)
            smem_scales[2].store(inv_v_scales)
        if cfg.BLOCK_SCALES:
            smem_scales[1].store(scales[1])
        # QK.
        fence_async_shared()
        thread_barrier()  # K is in shared memory, V may be overwritten
        zero = gl.full([cfg.BLOCK_M, cfg.BLOCK_N], 0, gl.float32, ACC_S)
        s = warpgroup_mma(q, smem_k.permute([1, 0]), zero, use_acc=False, is_async=True)
        scales = load_k_and_v_token_or_block_scales(
            tensor_maps, page_lookup, i_request, kv_head, n_block + 1, num_keys, seqlen_q,
            n_block + 1 < n_block_end, cfg, tile_cfg,
        )  # fmt: skip
        # Dequantize V, while QK runs.
        mbarrier.wait(full_barriers[1].index(stage), (iter // tile_cfg.STAGES) & 1)
        is_unmasked = (n_block >= unmasked_begin) & (n_block < unmasked_end)
        if is_unmasked:
            convert_stage_to_fp16_in_smem(
                smem_kv.v, smem_scales, smem_v, stage, n_block, num_keys, seqlen_q, False, True, cfg, tile_cfg
            )
        else:
            convert_stage_to_fp16_in_smem(
                smem_kv.v, smem_scales, smem_v, stage, n_block, num_keys, seqlen_q, True, True, cfg, tile_cfg
            )
        # Mask and online softmax.
        s = warpgroup_mma_wait(0, [s])
        if is_unmasked:
            row_max, row_sum, p, rescale = softmax_to_row_max_row_sum_p_and_rescale(
                s, row_max, row_sum, score_scales, softcap, smem_scales, n_block, mask_args, False, cfg, tile_cfg
            )
        else:
            row_max, row_sum, p, rescale = softmax_to_row_max_row_sum_p_and_rescale(
                s, row_max, row_sum, score_scales, softcap, smem_scales, n_block, mask_args, True, cfg, tile_cfg
            )
        # Rescale and PV.
        acc_o = acc_o * gl.convert_layout(rescale, gl.SliceLayout(1, O), assert_trivial=True)[:, None]
        p_operand = gl.convert_layout(p.to(gl.float16), gl.DotOperandLayout(0, O, 2), assert_trivial=True)
        if cfg.BLOCK_SCALES:
            smem_scales[0].store(scales[0])
        fence_async_shared()
        thread_barrier()  # V is in shared memory, K may be overwritten, and the stage is free
        acc_o = warpgroup_mma(p_operand, smem_v, acc_o, is_async=True)
        # Refill the stage; dequantize the next K, while PV runs.
        start_kv_block_copies_at_position(
            prefetch_pos, iter + tile_cfg.STAGES, full_barriers, tensor_maps, smem_kv, kv_head, block_end, cfg,
            tile_cfg,
        )  # fmt: skip
        prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
        iter += 1
        if n_block + 1 < n_block_end:
            mbarrier.wait(full_barriers[0].index(iter % tile_cfg.STAGES), (iter // tile_cfg.STAGES) & 1)
            convert_stage_to_fp16_in_smem(
                smem_kv.k, smem_scales, smem_k, iter % tile_cfg.STAGES, n_block + 1, num_keys, seqlen_q, False,
                False, cfg, tile_cfg,
            )  # fmt: skip
        acc_o = warpgroup_mma_wait(0, [acc_o])
    HN: gl.constexpr = gl.SliceLayout(1, O)
    row_max, row_sum = (
        gl.convert_layout(row_max, HN, assert_trivial=True),
        gl.convert_layout(row_sum, HN, assert_trivial=True),
    )
    return SoftmaxState(row_max, row_sum, acc_o), prefetch_pos, iter


# ---- epilogue, of `rows_64` too ----
# Rows are in the layout of row_max and row_sum, a slice of the accumulator's.


@gluon.jit
def store_unsplit_output_and_lse_of_head(
    tensors, strides, state, v_scale_times_out_scale, kv_head, work_tile, packed_row_in_request, cfg: gl.constexpr
):
    """Stores rows of an unsplit work tile to `out`, and their LSE."""
    OUT, LSE = tensors.OUT, tensors.LSE
    O: gl.constexpr = state.acc_o.type.layout
    q_heads = (kv_head * cfg.GROUP + packed_row_in_request % cfg.GROUP).to(gl.int64)
    tokens = (work_tile.q_begin + packed_row_in_request // cfg.GROUP).to(gl.int64)
    m_row = packed_row_in_request < work_tile.seqlen_q * cfg.GROUP
    v_scale = v_scale_times_out_scale * cfg.V_RESIDUAL_SCALE
    acc_scale, lse = compute_acc_scale_and_lse(
        state.row_max, state.row_sum, v_scale, tensors.SINKS, q_heads, m_row, cfg
    )
    o_d = head_column_of_converted_column(gl.arange(0, cfg.PACK * cfg.PACKED_V, gl.SliceLayout(0, O)), cfg)
    p_out = (OUT + tokens * strides.out_t + q_heads * strides.out_h)[:, None] + o_d[None, :]
    gl.store(p_out, cast_output_saturating_fp8(state.acc_o * acc_scale[:, None], OUT, cfg), mask=m_row[:, None])
    if cfg.HAS_LSE:
        gl.store(LSE + tokens * strides.lse_t + q_heads * strides.lse_h, lse, mask=m_row)


@gluon.jit
def store_partial_acc_max_and_sum_of_head(
    SPLIT_WORKSPACE, partial_slot, state, row_in_tile, num_q_rows_left, cfg: gl.constexpr
):
    """Stores the partial result of a split work tile's rows, columns in the order of
    `store_partial_acc_max_and_sum`."""
    O: gl.constexpr = state.acc_o.type.layout
    p_row = SPLIT_WORKSPACE + (partial_slot.to(gl.int64) * cfg.BLOCK_M + row_in_tile) * cfg.PARTIAL_COLUMNS
    column = head_column_of_converted_column(gl.arange(0, cfg.PACK * cfg.PACKED_V, gl.SliceLayout(0, O)), cfg)
    o_d = column % cfg.PACK * cfg.BLOCK_DV + column // cfg.PACK
    m_row = row_in_tile < num_q_rows_left
    gl.store(p_row[:, None] + o_d[None, :], state.acc_o, mask=m_row[:, None])
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 2, state.row_max, mask=m_row)
    gl.store(p_row + cfg.PARTIAL_COLUMNS - 1, state.row_sum, mask=m_row)
