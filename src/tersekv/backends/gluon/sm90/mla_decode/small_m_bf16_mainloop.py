"""Main loop of MLA decode over 16-bit latents for few query rows (small_m_bf16.py): query, QK, softmax, PV.

Mask, lazy rescaling, full and empty stages: all in `mainloop_bf16`; combine: `combine.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import thread_barrier
from ..parts.epilogue import token_and_head_of_q_rows
from .params import SoftmaxState
from .small_m_fp8_mainloop import any_score_above, fold_row_sums, rescale_to_new_max

TILE_COLUMNS = gl.constexpr(64)  # columns of a copy tile
NUM_COLUMN_TILES = gl.constexpr(8)  # of a latent
RESCALE_THRESHOLD = gl.constexpr(16.0)  # P is at most 2^RESCALE_THRESHOLD before it is normalised


@gluon.jit
def load_query_tiles(tensors, q, work_tile, h, strides, cfg: gl.constexpr):
    """Loads the query into shared memory, by tiles of columns; the last is the rotary part."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = token_and_head_of_q_rows(
        work_tile.m_block, h, work_tile.q_begin, work_tile.num_q_rows, gl.SliceLayout(1, L), cfg
    )
    o_d = gl.arange(0, TILE_COLUMNS, gl.SliceLayout(0, L))
    p_q_nope = (tensors.Q_NOPE + tokens * strides.q_nope_t + heads * strides.q_nope_h)[:, None] + o_d[None, :]
    p_q_pe = (tensors.Q_PE + tokens * strides.q_pe_t + heads * strides.q_pe_h)[:, None] + o_d[None, :]
    column_tiles = ()  # all loads are in flight before the first is used
    for i in gl.static_range(NUM_COLUMN_TILES):
        column_tiles = column_tiles + (gl.load(p_q_nope + i * TILE_COLUMNS, mask=m_row[:, None], other=0.0),)
    column_tiles = column_tiles + (gl.load(p_q_pe, mask=m_row[:, None], other=0.0),)
    for i in gl.static_range(NUM_COLUMN_TILES + 1):
        q.index(i).store(column_tiles[i].to(gl.float32).to(q.dtype))
    fence_async_shared()


