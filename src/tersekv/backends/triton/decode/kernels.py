"""Kernels of paged decode: a split-KV pass over equal shares of all tiles, and the merge of what it cut.

Work is flattened on the device: every (request, block of query rows) is a segment of tiles of TILE keys, and all tiles
are dealt in equal, contiguous shares; program p takes share p // HEADS for KV head p % HEADS, so that heads that lie
side by side in memory are read at the same time. No plan call, and lengths may change between replays of a CUDA
graph. Keys lie on the matrix unit's M side and query rows on N, so few query heads waste little of it.

A share covers whole segments, written to `out` at once, and at most two cut ones: the first, if it began earlier
(scratch slot 2p), and the last, if it goes on (slot 2p + 1). The program in which a cut segment begins also notes it
in META, from which `merge_kernel` works.
"""

import triton
import triton.language as tl

from ..parts.quant import cast
from .tiles import attend, load_query

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
META_FIELDS = tl.constexpr(4)  # pieces, first query row of the request, rows of the request, segment in the request


@triton.jit
def meta_of(PART, num_programs, c: tl.constexpr):
    """META [programs, META_FIELDS] int32, behind the states of cut segments in the same scratch."""
    return (PART + 2 * num_programs * c.ROWS * c.PART_COLUMNS).to(tl.pointer_type(tl.int32))


@triton.jit
def request_tiles(LENS, CU, b, m_b, c: tl.constexpr):
    """(tiles of a segment, segments, first tile, keys, query rows, first query row) of request(s) b."""
    n = tl.load(LENS + b, mask=m_b, other=0).to(tl.int32)
    if c.RAGGED:
        q0 = tl.load(CU + b, mask=m_b, other=0).to(tl.int32)
        rows = tl.load(CU + b + 1, mask=m_b, other=0).to(tl.int32) - q0
    else:
        q0 = b * c.MAX_Q
        rows = tl.where(m_b, c.MAX_Q, 0)
    first = n * 0
    if c.WINDOW > 0:
        first = tl.maximum(n - rows - c.WINDOW + 1, 0) // c.TILE
    # A request without keys still has outputs to write: one empty tile.
    tiles = tl.maximum(tl.cdiv(n, c.TILE) - first, 1)
    segments = tl.cdiv(rows * c.GROUP, c.ROWS)
    return tiles, segments, first, n, rows, q0


@triton.jit
def share(LENS, CU, B, i_share, num_shares, c: tl.constexpr):
    """(first tile, end, tiles of a share) of a share, in the flat order of all tiles."""
    total = 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + tl.arange(0, c.BLOCK_B)
        tiles, segments, _, _, _, _ = request_tiles(LENS, CU, o_b, o_b < B, c)
        total += tl.sum(tiles * segments)
    per = tl.maximum(tl.cdiv(total, num_shares), c.MIN_TILES)
    start = i_share * per
    return start, tl.minimum(start + per, total), per


@triton.jit
def locate(LENS, CU, B, x, c: tl.constexpr):
    """(request that holds flat tile x, flat index of the request's first tile)."""
    b, base, before = 0, 0, 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + tl.arange(0, c.BLOCK_B)
        tiles, segments, _, _, _, _ = request_tiles(LENS, CU, o_b, o_b < B, c)
        ends = before + tl.cumsum(tiles * segments, 0)
        passed = (ends <= x) & (o_b < B)
        b += tl.sum(passed.to(tl.int32))
        base = tl.maximum(base, tl.max(tl.where(passed, ends, 0)))
        before += tl.sum(tiles * segments)
    return b, base


@triton.jit
def scalar(x, T, offset, HAS_T: tl.constexpr):
    """A scale: the device's tensor where there is one, else the host's float."""
    if HAS_T:
        return tl.load(T + offset)
    else:
        return x


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """Clamp to the output's largest value; NaN stays NaN. LIMIT 0: nothing to clamp."""
    if LIMIT > 0:
        return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    else:
        return x


@triton.jit
def output(x, OUT, c: tl.constexpr):
    """fp32 → what OUT points to; fp8 saturates. Where the chip's casts do not give the nearest code, OUT is bytes."""
    KIND: tl.constexpr = c.OUT_KIND
    return cast(saturate(x, c.OUT_MAX), OUT.dtype.element_ty, KIND, False)


