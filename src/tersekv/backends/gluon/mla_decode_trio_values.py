"""The warpgroups of MLA decode over 8-bit latents (mla_decode_trio.py) that add values: half of the columns each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .mla_decode_codes import as_words, unpack
from .mla_decode_trio_score import LANES, PART_KEYS, PARTS, ROWS, TILE, TURNS, places
from .pipeline import signal
from .schedule import next_segment, output

# Two words in one register and two ratios in another → f16x2 of the low codes, and of the high ones.
SCALED_PTX = gl.constexpr(
    """{
    .reg .b32 x, a, b;
    .reg .b16 low, high;
    prmt.b32 x, $2, 0, 0x3120;
    mov.b32 {low, high}, x;
    cvt.rn.f16x2.e4m3x2 a, low;
    cvt.rn.f16x2.e4m3x2 b, high;
    mul.rn.f16x2 $0, a, $3;
    mul.rn.f16x2 $1, b, $3;
    }"""
)


@gluon.jit
def drop_stale(codes, first, keys):
    """Rows behind the tile's last key become 0 in a warpgroup's chunks: a probability of 0 does not hide a NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    real = gl.arange(0, TILE, gl.SliceLayout(1, L)) < keys
    for i in range(2):  # not unrolled: it is rare, and the loop around it should stay small
        place = as_words(codes.index(first + i))
        x = place.load(L)
        place.store(gl.where(real[:, None], x, 0))


@gluon.jit
def words_of(codes, chunk, part: gl.constexpr, O: gl.constexpr):
    """Half the keys' values in a chunk, transposed, two codes a word: [words, PART_KEYS]."""
    words = as_words(codes.index(chunk)).slice(part * PART_KEYS, PART_KEYS).permute((1, 0))
    return words.load(gl.DotOperandLayout(0, O, 2))


@gluon.jit
def values_of(w, ratios, part: gl.constexpr, c: gl.constexpr):
    """Words → two fp16 tiles of values."""
    if c.GROUP_SCALES:
        ratio = ratios.slice(part * PART_KEYS, PART_KEYS).load(gl.SliceLayout(0, w.type.layout))
        _, ratio = gl.broadcast(w, ratio[None, :])
        return gl.inline_asm_elementwise(SCALED_PTX, "=r,=r,r,r", [w, ratio], [gl.float16, gl.float16], True, 2)
    else:
        return unpack(w)


@gluon.jit
def read_note(note, O: gl.constexpr):
    """What the scoring warpgroup left for each row, LANES times the same."""
    L: gl.constexpr = gl.BlockedLayout([1, LANES], [32, 1], [gl.num_warps(), 1], [1, 0])
    return gl.convert_layout(gl.max(note.load(L), 1), gl.SliceLayout(0, O))


