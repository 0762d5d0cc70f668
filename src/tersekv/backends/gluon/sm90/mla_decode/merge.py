"""The merge of the segments that MLA decode's split pass cut: every piece's state, weighed, summed and written; or, in
the decode branch, projected at once.

A program takes ROWS rows of one segment and COLUMNS columns of them; PIECES pieces are read at once. It may be launched
before the split pass has ended, and waits for it.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ....triton.parts.merge import finish, output, scalar
from ....triton.parts.project import GROUP, add_scaled, ask, quantise, store_product
from ....triton.parts.shares import meta_of
from ..parts.pieces import add_pieces

COLUMNS = tl.constexpr(128)  # of a head's values, in the decode branch


@triton.jit
def merge_kernel(
    CU, OUT, LSE, PART, kv_scale, KV_T, out_scale, OUT_T, num_programs, max_segments, so_t, so_h, sl_t, sl_h,
    ROWS: tl.constexpr, PIECES: tl.constexpr, COLUMNS: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """One segment of a block of heads; its pieces lie in slots 2p + 1, 2(p + HEADS), 2(p + 2 HEADS), …"""
    gdc_launch_dependents()
    gdc_wait()
    i, j = tl.program_id(0), tl.program_id(2)
    h, segment, b = i % c.HEADS, i // c.HEADS % max_segments, i // (c.HEADS * max_segments)
    if c.RAGGED:
        q0 = tl.load(CU + b).to(tl.int32)
        rows = tl.load(CU + b + 1).to(tl.int32) - q0
    else:
        q0, rows = b * c.MAX_Q, c.MAX_Q
    o_r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_r = (o_r < c.ROWS) & (segment * c.ROWS + o_r < rows * c.GROUP)
    # Read whether there is such a segment or not, so that it need not wait for what says so.
    META = meta_of(PART, num_programs, c) + 2 * i
    pieces, p = tl.load(META), tl.load(META + 1)
    if (pieces > 1) & (segment * c.ROWS < rows * c.GROUP):
        o_i, o_d = tl.arange(0, PIECES), j * COLUMNS + tl.arange(0, COLUMNS)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        l = tl.full([ROWS], 0.0, tl.float32)
        acc = tl.full([ROWS, COLUMNS], 0.0, tl.float32)
        for x in range(0, pieces, PIECES):
            mask = m_r[:, None] & (x + o_i < pieces)[None, :]
            slots = 2 * (p + (x + o_i) * c.HEADS) + tl.where(x + o_i == 0, 1, 0)
            m, l, acc = add_pieces(m, l, acc, PART, slots[None, :], o_r, o_d, mask, c)
        row = segment * c.ROWS + o_r
        heads = (h * c.GROUP + row % c.GROUP).to(tl.int64)
        tokens = (q0 + row // c.GROUP).to(tl.int64)
        value_factor = scalar(kv_scale, KV_T, 0, c.V_T) * scalar(out_scale, OUT_T, 0, c.OUT_T)
        factor, lse = finish(m, l, value_factor, None, heads, m_r, c)
        columns = c.PARTS * (o_d % c.BLOCK_DV) + o_d // c.BLOCK_DV
        p_out = OUT + (tokens * so_t + heads * so_h)[:, None] + columns[None, :]
        tl.store(p_out, output(acc * factor[:, None], OUT, c), mask=m_r[:, None])
        if c.HAS_LSE:
            tl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_r & (j == 0))


@triton.jit
def merged(PART, p, pieces, o_r, o_d, value_factor, PIECES: tl.constexpr, c: tl.constexpr):
    """fp32 columns o_d, as pieces hold them, of rows o_r, each of `pieces` pieces from program p on; 0 where none are.

    NOTE: tiles so wide that warps lie side by side. Sums over pieces of several warps go through shared memory, by one
    bank: with tiles of 128 columns and 8 warps, 19 µs instead of 9.
    """
    o_i = tl.arange(0, PIECES)
    # The first piece lies in its program's other slot, and the state starts with it: of 33 pieces 32 are left.
    p_first = PART + ((2 * p + 1).to(tl.int64) * c.ROWS + o_r) * c.PART_COLUMNS
    m = tl.load(p_first + c.PART_COLUMNS - 2, mask=pieces > 0, other=float("-inf"))
    l = tl.load(p_first + c.PART_COLUMNS - 1, mask=pieces > 0, other=0.0)
    acc = tl.load(p_first[:, None] + o_d[None, :], mask=(pieces > 0)[:, None], other=0.0)
    for x in range(1, tl.max(pieces), PIECES):
        mask = x + o_i[None, :] < pieces[:, None]
        slots = 2 * (p[:, None] + (x + o_i) * c.HEADS)
        m, l, acc = add_pieces(m, l, acc, PART, slots, o_r, o_d, mask, c)
    factor, _ = finish(m, l, value_factor, None, o_r, pieces > 0, c)
    return acc * factor[:, None]


@triton.jit
def rows_of(CU, o_m, h, T, B, max_segments, c: tl.constexpr):
    """(segment, row in it, whether there is one) of tokens of head h; segments as META has them. Rows before the first
    request's are none."""
    if c.RAGGED:
        b = o_m * 0
        for j in range(0, B, c.BLOCK_B):
            o_b = j + tl.arange(0, c.BLOCK_B)
            ends = tl.load(CU + 1 + o_b, mask=o_b < B, other=2**31 - 1).to(tl.int32)
            b += tl.sum((ends[None, :] <= o_m[:, None]).to(tl.int32), 1)
        first = tl.load(CU + b).to(tl.int32)
    else:
        b = o_m // c.MAX_Q
        first = b * c.MAX_Q
    row = (o_m - first) * c.GROUP + h % c.GROUP
    live = (o_m >= first) & (o_m < T) & (b < B)
    return (b * max_segments + row // c.ROWS) * c.HEADS + h // c.GROUP, row % c.ROWS, live


@triton.jit
def quarters(x):
    """[M, 4 n] as four tiles [M, n]."""
    M: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1] // 4
    low, high = tl.split(tl.permute(tl.reshape(x, [M, 2, 2 * N]), (0, 2, 1)))
    a, b = tl.split(tl.permute(tl.reshape(low, [M, 2, N]), (0, 2, 1)))
    c, d = tl.split(tl.permute(tl.reshape(high, [M, 2, N]), (0, 2, 1)))
    return a, b, c, d


