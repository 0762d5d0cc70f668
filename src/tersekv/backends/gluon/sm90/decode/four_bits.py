"""The split pass of paged decode on Hopper where keys or values are of 4 bits: `kernel` with a fifth warp that copies.

Unpacking 4 bits keeps the four warps of a program busy with instructions. So starting the copies, which takes them as
many per tile as unpacking 10 keys, and four times as many with pages of 16, is left to a warp of its own.
For the same reason a warp has all of up to 32 query rows of its head, and unpacks once (`attend_rows`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import thread_barrier
from ..parts.ring import barrier_sets, launch_dependents, wait_for_previous
from ..parts.schedule import LOG2E, meta_of, pieces_from, request_at, request_tiles, scalar, segment_at, zero_padding
from .attend import attend_tile, empty_state
from .attend_rows import attend_rows, empty_rows, ended
from .fetch import advance, copy_codes, copy_scales, cursor_at, make_rings
from .kernel import heads_of, meta_at, note_cut, store_rows_of_heads, store_state_of_heads
from .query import loaded_query
from .records import Boxes, Query, Scales, SeenBy, Strides, Tables, Tensors
from .seen import whole_tiles
from .tiles import keep_part, mma_layout, query_image
from .turns import keep_turns, load_turns, make_turns, turned_back
from .work import even_share_of, per_head


@gluon.jit
def produce(boxes, tables, rings, full, free, h0, share, c: gl.constexpr, g: gl.constexpr):
    """Copy every tile of the share, as places in the rings become free."""
    COPIES: gl.constexpr = g.COPIES * g.HALVES
    BYTES: gl.constexpr = g.K.BYTES + g.K.SCALE_BYTES + g.V.BYTES + g.V.SCALE_BYTES
    cursor = cursor_at(tables, share, c, g)
    for turn in range(0, share.end - share.x):
        stage, tile = turn % g.STAGES, cursor.first + cursor.t
        mbarrier.wait(free.index(stage), ((turn // g.STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, COPIES * BYTES)
        for i in gl.static_range(COPIES):
            page, place = cursor.pages[i], stage * g.HALVES + i % g.HALVES
            slot = (tile * c.TILE + i * (g.COPY // g.HALVES)) % c.PAGE
            copy_codes(boxes.K, rings.k[i // g.HALVES], bar, place, page, h0, slot, True, c.K_PITCH, g)
            if g.K.SCALE_BYTES > 0:
                copy_scales(boxes.KS, rings.k_scales[i // g.HALVES], bar, place, page, h0, slot, True, False, g)
            copy_codes(boxes.V, rings.v[i // g.HALVES], bar, place, page, h0, slot, True, c.V_PITCH, g)
            if g.V.SCALE_BYTES > 0:
                copy_scales(boxes.VS, rings.v_scales[i // g.HALVES], bar, place, page, h0, slot, True, True, g)
        cursor = advance(cursor, tables, share.end, c, g)


@gluon.jit
def consume(tensors, scales, strides, rings, turns, image, full, free, share, c: gl.constexpr, g: gl.constexpr):
    """Attend the share's tiles for HB heads."""
    LENS, CU, MASK = tensors.LENS, tensors.CU, tensors.MASK
    x, end, b, base = share.x, share.end, share.b, share.base
    h0 = share.group * g.HB
    h = heads_of(h0, gl.SliceLayout(1, gl.SliceLayout(1, mma_layout(g.HB, g.RB))), g)
    k_scales = scales.score * per_head(scales.k, scales.K_T, h, c.K_T, c.K_T_STRIDE)
    h_scale = per_head(scales.v, scales.V_T, h, c.V_T, c.V_T_STRIDE) * scales.out
    request = request_tiles(LENS, CU, b, x < end, c)
    turn = 0
    while x < end:
        b, base, request = request_at(LENS, CU, x, b, base, request, c)
        segment = segment_at(x, end, b, base, request)
        r0 = segment.i * c.ROWS
        q, factor = loaded_query(tensors, strides, turns, segment, h0, c, g)
        if c.ROWS > 16:
            thread_barrier()
            for i in gl.static_range(gl.constexpr(g.K.PARTS)):
                keep_part(image, i, q.parts[i], c, g)
            thread_barrier()
            q = Query(image, q.total)
        scale = k_scales[:, None] * factor
        seen_by = SeenBy(segment.keys, segment.rows, r0, segment.q0, MASK, strides.mask_t)
        u0, u1 = whole_tiles(request, c)
        attend: gl.constexpr = attend_rows if c.ROWS > 16 else attend_tile
        state = empty_rows(c, g) if c.ROWS > 16 else empty_state(c, g)
        for t in range(request.first + segment.t0, request.first + segment.t1):
            stage = turn % g.STAGES
            mbarrier.wait(full.index(stage), (turn // g.STAGES) & 1)
            if (t >= u0) & (t < u1):
                state = attend(state, rings, stage, q, scale, scales.softcap, t, seen_by, False, c, g)
            else:
                state = attend(state, rings, stage, q, scale, scales.softcap, t, seen_by, True, c, g)
            thread_barrier()
            mbarrier.arrive(free.index(stage))
            turn += 1
        state = ended(state, c, g)
        if g.V.TURN.ANY:
            state = turned_back(state, turns, c, g)
        if segment.t0 == 0:
            pieces = pieces_from(segment, share.per, share.i)
            note_cut(meta_at(tensors.META, segment, share.group, g), pieces, share.i)
        if segment.t1 - segment.t0 == segment.tiles:
            store_rows_of_heads(tensors, strides, state, h_scale, h0, segment, c, g)
        else:
            slot = 2 * (share.i * c.HEADS + h0) + gl.where(segment.t0 == 0, 1, 0)
            store_state_of_heads(tensors.PART, slot, state, h0, segment.rows * c.GROUP - r0, c, g)
        x += segment.t1 - segment.t0


@gluon.jit(do_not_specialize=["T"], do_not_specialize_on_alignment=["B"])
def decode_four_bits_kernel(
    Q, K, V, KS, VS, TABLE, LENS, CU, MASK, SINKS, OUT, LSE, PART, K_SIGNS, V_SIGNS, K_CHANNELS, V_CHANNELS,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, sq_t, sq_h, st_b, sm_t, so_t, so_h, sl_t, sl_h, c: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for HB heads. See the module's docstring, and `decode_kernel`'s."""
    p = gl.program_id(0)
    i_share, num_shares = p // g.GROUPS, gl.num_programs(0) // g.GROUPS
    i_group = p % g.GROUPS
    META = meta_of(PART, num_shares * c.HEADS, c)
    rings = make_rings(g)
    turns = make_turns(rings.k[0], c, g)
    image = query_image(c.WORDS_K, c, g) if c.ROWS > 16 else rings.k[0]
    full, free = barrier_sets(g.STAGES, (1, 1))
    fence_async_shared()
    wait_for_previous()
    if c.RAGGED:
        zero_padding(OUT, LSE, gl.load(CU + B).to(gl.int32), T, p, gl.num_programs(0), so_t, so_h, sl_t, sl_h, c)
    factors = load_turns((K_SIGNS, V_SIGNS), (K_CHANNELS, V_CHANNELS), i_group * g.HB, c, g)
    share = even_share_of(LENS, CU, B, i_share, num_shares, i_group, c)
    keep_turns(turns, factors)
    tensors = Tensors(Q, LENS, CU, MASK, SINKS, OUT, LSE, PART, META)
    scales = Scales(
        scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E, k_scale, K_T, v_scale, V_T,
        scalar(out_scale, OUT_T, c.OUT_T), softcap,
    )  # fmt: skip
    strides = Strides(sq_t, sq_h, sm_t, so_t, so_h, sl_t, sl_h)
    boxes, tables = Boxes(K, V, KS, VS), Tables(TABLE, LENS, CU, st_b)
    thread_barrier()  # what partitions are given may lie where sums were read from
    gl.warp_specialize(
        [
            (consume, (tensors, scales, strides, rings, turns, image, full, free, share, c, g)),
            (produce, (boxes, tables, rings, full, free, i_group * g.HB, share, c, g)),
        ],
        [1],
        [24],
    )
    launch_dependents()
