"""Online softmax of a tile of scores: mask, softcap, running row_max and rescale."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.online_softmax import apply_softcap, rowwise_max

# P in e4m3, which holds 2^-9 to 448, is at most 2^LOG2_P_MAX. It is relative to its own block's maximum, or small P
# would be lost beside a large one of another block; but at most 2^40 below the row maximum: sums must not leave fp32.
LOG2_P_MAX, MAX_LOG2_BELOW_ROW_MAX = gl.constexpr(8.0), gl.constexpr(40.0)


class FP8RowMax(NamedTuple):
    """For P in e4m3: the offset subtracted from the scores, and the running row maximum."""

    row_max: gl.tensor
    running_max: gl.tensor


@gluon.jit
def apply_mask(s, causal_limit, key_begin, key_end, cfg: gl.constexpr):
    """Returns scores with −inf where a row does not see the key."""
    o_n = gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    visible = o_n[None, :] <= gl.minimum(causal_limit, key_end - 1)[:, None]
    if cfg.WINDOW > 0:
        visible = visible & (o_n[None, :] > causal_limit[:, None] - cfg.WINDOW)
    if cfg.HAS_NEW_KV:  # rows before the first token see no key
        visible = visible & (o_n >= key_begin)[None, :]
    return gl.where(visible, s, float("-inf"))


@gluon.jit
def softmax_step(
    s, row_max, causal_limit, key_begin, key_end, score_scales, log2_v_scale, softcap, MASKED: gl.constexpr,
    cfg: gl.constexpr,
):  # fmt: skip
    """Returns (P in fp32, row_max, rescale) of a tile of scores.

    row_max: for P in e4m3, an FP8RowMax
    causal_limit, key_begin, key_end: relative to the tile: each row's last key, the first key and the keys' end
    score_scales: of each row, > 0; log2_v_scale: with token scales, added to the exponent (`TileVScale`)
    """
    if cfg.HAS_SOFTCAP:
        s = apply_softcap(s * score_scales[:, None], softcap)
    if MASKED:
        s = apply_mask(s, causal_limit, key_begin, key_end, cfg)
    block_max = rowwise_max(s)
    if not cfg.HAS_SOFTCAP:
        block_max = block_max * score_scales
    if cfg.TOKEN_SCALES:
        block_max = block_max + log2_v_scale
    if cfg.FP8_PV:
        prev_max = row_max.row_max
        running_max = gl.maximum(row_max.running_max, block_max)
        score_offset = gl.maximum(block_max, running_max - MAX_LOG2_BELOW_ROW_MAX) - LOG2_P_MAX
        row_max_new = FP8RowMax(score_offset, running_max)
    else:
        prev_max = row_max
        score_offset = gl.maximum(row_max, block_max)
        row_max_new = score_offset
    if MASKED:
        score_offset = gl.where(score_offset == float("-inf"), 0.0, score_offset)  # a row may have seen no key yet
    rescale = gl.exp2(prev_max - score_offset)
    if cfg.TOKEN_SCALES:
        score_offset = score_offset - log2_v_scale
    if not cfg.HAS_SOFTCAP:
        s = s * score_scales[:, None]
    return gl.exp2(s - score_offset[:, None]), row_max_new, rescale
