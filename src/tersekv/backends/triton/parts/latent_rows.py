"""Rows of a latent cache: finds their request and slot, norms, rotates and stores them; rotates queries.

Codes and rotated values have the oracle's bits: RoPE is computed in the dtype of freqs_cis with every operation rounded
on its own (kernels are compiled without fused multiply-adds), divisions and the root are correctly rounded. The norm's
sum of squares is the one place where the order of additions, and with it the last bit of a row, may differ.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from tersekv import formats
from tersekv.formats import LATENT_GROUP, latent_format

from ...host.bind import BYTES, stride_args, tensor_args
from ...host.launch import next_power_of_2
from ...host.row_programs import stored_format
from .quant import TENSOR, cast_to_float_dtype_or_fp8_bytes, quantize_and_store, reciprocal_rn

MAX_HEADS_PER_PROGRAM = 64  # that one program rotates
REQUESTS_PER_STEP = 128  # scanned at once
MOST_POSITIONS = 2**31 - 1  # where no table of angles bounds them


@triton.jit
def find_request_of_row_else_B(CU_ROWS, i_row, B):
    """Returns the request b in [0, B) with CU_ROWS[b] <= i_row < CU_ROWS[b + 1]; B if i_row is past all."""
    low = B * 0
    high = B
    while low < high:
        middle = (low + high) // 2
        if tl.load(CU_ROWS + middle + 1).to(tl.int64) <= i_row:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def lookup_page_slot_and_validity(
    PAGE_TABLE, i_request, position, valid, max_pages, num_pages, PAGE: tl.constexpr, stride_table
):
    """Returns (page, slot, whether they exist) of a position of a request; reads nothing outside table and cache."""
    valid = valid & (position >= 0) & (position < max_pages.to(tl.int64) * PAGE)
    position = tl.where(valid, position, 0).to(tl.uint32)
    page = tl.load(PAGE_TABLE + i_request.to(tl.int64) * stride_table + position // PAGE, mask=valid, other=0).to(
        tl.int64
    )
    valid = valid & (page >= 0) & (page < num_pages)
    return tl.where(valid, page, 0), (position % PAGE).to(tl.int64), valid


@triton.jit
def multiply_rounded(a, b):
    """Returns a * b of one dtype, rounded to it; fp32 holds the product of two 16-bit values exactly."""
    return (a.to(tl.float32) * b.to(tl.float32)).to(a.dtype)


@triton.jit
def apply_rope_interleaved(x, cos, sin, ROWS: tl.constexpr, R_PAD: tl.constexpr):
    """Returns x [ROWS, R_PAD], interleaved pairs rotated by cos, sin [R_PAD / 2], in their dtype."""
    even, odd = tl.split(tl.reshape(x.to(cos.dtype), [ROWS, R_PAD // 2, 2]))
    cos, sin = cos[None, :], sin[None, :]
    a, b = multiply_rounded(even, cos).to(tl.float32), multiply_rounded(odd, sin).to(tl.float32)
    c, d = multiply_rounded(even, sin).to(tl.float32), multiply_rounded(odd, cos).to(tl.float32)
    y = tl.join((a - b).to(cos.dtype), (c + d).to(cos.dtype))
    return tl.reshape(y, [ROWS, R_PAD])


@triton.jit
def load_kv_c_and_k_pe_in_own_dtype(
    KV_C, K_PE, m_row, L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr
):
    """Loads a new row: [1, L_PAD], [1, R_PAD]."""
    o_l, o_r = tl.arange(0, L_PAD)[None, :], tl.arange(0, R_PAD)[None, :]
    x = tl.load(KV_C + o_l, mask=(o_l < L) & m_row, other=0.0)
    return x, tl.load(K_PE + o_r, mask=(o_r < R) & m_row, other=0.0)


@triton.jit
def rms_norm_rope_and_store_latent_row(
    latent, k_pe, CKV, KPE, SCALES, NORM_GAMMA, KV_SCALE, kv_scale, epsilon, cos, sin,
    L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr,
    FORMAT: tl.constexpr, K_PE_KIND: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
):  # fmt: skip
    """Norms and rotates one new row (x, k_pe), and stores it at (CKV, KPE, SCALES) in the cache's format."""
    o_l, o_r = tl.arange(0, L_PAD)[None, :], tl.arange(0, R_PAD)[None, :]
    latent = latent.to(tl.float32)
    mean_square = tl.div_rn(tl.sum(latent * latent, 1), tl.full([1], L, tl.float32))
    inv_rms = tl.div_rn(tl.full([1], 1.0, tl.float32), tl.sqrt_rn(mean_square + epsilon))
    gamma = tl.load(NORM_GAMMA + o_l, mask=o_l < L, other=0.0)
    normed = multiply_rounded((latent * inv_rms[:, None]).to(gamma.dtype), gamma).to(tl.float32)
    quant_scale = 1.0
    if FORMAT.SCALE == TENSOR:
        if KV_SCALE is not None:
            kv_scale = tl.load(KV_SCALE)
        quant_scale = reciprocal_rn(kv_scale)
    quantize_and_store(normed, CKV, SCALES, 0, 0, True, quant_scale, 1.0, L, FORMAT, NATIVE_FP8_CAST)
    k_pe = apply_rope_interleaved(k_pe, cos, sin, 1, R_PAD).to(tl.float32)
    if K_PE_KIND != "float":
        k_pe = k_pe * quant_scale
    tl.store(
        KPE + o_r,
        cast_to_float_dtype_or_fp8_bytes(k_pe, KPE.dtype.element_ty, K_PE_KIND, NATIVE_FP8_CAST),
        mask=o_r < R,
    )