@gluon.jit
def zero_invalid_v(ckv, stage, num_valid, cfg: gl.constexpr):
    """Zeros rows past the tile's last key: 0 × NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    is_valid = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, L)) < num_valid
    for i in range(NUM_COLUMN_TILES):  # not unrolled: rare, and the main loop should stay small
        column_tile = ckv.index(stage * NUM_COLUMN_TILES + i)
        x = column_tile.load(L)
        column_tile.store(gl.where(is_valid[:, None], x, gl.full([cfg.BLOCK_N, TILE_COLUMNS], 0.0, x.dtype, L)))
    fence_async_shared()
    thread_barrier()  # else the compiler puts one after the branch


@gluon.jit
def compute_scores(q, kv_stages, stage, opaque_zero, S: gl.constexpr, cfg: gl.constexpr):
    """Returns QK of a tile: fp32 [BLOCK_N, BLOCK_M]."""
    ckv, k_pe = kv_stages.latents, kv_stages.pe
    NUM_PARTIAL_SCORES: gl.constexpr = 3 if cfg.BLOCK_M <= 16 else 2  # so that MMAs wait less for each other
    zero = gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, S)
    q_pe = q.index(opaque_zero + NUM_COLUMN_TILES).permute((1, 0))
    partial_scores = (warpgroup_mma(k_pe.index(stage), q_pe, zero, use_acc=False, is_async=True),)
    for i in gl.static_range(NUM_COLUMN_TILES):
        k, q_i = ckv.index(stage * NUM_COLUMN_TILES + i), q.index(opaque_zero + i).permute((1, 0))
        if i < NUM_PARTIAL_SCORES - 1:
            partial_scores = partial_scores + (warpgroup_mma(k, q_i, zero, use_acc=False, is_async=True),)
        else:
            partial_scores = partial_scores[1:] + (warpgroup_mma(k, q_i, partial_scores[0], is_async=True),)
    partial_scores = warpgroup_mma_wait(0, partial_scores)
    s = partial_scores[0]
    for i in gl.static_range(NUM_PARTIAL_SCORES - 1):
        s += partial_scores[i + 1]
    return s


@gluon.jit
def accumulate_pv(acc_o, ckv, stage, p_smem):
    """Returns acc_o + V, transposed, times P [BLOCK_N, BLOCK_M]."""
    out = ()
    for i in gl.static_range(NUM_COLUMN_TILES):
        out = out + (
            warpgroup_mma(ckv.index(stage * NUM_COLUMN_TILES + i).permute((1, 0)), p_smem, acc_o[i], is_async=True),
        )
    return warpgroup_mma_wait(0, out)


@gluon.jit
def mainloop_bf16(q, kv_stages, mbarriers, buffers, score_scale, work_tile, kv_iter, STAGES: gl.constexpr,
                  S: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Computes the n_blocks of a work tile; returns its SoftmaxState.

    As `mainloop_fp8`, which dequantises packed chunks with their scales to fp16; here column tiles need no conversion.
    """
    n_block_begin, n_block_end, num_keys, num_q_rows, row_begin = (
        work_tile.n_block_begin, work_tile.n_block_end, work_tile.num_keys, work_tile.num_q_rows,
        work_tile.m_block * cfg.BLOCK_M,
    )  # fmt: skip
    p_smem, vote_flags = buffers.p_smem, buffers.vote_flags
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    full, empty = mbarriers.full, mbarriers.empty
    row_max = gl.full([cfg.BLOCK_M], float("-inf"), gl.float32, COLUMN)
    row_sum = fold_row_sums(
        gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, S)
    )  # summed over all keys only at the end
    acc_o = ()
    for _ in gl.static_range(NUM_COLUMN_TILES):
        acc_o = acc_o + (gl.full([TILE_COLUMNS, cfg.BLOCK_M], 0.0, gl.float32, S),)
    o_key = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, S))
    q_position = num_keys - num_q_rows + (row_begin + gl.arange(0, cfg.BLOCK_M, COLUMN)) // cfg.GROUP
    for n_block in range(n_block_begin, n_block_end):
        iter = kv_iter + n_block - n_block_begin
        stage = iter % STAGES
        # Wait for the tile.
        mbarrier.wait(full.index(stage), (iter // STAGES) & 1)
        if (n_block + 1) * cfg.BLOCK_N > num_keys:
            zero_invalid_v(kv_stages.latents, stage, num_keys - n_block * cfg.BLOCK_N, cfg)
        # NOTE: `opaque_zero` is 0. A constant would make the compiler keep, and spill, descriptors of all tiles of q.
        opaque_zero = n_block >> 30
        # QK.
        s = compute_scores(q, kv_stages, stage, opaque_zero, S, cfg) * score_scale
        # Mask.
        if (n_block + 1) * cfg.BLOCK_N > num_keys - num_q_rows + 1:
            o_n = n_block * cfg.BLOCK_N + o_key
            s = gl.where((o_n < num_keys)[:, None] & (o_n[:, None] <= q_position[None, :]), s, float("-inf"))
        # Lazy rescaling: row_max is raised only where P would pass 2^RESCALE_THRESHOLD: rarely.
        if any_score_above(s, row_max + RESCALE_THRESHOLD, vote_flags, 0):
            row_max, row_sum, acc_o = rescale_to_new_max(gl.maximum(row_max, gl.max(s, 0)), row_max, row_sum, acc_o, S)
        # Softmax: P to shared memory.
        p = gl.exp2(s - gl.where(row_max == float("-inf"), 0.0, row_max)[None, :])
        row_sum += fold_row_sums(p)
        p_smem.index(opaque_zero).store(p.to(p_smem.dtype))
        fence_async_shared()
        # PV; release the stage.
        acc_o = accumulate_pv(acc_o, kv_stages.latents, stage, p_smem.index(opaque_zero))
        mbarrier.arrive(empty.index(stage))
    return SoftmaxState(row_max, gl.sum(gl.sum(row_sum, 1), 0), acc_o)
