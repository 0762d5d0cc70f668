"""MLA decode over 8-bit latents for many heads on sm_90: one warpgroup scores tiles, two add their values.

A tile of 64 keys arrives by TMA, in a ring of STAGES tiles. The first warpgroup multiplies 64 query rows (M) by its
keys (N), 8-bit products straight from the codes, and hands its probabilities on in a ring of two. The others hold half
of the columns each, transposed: columns are M, query rows N. They read the same codes as 16-bit words, two codes a
word, which become fp16 in registers: of the columns 2 * word and 2 * word + 1. So the softmax of one tile and the
conversions of another run beside products. They also bring each segment's query, and write its output through the
query's memory. Group scales are made ready by the copying warps.

A query of 8 significant bits is exactly the sum of two e4m3 terms. The matrix unit keeps about 14 bits in 8-bit
products: every piece of 128 columns has an accumulator of its own, added in fp32; the second term, which is 2^-4 of
the first, needs only one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...versions import thread_barrier
from ..parts.ring import wait_for_previous
from ..parts.schedule import LOG2E, deal, load_tiles, locate, meta_of, scalar, share, zero_padding
from .produce import produce
from .three_warpgroups_query import ROWS
from .three_warpgroups_scales import SCALES
from .three_warpgroups_score import LANES, PART_KEYS, PARTS, TILE, TURNS, score
from .three_warpgroups_values import add_values

REGISTERS = gl.constexpr(176)  # of a thread that adds values


@gluon.jit
def mla_decode_trio_kernel(
    QN, QP, BOX_C, BOX_P, BOX_S, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, nowhere, s_pitch, max_segments, sn_t, sn_h, sr_t, sr_h, st_b, so_t, so_h, sl_t, sl_h,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for one block of heads."""
    wait_for_previous()
    p = gl.program_id(0)
    num_programs = gl.num_programs(0)
    META = meta_of(PART, num_programs, c)
    if c.RAGGED:
        padding = gl.load(CU + B).to(gl.int32)  # arrives with the lengths
    SMALL: gl.constexpr = c.BLOCK_B < 1024 and not c.WHOLE  # then BLOCK_B holds all requests
    if SMALL:
        loaded = load_tiles(LENS, CU, B, c, not c.GROUP_SCALES)  # with group scales, registers are short
    E4M3: gl.constexpr = gl.float8e4nv
    WIDTH: gl.constexpr = 2 * c.CHUNK
    R: gl.constexpr = BOX_P.dtype
    WIDTH_R: gl.constexpr = BOX_P.block_shape[1]
    TERMS: gl.constexpr = 1 if QN.dtype.element_ty == E4M3 else 2
    Q_ROWS_R: gl.constexpr = ROWS if c.GROUP_SCALES else TERMS * ROWS
    codes = gl.allocate_shared_memory(E4M3, [STAGES * c.CHUNKS, TILE, WIDTH], BOX_C.layout)
    rotary = gl.allocate_shared_memory(R, [STAGES, TILE, WIDTH_R], BOX_P.layout)
    scales = rotary
    if c.GROUP_SCALES:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, TILE, c.CHUNKS], BOX_S.layout)
    Q_C: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TERMS * ROWS, WIDTH], E4M3)
    Q_R: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_ROWS_R, WIDTH_R], R)
    q_c = gl.allocate_shared_memory(E4M3, [c.CHUNKS, TERMS * ROWS, WIDTH], Q_C)
    q_r = gl.allocate_shared_memory(R, [1, Q_ROWS_R, WIDTH_R], Q_R)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, PART_KEYS], gl.float16)
    probs = gl.allocate_shared_memory(gl.float16, [PARTS * TURNS, ROWS, PART_KEYS], P)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    notes = gl.allocate_shared_memory(gl.float32, [TURNS, ROWS, LANES], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    flags = gl.allocate_shared_memory(gl.int8, [TURNS, 16, LANES, 4], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    factors = gl.allocate_shared_memory(gl.float32, [ROWS], PLAIN)
    box = gl.allocate_shared_memory(gl.int32, [3, 1], PLAIN)
    columns, ratios = notes, probs
    if c.GROUP_SCALES:
        columns = gl.allocate_shared_memory(gl.float32, [SCALES * STAGES, TILE], PLAIN)
        ratios = gl.allocate_shared_memory(gl.float16, [STAGES * c.CHUNKS, TILE], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    given = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [TURNS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    stored = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    started = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=2)
    mbarrier.init(started, count=2)
    mbarrier.init(stored, count=2)
    spread = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(spread.index(i), count=1)
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=3)
    for i in gl.static_range(TURNS):
        mbarrier.init(given.index(i), count=1)
        mbarrier.init(taken.index(i), count=2)
    scale_kv = scalar(kv_scale, KV_T, c.V_T)
    score_scale = scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E * scale_kv
    value_factor = scale_kv * scalar(out_scale, OUT_T, c.OUT_T)
    if SMALL:
        x, end, per, b, base = deal(loaded, p // c.HEADS, num_programs // c.HEADS, c)
    else:
        x, end, per = share(LENS, CU, B, p // c.HEADS, num_programs // c.HEADS, c)
        b, base = locate(LENS, CU, B, gl.minimum(x, end - 1), c)
    q = (q_c, q_r)
    rings, bars = (codes, rotary, scales), (full, free, given, taken, ready, stored, started, spread)
    hand = (probs, notes, flags, factors, columns, ratios, box)
    tensors = (QN, QP, LENS, CU, OUT, LSE, PART, META)
    strides = (sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h)
    place = (max_segments, p, per, x, end, b, base)
    work = (x, end, b, base, nowhere, s_pitch, st_b)
    # Of an 8-bit rotary part's tile half the products are of second terms: they run beside the softmax before. Where
    # there are none, or scales would need more registers, the values of the tile before do.
    AHEAD: gl.constexpr = TERMS == 2 and not c.GROUP_SCALES
    # NOTE: more than the compiler needs makes it wait for each product, and so does less.
    SCORE_REGISTERS: gl.constexpr = 136 if c.GROUP_SCALES else 128
    thread_barrier()  # what partitions are given may lie where sums were read from
    gl.warp_specialize(
        [
            (produce, ((BOX_C, BOX_P, BOX_S), TABLE, LENS, CU, (full, free), rings, work,
                       (started, columns, ratios, spread), STAGES, c)),
            (score, (tensors, q, rings, bars, hand, score_scale, value_factor, place, strides, STAGES, AHEAD,
                     TERMS, c)),
            (add_values, (tensors, q, rings, bars, hand, score_scale, place, strides, 0, STAGES, TERMS, c)),
            (add_values, (tensors, q, rings, bars, hand, score_scale, place, strides, 1, STAGES, TERMS, c)),
        ],
        [4, 4, 4],
        [SCORE_REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip
    if c.RAGGED:
        zero_padding(OUT, LSE, padding, T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
