"""The warpgroups of MLA decode over 8-bit latents (three_warpgroups.py) that add values: half of the columns each.

They also bring the query, half of its rows each, and write the output.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ...versions import reinterpret
from ..parts.ring import signal
from ..parts.schedule import next_segment, output
from .eight_bits_tiles import unpack
from .three_warpgroups_query import ROWS, Block, bring_query, places
from .three_warpgroups_score import LANES, PART_KEYS, PARTS, TILE, TURNS

CHUNKS = gl.constexpr(2)  # of columns that a warpgroup holds
WORDS = gl.constexpr(64)  # of a chunk
STAGED = gl.constexpr(32)  # rows of the output in shared memory
AT_ONCE = gl.constexpr(16)  # of them that are written at once
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
def drop_stale(words, first, keys):
    """Rows behind the tile's last key become 0: a probability of 0 does not hide a NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    real = gl.arange(0, TILE, gl.SliceLayout(1, L)) < keys
    for i in range(CHUNKS):  # not unrolled: it is rare, and the loop around it should stay small
        place = words.index(first + i)
        x = place.load(L)
        place.store(gl.where(real[:, None], x, 0))
    fence_async_shared()  # tensor copies write there next


@gluon.jit
def words_of(words, chunk, part: gl.constexpr, O: gl.constexpr):
    """Half the keys' values in a chunk, transposed, two codes a word: [WORDS, PART_KEYS]."""
    return words.index(chunk).slice(part * PART_KEYS, PART_KEYS).permute((1, 0)).load(gl.DotOperandLayout(0, O, 2))


@gluon.jit
def values_of(w, ratios, part: gl.constexpr, c: gl.constexpr):
    """Words → two fp16 tiles of values; ratios: of the chunk's scales to each key's largest."""
    if c.GROUP_SCALES:
        ratio = ratios.slice(part * PART_KEYS, PART_KEYS).load(gl.SliceLayout(0, w.type.layout))
        _, ratio = gl.broadcast(w, ratio[None, :])
        return gl.inline_asm_elementwise(SCALED_PTX, "=r,=r,r,r", [w, ratio], [gl.float16, gl.float16], True, 2)
    else:
        return unpack(w)


