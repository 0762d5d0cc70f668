"""Group scales of 8-bit latents, laid out for those who score tiles and those who add their values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TILE = gl.constexpr(64)  # keys
SCALES = gl.constexpr(6)  # columns of a tile
MIN_SCALE = gl.constexpr(1e-30)  # of a key's pieces: its reciprocal is finite


@gluon.jit
def spread_scales(place, columns, ratios, slot, keys):
    """Leave a tile's group scales where they are wanted; behind the last key they are 1.

    columns: fp32 [SCALES * STAGES, TILE], for the scores: the four scales, the base-2 logarithm of the largest, its
             reciprocal
    ratios:  fp16 [4 * STAGES, TILE], for the values: the four scales as parts of the largest
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [32, 1], [gl.num_warps(), 1], [1, 0])
    x = place.load(L)
    real = gl.arange(0, TILE, gl.SliceLayout(1, L)) < keys
    x = gl.where(real[:, None], x, 1.0)
    top = gl.maximum(gl.max(gl.abs(x), 1), MIN_SCALE)
    inverse = 1.0 / top
    columns.index(SCALES * slot + 4).store(gl.log2(top))
    columns.index(SCALES * slot + 5).store(inverse)
    even, odd = gl.split(gl.reshape(x, [TILE, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    of_groups = (s0, s1, s2, s3)
    for i in gl.static_range(4):
        column = of_groups[i]
        columns.index(SCALES * slot + i).store(column)
        ratio = column * gl.convert_layout(inverse, column.type.layout)
        ratios.index(4 * slot + i).store(ratio.to(gl.float16))
