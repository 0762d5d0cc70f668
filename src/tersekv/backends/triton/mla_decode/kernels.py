"""The split pass of MLA decode: a latent row, read once a tile, is key and value of every head.

Work is shared and cut as in decode (`parts/shares`), whose merge finishes what was cut. HEADS counts blocks of
GROUP query heads, which read the same rows: programs of one share lie side by side, so that all but one find the tile
in L2.

The codes of a row fall apart into CHUNKS of CHUNK 16-bit words, and these into PARTS (see tiles); the rotary part is
one more tile. Queries and accumulators fall apart the same way: piece i * PARTS + j holds the columns
PARTS * (i * CHUNK + word) + j. Rows lie on the matrix unit's M side, as keys and, transposed, as values; query rows
lie on N. In fp8_ds_mla a chunk is a scale group.
"""

import triton
import triton.language as tl

from ..parts.merge import LOG2E, finish, output, scalar
from ..parts.pages import page_of, slots_of
from ..parts.shares import (
    META_FIELDS,
    first_segment,
    locate,
    meta_of,
    piece_tiles,
    request_tiles,
    row_places,
    share,
    to_next_piece,
    zero_padding,
)  # fmt: skip
from ..parts.tiles import e4m3_bytes_to_fp16, unpack

MIN_SCALE = tl.constexpr(1e-30)  # of a token's values: its reciprocal is finite


@triton.jit
def load_words(X, page, t, n, s_p, s_s, STEP: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
               SIZE: tl.constexpr, MASKED: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """Words [TILE, BLOCK] from word FIRST on of tile t's rows, of SIZE words, by pointers; 0 where there are none.

    Strides are in units of STEP words.
    """
    o_w = FIRST + tl.arange(0, BLOCK)
    p_x = X + ((page * s_p + slots_of(t, c) * s_s) * STEP)[:, None] + o_w[None, :]
    if MASKED:
        m_n = t * c.TILE + tl.arange(0, c.TILE) < n
        return tl.load(p_x, mask=m_n[:, None] & (o_w < SIZE)[None, :], other=0)
    elif FIRST + BLOCK <= SIZE:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_w < SIZE)[None, :], other=0)


