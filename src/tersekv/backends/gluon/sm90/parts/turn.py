"""Rotated rows and channel scales (`attributes.py`): queries as they meet such keys, weighted values turned back.

As `triton/parts/turn` does it, in the same order, column after neighbouring column. Here it is known where a column
lies: in a register of the thread that has its partner, or in another lane of the warp. What columns are multiplied by
waits in shared memory: loaded when a segment begins or ends, it would queue behind all copies under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ....host.record import Record


@dataclass(frozen=True)
class Turn(Record):
    """How rows of keys or of values lie."""

    ROTATED: bool
    SCALED: bool  # divided by channel scales
    STRIDE: int  # of a head's channel scales

    @property
    def ANY(self) -> bool:
        return self.ROTATED or self.SCALED


def turn_of(signs: Any, channels: Any) -> Turn:
    """By the facts of signs and channel scales; None: there are none."""
    return Turn(signs is not None, channels is not None, 0 if channels is None else channels.stride[0])


@gluon.constexpr_function
def log2(n):
    return n.bit_length() - 1


@gluon.constexpr_function
def product(shape):
    n = 1
    for x in shape:
        n *= x
    return n


@gluon.constexpr_function
def lane_of(L, axis, step):
    """The lane, as a power of two, that is `step` further along the axis; 0: it is the same. L: a linear layout."""
    for i, basis in enumerate(L.lane_bases):
        if basis[axis] == step:
            return 1 << i
    assert any(basis[axis] == step for basis in L.reg_bases), "a row lies in more than one warp"
    return 0


@gluon.constexpr_function
def across_lanes(lane):
    """PTX of a butterfly whose partner is in another lane: a + b in the lower of both, a − b in the upper."""
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
def butterfly(x, AXIS: gl.constexpr, STEP: gl.constexpr):
    """a + b and a − b of columns that are STEP apart."""
    SHAPE: gl.constexpr = x.shape
    LANE: gl.constexpr = lane_of(gl.to_linear_layout(x.type.layout, SHAPE), AXIS, STEP)
    if LANE > 0:
        PTX: gl.constexpr = across_lanes(LANE)
        return gl.inline_asm_elementwise(PTX, "=f,f", [x], gl.float32, False, 1)
    else:
        OUTER: gl.constexpr = product(SHAPE[:AXIS]) * (SHAPE[AXIS] // (2 * STEP))
        INNER: gl.constexpr = STEP * product(SHAPE[AXIS + 1 :])
        a, b = gl.split(gl.permute(gl.reshape(x, [OUTER, 2, INNER]), (0, 2, 1)))
        y = gl.reshape(gl.permute(gl.join(a + b, a - b), (0, 2, 1)), SHAPE)
        return gl.convert_layout(y, x.type.layout, assert_trivial=True)


@gluon.jit
def sums(x, AXIS: gl.constexpr, B: gl.constexpr):
    """x fp32 times Sylvester's Hadamard matrix along an axis, in blocks of B columns. A row lies in one warp."""
    for i in gl.static_range(log2(B)):
        x = butterfly(x, AXIS, 1 << i)
    return x


@gluon.jit
def sums_of_parts(parts, PARTS: gl.constexpr, AXIS: gl.constexpr, B: gl.constexpr):
    """As `sums`, of rows in PARTS tensors: part j holds the columns PARTS * i + j."""
    if PARTS == 2:
        parts = (parts[0] + parts[1], parts[0] - parts[1])
    elif PARTS == 4:
        a, b, c, d = parts[0] + parts[1], parts[0] - parts[1], parts[2] + parts[3], parts[2] - parts[3]
        parts = (a + c, b + d, a - c, b - d)
    out = ()
    for j in gl.static_range(PARTS):
        out = out + (sums(parts[j], AXIS, B // PARTS),)
    return out


@gluon.jit
def factors_of(SIGNS, CHANNELS, h, column, D: gl.constexpr, turn: gl.constexpr, AS_ROWS: gl.constexpr = False):
    """What columns of KV heads h are multiplied by: channel scales, and signs / sqrt(b).

    AS_ROWS: of what is scaled as the rows are: the scales' reciprocals
    """
    B: gl.constexpr = D & -D
    ROOT: gl.constexpr = B**-0.5
    if turn.SCALED:
        x = gl.load(CHANNELS + h.to(gl.int64) * turn.STRIDE + column, mask=column < D, other=1.0)
        if AS_ROWS:
            x = 1.0 / x
        if turn.ROTATED:
            x = x * (gl.load(SIGNS + column % B) * ROOT)
    else:
        x = gl.load(SIGNS + column % B) * ROOT
    return x