@gluon.jit
def rescaled(acc, note, flag, O: gl.constexpr):
    """The accumulators times what the note says, where any of that is not 1: rarely."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = reinterpret(flag, gl.int32, [ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if gl.max(words.slice(0, 1).load(ONE), 0) != 0:
        L: gl.constexpr = gl.BlockedLayout([1, LANES], [32, 1], [gl.num_warps(), 1], [1, 0])
        old = gl.convert_layout(gl.max(note.load(L), 1), gl.SliceLayout(0, O))
        out = ()
        for i in gl.static_range(4):
            out = out + (acc[i] * old[None, :],)
        acc = out
    return acc


@gluon.jit
def add_tile(acc, words, first, hand, given, turn, O: gl.constexpr, c: gl.constexpr):
    """acc + the tile's values times its probabilities, when these have come. Products are still under way."""
    probs, ratios = hand.probs, hand.ratios
    place = turn % TURNS
    w = words_of(words, first, 0, O)
    if not c.GROUP_SCALES:  # their ratios come with the probabilities
        v = values_of(w, ratios, 0, c)
    mbarrier.wait(given.index(place), (turn // TURNS) & 1)
    acc = rescaled(acc, hand.notes.index(place), hand.flags.index(place), O)
    if c.GROUP_SCALES:
        v = values_of(w, ratios.index(first), 0, c)
    for i in gl.static_range(CHUNKS):
        for part in gl.static_range(PARTS):
            if i + part > 0:
                w = words_of(words, first + i, part, O)
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
def stage_rows(stage, low, high, half: gl.constexpr):
    """Half the rows of a chunk's columns, which lie as words, to shared memory: [STAGED, 2 * WORDS]."""
    SPLIT: gl.constexpr = [WORDS, 2, STAGED]
    low = gl.split(gl.permute(gl.reshape(low, SPLIT), (0, 2, 1)))[half]
    high = gl.split(gl.permute(gl.reshape(high, SPLIT), (0, 2, 1)))[half]
    x = gl.permute(gl.join(low, high), (1, 0, 2))
    stage.store(gl.reshape(x, [STAGED, 2 * WORDS]))


@gluon.jit
def store_segment(tensors, q_c, acc, note, whole, slot, of, strides, which: gl.constexpr, c: gl.constexpr):
    """Write the output, or the state of a segment that is cut, through the query's memory, so that rows are whole."""
    OUT, PART = tensors.OUT, tensors.PART
    W: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    STAGE: gl.constexpr = gl.SwizzledSharedLayout(8, 2, 4, [1, 0])
    PLACES: gl.constexpr = q_c.shape[0] * q_c.shape[1] * q_c.shape[2] // (4 * STAGED * 2 * WORDS)
    STEPS: gl.constexpr = STAGED // AT_ONCE
    stage = reinterpret(q_c, gl.float32, [PLACES, STAGED, 2 * WORDS], STAGE).index(which)
    stages = reinterpret(q_c, gl.float32, [PLACES * STEPS, AT_ONCE, 2 * WORDS], STAGE)
    notes = reinterpret(note, gl.float32, [ROWS // AT_ONCE, AT_ONCE, LANES], note.layout)
    for i in range(4):  # not unrolled: code that runs once is slow
        if i == 0:
            stage_rows(stage, acc[0], acc[1], 0)
        elif i == 1:
            stage_rows(stage, acc[0], acc[1], 1)
        elif i == 2:
            stage_rows(stage, acc[2], acc[3], 0)
        else:
            stage_rows(stage, acc[2], acc[3], 1)
        for j in range(STEPS):
            x = stages.index(which * STEPS + j).load(W)
            step = i % 2 * STEPS + j
            o_r = step * AT_ONCE + gl.arange(0, AT_ONCE, gl.SliceLayout(1, W))
            o_d = (CHUNKS * which + i // 2) * 2 * WORDS + gl.arange(0, 2 * WORDS, gl.SliceLayout(0, W))
            tokens, heads, m_row = places(o_r, of, c)
            if whole:
                x *= gl.max(notes.index(step).load(W), 1)[:, None]
                p_out = (OUT + tokens * strides.out_t + heads * strides.out_h)[:, None] + o_d[None, :]
                gl.store(p_out, output(x, OUT, c), mask=m_row[:, None])
            else:
                p_row = PART + (slot.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
                gl.store(p_row[:, None] + o_d[None, :], x, mask=m_row[:, None])


@gluon.jit
def add_values(tensors, q, rings, bars, hand, scale_in, share, strides, which: gl.constexpr, STAGES: gl.constexpr,
               TERMS: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """The part of a warpgroup that adds values, of the share [x, end): chunks 2 * which and the next.

    Of every segment it first brings half of the query's rows.
    """
    p, x, end, b, base = share.p, share.x, share.end, share.b, share.base
    given, taken = bars.given, bars.taken
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zero = gl.full([WORDS, ROWS], 0.0, gl.float32, O)
    words = reinterpret(rings.latents, gl.int16, [STAGES * c.CHUNKS, TILE, WORDS], gl.NVMMASharedLayout(128, 16))
    k, count = 0, 0
    while x < end:
        segment = next_segment(tensors.LENS, tensors.CU, x, end, b, base, c)
        b, base, n, t0, t1 = segment.b, segment.base, segment.keys, segment.t0, segment.t1
        # All that can be known now is: registers are short in the loop.
        part, whole = 2 * p + (t0 == 0).to(gl.int32), t1 - t0 == segment.tiles
        x += t1 - t0
        here = Block(segment.i, p % c.HEADS, segment.q0, segment.rows)
        mbarrier.wait(bars.stored.index(0), (count & 1) ^ 1)  # both are done with the last query's memory
        bring_query(tensors, q, hand.factors, here, scale_in, strides, which, TERMS, c)
        signal(bars.ready.index(0))
        mbarrier.arrive(bars.started.index(0), pred=count == 0)
        acc = (zero, zero, zero, zero)
        for t in range(t0, t1):
            slot = k % STAGES
            mbarrier.wait(bars.full.index(slot), (k // STAGES) & 1)
            first = slot * c.CHUNKS + CHUNKS * which
            if (t + 1) * TILE > n:
                drop_stale(words, first, n - t * TILE)
            turn = k + count
            acc = add_tile(acc, words, first, hand, given, turn, O, c)
            signal(bars.free.index(slot))
            acc = warpgroup_mma_wait(0, acc)
            signal(taken.index(turn % TURNS))
            k += 1
        turn = k + count
        mbarrier.wait(given.index(turn % TURNS), (turn // TURNS) & 1)
        note = hand.notes.index(turn % TURNS)
        store_segment(tensors, q.latents, acc, note, whole, part, here, strides, which, c)
        signal(taken.index(turn % TURNS))
        mbarrier.arrive(bars.stored.index(0))
        count += 1
