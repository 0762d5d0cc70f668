"""Second stage of MLA prefill: a chunk's latent rows from the pages, quantised for the blockwise product, and its
rotary parts as dense rows in q's dtype, so that attention reads keys and values without a page table.

scale = min(amax, 1200) / 448 of 128 columns; code = e4m3(x · (1 / scale)), saturating; 0 where the scale is 0. Codes
and scales have the oracle's bits. Rows of no request (a chunk longer than its offsets say) are zero.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tersekv.formats import LATENT_GROUP, MAX_LATENT_AMAX

from ...host.launch import TENSOR, Template, next_power_of_2
from ..parts.quant import E4M3_MAX, divide, encode_fp8, largest, reciprocal
from ..parts.tiles import e4m3_bytes_to_fp16
from .prepare import ROPE_KINDS, request_of, slot_of

GROUP = tl.constexpr(LATENT_GROUP)
MAX_AMAX = tl.constexpr(MAX_LATENT_AMAX)
MAX_F32 = tl.constexpr(torch.finfo(torch.float32).max)


class Latents(NamedTuple):
    """Scratch that holds one chunk of up to M rows."""

    rows: Tensor  # [M, L] e4m3 codes, or q's dtype beside a 16-bit weight
    scales: Tensor | None  # [L/128, M] fp32; a row of latents is a column here, so that a tile reads it in one piece
    k_pe: Tensor  # [M, R] q's dtype


@triton.jit
def decode_fp8(code, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of e4m3 or e5m2 → fp32, exact."""
    if KIND == "e5m2":
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)  # the upper byte of an fp16
    elif NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return e4m3_bytes_to_fp16(code).to(tl.float32)


