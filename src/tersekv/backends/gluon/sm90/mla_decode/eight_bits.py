"""MLA decode over 8-bit latents on sm_90: rows of codes meet the matrix unit as its M side, and query rows as N.

A tile of 64 keys arrives by TMA, in a ring of STAGES tiles. Scores are 8-bit products straight from it: a query of 8
significant bits is exactly the sum of two e4m3 terms, which lie side by side along N. Every piece of 128 columns has
an accumulator of its own, added in fp32, since the matrix unit keeps about 14 bits in 8-bit products. As values the
same codes are read as 16-bit words, transposed, two codes a word, and become fp16 in registers; part j of a chunk of
words holds the columns 2 * word + j.

Where TURNS is 2, two warpgroups take turns on the tiles of a segment, each with sums of its own. At the segment's end
both are scaled to one reference, and each gives the other a half of the columns.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.ring import barriers, wait_for_previous
from ..parts.schedule import load_tiles, meta_of, zero_padding
from .few_rows import Bars, Hand, consume
from .produce import produce
from .records import Boxes, Query, Rings, Strides, Tables, Tensors, holds_all, scales_of, share_of


@gluon.jit
def mla_decode_codes_kernel(
    QN, QP, BOX_C, BOX_P, BOX_S, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, nowhere, s_pitch, max_segments, sn_t, sn_h, sr_t, sr_h, st_b, so_t, so_h, sl_t, sl_h,
    STAGES: gl.constexpr, TURNS: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for one block of heads."""
    gl.static_assert(c.CODE == "e4m3", "a code that this kernel does not know")
    wait_for_previous()
    p = gl.program_id(0)
    num_programs = gl.num_programs(0)
    i_share, num_shares = p // c.HEADS, num_programs // c.HEADS
    tensors = Tensors(QN, QP, LENS, CU, OUT, LSE, PART, meta_of(PART, num_programs, c))
    strides = Strides(sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h)
    boxes, tables = Boxes(BOX_C, BOX_P, BOX_S), Tables(TABLE, LENS, CU, st_b, nowhere, s_pitch)
    loaded = load_tiles(LENS, CU, B, c) if holds_all(c) else ()
    if c.RAGGED:
        padding = gl.load(CU + B).to(gl.int32)  # arrives with the lengths
    E4M3: gl.constexpr = gl.float8e4nv
    WIDTH: gl.constexpr = 2 * c.CHUNK
    R: gl.constexpr = BOX_P.dtype
    WIDTH_R: gl.constexpr = BOX_P.block_shape[1]
    Q_ROWS: gl.constexpr = c.ROWS if QN.dtype.element_ty == gl.float8e4nv else 2 * c.ROWS
    Q_ROWS_R: gl.constexpr = c.ROWS if c.GROUP_SCALES else Q_ROWS
    PROBS: gl.constexpr = c.CHUNKS if c.GROUP_SCALES else 1
    codes = gl.allocate_shared_memory(E4M3, [STAGES * c.CHUNKS, c.TILE, WIDTH], BOX_C.layout)
    rotary = gl.allocate_shared_memory(R, [STAGES, c.TILE, WIDTH_R], BOX_P.layout)
    scales = rotary
    if c.GROUP_SCALES:
        scales = gl.allocate_shared_memory(gl.float32, [STAGES, c.TILE, c.CHUNKS], BOX_S.layout)
    Q_C: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_ROWS, WIDTH], E4M3)
    Q_R: gl.constexpr = gl.NVMMASharedLayout.get_default_for([Q_ROWS_R, WIDTH_R], R)
    q_c = gl.allocate_shared_memory(E4M3, [c.CHUNKS, Q_ROWS, WIDTH], Q_C)
    q_r = gl.allocate_shared_memory(R, [1, Q_ROWS_R, WIDTH_R], Q_R)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.TILE, c.ROWS], gl.float16)
    probs = gl.allocate_shared_memory(gl.float16, [TURNS * PROBS, c.TILE, c.ROWS], P)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    flags = gl.allocate_shared_memory(gl.int8, [TURNS, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    X: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 4, [1, 0])
    notes, places, q_ready, noted, given = flags, flags, flags, flags, flags
    if TURNS == 2:
        # Not where nobody waits for them: their memory would be given to others, with a barrier in it.
        q_ready, noted, given = (barriers(1), barriers(1)), (barriers(1), barriers(1)), (barriers(1), barriers(1))
        notes = gl.allocate_shared_memory(gl.float32, [4, c.ROWS], FLAT)
        places = gl.allocate_shared_memory(gl.float32, [c.CHUNKS, c.CHUNK, c.ROWS], X)
    # NOTE: of two warpgroups that take turns each waits for every other tile, and a wait sees no further back than one
    # phase. With a barrier for each of three places the phase before would be that of the other's tile, which may still
    # be under way when a later tile has come. Of twice as many, one is the same warpgroup's all through a segment; at
    # its end both have met.
    bars = Bars(barriers(TURNS * STAGES), barriers(STAGES))
    call_scales = scales_of(softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T, c)
    share = share_of(LENS, CU, B, loaded, i_share, num_shares, max_segments, p, c)
    q, rings = Query(q_c, q_r), Rings(codes, rotary, scales)
    hand = Hand(probs, flags, notes, places, q_ready, noted, given)
    thread_barrier()  # what partitions are given may lie where sums were read from
    # The producer is the default partition: it has four warps anyway.
    if TURNS == 2:
        gl.warp_specialize(
            [
                (produce, (boxes, tables, bars.full, bars.free, rings, share, (), STAGES, c)),
                (consume, (tensors, q, rings, bars, hand, call_scales, share, strides, STAGES, 0, TURNS, c)),
                (consume, (tensors, q, rings, bars, hand, call_scales, share, strides, STAGES, 1, TURNS, c)),
            ],
            [4, 4],
            [240, 240],
        )  # fmt: skip
    else:
        REGISTERS: gl.constexpr = 216 if c.GROUP_SCALES else 232  # what scales are addressed with would be spilled
        gl.warp_specialize(
            [
                (produce, (boxes, tables, bars.full, bars.free, rings, share, (), STAGES, c)),
                (consume, (tensors, q, rings, bars, hand, call_scales, share, strides, STAGES, 0, TURNS, c)),
            ],
            [4],
            [REGISTERS],
        )  # fmt: skip
    if c.RAGGED:
        zero_padding(OUT, LSE, padding, T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