@triton.jit
def store_seq_lens(SEQ_LENS_OUT, CACHE_LENS, CU_SEQLENS_Q, B, TOKENS_PER_REQUEST: tl.constexpr, BLOCK_B: tl.constexpr):
    """Stores the cached tokens of each request, the new ones included."""
    for i in range(0, B, BLOCK_B):
        o_b = i + tl.arange(0, BLOCK_B)
        m = o_b < B
        seq_len = tl.load(CACHE_LENS + o_b, mask=m, other=0).to(tl.int64)
        if CU_SEQLENS_Q is None:
            seq_len += TOKENS_PER_REQUEST
        else:
            q_begin = tl.load(CU_SEQLENS_Q + o_b, mask=m, other=0).to(tl.int64)
            seq_len += tl.load(CU_SEQLENS_Q + o_b + 1, mask=m, other=0).to(tl.int64) - q_begin
        tl.store(SEQ_LENS_OUT + o_b, seq_len.to(tl.int32), mask=m)


@triton.jit
def find_request_position_and_validity(
    CU_SEQLENS_Q, CACHE_LENS, t, B, TOKENS_PER_REQUEST: tl.constexpr, BLOCK_B: tl.constexpr
):
    """Returns (the request of row t, 0 if none; its position there; whether there is one).

    All offsets and lengths are loaded at once, and the right ones selected: a search would wait for one load after the
    other. BLOCK_B 0: a search all the same, which takes fewer registers; with thousands of rows that counts for more.
    """
    if CU_SEQLENS_Q is None:
        i_request = t // TOKENS_PER_REQUEST
        valid = i_request < B
        return (
            i_request,
            tl.load(CACHE_LENS + i_request, mask=valid, other=0).to(tl.int64) + t - i_request * TOKENS_PER_REQUEST,
            valid,
        )
    elif BLOCK_B == 0:
        i_request = find_request_of_row_else_B(CU_SEQLENS_Q, t, B)
        valid = (i_request < B) & (t >= tl.load(CU_SEQLENS_Q).to(tl.int64))
        i_request = tl.where(valid, i_request, 0)
        return (
            i_request,
            tl.load(CACHE_LENS + i_request).to(tl.int64) + t - tl.load(CU_SEQLENS_Q + i_request).to(tl.int64),
            valid,
        )
    else:
        i_request, position, valid = t * 0, t * 0, t * 0
        for i in range(0, B, BLOCK_B):
            o_b = i + tl.arange(0, BLOCK_B)
            m = o_b < B
            q_begin = tl.load(CU_SEQLENS_Q + o_b, mask=m, other=0).to(tl.int64)
            q_end = tl.load(CU_SEQLENS_Q + o_b + 1, mask=m, other=0).to(tl.int64)
            cached = tl.load(CACHE_LENS + o_b, mask=m, other=0).to(tl.int64)
            owns_token = (q_begin <= t) & (t < q_end)
            i_request += tl.sum(tl.where(owns_token, o_b.to(tl.int64), 0))
            position += tl.sum(tl.where(owns_token, cached + t - q_begin, 0))
            valid += tl.sum(owns_token.to(tl.int64))
        return i_request, position, valid > 0


