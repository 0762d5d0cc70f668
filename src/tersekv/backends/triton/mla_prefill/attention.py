"""Ragged causal attention of new tokens to one chunk of up-projected keys and values (MLA prefill, last stage).

A chunk's rows hold, for every head, [k_nope | v]; the rotary part of a key is one row for all heads. Query i of request
b sees rows j of its own with cache_offsets[b] + j <= cache_lens[b] + i. Programs of heavy (late) query blocks start
first, and heads go in groups whose keys and values fit the L2 cache together.

Several chunks: a program starts from the state that the chunk before left in (out, lse). `out` is 16-bit, so what its
rounding lost is kept in `low`; the sum of both carries enough digits for any number of chunks.
"""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ...host.bind import Described, Template, given, strides
from ...host.launch import next_power_of_2
from .gather import of_chunk
from .tune import AttentionTile

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2))
_L2_BYTES = 24 << 20  # of keys and values that concurrent programs share


@triton.jit
def load_tile(
    SOURCE, row, rows, column, stride, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr
):
    """[BLOCK, PADDED] at (row, column); 0 outside `rows` rows or WIDTH columns."""
    if TMA:
        return SOURCE.load([row, column])
    else:
        o_r = row + tl.arange(0, BLOCK)
        o_c = tl.arange(0, PADDED)
        m = (o_r < rows)[:, None] & (o_c < WIDTH)[None, :]
        return tl.load(SOURCE + o_r.to(tl.int64)[:, None] * stride + column + o_c[None, :], mask=m, other=0.0)


