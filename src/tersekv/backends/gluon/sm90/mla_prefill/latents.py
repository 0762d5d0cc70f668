"""A chunk's latent rows for MLA prefill on Hopper: gathered and quantised as `gather_kernel` does, to the bit.

Its programs also see to what the launches behind them need: rotated queries, outputs of rows that belong to no request,
a cleared counter, and which rows may hold a NaN. New rows are stored by a launch of their own before: what one request
appends, another one of the same call may read as cached.
"""

from __future__ import annotations

from types import SimpleNamespace

import triton
import triton.language as tl

from ....host.bind import BYTES, Template, given
from ....host.launch import next_power_of_2
from ....triton.mla_prefill.gather import GROUP, decode_fp8, load_latent, of_chunk, quantise_groups
from ....triton.mla_prefill.prepare import clear, of_outputs
from ....triton.parts.latent_rows import of_cache, of_queries, request_of, rotary_kind, rotate, slot_of
from ....triton.parts.rows import take_turn

_BLOCK_H = 64  # heads that are cleared at a time


@triton.jit
def rotate_heads(
    Q, FREQS, LENS, CU, t, B, H, max_pos, stride_qt, stride_qh, stride_freqs,
    DN: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Rotate the rotary parts of all heads of token t, which a request has, in place."""
    b = request_of(CU, t, B)
    position = tl.load(LENS + b).to(tl.int64) + t - tl.load(CU + b).to(tl.int64)
    known = (position >= 0) & (position < max_pos)
    o_f = tl.arange(0, R_PAD)
    freqs = tl.load(FREQS + tl.where(known, position, 0) * stride_freqs + o_f, mask=known & (o_f < R), other=0.0)
    cos, sin = tl.split(tl.reshape(freqs, [R_PAD // 2, 2]))
    h = H * 0
    while h < H:
        o_h = h + tl.arange(0, BLOCK_H)
        p_q = Q + t * stride_qt + o_h.to(tl.int64)[:, None] * stride_qh + DN + o_f[None, :]
        m_q = (o_h < H)[:, None] & (o_f < R)[None, :]
        x = tl.load(p_q, mask=m_q, other=0.0)
        tl.store(p_q, rotate(x, cos, sin, BLOCK_H, R_PAD).to(Q.dtype.element_ty), mask=m_q)
        h += BLOCK_H


@triton.jit
def see_to_queries(
    Q, OUT, LSE, FREQS, LENS, CU, row, tokens, B, H, max_pos, stride_qt, stride_qh, stride_ot, stride_oh, stride_lt,
    stride_lh, stride_freqs, DN: tl.constexpr, R: tl.constexpr, R_PAD: tl.constexpr, DV: tl.constexpr,
    DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Of tokens row, row + programs, …: rows that belong to no request have defined outputs; others are rotated."""
    first, end = tl.load(CU).to(tl.int64), tl.load(CU + B).to(tl.int64)
    t = row
    while t < tokens:
        if (t < first) | (t >= end):
            h = H * 0
            while h < H:
                o_h = h + tl.arange(0, BLOCK_H)
                clear(OUT, LSE, t, o_h, H, stride_ot, stride_oh, stride_lt, stride_lh, DV, DV_PAD, BLOCK_H)
                h += BLOCK_H
        else:
            rotate_heads(
                Q, FREQS, LENS, CU, t, B, H, max_pos, stride_qt, stride_qh, stride_freqs, DN, R, R_PAD, BLOCK_H
            )
        t += tl.num_programs(0)


@triton.jit(do_not_specialize=["B", "max_pages", "tokens", "max_pos"])
def latents_kernel(
    Q, CKV, KPE, SCALES, FREQS, TABLE, LENS, CU, ROWS, STARTS, KV_SCALE, OUT, LSE, CODES, CODE_SCALES, OUT_PE, COUNTER,
    DIRTY, kv_scale, tokens, B, H, max_pages, P, max_pos, stride_qt, stride_qh, stride_cp, stride_cs, stride_kp,
    stride_ks, stride_sp, stride_ss, stride_ot, stride_oh, stride_lt, stride_lh, stride_table, stride_freqs, stride_os,
    S: tl.constexpr, DN: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, R: tl.constexpr, L_PAD: tl.constexpr,
    R_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, KIND: tl.constexpr, NATIVE: tl.constexpr,
    FIRST: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One row of the chunk. COUNTER's 4 numbers become 0; DIRTY [rows]: may the row hold a NaN. FIRST: of the call's
    chunks."""
    take_turn(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    tl.store(COUNTER + tl.arange(0, 4), tl.zeros([4], tl.int32), mask=row == 0)
    if FIRST:
        see_to_queries(
            Q, OUT, LSE, FREQS, LENS, CU, row, tokens, B, H, max_pos, stride_qt, stride_qh, stride_ot, stride_oh,
            stride_lt, stride_lh, stride_freqs, DN, R, R_PAD, DV, DV_PAD, BLOCK_H,
        )  # fmt: skip
    b = request_of(ROWS, row, B)
    start = tl.load(ROWS + tl.minimum(b, B)).to(tl.int64)
    live = (b < B) & (row >= start)
    safe_b = tl.where(live, b, 0)
    position = tl.load(STARTS + safe_b, mask=live, other=0).to(tl.int64) + row - start
    page, entry, live = slot_of(TABLE, safe_b, position, live, max_pages, P, S, stride_table)
    p_c = CKV + page * stride_cp + entry * stride_cs
    p_k = KPE + page * stride_kp + entry * stride_ks
    p_s = SCALES
    if SCALES is not None:
        p_s = SCALES + page * stride_sp + entry * stride_ss
    if KV_SCALE is not None:
        kv_scale = tl.load(KV_SCALE)

    o_l, o_r = tl.arange(0, L_PAD), tl.arange(0, R_PAD)
    x = load_latent(p_c, p_s, kv_scale, o_l, live, L, L_PAD, KIND, NATIVE)
    # Codes and scales are finite but for NaN, and bf16 holds every sum of them; other products may overflow.
    if CODE_SCALES is None or OUT_PE.dtype.element_ty == tl.float16:
        tl.store(DIRTY + row, 1)
    else:
        tl.store(DIRTY + row, tl.max((x != x).to(tl.int32), 0))
    if CODE_SCALES is not None:
        codes, scale = quantise_groups(x, L_PAD, NATIVE)
        o_g = tl.arange(0, L_PAD // GROUP)
        tl.store(CODE_SCALES + o_g.to(tl.int64) * stride_os + row, scale, mask=o_g < L // GROUP)
        tl.store(CODES + row * L + o_l, codes, mask=o_l < L)
    else:
        tl.store(CODES + row * L + o_l, x.to(CODES.dtype.element_ty), mask=o_l < L)
    k_pe = tl.load(p_k + o_r, mask=live & (o_r < R), other=0)
    if KIND != "float":
        k_pe = decode_fp8(k_pe, KIND, NATIVE) * kv_scale
    tl.store(OUT_PE + row * R + o_r, k_pe.to(tl.float32).to(OUT_PE.dtype.element_ty), mask=o_r < R)


def prepared(
    f: SimpleNamespace, chunk: int, rows: int, most: int, native_casts: bool, first: bool, overlaps: bool
) -> Template:
    """The launch for a chunk of `rows` rows, in places for `most`. first: of the call's chunks."""
    places = given(BYTES, CODES="CODES", CODE_SCALES="SCALES", OUT_PE="K_PE", COUNTER="COUNTER", DIRTY="DIRTY")
    arguments = of_cache(f) | of_queries(f) | of_outputs(f) | of_chunk(chunk) | places | {
        "tokens": f.q.shape[0], "stride_os": most if f.kv_b_proj_scale is not None else 0,
        "BLOCK_H": min(_BLOCK_H, next_power_of_2(f.q.shape[1])), "KIND": rotary_kind(f.format),
        "NATIVE": native_casts, "FIRST": first, "OVERLAPS": overlaps,
    }  # fmt: skip
    # Two warps: a row is short, and more programs wait for memory at a time.
    return Template(latents_kernel, (rows,), arguments, num_warps=2, enable_fp_fusion=False, launch_pdl=overlaps)
