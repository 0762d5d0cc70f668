"""Epilogue: finished rows to outputs and their LSE."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .online_softmax import LN2, LOG2E


@gluon.jit
def cast_output_saturating_fp8(x, OUT, cfg: gl.constexpr):
    """Returns fp32 x in the dtype of OUT; fp8 saturates, NaN stays NaN."""
    if cfg.OUT_MAX > 0:
        x = gl.where(x != x, x, gl.minimum(gl.maximum(x, -cfg.OUT_MAX), cfg.OUT_MAX))
    return x.to(OUT.dtype.element_ty)


@gluon.jit
def compute_acc_scale_and_lse(
    row_max, row_sum, v_scale, SINKS, q_heads, m_row, cfg: gl.constexpr, LSE_OF_KEYS: gl.constexpr = False
):
    """Returns (acc_scale, LSE in natural log) of rows with a base-2 row_max and row_sum, and with the sinks of query
    q_heads, if any: each is one more score, of a value 0. LSE_OF_KEYS: the LSE leaves them out."""
    not_empty = row_sum != 0  # true for NaN
    safe_max = gl.where(not_empty, row_max, 0.0)
    denominator = row_sum
    if LSE_OF_KEYS:
        lse = gl.where(not_empty, (safe_max + gl.log2(gl.where(not_empty, row_sum, 1.0))) * LN2, float("-inf"))
    if cfg.HAS_SINKS:
        sink = gl.load(SINKS + q_heads, mask=m_row, other=0.0) * LOG2E
        max_with_sink = gl.maximum(safe_max, sink)  # a sink far above every score would overflow against `safe_max`
        rescale = gl.exp2(safe_max - max_with_sink)
        # A sink of +inf takes all; inf − inf would be NaN.
        denominator = row_sum * rescale + gl.where(sink == max_with_sink, 1.0, gl.exp2(sink - max_with_sink))
        v_scale *= rescale
        safe_max = max_with_sink
    denominator = gl.where(not_empty, denominator, 1.0)
    acc_scale = gl.where(not_empty, v_scale / denominator, 0.0)
    if not LSE_OF_KEYS:
        lse = gl.where(not_empty, (safe_max + gl.log2(denominator)) * LN2, float("-inf"))
    return acc_scale, lse


@gluon.jit
def token_head_and_mask_of_q_rows(m_block, h, q_begin, seqlen_q, LAYOUT: gl.constexpr, cfg: gl.constexpr):
    """Returns (tokens [BLOCK_M], query heads [BLOCK_M], row exists [BLOCK_M]) of an m_block."""
    o_r = m_block * cfg.BLOCK_M + gl.arange(0, cfg.BLOCK_M, LAYOUT)
    tokens = (q_begin + o_r // cfg.GROUP).to(gl.int64)
    return tokens, (h * cfg.GROUP + o_r % cfg.GROUP).to(gl.int64), o_r < seqlen_q * cfg.GROUP


@gluon.jit
def store_empty_output_of_padding_rows(
    OUT, LSE, i_token, T, i_cta, num_ctas, stride_out_t, stride_out_h, stride_lse_t, stride_lse_h, cfg: gl.constexpr,
    HEAD_DIM_PARTS: gl.constexpr = 1,
):  # fmt: skip
    """Stores output 0 and LSE −inf for query rows behind the last request.

    HEAD_DIM_PARTS: of a head, each of which counts as one in HEADS
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    o_d = gl.arange(0, HEAD_DIM_PARTS * cfg.PACK * cfg.BLOCK_DV, LAYOUT)
    i_token += i_cta
    while i_token < T:
        for head in range(cfg.HEADS // HEAD_DIM_PARTS * cfg.GROUP):
            p_out = OUT + i_token.to(gl.int64) * stride_out_t + head.to(gl.int64) * stride_out_h + o_d
            gl.store(p_out, (o_d * 0).to(gl.float32).to(OUT.dtype.element_ty), mask=o_d < HEAD_DIM_PARTS * cfg.DV)
            if cfg.HAS_LSE:
                gl.store(LSE + i_token.to(gl.int64) * stride_lse_t + head.to(gl.int64) * stride_lse_h, float("-inf"))
        i_token += num_ctas
