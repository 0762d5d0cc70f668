"""Main loop of MLA decode over 8-bit latents for few query rows (small_m_fp8.py): query, QK, softmax, PV.

Mask, lazy rescaling, full and empty stages: all in `mainloop_fp8`; combine: `small_m_consumer`, `combine.py`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ....triton.parts.dequant import E4M3_PTX
from ...versions import reinterpret, thread_barrier
from ..parts.epilogue import token_and_head_of_q_rows
from .params import SoftmaxState

WARP_ANY_PTX = gl.constexpr(
    """{
    .reg .pred p;
    setp.gt.f32 p, $1, 0f00000000;
    vote.sync.any.pred p, p, 0xffffffff;
    selp.b32 $0, 1, 0, p;
    }"""
)
RESCALE_THRESHOLD = gl.constexpr(8.0)  # P is at most 2^RESCALE_THRESHOLD before it is normalised, which fp16 holds
MIN_SCALE = gl.constexpr(1e-30)  # of a key's chunks: its reciprocal is finite


@gluon.jit
def dequant_packed(packed):
    """Dequantises 16-bit packed pairs to two fp16 tiles."""
    return gl.inline_asm_elementwise(E4M3_PTX, "=r,=r,r", [packed], [gl.float16, gl.float16], True, 2)


@gluon.jit
def load_query_chunk(p_row, m_row, FIRST_COLUMN: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads columns FIRST_COLUMN … of the query rows: [rows, COLUMNS]."""
    o_d = FIRST_COLUMN + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return gl.load(p_row[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0)


@gluon.jit
def store_two_terms(x, smem, Q_TERMS: gl.constexpr):
    """Stores x as e4m3 in the first rows of `smem`, and the rest, x − e4m3(x), in the rows behind."""
    NUM_ROWS: gl.constexpr = x.shape[0]
    high = x.to(gl.float8e4nv)
    smem.slice(0, NUM_ROWS).store(high)
    if Q_TERMS == 2:
        smem.slice(NUM_ROWS, NUM_ROWS).store((x - high.to(gl.float32)).to(gl.float8e4nv))


@gluon.jit
def load_query_as_e4m3_terms(tensors, q, work_tile, h, strides, I_CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr,
                             Q_TERMS: gl.constexpr, LAYOUT: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Loads this warpgroup's columns of the query into shared memory; returns q_scale of the scores [BLOCK_M].

    Each row is scaled by a power of two so that its largest element lies in [128, 256): elements down to 2^-10 of that
    are still exact in two e4m3 terms.
    """
    q_pe = q.pe.index(0)
    CHUNKS: gl.constexpr = cfg.CHUNKS
    CHUNKS_PER_CONSUMER: gl.constexpr = CHUNKS // NUM_CONSUMERS
    WIDTH: gl.constexpr = 2 * cfg.CHUNK
    WIDTH_PE: gl.constexpr = q_pe.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = token_and_head_of_q_rows(
        work_tile.m_block, h, work_tile.q_begin, work_tile.num_q_rows, gl.SliceLayout(1, L), cfg
    )
    p_q_nope = tensors.Q_NOPE + tokens * strides.q_nope_t + heads * strides.q_nope_h
    p_q_pe = tensors.Q_PE + tokens * strides.q_pe_t + heads * strides.q_pe_h
    # All loads are in flight before the first is used.
    q_pe_rows, chunks = load_query_chunk(p_q_pe, m_row, 0, WIDTH_PE, L), ()
    for i in gl.static_range(CHUNKS):
        chunks = chunks + (load_query_chunk(p_q_nope, m_row, i * WIDTH, WIDTH, L),)
    inv_scale = gl.full([cfg.BLOCK_M], 1.0, gl.float32, gl.SliceLayout(1, L))
    q_scale = inv_scale
    if Q_TERMS == 2:
        abs_max = gl.max(gl.abs(q_pe_rows.to(gl.float32)), 1)
        for i in gl.static_range(CHUNKS):
            abs_max = gl.maximum(abs_max, gl.max(gl.abs(chunks[i].to(gl.float32)), 1))
        exponent = gl.maximum((abs_max.to(gl.int32, bitcast=True) >> 23) & 0xFF, 8)
        inv_scale = ((261 - exponent) << 23).to(gl.float32, bitcast=True)
        q_scale = gl.where(exponent == 255, float("nan"), ((exponent - 7) << 23).to(gl.float32, bitcast=True))
    for i in gl.static_range(CHUNKS_PER_CONSUMER):
        scaled = chunks[I_CONSUMER * CHUNKS_PER_CONSUMER + i].to(gl.float32) * inv_scale[:, None]
        store_two_terms(scaled, q.latents.index(I_CONSUMER * CHUNKS_PER_CONSUMER + i), Q_TERMS)
    if I_CONSUMER == NUM_CONSUMERS - 1:
        scaled = q_pe_rows.to(gl.float32) * inv_scale[:, None]
        if q_pe.dtype == gl.bfloat16:
            q_pe.store(scaled.to(gl.bfloat16))
        else:
            store_two_terms(scaled, q_pe, Q_TERMS)
    fence_async_shared()
    return gl.convert_layout(q_scale, LAYOUT)


@gluon.jit
def view_as_packed(ckv):
    """Returns a view of a tile of codes in shared memory as 16-bit packed pairs."""
    return reinterpret(
        ckv,
        gl.int16,
        [ckv.shape[0], ckv.shape[1] // 2],
        gl.NVMMASharedLayout(ckv.layout.swizzle_byte_width, 16),
    )


@gluon.jit
def zero_invalid_v(ckv, stage, num_valid, cfg: gl.constexpr):
    """Zeros rows past the tile's last key: 0 × NaN is NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    is_valid = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, L)) < num_valid
    for i in range(cfg.CHUNKS):  # not unrolled: rare, and the main loop should stay small
        chunk = view_as_packed(ckv.index(stage * cfg.CHUNKS + i))
        x = chunk.load(L)
        chunk.store(gl.where(is_valid[:, None], x, 0))
    thread_barrier()  # else the compiler puts one after the branch


@gluon.jit
def sum_query_terms(s, S: gl.constexpr, Q_TERMS: gl.constexpr):
    """Returns scores summed over the query's terms: fp32 [BLOCK_N, ROWS]."""
    if Q_TERMS == 2:
        BLOCK_N: gl.constexpr = s.shape[0]
        ROWS: gl.constexpr = s.shape[1] // 2
        high, low = gl.split(gl.permute(gl.reshape(s, [BLOCK_N, 2, ROWS]), (0, 2, 1)))
        s = high + low
    return gl.convert_layout(s, S)


@gluon.jit
def load_v_chunk(ckv, stage, i: gl.constexpr, O: gl.constexpr, cfg: gl.constexpr):
    """Loads a tile's i-th chunk of V, transposed, as two fp16 operands in registers."""
    return dequant_packed(
        view_as_packed(ckv.index(stage * cfg.CHUNKS + i)).permute((1, 0)).load(gl.DotOperandLayout(0, O, 2))
    )


@gluon.jit
def compute_scores(kv_stages, stage, q, opaque_zero, Q_TERMS: gl.constexpr, S: gl.constexpr, S8: gl.constexpr,
                   O: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Returns (QK: fp32 [BLOCK_N, BLOCK_M], the first chunk of V where registers allow, else ())."""
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = kv_stages.latents, kv_stages.pe
    q_nope, q_pe = q
    zero = gl.full([cfg.BLOCK_N, Q_TERMS * cfg.BLOCK_M], 0.0, gl.float32, S8)
    x = warpgroup_mma(k_pe.index(stage), q_pe.index(opaque_zero).permute((1, 0)), zero, use_acc=False, is_async=True)
    first_v = ()
    if cfg.BLOCK_M <= 16:
        partial_scores = (x,)
        for i in gl.static_range(CHUNKS):
            q_i = q_nope.index(opaque_zero + i).permute((1, 0))
            partial_scores = partial_scores + (
                warpgroup_mma(ckv.index(stage * CHUNKS + i), q_i, zero, use_acc=False, is_async=True),
            )
        first_v = load_v_chunk(ckv, stage, 0, O, cfg)  # overlaps the MMAs
        partial_scores = warpgroup_mma_wait(0, partial_scores)
        s = partial_scores[0]
        for i in gl.static_range(CHUNKS):
            s += partial_scores[i + 1]
    else:
        s = zero
        for i in gl.static_range(CHUNKS):
            x = warpgroup_mma_wait(0, [x])
            s = x if i == 0 else s + x
            q_i = q_nope.index(opaque_zero + i).permute((1, 0))
            x = warpgroup_mma(ckv.index(stage * CHUNKS + i), q_i, zero, use_acc=False, is_async=True)
        s += warpgroup_mma_wait(0, [x])
    return sum_query_terms(s, S, Q_TERMS), first_v


@gluon.jit
def compute_scaled_scores(kv_stages, stage, q, opaque_zero, scales, Q_TERMS: gl.constexpr, S: gl.constexpr,
                          S8: gl.constexpr, cfg: gl.constexpr):  # fmt: skip
    """Returns QK where each chunk of a key has a scale and the rotary part is bf16: fp32 [BLOCK_N, BLOCK_M]."""
    CHUNKS: gl.constexpr = cfg.CHUNKS
    ckv, k_pe = kv_stages.latents, kv_stages.pe
    q_nope, q_pe = q
    zero = gl.full([cfg.BLOCK_N, Q_TERMS * cfg.BLOCK_M], 0.0, gl.float32, S8)
    s = gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, S)
    s = warpgroup_mma(k_pe.index(stage), q_pe.index(opaque_zero).permute((1, 0)), s, use_acc=False, is_async=True)
    if cfg.BLOCK_M <= 16:
        partial_scores = (s,)
        for i in gl.static_range(CHUNKS):
            q_i = q_nope.index(opaque_zero + i).permute((1, 0))
            partial_scores = partial_scores + (
                warpgroup_mma(ckv.index(stage * CHUNKS + i), q_i, zero, use_acc=False, is_async=True),
            )
        partial_scores = warpgroup_mma_wait(0, partial_scores)
        s = partial_scores[0]
        for i in gl.static_range(CHUNKS):
            s += sum_query_terms(partial_scores[i + 1], S, Q_TERMS) * scales[i][:, None]
    else:
        s = warpgroup_mma_wait(0, [s])
        for i in gl.static_range(CHUNKS):
            q_i = q_nope.index(opaque_zero + i).permute((1, 0))
            x = warpgroup_mma(ckv.index(stage * CHUNKS + i), q_i, zero, use_acc=False, is_async=True)
            s += sum_query_terms(warpgroup_mma_wait(0, [x]), S, Q_TERMS) * scales[i][:, None]
    return s


@gluon.jit
def load_group_scales(smem, num_valid, COLUMN: gl.constexpr):
    """Loads the four scales of each key of a tile, [BLOCK_N] each; 1 past the last key."""
    # Each thread holds the scales of its two rows of scores.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    x = smem.load(L)
    is_valid = gl.arange(0, 64, gl.SliceLayout(1, L)) < num_valid
    x = gl.where(is_valid[:, None], x, 1.0)
    even, odd = gl.split(gl.reshape(x, [64, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    return (
        gl.convert_layout(s0, COLUMN), gl.convert_layout(s1, COLUMN), gl.convert_layout(s2, COLUMN),
        gl.convert_layout(s3, COLUMN),
    )  # fmt: skip


@gluon.jit
def accumulate_pv(
    acc_o, ckv, stage, first_v, p_smem, I_CONSUMER: gl.constexpr, SAVE_REGISTERS: gl.constexpr, O: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Returns acc_o + V, transposed, times P in shared memory [BLOCK_N, BLOCK_M]; with group scales, one P per chunk.

    SAVE_REGISTERS: dequantise a chunk only after the MMA of the one before.
    """
    CHUNKS: gl.constexpr = cfg.CHUNKS
    out, num_work_tiles = (), ()
    for i in gl.static_range(CHUNKS):
        if SAVE_REGISTERS and i > 0:
            num_work_tiles = num_work_tiles + warpgroup_mma_wait(0, [out[2 * i - 2], out[2 * i - 1]])
        v = first_v if i == 0 and len(first_v) == 2 else load_v_chunk(ckv, stage, i, O, cfg)
        p = p_smem.index(I_CONSUMER * CHUNKS + i if cfg.GROUP_SCALES else I_CONSUMER)
        for j in gl.static_range(2):
            out = out + (warpgroup_mma(v[j], p, acc_o[2 * i + j], is_async=True),)
        if not SAVE_REGISTERS and i > 0:
            num_work_tiles = num_work_tiles + warpgroup_mma_wait(2, [out[2 * i - 2], out[2 * i - 1]])
    return num_work_tiles + warpgroup_mma_wait(0, [out[2 * CHUNKS - 2], out[2 * CHUNKS - 1]])


@gluon.jit
def fold_row_sums(p):
    """Returns sums of P over the keys that one thread holds: [BLOCK_N / 16, 8, BLOCK_M]."""
    return gl.sum(gl.reshape(p, [p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def any_score_above(s, threshold, vote_flags, I_CONSUMER: gl.constexpr):
    """Returns whether any score exceeds its row's threshold, by a vote in each warp and its flag in shared memory."""
    ROWS: gl.constexpr = s.shape[1]
    x = gl.reshape(s - threshold[None, :], [4, 2, 8, ROWS // 8, 4, 2])
    x = gl.max(gl.max(gl.max(x, 5), 3), 1)  # of what one thread holds
    x = gl.inline_asm_elementwise(WARP_ANY_PTX, "=r,f", [x], gl.int32, is_pure=False, pack=1)
    votes = vote_flags.index(I_CONSUMER)
    votes.store(gl.reshape(gl.permute(x.to(gl.int8), (1, 2, 0)), [32, 4]))
    ALL: gl.constexpr = gl.DistributedLinearLayout([[0, 1], [0, 2]], [[0, 0]] * 5, [[0, 0]] * 2, [], [1, 4])
    return gl.max(gl.max(votes.slice(0, 1).load(ALL).to(gl.int32), 1), 0) > 0


@gluon.jit
def rescale_to_new_max(row_max_new, row_max, row_sum, acc_o, O: gl.constexpr):
    """Returns (row_max_new, row_sum, acc_o), the latter two rescaled from row_max to row_max_new."""
    L_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, row_sum.type.layout))
    rescale = gl.exp2(row_max - gl.where(row_max_new == float("-inf"), 0.0, row_max_new))
    row_sum = row_sum * gl.convert_layout(rescale, L_COLUMN)[None, :][:, None, :]
    rescale = gl.convert_layout(rescale, gl.SliceLayout(0, O))
    out = ()
    for i in gl.static_range(len(acc_o)):
        out = out + (acc_o[i] * rescale[None, :],)
    return row_max_new, row_sum, out


@gluon.jit
def mainloop_fp8(q, kv_stages, mbarriers, buffers, score_scale, work_tile, kv_iter, I_CONSUMER: gl.constexpr,
                 NUM_CONSUMERS: gl.constexpr, Q_TERMS: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
                 cfg: gl.constexpr):  # fmt: skip
    """Computes this warpgroup's n_blocks of a work tile; returns its SoftmaxState."""
    S8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, cfg.BLOCK_M * Q_TERMS, 32])
    O: gl.constexpr = S
    n_block_begin, n_block_end, num_keys, num_q_rows, row_begin = (
        work_tile.n_block_begin, work_tile.n_block_end, work_tile.num_keys, work_tile.num_q_rows,
        work_tile.m_block * cfg.BLOCK_M,
    )  # fmt: skip
    p_smem, vote_flags = buffers.p_smem, buffers.vote_flags
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    CHUNKS: gl.constexpr = cfg.CHUNKS
    full, empty = mbarriers.full, mbarriers.empty
    NUM_FULL_BARRIERS: gl.constexpr = full.shape[0]
    row_max = gl.full([cfg.BLOCK_M], float("-inf"), gl.float32, COLUMN)
    row_sum = fold_row_sums(
        gl.full([cfg.BLOCK_N, cfg.BLOCK_M], 0.0, gl.float32, S)
    )  # summed over all keys only at the end
    acc_o = ()
    for _ in gl.static_range(2 * CHUNKS):
        acc_o = acc_o + (gl.full([cfg.CHUNK, cfg.BLOCK_M], 0.0, gl.float32, O),)
    o_key = gl.arange(0, cfg.BLOCK_N, gl.SliceLayout(1, S))
    q_position = num_keys - num_q_rows + (row_begin + gl.arange(0, cfg.BLOCK_M, COLUMN)) // cfg.GROUP
    for n_block in range(n_block_begin + I_CONSUMER, n_block_end, NUM_CONSUMERS):
        iter = kv_iter + n_block - n_block_begin
        stage = iter % STAGES
        # Wait for the tile.
        mbarrier.wait(full.index(iter % NUM_FULL_BARRIERS), (iter // NUM_FULL_BARRIERS) & 1)
        if (n_block + 1) * cfg.BLOCK_N > num_keys:
            zero_invalid_v(kv_stages.latents, stage, num_keys - n_block * cfg.BLOCK_N, cfg)
        # NOTE: `opaque_zero` is 0. A constant would make the compiler keep, and spill, descriptors of all tiles of q.
        opaque_zero = n_block >> 30
        # QK.
        if cfg.GROUP_SCALES:
            scales = load_group_scales(
                kv_stages.scales.index(stage), num_keys - n_block * cfg.BLOCK_N, gl.SliceLayout(1, S)
            )
            s, first_v = (
                compute_scaled_scores(kv_stages, stage, q, opaque_zero, scales, Q_TERMS, S, S8, cfg)
                * score_scale[None, :],
                (),
            )
            # The key's largest scale joins the exponent: the ratios to it, which multiply P, lie in [−1, 1].
            max_group_scale = gl.full([cfg.BLOCK_N], MIN_SCALE, gl.float32, gl.SliceLayout(1, S))
            for i in gl.static_range(CHUNKS):
                max_group_scale = gl.maximum(max_group_scale, gl.abs(scales[i]))
            s += gl.log2(max_group_scale)[:, None]
        else:
            s, first_v = compute_scores(kv_stages, stage, q, opaque_zero, Q_TERMS, S, S8, O, cfg)
            s *= score_scale[None, :]
        # Mask.
        if (n_block + 1) * cfg.BLOCK_N > num_keys - num_q_rows + 1:
            o_n = n_block * cfg.BLOCK_N + o_key
            s = gl.where((o_n < num_keys)[:, None] & (o_n[:, None] <= q_position[None, :]), s, float("-inf"))
        # Lazy rescaling: row_max is raised only where P would pass 2^RESCALE_THRESHOLD: rarely.
        if any_score_above(s, row_max + RESCALE_THRESHOLD, vote_flags, I_CONSUMER):
            row_max, row_sum, acc_o = rescale_to_new_max(gl.maximum(row_max, gl.max(s, 0)), row_max, row_sum, acc_o, O)
        # Softmax: P to shared memory.
        safe_max = gl.where(row_max == float("-inf"), 0.0, row_max)
        p = gl.exp2(s - safe_max[None, :])
        if cfg.GROUP_SCALES:
            inv_group_scale = 1.0 / max_group_scale
            row_sum += fold_row_sums(p * inv_group_scale[:, None])
            for i in gl.static_range(CHUNKS):
                p_smem.index(I_CONSUMER * CHUNKS + i).store((p * (scales[i] * inv_group_scale)[:, None]).to(gl.float16))
        else:
            row_sum += fold_row_sums(p)
            p_smem.index(I_CONSUMER).store(p.to(gl.float16))
        fence_async_shared()
        # PV; release the stage.
        acc_o = accumulate_pv(acc_o, kv_stages.latents, stage, first_v, p_smem, I_CONSUMER, cfg.BLOCK_M >= 32, O, cfg)
        mbarrier.arrive(empty.index(stage))
    return SoftmaxState(row_max, gl.sum(gl.sum(row_sum, 1), 0), acc_o)