@triton.jit
def attend_tiles(
    q, q_pe, state, o_m, K, V, KPE, first_row, rows, column, low, high, ahead, keys, qk_scale, stride_kv,
    DN: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, DN_PAD: tl.constexpr, R_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to keys low … high of the request (whole tiles). state: (acc, m, l), m in units of log2."""
    acc, m, l = state
    for start in tl.range(low, high, BLOCK_N):
        row = first_row + start
        k = load_tile(K, row, rows, column, stride_kv, DN, DN_PAD, BLOCK_N, TMA)
        k_pe = load_tile(KPE, row, rows, 0, R, R, R_PAD, BLOCK_N, TMA)
        s = tl.dot(q, tl.trans(k))
        s = tl.dot(q_pe, tl.trans(k_pe), s)
        if MASKED:
            o_n = start + tl.arange(0, BLOCK_N)
            s = tl.where((o_n[None, :] <= (o_m + ahead)[:, None]) & (o_n < keys)[None, :], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1) * qk_scale)
        top = m_new
        if MASKED:
            top = tl.where(m_new == float("-inf"), 0.0, m_new)  # a row may have seen nothing yet
        p = tl.exp2(s * qk_scale - top[:, None])
        shrink = tl.exp2(m - top)
        l = l * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        v = load_tile(V, row, rows, column + DN, stride_kv, DV, DV_PAD, BLOCK_N, TMA)
        if MASKED:
            # NOTE: a weight of 0 does not hide NaN. Rows of the next request are cut; a NaN of the request's own later
            # tokens is dropped here, and whoever sees such a token still gets NaN from its key.
            real = v.to(tl.float32) == v.to(tl.float32)
            v = tl.where((o_n < keys)[:, None] & real, v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc)
        m = m_new
    return acc, m, l


@triton.jit
def place_of_program(blocks, H, group):
    """(request, head, query block) of this program: late blocks first, within groups of heads."""
    pid = tl.program_id(0)
    b = pid // (blocks * H)
    rest = pid % (blocks * H)
    first_head = rest // (blocks * group) * group
    width = tl.minimum(H - first_head, group)
    rest = rest % (blocks * group)
    return b, first_head + rest % width, blocks - 1 - rest // width


@triton.jit(do_not_specialize=["rows", "blocks", "group"])
def attention_kernel(
    Q, K, V, KPE, OUT, LOW, LSE, CU, LENS, ROWS, STARTS, rows, blocks, H, group, qk_scale,
    stride_qt, stride_qh, stride_kv, stride_ot, stride_oh, stride_lt, stride_lh,
    DN: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, DN_PAD: tl.constexpr, R_PAD: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
    HAS_PREVIOUS: tl.constexpr, HAS_NEXT: tl.constexpr, HAS_LSE: tl.constexpr,
):  # fmt: skip
    b, head, block = place_of_program(blocks, H, group)
    q0 = tl.load(CU + b).to(tl.int64)
    queries = (tl.load(CU + b + 1).to(tl.int64) - q0).to(tl.int32)
    i0 = block * BLOCK_M
    if i0 >= queries:
        return
    first_row = tl.load(ROWS + b).to(tl.int32)
    keys = tl.minimum(tl.load(ROWS + b + 1).to(tl.int32), rows) - first_row
    ahead = (tl.load(LENS + b).to(tl.int64) - tl.load(STARTS + b).to(tl.int64)).to(tl.int32)
    all_see = tl.maximum(tl.minimum(keys, i0 + ahead + 1), 0)  # keys that every query of the block sees
    some_see = tl.minimum(keys, tl.minimum(i0 + BLOCK_M, queries) + ahead)
    if HAS_PREVIOUS:  # noqa: SIM102 - known to the compiler, unlike the other
        if some_see <= 0:
            return

    o_m = i0 + tl.arange(0, BLOCK_M)
    m_q = o_m < queries
    o_d, o_r, o_v = tl.arange(0, DN_PAD), tl.arange(0, R_PAD), tl.arange(0, DV_PAD)
    o_t = q0 + o_m
    p_q = Q + o_t[:, None] * stride_qt + head.to(tl.int64) * stride_qh
    q = tl.load(p_q + o_d[None, :], mask=m_q[:, None] & (o_d < DN)[None, :], other=0.0)
    q_pe = tl.load(p_q + DN + o_r[None, :], mask=m_q[:, None] & (o_r < R)[None, :], other=0.0)

    m_out = m_q[:, None] & (o_v < DV)[None, :]
    p_out = OUT + o_t[:, None] * stride_ot + head.to(tl.int64) * stride_oh + o_v[None, :]
    p_low = LOW + (o_t * H + head)[:, None] * DV + o_v[None, :]
    p_lse = LSE + o_t * stride_lt + head.to(tl.int64) * stride_lh
    if HAS_PREVIOUS:
        m = tl.load(p_lse, mask=m_q, other=float("-inf")) * LOG2E
        seen = m != float("-inf")
        l = seen.to(tl.float32)
        acc = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
        acc += tl.load(p_low, mask=m_out, other=0.0).to(tl.float32)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)

    column = head * (DN + DV)
    split = all_see // BLOCK_N * BLOCK_N
    acc, m, l = attend_tiles(
        q, q_pe, (acc, m, l), o_m, K, V, KPE, first_row, rows, column, 0, split, ahead, keys, qk_scale, stride_kv,
        DN, R, DV, DN_PAD, R_PAD, DV_PAD, BLOCK_N, TMA, False,
    )  # fmt: skip
    acc, m, l = attend_tiles(
        q, q_pe, (acc, m, l), o_m, K, V, KPE, first_row, rows, column, split, some_see, ahead, keys, qk_scale,
        stride_kv, DN, R, DV, DN_PAD, R_PAD, DV_PAD, BLOCK_N, TMA, True,
    )  # fmt: skip

    nothing = l == 0
    l = tl.where(nothing, 1.0, l)
    acc = acc / l[:, None]
    out = acc.to(OUT.dtype.element_ty)
    tl.store(p_out, out, mask=m_out)
    if HAS_NEXT:
        tl.store(p_low, (acc - out.to(tl.float32)).to(LOW.dtype.element_ty), mask=m_out)
    if HAS_LSE:
        tl.store(p_lse, tl.where(nothing, float("-inf"), (m + tl.log2(l)) * LN2), mask=m_q)


def prepared(
    f: SimpleNamespace, chunk: int, rows: int, has_previous: bool, has_next: bool, tile: AttentionTile
) -> Template:
    """The launch for a chunk of `rows` rows, continuing from (out, LOW, LSE) if `has_previous`.

    KV:    [M, H * (Dn + Dv)] in q's dtype, dense; K_PE: [M, R], dense; M >= rows
    LOW:   [T, H, Dv] in q's dtype, dense, if there are several chunks
    LSE:   [T, H] fp32, where several chunks need one and the call has none
    """
    heads, dim_v, rope = f.q.shape[1], f.out.shape[2], f.kpe.shape[-1]
    nope, several = f.q.shape[2] - rope, has_previous or has_next
    requests, blocks, columns = f.cache_lens.shape[0], -(-f.max_q_len // tile.block_m), f.kv_b_proj.shape[0]
    pads = [max(16, next_power_of_2(d)) for d in (nope, rope, dim_v)]
    group = max(1, min(heads, _L2_BYTES * requests // (rows * f.q.dtype.itemsize * (nope + dim_v))))
    lse, lse_strides = lse_of(f, several)
    arguments: dict[str, Any] = given(
        Q="q", K="KV", V="KV", KPE="K_PE", OUT="out", LOW="LOW" if several else "out", LSE=lse, CU="cu_seqlens_q",
        LENS="cache_lens",
    )  # fmt: skip
    if tile.tma:
        arguments |= {
            name: Described(of, partial(_described, rows=rows, columns=n, block=[tile.block_n, d]))
            for name, of, n, d in (("K", "KV", columns, nope), ("V", "KV", columns, dim_v), ("KPE", "K_PE", rope, rope))
        }
    arguments |= of_chunk(chunk) | strides(f.q, stride_q="th") | strides(f.out, stride_o="th") | {
        "rows": rows, "blocks": blocks, "H": heads, "group": group, "qk_scale": f.softmax_scale * math.log2(math.e),
        "stride_kv": columns, "stride_lt": lse_strides[0], "stride_lh": lse_strides[1],
        "DN": nope, "R": rope, "DV": dim_v, "DN_PAD": pads[0], "R_PAD": pads[1], "DV_PAD": pads[2],
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "TMA": tile.tma,
        "HAS_PREVIOUS": has_previous, "HAS_NEXT": has_next, "HAS_LSE": lse != "out",
    }  # fmt: skip
    grid = (requests * blocks * heads,)
    return Template(attention_kernel, grid, arguments, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _described(x: Tensor, rows: int, columns: int, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, [rows, columns], [columns, 1], block)


def lse_of(f: SimpleNamespace, several: bool) -> tuple[str, tuple[int, int]]:
    """(the tensor that holds LSEs, its strides); `out`, which is not looked at, where nobody wants them."""
    if f.lse is not None:
        return "lse", f.lse.stride
    return ("LSE", (f.q.shape[1], 1)) if several else ("out", (0, 0))


def places(f: SimpleNamespace, several: bool) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """What of the scratch several chunks need."""
    return {
        "LOW": (f.out.shape, f.out.dtype) if several else None,
        "LSE": (f.out.shape[:2], torch.float32) if several and f.lse is None else None,
    }