@triton.jit
def store_latent_or_roped_heads_return_valid(
    t, i_head_block, H, q_args, q_pe_out_args, new_row_args, cache_args, norm_args, request_args,
    TOKENS_PER_REQUEST: tl.constexpr, PAGE: tl.constexpr, DN: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    L_PAD: tl.constexpr,
    R_PAD: tl.constexpr, BLOCK_H: tl.constexpr, FORMAT: tl.constexpr, K_PE_KIND: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Stores the latent row of token t (i_head_block −1), or rotates a block of its heads. Returns whether t has a
    request.

    q_args, q_pe_out_args: (Q, Q_PE or None, strides of rows and heads); new_row_args: (KV_C or None, K_PE, their
    strides)
    cache_args:    (CKV, KPE, SCALES or None, each one's strides of pages and slots)
    norm_args:     (NORM_GAMMA, epsilon, KV_SCALE or None, kv_scale)
    request_args:    (PAGE_TABLE, CACHE_LENS, CU_SEQLENS_Q, FREQS_CIS, B, max_pages, num_pages, max_pos, strides of
    PAGE_TABLE and FREQS_CIS)
    TOKENS_PER_REQUEST:     new tokens of each request where CU_SEQLENS_Q is None
    """
    Q, stride_qt, stride_qh = q_args
    Q_PE, stride_rt, stride_rh = q_pe_out_args
    KV_C, K_PE, stride_c, stride_pe = new_row_args
    CKV, KPE, SCALES, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss = cache_args
    NORM_GAMMA, epsilon, KV_SCALE, kv_scale = norm_args
    (
        PAGE_TABLE, CACHE_LENS, CU_SEQLENS_Q, FREQS_CIS, B, max_pages, num_pages, max_pos, stride_table,
        stride_freqs_cis,
    ) = request_args  # fmt: skip
    o_h, o_f = i_head_block * BLOCK_H + tl.arange(0, BLOCK_H), tl.arange(0, R_PAD)
    # Rows are loaded while their request is searched.
    p_q = Q + t * stride_qt + o_h.to(tl.int64)[:, None] * stride_qh + DN + o_f[None, :]
    m_q = ((i_head_block >= 0) & (o_h < H))[:, None] & (o_f < R)[None, :]
    q_pe = tl.load(p_q, mask=m_q, other=0.0)
    if KV_C is not None:
        new_latent, new_k_pe = load_kv_c_and_k_pe_in_own_dtype(
            KV_C + t * stride_c, K_PE + t * stride_pe, i_head_block < 0, L, R, L_PAD, R_PAD
        )
    b, position, valid = find_request_position_and_validity(CU_SEQLENS_Q, CACHE_LENS, t, B, TOKENS_PER_REQUEST, BLOCK_B)
    if valid:
        in_range = (position >= 0) & (position < max_pos)
        freqs = tl.load(
            FREQS_CIS + tl.where(in_range, position, 0) * stride_freqs_cis + o_f, mask=in_range & (o_f < R), other=0.0
        )
        cos, sin = tl.split(tl.reshape(freqs, [R_PAD // 2, 2]))
        if i_head_block >= 0:
            p_q_out = p_q
            if Q_PE is not None:
                p_q_out = Q_PE + t * stride_rt + o_h.to(tl.int64)[:, None] * stride_rh + o_f[None, :]
            tl.store(p_q_out, apply_rope_interleaved(q_pe, cos, sin, BLOCK_H, R_PAD).to(Q.dtype.element_ty), mask=m_q)
        else:
            page, page_slot, has_slot = lookup_page_slot_and_validity(
                PAGE_TABLE, b, position, in_range, max_pages, num_pages, PAGE, stride_table
            )
            if has_slot:
                p_c = CKV + page * stride_cp + page_slot * stride_cs
                p_k = KPE + page * stride_kp + page_slot * stride_ks
                p_s = SCALES
                if SCALES is not None:
                    p_s = SCALES + page * stride_sp + page_slot * stride_ss
                if KV_C is None:
                    new_latent, new_k_pe = load_kv_c_and_k_pe_in_own_dtype(p_c, p_k, True, L, R, L_PAD, R_PAD)
                rms_norm_rope_and_store_latent_row(
                    new_latent, new_k_pe, p_c, p_k, p_s, NORM_GAMMA, KV_SCALE, kv_scale, epsilon, cos, sin,
                    L, R, L_PAD, R_PAD, FORMAT, K_PE_KIND, NATIVE_FP8_CAST,
                )  # fmt: skip
    return valid


def k_pe_storage_kind(format: str) -> str:
    """Returns how the rotary part of a row is stored: an 8-bit code, or "float", the cache's dtype."""
    fmt = latent_format(format)
    return fmt.code if fmt.scale == formats.TENSOR else "float"


def latent_cache_and_page_table_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns arguments of every kernel that reads or writes latent rows."""
    rank, rope = f.ckv.shape[-1], f.kpe.shape[-1]
    tensors = tensor_args(
        BYTES, CKV="ckv", KPE="kpe", SCALES="ckv_scale_cache", PAGE_TABLE="page_table", KV_SCALE="kv_scale_t"
    )
    cache_strides = (
        stride_args(f.ckv, stride_c="ps")
        | stride_args(f.kpe, stride_k="ps")
        | stride_args(f.ckv_scale_cache, stride_s="ps")
    )
    return tensors | cache_strides | {
        "kv_scale": f.kv_scale, "B": f.cache_lens.shape[0], "max_pages": f.page_table.shape[1],
        "num_pages": f.ckv.shape[0],
        "stride_table": f.page_table.stride[0], "PAGE": f.ckv.shape[1], "L": rank, "R": rope,
        "L_PAD": max(LATENT_GROUP, next_power_of_2(rank)), "R_PAD": max(2, next_power_of_2(rope)),
    }  # fmt: skip


def rope_query_and_cache_lens_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns arguments of every kernel that rotates queries."""
    tensors = tensor_args(BYTES, Q="q", CACHE_LENS="cache_lens", CU_SEQLENS_Q="cu_seqlens_q", FREQS_CIS="freqs_cis")
    max_pos, stride = MOST_POSITIONS, 0
    if f.freqs_cis is None:  # R is 0: no column is read of what stands in for it
        tensors |= tensor_args(BYTES, FREQS_CIS="kv_norm_gamma")
    else:
        max_pos, stride = f.freqs_cis.shape[0], f.freqs_cis.stride[0]
    return tensors | stride_args(f.q, stride_q="th") | {
        "H": f.q.shape[1], "max_pos": max_pos, "stride_freqs_cis": stride,
        "DN": f.q.shape[2] - f.kpe.shape[-1],
    }  # fmt: skip


def latent_append_and_rope_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns arguments of every kernel that stores new rows and rotates queries."""
    k_pe = "kv_c" if f.k_pe is None else "k_pe"  # R is 0: no column is read of it
    strides = [0 if x is None else x.stride[0] for x in (f.kv_c, getattr(f, k_pe))]
    new_rows = tensor_args(BYTES, KV_C="kv_c", K_PE=k_pe, NORM_GAMMA="kv_norm_gamma")
    return latent_cache_and_page_table_args(f) | rope_query_and_cache_lens_args(f) | new_rows | {
        "epsilon": f.epsilon, "stride_c": strides[0], "stride_pe": strides[1], "FORMAT": stored_format(f.format),
        "K_PE_KIND": k_pe_storage_kind(f.format),
    }  # fmt: skip
