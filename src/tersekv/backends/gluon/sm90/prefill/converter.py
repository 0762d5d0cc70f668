"""The converter warpgroup of prefill: dequantizes tiles to 16 bits once, for all consumers.

Block scales and zero points are applied here, exactly in fp16. A K scale per token multiplies the scores in fp32:
rounded to fp16 it would shift an LSE of 11 by 0.005. A V scale per token multiplies its row in fp16, after the tile's
largest power of two is divided out; that power joins the softmax exponent, so no value leaves fp16's range.

Where heads are wider than 256, stages hold parts of tiles, and K is dequantized a tile ahead of V, as it is copied.

Wait for a free stage: `producer_acquire` in `dequant_tile_and_signal_barriers`; mask: invalid rows of V become 0;
rescale, combine: none.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import reinterpret, thread_barrier
from ..parts.dequant import E4M3_K_PTX, E5M2_K_PTX, INT8_K_PTX, exponent_to_float, int4_zero_points
from ..parts.online_softmax import split_columns
from ..parts.pipeline import consumer_wait, producer_acquire, stage_and_phase
from .mainloop import split_keys_by_eight
from .tile_scheduler import I_CONVERTER, first_column_of_head, kv_head_of, read_work_tile_and_cached_range


class StoredScales(NamedTuple):
    """Stored scales and page table in global memory; a tile's scales in shared memory."""

    K_SCALES: gl.tensor
    V_SCALES: gl.tensor
    PAGE_TABLE: gl.tensor
    stride_table_b: gl.tensor
    k_scales_smem: gl.shared_memory_descriptor  # token scales of K: [STAGES, BLOCK_N] fp32
    row_scales_smem: gl.shared_memory_descriptor  # `pack_scale_and_zero_points_to_int32`: [STAGES, BLOCK_N]
    k_block_scales_smem: gl.shared_memory_descriptor  # stored bytes: [STAGES × parts, BLOCK_N, blocks]
    v_block_scales_smem: gl.shared_memory_descriptor
    tile_v_scales: gl.shared_memory_descriptor  # [2 × STAGES, 2] fp32: `mainloop.TileVScale`


# ---- dequant: one 32-bit register of codes becomes two or four of fp16 pairs, in row order ----
# NOTE: tiles are int32 on both sides. With 16-bit elements the compiler unpacks and repacks registers where it cannot
# follow their order: 250 byte permutes a tile, at half the rate of multiplications (notes/prefill.md).


# Through e4m3, in which e2m1's fields read 2^-6 as large; times the block scale, exact in fp16.
_E2M1_PTX = gl.constexpr(
    """{
    .reg .b32 even, odd, m;
    .reg .b16 low, high;
    shl.b32 even, $4, 4;
    shl.b32 m, $4, 2;
    and.b32 m, m, 0x1C1C1C1C;
    lop3.b32 even, even, 0x80808080, m, 0xEA;
    shr.b32 m, $4, 2;
    and.b32 m, m, 0x1C1C1C1C;
    lop3.b32 odd, $4, 0x80808080, m, 0xEA;
    prmt.b32 m, even, odd, 0x5140;
    prmt.b32 odd, even, odd, 0x7362;
    mov.b32 {low, high}, m;
    cvt.rn.f16x2.e4m3x2 m, low;
    mul.f16x2 $0, m, $5;
    cvt.rn.f16x2.e4m3x2 m, high;
    mul.f16x2 $1, m, $5;
    mov.b32 {low, high}, odd;
    cvt.rn.f16x2.e4m3x2 m, low;
    mul.f16x2 $2, m, $5;
    cvt.rn.f16x2.e4m3x2 m, high;
    mul.f16x2 $3, m, $5;
    }"""
)
# A nibble in the lowest mantissa bits under the exponent of 1024, or four bits higher under that of 64, minus the zero
# point under the same exponent.
_INT4_PTX = gl.constexpr(
    """{
    .reg .b32 a, b, x;
    lop3.b32 a, $4, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 b, $4, 0x00F000F0, 0x54005400, 0xEA;
    shr.u32 x, $4, 8;
    sub.f16x2 a, a, $5;
    sub.f16x2 b, b, $6;
    prmt.b32 $0, a, b, 0x5410;
    prmt.b32 $2, a, b, 0x7632;
    lop3.b32 a, x, 0x000F000F, 0x64006400, 0xEA;
    lop3.b32 b, x, 0x00F000F0, 0x54005400, 0xEA;
    sub.f16x2 a, a, $5;
    sub.f16x2 b, b, $6;
    prmt.b32 $1, a, b, 0x5410;
    prmt.b32 $3, a, b, 0x7632;
    }"""
)
# An e4m3 byte as fp16 in both halves.
_BLOCK_SCALE_PTX = gl.constexpr(
    """{
    .reg .b32 x;
    .reg .b16 low, high;
    prmt.b32 x, $1, 0, 0x4400;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 $0, low;
    }"""
)