@triton.jit
def finish(m, l, h_scale, SINKS, heads, m_row, c: tl.constexpr):
    """(factor of the accumulator, LSE in natural log) of rows whose running base-2 maximum and sum are m, l."""
    seen = l != 0  # NaN counts as seen
    base = tl.where(seen, m, 0.0)
    total = l
    if c.HAS_SINKS:
        sink = tl.load(SINKS + heads, mask=m_row, other=0.0) * LOG2E
        top = tl.maximum(base, sink)  # a sink far above every score would overflow against `base`
        old = tl.exp2(base - top)
        total = tl.where(seen, l * old + tl.exp2(sink - top), 0.0)
        h_scale *= old
        base = tl.where(seen, top, 0.0)
    factor = tl.where(seen, h_scale / tl.where(seen, total, 1.0), 0.0)
    lse = tl.where(seen, (base + tl.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf"))
    return factor, lse


@triton.jit
def store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, c: tl.constexpr):
    """Write acc × factor to `out`; acc: PARTS tiles [words, ROWS]."""
    PARTS: tl.constexpr = c.PARTS
    o_d = tl.arange(0, c.BLOCK_DV)
    mask = (o_d < c.WORDS_V)[:, None] & m_row[None, :]
    for j in tl.static_range(PARTS):
        p_out = OUT + (tokens * so_t + heads * so_h)[None, :] + (c.PARTS * o_d + j)[:, None]
        tl.store(p_out, output(acc[j] * factor[None, :], OUT, c), mask=mask)


@triton.jit
def row_places(segment, h, q0, rows, c: tl.constexpr):
    """(tokens [ROWS], query heads [ROWS], row is real [ROWS]) of a block of query rows."""
    o_r = segment * c.ROWS + tl.arange(0, c.ROWS)
    tokens = (q0 + o_r // c.GROUP).to(tl.int64)
    return tokens, (h * c.GROUP + o_r % c.GROUP).to(tl.int64), o_r < rows * c.GROUP


@triton.jit
def decode_kernel(
    Q, K, V, KS, VS, TABLE, LENS, CU, MASK, SINKS, OUT, LSE, PART,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, sq_t, sq_h, sk_p, sk_s, sk_h, sv_p, sv_s, sv_h,
    sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, st_b, sm_t, so_t, so_h, sl_t, sl_h,
    c: tl.constexpr,
):  # fmt: skip
    """Attend one share of all tiles. See the module's docstring."""
    p = tl.program_id(0)
    num_programs = tl.num_programs(0)
    META = meta_of(PART, num_programs, c)
    tl.store(META + p * META_FIELDS, 0)
    if c.RAGGED:
        zero_padding(OUT, LSE, tl.load(CU + B).to(tl.int32), T, p, num_programs, so_t, so_h, sl_t, sl_h, c)
    x, end, per = share(LENS, CU, B, p // c.HEADS, num_programs // c.HEADS, c)
    h = p % c.HEADS
    if x < end:
        b, base = locate(LENS, CU, B, x, c)
        score_scale = scalar(softmax_scale, SOFTMAX_T, 0, c.SOFTMAX_T) * LOG2E
        tiles, segments, first, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
        while x < end:
            while x - base >= tiles * segments:
                base += tiles * segments
                b += 1
                tiles, segments, first, n, rows, q0 = request_tiles(LENS, CU, b, True, c)
            segment = (x - base) // tiles
            t0 = (x - base) % tiles
            t1 = tl.minimum(t0 + end - x, tiles)
            tokens, heads, m_row = row_places(segment, h, q0, rows, c)
            scale = score_scale * scalar(k_scale, K_T, h * c.K_T_STRIDE, c.K_T)
            q, row_scale = load_query(Q, tokens, heads, m_row, sq_t, sq_h, c)
            m, l, acc = attend(
                K, V, KS, VS, TABLE + b.to(tl.int64) * st_b, MASK, q, scale * row_scale, softcap,
                first + t0, first + t1, n, rows, segment * c.ROWS, q0, h,
                sk_p, sk_s, sk_h, sv_p, sv_s, sv_h, sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, sm_t, c,
            )  # fmt: skip
            if t1 - t0 == tiles:
                h_scale = scalar(v_scale, V_T, h * c.V_T_STRIDE, c.V_T) * scalar(out_scale, OUT_T, 0, c.OUT_T)
                factor, lse = finish(m, l, h_scale * c.V_FACTOR, SINKS, heads, m_row, c)
                store_rows(OUT, acc, factor, tokens, heads, m_row, so_t, so_h, c)
                if c.HAS_LSE:
                    tl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)
            else:
                slot = 2 * p
                if t0 == 0:
                    slot += 1
                    tl.store(META + p * META_FIELDS, (base + (segment + 1) * tiles - 1) // per - p // c.HEADS + 1)
                    tl.store(META + p * META_FIELDS + 1, q0)
                    tl.store(META + p * META_FIELDS + 2, rows)
                    tl.store(META + p * META_FIELDS + 3, segment)
                store_part(PART, slot, m, l, acc, m_row, c)
            x += t1 - t0


@triton.jit
def store_part(PART, slot, m, l, acc, m_row, c: tl.constexpr):
    """Write a cut segment's state: [ROWS, PARTS × BLOCK_DV + 2] fp32, the last two columns m and l."""
    PARTS: tl.constexpr = c.PARTS
    o_r = tl.arange(0, c.ROWS)
    o_d = tl.arange(0, c.BLOCK_DV)
    p_row = PART + (slot.to(tl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
    for j in tl.static_range(PARTS):
        tl.store(p_row[None, :] + j * c.BLOCK_DV + o_d[:, None], acc[j], mask=m_row[None, :])
    tl.store(p_row + c.PART_COLUMNS - 2, m, mask=m_row)
    tl.store(p_row + c.PART_COLUMNS - 1, l, mask=m_row)


@triton.jit
def zero_padding(OUT, LSE, t, T, p, num_programs, so_t, so_h, sl_t, sl_h, c: tl.constexpr):
    """Query rows behind the last request: output 0, LSE −inf."""
    o_d = tl.arange(0, c.PARTS * c.BLOCK_DV)
    t += p
    while t < T:
        for head in range(c.HEADS * c.GROUP):
            p_out = OUT + t.to(tl.int64) * so_t + head * so_h + o_d
            tl.store(p_out, (o_d * 0).to(tl.float32).to(OUT.dtype.element_ty), mask=o_d < c.DV)
            if c.HAS_LSE:
                tl.store(LSE + t.to(tl.int64) * sl_t + head * sl_h, float("-inf"))
        t += num_programs


@triton.jit
def merge_kernel(
    SINKS, OUT, LSE, PART, v_scale, V_T, out_scale, OUT_T, so_t, so_h, sl_t, sl_h, c: tl.constexpr
):  # fmt: skip
    """Merge one row of the cut segment that begins in program p: slots 2p + 1, 2(p + HEADS), 2(p + 2 HEADS), …"""
    p, r = tl.program_id(0), tl.program_id(1)
    META = meta_of(PART, tl.num_programs(0), c)
    pieces = tl.load(META + p * META_FIELDS)
    q0 = tl.load(META + p * META_FIELDS + 1)
    rows = tl.load(META + p * META_FIELDS + 2)
    if pieces > 0:
        segment = tl.load(META + p * META_FIELDS + 3)
        h, row = p % c.HEADS, segment * c.ROWS + r
        if row < rows * c.GROUP:
            o_i, o_d = tl.arange(0, c.MERGE_PIECES), tl.arange(0, c.MERGE_COLUMNS)
            m = tl.full([], float("-inf"), tl.float32)
            l = tl.full([], 0.0, tl.float32)
            acc = tl.full([c.MERGE_COLUMNS], 0.0, tl.float32)
            for i in range(0, pieces, c.MERGE_PIECES):
                m_i = i + o_i < pieces
                slots = (2 * (p + (i + o_i) * c.HEADS) + tl.where(i + o_i == 0, 1, 0)).to(tl.int64)
                p_part = PART + (slots * c.ROWS + r) * c.PART_COLUMNS
                m_part = tl.load(p_part + c.PART_COLUMNS - 2, mask=m_i, other=float("-inf"))
                l_part = tl.load(p_part + c.PART_COLUMNS - 1, mask=m_i, other=0.0)
                m_both = m_i[:, None]
                parts = tl.load(p_part[:, None] + o_d[None, :], mask=m_both, other=0.0)
                m_new = tl.maximum(m, tl.max(m_part, 0))
                base = tl.where(m_new == float("-inf"), 0.0, m_new)
                weights = tl.exp2(m_part - base)
                old = tl.exp2(m - base)
                acc = acc * old + tl.sum(parts * weights[:, None], 0)
                l = l * old + tl.sum(l_part * weights, 0)
                m = m_new
            head = h * c.GROUP + row % c.GROUP
            token = (q0 + row // c.GROUP).to(tl.int64)
            h_scale = scalar(v_scale, V_T, h * c.V_T_STRIDE, c.V_T) * scalar(out_scale, OUT_T, 0, c.OUT_T)
            factor, lse = finish(m, l, h_scale * c.V_FACTOR, SINKS, head, True, c)
            word = o_d % c.BLOCK_DV
            p_out = OUT + token * so_t + head * so_h + c.PARTS * word + o_d // c.BLOCK_DV
            tl.store(p_out, output(acc * factor, OUT, c), mask=word < c.WORDS_V)
            if c.HAS_LSE:
                tl.store(LSE + token * sl_t + head * sl_h, lse)
