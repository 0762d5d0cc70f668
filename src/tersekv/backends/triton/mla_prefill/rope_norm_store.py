"""First stage of MLA prefill: rotates the queries in place; rotates, norms and stores the new tokens' latent rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import triton
import triton.language as tl

from ...host.bind import BYTES, KernelLaunch, stride_args, tensor_args
from ...host.launch import next_power_of_2
from ..parts.latent_rows import (
    MAX_HEADS_PER_PROGRAM,
    REQUESTS_PER_STEP,
    latent_append_and_rope_args,
    store_latent_or_roped_heads_return_valid,
    store_seq_lens,
)
from ..parts.token_rows import pdl_early_launch_and_wait


@triton.jit
def store_empty_output(
    OUT, LSE, t, o_h, H, stride_ot, stride_oh, stride_lt, stride_lh, DV: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Stores 0 to heads o_h of output row t, and −inf to their LSEs."""
    o_v, m_h = tl.arange(0, DV_PAD), o_h < H
    p_out = OUT + t * stride_ot + o_h.to(tl.int64)[:, None] * stride_oh + o_v[None, :]
    zero = tl.zeros([BLOCK_H, DV_PAD], OUT.dtype.element_ty)
    tl.store(p_out, zero, mask=m_h[:, None] & (o_v < DV)[None, :])
    if LSE is not None:
        p_lse = LSE + t * stride_lt + o_h.to(tl.int64) * stride_lh
        tl.store(p_lse, tl.full([BLOCK_H], float("-inf"), tl.float32), mask=m_h)


@triton.jit(do_not_specialize=["B", "max_pages"])
def rope_norm_store_kernel(
    Q, Q_PE_OUT, SEQ_LENS_OUT, KV_C, K_PE, CKV, KPE, SCALES, OUT, LSE, PAGE_TABLE, CACHE_LENS, CU_SEQLENS_Q, FREQS_CIS,
    NORM_GAMMA, KV_SCALE, kv_scale,
    epsilon, B, H, max_pages, num_pages, max_pos, stride_qt, stride_qh, stride_rt, stride_rh, stride_c, stride_pe,
    stride_cp,
    stride_cs, stride_kp, stride_ks, stride_sp, stride_ss, stride_ot, stride_oh, stride_lt, stride_lh, stride_table,
    stride_freqs_cis,
    PAGE: tl.constexpr, DN: tl.constexpr, R: tl.constexpr, DV: tl.constexpr, L: tl.constexpr, L_PAD: tl.constexpr,
    R_PAD: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, FORMAT: tl.constexpr,
    K_PE_KIND: tl.constexpr, NATIVE_FP8_CAST: tl.constexpr, STORE_ALL_OUTPUTS_EMPTY: tl.constexpr,
    BLOCK_B: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, 0) stores the latent row of token t; program (t, 1 + i) rotates the i-th block of its heads.

    STORE_ALL_OUTPUTS_EMPTY: no attention follows: all outputs are 0 and LSEs −inf, as for rows of no request.
    Q_PE_OUT: rotated parts, None for in place; SEQ_LENS_OUT: the requests' lengths, or None.
    """
    pdl_early_launch_and_wait(USE_PDL)
    t, i_head_block = tl.program_id(0).to(tl.int64), tl.program_id(1) - 1
    if SEQ_LENS_OUT is not None:  # noqa: SIM102 - known to the compiler, unlike the other
        if t + tl.program_id(1) == 0:
            store_seq_lens(SEQ_LENS_OUT, CACHE_LENS, CU_SEQLENS_Q, B, 0, BLOCK_B)
    valid = store_latent_or_roped_heads_return_valid(
        t, i_head_block, H, (Q, stride_qt, stride_qh), (Q_PE_OUT, stride_rt, stride_rh), (KV_C, K_PE, stride_c,
        stride_pe), (CKV, KPE, SCALES, stride_cp, stride_cs, stride_kp, stride_ks, stride_sp, stride_ss),
        (NORM_GAMMA, epsilon, KV_SCALE, kv_scale),
        (PAGE_TABLE, CACHE_LENS, CU_SEQLENS_Q, FREQS_CIS, B, max_pages, num_pages, max_pos, stride_table,
         stride_freqs_cis),
        0, PAGE, DN, R, L, L_PAD, R_PAD, BLOCK_H, FORMAT, K_PE_KIND, NATIVE_FP8_CAST, BLOCK_B,
    )  # fmt: skip
    if (i_head_block >= 0) & (STORE_ALL_OUTPUTS_EMPTY or not valid):
        o_h = i_head_block * BLOCK_H + tl.arange(0, BLOCK_H)
        store_empty_output(OUT, LSE, t, o_h, H, stride_ot, stride_oh, stride_lt, stride_lh, DV, DV_PAD, BLOCK_H)


def out_lse_and_dim_v_args(f: SimpleNamespace) -> dict[str, Any]:
    """Returns arguments of every kernel that clears outputs."""
    dim_v = f.out.shape[2]
    found = (
        tensor_args(BYTES, OUT="out", LSE="lse") | stride_args(f.out, stride_o="th") | stride_args(f.lse, stride_l="th")
    )
    return found | {"DV": dim_v, "DV_PAD": next_power_of_2(max(dim_v, 1))}


def make_rope_norm_store_launch(
    f: SimpleNamespace, native_casts: bool, store_all_outputs_empty: bool = False, rope_queries: bool = True,
    use_pdl: bool = False,
) -> KernelLaunch:  # fmt: skip
    """Returns the launch.

    store_all_outputs_empty:  no attention follows
    rope_queries:             rotate them; else only rows are stored, and another kernel rotates the queries
    use_pdl:                  it may begin before the launch before it has ended
    """
    num_tokens, num_heads = f.q.shape[:2]
    block_h = min(MAX_HEADS_PER_PROGRAM, next_power_of_2(max(num_heads, 1)))
    arguments = latent_append_and_rope_args(f) | out_lse_and_dim_v_args(f) | tensor_args(BYTES, Q_PE_OUT="q_pe_out",
                                                                           SEQ_LENS_OUT="seq_lens_out") | {
        **stride_args(f.q_pe_out, stride_r="th"), "BLOCK_H": block_h, "NATIVE_FP8_CAST": native_casts,
        "STORE_ALL_OUTPUTS_EMPTY": store_all_outputs_empty,
        "BLOCK_B": REQUESTS_PER_STEP if rope_queries else 0, "USE_PDL": use_pdl,
    }  # fmt: skip
    grid = (num_tokens, 1 + -(-num_heads // block_h) if rope_queries else 1)
    options = {"launch_pdl": True} if use_pdl else {}
    # Two warps where only a row is stored: it is short, and more programs wait for memory at a time.
    warps = 4 if rope_queries else 2
    return KernelLaunch(rope_norm_store_kernel, grid, arguments, num_warps=warps, enable_fp_fusion=False, **options)
