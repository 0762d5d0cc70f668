"""Second stage of MLA prefill: loads a chunk's latent rows from the pages and quantizes them for the blockwise GEMM;
stores their rotary parts as dense rows in q's dtype, so that attention reads keys and values without a page table.

scale = min(amax, 1200) / 448 of 128 columns; code = e4m3(x · (1 / scale)), saturating; 0 where the scale is 0. Codes
and scales have the oracle's bits. Rows of no request (a chunk longer than its offsets say) are zero.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from tersekv.formats import LATENT_GROUP

from ...host.bind import BYTES, KernelLaunch, TensorArg, tensor_args
from ..parts.dequant import e4m3_bytes_to_fp16
from ..parts.latent_rows import (
    find_request_of_row_else_B,
    k_pe_storage_kind,
    latent_cache_and_page_table_args,
    lookup_page_slot_and_validity,
)
from ..parts.quant import E4M3_MAX, FP32_MAX, MAX_LATENT_AMAX, divide_rn, encode_fp8, reciprocal_rn, row_abs_max

GROUP = tl.constexpr(LATENT_GROUP)


@triton.jit
def fp8_to_fp32(code, STORAGE_KIND: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr):
    """Converts bytes of e4m3 or e5m2 to fp32, exactly."""
    if STORAGE_KIND == "e5m2":
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)  # the upper byte of an fp16
    else:
        tl.static_assert(STORAGE_KIND == "e4m3", "a code that decode_fp8 does not know")
        if NATIVE_FP8_CAST:
            return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return e4m3_bytes_to_fp16(code).to(tl.float32)


@triton.jit
def load_dequantized_latent_row(
    p_row, p_group_scales_or_none, kv_scale, valid, L: tl.constexpr, L_PAD: tl.constexpr, STORAGE_KIND: tl.constexpr,
    NATIVE_FP8_CAST: tl.constexpr,
):  # fmt: skip
    """Loads a stored latent row, dequantized: fp32 [L_PAD]."""
    o_l = tl.arange(0, L_PAD)
    codes = tl.load(p_row + o_l, mask=valid & (o_l < L), other=0)
    if p_group_scales_or_none is not None:
        o_g = tl.arange(0, L_PAD // GROUP)
        scale = tl.load(p_group_scales_or_none + o_g, mask=valid & (o_g < L // GROUP), other=0.0)
        groups = tl.reshape(fp8_to_fp32(codes, "e4m3", NATIVE_FP8_CAST), [L_PAD // GROUP, GROUP])
        return tl.reshape(groups * scale[:, None], [L_PAD])
    elif STORAGE_KIND == "float":
        return codes.to(tl.float32)
    else:
        return fp8_to_fp32(codes, STORAGE_KIND, NATIVE_FP8_CAST) * kv_scale


@triton.jit
def quantize_row_to_e4m3_and_group_scales(latent_row, L_PAD: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr):
    """Returns (codes [L_PAD], scales [L_PAD / 128]) of a latent row; NaN becomes 0x7F and does not affect the scale."""
    latent = tl.reshape(latent_row, [L_PAD // GROUP, GROUP])
    scale = divide_rn(tl.minimum(row_abs_max(latent), MAX_LATENT_AMAX), E4M3_MAX)
    # Below 2^-128 the reciprocal is infinite, and a zero beside such a value would become NaN.
    inv_scale = tl.minimum(reciprocal_rn(scale), FP32_MAX)
    scaled = tl.where((scale == 0)[:, None] & (latent == latent), 0.0, latent * inv_scale[:, None])
    return tl.reshape(encode_fp8(scaled, False, NATIVE_FP8_CAST), [L_PAD]), scale


@triton.jit(do_not_specialize=["B", "max_pages"])
def gather_and_requantize_latents_kernel(
    CKV, KPE, SCALES, PAGE_TABLE, CHUNK_ROW_OFFSETS, CACHE_OFFSETS, LATENTS_OUT, SCALES_OUT, K_PE_OUT, KV_SCALE,
    kv_scale, B, max_pages, num_pages,
    stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss, stride_table, stride_scales_out,
    PAGE: tl.constexpr, L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr,
    STORAGE_KIND: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr,
):  # fmt: skip
    """Gathers and quantizes one row of the chunk."""
    # Find the row's request, page and slot
    i_row = tl.program_id(0).to(tl.int64)
    b = find_request_of_row_else_B(CHUNK_ROW_OFFSETS, i_row, B)
    first_row = tl.load(CHUNK_ROW_OFFSETS + tl.minimum(b, B)).to(tl.int64)
    valid = (b < B) & (i_row >= first_row)
    i_request = tl.where(valid, b, 0)
    position = tl.load(CACHE_OFFSETS + i_request, mask=valid, other=0).to(tl.int64) + i_row - first_row
    page, page_slot, valid = lookup_page_slot_and_validity(
        PAGE_TABLE, i_request, position, valid, max_pages, num_pages, PAGE, stride_table
    )
    if KV_SCALE is not None:
        kv_scale = tl.load(KV_SCALE)

    o_l, o_r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    p_s = SCALES
    if SCALES is not None:
        p_s = SCALES + page * stride_sp + page_slot * stride_ss
    # Latent: dequantize, quantize for the GEMM
    latent = load_dequantized_latent_row(
        CKV + page * stride_cp + page_slot * stride_cs, p_s, kv_scale, valid, L, L_PAD, STORAGE_KIND,
        NATIVE_FP8_CAST,
    )  # fmt: skip
    if SCALES_OUT is not None:
        codes, scale = quantize_row_to_e4m3_and_group_scales(latent, L_PAD, NATIVE_FP8_CAST)
        o_g = tl.arange(0, L_PAD // GROUP)
        tl.store(SCALES_OUT + o_g.to(tl.int64) * stride_scales_out + i_row, scale, mask=o_g < L // GROUP)
        tl.store(LATENTS_OUT + i_row * L + o_l, codes, mask=o_l < L)
    else:
        tl.store(LATENTS_OUT + i_row * L + o_l, latent.to(LATENTS_OUT.dtype.element_ty), mask=o_l < L)

    # Rotary part
    k_pe = tl.load(KPE + page * stride_kp + page_slot * stride_ks + o_r, mask=valid & (o_r < R), other=0)
    if STORAGE_KIND != "float":
        k_pe = fp8_to_fp32(k_pe, STORAGE_KIND, NATIVE_FP8_CAST) * kv_scale
    tl.store(K_PE_OUT + i_row * R + o_r, k_pe.to(tl.float32).to(K_PE_OUT.dtype.element_ty), mask=o_r < R)


def gathered_chunk_workspace(
    f: SimpleNamespace, num_rows: int
) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """Returns the workspace tensors of one chunk of up to `num_rows` rows; beside a 16-bit weight CODES have q's dtype.

    A latent row's scales are a column of SCALES, so that a tile's scales are contiguous.
    """
    rank, quantize = f.ckv.shape[-1], f.kv_b_proj_scale is not None
    return {
        "CODES": ((num_rows, rank), torch.float8_e4m3fn if quantize else f.q.dtype),
        "SCALES": ((rank // LATENT_GROUP, num_rows), torch.float32) if quantize else None,
        "K_PE": ((num_rows, f.kpe.shape[-1]), f.q.dtype),
    }


def chunk_offset_args(i_chunk: int) -> dict[str, TensorArg]:
    """Returns the arguments that map rows of a chunk to requests."""
    return {
        "CHUNK_ROW_OFFSETS": TensorArg("buffer_row_offsets", row=i_chunk),
        "CACHE_OFFSETS": TensorArg("cache_offsets", row=i_chunk),
    }


def make_gather_launch(
    f: SimpleNamespace, i_chunk: int, num_rows: int, scales_stride: int, native_casts: bool
) -> KernelLaunch:
    """Returns the launch for a chunk of `num_rows` rows; SCALES: [L/128, scales_stride]."""
    outputs = tensor_args(BYTES, LATENTS_OUT="CODES", SCALES_OUT="SCALES", K_PE_OUT="K_PE")
    arguments = latent_cache_and_page_table_args(f) | chunk_offset_args(i_chunk) | outputs | {
        "stride_scales_out": scales_stride if f.kv_b_proj_scale is not None else 0,
        "STORAGE_KIND": k_pe_storage_kind(f.format),
        "NATIVE_FP8_CAST": native_casts,
    }  # fmt: skip
    return KernelLaunch(
        gather_and_requantize_latents_kernel, (num_rows,), arguments, num_warps=1, enable_fp_fusion=False
    )
