"""Converter warpgroup of `rows_64`: copies codes and dequantizes them into fp16 tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import reinterpret, thread_barrier
from ..parts.dequant import BLOCK_SCALE_PTX, dequant_e2m1, dequant_int4_rows, dequant_k, log2_and_reciprocal
from ..parts.pipeline import producer_acquire, stage_and_phase, sync_and_arrive
from ..parts.tile_scheduler import advance_to_request, load_request_shape, work_tile_at
from .mainloop import int4_zero_points
from .mask import valid_keys
from .producer import advance_prefetch_position, copy_kv_block, init_prefetch_position

SCALE_STAGES = gl.constexpr(4)  # n_blocks of stored scales in shared memory
# Per n_block: K scales; log2 and reciprocals of V scales; zero points of V and K.
NUM_SCALE_VECTORS = gl.constexpr(4)


@gluon.constexpr_function
def packed_per_lane(NUM_PACKED, tile_cfg):
    """Returns the consecutive packed columns of a lane."""
    return max(4, min(8, NUM_PACKED // (4 if tile_cfg.KEYS_PER_BUFFER >= 32 else 8)))


@gluon.constexpr_function
def packed_layout(NUM_PACKED, tile_cfg):
    """Returns the layout of codes [keys, NUM_PACKED]: eight lanes hold the same columns of eight keys, in different
    banks."""
    NUM_WARPS_DOWN = min(4, tile_cfg.KEYS_PER_BUFFER // 8)
    return gl.BlockedLayout(
        [1, packed_per_lane(NUM_PACKED, tile_cfg)], [8, 4], [NUM_WARPS_DOWN, 4 // NUM_WARPS_DOWN], [0, 1]
    )


@gluon.constexpr_function
def packed_blocks_layout(NUM_PACKED, tile_cfg):
    """Returns the same layout of 4-bit codes as [keys, blocks, 4 packed]."""
    NUM_WARPS_DOWN = min(4, tile_cfg.KEYS_PER_BUFFER // 8)
    return gl.BlockedLayout(
        [1, packed_per_lane(NUM_PACKED, tile_cfg) // 4, 4], [8, 4, 1], [NUM_WARPS_DOWN, 4 // NUM_WARPS_DOWN, 1],
        [2, 0, 1],
    )  # fmt: skip


@gluon.jit
def load_page_id(page_table, n_block, enabled, cfg: gl.constexpr):
    """Loads the page of an n_block that lies in one page."""
    return gl.load(page_table + n_block * cfg.BLOCK_N // cfg.PAGE, mask=enabled, other=0).to(gl.int64)


@gluon.jit
def load_scales_of_copy(SCALES, page_table, page_id, kv_head, first_key, o_n, m_key, IS_V: gl.constexpr,
                        LAYOUT: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr):  # fmt: skip
    """Loads stored scales of K or V: fp32, or a byte for each block; 1, or 0, for invalid keys."""
    SIDE: gl.constexpr = tile_cfg.V if IS_V else tile_cfg.K
    if cfg.INT64_OFFSETS:
        first_key, kv_head = first_key.to(gl.int64), kv_head.to(gl.int64)
    if tile_cfg.NUM_BUFFERS == 1:
        p_scale = SCALES + (
            page_id * SIDE.SCALE_STRIDES[0]
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
def load_stored_scales(
    tensor_maps, page_table, page_id, kv_head, n_block, num_keys, num_q_rows, enabled, cfg: gl.constexpr,
    tile_cfg: gl.constexpr,
):  # fmt: skip
    """Loads the stored scales of an n_block's K and V to registers: per buffer if they are block scales, else for all
    keys."""
    K_SCALES, V_SCALES = tensor_maps.K_SCALES, tensor_maps.V_SCALES
    if cfg.BLOCK_SCALES:
        L: gl.constexpr = gl.SliceLayout(2, packed_blocks_layout(cfg.PACKED_K, tile_cfg))
        k, v = (), ()
        for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
            first_key, o_n = (
                n_block * cfg.BLOCK_N + j * tile_cfg.KEYS_PER_BUFFER,
                gl.arange(0, tile_cfg.KEYS_PER_BUFFER, gl.SliceLayout(1, L)),
            )
            m_key = enabled & valid_keys(first_key + o_n, num_keys, num_q_rows, cfg)
            k = k + (
                load_scales_of_copy(
                    K_SCALES, page_table, page_id, kv_head, first_key, o_n, m_key, False, L, cfg, tile_cfg
                ),
            )
            v = v + (
                load_scales_of_copy(
                    V_SCALES, page_table, page_id, kv_head, first_key, o_n, m_key, True, L, cfg, tile_cfg
                ),
            )
        return k, v
    elif cfg.TOKEN_SCALES:
        first_key, o_n = n_block * cfg.BLOCK_N, gl.arange(0, cfg.BLOCK_N, gl.BlockedLayout([1], [32], [4], [0]))
        m_key = enabled & valid_keys(first_key + o_n, num_keys, num_q_rows, cfg)
        k = load_scales_of_copy(
            K_SCALES, page_table, page_id, kv_head, first_key, o_n, m_key, False, None, cfg, tile_cfg
        )
        return k, load_scales_of_copy(
            V_SCALES, page_table, page_id, kv_head, first_key, o_n, m_key, True, None, cfg, tile_cfg
        )
    else:
        return n_block, n_block


@gluon.jit
def expand_block_scales(scale_bytes, NUM_PACKED: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns block scales [KEYS_PER_BUFFER, blocks] e4m3 as fp16 [KEYS_PER_BUFFER, NUM_PACKED], in the layout of the
    codes."""
    L3: gl.constexpr = packed_blocks_layout(NUM_PACKED, tile_cfg)
    block_scales = gl.inline_asm_elementwise(BLOCK_SCALE_PTX, "=h,h", [scale_bytes.to(gl.int16)], gl.float16, True, 1)
    block_scales, _ = gl.broadcast(
        block_scales[:, :, None], gl.full([tile_cfg.KEYS_PER_BUFFER, NUM_PACKED // 4, 4], 0, gl.float16, L3)
    )
    return gl.convert_layout(
        block_scales.reshape([tile_cfg.KEYS_PER_BUFFER, NUM_PACKED]),
        packed_layout(NUM_PACKED, tile_cfg),
        assert_trivial=True,
    )


@gluon.jit
def load_packed_block(stages, full_barriers, iter, enabled, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Waits for an iteration's codes and loads them: per buffer [KEYS_PER_BUFFER, PACKED_K]."""
    stage, phase = stage_and_phase(iter, tile_cfg.STAGES)
    mbarrier.wait(full_barriers.index(stage), phase, pred=enabled)
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(tile_cfg.K.SMEM_LAYOUT.swizzle_byte_width, 16, 2)
    packed = ()
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        codes = reinterpret(
            stages[j], gl.int16, [tile_cfg.STAGES, tile_cfg.KEYS_PER_BUFFER, cfg.PACKED_K], LAYOUT
        ).index(stage)
        packed = packed + (codes.load(packed_layout(cfg.PACKED_K, tile_cfg)),)
    return packed


@gluon.jit
def store_zero_points(converted_stages, iter, scales, cfg: gl.constexpr):
    """Stores the zero points of an n_block's int4 rows to shared memory, for the threads that convert these rows."""
    if cfg.CODE == "int4":
        packed_zeros = (int4_zero_points(scales[1]) << 4) | int4_zero_points(scales[0])
        converted_stages.token_scales.index(iter % SCALE_STAGES * NUM_SCALE_VECTORS + 3).store(
            packed_zeros.to(gl.float32, bitcast=True)
        )
        thread_barrier()


@gluon.jit
def load_dequant_scales(converted_stages, iter, scales, IS_V: gl.constexpr, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns what `dequant_block` needs beside codes: block scales as loaded, or zero points, per buffer
    [KEYS_PER_BUFFER]."""
    if cfg.CODE == "int4":
        L: gl.constexpr = gl.SliceLayout(1, packed_layout(cfg.PACKED_K, tile_cfg))
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
        return scales[1 if IS_V else 0]


@gluon.jit
def dequant_block(packed, dequant_scales, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns codes as fp16, per buffer [KEYS_PER_BUFFER, PACK × PACKED_K]."""
    NUM_PACKED: gl.constexpr = cfg.PACKED_K
    out = ()
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        if cfg.PACK == 4:
            if cfg.BLOCK_SCALES:
                halves = dequant_e2m1(packed[j], expand_block_scales(dequant_scales[j], NUM_PACKED, tile_cfg), True)
            else:
                gl.static_assert(cfg.CODE == "int4", "a code that nobody here knows")
                halves = dequant_int4_rows(packed[j], dequant_scales[j])
            low0, low1, high0, high1 = halves
            x = gl.join(gl.join(low0, high0), gl.join(low1, high1))
            x = x.reshape([tile_cfg.KEYS_PER_BUFFER, NUM_PACKED // 2, 2, 2, 2]).permute([0, 1, 3, 4, 2])
        else:
            low, high = dequant_k(packed[j], cfg)
            x = gl.join(low, high).reshape([tile_cfg.KEYS_PER_BUFFER, NUM_PACKED // 2, 2, 2]).permute([0, 1, 3, 2])
        out = out + (x.reshape([tile_cfg.KEYS_PER_BUFFER, cfg.PACK * NUM_PACKED]),)
    return out


@gluon.jit
def zero_invalid_v(packed, n_block, num_keys, num_q_rows, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns V codes with zeros for keys that no row sees: P = 0 does not hide NaN."""
    out = ()
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        o_n = (
            n_block * cfg.BLOCK_N
            + j * tile_cfg.KEYS_PER_BUFFER
            + gl.arange(0, tile_cfg.KEYS_PER_BUFFER, gl.SliceLayout(1, packed[j].type.layout))
        )
        out = out + (gl.where(valid_keys(o_n, num_keys, num_q_rows, cfg)[:, None], packed[j], 0),)
    return out


@gluon.jit
def arrive_converted_full(converted_stages, converted_iter, tile_cfg: gl.constexpr):
    """Signals that item converted_iter is in its stage."""
    fence_async_shared()
    stage, _ = stage_and_phase(converted_iter, tile_cfg.CONVERTED_STAGES)
    sync_and_arrive(converted_stages.full_barriers.index(stage))


@gluon.jit
def store_converted_block(block, converted_kv, stage, tile_cfg: gl.constexpr):
    """Stores fp16 buffers of an n_block to a stage of the converted ring."""
    for j in gl.static_range(gl.constexpr(tile_cfg.NUM_BUFFERS)):
        converted_kv.index(stage).slice(j * tile_cfg.KEYS_PER_BUFFER, tile_cfg.KEYS_PER_BUFFER).store(block[j])


@gluon.jit
def converter(
    tensor_maps, page_lookup, kv_stages, full_barriers, converted_stages, cta_range, cfg: gl.constexpr,
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
        copy_kv_block(
            prefetch_pos, i_prefetch, full_barriers, tensor_maps, kv_stages, kv_head, block_end, cfg, tile_cfg
        )
        prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
    request = load_request_shape(SEQ_LENS, CU_SEQLENS_Q, i_request, block < block_end, cfg)
    packed = load_packed_block(kv_stages.k, full_barriers[0], iter, num_blocks > 0, cfg, tile_cfg)
    while block < block_end:
        i_request, n_block_base, request = advance_to_request(
            SEQ_LENS, CU_SEQLENS_Q, block, i_request, n_block_base, request, cfg
        )
        work_tile = work_tile_at(block, block_end, i_request, n_block_base, request)
        num_keys, num_q_rows = request.num_keys, request.num_q_rows
        page_table = page_lookup.PAGE_TABLE + i_request.to(gl.int64) * page_lookup.stride_table_b
        n_block_end = request.first_n_block + work_tile.n_block_end
        last_block, n_block_begin = n_block_end - 1, request.first_n_block + work_tile.n_block_begin
        page_id = load_page_id(page_table, n_block_begin, num_keys > 0, cfg)
        next_scales = load_stored_scales(
            tensor_maps, page_table, page_id, kv_head, n_block_begin, num_keys, num_q_rows, True, cfg, tile_cfg
        )
        page_id = load_page_id(page_table, n_block_begin + 1, n_block_begin < last_block, cfg)
        for n_block in range(n_block_begin, n_block_end):
            # Prefetch the next n_block's stored scales.
            scales = next_scales
            next_scales = load_stored_scales(
                tensor_maps, page_table, page_id, kv_head, n_block + 1, num_keys, num_q_rows, n_block < last_block, cfg,
                tile_cfg,
            )  # fmt: skip
            page_id = load_page_id(page_table, n_block + 2, n_block + 1 < last_block, cfg)
            # Convert K into a free stage.
            store_zero_points(converted_stages, iter, scales, cfg)
            k = dequant_block(
                packed, load_dequant_scales(converted_stages, iter, scales, False, cfg, tile_cfg), cfg, tile_cfg
            )
            stage = producer_acquire(converted_stages.empty_barriers, 2 * iter, tile_cfg.CONVERTED_STAGES)
            if cfg.TOKEN_SCALES:
                i_vector = iter % SCALE_STAGES * NUM_SCALE_VECTORS
                converted_stages.token_scales.index(i_vector).store(scales[0])
                log2_v_scales, inv_v_scales = log2_and_reciprocal(gl.maximum(scales[1], 1e-30))
                converted_stages.token_scales.index(i_vector + 1).store(log2_v_scales)
                converted_stages.token_scales.index(i_vector + 2).store(inv_v_scales)
            store_converted_block(k, converted_stages.kv, stage, tile_cfg)
            packed = load_packed_block(kv_stages.v, full_barriers[1], iter, True, cfg, tile_cfg)
            arrive_converted_full(converted_stages, 2 * iter, tile_cfg)
            # Convert V into a free stage.
            if not cfg.BLOCK_SCALES:  # those of invalid keys are 0  # noqa: SIM102 - known to the compiler
                if ((n_block + 1) * cfg.BLOCK_N > num_keys) | (cfg.WINDOW > 0):
                    packed = zero_invalid_v(packed, n_block, num_keys, num_q_rows, cfg, tile_cfg)
            v = dequant_block(
                packed, load_dequant_scales(converted_stages, iter, scales, True, cfg, tile_cfg), cfg, tile_cfg
            )
            store_converted_block(
                v, converted_stages.kv,
                producer_acquire(converted_stages.empty_barriers, 2 * iter + 1, tile_cfg.CONVERTED_STAGES), tile_cfg,
            )  # fmt: skip
            packed = load_packed_block(kv_stages.k, full_barriers[0], iter + 1, iter + 1 < num_blocks, cfg, tile_cfg)
            arrive_converted_full(converted_stages, 2 * iter + 1, tile_cfg)
            # Refill the stage of codes.
            copy_kv_block(
                prefetch_pos, iter + tile_cfg.STAGES, full_barriers, tensor_maps, kv_stages, kv_head, block_end, cfg,
                tile_cfg,
            )  # fmt: skip
            prefetch_pos = advance_prefetch_position(prefetch_pos, page_lookup, block_end, cfg, tile_cfg)
            iter += 1
        block += work_tile.n_block_end - work_tile.n_block_begin
