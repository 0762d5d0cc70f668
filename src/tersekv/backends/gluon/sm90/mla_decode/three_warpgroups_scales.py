"""Prepares group scales of 8-bit latents for the QK and the PV warpgroups."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

BLOCK_N = gl.constexpr(64)  # keys
SCALE_COLUMNS = gl.constexpr(6)  # rows of score_scales of a stage
MIN_SCALE = gl.constexpr(1e-30)  # of a key's chunks: its reciprocal is finite


@gluon.jit
def prepare_group_scales(smem_scales, score_scales, v_scale_ratios, stage, num_valid):
    """Stores a tile's group scales in shared memory; past the last key they are 1.

    score_scales: fp32 [SCALE_COLUMNS * STAGES, BLOCK_N], for QK: the four scales, log2 of the largest, its reciprocal
    v_scale_ratios: fp16 [4 * STAGES, BLOCK_N], for PV: the four scales over the largest
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    x = smem_scales.load(L)
    is_valid = gl.arange(0, BLOCK_N, gl.SliceLayout(1, L)) < num_valid
    x = gl.where(is_valid[:, None], x, 1.0)
    max_scale = gl.maximum(gl.max(gl.abs(x), 1), MIN_SCALE)
    inv_scale = 1.0 / max_scale
    score_scales.index(SCALE_COLUMNS * stage + 4).store(gl.log2(max_scale))
    score_scales.index(SCALE_COLUMNS * stage + 5).store(inv_scale)
    even, odd = gl.split(gl.reshape(x, [BLOCK_N, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    group_scales = (s0, s1, s2, s3)
    for i in gl.static_range(4):
        group_scale = group_scales[i]
        score_scales.index(SCALE_COLUMNS * stage + i).store(group_scale)
        ratio = group_scale * gl.convert_layout(inv_scale, group_scale.type.layout)
        v_scale_ratios.index(4 * stage + i).store(ratio.to(gl.float16))
