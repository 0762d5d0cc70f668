"""How decode's tiles lie in registers. No word crosses from lane to lane: every conversion of a layout is trivial.

A warp owns a KV head, or one in RB of its query rows; its boxes are 16 keys. Both products run as m16n8k16 with keys
(or value columns) on M and query rows on N, so a warp needs nothing of another. The order of the contracted dimension
is free: a lane takes a stretch of a key's row as it lies, and the same of the query's (`query.operands_of`).
Values are transposed by ldmatrix in units of 16 bits; part j of PARTS holds the columns PARTS * i + j, as in the
Triton kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..parts.convert import SCALE_K, SCALE_V

_TRANSPOSE = gl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")


@gluon.constexpr_function
def _warps(HB, RB, rank):
    """Warp bases: RB warps with the same keys, then a KV head each, heads in the first dimension."""
    bases, h = [[0] * rank] * (RB.bit_length() - 1), 1
    while h < HB:
        bases.append([h] + [0] * (rank - 1))
        h *= 2
    return bases


@gluon.constexpr_function
def _more(N, rank, dim):
    """Register bases of the keys from 16 on."""
    bases, key = [], 16
    while key < N:
        bases.append([key if i == dim else 0 for i in range(rank)])
        key *= 2
    return bases


@gluon.constexpr_function
def _units(W):
    """(16-bit units that a lane takes in a row out of each part of at most 128 bytes, such parts)."""
    return min(W, 64) // 4, max(W // 64, 1)


@gluon.constexpr_function
def key_words(HB, RB, N, W):
    """Layout of units [HB, N, W] of keys: lane l takes key l // 4 (and 8 more) and a stretch of its row."""
    stretch, parts = _units(W)
    regs = [[0, 0, 1 << i] for i in range(stretch.bit_length() - 1)]
    regs += [[0, 8, 0]] + [[0, 0, 64 << i] for i in range(parts.bit_length() - 1)] + _more(N, 3, 1)
    lanes = [[0, 0, stretch], [0, 0, 2 * stretch], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(HB, RB, 3), [], [HB, N, W])