@triton.jit
def load_chunk(CKV, BOX_C, page, t, n, sc_p, sc_s, I: tl.constexpr, MASKED: tl.constexpr, c: tl.constexpr):
    """Words [TILE, CHUNK] of chunk I of tile t.

    NOTE: by descriptors the rows behind the last key are read too, and may hold NaN.
    """
    if c.TMA:
        return BOX_C.load([(page * c.C_PITCH).to(tl.int32) + (t % (c.PAGE // c.TILE)) * c.TILE, I * c.CHUNK])
    else:
        return load_words(CKV, page, t, n, sc_p, sc_s, c.C_STEP, I * c.CHUNK, c.CHUNK, c.WORDS_V, MASKED, c)


@triton.jit
def load_rotary(KPE, BOX_P, page, t, n, sp_p, sp_s, MASKED: tl.constexpr, c: tl.constexpr):
    """Rotary parts [TILE, BLOCK_R] of tile t, with the same NOTE."""
    if c.TMA:
        return BOX_P.load([(page * c.P_PITCH).to(tl.int32) + (t % (c.PAGE // c.TILE)) * c.TILE, 0])
    else:
        return load_words(KPE, page, t, n, sp_p, sp_s, c.P_STEP, 0, c.BLOCK_R, c.WORDS_R, MASKED, c)


@triton.jit
def load_row(CKV, KPE, page, t, n, sc_p, sc_s, sp_p, sp_s, c: tl.constexpr):
    """(CHUNKS tiles of words [TILE, CHUNK], rotary tile [TILE, BLOCK_R]) of tile t, by pointers."""
    CHUNKS: tl.constexpr = c.CHUNKS
    words = ()
    for i in tl.static_range(CHUNKS):
        words = words + (load_words(CKV, page, t, n, sc_p, sc_s, c.C_STEP, i * c.CHUNK, c.CHUNK, c.WORDS_V, True, c),)
    return words, load_words(KPE, page, t, n, sp_p, sp_s, c.P_STEP, 0, c.BLOCK_R, c.WORDS_R, True, c)


@triton.jit
def load_scales(SCALES, page, t, n, ss_p, ss_s, c: tl.constexpr):
    """Group scales of tile t: CHUNKS vectors [TILE]; none for other formats. Keys that are not there: 1."""
    CHUNKS: tl.constexpr = c.CHUNKS
    scales = ()
    if c.GROUP_SCALES:
        m_n = t * c.TILE + tl.arange(0, c.TILE) < n
        p_row = SCALES + page * ss_p + slots_of(t, c) * ss_s
        for i in tl.static_range(CHUNKS):
            scales = scales + (tl.load(p_row + i, mask=m_n, other=1.0),)
    return scales


@triton.jit
def query_piece(p_row, m_row, FIRST: tl.constexpr, BLOCK: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
                J: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """Columns PARTS * (FIRST + word) + J of the query rows, transposed: fp32 [BLOCK, ROWS]."""
    o_w = FIRST + tl.arange(0, BLOCK)
    p = p_row[None, :] + (PARTS * o_w + J)[:, None]
    x = tl.load(p, mask=(o_w < SIZE)[:, None] & m_row[None, :], other=0.0)
    if c.Q_BYTES:
        x = e4m3_bytes_to_fp16(x)
    return x.to(tl.float32)


@triton.jit
def largest_query(p_nope, p_pe, m_row, c: tl.constexpr):
    """Largest magnitude of each query row: fp32 [ROWS]."""
    CHUNKS: tl.constexpr = c.CHUNKS
    PARTS: tl.constexpr = c.PARTS
    PARTS_R: tl.constexpr = c.PARTS_R
    top = tl.full([c.ROWS], 0.0, tl.float32)
    for i in tl.static_range(CHUNKS):
        for j in tl.static_range(PARTS):
            x = query_piece(p_nope, m_row, i * c.CHUNK, c.CHUNK, c.WORDS_V, PARTS, j, c)
            top = tl.maximum(top, tl.max(tl.abs(x), 0))
    for j in tl.static_range(PARTS_R):
        x = query_piece(p_pe, m_row, 0, c.BLOCK_R, c.WORDS_R, PARTS_R, j, c)
        top = tl.maximum(top, tl.max(tl.abs(x), 0))
    return top


@triton.jit
def factors(x, BF16: tl.constexpr, TWO: tl.constexpr):
    """What keys are multiplied with: x as one tile of 16 bits, or as two bf16 tiles whose sum holds all of fp16."""
    if not BF16:
        return (x.to(tl.float16),)
    elif TWO:
        high = x.to(tl.bfloat16)
        return high, (x - high.to(tl.float32)).to(tl.bfloat16)
    else:
        return (x.to(tl.bfloat16),)


@triton.jit
def load_query(QN, QP, tokens, heads, m_row, sn_t, sn_h, sp_t, sp_h, c: tl.constexpr):
    """(CHUNKS * PARTS pieces of q_nope [CHUNK, ROWS], pieces of q_pe, a factor of the scores [ROWS]).

    fp16 holds what bf16 holds only after a power of two is taken out of each row; the factor puts it back.
    """
    CHUNKS: tl.constexpr = c.CHUNKS
    PARTS: tl.constexpr = c.PARTS
    PARTS_R: tl.constexpr = c.PARTS_R
    p_nope, p_pe = QN + tokens * sn_t + heads * sn_h, QP + tokens * sp_t + heads * sp_h
    factor = tl.full([c.ROWS], 1.0, tl.float32)
    inverse = factor
    if c.Q_SCALED:
        top = largest_query(p_nope, p_pe, m_row, c)
        field = tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1)
        inverse = (tl.maximum(254 - field, 1) << 23).to(tl.float32, bitcast=True)
        factor = (field << 23).to(tl.float32, bitcast=True)
    nope, pe = (), ()
    for i in tl.static_range(CHUNKS):
        for j in tl.static_range(PARTS):
            x = query_piece(p_nope, m_row, i * c.CHUNK, c.CHUNK, c.WORDS_V, PARTS, j, c) * inverse[None, :]
            nope = nope + factors(x, c.BF16, c.TWO)
    for j in tl.static_range(PARTS_R):
        x = query_piece(p_pe, m_row, 0, c.BLOCK_R, c.WORDS_R, PARTS_R, j, c) * inverse[None, :]
        pe = pe + factors(x, c.BF16_R, c.TWO_R)
    return nope, pe, factor


@triton.jit
def product(words, q, FIRST: tl.constexpr, TWO: tl.constexpr, PARTS: tl.constexpr, s, HAS_S: tl.constexpr,
            c: tl.constexpr):  # fmt: skip
    """(s +) the products of a tile of keys and its query tiles, those from FIRST on: fp32 [TILE, ROWS]."""
    k = (words,)
    if PARTS > 1:
        k = unpack(words, c)
    EACH: tl.constexpr = 2 if TWO else 1
    for j in tl.static_range(PARTS * EACH):
        if HAS_S or j > 0:
            s = tl.dot(k[j // EACH], q[FIRST * EACH + j], acc=s)
        else:
            s = tl.dot(k[0], q[FIRST * EACH])
    return s


@triton.jit
def scores(fetched, rotary, scales, q_nope, q_pe, scale, CKV, KPE, BOX_C, BOX_P, page, t, n, sc_p, sc_s, sp_p, sp_s,
           FETCHED: tl.constexpr, MASKED: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """(unmasked scores of tile t in units of log2 [TILE, ROWS], the tile's words), FETCHED before or loaded here.

    Each chunk is loaded where it is multiplied: that is where its words move to registers.
    """
    CHUNKS: tl.constexpr = c.CHUNKS
    pe = rotary
    if not FETCHED:
        pe = load_rotary(KPE, BOX_P, page, t, n, sp_p, sp_s, MASKED, c)
    s = product(pe, q_pe, 0, c.TWO_R, c.PARTS_R, None, False, c)
    words = ()
    for i in tl.static_range(CHUNKS):
        if FETCHED:
            w = fetched[i]
        else:
            w = load_chunk(CKV, BOX_C, page, t, n, sc_p, sc_s, i, MASKED, c)
        words = words + (w,)
        if c.GROUP_SCALES:
            s += product(w, q_nope, i * c.PARTS, c.TWO, c.PARTS, None, False, c) * scales[i][:, None]
        else:
            s = product(w, q_nope, i * c.PARTS, c.TWO, c.PARTS, s, True, c)
    return s * scale[None, :], words


@triton.jit
def add_values(acc, old, words, probs, ratios, CKV, page, t, n, sc_p, sc_s, MASKED: tl.constexpr, c: tl.constexpr):
    """acc * old + the tile's values, transposed, times probs [TILE, ROWS]. ratios: of each chunk's scale, or none.

    A masked tile's values are read once more, without stale rows (0 × NaN is NaN), each only when its turn comes: held
    since they were keys, they would cost registers that all tiles would have to do without.
    """
    CHUNKS: tl.constexpr = c.CHUNKS
    PARTS: tl.constexpr = c.PARTS
    out = ()
    for i in tl.static_range(CHUNKS):
        w = words[i]
        if MASKED:
            w = load_words(CKV, page, t, n, sc_p, sc_s, c.C_STEP, i * c.CHUNK, c.CHUNK, c.WORDS_V, True, c)
        v = unpack(tl.trans(w), c)
        p = probs
        if c.GROUP_SCALES:
            p = probs * ratios[i][:, None]
        for j in tl.static_range(PARTS):
            out = out + (tl.dot(v[j], p.to(v[j].dtype), acc=acc[i * c.PARTS + j] * old[None, :]),)
    return out


@triton.jit
def value_scale(scales, c: tl.constexpr):
    """(each token's largest group scale [TILE], its reciprocal, the ratios of its groups' scales to it)."""
    CHUNKS: tl.constexpr = c.CHUNKS
    top = tl.full([c.TILE], MIN_SCALE, tl.float32)
    for i in tl.static_range(CHUNKS):
        top = tl.maximum(top, tl.abs(scales[i]))
    inverse = 1.0 / top
    ratios = ()
    for i in tl.static_range(CHUNKS):
        ratios = ratios + (scales[i] * inverse,)
    return top, inverse, ratios


@triton.jit
def hide(s, t, n, rows, r0, c: tl.constexpr):
    """Scores of tile t with −inf where a query row does not see a key."""
    o_n = t * c.TILE + tl.arange(0, c.TILE)
    position = n - rows + (r0 + tl.arange(0, c.ROWS)) // c.GROUP
    return tl.where((o_n < n)[:, None] & (o_n[:, None] <= position[None, :]), s, float("-inf"))


@triton.jit
def take_values(s, words, scales, m, l, acc, CKV, page, t, n, sc_p, sc_s, MASKED: tl.constexpr, c: tl.constexpr):
    """One step of the running softmax, over the scores of tile t."""
    ratios = ()
    if c.GROUP_SCALES:
        # The token's largest scale joins the exponent, so that the probabilities that meet the codes lie in [0, 1].
        top, inverse, ratios = value_scale(scales, c)
        s += tl.log2(top)[:, None]
    m_new = tl.maximum(m, tl.max(s, 0))
    base = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2(m - base)
    probs = tl.exp2(s - base[None, :])
    if c.GROUP_SCALES:
        l = l * old[None, :] + probs * inverse[:, None]
    else:
        l = l * old[None, :] + probs
    return m_new, l, add_values(acc, old, words, probs, ratios, CKV, page, t, n, sc_p, sc_s, MASKED, c)


@triton.jit
def attend(CKV, KPE, BOX_C, BOX_P, SCALES, table, q_nope, q_pe, scale, t0, t1, n, rows, r0, sc_p, sc_s, sp_p, sp_s,
           ss_p, ss_s, c: tl.constexpr):  # fmt: skip
    """Attend tiles [t0, t1) of a segment: (running maximum, sum, CHUNKS * PARTS accumulators [CHUNK, ROWS])."""
    PIECES: tl.constexpr = c.CHUNKS * c.PARTS
    m = tl.full([c.ROWS], float("-inf"), tl.float32)
    l = tl.full([c.TILE, c.ROWS], 0.0, tl.float32)  # summed over keys only at the end
    acc = ()
    for _ in tl.static_range(PIECES):
        acc = acc + (tl.full([c.CHUNK, c.ROWS], 0.0, tl.float32),)
    # Tiles [t0, u1) are seen whole by every row; the others need masks.
    u1 = tl.maximum(tl.minimum(t1, tl.maximum(n - rows + 1, 0) // c.TILE), t0)
    # Page ids are read one step ahead of their tiles, and stored scales in the middle of the step before, so that no
    # load waits for its own address. The depth of the pipeline is the launch's num_stages; see `attend` of decode.
    page = page_of(table, t0, n, c)
    scales = load_scales(SCALES, page, t0, n, ss_p, ss_s, c)
    fetched, pe = (), page
    if c.FETCH:
        fetched, pe = load_row(CKV, KPE, page, t0, n, sc_p, sc_s, sp_p, sp_s, c)
    for t in tl.range(t0, u1):
        ahead = page_of(table, t + 1, n, c)
        s, words = scores(fetched, pe, scales, q_nope, q_pe, scale, CKV, KPE, BOX_C, BOX_P, page, t, n, sc_p, sc_s,
                          sp_p, sp_s, c.FETCH, False, c)  # fmt: skip
        scales_ahead = load_scales(SCALES, ahead, t + 1, n, ss_p, ss_s, c)
        if c.FETCH:
            fetched, pe = load_row(CKV, KPE, ahead, t + 1, n, sc_p, sc_s, sp_p, sp_s, c)
        m, l, acc = take_values(s, words, scales, m, l, acc, CKV, page, t, n, sc_p, sc_s, False, c)
        page, scales = ahead, scales_ahead
    for t in tl.range(u1, t1, num_stages=1):
        here = page_of(table, t, n, c)
        scales_here = load_scales(SCALES, here, t, n, ss_p, ss_s, c)
        s, words = scores((), here, scales_here, q_nope, q_pe, scale, CKV, KPE, BOX_C, BOX_P, here, t, n, sc_p, sc_s,
                          sp_p, sp_s, False, True, c)  # fmt: skip
        s = hide(s, t, n, rows, r0, c)
        m, l, acc = take_values(s, words, scales_here, m, l, acc, CKV, here, t, n, sc_p, sc_s, True, c)
    return m, tl.sum(l, 0), acc


@triton.jit
def store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, c: tl.constexpr):
    """Write acc × factor to `out`."""
    CHUNKS: tl.constexpr = c.CHUNKS
    PARTS: tl.constexpr = c.PARTS
    for i in tl.static_range(CHUNKS):
        o_w = i * c.CHUNK + tl.arange(0, c.CHUNK)
        mask = (o_w < c.WORDS_V)[:, None] & m_row[None, :]
        for j in tl.static_range(PARTS):
            p_out = OUT + (tokens * so_t + heads * so_h)[None, :] + (c.PARTS * o_w + j)[:, None]
            tl.store(p_out, output(acc[i * c.PARTS + j] * factor[None, :], OUT, c), mask=mask)


@triton.jit
def store_part(PART, slot, m, l, acc, m_row, c: tl.constexpr):
    """Write a cut segment's state as decode's merge reads it: part j's words, then the next part's, then m and l."""
    CHUNKS: tl.constexpr = c.CHUNKS
    PARTS: tl.constexpr = c.PARTS
    p_row = PART + (slot.to(tl.int64) * c.PART_ROWS + tl.arange(0, c.ROWS)) * c.PART_COLUMNS
    for i in tl.static_range(CHUNKS):
        o_w = i * c.CHUNK + tl.arange(0, c.CHUNK)
        mask = (o_w < c.BLOCK_DV)[:, None] & m_row[None, :]
        for j in tl.static_range(PARTS):
            tl.store(p_row[None, :] + (j * c.BLOCK_DV + o_w)[:, None], acc[i * c.PARTS + j], mask=mask)
    tl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
    tl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)


@triton.jit
def mla_decode_kernel(
    QN, QP, CKV, KPE, BOX_C, BOX_P, SCALES, TABLE, LENS, CU, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, kv_scale, KV_T, out_scale, OUT_T,
    B, T, slots, sn_t, sn_h, sr_t, sr_h, sc_p, sc_s, sp_p, sp_s, ss_p, ss_s, st_b, so_t, so_h, sl_t, sl_h,
    c: tl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles for one block of heads. See the module's docstring and `parts/shares`."""
    p = tl.program_id(0)
    num_programs = tl.num_programs(0)
    META = meta_of(PART, num_programs, c)
    if c.PIECE == 0:
        tl.store(META + p * META_FIELDS, 0)
    if c.RAGGED:
        zero_padding(OUT, LSE, tl.load(CU + B).to(tl.int32), T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
    x, end, per = share(LENS, CU, B, p // c.HEADS, num_programs // c.HEADS, c)
    h = p % c.HEADS
    if x < end:
        b, base = locate(LENS, CU, B, x, c)
        scale_kv = scalar(kv_scale, KV_T, 0, c.V_T)
        score_scale = scalar(softmax_scale, SOFTMAX_T, 0, c.SOFTMAX_T) * LOG2E * scale_kv
        value_factor = scale_kv * scalar(out_scale, OUT_T, 0, c.OUT_T)
        request = request_tiles(LENS, CU, b, True, c)
        if c.PIECE > 0:
            x += to_next_piece(x - base, request.tiles, c)
        while x < end:
            while x - base >= request.tiles * request.segments:
                base += request.tiles * request.segments
                b += 1
                request = request_tiles(LENS, CU, b, True, c)
            segment = (x - base) // request.tiles
            t0 = (x - base) % request.tiles
            t1 = tl.minimum(t0 + (end - x if c.PIECE == 0 else piece_tiles(request.tiles, c)), request.tiles)
            tokens, heads, m_row = row_places(segment, h, request.q0, request.rows, c)
            q_nope, q_pe, row_scale = load_query(QN, QP, tokens, heads, m_row, sn_t, sn_h, sr_t, sr_h, c)
            m, l, acc = attend(
                CKV, KPE, BOX_C, BOX_P, SCALES, TABLE + b.to(tl.int64) * st_b, q_nope, q_pe, score_scale * row_scale,
                t0, t1, request.keys, request.rows, segment * c.ROWS, sc_p, sc_s, sp_p, sp_s, ss_p, ss_s, c,
            )  # fmt: skip
            if t1 - t0 == request.tiles:
                factor, lse = finish(m, l, value_factor, None, heads, m_row, c)
                store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, c)
                if c.HAS_LSE:
                    tl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)
            else:
                slot = 2 * p
                if c.PIECE > 0:
                    slot = (first_segment(b, request.q0, c) + segment) * slots + t0 // piece_tiles(request.tiles, c)
                    slot = slot * c.HEADS + h
                elif t0 == 0:
                    slot += 1
                    pieces = (base + (segment + 1) * request.tiles - 1) // per - p // c.HEADS + 1
                    tl.store(META + p * META_FIELDS, pieces)
                    tl.store(META + p * META_FIELDS + 1, request.q0)
                    tl.store(META + p * META_FIELDS + 2, request.rows)
                    tl.store(META + p * META_FIELDS + 3, segment)
                store_part(PART, slot, m, l, acc, m_row, c)
            x += t1 - t0
