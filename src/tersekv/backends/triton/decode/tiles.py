"""The inner loop of paged decode: one segment's tiles of keys and values, in any format, from pages of any size."""

import triton
import triton.language as tl

from ..parts.pages import page_of, slots_of
from ..parts.softcap import softcapped
from ..parts.tiles import INT4, block_scales, e4m3_bytes_to_fp16, unpack, zero_points
from ..parts.turn import back
from ..parts.turn import query as turned


@triton.jit
def transposed(parts, PARTS: tl.constexpr):
    out = ()
    for j in tl.static_range(PARTS):
        out = out + (tl.trans(parts[j]),)
    return out


@triton.jit
def turned_back(acc, turn, h, c: tl.constexpr):
    """PARTS accumulators [words, ROWS] of values that lie scaled and rotated. turn: as `turn.back` takes it"""
    if turn[0] is not None or turn[1] is not None:
        acc = transposed(back(transposed(acc, c.PARTS), turn, h, c.PARTS, c.DV), c.PARTS)
    return acc


@triton.jit
def load_query(Q, tokens, heads, m_row, sq_t, sq_h, turn, h, c: tl.constexpr):
    """Query rows, transposed to PARTS tiles [words, ROWS] in the compute type, and a factor of their scores [ROWS].

    turn: as `turn.query` takes it

    fp16 holds what bf16 holds only after a power of two is taken out of each row; the factor puts it back. Over bf16
    keys, with TWO, a second tile holds what rounding to bf16 takes away; over int4 keys, the sums of the rows [ROWS]
    follow.
    """
    PARTS: tl.constexpr = c.K.PARTS
    o_d = tl.arange(0, c.BLOCK_D)
    p_row = Q + tokens * sq_t + heads * sq_h
    mask = (o_d < c.WORDS_K)[:, None] & m_row[None, :]
    parts = ()
    top = tl.full([c.ROWS], 0.0, tl.float32)
    for j in tl.static_range(PARTS):
        x = tl.load(p_row[None, :] + (PARTS * o_d + j)[:, None], mask=mask, other=0.0)
        if c.Q_BYTES:
            x = e4m3_bytes_to_fp16(x)
        parts = parts + (x.to(tl.float32),)
    if turn[0] is not None or turn[1] is not None:
        parts = transposed(turned(transposed(parts, PARTS), turn, h, PARTS, c.D), PARTS)
    for j in tl.static_range(PARTS):
        top = tl.maximum(top, tl.max(tl.abs(parts[j]), 0))
    out = ()
    if c.BF16:
        for j in tl.static_range(PARTS):
            out = out + (parts[j].to(tl.bfloat16),)
            if c.TWO:
                out = out + ((parts[j] - out[j].to(tl.float32)).to(tl.bfloat16),)
        return out, tl.full([c.ROWS], 1.0, tl.float32)
    else:
        field = tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1)  # exponent of the largest magnitude
        inverse = (tl.maximum(254 - field, 1) << 23).to(tl.float32, bitcast=True)
        total = tl.full([c.ROWS], 0.0, tl.float32)
        for j in tl.static_range(PARTS):
            part = (parts[j] * inverse[None, :]).to(tl.float16)
            total += tl.sum(part.to(tl.float32), 0)
            out = out + (part,)
        if c.K.CODE == INT4:
            out = out + (total,)
        return out, (field << 23).to(tl.float32, bitcast=True) * c.K_FACTOR


@triton.jit
def pages_of(table, t, n, UNROLL: tl.constexpr, c: tl.constexpr):
    """Page ids of tiles t … t + UNROLL − 1."""
    pages = ()
    for j in tl.static_range(UNROLL):
        pages = pages + (page_of(table, t + j, n, c),)
    return pages