@gluon.constexpr_function
def query_words(HB, RB, ROWS, W, PARTS):
    """Layout of a query [HB, ROWS, W * PARTS columns]: lane l takes row l // 4 and the stretch of its keys."""
    stretch, parts = _units(W)
    columns = stretch * PARTS
    rows = [[0, 8 << i, 0] for i in range((ROWS // 8).bit_length() - 1)]
    heads = [[1 << i, 0, 0] for i in range(HB.bit_length() - 1)]
    shared = RB.bit_length() - 1
    regs = [[0, 0, 1 << i] for i in range(columns.bit_length() - 1)]
    regs += [[0, 0, (4 * columns) << i] for i in range(parts.bit_length() - 1)] + rows[shared:]
    lanes = [[0, 0, columns], [0, 0, 2 * columns], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    return gl.DistributedLinearLayout(regs, lanes, rows[:shared] + heads, [], [HB, ROWS, W * PARTS])


@gluon.constexpr_function
def key_scale_words(HB, RB, N, W):
    """Layout [HB, N, words, pieces of a word] of the block scales of a key: lane l % 4 has the l-th share of them."""
    words = W // 16
    lanes = {
        1: [[0, 0, 0, 1], [0, 0, 0, 2]],
        2: [[0, 0, 0, 1], [0, 0, 1, 0]],
        4: [[0, 0, 1, 0], [0, 0, 2, 0]],
    }[words]
    lanes = lanes + [[0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 8, 0, 0], *_more(N, 4, 1)],
        lanes,
        _warps(HB, RB, 4),
        [],
        [HB, N, words, 4 // words],
    )


@gluon.constexpr_function
def key_scale_units(HB, RB, N, W):
    """key_words' layout with units as [blocks, 4]."""
    blocks = W // 16  # of a lane
    regs = [[0, 0, 0, 1], [0, 0, 0, 2]] + [[0, 0, 1 << i, 0] for i in range(blocks.bit_length() - 1)]
    regs += [[0, 8, 0, 0], *_more(N, 4, 1)]
    lanes = [
        [0, 0, blocks, 0],
        [0, 0, 2 * blocks, 0],
        [0, 1, 0, 0],
        [0, 2, 0, 0],
        [0, 4, 0, 0],
    ]
    return gl.DistributedLinearLayout(regs, lanes, _warps(HB, RB, 4), [], [HB, N, W // 4, 4])


@gluon.constexpr_function
def _value_words(W, rank):
    """Register bases of the words of block scales."""
    return [[0, 1 << i] + [0] * (rank - 2) for i in range((W // 16).bit_length() - 1)]


@gluon.constexpr_function
def value_scale_words(HB, RB, N, W):
    """Layout [HB, words, 2 bytes of a half, 4 units, N keys]: where the matrix unit wants scales of values."""
    regs = [[0, 0, 0, 0, 1], [0, 0, 0, 0, 8]] + _value_words(W, 5) + _more(N, 5, 4)
    lanes = [
        [0, 0, 0, 0, 2],
        [0, 0, 0, 0, 4],
        [0, 0, 0, 1, 0],
        [0, 0, 0, 2, 0],
        [0, 0, 1, 0, 0],
    ]
    return gl.DistributedLinearLayout(regs, lanes, _warps(HB, RB, 5), [], [HB, W // 16, 2, 4, N])


@gluon.constexpr_function
def value_scale_units(HB, RB, N, W):
    """Layout [HB, blocks, 4 units, N keys]: the operand's, with units as [blocks, 4]."""
    regs = [[0, 0, 0, 1], [0, 0, 0, 8]] + [[0, 2 << i, 0, 0] for i in range((W // 8).bit_length() - 1)] + _more(N, 4, 3)
    lanes = [[0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0]]
    return gl.DistributedLinearLayout(regs, lanes, _warps(HB, RB, 4), [], [HB, W // 4, 4, N])


@gluon.constexpr_function
def mma_layout(HB, RB):
    return gl.NVMMADistributedLayout([2, 0], [HB, 1, RB], [1, 16, 8])


@gluon.constexpr_function
def _image(W, ROWS, g):
    return gl.BlockedLayout([1, W * ROWS // 32], [32, 1], [g.HB, 1], [1, 0])


@gluon.jit
def query_image(W: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Shared memory for parts of the query: what a lane holds of one lies side by side."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    return gl.allocate_shared_memory(gl.float16, [g.K.PARTS, g.HB * 32, W * c.ROWS // 32], SHARED)


@gluon.jit
def keep_part(image, j: gl.constexpr, x, c: gl.constexpr, g: gl.constexpr):
    """Put a part of the query [HB, W, ROWS], the right operand, into shared memory."""
    W: gl.constexpr = c.WORDS_K
    x = x.reshape([g.HB, W // 16, 2, 4, 2, c.ROWS // 8, 8]).permute([0, 6, 3, 5, 1, 2, 4])
    x = x.reshape([g.HB * 32, W * c.ROWS // 32])
    image.index(j).store(gl.convert_layout(x, _image(W, c.ROWS, g), assert_trivial=True))


@gluon.jit
def kept_part(image, j: gl.constexpr, c: gl.constexpr, g: gl.constexpr):
    """Take it from there."""
    W: gl.constexpr = c.WORDS_K
    x = image.index(j).load(_image(W, c.ROWS, g))
    x = x.reshape([g.HB, 8, 4, c.ROWS // 8, W // 16, 2, 2]).permute([0, 4, 5, 2, 6, 3, 1])
    x = x.reshape([g.HB, W, c.ROWS])
    return gl.convert_layout(x, gl.DotOperandLayout(1, mma_layout(g.HB, g.RB), 2), assert_trivial=True)


@gluon.jit
def begin_of(h, VALUES: gl.constexpr, g: gl.constexpr):
    """Unit of a copied row at which heads h's own begins (`boxes._windows`)."""
    SIDE: gl.constexpr = g.V if VALUES else g.K
    return h % SIDE.WINDOWS * SIDE.STEP


@gluon.jit
def own_words(words, g: gl.constexpr):
    """Keys [HB, BOX, W] in layout key_words, 0 where a copied row is a neighbour's: 0 × NaN is NaN."""
    L: gl.constexpr = words.type.layout
    STEP: gl.constexpr = g.K.STEP
    o_h = gl.arange(0, g.HB, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None, None] % g.K.WINDOWS
    step = gl.arange(0, words.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, None, :] // STEP
    own = gl.where((step >= o_h) & (step < o_h + g.K.ROW // STEP), -1, 0).to(gl.int16)
    return words & own


@gluon.jit
def as_operand(x, c: gl.constexpr, g: gl.constexpr):
    """Keys [HB, BOX, W] in layout key_words → the left operand, units in the order of `query.operands_of`."""
    STRETCH: gl.constexpr = min(c.WORDS_K, 64) // 4
    SHAPE: gl.constexpr = [g.HB, g.BOX, c.WORDS_K // (4 * STRETCH), 4, STRETCH // 2, 2]
    x = x.reshape(SHAPE).permute([0, 1, 2, 4, 3, 5]).reshape([g.HB, g.BOX, c.WORDS_K])
    return gl.convert_layout(x, gl.DotOperandLayout(0, mma_layout(g.HB, g.RB), 2), assert_trivial=True)


@gluon.jit
def key_factor(scales, c: gl.constexpr, g: gl.constexpr):
    """Block scales of a box in shared memory [HB, BOX, words] → fp16 [HB, BOX, W] in layout key_words."""
    WORDS: gl.constexpr = c.WORDS_K // 16
    PIECES: gl.constexpr = 4 // WORDS
    L4: gl.constexpr = key_scale_words(g.HB, g.RB, g.BOX, c.WORDS_K)
    words = scales.load(gl.SliceLayout(3, L4))[:, :, :, None]
    piece = gl.arange(0, PIECES, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L4))))[None, None, None, :]
    words, piece = gl.broadcast(words, piece + gl.full([g.HB, g.BOX, WORDS, PIECES], 0, gl.int32, L4))
    # Two bytes from piece * WORDS on; a lane that has one block takes the first, one that has four asks twice.
    low, high = gl.inline_asm_elementwise(
        SCALE_K,
        "=h,=h,r,r",
        [words, piece * (0x11 * WORDS) + 0x10],
        (gl.float16, gl.float16),
        True,
        1,
    )
    if WORDS == 1:
        factor = low
    elif WORDS == 2:
        factor = gl.join(low, high)
    else:
        third, fourth = gl.inline_asm_elementwise(
            SCALE_K,
            "=h,=h,r,r",
            [words, piece + 0x32],
            (gl.float16, gl.float16),
            True,
            1,
        )
        factor = gl.join(gl.join(low, third), gl.join(high, fourth))
    factor = factor.reshape([g.HB, g.BOX, c.WORDS_K // 4])
    L: gl.constexpr = key_scale_units(g.HB, g.RB, g.BOX, c.WORDS_K)
    factor = gl.convert_layout(factor, gl.SliceLayout(3, L), assert_trivial=True)
    factor, _ = gl.broadcast(
        factor[:, :, :, None], gl.full([g.HB, g.BOX, c.WORDS_K // 4, 4], 0, gl.float16, L)
    )  # fmt: skip
    return gl.convert_layout(
        factor.reshape([g.HB, g.BOX, c.WORDS_K]),
        key_words(g.HB, g.RB, g.BOX, c.WORDS_K),
        assert_trivial=True,
    )


@gluon.jit
def value_factor(scales, c: gl.constexpr, g: gl.constexpr):
    """Block scales of a box's values in shared memory [HB, words, BOX] → fp16 [HB, W, BOX], the left operand's."""
    WORDS: gl.constexpr = c.WORDS_V // 16
    L5: gl.constexpr = value_scale_words(g.HB, g.RB, g.BOX, c.WORDS_V)
    L4: gl.constexpr = gl.SliceLayout(3, L5)
    words = scales.load(gl.SliceLayout(2, L4))[:, :, None, :]
    odd = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L4))))[None, None, :, None]
    words, odd = gl.broadcast(words, odd + gl.full([g.HB, WORDS, 2, g.BOX], 0, gl.int32, L4))
    # Bytes odd and odd + 2 of the words of two keys.
    low, high = gl.inline_asm_elementwise(
        SCALE_V,
        "=r,=r,r,r,r,r",
        [words, odd * 0x1111 + 0x6240],
        (gl.float16, gl.float16),
        True,
        2,
    )
    factor = gl.join(low, high).permute([0, 1, 4, 2, 3]).reshape([g.HB, c.WORDS_V // 4, g.BOX])
    L: gl.constexpr = value_scale_units(g.HB, g.RB, g.BOX, c.WORDS_V)
    factor = gl.convert_layout(factor, gl.SliceLayout(2, L), assert_trivial=True)
    factor, _ = gl.broadcast(
        factor[:, :, None, :], gl.full([g.HB, c.WORDS_V // 4, 4, g.BOX], 0, gl.float16, L)
    )  # fmt: skip
    return gl.convert_layout(
        factor.reshape([g.HB, c.WORDS_V, g.BOX]),
        gl.DotOperandLayout(0, mma_layout(g.HB, g.RB), 2),
        assert_trivial=True,
    )


@gluon.jit
def transposed(p, c: gl.constexpr, g: gl.constexpr):
    """Probabilities [HB, BOX, ROWS] in 16 bits as scores lie → the right operand of the second product.

    movmatrix transposes 8 × 8 blocks: what it returns under a name [key, row] is the value of [row, key].
    """
    p = gl.inline_asm_elementwise(_TRANSPOSE, "=r,r", [p], p.dtype, False, 2)
    p = p.reshape([g.HB, g.BOX // 8, 8, c.ROWS // 8, 8]).permute([0, 1, 4, 3, 2]).reshape([g.HB, g.BOX, c.ROWS])
    return gl.convert_layout(p, gl.DotOperandLayout(1, mma_layout(g.HB, g.RB), 2), assert_trivial=True)