@gluon.constexpr_function
def _packed_per_lane(PACKED_WORDS):
    return max(2, min(4, PACKED_WORDS // 4))


@gluon.constexpr_function
def packed_codes_layout(PACKED_WORDS):
    """Returns the layout of packed codes [BLOCK_N, W]: lanes read eight keys in different banks."""
    return gl.BlockedLayout([1, _packed_per_lane(PACKED_WORDS)], [8, 4], [4, 1], [0, 1])


@gluon.constexpr_function
def block_scale_broadcast_layout(PACKED_WORDS):
    """Returns `packed_codes_layout` of 4-bit codes viewed as [BLOCK_N, blocks, 2]."""
    return gl.BlockedLayout([1, _packed_per_lane(PACKED_WORDS) // 2, 2], [8, 4, 1], [4, 1, 1], [2, 0, 1])


@gluon.jit
def copy_low_16_bits_to_high(x):
    """Returns the lower 16 bits in both halves of a register."""
    x = x & 0xFFFF
    return x | (x << 16)


@gluon.jit
def pack_scale_and_zero_points_to_int32(v_row_scale, k_zero_point, v_zero_point):
    """Packs a token's V scale (fp16) and int4 zero points of V and K into one int32."""
    return (
        (v_row_scale.to(gl.float16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF)
        | (v_zero_point << 16)
        | (k_zero_point << 20)
    )


@gluon.jit
def _mul_f16x2(x, scales):
    scales, x = gl.broadcast(scales, x)
    return gl.inline_asm_elementwise("mul.f16x2 $0, $1, $2;", "=r,r,r", [x, scales], gl.int32, True, 1)


# NOTE: result types are written out below: Triton 3.9 accepts no named tuple of types.
@gluon.jit
def dequant_rows_to_f16x2(packed, packed_v_scales_or_block_scales, IS_V: gl.constexpr, stored_format: gl.constexpr):
    """Returns packed codes [BLOCK_N, W] as fp16 pairs in row order.

    packed_v_scales_or_block_scales: from `pack_scale_and_zero_points_to_int32`, or bytes. K's token scales multiply
    the scores.
    """
    NUM_KEYS: gl.constexpr = packed.shape[0]
    PACKED_WORDS: gl.constexpr = packed.shape[1]
    if stored_format.PACK == 4:
        if stored_format.BLOCK_SCALES:
            gl.static_assert(stored_format.CODE == "e2m1", "a code that this kernel does not know")
            # Codes × block scales × 2^-6.
            scales = packed_v_scales_or_block_scales.to(gl.int32)
            scales = gl.inline_asm_elementwise(_BLOCK_SCALE_PTX, "=r,r", [scales], gl.int32, True, 1)
            scales, _ = gl.broadcast(
                scales[:, :, None],
                gl.full([NUM_KEYS, PACKED_WORDS // 2, 2], 0, gl.int32, block_scale_broadcast_layout(PACKED_WORDS)),
            )
            scales = gl.convert_layout(
                scales.reshape([NUM_KEYS, PACKED_WORDS]), packed_codes_layout(PACKED_WORDS), assert_trivial=True
            )
            x = gl.inline_asm_elementwise(
                _E2M1_PTX, "=&r,=&r,=&r,=&r,r,r", [packed, scales], (gl.int32, gl.int32, gl.int32, gl.int32), True, 1
            )
        else:
            gl.static_assert(stored_format.CODE == "int4", "a code that this kernel does not know")
            # Codes minus the zero points of their rows.
            zero_points = copy_low_16_bits_to_high((packed_v_scales_or_block_scales >> (16 if IS_V else 20)) & 15)
            low, _ = gl.broadcast((zero_points | 0x64006400)[:, None], packed)
            high, _ = gl.broadcast(((zero_points << 4) | 0x54005400)[:, None], packed)
            x = gl.inline_asm_elementwise(
                _INT4_PTX, "=&r,=&r,=&r,=&r,r,r,r", [packed, low, high],
                (gl.int32, gl.int32, gl.int32, gl.int32), True, 1,
            )  # fmt: skip
            if IS_V:
                scales = copy_low_16_bits_to_high(packed_v_scales_or_block_scales)[:, None]
                x = (_mul_f16x2(x[0], scales), _mul_f16x2(x[1], scales),
                     _mul_f16x2(x[2], scales), _mul_f16x2(x[3], scales))  # fmt: skip
        return gl.join(gl.join(x[0], x[2]), gl.join(x[1], x[3])).reshape([NUM_KEYS, 4 * PACKED_WORDS])
    else:
        if stored_format.CODE == "e4m3":
            low, high = gl.inline_asm_elementwise(E4M3_K_PTX, "=r,=r,r", [packed], (gl.int32, gl.int32), True, 1)
        elif stored_format.CODE == "e5m2":
            low, high = gl.inline_asm_elementwise(E5M2_K_PTX, "=&r,=&r,r", [packed], (gl.int32, gl.int32), True, 1)
        else:
            gl.static_assert(stored_format.CODE == "int8", "a code that this kernel does not know")
            low, high = gl.inline_asm_elementwise(INT8_K_PTX, "=r,=r,r", [packed], (gl.int32, gl.int32), True, 1)
        if stored_format.TOKEN_SCALES and IS_V:
            scales = copy_low_16_bits_to_high(packed_v_scales_or_block_scales)[:, None]
            low, high = _mul_f16x2(low, scales), _mul_f16x2(high, scales)
        return gl.join(low, high).reshape([NUM_KEYS, 2 * PACKED_WORDS])


# ---- stored scales ----


@gluon.jit
def key_offsets(n_start, cfg: gl.constexpr):
    """Returns the keys of a tile: [BLOCK_N]."""
    return n_start + gl.arange(0, cfg.BLOCK_N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))


@gluon.jit
def load_page_id_of_each_key(page_table, n_start, key_begin, key_end, cfg: gl.constexpr):
    """Loads the page of each key of a tile: [BLOCK_N]. Reads no entry for keys outside [key_begin, key_end)."""
    o_key = key_offsets(n_start, cfg)
    return gl.load(page_table + o_key // cfg.PAGE, mask=(o_key >= key_begin) & (o_key < key_end), other=0).to(gl.int64)


@gluon.jit
def load_token_or_block_scales_of_k_or_v_zero_oob(
    SCALES, page_ids, page_slots, m_key, kv_head, IS_V: gl.constexpr, cfg: gl.constexpr
):
    """Loads stored scales of K or V, fp32 or a byte per block, blocks padded to a power of two; 0 where invalid.

    A side without stored scales has nothing to load.
    """
    STRIDES: gl.constexpr = cfg.STORED_V_SCALE_STRIDES if IS_V else cfg.STORED_K_SCALE_STRIDES
    SIDE: gl.constexpr = cfg.V if IS_V else cfg.K
    o_scales = page_ids * STRIDES[0] + page_slots.to(gl.int64) * STRIDES[1] + kv_head.to(gl.int64) * STRIDES[2]
    if SIDE.BLOCK_SCALES:
        NUM_BLOCKS: gl.constexpr = (cfg.HEAD_DIM_V if IS_V else cfg.HEAD_DIM) // 16
        BLOCKS_PADDED: gl.constexpr = (cfg.DV if IS_V else cfg.D) // 16
        L: gl.constexpr = gl.BlockedLayout([1, BLOCKS_PADDED], [32, 1], [gl.num_warps(), 1], [1, 0])
        o_i = gl.arange(0, BLOCKS_PADDED, gl.SliceLayout(0, L)) - first_column_of_head(kv_head, IS_V, cfg) // 16
        o_scales = gl.convert_layout(o_scales, gl.SliceLayout(1, L), assert_trivial=True)
        m_key = gl.convert_layout(m_key, gl.SliceLayout(1, L), assert_trivial=True)
        p_byte = SCALES.to(gl.pointer_type(gl.uint8), bitcast=True) + o_scales[:, None] + o_i[None, :]
        m_block = o_i < NUM_BLOCKS
        if SIDE.PACKED_HEAD_STRIDE > 0:
            m_block = m_block & (o_i >= 0)
        return gl.load(p_byte, mask=m_key[:, None] & m_block[None, :], other=0)
    elif SIDE.TOKEN_SCALES:
        return gl.load(SCALES + o_scales, mask=m_key, other=0.0)
    else:
        return 0


@gluon.jit
def load_k_and_v_scales_zero_oob(stored_scales, page_ids, n_start, key_begin, key_end, kv_head, cfg: gl.constexpr):
    """Loads a tile's (K scales, V scales); 0 outside [key_begin, key_end)."""
    o_key = key_offsets(n_start, cfg)
    m_key, page_slots = (o_key >= key_begin) & (o_key < key_end), o_key % cfg.PAGE
    k = load_token_or_block_scales_of_k_or_v_zero_oob(
        stored_scales.K_SCALES, page_ids, page_slots, m_key, kv_head, False, cfg
    )
    return k, load_token_or_block_scales_of_k_or_v_zero_oob(
        stored_scales.V_SCALES, page_ids, page_slots, m_key, kv_head, True, cfg
    )


@gluon.jit
def store_block_scales_to_smem_by_part(smem, scales, stage, PARTS: gl.constexpr):
    """Stores block scales [BLOCK_N, blocks] of a tile, those of each part of the tile for itself."""
    if PARTS == 1:
        smem.index(stage).store(scales)
    else:
        columns = (scales,)
        for _ in gl.static_range((scales.shape[1] // smem.shape[2]).bit_length() - 1):
            halves = ()
            for i in gl.static_range(len(columns)):
                left, right = split_columns(columns[i])
                halves = halves + (left, right)
            columns = halves
        for part in gl.static_range(PARTS):
            smem.index(stage * PARTS + part).store(columns[part])


@gluon.jit
def max_exponent(x):
    """Returns the exponent field of the largest of positive numbers."""
    return gl.minimum(gl.maximum(gl.max(x, 0).to(gl.int32, bitcast=True) >> 23, 1), 253)


@gluon.jit
def store_tile_v_scale_and_packed_row_scales(stored_scales, k_and_v_scales, iter, cfg: gl.constexpr):
    """Stores a tile's TileVScale, and its V token scales divided by it, packed with zero points, in shared memory.

    TileVScale has 2 × STAGES stages: consumers that read the one overwritten here have released its K, or the previous
    tile could not have been dequantized.
    """
    k, v = k_and_v_scales
    stage, _ = stage_and_phase(iter, cfg.STAGES)
    k_zero_points, v_zero_points, v_row_scales = 0, 0, 0.0
    if cfg.K.CODE == "int4":
        k_zero_points = int4_zero_points(k)
    if cfg.V.TOKEN_SCALES:
        tile_stage, _ = stage_and_phase(iter, 2 * cfg.STAGES)
        exponent = max_exponent(v)
        o = gl.arange(0, 2, gl.BlockedLayout([2], [32], [gl.num_warps()], [0]))
        x = gl.where(o == 0, (exponent - 127).to(gl.float32), exponent_to_float(254 - exponent))
        stored_scales.tile_v_scales.index(tile_stage).store(x)
        if cfg.V.CODE == "int4":
            v_zero_points = int4_zero_points(v)
        v_row_scales = v * exponent_to_float(254 - exponent)
    elif cfg.K.CODE == "int4":
        v_row_scales = k * 0.0  # none: K's zero points alone are packed
    if cfg.V.TOKEN_SCALES or cfg.K.CODE == "int4":
        row_scales = pack_scale_and_zero_points_to_int32(v_row_scales, k_zero_points, v_zero_points)
        stored_scales.row_scales_smem.index(stage).store(row_scales.to(stored_scales.row_scales_smem.dtype))


# ---- stored scales of a K tile that consumers multiply as it was copied: the second arrival that fills its stages ----


@gluon.jit
def acquire_k_stages_and_store_k_scales(stored_scales, k_stages, k_token_scales, iter, cfg: gl.constexpr):
    """Waits for a tile's free K stages, as the copy does, and stores its token scales of K."""
    PARTS: gl.constexpr = cfg.K_PARTS
    for part in gl.static_range(PARTS):
        producer_acquire(k_stages.empty_barriers, iter * PARTS + part, k_stages.tiles.shape[0])
    if cfg.K.TOKEN_SCALES:
        stored_scales.k_scales_smem.index(stage_and_phase(iter, cfg.STAGES)[0]).store(k_token_scales)


@gluon.jit
def signal_scales_of_k_stages(k_stages, iter, enabled, cfg: gl.constexpr):
    """Arrives at the full barriers of a tile's K stages, after a barrier of the warpgroup."""
    STAGES: gl.constexpr = k_stages.tiles.shape[0]
    PARTS: gl.constexpr = cfg.K_PARTS
    for part in gl.static_range(PARTS):
        stage, _ = stage_and_phase(iter * PARTS + part, STAGES)
        mbarrier.arrive(k_stages.full_barriers.index(stage), count=1, pred=enabled)


# ---- tiles ----


@gluon.jit
def view_as_int32(stages):
    """Returns a view of 16-bit stages as int32."""
    SHAPE: gl.constexpr = [stages.tiles.shape[0], stages.tiles.shape[1], stages.tiles.shape[2] // 2]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(stages.tiles.layout.swizzle_byte_width, 32, 2)
    return reinterpret(stages.tiles, gl.int32, SHAPE, LAYOUT)


@gluon.jit
def dequant_tile_and_signal_barriers(
    code_stages, stages_16bit, dequant_scales, iter, code_iter, key_begin, key_end, is_edge, k_token_scales_to_store,
    IS_V: gl.constexpr, cfg: gl.constexpr,
):  # fmt: skip
    """Dequantizes a tile, or part of one, to 16 bits. At an edge, rows of V outside [key_begin, key_end) become 0.

    dequant_scales: of the tile's rows, as `dequant_rows_to_f16x2` takes them
    k_token_scales_to_store: (stages, token scales of K, the tile's iter), stored once the K stage is free
    """
    PACKED_WORDS: gl.constexpr = code_stages.tiles.shape[2] // 2
    SIDE: gl.constexpr = cfg.V if IS_V else cfg.K
    L: gl.constexpr = packed_codes_layout(PACKED_WORDS)
    # Wait for the codes and for a free 16-bit stage.
    NUM_STAGES: gl.constexpr = stages_16bit.tiles.shape[0]
    code_tile = view_as_int32(code_stages).index(consumer_wait(code_stages.full_barriers, code_iter, cfg.CODE_STAGES))
    tile = view_as_int32(stages_16bit).index(producer_acquire(stages_16bit.empty_barriers, iter, NUM_STAGES))
    if cfg.K.TOKEN_SCALES and not IS_V:
        k_scales_smem, k_token_scales, tile_iter = k_token_scales_to_store
        k_scales_smem.index(stage_and_phase(tile_iter, cfg.STAGES)[0]).store(k_token_scales)
    # NOTE: the whole tile at once: in parts, the compiler puts a barrier before each store.
    packed = code_tile.load(L)
    o_n = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, L))
    # Invalid rows of other codes have a scale of 0, and those codes hold no NaN.
    if IS_V and (SIDE.CODE == "e4m3" or SIDE.CODE == "e5m2"):  # noqa: SIM102 - known to the compiler, unlike the other
        if is_edge:
            packed = gl.where(((o_n >= key_begin) & (o_n < key_end))[:, None], packed, 0)
    row_scales = o_n
    if SIDE.BLOCK_SCALES:
        row_scales = dequant_scales.load(gl.SliceLayout(2, block_scale_broadcast_layout(PACKED_WORDS)))
    elif SIDE.TOKEN_SCALES and (IS_V or SIDE.CODE == "int4"):
        row_scales = dequant_scales.load(gl.SliceLayout(1, L)).to(gl.int32)
    # Dequantize, signal full, release codes.
    tile.store(dequant_rows_to_f16x2(packed, row_scales, IS_V, SIDE))
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(stages_16bit.full_barriers.index(stage_and_phase(iter, NUM_STAGES)[0]))
    mbarrier.arrive(code_stages.empty_barriers.index(stage_and_phase(code_iter, cfg.CODE_STAGES)[0]))


# Two columns of keys 2a, 2a + 1 and of those eight later → four keys of either column.
_TRANSPOSE_PTX = gl.constexpr(
    """{
    prmt.b32 $0, $2, $3, 0x6420;
    prmt.b32 $1, $2, $3, 0x7531;
    }"""
)


@gluon.jit
def transpose_v_tile_and_signal_barriers(
    code_stages, v_stages, iter, code_iter, key_begin, key_end, is_edge, cfg: gl.constexpr
):
    """Transposes a tile of V codes to [columns, keys]; at an edge, keys outside [key_begin, key_end) become 0."""
    PACKED_WORDS: gl.constexpr = code_stages.tiles.shape[2]
    L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]), 2)
    code_tile = code_stages.tiles.index(consumer_wait(code_stages.full_barriers, code_iter, cfg.CODE_STAGES))
    packed = code_tile.permute((1, 0)).load(L)
    if is_edge:
        o_n = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(0, L))
        packed = gl.where(((o_n >= key_begin) & (o_n < key_end))[None, :], packed, 0)
    a, b = split_keys_by_eight(packed)
    even, odd = gl.inline_asm_elementwise(_TRANSPOSE_PTX, "=&r,=&r,r,r", [a, b], (gl.int16, gl.int16), True, 2)
    transposed = gl.reshape(gl.permute(gl.join(even, odd), (0, 3, 1, 2)), [2 * PACKED_WORDS, cfg.BLOCK_N // 2])
    v_tile = v_stages.tiles.index(producer_acquire(v_stages.empty_barriers, iter, cfg.STAGES))
    v_tile.store(transposed)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(v_stages.full_barriers.index(stage_and_phase(iter, cfg.STAGES)[0]))
    mbarrier.arrive(code_stages.empty_barriers.index(stage_and_phase(code_iter, cfg.CODE_STAGES)[0]))


@gluon.jit
def dequant_k_column_parts(
    stored_scales, code_stages, stages_16bit, k_token_scales_to_store, scale_stage, iter, code_iter, cfg: gl.constexpr
):
    """Does `dequant_tile_and_signal_barriers` for the parts of a K tile. scale_stage: of its other scales"""
    PARTS: gl.constexpr = cfg.K_PARTS
    for part in range(PARTS):
        scales = stored_scales.row_scales_smem.index(scale_stage)
        if cfg.K.BLOCK_SCALES:
            scales = stored_scales.k_block_scales_smem.index(scale_stage * PARTS + part)
        dequant_tile_and_signal_barriers(
            code_stages, stages_16bit, scales, iter * PARTS + part, code_iter * PARTS + part, 0, 0, False,
            (stored_scales.k_scales_smem, k_token_scales_to_store, iter), False, cfg,
        )  # fmt: skip


@gluon.jit
def dequant_v_column_parts(
    stored_scales, code_stages, stages_16bit, scale_stage, iter, code_iter, key_begin, key_end, cfg: gl.constexpr
):
    """Does `dequant_tile_and_signal_barriers` for the parts of a V tile.

    scale_stage: of its scales; key_begin, key_end: of its valid rows
    """
    PARTS: gl.constexpr = cfg.V_PARTS
    is_edge = (key_begin > 0) | (key_end < cfg.BLOCK_N)
    for part in range(PARTS):
        scales = stored_scales.row_scales_smem.index(scale_stage)
        if cfg.V.BLOCK_SCALES:
            scales = stored_scales.v_block_scales_smem.index(scale_stage * PARTS + part)
        dequant_tile_and_signal_barriers(
            code_stages, stages_16bit, scales, iter * PARTS + part, code_iter * PARTS + part, key_begin, key_end,
            is_edge, (stored_scales.k_scales_smem, 0, iter), True, cfg,
        )  # fmt: skip


# ---- converter warpgroup ----


@gluon.jit
def converter(args, cfg: gl.constexpr):
    """Dequantizes every tile of every work tile of this CTA."""
    stored_scales, q_stages, tile_info, k_code_stages, v_code_stages, k_stages, v_stages = args
    HAS_TOKEN_SCALES: gl.constexpr = cfg.K.TOKEN_SCALES or cfg.V.TOKEN_SCALES
    HAS_STORED_SCALES: gl.constexpr = HAS_TOKEN_SCALES or cfg.K.BLOCK_SCALES or cfg.V.BLOCK_SCALES
    num_done, iter, code_iter = 0, 0, 0
    mbarrier.wait(q_stages.full_barriers.index(I_CONVERTER), 0)
    work_tile, cached_range = read_work_tile_and_cached_range(tile_info.index(I_CONVERTER), True)
    mbarrier.arrive(q_stages.empty_barriers.index(I_CONVERTER), count=cfg.CONSUMER_WARPS)
    while work_tile.num_n_blocks > 0:
        key_begin, key_end, num_n_blocks, n_block_end = (
            work_tile.key_begin, work_tile.key_end, work_tile.num_n_blocks, work_tile.n_block_end,
        )  # fmt: skip
        if cfg.HAS_NEW_KV:  # tiles of new K and V come first, and are not dequantized
            iter += work_tile.num_n_blocks
            key_begin, key_end, num_n_blocks, n_block_end = (
                cached_range.key_begin, cached_range.key_end, cached_range.num_n_blocks, cached_range.n_block_end,
            )  # fmt: skip
        n_start = (n_block_end - 1) * cfg.BLOCK_N
        kv_head = kv_head_of(work_tile, cfg)
        # Prefetch scales one tile ahead, pages two.
        if HAS_STORED_SCALES:
            page_table = stored_scales.PAGE_TABLE + work_tile.i_request.to(gl.int64) * stored_scales.stride_table_b
            page_ids = load_page_id_of_each_key(page_table, n_start, key_begin, key_end, cfg)
            next_scales = load_k_and_v_scales_zero_oob(
                stored_scales, page_ids, n_start, key_begin, key_end, kv_head, cfg
            )
            page_ids = load_page_id_of_each_key(page_table, n_start - cfg.BLOCK_N, key_begin, key_end, cfg)
        num_iters = num_n_blocks
        if cfg.COLUMN_SPLIT:  # in the last iteration V alone
            num_iters += (num_n_blocks > 0).to(gl.int32)
        for i in range(num_iters):
            is_edge = (n_start + cfg.BLOCK_N > key_end) | (n_start < key_begin)
            stage, _ = stage_and_phase(code_iter, cfg.STAGES)
            scales = (0, 0)
            if HAS_STORED_SCALES:
                scales = next_scales
                next_scales = load_k_and_v_scales_zero_oob(
                    stored_scales, page_ids, n_start - cfg.BLOCK_N, key_begin, key_end, kv_head, cfg
                )
                page_ids = load_page_id_of_each_key(page_table, n_start - 2 * cfg.BLOCK_N, key_begin, key_end, cfg)
                if cfg.SCALES_FILL_K and not cfg.COLUMN_SPLIT:
                    acquire_k_stages_and_store_k_scales(stored_scales, k_stages, scales[0], iter, cfg)
                elif cfg.SCALES_FILL_K:  # noqa: SIM102 - known to the compiler, unlike the other
                    if i < num_n_blocks:
                        acquire_k_stages_and_store_k_scales(stored_scales, k_stages, scales[0], iter, cfg)
                store_tile_v_scale_and_packed_row_scales(stored_scales, scales, code_iter, cfg)
                if cfg.K.BLOCK_SCALES:
                    store_block_scales_to_smem_by_part(stored_scales.k_block_scales_smem, scales[0], stage, cfg.K_PARTS)
                if cfg.V.BLOCK_SCALES:
                    store_block_scales_to_smem_by_part(stored_scales.v_block_scales_smem, scales[1], stage, cfg.V_PARTS)
                thread_barrier()
                if cfg.SCALES_FILL_K:
                    signal_scales_of_k_stages(k_stages, iter, i < num_n_blocks, cfg)
            # Dequantize K, then V.
            if cfg.COLUMN_SPLIT:
                if not cfg.QK_8BIT:  # noqa: SIM102 - known to the compiler, unlike the other
                    if i < num_n_blocks:
                        dequant_k_column_parts(
                            stored_scales, k_code_stages, k_stages, scales[0], stage, iter, code_iter, cfg
                        )
                if i > 0:
                    v_start = n_start + cfg.BLOCK_N
                    dequant_v_column_parts(
                        stored_scales, v_code_stages, v_stages, stage ^ 1, iter - 1, code_iter - 1,
                        key_begin - v_start, key_end - v_start, cfg,
                    )  # fmt: skip
            else:
                k_dequant_scales = stored_scales.row_scales_smem.index(stage)
                v_dequant_scales = k_dequant_scales
                k_token_scales_to_store = (stored_scales.k_scales_smem, scales[0], iter)
                if cfg.K.BLOCK_SCALES:
                    k_dequant_scales = stored_scales.k_block_scales_smem.index(stage)
                if cfg.V.BLOCK_SCALES:
                    v_dequant_scales = stored_scales.v_block_scales_smem.index(stage)
                if not cfg.QK_8BIT:
                    dequant_tile_and_signal_barriers(
                        k_code_stages, k_stages, k_dequant_scales, iter, code_iter, key_begin - n_start,
                        key_end - n_start, is_edge, k_token_scales_to_store, False, cfg,
                    )  # fmt: skip
                if cfg.FP8_PV:
                    transpose_v_tile_and_signal_barriers(
                        v_code_stages, v_stages, iter, code_iter, key_begin - n_start, key_end - n_start, is_edge, cfg
                    )
                else:
                    dequant_tile_and_signal_barriers(
                        v_code_stages, v_stages, v_dequant_scales, iter, code_iter, key_begin - n_start,
                        key_end - n_start, is_edge, k_token_scales_to_store, True, cfg,
                    )  # fmt: skip
            iter += 1
            code_iter += 1
            n_start -= cfg.BLOCK_N
        if cfg.COLUMN_SPLIT:
            iter -= num_iters - num_n_blocks
            code_iter -= num_iters - num_n_blocks
        num_done += 1
        mbarrier.wait(q_stages.full_barriers.index(I_CONVERTER), num_done & 1)
        work_tile, cached_range = read_work_tile_and_cached_range(tile_info.index(I_CONVERTER), True)
        mbarrier.arrive(q_stages.empty_barriers.index(I_CONVERTER), count=cfg.CONSUMER_WARPS)
