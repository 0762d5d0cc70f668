"""MLA decode over 8-bit latents on sm_90: rows of codes meet the matrix unit as its M side, and query rows as N.

A tile of 64 keys arrives by TMA, in a ring of STAGES tiles. Scores are 8-bit products straight from it: a query of 8
significant bits is exactly the sum of two e4m3 terms, which lie side by side along N. Every piece of 128 columns has
an accumulator of its own, added in fp32, since the matrix unit keeps about 14 bits in 8-bit products. As values the
same codes are read as 16-bit words, transposed, two codes a word, and become fp16 in registers; part j of a chunk of
words holds the columns 2 * word + j.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..triton.tiles import E4M3_PTX
from .mla_decode_produce import produce
from .schedule import (
    LOG2E,
    finish,
    locate,
    meta_of,
    note_pieces,
    output,
    request_tiles,
    row_places,
    scalar,
    share,
    zero_padding,
)

SLACK = gl.constexpr(8.0)  # probabilities are at most 2^SLACK before they are normalised, which fp16 holds
MIN_SCALE = gl.constexpr(1e-30)  # of a key's chunks: its reciprocal is finite


@gluon.jit
def unpack(words):
    """16-bit words → two fp16 tiles of their codes."""
    return gl.inline_asm_elementwise(E4M3_PTX, "=r,=r,r", [words], [gl.float16, gl.float16], True, 2)


@gluon.jit
def query_piece(p_row, m_row, FIRST: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Columns FIRST … of the query rows: [rows, COLUMNS]."""
    o_d = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
    return gl.load(p_row[:, None] + o_d[None, :], mask=m_row[:, None], other=0.0)


@gluon.jit
def store_terms(x, place, TERMS: gl.constexpr):
    """Put x into the first rows of `place` as e4m3, and what that leaves of it into the rows behind."""
    ROWS: gl.constexpr = x.shape[0]
    high = x.to(gl.float8e4nv)
    place.slice(0, ROWS).store(high)
    if TERMS == 2:
        place.slice(ROWS, ROWS).store((x - high.to(gl.float32)).to(gl.float8e4nv))