@gluon.jit
def rescaled(acc, note, flag, O: gl.constexpr):
    """The accumulators times what the note says, where any of that is not 1: rarely."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = flag._reinterpret(gl.int32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if gl.max(words.slice(0, 1).load(ONE), 0) != 0:
        old = read_note(note, O)
        out = ()
        for i in gl.static_range(4):
            out = out + (acc[i] * old[None, :],)
        acc = out
    return acc


@gluon.jit
def add_tile(acc, codes, first, hand, given, turn, O: gl.constexpr, c: gl.constexpr):
    """acc + the tile's values times its probabilities, when these have come. Products are still under way."""
    probs, notes, flags, _, _, ratios = hand
    place = turn % TURNS
    w = words_of(codes, first, 0, O)
    if not c.GROUP_SCALES:  # their ratios come with the probabilities
        v = values_of(w, ratios, 0, c)
    mbarrier.wait(given.index(place), (turn // TURNS) & 1)
    acc = rescaled(acc, notes.index(place), flags.index(place), O)
    if c.GROUP_SCALES:
        v = values_of(w, ratios.index(first), 0, c)
    for i in gl.static_range(2):
        for part in gl.static_range(PARTS):
            if i + part > 0:
                w = words_of(codes, first + i, part, O)
                acc = warpgroup_mma_wait(0, acc)
                v = values_of(w, ratios.index(first + i), part, c)
            p = probs.index(PARTS * place + part).permute((1, 0))
            a0 = warpgroup_mma(v[0], p, acc[2 * i], is_async=True)
            a1 = warpgroup_mma(v[1], p, acc[2 * i + 1], is_async=True)
            if i == 0:
                acc = (a0, a1, acc[2], acc[3])
            else:
                acc = (acc[0], acc[1], a0, a1)
    return acc


@gluon.jit
def write_columns(OUT, x, first, segment, h, q0, rows, so_t, so_h, c: gl.constexpr):
    """Write x [words, ROWS, parts of a word] to `out`, from column `first` on."""
    L: gl.constexpr = x.type.layout
    o_w = gl.arange(0, c.CHUNK, gl.SliceLayout(1, gl.SliceLayout(2, L)))
    o_r = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, L)))
    o_j = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    tokens, heads, m_row = places(o_r, segment, h, q0, rows, c)
    p_out = (OUT + tokens * so_t + heads * so_h)[None, :, None] + (first + 2 * o_w)[:, None, None] + o_j[None, None, :]
    gl.store(p_out, output(x, OUT, c), mask=m_row[None, :, None] & (o_j >= 0)[None, None, :])


@gluon.jit
def add_values(tensors, rings, bars, hand, place, strides, which: gl.constexpr, STAGES: gl.constexpr,
               c: gl.constexpr):  # fmt: skip
    """The part of a warpgroup that adds values: chunks 2 * which and the next of the share [x, end)."""
    _, _, LENS, CU, OUT, _, PART, _ = tensors
    _, p, _, x, end, b, base = place
    _, _, _, _, so_t, so_h, _, _ = strides
    full, free, given, taken = bars
    notes, codes = hand[1], rings[0]
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zero = gl.full([64, ROWS], 0.0, gl.float32, O)
    h = p % c.HEADS
    k, turn = 0, 0
    while x < end:
        b, base, segment, t0, t1, n, rows, q0, tiles = next_segment(LENS, CU, x, end, b, base, c)
        acc = (zero, zero, zero, zero)
        for t in range(t0, t1):
            slot = k % STAGES
            mbarrier.wait(full.index(slot), (k // STAGES) & 1)
            first = slot * c.CHUNKS + 2 * which
            if (t + 1) * TILE > n:
                drop_stale(codes, first, n - t * TILE)
            acc = add_tile(acc, codes, first, hand, given, turn, O, c)
            signal(free.index(slot))
            acc = warpgroup_mma_wait(0, acc)
            signal(taken.index(turn % TURNS))
            k += 1
            turn += 1
        mbarrier.wait(given.index(turn % TURNS), (turn // TURNS) & 1)
        factor = read_note(notes.index(turn % TURNS), O)
        signal(taken.index(turn % TURNS))
        turn += 1
        o_r = gl.arange(0, ROWS, gl.SliceLayout(0, O))
        m_row = places(o_r, segment, h, q0, rows, c)[2]
        o_w = which * 2 * c.CHUNK + gl.arange(0, c.CHUNK, gl.SliceLayout(1, O))
        if t1 - t0 == tiles:
            for i in gl.static_range(2):
                pair = gl.join(acc[2 * i] * factor[None, :], acc[2 * i + 1] * factor[None, :])
                write_columns(OUT, pair, 2 * (2 * which + i) * c.CHUNK, segment, h, q0, rows, so_t, so_h, c)
        else:
            part = 2 * p + (t0 == 0).to(gl.int32)
            p_part = (PART + (part.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS)[None, :] + o_w[:, None]
            for i in gl.static_range(4):
                gl.store(p_part + (i % 2 * c.BLOCK_DV + c.CHUNK * (i // 2)), acc[i], mask=m_row[None, :])
        x += t1 - t0
