"""MLA decode over 16-bit latents for up to 32 query rows on sm_90: keys are the matrix unit's M side, query rows its N.

A tile of 64 keys arrives by TMA, in a ring of STAGES tiles, and is multiplied straight from there: by keys for the
scores, and transposed, by columns, for the values. So few rows are not padded to 64, as in two_warpgroups.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...versions import thread_barrier
from ..parts.ring import barriers, wait_for_previous
from ..parts.schedule import load_tiles, meta_of, zero_padding
from .few_rows import Bars, Hand, consume
from .produce import produce
from .records import Boxes, Query, Rings, Strides, Tables, Tensors, holds_all, scales_of, share_of
from .sixteen_bits_tiles import BOX, BOXES


@gluon.jit
def mla_decode_sixteen_bits_kernel(
    QN, QP, BOX_C, BOX_P, BOX_S, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, nowhere, s_pitch, max_segments, sn_t, sn_h, sr_t, sr_h, st_b, so_t, so_h, sl_t, sl_h,
    STAGES: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for one block of heads."""
    gl.static_assert(c.CODE == "bf16", "a code that this kernel does not know")
    wait_for_previous()
    p = gl.program_id(0)
    num_programs = gl.num_programs(0)
    i_share, num_shares = p // c.HEADS, num_programs // c.HEADS
    tensors = Tensors(QN, QP, LENS, CU, OUT, LSE, PART, meta_of(PART, num_programs, c))
    strides = Strides(sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h)
    boxes, tables = Boxes(BOX_C, BOX_P, BOX_S), Tables(TABLE, LENS, CU, st_b, nowhere, s_pitch)
    loaded = load_tiles(LENS, CU, B, c, True) if holds_all(c) else ()
    if c.RAGGED:
        padding = gl.load(CU + B).to(gl.int32)  # arrives with the lengths
    X: gl.constexpr = BOX_C.dtype
    ring_c = gl.allocate_shared_memory(X, [STAGES * BOXES, c.TILE, BOX], BOX_C.layout)
    ring_p = gl.allocate_shared_memory(X, [STAGES, c.TILE, BOX], BOX_P.layout)
    q = gl.allocate_shared_memory(X, [BOXES + 1, c.ROWS, BOX], gl.NVMMASharedLayout.get_default_for([c.ROWS, BOX], X))
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.TILE, c.ROWS], X)
    probs = gl.allocate_shared_memory(X, [1, c.TILE, c.ROWS], P)
    flags = gl.allocate_shared_memory(gl.int8, [1, 32, 4], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    bars = Bars(barriers(STAGES), barriers(STAGES))
    call_scales = scales_of(softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T, c)
    share = share_of(LENS, CU, B, loaded, i_share, num_shares, max_segments, p, c)
    q_all, rings = Query(q, q), Rings(ring_c, ring_p, ring_p)
    hand = Hand(probs, flags, flags, flags, (), (), ())
    thread_barrier()  # what partitions are given may lie where sums were read from
    # The producer is the default partition: it has four warps anyway.
    gl.warp_specialize(
        [
            (produce, (boxes, tables, bars.full, bars.free, rings, share, (), STAGES, c)),
            (consume, (tensors, q_all, rings, bars, hand, call_scales, share, strides, STAGES, 0, 1, c)),
        ],
        [4],
        [232],
    )  # fmt: skip
    if c.RAGGED:
        zero_padding(OUT, LSE, padding, T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