@gluon.jit
def load_query(QN, QP, q_c, q_r, segment, h, q0, rows, sn_t, sn_h, sr_t, sr_h, which: gl.constexpr,
               TERMS: gl.constexpr, LAYOUT: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """Put the query rows into shared memory, and return a factor of the scores [ROWS].

    A power of two is taken out of each row so that its largest element lies in [128, 256): what is 2^-10 of that is
    still exact in two e4m3 terms.
    """
    CHUNKS: gl.constexpr = c.CHUNKS
    WIDTH: gl.constexpr = 2 * c.CHUNK
    WIDTH_R: gl.constexpr = q_r.shape[1]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    tokens, heads, m_row = row_places(segment, h, q0, rows, gl.SliceLayout(1, L), c)
    p_c, p_r = QN + tokens * sn_t + heads * sn_h, QP + tokens * sr_t + heads * sr_h
    # All loads are under way before the first is used.
    rotary, pieces = query_piece(p_r, m_row, 0, WIDTH_R, L), ()
    for i in gl.static_range(CHUNKS):
        pieces = pieces + (query_piece(p_c, m_row, i * WIDTH, WIDTH, L),)
    inverse = gl.full([c.ROWS], 1.0, gl.float32, gl.SliceLayout(1, L))
    factor = inverse
    if TERMS == 2:
        top = gl.max(gl.abs(rotary.to(gl.float32)), 1)
        for i in gl.static_range(CHUNKS):
            top = gl.maximum(top, gl.max(gl.abs(pieces[i].to(gl.float32)), 1))
        field = gl.maximum((top.to(gl.int32, bitcast=True) >> 23) & 0xFF, 8)
        inverse = ((261 - field) << 23).to(gl.float32, bitcast=True)
        factor = gl.where(field == 255, float("nan"), ((field - 7) << 23).to(gl.float32, bitcast=True))
    for i in gl.static_range(CHUNKS):
        store_terms(pieces[i].to(gl.float32) * inverse[:, None], q_c.index(which * CHUNKS + i), TERMS)
    x = rotary.to(gl.float32) * inverse[:, None]
    if q_r.dtype == gl.bfloat16:
        q_r.store(x.to(gl.bfloat16))
    else:
        store_terms(x, q_r, TERMS)
    fence_async_shared()
    return gl.convert_layout(factor, LAYOUT)


@gluon.jit
def as_words(codes):
    """A tile of codes in shared memory, as 16-bit words."""
    return codes._reinterpret(
        gl.int16, [codes.shape[0], codes.shape[1] // 2], gl.NVMMASharedLayout(codes.layout.swizzle_byte_width, 16)
    )


@gluon.jit
def drop_stale(codes, slot, keys, c: gl.constexpr):
    """Rows behind the tile's last key become 0: a probability of 0 does not hide a NaN."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    real = gl.arange(0, c.TILE, gl.SliceLayout(1, L)) < keys
    for i in range(c.CHUNKS):  # not unrolled: it is rare, and the loop around it should stay small
        place = as_words(codes.index(slot * c.CHUNKS + i))
        x = place.load(L)
        place.store(gl.where(real[:, None], x, 0))


@gluon.jit
def add_terms(s, S: gl.constexpr, TERMS: gl.constexpr):
    """Sums of the query's terms: fp32 [TILE, ROWS]."""
    if TERMS == 2:
        TILE: gl.constexpr = s.shape[0]
        ROWS: gl.constexpr = s.shape[1] // 2
        high, low = gl.split(gl.permute(gl.reshape(s, [TILE, 2, ROWS]), (0, 2, 1)))
        s = high + low
    return gl.convert_layout(s, S)


@gluon.jit
def scores(rings, slot, q, here, which: gl.constexpr, TERMS: gl.constexpr, S: gl.constexpr, S8: gl.constexpr,
           c: gl.constexpr):  # fmt: skip
    """Products of the tile's keys and the query rows: fp32 [TILE, ROWS]."""
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary, _ = rings
    q_c, q_r = q
    zero = gl.full([c.TILE, TERMS * c.ROWS], 0.0, gl.float32, S8)
    # One accumulator is in flight while the one before is added, where registers allow.
    AHEAD: gl.constexpr = 1 if c.ROWS <= 16 else 0
    x = warpgroup_mma(rotary.index(slot), q_r.index(here + which).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = zero
    for i in gl.static_range(CHUNKS):
        before = x
        if AHEAD == 0:
            before = warpgroup_mma_wait(0, [before])
            s = before if i == 0 else s + before
        q_i = q_c.index(here + (which * CHUNKS + i)).permute((1, 0))
        x = warpgroup_mma(codes.index(slot * CHUNKS + i), q_i, zero, use_acc=False, is_async=True)
        if AHEAD == 1:
            before = warpgroup_mma_wait(1, [before])
            s = before if i == 0 else s + before
    return add_terms(s + warpgroup_mma_wait(0, [x]), S, TERMS)


@gluon.jit
def scaled_scores(rings, slot, q, here, scales, which: gl.constexpr, TERMS: gl.constexpr, S: gl.constexpr,
                  S8: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """The same where each chunk of a key has a scale, and the rotary part is bf16."""
    CHUNKS: gl.constexpr = c.CHUNKS
    codes, rotary, _ = rings
    q_c, q_r = q
    zero = gl.full([c.TILE, TERMS * c.ROWS], 0.0, gl.float32, S8)
    s = gl.full([c.TILE, c.ROWS], 0.0, gl.float32, S)
    s = warpgroup_mma(rotary.index(slot), q_r.index(here + which).permute((1, 0)), s, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, [s])
    for i in gl.static_range(CHUNKS):
        q_i = q_c.index(here + (which * CHUNKS + i)).permute((1, 0))
        x = warpgroup_mma(codes.index(slot * CHUNKS + i), q_i, zero, use_acc=False, is_async=True)
        s += add_terms(warpgroup_mma_wait(0, [x]), S, TERMS) * scales[i][:, None]
    return s


@gluon.jit
def load_scales(place, keys, COLUMN: gl.constexpr):
    """The four scales of each key of a tile, [TILE] each; 1 behind the last key."""
    # Each thread holds those of its two rows of scores.
    L: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0]], [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 4]
    )
    x = place.load(L)
    real = gl.arange(0, 64, gl.SliceLayout(1, L)) < keys
    x = gl.where(real[:, None], x, 1.0)
    even, odd = gl.split(gl.reshape(x, [64, 2, 2]))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    return (
        gl.convert_layout(s0, COLUMN), gl.convert_layout(s1, COLUMN), gl.convert_layout(s2, COLUMN),
        gl.convert_layout(s3, COLUMN),
    )  # fmt: skip


@gluon.jit
def add_values(acc, codes, slot, probs, which: gl.constexpr, LEAN: gl.constexpr, O: gl.constexpr, c: gl.constexpr):
    """acc + the tile's values, transposed, times the probabilities in shared memory [TILE, ROWS].

    With group scales there is a tile of probabilities for each chunk.

    LEAN: a chunk becomes fp16 only when the one before is multiplied, which needs fewer registers.
    """
    CHUNKS: gl.constexpr = c.CHUNKS
    A: gl.constexpr = gl.DotOperandLayout(0, O, 2)
    out, done = (), ()
    for i in gl.static_range(CHUNKS):
        w = as_words(codes.index(slot * CHUNKS + i)).permute((1, 0)).load(A)
        if LEAN and i > 0:
            done = done + warpgroup_mma_wait(0, [out[2 * i - 2], out[2 * i - 1]])
        v = unpack(w)
        p = probs.index(which * CHUNKS + i if c.GROUP_SCALES else which)
        for j in gl.static_range(2):
            out = out + (warpgroup_mma(v[j], p, acc[2 * i + j], is_async=True),)
        if not LEAN and i > 0:
            done = done + warpgroup_mma_wait(2, [out[2 * i - 2], out[2 * i - 1]])
    return done + warpgroup_mma_wait(0, [out[2 * CHUNKS - 2], out[2 * CHUNKS - 1]])


@gluon.jit
def fold(p):
    """Sums over those keys of a tile of probabilities that one thread holds: [TILE / 16, 8, ROWS]."""
    return gl.sum(gl.reshape(p, [p.shape[0] // 16, 2, 8, p.shape[1]]), 1)


@gluon.jit
def raise_reference(m_new, m, l, acc, O: gl.constexpr, c: gl.constexpr):
    """(m_new, sums, accumulators), the latter two scaled from reference m to m_new."""
    PIECES: gl.constexpr = 2 * c.CHUNKS
    L_COLUMN: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, l.type.layout))
    old = gl.exp2(m - gl.where(m_new == float("-inf"), 0.0, m_new))
    l = l * gl.convert_layout(old, L_COLUMN)[None, :][:, None, :]
    old = gl.convert_layout(old, gl.SliceLayout(0, O))
    out = ()
    for i in gl.static_range(PIECES):
        out = out + (acc[i] * old[None, :],)
    return m_new, l, out


@gluon.jit
def attend(q, rings, bars, probs, scale, t0, t1, n, rows, r0, k, which: gl.constexpr, TERMS: gl.constexpr,
           STAGES: gl.constexpr, S: gl.constexpr, S8: gl.constexpr, O: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """Attend tiles [t0, t1) of a segment: (running maximum [ROWS], sum [ROWS], accumulators, tiles done in all)."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    CHUNKS: gl.constexpr = c.CHUNKS
    full, free = bars
    m = gl.full([c.ROWS], float("-inf"), gl.float32, COLUMN)
    l = fold(gl.full([c.TILE, c.ROWS], 0.0, gl.float32, S))  # summed over all keys only at the end
    acc = ()
    for _ in gl.static_range(2 * CHUNKS):
        acc = acc + (gl.full([c.CHUNK, c.ROWS], 0.0, gl.float32, O),)
    o_k = gl.arange(0, c.TILE, gl.SliceLayout(1, S))
    position = n - rows + (r0 + gl.arange(0, c.ROWS, COLUMN)) // c.GROUP
    for t in range(t0, t1):
        slot = k % STAGES
        mbarrier.wait(full.index(slot), (k // STAGES) & 1)
        if (t + 1) * c.TILE > n:
            drop_stale(rings[0], slot, n - t * c.TILE, c)
        # NOTE: `here` is 0. A constant would make the compiler keep, and spill, the descriptor of every piece of q.
        here = t >> 30
        if c.GROUP_SCALES:
            scales = load_scales(rings[2].index(slot), n - t * c.TILE, gl.SliceLayout(1, S))
            s = scaled_scores(rings, slot, q, here, scales, which, TERMS, S, S8, c) * scale[None, :]
            # The key's largest scale joins the exponent, so that the probabilities that meet the codes lie in [0, 1].
            top = gl.full([c.TILE], MIN_SCALE, gl.float32, gl.SliceLayout(1, S))
            for i in gl.static_range(CHUNKS):
                top = gl.maximum(top, gl.abs(scales[i]))
            s += gl.log2(top)[:, None]
        else:
            s = scores(rings, slot, q, here, which, TERMS, S, S8, c) * scale[None, :]
        if (t + 1) * c.TILE > n - rows + 1:
            o_n = t * c.TILE + o_k
            s = gl.where((o_n < n)[:, None] & (o_n[:, None] <= position[None, :]), s, float("-inf"))
        highest = gl.max(s, 0)
        # The reference of a row's exponents is raised only where powers would pass 2^SLACK: rarely.
        if gl.max((highest > m + SLACK).to(gl.int32), 0) > 0:
            m, l, acc = raise_reference(gl.maximum(m, highest), m, l, acc, O, c)
        base = gl.where(m == float("-inf"), 0.0, m)
        p = gl.exp2(s - base[None, :])
        if c.GROUP_SCALES:
            inverse = 1.0 / top
            l += fold(p * inverse[:, None])
            for i in gl.static_range(CHUNKS):
                probs.index(which * CHUNKS + i).store((p * (scales[i] * inverse)[:, None]).to(gl.float16))
        else:
            l += fold(p)
            probs.index(which).store(p.to(gl.float16))
        fence_async_shared()
        acc = add_values(acc, rings[0], slot, probs, which, c.ROWS >= 32, O, c)
        mbarrier.arrive(free.index(slot))
        k += 1
    return m, gl.sum(gl.sum(l, 1), 0), acc, k


@gluon.jit
def store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, O: gl.constexpr, c: gl.constexpr):
    """Write acc × factor to `out`."""
    CHUNKS: gl.constexpr = c.CHUNKS
    for i in gl.static_range(CHUNKS):
        o_w = i * c.CHUNK + gl.arange(0, c.CHUNK, gl.SliceLayout(1, O))
        for j in gl.static_range(2):
            p_out = OUT + (tokens * so_t + heads * so_h)[None, :] + (2 * o_w + j)[:, None]
            gl.store(p_out, output(acc[2 * i + j] * factor[None, :], OUT, c), mask=m_row[None, :])


@gluon.jit
def store_part(PART, slot, m, l, acc, m_row, O: gl.constexpr, c: gl.constexpr):
    """Write a cut segment's state as the merge reads it: part 0's words, then part 1's, then m and l."""
    CHUNKS: gl.constexpr = c.CHUNKS
    o_r = gl.arange(0, c.ROWS, gl.SliceLayout(0, O))
    p_row = PART + (slot.to(gl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
    for i in gl.static_range(CHUNKS):
        o_w = i * c.CHUNK + gl.arange(0, c.CHUNK, gl.SliceLayout(1, O))
        for j in gl.static_range(2):
            gl.store(p_row[None, :] + (j * c.BLOCK_DV + o_w)[:, None], acc[2 * i + j], mask=m_row[None, :])
    gl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
    gl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)


@gluon.jit
def consume(tensors, q, rings, bars, probs, score_scale, value_factor, place, strides, STAGES: gl.constexpr,
            which: gl.constexpr, c: gl.constexpr):  # fmt: skip
    """Attend the share [x, end) of all tiles, for one block of heads: the `which`-th of the CTA."""
    QN, QP, LENS, CU, OUT, LSE, PART, META = tensors
    max_segments, p, per, x, end, b, base = place
    sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h = strides
    TERMS: gl.constexpr = q[0].shape[1] // c.ROWS
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS, 16])
    S8: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS * TERMS, 32])
    O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, c.ROWS, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, O)
    h = p % c.HEADS
    k = 0
    tiles, segments, _, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
    while x < end:
        while x - base >= tiles * segments:
            base += tiles * segments
            b += 1
            tiles, segments, _, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
        segment = (x - base) // tiles
        t0 = (x - base) % tiles
        t1 = gl.minimum(t0 + end - x, tiles)
        scale = score_scale * load_query(
            QN, QP, q[0], q[1].index(which), segment, h, q0, rows, sn_t, sn_h, sr_t, sr_h, which, TERMS,
            gl.SliceLayout(0, S), c,
        )  # fmt: skip
        m, l, acc, k = attend(
            q, rings, bars, probs, scale, t0, t1, n, rows, segment * c.ROWS, k, which, TERMS, STAGES, S, S8, O, c
        )
        tokens, heads, m_row = row_places(segment, h, q0, rows, ROW, c)
        m, l = gl.convert_layout(m, ROW), gl.convert_layout(l, ROW)
        if t0 == 0:
            pieces = (base + (segment + 1) * tiles - 1) // per - p // c.HEADS + 1
            note_pieces(META, b, segment, max_segments, p, pieces, c)
        if t1 - t0 == tiles:
            factor, lse = finish(m, l, value_factor)
            store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, O, c)
            if c.HAS_LSE:
                gl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)
        else:
            slot = 2 * p + (t0 == 0).to(gl.int32)
            store_part(PART, slot, m, l, acc, m_row, O, c)
        x += t1 - t0


