"""The kernel of paged prefill: a program takes a block of query rows of one request and KV head, against all its keys.

A row is a new token and a query head of the group; blocks are numbered over all requests without the host's knowing
their lengths: request b has its first one at `cu[b] * GROUP // ROWS + b`, which leaves room enough for every request
before it. Programs of late blocks, which see most keys, start first.
"""

import triton
import triton.language as tl

from ..parts.merge import finish, output, scalar
from ..parts.shares import zero_padding
from ..parts.turn import back
from ..parts.turn import query as turned
from .tiles import Range, Rows, Side, apart, attend, load_rows, query, together

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_row(CU, b, live):
    """First query row of requests b, of those that are live. CU: [B + 1], or how many rows every request has."""
    if CU.dtype.is_ptr():
        return tl.load(CU + b, mask=live, other=0).to(tl.int64)
    else:
        return tl.where(live, b * CU, 0).to(tl.int64)


@triton.jit
def locate(CU, B, block, c: tl.constexpr):
    """(request of a block, index of the block in the request)."""
    found, start = -1, 0
    for i in range(0, B, c.BLOCK_B):
        o_b = i + tl.arange(0, c.BLOCK_B)
        begins = first_row(CU, o_b, o_b < B) * c.GROUP // c.ROWS + o_b
        passed = (begins <= block) & (o_b < B)
        found += tl.sum(passed.to(tl.int32))
        start = tl.maximum(start, tl.max(tl.where(passed, begins, 0)).to(tl.int32))
    return found, block - start


@triton.jit
def range_of(begin, end, low, high, c: tl.constexpr):
    """The keys among [begin, end) that rows at places [low, high) see."""
    start = begin
    if c.WINDOW > 0:
        start = tl.maximum(begin, low - c.WINDOW + 1)
    return Range(start, tl.maximum(tl.minimum(end, high), start), low, high)


@triton.jit(do_not_specialize=["TABLE", "LENS", "CU", "B", "T"])
def prefill_kernel(
    Q, KN, VN, K, V, KS, VS, TABLE, LENS, CU, SINKS, OUT, LSE, K_SIGNS, V_SIGNS, K_CHANNELS, V_CHANNELS,
    softmax_scale, SOFTMAX_T, k_scale, K_T, v_scale, V_T, out_scale, OUT_T, softcap,
    B, T, sq_t, sq_h, skn_t, skn_h, svn_t, svn_h, sk_p, sk_s, sk_h, sv_p, sv_s, sv_h,
    sks_p, sks_s, sks_h, svs_p, svs_s, svs_h, skc_h, svc_h, st_b, so_t, so_h, sl_t, sl_h,
    c: tl.constexpr,
):  # fmt: skip
    """Attend one block of query rows. See the module's docstring."""
    PARTS: tl.constexpr = c.PARTS
    program, programs = tl.program_id(0), tl.num_programs(0)
    zero_padding(OUT, LSE, first_row(CU, B, True).to(tl.int32), T, program, programs, so_t, so_h, sl_t, sl_h, c)
    h = program % c.HEADS
    b, block = locate(CU, B, (programs - 1 - program) // c.HEADS, c)
    q0 = first_row(CU, b, True)
    rows = (first_row(CU, b + 1, True) - q0).to(tl.int32)
    r0 = block * c.ROWS
    if r0 < rows * c.GROUP:
        n = tl.load(LENS + b).to(tl.int32)
        first = n - rows  # place of the request's first new token
        o_r = r0 + tl.arange(0, c.ROWS)
        o_i = o_r // c.GROUP
        tokens, heads = q0 + o_i, (h * c.GROUP + o_r % c.GROUP).to(tl.int64)
        m_row = o_r < rows * c.GROUP
        i0, i1 = r0 // c.GROUP, tl.minimum(tl.cdiv(r0 + c.ROWS, c.GROUP), rows)

        score_scale = scalar(softmax_scale, SOFTMAX_T, 0, c.SOFTMAX_T) * LOG2E
        h_scale = scalar(v_scale, V_T, h * c.V_T_STRIDE, c.V_T) * c.V_FACTOR
        x = load_rows(Q, tokens, heads, m_row, sq_t, sq_h, c)
        q, row_scale = query(turned((x,), (K_SIGNS, K_CHANNELS, skc_h), h, 1, c.D)[0], c)
        acc = ()
        for _ in tl.static_range(PARTS):
            acc = acc + (tl.full([c.ROWS, c.BLOCK_DV], 0.0, tl.float32),)
        state = tl.full([c.ROWS], float("-inf"), tl.float32), tl.full([c.ROWS], 0.0, tl.float32), acc
        keys = Side(Rows(K, sk_p, sk_s, sk_h), Rows(KS, sks_p, sks_s, sks_h))
        values = Side(Rows(V, sv_p, sv_s, sv_h), Rows(VS, svs_p, svs_s, svs_h))
        span = range_of(0, tl.maximum(first, 0) if c.NEW else n, first + i0, first + i1, c)
        scale = row_scale * (score_scale * scalar(k_scale, K_T, h * c.K_T_STRIDE, c.K_T))
        table = TABLE + b.to(tl.int64) * st_b
        state = attend(q, state, keys, values, table, span, first + o_i, h, scale, softcap, False, c)
        m, l, acc = state
        acc = back(acc, (V_SIGNS, V_CHANNELS, svc_h), h, PARTS, c.DV)
        if c.NEW:
            held = ()
            for j in tl.static_range(PARTS):
                held = held + (acc[j] * h_scale,)
            h_scale = 1.0
            keys = Side(Rows(KN + q0 * skn_t, 0, skn_t, skn_h), Rows(None, 0, 0, 0))
            values = Side(Rows(VN + q0 * svn_t, 0, svn_t, svn_h), Rows(None, 0, 0, 0))
            span = range_of(tl.maximum(-first, 0), rows, i0, i1, c)
            q = new_query(x, KN.dtype.element_ty, c)
            scale = tl.full([c.ROWS], 1.0, tl.float32) * score_scale
            m, l, acc = attend(q, (m, l, held), keys, values, table, span, o_i, h, scale, softcap, True, c)
        h_scale *= scalar(out_scale, OUT_T, 0, c.OUT_T)
        factor, lse = finish(m, l, h_scale, SINKS, heads, m_row, c)
        o_d = tl.arange(0, PARTS * c.BLOCK_DV)
        p_out = OUT + (tokens * so_t + heads * so_h)[:, None] + o_d[None, :]
        out = ()
        for j in tl.static_range(PARTS):
            out = out + (output(acc[j] * factor[:, None], OUT, c),)
        tl.store(p_out, together(out, PARTS), mask=m_row[:, None] & (o_d < c.DV)[None, :])
        if c.HAS_LSE:
            tl.store(LSE + tokens * sl_t + heads * sl_h, lse, mask=m_row)


@triton.jit
def new_query(x, DTYPE: tl.constexpr, c: tl.constexpr):
    """Query rows as they meet the new keys: in their 16-bit type, which holds every query exactly."""
    return apart(x.to(DTYPE), c.ROWS, c.BLOCK_D, c.K.PARTS)
