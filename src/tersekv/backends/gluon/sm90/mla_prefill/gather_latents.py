"""Gathers and quantizes a chunk's latent rows for MLA prefill on Hopper, bit for bit as Triton's
`gather_and_requantize_latents_kernel`.

Its CTAs also prepare the next launches: they rotate queries, clear outputs of rows of no request and the counter, and
flag rows that may hold a NaN. New rows are stored by an earlier launch: what one request appends, another one of the
same call may read as cached.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl

from ....host.bind import BYTES, KernelLaunch, tensor_args
from ....host.launch import next_power_of_2
from ....triton.mla_prefill.gather_latents import (
    GROUP,
    chunk_offset_args,
    fp8_to_fp32,
    load_dequantized_latent_row,
    quantize_row_to_e4m3_and_group_scales,
)
from ....triton.mla_prefill.rope_norm_store import out_lse_and_dim_v_args, store_empty_output
from ....triton.parts.latent_rows import (
    apply_rope_interleaved,
    find_request_of_row_else_B,
    k_pe_storage_kind,
    latent_cache_and_page_table_args,
    lookup_page_slot_and_validity,
    rope_query_and_cache_lens_args,
)
from ....triton.parts.token_rows import pdl_early_launch_and_wait

_MAX_BLOCK_H = 64  # heads that are cleared at a time


# Queries: rotate them, clear outputs of no request.


@triton.jit
def apply_rope_to_heads_in_place(
    Q, FREQS_CIS, CACHE_LENS, CU_SEQLENS_Q, t, B, H, max_pos, stride_qt, stride_qh, stride_freqs_cis,
    DN: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotates the rotary parts of all heads of token t, which belongs to a request, in place."""
    i_request = find_request_of_row_else_B(CU_SEQLENS_Q, t, B)
    position = tl.load(CACHE_LENS + i_request).to(tl.int64) + t - tl.load(CU_SEQLENS_Q + i_request).to(tl.int64)
    in_range = (position >= 0) & (position < max_pos)
    o_f = tl.arange(0, R_PAD)
    freqs = tl.load(
        FREQS_CIS + tl.where(in_range, position, 0) * stride_freqs_cis + o_f, mask=in_range & (o_f < R), other=0.0
    )
    cos, sin = tl.split(tl.reshape(freqs, [R_PAD // 2, 2]))
    first_head = H * 0
    while first_head < H:
        o_h = first_head + tl.arange(0, BLOCK_H)
        p_q = Q + t * stride_qt + o_h.to(tl.int64)[:, None] * stride_qh + DN + o_f[None, :]
        m_q = (o_h < H)[:, None] & (o_f < R)[None, :]
        latent = tl.load(p_q, mask=m_q, other=0.0)
        tl.store(p_q, apply_rope_interleaved(latent, cos, sin, BLOCK_H, R_PAD).to(Q.dtype.element_ty), mask=m_q)
        first_head += BLOCK_H


@triton.jit
def rope_queries_or_clear_padding_outputs(
    Q, OUT, LSE, FREQS_CIS, CACHE_LENS, CU_SEQLENS_Q, grid_stride_first_token, num_tokens, B, H, max_pos, stride_qt,
    stride_qh, stride_ot, stride_oh, stride_lt, stride_lh, stride_freqs_cis,
    DN: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Of tokens grid_stride_first_token, + num_programs, …: rotates those of a request, clears the others' outputs."""
    q_begin, q_end = tl.load(CU_SEQLENS_Q).to(tl.int64), tl.load(CU_SEQLENS_Q + B).to(tl.int64)
    t = grid_stride_first_token
    while t < num_tokens:
        if (t < q_begin) | (t >= q_end):
            first_head = H * 0
            while first_head < H:
                o_h = first_head + tl.arange(0, BLOCK_H)
                store_empty_output(OUT, LSE, t, o_h, H, stride_ot, stride_oh, stride_lt, stride_lh, DV, DV_PAD, BLOCK_H)
                first_head += BLOCK_H
        else:
            apply_rope_to_heads_in_place(
                Q, FREQS_CIS, CACHE_LENS, CU_SEQLENS_Q, t, B, H, max_pos, stride_qt, stride_qh, stride_freqs_cis, DN, R,
                R_PAD, BLOCK_H,
            )  # fmt: skip
        t += tl.num_programs(0)


# The kernel.


@triton.jit(do_not_specialize=["B", "max_pages", "num_tokens", "max_pos"])
def gather_and_requantize_latents_kernel(
    Q, CKV, KPE, SCALES, FREQS_CIS, PAGE_TABLE, CACHE_LENS, CU_SEQLENS_Q, CHUNK_ROW_OFFSETS, CACHE_OFFSETS, KV_SCALE,
    OUT, LSE, CODES_OR_LATENTS_OUT, SCALES_OUT, K_PE_OUT, WORK_COUNTER_OUT, MAY_HAVE_NAN_OUT, kv_scale, num_tokens, B,
    H, max_pages, num_pages, max_pos, stride_qt, stride_qh, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp,
    stride_ss, stride_ot, stride_oh, stride_lt, stride_lh, stride_table, stride_freqs_cis, stride_scales_out,
    PAGE: tl.constexpr, DN: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr,
    R_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, STORAGE_KIND: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr,
    ROPE_Q_AND_CLEAR_PADDING: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Gathers one row of the chunk, clears WORK_COUNTER_OUT's 4 numbers, and stores MAY_HAVE_NAN_OUT [rows]."""
    pdl_early_launch_and_wait(USE_PDL)
    i_row = tl.program_id(0).to(tl.int64)
    tl.store(WORK_COUNTER_OUT + tl.arange(0, 4), tl.zeros([4], tl.int32), mask=i_row == 0)
    if ROPE_Q_AND_CLEAR_PADDING:
        rope_queries_or_clear_padding_outputs(
            Q, OUT, LSE, FREQS_CIS, CACHE_LENS, CU_SEQLENS_Q, i_row, num_tokens, B, H, max_pos, stride_qt, stride_qh,
            stride_ot, stride_oh,
            stride_lt, stride_lh, stride_freqs_cis, DN, R, R_PAD, DV, DV_PAD, BLOCK_H,
        )  # fmt: skip
    # Page lookup: the row's request, position and slot
    b = find_request_of_row_else_B(CHUNK_ROW_OFFSETS, i_row, B)
    first_row = tl.load(CHUNK_ROW_OFFSETS + tl.minimum(b, B)).to(tl.int64)
    valid = (b < B) & (i_row >= first_row)
    i_request = tl.where(valid, b, 0)
    position = tl.load(CACHE_OFFSETS + i_request, mask=valid, other=0).to(tl.int64) + i_row - first_row
    page, page_slot, valid = lookup_page_slot_and_validity(
        PAGE_TABLE, i_request, position, valid, max_pages, num_pages, PAGE, stride_table
    )
    p_c = CKV + page * stride_cp + page_slot * stride_cs
    p_k = KPE + page * stride_kp + page_slot * stride_ks
    p_s = SCALES
    if SCALES is not None:
        p_s = SCALES + page * stride_sp + page_slot * stride_ss
    if KV_SCALE is not None:
        kv_scale = tl.load(KV_SCALE)

    # Dequant, and whether V may be NaN
    o_l, o_r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    latent = load_dequantized_latent_row(p_c, p_s, kv_scale, valid, L, L_PAD, STORAGE_KIND, NATIVE_FP8_CAST)
    # Codes and scales are finite or NaN, and bf16 holds every sum of them; other GEMMs may overflow.
    if SCALES_OUT is None or K_PE_OUT.dtype.element_ty == tl.float16:
        tl.store(MAY_HAVE_NAN_OUT + i_row, 1)
    else:
        tl.store(MAY_HAVE_NAN_OUT + i_row, tl.max((latent != latent).to(tl.int32), 0))
    # Store codes and scales, or 16-bit latents; then the rotary part. Missing rows are 0, and their scales too.
    if SCALES_OUT is not None:
        codes, scale = quantize_row_to_e4m3_and_group_scales(latent, L_PAD, NATIVE_FP8_CAST)
        o_g = tl.arange(0, L_PAD // GROUP)
        tl.store(SCALES_OUT + o_g.to(tl.int64) * stride_scales_out + i_row, scale, mask=o_g < L // GROUP)
        tl.store(CODES_OR_LATENTS_OUT + i_row * L + o_l, codes, mask=o_l < L)
    else:
        tl.store(CODES_OR_LATENTS_OUT + i_row * L + o_l, latent.to(CODES_OR_LATENTS_OUT.dtype.element_ty), mask=o_l < L)
    k_pe = tl.load(p_k + o_r, mask=valid & (o_r < R), other=0)
    if STORAGE_KIND != "float":
        k_pe = fp8_to_fp32(k_pe, STORAGE_KIND, NATIVE_FP8_CAST) * kv_scale
    tl.store(K_PE_OUT + i_row * R + o_r, k_pe.to(tl.float32).to(K_PE_OUT.dtype.element_ty), mask=o_r < R)


# Its launch.


def make_gather_launch(
    f: SimpleNamespace, i_chunk: int, num_rows: int, max_rows: int, native_casts: bool, is_first_chunk: bool,
    use_pdl: bool,
) -> KernelLaunch:  # fmt: skip
    """Returns the launch for a chunk of `num_rows` rows, in buffers for `max_rows`. is_first_chunk: of the call."""
    output_tensors = tensor_args(
        BYTES, CODES_OR_LATENTS_OUT="CODES", SCALES_OUT="SCALES", K_PE_OUT="K_PE", WORK_COUNTER_OUT="WORK_COUNTER",
        MAY_HAVE_NAN_OUT="MAY_HAVE_NAN",
    )  # fmt: skip
    arguments = (
        latent_cache_and_page_table_args(f)
        | rope_query_and_cache_lens_args(f)
        | out_lse_and_dim_v_args(f)
        | chunk_offset_args(i_chunk)
    )
    arguments |= output_tensors | {
        "num_tokens": f.q.shape[0], "stride_scales_out": max_rows if f.kv_b_proj_scale is not None else 0,
        "BLOCK_H": min(_MAX_BLOCK_H, next_power_of_2(f.q.shape[1])), "STORAGE_KIND": k_pe_storage_kind(f.format),
        "NATIVE_FP8_CAST": native_casts, "ROPE_Q_AND_CLEAR_PADDING": is_first_chunk, "USE_PDL": use_pdl,
    }  # fmt: skip
    # Two warps: a row is short, and more programs wait for memory at a time.
    return KernelLaunch(
        gather_and_requantize_latents_kernel,
        (num_rows,),
        arguments,
        num_warps=2,
        enable_fp_fusion=False,
        launch_pdl=use_pdl,
    )