@gluon.jit
def mla_decode_codes_kernel(
    QN, QP, BOX_C, BOX_P, BOX_S, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, nowhere, s_pitch, max_segments, sn_t, sn_h, sr_t, sr_h, st_b, so_t, so_h, sl_t, sl_h,
    STAGES: gl.constexpr, BLOCKS: gl.constexpr, c: gl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for BLOCKS blocks of heads, one or two, each by warps of its own.

    Two blocks that share a CTA count as two programs wherever programs are counted.
    """
    HEADS: gl.constexpr = c.HEADS // BLOCKS
    i_cta = gl.program_id(0)
    i_share = i_cta // HEADS
    p = i_share * c.HEADS + i_cta % HEADS * BLOCKS
    num_programs = gl.num_programs(0) * BLOCKS
    META = meta_of(PART, num_programs, c)
    if c.RAGGED:
        t = gl.load(CU + B).to(gl.int32)
        zero_padding(OUT, LSE, t, T, i_cta, gl.num_programs(0), so_t, so_h, sl_t, sl_h, c)
    x, end, per = share(LENS, CU, B, i_share, gl.num_programs(0) // HEADS, c)
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
    q_c = gl.allocate_shared_memory(E4M3, [BLOCKS * c.CHUNKS, Q_ROWS, WIDTH], Q_C)
    q_r = gl.allocate_shared_memory(R, [BLOCKS, Q_ROWS_R, WIDTH_R], Q_R)
    P: gl.constexpr = gl.NVMMASharedLayout.get_default_for([c.TILE, c.ROWS], gl.float16)
    probs = gl.allocate_shared_memory(gl.float16, [BLOCKS * PROBS, c.TILE, c.ROWS], P)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=BLOCKS)
    scale_kv = scalar(kv_scale, KV_T, c.V_T)
    score_scale = scalar(softmax_scale, SOFTMAX_T, c.SOFTMAX_T) * LOG2E * scale_kv
    value_factor = scale_kv * scalar(out_scale, OUT_T, c.OUT_T)
    b, base = locate(LENS, CU, B, gl.minimum(x, end - 1), c)
    q, rings, bars = (q_c, q_r), (codes, rotary, scales), (full, free)
    boxes = (BOX_C, BOX_P, BOX_S)
    tensors = (QN, QP, LENS, CU, OUT, LSE, PART, META)
    strides = (sn_t, sn_h, sr_t, sr_h, so_t, so_h, sl_t, sl_h)
    place, next_place = (max_segments, p, per, x, end, b, base), (max_segments, p + 1, per, x, end, b, base)
    work = (x, end, b, base, nowhere, s_pitch, st_b)
    if BLOCKS == 1:
        gl.warp_specialize(
            [
                (consume, (tensors, q, rings, bars, probs, score_scale, value_factor, place, strides, STAGES, 0, c)),
                (produce, (boxes, TABLE, LENS, CU, bars, rings, work, (), STAGES, c)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (tensors, q, rings, bars, probs, score_scale, value_factor, place, strides, STAGES, 0, c)),
                (consume, (tensors, q, rings, bars, probs, score_scale, value_factor, next_place, strides, STAGES, 1,
                           c)),
                (produce, (boxes, TABLE, LENS, CU, bars, rings, work, (), STAGES, c)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