@triton.jit
def load_latent(
    CKV, SCALES, kv_scale, o_l, live, L: tl.constexpr, L_PAD: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr
):
    """A stored latent row, dequantised: fp32 [L_PAD]."""
    codes = tl.load(CKV + o_l, mask=live & (o_l < L), other=0)
    if SCALES is not None:
        o_g = tl.arange(0, L_PAD // GROUP)
        scale = tl.load(SCALES + o_g, mask=live & (o_g < L // GROUP), other=0.0)
        groups = tl.reshape(decode_fp8(codes, "e4m3", NATIVE), [L_PAD // GROUP, GROUP])
        return tl.reshape(groups * scale[:, None], [L_PAD])
    elif KIND == "float":
        return codes.to(tl.float32)
    else:
        return decode_fp8(codes, KIND, NATIVE) * kv_scale


@triton.jit
def quantise_groups(x, L_PAD: tl.constexpr, NATIVE: tl.constexpr):
    """(codes [L_PAD], scales [L_PAD / 128]) of a latent row; a NaN becomes 0x7F and leaves the scale alone."""
    x = tl.reshape(x, [L_PAD // GROUP, GROUP])
    scale = divide(tl.minimum(largest(x), MAX_AMAX), E4M3_MAX)
    # Below 2^-128 the reciprocal is infinite, and a zero beside such a value would become NaN.
    inverse = tl.minimum(reciprocal(scale), MAX_F32)
    y = tl.where((scale == 0)[:, None] & (x == x), 0.0, x * inverse[:, None])
    return tl.reshape(encode_fp8(y, False, NATIVE), [L_PAD]), scale


@triton.jit(do_not_specialize=["B", "max_pages"])
def gather_kernel(
    CKV, KPE, SCALES, TABLE, ROWS, STARTS, OUT, OUT_SCALES, OUT_PE, KV_SCALE, kv_scale, B, max_pages, P,
    stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss, stride_table, stride_os,
    S: tl.constexpr, L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr, R_PAD: tl.constexpr,
    KIND: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """One row of the chunk."""
    row = tl.program_id(0).to(tl.int64)
    b = request_of(ROWS, row, B)
    start = tl.load(ROWS + tl.minimum(b, B)).to(tl.int64)
    live = (b < B) & (row >= start)
    safe_b = tl.where(live, b, 0)
    position = tl.load(STARTS + safe_b, mask=live, other=0).to(tl.int64) + row - start
    page, entry, live = slot_of(TABLE, safe_b, position, live, max_pages, P, S, stride_table)
    if KV_SCALE is not None:
        kv_scale = tl.load(KV_SCALE)

    o_l, o_r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    p_s = SCALES
    if SCALES is not None:
        p_s = SCALES + page * stride_sp + entry * stride_ss
    x = load_latent(CKV + page * stride_cp + entry * stride_cs, p_s, kv_scale, o_l, live, L, L_PAD, KIND, NATIVE)
    if OUT_SCALES is not None:
        codes, scale = quantise_groups(x, L_PAD, NATIVE)
        o_g = tl.arange(0, L_PAD // GROUP)
        tl.store(OUT_SCALES + o_g * stride_os + row, scale, mask=o_g < L // GROUP)
        tl.store(OUT + row * L + o_l, codes, mask=o_l < L)
    else:
        tl.store(OUT + row * L + o_l, x.to(OUT.dtype.element_ty), mask=o_l < L)

    k_pe = tl.load(KPE + page * stride_kp + entry * stride_ks + o_r, mask=live & (o_r < R), other=0)
    if KIND != "float":
        k_pe = decode_fp8(k_pe, KIND, NATIVE) * kv_scale
    tl.store(OUT_PE + row * R + o_r, k_pe.to(tl.float32).to(OUT_PE.dtype.element_ty), mask=o_r < R)


def scratch(call: Any, rows: int) -> Latents:
    """Scratch for chunks of up to `rows` rows."""
    rank, rope = call.ckv.shape[-1], call.kpe.shape[-1]
    quantise, device = call.kv_b_proj_scale is not None, call.q.device
    return Latents(
        torch.empty(rows, rank, dtype=torch.float8_e4m3fn if quantise else call.q.dtype, device=device),
        torch.empty(rank // LATENT_GROUP, rows, dtype=torch.float32, device=device) if quantise else None,
        torch.empty(rows, rope, dtype=call.q.dtype, device=device),
    )


def gather(call: Any, chunk: int, rows: int, to: Latents, native_casts: bool) -> None:
    """Fill the first `rows` rows of `to` with a chunk's latents."""
    prepared(call, rows, to, native_casts)(*tensors(call, chunk, *to), call.kv_scale_t)


def tensors(call: Any, chunk: int, *to: Any) -> tuple[Any, ...]:
    """The tensors of a call in the order of the kernel's parameters, up to KV_SCALE. to: fields of `Latents`."""
    rows, starts = call.buffer_row_offsets, call.cache_offsets
    if chunk:
        rows, starts = rows[chunk], starts[chunk]
    return call.ckv, call.kpe, call.ckv_scale_cache, call.page_table, rows, starts, *to


def prepared(call: Any, rows: int, to: Latents, native_casts: bool) -> Template:
    """The launch for a chunk of `rows` rows and calls with the facts of this one."""
    rank, rope, scales = call.ckv.shape[-1], call.kpe.shape[-1], call.ckv_scale_cache
    scalars = (
        call.kv_scale, call.cache_lens.shape[0], call.page_table.shape[1], call.ckv.shape[0],
        *call.ckv.stride()[:2], *call.kpe.stride()[:2], *(scales.stride()[:2] if scales is not None else (0, 0)),
        call.page_table.stride(0), to.scales.stride(0) if to.scales is not None else 0,
    )  # fmt: skip
    constants = (
        call.ckv.shape[1], rank, rope, max(LATENT_GROUP, next_power_of_2(rank)), max(2, next_power_of_2(rope)),
        ROPE_KINDS.get(call.format, "float"), native_casts,
    )  # fmt: skip
    arguments = (*[TENSOR] * 10, *scalars, *constants)
    return Template(gather_kernel, (rows,), arguments, num_warps=1, enable_fp_fusion=False)
