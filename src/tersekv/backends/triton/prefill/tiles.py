"""The inner loop of paged prefill: query rows of one request and KV head against a range of keys, tile by tile.

Queries lie on the matrix unit's M side, one row a new token and query head, so that a tile's codes are converted once
for all rows of a block. A row of codes falls apart into PARTS tiles (`parts/tiles.py`); queries, accumulators and new
rows are taken apart the same way.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..parts.pages import page_of, slots_of
from ..parts.softcap import softcapped
from ..parts.tiles import INT4, block_scales, e4m3_bytes_to_fp16, unpack, zero_points


class Rows(NamedTuple):
    """Rows [P, S, H, ...], where they begin and their strides; of new rows every token is a slot of one page."""

    x: Any
    page: Any
    slot: Any
    head: Any


class Side(NamedTuple):
    """Keys, or values."""

    codes: Rows
    scales: Rows


class Range(NamedTuple):
    """Keys [start, stop) that some row of a block sees, and where its rows stand among them."""

    start: Any
    stop: Any
    low: Any  # place of the first row's token
    high: Any  # behind the last row's


@triton.jit
def apart(x, ROWS: tl.constexpr, WORDS: tl.constexpr, PARTS: tl.constexpr):
    """[ROWS, PARTS * WORDS] → PARTS tiles [ROWS, WORDS]: part j holds the columns PARTS * i + j."""
    if PARTS == 1:
        return (x,)
    elif PARTS == 2:
        return tl.split(tl.reshape(x, [ROWS, WORDS, 2]))
    else:
        even, odd = tl.split(tl.reshape(x, [ROWS, WORDS, 2, 2]))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        return a, b, c, d


@triton.jit
def together(parts, PARTS: tl.constexpr):
    """What `apart` took apart."""
    if PARTS == 1:
        return parts[0]
    elif PARTS == 2:
        return tl.interleave(parts[0], parts[1])
    else:
        return tl.interleave(tl.interleave(parts[0], parts[2]), tl.interleave(parts[1], parts[3]))


@triton.jit
def load_rows(Q, tokens, heads, m_row, sq_t, sq_h, c: tl.constexpr):
    """Query rows [ROWS, PARTS * BLOCK_D] in fp32."""
    o_d = tl.arange(0, c.K.PARTS * c.BLOCK_D)
    p_q = Q + (tokens * sq_t + heads * sq_h)[:, None] + o_d[None, :]
    x = tl.load(p_q, mask=m_row[:, None] & (o_d < c.D)[None, :], other=0.0)
    if c.Q_BYTES:
        x = e4m3_bytes_to_fp16(x)
    return x.to(tl.float32)


@triton.jit
def query(x, c: tl.constexpr):
    """Query rows as PARTS tiles [ROWS, words] in the compute type of codes, and a factor of their scores [ROWS].

    fp16 holds what bf16 holds only after a power of two is taken out of each row; the factor puts it back. Over bf16
    keys, with TWO, a second tile holds what rounding to bf16 takes away.
    """
    if c.BF16:
        one = tl.full([c.ROWS], 1.0, tl.float32)
        high = x.to(tl.bfloat16)
        if c.TWO:
            return (high, (x - high.to(tl.float32)).to(tl.bfloat16)), one
        else:
            return (high,), one
    else:
        top = tl.max(tl.abs(x), 1)
        field = tl.maximum((top.to(tl.int32, bitcast=True) >> 23) & 0xFF, 1)  # exponent of the largest magnitude
        inverse = (tl.maximum(254 - field, 1) << 23).to(tl.float32, bitcast=True)
        parts = apart((x * inverse[:, None]).to(tl.float16), c.ROWS, c.BLOCK_D, c.K.PARTS)
        return parts, (field << 23).to(tl.float32, bitcast=True) * c.K_FACTOR


@triton.jit
def offsets(rows: Rows, pages, t, h, NEW: tl.constexpr, STEP: tl.constexpr, c: tl.constexpr):
    """Of head h's rows of tile t; strides of rows in pages are in units of STEP elements (`Codes.STEP`)."""
    if NEW:
        return (t * c.TILE + tl.arange(0, c.TILE)).to(tl.int64) * rows.slot + h.to(tl.int64) * rows.head
    else:
        head = h.to(tl.int64) if c.FAR else h
        return (pages * rows.page + slots_of(t, c) * rows.slot + head * rows.head) * STEP


