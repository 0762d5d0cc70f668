"""The split pass of paged decode of 4-bit caches on Hopper: `kernel`' with a fifth warp that copies.

Unpacking 4 bits keeps the four warps of a program busy with instructions. So starting the copies, which takes them as
many per tile as unpacking 10 keys, and four times as many with pages of 16, is left to a warp of its own.
For the same reason a warp has all of up to 32 query rows of its head, and unpacks once (`attend_rows`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from ...versions import thread_barrier
from ..parts.ring import launch_dependents, wait_for_previous
from ..parts.schedule import LOG2E, meta_of, request_tiles, scalar, zero_padding
from .attend import attend_tile, empty_state
from .attend_rows import attend_rows, empty_rows, ended
from .fetch import advance, copy_codes, copy_scales, cursor_at, make_rings
from .kernel import heads_of, store_rows, store_state, whole_tiles
from .query import load_query
from .tiles import keep_part, mma_layout, query_image
from .work import even_share_and_place, per_head


@gluon.jit
def produce(boxes, tables, st_b, rings, bars, h0, place, c: gl.constexpr, g: gl.constexpr):
    """Copy every tile of the share [x, end), as places in the rings become free."""
    K, V, KS, VS = boxes
    TABLE, LENS, CU = tables
    kbuf, ksbuf, vbuf, vsbuf = rings
    full, free = bars
    x, end, b, base = place
    COPIES: gl.constexpr = g.COPIES
    BYTES: gl.constexpr = g.K.BYTES + g.K.SCALE_BYTES + g.V.BYTES + g.V.SCALE_BYTES
    cursor = cursor_at(TABLE, LENS, CU, st_b, x, end, b, base, c, g)
    for turn in range(0, end - x):
        stage, tile = turn % g.STAGES, cursor[6] + cursor[2]
        mbarrier.wait(free.index(stage), ((turn // g.STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, COPIES * BYTES)
        for j in gl.static_range(COPIES):
            page, slot = cursor[8][j], (tile * c.TILE + j * g.COPY) % c.PAGE
            copy_codes(K, kbuf[j], bar, stage, page, h0, slot, True, c.K_PITCH, g)
            copy_scales(KS, ksbuf[j], bar, stage, page, h0, slot, True, False, g)
            copy_codes(V, vbuf[j], bar, stage, page, h0, slot, True, c.V_PITCH, g)
            copy_scales(VS, vsbuf[j], bar, stage, page, h0, slot, True, True, g)
        cursor = advance(cursor, TABLE, LENS, CU, st_b, end, c, g)


@gluon.jit
def consume(tensors, numbers, strides, rings, image, bars, team, place, c: gl.constexpr,
            g: gl.constexpr):  # fmt: skip
    """Attend the share [x, end) of all tiles for HB heads."""
    Q, LENS, CU, MASK, SINKS, OUT, LSE, PART, META = tensors
    score_scale, k_scale, K_T, v_scale, V_T, out_scale, softcap = numbers
    sq_t, sq_h, sm_t, so_t, so_h, sl_t, sl_h = strides
    kbuf, ksbuf, vbuf, vsbuf = rings
    full, free = bars
    i_share, i_group, per = team
    x, end, b, base = place
    h0 = i_group * g.HB
    h = heads_of(h0, gl.SliceLayout(1, gl.SliceLayout(1, mma_layout(g.HB, g.RB))), g)
    k_scales = score_scale * per_head(k_scale, K_T, h, c.K_T, c.K_T_STRIDE)
    h_scale = per_head(v_scale, V_T, h, c.V_T, c.V_T_STRIDE) * out_scale
    tiles, segments, first, n, rows, q0 = request_tiles(LENS, CU, b, x < end, c)
    turn = 0
    while x < end:
        while x - base >= tiles * segments:
            base += tiles * segments
            b += 1
            tiles, segments, first, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
        segment = (x - base) // tiles
        t0 = (x - base) % tiles
        t1 = gl.minimum(t0 + end - x, tiles)
        r0 = segment * c.ROWS
        q, factor = load_query(Q, q0, h0, r0, rows * c.GROUP, sq_t, sq_h, c, g)
        if c.ROWS > 16:
            thread_barrier()
            for i in gl.static_range(gl.constexpr(c.PARTS)):
                keep_part(image, i, q[i], c, g)
            thread_barrier()
            q = image
        scale = k_scales[:, None] * factor
        u0, u1 = whole_tiles(n, rows, first, c)
        attend: gl.constexpr = attend_rows if c.ROWS > 16 else attend_tile
        state = empty_rows(c, g) if c.ROWS > 16 else empty_state(c, g)
        for t in range(first + t0, first + t1):
            stage = turn % g.STAGES
            mbarrier.wait(full.index(stage), (turn // g.STAGES) & 1)
            if (t >= u0) & (t < u1):
                state = attend(state, kbuf, vbuf, ksbuf, vsbuf, stage, q, scale, softcap, t, n, rows, r0, q0, MASK,
                               sm_t, False, c, g)  # fmt: skip
            else:
                state = attend(state, kbuf, vbuf, ksbuf, vsbuf, stage, q, scale, softcap, t, n, rows, r0, q0, MASK,
                               sm_t, True, c, g)  # fmt: skip
            thread_barrier()
            mbarrier.arrive(free.index(stage))
            turn += 1
        m, l, acc = ended(state, c, g)
        if t0 == 0:
            pieces = (base + (segment + 1) * tiles - 1) // per - i_share + 1
            p_meta = META + ((b * g.SEGMENTS + segment) * g.GROUPS + i_group) * 2
            gl.store(p_meta, pieces)
            gl.store(p_meta + 1, i_share)
        if t1 - t0 == tiles:
            store_rows(OUT, LSE, SINKS, m, l, acc, h_scale, h0, q0, r0, rows * c.GROUP, so_t, so_h, sl_t, sl_h,
                       c, g)  # fmt: skip
        else:
            slot = 2 * (i_share * c.HEADS + h0) + gl.where(t0 == 0, 1, 0)
            store_state(PART, slot, m, l, acc, h0, rows * c.GROUP - r0, c, g)
        x += t1 - t0


@gluon.jit
def decode_nvfp4_kernel(
    Q, K, V, KS, VS, TABLE, LENS, CU, MASK, SINKS, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, sq_t, sq_h, st_b, sm_t, so_t, so_h, sl_t, sl_h, c: gl.constexpr, g: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for HB heads. See the module's docstring, and decode_kernels'."""
    p = gl.program_id(0)
    i_share, num_shares = p // g.GROUPS, gl.num_programs(0) // g.GROUPS
    i_group = p % g.GROUPS
    META = meta_of(PART, num_shares * c.HEADS, c)
    kbuf, ksbuf = make_rings(gl.int32, False, g)
    vbuf, vsbuf = make_rings(gl.int32, True, g)
    image = query_image(c.WORDS_K, c, g) if c.ROWS > 16 else kbuf[0]
    full = gl.allocate_shared_memory(gl.int64, [g.STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [g.STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(gl.constexpr(g.STAGES)):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    fence_async_shared()
    wait_for_previous()
    if c.RAGGED:
        zero_padding(OUT, LSE, gl.load(CU + B).to(gl.int32), T, p, gl.num_programs(0), so_t, so_h, sl_t, sl_h, c)
    x, end, per, b, base = even_share_and_place(LENS, CU, B, i_share, num_shares, c)
    tensors = (Q, LENS, CU, MASK, SINKS, OUT, LSE, PART, META)
    numbers = (
        scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E, k_scale, K_T, v_scale, V_T,
        scalar(out_scale, OUT_T, c.OUT_T), softcap,
    )  # fmt: skip
    strides = (sq_t, sq_h, sm_t, so_t, so_h, sl_t, sl_h)
    boxes, tables, rings, bars = (K, V, KS, VS), (TABLE, LENS, CU), (kbuf, ksbuf, vbuf, vsbuf), (full, free)
    team, place = (i_share, i_group, per), (x, end, b, base)
    thread_barrier()  # what partitions are given may lie where sums were read from
    gl.warp_specialize(
        [
            (consume, (tensors, numbers, strides, rings, image, bars, team, place, c, g)),
            (produce, (boxes, tables, st_b, rings, bars, i_group * g.HB, place, c, g)),
        ],
        [1],
        [24],
    )
    launch_dependents()
