"""Rotation and channel scales (`attributes.py`): transforms queries to match such keys, and unrotates accumulators.

The same transform as `triton/parts/hadamard`, in the same order of columns. Here the location of a column is known: in
a register of its partner's thread, or in another lane of the warp. The scales of the columns are kept in shared memory:
loaded at a work tile's begin or end, they would queue behind all copies in flight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....host.kernel_config import KernelConfig


@dataclass(frozen=True)
class Rotation(KernelConfig):
    """How the rows of K or V are stored."""

    ROTATED: bool
    SCALED: bool  # divided by channel scales
    CHANNEL_SCALES_STRIDE: int  # of a head's channel scales

    @property
    def ENABLED(self) -> bool:
        return self.ROTATED or self.SCALED


def make_rotation(signs: Any, channel_scales: Any) -> Rotation:
    """Returns the Rotation for the facts of signs and channel scales; None: there are none."""
    return Rotation(
        signs is not None, channel_scales is not None, 0 if channel_scales is None else channel_scales.stride[0]
    )


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def num_elements(shape):
    n = 1
    for x in shape:
        n *= x
    return n


@gluon.constexpr_function
def lane_of_partner(layout, axis, distance):
    """Returns the lane distance, a power of two, of the element `distance` further along the axis; 0: same lane.
    layout: linear."""
    for i, basis in enumerate(layout.lane_bases):
        if basis[axis] == distance:
            return 1 << i
    assert any(basis[axis] == distance for basis in layout.reg_bases), "a row lies in more than one warp"
    return 0


@gluon.constexpr_function
def butterfly_ptx(lane):
    """Returns PTX of a butterfly whose partner is in another lane: a + b in the lower lane, a − b in the upper."""
    return f"""{{
    .reg .b32 x, y, l;
    mov.u32 l, %laneid;
    shl.b32 l, l, {32 - lane.bit_length()};
    and.b32 l, l, 0x80000000;
    xor.b32 x, $1, l;
    shfl.sync.bfly.b32 y, $1, {lane}, 0x1f, 0xffffffff;
    add.f32 $0, x, y;
    }}"""


@gluon.jit
def hadamard_butterfly(x, AXIS: gl.constexpr, DISTANCE: gl.constexpr):
    """Returns a + b and a − b of columns that are DISTANCE apart."""
    SHAPE: gl.constexpr = x.shape
    LANE: gl.constexpr = lane_of_partner(gl.to_linear_layout(x.type.layout, SHAPE), AXIS, DISTANCE)
    if LANE > 0:
        PTX: gl.constexpr = butterfly_ptx(LANE)
        return gl.inline_asm_elementwise(PTX, "=f,f", [x], gl.float32, False, 1)
    else:
        OUTER: gl.constexpr = num_elements(SHAPE[:AXIS]) * (SHAPE[AXIS] // (2 * DISTANCE))
        INNER: gl.constexpr = DISTANCE * num_elements(SHAPE[AXIS + 1 :])
        a, b = gl.split(gl.permute(gl.reshape(x, [OUTER, 2, INNER]), (0, 2, 1)))
        y = gl.reshape(gl.permute(gl.join(a + b, a - b), (0, 2, 1)), SHAPE)
        return gl.convert_layout(y, x.type.layout, assert_trivial=True)


@gluon.jit
def blockwise_hadamard(x, AXIS: gl.constexpr, HADAMARD_SIZE: gl.constexpr):
    """Returns fp32 x times Sylvester's Hadamard matrix along AXIS, in blocks of HADAMARD_SIZE columns. A row is in one
    warp."""
    for i in gl.static_range(log2(HADAMARD_SIZE)):
        x = hadamard_butterfly(x, AXIS, 1 << i)
    return x


@gluon.jit
def blockwise_hadamard_unpacked(tiles, PACK: gl.constexpr, AXIS: gl.constexpr, HADAMARD_SIZE: gl.constexpr):
    """Returns the same for rows in PACK tensors: tensor j holds the columns PACK * i + j."""
    if PACK == 2:
        tiles = (tiles[0] + tiles[1], tiles[0] - tiles[1])
    elif PACK == 4:
        a, b, c, d = tiles[0] + tiles[1], tiles[0] - tiles[1], tiles[2] + tiles[3], tiles[2] - tiles[3]
        tiles = (a + c, b + d, a - c, b - d)
    transformed = ()
    for j in gl.static_range(PACK):
        transformed = transformed + (blockwise_hadamard(tiles[j], AXIS, HADAMARD_SIZE // PACK),)
    return transformed


@gluon.jit
def load_rotation_scales(
    SIGNS, CHANNEL_SCALES, kv_heads, o_d, D: gl.constexpr, rotation: gl.constexpr, INVERSE: gl.constexpr = False
):
    """Returns the scales of columns o_d of KV heads: channel scales, and signs / sqrt(HADAMARD_SIZE).

    INVERSE: reciprocals of the channel scales, for rows that are scaled as the cache's
    """
    HADAMARD_SIZE: gl.constexpr = D & -D
    INV_SQRT: gl.constexpr = HADAMARD_SIZE**-0.5
    if rotation.SCALED:
        scales = gl.load(
            CHANNEL_SCALES + kv_heads.to(gl.int64) * rotation.CHANNEL_SCALES_STRIDE + o_d, mask=o_d < D, other=1.0
        )
        if INVERSE:
            scales = 1.0 / scales
        if rotation.ROTATED:
            scales = scales * (gl.load(SIGNS + o_d % HADAMARD_SIZE) * INV_SQRT)
    else:
        scales = gl.load(SIGNS + o_d % HADAMARD_SIZE) * INV_SQRT
    return scales
