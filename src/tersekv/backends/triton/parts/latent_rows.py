"""Rows of a latent cache: whose they are, where they lie; normed, rotated and stored, beside queries that are rotated.

Codes and rotated values have the oracle's bits: RoPE is computed in the dtype of freqs_cis with every operation rounded
on its own (kernels are compiled without fused multiply-adds), divisions and the root are correctly rounded. The sum of
squares of the norm is the one place where the order of additions, and with it the last bit of a row, may differ.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from tersekv import formats
from tersekv.formats import LATENT_GROUP, latent_format

from ...host.bind import BYTES, given, strides
from ...host.blocks import stored
from ...host.launch import next_power_of_2
from .quant import TENSOR, cast, reciprocal, store

MOST_HEADS = 64  # that one program rotates
REQUESTS = 128  # that are looked at at once


@triton.jit
def request_of(STARTS, row, B):
    """The request b in [0, B) with STARTS[b] <= row < STARTS[b + 1]; B where there is none after row."""
    low = B * 0
    high = B
    while low < high:
        middle = (low + high) // 2
        if tl.load(STARTS + middle + 1).to(tl.int64) <= row:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def slot_of(TABLE, b, position, live, max_pages, P, S: tl.constexpr, stride_table):
    """(page, entry, is there one) of a position of request b. Nothing outside the table or the cache is touched."""
    live = live & (position >= 0) & (position < max_pages.to(tl.int64) * S)
    position = tl.where(live, position, 0).to(tl.uint32)
    page = tl.load(TABLE + b.to(tl.int64) * stride_table + position // S, mask=live, other=0).to(tl.int64)
    live = live & (page >= 0) & (page < P)
    return tl.where(live, page, 0), (position % S).to(tl.int64), live


@triton.jit
def rounded_product(a, b):
    """a * b of one dtype, rounded to it; fp32 holds the product of two 16-bit values exactly."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def rotate(x, cos, sin, ROWS: tl.constexpr, R_PAD: tl.constexpr):
    """RoPE of interleaved pairs of x [ROWS, R_PAD] by cos, sin [R_PAD / 2], in their dtype."""
    even, odd = tl.split(tl.reshape(x.to(cos.dtype), [ROWS, R_PAD // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    a, b = rounded_product(even, cos).to(tl.float32), rounded_product(odd, sin).to(tl.float32)
    c, d = rounded_product(even, sin).to(tl.float32), rounded_product(odd, cos).to(tl.float32)
    y = tl.join((a - b).to(cos.dtype), (c + d).to(cos.dtype))
    return tl.reshape(y, [ROWS, R_PAD])


@triton.jit
def load_row(KV_C, K_PE, wanted, L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr):
    """A raw row: [1, L_PAD], [1, R_PAD]."""
    o_l, o_r = tl.arange(0, L_PAD)[None, :], tl.arange(0, R_PAD)[None, :]
    x = tl.load(KV_C + o_l, mask=(o_l < L) & wanted, other=0.0)
    return x, tl.load(K_PE + o_r, mask=(o_r < R) & wanted, other=0.0)


@triton.jit
def prepare_row(
    x, k_pe, CKV, KPE, SCALES, GAMMA, KV_SCALE, kv_scale, epsilon, cos, sin,
    L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr,
    FORMAT: tl.constexpr, ROPE_KIND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Norm and rotate one raw row (x, k_pe), write it at (CKV, KPE, SCALES) in the cache's format."""
    o_l, o_r = tl.arange(0, L_PAD)[None, :], tl.arange(0, R_PAD)[None, :]
    x = x.to(tl.float32)
    mean = tl.div_rn(tl.sum(x * x, 1), tl.full([1], L, tl.float32))
    norm = tl.div_rn(tl.full([1], 1.0, tl.float32), tl.sqrt_rn(mean + epsilon))
    gamma = tl.load(GAMMA + o_l, mask=o_l < L, other=0.0)
    y = rounded_product((x * norm[:, None]).to(gamma.dtype), gamma).to(tl.float32)
    multiplier = 1.0
    if FORMAT.SCALE == TENSOR:
        if KV_SCALE is not None:
            kv_scale = tl.load(KV_SCALE)
        multiplier = reciprocal(kv_scale)
    store(y, CKV, SCALES, 0, 0, True, multiplier, 1.0, L, FORMAT, NATIVE)
    k_pe = rotate(k_pe, cos, sin, 1, R_PAD).to(tl.float32)
    if ROPE_KIND != "float":
        k_pe = k_pe * multiplier
    tl.store(KPE + o_r, cast(k_pe, KPE.dtype.element_ty, ROPE_KIND, NATIVE), mask=o_r < R)


@triton.jit
def new_tokens(CU, b, m, EACH: tl.constexpr):
    """New tokens of request(s) b."""
    if CU is None:
        return b.to(tl.int64) * 0 + EACH
    else:
        return tl.load(CU + b + 1, mask=m, other=0).to(tl.int64) - tl.load(CU + b, mask=m, other=0).to(tl.int64)


@triton.jit
def write_lengths(SEQ_LENS, LENS, CU, B, EACH: tl.constexpr, BLOCK_B: tl.constexpr):
    """Tokens of each request in the cache, the new ones included."""
    for i in range(0, B, BLOCK_B):
        o_b = i + tl.arange(0, BLOCK_B)
        m = o_b < B
        new = new_tokens(CU, o_b, m, EACH)
        tl.store(SEQ_LENS + o_b, (tl.load(LENS + o_b, mask=m, other=0).to(tl.int64) + new).to(tl.int32), mask=m)


@triton.jit
def request_at(CU, LENS, t, B, EACH: tl.constexpr, BLOCK_B: tl.constexpr):
    """(the request of row t, 0 if it is of none; its position in it; whether it is of one)

    Offsets and lengths are asked for at once, and the right ones picked: a search would wait for one after the other.
    BLOCK_B 0: a search all the same, which takes fewer registers; with thousands of rows that counts for more.
    """
    if CU is None:
        b = t // EACH
        live = b < B
        return b, tl.load(LENS + b, mask=live, other=0).to(tl.int64) + t - b * EACH, live
    elif BLOCK_B == 0:
        b = request_of(CU, t, B)
        live = (b < B) & (t >= tl.load(CU).to(tl.int64))
        b = tl.where(live, b, 0)
        return b, tl.load(LENS + b).to(tl.int64) + t - tl.load(CU + b).to(tl.int64), live
    else:
        b, position, live = t * 0, t * 0, t * 0
        for i in range(0, B, BLOCK_B):
            o_b = i + tl.arange(0, BLOCK_B)
            m = o_b < B
            first = tl.load(CU + o_b, mask=m, other=0).to(tl.int64)
            end = tl.load(CU + o_b + 1, mask=m, other=0).to(tl.int64)
            cached = tl.load(LENS + o_b, mask=m, other=0).to(tl.int64)
            here = (first <= t) & (t < end)
            b += tl.sum(tl.where(here, o_b.to(tl.int64), 0))
            position += tl.sum(tl.where(here, cached + t - first, 0))
            live += tl.sum(here.to(tl.int64))
        return b, position, live > 0


@triton.jit
def prepare_part(
    t, part, H, q_of, to, raw_of, cache, norm, place,
    EACH: tl.constexpr, S: tl.constexpr, DN: tl.constexpr, R: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr,
    R_PAD: tl.constexpr, BLOCK_H: tl.constexpr, FORMAT: tl.constexpr, ROPE_KIND: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Store the latent row of token t (part -1), or rotate the part-th block of its heads. Whether t is of a request.

    q_of, to: (Q, Q_PE or None, strides of rows and heads); raw_of: (KV_C or None, K_PE, their strides)
    cache:    (CKV, KPE, SCALES or None, each one's strides of pages and slots)
    norm:     (GAMMA, epsilon, KV_SCALE or None, kv_scale)
    place:    (TABLE, LENS, CU, FREQS, B, max_pages, P, max_pos, strides of TABLE and FREQS)
    EACH:     new tokens of each request where CU is None
    """
    Q, stride_qt, stride_qh = q_of
    Q_PE, stride_rt, stride_rh = to
    KV_C, K_PE, stride_c, stride_pe = raw_of
    CKV, KPE, SCALES, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss = cache
    GAMMA, epsilon, KV_SCALE, kv_scale = norm
    TABLE, LENS, CU, FREQS, B, max_pages, P, max_pos, stride_table, stride_freqs = place
    o_h, o_f = part * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, R_PAD)
    # Rows are under way while it is found out whose they are.
    p_q = Q + t * stride_qt + o_h.to(tl.int64)[:, None] * stride_qh + DN + o_f[None, :]
    m_q = ((part >= 0) & (o_h < H))[:, None] & (o_f < R)[None, :]
    x = tl.load(p_q, mask=m_q, other=0.0)
    if KV_C is not None:
        raw, raw_pe = load_row(KV_C + t * stride_c, K_PE + t * stride_pe, part < 0, L, R, L_PAD, R_PAD)
    b, position, live = request_at(CU, LENS, t, B, EACH, BLOCK_B)
    if live:
        known = (position >= 0) & (position < max_pos)
        freqs = tl.load(FREQS + tl.where(known, position, 0) * stride_freqs + o_f, mask=known & (o_f < R), other=0.0)
        cos, sin = tl.split(tl.reshape(freqs, [R_PAD // 2, 2]))
        if part >= 0:
            p_to = p_q
            if Q_PE is not None:
                p_to = Q_PE + t * stride_rt + o_h.to(tl.int64)[:, None] * stride_rh + o_f[None, :]
            tl.store(p_to, rotate(x, cos, sin, BLOCK_H, R_PAD).to(Q.dtype.element_ty), mask=m_q)
        else:
            page, entry, placed = slot_of(TABLE, b, position, known, max_pages, P, S, stride_table)
            if placed:
                p_c = CKV + page * stride_cp + entry * stride_cs
                p_k = KPE + page * stride_kp + entry * stride_ks
                p_s = SCALES
                if SCALES is not None:
                    p_s = SCALES + page * stride_sp + entry * stride_ss
                if KV_C is None:
                    raw, raw_pe = load_row(p_c, p_k, True, L, R, L_PAD, R_PAD)
                prepare_row(
                    raw, raw_pe, p_c, p_k, p_s, GAMMA, KV_SCALE, kv_scale, epsilon, cos, sin,
                    L, R, L_PAD, R_PAD, FORMAT, ROPE_KIND, NATIVE,
                )  # fmt: skip
    return live


def rotary_kind(format: str) -> str:
    """What the rotary part of a row is: 8-bit codes, or "float", of the cache's dtype."""
    fmt = latent_format(format)
    return fmt.code if fmt.scale == formats.TENSOR else "float"


def of_cache(f: SimpleNamespace) -> dict[str, Any]:
    """Arguments of every kernel that reads or writes latent rows."""
    rank, rope = f.ckv.shape[-1], f.kpe.shape[-1]
    tensors = given(BYTES, CKV="ckv", KPE="kpe", SCALES="ckv_scale_cache", TABLE="page_table", KV_SCALE="kv_scale_t")
    steps = strides(f.ckv, stride_c="ps") | strides(f.kpe, stride_k="ps") | strides(f.ckv_scale_cache, stride_s="ps")
    return tensors | steps | {
        "kv_scale": f.kv_scale, "B": f.cache_lens.shape[0], "max_pages": f.page_table.shape[1], "P": f.ckv.shape[0],
        "stride_table": f.page_table.stride[0], "S": f.ckv.shape[1], "L": rank, "R": rope,
        "L_PAD": max(LATENT_GROUP, next_power_of_2(rank)), "R_PAD": max(2, next_power_of_2(rope)),
    }  # fmt: skip


def of_queries(f: SimpleNamespace) -> dict[str, Any]:
    """Arguments of every kernel that rotates queries."""
    tensors = given(BYTES, Q="q", LENS="cache_lens", CU="cu_seqlens_q", FREQS="freqs_cis")
    return tensors | strides(f.q, stride_q="th") | {
        "H": f.q.shape[1], "max_pos": f.freqs_cis.shape[0], "stride_freqs": f.freqs_cis.stride[0],
        "DN": f.q.shape[2] - f.kpe.shape[-1],
    }  # fmt: skip


def of_rows(f: SimpleNamespace) -> dict[str, Any]:
    """Arguments of every kernel that stores new rows and rotates queries."""
    raw = (f.kv_c.stride[0], f.k_pe.stride[0]) if f.kv_c is not None else (0, 0)
    return of_cache(f) | of_queries(f) | given(BYTES, KV_C="kv_c", K_PE="k_pe", GAMMA="kv_norm_gamma") | {
        "epsilon": f.epsilon, "stride_c": raw[0], "stride_pe": raw[1], "FORMAT": stored(f.format),
        "ROPE_KIND": rotary_kind(f.format),
    }  # fmt: skip
