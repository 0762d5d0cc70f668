"""The query of a work tile as an operand of QK: in the keys' dtype, rotated as keys are, with the score scale's sign;
of 16 bits or of 8 (`store_rows_as_int8`).

Mask, full stage, rescale, combine: none here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from ...versions import reinterpret, thread_barrier
from ..parts.dequant import biased_exponent_and_inv_scale_of_rows, exponent_to_float
from ..parts.hadamard import blockwise_hadamard_unnormalized, load_normalized_signs_times_channel_scales_if_any
from .tile_scheduler import head_columns_of_tile

ROUND_TO_INT = gl.constexpr(1.5 * 2.0**23)  # added, an integer is in the lowest bits of fp32
MIN_Q_MAX = gl.constexpr(1e-30)  # of a row that is divided by its largest magnitude


@gluon.constexpr_function
def score_layout(cfg):
    return gl.NVMMADistributedLayout([3, 0], [cfg.CONSUMER_WARPS, 1], [16, cfg.BLOCK_N, 32 if cfg.QK_8BIT else 16])


@gluon.jit
def view_query_as_8bit(q_stages, DTYPE: gl.constexpr, cfg: gl.constexpr):
    """Returns a view of 8-bit query rows: they fill the first half of their 16-bit memory."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(min(cfg.D, 128), 8, 2)
    return reinterpret(q_stages.tiles, DTYPE, [2, cfg.CONSUMER_ROWS, cfg.D], LAYOUT).index(0)


@gluon.jit
def store_rows_as_int8(q_stages, x, cfg: gl.constexpr):
    """Quantizes rows in place; returns (a view of them, the scales of their scores). A row that is not finite has such
    a scale."""
    # NaN is the largest of integers, while a maximum of floats would drop it.
    row_max = gl.max(x.to(gl.int32, bitcast=True) & 0x7FFFFFFF, 1).to(gl.float32, bitcast=True)
    row_max = gl.where(row_max < MIN_Q_MAX, MIN_Q_MAX, row_max)
    codes = (x * (127.0 / row_max)[:, None] + ROUND_TO_INT).to(gl.int32, bitcast=True).to(gl.int8)
    thread_barrier()  # all threads have read the rows that are now overwritten
    smem_q = view_query_as_8bit(q_stages, gl.int8, cfg)
    smem_q.store(codes)
    return smem_q, row_max * (1.0 / 127.0)


@gluon.jit
def multiply_smem_q_by_sign_and_fence(smem_q, score_scale_sign, LAYOUT: gl.constexpr):
    """Multiplies rows in shared memory by the score scale's sign."""
    if score_scale_sign < 0:
        smem_q.store((smem_q.load(LAYOUT).to(gl.float32) * -1.0).to(smem_q.dtype))
        fence_async_shared()
        thread_barrier()


@gluon.jit
def prepare_loaded_whole_query_and_q_scales(
    q_stages, score_scale_sign, rotation, kv_head, LOADED_Q_DTYPE: gl.constexpr, cfg: gl.constexpr
):
    """Returns (query rows as an operand in shared memory, 16-bit or in the keys' dtype, q_scales of their scores).

    bf16 rows fit fp16 only after a power of two is divided out of each row; q_scales multiply it back. The query takes
    the score scale's sign, so that the row maximum of the scaled scores is that of the products.
    """
    x16 = q_stages.tiles.index(0)
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [cfg.CONSUMER_WARPS, 1], [1, 0])
    q_scales = gl.full([cfg.CONSUMER_ROWS], 1.0, gl.float32, gl.SliceLayout(1, score_layout(cfg)))
    if x16.dtype == LOADED_Q_DTYPE and not cfg.K_ROTATION.ENABLED and not cfg.INT8_Q:
        multiply_smem_q_by_sign_and_fence(x16, score_scale_sign, LOAD_LAYOUT)
    elif cfg.QK_8BIT and not cfg.INT8_Q:
        x16 = view_query_as_8bit(q_stages, LOADED_Q_DTYPE, cfg)
        multiply_smem_q_by_sign_and_fence(x16, score_scale_sign, LOAD_LAYOUT)
    else:
        x = x16
        if LOADED_Q_DTYPE.primitive_bitwidth == 8:
            x = view_query_as_8bit(q_stages, LOADED_Q_DTYPE, cfg)
        else:
            tiles = q_stages.tiles
            x = reinterpret(tiles, LOADED_Q_DTYPE, tiles.shape, tiles.layout).index(0)
        x = x.load(LOAD_LAYOUT).to(gl.float32) * score_scale_sign
        if cfg.K_ROTATION.ENABLED:
            # Rotate and scale query rows like the cache's keys.
            ROTATION: gl.constexpr = cfg.K_ROTATION
            o_d = head_columns_of_tile(x.shape[1], gl.SliceLayout(0, x.type.layout), kv_head, False, cfg)
            column_scales = load_normalized_signs_times_channel_scales_if_any(
                rotation.K_SIGNS, rotation.K_CHANNEL_SCALES, kv_head, o_d, cfg.HEAD_DIM, ROTATION
            )
            x = x * column_scales[None, :]
            if ROTATION.ROTATED:
                x = blockwise_hadamard_unnormalized(x, 1, cfg.HEAD_DIM & -cfg.HEAD_DIM)
        if cfg.INT8_Q:
            x16, row_scales = store_rows_as_int8(q_stages, x, cfg)
            q_scales = gl.convert_layout(row_scales, q_scales.type.layout)
        elif gl.bfloat16 == LOADED_Q_DTYPE or cfg.K_ROTATION.ENABLED:
            exponent, inv_scale = biased_exponent_and_inv_scale_of_rows(gl.max(gl.abs(x), 1))
            x = x * inv_scale[:, None]
            q_scales = gl.convert_layout(exponent_to_float(exponent), q_scales.type.layout)
        if not cfg.INT8_Q:
            thread_barrier()  # all threads have read the rows that are now overwritten
            x16.store(x.to(x16.dtype))
        fence_async_shared()
        thread_barrier()
    return x16, q_scales