@triton.jit
def load_tile(rows: Rows, pages, t, live, h, BLOCK: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr,
              NEW: tl.constexpr, STEP: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """Words [TILE, BLOCK] of tile t; 0 for keys that are not live, which only a masked tile has."""
    o_d = tl.arange(0, BLOCK)
    p_x = rows.x + offsets(rows, pages, t, h, NEW, STEP, c)[:, None] + o_d[None, :]
    if MASKED:
        return tl.load(p_x, mask=live[:, None] & (o_d < SIZE)[None, :], other=0.0)
    elif BLOCK == SIZE:
        return tl.load(p_x)
    else:
        return tl.load(p_x, mask=(o_d < SIZE)[None, :], other=0.0)


@triton.jit
def load_scales(side: Side, pages, t, live, h, BLOCK: tl.constexpr, SIZE: tl.constexpr, MASKED: tl.constexpr,
                NEW: tl.constexpr, codes: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """Stored scales of tile t: fp32 [TILE] of tokens, or e4m3 [TILE, blocks], where a block is four words; or none."""
    if NEW:
        return ()
    elif codes.TOKEN_SCALES:
        p_row = side.scales.x + offsets(side.scales, pages, t, h, NEW, codes.SCALE_STEP, c)
        if MASKED:
            return (tl.load(p_row, mask=live, other=1.0),)
        else:
            return (tl.load(p_row),)
    elif codes.BLOCK_SCALES:
        return (load_tile(side.scales, pages, t, live, h, BLOCK // 4, SIZE // 4, MASKED, NEW, codes.SCALE_STEP, c),)
    else:
        return ()


@triton.jit
def numbers(words, scales, BLOCK: tl.constexpr, NEW: tl.constexpr, codes: tl.constexpr):
    """PARTS tiles [TILE, BLOCK] that the matrix unit takes, from what was loaded."""
    PARTS: tl.constexpr = codes.PARTS
    TILE: tl.constexpr = words.shape[0]
    if NEW:
        return apart(words, TILE, BLOCK, PARTS)
    elif codes.BLOCK_SCALES:
        x, factor = unpack(words, codes), block_scales(scales[0], TILE, BLOCK // 4, 4, codes)
        out = ()
        for j in tl.static_range(PARTS):
            out = out + (x[j] * factor,)
        return out
    elif codes.CODE == INT4:
        x, zero = unpack(words, codes), zero_points(scales[0]).to(tl.float16)[:, None]  # differences are exact
        out = ()
        for j in tl.static_range(PARTS):
            out = out + (x[j] - zero,)
        return out
    else:
        return unpack(words, codes)


@triton.jit
def scores(q, keys, scale, ks, softcap, NEW: tl.constexpr, c: tl.constexpr):
    """Scores [ROWS, TILE] in units of log2."""
    PARTS: tl.constexpr = c.K.PARTS
    s = tl.dot(q[0], tl.trans(keys[0]))
    for j in tl.static_range(1, PARTS):
        s = tl.dot(q[j], tl.trans(keys[j]), acc=s)
    if c.TWO and not NEW:
        s = tl.dot(q[1], tl.trans(keys[0]), acc=s)
    s *= scale[:, None]
    if c.K.TOKEN_SCALES and not NEW:
        s *= ks[0][None, :]
    if c.SOFTCAP:
        s = softcapped(s, softcap)
    return s


@triton.jit
def take_tile(q, state, K: Side, V: Side, pages, t, span: Range, o_row, h, scale, softcap, MASKED: tl.constexpr,
              NEW: tl.constexpr, c: tl.constexpr):  # fmt: skip
    """One step of the running softmax. state: base-2 maximum and sum of each row, PARTS accumulators [ROWS, words]."""
    PARTS: tl.constexpr = c.PARTS
    KEYS: tl.constexpr = c.K
    WIDE_K: tl.constexpr = KEYS.PARTS if NEW else 1  # new rows come whole
    WIDE_V: tl.constexpr = c.PARTS if NEW else 1
    m, l, acc = state
    o_n = t * c.TILE + tl.arange(0, c.TILE)
    live = (o_n >= span.start) & (o_n < span.stop)
    ks = load_scales(K, pages, t, live, h, c.BLOCK_D, c.WORDS_K, MASKED, NEW, KEYS, c)
    vs = load_scales(V, pages, t, live, h, c.BLOCK_DV, c.WORDS_V, MASKED, NEW, c, c)
    words = load_tile(K.codes, pages, t, live, h, WIDE_K * c.BLOCK_D, WIDE_K * c.WORDS_K, MASKED, NEW, KEYS.STEP, c)
    s = scores(q, numbers(words, ks, c.BLOCK_D, NEW, KEYS), scale, ks, softcap, NEW, c)
    if c.TOKEN_SCALES and not NEW:
        # The value's scale joins the exponent, so that the probabilities that meet the codes lie in (0, 1].
        v_scales = tl.maximum(vs[0], 1e-30)
        s += tl.log2(v_scales)[None, :]
    if MASKED:
        seen = live[None, :] & (o_n[None, :] <= o_row[:, None])
        if c.WINDOW > 0:
            seen = seen & (o_n[None, :] > o_row[:, None] - c.WINDOW)
        s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    base = m_new
    if MASKED:
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row may have seen nothing yet
    p = tl.exp2(s - base[:, None])
    old = tl.exp2(m - base)
    if c.TOKEN_SCALES and not NEW:
        l = l * old + tl.sum(p * (1.0 / v_scales)[None, :], 1)
    else:
        l = l * old + tl.sum(p, 1)
    words = load_tile(V.codes, pages, t, live, h, WIDE_V * c.BLOCK_DV, WIDE_V * c.WORDS_V, MASKED, NEW, c.STEP, c)
    values = numbers(words, vs, c.BLOCK_DV, NEW, c)
    out = ()
    for j in tl.static_range(PARTS):
        out = out + (tl.dot(p.to(values[j].dtype), values[j], acc=acc[j] * old[:, None]),)
    return m_new, l, out


@triton.jit
def pages_of(table, t, n, NEW: tl.constexpr, c: tl.constexpr):
    """Page ids of tile t; new rows have none."""
    if NEW:
        return t
    else:
        return page_of(table, t, n, c)


@triton.jit
def attend(q, state, K: Side, V: Side, table, span: Range, o_row, h, scale, softcap, NEW: tl.constexpr,
           c: tl.constexpr):  # fmt: skip
    """Attend to the keys of a range. NEW: the keys are the new rows themselves, in 16 bits."""
    t0 = span.start // c.TILE
    t1 = tl.maximum(tl.cdiv(span.stop, c.TILE), t0)
    # Tiles [u0, u1) are seen whole by every row; the others need masks.
    u0 = tl.cdiv(span.start, c.TILE)
    if c.WINDOW > 0:
        u0 = tl.maximum(u0, tl.cdiv(tl.maximum(span.high - c.WINDOW, 0), c.TILE))
    u0 = tl.minimum(u0, t1)
    u1 = tl.maximum(tl.minimum(span.stop, tl.maximum(span.low + 1, 0)) // c.TILE, u0)
    # Page ids are read a step ahead of the tiles, so that no load waits for its own address.
    pages = pages_of(table, u0, span.stop, NEW, c)
    for t in tl.range(u0, u1):
        ahead = pages_of(table, t + 1, span.stop, NEW, c)
        state = take_tile(q, state, K, V, pages, t, span, o_row, h, scale, softcap, False, NEW, c)
        pages = ahead
    for i in tl.range(0, u0 - t0 + t1 - u1, num_stages=1):
        t = tl.where(i < u0 - t0, t0 + i, u1 + i - (u0 - t0))
        pages = pages_of(table, t, span.stop, NEW, c)
        state = take_tile(q, state, K, V, pages, t, span, o_row, h, scale, softcap, True, NEW, c)
    return state
