"""Second stage of MLA prefill: a chunk's latent rows from the pages, quantised for the blockwise product, and its
rotary parts as dense rows in q's dtype, so that attention reads keys and values without a page table.

scale = min(amax, 1200) / 448 of 128 columns; code = e4m3(x · (1 / scale)), saturating; 0 where the scale is 0. Codes
and scales have the oracle's bits. Rows of no request (a chunk longer than its offsets say) are zero.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl

from tersekv.formats import LATENT_GROUP

from ...host.bind import BYTES, Given, Template, given
from ..parts.latent_rows import of_cache, request_of, rotary_kind, slot_of
from ..parts.quant import E4M3_MAX, MAX_AMAX, MAX_F32, divide, encode_fp8, largest, reciprocal
from ..parts.tiles import e4m3_bytes_to_fp16

GROUP = tl.constexpr(LATENT_GROUP)


@triton.jit
def decode_fp8(code, KIND: tl.constexpr, NATIVE: tl.constexpr):
    """Bytes of e4m3 or e5m2 → fp32, exact."""
    if KIND == "e5m2":
        return (code.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)  # the upper byte of an fp16
    else:
        tl.static_assert(KIND == "e4m3", "a code that decode_fp8 does not know")
        if NATIVE:
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
        tl.store(OUT_SCALES + o_g.to(tl.int64) * stride_os + row, scale, mask=o_g < L // GROUP)
        tl.store(OUT + row * L + o_l, codes, mask=o_l < L)
    else:
        tl.store(OUT + row * L + o_l, x.to(OUT.dtype.element_ty), mask=o_l < L)

    k_pe = tl.load(KPE + page * stride_kp + entry * stride_ks + o_r, mask=live & (o_r < R), other=0)
    if KIND != "float":
        k_pe = decode_fp8(k_pe, KIND, NATIVE) * kv_scale
    tl.store(OUT_PE + row * R + o_r, k_pe.to(tl.float32).to(OUT_PE.dtype.element_ty), mask=o_r < R)


def places(f: SimpleNamespace, rows: int) -> dict[str, tuple[tuple[int, ...], torch.dtype] | None]:
    """What of the scratch holds one chunk of up to `rows` rows: CODES are of q's dtype beside a 16-bit weight.

    A row of latents is a column of SCALES, so that a tile reads it in one piece.
    """
    rank, quantise = f.ckv.shape[-1], f.kv_b_proj_scale is not None
    return {
        "CODES": ((rows, rank), torch.float8_e4m3fn if quantise else f.q.dtype),
        "SCALES": ((rank // LATENT_GROUP, rows), torch.float32) if quantise else None,
        "K_PE": ((rows, f.kpe.shape[-1]), f.q.dtype),
    }


def of_chunk(chunk: int) -> dict[str, Given]:
    """Whose rows lie where in a chunk."""
    return {"ROWS": Given("buffer_row_offsets", row=chunk), "STARTS": Given("cache_offsets", row=chunk)}


def prepared(f: SimpleNamespace, chunk: int, rows: int, most: int, native_casts: bool) -> Template:
    """The launch for a chunk of `rows` rows, in places for `most`."""
    arguments = of_cache(f) | of_chunk(chunk) | given(BYTES, OUT="CODES", OUT_SCALES="SCALES", OUT_PE="K_PE") | {
        "stride_os": most if f.kv_b_proj_scale is not None else 0, "KIND": rotary_kind(f.format),
        "NATIVE": native_casts,
    }  # fmt: skip
    return Template(gather_kernel, (rows,), arguments, num_warps=1, enable_fp_fusion=False)