@gluon.jit
def view_query_parts_as(q_stages, DTYPE: gl.constexpr):
    """Returns a view of the parts of the query as DTYPE. 8-bit parts fill the first half of the memory."""
    PARTS: gl.constexpr = q_stages.tiles.shape[0] * 16 // DTYPE.primitive_bitwidth
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(128, DTYPE.primitive_bitwidth, 2)
    return reinterpret(q_stages.tiles, DTYPE, [PARTS, q_stages.tiles.shape[1], q_stages.tiles.shape[2]], LAYOUT)


@gluon.jit
def prepare_loaded_query_parts_and_q_scales(
    q_stages, score_scale_sign, LOADED_Q_DTYPE: gl.constexpr, cfg: gl.constexpr
):
    """Does `prepare_loaded_whole_query_and_q_scales` for a query in parts, of which registers hold one. Returns (a
    part, q_scales).

    NOTE: loops carry what is returned; `wait_k_and_start_qk` takes the parts from q_stages.
    """
    LOAD_LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [cfg.CONSUMER_WARPS, 1], [1, 0])
    PARTS: gl.constexpr = cfg.K_PARTS
    x16, x = q_stages.tiles, view_query_parts_as(q_stages, LOADED_Q_DTYPE)
    q_scales = gl.full([cfg.CONSUMER_ROWS], 1.0, gl.float32, gl.SliceLayout(1, score_layout(cfg)))
    if x16.dtype == LOADED_Q_DTYPE or cfg.QK_8BIT:
        for part in gl.static_range(PARTS):
            multiply_smem_q_by_sign_and_fence(x.index(part), score_scale_sign, LOAD_LAYOUT)
    else:
        inv_scale = gl.full([cfg.CONSUMER_ROWS], 1.0, gl.float32, gl.SliceLayout(1, LOAD_LAYOUT))
        if gl.bfloat16 == LOADED_Q_DTYPE:
            row_max = inv_scale * 0.0
            for part in gl.static_range(PARTS):
                row_max = gl.maximum(row_max, gl.max(gl.abs(x.index(part).load(LOAD_LAYOUT).to(gl.float32)), 1))
            exponent, inv_scale = biased_exponent_and_inv_scale_of_rows(row_max)
            q_scales = gl.convert_layout(exponent_to_float(exponent), q_scales.type.layout)
        for i in gl.static_range(PARTS):  # from the last: an 8-bit part is overwritten by those with a lower index
            part = x.index(PARTS - 1 - i).load(LOAD_LAYOUT).to(gl.float32) * (inv_scale * score_scale_sign)[:, None]
            thread_barrier()  # all threads have read the rows that are now overwritten
            x16.index(PARTS - 1 - i).store(part.to(x16.dtype))
        fence_async_shared()
        thread_barrier()
    return x16.index(0), q_scales


@gluon.jit
def prepare_loaded_query_and_q_scales(
    q_stages, score_scale_sign, rotation, kv_head, LOADED_Q_DTYPE: gl.constexpr, cfg: gl.constexpr
):
    """Returns (query operand, q_scales): of one tile, or of parts in shared memory."""
    if cfg.COLUMN_SPLIT:
        return prepare_loaded_query_parts_and_q_scales(q_stages, score_scale_sign, LOADED_Q_DTYPE, cfg)
    else:
        return prepare_loaded_whole_query_and_q_scales(
            q_stages, score_scale_sign, rotation, kv_head, LOADED_Q_DTYPE, cfg
        )
