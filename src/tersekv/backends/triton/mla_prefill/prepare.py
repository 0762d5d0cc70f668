"""First stage of MLA prefill: rotate the queries in place; rotate, norm and store the new tokens' latent rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ...host.bind import BYTES, Template, given, strides
from ...host.launch import next_power_of_2
from ..parts.latent_rows import MOST_HEADS, REQUESTS, of_rows, prepare_part, write_lengths
from ..parts.rows import take_turn


@triton.jit
def clear(
    OUT, LSE, t, o_h, H, stride_ot, stride_oh, stride_lt, stride_lh, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Heads o_h of output row t: 0, LSE -inf."""
    o_v, m_h = tl.arange(0, DV_PAD), o_h < H
    p_out = OUT + t * stride_ot + o_h.to(tl.int64)[:, None] * stride_oh + o_v[None, :]
    zero = tl.zeros([BLOCK_H, DV_PAD], OUT.dtype.element_ty)
    tl.store(p_out, zero, mask=m_h[:, None] & (o_v < DV)[None, :])
    if LSE is not None:
        p_lse = LSE + t * stride_lt + o_h.to(tl.int64) * stride_lh
        tl.store(p_lse, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=m_h)


@triton.jit(do_not_specialize=["B", "max_pages"])
def prepare_kernel(
    Q, Q_PE, SEQ_LENS, KV_C, K_PE, CKV, KPE, SCALES, OUT, LSE, TABLE, LENS, CU, FREQS, GAMMA, KV_SCALE, kv_scale,
    epsilon, B, H, max_pages, P, max_pos, stride_qt, stride_qh, stride_rt, stride_rh, stride_c, stride_pe, stride_cp,
    stride_cs, stride_kp, stride_ks, stride_sp, stride_ss, stride_ot, stride_oh, stride_lt, stride_lh, stride_table,
    stride_freqs,
    S: tl.constexpr, DN: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr,
    R_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, FORMAT: tl.constexpr,
    ROPE_KIND: tl.constexpr, NATIVE: tl.constexpr, ENDS: tl.constexpr, BLOCK_B: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) stores the latent row of token t; program (t, 1 + i) rotates the i-th block of its heads.

    ENDS: nothing is attended to, so that outputs are 0 and LSEs -inf, as they are for rows of no request. Q_PE,
    SEQ_LENS: where rotated parts and the requests' lengths go, if not into q and nowhere.
    """
    take_turn(OVERLAPS)
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1
    if SEQ_LENS is not None:  # noqa: SIM102 - known to the compiler, unlike the other
        if t + tl.program_id(1) == 0:
            write_lengths(SEQ_LENS, LENS, CU, B, 0, BLOCK_B)
    live = prepare_part(
        t, part, H, (Q, stride_qt, stride_qh), (Q_PE, stride_rt, stride_rh), (KV_C, K_PE, stride_c, stride_pe),
        (CKV, KPE, SCALES, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss),
        (GAMMA, epsilon, KV_SCALE, kv_scale),
        (TABLE, LENS, CU, FREQS, B, max_pages, P, max_pos, stride_table, stride_freqs),
        0, S, DN, R, L, L_PAD, R_PAD, BLOCK_H, FORMAT, ROPE_KIND, NATIVE, BLOCK_B,
    )  # fmt: skip
    if (part >= 0) & (ENDS or not live):
        o_h = part * BLOCK_H + tl.arange(0, BLOCK_H)
        clear(OUT, LSE, t, o_h, H, stride_ot, stride_oh, stride_lt, stride_lh, DV, DV_PAD, BLOCK_H)


def of_outputs(f: SimpleNamespace) -> dict[str, Any]:
    """Arguments of every kernel that clears outputs."""
    dim_v = f.out.shape[2]
    found = given(BYTES, OUT="out", LSE="lse") | strides(f.out, stride_o="th") | strides(f.lse, stride_l="th")
    return found | {"DV": dim_v, "DV_PAD": next_power_of_2(max(dim_v, 1))}


def prepared(
    f: SimpleNamespace, native_casts: bool, ends: bool = False, queries: bool = True, overlaps: bool = False
) -> Template:
    """The launch.

    ends:     nothing is attended to
    queries:  rotate them; else rows are stored, and somebody else sees to the queries
    overlaps: it may begin before the launch ahead of it has ended
    """
    tokens, heads = f.q.shape[:2]
    block_h = min(MOST_HEADS, next_power_of_2(max(heads, 1)))
    arguments = of_rows(f) | of_outputs(f) | given(BYTES, Q_PE="q_pe_out", SEQ_LENS="seq_lens_out") | {
        **strides(f.q_pe_out, stride_r="th"), "BLOCK_H": block_h, "NATIVE": native_casts, "ENDS": ends,
        "BLOCK_B": REQUESTS if queries else 0, "OVERLAPS": overlaps,
    }  # fmt: skip
    grid = (tokens, 1 + -(-heads // block_h) if queries else 1)
    options = {"launch_pdl": True} if overlaps else {}
    # Two warps for a row alone: it is short, and more programs wait for memory at a time.
    warps = 4 if queries else 2
    return Template(prepare_kernel, grid, arguments, num_warps=warps, enable_fp_fusion=False, **options)
