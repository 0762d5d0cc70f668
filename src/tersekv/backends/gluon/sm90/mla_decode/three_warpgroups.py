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

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.ring import barrier_sets, wait_for_previous
from ..parts.schedule import load_tiles, meta_of, zero_padding
from .produce import More, produce
from .records import Boxes, Query, Rings, Strides, Tables, Tensors, holds_all, scales_of, share_of
from .three_warpgroups_query import ROWS
from .three_warpgroups_scales import SCALES
from .three_warpgroups_score import LANES, PART_KEYS, PARTS, TILE, TURNS, score
from .three_warpgroups_values import add_values

REGISTERS = gl.constexpr(176)  # of a thread that adds values


class Bars(NamedTuple):
    full: gl.shared_memory_descriptor  # of the ring
    free: gl.shared_memory_descriptor
    given: gl.shared_memory_descriptor  # a turn's probabilities are there
    taken: gl.shared_memory_descriptor  # they are multiplied
    ready: gl.shared_memory_descriptor  # the query is there
    stored: gl.shared_memory_descriptor  # the output is written, by way of the query's memory
    started: gl.shared_memory_descriptor  # the first query is there
    spread: gl.shared_memory_descriptor  # of the ring: group scales are ready


class Hand(NamedTuple):
    """What warpgroups hand to each other."""

    probs: gl.shared_memory_descriptor
    notes: gl.shared_memory_descriptor  # factors for what is summed so far; at the end, for the result
    flags: gl.shared_memory_descriptor  # whether a factor is not 1
    factors: gl.shared_memory_descriptor  # of the query rows
    columns: gl.shared_memory_descriptor  # group scales, for the scores
    ratios: gl.shared_memory_descriptor  # and for the values
    box: gl.shared_memory_descriptor  # numbers that all threads should be seen to share


@gluon.jit
def mla_decode_three_warpgroups_kernel(
    QN, QP, BOX_C, BOX_P, BOX_S, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, nowhere, s_pitch, max_segments, sn_t, sn_h, sr_t, sr_h, st_b, so_t, so_h, sl_t, sl_h,
    STAGES: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for one block of heads."""
    gl.static_assert(c.CODE == "e4m3", "a code that this kernel does not know")
    wait_for_previous()
    p = gl.program_id(0)
    num_programs = gl.num_programs(0)
    tensors = Tensors(QN, QP, LENS, CU, OUT, LSE, PART, meta_of(PART, num_programs, c))
    strides = Strides(sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h)
    boxes, tables = Boxes(BOX_C, BOX_P, BOX_S), Tables(TABLE, LENS, CU, st_b, nowhere, s_pitch)
    if c.RAGGED:
        padding = gl.load(CU + B).to(gl.int32)  # arrives with the lengths
    BY_WARP: gl.constexpr = not c.GROUP_SCALES  # with group scales, registers are short
    loaded = load_tiles(LENS, CU, B, c, BY_WARP) if holds_all(c) else ()
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
    full, free, spread = barrier_sets(STAGES, (1, 3, 1))
    given, taken = barrier_sets(TURNS, (1, 2))
    ready, stored, started = barrier_sets(1, (2, 2, 2))
    bars = Bars(full, free, given, taken, ready, stored, started, spread)
    call_scales = scales_of(softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T, c)
    share = share_of(LENS, CU, B, loaded, p // c.HEADS, num_programs // c.HEADS, max_segments, p, c)
    q, rings = Query(q_c, q_r), Rings(codes, rotary, scales)
    hand = Hand(probs, notes, flags, factors, columns, ratios, box)
    more = More(bars.started, columns, ratios, bars.spread)
    # Of an 8-bit rotary part's tile half the products are of second terms: they run beside the softmax before. Where
    # there are none, or scales would need more registers, the values of the tile before do.
    AHEAD: gl.constexpr = TERMS == 2 and not c.GROUP_SCALES
    # NOTE: more than the compiler needs makes it wait for each product, and so does less.
    SCORE_REGISTERS: gl.constexpr = 136 if c.GROUP_SCALES else 128
    thread_barrier()  # what partitions are given may lie where sums were read from
    gl.warp_specialize(
        [
            (produce, (boxes, tables, bars.full, bars.free, rings, share, more, STAGES, c)),
            (score, (tensors, q, rings, bars, hand, call_scales, share, strides, STAGES, AHEAD, TERMS, c)),
            (add_values, (tensors, q, rings, bars, hand, call_scales.score, share, strides, 0, STAGES, TERMS, c)),
            (add_values, (tensors, q, rings, bars, hand, call_scales.score, share, strides, 1, STAGES, TERMS, c)),
        ],
        [4, 4, 4],
        [SCORE_REGISTERS, REGISTERS, REGISTERS],
    )  # fmt: skip
    if c.RAGGED:
        zero_padding(OUT, LSE, padding, T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
