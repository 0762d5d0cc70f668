"""Values and weights in 8 bits, which `precision="fast"` permits: the steps of `attend` where they differ.

Hopper multiplies 8 bits only with both operands along the keys. So the converting warpgroup transposes values, by words
of two columns, as ldmatrix does, and one byte permute of two keys' words and those eight keys behind. That deals the
keys of every 16 anew, in the way in which a thread holds weights: these become an operand without leaving it.

Hopper's sums of 8-bit products hold too few bits: those of a tile start from 0 and are added in fp32. Values come in
two halves of their columns, which leaves registers enough: while scores are computed the first is added, while weights
are, the second is multiplied.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
)

from ...versions import thread_barrier
from ..parts.ring import place_of, wait_free, wait_full

# Four neighbours in a thread, two of a row's keys and two of those eight behind, as a word of e4m3.
_WORD = gl.constexpr(
    """{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
    }"""
)
# Words of two columns, of keys 2a and 2a + 1 and of those eight behind → four keys of either column.
_COLUMNS = gl.constexpr(
    """{
    prmt.b32 $0, $2, $3, 0x6420;
    prmt.b32 $1, $2, $3, 0x7531;
    }"""
)


class State(NamedTuple):
    """As `attend.State`. Sums of values, by halves, are those before the tile before, and `shrink` is owed to them."""

    low: gl.tensor
    high: gl.tensor
    shrink: gl.tensor
    m: gl.tensor
    l: gl.tensor
    words: gl.tensor


@gluon.constexpr_function
def half_layout(c):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.DV // 2, 32])


@gluon.jit
def eights(x):
    """[rows, keys] → (first, second) eights of keys of every 16: [rows, keys / 16, 8]."""
    return gl.split(gl.permute(gl.reshape(x, [x.shape[0], x.shape[1] // 16, 2, 8]), (0, 1, 3, 2)))


@gluon.jit
def packed(weight):
    """Weights as words of e4m3, of four keys each: [rows, keys / 4] int32."""
    a, b = eights(weight)
    a0, a1 = gl.split(gl.reshape(a, [a.shape[0], a.shape[1], 4, 2]))
    b0, b1 = gl.split(gl.reshape(b, [b.shape[0], b.shape[1], 4, 2]))
    words = gl.inline_asm_elementwise(_WORD, "=r,f,f,f,f", [a0, a1, b0, b1], gl.int32, True, 1)
    return gl.reshape(words, [weight.shape[0], weight.shape[1] // 4])


@gluon.jit
def unpacked(words, c: gl.constexpr):
    """The same as an operand [rows, keys].

    NOTE: a loop's next words may be made only once no product reads these: ptxas has them in the same registers, and
    would let every product wait for the one before.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, half_layout(c), 4)
    low = gl.join(words.to(gl.int8), (words >> 8).to(gl.int8))
    high = gl.join((words >> 16).to(gl.int8), (words >> 24).to(gl.int8))
    x = gl.reshape(gl.permute(gl.join(low, high), (0, 1, 3, 2)), [words.shape[0], 4 * words.shape[1]])
    return gl.convert_layout(x.to(gl.float8e4nv, bitcast=True), A, assert_trivial=True)


@gluon.jit
def start_half(weights, values, turn, HIGH: gl.constexpr, c: gl.constexpr):
    """Start the product of a tile's weights and half of its values' columns."""
    stage, _ = place_of(turn, c.STAGES)
    N: gl.constexpr = c.DV // 2
    zero = gl.full([weights.shape[0], N], 0.0, gl.float32, half_layout(c))
    v = values.tiles.index(stage).slice(HIGH * N, N).permute((1, 0))
    return warpgroup_mma(weights, v, zero, use_acc=False, is_async=True)


@gluon.jit
def added(sums, x, shrink):
    """sums × shrink + x"""
    return sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + x


@gluon.jit
def whole(low, high, LAYOUT: gl.constexpr):
    """Both halves side by side."""
    x = gl.permute(gl.join(low, high), (0, 2, 1))
    return gl.convert_layout(gl.reshape(x, [low.shape[0], 2 * low.shape[1]]), LAYOUT, assert_trivial=True)


@gluon.jit
def nothing(ROWS: gl.constexpr, c: gl.constexpr):
    """Half of the sums of rows that have seen nothing."""
    return gl.full([ROWS, c.DV // 2], 0.0, gl.float32, half_layout(c))


@gluon.jit
def transpose_tile(codes, tiles, turn, code_turn, low, keys, edge, c: gl.constexpr):
    """A tile of codes of values [keys, columns] → [columns, keys]. Keys outside [low, keys) become zeros."""
    W: gl.constexpr = codes.tiles.shape[2]
    L: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]), 2)
    source = codes.tiles.index(wait_full(codes.full, code_turn, c.CODE_STAGES))
    words = source.permute((1, 0)).load(L)
    if edge:
        o_n = gl.arange(0, c.TILE, gl.SliceLayout(0, L))
        words = gl.where(((o_n >= low) & (o_n < keys))[None, :], words, 0)
    a, b = eights(words)
    even, odd = gl.inline_asm_elementwise(_COLUMNS, "=&r,=&r,r,r", [a, b], (gl.int16, gl.int16), True, 2)
    x = gl.reshape(gl.permute(gl.join(even, odd), (0, 3, 1, 2)), [2 * W, c.TILE // 2])
    into = tiles.tiles.index(wait_free(tiles.free, turn, c.STAGES))
    into.store(x)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(tiles.full.index(place_of(turn, c.STAGES)[0]))
    mbarrier.arrive(codes.free.index(place_of(code_turn, c.CODE_STAGES)[0]))