@triton.jit(do_not_specialize=["T", "B"])
def merge_project_kernel(
    CU, LATENTS, PART, W, W_SCALE, OUT, kv_scale, KV_T, T, B, num_programs, max_segments, stride_lt, stride_lh,
    stride_wh, stride_wn, stride_sh, stride_sn, stride_ot, stride_oh,
    BLOCK_M: tl.constexpr, PIECES: tl.constexpr, c: tl.constexpr,
):  # fmt: skip
    """Head h of BLOCK_M tokens: pieces merged, rounded as `merge_kernel` writes them, quantised, and projected to
    COLUMNS columns by e4m3 weights. Rows that were not cut lie in LATENTS. A program asks for its weights before it
    waits."""
    gdc_launch_dependents()
    h = tl.program_id(0)
    _, weights, scales = ask((W, stride_wh, stride_wn, W_SCALE, stride_sh, stride_sn), h.to(tl.int64), 0, COLUMNS, c.DV,
                             COLUMNS, 4)  # fmt: skip
    o_m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    gdc_wait()
    segment, o_r, live = rows_of(CU, o_m, h, T, B, max_segments, c)
    META = meta_of(PART, num_programs, c) + 2 * segment
    pieces, p = tl.load(META, mask=live, other=1), tl.load(META + 1, mask=live, other=0)
    cut = pieces > 1
    p_plain = LATENTS + h.to(tl.int64) * stride_lh + o_m.to(tl.int64)[:, None] * stride_lt + tl.arange(0, c.DV)[None, :]
    # Not 1 alone: where programs take segments whole, `pieces` is 1 minus the number of the share.
    plain = tl.load(p_plain, mask=(live & (pieces <= 1))[:, None], other=0.0)
    value_factor = scalar(kv_scale, KV_T, 0, c.V_T)
    o_d = tl.arange(0, c.DV) % c.PARTS * c.BLOCK_DV + tl.arange(0, c.DV) // c.PARTS
    x = merged(PART, p, tl.where(cut, pieces, 0), o_r, o_d, value_factor, PIECES, c)
    x = tl.where(cut[:, None], output(x, LATENTS, c), plain)
    codes, x_scales = quantise(tl.reshape(x, [4 * BLOCK_M, GROUP]), True)
    codes, x_scales = quarters(tl.reshape(codes, [BLOCK_M, 4 * GROUP])), quarters(tl.reshape(x_scales, [BLOCK_M, 4]))
    acc = tl.zeros([COLUMNS, BLOCK_M], tl.float32)  # turned around: weights are the product's rows
    for g in tl.static_range(4):
        scale = tl.reshape(x_scales[g], [BLOCK_M])
        acc = add_scaled(acc, codes[g], scale, weights[g], scales[g], True, True)
    store_product(acc, (OUT, stride_ot, stride_oh), h.to(tl.int64), 0, o_m, T, COLUMNS, COLUMNS, True)
