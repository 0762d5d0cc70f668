"""How attention ends: the running softmax becomes an output, and states of cut segments (`shares`) become one."""

import triton
import triton.language as tl

from .quant import cast
from .shares import META_FIELDS, meta_of, piece_tiles, request_tiles, segment_of

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


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
            m, l, acc = joined(PART, 2 * p, 2 * c.HEADS, 1, pieces, r, c)
            write(
                m, l, acc, SINKS, OUT, LSE, v_scale, V_T, out_scale, OUT_T, q0, h, row, so_t, so_h, sl_t, sl_h, c
            )  # fmt: skip


@triton.jit
def merge_pieces_kernel(
    LENS, CU, SINKS, OUT, LSE, PART, v_scale, V_T, out_scale, OUT_T, B, slots, so_t, so_h, sl_t, sl_h, c: tl.constexpr
):  # fmt: skip
    """Merge one row of a segment that fell into pieces: those of `shares.first_segment`'s number, by its length."""
    p, r = tl.program_id(0), tl.program_id(1)
    i, h = p // c.HEADS, p % c.HEADS
    b, segment = segment_of(CU, B, i, c)
    request = request_tiles(LENS, CU, b, True, c)
    row, piece = segment * c.ROWS + r, piece_tiles(request.tiles, c)
    if (row < request.rows * c.GROUP) & (piece < request.tiles):
        m, l, acc = joined(PART, i * slots * c.HEADS + h, c.HEADS, 0, tl.cdiv(request.tiles, piece), r, c)
        write(
            m, l, acc, SINKS, OUT, LSE, v_scale, V_T, out_scale, OUT_T, request.q0, h, row, so_t, so_h, sl_t, sl_h, c
        )  # fmt: skip


@triton.jit
def joined(PART, slot, step, ahead, pieces, r, c: tl.constexpr):
    """The state of row r over all pieces: in slots `slot`, `slot` + `step`, …, the first one so far `ahead`."""
    o_i, o_d = tl.arange(0, c.MERGE_PIECES), tl.arange(0, c.MERGE_COLUMNS)
    m = tl.full([], float("-inf"), tl.float32)
    l = tl.full([], 0.0, tl.float32)
    acc = tl.full([c.MERGE_COLUMNS], 0.0, tl.float32)
    for i in range(0, pieces, c.MERGE_PIECES):
        m_i = i + o_i < pieces
        slots = (slot + (i + o_i) * step + tl.where(i + o_i == 0, ahead, 0)).to(tl.int64)
        p_part = PART + (slots * c.PART_ROWS + r) * c.PART_COLUMNS
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
    return m, l, acc


@triton.jit
def write(m, l, acc, SINKS, OUT, LSE, v_scale, V_T, out_scale, OUT_T, q0, h, row, so_t, so_h, sl_t, sl_h,
          c: tl.constexpr):  # fmt: skip
    """Write the output of one row of a KV head, and its LSE."""
    o_d = tl.arange(0, c.MERGE_COLUMNS)
    head = (h * c.GROUP + row % c.GROUP).to(tl.int64)
    token = (q0 + row // c.GROUP).to(tl.int64)
    h_scale = scalar(v_scale, V_T, h * c.V_T_STRIDE, c.V_T) * scalar(out_scale, OUT_T, 0, c.OUT_T)
    factor, lse = finish(m, l, h_scale * c.V_FACTOR, SINKS, head, True, c)
    word = o_d % c.BLOCK_DV
    p_out = OUT + token * so_t + head * so_h + c.PARTS * word + o_d // c.BLOCK_DV
    tl.store(p_out, output(acc * factor, OUT, c), mask=word < c.WORDS_V)
    if c.HAS_LSE:
        tl.store(LSE + token * sl_t + head * sl_h, lse)
