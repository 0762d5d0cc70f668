"""Key parts of decode: the warps of a CTA divide the keys of one head, and combine their results in shared memory.

See `kernel`. A part that saw no key has a row_max of −inf and a row_sum of 0.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.epilogue import cast_output_saturating_fp8, compute_acc_scale_and_lse
from ..parts.online_softmax import SoftmaxState


@gluon.constexpr_function
def combine_layout(cfg, tile_cfg):
    """Returns the layout [KEY_PARTS, BLOCK_M, PACKED_V] in which a thread has all parts of its columns: of PACK
    accumulators together 8 adjacent columns."""
    columns = max(8 // cfg.PACK, 1)
    lanes = min(32, cfg.PACKED_V // columns)
    warps = tile_cfg.HEADS_PER_CTA * tile_cfg.WARPS_PER_HEAD
    return gl.BlockedLayout(
        [tile_cfg.HEADS_PER_CTA, 1, columns], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0]
    )  # fmt: skip


@gluon.constexpr_function
def _row_pair_layout(layout):
    """Returns the layout [KEY_PARTS, BLOCK_M, 2] in which a thread has what belongs to its rows of `layout`."""
    return gl.BlockedLayout(
        [*layout.size_per_thread[:2], 2], layout.threads_per_warp, layout.warps_per_cta, layout.order
    )


@gluon.jit
def combine_key_parts(state, cfg: gl.constexpr, tile_cfg: gl.constexpr):
    """Returns the SoftmaxState of all parts: row_max and row_sum [BLOCK_M], PACK accumulators [BLOCK_M, PACKED_V]."""
    C: gl.constexpr = combine_layout(cfg, tile_cfg)
    STATS: gl.constexpr = _row_pair_layout(C)
    ROWS: gl.constexpr = gl.SliceLayout(2, C)
    # Exchange row_max and row_sum, in one conversion.
    row_max, row_sum = gl.convert_layout(gl.join(state.row_max, state.row_sum), STATS).split()
    row_max = gl.convert_layout(row_max, ROWS, assert_trivial=True)
    row_sum = gl.convert_layout(row_sum, ROWS, assert_trivial=True)
    total_max = gl.max(row_max, 0)
    rescale = gl.exp2(row_max - gl.where(total_max == float("-inf"), 0.0, total_max)[None, :])
    # Exchange the accumulators, one after the other: they use the same memory.
    acc_o = ()
    for i in gl.static_range(gl.constexpr(cfg.PACK)):
        x = gl.convert_layout(state.acc_o[i].permute([0, 2, 1]), C)
        acc_o = acc_o + (gl.sum(x * rescale[:, :, None], 0),)
    ROW: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, C))
    return SoftmaxState(
        gl.convert_layout(total_max, ROW, assert_trivial=True),
        gl.convert_layout(gl.sum(row_sum * rescale, 0), ROW, assert_trivial=True),
        acc_o,
    )


@gluon.jit
def interleave_columns(acc_o, cfg: gl.constexpr):
    """Returns PACK accumulators [BLOCK_M, PACKED_V] as [BLOCK_M, DV]; accumulator j has columns PACK * i + j."""
    if cfg.PACK == 1:
        out = acc_o[0]
    elif cfg.PACK == 2:
        out = gl.join(acc_o[0], acc_o[1]).reshape([cfg.BLOCK_M, 2 * cfg.PACKED_V])
    else:
        gl.static_assert(cfg.PACK == 4)
        even_and_odd = gl.join(gl.join(acc_o[0], acc_o[2]), gl.join(acc_o[1], acc_o[3]))
        out = even_and_odd.reshape([cfg.BLOCK_M, 4 * cfg.PACKED_V])
    return out


@gluon.jit
def store_partial_result(
    SPLIT_WORKSPACE, partial_slot, state, kv_head, num_q_rows_left, cfg: gl.constexpr, tile_cfg: gl.constexpr
):
    """Stores the partial result of a split work tile as `kernel.store_partial_acc_max_and_sum`; state: by
    `combine_key_parts`."""
    p_slot = SPLIT_WORKSPACE + partial_slot.to(gl.int64) * (cfg.BLOCK_M * cfg.PARTIAL_COLUMNS)
    O: gl.constexpr = state.acc_o[0].type.layout
    o_r = gl.arange(0, cfg.BLOCK_M, gl.SliceLayout(1, O))
    o_d = gl.arange(0, cfg.PACKED_V, gl.SliceLayout(0, O))
    p_acc, m_row = p_slot + (o_r * cfg.PARTIAL_COLUMNS)[:, None] + o_d[None, :], (o_r < num_q_rows_left)[:, None]
    for j in gl.static_range(gl.constexpr(cfg.PACK)):
        gl.store(p_acc + j * cfg.BLOCK_DV, state.acc_o[j], mask=m_row)
    o_r = gl.arange(0, cfg.BLOCK_M, state.row_max.type.layout)
    p_row = p_slot + o_r * cfg.PARTIAL_COLUMNS + cfg.PARTIAL_COLUMNS
    gl.store(p_row - 2, state.row_max, mask=o_r < num_q_rows_left)
    gl.store(p_row - 1, state.row_sum, mask=o_r < num_q_rows_left)


@gluon.jit
def store_output_and_lse(
    tensors, strides, state, v_scale_times_out_scale, kv_head, work_tile, cfg: gl.constexpr
):  # fmt: skip
    """Stores rows of an unsplit work tile to `out`, and their LSE; state: by `combine_key_parts`."""
    OUT, LSE = tensors.OUT, tensors.LSE
    ROW: gl.constexpr = state.row_max.type.layout
    o_r = work_tile.m_block * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, ROW)
    q_heads = (kv_head * cfg.GROUP + o_r % cfg.GROUP).to(gl.int64)
    tokens = (work_tile.q_begin + o_r // cfg.GROUP).to(gl.int64)
    m_row = o_r < work_tile.seqlen_q * cfg.GROUP
    v_scale = v_scale_times_out_scale * cfg.V_RESIDUAL_SCALE
    acc_scale, lse = compute_acc_scale_and_lse(
        state.row_max, state.row_sum, v_scale, tensors.SINKS, q_heads, m_row, cfg
    )
    if cfg.HAS_LSE:
        gl.store(LSE + tokens * strides.lse_t + q_heads * strides.lse_h, lse, mask=m_row)
    scaled = ()
    for j in gl.static_range(gl.constexpr(cfg.PACK)):
        scaled = scaled + (state.acc_o[j] * acc_scale[:, None],)
    x = interleave_columns(scaled, cfg)
    O: gl.constexpr = x.type.layout
    ROW_O: gl.constexpr = gl.SliceLayout(1, O)
    o_row = gl.convert_layout(tokens * strides.out_t + q_heads * strides.out_h, ROW_O, assert_trivial=True)
    m_row = gl.convert_layout(m_row, ROW_O, assert_trivial=True)
    p_out = OUT + o_row[:, None] + gl.arange(0, cfg.PACK * cfg.PACKED_V, gl.SliceLayout(0, O))[None, :]
    gl.store(p_out, cast_output_saturating_fp8(x, OUT, cfg), mask=m_row[:, None])