@triton.jit
def rows_of(pages, t, h, s_p, s_s, s_h, STEP: tl.constexpr, c: tl.constexpr):
    """Offsets of head h's rows of tile t, whose strides are in units of STEP elements (`Codes.STEP`).

    pages: int64; the rest is int32 where a page is not longer than that
    """
    head = h.to(tl.int64) if c.FAR else h
    return (pages * s_p + slots_of(t, c) * s_s + head * s_h) * STEP


@triton.jit
def load_tile(X, pages, t, m_n, s_p, s_s, s_h, h, BLOCK: tl.constexpr, SIZE: tl.constexpr, PITCH: tl.constexpr,
              HEAD_ROWS: tl.constexpr, STEP: tl.constexpr, MASKED: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """Words [TILE, BLOCK] of tile t: a tensor-descriptor load of a piece of one page, or pointers.

    PITCH: rows of the descriptor per page. HEAD_ROWS: rows per head (HND), or 0 where heads lie along the columns.
    """
    if c.TMA:
        slot = (t % (c.PAGE // c.TILE)) * c.TILE
        if HEAD_ROWS > 0:
            return X.load([(pages * PITCH).to(tl.int32) + h * HEAD_ROWS + slot, 0])
        else:
            return X.load([(pages * PITCH).to(tl.int32) + slot, (h * s_h * STEP).to(tl.int32)])
    else:
        o_d = tl.arange(0, BLOCK)
        p_x = X + rows_of(pages, t, h, s_p, s_s, s_h, STEP, c)[:, None] + o_d[None, :]
        if MASKED:
            return tl.load(p_x, mask=m_n[:, None] & (o_d < SIZE)[None, :], other=0.0)
        elif BLOCK == SIZE:
            return tl.load(p_x)
        else:
            return tl.load(p_x, mask=(o_d < SIZE)[None, :], other=0.0)


@triton.jit
def load_scales(XS, pages, t, m_n, s_p, s_s, s_h, h, BLOCK: tl.constexpr, SIZE: tl.constexpr, side: tl.constexpr,
                c: tl.constexpr):  # fmt: skip
    """Stored scales of tile t: fp32 [TILE] per token, or e4m3 [TILE, blocks]; a block of 16 values is four words."""
    p_row = XS + rows_of(pages, t, h, s_p, s_s, s_h, side.SCALE_STEP, c)
    if side.TOKEN_SCALES:
        return tl.load(p_row, mask=m_n, other=0.0)
    else:
        o_b = tl.arange(0, BLOCK // 4)
        return tl.load(p_row[:, None] + o_b[None, :], mask=m_n[:, None] & (o_b < SIZE // 4)[None, :], other=0.0)


@triton.jit
def scales_of(KS, VS, pages, t, n, h, sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, UNROLL: tl.constexpr, c: tl.constexpr):
    """Stored scales of keys and of values, tiles t … t + UNROLL − 1: two tuples, empty for formats without."""
    KEYS: tl.constexpr = c.K
    ks, vs = (), ()
    for j in tl.static_range(UNROLL):
        m_n = (t + j) * c.TILE + tl.arange(0, c.TILE) < n
        if KEYS.TOKEN_SCALES or KEYS.BLOCK_SCALES:
            ks = ks + (load_scales(KS, pages[j], t + j, m_n, sks_p, sks_s, sks_h, h, c.BLOCK_D, c.WORDS_K, KEYS, c),)
        if c.TOKEN_SCALES or c.BLOCK_SCALES:
            vs = vs + (load_scales(VS, pages[j], t + j, m_n, svs_p, svs_s, svs_h, h, c.BLOCK_DV, c.WORDS_V, c, c),)
    return ks, vs


@triton.jit
def visible(t, n, rows, r0, q0, m_n, MASK, sm_t, c: tl.constexpr):
    """Which of tile t's keys each query row sees: [TILE, ROWS]."""
    o_n = t * c.TILE + tl.arange(0, c.TILE)
    o_q = (r0 + tl.arange(0, c.ROWS)) // c.GROUP  # draft of a row
    prefix = n - rows
    position = prefix + o_q
    seen = m_n[:, None]
    if c.HAS_MASK:
        draft = o_n - prefix
        p_word = MASK + (q0 + o_q)[None, :].to(tl.int64) * sm_t + (draft >> 4)[:, None]
        asked = (draft >= 0)[:, None] & seen & (o_q < rows)[None, :]
        word = tl.load(p_word, mask=asked, other=0).to(tl.int32)
        bit = (word >> (draft & 15)[:, None]) & 1
        seen = seen & ((draft < 0)[:, None] | (bit == 1))
    else:
        seen = seen & (o_n[:, None] <= position[None, :])
    if c.WINDOW > 0:
        seen = seen & (o_n[:, None] > position[None, :] - c.WINDOW)
    return seen


@triton.jit
def scores(K, ks, MASK, q, scale, softcap, page, t, n, rows, r0, q0, h, sk_p, sk_s, sk_h, sm_t, J: tl.constexpr,
           MASKED: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """Scores of tile t in units of log2: [TILE, ROWS]. ks: stored scales, of which the J-th are the tile's."""
    KEYS: tl.constexpr = c.K
    PARTS: tl.constexpr = KEYS.PARTS
    m_n = t * c.TILE + tl.arange(0, c.TILE) < n
    k = load_tile(K, page, t, m_n, sk_p, sk_s, sk_h, h, c.BLOCK_D, c.WORDS_K, c.K_PITCH, c.K_HEAD_ROWS, KEYS.STEP,
                  MASKED, c)  # fmt: skip
    k = unpack(k, KEYS)
    if KEYS.BLOCK_SCALES:
        factor = block_scales(ks[J], c.TILE, c.BLOCK_D // 4, 4, KEYS)
        s = tl.dot(k[0] * factor, q[0])
        for j in tl.static_range(1, PARTS):
            s = tl.dot(k[j] * factor, q[j], acc=s)
    else:
        s = tl.dot(k[0], q[0])
        for j in tl.static_range(1, PARTS):
            s = tl.dot(k[j], q[j], acc=s)
        if c.TWO:
            s = tl.dot(k[0], q[1], acc=s)
        if KEYS.CODE == INT4:
            s -= zero_points(ks[J])[:, None] * q[PARTS][None, :]
    s *= scale[None, :]
    if KEYS.TOKEN_SCALES:
        s *= ks[J][:, None]
    if c.SOFTCAP:
        s = softcapped(s, softcap)
    if MASKED:
        s = tl.where(visible(t, n, rows, r0, q0, m_n, MASK, sm_t, c), s, float("-inf"))
    return s


@triton.jit
def values_of(V, pages, t, n, h, sv_p, sv_s, sv_h, UNROLL: tl.constexpr, MASKED: tl.constexpr, c: tl.constexpr):
    """Words of the values of tiles t … t + UNROLL − 1."""
    v = ()
    for j in tl.static_range(UNROLL):
        m_n = (t + j) * c.TILE + tl.arange(0, c.TILE) < n
        v = v + (load_tile(V, pages[j], t + j, m_n, sv_p, sv_s, sv_h, h, c.BLOCK_DV, c.WORDS_V, c.V_PITCH,
                           c.V_HEAD_ROWS, c.STEP, MASKED, c),)  # fmt: skip
    return v


@triton.jit
def add_values(acc, v, vs, probs, t, n, rows, J: tl.constexpr, MASKED: tl.constexpr, c: tl.constexpr):
    """acc += values v of tile t, transposed, times probs [TILE, ROWS]; acc: PARTS tiles [words, ROWS], and of int4 what
    all of a row's values have too much, key by key [TILE, ROWS]."""
    PARTS: tl.constexpr = c.PARTS
    v = unpack(tl.trans(v), c)
    out = ()
    if c.BLOCK_SCALES:
        factor = tl.trans(block_scales(vs[J], c.TILE, c.BLOCK_DV // 4, 4, c))
    for j in tl.static_range(PARTS):
        x = v[j]
        if c.BLOCK_SCALES:
            x = x * factor
        if MASKED:
            x = tl.where(live_keys(t, n, rows, c)[None, :], x, 0.0)  # a stale slot may hold NaN, and 0 × NaN is NaN
        out = out + (tl.dot(x, probs.to(x.dtype), acc=acc[j]),)
    if c.CODE == INT4:
        out = out + (acc[PARTS] + probs * zero_points(vs[J])[:, None],)
    return out


@triton.jit
def live_keys(t, n, rows, c: tl.constexpr):
    """Keys of tile t that some row may see; slots behind every row's window may have been given away."""
    o_n = t * c.TILE + tl.arange(0, c.TILE)
    live = o_n < n
    if c.WINDOW > 0:
        live = live & (o_n > n - rows - c.WINDOW)
    return live


@triton.jit
def score_tiles(K, ks, vs, MASK, q, scale, softcap, pages, t, n, rows, r0, q0, h, sk_p, sk_s, sk_h, sm_t,
                UNROLL: tl.constexpr, MASKED: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """Scores of UNROLL tiles, and per token scales' reciprocals (token-scaled formats; else empty)."""
    s, inverse = (), ()
    for j in tl.static_range(UNROLL):
        x = scores(K, ks, MASK, q, scale, softcap, pages[j], t + j, n, rows, r0, q0, h, sk_p, sk_s, sk_h, sm_t,
                   j, MASKED, c)  # fmt: skip
        if c.TOKEN_SCALES:
            # The value's scale joins the exponent, so that the probabilities that meet the codes lie in (0, 1].
            v_scales = tl.maximum(vs[j], 1e-30)
            if MASKED:
                v_scales = tl.where(live_keys(t + j, n, rows, c), v_scales, 1.0)
            x += tl.log2(v_scales)[:, None]
            inverse = inverse + (1.0 / v_scales,)
        s = s + (x,)
    return s, inverse


@triton.jit
def take_values(V, fetched, vs, s, inverse, m, l, acc, pages, t, n, rows, h, sv_p, sv_s, sv_h,
                UNROLL: tl.constexpr, MASKED: tl.constexpr, FETCHED: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """One step of the running softmax over the scores of UNROLL tiles, and their values (FETCHED before, or here)."""
    PARTS: tl.constexpr = c.PARTS
    top = s[0]
    for j in tl.static_range(1, UNROLL):
        top = tl.maximum(top, s[j])
    m_new = tl.maximum(m, tl.max(top, 0))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2(m - base)
    l *= old[None, :]
    scaled = ()
    for j in tl.static_range(PARTS + (c.CODE == INT4)):
        scaled = scaled + (acc[j] * old[None, :],)
    for j in tl.static_range(UNROLL):
        probs = tl.exp2(s[j] - base[None, :])
        if c.TOKEN_SCALES:
            l += probs * inverse[j][:, None]
        else:
            l += probs
        if FETCHED:
            v = fetched[j]
        else:
            # Fetched from shared memory only now: earlier the words would hold registers through the softmax.
            v = values_of(V, (pages[j],), t + j, n, h, sv_p, sv_s, sv_h, 1, MASKED, c)[0]
        scaled = add_values(scaled, v, vs, probs, t + j, n, rows, j, MASKED, c)
    return m_new, l, scaled


@triton.jit
def attend(K, V, KS, VS, table, MASK, q, scale, softcap, t0, t1, n, rows, r0, q0, h,
           sk_p, sk_s, sk_h, sv_p, sv_s, sv_h, sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, sm_t,
           c: tl.constexpr):  # fmt: skip
    """Attend tiles [t0, t1) of a segment: (running maximum, sum, PARTS accumulators [words, ROWS])."""
    PARTS: tl.constexpr = c.PARTS
    m = tl.full([c.ROWS], float("-inf"), tl.float32)
    l = tl.full([c.TILE, c.ROWS], 0.0, tl.float32)  # summed over keys only at the end
    acc = ()
    for _ in tl.static_range(PARTS):
        acc = acc + (tl.full([c.BLOCK_DV, c.ROWS], 0.0, tl.float32),)
    if c.CODE == INT4:
        acc = acc + (tl.full([c.TILE, c.ROWS], 0.0, tl.float32),)
    # Tiles [u0, u1) are seen whole by every row; the others need masks.
    u0 = t0
    if c.WINDOW > 0:
        u0 = tl.minimum(tl.maximum(t0, tl.cdiv(tl.maximum(n - c.WINDOW, 0), c.TILE)), t1)
    whole = n - rows if c.HAS_MASK else n - rows + 1
    u1 = tl.maximum(tl.minimum(t1, tl.maximum(whole, 0) // c.TILE), u0)
    u1 = u0 + (u1 - u0) // c.UNROLL * c.UNROLL
    # Page ids are read a step ahead of the tiles, and stored scales in the middle of the step before, so that no load
    # waits for its own address. NOTE: the depth of the pipeline is the launch's num_stages. Given to this range it
    # would take in these loads too; since the next step needs them, Triton would then pipeline nothing at all, nor does
    # it where a value is handed on over two steps.
    pages = pages_of(table, u0, n, c.UNROLL, c)
    ks, vs = scales_of(KS, VS, pages, u0, n, h, sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, c.UNROLL, c)
    v = ()
    if c.FETCH:
        v = values_of(V, pages, u0, n, h, sv_p, sv_s, sv_h, c.UNROLL, True, c)
    for t in tl.range(u0, u1, c.UNROLL):
        ahead = pages_of(table, t + c.UNROLL, n, c.UNROLL, c)
        s, inverse = score_tiles(K, ks, vs, MASK, q, scale, softcap, pages, t, n, rows, r0, q0, h, sk_p, sk_s, sk_h,
                                 sm_t, c.UNROLL, False, c)  # fmt: skip
        ks_ahead, vs_ahead = scales_of(
            KS, VS, ahead, t + c.UNROLL, n, h, sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, c.UNROLL, c
        )
        v_ahead = ()
        if c.FETCH:
            v_ahead = values_of(V, ahead, t + c.UNROLL, n, h, sv_p, sv_s, sv_h, c.UNROLL, True, c)
        m, l, acc = take_values(V, v, vs, s, inverse, m, l, acc, pages, t, n, rows, h, sv_p, sv_s, sv_h,
                                c.UNROLL, False, c.FETCH, c)  # fmt: skip
        pages, ks, vs, v = ahead, ks_ahead, vs_ahead, v_ahead
    for i in tl.range(0, u0 - t0 + t1 - u1, num_stages=1):
        t = tl.where(i < u0 - t0, t0 + i, u1 + i - (u0 - t0))
        here = pages_of(table, t, n, 1, c)
        ks_here, vs_here = scales_of(KS, VS, here, t, n, h, sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, 1, c)
        s, inverse = score_tiles(K, ks_here, vs_here, MASK, q, scale, softcap, here, t, n, rows, r0, q0, h, sk_p, sk_s,
                                 sk_h, sm_t, 1, True, c)  # fmt: skip
        m, l, acc = take_values(V, (), vs_here, s, inverse, m, l, acc, here, t, n, rows, h, sv_p, sv_s, sv_h,
                                1, True, False, c)  # fmt: skip
    if c.CODE == INT4:
        excess = tl.sum(acc[PARTS], 0)[None, :]
        whole_values = ()
        for j in tl.static_range(PARTS):
            whole_values = whole_values + (acc[j] - excess,)
        acc = whole_values
    return m, tl.sum(l, 0), acc
